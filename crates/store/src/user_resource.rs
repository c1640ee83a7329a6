//! `linkis_user_resource_meta_data`: live tickets.
//!
//! This module reads tickets and counts missed reports. Never: writes another part of a ticket; `batch_write` does.
//! Callers: the committer, background tasks, audits and lists.
//!
//! Submodules: `by_em`: tickets by EM, in pages; `due`: tickets near their deadline; `groups`: all tickets, grouped for
//! audits; `list`: pages for operators.

use std::collections::HashMap;

use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    name::Name,
    operation::ReleaseTicket,
    principal::Principal,
    report::EmReport,
    ticket::{EngineInstance, Ticket, TicketState},
};

use super::{StoreError, rows::TableName};

mod by_em;
mod due;
mod groups;
mod list;

pub use by_em::{EmTicketsQuery, are_more_than, count_on, inhabited, living, read_on, read_pages};
pub use due::{DueKey, DueTicket, due};
pub(super) use groups::EmTicketGroupRow;
pub use groups::{EmTicketGroup, TicketGroup, for_each_group, tell_em_groups};
pub use list::{TicketFilter, TicketListPage, list};

const TABLE: TableName = TableName("linkis_user_resource_meta_data");

from_row! {
    struct TicketRow {
        ticket_id: Uuid,
        user: String,
        creator: String,
        engine_type: String,
        em_application_name: String,
        em_instance: String,
        engine_application_name: Option<String>,
        engine_instance: Option<String>,
        resource_type: String,
        user_locked_resource: Option<String>,
        user_used_resource: Option<String>,
        labels: String,
        locked_time: OffsetDateTime,
        used_time: Option<OffsetDateTime>,
        expires_at: Option<OffsetDateTime>,
        principal: String,
        em_epoch: i64,
    }
}

impl TryFrom<TicketRow> for Ticket {
    type Error = StoreError;

    fn try_from(row: TicketRow) -> Result<Self, StoreError> {
        let resource_type = TABLE.resource_type(&row.resource_type)?;
        let state = match &row {
            TicketRow { user_locked_resource: Some(json), expires_at: Some(expires_at), .. } => TicketState::Locked {
                resource: TABLE.resource("user_locked_resource", resource_type, json)?,
                expires_at: *expires_at,
            },
            TicketRow {
                user_used_resource: Some(json),
                used_time: Some(used_time),
                engine_application_name: Some(application_name),
                engine_instance: Some(instance),
                ..
            } => TicketState::Used {
                resource: TABLE.resource("user_used_resource", resource_type, json)?,
                engine: EngineInstance::parse("engine", application_name, instance)
                    .map_err(|error| StoreError::inconsistent(TABLE.0, error))?,
                used_time: *used_time,
            },
            _ => return Err(StoreError::inconsistent(TABLE.0, format!("ticket {}: its state", row.ticket_id))),
        };
        Ok(Self {
            id: row.ticket_id,
            user: TABLE.name("user", &row.user)?,
            creator: TABLE.name("creator", &row.creator)?,
            em: TABLE.em(&row.em_application_name, &row.em_instance)?,
            labels: TABLE.labels(&row.labels)?,
            engine_type: row.engine_type,
            locked_time: row.locked_time,
            state,
            principal: Principal::parse("principal", &row.principal)
                .map_err(|error| StoreError::inconsistent(TABLE.0, error))?,
            em_epoch: row.em_epoch,
        })
    }
}

/// Returns the live tickets among `ticket_ids`.
pub async fn read(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<HashMap<Uuid, Ticket>, StoreError> {
    let rows: Vec<TicketRow> = sqlx::query_as(
        r#"-- user_resource::read
        SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance, engine_application_name,
            engine_instance, resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            locked_time, used_time, expires_at, principal, em_epoch
        FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|row| Ticket::try_from(row).map(|ticket| (ticket.id, ticket))).collect()
}

/// Returns the users of the live tickets among `ticket_ids`.
pub async fn users(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<Vec<(Uuid, Name)>, StoreError> {
    let rows: Vec<(Uuid, String)> = sqlx::query_as(
        r#"-- user_resource::users
        SELECT ticket_id, "user" FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|(id, user)| TABLE.name("user", &user).map(|user| (id, user))).collect()
}

/// Returns user and EM of the live tickets among `ticket_ids`.
pub async fn owners(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, ReleaseTicket>, StoreError> {
    let rows: Vec<(Uuid, String, String, String)> = sqlx::query_as(
        r#"-- user_resource::owners
        SELECT ticket_id, "user", em_application_name, em_instance
        FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    let owner = |(ticket_id, user, application_name, instance): (Uuid, String, String, String)| {
        let (user, em) = (TABLE.name("user", &user)?, TABLE.em(&application_name, &instance)?);
        Ok((ticket_id, ReleaseTicket { ticket_id, user, em }))
    };
    rows.into_iter().map(owner).collect()
}

/// Stores for used tickets the number of consecutive reports that missed them, and marks the EM's report accordingly.
///
/// Writes only if `report` is still the last report of its EM; the next report waits for this statement. Skips tickets
/// that another transaction has locked, so it never waits and cannot take part in a deadlock.
pub async fn update_missed(
    executor: impl PgExecutor<'_>,
    report: &EmReport,
    missed: &[(Uuid, i16)],
) -> Result<(), StoreError> {
    let (ids, counts): (Vec<Uuid>, Vec<i16>) = missed.iter().copied().unzip();
    sqlx::query(
        "-- user_resource::update_missed
        WITH last AS MATERIALIZED (
            SELECT any_missed, set_config('synchronous_commit', 'off', true) FROM linkis_em_report
            WHERE em_application_name = $3 AND em_instance = $4 AND epoch = $5 AND sequence = $6
            FOR NO KEY UPDATE SKIP LOCKED
        ), noted AS (
            UPDATE linkis_em_report SET any_missed = true
            WHERE em_application_name = $3 AND em_instance = $4 AND EXISTS (SELECT FROM last WHERE NOT any_missed)
        )
        UPDATE linkis_user_resource_meta_data t SET missed_reports = d.missed
        FROM (SELECT u.ticket_id, k.missed
            FROM unnest($1::uuid[], $2::smallint[]) AS k (ticket_id, missed)
            JOIN linkis_user_resource_meta_data u ON u.ticket_id = k.ticket_id
            WHERE u.used_time IS NOT NULL AND EXISTS (SELECT FROM last)
            FOR NO KEY UPDATE OF u SKIP LOCKED) AS d
        WHERE t.ticket_id = d.ticket_id",
    )
    .bind(ids)
    .bind(counts)
    .bind(report.em.application_name.as_str())
    .bind(report.em.instance.as_str())
    .bind(report.epoch)
    .bind(report.sequence)
    .execute(executor)
    .await?;
    Ok(())
}
