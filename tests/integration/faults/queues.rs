//! An external cluster that is sometimes slow or unavailable. It never shows granted amounts, so that all of them count.

use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use rm_model::{
    principal::Principal,
    provider::Provider,
    resource::{Dimension, LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
};
use rm_store::{external_refresh, external_resource_provider};
use serde_json::{Value, json};
use sqlx::Connection as _;
use std::{
    env,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::net::TcpListener;
use uuid::Uuid;

use super::{cluster::Cluster, random::Random};
use crate::harness::name;

/// Cores and gigabytes of each queue, too few for all requests.
const QUEUES: [(&str, i64); 2] = [("narrow", 7), ("wide", 25)];
const ROOT: i64 = 29;

/// One in this number of fetches fails, and the delay of another one.
const AWAY_PERCENT: i64 = 15;
const SLOW_PERCENT: i64 = 15;
const SLOW: Duration = Duration::from_millis(1500);

async fn answer(State(random): State<Arc<Mutex<Random>>>, Path(what): Path<String>) -> Response {
    let chance = random.lock().unwrap().between(0, 99);
    if chance < AWAY_PERCENT {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    if chance < AWAY_PERCENT + SLOW_PERCENT {
        tokio::time::sleep(SLOW).await;
    }
    let queue = |path: &str, max: i64, children: Vec<Value>| {
        json!({"queueName": path, "maxResources": {"memory": max << 10, "vCores": max},
            "usedResources": {"memory": 0, "vCores": 0}, "childQueues": {"queue": children}})
    };
    let children = QUEUES.map(|(name, max)| queue(&format!("root.{name}"), max, vec![])).into();
    let root = queue("root", ROOT, children);
    let body = match what.as_str() {
        "scheduler" => json!({"scheduler": {"schedulerInfo": {"type": "fairScheduler", "rootQueue": root}}}),
        _ => json!({"apps": null}),
    };
    body.to_string().into_response()
}

/// Whether the run has external queues. An earlier release does not count them.
pub fn are_kept() -> bool {
    env::var("LINKIS_RM_FAULTS_OTHER").is_err()
}

/// Starts the cluster, and creates the provider by which requests in its queues are decided.
pub async fn start(cluster: &Cluster, random: Random) {
    if !are_kept() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().route("/ws/v1/cluster/{what}", get(answer)).with_state(Arc::new(Mutex::new(random)));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(router.clone());
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    let provider =
        Provider { resource_type: name("Yarn"), name: name("default"), labels: rm_model::name::Labels::default() };
    let config = json!({"rmWebAddress": address, "refreshInterval": "500ms", "maxAge": "5s", "whenDown": "last_known"});
    let read = rm_external::read("Yarn", &config.to_string(), None).unwrap();
    let (etag, mut connection) = (Uuid::new_v4(), cluster.connect().await.unwrap());
    let mut transaction = connection.begin().await.unwrap();
    external_resource_provider::lock(&mut transaction).await.unwrap();
    let by = Principal::Anonymous;
    external_resource_provider::upsert(&mut transaction, &provider, &read.stored(), etag, &by).await.unwrap();
    external_refresh::put(&mut transaction, &provider, etag, &read.rules()).await.unwrap();
    transaction.commit().await.unwrap();
}

/// Returns a resource with equal amounts of an EM and of one queue.
pub fn in_queue(random: &mut Random, memory: i64, cores: i64) -> Resource {
    of_queue(random.pick(QUEUES.map(|(name, _)| name)), memory, cores, "")
}

fn of_queue(queue: &str, memory: i64, cores: i64, application_id: &str) -> Resource {
    const GB: i64 = 1 << 30;
    let driver = LoadInstanceAmounts { memory: memory * GB, cores, instances: 1 };
    let queue_name = queue.to_owned();
    let (queue_memory, application_id) = (memory * GB, application_id.to_owned());
    let yarn = YarnAmounts { queue_memory, queue_cores: cores, queue_name, application_id, ..YarnAmounts::default() };
    Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn)).unwrap()
}

/// Returns the alternative queues of a request, if it has several.
pub fn names(random: &mut Random, resource: &Resource) -> Vec<String> {
    match resource.queue_name() {
        Some(name) if random.percent(50) => {
            let other = QUEUES.into_iter().map(|(name, _)| name).find(|other| *other != name);
            [name].into_iter().chain(other).map(str::to_owned).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the use of a granted resource: in the queue as much as on the EM, perhaps with an application id. The resource does not name
/// which of several queues was granted.
pub fn use_of(granted: &Resource, queue: Option<&str>, used: Resource, application_id: &str) -> Resource {
    match granted.queue_name() {
        None => used,
        Some(name) => {
            let get = |dimension| used.get(&dimension);
            of_queue(queue.unwrap_or(name), get(Dimension::Memory) >> 30, get(Dimension::Cores), application_id)
        }
    }
}
