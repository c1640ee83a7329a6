//! JSON report of all results. Rates are operations per second, durations are milliseconds.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    churn::Churn,
    plan::Subject,
    ratios::Ratio,
    results::{Latency, Series},
};

use super::Report;

pub(super) fn render(report: &Report<'_>) -> String {
    let (arguments, results) = (report.arguments, &report.results);
    let value = json!({
        "date": report.date,
        "duration_seconds": report.duration.as_secs_f64(),
        "machine": report.machine,
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "ratios": report.ratios.iter().map(ratio).collect::<Vec<_>>(),
        "series": results.series.iter().map(series).collect::<Vec<_>>(),
        "churn": results.churns.iter().map(churn).collect::<Vec<_>>(),
        "calls_failed": results.errors(),
        "correct": results.correct(),
        "checked": results.checked.iter().map(|checked| &checked.text).collect::<Vec<_>>(),
    });
    format!("{value:#}\n")
}

fn ratio(ratio: &Ratio) -> Value {
    let wanted = ratio.wanted.map(|wanted| json!({ "sign": wanted.sign(), "bound": wanted.bound() }));
    json!({ "name": ratio.name, "value": ratio.value, "wanted": wanted, "met": ratio.met() })
}

fn series(series: &Series) -> Value {
    let step = series.step;
    let cost = series.cost().map(|cost| {
        json!({
            "load_cpu_micros": cost.load,
            "server_cpu_micros": cost.server,
            "postgresql_cpu_micros": cost.postgresql,
            "wal_bytes": cost.wal_bytes,
        })
    });
    json!({
        "what": step.subject.name(),
        "where": (step.subject != Subject::Empty).then(|| step.workload.name()),
        "callers": (step.callers > 0).then_some(step.callers),
        "rate": series.rate(),
        "rates": series.rates().collect::<Vec<_>>(),
        "latency": series.latency().map(latency),
        "cost_per_operation": cost,
        "least_instance_share": series.least_share(),
        "calls_failed": series.errors(),
        "first_error": series.samples.iter().find_map(|sample| sample.error.as_ref()),
    })
}

fn latency(latency: Latency) -> Value {
    let millis = |time: Duration| 1e3 * time.as_secs_f64();
    json!({ "p50": millis(latency.p50), "p99": millis(latency.p99), "p999": latency.p999.map(millis) })
}

fn churn(churn: &Churn) -> Value {
    let minutes = churn.minutes.iter().map(
        |minute| json!({ "grants_per_second": minute.grants_per_second, "lock_table_bytes": minute.lock_table_bytes }),
    );
    json!({ "where": churn.workload.name(), "minutes": minutes.collect::<Vec<_>>() })
}
