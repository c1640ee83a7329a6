//! Many callers, several instances, and keys that others hold.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ClientSettings, ResultResource, RmClient},
    domain::{
        limit::{LabelPattern, Rule},
        resource::Dimension,
    },
    server::Options,
    transport::resource_manager::RequestTimeouts,
};
use tokio::task::JoinSet;
use tonic::Code;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_grant_capacity_exactly() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let host = em("host1");
    first.client.register(registration(host.clone(), load(1000, 1000, 48))).await.unwrap();

    let mut calls = JoinSet::new();
    for n in 0..400 {
        let client = [&first, &second][n % 2].client.clone();
        let host = host.clone();
        calls.spawn(async move {
            let user = format!("user{}", n % 50);
            match client.request_resource(&request(&host, &user, load(1, 1, 1))).await.unwrap() {
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

    // All of them live their lives, each through the other instance than before, and nothing is left.
    let mut lives = JoinSet::new();
    for (n, (grant, user)) in granted.into_iter().enumerate() {
        let client = [&second, &first][n % 2].client.clone();
        lives.spawn(async move {
            client.resource_inited(&inited(&grant, &user, None)).await.unwrap();
            client.resource_released(&release(&grant, &user)).await.unwrap();
        });
    }
    lives.join_all().await;
    assert!(first.client.em(&host).await.unwrap().is_idle());
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
}

/// Callers that share users over shared EMs, through two instances, with every kind of call: no deadlock, nothing lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_lifecycles_on_two_instances_never_deadlock() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let hosts: Vec<_> = (0..5).map(|n| em(&format!("host{n}"))).collect();
    for host in &hosts {
        first.client.register(registration(host.clone(), load(100, 100, 20))).await.unwrap();
    }
    let mut callers = JoinSet::new();
    for caller in 0..200 {
        let client = [&first, &second][caller % 2].client.clone();
        let hosts = hosts.clone();
        callers.spawn(async move {
            for turn in 0..5 {
                let user = format!("user{}", (caller * 7 + turn) % 11);
                let host = &hosts[(caller * 3 + turn) % hosts.len()];
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

/// What one transaction does to a ticket, one thing after another, is in the history as if each had been done alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_history_tells_all_that_happened_in_one_transaction() {
    let (database, rm) = start().await;
    let host = em("held");
    rm.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let first = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    let mut holder = database.transaction_that_holds(&em("held")).await;
    let turn = || tokio::time::sleep(Duration::from_millis(200));
    let ask = request(&host, "alice", load(1, 1, 1));
    let report = inited(&first, "hadoop", None);
    let more = first.reported(name("hadoop"), load(2, 1, 1));
    let ((), _, second, ..) = tokio::join!(
        async {
            for _ in 0..4 {
                turn().await;
            }
            sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
        },
        async { rm.client.resource_inited(&report).await.unwrap() },
        async { rm.client.request_resource(&ask).await.granted() },
        async {
            turn().await;
            rm.client.resource_reported(&more).await.unwrap()
        },
        async {
            turn().await;
            turn().await;
            rm.client.unregister(&host).await.unwrap()
        },
    );
    let first_life = "granted 1,inited 1,reported 2,unregistered 2";
    for (grant, life) in [(first, first_life), (second, "granted 1,unregistered 1")] {
        let told: String = sqlx::query_scalar(
            "SELECT string_agg(action || ' ' || (resource ->> 'memory')::bigint / 1073741824, ',' ORDER BY id)
            FROM linkis_resource_action_record WHERE ticket_id = $1",
        )
        .bind(grant.ticket_id)
        .fetch_one(&database.pool)
        .await
        .unwrap();
        assert_eq!(told, life);
    }
}

/// The latencies of requests on other EMs, one after another, until `stop`.
async fn others(rm: &Instance, stop: Arc<AtomicBool>) -> Vec<Duration> {
    let mut took = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let user = format!("user{}", took.len() % 10);
        let start = Instant::now();
        let grant = rm.client.request_resource(&request(&em("free"), &user, load(1, 1, 1))).await.granted();
        took.push(start.elapsed());
        rm.client.resource_released(&release(&grant, &user)).await.unwrap();
    }
    took.sort();
    took
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_em_does_not_delay_other_ems() {
    let (database, rm) = start().await;
    for host in ["held", "free"] {
        rm.client.register(registration(em(host), load(1000, 1000, 1000))).await.unwrap();
    }
    let run = async |hold: Duration| {
        let stop = Arc::new(AtomicBool::new(false));
        let (took, ()) = tokio::join!(others(&rm, stop.clone()), async {
            tokio::time::sleep(hold).await;
            stop.store(true, Ordering::Relaxed);
        });
        took
    };
    let calm = run(Duration::from_secs(1)).await;

    let mut holder = database.transaction_that_holds(&em("held")).await;
    let served = Arc::new(AtomicU32::new(0));
    let mut waiting = JoinSet::new();
    for n in 0..20 {
        let (client, served) = (rm.client.clone(), served.clone());
        waiting.spawn(async move {
            let user = format!("waiter{n}");
            client.request_resource(&request(&em("held"), &user, load(1, 1, 1))).await.granted();
            served.fetch_add(1, Ordering::Relaxed);
        });
    }
    // One that cannot wait so long is told before its own deadline, which would say DEADLINE_EXCEEDED; nothing is granted to it.
    let hasty = hurried(&rm.address, Duration::from_millis(500));
    let error = hasty.request_resource(&request(&em("held"), "hurried", load(1, 1, 1))).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::Aborted), Some("LOCK_TIMEOUT")), "{error}");

    let contended = run(Duration::from_secs(2)).await;
    assert_eq!(served.load(Ordering::Relaxed), 0, "nobody passes the holder");
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    let freed = Instant::now();
    waiting.join_all().await;
    assert!(freed.elapsed() < Duration::from_secs(2), "served as soon as it is free");

    let median = |took: &[Duration]| took[took.len() / 2];
    println!(
        "others' p50: calm {:?}, while held {:?}; p99 {:?}, {:?}",
        median(&calm),
        median(&contended),
        calm[calm.len() * 99 / 100],
        contended[contended.len() * 99 / 100]
    );
    // Loose, because tests share the machine; the ratio itself is printed.
    assert!(median(&contended) < median(&calm) * 3 + Duration::from_millis(5));
    assert_invariants(&database, &rm.client).await;
    assert_eq!(rm.client.tickets(Some(&em("held"))).await.unwrap().len(), 20, "none for the hurried one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_user_stalls_neither_his_ems_nor_others() {
    let (database, rm) = start().await;
    for host in ["a", "b"] {
        rm.client.register(registration(em(host), load(1000, 1000, 1000))).await.unwrap();
    }
    // Somebody counts by user, so that users are locked.
    rm.client.set_limit(&each_user(1000)).await.unwrap();
    let mut holder = database.connect().await;
    sqlx::raw_sql(r#"BEGIN; INSERT INTO linkis_resource_lock (scope, "user") VALUES ('user', 'hadoop')"#)
        .execute(&mut holder)
        .await
        .unwrap();
    let mut waiting = JoinSet::new();
    for host in ["a", "b"].repeat(5) {
        let client = rm.client.clone();
        waiting.spawn(
            async move { client.request_resource(&request(&em(host), "hadoop", load(1, 1, 1))).await.granted() },
        );
    }
    for n in 0..50 {
        let host = em(["a", "b"][n % 2]);
        let start = Instant::now();
        rm.client.request_resource(&request(&host, "alice", load(1, 1, 1))).await.granted();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
    assert!(waiting.try_join_next().is_none());
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    waiting.join_all().await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 60);
}

/// Where no rule counts by user, nobody waits for one who is locked; as soon as one does, his requests do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_lock_requires_limit_by_user() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("a"), load(1000, 1000, 1000))).await.unwrap();
    let by_creator = LabelPattern::new([("creator".to_owned(), None)].into());
    let max = [(Dimension::Instances, 1000)].into();
    rm.client.set_limit(&Rule { pattern: by_creator, mode: Default::default(), max }).await.unwrap();
    let mut holder = database.connect().await;
    sqlx::raw_sql(r#"BEGIN; INSERT INTO linkis_resource_lock (scope, "user") VALUES ('user', 'hadoop')"#)
        .execute(&mut holder)
        .await
        .unwrap();
    let hasty = hurried(&rm.address, Duration::from_millis(1500));
    for _ in 0..20 {
        let grant = hasty.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
        hasty.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        hasty.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    rm.client.set_limit(&each_user(1000)).await.unwrap();
    let error = hasty.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("LOCK_TIMEOUT"), "{error}");
    rm.client.delete_limit(&each_user(1000).pattern).await.unwrap();
    // Although the next that comes is his own, and whoever waits for the lock has perhaps not yet given up.
    hasty.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// Where no rule counts by user, users are not locked; until an operator says inside the fence that he holds some.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_of_user_needs_no_limit() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("a"), load(1000, 1000, 1000))).await.unwrap();
    rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
    sqlx::raw_sql(
        r#"BEGIN; LOCK TABLE linkis_resource_limit_version IN ACCESS EXCLUSIVE MODE;
        UPDATE linkis_resource_limit_version SET users_held = true, version = gen_random_uuid();
        INSERT INTO linkis_resource_lock (scope, "user") VALUES ('user', 'hadoop'); COMMIT"#,
    )
    .execute(&database.pool)
    .await
    .unwrap();
    let hasty = hurried(&rm.address, Duration::from_millis(400));
    let error = hasty.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("LOCK_TIMEOUT"));
    rm.client.request_resource(&request(&em("a"), "alice", load(1, 1, 1))).await.granted();
    database.release_holds().await;
    rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
    assert_invariants(&database, &rm.client).await;
}

/// A committed row is a hold by an operator's hand: requests on its key wait for it to go, until their deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_committed_lock_row_is_respected() {
    let (database, rm) = start().await;
    for host in ["held", "free"] {
        rm.client.register(registration(em(host), load(1000, 1000, 1000))).await.unwrap();
    }
    database.hold_by_hand(&em("held")).await;
    let hasty = hurried(&rm.address, Duration::from_millis(400));
    let error = hasty.request_resource(&request(&em("held"), "hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("LOCK_TIMEOUT"));
    let client = rm.client.clone();
    let patient =
        tokio::spawn(
            async move { client.request_resource(&request(&em("held"), "hadoop", load(1, 1, 1))).await.granted() },
        );
    rm.client.request_resource(&request(&em("free"), "alice", load(1, 1, 1))).await.granted();
    assert!(!patient.is_finished());
    database.release_holds().await;
    patient.await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

/// A request that cannot be granted is refused without taking locks: so also while somebody else holds them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_needs_no_lock() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("held"), load(10, 10, 10))).await.unwrap();
    let _holder = database.transaction_that_holds(&em("held")).await;
    let refusal = rm.client.request_resource(&request(&em("held"), "hadoop", load(11, 1, 1))).await.refused();
    assert!(refusal.never_fits);
    let unknown = rm.client.request_resource(&request(&em("nowhere"), "hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(unknown.reason().as_deref(), Some("EM_NOT_REGISTERED"));
}

/// A call without a deadline of its own is bounded by the server's, however its wait began.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_timeout_bounds_lock_wait() {
    let database = Database::fresh().await;
    let mut options = options();
    options.times.request_timeout = Duration::from_millis(50);
    let rm = Instance::start_with(&database, options).await;
    rm.client.register(registration(em("held"), load(10, 10, 10))).await.unwrap();
    database.hold_by_hand(&em("held")).await;
    for _ in 0..5 {
        let start = Instant::now();
        let error = rm.client.request_resource(&request(&em("held"), "hadoop", load(1, 1, 1))).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("LOCK_TIMEOUT"));
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    }
    database.release_holds().await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// Somebody who locks a row by hand, without its resource lock, stalls only those who need that row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_row_does_not_delay_other_ems() {
    let (database, rm) = start().await;
    for host in ["held", "free"] {
        rm.client.register(registration(em(host), load(1000, 1000, 1000))).await.unwrap();
    }
    let mut holder = database.connect().await;
    sqlx::raw_sql("BEGIN; SELECT * FROM linkis_em_resource_meta_data WHERE em_instance = 'held:9102' FOR UPDATE")
        .execute(&mut holder)
        .await
        .unwrap();
    let client = rm.client.clone();
    let waiting =
        tokio::spawn(
            async move { client.request_resource(&request(&em("held"), "hadoop", load(1, 1, 1))).await.granted() },
        );
    let mut calls = JoinSet::new();
    for n in 0..40 {
        let client = rm.client.clone();
        calls.spawn(async move {
            for _ in 0..5 {
                let start = Instant::now();
                client.request_resource(&request(&em("free"), &format!("user{n}"), load(1, 1, 1))).await.granted();
                assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
            }
        });
    }
    calls.join_all().await;
    assert!(!waiting.is_finished());
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    waiting.await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 201);
}

/// A batch that waited in vain keeps nothing locked while its operations wait for another try.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_waited_in_vain_leaves_no_transaction_open() {
    let (database, rm) = start().await;
    let host = em("held");
    rm.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    let mut holder = database.connect().await;
    sqlx::raw_sql("BEGIN; SELECT * FROM linkis_em_resource_meta_data FOR UPDATE").execute(&mut holder).await.unwrap();
    let client = rm.client.clone();
    let waiting = tokio::spawn(async move { client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await });
    let left_so = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
        AND state = 'idle in transaction (aborted)' AND state_change < clock_timestamp() - interval '500ms'";
    // Longer than it takes to be set aside, and than a committer without work sits in a transaction.
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        assert_eq!(database.count(left_so).await, 0, "a failed transaction is undone at once");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!waiting.is_finished());
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    waiting.await.unwrap().granted();
}

/// Hundreds of held keys cost the others no more than one does, and the database no more connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_users_do_not_delay_other_users() {
    /// Longer than the others are served one after another, on the slowest machine.
    const PATIENCE: Duration = Duration::from_secs(240);
    let database = Database::fresh().await;
    let times = RequestTimeouts { request_timeout: PATIENCE, ..options().times };
    let rm = Instance::start_with(&database, Options { times, ..options() }).await;
    let patient = RmClient::with(&rm.address, &ClientSettings::once(PATIENCE)).unwrap();
    rm.client.register(registration(em("free"), load(10_000, 10_000, 10_000))).await.unwrap();
    rm.client.set_limit(&each_user(1000)).await.unwrap();
    let mut holder = database.connect().await;
    sqlx::raw_sql(
        r#"BEGIN; INSERT INTO linkis_resource_lock (scope, "user") SELECT 'user', 'held' || n FROM generate_series(1, 300) n"#,
    )
    .execute(&mut holder)
    .await
    .unwrap();
    let mut waiting = JoinSet::new();
    for n in 1..=300 {
        let client = patient.clone();
        waiting.spawn(async move {
            client.request_resource(&request(&em("free"), &format!("held{n}"), load(1, 1, 1))).await.granted();
        });
    }
    for n in 0..100 {
        let start = Instant::now();
        rm.client.request_resource(&request(&em("free"), &format!("user{n}"), load(1, 1, 1))).await.granted();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
    assert!(waiting.try_join_next().is_none());
    let connections = database.count("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()").await;
    // 20 are an instance's at most, and a few the test's own.
    assert!(connections < 30, "{connections} connections");
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    waiting.join_all().await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_granted_before_its_em_went_in_the_same_batch_stands_before_it_in_the_history() {
    let (database, rm) = start().await;
    let held = em("held");
    for _ in 0..50 {
        rm.client.register(registration(held.clone(), load(10, 10, 10))).await.unwrap();
        let mut holder = database.transaction_that_holds(&em("held")).await;
        let (client, ask) = (rm.client.clone(), request(&held, "hadoop", load(1, 1, 1)));
        let asking = tokio::spawn(async move { client.request_resource(&ask).await });
        // Until it is set aside; if that takes longer, the next try may do.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let (client, gone) = (rm.client.clone(), held.clone());
        let going = tokio::spawn(async move { client.unregister(&gone).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
        let granted = asking.await.unwrap();
        going.await.unwrap().unwrap();
        let is_gone = "SELECT count(*) FROM linkis_em_resource_meta_data";
        eventually("it is gone", Duration::from_secs(10), || async { database.count(is_gone).await == 0 }).await;
        let Ok(ResultResource::Available(grant)) = granted else { continue };
        let order: Option<bool> = sqlx::query_scalar(
            "SELECT granted.id < gone.id
            FROM linkis_resource_action_record granted JOIN linkis_resource_action_record gone
                ON gone.ticket_id IS NULL AND gone.action = 'unregistered' AND gone.action_time = granted.action_time
            WHERE granted.action = 'granted' AND granted.ticket_id = $1",
        )
        .bind(grant.ticket_id)
        .fetch_optional(&database.pool)
        .await
        .unwrap();
        // Otherwise in two batches.
        if let Some(in_order) = order {
            assert!(in_order);
            return;
        }
    }
    panic!("they never shared a batch");
}
