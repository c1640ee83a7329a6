//! Holds: committed rows of `linkis_resource_lock`, which keep an EM or user locked beyond a transaction.
//!
//! A hold of a call has a deadline. An expired hold no longer counts; the next transaction that needs its key removes
//! it, or else a background task does. A hold without a deadline is a row that an operator wrote by SQL. Changes and
//! their history lines commit together. Callers: `rm_service::holds`, and [`super::resource_lock`] for contended keys.

use std::collections::BTreeSet;

use sqlx::{PgConnection, PgExecutor};

use rm_model::{
    action::Action,
    hold::{ExistingHold, NewHold, ResourceHold},
    name::Name,
    operation::LockKey,
    principal::{Actor, Principal},
    resource::{Resource, ResourceType},
};

use super::{
    StoreError, expect_rows,
    resource_lock::LockKeyColumns,
    rows::{TableName, TableRow, column},
};

const TABLE: TableName = TableName("linkis_resource_lock");

/// Maximum number of counted holds.
const HELD_COUNTED_MAX: i64 = 20_000;

/// Returns the lock key of a row.
fn key(row: TableRow<'_>) -> Result<LockKey, StoreError> {
    Ok(match row.get("scope")? {
        "user" => LockKey::User(row.name("user")?),
        _ => LockKey::Em(row.em()?),
    })
}

fn hold(row: TableRow<'_>) -> Result<ResourceHold, StoreError> {
    let taken = match (row.get("hold_time")?, row.get("hold_until")?) {
        (Some(since), Some(until)) => {
            Some(ExistingHold { reason: row.name("reason")?, by: row.principal("held_by")?, since, until })
        }
        _ => None,
    };
    Ok(ResourceHold { key: key(row)?, taken })
}

/// SQL of a hold as JSON for the history; NULL for an expired hold, or before [`begin`].
macro_rules! state {
    () => {
        "CASE WHEN hold_until > clock_timestamp() THEN json_build_object(
            'reason', reason, 'held_by', held_by, 'hold_time', hold_time, 'hold_until', hold_until)::text END"
    };
}

/// A hold row that the caller owns, before [`begin`].
#[derive(Debug)]
pub struct OwnHold {
    /// Previous state of the caller's own hold, in the form of the history; `None` if there was none.
    before: Option<String>,
}

/// Takes a hold on `key` for `by`, or takes over the caller's own or an expired hold. `None` if another principal owns
/// a hold. The hold takes effect with [`begin`].
///
/// Waits for another transaction that owns the key.
///
/// # Errors
/// [`StoreError::is_lock_timeout`] if the other transaction takes longer than `lock_timeout`; database errors.
pub async fn take(
    connection: &mut PgConnection,
    key: &LockKey,
    by: &Principal,
    reason: &Name,
) -> Result<Option<OwnHold>, StoreError> {
    let key = LockKeyColumns::of(key);
    let before: Option<Option<String>> = sqlx::query_scalar(concat!(
        r#"-- resource_hold::take
        INSERT INTO linkis_resource_lock AS l (scope, "user", em_application_name, em_instance, reason, held_by, hold_time,
            hold_until)
        VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp(), clock_timestamp())
        -- As it was: what it becomes, it becomes when it begins.
        ON CONFLICT (scope, "user", em_application_name, em_instance) DO UPDATE SET hold_until = l.hold_until
        WHERE l.held_by = excluded.held_by OR l.hold_until <= clock_timestamp()
        RETURNING "#,
        state!()
    ))
    .bind(key.scope)
    .bind(key.user)
    .bind(key.em_application_name)
    .bind(key.em_instance)
    .bind(reason.as_str())
    .bind(by.as_str())
    .fetch_optional(connection)
    .await?;
    Ok(before.map(|before| OwnHold { before }))
}

