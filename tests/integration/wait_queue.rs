//! Wait queues: the order of grants, reservations, cancellations and timeouts, on one instance or several.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{
    em::EmInstance,
    hold::NewHold,
    limit::Rule,
    operation::{Grant, LockKey},
    order::Class,
    resource::{Dimension, Resource},
};
use rm_proto::v1::{self as proto, resource_manager_service_client::ResourceManagerServiceClient};
use sqlx::postgres::PgListener;
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{harness::*, proxy::FaultPlan};

mod dead_instances;
mod guarantees;
mod order;
mod outages;
mod positions;
mod priority;
mod removal;
mod turns;
mod waiting_limits;
mod wake_ups;

/// Keeps the rows of instances alive for an hour without a renewal.
async fn extend_lifetimes(database: &Database) {
    let extend = "CREATE FUNCTION extend() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.alive_until := NEW.alive_until + interval '1 hour';
            RETURN NEW;
        END $$;
        CREATE TRIGGER extend BEFORE INSERT OR UPDATE ON linkis_rm_instance FOR EACH ROW EXECUTE FUNCTION extend()";
    database.execute(extend).await;
}

/// A fresh database and two servers on it. A late renewal changes no order of waiting requests.
async fn two() -> (Database, Instance, Instance) {
    let (database, first, second) = crate::harness::two().await;
    extend_lifetimes(&database).await;
    (database, first, second)
}

fn user_limit(user: &str, instances: i64) -> Rule {
    limit(&[("user", Some(user))], &[(Dimension::Instances, instances)])
}

/// Registers an EM with `cores`, all of which one ticket uses.
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
    let (database, first, second) = two().await;
    let ems: Vec<_> = (0..5).map(|n| em(&format!("host{n}"))).collect();
    for em1 in &ems {
        first.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();
    }
    first.client.set_limit(&user_limit("hadoop", 10)).await.unwrap();
    let mut held = Vec::new();
    for n in 0..10 {
        held.push(first.client.request_resource(&request(&ems[n % 5], "hadoop", load(1, 1, 1))).await.granted());
    }
    let mut calls = JoinSet::new();
    for n in 0..50 {
        let (client, em1) = ([&first, &second][n % 2].client.clone(), ems[n % 5].clone());
        calls.spawn(async move { client.request_resource(&patient(&em1, "hadoop", load(1, 1, 1))).await.granted() });
    }
    database.waiting(50).await;
    let line: Vec<Uuid> = first.client.waiting().await.unwrap().iter().map(|w| w.ticket_id).collect();

    // Each release grants the head of the queue.
    for (grant, next) in held.drain(..5).zip(&line) {
        first.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        let served = calls.join_next().await.unwrap().unwrap();
        assert_eq!(served.ticket_id, *next);
    }
    // Five releases together grant the next five.
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
    served.sort();
    let mut expected = line[5..10].to_vec();
    expected.sort();
    assert_eq!(served, expected);

    assert_eq!(first.client.waiting().await.unwrap().len(), 40);
    assert_eq!(assert_invariants(&database, &first.client).await, 10);
    calls.shutdown().await;
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 10, "a cancelled request is granted nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_large_request_is_not_starved() {
    let (database, first, second) = two().await;
    let em1 = em("host1");
    first.client.register(registration(em1.clone(), cpu(100))).await.unwrap();
    let held = first.client.request_resource(&request(&em1, "first", cpu(20))).await.granted();
    let stop = Arc::new(AtomicBool::new(false));
    let mut stream = JoinSet::new();
    for n in 0..24 {
        let (client, em1, stop) = ([&first, &second][n % 2].client.clone(), em1.clone(), stop.clone());
        stream.spawn(async move {
            let mut served = 0;
            while !stop.load(Ordering::Relaxed) {
                // A third of the callers waits; the others repeat their requests.
                let (user, wait_timeout) = if n % 3 == 0 { ("patient", LONG) } else { ("small", Duration::ZERO) };
                let small = request(&em1, user, cpu(5));
                let answer = client.request_resource(&ResourceRequest { wait_timeout, ..small }).await.unwrap();
                if let ResultResource::Available(grant) = answer {
                    client.resource_released(&release(&grant, user)).await.unwrap();
                    served += 1;
                }
            }
            served
        });
    }
    let busy = async || first.client.em(&em1).await.unwrap().locked.get(&Dimension::Cores) > 50;
    eventually("small requests are granted", LONG, busy).await;
    // Beside a smaller request, a later one may be granted the rest of the EM.
    let call = request_in_task(&first.client, patient(&em1, "big", cpu(100)));
    let since = Mutex::new(None);
    let is_queued = async || {
        let waiting = first.client.waiting().await.unwrap();
        let big = waiting.iter().find(|waiting| waiting.user == name("big"));
        *since.lock().unwrap() = big.map(|big| big.waiting_since);
        big.is_some()
    };
    eventually("the large request waits", LONG, is_queued).await;
    first.client.resource_released(&release(&held, "first")).await.unwrap();
    let big = grant_of(call).await;

    let since = since.into_inner().unwrap().unwrap();
    // Since the large request waits, no request without an entry was granted. Requests with an earlier entry may be.
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
    first.client.resource_released(&release(&big, "big")).await.unwrap();
    eventually("small requests are granted again", LONG, busy).await;
    stop.store(true, Ordering::Relaxed);
    assert!(stream.join_all().await.into_iter().sum::<usize>() >= 18);
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_small_request_overtakes_without_delay() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(100, 100, 100)).await;
    let first = rm.client.request_resource(&request(&em1, "first", load(50, 1, 1))).await.granted();
    let big = enqueue(&rm.client, patient(&em1, "big", load(90, 50, 1))).await;

    let refusal = rm.client.request_resource(&request(&em1, "small", load(1, 1, 1))).await.refused();
    let short = &refusal.shortfalls[0];
    assert_eq!((&short.dimension, short.available, short.ahead), (&Dimension::Memory, 0, 90 * GB), "50 GB are free");
    let refusal = rm.client.request_resource(&request(&em1, "small", load(0, 60, 1))).await.refused();
    let short = &refusal.shortfalls[0];
    assert_eq!((&short.dimension, short.available, short.ahead), (&Dimension::Cores, 49, 50));
    // The request uses no memory, and leaves the cores that the large request needs.
    let passes = rm.client.request_resource(&request(&em1, "small", load(0, 49, 1))).await.granted();

    rm.client.resource_released(&release(&first, "first")).await.unwrap();
    grant_of(big).await;
    assert_eq!(rm.client.ticket(passes.ticket_id).await.unwrap().id, passes.ticket_id);
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_user_limit_blocks_no_other_user() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    extend_lifetimes(&database).await;
    rm.client.set_limit(&user_limit("hadoop", 1)).await.unwrap();
    let first = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let mut calls = Vec::new();
    for _ in 0..20 {
        calls.push(enqueue(&rm.client, patient(&em1, "hadoop", load(1, 1, 1))).await);
    }
    // Nine instances are free on the EM, and the requests at the limit reserve none of them.
    for _ in 0..9 {
        rm.client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
    }
    let refused = rm.client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.refused();
    assert_eq!(refused.shortfalls[0].available, 0);
    // The first request that notices the full EM after its limit is the first one there.
    rm.client.resource_released(&release(&first, "hadoop")).await.unwrap();
    eventually("one request fewer waits", LONG, async || rm.client.waiting().await.unwrap().len() == 19).await;
    let ended = || calls.iter().position(|call| call.is_finished());
    eventually("its call ends", LONG, async || ended().is_some()).await;
    let ended = ended().unwrap();
    grant_of(calls.remove(ended)).await;
    eventually("the others wait in one order", LONG, async || {
        let waiting = rm.client.waiting().await.unwrap();
        let ahead = waiting.iter().map(|waiting| waiting.ahead.get("user=hadoop").copied());
        ahead.eq((0..19).map(Some))
    })
    .await;
    assert_invariants(&database, &rm.client).await;
}

