//! Limits: who may hold how much. Rules change in transactions of their own, during which nobody grants or gives back; so every
//! ticket is counted by the rules before a change or by those after it, and a counter that is new starts from the true sum.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use sqlx::{Connection as _, PgConnection};

use crate::{
    domain::{
        limit::{LimitedScope, Limits, Pattern, Rule},
        name::Name,
        operation::Rejection,
        policy::Policy,
        resource::ResourceError,
        scope::{Scope, Usage},
    },
    error::Error,
    store::{
        Store, StoreError, label_resource, limit, policy,
        session::{self, answered},
        user_resource::{self, Group},
        waiting::{self, Freed},
    },
};

/// How many scopes over their limit an answer names.
const OVER_MAX: usize = 100;

/// Changes and tells the limits.
#[derive(Clone, Debug)]
pub struct LimitService {
    store: Store,
}

/// A scope, what it holds, and the rule that decides there.
#[derive(Debug, Clone)]
pub struct ScopeUsage {
    /// Which, and its rule.
    pub limited: LimitedScope,
    /// What its live tickets hold together.
    pub usage: Usage,
}

impl ScopeUsage {
    /// Whether it holds more than its rule allows: a rule was lowered below what was held, and nothing is granted until it drains.
    pub fn is_over(&self) -> bool {
        let held = |dimension| self.usage.used.get(dimension).saturating_add(self.usage.locked.get(dimension));
        self.limited.rule.as_ref().is_some_and(|rule| rule.max.iter().any(|(dimension, max)| held(dimension) > *max))
    }
}

impl LimitService {
    /// On top of the store.
    pub fn new(store: Store) -> Self {
        Self { store }
    }

    /// Adds a rule, or changes the one with the same pattern. Answers with scopes that hold more than it allows.
    pub async fn set(&self, rule: Rule) -> Result<Vec<ScopeUsage>, Error> {
        self.change(async |connection, _| limit::upsert(connection, &rule).await).await?;
        // Whatever happens now, the rule is set: no error may claim that it is not.
        self.over(&rule.pattern).await.map_err(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "a limit was set, and cannot be told of");
            Error::CommitUnknown
        })
    }

    /// Removes a rule.
    ///
    /// # Errors
    /// [`Rejection::NoSuchLimit`].
    pub async fn delete(&self, pattern: &Pattern) -> Result<(), Error> {
        let mut existed = false;
        self.change(async |connection, _| {
            existed = limit::delete(connection, pattern).await?;
            Ok(())
        })
        .await?;
        if existed { Ok(()) } else { Err(Rejection::NoSuchLimit(pattern.to_string()).into()) }
    }

    /// Makes `rules` all the rules there are.
    pub async fn replace(&self, rules: &[Rule]) -> Result<(), Error> {
        self.change(async |connection, before| {
            for old in before.rules().filter(|old| !rules.iter().any(|rule| rule.pattern == old.pattern)) {
                limit::delete(connection, &old.pattern).await?;
            }
            for rule in rules {
                limit::upsert(connection, rule).await?;
            }
            Ok(())
        })
        .await
    }

    /// Gives a kind of EMs, by its application name, a policy.
    pub async fn set_policy(&self, em_kind: &Name, policy: &Policy) -> Result<(), Error> {
        self.change(async |connection, _| policy::upsert(connection, em_kind, policy).await).await
    }

    /// The policies of all kinds of EMs there are or were, by application name.
    pub async fn policies(&self) -> Result<BTreeMap<Name, Policy>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(answered(policy::read(&mut *connection)).await?)
    }

    /// The rules in force.
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
            .map(|(place, scope, usage)| (place, ScopeUsage { limited: limits.of_scope(scope), usage }))
            .collect())
    }

    /// Changes rules while nobody counts by them, and brings the counters in line with the label sets that there are then.
    async fn change(
        &self,
        change: impl AsyncFnOnce(&mut PgConnection, &Limits) -> Result<(), StoreError>,
    ) -> Result<(), Error> {
        let mut connection = self.store.pool().acquire().await?;
        let mut transaction = connection.begin().await?;
        session::patient(&mut transaction).await?;
        let before = limit::lock(&mut transaction).await?;
        change(&mut transaction, &before).await?;
        let after = limit::current(&mut transaction, &Arc::default()).await?;
        let sets = |limits: &Limits| limits.label_sets().cloned().collect::<BTreeSet<_>>();
        let (old, new) = (sets(&before), sets(&after));
        // Another policy may be about every counter.
        let stays =
            |keys: &BTreeSet<String>| before.policies() == after.policies() && old.contains(keys) && new.contains(keys);
        for keys in old.iter().filter(|keys| !stays(keys)) {
            label_resource::delete_set(&mut transaction, keys).await?;
        }
        let new: Vec<_> = new.iter().filter(|keys| !stays(keys)).collect();
        if !new.is_empty() {
            let usages = true_sums(&mut transaction, &after, &new).await?;
            label_resource::insert(&mut transaction, usages.into_iter().collect()).await?;
        }
        waiting::notify(&mut *transaction, &[Freed::anywhere()]).await?;
        transaction.commit().await.map_err(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "the connection broke while committing");
            Error::CommitUnknown
        })
    }

    /// Scopes of the label set of `pattern` that hold more than their rules allow.
    async fn over(&self, pattern: &Pattern) -> Result<Vec<ScopeUsage>, Error> {
        let mut connection = self.store.pool().acquire().await?;
        let limits = answered(limit::current(&mut connection, &Arc::default())).await?;
        let keys: BTreeSet<String> = pattern.keys().map(str::to_owned).collect();
        let in_set = answered(label_resource::list_set(&mut *connection, &keys)).await?;
        let scopes = in_set.into_iter().map(|(scope, usage)| ScopeUsage { limited: limits.of_scope(scope), usage });
        Ok(scopes.filter(ScopeUsage::is_over).take(OVER_MAX).collect())
    }
}

/// What the live tickets hold in each scope of some label sets.
///
/// # Errors
/// [`StoreError::Inconsistent`] for a ticket that cannot be counted.
pub(super) async fn true_sums(
    connection: &mut PgConnection,
    limits: &Limits,
    sets: &[&BTreeSet<String>],
) -> Result<HashMap<Scope, Usage>, StoreError> {
    let mut usages: HashMap<Scope, Usage> = HashMap::new();
    let mut counted = Ok(());
    user_resource::tell_groups(connection, |group| {
        let count = group.and_then(|group| count(&mut usages, limits, sets, &group));
        if counted.is_ok() {
            counted = count;
        }
    })
    .await?;
    counted.map(|()| usages)
}

fn count(
    usages: &mut HashMap<Scope, Usage>,
    limits: &Limits,
    sets: &[&BTreeSet<String>],
    group: &Group,
) -> Result<(), StoreError> {
    let labels = group.ticket.ticket_labels();
    for scope in sets.iter().filter_map(|keys| limits.scope(&labels, keys)) {
        let usage = usages.entry(scope).or_default();
        let held = if group.ticket.is_locked() { &mut usage.locked } else { &mut usage.used };
        let overflow = |error: ResourceError| StoreError::inconsistent("linkis_user_resource_meta_data", error);
        held.add(group.ticket.resource(), group.count).map_err(overflow)?;
    }
    Ok(())
}
