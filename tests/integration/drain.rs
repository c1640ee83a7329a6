//! Drains of EMs, and forced releases of tickets, by operators.

use std::time::Duration;

use rm_client::{ClientError, ResourceRequest, ResultResource};
use rm_model::{em::EmInstance, operation::Grant, principal::Principal, resource::Resource};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::Code;
use uuid::Uuid;

use crate::harness::*;

fn cpu(cores: i64) -> Resource {
    Resource::cpu(cores).unwrap()
}

/// A request without an EM.
fn anywhere(user: &str, resource: Resource) -> ResourceRequest {
    ResourceRequest::new(None, name(user), name("IDE"), resource)
}

fn waiting_anywhere(user: &str, resource: Resource) -> ResourceRequest {
    ResourceRequest { wait_timeout: LONG, ..anywhere(user, resource) }
}

async fn answered(call: Call) -> Result<ResultResource, ClientError> {
    tokio::time::timeout(LONG, call).await.expect("an answer").unwrap()
}

#[track_caller]
fn is_draining(error: &ClientError, reason: &str) {
    let got = (error.code(), error.reason());
    assert_eq!(got, (Some(Code::FailedPrecondition), Some("EM_DRAINING".to_owned())), "{error}");
    assert_eq!(error.fact("reason").as_deref(), Some(reason), "{error}");
    assert!(error.fact("drain_time").is_some() && error.fact("drained_by").as_deref() == Some("anonymous"));
    assert_eq!(error.fact("em_instance").as_deref(), Some("host1:9102"));
    assert!(error.retry_after().is_none(), "a retry does not help");
}

/// Action, actor and reason of the selected history lines.
async fn history(database: &Database, sql: &'static str) -> Vec<String> {
    let of = r#"SELECT concat_ws(' ', action, actor, reason) FROM linkis_resource_action_record WHERE "#;
    let sql = format!("{of} {sql} ORDER BY id");
    database.column(sql).await
}

