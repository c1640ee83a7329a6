//! Metrics of requests by outcome, and of ended tickets by reason. Callers: the request service and the committer.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use tokio::time::Instant;

use rm_model::{refusal::Refusal, scope_kind::ScopeKind, ticket_end::TicketEnd};

use super::{Counter, Label, add, family};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    outcome: &'static str,
    scope: &'static str,
    dimension: &'static str,
}

/// End of a request.
#[derive(Debug, Clone, Copy)]
pub enum RequestEnd<'a> {
    /// Granted.
    Granted,
    /// Refused, immediately or at the end of its waiting time.
    Refused {
        /// The refusal.
        refusal: &'a Refusal,
        /// Whether the request waited until its deadline.
        timed_out: bool,
    },
    /// Failed with an error.
    Failed,
    /// Cancelled by its caller.
    Cancelled,
}

impl RequestEnd<'_> {
    fn outcome(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Refused { timed_out: true, .. } => "timed_out",
            Self::Refused { refusal, .. } if refusal.never_fits => "never_fits",
            Self::Refused { .. } => "refused",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    fn decided(self) -> DecisionLabels {
        let short = match self {
            Self::Refused { refusal, .. } => refusal.shortfalls.first(),
            _ => None,
        };
        let (scope, dimension) = short.map_or(("", ""), |short| (short.kind.as_str(), short.dimension.class()));
        DecisionLabels { outcome: self.outcome(), scope, dimension }
    }
}

/// Metrics of requests.
#[derive(Debug)]
pub struct RequestMetrics {
    ended: Family<DecisionLabels, Counter>,
    granted: Counter,
    /// Number of refusals by the first short kind of scope, in the order of [`ScopeKind::ALL`].
    refused: [AtomicU64; ScopeKind::ALL.len()],
    waited: Family<Label, Histogram, fn() -> Histogram>,
    tickets: Family<Label, Counter>,
    /// Number of refusals stored in the group of others.
    pub refusals_other: Counter,
    /// Age of the oldest expired ticket that is not yet rolled back, in seconds.
    pub expiry_lag: Gauge<f64, AtomicU64>,
}

impl RequestMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let ended: Family<DecisionLabels, Counter> = Family::default();
        for nothing_short in [RequestEnd::Granted, RequestEnd::Failed, RequestEnd::Cancelled] {
            drop(ended.get_or_create(&nothing_short.decided()));
        }
        // Bounds from 5 ms to 11 minutes, each twice the previous one.
        let seconds: fn() -> Histogram = || Histogram::new(exponential_buckets(0.005, 2.0, 18));
        Self {
            granted: ended.get_or_create_owned(&RequestEnd::Granted.decided()),
            refused: Default::default(),
            ended: add(
                registry,
                "requests_total",
                "Requests for resources by outcome and first shortfall: many refusals by one kind of scope suggest \
                    another limit",
                ended,
            ),
            waited: add(
                registry,
                "request_wait_seconds",
                "Time in the wait queue of requests that waited, by outcome",
                Family::new_with_constructor(seconds),
            ),
            tickets: add(
                registry,
                "tickets_ended_total",
                "Ended tickets by cause: expired or lost tickets are of engines that never started, or died",
                family("how", TicketEnd::ALL.map(TicketEnd::as_str)),
            ),
            refusals_other: add(
                registry,
                "refusals_other_total",
                "Refusals that ListRefusals lists as others, because there were too many kinds at once",
                Counter::default(),
            ),
            expiry_lag: add(
                registry,
                "expiry_lag_seconds",
                "Age of the oldest passed deadline whose ticket has not expired: while it grows, capacity stays \
                    reserved without use",
                Gauge::default(),
            ),
        }
    }

    /// Returns the number of refusals by the first short kind of scope.
    pub fn refused(&self) -> [(ScopeKind, u64); ScopeKind::ALL.len()] {
        std::array::from_fn(|place| (ScopeKind::ALL[place], self.refused[place].load(Ordering::Relaxed)))
    }

    /// Returns the numbers of grants and of refusals.
    pub fn answered(&self) -> (u64, u64) {
        (self.granted.get(), self.refused().iter().map(|(_, count)| count).sum())
    }

    /// Counts the end of a request.
    pub fn ended(&self, how: RequestEnd<'_>) {
        if let RequestEnd::Refused { refusal, .. } = how
            && let Some(first) = refusal.shortfalls.first()
            && let Some((_, count)) = ScopeKind::ALL.iter().zip(&self.refused).find(|(kind, _)| **kind == first.kind)
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
        match how {
            RequestEnd::Granted => self.granted.inc(),
            how => self.ended.get_or_create(&how.decided()).inc(),
        }
    }

    /// Records the waiting time of a request that entered the wait queue at `since`.
    pub fn waited(&self, since: Instant, outcome: &'static str) {
        self.waited.get_or_create(&[("outcome", outcome)]).observe(since.elapsed().as_secs_f64());
    }

    /// Counts ended tickets.
    pub fn tickets_ended(&self, how: TicketEnd, count: u64) {
        if count > 0 {
            self.tickets.get_or_create(&[("how", how.as_str())]).inc_by(count);
        }
    }
}

/// A request in progress. Dropping it without an end counts as cancelled.
#[derive(Debug)]
pub struct RequestTimer<'a> {
    requests: &'a RequestMetrics,
    ended: bool,
}

impl<'a> RequestTimer<'a> {
    /// Begins a request.
    pub fn begin(requests: &'a RequestMetrics) -> Self {
        Self { requests, ended: false }
    }

    /// Ends the request.
    pub fn end(mut self, how: RequestEnd<'_>) {
        self.ended = true;
        self.requests.ended(how);
    }
}

impl Drop for RequestTimer<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.requests.ended(RequestEnd::Cancelled);
        }
    }
}
