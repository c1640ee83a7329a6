//! Concurrent calls on several instances, and keys that other transactions lock.

use std::time::Duration;

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{
    hold::NewHold,
    limit::{LabelPattern, Rule},
    operation::LockKey,
    resource::Dimension,
};
use tokio::task::JoinSet;
use tonic::Code;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_grant_capacity_exactly() {
    let (database, first, second) = two().await;
    let em1 = em("host1");
    first.client.register(registration(em1.clone(), load(1000, 1000, 48))).await.unwrap();

    let mut calls = JoinSet::new();
    for n in 0..400 {
        let client = [&first, &second][n % 2].client.clone();
        let em1 = em1.clone();
        calls.spawn(async move {
            let user = format!("user{}", n % 50);
            match client.request_resource(&request(&em1, &user, load(1, 1, 1))).await.unwrap() {
                ResultResource::Available(grant) => Some((grant, user)),
                ResultResource::NotEnough(refusal) => {
                    assert_eq!(refusal.shortfalls[0].available, 0, "refused only when it is full: {refusal:?}");
                    None
                }
            }
        });
    }
    let granted: Vec<_> = calls.join_all().await.into_iter().flatten().collect();
    assert_eq!(granted.len(), 48);
    assert_eq!(assert_invariants(&database, &first.client).await, 48);

    // Each engine continues through the other instance until its end, and no ticket remains.
    let mut lives = JoinSet::new();
    for (n, (grant, user)) in granted.into_iter().enumerate() {
        let client = [&second, &first][n % 2].client.clone();
        lives.spawn(async move {
            client.resource_inited(&inited(&grant, &user, None)).await.unwrap();
            client.resource_released(&release(&grant, &user)).await.unwrap();
        });
    }
    lives.join_all().await;
    assert!(first.client.em(&em1).await.unwrap().is_idle());
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
}

/// Callers with common users and EMs make every kind of call through two instances: no deadlock, and no lost ticket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_lifecycles_on_two_instances_never_deadlock() {
    let (database, first, second) = two().await;
    let ems: Vec<_> = (0..5).map(|n| em(&format!("host{n}"))).collect();
    for host in &ems {
        first.client.register(registration(host.clone(), load(100, 100, 20))).await.unwrap();
    }
    let mut callers = JoinSet::new();
    for caller in 0..200 {
        let client = [&first, &second][caller % 2].client.clone();
        let ems = ems.clone();
        callers.spawn(async move {
            for turn in 0..5 {
                let user = format!("user{}", (caller * 7 + turn) % 11);
                let host = &ems[(caller * 3 + turn) % ems.len()];
                let Ok(ResultResource::Available(grant)) =
                    client.request_resource(&request(host, &user, load(1, 2, 1))).await
                else {
                    continue;
                };
                if turn % 2 == 0 {
                    client.resource_inited(&inited(&grant, &user, Some(load(1, 1, 1)))).await.unwrap();
                }
                client.resource_released(&release(&grant, &user)).await.unwrap();
            }
        });
    }
    callers.join_all().await;
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
    assert!(first.client.ems().await.unwrap().iter().all(|em| em.is_idle()));
    first.stop().await;
    second.stop().await;
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(database.count(deadlocks).await, 0, "locks are taken in one order");
}

/// Longer than waiting requests take one after another on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// A server whose calls wait for a lock until the test ends it, and a client with this patience.
pub async fn start_patient() -> (Database, Instance, RmClient) {
    let database = Database::fresh().await;
    let rm = Instance::start_with(&database, settings().with_time("--request-timeout", PATIENCE)).await;
    let patient = hurried(&rm.address, PATIENCE);
    (database, rm, patient)
}

