//! Who is woken when there is room, by whom, and who is not.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freed_capacity_on_any_instance_wakes_head() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let (host, grant) = full_em(&first.client, "host1", 10).await;
    let served = async |what: &str, call: Call, start: Instant| {
        let grant = granted(call).await;
        assert!(start.elapsed() < AT_ONCE, "{what}: after {:?}", start.elapsed());
        grant
    };

    let call = enqueue(&first.client, patient(&host, "hadoop", cpu(3))).await;
    let start = Instant::now();
    second.client.resource_inited(&inited(&grant, "first", Some(cpu(7)))).await.unwrap();
    served("an engine that uses less than was granted", call, start).await;

    let call = enqueue(&first.client, patient(&host, "hadoop", cpu(2))).await;
    // It has just looked by itself, and would not again within the next moment.
    let polls = first.metrics.line.polls.get();
    eventually("it looks in vain", LONG, async || first.metrics.line.polls.get() > polls).await;
    let start = Instant::now();
    second.client.resource_reported(&grant.reported(name("first"), cpu(5))).await.unwrap();
    served("an engine that uses less than before", call, start).await;

    let call = enqueue(&first.client, patient(&host, "hadoop", cpu(5))).await;
    let start = Instant::now();
    second.client.register(registration(host.clone(), cpu(15))).await.unwrap();
    let five = served("a resize", call, start).await;

    second.client.set_limit(&user_limit("alice", 0)).await.unwrap();
    first.client.register(registration(host.clone(), cpu(1000))).await.unwrap();
    second.client.resource_released(&release(&five, "hadoop")).await.unwrap();
    second.client.set_limit(&Rule { max: [(Dimension::Cores, 4)].into(), ..user_limit("alice", 0) }).await.unwrap();
    first.client.request_resource(&request(&host, "alice", cpu(4))).await.granted();
    let call = enqueue(&first.client, patient(&host, "alice", cpu(2))).await;
    let start = Instant::now();
    second.client.set_limit(&Rule { max: [(Dimension::Cores, 6)].into(), ..user_limit("alice", 0) }).await.unwrap();
    served("a limit that is raised", call, start).await;
    let call = enqueue(&first.client, patient(&host, "alice", cpu(2))).await;
    let start = Instant::now();
    second.client.delete_limit(&user_limit("alice", 0).pattern).await.unwrap();
    served("a limit that is removed", call, start).await;

    let (other, _) = full_em(&first.client, "host2", 10).await;
    second.client.unregister(&other).await.unwrap();
    first.client.register(registration(other.clone(), cpu(1))).await.unwrap();
    let short = ResourceRequest { lock_ttl: Some(Duration::from_millis(1500)), ..request(&other, "short", cpu(1)) };
    first.client.request_resource(&short).await.granted();
    let call = enqueue(&first.client, patient(&other, "hadoop", cpu(1))).await;
    granted(call).await;

    let call = enqueue(&first.client, patient(&other, "hadoop", cpu(1))).await;
    second.client.unregister(&other).await.unwrap();
    let error = tokio::time::timeout(LONG, call).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("EM_NOT_REGISTERED"), "its EM went");
    assert_wait_queues_empty(&first.client).await;
    assert_invariants(&database, &first.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_without_notifications_is_polled() {
    let (database, rm) = start().await;
    // Those who wait where room is made need not hear of it.
    let other = Instance::start(&database).await;
    let (host, grant) = full_em(&rm.client, "host1", 10).await;
    let call = enqueue(&rm.client, patient(&host, "hadoop", cpu(10))).await;
    let deafened = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    assert_eq!(database.count(deafened).await, 2);
    other.client.resource_released(&release(&grant, "first")).await.unwrap();
    granted(call).await;
    // And hears again.
    let grant = rm.client.tickets(None).await.unwrap().remove(0);
    eventually("it listens again", LONG, async || {
        let listening =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";
        database.count(listening).await == 2
    })
    .await;
    let call = enqueue(&rm.client, patient(&host, "hadoop", cpu(10))).await;
    let start = Instant::now();
    let ticket = linkis_rm::domain::operation::ReleaseTicket { ticket_id: grant.id, user: grant.user, em: grant.em };
    other.client.resource_released(&ticket).await.unwrap();
    granted(call).await;
    assert!(start.elapsed() < AT_ONCE, "after {:?}", start.elapsed());
}

/// As many look as are served, and hardly more, however many wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wake_ups_are_proportional_to_grants() {
    const WAITERS: u64 = 300;
    let (database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), cpu(2))).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..2 {
        held.push(rm.client.request_resource(&request(&host, "first", cpu(1))).await.granted());
    }
    let mut calls = JoinSet::new();
    for _ in 0..WAITERS {
        let (client, host) = (rm.client.clone(), host.clone());
        calls.spawn(async move {
            let grant = client.request_resource(&patient(&host, "hadoop", cpu(1))).await.granted();
            client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        });
    }
    let in_line = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("all wait", LONG, async || database.count(in_line).await == WAITERS as i64).await;
    let (before, start) = (rm.metrics.line.looks.get(), Instant::now());
    for grant in held {
        rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    }
    calls.join_all().await;
    let (looks, served) = (rm.metrics.line.looks.get() - before, rm.metrics.line.served.get());
    println!("{looks} looks for {served} served in {:?}; {before} while they came", start.elapsed());
    assert_eq!(served, WAITERS);
    assert!(before <= 2 * WAITERS, "{before} looks of those who came");
    assert!(looks <= 2 * served + 20, "{looks} looks for {served} served");
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// Of room that is made where all who wait for it are, nobody is notified: whoever notifies keeps all other commits waiting. Those
/// who wait are served at once all the same, though nobody hears.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_wake_up_sends_no_notification() {
    let (database, first) = start().await;
    let (host, mut held) = full_em(&first.client, "host1", 10).await;
    let mut listener = PgListener::connect_with(&database.pool).await.unwrap();
    listener.listen(CHANNEL).await.unwrap();
    let mut user = "first".to_owned();
    for next in ["alice", "bob", "carol"] {
        let call = enqueue(&first.client, patient(&host, next, cpu(10))).await;
        let start = Instant::now();
        first.client.resource_released(&release(&held, &user)).await.unwrap();
        held = granted(call).await;
        assert!(start.elapsed() < AT_ONCE, "after {:?}", start.elapsed());
        user = next.to_owned();
    }
    assert_wait_queues_empty(&first.client).await;
    // Another instance's waiters are told.
    let second = Instance::start(&database).await;
    let call = enqueue(&second.client, patient(&host, "dave", cpu(10))).await;
    first.client.resource_released(&release(&held, &user)).await.unwrap();
    granted(call).await;
    let told = listener.recv().await.unwrap();
    assert!(told.payload().contains("host1"), "{told:?}");
    let more = tokio::time::timeout(Duration::from_millis(100), listener.recv()).await;
    assert!(more.is_err(), "only the last release was told: {more:?}");
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// One commit may make more room than one notification can tell.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freed_capacity_of_150_ems_wakes_all_waiters() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let mut grants = Vec::new();
    for n in 0..150 {
        grants.push(full_em(&first.client, &format!("{}-{n}", "h".repeat(200)), 10).await);
    }
    let mut calls = Vec::new();
    for (host, _) in &grants {
        calls.push(ask_in_task(&second.client, patient(host, "hadoop", cpu(10))));
    }
    eventually("all wait", LONG, async || first.client.waiting().await.unwrap().len() == 150).await;
    let mut releases = JoinSet::new();
    for (_, grant) in grants {
        let client = first.client.clone();
        releases.spawn(async move { client.resource_released(&release(&grant, "first")).await.unwrap() });
    }
    releases.join_all().await;
    for call in calls {
        granted(call).await;
    }
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 150);
}

