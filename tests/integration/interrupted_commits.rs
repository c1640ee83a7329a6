//! Connections that break during a commit: the service determines by evidence whether the commit took effect.

use std::time::Duration;

use rm_client::ResourceRequest;
use rm_model::{limit::Rule, operation::Grant, resource::Dimension};
use tokio::task::JoinSet;
use tonic::Code;

use crate::{
    harness::*,
    proxy::{Cut, FaultPlan, Proxy},
};

/// One EM and two instances; a proxy can cut the connection of one of them to the database.
struct Served {
    database: Database,
    /// Instance without a proxy.
    direct: Instance,
    proxy: Proxy,
    /// Instance behind the proxy.
    rm: Instance,
}

impl Served {
    async fn start(name: &str) -> Self {
        Self::start_with(name, settings()).await
    }

    /// Starts the instance behind the proxy with a request timeout of two seconds.
    async fn start_hasty(name: &str) -> Self {
        Self::start_with(name, settings().with_time("--request-timeout", Duration::from_secs(2))).await
    }

    async fn start_with(name: &str, settings: Settings) -> Self {
        let (database, direct) = start().await;
        let registration = registration(em("host1"), load(1000, 1000, 1000));
        direct.client.register(registration).await.unwrap();
        database.lease_is_owned().await;
        let (proxy, proxied) = database.behind_proxy(name);
        let rm = Instance::start_with(&proxied, settings).await;
        Self { database, direct, proxy, rm }
    }

    async fn grant(&self) -> Grant {
        self.direct.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted()
    }

    /// A release through the instance behind the proxy.
    fn releases(&self, grant: &Grant) -> PendingCall {
        let (client, release) = (self.rm.client.clone(), release(grant, "hadoop"));
        Box::pin(async move { client.resource_released(&release).await.map(drop) })
    }

    /// Makes `calls` one batch of the instance behind the proxy, in this order, and cuts its connection at the commit.
    /// The instance gets no other connection until `meanwhile` has ended. All calls must succeed.
    async fn cut(&self, cut: Cut, calls: Vec<PendingCall>, meanwhile: impl Future<Output = ()>) {
        let cut_off = || {
            self.proxy.cut_commits(cut, 1);
            self.proxy.close();
        };
        let made = in_one_batch(&self.database, &self.rm, &em("host1"), calls, cut_off).await;
        eventually("the commit is cut", LONG, async || self.proxy.cuts_left() == 0).await;
        meanwhile.await;
        self.proxy.open();
        made.join_all().await.into_iter().for_each(|result| result.unwrap());
    }
}

