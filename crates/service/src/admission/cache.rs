//! State cache: EMs and scopes as this instance last observed them, through its own commits and reads.
//!
//! The cache selects the path of a request: straight to the committer, or to a check first. The cluster view of placement is
//! part of the cache.
//!
//! Never: grants or refuses; delays a commit. Large evictions are spread over many commits.
//! Callers: `admission`, `committer` (after each commit and when a key becomes contended or free), and `heartbeat` (reports).

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::Entry},
    fmt,
    hash::Hash,
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use rm_model::{
    cap::Cap,
    em::{Em, EmInstance},
    ledger::PostCommitState,
    operation::PlacedRequest,
    placement::{ClusterView, Policies},
    report::{EmCondition, EmReport},
    scope::ScopeCounter,
};
use rm_telemetry::metrics::Metrics;

use super::{CheckState, Verdict};

/// Maximum number of cached EMs, and of cached scopes.
const EMS_MAX: usize = 100_000;
const SCOPES_MAX: usize = 100_000;

/// Number of retired entries that each commit drops, besides as many as it inserts.
const RETIRED_MIN: usize = 64;

/// Cache of one instance. Clones share it.
#[derive(Clone, Debug)]
pub struct StateCache {
    state: Arc<Mutex<ObservedChanges>>,
    choice: Arc<PlacementState>,
    commits: Arc<AtomicU64>,
    metrics: Metrics,
}

/// Cached state, with its entries in order of insertion.
#[derive(Debug, Default)]
struct ObservedChanges {
    state: CheckState,
    /// Keys of the EMs and scopes, the oldest first. Some of the EMs may have been removed.
    ems: VecDeque<EmInstance>,
    scopes: VecDeque<ScopeCounter>,
    retired: RetiredEntries,
}

impl ObservedChanges {
    fn drop_scopes(&mut self) {
        self.scopes.clear();
        self.retired.add(mem::take(&mut self.state.scopes).into_iter().map(drop));
    }

    fn drop_line(&mut self) {
        self.retired.add(mem::take(&mut self.state.line.line).into_dropped());
    }
}

/// Retired entries. Each commit locks the cache, so each drops a few of them instead of one dropping all.
#[derive(Default)]
struct RetiredEntries(VecDeque<Box<dyn Iterator<Item = ()> + Send>>);

impl RetiredEntries {
    fn add(&mut self, entries: impl Iterator<Item = ()> + Send + 'static) {
        if entries.size_hint().0 > 0 {
            self.0.push_back(Box::new(entries));
        }
    }

    /// Drops a few entries more than `arrived`, so that the retired entries decrease with each commit.
    fn drop_some(&mut self, arrived: usize) {
        let mut left = arrived.saturating_add(RETIRED_MIN);
        while left > 0
            && let Some(entries) = self.0.front_mut()
        {
            match entries.next() {
                Some(()) => left -= 1,
                None => drop(self.0.pop_front()),
            }
        }
    }
}

impl fmt::Debug for RetiredEntries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Retired").field(&self.0.len()).finish()
    }
}

/// Inserts entries. Each new key above `most` keys evicts the oldest.
fn store<K: Clone + Eq + Hash, V>(
    seen: &mut HashMap<K, V>,
    order: &mut VecDeque<K>,
    most: usize,
    entries: impl IntoIterator<Item = (K, V)>,
) {
    for (key, value) in entries {
        match seen.entry(key) {
            Entry::Occupied(mut entry) => drop(entry.insert(value)),
            Entry::Vacant(entry) => {
                order.push_back(entry.key().clone());
                entry.insert(value);
            }
        }
        if order.len() > most
            && let Some(oldest) = order.pop_front()
        {
            seen.remove(&oldest);
        }
    }
}

/// The cluster view and the changes not yet applied to it.
///
/// A commit appends to `changes` and does not wait for `view`. The next placement applies the changes before it reads the view.
#[derive(Debug, Default)]
struct PlacementState {
    view: Mutex<ClusterView>,
    changes: Mutex<PendingChanges>,
}

/// Changes since the last placement.
#[derive(Debug, Default)]
struct PendingChanges {
    /// Observed EMs; `None` until the first placement, and after [`EMS_MAX`] changes without a placement.
    seen: Option<SeenEms>,
    retired: RetiredEntries,
    /// EMs whose keys are contended.
    contended: HashSet<EmInstance>,
    /// EMs that became contended or free since the last placement: at most as many as are contended now or were contended then.
    contended_changes: HashMap<EmInstance, bool>,
}

