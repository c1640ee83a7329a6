//! Limit changes behind the fence: prepares a change while batches run, and closes the fence for its last statements and the
//! commit.
//!
//! Invariant: no batch runs inside the fence, so the history shows the change after all grants under the old rules.
//! Never: reads or writes an unbounded number of rows inside the fence.
//! Callers: the other modules of `limits`.

use std::{collections::BTreeSet, slice, time::Duration};

use sqlx::{Connection as _, PgConnection};
use tokio::time::Instant;

use crate::{commit::commit, error::Error, lock_attempts::LockAttempts};
use rm_model::{
    limit::{
        CountingRule, LABEL_SETS_MAX, LabelPattern, LabelSet, LimitChanges, LimitReplacement, Rule, RuleChanges,
        RulePrecondition,
    },
    name::Name,
    operation::Rejection,
    order::{QueueOrder, QueueRuleChanges, QueueRules},
    policy::Policy,
    principal::Actor,
    priority::PriorityRule,
    reclaim::ReclaimPolicy,
};
use rm_store::{
    StoreError,
    action_record::{self, LimitAct},
    em_resource,
    label_set::{self, LabelSetState},
    limit, limit_change, policy, queue_order, queue_priority, reclaim_policy,
    session::{self, Session, within_timeout},
    waiting::{self, FreedNotification},
};

/// Maximum number of history lines of rules that are written inside the fence. More lines are written before it; inside it, only the
/// lines that mark the start of their effect. The other lines are always written inside: some hundred.
const LINES_INSIDE_MAX: usize = 100;

/// Change of the limits.
pub(super) enum FencedChange {
    /// Add or replace a rule, if the stored one is as expected.
    Set(Rule, RulePrecondition),
    /// Delete the rule of this pattern, if it is as expected.
    Delete(LabelPattern, RulePrecondition),
    /// Replace all rules of the kinds that the replacement has.
    Replace(LimitReplacement),
    /// Set the policy of an EM kind.
    Policy(Name, Policy),
    /// Set the order of waiting requests.
    Order(QueueOrder),
    /// Set a priority rule.
    SetPriority(PriorityRule),
    /// Delete the priority rule of this pattern.
    DeletePriority(LabelPattern),
    /// Set a reclaim policy.
    SetReclaimPolicy(ReclaimPolicy),
    /// Delete the reclaim policy of this pattern.
    DeleteReclaimPolicy(LabelPattern),
    /// Activate label sets whose tickets are all counted.
    Decide(Vec<i64>),
}

#[derive(Default)]
pub(super) struct ChangeResult {
    /// History lines of the change.
    pub(super) lines: Vec<LimitAct>,
    /// Rules that differ from before, if all were replaced.
    pub(super) changes: LimitChanges,
    counted: RecountPlan,
}

/// Label sets whose counting a change starts.
#[derive(Default)]
struct RecountPlan {
    /// New label sets, and the label sets that decide until the new ones do.
    begun: Vec<LabelSet>,
    before: Vec<i64>,
    /// Labels whose limits decided before the change.
    decided: BTreeSet<BTreeSet<String>>,
}

