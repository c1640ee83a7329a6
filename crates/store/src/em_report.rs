//! `linkis_em_report`: the last report (heartbeat) of each EM that has sent one.
//!
//! Reports of many EMs are stored by one statement. Statements here skip rows that another transaction has locked, so
//! that a report never waits and never delays a grant. The next report repeats the content. Reports commit without a
//! disk flush: a database crash may lose the last ones. Callers: `rm_service::heartbeat` and the lost-EM task.
//!
//! Submodule `status`: health, load and silence of EMs.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::{PgConnection, PgExecutor, postgres::PgRow};
use time::OffsetDateTime;

use rm_model::{
    em::EmInstance,
    report::{EmReport, LastSignOfLife, ReportNumber},
    ticket_digest::TicketDigest,
};

use super::{
    StoreError, expect_rows,
    rows::{BoundQuery, TableName, TableRow, column, em_columns},
};

mod status;

pub use status::{read, survey, survey_of, unhealthy};

const TABLE: TableName = TableName("linkis_em_report");

/// State that a report met on arrival, and whether the report was stored.
#[derive(Debug, Clone, Copy)]
pub struct ReportArrival {
    /// Epoch of the EM's registration.
    pub registered: i64,
    /// Number and time of the previous report; `None` if this is the first.
    pub last: Option<(ReportNumber, OffsetDateTime)>,
    /// Whether the report is now the last report of its EM.
    pub kept: bool,
    /// Digest of the EM's used tickets.
    pub used_tickets: TicketDigest,
    /// Whether a ticket of the EM may have been missing from the previous report.
    pub any_missed: bool,
    /// Digest of the tickets of idle engines, as the rows of the tickets show them; unequal to all others while they are written.
    pub idle_tickets: TicketDigest,
    /// Whether the EM was unhealthy by its previous report, or silent.
    pub was_unavailable: bool,
}

/// Returns the arrivals in the order of the reports; `None` for reports without a row.
fn merge_in_order(rows: &[PgRow], reports: usize) -> Result<Vec<Option<ReportArrival>>, StoreError> {
    let mut met = vec![None; reports];
    for row in rows.iter().map(|row| TABLE.row(row)) {
        let last: (Option<i64>, Option<i64>) = (row.get("last_epoch")?, row.get("last_sequence")?);
        let last = last.0.zip(last.1).map(|(epoch, sequence)| ReportNumber { epoch, sequence });
        let arrival = ReportArrival {
            registered: row.get("registered")?,
            last: last.zip(row.get("last_time")?),
            kept: row.get("kept")?,
            used_tickets: TicketDigest { count: row.get("used_tickets")?, xor: row.get("used_tickets_xor")? },
            any_missed: row.get("any_missed")?,
            idle_tickets: TicketDigest { count: row.get("idle_tickets")?, xor: row.get("idle_tickets_xor")? },
            was_unavailable: row.get("was_unavailable")?,
        };
        let number = usize::try_from(row.get::<i64>("number")?).ok();
        if let Some(place) = number.and_then(|number| met.get_mut(number.checked_sub(1)?)) {
            *place = Some(arrival);
        }
    }
    Ok(met)
}

