//! Waiting in line: who comes first is served first, through whatever instance, and nobody is forgotten.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ResourceRequest, ResultResource, RmClient},
    domain::{
        em::EmInstance,
        hold::NewHold,
        limit::{LabelPattern, Rule},
        operation::{Grant, LockKey},
        resource::{Dimension, Resource},
    },
    server::Options,
    store::waiting::CHANNEL,
    transport::{
        edge::EdgeBounds,
        proto::{self, resource_manager_service_client::ResourceManagerServiceClient},
        resource_manager::RequestTimeouts,
    },
};
use sqlx::postgres::PgListener;
use tokio::task::JoinSet;
use tonic::Code;
use uuid::Uuid;

use crate::{harness::*, proxy::FaultPlan};

mod outages;
mod wake_ups;

/// Longer than any test waits for anything.
const LONG: Duration = Duration::from_secs(60);

/// Well below the second after which waiters would look again by themselves.
const AT_ONCE: Duration = Duration::from_millis(700);

fn patient(em: &EmInstance, user: &str, resource: Resource) -> ResourceRequest {
    ResourceRequest { wait_timeout: LONG, ..request(em, user, resource) }
}

fn user_limit(user: &str, instances: i64) -> Rule {
    let pattern = LabelPattern::new([("user".to_owned(), Some(user.to_owned()))].into());
    Rule { pattern, mode: Default::default(), max: [(Dimension::Instances, instances)].into() }
}

/// Asks, and comes back when the request stands in line.
async fn enqueue(client: &RmClient, request: ResourceRequest) -> Call {
    let before = client.waiting().await.unwrap().len();
    let call = ask_in_task(client, request);
    eventually("it stands in line", LONG, async || client.waiting().await.unwrap().len() > before).await;
    call
}

async fn assert_wait_queues_empty(client: &RmClient) {
    eventually("nobody waits", LONG, async || client.waiting().await.unwrap().is_empty()).await;
}

async fn granted(call: Call) -> Grant {
    tokio::time::timeout(LONG, call).await.expect("an answer").unwrap().granted()
}

/// An EM with room for `cores`, all of which a ticket holds.
async fn full_em(client: &RmClient, host: &str, cores: i64) -> (EmInstance, Grant) {
    let host = em(host);
    client.register(registration(host.clone(), Resource::cpu(cores).unwrap())).await.unwrap();
    let grant = client.request_resource(&request(&host, "first", Resource::cpu(cores).unwrap())).await.granted();
    (host, grant)
}

