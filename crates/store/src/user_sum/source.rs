//! Live tickets and their changes, as input of the sums by user. Read-only.
//!
//! A row that cannot be read counts without amounts and is logged: it must not block the sums of all users.

use std::fmt;

use sqlx::PgExecutor;
use uuid::Uuid;

use rm_model::user_sum::{TicketChange, TicketUse};

use crate::{
    StoreError,
    rows::{TableName, TableRow},
};

const TICKETS: TableName = TableName("linkis_user_resource_meta_data");
const HISTORY: TableName = TableName("linkis_resource_action_record");

fn ticket_use(row: TableRow<'_>, name: impl fmt::Display) -> Result<TicketUse, StoreError> {
    let is_locked = row.get("is_locked")?;
    let resource = row.resource_type().and_then(|of_type| row.resource("resource", of_type));
    let amounts = match resource {
        Ok(resource) => resource.amounts().collect(),
        Err(error) => {
            let error: &dyn std::error::Error = &error;
            tracing::error!(%name, error, "the use of a ticket cannot be counted for its user");
            Vec::new()
        }
    };
    Ok(TicketUse { is_locked, amounts })
}

/// Returns up to `limit` live tickets after `after`, by their ids.
pub async fn tickets(executor: impl PgExecutor<'_>, after: Uuid, limit: i64) -> Result<Vec<TicketChange>, StoreError> {
    let rows = sqlx::query(
        r#"-- user_sum::tickets
        SELECT ticket_id, "user", resource_type, coalesce(user_locked_resource, user_used_resource)::text AS resource,
            user_locked_resource IS NOT NULL AS is_locked, idle_since IS NOT NULL AS is_idle
        FROM linkis_user_resource_meta_data WHERE ticket_id > $1 ORDER BY ticket_id LIMIT $2"#,
    )
    .bind(after)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    let ticket = |row: TableRow<'_>| {
        let ticket_id: Uuid = row.get("ticket_id")?;
        let ticket_use = ticket_use(row, format_args!("ticket {ticket_id}"))?;
        let is_idle = Some(row.get("is_idle")?);
        Ok(TicketChange { ticket_id, user: row.name("user")?, ticket_use: Some(ticket_use), is_idle })
    };
    TICKETS.parse(&rows, ticket)
}

/// Returns up to `limit` tickets with idle engines after `after`, by their ids.
pub async fn idle(executor: impl PgExecutor<'_>, after: Uuid, limit: i64) -> Result<Vec<Uuid>, StoreError> {
    let tickets = sqlx::query_scalar(
        "-- user_sum::idle
        SELECT ticket_id FROM linkis_user_resource_meta_data WHERE idle_since IS NOT NULL AND ticket_id > $1
        ORDER BY ticket_id LIMIT $2",
    )
    .bind(after)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    Ok(tickets)
}

/// Returns up to `limit` changes of tickets in the history lines after `after`, up to `until`, each with its number.
pub async fn changes(
    executor: impl PgExecutor<'_>,
    after: i64,
    until: i64,
    limit: i64,
) -> Result<Vec<(i64, TicketChange)>, StoreError> {
    let rows = sqlx::query(
        r#"-- user_sum::changes
        SELECT id, ticket_id, "user", resource_type, resource::text, engine_instance IS NULL AS is_locked,
            -- A request that was removed from its queues has no ticket.
            action IN ('released', 'forced', 'expired', 'unregistered', 'lost', 'removed_from_queue') AS is_end
        FROM linkis_resource_action_record
        WHERE id > $1 AND id <= $2 AND ticket_id IS NOT NULL
            -- Lines that change no ticket, and may follow the end of their ticket.
            AND action NOT IN ('recalled', 'reclaim_withdrawn') ORDER BY id LIMIT $3"#,
    )
    .bind(after)
    .bind(until)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    let change = |row: TableRow<'_>| {
        let number: i64 = row.get("id")?;
        let ticket_use = match row.get("is_end")? {
            true => None,
            false => Some(ticket_use(row, format_args!("line {number}"))?),
        };
        let (ticket_id, user) = (row.get("ticket_id")?, row.name("user")?);
        Ok((number, TicketChange { ticket_id, user, ticket_use, is_idle: None }))
    };
    HISTORY.parse(&rows, change)
}