/// Stores those of `reports` that are newer than the last report of their EM and match its epoch. The slice has at most
/// one report per EM. An EM is silent after `silent_after` without a report.
///
/// Returns the arrivals in the order of `reports`. `None` means that the EM has not reported yet, is not registered, or
/// that another transaction has locked its last report: the statement never waits.
///
/// # Errors
/// [`StoreError::RowCount`]; database errors.
pub async fn update(
    connection: &mut PgConnection,
    reports: &[&EmReport],
    silent_after: Duration,
) -> Result<Vec<Option<ReportArrival>>, StoreError> {
    // Asynchronous commit: a database crash loses at most the last reports, and the next ones come soon. A report thus
    // never waits for the disk, where it would delay grants.
    //
    // Locked rows are skipped: a wait here would keep the rows that are locked already from others.
    let update = sqlx::query(
        "-- em_report::update
        WITH met AS MATERIALIZED (
            SELECT k.*, e.epoch AS registered, e.used_tickets, e.used_tickets_xor, r.epoch AS last_epoch,
                r.sequence AS last_sequence, r.report_time AS last_time, r.any_missed, r.idle_tickets, r.idle_tickets_xor,
                r.health = 'unhealthy' OR r.report_time < clock_timestamp() - make_interval(secs => $9)
                    AS was_unavailable,
                e.epoch = k.epoch AND (r.epoch, r.sequence) < (k.epoch, k.sequence) AS kept
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[],
                $8::smallint[]) WITH ORDINALITY AS k (em_application_name, em_instance, epoch, sequence, health,
                memory_used, memory_max, cpu_permille, number)
            CROSS JOIN LATERAL (SELECT epoch, used_tickets, used_tickets_xor FROM linkis_em_resource_meta_data
                WHERE em_application_name = k.em_application_name AND em_instance = k.em_instance OFFSET 0) AS e
            CROSS JOIN LATERAL (SELECT epoch, sequence, health, report_time, any_missed, idle_tickets, idle_tickets_xor
                FROM linkis_em_report
                WHERE em_application_name = k.em_application_name AND em_instance = k.em_instance
                FOR NO KEY UPDATE SKIP LOCKED) AS r
        ), kept AS (
            UPDATE linkis_em_report r SET epoch = met.epoch, sequence = met.sequence, health = met.health,
                memory_used = met.memory_used, memory_max = met.memory_max, cpu_permille = met.cpu_permille,
                report_time = clock_timestamp()
            FROM met
            WHERE r.em_application_name = met.em_application_name AND r.em_instance = met.em_instance AND met.kept
            RETURNING 1
        )
        SELECT (SELECT set_config('synchronous_commit', 'off', true)) AS hurry, number, registered, last_epoch,
            last_sequence, last_time, kept, used_tickets, used_tickets_xor, any_missed, idle_tickets, idle_tickets_xor, was_unavailable,
            (SELECT count(*) FROM kept) AS written
        FROM met",
    );
    let rows = bind_reports(update, reports).bind(silent_after.as_secs_f64()).fetch_all(connection).await?;
    let written: i64 = rows.first().map_or(Ok(0), |row| TABLE.row(row).get("written"))?;
    let met = merge_in_order(&rows, reports.len())?;
    expect_rows(TABLE.0, met.iter().flatten().filter(|met| met.kept).count(), written.unsigned_abs())?;
    Ok(met)
}

/// Stores those of `reports` that are the first of their EM and match its epoch. Returns the EMs stored.
///
/// Skips EMs whose row another transaction has locked, so that no report outlives the removal of its EM.
pub async fn insert(connection: &mut PgConnection, reports: &[&EmReport]) -> Result<HashSet<EmInstance>, StoreError> {
    let insert = sqlx::query(
        "-- em_report::insert
        WITH first AS (
            INSERT INTO linkis_em_report (em_application_name, em_instance, epoch, sequence, health, memory_used,
                memory_max, cpu_permille, report_time)
            SELECT k.*, clock_timestamp()
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[],
                $8::smallint[]) AS k (em_application_name, em_instance, epoch, sequence, health, memory_used, memory_max,
                cpu_permille)
            CROSS JOIN LATERAL (SELECT FROM linkis_em_resource_meta_data
                WHERE em_application_name = k.em_application_name AND em_instance = k.em_instance AND epoch = k.epoch
                FOR KEY SHARE SKIP LOCKED) AS e
            WHERE NOT EXISTS (SELECT FROM linkis_em_report r
                WHERE r.em_application_name = k.em_application_name AND r.em_instance = k.em_instance)
            ON CONFLICT DO NOTHING
            RETURNING em_application_name, em_instance
        )
        SELECT em_application_name, em_instance, (SELECT set_config('synchronous_commit', 'off', true)) FROM first",
    );
    let rows = bind_reports(insert, reports).fetch_all(connection).await?;
    TABLE.parse(&rows, |row| row.em())
}

