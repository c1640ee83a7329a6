//! `linkis_em_observed`: observed resource use of engines, as each EM last reported it.
//!
//! Each EM has one packed row. Statements skip locked rows and commit without a disk flush, as in `em_report`. Callers:
//! `rm_service::heartbeat` writes, the ticket lists read, the committer deletes.

use std::collections::{HashMap, HashSet};

use sqlx::PgConnection;
use tokio_stream::StreamExt as _;
use uuid::Uuid;

use rm_model::{
    em::EmInstance,
    observation::{Observations, ObservedUse, observed_of},
    report::EmReport,
    ticket::Ticket,
};

use super::{
    StoreError,
    rows::{TableName, column, em_columns},
};

const TABLE: TableName = TableName("linkis_em_observed");

/// Replaces observations of an unchanged set of tickets by those of newer reports, at most one per EM. Returns the EMs
/// written. Skips locked rows; the next report repeats the observations.
pub async fn renew(
    connection: &mut PgConnection,
    reports: &[(&EmReport, &Observations)],
) -> Result<HashSet<EmInstance>, StoreError> {
    let (application_names, instances) = em_columns(reports.iter().map(|(report, _)| &report.em));
    let rows = sqlx::query(
        "-- em_observed::renew
        WITH same AS MATERIALIZED (
            SELECT k.*, set_config('synchronous_commit', 'off', true)
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bytea[], $6::bytea[])
                AS k (em_application_name, em_instance, epoch, sequence, subject_hash, observed)
            CROSS JOIN LATERAL (SELECT FROM linkis_em_observed o
                WHERE o.em_application_name = k.em_application_name AND o.em_instance = k.em_instance
                    AND o.subject_hash = k.subject_hash AND (o.epoch, o.sequence) < (k.epoch, k.sequence)
                FOR NO KEY UPDATE SKIP LOCKED) AS o
        )
        UPDATE linkis_em_observed o SET epoch = same.epoch, sequence = same.sequence, observed = same.observed,
            observed_time = clock_timestamp()
        FROM same
        WHERE o.em_application_name = same.em_application_name AND o.em_instance = same.em_instance
        RETURNING o.em_application_name, o.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(reports, |(report, _)| report.epoch))
    .bind(column(reports, |(report, _)| report.sequence))
    .bind(column(reports, |(_, observed)| observed.subject_hash().to_vec()))
    .bind(column(reports, |(_, observed)| observed.packed()))
    .fetch_all(connection)
    .await?;
    TABLE.parse(&rows, |row| row.em())
}

/// Inserts or replaces observations of any set of tickets, unless a later report has stored some or the EM was removed.
/// Writes in the order of the EMs, so that no deadlock occurs.
pub async fn put(connection: &mut PgConnection, reports: &[(&EmReport, &Observations)]) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(reports.iter().map(|(report, _)| &report.em));
    sqlx::query(
        "-- em_observed::put
        INSERT INTO linkis_em_observed AS o (em_application_name, em_instance, epoch, sequence, subject_hash, observed, observed_time)
        SELECT k.em_application_name, k.em_instance, k.epoch, k.sequence, k.subject_hash, k.observed, clock_timestamp()
        FROM (SELECT set_config('synchronous_commit', 'off', true)) AS hurry,
            unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bytea[], $6::bytea[])
                AS k (em_application_name, em_instance, epoch, sequence, subject_hash, observed)
        -- The lock keeps the report, and so the rows that depend on it, from being deleted.
        CROSS JOIN LATERAL (SELECT FROM linkis_em_report r
            WHERE r.em_application_name = k.em_application_name AND r.em_instance = k.em_instance AND r.epoch = k.epoch
            FOR KEY SHARE SKIP LOCKED) AS r
        ORDER BY k.em_application_name COLLATE \"C\", k.em_instance COLLATE \"C\"
        ON CONFLICT (em_application_name, em_instance) DO UPDATE SET epoch = excluded.epoch, sequence = excluded.sequence,
            subject_hash = excluded.subject_hash, observed = excluded.observed, observed_time = excluded.observed_time
        WHERE (o.epoch, o.sequence) < (excluded.epoch, excluded.sequence)",
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(reports, |(report, _)| report.epoch))
    .bind(column(reports, |(report, _)| report.sequence))
    .bind(column(reports, |(_, observed)| observed.subject_hash().to_vec()))
    .bind(column(reports, |(_, observed)| observed.packed()))
    .execute(connection)
    .await?;
    Ok(())
}

/// Returns the observations of those `tickets` that their EMs have observed. Streams one EM at a time, because each may
/// have very many.
pub async fn read<'a>(
    connection: &mut PgConnection,
    tickets: impl IntoIterator<Item = &'a Ticket>,
) -> Result<HashMap<Uuid, ObservedUse>, StoreError> {
    let tickets: HashMap<Uuid, &Ticket> = tickets.into_iter().map(|ticket| (ticket.id, ticket)).collect();
    let ems: HashSet<&EmInstance> = tickets.values().map(|ticket| &ticket.em).collect();
    let (application_names, instances) = em_columns(ems);
    let mut rows = sqlx::query(
        "-- em_observed::read
        SELECT o.em_application_name, o.em_instance, o.observed, o.observed_time
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_em_observed o
            ON o.em_application_name = k.em_application_name AND o.em_instance = k.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .fetch(connection);
    let mut found = HashMap::new();
    while let Some(row) = rows.next().await {
        let row = row?;
        let row = TABLE.row(&row);
        let (em, at) = (row.em()?, row.get("observed_time")?);
        for (ticket_id, said) in Observations::from_packed(row.get("observed")?).iter() {
            let ticket = tickets.get(&ticket_id).filter(|ticket| ticket.em == em);
            if let Some(resource) = ticket.and_then(|ticket| observed_of(ticket, &said).ok()) {
                found.insert(ticket_id, ObservedUse { resource, at });
            }
        }
    }
    Ok(found)
}

/// Deletes the observations of removed EMs. Must run after the deletion of their reports, in a separate statement.
pub async fn delete(connection: &mut PgConnection, ems: &[EmInstance]) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(ems);
    sqlx::query(
        "-- em_observed::delete
        DELETE FROM linkis_em_observed o USING unnest($1::text[], $2::text[]) AS d (em_application_name, em_instance)
        WHERE o.em_application_name = d.em_application_name AND o.em_instance = d.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .execute(connection)
    .await?;
    Ok(())
}
