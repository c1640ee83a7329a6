//! Figures of the replay, and the table at its end.

use std::{
    collections::BTreeMap,
    fmt::{self, Display, Formatter},
    time::Duration,
};

use rm_model::{refusal::Refusal, selector::Placement};

use super::{
    calls::{FinishedCall, Outcome},
    check::CheckResult,
    plan::{Answers, Checkpoint, Plan},
    replay::Terms,
    trace::{Amounts, Task, Trace},
};

/// Maximum number of violations in the table.
const VIOLATIONS_SHOWN_MAX: usize = 20;

/// A count, its digits in groups of three.
pub struct Thousands(pub u64);

impl Display for Thousands {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            count @ 0..1000 => write!(f, "{count}"),
            count => write!(f, "{},{:03}", Self(count / 1000), count % 1000),
        }
    }
}

/// Figures so far.
#[derive(Debug, Default)]
pub struct Tally {
    answers: Answers,
    /// Number of refusals by class.
    refused: BTreeMap<String, u64>,
    inited: u64,
    released: u64,
    /// Releases of tasks that were never scheduled, and whose tickets were still locked.
    cancelled: u64,
    repeats: u64,
    latencies: Vec<Duration>,
    peaks: BTreeMap<&'static str, (i64, Amounts)>,
    checks: usize,
    /// Duration of the replay, without the checks.
    pub elapsed: Duration,
    /// Longest delay of a step after its due time.
    pub behind: Duration,
    pub violations: Vec<String>,
}

impl Tally {
    pub fn add_call(&mut self, answered: FinishedCall, task: &Task) {
        match answered.outcome {
            Outcome::Granted(_) => self.answers.grant(task.need()),
            Outcome::Refused(refusal) => {
                self.answers.refuse(!refusal.is_of_em_alone());
                *self.refused.entry(class(&refusal)).or_default() += 1;
            }
            Outcome::Inited => self.inited += 1,
            Outcome::Released if task.scheduled.is_some() => self.released += 1,
            Outcome::Released => self.cancelled += 1,
            Outcome::Nothing => return,
        }
        self.latencies.push(answered.latency);
        self.repeats += u64::from(answered.repeats);
    }

    pub fn add_check(&mut self, checkpoint: &Checkpoint, checked: CheckResult) {
        self.checks += 1;
        self.violations.extend(checked.violations);
        self.peaks.extend(checkpoint.peaks.iter().map(|peak| (*peak, (checkpoint.at, checked.held))));
    }

    /// Returns true if at least as many tasks were granted as by first fit.
    pub fn grants_no_fewer(&self, first_fit: &Answers) -> bool {
        self.answers.granted >= first_fit.granted
    }

    /// Returns the dimensions of which less was granted than by first fit.
    pub fn less_than(&self, first_fit: &Answers) -> Vec<&'static str> {
        let amounts = self.answers.amounts.values().into_iter().zip(first_fit.amounts.values());
        let less = Amounts::NAMES.into_iter().zip(amounts).filter(|(_, (service, first_fit))| service < first_fit);
        less.map(|(name, _)| name).collect()
    }

    /// Returns true if no check failed and the service granted at least as many tasks as first fit. A packing service
    /// must also have placed at least as much of each dimension.
    pub fn is_good(&self, first_fit: &Answers, terms: Terms) -> bool {
        let packs = terms.placement == Some(Placement::Pack);
        let places_no_less = !packs || self.less_than(first_fit).is_empty();
        self.violations.is_empty() && self.grants_no_fewer(first_fit) && places_no_less
    }

    /// Returns the table, for display.
    pub fn report<'a>(&'a self, trace: &Trace, plan: &'a Plan, terms: Terms) -> Report<'a> {
        let (cluster, tasks) = (trace.cluster(), trace.tasks.len());
        Report { tally: self, cluster, tasks, first_fit: &plan.first_fit, terms }
    }
}

/// Returns the class of a refusal: what was short, in the words of the service, without the amounts.
fn class(refusal: &Refusal) -> String {
    let short: Vec<_> = refusal.shortfalls.iter().map(|short| short.dimension.to_string()).collect();
    let text = refusal.reason.split(" use ").next().unwrap_or_default();
    let ever = if refusal.never_fits { ", never fits" } else { "" };
    format!("{} short{ever} ({} {text})", short.join(" and "), refusal.code)
}

/// A tally as a table.
#[derive(Debug)]
pub struct Report<'a> {
    tally: &'a Tally,
    cluster: Amounts,
    tasks: usize,
    first_fit: &'a Answers,
    terms: Terms,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let tally = self.tally;
        self.answers(f)?;
        for (class, count) in &tally.refused {
            row(f, "", *count, class)?;
        }
        row(f, "inited", tally.inited, "")?;
        row(f, "released", tally.released, "")?;
        row(f, "cancelled", tally.cancelled, "released while still locked: never scheduled in the trace")?;
        self.peaks(f)?;
        self.speed(f)?;
        row(f, "checks", tally.checks as u64 + 1, "audits of all counters over the API")?;
        for violation in tally.violations.iter().take(VIOLATIONS_SHOWN_MAX) {
            writeln!(f, "  {violation}")?;
        }
        Ok(())
    }
}

