//! `linkis_resource_usage_hour`: use of ended tickets, summed by hour and name. `linkis_resource_usage_progress`: the
//! last history line that is summed.
//!
//! Invariant: sums and progress change in one transaction, so each history line counts once. Callers: the roll-up task, the
//! retention and the usage calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use sqlx::{PgConnection, PgExecutor, Row as _, postgres::PgRow};
use time::{OffsetDateTime, macros::datetime};

use rm_model::{
    name::Name,
    usage_sum::{HourKey, UsageAmount, UsageBy, UsageName, UsageSum, UsageSums},
};

use super::{
    StoreError, expect_rows,
    rows::{TableName, TableRow, column},
};

const TABLE: TableName = TableName("linkis_resource_usage_hour");

/// Maximum number of names that a page scans without a result, and of rows that a page adds up. Each name may have one
/// row per retained hour, with up to [`NAMES_MAX`](rm_model::usage_sum::NAMES_MAX) names per hour.
const LOOKED_AT_MAX: i64 = 5000;
const ADDED_UP_MAX: i64 = 250_000;

/// Sorts after every hour.
const LAST_HOUR: OffsetDateTime = datetime!(9999-12-31 23:00 UTC);

/// Progress of the roll-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RollUpProgress {
    /// Number of the last history line that is summed, with all earlier lines.
    pub last_number: i64,
    /// All tickets that ended before this time are summed.
    pub complete_until: OffsetDateTime,
}

/// Returns the progress of the roll-up.
pub async fn progress(executor: impl PgExecutor<'_>) -> Result<RollUpProgress, StoreError> {
    let (last_number, complete_until) = sqlx::query_as(
        "-- usage_hour::progress
        SELECT last_number, complete_until FROM linkis_resource_usage_progress WHERE only_row",
    )
    .fetch_one(executor)
    .await?;
    Ok(RollUpProgress { last_number, complete_until })
}

/// Advances the progress from the line number `from`. Returns false if another instance has advanced it. Sums added in
/// the same transaction count once.
pub async fn advance(executor: impl PgExecutor<'_>, from: i64, to: RollUpProgress) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- usage_hour::advance
        UPDATE linkis_resource_usage_progress SET last_number = $2, complete_until = greatest(complete_until, $3)
        WHERE only_row AND last_number = $1",
    )
    .bind(from)
    .bind(to.last_number)
    .bind(to.complete_until)
    .execute(executor)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Key columns of a sum.
struct UsageKey<'a> {
    used_by: &'static str,
    is_rest: bool,
    name: &'a str,
    em_instance: &'a str,
    hour: OffsetDateTime,
}

fn keys(sums: &UsageSums) -> Vec<UsageKey<'_>> {
    let keys = sums.0.keys().map(|((hour, by), used_by)| {
        let (is_rest, name, em_instance) = name_columns(used_by);
        UsageKey { used_by: by.as_str(), is_rest, name, em_instance, hour: *hour }
    });
    keys.collect()
}

fn name_columns(used_by: &UsageName) -> (bool, &str, &str) {
    match used_by {
        UsageName::Name(name, em_instance) => (false, name, em_instance),
        UsageName::Others => (true, "", ""),
    }
}

fn used_by(is_rest: bool, name: String, em_instance: String) -> UsageName {
    if is_rest { UsageName::Others } else { UsageName::Name(name, em_instance) }
}

fn usage_by(text: &str) -> Result<UsageBy, StoreError> {
    UsageBy::parse(text).ok_or_else(|| StoreError::inconsistent(TABLE.0, text))
}

