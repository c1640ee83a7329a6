//! The order of the history: also within one commit, that in which the service decided.

use std::{collections::BTreeMap, future::Future, pin::Pin, time::Duration};

use linkis_rm::{client::ClientError, transport::proto};
use tokio::task::JoinSet;

use crate::harness::*;

/// How long to wait for what has to come.
const LONGEST: Duration = Duration::from_secs(30);

type Call = Pin<Box<dyn Future<Output = Result<(), ClientError>> + Send>>;

/// Makes `calls` about an EM one after another while another transaction has locked the EM, so that they share one commit in this order.
async fn in_one_commit(database: &Database, rm: &Instance, host: &str, calls: Vec<Call>) {
    let mut holder = database.transaction_that_holds(&em(host)).await;
    let mut made = JoinSet::new();
    for call in calls {
        made.spawn(call);
        let all = format!("linkis_rm_set_aside_operations {}", made.len());
        let waits = async || rm.metrics.text().unwrap().lines().any(|line| line == all);
        eventually("the call waits for the EM", LONGEST, waits).await;
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    made.join_all().await.into_iter().for_each(|done| done.unwrap());
}

/// The cores that an action leaves its ticket.
fn cores(action: &proto::Action) -> i64 {
    match action.resource.as_ref().unwrap().kind.as_ref().unwrap() {
        proto::resource::Kind::LoadInstance(amounts) => amounts.cores,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_of_one_commit_replays_within_capacity() {
    const CAPACITY: i64 = 32;
    let (database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(CAPACITY, CAPACITY, CAPACITY))).await.unwrap();
    let large = rm.client.request_resource(&request(&host, "hadoop", load(16, 16, 1))).await.granted();
    let grows = rm.client.request_resource(&request(&host, "alice", load(8, 8, 1))).await.granted();
    rm.client.resource_inited(&inited(&grows, "alice", None)).await.unwrap();
    // With both grants the EM is full; the report of the engine that grows fits only into what the release leaves.
    let client = || rm.client.clone();
    let (first, last) = (request(&host, "bob", load(8, 8, 1)), request(&host, "carol", load(4, 4, 1)));
    let (gone, more) = (release(&large, "hadoop"), grows.reported(name("alice"), load(20, 20, 1)));
    let (granting, releasing, reporting, again) = (client(), client(), client(), client());
    let calls: Vec<Call> = vec![
        Box::pin(async move { granting.request_resource(&first).await.map(drop) }),
        Box::pin(async move { releasing.resource_released(&gone).await.map(drop) }),
        Box::pin(async move { reporting.resource_reported(&more).await.map(drop) }),
        Box::pin(async move { again.request_resource(&last).await.map(drop) }),
    ];
    in_one_commit(&database, &rm, "host1", calls).await;

    let all = proto::ListActionsRequest { page_size: 1000, ..Default::default() };
    let actions = rm.client.actions(&all).await.unwrap().actions;
    let of_commit: Vec<_> = actions.iter().skip(actions.len() - 4).collect();
    assert!(
        of_commit.iter().all(|action| action.action_time == of_commit[0].action_time),
        "one commit: {of_commit:#?}"
    );
    let told: Vec<_> = of_commit.iter().map(|action| action.action.as_str()).collect();
    assert_eq!(told, ["granted", "released", "reported", "granted"], "the order decided");
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
    rm.stop().await;
}