/// Many requests are cut off at once: each makes room behind it, but those that wait behind check no more often for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_mass_cancellation_checks_few_waiters() {
    const COUNT: usize = 600;
    let (database, rm) = start().await;
    let (host, _grant) = full_em(&rm.client, "host1", 10).await;
    let waiting = async || database.count("SELECT count(*) FROM linkis_resource_waiting").await;
    let enqueue = async |user: &str, expected: usize| {
        let clients = [client(&rm.address), client(&rm.address)];
        let calls: Vec<Call> =
            (0..COUNT).map(|n| ask_in_task(&clients[n % 2], patient(&host, user, cpu(10)))).collect();
        eventually("they wait", LONG, async || waiting().await == i64::try_from(expected).unwrap()).await;
        calls
    };
    let cut_off = enqueue("leaves", COUNT).await;
    let staying = enqueue("stays", 2 * COUNT).await;
    let looks = rm.metrics.line.looks.get();
    cut_off.iter().for_each(Call::abort);
    eventually("they have left", LONG, async || waiting().await == i64::try_from(COUNT).unwrap()).await;
    // The last of the notifications has arrived when the next poll has begun.
    let polls = rm.metrics.line.polls.get();
    eventually("it polls", LONG, async || rm.metrics.line.polls.get() > polls + 1).await;
    let looks = rm.metrics.line.looks.get() - looks;
    println!("{looks} checks after {COUNT} requests were cut off");
    assert!(looks <= 250, "{looks} checks");
    staying.iter().for_each(Call::abort);
    assert_wait_queues_empty(&rm.client).await;
}
