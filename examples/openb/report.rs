//! What is counted while the replay runs, and the table at its end.

use std::{
    collections::BTreeMap,
    fmt::{self, Formatter},
    time::Duration,
};

use indicatif::{HumanCount, HumanFloatCount};
use linkis_rm::domain::refusal::Refusal;

use super::{
    calls::{Answered, Outcome},
    check::Checked,
    plan::Checkpoint,
    trace::Amounts,
};

/// How many violations are told one by one.
const VIOLATIONS_SHOWN_MAX: usize = 20;

/// What has happened so far.
#[derive(Debug, Default)]
pub struct Tally {
    granted: u64,
    /// By class.
    refused: BTreeMap<String, u64>,
    inited: u64,
    released: u64,
    /// Released by tasks that never were scheduled: still locked.
    cancelled: u64,
    repeats: u64,
    latencies: Vec<Duration>,
    peaks: BTreeMap<&'static str, (i64, Amounts)>,
    checks: usize,
    /// Without the time that checks took.
    pub elapsed: Duration,
    /// The longest that a step began after it was due.
    pub behind: Duration,
    pub violations: Vec<String>,
}

impl Tally {
    pub fn add_call(&mut self, answered: Answered, was_scheduled: bool) {
        match answered.outcome {
            Outcome::Granted => self.granted += 1,
            Outcome::Refused(refusal) => *self.refused.entry(class(&refusal)).or_default() += 1,
            Outcome::Inited => self.inited += 1,
            Outcome::Released if was_scheduled => self.released += 1,
            Outcome::Released => self.cancelled += 1,
            Outcome::Nothing => return,
        }
        self.latencies.push(answered.latency);
        self.repeats += u64::from(answered.repeats);
    }

    pub fn add_check(&mut self, checkpoint: &Checkpoint, checked: Checked) {
        self.checks += 1;
        self.violations.extend(checked.violations);
        self.peaks.extend(checkpoint.peaks.iter().map(|peak| (*peak, (checkpoint.at, checked.held))));
    }

    /// The table for people.
    pub fn report(&self, cluster: Amounts) -> Report<'_> {
        Report { tally: self, cluster }
    }
}

/// What was short first, in the words of the service, without the amounts.
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
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let tally = self.tally;
        row(f, "granted", tally.granted, "")?;
        row(f, "refused", tally.refused.values().sum(), "")?;
        for (class, count) in &tally.refused {
            row(f, "", *count, class)?;
        }
        row(f, "inited", tally.inited, "")?;
        row(f, "released", tally.released, "")?;
        row(f, "cancelled", tally.cancelled, "released while still locked: never scheduled in the trace")?;
        self.peaks(f)?;
        self.speed(f)?;
        row(f, "checks", tally.checks as u64 + 1, "of every counter against all tickets, over the API")?;
        row(f, "violations", tally.violations.len() as u64, "")?;
        for violation in tally.violations.iter().take(VIOLATIONS_SHOWN_MAX) {
            writeln!(f, "  {violation}")?;
        }
        Ok(())
    }
}

impl Report<'_> {
    fn peaks(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (index, name) in Amounts::NAMES.into_iter().enumerate() {
            let Some((at, held)) = self.tally.peaks.get(name) else { continue };
            let (held, all) = (held.values()[index], self.cluster.values()[index]);
            let share = held as f64 * 100.0 / all as f64;
            let text = format!("{name}, {share:.1} % of {}, at second {at}", HumanCount(all.unsigned_abs()));
            row(f, "peak", held.unsigned_abs(), &text)?;
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
        let text = format!("in {seconds:.1} s, {:.0} a second, {} repeated", HumanFloatCount(rate), tally.repeats);
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
    let line = format!("{what:<10} {:>13}  {text}", HumanCount(count).to_string());
    writeln!(f, "{}", line.trim_end())
}
