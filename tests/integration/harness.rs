//! Helpers of all tests: one PostgreSQL, a new database for each test, servers on free ports, and common calls.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    future::Future,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    ops::Range,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use prost::Message as _;
use rm_client::{ClientError, ClientSettings, ResourceRequest, ResultResource, RmClient};
use rm_devpg::{EmbeddedPostgres, EmbeddedSettings};
use rm_model::{
    adoption::AdoptTicket,
    em::{Em, EmInstance},
    limit::{CountingRule, LabelPattern, LabelSet, Limits, Rule, ScopeUsage},
    limit_mode::LimitMode,
    name::{Labels, Name},
    operation::{ConfirmTicket, Grant, RegisterEm, ReleaseTicket},
    policy::Policy,
    refusal::Refusal,
    report::{EmReport, Health},
    resource::{Dimension, Resource},
    scope::ScopeHoldings,
    ticket::{EngineInstance, Ticket, TicketState},
};
use rm_store::connect_target::ConnectTarget;
use rustix::process::{Pid, Signal};
use sqlx::{
    ConnectOptions as _, FromRow, PgConnection, PgExecutor,
    postgres::{PgConnectOptions, PgPool, PgRow},
};
use tokio::task::{JoinHandle, JoinSet};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::{citus_cluster::Cell, proxy::Proxy};

pub use rm_tests::{PROGRAM, repo_root};

/// The retention of the history by [`settings`].
pub const HISTORY: Duration = Duration::from_secs(3600);

pub const GB: i64 = 1 << 30;

/// Longest wait for an event that must come.
pub const LONG: Duration = Duration::from_secs(60);

/// Size of a crowd: `few`, or `LINKIS_RM_CROWD` if it is set.
pub fn crowd_of(few: usize) -> usize {
    std::env::var("LINKIS_RM_CROWD").map_or(few, |text| text.parse().unwrap())
}

/// Prints that a test is skipped without a tool. Fails if `LINKIS_RM_TOOLS` names the tool.
pub fn skip_without(tool: &str, how: &str) {
    let there = std::env::var("LINKIS_RM_TOOLS").unwrap_or_default();
    assert!(!there.split(' ').any(|named| named == tool), "{tool} is there, says LINKIS_RM_TOOLS, and is not found");
    println!("SKIPPED: there is no {tool}: {how}");
}

