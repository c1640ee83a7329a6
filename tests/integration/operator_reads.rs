//! Large and frequent reads by operators delay no other call.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rm_client::ResourceRequest;
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::harness::*;

/// Number of concurrent operators.
const OPERATORS: usize = 200;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_lists_delay_no_single_reads() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    let grant = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    // Each list waits for the lock timeout.
    let mut holder = database.transaction("LOCK TABLE linkis_resource_action_record IN ACCESS EXCLUSIVE MODE").await;
    let mut calls = JoinSet::new();
    for _ in 0..OPERATORS {
        let mut usage = usage.clone();
        calls.spawn(async move { usage.list_actions(proto::ListActionsRequest::default()).await.unwrap_err() });
    }
    eventually("the lists wait", LONG, async || is_waiting(&database).await).await;
    for _ in 0..10 {
        rm.client.em(&em1).await.unwrap();
        rm.client.ticket(grant.ticket_id).await.unwrap();
    }
    assert!(!calls.is_empty(), "single reads return before the lists");
    let mut rejected = 0;
    for status in tokio::time::timeout(LONG, calls.join_all()).await.expect("the lists end") {
        let reason = status.get_details_error_info().unwrap().reason;
        match status.code() {
            Code::Aborted => assert_eq!(reason, "LOCK_TIMEOUT"),
            Code::ResourceExhausted => {
                assert_eq!(reason, "OVERLOADED");
                assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
                rejected += 1;
            }
            _ => panic!("{status:?}"),
        }
    }
    assert!(rejected >= OPERATORS / 2, "{rejected} were rejected");
    execute(&mut holder, "ROLLBACK").await;
    let mut usage = usage;
    let history = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner();
    assert_eq!(history.actions.len(), 2);
}

/// While operators use all of their connections, waiting requests keep their positions, and reports are answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_reads_leave_wait_queue_positions_unchanged() {
    const WAITERS: usize = 30;
    /// More renewals than the lifetime of an instance includes.
    const RENEWALS: usize = 4;
    // The second instance sweeps the entries of dead instances.
    let (database, rm, _second) = two().await;
    let em1 = em("host1");
    let registered = rm.client.register(registration(em1.clone(), load(1, 1, 1))).await.unwrap();
    let first = rm.client.request_resource(&request(&em1, "first", load(1, 1, 1))).await.granted();
    let mut waiters = JoinSet::new();
    for n in 0..WAITERS {
        let ask = ResourceRequest { wait_timeout: 2 * LONG, ..request(&em1, &format!("user{n}"), load(1, 1, 1)) };
        let client = rm.client.clone();
        waiters.spawn(async move {
            let grant = client.request_resource(&ask).await.granted();
            client.ticket_released(grant.ticket_id).await.unwrap();
        });
    }
    let positions = "SELECT position FROM linkis_resource_waiting ORDER BY position";
    let positions = async || -> Vec<Vec<u8>> { database.column(positions).await };
    database.waiting(WAITERS as i64).await;
    let before = positions().await;
    // A table that only operators read.
    let mut holder = database.transaction("LOCK TABLE linkis_resource_usage_hour IN ACCESS EXCLUSIVE MODE").await;
    let usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut operators = JoinSet::new();
    let stop = Arc::new(AtomicBool::new(false));
    for _ in 0..OPERATORS {
        let (mut usage, stop) = (usage.clone(), stop.clone());
        operators.spawn(async move {
            let by = proto::UsageBy::User.into();
            while !stop.load(Ordering::Relaxed) {
                usage.get_usage(proto::GetUsageRequest { by, ..Default::default() }).await.unwrap_err();
            }
        });
    }
    let late = "SELECT count(*) FROM linkis_rm_instance WHERE alive_until < clock_timestamp()
        AND instance_id IN (SELECT instance_id FROM linkis_resource_waiting)";
    let renewed = "SELECT DISTINCT alive_until::text FROM linkis_rm_instance
        WHERE instance_id IN (SELECT instance_id FROM linkis_resource_waiting)";
    let mut renewals = BTreeSet::new();
    for sequence in 1.. {
        rm.client.heartbeat(&report(&registered, sequence)).await.unwrap();
        assert_eq!(database.count(late).await, 0, "the instance renews its lifetime in time");
        renewals.extend(database.column::<String>(renewed).await);
        if renewals.len() > RENEWALS {
            break;
        }
    }
    stop.store(true, Ordering::Relaxed);
    operators.join_all().await;
    execute(&mut holder, "ROLLBACK").await;
    assert_eq!(positions().await, before);
    rm.client.resource_released(&release(&first, "first")).await.unwrap();
    waiters.join_all().await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}
