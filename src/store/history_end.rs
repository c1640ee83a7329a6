//! The live end of the history, where lines may still come between others: a line takes its number before it is committed, and which
//! commits first is nobody's to say.

use std::collections::HashSet;

use sqlx::PgExecutor;

use super::StoreError;

/// The last number that was given out, whatever became of its line.
pub async fn last_number(executor: impl PgExecutor<'_>) -> Result<i64, StoreError> {
    let last = sqlx::query_scalar(
        "-- history_end::last_number
        SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM linkis_resource_action_record_id_seq",
    )
    .fetch_one(executor)
    .await?;
    Ok(last)
}

/// The transactions that may have been given numbers and are not over, by names that no later ones have: whoever writes into a table
/// locks it, in a mode that keeps out no other writer, before anything else and until its lines are seen by all.
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
