//! Idle engines that end because requests wait: which, when, and what ends nothing.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{
    em::EmInstance,
    limit::Rule,
    limit_mode::LimitMode,
    operation::{Grant, RegisterEm},
    report::{EmReport, Health},
    resource::Dimension,
};
use rm_proto::v1 as proto;
use sqlx::Connection as _;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use super::*;

/// Reaction of an EM to a recall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// It stops the engine, and releases the ticket.
    Stops,
    /// The engine has got a task.
    Works,
    Ignores,
}

/// Engines of an EM, as it reports them.
#[derive(Debug, Default)]
struct Engines {
    live: Vec<(Grant, String)>,
    idle: BTreeSet<Uuid>,
    /// Tickets whose engines were to end.
    to_stop: BTreeSet<Uuid>,
    /// Number of answered reports.
    beats: usize,
    /// Tickets that were to end although the report had their engines as busy.
    misdirected: usize,
}

/// An EM that reports twenty times a second.
pub struct Ecm {
    client: RmClient,
    em: EmInstance,
    engines: Arc<Mutex<Engines>>,
    _reporting: AbortOnDropHandle<()>,
}

impl Ecm {
    pub async fn register(client: &RmClient, name: &str, instances: i64, reaction: Reaction) -> Self {
        Self::register_as(client, registration(em(name), load(100, 100, instances)), reaction).await
    }

    pub async fn register_as(client: &RmClient, registration: RegisterEm, reaction: Reaction) -> Self {
        let em = registration.em.clone();
        let registered = client.register(registration).await.unwrap();
        let engines = Arc::<Mutex<Engines>>::default();
        let reporting = report(client.clone(), em.clone(), registered.epoch, engines.clone(), reaction);
        let _reporting = AbortOnDropHandle::new(tokio::spawn(reporting));
        Self { client: client.clone(), em, engines, _reporting }
    }

    pub fn request(&self, user: &str, engine_type: &str) -> ResourceRequest {
        let request = request(&self.em, user, load(1, 1, 1));
        ResourceRequest { engine_type: engine_type.to_owned(), ..request }
    }

    /// Starts an engine that is idle, or works.
    pub async fn engine(&self, user: &str, engine_type: &str, is_idle: bool) -> Uuid {
        self.engine_of(self.request(user, engine_type), is_idle).await
    }

    /// Starts an engine for a request.
    pub async fn engine_of(&self, request: ResourceRequest, is_idle: bool) -> Uuid {
        let (user, grant) = (request.user.to_string(), self.client.request_resource(&request).await.granted());
        let (ticket_id, confirmation) = (grant.ticket_id, inited(&grant, &user, None));
        {
            // Before the confirmation: a used ticket that is missing from reports is lost.
            let engines = &mut *self.engines.lock().unwrap();
            engines.live.push((grant, user));
            engines.idle.extend(is_idle.then_some(ticket_id));
        }
        self.client.resource_inited(&confirmation).await.unwrap();
        ticket_id
    }

    /// Waits until an engine is stored as idle, so that the next one is idle for a shorter time.
    pub async fn idle_engine(&self, user: &str, engine_type: &str) -> Uuid {
        let ticket_id = self.engine(user, engine_type, true).await;
        eventually("the engine is idle", LONG, async || is_idle(&self.client, ticket_id).await).await;
        ticket_id
    }

    /// Lets all engines be idle from now on.
    pub fn rest(&self) {
        let engines = &mut *self.engines.lock().unwrap();
        engines.idle.extend(engines.live.iter().map(|(grant, _)| grant.ticket_id));
    }

    pub fn live(&self) -> BTreeSet<Uuid> {
        self.engines.lock().unwrap().live.iter().map(|(grant, _)| grant.ticket_id).collect()
    }

    fn beats(&self) -> usize {
        self.engines.lock().unwrap().beats
    }

    pub fn to_stop(&self) -> BTreeSet<Uuid> {
        self.engines.lock().unwrap().to_stop.clone()
    }

    /// Returns the tickets that the next replies name.
    async fn named_now(&self) -> BTreeSet<Uuid> {
        self.engines.lock().unwrap().to_stop.clear();
        let beats = self.beats();
        eventually("more reports", LONG, async || self.beats() >= beats + 3).await;
        self.to_stop()
    }
}

