//! Table of the results, for display.

use std::{fmt::Write as _, time::Duration};

use crate::{
    Workload,
    churn::Churn,
    floors::Floor,
    plan::Subject,
    ratios::{Ratio, RatioTarget},
    results::{Latency, Results, Series},
};

use super::{Report, ratio, thousands};

pub(super) fn render(report: &Report<'_>) -> String {
    let results = &report.results;
    let mut text = String::new();
    if !results.series.is_empty() {
        text.push_str(&heading());
        results.series.iter().for_each(|series| text.push_str(&row(results, series)));
        text.push_str("processor time is the load generator's (or pgbench's) + the servers' + PostgreSQL's\n\n");
    }
    results.churns.iter().for_each(|churn| text.push_str(&minutes(churn)));
    report.ratios.iter().for_each(|ratio| text.push_str(&line(ratio)));
    let met = report.ratios.iter().filter_map(Ratio::met);
    let (met, wanted) = met.fold((0, 0), |(met, wanted), is_met| (met + u32::from(is_met), wanted + 1));
    text.push_str(&format!("{met} of {wanted} are as wanted\n\n"));
    for checked in &results.checked {
        text.push_str(&format!("{}\n", checked.text));
    }
    text.push_str(&format!("{} calls failed\n\n", thousands(results.errors() as f64)));
    text.push_str(&format!("{}, {:.0} s\n{}", report.date, report.duration.as_secs_f64(), report.machine));
    text
}

fn heading() -> String {
    format!(
        "{:<8} {:<22} {:>7} {:>9} {:>17} {:>8} {:>8} {:>8} {:>8}  {:<15} {:>7}\n",
        "where", "what", "callers", "ops/s", "min-max", "x floor", "p50 ms", "p99 ms", "p99.9", "cpu µs/op", "WAL/op"
    )
}

fn row(results: &Results, series: &Series) -> String {
    let step = series.step;
    let place = if step.subject == Subject::Empty { "-" } else { step.workload.name() };
    let callers = if step.callers == 0 { "-".to_owned() } else { step.callers.to_string() };
    let (least, most) =
        series.rates().fold((f64::INFINITY, 0.0), |(least, most), rate| (rate.min(least), rate.max(most)));
    let time = |of: fn(Latency) -> Option<Duration>| {
        series.latency().and_then(of).map_or_else(|| "-".into(), |time| format!("{:.2}", 1e3 * time.as_secs_f64()))
    };
    let (cpu, wal) = series.cost().map_or_else(Default::default, |cost| {
        let cpu = format!("{:.0}+{:.0}+{:.0}", cost.load, cost.server, cost.postgresql);
        (cpu, thousands(cost.wal_bytes))
    });
    let mut text = format!(
        "{place:<8} {:<22} {callers:>7} {:>9} {:>17} {:>8} {:>8} {:>8} {:>8}  {cpu:<15} {wal:>7}",
        step.subject.name(),
        thousands(series.rate()),
        format!("{}-{}", thousands(least), thousands(most)),
        to_floor(results, series).map_or_else(|| "-".into(), ratio),
        time(|latency| Some(latency.p50)),
        time(|latency| Some(latency.p99)),
        time(|latency| latency.p999),
    );
    if let Some(least) = series.least_share() {
        text.push_str(&format!("  least instance: {:.0} % of its share", 100.0 * least));
    }
    if series.errors() > 0 {
        text.push_str(&format!("  {} FAILED", series.errors()));
    }
    format!("{}\n", text.trim_end())
}

fn to_floor(results: &Results, series: &Series) -> Option<f64> {
    let floor = results.best(Subject::Floor(Floor::ForUpdate), series.step.workload)?;
    (series.step.subject != Subject::Empty).then(|| series.part_of(floor))
}

fn minutes(churn: &Churn) -> String {
    let mut text = format!("churn, {}, grants/s by minute (lock table with index):", churn.workload.name());
    for minute in &churn.minutes {
        let size = minute.lock_table_bytes / 1024;
        // Writing to a string does not fail.
        let _ = write!(text, " {} ({size} kB)", thousands(minute.grants_per_second));
    }
    text + "\n\n"
}

fn line(of: &Ratio) -> String {
    let wanted = of.wanted.map_or_else(String::new, |wanted: RatioTarget| {
        let verdict = if of.met() == Some(true) { "met" } else { "NOT MET" };
        format!("wanted {} {:<5} {verdict}", wanted.sign(), wanted.bound())
    });
    let text = format!("{:<52} {:>7}   {wanted}", of.name, ratio(of.value));
    format!("{}\n", text.trim_end())
}

impl Workload {
    pub fn name(self) -> &'static str {
        match self {
            Self::Hot => "hot EM",
            Self::Spread => "100 EMs",
        }
    }
}
