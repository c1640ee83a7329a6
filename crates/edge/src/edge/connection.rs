//! One client connection: its deadlines, its turns and its end.
//!
//! A connection has to send the HTTP/2 preface in time; in a crowd, it also has to authenticate a call in time. It ends
//! when the server stops or its client certificate expires, and no call is in progress. A connection that used up its
//! allowance ends with a GOAWAY frame.
//!
//! Each frame that is read costs a unit of the task's budget, so that other tasks run. Writes and timers never wait for
//! that budget. Callers: `listener` and the HTTP/2 library.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use rustls::pki_types::CertificateDer;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    task::coop,
    time::{Instant, Sleep, sleep, sleep_until, timeout_at},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use crate::tls::{self, Tls};
use rm_model::{access::Unauthenticated, principal::Principal};
use rm_service::{
    tokens::{Caller, CallerExpiry},
    waiting::CallerConnection,
};

use super::{
    Edge, HEALTH_CALLS_MAX, allowance::Excess, byte_budget::ByteBudget, socket, stream::MaybeTlsStream,
    traffic::Traffic,
};

/// Size of the HTTP/2 preface of a client, in bytes.
const GREETING_BYTES: usize = 24;

/// Maximum number of bytes of one read, unless the current frame has more. A turn ends at most this many bytes after
/// the last frame in the task's budget.
const READ_BYTES_MAX: usize = 2 << 10;

/// Interval between two idle checks of a connection while the server stops.
const LOOK: Duration = Duration::from_millis(150);

/// Bytes sent since the last idle check, above which a response is still being sent.
const QUIET_BYTES: usize = 1024;

/// The peer of a connection, and the permits and bytes of its calls.
#[derive(Debug)]
pub struct Peer {
    /// Address; `None` if the call came over no connection.
    pub(super) address: Option<socket::PeerAddress>,
    /// Caller that the client certificate names, if there is one.
    pub(super) certified: Option<Arc<Caller>>,
    /// Whether a call of the connection was authenticated.
    pub(super) is_known: AtomicBool,
    /// State of the connection, for its waiting calls.
    pub connection: CallerConnection,
    /// Number of calls in progress that have to complete before the connection ends.
    pub(super) work: AtomicUsize,
    /// Permits of health calls, which need no credentials.
    pub(super) health: ByteBudget,
    /// Byte budget of request bodies.
    pub(super) bytes: ByteBudget,
    /// Byte budget of responses that are not yet taken.
    pub(super) answer_bytes: ByteBudget,
}

impl Peer {
    pub(super) fn new(edge: &Edge, address: Option<socket::PeerAddress>, certified: Option<Arc<Caller>>) -> Self {
        let share = || ByteBudget::of(edge.bounds.connection_bytes());
        Self {
            address,
            is_known: AtomicBool::new(certified.is_some()),
            certified,
            connection: CallerConnection::default(),
            work: AtomicUsize::new(0),
            health: ByteBudget::of(HEALTH_CALLS_MAX),
            bytes: share(),
            answer_bytes: share(),
        }
    }
}

/// Accepted connection that has sent no byte yet. Dropping it releases its permit.
#[derive(Debug)]
pub(super) struct PendingConnection {
    stream: socket::PeerStream,
    address: socket::PeerAddress,
    place: ConnectionPermit,
    /// Deadline of the HTTP/2 preface.
    until: Instant,
}

/// Permit of a connection. Dropping it releases the permit.
#[derive(Debug)]
struct ConnectionPermit(Arc<Edge>);

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.0.gauges.held_connections.give_back(1);
    }
}

impl PendingConnection {
    /// Acquires a permit for an accepted connection; `None` if all are taken.
    pub(super) fn admit(stream: socket::PeerStream, address: socket::PeerAddress, edge: &Arc<Edge>) -> Option<Self> {
        if !edge.gauges.held_connections.take(1) {
            return None;
        }
        let place = ConnectionPermit(edge.clone());
        if let Err(error) = stream.set_nodelay() {
            tracing::debug!(%address, %error, "cannot disable the delay of small packets");
        }
        let until = Instant::now() + edge.bounds.handshake_timeout;
        Some(Self { stream, address, place, until })
    }

    /// Waits until `turn`. The timeout of the HTTP/2 preface begins then.
    pub(super) async fn wait(self, turn: Instant) -> Self {
        tokio::time::sleep_until(turn).await;
        let until = turn + self.place.0.bounds.handshake_timeout;
        Self { until, ..self }
    }

    /// Continues without TLS.
    pub(super) fn plain(self) -> Connection {
        let Self { stream, address, place, until } = self;
        Connection::new(MaybeTlsStream::Plain(stream), address, place, until, None)
    }

