//! The client, where there are several instances, and some of them are not there.

use std::{
    collections::HashSet,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ClientError, ClientSettings, ResultResource, RmClient},
    domain::{
        report::{EmReport, Health},
        ticket::TicketState,
    },
    transport::edge::ListenAddress,
};
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

/// How many callers there are at once.
const CALLERS: usize = 64;

/// What callers of all kinds have done.
#[derive(Default)]
struct Done {
    granted: Mutex<HashSet<Uuid>>,
    released: Mutex<HashSet<Uuid>>,
    calls: AtomicUsize,
    slowest: Mutex<Duration>,
    failures: Mutex<Vec<String>>,
    stop: AtomicBool,
}

impl Done {
    /// Notes how a call went.
    async fn call<T>(&self, what: &str, call: impl Future<Output = Result<T, ClientError>>) -> Option<T> {
        let begin = Instant::now();
        let answer = call.await;
        let took = begin.elapsed();
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut slowest = self.slowest.lock().unwrap();
        *slowest = took.max(*slowest);
        answer.map_err(|error| self.failures.lock().unwrap().push(format!("{what} after {took:?}: {error}"))).ok()
    }

    async fn grants(&self, more: usize) {
        let before = self.granted.lock().unwrap().len();
        eventually("it goes on", Duration::from_secs(30), || async {
            self.granted.lock().unwrap().len() >= before + more
        })
        .await;
    }
}

/// All that is safe to repeat, as an ECM and its engines do it; nobody gives a request id.
async fn caller(client: RmClient, number: usize, done: Arc<Done>) {
    let host = em(&format!("host{number}"));
    let registration = registration(host.clone(), load(100_000, 100_000, 100_000));
    let Some(registered) = done.call("register", client.register(registration)).await else { return };
    for turn in 1.. {
        if done.stop.load(Ordering::Relaxed) {
            return;
        }
        let asked = request(&host, "hadoop", load(1, 1, 1));
        let Some(answer) = done.call("request", client.request_resource(&asked)).await else { continue };
        let ResultResource::Available(grant) = answer else { panic!("there is room") };
        assert!(done.granted.lock().unwrap().insert(grant.ticket_id), "one ticket for two requests");
        done.call("inited", client.resource_inited(&inited(&grant, "hadoop", None))).await;
        done.call("reported", client.resource_reported(&grant.reported(name("hadoop"), load(2, 1, 1)))).await;
        if turn % 2 == 0 {
            done.call("released", client.resource_released(&release(&grant, "hadoop"))).await;
            done.released.lock().unwrap().insert(grant.ticket_id);
        }
        if turn % 4 == 0 {
            let report = EmReport {
                em: host.clone(),
                epoch: registered.epoch,
                sequence: turn,
                health: Health::Healthy,
                load: None,
                tickets: client.tickets(Some(&host)).await.into_iter().flatten().map(|ticket| ticket.id).collect(),
                observed: None,
            };
            done.call("heartbeat", client.heartbeat(&report)).await;
            done.call("em", client.em(&host)).await;
        }
    }
}

/// Two instances under load, killed one after the other, and for a while both: no call fails, and each grant is made once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_calls_survive_instance_kills() {
    let database = Database::fresh().await;
    let url = database.url();
    // An address of their own: no connection of another test takes the port of one that is away.
    let start = |listen: &str| Process::start_at(listen, &["--database-url", &url, "--http-listen", ""]);
    let (mut first, mut second) = (start("127.0.0.77:0"), start("127.0.0.78:0"));
    let addresses = [first.address.clone(), second.address.clone()];
    let client = RmClient::new(&addresses.join(","), Duration::from_secs(60)).unwrap();
    let done = Arc::new(Done::default());
    let mut callers = JoinSet::new();
    for number in 0..CALLERS {
        callers.spawn(caller(client.clone(), number, done.clone()));
    }
    done.grants(100).await;
    first.kill();
    done.grants(100).await;
    second.kill();
    // For as long as this takes, there is nobody.
    first = start(addresses[0].trim_start_matches("http://"));
    done.grants(100).await;
    second = start(addresses[1].trim_start_matches("http://"));
    done.grants(100).await;
    first.kill();
    done.grants(100).await;
    done.stop.store(true, Ordering::Relaxed);
    callers.join_all().await;

    let failures = std::mem::take(&mut *done.failures.lock().unwrap());
    let granted = std::mem::take(&mut *done.granted.lock().unwrap());
    let released = std::mem::take(&mut *done.released.lock().unwrap());
    println!(
        "{} calls, {} granted, {} released, {} failures, slowest {:?}",
        done.calls.load(Ordering::Relaxed),
        granted.len(),
        released.len(),
        failures.len(),
        done.slowest.lock().unwrap()
    );
    assert!(failures.is_empty(), "{} of {failures:#?}", failures.len());
    let tickets = second.client.tickets(None).await.unwrap();
    let alive: HashSet<Uuid> = tickets.iter().map(|ticket| ticket.id).collect();
    assert_eq!(alive, granted.difference(&released).copied().collect(), "what was told is what there is");
    assert!(tickets.iter().all(|ticket| matches!(ticket.state, TicketState::Used { .. })));
    let grants = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'granted'";
    assert_eq!(database.count(grants).await, i64::try_from(granted.len()).unwrap(), "each was granted once");
    assert_invariants(&database, &second.client).await;
}

