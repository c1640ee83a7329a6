//! Metric families of the committer, authentication, the wait queue, caches, the database, and other small components.
//!
//! Each component has a clone of its group and updates it by atomics. [`super::Metrics`] registers the groups; a scrape
//! reads them. Never: uses a label value that a caller chooses.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use rm_model::access::{JwtRejection, Unauthenticated};

use super::{Counter, GaugeGuard, add};

/// Returns a histogram for the duration of a batch or a part of it: 0.1 ms to 13 s, each bound twice the previous one.
fn batch_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 18))
}

/// Metrics of the committer.
#[derive(Debug)]
pub struct CommitterMetrics {
    queue: Gauge,
    contended: Gauge,
    contentions: Counter,
    failed: Family<FailureLabels, Counter>,
    /// Number of operations that exceeded advisory limits.
    pub advisory_violations: Counter,
    check_mismatches: Counter,
    /// Operations per attempted batch.
    pub batch_operations: Histogram,
    /// Time that a batch waits for its resource locks, in seconds.
    pub lock_wait: Histogram,
    /// Time from the beginning of a batch to the end of its commit, in seconds.
    pub batch: Histogram,
    /// Duration of the commit alone, in seconds.
    pub commit: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    class: &'static str,
}

/// Kind of failure of an operation: the label `class` of `committer_failed_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationFailure {
    /// The caller is at fault, or the operation contradicts the state.
    Rejected,
    /// Another transaction owned a resource lock until the deadline.
    LockTimeout,
    /// The server has no capacity left.
    Overloaded,
    /// No host of the database takes writes.
    Unavailable,
    /// The result of the commit is unknown.
    CommitUnknown,
    /// A later release changed the accounting.
    Outdated,
    /// The server is shutting down.
    ShuttingDown,
    /// A defect of the service.
    Internal,
}

impl OperationFailure {
    const ALL: [Self; 8] = [
        Self::Rejected,
        Self::LockTimeout,
        Self::Overloaded,
        Self::Unavailable,
        Self::CommitUnknown,
        Self::Outdated,
        Self::ShuttingDown,
        Self::Internal,
    ];

    fn label(self) -> FailureLabels {
        let class = match self {
            Self::Rejected => "rejected",
            Self::LockTimeout => "lock_timeout",
            Self::Overloaded => "overloaded",
            Self::Unavailable => "unavailable",
            Self::CommitUnknown => "commit_unknown",
            Self::Outdated => "outdated",
            Self::ShuttingDown => "shutting_down",
            Self::Internal => "internal",
        };
        FailureLabels { class }
    }
}