impl Report<'_> {
    /// Writes the results of the service beside those of first fit, on the same nodes with the same limit.
    fn answers(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (service, first_fit) = (&self.tally.answers, self.first_fit);
        let line = |f: &mut Formatter<'_>, what: &str, service: &str, first_fit: &str| {
            writeln!(f, "{}", format!("{what:<16} {service:>14} {first_fit:>14}").trim_end())
        };
        let counts = |f: &mut Formatter<'_>, what: &str, service: u64, first_fit: u64| {
            line(f, what, &Thousands(service).to_string(), &Thousands(first_fit).to_string())
        };
        line(f, "", if self.terms.choose { "service chose" } else { "service" }, "first fit")?;
        counts(f, "granted", service.granted, first_fit.granted)?;
        counts(f, "refused by EM", service.refused_by_em, first_fit.refused_by_em)?;
        counts(f, "refused by limit", service.refused_by_limit, first_fit.refused_by_limit)?;
        for ((name, service), first_fit) in
            Amounts::NAMES.into_iter().zip(service.amounts.values()).zip(first_fit.amounts.values())
        {
            counts(f, name, service.unsigned_abs(), first_fit.unsigned_abs())?;
        }
        counts(f, "violations", self.tally.violations.len() as u64, 0)?;
        self.verdict(f)
    }

    fn verdict(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (service, first_fit) = (self.tally.answers.granted, self.first_fit.granted);
        let fewer = Thousands(first_fit.saturating_sub(service));
        let more = Thousands(service.saturating_sub(first_fit));
        match self.tally.grants_no_fewer(self.first_fit) {
            true => writeln!(f, "the service granted no fewer than first fit: {more} more")?,
            false => writeln!(f, "the service granted FEWER than first fit: {fewer} fewer")?,
        }
        if self.terms.placement == Some(Placement::Pack) {
            match &*self.tally.less_than(self.first_fit) {
                [] => writeln!(f, "packing placed no less of any dimension than first fit")?,
                less => writeln!(f, "packing placed LESS than first fit of {}", less.join(" and "))?,
            }
        }
        let refused = self.tally.answers.refused_by_em + self.tally.answers.refused_by_limit;
        let how = match self.terms.in_order {
            true => "every answer was compared with what was held at that moment",
            false => "every refusal was asked to explain itself",
        };
        writeln!(f, "{} answers, {} of them refusals: {how}", Thousands(self.tasks as u64), Thousands(refused))
    }

    fn peaks(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (index, name) in Amounts::NAMES.into_iter().enumerate() {
            let Some((at, held)) = self.tally.peaks.get(name) else { continue };
            let (held, all) = (held.values()[index], self.cluster.values()[index]);
            let share = held as f64 * 100.0 / all as f64;
            let text = format!("{name}, {share:.1} % of {}, at second {at}", Thousands(all.unsigned_abs()));
            let label = if self.terms.choose { "held" } else { "peak" };
            row(f, label, held.unsigned_abs(), &text)?;
        }
        Ok(())
    }

    fn speed(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (tally, mut latencies) = (self.tally, self.tally.latencies.clone());
        latencies.sort_unstable();
        let at = |share: usize| latencies.get(latencies.len().saturating_sub(1) * share / 100).copied();
        let millis = |share| at(share).unwrap_or_default().as_secs_f64() * 1e3;
        let rate = latencies.len() as f64 / tally.elapsed.as_secs_f64().max(f64::EPSILON);
        let seconds = tally.elapsed.as_secs_f64();
        let text =
            format!("in {seconds:.1} s, {} a second, {} repeated", Thousands(rate.round() as u64), tally.repeats);
        row(f, "calls", latencies.len() as u64, &text)?;
        let [median, most, longest] = [50, 99, 100].map(millis);
        let label = "latency";
        writeln!(f, "{label:<10} half within {median:.1} ms, 99 % within {most:.1} ms, all within {longest:.1} ms")?;
        match tally.behind.as_secs_f64() {
            behind if behind < 0.1 => Ok(()),
            behind => writeln!(f, "{:<10} up to {behind:.1} s: the replay could not keep this --speed", "behind"),
        }
    }
}

fn row(f: &mut Formatter<'_>, what: &str, count: u64, text: &str) -> fmt::Result {
    let line = format!("{what:<10} {:>13}  {text}", Thousands(count).to_string());
    writeln!(f, "{}", line.trim_end())
}
