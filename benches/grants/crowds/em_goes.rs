//! Crowd `em-goes`: an EM with very many tickets unregisters, or is lost; and the server is killed during an
//! unregistration.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_client::RmClient;
use rm_model::{
    em::EmInstance,
    report::{EmReport, Health},
};
use tonic::Code;

use crate::Failure;

use super::{
    callers::{PLENTY, em, registration},
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

/// Server options: an EM is lost after a short time. The interval below keeps it alive until then.
const IMPATIENT: [&str; 4] = ["--em-silent-after", "4s", "--em-lost-after", "8s"];
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Fraction of the tickets below which the server is killed.
const MIDDLE: f64 = 0.9;
const MIDDLE_LIMIT: Duration = Duration::from_secs(30);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let (many, very_many) = (stage.scaled(MANY), stage.scaled(VERY_MANY));
    for _ in 0..stage.options.rounds {
        if !unregisters(stage, findings, many, LIMIT).await? {
            return Ok(None);
        }
    }
    killed(stage, findings, many).await?;
    stage.restart(false, &IMPATIENT).await?;
    if !is_lost(stage, findings, many).await? {
        return Ok(None);
    }
    stage.restart(false, &[]).await?;
    if !unregisters(stage, findings, very_many, VERY_MANY_LIMIT).await? {
        return Ok(None);
    }
    Ok(findings.unfinished.is_empty().then_some(0))
}

/// Unregisters an EM with `tickets`. Returns true if it was removed within `limit`.
async fn unregisters(stage: &Stage, findings: &mut Findings, tickets: u64, limit: Duration) -> Result<bool, Failure> {
    let em = fill(stage, tickets).await?;
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
    gap(findings, &name);
    if answered.load(Relaxed) >= 0 {
        let seconds = answered.load(Relaxed) as f64 / 1e3;
        findings.at_most(format!("{name}: answered after"), "s", seconds, ANSWER_SECONDS_MAX);
    }
    finish(stage, findings, &name, &em, done).await
}

/// Stops the reports of an EM with `tickets`. Returns true if it was lost and removed in time.
async fn is_lost(stage: &Stage, findings: &mut Findings, tickets: u64) -> Result<bool, Failure> {
    let em = em(0)?;
    let client = stage.callers.client(1);
    let epoch = client.register(registration(em.clone(), PLENTY)?).await?.epoch;
    let reports = async {
        for sequence in 1.. {
            let report = EmReport {
                em: em.clone(),
                epoch,
                sequence,
                health: Health::Healthy,
                load: None,
                tickets: Default::default(),
                observed: None,
            };
            client.heartbeat(&report).await?;
            tokio::time::sleep(REPORT_INTERVAL).await;
        }
        Ok::<(), Failure>(())
    };
    tokio::select! {
        granted = stage.callers.grant(0, tickets, tickets) => drop(granted?),
        failed = reports => failed?,
    }
    let name = format!("an EM with {tickets} tickets is lost");
    let work = async {
        let begun = Instant::now();
        gone(stage, &em).await?;
        Ok(begun.elapsed().as_secs_f64())
    };
    let done = stage.pair(findings, &name, LIMIT, work).await?;
    gap(findings, &name);
    finish(stage, findings, &name, &em, done).await
}

/// Kills the server while an EM is being unregistered. Another instance has to continue.
async fn killed(stage: &mut Stage, findings: &mut Findings, tickets: u64) -> Result<(), Failure> {
    let em = fill(stage, tickets).await?;
    let name = format!("kill -9 while an EM with {tickets} tickets goes");
    eprintln!("  {name}");
    let (client, going) = (stage.callers.client(0), em.clone());
    let call = tokio::spawn(async move { client.unregister(&going).await.is_ok() });
    let begun = Instant::now();
    while stage.tables.stored_on(&em).await? as f64 > tickets as f64 * MIDDLE && begun.elapsed() < MIDDLE_LIMIT {
        tokio::time::sleep(POLL).await;
    }
    stage.restart(true, &[]).await?;
    let answered = call.await?;
    let mut left = stage.tables.stored_on(&em).await?;
    findings.measured(format!("{name}: tickets left then"), "", left as f64);
    if left == 0 {
        findings
            .notes
            .push(format!("{name}: it had gone in one piece before the server could be killed in the middle"));
    }
    if !answered {
        findings.notes.push(format!("{name}: Unregister had not been answered; it was called again"));
        unregister(&stage.callers.client(0), &em, &Mutex::default()).await?;
    }
    let begun = Instant::now();
    while left > 0 {
        let now = stage.tables.stored_on(&em).await?;
        if now > left {
            findings.wrong.push(format!("{name}: {left} tickets became {now}"));
        }
        left = now;
        if begun.elapsed() > LIMIT {
            findings.unfinished.push(format!("{name}: {left} tickets left at the time limit"));
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
    findings.measured(format!("{name}: gone after the restart"), "s", begun.elapsed().as_secs_f64());
    gone(stage, &em).await
}

async fn fill(stage: &Stage, tickets: u64) -> Result<EmInstance, Failure> {
    stage.callers.register(1).await?;
    stage.callers.grant(0, tickets, tickets).await?;
    em(0)
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

/// Records the longest time without service for others in the last pass.
fn gap(findings: &mut Findings, name: &str) {
    let passes = findings.passes.iter().find(|passes| passes.name == name);
    if let Some(gap) = passes.and_then(|passes| passes.pairs.last()).map(|pair| millis(pair.gap)) {
        findings.at_most(format!("{name}: longest time in which no other is served"), "ms", gap, GAP_MILLIS_MAX);
    }
}

async fn finish(
    stage: &Stage,
    findings: &mut Findings,
    name: &str,
    em: &EmInstance,
    done: Option<f64>,
) -> Result<bool, Failure> {
    let left = stage.tables.stored_on(em).await?;
    match done {
        Some(seconds) => {
            findings.measured(format!("{name}: gone after"), "s", seconds);
            if left > 0 {
                findings.wrong.push(format!("{name}: it is gone, and {left} of its tickets are not"));
            }
            Ok(left == 0)
        }
        None => {
            findings.unfinished.push(format!("{name}: {left} tickets left at the time limit"));
            Ok(false)
        }
    }
}
