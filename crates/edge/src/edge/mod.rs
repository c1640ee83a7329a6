//! The edge: bounds of every connection and call before a service reads it.
//!
//! Every connection, every stored byte and every wait has a bound, so that no caller takes the share of others. One
//! connection can occupy the headers of its streams and one window of unread bytes. Its requests and their decoded
//! fields take a fraction of [`EdgeBounds::body_bytes`]; its responses take as much again, and 8 KB per call.
//! Callers: the server of the root package, and the monitoring page.
//! - `socket`, `open_files`, `listener`, `slow_addresses`: where connections come from, and which are accepted;
//! - `connection`, `stream`, `age`: one connection; `traffic`, `frames`, `allowance`: bounds of its frames;
//! - `service`, `permits`, `byte_budget`: authentication, permits and byte budgets of a call;
//! - `body`, `gzip`, `fields`, `reply`: requests and responses; `gauges`, `metrics`: figures for the metrics.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use prometheus_client::collector::Collector;
use tokio_util::sync::CancellationToken;

use crate::{message_size::HEARTBEAT_BYTES_MAX, tls::Tls};

use byte_budget::ByteBudget;
use gauges::EdgeGauges;
use metrics::EdgeCollector;
use permits::CallPermits;
use slow_addresses::SlowAddresses;

mod age;
mod allowance;
mod body;
mod byte_budget;
mod connection;
mod fields;
mod frames;
pub mod gauges;
mod gzip;
mod listener;
mod metrics;
mod open_files;
mod permits;
mod reply;
mod service;
mod slow_addresses;
mod socket;
mod stream;
mod traffic;

pub use age::spread as ages;
pub use body::RequestBody;
pub use connection::Connection;
pub use connection::Peer;
pub use listener::accept;
pub use open_files::make_room;
pub use permits::ActiveCallPermit;
pub use service::{EdgeService, FaultOfCaller};
pub use socket::{ListenAddress, Listener, PeerAddress};

/// Maximum number of bytes that one call may have sent and that are not yet read.
pub const STREAM_WINDOW: u32 = 64 << 10;

/// Bytes that each call of a connection adds to the connection window. The HTTP/2 library ends a connection with many
/// small unread pieces: it counts each as 256 bytes and allows half a window of them. The window thus permits two
/// pieces per call.
const WINDOW_PER_CALL: u32 = 1 << 10;

/// Minimum window of a connection, in bytes.
const CONNECTION_WINDOW_MIN: u32 = 256 << 10;

/// Maximum number of reflection streams. Such a stream is read only as its responses are taken, so each may leave a
/// window unread.
const REFLECTIONS_MAX: usize = 256;

/// Maximum number of health calls in progress on one connection. They need no credentials, and each takes some 10 KB.
const HEALTH_CALLS_MAX: usize = 8;

/// Maximum size of the headers of a call, uncompressed, in bytes.
pub const HEADER_BYTES_MAX: u32 = 8 << 10;

/// Maximum size of a small body, in bytes. Large bodies together leave half of the byte budget to small ones.
const SMALL_BODY_BYTES: usize = 64 << 10;

/// Maximum size of a body whose fields are not counted, in bytes. Its decoded fields are converted and freed
/// immediately.
const UNCOUNTED_BYTES: usize = 4 << 10;

/// Size up to which a response is never rejected, in bytes, because its operation is done already. The bound of calls
/// bounds such responses. A larger response is sent in pieces of this size, so one piece may remain after the last is
/// taken.
const SMALL_ANSWER_BYTES: usize = 8 << 10;

/// Divisor of the byte budget; one connection may take the quotient.
const CONNECTION_SHARES: usize = 4;

/// Maximum size of a body, in bytes: a flag, a length and the message.
const BODY_BYTES_MAX: usize = PREFIX_BYTES + HEARTBEAT_BYTES_MAX;

/// Size of the prefix of a message, in bytes.
const PREFIX_BYTES: usize = 5;