const OF_HOST1: &str = "ticket_id IS NULL AND em_instance = 'host1:9102'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_stops_grants_and_keeps_tickets() {
    let (database, first, second) = two().await;
    let (em1, other) = (em("host1"), em("host2"));
    first.client.register(registration(em1.clone(), load(100, 100, 100))).await.unwrap();
    first.client.register(registration(other.clone(), load(10, 10, 100))).await.unwrap();
    let again = ResourceRequest { request_id: Some("r1".into()), ..request(&em1, "hadoop", load(2, 2, 1)) };
    let locked = first.client.request_resource(&again).await.granted();
    let used = first.client.request_resource(&request(&em1, "alice", load(2, 2, 1))).await.granted();
    first.client.resource_inited(&inited(&used, "alice", None)).await.unwrap();
    // Both instances have observed the free capacity.
    for instance in [&first, &second] {
        instance.client.dry_run(&anywhere("hadoop", load(20, 1, 1))).await.granted();
    }

    let drain = first.client.drain(&em1, "a new disk").await.unwrap();
    assert_eq!((drain.reason.as_str(), &drain.by), ("a new disk", &Principal::Anonymous));
    for instance in [&first, &second] {
        let client = &instance.client;
        is_draining(&client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.unwrap_err(), "a new disk");
        is_draining(&client.dry_run(&request(&em1, "hadoop", load(1, 1, 1))).await.unwrap_err(), "a new disk");
        let waits =
            ResourceRequest { wait_timeout: Duration::from_millis(300), ..request(&em1, "hadoop", load(1, 1, 1)) };
        let refusal = client.request_resource(&waits).await.refused();
        assert!(refusal.reason.contains("is drained since") && refusal.reason.contains("(a new disk)"), "{refusal:?}");
        assert!(!refusal.never_fits);
        let too_large = patient(&em1, "hadoop", load(101, 1, 1));
        assert!(client.request_resource(&too_large).await.refused().never_fits, "it does not wait");
        let mut calls = JoinSet::new();
        for _ in 0..5 {
            let client = client.clone();
            calls.spawn(async move { client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted() });
        }
        assert!(calls.join_all().await.iter().all(|grant| grant.em == other), "only the other EM is selected");
        // A refusal considers only the EM without a drain.
        let refusal = client.request_resource(&anywhere("hadoop", load(50, 1, 1))).await.refused();
        assert!(refusal.never_fits && refusal.shortfalls[0].scope.contains("host2"), "{refusal:?}");
        let em = client.em(&em1).await.unwrap();
        assert_eq!(em.drain.as_deref(), Some(&drain));
        let drained = client.ems().await.unwrap().into_iter().filter(|em| em.drain.is_some());
        assert!(drained.map(|em| em.instance).eq([em1.clone()]));
    }
    let mut usage = UsageServiceClient::connect(second.address.clone()).await.unwrap();
    let ems = vec![rm_proto::convert::answer::em_message(&em1)];
    let found = usage.batch_get_ems(proto::BatchGetEmsRequest { ems }).await.unwrap().into_inner();
    assert_eq!(found.ems[0].drain.as_ref().unwrap().reason, "a new disk");

    // Tickets stay; a higher use is refused.
    assert_eq!(second.client.request_resource(&again).await.granted(), locked);
    let more = second.client.resource_reported(&used.reported(name("alice"), load(3, 2, 1))).await;
    is_draining(&more.unwrap_err(), "a new disk");
    second.client.resource_reported(&used.reported(name("alice"), load(1, 2, 1))).await.unwrap();
    let more = first.client.resource_inited(&inited(&locked, "hadoop", Some(load(3, 1, 1)))).await;
    is_draining(&more.unwrap_err(), "a new disk");
    first.client.resource_inited(&inited(&locked, "hadoop", None)).await.unwrap();
    first.client.resource_released(&release(&used, "alice")).await.unwrap();

    // A repeated drain changes nothing; another reason changes the reason alone.
    assert_eq!(second.client.drain(&em1, "a new disk").await.unwrap(), drain);
    let renamed = second.client.drain(&em1, "a new board").await.unwrap();
    assert_eq!((renamed.reason.as_str(), renamed.since), ("a new board", drain.since));

    // A drain survives registrations and unregistrations.
    let em = first.client.register(registration(em1.clone(), load(50, 50, 50))).await.unwrap();
    assert_eq!(em.drain.as_deref(), Some(&renamed), "the registration returns the drain");
    is_draining(
        &first.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.unwrap_err(),
        "a new board",
    );
    first.client.unregister(&em1).await.unwrap();
    assert_eq!(second.client.drain(&em1, "a new board").await.unwrap(), renamed);
    let em = second.client.register(registration(em1.clone(), load(50, 50, 50))).await.unwrap();
    assert_eq!(em.drain.as_deref(), Some(&renamed));
    for instance in [&first, &second] {
        let refused = instance.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await;
        is_draining(&refused.unwrap_err(), "a new board");
    }

    assert!(first.client.resume(&em1, "it is in").await.unwrap());
    assert!(!second.client.resume(&em1, "it is in").await.unwrap(), "the EM was resumed already");
    for instance in [&first, &second] {
        instance.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
        assert_eq!(instance.client.em(&em1).await.unwrap().drain, None);
    }
    assert_invariants(&database, &first.client).await;
    let got = [
        "registered anonymous",
        "drained anonymous a new disk",
        "drained anonymous a new board",
        "resized anonymous",
        "unregistered anonymous",
        "registered anonymous",
        "resumed anonymous it is in",
    ];
    assert_eq!(history(&database, OF_HOST1).await, got);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_of_unknown_em_fails() {
    let (database, rm) = start().await;
    let unknown = |error: ClientError| {
        let got = (error.code(), error.reason());
        assert_eq!(got, (Some(Code::NotFound), Some("EM_NOT_REGISTERED".to_owned())), "{error}");
    };
    unknown(rm.client.drain(&em("host1"), "a typing mistake").await.unwrap_err());
    unknown(rm.client.resume(&em("host1"), "").await.unwrap_err());
    rm.client.register(registration(em("host1"), cpu(1))).await.unwrap();
    assert_eq!(rm.client.drain(&em("host1"), "").await.unwrap_err().field().as_deref(), Some("reason"));
    rm.client.drain(&em("host1"), "it goes").await.unwrap();
    rm.client.unregister(&em("host1")).await.unwrap();
    assert!(rm.client.resume(&em("host1"), "").await.unwrap());
    unknown(rm.client.resume(&em("host1"), "").await.unwrap_err());
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_drain").await, 0);
}

