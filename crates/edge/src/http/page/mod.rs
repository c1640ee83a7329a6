//! Monitoring page at `/`: static files of the program, the API's reads as JSON, and an event stream.
//!
//! Never: changes anything; shows a viewer more than gRPC shows for the same token. Caller: the HTTP listener.
//!
//! - `session`: credentials of a viewer: a token in a cookie, or the header of gRPC;
//! - `api`: reading calls; [`reply_cache`]: lists that many viewers request together;
//! - `events`: the event stream; [`snapshot`]: its content; [`history`]: the last minutes.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use axum::{
    Router,
    extract::Path,
    http::{HeaderValue, StatusCode, header},
    middleware::map_response,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    authenticator::Authenticator,
    edge::{Edge, EdgeService},
    json::ReadCalls,
    observe::ObservedService,
};
use rm_service::{overview::OverviewService, tasks::InstanceTasks};

mod api;
mod events;
pub mod history;
pub mod reply_cache;
mod session;
pub mod snapshot;

/// Services that the page uses while an instance serves.
#[derive(Debug)]
pub struct PageServices {
    /// The calls of gRPC, within the process.
    pub calls: ObservedService<EdgeService>,
    /// Bounds of the calls.
    pub edge: Arc<Edge>,
    /// Authenticator of the viewers.
    pub identity: Arc<Authenticator>,
    /// Messages of the calls.
    pub schema: Arc<ReadCalls>,
    /// Overviews of the cluster.
    pub overviews: OverviewService,
    /// Snapshots for the event streams, shared by all viewers.
    pub pictures: snapshot::PageSnapshots,
    /// Lists that many viewers request together.
    pub answers: reply_cache::ReplyCache,
    /// Figures of the last minutes.
    pub history: history::MetricHistory,
    /// Data of the instance.
    pub about: InstanceInfo,
    /// Runs the event streams.
    pub tasks: InstanceTasks,
    /// Cancelled when the instance stops.
    pub stopping: CancellationToken,
}

/// Data of the instance on the page.
#[derive(Debug, Clone)]
pub struct InstanceInfo {
    /// Identifier of the instance.
    pub instance_id: Uuid,
    /// Address for gRPC.
    pub grpc: String,
    /// Whether gRPC connections use TLS.
    pub tls: bool,
}

/// Holder of the page's services; clones share it.
#[derive(Debug, Clone, Default)]
pub struct PageSlot(Arc<ArcSwapOption<PageServices>>);

impl PageSlot {
    /// Opens the page. The page closes when the returned guard is dropped.
    #[must_use]
    pub fn open(&self, site: PageServices) -> PageGuard {
        self.0.store(Some(Arc::new(site)));
        PageGuard(self.clone())
    }

    fn site(&self) -> Result<Arc<PageServices>, api::ApiErrorReply> {
        self.0.load_full().ok_or_else(|| {
            api::ApiErrorReply::new(StatusCode::SERVICE_UNAVAILABLE, "the service is starting, or stopping")
        })
    }
}

/// Keeps the page open until it is dropped.
#[derive(Debug)]
pub struct PageGuard(PageSlot);

impl Drop for PageGuard {
    fn drop(&mut self) {
        self.0.0.store(None);
    }
}

/// Returns the routes of the page.
pub fn routes(slot: PageSlot) -> Router {
    Router::new()
        .route("/", get(|| async { named("page.html") }))
        .route("/page/{name}", get(|Path(name): Path<String>| async move { named(&name) }))
        .route("/login", post(session::sign_in))
        .route("/logout", post(session::sign_out))
        .route("/api/v1/session", get(session::status))
        .route("/api/v1/events", get(events::stream))
        .route("/api/v1/{method}", get(api::read))
        .layer(map_response(guarded))
        .with_state(slot)
}

/// Static file: name, media type and content.
struct StaticFile(&'static str, &'static str, &'static str);

/// Files of one media type, by their names in `assets`.
macro_rules! files {
    ($media_type:expr, $($name:literal),+) => {
        &[$(StaticFile($name, $media_type, include_str!(concat!("assets/", $name)))),+]
    };
}

static PAGE: &[StaticFile] = files!("text/html; charset=utf-8", "page.html");
static STYLE: &[StaticFile] = files!("text/css; charset=utf-8", "page.css");
static ICON: &[StaticFile] = files!("image/svg+xml", "icon.svg");
static SCRIPTS: &[StaticFile] = files! {
    "text/javascript; charset=utf-8",
    "address.js", "api.js", "capacity.js", "cells.js", "cluster.js", "elements.js", "em_panel.js", "format.js",
    "keys.js", "limit_panel.js", "list.js", "lists.js", "live.js", "map.js", "overview.js", "page.js", "panels.js",
    "queue_panel.js", "queues.js", "router.js", "search.js", "ticket_panel.js", "user_panel.js", "users.js"
};

fn named(name: &str) -> Response {
    match [PAGE, STYLE, ICON, SCRIPTS].into_iter().flatten().find(|file| file.0 == name) {
        Some(found) => file(found),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

/// Returns a file. A browser revalidates it each time, so that all files belong to one release after an upgrade.
fn file(StaticFile(_, media_type, text): &StaticFile) -> Response {
    ([(header::CONTENT_TYPE, *media_type), (header::CACHE_CONTROL, "no-cache")], *text).into_response()
}

/// Headers of every response: content only from this origin, no embedding in other pages, and no guessed media types.
const GUARDS: [(header::HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri \
         'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (header::HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

async fn guarded(mut answer: Response) -> Response {
    for (name, value) in GUARDS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}