/// A listener that takes no connection, and whose queue is full: who connects hears nothing.
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

/// Addresses that swallow everything, from the start: calls go to the one that answers, without a delay. If there is no other, all
/// calls that wait are told together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_with_silent_address_is_not_delayed() {
    let (_database, rm) = start().await;
    let hole = Hole::new().await;
    // It takes connections, and says nothing over them.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_address = silent.local_addr().unwrap();
    let addresses = format!("{},{silent_address},{}", hole.address, rm.address);
    let client = RmClient::new(&addresses, Duration::from_secs(10)).unwrap();
    let begin = Instant::now();
    for _ in 0..100 {
        client.ems().await.unwrap();
    }
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());

    let lost = hurried(&hole.address, Duration::from_secs(30));
    let begin = Instant::now();
    let calls = (0..1000).map(|_| lost.clone()).map(|lost| async move { lost.ems().await.unwrap_err() });
    let errors = calls.collect::<JoinSet<_>>().join_all().await;
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    for error in errors {
        let told = error.to_string();
        assert!(error.code() == Some(Code::Unavailable) && told.contains("does not answer"), "{told}");
    }
}

/// How many of some calls each instance answers.
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

/// An instance that cannot serve gets no calls until it can again, and one that is stopped fails none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_avoids_unready_instance() {
    let (database, first) = start().await;
    let (proxy, proxied) = database.behind_proxy("not-serving");
    let second = Instance::start(&proxied).await;
    let client = RmClient::new(&format!("{},{}", first.address, second.address), Duration::from_secs(30)).unwrap();
    eventually("both serve", Duration::from_secs(5), || async { shares(&client).await.len() == 2 }).await;
    let even = shares(&client).await;
    assert!(even.iter().all(|(_, count)| *count == 50), "{even:?}");

    // Its own words, not its connection, keep the calls away.
    proxy.close();
    proxy.cut_all();
    client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    eventually("one serves", Duration::from_secs(10), || async { shares(&client).await.len() == 1 }).await;
    client.ems().await.unwrap();
    proxy.open();
    eventually("both serve again", Duration::from_secs(10), || async { shares(&client).await.len() == 2 }).await;

    // What is not safe to repeat, too: a call that was not begun is no call.
    let stop = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for number in 0..16 {
        let (client, stop, host) = (client.clone(), stop.clone(), em(&format!("coming-and-going{number}")));
        callers.spawn(async move {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                client.register(registration(host.clone(), load(1, 1, 1))).await.unwrap();
                client.unregister(&host).await.unwrap();
                rounds += 1;
            }
            rounds
        });
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    first.stop().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    stop.store(true, Ordering::Relaxed);
    let rounds: usize = callers.join_all().await.into_iter().sum();
    assert!(rounds > 16, "{rounds}");
}

/// A server at a file, and a proxy in front of it.
async fn behind_proxy(database: &Database, test: &str) -> (Instance, Proxy, String) {
    let folder = scratch(test);
    std::fs::create_dir_all(&folder).unwrap();
    let file = |folder: &PathBuf| folder.join(".s.PGSQL.5432");
    let rm = Instance::start_at(database, options(), ListenAddress::Unix(file(&folder))).await;
    assert_eq!(rm.address, format!("unix:{}", file(&folder).display()));
    let proxy = Proxy::start(&format!("{test}-proxy"), &folder);
    let address = format!("unix://{}", file(&proxy.folder().to_owned()).display());
    (rm, proxy, address)
}

