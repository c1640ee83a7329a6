//! `linkis_external_refresh`: per cluster the lease on its refresh, its next due time, and the deletion of old data.
//!
//! The lease lets one instance at a time fetch a cluster. An instance that keeps its counts from the last snapshot is
//! preferred, because it reads less. Never: deletes an unbounded number of rows in one statement.
//! Callers: the refresh task and provider changes.

use std::time::{Duration, Instant};

use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{external::CheckRules, provider::Provider};

use super::{
    StoreError,
    rows::{TableName, TableRow, labels_json},
    session,
};

const TABLE: TableName = TableName("linkis_external_refresh");

/// Duration of the lease. Longer than a refresh takes; another instance takes over after it if the owner dies.
pub const LEASE: Duration = Duration::from_secs(20);

/// Maximum time that the installation of a snapshot waits for batches.
pub(super) const INSTALL_WAIT: Duration = Duration::from_secs(2);

/// Time for which a due cluster is left to the instance that keeps its counts.
const KEEPERS_FIRST: Duration = Duration::from_secs(1);

/// Maximum number of rows that one statement deletes.
const REMOVED_MAX: i64 = 200;

/// Maximum number of queue rows that one statement deletes: batches may be about to write them.
const UNUSED_MAX: i64 = 100;

/// Maximum rest between pieces of work, so that rests on a slow database stay short.
const REST_MAX: Duration = Duration::from_millis(10);

/// Runs a piece of background work, then rests for about its duration, up to `REST_MAX`.
pub(super) async fn resting_as_long<T>(piece: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let done = piece.await;
    tokio::time::sleep(begun.elapsed().min(REST_MAX)).await;
    done
}

/// Inserts or updates a cluster from its provider. The cluster becomes due immediately.
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

/// Deletes a cluster. [`clean_gone`] deletes its data later.
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

/// Returns type, name and provider etag of all clusters.
pub async fn known(executor: impl PgExecutor<'_>) -> Result<Vec<(String, String, Uuid)>, StoreError> {
    Ok(sqlx::query_as(
        "-- external_refresh::known
        SELECT resource_type, name, etag FROM linkis_external_cluster ORDER BY resource_type, name",
    )
    .fetch_all(executor)
    .await?)
}

/// State of a cluster's refresh.
#[derive(Debug, Clone, Copy)]
pub struct RefreshRow {
    /// Cluster id.
    pub cluster_id: i64,
    /// The present or last lease; `None` after a change that ticket changes do not show, which makes kept counts
    /// invalid.
    pub lease: Option<Uuid>,
    /// Whether this instance is to refresh the cluster now.
    pub is_due: bool,
}

/// Returns the refresh state of all clusters. A due cluster is left for `KEEPERS_FIRST` to the instance with its last
/// lease; `kept` are the leases of this instance.
pub async fn all(executor: impl PgExecutor<'_>, kept: &[Uuid]) -> Result<Vec<RefreshRow>, StoreError> {
    let rows = sqlx::query(
        "-- external_refresh::all
        SELECT cluster_id, lease, next_refresh <= clock_timestamp()
            AND (lease IS NULL OR leased_until < clock_timestamp())
            AND (lease IS NULL OR leased_until > '-infinity' OR lease = ANY ($1)
                OR next_refresh <= clock_timestamp() - make_interval(secs => $2)) AS is_due
        FROM linkis_external_refresh",
    )
    .bind(kept)
    .bind(KEEPERS_FIRST.as_secs_f64())
    .fetch_all(executor)
    .await?;
    let refresh = |row: TableRow<'_>| {
        Ok(RefreshRow { cluster_id: row.get("cluster_id")?, lease: row.get("lease")?, is_due: row.get("is_due")? })
    };
    TABLE.parse(&rows, refresh)
}

/// Lease on the refresh of a cluster.
#[derive(Debug, Clone, Copy)]
pub struct RefreshLease {
    /// Time of taking the lease, by the clock of the database.
    pub begun: OffsetDateTime,
    /// Whether the provider was deleted.
    pub is_gone: bool,
    /// Previous lease.
    pub before: Option<Uuid>,
}

