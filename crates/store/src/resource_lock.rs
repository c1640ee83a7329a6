//! `linkis_resource_lock`: resource locks on EMs and users, by a unique constraint.
//!
//! A transaction inserts one row per key in one statement, in the order of [`LockKey`], and deletes the rows before it
//! commits. Another transaction on the same key blocks on the unique index until the first transaction ends. If the
//! owner dies, PostgreSQL rolls the rows back. A visible row is therefore of another program or of an operator, and blocks the
//! key until its deletion.
//!
//! The module never waits for one key while it owns another, except inside a single insert. Callers: the committer, its
//! contended-key queues, holds, and the repair of an audit.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use sqlx::{Connection as _, PgConnection};
use time::OffsetDateTime;

use rm_model::operation::LockKey;

use super::{StoreError, expect_rows, resource_hold, rows::column, session};

/// Resource locks of one transaction.
#[derive(Debug)]
pub struct Locks {
    /// Clock of the database after the last lock was taken.
    pub now: OffsetDateTime,
    /// Number of the transaction that owns the locks.
    pub transaction_id: String,
    pub(super) count: usize,
    /// Row addresses (ctid) of the lock rows: a PostgreSQL array literal.
    pub(super) places: String,
}

/// Locks `keys` in the current transaction of `connection`. The caller must read rows in a later statement.
///
/// Returns `None` if a committed row owns one of the keys; the caller must then roll back.
///
/// # Errors
/// [`StoreError::is_lock_timeout`] if another transaction owns a key for longer than `lock_timeout`.
pub async fn lock(connection: &mut PgConnection, keys: &BTreeSet<LockKey>) -> Result<Option<Locks>, StoreError> {
    let keys_in_order: Vec<_> = keys.iter().map(LockKeyColumns::of).collect();
    // `unnest` keeps the order of its arrays, so rows are inserted, and waited for, in key order. The clock is read
    // after the last insert; `now()` would be the start of the transaction.
    let (taken, places, now, transaction_id): (i64, Option<String>, OffsetDateTime, String) = sqlx::query_as(
        r#"-- resource_lock::take
        WITH taken AS (
            INSERT INTO linkis_resource_lock (scope, "user", em_application_name, em_instance)
            SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
            ON CONFLICT DO NOTHING
            RETURNING ctid)
        SELECT count(*), array_agg(ctid)::text, clock_timestamp(), pg_current_xact_id()::text FROM taken"#,
    )
    .bind(column(&keys_in_order, |key| key.scope))
    .bind(column(&keys_in_order, |key| key.user))
    .bind(column(&keys_in_order, |key| key.em_application_name))
    .bind(column(&keys_in_order, |key| key.em_instance))
    .fetch_one(connection)
    .await?;
    let all = usize::try_from(taken).is_ok_and(|taken| taken == keys.len());
    // Removals of waiting requests have no keys.
    let places = places.or_else(|| keys.is_empty().then(|| "{}".to_owned()));
    Ok(places.filter(|_| all).map(|places| Locks { now, transaction_id, count: keys.len(), places }))
}

/// Deletes lock rows before the commit of their transaction.
///
/// # Errors
/// [`StoreError::RowCount`] if the rows are gone; database errors.
pub async fn unlock(connection: &mut PgConnection, locks: Locks) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- resource_lock::unlock
        DELETE FROM linkis_resource_lock WHERE ctid = ANY ($1::text::tid[])",
    )
    .bind(locks.places)
    .execute(connection)
    .await?;
    expect_rows("linkis_resource_lock", locks.count, done.rows_affected())
}

/// Result of waiting for a lock key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockConflict {
    /// The key was free at that moment.
    None,
    /// Another transaction owns the key.
    Transaction,
    /// A committed row of another program owns the key.
    Row,
    /// An operator holds the EM or user. Whether the key can be locked is not known.
    Hold,
}

