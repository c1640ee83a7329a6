//! Locks by rows, and what the constraints refuse. The two traps: reading in the statement that locks, and keys that are
//! locked in several orders.

use std::{collections::BTreeSet, sync::Arc};

use rm_model::{name::Name, operation::LockKey};
use rm_store::{
    em_resource, label_resource, label_set,
    resource_lock::{self, LockConflict},
};
use rm_tests::{LONG, eventually, execute, proxy::Proxy};
use sqlx::Connection as _;

use super::*;

fn user(name: &str) -> LockKey {
    LockKey::User(Name::parse("user", name).unwrap())
}

/// Opens a transaction that locks `keys`.
async fn hold(pool: &PgPool, keys: &BTreeSet<LockKey>) -> PgConnection {
    let mut holder = pool.acquire().await.unwrap().detach();
    execute(&mut holder, "BEGIN").await;
    assert!(resource_lock::lock(&mut holder, keys).await.unwrap().is_some());
    holder
}

/// A transaction waits for a lock.
async fn waits(pool: &PgPool) {
    let waiting =
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let is_waiting = async || sqlx::query_scalar(waiting).fetch_one(pool).await.unwrap();
    eventually("a transaction waits", LONG, is_waiting).await;
}

async fn read(connection: &mut PgConnection, instance: &EmInstance) -> Em {
    em_resource::read(connection, [instance]).await.unwrap().remove(instance).unwrap()
}

/// Writes the counters of an EM.
async fn count(connection: &mut PgConnection, em: Em) -> Result<(), StoreError> {
    write(connection, Deltas { ems_counted: vec![em], ..Deltas::default() }).await
}

/// A database with the EM `host1`, and a connection to it.
async fn with_em() -> (PgPool, PgConnection, EmInstance) {
    let (pool, store) = fresh().await;
    store.close().await;
    let (mut connection, em1) = (pool.acquire().await.unwrap().detach(), em("host1"));
    register(&mut connection, &em1).await;
    (pool, connection, em1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_wait_reads_committed_rows() {
    let (pool, _, em1) = with_em().await;
    let keys = BTreeSet::from([LockKey::Em(em1.clone())]);
    let mut first = hold(&pool, &keys).await;
    let (mut second, instance) = (pool.acquire().await.unwrap().detach(), em1.clone());
    let reading = tokio::spawn(async move {
        let mut transaction = second.begin().await.unwrap();
        resource_lock::lock(&mut transaction, &keys).await.unwrap().unwrap();
        read(&mut transaction, &instance).await
    });
    waits(&pool).await;
    let em = Em { locked: load(7), ..read(&mut first, &em1).await };
    count(&mut first, em).await.unwrap();
    execute(&mut first, "DELETE FROM linkis_resource_lock; COMMIT").await;
    assert_eq!(reading.await.unwrap().locked, load(7));
}

/// Rows that change without the locks: the write finds another version than it read, and changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_version_update_is_refused() {
    let (_pool, mut connection, em1) = with_em().await;
    let em = read(&mut connection, &em1).await;
    count(&mut connection, Em { locked: load(1), ..em.clone() }).await.unwrap();
    let stale = count(&mut connection, Em { locked: load(2), ..em }).await.unwrap_err();
    assert!(stale.to_string().contains("0 rows were written instead of 1"), "{stale}");
    assert_eq!(read(&mut connection, &em1).await.locked, load(1));
}

/// The constraints of the database reject rows that the service never writes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_constraints_refuse_negative_counters() {
    let (_pool, mut connection, _) = with_em().await;
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

/// The database rejects the write of a ledger that over-commits: only a registration may mark an EM as over-committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_constraint_refuses_over_committing_grant() {
    let (_pool, mut connection, em1) = with_em().await;
    let em = Em { locked: load(11), ..read(&mut connection, &em1).await };
    let cause = count(&mut connection, em).await.unwrap_err().to_string();
    assert!(cause.contains("never_over_committed"), "{cause}");
}

