//! History lines of changes outside batches: limits, repairs, tokens and providers.
//!
//! Callers write each line in the transaction of its change: `rm_service::limits`, the repair of an audit, [`crate::token`]
//! and `rm_service::external`. Never: contains a secret.

use std::collections::BTreeSet;

use sqlx::PgConnection;
use time::OffsetDateTime;

use rm_model::{
    action::Action,
    audit::{Difference, Subject},
    limit::{LabelPattern, Rule},
    name::Name,
    policy::Policy,
    principal::{Actor, Principal},
    recorded_state::RecordedState,
    resource::{Resource, ResourceType},
};

use crate::{StoreError, expect_rows, limit};

use super::TABLE;

/// Change of the limits.
#[derive(Debug, Clone)]
pub enum LimitAct {
    /// A rule was added or changed; with the previous rule, if any.
    Set(Rule, Option<Rule>),
    /// A rule was deleted.
    Deleted(Rule),
    /// The policy of a kind of EMs (application name) was set; with the previous policy, if any.
    Policy(Name, Policy, Option<Policy>),
    /// The rules of a label set decide from this line on. Either all of its tickets are now counted, or a change of
    /// very many of its rules was recorded before the fence.
    InForce(BTreeSet<String>),
}

impl LimitAct {
    fn action(&self) -> Action {
        match self {
            Self::Set(..) => Action::LimitSet,
            Self::Deleted(_) => Action::LimitDeleted,
            Self::Policy(..) => Action::PolicySet,
            Self::InForce(_) => Action::LimitsInForce,
        }
    }

    fn em_kind(&self) -> Option<&str> {
        match self {
            Self::Policy(kind, ..) => Some(kind.as_str()),
            Self::Set(..) | Self::Deleted(_) | Self::InForce(_) => None,
        }
    }

    /// Returns the actor and address. The actor of `CurrentLimits` is the service itself.
    fn actor<'a>(&self, by: &'a Actor) -> (&'a str, Option<&'a str>) {
        match self {
            Self::Set(..) | Self::Deleted(_) | Self::Policy(..) => (by.as_str(), by.address()),
            Self::InForce(_) => (Principal::Service.as_str(), None),
        }
    }

    /// Returns the reason that the actor gave. `CurrentLimits` has none.
    fn reason<'a>(&self, by: &'a Actor) -> Option<&'a str> {
        match self {
            Self::Set(..) | Self::Deleted(_) | Self::Policy(..) => by.reason(),
            Self::InForce(_) => None,
        }
    }

    fn states(&self) -> (Option<String>, Option<String>) {
        let (before, after) = match self {
            Self::Set(rule, before) => {
                (before.as_ref().map(RecordedState::of_rule), Some(RecordedState::of_rule(rule)))
            }
            Self::Deleted(rule) => (Some(RecordedState::of_rule(rule)), None),
            Self::Policy(_, policy, before) => {
                (before.as_ref().map(RecordedState::of_policy), Some(RecordedState::of_policy(policy)))
            }
            Self::InForce(_) => (None, None),
        };
        (before.map(RecordedState::into_string), after.map(RecordedState::into_string))
    }

    /// Returns the pattern of the rule, or the label names of the label set, or the checks of the policy, as JSON.
    fn scope(&self) -> String {
        match self {
            Self::Set(rule, _) | Self::Deleted(rule) => limit::pattern_json(&rule.pattern),
            Self::Policy(_, policy, _) => {
                serde_json::json!(policy.to_string().split(',').collect::<Vec<_>>()).to_string()
            }
            Self::InForce(keys) => {
                limit::pattern_json(&LabelPattern::new(keys.iter().map(|key| (key.clone(), None)).collect()))
            }
        }
    }

    /// Returns the mode of the rule.
    fn mode(&self) -> Option<&'static str> {
        match self {
            Self::Set(rule, _) | Self::Deleted(rule) => Some(rule.mode.as_str()),
            Self::Policy(..) | Self::InForce(_) => None,
        }
    }

    /// Returns the maximum of the rule, or zero amounts if it exceeds the range of a resource.
    fn max(&self) -> String {
        let max = match self {
            Self::Set(rule, _) | Self::Deleted(rule) => {
                Resource::special(rule.max.iter().map(|(dimension, max)| (dimension.key(), *max)).collect()).ok()
            }
            Self::Policy(..) | Self::InForce(_) => None,
        };
        max.unwrap_or_else(|| Resource::zero(ResourceType::Special)).to_json()
    }
}

