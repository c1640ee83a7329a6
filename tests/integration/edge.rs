//! The edge: bounded memory, connections and logs for any input.

use std::{
    future::poll_fn,
    process::Command,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderMap, Request};
use rm_client::{ClientError, ResourceRequest, ResultResource};
use rm_model::{operation::ReleaseTicket, report::EmReport};
use rm_proto::v1::{ListEmsRequest, usage_service_client::UsageServiceClient};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
};
use tonic::{Code, Streaming, codegen::Bytes, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, ServerReflectionResponse, server_reflection_client::ServerReflectionClient,
};
use uuid::Uuid;

use crate::harness::*;

mod crowds;
mod floods;
mod protocol;
mod request_bodies;
mod shutdown;
mod statuses;
mod unauthenticated;

const MB: usize = 1 << 20;

/// A server in its own process with other settings, and its log lines.
fn server(database: &Database, settings: &[(&str, &str)]) -> (Process, Arc<Mutex<Vec<String>>>) {
    let log = Arc::new(Mutex::new(vec![]));
    let mut command = Command::new(*PROGRAM);
    let settings = settings.iter().map(|(name, value)| (format!("LINKIS_RM_{name}"), value));
    command.args(["--database-url", &database.url()]).envs(settings);
    let keep = log.clone();
    (Process::start_command(&mut command, move |line| keep.lock().unwrap().push(line)), log)
}

fn lines(log: &Mutex<Vec<String>>, what: &str) -> Vec<String> {
    log.lock().unwrap().iter().filter(|line| line.contains(what)).cloned().collect()
}

/// Maximum number of log lines about one event since then.
pub fn lines_max(since: Instant) -> usize {
    20 * (1 + since.elapsed().as_secs() as usize / 10)
}

/// A bare TCP connection.
async fn tcp(address: &str) -> TcpStream {
    TcpStream::connect(address.strip_prefix("http://").unwrap()).await.unwrap()
}

/// Whether the server ends a connection within `longest`.
async fn is_ended(stream: &mut TcpStream, longest: Duration) -> bool {
    let read = async { while stream.read(&mut [0; 1024]).await.is_ok_and(|bytes| bytes > 0) {} };
    tokio::time::timeout(longest, read).await.is_ok()
}

/// An HTTP/2 connection without a gRPC client.
struct Raw {
    requests: SendRequest<Bytes>,
    address: String,
}

impl Raw {
    async fn connect(address: &str) -> Self {
        Self::connect_with(address, &h2::client::Builder::new()).await
    }

    async fn connect_with(address: &str, builder: &h2::client::Builder) -> Self {
        let (requests, connection) = builder.handshake(tcp(address).await).await.unwrap();
        tokio::spawn(connection);
        Self { requests, address: address.to_owned() }
    }

    /// Begins a call. Returns the future of its response, and the sender of its body.
    async fn call(&self, method: &str) -> (ResponseFuture, h2::SendStream<Bytes>) {
        self.call_with(&format!("linkis.rm.v1.{method}"), &[]).await
    }

    /// Begins a call of any service, with further headers.
    async fn call_with(&self, method: &str, headers: &[(&str, &str)]) -> (ResponseFuture, h2::SendStream<Bytes>) {
        let uri = format!("{}/{method}", self.address);
        let call = Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
        let call = headers.iter().fold(call, |call, (name, value)| call.header(*name, *value));
        let mut ready = self.requests.clone().ready().await.unwrap();
        ready.send_request(call.body(()).unwrap(), false).unwrap()
    }

    /// Makes a call with an empty message; how its answer begins.
    async fn empty_call(&self, method: &str, headers: &[(&str, &str)]) -> http::Response<h2::RecvStream> {
        let (answer, mut stream) = self.call_with(method, headers).await;
        // A rejected call takes no message.
        let _ = stream.send_data(message_prefix(0).into(), true);
        answer.await.unwrap()
    }
}

/// The beginning of a message of `length` bytes.
fn message_prefix(length: usize) -> Vec<u8> {
    [&[0], u32::try_from(length).unwrap().to_be_bytes().as_slice()].concat()
}

