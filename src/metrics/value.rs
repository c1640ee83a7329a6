//! Counters as Prometheus' text format has them, gauges of what is held, and how long something took.

use std::{
    fmt,
    future::Future,
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

/// Puts down how many seconds `work` took; nothing if it is dropped before its end.
pub async fn timed<T>(seconds: &Histogram, work: impl Future<Output = T>) -> T {
    let start = Instant::now();
    let done = work.await;
    seconds.observe(start.elapsed().as_secs_f64());
    done
}
