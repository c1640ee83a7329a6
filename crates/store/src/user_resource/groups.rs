//! Ticket groups for audits: all live tickets, grouped by the columns that counters depend on.

use sqlx::PgConnection;
use tokio_stream::StreamExt as _;
use uuid::Uuid;

use crate::StoreError;
use rm_model::{em::EmInstance, resource::Resource, ticket::Ticket, ticket_digest::TicketDigest};

use super::{TABLE, TicketRow};

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
    from_row! {
        struct TicketGroupRow {
            count: i64,
            ..ticket: TicketRow,
        }
    }
    let mut rows = sqlx::query_as::<_, TicketGroupRow>(
        r#"-- user_resource::tell_groups
        SELECT min(ticket_id::text)::uuid AS ticket_id, "user", creator, engine_type,
            em_application_name, em_instance,
            min(engine_application_name) AS engine_application_name, min(engine_instance) AS engine_instance,
            resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            min(locked_time) AS locked_time, min(used_time) AS used_time, min(expires_at) AS expires_at,
            min(principal) AS principal, min(em_epoch) AS em_epoch, count(*) AS count
        FROM linkis_user_resource_meta_data
        GROUP BY "user", creator, engine_type, em_application_name, em_instance, resource_type, user_locked_resource,
            user_used_resource, labels"#,
    )
    .fetch(connection);
    while let Some(row) = rows.next().await {
        let TicketGroupRow { ticket, count } = row?;
        let id = ticket.ticket_id;
        let ticket = Ticket::try_from(ticket).map_err(|error| naming(error, id));
        visit(ticket.map(|ticket| TicketGroup { ticket, count }));
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

from_row! {
    /// Columns of a group of tickets on one EM.
    pub(crate) struct EmTicketGroupRow {
        em_application_name: String,
        em_instance: String,
        ticket_type: String,
        user_locked_resource: Option<String>,
        user_used_resource: Option<String>,
        count: i64,
        /// XOR of the ticket ids: 128 binary digits.
        xor: String,
        one: String,
    }
}

impl TryFrom<EmTicketGroupRow> for EmTicketGroup {
    type Error = StoreError;

    fn try_from(row: EmTicketGroupRow) -> Result<Self, StoreError> {
        let is_locked = row.user_locked_resource.is_some();
        let xor = u128::from_str_radix(&row.xor, 2).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
        let used_tickets = match is_locked {
            true => TicketDigest::default(),
            false => TicketDigest { count: row.count, xor: Uuid::from_u128(xor) },
        };
        let json = row.user_locked_resource.or(row.user_used_resource).unwrap_or_default();
        let held = TABLE.resource_type(&row.ticket_type).and_then(|kind| TABLE.resource("ticket", kind, &json));
        Ok(Self {
            em: TABLE.em(&row.em_application_name, &row.em_instance)?,
            held: held.map_err(|error| format!("{error}, e.g. of ticket {}", row.one)),
            is_locked,
            count: u32::try_from(row.count).map_err(|error| StoreError::inconsistent(TABLE.0, error))?,
            used_tickets,
        })
    }
}

/// Passes the live tickets of one EM, grouped by the columns that its counters depend on, to `visit`.
pub async fn tell_em_groups(
    connection: &mut PgConnection,
    em: &EmInstance,
    mut visit: impl FnMut(Result<EmTicketGroup, StoreError>),
) -> Result<(), StoreError> {
    let mut rows = sqlx::query_as::<_, EmTicketGroupRow>(
        "-- user_resource::tell_em_groups
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
        visit(row?.try_into());
    }
    Ok(())
}
