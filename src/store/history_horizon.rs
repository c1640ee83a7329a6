//! `linkis_resource_action_horizon`: which history this is, and how much of it was forgotten.

use sqlx::{FromRow, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use super::StoreError;

/// How far back the history reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromRow)]
pub struct Horizon {
    /// Which history: another in every database that was put up anew.
    pub history_id: Uuid,
    /// The largest number of a line that was forgotten.
    pub forgotten: i64,
}

/// How far back it reaches now.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<Horizon, StoreError> {
    let horizon: Option<Horizon> = sqlx::query_as(
        "-- history_horizon::read
        SELECT history_id, forgotten FROM linkis_resource_action_horizon",
    )
    .fetch_optional(executor)
    .await?;
    horizon.ok_or_else(|| StoreError::inconsistent("linkis_resource_action_horizon", "it is empty"))
}

/// Lines older than this are about to be forgotten: in the transaction in which they are.
pub async fn raise(executor: impl PgExecutor<'_>, before: OffsetDateTime) -> Result<(), StoreError> {
    sqlx::query(
        "-- history_horizon::raise
        UPDATE linkis_resource_action_horizon SET forgotten = greatest(forgotten, coalesce((
            SELECT id FROM linkis_resource_action_record WHERE action_time < $1 ORDER BY id DESC LIMIT 1), 0))",
    )
    .bind(before)
    .execute(executor)
    .await?;
    Ok(())
}
