//! History lines by user, EM or actor, found by the indexes of finished partitions.
//!
//! Partitions without these indexes are scanned by `matching` instead. Caller: the list of history lines.

use sqlx::{AssertSqlSafe, PgConnection};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

use rm_model::{action::ActionRecord, name::Name};

use super::{
    ActionFilter, NumberRange, TABLE,
    filter::{is_of, select_matching},
    record,
};
use crate::StoreError;

/// Whole hour in UTC, as PostgreSQL parses it.
const HOUR: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day] [hour]:00:00+00");

/// Index key of history lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ActionKey {
    /// Users of the tickets.
    Users(Vec<String>),
    /// Instance of the EM.
    Em(String),
    /// Actor.
    Actor(String),
}

impl ActionKey {
    fn names(&self) -> Vec<&str> {
        match self {
            Self::Users(users) => users.iter().map(String::as_str).collect(),
            Self::Em(name) | Self::Actor(name) => vec![name],
        }
    }
}

impl ActionFilter {
    /// Returns the index key of the filter. `None` if a scan is needed, or an index over all partitions serves (a
    /// ticket).
    pub fn key(&self) -> Option<ActionKey> {
        let of_users = || Some(ActionKey::Users(self.users.as_ref()?.iter().map(Name::to_string).collect()));
        let of_em = || Some(ActionKey::Em(self.em.as_ref()?.instance.to_string()));
        let of_actor = || Some(ActionKey::Actor(self.actor.as_ref()?.to_string()));
        match self.ticket_id {
            Some(_) => None,
            None => of_users().or_else(of_em).or_else(of_actor),
        }
    }

    /// Returns whether lines with the key may still not match the filter.
    fn is_narrower_than_its_key(&self) -> bool {
        let Self { ticket_id: _, users, em, actions, actor, from: _, to: _, objects } = self;
        let is_two = users.is_some() && actor.is_some();
        // EMs of several applications can have the same instance name.
        is_two || em.is_some() || !actions.is_empty() || (actor.is_some() && !objects)
    }
}

/// SQL of the matching lines of given names in a range of numbers, ordered by number (`$order`).
///
/// `$until` ends the partitions that have indexes. The literal lets PostgreSQL plan for these partitions alone and
/// merge their indexes. PostgreSQL would sort all lines of a name for partitions without indexes.
macro_rules! of_names {
    ($name:literal, $is_of:expr, $inner:literal, $order:literal, $until:expr) => {
        format!(
            concat!(
                "-- action_record::of_names, ",
                $name,
                "
        SELECT l.* FROM unnest($4::text[]) AS k (name) CROSS JOIN LATERAL (",
                select_matching!(concat!("action_time < '{until}' AND ", $is_of), $inner),
                ") l ORDER BY l.id ",
                $order,
                " LIMIT $3"
            ),
            until = $until
        )
    };
}

/// SQL of the last of so many line numbers of given names, matching or not.
macro_rules! numbers_of_names {
    ($name:literal, $is_of:expr, $inner:literal, $order:literal, $until:expr) => {
        format!(
            concat!(
                "-- action_record::numbers_of_names, ",
                $name,
                "
        SELECT l.id FROM unnest($4::text[]) AS k (name) CROSS JOIN LATERAL (
            SELECT id FROM linkis_resource_action_record WHERE action_time < '{until}' AND ",
                $is_of,
                " ORDER BY ",
                $inner,
                " LIMIT $3) l ORDER BY l.id ",
                $order,
                " OFFSET $3 - 1 LIMIT 1"
            ),
            until = $until
        )
    };
}

/// A separate SQL text per key, order and set of indexed partitions, so that each has its own plan.
macro_rules! by_key {
    ($macro:ident, $key:expr, $newest_first:expr, $until:expr) => {
        match ($key, $newest_first) {
            (ActionKey::Users(_), false) => {
                $macro!("users", is_of!(r#""user""#, "k.name"), r#""user" ASC, id ASC"#, "ASC", $until)
            }
            (ActionKey::Users(_), true) => {
                $macro!("users, newest first", is_of!(r#""user""#, "k.name"), r#""user" DESC, id DESC"#, "DESC", $until)
            }
            (ActionKey::Em(_), false) => {
                $macro!("an EM", is_of!("em_instance", "k.name"), "em_instance ASC, id ASC", "ASC", $until)
            }
            (ActionKey::Em(_), true) => {
                $macro!(
                    "an EM, newest first",
                    is_of!("em_instance", "k.name"),
                    "em_instance DESC, id DESC",
                    "DESC",
                    $until
                )
            }
            (ActionKey::Actor(_), false) => {
                $macro!("an actor", is_of!("actor", "k.name"), "actor ASC, id ASC", "ASC", $until)
            }
            (ActionKey::Actor(_), true) => {
                $macro!("an actor, newest first", is_of!("actor", "k.name"), "actor DESC, id DESC", "DESC", $until)
            }
        }
    };
}

/// Returns up to `limit` matching lines among `numbers`, oldest or newest first, and the numbers that were scanned.
///
/// All partitions with these numbers must have indexes and end by `until`. If the filter is narrower than its key, at
/// most `most` lines with the key are scanned.
pub async fn list_by_key(
    connection: &mut PgConnection,
    (filter, key): (&ActionFilter, &ActionKey),
    (numbers, until): (NumberRange, OffsetDateTime),
    newest_first: bool,
    (limit, most): (i64, i64),
) -> Result<(Vec<ActionRecord>, NumberRange), StoreError> {
    let names = key.names();
    let until = until.format(HOUR).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
    let mut looked = numbers;
    if filter.is_narrower_than_its_key() {
        let edge: Option<i64> = sqlx::query_scalar(AssertSqlSafe(by_key!(numbers_of_names, key, newest_first, until)))
            .bind(numbers.after)
            .bind(numbers.last)
            .bind(most)
            .bind(&names)
            .fetch_optional(&mut *connection)
            .await?;
        looked = numbers.cut_at(edge, newest_first);
    }
    let sql = AssertSqlSafe(by_key!(of_names, key, newest_first, until));
    let rows = sqlx::query(sql).bind(looked.after).bind(looked.last).bind(limit);
    let rows = filter.bind(rows.bind(&names)).fetch_all(connection).await?;
    Ok((TABLE.parse(&rows, record)?, looked))
}
