//! A connection that breaks while it commits: what holds is found out, never guessed.

use std::{
    pin::Pin,
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ClientError, ResourceRequest},
    domain::{
        limit::{LabelPattern, Rule},
        operation::Grant,
        resource::Dimension,
    },
    server::Options,
    transport::resource_manager::RequestTimeouts,
};
use tokio::task::JoinSet;
use tonic::Code;

use crate::{
    harness::*,
    proxy::{Cut, FaultPlan, Proxy},
};

/// Longer than any of these waits for anything.
const LONG: Duration = Duration::from_secs(20);

/// A call that is still to be made.
type Call = Pin<Box<dyn Future<Output = Result<(), ClientError>> + Send>>;

/// An EM that two instances serve: one that can be cut off from the database, and one that cannot.
struct Served {
    database: Database,
    /// The one that cannot.
    direct: Instance,
    /// Between the first and the database.
    proxy: Proxy,
    /// The first.
    rm: Instance,
}

impl Served {
    async fn start(name: &str) -> Self {
        Self::start_with(name, options()).await
    }

    /// The same, where the first has two seconds for each call.
    async fn start_hasty(name: &str) -> Self {
        let times = RequestTimeouts { request_timeout: Duration::from_secs(2), ..options().times };
        Self::start_with(name, Options { times, ..options() }).await
    }

    async fn start_with(name: &str, options: Options) -> Self {
        let (database, direct) = start().await;
        let registration = registration(em("host1"), load(1000, 1000, 1000));
        direct.client.register(registration).await.unwrap();
        let (proxy, proxied) = database.behind_proxy(name);
        let rm = Instance::start_with(&proxied, options).await;
        Self { database, direct, proxy, rm }
    }

    async fn grant(&self) -> Grant {
        self.direct.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted()
    }

    /// A call at the first instance that gives a ticket back.
    fn releases(&self, grant: &Grant) -> Call {
        let (client, release) = (self.rm.client.clone(), release(grant, "hadoop"));
        Box::pin(async move { client.resource_released(&release).await.map(drop) })
    }

    /// Has the first instance carry out `calls` in one batch and in this order, because they have waited for the EM, and tell that all was done.
    /// Its connection is cut when it commits, and it gets no other until `meanwhile` has happened.
    async fn cut(&self, cut: Cut, calls: Vec<Call>, meanwhile: impl Future<Output = ()>) {
        let mut holder = self.database.transaction_that_holds(&em("host1")).await;
        let mut made = JoinSet::new();
        for call in calls {
            made.spawn(call);
            let all = format!("linkis_rm_set_aside_operations {}", made.len());
            let waits = async || self.rm.metrics.text().unwrap().lines().any(|line| line == all);
            eventually("it waits", LONG, waits).await;
        }
        self.proxy.cut_commits(cut, 1);
        self.proxy.close();
        sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
        eventually("it is cut", LONG, async || self.proxy.cuts_left() == 0).await;
        meanwhile.await;
        self.proxy.open();
        for told in made.join_all().await {
            told.unwrap();
        }
    }
}

