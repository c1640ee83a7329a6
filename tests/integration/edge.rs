//! What callers can do to a server without a single valid call: it stays small, serves the others, and stops when it is told to.

use std::time::{Duration, Instant};

use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderMap, Request};
use tokio::{net::TcpStream, task::JoinSet};
use tonic::codegen::Bytes;

use crate::harness::*;

const MB: usize = 1 << 20;

/// A connection that speaks HTTP/2 and nothing else.
struct Raw {
    requests: SendRequest<Bytes>,
    address: String,
}

impl Raw {
    async fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address.strip_prefix("http://").unwrap()).await.unwrap();
        let (requests, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        Self { requests, address: address.to_owned() }
    }

    /// Begins a call; answers with what is to be awaited, and where its body goes.
    async fn call(&self, method: &str) -> (ResponseFuture, h2::SendStream<Bytes>) {
        let uri = format!("{}/linkis.rm.v1.{method}", self.address);
        let call = Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
        let mut ready = self.requests.clone().ready().await.unwrap();
        ready.send_request(call.body(()).unwrap(), false).unwrap()
    }
}

/// The beginning of a message of `length` bytes.
fn message_prefix(length: usize) -> Vec<u8> {
    [&[0], u32::try_from(length).unwrap().to_be_bytes().as_slice()].concat()
}

/// Sends `body` as the server takes it; false if it does not want it all.
async fn send(stream: &mut h2::SendStream<Bytes>, mut body: Bytes) -> bool {
    while !body.is_empty() {
        stream.reserve_capacity(body.len());
        let Some(Ok(capacity)) = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await else { return false };
        if stream.send_data(body.split_to(capacity.min(body.len())), false).is_err() {
            return false;
        }
    }
    true
}

/// Sends heartbeats of which the last byte is missing, all over one connection, until they are refused or stand still. Answers how
/// many were refused, and how.
async fn half_sent(raw: &Raw, count: usize, length: usize) -> (JoinSet<Option<HeaderMap>>, usize) {
    let mut calls = JoinSet::new();
    for _ in 0..count {
        let (answer, mut stream) = raw.call("ResourceManagerService/Heartbeat").await;
        calls.spawn(async move {
            let mut body = message_prefix(length);
            body.resize(length + 4, 0);
            send(&mut stream, body.into()).await;
            let answered = answer.await.ok().map(|answer| answer.headers().clone());
            drop(stream);
            answered
        });
    }
    (calls, length)
}

/// 400 heartbeats without their last bytes, on one connection, take at most 64 MB; they are refused with a reason, and the others
/// are served meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_sent_heartbeats_take_little_memory() {
    let database = Database::fresh().await;
    let process = Process::start(&["--database-url", &database.url()]);
    let host = em("host1");
    process.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    let idle = process.memory();
    let raw = Raw::connect(&process.address).await;
    let (mut calls, _) = half_sent(&raw, 400, 1_600_000).await;
    let (mut most, mut refused, start) = (idle, 0, Instant::now());
    while start.elapsed() < Duration::from_secs(4) {
        let grant = process.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
        process.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        while let Ok(Some(answer)) = tokio::time::timeout(Duration::from_millis(20), calls.join_next()).await {
            let headers = answer.unwrap().expect("a status");
            assert_eq!(headers["grpc-status"], "8", "{headers:?}");
            refused += 1;
        }
        most = most.max(process.memory());
    }
    println!("idle {} MB, most {} MB, refused {refused}", idle / MB, most / MB);
    assert!(most - idle <= 64 * MB, "{} MB above idle", (most - idle) / MB);
    assert!((300..400).contains(&refused), "{refused} were refused");
}
