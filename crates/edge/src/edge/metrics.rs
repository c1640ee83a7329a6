//! Metrics of the edge, read from the edge's own counters at each scrape.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};

use super::gauges::EdgeGauges;

/// Collector of the edge's counters.
#[derive(Debug)]
pub(super) struct EdgeCollector(pub Arc<EdgeGauges>);

/// Definition of a metric: name, help text, type and source.
type GaugeRow = (&'static str, &'static str, MetricType, fn(&EdgeGauges) -> u64);

const ROWS: [GaugeRow; 13] = [
    (
        "connections",
        "Open gRPC connections: if they only grow, some client opens one for each call",
        MetricType::Gauge,
        EdgeGauges::connections,
    ),
    ("calls", "gRPC calls under way, those that wait in line included", MetricType::Gauge, EdgeGauges::calls),
    (
        "request_in_flight_bytes",
        "Bytes of the messages of calls under way: the memory that large calls take together",
        MetricType::Gauge,
        EdgeGauges::bytes_in_flight,
    ),
    (
        "connections_refused_total",
        "gRPC connections closed at once, because there were too many: find who opens them, or allow more",
        MetricType::Counter,
        EdgeGauges::connections_refused,
    ),
    (
        "accept_errors_total",
        "How often a connection could not be accepted: the log says why, too few files for example",
        MetricType::Counter,
        EdgeGauges::accept_errors,
    ),
    (
        "handshakes_late_total",
        "Connections closed because they did not speak TLS or HTTP/2 in time, or in a crowd because nobody showed who he was: an attack, or a client of another protocol",
        MetricType::Counter,
        EdgeGauges::handshakes_late,
    ),
    (
        "connections_slowed_total",
        "New connections that waited or were closed because a connection of their address had been ended: an attack, or a faulty client",
        MetricType::Counter,
        EdgeGauges::connections_slowed,
    ),
    (
        "tls_handshake_failures_total",
        "TLS handshakes that failed: a certificate of a caller that is not believed, or over; the log says whose",
        MetricType::Counter,
        EdgeGauges::handshakes_failed,
    ),
    (
        "tls_reloads_total",
        "Certificates that changed and were taken up: whether a renewal has reached this instance",
        MetricType::Counter,
        EdgeGauges::certificates_reloaded,
    ),
    (
        "tls_reload_failures_total",
        "Certificates that changed and cannot be used: those before stay in force until they are over; the log says why",
        MetricType::Counter,
        EdgeGauges::certificates_unusable,
    ),
    (
        "calls_shed_total",
        "Calls turned away because there was no room for their messages: find who sends so much, or allow more",
        MetricType::Counter,
        EdgeGauges::calls_shed,
    ),
    (
        "calls_turned_away_total",
        "Calls turned away because too many were under way, or too many of one caller's: see --max-concurrent-calls, or start another instance",
        MetricType::Counter,
        EdgeGauges::calls_turned_away,
    ),
    (
        "bodies_late_total",
        "Calls whose messages took too long to arrive: a bad network, or an attack",
        MetricType::Counter,
        EdgeGauges::bodies_late,
    ),
];

impl EdgeCollector {
    fn ended_connections(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let name = "linkis_rm_connections_ended_total";
        let help = "Connections ended because of too many frames that are no part of an answered call, by the kind of frames: an attack, or a faulty client.";
        let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (reason, ended) in self.0.connections_ended() {
            let ended = ConstGauge::new(i64::try_from(ended).unwrap_or(i64::MAX));
            ended.encode(encoder.encode_family(&[("reason", reason)])?)?;
        }
        Ok(())
    }

    fn certificates(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(expiry) = self.0.certificate_expiry() else { return Ok(()) };
        let name = "linkis_rm_tls_certificate_expiry_timestamp_seconds";
        let help = "When the first certificate of a file that is in force is over: nobody is believed from then on.";
        let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (file, end) in [("cert", expiry.cert), ("client_ca", expiry.client_ca)] {
            if let Some(end) = end {
                ConstGauge::new(end.unix_timestamp()).encode(encoder.encode_family(&[("file", file)])?)?;
            }
        }
        Ok(())
    }
}

impl Collector for EdgeCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, kind, read) in ROWS {
            let name = format!("linkis_rm_{name}");
            let value = ConstGauge::new(i64::try_from(read(&self.0)).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(&name, &format!("{help}."), None, kind)?)?;
        }
        self.ended_connections(&mut encoder)?;
        self.certificates(encoder)
    }
}