async fn commits_are_found_out(cut: Cut) {
    let Served { database, direct, proxy, rm } = Served::start(&format!("{cut:?}")).await;
    let host = em("host1");

    for round in 1..=5 {
        proxy.cut_commits(cut, 1);
        let grant = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
        assert_eq!(proxy.cuts_left(), 0, "it was cut");
        assert!(lives(&direct.client, grant.ticket_id).await, "what was told holds");
        assert_eq!(assert_invariants(&database, &direct.client).await, round, "granted once");

        direct.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        proxy.cut_commits(cut, 1);
        rm.client.resource_reported(&grant.reported(name("hadoop"), load(3, 2, 1))).await.unwrap();
        assert_eq!(proxy.cuts_left(), 0, "it was cut");
        let ticket = direct.client.ticket(grant.ticket_id).await.unwrap();
        assert_eq!(*ticket.resource(), load(3, 2, 1), "what was told holds");
        let lines = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'reported'";
        assert_eq!(database.count(lines).await, i64::try_from(round).unwrap(), "reported once");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_with_lost_reply_counts_once() {
    commits_are_found_out(Cut::AfterCommit).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_that_never_arrived_is_retried() {
    commits_are_found_out(Cut::BeforeCommit).await;
}

/// Another instance serves the same callers, their repetitions, and the same deadlines. What it did while a connection was away says nothing
/// about the batch that was undone there, of which that was a part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_evidence_ignores_other_transactions() {
    let served = Served::start("others").await;
    let (direct, host) = (&served.direct.client, em("host1"));
    let undone = Cut::BeforeCommit;

    let (repeated, released) = (served.grant().await, served.grant().await);
    let calls = vec![served.releases(&repeated), served.releases(&released)];
    served.cut(undone, calls, async { direct.resource_released(&release(&repeated, "hadoop")).await.unwrap() }).await;
    assert!(!lives(direct, released.ticket_id).await, "it was told to be released");

    let (repeated, used) = (served.grant().await, served.grant().await);
    let (client, reports) = (served.rm.client.clone(), inited(&used, "hadoop", None));
    let reports: Call = Box::pin(async move { client.resource_inited(&reports).await.map(drop) });
    let calls = vec![served.releases(&repeated), reports];
    served.cut(undone, calls, async { direct.resource_released(&release(&repeated, "hadoop")).await.unwrap() }).await;
    assert!(!direct.ticket(used.ticket_id).await.unwrap().is_locked(), "it was told to be in use");

    let released = served.grant().await;
    let adopt = adoption("host1", "hadoop", load(1, 1, 1));
    let (client, again) = (served.rm.client.clone(), adopt.clone());
    let adopts: Call = Box::pin(async move { client.adopt_ticket(&again).await.map(drop) });
    let calls = vec![adopts, served.releases(&released)];
    served.cut(undone, calls, async { drop(direct.adopt_ticket(&adopt).await.unwrap()) }).await;
    assert!(!lives(direct, released.ticket_id).await, "it was told to be released");

    let registration = registration(host.clone(), load(1000, 1000, 1000));
    let (client, again) = (served.rm.client.clone(), registration.clone());
    let registers: Call = Box::pin(async move { client.register(again).await.map(drop) });
    let (client, at) = (served.rm.client.clone(), host.clone());
    let drains: Call = Box::pin(async move { client.drain(&at, "a new disk").await.map(drop) });
    served.cut(undone, vec![registers, drains], async { drop(direct.register(registration).await.unwrap()) }).await;
    assert!(direct.em(&host).await.unwrap().drain.is_some(), "it was told to be drained");
    assert_invariants(&served.database, direct).await;
}

/// What was committed is told as that, and not done again, whatever somebody else did since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_evidence_survives_later_transactions() {
    let served = Served::start("since").await;
    let (direct, host) = (&served.direct.client, em("host1"));
    let (client, at) = (served.rm.client.clone(), host.clone());
    let drains: Call = Box::pin(async move { client.drain(&at, "a new disk").await.map(drop) });
    let resumed = async { assert!(direct.resume(&host, "it is there").await.unwrap(), "it was drained") };
    served.cut(Cut::AfterCommit, vec![drains], resumed).await;
    assert!(direct.em(&host).await.unwrap().drain.is_none(), "it was resumed after that");
    let drained = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'drained'";
    assert_eq!(served.database.count(drained).await, 1, "it was drained once");
}

/// A batch that tells nothing in the history: somebody enters the line by it.
async fn places_are_found_out(cut: Cut) {
    let served = Served::start(&format!("places-{cut:?}")).await;
    let (direct, host) = (&served.direct.client, em("host1"));
    let held = direct.request_resource(&request(&host, "hadoop", load(1000, 1000, 1000))).await.granted();
    let ask = ResourceRequest { wait_timeout: LONG, ..request(&host, "hadoop", load(1, 1, 1)) };
    let client = served.rm.client.clone();
    let asks: Call =
        Box::pin(async move { client.request_resource(&ask).await.map(|answer| drop(Ok(answer).granted())) });
    let served_next = async {
        eventually("it stands in line", LONG, async || direct.waiting().await.unwrap().len() == 1).await;
        direct.resource_released(&release(&held, "hadoop")).await.unwrap();
    };
    tokio::join!(served.cut(cut, vec![asks], async {}), served_next);
    assert!(direct.waiting().await.unwrap().is_empty(), "it has left the line");
    assert_eq!(assert_invariants(&served.database, direct).await, 1, "granted once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_entry_with_lost_commit_reply_is_granted() {
    places_are_found_out(Cut::AfterCommit).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_entry_with_lost_commit_is_entered_again() {
    places_are_found_out(Cut::BeforeCommit).await;
}

/// A limit on the cores of one creator.
fn seven_cores(creator: &str) -> Rule {
    let pattern = LabelPattern::new([("creator".to_owned(), Some(creator.to_owned()))].into());
    Rule { pattern, mode: Default::default(), max: [(Dimension::Cores, 7)].into() }
}

/// A limit that may have been set is not said not to be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_with_cut_commit_returns_commit_unknown() {
    let (database, _direct) = start().await;
    for cut in [Cut::BeforeCommit, Cut::AfterCommit] {
        let (proxy, proxied) = database.behind_proxy(&format!("limits-{cut:?}"));
        let rm = Instance::start(&proxied).await;
        let rule = seven_cores("IDE");
        proxy.cut_commits(cut, 1);
        let error = rm.client.set_limit(&rule).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("COMMIT_UNKNOWN"), "{error}");
        assert_eq!(rm.client.limits().await.unwrap().contains(&rule), matches!(cut, Cut::AfterCommit));
        rm.client.set_limit(&rule).await.unwrap();
        rm.client.delete_limit(&rule.pattern).await.unwrap();
    }
}

/// Nor is it if there is no time left to hear of its commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_claims_to_know_of_a_limit_whose_commit_is_late() {
    let Served { direct, proxy, rm, .. } = Served::start_hasty("limits-late").await;
    let rule = seven_cores("IDE");
    proxy.cut_commits(Cut::Silence, 1);
    let error = rm.client.set_limit(&rule).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("COMMIT_UNKNOWN"), "{error}");
    assert!(direct.client.limits().await.unwrap().contains(&rule), "it was set");
    proxy.set_fault_plan(FaultPlan::Fair);
}

