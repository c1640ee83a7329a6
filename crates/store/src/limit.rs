//! `linkis_resource_limit`: the rules. `linkis_resource_limit_version`: the limits fence and the limits version.
//!
//! The fence is a table lock. Batches read the version under a weak lock. A change of the rules takes the strong lock
//! last, so it waits for all batches that use the old rules. The version row also states the oldest release that may
//! write.
//!
//! Never: changes a rule without a new version. Callers: the committer, limit changes and holds.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    limit::{LabelPattern, Limits, Rule, RuleRecord},
    limit_mode::LimitMode,
    order::QueueRules,
    principal::Principal,
    resource::Dimension,
};

use super::{
    StoreError, expect_rows, label_set, limit_change, policy, queue_order, queue_priority, reclaim_policy,
    rows::{TableName, TableRow, dimension, hash, tally_json},
};

const TABLE: TableName = TableName("linkis_resource_limit");

/// Length of an etag, in bytes of the hash.
const ETAG_BYTES: usize = 16;

/// Limits and flags that a batch reads first, by [`em_resource::read_in_force`](super::em_resource::read_in_force).
#[derive(Debug)]
pub struct CurrentLimits {
    /// Limits of the present version.
    pub limits: Arc<Limits>,
    /// Whether any instance may have waiters. An instance writes its liveness row before its first queue entry.
    pub anybody_waits: bool,
    /// Whether there are holds, expired ones included.
    pub any_held: bool,
    /// Oldest release that may write.
    pub oldest_writer: i32,
}

/// Writer number of this release. A release that counts differently raises it, and stores it as `oldest_writer` when
/// earlier releases may no longer write.
pub const WRITER: i32 = 2;

/// Checks that this release may write.
///
/// # Errors
/// [`StoreError::TooOld`].
pub fn check_writer(oldest_writer: i32) -> Result<(), StoreError> {
    if oldest_writer <= WRITER { Ok(()) } else { Err(StoreError::TooOld { oldest_writer }) }
}

/// Returns the present limits, or `known` if they have not changed. The limits cannot change until the transaction
/// ends.
pub async fn current(connection: &mut PgConnection, known: &Arc<Limits>) -> Result<Arc<Limits>, StoreError> {
    let version = sqlx::query_scalar(
        "-- limit::current
        SELECT version FROM linkis_resource_limit_version WHERE only_row",
    )
    .fetch_one(&mut *connection)
    .await?;
    of_version(connection, version, known).await
}

/// Returns the limits of `version`, or `known` if that is their version.
pub(super) async fn of_version(
    connection: &mut PgConnection,
    version: Uuid,
    known: &Arc<Limits>,
) -> Result<Arc<Limits>, StoreError> {
    match version == known.version() {
        true => Ok(known.clone()),
        false => Ok(Arc::new(read(connection, version, known).await?)),
    }
}

/// Reads the limits of `version`. Reads only the rules that changed since `known` if the change log covers them.
async fn read(connection: &mut PgConnection, version: Uuid, known: &Limits) -> Result<Limits, StoreError> {
    let changes = limit_change::between(&mut *connection, known.version(), version).await?;
    let all = match &changes {
        Some(_) => Vec::new(),
        None => rules(&mut *connection).await?,
    };
    let sets = label_set::read(&mut *connection).await?;
    let policies = policy::read(&mut *connection).await?;
    let order = queue_order::read(&mut *connection).await?;
    let priorities = queue_priority::read(&mut *connection).await?;
    let reclaim = reclaim_policy::read(connection).await?;
    let limits = match changes {
        Some(changes) => known.changed(version, sets, changes),
        None => Limits::new(version, sets, all),
    };
    Ok(limits.with_policies(policies).with_queue_rules(QueueRules { order, priorities, reclaim }))
}

/// Returns all rules.
pub async fn rules(executor: impl PgExecutor<'_>) -> Result<Vec<Rule>, StoreError> {
    let rows: Vec<(String, String, String, String)> = sqlx::query_as(
        "-- limit::rules
        SELECT pattern::text, mode, max_resource::text, guarantee::text FROM linkis_resource_limit",
    )
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|(pattern, mode, max, guarantee)| rule(&pattern, &mode, (&max, &guarantee))).collect()
}

/// Parses the pattern of a rule from JSON.
pub(super) fn pattern(json: &str) -> Result<LabelPattern, StoreError> {
    Ok(LabelPattern::new(serde_json::from_str(json).map_err(|error| StoreError::inconsistent(TABLE.0, error))?))
}

