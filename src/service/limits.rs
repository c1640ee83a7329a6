//! Limits: who may hold how much. Rules change behind a fence that is closed for a moment, in which nobody grants or gives back; so
//! every ticket is counted by the rules before a change or by those after it. A label set that is new is counted in the background,
//! beside the running counters, and decides when all tickets are counted.
//!
//! - `fence`: one change behind it; `replace`: all rules at once; `scopes`: what scopes hold, as it is listed;
//! - `on_demand`: label sets that requests have counted by their caps.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::PgConnection;
use tokio::{
    sync::{Mutex, Notify, Semaphore},
    time::Instant,
};

use crate::{
    domain::{
        limit::{Expected, LabelSet, Limits, Pattern, Rule, RuleRecord, ScopeUsage},
        name::Name,
        operation::Rejection,
        policy::Policy,
        principal::{Actor, Principal},
    },
    error::Error,
    store::{
        Store, StoreError, label_resource,
        label_set::{self, State},
        limit, policy,
        session::{Session, answered},
    },
};

mod fence;
mod on_demand;
mod replace;
mod scopes;

use fence::{Change, Made, patiently};

pub use scopes::{ScopeFilter, Scopes};

/// How many scopes over their limit an answer names.
const OVER_MAX: usize = 100;

/// How many scopes are looked at for those: in pages, up to so many.
const LOOKED_AT_MAX: i64 = 20_000;
const PAGE: i64 = 1000;

/// How many calls look whether their rules decide already, each on a connection; the others have their turn.
const LOOKING_MAX: usize = 4;

/// How often to look whether a rule decides already.
const POLL: Duration = Duration::from_millis(20);

/// How much of the caller's time is left for the answer, when a rule does not decide yet.
const MARGIN: Duration = Duration::from_millis(100);

/// Changes and tells the limits.
#[derive(Clone, Debug)]
pub struct LimitService {
    store: Store,
    /// There is something to count.
    counting: Arc<Notify>,
    /// One change at a time, on one connection, however many are wanted: the fence lets no more through.
    changing: Arc<Mutex<()>>,
    /// One request at a time has label sets counted.
    on_demand: Arc<Mutex<()>>,
    looking: Arc<Semaphore>,
    /// The rules as they were last read, so that pages of them need not be read again and again.
    known: Arc<std::sync::Mutex<Arc<Limits>>>,
}

/// What became of a rule that was set.
#[derive(Debug, Clone)]
pub enum Set {
    /// It decides; these scopes hold more than it allows, or the first of them.
    InForce(Vec<ScopeUsage>),
    /// It is set, and decides as soon as all tickets are counted.
    Counting,
}

impl LimitService {
    /// On top of the store; `counting` wakes whoever counts.
    pub fn new(store: Store, counting: Arc<Notify>) -> Self {
        let looking = Arc::new(Semaphore::new(LOOKING_MAX));
        let (changing, on_demand) = Default::default();
        Self { store, counting, changing, on_demand, looking, known: Arc::default() }
    }

