//! `linkis_label_set`: the label sets that tickets are counted by, and their states.
//!
//! A label set passes through [`LabelSetState`]: it is counted for all tickets before its limits decide, and its counters are
//! deleted after its last limit. Never: changed without the limits lock of [`super::limit`]. Callers: limit changes and
//! background tasks.

use std::collections::BTreeSet;

use sqlx::{PgConnection, PgExecutor};

use rm_model::{
    limit::{CountingRule, LabelSet},
    name::Name,
};

use super::{StoreError, expect_rows, rows::TableName};

const TABLE: TableName = TableName("linkis_label_set");

/// State of a label set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LabelSetState {
    /// Tickets are being counted; the limits do not decide yet.
    Counting,
    /// All tickets are counted; its limits decide.
    Counted,
    /// No longer counted; its counters are being deleted.
    Retired,
}

impl LabelSetState {
    fn as_str(self) -> &'static str {
        match self {
            Self::Counting => "counting",
            Self::Counted => "counted",
            Self::Retired => "retired",
        }
    }
}

/// Returns the label sets that are counted, ordered by id.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<Vec<LabelSet>, StoreError> {
    let rows: Vec<(i64, String, String, bool)> = sqlx::query_as(
        "-- label_set::read
        SELECT label_set_id, label_set::text, exempt::text, state = 'counted'
        FROM linkis_label_set WHERE state <> 'retired' ORDER BY label_set_id",
    )
    .fetch_all(executor)
    .await?;
    let set = |(id, keys, exempt, is_counted): (_, String, String, _)| {
        let keys = serde_json::from_str(&keys).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
        let exempt: Vec<String> =
            serde_json::from_str(&exempt).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
        let exempt = exempt.iter().map(|kind| TABLE.name("exempt", kind)).collect::<Result<_, _>>()?;
        Ok(LabelSet { id, counting: CountingRule { keys, exempt }, is_counted })
    };
    rows.into_iter().map(set).collect()
}

/// Returns the ids of all label sets with a row, retired ones included.
pub async fn ids(executor: impl PgExecutor<'_>) -> Result<BTreeSet<i64>, StoreError> {
    let ids: Vec<i64> = sqlx::query_scalar(
        "-- label_set::ids
        SELECT label_set_id FROM linkis_label_set",
    )
    .fetch_all(executor)
    .await?;
    Ok(ids.into_iter().collect())
}

/// Returns the ids of the label sets in `state`.
pub async fn in_state(executor: impl PgExecutor<'_>, state: LabelSetState) -> Result<Vec<i64>, StoreError> {
    Ok(sqlx::query_scalar(
        "-- label_set::in_state
        SELECT label_set_id FROM linkis_label_set WHERE state = $1 ORDER BY label_set_id",
    )
    .bind(state.as_str())
    .fetch_all(executor)
    .await?)
}

/// Inserts a label set in the state *counting*. The caller owns the limits lock.
pub async fn insert(connection: &mut PgConnection, counting: CountingRule) -> Result<LabelSet, StoreError> {
    let id = sqlx::query_scalar(
        "-- label_set::insert
        INSERT INTO linkis_label_set (label_set, exempt, state)
        VALUES ($1::text::jsonb, $2::text::jsonb, $3)
        RETURNING label_set_id",
    )
    .bind(serde_json::json!(counting.keys).to_string())
    .bind(serde_json::json!(counting.exempt.iter().map(Name::as_str).collect::<Vec<_>>()).to_string())
    .bind(LabelSetState::Counting.as_str())
    .fetch_one(connection)
    .await?;
    Ok(LabelSet { id, counting, is_counted: false })
}

/// Sets the state of label sets, all of which must exist and not be retired. The caller owns the limits lock.
///
/// # Errors
/// [`StoreError::RowCount`]; database errors.
pub async fn set_state(connection: &mut PgConnection, ids: &[i64], state: LabelSetState) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- label_set::set_state
        UPDATE linkis_label_set SET state = $2 WHERE label_set_id = ANY ($1) AND state <> 'retired'",
    )
    .bind(ids)
    .bind(state.as_str())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, ids.len(), done.rows_affected())
}

/// Deletes a retired label set, unless it has counters. A step seems to be the last one if another task has deleted some of the
/// counters that it was to delete.
pub async fn delete(executor: impl PgExecutor<'_>, id: i64) -> Result<(), StoreError> {
    sqlx::query(
        "-- label_set::delete
        DELETE FROM linkis_label_set WHERE label_set_id = $1 AND state = 'retired' AND NOT EXISTS (
            SELECT FROM linkis_label_resource WHERE (label_set_id, scope_hash) > ($1, '') AND label_set_id <= $1)",
    )
    .bind(id)
    .execute(executor)
    .await?;
    Ok(())
}