fn cpu(cores: i64) -> Resource {
    Resource::cpu(cores).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_release_grants_head_immediately() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let hosts: Vec<_> = (0..5).map(|n| em(&format!("host{n}"))).collect();
    for host in &hosts {
        first.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    }
    first.client.set_limit(&user_limit("hadoop", 10)).await.unwrap();
    let mut held = Vec::new();
    for n in 0..10 {
        held.push(first.client.request_resource(&request(&hosts[n % 5], "hadoop", load(1, 1, 1))).await.granted());
    }
    let mut calls = JoinSet::new();
    for n in 0..50 {
        let (client, host) = ([&first, &second][n % 2].client.clone(), hosts[n % 5].clone());
        calls.spawn(async move { client.request_resource(&patient(&host, "hadoop", load(1, 1, 1))).await.granted() });
    }
    eventually("50 wait", LONG, async || second.client.waiting().await.unwrap().len() == 50).await;
    let line: Vec<Uuid> = first.client.waiting().await.unwrap().iter().map(|w| w.ticket_id).collect();

    // One by one: each time the next in line.
    for (grant, next) in held.drain(..5).zip(&line) {
        let start = Instant::now();
        first.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        let served = calls.join_next().await.unwrap().unwrap();
        assert_eq!(served.ticket_id, *next);
        assert!(start.elapsed() < AT_ONCE, "served after {:?}", start.elapsed());
    }
    // Five together: those who are first in line then.
    let start = Instant::now();
    let mut releases = JoinSet::new();
    for grant in held {
        let client = second.client.clone();
        releases.spawn(async move { client.resource_released(&release(&grant, "hadoop")).await.unwrap() });
    }
    releases.join_all().await;
    let mut served = Vec::new();
    for _ in 0..5 {
        served.push(calls.join_next().await.unwrap().unwrap().ticket_id);
    }
    println!("five released together were granted again {:?} later", start.elapsed());
    assert!(start.elapsed() < AT_ONCE, "served after {:?}", start.elapsed());
    served.sort();
    let mut expected = line[5..10].to_vec();
    expected.sort();
    assert_eq!(served, expected);

    assert_eq!(first.client.waiting().await.unwrap().len(), 40);
    assert_eq!(assert_invariants(&database, &first.client).await, 10);
    calls.shutdown().await;
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 10, "who is gone is granted nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_large_request_is_not_starved() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let host = em("host1");
    first.client.register(registration(host.clone(), cpu(100))).await.unwrap();
    let held = first.client.request_resource(&request(&host, "first", cpu(20))).await.granted();
    let stop = Arc::new(AtomicBool::new(false));
    let mut stream = JoinSet::new();
    for n in 0..24 {
        let (client, host, stop) = ([&first, &second][n % 2].client.clone(), host.clone(), stop.clone());
        stream.spawn(async move {
            let mut served = 0;
            while !stop.load(Ordering::Relaxed) {
                // Some wait themselves, some ask again and again.
                let (user, wait_timeout) = if n % 3 == 0 { ("patient", LONG) } else { ("small", Duration::ZERO) };
                let small = request(&host, user, cpu(5));
                let answer = client.request_resource(&ResourceRequest { wait_timeout, ..small }).await.unwrap();
                if let ResultResource::Available(grant) = answer {
                    tokio::time::sleep(Duration::from_millis(30)).await;
                    client.resource_released(&release(&grant, user)).await.unwrap();
                    served += 1;
                }
            }
            served
        });
    }
    let busy = async || first.client.em(&host).await.unwrap().locked.get(&Dimension::Cores) > 50;
    eventually("the stream flows", LONG, busy).await;
    let call = ask_in_task(&first.client, patient(&host, "big", cpu(90)));
    let since = Mutex::new(None);
    let stands = async || {
        let line = first.client.waiting().await.unwrap();
        let big = line.iter().find(|waiting| waiting.user == name("big"));
        *since.lock().unwrap() = big.map(|big| big.waiting_since);
        big.is_some()
    };
    eventually("it stands in line", LONG, stands).await;
    let start = Instant::now();
    first.client.resource_released(&release(&held, "first")).await.unwrap();
    let big = granted(call).await;
    println!(
        "90 of 100 among a stream of 5s was granted {:?} after the last of those before it gave back",
        start.elapsed()
    );

    let since = since.into_inner().unwrap().unwrap();
    // From the moment it stood in line, nothing was granted to anybody who did not. (Of those who wait, some came before it.)
    let passed: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM linkis_resource_action_record later
         JOIN linkis_resource_action_record big ON big.ticket_id = $1 AND big.action = 'granted'
         WHERE later.action = 'granted' AND later.id < big.id AND later.\"user\" = 'small'
             AND later.action_time > $2",
    )
    .bind(big.ticket_id)
    .bind(since)
    .fetch_one(&database.pool)
    .await
    .unwrap();
    assert_eq!(passed, 0);
    assert!(start.elapsed() < AT_ONCE, "as soon as those before it have given back: {:?}", start.elapsed());
    first.client.resource_released(&release(&big, "big")).await.unwrap();
    eventually("the stream flows again", LONG, busy).await;
    stop.store(true, Ordering::Relaxed);
    assert!(stream.join_all().await.into_iter().sum::<usize>() > 20);
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_small_request_overtakes_without_delay() {
    let (database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(100, 100, 100))).await.unwrap();
    let first = rm.client.request_resource(&request(&host, "first", load(50, 1, 1))).await.granted();
    let big = enqueue(&rm.client, patient(&host, "big", load(90, 50, 1))).await;

    let refusal = rm.client.request_resource(&request(&host, "small", load(1, 1, 1))).await.refused();
    let short = &refusal.shortfalls[0];
    assert_eq!((&short.dimension, short.available, short.ahead), (&Dimension::Memory, 0, 90 * GB), "50 GB are free");
    let refusal = rm.client.request_resource(&request(&host, "small", load(0, 60, 1))).await.refused();
    let short = &refusal.shortfalls[0];
    assert_eq!((&short.dimension, short.available, short.ahead), (&Dimension::Cores, 49, 50));
    // It takes no memory, and leaves the cores that the big one needs.
    let passes = rm.client.request_resource(&request(&host, "small", load(0, 49, 1))).await.granted();

    rm.client.resource_released(&release(&first, "first")).await.unwrap();
    granted(big).await;
    assert_eq!(rm.client.ticket(passes.ticket_id).await.unwrap().id, passes.ticket_id);
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_user_limit_blocks_no_other_user() {
    let (database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    rm.client.set_limit(&user_limit("hadoop", 1)).await.unwrap();
    let first = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    let mut calls = Vec::new();
    for _ in 0..20 {
        calls.push(enqueue(&rm.client, patient(&host, "hadoop", load(1, 1, 1))).await);
    }
    // Nine are free on the EM; one of them is kept for the first of those twenty.
    for _ in 0..8 {
        rm.client.request_resource(&request(&host, "alice", load(1, 1, 1))).await.granted();
    }
    assert_eq!(
        rm.client.request_resource(&request(&host, "alice", load(1, 1, 1))).await.refused().shortfalls[0].ahead,
        1
    );
    rm.client.resource_released(&release(&first, "hadoop")).await.unwrap();
    granted(calls.remove(0)).await;
    // The next in line keeps nothing where nothing is.
    eventually("the line has moved up", LONG, async || rm.client.waiting().await.unwrap().len() == 19).await;
    let line = rm.client.waiting().await.unwrap();
    assert_eq!(line[0].ahead.get("user=hadoop"), Some(&0));
    assert_eq!(line[18].ahead.get("user=hadoop"), Some(&18));
    assert_invariants(&database, &rm.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_cancelled_request_is_removed_without_grant() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let (host, grant) = full_em(&first.client, "host1", 10).await;
    let big = enqueue(&first.client, patient(&host, "big", cpu(10))).await;
    let small = enqueue(&second.client, patient(&host, "small", cpu(1))).await;
    big.abort();
    eventually("it has left", LONG, async || first.client.waiting().await.unwrap().len() == 1).await;
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    let start = Instant::now();
    granted(small).await;
    assert!(start.elapsed() < AT_ONCE);
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
    let granted = database.count("SELECT count(*) FROM linkis_resource_action_record WHERE \"user\" = 'big'").await;
    assert_eq!(granted, 0, "never granted, not even for a moment");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_who_leaves_makes_room_for_those_behind() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let host = em("host1");
    first.client.register(registration(host.clone(), cpu(10))).await.unwrap();
    first.client.request_resource(&request(&host, "first", cpu(5))).await.granted();
    let big = enqueue(&first.client, patient(&host, "big", cpu(10))).await;
    let small = enqueue(&second.client, patient(&host, "small", cpu(5))).await;
    let start = Instant::now();
    big.abort();
    granted(small).await;
    assert!(start.elapsed() < AT_ONCE, "after {:?}", start.elapsed());
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_timeout_or_call_deadline_ends_wait() {
    let (database, rm) = start().await;
    let (host, grant) = full_em(&rm.client, "host1", 10).await;
    let wait_timeout = Duration::from_millis(300);
    let start = Instant::now();
    let refusal = rm
        .client
        .request_resource(&ResourceRequest { wait_timeout, ..request(&host, "hadoop", cpu(1)) })
        .await
        .refused();
    assert!(start.elapsed() >= wait_timeout, "it waited {:?}", start.elapsed());
    assert_eq!((refusal.code, refusal.shortfalls[0].available), (11002, 0));
    assert_wait_queues_empty(&rm.client).await;

    // The call's own deadline is shorter: answered in time all the same.
    let mut manager = ResourceManagerServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut call = tonic::Request::new(proto::RequestResourceRequest {
        em: Some(proto::EmInstance {
            application_name: host.application_name.to_string(),
            instance: host.instance.to_string(),
        }),
        user: "hadoop".into(),
        creator: "IDE".into(),
        resource: Some(proto::Resource { kind: Some(proto::resource::Kind::Cpu(proto::CpuResource { cores: 1 })) }),
        wait_timeout: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..Default::default()
    });
    call.set_timeout(Duration::from_millis(400));
    let answer = manager.request_resource(call).await.unwrap().into_inner();
    assert!(matches!(answer.result, Some(proto::request_resource_response::Result::NotEnough(_))), "{answer:?}");
    assert_wait_queues_empty(&rm.client).await;

    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 0, "nothing is granted to those who are gone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_above_capacity_never_waits() {
    let (_database, rm) = start().await;
    let (host, _grant) = full_em(&rm.client, "host1", 10).await;
    let refusal = rm.client.request_resource(&patient(&host, "hadoop", cpu(11))).await.refused();
    assert!(refusal.never_fits);
    // One that fitted when it came is told as soon as it never will.
    let call = enqueue(&rm.client, patient(&host, "hadoop", cpu(10))).await;
    rm.client.register(registration(host.clone(), cpu(9))).await.unwrap();
    assert!(tokio::time::timeout(LONG, call).await.unwrap().unwrap().refused().never_fits);
    assert_wait_queues_empty(&rm.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_any_em_grants_first_free() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let mut grants = Vec::new();
    for n in 0..3 {
        grants.push(full_em(&first.client, &format!("host{n}"), 10).await);
    }
    let anywhere = |cores| ResourceRequest { em: None, ..patient(&grants[0].0, "hadoop", cpu(cores)) };
    for (host, grant) in &grants {
        let call = enqueue(&first.client, anywhere(10)).await;
        assert!(first.client.waiting().await.unwrap()[0].any_em);
        let start = Instant::now();
        second.client.resource_released(&release(grant, "first")).await.unwrap();
        assert_eq!(granted(call).await.em, *host);
        assert!(start.elapsed() < AT_ONCE, "after {:?}", start.elapsed());
    }
    let call = enqueue(&first.client, anywhere(10)).await;
    let start = Instant::now();
    second.client.register(registration(em("new"), cpu(10))).await.unwrap();
    assert_eq!(granted(call).await.em, em("new"));
    assert!(start.elapsed() < AT_ONCE, "a new EM, after {:?}", start.elapsed());
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_repeated_while_waiting_returns_same_ticket() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    let (host, grant) = full_em(&first.client, "host1", 10).await;
    let named = ResourceRequest { request_id: Some("r1".into()), ..patient(&host, "hadoop", cpu(5)) };
    let one = enqueue(&first.client, named.clone()).await;
    let two = enqueue(&second.client, named.clone()).await;
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    let (one, two) = (granted(one).await, granted(two).await);
    assert_eq!(one, two);
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_line_is_shown_page_by_page() {
    let (_database, rm) = start().await;
    let (host, _grant) = full_em(&rm.client, "host1", 10).await;
    for n in 0..5 {
        let _waits = enqueue(&rm.client, patient(&host, &format!("user{n}"), cpu(5))).await;
    }
    let mut usage = proto::usage_service_client::UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let (mut users, mut page_token) = (Vec::new(), String::new());
    loop {
        let page = usage
            .list_waiting(proto::ListWaitingRequest { page_size: 2, page_token, ..Default::default() })
            .await
            .unwrap()
            .into_inner();
        users.extend(page.waiting.into_iter().map(|w| (w.user, w.spots[0].scope.clone(), w.spots[0].ahead)));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    let expected: Vec<_> = (0..5).map(|n| (format!("user{n}"), format!("em={host}"), n)).collect();
    assert_eq!(users, expected);
    for page_token in ["x", "1_x", "_", "99999999999999999999999999_00000000-0000-0000-0000-000000000000"] {
        let call = proto::ListWaitingRequest { page_size: 2, page_token: page_token.into(), ..Default::default() };
        assert_eq!(usage.list_waiting(call).await.unwrap_err().code(), Code::InvalidArgument, "{page_token}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_any_em_moves_to_other_em() {
    let (database, rm) = start().await;
    let mut grants = Vec::new();
    for n in 0..3 {
        grants.push(full_em(&rm.client, &format!("host{n}"), 10).await);
    }
    let anywhere = ResourceRequest { em: None, ..patient(&grants[0].0, "hadoop", cpu(10)) };
    let call = enqueue(&rm.client, anywhere).await;
    // Where it stands, it will never fit again; then that EM goes.
    for what in ["shrinks", "goes"] {
        let at = rm.client.waiting().await.unwrap()[0].em.clone();
        match what {
            "shrinks" => drop(rm.client.register(registration(at.clone(), cpu(1))).await.unwrap()),
            _ => drop(rm.client.unregister(&at).await.unwrap()),
        }
        let elsewhere = async || rm.client.waiting().await.unwrap().first().is_some_and(|waiting| waiting.em != at);
        eventually("it stands elsewhere", LONG, elsewhere).await;
    }
    let at = rm.client.waiting().await.unwrap()[0].em.clone();
    let (_, grant) = grants.iter().find(|(em, _)| *em == at).unwrap();
    rm.client.resource_released(&release(grant, "first")).await.unwrap();
    assert_eq!(granted(call).await.em, at);
    assert_wait_queues_empty(&rm.client).await;
    let over = "SELECT count(*) FROM linkis_em_resource_meta_data WHERE over_committed";
    assert_eq!(database.count(over).await, 1, "the one that shrank");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_any_em_skips_held_em() {
    let (database, rm) = start().await;
    let hold = async |host: &EmInstance| {
        let (key, duration) = (LockKey::Em(host.clone()), Duration::from_secs(600));
        rm.client.hold(&NewHold { key, duration, reason: name("books are checked") }).await.unwrap();
    };
    let limit = Rule { max: [(Dimension::Cores, 10)].into(), ..user_limit("hadoop", 1) };
    rm.client.set_limit(&limit).await.unwrap();
    let (full, grant) = full_em(&rm.client, "full", 10).await;
    let anywhere = || ResourceRequest { em: None, ..patient(&full, "hadoop", cpu(10)) };
    // The only one with room is held: it stands in line elsewhere.
    let held = em("held");
    rm.client.register(registration(held.clone(), cpu(20))).await.unwrap();
    hold(&held).await;
    let call = enqueue(&rm.client, anywhere()).await;
    assert_eq!(rm.client.waiting().await.unwrap()[0].em, full);
    let start = Instant::now();
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    let grant = granted(call).await;
    assert_eq!(grant.em, full);
    assert!(start.elapsed() < AT_ONCE, "after {:?}", start.elapsed());

    // It waits for its user's limit, and is woken when where it stands and where there is the most room are held.
    let home = em("home");
    rm.client.register(registration(home.clone(), cpu(20))).await.unwrap();
    rm.client.request_resource(&request(&home, "other", cpu(1))).await.granted();
    let call = enqueue(&rm.client, anywhere()).await;
    assert_eq!(rm.client.waiting().await.unwrap()[0].em, home);
    hold(&home).await;
    let emptiest = em("emptiest");
    rm.client.register(registration(emptiest.clone(), cpu(100))).await.unwrap();
    hold(&emptiest).await;
    let start = Instant::now();
    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    assert_eq!(granted(call).await.em, full);
    assert!(start.elapsed() < Duration::from_secs(3), "after {:?}", start.elapsed());
    assert_wait_queues_empty(&rm.client).await;
    for host in [held, home, emptiest] {
        assert!(rm.client.release_hold(&LockKey::Em(host)).await.unwrap());
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 2, "and nothing was granted twice");
}

/// As after a restart: the instance has seen no EM, and its part of the wait queue is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_wait_queue_grants_request_that_fits() {
    let (database, other) = start().await;
    let rm =
        Instance::start_with(&database, Options { bounds: EdgeBounds { waiting: 1, ..options().bounds }, ..options() })
            .await;
    let (full, _grant) = full_em(&other.client, "host1", 10).await;
    let empty = em("host2");
    other.client.register(registration(empty.clone(), cpu(10))).await.unwrap();
    let waits = enqueue(&rm.client, patient(&full, "hadoop", cpu(10))).await;
    rm.client.request_resource(&patient(&empty, "alice", cpu(10))).await.granted();
    // A request that does not fit would have to wait.
    for host in [&full, &empty] {
        let error = rm.client.request_resource(&patient(host, "alice", cpu(10))).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("OVERLOADED"), "{error}");
    }
    assert_eq!(rm.metrics.line.turned_away.get(), 2);
    waits.abort();
    assert_wait_queues_empty(&other.client).await;
    assert_invariants(&database, &rm.client).await;
}