/// A database that stands still keeps nobody who changes limits beyond his own deadline; and when it goes on, nobody at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_change_on_frozen_database_ends_by_deadline() {
    let Served { database, direct, proxy, rm } = Served::start("limits-frozen").await;
    let host = em("host1");
    rm.client.set_limit(&seven_cores("before")).await.unwrap();
    // It stands still before a change, and wherever a change of limits may be: each answer takes a while.
    for late in [0, 30, 60, 90, 120, 150, 180] {
        proxy.set_fault_plan(FaultPlan::Slow(Duration::from_millis(10)));
        let mut setters = JoinSet::new();
        for n in 0..6 {
            let (client, rule) =
                (hurried(&rm.address, Duration::from_millis(700 + 200 * n)), seven_cores(&format!("{late}-{n}")));
            setters.spawn(async move {
                let begun = Instant::now();
                (n, client.set_limit(&rule).await.map(drop), begun.elapsed())
            });
        }
        tokio::time::sleep(Duration::from_millis(late)).await;
        proxy.set_fault_plan(FaultPlan::Hole);
        while let Some(answer) = setters.join_next().await {
            let (n, answer, took) = answer.unwrap();
            assert!(took < Duration::from_millis(700 + 200 * n + 1500), "{n} of {late}: {answer:?} after {took:?}");
            if let Err(error) = answer {
                let told = ["LOCK_TIMEOUT", "NOT_BEGUN", "DATABASE_UNAVAILABLE", "COMMIT_UNKNOWN"];
                assert!(error.reason().is_some_and(|reason| told.contains(&reason.as_str())), "{error}");
            }
        }
        // Whatever the frozen one held, the database takes back; and the other goes on where it was.
        let ask = request(&host, "hadoop", load(1, 1, 1));
        eventually("others are served", Duration::from_secs(10), async || {
            direct.client.request_resource(&ask).await.is_ok()
        })
        .await;
        proxy.set_fault_plan(FaultPlan::Fair);
        eventually("it is served again", Duration::from_secs(20), async || {
            rm.client.set_limit(&seven_cores("after")).await.is_ok() && rm.client.request_resource(&ask).await.is_ok()
        })
        .await;
    }
    assert_invariants(&database, &direct.client).await;
}

