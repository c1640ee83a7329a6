//! The parts of `linkis_resource_action_record`: each holds the history of a span of time, is made before that begins, and is dropped
//! as a whole when nothing in it is to be remembered any more.
//!
//! Both are done by functions of the database that have the rights of whoever migrates: the service itself needs none to change the schema.

use std::time::Duration;

use sqlx::PgConnection;
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

use super::{StoreError, session};

/// How many parts are there before their time.
const AHEAD: i64 = 2;

/// A part's name tells from when until when, in hours of UTC.
const PREFIX: &str = "linkis_resource_action_record_";
const HOUR: &[BorrowedFormatItem<'_>] = format_description!("[year][month][day][hour]");

/// How many parts reach back as far as the history does, about: few, because a ticket's end is looked for in each; but more than
/// one, because only what is over as a whole is dropped.
const PARTS: u64 = 12;

/// See [`make_first`].
const FIRST_HISTORY: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// How long a part is: whole hours.
fn span(history: Duration) -> i64 {
    let hours = history.as_secs().div_ceil(3600 * PARTS).max(1);
    i64::try_from(hours * 3600).unwrap_or(i64::MAX)
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
        let until = time::PrimitiveDateTime::parse(
            &format!("{until}00"),
            format_description!("[year][month][day][hour][minute]"),
        )
        .ok()?;
        Some(Self { name, until: until.assume_utc() })
    }
}

async fn parts(connection: &mut PgConnection) -> Result<Vec<Part>, StoreError> {
    let names: Vec<String> = sqlx::query_scalar(
        "-- history_part::parts
        SELECT c.relname::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'linkis_resource_action_record'::regclass",
    )
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
    let dropped = sqlx::query(
        "-- history_part::drop_oldest
        SELECT linkis_rm_drop_history_part($1)",
    );
    dropped.bind(part.name).execute(connection).await?;
    Ok(true)
}
