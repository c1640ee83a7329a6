//! What the metrics tell of the cluster as a whole: sums over the EMs, and few rows besides; never over the tickets.

use std::time::Duration;

use sqlx::{FromRow, PgConnection, PgExecutor};
use time::OffsetDateTime;
use tokio_stream::StreamExt as _;

use crate::domain::resource::Resource;

use super::{StoreError, rows::Table};

const TABLE: Table = Table("linkis_em_resource_meta_data");

/// How many locked tickets are counted.
pub const LOCKED_MAX: i64 = 20_000;

/// How many holds are counted.
pub const HOLDS_MAX: i64 = 20_000;

/// An EM as it is summed.
#[derive(Debug)]
pub struct EmFigures {
    /// Everything that it provides.
    pub total: Resource,
    /// The part of it that is never granted.
    pub protected: Resource,
    /// What its engines use.
    pub used: Resource,
    /// What is granted on it and not yet in use.
    pub locked: Resource,
    /// How many tickets engines use.
    pub used_tickets: i64,
    /// How it stands: the gravest that is so.
    pub state: String,
}

#[derive(FromRow)]
struct EmRow {
    resource_type: String,
    total_resource: String,
    protected_resource: String,
    used_resource: String,
    locked_resource: String,
    used_tickets: i64,
    state: String,
}

impl TryFrom<EmRow> for EmFigures {
    type Error = StoreError;

    fn try_from(row: EmRow) -> Result<Self, StoreError> {
        let resource_type = TABLE.resource_type(&row.resource_type)?;
        Ok(Self {
            total: TABLE.resource("total_resource", resource_type, &row.total_resource)?,
            protected: TABLE.resource("protected_resource", resource_type, &row.protected_resource)?,
            used: TABLE.resource("used_resource", resource_type, &row.used_resource)?,
            locked: TABLE.resource("locked_resource", resource_type, &row.locked_resource)?,
            used_tickets: row.used_tickets,
            state: row.state,
        })
    }
}

/// Tells all EMs, of which those that report are silent after `silent_after`; what cannot be read is left out.
pub async fn tell_ems(
    connection: &mut PgConnection,
    silent_after: Duration,
    mut tell: impl FnMut(&EmFigures),
) -> Result<(), StoreError> {
    let mut rows = sqlx::query_as::<_, EmRow>(
        "-- cluster::tell_ems
        SELECT e.resource_type, e.total_resource::text, e.protected_resource::text, e.used_resource::text,
            e.locked_resource::text, e.used_tickets,
            CASE WHEN e.going_epoch = e.epoch THEN 'unregistering'
                WHEN greatest(r.report_time, e.register_time) < clock_timestamp() - make_interval(secs => $1)
                    AND r.report_time IS NOT NULL THEN 'silent'
                WHEN d.em_instance IS NOT NULL THEN 'draining'
                WHEN r.epoch = e.epoch THEN r.health
                ELSE 'unreported' END AS state
        FROM linkis_em_resource_meta_data e
        -- Each by its key, also where these tables were empty when it was planned.
        LEFT JOIN LATERAL (SELECT epoch, report_time, health FROM linkis_em_report
            WHERE em_application_name = e.em_application_name AND em_instance = e.em_instance OFFSET 0) r ON true
        LEFT JOIN LATERAL (SELECT em_instance FROM linkis_em_drain
            WHERE em_application_name = e.em_application_name AND em_instance = e.em_instance OFFSET 0) d ON true
        ORDER BY e.em_application_name, e.em_instance",
    )
    .bind(silent_after.as_secs_f64())
    .fetch(connection);
    while let Some(row) = rows.next().await {
        match EmFigures::try_from(row?) {
            Ok(em) => tell(&em),
            Err(error) => tracing::debug!(%error, "an EM is not in the metrics"),
        }
    }
    Ok(())
}

/// What else there is.
#[derive(Debug, FromRow)]
pub struct Others {
    /// When this was so, by the database's clock.
    pub at: OffsetDateTime,
    /// Locked tickets, up to [`LOCKED_MAX`].
    pub locked_tickets: i64,
    /// Requests that wait in line.
    pub waiting: i64,
    /// For how many seconds the first of them has.
    pub waiting_seconds: f64,
}

/// Reads it.
pub async fn others(executor: impl PgExecutor<'_>) -> Result<Others, StoreError> {
    let others = sqlx::query_as(
        "-- cluster::others
        SELECT clock_timestamp() AS at,
            (SELECT count(*) FROM (
                SELECT FROM linkis_user_resource_meta_data WHERE expires_at IS NOT NULL LIMIT $1) t) AS locked_tickets,
            w.waiting, w.waiting_seconds
        FROM (SELECT count(*) AS waiting,
                coalesce(extract(epoch FROM clock_timestamp() - min(w.waiting_since)), 0)::float8 AS waiting_seconds
            FROM linkis_resource_waiting w
            JOIN linkis_rm_instance i ON i.instance_id = w.instance_id AND i.alive_until > clock_timestamp()) w",
    )
    .bind(LOCKED_MAX)
    .fetch_one(executor)
    .await?;
    Ok(others)
}

/// How many keys somebody holds, by a call or by a row that was put there by hand; up to [`HOLDS_MAX`].
pub async fn holds(executor: impl PgExecutor<'_>) -> Result<i64, StoreError> {
    // In the order of an index: the table itself is full of what batches have left, and scanning it would read all that.
    Ok(sqlx::query_scalar(
        r#"-- cluster::holds
        SELECT count(*) FROM (
            SELECT FROM linkis_resource_lock WHERE hold_until IS NULL OR hold_until > clock_timestamp()
            ORDER BY scope, "user", em_application_name, em_instance LIMIT $1) h"#,
    )
    .bind(HOLDS_MAX)
    .fetch_one(executor)
    .await?)
}
