//! Tickets for people, page by page.

use std::collections::BTreeSet;

use sqlx::{FromRow as _, PgExecutor, Row as _};
use uuid::Uuid;

use crate::domain::{
    em::EmInstance,
    name::Name,
    ticket::{EngineInstance, Ticket},
};
use crate::store::StoreError;

use super::TicketRow;

/// Which tickets to list.
#[derive(Debug, Default)]
pub struct Filter {
    /// Only those on this EM.
    pub em: Option<EmInstance>,
    /// Only those of these users.
    pub users: Option<BTreeSet<Name>>,
    /// Whether whoever asks may know of those users' tickets alone: then a page never ends at a ticket of somebody else.
    pub is_bound: bool,
    /// Only locked (true) or used (false) ones.
    pub locked: Option<bool>,
    /// Only those that this engine uses.
    pub engine: Option<EngineInstance>,
}

/// A page of tickets.
#[derive(Debug)]
pub struct Page {
    /// Those that match, oldest first.
    pub tickets: Vec<Ticket>,
    /// The ticket behind which the next page begins; `None` if nothing follows.
    pub next: Option<Uuid>,
}

/// How many tickets a page looks through if an index answers only one of the filters: of those that match the others it may show few.
const SCANNED_MAX: i64 = 1000;

/// The tickets of one, from behind a ticket, in the order of the only index that can find them: PostgreSQL drops from an order what equals a
/// value, and would then walk all tickets in the order of their ids where one EM, user or engine has nearly all.
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

/// A page, read along the index that answers `$condition`: $1 from behind which ticket, $2 how many are looked through, $3 whether
/// locked, $4 whose, $5 how many are shown; $6 and $7 are the EM, $8 and $9 the engine. Of those that are looked through, all are left
/// out that do not match the rest.
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
                    user_used_resource::text, labels::text, locked_time, used_time, expires_at, principal, em_epoch
                FROM looked
                WHERE ($3::bool IS NULL OR (expires_at IS NOT NULL) = $3) AND ($4::text[] IS NULL OR "user" = ANY ($4))
                    AND ($6::text IS NULL OR (em_application_name = $6 AND em_instance = $7))
                    AND ($8::text IS NULL OR (engine_application_name = $8 AND engine_instance = $9))
                ORDER BY ticket_id LIMIT $5) p ON true"#
        )
    };
}

impl Filter {
    /// The text that is planned for the index that answers most of the filter, and whether it answers all of it.
    fn page(&self) -> (&'static str, bool) {
        let Self { em, users, locked, engine, is_bound } = self;
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
            (false, false, Some(true)) => (page!("locked", "expires_at IS NOT NULL"), true),
            (false, false, Some(false)) => (page!("used", "used_time IS NOT NULL"), true),
            (false, false, None) => (page!("all", "true"), true),
        }
    }
}

/// The first of each user's, and of these the first.
const BY_USERS: &str = page!(
    looked: "by users",
    concat!(
        "SELECT t.* FROM unnest($4::text[]) AS u (name) CROSS JOIN LATERAL (",
        of_one!(r#""user""#, "u.name", r#""user""#),
        ") t ORDER BY t.ticket_id LIMIT $2"
    )
);

/// A page of up to `limit` tickets, oldest first, from behind the ticket `after` (nil for the first). Where no index answers all of the
/// filter it may be short, or empty, although more follow.
pub async fn list(executor: impl PgExecutor<'_>, filter: &Filter, after: Uuid, limit: i64) -> Result<Page, StoreError> {
    let (sql, is_answered) = filter.page();
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
        .bind(engine.map(|(_, instance)| instance));
    let rows = query.fetch_all(executor).await?;
    let mut tickets = Vec::with_capacity(rows.len());
    let mut next = None;
    for row in &rows {
        next = row.try_get("last")?;
        if row.try_get::<Option<Uuid>, _>("ticket_id")?.is_some() {
            tickets.push(Ticket::try_from(TicketRow::from_row(row)?)?);
        }
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if tickets.len() > limit {
        tickets.truncate(limit);
        next = tickets.last().map(|ticket| ticket.id);
    }
    Ok(Page { tickets, next })
}
