//! `linkis_resource_lock`: its unique constraint excludes transactions from one another.
//!
//! A transaction inserts one row per key, all in one statement and in the one order of [`LockKey`], and deletes them before it
//! commits. Another transaction on the same key blocks on the unique index until the first ends; if its holder dies, the rows
//! vanish with it. A row that is visible was committed by somebody else: a hold ([`resource_hold`]), which lasts until it is deleted.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use sqlx::{Connection as _, PgConnection};
use time::OffsetDateTime;

use crate::domain::operation::LockKey;

use super::{StoreError, resource_hold};

/// The locks that a transaction holds.
#[derive(Debug)]
pub struct Locks {
    /// The database's clock once all were taken.
    pub now: OffsetDateTime,
    /// The transaction that holds them.
    pub transaction_id: String,
    pub(super) count: usize,
    /// Where their rows lie: an array, as the database writes it.
    pub(super) places: String,
}

/// Takes the locks of `keys` for the transaction that `connection` is in; rows must be read in a later statement.
///
/// Answers `None` if some key is held by a committed row; what was taken then has to be rolled back.
///
/// # Errors
/// [`StoreError::is_lock_timeout`] if another transaction held a key for longer than `lock_timeout`.
pub async fn take(connection: &mut PgConnection, keys: &BTreeSet<LockKey>) -> Result<Option<Locks>, StoreError> {
    let columns = Columns::of(keys);
    // unnest keeps the order of its arrays, and rows are inserted, and waited for, in the order in which they come. The clock is
    // read when all are there, unlike now(), which is the transaction's start.
    let (taken, places, now, transaction_id): (i64, Option<String>, OffsetDateTime, String) = sqlx::query_as(
        r#"-- resource_lock::take
        WITH taken AS (
            INSERT INTO linkis_resource_lock (scope, "user", em_application_name, em_instance)
            SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
            ON CONFLICT DO NOTHING
            RETURNING ctid)
        SELECT count(*), array_agg(ctid)::text, clock_timestamp(), pg_current_xact_id()::text FROM taken"#,
    )
    .bind(columns.scope)
    .bind(columns.user)
    .bind(columns.em_application_name)
    .bind(columns.em_instance)
    .fetch_one(connection)
    .await?;
    let all = usize::try_from(taken).is_ok_and(|taken| taken == keys.len());
    Ok(places.filter(|_| all).map(|places| Locks { now, transaction_id, count: keys.len(), places }))
}

/// What stands in the way of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// Nothing, at this moment.
    None,
    /// A transaction that holds it.
    Transaction,
    /// A row that somebody committed.
    Hold,
}

/// Waits up to `timeout` for one key to become free, without keeping it: whoever waits here stands in nobody's way.
pub async fn wait(connection: &mut PgConnection, key: &LockKey, timeout: Duration) -> Result<Obstacle, StoreError> {
    let mut transaction = connection.begin().await?;
    sqlx::query("SELECT set_config('lock_timeout', $1, true)")
        .bind(format!("{}ms", timeout.as_millis().max(1)))
        .execute(&mut *transaction)
        .await?;
    let taken = take(&mut transaction, &BTreeSet::from([key.clone()])).await;
    transaction.rollback().await?;
    match taken {
        Ok(Some(_)) => Ok(Obstacle::None),
        // One that is over holds nobody up any longer.
        Ok(None) if resource_hold::end_over(connection, key).await? => Ok(Obstacle::None),
        Ok(None) => Ok(Obstacle::Hold),
        Err(error) if error.is_lock_timeout() => Ok(Obstacle::Transaction),
        Err(error) => Err(error),
    }
}

/// Which of `keys` others hold right now. Asked after a batch could not get its locks, to tell the contended keys from the rest:
/// by halving, because a statement that times out does not say which of its keys it waited for. Of very many, it finds some; the
/// next batch finds others.
pub async fn held(connection: &mut PgConnection, keys: &BTreeSet<LockKey>) -> Result<BTreeSet<LockKey>, StoreError> {
    Ok(sift(connection, vec![keys.clone()]).await?.held.into_iter().collect())
}

