//! Pages of tickets for operators and users, oldest first. A page scans a bounded number of tickets, so it may be short.
//!
//! Caller: `rm_service::usage`.

use std::{collections::BTreeSet, time::Duration};

use sqlx::{PgExecutor, Row as _};
use uuid::Uuid;

use crate::StoreError;
use rm_model::{
    em::EmInstance,
    name::Name,
    ticket::{EngineInstance, Ticket},
};

use super::{TABLE, ticket};

/// Filter of a list of tickets. Empty fields match every ticket.
#[derive(Debug, Default)]
pub struct TicketFilter {
    /// EM to match.
    pub em: Option<EmInstance>,
    /// Users to match.
    pub users: Option<BTreeSet<Name>>,
    /// Whether the caller may see only the tickets of `users`. A page then never ends at another user's ticket.
    pub is_bound: bool,
    /// True for locked tickets only; false for used tickets only.
    pub locked: Option<bool>,
    /// Engine that uses the ticket.
    pub engine: Option<EngineInstance>,
    /// Minimum time for which the engine has been idle.
    pub idle_for: Option<Duration>,
}

/// A page of tickets.
#[derive(Debug)]
pub struct TicketListPage {
    /// Matching tickets, oldest first.
    pub tickets: Vec<Ticket>,
    /// Ticket after which the next page begins; `None` on the last page.
    pub next: Option<Uuid>,
}

/// Maximum of an idle time, in seconds: longer than any, and within PostgreSQL's range of times.
const IDLE_SECONDS_MAX: f64 = 1e9;

/// Maximum number of tickets that a page scans if an index covers only one of the filters. The page may then be short.
const SCANNED_MAX: i64 = 1000;

/// Tickets with one value (EM, user or engine) after a ticket, in the order of the only index that serves the query.
/// PostgreSQL drops a column that equals a value from an order. PostgreSQL would then scan all tickets in the order of
/// their ids where one value has nearly all.
macro_rules! of_one {
    ($columns:literal, $values:literal, $last:literal) => {
        concat!(
            "SELECT * FROM linkis_user_resource_meta_data WHERE (",
            $columns,
            ", ticket_id) > (",
            $values,
            ", $1) AND (",
            $columns,
            ", ticket_id) <= (",
            $values,
            ", 'ffffffff-ffff-ffff-ffff-ffffffffffff') AND ",
            $last,
            " IS NOT NULL ORDER BY ",
            $columns,
            ", ticket_id LIMIT $2"
        )
    };
}