/// Requests on other EMs are granted while an EM is contended, and meet no contention; its own requests are granted once the lock ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_em_does_not_delay_other_ems() {
    let (database, rm, patient) = start_patient().await;
    register_all(&rm.client, ["held", "free"], load(1000, 1000, 1000)).await;
    let mut holder = database.transaction_that_holds(&em("held")).await;
    let mut waiting = JoinSet::new();
    for n in 0..20 {
        let client = patient.clone();
        waiting.spawn(async move {
            client.request_resource(&request(&em("held"), &format!("waiter{n}"), load(1, 1, 1))).await.granted()
        });
    }
    eventually("all are contended", LONG, async || rm.metric("linkis_rm_contended_operations") == 20.0).await;
    // The service replies before the caller's own deadline, which would be DEADLINE_EXCEEDED, and grants nothing.
    let hasty = hurried(&rm.address, Duration::from_secs(3));
    let error = hasty.request_resource(&request(&em("held"), "hurried", load(1, 1, 1))).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::Aborted), Some("LOCK_TIMEOUT")), "{error}");

    let contentions = rm.counter("linkis_rm_contentions_total");
    for n in 0..100 {
        let user = format!("user{}", n % 10);
        let grant = patient.request_resource(&request(&em("free"), &user, load(1, 1, 1))).await.granted();
        patient.resource_released(&release(&grant, &user)).await.unwrap();
    }
    assert_eq!(rm.counter("linkis_rm_contentions_total"), contentions, "no other call meets the lock");
    assert!(waiting.try_join_next().is_none(), "no request passes the lock");
    execute(&mut holder, "ROLLBACK").await;
    waiting.join_all().await;
    assert_invariants(&database, &rm.client).await;
    assert_eq!(rm.client.tickets(Some(&em("held"))).await.unwrap().len(), 20, "no ticket for the rejected request");
}

/// A locked user delays requests only if a limit counts by user.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_lock_requires_limit_by_user() {
    let (database, rm) = start_with_em(em("a"), load(1000, 1000, 1000)).await;
    let by_creator = LabelPattern::new([("creator".to_owned(), None)].into());
    let max = [(Dimension::Instances, 1000)].into();
    rm.client
        .set_limit(&Rule { pattern: by_creator, mode: Default::default(), max, guarantee: Default::default() })
        .await
        .unwrap();
    let mut holder = database.connect().await;
    execute(&mut holder, r#"BEGIN; INSERT INTO linkis_resource_lock (scope, "user") VALUES ('user', 'hadoop')"#).await;
    for _ in 0..20 {
        let grant = rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
        rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    rm.client.set_limit(&each_user(1000)).await.unwrap();
    let hasty = hurried(&rm.address, Duration::from_secs(3));
    let error = hasty.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("LOCK_TIMEOUT"), "{error}");
    rm.client.delete_limit(&each_user(1000).pattern).await.unwrap();
    // The next request is of the same user, while an earlier one may still wait for the lock.
    rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
    execute(&mut holder, "ROLLBACK").await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// Without a limit by user, user keys are not locked: a row of another program there blocks nothing, and a hold does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_of_user_needs_no_limit() {
    let (database, rm) = start_with_em(em("a"), load(1000, 1000, 1000)).await;
    rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
    database.execute(r#"INSERT INTO linkis_resource_lock (scope, "user") VALUES ('user', 'hadoop')"#).await;
    rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
    database.release_holds().await;
    let (key, duration) = (LockKey::User(name("hadoop")), Duration::from_secs(600));
    rm.client.hold(&NewHold { key: key.clone(), duration, reason: name("an audit") }).await.unwrap();
    assert_contended(&rm, rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1)))).await;
    rm.client.request_resource(&request(&em("a"), "alice", load(1, 1, 1))).await.granted();
    assert!(rm.client.release_hold(&key).await.unwrap());
    rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
    assert_invariants(&database, &rm.client).await;
}