/// Parses a rule from its columns.
pub(super) fn rule(pattern_json: &str, mode: &str, (max, guarantee): (&str, &str)) -> Result<Rule, StoreError> {
    let amounts = |json: &str| -> Result<BTreeMap<Dimension, i64>, StoreError> {
        let amounts: BTreeMap<String, i64> =
            serde_json::from_str(json).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
        amounts.into_iter().map(|(key, amount)| Ok((dimension(TABLE.0, &key)?, amount))).collect()
    };
    let (max, guarantee) = (amounts(max)?, amounts(guarantee)?);
    let mode = LimitMode::parse(mode).ok_or_else(|| StoreError::inconsistent(TABLE.0, format!("mode {mode}")))?;
    Ok(Rule { pattern: pattern(pattern_json)?, mode, max, guarantee })
}

/// Starts a change of the limits: excludes other changes until the transaction ends and sets a new version. Batches
/// continue until [`close_fence`]. Returns the previous version.
///
/// # Errors
/// [`StoreError::is_lock_timeout`] if another change takes longer than `lock_timeout`; [`StoreError::TooOld`].
pub async fn begin_change(connection: &mut PgConnection) -> Result<Uuid, StoreError> {
    sqlx::query("LOCK TABLE linkis_resource_limit_version IN SHARE UPDATE EXCLUSIVE MODE")
        .execute(&mut *connection)
        .await?;
    let (before, oldest_writer) = sqlx::query_as(
        "-- limit::begin_change
        WITH before AS MATERIALIZED (SELECT version FROM linkis_resource_limit_version WHERE only_row)
        UPDATE linkis_resource_limit_version v
        SET version = gen_random_uuid() FROM before WHERE only_row RETURNING before.version, oldest_writer",
    )
    .fetch_one(&mut *connection)
    .await?;
    check_writer(oldest_writer)?;
    Ok(before)
}

/// Closes the limits fence: waits until no batch uses the rules, and blocks new batches until the transaction ends. The
/// caller must commit soon.
///
/// # Errors
/// [`StoreError::is_lock_timeout`] if a batch takes longer than `lock_timeout`. Later batches wait meanwhile.
pub async fn close_fence(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query("LOCK TABLE linkis_resource_limit_version IN ACCESS EXCLUSIVE MODE").execute(connection).await?;
    Ok(())
}

/// Inserts or replaces rules by pattern. The patterns must be distinct.
pub async fn upsert(connection: &mut PgConnection, rules: &[Rule], by: &Principal) -> Result<(), StoreError> {
    let patterns: Vec<String> = rules.iter().map(|rule| pattern_json(&rule.pattern)).collect();
    let done = sqlx::query(
        "-- limit::upsert
        INSERT INTO linkis_resource_limit (pattern, name, max_resource, update_time, updated_by, pattern_hash, label_set,
            mode, guarantee)
        SELECT pattern::jsonb, name, max::jsonb, clock_timestamp(), $4, pattern_hash, label_set::jsonb, mode, guarantee::jsonb
        FROM unnest($1::text[], $2::text[], $3::text[], $5::bytea[], $6::text[], $7::text[], $8::text[])
            AS d (pattern, name, max, pattern_hash, label_set, mode, guarantee)
        ON CONFLICT (pattern_hash) DO UPDATE SET max_resource = excluded.max_resource, update_time = excluded.update_time,
            updated_by = excluded.updated_by, mode = excluded.mode, guarantee = excluded.guarantee",
    )
    .bind(&patterns)
    .bind(rules.iter().map(|rule| rule.pattern.to_string()).collect::<Vec<_>>())
    .bind(rules.iter().map(|rule| amounts_json(&rule.max)).collect::<Vec<_>>())
    .bind(by.as_str())
    .bind(patterns.iter().map(|pattern| hash(pattern).to_vec()).collect::<Vec<_>>())
    .bind(rules.iter().map(|rule| serde_json::json!(rule.label_set()).to_string()).collect::<Vec<_>>())
    .bind(rules.iter().map(|rule| rule.mode.as_str()).collect::<Vec<_>>())
    .bind(rules.iter().map(|rule| amounts_json(&rule.guarantee)).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, rules.len(), done.rows_affected())
}