/// A transaction that waits for a key owns no later key, so that no cycle can form.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_keys_are_locked_in_one_order() {
    let (pool, _store) = fresh().await;
    let ordered = [LockKey::Em(em("a")), LockKey::Em(em("b")), user("a"), user("b")];
    for (at, held) in ordered.iter().enumerate() {
        let mut holder = hold(&pool, &BTreeSet::from([held.clone()])).await;
        let (mut waiter, all) = (pool.acquire().await.unwrap().detach(), BTreeSet::from(ordered.clone()));
        let waiting = tokio::spawn(async move {
            let mut transaction = waiter.begin().await.unwrap();
            resource_lock::lock(&mut transaction, &all).await.unwrap().unwrap();
        });
        waits(&pool).await;
        let mut probe = pool.acquire().await.unwrap();
        for (other, key) in ordered.iter().enumerate().filter(|(other, _)| *other != at) {
            let obstacle = resource_lock::wait(&mut probe, key, Duration::from_millis(50)).await.unwrap();
            let expected = if other < at { LockConflict::Transaction } else { LockConflict::None };
            assert_eq!(obstacle, expected, "{key:?} while {held:?} is waited for");
        }
        execute(&mut holder, "ROLLBACK").await;
        waiting.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncommitted_session_is_rolled_back_before_next() {
    let (_pool, store) = fresh().await;
    let (a, b) = (BTreeSet::from([LockKey::Em(em("a"))]), BTreeSet::from([LockKey::Em(em("b"))]));
    let (mut session, mut other) = (store.session(), store.session());
    resource_lock::lock(session.begin().await.unwrap(), &a).await.unwrap().unwrap();
    let held = resource_lock::lock(other.begin().await.unwrap(), &a).await.unwrap_err();
    assert!(held.is_lock_timeout(), "{held}");
    // Abandoned in the middle, and used again: what it had locked is free.
    resource_lock::lock(session.begin().await.unwrap(), &b).await.unwrap().unwrap();
    resource_lock::lock(other.begin().await.unwrap(), &a).await.unwrap().unwrap();
    // Outside a transaction, the session owns no lock.
    session.get().await.unwrap();
    resource_lock::lock(other.begin().await.unwrap(), &b).await.unwrap().unwrap();
    other.roll_back().await.unwrap();
    store.close().await;
}

/// The wait for a rollback on a silent connection is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_on_silent_connection_is_bounded() {
    let options = new_database("template0").await;
    let proxy = Proxy::start("rollback", options.get_socket().unwrap());
    let store = Store::open(options.socket(proxy.folder()), HISTORY).await.unwrap();
    let mut session = store.session();
    session.begin().await.unwrap();
    proxy.forget_all();
    let got = tokio::time::timeout(LONG, session.get()).await.expect("a reply");
    assert!(got.unwrap_err().is_unavailable());
}

/// Another task deletes one of the counters that a step was to delete, so that the step seems to be the last one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retired_label_set_with_counters_is_kept() {
    let (pool, _store) = fresh().await;
    let fill = r#"INSERT INTO linkis_label_set (label_set, exempt, state) VALUES ('["user"]', '[]', 'retired');
        INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
        SELECT label_set_id, '{}', '{}', '{}', sha256(convert_to(n::text, 'UTF8')) FROM linkis_label_set, generate_series(1, 3) n"#;
    execute(&pool, fill).await;
    let id: i64 = sqlx::query_scalar("SELECT label_set_id FROM linkis_label_set").fetch_one(&pool).await.unwrap();
    let sets = async || label_set::ids(&pool).await.unwrap().len();
    let mut other = pool.acquire().await.unwrap().detach();
    let first = "SELECT scope_hash FROM linkis_label_resource ORDER BY scope_hash LIMIT 1";
    execute(&mut other, format!("BEGIN; DELETE FROM linkis_label_resource WHERE scope_hash = ({first})")).await;
    let step = tokio::spawn({
        let pool = pool.clone();
        async move { label_resource::delete_of_set(&pool, id, 2).await.unwrap() }
    });
    waits(&pool).await;
    execute(&mut other, "COMMIT").await;
    assert!(!step.await.unwrap(), "the step deleted fewer counters than it may");
    label_set::delete(&pool, id).await.unwrap();
    assert_eq!(sets().await, 1);
    assert!(!label_resource::delete_of_set(&pool, id, 2).await.unwrap());
    label_set::delete(&pool, id).await.unwrap();
    assert_eq!(sets().await, 0);
}

/// A read for a check within a long transaction does not lock the version of the limits until its end.
#[tokio::test]
async fn savepoint_releases_version_of_limits() {
    let (pool, store) = fresh().await;
    let mut session = store.session();
    let connection = session.begin().await.unwrap();
    session::snapshot(connection).await.unwrap();
    session::savepoint(connection).await.unwrap();
    em_resource::read_in_force(connection, &Arc::default(), []).await.unwrap();
    let locks = "SELECT count(*) FROM pg_locks WHERE relation = 'linkis_resource_limit_version'::regclass";
    let locks = async || sqlx::query_scalar::<_, i64>(locks).fetch_one(&pool).await.unwrap();
    assert_eq!(locks().await, 1);
    session::roll_back_to_savepoint(connection).await.unwrap();
    assert_eq!(locks().await, 0);
    em_resource::read(connection, []).await.unwrap();
}