#[derive(Debug, Default)]
struct SeenEms {
    /// EMs after their last change; `None` for a removed EM.
    ems: HashMap<EmInstance, Option<Em>>,
    /// Conditions by the last reports.
    conditions: HashMap<EmInstance, EmCondition>,
}

impl PlacementState {
    fn note(&self, note: impl FnOnce(&mut SeenEms)) {
        let mut changes = self.changes();
        changes.retired.drop_some(0);
        if let Some(seen) = &mut changes.seen {
            note(seen);
            // No placement for a long time: the next one surveys all EMs first.
            if seen.ems.len().max(seen.conditions.len()) > EMS_MAX {
                let SeenEms { ems, conditions } = mem::take(seen);
                changes.seen = None;
                changes.retired.add(ems.into_iter().map(drop));
                changes.retired.add(conditions.into_iter().map(drop));
            }
        }
    }

    fn note_ems(&self, ems: &[Em], gone: &[EmInstance]) {
        self.note(|seen| {
            seen.ems.extend(gone.iter().map(|em| (em.clone(), None)));
            seen.ems.extend(ems.iter().map(|em| (em.instance.clone(), Some(em.clone()))));
        });
    }

    fn note_contended(&self, em: &EmInstance, is_contended: bool) {
        let PendingChanges { contended, contended_changes, .. } = &mut *self.changes();
        let is_new = if is_contended { contended.insert(em.clone()) } else { contended.remove(em) };
        // Two opposite changes before the next placement cancel each other.
        if is_new && contended_changes.remove(em).is_none() {
            contended_changes.insert(em.clone(), is_contended);
        }
    }

    fn look<T>(&self, look: impl FnOnce(&mut ClusterView) -> T) -> T {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        // The view is locked first, so that no other placement reads it before the changes are applied. Commits wait for
        // neither lock.
        let (seen, contended) = {
            let mut changes = self.changes();
            (changes.seen.replace(SeenEms::default()), mem::take(&mut changes.contended_changes))
        };
        let SeenEms { ems, conditions } = seen.unwrap_or_default();
        for (instance, em) in ems {
            match em {
                Some(em) => view.update(em),
                None => view.remove(&instance),
            }
        }
        for (instance, condition) in conditions {
            view.report(&instance, condition);
        }
        for (instance, is_contended) in contended {
            view.note_contended(&instance, is_contended);
        }
        look(&mut view)
    }

    /// Locks the changes. The changes stay consistent if a holder panics.
    fn changes(&self) -> MutexGuard<'_, PendingChanges> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StateCache {
    /// Creates an empty cache.
    pub fn new(metrics: Metrics) -> Self {
        Self { state: Arc::default(), choice: Arc::default(), commits: Arc::default(), metrics }
    }

    /// Stores the state after a commit.
    pub fn update(&self, standing: PostCommitState) {
        self.commits.fetch_add(1, Ordering::Relaxed);
        self.choice.note_ems(&standing.ems, &standing.gone);
        self.remember(&mut self.state(), standing);
    }

    /// Returns the number of commits stored.
    pub(super) fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// Stores the state that a check has read, except what commits have changed since their number was `commits`.
    pub(super) fn update_by_look(&self, mut standing: PostCommitState, commits: u64) {
        let mut seen = self.state();
        if self.commits() != commits {
            let known = &seen.state;
            if standing.limits.version() != known.limits.version() {
                return;
            }
            standing.ems.retain(|em| !known.ems.contains_key(&em.instance));
            standing.scopes.retain(|(scope, _)| !known.scopes.contains_key(scope));
            let wait_keys = standing.line.wait_keys.take().unwrap_or_default();
            standing.line.wait_keys =
                Some(wait_keys.into_iter().filter(|(wait_key, _)| !known.line.line.contains(wait_key)).collect());
        }
        self.choice.note_ems(&standing.ems, &standing.gone);
        self.remember(&mut seen, standing);
    }

