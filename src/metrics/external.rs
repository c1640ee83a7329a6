//! What is fetched from clusters whose queues somebody else keeps.

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
struct Outcome {
    result: &'static str,
}

/// Fetches from clusters.
#[derive(Debug)]
pub struct External {
    fetches: Family<Outcome, Counter>,
    refreshes: Family<Outcome, Counter>,
    seconds: Histogram,
}

impl External {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let (fetches, refreshes) = (Family::default(), Family::default());
        Self {
            refreshes: add(
                registry,
                "external_refreshes_total",
                "Snapshots by which requests are judged in queues of external clusters, by how they ended: ok, superseded, store, or why the cluster was not read",
                refreshes,
            ),
            fetches: add(
                registry,
                "external_fetches_total",
                "What was fetched from external clusters, by how it ended: whatever is not ok is told by the calls that waited for it",
                fetches,
            ),
            seconds: add(
                registry,
                "external_fetch_seconds",
                "How long it took to fetch something from an external cluster, of all its addresses",
                Histogram::new(exponential_buckets(0.005, 2.0, 13)),
            ),
        }
    }

    /// A snapshot was made, and is in force, or why it is not.
    pub fn refreshed(&self, result: &'static str) {
        self.refreshes.get_or_create(&Outcome { result }).inc();
    }

    /// Something was fetched, or failed in a way of this class.
    pub fn fetched(&self, failed: Option<&'static str>, took: Duration) {
        self.fetches.get_or_create(&Outcome { result: failed.unwrap_or("ok") }).inc();
        self.seconds.observe(took.as_secs_f64());
    }
}
