//! The two traps of locking by rows: reading in the statement that locks, and a user lock that is only per EM.

use std::{collections::BTreeSet, time::Duration};

use rm_model::{em::Em, ledger::Deltas, operation::LockKey};
use rm_store::{
    Store, StoreError, batch_write, em_resource,
    resource_lock::{self, LockConflict},
    session,
};
use sqlx::Connection as _;
use tokio::task::JoinHandle;

use crate::harness::*;

/// Opens a transaction that locks `keys`.
async fn hold(database: &Database, keys: BTreeSet<LockKey>) -> sqlx::PgConnection {
    let mut holder = database.connect().await;
    execute(&mut holder, "BEGIN").await;
    assert!(resource_lock::lock(&mut holder, &keys).await.unwrap().is_some());
    holder
}

/// Writes the counters of an EM as a batch does.
async fn count(connection: &mut sqlx::PgConnection, em: Em) -> Result<(), StoreError> {
    let now = session::clock(&mut *connection).await.unwrap();
    let deltas = Deltas { ems_counted: vec![em], ..Deltas::default() };
    batch_write::write(connection, &deltas, now, None, None).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_wait_reads_committed_rows() {
    let em1 = em("host1");
    let (database, _rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    let keys = BTreeSet::from([LockKey::Em(em1.clone())]);
    let mut first = hold(&database, keys.clone()).await;

    let (mut second, key, instance) = (database.connect().await, keys.clone(), em1.clone());
    let reading: JoinHandle<_> = tokio::spawn(async move {
        let mut transaction = second.begin().await.unwrap();
        resource_lock::lock(&mut transaction, &key).await.unwrap().unwrap();
        em_resource::read(&mut *transaction, [&instance]).await.unwrap().remove(&instance).unwrap()
    });
    eventually("the second waits", Duration::from_secs(5), || is_waiting(&database)).await;
    let mut em = em_resource::read(&mut first, [&em1]).await.unwrap().remove(&em1).unwrap();
    em.locked = load(7, 7, 7);
    count(&mut first, em).await.unwrap();
    execute(&mut first, "DELETE FROM linkis_resource_lock; COMMIT").await;
    assert_eq!(reading.await.unwrap().locked, load(7, 7, 7));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_lock_excludes_operations_on_other_em() {
    let (database, rm) = start().await;
    register_all(&rm.client, ["a", "b"], load(10, 10, 10)).await;
    rm.client.set_limit(&each_user(100)).await.unwrap();
    // Locks of a transaction for this user on EM "a".
    let keys = BTreeSet::from([LockKey::Em(em("a")), LockKey::User(name("hadoop"))]);
    let mut holder = hold(&database, keys).await;
    let client = rm.client.clone();
    let same_user =
        tokio::spawn(
            async move { client.request_resource(&request(&em("b"), "hadoop", load(1, 1, 1))).await.granted() },
        );
    eventually("a request of the user waits on another EM", Duration::from_secs(5), || is_waiting(&database)).await;
    rm.client.request_resource(&request(&em("b"), "alice", load(1, 1, 1))).await.granted();
    assert!(!same_user.is_finished());
    execute(&mut holder, "ROLLBACK").await;
    same_user.await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

/// Rows that change without the locks: the write finds another version than it read, and changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_version_update_is_refused() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    let mut connection = database.connect().await;
    let em = em_resource::read(&mut connection, [&em1]).await.unwrap().remove(&em1).unwrap();
    rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let stale = count(&mut connection, em).await.unwrap_err();
    assert!(stale.to_string().contains("0 rows were written instead of 1"), "{stale}");
    assert_eq!(rm.client.em(&em1).await.unwrap().locked, load(1, 1, 1));
}

/// The database refuses what the service would never write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_constraints_refuse_negative_counters() {
    let em1 = em("host1");
    let (database, _rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    let mut connection = database.connect().await;
    for (sql, constraint) in [
        (r#"UPDATE linkis_em_resource_meta_data SET used_resource = '{"memory":-1}'"#, "used_not_negative"),
        (r#"UPDATE linkis_em_resource_meta_data SET locked_resource = '{"a":{"b":-1}}'"#, "locked_not_negative"),
        (
            r#"UPDATE linkis_em_resource_meta_data SET left_resource = '{"memory":1,"cores":-1}'"#,
            "never_over_committed",
        ),
    ] {
        let error = sqlx::raw_sql(sql).execute(&mut connection).await.unwrap_err().to_string();
        assert!(error.contains(constraint), "{error}");
    }
}

/// A ledger that over-commits is stopped by the database: only a registration may say that an EM is over-committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_constraint_refuses_over_committing_grant() {
    let em1 = em("host1");
    let (database, _rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    let mut connection = database.connect().await;
    let mut em = em_resource::read(&mut connection, [&em1]).await.unwrap().remove(&em1).unwrap();
    em.locked = load(11, 1, 1);
    let refused = count(&mut connection, em).await.unwrap_err();
    let cause = refused.to_string();
    assert!(cause.contains("never_over_committed"), "{cause}");
}

/// A transaction that waits for a key owns no later key, so that no cycle can form.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_keys_are_locked_in_one_order() {
    let (database, _rm) = start().await;
    let ordered = [LockKey::Em(em("a")), LockKey::Em(em("b")), LockKey::User(name("a")), LockKey::User(name("b"))];
    for (at, held) in ordered.iter().enumerate() {
        let mut holder = hold(&database, BTreeSet::from([held.clone()])).await;
        let (mut waiter, all) = (database.connect().await, BTreeSet::from(ordered.clone()));
        let waiting = tokio::spawn(async move {
            let mut transaction = waiter.begin().await.unwrap();
            resource_lock::lock(&mut transaction, &all).await.unwrap().unwrap();
        });
        eventually("it waits", Duration::from_secs(5), || is_waiting(&database)).await;
        let mut probe = database.connect().await;
        for (other, key) in ordered.iter().enumerate().filter(|(other, _)| *other != at) {
            let obstacle = resource_lock::wait(&mut probe, key, Duration::from_millis(50)).await.unwrap();
            let expected = if other < at { LockConflict::Transaction } else { LockConflict::None };
            assert_eq!(obstacle, expected, "{key:?} while {held:?} is waited for");
        }
        execute(&mut holder, "ROLLBACK").await;
        waiting.await.unwrap();
    }
}

/// The end of a batch begins the next transaction. An idle instance has no open transaction, which the database would end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_instance_has_no_open_transaction() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    let idle = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
    rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    eventually("no connection idles in a transaction", Duration::from_secs(10), async || {
        database.count(idle).await == 0
    })
    .await;
    rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncommitted_session_is_rolled_back_before_next() {
    let (database, _rm) = start().await;
    let (a, b) = (BTreeSet::from([LockKey::Em(em("a"))]), BTreeSet::from([LockKey::Em(em("b"))]));
    let store = Store::open(database.target(), HISTORY).await.unwrap();
    let (mut session, mut other) = (store.session(), store.session());
    resource_lock::lock(session.begin().await.unwrap(), &a).await.unwrap().unwrap();
    let held = resource_lock::lock(other.begin().await.unwrap(), &a).await.unwrap_err();
    assert!(held.is_lock_timeout(), "{held}");
    // Given up in the middle, and taken up again: what it had locked is free.
    resource_lock::lock(session.begin().await.unwrap(), &b).await.unwrap().unwrap();
    resource_lock::lock(other.begin().await.unwrap(), &a).await.unwrap().unwrap();
    // Outside a transaction nothing is held.
    session.get().await.unwrap();
    resource_lock::lock(other.begin().await.unwrap(), &b).await.unwrap().unwrap();
    other.roll_back().await.unwrap();
    store.close().await;
}

/// The wait for a rollback on a silent connection is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_on_silent_connection_is_bounded() {
    let database = Database::fresh().await;
    let (proxy, proxied) = database.behind_proxy("undoing");
    let store = Store::open(proxied.options, HISTORY).await.unwrap();
    let mut session = store.session();
    session.begin().await.unwrap();
    proxy.forget_all();
    let got = tokio::time::timeout(Duration::from_secs(60), session.get()).await.expect("an answer");
    assert!(got.unwrap_err().is_unavailable());
}

/// The database counts dead rows only between transactions; and without its count nothing is ever vacuumed.
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
