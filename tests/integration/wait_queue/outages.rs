//! What becomes of the line when callers, instances or the database go away.

use super::*;
use crate::metrics::get;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_instance_kill_promotes_next_request() {
    let (database, rm) = start().await;
    let killed = Process::start(&["--database-url", &database.url()]);
    let (host, grant) = full_em(&rm.client, "host1", 10).await;
    let _lost = enqueue(&killed.client, patient(&host, "lost", cpu(10))).await;
    let behind = enqueue(&rm.client, patient(&host, "hadoop", cpu(10))).await;
    killed.kill();
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    let start = Instant::now();
    granted(behind).await;
    println!("granted {:?} after the one before it was lost", start.elapsed());
    assert_wait_queues_empty(&rm.client).await;
    let rows =
        "SELECT (SELECT count(*) FROM linkis_resource_waiting) + (SELECT count(*) FROM linkis_resource_waiting_spot)";
    eventually("nothing is left of it", LONG, async || database.count(rows).await == 0).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_wrong_sweep_enters_again() {
    let (database, rm) = start().await;
    let (host, grant) = full_em(&rm.client, "host1", 10).await;
    let call = enqueue(&rm.client, patient(&host, "hadoop", cpu(10))).await;
    // As another instance sweeps when this one was frozen for a while.
    sqlx::raw_sql(
        "DELETE FROM linkis_rm_instance; DELETE FROM linkis_resource_waiting; DELETE FROM linkis_resource_waiting_spot",
    )
    .execute(&database.pool)
    .await
    .unwrap();
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    granted(call).await;
    assert_wait_queues_empty(&rm.client).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_tells_those_who_wait() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let (host, _grant) = full_em(&first.client, "host1", 10).await;
    let call = enqueue(&first.client, patient(&host, "hadoop", cpu(5))).await;
    let start = Instant::now();
    assert_eq!(first.stop().await, linkis_rm::server::ServerExit::Drained);
    assert!(start.elapsed() < Duration::from_secs(4), "it does not wait for them");
    let error = call.await.unwrap().unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::Unavailable), Some("SHUTTING_DOWN")));
    assert_eq!(second.client.waiting().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_removal_blocked_by_lock_is_retried() {
    let (database, rm) = start().await;
    let (host, grant) = full_em(&rm.client, "host1", 10).await;
    // Another waiter keeps the instance alive: nothing is swept because of it.
    let (other, _grant) = full_em(&rm.client, "host2", 10).await;
    let _stays = enqueue(&rm.client, patient(&other, "other", cpu(10))).await;
    let gone = enqueue(&rm.client, patient(&host, "gone", cpu(10))).await;
    let mut holder = database.connect().await;
    sqlx::raw_sql("BEGIN; SELECT 1 FROM linkis_resource_waiting FOR UPDATE").execute(&mut holder).await.unwrap();
    gone.abort();
    eventually("it tries to leave", LONG, async || is_waiting(&database).await).await;
    eventually("and gives up", LONG, async || !is_waiting(&database).await).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    eventually("it has left", LONG, async || rm.client.waiting().await.unwrap().len() == 1).await;
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    rm.client.request_resource(&request(&host, "hadoop", cpu(10))).await.granted();
}

/// Found by the fault harness: a connection that broke in between left the spots of those who had left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_leaves_leaves_all_his_spots_or_none() {
    let (database, rm) = start().await;
    let (host, _grant) = full_em(&rm.client, "host1", 10).await;
    let gone = enqueue(&rm.client, patient(&host, "gone", cpu(10))).await;
    let mut holder = database.connect().await;
    sqlx::raw_sql("BEGIN; SELECT 1 FROM linkis_resource_waiting_spot FOR UPDATE").execute(&mut holder).await.unwrap();
    gone.abort();
    eventually("it tries to leave", LONG, async || is_waiting(&database).await).await;
    eventually("and gives up", LONG, async || !is_waiting(&database).await).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    let rows =
        "SELECT (SELECT count(*) FROM linkis_resource_waiting) + (SELECT count(*) FROM linkis_resource_waiting_spot)";
    eventually("nothing is left of it", LONG, async || database.count(rows).await == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_grant_of_late_instance_removes_entry() {
    let (database, rm) = start().await;
    let (host, mut held) = full_em(&rm.client, "host1", 10).await;
    let mut user = "first";
    for _ in 0..5 {
        let call = enqueue(&rm.client, patient(&host, "hadoop", cpu(10))).await;
        // As after an outage of the database, or when the process was frozen, for longer than an instance is taken to live.
        let late = "UPDATE linkis_rm_instance SET alive_until = now() - interval '1 ms'";
        sqlx::raw_sql(late).execute(&database.pool).await.unwrap();
        rm.client.resource_released(&release(&held, user)).await.unwrap();
        (held, user) = (granted(call).await, "hadoop");
        assert_eq!(database.count("SELECT count(*) FROM linkis_resource_waiting").await, 0);
        assert_eq!(database.count("SELECT count(*) FROM linkis_resource_waiting_spot").await, 0);
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_database_outage_keeps_positions() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let (host, grant) = full_em(&first.client, "host1", 10).await;
    let one = enqueue(&first.client, patient(&host, "one", cpu(10))).await;
    let two = enqueue(&second.client, patient(&host, "two", cpu(10))).await;
    let line = first.client.waiting().await.unwrap();
    let late = "UPDATE linkis_rm_instance SET alive_until = now() - interval '1 s'";
    sqlx::raw_sql(late).execute(&database.pool).await.unwrap();
    // Whoever is back first gives the others their time again.
    let all_live = "SELECT count(*) FROM linkis_rm_instance WHERE alive_until > now()";
    eventually("all live again", LONG, async || database.count(all_live).await == 2).await;
    assert_eq!(second.client.waiting().await.unwrap(), line);
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    let one = granted(one).await;
    assert!(!two.is_finished());
    first.client.resource_released(&release(&one, "one")).await.unwrap();
    granted(two).await;
}

/// Many whose instances are dead hide nobody who stands behind them, and are soon gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_entries_of_dead_instances_are_swept() {
    let (database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), cpu(10))).await.unwrap();
    let held = rm.client.request_resource(&request(&host, "first", cpu(5))).await.granted();
    let big = enqueue(&rm.client, patient(&host, "big", cpu(10))).await;
    sqlx::raw_sql(
        r#"INSERT INTO linkis_rm_instance VALUES ('00000000-0000-0000-0000-00000000dead', clock_timestamp() - interval '1 s');
        WITH ids AS MATERIALIZED (SELECT n, gen_random_uuid() AS id FROM generate_series(1, 1200) n),
        dead AS (
            INSERT INTO linkis_resource_waiting (ticket_id, instance_id, principal, "user", creator, engine_type,
                em_application_name, em_instance, any_em, resource_type, resource, labels, waiting_since, wait_until, position)
            SELECT id, '00000000-0000-0000-0000-00000000dead', principal, 'dead', creator, engine_type, em_application_name,
                em_instance, any_em, resource_type, resource, labels, waiting_since, wait_until,
                substring(position FOR 2) || int8send(n) || uuid_send(id)
            FROM linkis_resource_waiting, ids
            RETURNING ticket_id, instance_id, position)
        INSERT INTO linkis_resource_waiting_spot (spot, ticket_id, instance_id, position, resource_type, resource, wait_until,
            is_short, spot_hash)
        SELECT s.spot, dead.ticket_id, dead.instance_id, dead.position, s.resource_type, s.resource, s.wait_until, true, s.spot_hash
        FROM dead, linkis_resource_waiting_spot s"#,
    )
    .execute(&database.pool)
    .await
    .unwrap();
    let refusal = rm.client.request_resource(&request(&host, "small", cpu(1))).await.refused();
    let short = &refusal.shortfalls[0];
    assert_eq!((short.available, short.ahead), (0, 10), "five are free, and the big one waits for all of them");
    assert_eq!(rm.client.waiting().await.unwrap()[0].ahead.get(&format!("em={host}")), Some(&0));
    let left = "SELECT count(*) FROM linkis_resource_waiting_spot";
    let swept = eventually("they are gone", LONG, async || database.count(left).await == 1).await;
    assert!(swept < Duration::from_secs(12), "swept after {swept:?}");
    rm.client.resource_released(&release(&held, "first")).await.unwrap();
    granted(big).await;
}

