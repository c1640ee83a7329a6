//! Limit of `--user-limits`: an equal one for every user of the trace.

use std::collections::{BTreeMap, HashMap};

use rm_client::RmClient;
use rm_model::{
    limit::{LabelPattern, Rule},
    resource::Dimension,
    scope::{CREATOR, USER},
};

use super::{
    calls::{APPLICATION, CallError, repeated},
    plan::{Action, ordered_steps},
    trace::{Amounts, Trace},
};

/// Fraction of what the largest user would use. It restricts that user and some others, and leaves most users
/// unrestricted.
const SHARE: (i64, i64) = (3, 4);

/// Returns the limit: in each dimension three quarters of the most that any user would use at the same time without
/// refusals.
pub fn amounts(trace: &Trace) -> Amounts {
    let mut users: HashMap<String, Amounts> = HashMap::new();
    let mut most = Amounts::default();
    for step in ordered_steps(&trace.tasks) {
        let task = &trace.tasks[step.task];
        let wants = users.entry(task.user()).or_default();
        match step.action {
            Action::Ask => *wants = *wants + task.need(),
            Action::Release => *wants = *wants - task.need(),
            Action::Init => {}
        }
        most = most.max(*wants);
    }
    most.map(|amount| amount * SHARE.0 / SHARE.1)
}

/// Returns the pattern of the limit: each user, but only with the creator of the replay, because a running service may
/// have other users.
fn pattern() -> LabelPattern {
    LabelPattern::new(BTreeMap::from([(CREATOR.into(), Some(APPLICATION.into())), (USER.into(), None)]))
}

/// Returns the scope of the user's tickets, as the service names it.
pub fn scope(user: &str) -> String {
    format!("{CREATOR}={APPLICATION},{USER}={user}")
}

pub async fn set(client: &RmClient, amounts: Amounts) -> Result<(), CallError> {
    let max = Amounts::NAMES.into_iter().map(Dimension::from).zip(amounts.values()).collect();
    let rule = Rule { pattern: pattern(), mode: Default::default(), max, guarantee: Default::default() };
    repeated(|| "setting the limit".into(), || client.set_limit(&rule)).await?;
    Ok(())
}

/// Removes the limit, if it exists.
pub async fn remove(client: &RmClient) -> Result<(), CallError> {
    let (limits, ..) = repeated(|| "listing the limits".into(), || client.limits()).await?;
    let pattern = pattern();
    if limits.iter().any(|rule| rule.pattern == pattern) {
        repeated(|| "removing the limit".into(), || client.delete_limit(&pattern)).await?;
    }
    Ok(())
}
