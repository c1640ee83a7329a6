//! `linkis_label_resource`: what scopes hold.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sqlx::{FromRow, PgConnection, PgExecutor};
use tokio_stream::StreamExt as _;

use crate::domain::{
    audit::ScopeBooks,
    resource::Dimension,
    scope::{Scope, Tally, Usage},
};

use super::{
    StoreError, expect_rows,
    rows::{hash, tally_json},
};

const TABLE: &str = "linkis_label_resource";

#[derive(FromRow)]
struct ScopeRow {
    scope: String,
    used_resource: String,
    locked_resource: String,
}

impl ScopeRow {
    fn parse(self) -> Result<(Scope, Usage), StoreError> {
        let labels = serde_json::from_str(&self.scope).map_err(|error| StoreError::inconsistent(TABLE, error))?;
        let usage = Usage { used: tally(&self.used_resource)?, locked: tally(&self.locked_resource)? };
        Ok((Scope::new(labels), usage))
    }
}

fn tally(json: &str) -> Result<Tally, StoreError> {
    let amounts: HashMap<String, i64> =
        serde_json::from_str(json).map_err(|error| StoreError::inconsistent(TABLE, error))?;
    let dimension = |key: String| Dimension::parse_key(&key).ok_or_else(|| StoreError::inconsistent(TABLE, key));
    let amounts: Result<Vec<_>, StoreError> =
        amounts.into_iter().map(|(key, amount)| Ok((dimension(key)?, amount))).collect();
    Ok(Tally::new(amounts?))
}

/// What those among `scopes` hold that are known: a plain look.
pub async fn read(
    executor: impl PgExecutor<'_>,
    scopes: &BTreeSet<Scope>,
) -> Result<HashMap<Scope, Usage>, StoreError> {
    let rows: Vec<ScopeRow> = sqlx::query_as(
        "-- label_resource::read
        SELECT scope::text, used_resource::text, locked_resource::text
        FROM linkis_label_resource WHERE scope_hash = ANY ($1)",
    )
    .bind(hashes(scopes))
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(ScopeRow::parse).collect()
}

/// Locks the rows of `scopes` until the transaction ends, and reads what they hold. Scopes that are new get a row.
///
/// In the order of their hashes, and after the resource locks: so nobody waits for each other. A row that was waited for is read
/// as its last writer left it.
pub async fn lock(
    connection: &mut PgConnection,
    scopes: &BTreeSet<Scope>,
) -> Result<HashMap<Scope, Usage>, StoreError> {
    let found = lock_existing(&mut *connection, scopes).await?;
    if found.len() == scopes.len() {
        return Ok(found);
    }
    let new: BTreeSet<Scope> = scopes.iter().filter(|scope| !found.contains_key(scope)).cloned().collect();
    insert(&mut *connection, new.into_iter().map(|scope| (scope, Usage::default())).collect()).await?;
    lock_existing(connection, scopes).await
}

async fn lock_existing(
    connection: &mut PgConnection,
    scopes: &BTreeSet<Scope>,
) -> Result<HashMap<Scope, Usage>, StoreError> {
    let by_hash: HashMap<[u8; 32], &Scope> = scopes.iter().map(|scope| (scope_hash(scope), scope)).collect();
    // Told apart by their hashes: the labels of hundreds of scopes need not be written and read again.
    let rows: Vec<(Vec<u8>, String, String)> = sqlx::query_as(
        "-- label_resource::lock
        SELECT scope_hash, used_resource::text, locked_resource::text
        FROM linkis_label_resource WHERE scope_hash = ANY ($1) ORDER BY scope_hash FOR UPDATE",
    )
    .bind(by_hash.keys().map(<[u8; 32]>::as_slice).collect::<Vec<_>>())
    .fetch_all(connection)
    .await?;
    let usage = |(hash, used, locked): (Vec<u8>, String, String)| {
        let scope =
            by_hash.get(hash.as_slice()).ok_or_else(|| StoreError::inconsistent(TABLE, "a row not asked for"))?;
        Ok(((*scope).clone(), Usage { used: tally(&used)?, locked: tally(&locked)? }))
    };
    rows.into_iter().map(usage).collect()
}

/// Writes rows for scopes that have none; one that somebody else wrote meanwhile stays as it is.
pub async fn insert(connection: &mut PgConnection, scopes: Vec<(Scope, Usage)>) -> Result<(), StoreError> {
    let mut rows: Vec<_> = scopes.iter().map(|(scope, usage)| (scope_hash(scope), scope, usage)).collect();
    rows.sort_by_key(|(hash, ..)| *hash);
    let label_set = |scope: &Scope| serde_json::json!(scope.labels().keys().collect::<Vec<_>>()).to_string();
    sqlx::query(
        "-- label_resource::insert
        INSERT INTO linkis_label_resource (scope, label_set, used_resource, locked_resource, scope_hash)
        SELECT scope::jsonb, label_set::jsonb, used::jsonb, locked::jsonb, scope_hash
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[])
            AS d (scope, label_set, used, locked, scope_hash)
        ON CONFLICT DO NOTHING",
    )
    .bind(rows.iter().map(|(_, scope, _)| scope_json(scope)).collect::<Vec<_>>())
    .bind(rows.iter().map(|(_, scope, _)| label_set(scope)).collect::<Vec<_>>())
    .bind(rows.iter().map(|(.., usage)| tally_json(usage.used.amounts())).collect::<Vec<_>>())
    .bind(rows.iter().map(|(.., usage)| tally_json(usage.locked.amounts())).collect::<Vec<_>>())
    .bind(rows.iter().map(|(hash, ..)| hash.as_slice()).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    Ok(())
}

