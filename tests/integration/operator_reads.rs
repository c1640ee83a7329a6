//! What operators ask: however much and however often, nobody else waits for it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::ResourceRequest,
    domain::report::{EmReport, Health},
    transport::proto::{self, usage_service_client::UsageServiceClient},
};
use tokio::task::JoinSet;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::harness::*;

/// How many operators list at once.
const OPERATORS: usize = 200;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_lists_delay_no_single_reads() {
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

/// However long operators' connections are taken, who waits in line keeps his place, and an EM is heard that reports.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_reads_leave_wait_queue_positions_unchanged() {
    const WAITERS: usize = 30;
    /// Longer than it takes until an instance that says nothing is taken for dead, and what waits there is removed.
    const BUSY: Duration = Duration::from_secs(14);
    let (database, rm) = start().await;
    // Which would remove it.
    let _second = Instance::start(&database).await;
    let host = em("host1");
    let epoch = rm.client.register(registration(host.clone(), load(1, 1, 1))).await.unwrap().epoch;
    let first = rm.client.request_resource(&request(&host, "first", load(1, 1, 1))).await.granted();
    let mut waiters = JoinSet::new();
    for n in 0..WAITERS {
        let wait_timeout = Duration::from_secs(120);
        let ask = ResourceRequest { wait_timeout, ..request(&host, &format!("user{n}"), load(1, 1, 1)) };
        let client = rm.client.clone();
        waiters.spawn(async move {
            let grant = client.request_resource(&ask).await.granted();
            client.ticket_released(grant.ticket_id).await.unwrap();
        });
    }
    let places = "SELECT position FROM linkis_resource_waiting ORDER BY position";
    let places = async || -> Vec<Vec<u8>> { sqlx::query_scalar(places).fetch_all(&database.pool).await.unwrap() };
    eventually("all wait", Duration::from_secs(60), async || places().await.len() == WAITERS).await;
    let before = places().await;
    // What operators read, and nobody who waits needs.
    let mut holder = database.connect().await;
    let lock = "BEGIN; LOCK TABLE linkis_resource_usage_hour IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(lock).execute(&mut holder).await.unwrap();
    let usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut operators = JoinSet::new();
    let (busy, asked) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    for _ in 0..OPERATORS {
        let (mut usage, asked) = (usage.clone(), asked.clone());
        operators.spawn(async move {
            let by = proto::UsageBy::User.into();
            while busy.elapsed() < BUSY {
                usage.get_usage(proto::GetUsageRequest { by, ..Default::default() }).await.unwrap_err();
                asked.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
    }
    let late = "SELECT count(*) FROM linkis_rm_instance WHERE alive_until < clock_timestamp()
        AND instance_id IN (SELECT instance_id FROM linkis_resource_waiting)";
    for sequence in 1.. {
        if operators.try_join_next().is_some() {
            break;
        }
        let (health, tickets) = (Health::Healthy, Default::default());
        let report = EmReport { em: host.clone(), epoch, sequence, health, load: None, tickets, observed: None };
        let begun = Instant::now();
        rm.client.heartbeat(&report).await.unwrap();
        assert_eq!(database.count(late).await, 0, "it says in time that it lives");
        assert!(begun.elapsed() < Duration::from_secs(3), "report {sequence} took {:?}", begun.elapsed());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    operators.join_all().await;
    println!("{} questions of operators failed meanwhile", asked.load(Ordering::Relaxed));
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    assert_eq!(places().await, before);
    rm.client.resource_released(&release(&first, "first")).await.unwrap();
    waiters.join_all().await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}