/// An answer that is lost is asked for again, and is the same; only what is not safe to repeat is left to the caller.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_retries_call_with_lost_reply() {
    let database = Database::fresh().await;
    let (rm, proxy, address) = behind_proxy(&database, "lost-answers").await;
    let direct = rm.client.clone();
    let client = RmClient::new(&address, Duration::from_secs(30)).unwrap();
    let host = em("host1");
    client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();

    // So long that it is seen what was done before its answer is there.
    let late = FaultPlan::Slow(Duration::from_millis(700));
    for round in 1..=2 {
        proxy.set_fault_plan(late);
        let (caller, asked) = (client.clone(), request(&host, "hadoop", load(1, 1, 1)));
        let asking = tokio::spawn(async move { caller.request_resource(&asked).await });
        let is_granted = || async { direct.tickets(Some(&host)).await.unwrap().len() == round };
        eventually("it is granted", Duration::from_secs(5), is_granted).await;
        assert!(!asking.is_finished());
        proxy.set_fault_plan(FaultPlan::Fair);
        proxy.cut_all();
        let grant = asking.await.unwrap().granted();
        assert!(lives(&direct, grant.ticket_id).await);
        assert_eq!(assert_invariants(&database, &direct).await, round, "granted once");
    }

    proxy.set_fault_plan(late);
    let (caller, goes) = (client.clone(), host.clone());
    let going = tokio::spawn(async move { caller.unregister(&goes).await });
    eventually("it is gone", Duration::from_secs(5), || async { direct.em(&host).await.is_err() }).await;
    assert!(!going.is_finished());
    proxy.set_fault_plan(FaultPlan::Fair);
    proxy.cut_all();
    let error = going.await.unwrap().unwrap_err();
    assert_eq!((error.code(), error.reason()), (Some(Code::Unavailable), None), "{error}");
    assert!(error.to_string().contains("the connection broke"), "{error}");

    // One that is asked once makes no id, and tells the same.
    client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    let ids = "SELECT count(*) FROM linkis_user_request_id";
    assert_eq!(database.count(ids).await, 2);
    let once = hurried(&address, Duration::from_secs(30));
    proxy.set_fault_plan(late);
    let asked = request(&host, "hadoop", load(1, 1, 1));
    let asking = tokio::spawn(async move { once.request_resource(&asked).await });
    eventually("it is granted", Duration::from_secs(5), || async {
        direct.tickets(Some(&host)).await.unwrap().len() == 1
    })
    .await;
    proxy.set_fault_plan(FaultPlan::Fair);
    proxy.cut_all();
    assert_eq!(asking.await.unwrap().unwrap_err().code(), Some(Code::Unavailable));
    assert_eq!(database.count(ids).await, 2);
}

/// How much memory this process has.
fn memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB")).unwrap();
    resident.trim().parse::<usize>().unwrap() * 1024
}

/// Ten thousand calls at once on one client: with nobody there, all of them wait together and try a few times; otherwise all are
/// answered over one connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_shares_connection_among_10000_calls() {
    const CALLS: usize = 10_000;
    let (_database, rm) = start().await;
    // Nobody listens there.
    let nobody = TcpListener::bind("127.0.0.79:0").await.unwrap().local_addr().unwrap();
    let all = |client: RmClient| {
        let calls = (0..CALLS).map(move |_| client.clone()).map(|client| async move { client.server_info().await });
        calls.collect::<JoinSet<_>>().join_all()
    };
    let settings = ClientSettings { attempts: 4, ..ClientSettings::new(Duration::from_secs(60)) };
    let lost = RmClient::with(&format!("http://{nobody}"), &settings).unwrap();
    let (before, begin) = (memory(), Instant::now());
    let waiting = tokio::spawn(all(lost));
    tokio::time::sleep(Duration::from_millis(300)).await;
    println!("{CALLS} that try again: {} bytes each", memory().saturating_sub(before) / CALLS);
    for answer in waiting.await.unwrap() {
        let error = answer.unwrap_err();
        assert!(error.code() == Some(Code::Unavailable) && error.to_string().contains("refused"), "{error}");
    }
    println!("given up after {:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());

    let both = RmClient::new(&format!("{},{nobody}", rm.address), Duration::from_secs(60)).unwrap();
    let begin = Instant::now();
    assert!(all(both).await.iter().all(Result::is_ok));
    println!("{CALLS} answered in {:?}, {} bytes each", begin.elapsed(), memory().saturating_sub(before) / CALLS);
}

/// Not even by those who repeat nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_age_limit_fails_no_call() {
    let database = Database::fresh().await;
    let mut options = options();
    options.bounds.connection_age = Some(Duration::from_secs(1));
    let rm = Instance::start_with(&database, options).await;
    let clients: Vec<_> = (0..8).map(|_| client(&rm.address)).collect();
    let (done, mut callers) = (Arc::<Done>::default(), JoinSet::new());
    for number in 0..CALLERS {
        callers.spawn(caller(clients[number % clients.len()].clone(), number, done.clone()));
    }
    // Each of them has a new connection several times meanwhile.
    tokio::time::sleep(Duration::from_secs(5)).await;
    done.stop.store(true, Ordering::Relaxed);
    callers.join_all().await;
    let failures = std::mem::take(&mut *done.failures.lock().unwrap());
    assert!(failures.is_empty(), "{} of {}: {failures:?}", failures.len(), done.calls.load(Ordering::Relaxed));
    assert_invariants(&database, &rm.client).await;
}