/// Starts a hold that was just taken: sets reason, owner and deadline from now on, and writes the history.
pub async fn begin(
    connection: &mut PgConnection,
    new: &NewHold,
    taken: &OwnHold,
    by: &Actor,
) -> Result<ResourceHold, StoreError> {
    let columns = LockKeyColumns::of(&new.key);
    let row = sqlx::query(concat!(
        r#"-- resource_hold::begin
        WITH begun AS (
            UPDATE linkis_resource_lock SET reason = $9, held_by = $10, hold_time = t.now,
                hold_until = t.now + make_interval(secs => $5)
            FROM (SELECT clock_timestamp() AS now) t
            WHERE scope = $1 AND "user" = $2 AND em_application_name = $3 AND em_instance = $4
            RETURNING scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until
        ), recorded AS (
            INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, scope, resource_type, resource,
                actor, reason, action_time, address, before, after)
            SELECT $6, nullif(em_application_name, ''), nullif(em_instance, ''),
                CASE scope WHEN 'user' THEN jsonb_build_object('user', "user") END, $7, $8::text::jsonb, held_by, reason, hold_time,
                $11, $12, "#,
        state!(),
        " FROM begun
        )
        SELECT * FROM begun"
    ))
    .bind(columns.scope)
    .bind(columns.user)
    .bind(columns.em_application_name)
    .bind(columns.em_instance)
    .bind(new.duration.as_secs_f64())
    .bind(Action::Held.as_str())
    .bind(ResourceType::Special.as_str())
    .bind(Resource::zero(ResourceType::Special).to_json())
    .bind(new.reason.as_str())
    .bind(by.as_str())
    .bind(by.address())
    .bind(taken.before.as_deref())
    .fetch_one(connection)
    .await?;
    hold(TABLE.row(&row))
}

/// Returns the number of hold rows that calls have created, expired ones included.
pub async fn count(executor: impl PgExecutor<'_>) -> Result<usize, StoreError> {
    let count: i64 = sqlx::query_scalar(
        "-- resource_hold::count
        SELECT count(*) FROM linkis_resource_lock WHERE hold_until IS NOT NULL",
    )
    .fetch_one(executor)
    .await?;
    Ok(usize::try_from(count).unwrap_or(usize::MAX))
}

/// Returns the number of locked keys, by calls or by rows that operators wrote, counted up to `HELD_COUNTED_MAX`.
pub async fn count_held(executor: impl PgExecutor<'_>) -> Result<i64, StoreError> {
    // Reads by an index: the table is full of dead rows of batches, which a scan would read.
    Ok(sqlx::query_scalar(
        r#"-- resource_hold::count_held
        SELECT count(*) FROM (
            SELECT FROM linkis_resource_lock WHERE hold_until IS NULL OR hold_until > clock_timestamp()
            ORDER BY scope, "user", em_application_name, em_instance LIMIT $1) h"#,
    )
    .bind(HELD_COUNTED_MAX)
    .fetch_one(executor)
    .await?)
}

/// Returns the hold on a key, if there is one.
pub async fn read(executor: impl PgExecutor<'_>, key: &LockKey) -> Result<Option<ResourceHold>, StoreError> {
    let key = LockKeyColumns::of(key);
    let row = sqlx::query(
        r#"-- resource_hold::read
        SELECT scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until FROM linkis_resource_lock
        WHERE scope = $1 AND "user" = $2 AND em_application_name = $3 AND em_instance = $4
            AND (hold_until IS NULL OR hold_until > clock_timestamp())"#,
    )
    .bind(key.scope)
    .bind(key.user)
    .bind(key.em_application_name)
    .bind(key.em_instance)
    .fetch_optional(executor)
    .await?;
    row.map(|row| hold(TABLE.row(&row))).transpose()
}

/// Returns those `keys` that have a hold row, each with whether that hold is expired.
pub(super) async fn among(
    executor: impl PgExecutor<'_>,
    keys: &BTreeSet<LockKey>,
) -> Result<Vec<(LockKey, bool)>, StoreError> {
    let keys: Vec<_> = keys.iter().map(LockKeyColumns::of).collect();
    let rows = sqlx::query(
        r#"-- resource_hold::among
        SELECT k.*, l.is_over FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
            AS k (scope, "user", em_application_name, em_instance)
        CROSS JOIN LATERAL (
            SELECT coalesce(hold_until <= clock_timestamp(), false) AS is_over FROM linkis_resource_lock l
            WHERE l.scope = k.scope AND l."user" = k."user" AND l.em_application_name = k.em_application_name
                AND l.em_instance = k.em_instance
            OFFSET 0) l"#,
    )
    .bind(column(&keys, |key| key.scope))
    .bind(column(&keys, |key| key.user))
    .bind(column(&keys, |key| key.em_application_name))
    .bind(column(&keys, |key| key.em_instance))
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| Ok((key(row)?, row.get("is_over")?)))
}

