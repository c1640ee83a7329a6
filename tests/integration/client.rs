//! The client with several addresses: instances that are killed, silent, not ready or at their connection age.

use std::{
    collections::HashSet,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rm_client::{ClientError, ClientSettings, ResourceRequest, ResultResource, RmClient};
use rm_model::{report::EmReport, ticket::TicketState};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinSet,
};
use tonic::Code;
use uuid::Uuid;

use crate::{
    harness::*,
    proxy::{FaultPlan, Proxy},
};

/// Number of concurrent callers.
const CALLERS: usize = 64;

/// Time to live of the tickets that stay locked.
const LOCK_TTL: Duration = Duration::from_secs(6);

/// Results of all callers.
#[derive(Default)]
struct Done {
    granted: Mutex<HashSet<Uuid>>,
    released: Mutex<HashSet<Uuid>>,
    /// Tickets that stay locked until they expire.
    locked: Mutex<HashSet<Uuid>>,
    failures: Mutex<Vec<String>>,
    stop: AtomicBool,
}

impl Done {
    /// Records the failure of a call.
    async fn call<T>(&self, what: &str, call: impl Future<Output = Result<T, ClientError>>) -> Option<T> {
        call.await.map_err(|error| self.failures.lock().unwrap().push(format!("{what}: {error}"))).ok()
    }

    #[track_caller]
    fn assert_no_failure(&self) {
        let failures = self.failures.lock().unwrap();
        assert!(failures.is_empty(), "{} of {failures:#?}", failures.len());
    }

    /// Waits for `more` further grants.
    async fn grants(&self, more: usize) {
        let before = self.granted.lock().unwrap().len();
        eventually("more grants", LONG, async || self.granted.lock().unwrap().len() >= before + more).await;
    }
}

/// Makes all calls that are safe to repeat, as an EM and its engines do, without request ids. Every fourth ticket stays locked.
async fn caller(client: RmClient, number: usize, done: Arc<Done>) {
    let em1 = em(&format!("host{number}"));
    let registration = registration(em1.clone(), load(100_000, 100_000, 100_000));
    let Some(registered) = done.call("register", client.register(registration)).await else { return };
    for turn in 1.. {
        if done.stop.load(Ordering::Relaxed) {
            return;
        }
        let is_left = turn % 4 == 3;
        let lock_ttl = is_left.then_some(LOCK_TTL);
        let asked = ResourceRequest { lock_ttl, ..request(&em1, "hadoop", load(1, 1, 1)) };
        let Some(answer) = done.call("request", client.request_resource(&asked)).await else { continue };
        let ResultResource::Available(grant) = answer else { panic!("there is room") };
        assert!(done.granted.lock().unwrap().insert(grant.ticket_id), "one ticket for two requests");
        if is_left {
            done.locked.lock().unwrap().insert(grant.ticket_id);
            continue;
        }
        done.call("inited", client.resource_inited(&inited(&grant, "hadoop", None))).await;
        done.call("reported", client.resource_reported(&grant.reported(name("hadoop"), load(2, 1, 1)))).await;
        if turn % 2 == 0 {
            done.call("released", client.resource_released(&release(&grant, "hadoop"))).await;
            done.released.lock().unwrap().insert(grant.ticket_id);
        }
        if turn % 4 == 0 {
            let tickets = client.tickets(Some(&em1)).await.into_iter().flatten().map(|ticket| ticket.id).collect();
            let report = EmReport { tickets, ..report(&registered, turn) };
            done.call("heartbeat", client.heartbeat(&report)).await;
            done.call("em", client.em(&em1)).await;
        }
    }
}

/// Two instances under load are killed one after the other, and for a while both: no call fails, each ticket is granted once, and
/// locked tickets expire on time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_calls_survive_instance_kills() {
    let database = Database::fresh().await;
    let url = database.url();
    // Own loopback addresses, so that no connection of another test takes the port of a stopped instance.
    let start = |listen: &str| Process::start_at(listen, &["--database-url", &url, "--http-listen", ""]);
    let (mut first, mut second) = (start("127.0.0.77:0"), start("127.0.0.78:0"));
    let addresses = [first.address.clone(), second.address.clone()];
    let client = insistent(&addresses.join(","));
    let done = Arc::new(Done::default());
    let mut callers = JoinSet::new();
    for number in 0..CALLERS {
        callers.spawn(caller(client.clone(), number, done.clone()));
    }
    done.grants(100).await;
    first.kill();
    done.grants(100).await;
    second.kill();
    // Until the restart, no instance runs.
    first = start(addresses[0].trim_start_matches("http://"));
    done.grants(100).await;
    second = start(addresses[1].trim_start_matches("http://"));
    done.grants(100).await;
    first.kill();
    done.grants(100).await;
    done.stop.store(true, Ordering::Relaxed);
    callers.join_all().await;

    let [granted, released, locked] =
        [&done.granted, &done.released, &done.locked].map(|tickets| std::mem::take(&mut *tickets.lock().unwrap()));
    done.assert_no_failure();
    eventually("locked tickets expire", LONG, async || {
        second.client.ems().await.unwrap().iter().all(|em| em.locked.is_zero())
    })
    .await;
    let tickets = second.client.tickets(None).await.unwrap();
    let alive: HashSet<Uuid> = tickets.iter().map(|ticket| ticket.id).collect();
    let ended: HashSet<Uuid> = released.union(&locked).copied().collect();
    assert_eq!(alive, granted.difference(&ended).copied().collect(), "the tickets are those of the replies");
    assert!(tickets.iter().all(|ticket| matches!(ticket.state, TicketState::Used { .. })));
    for (action, tickets) in [("granted", granted), ("released", released), ("expired", locked)] {
        assert_eq!(database.recorded(action).await, i64::try_from(tickets.len()).unwrap(), "{action} once each");
    }
    assert_invariants(&database, &second.client).await;
}

