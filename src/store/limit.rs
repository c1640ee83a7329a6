//! `linkis_resource_limit`: the rules, and `linkis_resource_limit_version`: the fence between those who count by them and those
//! who change them.

use std::{collections::BTreeMap, sync::Arc};

use sqlx::PgConnection;

use crate::domain::{
    limit::{Limits, Pattern, Rule},
    resource::Dimension,
};

use super::{
    StoreError, policy,
    rows::{hash, tally_json},
};

const TABLE: &str = "linkis_resource_limit";

/// What every batch has to know first, read by [`em_resource::read_in_force`](super::em_resource::read_in_force).
#[derive(Debug)]
pub struct InForce {
    /// The limits.
    pub limits: Arc<Limits>,
    /// Whether anybody may wait in line, anywhere: an instance that has waiters says that it lives before they stand there.
    pub anybody_waits: bool,
}

/// The limits in force: `known`, if they have not changed since. In a transaction they then stay in force until it ends.
pub async fn current(connection: &mut PgConnection, known: &Arc<Limits>) -> Result<Arc<Limits>, StoreError> {
    let version = sqlx::query_scalar(
        "-- limit::current
        SELECT version FROM linkis_resource_limit_version WHERE only_row",
    )
    .fetch_one(&mut *connection)
    .await?;
    of_version(connection, version, known).await
}

/// The limits of this version: `known`, if they have not changed since.
pub(super) async fn of_version(
    connection: &mut PgConnection,
    version: i64,
    known: &Arc<Limits>,
) -> Result<Arc<Limits>, StoreError> {
    match version == known.version() {
        true => Ok(known.clone()),
        false => Ok(Arc::new(read(connection, version).await?)),
    }
}

async fn read(connection: &mut PgConnection, version: i64) -> Result<Limits, StoreError> {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "-- limit::read
        SELECT pattern::text, max_resource::text FROM linkis_resource_limit",
    )
    .fetch_all(&mut *connection)
    .await?;
    let rules = rows.into_iter().map(|(pattern, max)| rule(&pattern, &max)).collect::<Result<Vec<_>, _>>()?;
    Ok(Limits::new(version, rules).with_policies(policy::read(connection).await?))
}

fn rule(pattern: &str, max: &str) -> Result<Rule, StoreError> {
    let labels = serde_json::from_str(pattern).map_err(|error| StoreError::inconsistent(TABLE, error))?;
    let max: BTreeMap<String, i64> =
        serde_json::from_str(max).map_err(|error| StoreError::inconsistent(TABLE, error))?;
    let dimension = |key: String| Dimension::parse_key(&key).ok_or_else(|| StoreError::inconsistent(TABLE, key));
    let max = max.into_iter().map(|(key, amount)| Ok((dimension(key)?, amount))).collect::<Result<_, StoreError>>()?;
    Ok(Rule { pattern: Pattern::new(labels), max })
}

/// Waits until nobody counts by the rules, keeps everybody from doing so until the transaction ends, and answers with the rules.
pub async fn lock(connection: &mut PgConnection) -> Result<Limits, StoreError> {
    sqlx::query("LOCK TABLE linkis_resource_limit_version IN ACCESS EXCLUSIVE MODE").execute(&mut *connection).await?;
    let version: i64 = sqlx::query_scalar(
        "-- limit::lock
        UPDATE linkis_resource_limit_version SET version = version + 1 WHERE only_row RETURNING version",
    )
    .fetch_one(&mut *connection)
    .await?;
    read(connection, version).await
}

/// Writes a rule, in place of another with the same pattern.
pub async fn upsert(connection: &mut PgConnection, rule: &Rule) -> Result<(), StoreError> {
    let pattern = pattern_json(&rule.pattern);
    sqlx::query(
        "-- limit::upsert
        INSERT INTO linkis_resource_limit (pattern, max_resource, update_time, pattern_hash)
        VALUES ($1::text::jsonb, $2::text::jsonb, clock_timestamp(), $3)
        ON CONFLICT (pattern_hash) DO UPDATE SET max_resource = excluded.max_resource, update_time = excluded.update_time",
    )
    .bind(&pattern)
    .bind(tally_json(rule.max.iter().map(|(dimension, max)| (dimension, *max))))
    .bind(hash(&pattern).as_slice())
    .execute(connection)
    .await?;
    Ok(())
}

/// Removes a rule; false if there was none.
pub async fn delete(connection: &mut PgConnection, pattern: &Pattern) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- limit::delete
        DELETE FROM linkis_resource_limit WHERE pattern_hash = $1",
    )
    .bind(hash(&pattern_json(pattern)).as_slice())
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The rules, without keeping anybody from changing them.
pub async fn look(connection: &mut PgConnection) -> Result<Limits, StoreError> {
    // The version is not read: whoever does so in a transaction makes the next change wait, and all others behind it.
    read(connection, 0).await
}

fn pattern_json(pattern: &Pattern) -> String {
    serde_json::json!(pattern.labels()).to_string()
}