/// Returns the state that each of `reports` would meet now, without storing any; `None` if its EM is not registered.
pub async fn read_arrivals(
    connection: &mut PgConnection,
    reports: &[&EmReport],
) -> Result<Vec<Option<ReportArrival>>, StoreError> {
    let (application_names, instances) = em_columns(reports.iter().map(|report| &report.em));
    let rows = sqlx::query(
        "-- em_report::read_arrivals
        SELECT k.number, e.epoch AS registered, r.epoch AS last_epoch, r.sequence AS last_sequence,
            r.report_time AS last_time, false AS kept, e.used_tickets, e.used_tickets_xor,
            coalesce(r.any_missed, true) AS any_missed, coalesce(r.idle_tickets, 0) AS idle_tickets,
            coalesce(r.idle_tickets_xor, '00000000-0000-0000-0000-000000000000') AS idle_tickets_xor, false AS was_unavailable
        FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (em_application_name, em_instance, number)
        JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = k.em_application_name AND e.em_instance = k.em_instance
        LEFT JOIN linkis_em_report r
            ON r.em_application_name = e.em_application_name AND r.em_instance = e.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .fetch_all(connection)
    .await?;
    merge_in_order(&rows, reports.len())
}

/// Records that no ticket is missing from those of `reports` that are still the last of their EMs. Skips locked rows;
/// the next report repeats the record.
pub async fn none_missed(connection: &mut PgConnection, reports: &[&EmReport]) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(reports.iter().map(|report| &report.em));
    sqlx::query(
        "-- em_report::none_missed
        WITH last AS MATERIALIZED (
            SELECT k.*, set_config('synchronous_commit', 'off', true)
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[])
                AS k (em_application_name, em_instance, epoch, sequence)
            CROSS JOIN LATERAL (SELECT FROM linkis_em_report r
                WHERE r.em_application_name = k.em_application_name AND r.em_instance = k.em_instance
                    AND r.epoch = k.epoch AND r.sequence = k.sequence AND any_missed
                FOR NO KEY UPDATE SKIP LOCKED) AS r
        )
        UPDATE linkis_em_report r SET any_missed = false
        FROM last l WHERE r.em_application_name = l.em_application_name AND r.em_instance = l.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(reports, |report| report.epoch))
    .bind(column(reports, |report| report.sequence))
    .execute(connection)
    .await?;
    Ok(())
}

/// Records which tickets of idle engines the rows of the tickets show now, for those of `reports` that are still the last of their
/// EMs. Skips locked rows; the next report repeats the record.
pub async fn record_idle(
    connection: &mut PgConnection,
    reports: &[(&EmReport, TicketDigest)],
) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(reports.iter().map(|(report, _)| &report.em));
    sqlx::query(
        "-- em_report::record_idle
        WITH last AS MATERIALIZED (
            SELECT k.*, set_config('synchronous_commit', 'off', true)
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::uuid[])
                AS k (em_application_name, em_instance, epoch, sequence, tickets, tickets_xor)
            CROSS JOIN LATERAL (SELECT FROM linkis_em_report r
                WHERE r.em_application_name = k.em_application_name AND r.em_instance = k.em_instance
                    AND r.epoch = k.epoch AND r.sequence = k.sequence
                FOR NO KEY UPDATE SKIP LOCKED) AS r
        )
        UPDATE linkis_em_report r SET idle_tickets = l.tickets, idle_tickets_xor = l.tickets_xor
        FROM last l WHERE r.em_application_name = l.em_application_name AND r.em_instance = l.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(reports, |(report, _)| report.epoch))
    .bind(column(reports, |(report, _)| report.sequence))
    .bind(column(reports, |(_, digest)| digest.count))
    .bind(column(reports, |(_, digest)| digest.xor))
    .execute(connection)
    .await?;
    Ok(())
}

