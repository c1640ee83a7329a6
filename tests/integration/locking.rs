//! Locks of a user, which concern all EMs, and transactions that end after each batch. Locks alone: `crates/store/tests/store/locking.rs`.

use std::time::Duration;

use tokio::task::JoinHandle;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_lock_excludes_operations_on_other_em() {
    let (database, rm) = start().await;
    register_all(&rm.client, ["a", "b"], load(10, 10, 10)).await;
    rm.client.set_limit(&each_user(100)).await.unwrap();
    // Locks of a transaction for this user on EM "a".
    let mut holder = database.transaction_that_holds(&em("a")).await;
    execute(&mut holder, r#"INSERT INTO linkis_resource_lock (scope, "user") VALUES ('user', 'hadoop')"#).await;
    let client = rm.client.clone();
    let same_user =
        tokio::spawn(
            async move { client.request_resource(&request(&em("b"), "hadoop", load(1, 1, 1))).await.granted() },
        );
    eventually("a request of the user waits on another EM", LONG, || is_waiting(&database)).await;
    rm.client.request_resource(&request(&em("b"), "alice", load(1, 1, 1))).await.granted();
    assert!(!same_user.is_finished());
    execute(&mut holder, "ROLLBACK").await;
    same_user.await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

/// The end of a batch begins the next transaction. An idle instance has no open transaction, which the database would end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_instance_has_no_open_transaction() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    let idle = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
    rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    eventually("no connection idles in a transaction", LONG, async || database.count(idle).await == 0).await;
    rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
}

/// The database counts dead rows only between transactions, and vacuums by that count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn table_statistics_advance_under_load() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(1_000_000, 1_000_000, 1_000_000)).await;
    let client = rm.client.clone();
    let busy: JoinHandle<()> = tokio::spawn(async move {
        loop {
            client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
        }
    });
    let counted =
        "SELECT coalesce(sum(n_tup_del), 0)::bigint FROM pg_stat_user_tables WHERE relname = 'linkis_resource_lock'";
    for more_than in [0, 50] {
        eventually("it is counted", Duration::from_secs(15), async || database.count(counted).await > more_than).await;
    }
    busy.abort();
}