/// Which of `keys` nobody holds, however many somebody does: what somebody committed is found by one read, and the others as in [`held`], from
/// `after` on. Where transactions hold very many, it looks at some, and from the last of these on the next time.
pub async fn free(
    connection: &mut PgConnection,
    mut keys: BTreeSet<LockKey>,
    after: &mut Option<LockKey>,
) -> Result<BTreeSet<LockKey>, StoreError> {
    for (key, is_over) in resource_hold::among(&mut *connection, &keys).await? {
        // One that is over holds nobody up any longer.
        if !is_over || !resource_hold::end_over(connection, &key).await? {
            keys.remove(&key);
        }
    }
    let behind = after.take().map(|after| keys.split_off(&after)).unwrap_or_default();
    let Sifted { free, held } = sift(connection, vec![keys, behind]).await?;
    *after = held.last().cloned();
    Ok(free)
}

/// What was found out of some keys.
#[derive(Debug, Default)]
struct Sifted {
    free: BTreeSet<LockKey>,
    /// As they were found.
    held: Vec<LockKey>,
}

/// Looks which keys others hold, the last of `parts` first.
async fn sift(connection: &mut PgConnection, mut parts: Vec<BTreeSet<LockKey>>) -> Result<Sifted, StoreError> {
    /// Long enough for a free key, short enough to try one after another.
    const TRY: Duration = Duration::from_millis(2);
    /// The others wait meanwhile.
    const ALL_TRIES: Duration = Duration::from_millis(150);
    let start = Instant::now();
    let mut sifted = Sifted::default();
    let mut transaction = connection.begin().await?;
    sqlx::query("SELECT set_config('lock_timeout', $1, true)")
        .bind(format!("{}ms", TRY.as_millis()))
        .execute(&mut *transaction)
        .await?;
    while let Some(part) = parts.pop() {
        if start.elapsed() > ALL_TRIES && !sifted.held.is_empty() {
            break;
        }
        if part.is_empty() {
            continue;
        }
        let mut attempt = transaction.begin().await?;
        let taken = take(&mut attempt, &part).await;
        attempt.rollback().await?;
        match taken {
            Ok(Some(_)) => sifted.free.extend(part),
            Err(error) if !error.is_lock_timeout() => return Err(error),
            Ok(None) | Err(_) if part.len() <= 1 => sifted.held.extend(part),
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

/// The columns of many keys.
pub(super) struct Columns<'a> {
    pub scope: Vec<&'static str>,
    pub user: Vec<&'a str>,
    pub em_application_name: Vec<&'a str>,
    pub em_instance: Vec<&'a str>,
}

impl<'a> Columns<'a> {
    pub fn of(keys: &'a BTreeSet<LockKey>) -> Self {
        let mut columns = Self { scope: vec![], user: vec![], em_application_name: vec![], em_instance: vec![] };
        for key in keys.iter().map(KeyColumns::of) {
            columns.scope.push(key.scope);
            columns.user.push(key.user);
            columns.em_application_name.push(key.em_application_name);
            columns.em_instance.push(key.em_instance);
        }
        columns
    }
}

/// The columns of one key.
pub(super) struct KeyColumns<'a> {
    pub scope: &'static str,
    pub user: &'a str,
    pub em_application_name: &'a str,
    pub em_instance: &'a str,
}

impl<'a> KeyColumns<'a> {
    pub fn of(key: &'a LockKey) -> Self {
        // No name is empty: an empty one is none.
        let (scope, user, em_application_name, em_instance) = match key {
            LockKey::Em(em) => ("em", "", em.application_name.as_str(), em.instance.as_str()),
            LockKey::User(user) => ("user", user.as_str(), "", ""),
        };
        Self { scope, user, em_application_name, em_instance }
    }
}
