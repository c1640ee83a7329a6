//! Wake-ups: the changes that cause them, their number, and their notifications.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freed_capacity_on_any_instance_wakes_head() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    // An engine uses less than its grant.
    let call = enqueue(&first.client, patient(&em1, "hadoop", cpu(3))).await;
    let confirmed =
        async { drop(second.client.resource_inited(&inited(&grant, "first", Some(cpu(7)))).await.unwrap()) };
    woken(&first, call, confirmed).await;

    // An engine reports less use than before.
    let call = enqueue(&first.client, patient(&em1, "hadoop", cpu(2))).await;
    let reported =
        async { drop(second.client.resource_reported(&grant.reported(name("first"), cpu(5))).await.unwrap()) };
    woken(&first, call, reported).await;

    // An EM becomes larger.
    let call = enqueue(&first.client, patient(&em1, "hadoop", cpu(5))).await;
    let resized = async { drop(second.client.register(registration(em1.clone(), cpu(15))).await.unwrap()) };
    let five = woken(&first, call, resized).await;

    // A limit is raised, and then deleted.
    let cores = |cores| Rule { max: [(Dimension::Cores, cores)].into(), ..user_limit("alice", 0) };
    second.client.set_limit(&user_limit("alice", 0)).await.unwrap();
    first.client.register(registration(em1.clone(), cpu(1000))).await.unwrap();
    second.client.resource_released(&release(&five, "hadoop")).await.unwrap();
    second.client.set_limit(&cores(4)).await.unwrap();
    first.client.request_resource(&request(&em1, "alice", cpu(4))).await.granted();
    let call = enqueue(&first.client, patient(&em1, "alice", cpu(2))).await;
    woken(&first, call, async { drop(second.client.set_limit(&cores(6)).await.unwrap()) }).await;
    let call = enqueue(&first.client, patient(&em1, "alice", cpu(2))).await;
    woken(&first, call, async { second.client.delete_limit(&user_limit("alice", 0).pattern).await.unwrap() }).await;

    let (other, _) = full_em(&first.client, "host2", 10).await;
    second.client.unregister(&other).await.unwrap();
    first.client.register(registration(other.clone(), cpu(1))).await.unwrap();
    first.client.request_resource(&request(&other, "short", cpu(1))).await.granted();
    let call = enqueue(&first.client, patient(&other, "hadoop", cpu(1))).await;
    let expires = r#"UPDATE linkis_user_resource_meta_data SET expires_at = clock_timestamp() WHERE "user" = 'short'"#;
    database.execute(expires).await;
    grant_of(call).await;

    let call = enqueue(&first.client, patient(&other, "hadoop", cpu(1))).await;
    second.client.unregister(&other).await.unwrap();
    let error = tokio::time::timeout(LONG, call).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("EM_NOT_REGISTERED"), "the EM is unregistered");
    assert_wait_queues_empty(&first.client).await;
    assert_invariants(&database, &first.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_without_notifications_is_polled() {
    let (database, rm) = start().await;
    // The release on another instance reaches the waiting request only by a notification.
    let other = Instance::start(&database).await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let call = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    // After ten seconds without notifications, an instance probes its connection.
    let listeners = "FROM pg_stat_activity
        WHERE datname = current_database() AND (query LIKE 'LISTEN%' OR query = 'SELECT 1')";
    let listening = async || database.count(format!("SELECT count(*) {listeners}")).await == 2;
    eventually("both instances listen", LONG, listening).await;
    database.execute(format!("SELECT pg_terminate_backend(pid) {listeners}")).await;
    other.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(call).await;
    // After the reconnection, notifications arrive again.
    let grant = rm.client.tickets(None).await.unwrap().remove(0);
    eventually("both instances listen again", LONG, listening).await;
    let call = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    let ticket = rm_model::operation::ReleaseTicket { ticket_id: grant.id, user: grant.user, em: grant.em };
    woken(&rm, call, async { other.client.resource_released(&ticket).await.unwrap() }).await;
}

/// The number of checks is about the number of grants, independent of the number of waiting requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wake_ups_are_proportional_to_grants() {
    const WAITERS: u64 = 300;
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), cpu(2)).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        held.push(rm.client.request_resource(&request(&em1, "first", cpu(1))).await.granted());
    }
    let mut calls = JoinSet::new();
    for _ in 0..WAITERS {
        let (client, em1) = (rm.client.clone(), em1.clone());
        calls.spawn(async move {
            let grant = client.request_resource(&patient(&em1, "hadoop", cpu(1))).await.granted();
            client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        });
    }
    database.waiting(WAITERS as i64).await;
    let before = rm.counter("linkis_rm_waiting_checks_total");
    for grant in held {
        rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    }
    calls.join_all().await;
    let (looks, served) =
        (rm.counter("linkis_rm_waiting_checks_total") - before, rm.counter("linkis_rm_waiting_served_total"));
    assert_eq!(served, WAITERS);
    assert!(before <= 2 * WAITERS, "{before} checks at entry");
    assert!(looks <= 2 * served + 20, "{looks} checks for {served} grants");
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// A release whose waiting requests are all on the same instance sends no notification, because a notification delays all other
/// commits. The requests are granted by a local wake-up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_wake_up_sends_no_notification() {
    let (database, first) = start().await;
    let (host, mut held) = full_em(&first.client, "host1", 10).await;
    let mut listener = PgListener::connect_with(&database.pool).await.unwrap();
    listener.listen("linkis_rm_freed").await.unwrap();
    let mut user = "first".to_owned();
    for next in ["alice", "bob", "carol"] {
        let call = enqueue(&first.client, patient(&host, next, cpu(10))).await;
        held =
            woken(&first, call, async { first.client.resource_released(&release(&held, &user)).await.unwrap() }).await;
        user = next.to_owned();
    }
    assert_wait_queues_empty(&first.client).await;
    // A waiting request on another instance needs a notification.
    let second = Instance::start(&database).await;
    let call = enqueue(&second.client, patient(&host, "dave", cpu(10))).await;
    first.client.resource_released(&release(&held, &user)).await.unwrap();
    grant_of(call).await;
    let payload = listener.recv().await.unwrap();
    assert!(payload.payload().contains("host1"), "{payload:?}");
    database.execute("NOTIFY linkis_rm_freed, 'the end'").await;
    let next = listener.recv().await.unwrap();
    assert_eq!(next.payload(), "the end", "only the last release was notified");
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// The freed capacity of one commit can exceed the size of one notification.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freed_capacity_of_150_ems_wakes_all_waiters() {
    let (database, first, second) = two().await;
    let mut grants = Vec::new();
    for n in 0..150 {
        grants.push(full_em(&first.client, &format!("{}-{n}", "h".repeat(200)), 10).await);
    }
    let mut calls = Vec::new();
    for (host, _) in &grants {
        calls.push(request_in_task(&second.client, patient(host, "hadoop", cpu(10))));
    }
    database.waiting(150).await;
    let mut releases = JoinSet::new();
    for (_, grant) in grants {
        let client = first.client.clone();
        releases.spawn(async move { client.resource_released(&release(&grant, "first")).await.unwrap() });
    }
    releases.join_all().await;
    for call in calls {
        grant_of(call).await;
    }
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 150);
}

