//! One connection: it has to greet in time; while there is a crowd, it has to be told in time who calls; and it ends when the server stops,
//! or the certificate of its caller is over, and nobody has a call under way on it.
//!
//! A connection takes turns: each frame that is read costs a unit of its task's budget, so that other tasks run. It is ended with a GOAWAY
//! frame when its [`Traffic`] has used up its allowance.

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

use crate::{
    domain::{access::Unauthenticated, principal::Principal},
    service::tokens::{Caller, Ended},
    tls::{self, Tls},
};

use super::{Edge, HEALTH_CALLS_MAX, allowance::Excess, share::Share, socket, stream::Stream, traffic::Traffic};

/// What an HTTP/2 client says first.
const GREETING_BYTES: usize = 24;

/// Maximum number of bytes that are read at a time, unless a frame is known to have more: a turn ends at most so many bytes behind the
/// last frame that the budget of the task allows.
const READ_BYTES_MAX: usize = 2 << 10;

/// How often a connection of a server that stops is looked at.
const LOOK: Duration = Duration::from_millis(150);

/// More than this since the last look, and an answer is still on its way.
const QUIET_BYTES: usize = 1024;

/// What is known of the other end, and what its calls take.
#[derive(Debug)]
pub struct Peer {
    /// Where it is.
    pub(super) address: Option<socket::PeerAddress>,
    /// Whom its certificate is for.
    pub(super) certified: Option<Arc<Caller>>,
    /// Whether somebody has made a call on it of whom it is known who it is.
    pub(super) is_known: AtomicBool,
    /// How many calls are under way that are finished before it ends.
    pub(super) work: AtomicUsize,
    /// Those about health, which whoever reaches the port makes.
    pub(super) health: Share,
    /// Bytes of their bodies.
    pub(super) bytes: Share,
    /// Bytes of their answers that are not yet taken.
    pub(super) answer_bytes: Share,
}

impl Peer {
    pub(super) fn new(edge: &Edge, address: Option<socket::PeerAddress>, certified: Option<Arc<Caller>>) -> Self {
        let share = || Share::of(edge.bounds.connection_bytes());
        Self {
            address,
            is_known: AtomicBool::new(certified.is_some()),
            certified,
            work: AtomicUsize::new(0),
            health: Share::of(HEALTH_CALLS_MAX),
            bytes: share(),
            answer_bytes: share(),
        }
    }
}

/// A connection that there is room for, of which nothing is known yet; when it is dropped, there is room for another.
#[derive(Debug)]
pub(super) struct Newcomer {
    stream: socket::Stream,
    address: socket::PeerAddress,
    place: Place,
    /// Until when it has to have said its first words.
    until: Instant,
}

/// Room for a connection.
#[derive(Debug)]
struct Place(Arc<Edge>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.gauges.held_connections.give_back(1);
    }
}

impl Newcomer {
    /// `None` if there are too many.
    pub(super) fn admit(stream: socket::Stream, address: socket::PeerAddress, edge: &Arc<Edge>) -> Option<Self> {
        if !edge.gauges.held_connections.take(1) {
            return None;
        }
        let place = Place(edge.clone());
        if let Err(error) = stream.set_nodelay() {
            tracing::debug!(%address, %error, "cannot send small packets at once");
        }
        let until = Instant::now() + edge.bounds.handshake_timeout;
        Some(Self { stream, address, place, until })
    }

    /// Waits until `turn`; the time for its first words begins then.
    pub(super) async fn wait(self, turn: Instant) -> Self {
        tokio::time::sleep_until(turn).await;
        let until = turn + self.place.0.bounds.handshake_timeout;
        Self { until, ..self }
    }

    /// As it is.
    pub(super) fn plain(self) -> Connection {
        let Self { stream, address, place, until } = self;
        Connection::new(Stream::Plain(stream), address, place, until, None)
    }

    /// Encrypts it; `None` if the other side does not go along, or not in time.
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
        Some(Connection::new(Stream::Tls(Box::new(stream)), address, place, until, certified))
    }
}

/// Who is let in by a certificate that is believed, and until when.
fn certified(certificate: &CertificateDer<'_>) -> Option<(Arc<Caller>, Instant)> {
    let (name, rights) = tls::names::ecm(certificate)?;
    let until = Instant::now().checked_add(tls::expiry::left(certificate)?)?;
    let ended = Ended::default().until(until, Unauthenticated::CertificateExpired);
    Some((Arc::new(Caller { principal: Principal::Named(name), rights, ended }), until))
}

/// A connection that was admitted; when it is dropped, there is room for another.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    peer: Arc<Peer>,
    edge: Arc<Edge>,
    /// Of whom it is not known who it is.
    stranger: Option<Stranger>,
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
    /// When the certificate is over that it began with.
    over: Option<Pin<Box<Sleep>>>,
    /// Who is woken when the server closes.
    waker: Option<Waker>,
    last_look: Option<Look>,
    written: usize,
    traffic: Traffic,
    /// Progress of its end, once it has used up its allowance.
    farewell: Farewell,
    _place: Place,
}

/// Progress of the end of a connection that used up its allowance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Farewell {
    /// It has not used up its allowance.
    None,
    /// The frame that is being sent is finished first, then GOAWAY is sent.
    Due,
    /// GOAWAY is sent, as far as the peer took it.
    Sent,
}

