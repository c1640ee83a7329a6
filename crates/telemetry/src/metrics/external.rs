//! Metrics of fetches from external clusters and of their snapshots. Caller: `rm_service::external`.

use std::time::Duration;

use prometheus_client::metrics::{
    family::Family,
    gauge::Gauge,
    histogram::{Histogram, exponential_buckets},
};

use super::{Counter, Label};

metrics! {
    /// Metrics of external clusters.
    pub struct ExternalMetrics {
        pub checks: Gauge = "external_checks",
            "Running checks of providers on this instance: at 4, more are rejected";
        refreshes: Family<Label, Counter> = "external_refreshes_total",
            "Snapshots of external clusters for decisions, by result: ok, superseded, store, or why the cluster was not \
                read";
        preparations: Family<Label, Counter> = "external_preparations_total",
            "Source of the counts for such a snapshot: those of the previous one (kept), or all live tickets. Reasons for \
                the latter: no previous counts (new), another instance or changed tables (superseded), too many changes \
                (outdated), another or restarted database (renumbered)";
        tickets: Family<Label, Counter> = "external_tickets_read_total",
            "Tickets read for such snapshots: those changed since the previous one, or all live ones";
        fetches: Family<Label, Counter> = "external_fetches_total",
            "Fetches from external clusters by result: the calls that waited for a failed fetch return its error";
        seconds: Histogram = "external_fetch_seconds",
            "Duration of a fetch from an external cluster, over all its addresses",
            Histogram::new(exponential_buckets(0.005, 2.0, 13));
    }
}

impl ExternalMetrics {
    /// Counts a refresh with its result.
    pub fn refreshed(&self, result: &'static str) {
        self.refreshes.get_or_create(&[("result", result)]).inc();
    }

    /// Counts a count of unseen use with its source: kept counts, or the reason for reading all live tickets.
    pub fn prepared(&self, by: &'static str) {
        self.preparations.get_or_create(&[("by", by)]).inc();
    }

    /// Counts tickets that were read for a snapshot: changed ones or all.
    pub fn read(&self, read: &'static str, tickets: usize) {
        self.tickets.get_or_create(&[("read", read)]).inc_by(tickets.try_into().unwrap_or(u64::MAX));
    }

    /// Counts a fetch with the class of its failure, if any, and its duration.
    pub fn fetched(&self, failed: Option<&'static str>, took: Duration) {
        self.fetches.get_or_create(&[("result", failed.unwrap_or("ok"))]).inc();
        self.seconds.observe(took.as_secs_f64());
    }
}
