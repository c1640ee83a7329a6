//! Upgrades: releases side by side on one database, and what a later one left.

use linkis_rm::client::ClientError;

use crate::harness::*;

/// What a later release may have made: a migration that this one does not know, and a column that it does not write.
const LATER: &str = "
    ALTER TABLE linkis_user_resource_meta_data ADD COLUMN later text;
    INSERT INTO linkis_rm_migration_cell (version, description, success, checksum, execution_time)
    VALUES (9999, 'later', true, '', 0)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_earlier_release_starts_on_a_later_schema_and_works() {
    let database = Database::fresh().await;
    Instance::start(&database).await.stop().await;
    sqlx::raw_sql(LATER).execute(&database.pool).await.unwrap();
    let rm = Instance::start(&database).await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let grant = rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_would_count_wrongly_reads_and_refuses_to_write() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let grant = rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    sqlx::raw_sql(
        "UPDATE linkis_resource_limit_version SET oldest_writer = oldest_writer + 1, version = gen_random_uuid()",
    )
    .execute(&database.pool)
    .await
    .unwrap();
    let refused = |error: ClientError| assert_eq!(error.reason().as_deref(), Some("OUTDATED_RELEASE"), "{error}");
    refused(rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.unwrap_err());
    refused(rm.client.resource_released(&grant.released(name("hadoop"))).await.unwrap_err());
    refused(rm.client.set_limit(&each_user(3)).await.unwrap_err());
    assert_eq!(rm.client.tickets(None).await.unwrap().len(), 1);
    assert_eq!(rm.client.em(&em("host1")).await.unwrap().instance, em("host1"));
    assert_invariants(&database, &rm.client).await;
}
