//! Ends of tickets in the history, as input of the sums of use over time. Read-only. Caller: the roll-up task.

use sqlx::PgExecutor;
use time::OffsetDateTime;

use rm_model::{
    resource::{Resource, ResourceType},
    usage_sum::EndedTicketUse,
};

use super::{StoreError, rows::TableName};

const TABLE: TableName = TableName("linkis_resource_action_record");

from_row! {
    struct EndRow {
        id: i64,
        user: String,
        creator: String,
        engine_type: String,
        em_application_name: String,
        em_instance: String,
        resource_type: String,
        resource: String,
        since: Option<OffsetDateTime>,
        action_time: OffsetDateTime,
    }
}

impl EndRow {
    fn parse(self) -> Result<EndedTicketUse, StoreError> {
        let resource = TABLE.resource_type(&self.resource_type);
        let resource = resource.and_then(|of_type| TABLE.resource("resource", of_type, &self.resource));
        Ok(EndedTicketUse {
            em: TABLE.em(&self.em_application_name, &self.em_instance)?,
            // An invalid row must not block the count of all later ones.
            resource: resource.unwrap_or_else(|error| {
                let error: &dyn std::error::Error = &error;
                tracing::error!(line = self.id, error, "the use of an ended ticket cannot be counted");
                Resource::zero(ResourceType::Special)
            }),
            user: self.user,
            creator: self.creator,
            engine_type: self.engine_type,
            since: self.since,
            until: self.action_time,
        })
    }
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
    let rows: Vec<EndRow> = sqlx::query_as(
        r#"-- ended_use::list
        SELECT r.id, r."user", r.creator, r.engine_type, r.em_application_name, r.em_instance, r.resource_type,
            r.resource::text AS resource, r.action_time,
            coalesce(r.held_since, (SELECT min(g.action_time) FROM linkis_resource_action_record g
                WHERE g.ticket_id = r.ticket_id AND g.action IN ('granted', 'adopted'))) AS since
        FROM linkis_resource_action_record r
        WHERE r.id > $1 AND r.id <= $2 AND r.ticket_id IS NOT NULL
            AND r.action IN ('released', 'forced', 'expired', 'unregistered', 'lost')"#,
    )
    .bind(after)
    .bind(until)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(EndRow::parse).collect()
}
