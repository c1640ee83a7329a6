//! History lines by filter: a scan of a range of line numbers, in pages.
//!
//! A call scans the whole range that its caller gives, so the caller bounds the range ([`cut`]). Callers: `by_key`, and the
//! search of `rm_service::usage`.

use std::collections::BTreeSet;

use sqlx::{PgExecutor, Postgres, postgres::PgArguments, query::Query};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{action::ActionRecord, em::EmInstance, name::Name};

use crate::StoreError;

use super::{TABLE, row::record};

/// Filter of history lines. Empty fields match every line.
#[derive(Debug, Clone, Default)]
pub struct ActionFilter {
    /// Ticket to match.
    pub ticket_id: Option<Uuid>,
    /// Users whose tickets match.
    pub users: Option<BTreeSet<Name>>,
    /// EM to match, with the tickets on it.
    pub em: Option<EmInstance>,
    /// Actions to match; empty for all.
    pub actions: BTreeSet<&'static str>,
    /// Actor to match.
    pub actor: Option<Name>,
    /// Earliest time, inclusive.
    pub from: Option<OffsetDateTime>,
    /// Latest time, exclusive.
    pub to: Option<OffsetDateTime>,
    /// Whether to include changes of tokens and providers, which only administrators may see.
    pub objects: bool,
}

impl ActionFilter {
    /// Returns whether the filter has no condition besides the ticket.
    pub fn is_of_ticket_alone(&self) -> bool {
        let Self { ticket_id, users, em, actions, actor, from, to, objects } = self;
        let leaves_out = !objects && ticket_id.is_none();
        !leaves_out
            && users.is_none()
            && em.is_none()
            && actions.is_empty()
            && actor.is_none()
            && from.is_none()
            && to.is_none()
    }
}

/// Range of line numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumberRange {
    /// Number before the first of the range.
    pub after: i64,
    /// Last number of the range.
    pub last: i64,
}

/// SQL of the lines in a range that match the filter and the condition `$of`, in the order `$order`.
macro_rules! select_matching {
    ($of:expr, $order:expr) => {
        concat!(
            r#"SELECT id, action, ticket_id, "user", em_application_name, em_instance, scope::text, resource_type, resource::text,
            actor, action_time, limit_mode, reason, object, address, before, after, creator, engine_type, labels::text,
            engine_application_name, engine_instance
        FROM linkis_resource_action_record WHERE "#,
            $of,
            r#" AND id > $1 AND id <= $2 AND ($5::text[] IS NULL OR "user" = ANY ($5))
            AND ($6::text IS NULL OR (em_application_name = $6 AND em_instance = $7))
            AND (cardinality($8::text[]) = 0 OR action = ANY ($8)) AND ($9::text IS NULL OR actor = $9)
            AND ($10::timestamptz IS NULL OR action_time >= $10) AND ($11::timestamptz IS NULL OR action_time < $11)
            AND ($12 OR object IS NULL)
        ORDER BY "#,
            $order,
            " LIMIT $3"
        )
    };
}
pub(super) use select_matching;

/// SQL condition of lines with `$value` in `$column` in a range, as a span of the index over both. Ordered by both
/// columns, only that index serves. Otherwise PostgreSQL would scan by number, also where one value has nearly all
/// lines.
macro_rules! is_of {
    ($column:literal, $value:literal) => {
        concat!(
            "(",
            $column,
            ", id) > (",
            $value,
            ", $1) AND (",
            $column,
            ", id) <= (",
            $value,
            ", $2) AND ",
            $column,
            " IS NOT NULL"
        )
    };
}
pub(super) use is_of;

macro_rules! matching {
    ($name:literal, $of:expr, $order:literal) => {
        concat!("-- action_record::list_matching, ", $name, "\n        ", select_matching!($of, $order))
    };
}

impl ActionFilter {
    /// Binds the filter as parameters 5 and later.
    pub(super) fn bind<'q>(&'q self, query: Query<'q, Postgres, PgArguments>) -> Query<'q, Postgres, PgArguments> {
        let em = self.em.as_ref();
        query
            .bind(self.users.as_ref().map(|users| users.iter().map(Name::as_str).collect::<Vec<_>>()))
            .bind(em.map(|em| em.application_name.as_str()))
            .bind(em.map(|em| em.instance.as_str()))
            .bind(self.actions.iter().copied().collect::<Vec<_>>())
            .bind(self.actor.as_ref().map(Name::as_str))
            .bind(self.from)
            .bind(self.to)
            .bind(self.objects)
    }
}

