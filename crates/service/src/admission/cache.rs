//! State cache: EMs and scopes as this instance last observed them, through its own commits and reads, and the cluster view of
//! placement. Each part has its lock.
//!
//! Never: grants or refuses; delays a commit.
//! Callers: `admission`, `committer` (after each commit and when a key becomes contended or free), and `heartbeat` (reports).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rm_engine::{observed_state::ObservedState, placement_changes::PlacementChanges};
use rm_model::{
    assessment::Verdict,
    cap::Cap,
    em::{Em, EmInstance},
    ledger::PostCommitState,
    limit::Limits,
    operation::PlacedRequest,
    placement::{ClusterView, Policies},
    report::EmReport,
};
use rm_telemetry::metrics::Metrics;

use crate::lock::lock;

/// Cache of one instance. Clones share it.
#[derive(Clone, Debug)]
pub struct StateCache {
    observed: Arc<Mutex<ObservedState>>,
    /// Changes that the next placement applies to `view`.
    changes: Arc<Mutex<PlacementChanges>>,
    view: Arc<Mutex<ClusterView>>,
    /// Start of the times in `changes` and `view`.
    began: Instant,
    metrics: Metrics,
}

/// Number of report intervals for which the load of a report counts.
const LOAD_INTERVALS: u32 = 2;

impl StateCache {
    /// Creates an empty cache. EMs report once in `report_interval`.
    pub fn new(report_interval: Duration, metrics: Metrics) -> Self {
        let load_lifetime = report_interval.saturating_mul(LOAD_INTERVALS).try_into().unwrap_or(time::Duration::MAX);
        let view = ClusterView::default().with_load_lifetime(load_lifetime);
        let (observed, changes) = Default::default();
        Self { observed, changes, view: Arc::new(Mutex::new(view)), began: Instant::now(), metrics }
    }

    /// Returns the time since the start of the cache.
    fn time(&self) -> time::Duration {
        self.began.elapsed().try_into().unwrap_or(time::Duration::MAX)
    }

    /// Stores the state after a commit.
    pub fn update(&self, after: PostCommitState) {
        lock(&self.changes).note_ems(&after.ems, &after.gone);
        let mut observed = lock(&self.observed);
        observed.update(after);
        self.publish_sizes(&observed);
    }

    /// Returns the number of commits stored.
    pub(super) fn commits(&self) -> u64 {
        lock(&self.observed).commits()
    }

    /// Stores the state that a check has read, except what commits have changed since their number was `commits`.
    pub(super) fn update_by_check(&self, after: PostCommitState, commits: u64) {
        let mut observed = lock(&self.observed);
        if let Some(after) = observed.unchanged_part(after, commits) {
            lock(&self.changes).note_ems(&after.ems, &after.gone);
            observed.observe(after);
            self.publish_sizes(&observed);
        }
    }

    /// Whether the request fits by the cached state.
    pub(super) fn fits(&self, request: &PlacedRequest) -> bool {
        lock(&self.observed).state().fits(request)
    }

    /// Returns the verdict on a queued request; `None` if the state it needs is not cached.
    pub(super) fn verdict(&self, request: &PlacedRequest) -> Option<Verdict> {
        lock(&self.observed).state().verdict(request).ok()
    }

    /// Stores EMs as read.
    pub(super) fn take_over(&self, ems: HashMap<EmInstance, Em>) {
        let ems: Vec<Em> = ems.into_values().collect();
        lock(&self.changes).note_ems(&ems, &[]);
    }

    /// Stores the condition of an EM by its report.
    pub fn report(&self, report: &EmReport) {
        lock(&self.changes).note_report(report, self.time());
    }

    /// Records whether the key of an EM is contended, so that changes of the EM wait. Repeated calls change nothing.
    pub fn note_contended(&self, em: &EmInstance, is_contended: bool) {
        lock(&self.changes).note_contended(em, is_contended);
    }

    /// Returns the last known limits.
    pub fn limits(&self) -> Arc<Limits> {
        lock(&self.observed).state().limits.clone()
    }

    /// Whether no label set counts the labels of one of `caps`, by the last known limits.
    pub(super) fn lacks_counters(&self, caps: &[Arc<Cap>]) -> bool {
        let limits = self.limits();
        caps.iter().any(|cap| !limits.is_counted(&cap.keys))
    }

    /// Evicts an EM that is not registered any more.
    pub(super) fn evict(&self, em: &EmInstance) {
        lock(&self.changes).note_ems(&[], std::slice::from_ref(em));
        lock(&self.observed).evict(em);
    }

    /// Runs a placement on the cluster view, with the last known policies.
    pub(super) fn choose<T>(&self, choose: impl FnOnce(&mut ClusterView, &Policies) -> T) -> T {
        let limits = self.limits();
        // The view is locked before the changes are taken, so that no other placement reads it without them.
        let mut view = lock(&self.view);
        let changes = lock(&self.changes).take();
        view.set_time(self.time());
        changes.apply(&mut view);
        view.expire(limits.policies());
        choose(&mut view, limits.policies())
    }

    /// Ends a survey of all EMs.
    pub(super) fn end_survey(&self, survey: u64) {
        let ems = self.choose(|view, _| {
            view.end_survey(survey);
            view.len()
        });
        self.chosen_from(ems);
    }

    fn publish_sizes(&self, observed: &ObservedState) {
        let state = observed.state();
        self.metrics.caches.seen(state.ems.len(), state.scopes.len(), state.line.line.wait_keys());
    }

    /// Publishes the number of EMs in the cluster view.
    pub(super) fn chosen_from(&self, ems: usize) {
        self.metrics.caches.chosen_from(ems);
    }
}
