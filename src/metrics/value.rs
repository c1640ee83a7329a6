//! Counters as Prometheus' text format has them, gauges of what is held, and how long something took.

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

/// A number that only grows. Its name is written as it was registered: in OpenMetrics, `_total` would be no part of it.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    /// One more.
    pub fn inc(&self) {
        self.inc_by(1);
    }

    /// So many more.
    pub fn inc_by(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// How many there were.
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

/// Counts as one in a gauge for as long as it lives, however it ends.
#[derive(Debug)]
pub struct Held(Gauge);

impl Held {
    /// One more in `gauge`.
    pub fn in_gauge(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Puts down, when it is dropped, for how many seconds it has lived. Unlike something wrapped around a future, it makes none larger.
#[derive(Debug)]
pub struct Timed {
    seconds: Histogram,
    since: Instant,
}

impl Timed {
    /// In the histogram `seconds`.
    pub fn in_histogram(seconds: &Histogram) -> Self {
        Self { seconds: seconds.clone(), since: Instant::now() }
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        self.seconds.observe(self.since.elapsed().as_secs_f64());
    }
}