/// Returns up to `limit` matching lines among `numbers`, oldest or newest first. Scans all of the numbers, except with
/// a ticket, which has an index.
pub async fn list_matching(
    executor: impl PgExecutor<'_>,
    filter: &ActionFilter,
    numbers: NumberRange,
    newest_first: bool,
    limit: i64,
) -> Result<Vec<ActionRecord>, StoreError> {
    // A separate SQL text per index.
    let sql = match (filter.ticket_id.is_some(), newest_first) {
        (true, false) => matching!("of a ticket", is_of!("ticket_id", "$4"), "ticket_id ASC, id ASC"),
        (true, true) => matching!("of a ticket, newest first", is_of!("ticket_id", "$4"), "ticket_id DESC, id DESC"),
        (false, false) => matching!("all", "$4::uuid IS NULL", "id ASC"),
        (false, true) => matching!("all, newest first", "$4::uuid IS NULL", "id DESC"),
    };
    let rows = sqlx::query(sql).bind(numbers.after).bind(numbers.last).bind(limit).bind(filter.ticket_id);
    let rows = filter.bind(rows).fetch_all(executor).await?;
    TABLE.parse(&rows, record)
}

impl NumberRange {
    /// Returns the range up to `edge`, from its start or its end; the whole range if `edge` is `None`.
    pub(super) fn cut_at(self, edge: Option<i64>, newest_first: bool) -> Self {
        match (edge, newest_first) {
            (None, _) => self,
            (Some(edge), false) => Self { last: edge, ..self },
            (Some(edge), true) => Self { after: edge - 1, ..self },
        }
    }
}

/// Returns the part of the range that contains `many` lines, from its start or its end; the whole range if it has
/// fewer.
pub async fn cut(
    executor: impl PgExecutor<'_>,
    numbers: NumberRange,
    newest_first: bool,
    many: i64,
) -> Result<NumberRange, StoreError> {
    let sql = if newest_first {
        "-- action_record::cut, newest first
        SELECT id FROM linkis_resource_action_record WHERE id > $1 AND id <= $2 ORDER BY id DESC OFFSET $3 - 1 LIMIT 1"
    } else {
        "-- action_record::cut
        SELECT id FROM linkis_resource_action_record WHERE id > $1 AND id <= $2 ORDER BY id OFFSET $3 - 1 LIMIT 1"
    };
    let edge: Option<i64> =
        sqlx::query_scalar(sql).bind(numbers.after).bind(numbers.last).bind(many).fetch_optional(executor).await?;
    Ok(numbers.cut_at(edge, newest_first))
}

/// Returns the number before the first line of `time` or later, approximately for lines of nearly the same time. Binary
/// search, because line numbers ascend with time.
pub async fn number_before(executor: impl PgExecutor<'_>, time: OffsetDateTime) -> Result<i64, StoreError> {
    let number = sqlx::query_scalar(
        "-- action_record::number_before
        WITH RECURSIVE search (low, high) AS (
            SELECT coalesce((SELECT id FROM linkis_resource_action_record ORDER BY id LIMIT 1), 1),
                coalesce((SELECT id FROM linkis_resource_action_record ORDER BY id DESC LIMIT 1), 0) + 1
            UNION ALL
            SELECT CASE WHEN f.id IS NOT NULL THEN f.id + 1 ELSE s.low END,
                CASE WHEN f.id IS NOT NULL THEN s.high ELSE s.middle END
            FROM (SELECT low, high, (low + high) / 2 AS middle FROM search WHERE low < high) s
            LEFT JOIN LATERAL (
                SELECT id FROM (
                    SELECT id, action_time FROM linkis_resource_action_record WHERE id >= s.middle ORDER BY id LIMIT 1) first
                WHERE first.action_time < $1) f ON true)
        SELECT min(low) - 1 FROM search WHERE low >= high",
    )
    .bind(time)
    .fetch_one(executor)
    .await?;
    Ok(number)
}
