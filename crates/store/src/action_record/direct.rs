//! History lines of changes outside batches: limits, repairs, tokens and providers.
//!
//! Callers write each line in the transaction of its change: `rm_service::limits`, the repair of an audit, [`crate::token`]
//! and `rm_service::external`. Never: contains a secret.

use std::{borrow::Cow, collections::BTreeSet};

use sqlx::PgConnection;
use time::OffsetDateTime;

use rm_model::{
    action::Action,
    audit::{Difference, Subject},
    limit::{LabelPattern, PatternChange, Rule},
    name::Name,
    order::QueueOrder,
    policy::Policy,
    principal::{Actor, Principal},
    priority::PriorityRule,
    reclaim::ReclaimPolicy,
    recorded_state::RecordedState,
    resource::{Resource, ResourceType},
};

use crate::{StoreError, expect_rows, limit, rows::column};

use super::TABLE;

/// Object of the history lines about the order of waiting requests.
const ORDER: &str = "order";

/// Change of the limits.
#[derive(Debug, Clone)]
pub enum LimitAct {
    /// A rule was added or changed; with the previous rule, if any.
    Set(Rule, Option<Rule>),
    /// A rule was deleted.
    Deleted(Rule),
    /// The policy of a kind of EMs (application name) was set; with the previous policy, if any.
    Policy(Name, Policy, Option<Policy>),
    /// The order of waiting requests was set; with the previous order.
    Order(QueueOrder, QueueOrder),
    /// The priority rule of a pattern was set, or deleted.
    Priority(PatternChange<PriorityRule>),
    /// The reclaim policy of a pattern was set, or deleted.
    ReclaimPolicy(PatternChange<ReclaimPolicy>),
    /// The rules of a label set decide from this line on. Either all of its tickets are now counted, or a change of
    /// very many of its rules was recorded before the fence.
    InForce(BTreeSet<String>),
}

/// Columns of the history line of a [`LimitAct`].
struct LimitLine<'a> {
    action: Action,
    em_kind: Option<&'a str>,
    /// Pattern of the rule, label names of the label set, or checks of the policy, as JSON.
    scope: Option<String>,
    /// Name of an object that is neither an EM nor a scope.
    object: Option<Cow<'static, str>>,
    /// Maximum of the rule; zero amounts if it exceeds the range of a resource.
    max: Resource,
    mode: Option<&'static str>,
    actor: &'a str,
    address: Option<&'a str>,
    reason: Option<&'a str>,
    before: Option<RecordedState>,
    after: Option<RecordedState>,
}

impl<'a> LimitLine<'a> {
    /// Returns a line by `by` without a maximum and states.
    fn new(action: Action, scope: Option<String>, by: &'a Actor) -> Self {
        let (em_kind, object, mode, before, after) = (None, None, None, None, None);
        let (actor, address, reason) = (by.as_str(), by.address(), by.reason());
        let max = Resource::zero(ResourceType::Special);
        Self { action, em_kind, scope, object, max, mode, actor, address, reason, before, after }
    }

    fn of_rule(action: Action, rule: &Rule, by: &'a Actor) -> Self {
        let max = Resource::special(rule.max.iter().map(|(dimension, max)| (dimension.key(), *max)).collect());
        Self {
            max: max.unwrap_or_else(|_| Resource::zero(ResourceType::Special)),
            mode: Some(rule.mode.as_str()),
            ..Self::new(action, Some(limit::pattern_json(&rule.pattern)), by)
        }
    }

    /// Returns the line of a rule that was set or deleted, with the action of each.
    fn of_change<R>(
        change: &PatternChange<R>,
        [set, deleted]: [Action; 2],
        state: fn(&R) -> RecordedState,
        by: &'a Actor,
    ) -> Self {
        Self {
            object: Some(change.pattern.to_string().into()),
            before: change.before.as_ref().map(state),
            after: change.after.as_ref().map(state),
            ..Self::new(if change.after.is_some() { set } else { deleted }, None, by)
        }
    }

    fn of(act: &'a LimitAct, by: &'a Actor) -> Self {
        match act {
            LimitAct::Set(rule, before) => Self {
                before: before.as_ref().map(RecordedState::of_rule),
                after: Some(RecordedState::of_rule(rule)),
                ..Self::of_rule(Action::LimitSet, rule, by)
            },
            LimitAct::Deleted(rule) => {
                Self { before: Some(RecordedState::of_rule(rule)), ..Self::of_rule(Action::LimitDeleted, rule, by) }
            }
            LimitAct::Policy(kind, policy, before) => {
                let checks = serde_json::json!(policy.to_string().split(',').collect::<Vec<_>>()).to_string();
                Self {
                    em_kind: Some(kind.as_str()),
                    before: before.as_ref().map(RecordedState::of_policy),
                    after: Some(RecordedState::of_policy(policy)),
                    ..Self::new(Action::PolicySet, Some(checks), by)
                }
            }
            LimitAct::Order(order, before) => Self {
                object: Some(ORDER.into()),
                before: Some(RecordedState::of_order(before)),
                after: Some(RecordedState::of_order(order)),
                ..Self::new(Action::OrderSet, None, by)
            },
            LimitAct::Priority(change) => {
                let actions = [Action::PrioritySet, Action::PriorityDeleted];
                Self::of_change(change, actions, RecordedState::of_priority, by)
            }
            LimitAct::ReclaimPolicy(change) => {
                let actions = [Action::ReclaimPolicySet, Action::ReclaimPolicyDeleted];
                Self::of_change(change, actions, RecordedState::of_reclaim_policy, by)
            }
            // The actor is the service itself, without an address and a reason.
            LimitAct::InForce(keys) => {
                let labels = LabelPattern::new(keys.iter().map(|key| (key.clone(), None)).collect());
                Self {
                    actor: Principal::Service.as_str(),
                    address: None,
                    reason: None,
                    ..Self::new(Action::LimitsInForce, Some(limit::pattern_json(&labels)), by)
                }
            }
        }
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
    let lines = column(lines, |line| LimitLine::of(line, by));
    let done = sqlx::query(
        "-- action_record::insert_limits
        INSERT INTO linkis_resource_action_record (action, em_application_name, scope, resource_type, resource, actor,
            action_time, limit_mode, address, before, after, reason, object)
        SELECT action, em_kind, scope::jsonb, $6, max::jsonb, actor, clock_timestamp(), mode, address, before, after, reason,
            object
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $7::text[], $8::text[], $9::text[], $10::text[],
            $11::text[], $12::text[]) AS d (action, em_kind, scope, max, actor, mode, address, before, after, reason, object)",
    )
    .bind(column(&lines, |line| line.action.as_str()))
    .bind(column(&lines, |line| line.em_kind))
    .bind(column(&lines, |line| line.scope.as_deref()))
    .bind(column(&lines, |line| line.max.to_json()))
    .bind(column(&lines, |line| line.actor))
    .bind(ResourceType::Special.as_str())
    .bind(column(&lines, |line| line.mode))
    .bind(column(&lines, |line| line.address))
    .bind(column(&lines, |line| line.before.as_ref().map(RecordedState::as_str)))
    .bind(column(&lines, |line| line.after.as_ref().map(RecordedState::as_str)))
    .bind(column(&lines, |line| line.reason))
    .bind(column(&lines, |line| line.object.as_deref()))
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
