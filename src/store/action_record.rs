//! `linkis_resource_action_record`: how tickets ended, so that a late or repeated call can be answered truthfully.

use std::{collections::HashMap, time::Duration};

use sqlx::{FromRow, PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{
    ledger::EndedDelta,
    ticket::{End, EndedTicket},
};

use super::{
    StoreError, expect_rows,
    rows::{Table, em_columns},
};

const TABLE: Table = Table("linkis_resource_action_record");

#[derive(FromRow)]
struct EndedRow {
    ticket_id: Uuid,
    action: String,
    user: String,
    em_application_name: String,
    em_instance: String,
    action_time: OffsetDateTime,
}

impl TryFrom<EndedRow> for EndedTicket {
    type Error = StoreError;

    fn try_from(row: EndedRow) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.ticket_id,
            user: TABLE.name("user", &row.user)?,
            em: TABLE.em(&row.em_application_name, &row.em_instance)?,
            end: End::parse(&row.action).ok_or_else(|| StoreError::inconsistent(TABLE.0, &row.action))?,
            at: row.action_time,
        })
    }
}

/// How those among `ticket_ids` that are remembered ended.
pub async fn read(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, EndedTicket>, StoreError> {
    let rows: Vec<EndedRow> = sqlx::query_as(
        r#"-- action_record::read
        SELECT ticket_id, action, "user", em_application_name, em_instance, action_time
        FROM linkis_resource_action_record WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|row| EndedTicket::try_from(row).map(|ended| (ended.id, ended))).collect()
}

/// Remembers tickets that ended at `now`.
pub async fn insert(
    connection: &mut PgConnection,
    ended: &[EndedDelta],
    now: OffsetDateTime,
) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(ended.iter().map(|ended| &ended.ticket.em));
    let done = sqlx::query(
        r#"-- action_record::insert
        INSERT INTO linkis_resource_action_record (ticket_id, action, "user", em_application_name, em_instance,
            resource_type, resource, action_time)
        SELECT ticket_id, action, "user", em_application_name, em_instance, resource_type, resource::jsonb, $8
        FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[])
            AS d (ticket_id, action, "user", em_application_name, em_instance, resource_type, resource)"#,
    )
    .bind(ended.iter().map(|ended| ended.ticket.id).collect::<Vec<_>>())
    .bind(ended.iter().map(|ended| ended.end.as_str()).collect::<Vec<_>>())
    .bind(ended.iter().map(|ended| ended.ticket.user.as_str()).collect::<Vec<_>>())
    .bind(application_names)
    .bind(instances)
    .bind(ended.iter().map(|ended| ended.ticket.resource_type().as_str()).collect::<Vec<_>>())
    .bind(ended.iter().map(|ended| ended.ticket.resource().to_json()).collect::<Vec<_>>())
    .bind(now)
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, ended.len(), done.rows_affected())
}

/// Removes up to `limit` records older than `history`; true if there may be more.
pub async fn forget(executor: impl PgExecutor<'_>, history: Duration, limit: i64) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- action_record::forget
        DELETE FROM linkis_resource_action_record WHERE id = ANY (ARRAY (
            SELECT id FROM linkis_resource_action_record WHERE action_time < now() - make_interval(secs => $1)
            ORDER BY action_time LIMIT $2))",
    )
    .bind(history.as_secs_f64())
    .bind(limit)
    .execute(executor)
    .await?;
    Ok(i64::try_from(done.rows_affected()).is_ok_and(|rows| rows == limit))
}
