//! Turns: the users of waiting requests take turns at each key.

use super::{
    positions::{Forwarder, named, users},
    *,
};

/// Lets each of `calls` run in turn: releases the ticket that holds the EM, and returns the users in the order of their grants.
pub async fn served(client: &RmClient, mut held: (Grant, String), calls: Vec<(String, Call)>) -> Vec<String> {
    let mut waiting = JoinSet::new();
    for (user, call) in calls {
        waiting.spawn(async move { (user, grant_of(call).await) });
    }
    let mut order = Vec::new();
    while !waiting.is_empty() {
        client.resource_released(&release(&held.0, &held.1)).await.unwrap();
        let (user, grant) = waiting.join_next().await.unwrap().unwrap();
        order.push(user.clone());
        held = (grant, user);
    }
    order
}

/// A user with one request goes second behind a user with forty, regardless of the instances.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_of_users_alternate() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let mut calls = Vec::new();
    for number in 0..42 {
        let (user, client) = if number < 40 { ("pig", &first.client) } else { ("mouse", &second.client) };
        calls.push((user.to_owned(), enqueue(client, patient(&em1, user, cpu(10))).await));
    }
    let pigs = || std::iter::repeat_n("pig", 38);
    assert_eq!(
        users(&first.client).await,
        ["pig", "mouse"].into_iter().chain(["pig"; 39]).chain(["mouse"]).collect::<Vec<_>>()
    );
    let classes: Vec<Class> = first.client.waiting().await.unwrap().iter().map(|waiting| waiting.class).collect();
    assert_eq!(classes, [Class::First; 2].into_iter().chain([Class::Behind; 40]).collect::<Vec<_>>());
    let order = served(&second.client, (grant, "first".to_owned()), calls).await;
    assert_eq!(order, ["pig", "mouse", "pig", "mouse"].into_iter().chain(pigs()).collect::<Vec<_>>());
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// A user gains nothing by cancelling the request that has its turn: the next one goes at the later of both rank times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turn_of_cancelled_request_is_handed_on() {
    let (_database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let first_of_pig = enqueue(&first.client, patient(&em1, "pig", cpu(10))).await;
    let turn = enqueue(&first.client, patient(&em1, "pig", cpu(10))).await;
    let _next = enqueue(&second.client, patient(&em1, "pig", cpu(10))).await;
    let _mouse = enqueue(&second.client, patient(&em1, "mouse", cpu(10))).await;
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(first_of_pig).await;
    // The grant has used the turn up, so the next one goes after the mouse and before later requests.
    let _last = enqueue(&second.client, patient(&em1, "last", cpu(10))).await;
    let order_is = async |order: &[&str]| users(&first.client).await == order;
    eventually("the next is promoted", LONG, async || order_is(&["mouse", "pig", "last", "pig"]).await).await;
    turn.abort();
    eventually("the turn is handed on", LONG, async || order_is(&["mouse", "pig", "last"]).await).await;
}

/// While the caller with the turn is absent, the next own request has the turn. It falls behind when the caller returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turn_of_absent_caller_is_kept() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let (through, connection) = Forwarder::start(&first.address).await;
    let repeated = named("r1", patient(&em1, "pig", cpu(10)));
    let _lost = enqueue(&through, repeated.clone()).await;
    let mouse = enqueue(&second.client, patient(&em1, "mouse", cpu(10))).await;
    let next = enqueue(&second.client, patient(&em1, "pig", cpu(10))).await;
    let _last = enqueue(&first.client, patient(&em1, "last", cpu(10))).await;
    assert_eq!(users(&first.client).await, ["pig", "mouse", "last", "pig"]);
    connection.abort();
    let order_is = async |order: &[&str]| users(&first.client).await == order;
    eventually("the next one has the turn", LONG, async || order_is(&["pig", "mouse", "pig", "last"]).await).await;
    let back = request_in_task(&second.client, repeated);
    eventually("the next one is behind again", LONG, async || order_is(&["pig", "mouse", "last", "pig"]).await).await;
    let calls = vec![("pig".to_owned(), back), ("mouse".to_owned(), mouse)];
    assert_eq!(served(&first.client, (grant, "first".to_owned()), calls).await, ["pig", "mouse"]);
    drop(next);
    let classes = "SELECT count(*) FROM linkis_resource_waiting WHERE class = 1";
    eventually("both are firsts", LONG, async || database.count(classes).await == 2).await;
}

