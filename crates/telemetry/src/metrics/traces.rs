//! Metrics of the span export. Process-wide: the export serves all servers of the process.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};

use crate::traces::export;

/// Collector that reads the counters of the export at each scrape.
#[derive(Debug)]
pub(super) struct TraceMetrics;

impl Collector for TraceMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, count) in [
            (
                "linkis_rm_trace_spans_exported_total",
                "Spans that the trace collector accepted.",
                export::exported as fn() -> u64,
            ),
            (
                "linkis_rm_trace_spans_dropped_total",
                "Spans dropped because the trace collector is slow or away: the log states the reason.",
                export::dropped,
            ),
        ] {
            let value = ConstGauge::new(i64::try_from(count()).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        Ok(())
    }
}