/// Sends `body` as far as the server accepts it; false if the server ends the call.
async fn send(stream: &mut h2::SendStream<Bytes>, mut body: Bytes) -> bool {
    while !body.is_empty() {
        stream.reserve_capacity(body.len());
        let Some(Ok(capacity)) = poll_fn(|cx| stream.poll_capacity(cx)).await else { return false };
        if stream.send_data(body.split_to(capacity.min(body.len())), false).is_err() {
            return false;
        }
    }
    true
}

/// Sends a heartbeat of `length` bytes without its last byte. The headers of the reply follow once the server ends the call.
async fn half_sent(raw: &Raw, length: usize, calls: &mut JoinSet<Option<HeaderMap>>) {
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

/// 400 heartbeats without their last bytes, on one connection, use at most 64 MB and are rejected with a reason. Other calls are
/// served meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_sent_heartbeats_use_bounded_memory() {
    let database = Database::fresh().await;
    let (process, _) = server(&database, &[("BODY_TIMEOUT", "1h")]);
    let em1 = em("host1");
    process.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();
    let idle = process.memory();
    let raw = Raw::connect(&process.address).await;
    let mut calls = JoinSet::new();
    for _ in 0..400 {
        half_sent(&raw, 1_600_000, &mut calls).await;
    }
    let (mut most, mut refused, mut rounds) = (idle, 0, 0);
    // Until no more calls end, or the bound is exceeded.
    while rounds < 20 && most - idle <= 64 * MB {
        rounds += 1;
        let grant = process.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
        process.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        while let Ok(Some(answer)) = tokio::time::timeout(Duration::from_millis(20), calls.join_next()).await {
            let headers = answer.unwrap().expect("a status");
            assert_eq!(headers["grpc-status"], "8", "{headers:?}");
            (refused, rounds) = (refused + 1, 0);
        }
        most = most.max(process.memory());
    }
    assert!(most - idle <= 64 * MB, "{} MB above idle", (most - idle) / MB);
    assert!((300..400).contains(&refused), "{refused} were refused");
}

/// Unread replies of over 1 MB on one connection use at most 64 MB. Replies above the budget are rejected, other calls are
/// served, and the end of the connection frees the memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_replies_use_bounded_memory() {
    let database = Database::fresh().await;
    let process = Process::start(&["--database-url", &database.url()]);
    let em1 = em("host1");
    process.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();
    database
        .execute(
            r#"INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name,
               em_instance, resource_type, user_locked_resource, labels, locked_time, expires_at, em_epoch)
           SELECT gen_random_uuid(), 'hadoop', 'IDE', '', e.em_application_name, e.em_instance, 'CPU', '{"cores":1}',
               (SELECT jsonb_object_agg('key' || k, repeat('v', 120)) FROM generate_series(1, 8) k), now(),
               now() + interval '1 hour', e.epoch
           FROM generate_series(1, 1000) n, linkis_em_resource_meta_data e"#,
        )
        .await;
    let list = || {
        let client = process.client.clone();
        async move { client.tickets(None).await.unwrap().len() }
    };
    // The first replies allocate the memory for this many concurrent ones.
    const AT_ONCE: usize = 4;
    assert_eq!((0..AT_ONCE).map(|_| list()).collect::<JoinSet<_>>().join_all().await, [1000; AT_ONCE]);
    let (idle, body) = (process.memory(), message_prefix(3).into_iter().chain([0x20, 0xe8, 7]).collect::<Vec<u8>>());
    // A large window of the connection, and a small one of each stream.
    let mut windows = h2::client::Builder::new();
    let raw =
        Raw::connect_with(&process.address, windows.initial_window_size(1).initial_connection_window_size(1 << 30));
    let (raw, mut calls, mut unread, mut refused) = (raw.await, JoinSet::new(), vec![], 0);
    let mut most = idle;
    for _ in 0..6 {
        for _ in 0..AT_ONCE {
            let (answer, mut stream) = raw.call("UsageService/ListTickets").await;
            stream.send_data(Bytes::from(body.clone()), true).unwrap();
            calls.spawn(answer);
        }
        while let Some(answer) = calls.join_next().await {
            let answer = answer.unwrap().unwrap();
            match answer.headers().get("grpc-status") {
                None => unread.push(answer),
                Some(status) => {
                    let got = answer.headers()["grpc-message"].to_str().unwrap();
                    assert!(status == "8" && got.contains("byte%20budget"), "{answer:?}");
                    refused += 1;
                }
            }
        }
        process.client.em(&em1).await.unwrap();
        most = most.max(process.memory());
        assert!(
            most - idle <= 64 * MB,
            "{} MB above idle with {} unread, {refused} refused",
            (most - idle) / MB,
            unread.len()
        );
    }
    assert!(refused > 0 && !unread.is_empty(), "{refused} were refused");
    // Another connection has its own budget; this one is free again once the replies are dropped.
    assert_eq!(list().await, 1000);
    drop(unread);
    eventually("memory is free again", Duration::from_secs(30), || async {
        let (answer, mut stream) = raw.call("UsageService/ListTickets").await;
        stream.send_data(Bytes::from(body.clone()), true).unwrap();
        !answer.await.unwrap().headers().contains_key("grpc-status")
    })
    .await;
}

