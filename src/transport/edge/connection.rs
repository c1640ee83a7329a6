//! One connection: it has to greet in time; while there is a crowd, it has to be told in time who calls; and it ends when the server stops,
//! or the certificate of its caller is over, and nobody has a call under way on it.

use std::{
    io,
    pin::Pin,
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
    time::{Instant, Sleep, sleep, sleep_until, timeout_at},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use crate::{
    domain::{access::Unauthenticated, principal::Principal},
    service::tokens::{Caller, Ended},
    tls::{self, Tls},
};

use super::{Edge, HEALTH_CALLS_MAX, share::Share, socket, stream::Stream};

/// What an HTTP/2 client says first.
const GREETING_BYTES: usize = 24;

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
    _place: Place,
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

    /// Counts what is written.
    fn has_written(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = polled {
            self.written = self.written.saturating_add(bytes);
        }
        self.or_end(cx, polled)
    }

    /// Nothing waits longer for one who does not read than for one who says nothing.
    fn or_end<T>(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match polled {
            Poll::Ready(_) => polled,
            Poll::Pending => self.poll_end(cx).map(|_| Err(io::ErrorKind::TimedOut.into())),
        }
    }
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
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buffer) {
            self.has_read(buffer.filled().len() - before);
            return Poll::Ready(read);
        }
        self.poll_end(cx)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.has_written(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.has_written(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.or_end(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
