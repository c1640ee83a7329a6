//! One PostgreSQL for all tests, a fresh database for each, servers on free ports, and what tests say often.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    future::Future,
    io::{BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ClientError, ClientSettings, ResourceRequest, ResultResource, RmClient},
    domain::{
        adopt::AdoptTicket,
        em::{Em, EmInstance},
        limit::{CountingRule, LabelPattern, LabelSet, Limits, Rule, ScopeUsage},
        limit_mode::LimitMode,
        name::{Labels, Name},
        operation::{ConfirmTicket, Grant, RegisterEm, ReleaseTicket},
        policy::Policy,
        refusal::Refusal,
        resource::{Dimension, Resource},
        scope::ScopeHoldings,
        ticket::{EngineInstance, Ticket, TicketState},
    },
    external::allowed::AllowedHosts,
    metrics::Metrics,
    server::{Options, SecuritySettings, Server, ServerExit, listen, listen_http},
    service::heartbeat::LivenessTimeouts,
    store::{
        embedded::{EmbeddedPostgres, EmbeddedSettings},
        target::ConnectTarget,
    },
    transport::{
        edge::{EdgeBounds, ListenAddress},
        resource_manager::RequestTimeouts,
    },
};
use rustix::process::{Pid, Signal};
use sqlx::{
    ConnectOptions as _, PgConnection, PgExecutor,
    postgres::{PgConnectOptions, PgPool},
};
use tokio::{sync::oneshot, task::JoinHandle};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::{citus_cluster::Cell, proxy::Proxy};

pub const GB: i64 = 1 << 30;

/// How many a crowd is: as many as the suite has time for, unless `LINKIS_RM_CROWD` says otherwise.
pub fn crowd_of(few: usize) -> usize {
    std::env::var("LINKIS_RM_CROWD").map_or(few, |text| text.parse().unwrap())
}

/// Tells that something is skipped for want of a tool. Where `LINKIS_RM_TOOLS` names it, it was there when the tests began, and it fails.
pub fn skip_without(tool: &str, how: &str) {
    let there = std::env::var("LINKIS_RM_TOOLS").unwrap_or_default();
    assert!(!there.split(' ').any(|named| named == tool), "{tool} is there, says LINKIS_RM_TOOLS, and is not found");
    println!("SKIPPED: there is no {tool}: {how}");
}

/// The PostgreSQL of this test run; it ends with this process.
fn postgres() -> &'static PgConnectOptions {
    static OPTIONS: OnceLock<PgConnectOptions> = OnceLock::new();
    OPTIONS.get_or_init(|| {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        // A thread for the whole run: a test's own runtime ends with the test.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async {
                let data_dir = scratch("shared");
                remove_at_end(&data_dir);
                let settings = EmbeddedSettings { data_dir, server_options: vec![] };
                let postgres = EmbeddedPostgres::start(settings).await.unwrap();
                sender.send(postgres.connect_options()).unwrap();
                panic!("PostgreSQL ended by itself: {}", postgres.died().await);
            })
        });
        receiver.recv().expect("a PostgreSQL for the tests")
    })
}

