//! `linkis_queue_order`: the order of waiting requests, one row. Callers: the limits, and changes of the order.

use std::time::Duration;

use sqlx::{PgConnection, PgExecutor};

use rm_model::order::{FairBy, QueueOrder};

use super::{StoreError, expect_rows, rows::TableName};

const TABLE: TableName = TableName("linkis_queue_order");

/// Returns the order.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<QueueOrder, StoreError> {
    let (fair_by, kept): (Vec<String>, i32) = sqlx::query_as(
        "-- queue_order::read
        SELECT fair_by, position_kept_ms FROM linkis_queue_order WHERE only_row",
    )
    .fetch_one(executor)
    .await?;
    let position_kept = Duration::from_millis(u64::try_from(kept).unwrap_or_default());
    Ok(QueueOrder { fair_by: FairBy::new(fair_by), position_kept })
}

/// Replaces the order.
///
/// # Errors
/// [`StoreError::RowCount`] if the row is missing; database errors.
pub async fn replace(connection: &mut PgConnection, order: &QueueOrder) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- queue_order::replace
        UPDATE linkis_queue_order SET fair_by = $1, position_kept_ms = $2 WHERE only_row",
    )
    .bind(order.fair_by.labels().collect::<Vec<_>>())
    .bind(i32::try_from(order.position_kept.as_millis()).unwrap_or(i32::MAX))
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, 1, done.rows_affected())
}
