//! Fake YARN cluster of a chapter: replies with the queues and applications of its present state, one of [`STATES`].
//!
//! Its port differs between runs. Requests and arguments of the journal therefore name [`ADDRESS`]; `ids` and `run` replace it.
//! Callers: `run`, which starts it, and `generate`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Address of the cluster in requests and arguments of the journal.
pub const ADDRESS: &str = "127.0.0.1:8088";

/// Number of states.
pub const STATES: u64 = 4;

/// Number of applications; each state shows a third of them.
pub const APPLICATIONS: u64 = 16;

/// Paths of the queues, each after its parent, and their maximum in GB and cores.
const QUEUES: &[(&str, u64)] = &[
    ("root", 60),
    ("root.a", 24),
    ("root.a.x", 12),
    ("root.a.y", 16),
    ("root.b", 18),
    ("root.c", 20),
    ("root.c.x", 10),
];

pub struct Cluster {
    pub address: String,
    state: Arc<AtomicU64>,
}

impl Cluster {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, state) = (listener.local_addr().unwrap().to_string(), Arc::<AtomicU64>::default());
        let shown = state.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(reply(stream, shown.clone()));
            }
        });
        Self { address, state }
    }

    /// Changes the state.
    pub fn show(&self, state: u64) {
        self.state.store(state, Ordering::SeqCst);
    }
}

/// Replies to one request, and closes the connection.
async fn reply(mut stream: TcpStream, state: Arc<AtomicU64>) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let state = state.load(Ordering::SeqCst);
    let body = if head.starts_with(b"GET /ws/v1/cluster/scheduler") {
        json!({"scheduler": {"schedulerInfo": {"type": "fairScheduler", "rootQueue": queue(state, QUEUES[0])}}})
    } else {
        json!({"apps": {"app": applications(state).map(|(number, queue, gb)| json!({
            "id": application_id(number), "user": "hadoop", "queue": queue, "name": "engine", "state": "RUNNING",
            "allocatedMB": gb * 1024, "allocatedVCores": gb, "startedTime": 1})).collect::<Vec<_>>()}})
    };
    let body = body.to_string();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length:";
    stream.write_all(format!("{head} {}\r\n\r\n{body}", body.len()).as_bytes()).await.ok()
}

pub fn application_id(number: u64) -> String {
    format!("application_1_{number:04}")
}

/// Returns the applications that a state shows: number, queue, and use in GB and cores.
fn applications(state: u64) -> impl Iterator<Item = (u64, &'static str, u64)> {
    let queue_of = |number: u64| ["root.a.x", "root.a.y", "root.b", "root.c.x"][(number % 4) as usize];
    (0..APPLICATIONS)
        .filter(move |number| (number + state).is_multiple_of(3))
        .map(move |number| (number, queue_of(number), 1 + number % 3))
}

fn queue(state: u64, (path, max): (&str, u64)) -> Value {
    let amounts = |gb: u64| json!({"memory": gb * 1024, "vCores": gb});
    let is_in = |queue: &str| queue == path || queue.starts_with(&format!("{path}."));
    let used: u64 = applications(state).filter(|(_, queue, _)| is_in(queue)).map(|(_, _, gb)| gb).sum();
    let is_child = |child: &str| child.rsplit_once('.').is_some_and(|(parent, _)| parent == path);
    let children: Vec<Value> =
        QUEUES.iter().filter(|(child, _)| is_child(child)).map(|child| queue(state, *child)).collect();
    let is_stopped = path == "root.c" && state == 1;
    json!({"queueName": path, "maxResources": amounts(max), "usedResources": amounts(used),
        "state": if is_stopped { "STOPPED" } else { "RUNNING" }, "childQueues": {"queue": children}})
}
