//! `linkis_resource_refusal`: number of refusals by user, scope, dimension and rule, per period and instance.
//!
//! Each instance replaces its own rows; lists add them up over the instances. Callers: the refusal statistics of
//! `rm-service`.

use std::{collections::BTreeSet, time::Duration};

use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    name::Name,
    refusal_sum::{RefusalCount, RefusalKey, RefusalSum},
    scope_kind::ScopeKind,
};

use super::{
    StoreError, expect_rows,
    rows::{TableName, TableRow, column, hash},
};

const TABLE: TableName = TableName("linkis_resource_refusal");

/// Size of the hash of a refusal key, in bytes.
const HASH_BYTES: usize = 32;

/// Count of one kind of refusals by one instance in a period so far.
#[derive(Debug, Clone, Copy)]
pub struct RefusalRow<'a> {
    /// User, scope, dimension and rule of the refusals.
    pub key: &'a RefusalKey<String>,
    /// Number of refusals with the last one, by the clock of the database.
    pub count: &'a RefusalCount<OffsetDateTime>,
}

/// Key of a sum in a list. Later periods come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusalAt {
    /// Start of the period.
    pub period_start: OffsetDateTime,
    /// Hash of the refusal key.
    pub key_hash: [u8; HASH_BYTES],
}

impl RefusalAt {
    /// Returns the key after all periods that start at `time` or later, and before all earlier ones.
    pub fn before(time: OffsetDateTime) -> Self {
        Self { period_start: time, key_hash: [0; HASH_BYTES] }
    }
}

