//! HTTP listener: `/metrics` for Prometheus, `/livez` and `/readyz` for orchestrators and load balancers, and the
//! monitoring [`page`].
//!
//! Metrics and health need no authentication and never read the database, so a response takes no longer during an
//! outage. One connection serves one request within a bounded time ([`connection_lifetime`]), and the number of connections is
//! bounded. Callers that accept it get compressed responses ([`compression`]). A silent or unread connection therefore ends soon. Caller: the server.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::RawQuery,
    http::{StatusCode, header::CONTENT_TYPE},
    middleware::from_fn,
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{AbortHandle, JoinSet},
};
use tokio_util::task::AbortOnDropHandle;
use tower_service::Service as _;

use crate::tls::Tls;
use rm_telemetry::metrics::{self, Metrics};

mod compression;
pub mod connection_lifetime;
pub mod page;

use connection_lifetime::ConnectionLifetime;

/// Maximum number of concurrent connections, without endless ones. A further connection replaces the oldest, which had
/// time enough for its response.
const CONNECTIONS_MAX: usize = 64;

/// Maximum size of the part of a request or response in memory, in bytes.
const BUFFER_MAX: usize = 64 * 1024;

/// Pause after a failure to accept, for example with too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Whether an instance accepts calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Not yet: the instance starts.
    Starting,
    /// Yes.
    Ready,
    /// No: the database is unavailable or takes no writes.
    NoDatabase(String),
    /// No: the instance stops.
    Stopping,
}

/// Serves `listener` until the returned handle is dropped. The page is served while `slot` has one.
pub fn serve(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    metrics: Metrics,
    readiness: watch::Receiver<Readiness>,
    slot: page::PageSlot,
) -> AbortOnDropHandle<()> {
    let router =
        Router::new()
            .route("/livez", get(|RawQuery(query): RawQuery| async move { alive(is_verbose(query.as_deref())) }))
            .route(
                "/readyz",
                get(move |RawQuery(query): RawQuery| async move {
                    ready(&readiness.borrow(), is_verbose(query.as_deref()))
                }),
            )
            .route("/metrics", get(move || async move { scrape(&metrics) }))
            .merge(page::routes(slot))
            .layer(from_fn(compression::compress));
    AbortOnDropHandle::new(tokio::spawn(accept(listener, tls, router)))
}

async fn accept(listener: TcpListener, tls: Option<Arc<Tls>>, router: Router) {
    // Dropping the set ends all connections with the server.
    let mut connections = JoinSet::new();
    let mut oldest_first: VecDeque<(AbortHandle, Arc<ConnectionLifetime>)> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                while connections.try_join_next().is_some() {}
                oldest_first.retain(|(connection, visit)| !connection.is_finished() && !visit.lasts());
                if oldest_first.len() >= CONNECTIONS_MAX
                    && let Some((oldest, _)) = oldest_first.pop_front()
                {
                    oldest.abort();
                }
                let visit = Arc::new(ConnectionLifetime::new(peer, tls.is_some()));
                let connection = connections.spawn(serve_one(stream, visit.clone(), tls.clone(), router.clone()));
                oldest_first.push_back((connection, visit));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection for HTTP");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_one(stream: TcpStream, visit: Arc<ConnectionLifetime>, tls: Option<Arc<Tls>>, router: Router) {
    let peer = visit.peer;
    let served = async {
        match tls {
            Some(tls) => match tls.http(stream, Some(peer.ip())).await {
                Ok(stream) => serve_http(stream, &visit, router).await,
                Err(error) => tracing::debug!(%peer, %error, "a TLS handshake for HTTP failed"),
            },
            None => serve_http(stream, &visit, router).await,
        }
    };
    tokio::select! {
        () = served => {}
        () = visit.over() => tracing::debug!(%peer, "a connection for HTTP took too long"),
    }
}

async fn serve_http(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    visit: &Arc<ConnectionLifetime>,
    router: Router,
) {
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(visit.clone());
        router.clone().call(request)
    });
    let mut http = http1::Builder::new();
    http.keep_alive(false).max_buf_size(BUFFER_MAX);
    if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(peer = %visit.peer, %error, "a connection for HTTP broke");
    }
}

/// Returns true if the query has `verbose`, with any value.
fn is_verbose(query: Option<&str>) -> bool {
    let mut fields = query.unwrap_or_default().split('&');
    fields.any(|field| field == "verbose" || field.starts_with("verbose="))
}

fn alive(is_verbose: bool) -> &'static str {
    if is_verbose { "[+]process ok\nalive\n" } else { "alive\n" }
}

fn ready(readiness: &Readiness, is_verbose: bool) -> (StatusCode, String) {
    let (code, answer) = match readiness {
        Readiness::Ready => (StatusCode::OK, "ready".to_owned()),
        Readiness::Starting => (StatusCode::SERVICE_UNAVAILABLE, "not ready: starting".to_owned()),
        Readiness::NoDatabase(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}")),
        Readiness::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "not ready: stopping".to_owned()),
    };
    // During start and stop the database is not checked.
    let checks = match readiness {
        Readiness::Ready => "[+]started ok\n[+]database ok\n[+]serving ok\n".to_owned(),
        Readiness::Starting => "[-]started not yet\n[-]serving not yet\n".to_owned(),
        Readiness::NoDatabase(why) => {
            let why = why.strip_prefix("the database ").unwrap_or(why);
            format!("[+]started ok\n[-]database {why}\n[+]serving ok\n")
        }
        Readiness::Stopping => "[+]started ok\n[-]serving stopping\n".to_owned(),
    };
    (code, format!("{}{answer}\n", if is_verbose { checks.as_str() } else { "" }))
}

fn scrape(metrics: &Metrics) -> Response {
    match metrics.text() {
        Ok(text) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "the metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
