//! `linkis_resource_action_record`: the history, one line per change. Late and repeated calls get their replies from
//! its lines.
//!
//! Lines never change; the retention deletes them, as a rule with their partition. Line numbers ascend, but a lower
//! number can become visible later, because a line takes its number before its commit. Callers: the batch write, lists,
//! followers and retries.
//!
//! Submodules: `batch`: lines of a batch; `direct`: lines of changes outside batches; `row`: a line as read; `filter`,
//! `by_key`: searches.

use std::{collections::HashMap, time::Duration};

use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    action::{Action, ActionRecord},
    em::EmInstance,
    name::Name,
    resource::Resource,
    ticket::EndedTicket,
    ticket_end::TicketEnd,
};

use super::{
    StoreError,
    rows::{TableName, TableRow},
};

mod batch;
mod by_key;
mod direct;
mod filter;
mod row;

pub(super) use self::batch::BatchRecord;
use self::row::record;
pub use self::{
    by_key::{ActionKey, list_by_key},
    direct::{LimitAct, OtherAct, RepairAct, insert_limits, insert_others, insert_repairs},
    filter::{ActionFilter, NumberRange, cut, list_matching, number_before},
};

const TABLE: TableName = TableName("linkis_resource_action_record");

fn ended(row: TableRow<'_>) -> Result<EndedTicket, StoreError> {
    Ok(EndedTicket {
        id: row.get("ticket_id")?,
        user: row.name("user")?,
        em: row.em()?,
        end: row.parse("action", TicketEnd::parse)?,
        at: row.get("action_time")?,
    })
}

/// Returns the ends of those tickets among `ticket_ids` that the history still contains.
pub async fn read(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, EndedTicket>, StoreError> {
    let rows = sqlx::query(
        r#"-- action_record::read
        SELECT ticket_id, action, "user", em_application_name, em_instance, action_time
        FROM linkis_resource_action_record
        WHERE ticket_id = ANY ($1) AND action IN ('released', 'forced', 'expired', 'unregistered', 'lost')"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| ended(row).map(|ended| (ended.id, ended)))
}

/// Returns the adopted amounts of those tickets among `ticket_ids` whose adoption the history still contains.
pub async fn adopted(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, Resource>, StoreError> {
    let rows = sqlx::query(
        "-- action_record::adopted
        SELECT ticket_id, resource_type, resource::text FROM linkis_resource_action_record
        WHERE ticket_id = ANY ($1) AND action = $2",
    )
    .bind(ticket_ids)
    .bind(Action::Adopted.as_str())
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| Ok((row.get("ticket_id")?, row.resource("resource", row.resource_type()?)?)))
}

/// Returns the reasons of the removals of those waiting requests among `ticket_ids` whose removal the history still contains.
pub async fn removed_from_queue(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, Name>, StoreError> {
    let rows = sqlx::query(
        "-- action_record::removed_from_queue
        SELECT ticket_id, reason FROM linkis_resource_action_record WHERE ticket_id = ANY ($1) AND action = $2",
    )
    .bind(ticket_ids)
    .bind(Action::RemovedFromQueue.as_str())
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| Ok((row.get("ticket_id")?, row.name("reason")?)))
}

/// Returns whether the line `number` with the time `at` exists: the evidence of a commit. The number alone proves
/// nothing. A crashed database, or a promoted standby, reuses the numbers that it did not know of.
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

/// Returns the EMs of the lines after `after` within the last hour.
pub async fn ems_behind(executor: impl PgExecutor<'_>, after: i64) -> Result<Vec<EmInstance>, StoreError> {
    let rows = sqlx::query(
        "-- action_record::ems_behind
        SELECT DISTINCT em_application_name, em_instance FROM linkis_resource_action_record
        WHERE id > $1 AND action_time > now() - interval '1 hour' AND em_instance IS NOT NULL",
    )
    .bind(after)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| row.em())
}

/// Returns up to `limit` lines after `after`, oldest first, of one ticket or of all.
pub async fn list(
    executor: impl PgExecutor<'_>,
    ticket_id: Option<Uuid>,
    after: i64,
    limit: i64,
) -> Result<Vec<ActionRecord>, StoreError> {
    // A separate SQL text per index.
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
    let rows = sqlx::query(sql).bind(after).bind(limit).bind(ticket_id).fetch_all(executor).await?;
    TABLE.parse(&rows, record)
}
/// Deletes up to `limit` lines older than `history` outside the partitions. Returns whether more may exist.
pub async fn delete_unpartitioned(
    executor: impl PgExecutor<'_>,
    history: Duration,
    limit: i64,
) -> Result<bool, StoreError> {
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
