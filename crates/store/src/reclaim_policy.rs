//! `linkis_reclaim_policy`: the reclaim policies. Callers: the limits, and changes of the policies.

use std::time::Duration;

use sqlx::{PgConnection, PgExecutor};

use rm_model::{
    limit::LabelPattern,
    reclaim::{ReclaimMode, ReclaimPolicies, ReclaimPolicy},
};

use super::{
    StoreError, expect_rows,
    limit::{pattern, pattern_json},
    rows::{TableName, TableRow, hash},
};

const TABLE: TableName = TableName("linkis_reclaim_policy");

/// Returns all policies.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<ReclaimPolicies, StoreError> {
    let rows = sqlx::query(
        "-- reclaim_policy::read
        SELECT pattern::text, mode, idle_after_ms, grace_ms, per_minute, busy, min_life_ms FROM linkis_reclaim_policy",
    )
    .fetch_all(executor)
    .await?;
    Ok(ReclaimPolicies::new(TABLE.parse::<_, Vec<_>>(&rows, policy)?))
}

fn policy(row: TableRow<'_>) -> Result<ReclaimPolicy, StoreError> {
    let mode: &str = row.get("mode")?;
    let time = |column| Ok::<_, StoreError>(Duration::from_millis(u64::try_from(row.get::<i64>(column)?).unwrap_or(0)));
    Ok(ReclaimPolicy {
        pattern: pattern(row.get("pattern")?)?,
        mode: ReclaimMode::parse(mode).ok_or_else(|| StoreError::inconsistent(TABLE.0, format!("mode {mode}")))?,
        idle_after: time("idle_after_ms")?,
        grace: time("grace_ms")?,
        per_minute: u32::try_from(row.get::<i32>("per_minute")?).unwrap_or(0),
        busy: row.get("busy")?,
        min_life: time("min_life_ms")?,
    })
}

/// Inserts a policy, or replaces the one with the same pattern. Times are stored in milliseconds.
///
/// # Errors
/// [`StoreError::RowCount`]; database errors.
pub async fn upsert(connection: &mut PgConnection, policy: &ReclaimPolicy) -> Result<(), StoreError> {
    let json = pattern_json(&policy.pattern);
    let milliseconds = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    let done = sqlx::query(
        "-- reclaim_policy::upsert
        INSERT INTO linkis_reclaim_policy (pattern_hash, pattern, mode, idle_after_ms, grace_ms, per_minute, busy, min_life_ms)
        VALUES ($1, $2::jsonb, $3, $4, $5, $6, $7, $8)
        ON CONFLICT (pattern_hash) DO UPDATE SET mode = excluded.mode, idle_after_ms = excluded.idle_after_ms,
            grace_ms = excluded.grace_ms, per_minute = excluded.per_minute, busy = excluded.busy, min_life_ms = excluded.min_life_ms",
    )
    .bind(hash(&json).to_vec())
    .bind(&json)
    .bind(policy.mode.as_str())
    .bind(milliseconds(policy.idle_after))
    .bind(milliseconds(policy.grace))
    .bind(i32::try_from(policy.per_minute).unwrap_or(i32::MAX))
    .bind(policy.busy)
    .bind(milliseconds(policy.min_life))
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, 1, done.rows_affected())
}

/// Deletes the policy of `pattern`.
///
/// # Errors
/// [`StoreError::RowCount`] if it does not exist; database errors.
pub async fn delete(connection: &mut PgConnection, pattern: &LabelPattern) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- reclaim_policy::delete
        DELETE FROM linkis_reclaim_policy WHERE pattern_hash = $1",
    )
    .bind(hash(&pattern_json(pattern)).to_vec())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, 1, done.rows_affected())
}
