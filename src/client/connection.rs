//! One connection with one instance: how it is made, and how a call goes over it.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Request, Response, header::USER_AGENT};
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream, lookup_host},
    task::JoinHandle,
    time::timeout,
};
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::{Status, body::Body};
use tower_service::Service;

use super::{
    address::{Address, Place},
    pool::Tls,
    retry::Failure,
};

/// How long a connection may take to be made, until the service says over it that it serves.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// How long nothing may be heard before a sign of life is asked for, and how long that may take.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

const AGENT: HeaderValue = HeaderValue::from_static(concat!("linkis-rm/", env!("CARGO_PKG_VERSION")));

/// Makes calls over a connection; clones share it.
#[derive(Clone, Debug)]
pub(super) struct Sender(http2::SendRequest<Body>);

/// A connection that was made.
pub(super) struct Open {
    pub sender: Sender,
    /// Ends when it takes no calls any more. Those under way outlive it.
    pub ended: JoinHandle<hyper::Result<()>>,
}

impl Sender {
    /// Whether it takes no calls any more.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

/// Makes a connection.
pub(super) async fn open(address: &Address, tls: Option<&Tls>) -> io::Result<Open> {
    match &address.place {
        Place::Unix(path) => greet(UnixStream::connect(path).await?).await,
        Place::Tcp { host, port } => {
            let stream = connect(host, *port).await?;
            stream.set_nodelay(true)?;
            if !address.is_tls {
                return greet(stream).await;
            }
            let tls = tls.ok_or_else(|| io::Error::other("there is nothing to encrypt with"))?;
            let name = match &tls.name {
                Some(name) => name.clone(),
                None => ServerName::try_from(host.clone()).map_err(io::Error::other)?,
            };
            let stream = tls.connector.connect(name, stream).await?;
            // Else the two would not speak the same language.
            if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
                return Err(io::Error::other("what answers there speaks no HTTP/2 over TLS"));
            }
            greet(stream).await
        }
    }
}

/// Connects with the first address of a host that answers; each has its part of the time.
async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses: Vec<_> = lookup_host((host, port)).await?.collect();
    let share = CONNECT_TIMEOUT / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, "it does not answer"),
        }
    }
    Err(last)
}

async fn greet(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> io::Result<Open> {
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    Ok(Open { sender: Sender(sender), ended: tokio::spawn(connection) })
}

/// What is behind a status when the way is to blame, and not the service.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
struct Broken {
    /// Whether the call never left, or the other side has said that it does not begin it.
    is_not_begun: bool,
    source: hyper::Error,
}

impl Broken {
    fn new(error: TrySendError<Request<Body>>) -> Self {
        // What comes back was not sent.
        let is_returned = error.message().is_some();
        let source = error.into_error();
        let is_refused = std::error::Error::source(&source)
            .and_then(|cause| cause.downcast_ref::<h2::Error>())
            .is_some_and(is_refusal);
        Self { is_not_begun: is_returned || is_refused, source }
    }
}

/// Whether a stream was not begun: where a connection is closed in order, those behind the last one that is carried out; and those that
/// are refused (RFC 9113, 6.8 and 8.7).
fn is_refusal(error: &h2::Error) -> bool {
    match error.reason() {
        Some(h2::Reason::NO_ERROR) => error.is_go_away() && error.is_remote(),
        Some(h2::Reason::REFUSED_STREAM) => error.is_reset() && error.is_remote(),
        _ => false,
    }
}

/// How a try failed: the service's own words have nothing behind them.
pub(super) fn failure(status: Status) -> Failure {
    let Some(source) = std::error::Error::source(&status) else { return Failure::Answered(status) };
    match source.downcast_ref::<Broken>() {
        Some(broken) if broken.is_not_begun => Failure::NotBegun(status),
        Some(_) => Failure::Lost(status),
        // In the middle of the answer.
        None => Failure::Lost(lost(source.to_string(), None)),
    }
}

fn lost(cause: String, source: Option<Arc<Broken>>) -> Status {
    let mut status = Status::unavailable(format!("the connection broke: {cause}"));
    if let Some(source) = source {
        status.set_source(source);
    }
    status
}

impl Service<Request<Body>> for Sender {
    type Response = Response<Incoming>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        request.headers_mut().insert(USER_AGENT, AGENT);
        let sent = self.0.try_send_request(request);
        Box::pin(async move {
            sent.await.map_err(|error| {
                let broken = Broken::new(error);
                let cause = std::error::Error::source(&broken.source);
                let cause = cause.map_or_else(|| broken.source.to_string(), ToString::to_string);
                lost(cause, Some(Arc::new(broken)))
            })
        })
    }
}
