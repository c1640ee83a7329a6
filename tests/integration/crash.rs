//! Instances that freeze, and database connections that end or fall silent.

use std::time::Duration;

use rm_client::ResourceRequest;
use tokio::task::JoinSet;

use crate::{harness::*, proxy::FaultPlan};

/// Reads of EMs wait.
const LOCK_EMS: &str = "LOCK TABLE linkis_em_resource_meta_data IN ACCESS EXCLUSIVE MODE";

/// A database that ends its connections: calls fail fast, and succeed again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_connections_reopen_after_termination() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(1000, 1000, 1000)).await;
    for _ in 0..5 {
        rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
        database
            .execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
            )
            .await;
        eventually("it is served again", LONG, || async {
            match rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await {
                Ok(_) => true,
                Err(error) => {
                    assert_eq!(error.code(), Some(tonic::Code::Unavailable), "{error}");
                    false
                }
            }
        })
        .await;
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 10);
}

/// An instance that froze replies to waiting callers, beside cancelled calls on the same connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_instance_serves_remaining_callers() {
    let database = Database::fresh().await;
    let process = Process::start(&["--database-url", &database.url()]);
    let em1 = em("host1");
    process.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();
    process.freeze(true);
    let client = process.client.clone();
    let asked = request(&em1, "patient", load(1, 1, 1));
    let patient = tokio::spawn(async move { client.request_resource(&asked).await });
    let mut impatient = JoinSet::new();
    for n in 0..200 {
        let (client, lock_ttl) = (process.client.clone(), Some(Duration::from_secs(3)));
        let asked = ResourceRequest { lock_ttl, ..request(&em1, &format!("impatient{n}"), load(1, 1, 1)) };
        impatient.spawn(async move {
            let call = client.request_resource(&asked);
            tokio::time::timeout(Duration::from_millis(300), call).await.unwrap_err();
        });
    }
    impatient.join_all().await;
    process.freeze(false);
    patient.await.unwrap().granted();
    // This call comes after all calls of the connection.
    let last = process.client.request_resource(&request(&em1, "last", load(1, 1, 1))).await.granted();
    process.client.resource_released(&release(&last, "last")).await.unwrap();
    // Their grants are undone, or expire if the reply was sent before the cancellation arrived.
    eventually("cancelled requests have no tickets", Duration::from_secs(20), || async {
        process.client.tickets(None).await.unwrap().len() == 1
    })
    .await;
    // In one audit, because a cancelled call may still arrive.
    let report = process.client.audit().await.unwrap();
    assert!(report.differences.is_empty() && report.notes.is_empty(), "{report:?}");
}

/// Connections that fall silent during reads are replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_database_connections_are_replaced() {
    let (database, _direct) = start_with_em(em("host1"), load(1000, 1000, 1000)).await;
    let (proxy, proxied) = database.behind_proxy("silent");
    let rm = Instance::start(&proxied).await;
    let mut holder = database.transaction(LOCK_EMS).await;
    let mut reads = JoinSet::new();
    for _ in 0..20 {
        let client = rm.client.clone();
        reads.spawn(async move { client.ems().await.is_ok() });
    }
    eventually("it reads", LONG, async || locked_out(&database, "-- em_resource::list").await > 0).await;
    proxy.forget_all();
    execute(&mut holder, "ROLLBACK").await;
    // The callers leave.
    reads.shutdown().await;
    eventually("reads are answered", LONG, || async { rm.client.ems().await.is_ok() }).await;
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
}

/// A connection that fell silent while idle delays the next call, and fails none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_idle_connection_fails_no_call() {
    let (database, _direct) = start().await;
    let (proxy, proxied) = database.behind_proxy("silent-idle");
    let rm = Instance::start(&proxied).await;
    let read_ten_times = async || {
        let reads = (0..10).map(|_| rm.client.clone()).map(|client| async move { client.ems().await });
        reads.collect::<JoinSet<_>>().join_all().await
    };
    // Slow replies, so that each read opens a connection.
    proxy.set_fault_plan(FaultPlan::Slow(Duration::from_millis(50)));
    read_ten_times().await;
    proxy.set_fault_plan(FaultPlan::Fair);
    proxy.forget_all();
    for answer in read_ten_times().await {
        answer.unwrap();
    }

    // A connection that falls silent during a read: the read ends with an error, even without a deadline.
    let mut holder = database.transaction(LOCK_EMS).await;
    let client = rm.client.clone();
    let read = tokio::spawn(async move { client.ems().await });
    eventually("the database reads", LONG, async || is_waiting(&database).await).await;
    proxy.forget_all();
    execute(&mut holder, "ROLLBACK").await;
    let answer = tokio::time::timeout(LONG, read).await.expect("the read ends").unwrap();
    assert_eq!(answer.unwrap_err().reason().as_deref(), Some("DATABASE_UNAVAILABLE"));
}

/// The lease is renewed soon after its connection fell silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_after_silent_connection_is_renewed() {
    let (database, direct) = start().await;
    direct.stop().await;
    let (proxy, proxied) = database.behind_proxy("lease");
    let _rm = Instance::start(&proxied).await;
    let deadline = async || {
        let millis = "SELECT coalesce(max(extract(epoch FROM held_until) * 1000), 0)::bigint FROM linkis_rm_lease";
        database.count(millis).await
    };
    eventually("it is held", LONG, async || deadline().await > 0).await;
    proxy.forget_all();
    // A renewal that was on its way extends the deadline by one period at most.
    let before = deadline().await + 2000;
    // Earlier than the timeout of a statement.
    eventually("it is renewed", Duration::from_secs(14), async || deadline().await > before).await;
}

/// The lease survives the end of its connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_after_connection_end_is_kept() {
    let (database, rm) = start().await;
    let lease = "SELECT instance_id::text || held_until FROM linkis_rm_lease";
    let holder = async || database.column::<uuid::Uuid>("SELECT instance_id FROM linkis_rm_lease").await;
    eventually("it is held", LONG, async || !holder().await.is_empty()).await;
    let (before, held) = (holder().await, database.column::<String>(lease).await);
    let ended = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()";
    database.execute(ended).await;
    eventually("it is renewed", LONG, async || database.column::<String>(lease).await != held).await;
    assert_eq!(holder().await, before);
    rm.stop().await;
}