async fn is_idle(client: &RmClient, ticket_id: Uuid) -> bool {
    let ticket = client.ticket(ticket_id).await.unwrap();
    matches!(ticket.state, rm_model::ticket::TicketState::Used { idle_since: Some(_), .. })
}

/// Returns the number of tickets whose engines have been idle for a second.
pub async fn may_end(client: &RmClient) -> usize {
    let idle_for = prost_types::Duration::try_from(Duration::from_secs(1)).ok();
    let call = proto::ListTicketsRequest { idle_for, ..Default::default() };
    client.make(&rm_client::calls::LIST_TICKETS, &call).await.unwrap().tickets.len()
}

async fn report(client: RmClient, em: EmInstance, epoch: i64, engines: Arc<Mutex<Engines>>, reaction: Reaction) {
    for sequence in 1.. {
        let (tickets, idle) = {
            let engines = engines.lock().unwrap();
            let tickets = engines.live.iter().map(|(grant, _)| grant.ticket_id).collect();
            (tickets, engines.idle.iter().copied().collect::<Vec<_>>())
        };
        let (em, health) = (em.clone(), Health::Healthy);
        let report = EmReport { em, epoch, sequence, health, load: None, tickets, observed: None, idle: idle.clone() };
        // An instance may be down.
        let Ok(reply) = client.heartbeat(&report).await else { continue };
        engines.lock().unwrap().beats += 1;
        let misdirected = reply.stop_idle_tickets.iter().filter(|ticket_id| !idle.contains(ticket_id)).count();
        engines.lock().unwrap().misdirected += misdirected;
        for ticket_id in reply.stop_idle_tickets.into_iter().chain(reply.stop_tickets) {
            let stopped = {
                let engines = &mut *engines.lock().unwrap();
                engines.to_stop.insert(ticket_id);
                let place = engines.live.iter().position(|(grant, _)| grant.ticket_id == ticket_id);
                if reaction != Reaction::Ignores {
                    engines.idle.remove(&ticket_id);
                }
                place.filter(|_| reaction == Reaction::Stops).map(|place| engines.live.remove(place))
            };
            if let Some((grant, user)) = stopped {
                client.resource_released(&release(&grant, &user)).await.unwrap();
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A policy for all tickets, with the shortest times.
pub fn quick(mode: ReclaimMode) -> ReclaimPolicy {
    let second = Duration::from_secs(1);
    ReclaimPolicy { idle_after: second, grace: second, ..policy(&[("user", None)], mode) }
}

async fn lines(client: &RmClient, ticket_id: Uuid) -> Vec<proto::Action> {
    let call = proto::ListActionsRequest { ticket_id: ticket_id.to_string(), ..Default::default() };
    client.actions(&call).await.unwrap().actions
}

/// Sends a request that waits.
pub fn wait(client: &RmClient, request: ResourceRequest) -> AbortOnDropHandle<ResultResource> {
    let request = ResourceRequest { wait_timeout: Duration::from_secs(300), ..request };
    let client = client.clone();
    AbortOnDropHandle::new(tokio::spawn(async move { client.request_resource(&request).await.unwrap() }))
}

pub async fn waiting(client: &RmClient, count: usize) {
    eventually("requests wait", LONG, async || client.waiting().await.unwrap().len() == count).await;
}

/// A user at a personal limit has four idle engines. The engine that is idle for the longest time ends, and no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn longest_idle_engine_of_user_at_limit_ends_for_own_request() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 100, Reaction::Stops).await;
    let other = Ecm::register(&rm.client, "host2", 100, Reaction::Stops).await;
    let pattern = LabelPattern::new([("user".to_owned(), Some("ann".to_owned()))].into());
    let max = [(Dimension::Instances, 5)].into();
    rm.client
        .set_limit(&Rule { pattern, mode: LimitMode::Enforced, max, guarantee: Default::default() })
        .await
        .unwrap();
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    let of_bob = ecm.idle_engine("bob", "spark").await;
    let same = other.idle_engine("ann", "sql").await;
    let longest = other.idle_engine("ann", "spark").await;
    let stay = [ecm.idle_engine("ann", "spark").await, ecm.idle_engine("ann", "shell").await];
    let busy = ecm.engine("ann", "spark", false).await;
    eventually("all may end", LONG, async || may_end(&rm.client).await == 5).await;
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    let ResultResource::Available(grant) = call.await.unwrap() else { panic!("a grant") };
    assert_eq!((other.to_stop(), ecm.to_stop()), ([longest].into(), [].into()));
    assert_eq!(other.live(), [same].into());
    assert_eq!(ecm.live(), [of_bob, stay[0], stay[1], busy].into());
    // The history shows who ended it, and for which request.
    let lines = lines(&rm.client, longest).await;
    let actions: Vec<_> = lines.iter().map(|line| line.action.as_str()).collect();
    assert_eq!(actions, ["granted", "inited", "recalled", "released"]);
    let recall = &lines[2];
    let reason = format!("idle; the request {} waits", grant.ticket_id);
    assert_eq!((recall.actor.as_str(), recall.reason.as_str()), ("linkis-rm", reason.as_str()));
    eventually("the rows leave", LONG, async || {
        rm.client.reclaims().await.unwrap().is_empty()
            && rm.metric(r#"linkis_rm_reclaim_results_total{result="taken_back"}"#) == 1.0
    })
    .await;
    assert_eq!(
        (rm.metric("linkis_rm_reclaim_chosen_total"), rm.metric("linkis_rm_reclaim_recalled_total")),
        (1.0, 1.0)
    );
    assert_invariants(&database, &rm.client).await;
}

/// The engine gets a task before it is stopped: it continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_with_task_at_last_moment_continues() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 1, Reaction::Works).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    let engine = ecm.idle_engine("bob", "spark").await;
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    eventually("it is withdrawn", LONG, async || {
        rm.metric(r#"linkis_rm_reclaim_results_total{result="busy"}"#) == 1.0
            && rm.client.reclaims().await.unwrap().is_empty()
    })
    .await;
    assert_eq!((ecm.to_stop(), ecm.live()), ([engine].into(), [engine].into()));
    let beats = ecm.beats();
    eventually("more reports", LONG, async || ecm.beats() >= beats + 3).await;
    assert_eq!(ecm.engines.lock().unwrap().misdirected, 0);
    waiting(&rm.client, 1).await;
    drop(call);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// Shown tickets end nothing. A policy that is off withdraws them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observed_choice_ends_nothing() {
    let (_database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 2, Reaction::Stops).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Observe), "").await.unwrap();
    let engine = ecm.idle_engine("bob", "spark").await;
    ecm.engine("bob", "spark", false).await;
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    let is_due = async || {
        let reclaims = rm.client.reclaims().await.unwrap();
        let now = std::time::SystemTime::now();
        reclaims
            .first()
            .is_some_and(|reclaim| std::time::SystemTime::try_from(reclaim.due_time.unwrap()).unwrap() < now)
    };
    eventually("its grace period has ended", LONG, is_due).await;
    let steps = rm.metric("linkis_rm_reclaim_step_seconds_count");
    eventually("more steps", LONG, async || rm.metric("linkis_rm_reclaim_step_seconds_count") > steps + 2.0).await;
    let [reclaim] = rm.client.reclaims().await.unwrap().try_into().unwrap();
    let waits = rm.client.waiting().await.unwrap();
    assert_eq!((&reclaim.ticket_id, reclaim.user.as_str()), (&engine.to_string(), "bob"));
    assert_eq!((&reclaim.for_ticket_id, reclaim.for_user.as_str()), (&waits[0].ticket_id.to_string(), "ann"));
    assert_eq!((reclaim.mode(), reclaim.recall_time), (proto::ReclaimMode::Observe, None));
    assert!(reclaim.idle_since.is_some() && ecm.to_stop().is_empty());
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Off), "").await.unwrap();
    eventually("it is withdrawn", LONG, async || rm.client.reclaims().await.unwrap().is_empty()).await;
    assert_eq!(ecm.live().len(), 2);
    drop(call);
}

