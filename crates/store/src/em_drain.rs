//! `linkis_em_drain`: EMs that accept no new grants, registered or not. The committer writes the rows; lists read them.

use std::{collections::HashMap, sync::Arc};

use sqlx::{PgConnection, PgExecutor};

use rm_model::{em::EmInstance, em_drain::EmDrain};

use super::{
    StoreError, expect_rows,
    rows::{TableName, TableRow, column, em_columns},
};

const TABLE: TableName = TableName("linkis_em_drain");

/// Returns the drain of an EM; `None` if the EM is not drained.
pub(super) fn drain(row: TableRow<'_>) -> Result<Option<Arc<EmDrain>>, StoreError> {
    let row = row.of(TABLE);
    let Some(since) = row.get("drain_time")? else { return Ok(None) };
    Ok(Some(Arc::new(EmDrain { reason: row.name("reason")?, by: row.principal("drained_by")?, since })))
}

/// Returns the drains of those `ems` that are drained.
pub async fn read(
    executor: impl PgExecutor<'_>,
    ems: impl IntoIterator<Item = &EmInstance>,
) -> Result<HashMap<EmInstance, Arc<EmDrain>>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows = sqlx::query(
        "-- em_drain::read
        SELECT d.em_application_name, d.em_instance, reason, drained_by, drain_time
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_em_drain d ON d.em_application_name = k.em_application_name AND d.em_instance = k.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .fetch_all(executor)
    .await?;
    let drained = |row: TableRow<'_>| Ok((row.em()?, drain(row)?));
    let drains: Vec<(EmInstance, Option<Arc<EmDrain>>)> = TABLE.parse(&rows, drained)?;
    Ok(drains.into_iter().filter_map(|(em, drain)| Some((em, drain?))).collect())
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
    .bind(column(&now, |(_, drain)| drain.reason.as_str()))
    .bind(column(&now, |(_, drain)| drain.by.as_str()))
    .bind(column(&now, |(_, drain)| drain.since))
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, now.len(), done.rows_affected())
}