/// Without another EM, a request without an EM fails with NO_EM_AVAILABLE, or waits for the end of the drain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_of_last_em_rejects_or_queues_placement() {
    let (database, rm, second) = two().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), cpu(10))).await.unwrap();
    let held = rm.client.request_resource(&request(&em1, "first", cpu(10))).await.granted();
    let mut waits = vec![enqueue(&second.client, waiting_anywhere("hadoop", cpu(1))).await];
    rm.client.drain(&em1, "it goes").await.unwrap();
    let none = |error: ClientError| {
        let got = (error.code(), error.reason(), error.fact("matching"));
        let expected = (Some(Code::NotFound), Some("NO_EM_AVAILABLE".to_owned()), Some("1".to_owned()));
        assert_eq!(got, expected, "{error}");
    };
    rm.client.resource_released(&release(&held, "first")).await.unwrap();
    for instance in [&rm, &second] {
        none(instance.client.request_resource(&anywhere("hadoop", cpu(1))).await.unwrap_err());
        waits.push(enqueue(&instance.client, waiting_anywhere("hadoop", cpu(1))).await);
        let too_large = instance.client.request_resource(&waiting_anywhere("hadoop", cpu(11))).await.refused();
        assert!(too_large.never_fits && too_large.shortfalls[0].scope.contains("host1"), "{too_large:?}");
    }
    let listed = second.client.waiting().await.unwrap();
    let at_host = listed.iter().filter(|waiting| waiting.em == em1 && waiting.any_em && waiting.ahead.len() == 1);
    assert!(listed.len() == waits.len() && at_host.count() == waits.len(), "{listed:?}");
    assert!(rm.client.em(&em1).await.unwrap().is_idle());
    rm.client.resume(&em1, "").await.unwrap();
    for call in waits {
        assert_eq!(grant_of(call).await.em, em1);
    }
    rm.client.request_resource(&anywhere("hadoop", cpu(1))).await.granted();
    // The next survey of the other instance reads the drain.
    let chosen = async || second.client.request_resource(&anywhere("hadoop", cpu(1))).await.is_ok();
    eventually("the EM is selected again", LONG, chosen).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 5);
}