/// Who goes away while the database does leaves the line as soon as it is back, and keeps nothing from those behind him.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_cancellation_during_database_outage_is_applied() {
    let (database, direct) = start().await;
    let (proxy, proxied) = database.behind_proxy("leaving");
    let rm = Instance::start(&proxied).await;
    let (host, held) = full_em(&direct.client, "host1", 10).await;
    let gone = enqueue(&rm.client, patient(&host, "gone", cpu(10))).await;
    let behind = enqueue(&rm.client, patient(&host, "behind", cpu(10))).await;
    proxy.set_fault_plan(FaultPlan::Hole);
    gone.abort();
    // Longer than anybody tries for a connection, shorter than it takes to be thought dead.
    tokio::time::sleep(Duration::from_millis(3600)).await;
    proxy.set_fault_plan(FaultPlan::Fair);
    direct.client.resource_released(&release(&held, "first")).await.unwrap();
    let start = Instant::now();
    granted(behind).await;
    println!("granted {:?} after the release", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_wait_queues_empty(&rm.client).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// While the table is locked no request is removed; then each statement removes few, however many have left meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mass_cancellation_is_removed_in_bounded_statements() {
    const CROWD: i64 = 700;
    const REMOVED_MAX: i64 = 500;
    let (database, rm) = start().await;
    let (host, held) = full_em(&rm.client, "host1", 10).await;
    let count_removed = "CREATE TABLE removed (requests bigint NOT NULL);
        CREATE FUNCTION count_removed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO removed SELECT count(*) FROM gone;
            RETURN NULL;
        END $$;
        CREATE TRIGGER count_removed AFTER DELETE ON linkis_resource_waiting REFERENCING OLD TABLE AS gone
            FOR EACH STATEMENT EXECUTE FUNCTION count_removed()";
    sqlx::raw_sql(count_removed).execute(&database.pool).await.unwrap();
    let calls: Vec<Call> = (0..CROWD).map(|_| ask_in_task(&rm.client, patient(&host, "bob", cpu(10)))).collect();
    let waiting = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("all wait", LONG, async || database.count(waiting).await == CROWD).await;
    let mut lock = database.pool.begin().await.unwrap();
    sqlx::raw_sql("LOCK TABLE linkis_resource_waiting IN EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
    calls.iter().for_each(Call::abort);
    eventually("all have left", LONG, async || {
        get(rm.http, "/metrics").await.1.contains("\nlinkis_rm_waiting_requests 0\n")
    })
    .await;
    // An attempt that begins after this moment is about all of them.
    sqlx::raw_sql("CREATE TABLE left_at AS SELECT clock_timestamp() AS moment").execute(&database.pool).await.unwrap();
    let attempts = "SELECT count(*) FROM pg_locks, left_at WHERE NOT granted AND waitstart > moment";
    eventually("a later attempt waits", LONG, async || database.count(attempts).await > 0).await;
    lock.rollback().await.unwrap();
    eventually("all are removed", LONG, async || database.count(waiting).await == 0).await;
    assert_eq!(database.count("SELECT sum(requests)::bigint FROM removed").await, CROWD);
    let most = database.count("SELECT max(requests) FROM removed").await;
    assert!(most <= REMOVED_MAX, "{most} requests were removed by one statement");
    rm.client.resource_released(&release(&held, "first")).await.unwrap();
    rm.client.request_resource(&request(&host, "bob", cpu(10))).await.granted();
}

/// A call whose transaction did not begin in time was kept by no lock: no other transaction has one, and the database says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_during_database_outage_names_no_holder() {
    let database = Database::fresh().await;
    let (proxy, proxied) = database.behind_proxy("holders");
    let times = RequestTimeouts { request_timeout: Duration::from_secs(1), ..options().times };
    let rm = Instance::start_with(&proxied, Options { times, ..options() }).await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), cpu(100))).await.unwrap();
    let grant = rm.client.request_resource(&request(&host, "hadoop", cpu(1))).await.granted();
    proxy.set_fault_plan(FaultPlan::Hole);
    let mut reasons = Vec::new();
    let first = ask_in_task(&rm.client, request(&host, "hadoop", cpu(1)));
    // The others wait for the batch of the first.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let requests: Vec<Call> = (0..20).map(|_| ask_in_task(&rm.client, request(&host, "hadoop", cpu(1)))).collect();
    let released = rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap_err();
    reasons.extend(released.reason());
    for call in [first].into_iter().chain(requests) {
        reasons.extend(call.await.unwrap().unwrap_err().reason());
    }
    println!("{reasons:?}");
    assert!(!reasons.iter().any(|reason| reason == "LOCK_TIMEOUT"), "{reasons:?}");
    assert!(reasons.iter().any(|reason| reason == "NOT_BEGUN"), "{reasons:?}");

    // A key that another transaction holds is named.
    proxy.set_fault_plan(FaultPlan::Fair);
    let ask = request(&host, "hadoop", cpu(1));
    eventually("it is served again", LONG, async || rm.client.request_resource(&ask).await.is_ok()).await;
    database.hold_by_hand(&host).await;
    let error = rm.client.request_resource(&ask).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("LOCK_TIMEOUT"), "{error}");
    database.release_holds().await;
}
