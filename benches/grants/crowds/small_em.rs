//! Crowd `small-em`: EMs with few tickets that unregister beside an EM with very many.

use rm_client::RmClient;

use crate::Failure;

use super::{
    callers::{PLENTY, em, registration},
    findings::Findings,
    spent::CostMeasurement,
    stage::Stage,
};

/// Number of tickets of the large EM.
const MANY: u64 = 300_000;

/// Number of small EMs: enough for the resolution of the kernel's clock.
const SMALL: u64 = 300;
/// Number of tickets of a small EM.
const FEW: u64 = 3;

/// Maximum cost of an unregistration beside the large EM, as a multiple of its cost before.
const GROWTH_MAX: f64 = 1.3;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(180);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let many = stage.scaled(MANY);
    let mut before = Vec::new();
    for _ in 0..stage.options.rounds {
        let Some(millis) = unregister(stage, findings, "no other EM").await? else { return Ok(None) };
        before.push(millis);
    }
    stage.callers.client(0).register(registration(em(0)?, PLENTY)?).await?;
    stage.callers.grant(0, many, many).await?;
    let beside = format!("an EM with {many} tickets");
    for before in before {
        let Some(after) = unregister(stage, findings, &beside).await? else { return Ok(None) };
        findings.at_most(
            "PostgreSQL for an unregistration: beside the large EM, and before",
            "",
            after / before,
            GROWTH_MAX,
        );
    }
    Ok(Some(i64::try_from(many)?))
}

/// Unregisters the small EMs twice: alone, and then beside others' grants. Returns the time of PostgreSQL per EM, in
/// milliseconds; `None` if the EMs were not removed in time.
async fn unregister(stage: &Stage, findings: &mut Findings, beside: &str) -> Result<Option<f64>, Failure> {
    let name = format!("{SMALL} EMs with {FEW} tickets unregister beside {beside}");
    fill(stage).await?;
    // Statistics as autovacuum makes them: with them, the planner sees that few EMs have nearly all tickets.
    stage.tables.settle().await?;
    let spent = CostMeasurement::begin(stage).await?;
    unregister_all(&stage.callers.client(0)).await?;
    let (cost, _) = spent.each(SMALL).await?;
    let millis = cost.postgresql / 1e3;
    findings.measured(format!("{name}: PostgreSQL for each"), "ms", millis);
    findings.measured(format!("{name}: service for each"), "ms", cost.server / 1e3);
    fill(stage).await?;
    stage.tables.settle().await?;
    let client = stage.callers.client(0);
    if stage.pair(findings, &name, LIMIT, unregister_all(&client)).await?.is_none() {
        findings.unfinished.push(format!("{name}: not within {LIMIT:?}"));
        return Ok(None);
    }
    Ok(Some(millis))
}

/// Registers the small EMs and fills them.
async fn fill(stage: &Stage) -> Result<(), Failure> {
    let register = |client: RmClient, number: u64| async move {
        client.register(registration(em(1 + number)?, PLENTY)?).await?;
        Ok(())
    };
    stage.callers.each("EMs register", SMALL, register).await?;
    stage.callers.grant(1, SMALL * FEW, FEW).await?;
    Ok(())
}

async fn unregister_all(client: &RmClient) -> Result<(), Failure> {
    for number in 0..SMALL {
        client.unregister(&em(1 + number)?).await?;
    }
    Ok(())
}