/// Takes the lease on a due cluster. `None` if another instance has it, or the cluster is not due.
pub async fn take(
    executor: impl PgExecutor<'_>,
    cluster_id: i64,
    lease: Uuid,
) -> Result<Option<RefreshLease>, StoreError> {
    let taken: Option<(OffsetDateTime, bool, Option<Uuid>)> = sqlx::query_as(
        "-- external_refresh::take
        UPDATE linkis_external_refresh r SET lease = $2, leased_until = clock_timestamp() + make_interval(secs => $3)
        FROM (SELECT cluster_id, lease FROM linkis_external_refresh WHERE cluster_id = $1 FOR UPDATE) before
        WHERE r.cluster_id = before.cluster_id AND r.next_refresh <= clock_timestamp()
            AND (r.leased_until IS NULL OR r.leased_until < clock_timestamp())
        RETURNING clock_timestamp() AS begun, r.gone AS is_gone, before.lease AS before",
    )
    .bind(cluster_id)
    .bind(lease)
    .bind(LEASE.as_secs_f64())
    .fetch_optional(executor)
    .await?;
    Ok(taken.map(|(begun, is_gone, before)| RefreshLease { begun, is_gone, before }))
}

/// Records a failed refresh and ends the lease. Returns the number of consecutive failures; `None` if the lease was
/// lost.
///
/// The next refresh is due after `pause`, from the third failure on after `long`. The lease remains as the mark of kept
/// counts if `keeps` is set.
pub async fn failed(
    executor: impl PgExecutor<'_>,
    cluster_id: i64,
    lease: Uuid,
    [pause, long]: [Duration; 2],
    keeps: bool,
) -> Result<Option<i32>, StoreError> {
    Ok(sqlx::query_scalar(
        "-- external_refresh::failed
        UPDATE linkis_external_refresh SET lease = CASE WHEN $5 THEN lease END,
            leased_until = CASE WHEN $5 THEN '-infinity'::timestamptz END, failures = failures + 1,
            next_refresh = clock_timestamp() + make_interval(secs => CASE WHEN failures < 2 THEN $3 ELSE $4 END)
        WHERE cluster_id = $1 AND lease = $2 RETURNING failures",
    )
    .bind(cluster_id)
    .bind(lease)
    .bind(pause.as_secs_f64())
    .bind(long.as_secs_f64())
    .bind(keeps)
    .fetch_optional(executor)
    .await?)
}

/// Revokes the lease on a cluster and invalidates all kept counts.
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

/// Deletes old data of a cluster under its lease. Old are snapshots before the last two, tickets that ended by the
/// change `known`, and queues without unseen use. Returns whether more may exist.
pub async fn clean(connection: &mut PgConnection, cluster_id: i64, known: i64) -> Result<bool, StoreError> {
    // The previous snapshot stays: a check may still be reading it.
    let removed = sqlx::query_scalar(
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
                FROM linkis_external_ticket WHERE cluster_id = $1 AND ended AND change <= $3 LIMIT $2)) AND ended RETURNING 1)
        SELECT greatest((SELECT count(*) FROM queues), (SELECT count(*) FROM applications), (SELECT count(*) FROM tickets))",
    )
    .bind(cluster_id)
    .bind(REMOVED_MAX)
    .bind(known)
    .fetch_one(&mut *connection);
    let removed: i64 = resting_as_long(removed).await?;
    // A separate, small statement: a grant in one of these queues waits for it.
    let unused = sqlx::query(
        "-- external_refresh::clean, queues without any
        DELETE FROM linkis_external_queue WHERE ctid = ANY (ARRAY (SELECT ctid FROM linkis_external_queue
            WHERE cluster_id = $1 AND unseen_memory = 0 AND unseen_cores = 0 LIMIT $2 FOR UPDATE SKIP LOCKED))",
    );
    let unused = unused.bind(cluster_id).bind(UNUSED_MAX).execute(connection).await?;
    Ok(removed == REMOVED_MAX || i64::try_from(unused.rows_affected()).is_ok_and(|removed| removed == UNUSED_MAX))
}

/// Deletes data of a removed cluster, and at last its refresh row. Returns whether more may exist.
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
