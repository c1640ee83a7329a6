//! `linkis_resource_hold`: holds, by which operators stop all changes of an EM or a user until a deadline.
//!
//! A batch reads the holds of its EMs and users under its locks; a hold begins only while no batch on its key runs. A hold whose
//! deadline has passed counts no longer, and a background task deletes its row. Changes and their history lines commit together.
//!
//! A committed row of `linkis_resource_lock`, which another program or an operator wrote, is listed as a hold without a deadline.
//! Callers: `rm_service::holds`, the committer, the admission check, and [`super::resource_lock`] for contended keys.

use std::collections::BTreeSet;

use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;

use rm_model::{
    action::Action,
    hold::{ExistingHold, Holds, NewHold, ResourceHold},
    operation::LockKey,
    principal::Actor,
    resource::{Resource, ResourceType},
};

use super::{
    StoreError,
    resource_lock::LockKeyColumns,
    rows::{TableName, TableRow, column},
};

const TABLE: TableName = TableName("linkis_resource_hold");

/// Maximum number of counted holds.
const HELD_COUNTED_MAX: i64 = 20_000;

/// Returns the lock key of a row.
fn key(row: TableRow<'_>) -> Result<LockKey, StoreError> {
    Ok(match row.get("scope")? {
        "user" => LockKey::User(row.name("user")?),
        _ => LockKey::Em(row.em()?),
    })
}

fn existing(row: TableRow<'_>) -> Result<ExistingHold, StoreError> {
    Ok(ExistingHold {
        reason: row.name("reason")?,
        by: row.principal("held_by")?,
        since: row.get("hold_time")?,
        until: row.get("hold_until")?,
    })
}

/// Parses a hold, or a row of another program, which has no deadline.
fn hold(row: TableRow<'_>) -> Result<ResourceHold, StoreError> {
    let is_row = row.get::<Option<OffsetDateTime>>("hold_until")?.is_none();
    Ok(ResourceHold { key: key(row)?, taken: if is_row { None } else { Some(existing(row)?) } })
}

/// SQL of a hold as JSON for the history; NULL for an expired hold.
macro_rules! state {
    () => {
        "CASE WHEN hold_until > clock_timestamp() THEN json_build_object(
            'reason', reason, 'held_by', held_by, 'hold_time', hold_time, 'hold_until', hold_until)::text END"
    };
}

/// SQL condition on the key in the first four parameters.
macro_rules! of_key {
    () => {
        r#"scope = $1 AND "user" = $2 AND em_application_name = $3 AND em_instance = $4"#
    };
}

