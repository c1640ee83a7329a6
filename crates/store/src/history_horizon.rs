//! `linkis_resource_action_horizon`: identity of the history, and the number of the last deleted line. Callers:
//! retention and followers.

use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use super::StoreError;

/// Identity and extent of the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryHorizon {
    /// Id of the history; a new database has a new id.
    pub history_id: Uuid,
    /// Largest number of a deleted line.
    pub forgotten: i64,
}

/// Returns the present horizon.
///
/// # Errors
/// [`StoreError::Inconsistent`] if the table is empty; database errors.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<HistoryHorizon, StoreError> {
    let horizon: Option<(Uuid, i64)> = sqlx::query_as(
        "-- history_horizon::read
        SELECT history_id, forgotten FROM linkis_resource_action_horizon",
    )
    .fetch_optional(executor)
    .await?;
    let empty = || StoreError::inconsistent("linkis_resource_action_horizon", "it is empty");
    let (history_id, forgotten) = horizon.ok_or_else(empty)?;
    Ok(HistoryHorizon { history_id, forgotten })
}

/// Records that all lines before `before` are deleted, in the transaction of the deletion.
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
