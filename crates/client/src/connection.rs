//! One HTTP/2 connection to an instance: its setup, and the calls over it.
//!
//! Failures are classified: not begun, lost, or replied by the service. A call that was not begun is safe on another
//! connection.
//! Never: repeats a call.
//! Callers: `pool` opens connections; `call`, `follow` and `health` use them.

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
    address::{Endpoint, InstanceAddress},
    pool::PoolTls,
    retry::AttemptFailure,
};

/// Timeout of the connection setup, including the first health reply.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Interval without received data before a keep-alive ping, and timeout of its reply.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

const AGENT: HeaderValue = HeaderValue::from_static(concat!("linkis-rm/", env!("CARGO_PKG_VERSION")));

/// Sends calls over a connection. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Sender(http2::SendRequest<Body>);

/// An established connection.
pub(super) struct OpenConnection {
    pub sender: Sender,
    /// Ends when the connection accepts no further calls. Calls in progress outlive it.
    pub ended: JoinHandle<hyper::Result<()>>,
}

impl Sender {
    /// Returns whether the connection accepts no further calls.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

pub(super) async fn open(address: &InstanceAddress, tls: Option<&PoolTls>) -> io::Result<OpenConnection> {
    match &address.place {
        Endpoint::Unix(path) => greet(UnixStream::connect(path).await?).await,
        Endpoint::Tcp { host, port } => {
            let stream = connect(host, *port).await?;
            stream.set_nodelay(true)?;
            if !address.is_tls {
                return greet(stream).await;
            }
            let tls = tls.ok_or_else(|| io::Error::other("the address needs TLS, but the settings have none"))?;
            let name = match &tls.name {
                Some(name) => name.clone(),
                None => ServerName::try_from(host.clone()).map_err(io::Error::other)?,
            };
            let stream = tls.connector.connect(name, stream).await?;
            // Without HTTP/2 on both sides, no call would succeed.
            if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
                return Err(io::Error::other("the server does not offer HTTP/2 over TLS"));
            }
            greet(stream).await
        }
    }
}

/// Connects to the first reachable address of a host name. All addresses share the timeout equally.
async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses: Vec<_> = lookup_host((host, port)).await?.collect();
    let share = CONNECT_TIMEOUT / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, "no reply"),
        }
    }
    Err(last)
}

async fn greet(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> io::Result<OpenConnection> {
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    Ok(OpenConnection { sender: Sender(sender), ended: tokio::spawn(connection) })
}

/// Source of a status that the connection caused, not the service.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
struct ConnectionFailure {
    /// Whether the call was never sent, or the peer refused to begin it.
    is_not_begun: bool,
    source: hyper::Error,
}

impl ConnectionFailure {
    fn new(error: TrySendError<Request<Body>>) -> Self {
        // A returned request was not sent.
        let is_returned = error.message().is_some();
        let source = error.into_error();
        let is_refused = std::error::Error::source(&source)
            .and_then(|cause| cause.downcast_ref::<h2::Error>())
            .is_some_and(is_refusal);
        Self { is_not_begun: is_returned || is_refused, source }
    }
}

/// Returns whether the peer refused a stream: one after the last processed stream of a closing connection, or a refused one
/// (RFC 9113, 6.8 and 8.7).
fn is_refusal(error: &h2::Error) -> bool {
    match error.reason() {
        Some(h2::Reason::NO_ERROR) => error.is_go_away() && error.is_remote(),
        Some(h2::Reason::REFUSED_STREAM) => error.is_reset() && error.is_remote(),
        _ => false,
    }
}

/// Classifies a failed attempt. A status from the service itself has no source.
pub(super) fn failure(status: Status) -> AttemptFailure {
    let Some(source) = std::error::Error::source(&status) else { return AttemptFailure::Answered(status) };
    match source.downcast_ref::<ConnectionFailure>() {
        Some(broken) if broken.is_not_begun => AttemptFailure::NotBegun(status),
        Some(_) => AttemptFailure::Lost(status),
        // The connection broke during the reply.
        None => AttemptFailure::Lost(lost(source.to_string(), None)),
    }
}

fn lost(cause: String, source: Option<Arc<ConnectionFailure>>) -> Status {
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
                let broken = ConnectionFailure::new(error);
                let cause = std::error::Error::source(&broken.source);
                let cause = cause.map_or_else(|| broken.source.to_string(), ToString::to_string);
                lost(cause, Some(Arc::new(broken)))
            })
        })
    }
}