/// A listener whose queue is full: a connection attempt gets no reply.
struct Hole {
    address: String,
    _listener: TcpListener,
    _queue: Vec<TcpStream>,
}

impl Hole {
    async fn new() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let listener = socket.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        let mut queue = Vec::new();
        while let Ok(Ok(stream)) = tokio::time::timeout(Duration::from_millis(100), TcpStream::connect(address)).await {
            queue.push(stream);
        }
        Self { address: format!("http://{address}"), _listener: listener, _queue: queue }
    }
}

/// Silent addresses delay no call to an address that replies. Without any other address, all waiting calls fail together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_with_silent_address_is_not_delayed() {
    let (_database, rm) = start().await;
    let hole = Hole::new().await;
    // The listener accepts connections, and never replies.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_address = silent.local_addr().unwrap();
    let addresses = format!("{},{silent_address},{}", hole.address, rm.address);
    let client = RmClient::new(&addresses, LONG).unwrap();
    // Each call within the time of one connection attempt.
    tokio::time::timeout(LONG, async {
        for _ in 0..100 {
            client.ems().await.unwrap();
        }
    })
    .await
    .expect("no call waits for a silent address");

    let lost = hurried(&hole.address, Duration::from_secs(30));
    let calls = (0..1000).map(|_| lost.clone()).map(|lost| async move { lost.ems().await.unwrap_err() });
    let errors = calls.collect::<JoinSet<_>>().join_all().await;
    for error in errors {
        let text = error.to_string();
        assert!(error.code() == Some(Code::Unavailable) && text.contains("no reply"), "{text}");
    }
}

/// Makes 100 calls, and returns the number that each instance answered.
async fn shares(client: &RmClient) -> Vec<(String, usize)> {
    let mut shares: Vec<(String, usize)> = Vec::new();
    for _ in 0..100 {
        let instance = client.server_info().await.unwrap().instance_id;
        match shares.iter_mut().find(|(known, _)| *known == instance) {
            Some((_, count)) => *count += 1,
            None => shares.push((instance, 1)),
        }
    }
    shares
}