/// In the mode ADVISE, followers of the history learn of it, and the EM does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn advised_end_is_a_history_line_alone() {
    let (_database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 1, Reaction::Stops).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Advise), "").await.unwrap();
    let engine = ecm.idle_engine("bob", "spark").await;
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    eventually("the line is written", LONG, async || {
        let lines = lines(&rm.client, engine).await;
        lines.iter().any(|line| line.action.as_str() == "recalled")
    })
    .await;
    let steps = rm.metric("linkis_rm_reclaim_step_seconds_count");
    eventually("more steps", LONG, async || rm.metric("linkis_rm_reclaim_step_seconds_count") > steps + 2.0).await;
    assert!(ecm.to_stop().is_empty());
    // A caller that ends it serves the request.
    let grant = ecm.engines.lock().unwrap().live.pop().unwrap().0;
    rm.client.resource_released(&release(&grant, "bob")).await.unwrap();
    assert!(matches!(call.await.unwrap(), ResultResource::Available(_)));
}

/// A row survives the instance that chose it: the next one recalls, and nothing is chosen twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choice_survives_killed_instance() {
    let database = Database::fresh().await;
    let first = Process::start(&["--database-url", &database.url()]);
    let second = Process::start(&["--database-url", &database.url()]);
    let ecm = Ecm::register(&second.client, "host1", 2, Reaction::Stops).await;
    let patient = ReclaimPolicy { grace: Duration::from_secs(8), ..quick(ReclaimMode::Stop) };
    second.client.set_reclaim_policy(&patient, "").await.unwrap();
    for _ in 0..2 {
        ecm.idle_engine("bob", "spark").await;
    }
    let call = wait(&second.client, ecm.request("ann", "sql"));
    eventually("it is chosen", LONG, async || second.client.reclaims().await.unwrap().len() == 1).await;
    let [before] = second.client.reclaims().await.unwrap().try_into().unwrap();
    first.kill();
    assert!(matches!(call.await.unwrap(), ResultResource::Available(_)));
    let ticket_id: Uuid = before.ticket_id.parse().unwrap();
    assert_eq!(ecm.to_stop(), [ticket_id].into());
    let lines = lines(&second.client, ticket_id).await;
    let recall = lines.iter().find(|line| line.action == "recalled").unwrap();
    let [due, recalled] = [before.due_time, recall.action_time].map(|time| time.unwrap());
    assert!((due.seconds, due.nanos) <= (recalled.seconds, recalled.nanos), "{before:?} {recall:?}");
    assert_eq!(database.count("SELECT count(*) FROM linkis_resource_action_record WHERE action = 'recalled'").await, 1);
    assert_invariants(&database, &second.client).await;
}

