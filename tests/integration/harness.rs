//! Helpers of all tests: EMs, requests, clients, conditions to wait for, and the invariants of every commit.
//!
//! A test gets a database and a server of its own. Helpers wait for conditions, not for a time. Callers: all modules of this test target.
//!
//! - `database`: a new database for each test; `server`: processes of the program.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Debug,
    fs,
    future::Future,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    ops::Range,
    path::Path,
    pin::Pin,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use prost::Message as _;
use rm_client::{ClientError, ClientSettings, ResourceRequest, ResultResource, RmClient};
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
use rm_tests::{new_database, proxy::Proxy};
use rustix::process::{Pid, Signal};
use sqlx::{
    ConnectOptions as _, FromRow, PgConnection, PgExecutor,
    postgres::{PgConnectOptions, PgPool, PgRow},
};
use tokio::{
    sync::OnceCell,
    task::{JoinHandle, JoinSet},
};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::citus_cluster::Cell;

mod database;
mod server;

pub use database::*;
pub use rm_tests::{
    LONG, PROGRAM, eventually, execute, remove_at_end, repo_root, scratch, scratch_in, start_postgres,
    start_postgres_on_port,
};
pub use server::*;

/// The retention of the history by [`settings`].
pub const HISTORY: Duration = Duration::from_secs(3600);

pub const GB: i64 = 1 << 30;

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

/// A client that repeats calls for a minute, as often as it takes.
pub fn insistent(addresses: &str) -> RmClient {
    RmClient::with(addresses, &ClientSettings { attempts: 1000, ..ClientSettings::new(LONG) }).unwrap()
}

/// A connection for calls that [`client`] does not make.
pub async fn channel_to(address: &str) -> Channel {
    Endpoint::from_shared(address.to_owned()).unwrap().connect().await.unwrap()
}

/// A running request.
pub type Call = JoinHandle<Result<ResultResource, ClientError>>;

/// Makes a request in a task.
pub fn request_in_task(client: &RmClient, request: ResourceRequest) -> Call {
    let client = client.clone();
    tokio::spawn(async move { client.request_resource(&request).await })
}

/// A request that waits as long as a test may.
pub fn patient(em: &EmInstance, user: &str, resource: Resource) -> ResourceRequest {
    ResourceRequest { wait_timeout: LONG, ..request(em, user, resource) }
}

/// Starts a request, and returns once it is in a wait queue.
pub async fn enqueue(client: &RmClient, request: ResourceRequest) -> Call {
    let known: Vec<_> = client.waiting().await.unwrap().iter().map(|waiting| waiting.ticket_id).collect();
    let call = request_in_task(client, request);
    let is_new = async || client.waiting().await.unwrap().iter().any(|waiting| !known.contains(&waiting.ticket_id));
    eventually("the request waits", LONG, is_new).await;
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
    change.await;
    let before = polls();
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
        let waits = async || rm.metric("linkis_rm_contended_operations") == made.len() as f64;
        eventually("the call waits for the EM", LONG, waits).await;
    }
    before();
    execute(&mut holder, "ROLLBACK").await;
    made
}

/// Asserts that a call waits for a contended key, and cancels it. No other call waits there.
pub async fn assert_contended<T: Debug>(rm: &Instance, call: impl Future<Output = Result<T, ClientError>>) {
    let is_contended = async |count| rm.metric("linkis_rm_contended_operations") == count;
    tokio::select! {
        result = call => panic!("not contended: {result:?}"),
        _ = eventually("the call is contended", LONG, || is_contended(1.0)) => {}
    }
    eventually("no call is contended", LONG, || is_contended(0.0)).await;
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

/// Waits as long as the service advises before the next call.
pub async fn pause_as_advised(error: &ClientError) {
    tokio::time::sleep(error.retry_after().unwrap_or(Duration::from_millis(20))).await;
}

/// Whether a transaction waits for a lock.
pub async fn is_waiting(database: &Database) -> bool {
    locked_out(database, "").await > 0
}

/// Number of statements with this text that wait for a lock.
pub async fn locked_out(database: &Database, text: &str) -> i64 {
    let locked = "datname = current_database() AND wait_event_type = 'Lock'";
    database.count(format!("SELECT count(*) FROM pg_stat_activity WHERE {locked} AND query LIKE '%{text}%'")).await
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
    Rule { pattern: LabelPattern::new(labels.collect()), mode: LimitMode::Enforced, max, guarantee: Default::default() }
}

/// A limit on the instances of each user.
pub fn each_user(instances: i64) -> Rule {
    limit(&[("user", None)], &[(Dimension::Instances, instances)])
}

/// A healthy report of an EM without load and tickets.
pub fn report(em: &Em, sequence: i64) -> EmReport {
    let (em, epoch) = (em.instance.clone(), em.epoch);
    EmReport { em, epoch, sequence, health: Health::Healthy, load: None, tickets: vec![], observed: None, idle: vec![] }
}
