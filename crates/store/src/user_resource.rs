//! `linkis_user_resource_meta_data`: live tickets.
//!
//! This module reads tickets, counts missed reports and records idle engines. Never: writes another part of a ticket;
//! `batch_write` does.
//! Callers: the committer, background tasks, audits and lists.
//!
//! Submodules: `by_em`: tickets by EM, in pages; `due`: tickets near their deadline; `groups`: all tickets, grouped for
//! audits; `idle`: tickets of idle engines; `list`: pages for operators.

use std::collections::HashMap;

use sqlx::PgExecutor;
use uuid::Uuid;

use rm_model::{
    name::Name,
    operation::ReleaseTicket,
    report::EmReport,
    ticket::{Ticket, TicketState},
};

use super::{
    StoreError,
    rows::{TableName, TableRow},
};

mod by_em;
mod due;
mod groups;
mod idle;
mod list;
mod reclaimable;

pub use by_em::{EmTicketsQuery, are_more_than, count_on, inhabited, living, read_on, read_pages};
pub use due::{DueKey, DueTicket, due};
pub(super) use groups::em_ticket_group;
pub use groups::{EmTicketGroup, TicketGroup, for_each_em_group, for_each_group};
pub use idle::{IdleChange, idle_on, update_idle};
pub use list::{TicketFilter, TicketListPage, list};
pub use reclaimable::{PlacePage, ReclaimOrder, ReclaimPlace, ReclaimPosition, reclaimable};

const TABLE: TableName = TableName("linkis_user_resource_meta_data");

fn ticket(row: TableRow<'_>) -> Result<Ticket, StoreError> {
    let (id, resource_type) = (row.get("ticket_id")?, row.resource_type()?);
    let state = match (row.get("expires_at")?, row.get("used_time")?) {
        (Some(expires_at), _) => {
            TicketState::Locked { resource: row.resource("user_locked_resource", resource_type)?, expires_at }
        }
        (None, Some(used_time)) => TicketState::Used {
            resource: row.resource("user_used_resource", resource_type)?,
            engine: TABLE.engine(row.get("engine_application_name")?, row.get("engine_instance")?)?,
            used_time,
            idle_since: row.get("idle_since")?,
        },
        (None, None) => return Err(row.wrong(format!("ticket {id}: its state"))),
    };
    Ok(Ticket {
        id,
        user: row.name("user")?,
        creator: row.name("creator")?,
        em: row.em()?,
        labels: row.labels("labels")?,
        engine_type: row.get("engine_type")?,
        locked_time: row.get("locked_time")?,
        state,
        principal: row.principal("principal")?,
        em_epoch: row.get("em_epoch")?,
    })
}

/// Returns the live tickets among `ticket_ids`.
pub async fn read(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<HashMap<Uuid, Ticket>, StoreError> {
    let rows = sqlx::query(
        r#"-- user_resource::read
        SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance, engine_application_name,
            engine_instance, resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            locked_time, used_time, expires_at, principal, em_epoch, idle_since
        FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| ticket(row).map(|ticket| (ticket.id, ticket)))
}

/// Returns the users of the live tickets among `ticket_ids`.
pub async fn users(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<Vec<(Uuid, Name)>, StoreError> {
    let rows = sqlx::query(
        r#"-- user_resource::users
        SELECT ticket_id, "user" FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| Ok((row.get("ticket_id")?, row.name("user")?)))
}

/// Returns user and EM of the live tickets among `ticket_ids`.
pub async fn owners(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, ReleaseTicket>, StoreError> {
    let rows = sqlx::query(
        r#"-- user_resource::owners
        SELECT ticket_id, "user", em_application_name, em_instance
        FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    let owner = |row: TableRow<'_>| {
        let ticket_id = row.get("ticket_id")?;
        Ok((ticket_id, ReleaseTicket { ticket_id, user: row.name("user")?, em: row.em()? }))
    };
    TABLE.parse(&rows, owner)
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
