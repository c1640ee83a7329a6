//! Ticket groups for audits: all live tickets, grouped by the columns that counters depend on.

use sqlx::{PgConnection, postgres::PgRow};
use tokio::task::consume_budget;
use tokio_stream::StreamExt as _;
use uuid::Uuid;

use crate::StoreError;
use rm_model::{em::EmInstance, resource::Resource, ticket::Ticket, ticket_digest::TicketDigest};

use super::{TABLE, ticket};

/// Group of tickets with equal labels, state and amounts.
#[derive(Debug)]
pub struct TicketGroup {
    /// A ticket of the group, for its labels, state and amounts.
    pub ticket: Ticket,
    /// Number of tickets in the group.
    pub count: i64,
}

/// Passes all live tickets, grouped by the columns that scope counters depend on, to `visit`. Keeps one group in memory.
pub async fn for_each_group(
    connection: &mut PgConnection,
    mut visit: impl FnMut(Result<TicketGroup, StoreError>),
) -> Result<(), StoreError> {
    let mut rows = sqlx::query(
        r#"-- user_resource::for_each_group
        SELECT min(ticket_id::text)::uuid AS ticket_id, "user", creator, engine_type,
            em_application_name, em_instance,
            min(engine_application_name) AS engine_application_name, min(engine_instance) AS engine_instance,
            resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            min(locked_time) AS locked_time, min(used_time) AS used_time, min(expires_at) AS expires_at,
            min(principal) AS principal, min(em_epoch) AS em_epoch, min(idle_since) AS idle_since, count(*) AS count
        FROM linkis_user_resource_meta_data
        GROUP BY "user", creator, engine_type, em_application_name, em_instance, resource_type, user_locked_resource,
            user_used_resource, labels"#,
    )
    .fetch(connection);
    while let Some(row) = rows.next().await {
        consume_budget().await;
        let row = row?;
        let row = TABLE.row(&row);
        let (id, count) = (row.get("ticket_id")?, row.get("count")?);
        visit(ticket(row).map(|ticket| TicketGroup { ticket, count }).map_err(|error| naming(error, id)));
    }
    Ok(())
}

/// Adds the id of one ticket of an unreadable group to `error`.
fn naming(error: StoreError, ticket_id: Uuid) -> StoreError {
    match error {
        StoreError::Inconsistent { table, what } => {
            StoreError::inconsistent(table, format!("{what}, e.g. of ticket {ticket_id}"))
        }
        error => error,
    }
}

/// Group of tickets on one EM with equal state and amounts.
#[derive(Debug)]
pub struct EmTicketGroup {
    /// EM of the tickets.
    pub em: EmInstance,
    /// Amounts of each ticket, or the parse error.
    pub held: Result<Resource, String>,
    /// Whether the tickets are locked: no engine is confirmed yet.
    pub is_locked: bool,
    /// Number of tickets in the group.
    pub count: u32,
    /// Digest of the ticket ids if the tickets are used; the default for locked ones.
    pub used_tickets: TicketDigest,
}

/// Returns the group of tickets in a row.
pub(crate) fn em_ticket_group(row: &PgRow) -> Result<EmTicketGroup, StoreError> {
    let row = TABLE.row(row);
    let (count, one): (i64, &str) = (row.get("count")?, row.get("one")?);
    let locked: Option<&str> = row.get("user_locked_resource")?;
    let used: Option<&str> = row.get("user_used_resource")?;
    // 128 binary digits.
    let xor = u128::from_str_radix(row.get("xor")?, 2).map_err(|error| row.wrong(error))?;
    let used_tickets = match locked {
        Some(_) => TicketDigest::default(),
        None => TicketDigest { count, xor: Uuid::from_u128(xor) },
    };
    let json = locked.or(used).unwrap_or_default();
    let held = TABLE.resource_type(row.get("ticket_type")?).and_then(|kind| TABLE.resource("ticket", kind, json));
    Ok(EmTicketGroup {
        em: row.em()?,
        held: held.map_err(|error| format!("{error}, e.g. of ticket {one}")),
        is_locked: locked.is_some(),
        count: u32::try_from(count).map_err(|error| row.wrong(error))?,
        used_tickets,
    })
}

/// Passes the live tickets of one EM, grouped by the columns that its counters depend on, to `visit`.
pub async fn for_each_em_group(
    connection: &mut PgConnection,
    em: &EmInstance,
    mut visit: impl FnMut(Result<EmTicketGroup, StoreError>),
) -> Result<(), StoreError> {
    let mut rows = sqlx::query(
        "-- user_resource::for_each_em_group
        SELECT em_application_name, em_instance, resource_type AS ticket_type, user_locked_resource::text,
            user_used_resource::text, count(*) AS count,
            bit_xor(('x' || replace(ticket_id::text, '-', ''))::bit(128))::text AS xor, min(ticket_id::text) AS one
        FROM linkis_user_resource_meta_data WHERE em_application_name = $1 AND em_instance = $2
        GROUP BY em_application_name, em_instance, resource_type, user_locked_resource, user_used_resource",
    )
    .bind(em.application_name.as_str())
    .bind(em.instance.as_str())
    .fetch(connection);
    while let Some(row) = rows.next().await {
        visit(em_ticket_group(&row?));
    }
    Ok(())
}