    /// Performs the TLS handshake; `None` if it fails or times out.
    pub(super) async fn encrypted(self, tls: &Tls) -> Option<Connection> {
        let Self { stream, address, place, until } = self;
        let gauges = &place.0.gauges;
        let stream = match timeout_at(until, tls.grpc(stream, address.ip())).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                gauges.handshakes_failed.add();
                tracing::warn!(%address, %error, "a TLS handshake failed");
                return None;
            }
            Err(_) => {
                gauges.ungreeted.add();
                return None;
            }
        };
        let certificates = stream.get_ref().1.peer_certificates();
        let certified = certificates.and_then(|chain| certified(chain.first()?));
        Some(Connection::new(MaybeTlsStream::Tls(Box::new(stream)), address, place, until, certified))
    }
}

/// Returns the caller that a verified client certificate names, and when the certificate expires.
fn certified(certificate: &CertificateDer<'_>) -> Option<(Arc<Caller>, Instant)> {
    let (name, rights) = tls::names::ecm(certificate)?;
    let until = Instant::now().checked_add(tls::expiry::left(certificate)?)?;
    let ended = CallerExpiry::default().until(until, Unauthenticated::CertificateExpired);
    Some((Arc::new(Caller { principal: Principal::Named(name), rights, ended }), until))
}

/// Accepted connection. Dropping it releases its permit.
#[derive(Debug)]
pub struct Connection {
    stream: MaybeTlsStream,
    peer: Arc<Peer>,
    edge: Arc<Edge>,
    /// Deadlines until a call is authenticated; `None` afterwards.
    unauthenticated: Option<UnidentifiedPeer>,
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Expiry of the client certificate.
    over: Option<Pin<Box<Sleep>>>,
    /// The waker that is registered for the end of the server.
    waker: Option<Waker>,
    last_look: Option<IdleCheck>,
    written: usize,
    traffic: Traffic,
    /// Progress of the end, once the allowance is used up.
    farewell: Farewell,
    _place: ConnectionPermit,
}

/// Progress of the end of a connection that used up its allowance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Farewell {
    /// The allowance is not used up.
    None,
    /// GOAWAY follows the frame that is being sent.
    Due,
    /// GOAWAY was sent, as far as the peer took it.
    Sent,
}

/// Missing bytes of the HTTP/2 preface and their deadline; afterwards, the time of the next check for a crowd.
#[derive(Debug)]
struct UnidentifiedPeer {
    missing: usize,
    until: Pin<Box<Sleep>>,
}

/// State at the last idle check, and the time of the next one.
#[derive(Debug)]
struct IdleCheck {
    next: Pin<Box<Sleep>>,
    written: usize,
    was_idle: bool,
}

impl Connection {
    fn new(
        stream: MaybeTlsStream,
        address: socket::PeerAddress,
        place: ConnectionPermit,
        until: Instant,
        certified: Option<(Arc<Caller>, Instant)>,
    ) -> Self {
        let edge = &place.0;
        let (certified, over) = certified.unzip();
        Self {
            stream,
            peer: Arc::new(Peer::new(edge, Some(address), certified)),
            edge: edge.clone(),
            unauthenticated: Some(UnidentifiedPeer { missing: GREETING_BYTES, until: Box::pin(sleep_until(until)) }),
            closing: Box::pin(edge.closing.clone().cancelled_owned()),
            over: over.map(|until| Box::pin(sleep_until(until))),
            waker: None,
            last_look: None,
            written: 0,
            traffic: Traffic::new(GREETING_BYTES, edge.bounds.connection_streams),
            farewell: Farewell::None,
            _place: place,
        }
    }

    fn has_read(&mut self, bytes: usize) {
        if let Some(unauthenticated) = &mut self.unauthenticated {
            unauthenticated.missing = unauthenticated.missing.saturating_sub(bytes);
        }
    }

    /// Completes when the connection ends. Its preface is late, a crowd needs the permit of an unauthenticated peer, or
    /// an idle connection may end.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let is_known = self.peer.is_known.load(Ordering::Relaxed);
        self.unauthenticated.take_if(|unauthenticated| is_known && unauthenticated.missing == 0);
        while let Some(unauthenticated) = &mut self.unauthenticated
            && unauthenticated.until.as_mut().poll(cx).is_ready()
        {
            if unauthenticated.missing > 0 || self.edge.is_crowded() {
                self.edge.gauges.ungreeted.add();
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            unauthenticated.until.as_mut().reset(Instant::now() + self.edge.bounds.handshake_timeout);
        }
        self.poll_idle(cx).map(Ok)
    }