/// Returns up to `limit` holds in key order, rows that operators wrote included.
pub async fn list(executor: impl PgExecutor<'_>, limit: i64) -> Result<Vec<ResourceHold>, StoreError> {
    let rows = sqlx::query(
        r#"-- resource_hold::list
        SELECT scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until FROM linkis_resource_lock
        WHERE hold_until IS NULL OR hold_until > clock_timestamp()
        ORDER BY scope, "user", em_application_name, em_instance LIMIT $1"#,
    )
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, hold)
}

/// Removes a hold before its deadline, regardless of its owner. Returns false if there is none.
pub async fn release(connection: &mut PgConnection, key: &LockKey, by: &Actor) -> Result<bool, StoreError> {
    end(connection, key, by, false).await
}

/// Removes an expired hold. Returns false if there is none.
pub async fn end_over(connection: &mut PgConnection, key: &LockKey) -> Result<bool, StoreError> {
    end(connection, key, &Principal::Service.into(), true).await
}

async fn end(connection: &mut PgConnection, key: &LockKey, by: &Actor, only_over: bool) -> Result<bool, StoreError> {
    let key = LockKeyColumns::of(key);
    let done = sqlx::query(concat!(
        r#"-- resource_hold::end
        WITH ended AS (
            DELETE FROM linkis_resource_lock
            WHERE scope = $1 AND "user" = $2 AND em_application_name = $3 AND em_instance = $4
                AND (NOT $9 OR hold_until <= clock_timestamp())
            RETURNING scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until)
        INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, scope, resource_type, resource, actor,
            action_time, address, before)
        SELECT $5, nullif(em_application_name, ''), nullif(em_instance, ''),
            CASE scope WHEN 'user' THEN jsonb_build_object('user', "user") END, $6, $7::text::jsonb, $8, clock_timestamp(), $10, "#,
        state!(),
        " FROM ended"
    ))
    .bind(key.scope)
    .bind(key.user)
    .bind(key.em_application_name)
    .bind(key.em_instance)
    .bind(Action::HoldEnded.as_str())
    .bind(ResourceType::Special.as_str())
    .bind(Resource::zero(ResourceType::Special).to_json())
    .bind(by.as_str())
    .bind(only_over)
    .bind(by.address())
    .execute(connection)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Returns up to `limit` keys of expired holds that are not removed, oldest deadline first.
pub async fn over(executor: impl PgExecutor<'_>, limit: i64) -> Result<Vec<LockKey>, StoreError> {
    let rows = sqlx::query(
        r#"-- resource_hold::over
        SELECT scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until FROM linkis_resource_lock
        WHERE hold_until <= clock_timestamp() ORDER BY hold_until LIMIT $1"#,
    )
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, key)
}

/// Returns whether user locks are still enabled for holds although no hold on a user exists.
pub async fn users_unlocked(executor: impl PgExecutor<'_>) -> Result<bool, StoreError> {
    Ok(sqlx::query_scalar(
        "-- resource_hold::are_users_let_go
        SELECT users_held AND NOT EXISTS (SELECT FROM linkis_resource_lock WHERE scope = 'user')
        FROM linkis_resource_limit_version WHERE only_row",
    )
    .fetch_one(executor)
    .await?)
}

/// Sets whether users are locked because of holds.
pub(super) async fn set_users_held(connection: &mut PgConnection, are_held: bool) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- resource_hold::set_users_held
        UPDATE linkis_resource_limit_version SET users_held = $1 WHERE only_row",
    )
    .bind(are_held)
    .execute(connection)
    .await?;
    expect_rows("linkis_resource_limit_version", 1, done.rows_affected())
}
