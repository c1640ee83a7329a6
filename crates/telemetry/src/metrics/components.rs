//! Metric families of the committer, authentication, the wait queue, caches, the database, and other small components.
//!
//! Each component has a clone of its group and updates it by atomics. [`super::Metrics`] registers the groups; a scrape
//! reads them. Never: uses a label value that a caller chooses.

use prometheus_client::metrics::{
    family::Family,
    gauge::Gauge,
    histogram::{Histogram, exponential_buckets},
};
use rm_model::{
    access::{JwtRejection, Unauthenticated},
    reclaim::{Reclaim, ReclaimProgress, ReclaimResult},
    text_enum,
};

use super::{Counter, GaugeGuard, Label, family};

/// Returns a histogram for the duration of a batch or a part of it: 0.1 ms to 13 s, each bound twice the previous one.
fn batch_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 18))
}

metrics! {
    /// Metrics of the committer.
    pub struct CommitterMetrics {
        queue: Gauge = "committer_queue_operations",
            "Operations that wait for the next batch: near 16384, calls are rejected; see batch and commit seconds";
        contended: Gauge = "contended_operations",
            "Operations that wait for a contended EM or user, without requests in a queue: check for holds and long transactions";
        contentions: Counter = "contentions_total",
            "Times that an operation met a contended EM or user";
        failed: Family<Label, Counter> = "operations_failed_total",
            "Failed operations: internal is a defect, unavailable is the database, lock_timeout is a contended key",
            family("class", OperationFailure::ALL.map(OperationFailure::as_str));
        pub advisory_violations: Counter = "limits_advisory_violations_total",
            "Grants and reports beyond advisory limits: enforced limits would refuse them";
        pub batch_operations: Histogram = "batch_operations",
            "Operations per transaction: near 512, the service is at its maximum load",
            Histogram::new(exponential_buckets(1.0, 2.0, 10));
        pub lock_wait: Histogram = "lock_wait_seconds",
            "Wait of a batch for its resource locks: other instances or an operator lock the same EMs and users",
            batch_seconds();
        pub batch: Histogram = "batch_seconds",
            "Duration of a batch from its start to the end of its commit: every call that writes waits for one",
            batch_seconds();
        pub commit: Histogram = "commit_seconds",
            "Duration of the COMMIT of a batch: depends on the database's disk and its synchronous standbys",
            batch_seconds();
    }
}

text_enum! {
    /// Kind of failure of an operation: the label `class` of `committer_failed_total`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum OperationFailure {
        /// The caller is at fault, or the operation contradicts the state.
        Rejected = "rejected",
        /// Another transaction owned a resource lock until the deadline.
        LockTimeout = "lock_timeout",
        /// The server has no capacity left.
        Overloaded = "overloaded",
        /// No host of the database takes writes.
        Unavailable = "unavailable",
        /// The result of the commit is unknown.
        CommitUnknown = "commit_unknown",
        /// A later release changed the accounting.
        Outdated = "outdated",
        /// The server is shutting down.
        ShuttingDown = "shutting_down",
        /// A defect of the service.
        Internal = "internal",
    }
}

impl CommitterMetrics {
    /// Counts an operation in the commit queue while the returned value exists.
    pub fn queued(&self) -> GaugeGuard {
        GaugeGuard::in_gauge(&self.queue)
    }

    /// Counts an operation in a contended-key queue while the returned value exists.
    pub fn contended(&self) -> GaugeGuard {
        self.contentions.inc();
        GaugeGuard::in_gauge(&self.contended)
    }

    /// Counts a failed operation.
    pub fn failed(&self, failure: OperationFailure) {
        self.failed.get_or_create(&[("class", failure.as_str())]).inc();
    }
}

metrics! {
    /// Metrics of authentication and authorization.
    pub struct AccessMetrics {
        failures: Family<Label, Counter> = "auth_failures_total",
            "Calls without a valid credential, or without permission: the log names the caller",
            family("reason", unauthenticated_reasons().chain([ROLE_DENIED]));
    }
}

/// Reason of a call that the caller's rights do not allow.
const ROLE_DENIED: &str = "role_denied";

/// Returns the reason of a failed authentication.
fn reason(why: Unauthenticated) -> &'static str {
    match why {
        Unauthenticated::Missing => "token_missing",
        Unauthenticated::Unknown => "token_unknown",
        Unauthenticated::Expired => "token_expired",
        Unauthenticated::Revoked => "token_revoked",
        Unauthenticated::CertificateExpired => "certificate_expired",
        Unauthenticated::Jwt(_) => "jwt_not_believed",
    }
}

