//! Order of the history: lines of one commit are in the order of the decisions.

use std::collections::BTreeMap;

use rm_proto::v1 as proto;

use crate::harness::*;

/// Returns the cores of a ticket after an action.
fn cores(action: &proto::Action) -> i64 {
    match action.resource.as_ref().unwrap().kind.as_ref().unwrap() {
        proto::resource::Kind::LoadInstance(amounts) => amounts.cores,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_of_one_commit_replays_within_capacity() {
    const CAPACITY: i64 = 32;
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(CAPACITY, CAPACITY, CAPACITY)).await;
    let large = rm.client.request_resource(&request(&em1, "hadoop", load(16, 16, 1))).await.granted();
    let grows = rm.client.request_resource(&request(&em1, "alice", load(8, 8, 1))).await.granted();
    rm.client.resource_inited(&inited(&grows, "alice", None)).await.unwrap();
    // Both grants fill the EM; the higher reported use fits only into the released capacity.
    let client = || rm.client.clone();
    let (first, last) = (request(&em1, "bob", load(8, 8, 1)), request(&em1, "carol", load(4, 4, 1)));
    let (gone, more) = (release(&large, "hadoop"), grows.reported(name("alice"), load(20, 20, 1)));
    let (granting, releasing, reporting, again) = (client(), client(), client(), client());
    let calls: Vec<PendingCall> = vec![
        Box::pin(async move { granting.request_resource(&first).await.map(drop) }),
        Box::pin(async move { releasing.resource_released(&gone).await.map(drop) }),
        Box::pin(async move { reporting.resource_reported(&more).await.map(drop) }),
        Box::pin(async move { again.request_resource(&last).await.map(drop) }),
    ];
    for done in in_one_batch(&database, &rm, &em1, calls, || {}).await.join_all().await {
        done.unwrap();
    }

    let all = proto::ListActionsRequest { page_size: 1000, ..Default::default() };
    let actions = rm.client.actions(&all).await.unwrap().actions;
    let of_commit: Vec<_> = actions.iter().skip(actions.len() - 4).collect();
    assert!(
        of_commit.iter().all(|action| action.action_time == of_commit[0].action_time),
        "one commit: {of_commit:#?}"
    );
    let got: Vec<_> = of_commit.iter().map(|action| action.action.as_str()).collect();
    assert_eq!(got, ["granted", "released", "reported", "granted"], "the order decided");
    let mut held = BTreeMap::new();
    for action in actions.iter().filter(|action| !action.ticket_id.is_empty()) {
        match action.action.as_str() {
            "released" => drop(held.remove(&action.ticket_id)),
            _ => drop(held.insert(&action.ticket_id, cores(action))),
        }
        let sum = held.values().sum::<i64>();
        assert!(sum <= CAPACITY, "{sum} of {CAPACITY} cores after line {action:?}");
    }
    assert_eq!(held.values().sum::<i64>(), CAPACITY);
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);

    // The lines of a ticket that changes several times in one commit have the amounts of each change.
    let other = em("host2");
    rm.client.register(registration(other.clone(), load(10, 10, 10))).await.unwrap();
    let used = rm.client.request_resource(&request(&other, "hadoop", load(1, 1, 1))).await.granted();
    let (confirmation, more) = (inited(&used, "hadoop", None), used.reported(name("hadoop"), load(2, 1, 1)));
    let (ask, gone) = (request(&other, "alice", load(1, 1, 1)), other.clone());
    let (confirming, granting, reporting, unregistering) = (client(), client(), client(), client());
    let calls: Vec<PendingCall> = vec![
        Box::pin(async move { confirming.resource_inited(&confirmation).await.map(drop) }),
        Box::pin(async move { granting.request_resource(&ask).await.map(drop) }),
        Box::pin(async move { reporting.resource_reported(&more).await.map(drop) }),
        Box::pin(async move { unregistering.unregister(&gone).await.map(drop) }),
    ];
    for done in in_one_batch(&database, &rm, &other, calls, || {}).await.join_all().await {
        done.unwrap();
    }
    let lines: Vec<String> = database
        .column(
            r#"SELECT concat_ws(' ', "user", action, (resource ->> 'memory')::bigint / 1073741824)
            FROM linkis_resource_action_record WHERE em_instance = 'host2:9102' ORDER BY id"#,
        )
        .await;
    let life = |user: &str| -> String {
        let of_user = lines.iter().filter_map(|line| line.strip_prefix(user));
        of_user.collect::<Vec<_>>().join(",")
    };
    assert_eq!(life("hadoop "), "granted 1,inited 1,reported 2,unregistered 2");
    assert_eq!(life("alice "), "granted 1,unregistered 1");
    let place = |line: &str| lines.iter().position(|of| of == line).unwrap_or_else(|| panic!("{line}: {lines:#?}"));
    assert!(place("alice granted 1") < place("unregistered 10"), "a grant is listed before its EM's end: {lines:#?}");
}
