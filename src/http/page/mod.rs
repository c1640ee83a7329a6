//! The page at `/`, and what it asks: files that are in the program, the API's reads as JSON, and a stream of what is new. It changes
//! nothing, and whoever looks may see what the same token may see over gRPC.
//!
//! - `session`: who looks: a token that a browser shows as a cookie, or anybody as gRPC has it;
//! - `api`: the calls that read; [`shared`]: lists that many ask for at once;
//! - `events`: the stream; [`picture`]: what is in it;
//! - [`history`]: the last minutes.

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
    service::{overview::Overviews, tasks::Tasks},
    transport::{
        edge::{Calls, Edge},
        identity::Identity,
        json::Schema,
        observe::Observed,
    },
};

mod api;
mod events;
pub mod history;
pub mod picture;
mod session;
pub mod shared;

/// Everything that the page needs of an instance that serves.
#[derive(Debug)]
pub struct Site {
    /// The calls, as gRPC has them, but for the network.
    pub calls: Observed<Calls>,
    /// Their bounds.
    pub edge: Arc<Edge>,
    /// Who may make them.
    pub identity: Arc<Identity>,
    /// Their messages.
    pub schema: Arc<Schema>,
    /// What is shown.
    pub overviews: Overviews,
    /// The same for all who look.
    pub pictures: picture::Pictures,
    /// What many ask for at once.
    pub answers: shared::Answers,
    /// The last minutes.
    pub history: history::History,
    /// What the page tells of the instance.
    pub about: About,
    /// What goes on for those who look.
    pub tasks: Tasks,
    /// Cancelled when the instance stops.
    pub stopping: CancellationToken,
}

/// What the page tells of the instance.
#[derive(Debug, Clone)]
pub struct About {
    /// Which it is.
    pub instance_id: Uuid,
    /// Where it is called.
    pub grpc: String,
    /// Whether what is said there is encrypted.
    pub tls: bool,
}

/// Where an instance that serves puts what the page needs; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Slot(Arc<ArcSwapOption<Site>>);

impl Slot {
    /// From now on there is a page, until the answer is dropped: what it needs ends then.
    #[must_use]
    pub fn open(&self, site: Site) -> Open {
        self.0.store(Some(Arc::new(site)));
        Open(self.clone())
    }

    fn site(&self) -> Result<Arc<Site>, api::Answer> {
        self.0
            .load_full()
            .ok_or_else(|| api::Answer::new(StatusCode::SERVICE_UNAVAILABLE, "the service is starting, or stopping"))
    }
}

/// That there is a page.
#[derive(Debug)]
pub struct Open(Slot);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.0.store(None);
    }
}

/// The routes of the page.
pub fn routes(slot: Slot) -> Router {
    Router::new()
        .route("/", get(|| async { file(&PAGE) }))
        .route("/page/{name}", get(|Path(name): Path<String>| async move { named(&name) }))
        .route("/login", post(session::sign_in))
        .route("/logout", post(session::sign_out))
        .route("/api/v1/session", get(session::told))
        .route("/api/v1/events", get(events::stream))
        .route("/api/v1/{method}", get(api::read))
        .layer(map_response(guarded))
        .with_state(slot)
}

/// A file, with its media type.
struct File(&'static str, &'static str, &'static str);

static PAGE: File = File("page.html", "text/html; charset=utf-8", include_str!("assets/page.html"));

const SCRIPT: &str = "text/javascript; charset=utf-8";

static FILES: [File; 9] = [
    File("page.css", "text/css; charset=utf-8", include_str!("assets/page.css")),
    File("icon.svg", "image/svg+xml", include_str!("assets/icon.svg")),
    File("page.js", SCRIPT, include_str!("assets/page.js")),
    File("api.js", SCRIPT, include_str!("assets/api.js")),
    File("format.js", SCRIPT, include_str!("assets/format.js")),
    File("cluster.js", SCRIPT, include_str!("assets/cluster.js")),
    File("hosts.js", SCRIPT, include_str!("assets/hosts.js")),
    File("lists.js", SCRIPT, include_str!("assets/lists.js")),
    File("panel.js", SCRIPT, include_str!("assets/panel.js")),
];

fn named(name: &str) -> Response {
    match FILES.iter().find(|file| file.0 == name) {
        Some(found) => file(found),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

/// A browser asks each time: after an upgrade, the files belong together.
fn file(File(_, media_type, text): &File) -> Response {
    ([(header::CONTENT_TYPE, *media_type), (header::CACHE_CONTROL, "no-cache")], *text).into_response()
}

/// Only what comes from here is loaded, run or asked, nobody puts the page into another, and no answer is anything but what it says.
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
