//! How a server stops, and what it says of itself before.

use super::*;

/// Streams that would go on for ever: one that watches health, and one that never asks what it could.
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

    /// The server has said that it stops, and then ended both.
    async fn assert_ended(mut self) {
        // It may have been told more than once that all was well.
        while self.watch.message().await.unwrap().unwrap().status() != ServingStatus::NotServing {}
        assert_eq!(self.watch.message().await.unwrap_err().code(), Code::Unavailable);
        assert!(!matches!(self.reflection.message().await, Ok(Some(_))));
    }
}

/// Nobody who has no call under way keeps a server from stopping; who watches its health hears of it first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_does_not_wait_for_those_who_only_linger() {
    let database = Database::fresh().await;
    let (rm, _) = server(&database, &[]);
    let endless = Endless::begin(&rm).await;
    let (_silent, mut rude) = (tcp(&rm.address).await, tcp(&rm.address).await);
    // It speaks, and then neither answers nor goes.
    rude.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    rm.client.ems().await.unwrap();
    let start = Instant::now();
    assert_eq!(tokio::task::spawn_blocking(|| rm.terminate()).await.unwrap(), Some(0));
    let took = start.elapsed();
    endless.assert_ended().await;
    assert!(took < Duration::from_secs(2), "it took {took:?}");
}

/// Nor does anybody who takes nothing of what is sent for ever, or to everybody who asks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_does_not_wait_for_those_who_take_nothing() {
    let database = Database::fresh().await;
    let (rm, _) = server(&database, &[]);
    rm.client.ems().await.unwrap();
    let mut nothing = h2::client::Builder::new();
    let raw = Raw::connect_with(&rm.address, nothing.initial_window_size(0)).await;
    let mut untaken = vec![];
    for method in ["grpc.health.v1.Health/Watch", "grpc.health.v1.Health/Check", "linkis.rm.v1.UsageService/Watch"] {
        untaken.push(raw.empty_call(method, &[]).await);
    }
    let start = Instant::now();
    assert_eq!(tokio::task::spawn_blocking(|| rm.terminate()).await.unwrap(), Some(0));
    let took = start.elapsed();
    assert!(took < Duration::from_secs(2), "it took {took:?}");
}

/// A server that is told to stop has ended within a second, however many wait and linger: all who wait are sent elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_rejects_waiting_requests_immediately() {
    let database = Database::fresh().await;
    let (rm, _) = server(&database, &[]);
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(1, 1, 1))).await.unwrap();
    rm.client.request_resource(&request(&host, "first", load(1, 1, 1))).await.granted();
    let mut waiters = JoinSet::new();
    for n in 0..100 {
        let (client, ask) = (rm.client.clone(), request(&host, &format!("user{n}"), load(1, 1, 1)));
        let waits = linkis_rm::client::ResourceRequest { wait_timeout: Duration::from_secs(60), ..ask };
        waiters.spawn(async move { client.request_resource(&waits).await.unwrap_err() });
    }
    eventually("they wait", Duration::from_secs(30), async || rm.client.waiting().await.unwrap().len() == 100).await;
    let endless = Endless::begin(&rm).await;
    let idle = client(&rm.address);
    idle.ems().await.unwrap();
    let _silent = tcp(&rm.address).await;
    let start = Instant::now();
    assert_eq!(tokio::task::spawn_blocking(|| rm.terminate()).await.unwrap(), Some(0));
    let took = start.elapsed();
    println!("it took {took:?}");
    while let Some(error) = waiters.join_next().await {
        let error = error.unwrap();
        let told = (error.code(), error.reason());
        assert_eq!(told, (Some(Code::Unavailable), Some("SHUTTING_DOWN".to_owned())), "{error}");
    }
    endless.assert_ended().await;
    assert!(took < Duration::from_secs(1), "it took {took:?}");
}

async fn health(channel: Channel, service: &str) -> ServingStatus {
    let of = HealthCheckRequest { service: service.to_owned() };
    HealthClient::new(channel).check(of).await.unwrap().into_inner().status()
}

