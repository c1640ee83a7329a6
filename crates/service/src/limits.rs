//! Limits: stores, changes and lists the rules, and starts the counting that new rules need.
//!
//! A change takes effect behind the limits fence: a table lock under which no batch runs. Each ticket is therefore counted by
//! the rules before or after the change. A new label set is counted in the background and decides requests when all tickets are
//! counted. Never: changes a rule outside the fence.
//! Callers: `rm_edge::limit`, `rm_edge::usage`, `request_resource` (caps), `background::count_label_sets`, and the server (limits
//! file).
//!
//! - `fence`: one change behind the fence; `replace`: all rules at once; `scopes`: use of scopes;
//! - `on_demand`: label sets that requests need for their caps.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use async_recursion::async_recursion as boxed;
use sqlx::PgConnection;
use tokio::{
    sync::{Mutex, Notify, Semaphore},
    time::Instant,
};

use crate::{error::Error, lock::lock};
use rm_model::{
    limit::{LabelPattern, LabelSet, Limits, Rule, RulePrecondition, RuleRecord, ScopeUsage},
    name::Name,
    operation::Rejection,
    order::QueueOrder,
    policy::Policy,
    principal::{Actor, Principal},
    priority::{Priorities, PriorityRule},
    reclaim::{ReclaimPolicies, ReclaimPolicy},
};
use rm_store::{
    Store, StoreError, label_resource,
    label_set::{self, LabelSetState},
    limit, policy, queue_order, queue_priority, reclaim_policy,
    session::{Session, within_timeout},
};
use rm_telemetry::cause;

mod fence;
mod on_demand;
mod replace;
mod scopes;

use fence::{ChangeResult, FencedChange, patiently};

pub use scopes::{ScopeFilter, ScopePage};

/// Maximum number of scopes above their limit in a reply.
const OVER_MAX: usize = 100;

/// Maximum number of scopes to examine for them, and per page.
const LOOKED_AT_MAX: i64 = 20_000;
const PAGE: i64 = 1000;

/// Maximum number of calls that check at once whether their rules decide, each on a connection.
const LOOKING_MAX: usize = 4;

/// Interval between checks whether a rule decides.
const POLL: Duration = Duration::from_millis(20);

/// Time before the caller's deadline that is reserved for the reply if a rule does not decide yet.
const MARGIN: Duration = Duration::from_millis(100);

/// Service for limits. Clones share it.
#[derive(Clone, Debug)]
pub struct LimitService {
    store: Store,
    /// Wakes the task that counts label sets.
    counting: Arc<Notify>,
    /// Serializes changes, so that they use one connection; the fence admits only one anyway.
    changing: Arc<Mutex<()>>,
    /// Serializes requests that start the counting of label sets.
    on_demand: Arc<Mutex<()>>,
    looking: Arc<Semaphore>,
    /// The rules as last read, so that pages do not read them again.
    known: Arc<std::sync::Mutex<Arc<Limits>>>,
}

/// State of a rule after its change.
#[derive(Debug, Clone)]
pub enum SetResult {
    /// The rule decides. Contains the scopes above its limit, up to `OVER_MAX`.
    InForce(Vec<ScopeUsage>),
    /// The rule is stored, and decides when all tickets are counted.
    Counting,
}

impl LimitService {
    /// Creates the service. `counting` wakes the task that counts label sets.
    pub fn new(store: Store, counting: Arc<Notify>) -> Self {
        let looking = Arc::new(Semaphore::new(LOOKING_MAX));
        let (changing, on_demand) = Default::default();
        Self { store, counting, changing, on_demand, looking, known: Arc::default() }
    }

    /// Adds a rule, or replaces the rule with the same pattern if it matches `expected`, and waits until the rule decides.
    ///
    /// If the same principal has stored an equal rule, nothing changes, regardless of `expected`.
    ///
    /// # Errors
    /// - [`Rejection::LimitChanged`] if the stored rule differs from `expected`.
    /// - [`Error::LockTimeout`] if the fence could not be closed by `deadline`.
    /// - [`Error::CommitUnknown`] if the outcome is unknown.
    #[boxed]
    pub async fn set(
        &self,
        by: &Actor,
        rule: Rule,
        expected: RulePrecondition,
        deadline: Instant,
    ) -> Result<SetResult, Error> {
        self.change(by, deadline, &FencedChange::Set(rule.clone(), expected)).await?;
        // The rule is stored from here on: no error may state that it is not.
        let state = tokio::time::timeout_at(deadline, self.until_in_force(&rule.pattern, deadline)).await;
        state.unwrap_or(Ok(SetResult::Counting)).map_err(|error| {
            tracing::warn!(error = cause(&error), "a limit was set, but its reply cannot be read");
            Error::CommitUnknown
        })
    }

