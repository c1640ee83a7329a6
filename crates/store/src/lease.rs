//! `linkis_rm_lease`: leases that select one instance for each task that only one instance runs.
//!
//! An instance that stops renewing loses its lease after [`LEASE`]; another instance can then take it. Caller: the
//! background tasks of `rm-service`.

use std::time::Duration;

use sqlx::PgExecutor;
use uuid::Uuid;

use super::StoreError;

/// Duration of a lease that is not renewed.
pub const LEASE: Duration = Duration::from_secs(5);

/// Takes or renews a lease. Returns false if another instance has it.
pub async fn hold(executor: impl PgExecutor<'_>, name: &str, instance_id: Uuid) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- lease::hold
        INSERT INTO linkis_rm_lease AS l (name, instance_id, held_until)
        VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3))
        ON CONFLICT (name) DO UPDATE SET instance_id = excluded.instance_id, held_until = excluded.held_until
            WHERE l.instance_id = excluded.instance_id OR l.held_until < clock_timestamp()",
    )
    .bind(name)
    .bind(instance_id)
    .bind(LEASE.as_secs_f64())
    .execute(executor)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Releases a lease, so that another instance need not wait for its expiry.
pub async fn give_back(executor: impl PgExecutor<'_>, name: &str, instance_id: Uuid) -> Result<(), StoreError> {
    sqlx::query(
        "-- lease::give_back
        DELETE FROM linkis_rm_lease WHERE name = $1 AND instance_id = $2",
    )
    .bind(name)
    .bind(instance_id)
    .execute(executor)
    .await?;
    Ok(())
}
