//! Partitions of `linkis_resource_action_record`, one per time range. A partition is created before it begins, gets
//! indexes after it ends, and is dropped as a whole after the retention.
//!
//! Database functions with the rights of the migrating role do all of this, so the serving role needs no right to
//! change the schema. Callers: the start of an instance, and the retention and indexing tasks.

use std::time::Duration;

use async_recursion::async_recursion as boxed;
use sqlx::{Connection as _, PgConnection};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

use super::{StoreError, history_horizon, session};

/// Number of partitions that are created in advance.
const AHEAD: i64 = 2;

/// Partition names end in start and end of their range, in hours of UTC.
const PREFIX: &str = "linkis_resource_action_record_";
const HOUR: &[BorrowedFormatItem<'_>] = format_description!("[year][month][day][hour]");

/// Approximate number of partitions within the retention. Few, because the look-up of a ticket's end searches each;
/// more than one, because only whole partitions are dropped.
const PARTS: u64 = 12;

/// Index keys of a finished partition, besides the ticket.
const KEYS: [&str; 3] = ["user", "em", "actor"];

/// Delay after the end of a partition before it is indexed. Longer than the minimum that the database function accepts.
const OVER_FOR: time::Duration = time::Duration::minutes(15);

/// Timeout of indexing a partition: far above the time for the largest one.
const INDEXING_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Retention that [`make_first`] assumes.
const FIRST_HISTORY: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Returns the length of a partition in seconds; whole hours.
fn span(history: Duration) -> i64 {
    let hours = history.as_secs().div_ceil(3600 * PARTS).max(1);
    i64::try_from(hours * 3600).unwrap_or(i64::MAX)
}

/// SQL of the partitioned table. The plain name is a view on a worker of Citus; the partitions belong to the cell's
/// table.
macro_rules! parted {
    () => {
        "concat_ws('.', current_setting('linkis_rm.cell', true), 'linkis_resource_action_record')::regclass"
    };
}

/// An existing partition.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HistoryPart {
    name: String,
    until: OffsetDateTime,
}

impl HistoryPart {
    fn new(from: OffsetDateTime, until: OffsetDateTime) -> Result<Self, StoreError> {
        let text = |at: OffsetDateTime| at.format(HOUR).map_err(|error| StoreError::inconsistent(PREFIX, error));
        Ok(Self { name: format!("{PREFIX}{}_{}", text(from)?, text(until)?), until })
    }

    fn parse(name: String) -> Option<Self> {
        let (_, until) = name.strip_prefix(PREFIX)?.split_once('_')?;
        let until = hour(until)?;
        Some(Self { name, until })
    }

    /// Returns the start of the range.
    fn begins(&self) -> Option<OffsetDateTime> {
        hour(self.name.strip_prefix(PREFIX)?.split_once('_')?.0)
    }
}

fn hour(text: &str) -> Option<OffsetDateTime> {
    let hour = format!("{text}00");
    let hour = time::PrimitiveDateTime::parse(&hour, format_description!("[year][month][day][hour][minute]"));
    Some(hour.ok()?.assume_utc())
}

async fn parts(connection: &mut PgConnection) -> Result<Vec<HistoryPart>, StoreError> {
    let names: Vec<String> = sqlx::query_scalar(concat!(
        "-- history_part::parts
        SELECT c.relname::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = ",
        parted!()
    ))
    .fetch_all(connection)
    .await?;
    Ok(names.into_iter().filter_map(HistoryPart::parse).collect())
}

/// Creates the partitions for now and the near future.
pub async fn make(connection: &mut PgConnection, history: Duration) -> Result<(), StoreError> {
    let now = session::clock(&mut *connection).await?;
    let span = span(history);
    let last = parts(&mut *connection).await?.into_iter().map(|part| part.until.unix_timestamp()).max();
    let now = now.unix_timestamp();
    let mut from = (now - now.rem_euclid(span)).max(last.unwrap_or(i64::MIN));
    while from < now + AHEAD * span {
        let until = from - from.rem_euclid(span) + span;
        make_one(&mut *connection, from, until).await?;
        from = until;
    }
    Ok(())
}

/// Creates partitions if there is none for now, for a command that writes history while no service runs. The length
/// suits a retention of a week; a service later creates its own partitions after these.
#[boxed]
pub async fn make_first(connection: &mut PgConnection) -> Result<(), StoreError> {
    let now = session::clock(&mut *connection).await?;
    match parts(&mut *connection).await?.iter().any(|part| part.until > now) {
        true => Ok(()),
        false => make(connection, FIRST_HISTORY).await,
    }
}

