//! `linkis_user_sum`: the use of each user by its live tickets. `linkis_user_sum_progress`: the writer of the sums, and the
//! last history line that they include.
//!
//! Invariant: sums and progress change in one transaction, by one writer. Callers: the task that sums by user, and the list
//! of the users with the most use.
//!
//! Submodule: `source`: the live tickets and their changes, which the task sums.

use std::collections::{BTreeMap, BTreeSet};

use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    name::Name,
    resource::Dimension,
    user_sum::{IdleTotals, UseSum, UserSum},
};

use super::{
    StoreError,
    rows::{TableName, TableRow, column, dimension},
};

mod source;

pub use source::{changes, idle, tickets};

const TABLE: TableName = TableName("linkis_user_sum");

/// Column `dimension` of the number of tickets.
const TICKETS: &str = "";

/// Makes `writer` the only writer of the sums. The sums include the history lines up to `number` once the writer has
/// compared them with all live tickets.
pub async fn begin(executor: impl PgExecutor<'_>, writer: Uuid, number: i64) -> Result<(), StoreError> {
    sqlx::query(
        "-- user_sum::begin
        UPDATE linkis_user_sum_progress SET writer = $1, last_number = $2 WHERE only_row",
    )
    .bind(writer)
    .bind(number)
    .execute(executor)
    .await?;
    Ok(())
}

/// Sums that are complete up to a time.
#[derive(Debug, Clone)]
pub struct CompleteSums {
    /// The sums include all changes before this time.
    pub until: OffsetDateTime,
    /// Sums of all users' tickets with idle engines.
    pub idle: IdleTotals,
}

/// Progress of a writer.
#[derive(Debug, Clone)]
pub struct SumProgress {
    /// Writer of the sums.
    pub writer: Uuid,
    /// Number of the last included history line, before the transaction.
    pub from: i64,
    /// Number of the last included history line, after the transaction.
    pub to: i64,
    /// The sums after the transaction; `None` if changes are left.
    pub complete: Option<CompleteSums>,
}

/// Advances the progress. Returns false if another writer has begun, if the database was restored to an earlier state, or
/// if lines after the last included one were deleted.
pub async fn advance(executor: impl PgExecutor<'_>, progress: &SumProgress) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- user_sum::advance
        UPDATE linkis_user_sum_progress SET last_number = $3, complete_until = coalesce($4, complete_until),
            idle = coalesce($5::text::jsonb, idle)
        WHERE only_row AND writer = $1 AND last_number = $2
            AND NOT EXISTS (SELECT FROM linkis_resource_action_horizon WHERE only_row AND forgotten > $2)",
    )
    .bind(progress.writer)
    .bind(progress.from)
    .bind(progress.to)
    .bind(progress.complete.as_ref().map(|complete| complete.until))
    .bind(progress.complete.as_ref().map(|complete| idle_json(&complete.idle)))
    .execute(executor)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Returns totals as a JSON object by dimension, with the number of tickets as [`TICKETS`].
fn idle_json(idle: &IdleTotals) -> String {
    let amounts = idle.amounts.iter().map(|(dimension, amount)| (dimension.key(), (*amount).into()));
    let tickets = (TICKETS.to_owned(), idle.tickets.into());
    serde_json::Value::Object(std::iter::once(tickets).chain(amounts).collect()).to_string()
}

/// Returns the totals of idle engines in the column `idle` of the progress.
pub(super) fn idle_totals(row: TableRow<'_>) -> Result<IdleTotals, StoreError> {
    let mut numbers: BTreeMap<String, i64> = row.json("idle")?;
    let tickets = numbers.remove(TICKETS).unwrap_or_default();
    let amounts = numbers.into_iter().map(|(key, amount)| Ok((dimension("linkis_user_sum_progress", &key)?, amount)));
    Ok(IdleTotals { tickets, amounts: amounts.collect::<Result<_, StoreError>>()? })
}

/// Returns the time before which the sums include all changes; `None` before the first sums.
pub async fn complete_until(executor: impl PgExecutor<'_>) -> Result<Option<OffsetDateTime>, StoreError> {
    let until = sqlx::query_scalar(
        "-- user_sum::complete_until
        SELECT nullif(complete_until, 'epoch') FROM linkis_user_sum_progress WHERE only_row",
    )
    .fetch_one(executor)
    .await?;
    Ok(until)
}

/// Returns the age of the sums; `None` before the first sums.
pub async fn age(executor: impl PgExecutor<'_>) -> Result<Option<time::Duration>, StoreError> {
    let seconds: Option<f64> = sqlx::query_scalar(
        "-- user_sum::age
        SELECT extract(epoch FROM clock_timestamp() - nullif(complete_until, 'epoch'))::float8
        FROM linkis_user_sum_progress WHERE only_row",
    )
    .fetch_one(executor)
    .await?;
    Ok(seconds.map(|seconds| time::Duration::seconds_f64(seconds.max(0.0))))
}

/// A row to write.
struct SumRow<'a> {
    user: &'a str,
    dimension: String,
    sum: UseSum,
}

fn rows<'a>(user: &'a Name, sum: &UserSum) -> Vec<SumRow<'a>> {
    let tickets = SumRow { user: user.as_str(), dimension: TICKETS.to_owned(), sum: sum.tickets };
    let dimensions = sum.dimensions.iter();
    let dimensions =
        dimensions.map(|(dimension, sum)| SumRow { user: user.as_str(), dimension: dimension.key(), sum: *sum });
    std::iter::once(tickets).chain(dimensions).collect()
}

