//! The parts of `linkis_resource_action_record`: each holds the history of a span of time, is made before that begins, gets indexes when it
//! is over, and is dropped as a whole when nothing in it is to be remembered any more.
//!
//! All of this is done by functions of the database that have the rights of whoever migrates: the service itself needs none to change the schema.

use std::time::Duration;

use sqlx::{Connection as _, PgConnection};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

use super::{StoreError, history_horizon, session};

/// How many parts are there before their time.
const AHEAD: i64 = 2;

/// A part's name tells from when until when, in hours of UTC.
const PREFIX: &str = "linkis_resource_action_record_";
const HOUR: &[BorrowedFormatItem<'_>] = format_description!("[year][month][day][hour]");

/// How many parts reach back as far as the history does, about: few, because a ticket's end is looked for in each; but more than
/// one, because only what is over as a whole is dropped.
const PARTS: u64 = 12;

/// By what a part that is over is indexed, besides the tickets.
const KEYS: [&str; 3] = ["user", "em", "actor"];

/// How long a part is over before that: longer than the function for it wants.
const OVER_FOR: time::Duration = time::Duration::minutes(15);

/// How long it takes to index the largest part, by far.
const INDEXING_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// See [`make_first`].
const FIRST_HISTORY: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// How long a part is: whole hours.
fn span(history: Duration) -> i64 {
    let hours = history.as_secs().div_ceil(3600 * PARTS).max(1);
    i64::try_from(hours * 3600).unwrap_or(i64::MAX)
}

/// The table that has the parts. On a worker of Citus, what is seen by its name is a view; the parts belong to what Citus knows by it.
macro_rules! parted {
    () => {
        "concat_ws('.', current_setting('linkis_rm.cell', true), 'linkis_resource_action_record')::regclass"
    };
}

/// A part that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    name: String,
    until: OffsetDateTime,
}

impl Part {
    fn new(from: OffsetDateTime, until: OffsetDateTime) -> Result<Self, StoreError> {
        let text = |at: OffsetDateTime| at.format(HOUR).map_err(|error| StoreError::inconsistent(PREFIX, error));
        Ok(Self { name: format!("{PREFIX}{}_{}", text(from)?, text(until)?), until })
    }

    fn parse(name: String) -> Option<Self> {
        let (_, until) = name.strip_prefix(PREFIX)?.split_once('_')?;
        let until = hour(until)?;
        Some(Self { name, until })
    }

    /// When it begins.
    fn begins(&self) -> Option<OffsetDateTime> {
        hour(self.name.strip_prefix(PREFIX)?.split_once('_')?.0)
    }
}

fn hour(text: &str) -> Option<OffsetDateTime> {
    let hour = format!("{text}00");
    let hour = time::PrimitiveDateTime::parse(&hour, format_description!("[year][month][day][hour][minute]"));
    Some(hour.ok()?.assume_utc())
}

async fn parts(connection: &mut PgConnection) -> Result<Vec<Part>, StoreError> {
    let names: Vec<String> = sqlx::query_scalar(concat!(
        "-- history_part::parts
        SELECT c.relname::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = ",
        parted!()
    ))
    .fetch_all(connection)
    .await?;
    Ok(names.into_iter().filter_map(Part::parse).collect())
}

/// Makes the parts for now and for what comes next.
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

/// Makes parts if there is none for now: for a command that tells of something while no service runs, or none has ever run. As long as
/// they are for a history that reaches back a week; what a service needs, it makes behind them.
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
    let part = Part::new(at(from)?, at(until)?)?;
    let made = sqlx::query(
        "-- history_part::make_one
        SELECT linkis_rm_make_history_part($1, $2)",
    );
    match made.bind(from).bind(until).execute(connection).await.map_err(StoreError::from) {
        // What was written before this part was made stays where it is, and so does all that belongs to its time.
        Err(error) if error.is_check_violation() => {
            tracing::warn!(part = part.name, "a part of the history was not made in time");
            Ok(())
        }
        // Another instance is just as early.
        Err(error) if error.is_made_already() => Ok(()),
        made => made.map(drop),
    }
}

/// Drops the first part in which nothing is younger than `history`; true if there was one.
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

/// The parts that are over for a while and lack indexes, with the keys of those, in no order.
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

/// Makes one index of the first part that is over and lacks any; true if there was one. It takes as long as the part is large, and whoever
/// writes a line that belongs there, although that time is over, waits for it.
///
/// Meanwhile the database keeps all versions of all rows: see docs/KNOWN_LIMITS.md. One made `CONCURRENTLY` would keep them, too (those that
/// did not, of PostgreSQL 14.0 to 14.3, lacked rows), for two scans instead of one; and no function of whoever migrates could make it.
pub async fn index_oldest(connection: &mut PgConnection) -> Result<bool, StoreError> {
    let over = session::clock(&mut *connection).await?.saturating_sub(OVER_FOR);
    let lacking = lacking(&mut *connection).await?.into_iter();
    let lacking =
        lacking.filter_map(|(part, key)| Some((Part::parse(part)?, key))).filter(|(part, _)| part.until <= over);
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
        // Another instance did just that.
        Err(error) if error.is_made_already() => Ok(true),
        made => made.map(|()| true),
    }
}

/// Where the parts that have all indexes end.
#[derive(Debug, Clone, Copy)]
pub struct Indexed {
    /// Lines with smaller numbers are in these parts.
    pub below: i64,
    /// The whole hour in which they end.
    pub until: OffsetDateTime,
}

/// Where the parts end that have all indexes; `None` if no part is to come, and nothing is known of them.
pub async fn indexed(connection: &mut PgConnection) -> Result<Option<Indexed>, StoreError> {
    let lacking = lacking(&mut *connection).await?.into_iter();
    let first = lacking.filter_map(|(part, _)| Part::parse(part)).filter_map(|part| part.begins()).min();
    let Some(first) = first else { return Ok(None) };
    let number: Option<i64> = sqlx::query_scalar(
        "-- history_part::indexed
        SELECT id FROM linkis_resource_action_record WHERE action_time >= $1 ORDER BY id LIMIT 1",
    )
    .bind(first)
    .fetch_optional(connection)
    .await?;
    // Nothing is in the others: their lines are behind all that there are.
    Ok(Some(Indexed { below: number.unwrap_or(i64::MAX), until: first }))
}
