//! The report: a table of everything, and the lines that matter.

use std::{fmt::Write as _, time::Duration};

use crate::{
    Workload,
    rounds::{Results, Series, Subject},
};

/// The callers whose rates are compared: many should not be slower than some.
const SOME: u64 = 16;
const MANY: u64 = 1024;

/// Everything that was measured, for people.
pub(crate) fn render(results: &Results) -> String {
    let mut text = format!(
        "{:<8} {:<13} {:>7} {:>9} {:>19} {:>8} {:>9} {:>9}\n",
        "where", "what", "callers", "ops/s", "min-max", "x floor", "p50 ms", "p99 ms"
    );
    for series in &results.series {
        text.push_str(&row(results, series));
    }
    for workload in &results.workloads {
        text.push_str(&headlines(results, *workload).unwrap_or_default());
    }
    text.push('\n');
    text.push_str(&results.checked);
    text
}

fn row(results: &Results, series: &Series) -> String {
    let (what, place) = match series.subject {
        Subject::ForUpdate => ("for_update", series.workload.name()),
        Subject::Service => ("linkis-rm", series.workload.name()),
        Subject::Limited => ("with limits", series.workload.name()),
        Subject::Empty => ("empty handler", "-"),
    };
    let rates = || series.samples.iter().map(|sample| sample.rate);
    let (least, most) = (rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
    let floor = results.best(Subject::ForUpdate, series.workload).filter(|_| series.subject != Subject::Empty);
    let ratio = floor.map_or_else(|| "-".into(), |floor| format!("{:.2}", series.rate() / floor.rate()));
    let times = |time: Option<Duration>| time.map_or_else(|| "-".into(), milliseconds);
    format!(
        "{place:<8} {what:<13} {:>7} {:>9} {:>19} {ratio:>8} {:>9} {:>9}\n",
        series.callers,
        thousands(series.rate()),
        format!("{}-{}", thousands(least), thousands(most)),
        times(series.p50()),
        times(series.p99()),
    )
}

/// The lines that matter about one workload.
fn headlines(results: &Results, workload: Workload) -> Option<String> {
    let floor = results.best(Subject::ForUpdate, workload)?;
    let best = results.best(Subject::Service, workload)?;
    let alone = results.find(Subject::Service, workload, 1)?;
    let alone_floor = results.find(Subject::ForUpdate, workload, 1)?;
    let empty = results.find(Subject::Empty, results.workloads[0], best.callers)?;
    let (some, many) =
        (results.find(Subject::Service, workload, SOME)?, results.find(Subject::Service, workload, MANY)?);
    let mut text = format!(
        "\n{}: {:.1} x for_update ({}/s with {} at once; floor {}/s with {})\n",
        workload.name(),
        best.rate() / floor.rate(),
        thousands(best.rate()),
        best.callers,
        thousands(floor.rate()),
        floor.callers,
    );
    let share = 100.0 * best.rate() / empty.rate();
    writeln!(
        text,
        "  share of the empty handler: {share:.0} % (of {}/s with {} at once)",
        thousands(empty.rate()),
        empty.callers
    )
    .ok()?;
    if let Some(limited) = results.best(Subject::Limited, workload) {
        let share = 100.0 * limited.rate() / best.rate();
        writeln!(text, "  with three limited scopes: {}/s, {share:.0} % of that without", thousands(limited.rate()))
            .ok()?;
    }
    writeln!(text, "  {MANY} callers: {:.2} x the rate of {SOME}", many.rate() / some.rate()).ok()?;
    let (p50, floor_p50) = (alone.p50()?, alone_floor.p50()?);
    writeln!(
        text,
        "  one caller p50 {} ms (p99 {} ms): {:.1} x for_update p50 {} ms at one client",
        milliseconds(p50),
        milliseconds(alone.p99()?),
        p50.as_secs_f64() / floor_p50.as_secs_f64(),
        milliseconds(floor_p50),
    )
    .ok()?;
    Some(text)
}

impl Results {
    fn find(&self, subject: Subject, workload: Workload, callers: u64) -> Option<&Series> {
        self.of(subject, workload).find(|series| series.callers == callers)
    }

    fn best(&self, subject: Subject, workload: Workload) -> Option<&Series> {
        self.of(subject, workload).max_by(|a, b| a.rate().total_cmp(&b.rate()))
    }

    fn of(&self, subject: Subject, workload: Workload) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(move |series| series.subject == subject && series.workload == workload)
    }
}

impl Series {
    fn rate(&self) -> f64 {
        median(self.samples.iter().map(|sample| sample.rate).collect())
    }

    fn p50(&self) -> Option<Duration> {
        let times: Option<Vec<f64>> = self.samples.iter().map(|s| Some(s.latency?.p50.as_secs_f64())).collect();
        times.map(|times| Duration::from_secs_f64(median(times)))
    }

    fn p99(&self) -> Option<Duration> {
        let times: Option<Vec<f64>> = self.samples.iter().map(|s| Some(s.latency?.p99.as_secs_f64())).collect();
        times.map(|times| Duration::from_secs_f64(median(times)))
    }
}

/// The value in the middle, or between the two there; zero of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = |index: usize| values.get(index).copied().unwrap_or_default();
    (middle(values.len().saturating_sub(1) / 2) + middle(values.len() / 2)) / 2.0
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2}", 1000.0 * time.as_secs_f64())
}

/// A whole number with a comma after every three digits.
pub(crate) fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
