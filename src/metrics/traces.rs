//! Spans on their way to a collector: of the process, which sends them for all that it serves.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};

use crate::telemetry::traces::export;

/// Reads what was counted when it is asked.
#[derive(Debug)]
pub(super) struct Traces;

impl Collector for Traces {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, count) in [
            (
                "linkis_rm_trace_spans_exported_total",
                "Spans that the collector of traces has taken.",
                export::exported as fn() -> u64,
            ),
            (
                "linkis_rm_trace_spans_dropped_total",
                "Spans that were lost because the collector of traces is slow or away: the log says why.",
                export::dropped,
            ),
        ] {
            let value = ConstGauge::new(i64::try_from(count()).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        Ok(())
    }
}
