//! `linkis_external_refresh`, `linkis_external_snapshot` and `linkis_external_application`: who asks a cluster, and what it shows; and how a
//! snapshot comes into force.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use sqlx::{Connection as _, PgConnection, PgExecutor};
use time::OffsetDateTime;
use tokio_stream::StreamExt as _;
use uuid::Uuid;

use crate::domain::{
    external::{CheckRules, Preparation, Snapshot},
    provider::Provider,
    queue::{Naming, Queue, QueueAmounts, Queues},
};

use super::{
    StoreError,
    external_queue::{self, ClusterRow, QueueColumns},
    external_ticket,
    rows::labels_json,
    session,
};

/// For how long one instance asks: longer than all that it does takes, and how long it takes to notice that it died.
pub const LEASE: Duration = Duration::from_secs(20);

/// How long a snapshot that comes into force waits for those who count.
const INSTALL_WAIT: Duration = Duration::from_secs(2);

/// How many tickets may have changed between the last look and the lock: what two batches change. Of more, it is looked again.
const CAUGHT_UP_MAX: i64 = 1024;

/// How many tickets that have changed one look reads.
const CATCH_UP_PAGE: i64 = 2000;

/// How many rows one statement removes.
const REMOVED_MAX: i64 = 5000;

/// The same of rows that others may be about to write.
const UNUSED_MAX: i64 = 100;

/// Says of a cluster what its provider says, new or not: it is asked at once.
pub async fn put(
    connection: &mut PgConnection,
    provider: &Provider,
    etag: Uuid,
    rules: &CheckRules,
) -> Result<(), StoreError> {
    let millis = |duration: time::Duration| i64::try_from(duration.whole_milliseconds()).unwrap_or(i64::MAX);
    session::hurried(&mut *connection, INSTALL_WAIT).await?;
    sqlx::query(
        "-- external_refresh::put
        WITH put AS (
            INSERT INTO linkis_external_cluster
                (resource_type, name, labels, etag, when_away, max_age, last_known_for, refresh_interval)
            VALUES ($1, $2, $3::jsonb, $4, $5, $6, $7, $8)
            ON CONFLICT (resource_type, name) DO UPDATE SET labels = excluded.labels, etag = excluded.etag,
                when_away = excluded.when_away, max_age = excluded.max_age, last_known_for = excluded.last_known_for,
                refresh_interval = excluded.refresh_interval
            RETURNING cluster_id)
        INSERT INTO linkis_external_refresh (cluster_id, next_refresh) SELECT cluster_id, clock_timestamp() FROM put
        ON CONFLICT (cluster_id) DO UPDATE
            SET next_refresh = excluded.next_refresh, lease = NULL, leased_until = NULL, failures = 0",
    )
    .bind(provider.resource_type.as_str())
    .bind(provider.name.as_str())
    .bind(labels_json(&provider.labels))
    .bind(etag)
    .bind(rules.when_away.as_str())
    .bind(millis(rules.max_age))
    .bind(millis(rules.last_known_for))
    .bind(millis(rules.refresh_interval))
    .execute(connection)
    .await?;
    Ok(())
}

/// A cluster counts nothing any more; what was counted is removed by [`clean`].
pub async fn delete(connection: &mut PgConnection, resource_type: &str, name: &str) -> Result<(), StoreError> {
    session::hurried(&mut *connection, INSTALL_WAIT).await?;
    sqlx::query(
        "-- external_refresh::delete
        WITH gone AS (
            DELETE FROM linkis_external_cluster WHERE resource_type = $1 AND name = $2 RETURNING cluster_id)
        UPDATE linkis_external_refresh r SET gone = true, lease = NULL, leased_until = NULL, next_refresh = clock_timestamp()
        FROM gone WHERE r.cluster_id = gone.cluster_id",
    )
    .bind(resource_type)
    .bind(name)
    .execute(connection)
    .await?;
    Ok(())
}

/// Which clusters are said of which providers, by type, name and etag.
pub async fn known(executor: impl PgExecutor<'_>) -> Result<Vec<(String, String, Uuid)>, StoreError> {
    Ok(sqlx::query_as(
        "-- external_refresh::known
        SELECT resource_type, name, etag FROM linkis_external_cluster ORDER BY resource_type, name",
    )
    .fetch_all(executor)
    .await?)
}

