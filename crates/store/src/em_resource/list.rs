//! Pages of EMs for operators, ordered by key.

use std::time::Duration;

use sqlx::{PgExecutor, Row as _};

use crate::{StoreError, rows::labels_json};
use rm_model::{
    em::{Em, EmInstance},
    name::{Labels, Name},
    report::{EmStatus, Health},
};

use super::{TABLE, em};

/// Filter of a list of EMs. Empty fields match every EM.
#[derive(Debug, Default)]
pub struct EmFilter {
    /// Application name to match.
    pub application_name: Option<Name>,
    /// Labels that an EM must have, reserved or not.
    pub labels: Labels,
    /// Health of the last report since the last registration.
    pub health: Option<Health>,
    /// True for silent EMs only; false for others only.
    pub silent: Option<bool>,
    /// True for draining EMs only; false for others only.
    pub draining: Option<bool>,
}

impl EmFilter {
    /// Returns whether the filter has a condition beside the application name.
    pub fn has_conditions(&self) -> bool {
        let Self { application_name: _, labels, health, silent, draining } = self;
        !labels.as_map().is_empty() || health.is_some() || silent.is_some() || draining.is_some()
    }

    /// Returns whether an EM with this status matches, as a statement of [`list`] decides it.
    pub fn matches(&self, em: &Em, status: Option<&EmStatus>) -> bool {
        let label = |key| em.reserved.as_map().get(key).or_else(|| em.labels.as_map().get(key));
        self.application_name.as_ref().is_none_or(|name| *name == em.instance.application_name)
            && self.labels.as_map().iter().all(|(key, value)| label(key) == Some(value))
            && self.health.is_none_or(|health| status.and_then(|status| status.health) == Some(health))
            && self.silent.is_none_or(|silent| status.is_some_and(|status| status.silent) == silent)
            && self.draining.is_none_or(|draining| em.drain.is_some() == draining)
    }
}

/// Result of scanning a range of EMs.
#[derive(Debug)]
pub struct EmScan {
    /// Matching EMs, ordered by key.
    pub ems: Vec<Em>,
    /// Last EM of the scanned range; `None` if no EM follows.
    pub last: Option<EmInstance>,
}

/// Sorts after every application name.
const LAST_NAME: &str = "\u{10ffff}";

/// Scans the next `looked` EMs after `after`, of one application or of all, and returns those that match. An EM is
/// silent if it has not reported or registered for `silent_after`.
pub async fn list(
    executor: impl PgExecutor<'_>,
    filter: &EmFilter,
    silent_after: Duration,
    after: Option<&EmInstance>,
    looked: i64,
) -> Result<EmScan, StoreError> {
    let first = filter.application_name.as_ref().map_or("", Name::as_str);
    let after = after.map_or(("", ""), |em| (em.application_name.as_str(), em.instance.as_str())).max((first, ""));
    let rows = sqlx::query(
        "-- em_resource::list
        WITH looked AS MATERIALIZED (
            SELECT * FROM linkis_em_resource_meta_data
            WHERE (em_application_name, em_instance) > ($1, $2) AND em_application_name <= $4
            ORDER BY em_application_name, em_instance LIMIT $3)
        SELECT l.last, p.* FROM (
            SELECT (SELECT ARRAY[em_application_name, em_instance] FROM looked
                ORDER BY em_application_name, em_instance OFFSET $3 - 1 LIMIT 1) AS last) l
        LEFT JOIN (
            SELECT e.em_application_name, e.em_instance, resource_type, total_resource::text, protected_resource::text,
                used_resource::text, locked_resource::text, used_tickets, used_tickets_xor, labels::text,
                reserved_labels::text, e.epoch, register_time, version, going_epoch, going_end, going_after, counted_to,
                counting_to, counted_after, reason, drained_by, drain_time
            FROM looked e
            LEFT JOIN linkis_em_drain d
                ON d.em_application_name = e.em_application_name AND d.em_instance = e.em_instance
            -- One by one, and only for the requested EMs: never all reports.
            LEFT JOIN LATERAL (
                SELECT epoch, health, report_time FROM linkis_em_report r
                WHERE r.em_application_name = e.em_application_name AND r.em_instance = e.em_instance
                    AND ($6::text IS NOT NULL OR $7::bool IS NOT NULL) LIMIT 1) r ON true
            WHERE (labels || reserved_labels) @> $5::text::jsonb
                AND ($6::text IS NULL OR (r.epoch = e.epoch AND r.health = $6))
                AND ($7::bool IS NULL OR (r.report_time IS NOT NULL
                    AND greatest(r.report_time, register_time) < clock_timestamp() - make_interval(secs => $8)) = $7)
                AND ($9::bool IS NULL OR (d.em_instance IS NOT NULL) = $9)) p ON true
        ORDER BY p.em_application_name, p.em_instance",
    )
    .bind(after.0)
    .bind(after.1)
    .bind(looked)
    .bind(filter.application_name.as_ref().map_or(LAST_NAME, Name::as_str))
    .bind(labels_json(&filter.labels))
    .bind(filter.health.map(Health::as_str))
    .bind(filter.silent)
    .bind(silent_after.as_secs_f64())
    .bind(filter.draining)
    .fetch_all(executor)
    .await?;
    let (mut ems, mut last) = (Vec::with_capacity(rows.len()), None);
    for row in &rows {
        last = row.try_get::<Option<[String; 2]>, _>("last")?;
        if row.try_get::<Option<&str>, _>("em_instance")?.is_some() {
            ems.push(em(TABLE.row(row))?);
        }
    }
    let last = last.map(|[application_name, instance]| TABLE.em(&application_name, &instance)).transpose()?;
    Ok(EmScan { ems, last })
}
