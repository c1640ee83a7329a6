//! Priorities of waiting requests, and the rules that allow them.

use std::collections::BTreeMap;

use rm_model::{limit::LabelPattern, priority::PriorityRule};
use rm_proto::v1::limit_service_client::LimitServiceClient;
use tonic::Code;
use tonic_types::StatusExt as _;

use super::{positions::named, turns::served, *};

fn rule(labels: &[(&str, Option<&str>)], default: i16, max: i16) -> PriorityRule {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
    PriorityRule { pattern: LabelPattern::new(labels.collect()), default, max }
}

/// A request for the whole EM that waits.
fn with_priority(em: &EmInstance, user: &str, priority: i16) -> ResourceRequest {
    ResourceRequest { priority, ..patient(em, user, cpu(10)) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_served_by_entry_time_less_priority() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    second.client.set_priority(&rule(&[("user", None)], 0, 60), "").await.unwrap();
    let mut calls = Vec::new();
    for (user, priority) in [("ann", 0), ("bob", -60), ("carol", 30), ("dave", 60), ("eve", 0)] {
        calls.push((user.to_owned(), enqueue(&first.client, with_priority(&em1, user, priority)).await));
    }
    let waiting = second.client.waiting().await.unwrap();
    let shown: Vec<_> = waiting.iter().map(|waiting| (waiting.user.as_str(), waiting.priority)).collect();
    assert_eq!(shown, [("dave", 60), ("carol", 30), ("ann", 0), ("eve", 0), ("bob", -60)]);
    let order = served(&second.client, (grant, "first".to_owned()), calls).await;
    assert_eq!(order, ["dave", "carol", "ann", "eve", "bob"]);
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// Among the requests of one user, too: one with a lower priority falls behind, on another instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn priority_orders_requests_of_one_user() {
    let (_database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    first.client.set_priority(&rule(&[("user", None)], 0, 60), "").await.unwrap();
    let batch = enqueue(&first.client, with_priority(&em1, "ann", -60)).await;
    let urgent = enqueue(&second.client, with_priority(&em1, "ann", 60)).await;
    let bob = enqueue(&second.client, with_priority(&em1, "bob", 0)).await;
    let waiting = first.client.waiting().await.unwrap();
    assert_eq!(
        waiting.iter().map(|waiting| waiting.class).collect::<Vec<_>>(),
        [Class::First, Class::First, Class::Behind]
    );
    let calls = [("batch", batch), ("urgent", urgent), ("bob", bob)].map(|(name, call)| (name.to_owned(), call));
    let mut waiting = JoinSet::new();
    for (name, call) in calls {
        waiting.spawn(async move { (name, grant_of(call).await) });
    }
    let mut held = (grant, "first");
    for expected in ["urgent", "bob", "batch"] {
        first.client.resource_released(&release(&held.0, held.1)).await.unwrap();
        let (name, grant) = waiting.join_next().await.unwrap().unwrap();
        assert_eq!(name, expected);
        held = (grant, if expected == "bob" { "bob" } else { "ann" });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn most_specific_priority_rule_decides() {
    let (_database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let creator = |creator: &'static str| ("creator", Some(creator));
    for rule in [
        rule(&[("user", None)], -1, 0),
        rule(&[creator("IDE")], 30, 60),
        rule(&[creator("IDE"), ("user", Some("ann"))], 5, 40),
        rule(&[creator("IDE"), ("user", None)], 50, 50),
    ] {
        rm.client.set_priority(&rule, "").await.unwrap();
    }
    let mut calls = Vec::new();
    for (user, creator) in [("ann", "IDE"), ("bob", "IDE"), ("ann", "schedulis")] {
        let request = ResourceRequest { creator: name(creator), ..with_priority(&em1, user, 0) };
        calls.push(enqueue(&rm.client, request).await);
    }
    let waiting = rm.client.waiting().await.unwrap();
    let shown: Vec<_> =
        waiting.iter().map(|waiting| (waiting.user.as_str(), waiting.creator.as_str(), waiting.priority)).collect();
    assert_eq!(shown, [("bob", "IDE", 50), ("ann", "IDE", 5), ("ann", "schedulis", -1)]);
    for (user, most) in [("ann", 40), ("bob", 50)] {
        let request = |priority| ResourceRequest { creator: name("IDE"), ..with_priority(&em1, user, priority) };
        let error = rm.client.request_resource(&request(most + 1)).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("PRIORITY_ABOVE_MAX"));
        calls.push(enqueue(&rm.client, request(most)).await);
    }
}

/// Without a rule, a request may wait longer for others, and not less. Free capacity changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn priority_above_maximum_is_denied() {
    let (database, rm) = start().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), cpu(100))).await.unwrap();
    for (wait_timeout, is_dry_run) in [(LONG, false), (Duration::ZERO, false), (Duration::ZERO, true)] {
        let request = ResourceRequest { wait_timeout, ..with_priority(&em1, "ann", 1) };
        let error = match is_dry_run {
            true => rm.client.dry_run(&request).await.map(drop).unwrap_err(),
            false => rm.client.request_resource(&request).await.map(drop).unwrap_err(),
        };
        assert_eq!(error.code(), Some(Code::PermissionDenied));
        assert_eq!(error.reason().as_deref(), Some("PRIORITY_ABOVE_MAX"));
    }
    rm.client.set_priority(&rule(&[("user", Some("ann"))], -60, -30), "").await.unwrap();
    let error = rm.client.request_resource(&with_priority(&em1, "ann", -29)).await.unwrap_err();
    assert!(error.to_string().contains("user=ann"), "{error}");
    for (user, priority) in [("ann", -30), ("bob", -600)] {
        rm.client.request_resource(&with_priority(&em1, user, priority)).await.granted();
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

/// A waiting request keeps its priority, also when a later call takes its position over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_priority_rule_moves_no_waiting_request() {
    let (_database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let every = rule(&[("user", None)], 0, 60);
    first.client.set_priority(&every, "").await.unwrap();
    let ann = enqueue(&first.client, with_priority(&em1, "ann", 0)).await;
    let urgent = named("one", with_priority(&em1, "bob", 60));
    let lost = enqueue(&first.client, urgent.clone()).await;
    let expected = [("bob".to_owned(), 60), ("ann".to_owned(), 0)];
    for max in [0, 30] {
        second.client.set_priority(&PriorityRule { max, ..every.clone() }, "").await.unwrap();
        let waiting = second.client.waiting().await.unwrap();
        let shown: Vec<_> = waiting.iter().map(|waiting| (waiting.user.to_string(), waiting.priority)).collect();
        assert_eq!(shown, expected);
    }
    let bob = request_in_task(&second.client, urgent);
    let error = tokio::time::timeout(LONG, lost).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("POSITION_TAKEN_OVER"));
    let waiting = first.client.waiting().await.unwrap();
    assert_eq!(waiting.iter().map(|waiting| waiting.priority).collect::<Vec<_>>(), [60, 0]);
    let calls = vec![("ann".to_owned(), ann), ("bob".to_owned(), bob)];
    assert_eq!(served(&first.client, (grant, "first".to_owned()), calls).await, ["bob", "ann"]);
}

/// A waiting request that moves to another EM enters under its priority, although a newcomer would be denied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moved_request_keeps_priority() {
    let (_database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let em2 = em("host2");
    rm.client.register(registration(em2.clone(), cpu(10))).await.unwrap();
    rm.client.drain(&em2, "a look").await.unwrap();
    let every = rule(&[("user", None)], 0, 60);
    rm.client.set_priority(&every, "").await.unwrap();
    let call = enqueue(&rm.client, ResourceRequest { em: None, ..with_priority(&em1, "ann", 60) }).await;
    rm.client.delete_priority(&every.pattern, "").await.unwrap();
    rm.client.register(registration(em1, cpu(9))).await.unwrap();
    let has_moved = async || rm.client.waiting().await.unwrap().first().is_some_and(|waiting| waiting.em == em2);
    eventually("the request waits at the drained EM", LONG, has_moved).await;
    rm.client.resume(&em2, "done").await.unwrap();
    assert_eq!(grant_of(call).await.em, em2);
}

/// A request that does not wait is decided at the position that it would get.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_without_waiting_passes_by_its_priority() {
    let (_database, rm) = start().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), cpu(10))).await.unwrap();
    rm.client.set_priority(&rule(&[("user", None)], 0, 60), "").await.unwrap();
    rm.client.request_resource(&request(&em1, "first", cpu(5))).await.granted();
    let _waits = enqueue(&rm.client, with_priority(&em1, "ann", 0)).await;
    let small = |priority| ResourceRequest { priority, ..request(&em1, "bob", cpu(2)) };
    assert!(matches!(rm.client.request_resource(&small(0)).await.unwrap(), ResultResource::NotEnough(_)));
    assert!(matches!(rm.client.dry_run(&small(0)).await.unwrap(), ResultResource::NotEnough(_)));
    assert!(matches!(rm.client.dry_run(&small(60)).await.unwrap(), ResultResource::Available(_)));
    rm.client.request_resource(&small(60)).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_priority_rule_is_rejected() {
    let (database, rm) = start().await;
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let of = |key: &str| BTreeMap::from([(key.to_owned(), "x".to_owned())]);
    let priority = |labels, default_priority, max_priority| {
        Some(proto::Priority { labels, default_priority, max_priority, ..Default::default() })
    };
    for (priority, field) in [
        (None, "priority"),
        (priority(BTreeMap::new(), 0, 0), "priority.labels"),
        (priority(of("em"), 0, 0), "priority.labels"),
        (priority(of("queue"), 0, 0), "priority.labels"),
        (priority(of("user"), -601, 0), "priority.default_priority"),
        (priority(of("user"), 0, 601), "priority.max_priority"),
        (priority(of("user"), 0, i32::MIN), "priority.max_priority"),
        (priority(of("user"), 11, 10), "priority.default_priority"),
    ] {
        let call = proto::SetPriorityRequest { priority, reason: String::new() };
        let status = limits.set_priority(call).await.unwrap_err();
        let named = &status.get_details_bad_request().unwrap().field_violations[0].field;
        assert_eq!((status.code(), named.as_str()), (Code::InvalidArgument, field));
    }
    let priority = Some(proto::Priority { labels: of("user"), ..Default::default() });
    let call = proto::DeletePriorityRequest { priority, reason: String::new() };
    assert_eq!(limits.delete_priority(call).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(database.recorded("priority_set").await, 0);

    for number in 0..100 {
        rm.client.set_priority(&rule(&[("user", Some(&format!("u{number}")))], 0, 1), "").await.unwrap();
    }
    rm.client.set_priority(&rule(&[("user", Some("u7"))], 0, 2), "").await.unwrap();
    let error = rm.client.set_priority(&rule(&[("user", Some("u100"))], 0, 1), "").await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("TOO_MANY_PRIORITIES"));
}

/// Each change of a rule has one history line with the states before and after; an equal rule has none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_shows_priority_rules() {
    let (_database, first, second) = two().await;
    let labels = [("creator", Some("IDE")), ("user", None)];
    for max in [60, 60, 90] {
        first.client.set_priority(&rule(&labels, 30, max), "as agreed").await.unwrap();
    }
    assert_eq!(second.client.priorities().await.unwrap(), [rule(&labels, 30, 90)]);
    second.client.delete_priority(&rule(&labels, 0, 0).pattern, "no longer").await.unwrap();
    let lines = first.client.actions(&proto::ListActionsRequest::default()).await.unwrap().actions;
    let shown: Vec<_> =
        lines.iter().map(|line| [&line.action, &line.object, &line.reason, &line.before, &line.after]).collect();
    let rule = "creator=IDE,each user";
    let [low, high] = [r#"{"default":30,"max":60}"#, r#"{"default":30,"max":90}"#];
    assert_eq!(
        shown,
        [
            ["priority_set", rule, "as agreed", "", low],
            ["priority_set", rule, "as agreed", low, high],
            ["priority_deleted", rule, "no longer", high, ""],
        ]
    );
}
