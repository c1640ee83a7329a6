//! Crowd `deadlines`: tickets whose deadlines all fall into the same two seconds.

use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use crate::Failure;

use super::{
    callers::{KIND, ask, em, granted},
    findings::Findings,
    stage::{CALM, Stage},
};

const FEW: u64 = 40_000;
const FEW_LIMIT: Duration = Duration::from_secs(60);
const FEW_SECONDS_MAX: f64 = 5.0;

const MANY: u64 = 500_000;
const MANY_LIMIT: Duration = Duration::from_secs(240);
/// Minimum rate of expiry, as a fraction of the rate of grants on an idle service.
const IDLE_RATIO_MIN: f64 = 0.7;
const BESIDE_RATIO_MIN: f64 = 0.3;

const SPREAD: Duration = Duration::from_secs(2);
const EMS: u64 = 100;
const POLL: Duration = Duration::from_millis(100);

/// Time between the preparation and the first deadline: the calm phase and a margin.
const BEFORE: Duration = Duration::from_secs(4);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    stage.callers.register(EMS).await?;
    let idle = stage.rate_of_grants().await?;
    findings.measured("grants on an idle service", "/s", idle);
    let few = stage.scaled(FEW);
    for _ in 0..stage.options.rounds {
        let first = deal(stage, few, idle).await?;
        let name = format!("{few} tickets fall due within 2 s");
        let left = AtomicI64::new(0);
        tokio::time::sleep_until((first - CALM - BEFORE / 2).into()).await;
        let all_back = stage.pair(findings, &name, FEW_LIMIT, drained(stage, first, &left)).await?;
        let Some(all_back) = all_back else {
            findings.unfinished.push(format!("{name}: {} still locked at the time limit", left.load(Relaxed)));
            return Ok(None);
        };
        findings.at_most(format!("{name}: all back, after the first deadline"), "s", all_back, FEW_SECONDS_MAX);
    }
    many(stage, findings, idle).await
}

/// Expires many tickets at the same time: alone, beside others at half load, and beside a full load.
async fn many(stage: &Stage, findings: &mut Findings, idle: f64) -> Result<Option<i64>, Failure> {
    let many = stage.scaled(MANY);
    let left = AtomicI64::new(0);
    let late = |how: &str| format!("{many} at once, {how}: {} still locked at the time limit", left.load(Relaxed));

    let first = deal(stage, many, idle).await?;
    let Ok(alone) = tokio::time::timeout(BEFORE + CALM + MANY_LIMIT, drained(stage, first, &left)).await else {
        findings.unfinished.push(late("alone"));
        return Ok(None);
    };
    let rate = many as f64 / alone?;
    findings.measured(format!("{many} at once, alone: taken back"), "/s", rate);
    findings.at_least(format!("{many} at once, alone: of the rate of grants"), "", rate / idle, IDLE_RATIO_MIN);

    let first = deal(stage, many, idle).await?;
    tokio::time::sleep_until((first - CALM - BEFORE / 2).into()).await;
    let name = format!("{many} tickets fall due within 2 s");
    let Some(beside) = stage.pair(findings, &name, MANY_LIMIT, drained(stage, first, &left)).await? else {
        findings.unfinished.push(late("beside others"));
        return Ok(None);
    };
    findings.measured(format!("{many} at once, beside half load: taken back"), "/s", many as f64 / beside);

    let first = deal(stage, many, idle).await?;
    tokio::time::sleep_until((first - BEFORE / 2).into()).await;
    let calls = stage.full_load();
    tokio::time::sleep_until(first.into()).await;
    let (before, begun) = (calls.done(), Instant::now());
    let full = tokio::time::timeout(MANY_LIMIT, drained(stage, first, &left)).await;
    let granted = (calls.done() - before) as f64 / begun.elapsed().as_secs_f64();
    let failed = stage.finish(calls).await?;
    findings.measured(format!("{many} at once, beside full load: grants"), "/s", granted);
    findings.measured(format!("{many} at once, beside full load: grants that failed"), "", failed as f64);
    let Ok(full) = full else {
        findings.unfinished.push(late("beside full load"));
        return Ok(None);
    };
    let rate = many as f64 / full?;
    findings.measured(format!("{many} at once, beside full load: taken back"), "/s", rate);
    findings.at_least(
        format!("{many} at once, beside full load: of the rate of grants"),
        "",
        rate / idle,
        BESIDE_RATIO_MIN,
    );
    Ok(Some(0))
}

/// Requests `count` tickets that all expire within two seconds. Returns the first deadline.
async fn deal(stage: &Stage, count: u64, idle: f64) -> Result<Instant, Failure> {
    // Time that the preparation may take at a third of the service's rate.
    let first = Instant::now() + Duration::from_secs_f64(3.0 * count as f64 / idle) + CALM + BEFORE;
    let last = count.saturating_sub(1).max(1);
    let grant = move |client: rm_client::RmClient, number: u64| async move {
        let mut request = ask(em(number % EMS)?, number)?;
        // Deadlines in a scattered order, so that neither the tickets of an EM nor those of a second are consecutive.
        let due = first + SPREAD.mul_f64((number.wrapping_mul(7919) % (last + 1)) as f64 / last as f64);
        request.lock_ttl = Some(due.saturating_duration_since(Instant::now()));
        granted(client.request_resource(&request).await?)
    };
    stage.callers.each("tickets are granted", count, grant).await?;
    match first.checked_duration_since(Instant::now()) {
        Some(left) if left > CALM => Ok(first),
        _ => Err("the preparation was too slow: the first deadline would have passed".into()),
    }
}

/// Waits until all tickets have expired. Returns the seconds since the first deadline.
async fn drained(stage: &Stage, first: Instant, left: &AtomicI64) -> Result<f64, Failure> {
    tokio::time::sleep_until(first.into()).await;
    loop {
        let counted = stage.tables.counted(KIND).await?;
        left.store(counted, Relaxed);
        if counted == 0 {
            return Ok(first.elapsed().as_secs_f64());
        }
        tokio::time::sleep(POLL).await;
    }
}