/// A policy of one end per minute serves one of two requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_per_minute_are_bounded() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 2, Reaction::Stops).await;
    rm.client.set_reclaim_policy(&ReclaimPolicy { per_minute: 1, ..quick(ReclaimMode::Stop) }, "").await.unwrap();
    for _ in 0..2 {
        ecm.idle_engine("bob", "spark").await;
    }
    let calls = ["ann", "carol"].map(|user| wait(&rm.client, ecm.request(user, "sql")));
    eventually("one is served", LONG, async || rm.client.waiting().await.unwrap().len() == 1).await;
    let due = "SELECT count(*) FROM linkis_reclaim WHERE due_time < clock_timestamp() AND recall_time IS NULL";
    eventually("the other one is due", LONG, async || database.count(due).await == 1).await;
    let steps = rm.metric("linkis_rm_reclaim_step_seconds_count");
    eventually("more steps", LONG, async || rm.metric("linkis_rm_reclaim_step_seconds_count") > steps + 2.0).await;
    assert_eq!((ecm.to_stop().len(), rm.metric("linkis_rm_reclaim_recalled_total")), (1, 1.0));
    drop(calls);
}

/// A recalled engine that is still idle after two minutes counts as staying, and another one is recalled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_recall_is_replaced() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 2, Reaction::Ignores).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    let first = ecm.idle_engine("bob", "spark").await;
    let second = ecm.idle_engine("bob", "spark").await;
    eventually("both may end", LONG, async || may_end(&rm.client).await == 2).await;
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    eventually("the longest idle one is recalled", LONG, async || ecm.to_stop() == [first].into()).await;
    database.execute("UPDATE linkis_reclaim SET recall_time = recall_time - interval '121 seconds'").await;
    eventually("the other one is recalled", LONG, async || ecm.to_stop() == [first, second].into()).await;
    eventually("the first is shown", LONG, async || {
        rm.metric(r#"linkis_rm_reclaim_tickets{state="unanswered"}"#) == 1.0
    })
    .await;
    // Replies do not name it any more, and those of no policy name none.
    eventually("replies name the other one", LONG, async || ecm.named_now().await == [second].into()).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Off), "").await.unwrap();
    eventually("all rows leave", LONG, async || rm.client.reclaims().await.unwrap().is_empty()).await;
    eventually("replies name none", LONG, async || ecm.named_now().await.is_empty()).await;
    drop(call);
}

