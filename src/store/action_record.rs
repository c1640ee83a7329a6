//! `linkis_resource_action_record`: the history, one row per change; also what a late or repeated call is answered by.
//!
//! - `batch`: the lines of a batch; `acts`: those of what is done outside of batches;
//! - `row`: a line as it is read; `matching`, `by_key`: lines that are looked for.

use std::{collections::HashMap, time::Duration};

use sqlx::{FromRow, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{
    action::{Action, ActionRecord},
    em::EmInstance,
    end::End,
    resource::Resource,
    ticket::EndedTicket,
};

use super::{StoreError, rows::Table};

mod acts;
mod batch;
mod by_key;
mod matching;
mod row;

pub(super) use self::batch::Columns;
use self::row::ActionRow;
pub use self::{
    acts::{LimitLine, OtherLine, Repair, insert_limits, insert_others, insert_repairs},
    by_key::{Key, list_by_key},
    matching::{Filter, Numbers, cut, list_matching, number_before},
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
        FROM linkis_resource_action_record
        WHERE ticket_id = ANY ($1) AND action IN ('released', 'forced', 'expired', 'unregistered', 'lost')"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|row| EndedTicket::try_from(row).map(|ended| (ended.id, ended))).collect()
}

/// With what use those among `ticket_ids` were adopted of which that is remembered.
pub async fn adopted(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, Resource>, StoreError> {
    let rows: Vec<(Uuid, String, String)> = sqlx::query_as(
        "-- action_record::adopted
        SELECT ticket_id, resource_type, resource::text FROM linkis_resource_action_record
        WHERE ticket_id = ANY ($1) AND action = $2",
    )
    .bind(ticket_ids)
    .bind(Action::Adopted.as_str())
    .fetch_all(executor)
    .await?;
    let used = |(id, resource_type, json): (Uuid, String, String)| {
        Ok((id, TABLE.resource("resource", TABLE.resource_type(&resource_type)?, &json)?))
    };
    rows.into_iter().map(used).collect()
}

/// Whether there is a record of this number, of the batch of this moment. A number alone may be another's: a database that crashed, or a
/// standby that was promoted, gives those out again of which it has not heard.
pub async fn is_there(executor: impl PgExecutor<'_>, number: i64, at: OffsetDateTime) -> Result<bool, StoreError> {
    let is_there = sqlx::query_scalar(
        "-- action_record::is_there
        SELECT EXISTS (SELECT FROM linkis_resource_action_record WHERE id = $1 AND action_time = $2)",
    )
    .bind(number)
    .bind(at)
    .fetch_one(executor)
    .await?;
    Ok(is_there)
}

/// The EMs of the records behind number `after`, which are of this hour.
pub async fn ems_behind(executor: impl PgExecutor<'_>, after: i64) -> Result<Vec<EmInstance>, StoreError> {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "-- action_record::ems_behind
        SELECT DISTINCT em_application_name, em_instance FROM linkis_resource_action_record
        WHERE id > $1 AND action_time > now() - interval '1 hour' AND em_instance IS NOT NULL",
    )
    .bind(after)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|(application_name, instance)| TABLE.em(&application_name, &instance)).collect()
}

/// Up to `limit` records, oldest first, from behind number `after`; of one ticket, or of all.
pub async fn list(
    executor: impl PgExecutor<'_>,
    ticket_id: Option<Uuid>,
    after: i64,
    limit: i64,
) -> Result<Vec<ActionRecord>, StoreError> {
    // One text each, so that each is planned for its own index.
    let sql = if ticket_id.is_some() {
        r#"-- action_record::list, of a ticket
        SELECT id, action, ticket_id, "user", em_application_name, em_instance, scope::text, resource_type, resource::text,
            actor, action_time, limit_mode, reason, object, address, before, after, creator, engine_type, labels::text,
            engine_application_name, engine_instance
        FROM linkis_resource_action_record
        -- Only the index by ticket has this order.
        WHERE (ticket_id, id) > ($3, $1) AND ticket_id <= $3 AND ticket_id IS NOT NULL ORDER BY ticket_id, id LIMIT $2"#
    } else {
        r#"-- action_record::list, all
        SELECT id, action, ticket_id, "user", em_application_name, em_instance, scope::text, resource_type, resource::text,
            actor, action_time, limit_mode, reason, object, address, before, after, creator, engine_type, labels::text,
            engine_application_name, engine_instance
        FROM linkis_resource_action_record WHERE id > $1 AND $3::uuid IS NULL ORDER BY id LIMIT $2"#
    };
    let rows: Vec<ActionRow> = sqlx::query_as(sql).bind(after).bind(limit).bind(ticket_id).fetch_all(executor).await?;
    rows.into_iter().map(ActionRecord::try_from).collect()
}
/// Removes up to `limit` records older than `history` that are in no part of their own; true if there may be more.
pub async fn forget_rest(executor: impl PgExecutor<'_>, history: Duration, limit: i64) -> Result<bool, StoreError> {
    let forgotten: i64 = sqlx::query_scalar(
        "-- action_record::forget_rest
        WITH gone AS (
            DELETE FROM linkis_resource_action_record_rest WHERE (id, action_time) IN (
                SELECT id, action_time FROM linkis_resource_action_record_rest ORDER BY id LIMIT $2)
                AND action_time < now() - make_interval(secs => $1)
            RETURNING id),
        -- In the same transaction: see history_horizon.
        raised AS (
            UPDATE linkis_resource_action_horizon SET forgotten = greatest(forgotten, (SELECT max(id) FROM gone))
            WHERE EXISTS (SELECT FROM gone))
        SELECT count(*) FROM gone",
    )
    .bind(history.as_secs_f64())
    .bind(limit)
    .fetch_one(executor)
    .await?;
    Ok(forgotten == limit)
}
