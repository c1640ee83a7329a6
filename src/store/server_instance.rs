//! `linkis_rm_server`: the instances of the service that live, and how each of them fares.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sqlx::{FromRow, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::overview::Throughput;

use super::StoreError;

/// How long an instance is taken to live without renewing its row.
const ALIVE: Duration = Duration::from_secs(10);

/// How long one that is dead is remembered.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// How a background task fares.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// Its name.
    pub task: String,
    /// When it last ended a step, well or not, in seconds since 1970; 0 if it has not yet.
    pub last_run: f64,
    /// When it last did a step well, likewise.
    pub last_success: f64,
    /// How many seconds it was behind what was due.
    pub lag: f64,
    /// How many steps it has done well.
    pub steps: u64,
    /// How many failed.
    pub errors: u64,
    /// Why the last of these did; earlier releases do not tell.
    #[serde(default)]
    pub last_error: Option<String>,
}

/// What an instance tells of itself.
#[derive(Debug, Clone)]
pub struct ServerInstance {
    /// Another whenever it starts.
    pub id: Uuid,
    /// Its release.
    pub version: String,
    /// Where it listens.
    pub address: String,
    /// What it answers to requests.
    pub throughput: Throughput,
    /// How its background tasks fare.
    pub tasks: Vec<TaskReport>,
}

/// Says that an instance lives, and how it fares. That does not wait for the disk: what a crash of the database forgets is soon said again.
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

/// Says that an instance lives that has announced itself, and when that was, by the database's clock: what a standby knows that knows
/// of this, is at least as new. Does not wait for the disk, either.
pub async fn mark(executor: impl PgExecutor<'_>, instance_id: Uuid) -> Result<Option<OffsetDateTime>, StoreError> {
    let at = sqlx::query_scalar(
        "-- server_instance::mark
        UPDATE linkis_rm_server SET alive_until = clock_timestamp() + make_interval(secs => $2)
        FROM set_config('synchronous_commit', 'off', true) WHERE instance_id = $1
        RETURNING alive_until - make_interval(secs => $2)",
    )
    .bind(instance_id)
    .bind(ALIVE.as_secs_f64())
    .fetch_optional(executor)
    .await?;
    Ok(at)
}

/// When an instance last said that it lives, as far as is known there; `None` where nobody knows of it, or where that is no standby.
pub async fn marked_on_standby(
    executor: impl PgExecutor<'_>,
    instance_id: Uuid,
) -> Result<Option<OffsetDateTime>, StoreError> {
    let at = sqlx::query_scalar(
        "-- server_instance::marked_on_standby
        SELECT alive_until - make_interval(secs => $2) FROM linkis_rm_server
        WHERE instance_id = $1 AND pg_is_in_recovery()",
    )
    .bind(instance_id)
    .bind(ALIVE.as_secs_f64())
    .fetch_optional(executor)
    .await?;
    Ok(at)
}

/// Forgets instances that died a while ago.
pub async fn forget_dead(executor: impl PgExecutor<'_>) -> Result<(), StoreError> {
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

/// An instance that stops is told of no more.
pub async fn leave(executor: impl PgExecutor<'_>, instance_id: Uuid) -> Result<(), StoreError> {
    sqlx::query(
        "-- server_instance::leave
        DELETE FROM linkis_rm_server WHERE instance_id = $1",
    )
    .bind(instance_id)
    .execute(executor)
    .await?;
    Ok(())
}

#[derive(FromRow)]
struct InstanceRow {
    instance_id: Uuid,
    version: String,
    address: String,
    start_time: OffsetDateTime,
    grants_per_second: f64,
    refusals_per_second: f64,
    tasks: String,
}

/// Those that live, the oldest first, each with when it started.
pub async fn list(executor: impl PgExecutor<'_>) -> Result<Vec<(ServerInstance, OffsetDateTime)>, StoreError> {
    let rows: Vec<InstanceRow> = sqlx::query_as(
        "-- server_instance::list
        SELECT instance_id, version, address, start_time, grants_per_second, refusals_per_second, tasks::text
        FROM linkis_rm_server WHERE alive_until > clock_timestamp() ORDER BY instance_id",
    )
    .fetch_all(executor)
    .await?;
    let instance = |row: InstanceRow| {
        let tasks =
            serde_json::from_str(&row.tasks).map_err(|error| StoreError::inconsistent("linkis_rm_server", error))?;
        let throughput = Throughput { grants: row.grants_per_second, refusals: row.refusals_per_second };
        let instance =
            ServerInstance { id: row.instance_id, version: row.version, address: row.address, throughput, tasks };
        Ok((instance, row.start_time))
    };
    let mut instances = rows.into_iter().map(instance).collect::<Result<Vec<_>, StoreError>>()?;
    instances.sort_by_key(|(_, start_time)| *start_time);
    Ok(instances)
}
