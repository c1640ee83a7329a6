//! `linkis_label_resource`: counters of scopes, one row per label set and scope.
//!
//! Rows are found by a hash of label set and scope. Batches lock them in the order of these hashes after the resource
//! locks, so no deadlock can occur. Batches write the amounts through `batch_write`. Empty counters are deleted in the
//! background. Callers: the committer, checks, lists and audits.

use std::collections::{BTreeSet, HashMap};

use sqlx::{PgConnection, PgExecutor, postgres::PgRow};
use tokio::task::consume_budget;
use tokio_stream::StreamExt as _;

use rm_model::{
    audit::StoredScopeCounters,
    name::Name,
    scope::{CREATOR, ENGINE_TYPE, Scope, ScopeCounter, ScopeHoldings, StoredScopeHoldings, Tally},
};

use super::{
    StoreError, expect_rows,
    rows::{TableName, TableRow, dimension, hash, tally_json},
};

const TABLE: TableName = TableName("linkis_label_resource");

/// Maximum number of inserts of a counter that is deleted concurrently.
const INSERT_TRIES_MAX: u32 = 3;

fn counter(row: TableRow<'_>) -> Result<ScopeCounter, StoreError> {
    Ok(ScopeCounter { label_set_id: row.get("label_set_id")?, scope: Scope::new(row.json("scope")?) })
}

fn usage(row: TableRow<'_>) -> Result<ScopeHoldings, StoreError> {
    Ok(ScopeHoldings { used: tally(row.get("used_resource")?)?, locked: tally(row.get("locked_resource")?)? })
}

/// Returns a scope with its hash and the version of its row.
fn scope(row: TableRow<'_>) -> Result<(Vec<u8>, ScopeCounter, StoredScopeHoldings), StoreError> {
    let holdings = StoredScopeHoldings { usage: usage(row)?, version: row.get("version")? };
    Ok((row.get("scope_hash")?, counter(row)?, holdings))
}

fn tally(json: &str) -> Result<Tally, StoreError> {
    let amounts: HashMap<String, i64> =
        serde_json::from_str(json).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
    let amounts: Result<Vec<_>, StoreError> =
        amounts.into_iter().map(|(key, amount)| Ok((dimension(TABLE.0, &key)?, amount))).collect();
    Ok(Tally::new(amounts?))
}

/// Returns the usage of those `counters` that have a row, by a plain read.
pub async fn read(
    executor: impl PgExecutor<'_>,
    counters: &BTreeSet<ScopeCounter>,
) -> Result<HashMap<ScopeCounter, ScopeHoldings>, StoreError> {
    let rows = sqlx::query(
        "-- label_resource::read
        SELECT label_set_id, scope::text, used_resource::text, locked_resource::text
        FROM linkis_label_resource WHERE scope_hash = ANY ($1)",
    )
    .bind(counters.iter().map(|counter| scope_hash(counter).to_vec()).collect::<Vec<_>>())
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| Ok((counter(row)?, usage(row)?)))
}

/// Locks the rows of `counters` until the transaction ends, and returns their usage. Inserts rows for new counters.
///
/// Locks in the order of the hashes and after the resource locks, so no deadlock can occur. A row after a lock wait is
/// read as its last writer committed it. Adds the versions of the rows to `versions`, if given.
pub async fn lock(
    connection: &mut PgConnection,
    counters: &BTreeSet<ScopeCounter>,
    mut versions: Option<&mut HashMap<ScopeCounter, i64>>,
) -> Result<HashMap<ScopeCounter, ScopeHoldings>, StoreError> {
    let mut found = lock_existing(&mut *connection, counters, versions.as_deref_mut()).await?;
    // An empty row may be deleted between the two statements.
    for _ in 0..INSERT_TRIES_MAX {
        if found.len() == counters.len() {
            return Ok(found);
        }
        let new: BTreeSet<ScopeCounter> =
            counters.iter().filter(|counter| !found.contains_key(counter)).cloned().collect();
        insert(&mut *connection, new.into_iter().map(|counter| (counter, ScopeHoldings::default())).collect()).await?;
        found = lock_existing(&mut *connection, counters, versions.as_deref_mut()).await?;
    }
    Ok(found)
}

