//! Order of waiting requests as an administrator sets it: by what they take turns, and how long positions are kept.

use std::collections::BTreeMap;

use rm_model::{
    name::Labels,
    order::{FairBy, QueueOrder},
};
use rm_proto::v1::limit_service_client::LimitServiceClient;
use tonic::Code;
use tonic_types::StatusExt as _;

use super::{
    positions::{Forwarder, named, users},
    turns::{served, turn_is_lost_to_absent_caller},
    *,
};

/// Turns by these labels.
fn turns_by(labels: &[&str]) -> QueueOrder {
    QueueOrder { fair_by: FairBy::new(labels.iter().map(|label| (*label).to_owned())), ..QueueOrder::default() }
}

/// A request of a user for the whole EM, with the label `team`.
fn of_team(em: &EmInstance, team: &str, user: &str) -> ResourceRequest {
    let labels = Labels::parse("labels", BTreeMap::from([("team".to_owned(), team.to_owned())])).unwrap();
    ResourceRequest { labels, ..patient(em, user, cpu(10)) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_without_labels_is_order_of_entry() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    second.client.set_order(&turns_by(&[]), "a trial").await.unwrap();
    let mut calls = Vec::new();
    for user in ["pig", "pig", "pig", "mouse"] {
        calls.push((user.to_owned(), enqueue(&first.client, patient(&em1, user, cpu(10))).await));
    }
    let order = served(&second.client, (grant, "first".to_owned()), calls).await;
    assert_eq!(order, ["pig", "pig", "pig", "mouse"]);
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_by_label_alternate_between_its_values() {
    let (_database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    first.client.set_order(&turns_by(&["team"]), "").await.unwrap();
    let mut calls = Vec::new();
    for (team, user) in [("x", "ann"), ("x", "bob"), ("y", "carol"), ("x", "dave"), ("y", "ann")] {
        calls.push((user.to_owned(), enqueue(&second.client, of_team(&em1, team, user)).await));
    }
    let order = served(&first.client, (grant, "first".to_owned()), calls).await;
    assert_eq!(order, ["ann", "carol", "bob", "ann", "dave"]);
}

/// Requests that wait keep their positions and turns; a request that enters later has the new turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_order_moves_no_waiting_request() {
    let (_database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let mut calls = Vec::new();
    for user in ["pig", "pig", "pig", "mouse"] {
        calls.push((user.to_owned(), enqueue(&first.client, patient(&em1, user, cpu(10))).await));
    }
    second.client.set_order(&turns_by(&[]), "").await.unwrap();
    assert_eq!(users(&first.client).await, ["pig", "mouse", "pig", "pig"]);
    for user in ["pig", "dog"] {
        calls.push((user.to_owned(), enqueue(&second.client, patient(&em1, user, cpu(10))).await));
    }
    assert_eq!(users(&first.client).await, ["pig", "mouse", "pig", "dog", "pig", "pig"]);
    let order = served(&second.client, (grant, "first".to_owned()), calls).await;
    assert_eq!(order, ["pig", "mouse", "pig", "dog", "pig", "pig"]);
}

/// An entry that is short only at the limit of one turn keeps nothing at the EM from other turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_of_one_turn_blocks_no_other_turn() {
    let (_database, rm) = start().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), cpu(10))).await.unwrap();
    rm.client.set_order(&turns_by(&["team"]), "").await.unwrap();
    rm.client.set_limit(&limit(&[("team", Some("x"))], &[(Dimension::Cores, 4)])).await.unwrap();
    let own = ResourceRequest { wait_timeout: Duration::ZERO, ..of_team(&em1, "x", "ann") };
    rm.client.request_resource(&ResourceRequest { resource: cpu(4), ..own }).await.granted();
    let _waits = enqueue(&rm.client, ResourceRequest { resource: cpu(4), ..of_team(&em1, "x", "bob") }).await;
    rm.client.request_resource(&request(&em1, "carol", cpu(6))).await.granted();
}

/// A request that waits for the limit of its user keeps its place when turns are taken by something else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_at_limit_of_user_is_served_after_change_of_order() {
    let (_database, first, second) = two().await;
    register_all(&first.client, ["host1", "host2"], cpu(10)).await;
    first.client.set_limit(&limit(&[("user", Some("ann"))], &[(Dimension::Cores, 4)])).await.unwrap();
    let wanted = |on: Option<EmInstance>| ResourceRequest { em: on, ..patient(&em("host1"), "ann", cpu(4)) };
    for (before, after, named) in
        [(&["user"][..], &[][..], true), (&["user"], &["team"], false), (&[], &["user"], true)]
    {
        first.client.set_order(&turns_by(before), "").await.unwrap();
        let held = first.client.request_resource(&wanted(None)).await.granted();
        let [em1, em2] = ["host1", "host2"].map(|name| named.then(|| em(name)));
        let earlier = enqueue(&first.client, wanted(em1)).await;
        second.client.set_order(&turns_by(after), "").await.unwrap();
        let later = enqueue(&second.client, wanted(em2)).await;
        first.client.resource_released(&release(&held, "ann")).await.unwrap();
        let grant = grant_of(earlier).await;
        second.client.resource_released(&release(&grant, "ann")).await.unwrap();
        let grant = grant_of(later).await;
        first.client.resource_released(&release(&grant, "ann")).await.unwrap();
    }
    assert_wait_queues_empty(&first.client).await;
}