impl FencedChange {
    /// Applies the change while batches run, which cannot see it yet.
    async fn make(&self, connection: &mut PgConnection, by: &Actor) -> Result<ChangeResult, Error> {
        let mut changes = LimitChanges::default();
        let lines = match self {
            Self::Set(rule, expected) => {
                let found = limit::records(&mut *connection, [&rule.pattern]).await?;
                let found = found.get(&rule.pattern);
                match expected.check(&rule.pattern, found) {
                    Ok(()) => {
                        limit::upsert(connection, slice::from_ref(rule), &by.principal).await?;
                        vec![LimitAct::Set(rule.clone(), found.map(|found| found.rule.clone()))]
                    }
                    Err(_) if found.is_some_and(|found| found.is_set_already(rule, &by.principal)) => vec![],
                    Err(rejection) => return Err(rejection.into()),
                }
            }
            Self::Delete(pattern, expected) => {
                if let Some(found) = limit::records(&mut *connection, [pattern]).await?.get(pattern) {
                    expected.check(pattern, Some(found))?;
                }
                delete(connection, slice::from_ref(pattern)).await?
            }
            Self::Replace(LimitReplacement { rules, queue }) => {
                if let Some(rules) = rules {
                    changes.rules = RuleChanges::between(limit::rules(&mut *connection).await?, rules);
                }
                let RuleChanges { added, changed, removed } = &changes.rules;
                let gone: Vec<LabelPattern> = removed.iter().map(|rule| rule.pattern.clone()).collect();
                let changed = changed.iter().map(|(before, after)| (after, Some(before)));
                let new: Vec<_> = added.iter().map(|rule| (rule, None)).chain(changed).collect();
                let mut lines = delete(connection, &gone).await?;
                let rules: Vec<Rule> = new.iter().map(|(rule, _)| (*rule).clone()).collect();
                limit::upsert(connection, &rules, &by.principal).await?;
                lines.extend(new.into_iter().map(|(rule, before)| LimitAct::Set(rule.clone(), before.cloned())));
                changes.queue = queue_rules(&mut *connection).await?.changes_to(queue);
                lines.extend(set_queue_rules(connection, &changes.queue).await?);
                lines
            }
            Self::Policy(kind, policy) => {
                let before = policy::read(&mut *connection).await?.remove(kind);
                policy::upsert(connection, kind, policy).await?;
                vec![LimitAct::Policy(kind.clone(), policy.clone(), before)]
            }
            Self::Order(_)
            | Self::SetPriority(_)
            | Self::DeletePriority(_)
            | Self::SetReclaimPolicy(_)
            | Self::DeleteReclaimPolicy(_) => {
                let change = self.of_queue_rules(&queue_rules(&mut *connection).await?)?;
                set_queue_rules(connection, &change).await?
            }
            Self::Decide(counted) => {
                let lines = switch(connection, counted).await?;
                return Ok(ChangeResult { lines, ..ChangeResult::default() });
            }
        };
        let counted = reconcile(connection, &lines).await?;
        Ok(ChangeResult { lines, changes, counted })
    }

    /// Returns the change of one rule of the wait queues.
    fn of_queue_rules(&self, before: &QueueRules) -> Result<QueueRuleChanges, Rejection> {
        let mut changes = QueueRuleChanges::default();
        match self {
            Self::Order(order) => changes.order = Some((before.order.clone(), order.clone())),
            Self::SetPriority(rule) => changes.priorities.push(before.priorities.change(&rule.pattern, Some(rule))?),
            Self::DeletePriority(pattern) => changes.priorities.push(before.priorities.change(pattern, None)?),
            Self::SetReclaimPolicy(policy) => {
                changes.reclaim.push(before.reclaim.change(&policy.pattern, Some(policy))?)
            }
            Self::DeleteReclaimPolicy(pattern) => changes.reclaim.push(before.reclaim.change(pattern, None)?),
            Self::Set(..) | Self::Delete(..) | Self::Replace(_) | Self::Policy(..) | Self::Decide(_) => {}
        }
        Ok(changes)
    }
}

impl ChangeResult {
    /// Returns the changed patterns with their rules; without a rule if it was deleted.
    fn of_rules(&self) -> Vec<(&LabelPattern, Option<&Rule>)> {
        self.lines.iter().filter_map(of_rule).collect()
    }

    /// Whether the history lines of the rules are too many for the fence.
    fn is_much(&self) -> bool {
        self.of_rules().len() > LINES_INSIDE_MAX
    }

    /// Writes many history lines of rules before the fence. The change takes effect at the lines that [`ChangeResult::finish`] writes.
    async fn record_in_advance(&self, connection: &mut PgConnection, by: &Actor) -> Result<(), StoreError> {
        if !self.is_much() {
            return Ok(());
        }
        let lines: Vec<LimitAct> = self.lines.iter().filter(|line| of_rule(line).is_some()).cloned().collect();
        action_record::insert_limits(connection, &lines, by).await
    }

    /// Completes the change inside the fence. The cost does not depend on the size of the change.
    ///
    /// New label sets decide immediately if no EM exists: there is no ticket to count, and no EM can register meanwhile. The
    /// history line comes after all grants before the change and before all grants after it.
    async fn finish(&self, connection: &mut PgConnection, by: &Actor) -> Result<(), StoreError> {
        let is_much = self.is_much();
        let inside = self.lines.iter().filter(|line| !is_much || of_rule(line).is_none()).cloned();
        let mut lines: Vec<LimitAct> = inside.collect();
        if is_much {
            lines.extend(self.in_force());
        }
        let RecountPlan { begun, before, .. } = &self.counted;
        if !begun.is_empty() && !em_resource::is_any(&mut *connection).await? {
            label_set::set_state(connection, before, LabelSetState::Retired).await?;
            label_set::set_state(connection, &ids(begun), LabelSetState::Counted).await?;
            lines.extend(begun.iter().map(in_force));
        }
        action_record::insert_limits(connection, &lines, by).await
    }

