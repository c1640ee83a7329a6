//! What operators ask: however much and however often, nobody else waits for it.

use std::time::{Duration, Instant};

use linkis_rm::transport::proto::{self, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::harness::*;

/// How many operators list at once.
const OPERATORS: usize = 200;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_who_list_at_once_wait_for_each_other_and_nobody_waits_for_them() {
    let (database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let grant = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    let usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    // Each that lists waits as long as a connection waits for a lock.
    let mut holder = database.connect().await;
    let lock = "BEGIN; LOCK TABLE linkis_resource_action_record IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(lock).execute(&mut holder).await.unwrap();
    let start = Instant::now();
    let mut calls = JoinSet::new();
    for _ in 0..OPERATORS {
        let mut usage = usage.clone();
        calls.spawn(async move { usage.list_actions(proto::ListActionsRequest::default()).await.unwrap_err() });
    }
    eventually("they wait", Duration::from_secs(10), async || is_waiting(&database).await).await;
    for _ in 0..10 {
        let asked = Instant::now();
        rm.client.em(&host).await.unwrap();
        rm.client.ticket(grant.ticket_id).await.unwrap();
        assert!(asked.elapsed() < Duration::from_millis(500), "asked for one of each: {:?}", asked.elapsed());
    }
    assert!(!calls.is_empty(), "they still wait");
    let mut turned_away = 0;
    while let Some(status) = calls.join_next().await {
        let status = status.unwrap();
        let reason = status.get_details_error_info().unwrap().reason;
        match status.code() {
            Code::Aborted => assert_eq!(reason, "LOCK_TIMEOUT"),
            Code::ResourceExhausted => {
                assert_eq!(reason, "OVERLOADED");
                assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
                turned_away += 1;
            }
            _ => panic!("{status:?}"),
        }
    }
    println!("{turned_away} of {OPERATORS} were turned away, all answered after {:?}", start.elapsed());
    assert!(turned_away >= OPERATORS / 2 && start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    let mut usage = usage;
    let history = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner();
    assert_eq!(history.actions.len(), 2);
}