fn unauthenticated_reasons() -> impl Iterator<Item = &'static str> {
    Unauthenticated::ALL.into_iter().chain([JwtRejection::Malformed.into()]).map(reason)
}

impl AccessMetrics {
    /// Counts a failed authentication.
    pub fn unauthenticated(&self, why: Unauthenticated) {
        self.failures.get_or_create(&[("reason", reason(why))]).inc();
    }

    /// Counts a call that the caller's rights do not allow.
    pub fn denied(&self) {
        self.failures.get_or_create(&[("reason", ROLE_DENIED)]).inc();
    }
}

metrics! {
    /// Metrics of the wait queue.
    pub struct WaitQueueMetrics {
        callers: Gauge = "waiting_requests",
            "Waiting requests of this instance: near --max-waiting, more are rejected";
        pub checks: Counter = "waiting_checks_total",
            "Checks of waiting requests: many checks per grant are wasted work";
        pub polls: Counter = "waiting_polls_total",
            "Checks by the slow poll, for requests without a wake-up: many mean late grants";
        pub served: Counter = "waiting_served_total",
            "Requests that were granted after they had waited";
        pub rejected: Counter = "waiting_rejected_total",
            "Requests rejected because too many wait, in total or of one caller: see --max-waiting";
    }
}

impl WaitQueueMetrics {
    /// Counts a waiting caller while the returned value exists.
    pub fn caller(&self) -> GaugeGuard {
        GaugeGuard::in_gauge(&self.callers)
    }
}

metrics! {
    /// Sizes of the caches of the database state, in entries.
    pub struct CacheMetrics {
        entries: Family<Label, Gauge> = "cache_entries",
            "Cached entries of database rows: the memory of the process grows with them",
            family("cache", ["ems", "scopes", "wait_keys", "placement", "idle_amounts"]);
    }
}

impl CacheMetrics {
    /// Sets the numbers of cached EMs, scopes, and wait keys with a wait queue.
    pub fn seen(&self, ems: usize, scopes: usize, wait_keys: usize) {
        self.set("ems", ems);
        self.set("scopes", scopes);
        self.set("wait_keys", wait_keys);
    }

    /// Sets the number of EMs in the cluster view.
    pub fn chosen_from(&self, ems: usize) {
        self.set("placement", ems);
    }

    /// Sets the number of wait keys whose amounts of idle engines are cached.
    pub fn idle_amounts(&self, wait_keys: usize) {
        self.set("idle_amounts", wait_keys);
    }

    fn set(&self, cache: &'static str, entries: usize) {
        self.entries.get_or_create(&[("cache", cache)]).set(i64::try_from(entries).unwrap_or(i64::MAX));
    }
}

metrics! {
    /// Metrics of the amounts that idle engines hold, in refusals.
    pub struct IdleAmountMetrics {
        pub reads: Counter = "refusal_idle_reads_total",
            "Reads of idle engines for refused requests, several refusals at once: at most 100 a second";
        pub unset: Counter = "refusal_idle_unset_total",
            "Refusals without the amounts that idle engines hold: refusals for too many users and EMs, or a slow database";
    }
}

metrics! {
    /// Metrics of the database.
    pub struct DatabaseMetrics {
        up: Gauge = "database_up",
            "1 while a database host accepts writes, else 0: this instance is not ready then, and its calls fail";
        connections: Family<Label, Gauge> = "database_pool_connections",
            "Connections of the pool that serves reads: while all are used, readers wait for each other",
            family("state", ["used", "idle"]);
        errors: Family<Label, Counter> = "database_errors_total",
            "Batches and background steps that failed in the database: most are retried, the log names the others",
            family("class", DatabaseFailure::ALL.map(DatabaseFailure::as_str));
    }
}

text_enum! {
    /// Kind of failure of the database: the label `class` of `database_errors_total`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum DatabaseFailure {
        /// No host of the database takes writes.
        Away = "away",
        /// Another transaction locked a row or a table for too long.
        LockTimeout = "lock_timeout",
        /// The statement took longer than its timeout.
        Cancelled = "cancelled",
        /// Another transaction changed the same rows.
        Race = "race",
        /// A row contradicts the model.
        Inconsistent = "inconsistent",
        /// Every other failure.
        Other = "other",
    }
}

/// Connections of a database pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct PoolConnections {
    /// Open connections.
    pub open: u32,
    /// Open connections that no statement uses.
    pub idle: usize,
}

impl DatabaseMetrics {
    /// Counts a failed batch or background step.
    pub fn failed(&self, failure: DatabaseFailure) {
        self.errors.get_or_create(&[("class", failure.as_str())]).inc();
    }