/// The clusters that are to be asked now.
pub async fn due(executor: impl PgExecutor<'_>) -> Result<Vec<i64>, StoreError> {
    Ok(sqlx::query_scalar(
        "-- external_refresh::due
        SELECT cluster_id FROM linkis_external_refresh
        WHERE next_refresh <= clock_timestamp() AND (leased_until IS NULL OR leased_until < clock_timestamp())",
    )
    .fetch_all(executor)
    .await?)
}

/// Takes the lease on asking a cluster; answers with the database's clock, and whether it is gone; `None` if another has the lease, or it is
/// not due.
pub async fn take(
    executor: impl PgExecutor<'_>,
    cluster_id: i64,
    lease: Uuid,
) -> Result<Option<(OffsetDateTime, bool)>, StoreError> {
    Ok(sqlx::query_as(
        "-- external_refresh::take
        UPDATE linkis_external_refresh SET lease = $2, leased_until = clock_timestamp() + make_interval(secs => $3)
        WHERE cluster_id = $1 AND next_refresh <= clock_timestamp()
            AND (leased_until IS NULL OR leased_until < clock_timestamp())
        RETURNING clock_timestamp(), gone",
    )
    .bind(cluster_id)
    .bind(lease)
    .bind(LEASE.as_secs_f64())
    .fetch_optional(executor)
    .await?)
}

/// It was asked in vain; answers how often that was so, one after another. Asked again after `pause`, or `long` once that was so three
/// times.
pub async fn failed(
    executor: impl PgExecutor<'_>,
    cluster_id: i64,
    lease: Uuid,
    pause: Duration,
    long: Duration,
) -> Result<Option<i32>, StoreError> {
    Ok(sqlx::query_scalar(
        "-- external_refresh::failed
        UPDATE linkis_external_refresh SET lease = NULL, leased_until = NULL, failures = failures + 1,
            next_refresh = clock_timestamp() + make_interval(secs => CASE WHEN failures < 2 THEN $3 ELSE $4 END)
        WHERE cluster_id = $1 AND lease = $2 RETURNING failures",
    )
    .bind(cluster_id)
    .bind(lease)
    .bind(pause.as_secs_f64())
    .bind(long.as_secs_f64())
    .fetch_optional(executor)
    .await?)
}