/// Returns the names of `sums` that have their own row already, and the number of names in each of their hours.
pub async fn known(
    connection: &mut PgConnection,
    sums: &UsageSums,
) -> Result<(BTreeSet<(HourKey, UsageName)>, BTreeMap<HourKey, usize>), StoreError> {
    let keys = keys(sums);
    let known: Vec<(String, String, String, OffsetDateTime)> = sqlx::query_as(
        "-- usage_hour::known
        SELECT u.used_by, u.name, u.em_instance, u.hour
        FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[]) AS d (used_by, name, em_instance, hour)
        JOIN linkis_resource_usage_hour u ON u.used_by = d.used_by AND NOT u.is_rest AND u.name = d.name
            AND u.em_instance = d.em_instance AND u.hour = d.hour",
    )
    .bind(column(&keys, |key| key.used_by))
    .bind(column(&keys, |key| key.name))
    .bind(column(&keys, |key| key.em_instance))
    .bind(column(&keys, |key| key.hour))
    .fetch_all(&mut *connection)
    .await?;
    let key = |(by, name, em_instance, hour): (String, String, String, OffsetDateTime)| {
        Ok(((hour, usage_by(&by)?), UsageName::Name(name, em_instance)))
    };
    let known = known.into_iter().map(key).collect::<Result<_, StoreError>>()?;
    let hours: BTreeSet<OffsetDateTime> = keys.iter().map(|key| key.hour).collect();
    let counts: Vec<(OffsetDateTime, String, i64)> = sqlx::query_as(
        "-- usage_hour::known, how many
        SELECT hour, used_by, count(*) FROM linkis_resource_usage_hour WHERE hour = ANY ($1) GROUP BY hour, used_by",
    )
    .bind(hours.into_iter().collect::<Vec<_>>())
    .fetch_all(&mut *connection)
    .await?;
    let names = |(hour, by, count): (OffsetDateTime, String, i64)| {
        Ok(((hour, usage_by(&by)?), usize::try_from(count).unwrap_or(usize::MAX)))
    };
    Ok((known, counts.into_iter().map(names).collect::<Result<_, StoreError>>()?))
}

/// Adds sums to the stored ones.
pub async fn add(connection: &mut PgConnection, sums: &UsageSums) -> Result<(), StoreError> {
    if sums.0.is_empty() {
        return Ok(());
    }
    let (keys, used) = (keys(sums), || sums.0.values());
    let amounts = |amount: fn(&UsageAmount) -> i128| used().map(|used| amount(used).to_string()).collect::<Vec<_>>();
    let done = sqlx::query(
        "-- usage_hour::add
        INSERT INTO linkis_resource_usage_hour AS u (used_by, is_rest, name, em_instance, hour, tickets, core_seconds,
            byte_seconds, queue_core_seconds, queue_byte_seconds)
        -- Exact sums of thousandths of cores and of microseconds.
        SELECT used_by, is_rest, name, em_instance, hour, tickets, cores::numeric * 0.000000001, bytes::numeric * 0.000001,
            queue_cores::numeric * 0.000000001, queue_bytes::numeric * 0.000001
        FROM unnest($1::text[], $2::boolean[], $3::text[], $4::text[], $5::timestamptz[], $6::bigint[], $7::text[],
            $8::text[], $9::text[], $10::text[])
            AS d (used_by, is_rest, name, em_instance, hour, tickets, cores, bytes, queue_cores, queue_bytes)
        ON CONFLICT (used_by, is_rest, name, em_instance, hour) DO UPDATE SET tickets = u.tickets + excluded.tickets,
            core_seconds = u.core_seconds + excluded.core_seconds, byte_seconds = u.byte_seconds + excluded.byte_seconds,
            queue_core_seconds = u.queue_core_seconds + excluded.queue_core_seconds,
            queue_byte_seconds = u.queue_byte_seconds + excluded.queue_byte_seconds",
    )
    .bind(column(&keys, |key| key.used_by))
    .bind(column(&keys, |key| key.is_rest))
    .bind(column(&keys, |key| key.name))
    .bind(column(&keys, |key| key.em_instance))
    .bind(column(&keys, |key| key.hour))
    .bind(column(used(), |used| used.tickets))
    .bind(amounts(|used| used.cores))
    .bind(amounts(|used| used.bytes))
    .bind(amounts(|used| used.queue_cores))
    .bind(amounts(|used| used.queue_bytes))
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, sums.0.len(), done.rows_affected())
}

/// Selection of sums.
#[derive(Debug, Clone)]
pub struct UsageRange {
    /// Kind of name to sum by.
    pub by: UsageBy,
    /// Users to match, if the kind is the user; `None` for all.
    pub users: Option<BTreeSet<Name>>,
    /// Start of the first hour.
    pub from: OffsetDateTime,
    /// End of the last hour.
    pub to: OffsetDateTime,
    /// Whether to return one sum per hour instead of one in total.
    pub hourly: bool,
}

/// Key of a sum in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageAt {
    /// Name of the sum.
    pub used_by: UsageName,
    /// Hour of an hourly sum; `None` for a total.
    pub hour: Option<OffsetDateTime>,
}

fn sum(row: TableRow<'_>) -> Result<UsageSum, StoreError> {
    Ok(UsageSum {
        used_by: used_by(row.get("is_rest")?, row.get("name")?, row.get("em_instance")?),
        hour: row.get("hour")?,
        tickets: row.get("tickets")?,
        core_seconds: row.get("core_seconds")?,
        byte_seconds: row.get("byte_seconds")?,
        queue_core_seconds: row.get("queue_core_seconds")?,
        queue_byte_seconds: row.get("queue_byte_seconds")?,
    })
}

