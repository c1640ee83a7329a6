//! Crowd `em-goes`: an EM with very many tickets unregisters.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_client::RmClient;
use rm_model::em::EmInstance;
use tonic::Code;

use crate::Failure;

use super::{
    callers::em,
    findings::{Findings, millis},
    stage::Stage,
};

const MANY: u64 = 300_000;
const VERY_MANY: u64 = 1_000_000;
const LIMIT: Duration = Duration::from_secs(120);
const VERY_MANY_LIMIT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(100);

/// Maximum time without service for other callers, in milliseconds.
const GAP_MILLIS_MAX: f64 = 50.0;
/// Maximum time until the reply, for any number of tickets.
const ANSWER_SECONDS_MAX: f64 = 1.0;

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let (many, very_many) = (stage.scaled(MANY), stage.scaled(VERY_MANY));
    for _ in 0..stage.options.rounds {
        if !unregisters(stage, findings, many, LIMIT).await? {
            return Ok(None);
        }
    }
    if !unregisters(stage, findings, very_many, VERY_MANY_LIMIT).await? {
        return Ok(None);
    }
    Ok(findings.unfinished.is_empty().then_some(0))
}

/// Unregisters an EM with `tickets`. Returns true if it was removed within `limit`.
async fn unregisters(stage: &Stage, findings: &mut Findings, tickets: u64, limit: Duration) -> Result<bool, Failure> {
    stage.callers.register(1).await?;
    stage.callers.grant(0, tickets, tickets).await?;
    let em = em(0)?;
    let name = format!("an EM with {tickets} tickets unregisters");
    let (tries, answered) = (Mutex::new(Vec::new()), AtomicI64::new(-1));
    let work = async {
        let begun = Instant::now();
        unregister(&stage.callers.client(0), &em, &tries).await?;
        answered.store(begun.elapsed().as_millis().try_into()?, Relaxed);
        gone(stage, &em).await?;
        Ok(begun.elapsed().as_secs_f64())
    };
    let done = stage.pair(findings, &name, limit, work).await?;
    findings.notes.extend(tries.into_inner().unwrap_or_default());
    let passes = findings.passes.iter().find(|passes| passes.name == name);
    if let Some(gap) = passes.and_then(|passes| passes.pairs.last()).map(|pair| millis(pair.gap)) {
        findings.at_most(format!("{name}: longest time in which no other is served"), "ms", gap, GAP_MILLIS_MAX);
    }
    if answered.load(Relaxed) >= 0 {
        let seconds = answered.load(Relaxed) as f64 / 1e3;
        findings.at_most(format!("{name}: answered after"), "s", seconds, ANSWER_SECONDS_MAX);
    }
    let left = stage.tables.stored_on(&em).await?;
    let Some(seconds) = done else {
        findings.unfinished.push(format!("{name}: {left} tickets left at the time limit"));
        return Ok(false);
    };
    findings.measured(format!("{name}: gone after"), "s", seconds);
    if left > 0 {
        findings.wrong.push(format!("{name}: it is gone, and {left} of its tickets are not"));
    }
    Ok(left == 0)
}

/// Calls until the reply or until no such EM exists. Records the errors of the attempts.
async fn unregister(client: &RmClient, em: &EmInstance, tries: &Mutex<Vec<String>>) -> Result<(), Failure> {
    loop {
        let begun = Instant::now();
        match client.unregister(em).await {
            Ok(_) => return Ok(()),
            Err(error) if error.code() == Some(Code::NotFound) => return Ok(()),
            Err(error) => {
                if let Ok(mut tries) = tries.lock() {
                    tries.push(format!("Unregister failed after {:.1} s: {error}", begun.elapsed().as_secs_f64()));
                }
                tokio::time::sleep(POLL).await;
            }
        }
    }
}

/// Waits until no such EM exists.
async fn gone(stage: &Stage, em: &EmInstance) -> Result<(), Failure> {
    loop {
        if let Err(error) = stage.callers.client(2).em(em).await
            && error.code() == Some(Code::NotFound)
        {
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
}