    /// Completes when the server stops or the certificate expires, and no call is in progress.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        ready!(self.poll_closing(cx));
        loop {
            let look = self.last_look.get_or_insert_with(|| IdleCheck {
                next: Box::pin(sleep(LOOK)),
                written: self.written,
                was_idle: false,
            });
            ready!(look.next.as_mut().poll(cx));
            let is_idle = self.peer.work.load(Ordering::Acquire) == 0 && self.written - look.written <= QUIET_BYTES;
            // Idle for a whole interval, so the last response had the time to be sent.
            if is_idle && look.was_idle {
                return Poll::Ready(());
            }
            (look.written, look.was_idle) = (self.written, is_idle);
            look.next.as_mut().reset(Instant::now() + LOOK);
        }
    }

    /// Completes when the server stops or the certificate expires. All connections wait on one cancellation token, so
    /// each registers its waker once instead of at every read.
    fn poll_closing(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.edge.closing.is_cancelled() || self.over.as_ref().is_some_and(|over| over.is_elapsed()) {
            return Poll::Ready(());
        }
        if self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        self.waker = Some(cx.waker().clone());
        if let Some(over) = &mut self.over
            && over.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(());
        }
        self.closing.as_mut().poll(cx)
    }

    /// Reads within the turn of this connection. Pending also when the turn is over: the task is polled again after
    /// others.
    fn poll_turn(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let unit = ready!(coop::poll_proceed(cx));
        let (before, most) = (buffer.filled().len(), READ_BYTES_MAX.max(self.traffic.announced()));
        if buffer.remaining() <= most {
            ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        } else {
            let mut part = ReadBuf::new(buffer.initialize_unfilled_to(most));
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut part))?;
            let read = part.filled().len();
            buffer.advance(read);
        }
        unit.made_progress();
        let read = buffer.filled().get(before..).unwrap_or_default();
        for _ in 0..self.traffic.receive(read, self.peer.is_known.load(Ordering::Relaxed)) {
            let Poll::Ready(unit) = coop::poll_proceed(cx) else { break };
            unit.made_progress();
        }
        let read = read.len();
        self.peer.connection.mark_read();
        self.has_read(read);
        self.note_excess();
        Poll::Ready(Ok(()))
    }

    /// Starts the end of a connection that used up its allowance, and slows new connections of its address. The HTTP/2
    /// library ends the connection itself if it found the excess.
    fn note_excess(&mut self) {
        let (Some(excess), Farewell::None) = (self.traffic.excess(), self.farewell) else { return };
        self.farewell = Farewell::Due;
        self.edge.gauges.end_for(excess);
        let address = self.peer.address;
        self.edge.slow_addresses.slow(address.and_then(|address| address.ip()), Instant::now());
        let address = address.map(tracing::field::display);
        tracing::warn!(address, too_many = excess.as_str(), "ended a connection");
    }

    /// Returns true if this type ends the connection, and not the HTTP/2 library.
    fn is_ending(&self) -> bool {
        self.farewell != Farewell::None && self.traffic.excess() != Some(Excess::Library)
    }

    /// Sends GOAWAY and shuts the stream down. Pending while the HTTP/2 library completes a frame. A peer that does not
    /// take GOAWAY is disconnected without it.
    fn poll_farewell(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if let (Farewell::Due, Some(excess)) = (self.farewell, self.traffic.excess()) {
            if self.traffic.unfinished() > 0 {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            self.farewell = Farewell::Sent;
            let (goaway, mut sent) = (self.traffic.goaway(excess), 0);
            let stream = &mut self.stream;
            while let Some(rest) = goaway.get(sent..).filter(|rest| !rest.is_empty())
                && let Poll::Ready(Ok(bytes @ 1..)) = unbudgeted(cx, |cx| Pin::new(&mut *stream).poll_write(cx, rest))
            {
                sent += bytes;
            }
            let _ = unbudgeted(cx, |cx| Pin::new(&mut *stream).poll_flush(cx));
            let _ = unbudgeted(cx, |cx| Pin::new(&mut *stream).poll_shutdown(cx));
        }
        Poll::Ready(io::ErrorKind::ConnectionAborted.into())
    }

    /// Writes the rest of the current frame, and no further byte.
    fn poll_last_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let unfinished = self.traffic.unfinished();
        let Some(bytes) = bytes.get(..unfinished.min(bytes.len())).filter(|bytes| !bytes.is_empty()) else {
            return self.poll_farewell(cx).map(Err);
        };
        let stream = &mut self.stream;
        let Poll::Ready(written) = unbudgeted(cx, |cx| Pin::new(&mut *stream).poll_write(cx, bytes)) else {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        };
        let written = written?;
        self.traffic.send(bytes.get(..written).unwrap_or_default());
        Poll::Ready(Ok(written))
    }

    /// Counts the bytes of `parts` that were written.
    fn has_written(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
        polled: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = polled {
            self.written = self.written.saturating_add(bytes);
            let mut left = bytes;
            for part in parts {
                let written = part.get(..left.min(part.len())).unwrap_or_default();
                self.traffic.send(written);
                left -= written.len();
            }
            self.note_excess();
        }
        self.or_end(cx, polled)
    }

    /// Checks the end of the connection when an operation is pending. A peer that does not read gets no more time than
    /// a silent one.
    fn or_end<T>(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match polled {
            Poll::Ready(result) => {
                if result.is_err() {
                    self.peer.connection.mark_closed();
                }
                Poll::Ready(result)
            }
            Poll::Pending => unbudgeted(cx, |cx| self.poll_end(cx)).map(|_| Err(io::ErrorKind::TimedOut.into())),
        }
    }
}