    /// Sets the connection gauges from the primary's pool; `None` without a primary.
    pub fn observe(&self, pool: Option<PoolConnections>) {
        self.up.set(i64::from(pool.is_some()));
        let PoolConnections { open, idle } = pool.unwrap_or_default();
        let idle = i64::try_from(idle).unwrap_or(i64::MAX);
        for (state, count) in [("idle", idle), ("used", i64::from(open).saturating_sub(idle).max(0))] {
            self.connections.get_or_create(&[("state", state)]).set(count);
        }
    }
}

metrics! {
    /// Metrics of overviews of the cluster.
    pub struct OverviewMetrics {
        watchers: Gauge = "watchers",
            "Open Watch calls of this instance: near 64, more are rejected";
        pub taken: Counter = "overviews_total",
            "Overviews of the cluster that were read from the database: at most about one a second, and none without a \
                watcher";
    }
}

impl OverviewMetrics {
    /// Counts a watcher while the returned value exists.
    pub fn watcher(&self) -> GaugeGuard {
        GaugeGuard::in_gauge(&self.watchers)
    }
}

metrics! {
    /// Metrics of followers of the history.
    pub struct FollowMetrics {
        followers: Gauge = "followers",
            "Open FollowActions calls of this instance: near 256, more are rejected";
        pub read: Counter = "followed_lines_total",
            "History lines read once for all followers of this instance";
        pub read_late: Counter = "followed_lines_late_total",
            "History lines read again for followers at earlier positions";
    }
}

impl FollowMetrics {
    /// Counts a follower while the returned value exists.
    pub fn follower(&self) -> GaugeGuard {
        GaugeGuard::in_gauge(&self.followers)
    }
}

metrics! {
    /// Metrics of the sums by user.
    pub struct UserSumMetrics {
        pub step: Histogram = "user_sums_step_seconds",
            "Duration of a step of the sums by user, waits for open transactions included",
            batch_seconds();
        pub tickets: Gauge = "user_sums_tickets",
            "Live tickets in the memory of this instance, about 100 bytes each: 0 without the lease";
    }
}

metrics! {
    /// Metrics of the tickets that are to end because requests wait.
    pub struct ReclaimMetrics {
        tickets: Family<Label, Gauge> = "reclaim_tickets",
            "Chosen tickets, on the instance with the lease: unanswered ones stay in spite of their recall",
            family("state", ReclaimState::ALL.map(ReclaimState::as_str));
        chosen: Counter = "reclaim_chosen_total",
            "Tickets that were chosen to end because a request waits";
        pub recalled: Counter = "reclaim_recalled_total",
            "Tickets that were recalled because a request waits";
        pub recalled_busy: Counter = "reclaim_recalled_busy_total",
            "Recalled tickets whose engines end also while they run tasks";
        results: Family<Label, Counter> = "reclaim_results_total",
            "Chosen tickets by their result: taken_back ended after their recall",
            family("result", ReclaimResult::ALL.map(ReclaimResult::as_str));
        pub step: Histogram = "reclaim_step_seconds",
            "Duration of a step that chooses tickets",
            batch_seconds();
    }
}

text_enum! {
    /// State of a chosen ticket: the label `state` of `reclaim_tickets`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum ReclaimState {
        /// It is not recalled yet.
        Chosen = "chosen",
        /// It is recalled.
        Recalled = "recalled",
        /// Its engine has not ended some time later.
        Unanswered = "unanswered",
        /// An operator has withdrawn the choice.
        Withdrawn = "withdrawn",
    }
}

impl ReclaimMetrics {
    /// Notes the chosen tickets; none without the lease.
    pub fn note(&self, rows: &[Reclaim]) {
        let state = |row: &Reclaim| match row.progress {
            ReclaimProgress::Chosen { .. } => Some(ReclaimState::Chosen),
            ReclaimProgress::Recalled => Some(ReclaimState::Recalled),
            ReclaimProgress::Unanswered { .. } => Some(ReclaimState::Unanswered),
            ReclaimProgress::Withdrawn { .. } => Some(ReclaimState::Withdrawn),
            ReclaimProgress::Continued | ReclaimProgress::Ended { .. } => None,
        };
        for shown in ReclaimState::ALL {
            let count = rows.iter().filter(|row| state(row) == Some(shown)).count();
            let gauge = self.tickets.get_or_create(&[("state", shown.as_str())]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Counts new and deleted rows.
    pub fn changed(&self, new: usize, deleted: &[Reclaim]) {
        self.chosen.inc_by(new as u64);
        for row in deleted {
            self.results.get_or_create(&[("result", row.result().as_str())]).inc();
        }
    }
}