    /// Returns the lines that mark the start of effect of lines written in advance: one per label set that decided before. A
    /// new label set gets its line when it is counted.
    fn in_force(&self) -> Vec<LimitAct> {
        let label_set = |(pattern, _): (&LabelPattern, _)| pattern.keys().map(str::to_owned).collect();
        let changed: BTreeSet<_> = self.lines.iter().filter_map(of_rule).map(label_set).collect();
        changed.intersection(&self.counted.decided).cloned().map(LimitAct::InForce).collect()
    }
}

/// Returns the pattern and rule of a history line.
fn of_rule(line: &LimitAct) -> Option<(&LabelPattern, Option<&Rule>)> {
    match line {
        LimitAct::Set(rule, _) => Some((&rule.pattern, Some(rule))),
        LimitAct::Deleted(rule) => Some((&rule.pattern, None)),
        LimitAct::Policy(..)
        | LimitAct::Order(..)
        | LimitAct::Priority(_)
        | LimitAct::ReclaimPolicy(_)
        | LimitAct::InForce(_) => None,
    }
}

fn ids<'a>(sets: impl IntoIterator<Item = &'a LabelSet>) -> Vec<i64> {
    sets.into_iter().map(|set| set.id).collect()
}

fn in_force(set: &LabelSet) -> LimitAct {
    LimitAct::InForce(set.counting.keys.clone())
}

/// Deletes rules. Returns the lines of those that existed.
async fn delete(connection: &mut PgConnection, patterns: &[LabelPattern]) -> Result<Vec<LimitAct>, StoreError> {
    Ok(limit::delete(connection, patterns).await?.into_iter().map(LimitAct::Deleted).collect())
}

/// Reads the rules of the wait queues.
async fn queue_rules(connection: &mut PgConnection) -> Result<QueueRules, StoreError> {
    Ok(QueueRules {
        order: queue_order::read(&mut *connection).await?,
        priorities: queue_priority::read(&mut *connection).await?,
        reclaim: reclaim_policy::read(connection).await?,
    })
}

/// Changes rules of the wait queues. Returns the lines of the changes.
async fn set_queue_rules(
    connection: &mut PgConnection,
    changes: &QueueRuleChanges,
) -> Result<Vec<LimitAct>, StoreError> {
    let mut lines = Vec::new();
    if let Some((before, after)) = &changes.order {
        queue_order::replace(&mut *connection, after).await?;
        lines.push(LimitAct::Order(after.clone(), before.clone()));
    }
    for change in &changes.priorities {
        match &change.after {
            Some(rule) => queue_priority::upsert(&mut *connection, rule).await?,
            None => queue_priority::delete(&mut *connection, &change.pattern).await?,
        }
        lines.push(LimitAct::Priority(change.clone()));
    }
    for change in &changes.reclaim {
        match &change.after {
            Some(policy) => reclaim_policy::upsert(&mut *connection, policy).await?,
            None => reclaim_policy::delete(&mut *connection, &change.pattern).await?,
        }
        lines.push(LimitAct::ReclaimPolicy(change.clone()));
    }
    Ok(lines)
}

/// Activates counted label sets in place of those that counted the same labels.
async fn switch(connection: &mut PgConnection, counted: &[i64]) -> Result<Vec<LimitAct>, StoreError> {
    let sets = label_set::read(&mut *connection).await?;
    // A label set that was retired meanwhile is not in the table.
    let (now, others): (Vec<_>, Vec<_>) =
        sets.into_iter().partition(|set| counted.contains(&set.id) && !set.is_counted);
    let keys: BTreeSet<_> = now.iter().map(|set| &set.counting.keys).collect();
    let before = others.iter().filter(|set| set.is_counted && keys.contains(&set.counting.keys));
    label_set::set_state(connection, &ids(before), LabelSetState::Retired).await?;
    label_set::set_state(connection, &ids(&now), LabelSetState::Counted).await?;
    Ok(now.iter().map(in_force).collect())
}