impl CommitterMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let failed: Family<FailureLabels, Counter> = Family::default();
        for failure in OperationFailure::ALL {
            drop(failed.get_or_create(&failure.label()));
        }
        Self {
            queue: add(
                registry,
                "committer_queue_operations",
                "Operations that wait for the next batch: near 16384, calls are rejected; see batch and commit seconds",
                Gauge::default(),
            ),
            contended: add(
                registry,
                "contended_operations",
                "Operations that wait for a contended EM or user: check for holds and for long transactions",
                Gauge::default(),
            ),
            contentions: add(
                registry,
                "contentions_total",
                "Times that an operation met a contended EM or user",
                Counter::default(),
            ),
            failed: add(
                registry,
                "operations_failed_total",
                "Failed operations: internal is a defect, unavailable is the database, lock_timeout is a contended key",
                failed,
            ),
            advisory_violations: add(
                registry,
                "limits_advisory_violations_total",
                "Grants and reports beyond advisory limits: enforced limits would refuse them",
                Counter::default(),
            ),
            check_mismatches: add(
                registry,
                "check_mismatches_total",
                "Requests whose check and decision differ on one state: above 0 is a defect of the service; report it with its log",
                Counter::default(),
            ),
            batch_operations: add(
                registry,
                "batch_operations",
                "Operations per transaction: near 512, the service is at its maximum load",
                Histogram::new(exponential_buckets(1.0, 2.0, 10)),
            ),
            lock_wait: add(
                registry,
                "lock_wait_seconds",
                "Wait of a batch for its resource locks: other instances or an operator lock the same EMs and users",
                batch_seconds(),
            ),
            batch: add(
                registry,
                "batch_seconds",
                "Duration of a batch from its start to the end of its commit: every call that writes waits for one",
                batch_seconds(),
            ),
            commit: add(
                registry,
                "commit_seconds",
                "Duration of the COMMIT of a batch: depends on the database's disk and its synchronous standbys",
                batch_seconds(),
            ),
        }
    }

    /// Counts an operation in the commit queue while the returned value exists.
    pub fn queued(&self) -> GaugeGuard {
        GaugeGuard::in_gauge(&self.queue)
    }

    /// Counts an operation in a contended-key queue while the returned value exists.
    pub fn contended(&self) -> GaugeGuard {
        self.contentions.inc();
        GaugeGuard::in_gauge(&self.contended)
    }

    /// Counts requests whose check and decision differ for the same state. Logs the first.
    pub fn mismatched(&self, requests: u64) {
        if requests > 0 && self.check_mismatches.get() == 0 {
            tracing::error!(
                "the check and the decision of a request differ: a defect of the service, counted from now on; report it"
            );
        }
        self.check_mismatches.inc_by(requests);
    }

    /// Counts a failed operation.
    pub fn failed(&self, failure: OperationFailure) {
        self.failed.get_or_create(&failure.label()).inc();
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// Metrics of authentication and authorization.
#[derive(Debug)]
pub struct AccessMetrics {
    failures: Family<ReasonLabels, Counter>,
}

/// Returns the label of a failed authentication.
fn unknown(why: Unauthenticated) -> ReasonLabels {
    let reason = match why {
        Unauthenticated::Missing => "token_missing",
        Unauthenticated::Unknown => "token_unknown",
        Unauthenticated::Expired => "token_expired",
        Unauthenticated::Revoked => "token_revoked",
        Unauthenticated::CertificateExpired => "certificate_expired",
        Unauthenticated::Jwt(_) => "jwt_not_believed",
    };
    ReasonLabels { reason }
}

const ROLE_DENIED: ReasonLabels = ReasonLabels { reason: "role_denied" };

impl AccessMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let failures: Family<ReasonLabels, Counter> = Family::default();
        for why in Unauthenticated::ALL.into_iter().chain([JwtRejection::Malformed.into()]) {
            drop(failures.get_or_create(&unknown(why)));
        }
        drop(failures.get_or_create(&ROLE_DENIED));
        let failures = add(
            registry,
            "auth_failures_total",
            "Calls without a valid credential, or without permission: the log names the caller",
            failures,
        );
        Self { failures }
    }

    /// Counts a failed authentication.
    pub fn unauthenticated(&self, why: Unauthenticated) {
        self.failures.get_or_create(&unknown(why)).inc();
    }

    /// Counts a call that the caller's rights do not allow.
    pub fn denied(&self) {
        self.failures.get_or_create(&ROLE_DENIED).inc();
    }
}

/// Metrics of the wait queue.
#[derive(Debug)]
pub struct WaitQueueMetrics {
    callers: Gauge,
    /// Number of checks of waiting requests after a wake-up, failed attempts included.
    pub checks: Counter,
    /// Number of checks by the slow poll.
    pub polls: Counter,
    /// Number of requests granted after they had waited.
    pub served: Counter,
    /// Number of requests rejected by the wait queue.
    pub rejected: Counter,
}

impl WaitQueueMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        Self {
            callers: add(
                registry,
                "waiting_requests",
                "Waiting requests of this instance: near --max-waiting, more are rejected",
                Gauge::default(),
            ),
            checks: add(
                registry,
                "waiting_checks_total",
                "Checks of waiting requests: many checks per grant are wasted work",
                Counter::default(),
            ),
            polls: add(
                registry,
                "waiting_polls_total",
                "Checks by the slow poll, for requests without a wake-up: many mean late grants",
                Counter::default(),
            ),
            served: add(
                registry,
                "waiting_served_total",
                "Requests that were granted after they had waited",
                Counter::default(),
            ),
            rejected: add(
                registry,
                "waiting_rejected_total",
                "Requests rejected because too many wait, in total or of one caller: see --max-waiting",
                Counter::default(),
            ),
        }
    }

    /// Counts a waiting caller while the returned value exists.
    pub fn caller(&self) -> GaugeGuard {
        GaugeGuard::in_gauge(&self.callers)
    }
}

