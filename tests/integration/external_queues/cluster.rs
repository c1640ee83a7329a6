//! Fake ResourceManager with the queues and applications that a test sets.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use rm_model::queue::is_in;
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// A queue of the cluster: path, maximum, use by others (both in GB and as many cores), and state.
pub(super) type QueueOf = (&'static str, i64, i64, &'static str);

/// State of the fake cluster.
#[derive(Clone, Default)]
pub(super) struct Shown {
    pub(super) queues: Vec<QueueOf>,
    /// Applications: id, queue, GB.
    pub(super) applications: Vec<(String, &'static str, i64)>,
    pub(super) is_away: bool,
    /// Number of additional bytes in the reply for each queue.
    pub(super) padding: usize,
}

/// The state changes between two snapshots, and not within one.
pub(super) struct Cluster {
    address: String,
    next: Arc<Mutex<Shown>>,
    pub(super) asked: Arc<AtomicUsize>,
}

#[derive(Clone)]
struct Serving {
    next: Arc<Mutex<Shown>>,
    now: Arc<Mutex<Shown>>,
    /// The path of the last call.
    last: Arc<Mutex<String>>,
    asked: Arc<AtomicUsize>,
}

impl Shown {
    fn used(&self, queue: &str) -> i64 {
        let others = self.queues.iter().filter(|(path, ..)| is_in(path, queue)).map(|(.., used, _)| used).sum::<i64>();
        others + self.applications.iter().filter(|(_, path, _)| is_in(path, queue)).map(|(.., gb)| gb).sum::<i64>()
    }

    fn queue(&self, (path, max, _, state): &QueueOf) -> Value {
        let amounts = |gb: i64| json!({"memory": gb * 1024, "vCores": gb});
        let children: Vec<Value> = (self.queues.iter())
            .filter(|(other, ..)| other.rsplit_once('.').is_some_and(|(above, _)| above == *path))
            .map(|queue| self.queue(queue))
            .collect();
        json!({"queueName": path, "maxResources": amounts(*max), "usedResources": amounts(self.used(path)), "state": state,
            "childQueues": {"queue": children}, "remark": "x".repeat(self.padding)})
    }

    fn scheduler(&self) -> String {
        json!({"scheduler": {"schedulerInfo": {"type": "fairScheduler", "rootQueue": self.queue(&self.queues[0])}}})
            .to_string()
    }

    fn apps(&self) -> String {
        let app = |(id, queue, gb): &(String, &str, i64)| {
            json!({"id": id, "user": "hadoop", "queue": queue, "name": "engine", "state": "RUNNING",
                "allocatedMB": gb * 1024, "allocatedVCores": gb, "startedTime": 1})
        };
        json!({"apps": {"app": self.applications.iter().map(app).collect::<Vec<_>>()}}).to_string()
    }
}

async fn answer(State(serving): State<Serving>, Path(what): Path<String>) -> Response {
    serving.asked.fetch_add(1, Ordering::SeqCst);
    // A fetch reads applications, queues, applications: all three show one state.
    let last = std::mem::replace(&mut *serving.last.lock().unwrap(), what.clone());
    if what == "apps" && last != "scheduler" {
        let next = serving.next.lock().unwrap().clone();
        *serving.now.lock().unwrap() = next;
    }
    let shown = serving.now.lock().unwrap().clone();
    if serving.next.lock().unwrap().is_away {
        serving.last.lock().unwrap().clear();
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    match what.as_str() {
        "scheduler" => shown.scheduler().into_response(),
        "apps" => shown.apps().into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

impl Cluster {
    pub(super) async fn start(queues: &[QueueOf]) -> Self {
        let shown = Shown { queues: queues.to_vec(), ..Shown::default() };
        let next = Arc::new(Mutex::new(shown));
        let asked = Arc::<AtomicUsize>::default();
        let serving = Serving { next: next.clone(), now: Arc::default(), last: Arc::default(), asked: asked.clone() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().route("/ws/v1/cluster/{what}", get(answer)).with_state(serving);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = TowerToHyperService::new(router.clone());
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { address, next, asked }
    }

    pub(super) fn show(&self, change: impl FnOnce(&mut Shown)) {
        change(&mut self.next.lock().unwrap());
    }

    pub(super) fn config(&self, more: &str) -> String {
        format!(
            r#"{{"rmWebAddress": "{}", "authorEnable": false, "refreshInterval": "200ms", "maxAge": "20s"{more}}}"#,
            self.address
        )
    }
}
