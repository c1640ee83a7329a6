//! Metrics of the standby, and of the source of reads that may be stale. Caller: `service::standby`.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use super::{Counter, add};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReadSourceLabels {
    answered_by: &'static str,
}

const STANDBY: ReadSourceLabels = ReadSourceLabels { answered_by: "standby" };
const PRIMARY: ReadSourceLabels = ReadSourceLabels { answered_by: "primary" };

/// Metrics of the standby; all zero if none is configured.
#[derive(Debug)]
pub struct StandbyMetrics {
    up: Gauge,
    lag: Gauge<f64, AtomicU64>,
    reads: Family<ReadSourceLabels, Counter>,
}

impl StandbyMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let reads: Family<ReadSourceLabels, Counter> = Family::default();
        for by in [STANDBY, PRIMARY] {
            drop(reads.get_or_create(&by));
        }
        Self {
            up: add(
                registry,
                "standby_up",
                "1 while a standby of the database follows, else 0, also where none is configured",
                Gauge::default(),
            ),
            lag: add(
                registry,
                "standby_lag_seconds",
                "Maximum age of the standby's data at the last probe; above 10 the primary serves the reads",
                Gauge::default(),
            ),
            reads: add(
                registry,
                "standby_reads_total",
                "Reads that may be stale, where a standby is configured, by server: the primary while the standby is \
                    away or behind",
                reads,
            ),
        }
    }

    /// Sets the maximum staleness of the standby.
    pub fn lags(&self, lag: Duration) {
        self.up.set(1);
        self.lag.set(lag.as_secs_f64());
    }

    /// Records that no standby is available.
    pub fn away(&self) {
        self.up.set(0);
    }

    /// Counts a read by the standby.
    pub fn answered(&self) {
        self.reads.get_or_create(&STANDBY).inc();
    }

    /// Counts a read by the primary.
    pub fn passed_on(&self) {
        self.reads.get_or_create(&PRIMARY).inc();
    }
}