/// Waits up to `timeout` until one key is free, without locking the key: a waiter here delays no other transaction.
pub async fn wait(connection: &mut PgConnection, key: &LockKey, timeout: Duration) -> Result<LockConflict, StoreError> {
    let keys = BTreeSet::from([key.clone()]);
    if !resource_hold::in_effect(&mut *connection, &keys, None).await?.is_empty() {
        return Ok(LockConflict::Hold);
    }
    let mut transaction = connection.begin().await?;
    session::hurried(&mut transaction, timeout.max(Duration::from_millis(1))).await?;
    let taken = lock(&mut transaction, &keys).await;
    transaction.rollback().await?;
    match taken {
        Ok(Some(_)) => Ok(LockConflict::None),
        Ok(None) => Ok(LockConflict::Row),
        Err(error) if error.is_lock_timeout() => Ok(LockConflict::Transaction),
        Err(error) => Err(error),
    }
}

/// Returns the contended keys among `keys`, after a batch failed to lock them.
///
/// Bisects the keys, because a statement that times out does not name the key that it waited for. The time is bounded,
/// so with many contended keys the result is a part of them; the next batch finds others.
pub async fn contended(
    connection: &mut PgConnection,
    keys: &BTreeSet<LockKey>,
) -> Result<BTreeSet<LockKey>, StoreError> {
    Ok(classify(connection, vec![keys.clone()]).await?.contended.into_iter().collect())
}

/// Returns the keys among `keys` that are free.
///
/// A single read finds the holds and the rows of other programs. Bisection, as in [`contended`], finds the keys of other transactions, starting at `after`.
/// The time bound ends a search with many contended keys early; `after` is then the key at which the next call resumes.
pub async fn unlocked(
    connection: &mut PgConnection,
    mut keys: BTreeSet<LockKey>,
    after: &mut Option<LockKey>,
) -> Result<BTreeSet<LockKey>, StoreError> {
    for key in resource_hold::held(&mut *connection, &keys).await? {
        keys.remove(&key);
    }
    let behind = after.take().map(|after| keys.split_off(&after)).unwrap_or_default();
    let KeyCheck { free, contended } = classify(connection, vec![keys, behind]).await?;
    *after = contended.last().cloned();
    Ok(free)
}

/// Keys by result of the check.
#[derive(Debug, Default)]
struct KeyCheck {
    free: BTreeSet<LockKey>,
    /// Contended keys, in the order of their checks.
    contended: Vec<LockKey>,
}

/// Classifies keys as free or contended. Checks the last of `parts` first.
async fn classify(connection: &mut PgConnection, mut parts: Vec<BTreeSet<LockKey>>) -> Result<KeyCheck, StoreError> {
    /// Long enough to lock a free key, short enough to check many keys in turn.
    const TRY: Duration = Duration::from_millis(2);
    /// Bound of all checks together: other operations wait meanwhile.
    const ALL_TRIES: Duration = Duration::from_millis(150);
    let start = Instant::now();
    let mut sifted = KeyCheck::default();
    let mut transaction = connection.begin().await?;
    session::hurried(&mut transaction, TRY).await?;
    while let Some(part) = parts.pop() {
        if start.elapsed() > ALL_TRIES && !sifted.contended.is_empty() {
            break;
        }
        if part.is_empty() {
            continue;
        }
        let mut attempt = transaction.begin().await?;
        let taken = lock(&mut attempt, &part).await;
        attempt.rollback().await?;
        match taken {
            Ok(Some(_)) => sifted.free.extend(part),
            Err(error) if !error.is_lock_timeout() => return Err(error),
            Ok(None) | Err(_) if part.len() <= 1 => sifted.contended.extend(part),
            Ok(None) | Err(_) => {
                let mut first = part;
                let middle = first.iter().nth(first.len() / 2).cloned();
                if let Some(middle) = middle {
                    parts.push(first.split_off(&middle));
                }
                parts.push(first);
            }
        }
    }
    transaction.rollback().await?;
    Ok(sifted)
}

/// Columns of one key.
pub(super) struct LockKeyColumns<'a> {
    pub scope: &'static str,
    pub user: &'a str,
    pub em_application_name: &'a str,
    pub em_instance: &'a str,
}

impl<'a> LockKeyColumns<'a> {
    pub fn of(key: &'a LockKey) -> Self {
        // No name is empty, so an empty column means "none".
        let (scope, user, em_application_name, em_instance) = match key {
            LockKey::Em(em) => ("em", "", em.application_name.as_str(), em.instance.as_str()),
            LockKey::User(user) => ("user", user.as_str(), "", ""),
        };
        Self { scope, user, em_application_name, em_instance }
    }
}