/// Deletes the rules of `patterns` and returns those that existed.
pub async fn delete(connection: &mut PgConnection, patterns: &[LabelPattern]) -> Result<Vec<Rule>, StoreError> {
    let rows: Vec<(String, String, String, String)> = sqlx::query_as(
        "-- limit::delete
        DELETE FROM linkis_resource_limit WHERE pattern_hash = ANY ($1)
        RETURNING pattern::text, mode, max_resource::text, guarantee::text",
    )
    .bind(pattern_hashes(patterns))
    .fetch_all(connection)
    .await?;
    rows.into_iter().map(|(pattern, mode, max, guarantee)| rule(&pattern, &mode, (&max, &guarantee))).collect()
}

fn record(row: TableRow<'_>) -> Result<RuleRecord, StoreError> {
    let (pattern, mode): (&str, &str) = (row.get("pattern")?, row.get("mode")?);
    let (max_resource, guarantee): (&str, &str) = (row.get("max_resource")?, row.get("guarantee")?);
    let (updated_by, update_time): (String, OffsetDateTime) = (row.get("updated_by")?, row.get("update_time")?);
    // Over the stored text, so that a change by an earlier release also changes the etag.
    let stored =
        format!("{pattern} {mode} {max_resource} {guarantee} {} {updated_by}", update_time.unix_timestamp_nanos());
    let etag = hash(&stored).iter().take(ETAG_BYTES).map(|byte| format!("{byte:02x}")).collect();
    Ok(RuleRecord { rule: rule(pattern, mode, (max_resource, guarantee))?, updated_by, update_time, etag })
}

/// Returns the rules of `patterns` that exist, with author, time and etag.
pub async fn records<'a>(
    executor: impl PgExecutor<'_>,
    patterns: impl IntoIterator<Item = &'a LabelPattern>,
) -> Result<HashMap<LabelPattern, RuleRecord>, StoreError> {
    let rows = sqlx::query(
        "-- limit::records
        SELECT pattern::text, mode, max_resource::text, guarantee::text, updated_by, update_time
        FROM linkis_resource_limit WHERE pattern_hash = ANY ($1)",
    )
    .bind(pattern_hashes(patterns))
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| record(row).map(|record| (record.rule.pattern.clone(), record)))
}

fn pattern_hashes<'a>(patterns: impl IntoIterator<Item = &'a LabelPattern>) -> Vec<Vec<u8>> {
    patterns.into_iter().map(|pattern| hash(&pattern_json(pattern)).to_vec()).collect()
}

/// Returns the label sets among `label_sets` that have rules. Reads one index entry per set; a join would read all
/// rules.
pub async fn label_sets(
    executor: impl PgExecutor<'_>,
    label_sets: BTreeSet<BTreeSet<String>>,
) -> Result<BTreeSet<BTreeSet<String>>, StoreError> {
    let numbers: Vec<i64> = sqlx::query_scalar(
        "-- limit::label_sets
        SELECT k.number FROM unnest($1::text[]) WITH ORDINALITY AS k (label_set, number)
        WHERE k.label_set::jsonb = (SELECT l.label_set FROM linkis_resource_limit l
            WHERE md5(l.label_set::text) >= md5(k.label_set::jsonb::text) ORDER BY md5(l.label_set::text) LIMIT 1)",
    )
    .bind(label_sets.iter().map(|set| serde_json::json!(set).to_string()).collect::<Vec<_>>())
    .fetch_all(executor)
    .await?;
    let with_rules = |number: &i64| numbers.contains(number);
    Ok((1..).zip(label_sets).filter(|(number, _)| with_rules(number)).map(|(_, set)| set).collect())
}

/// Returns the rules without blocking changes.
pub async fn read_unfenced(connection: &mut PgConnection) -> Result<Limits, StoreError> {
    // The version is not read: a read in a transaction would block the next change and every batch behind that.
    let rules = rules(&mut *connection).await?;
    let sets = label_set::read(&mut *connection).await?;
    Ok(Limits::new(Uuid::nil(), sets, rules).with_policies(policy::read(connection).await?))
}

/// Returns the stored form of the maxima or guarantees of a rule.
pub(super) fn amounts_json(amounts: &BTreeMap<Dimension, i64>) -> String {
    tally_json(amounts.iter().map(|(dimension, amount)| (dimension, *amount)))
}

/// Returns the stored form of a pattern; its hash is the key of the rule.
pub(super) fn pattern_json(pattern: &LabelPattern) -> String {
    serde_json::json!(pattern.labels()).to_string()
}
