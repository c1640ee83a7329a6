//! `linkis_external_snapshot` and `linkis_external_application`: queues and applications of a cluster at one moment,
//! and the installation of a new snapshot.
//!
//! A new snapshot is written beside the present one. Its unseen use is computed from all live tickets without locks, and
//! then updated by the later changes. The installation locks the cluster for two short statements only. Never: makes a
//! batch wait for the fetch or the computation. Callers: the refresh task, and the audit and its repair.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use sqlx::{Connection as _, PgConnection, PgExecutor};
use time::OffsetDateTime;
use tokio_stream::StreamExt as _;
use uuid::Uuid;

use rm_model::{
    external::{ClusterSnapshot, SnapshotPreparation},
    queue::{ExternalQueue, QueueAmounts, QueueNaming, QueueTree},
};

use super::{
    StoreError,
    external_queue::{self, ClusterRow},
    external_refresh::{INSTALL_WAIT, resting_as_long},
    external_ticket,
    rows::column,
    session,
};

/// Maximum number of changed tickets at installation: about the changes of two batches. Above it, the caller catches up
/// again.
const CAUGHT_UP_MAX: usize = 1024;

/// Maximum number of changed tickets per catch-up.
pub const CATCH_UP_PAGE: usize = 2000;

/// Number of snapshot rows per statement; more if the snapshot would otherwise need more than `PIECES_MAX` statements.
const WRITTEN_AT_ONCE: usize = 100;
const PIECES_MAX: usize = 50;

fn written_at_once(rows: usize) -> usize {
    WRITTEN_AT_ONCE.max(rows.div_ceil(PIECES_MAX))
}

/// Writes a snapshot that is not yet used, and returns its generation. Writes few rows at a time and rests between: a
/// thousand rows at once would occupy a processor for too long.
pub async fn write(
    connection: &mut PgConnection,
    cluster_id: i64,
    snapshot: &ClusterSnapshot,
) -> Result<i64, StoreError> {
    let mut transaction = connection.begin().await?;
    let generation: i64 = sqlx::query_scalar(
        "-- external_snapshot::write, its number
        SELECT nextval('linkis_external_generation')",
    )
    .fetch_one(&mut *transaction)
    .await?;
    let queues: Vec<&ExternalQueue> = snapshot.queues.behind(None).collect();
    for queues in queues.chunks(written_at_once(queues.len())) {
        resting_as_long(write_queues(&mut transaction, (cluster_id, generation), queues)).await?;
    }
    let shown: Vec<(&String, &QueueAmounts)> =
        snapshot.shown().iter().filter(|(_, amounts)| **amounts != QueueAmounts::default()).collect();
    for shown in shown.chunks(written_at_once(shown.len())) {
        resting_as_long(write_applications(&mut transaction, (cluster_id, generation), shown)).await?;
    }
    transaction.commit().await?;
    Ok(generation)
}