    /// Deletes a rule if it matches `expected`.
    ///
    /// # Errors
    /// - [`Rejection::NoSuchLimit`]; [`Rejection::LimitChanged`] if the stored rule differs from `expected`.
    /// - [`Error::LockTimeout`] if the fence could not be closed by `deadline`.
    #[boxed]
    pub async fn delete(
        &self,
        by: &Actor,
        pattern: &LabelPattern,
        expected: RulePrecondition,
        deadline: Instant,
    ) -> Result<(), Error> {
        let made = self.change(by, deadline, &FencedChange::Delete(pattern.clone(), expected)).await?;
        if !made.lines.is_empty() { Ok(()) } else { Err(Rejection::NoSuchLimit(pattern.to_string()).into()) }
    }

    /// Sets the policy of an EM kind (an application name). The policy takes effect when its label sets are counted.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if the fence could not be closed by `deadline`.
    #[boxed]
    pub async fn set_policy(
        &self,
        by: &Actor,
        em_kind: &Name,
        policy: &Policy,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.change(by, deadline, &FencedChange::Policy(em_kind.clone(), policy.clone())).await?;
        // The policy is stored. An error only means that the end of the counting is unknown.
        self.until_counted(deadline).await.map(drop).map_err(|_| Error::CommitUnknown)
    }