/// Returns whether a committed row of another program owns a key.
pub async fn has_row(executor: impl PgExecutor<'_>, key: &LockKey) -> Result<bool, StoreError> {
    let key = LockKeyColumns::of(key);
    Ok(sqlx::query_scalar(concat!(
        "-- resource_hold::has_row
        SELECT EXISTS (SELECT FROM linkis_resource_lock WHERE ",
        of_key!(),
        ")"
    ))
    .bind(key.scope)
    .bind(key.user)
    .bind(key.em_application_name)
    .bind(key.em_instance)
    .fetch_one(executor)
    .await?)
}

/// Starts a hold, or replaces the caller's own or an expired one, and writes the history. `None` if another principal holds the
/// key. The caller has excluded batches on the key.
pub async fn begin(
    connection: &mut PgConnection,
    new: &NewHold,
    by: &Actor,
) -> Result<Option<ResourceHold>, StoreError> {
    let columns = LockKeyColumns::of(&new.key);
    let row = sqlx::query(concat!(
        r#"-- resource_hold::begin
        WITH before AS (SELECT "#,
        state!(),
        " AS state FROM linkis_resource_hold WHERE ",
        of_key!(),
        r#"), begun AS (
            INSERT INTO linkis_resource_hold AS h (scope, "user", em_application_name, em_instance, reason, held_by, hold_time,
                hold_until)
            SELECT $1, $2, $3, $4, $9, $10, t.now, t.now + make_interval(secs => $5) FROM (SELECT clock_timestamp() AS now) t
            ON CONFLICT (scope, "user", em_application_name, em_instance) DO UPDATE SET reason = excluded.reason,
                held_by = excluded.held_by, hold_time = excluded.hold_time, hold_until = excluded.hold_until
            WHERE h.held_by = excluded.held_by OR h.hold_until <= excluded.hold_time
            RETURNING scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until
        ), recorded AS (
            INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, scope, resource_type, resource,
                actor, reason, action_time, address, before, after)
            SELECT $6, nullif(em_application_name, ''), nullif(em_instance, ''),
                CASE scope WHEN 'user' THEN jsonb_build_object('user', "user") END, $7, $8::text::jsonb, held_by, reason, hold_time,
                $11, (SELECT state FROM before), "#,
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
    .fetch_optional(&mut *connection)
    .await?;
    if row.is_some() {
        note_change(connection, &columns).await?;
    }
    row.map(|row| hold(TABLE.row(&row))).transpose()
}

/// Gives the row of a held EM a new version, by which instances see the change of the hold.
async fn note_change(connection: &mut PgConnection, key: &LockKeyColumns<'_>) -> Result<(), StoreError> {
    sqlx::query(
        "-- resource_hold::note_change
        UPDATE linkis_em_resource_meta_data SET version = version + 1 WHERE em_application_name = $1 AND em_instance = $2",
    )
    .bind(key.em_application_name)
    .bind(key.em_instance)
    .execute(connection)
    .await?;
    Ok(())
}

/// Returns the number of holds, expired ones included.
pub async fn count(executor: impl PgExecutor<'_>) -> Result<usize, StoreError> {
    let count: i64 = sqlx::query_scalar(
        "-- resource_hold::count
        SELECT count(*) FROM linkis_resource_hold",
    )
    .fetch_one(executor)
    .await?;
    Ok(usize::try_from(count).unwrap_or(usize::MAX))
}

/// Returns the number of held keys, rows of other programs included, counted up to `HELD_COUNTED_MAX`.
pub async fn count_held(executor: impl PgExecutor<'_>) -> Result<i64, StoreError> {
    // Reads by an index: the table of locks is full of dead rows of batches, which a scan would read.
    Ok(sqlx::query_scalar(
        r#"-- resource_hold::count_held
        SELECT (SELECT count(*) FROM linkis_resource_hold WHERE hold_until > clock_timestamp()) + (SELECT count(*) FROM (
            SELECT FROM linkis_resource_lock
            ORDER BY scope, "user", em_application_name, em_instance LIMIT $1) h)"#,
    )
    .bind(HELD_COUNTED_MAX)
    .fetch_one(executor)
    .await?)
}

/// Returns the hold on a key, expired or not, if there is one.
pub async fn read(executor: impl PgExecutor<'_>, key: &LockKey) -> Result<Option<ResourceHold>, StoreError> {
    let key = LockKeyColumns::of(key);
    let row = sqlx::query(concat!(
        r#"-- resource_hold::read
        SELECT scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until FROM linkis_resource_hold
        WHERE "#,
        of_key!()
    ))
    .bind(key.scope)
    .bind(key.user)
    .bind(key.em_application_name)
    .bind(key.em_instance)
    .fetch_optional(executor)
    .await?;
    row.map(|row| hold(TABLE.row(&row))).transpose()
}

/// Returns the holds among `keys` that are in effect at the time `now`, or at present.
pub async fn in_effect(
    executor: impl PgExecutor<'_>,
    keys: &BTreeSet<LockKey>,
    now: Option<OffsetDateTime>,
) -> Result<Holds, StoreError> {
    let keys: Vec<_> = keys.iter().map(LockKeyColumns::of).collect();
    let rows = sqlx::query(
        r#"-- resource_hold::in_effect
        SELECT h.scope, h."user", h.em_application_name, h.em_instance, reason, held_by, hold_time, hold_until
        FROM linkis_resource_hold h
        WHERE (h.scope, h."user", h.em_application_name, h.em_instance)
            IN (SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]))
            AND hold_until > coalesce($5, clock_timestamp())"#,
    )
    .bind(column(&keys, |key| key.scope))
    .bind(column(&keys, |key| key.user))
    .bind(column(&keys, |key| key.em_application_name))
    .bind(column(&keys, |key| key.em_instance))
    .bind(now)
    .fetch_all(executor)
    .await?;
    let holds: Vec<(LockKey, ExistingHold)> = TABLE.parse(&rows, |row| Ok((key(row)?, existing(row)?)))?;
    Ok(holds.into_iter().collect())
}

/// Returns those `keys` that are held, or that a committed row of another program owns.
pub(super) async fn held(
    executor: impl PgExecutor<'_>,
    keys: &BTreeSet<LockKey>,
) -> Result<BTreeSet<LockKey>, StoreError> {
    let keys: Vec<_> = keys.iter().map(LockKeyColumns::of).collect();
    let rows = sqlx::query(
        r#"-- resource_hold::held
        SELECT k.* FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
            AS k (scope, "user", em_application_name, em_instance)
        CROSS JOIN LATERAL (
            SELECT 1 FROM linkis_resource_lock l
            WHERE l.scope = k.scope AND l."user" = k."user" AND l.em_application_name = k.em_application_name
                AND l.em_instance = k.em_instance
            UNION ALL
            SELECT 1 FROM linkis_resource_hold h
            WHERE h.scope = k.scope AND h."user" = k."user" AND h.em_application_name = k.em_application_name
                AND h.em_instance = k.em_instance AND h.hold_until > clock_timestamp()
            LIMIT 1) l"#,
    )
    .bind(column(&keys, |key| key.scope))
    .bind(column(&keys, |key| key.user))
    .bind(column(&keys, |key| key.em_application_name))
    .bind(column(&keys, |key| key.em_instance))
    .fetch_all(executor)
    .await?;
    let held: Vec<LockKey> = TABLE.parse(&rows, key)?;
    Ok(held.into_iter().collect())
}

/// Returns up to `limit` holds in key order, rows of other programs included.
pub async fn list(executor: impl PgExecutor<'_>, limit: i64) -> Result<Vec<ResourceHold>, StoreError> {
    let rows = sqlx::query(
        r#"-- resource_hold::list
        SELECT scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until FROM linkis_resource_hold
        WHERE hold_until > clock_timestamp()
        UNION ALL
        (SELECT scope, "user", em_application_name, em_instance, NULL, NULL, NULL, NULL FROM linkis_resource_lock
        ORDER BY scope, "user", em_application_name, em_instance LIMIT $1)
        ORDER BY scope, "user", em_application_name, em_instance LIMIT $1"#,
    )
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, hold)
}