/// Replaces the stored sums of users. A user without a sum has no rows afterwards.
pub async fn write(connection: &mut PgConnection, sums: &[(Name, Option<UserSum>)]) -> Result<(), StoreError> {
    if sums.is_empty() {
        return Ok(());
    }
    let rows: Vec<_> = sums.iter().filter_map(|(user, sum)| Some(rows(user, sum.as_ref()?))).flatten().collect();
    sqlx::query(
        r#"-- user_sum::write
        WITH now AS MATERIALIZED (
            SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
                AS n ("user", dimension, used, locked, idle, rank)
        ), gone AS (
            -- OFFSET 0 looks each user up in the index: other plans read all sums.
            DELETE FROM linkis_user_sum WHERE ctid = ANY (ARRAY(
                SELECT s.ctid FROM unnest($7::text[]) AS k (name) CROSS JOIN LATERAL (
                    SELECT ctid, dimension FROM linkis_user_sum WHERE "user" = k.name OFFSET 0) s
                WHERE NOT EXISTS (SELECT FROM now n WHERE n."user" = k.name AND n.dimension = s.dimension)))
        )
        INSERT INTO linkis_user_sum AS s ("user", dimension, used, locked, idle, rank)
        SELECT "user", dimension, used, locked, idle, rank FROM now
        ON CONFLICT ("user", dimension) DO UPDATE
            SET used = excluded.used, locked = excluded.locked, idle = excluded.idle, rank = excluded.rank
            WHERE (s.used, s.locked, s.idle) IS DISTINCT FROM (excluded.used, excluded.locked, excluded.idle)"#,
    )
    .bind(column(&rows, |row| row.user))
    .bind(column(&rows, |row| row.dimension.as_str()))
    .bind(column(&rows, |row| row.sum.used))
    .bind(column(&rows, |row| row.sum.locked))
    .bind(column(&rows, |row| row.sum.idle))
    .bind(column(&rows, |row| -row.sum.total()))
    .bind(column(sums, |(user, _)| user.as_str()))
    .execute(connection)
    .await?;
    Ok(())
}

fn user_sum(row: TableRow<'_>) -> Result<(Name, UserSum), StoreError> {
    let (names, used): (Vec<String>, Vec<i64>) = (row.get("dimensions")?, row.get("used")?);
    let (locked, idle): (Vec<i64>, Vec<i64>) = (row.get("locked")?, row.get("idle")?);
    let mut sum = UserSum::default();
    for (name, ((used, locked), idle)) in names.iter().zip(used.into_iter().zip(locked).zip(idle)) {
        // An instance of an earlier release writes `used` alone.
        let quantity = UseSum { used, locked, idle: idle.min(used) };
        match name.as_str() {
            TICKETS => sum.tickets = quantity,
            name => drop(sum.dimensions.insert(dimension(TABLE.0, name)?, quantity)),
        }
    }
    Ok((row.name("user")?, sum))
}

/// Returns the stored sums of up to `limit` users after `after` (empty for the first ones), by name.
pub async fn stored(
    executor: impl PgExecutor<'_>,
    after: &str,
    limit: i64,
) -> Result<Vec<(Name, UserSum)>, StoreError> {
    let rows = sqlx::query(
        r#"-- user_sum::stored
        SELECT "user", array_agg(dimension) AS dimensions, array_agg(used) AS used, array_agg(locked) AS locked,
            array_agg(idle) AS idle
        FROM linkis_user_sum WHERE "user" > $1 GROUP BY "user" ORDER BY "user" LIMIT $2"#,
    )
    .bind(after)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, user_sum)
}

/// Last user of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserSumAt {
    /// Total of the user in the dimension of the list.
    pub total: i64,
    /// Name of the user.
    pub user: String,
}

/// SQL of a page. Parameters: $1 dimension, $2 and $3 rank and name of the last user of the previous page, $4 maximum
/// number of users.
macro_rules! page {
    ($name:literal, $from:literal) => {
        concat!(
            "-- user_sum::list, ",
            $name,
            r#"
            SELECT p."user", s.dimensions, s.used, s.locked, s.idle FROM (
                SELECT u."user", u.rank FROM "#,
            $from,
            r#" AND u.dimension = $1 AND (u.rank, u."user") > ($2, $3)
                ORDER BY u.rank, u."user" LIMIT $4) p
            CROSS JOIN LATERAL (
                SELECT array_agg(dimension) AS dimensions, array_agg(used) AS used, array_agg(locked) AS locked,
                    array_agg(idle) AS idle
                FROM linkis_user_sum s WHERE s."user" = p."user") s
            ORDER BY p.rank, p."user""#
        )
    };
}

/// Returns up to `limit` users after `after` with use in `dimension`, the most use first; among `users` if given.
pub async fn list(
    executor: impl PgExecutor<'_>,
    dimension: &Dimension,
    users: Option<&BTreeSet<Name>>,
    after: Option<&UserSumAt>,
    limit: i64,
) -> Result<Vec<(Name, UserSum)>, StoreError> {
    // A separate SQL text per index.
    let sql = match users {
        None => page!("all", "linkis_user_sum u WHERE true"),
        Some(_) => page!(
            "of users",
            r#"unnest($5::text[]) AS k (name) JOIN linkis_user_sum u ON u."user" = k.name WHERE true"#
        ),
    };
    let query = sqlx::query(sql)
        .bind(dimension.key())
        .bind(after.map_or(i64::MIN, |after| -after.total))
        .bind(after.map_or("", |after| &after.user))
        .bind(limit);
    let query = match users {
        None => query,
        Some(users) => query.bind(users.iter().map(Name::as_str).collect::<Vec<_>>()),
    };
    TABLE.parse(&query.fetch_all(executor).await?, user_sum)
}