/// Records changes of the limits inside the limits fence, so that line numbers show which decisions used the new rules.
/// A very large change is recorded before the fence; its [`LimitAct::InForce`] lines inside the fence show that
/// instead.
///
/// # Errors
/// [`StoreError::RowCount`]; database errors.
pub async fn insert_limits(connection: &mut PgConnection, lines: &[LimitAct], by: &Actor) -> Result<(), StoreError> {
    if lines.is_empty() {
        return Ok(());
    }
    let (actors, addresses): (Vec<_>, Vec<_>) = lines.iter().map(|line| line.actor(by)).unzip();
    let (before, after): (Vec<_>, Vec<_>) = lines.iter().map(LimitAct::states).unzip();
    let done = sqlx::query(
        "-- action_record::insert_limits
        INSERT INTO linkis_resource_action_record (action, em_application_name, scope, resource_type, resource, actor,
            action_time, limit_mode, address, before, after, reason)
        SELECT action, em_kind, scope::jsonb, $6, max::jsonb, actor, clock_timestamp(), mode, address, before, after, reason
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $7::text[], $8::text[], $9::text[], $10::text[],
            $11::text[]) AS d (action, em_kind, scope, max, actor, mode, address, before, after, reason)",
    )
    .bind(lines.iter().map(|line| line.action().as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(LimitAct::em_kind).collect::<Vec<_>>())
    .bind(lines.iter().map(LimitAct::scope).collect::<Vec<_>>())
    .bind(lines.iter().map(LimitAct::max).collect::<Vec<_>>())
    .bind(actors)
    .bind(ResourceType::Special.as_str())
    .bind(lines.iter().map(LimitAct::mode).collect::<Vec<_>>())
    .bind(addresses)
    .bind(before)
    .bind(after)
    .bind(lines.iter().map(|line| line.reason(by)).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, lines.len(), done.rows_affected())
}

/// Repair of the counters of an EM or a scope.
#[derive(Debug)]
pub struct RepairAct {
    /// EM or scope.
    pub subject: Subject,
    /// Sum of its tickets.
    pub held: Resource,
    /// Differences that were repaired.
    pub differences: Vec<Difference>,
}

/// Records repairs at time `now`.
///
/// # Errors
/// [`StoreError::RowCount`]; database errors.
pub async fn insert_repairs(
    connection: &mut PgConnection,
    repairs: &[RepairAct],
    now: OffsetDateTime,
    by: &Actor,
) -> Result<(), StoreError> {
    let ems = repairs.iter().map(|repair| match &repair.subject {
        Subject::Em(em) => Some((em.application_name.as_str(), em.instance.as_str())),
        Subject::Scope(_) | Subject::Rule(_) | Subject::Policy(_) | Subject::Other(_) => None,
    });
    let (application_names, instances): (Vec<_>, Vec<_>) = ems.map(Option::unzip).unzip();
    let scopes = repairs.iter().map(|repair| match &repair.subject {
        Subject::Em(_) | Subject::Rule(_) | Subject::Policy(_) | Subject::Other(_) => None,
        Subject::Scope(scope) => Some(serde_json::json!(scope.labels()).to_string()),
    });
    let states = repairs.iter().map(|repair| RecordedState::of_repair(&repair.differences));
    let states = states.map(|(before, after)| (before.into_string(), after.into_string()));
    let (before, after): (Vec<_>, Vec<_>) = states.unzip();
    let done = sqlx::query(
        "-- action_record::insert_repairs
        INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, scope, resource_type,
            resource, actor, action_time, address, before, after, reason)
        SELECT $1, em_application_name, em_instance, scope::jsonb, resource_type, resource::jsonb, $8, $7, $9, before, after, $12
        FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $10::text[], $11::text[])
            AS d (em_application_name, em_instance, scope, resource_type, resource, before, after)",
    )
    .bind(Action::Repaired.as_str())
    .bind(application_names)
    .bind(instances)
    .bind(scopes.collect::<Vec<_>>())
    .bind(repairs.iter().map(|repair| repair.held.resource_type().as_str()).collect::<Vec<_>>())
    .bind(repairs.iter().map(|repair| repair.held.to_json()).collect::<Vec<_>>())
    .bind(now)
    .bind(by.as_str())
    .bind(by.address())
    .bind(before)
    .bind(after)
    .bind(by.reason())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, repairs.len(), done.rows_affected())
}

/// Change of an object that has no column of its own: a token or a provider.
#[derive(Debug)]
pub struct OtherAct {
    /// Action.
    pub action: Action,
    /// Object, for display.
    pub object: String,
    /// State before the change; `None` if it did not exist.
    pub before: Option<RecordedState>,
    /// State after the change; `None` if it was deleted.
    pub after: Option<RecordedState>,
}

/// Records changes of tokens or providers, in the transaction of the change.
///
/// # Errors
/// [`StoreError::RowCount`]; database errors.
pub async fn insert_others(connection: &mut PgConnection, lines: &[OtherAct], by: &Actor) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- action_record::insert_others
        INSERT INTO linkis_resource_action_record (action, object, before, after, resource_type, resource, actor, address,
            reason, action_time)
        SELECT action, object, before, after, $5, $6::jsonb, $7, $8, $9, clock_timestamp()
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS d (action, object, before, after)",
    )
    .bind(lines.iter().map(|line| line.action.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.object.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.before.as_ref().map(RecordedState::as_str)).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.after.as_ref().map(RecordedState::as_str)).collect::<Vec<_>>())
    .bind(ResourceType::Special.as_str())
    .bind(Resource::zero(ResourceType::Special).to_json())
    .bind(by.as_str())
    .bind(by.address())
    .bind(by.reason())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, lines.len(), done.rows_affected())
}
