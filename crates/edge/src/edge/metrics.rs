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
        "Open gRPC connections. Steady growth: a client opens one for each call",
        MetricType::Gauge,
        EdgeGauges::connections,
    ),
    ("calls", "Open gRPC calls, including waiting requests", MetricType::Gauge, EdgeGauges::calls),
    (
        "request_in_flight_bytes",
        "Bytes of the messages of open calls: the memory of large calls",
        MetricType::Gauge,
        EdgeGauges::bytes_in_flight,
    ),
    (
        "connections_refused_total",
        "gRPC connections closed because of their number: find the client that opens them, or allow more",
        MetricType::Counter,
        EdgeGauges::connections_refused,
    ),
    (
        "accept_errors_total",
        "Connections that could not be accepted, for example without free file descriptors: the log has the reason",
        MetricType::Counter,
        EdgeGauges::accept_errors,
    ),
    (
        "handshake_timeouts_total",
        "Connections closed without TLS, HTTP/2 or, in a crowd, authentication in time: an attack, or a client of another protocol",
        MetricType::Counter,
        EdgeGauges::handshake_timeouts,
    ),
    (
        "connections_slowed_total",
        "New connections delayed or closed after a connection of their address was ended: an attack, or a faulty client",
        MetricType::Counter,
        EdgeGauges::connections_slowed,
    ),
    (
        "tls_handshake_failures_total",
        "TLS handshakes that failed, for example with an untrusted or expired certificate; the log has the address",
        MetricType::Counter,
        EdgeGauges::handshakes_failed,
    ),
    (
        "tls_reloads_total",
        "Changed certificates that are in force: shows that a renewal has reached this instance",
        MetricType::Counter,
        EdgeGauges::certificates_reloaded,
    ),
    (
        "tls_reload_failures_total",
        "Changed certificates that cannot be used: the certificates before stay in force until they expire; the log has the reason",
        MetricType::Counter,
        EdgeGauges::certificates_unusable,
    ),
    (
        "calls_shed_total",
        "Calls rejected because the budget of messages was used up: find the caller of large messages, or allow more",
        MetricType::Counter,
        EdgeGauges::calls_shed,
    ),
    (
        "calls_rejected_total",
        "Calls rejected because too many were open, in total or of one caller: see --max-concurrent-calls, or start another instance",
        MetricType::Counter,
        EdgeGauges::calls_rejected,
    ),
    (
        "body_timeouts_total",
        "Calls whose messages did not arrive in time: a bad network, or an attack",
        MetricType::Counter,
        EdgeGauges::body_timeouts,
    ),
];

impl EdgeCollector {
    fn ended_connections(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let name = "linkis_rm_connections_ended_total";
        let help = "Connections ended because of too many frames outside of completed calls, by the kind of frames: an attack, or a faulty client.";
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
        let help = "Expiry of the first certificate of a file in force: no caller is trusted afterwards.";
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
