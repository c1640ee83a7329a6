//! Health, load and silence of EMs, from their last reports.
//!
//! The functions only read. Callers: the survey of placement, and lists of EMs.

use std::time::Duration;

use sqlx::PgExecutor;
use time::OffsetDateTime;

use crate::{StoreError, rows::em_columns};
use rm_model::{
    em::EmInstance,
    placement::SurveyedEm,
    report::{EmCondition, EmStatus, EmStatuses, Health, Load},
};

use super::TABLE;

from_row! {
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

/// Returns the status of those `instances` that have reported. An EM is silent if it neither reported nor registered
/// for `silent_after`, by the clock of the database.
pub async fn read(
    executor: impl PgExecutor<'_>,
    instances: impl IntoIterator<Item = &EmInstance>,
    silent_after: Duration,
) -> Result<EmStatuses, StoreError> {
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

from_row! {
    struct SurveyRow {
        em_application_name: String,
        em_instance: String,
        registered: i64,
        version: i64,
        is_current: Option<bool>,
        health: Option<String>,
        memory_used: Option<i64>,
        memory_max: Option<i64>,
        cpu_permille: Option<i16>,
        report_time: Option<OffsetDateTime>,
        silent: Option<bool>,
    }
}

impl TryFrom<SurveyRow> for SurveyedEm {
    type Error = StoreError;

    fn try_from(row: SurveyRow) -> Result<Self, StoreError> {
        let version = (row.registered, row.version);
        let (Some(is_current), Some(health), Some(report_time), Some(silent)) =
            (row.is_current, row.health, row.report_time, row.silent)
        else {
            let instance = TABLE.em(&row.em_application_name, &row.em_instance)?;
            return Ok(Self { instance, version, condition: EmCondition::default() });
        };
        let (instance, status): (EmInstance, EmStatus) = StatusRow {
            em_application_name: row.em_application_name,
            em_instance: row.em_instance,
            is_current,
            health,
            memory_used: row.memory_used,
            memory_max: row.memory_max,
            cpu_permille: row.cpu_permille,
            report_time,
            silent,
        }
        .try_into()?;
        Ok(Self { instance, version, condition: status.into() })
    }
}

/// SQL columns of a [`SurveyRow`]. An EM is silent after `$1` seconds.
macro_rules! surveyed {
    () => {
        "e.em_application_name, e.em_instance, e.epoch AS registered, e.version, r.epoch = e.epoch AS is_current,
            health, memory_used, memory_max, cpu_permille, report_time,
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
    let rows: Vec<SurveyRow> = sqlx::query_as(concat!(
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
    rows.into_iter().map(TryFrom::try_from).collect()
}

/// Like [`survey`], for the registered EMs among `ems`.
pub async fn survey_of(
    executor: impl PgExecutor<'_>,
    ems: &[EmInstance],
    silent_after: Duration,
) -> Result<Vec<SurveyedEm>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows: Vec<SurveyRow> = sqlx::query_as(concat!(
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
    rows.into_iter().map(TryFrom::try_from).collect()
}

/// Returns the EMs whose last report is unhealthy and belongs to their present registration.
pub async fn unhealthy(executor: impl PgExecutor<'_>) -> Result<Vec<EmInstance>, StoreError> {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "-- em_report::unhealthy
        SELECT r.em_application_name, r.em_instance FROM linkis_em_report r JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = r.em_application_name AND e.em_instance = r.em_instance
        WHERE r.health = 'unhealthy' AND r.epoch = e.epoch",
    )
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|(application_name, instance)| TABLE.em(&application_name, &instance)).collect()
}