/// Applies a change, with retries until `deadline`.
///
/// Operations that waited behind the fence proceed between the attempts.
pub(super) async fn patiently(
    session: &mut Session,
    deadline: Instant,
    change: &FencedChange,
    by: &Actor,
) -> Result<ChangeResult, Error> {
    let mut attempts = LockAttempts::until(deadline);
    loop {
        match fenced(session, attempts.patience, deadline, change, by).await {
            Ok(made) => return Ok(made),
            Err(Error::LockTimeout) if attempts.may_repeat() => {
                session.reset();
                attempts.pause().await;
            }
            Err(error) => {
                session.reset();
                return Err(error);
            }
        }
    }
}

/// Applies a change. Most of it is done before the fence is closed, while batches run.
///
/// Returns [`FencedError::Late`] if the deadline passes before the commit, and [`FencedError::Unknown`] if it passes during it.
async fn fenced(
    session: &mut Session,
    patience: Duration,
    deadline: Instant,
    change: &FencedChange,
    by: &Actor,
) -> Result<ChangeResult, Error> {
    let connection = tokio::time::timeout_at(deadline, session.get()).await.map_err(|_| Error::LockTimeout)??;
    let prepared = within_timeout(async {
        let mut transaction = connection.begin().await?;
        session::hurried(&mut transaction, patience).await?;
        let before = limit::begin_change(&mut transaction).await?;
        let made = change.make(&mut transaction, by).await?;
        limit_change::insert(&mut transaction, before, &made.of_rules()).await?;
        waiting::notify(&mut *transaction, &[FreedNotification::anywhere()]).await?;
        made.record_in_advance(&mut transaction, by).await?;
        limit::close_fence(&mut transaction).await?;
        made.finish(&mut transaction, by).await?;
        Ok::<_, Error>((transaction, made))
    });
    let prepared = tokio::time::timeout_at(deadline, prepared).await;
    let (transaction, made) = prepared.map_err(|_| Error::LockTimeout)??;
    match tokio::time::timeout_at(deadline, commit(transaction)).await {
        Ok(committed) => committed.map(|()| made),
        Err(_) => {
            tracing::warn!("the commit of a limit change is unknown: the database did not confirm it in time");
            Err(Error::CommitUnknown)
        }
    }
}

/// Starts the counting of label sets that the rules and policies need, and retires those that are no longer needed.
async fn reconcile(connection: &mut PgConnection, lines: &[LimitAct]) -> Result<RecountPlan, StoreError> {
    let policies = policy::read(&mut *connection).await?;
    let sets = label_set::read(&mut *connection).await?;
    let of_new_rule = |line| of_rule(line).and_then(|(_, rule)| rule).map(Rule::label_set);
    // Other label sets have no rule; otherwise they would be counted.
    let known = sets.iter().map(|set| set.counting.keys.clone()).chain(lines.iter().filter_map(of_new_rule)).collect();
    let wanted = CountingRule::wanted(limit::label_sets(&mut *connection, known).await?, &policies);
    // More label sets than the maximum stay if they existed before.
    if wanted.len() > LABEL_SETS_MAX.max(sets.len()) {
        return Err(StoreError::TooManyLabelSets { most: LABEL_SETS_MAX });
    }
    let wanted_keys: BTreeSet<_> = wanted.iter().map(|counting| &counting.keys).collect();
    let decided = sets.iter().filter(|set| set.is_counted).map(|set| set.counting.keys.clone()).collect();
    // A deciding label set stays until its successor decides.
    let is_over = |set: &LabelSet| match set.is_counted {
        true => !wanted_keys.contains(&set.counting.keys),
        false => !wanted.contains(&set.counting),
    };
    let (over, kept): (Vec<_>, Vec<_>) = sets.into_iter().partition(is_over);
    if !over.is_empty() {
        label_set::set_state(connection, &ids(&over), LabelSetState::Retired).await?;
    }
    let (mut begun, mut before) = (Vec::new(), Vec::new());
    for counting in wanted.iter().filter(|counting| !kept.iter().any(|set| set.counting == **counting)) {
        before.extend(kept.iter().filter(|set| set.counting.keys == counting.keys).map(|set| set.id));
        begun.push(label_set::insert(connection, counting.clone()).await?);
    }
    Ok(RecountPlan { begun, before, decided })
}
