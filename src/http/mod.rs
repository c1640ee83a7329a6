//! What people's tools ask over HTTP, on a listener of its own: `/metrics` for Prometheus, `/livez` and `/readyz` for whoever keeps
//! instances running or sends them calls.
//!
//! Nobody is asked who they are, and nothing asks the database: an answer takes no longer when it is away.
//! One connection is one request, within a time that is bounded, and only so many are served at once; so whoever connects and
//! says nothing, or does not read, is soon rid of.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::RawQuery,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{AbortHandle, JoinSet},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    metrics::{self, Metrics},
    tls::Tls,
};

/// How many connections are served at once; one more takes the place of the oldest, which has had its time: an answer takes none.
const CONNECTIONS_MAX: usize = 64;

/// How long a connection may take, with its one request and the answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// How many bytes of a request, or of an answer, are kept in memory before the other side has to go on.
const BUFFER_MAX: usize = 64 * 1024;

/// How long to wait before accepting again, if that failed: there may be too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Whether calls may be sent to an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Not yet: it is being put together.
    Starting,
    /// Yes.
    Ready,
    /// Not while its database is away.
    NoDatabase,
    /// Not any more.
    Stopping,
}

/// Serves `listener` until the answer is dropped.
pub fn serve(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    metrics: Metrics,
    readiness: watch::Receiver<Readiness>,
) -> AbortOnDropHandle<()> {
    let router =
        Router::new()
            .route("/livez", get(|RawQuery(query): RawQuery| async move { alive(is_verbose(query.as_deref())) }))
            .route(
                "/readyz",
                get(move |RawQuery(query): RawQuery| async move {
                    ready(*readiness.borrow(), is_verbose(query.as_deref()))
                }),
            )
            .route("/metrics", get(move || async move { scrape(&metrics) }));
    AbortOnDropHandle::new(tokio::spawn(accept(listener, tls, router)))
}

async fn accept(listener: TcpListener, tls: Option<Arc<Tls>>, router: Router) {
    // With them, whoever is connected goes when the server does.
    let mut connections = JoinSet::new();
    let mut oldest_first: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                while connections.try_join_next().is_some() {}
                oldest_first.retain(|connection| !connection.is_finished());
                if oldest_first.len() >= CONNECTIONS_MAX
                    && let Some(oldest) = oldest_first.pop_front()
                {
                    oldest.abort();
                }
                let service = TowerToHyperService::new(router.clone());
                oldest_first.push_back(connections.spawn(serve_one(stream, peer, tls.clone(), service)));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection for metrics and health");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_one(stream: TcpStream, peer: SocketAddr, tls: Option<Arc<Tls>>, service: TowerToHyperService<Router>) {
    let served = async {
        match tls {
            Some(tls) => match tls.http(stream, Some(peer.ip())).await {
                Ok(stream) => serve_http(stream, peer, service).await,
                Err(error) => tracing::debug!(%peer, %error, "a TLS handshake for metrics and health failed"),
            },
            None => serve_http(stream, peer, service).await,
        }
    };
    if tokio::time::timeout(CONNECTION_TIMEOUT, served).await.is_err() {
        tracing::debug!(%peer, "a connection for metrics and health took too long");
    }
}

async fn serve_http(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: SocketAddr,
    service: TowerToHyperService<Router>,
) {
    let mut http = http1::Builder::new();
    http.keep_alive(false).max_buf_size(BUFFER_MAX);
    if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%peer, %error, "a connection for metrics and health broke");
    }
}

/// Whether `?verbose` was asked for, whatever its value.
fn is_verbose(query: Option<&str>) -> bool {
    let mut fields = query.unwrap_or_default().split('&');
    fields.any(|field| field == "verbose" || field.starts_with("verbose="))
}

fn alive(is_verbose: bool) -> &'static str {
    if is_verbose { "[+]process ok\nalive\n" } else { "alive\n" }
}

fn ready(readiness: Readiness, is_verbose: bool) -> (StatusCode, String) {
    let (code, answer) = match readiness {
        Readiness::Ready => (StatusCode::OK, "ready"),
        Readiness::Starting => (StatusCode::SERVICE_UNAVAILABLE, "not ready: starting"),
        Readiness::NoDatabase => (StatusCode::SERVICE_UNAVAILABLE, "not ready: the database does not answer"),
        Readiness::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "not ready: stopping"),
    };
    // While it starts or stops, nobody looks whether the database answers.
    let checks = match readiness {
        Readiness::Ready => "[+]started ok\n[+]database ok\n[+]serving ok\n",
        Readiness::Starting => "[-]started not yet\n[-]serving not yet\n",
        Readiness::NoDatabase => "[+]started ok\n[-]database does not answer\n[+]serving ok\n",
        Readiness::Stopping => "[+]started ok\n[-]serving stopping\n",
    };
    (code, format!("{}{answer}\n", if is_verbose { checks } else { "" }))
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