/// An instance that is not ready gets no calls until it is ready again. An instance that stops fails no call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_avoids_unready_instance() {
    let (database, first) = start().await;
    let (proxy, proxied) = database.behind_proxy("not-serving");
    let second = Instance::start(&proxied).await;
    let client = RmClient::new(&format!("{},{}", first.address, second.address), Duration::from_secs(30)).unwrap();
    eventually("both serve", Duration::from_secs(5), || async { shares(&client).await.len() == 2 }).await;
    let even = shares(&client).await;
    assert!(even.iter().all(|(_, count)| *count == 50), "{even:?}");

    // Its health status excludes the instance from calls; its connection stays open.
    proxy.close();
    proxy.cut_all();
    client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    eventually("one serves", Duration::from_secs(10), || async { shares(&client).await.len() == 1 }).await;
    client.ems().await.unwrap();
    proxy.open();
    eventually("both serve again", Duration::from_secs(10), || async { shares(&client).await.len() == 2 }).await;

    // Calls that are not safe to repeat are repeated if they did not begin.
    let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut callers = JoinSet::new();
    for number in 0..16 {
        let (client, stop, rounds) = (client.clone(), stop.clone(), rounds.clone());
        callers.spawn(async move {
            let em1 = em(&format!("coming-and-going{number}"));
            while !stop.load(Ordering::Relaxed) {
                client.register(registration(em1.clone(), load(1, 1, 1))).await.unwrap();
                client.unregister(&em1).await.unwrap();
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let done = async |more: usize| {
        eventually("callers continue", LONG, async || rounds.load(Ordering::Relaxed) >= more).await;
    };
    done(16).await;
    first.stop().await;
    done(rounds.load(Ordering::Relaxed) + 16).await;
    stop.store(true, Ordering::Relaxed);
    callers.join_all().await;
}

/// Starts a server on a Unix socket, and a proxy in front of it.
async fn behind_proxy(database: &Database, test: &str) -> (Instance, Proxy, String) {
    let folder = scratch(test);
    std::fs::create_dir_all(&folder).unwrap();
    let file = |folder: &PathBuf| folder.join(".s.PGSQL.5432");
    let rm = Instance::start_at(database, settings(), &format!("unix:{}", file(&folder).display())).await;
    assert_eq!(rm.address, format!("unix:{}", file(&folder).display()));
    let proxy = Proxy::start(&format!("{test}-proxy"), &folder);
    let address = format!("unix://{}", file(&proxy.folder().to_owned()).display());
    (rm, proxy, address)
}

/// A call whose reply is lost is repeated, with the same result. A call that is not safe to repeat fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_retries_call_with_lost_reply() {
    let database = Database::fresh().await;
    let (rm, proxy, address) = behind_proxy(&database, "lost-answers").await;
    let direct = rm.client.clone();
    let client = RmClient::new(&address, LONG).unwrap();
    let em1 = em("host1");
    client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();

    // Without replies, the effect of a call is visible before its reply arrives.
    for round in 1..=2 {
        proxy.set_fault_plan(FaultPlan::Mute);
        let (caller, asked) = (client.clone(), request(&em1, "hadoop", load(1, 1, 1)));
        let asking = tokio::spawn(async move { caller.request_resource(&asked).await });
        let is_granted = || async { direct.tickets(Some(&em1)).await.unwrap().len() == round };
        eventually("it is granted", Duration::from_secs(5), is_granted).await;
        assert!(!asking.is_finished());
        proxy.cut_all();
        proxy.set_fault_plan(FaultPlan::Fair);
        let grant = asking.await.unwrap().granted();
        assert!(lives(&direct, grant.ticket_id).await);
        assert_eq!(assert_invariants(&database, &direct).await, round, "granted once");
    }

    proxy.set_fault_plan(FaultPlan::Mute);
    let (caller, goes) = (client.clone(), em1.clone());
    let going = tokio::spawn(async move { caller.unregister(&goes).await });
    eventually("it is gone", Duration::from_secs(5), || async { direct.em(&em1).await.is_err() }).await;
    assert!(!going.is_finished());
    proxy.cut_all();
    proxy.set_fault_plan(FaultPlan::Fair);
    let error = going.await.unwrap().unwrap_err();
    assert_eq!((error.code(), error.reason()), (Some(Code::Unavailable), None), "{error}");
    assert!(error.to_string().contains("the connection broke"), "{error}");

    // A client with one attempt sends no request id, and returns the same error.
    client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();
    let ids = "SELECT count(*) FROM linkis_user_request_id";
    assert_eq!(database.count(ids).await, 2);
    let once = hurried(&address, Duration::from_secs(30));
    proxy.set_fault_plan(FaultPlan::Mute);
    let asked = request(&em1, "hadoop", load(1, 1, 1));
    let asking = tokio::spawn(async move { once.request_resource(&asked).await });
    let is_granted = || async { direct.tickets(Some(&em1)).await.unwrap().len() == 1 };
    eventually("it is granted", LONG, is_granted).await;
    proxy.cut_all();
    proxy.set_fault_plan(FaultPlan::Fair);
    assert_eq!(asking.await.unwrap().unwrap_err().code(), Some(Code::Unavailable));
    assert_eq!(database.count(ids).await, 2);
}

/// 10,000 concurrent calls of one client: without a server, all retry together and fail; with a server, all use one connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_shares_connection_among_10000_calls() {
    const CALLS: usize = 10_000;
    let (_database, rm) = start().await;
    let closed = TcpListener::bind("127.0.0.79:0").await.unwrap().local_addr().unwrap();
    let all = |client: RmClient| {
        let calls = (0..CALLS).map(move |_| client.clone()).map(|client| async move { client.server_info().await });
        calls.collect::<JoinSet<_>>().join_all()
    };
    let settings = |attempts| ClientSettings { attempts, ..ClientSettings::new(Duration::from_secs(60)) };
    let lost = RmClient::with(&format!("http://{closed}"), &settings(4)).unwrap();
    for answer in tokio::time::timeout(LONG, all(lost)).await.expect("the calls end") {
        let error = answer.unwrap_err();
        assert!(error.code() == Some(Code::Unavailable) && error.to_string().contains("refused"), "{error}");
    }
    // The server admits 256 of these calls at a time and rejects the others; the timeout alone bounds their attempts.
    let both = RmClient::with(&format!("{},{closed}", rm.address), &settings(u32::MAX)).unwrap();
    all(both).await.into_iter().for_each(|answer| drop(answer.unwrap()));
}

/// The age limit of connections fails no call, even of clients that repeat none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_age_limit_fails_no_call() {
    let database = Database::fresh().await;
    let options = settings().with_time("--max-connection-age", Duration::from_secs(1));
    let rm = Instance::start_with(&database, options).await;
    let clients: Vec<_> = (0..8).map(|_| client(&rm.address)).collect();
    let (done, mut callers) = (Arc::<Done>::default(), JoinSet::new());
    for number in 0..CALLERS {
        callers.spawn(caller(clients[number % clients.len()].clone(), number, done.clone()));
    }
    // Three times the age limit, which is the period under test: each client opens several connections.
    tokio::time::sleep(Duration::from_secs(3)).await;
    done.stop.store(true, Ordering::Relaxed);
    callers.join_all().await;
    done.assert_no_failure();
    assert_invariants(&database, &rm.client).await;
}