/// For a while after it was told to stop, a server says so and serves all the same, also those who come only then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_delay_reports_not_serving() {
    let database = Database::fresh().await;
    let (rm, _) = server(&database, &[("SHUTDOWN_DELAY", "1500ms")]);
    let (address, host) = (rm.address.clone(), em("host1"));
    rm.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let connect = async || Channel::from_shared(address.clone()).unwrap().connect().await.unwrap();
    let channel = connect().await;
    eventually("it serves", Duration::from_secs(10), async || {
        health(channel.clone(), "").await == ServingStatus::Serving
    })
    .await;
    let start = Instant::now();
    let stopping = tokio::task::spawn_blocking(|| rm.terminate());
    eventually("it says that it stops", Duration::from_secs(1), async || {
        health(channel.clone(), "").await == ServingStatus::NotServing
    })
    .await;
    assert_eq!(health(connect().await, "").await, ServingStatus::NotServing);
    assert_eq!(health(connect().await, "liveness").await, ServingStatus::Serving, "nobody is to kill it");
    client(&address).request_resource(&request(&host, "late", load(1, 1, 1))).await.granted();
    assert!(start.elapsed() < Duration::from_millis(1400), "not yet: {:?}", start.elapsed());
    assert_eq!(stopping.await.unwrap(), Some(0));
    let took = start.elapsed();
    assert!((Duration::from_millis(1500)..Duration::from_millis(3000)).contains(&took), "{took:?}");
}

/// A client is asked to open another connection, and none of its calls is cut off for that: neither those that come and go, nor one
/// that lasts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_connection_closes_without_call_failure() {
    let database = Database::fresh().await;
    let (rm, _) = server(&database, &[("MAX_CONNECTION_AGE", "1s")]);
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(1, 1, 1))).await.unwrap();
    let first = rm.client.request_resource(&request(&host, "first", load(1, 1, 1))).await.granted();
    let (requests, connection) = h2::client::handshake(tcp(&rm.address).await).await.unwrap();
    let idle = tokio::spawn(connection);
    let opened = Instant::now();
    let waits = linkis_rm::client::ResourceRequest {
        wait_timeout: Duration::from_secs(60),
        ..request(&host, "patient", load(1, 1, 1))
    };
    let lasting = rm.client.clone();
    let lasts = tokio::spawn(async move { lasting.request_resource(&waits).await });
    let (mut answered, mut unsent) = (0, 0);
    while opened.elapsed() < Duration::from_millis(2500) {
        match rm.client.em(&host).await {
            Ok(_) => answered += 1,
            // The client had it in hand when the connection ended, and had not sent it.
            Err(error) => {
                assert!(error.to_string().contains("connection closed"), "{error}");
                unsent += 1;
            }
        }
    }
    assert!(answered > 50 && unsent <= 3, "{answered} answered, {unsent} not sent");
    assert!(idle.is_finished(), "a connection of that age has made way");
    drop(requests);
    rm.client.resource_released(&release(&first, "first")).await.unwrap();
    lasts.await.unwrap().granted();
}

/// A call that is under way when the server is told to stop is finished, however long the others have gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_waits_for_running_calls() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    database.hold_by_hand(&em("host1")).await;
    let client = rm.client.clone();
    let call =
        tokio::spawn(async move { client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let letting_go = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        database.release_holds().await;
    });
    assert_eq!(rm.stop().await, ServerExit::Drained);
    call.await.unwrap().granted();
    letting_go.await.unwrap();
}

/// An instance whose database is away is not ready, and lives: to restart it would help nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_without_its_database_lives() {
    let database = Database::fresh().await;
    let (proxy, behind) = database.behind_proxy("liveness");
    let rm = Instance::start(&behind).await;
    let channel = Channel::from_shared(rm.address.clone()).unwrap().connect().await.unwrap();
    let says = async |service: &str, status: ServingStatus| {
        let told = async || health(channel.clone(), service).await == status;
        eventually("it says so", Duration::from_secs(30), told).await;
    };
    says("", ServingStatus::Serving).await;
    says("liveness", ServingStatus::Serving).await;
    proxy.close();
    proxy.cut_all();
    says("", ServingStatus::NotServing).await;
    assert_eq!(health(channel.clone(), "liveness").await, ServingStatus::Serving);
    proxy.open();
    says("", ServingStatus::Serving).await;
}