/// A request that waits at a drained EM is woken by its end, by a registration, and by the resumption of another EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_end_wakes_waiting_requests() {
    let (database, first, second) = two().await;
    let ems = ["host1", "host2"].map(em);
    for drained in &ems {
        first.client.register(registration(drained.clone(), cpu(1))).await.unwrap();
        first.client.drain(drained, "it goes").await.unwrap();
    }
    let resume = async |em: &EmInstance| assert!(first.client.resume(em, "it stays").await.unwrap());
    for request in [waiting_anywhere("hadoop", cpu(1)), patient(&ems[0], "hadoop", cpu(1))] {
        for other in &ems {
            let em = request.em.as_ref().unwrap_or(other);
            let call = enqueue(&second.client, request.clone()).await;
            let granted = woken(&second, call, resume(em)).await;
            assert_eq!(granted.em, *em);
            first.client.drain(em, "it goes").await.unwrap();
            first.client.resource_released(&release(&granted, "hadoop")).await.unwrap();
        }
    }
    let call = enqueue(&second.client, waiting_anywhere("hadoop", cpu(1))).await;
    let register = async || drop(first.client.register(registration(em("host3"), cpu(1))).await.unwrap());
    assert_eq!(woken(&second, call, register()).await.em, em("host3"));
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// A drain keeps the waiting requests that name the EM, on every instance, and moves the others to another EM. The EM grants
/// nothing until it is resumed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_moves_or_keeps_waiting_requests() {
    const ANY: usize = 20;
    const NAMED: usize = 30;
    let (database, first, second) = two().await;
    let (em1, other) = (em("host1"), em("host2"));
    let mut held = Vec::new();
    for em1 in [&em1, &other] {
        first.client.register(registration(em1.clone(), cpu(10))).await.unwrap();
        held.push(first.client.request_resource(&request(em1, "first", cpu(10))).await.granted());
    }
    let instance = |n: usize| [&first, &second][n % 2];
    let any: Vec<Call> =
        (0..ANY).map(|n| request_in_task(&instance(n).client, waiting_anywhere(&format!("any{n}"), cpu(1)))).collect();
    let named: Vec<Call> =
        (0..NAMED).map(|n| request_in_task(&instance(n).client, patient(&em1, &format!("named{n}"), cpu(1)))).collect();
    let waiting = async || first.client.waiting().await.unwrap();
    eventually("all wait", LONG, async || waiting().await.len() == ANY + NAMED).await;

    first.client.drain(&em1, "it goes").await.unwrap();
    eventually("the others wait for the other EM", LONG, async || {
        let waiting = waiting().await;
        waiting.len() == ANY + NAMED && waiting.iter().all(|waiting| (waiting.em == other) == waiting.any_em)
    })
    .await;

    // The drained EM grants no freed capacity.
    first.client.resource_released(&release(&held[0], "first")).await.unwrap();
    first.client.resource_released(&release(&held[1], "first")).await.unwrap();
    eventually("the other EM is full", LONG, async || first.client.em(&other).await.unwrap().locked == cpu(10)).await;
    assert!(first.client.em(&em1).await.unwrap().is_idle());
    assert_eq!(waiting().await.len(), ANY - 10 + NAMED);
    // As many as fit, in their order.
    second.client.resume(&em1, "it stays").await.unwrap();
    eventually("the EM is full", LONG, async || first.client.em(&em1).await.unwrap().locked == cpu(10)).await;
    first.client.register(registration(em1.clone(), cpu(100))).await.unwrap();
    let mut on_host = 0;
    for call in any.into_iter().chain(named) {
        on_host += usize::from(grant_of(call).await.em == em1);
    }
    assert_eq!(on_host, ANY - 10 + NAMED);
    assert_eq!(assert_invariants(&database, &first.client).await, ANY + NAMED);
    let between =
        "SELECT count(*) FROM linkis_resource_action_record g WHERE action = 'granted' AND em_instance = 'host1:9102'
        AND id > (SELECT max(id) FROM linkis_resource_action_record WHERE action = 'drained')
        AND id < (SELECT max(id) FROM linkis_resource_action_record WHERE action = 'resumed')";
    assert_eq!(database.count(between).await, 0);
}