/// A request that cannot be granted is refused without locks, also while another transaction owns them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_needs_no_lock() {
    let (database, rm) = start_with_em(em("held"), load(10, 10, 10)).await;
    let _holder = database.transaction_that_holds(&em("held")).await;
    let refusal = rm.client.request_resource(&request(&em("held"), "hadoop", load(11, 1, 1))).await.refused();
    assert!(refusal.never_fits);
    let unknown = rm.client.request_resource(&request(&em("nowhere"), "hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(unknown.reason().as_deref(), Some("EM_NOT_REGISTERED"));
}

/// The server bounds each call's wait for a hold by its own request timeout. Other EMs are served meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_timeout_bounds_lock_wait() {
    let database = Database::fresh().await;
    let options = settings().with_time("--request-timeout", Duration::from_secs(2));
    let rm = Instance::start_with(&database, options).await;
    register_all(&rm.client, ["held", "free"], load(10, 10, 10)).await;
    database.hold_by_hand(&em("held")).await;
    for _ in 0..5 {
        let error = rm.client.request_resource(&request(&em("held"), "hadoop", load(1, 1, 1))).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("LOCK_TIMEOUT"));
    }
    rm.client.request_resource(&request(&em("free"), "alice", load(1, 1, 1))).await.granted();
    database.release_holds().await;
    rm.client.request_resource(&request(&em("held"), "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

/// A row that is locked without its resource lock delays only the calls that need the row. A batch that waited without success
/// leaves no transaction open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_row_does_not_delay_other_ems() {
    let (database, rm, patient) = start_patient().await;
    register_all(&rm.client, ["held", "free"], load(1000, 1000, 1000)).await;
    let locked = "SELECT * FROM linkis_em_resource_meta_data WHERE em_instance = 'held:9102' FOR UPDATE";
    let mut holder = database.transaction(locked).await;
    let waiting = request_in_task(&patient, request(&em("held"), "hadoop", load(1, 1, 1)));
    let mut calls = JoinSet::new();
    for n in 0..200 {
        let (client, asked) = (patient.clone(), request(&em("free"), &format!("user{n}"), load(1, 1, 1)));
        calls.spawn(async move { client.request_resource(&asked).await.granted() });
    }
    calls.join_all().await;
    // The request has waited in a batch, and then in the contended-key queue.
    eventually("the request is contended", LONG, async || rm.metric("linkis_rm_contended_operations") == 1.0).await;
    // The next attempt opens another one.
    let failed = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE '%(aborted)'";
    eventually("failed transactions are rolled back", LONG, async || database.count(failed).await == 0).await;
    assert!(!waiting.is_finished());
    execute(&mut holder, "ROLLBACK").await;
    waiting.await.unwrap().granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 201);
}

/// Requests of one batch whose row is locked wait together after one of them has shown its key: they delay others by a second, not by 0.2 s
/// each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_row_of_many_requests_delays_other_ems_once() {
    let (database, rm, patient) = start_patient().await;
    register_all(&rm.client, ["held", "free"], load(1000, 1000, 1000)).await;
    let locked = "SELECT * FROM linkis_em_resource_meta_data WHERE em_instance = 'held:9102' FOR UPDATE";
    let mut holder = database.transaction(locked).await;
    // A batch that waits for the limits gathers the requests for the next one.
    let mut changing = database.transaction("LOCK TABLE linkis_resource_limit_version IN ACCESS EXCLUSIVE MODE").await;
    let first = request_in_task(&patient, request(&em("free"), "hadoop", load(1, 1, 1)));
    let is_first_waiting = async || locked_out(&database, "linkis_resource_limit_version").await > 0;
    eventually("the first batch waits", LONG, is_first_waiting).await;
    let waiting: Vec<_> =
        (0..200).map(|n| request_in_task(&patient, request(&em("held"), &format!("user{n}"), load(1, 1, 1)))).collect();
    let queued = async || rm.metric("linkis_rm_committer_queue_operations") >= 200.0;
    eventually("all requests are in the queue", LONG, queued).await;
    execute(&mut changing, "ROLLBACK").await;
    first.await.unwrap().granted();
    // Half as long as 200 pairs of lock timeouts.
    let hurried = hurried(&rm.address, Duration::from_secs(20));
    hurried.request_resource(&request(&em("free"), "hadoop", load(1, 1, 1))).await.granted();
    execute(&mut holder, "ROLLBACK").await;
    for call in waiting {
        call.await.unwrap().granted();
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 202);
}

