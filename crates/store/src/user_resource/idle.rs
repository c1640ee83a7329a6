//! Tickets of idle engines, by the reports of their EMs: since when an engine runs no task.
//!
//! Statements here skip rows that another transaction has locked, so they never wait. A later report writes what was skipped.
//! Caller: the comparison of reports.

use std::collections::HashSet;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    StoreError,
    rows::{column, em_columns},
};
use rm_model::report::EmReport;

/// A ticket whose engine becomes idle, or runs a task again.
#[derive(Debug)]
pub struct IdleChange {
    /// Number of the report that states it, from 0.
    pub report: usize,
    /// The ticket.
    pub ticket_id: Uuid,
    /// Whether its engine becomes idle.
    pub begins: bool,
}

/// Returns the tickets of idle engines on the EMs of `reports`, in order of their ids.
pub async fn idle_on(connection: &mut PgConnection, reports: &[&EmReport]) -> Result<Vec<Vec<Uuid>>, StoreError> {
    let (application_names, instances) = em_columns(reports.iter().map(|report| &report.em));
    let rows: Vec<(i64, Uuid)> = sqlx::query_as(
        // Only the index of idle engines by EM has this order: an EM may have many other tickets, and other EMs many idle engines.
        "-- user_resource::idle_on
        SELECT k.number, t.ticket_id
        FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (em_application_name, em_instance, number)
        CROSS JOIN LATERAL (
            SELECT t.ticket_id FROM linkis_user_resource_meta_data t
            WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance AND t.idle_since IS NOT NULL
            ORDER BY t.em_application_name, t.em_instance, t.ticket_id OFFSET 0) t",
    )
    .bind(application_names)
    .bind(instances)
    .fetch_all(connection)
    .await?;
    let mut idle = vec![Vec::new(); reports.len()];
    for (number, ticket_id) in rows {
        let place = usize::try_from(number).ok().and_then(|number| idle.get_mut(number.checked_sub(1)?));
        place.into_iter().for_each(|tickets| tickets.push(ticket_id));
    }
    Ok(idle)
}

/// Writes since when engines are idle, by those of `reports` that are still the last ones of their EMs. The time of an engine that is
/// idle already stays. Returns the tickets that were written: used tickets of the EM whose rows were free.
pub async fn update_idle(
    connection: &mut PgConnection,
    reports: &[&EmReport],
    changes: &[IdleChange],
) -> Result<HashSet<Uuid>, StoreError> {
    let (application_names, instances) = em_columns(reports.iter().map(|report| &report.em));
    let written: Vec<Uuid> = sqlx::query_scalar(
        "-- user_resource::update_idle
        WITH last AS MATERIALIZED (
            SELECT k.em_application_name, k.em_instance, k.number, set_config('synchronous_commit', 'off', true)
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) WITH ORDINALITY
                AS k (em_application_name, em_instance, epoch, sequence, number)
            CROSS JOIN LATERAL (SELECT FROM linkis_em_report r
                WHERE r.em_application_name = k.em_application_name AND r.em_instance = k.em_instance
                    AND r.epoch = k.epoch AND r.sequence = k.sequence
                FOR NO KEY UPDATE SKIP LOCKED) AS r
        -- Until the digest is recorded, it equals that of no report: the writer may end before it has written all tickets.
        ), unknown AS (
            UPDATE linkis_em_report r SET idle_tickets = -1
            FROM last l WHERE r.em_application_name = l.em_application_name AND r.em_instance = l.em_instance
        ), free AS MATERIALIZED (
            SELECT t.ticket_id, d.begins
            FROM unnest($5::bigint[], $6::uuid[], $7::bool[]) AS d (number, ticket_id, begins)
            JOIN last l ON l.number = d.number
            CROSS JOIN LATERAL (SELECT t.ticket_id FROM linkis_user_resource_meta_data t
                WHERE t.ticket_id = d.ticket_id AND t.em_application_name = l.em_application_name
                    AND t.em_instance = l.em_instance AND t.used_time IS NOT NULL
                FOR NO KEY UPDATE SKIP LOCKED) t
        )
        UPDATE linkis_user_resource_meta_data t
        SET idle_since = CASE WHEN f.begins THEN coalesce(t.idle_since, clock_timestamp()) END
        FROM free f WHERE t.ticket_id = f.ticket_id
        RETURNING t.ticket_id",
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(reports, |report| report.epoch))
    .bind(column(reports, |report| report.sequence))
    .bind(column(changes, |change| i64::try_from(change.report).map_or(0, |number| number.saturating_add(1))))
    .bind(column(changes, |change| change.ticket_id))
    .bind(column(changes, |change| change.begins))
    .fetch_all(connection)
    .await?;
    Ok(written.into_iter().collect())
}