/// Which hold of a key ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldEnd {
    /// A hold, before its deadline.
    Released,
    /// A hold whose deadline has passed.
    Expired,
    /// The row of another program in `linkis_resource_lock`.
    RowDeleted,
}

/// Ends a hold and writes the history. Returns the ended hold; `None` if there is none. The caller has locked a held EM.
pub async fn end(
    connection: &mut PgConnection,
    key: &LockKey,
    by: &Actor,
    end: HoldEnd,
) -> Result<Option<ResourceHold>, StoreError> {
    let columns = LockKeyColumns::of(key);
    let from = match end {
        HoldEnd::Released => concat!("linkis_resource_hold WHERE ", of_key!(), " AND hold_until > clock_timestamp()"),
        HoldEnd::Expired => concat!("linkis_resource_hold WHERE ", of_key!(), " AND hold_until <= clock_timestamp()"),
        HoldEnd::RowDeleted => concat!("linkis_resource_lock WHERE ", of_key!()),
    };
    let row = sqlx::query(sqlx::AssertSqlSafe(format!(
        concat!(
            r#"-- resource_hold::end
        WITH ended AS (
            DELETE FROM {from}
            RETURNING scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until
        ), recorded AS (
            INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, scope, resource_type, resource,
                actor, action_time, address, before)
            SELECT $5, nullif(em_application_name, ''), nullif(em_instance, ''),
                CASE scope WHEN 'user' THEN jsonb_build_object('user', "user") END, $6, $7::text::jsonb, $8, clock_timestamp(), $9, "#,
            state!(),
            " FROM ended
        )
        SELECT * FROM ended"
        ),
        from = from
    )))
    .bind(columns.scope)
    .bind(columns.user)
    .bind(columns.em_application_name)
    .bind(columns.em_instance)
    .bind(Action::HoldEnded.as_str())
    .bind(ResourceType::Special.as_str())
    .bind(Resource::zero(ResourceType::Special).to_json())
    .bind(by.as_str())
    .bind(by.address())
    .fetch_optional(&mut *connection)
    .await?;
    if row.is_some() && end != HoldEnd::RowDeleted {
        note_change(connection, &columns).await?;
    }
    row.map(|row| hold(TABLE.row(&row))).transpose()
}

/// Returns up to `limit` keys of expired holds that are not deleted, oldest deadline first.
pub async fn expired(executor: impl PgExecutor<'_>, limit: i64) -> Result<Vec<LockKey>, StoreError> {
    let rows = sqlx::query(
        r#"-- resource_hold::expired
        SELECT scope, "user", em_application_name, em_instance FROM linkis_resource_hold
        WHERE hold_until <= clock_timestamp() ORDER BY hold_until LIMIT $1"#,
    )
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, key)
}