async fn make_one(connection: &mut PgConnection, from: i64, until: i64) -> Result<(), StoreError> {
    let at =
        |second| OffsetDateTime::from_unix_timestamp(second).map_err(|error| StoreError::inconsistent(PREFIX, error));
    let part = HistoryPart::new(at(from)?, at(until)?)?;
    let made = sqlx::query(
        "-- history_part::make_one
        SELECT linkis_rm_make_history_part($1, $2)",
    );
    match made.bind(from).bind(until).execute(connection).await.map_err(StoreError::from) {
        // Lines written before this partition was created stay outside it, and so do all later lines of its time range.
        Err(error) if error.is_check_violation() => {
            tracing::warn!(part = part.name, "a partition of the history was not created in time");
            Ok(())
        }
        // Another instance created it at the same time.
        Err(error) if error.is_made_already() => Ok(()),
        made => made.map(drop),
    }
}

/// Drops the oldest partition whose lines are all older than `history`. Returns whether there was one.
pub async fn drop_oldest(connection: &mut PgConnection, history: Duration) -> Result<bool, StoreError> {
    let now = session::clock(&mut *connection).await?;
    let over = now.saturating_sub(time::Duration::try_from(history).unwrap_or(time::Duration::MAX));
    let oldest =
        parts(&mut *connection).await?.into_iter().filter(|part| part.until <= over).min_by_key(|part| part.until);
    let Some(part) = oldest else { return Ok(false) };
    let mut transaction = connection.begin().await?;
    history_horizon::raise(&mut *transaction, part.until).await?;
    let dropped = sqlx::query(
        "-- history_part::drop_oldest
        SELECT linkis_rm_drop_history_part($1)",
    );
    dropped.bind(part.name).execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(true)
}

/// Returns the finished partitions without all indexes, each with a missing index key, in no order.
async fn lacking(connection: &mut PgConnection) -> Result<Vec<(String, String)>, StoreError> {
    Ok(sqlx::query_as(concat!(
        "-- history_part::lacking
        SELECT c.relname::text, k.key FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid CROSS JOIN unnest($1::text[]) AS k (key)
        WHERE i.inhparent = ",
        parted!(),
        " AND NOT EXISTS (
            SELECT FROM pg_index x JOIN pg_class n ON n.oid = x.indexrelid
            WHERE x.indrelid = c.oid AND x.indisvalid AND n.relname = c.relname || '_' || k.key)",
    ))
    .bind(&KEYS[..])
    .fetch_all(connection)
    .await?)
}

/// Creates one missing index of the oldest finished partition. Returns whether one was missing.
///
/// The duration grows with the partition, and a late line of that time range waits for it. Meanwhile PostgreSQL keeps
/// all versions of all rows: see docs/KNOWN_LIMITS.md. `CONCURRENTLY` would keep them, too, for two scans instead of
/// one. (PostgreSQL 14.0 to 14.3 did not keep them, and lost rows.) A database function could not run it, either.
pub async fn index_oldest(connection: &mut PgConnection) -> Result<bool, StoreError> {
    let over = session::clock(&mut *connection).await?.saturating_sub(OVER_FOR);
    let lacking = lacking(&mut *connection).await?.into_iter();
    let lacking =
        lacking.filter_map(|(part, key)| Some((HistoryPart::parse(part)?, key))).filter(|(part, _)| part.until <= over);
    let Some((part, key)) = lacking.min_by_key(|(part, _)| part.until) else { return Ok(false) };
    let indexing = async {
        let mut transaction = connection.begin().await?;
        session::for_as_long_as(&mut transaction, INDEXING_TIMEOUT).await?;
        let made = sqlx::query(
            "-- history_part::index_oldest
            SELECT linkis_rm_index_history_part($1, $2)",
        );
        made.bind(&part.name).bind(&key).execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok::<_, StoreError>(())
    };
    match session::answered_within(INDEXING_TIMEOUT, indexing).await {
        // Another instance created the index at the same time.
        Err(error) if error.is_made_already() => Ok(true),
        made => made.map(|()| true),
    }
}

/// End of the partitions that have all indexes.
#[derive(Debug, Clone, Copy)]
pub struct IndexedRange {
    /// Lines with smaller numbers are in these partitions.
    pub below: i64,
    /// End of their range; a whole hour.
    pub until: OffsetDateTime,
}

/// Returns the end of the partitions that have all indexes; `None` if there is no later partition to derive it from.
pub async fn indexed(connection: &mut PgConnection) -> Result<Option<IndexedRange>, StoreError> {
    let lacking = lacking(&mut *connection).await?.into_iter();
    let first = lacking.filter_map(|(part, _)| HistoryPart::parse(part)).filter_map(|part| part.begins()).min();
    let Some(first) = first else { return Ok(None) };
    let number: Option<i64> = sqlx::query_scalar(
        "-- history_part::indexed
        SELECT id FROM linkis_resource_action_record WHERE action_time >= $1 ORDER BY id LIMIT 1",
    )
    .bind(first)
    .fetch_optional(connection)
    .await?;
    // Later partitions are empty: all existing lines precede them.
    Ok(Some(IndexedRange { below: number.unwrap_or(i64::MAX), until: first }))
}