async fn commits_are_found_out(cut: Cut) {
    let Served { database, direct, proxy, rm } = Served::start(&format!("{cut:?}")).await;
    let em1 = em("host1");

    for round in 1..=5 {
        proxy.cut_commits(cut, 1);
        let grant = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
        assert_eq!(proxy.cuts_left(), 0, "the commit was cut");
        assert!(lives(&direct.client, grant.ticket_id).await, "the reply is true");
        assert_eq!(assert_invariants(&database, &direct.client).await, round, "granted once");

        direct.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        proxy.cut_commits(cut, 1);
        rm.client.resource_reported(&grant.reported(name("hadoop"), load(3, 2, 1))).await.unwrap();
        assert_eq!(proxy.cuts_left(), 0, "the commit was cut");
        let ticket = direct.client.ticket(grant.ticket_id).await.unwrap();
        assert_eq!(*ticket.resource(), load(3, 2, 1), "the reply is true");
        assert_eq!(database.recorded("reported").await, i64::try_from(round).unwrap(), "reported once");
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

/// Another instance can do a part of an undone batch meanwhile, because a caller repeats its call there. That part is no evidence
/// that the batch was committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_evidence_ignores_other_transactions() {
    let served = Served::start("others").await;
    let (direct, em1) = (&served.direct.client, em("host1"));
    let undone = Cut::BeforeCommit;

    let (repeated, released) = (served.grant().await, served.grant().await);
    let calls = vec![served.releases(&repeated), served.releases(&released)];
    served.cut(undone, calls, async { direct.resource_released(&release(&repeated, "hadoop")).await.unwrap() }).await;
    assert!(!lives(direct, released.ticket_id).await, "the reply said that the ticket is released");

    let (repeated, used) = (served.grant().await, served.grant().await);
    let (client, reports) = (served.rm.client.clone(), inited(&used, "hadoop", None));
    let reports: PendingCall = Box::pin(async move { client.resource_inited(&reports).await.map(drop) });
    let calls = vec![served.releases(&repeated), reports];
    served.cut(undone, calls, async { direct.resource_released(&release(&repeated, "hadoop")).await.unwrap() }).await;
    assert!(!direct.ticket(used.ticket_id).await.unwrap().is_locked(), "the reply said that the ticket is used");

    let released = served.grant().await;
    let adopt = adoption("host1", "hadoop", load(1, 1, 1));
    let (client, again) = (served.rm.client.clone(), adopt.clone());
    let adopts: PendingCall = Box::pin(async move { client.adopt_ticket(&again).await.map(drop) });
    let calls = vec![adopts, served.releases(&released)];
    served.cut(undone, calls, async { drop(direct.adopt_ticket(&adopt).await.unwrap()) }).await;
    assert!(!lives(direct, released.ticket_id).await, "the reply said that the ticket is released");

    let registration = registration(em1.clone(), load(1000, 1000, 1000));
    let (client, again) = (served.rm.client.clone(), registration.clone());
    let registers: PendingCall = Box::pin(async move { client.register(again).await.map(drop) });
    let (client, at) = (served.rm.client.clone(), em1.clone());
    let drains: PendingCall = Box::pin(async move { client.drain(&at, "a new disk").await.map(drop) });
    served.cut(undone, vec![registers, drains], async { drop(direct.register(registration).await.unwrap()) }).await;
    assert!(direct.em(&em1).await.unwrap().drain.is_some(), "the reply said that the EM is drained");
    assert_invariants(&served.database, direct).await;
}

/// A committed batch is not repeated after later commits of another instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_evidence_survives_later_transactions() {
    let served = Served::start("since").await;
    let (direct, em1) = (&served.direct.client, em("host1"));
    let (client, at) = (served.rm.client.clone(), em1.clone());
    let drains: PendingCall = Box::pin(async move { client.drain(&at, "a new disk").await.map(drop) });
    let resumed = async { assert!(direct.resume(&em1, "it is there").await.unwrap(), "the EM was drained") };
    served.cut(Cut::AfterCommit, vec![drains], resumed).await;
    assert!(direct.em(&em1).await.unwrap().drain.is_none(), "the EM was resumed afterwards");
    assert_eq!(served.database.recorded("drained").await, 1, "the EM was drained once");
}

