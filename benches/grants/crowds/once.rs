//! Crowd `once`: users with a single request each, under a limit for each user. The figures show what the service keeps
//! afterwards.

use std::time::{Duration, Instant};

use rm_client::RmClient;
use rm_model::name::Name;

use crate::Failure;

use super::{
    callers::{ask_for, em, granted},
    findings::Findings,
    limit::each,
    stage::Stage,
};

const USERS: u64 = 20_000;
const EMS: u64 = 100;
const PREFIX: &str = "once-";
const LIMIT: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_secs(10);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    stage.callers.register(EMS).await?;
    stage.callers.client(0).set_limit(&each("user")).await?;
    let users = stage.scaled(USERS);
    let memory = stage.memory()?;
    for round in 0..stage.options.rounds {
        let name = format!("{users} users come once");
        let live = move |client: RmClient, number: u64| async move {
            let user = Name::parse("user", &format!("{PREFIX}{round}-{number}"))?;
            let grant = granted(client.request_resource(&ask_for(em(number % EMS)?, user.clone())?).await?)?;
            Ok(client.resource_released(&grant.released(user)).await?)
        };
        let lives = stage.callers.each("lives", users, live);
        if stage.pair(findings, &name, LIMIT, lives).await?.is_none() {
            findings.unfinished.push(format!("{name}: not all had come at the time limit"));
            return Ok(None);
        }
    }
    let all = users * stage.options.rounds;
    findings.measured(format!("counters kept of {all} users after their last ticket"), "", kept(stage).await?);
    if let Some(megabytes) = memory.above() {
        findings.measured(format!("memory kept after {all} users, others' included"), "MB", megabytes);
    }
    if !stage.options.forget.is_zero() {
        forgotten(stage, findings).await?;
    }
    Ok(Some(0))
}

/// Waits until the counters are deleted, or until the timeout.
async fn forgotten(stage: &Stage, findings: &mut Findings) -> Result<(), Failure> {
    let begun = Instant::now();
    while begun.elapsed() < stage.options.forget && kept(stage).await? > 0.0 {
        tokio::time::sleep(LOOK).await;
    }
    let minutes = begun.elapsed().as_secs_f64() / 60.0;
    findings.measured("looked at for", "min", minutes);
    findings.at_most("counters kept then", "", kept(stage).await?, 0.0);
    Ok(())
}

async fn kept(stage: &Stage) -> Result<f64, Failure> {
    Ok(stage.tables.scopes_of(PREFIX).await? as f64)
}
