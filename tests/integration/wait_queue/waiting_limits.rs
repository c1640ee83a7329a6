//! Limits of the number of waiting requests.

use rm_client::ClientError;
use rm_model::{cap::Cap, limit_mode::LimitMode};
use tonic::Code;

use super::{positions::named, *};

fn waiting_limit(label: &str, max: i64) -> Rule {
    limit(&[(label, None)], &[(Dimension::Waiting, max)])
}

fn assert_too_many(error: &ClientError, scope: &str, max: i64) {
    let got = (error.code(), error.reason(), error.retry_after());
    assert_eq!(got, (Some(Code::ResourceExhausted), Some("TOO_MANY_WAITING".into()), None), "{error}");
    let facts = ["scope", "waiting", "max"].map(|fact| error.fact(fact).unwrap());
    assert_eq!(facts, [scope.to_owned(), max.to_string(), max.to_string()], "{error}");
}

/// A limit rejects a request that would wait beyond it, on any instance. It rejects none of another scope, none that fits, and none
/// that takes its position over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_limit_rejects_only_requests_that_would_wait() {
    let (database, first, second) = two().await;
    first.client.set_limit(&waiting_limit("user", 2)).await.unwrap();
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let (em2, _) = (em("host2"), first.client.register(registration(em("host2"), cpu(10))).await.unwrap());
    let repeated = named("r1", patient(&em1, "hadoop", cpu(10)));
    let earlier = enqueue(&first.client, repeated.clone()).await;
    let cancelled = enqueue(&second.client, patient(&em1, "hadoop", cpu(10))).await;
    for rm in [&first, &second] {
        let error = rm.client.request_resource(&patient(&em1, "hadoop", cpu(10))).await.unwrap_err();
        assert_too_many(&error, "user=hadoop", 2);
        rm.client.request_resource(&request(&em1, "hadoop", cpu(10))).await.refused();
    }
    let _other = enqueue(&second.client, patient(&em1, "other", cpu(10))).await;
    second.client.request_resource(&patient(&em2, "hadoop", cpu(10))).await.granted();
    let later = request_in_task(&second.client, repeated);
    let error = tokio::time::timeout(LONG, earlier).await.expect("a reply").unwrap().unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("POSITION_TAKEN_OVER"));
    cancelled.abort();
    let rows = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("the cancelled request has left", LONG, async || database.count(rows).await == 2).await;
    let _next = enqueue(&first.client, patient(&em1, "hadoop", cpu(10))).await;
    let error = second.client.request_resource(&patient(&em1, "hadoop", cpu(10))).await.unwrap_err();
    assert_too_many(&error, "user=hadoop", 2);
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(later).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 2);
}

/// Requests that are sent at once to two instances, in a scope without tickets, never wait in larger number than the limit allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_limit_holds_for_requests_sent_at_once() {
    let (database, first, second) = two().await;
    first.client.set_limit(&waiting_limit("creator", 5)).await.unwrap();
    let ems: Vec<EmInstance> = (0..8).map(|number| em(&format!("host{number}"))).collect();
    for em1 in &ems {
        first.client.register(registration(em1.clone(), cpu(1))).await.unwrap();
    }
    let mut calls = JoinSet::new();
    for number in 0..80 {
        let wanted = patient(&ems[number % 8], &format!("user{number}"), cpu(1));
        let wanted = ResourceRequest { creator: name("burst"), ..wanted };
        calls.spawn(request_in_task(if number % 3 == 0 { &first.client } else { &second.client }, wanted));
    }
    let mut granted = 0;
    for _ in 0..75 {
        let reply = tokio::time::timeout(LONG, calls.join_next()).await.expect("a reply").unwrap().unwrap().unwrap();
        match reply {
            Ok(_) => granted += 1,
            Err(error) => assert_too_many(&error, "creator=burst", 5),
        }
    }
    assert_eq!((granted, database.count("SELECT count(*) FROM linkis_resource_waiting").await), (8, 5));
}

/// The position of an absent caller counts, until it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_limit_counts_absent_callers() {
    let (database, rm) = start().await;
    rm.client.set_limit(&waiting_limit("user", 1)).await.unwrap();
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let instance = Process::start(&["--database-url", &database.url()]);
    let _lost = enqueue(&instance.client, named("r1", patient(&em1, "hadoop", cpu(10)))).await;
    instance.kill();
    let absent = "SELECT count(*) FROM linkis_resource_waiting WHERE kept_until IS NOT NULL";
    eventually("the caller is absent", LONG, async || database.count(absent).await == 1).await;
    let error = rm.client.request_resource(&patient(&em1, "hadoop", cpu(10))).await.unwrap_err();
    assert_too_many(&error, "user=hadoop", 1);
    database.execute("UPDATE linkis_resource_waiting SET kept_until = clock_timestamp()").await;
    let rows = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("the position is swept", LONG, async || database.count(rows).await == 0).await;
    let _next = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
}

/// An advisory limit rejects nothing. With a maximum of 0, no request waits. A changed limit counts those that wait already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_limit_follows_its_mode_and_changes() {
    let (_database, rm) = start().await;
    let advisory = Rule { mode: LimitMode::Advisory, ..waiting_limit("user", 0) };
    rm.client.set_limit(&advisory).await.unwrap();
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let _uncounted = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    rm.client.set_limit(&waiting_limit("user", 2)).await.unwrap();
    let _first = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    let _second = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    let reject = async |max| {
        let error = rm.client.request_resource(&patient(&em1, "hadoop", cpu(10))).await.unwrap_err();
        assert_eq!((error.reason(), error.fact("max")), (Some("TOO_MANY_WAITING".into()), Some(max)), "{error}");
    };
    reject("2".into()).await;
    rm.client.set_limit(&waiting_limit("user", 0)).await.unwrap();
    reject("0".into()).await;
    rm.client.set_limit(&waiting_limit("user", 3)).await.unwrap();
    let _third = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    reject("3".into()).await;
}

/// A limit of waiting requests names no EM, and caps have none.
#[tokio::test]
async fn waiting_limit_with_em_is_rejected() {
    let (_database, rm) = start().await;
    for label in ["em", "em_application"] {
        let error = rm.client.set_limit(&waiting_limit(label, 1)).await.unwrap_err();
        assert_eq!(error.code(), Some(Code::InvalidArgument), "{error}");
        assert!(error.to_string().contains(label), "{error}");
    }
    let em1 = em("host1");
    let max = [(Dimension::Waiting, 1)].into();
    let cap = Cap { keys: ["user".to_owned()].into(), max };
    let wanted = ResourceRequest { caps: vec![cap], ..request(&em1, "hadoop", cpu(1)) };
    let error = rm.client.request_resource(&wanted).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::InvalidArgument), "{error}");
}
