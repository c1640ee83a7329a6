//! `linkis_reclaim`: tickets of engines that are to end because requests wait. `linkis_reclaim_writer`: the run of the task that
//! may write them; a withdrawal makes it begin anew.
//!
//! A row delays no call, and its ticket counts until it ends. A ticket may end, or its engine run a task again, at any time; the task
//! then deletes the row. Callers: the task `reclaim`, the replies to heartbeats, the list for operators and
//! their withdrawals.

use std::{collections::BTreeSet, time::Duration};

use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    action::Action,
    em::EmInstance,
    name::Name,
    principal::{Actor, Principal},
    reclaim::{NewReclaim, Reclaim, ReclaimFor, ReclaimMode, ReclaimProgress},
};

use super::{
    StoreError, expect_rows,
    rows::{TableName, TableRow, column, em_columns},
};

const TABLE: TableName = TableName("linkis_reclaim");

/// Maximum number of rows whose tickets may come back. With those that stay in spite of their recall, there are at most four times as
/// many.
pub const RECLAIMS_MAX: usize = 1000;

/// Time after a recall for which replies name the ticket. An engine that has not ended then counts as staying.
const ANSWERED_WITHIN: Duration = Duration::from_secs(120);

/// Time after a recall after which a ticket that stayed may be chosen again.
const OVER_AFTER: Duration = Duration::from_secs(720);

/// Time after a withdrawal after which the ticket may be chosen again.
const SPARED_FOR: Duration = Duration::from_secs(3600);

/// Returns all rows, the earliest choice first.
pub async fn all(executor: impl PgExecutor<'_>) -> Result<Vec<Reclaim>, StoreError> {
    let rows = sqlx::query(
        "-- reclaim::all
        SELECT r.ticket_id, r.for_ticket_id, r.for_em_application_name, r.for_em_instance, r.mode, r.busy, r.due_time,
            r.due_time <= clock_timestamp() AS is_due, r.recall_time IS NOT NULL AS was_recalled,
            coalesce(r.recall_time < clock_timestamp() - make_interval(secs => $2), false) AS is_unanswered,
            coalesce(r.recall_time < clock_timestamp() - make_interval(secs => $3), false) AS is_over,
            r.withdrawn_time < clock_timestamp() - make_interval(secs => $4) AS is_withdrawal_over,
            t.ticket_id IS NOT NULL AS is_live, r.busy OR coalesce(t.idle_since <= r.chosen_time, false) AS can_end,
            w.ticket_id IS NOT NULL AS is_waiting, w.claim IS NOT NULL AS is_present
        FROM (SELECT * FROM linkis_reclaim ORDER BY chosen_time, ticket_id LIMIT $1) r
        -- OFFSET 0 forces look-ups by key.
        LEFT JOIN LATERAL (SELECT t.ticket_id, t.idle_since FROM linkis_user_resource_meta_data t
            WHERE t.ticket_id = r.ticket_id OFFSET 0) t ON true
        LEFT JOIN LATERAL (SELECT w.ticket_id, w.claim FROM linkis_resource_waiting w
            WHERE w.ticket_id = r.for_ticket_id OFFSET 0) w ON true
        ORDER BY r.chosen_time, r.ticket_id",
    )
    .bind(i64::try_from(4 * RECLAIMS_MAX).unwrap_or(i64::MAX))
    .bind(ANSWERED_WITHIN.as_secs_f64())
    .bind(OVER_AFTER.as_secs_f64())
    .bind(SPARED_FOR.as_secs_f64())
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, reclaim)
}

fn reclaim(row: TableRow<'_>) -> Result<Reclaim, StoreError> {
    let was_recalled = row.get("was_recalled")?;
    let withdrawal: Option<bool> = row.get("is_withdrawal_over")?;
    let is_unanswered = row.get("is_unanswered")?;
    let progress = match (row.get("is_live")?, row.get("can_end")?, withdrawal, was_recalled) {
        (false, ..) => ReclaimProgress::Ended { was_recalled },
        (true, _, Some(is_over), _) => ReclaimProgress::Withdrawn { was_recalled, is_over },
        (true, false, ..) => ReclaimProgress::Continued,
        (true, true, None, false) => ReclaimProgress::Chosen { is_due: row.get("is_due")? },
        (true, true, None, true) if is_unanswered => ReclaimProgress::Unanswered { is_over: row.get("is_over")? },
        (true, true, None, true) => ReclaimProgress::Recalled,
    };
    let request = match (row.get("is_waiting")?, row.get("is_present")?) {
        (true, true) => ReclaimFor::Present,
        (true, false) => ReclaimFor::Absent,
        (false, _) => ReclaimFor::Gone,
    };
    Ok(Reclaim {
        ticket_id: row.get("ticket_id")?,
        for_ticket_id: row.get("for_ticket_id")?,
        for_em: TABLE.em(row.get("for_em_application_name")?, row.get("for_em_instance")?)?,
        mode: row.parse("mode", ReclaimMode::parse)?,
        busy: row.get("busy")?,
        due_time: row.get("due_time")?,
        progress,
        request,
    })
}

