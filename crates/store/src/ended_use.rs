//! Ends of tickets in the history, as input of the sums of use over time. Read-only. Caller: the roll-up task.

use sqlx::PgExecutor;

use rm_model::{
    resource::{Resource, ResourceType},
    usage_sum::EndedTicketUse,
};

use super::{
    StoreError,
    rows::{TableName, TableRow},
};

const TABLE: TableName = TableName("linkis_resource_action_record");

fn ended(row: TableRow<'_>) -> Result<EndedTicketUse, StoreError> {
    let resource = row.resource_type().and_then(|of_type| row.resource("resource", of_type));
    let line: i64 = row.get("id")?;
    Ok(EndedTicketUse {
        em: row.em()?,
        // An invalid row must not block the count of all later ones.
        resource: resource.unwrap_or_else(|error| {
            let error: &dyn std::error::Error = &error;
            tracing::error!(line, error, "the use of an ended ticket cannot be counted");
            Resource::zero(ResourceType::Special)
        }),
        user: row.get("user")?,
        creator: row.get("creator")?,
        engine_type: row.get("engine_type")?,
        since: row.get("since")?,
        until: row.get("action_time")?,
    })
}

/// Returns the number of the first line after `after`; `None` if there is none.
pub async fn next_number(executor: impl PgExecutor<'_>, after: i64) -> Result<Option<i64>, StoreError> {
    let number = sqlx::query_scalar(
        "-- ended_use::next_number
        SELECT id FROM linkis_resource_action_record WHERE id > $1 ORDER BY id LIMIT 1",
    )
    .bind(after)
    .fetch_optional(executor)
    .await?;
    Ok(number)
}

/// Returns the use of the tickets that ended in the lines after `after`, up to `until`.
pub async fn list(executor: impl PgExecutor<'_>, after: i64, until: i64) -> Result<Vec<EndedTicketUse>, StoreError> {
    let rows = sqlx::query(
        r#"-- ended_use::list
        SELECT r.id, r."user", r.creator, r.engine_type, r.em_application_name, r.em_instance, r.resource_type,
            r.resource::text AS resource, r.action_time, r.held_since AS since
        FROM linkis_resource_action_record r
        WHERE r.id > $1 AND r.id <= $2 AND r.ticket_id IS NOT NULL
            AND r.action IN ('released', 'forced', 'expired', 'unregistered', 'lost')"#,
    )
    .bind(after)
    .bind(until)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, ended)
}
