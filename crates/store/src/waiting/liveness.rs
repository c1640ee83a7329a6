//! Liveness of instances with waiters, in `linkis_rm_instance`.
//!
//! An instance renews its row, and stores the PostgreSQL processes of two of its connections. It is dead if the row has expired.
//! If both processes have ended, a row without a renewal for [`RENEWAL`] expires at once. Callers: `rm_service::waiting`.

use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::StoreError;

use super::{ALIVE, OVERDUE, RENEWAL};

/// The PostgreSQL process of the connection on which an instance listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerProcess {
    pid: i32,
    start: OffsetDateTime,
}

/// Returns the process of a connection; `None` if PostgreSQL hides it, as from a session under another role.
pub async fn listener_process(executor: impl PgExecutor<'_>) -> Result<Option<ListenerProcess>, StoreError> {
    let process = "-- waiting::listener_process
        SELECT pid, backend_start FROM pg_stat_get_activity(pg_backend_pid())";
    let (pid, start): (i32, Option<OffsetDateTime>) = sqlx::query_as(process).fetch_one(executor).await?;
    Ok(start.map(|start| ListenerProcess { pid, start }))
}

/// Lets the rows of other instances expire that have missed a renewal, and whose processes have both ended. The kernel closes the
/// connections of a killed instance at once; those of a machine that fails stay open, and the row expires by itself. A living
/// instance that lost both connections connects again for its next renewal. Returns the number of instances.
pub async fn end_dead_instances(executor: impl PgExecutor<'_>, instance_id: Uuid) -> Result<u64, StoreError> {
    let ended = sqlx::query(
        "-- waiting::end_dead_instances
        UPDATE linkis_rm_instance i SET alive_until = clock_timestamp() - make_interval(secs => $2)
        WHERE instance_id <> $1 AND alive_until BETWEEN clock_timestamp() AND clock_timestamp() + make_interval(secs => $3)
            AND server_start = pg_postmaster_start_time()
            AND NOT EXISTS (SELECT FROM pg_stat_get_activity(i.listener_pid) a
                WHERE a.backend_start IS NULL OR a.backend_start = i.listener_start)
            AND NOT EXISTS (SELECT FROM pg_stat_get_activity(i.renewer_pid) a
                WHERE a.backend_start IS NULL OR a.backend_start = i.renewer_start)",
    );
    let ended = ended.bind(instance_id).bind(OVERDUE.as_secs_f64()).bind((ALIVE - RENEWAL).as_secs_f64());
    Ok(ended.execute(executor).await?.rows_affected())
}

/// Returns whether an instance has been dead for `OVERDUE` and may have left entries. False while `instance_id` itself
/// is late, unless it was idle.
pub async fn is_any_dead(executor: impl PgExecutor<'_>, instance_id: Uuid, was_idle: bool) -> Result<bool, StoreError> {
    Ok(sqlx::query_scalar(
        "-- waiting::is_any_dead
        SELECT EXISTS (SELECT FROM linkis_rm_instance
                WHERE alive_until < clock_timestamp() - make_interval(secs => $2) AND instance_id <> $1)
            AND ($3 OR NOT EXISTS (SELECT FROM linkis_rm_instance WHERE instance_id = $1 AND alive_until < clock_timestamp()))",
    )
    .bind(instance_id)
    .bind(OVERDUE.as_secs_f64())
    .bind(was_idle)
    .fetch_one(executor)
    .await?)
}

/// Renews the liveness row of an instance. A late renewal means that the database was unavailable, unless the instance was
/// idle: no request waited there, and none was due. The renewal then also extends the instances that were alive at the
/// previous renewal, so that their waiters keep their positions.
pub async fn keep_alive(
    executor: impl PgExecutor<'_>,
    instance_id: Uuid,
    listener: Option<ListenerProcess>,
    was_idle: bool,
) -> Result<(), StoreError> {
    sqlx::query(
        "-- waiting::keep_alive
        WITH late AS (
            SELECT alive_until FROM linkis_rm_instance WHERE instance_id = $1 AND alive_until < clock_timestamp() AND NOT $4),
        others AS (
            UPDATE linkis_rm_instance i SET alive_until = clock_timestamp() + make_interval(secs => $2)
            FROM late WHERE i.instance_id <> $1 AND i.alive_until >= late.alive_until - make_interval(secs => $3)),
        -- Without a listener, no process is stored.
        processes AS (
            SELECT $5 AS listener_pid, $6 AS listener_start, a.pid AS renewer_pid, a.backend_start AS renewer_start,
                pg_postmaster_start_time() AS server_start
            FROM pg_stat_get_activity(pg_backend_pid()) a WHERE $5 IS NOT NULL)
        INSERT INTO linkis_rm_instance
            (instance_id, alive_until, listener_pid, listener_start, renewer_pid, renewer_start, server_start)
        SELECT $1, clock_timestamp() + make_interval(secs => $2), p.*
        FROM (SELECT) one LEFT JOIN processes p ON true
        ON CONFLICT (instance_id) DO UPDATE SET alive_until = excluded.alive_until, listener_pid = excluded.listener_pid,
            listener_start = excluded.listener_start, renewer_pid = excluded.renewer_pid,
            renewer_start = excluded.renewer_start, server_start = excluded.server_start",
    )
    .bind(instance_id)
    .bind(ALIVE.as_secs_f64())
    .bind(RENEWAL.as_secs_f64())
    .bind(was_idle)
    .bind(listener.map(|listener| listener.pid))
    .bind(listener.map(|listener| listener.start))
    .execute(executor)
    .await?;
    Ok(())
}