/// Removes a folder once this process and its PostgreSQL are gone.
pub fn remove_at_end(folder: &Path) {
    let script = r#"(while [ -d "/proc/$1" ] || [ -e "$2/data/postmaster.pid" ]; do sleep 0.2; done; rm -rf "$2") &"#;
    let pid = std::process::id().to_string();
    let mut watcher = Command::new("sh");
    watcher.args(["-c", script, "sh", &pid]).arg(folder).process_group(0);
    assert!(watcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
}

/// A folder of this run; those of runs that are over are removed.
pub fn scratch(name: &str) -> PathBuf {
    const PREFIX: &str = "linkis-rm-test-";
    let temp = std::env::temp_dir();
    for entry in fs::read_dir(&temp).unwrap().flatten() {
        let file_name = entry.file_name().to_string_lossy().into_owned();
        let pid = file_name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !PathBuf::from(format!("/proc/{pid}")).exists()) {
            // Another user's, or just being removed by another run: not ours to care for.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    temp.join(format!("{PREFIX}{}-{name}", std::process::id()))
}

/// A database of its own. With `LINKIS_RM_CITUS_SUITE` set, it is a cell on Citus, and what a test looks up by itself is asked of its worker.
pub struct Database {
    pub options: PgConnectOptions,
    pub pool: PgPool,
    cell: Option<Cell>,
}

impl From<PgConnectOptions> for Database {
    fn from(options: PgConnectOptions) -> Self {
        Self { pool: PgPool::connect_lazy_with(options.clone()), options, cell: None }
    }
}

impl Database {
    pub async fn fresh() -> Self {
        if std::env::var_os("LINKIS_RM_CITUS_SUITE").is_some() {
            let cell = Cell::make().await.expect("an installed Citus");
            return Self { cell: Some(cell.clone()), ..cell.database().await };
        }
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let mut admin = postgres().connect().await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut admin).await.unwrap();
        postgres().clone().database(&name).into()
    }

    /// Where a service finds it.
    pub fn target(&self) -> ConnectTarget {
        self.cell.as_ref().map_or_else(|| self.options.clone().into(), Cell::target)
    }

    /// The same database, reached through a proxy; what a test looks up by itself goes past it.
    pub fn behind_proxy(&self, name: &str) -> (Proxy, Self) {
        let proxy = Proxy::start(name, self.options.get_socket().expect("not a cell"));
        let options = self.options.clone().socket(proxy.folder());
        (proxy, Self { options, pool: self.pool.clone(), cell: None })
    }

    /// For a process of its own. Of a cell, behind a `#` that no database has any use for.
    pub fn url(&self) -> String {
        if let Some(cell) = &self.cell {
            return format!("{}#{}", cell.url(), cell.name);
        }
        url(self.options.get_socket().unwrap(), self.options.get_database().unwrap())
    }

    pub async fn connect(&self) -> PgConnection {
        self.options.connect().await.unwrap()
    }

    pub async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Holds an EM by hand, as an operator may without the service: calls on it wait until [`Self::release_holds`].
    pub async fn hold_by_hand(&self, em: &EmInstance) {
        insert_hold(&self.pool, em).await;
    }

    /// Somebody's transaction that holds an EM: calls on it wait until that ends.
    pub async fn transaction_that_holds(&self, em: &EmInstance) -> PgConnection {
        let mut holder = self.connect().await;
        sqlx::raw_sql("BEGIN").execute(&mut holder).await.unwrap();
        insert_hold(&mut holder, em).await;
        holder
    }

    /// Lets go of all EMs and users that are held, by whomever.
    pub async fn release_holds(&self) {
        sqlx::raw_sql("DELETE FROM linkis_resource_lock").execute(&self.pool).await.unwrap();
    }
}

async fn insert_hold(executor: impl PgExecutor<'_>, em: &EmInstance) {
    let hold = "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance) VALUES ('em', $1, $2)";
    let hold = sqlx::query(hold).bind(em.application_name.as_str()).bind(em.instance.as_str());
    hold.execute(executor).await.unwrap();
}

/// How a process reaches a database: the socket's folder goes into the query, because its path is no host name.
pub fn url(socket: &Path, database: &str) -> String {
    format!("postgres://postgres@localhost:5432/{database}?host={}", socket.display())
}

/// A server in this process.
pub struct Instance {
    pub client: RmClient,
    pub address: String,
    /// Where metrics and health are.
    pub http: SocketAddr,
    pub metrics: Metrics,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<ServerExit>,
}

pub fn options() -> Options {
    let times = RequestTimeouts {
        lock_ttl: Duration::from_secs(600),
        request_timeout: Duration::from_secs(30),
        max_wait: Duration::from_secs(600),
    };
    let liveness = LivenessTimeouts::DEFAULT;
    let (history, drain_timeout) = (Duration::from_secs(3600), Duration::from_secs(5));
    let (security, external_hosts) = (SecuritySettings::OPEN, AllowedHosts::parse("127.0.0.1").unwrap());
    let (shutdown_delay, committers, bounds) = (Duration::ZERO, 1, EdgeBounds::DEFAULT);
    let (standby, migrates) = (None, true);
    Options {
        times,
        liveness,
        history,
        drain_timeout,
        shutdown_delay,
        committers,
        bounds,
        security,
        external_hosts,
        standby,
        migrates,
    }
}

/// Any free port of this machine.
pub const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

impl Instance {
    pub async fn start(database: &Database) -> Self {
        Self::start_with(database, options()).await
    }

    pub async fn start_with(database: &Database, options: Options) -> Self {
        Self::start_at(database, options, ANY_PORT.into()).await
    }

    pub async fn start_at(database: &Database, options: Options, place: ListenAddress) -> Self {
        Self::start_on(database.target(), options, place).await
    }

    /// The same on whatever a URL names.
    pub async fn start_on(database: impl Into<ConnectTarget>, options: Options, place: ListenAddress) -> Self {
        Self::start_with_http(database, options, place, ANY_PORT).await
    }

    pub async fn start_with_http(
        database: impl Into<ConnectTarget>,
        options: Options,
        place: ListenAddress,
        http: SocketAddr,
    ) -> Self {
        let (listener, http) = (listen(place).await.unwrap(), listen_http(&[http]).await.unwrap());
        let server = Server::open(listener, Some(http), database, options).await.unwrap();
        let address = typed(&server.address().unwrap().to_string());
        let (http, metrics) = (server.http_address().unwrap(), server.metrics().clone());
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(async move { server.serve(async { drop(stopped.await) }).await.unwrap() });
        Self { client: client(&address), address, http, metrics, stop: Some(stop), serving }
    }

    pub async fn stop(mut self) -> ServerExit {
        drop(self.stop.take());
        self.serving.await.unwrap()
    }
}

/// A fresh database and one server on it.
pub async fn start() -> (Database, Instance) {
    let database = Database::fresh().await;
    let instance = Instance::start(&database).await;
    (database, instance)
}

/// The same, with one EM that has plenty.
pub async fn start_with_host1() -> (Database, Instance) {
    let (database, rm) = start().await;
    rm.client.register(registration(em("host1"), load(100, 100, 100))).await.unwrap();
    (database, rm)
}

/// A client of its own, with its own connection. It tells what the service answers, and asks for nothing twice.
pub fn client(address: &str) -> RmClient {
    hurried(address, Duration::from_secs(60))
}

/// The same, with less time.
pub fn hurried(address: &str, timeout: Duration) -> RmClient {
    RmClient::with(address, &ClientSettings::once(timeout)).unwrap()
}

/// A connection of its own, for what [`client`] does not do.
pub async fn channel_to(address: &str) -> Channel {
    Endpoint::from_shared(address.to_owned()).unwrap().connect().await.unwrap()
}

/// A request that is under way.
pub type Call = JoinHandle<Result<ResultResource, ClientError>>;

/// Asks, and waits for the answer in a task.
pub fn ask_in_task(client: &RmClient, request: ResourceRequest) -> Call {
    let client = client.clone();
    tokio::spawn(async move { client.request_resource(&request).await })
}

/// The code of an error, and its reason; empty if it has none.
pub fn code_and_reason(status: &Status) -> (Code, String) {
    (status.code(), status.get_details_error_info().map(|info| info.reason).unwrap_or_default())
}

pub fn name(text: &str) -> Name {
    Name::parse("name", text).unwrap()
}

pub fn em(host: &str) -> EmInstance {
    EmInstance::parse("em", "linkis-cg-engineconnmanager", &format!("{host}:9102")).unwrap()
}

pub fn engine(host: &str) -> EngineInstance {
    EngineInstance::parse("engine", "linkis-cg-engineconn", &format!("{host}:34567")).unwrap()
}

/// Memory in GB, cores, instances.
pub fn load(gb: i64, cores: i64, instances: i64) -> Resource {
    Resource::load_instance(gb * GB, cores, instances).unwrap()
}

pub fn registration(em: EmInstance, total: Resource) -> RegisterEm {
    RegisterEm { protected: total.zero_like(), em, total, labels: Labels::default(), reserved: Labels::default() }
}

pub fn request(em: &EmInstance, user: &str, resource: Resource) -> ResourceRequest {
    let request = ResourceRequest::new(Some(em.clone()), name(user), name("IDE"), resource);
    ResourceRequest { engine_type: "spark-3.2.1".into(), ..request }
}

/// An engine that already runs on a host, and uses so much.
pub fn adoption(host: &str, user: &str, used: Resource) -> AdoptTicket {
    AdoptTicket {
        ticket_id: Uuid::new_v4(),
        user: name(user),
        creator: name("IDE"),
        engine_type: "spark-3.2.1".into(),
        em: em(host),
        labels: Labels::default(),
        engine: engine(host),
        used,
    }
}

pub fn inited(grant: &Grant, user: &str, used: Option<Resource>) -> ConfirmTicket {
    ConfirmTicket { used, ..grant.inited(name(user), engine("host1")) }
}

pub fn release(grant: &Grant, user: &str) -> ReleaseTicket {
    grant.released(name(user))
}

pub trait Expect {
    fn granted(self) -> Grant;
    fn refused(self) -> Refusal;
}

impl Expect for Result<ResultResource, ClientError> {
    #[track_caller]
    fn granted(self) -> Grant {
        match self.unwrap() {
            ResultResource::Available(grant) => grant,
            ResultResource::NotEnough(refusal) => panic!("refused: {}", refusal.reason),
        }
    }

    #[track_caller]
    fn refused(self) -> Refusal {
        match self.unwrap() {
            ResultResource::NotEnough(refusal) => refusal,
            ResultResource::Available(grant) => panic!("granted: {grant:?}"),
        }
    }
}

/// Waits until `condition` holds; fails after `longest`.
pub async fn eventually<F: Future<Output = bool>>(
    what: &str,
    longest: Duration,
    condition: impl Fn() -> F,
) -> Duration {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < longest, "not within {longest:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}

/// Checks what has to be true at every commit: counters equal tickets, nothing is over-committed, no resource lock is visible, and
/// an audit finds nothing else. Answers how many tickets live.
pub async fn assert_invariants(database: &Database, client: &RmClient) -> usize {
    for em in client.ems().await.unwrap() {
        assert!(!em.left().unwrap().is_negative_anywhere(), "over-committed: {em:?}");
    }
    for scope in client.scopes().await.unwrap() {
        assert!(!scope.is_over_in(LimitMode::Enforced), "over its limit: {scope:?}");
    }
    let (tickets, notes) = assert_books(database, client).await;
    assert!(notes.iter().all(|note| note.ends_with("which only watches")), "{notes:?}");
    tickets
}

/// The same, wherever more is held than there is. Answers how many tickets live, and what the audit notes.
pub async fn assert_books(database: &Database, client: &RmClient) -> (usize, Vec<String>) {
    let (ems, tickets) = (client.ems().await.unwrap(), client.tickets(None).await.unwrap());
    assert_counters_equal_tickets(&ems, &tickets);
    for scope in client.scopes().await.unwrap() {
        assert_scope_equals_tickets(&scope, &tickets);
    }
    assert_eq!(database.count("SELECT count(*) FROM linkis_resource_lock").await, 0, "the lock table is empty");
    let report = client.audit().await.unwrap();
    assert!(report.differences.is_empty(), "{report:?}");
    (tickets.len(), report.notes)
}

fn assert_counters_equal_tickets(ems: &[Em], tickets: &[Ticket]) {
    let mut sums: HashMap<&EmInstance, (Resource, Resource)> =
        ems.iter().map(|em| (&em.instance, (em.total.zero_like(), em.total.zero_like()))).collect();
    for ticket in tickets {
        let (used, locked) = sums.get_mut(&ticket.em).unwrap_or_else(|| panic!("no EM for {ticket:?}"));
        let sum = if matches!(ticket.state, TicketState::Used { .. }) { used } else { locked };
        let share = ticket.resource().project(sum.resource_type()).unwrap();
        *sum = sum.add(&share).unwrap();
    }
    for em in ems {
        assert_eq!((&em.used, &em.locked), (&sums[&em.instance].0, &sums[&em.instance].1), "{}", em.instance);
    }
}

pub fn assert_scope_equals_tickets(scope: &ScopeUsage, tickets: &[Ticket]) {
    let mut sums = ScopeHoldings::default();
    for ticket in tickets {
        let labels = ticket.ticket_labels();
        if scope.scope.labels().iter().all(|(key, value)| labels.get(key).unwrap_or_default() == value) {
            let held = if ticket.is_locked() { &mut sums.locked } else { &mut sums.used };
            let counted = ticket.resource().amounts().filter(|(dimension, _)| scope.scope.counts(dimension));
            held.add(counted, 1).unwrap();
        }
    }
    assert_eq!(scope.usage, sums, "{}", scope.scope);
}

/// Whether some transaction waits for another.
pub async fn is_waiting(database: &Database) -> bool {
    let waiting =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    database.count(waiting).await > 0
}

/// Whether a ticket lives.
pub async fn lives(client: &RmClient, ticket_id: Uuid) -> bool {
    client.ticket(ticket_id).await.is_ok()
}

/// The program as it was just built.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_linkis-rm");

/// The address of a server as its clients are told it.
pub fn typed(address: &str) -> String {
    if address.starts_with("unix:") { address.to_owned() } else { format!("http://{address}") }
}

/// A server in a process of its own.
pub struct Process {
    child: Child,
    pub client: RmClient,
    pub address: String,
    /// What it logged before it served.
    pub told: Vec<String>,
}

impl Process {
    /// Starts the program, on a free port and without settings from this environment, and waits until it serves.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_command(Command::new(PROGRAM).args(arguments), |line| println!("{line}"))
    }

    /// The same at a place that is told.
    pub fn start_at(listen: &str, arguments: &[&str]) -> Self {
        Self::spawn(listen, Command::new(PROGRAM).args(arguments), |line| println!("{line}"))
    }

    /// The same with a command made elsewhere; what it logs once it serves is given to `log_line`.
    pub fn start_command(command: &mut Command, log_line: impl FnMut(String) + Send + 'static) -> Self {
        Self::spawn("127.0.0.1:0", command, log_line)
    }

    fn spawn(listen: &str, command: &mut Command, mut log_line: impl FnMut(String) + Send + 'static) -> Self {
        let cell = command.get_args().find_map(|word| Some(word.to_str()?.split_once('#')?.1.to_owned()));
        let mut child = command
            .args(["--listen", listen])
            .env_remove("DATABASE_URL")
            .env_remove("LINKIS_RM_DATA_DIR")
            .envs(cell.map(|cell| ("LINKIS_RM_CELL", cell)))
            .env("RUST_LOG", "info")
            .env("LINKIS_RM_LOG_FORMAT", "text")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let mut told = Vec::new();
        let address = log.by_ref().find_map(|line| {
            let address = line.split_once("serving address=").map(|(_, address)| typed(address));
            told.push(line);
            address
        });
        let address = address.unwrap_or_else(|| panic!("it does not serve:\n{}", told.join("\n")));
        // Its log has to be read on, or it stops when the pipe is full.
        std::thread::spawn(move || log.for_each(&mut log_line));
        Self { child, client: client(&address), address, told }
    }

    /// Where it serves metrics and health.
    pub fn http(&self) -> SocketAddr {
        let address = |line: &String| line.split_once("http_address=")?.1.split(' ').next()?.parse().ok();
        self.told.iter().find_map(address).unwrap_or_else(|| panic!("{:?}", self.told))
    }

    /// Stops it where it stands (SIGSTOP), or lets it go on (SIGCONT).
    pub fn freeze(&self, frozen: bool) {
        let signal = if frozen { Signal::STOP } else { Signal::CONT };
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// How much memory it takes, in bytes.
    pub fn memory(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"));
        resident.unwrap().trim().parse::<usize>().unwrap() * 1024
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM; answers with the exit code.
    pub fn terminate(mut self) -> Option<i32> {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended already, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Limits under which everything is counted.
pub fn counted(rules: Vec<Rule>, policies: BTreeMap<Name, Policy>) -> Limits {
    let wanted = CountingRule::wanted(rules.iter().map(Rule::label_set).collect(), &policies);
    let sets = (1..).zip(wanted).map(|(id, counting)| LabelSet { id, counting, is_counted: true }).collect();
    Limits::new(Uuid::nil(), sets, rules)
}

/// A limit on the instances of each user.
pub fn each_user(instances: i64) -> Rule {
    Rule {
        pattern: LabelPattern::new([("user".to_owned(), None)].into()),
        mode: Default::default(),
        max: BTreeMap::from([(Dimension::Instances, instances)]),
    }
}
