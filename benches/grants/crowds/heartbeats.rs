//! Crowd `heartbeats`: EMs that report every ten seconds, each with the tickets of its engines.

use std::time::{Duration, Instant};

use crate::{Failure, meter::Meter};

use super::{
    findings::{Findings, millis},
    fleet::Fleet,
    stage::Stage,
};

/// Maximum processor time of server and PostgreSQL at full size, in percent of one core.
const PERCENT_MAX: f64 = 15.0;

const WINDOW: Duration = Duration::from_secs(20);
const IDLE_WINDOW: Duration = Duration::from_secs(5);

/// Time for the first report of each EM, whose tickets are compared one by one.
const FIRST_WINDOW: Duration = Duration::from_secs(12);

/// Timeout above the window, which ends on its own.
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let fleet = Fleet::start(stage).await?;
    stage.tables.settle().await?;
    fleet.reports().during(FIRST_WINDOW, std::future::pending::<()>()).await?;
    let mut meter = Meter::new(stage.database(), vec![stage.process_id()]).await?;
    for _ in 0..stage.options.rounds {
        let nothing = async {
            tokio::time::sleep(IDLE_WINDOW).await;
            Ok(())
        };
        let (idle, ()) = percent(&mut meter, nothing).await?;
        let reports = fleet.reports().during(WINDOW, std::future::pending::<()>());
        let (busy, (_, seen)) = percent(&mut meter, reports).await?;
        findings.measured("server and PostgreSQL without calls", "% of a core", idle);
        let (name, bound) = ("heartbeats: server and PostgreSQL, additional", PERCENT_MAX * stage.options.scale);
        findings.at_most(name, "% of a core", busy - idle, bound);
        let times = seen.times();
        findings.measured("heartbeats answered", "/s", times.calls as f64 / WINDOW.as_secs_f64());
        findings.measured("heartbeats: p50", "ms", millis(times.p50));
        findings.measured("heartbeats: p99", "ms", millis(times.p99));
        findings.measured("heartbeats that failed", "", seen.failed as f64);
        if let Some(error) = seen.error {
            findings.wrong.push(format!("heartbeats failed; the first: {error}"));
        }
        let name = format!("{} EMs report with their tickets", fleet.len());
        let reports = fleet.reports().during(WINDOW / 2, std::future::pending::<()>());
        stage.pair(findings, &name, LIMIT, reports).await?;
    }
    Ok(Some(fleet.tickets()))
}

/// Runs `work`. Returns the processor time of server and PostgreSQL meanwhile, in percent of one core.
async fn percent<T>(meter: &mut Meter, work: impl Future<Output = Result<T, Failure>>) -> Result<(f64, T), Failure> {
    let (before, begun) = (meter.read().await?, Instant::now());
    let done = work.await?;
    let elapsed = begun.elapsed();
    let cost = meter.read().await?.since(before, 1);
    Ok((100.0 * (cost.server + cost.postgresql) / 1e6 / elapsed.as_secs_f64(), done))
}
