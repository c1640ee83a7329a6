//! Crowd `limit`: a limit with a new label set is set while a million tickets are live.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rm_model::{
    limit::{LabelPattern, Rule},
    resource::Dimension,
};
use rm_proto::v1::{self as proto, limit_service_client::LimitServiceClient};

use crate::Failure;

use super::{
    findings::{Findings, millis},
    stage::Stage,
};

const TICKETS: u64 = 1_000_000;
const EMS: u64 = 100;
const LIMIT: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_millis(100);

/// Maximum time without any grant, in milliseconds.
const GAP_MILLIS_MAX: f64 = 50.0;

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let tickets = stage.scaled(TICKETS);
    stage.callers.register(EMS).await?;
    stage.callers.grant(0, tickets, tickets.div_ceil(EMS)).await?;
    stage.tables.settle().await?;
    let rule = each("user");
    let client = stage.callers.client(0);
    for round in 0..stage.options.rounds {
        if round > 0 {
            client.delete_limit(&rule.pattern).await?;
        }
        let name = format!("a limit for each user is set over {tickets} tickets");
        let (mut tries, mut first_error) = (0, None);
        let work = async {
            let begun = Instant::now();
            let answered = loop {
                tries += 1;
                match client.set_limit(&rule).await {
                    Ok(_) => break begun.elapsed(),
                    Err(error) => first_error.get_or_insert(error.to_string()),
                };
                tokio::time::sleep(PAUSE).await;
            };
            // The reply may state that the limit is still being counted, so the switch is observed, too.
            while !is_in_force(&stage.url()).await? {
                tokio::time::sleep(PAUSE).await;
            }
            Ok([answered.as_secs_f64(), begun.elapsed().as_secs_f64()])
        };
        let done = stage.pair(findings, &name, LIMIT, work).await?;
        if let Some(error) = first_error {
            findings.notes.push(format!("SetLimit was called {tries} times; the first error: {error}"));
        }
        if let Some(gap) = findings.passes.last().and_then(|passes| passes.pairs.last()).map(|pair| millis(pair.gap)) {
            findings.at_most("longest time without a grant", "ms", gap, GAP_MILLIS_MAX);
        }
        let Some([answered, in_force]) = done else {
            findings.unfinished.push(format!("{name}: not answered {tries} times"));
            return Ok(None);
        };
        findings.measured("SetLimit answered after", "s", answered);
        findings.measured("the limit in force after", "s", in_force);
    }
    // The audit compares the counters of the limit, too.
    Ok(Some(i64::try_from(tickets)?))
}

/// Returns true if all limits are in force.
async fn is_in_force(url: &str) -> Result<bool, Failure> {
    let call = proto::ListLimitsRequest::default();
    let listed = LimitServiceClient::connect(url.to_owned()).await?.list_limits(call).await?.into_inner();
    Ok(listed.limits.iter().all(|limit| limit.state() == proto::LimitState::InForce))
}

/// Returns a limit without effect for each value of a label.
pub(crate) fn each(label: &str) -> Rule {
    let pattern = LabelPattern::new(BTreeMap::from([(label.to_owned(), None)]));
    Rule {
        pattern,
        mode: Default::default(),
        max: BTreeMap::from([(Dimension::Instances, i64::MAX)]),
        guarantee: Default::default(),
    }
}
