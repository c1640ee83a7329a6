//! Wait queues when callers, instances or the database end or are interrupted.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_instance_kill_promotes_next_request() {
    let (database, rm) = start().await;
    let killed = Process::start(&["--database-url", &database.url()]);
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let _lost = enqueue(&killed.client, patient(&em1, "lost", cpu(10))).await;
    let behind = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    killed.kill();
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(behind).await;
    assert_wait_queues_empty(&rm.client).await;
    let rows =
        "SELECT (SELECT count(*) FROM linkis_resource_waiting) + (SELECT count(*) FROM linkis_resource_waiting_entry)";
    eventually("no entry is left", LONG, async || database.count(rows).await == 0).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// An instance that was idle renews its own late row only: it is no sign of an outage, and another instance may be dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_renewal_after_idleness_extends_no_dead_instance() {
    let (database, rm) = start().await;
    let killed = Process::start(&["--database-url", &database.url()]);
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    enqueue(&rm.client, patient(&em1, "leaves", cpu(10))).await.abort();
    assert_wait_queues_empty(&rm.client).await;
    let _lost = enqueue(&killed.client, patient(&em1, "lost", cpu(10))).await;
    let late = "SELECT count(*) FROM linkis_rm_instance WHERE alive_until < clock_timestamp()";
    eventually("the row of the idle instance is late", LONG, async || database.count(late).await == 1).await;
    killed.kill();
    let of_killed = r#"SELECT alive_until::text FROM linkis_rm_instance
        WHERE instance_id IN (SELECT instance_id FROM linkis_resource_waiting WHERE "user" = 'lost')"#;
    let before: Vec<String> = database.column(of_killed).await;
    let behind = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    let after: Vec<String> = database.column(of_killed).await;
    // Empty if the entry has been swept; earlier if a check has ended the row.
    assert!(after.iter().all(|after| before.iter().all(|before| after <= before)), "{before:?} {after:?}");
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(behind).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_wrong_sweep_enters_again() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let call = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    // As another instance sweeps if this instance was frozen for longer than its lifetime.
    database.execute("DELETE FROM linkis_rm_instance; DELETE FROM linkis_resource_waiting; DELETE FROM linkis_resource_waiting_entry").await;
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(call).await;
    assert_wait_queues_empty(&rm.client).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// A removal that a lock blocks is retried as a whole: an entry never stays without its request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_removal_blocked_by_lock_is_retried() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    // Another waiting request keeps the instance alive, so that no sweep removes the entries.
    let (other, _grant) = full_em(&rm.client, "host2", 10).await;
    let _stays = enqueue(&rm.client, patient(&other, "other", cpu(10))).await;
    for table in ["linkis_resource_waiting", "linkis_resource_waiting_entry"] {
        let cancelled = enqueue(&rm.client, patient(&em1, "cancelled", cpu(10))).await;
        let mut holder = database.transaction(&format!("SELECT 1 FROM {table} FOR UPDATE")).await;
        cancelled.abort();
        eventually("the removal waits for the lock", LONG, async || is_waiting(&database).await).await;
        eventually("the removal ends at its timeout", LONG, async || !is_waiting(&database).await).await;
        execute(&mut holder, "ROLLBACK").await;
        let rows = "SELECT (SELECT count(*) FROM linkis_resource_waiting) + (SELECT count(*) FROM linkis_resource_waiting_entry)";
        eventually("only the other request waits", LONG, async || database.count(rows).await == 2).await;
    }
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    rm.client.request_resource(&request(&em1, "hadoop", cpu(10))).await.granted();
}

/// A row that another program locks keeps its own request in the queue, and no other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_removal_passes_locked_request() {
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let mut calls = Vec::new();
    for user in ["locked1", "free1", "locked2", "free2"] {
        calls.push(enqueue(&rm.client, patient(&em1, user, cpu(10))).await);
    }
    let mut holder =
        database.transaction(r#"SELECT 1 FROM linkis_resource_waiting WHERE "user" LIKE 'locked%' FOR UPDATE"#).await;
    // The others are removed together with a locked one, because the removal of the first one waits.
    calls.iter().for_each(|call| call.abort());
    let users = r#"SELECT "user" FROM linkis_resource_waiting ORDER BY 1"#;
    // Before the instance looks, twice a minute, for requests without a call.
    eventually("the other requests leave", Duration::from_secs(20), async || {
        database.column::<String>(users).await == ["locked1", "locked2"]
    })
    .await;
    execute(&mut holder, "ROLLBACK").await;
    assert_wait_queues_empty(&rm.client).await;
}