/// The columns of what scopes hold.
pub(super) struct Columns {
    pub scope_hash: Vec<Vec<u8>>,
    pub used: Vec<String>,
    pub locked: Vec<String>,
}

impl Columns {
    pub fn of(scopes: &[(Scope, Usage)]) -> Self {
        Self {
            scope_hash: scopes.iter().map(|(scope, _)| scope_hash(scope).to_vec()).collect(),
            used: scopes.iter().map(|(_, usage)| tally_json(usage.used.amounts())).collect(),
            locked: scopes.iter().map(|(_, usage)| tally_json(usage.locked.amounts())).collect(),
        }
    }
}

/// Removes the counters of a label set.
pub async fn delete_set(connection: &mut PgConnection, keys: &BTreeSet<String>) -> Result<(), StoreError> {
    sqlx::query(
        "-- label_resource::delete_set
        DELETE FROM linkis_label_resource
        WHERE md5(label_set::text) = md5($1::text::jsonb::text) AND label_set = $1::text::jsonb",
    )
    .bind(serde_json::json!(keys).to_string())
    .execute(connection)
    .await?;
    Ok(())
}

/// All scopes of a label set.
pub async fn list_set(
    executor: impl PgExecutor<'_>,
    keys: &BTreeSet<String>,
) -> Result<Vec<(Scope, Usage)>, StoreError> {
    let rows: Vec<ScopeRow> = sqlx::query_as(
        "-- label_resource::list_set
        SELECT scope::text, used_resource::text, locked_resource::text FROM linkis_label_resource
        WHERE md5(label_set::text) = md5($1::text::jsonb::text) AND label_set = $1::text::jsonb",
    )
    .bind(serde_json::json!(keys).to_string())
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(ScopeRow::parse).collect()
}

/// Tells all rows, whether or not they make sense, in the order of their hashes. What cannot be read at all is an error of its own.
pub async fn tell_all(
    connection: &mut PgConnection,
    mut tell: impl FnMut(Result<ScopeBooks, StoreError>),
) -> Result<(), StoreError> {
    let mut rows = sqlx::query_as(
        "-- label_resource::tell_all
        SELECT scope_hash, scope::text, label_set::text, used_resource::text, locked_resource::text
        FROM linkis_label_resource ORDER BY scope_hash",
    )
    .fetch(connection);
    while let Some(row) = rows.next().await {
        let (hash, scope, label_set, used, locked): (Vec<u8>, String, String, String, String) = row?;
        tell(books(hash, &scope, &label_set, &used, &locked));
    }
    Ok(())
}

fn books(hash: Vec<u8>, scope: &str, label_set: &str, used: &str, locked: &str) -> Result<ScopeBooks, StoreError> {
    let labels: BTreeMap<String, String> =
        serde_json::from_str(scope).map_err(|error| StoreError::inconsistent(TABLE, format!("{scope}: {error}")))?;
    let keys: Option<Vec<String>> = serde_json::from_str(label_set).ok();
    let scope = Scope::new(labels);
    let is_in_place = hash == scope_hash(&scope) && keys.is_some_and(|keys| keys.iter().eq(scope.labels().keys()));
    let usage = || Ok(Usage { used: tally(used)?, locked: tally(locked)? });
    Ok(ScopeBooks { usage: usage().map_err(|error: StoreError| error.to_string()), scope, hash, is_in_place })
}

/// Removes the rows at these hashes.
pub async fn delete(connection: &mut PgConnection, hashes: &[Vec<u8>]) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- label_resource::delete
        DELETE FROM linkis_label_resource WHERE scope_hash = ANY ($1)",
    )
    .bind(hashes)
    .execute(connection)
    .await?;
    expect_rows(TABLE, hashes.len(), done.rows_affected())
}

/// Up to `limit` scopes, in the order of their hashes, from behind `after` (empty for the first); each with its hash.
pub async fn list(
    executor: impl PgExecutor<'_>,
    after: &[u8],
    limit: i64,
) -> Result<Vec<(Vec<u8>, Scope, Usage)>, StoreError> {
    let rows: Vec<(Vec<u8>, String, String, String)> = sqlx::query_as(
        "-- label_resource::list
        SELECT scope_hash, scope::text, used_resource::text, locked_resource::text
        FROM linkis_label_resource WHERE scope_hash > $1 ORDER BY scope_hash LIMIT $2",
    )
    .bind(after)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    rows.into_iter()
        .map(|(hash, scope, used_resource, locked_resource)| {
            let (scope, usage) = ScopeRow { scope, used_resource, locked_resource }.parse()?;
            Ok((hash, scope, usage))
        })
        .collect()
}

fn scope_json(scope: &Scope) -> String {
    serde_json::json!(scope.labels()).to_string()
}

fn scope_hash(scope: &Scope) -> [u8; 32] {
    hash(&scope_json(scope))
}

fn hashes(scopes: &BTreeSet<Scope>) -> Vec<Vec<u8>> {
    scopes.iter().map(|scope| scope_hash(scope).to_vec()).collect()
}
