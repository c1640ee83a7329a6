//! A database with a standby: instances while no host accepts writes, and after a promotion.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rm_client::{ClientError, ClientSettings, Follower, ResultResource, RmClient, check_health};
use rm_proto::v1::FollowActionsResponse;
use sqlx::Row as _;
use tokio::net::UnixListener;
use tonic::Code;
use uuid::Uuid;

use crate::{
    harness::*,
    metrics::{get, scrape},
    replication_pair::{Node, Pair},
};

/// Whether the health service reports that the instance serves.
async fn serves(address: &str, service: &str) -> bool {
    let got = check_health(address, &ClientSettings::once(LONG), service).await.unwrap();
    got.into_iter().all(|(_, serves)| serves.unwrap())
}

/// Asserts an error that names the read-only database and a time to retry.
#[track_caller]
fn assert_unavailable<T: std::fmt::Debug>(answer: Result<T, ClientError>, why: &str) {
    let error = answer.unwrap_err();
    assert!(error.code() == Some(Code::Unavailable) && error.to_string().contains(why), "{error}");
    assert!(error.retry_after().is_some() && error.reason().as_deref() == Some("DATABASE_UNAVAILABLE"), "{error:?}");
}

async fn instance(url: &str, settings: Settings) -> Instance {
    Instance::start_on(url, settings, ANY_PORT).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_on_standby_serves_after_promotion() {
    let pair = Pair::start("waits", false).await;
    let first = Instance::start(&pair.database(&pair.primary)).await;
    first.client.register(registration(em("host1"), load(64, 16, 20))).await.unwrap();
    first.stop().await;
    let ems = "SELECT count(*) FROM linkis_em_resource_meta_data";
    eventually("the standby has the EM", LONG, || async { pair.standby.count(ems).await == Some(1) }).await;

    let process = Process::start_unready(&pair.standby.url());
    let (address, http_address) = (process.address.clone(), process.http());
    let in_recovery = (503, "not ready: the database is in recovery, a standby\n".to_owned());
    eventually("readyz returns the reason", LONG, || async { get(http_address, "/readyz").await == in_recovery }).await;
    let client = client(&address);
    // For writes and for reads.
    assert_unavailable(client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await, "is in recovery");
    assert_unavailable(client.em(&em("host1")).await, "is in recovery");
    assert_unavailable(client.server_info().await, "is in recovery");
    assert!(!serves(&address, "").await && serves(&address, "liveness").await);
    assert_eq!(get(http_address, "/livez").await.0, 200);

    pair.primary.kill().await;
    pair.standby.promote().await;
    eventually("the instance serves", LONG, || async { client.em(&em("host1")).await.is_ok() }).await;
    client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    eventually("health says so", LONG, || async { serves(&address, "").await }).await;
    assert_eq!(get(http_address, "/readyz").await, (200, "ready\n".to_owned()));

    // A host that is set to take no writes is no better; and no connection has to break for that.
    pair.standby.run("ALTER SYSTEM SET default_transaction_read_only = on").await;
    pair.standby.run("SELECT pg_reload_conf()").await;
    let takes_none = (503, "not ready: the database is set to take no writes\n".to_owned());
    eventually("readyz returns the reason", LONG, || async { get(http_address, "/readyz").await == takes_none }).await;
    assert_unavailable(client.em(&em("host1")).await, "is set to take no writes");
    assert!(!serves(&address, "").await && serves(&address, "liveness").await);
    pair.standby.run("ALTER SYSTEM RESET default_transaction_read_only").await;
    pair.standby.run("SELECT pg_reload_conf()").await;
    eventually("the instance serves", LONG, || async { client.em(&em("host1")).await.is_ok() }).await;
    process.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_url_file_change_is_followed() {
    let pair = Pair::start("named", false).await;
    let file = scratch("named-url");
    let name = |node: &Node| std::fs::write(&file, node.url()).unwrap();
    name(&pair.primary);
    let instance = Instance::start_by(settings().with("--database-url-file", file.display()), ANY_PORT, ANY_PORT).await;
    instance.client.register(registration(em("host1"), load(64, 16, 20))).await.unwrap();
    let ems = "SELECT count(*) FROM linkis_em_resource_meta_data";
    eventually("the standby has the EM", LONG, || async { pair.standby.count(ems).await == Some(1) }).await;
    // An equal number of hosts, with another host: the probe of the earlier one no longer counts.
    std::fs::write(&file, "no URL").unwrap();
    name(&pair.standby);
    let in_recovery = (503, "not ready: the database is in recovery, a standby\n".to_owned());
    eventually("readyz returns the reason", LONG, || async { get(instance.http, "/readyz").await == in_recovery })
        .await;
    assert_unavailable(instance.client.em(&em("host1")).await, "is in recovery");
    pair.standby.promote().await;
    eventually("the instance serves", LONG, || async { instance.client.em(&em("host1")).await.is_ok() }).await;
    let grant = instance.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    let tickets = "SELECT count(*) FROM linkis_user_resource_meta_data";
    assert_eq!((pair.standby.count(tickets).await, pair.primary.count(tickets).await), (Some(1), Some(0)), "{grant:?}");
    instance.stop().await;
    std::fs::remove_file(file).unwrap();
}

/// The lines of a log that warn.
type Warnings = Arc<Mutex<Vec<String>>>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_database_logs_one_warning() {
    let pair = Pair::start("warns", false).await;
    let log = Warnings::default();
    let lines = log.clone();
    let url = pair.primary.url();
    let mut command = std::process::Command::new(*PROGRAM);
    let process =
        Process::start_command(command.args(["--database-url", &url, "--http-listen", ANY_PORT]), move |line| {
            lines.lock().unwrap().push(line);
        });
    process.client.register(registration(em("host1"), load(64, 16, 20))).await.unwrap();
    pair.primary.run("ALTER SYSTEM SET default_transaction_read_only = on").await;
    pair.primary.run("SELECT pg_reload_conf()").await;
    let warned = || async {
        let lines = log.lock().unwrap();
        lines.iter().any(|line| line.contains("no database host accepts writes"))
    };
    eventually("it warns", LONG, warned).await;
    // Callers and tasks need the database repeatedly.
    for _ in 0..20 {
        assert_unavailable(
            process.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await,
            "is set to take no writes",
        );
    }
    let errors = r#"linkis_rm_task_errors_total{task="silence"}"#;
    let failed_twice = async || scrape(process.http()).await[errors] >= 2.0;
    eventually("a task of each second fails twice", LONG, failed_twice).await;
    let got = log.lock().unwrap().clone();
    let warnings: Vec<_> = got.iter().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
    // A running call may fail.
    let of_listening = warnings.iter().filter(|line| line.contains("cannot listen for freed capacity")).count();
    assert!(of_listening <= 1 && warnings.len() <= 6, "{warnings:#?}");
    assert_eq!(warnings.iter().filter(|line| line.contains("accepts writes")).count(), 1, "{warnings:#?}");
    assert_eq!(process.terminate(), Some(0));
}

/// Positions of the waiting requests, by ticket.
async fn positions(database: &Database) -> BTreeMap<Uuid, Vec<u8>> {
    let rows = sqlx::query("SELECT ticket_id, position FROM linkis_resource_waiting").fetch_all(&database.pool).await;
    rows.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promotion_keeps_wait_queue_positions() {
    let count = crowd_of(200);
    let (pair, amount) = (Pair::start("line", true).await, i64::try_from(count).unwrap());
    // One caller has a share of the line, not all of it.
    let instance = instance(&pair.url(), settings().with("--max-waiting", count * 2)).await;
    let host = em("host1");
    instance.client.register(registration(host.clone(), load(amount, amount, amount))).await.unwrap();
    let tenth = request(&host, "alice", load(amount / 10, amount / 10, amount / 10));
    let mut held = vec![];
    for _ in 0..10 {
        held.push(instance.client.request_resource(&tenth).await.granted());
    }
    // One connection cannot have that many calls.
    let long = LONG * u32::try_from(1 + count / 200).unwrap();
    let clients: Vec<_> = (0..=count / 500).map(|_| hurried(&instance.address, long * 2)).collect();
    let waiting: Vec<_> = (0..count)
        .map(|nth| {
            let (client, mut ask) = (clients[nth / 500].clone(), request(&host, "bob", load(1, 1, 1)));
            ask.wait_timeout = Duration::from_secs(600);
            tokio::spawn(async move { client.request_resource(&ask).await })
        })
        .collect();
    let (before, after) = (pair.database(&pair.primary), pair.database(&pair.standby));
    eventually("all wait", long, || async { positions(&before).await.len() == count }).await;
    let queued = positions(&before).await;

    pair.primary.kill().await;
    pair.standby.promote().await;
    eventually("the instance serves", LONG, || async { instance.client.em(&host).await.is_ok() }).await;
    assert!(positions(&after).await == queued, "all positions are unchanged");
    let mut line: Vec<_> = queued.iter().map(|(ticket, position)| (position.clone(), *ticket)).collect();
    line.sort();
    for (tenth, held) in held.iter().enumerate() {
        instance.client.resource_released(&release(held, "alice")).await.unwrap();
        let behind: HashSet<Uuid> = line[(tenth + 1) * count / 10..].iter().map(|(_, ticket)| *ticket).collect();
        eventually("a tenth is granted", LONG, || async { positions(&after).await.len() == behind.len() }).await;
        let left: HashSet<Uuid> = positions(&after).await.into_keys().collect();
        assert_eq!(left, behind, "earlier entries are granted first");
    }
    let mut granted = HashSet::new();
    for answer in waiting {
        granted.insert(answer.await.unwrap().granted().ticket_id);
    }
    assert_eq!(granted, queued.keys().copied().collect::<HashSet<_>>());
    assert_invariants(&after, &instance.client).await;
    instance.stop().await;
}

/// Replies to callers while a database host fails.
#[derive(Default)]
struct Ledger {
    granted: Mutex<Vec<Uuid>>,
}

/// Requests without a release, until `stop`.
async fn ask_on(client: RmClient, user: String, ledger: Arc<Ledger>, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        match client.request_resource(&request(&em("host1"), &user, load(0, 1, 1))).await {
            Ok(ResultResource::Available(grant)) => {
                ledger.granted.lock().unwrap().push(grant.ticket_id);
            }
            Ok(ResultResource::NotEnough(refusal)) => panic!("{refusal:?}"),
            Err(error) => pause_as_advised(&error).await,
        }
    }
}

/// Failure of the primary.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// The process is killed.
    Killed,
    /// The process freezes, and continues later.
    Frozen,
}

/// Every acknowledged grant is in the promoted database; a ticket without a reply expires.
async fn lose_the_primary(name: &str, loss: Loss) {
    let pair = Pair::start(name, true).await;
    let lock_ttl = Duration::from_secs(3);
    let instance = instance(&pair.url(), settings().with_time("--lock-ttl", lock_ttl)).await;
    instance.client.register(registration(em("host1"), load(0, 1_000_000, 1_000_000))).await.unwrap();
    let (ledger, stop) = (Arc::<Ledger>::default(), Arc::<AtomicBool>::default());
    let asking: Vec<_> = (0..8)
        .map(|user| tokio::spawn(ask_on(instance.client.clone(), format!("u{user}"), ledger.clone(), stop.clone())))
        .collect();
    let granted = |ledger: &Ledger| ledger.granted.lock().unwrap().len();
    eventually("grants", LONG, || async { granted(&ledger) > 100 }).await;
    match loss {
        Loss::Killed => pair.primary.kill().await,
        Loss::Frozen => pair.primary.freeze(true),
    }
    pair.standby.promote().await;
    let before = granted(&ledger);
    eventually("grants again", LONG, || async { granted(&ledger) > before + 100 }).await;
    if loss == Loss::Frozen {
        // Both hosts accept writes now; the promoted one is used.
        pair.primary.freeze(false);
        let more = granted(&ledger);
        eventually("grants again", LONG, || async { granted(&ledger) > more + 100 }).await;
    }
    stop.store(true, Ordering::Relaxed);
    for asked in asking {
        asked.await.unwrap();
    }
    let database = pair.database(&pair.standby);
    let got: HashSet<Uuid> = ledger.granted.lock().unwrap().iter().copied().collect();
    let stored: Vec<Uuid> = database
        .column("SELECT DISTINCT ticket_id FROM linkis_resource_action_record WHERE ticket_id IS NOT NULL")
        .await;
    let stored: HashSet<Uuid> = stored.into_iter().collect();
    let lost = got.difference(&stored).count();
    assert_eq!(lost, 0, "acknowledged grants of {} are lost", got.len());
    let live = "SELECT count(*) FROM linkis_user_resource_meta_data";
    eventually("all tickets expire", LONG + lock_ttl, || async { database.count(live).await == 0 }).await;
    assert_invariants(&database, &instance.client).await;
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn primary_kill_loses_no_acknowledged_grant() {
    lose_the_primary("killed", Loss::Killed).await;
}

/// No call waits for the reply of a silent host when another accepts writes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_primary_is_left_after_promotion() {
    lose_the_primary("frozen", Loss::Frozen).await;
}

/// The next message of a follower, after any number of interruptions.
async fn next_message(follower: &mut Follower) -> FollowActionsResponse {
    loop {
        match follower.next().await {
            Ok(message) => return message,
            Err(error) => {
                assert_eq!(error.code(), Some(Code::Unavailable), "{error:?}");
                pause_as_advised(&error).await;
            }
        }
    }
}

/// History ids that were used for nothing, and not replicated, are used again by the promoted host. A follower must not have passed
/// them, or it would miss lines.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promotion_loses_no_followed_line() {
    let pair = Pair::start("positions", true).await;
    let instance = instance(&pair.url(), settings()).await;
    instance.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    pair.separate().await;
    let undone = "BEGIN; SELECT nextval('linkis_resource_action_record_id_seq') FROM generate_series(1, 200); ROLLBACK";
    pair.primary.run(undone).await;
    let mut follower = instance.client.follow_actions("");
    let beginning = tokio::spawn(async move {
        let begun = next_message(&mut follower).await;
        (follower, begun)
    });
    let waiting = "SELECT count(*) FROM pg_stat_activity
        WHERE wait_event = 'SyncRep' AND query LIKE '-- session::durable%'";
    let begins = || async { beginning.is_finished() || pair.primary.count(waiting).await > Some(0) };
    eventually("the follower begins", LONG, begins).await;

    pair.primary.kill().await;
    pair.standby.promote().await;
    let (mut follower, begun) = tokio::time::timeout(LONG, beginning).await.unwrap().unwrap();
    assert!(begun.actions.is_empty(), "{begun:?}");
    let mut granted = HashSet::new();
    while granted.len() < 50 {
        let answer = instance.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await;
        match answer {
            Ok(ResultResource::Available(grant)) => {
                granted.insert(grant.ticket_id.to_string());
            }
            Ok(refusal) => panic!("{refusal:?}"),
            Err(error) => assert_eq!(error.code(), Some(Code::Unavailable), "{error:?}"),
        }
    }
    while !granted.is_empty() {
        let got = tokio::time::timeout(LONG, next_message(&mut follower)).await.expect("a message in time");
        for line in &got.actions {
            granted.remove(&line.ticket_id);
        }
        let position = got.position.rsplit('-').next().unwrap().parse::<i64>().unwrap();
        let last = "SELECT coalesce(max(id), 0) FROM linkis_resource_action_record";
        let is_behind = position >= pair.standby.count(last).await.unwrap();
        assert!(granted.is_empty() || !is_behind, "{} lines are missing at {position}", granted.len());
    }
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_or_silent_host_delays_no_call() {
    let database = Database::fresh().await;
    let silent = scratch("silent-host");
    std::fs::create_dir_all(&silent).unwrap();
    let listener = UnixListener::bind(silent.join(".s.PGSQL.5432")).unwrap();
    let knocked = Arc::<AtomicUsize>::default();
    let count = knocked.clone();
    let holding = tokio::spawn(async move {
        let mut held = vec![];
        loop {
            held.push(listener.accept().await.unwrap());
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    let hosts = [
        "/nonexistent".into(),
        silent.display().to_string(),
        database.options.get_socket().unwrap().display().to_string(),
    ];
    let name = database.options.get_database().unwrap();
    let url = format!("postgres://postgres@/{name}?host={}&target_session_attrs=primary", hosts.join(","));
    let begun = Instant::now();
    let instance = instance(&url, settings()).await;
    instance.client.register(registration(em("host1"), load(64, 64, 64))).await.unwrap();
    for _ in 0..20 {
        instance.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    }
    // One probe per second, although the instance has dozens of connections.
    let knocks = knocked.load(Ordering::Relaxed);
    let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap();
    assert!(knocks <= 1 + seconds, "{knocks} in {seconds} s");
    instance.stop().await;
    // A command finds the host, too.
    let mut migrate = std::process::Command::new(*PROGRAM);
    let migrated = ran(migrate.arg("migrate").env("DATABASE_URL", &url).env_remove("LINKIS_RM_DATA_DIR"));
    assert_eq!(migrated.code, Some(0), "{}", migrated.err);
    holding.abort();
    std::fs::remove_dir_all(silent).unwrap();
}
