//! Limits: who may hold how much. Rules change inside a fence that is closed for a moment, in which nobody grants or gives back; so
//! every ticket is counted by the rules before a change or by those after it. A label set that is new is counted in the background,
//! beside the running counters, and decides when all tickets are counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use sqlx::{Connection as _, PgConnection};
use tokio::{
    sync::{Mutex, Notify, Semaphore},
    time::Instant,
};

use crate::{
    domain::{
        action::Action,
        limit::{Counting, LimitedScope, Limits, Pattern, Rule},
        name::Name,
        operation::Rejection,
        policy::Policy,
        principal::Principal,
        resource::{Resource, ResourceType},
        scope::{Scope, Usage},
    },
    error::Error,
    store::{
        Store, StoreError, action_record, em_resource, label_resource,
        label_set::{self, State},
        limit, policy,
        session::{self, Session, answered},
        waiting::{self, Freed},
    },
};

/// How many scopes over their limit an answer names.
const OVER_MAX: usize = 100;

/// How many scopes are looked at for those: in pages, up to so many.
const LOOKED_AT_MAX: usize = 20_000;
const PAGE: i64 = 1000;

/// How many calls look whether their rules decide already, each on a connection; the others have their turn.
const LOOKING_MAX: usize = 4;

/// How often to look whether a rule decides already.
const POLL: Duration = Duration::from_millis(20);

/// How much of the caller's time is left for the answer, when a rule does not decide yet.
const MARGIN: Duration = Duration::from_millis(100);

/// How long to wait for the fence at most, where batches take long.
const PATIENCE_MAX: Duration = Duration::from_secs(2);

/// How long to pause before the fence is tried again.
const PAUSE: Duration = Duration::from_millis(25);

/// Changes and tells the limits.
#[derive(Clone, Debug)]
pub struct LimitService {
    store: Store,
    /// There is something to count.
    counting: Arc<Notify>,
    /// One change at a time, on one connection, however many are wanted: the fence lets no more through.
    changing: Arc<Mutex<()>>,
    looking: Arc<Semaphore>,
}

/// A scope, what it holds, and the rule that decides there.
#[derive(Debug, Clone)]
pub struct ScopeUsage {
    /// Which.
    pub scope: Scope,
    /// Its rule, if any.
    pub rule: Option<Arc<Rule>>,
    /// What its live tickets hold together.
    pub usage: Usage,
}

impl ScopeUsage {
    /// A counter and what it holds.
    pub fn new(limited: LimitedScope, usage: Usage) -> Self {
        Self { scope: limited.counter.scope, rule: limited.rule, usage }
    }