/// An engine that has had a task since its choice is not stopped, although it is idle again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_with_task_since_choice_is_chosen_anew() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 1, Reaction::Ignores).await;
    let patient = ReclaimPolicy { idle_after: Duration::from_secs(3600), ..quick(ReclaimMode::Stop) };
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    let engine = ecm.idle_engine("bob", "spark").await;
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    eventually("it is recalled", LONG, async || ecm.to_stop() == [engine].into()).await;
    rm.client.set_reclaim_policy(&patient, "").await.unwrap();
    database.execute("UPDATE linkis_user_resource_meta_data SET idle_since = clock_timestamp()").await;
    eventually("its row leaves", LONG, async || rm.client.reclaims().await.unwrap().is_empty()).await;
    let busy = async || rm.metric(r#"linkis_rm_reclaim_results_total{result="busy"}"#) == 1.0;
    eventually("its engine counts as busy", LONG, busy).await;
    drop(call);
}

/// A run writes no rows once another run has begun; it begins anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn earlier_run_writes_no_rows() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 1, Reaction::Stops).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Observe), "").await.unwrap();
    ecm.idle_engine("bob", "spark").await;
    eventually("a run has begun", LONG, async || rm.metric("linkis_rm_reclaim_step_seconds_count") > 0.0).await;
    let mut other = database.connect().await;
    let mut other = other.begin().await.unwrap();
    sqlx::query("UPDATE linkis_reclaim_writer SET writer = $1").bind(Uuid::nil()).execute(&mut *other).await.unwrap();
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    waiting(&rm.client, 1).await;
    let steps = rm.metric("linkis_rm_reclaim_step_seconds_count");
    eventually("more steps", LONG, async || rm.metric("linkis_rm_reclaim_step_seconds_count") > steps + 1.0).await;
    assert_eq!(rm.client.reclaims().await.unwrap(), []);
    other.commit().await.unwrap();
    eventually("a new run chooses", LONG, async || rm.client.reclaims().await.unwrap().len() == 1).await;
    assert_eq!(
        database.count(&format!("SELECT count(*) FROM linkis_reclaim_writer WHERE writer = '{}'", Uuid::nil())).await,
        0
    );
    drop(call);
}

/// A set of tickets is recalled as a whole: not while the row of one of them is locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn set_is_recalled_as_a_whole() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 2, Reaction::Stops).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    let [first, second] = [ecm.idle_engine("bob", "spark").await, ecm.idle_engine("bob", "spark").await];
    let mut busy = database.connect().await;
    let mut busy = busy.begin().await.unwrap();
    let lock = "SELECT FROM linkis_user_resource_meta_data WHERE ticket_id = $1 FOR UPDATE";
    sqlx::query(lock).bind(second).execute(&mut *busy).await.unwrap();
    let two = ResourceRequest { resource: load(1, 1, 2), ..ecm.request("ann", "sql") };
    let call = wait(&rm.client, two);
    let due = "SELECT count(*) FROM linkis_reclaim WHERE due_time < clock_timestamp()";
    eventually("both are due", LONG, async || database.count(due).await == 2).await;
    let steps = rm.metric("linkis_rm_reclaim_step_seconds_count");
    eventually("more steps", LONG, async || rm.metric("linkis_rm_reclaim_step_seconds_count") > steps + 2.0).await;
    assert_eq!((database.recorded("recalled").await, ecm.to_stop()), (0, [].into()));
    busy.rollback().await.unwrap();
    assert!(matches!(call.await.unwrap(), ResultResource::Available(_)));
    assert_eq!((database.recorded("recalled").await, ecm.to_stop()), (2, [first, second].into()));
    assert_invariants(&database, &rm.client).await;
}

