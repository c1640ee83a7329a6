//! Installation of a snapshot: changes during its preparation are processed before the lock.

use std::sync::Arc;

use rm_model::{
    external::ClusterSnapshot,
    queue::{ExternalQueue, QueueAmounts, QueueNaming, QueueState, QueueTree},
};
use rm_store::external_snapshot::{self, InstallResult};
use rm_tests::execute;
use uuid::Uuid;

use super::*;

const QUEUES: i64 = 1000;
const LEASE: Uuid = Uuid::from_u128(7);

/// A cluster that only the test fetches.
async fn cluster(connection: &mut PgConnection) -> i64 {
    sqlx::query_scalar(
        "WITH put AS (
            INSERT INTO linkis_external_cluster (resource_type, name, labels, etag, when_away, max_age, last_known_for,
                refresh_interval)
            VALUES ('Yarn', 'default', '{}', gen_random_uuid(), 'refuse', 30000, 0, 1000) RETURNING cluster_id),
        leased AS (
            INSERT INTO linkis_external_refresh (cluster_id, lease, leased_until, next_refresh)
            SELECT cluster_id, $1, clock_timestamp() + interval '1 hour', clock_timestamp() FROM put)
        SELECT cluster_id FROM put",
    )
    .bind(LEASE)
    .fetch_one(connection)
    .await
    .unwrap()
}

async fn one(connection: &mut PgConnection, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(connection).await.unwrap()
}

/// Tickets with these numbers are granted, each a little of a queue.
async fn grant(connection: &mut PgConnection, numbers: std::ops::RangeInclusive<i64>) {
    let (first, last) = (numbers.start(), numbers.end());
    let granted = format!(
        "BEGIN;
        INSERT INTO linkis_external_ticket (ticket_id, cluster_id, path, memory, cores, change, ended)
        SELECT gen_random_uuid(), cluster_id, 'root.q' || n % {QUEUES}, 1, 1, n, false
        FROM linkis_external_cluster, generate_series({first}, {last}) n;
        INSERT INTO linkis_external_queue AS q (cluster_id, path, unseen_memory, unseen_cores)
        SELECT cluster_id, p.path, sum(memory), sum(cores)
        FROM linkis_external_ticket t CROSS JOIN LATERAL (VALUES (t.path), ('root')) p (path)
        WHERE change BETWEEN {first} AND {last} GROUP BY 1, 2
        ON CONFLICT (cluster_id, path) DO UPDATE
            SET unseen_memory = q.unseen_memory + excluded.unseen_memory, unseen_cores = q.unseen_cores + excluded.unseen_cores;
        UPDATE linkis_external_cluster SET changes = {last};
        COMMIT"
    );
    execute(connection, granted).await;
}

/// A request for a queue waits during the installation of a snapshot: for the latest changes only, and not for those during the
/// preparation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_install_writes_only_last_changes() {
    let (pool, _store) = fresh().await;
    let (mut connection, mut other) = (pool.acquire().await.unwrap(), pool.acquire().await.unwrap());
    let cluster_id = cluster(&mut other).await;
    let amounts = |n: i64| QueueAmounts { memory: n, cores: n };
    let queue = |path: String| ExternalQueue {
        path,
        max: amounts(1_000_000),
        used: amounts(0),
        state: QueueState::Running,
        running_applications: None,
        pending_applications: None,
        custom: Default::default(),
    };
    let paths = (0..QUEUES).map(|n| format!("root.q{n}")).chain(["root".to_owned()]);
    let queues = QueueTree::new(QueueNaming::Fair, paths.map(queue)).unwrap();
    let snapshot = Arc::new(ClusterSnapshot::new(OffsetDateTime::UNIX_EPOCH, &[], queues, &[]));
    grant(&mut other, 1..=500).await;
    let generation = external_snapshot::write(&mut connection, cluster_id, &snapshot).await.unwrap();
    let mut prepared = external_snapshot::prepare(&mut connection, cluster_id, snapshot).await.unwrap().unwrap();
    grant(&mut other, 501..=3500).await;
    let installed =
        external_snapshot::install(&mut connection, cluster_id, (LEASE, true), generation, &mut prepared).await;
    assert_eq!(installed.unwrap(), InstallResult::Outrun, "that would be too much while others wait");
    let (mut caught_up, mut looks) = (0, 0);
    loop {
        let changed = external_snapshot::catch_up(&mut connection, cluster_id, &mut prepared).await.unwrap().unwrap();
        (caught_up, looks) = (caught_up + changed, looks + 1);
        if changed == 0 {
            break;
        }
    }
    assert_eq!((caught_up, looks), (3000, 3), "page by page");
    grant(&mut other, 3501..=3501).await;
    let installed =
        external_snapshot::install(&mut connection, cluster_id, (LEASE, true), generation, &mut prepared).await;
    assert_eq!(installed.unwrap(), InstallResult::InForce(1));
    let written = "SELECT count(*) FROM linkis_external_queue q JOIN linkis_external_cluster c USING (cluster_id) WHERE q.xmin = c.xmin";
    assert_eq!(one(&mut connection, written).await, 2, "the queue of the last ticket, and the root");
    let unseen = "SELECT unseen_memory FROM linkis_external_queue WHERE path = 'root'";
    assert_eq!(one(&mut connection, unseen).await, 3501);
    assert_eq!(prepared.preparation.tickets(), 3501);
    assert!(
        prepared.preparation.differing(&external_snapshot::stored(&mut connection, cluster_id).await.unwrap()).len()
            <= 2
    );
}
