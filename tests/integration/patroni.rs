//! Failures of the primary under Patroni, if Patroni, etcd and HAProxy are installed (`tests/patroni/cluster install`,
//! `LINKIS_RM_PATRONI`). Two instances grant meanwhile, one by a URL with all hosts and one through HAProxy.

use std::{
    collections::{BTreeSet, HashSet},
    fs,
    path::PathBuf,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rm_client::{ResultResource, RmClient};
use rustix::process::{Pid, Signal};
use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::harness::*;

/// HAProxy's; the others follow it.
const PORT: u16 = 21_440;

/// Longer than Patroni takes for anything, after its ttl of 20 s.
const LONG: Duration = Duration::from_secs(90);

/// How much of an outage may be ours.
const OURS_MAX: Duration = Duration::from_millis(500);

/// Number of callers of each instance.
const CALLERS: usize = 8;

struct Cluster {
    folder: PathBuf,
    /// Prefix of the nodes' addresses, if each node has its own network.
    network: Option<String>,
}

impl Cluster {
    fn start() -> Self {
        let folder = std::env::temp_dir().join(format!("linkis-rm-patroni-{}", std::process::id()));
        let mut cluster = Self { folder, network: None };
        cluster.script("up", &[&PORT.to_string()]);
        cluster.network = fs::read_to_string(cluster.folder.join("network")).ok().map(|text| text.trim().to_owned());
        cluster
    }

    fn script(&self, what: &str, more: &[&str]) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/patroni/cluster");
        let status = Command::new(script).arg(what).arg(&self.folder).args(more).status().unwrap();
        assert!(status.success(), "{what}");
    }

    /// The address of node 1 or 2.
    fn address(&self, node: u16) -> String {
        self.network.as_ref().map_or_else(|| "127.0.0.1".to_owned(), |network| format!("{network}.{node}"))
    }

    fn options(&self, node: u16) -> PgConnectOptions {
        let (address, port) = (self.address(node), PORT + node);
        format!("postgres://postgres:secret@{address}:{port}/postgres?sslmode=disable").parse().unwrap()
    }

    async fn ask(&self, node: u16, sql: &'static str) -> Option<bool> {
        let asked = async {
            let mut connection = self.options(node).connect().await.ok()?;
            sqlx::query_scalar::<_, bool>(sql).fetch_one(&mut connection).await.ok()
        };
        tokio::time::timeout(Duration::from_secs(1), asked).await.ok().flatten()
    }

    /// The node that takes writes and has a synchronous standby.
    async fn primary(&self) -> u16 {
        let found = Mutex::new(0);
        let is_whole = || async {
            for node in [1, 2] {
                let has_standby =
                    "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))
                    AND NOT pg_is_in_recovery()";
                if self.ask(node, has_standby).await == Some(true) && self.is_known_as_synchronous(3 - node) {
                    *found.lock().unwrap() = node;
                    return true;
                }
            }
            false
        };
        eventually("a primary with a synchronous standby", LONG, is_whole).await;
        found.into_inner().unwrap()
    }

    /// Returns whether Patroni has recorded a node as synchronous standby. It records that late, and refuses a switchover to any other node.
    fn is_known_as_synchronous(&self, node: u16) -> bool {
        let url = format!("http://{}:{}/synchronous", self.address(node), PORT + 10 + node);
        Command::new("curl").args(["-sf", "-m", "1", "-o", "/dev/null", &url]).status().unwrap().success()
    }

    fn signal(&self, file: &str, signal: Signal) {
        // A process that did not start has none.
        let Ok(text) = fs::read_to_string(self.folder.join(file)) else { return };
        let pid = Pid::from_raw(text.lines().next().unwrap().trim().parse().unwrap()).unwrap();
        // It may have ended.
        let _ = rustix::process::kill_process(pid, signal);
    }

    /// Sends a signal to all processes of a node's PostgreSQL.
    fn signal_postgres(&self, node: u16, signal: Signal) {
        let Ok(data) = fs::canonicalize(self.folder.join(format!("data{node}"))) else { return };
        let is_of_it = |process: &fs::DirEntry| fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd == data);
        for process in fs::read_dir("/proc").unwrap().flatten().filter(is_of_it) {
            let pid = process.file_name().to_str().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
            // It may have ended.
            let _ = pid.map(|pid| rustix::process::kill_process(pid, signal));
        }
    }

    fn signal_patroni(&self, node: u16, signal: Signal) {
        self.signal(&format!("patroni{node}.pid"), signal);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in [1, 2] {
            self.signal_postgres(node, Signal::CONT);
            self.signal_patroni(node, Signal::CONT);
        }
        self.script("down", &[]);
        // Its logs have the reason.
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// A fault of the cluster.
#[derive(Clone, Copy, Debug)]
enum Fault {
    MachineKilled,
    PostmasterKilled,
    Switchover,
    StandbyKilled,
    /// The node gets and sends no packets.
    CutOff,
    /// It reaches neither etcd nor its standby, and callers reach it.
    Split,
    /// The node freezes.
    Frozen,
    /// PostgreSQL continues, and believes that it is the primary.
    PatroniHung,
}

impl Fault {
    const ALL: [Self; 8] = [
        Self::Switchover,
        Self::StandbyKilled,
        Self::PostmasterKilled,
        Self::MachineKilled,
        Self::CutOff,
        Self::Split,
        Self::Frozen,
        Self::PatroniHung,
    ];

    fn is_of_the_network(self) -> bool {
        matches!(self, Self::CutOff | Self::Split)
    }

    /// Whether another takes the writes then.
    fn moves_the_primary(self) -> bool {
        !matches!(self, Self::StandbyKilled)
    }

    fn begin(self, cluster: &Cluster, primary: u16) {
        let standby = 3 - primary;
        match self {
            Self::MachineKilled => {
                cluster.signal_patroni(primary, Signal::KILL);
                cluster.signal_postgres(primary, Signal::KILL);
            }
            Self::PostmasterKilled => cluster.signal(&format!("data{primary}/postmaster.pid"), Signal::KILL),
            Self::Switchover => {
                let rest = format!("http://{}:{}/switchover", cluster.address(primary), PORT + 10 + primary);
                let body = format!(r#"{{"leader":"n{primary}","candidate":"n{standby}"}}"#);
                // It answers when it is done.
                let ask = ["-s", "-o", "/dev/null", "-XPOST", "-d", &body, &rest];
                let mut asked = Command::new("curl").args(ask).spawn().unwrap();
                std::thread::spawn(move || asked.wait());
            }
            Self::StandbyKilled => {
                cluster.signal_patroni(standby, Signal::KILL);
                cluster.signal_postgres(standby, Signal::KILL);
            }
            Self::CutOff => cluster.script("cut", &[&primary.to_string()]),
            Self::Split => cluster.script("split", &[&primary.to_string()]),
            Self::Frozen => {
                cluster.signal_patroni(primary, Signal::STOP);
                cluster.signal_postgres(primary, Signal::STOP);
            }
            Self::PatroniHung => cluster.signal_patroni(primary, Signal::STOP),
        }
    }

    fn end(self, cluster: &Cluster, primary: u16) {
        match self {
            Self::MachineKilled => cluster.script("node", &[&primary.to_string()]),
            Self::StandbyKilled => cluster.script("node", &[&(3 - primary).to_string()]),
            Self::CutOff | Self::Split => cluster.script("heal", &[&primary.to_string()]),
            Self::Frozen => {
                cluster.signal_postgres(primary, Signal::CONT);
                cluster.signal_patroni(primary, Signal::CONT);
            }
            Self::PatroniHung => cluster.signal_patroni(primary, Signal::CONT),
            Self::PostmasterKilled | Self::Switchover => {}
        }
    }
}

/// Replies to the callers of one instance.
#[derive(Default)]
struct ClientReplies {
    granted: Mutex<Vec<(Uuid, Instant)>>,
    unknown: AtomicUsize,
    failed: AtomicUsize,
}

impl ClientReplies {
    /// The longest time without a grant since `from`, and the first grant after `at`.
    fn outage(&self, from: Instant, at: Instant) -> (Duration, Option<Duration>) {
        let mut granted: Vec<Instant> = self.granted.lock().unwrap().iter().map(|(_, at)| *at).collect();
        granted.sort();
        let gaps = granted.windows(2).filter(|pair| pair[1] > from).map(|pair| pair[1] - pair[0]);
        (gaps.max().unwrap_or_default(), granted.iter().find(|grant| **grant > at).map(|grant| *grant - at))
    }
}

/// Waits until each instance has granted some more tickets.
async fn more_grants(got: &[Arc<ClientReplies>; 2]) {
    let granted = || got.each_ref().map(|got| got.granted.lock().unwrap().len());
    let before = granted();
    let is_more = async || granted().iter().zip(before).all(|(now, before)| *now >= before + 100);
    eventually("more grants", LONG, is_more).await;
}

/// Requests tickets and releases most of them.
async fn ask_on(client: RmClient, user: String, got: Arc<ClientReplies>, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        match client.request_resource(&request(&em("host1"), &user, load(0, 1, 1))).await {
            Ok(ResultResource::Available(grant)) => {
                got.granted.lock().unwrap().push((grant.ticket_id, Instant::now()));
                // Tickets without a release expire.
                let _ = client.resource_released(&release(&grant, &user)).await;
            }
            Ok(ResultResource::NotEnough(refusal)) => panic!("{refusal:?}"),
            Err(error) => {
                let is_unknown = error.reason().as_deref() == Some("COMMIT_UNKNOWN");
                let count = if is_unknown { &got.unknown } else { &got.failed };
                count.fetch_add(1, Ordering::Relaxed);
                // Shorter than the service advises, because the test measures the outage.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

/// Waits until a host accepts writes that did not before. Each host has its own connection, so that a silent one delays no other.
async fn writable(hosts: Vec<PgConnectOptions>, is_new: impl Fn(i64) -> bool + Copy + Send + 'static) -> Instant {
    const TIMELINE: &str = "SELECT CASE WHEN pg_is_in_recovery() THEN 0
        ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint END";
    let mut asking = JoinSet::new();
    for options in hosts {
        asking.spawn(async move {
            let mut kept: Option<PgConnection> = None;
            loop {
                let asked = async {
                    if kept.is_none() {
                        kept = Some(options.connect().await.ok()?);
                    }
                    sqlx::query_scalar::<_, i64>(TIMELINE).fetch_one(kept.as_mut()?).await.ok()
                };
                match tokio::time::timeout(Duration::from_secs(2), asked).await.ok().flatten() {
                    Some(timeline) if is_new(timeline) => return Instant::now(),
                    Some(_) => {}
                    None => kept = None,
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
    }
    let first = tokio::time::timeout(LONG, asking.join_next()).await.expect("no host takes writes");
    first.unwrap().unwrap()
}

async fn timeline(of: &PgConnectOptions) -> i64 {
    let mut connection = of.connect().await.unwrap();
    let sql = "SELECT ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint";
    sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn patroni_primary_loss_keeps_acknowledged_grants() {
    if std::env::var_os("LINKIS_RM_PATRONI").is_none() {
        eprintln!("skipped: no LINKIS_RM_PATRONI; tests/patroni/cluster install gets what it needs");
        return;
    }
    let cluster = Cluster::start();
    let first = cluster.primary().await;
    let hosts = [1, 2].map(|node| format!("{}:{}", cluster.address(node), PORT + node)).join(",");
    let all = format!("postgres://postgres:secret@{hosts}/postgres?target_session_attrs=read-write&sslmode=disable");
    let proxied = format!("postgres://postgres:secret@127.0.0.1:{PORT}/postgres?sslmode=disable");
    let leads = || async { proxied.parse::<PgConnectOptions>().unwrap().connect().await.is_ok() };
    eventually("HAProxy leads to it", LONG, leads).await;
    let lock_ttl = Duration::from_secs(60);
    let mut instances = vec![];
    for url in [&all, &proxied] {
        let options = settings().with_time("--lock-ttl", lock_ttl);
        instances.push(Instance::start_on(url, options, ANY_PORT).await);
    }
    instances[0].client.register(registration(em("host1"), load(0, 1_000_000, 1_000_000))).await.unwrap();
    println!("the first primary is node {first}");
    println!("| fault | no grants for: all hosts, HAProxy | of it ours | granted | lost | unknown | failed |");
    let (mut all_acknowledged, mut late) = (HashSet::new(), vec![]);
    if cluster.network.is_none() {
        println!("network faults are skipped: they need root");
    }
    for fault in Fault::ALL.into_iter().filter(|fault| cluster.network.is_some() || !fault.is_of_the_network()) {
        let primary = cluster.primary().await;
        let before = timeline(&cluster.options(primary)).await;
        let stop = Arc::<AtomicBool>::default();
        let got = [Arc::<ClientReplies>::default(), Arc::default()];
        let mut asking = vec![];
        for (n, (instance, got)) in instances.iter().zip(&got).enumerate() {
            for user in 0..CALLERS {
                let user = format!("u{n}-{user}");
                asking.push(tokio::spawn(ask_on(instance.client.clone(), user, got.clone(), stop.clone())));
            }
        }
        more_grants(&got).await;
        let begun = Instant::now();
        fault.begin(&cluster, primary);
        let nodes = vec![cluster.options(1), cluster.options(2)];
        let proxy = vec![proxied.parse::<PgConnectOptions>().unwrap()];
        let is_new = move |timeline| !fault.moves_the_primary() || timeline > before;
        let (at_all, at_proxy) = tokio::join!(writable(nodes, is_new), writable(proxy, is_new));
        let granted =
            || async { got.iter().zip([at_all, at_proxy]).all(|(got, at)| got.outage(begun, at).1.is_some()) };
        eventually("grants again", LONG, granted).await;
        more_grants(&got).await;
        fault.end(&cluster, primary);
        more_grants(&got).await;
        stop.store(true, Ordering::Relaxed);
        for asked in asking {
            asked.await.unwrap();
        }
        let outages: Vec<_> = got.iter().zip([at_all, at_proxy]).map(|(got, at)| got.outage(begun, at)).collect();
        let acknowledged: BTreeSet<Uuid> = got
            .iter()
            .flat_map(|got| got.granted.lock().unwrap().iter().map(|(id, _)| *id).collect::<Vec<_>>())
            .collect();
        let now = cluster.primary().await;
        let lost = lost(&cluster.options(now), &acknowledged).await;
        let sum = |of: fn(&ClientReplies) -> &AtomicUsize| {
            got.iter().map(|got| of(got).load(Ordering::Relaxed)).sum::<usize>()
        };
        let ours: Vec<_> = outages.iter().map(|(_, ours)| ours.unwrap()).collect();
        println!(
            "| {fault:?} | {:.1?}, {:.1?} | {:.0?}, {:.0?} | {} | {lost} | {} | {} |",
            outages[0].0,
            outages[1].0,
            ours[0],
            ours[1],
            acknowledged.len(),
            sum(|got| &got.unknown),
            sum(|got| &got.failed)
        );
        assert_eq!(lost, 0, "{fault:?}");
        // Without its standby, a primary that takes writes commits none until Patroni has let go of it.
        if fault.moves_the_primary() && ours.iter().any(|ours| *ours >= OURS_MAX) {
            late.push((fault, ours));
        }
        assert_eq!(now == primary, !fault.moves_the_primary(), "{fault:?}");
        all_acknowledged.extend(acknowledged);
    }
    let now = cluster.primary().await;
    let database = Database::from(cluster.options(now));
    let live = "SELECT count(*) FROM linkis_user_resource_meta_data";
    eventually("tickets without a received reply expire in time", LONG + lock_ttl, || async {
        database.count(live).await == 0
    })
    .await;
    assert_invariants(&database, &instances[0].client).await;
    println!("{} grants, and none is lost", all_acknowledged.len());
    assert!(late.is_empty(), "more than {OURS_MAX:?} of the outage was ours: {late:?}");
    for instance in instances {
        instance.stop().await;
    }
}

/// Returns the number of these tickets without a history line.
async fn lost(at: &PgConnectOptions, acknowledged: &BTreeSet<Uuid>) -> i64 {
    let mut connection = at.connect().await.unwrap();
    let got: Vec<Uuid> = acknowledged.iter().copied().collect();
    let sql = "SELECT count(*) FROM unnest($1::uuid[]) AS got (ticket_id)
        WHERE NOT EXISTS (SELECT FROM linkis_resource_action_record WHERE ticket_id = got.ticket_id)";
    sqlx::query_scalar(sql).bind(&got).fetch_one(&mut connection).await.unwrap()
}