/// Incomplete large messages use only their share of the byte budget. Other large messages are rejected with a retry time, and
/// small ones are accepted. The end of the connections frees the budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_above_byte_budget_is_rejected() {
    let database = Database::fresh().await;
    let (process, _) = server(&database, &[("MAX_BODY_BYTES", "8m"), ("BODY_TIMEOUT", "1h")]);
    let em1 = em("host1");
    let registered = process.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();
    let (first, second, mut calls) =
        (Raw::connect(&process.address).await, Raw::connect(&process.address).await, JoinSet::new());
    let tickets = |count| (0..count).map(Uuid::from_u128).collect();
    let large = |sequence| EmReport { tickets: tickets(80_000), ..report(&registered, sequence) };
    let refusal = tokio::time::timeout(LONG, async {
        loop {
            // Sent again, because a message that arrives beside a large heartbeat is itself refused.
            half_sent(&first, 1_700_000, &mut calls).await;
            half_sent(&second, 1_700_000, &mut calls).await;
            if let Err(refusal) = process.client.heartbeat(&large(1)).await {
                break refusal;
            }
        }
    });
    let refusal = refusal.await.expect("the budget is used");
    assert_eq!((refusal.code(), refusal.reason().as_deref()), (Some(Code::ResourceExhausted), Some("OVERLOADED")));
    assert!(refusal.retry_after().is_some());
    process.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    process.client.heartbeat(&EmReport { tickets: tickets(100), ..report(&registered, 2) }).await.unwrap();
    calls.shutdown().await;
    drop((first, second));
    eventually("memory is free again", Duration::from_secs(30), || async {
        process.client.heartbeat(&large(3)).await.is_ok()
    })
    .await;
}

/// A call whose message does not arrive, and a connection without a request, end at their timeouts. A waiting call does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_call_ends_at_body_timeout() {
    let database = Database::fresh().await;
    let (process, _) = server(&database, &[("BODY_TIMEOUT", "300ms"), ("HANDSHAKE_TIMEOUT", "3s")]);
    let (mut silent, mut slow) = (tcp(&process.address).await, tcp(&process.address).await);
    slow.write_all(b"PRI * HTTP/2.0").await.unwrap();
    let (raw, mut calls) = (Raw::connect(&process.address).await, JoinSet::new());
    half_sent(&raw, 1000, &mut calls).await;
    let answer = tokio::time::timeout(LONG, calls.join_next()).await.expect("a reply");
    let headers = answer.unwrap().unwrap().unwrap();
    assert_eq!(headers["grpc-status"], "4", "{headers:?}");
    process.client.register(registration(em("host1"), load(1, 1, 1))).await.unwrap();
    let asked = request(&em("host1"), "hadoop", load(1, 1, 1));
    process.client.request_resource(&asked).await.granted();
    let waits = ResourceRequest { wait_timeout: Duration::from_secs(1), ..asked };
    process.client.request_resource(&waits).await.refused();
    assert!(is_ended(&mut silent, LONG).await && is_ended(&mut slow, LONG).await);
    process.client.ems().await.expect("a connection with requests stays open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_above_limit_are_closed() {
    let database = Database::fresh().await;
    let (process, log) = server(&database, &[("MAX_CONNECTIONS", "5"), ("HANDSHAKE_TIMEOUT", "1h")]);
    process.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let (mut held, begun) = (vec![], Instant::now());
    for _ in 0..4 {
        held.push(tcp(&process.address).await);
    }
    for _ in 0..60 {
        assert!(is_ended(&mut tcp(&process.address).await, LONG).await, "a connection above the limit is closed");
        process.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    }
    assert!(!is_ended(&mut held[0], Duration::from_millis(100)).await, "the first connections stay open");
    assert!(client(&process.address).ems().await.is_err());
    drop(held);
    eventually("another connection is accepted", Duration::from_secs(5), || async {
        client(&process.address).ems().await.is_ok()
    })
    .await;
    let got = lines(&log, "connection rejected");
    assert!((1..=lines_max(begun)).contains(&got.len()), "bounded log lines: {got:?}");
}