/// The PostgreSQL of this test run, which ends with the process.
fn postgres() -> &'static PgConnectOptions {
    static OPTIONS: OnceLock<PgConnectOptions> = OnceLock::new();
    OPTIONS.get_or_init(|| {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        // A thread for the whole run, because the runtime of a test ends with it.
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

/// Removes a folder after the end of this process and its PostgreSQL.
pub fn remove_at_end(folder: &Path) {
    let script = r#"(while [ -d "/proc/$1" ] || [ -e "$2/data/postmaster.pid" ]; do sleep 0.2; done; rm -rf "$2") &"#;
    let pid = std::process::id().to_string();
    let mut watcher = Command::new("sh");
    watcher.args(["-c", script, "sh", &pid]).arg(folder).process_group(0);
    assert!(watcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
}

/// A folder of this run. Folders of ended runs are removed.
pub fn scratch(name: &str) -> PathBuf {
    const PREFIX: &str = "linkis-rm-test-";
    let temp = std::env::temp_dir();
    for entry in fs::read_dir(&temp).unwrap().flatten() {
        let file_name = entry.file_name().to_string_lossy().into_owned();
        let pid = file_name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !PathBuf::from(format!("/proc/{pid}")).exists()) {
            // The folder may belong to another user or be removed by another run.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    temp.join(format!("{PREFIX}{}-{name}", std::process::id()))
}

/// A database of its own. With `LINKIS_RM_CITUS_SUITE`, it is a cell on Citus, and queries of a test go to its worker.
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
        execute(&mut postgres().connect().await.unwrap(), format!("CREATE DATABASE {name}")).await;
        postgres().clone().database(&name).into()
    }

    /// The target for a store.
    pub fn target(&self) -> ConnectTarget {
        self.cell.as_ref().map_or_else(|| self.options.clone().into(), Cell::target)
    }

    /// This database behind a proxy. Queries of the test bypass the proxy.
    pub fn behind_proxy(&self, name: &str) -> (Proxy, Self) {
        let proxy = Proxy::start(name, self.options.get_socket().expect("not a cell"));
        let options = self.options.clone().socket(proxy.folder());
        (proxy, Self { options, pool: self.pool.clone(), cell: None })
    }

    /// The URL for a process. The URL of a cell ends with `#` and its name.
    pub fn url(&self) -> String {
        if let Some(cell) = &self.cell {
            return format!("{}#{}", cell.url(), cell.name);
        }
        url_of(&self.options)
    }

    pub async fn connect(&self) -> PgConnection {
        self.options.connect().await.unwrap()
    }

    /// Runs statements, separated by semicolons, and returns the number of rows that they changed.
    pub async fn execute(&self, sql: impl AsRef<str>) -> u64 {
        execute(&self.pool, sql).await
    }

    /// The value of a query of one row and one column.
    pub async fn scalar<T: Value>(&self, sql: impl AsRef<str>) -> T {
        let sql = sqlx::AssertSqlSafe(sql.as_ref().to_owned());
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    pub async fn count(&self, sql: impl AsRef<str>) -> i64 {
        self.scalar(sql).await
    }

    /// The values of a query of one column.
    pub async fn column<T: Value>(&self, sql: impl AsRef<str>) -> Vec<T> {
        let sql = sqlx::AssertSqlSafe(sql.as_ref().to_owned());
        sqlx::query_scalar(sql).fetch_all(&self.pool).await.unwrap()
    }

    /// The only row of a query, as a tuple.
    pub async fn row<T: for<'r> FromRow<'r, PgRow> + Send + Unpin>(&self, sql: impl AsRef<str>) -> T {
        self.rows(sql).await.remove(0)
    }

    /// The rows of a query, as tuples.
    pub async fn rows<T: for<'r> FromRow<'r, PgRow> + Send + Unpin>(&self, sql: impl AsRef<str>) -> Vec<T> {
        let sql = sqlx::AssertSqlSafe(sql.as_ref().to_owned());
        sqlx::query_as(sql).fetch_all(&self.pool).await.unwrap()
    }

    /// Waits until so many requests wait.
    pub async fn waiting(&self, count: i64) {
        let waiting = "SELECT count(*) FROM linkis_resource_waiting";
        eventually("requests wait", LONG, async || self.count(waiting).await == count).await;
    }

    /// Number of history lines of an action.
    pub async fn recorded(&self, action: &str) -> i64 {
        self.count(format!("SELECT count(*) FROM linkis_resource_action_record WHERE action = '{action}'")).await
    }

    /// Holds an EM by a committed row, as an operator can without the service. Calls on it wait until [`Self::release_holds`].
    pub async fn hold_by_hand(&self, em: &EmInstance) {
        insert_hold(&self.pool, em).await;
    }

    /// Opens a transaction that runs `sql`. Its locks last until `ROLLBACK` or until the connection is dropped.
    pub async fn transaction(&self, sql: &str) -> PgConnection {
        let mut connection = self.connect().await;
        execute(&mut connection, format!("BEGIN; {sql}")).await;
        connection
    }

    /// Opens a transaction that locks an EM. Calls on the EM wait until the transaction ends.
    pub async fn transaction_that_holds(&self, em: &EmInstance) -> PgConnection {
        let mut holder = self.transaction("").await;
        insert_hold(&mut holder, em).await;
        holder
    }

    /// Ends all holds of EMs and users.
    pub async fn release_holds(&self) {
        self.execute("DELETE FROM linkis_resource_lock").await;
    }
}

/// A method of a gRPC service.
pub struct Method {
    pub service: String,
    pub name: String,
    pub is_unary: bool,
}

/// Returns the methods of all services in a set of descriptors.
pub fn methods(descriptors: &[u8]) -> Vec<Method> {
    let set = prost_types::FileDescriptorSet::decode(descriptors).unwrap();
    let methods_of = |file: &prost_types::FileDescriptorProto, service: &prost_types::ServiceDescriptorProto| {
        let full_name = format!("{}.{}", file.package(), service.name());
        let method = |method: &prost_types::MethodDescriptorProto| Method {
            service: full_name.clone(),
            name: method.name().to_owned(),
            is_unary: !method.client_streaming() && !method.server_streaming(),
        };
        service.method.iter().map(method).collect::<Vec<_>>()
    };
    set.file.iter().flat_map(|file| file.service.iter().flat_map(|service| methods_of(file, service))).collect()
}

/// A type of one column.
pub trait Value: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin {}

impl<T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin> Value for T {}

/// Runs statements on a pool or a connection, and returns the number of rows that they changed.
pub async fn execute(executor: impl PgExecutor<'_>, sql: impl AsRef<str>) -> u64 {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql.as_ref().to_owned())).execute(executor).await.unwrap().rows_affected()
}

async fn insert_hold(executor: impl PgExecutor<'_>, em: &EmInstance) {
    let hold = "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance) VALUES ('em', $1, $2)";
    let hold = sqlx::query(hold).bind(em.application_name.as_str()).bind(em.instance.as_str());
    hold.execute(executor).await.unwrap();
}

/// The URL of a database with these options.
pub fn url_of(options: &PgConnectOptions) -> String {
    let (user, database) = (options.get_username(), options.get_database().unwrap());
    match options.get_socket() {
        Some(socket) => {
            format!("postgres://{user}@localhost:{}/{database}?host={}", options.get_port(), socket.display())
        }
        None => format!("postgres://{user}@{}:{}/{database}", options.get_host(), options.get_port()),
    }
}

/// The URL of a database. The folder of the socket is in the query, because its path is no host name.
pub fn url(socket: &Path, database: &str) -> String {
    format!("postgres://postgres@localhost:5432/{database}?host={}", socket.display())
}

/// Settings of a server: its flags with their values.
#[derive(Clone, Default)]
pub struct Settings(BTreeMap<&'static str, String>);

/// The settings of most tests.
pub fn settings() -> Settings {
    let few = [("--history", "1h"), ("--drain-timeout", "5s"), ("--external-hosts", "127.0.0.1")];
    Settings(few.map(|(flag, value)| (flag, value.to_owned())).into())
}

impl Settings {
    /// The same settings with another value of a flag; empty for a flag without a value.
    pub fn with(mut self, flag: &'static str, value: impl ToString) -> Self {
        self.0.insert(flag, value.to_string());
        self
    }

    /// The same settings with another duration of a flag.
    pub fn with_time(self, flag: &'static str, time: Duration) -> Self {
        self.with(flag, format!("{}ms", time.as_millis()))
    }

    pub fn arguments(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|(flag, value)| [*flag, value]).filter(|word| !word.is_empty())
    }
}

/// Any free port of this machine.
pub const ANY_PORT: &str = "127.0.0.1:0";

/// A port of this machine that was free a moment ago.
pub fn free_address() -> SocketAddr {
    std::net::TcpListener::bind(ANY_PORT).unwrap().local_addr().unwrap()
}

/// A server in a process of its own, and its metrics.
pub struct Instance {
    pub client: RmClient,
    pub address: String,
    /// Address of metrics and health.
    pub http: SocketAddr,
    pub metrics: Metrics,
    process: Process,
}

impl Instance {
    pub async fn start(database: &Database) -> Self {
        Self::start_with(database, settings()).await
    }

    pub async fn start_with(database: &Database, settings: Settings) -> Self {
        Self::start_at(database, settings, ANY_PORT).await
    }

    pub async fn start_at(database: &Database, settings: Settings, listen: &str) -> Self {
        Self::start_on(&database.url(), settings, listen).await
    }

    /// Starts a server on the database of any URL.
    pub async fn start_on(url: &str, settings: Settings, listen: &str) -> Self {
        Self::start_by(settings.with("--database-url", url), listen, ANY_PORT).await
    }

    /// Starts a server whose settings name its database.
    pub async fn start_by(settings: Settings, listen: &str, http: &str) -> Self {
        let mut command = Command::new(*PROGRAM);
        command.args(["--http-listen", http]).args(settings.arguments());
        let listen = listen.to_owned();
        let starting = move || Process::spawn(&listen, &mut command, |line| println!("{line}"));
        let process = tokio::task::spawn_blocking(starting).await.unwrap();
        let http = process.http();
        let scheme = if settings.0.contains_key("--tls-cert") { "https" } else { "http" };
        let metrics = Metrics { url: format!("{scheme}://{http}/metrics") };
        let (client, address) = (process.client.clone(), process.address.clone());
        Self { client, address, http, metrics, process }
    }

    /// The value of a metric with its labels, or 0 if it is not exported yet.
    pub fn metric(&self, series: &str) -> f64 {
        let text = self.metrics.text();
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// The value of a counter, or 0 if it is not exported yet.
    pub fn counter(&self, series: &str) -> u64 {
        self.metric(series) as u64
    }

    pub async fn stop(self) -> ServerExit {
        tokio::task::spawn_blocking(move || self.process.stop()).await.unwrap()
    }
}

/// Returns the reason why no server starts on a database.
pub async fn refusal(database_url: &str, settings: Settings) -> String {
    let mut command = Command::new(*PROGRAM);
    command.args(["--database-url", database_url, "--listen", ANY_PORT, "--http-listen", ""]);
    command.args(settings.arguments()).env_remove("DATABASE_URL").env("LINKIS_RM_LOG_FORMAT", "text");
    let ended = tokio::task::spawn_blocking(move || ran(&mut command));
    let ended = tokio::time::timeout(LONG, ended).await.expect("it is refused in time").unwrap();
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    ended.err
}

/// The metrics of a server. They are read over HTTP.
#[derive(Clone)]
pub struct Metrics {
    url: String,
}

impl Metrics {
    /// All metrics as Prometheus reads them.
    pub fn text(&self) -> String {
        let output = Command::new("curl").args(["--silent", "--insecure", "--fail", &self.url]).output().unwrap();
        assert!(output.status.success(), "{} is read", self.url);
        String::from_utf8(output.stdout).unwrap()
    }
}

/// How a server ended after SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerExit {
    /// All calls in progress were completed.
    Drained,
    /// Some calls were in progress at the drain timeout.
    CutOff,
}

/// A fresh database and one server on it.
pub async fn start() -> (Database, Instance) {
    let database = Database::fresh().await;
    let instance = Instance::start(&database).await;
    (database, instance)
}

/// A fresh database and two servers on it.
pub async fn two() -> (Database, Instance, Instance) {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    (database, first, second)
}

/// A fresh database and a server with one EM.
pub async fn start_with_em(em: EmInstance, total: Resource) -> (Database, Instance) {
    let (database, rm) = start().await;
    rm.client.register(registration(em, total)).await.unwrap();
    (database, rm)
}

/// A fresh database and a server with the EM `host1`, with 100 GB, 100 cores and 100 instances.
pub async fn start_with_host1() -> (Database, Instance) {
    start_with_em(em("host1"), load(100, 100, 100)).await
}

/// Registers EMs of one size.
pub async fn register_all<H: AsRef<str>>(client: &RmClient, hosts: impl IntoIterator<Item = H>, total: Resource) {
    for host in hosts {
        client.register(registration(em(host.as_ref()), total.clone())).await.unwrap();
    }
}

/// Registers the EMs `host0`, `host1` and so on.
pub async fn register_hosts(client: &RmClient, numbers: Range<usize>, total: Resource) {
    register_all(client, numbers.map(|n| format!("host{n}")), total).await;
}

/// A client with its own connection. It returns each reply, and repeats no call.
pub fn client(address: &str) -> RmClient {
    hurried(address, Duration::from_secs(60))
}

/// A client with this timeout.
pub fn hurried(address: &str, timeout: Duration) -> RmClient {
    RmClient::with(address, &ClientSettings::once(timeout)).unwrap()
}

/// A connection for calls that [`client`] does not make.
pub async fn channel_to(address: &str) -> Channel {
    Endpoint::from_shared(address.to_owned()).unwrap().connect().await.unwrap()
}

/// A running request.
pub type Call = JoinHandle<Result<ResultResource, ClientError>>;

/// Makes a request in a task.
pub fn ask_in_task(client: &RmClient, request: ResourceRequest) -> Call {
    let client = client.clone();
    tokio::spawn(async move { client.request_resource(&request).await })
}

/// A request that waits as long as a test may.
pub fn patient(em: &EmInstance, user: &str, resource: Resource) -> ResourceRequest {
    ResourceRequest { wait_timeout: LONG, ..request(em, user, resource) }
}

/// Starts a request, and returns once it is in a wait queue.
pub async fn enqueue(client: &RmClient, request: ResourceRequest) -> Call {
    let before = client.waiting().await.unwrap().len();
    let call = ask_in_task(client, request);
    eventually("the request waits", LONG, async || client.waiting().await.unwrap().len() > before).await;
    call
}

pub async fn assert_wait_queues_empty(client: &RmClient) {
    eventually("the wait queues are empty", LONG, async || client.waiting().await.unwrap().is_empty()).await;
}

/// The grant of a call that must end within [`LONG`].
pub async fn grant_of(call: Call) -> Grant {
    tokio::time::timeout(LONG, call).await.expect("a reply").unwrap().granted()
}

/// Makes `change` just after `rm` has polled, and returns the grant of `call`, the only waiting request of `rm`. A wake-up grants it;
/// the next poll would come a second later.
pub async fn woken(rm: &Instance, call: Call, change: impl Future<Output = ()>) -> Grant {
    let polls = || rm.metric("linkis_rm_waiting_polls_total");
    let before = polls();
    eventually("a poll", LONG, async || polls() > before).await;
    let before = polls();
    change.await;
    let grant = grant_of(call).await;
    assert_eq!(polls(), before, "granted by a wake-up, not by a poll");
    grant
}

/// The code and the reason of an error; the reason is empty if there is none.
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

/// The adoption of a running engine with this use.
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

/// A call that is not made yet.
pub type PendingCall = Pin<Box<dyn Future<Output = Result<(), ClientError>> + Send>>;

/// Makes calls on an EM one after another while a transaction locks it, so that they share one batch in this order.
/// `before` runs once all calls wait, and before the lock ends. Returns the calls' tasks.
pub async fn in_one_batch(
    database: &Database,
    rm: &Instance,
    em: &EmInstance,
    calls: Vec<PendingCall>,
    before: impl FnOnce(),
) -> JoinSet<Result<(), ClientError>> {
    let mut holder = database.transaction_that_holds(em).await;
    let mut made = JoinSet::new();
    for call in calls {
        made.spawn(call);
        let waits = async || rm.metric("linkis_rm_set_aside_operations") == made.len() as f64;
        eventually("the call waits for the EM", LONG, waits).await;
    }
    before();
    execute(&mut holder, "ROLLBACK").await;
    made
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

/// Asserts the invariants of every commit: counters equal tickets, no EM or enforced limit is exceeded, no lock row is visible,
/// and an audit finds no difference. Returns the number of tickets.
pub async fn assert_invariants(database: &Database, client: &RmClient) -> usize {
    for em in client.ems().await.unwrap() {
        assert!(!em.left().unwrap().is_negative_anywhere(), "over-committed: {em:?}");
    }
    for scope in client.scopes().await.unwrap() {
        assert!(!scope.is_over_in(LimitMode::Enforced), "over its limit: {scope:?}");
    }
    let (tickets, notes) = assert_books(database, client).await;
    assert!(notes.iter().all(|note| note.ends_with("its advisory limit")), "{notes:?}");
    tickets
}

/// Asserts the invariants except those of capacity. Returns the number of tickets and the notes of the audit.
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

/// Whether a transaction waits for a lock.
pub async fn is_waiting(database: &Database) -> bool {
    let waiting =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    database.count(waiting).await > 0
}

/// Whether a ticket is live.
pub async fn lives(client: &RmClient, ticket_id: Uuid) -> bool {
    client.ticket(ticket_id).await.is_ok()
}

/// The end of a command.
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs a command to its end.
pub fn ran(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// The address of a server with its scheme.
pub fn typed(address: &str) -> String {
    if address.starts_with("unix:") { address.to_owned() } else { format!("http://{address}") }
}

/// A server in its own process.
pub struct Process {
    child: Child,
    pub client: RmClient,
    pub address: String,
    /// Log lines until it served.
    pub start_log: Vec<String>,
    /// Reads the later log lines. Returns how the server ended.
    log: Option<std::thread::JoinHandle<ServerExit>>,
}

impl Process {
    /// Starts the program on a free port without settings of this environment, and waits until it serves.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_command(Command::new(*PROGRAM).args(arguments), |line| println!("{line}"))
    }

    /// Starts the program on a given address.
    pub fn start_at(listen: &str, arguments: &[&str]) -> Self {
        Self::spawn(listen, Command::new(*PROGRAM).args(arguments), |line| println!("{line}"))
    }

    /// Starts a prepared command; `log_line` receives its later log lines.
    pub fn start_command(command: &mut Command, log_line: impl FnMut(String) + Send + 'static) -> Self {
        Self::spawn("127.0.0.1:0", command, log_line)
    }

    /// Starts a server on a database that takes no writes yet. Returns it before it serves.
    pub fn start_unready(database_url: &str) -> Self {
        let (address, http) = (free_address(), free_address());
        let mut command = Command::new(*PROGRAM);
        command.args(["--database-url", database_url, "--listen", &address.to_string()]);
        command.args(["--http-listen", &http.to_string()]).args(settings().arguments());
        let child = command.env_remove("DATABASE_URL").env("LINKIS_RM_LOG_FORMAT", "text").spawn().unwrap();
        let start = Instant::now();
        while std::net::TcpStream::connect(http).is_err() {
            assert!(start.elapsed() < LONG, "the page is served");
            std::thread::sleep(Duration::from_millis(20));
        }
        let address = typed(&address.to_string());
        let start_log = vec![format!("metrics and health over HTTP address={http}")];
        Self { child, client: client(&address), address, start_log, log: None }
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
        let mut start_log = Vec::new();
        let address = log.by_ref().find_map(|line| {
            let address = line.split_once("serving address=").map(|(_, address)| typed(address));
            start_log.push(line);
            address
        });
        let address = address.unwrap_or_else(|| panic!("it does not serve:\n{}", start_log.join("\n")));
        // The log is read until its end, because a full pipe would stop the process.
        let log = std::thread::spawn(move || {
            let mut exit = ServerExit::Drained;
            for line in log {
                if line.contains("some calls were still open") {
                    exit = ServerExit::CutOff;
                }
                log_line(line);
            }
            exit
        });
        Self { child, client: client(&address), address, start_log, log: Some(log) }
    }

    /// Address of metrics and health.
    pub fn http(&self) -> SocketAddr {
        let address = |line: &String| line.split_once("metrics and health over HTTP address=")?.1.parse().ok();
        self.start_log.iter().find_map(address).unwrap_or_else(|| panic!("{:?}", self.start_log))
    }

    /// Freezes the process (SIGSTOP) or continues it (SIGCONT).
    pub fn freeze(&self, frozen: bool) {
        let signal = if frozen { Signal::STOP } else { Signal::CONT };
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Resident memory in bytes.
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

    /// Sends SIGTERM, and waits for the end. Returns how the server ended.
    pub fn stop(mut self) -> ServerExit {
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success(), "the server stops in order");
        self.log.take().map_or(ServerExit::Drained, |log| log.join().unwrap())
    }

    /// Sends SIGTERM. Returns the exit code.
    pub fn terminate(mut self) -> Option<i32> {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process has ended, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Limits whose label sets are all counted.
pub fn counted(rules: Vec<Rule>, policies: BTreeMap<Name, Policy>) -> Limits {
    let wanted = CountingRule::wanted(rules.iter().map(Rule::label_set).collect(), &policies);
    let sets = (1..).zip(wanted).map(|(id, counting)| LabelSet { id, counting, is_counted: true }).collect();
    Limits::new(Uuid::nil(), sets, rules)
}

/// A limit: labels with a value, or `None` for each value, and the maxima.
pub fn limit(labels: &[(&str, Option<&str>)], max: &[(Dimension, i64)]) -> Rule {
    let labels = labels.iter().map(|(label, value)| ((*label).to_owned(), value.map(str::to_owned)));
    let max = max.iter().cloned().collect();
    Rule { pattern: LabelPattern::new(labels.collect()), mode: LimitMode::Enforced, max }
}

/// A limit on the instances of each user.
pub fn each_user(instances: i64) -> Rule {
    limit(&[("user", None)], &[(Dimension::Instances, instances)])
}

/// A healthy report of an EM without load and tickets.
pub fn report(em: &Em, sequence: i64) -> EmReport {
    let (em, epoch) = (em.instance.clone(), em.epoch);
    EmReport { em, epoch, sequence, health: Health::Healthy, load: None, tickets: vec![], observed: None }
}