    fn state(&self) -> MutexGuard<'_, ObservedChanges> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, seen: &mut ObservedChanges, standing: PostCommitState) {
        seen.retired.drop_some(standing.scopes.len());
        if standing.limits.version() != seen.state.limits.version() {
            // Counters of other label sets would only use memory.
            seen.drop_scopes();
            seen.state.limits = standing.limits;
        }
        for gone in &standing.gone {
            seen.state.ems.remove(gone);
        }
        if standing.line.wait_keys.is_none() {
            seen.drop_line();
        }
        let ObservedChanges { state, ems, scopes, .. } = seen;
        // An evicted entry costs a check, and nothing else.
        store(&mut state.ems, ems, EMS_MAX, standing.ems.into_iter().map(|em| (em.instance.clone(), em)));
        store(&mut state.scopes, scopes, SCOPES_MAX, standing.scopes);
        if let Some(wait_keys) = standing.line.wait_keys {
            state.line.line.replace(wait_keys, &standing.line.line);
        }
        self.metrics.caches.seen(state.ems.len(), state.scopes.len(), state.line.line.wait_keys());
    }

    /// Whether the request fits by the cached state.
    pub(super) fn fitted(&self, request: &PlacedRequest) -> bool {
        self.state().state.fits(request)
    }

    /// Returns the verdict on a queued request; `None` if the state it needs is not cached.
    pub(super) fn verdict(&self, request: &PlacedRequest) -> Option<Verdict> {
        self.state().state.verdict(request).ok()
    }

    /// Stores EMs as read.
    pub(super) fn take_over(&self, ems: HashMap<EmInstance, Em>) {
        let ems: Vec<Em> = ems.into_values().collect();
        self.choice.note_ems(&ems, &[]);
    }

    /// Stores the condition of an EM by its report.
    pub fn report(&self, report: &EmReport) {
        self.choice.note(|seen| {
            seen.conditions.insert(report.em.clone(), EmCondition::reported(report));
        });
    }

    /// Records whether the key of an EM is contended, so that changes of the EM wait. Repeated calls change nothing.
    pub fn note_contended(&self, em: &EmInstance, is_contended: bool) {
        self.choice.note_contended(em, is_contended);
    }

    /// Whether no label set counts the labels of one of `caps`, by the last known limits.
    pub(super) fn lacks_counters(&self, caps: &[Arc<Cap>]) -> bool {
        let limits = self.state().state.limits.clone();
        caps.iter().any(|cap| !limits.is_counted(&cap.keys))
    }

    /// Evicts an EM that is not registered any more.
    pub(super) fn forget(&self, em: &EmInstance) {
        self.choice.note_ems(&[], std::slice::from_ref(em));
        self.state().state.ems.remove(em);
    }

    /// Runs a placement on the cluster view, with the last known policies.
    pub(super) fn choose<T>(&self, choose: impl FnOnce(&mut ClusterView, &Policies) -> T) -> T {
        let limits = self.state().state.limits.clone();
        self.choice.look(|view| choose(view, limits.policies()))
    }

    /// Ends a survey of all EMs.
    pub(super) fn end_survey(&self, survey: u64) {
        let ems = self.choose(|view, _| {
            view.end_survey(survey);
            view.len()
        });
        self.chosen_from(ems);
    }

    /// Publishes the number of EMs in the cluster view.
    pub(super) fn chosen_from(&self, ems: usize) {
        self.metrics.caches.chosen_from(ems);
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, ops::Range};

    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;
    use rm_model::{
        limit::Limits,
        name::Labels,
        report::Health,
        resource::Resource,
        scope::{Scope, ScopeHoldings},
    };

    /// Number of EMs and scopes of one commit.
    const COMMIT: usize = 1000;

    fn cache() -> StateCache {
        StateCache::new(Metrics::new([], []))
    }

    fn commits(most: usize) -> impl Iterator<Item = Range<usize>> {
        (0..most + 3 * COMMIT).step_by(COMMIT).map(|begin| begin..begin + COMMIT)
    }

    fn instance(number: usize) -> EmInstance {
        EmInstance::parse("em", "ecm", &format!("host{number}")).unwrap()
    }

    fn em(number: usize) -> Em {
        let none = Resource::memory(0).unwrap();
        Em {
            instance: instance(number),
            total: none.clone(),
            protected: none.clone(),
            used: none.clone(),
            locked: none,
            used_tickets: Default::default(),
            labels: Labels::default(),
            reserved: Labels::default(),
            epoch: 1,
            register_time: OffsetDateTime::UNIX_EPOCH,
            version: 1,
            going: None,
            counted: Default::default(),
            drain: None,
            is_held: false,
        }
    }

    fn counter(number: usize) -> ScopeCounter {
        let scope = Scope::new(BTreeMap::from([("user".to_owned(), format!("user{number}"))]));
        ScopeCounter { label_set_id: 1, scope }
    }

    fn nothing() -> PostCommitState {
        PostCommitState { ems: vec![], gone: vec![], scopes: vec![], limits: Arc::default(), line: Default::default() }
    }

    #[test]
    fn state_cache_within_bound_keeps_latest() {
        let cache = cache();
        for numbers in commits(EMS_MAX.max(SCOPES_MAX)) {
            let first = numbers.start;
            let scopes = numbers.clone().map(|number| (counter(number), ScopeHoldings::default())).collect();
            cache.update(PostCommitState { ems: numbers.map(em).collect(), scopes, ..nothing() });
            let seen = cache.state();
            assert!(seen.state.ems.contains_key(&instance(first)) && seen.state.scopes.contains_key(&counter(first)));
            assert!(seen.state.ems.len() <= EMS_MAX && seen.ems.len() <= EMS_MAX);
            assert!(seen.state.scopes.len() <= SCOPES_MAX && seen.scopes.len() <= SCOPES_MAX);
        }
        let seen = cache.state();
        assert!(!seen.state.ems.contains_key(&instance(0)) && !seen.state.scopes.contains_key(&counter(0)));
    }

    #[test]
    fn state_cache_without_placement_drops_changes() {
        let cache = cache();
        let noted = || {
            let changes = cache.choice.changes();
            changes.seen.as_ref().map(|seen| (seen.ems.len(), seen.conditions.len()))
        };
        assert_eq!(noted(), None, "no placement has run yet");
        for of_reports in [false, true] {
            cache.choose(|_, _| ());
            let mut most = 0;
            for numbers in commits(EMS_MAX) {
                // EMs that register and unregister under ever new names, or that only report.
                match of_reports {
                    false => cache.update(PostCommitState { gone: numbers.map(instance).collect(), ..nothing() }),
                    true => numbers.for_each(|number| cache.report(&report(number))),
                }
                most = noted().map_or(most, |(ems, conditions)| most.max(ems).max(conditions));
            }
            assert!((EMS_MAX - COMMIT..=EMS_MAX).contains(&most) && noted().is_none(), "{most}, {:?}", noted());
        }
        cache.choose(|view, _| assert!(view.is_empty()));
        assert_eq!(noted(), Some((0, 0)), "a placement receives all later changes");
    }

    #[test]
    fn placement_after_long_pause_knows_contended_ems() {
        let cache = cache();
        let known = || cache.choose(|view, _| (0..1000).filter(|number| view.is_contended(&instance(*number))).count());
        (0..1000).for_each(|number| cache.note_contended(&instance(number), true));
        (0..500).for_each(|number| cache.note_contended(&instance(number), false));
        assert_eq!(cache.choice.changes().contended_changes.len(), 500, "ended contention is not kept");
        assert_eq!(known(), 500);
        (500..1000).for_each(|number| cache.note_contended(&instance(number), false));
        assert_eq!(known(), 0);
        assert_eq!(cache.choice.changes().contended_changes.len(), 0);
    }

    #[test]
    fn state_cache_when_full_evicts_as_many_as_arrive() {
        let cache = cache();
        let sizes = || {
            let seen = cache.state();
            (seen.state.ems.len(), seen.state.scopes.len())
        };
        for numbers in commits(EMS_MAX.max(SCOPES_MAX)) {
            let before = sizes();
            let scopes = numbers.clone().map(|number| (counter(number), ScopeHoldings::default())).collect();
            cache.update(PostCommitState { ems: numbers.map(em).collect(), scopes, ..nothing() });
            let after = sizes();
            assert!(after.0 >= before.0 && after.1 >= before.1, "{before:?} before a commit, {after:?} after it");
        }
    }

    #[test]
    fn state_cache_after_limits_change_drops_few_at_a_time() {
        let cache = cache();
        let scopes = (0..10_000).map(|number| (counter(number), ScopeHoldings::default())).collect();
        cache.update(PostCommitState { scopes, ..nothing() });
        let limits = Arc::new(Limits::new(Uuid::from_u128(1), vec![], []));
        let of_other_limits = || PostCommitState { limits: limits.clone(), ..nothing() };
        cache.update(of_other_limits());
        assert!(cache.state().state.scopes.is_empty());
        let mut commits = 0;
        while !cache.state().retired.0.is_empty() {
            cache.update(of_other_limits());
            commits += 1;
        }
        assert_eq!(commits, 10_000 / RETIRED_MIN + 1);
    }

    #[test]
    fn contended_em_reported_twice_stays_contended() {
        let cache = cache();
        let is_contended = || cache.choose(|view, _| view.is_contended(&instance(1)));
        for expected in [true, false] {
            cache.note_contended(&instance(1), expected);
            cache.note_contended(&instance(1), expected);
            assert_eq!(is_contended(), expected);
            cache.note_contended(&instance(1), expected);
            assert_eq!(is_contended(), expected);
        }
    }

    fn report(number: usize) -> EmReport {
        let (health, tickets) = (Health::Healthy, Default::default());
        EmReport { em: instance(number), epoch: 1, sequence: 1, health, load: None, tickets, observed: None }
    }
}
