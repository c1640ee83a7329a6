//! Churn: whole ticket lives for minutes, while dead rows fill the tables. The result shows whether the rate stays
//! level.

use std::time::{Duration, Instant};

use crate::{
    Failure, Workload,
    load::{Job, WARM_UP, Work},
    plan::ENOUGH,
    report::thousands,
    service::Service,
};

const INTERVAL: Duration = Duration::from_secs(10);
const INTERVALS_PER_MINUTE: u64 = 6;
const OPERATIONS_PER_LIFE: f64 = 3.0;

/// Result of one workload.
#[derive(Debug)]
pub(crate) struct Churn {
    pub workload: Workload,
    pub minutes: Vec<Minute>,
    pub errors: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Minute {
    pub grants_per_second: f64,
    /// Size of the table of resource locks with its index at the end of the minute, in bytes.
    pub lock_table_bytes: i64,
}

impl Churn {
    /// Returns the last minute's rate as a fraction of the first's; `None` for a single minute.
    pub fn kept(&self) -> Option<f64> {
        let (first, others) = self.minutes.split_first()?;
        Some(others.last()?.grants_per_second / first.grants_per_second)
    }
}

/// Runs one workload for `minutes`.
pub(crate) async fn run(service: &Service, workload: Workload, minutes: u64) -> Result<Churn, Failure> {
    let calls = service.load().start(Job { work: Work::Lives, workload, callers: ENOUGH, instances: 1 });
    tokio::time::sleep(WARM_UP).await;
    let mut seen = Vec::new();
    for minute in 1..=minutes {
        let (begun, before) = (Instant::now(), calls.done());
        let rate = || (calls.done() - before) as f64 / OPERATIONS_PER_LIFE / begun.elapsed().as_secs_f64();
        for interval in 1..=INTERVALS_PER_MINUTE {
            tokio::time::sleep(INTERVAL).await;
            let left = (minutes - minute) * 60 + (INTERVALS_PER_MINUTE - interval) * INTERVAL.as_secs();
            let place = workload.name();
            eprintln!("{left:>5} s left, churn, {place}: minute {minute} of {minutes}, {}/s", thousands(rate()));
        }
        let grants_per_second = rate();
        if grants_per_second == 0.0 {
            let ended = calls.finish().await?;
            return Err(format!("nothing was answered for a minute: {}", ended.error.unwrap_or_default()).into());
        }
        seen.push(Minute { grants_per_second, lock_table_bytes: service.lock_table_bytes().await? });
    }
    let ended = calls.finish().await?;
    if let Some(error) = ended.error {
        eprintln!("  {} calls failed; the first: {error}", ended.errors);
    }
    Ok(Churn { workload, minutes: seen, errors: ended.errors })
}