    /// Adds a rule, or changes the one with the same pattern if that is `expected`, and waits until it decides. If it is so already, and by
    /// the same principal, nothing is changed, whatever was expected.
    ///
    /// # Errors
    /// [`Rejection::LimitChanged`]; [`Error::LockTimeout`] if the fence could not be closed until `deadline`;
    /// [`Error::CommitUnknown`].
    pub async fn set(&self, by: &Actor, rule: Rule, expected: Expected, deadline: Instant) -> Result<Set, Error> {
        self.change(by, deadline, &Change::Set(rule.clone(), expected)).await?;
        // Whatever happens now, the rule is set: no error may claim that it is not.
        let told = tokio::time::timeout_at(deadline, self.until_in_force(&rule.pattern, deadline)).await;
        told.unwrap_or(Ok(Set::Counting)).map_err(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "a limit was set, and cannot be told of");
            Error::CommitUnknown
        })
    }

    /// Removes a rule, if it is what was `expected`.
    ///
    /// # Errors
    /// [`Rejection::NoSuchLimit`]; [`Rejection::LimitChanged`]; [`Error::LockTimeout`] if the fence could not be closed until
    /// `deadline`.
    pub async fn delete(
        &self,
        by: &Actor,
        pattern: &Pattern,
        expected: Expected,
        deadline: Instant,
    ) -> Result<(), Error> {
        let made = self.change(by, deadline, &Change::Delete(pattern.clone(), expected)).await?;
        if !made.lines.is_empty() { Ok(()) } else { Err(Rejection::NoSuchLimit(pattern.to_string()).into()) }
    }

    /// Gives a kind of EMs, by its application name, a policy. It takes effect when what it changes has been counted.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if the fence could not be closed until `deadline`.
    pub async fn set_policy(
        &self,
        by: &Actor,
        em_kind: &Name,
        policy: &Policy,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.change(by, deadline, &Change::Policy(em_kind.clone(), policy.clone())).await?;
        // Set in any case; who does not want to wait any longer is not told when it is counted.
        self.until_counted(deadline).await.map(drop).map_err(|_| Error::CommitUnknown)
    }

    /// The policies of all kinds of EMs there are or were, by application name.
    pub async fn policies(&self) -> Result<BTreeMap<Name, Policy>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(answered(policy::read(&mut *connection)).await?)
    }

    /// Up to `limit` rules in the order in which they are checked, from behind `after`, each with whether it decides already; and
    /// the last of them, if more follow. Those whose pattern is not to be shown are left out.
    pub async fn list(
        &self,
        after: Option<&Pattern>,
        limit: usize,
        is_shown: impl Fn(&Pattern) -> bool,
    ) -> Result<(Vec<(RuleRecord, bool)>, Option<Pattern>), Error> {
        let mut connection = self.store.operators().acquire().await?;
        let limits = answered(self.current(&mut connection)).await?;
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
        let mut records = answered(limit::records(&mut *connection, patterns)).await?;
        let next = page.last().filter(|_| !is_last).map(|(rule, _)| rule.pattern.clone());
        // One that was removed meanwhile is left out.
        let record = |(rule, decides): (&Rule, bool)| Some((records.remove(&rule.pattern)?, decides));
        Ok((page.into_iter().filter_map(record).collect(), next))
    }

    /// The rules, and which of them decide. They are read again only if they have changed.
    async fn current(&self, connection: &mut PgConnection) -> Result<Arc<Limits>, StoreError> {
        let known = self.known().clone();
        let limits = limit::current(connection, &known).await?;
        self.known().clone_from(&limits);
        Ok(limits)
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn known(&self) -> MutexGuard<'_, Arc<Limits>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes rules, and has counted what there is to count then.
    async fn change(&self, by: &Actor, deadline: Instant, change: &Change) -> Result<Made, Error> {
        let _turn = tokio::time::timeout_at(deadline, self.changing.lock()).await.map_err(|_| Error::LockTimeout)?;
        let made = patiently(&mut self.store.operator_session(), deadline, change, by).await;
        self.counting.notify_one();
        made
    }

    /// Waits until nothing is being counted; false if that is not so at `deadline`, with a margin for the answer.
    async fn until_counted(&self, deadline: Instant) -> Result<bool, Error> {
        let counted = async {
            loop {
                // Held for the look alone, as by those who wait for a limit.
                let turn = self.looking.acquire().await;
                if answered(label_set::in_state(&self.store.pool().await?, State::Counting)).await?.is_empty() {
                    return Ok::<bool, StoreError>(true);
                }
                drop(turn);
                tokio::time::sleep(POLL).await;
            }
        };
        let until = deadline - MARGIN.min(deadline.saturating_duration_since(Instant::now()));
        Ok(tokio::time::timeout_at(until, counted).await.unwrap_or(Ok(false))?)
    }

    /// Waits until rules of this pattern's label set decide; then tells the scopes that hold more than theirs allows.
    async fn until_in_force(&self, pattern: &Pattern, deadline: Instant) -> Result<Set, Error> {
        let keys: BTreeSet<String> = pattern.keys().map(str::to_owned).collect();
        loop {
            // Held for the look alone: others look, too, while this one waits.
            let turn = self.looking.acquire().await.map_err(|_| Error::ShuttingDown)?;
            let sets = answered(label_set::read(&self.store.pool().await?)).await?;
            let of_keys: Vec<&LabelSet> = sets.iter().filter(|set| set.counting.keys == keys).collect();
            match of_keys.iter().find(|set| set.is_counted) {
                Some(set) => return self.over(&mut self.store.operator_session(), set.id).await.map(Set::InForce),
                // Somebody has deleted it again.
                None if of_keys.is_empty() => return Ok(Set::Counting),
                None if Instant::now() + POLL + MARGIN > deadline => return Ok(Set::Counting),
                None => {}
            }
            drop(turn);
            tokio::time::sleep(POLL).await;
        }
    }

    /// Scopes of a label set that hold more than their rules allow.
    async fn over(&self, session: &mut Session, label_set_id: i64) -> Result<Vec<ScopeUsage>, Error> {
        let limits = answered(self.current(session.get().await?)).await?;
        let (mut over, mut after, mut looked_at) = (Vec::new(), Vec::new(), 0);
        while over.len() < OVER_MAX && looked_at < LOOKED_AT_MAX {
            let page = answered(label_resource::list_set(session.get().await?, label_set_id, &after, PAGE)).await?;
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

/// Has label sets decide whose tickets are all counted; those that counted the same labels before count no more.
///
/// # Errors
/// [`Error::LockTimeout`] if the fence could not be closed until `deadline`; [`Error::CommitUnknown`].
pub async fn decide(session: &mut Session, counted: &[i64], deadline: Instant) -> Result<(), Error> {
    patiently(session, deadline, &Change::Decide(counted.to_vec()), &Principal::Service.into()).await?;
    Ok(())
}

/// Has label sets counted anew that an earlier release counts otherwise; until that is done, they decide as they did.
///
/// # Errors
/// As [`decide`].
pub async fn recount(session: &mut Session, deadline: Instant) -> Result<(), Error> {
    patiently(session, deadline, &Change::Recount, &Principal::Service.into()).await?;
    Ok(())
}
