//! Locks of migrations, and the separation of their tables.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use rm_store::{PendingStore, schema};
use sqlx::postgres::PgConnection;

use super::*;

/// A migration that waits for a lock times out after a moment, so that later calls proceed, and tries again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migration_without_its_lock_delays_no_call() {
    const LATER: &str = "ALTER TABLE linkis_resource_action_record ADD COLUMN later text";
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(99_999, 99_999, 99_999)).await;
    // A long read of the history.
    let mut reader = database.connect().await;
    execute(&mut reader, "BEGIN; LOCK linkis_resource_action_record IN ACCESS SHARE MODE").await;
    let (store, _) = PendingStore::find(database.target()).await.unwrap();
    store.found().await;
    let mut connection = store.connect().await.unwrap();
    let migrating = tokio::spawn(async move { schema::apply_later(&mut connection, 9999, LATER).await });
    let wait = "SELECT coalesce((extract(epoch FROM max(waitstart)) * 1000000)::bigint, 0) FROM pg_locks
        WHERE relation = 'linkis_resource_action_record'::regclass AND mode = 'AccessExclusiveLock' AND NOT granted";
    let (mut granted, mut waits) = (0, BTreeSet::from([0]));
    while waits.len() < 4 {
        assert!(!migrating.is_finished(), "it has ended");
        rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
        granted += 1;
        waits.insert(database.count(wait).await);
    }
    execute(&mut reader, "ROLLBACK").await;
    migrating.await.unwrap().unwrap();
    let made = "SELECT count(*) FROM linkis_rm_migration_cell WHERE version = 9999";
    assert_eq!(database.count(made).await, 1);
    assert_eq!(assert_invariants(&database, &rm.client).await, granted);
}

/// The tables that the migrations of one side make.
fn tables(side: &str) -> BTreeSet<String> {
    let folder = repo_root().join("migrations").join(side);
    let texts = fs::read_dir(folder).unwrap().map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
    let names = |text: String| -> Vec<String> {
        let made = text.lines().filter_map(|line| line.strip_prefix("CREATE TABLE "));
        made.map(|rest| rest.split([' ', '(']).next().unwrap().to_owned()).collect()
    };
    texts.flat_map(names).collect()
}

/// The foreign keys that lead from one side to the other.
async fn keys_across(connection: &mut PgConnection) -> Vec<String> {
    let [cell, home] = ["cell", "home"].map(tables);
    assert!(cell.contains("linkis_em_resource_meta_data") && home.contains("linkis_resource_limit"));
    let keys: Vec<(String, String, String)> = sqlx::query_as(
        "SELECT conname::text, conrelid::regclass::text, confrelid::regclass::text FROM pg_constraint WHERE contype = 'f'",
    )
    .fetch_all(connection)
    .await
    .unwrap();
    let of_home = |table: &String| home.contains(table);
    let across = keys.into_iter().filter(|(_, from, to)| of_home(from) != of_home(to));
    across.map(|(key, ..)| key).collect()
}

/// A cell may be a separate database, so no foreign key connects its tables with those of home.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_and_home_tables_share_no_foreign_key() {
    let (database, _rm) = start().await;
    let mut connection = database.connect().await;
    // Every table belongs to home or to a cell, except those of applied migrations and partitions.
    let of_either: BTreeMap<String, &str> = ["cell", "home"]
        .into_iter()
        .flat_map(|side| tables(side).into_iter().map(move |table| (table, side)))
        .collect();
    let there: Vec<String> = sqlx::query_scalar(
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
            AND NOT relispartition AND relname NOT LIKE 'linkis_rm_migration%'",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();
    let nobodys: Vec<&String> = there.iter().filter(|table| !of_either.contains_key(*table)).collect();
    assert!(nobodys.is_empty(), "{nobodys:?}");
    assert_eq!(keys_across(&mut connection).await, [""; 0]);
    // The query would find such a key.
    execute(&mut connection, "ALTER TABLE linkis_rm_token ADD COLUMN cluster_id bigint CONSTRAINT leads_across REFERENCES linkis_external_cluster (cluster_id)").await;
    assert_eq!(keys_across(&mut connection).await, ["leads_across"]);
}