/// The commit of a queue entry takes effect long after its call has ended, as on a host that waited for its standby.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_entry_of_ended_call_is_removed() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    // Another waiting request keeps the instance alive, so that no sweep removes the entry.
    let (other, _grant) = full_em(&rm.client, "host2", 10).await;
    let patient =
        |em: &EmInstance, user: &str, wait_timeout| ResourceRequest { wait_timeout, ..patient(em, user, cpu(10)) };
    let _stays = enqueue(&rm.client, patient(&other, "other", 10 * LONG)).await;
    let late = enqueue(&rm.client, patient(&em1, "late", 10 * LONG)).await;
    let tables = ["linkis_resource_waiting", "linkis_resource_waiting_entry"];
    let of_late = r#"ticket_id = (SELECT ticket_id FROM linkis_resource_waiting WHERE "user" = 'late')"#;
    for table in tables {
        database.execute(&format!("CREATE TABLE late_{table} AS SELECT * FROM {table} WHERE {of_late}")).await;
    }
    late.abort();
    let waiting = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("the call has ended", LONG, async || database.count(waiting).await == 1).await;
    for table in tables {
        database.execute(&format!("INSERT INTO {table} SELECT * FROM late_{table}")).await;
    }
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    rm.client.request_resource(&patient(&em1, "hadoop", 3 * LONG)).await.granted();
    assert_eq!(database.count(waiting).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_grant_of_late_instance_removes_entry() {
    let (database, rm) = start().await;
    let (host, mut held) = full_em(&rm.client, "host1", 10).await;
    let mut user = "first";
    for _ in 0..5 {
        let call = enqueue(&rm.client, patient(&host, "hadoop", cpu(10))).await;
        // As after an outage of the database, or a freeze of the process, that is longer than the lifetime of an instance.
        let late = "UPDATE linkis_rm_instance SET alive_until = now() - interval '1 ms'";
        database.execute(late).await;
        rm.client.resource_released(&release(&held, user)).await.unwrap();
        (held, user) = (grant_of(call).await, "hadoop");
        assert_eq!(database.count("SELECT count(*) FROM linkis_resource_waiting").await, 0);
        assert_eq!(database.count("SELECT count(*) FROM linkis_resource_waiting_entry").await, 0);
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_database_outage_keeps_positions() {
    let (database, first, second) = crate::harness::two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let one = enqueue(&first.client, patient(&em1, "one", cpu(10))).await;
    let two = enqueue(&second.client, patient(&em1, "two", cpu(10))).await;
    let line = first.client.waiting().await.unwrap();
    let late = "UPDATE linkis_rm_instance SET alive_until = now() - interval '1 s'";
    database.execute(late).await;
    // The first instance with a connection extends the lifetimes of all.
    let all_live = "SELECT count(*) FROM linkis_rm_instance WHERE alive_until > now()";
    eventually("all instances are alive", LONG, async || database.count(all_live).await == 2).await;
    assert_eq!(second.client.waiting().await.unwrap(), line);
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    let one = grant_of(one).await;
    assert!(!two.is_finished());
    first.client.resource_released(&release(&one, "one")).await.unwrap();
    grant_of(two).await;
}

/// Entries of dead instances hide no later entry, and are swept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_entries_of_dead_instances_are_swept() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), cpu(10)).await;
    let held = rm.client.request_resource(&request(&em1, "first", cpu(5))).await.granted();
    let big = enqueue(&rm.client, patient(&em1, "big", cpu(10))).await;
    database.execute(r#"INSERT INTO linkis_rm_instance VALUES ('00000000-0000-0000-0000-00000000dead', clock_timestamp() - interval '1 s');
        WITH ids AS MATERIALIZED (SELECT n, gen_random_uuid() AS id FROM generate_series(1, 1200) n),
        dead AS (
            INSERT INTO linkis_resource_waiting (ticket_id, instance_id, principal, "user", creator, engine_type,
                em_application_name, em_instance, any_em, resource_type, resource, labels, waiting_since, wait_until, position)
            SELECT id, '00000000-0000-0000-0000-00000000dead', principal, 'dead', creator, engine_type, em_application_name,
                em_instance, any_em, resource_type, resource, labels, waiting_since, wait_until,
                substring(position FOR 2) || int8send(n) || uuid_send(id)
            FROM linkis_resource_waiting, ids
            RETURNING ticket_id, instance_id, position)
        INSERT INTO linkis_resource_waiting_entry (wait_key, ticket_id, instance_id, position, resource_type, resource, wait_until,
            is_short, wait_key_hash)
        SELECT s.wait_key, dead.ticket_id, dead.instance_id, dead.position, s.resource_type, s.resource, s.wait_until, true, s.wait_key_hash
        FROM dead, linkis_resource_waiting_entry s"#).await;
    let refusal = rm.client.request_resource(&request(&em1, "small", cpu(1))).await.refused();
    let short = &refusal.shortfalls[0];
    assert_eq!((short.available, short.ahead), (0, 10), "five are free, and the large request reserves all of them");
    assert_eq!(rm.client.waiting().await.unwrap()[0].ahead.get(&format!("em={em1}")), Some(&0));
    let left = "SELECT count(*) FROM linkis_resource_waiting_entry";
    // The period of the sweep.
    eventually("the entries are swept", Duration::from_secs(25), async || database.count(left).await == 1).await;
    rm.client.resource_released(&release(&held, "first")).await.unwrap();
    grant_of(big).await;
}

/// A request that is cancelled during an outage of the database is removed after the outage, and delays no later request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_cancellation_during_database_outage_is_applied() {
    let (database, direct) = start().await;
    let (proxy, proxied) = database.behind_proxy("leaving");
    let rm = Instance::start(&proxied).await;
    let (em1, held) = full_em(&direct.client, "host1", 10).await;
    let gone = enqueue(&rm.client, patient(&em1, "gone", cpu(10))).await;
    let behind = enqueue(&rm.client, patient(&em1, "behind", cpu(10))).await;
    proxy.set_fault_plan(FaultPlan::Hole);
    gone.abort();
    // Longer than the attempts for a connection (3 s), and shorter than the lifetime of an instance (12 s).
    tokio::time::sleep(Duration::from_millis(3600)).await;
    proxy.set_fault_plan(FaultPlan::Fair);
    direct.client.resource_released(&release(&held, "first")).await.unwrap();
    grant_of(behind).await;
    assert_wait_queues_empty(&rm.client).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// No request is removed while the table is locked. Then each statement removes a bounded number of requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mass_cancellation_is_removed_in_bounded_statements() {
    const CROWD: i64 = 700;
    const REMOVED_MAX: i64 = 500;
    let (database, rm) = start().await;
    let (em1, held) = full_em(&rm.client, "host1", 10).await;
    let count_removed = "CREATE TABLE removed (requests bigint NOT NULL);
        CREATE FUNCTION count_removed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO removed SELECT count(*) FROM gone;
            RETURN NULL;
        END $$;
        CREATE TRIGGER count_removed AFTER DELETE ON linkis_resource_waiting REFERENCING OLD TABLE AS gone
            FOR EACH STATEMENT EXECUTE FUNCTION count_removed()";
    database.execute(count_removed).await;
    let calls: Vec<Call> = (0..CROWD).map(|_| request_in_task(&rm.client, patient(&em1, "bob", cpu(10)))).collect();
    database.waiting(CROWD).await;
    let mut lock = database.pool.begin().await.unwrap();
    execute(&mut *lock, "LOCK TABLE linkis_resource_waiting IN EXCLUSIVE MODE").await;
    calls.iter().for_each(Call::abort);
    eventually("all are cancelled", LONG, async || {
        // Not before the first scrape.
        let page = rm.metrics.text();
        page.contains("\nlinkis_rm_waiting_requests 0\n")
    })
    .await;
    // A removal that begins after this moment includes all of them.
    database.execute("CREATE TABLE left_at AS SELECT clock_timestamp() AS moment").await;
    let attempts = "SELECT count(*) FROM pg_locks, left_at WHERE NOT granted AND waitstart > moment";
    eventually("a later removal waits", LONG, async || database.count(attempts).await > 0).await;
    lock.rollback().await.unwrap();
    database.waiting(0).await;
    assert_eq!(database.count("SELECT sum(requests)::bigint FROM removed").await, CROWD);
    let most = database.count("SELECT max(requests) FROM removed").await;
    assert!(most <= REMOVED_MAX, "{most} requests were removed by one statement");
    rm.client.resource_released(&release(&held, "first")).await.unwrap();
    rm.client.request_resource(&request(&em1, "bob", cpu(10))).await.granted();
}

/// A call whose transaction did not begin in time reports NOT_BEGUN: without a reply of the database, no lock is known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_during_database_outage_names_no_holder() {
    let database = Database::fresh().await;
    let (proxy, proxied) = database.behind_proxy("holders");
    let rm = Instance::start_with(&proxied, settings().with_time("--request-timeout", Duration::from_secs(2))).await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), cpu(100))).await.unwrap();
    let wanted = request(&em1, "hadoop", cpu(1));
    let grant = rm.client.request_resource(&wanted).await.granted();
    proxy.set_fault_plan(FaultPlan::Hole);
    // The other requests wait for the batch of the first one, which outlasts its call.
    let mut reasons = vec![rm.client.request_resource(&wanted).await.unwrap_err().reason().unwrap()];
    let requests: Vec<Call> = (0..20).map(|_| request_in_task(&rm.client, wanted.clone())).collect();
    let released = rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap_err();
    reasons.extend(released.reason());
    for call in requests {
        reasons.extend(call.await.unwrap().unwrap_err().reason());
    }
    assert!(!reasons.iter().any(|reason| reason == "LOCK_TIMEOUT"), "{reasons:?}");
    assert!(reasons.iter().any(|reason| reason == "NOT_BEGUN"), "{reasons:?}");

    // A lock of another transaction is named.
    proxy.set_fault_plan(FaultPlan::Fair);
    eventually("the instance serves again", LONG, async || rm.client.request_resource(&wanted).await.is_ok()).await;
    database.hold_by_hand(&em1).await;
    let error = rm.client.request_resource(&wanted).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("LOCK_TIMEOUT"), "{error}");
    database.release_holds().await;
}