/// A user whose own request was granted while a caller was absent has had its turn: the caller returns behind others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turn_that_was_used_is_lost_to_absent_caller() {
    turn_is_lost_to_absent_caller(async |_| {}).await;
}

/// `meanwhile` happens while all requests wait.
pub async fn turn_is_lost_to_absent_caller(meanwhile: impl AsyncFn(&RmClient)) {
    let (_database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let (through, connection) = Forwarder::start(&first.address).await;
    let repeated = named("r1", patient(&em1, "pig", cpu(10)));
    let _lost = enqueue(&through, repeated.clone()).await;
    let next = enqueue(&second.client, patient(&em1, "pig", cpu(10))).await;
    let _mouse = enqueue(&second.client, patient(&em1, "mouse", cpu(10))).await;
    meanwhile(&second.client).await;
    connection.abort();
    let has_turn = async || users(&first.client).await == ["pig", "pig", "mouse"];
    eventually("the next request has the turn", LONG, has_turn).await;
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(next).await;
    let _back = request_in_task(&second.client, repeated);
    eventually("the caller is back", LONG, async || users(&first.client).await == ["mouse", "pig"]).await;
}

/// A rank time that another transaction has raised changes the stored position at the next check, and the request is served there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turn_that_is_handed_on_late_changes_position() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let pig = enqueue(&rm.client, patient(&em1, "pig", cpu(10))).await;
    let mouse = enqueue(&rm.client, patient(&em1, "mouse", cpu(10))).await;
    assert_eq!(users(&rm.client).await, ["pig", "mouse"]);
    database.execute("UPDATE linkis_resource_waiting SET rank_time = clock_timestamp() WHERE \"user\" = 'pig'").await;
    eventually("the position changes", LONG, async || users(&rm.client).await == ["mouse", "pig"]).await;
    let calls = vec![("pig".to_owned(), pig), ("mouse".to_owned(), mouse)];
    assert_eq!(served(&rm.client, (grant, "first".to_owned()), calls).await, ["mouse", "pig"]);
}

/// A request that waited for a limit of its user alone does not go before others at an EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_at_own_limit_gives_no_turn() {
    let (_database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let other = em("host2");
    rm.client.register(registration(other.clone(), cpu(10))).await.unwrap();
    rm.client.set_limit(&limit(&[("user", Some("alice"))], &[(Dimension::Cores, 9)])).await.unwrap();
    let own = rm.client.request_resource(&request(&other, "alice", cpu(1))).await.granted();
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    // The EM has nine cores for alice until bob waits for all of them.
    let _alice = enqueue(&rm.client, patient(&em1, "alice", cpu(9))).await;
    let _held = rm.client.request_resource(&request(&em1, "first", cpu(1))).await.granted();
    assert_eq!(users(&rm.client).await, ["alice"], "alice waits at a limit of alice alone");
    let _bob = enqueue(&rm.client, patient(&em1, "bob", cpu(10))).await;
    rm.client.resource_released(&release(&own, "alice")).await.unwrap();
    eventually("alice waits at the EM", LONG, async || users(&rm.client).await == ["bob", "alice"]).await;
}

/// A request that does not wait passes the requests behind of other users, and none of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turn_of_request_without_waiting_is_that_of_newcomer() {
    let (_database, rm) = start().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let _held = rm.client.request_resource(&request(&em1, "first", load(10, 1, 1))).await.granted();
    let _first_of_pig = enqueue(&rm.client, patient(&em1, "pig", load(5, 1, 1))).await;
    let _behind = enqueue(&rm.client, patient(&em1, "pig", load(1, 8, 1))).await;
    let small = |user| request(&em1, user, load(0, 3, 1));
    rm.client.dry_run(&small("pig")).await.refused();
    rm.client.request_resource(&small("pig")).await.refused();
    rm.client.request_resource(&small("mouse")).await.granted();
}