/// Without file descriptors for new connections, open connections are served and the log names the reason. New connections are
/// accepted once there are descriptors.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accept_failure_is_logged_and_ends() {
    let database = Database::fresh().await;
    let (process, log) = server(&database, &[]);
    process.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let files = |current| {
        let rlimit = Rlimit { current: Some(current), maximum: getrlimit(Resource::Nofile).maximum };
        prlimit(Some(process.pid()), Resource::Nofile, rlimit).unwrap().current
    };
    let (before, begun) = (files(10).unwrap(), Instant::now());
    let waiting = client(&process.address);
    let late = tokio::spawn(async move { waiting.ems().await });
    eventually("the failure is logged", Duration::from_secs(5), || async {
        !lines(&log, "cannot accept connections").is_empty()
    })
    .await;
    for _ in 0..100 {
        process.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    }
    let got = lines(&log, "cannot accept connections");
    assert!(got.len() <= lines_max(begun) && got[0].contains("Too many open files"), "{got:?}");
    files(before);
    late.await.unwrap().unwrap();
}

/// The cause of an internal error is logged once, with its call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn defect_is_logged_once_with_its_call() {
    let database = Database::fresh().await;
    // One server each, because a server logs few defects in a time.
    let servers = [(); 3].map(|()| server(&database, &[]));
    let em1 = em("host1");
    let registered = servers[0].0.client.register(registration(em1.clone(), load(1, 1, 1))).await.unwrap();
    assert!(servers[0].0.client.em(&em("host2")).await.is_err());
    let broken =
        "ALTER TABLE linkis_em_resource_meta_data RENAME TO gone; ALTER TABLE linkis_em_report RENAME TO gone_too";
    database.execute(broken).await;
    let unknown = ReleaseTicket { ticket_id: Uuid::nil(), user: name("hadoop"), em: em1.clone() };
    let clients = servers.each_ref().map(|(process, _)| &process.client);
    let met = [
        ("UsageService/GetEm", clients[0].em(&em1).await.unwrap_err()),
        ("ResourceManagerService/ResourceReleased", clients[1].resource_released(&unknown).await.unwrap_err()),
        ("ResourceManagerService/Heartbeat", clients[2].heartbeat(&report(&registered, 1)).await.unwrap_err()),
    ];
    for ((call, error), (_, log)) in met.into_iter().zip(&servers) {
        assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::Internal), Some("INTERNAL")), "{call}");
        eventually("it is logged", Duration::from_secs(5), || async { !lines(log, call).is_empty() }).await;
        let got = lines(log, "ERROR");
        assert!(got.len() == 1 && got[0].contains(call) && got[0].contains("does not exist"), "{got:?}");
    }
}

/// A call with large metadata is refused, and its connection serves other calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_with_large_metadata_are_refused_alone() {
    let (_database, rm) = start().await;
    for (fields, bytes, is_refused) in
        [(1, 4 << 10, false), (1, 15 << 10, true), (1, 64 << 10, true), (1, 1 << 20, true), (2000, 16, true)]
    {
        let mut usage = UsageServiceClient::new(channel_to(&rm.address).await);
        let mut call = tonic::Request::new(ListEmsRequest::default());
        for field in 0..fields {
            let key = tonic::metadata::AsciiMetadataKey::from_bytes(format!("x-{field}").as_bytes()).unwrap();
            call.metadata_mut().insert(key, "v".repeat(bytes).parse().unwrap());
        }
        assert_eq!(usage.list_ems(call).await.is_err(), is_refused, "{fields} fields of {bytes} bytes");
        rm.client.ems().await.unwrap();
    }
}