/// SQL of a page, read along the index that covers `$condition`. Parameters: $1 last ticket of the previous page, $2
/// maximum of scanned tickets, $3 locked, $4 users, $5 maximum of returned tickets, $6 and $7 EM, $8 and $9 engine, $10 idle time.
/// Scanned tickets that do not match the other filters are omitted.
macro_rules! page {
    ($name:literal, $condition:literal) => {
        page!(
            looked: $name,
            concat!(
                "SELECT * FROM linkis_user_resource_meta_data WHERE ticket_id > $1 AND ",
                $condition,
                " ORDER BY ticket_id LIMIT $2"
            )
        )
    };
    (looked: $name:literal, $looked:expr) => {
        concat!(
            "-- user_resource::list, ",
            $name,
            r#"
            WITH looked AS MATERIALIZED ("#,
            $looked,
            r#")
            SELECT l.last, p.* FROM (
                SELECT (SELECT ticket_id FROM looked ORDER BY ticket_id OFFSET $2 - 1 LIMIT 1) AS last) l
            LEFT JOIN LATERAL (
                SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance,
                    engine_application_name, engine_instance, resource_type, user_locked_resource::text,
                    user_used_resource::text, labels::text, locked_time, used_time, expires_at, principal, em_epoch, idle_since
                FROM looked
                WHERE ($3::bool IS NULL OR (expires_at IS NOT NULL) = $3) AND ($4::text[] IS NULL OR "user" = ANY ($4))
                    AND ($6::text IS NULL OR (em_application_name = $6 AND em_instance = $7))
                    AND ($8::text IS NULL OR (engine_application_name = $8 AND engine_instance = $9))
                    AND ($10::float8 IS NULL OR idle_since <= clock_timestamp() - make_interval(secs => $10))
                ORDER BY ticket_id LIMIT $5) p ON true"#
        )
    };
}

impl TicketFilter {
    /// Returns the SQL for the index that covers most of the filter, and whether the index covers all of it.
    fn page(&self) -> (&'static str, bool) {
        let Self { em, users, locked, engine, is_bound, idle_for } = self;
        let is_whole = |rest: [bool; 3]| rest == [false; 3];
        let (em_too, user_too, engine_too) = (em.is_some(), users.is_some(), engine.is_some());
        if users.as_ref().is_some_and(|users| *is_bound || users.len() != 1) {
            return (BY_USERS, is_whole([em_too, locked.is_some(), engine_too]));
        }
        if engine_too {
            let sql = page!(looked: "by engine", of_one!("engine_application_name, engine_instance", "$8, $9", "engine_instance"));
            return (sql, is_whole([em_too, user_too, locked.is_some()]));
        }
        match (em_too, user_too, locked) {
            (true, ..) => {
                let sql = page!(looked: "by EM", of_one!("em_application_name, em_instance", "$6, $7", "em_instance"));
                (sql, !user_too && locked.is_none())
            }
            (false, true, _) => {
                let sql = page!(looked: "by user", of_one!(r#""user""#, "($4::text[])[1]", r#""user""#));
                (sql, locked.is_none())
            }
            (false, false, _) if idle_for.is_some() => (page!("idle", "idle_since IS NOT NULL"), false),
            (false, false, Some(true)) => (page!("locked", "expires_at IS NOT NULL"), true),
            (false, false, Some(false)) => (page!("used", "used_time IS NOT NULL"), true),
            (false, false, None) => (page!("all", "true"), true),
        }
    }
}

/// Merges the first tickets of each user and returns the first of these.
const BY_USERS: &str = page!(
    looked: "by users",
    concat!(
        "SELECT t.* FROM unnest($4::text[]) AS u (name) CROSS JOIN LATERAL (",
        of_one!(r#""user""#, "u.name", r#""user""#),
        ") t ORDER BY t.ticket_id LIMIT $2"
    )
);

/// Returns a page of up to `limit` tickets, oldest first, after the ticket `after` (nil for the first page). A page may
/// be short or empty although tickets follow, if no index covers the whole filter.
pub async fn list(
    executor: impl PgExecutor<'_>,
    filter: &TicketFilter,
    after: Uuid,
    limit: i64,
) -> Result<TicketListPage, StoreError> {
    let (sql, is_answered) = filter.page();
    let is_answered = is_answered && filter.idle_for.is_none();
    let shown = limit.saturating_add(1);
    let em = filter.em.as_ref().map(|em| (em.application_name.as_str(), em.instance.as_str()));
    let engine = filter.engine.as_ref();
    let engine = engine.map(|engine| (engine.application_name.as_str(), engine.instance.as_str()));
    let query = sqlx::query(sql)
        .bind(after)
        .bind(if is_answered { shown } else { shown.max(SCANNED_MAX) })
        .bind(filter.locked)
        .bind(filter.users.as_ref().map(|users| users.iter().map(Name::as_str).collect::<Vec<_>>()))
        .bind(shown)
        .bind(em.map(|(application_name, _)| application_name))
        .bind(em.map(|(_, instance)| instance))
        .bind(engine.map(|(application_name, _)| application_name))
        .bind(engine.map(|(_, instance)| instance))
        .bind(filter.idle_for.map(|idle_for| idle_for.as_secs_f64().min(IDLE_SECONDS_MAX)));
    let rows = query.fetch_all(executor).await?;
    let mut tickets = Vec::with_capacity(rows.len());
    let mut next = None;
    for row in &rows {
        next = row.try_get("last")?;
        if row.try_get::<Option<Uuid>, _>("ticket_id")?.is_some() {
            tickets.push(ticket(TABLE.row(row))?);
        }
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if tickets.len() > limit {
        tickets.truncate(limit);
        next = tickets.last().map(|ticket| ticket.id);
    }
    Ok(TicketListPage { tickets, next })
}
