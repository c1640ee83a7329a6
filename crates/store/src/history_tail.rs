//! Live end of the history, where lines can still appear between others. A line takes its number before its commit, and
//! commits occur in any order. Read-only. Callers: followers and the roll-up of use.

use std::collections::HashSet;

use sqlx::PgExecutor;

use super::StoreError;

/// Returns the last number that was assigned, also if its line was never committed.
pub async fn last_number(executor: impl PgExecutor<'_>) -> Result<i64, StoreError> {
    let last = sqlx::query_scalar(
        "-- history_end::last_number
        SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM linkis_resource_action_record_id_seq",
    )
    .fetch_one(executor)
    .await?;
    Ok(last)
}

/// Returns the transactions that may have line numbers and have not ended, by names that later transactions do not
/// reuse. Every writer locks the table (ROW EXCLUSIVE) before its first insert and until its lines are visible.
pub async fn writers(executor: impl PgExecutor<'_>) -> Result<HashSet<String>, StoreError> {
    let names: Vec<String> = sqlx::query_scalar(
        "-- history_end::writers
        SELECT virtualtransaction FROM pg_locks
        WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted
            AND relation = 'linkis_resource_action_record'::regclass
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
    )
    .fetch_all(executor)
    .await?;
    Ok(names.into_iter().collect())
}