/// A cancelled request gets no grant, and its end grants the requests behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_cancelled_request_is_removed_without_grant() {
    let (database, first, second) = two().await;
    let em1 = em("host1");
    first.client.register(registration(em1.clone(), cpu(10))).await.unwrap();
    first.client.request_resource(&request(&em1, "first", cpu(5))).await.granted();
    let big = enqueue(&first.client, patient(&em1, "big", cpu(10))).await;
    let small = enqueue(&second.client, patient(&em1, "small", cpu(5))).await;
    woken(&second, small, async { big.abort() }).await;
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 2);
    let granted = database.count("SELECT count(*) FROM linkis_resource_action_record WHERE \"user\" = 'big'").await;
    assert_eq!(granted, 0, "a cancelled request is never granted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_timeout_or_call_deadline_ends_wait() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let wait_timeout = Duration::from_secs(3);
    let start = Instant::now();
    let refusal = rm
        .client
        .request_resource(&ResourceRequest { wait_timeout, ..request(&em1, "hadoop", cpu(1)) })
        .await
        .refused();
    assert!(start.elapsed() >= wait_timeout, "after {:?}", start.elapsed());
    assert_eq!((refusal.code, refusal.shortfalls[0].available), (11002, 0));
    assert_wait_queues_empty(&rm.client).await;

    // The deadline of the call is shorter than the wait timeout, and the reply arrives before the deadline.
    let mut manager = ResourceManagerServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut call = tonic::Request::new(proto::RequestResourceRequest {
        em: Some(proto::EmInstance {
            application_name: em1.application_name.to_string(),
            instance: em1.instance.to_string(),
        }),
        user: "hadoop".into(),
        creator: "IDE".into(),
        resource: Some(proto::Resource { kind: Some(proto::resource::Kind::Cpu(proto::CpuResource { cores: 1 })) }),
        wait_timeout: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..Default::default()
    });
    call.set_timeout(Duration::from_secs(3));
    let answer = manager.request_resource(call).await.unwrap().into_inner();
    assert!(matches!(answer.result, Some(proto::request_resource_response::Result::NotEnough(_))), "{answer:?}");
    assert_wait_queues_empty(&rm.client).await;

    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 0, "ended requests are granted nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_above_capacity_never_waits() {
    let (_database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let refusal = rm.client.request_resource(&patient(&em1, "hadoop", cpu(11))).await.refused();
    assert!(refusal.never_fits);
    // A waiting request that no longer fits the capacity is refused.
    let call = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    rm.client.register(registration(em1.clone(), cpu(9))).await.unwrap();
    assert!(tokio::time::timeout(LONG, call).await.unwrap().unwrap().refused().never_fits);
    assert_wait_queues_empty(&rm.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_any_em_grants_first_free() {
    let (database, first, second) = two().await;
    let mut grants = Vec::new();
    for n in 0..3 {
        grants.push(full_em(&first.client, &format!("host{n}"), 10).await);
    }
    let anywhere = |cores| ResourceRequest { em: None, ..patient(&grants[0].0, "hadoop", cpu(cores)) };
    for (host, grant) in &grants {
        let call = enqueue(&first.client, anywhere(10)).await;
        assert!(first.client.waiting().await.unwrap()[0].any_em);
        let released = async { second.client.resource_released(&release(grant, "first")).await.unwrap() };
        assert_eq!(woken(&first, call, released).await.em, *host);
    }
    let call = enqueue(&first.client, anywhere(10)).await;
    let registered = async { drop(second.client.register(registration(em("new"), cpu(10))).await.unwrap()) };
    assert_eq!(woken(&first, call, registered).await.em, em("new"));
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 4);
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
    // The EM of the entry becomes too small; the EM of the next entry is unregistered.
    for what in ["shrinks", "goes"] {
        let at = rm.client.waiting().await.unwrap()[0].em.clone();
        match what {
            "shrinks" => drop(rm.client.register(registration(at.clone(), cpu(1))).await.unwrap()),
            _ => drop(rm.client.unregister(&at).await.unwrap()),
        }
        let elsewhere = async || rm.client.waiting().await.unwrap().first().is_some_and(|waiting| waiting.em != at);
        eventually("the request waits for another EM", LONG, elsewhere).await;
    }
    let at = rm.client.waiting().await.unwrap()[0].em.clone();
    let (_, grant) = grants.iter().find(|(em, _)| *em == at).unwrap();
    rm.client.resource_released(&release(grant, "first")).await.unwrap();
    assert_eq!(grant_of(call).await.em, at);
    assert_wait_queues_empty(&rm.client).await;
    let over = "SELECT count(*) FROM linkis_em_resource_meta_data WHERE over_committed";
    assert_eq!(database.count(over).await, 1, "the EM that became smaller");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_any_em_skips_held_em() {
    let (database, rm) = start().await;
    let hold = async |host: &EmInstance| {
        let (key, duration) = (LockKey::Em(host.clone()), Duration::from_secs(600));
        rm.client.hold(&NewHold { key, duration, reason: name("an audit") }).await.unwrap();
    };
    let limit = Rule { max: [(Dimension::Cores, 10)].into(), ..user_limit("hadoop", 1) };
    rm.client.set_limit(&limit).await.unwrap();
    let (full, grant) = full_em(&rm.client, "full", 10).await;
    let anywhere = || ResourceRequest { em: None, ..patient(&full, "hadoop", cpu(10)) };
    // The only EM with free capacity is held: the request waits for another EM.
    let held = em("held");
    rm.client.register(registration(held.clone(), cpu(20))).await.unwrap();
    hold(&held).await;
    let call = enqueue(&rm.client, anywhere()).await;
    assert_eq!(rm.client.waiting().await.unwrap()[0].em, full);
    let grant = woken(&rm, call, async { rm.client.resource_released(&release(&grant, "first")).await.unwrap() }).await;
    assert_eq!(grant.em, full);

    // The request waits for its user's limit. It is woken while the EM of its entry and the emptiest EM are held.
    let home = em("home");
    rm.client.register(registration(home.clone(), cpu(20))).await.unwrap();
    rm.client.request_resource(&request(&home, "other", cpu(1))).await.granted();
    let call = enqueue(&rm.client, anywhere()).await;
    assert_eq!(rm.client.waiting().await.unwrap()[0].em, home);
    hold(&home).await;
    let emptiest = em("emptiest");
    rm.client.register(registration(emptiest.clone(), cpu(100))).await.unwrap();
    hold(&emptiest).await;
    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    assert_eq!(grant_of(call).await.em, full);
    assert_wait_queues_empty(&rm.client).await;
    for host in [held, home, emptiest] {
        assert!(rm.client.release_hold(&LockKey::Em(host)).await.unwrap());
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 2, "each request is granted once");
}

/// As after a restart: the instance has seen no EM, and its part of the wait queue is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_wait_queue_grants_request_that_fits() {
    let (database, other) = start().await;
    let rm = Instance::start_with(&database, settings().with("--max-waiting", 1)).await;
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
    assert_eq!(rm.counter("linkis_rm_waiting_rejected_total"), 2);
    waits.abort();
    assert_wait_queues_empty(&other.client).await;
    assert_invariants(&database, &rm.client).await;
}
