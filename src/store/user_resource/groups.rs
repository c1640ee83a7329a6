//! All tickets, by what is the same: for audits.

use sqlx::{FromRow, PgConnection};
use tokio_stream::StreamExt as _;
use uuid::Uuid;

use crate::domain::{em::EmInstance, resource::Resource, ticket::Ticket, ticket_digest::TicketDigest};
use crate::store::StoreError;

use super::{TABLE, TicketRow};

/// Tickets that are alike: so many with the same labels, of the same state, that hold the same.
#[derive(Debug)]
pub struct Group {
    /// One of them, for its labels, its state and what it holds.
    pub ticket: Ticket,
    /// How many there are.
    pub count: i64,
}

/// Tells all live tickets, by what scopes count of them: however many there are, only one group at a time is kept.
pub async fn tell_groups(
    connection: &mut PgConnection,
    mut tell: impl FnMut(Result<Group, StoreError>),
) -> Result<(), StoreError> {
    #[derive(FromRow)]
    struct GroupRow {
        #[sqlx(flatten)]
        ticket: TicketRow,
        count: i64,
    }
    let mut rows = sqlx::query_as::<_, GroupRow>(
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
        let GroupRow { ticket, count } = row?;
        let id = ticket.ticket_id;
        let ticket = Ticket::try_from(ticket).map_err(|error| naming(error, id));
        tell(ticket.map(|ticket| Group { ticket, count }));
    }
    Ok(())
}

/// Adds one ticket of a group that cannot be read to the error.
fn naming(error: StoreError, ticket_id: Uuid) -> StoreError {
    match error {
        StoreError::Inconsistent { table, what } => {
            StoreError::inconsistent(table, format!("{what}, e.g. of ticket {ticket_id}"))
        }
        error => error,
    }
}

/// Tickets on one EM that are alike: so many of the same state, that hold the same.
#[derive(Debug)]
pub struct EmGroup {
    /// Where.
    pub em: EmInstance,
    /// What each of them holds, or why that cannot be read.
    pub held: Result<Resource, String>,
    /// Whether their engines have not yet reported in.
    pub is_locked: bool,
    /// How many there are.
    pub count: u32,
    /// Which they are, if they are used; of locked ones nothing.
    pub used_tickets: TicketDigest,
}

/// What audits read of tickets on one EM that are alike.
#[derive(FromRow)]
pub(in crate::store) struct EmGroupRow {
    em_application_name: String,
    em_instance: String,
    ticket_type: String,
    user_locked_resource: Option<String>,
    user_used_resource: Option<String>,
    count: i64,
    /// 128 binary digits.
    xor: String,
    one: String,
}

impl TryFrom<EmGroupRow> for EmGroup {
    type Error = StoreError;

    fn try_from(row: EmGroupRow) -> Result<Self, StoreError> {
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

/// Tells the live tickets of one EM, by what it counts of them.
pub async fn tell_em_groups(
    connection: &mut PgConnection,
    em: &EmInstance,
    mut tell: impl FnMut(Result<EmGroup, StoreError>),
) -> Result<(), StoreError> {
    let mut rows = sqlx::query_as::<_, EmGroupRow>(
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
        tell(row?.try_into());
    }
    Ok(())
}