async fn lock_existing(
    connection: &mut PgConnection,
    counters: &BTreeSet<ScopeCounter>,
    mut versions: Option<&mut HashMap<ScopeCounter, i64>>,
) -> Result<HashMap<ScopeCounter, ScopeHoldings>, StoreError> {
    let by_hash: HashMap<[u8; 32], &ScopeCounter> =
        counters.iter().map(|counter| (scope_hash(counter), counter)).collect();
    // Rows are matched by hash, which avoids sending and parsing the labels of hundreds of scopes.
    let rows = sqlx::query(
        "-- label_resource::lock
        SELECT scope_hash, used_resource::text, locked_resource::text, version
        FROM linkis_label_resource WHERE scope_hash = ANY ($1) ORDER BY scope_hash FOR UPDATE",
    )
    .bind(by_hash.keys().map(<[u8; 32]>::as_slice).collect::<Vec<_>>())
    .fetch_all(connection)
    .await?;
    let mut found = HashMap::with_capacity(rows.len());
    for row in rows.iter().map(|row| TABLE.row(row)) {
        let counter = by_hash.get(row.get::<&[u8]>("scope_hash")?).ok_or_else(|| row.wrong("a row not asked for"))?;
        if let Some(versions) = &mut versions {
            versions.insert((*counter).clone(), row.get("version")?);
        }
        found.insert((*counter).clone(), usage(row)?);
    }
    Ok(found)
}

/// Returns the usage and version of one counter. A counter without a row has zero usage, and a version between those of
/// the deleted row and of the next row. The version is 30 seconds before now, because the next row may be in creation.
pub async fn read_one(
    executor: impl PgExecutor<'_>,
    counter: &ScopeCounter,
) -> Result<StoredScopeHoldings, StoreError> {
    let row = sqlx::query(
        "-- label_resource::read_one
        SELECT used_resource::text, locked_resource::text, version FROM linkis_label_resource WHERE scope_hash = $1
        UNION ALL
        SELECT '{}', '{}', (extract(epoch FROM clock_timestamp() - interval '30 seconds') * 1000000)::bigint
        WHERE NOT EXISTS (SELECT FROM linkis_label_resource WHERE scope_hash = $1)",
    )
    .bind(scope_hash(counter).as_slice())
    .fetch_one(executor)
    .await?;
    let row = TABLE.row(&row);
    Ok(StoredScopeHoldings { usage: usage(row)?, version: row.get("version")? })
}

/// Inserts rows for counters without one. A row that another transaction inserted meanwhile stays unchanged.
pub async fn insert(
    connection: &mut PgConnection,
    counters: Vec<(ScopeCounter, ScopeHoldings)>,
) -> Result<(), StoreError> {
    let mut rows: Vec<_> = counters.iter().map(|(counter, usage)| (scope_hash(counter), counter, usage)).collect();
    rows.sort_by_key(|(hash, ..)| *hash);
    sqlx::query(
        "-- label_resource::insert
        INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
        SELECT label_set_id, scope::jsonb, used::jsonb, locked::jsonb, scope_hash
        FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bytea[])
            AS d (label_set_id, scope, used, locked, scope_hash)
        ON CONFLICT DO NOTHING",
    )
    .bind(rows.iter().map(|(_, counter, _)| counter.label_set_id).collect::<Vec<_>>())
    .bind(rows.iter().map(|(_, counter, _)| scope_json(&counter.scope)).collect::<Vec<_>>())
    .bind(rows.iter().map(|(.., usage)| tally_json(usage.used.amounts())).collect::<Vec<_>>())
    .bind(rows.iter().map(|(.., usage)| tally_json(usage.locked.amounts())).collect::<Vec<_>>())
    .bind(rows.iter().map(|(hash, ..)| hash.as_slice()).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    Ok(())
}

/// Deletes up to `limit` counters of a retired label set. Returns whether more may exist.
pub async fn delete_of_set(executor: impl PgExecutor<'_>, label_set_id: i64, limit: i64) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- label_resource::delete_of_set
        DELETE FROM linkis_label_resource WHERE scope_hash = ANY (ARRAY (
            SELECT scope_hash FROM linkis_label_resource WHERE (label_set_id, scope_hash) > ($1, '') AND label_set_id <= $1
            ORDER BY label_set_id, scope_hash LIMIT $2))",
    )
    .bind(label_set_id)
    .bind(limit)
    .execute(executor)
    .await?;
    Ok(i64::try_from(done.rows_affected()).is_ok_and(|rows| rows == limit))
}

/// Scans the next `limit` counters after the hash `after`. Returns the hashes of empty counters older than 60 seconds,
/// and the last hash scanned, or `None` at the end.
pub async fn idle(
    executor: impl PgExecutor<'_>,
    after: &[u8],
    limit: i64,
) -> Result<(Vec<Vec<u8>>, Option<Vec<u8>>), StoreError> {
    let rows: Vec<(Vec<u8>, bool)> = sqlx::query_as(
        "-- label_resource::idle
        SELECT scope_hash, used_resource = '{}' AND locked_resource = '{}'
            AND version < (extract(epoch FROM clock_timestamp() - interval '60 seconds') * 1000000)::bigint
        FROM linkis_label_resource WHERE scope_hash > $1 ORDER BY scope_hash LIMIT $2",
    )
    .bind(after)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    let is_full = i64::try_from(rows.len()).is_ok_and(|seen| seen == limit);
    let last = rows.last().map(|(hash, _)| hash.clone()).filter(|_| is_full);
    Ok((rows.into_iter().filter_map(|(hash, is_idle)| is_idle.then_some(hash)).collect(), last))
}