    /// Returns the policies of all EM kinds that are or were registered, by application name.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn policies(&self) -> Result<BTreeMap<Name, Policy>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(within_timeout(policy::read(&mut *connection)).await?)
    }

    /// Sets the order of waiting requests. Requests that wait keep their positions and turns. An equal order changes nothing.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if the fence could not be closed by `deadline`.
    #[boxed]
    pub async fn set_order(&self, by: &Actor, order: QueueOrder, deadline: Instant) -> Result<(), Error> {
        if self.order().await? == order {
            return Ok(());
        }
        self.change(by, deadline, &FencedChange::Order(order)).await.map(drop)
    }

    /// Returns the order of waiting requests.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn order(&self) -> Result<QueueOrder, Error> {
        Ok(within_timeout(queue_order::read(&self.store.pool().await?)).await?)
    }

    /// Sets a priority rule, or replaces the one with the same pattern. Requests that wait keep their priorities. An equal rule changes
    /// nothing.
    ///
    /// # Errors
    /// - [`Rejection::TooManyPriorities`].
    /// - [`Error::LockTimeout`] if the fence could not be closed by `deadline`.
    #[boxed]
    pub async fn set_priority(&self, by: &Actor, rule: PriorityRule, deadline: Instant) -> Result<(), Error> {
        if self.priorities().await?.rules().contains(&rule) {
            return Ok(());
        }
        self.change(by, deadline, &FencedChange::SetPriority(rule)).await.map(drop)
    }

    /// Deletes a priority rule. Requests that wait keep their priorities.
    ///
    /// # Errors
    /// - [`Rejection::NoSuchPriority`].
    /// - [`Error::LockTimeout`] if the fence could not be closed by `deadline`.
    #[boxed]
    pub async fn delete_priority(&self, by: &Actor, pattern: LabelPattern, deadline: Instant) -> Result<(), Error> {
        self.change(by, deadline, &FencedChange::DeletePriority(pattern)).await.map(drop)
    }

    /// Returns the priority rules.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn priorities(&self) -> Result<Priorities, Error> {
        Ok(within_timeout(queue_priority::read(&self.store.pool().await?)).await?)
    }

    /// Sets a reclaim policy, or replaces the one with the same pattern. An equal policy changes nothing.
    ///
    /// # Errors
    /// - [`Rejection::TooManyReclaimPolicies`].
    /// - [`Error::LockTimeout`] if the fence could not be closed by `deadline`.
    #[boxed]
    pub async fn set_reclaim_policy(&self, by: &Actor, policy: ReclaimPolicy, deadline: Instant) -> Result<(), Error> {
        if self.reclaim_policies().await?.rules().contains(&policy) {
            return Ok(());
        }
        self.change(by, deadline, &FencedChange::SetReclaimPolicy(policy)).await.map(drop)
    }

    /// Deletes a reclaim policy.
    ///
    /// # Errors
    /// - [`Rejection::NoSuchReclaimPolicy`].
    /// - [`Error::LockTimeout`] if the fence could not be closed by `deadline`.
    #[boxed]
    pub async fn delete_reclaim_policy(
        &self,
        by: &Actor,
        pattern: LabelPattern,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.change(by, deadline, &FencedChange::DeleteReclaimPolicy(pattern)).await.map(drop)
    }

    /// Returns the reclaim policies.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn reclaim_policies(&self) -> Result<ReclaimPolicies, Error> {
        Ok(within_timeout(reclaim_policy::read(&self.store.pool().await?)).await?)
    }

    /// Returns up to `limit` rules after `after`, in the order of their evaluation, each with whether it decides. Rules whose
    /// pattern `is_shown` excludes are left out.
    ///
    /// Also returns the pattern of the last rule if more rules follow.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn list(
        &self,
        after: Option<&LabelPattern>,
        limit: usize,
        is_shown: &(dyn Fn(&LabelPattern) -> bool + Sync),
    ) -> Result<(Vec<(RuleRecord, bool)>, Option<LabelPattern>), Error> {
        let mut connection = self.store.operators().acquire().await?;
        let limits = within_timeout(self.current(&mut connection)).await?;
        let more = limit.saturating_add(1);
        let (mut page, mut after, mut is_end) = (Vec::new(), after, false);
        while !is_end && page.len() < more {
            let behind: Vec<(&Rule, bool)> = match after {
                Some(after) => limits.rules_behind(after, more),
                None => limits.rules().take(more).collect(),
            };
            is_end = behind.len() < more;
            after = behind.last().map(|(rule, _)| &rule.pattern);
            page.extend(behind.into_iter().filter(|(rule, _)| is_shown(&rule.pattern)));
        }
        let is_last = page.len() <= limit;
        page.truncate(limit);
        let patterns = page.iter().map(|(rule, _)| &rule.pattern);
        let mut records = within_timeout(limit::records(&mut *connection, patterns)).await?;
        let next = page.last().filter(|_| !is_last).map(|(rule, _)| rule.pattern.clone());
        // A rule that was deleted meanwhile is left out.
        let record = |(rule, decides): (&Rule, bool)| Some((records.remove(&rule.pattern)?, decides));
        Ok((page.into_iter().filter_map(record).collect(), next))
    }

    /// Returns the current rules, and which of them decide. Reads them only if they have changed.
    async fn current(&self, connection: &mut PgConnection) -> Result<Arc<Limits>, StoreError> {
        let known = lock(&self.known).clone();
        let limits = limit::current(connection, &known).await?;
        lock(&self.known).clone_from(&limits);
        Ok(limits)
    }

    /// Applies a change and wakes the task that counts label sets.
    async fn change(&self, by: &Actor, deadline: Instant, change: &FencedChange) -> Result<ChangeResult, Error> {
        let _turn = tokio::time::timeout_at(deadline, self.changing.lock()).await.map_err(|_| Error::LockTimeout)?;
        let made = patiently(&mut self.store.operator_session(), deadline, change, by).await;
        self.counting.notify_one();
        made
    }

    /// Waits until no label set is being counted. Returns false at `deadline`, less [`MARGIN`].
    async fn until_counted(&self, deadline: Instant) -> Result<bool, Error> {
        let counted = async {
            loop {
                // The permit covers one check, not the pause.
                let turn = self.looking.acquire().await;
                if within_timeout(label_set::in_state(&self.store.pool().await?, LabelSetState::Counting))
                    .await?
                    .is_empty()
                {
                    return Ok::<bool, StoreError>(true);
                }
                drop(turn);
                tokio::time::sleep(POLL).await;
            }
        };
        let until = deadline - MARGIN.min(deadline.saturating_duration_since(Instant::now()));
        Ok(tokio::time::timeout_at(until, counted).await.unwrap_or(Ok(false))?)
    }

    /// Waits until the label set of `pattern` decides. Returns the scopes above their limits.
    async fn until_in_force(&self, pattern: &LabelPattern, deadline: Instant) -> Result<SetResult, Error> {
        let keys: BTreeSet<String> = pattern.keys().map(str::to_owned).collect();
        loop {
            // The permit covers one check, not the pause.
            let turn = self.looking.acquire().await.map_err(|_| Error::ShuttingDown)?;
            let sets = within_timeout(label_set::read(&self.store.pool().await?)).await?;
            let of_keys: Vec<&LabelSet> = sets.iter().filter(|set| set.counting.keys == keys).collect();
            match of_keys.iter().find(|set| set.is_counted) {
                Some(set) => {
                    return self.over(&mut self.store.operator_session(), set.id).await.map(SetResult::InForce);
                }
                // Another caller has deleted the rule.
                None if of_keys.is_empty() => return Ok(SetResult::Counting),
                None if Instant::now() + POLL + MARGIN > deadline => return Ok(SetResult::Counting),
                None => {}
            }
            drop(turn);
            tokio::time::sleep(POLL).await;
        }
    }

    /// Returns scopes of a label set that are above their limits.
    async fn over(&self, session: &mut Session, label_set_id: i64) -> Result<Vec<ScopeUsage>, Error> {
        let limits = within_timeout(self.current(session.get().await?)).await?;
        let (mut over, mut after, mut looked_at) = (Vec::new(), Vec::new(), 0);
        while over.len() < OVER_MAX && looked_at < LOOKED_AT_MAX {
            let page =
                within_timeout(label_resource::list_set(session.get().await?, label_set_id, &after, PAGE)).await?;
            looked_at += PAGE;
            let Some((last, ..)) = page.last() else { break };
            after.clone_from(last);
            let scopes = page.into_iter().map(|(_, counter, usage)| ScopeUsage::new(limits.of_counter(counter), usage));
            over.extend(scopes.filter(ScopeUsage::is_over));
        }
        over.truncate(OVER_MAX);
        Ok(over)
    }
}

/// Activates label sets whose tickets are all counted, and retires those that counted the same labels before.
///
/// # Errors
/// [`Error::LockTimeout`] if the fence could not be closed by `deadline`; [`Error::CommitUnknown`].
pub async fn decide(session: &mut Session, counted: &[i64], deadline: Instant) -> Result<(), Error> {
    patiently(session, deadline, &FencedChange::Decide(counted.to_vec()), &Principal::Service.into()).await?;
    Ok(())
}