/// Each of many cancelled requests frees its reservation, but later entries are not checked once for each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_mass_cancellation_checks_few_waiters() {
    const COUNT: usize = 600;
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let waiting = async || database.count("SELECT count(*) FROM linkis_resource_waiting").await;
    let enqueue_all = async |user: &str, expected: usize| {
        let clients = [client(&rm.address), client(&rm.address)];
        let calls: Vec<Call> =
            (0..COUNT).map(|n| request_in_task(&clients[n % 2], patient(&em1, user, cpu(10)))).collect();
        eventually("all wait", LONG, async || waiting().await == i64::try_from(expected).unwrap()).await;
        calls
    };
    let cut_off = enqueue_all("leaves", COUNT).await;
    let staying = enqueue_all("stays", 2 * COUNT).await;
    let polls_before = rm.counter("linkis_rm_waiting_polls_total");
    let looks = rm.counter("linkis_rm_waiting_checks_total");
    cut_off.iter().for_each(Call::abort);
    eventually("cancelled requests are removed", LONG, async || waiting().await == i64::try_from(COUNT).unwrap()).await;
    // The last of the notifications has arrived when the next poll has begun.
    let polls = rm.counter("linkis_rm_waiting_polls_total");
    eventually("two polls", LONG, async || rm.counter("linkis_rm_waiting_polls_total") > polls + 1).await;
    let looks = rm.counter("linkis_rm_waiting_checks_total") - looks;
    let polls = rm.counter("linkis_rm_waiting_polls_total") - polls_before;
    // Each poll lets the first of a key and 16 others check.
    let most = u64::try_from(COUNT / 2).unwrap() + 17 * polls;
    assert!(looks <= most, "{looks} checks beside {polls} polls");
    staying.iter().for_each(Call::abort);
    assert_wait_queues_empty(&rm.client).await;
}