fn set(gauge: &Gauge, entries: usize) {
    gauge.set(i64::try_from(entries).unwrap_or(i64::MAX));
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheLabels {
    cache: &'static str,
}

/// Sizes of the caches of the database state, in entries.
#[derive(Debug)]
pub struct CacheMetrics {
    ems: Gauge,
    scopes: Gauge,
    line_spots: Gauge,
    placement: Gauge,
}

impl CacheMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let entries: Family<CacheLabels, Gauge> = Family::default();
        let of = |cache| entries.get_or_create_owned(&CacheLabels { cache });
        let caches =
            Self { ems: of("ems"), scopes: of("scopes"), line_spots: of("line_spots"), placement: of("placement") };
        registry.register(
            "cache_entries",
            "Cached entries of database rows: the memory of the process grows with them",
            entries,
        );
        caches
    }

    /// Sets the numbers of cached EMs, scopes, and wait keys with a wait queue.
    pub fn seen(&self, ems: usize, scopes: usize, line_spots: usize) {
        set(&self.ems, ems);
        set(&self.scopes, scopes);
        set(&self.line_spots, line_spots);
    }

    /// Sets the number of EMs in the cluster view.
    pub fn chosen_from(&self, ems: usize) {
        set(&self.placement, ems);
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

/// Metrics of the database.
#[derive(Debug)]
pub struct DatabaseMetrics {
    up: Gauge,
    used: Gauge,
    idle: Gauge,
    errors: Family<FailureLabels, Counter>,
}

/// Kind of failure of the database: the label `class` of `database_errors_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatabaseFailure {
    /// No host of the database takes writes.
    Away,
    /// Another transaction locked a row or a table for too long.
    LockTimeout,
    /// The statement took longer than its timeout.
    Cancelled,
    /// Another transaction changed the same rows.
    Race,
    /// A row contradicts the model.
    Inconsistent,
    /// Every other failure.
    Other,
}

impl DatabaseFailure {
    const ALL: [Self; 6] =
        [Self::Away, Self::LockTimeout, Self::Cancelled, Self::Race, Self::Inconsistent, Self::Other];

    fn label(self) -> FailureLabels {
        let class = match self {
            Self::Away => "away",
            Self::LockTimeout => "lock_timeout",
            Self::Cancelled => "cancelled",
            Self::Race => "race",
            Self::Inconsistent => "inconsistent",
            Self::Other => "other",
        };
        FailureLabels { class }
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
    pub(super) fn register(registry: &mut Registry) -> Self {
        let up = add(
            registry,
            "database_up",
            "1 while a database host accepts writes, else 0: this instance is not ready then, and its calls fail",
            Gauge::default(),
        );
        let connections: Family<StateLabels, Gauge> = Family::default();
        let of = |state| connections.get_or_create_owned(&StateLabels { state });
        let errors: Family<FailureLabels, Counter> = Family::default();
        for failure in DatabaseFailure::ALL {
            drop(errors.get_or_create(&failure.label()));
        }
        let errors = add(
            registry,
            "database_errors_total",
            "Batches and background steps that failed in the database: most are retried, the log names the others",
            errors,
        );
        let database = Self { up, used: of("used"), idle: of("idle"), errors };
        registry.register(
            "database_pool_connections",
            "Connections of the pool that serves reads: while all are used, readers wait for each other",
            connections,
        );
        database
    }

    /// Counts a failed batch or background step.
    pub fn failed(&self, failure: DatabaseFailure) {
        self.errors.get_or_create(&failure.label()).inc();
    }

    /// Sets the connection gauges from the primary's pool; `None` without a primary.
    pub fn observe(&self, pool: Option<PoolConnections>) {
        self.up.set(i64::from(pool.is_some()));
        let PoolConnections { open, idle } = pool.unwrap_or_default();
        set(&self.idle, idle);
        set(&self.used, usize::try_from(open).unwrap_or(usize::MAX).saturating_sub(idle));
    }
}

/// Metrics of overviews of the cluster.
#[derive(Debug)]
pub struct OverviewMetrics {
    watchers: Gauge,
    /// Number of overviews read, each shared by all callers that wait for one.
    pub taken: Counter,
}

impl OverviewMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        Self {
            watchers: add(
                registry,
                "watchers",
                "Open Watch calls of this instance: near 64, more are rejected",
                Gauge::default(),
            ),
            taken: add(
                registry,
                "overviews_total",
                "Overviews of the cluster that were read from the database: at most about one a second, and none \
                    without a watcher",
                Counter::default(),
            ),
        }
    }

    /// Counts a watcher while the returned value exists.
    pub fn watcher(&self) -> GaugeGuard {
        GaugeGuard::in_gauge(&self.watchers)
    }
}

/// Metrics of followers of the history.
#[derive(Debug)]
pub struct FollowMetrics {
    followers: Gauge,
    /// Number of lines read once for all followers.
    pub read: Counter,
    /// Number of lines read again for followers that are further back.
    pub read_late: Counter,
}

impl FollowMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        Self {
            followers: add(
                registry,
                "followers",
                "Open FollowActions calls of this instance: near 256, more are rejected",
                Gauge::default(),
            ),
            read: add(
                registry,
                "followed_lines_total",
                "History lines read once for all followers of this instance",
                Counter::default(),
            ),
            read_late: add(
                registry,
                "followed_lines_late_total",
                "History lines read again for followers at earlier positions",
                Counter::default(),
            ),
        }
    }

    /// Counts a follower while the returned value exists.
    pub fn follower(&self) -> GaugeGuard {
        GaugeGuard::in_gauge(&self.followers)
    }
}
