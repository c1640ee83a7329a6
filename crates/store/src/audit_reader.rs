//! Audit reader: streams each EM row with the live tickets on that EM, grouped.
//!
//! A single statement reads both, so an audit compares counters and tickets of one moment. The rows are streamed:
//! memory is bounded by one row, independent of the number of EMs. The module never writes. Caller: `rm_service::audit`.

use sqlx::{PgConnection, Row as _, postgres::PgRow};
use tokio::task::consume_budget;
use tokio_stream::StreamExt as _;

use rm_model::audit::StoredEmCounters;

use super::{
    StoreError,
    em_resource::stored_counters,
    user_resource::{EmTicketGroup, em_ticket_group},
};

/// An item of the audit stream.
#[derive(Debug)]
pub enum AuditRow {
    /// Row of an EM. Groups of its tickets follow.
    Em(Box<StoredEmCounters>),
    /// Group of equal tickets, on the preceding EM or on an EM without a row.
    Tickets(EmTicketGroup),
    /// Rows of an EM, or of its tickets, that cannot be parsed.
    Unreadable {
        /// EM as stored, for display.
        em: String,
        /// Parse error.
        error: StoreError,
    },
}

/// Passes all EMs, each followed by its ticket groups, to `visit`. Keeps one row in memory.
pub async fn for_each_em(connection: &mut PgConnection, mut visit: impl FnMut(AuditRow)) -> Result<(), StoreError> {
    let mut rows = sqlx::query(
        "-- audit_reader::for_each_em
        SELECT em_application_name, em_instance, e.resource_type, total_resource::text, protected_resource::text,
            used_resource::text, locked_resource::text, left_resource::text, used_tickets, used_tickets_xor, over_committed,
            version, ticket_type, user_locked_resource::text, user_used_resource::text, count, xor, one
        FROM linkis_em_resource_meta_data e
        FULL JOIN (
            SELECT em_application_name, em_instance, resource_type AS ticket_type, user_locked_resource, user_used_resource,
                count(*) AS count, bit_xor(('x' || replace(ticket_id::text, '-', ''))::bit(128))::text AS xor,
                min(ticket_id::text) AS one
            FROM linkis_user_resource_meta_data
            GROUP BY em_application_name, em_instance, resource_type, user_locked_resource, user_used_resource) t
            USING (em_application_name, em_instance)
        ORDER BY em_application_name, em_instance",
    )
    .fetch(connection);
    let mut last: Option<PgRow> = None;
    while let Some(row) = rows.next().await {
        // A row that has arrived needs no wait: without this, one poll would read thousands.
        consume_budget().await;
        let row = row?;
        let is_stored = row.try_get::<Option<i64>, _>("version")?.is_some();
        if is_stored && !last.as_ref().is_some_and(|last| is_of_same(last, &row)) {
            visit(stored_counters(&row).map(Box::new).map_or_else(unreadable(&row), AuditRow::Em));
        }
        if row.try_get::<Option<i64>, _>("count")?.is_some() {
            visit(em_ticket_group(&row).map_or_else(unreadable(&row), AuditRow::Tickets));
        }
        last = Some(row);
    }
    Ok(())
}

/// Returns a function that builds the item for a row that cannot be parsed.
fn unreadable(row: &PgRow) -> impl FnOnce(StoreError) -> AuditRow {
    let column = |name| row.try_get::<&str, _>(name).unwrap_or_default();
    let em = format!("em={}/{}", column("em_application_name"), column("em_instance"));
    |error| AuditRow::Unreadable { em, error }
}

/// Returns whether two rows name the same EM.
fn is_of_same(one: &PgRow, other: &PgRow) -> bool {
    let same = |column| match (one.try_get::<&str, _>(column), other.try_get::<&str, _>(column)) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    };
    same("em_application_name") && same("em_instance")
}