    /// Whether it holds more than its rule allows: a rule was lowered below what was held, and nothing is granted until it drains.
    pub fn is_over(&self) -> bool {
        let held = |dimension| self.usage.used.get(dimension).saturating_add(self.usage.locked.get(dimension));
        self.rule.as_ref().is_some_and(|rule| rule.max.iter().any(|(dimension, max)| held(dimension) > *max))
    }
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
        Self { store, counting, changing: Arc::default(), looking: Arc::new(Semaphore::new(LOOKING_MAX)) }
    }

    /// Adds a rule, or changes the one with the same pattern, and waits until it decides.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if the fence could not be closed until `deadline`; [`Error::CommitUnknown`].
    pub async fn set(&self, by: &Principal, rule: Rule, deadline: Instant) -> Result<Set, Error> {
        let (by, changed) = (by.clone(), rule.clone());
        self.change(deadline, async move |connection: &mut PgConnection| {
            limit::upsert(connection, &changed, &by).await?;
            action_record::insert_limit(connection, Action::LimitSet, &changed.pattern, &maximum(&changed), &by).await
        })
        .await?;
        // Whatever happens now, the rule is set: no error may claim that it is not.
        let told = tokio::time::timeout_at(deadline, self.until_in_force(&rule.pattern, deadline)).await;
        told.unwrap_or(Ok(Set::Counting)).map_err(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "a limit was set, and cannot be told of");
            Error::CommitUnknown
        })
    }

    /// Removes a rule.
    ///
    /// # Errors
    /// [`Rejection::NoSuchLimit`]; [`Error::LockTimeout`] if the fence could not be closed until `deadline`.
    pub async fn delete(&self, by: &Principal, pattern: &Pattern, deadline: Instant) -> Result<(), Error> {
        let (by, gone) = (by.clone(), pattern.clone());
        let existed = self
            .change(deadline, async move |connection: &mut PgConnection| {
                let Some(rule) = limit::delete(connection, &gone).await? else { return Ok(false) };
                action_record::insert_limit(connection, Action::LimitDeleted, &gone, &maximum(&rule), &by).await?;
                Ok(true)
            })
            .await?;
        if existed { Ok(()) } else { Err(Rejection::NoSuchLimit(pattern.to_string()).into()) }
    }

    /// Makes `rules` all the rules there are.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if the fence could not be closed until `deadline`.
    pub async fn replace(&self, by: &Principal, rules: &[Rule], deadline: Instant) -> Result<(), Error> {
        let (by, rules) = (by.clone(), rules.to_vec());
        self.change(deadline, async move |connection: &mut PgConnection| {
            let before = limit::rules(&mut *connection).await?;
            for old in before.iter().filter(|old| !rules.iter().any(|rule| rule.pattern == old.pattern)) {
                limit::delete(connection, &old.pattern).await?;
                action_record::insert_limit(connection, Action::LimitDeleted, &old.pattern, &maximum(old), &by).await?;
            }
            for rule in rules.iter().filter(|rule| !before.contains(rule)) {
                limit::upsert(connection, rule, &by).await?;
                action_record::insert_limit(connection, Action::LimitSet, &rule.pattern, &maximum(rule), &by).await?;
            }
            Ok(())
        })
        .await
    }

    /// Gives a kind of EMs, by its application name, a policy. It takes effect when what it changes has been counted.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if the fence could not be closed until `deadline`.
    pub async fn set_policy(
        &self,
        by: &Principal,
        em_kind: &Name,
        policy: &Policy,
        deadline: Instant,
    ) -> Result<(), Error> {
        let (by, kind, policy) = (by.clone(), em_kind.clone(), policy.clone());
        self.change(deadline, async move |connection: &mut PgConnection| {
            policy::upsert(connection, &kind, &policy).await?;
            action_record::insert_policy(connection, &kind, &policy, &by).await
        })
        .await?;
        // Set in any case; who does not want to wait any longer is not told when it is counted.
        let counted = async {
            let _turn = self.looking.acquire().await;
            let mut session = self.store.session();
            while !answered(label_set::in_state(session.get().await?, State::Counting)).await?.is_empty() {
                tokio::time::sleep(POLL).await;
            }
            Ok::<(), StoreError>(())
        };
        match tokio::time::timeout_at(
            deadline - MARGIN.min(deadline.saturating_duration_since(Instant::now())),
            counted,
        )
        .await
        {
            Ok(counted) => counted.map_err(|_| Error::CommitUnknown),
            Err(_) => Ok(()),
        }
    }

    /// The policies of all kinds of EMs there are or were, by application name.
    pub async fn policies(&self) -> Result<BTreeMap<Name, Policy>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(answered(policy::read(&mut *connection)).await?)
    }

    /// The rules, and which of them decide.
    pub async fn current(&self) -> Result<Arc<Limits>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(answered(limit::current(&mut connection, &Arc::default())).await?)
    }

    /// Up to `limit` scopes that are counted, from behind `after` (empty for the first); each with its place.
    pub async fn scopes(&self, after: &[u8], limit: i64) -> Result<Vec<(Vec<u8>, ScopeUsage)>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let limits = answered(limit::current(&mut connection, &Arc::default())).await?;
        let rows = answered(label_resource::list(&mut *connection, after, limit)).await?;
        Ok(rows
            .into_iter()
            .map(|(place, counter, usage)| (place, ScopeUsage::new(limits.of_counter(counter), usage)))
            .collect())
    }

    /// Changes rules inside the fence, and has counted what there is to count then.
    async fn change<T>(
        &self,
        deadline: Instant,
        change: impl AsyncFn(&mut PgConnection) -> Result<T, StoreError>,
    ) -> Result<T, Error> {
        let _turn = tokio::time::timeout_at(deadline, self.changing.lock()).await.map_err(|_| Error::LockTimeout)?;
        let mut session = self.store.session();
        let mut patience = session::HURRY;
        loop {
            let changed = async {
                let connection = session.get().await.map_err(Error::from)?;
                fenced(connection, patience, async |connection: &mut PgConnection| {
                    let changed = change(connection).await?;
                    reconcile(connection).await?;
                    Ok(changed)
                })
                .await
                .map_err(Error::from)
            };
            match tokio::time::timeout_at(deadline, changed).await.unwrap_or(Err(Error::LockTimeout)) {
                // Somebody counts for longer than others should wait: let them go on for a moment. Where all batches take so long,
                // nobody waits longer for this than for those.
                Err(Error::LockTimeout) if Instant::now() + PAUSE < deadline => {
                    tokio::time::sleep(PAUSE).await;
                    patience = (patience * 2).min(PATIENCE_MAX);
                }
                changed => {
                    self.counting.notify_one();
                    return changed;
                }
            }
            session.reset();
        }
    }

    /// Waits until rules of this pattern's label set decide; then tells the scopes that hold more than theirs allows.
    async fn until_in_force(&self, pattern: &Pattern, deadline: Instant) -> Result<Set, Error> {
        let keys: BTreeSet<String> = pattern.keys().map(str::to_owned).collect();
        let _turn = self.looking.acquire().await.map_err(|_| Error::ShuttingDown)?;
        let mut session = self.store.session();
        loop {
            let sets = answered(label_set::read(session.get().await?)).await?;
            let mut of_keys = sets.iter().filter(|set| set.counting.keys == keys);
            match of_keys.find(|set| set.is_counted) {
                Some(set) => return self.over(&mut session, set.id).await.map(Set::InForce),
                None if Instant::now() + POLL + MARGIN > deadline => return Ok(Set::Counting),
                None => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// Scopes of a label set that hold more than their rules allow.
    async fn over(&self, session: &mut Session, label_set_id: i64) -> Result<Vec<ScopeUsage>, Error> {
        let limits = self.current().await?;
        let (mut over, mut after, mut looked_at) = (Vec::new(), Vec::new(), 0);
        while over.len() < OVER_MAX && looked_at < LOOKED_AT_MAX {
            let page = answered(label_resource::list_set(session.get().await?, label_set_id, &after, PAGE)).await?;
            looked_at += page.len();
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
/// [`StoreError::is_lock_timeout`] if the fence could not be closed.
pub async fn decide(session: &mut Session, counted: &[i64]) -> Result<(), StoreError> {
    let decided = fenced(session.get().await?, PATIENCE_MAX, async |connection: &mut PgConnection| {
        let sets = label_set::read(&mut *connection).await?;
        // One that was given up meanwhile is not there.
        let now = sets.iter().filter(|set| counted.contains(&set.id) && !set.is_counted);
        let ids: Vec<i64> = now.clone().map(|set| set.id).collect();
        let keys: BTreeSet<_> = now.map(|set| &set.counting.keys).collect();
        let before = sets.iter().filter(|set| set.is_counted && keys.contains(&set.counting.keys));
        label_set::set_state(connection, &before.map(|set| set.id).collect::<Vec<_>>(), State::Retired).await?;
        for keys in &keys {
            action_record::insert_in_force(connection, keys).await?;
        }
        label_set::set_state(connection, &ids, State::Counted).await
    })
    .await;
    decided.map_err(|error| match error {
        FencedError::Refused(error) | FencedError::Unknown(error) => error,
    })
}

/// Why a change inside the fence was not made.
#[derive(Debug)]
enum FencedError {
    /// It was not.
    Refused(StoreError),
    /// The connection broke while it committed: it may have been.
    Unknown(StoreError),
}

impl From<FencedError> for Error {
    fn from(error: FencedError) -> Self {
        match error {
            FencedError::Refused(error) => error.into(),
            FencedError::Unknown(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the connection broke while committing");
                Self::CommitUnknown
            }
        }
    }
}

/// Changes something inside the fence: nobody grants or gives back meanwhile.
async fn fenced<T>(
    connection: &mut PgConnection,
    patience: Duration,
    change: impl AsyncFnOnce(&mut PgConnection) -> Result<T, StoreError>,
) -> Result<T, FencedError> {
    let prepared = answered(async {
        let mut transaction = connection.begin().await?;
        session::hurried(&mut transaction, patience).await?;
        limit::lock(&mut transaction).await?;
        let changed = change(&mut transaction).await?;
        waiting::notify(&mut *transaction, &[Freed::anywhere()]).await?;
        Ok::<_, StoreError>((transaction, changed))
    });
    let (transaction, changed) = prepared.await.map_err(FencedError::Refused)?;
    let committed = answered(async { transaction.commit().await.map_err(StoreError::from) });
    committed.await.map_err(FencedError::Unknown)?;
    Ok(changed)
}

/// Brings what is counted in line with the rules and policies there are now: what is missing is begun, and what is not wanted any
/// more ends.
async fn reconcile(connection: &mut PgConnection) -> Result<(), StoreError> {
    let policies = policy::read(&mut *connection).await?;
    let wanted = Counting::wanted(limit::label_sets(&mut *connection).await?, &policies);
    let sets = label_set::read(&mut *connection).await?;
    let wanted_keys: BTreeSet<_> = wanted.iter().map(|counting| &counting.keys).collect();
    // One that decides goes on until its successor does.
    let is_over = |set: &&crate::domain::limit::LabelSet| match set.is_counted {
        true => !wanted_keys.contains(&set.counting.keys),
        false => !wanted.contains(&set.counting),
    };
    let over: Vec<i64> = sets.iter().filter(is_over).map(|set| set.id).collect();
    if !over.is_empty() {
        label_set::set_state(connection, &over, State::Retired).await?;
    }
    let missing = wanted.iter().filter(|counting| !sets.iter().any(|set| set.counting == **counting));
    let missing: Vec<&Counting> = missing.collect();
    if missing.is_empty() {
        return Ok(());
    }
    // Where there is no EM, there is no ticket to count.
    let state = if em_resource::is_any(&mut *connection).await? { State::Counting } else { State::Counted };
    for counting in missing {
        if state == State::Counted {
            let before = sets.iter().filter(|set| set.counting.keys == counting.keys && !over.contains(&set.id));
            label_set::set_state(connection, &before.map(|set| set.id).collect::<Vec<_>>(), State::Retired).await?;
            action_record::insert_in_force(connection, &counting.keys).await?;
        }
        label_set::insert(connection, counting, state).await?;
    }
    Ok(())
}

/// The maximum of a rule, for the history: nothing, if it is more than a resource may have.
fn maximum(rule: &Rule) -> Resource {
    let amounts = rule.max.iter().map(|(dimension, max)| (dimension.key(), *max)).collect();
    Resource::special(amounts).unwrap_or_else(|_| Resource::zero(ResourceType::Special))
}