/// A batch without history lines: it adds an entry to a wait queue.
async fn queue_entries_are_found_out(cut: Cut) {
    let served = Served::start(&format!("entries-{cut:?}")).await;
    let (direct, em1) = (&served.direct.client, em("host1"));
    let held = direct.request_resource(&request(&em1, "hadoop", load(1000, 1000, 1000))).await.granted();
    let ask = ResourceRequest { wait_timeout: LONG, ..request(&em1, "hadoop", load(1, 1, 1)) };
    let client = served.rm.client.clone();
    let asks: PendingCall =
        Box::pin(async move { client.request_resource(&ask).await.map(|answer| drop(Ok(answer).granted())) });
    let served_next = async {
        eventually("the request waits", LONG, async || direct.waiting().await.unwrap().len() == 1).await;
        direct.resource_released(&release(&held, "hadoop")).await.unwrap();
    };
    tokio::join!(served.cut(cut, vec![asks], async {}), served_next);
    assert!(direct.waiting().await.unwrap().is_empty(), "the wait queue is empty");
    assert_eq!(assert_invariants(&served.database, direct).await, 1, "granted once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_entry_with_lost_commit_reply_is_granted() {
    queue_entries_are_found_out(Cut::AfterCommit).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_entry_with_lost_commit_is_entered_again() {
    queue_entries_are_found_out(Cut::BeforeCommit).await;
}

/// A limit whose commit may have taken effect is never reported as failed; also if the database does not reply in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_with_cut_commit_returns_commit_unknown() {
    let (database, direct) = start().await;
    for cut in [Cut::BeforeCommit, Cut::AfterCommit, Cut::Silence] {
        let (proxy, proxied) = database.behind_proxy(&format!("limits-{cut:?}"));
        let rm =
            Instance::start_with(&proxied, settings().with_time("--request-timeout", Duration::from_secs(2))).await;
        let rule = seven_cores("IDE");
        // Those of background tasks, too, of which one may be the first.
        proxy.cut_commits(cut, 1000);
        let error = rm.client.set_limit(&rule).await.unwrap_err();
        proxy.cut_commits(cut, 0);
        assert_eq!(error.reason().as_deref(), Some("COMMIT_UNKNOWN"), "{error}");
        let is_set = async || direct.client.limits().await.unwrap().contains(&rule);
        let is_right = async || is_set().await != matches!(cut, Cut::BeforeCommit);
        eventually("a commit that arrived has its effect", LONG, is_right).await;
        proxy.set_fault_plan(FaultPlan::Fair);
        eventually("the instance sets limits", LONG, async || rm.client.set_limit(&rule).await.is_ok()).await;
        rm.client.delete_limit(&rule.pattern).await.unwrap();
    }
}

/// A limit on the cores of one creator.
fn seven_cores(creator: &str) -> Rule {
    limit(&[("creator", Some(creator))], &[(Dimension::Cores, 7)])
}

/// A change of limits on a frozen database ends by its own deadline, and leaves no lock behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_change_on_frozen_database_ends_by_deadline() {
    let Served { database, direct, proxy, rm } = Served::start_hasty("limits-frozen").await;
    let em1 = em("host1");
    rm.client.set_limit(&seven_cores("before")).await.unwrap();
    // The database freezes at different points of the changes.
    for messages in [0, 6, 12, 18, 24, 30, 36] {
        proxy.set_fault_plan(FaultPlan::Slow(Duration::from_millis(10)));
        let (before, mut setters) = (proxy.passed(), JoinSet::new());
        for n in 0..6 {
            let (client, rule) = (rm.client.clone(), seven_cores(&format!("{messages}-{n}")));
            setters.spawn(async move { client.set_limit(&rule).await });
        }
        eventually("so many messages pass", LONG, async || proxy.passed() >= before + messages).await;
        proxy.set_fault_plan(FaultPlan::Hole);
        while let Some(answer) = setters.join_next().await {
            // At its deadline, a call without a reply would end without a reason.
            if let Err(error) = answer.unwrap() {
                let reasons = ["LOCK_TIMEOUT", "NOT_BEGUN", "DATABASE_UNAVAILABLE", "COMMIT_UNKNOWN"];
                assert!(error.reason().is_some_and(|reason| reasons.contains(&reason.as_str())), "{error}");
            }
        }
        // The database ends the locks of the frozen connections; the other instance serves meanwhile.
        let ask = request(&em1, "hadoop", load(1, 1, 1));
        eventually("others are served", LONG, async || direct.client.request_resource(&ask).await.is_ok()).await;
        proxy.set_fault_plan(FaultPlan::Fair);
        eventually("the instance serves again", Duration::from_secs(20), async || {
            rm.client.set_limit(&seven_cores("after")).await.is_ok() && rm.client.request_resource(&ask).await.is_ok()
        })
        .await;
    }
    assert_invariants(&database, &direct.client).await;
}

/// A call whose commit has no reply yet ends by its deadline. Its ticket is released, unless a request id lets the caller repeat the call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_with_late_commit_ends_by_deadline() {
    let Served { database, direct, proxy, rm } = Served::start_hasty("grants-late").await;
    let em1 = em("host1");
    for request_id in [None, Some("r1".to_owned())] {
        let warm = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
        rm.client.ticket_released(warm.ticket_id).await.unwrap();
        let asked = ResourceRequest { request_id, ..request(&em1, "hadoop", load(1, 1, 1)) };
        proxy.cut_commits(Cut::Silence, 1);
        // Less than the timeout of a statement.
        let hasty = hurried(&rm.address, Duration::from_secs(10));
        let error = hasty.request_resource(&asked).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("COMMIT_UNKNOWN"), "{error}");
        proxy.set_fault_plan(FaultPlan::Fair);
        match asked.request_id {
            None => {
                let tickets = "SELECT count(*) FROM linkis_user_resource_meta_data";
                let nothing_stays = || async { database.count(tickets).await == 0 };
                eventually("the ticket is released", Duration::from_secs(20), nothing_stays).await;
            }
            Some(_) => {
                let got = || async { rm.client.request_resource(&asked).await.is_ok() };
                eventually("the repeated request is granted", Duration::from_secs(20), got).await;
            }
        }
    }
    assert_eq!(assert_invariants(&database, &direct.client).await, 1, "granted once");
}