/// The history shows no grant on a drained EM, although requests, drains and resumptions share transactions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_shows_no_grant_after_drain() {
    let (database, first, second) = two().await;
    let em1 = em("host1");
    first.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();
    let mut callers = JoinSet::new();
    for n in 0..8 {
        let (client, em1) = ([&first, &second][n % 2].client.clone(), em1.clone());
        callers.spawn(async move {
            let (mut granted, mut refused) = (0, 0);
            for _ in 0..60 {
                match client.request_resource(&request(&em1, &format!("user{n}"), load(1, 1, 1))).await {
                    Ok(answer) => {
                        let grant = Ok(answer).granted();
                        client.resource_released(&release(&grant, &format!("user{n}"))).await.unwrap();
                        granted += 1;
                    }
                    Err(error) => {
                        is_draining(&error, "now and then");
                        refused += 1;
                    }
                }
            }
            (granted, refused)
        });
    }
    while callers.len() > 1 {
        first.client.drain(&em1, "now and then").await.unwrap();
        second.client.resume(&em1, "").await.unwrap();
        while callers.try_join_next().is_some() {}
        if callers.is_empty() {
            break;
        }
    }
    while callers.join_next().await.is_some() {}
    let lines: Vec<String> = database
        .column(
            "SELECT action FROM linkis_resource_action_record WHERE em_instance = 'host1:9102'
            AND action IN ('granted', 'drained', 'resumed') ORDER BY id",
        )
        .await;
    let (mut is_drained, mut drains, mut grants) = (false, 0, 0);
    for line in &lines {
        match line.as_str() {
            "drained" => (is_drained, drains) = (true, drains + 1),
            "resumed" => is_drained = false,
            _ => {
                assert!(!is_drained, "granted on an EM that was drained: {lines:?}");
                grants += 1;
            }
        }
    }
    assert!(drains > 3 && grants > 50, "{drains} drains, {grants} grants");
    assert_invariants(&database, &first.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn force_release_ends_ticket_and_grants_next() {
    let (database, rm, second) = two().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), cpu(10))).await.unwrap();
    let grant = async |user: &str| rm.client.request_resource(&request(&em1, user, cpu(5))).await.granted();
    let (locked, used): (Grant, Grant) = (grant("hadoop").await, grant("alice").await);
    rm.client.resource_inited(&inited(&used, "alice", None)).await.unwrap();
    let waits = request_in_task(&second.client, patient(&em1, "waits", cpu(10)));
    database.waiting(1).await;

    assert_eq!(rm.client.force_release(used.ticket_id, "it hangs").await.unwrap(), "forced");
    assert_eq!(
        second.client.force_release(used.ticket_id, "it hangs").await.unwrap(),
        "forced",
        "a repetition returns the same"
    );
    assert_eq!(second.client.force_release(locked.ticket_id, "unused").await.unwrap(), "forced");
    let next = answered(waits).await.granted();

    // The owner gets an error for a confirmation, and can still release the ticket.
    let error = rm.client.resource_inited(&inited(&locked, "hadoop", None)).await.unwrap_err();
    let got = (error.reason(), error.fact("ended"));
    assert_eq!(got, (Some("TICKET_NOT_FOUND".into()), Some("forced".into())), "{error}");
    rm.client.resource_released(&release(&used, "alice")).await.unwrap();
    rm.client.ticket_released(next.ticket_id).await.unwrap();
    assert_eq!(rm.client.force_release(next.ticket_id, "too late").await.unwrap(), "released");
    let unknown = rm.client.force_release(Uuid::now_v7(), "unknown").await.unwrap_err();
    assert_eq!((unknown.code(), unknown.reason().as_deref()), (Some(Code::NotFound), Some("TICKET_NOT_FOUND")));
    let unsaid = rm.client.force_release(next.ticket_id, "").await.unwrap_err();
    assert_eq!(unsaid.field().as_deref(), Some("reason"));

    let got = history(&database, "action IN ('forced', 'released')").await;
    assert_eq!(got, ["forced anonymous it hangs", "forced anonymous unused", "released anonymous"]);
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let of = proto::ListActionsRequest { ticket_id: used.ticket_id.to_string(), ..Default::default() };
    let last = usage.list_actions(of).await.unwrap().into_inner().actions.pop().unwrap();
    assert_eq!((last.action.as_str(), last.reason.as_str(), last.actor.as_str()), ("forced", "it hangs", "anonymous"));
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}