/// Polls outside the task's budget, so that neither writes nor timers wait after many reads.
fn unbudgeted<T>(cx: &mut Context<'_>, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
    pin!(coop::unconstrained(poll_fn(|cx| poll(cx)))).poll(cx)
}

impl Connected for Connection {
    type ConnectInfo = Arc<Peer>;

    fn connect_info(&self) -> Arc<Peer> {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = match self.is_ending() {
            true => self.poll_farewell(cx).map(Err),
            false => match self.poll_turn(cx, buffer) {
                Poll::Ready(read) => Poll::Ready(read),
                Poll::Pending => unbudgeted(cx, |cx| self.poll_end(cx)),
            },
        };
        // The calls of the connection end after this.
        if matches!(&read, Poll::Ready(result) if result.is_err() || buffer.filled().len() == before) {
            self.peer.connection.mark_closed();
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_ending() {
            return self.poll_last_write(cx, bytes);
        }
        let stream = &mut self.stream;
        let polled = unbudgeted(cx, |cx| Pin::new(&mut *stream).poll_write(cx, bytes));
        self.has_written(cx, &[io::IoSlice::new(bytes)], polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.is_ending() {
            let first = parts.iter().find(|part| !part.is_empty());
            return self.poll_last_write(cx, first.map(|part| &**part).unwrap_or_default());
        }
        let stream = &mut self.stream;
        let polled = unbudgeted(cx, |cx| Pin::new(&mut *stream).poll_write_vectored(cx, parts));
        self.has_written(cx, parts, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let stream = &mut self.stream;
        let polled = unbudgeted(cx, |cx| Pin::new(&mut *stream).poll_flush(cx));
        self.or_end(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::{io::AsyncWriteExt as _, net::UnixStream};

    use super::*;
    use crate::edge::EdgeBounds;

    /// Returns a connection and its other end.
    fn connection() -> (Connection, UnixStream) {
        let edge = Edge::new(EdgeBounds::DEFAULT, None);
        let (here, there) = UnixStream::pair().unwrap();
        let address = socket::PeerAddress::from(std::net::SocketAddr::from(([127, 0, 0, 1], 1)));
        (PendingConnection::admit(socket::PeerStream::Unix(here), address, &edge).unwrap().plain(), there)
    }

    /// Returns the bytes that one poll of a task reads. The task reads until the connection is pending, as the HTTP/2
    /// library does.
    fn read_in_one_poll(connection: &mut Connection, cx: &mut Context<'_>) -> usize {
        let mut bytes = 0;
        loop {
            let mut piece = [0; 8192];
            let mut buffer = ReadBuf::new(&mut piece);
            match Pin::new(&mut *connection).poll_read(cx, &mut buffer) {
                Poll::Ready(read) => {
                    read.unwrap();
                    bytes += buffer.filled().len();
                }
                Poll::Pending => return bytes,
            }
        }
    }

    const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

    #[tokio::test]
    async fn connection_turn_reads_bounded_frames() {
        const FRAMES: usize = 5000;
        let (mut connection, mut there) = connection();
        there.write_all(&[0; GREETING_BYTES]).await.unwrap();
        there.write_all(&PING.repeat(FRAMES)).await.unwrap();
        let (mut left, mut turns) = (GREETING_BYTES + FRAMES * PING.len(), 0);
        while left > 0 {
            let read = tokio::spawn(async move {
                let bytes = poll_fn(|cx| Poll::Ready(read_in_one_poll(&mut connection, cx))).await;
                (connection, bytes)
            });
            let bytes;
            (connection, bytes) = read.await.unwrap();
            assert!(bytes <= 300 * PING.len(), "{} frames in one turn", bytes / PING.len());
            (left, turns) = (left - bytes, turns + 1);
        }
        assert!(turns >= FRAMES / 300, "{turns} turns");
    }
}