/// SQL columns of an hourly sum, or of a total.
macro_rules! columns {
    (hours) => {
        "hour, tickets, core_seconds::float8 AS core_seconds, byte_seconds::float8 AS byte_seconds,
            queue_core_seconds::float8 AS queue_core_seconds, queue_byte_seconds::float8 AS queue_byte_seconds"
    };
    (totals) => {
        "NULL::timestamptz AS hour, sum(tickets)::bigint AS tickets, sum(core_seconds)::float8 AS core_seconds,
            sum(byte_seconds)::float8 AS byte_seconds, sum(queue_core_seconds)::float8 AS queue_core_seconds,
            sum(queue_byte_seconds)::float8 AS queue_byte_seconds"
    };
}

/// SQL of the hour at which the scan of a name resumes after a hit: the next hour, or the next name.
macro_rules! go_on {
    (hours) => {
        "l.hour + interval '1 hour'"
    };
    (totals) => {
        "'infinity'"
    };
}

/// SQL condition that reads the sum of a hit. A separate subquery, which runs for hits only.
macro_rules! hit_condition {
    (hours) => {
        "u.hour = l.hour LIMIT 1"
    };
    (totals) => {
        "u.hour >= $2 AND u.hour < $3 HAVING count(*) > 0"
    };
}

/// SQL of the sums of all names in index order. A recursive query jumps from name to name and skips the hours outside
/// the range. A name without hours in the range returns a row without a sum.
macro_rules! of_all {
    ($columns:ident) => {
        concat!(
            "-- usage_hour::list, all, ",
            stringify!($columns),
            "
        WITH RECURSIVE looked AS (
            (SELECT is_rest, name, em_instance, hour, 1::bigint AS nth, (hour >= $2 AND hour < $3)::int::bigint AS found
            FROM linkis_resource_usage_hour
            WHERE used_by = $1 AND (is_rest, name, em_instance, hour) > ($4, $5, $6, $7)
            ORDER BY is_rest, name, em_instance, hour LIMIT 1)
            UNION ALL
            SELECT n.is_rest, n.name, n.em_instance, n.hour, l.nth + 1, l.found + (n.hour >= $2 AND n.hour < $3)::int
            FROM looked l CROSS JOIN LATERAL (
                SELECT is_rest, name, em_instance, hour FROM linkis_resource_usage_hour
                WHERE used_by = $1 AND (is_rest, name, em_instance, hour) >= (l.is_rest, l.name, l.em_instance,
                    CASE WHEN l.hour < $2 THEN $2 WHEN l.hour < $3 THEN ",
            go_on!($columns),
            " ELSE 'infinity' END)
                ORDER BY is_rest, name, em_instance, hour LIMIT 1) n
            WHERE l.nth < $9 AND l.found < $8)
        SELECT l.is_rest, l.name, l.em_instance, l.hour AS looked_hour, l.nth, l.found, s.*
        FROM looked l LEFT JOIN LATERAL (
            SELECT ",
            columns!($columns),
            "
            FROM linkis_resource_usage_hour u
            WHERE u.used_by = $1 AND u.is_rest = l.is_rest AND u.name = l.name AND u.em_instance = l.em_instance
                AND l.hour >= $2 AND l.hour < $3 AND ",
            hit_condition!($columns),
            ") s ON true
        ORDER BY l.nth"
        )
    };
}

/// SQL of the sums of given users in the same order.
macro_rules! of_users {
    ($columns:ident, $grouped:literal) => {
        concat!(
            "-- usage_hour::list, of users, ",
            stringify!($columns),
            "
        SELECT s.* FROM unnest($9::text[]) AS n (of_name) CROSS JOIN LATERAL (
            SELECT is_rest, name, em_instance, ",
            columns!($columns),
            "
            FROM linkis_resource_usage_hour
            -- Only the index by name has this order: one name may have nearly all hours.
            WHERE (used_by, is_rest, name, em_instance, hour) > ($1, false, n.of_name, '', CASE
                    WHEN (false, n.of_name COLLATE \"C\", '') > ($4, $5, $6) THEN $2 - interval '1 microsecond'
                    WHEN (false, n.of_name COLLATE \"C\", '') = ($4, $5, $6) THEN greatest($7, $2 - interval '1 microsecond')
                    ELSE 'infinity' END)
                AND (used_by, is_rest, name, em_instance, hour) < ($1, false, n.of_name, '', $3)
            ",
            $grouped,
            " LIMIT $8) s
        ORDER BY s.is_rest, s.name, s.em_instance, s.hour LIMIT $8"
        )
    };
}

/// A page of sums.
#[derive(Debug)]
pub struct UsageSumPage {
    /// Sums by name and hour; the sum of unnamed others is last.
    pub sums: Vec<UsageSum>,
    /// Key after which the next page begins, if the scan was cut off; `None` if the sums alone determine it.
    pub looked_to: Option<UsageAt>,
}

/// Returns up to `limit` sums by name and hour, after `after`. Returns fewer if the scan passes `LOOKED_AT_MAX` names,
/// or would add up more than `ADDED_UP_MAX` rows.
pub async fn list(
    executor: impl PgExecutor<'_>,
    range: &UsageRange,
    after: Option<&UsageAt>,
    limit: i64,
) -> Result<UsageSumPage, StoreError> {
    // A separate SQL text per order.
    let sql = match (range.users.is_some(), range.hourly) {
        (false, true) => of_all!(hours),
        (true, true) => of_users!(hours, "ORDER BY used_by, is_rest, name, em_instance, hour"),
        (false, false) => of_all!(totals),
        (true, false) => of_users!(
            totals,
            "GROUP BY used_by, is_rest, name, em_instance ORDER BY used_by, is_rest, name, em_instance"
        ),
    };
    let (is_rest, name, em_instance) = after.map_or((false, "", ""), |after| name_columns(&after.used_by));
    let hour = after.map_or(OffsetDateTime::UNIX_EPOCH, |after| after.hour.unwrap_or(LAST_HOUR));
    let query = sqlx::query(sql)
        .bind(range.by.as_str())
        .bind(range.from)
        .bind(range.to)
        .bind(is_rest)
        .bind(name)
        .bind(em_instance)
        .bind(hour);
    let Some(users) = &range.users else {
        let limit = limit.min(range.found_max());
        let rows = query.bind(limit).bind(LOOKED_AT_MAX).fetch_all(executor).await?;
        return range.looked(&rows, limit);
    };
    let users: Vec<_> = users.iter().map(Name::as_str).collect();
    let rows = query.bind(limit).bind(users).fetch_all(executor).await?;
    Ok(UsageSumPage { sums: TABLE.parse(&rows, sum)?, looked_to: None })
}

impl UsageRange {
    /// Returns the maximum number of sums per page.
    fn found_max(&self) -> i64 {
        let added_up = if self.hourly { 1 } else { (self.to - self.from).whole_hours().max(1) };
        (ADDED_UP_MAX / added_up).max(1)
    }

    /// Builds a page of up to `limit` sums, with the end of the scan.
    fn looked(&self, rows: &[PgRow], limit: i64) -> Result<UsageSumPage, StoreError> {
        let mut sums = Vec::with_capacity(rows.len());
        for row in rows {
            if row.try_get::<Option<i64>, _>("tickets")?.is_some() {
                sums.push(sum(TABLE.row(row))?);
            }
        }
        let Some(last) = rows.last() else { return Ok(UsageSumPage { sums, looked_to: None }) };
        let is_cut = last.try_get::<i64, _>("nth")? == LOOKED_AT_MAX || last.try_get::<i64, _>("found")? == limit;
        let hour: OffsetDateTime = last.try_get("looked_hour")?;
        let looked_to = UsageAt {
            used_by: used_by(last.try_get("is_rest")?, last.try_get("name")?, last.try_get("em_instance")?),
            // A total is complete. A name without hours in the range so far may still have later ones.
            hour: Some(hour).filter(|hour| self.hourly || *hour < self.from),
        };
        Ok(UsageSumPage { sums, looked_to: Some(looked_to).filter(|_| is_cut) })
    }
}

/// Deletes up to `limit` rows of hours older than `kept`. Returns whether more may exist.
pub async fn delete_expired(executor: impl PgExecutor<'_>, kept: Duration, limit: i64) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- usage_hour::delete_expired
        DELETE FROM linkis_resource_usage_hour WHERE ctid = ANY (ARRAY (
            SELECT ctid FROM linkis_resource_usage_hour WHERE hour < now() - make_interval(secs => $1)
            ORDER BY hour LIMIT $2))",
    )
    .bind(kept.as_secs_f64())
    .bind(limit)
    .execute(executor)
    .await?;
    Ok(i64::try_from(done.rows_affected()).is_ok_and(|rows| rows == limit))
}