/// Makes `writer` the only writer.
pub async fn begin(executor: impl PgExecutor<'_>, writer: Uuid) -> Result<(), StoreError> {
    sqlx::query(
        "-- reclaim::begin
        UPDATE linkis_reclaim_writer SET writer = $1 WHERE only_row",
    )
    .bind(writer)
    .execute(executor)
    .await?;
    Ok(())
}

/// Locks the writer's row until the end of the transaction. Returns false if another writer has begun.
pub async fn lock(executor: impl PgExecutor<'_>, writer: Uuid) -> Result<bool, StoreError> {
    let owns = sqlx::query_scalar(
        "-- reclaim::lock
        SELECT writer = $1 FROM linkis_reclaim_writer WHERE only_row FOR UPDATE",
    )
    .bind(writer)
    .fetch_one(executor)
    .await?;
    Ok(owns)
}

/// Inserts rows, and replaces those of tickets that are chosen for another request, in another mode, or also while they are busy. The
/// grace period begins anew in another mode, and for a busy engine that was chosen because it was idle.
pub async fn choose(connection: &mut PgConnection, new: &[NewReclaim]) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(new.iter().map(|new| &new.for_em));
    let done = sqlx::query(
        "-- reclaim::choose
        INSERT INTO linkis_reclaim AS r (ticket_id, for_ticket_id, mode, due_time, for_em_application_name, for_em_instance, busy)
        SELECT ticket_id, for_ticket_id, mode, clock_timestamp() + make_interval(secs => grace), application_name, instance, busy
        FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::float8[], $5::text[], $6::text[], $7::bool[])
            AS d (ticket_id, for_ticket_id, mode, grace, application_name, instance, busy)
        ON CONFLICT (ticket_id) DO UPDATE SET for_ticket_id = excluded.for_ticket_id, mode = excluded.mode,
            for_em_application_name = excluded.for_em_application_name, for_em_instance = excluded.for_em_instance, busy = excluded.busy,
            chosen_time = CASE WHEN r.busy AND NOT excluded.busy THEN clock_timestamp() ELSE r.chosen_time END,
            due_time = CASE WHEN r.mode = excluded.mode AND (r.busy OR NOT excluded.busy) THEN r.due_time ELSE excluded.due_time END
            WHERE r.recall_time IS NULL AND r.withdrawn_time IS NULL",
    )
    .bind(column(new, |new| new.ticket_id))
    .bind(column(new, |new| new.for_ticket_id))
    .bind(column(new, |new| new.mode.as_str()))
    .bind(column(new, |new| new.grace.as_secs_f64()))
    .bind(application_names)
    .bind(instances)
    .bind(column(new, |new| new.busy))
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, new.len(), done.rows_affected())
}

/// Deletes the rows of tickets.
pub async fn delete(connection: &mut PgConnection, ticket_ids: &[Uuid]) -> Result<(), StoreError> {
    sqlx::query(
        "-- reclaim::delete
        DELETE FROM linkis_reclaim WHERE ticket_id = ANY ($1)",
    )
    .bind(ticket_ids)
    .execute(connection)
    .await?;
    Ok(())
}