/// While a caller is absent, its turn is used by a request that has the turn from before the change of the order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turn_of_absent_caller_is_used_after_change_of_order() {
    turn_is_lost_to_absent_caller(async |client| client.set_order(&turns_by(&["creator"]), "").await.unwrap()).await;
}

/// Names and values of labels are as long as they may be: the turn is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_by_long_labels_alternate() {
    let (_database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let keys: Vec<String> = (0..2).map(|number| format!("{number}{}", "k".repeat(254))).collect();
    rm.client.set_order(&turns_by(&keys.iter().map(String::as_str).collect::<Vec<_>>()), "").await.unwrap();
    let mut calls = Vec::new();
    for (user, last) in [("ann", "x"), ("bob", "x"), ("carol", "y")] {
        let labels = keys.iter().map(|key| (key.clone(), format!("{}{last}", ",".repeat(254)))).collect();
        let labels = Labels::parse("labels", labels).unwrap();
        let wanted = ResourceRequest { labels, ..patient(&em1, user, cpu(10)) };
        calls.push((user.to_owned(), enqueue(&rm.client, wanted).await));
    }
    let order = served(&rm.client, (grant, "first".to_owned()), calls).await;
    assert_eq!(order, ["ann", "carol", "bob"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_are_kept_for_the_time_of_the_order() {
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let kept_rows =
        "SELECT count(*) FROM linkis_resource_waiting WHERE kept_until > clock_timestamp() + interval '4 min'";
    for (kept, row_is_kept) in [(Duration::from_secs(300), true), (Duration::ZERO, false)] {
        let order = QueueOrder { position_kept: kept, ..QueueOrder::default() };
        rm.client.set_order(&order, "").await.unwrap();
        let (through, connection) = Forwarder::start(&rm.address).await;
        let user = format!("user{}", kept.as_secs());
        let lost = ResourceRequest { wait_timeout: Duration::from_secs(540), ..patient(&em1, &user, cpu(10)) };
        let _lost = enqueue(&through, named(&user, lost)).await;
        connection.abort();
        let left =
            format!("SELECT count(*) FROM linkis_resource_waiting WHERE claim IS NOT NULL OR \"user\" = '{user}'");
        eventually("the caller is gone", LONG, async || {
            database.count(&left).await == i64::from(row_is_kept) && database.count(kept_rows).await == 1
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_with_invalid_fields_changes_nothing() {
    let (database, rm) = start().await;
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let order = |labels: &[&str], kept: Option<(i64, i32)>| {
        let fair_by = labels.iter().map(|label| (*label).to_owned()).collect();
        let position_kept = kept.map(|(seconds, nanos)| prost_types::Duration { seconds, nanos });
        Some(proto::Order { fair_by, position_kept })
    };
    let (many, long) = (["a", "b", "c", "d", "e", "f", "g", "h", "i"], "x".repeat(256));
    let (labels, kept) = ("order.fair_by", "order.position_kept");
    for (order, field) in [
        (None, "order"),
        (order(&many, None), labels),
        (order(&["user", "user"], None), labels),
        (order(&["em"], None), labels),
        (order(&["em_application"], None), labels),
        (order(&["queue"], None), labels),
        (order(&[&long[..255], &format!("b{}", &long[..254]), "ccc"], None), labels),
        (order(&[""], None), labels),
        (order(&[&long], None), labels),
        (order(&["a\u{0}"], None), labels),
        (order(&["user"], Some((-1, 0))), kept),
        (order(&["user"], Some((0, 999_999_999))), kept),
        (order(&["user"], Some((3600, 1))), kept),
        (order(&["user"], Some((i64::MAX, 0))), kept),
    ] {
        let call = proto::SetOrderRequest { order, reason: String::new() };
        let status = limits.set_order(call).await.unwrap_err();
        let named = &status.get_details_bad_request().unwrap().field_violations[0].field;
        assert_eq!((status.code(), named.as_str()), (Code::InvalidArgument, field));
    }
    assert_eq!(rm.client.order().await.unwrap(), QueueOrder::default());
    assert_eq!(database.recorded("order_set").await, 0);
}

/// A change of the order has one history line with the states before and after; an equal order has none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_shows_changed_order() {
    let (_database, first, second) = two().await;
    let order = QueueOrder { position_kept: Duration::from_millis(1500), ..turns_by(&["user", "creator"]) };
    for _ in 0..2 {
        first.client.set_order(&order, "as agreed").await.unwrap();
    }
    assert_eq!(second.client.order().await.unwrap(), order);
    let lines = first.client.actions(&proto::ListActionsRequest::default()).await.unwrap().actions;
    let [line] = &lines[..] else { panic!("{lines:?}") };
    let state = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    assert_eq!((line.action.as_str(), line.object.as_str(), line.reason.as_str()), ("order_set", "order", "as agreed"));
    assert_eq!(state(&line.before), serde_json::json!({"fair_by": ["user"], "position_kept_s": 60.0}));
    assert_eq!(state(&line.after), serde_json::json!({"fair_by": ["creator", "user"], "position_kept_s": 1.5}));
}