async fn write_queues(
    connection: &mut PgConnection,
    (cluster_id, generation): (i64, i64),
    queues: &[&ExternalQueue],
) -> Result<(), StoreError> {
    sqlx::query(
        "-- external_snapshot::write
        INSERT INTO linkis_external_snapshot (cluster_id, generation, path, last_name, max_memory, max_cores, used_memory,
            used_cores, state)
        SELECT $1, $2, * FROM unnest($3::text[], $4::text[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[], $9::text[])",
    )
    .bind(cluster_id)
    .bind(generation)
    .bind(queues.iter().map(|queue| queue.path.as_str()).collect::<Vec<_>>())
    .bind(queues.iter().map(|queue| queue.path.rsplit('.').next().unwrap_or_default()).collect::<Vec<_>>())
    .bind(queues.iter().map(|queue| queue.max.memory).collect::<Vec<_>>())
    .bind(queues.iter().map(|queue| queue.max.cores).collect::<Vec<_>>())
    .bind(queues.iter().map(|queue| queue.used.memory).collect::<Vec<_>>())
    .bind(queues.iter().map(|queue| queue.used.cores).collect::<Vec<_>>())
    .bind(queues.iter().map(|queue| queue.state.as_str()).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    Ok(())
}

async fn write_applications(
    connection: &mut PgConnection,
    (cluster_id, generation): (i64, i64),
    shown: &[(&String, &QueueAmounts)],
) -> Result<(), StoreError> {
    sqlx::query(
        "-- external_snapshot::write, the applications
        INSERT INTO linkis_external_application (cluster_id, generation, application_id, memory, cores)
        SELECT $1, $2, * FROM unnest($3::text[], $4::bigint[], $5::bigint[])",
    )
    .bind(cluster_id)
    .bind(generation)
    .bind(shown.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>())
    .bind(shown.iter().map(|(_, amounts)| amounts.memory).collect::<Vec<_>>())
    .bind(shown.iter().map(|(_, amounts)| amounts.cores).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    Ok(())
}

/// Unseen use of a cluster, counted at one moment for a new snapshot.
#[derive(Debug)]
pub struct PreparedSnapshot {
    /// Start time of the PostgreSQL server that the change numbers belong to. Another server may have lost the last
    /// changes and reused their numbers.
    server: OffsetDateTime,
    /// Number of the last change that is counted.
    pub changes: i64,
    /// Stored unseen use by path, as of the count or later.
    stored: BTreeMap<String, QueueAmounts>,
    /// Unseen use under the new snapshot.
    pub preparation: SnapshotPreparation,
}

/// Counts all live tickets of a cluster without blocking locks. `None` if the cluster was deleted.
pub async fn prepare(
    connection: &mut PgConnection,
    cluster_id: i64,
    snapshot: Arc<ClusterSnapshot>,
) -> Result<Option<PreparedSnapshot>, StoreError> {
    let mut transaction = connection.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    session::thorough(&mut transaction).await?;
    let server = session::server_start(&mut transaction).await?;
    let rows = external_queue::clusters(&mut *transaction, &[cluster_id].into(), false).await?;
    let Some(changes) = rows.first().map(|row| row.changes) else { return Ok(None) };
    let stored = stored(&mut transaction, cluster_id).await?;
    let mut preparation = SnapshotPreparation::new(snapshot);
    let mut tickets = external_ticket::live(&mut transaction, cluster_id);
    while let Some(ticket) = tickets.next().await {
        preparation.put(&ticket?);
    }
    drop(tickets);
    transaction.rollback().await?;
    Ok(Some(PreparedSnapshot { server, changes, stored, preparation }))
}

/// Returns the number of changes since `prepared`. `None` if the cluster was deleted, or the server restarted, so that
/// change numbers are no longer comparable.
pub async fn behind(
    executor: impl PgExecutor<'_>,
    cluster_id: i64,
    prepared: &PreparedSnapshot,
) -> Result<Option<u64>, StoreError> {
    let behind: Option<i64> = sqlx::query_scalar(
        "-- external_snapshot::behind
        SELECT changes - $2 FROM linkis_external_cluster WHERE cluster_id = $1 AND pg_postmaster_start_time() = $3",
    )
    .bind(cluster_id)
    .bind(prepared.changes)
    .bind(prepared.server)
    .fetch_optional(executor)
    .await?;
    Ok(behind.and_then(|behind| u64::try_from(behind).ok()))
}

/// Applies a later snapshot to an earlier count. Returns false if the snapshot is not later.
pub async fn renew(
    connection: &mut PgConnection,
    cluster_id: i64,
    prepared: &mut PreparedSnapshot,
    snapshot: Arc<ClusterSnapshot>,
) -> Result<bool, StoreError> {
    if prepared.preparation.renew(snapshot).is_err() {
        return Ok(false);
    }
    // Changes since the count belong to tickets that a catch-up still reads.
    prepared.stored = stored(connection, cluster_id).await?;
    Ok(true)
}

/// Applies the next page of changed tickets without blocking locks, so that little remains to do under the lock.
/// Returns the number of tickets; `None` if the cluster was deleted.
pub async fn catch_up(
    connection: &mut PgConnection,
    cluster_id: i64,
    prepared: &mut PreparedSnapshot,
) -> Result<Option<usize>, StoreError> {
    let mut transaction = connection.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    let rows = external_queue::clusters(&mut *transaction, &[cluster_id].into(), false).await?;
    let Some(changes) = rows.first().map(|row| row.changes) else { return Ok(None) };
    let changed = external_ticket::changed(&mut *transaction, cluster_id, prepared.changes, CATCH_UP_PAGE).await?;
    changed.iter().for_each(|delta| prepared.preparation.catch_up(delta));
    let is_page = changed.len() == CATCH_UP_PAGE;
    prepared.changes = changed.last().filter(|_| is_page).map_or(changes, |last| last.change);
    // Later changes of these queues belong to tickets that the next catch-up reads.
    let touched = prepared.preparation.take_touched();
    if !touched.is_empty() {
        let now = stored_of(&mut transaction, cluster_id, &touched).await?;
        prepared.stored.retain(|path, _| !touched.contains(path));
        prepared.stored.extend(now);
    }
    transaction.rollback().await?;
    Ok(Some(changed.len()))
}

/// Returns the stored unseen use of the given queues, by path.
async fn stored_of(
    connection: &mut PgConnection,
    cluster_id: i64,
    paths: &BTreeSet<String>,
) -> Result<BTreeMap<String, QueueAmounts>, StoreError> {
    let rows: Vec<(String, i64, i64)> = sqlx::query_as(
        "-- external_snapshot::stored_of
        SELECT path, unseen_memory, unseen_cores FROM linkis_external_queue WHERE cluster_id = $1 AND path = ANY ($2)",
    )
    .bind(cluster_id)
    .bind(paths.iter().map(String::as_str).collect::<Vec<_>>())
    .fetch_all(connection)
    .await?;
    Ok(by_path(rows))
}

fn by_path(rows: Vec<(String, i64, i64)>) -> BTreeMap<String, QueueAmounts> {
    rows.into_iter().map(|(path, memory, cores)| (path, QueueAmounts { memory, cores })).collect()
}

/// Returns the stored unseen use of all queues of a cluster, by path.
pub async fn stored(
    connection: &mut PgConnection,
    cluster_id: i64,
) -> Result<BTreeMap<String, QueueAmounts>, StoreError> {
    let rows: Vec<(String, i64, i64)> = sqlx::query_as(
        "-- external_snapshot::stored
        SELECT path, unseen_memory, unseen_cores FROM linkis_external_queue WHERE cluster_id = $1",
    )
    .bind(cluster_id)
    .fetch_all(connection)
    .await?;
    Ok(by_path(rows))
}

/// Counts the unseen use of all live tickets under the present snapshot, or without one.
pub async fn from_tickets(connection: &mut PgConnection, row: &ClusterRow) -> Result<SnapshotPreparation, StoreError> {
    let shown: Vec<(String, i64, i64)> = sqlx::query_as(
        "-- external_snapshot::from_tickets
        SELECT application_id, memory, cores FROM linkis_external_application WHERE cluster_id = $1 AND generation = $2",
    )
    .bind(row.id)
    .bind(row.generation)
    .fetch_all(&mut *connection)
    .await?;
    let shown = shown.into_iter().map(|(id, memory, cores)| (id, QueueAmounts { memory, cores })).collect();
    let begun = row.begun.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let mut preparation =
        SnapshotPreparation::new(Arc::new(ClusterSnapshot::stored(begun, QueueTree::default(), shown)));
    let mut tickets = external_ticket::live(connection, row.id);
    while let Some(ticket) = tickets.next().await {
        preparation.put(&ticket?);
    }
    Ok(preparation)
}

/// Result of an installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstallResult {
    /// The snapshot is in use; with the number of tickets that had changed since the last catch-up.
    InForce(usize),
    /// More than `CAUGHT_UP_MAX` tickets have changed since the last catch-up.
    Outrun,
    /// A later snapshot is in use, the lease was lost, or the cluster was deleted.
    Superseded,
}

/// Installs a prepared snapshot and ends the lease. The lease remains as the mark of kept counts if `keeps` is set.
///
/// Locks the cluster, for which all requests on its queues wait. The lock covers two short statements, whose size is
/// that of the changes since the last catch-up and the differing queues.
pub async fn install(
    connection: &mut PgConnection,
    cluster_id: i64,
    (lease, keeps): (Uuid, bool),
    generation: i64,
    prepared: &mut PreparedSnapshot,
) -> Result<InstallResult, StoreError> {
    let mut differing: BTreeMap<_, _> = prepared.preparation.differing(&prepared.stored).into_iter().collect();
    let mut transaction = connection.begin().await?;
    // Asynchronous commit: if a crash loses it, all decisions that used it are lost, too, because they commit later.
    sqlx::query(
        "-- external_snapshot::install, without waiting
        SELECT set_config('lock_timeout', $1, true), set_config('synchronous_commit', 'off', true)",
    )
    .bind(format!("{}ms", INSTALL_WAIT.as_millis()))
    .execute(&mut *transaction)
    .await?;
    let rows = external_queue::clusters(&mut *transaction, &[cluster_id].into(), true).await?;
    let snapshot = prepared.preparation.rooms().snapshot();
    let (begun, by_last_name) = (snapshot.begun, snapshot.queues.naming() == QueueNaming::Capacity);
    let Some(row) = rows.first().filter(|row| row.begun.is_none_or(|in_force| in_force < begun)) else {
        return Ok(InstallResult::Superseded);
    };
    let changed = external_ticket::changed(&mut *transaction, cluster_id, prepared.changes, CAUGHT_UP_MAX + 1).await?;
    if changed.len() > CAUGHT_UP_MAX {
        return Ok(InstallResult::Outrun);
    }
    changed.iter().for_each(|delta| prepared.preparation.catch_up(delta));
    prepared.changes = row.changes;
    let rooms = prepared.preparation.rooms();
    differing.extend(prepared.preparation.touched().map(|path| (path.clone(), rooms.unseen(path))));
    let installed = sqlx::query(
        "-- external_snapshot::install
        WITH unseen AS (
            INSERT INTO linkis_external_queue (cluster_id, path, unseen_memory, unseen_cores)
            SELECT $1, * FROM unnest($7::text[], $8::bigint[], $9::bigint[])
            ON CONFLICT (cluster_id, path) DO UPDATE
                SET unseen_memory = excluded.unseen_memory, unseen_cores = excluded.unseen_cores),
        in_force AS (
            UPDATE linkis_external_cluster SET generation = $2, begun = $3, by_last_name = $4 WHERE cluster_id = $1
            RETURNING refresh_interval)
        UPDATE linkis_external_refresh SET lease = CASE WHEN $6 THEN lease END,
            leased_until = CASE WHEN $6 THEN '-infinity'::timestamptz END, failures = 0,
            next_refresh = clock_timestamp() + make_interval(secs => in_force.refresh_interval / 1000.0)
        FROM in_force WHERE cluster_id = $1 AND lease = $5 AND pg_postmaster_start_time() = $10",
    )
    .bind(cluster_id)
    .bind(generation)
    .bind(begun)
    .bind(by_last_name)
    .bind(lease)
    .bind(keeps)
    .bind(column(differing.keys(), String::as_str))
    .bind(column(differing.values(), |unseen| unseen.memory))
    .bind(column(differing.values(), |unseen| unseen.cores))
    .bind(prepared.server)
    .execute(&mut *transaction)
    .await?;
    if installed.rows_affected() != 1 {
        // Another instance has the lease: the transaction rolls back.
        return Ok(InstallResult::Superseded);
    }
    transaction.commit().await?;
    // The next use of the kept count reads the stored values again.
    prepared.preparation.take_touched();
    Ok(InstallResult::InForce(changed.len()))
}

/// Writes the unseen use of queues. The caller owns the lock of their cluster.
pub async fn write_unseen(
    connection: &mut PgConnection,
    cluster_id: i64,
    unseen: &[(String, QueueAmounts)],
) -> Result<(), StoreError> {
    sqlx::query(
        "-- external_snapshot::write_unseen
        INSERT INTO linkis_external_queue (cluster_id, path, unseen_memory, unseen_cores)
        SELECT $1, * FROM unnest($2::text[], $3::bigint[], $4::bigint[])
        ON CONFLICT (cluster_id, path) DO UPDATE
            SET unseen_memory = excluded.unseen_memory, unseen_cores = excluded.unseen_cores",
    )
    .bind(cluster_id)
    .bind(column(unseen, |(path, _)| path.as_str()))
    .bind(column(unseen, |(_, amounts)| amounts.memory))
    .bind(column(unseen, |(_, amounts)| amounts.cores))
    .execute(connection)
    .await?;
    Ok(())
}