fn number(row: TableRow<'_>) -> Result<ReportNumber, StoreError> {
    Ok(ReportNumber { epoch: row.get("epoch")?, sequence: row.get("sequence")? })
}

/// Binds all columns of reports.
fn bind_reports<'q>(query: BoundQuery<'q>, reports: &[&'q EmReport]) -> BoundQuery<'q> {
    query
        .bind(column(reports, |report| report.em.application_name.as_str()))
        .bind(column(reports, |report| report.em.instance.as_str()))
        .bind(column(reports, |report| report.epoch))
        .bind(column(reports, |report| report.sequence))
        .bind(column(reports, |report| report.health.as_str()))
        .bind(column(reports, |report| report.load.map(|load| load.memory_used())))
        .bind(column(reports, |report| report.load.map(|load| load.memory_max())))
        .bind(column(reports, |report| report.load.map(|load| load.cpu_permille())))
}

/// Returns up to `limit` EMs after `after` that have become silent, ordered by key, each with its last sign. A silent
/// EM has reported once, but neither reported nor registered for `silent_after`, by the clock of the database.
pub async fn silent(
    executor: impl PgExecutor<'_>,
    silent_after: Duration,
    after: Option<&EmInstance>,
    limit: i64,
) -> Result<Vec<(EmInstance, LastSignOfLife)>, StoreError> {
    let after = after.map_or(("", ""), |em| (em.application_name.as_str(), em.instance.as_str()));
    let rows = sqlx::query(
        "-- em_report::silent
        SELECT r.em_application_name, r.em_instance, e.epoch AS registered, r.epoch, r.sequence
        FROM linkis_em_report r JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = r.em_application_name AND e.em_instance = r.em_instance
        WHERE r.report_time < clock_timestamp() - make_interval(secs => $1)
            AND e.register_time < clock_timestamp() - make_interval(secs => $1)
            AND (r.em_application_name, r.em_instance) > ($2, $3)
        ORDER BY r.em_application_name, r.em_instance LIMIT $4",
    )
    .bind(silent_after.as_secs_f64())
    .bind(after.0)
    .bind(after.1)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    let sign = |row: TableRow<'_>| {
        Ok((row.em()?, LastSignOfLife { registered: row.get("registered")?, reported: number(row)? }))
    };
    TABLE.parse(&rows, sign)
}

/// Locks and returns the last reports of those among `ems` that have reported. No report of theirs is stored until the
/// transaction ends.
pub async fn lock<'a>(
    connection: &mut PgConnection,
    ems: impl IntoIterator<Item = &'a EmInstance>,
) -> Result<HashMap<EmInstance, ReportNumber>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows = sqlx::query(
        "-- em_report::lock
        SELECT r.em_application_name, r.em_instance, r.epoch, r.sequence
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_em_report r
            ON r.em_application_name = k.em_application_name AND r.em_instance = k.em_instance
        ORDER BY r.em_application_name, r.em_instance
        FOR UPDATE OF r",
    )
    .bind(application_names)
    .bind(instances)
    .fetch_all(connection)
    .await?;
    TABLE.parse(&rows, |row| Ok((row.em()?, number(row)?)))
}

/// Deletes the reports of removed EMs. EMs that never reported have none.
pub async fn delete(connection: &mut PgConnection, ems: &[EmInstance]) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(ems);
    sqlx::query(
        "-- em_report::delete
        DELETE FROM linkis_em_report r USING unnest($1::text[], $2::text[]) AS d (em_application_name, em_instance)
        WHERE r.em_application_name = d.em_application_name AND r.em_instance = d.em_instance",
    )
    .bind(application_names)
    .bind(instances)
    .execute(connection)
    .await?;
    Ok(())
}