/// What is still missing of the greeting, and until when; then, when it is looked at next whether there is a crowd.
#[derive(Debug)]
struct Stranger {
    missing: usize,
    until: Pin<Box<Sleep>>,
}

/// How the connection was at the last look, and when the next one is.
#[derive(Debug)]
struct Look {
    next: Pin<Box<Sleep>>,
    written: usize,
    was_idle: bool,
}

impl Connection {
    fn new(
        stream: Stream,
        address: socket::PeerAddress,
        place: Place,
        until: Instant,
        certified: Option<(Arc<Caller>, Instant)>,
    ) -> Self {
        let edge = &place.0;
        let (certified, over) = certified.unzip();
        Self {
            stream,
            peer: Arc::new(Peer::new(edge, Some(address), certified)),
            edge: edge.clone(),
            stranger: Some(Stranger { missing: GREETING_BYTES, until: Box::pin(sleep_until(until)) }),
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
        if let Some(stranger) = &mut self.stranger {
            stranger.missing = stranger.missing.saturating_sub(bytes);
        }
    }

    /// Ready if nothing is to be expected any more: the greeting is late, others want the place of one who is not known, or the
    /// connection is idle when it may go.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let is_known = self.peer.is_known.load(Ordering::Relaxed);
        self.stranger.take_if(|stranger| is_known && stranger.missing == 0);
        while let Some(stranger) = &mut self.stranger
            && stranger.until.as_mut().poll(cx).is_ready()
        {
            if stranger.missing > 0 || self.edge.is_crowded() {
                self.edge.gauges.ungreeted.add();
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            stranger.until.as_mut().reset(Instant::now() + self.edge.bounds.handshake_timeout);
        }
        self.poll_idle(cx).map(Ok)
    }

    /// Ready when the server closes, or the certificate is over, and nobody has a call under way.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        ready!(self.poll_closing(cx));
        loop {
            let look = self.last_look.get_or_insert_with(|| Look {
                next: Box::pin(sleep(LOOK)),
                written: self.written,
                was_idle: false,
            });
            ready!(look.next.as_mut().poll(cx));
            let is_idle = self.peer.work.load(Ordering::Acquire) == 0 && self.written - look.written <= QUIET_BYTES;
            // Idle for a whole turn: what was answered last has had the time to leave.
            if is_idle && look.was_idle {
                return Poll::Ready(());
            }
            (look.written, look.was_idle) = (self.written, is_idle);
            look.next.as_mut().reset(Instant::now() + LOOK);
        }
    }

    /// Ready when the server closes, or the certificate is over. All connections wait at one place: each is added to it once, and not at
    /// every read.
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

    /// Reads within the turn of this connection. Pending also when the turn is over: the task is then polled again after others.
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
        self.has_read(read);
        self.note_excess();
        Poll::Ready(Ok(()))
    }

    /// Begins the end of a connection that has used up its allowance, and slows new ones of its address. If the HTTP/2 library found the
    /// excess, it ends the connection by itself.
    fn note_excess(&mut self) {
        let (Some(excess), Farewell::None) = (self.traffic.excess(), self.farewell) else { return };
        self.farewell = Farewell::Due;
        self.edge.gauges.end_for(excess);
        let address = self.peer.address;
        self.edge.slow_addresses.slow(address.and_then(|address| address.ip()), Instant::now());
        let address = address.map(tracing::field::display);
        tracing::warn!(address, too_many = excess.name(), "ended a connection");
    }

    /// Whether the end is for this connection to make.
    fn is_ending(&self) -> bool {
        self.farewell != Farewell::None && self.traffic.excess() != Some(Excess::Library)
    }

    /// Sends GOAWAY, and shuts the stream down. Pending while the HTTP/2 library has to finish a frame. A peer that does not take GOAWAY is
    /// ended without it.
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

    /// Writes what finishes a frame, and nothing else.
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

    /// Counts what is written of `parts`.
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

    /// Nothing waits longer for one who does not read than for one who says nothing.
    fn or_end<T>(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match polled {
            Poll::Ready(_) => polled,
            Poll::Pending => unbudgeted(cx, |cx| self.poll_end(cx)).map(|_| Err(io::ErrorKind::TimedOut.into())),
        }
    }
}

/// Polls apart from the budget of the task: neither what is to be sent nor a timer waits because many frames were read.
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
        if self.is_ending() {
            return self.poll_farewell(cx).map(Err);
        }
        match self.poll_turn(cx, buffer) {
            Poll::Ready(read) => Poll::Ready(read),
            Poll::Pending => unbudgeted(cx, |cx| self.poll_end(cx)),
        }
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
    use crate::transport::edge::Bounds;

    /// A connection, and the other end of it.
    fn connection() -> (Connection, UnixStream) {
        let edge = Edge::new(Bounds::DEFAULT, None);
        let (here, there) = UnixStream::pair().unwrap();
        let address = socket::PeerAddress::from(std::net::SocketAddr::from(([127, 0, 0, 1], 1)));
        (Newcomer::admit(socket::Stream::Unix(here), address, &edge).unwrap().plain(), there)
    }

    /// Bytes that one poll of a task reads: the task goes on until it is told to wait, as the HTTP/2 library does.
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
