//! Metrics of fetches from external clusters and of their snapshots. Caller: `rm_service::external`.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        family::Family,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use super::{Counter, add};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct JudgedByLabels {
    by: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReadLabels {
    read: &'static str,
}

/// Metrics of external clusters.
#[derive(Debug)]
pub struct ExternalMetrics {
    fetches: Family<OutcomeLabels, Counter>,
    refreshes: Family<OutcomeLabels, Counter>,
    preparations: Family<JudgedByLabels, Counter>,
    tickets: Family<ReadLabels, Counter>,
    seconds: Histogram,
}

impl ExternalMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let (fetches, refreshes) = (Family::default(), Family::default());
        Self {
            refreshes: add(
                registry,
                "external_refreshes_total",
                "Snapshots of external clusters for decisions, by result: ok, superseded, store, or why the cluster \
                    was not read",
                refreshes,
            ),
            preparations: add(
                registry,
                "external_preparations_total",
                "Source of the counts for such a snapshot: those of the previous one (kept), or all live tickets. \
                    Reasons for the latter: no previous counts (new), another instance or changed tables \
                    (superseded), too many changes (outdated), another or restarted database (renumbered)",
                Family::default(),
            ),
            tickets: add(
                registry,
                "external_tickets_read_total",
                "Tickets read for such snapshots: those changed since the previous one, or all live ones",
                Family::default(),
            ),
            fetches: add(
                registry,
                "external_fetches_total",
                "Fetches from external clusters by result: the calls that waited for a failed fetch return its error",
                fetches,
            ),
            seconds: add(
                registry,
                "external_fetch_seconds",
                "Duration of a fetch from an external cluster, over all its addresses",
                Histogram::new(exponential_buckets(0.005, 2.0, 13)),
            ),
        }
    }

    /// Counts a refresh with its result.
    pub fn refreshed(&self, result: &'static str) {
        self.refreshes.get_or_create(&OutcomeLabels { result }).inc();
    }

    /// Counts a count of unseen use with its source: kept counts, or the reason for reading all live tickets.
    pub fn prepared(&self, by: &'static str) {
        self.preparations.get_or_create(&JudgedByLabels { by }).inc();
    }

    /// Counts tickets that were read for a snapshot: changed ones or all.
    pub fn read(&self, read: &'static str, tickets: usize) {
        self.tickets.get_or_create(&ReadLabels { read }).inc_by(tickets.try_into().unwrap_or(u64::MAX));
    }

    /// Counts a fetch with the class of its failure, if any, and its duration.
    pub fn fetched(&self, failed: Option<&'static str>, took: Duration) {
        self.fetches.get_or_create(&OutcomeLabels { result: failed.unwrap_or("ok") }).inc();
        self.seconds.observe(took.as_secs_f64());
    }
}