/// A locked row of a user's scope delays no other user for as long as it is locked, on the same EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_scope_row_of_user_does_not_block_other_users() {
    let (database, rm, patient) = start_patient().await;
    register_all(&rm.client, ["em1"], load(1000, 1000, 1000)).await;
    rm.client.set_limit(&each_user(1000)).await.unwrap();
    rm.client.request_resource(&request(&em("em1"), "hadoop", load(1, 1, 1))).await.granted();
    let locked = r#"SELECT * FROM linkis_label_resource WHERE scope = '{"user": "hadoop"}' FOR UPDATE"#;
    let mut holder = database.transaction(locked).await;
    let of_user = |user: &str| request_in_task(&patient, request(&em("em1"), user, load(1, 1, 1)));
    // A batch that waits for the limits gathers the requests for the next one: those of the locked user first.
    let mut changing = database.transaction("LOCK TABLE linkis_resource_limit_version IN ACCESS EXCLUSIVE MODE").await;
    let first = of_user("user0");
    let is_first_waiting = async || locked_out(&database, "linkis_resource_limit_version").await > 0;
    eventually("the first batch waits", LONG, is_first_waiting).await;
    let queued = async |count| rm.metric("linkis_rm_committer_queue_operations") >= count;
    let waiting: Vec<_> = (0..20).map(|_| of_user("hadoop")).collect();
    eventually("the requests of the locked user are in the queue", LONG, async || queued(20.0).await).await;
    let others: Vec<_> = (1..20).map(|n| of_user(&format!("user{n}"))).collect();
    eventually("all requests are in the queue", LONG, async || queued(39.0).await).await;
    execute(&mut changing, "ROLLBACK").await;
    for call in others.into_iter().chain([first]) {
        tokio::time::timeout(LONG, call).await.unwrap().unwrap().granted();
    }
    assert!(waiting.iter().all(|call| !call.is_finished()));
    execute(&mut holder, "ROLLBACK").await;
    for call in waiting {
        call.await.unwrap().granted();
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 41);
}

/// A request without an EM leaves an EM whose row another program locks, and is granted on another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_row_sends_request_without_em_to_other_em() {
    let (database, rm) = start().await;
    register_all(&rm.client, ["locked", "free"], load(1000, 1000, 1000)).await;
    // The other EM is the emptier one.
    rm.client.request_resource(&request(&em("free"), "hadoop", load(500, 500, 1))).await.granted();
    let locked = "SELECT * FROM linkis_em_resource_meta_data WHERE em_instance = 'locked:9102' FOR UPDATE";
    let mut holder = database.transaction(locked).await;
    let any_em = ResourceRequest { em: None, ..request(&em("free"), "hadoop", load(1, 1, 1)) };
    for _ in 0..3 {
        assert_eq!(rm.client.request_resource(&any_em).await.granted().em, em("free"));
    }
    execute(&mut holder, "ROLLBACK").await;
    let chosen = async || rm.client.request_resource(&any_em).await.granted().em;
    eventually("the emptier EM is selected again", LONG, async || chosen().await == em("locked")).await;
    assert_invariants(&database, &rm.client).await;
}

/// Other users are granted while hundreds of users are contended, on any EM, and no more database connections are used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_users_do_not_delay_other_users() {
    let (database, rm, patient) = start_patient().await;
    register_all(&rm.client, ["a", "b"], load(10_000, 10_000, 10_000)).await;
    rm.client.set_limit(&each_user(1000)).await.unwrap();
    let locked =
        r#"INSERT INTO linkis_resource_lock (scope, "user") SELECT 'user', 'held' || n FROM generate_series(1, 300) n"#;
    let mut holder = database.transaction(locked).await;
    let mut waiting = JoinSet::new();
    for n in 1..=300 {
        let (client, asked) = (patient.clone(), request(&em(["a", "b"][n % 2]), &format!("held{n}"), load(1, 1, 1)));
        waiting.spawn(async move { client.request_resource(&asked).await.granted() });
    }
    for n in 0..100 {
        let asked = request(&em(["a", "b"][n % 2]), &format!("user{n}"), load(1, 1, 1));
        patient.request_resource(&asked).await.granted();
    }
    assert!(waiting.try_join_next().is_none());
    let connections = database.count("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()").await;
    // An instance opens at most 20; the test opens a few.
    assert!(connections < 30, "{connections} connections");
    execute(&mut holder, "ROLLBACK").await;
    waiting.join_all().await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 400);
}
