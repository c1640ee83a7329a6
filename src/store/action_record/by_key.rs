//! Lines of the history by whose they are: found by an index where there is one, in parts of the history that are over.

use sqlx::PgConnection;

use crate::domain::{action::ActionRecord, name::Name};

use super::{ActionRow, Filter, Numbers};
use crate::store::StoreError;

/// By what lines are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// By the users to whose tickets something was done.
    Users(Vec<String>),
    /// By the EM.
    Em(String),
    /// By who did it.
    Actor(String),
}

impl Key {
    fn names(&self) -> Vec<&str> {
        match self {
            Self::Users(users) => users.iter().map(String::as_str).collect(),
            Self::Em(name) | Self::Actor(name) => vec![name],
        }
    }
}

impl Filter {
    /// By what its lines are found; `None` if they have to be looked through, or an index of all parts finds them.
    pub fn key(&self) -> Option<Key> {
        let of_users = || Some(Key::Users(self.users.as_ref()?.iter().map(Name::to_string).collect()));
        let of_em = || Some(Key::Em(self.em.as_ref()?.instance.to_string()));
        let of_actor = || Some(Key::Actor(self.actor.as_ref()?.to_string()));
        match self.ticket_id {
            Some(_) => None,
            None => of_users().or_else(of_em).or_else(of_actor),
        }
    }

    /// Whether lines may not match that are found by its key.
    fn is_narrower_than_its_key(&self) -> bool {
        let Self { ticket_id: _, users, em, actions, actor, from: _, to: _, objects } = self;
        let is_two = users.is_some() && actor.is_some();
        // Of two EMs of one name, the application tells which.
        is_two || em.is_some() || !actions.is_empty() || (actor.is_some() && !objects)
    }
}

/// Lines of an actor, as a span of the index by actor and number, in whose order they are read: where one has done nearly everything, the
/// lines of another, who is rare, would be looked through by their numbers otherwise.
macro_rules! is_of_actor {
    () => {
        "(actor, id) > (k.name, $1) AND (actor, id) <= (k.name, $2) AND actor IS NOT NULL"
    };
}

/// Lines of each of these names among these numbers that match, `$order` by number.
macro_rules! of_names {
    ($name:literal, $is_of:expr, $inner:literal, $order:literal) => {
        concat!(
            "-- action_record::of_names, ",
            $name,
            "
        SELECT l.* FROM unnest($4::text[]) AS k (name) CROSS JOIN LATERAL (",
            $crate::store::action_record::matching::select_matching!($is_of, $inner),
            ") l ORDER BY l.id ",
            $order,
            " LIMIT $3"
        )
    };
}

/// The numbers of such lines, whether they match or not: the last of so many.
macro_rules! numbers_of_names {
    ($name:literal, $is_of:expr, $inner:literal, $order:literal) => {
        concat!(
            "-- action_record::numbers_of_names, ",
            $name,
            "
        SELECT l.id FROM unnest($4::text[]) AS k (name) CROSS JOIN LATERAL (
            SELECT id FROM linkis_resource_action_record WHERE ",
            $is_of,
            " AND id > $1 AND id <= $2 ORDER BY ",
            $inner,
            " LIMIT $3) l ORDER BY l.id ",
            $order,
            " OFFSET $3 - 1 LIMIT 1"
        )
    };
}

/// One text for each key and order, so that each is planned for its own index.
macro_rules! by_key {
    ($macro:ident, $key:expr, $newest_first:expr) => {
        match ($key, $newest_first) {
            (Key::Users(_), false) => $macro!("users", r#""user" = k.name"#, "id ASC", "ASC"),
            (Key::Users(_), true) => $macro!("users, newest first", r#""user" = k.name"#, "id DESC", "DESC"),
            (Key::Em(_), false) => $macro!("an EM", "em_instance = k.name", "id ASC", "ASC"),
            (Key::Em(_), true) => $macro!("an EM, newest first", "em_instance = k.name", "id DESC", "DESC"),
            (Key::Actor(_), false) => $macro!("an actor", is_of_actor!(), "actor ASC, id ASC", "ASC"),
            (Key::Actor(_), true) => {
                $macro!("an actor, newest first", is_of_actor!(), "actor DESC, id DESC", "DESC")
            }
        }
    };
}

/// Up to `limit` records among these numbers, all of them in parts that have indexes, that match, oldest first or newest first; and which of
/// the numbers were looked at: all of them, unless more than `most` lines have the key and not all of those need match.
pub async fn list_by_key(
    connection: &mut PgConnection,
    (filter, key): (&Filter, &Key),
    numbers: Numbers,
    newest_first: bool,
    (limit, most): (i64, i64),
) -> Result<(Vec<ActionRecord>, Numbers), StoreError> {
    let names = key.names();
    let mut looked = numbers;
    if filter.is_narrower_than_its_key() {
        let edge: Option<i64> = sqlx::query_scalar(by_key!(numbers_of_names, key, newest_first))
            .bind(numbers.after)
            .bind(numbers.last)
            .bind(most)
            .bind(&names)
            .fetch_optional(&mut *connection)
            .await?;
        looked = numbers.cut_at(edge, newest_first);
    }
    let rows = sqlx::query_as(by_key!(of_names, key, newest_first)).bind(looked.after).bind(looked.last).bind(limit);
    let rows: Vec<ActionRow> = filter.bind(rows.bind(&names)).fetch_all(connection).await?;
    let lines = rows.into_iter().map(ActionRecord::try_from).collect::<Result<_, _>>()?;
    Ok((lines, looked))
}