/// However long the database takes to say how a commit ended, whoever waits for it is answered in time; and has nothing then, unless he
/// can come back for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_with_late_commit_ends_by_deadline() {
    let Served { database, direct, proxy, rm } = Served::start_hasty("grants-late").await;
    let host = em("host1");
    for request_id in [None, Some("r1".to_owned())] {
        let warm = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
        rm.client.ticket_released(warm.ticket_id).await.unwrap();
        let asked = ResourceRequest { request_id, ..request(&host, "hadoop", load(1, 1, 1)) };
        proxy.cut_commits(Cut::Silence, 1);
        // In less time than the database has to answer.
        let hasty = hurried(&rm.address, Duration::from_secs(10));
        let error = hasty.request_resource(&asked).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("COMMIT_UNKNOWN"), "{error}");
        proxy.set_fault_plan(FaultPlan::Fair);
        match asked.request_id {
            None => {
                let tickets = "SELECT count(*) FROM linkis_user_resource_meta_data";
                let nothing_stays = || async { database.count(tickets).await == 0 };
                eventually("it is taken back", Duration::from_secs(20), nothing_stays).await;
            }
            Some(_) => {
                let told = || async { rm.client.request_resource(&asked).await.is_ok() };
                eventually("it is told when he comes back", Duration::from_secs(20), told).await;
            }
        }
    }
    assert_eq!(assert_invariants(&database, &direct.client).await, 1, "granted once");
}

/// Nobody may repeat by himself what may have been granted, unless that is no second grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_in_doubt_is_retryable_only_with_id() {
    let Served { database, direct, proxy, rm } = Served::start("doubt").await;
    let host = em("host1");
    for (round, request_id) in [(1, None), (2, Some("r1".to_owned()))] {
        let request = ResourceRequest { request_id, ..request(&host, "hadoop", load(1, 1, 1)) };
        let without_id = ResourceRequest { request_id: None, ..request.clone() };
        let warm = rm.client.request_resource(&without_id).await.granted();
        rm.client.ticket_released(warm.ticket_id).await.unwrap();
        // It commits, nobody hears of it, and there is no way back.
        proxy.cut_commits(Cut::AfterCommit, 1);
        proxy.close();
        let error = rm.client.request_resource(&request).await.unwrap_err();
        assert_eq!((error.reason().as_deref(), proxy.cuts_left()), (Some("COMMIT_UNKNOWN"), 0), "{error}");
        match &request.request_id {
            None => {
                assert_eq!((error.code(), error.retry_after()), (Some(Code::Unknown), None));
                let ticket_id = error.fact("ticket_id").unwrap().parse().unwrap();
                assert!(lives(&direct.client, ticket_id).await, "what was granted is told");
            }
            Some(_) => {
                assert!(error.code() == Some(Code::Unavailable) && error.retry_after().is_some(), "{error}");
                direct.client.request_resource(&request).await.granted();
            }
        }
        assert_eq!(assert_invariants(&database, &direct.client).await, round, "granted once");
        proxy.open();
        eventually("it serves again", Duration::from_secs(20), || async {
            rm.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.is_ok()
        })
        .await;
    }
}
