//! Shutdown: health before and during it, connections and calls that it ends, and calls that it finishes.

use super::*;

/// Endless streams: a health watch, and a reflection stream without a query.
struct Endless {
    watch: Streaming<HealthCheckResponse>,
    reflection: Streaming<ServerReflectionResponse>,
}

impl Endless {
    async fn begin(rm: &Process) -> Self {
        let channel = Channel::from_shared(rm.address.clone()).unwrap().connect().await.unwrap();
        let watch = HealthClient::new(channel.clone()).watch(HealthCheckRequest::default()).await;
        let mut watch = watch.unwrap().into_inner();
        while watch.message().await.unwrap().unwrap().status() != ServingStatus::Serving {}
        let questions = tokio_stream::pending::<ServerReflectionRequest>();
        let reflection = ServerReflectionClient::new(channel).server_reflection_info(questions).await;
        Self { watch, reflection: reflection.unwrap().into_inner() }
    }

    /// Asserts that the server reported its shutdown, and then ended both streams.
    async fn assert_ended(mut self) {
        // The status can be sent more than once.
        while self.watch.message().await.unwrap().unwrap().status() != ServingStatus::NotServing {}
        assert_eq!(self.watch.message().await.unwrap_err().code(), Code::Unavailable);
        assert!(!matches!(self.reflection.message().await, Ok(Some(_))));
    }
}

/// A shutdown rejects all waiting requests, ends all streams, and waits neither for idle and silent connections nor for replies
/// that are not read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_rejects_waiting_requests_immediately() {
    let database = Database::fresh().await;
    // Longer than the test waits for the end.
    let (rm, _) = server(&database, &[("DRAIN_TIMEOUT", "1h")]);
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(1, 1, 1))).await.unwrap();
    rm.client.request_resource(&request(&em1, "first", load(1, 1, 1))).await.granted();
    let mut waiters = JoinSet::new();
    for n in 0..100 {
        let (client, ask) = (rm.client.clone(), patient(&em1, &format!("user{n}"), load(1, 1, 1)));
        waiters.spawn(async move { client.request_resource(&ask).await.unwrap_err() });
    }
    database.waiting(100).await;
    let endless = Endless::begin(&rm).await;
    let idle = client(&rm.address);
    idle.ems().await.unwrap();
    let (_silent, mut rude) = (tcp(&rm.address).await, tcp(&rm.address).await);
    // It sends settings, and then neither replies nor closes.
    rude.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut nothing = h2::client::Builder::new();
    let raw = Raw::connect_with(&rm.address, nothing.initial_window_size(0)).await;
    let mut unread = vec![];
    for method in ["grpc.health.v1.Health/Watch", "grpc.health.v1.Health/Check", "linkis.rm.v1.UsageService/Watch"] {
        unread.push(raw.empty_call(method, &[]).await);
    }
    let ended = tokio::time::timeout(LONG, tokio::task::spawn_blocking(|| rm.terminate())).await;
    assert_eq!(ended.expect("it waits for no call").unwrap(), Some(0));
    while let Some(error) = waiters.join_next().await {
        let error = error.unwrap();
        assert_eq!(
            (error.code(), error.reason().as_deref()),
            (Some(Code::Unavailable), Some("SHUTTING_DOWN")),
            "{error}"
        );
    }
    endless.assert_ended().await;
    database.waiting(0).await;
}

async fn health(channel: Channel, service: &str) -> ServingStatus {
    let of = HealthCheckRequest { service: service.to_owned() };
    HealthClient::new(channel).check(of).await.unwrap().into_inner().status()
}

/// During the shutdown delay, a server reports NOT_SERVING and serves all calls, also on new connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_delay_reports_not_serving() {
    let database = Database::fresh().await;
    let [(rm, _), (other, _)] = ["1h", "1s"].map(|delay| server(&database, &[("SHUTDOWN_DELAY", delay)]));
    let (address, em1) = (rm.address.clone(), em("host1"));
    rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let connect = async || Channel::from_shared(address.clone()).unwrap().connect().await.unwrap();
    let channel = connect().await;
    eventually("it serves", Duration::from_secs(10), async || {
        health(channel.clone(), "").await == ServingStatus::Serving
    })
    .await;
    kill_process(rm.pid(), Signal::TERM).unwrap();
    eventually("it reports its shutdown", LONG, async || {
        health(channel.clone(), "").await == ServingStatus::NotServing
    })
    .await;
    assert_eq!(health(connect().await, "").await, ServingStatus::NotServing);
    assert_eq!(health(connect().await, "liveness").await, ServingStatus::Serving, "the process is alive");
    client(&address).request_resource(&request(&em1, "late", load(1, 1, 1))).await.granted();
    rm.kill();
    let start = Instant::now();
    assert_eq!(tokio::task::spawn_blocking(|| other.terminate()).await.unwrap(), Some(0));
    assert!(start.elapsed() >= Duration::from_secs(1));
}

/// A connection that reaches the age limit ends without failing a call, short or long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_connection_closes_without_call_failure() {
    let database = Database::fresh().await;
    let (rm, _) = server(&database, &[("MAX_CONNECTION_AGE", "1s")]);
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(1, 1, 1))).await.unwrap();
    let first = rm.client.request_resource(&request(&em1, "first", load(1, 1, 1))).await.granted();
    let (requests, connection) = h2::client::handshake(tcp(&rm.address).await).await.unwrap();
    let idle = tokio::spawn(connection);
    let lasts = request_in_task(&rm.client, patient(&em1, "patient", load(1, 1, 1)));
    let (mut answered, mut unsent) = (0, 0);
    while !idle.is_finished() || answered <= 50 {
        match rm.client.em(&em1).await {
            Ok(_) => answered += 1,
            // The client had not sent the call when the connection ended.
            Err(error) => {
                assert!(error.to_string().contains("connection closed"), "{error}");
                unsent += 1;
            }
        }
    }
    assert!(unsent <= 3, "{unsent} calls were not sent");
    drop(requests);
    rm.client.resource_released(&release(&first, "first")).await.unwrap();
    lasts.await.unwrap().granted();
}

/// A call that runs when the shutdown begins is finished.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_waits_for_running_calls() {
    let database = Database::fresh().await;
    let rm = Instance::start_with(&database, settings().with("--drain-timeout", "1h")).await;
    rm.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    database.hold_by_hand(&em("host1")).await;
    let call = request_in_task(&rm.client, request(&em("host1"), "hadoop", load(1, 1, 1)));
    eventually("the call runs", LONG, async || rm.metric("linkis_rm_contended_operations") == 1.0).await;
    let channel = channel_to(&rm.address).await;
    let mut watch = HealthClient::new(channel).watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    let stopping = tokio::spawn(rm.stop());
    while watch.message().await.unwrap().unwrap().status() != ServingStatus::NotServing {}
    assert!(!stopping.is_finished() && !call.is_finished());
    database.release_holds().await;
    assert_eq!(stopping.await.unwrap(), ServerExit::Drained);
    call.await.unwrap().granted();
}
