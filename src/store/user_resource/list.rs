//! Tickets for people, page by page.

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
    /// Only those of this user.
    pub user: Option<Name>,
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

/// A page, read along the index that answers `$condition`: $1 from behind which ticket, $2 how many are looked through, $3 whether
/// locked, $4 whose, $5 how many are shown; $6 and $7 are the condition's own. Of those that are looked through, all are left out
/// that `$rest` is not true of, which may name more.
macro_rules! page {
    ($name:literal, $condition:literal) => {
        page!($name, $condition, "true")
    };
    ($name:literal, $condition:literal, $rest:literal) => {
        concat!(
            "-- user_resource::list, ",
            $name,
            r#"
            WITH looked AS MATERIALIZED (
                SELECT * FROM linkis_user_resource_meta_data WHERE ticket_id > $1 AND "#,
            $condition,
            r#" ORDER BY ticket_id LIMIT $2)
            SELECT l.last, p.* FROM (
                SELECT (SELECT ticket_id FROM looked ORDER BY ticket_id OFFSET $2 - 1 LIMIT 1) AS last) l
            LEFT JOIN LATERAL (
                SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance,
                    engine_application_name, engine_instance, resource_type, user_locked_resource::text,
                    user_used_resource::text, labels::text, locked_time, used_time, expires_at, principal, em_epoch
                FROM looked
                WHERE ($3::bool IS NULL OR (expires_at IS NOT NULL) = $3) AND ($4::text IS NULL OR "user" = $4) AND "#,
            $rest,
            r#"
                ORDER BY ticket_id LIMIT $5) p ON true"#
        )
    };
}

impl Filter {
    /// The text that is planned for the index that answers most of the filter, and whether it answers all of it.
    fn page(&self) -> (&'static str, bool) {
        if self.engine.is_some() {
            let sql = page!(
                "by engine",
                "engine_application_name = $6 AND engine_instance = $7",
                "($8::text IS NULL OR (em_application_name = $8 AND em_instance = $9))"
            );
            return (sql, self.em.is_none() && self.user.is_none() && self.locked.is_none());
        }
        match (&self.em, &self.user, self.locked) {
            (Some(_), user, locked) => {
                (page!("by EM", "em_application_name = $6 AND em_instance = $7"), user.is_none() && locked.is_none())
            }
            (None, Some(_), locked) => (page!("by user", r#""user" = $4"#), locked.is_none()),
            (None, None, Some(true)) => (page!("locked", "expires_at IS NOT NULL"), true),
            (None, None, Some(false)) => (page!("used", "used_time IS NOT NULL"), true),
            (None, None, None) => (page!("all", "true"), true),
        }
    }
}

/// A page of up to `limit` tickets, oldest first, from behind the ticket `after` (nil for the first). Where no index answers all of the
/// filter it may be short, or empty, although more follow.
pub async fn list(executor: impl PgExecutor<'_>, filter: &Filter, after: Uuid, limit: i64) -> Result<Page, StoreError> {
    let (sql, is_answered) = filter.page();
    let shown = limit.saturating_add(1);
    let mut query = sqlx::query(sql)
        .bind(after)
        .bind(if is_answered { shown } else { shown.max(SCANNED_MAX) })
        .bind(filter.locked)
        .bind(filter.user.as_ref().map(Name::as_str))
        .bind(shown);
    if let Some(engine) = &filter.engine {
        let em = filter.em.as_ref().map(|em| (em.application_name.as_str(), em.instance.as_str()));
        let (em_application_name, em_instance) = em.unzip();
        query = query.bind(engine.application_name.as_str()).bind(engine.instance.as_str());
        query = query.bind(em_application_name).bind(em_instance);
    } else if let Some(em) = &filter.em {
        query = query.bind(em.application_name.as_str()).bind(em.instance.as_str());
    }
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