/// Recalls tickets that are chosen for a request, with a history line for each. Returns their number: none if the request does not wait.
/// A ticket that was chosen because its engine was idle is recalled only if the engine is still idle. One of a busy engine is recalled only
/// if the request is stored as entitled. The caller rolls back if some are missing.
pub async fn recall(
    connection: &mut PgConnection,
    ticket_ids: &[Uuid],
    for_ticket_id: Uuid,
) -> Result<usize, StoreError> {
    let done = sqlx::query(
        r#"-- reclaim::recall
        WITH free AS MATERIALIZED (
            SELECT t.* FROM linkis_user_resource_meta_data t
            WHERE t.ticket_id = ANY ($1)
                AND (SELECT r.busy OR t.idle_since <= r.chosen_time FROM linkis_reclaim r WHERE r.ticket_id = t.ticket_id)
                AND EXISTS (SELECT FROM linkis_resource_waiting w JOIN linkis_reclaim r ON r.ticket_id = t.ticket_id
                    WHERE w.ticket_id = $2 AND w.claim IS NOT NULL AND (w.class = 0 OR NOT r.busy))
            ORDER BY t.ticket_id FOR NO KEY UPDATE SKIP LOCKED
        ), recalled AS (
            UPDATE linkis_reclaim r SET recall_time = clock_timestamp() FROM free f
            WHERE r.ticket_id = f.ticket_id AND r.for_ticket_id = $2 AND r.recall_time IS NULL
            RETURNING r.ticket_id, r.busy
        )
        INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels, em_application_name,
            em_instance, engine_application_name, engine_instance, resource_type, resource, actor, reason, action_time)
        SELECT $3, f.ticket_id, f."user", f.creator, f.engine_type, f.labels, f.em_application_name, f.em_instance,
            f.engine_application_name, f.engine_instance, f.resource_type, f.user_used_resource, $4,
            CASE WHEN r.busy THEN 'busy; the entitled' ELSE 'idle; the' END || $5, clock_timestamp()
        FROM free f JOIN recalled r ON r.ticket_id = f.ticket_id ORDER BY f.ticket_id"#,
    )
    .bind(ticket_ids)
    .bind(for_ticket_id)
    .bind(Action::Recalled.as_str())
    .bind(Principal::Service.as_str())
    .bind(format!(" request {for_ticket_id} waits"))
    .execute(connection)
    .await?;
    Ok(usize::try_from(done.rows_affected()).unwrap_or(usize::MAX))
}

/// State of a ticket before its withdrawal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithdrawalResult {
    /// The ticket is not chosen, or has ended.
    NotChosen,
    /// It was chosen.
    New,
    /// It was withdrawn already.
    Repeated,
}

/// Withdraws the choice of a live ticket, with a history line.
pub async fn withdraw(
    connection: &mut PgConnection,
    ticket_id: Uuid,
    by: &Actor,
    reason: &Name,
) -> Result<WithdrawalResult, StoreError> {
    let is_new: Option<bool> = sqlx::query_scalar(
        r#"-- reclaim::withdraw
        WITH chosen AS (
            SELECT r.ticket_id, r.withdrawn_time IS NULL AS is_new FROM linkis_reclaim r WHERE r.ticket_id = $1 FOR UPDATE
        ), withdrawn AS (
            UPDATE linkis_reclaim r SET withdrawn_time = clock_timestamp() FROM chosen c WHERE r.ticket_id = c.ticket_id AND c.is_new
        ), recorded AS (
            INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels, em_application_name,
                em_instance, engine_application_name, engine_instance, resource_type, resource, actor, address, reason, action_time)
            SELECT $2, t.ticket_id, t."user", t.creator, t.engine_type, t.labels, t.em_application_name, t.em_instance,
                t.engine_application_name, t.engine_instance, t.resource_type, t.user_used_resource, $3, $4, $5, clock_timestamp()
            FROM linkis_user_resource_meta_data t JOIN chosen c ON c.ticket_id = t.ticket_id AND c.is_new
        )
        SELECT c.is_new FROM chosen c JOIN linkis_user_resource_meta_data t ON t.ticket_id = c.ticket_id"#,
    )
    .bind(ticket_id)
    .bind(Action::ReclaimWithdrawn.as_str())
    .bind(by.as_str())
    .bind(by.address())
    .bind(reason.as_str())
    .fetch_optional(connection)
    .await?;
    Ok(match is_new {
        None => WithdrawalResult::NotChosen,
        Some(true) => WithdrawalResult::New,
        Some(false) => WithdrawalResult::Repeated,
    })
}

/// A recalled ticket whose EM is to stop its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStop {
    /// The ticket.
    pub ticket_id: Uuid,
    /// Whether the engine is to end also while it runs tasks.
    pub busy: bool,
}

