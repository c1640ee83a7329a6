//! `linkis_queue_priority`: the priority rules. Callers: the limits, and changes of the rules.

use sqlx::{PgConnection, PgExecutor};

use rm_model::{
    limit::LabelPattern,
    priority::{Priorities, PriorityRule},
};

use super::{
    StoreError, expect_rows,
    limit::{pattern, pattern_json},
    rows::{TableName, hash},
};

const TABLE: TableName = TableName("linkis_queue_priority");

/// Returns all rules.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<Priorities, StoreError> {
    let rows: Vec<(String, i16, i16)> = sqlx::query_as(
        "-- queue_priority::read
        SELECT pattern::text, default_priority, max_priority FROM linkis_queue_priority",
    )
    .fetch_all(executor)
    .await?;
    let rule = |(json, default, max): (String, i16, i16)| Ok(PriorityRule { pattern: pattern(&json)?, default, max });
    Ok(Priorities::new(rows.into_iter().map(rule).collect::<Result<Vec<_>, StoreError>>()?))
}

/// Inserts a rule, or replaces the one with the same pattern.
///
/// # Errors
/// [`StoreError::RowCount`]; database errors.
pub async fn upsert(connection: &mut PgConnection, rule: &PriorityRule) -> Result<(), StoreError> {
    let json = pattern_json(&rule.pattern);
    let done = sqlx::query(
        "-- queue_priority::upsert
        INSERT INTO linkis_queue_priority (pattern_hash, pattern, default_priority, max_priority)
        VALUES ($1, $2::jsonb, $3, $4)
        ON CONFLICT (pattern_hash) DO UPDATE SET default_priority = excluded.default_priority,
            max_priority = excluded.max_priority",
    )
    .bind(hash(&json).to_vec())
    .bind(&json)
    .bind(rule.default)
    .bind(rule.max)
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, 1, done.rows_affected())
}

/// Deletes the rule of `pattern`.
///
/// # Errors
/// [`StoreError::RowCount`] if it does not exist; database errors.
pub async fn delete(connection: &mut PgConnection, pattern: &LabelPattern) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- queue_priority::delete
        DELETE FROM linkis_queue_priority WHERE pattern_hash = $1",
    )
    .bind(hash(&pattern_json(pattern)).to_vec())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, 1, done.rows_affected())
}