/// Minimum byte budget: the fraction of one connection fits the largest body.
pub const BODY_BYTES_LEAST: usize = CONNECTION_SHARES * BODY_BYTES_MAX;

/// Bounds of the edge of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdgeBounds {
    /// Maximum number of connections.
    pub connections: usize,
    /// Age at which a client must open another connection, with a spread of a tenth; `None` for no bound.
    pub connection_age: Option<Duration>,
    /// Maximum number of requests that are decided at the same time. Waiting requests and calls that free capacity do
    /// not count.
    pub calls: usize,
    /// Maximum number of waiting requests.
    pub waiting: usize,
    /// Maximum number of calls in progress on one connection.
    pub connection_streams: u32,
    /// Timeout of the HTTP/2 preface of a new connection, and of its first authenticated call while more than half of
    /// the connections are taken.
    pub handshake_timeout: Duration,
    /// Timeout of the body of a call.
    pub body_timeout: Duration,
    /// Byte budget of the request bodies of all calls in progress, and of their responses as much again; at least
    /// [`BODY_BYTES_LEAST`].
    pub body_bytes: usize,
}

impl EdgeBounds {
    /// Defaults of the settings.
    pub const DEFAULT: Self = Self {
        connections: 16_384,
        connection_age: None,
        calls: 4096,
        waiting: 4000,
        connection_streams: 1024,
        handshake_timeout: Duration::from_secs(5),
        body_timeout: Duration::from_secs(10),
        body_bytes: 64 << 20,
    };

    /// Returns the byte budget of the requests of one connection, and of its responses as much again.
    fn connection_bytes(&self) -> usize {
        self.body_bytes / CONNECTION_SHARES
    }

    /// Returns the window of one connection: the bytes that its calls may have sent and that are not yet read.
    pub fn connection_window(&self) -> u32 {
        self.connection_streams.saturating_mul(WINDOW_PER_CALL).max(CONNECTION_WINDOW_MIN)
    }
}

/// The edge of one instance.
#[derive(Debug)]
pub struct Edge {
    bounds: EdgeBounds,
    /// TLS configuration of connections; `None` without TLS.
    tls: Option<Arc<Tls>>,
    gauges: Arc<EdgeGauges>,
    places: CallPermits,
    reflections: ByteBudget,
    /// Byte budget of responses that are not yet taken. It is separate, because a caller may take a response at any
    /// time.
    answer_bytes: ByteBudget,
    slow_addresses: SlowAddresses,
    /// Cancelled when endless streams and idle connections have to end.
    closing: CancellationToken,
}

impl Edge {
    /// Creates an edge without connections. Connections use `tls`, if given.
    pub fn new(bounds: EdgeBounds, tls: Option<Arc<Tls>>) -> Arc<Self> {
        Arc::new(Self {
            bounds,
            gauges: Arc::new(EdgeGauges::new(&bounds, tls.clone())),
            places: CallPermits::new(&bounds),
            tls,
            reflections: ByteBudget::of(REFLECTIONS_MAX),
            answer_bytes: ByteBudget::of(bounds.body_bytes),
            slow_addresses: SlowAddresses::default(),
            closing: CancellationToken::new(),
        })
    }

    /// Returns the bounds.
    pub fn bounds(&self) -> EdgeBounds {
        self.bounds
    }

    /// Returns the collector that writes the metric families of the edge.
    pub fn collector(&self) -> Box<dyn Collector> {
        Box::new(EdgeCollector(self.gauges.clone()))
    }

    /// Returns a peer for calls that do not come over a gRPC connection.
    pub fn visitor(&self, address: SocketAddr) -> Arc<Peer> {
        Arc::new(Peer::new(self, Some(address.into()), None))
    }

    /// Returns true if more than half of the connections are taken.
    fn is_crowded(&self) -> bool {
        self.gauges.held_connections.taken() > self.bounds.connections / 2
    }

    /// Ends endless streams, and connections without a call in progress.
    pub fn close(&self) {
        self.closing.cancel();
    }
}
