//! `linkis_em_report`: the last report of each EM that has ever sent one.

use std::{collections::HashMap, time::Duration};

use sqlx::{FromRow, PgConnection, PgExecutor};
use time::OffsetDateTime;

use crate::domain::{
    em::EmInstance,
    report::{EmStatus, Health, LastSign, Load, Report, ReportNumber, Statuses},
};

use super::{
    StoreError,
    rows::{Table, em_columns},
};

const TABLE: Table = Table("linkis_em_report");

/// What a report met when it came, and whether it was kept.
#[derive(Debug, Clone, Copy)]
pub struct Met {
    /// The epoch of the EM's registration.
    pub registered: i64,
    /// The report before, and when it came.
    pub last: Option<(ReportNumber, OffsetDateTime)>,
    /// Whether the report is the EM's last one now.
    pub kept: bool,
}

/// Keeps a report if its EM is registered with its epoch and it is newer than the last one; `None` if there is no such EM.
///
/// If it was not kept although it is newer than what it met, somebody else has just changed that: trying again tells.
pub async fn upsert(executor: impl PgExecutor<'_>, report: &Report) -> Result<Option<Met>, StoreError> {
    #[derive(FromRow)]
    struct MetRow {
        registered: i64,
        epoch: Option<i64>,
        sequence: Option<i64>,
        report_time: Option<OffsetDateTime>,
        kept: bool,
    }
    // Nothing is lost if a crash of the database makes it forget the last reports: the next ones come soon. So no report waits for
    // the disk, where it would keep grants waiting.
    //
    // The first report of an EM waits for whoever removes that; later ones find that their row is gone. So none is left behind.
    let row: Option<MetRow> = sqlx::query_as(
        "-- em_report::upsert
        WITH em AS (
            SELECT epoch FROM linkis_em_resource_meta_data WHERE em_application_name = $1 AND em_instance = $2
        ), last AS (
            SELECT epoch, sequence, report_time FROM linkis_em_report
            WHERE em_application_name = $1 AND em_instance = $2
        ), later AS (
            UPDATE linkis_em_report r SET epoch = $3, sequence = $4, health = $5, memory_used = $6, memory_max = $7,
                cpu_permille = $8, report_time = clock_timestamp()
            FROM em
            WHERE r.em_application_name = $1 AND r.em_instance = $2 AND em.epoch = $3
                AND (r.epoch < $3 OR r.epoch = $3 AND r.sequence < $4)
            RETURNING r.epoch
        ), first AS (
            INSERT INTO linkis_em_report (em_application_name, em_instance, epoch, sequence, health, memory_used,
                memory_max, cpu_permille, report_time)
            SELECT $1, $2, $3, $4, $5, $6, $7, $8, clock_timestamp()
            FROM (SELECT FROM linkis_em_resource_meta_data
                WHERE em_application_name = $1 AND em_instance = $2 AND epoch = $3 AND NOT EXISTS (SELECT FROM last)
                FOR KEY SHARE) AS e
            ON CONFLICT DO NOTHING
            RETURNING epoch
        )
        SELECT set_config('synchronous_commit', 'off', true) AS hurry, em.epoch AS registered, last.epoch, last.sequence, last.report_time,
            EXISTS (SELECT FROM later) OR EXISTS (SELECT FROM first) AS kept
        FROM em LEFT JOIN last ON true",
    )
    .bind(report.em.application_name.as_str())
    .bind(report.em.instance.as_str())
    .bind(report.epoch)
    .bind(report.sequence)
    .bind(report.health.as_str())
    .bind(report.load.map(|load| load.memory_used()))
    .bind(report.load.map(|load| load.memory_max()))
    .bind(report.load.map(|load| load.cpu_permille()))
    .fetch_optional(executor)
    .await?;
    Ok(row.map(|row| {
        let number = row.epoch.zip(row.sequence).map(|(epoch, sequence)| ReportNumber { epoch, sequence });
        Met { registered: row.registered, last: number.zip(row.report_time), kept: row.kept }
    }))
}

#[derive(FromRow)]
struct StatusRow {
    em_application_name: String,
    em_instance: String,
    /// Whether the report belongs to the last registration.
    is_current: bool,
    health: String,
    memory_used: Option<i64>,
    memory_max: Option<i64>,
    cpu_permille: Option<i16>,
    report_time: OffsetDateTime,
    silent: bool,
}

impl StatusRow {
    fn load(&self) -> Result<Option<Load>, StoreError> {
        let (Some(used), Some(max), Some(permille)) = (self.memory_used, self.memory_max, self.cpu_permille) else {
            return Ok(None);
        };
        let load = Load::parse("load", used, max, permille.into());
        load.map(Some).map_err(|error| StoreError::inconsistent(TABLE.0, error))
    }
}

impl TryFrom<StatusRow> for (EmInstance, EmStatus) {
    type Error = StoreError;