/// Deletes those counters among `hashes` that are still empty and that no transaction has locked.
///
/// Counters newer than 60 seconds stay, so that the version of a deleted row is below the version that [`read_one`]
/// returns afterwards. Batches wait for the locked rows: pass few hashes, and commit after this statement.
pub async fn remove_idle(executor: impl PgExecutor<'_>, hashes: &[Vec<u8>]) -> Result<(), StoreError> {
    sqlx::query(
        "-- label_resource::remove_idle
        WITH idle AS (
            SELECT scope_hash FROM linkis_label_resource WHERE scope_hash = ANY ($1) ORDER BY scope_hash
            FOR UPDATE SKIP LOCKED)
        -- Read again under the lock: another transaction may have changed the counters.
        DELETE FROM linkis_label_resource r USING idle
        WHERE r.scope_hash = idle.scope_hash AND r.used_resource = '{}' AND r.locked_resource = '{}'
            AND r.version < (extract(epoch FROM clock_timestamp() - interval '60 seconds') * 1000000)::bigint",
    )
    .bind(hashes)
    .execute(executor)
    .await?;
    Ok(())
}

/// Returns up to `limit` scopes of a label set after the hash `after`, ordered by hash, each with its hash.
pub async fn list_set(
    executor: impl PgExecutor<'_>,
    label_set_id: i64,
    after: &[u8],
    limit: i64,
) -> Result<Vec<(Vec<u8>, ScopeCounter, StoredScopeHoldings)>, StoreError> {
    let rows = sqlx::query(
        "-- label_resource::list_set
        SELECT scope_hash, label_set_id, scope::text, used_resource::text, locked_resource::text, version
        FROM linkis_label_resource WHERE (label_set_id, scope_hash) > ($1, $2) AND label_set_id <= $1
        ORDER BY label_set_id, scope_hash LIMIT $3",
    )
    .bind(label_set_id)
    .bind(after)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, scope)
}

/// Passes all rows to `visit`, ordered by hash, also those with contradictory amounts. An unparsable row becomes an
/// error.
pub async fn for_each_scope(
    connection: &mut PgConnection,
    mut visit: impl FnMut(Result<StoredScopeCounters, StoreError>),
) -> Result<(), StoreError> {
    let mut rows = sqlx::query(
        "-- label_resource::for_each_scope
        SELECT scope_hash, label_set_id, scope::text, used_resource::text, locked_resource::text
        FROM linkis_label_resource ORDER BY scope_hash",
    )
    .fetch(connection);
    while let Some(row) = rows.next().await {
        consume_budget().await;
        visit(stored(TABLE.row(&row?)));
    }
    Ok(())
}

fn stored(row: TableRow<'_>) -> Result<StoredScopeCounters, StoreError> {
    let (hash, counter): (Vec<u8>, ScopeCounter) = (row.get("scope_hash")?, counter(row)?);
    let is_in_place = hash == scope_hash(&counter);
    Ok(StoredScopeCounters { usage: usage(row).map_err(|error| error.to_string()), counter, hash, is_in_place })
}

/// Deletes the rows with these hashes, all of which must exist.
pub async fn delete(connection: &mut PgConnection, hashes: &[Vec<u8>]) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- label_resource::delete
        DELETE FROM linkis_label_resource WHERE scope_hash = ANY ($1)",
    )
    .bind(hashes)
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, hashes.len(), done.rows_affected())
}

/// Result of scanning a range of scopes.
#[derive(Debug)]
pub struct ScopeScan {
    /// Scopes of label sets that decide, ordered by hash, each with its hash.
    pub scopes: Vec<(Vec<u8>, ScopeCounter, StoredScopeHoldings)>,
    /// Last hash of the scanned range, also if its scope does not match; `None` at the end.
    pub last: Option<Vec<u8>>,
}

