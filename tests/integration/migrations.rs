//! Upgrades: concurrent releases on one database, and the rows of a later release.

mod locks;
mod previous_release;

use std::process::{Child, Command, Stdio};

use rm_client::ClientError;
use rm_store::history_partition;

use crate::harness::*;

/// Changes of a later release: an unknown migration, and a column that this release does not write.
const LATER: &str = "
    ALTER TABLE linkis_user_resource_meta_data ADD COLUMN later text;
    INSERT INTO linkis_rm_migration_cell (version, description, success, checksum, execution_time)
    VALUES (9999, 'later', true, '', 0)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_schema_serves_earlier_release() {
    let database = Database::fresh().await;
    Instance::start(&database).await.stop().await;
    database.execute(LATER).await;
    let rm = Instance::start(&database).await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let grant = rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outdated_release_reads_and_is_refused_writes() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    let grant = rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    database
        .execute("UPDATE linkis_resource_limit_version SET oldest_writer = 1000, version = gen_random_uuid()")
        .await;
    let refused = |error: ClientError| assert_eq!(error.reason().as_deref(), Some("OUTDATED_RELEASE"), "{error}");
    refused(rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.unwrap_err());
    refused(rm.client.resource_released(&grant.released(name("hadoop"))).await.unwrap_err());
    refused(rm.client.set_limit(&each_user(3)).await.unwrap_err());
    assert_eq!(rm.client.tickets(None).await.unwrap().len(), 1);
    assert_eq!(rm.client.em(&em("host1")).await.unwrap().instance, em("host1"));
    assert_invariants(&database, &rm.client).await;
}

/// Partitions are created in advance, and dropped when all of their lines are older than the retention.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_partition_after_retention_is_dropped() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    // It drops partitions, too.
    rm.stop().await;
    let mut connection = database.connect().await;
    execute(&mut connection, "CREATE TABLE linkis_resource_action_record_2020010100_2020010101 PARTITION OF linkis_resource_action_record
            FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-01 01:00+00');
        INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor, action_time)
        SELECT 'registered', 'ecm', 'long ago', 'CPU', '{}', 'anonymous', '2020-01-01 00:30+00'").await;
    let old = "SELECT count(*) FROM linkis_resource_action_record WHERE em_instance = 'long ago'";
    assert_eq!(database.count(old).await, 1);
    let hour = std::time::Duration::from_secs(3600);
    assert!(history_partition::drop_oldest(&mut connection, hour).await.unwrap());
    assert!(!history_partition::drop_oldest(&mut connection, hour).await.unwrap(), "the present stays");
    assert_eq!(database.count(old).await, 0);
    let young = "SELECT count(*) FROM linkis_resource_action_record WHERE em_instance = 'host1:9102'";
    assert_eq!(database.count(young).await, 1);
}

/// A partition that another transaction reads cannot be deleted, and delays no other retention.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_beside_locked_partition_continues() {
    let (database, rm) = start().await;
    rm.stop().await;
    database.execute("SELECT linkis_rm_make_history_part(1577836800, 1577840400);
        INSERT INTO linkis_user_request_id
        SELECT 'hadoop', n::text, sha256('x'), gen_random_uuid(), 'ecm', 'host1', '2020-01-01', '2020-01-01' FROM generate_series(1, 10) n").await;
    let mut reader = database.connect().await;
    execute(&mut reader, "BEGIN; LOCK linkis_resource_action_record_2020010100_2020010101 IN ACCESS SHARE MODE").await;
    let rm = Instance::start(&database).await;
    let kept = "SELECT count(*) FROM linkis_user_request_id";
    eventually("the request ids are deleted", LONG, async || database.count(kept).await == 0).await;
    let partitions =
        "SELECT count(*) FROM pg_class WHERE relname = 'linkis_resource_action_record_2020010100_2020010101'";
    assert_eq!(database.count(partitions).await, 1);
    execute(&mut reader, "ROLLBACK").await;
    eventually("the partition is deleted", LONG, async || database.count(partitions).await == 0).await;
    rm.stop().await;
}

/// A vacuum that truncates a table blocks all writers, and would run often on tables with many changes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_with_autovacuum_settings_never_truncate() {
    let (database, _rm) = start().await;
    let shortened: Vec<String> = database.column("SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relname LIKE 'linkis%' AND reloptions::text LIKE '%autovacuum%'
            AND reloptions::text NOT LIKE '%vacuum_truncate=off%'").await;
    assert!(shortened.is_empty(), "add vacuum_truncate = off: {shortened:?}");
}

/// Starts `linkis-rm migrate` on a database.
fn begin_to_migrate(database: &Database) -> Child {
    let mut command = Command::new(*PROGRAM);
    command.arg("migrate").env("DATABASE_URL", database.url()).env_remove("LINKIS_RM_DATA_DIR");
    command.stdout(Stdio::null()).spawn().unwrap()
}

/// All objects of a schema, without history partitions, which depend on the time.
async fn schema(database: &Database) -> Vec<String> {
    let sql = r"SELECT format('%s.%s %s %s %s', table_name, column_name, data_type, is_nullable, column_default)
            FROM information_schema.columns WHERE table_schema = 'public' AND table_name !~ '_\d{10}_\d{10}$'
        UNION ALL SELECT format('%s: %s', conrelid::regclass, pg_get_constraintdef(oid)) FROM pg_constraint
            WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text !~ '_\d{10}_\d{10}$'
        UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename !~ '_\d{10}_\d{10}$'
        UNION ALL SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
        UNION ALL SELECT format('%s %s', version, success) FROM linkis_rm_migration_home
        UNION ALL SELECT format('%s %s', version, success) FROM linkis_rm_migration_cell ORDER BY 1";
    database.column(sql).await
}

/// A migration is applied as a whole or not at all, whenever its process ends; concurrent processes apply each once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrations_interrupted_or_concurrent_apply_once() {
    let (cut_off, at_once) = (Database::empty().await, Database::empty().await);
    let begun = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL";
    let applied =
        "SELECT count(*) FROM pg_class WHERE relname IN ('linkis_rm_token', 'linkis_rm_lease', 'linkis_resource_hold')";
    for (sql, least) in [(begun, 1), (begun, 1), (applied, 1), (applied, 2), (applied, 3)] {
        let migrating = std::cell::RefCell::new(begin_to_migrate(&cut_off));
        let has_ended = || migrating.borrow_mut().try_wait().unwrap().is_some();
        eventually("it migrates", LONG, async || cut_off.count(sql).await >= least || has_ended()).await;
        let mut migrating = migrating.into_inner();
        migrating.kill().unwrap();
        migrating.wait().unwrap();
    }
    for mut migrating in (0..4).map(|_| begin_to_migrate(&cut_off)).collect::<Vec<_>>() {
        assert!(migrating.wait().unwrap().success());
    }
    for mut migrating in (0..4).map(|_| begin_to_migrate(&at_once)).collect::<Vec<_>>() {
        assert!(migrating.wait().unwrap().success());
    }
    assert_eq!(schema(&cut_off).await, schema(&at_once).await);
    let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'linkis_resource_action_record'::regclass";
    let partitions = at_once.count(partitions).await;
    assert!((3..=4).contains(&partitions), "the current one, the next ones and the default: {partitions}");
    let rm = Instance::start_with(&cut_off, settings().with("--no-migrate", "")).await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(assert_invariants(&cut_off, &rm.client).await, 1);
}