    fn try_from(row: StatusRow) -> Result<Self, StoreError> {
        let health = Health::parse(&row.health).ok_or_else(|| StoreError::inconsistent(TABLE.0, &row.health))?;
        let load = row.load()?;
        let status = EmStatus {
            health: row.is_current.then_some(health),
            load: load.filter(|_| row.is_current),
            last_report_time: row.report_time,
            silent: row.silent,
        };
        Ok((TABLE.em(&row.em_application_name, &row.em_instance)?, status))
    }
}

/// What is known by their reports of those among `instances` that have reported. Silent are those of which nothing was heard for
/// `silent_after`, by the database's clock.
pub async fn read(
    executor: impl PgExecutor<'_>,
    instances: impl IntoIterator<Item = &EmInstance>,
    silent_after: Duration,
) -> Result<Statuses, StoreError> {
    let (application_names, em_instances) = em_columns(instances);
    let rows: Vec<StatusRow> = sqlx::query_as(
        "-- em_report::read
        SELECT r.em_application_name, r.em_instance, r.epoch = e.epoch AS is_current, health, memory_used, memory_max,
            cpu_permille, report_time,
            greatest(report_time, register_time) < clock_timestamp() - make_interval(secs => $3) AS silent
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_em_report r
            ON r.em_application_name = k.em_application_name AND r.em_instance = k.em_instance
        JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = r.em_application_name AND e.em_instance = r.em_instance",
    )
    .bind(application_names)
    .bind(em_instances)
    .bind(silent_after.as_secs_f64())
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(TryFrom::try_from).collect()
}

/// What is known of up to `limit` EMs by their reports, in the order of their keys, from behind `after`; as [`read`] tells it.
pub async fn list(
    executor: impl PgExecutor<'_>,
    after: Option<&EmInstance>,
    limit: i64,
    silent_after: Duration,
) -> Result<Vec<(EmInstance, EmStatus)>, StoreError> {
    let after = after.map_or(("", ""), |em| (em.application_name.as_str(), em.instance.as_str()));
    let rows: Vec<StatusRow> = sqlx::query_as(
        "-- em_report::list
        SELECT r.em_application_name, r.em_instance, r.epoch = e.epoch AS is_current, health, memory_used, memory_max,
            cpu_permille, report_time,
            greatest(report_time, register_time) < clock_timestamp() - make_interval(secs => $4) AS silent
        FROM linkis_em_report r JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = r.em_application_name AND e.em_instance = r.em_instance
        WHERE (r.em_application_name, r.em_instance) > ($1, $2)
        ORDER BY r.em_application_name, r.em_instance LIMIT $3",
    )
    .bind(after.0)
    .bind(after.1)
    .bind(limit)
    .bind(silent_after.as_secs_f64())
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(TryFrom::try_from).collect()
}

#[derive(FromRow)]
struct SignRow {
    em_application_name: String,
    em_instance: String,
    registered: i64,
    epoch: i64,
    sequence: i64,
}

/// The EMs that have reported, but of which nothing was heard for `silent_after` by the database's clock, and the last that was.
pub async fn silent(
    executor: impl PgExecutor<'_>,
    silent_after: Duration,
) -> Result<Vec<(EmInstance, LastSign)>, StoreError> {
    // In the order of the key, because without an order nothing speaks for its index.
    let rows: Vec<SignRow> = sqlx::query_as(
        "-- em_report::silent
        SELECT r.em_application_name, r.em_instance, e.epoch AS registered, r.epoch, r.sequence
        FROM linkis_em_report r JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = r.em_application_name AND e.em_instance = r.em_instance
        WHERE r.report_time < clock_timestamp() - make_interval(secs => $1)
            AND e.register_time < clock_timestamp() - make_interval(secs => $1)
        ORDER BY r.em_application_name, r.em_instance",
    )
    .bind(silent_after.as_secs_f64())
    .fetch_all(executor)
    .await?;
    let sign = |row: SignRow| {
        let reported = ReportNumber { epoch: row.epoch, sequence: row.sequence };
        let em = TABLE.em(&row.em_application_name, &row.em_instance)?;
        Ok((em, LastSign { registered: row.registered, reported }))
    };
    rows.into_iter().map(sign).collect()
}

/// The last reports of those among `ems` that have reported; until the transaction ends, no other report of theirs is kept.
pub async fn lock<'a>(
    connection: &mut PgConnection,
    ems: impl IntoIterator<Item = &'a EmInstance>,
) -> Result<HashMap<EmInstance, ReportNumber>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows: Vec<(String, String, i64, i64)> = sqlx::query_as(
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
    let number = |(application_name, instance, epoch, sequence): (String, String, i64, i64)| {
        Ok((TABLE.em(&application_name, &instance)?, ReportNumber { epoch, sequence }))
    };
    rows.into_iter().map(number).collect()
}

/// Removes the reports of EMs that went; those that never reported have none.
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