/// SQL of a page: the scopes of the query `$looked`, each with whether its label set decides. The page reads no further
/// rows, however many scopes belong to other label sets.
macro_rules! list {
    ($name:expr, $looked:expr) => {
        concat!(
            "-- label_resource::",
            $name,
            "
        SELECT r.scope_hash, r.label_set_id, r.scope::text, r.used_resource::text, r.locked_resource::text, r.version,
            r.label_set_id = ANY (ARRAY (SELECT label_set_id FROM linkis_label_set WHERE state = 'counted')) AS decides
        FROM (",
            $looked,
            ") r
        ORDER BY r.scope_hash"
        )
    };
}

/// SQL of the next scopes after a hash that match `$condition`.
macro_rules! next {
    ($condition:expr) => {
        concat!(
            "SELECT * FROM linkis_label_resource WHERE ",
            $condition,
            " AND scope_hash > $1 ORDER BY scope_hash LIMIT $2"
        )
    };
}

/// SQL of the next scopes with `$value` of `$label` after a hash, in the order of the only index that serves the query.
/// PostgreSQL drops a column that equals a value from an order. PostgreSQL would then scan all scopes in the order of
/// their hashes where one value has nearly all.
macro_rules! next_with {
    ($label:literal, $value:literal) => {
        concat!(
            "SELECT * FROM linkis_label_resource WHERE (scope ->> '",
            $label,
            "', scope_hash) > (",
            $value,
            ", $1) AND scope ->> '",
            $label,
            "' <= ",
            $value,
            " AND scope ->> '",
            $label,
            "' IS NOT NULL ORDER BY scope ->> '",
            $label,
            "', scope_hash LIMIT $2"
        )
    };
}

/// Scans the next `limit` scopes after the hash `after` (empty for the first) and returns those of label sets that
/// decide.
pub async fn list(executor: impl PgExecutor<'_>, after: &[u8], limit: i64) -> Result<ScopeScan, StoreError> {
    list_by(list!("list", next!("true")), executor, after, limit).await
}

/// Like [`list`], under another statement name, for background scans, so that statement statistics separate them from
/// calls.
pub async fn walk(executor: impl PgExecutor<'_>, after: &[u8], limit: i64) -> Result<ScopeScan, StoreError> {
    list_by(list!("walk", next!("true")), executor, after, limit).await
}

async fn list_by(
    sql: &'static str,
    executor: impl PgExecutor<'_>,
    after: &[u8],
    limit: i64,
) -> Result<ScopeScan, StoreError> {
    looked(&sqlx::query(sql).bind(after).bind(limit).fetch_all(executor).await?, limit)
}

/// Builds the result of a scan of `limit` rows. Fewer rows mean the end.
fn looked(rows: &[PgRow], limit: i64) -> Result<ScopeScan, StoreError> {
    let is_full = i64::try_from(rows.len()).is_ok_and(|seen| seen == limit);
    let last = rows.last().filter(|_| is_full).map(|row| TABLE.row(row).get("scope_hash")).transpose()?;
    let mut scopes = Vec::with_capacity(rows.len());
    for row in rows.iter().map(|row| TABLE.row(row)) {
        if row.get("decides")? {
            scopes.push(scope(row)?);
        }
    }
    Ok(ScopeScan { scopes, last })
}

/// Like [`list`], for scopes of `users`.
pub async fn list_of(
    executor: impl PgExecutor<'_>,
    users: &BTreeSet<Name>,
    after: &[u8],
    limit: i64,
) -> Result<ScopeScan, StoreError> {
    let sql = list!(
        "list_of",
        concat!(
            "SELECT u.* FROM unnest($3::text[]) AS n (name) CROSS JOIN LATERAL (",
            next_with!("user", "n.name"),
            ") u ORDER BY u.scope_hash LIMIT $2"
        )
    );
    let users: Vec<_> = users.iter().map(Name::as_str).collect();
    looked(&sqlx::query(sql).bind(after).bind(limit).bind(users).fetch_all(executor).await?, limit)
}

/// Label by which scopes can be listed, each with its own index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexFilter {
    /// The label `creator`.
    Creator,
    /// The label `engine_type`.
    EngineType,
}

impl IndexFilter {
    /// Returns the label name.
    pub fn label(self) -> &'static str {
        match self {
            Self::Creator => CREATOR,
            Self::EngineType => ENGINE_TYPE,
        }
    }
}

/// Like [`list`], for scopes with one value of a label.
pub async fn list_with(
    executor: impl PgExecutor<'_>,
    (label, value): (IndexFilter, &str),
    after: &[u8],
    limit: i64,
) -> Result<ScopeScan, StoreError> {
    // A separate SQL text per index.
    let sql = match label {
        IndexFilter::Creator => list!("list_with, a creator", next_with!("creator", "$3")),
        IndexFilter::EngineType => list!("list_with, an engine type", next_with!("engine_type", "$3")),
    };
    looked(&sqlx::query(sql).bind(after).bind(limit).bind(value).fetch_all(executor).await?, limit)
}

fn scope_json(scope: &Scope) -> String {
    serde_json::json!(scope.labels()).to_string()
}

/// Returns the key of a counter.
pub(super) fn scope_hash(counter: &ScopeCounter) -> [u8; 32] {
    hash(&format!("{}:{}", counter.label_set_id, scope_json(&counter.scope)))
}
