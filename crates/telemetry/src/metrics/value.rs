//! Metric types: a counter in Prometheus text format, a gauge guard, and a timer guard.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder},
    metrics::{MetricType, TypedMetric, gauge::Gauge, histogram::Histogram},
};

/// Counter, written under its registered name; OpenMetrics would append `_total`.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    /// Adds one.
    pub fn inc(&self) {
        self.inc_by(1);
    }

    /// Adds `more`.
    pub fn inc_by(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns the count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl EncodeMetric for Counter {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.encode_gauge(&self.get())
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

impl TypedMetric for Counter {
    const TYPE: MetricType = MetricType::Counter;
}

/// Adds one to a gauge until dropped.
#[derive(Debug)]
pub struct GaugeGuard(Gauge);

impl GaugeGuard {
    /// Adds one to `gauge`.
    pub fn in_gauge(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Observes the seconds of its life in a histogram when dropped. A guard, because a wrapper would enlarge each future.
#[derive(Debug)]
pub struct TimerGuard {
    seconds: Histogram,
    since: Instant,
}

impl TimerGuard {
    /// Starts the time for the histogram `seconds`.
    pub fn in_histogram(seconds: &Histogram) -> Self {
        Self { seconds: seconds.clone(), since: Instant::now() }
    }
}

impl Drop for TimerGuard {
    fn drop(&mut self) {
        self.seconds.observe(self.since.elapsed().as_secs_f64());
    }
}
