//! Limits: who may hold how much. Rules change behind a fence that is closed for a moment, in which nobody grants or gives back; so
//! every ticket is counted by the rules before a change or by those after it. A label set that is new is counted in the background,
//! beside the running counters, and decides when all tickets are counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::{Connection as _, PgConnection};
use tokio::{
    sync::{Mutex, Notify, Semaphore},
    time::Instant,
};

use crate::{
    domain::{
        limit::{
            Counting, Expected, LABEL_SETS_MAX, LabelSet, Limits, Pattern, Rule, RuleChanges, RuleRecord, ScopeUsage,
        },
        name::Name,
        operation::Rejection,
        policy::Policy,
        principal::{Actor, Principal},
    },
    error::Error,
    store::{
        Store, StoreError,
        action_record::{self, LimitLine},
        em_resource, label_resource,
        label_set::{self, State},
        limit, limit_change, policy,
        session::{self, Session, answered},
        waiting::{self, Freed},
    },
};

mod replace;
mod scopes;

pub use scopes::{ScopeFilter, Scopes};

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
        Self { store, counting, changing: Arc::default(), looking, known: Arc::default() }
    }

    /// Adds a rule, or changes the one with the same pattern if that is `expected`, and waits until it decides.
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
        let made = patiently(&mut self.store.session(), deadline, change, by).await;
        self.counting.notify_one();
        made
    }

    /// Waits until nothing is being counted; false if that is not so at `deadline`, with a margin for the answer.
    async fn until_counted(&self, deadline: Instant) -> Result<bool, Error> {
        let counted = async {
            loop {
                // Held for the look alone, as by those who wait for a limit.
                let turn = self.looking.acquire().await;
                if answered(label_set::in_state(self.store.pool(), State::Counting)).await?.is_empty() {
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
            let sets = answered(label_set::read(self.store.pool())).await?;
            let of_keys: Vec<&LabelSet> = sets.iter().filter(|set| set.counting.keys == keys).collect();
            match of_keys.iter().find(|set| set.is_counted) {
                Some(set) => return self.over(&mut self.store.session(), set.id).await.map(Set::InForce),
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

/// What can be changed behind the fence.
enum Change {
    /// How is counted: by this release.
    Recount,
    /// A rule is new, or has another maximum, if there was what was expected.
    Set(Rule, Expected),
    /// The rule of this pattern goes, if it is what was expected.
    Delete(Pattern, Expected),
    /// These are all the rules.
    Replace(Vec<Rule>),
    /// A kind of EMs has another policy.
    Policy(Name, Policy),
    /// Label sets whose tickets are all counted decide.
    Decide(Vec<i64>),
}

/// What a change has changed.
#[derive(Default)]
struct Made {
    /// For the history.
    lines: Vec<LimitLine>,
    /// Which rules are others than before, where all were replaced.
    changes: RuleChanges,
    /// Label sets that are new, and those that decide until they do.
    begun: Vec<LabelSet>,
    before: Vec<i64>,
}

impl Change {
    /// While others grant and give back, who see nothing of it yet.
    async fn make(&self, connection: &mut PgConnection, by: &Actor) -> Result<Made, FencedError> {
        let mut changes = RuleChanges::default();
        let lines = match self {
            Self::Recount => vec![],
            Self::Set(rule, expected) => {
                let found = limit::records(&mut *connection, [&rule.pattern]).await?;
                let found = found.get(&rule.pattern);
                expected.check(&rule.pattern, found).map_err(FencedError::Rejected)?;
                limit::upsert(connection, slice::from_ref(rule), &by.principal).await?;
                vec![LimitLine::Set(rule.clone(), found.map(|found| found.rule.clone()))]
            }
            Self::Delete(pattern, expected) => {
                if let Some(found) = limit::records(&mut *connection, [pattern]).await?.get(pattern) {
                    expected.check(pattern, Some(found)).map_err(FencedError::Rejected)?;
                }
                delete(connection, slice::from_ref(pattern)).await?
            }
            Self::Replace(rules) => {
                changes = RuleChanges::between(limit::rules(&mut *connection).await?, rules);
                let gone: Vec<Pattern> = changes.removed.iter().map(|rule| rule.pattern.clone()).collect();
                let changed = changes.changed.iter().map(|(before, after)| (after, Some(before)));
                let new: Vec<_> = changes.added.iter().map(|rule| (rule, None)).chain(changed).collect();
                let mut lines = delete(connection, &gone).await?;
                let rules: Vec<Rule> = new.iter().map(|(rule, _)| (*rule).clone()).collect();
                limit::upsert(connection, &rules, &by.principal).await?;
                lines.extend(new.into_iter().map(|(rule, before)| LimitLine::Set(rule.clone(), before.cloned())));
                lines
            }
            Self::Policy(kind, policy) => {
                let before = policy::read(&mut *connection).await?.remove(kind);
                policy::upsert(connection, kind, policy).await?;
                vec![LimitLine::Policy(kind.clone(), policy.clone(), before)]
            }
            Self::Decide(counted) => {
                let lines = switch(connection, counted).await?;
                return Ok(Made { lines, ..Made::default() });
            }
        };
        let (begun, before) = reconcile(connection, &lines).await?;
        Ok(Made { lines, changes, begun, before })
    }
}

impl Made {
    /// What it has changed of the rules: patterns with their rules, or without one if it has gone.
    fn of_rules(&self) -> Vec<(&Pattern, Option<&Rule>)> {
        self.lines.iter().filter_map(of_rule).collect()
    }

    /// Inside the fence: where there is no EM, there is no ticket to count, and none registers meanwhile; and the history tells of
    /// the change behind what was granted before it, and before what is granted after it.
    async fn finish(&self, connection: &mut PgConnection, by: &Actor) -> Result<(), StoreError> {
        let mut lines = self.lines.clone();
        if !self.begun.is_empty() && !em_resource::is_any(&mut *connection).await? {
            label_set::set_state(connection, &self.before, State::Retired).await?;
            label_set::set_state(connection, &ids(&self.begun), State::Counted).await?;
            lines.extend(self.begun.iter().map(in_force));
        }
        action_record::insert_limits(connection, &lines, by).await
    }
}

/// What a line tells of a rule.
fn of_rule(line: &LimitLine) -> Option<(&Pattern, Option<&Rule>)> {
    match line {
        LimitLine::Set(rule, _) => Some((&rule.pattern, Some(rule))),
        LimitLine::Deleted(rule) => Some((&rule.pattern, None)),
        LimitLine::Policy(..) | LimitLine::InForce(_) => None,
    }
}

fn ids<'a>(sets: impl IntoIterator<Item = &'a LabelSet>) -> Vec<i64> {
    sets.into_iter().map(|set| set.id).collect()
}

fn in_force(set: &LabelSet) -> LimitLine {
    LimitLine::InForce(set.counting.keys.clone())
}

/// Those that were there.
async fn delete(connection: &mut PgConnection, patterns: &[Pattern]) -> Result<Vec<LimitLine>, StoreError> {
    Ok(limit::delete(connection, patterns).await?.into_iter().map(LimitLine::Deleted).collect())
}

/// Has label sets decide instead of those that counted the same labels.
async fn switch(connection: &mut PgConnection, counted: &[i64]) -> Result<Vec<LimitLine>, StoreError> {
    let sets = label_set::read(&mut *connection).await?;
    // One that was given up meanwhile is not there.
    let (now, others): (Vec<_>, Vec<_>) =
        sets.into_iter().partition(|set| counted.contains(&set.id) && !set.is_counted);
    let keys: BTreeSet<_> = now.iter().map(|set| &set.counting.keys).collect();
    let before = others.iter().filter(|set| set.is_counted && keys.contains(&set.counting.keys));
    label_set::set_state(connection, &ids(before), State::Retired).await?;
    label_set::set_state(connection, &ids(&now), State::Counted).await?;
    Ok(now.iter().map(in_force).collect())
}

/// Why a change inside the fence was not made.
#[derive(Debug)]
enum FencedError {
    /// It could not be.
    Refused(StoreError),
    /// It was not to be.
    Rejected(Rejection),
    /// The connection broke while it committed: it may have been.
    Unknown(StoreError),
}

impl From<StoreError> for FencedError {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

impl From<sqlx::Error> for FencedError {
    fn from(error: sqlx::Error) -> Self {
        StoreError::from(error).into()
    }
}

impl From<FencedError> for Error {
    fn from(error: FencedError) -> Self {
        match error {
            FencedError::Refused(error) => error.into(),
            FencedError::Rejected(rejection) => rejection.into(),
            FencedError::Unknown(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the connection broke while committing");
                Self::CommitUnknown
            }
        }
    }
}

/// Makes a change, trying again until `deadline`: where somebody counts for longer than others should wait, they go on for a moment
/// first; where all batches take so long, nobody waits longer for this than for those.
async fn patiently(session: &mut Session, deadline: Instant, change: &Change, by: &Actor) -> Result<Made, Error> {
    let mut patience = session::HURRY;
    loop {
        let made = async {
            let connection = session.get().await.map_err(Error::from)?;
            fenced(connection, patience, change, by).await.map_err(Error::from)
        };
        match tokio::time::timeout_at(deadline, made).await.unwrap_or(Err(Error::LockTimeout)) {
            Ok(made) => return Ok(made),
            Err(Error::LockTimeout) if Instant::now() + PAUSE < deadline => {
                session.reset();
                tokio::time::sleep(PAUSE).await;
                patience = (patience * 2).min(PATIENCE_MAX);
            }
            Err(error) => {
                session.reset();
                return Err(error);
            }
        }
    }
}

/// Makes a change while nobody else changes the limits: most of it while others grant and give back; then the fence is closed, in
/// which nobody does, for what has to be there and for the commit.
async fn fenced(
    connection: &mut PgConnection,
    patience: Duration,
    change: &Change,
    by: &Actor,
) -> Result<Made, FencedError> {
    let prepared = answered(async {
        let mut transaction = connection.begin().await?;
        session::hurried(&mut transaction, patience).await?;
        let before = limit::begin_change(&mut transaction).await?;
        let made = change.make(&mut transaction, by).await?;
        limit_change::insert(&mut transaction, before, &made.of_rules()).await?;
        waiting::notify(&mut *transaction, &[Freed::anywhere()]).await?;
        limit::close_fence(&mut transaction).await?;
        made.finish(&mut transaction, by).await?;
        Ok::<_, FencedError>((transaction, made))
    });
    let (transaction, made) = prepared.await?;
    let committed = answered(async { transaction.commit().await.map_err(StoreError::from) });
    committed.await.map_err(FencedError::Unknown)?;
    Ok(made)
}

/// Brings what is counted in line with the rules and policies there are now: what is missing is begun, and what is not wanted any
/// more ends. Answers the label sets that are new, and those that decide until they do.
async fn reconcile(
    connection: &mut PgConnection,
    lines: &[LimitLine],
) -> Result<(Vec<LabelSet>, Vec<i64>), StoreError> {
    let policies = policy::read(&mut *connection).await?;
    let sets = label_set::read(&mut *connection).await?;
    let of_new_rule = |line: &LimitLine| match line {
        LimitLine::Set(rule, _) => Some(rule.label_set()),
        LimitLine::Deleted(_) | LimitLine::Policy(..) | LimitLine::InForce(_) => None,
    };
    // Of all others, no rule is there, or they would be counted.
    let known = sets.iter().map(|set| set.counting.keys.clone()).chain(lines.iter().filter_map(of_new_rule)).collect();
    let wanted = Counting::wanted(limit::label_sets(&mut *connection, known).await?, &policies);
    // What there was before goes on, also if it is more than that.
    if wanted.len() > LABEL_SETS_MAX.max(sets.len()) {
        return Err(StoreError::TooManyLabelSets { most: LABEL_SETS_MAX });
    }
    let wanted_keys: BTreeSet<_> = wanted.iter().map(|counting| &counting.keys).collect();
    // One that decides goes on until its successor does.
    let is_over = |set: &LabelSet| match set.is_counted {
        true => !wanted_keys.contains(&set.counting.keys),
        false => !wanted.contains(&set.counting),
    };
    let (over, kept): (Vec<_>, Vec<_>) = sets.into_iter().partition(is_over);
    if !over.is_empty() {
        label_set::set_state(connection, &ids(&over), State::Retired).await?;
    }
    let (mut begun, mut before) = (Vec::new(), Vec::new());
    for counting in wanted.iter().filter(|counting| !kept.iter().any(|set| set.counting == **counting)) {
        before.extend(kept.iter().filter(|set| set.counting.keys == counting.keys).map(|set| set.id));
        begun.push(label_set::insert(connection, counting.clone()).await?);
    }
    Ok((begun, before))
}
