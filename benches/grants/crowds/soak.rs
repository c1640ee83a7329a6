//! Soak: everything together, for minutes.
//!
//! A fleet reports, a million tickets are live, requests name their EMs, and tickets are released or expire. An EM with
//! very many tickets unregisters in the middle.

use std::time::{Duration, Instant};

use tonic::Code;

use crate::{Failure, random::Random, sample::median};

use super::{
    callers::{KIND, PLENTY, ask, em, engine, granted, registration},
    findings::{Findings, millis},
    fleet::Fleet,
    open,
    stage::{CALM, OtherCall, Stage},
};

/// Number of tickets of the EM that unregisters.
const GOING: u64 = 300_000;

/// Rate of requests, with two and a half operations each: half load on a small machine.
const REQUESTS_PER_SECOND: f64 = 800.0;
/// Lock time of the tickets that expire.
const SHORT_TTL: Duration = Duration::from_secs(5);

const MINUTE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(200);

/// Timeout of the remaining expiries at the end.
const REST_LIMIT: Duration = Duration::from_secs(60);

/// Interval between two memory readings: large batches are visible for some seconds.
const LOOK: Duration = Duration::from_secs(1);

/// Maximum memory of the last minute, as a fraction of the second minute's.
const MEMORY_RATIO_MAX: f64 = 1.1;
/// Maximum increase of the p99 of requests over the calm phase, in milliseconds.
const MORE_MAX: f64 = 25.0;

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings, minutes: u64) -> Result<Option<i64>, Failure> {
    let fleet = Fleet::start(stage).await?;
    let going = stage.scaled(GOING);
    let plenty = registration(em(fleet.len())?, PLENTY)?;
    stage.callers.client(0).register(plenty).await?;
    stage.callers.grant(fleet.len(), going, going).await?;
    stage.tables.settle().await?;
    let (_, calm) = stage.others().during(CALM, std::future::pending::<()>()).await?;
    findings.measured("others in the calm: p99", "ms", millis(calm.times().p99));
    let work = all(stage, findings, &fleet, minutes);
    let (done, reports) = fleet.reports().during(MINUTE * 2 * u32::try_from(minutes)?, work).await?;
    findings.measured("reports: p99", "ms", millis(reports.times().p99));
    findings.measured("reports that failed", "", reports.failed as f64);
    findings.notes.extend(reports.error.map(|error| format!("the first report that failed: {error}")));
    done.transpose()?;
    check(findings, millis(calm.times().p99));
    let begun = Instant::now();
    let own = fleet.tickets();
    loop {
        let left = stage.tables.counted(KIND).await? - own;
        if left == 0 {
            return Ok(Some(own));
        }
        if begun.elapsed() > REST_LIMIT {
            findings.unfinished.push(format!("{left} tickets too many are left in the end"));
            return Ok(None);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Runs the load minute by minute.
async fn all(stage: &Stage, findings: &mut Findings, fleet: &Fleet, minutes: u64) -> Result<(), Failure> {
    let memory = stage.memory()?;
    for minute in 1..=minutes {
        let goes = minute == minutes / 2 + 1;
        let (mut gone, mut seen_memory) = (None, Vec::new());
        let work = async {
            let goes = async {
                if goes {
                    gone = Some(go(stage, fleet).await);
                }
            };
            // The readings never end, so the minute always has its full length.
            let look = async {
                loop {
                    seen_memory.extend(memory.above());
                    tokio::time::sleep(LOOK).await;
                }
            };
            tokio::join!(goes, look)
        };
        let (_, seen) = requests(stage, fleet).during(MINUTE, work).await?;
        match gone {
            Some(gone) => findings.measured("an EM with very many tickets is gone after", "s", gone?),
            None if goes => {
                findings.unfinished.push("an EM with very many tickets did not go in its minute".to_owned())
            }
            None => {}
        }
        let times = seen.times();
        memory.above().ok_or("the server has ended")?;
        let megabytes = median(seen_memory) + memory.idle;
        findings.measured("requests by minute", "/s", times.calls as f64 / MINUTE.as_secs_f64());
        findings.measured("requests by minute: p50", "ms", millis(times.p50));
        findings.measured(P99, "ms", millis(times.p99));
        findings.measured("requests by minute: the slowest", "ms", millis(times.max));
        findings.measured("requests that failed, by minute", "", seen.failed as f64);
        findings.measured(MEMORY, "MB", megabytes);
        findings.notes.extend(seen.error.map(|error| format!("minute {minute}, the first that failed: {error}")));
        eprintln!("  minute {minute} of {minutes}: p99 {:.1} ms, {megabytes:.0} MB", millis(times.p99));
    }
    Ok(())
}

const P99: &str = "requests by minute: p99";
const MEMORY: &str = "memory by minute";

/// Records whether the memory stays level and requests stay as fast as in the calm phase.
fn check(findings: &mut Findings, calm: f64) {
    let of = |name: &str| findings.figures.iter().find(|figure| figure.name == name);
    let p99 = of(P99).map(super::findings::Figure::median);
    let memory = of(MEMORY).and_then(|figure| {
        let second = figure.values.get(1).or(figure.values.first())?;
        Some(figure.values.last()? / second)
    });
    if let Some(p99) = p99 {
        findings.at_most("p99 of the minute in the middle, more than in the calm", "ms", p99 - calm, MORE_MAX);
    }
    if let Some(memory) = memory {
        findings.at_most("memory: last minute / second", "", memory, MEMORY_RATIO_MAX);
    }
}

/// Unregisters the EM with the most tickets. Returns the seconds until it is removed.
async fn go(stage: &Stage, fleet: &Fleet) -> Result<f64, Failure> {
    let (begun, em, client) = (Instant::now(), em(fleet.len())?, stage.callers.client(0));
    let is_gone = |code| code == Some(Code::NotFound);
    while client.unregister(&em).await.is_err_and(|error| !is_gone(error.code())) {
        tokio::time::sleep(POLL).await;
    }
    while client.em(&em).await.err().is_none_or(|error| !is_gone(error.code())) {
        tokio::time::sleep(POLL).await;
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Returns requests for EMs of the fleet. Most are whole lives; some tickets are released before a confirmation, and
/// some expire.
fn requests(stage: &Stage, fleet: &Fleet) -> open::OpenLoopLoad<impl FnMut(u64, Random) -> OtherCall + Send + 'static> {
    let (callers, fleet) = (stage.callers.clone(), fleet.clone());
    let call = move |number: u64, mut random: Random| -> OtherCall {
        let (client, em) = (callers.client(number), fleet.em(random.up_to(fleet.len())).clone());
        Box::pin(async move {
            let mut request = ask(em, random.up_to(super::callers::USERS))?;
            let fate = random.up_to(10);
            request.lock_ttl = (fate == 1).then_some(SHORT_TTL);
            let grant = granted(client.request_resource(&request).await?)?;
            let served = Instant::now();
            if fate > 4 {
                client.resource_inited(&grant.inited(request.user.clone(), engine(grant.ticket_id)?)).await?;
            }
            if fate > 1 {
                client.resource_released(&grant.released(request.user)).await?;
            }
            Ok(served)
        })
    };
    open::OpenLoopLoad { per_second: REQUESTS_PER_SECOND, call }
}
