//! `linkis_external_snapshot` and `linkis_external_application`: what a cluster shows; and how that comes into force.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use sqlx::{Connection as _, PgConnection, PgExecutor};
use time::OffsetDateTime;
use tokio_stream::StreamExt as _;
use uuid::Uuid;

use crate::domain::{
    external::{Preparation, Snapshot},
    queue::{Naming, Queue, QueueAmounts, Queues},
};

use super::{
    StoreError,
    external_queue::{self, ClusterRow, QueueColumns},
    external_refresh::{INSTALL_WAIT, resting_as_long},
    external_ticket, session,
};

/// How many tickets may have changed between the last look and the lock: what two batches change. Of more, it is looked again.
const CAUGHT_UP_MAX: usize = 1024;

/// How many tickets that have changed one look reads.
pub const CATCH_UP_PAGE: usize = 2000;

/// How many rows of a snapshot are written at once, unless there are so many that this would be in too many pieces.
const WRITTEN_AT_ONCE: usize = 100;
const PIECES_MAX: usize = 50;

fn written_at_once(rows: usize) -> usize {
    WRITTEN_AT_ONCE.max(rows.div_ceil(PIECES_MAX))
}

/// Writes what a snapshot says, by which nobody judges yet; answers its number. A few rows at a time, and rests as long as these took: a
/// thousand at once have a processor for so long that others wait for it.
pub async fn write(connection: &mut PgConnection, cluster_id: i64, snapshot: &Snapshot) -> Result<i64, StoreError> {
    let mut transaction = connection.begin().await?;
    let generation: i64 = sqlx::query_scalar(
        "-- external_snapshot::write, its number
        SELECT nextval('linkis_external_generation')",
    )
    .fetch_one(&mut *transaction)
    .await?;
    let queues: Vec<&Queue> = snapshot.queues.behind(None).collect();
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
    queues: &[&Queue],
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

/// What is counted of a cluster at one moment, and what a snapshot would leave unseen then.
#[derive(Debug)]
pub struct Prepared {
    /// When the server was started that told it: the numbers of changes are those of that one. Another may have lost the last of them, and
    /// given them to others.
    server: OffsetDateTime,
    /// How many changes there were.
    changes: i64,
    /// What is stored, by path: as it was then or later.
    stored: BTreeMap<String, QueueAmounts>,
    /// What a snapshot leaves.
    pub preparation: Preparation,
}

impl Prepared {
    /// The number of the last change of a ticket that is known.
    pub fn changes(&self) -> i64 {
        self.changes
    }
}

/// Looks at all live tickets of a cluster, in no lock that anybody waits for; `None` if it is gone.
pub async fn prepare(
    connection: &mut PgConnection,
    cluster_id: i64,
    snapshot: Arc<Snapshot>,
) -> Result<Option<Prepared>, StoreError> {
    let mut transaction = connection.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    session::thorough(&mut transaction).await?;
    let server = session::server_start(&mut transaction).await?;
    let rows = external_queue::clusters(&mut *transaction, &[cluster_id].into(), false).await?;
    let Some(changes) = rows.first().map(ClusterRow::changes) else { return Ok(None) };
    let stored = stored(&mut transaction, cluster_id).await?;
    let mut preparation = Preparation::new(snapshot);
    let mut tickets = external_ticket::live(&mut transaction, cluster_id);
    while let Some(ticket) = tickets.next().await {
        preparation.put(&ticket?);
    }
    drop(tickets);
    transaction.rollback().await?;
    Ok(Some(Prepared { server, changes, stored, preparation }))
}

/// How many changes there were since what was prepared for a snapshot before; `None` if the cluster is gone, or these numbers are no longer
/// what they were.
pub async fn behind(
    executor: impl PgExecutor<'_>,
    cluster_id: i64,
    prepared: &Prepared,
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

/// Prepares a later snapshot by what was prepared for one before; false if it is not later.
pub async fn renew(
    connection: &mut PgConnection,
    cluster_id: i64,
    prepared: &mut Prepared,
    snapshot: Arc<Snapshot>,
) -> Result<bool, StoreError> {
    if prepared.preparation.renew(snapshot).is_err() {
        return Ok(false);
    }
    // Whatever has changed since what was prepared changes tickets that are yet to be caught up with.
    prepared.stored = stored(connection, cluster_id).await?;
    Ok(true)
}

/// Brings what was prepared up to date, in no lock that anybody waits for, so that under the lock there is little left to do: some of the
/// tickets that have changed since. Answers how many those were; `None` if the cluster is gone.
pub async fn catch_up(
    connection: &mut PgConnection,
    cluster_id: i64,
    prepared: &mut Prepared,
) -> Result<Option<usize>, StoreError> {
    let mut transaction = connection.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    let rows = external_queue::clusters(&mut *transaction, &[cluster_id].into(), false).await?;
    let Some(changes) = rows.first().map(ClusterRow::changes) else { return Ok(None) };
    let changed = external_ticket::changed(&mut *transaction, cluster_id, prepared.changes, CATCH_UP_PAGE).await?;
    changed.iter().for_each(|delta| prepared.preparation.catch_up(delta));
    let is_page = changed.len() == CATCH_UP_PAGE;
    prepared.changes = changed.last().filter(|_| is_page).map_or(changes, |last| last.change);
    // Whatever changes them from here on changes tickets that are yet to be caught up with.
    let touched = prepared.preparation.take_touched();
    if !touched.is_empty() {
        let now = stored_of(&mut transaction, cluster_id, &touched).await?;
        prepared.stored.retain(|path, _| !touched.contains(path));
        prepared.stored.extend(now);
    }
    transaction.rollback().await?;
    Ok(Some(changed.len()))
}

/// What is stored to be unseen of these queues, by path.
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

/// What is stored to be unseen in a cluster, by path.
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

/// What the live tickets of a cluster leave unseen by the snapshot in force, or without any.
pub async fn from_tickets(connection: &mut PgConnection, row: &ClusterRow) -> Result<Preparation, StoreError> {
    let shown: Vec<(String, i64, i64)> = sqlx::query_as(
        "-- external_snapshot::from_tickets
        SELECT application_id, memory, cores FROM linkis_external_application WHERE cluster_id = $1 AND generation = $2",
    )
    .bind(row.id())
    .bind(row.generation())
    .fetch_all(&mut *connection)
    .await?;
    let shown = shown.into_iter().map(|(id, memory, cores)| (id, QueueAmounts { memory, cores })).collect();
    let begun = row.begun().unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let mut preparation = Preparation::new(Arc::new(Snapshot::stored(begun, Queues::default(), shown)));
    let mut tickets = external_ticket::live(connection, row.id());
    while let Some(ticket) = tickets.next().await {
        preparation.put(&ticket?);
    }
    Ok(preparation)
}

/// How it ended that a snapshot was to come into force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Installed {
    /// It is in force; with how many tickets that had changed since the last look.
    InForce(usize),
    /// Too much has changed since it was prepared.
    Outrun,
    /// A later one is, or the lease was lost, or the cluster is gone.
    Superseded,
}

/// Brings a snapshot into force that was prepared, and ends the lease, which stays as a sign if something is kept by it: under the lock of
/// the cluster, for which all wait who ask for its queues. So it is held for two short statements, whose size is that of what has changed
/// since the last look, or is shown otherwise.
pub async fn install(
    connection: &mut PgConnection,
    cluster_id: i64,
    (lease, keeps): (Uuid, bool),
    generation: i64,
    prepared: &mut Prepared,
) -> Result<Installed, StoreError> {
    let mut differing: BTreeMap<_, _> = prepared.preparation.differing(&prepared.stored).into_iter().collect();
    let mut transaction = connection.begin().await?;
    // Nor for the disk: if it is lost, so is all that was judged by it, because that is committed behind it.
    sqlx::query(
        "-- external_snapshot::install, without waiting
        SELECT set_config('lock_timeout', $1, true), set_config('synchronous_commit', 'off', true)",
    )
    .bind(format!("{}ms", INSTALL_WAIT.as_millis()))
    .execute(&mut *transaction)
    .await?;
    let rows = external_queue::clusters(&mut *transaction, &[cluster_id].into(), true).await?;
    let snapshot = prepared.preparation.rooms().snapshot();
    let (begun, by_last_name) = (snapshot.begun, snapshot.queues.naming() == Naming::Capacity);
    let Some(changes) = rows.first().filter(|row| row.begun().is_none_or(|in_force| in_force < begun)) else {
        return Ok(Installed::Superseded);
    };
    let changes = changes.changes();
    let changed = external_ticket::changed(&mut *transaction, cluster_id, prepared.changes, CAUGHT_UP_MAX + 1).await?;
    if changed.len() > CAUGHT_UP_MAX {
        return Ok(Installed::Outrun);
    }
    changed.iter().for_each(|delta| prepared.preparation.catch_up(delta));
    prepared.changes = changes;
    let rooms = prepared.preparation.rooms();
    differing.extend(prepared.preparation.touched().map(|path| (path.clone(), rooms.unseen(path))));
    let mut queues = QueueColumns::default();
    differing.iter().for_each(|(path, unseen)| queues.push(cluster_id, path, *unseen));
    let installed = sqlx::query(
        "-- external_snapshot::install
        WITH unseen AS (
            INSERT INTO linkis_external_queue (cluster_id, path, unseen_memory, unseen_cores)
            SELECT * FROM unnest($7::bigint[], $8::text[], $9::bigint[], $10::bigint[])
            ON CONFLICT (cluster_id, path) DO UPDATE
                SET unseen_memory = excluded.unseen_memory, unseen_cores = excluded.unseen_cores),
        in_force AS (
            UPDATE linkis_external_cluster SET generation = $2, begun = $3, by_last_name = $4 WHERE cluster_id = $1
            RETURNING refresh_interval)
        UPDATE linkis_external_refresh SET lease = CASE WHEN $6 THEN lease END,
            leased_until = CASE WHEN $6 THEN '-infinity'::timestamptz END, failures = 0,
            next_refresh = clock_timestamp() + make_interval(secs => in_force.refresh_interval / 1000.0)
        FROM in_force WHERE cluster_id = $1 AND lease = $5 AND pg_postmaster_start_time() = $11",
    )
    .bind(cluster_id)
    .bind(generation)
    .bind(begun)
    .bind(by_last_name)
    .bind(lease)
    .bind(keeps)
    .bind(queues.cluster_id)
    .bind(queues.path)
    .bind(queues.memory)
    .bind(queues.cores)
    .bind(prepared.server)
    .execute(&mut *transaction)
    .await?;
    if installed.rows_affected() != 1 {
        // The lease is another's: nothing of this stays.
        return Ok(Installed::Superseded);
    }
    transaction.commit().await?;
    // What is kept is renewed by what is stored then.
    prepared.preparation.take_touched();
    Ok(Installed::InForce(changed.len()))
}

/// Writes what is unseen of queues, under the lock of their cluster.
pub async fn write_unseen(
    connection: &mut PgConnection,
    cluster_id: i64,
    unseen: &[(String, QueueAmounts)],
) -> Result<(), StoreError> {
    let mut queues = QueueColumns::default();
    unseen.iter().for_each(|(path, unseen)| queues.push(cluster_id, path, *unseen));
    sqlx::query(
        "-- external_snapshot::write_unseen
        INSERT INTO linkis_external_queue (cluster_id, path, unseen_memory, unseen_cores)
        SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[])
        ON CONFLICT (cluster_id, path) DO UPDATE
            SET unseen_memory = excluded.unseen_memory, unseen_cores = excluded.unseen_cores",
    )
    .bind(queues.cluster_id)
    .bind(queues.path)
    .bind(queues.memory)
    .bind(queues.cores)
    .execute(connection)
    .await?;
    Ok(())
}
