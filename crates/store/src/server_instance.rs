//! `linkis_rm_server`: live instances of the service, with their throughput and the state of their background tasks.
//!
//! Each instance renews its row; a row that is not renewed expires. Callers: the announcing task and the lists.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::overview::Throughput;

use super::{
    StoreError,
    rows::{TableName, TableRow},
};

/// Time for which a row counts after its renewal.
const ALIVE: Duration = Duration::from_secs(10);

/// Time after which the row of a dead instance is deleted.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// State of a background task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// Name of the task.
    pub task: String,
    /// Unix time of the last finished step in seconds, successful or not; 0 if none.
    pub last_run: f64,
    /// Unix time of the last successful step in seconds; 0 if none.
    pub last_success: f64,
    /// Lag behind the due time, in seconds.
    pub lag: f64,
    /// Number of successful steps.
    pub steps: u64,
    /// Number of failed steps.
    pub errors: u64,
    /// Error of the last failed step; `None` also in rows of earlier releases.
    #[serde(default)]
    pub last_error: Option<String>,
}

/// An instance as it announces itself.
#[derive(Debug, Clone)]
pub struct ServerInstance {
    /// Instance id; new at each start.
    pub id: Uuid,
    /// Release of the instance.
    pub version: String,
    /// Listening address.
    pub address: String,
    /// Grants and refusals per second.
    pub throughput: Throughput,
    /// States of the background tasks.
    pub tasks: Vec<TaskReport>,
}

/// Inserts or renews the row of an instance. Commits without a disk flush: after a database crash the next renewal
/// repeats it.
pub async fn announce(executor: impl PgExecutor<'_>, instance: &ServerInstance) -> Result<(), StoreError> {
    sqlx::query(
        "-- server_instance::announce
        INSERT INTO linkis_rm_server (instance_id, version, address, start_time, alive_until, grants_per_second,
            refusals_per_second, tasks)
        SELECT $1, $2, $3, clock_timestamp(), clock_timestamp() + make_interval(secs => $7), $4, $5, $6::text::jsonb
        FROM set_config('synchronous_commit', 'off', true)
        ON CONFLICT (instance_id) DO UPDATE SET alive_until = excluded.alive_until,
            grants_per_second = excluded.grants_per_second, refusals_per_second = excluded.refusals_per_second,
            tasks = excluded.tasks",
    )
    .bind(instance.id)
    .bind(&instance.version)
    .bind(&instance.address)
    .bind(instance.throughput.grants)
    .bind(instance.throughput.refusals)
    .bind(serde_json::json!(instance.tasks).to_string())
    .bind(ALIVE.as_secs_f64())
    .execute(executor)
    .await?;
    Ok(())
}

/// Deletes the rows of instances that have been dead for `FORGOTTEN`.
pub async fn delete_dead(executor: impl PgExecutor<'_>) -> Result<(), StoreError> {
    sqlx::query(
        "-- server_instance::forget_dead
        DELETE FROM linkis_rm_server WHERE instance_id = ANY (ARRAY (
            SELECT instance_id FROM linkis_rm_server WHERE alive_until < clock_timestamp() - make_interval(secs => $1)
            ORDER BY instance_id))",
    )
    .bind(FORGOTTEN.as_secs_f64())
    .execute(executor)
    .await?;
    Ok(())
}

/// Deletes the row of an instance that stops.
pub async fn deregister(executor: impl PgExecutor<'_>, instance_id: Uuid) -> Result<(), StoreError> {
    sqlx::query(
        "-- server_instance::leave
        DELETE FROM linkis_rm_server WHERE instance_id = $1",
    )
    .bind(instance_id)
    .execute(executor)
    .await?;
    Ok(())
}

/// Returns the live instances with their start times, oldest first.
pub async fn list(executor: impl PgExecutor<'_>) -> Result<Vec<(ServerInstance, OffsetDateTime)>, StoreError> {
    let rows = sqlx::query(
        "-- server_instance::list
        SELECT instance_id, version, address, start_time, grants_per_second, refusals_per_second, tasks::text
        FROM linkis_rm_server WHERE alive_until > clock_timestamp() ORDER BY instance_id",
    )
    .fetch_all(executor)
    .await?;
    let instance = |row: TableRow<'_>| {
        let instance = ServerInstance {
            id: row.get("instance_id")?,
            version: row.get("version")?,
            address: row.get("address")?,
            throughput: Throughput { grants: row.get("grants_per_second")?, refusals: row.get("refusals_per_second")? },
            tasks: row.json("tasks")?,
        };
        Ok((instance, row.get("start_time")?))
    };
    let mut instances: Vec<(_, OffsetDateTime)> = TableName("linkis_rm_server").parse(&rows, instance)?;
    instances.sort_by_key(|(_, start_time)| *start_time);
    Ok(instances)
}