/// A caller that got no grant finds its ticket by the error's id and starts an engine. The undo of the grant ends no used ticket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn confirmed_ticket_of_late_commit_stays() {
    let Served { database, direct, proxy, rm } = Served::start_hasty("grants-found").await;
    let em1 = em("host1");
    let warm = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    rm.client.ticket_released(warm.ticket_id).await.unwrap();
    proxy.cut_commits(Cut::Silence, 1);
    let hasty = hurried(&rm.address, Duration::from_secs(10));
    let error = hasty.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.unwrap_err();
    let granted = Grant { ticket_id: error.fact("ticket_id").unwrap().parse().unwrap(), ..warm };
    direct.client.resource_inited(&inited(&granted, "hadoop", None)).await.unwrap();
    proxy.set_fault_plan(FaultPlan::Fair);
    // The undo comes before the second of these requests: the instance first learns that the commit took effect.
    let granted_again = async || rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await;
    eventually("it is served again", Duration::from_secs(20), async || granted_again().await.is_ok()).await;
    granted_again().await.granted();
    assert!(lives(&direct.client, granted.ticket_id).await, "a used ticket stays");
    assert_eq!(assert_invariants(&database, &direct.client).await, 3);
}

/// A client must not repeat a request that may be granted, unless a request id prevents a second grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_in_doubt_is_retryable_only_with_id() {
    let Served { database, direct, proxy, rm } = Served::start("doubt").await;
    let em1 = em("host1");
    for (round, request_id) in [(1, None), (2, Some("r1".to_owned()))] {
        let request = ResourceRequest { request_id, ..request(&em1, "hadoop", load(1, 1, 1)) };
        let without_id = ResourceRequest { request_id: None, ..request.clone() };
        let warm = rm.client.request_resource(&without_id).await.granted();
        rm.client.ticket_released(warm.ticket_id).await.unwrap();
        // The commit takes effect, its reply is lost, and no other connection can be made.
        proxy.cut_commits(Cut::AfterCommit, 1);
        proxy.close();
        let error = rm.client.request_resource(&request).await.unwrap_err();
        assert_eq!((error.reason().as_deref(), proxy.cuts_left()), (Some("COMMIT_UNKNOWN"), 0), "{error}");
        match &request.request_id {
            None => {
                assert_eq!((error.code(), error.retry_after()), (Some(Code::Unknown), None));
                let ticket_id = error.fact("ticket_id").unwrap().parse().unwrap();
                assert!(lives(&direct.client, ticket_id).await, "the error names the ticket");
            }
            Some(_) => {
                assert!(error.code() == Some(Code::Unavailable) && error.retry_after().is_some(), "{error}");
                direct.client.request_resource(&request).await.granted();
            }
        }
        assert_eq!(assert_invariants(&database, &direct.client).await, round, "granted once");
        proxy.open();
        eventually("the instance serves again", Duration::from_secs(20), || async {
            rm.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.is_ok()
        })
        .await;
    }
}

/// The commit of a waiting request breaks, and the database stays away until the caller has the reply that the result is unknown.
/// The position is kept for the repeated call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_commit_of_waiting_request_keeps_position() {
    let Served { database, direct, proxy, rm } = Served::start("waiting").await;
    let all = request(&em("host1"), "hadoop", load(1000, 1000, 1000));
    let grant = direct.client.request_resource(&all).await.granted();
    let waits = ResourceRequest { request_id: Some("r1".into()), wait_timeout: LONG, ..all };
    let client = rm.client.clone();
    let call = tokio::spawn(async move { client.request_resource(&waits).await });
    let rows = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("the request waits", LONG, async || database.count(rows).await == 1).await;
    proxy.cut_commits(Cut::BeforeCommit, 1);
    proxy.close();
    direct.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    eventually("the commit is cut", LONG, async || proxy.cuts_left() == 0).await;
    direct.stop().await;
    let error = call.await.unwrap().unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("COMMIT_UNKNOWN"));
    proxy.open();
    let kept = format!("{rows} WHERE kept_until IS NOT NULL");
    eventually("the position is kept", LONG, async || database.count(&kept).await == 1).await;
}
