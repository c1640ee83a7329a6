//! Health, load and silence of EMs, from their last reports.
//!
//! The functions only read. Callers: the survey of placement, and lists of EMs.

use std::time::Duration;

use sqlx::PgExecutor;

use crate::{
    StoreError,
    rows::{TableRow, em_columns},
};
use rm_model::{
    em::EmInstance,
    placement::SurveyedEm,
    report::{EmCondition, EmStatus, EmStatuses, Health, Load},
};

use super::TABLE;

fn load(row: TableRow<'_>) -> Result<Option<Load>, StoreError> {
    let Some(used) = row.get("memory_used")? else { return Ok(None) };
    let load = Load::parse("load", used, row.get("memory_max")?, row.get::<i16>("cpu_permille")?.into());
    load.map(Some).map_err(|error| row.wrong(error))
}

fn status(row: TableRow<'_>) -> Result<EmStatus, StoreError> {
    // Whether the report belongs to the last registration.
    let is_current: bool = row.get("is_current")?;
    let (health, load) = (row.parse("health", Health::parse)?, load(row)?);
    Ok(EmStatus {
        health: is_current.then_some(health),
        load: load.filter(|_| is_current),
        last_report_time: row.get("report_time")?,
        silent: row.get("silent")?,
    })
}

/// Returns the status of those `instances` that have reported. An EM is silent if it neither reported nor registered
/// for `silent_after`, by the clock of the database.
pub async fn read(
    executor: impl PgExecutor<'_>,
    instances: impl IntoIterator<Item = &EmInstance>,
    silent_after: Duration,
) -> Result<EmStatuses, StoreError> {
    let (application_names, em_instances) = em_columns(instances);
    let rows = sqlx::query(
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
    TABLE.parse(&rows, |row| Ok((row.em()?, status(row)?)))
}

fn surveyed(row: TableRow<'_>) -> Result<SurveyedEm, StoreError> {
    let condition = match row.get::<Option<bool>>("is_current")? {
        Some(_) => status(row)?.into(),
        None => EmCondition::default(),
    };
    let age = |seconds: Option<f64>| time::Duration::saturating_seconds_f64(seconds.unwrap_or_default());
    Ok(SurveyedEm {
        instance: row.em()?,
        version: (row.get("registered")?, row.get("version")?),
        condition,
        report_age: age(row.get("report_age")?),
        registration_age: age(row.get("registration_age")?),
    })
}

/// SQL columns of a [`SurveyedEm`]. An EM is silent after `$1` seconds.
macro_rules! surveyed {
    () => {
        "e.em_application_name, e.em_instance, e.epoch AS registered, e.version, r.epoch = e.epoch AS is_current,
            health, memory_used, memory_max, cpu_permille, report_time,
            extract(epoch FROM clock_timestamp() - report_time)::float8 AS report_age,
            extract(epoch FROM clock_timestamp() - register_time)::float8 AS registration_age,
            greatest(report_time, register_time) < clock_timestamp() - make_interval(secs => $1) AS silent"
    };
}

/// Returns versions and conditions of up to `limit` registered EMs after `after`, ordered by key, without their
/// counters. The conditions are those of [`read`].
pub async fn survey(
    executor: impl PgExecutor<'_>,
    after: Option<&EmInstance>,
    limit: i64,
    silent_after: Duration,
) -> Result<Vec<SurveyedEm>, StoreError> {
    let after = after.map_or(("", ""), |em| (em.application_name.as_str(), em.instance.as_str()));
    let rows = sqlx::query(concat!(
        "-- em_report::survey
        SELECT ",
        surveyed!(),
        " FROM linkis_em_resource_meta_data e LEFT JOIN linkis_em_report r
            ON r.em_application_name = e.em_application_name AND r.em_instance = e.em_instance
        WHERE (e.em_application_name, e.em_instance) > ($2, $3) AND (going_epoch IS NULL OR going_epoch < e.epoch)
        ORDER BY e.em_application_name, e.em_instance LIMIT $4"
    ))
    .bind(silent_after.as_secs_f64())
    .bind(after.0)
    .bind(after.1)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, surveyed)
}

/// Like [`survey`], for the registered EMs among `ems`.
pub async fn survey_of(
    executor: impl PgExecutor<'_>,
    ems: &[EmInstance],
    silent_after: Duration,
) -> Result<Vec<SurveyedEm>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows = sqlx::query(concat!(
        "-- em_report::survey_of
        SELECT ",
        surveyed!(),
        " FROM unnest($2::text[], $3::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = k.em_application_name AND e.em_instance = k.em_instance
        LEFT JOIN linkis_em_report r
            ON r.em_application_name = e.em_application_name AND r.em_instance = e.em_instance
        WHERE going_epoch IS NULL OR going_epoch < e.epoch"
    ))
    .bind(silent_after.as_secs_f64())
    .bind(application_names)
    .bind(instances)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, surveyed)
}

/// Returns the EMs whose last report is unhealthy and belongs to their present registration.
pub async fn unhealthy(executor: impl PgExecutor<'_>) -> Result<Vec<EmInstance>, StoreError> {
    let rows = sqlx::query(
        "-- em_report::unhealthy
        SELECT r.em_application_name, r.em_instance FROM linkis_em_report r JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = r.em_application_name AND e.em_instance = r.em_instance
        WHERE r.health = 'unhealthy' AND r.epoch = e.epoch",
    )
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| row.em())
}