/// Writes what a snapshot says, by which nobody judges yet; answers its number.
pub async fn write(connection: &mut PgConnection, cluster_id: i64, snapshot: &Snapshot) -> Result<i64, StoreError> {
    let mut transaction = connection.begin().await?;
    let generation: i64 = sqlx::query_scalar(
        "-- external_refresh::write, its number
        SELECT nextval('linkis_external_generation')",
    )
    .fetch_one(&mut *transaction)
    .await?;
    let queues: Vec<&Queue> = snapshot.queues.behind(None).collect();
    sqlx::query(
        "-- external_refresh::write
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
    .execute(&mut *transaction)
    .await?;
    let shown: Vec<(&String, &QueueAmounts)> =
        snapshot.shown().iter().filter(|(_, amounts)| **amounts != QueueAmounts::default()).collect();
    if !shown.is_empty() {
        sqlx::query(
            "-- external_refresh::write, the applications
            INSERT INTO linkis_external_application (cluster_id, generation, application_id, memory, cores)
            SELECT $1, $2, * FROM unnest($3::text[], $4::bigint[], $5::bigint[])",
        )
        .bind(cluster_id)
        .bind(generation)
        .bind(shown.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>())
        .bind(shown.iter().map(|(_, amounts)| amounts.memory).collect::<Vec<_>>())
        .bind(shown.iter().map(|(_, amounts)| amounts.cores).collect::<Vec<_>>())
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(generation)
}

/// What is counted of a cluster at one moment, and what a snapshot would leave unseen then.
#[derive(Debug)]
pub struct Prepared {
    /// How many changes there were.
    changes: i64,
    /// What is stored, by path: as it was then or later.
    stored: BTreeMap<String, QueueAmounts>,
    /// What a snapshot leaves.
    pub preparation: Preparation,
}

/// Looks at all live tickets of a cluster, in no lock that anybody waits for; `None` if it is gone.
pub async fn prepare(
    connection: &mut PgConnection,
    cluster_id: i64,
    snapshot: Arc<Snapshot>,
) -> Result<Option<Prepared>, StoreError> {
    let mut transaction = connection.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    session::thorough(&mut transaction).await?;
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
    Ok(Some(Prepared { changes, stored, preparation }))
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
    let is_page = i64::try_from(changed.len()).is_ok_and(|changed| changed == CATCH_UP_PAGE);
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
        "-- external_refresh::stored_of
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
        "-- external_refresh::stored
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
        "-- external_refresh::from_tickets
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

/// Takes the lease on a cluster from whoever has it.
pub async fn take_back(executor: impl PgExecutor<'_>, cluster_id: i64) -> Result<(), StoreError> {
    sqlx::query(
        "-- external_refresh::take_back
        UPDATE linkis_external_refresh SET lease = NULL, leased_until = NULL WHERE cluster_id = $1",
    )
    .bind(cluster_id)
    .execute(executor)
    .await?;
    Ok(())
}

/// How it ended that a snapshot was to come into force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Installed {
    /// It is in force.
    InForce,
    /// Too much has changed since it was prepared.
    Outrun,
    /// A later one is, or the lease was lost, or the cluster is gone.
    Superseded,
}

/// Brings a snapshot into force that was prepared, and gives the lease back: under the lock of the cluster, for which all wait who ask for
/// its queues. So it is held for two short statements, whose size is that of what has changed since the last look, or is shown otherwise.
pub async fn install(
    connection: &mut PgConnection,
    cluster_id: i64,
    lease: Uuid,
    generation: i64,
    prepared: &mut Prepared,
) -> Result<Installed, StoreError> {
    let mut transaction = connection.begin().await?;
    // Nor for the disk: if it is lost, so is all that was judged by it, because that is committed behind it.
    sqlx::query(
        "-- external_refresh::install, without waiting
        SELECT set_config('lock_timeout', $1, true), set_config('synchronous_commit', 'off', true)",
    )
    .bind(format!("{}ms", INSTALL_WAIT.as_millis()))
    .execute(&mut *transaction)
    .await?;
    let rows = external_queue::clusters(&mut *transaction, &[cluster_id].into(), true).await?;
    let snapshot = prepared.preparation.rooms().snapshot();
    let (begun, by_last_name) = (snapshot.begun, snapshot.queues.naming() == Naming::Capacity);
    if rows.first().is_none_or(|row| row.begun().is_some_and(|in_force| in_force >= begun)) {
        return Ok(Installed::Superseded);
    }
    let changed = external_ticket::changed(&mut *transaction, cluster_id, prepared.changes, CAUGHT_UP_MAX + 1).await?;
    if i64::try_from(changed.len()).is_ok_and(|changed| changed > CAUGHT_UP_MAX) {
        return Ok(Installed::Outrun);
    }
    changed.iter().for_each(|delta| prepared.preparation.catch_up(delta));
    let differing = prepared.preparation.differing(&prepared.stored);
    let mut queues = QueueColumns::default();
    differing.iter().for_each(|(path, unseen)| queues.push(cluster_id, path, *unseen));
    let installed = sqlx::query(
        "-- external_refresh::install
        WITH unseen AS (
            INSERT INTO linkis_external_queue (cluster_id, path, unseen_memory, unseen_cores)
            SELECT * FROM unnest($6::bigint[], $7::text[], $8::bigint[], $9::bigint[])
            ON CONFLICT (cluster_id, path) DO UPDATE
                SET unseen_memory = excluded.unseen_memory, unseen_cores = excluded.unseen_cores),
        in_force AS (
            UPDATE linkis_external_cluster SET generation = $2, begun = $3, by_last_name = $4 WHERE cluster_id = $1
            RETURNING refresh_interval)
        UPDATE linkis_external_refresh SET lease = NULL, leased_until = NULL, failures = 0,
            next_refresh = clock_timestamp() + make_interval(secs => in_force.refresh_interval / 1000.0)
        FROM in_force WHERE cluster_id = $1 AND lease = $5",
    )
    .bind(cluster_id)
    .bind(generation)
    .bind(begun)
    .bind(by_last_name)
    .bind(lease)
    .bind(queues.cluster_id)
    .bind(queues.path)
    .bind(queues.memory)
    .bind(queues.cores)
    .execute(&mut *transaction)
    .await?;
    if installed.rows_affected() != 1 {
        // The lease is another's: nothing of this stays.
        return Ok(Installed::Superseded);
    }
    transaction.commit().await?;
    Ok(Installed::InForce)
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
        "-- external_refresh::write_unseen
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

/// Removes some of what nobody needs any more of a cluster while its lease is held: what snapshots before the last two said, tickets that
/// ended, and queues without any. True if there may be more.
pub async fn clean(connection: &mut PgConnection, cluster_id: i64) -> Result<bool, StoreError> {
    // Whoever looked at the last one may still be reading it.
    let removed: i64 = sqlx::query_scalar(
        "-- external_refresh::clean
        WITH old AS MATERIALIZED (SELECT generation FROM linkis_external_snapshot
                WHERE cluster_id = $1
                    AND generation < (SELECT c.generation FROM linkis_external_cluster c WHERE c.cluster_id = $1)
                ORDER BY cluster_id DESC, generation DESC LIMIT 1),
            queues AS (DELETE FROM linkis_external_snapshot WHERE ctid = ANY (ARRAY (SELECT s.ctid
                FROM linkis_external_snapshot s WHERE s.cluster_id = $1 AND s.generation < (SELECT generation FROM old) LIMIT $2))
                RETURNING 1),
            applications AS (DELETE FROM linkis_external_application WHERE ctid = ANY (ARRAY (SELECT s.ctid
                FROM linkis_external_application s WHERE s.cluster_id = $1 AND s.generation < (SELECT generation FROM old) LIMIT $2))
                RETURNING 1),
            tickets AS (DELETE FROM linkis_external_ticket WHERE ticket_id = ANY (ARRAY (SELECT ticket_id
                FROM linkis_external_ticket WHERE cluster_id = $1 AND ended LIMIT $2)) AND ended RETURNING 1)
        SELECT greatest((SELECT count(*) FROM queues), (SELECT count(*) FROM applications), (SELECT count(*) FROM tickets))",
    )
    .bind(cluster_id)
    .bind(REMOVED_MAX)
    .fetch_one(&mut *connection)
    .await?;
    // By themselves, and few: whoever is granted something in one of them just now waits for this.
    let unused = sqlx::query(
        "-- external_refresh::clean, queues without any
        DELETE FROM linkis_external_queue WHERE ctid = ANY (ARRAY (SELECT ctid FROM linkis_external_queue
            WHERE cluster_id = $1 AND unseen_memory = 0 AND unseen_cores = 0 LIMIT $2 FOR UPDATE SKIP LOCKED))",
    );
    let unused = unused.bind(cluster_id).bind(UNUSED_MAX).execute(connection).await?;
    Ok(removed == REMOVED_MAX || i64::try_from(unused.rows_affected()).is_ok_and(|removed| removed == UNUSED_MAX))
}

/// Removes some of what was counted of a cluster that is gone, and with the rest all that is known of it. True if there may be more.
pub async fn clean_gone(connection: &mut PgConnection, cluster_id: i64, lease: Uuid) -> Result<bool, StoreError> {
    let mut more = false;
    macro_rules! remove {
        ($($table:literal),*) => {$(
            let removed = sqlx::query(concat!(
                "-- external_refresh::clean_gone
                DELETE FROM ", $table, " WHERE ctid = ANY (ARRAY (
                    SELECT ctid FROM ", $table, " WHERE cluster_id = $1 LIMIT $2)) AND cluster_id = $1"
            ))
            .bind(cluster_id)
            .bind(REMOVED_MAX)
            .execute(&mut *connection)
            .await?;
            more |= i64::try_from(removed.rows_affected()).is_ok_and(|removed| removed == REMOVED_MAX);
        )*};
    }
    remove!(
        "linkis_external_snapshot",
        "linkis_external_application",
        "linkis_external_queue",
        "linkis_external_ticket"
    );
    if !more {
        sqlx::query(
            "-- external_refresh::clean_gone, the last
            DELETE FROM linkis_external_refresh WHERE cluster_id = $1 AND lease = $2 AND gone",
        )
        .bind(cluster_id)
        .bind(lease)
        .execute(connection)
        .await?;
    }
    Ok(more)
}
