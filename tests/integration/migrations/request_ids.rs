//! Request ids that an earlier release has written, where an id is one name for all users.

use super::*;
use crate::request_ids::{assert_reused, named};

/// SQL that creates the state of the earlier release.
const EARLIER: &str = "
    INSERT INTO linkis_request_id (request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time)
    SELECT request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time FROM linkis_user_request_id;
    DROP TABLE linkis_user_request_id;
    UPDATE linkis_resource_limit_version SET oldest_writer = 6;
    DELETE FROM linkis_rm_migration_cell WHERE version = 24";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_of_earlier_release_belongs_to_its_user() {
    let (database, rm) = start_with_host1().await;
    let client = &rm.client;
    let live = client.request_resource(&named("host1", "hadoop", "live")).await.granted();
    let ended = client.request_resource(&named("host1", "hadoop", "ended")).await.granted();
    client.resource_released(&release(&ended, "hadoop")).await.unwrap();
    rm.stop().await;
    database.execute(EARLIER).await;

    let rm = Instance::start(&database).await;
    let client = &rm.client;
    // Requests of the user get the earlier reply, with either body.
    assert_eq!(client.request_resource(&named("host1", "hadoop", "live")).await.granted(), live);
    let over = client.request_resource(&named("host1", "hadoop", "ended")).await.unwrap_err();
    assert_eq!(over.reason().as_deref(), Some("TICKET_ENDED"));
    for id in ["live", "ended"] {
        let other = ResourceRequest { creator: name("other"), ..named("host1", "hadoop", id) };
        assert_reused(client.request_resource(&other).await.unwrap_err());
    }
    // Another user can use the ids, and they still belong to the first user.
    for id in ["live", "ended"] {
        let grant = client.request_resource(&named("host1", "alice", id)).await.granted();
        assert_eq!(client.ticket(grant.ticket_id).await.unwrap().user, name("alice"));
        assert_eq!(client.request_resource(&named("host1", "alice", id)).await.granted(), grant);
    }
    assert_eq!(client.request_resource(&named("host1", "hadoop", "live")).await.granted(), live);
    assert_eq!(assert_invariants(&database, client).await, 3);
    let oldest_writer = database.count("SELECT oldest_writer::bigint FROM linkis_resource_limit_version").await;
    assert_eq!(oldest_writer, 7, "the release before reads, and does not write");
}

/// A batch of the earlier release in progress delays no migration. An instance waits for the batch before it serves and reads its rows. No
/// later batch of that release begins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_ids_of_earlier_batch_are_awaited_before_serving() {
    let (database, rm) = start_with_host1().await;
    let grant = rm.client.request_resource(&named("host1", "hadoop", "job-1")).await.granted();
    rm.stop().await;
    database.execute(EARLIER).await;
    let mut earlier = database.connect().await;
    execute(&mut earlier, "DELETE FROM linkis_request_id; BEGIN; SELECT oldest_writer FROM linkis_resource_limit_version;
        INSERT INTO linkis_request_id (request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time)
        SELECT 'job-2', sha256('x'), ticket_id, em_application_name, em_instance, now(), now() FROM linkis_user_resource_meta_data").await;
    assert!(begin_to_migrate(&database).wait().unwrap().success());
    let oldest_writer = "SELECT oldest_writer::bigint FROM linkis_resource_limit_version";
    assert_eq!(database.count(oldest_writer).await, 6, "the release before continues to write");
    let waits =
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'linkis_resource_limit_version'::regclass";
    let commit = async {
        eventually("an instance waits", Duration::from_secs(30), async || database.count(waits).await > 0).await;
        execute(&mut earlier, "COMMIT").await;
    };
    let (rm, ()) = tokio::join!(Instance::start(&database), commit);
    assert_eq!(database.count(oldest_writer).await, 7);
    assert_reused(rm.client.request_resource(&named("host1", "hadoop", "job-2")).await.unwrap_err());
    let other = rm.client.request_resource(&named("host1", "alice", "job-2")).await.granted();
    assert_ne!(other.ticket_id, grant.ticket_id);
}