/// Returns the recalled tickets whose EMs are to stop their engines, with these EMs.
pub async fn to_stop(executor: impl PgExecutor<'_>) -> Result<Vec<(EmInstance, EngineStop)>, StoreError> {
    let rows = sqlx::query(
        "-- reclaim::to_stop
        SELECT t.em_application_name, t.em_instance, t.ticket_id, r.busy
        FROM (SELECT * FROM linkis_reclaim
            WHERE recall_time > clock_timestamp() - make_interval(secs => $3) AND withdrawn_time IS NULL AND mode = $1 LIMIT $2) r
        CROSS JOIN LATERAL (SELECT t.* FROM linkis_user_resource_meta_data t
            WHERE t.ticket_id = r.ticket_id AND (r.busy OR t.idle_since <= r.chosen_time) OFFSET 0) t",
    )
    .bind(ReclaimMode::Stop.as_str())
    .bind(i64::try_from(RECLAIMS_MAX).unwrap_or(i64::MAX))
    .bind(ANSWERED_WITHIN.as_secs_f64())
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| Ok((row.em()?, EngineStop { ticket_id: row.get("ticket_id")?, busy: row.get("busy")? })))
}

/// A chosen ticket as lists show it.
#[derive(Debug, Clone)]
pub struct ListedReclaim {
    /// The ticket.
    pub ticket_id: Uuid,
    /// Its EM.
    pub em: EmInstance,
    /// Its user.
    pub user: Name,
    /// Time since which its engine is idle; `None` if the engine runs a task again.
    pub idle_since: Option<OffsetDateTime>,
    /// Ticket id of the request.
    pub for_ticket_id: Uuid,
    /// User of the request; `None` if it does not wait any more.
    pub for_user: Option<Name>,
    /// Mode of the policy at the choice.
    pub mode: ReclaimMode,
    /// Whether its engine ends also while it runs tasks.
    pub busy: bool,
    /// Time of the choice.
    pub chosen_time: OffsetDateTime,
    /// End of the grace period.
    pub due_time: OffsetDateTime,
    /// Time of the recall.
    pub recall_time: Option<OffsetDateTime>,
    /// Time of the withdrawal by an operator.
    pub withdrawn_time: Option<OffsetDateTime>,
}

/// Returns up to `limit` live chosen tickets after `after`, by their ids; of `users` if given.
pub async fn list(
    executor: impl PgExecutor<'_>,
    users: Option<&BTreeSet<Name>>,
    after: Uuid,
    limit: i64,
) -> Result<Vec<ListedReclaim>, StoreError> {
    let rows = sqlx::query(
        r#"-- reclaim::list
        SELECT r.ticket_id, t.em_application_name, t.em_instance, t."user", t.idle_since, r.for_ticket_id, w."user" AS for_user,
            r.mode, r.busy, r.chosen_time, r.due_time, r.recall_time, r.withdrawn_time
        FROM linkis_reclaim r
        CROSS JOIN LATERAL (SELECT * FROM linkis_user_resource_meta_data t WHERE t.ticket_id = r.ticket_id OFFSET 0) t
        LEFT JOIN LATERAL (SELECT w."user" FROM linkis_resource_waiting w WHERE w.ticket_id = r.for_ticket_id OFFSET 0) w ON true
        WHERE r.ticket_id > $1 AND ($3::text[] IS NULL OR t."user" = ANY ($3)) ORDER BY r.ticket_id LIMIT $2"#,
    )
    .bind(after)
    .bind(limit)
    .bind(users.map(|users| users.iter().map(Name::as_str).collect::<Vec<_>>()))
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| {
        let for_user: Option<&str> = row.get("for_user")?;
        Ok(ListedReclaim {
            ticket_id: row.get("ticket_id")?,
            em: row.em()?,
            user: row.name("user")?,
            idle_since: row.get("idle_since")?,
            for_ticket_id: row.get("for_ticket_id")?,
            for_user: for_user.map(|user| TABLE.name("for_user", user)).transpose()?,
            mode: row.parse("mode", ReclaimMode::parse)?,
            busy: row.get("busy")?,
            chosen_time: row.get("chosen_time")?,
            due_time: row.get("due_time")?,
            recall_time: row.get("recall_time")?,
            withdrawn_time: row.get("withdrawn_time")?,
        })
    })
}