/// Inserts or replaces the counts of an instance in a period.
pub async fn write(
    executor: impl PgExecutor<'_>,
    period_start: OffsetDateTime,
    instance_id: Uuid,
    rows: &[RefusalRow<'_>],
) -> Result<(), StoreError> {
    let done = sqlx::query(
        r#"-- refusal::write
        INSERT INTO linkis_resource_refusal AS r (period_start, key_hash, instance_id, "user", scope_kind, scope, dimension, rule,
            refusals, last_requested, last_available, last_time)
        SELECT $1, key_hash, $2, "user", scope_kind, scope, dimension, rule, refusals, last_requested, last_available, last_time
        FROM unnest($3::bytea[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::bigint[], $10::bigint[],
            $11::bigint[], $12::timestamptz[])
            AS d (key_hash, "user", scope_kind, scope, dimension, rule, refusals, last_requested, last_available, last_time)
        ON CONFLICT (period_start, key_hash, instance_id) DO UPDATE SET refusals = excluded.refusals,
            last_requested = excluded.last_requested, last_available = excluded.last_available,
            last_time = excluded.last_time"#,
    )
    .bind(period_start)
    .bind(instance_id)
    .bind(column(rows, |row| key_hash(row.key).to_vec()))
    .bind(column(rows, |row| row.key.user.as_str()))
    .bind(column(rows, |row| row.key.kind.as_str()))
    .bind(column(rows, |row| row.key.scope.as_str()))
    .bind(column(rows, |row| row.key.dimension.as_str()))
    .bind(column(rows, |row| row.key.rule.as_str()))
    .bind(column(rows, |row| i64::try_from(row.count.refusals).unwrap_or(i64::MAX)))
    .bind(column(rows, |row| row.count.last_requested))
    .bind(column(rows, |row| row.count.last_available))
    .bind(column(rows, |row| row.count.last))
    .execute(executor)
    .await?;
    expect_rows(TABLE.0, rows.len(), done.rows_affected())
}

fn sum(row: TableRow<'_>) -> Result<(RefusalAt, RefusalSum), StoreError> {
    let key_hash = row.get::<&[u8]>("key_hash")?.try_into().map_err(|_| row.wrong("the length of a hash"))?;
    let key = RefusalKey {
        user: row.get("user")?,
        kind: row.parse("scope_kind", ScopeKind::parse)?,
        scope: row.get("scope")?,
        dimension: row.get("dimension")?,
        rule: row.get("rule")?,
    };
    let count = RefusalCount {
        refusals: row.get::<i64>("refusals")?.unsigned_abs(),
        last_requested: row.get("last_requested")?,
        last_available: row.get("last_available")?,
        last: row.get("last_time")?,
    };
    let period_start = row.get("period_start")?;
    Ok((RefusalAt { period_start, key_hash }, RefusalSum { period_start, key, count }))
}

/// Returns up to `limit` sums over all instances, latest period first, after `after` and down to the period that starts
/// at `from`. Returns only sums of `users` if given.
pub async fn list(
    executor: impl PgExecutor<'_>,
    users: Option<&BTreeSet<Name>>,
    from: OffsetDateTime,
    after: RefusalAt,
    limit: i64,
) -> Result<Vec<(RefusalAt, RefusalSum)>, StoreError> {
    // A separate SQL text per index.
    let sql = if users.is_some() {
        r#"-- refusal::list, of users
        SELECT s.* FROM unnest($5::text[]) AS u (name) CROSS JOIN LATERAL (
            SELECT period_start, key_hash, "user", min(scope_kind) AS scope_kind, min(scope) AS scope,
                min(dimension) AS dimension, min(rule) AS rule, sum(refusals)::bigint AS refusals,
                (array_agg(last_requested ORDER BY last_time DESC))[1] AS last_requested,
                (array_agg(last_available ORDER BY last_time DESC))[1] AS last_available, max(last_time) AS last_time
            FROM linkis_resource_refusal
            -- Only the index by user serves row comparisons, even if the table was empty when the statement was planned.
            WHERE ("user", period_start, key_hash) < (u.name, $1, $2) AND ("user", period_start, key_hash) >= (u.name, $3, '\x')
            GROUP BY "user", period_start, key_hash ORDER BY "user" DESC, period_start DESC, key_hash DESC LIMIT $4) s
        ORDER BY s.period_start DESC, s.key_hash DESC LIMIT $4"#
    } else {
        r#"-- refusal::list, all
        SELECT period_start, key_hash, min("user") AS "user", min(scope_kind) AS scope_kind, min(scope) AS scope,
            min(dimension) AS dimension, min(rule) AS rule, sum(refusals)::bigint AS refusals,
            (array_agg(last_requested ORDER BY last_time DESC))[1] AS last_requested,
            (array_agg(last_available ORDER BY last_time DESC))[1] AS last_available, max(last_time) AS last_time
        FROM linkis_resource_refusal
        WHERE (period_start, key_hash) < ($1, $2) AND period_start >= $3 AND $5::text[] IS NULL
        GROUP BY period_start, key_hash ORDER BY period_start DESC, key_hash DESC LIMIT $4"#
    };
    let rows = sqlx::query(sql)
        .bind(after.period_start)
        .bind(after.key_hash.to_vec())
        .bind(from)
        .bind(limit)
        .bind(users.map(|users| users.iter().map(Name::as_str).collect::<Vec<_>>()))
        .fetch_all(executor)
        .await?;
    TABLE.parse(&rows, sum)
}

/// Deletes up to `limit` rows of periods older than `history`. Returns whether more may exist.
pub async fn delete_expired(executor: impl PgExecutor<'_>, history: Duration, limit: i64) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- refusal::delete_expired
        DELETE FROM linkis_resource_refusal WHERE ctid = ANY (ARRAY (
            SELECT ctid FROM linkis_resource_refusal WHERE period_start < now() - make_interval(secs => $1)
            ORDER BY period_start LIMIT $2))",
    )
    .bind(history.as_secs_f64())
    .bind(limit)
    .execute(executor)
    .await?;
    Ok(i64::try_from(done.rows_affected()).is_ok_and(|rows| rows == limit))
}

fn key_hash(key: &RefusalKey<String>) -> [u8; HASH_BYTES] {
    // JSON, because each text may contain any separator.
    hash(&serde_json::json!([key.user, key.kind.as_str(), key.scope, key.dimension, key.rule]).to_string())
}
