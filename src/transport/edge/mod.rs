//! The edge: what the world may use of this instance before anybody has looked at what it wants.
//!
//! Every connection, every byte that is kept of a body and every wait for one has a bound, so that no caller, and no crowd of them,
//! takes what the others need. What one connection can make the process keep is the sum of its streams' headers, of what was
//! received and not yet read (a window, [`Bounds::connection_window`]), of the bodies of its calls, and what they become (a share of
//! [`Bounds::body_bytes`]), and of their answers (as much again, and 8 KB for each call).
//!
//! - `socket`: where it listens; `open_files`: room for connections; `listener`: the accept loop, and who is turned away;
//! - `stream`: a connection's bytes, encrypted or not;
//! - `connection`: one connection: its greeting in time, its turns, and its end: in a crowd, after a flood, and when the server stops;
//! - `traffic`: its frames, counted; `frames`: where they begin; `allowance`: how many of them there may be;
//! - `slow_addresses`: addresses whose new connections are slowed after a flood;
//! - `age`: how old connections get;
//! - `calls`: in front of every service: who is let in, what a call may take, and what is told of a defect;
//! - `body`: a body, as it arrives; `gzip`: what is compressed; `fields`: what becomes more than it was;
//! - `answer`: an answer, as it is sent;
//! - `places`: how many calls there may be, by what they are for;
//! - [`gauges`]: how much of it all is taken.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{tls::Tls, transport::message_size::HEARTBEAT_BYTES_MAX};

use connection::Peer;
use gauges::EdgeGauges;
use places::Places;
use share::Share;
use slow_addresses::SlowAddresses;

mod age;
mod allowance;
mod answer;
mod body;
mod calls;
mod connection;
mod fields;
mod frames;
pub mod gauges;
mod gzip;
mod listener;
mod open_files;
mod places;
mod share;
mod slow_addresses;
mod socket;
mod stream;
mod traffic;

pub use age::spread as ages;
pub use body::Received;
pub use calls::{Calls, FaultOfCaller};
pub use connection::Connection;
pub use listener::accept;
pub use open_files::make_room;
pub use places::ActiveCall;
pub use socket::{Listen, Listener, PeerAddress};

/// How much one call may have sent that nobody has read.
pub const STREAM_WINDOW: u32 = 64 << 10;

/// How much each call of a connection adds to what they all may have sent that nobody has read. A connection with many small unread
/// pieces is ended by the HTTP/2 library: it reckons each as 256 bytes, and allows for half a window of them. So there is room for
/// two of each call.
const WINDOW_PER_CALL: u32 = 1 << 10;

/// The smallest window of a connection.
const CONNECTION_WINDOW_MIN: u32 = 256 << 10;

/// How many reflection streams there may be. They are read only as far as their answers are, so that each may leave a window unread.
const REFLECTIONS_MAX: usize = 256;

/// How many calls about health one connection may have under way: whoever reaches the port makes them, and each takes some ten KB.
const HEALTH_CALLS_MAX: usize = 8;

/// The largest headers of a call, uncompressed.
pub const HEADER_BYTES_MAX: u32 = 8 << 10;

/// A body up to this size is small: all others together leave half of the room to these.
const SMALL_BODY_BYTES: usize = 64 << 10;

/// Of a body up to this size nobody counts the fields: what they become is gone when they have been looked at, and that is at once.
const UNCOUNTED_BYTES: usize = 4 << 10;

/// An answer up to this size has room in any case: whatever it tells of is done. As every call has one, this bounds them. Of a larger
/// one, so much is left when the last of it is handed over.
const SMALL_ANSWER_BYTES: usize = 8 << 10;

/// Which part of the room for bodies one connection may take: one of so many.
const CONNECTION_SHARES: usize = 4;

/// The largest body: a flag and a length stand before its message.
const BODY_BYTES_MAX: usize = PREFIX_BYTES + HEARTBEAT_BYTES_MAX;

/// How many bytes stand before a message.
const PREFIX_BYTES: usize = 5;

/// The least room for bodies: one connection's share takes the largest.
pub const BODY_BYTES_LEAST: usize = CONNECTION_SHARES * BODY_BYTES_MAX;

/// What callers may take of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// How many connections there may be.
    pub connections: usize,
    /// How old a connection gets, give or take a tenth, before its client is asked to open another; `None` for as old as it likes.
    pub connection_age: Option<Duration>,
    /// How many calls that ask for something may be judged at once; what frees something is not counted, nor who waits in line.
    pub calls: usize,
    /// How many requests may wait in line.
    pub waiting: usize,
    /// How many calls one connection may have under way.
    pub connection_streams: u32,
    /// How long a new connection may take for its first words, and how long one may be there, while more than half of the places are
    /// taken, of which it is not known who calls on it.
    pub handshake_timeout: Duration,
    /// How long the body of a call may take to arrive.
    pub body_timeout: Duration,
    /// How many bytes the bodies of all calls under way may have together, and their answers as much again; at least [`BODY_BYTES_LEAST`].
    pub body_bytes: usize,
}

impl Bounds {
    /// What holds if nothing else is set.
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

    /// How much the bodies of the calls of one connection may take, and their answers as much again, in bytes.
    fn connection_bytes(&self) -> usize {
        self.body_bytes / CONNECTION_SHARES
    }

    /// How much all calls of one connection may have sent that nobody has read, in bytes.
    pub fn connection_window(&self) -> u32 {
        self.connection_streams.saturating_mul(WINDOW_PER_CALL).max(CONNECTION_WINDOW_MIN)
    }
}

/// The edge of one instance.
#[derive(Debug)]
pub struct Edge {
    bounds: Bounds,
    /// What connections are encrypted with.
    tls: Option<Arc<Tls>>,
    gauges: Arc<EdgeGauges>,
    places: Places,
    reflections: Share,
    /// Bytes of answers that are not yet taken: a room of their own, because nobody has to read them in time.
    answer_bytes: Share,
    slow_addresses: SlowAddresses,
    /// Cancelled when whatever only lingers has to end.
    closing: CancellationToken,
}

impl Edge {
    /// Nobody is there yet. Connections are encrypted with `tls`, if there is any.
    pub fn new(bounds: Bounds, tls: Option<Arc<Tls>>) -> Arc<Self> {
        Arc::new(Self {
            bounds,
            gauges: Arc::new(EdgeGauges::new(&bounds, tls.clone())),
            places: Places::new(&bounds),
            tls,
            reflections: Share::of(REFLECTIONS_MAX),
            answer_bytes: Share::of(bounds.body_bytes),
            slow_addresses: SlowAddresses::default(),
            closing: CancellationToken::new(),
        })
    }

    /// What callers may take.
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// How much is taken.
    pub fn gauges(&self) -> Arc<EdgeGauges> {
        self.gauges.clone()
    }

    /// Somebody whose calls do not come over gRPC's own connections.
    pub fn visitor(&self, address: SocketAddr) -> Arc<Peer> {
        Arc::new(Peer::new(self, Some(address.into()), None))
    }

    /// Whether places for connections get scarce.
    fn is_crowded(&self) -> bool {
        self.gauges.held_connections.taken() > self.bounds.connections / 2
    }

    /// Ends what only lingers: streams that have no end of their own, and connections without a call.
    pub fn close(&self) {
        self.closing.cancel();
    }
}
