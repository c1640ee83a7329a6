//! `linkis_em_drain`: EMs that accept no new grants, registered or not. The committer writes the rows; lists read them.

use std::{collections::HashMap, sync::Arc};

use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;

use rm_model::{em::EmInstance, em_drain::EmDrain, principal::Principal};

use super::{
    StoreError, expect_rows,
    rows::{TableName, em_columns},
};

const TABLE: TableName = TableName("linkis_em_drain");

from_row! {
    /// Drain columns of an EM; all `None` if the EM is not drained.
    pub(super) struct DrainColumns {
        reason: Option<String>,
        drained_by: Option<String>,
        drain_time: Option<OffsetDateTime>,
    }
}

impl DrainColumns {
    pub fn drain(&self) -> Result<Option<Arc<EmDrain>>, StoreError> {
        let (Some(reason), Some(by), Some(since)) = (&self.reason, &self.drained_by, self.drain_time) else {
            return Ok(None);
        };
        let by = Principal::parse("drained_by", by).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
        Ok(Some(Arc::new(EmDrain { reason: TABLE.name("reason", reason)?, by, since })))
    }
}

from_row! {
    struct DrainRow {
        em_application_name: String,
        em_instance: String,
        ..drain: DrainColumns,
    }
}

/// Returns the drains of those `ems` that are drained.
pub async fn read(
    executor: impl PgExecutor<'_>,
    ems: impl IntoIterator<Item = &EmInstance>,
) -> Result<HashMap<EmInstance, Arc<EmDrain>>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows: Vec<DrainRow> = sqlx::query_as(
        "-- em_drain::read
        SELECT d.em_application_name, d.em_instance, reason, drained_by, drain_time
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_em_drain d ON d.em_application_name = k.em_application_name AND d.em_instance = k.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .fetch_all(executor)
    .await?;
    let mut drains = HashMap::with_capacity(rows.len());
    for row in rows {
        if let Some(drain) = row.drain.drain()? {
            drains.insert(TABLE.em(&row.em_application_name, &row.em_instance)?, drain);
        }
    }
    Ok(drains)
}

/// Inserts, replaces or deletes (`None`) the drains of EMs. The caller has locked the EMs.
///
/// # Errors
/// [`StoreError::RowCount`]; database errors.
pub async fn write(
    connection: &mut PgConnection,
    drains: &[(EmInstance, Option<Arc<EmDrain>>)],
) -> Result<(), StoreError> {
    let over: Vec<&EmInstance> = drains.iter().filter(|(_, drain)| drain.is_none()).map(|(em, _)| em).collect();
    if !over.is_empty() {
        let (application_names, instances) = em_columns(over);
        sqlx::query(
            "-- em_drain::write, those that are over
            DELETE FROM linkis_em_drain d USING unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
            WHERE d.em_application_name = k.em_application_name AND d.em_instance = k.em_instance",
        )
        .bind(application_names)
        .bind(instances)
        .execute(&mut *connection)
        .await?;
    }
    let now: Vec<(&EmInstance, &EmDrain)> =
        drains.iter().filter_map(|(em, drain)| Some((em, drain.as_deref()?))).collect();
    if now.is_empty() {
        return Ok(());
    }
    let (application_names, instances) = em_columns(now.iter().map(|(em, _)| *em));
    let done = sqlx::query(
        "-- em_drain::write
        INSERT INTO linkis_em_drain (em_application_name, em_instance, reason, drained_by, drain_time)
        SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::timestamptz[])
        ON CONFLICT (em_application_name, em_instance) DO UPDATE SET reason = excluded.reason,
            drained_by = excluded.drained_by, drain_time = excluded.drain_time",
    )
    .bind(application_names)
    .bind(instances)
    .bind(now.iter().map(|(_, drain)| drain.reason.as_str()).collect::<Vec<_>>())
    .bind(now.iter().map(|(_, drain)| drain.by.as_str()).collect::<Vec<_>>())
    .bind(now.iter().map(|(_, drain)| drain.since).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, now.len(), done.rows_affected())
}