/// A request without an EM is queued at one EM, and an engine on another EM ends for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_on_another_em_ends_for_request_without_em() {
    let (database, rm) = start().await;
    let [home, other] = ["host1", "host2"].map(|name| Ecm::register(&rm.client, name, 1, Reaction::Stops));
    let (home, other) = (home.await, other.await);
    home.engine("bob", "spark", false).await;
    let engine = other.idle_engine("bob", "spark").await;
    // A drained EM comes last, so the request is queued at the other one.
    rm.client.drain(&other.em, "a new disk").await.unwrap();
    let call = wait(&rm.client, ResourceRequest { em: None, ..home.request("ann", "sql") });
    waiting(&rm.client, 1).await;
    rm.client.resume(&other.em, "done").await.unwrap();
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    let ResultResource::Available(grant) = call.await.unwrap() else { panic!("a grant") };
    assert_eq!((grant.em, other.to_stop(), home.to_stop()), (other.em.clone(), [engine].into(), [].into()));
    assert_invariants(&database, &rm.client).await;
}

/// An operator withdraws a choice before or after its recall. The engine stays, and another one ends instead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdrawn_engine_stays_and_another_one_ends() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 2, Reaction::Ignores).await;
    let grace = Duration::from_secs(60);
    rm.client.set_reclaim_policy(&ReclaimPolicy { grace, ..quick(ReclaimMode::Stop) }, "").await.unwrap();
    let [first, second] = [ecm.idle_engine("bob", "spark").await, ecm.idle_engine("bob", "spark").await];
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    let chosen = async |ticket_id: Uuid| {
        let is_live = |row: &&proto::Reclaim| row.withdrawn_time.is_none();
        let rows = rm.client.reclaims().await.unwrap();
        rows.iter().filter(is_live).map(|row| row.ticket_id.clone()).collect::<Vec<_>>() == [ticket_id.to_string()]
    };
    eventually("the longest idle engine is chosen", LONG, async || chosen(first).await).await;
    let error = rm.client.withdraw_reclaim(second, "a mistake").await.unwrap_err();
    assert_eq!((error.code(), error.reason()), (Some(tonic::Code::NotFound), Some("NOT_CHOSEN".into())), "{error}");
    // A repetition changes nothing.
    for reason in ["a slow start", "again"] {
        rm.client.withdraw_reclaim(first, reason).await.unwrap();
    }
    eventually("the other engine is chosen", LONG, async || chosen(second).await).await;
    database.execute("UPDATE linkis_reclaim SET due_time = clock_timestamp()").await;
    eventually("it is recalled", LONG, async || ecm.to_stop() == [second].into()).await;
    rm.client.withdraw_reclaim(second, "a slow start").await.unwrap();
    eventually("replies name none", LONG, async || ecm.named_now().await.is_empty()).await;
    let lines = lines(&rm.client, first).await.into_iter().map(|line| format!("{} {}", line.action, line.reason));
    assert_eq!(lines.collect::<Vec<_>>(), ["granted ", "inited ", "reclaim_withdrawn a slow start"]);
    assert_eq!(database.recorded("reclaim_withdrawn").await, 2);
    let withdrawn = r#"linkis_rm_reclaim_tickets{state="withdrawn"}"#;
    eventually("both are withdrawn", LONG, async || rm.metric(withdrawn) == 2.0).await;
    // Later they can be chosen again.
    database.execute("UPDATE linkis_reclaim SET withdrawn_time = withdrawn_time - interval '3601 seconds'").await;
    eventually("one is chosen", LONG, async || chosen(first).await).await;
    drop(call);
    assert_invariants(&database, &rm.client).await;
}
