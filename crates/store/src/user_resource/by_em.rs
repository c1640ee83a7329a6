//! Tickets by EM: pages, counts and existence checks. A page scans a bounded number of tickets.
//!
//! Callers: the batch, for steps through an EM; the comparison of reports; the counting of label sets; the repair.

use std::collections::{HashMap, HashSet};

use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{StoreError, rows::em_columns};
use rm_model::{em::EmInstance, ledger::TicketPage, report::LiveTicket, ticket::Ticket};

use super::{TABLE, ticket};

/// Query for the next tickets of an EM, in the order of their ids.
#[derive(Debug, Clone, Copy)]
pub struct EmTicketsQuery<'a> {
    /// EM.
    pub em: &'a EmInstance,
    /// Ticket after which the page begins; nil for the first page.
    pub after: Uuid,
    /// Maximum number of tickets.
    pub limit: usize,
    /// Last registration whose tickets match; `None` for all. Tickets of later registrations may lie between the
    /// matches.
    pub epoch_max: Option<i64>,
}

/// Maximum number of tickets that one page scans.
const PASSED_MAX: i64 = 1024;

/// Tickets of the EM of `k` in a range of ids, in the order of the only index that serves the query. PostgreSQL drops a
/// column that equals a value from an order. PostgreSQL would then scan the tickets of all EMs in the order of their
/// ids where few EMs have nearly all.
macro_rules! of_em {
    ($up_to:literal, $filter:literal) => {
        concat!(
            "linkis_user_resource_meta_data t
            WHERE (t.em_application_name, t.em_instance, t.ticket_id) > (k.em_application_name, k.em_instance, k.after)
                AND (t.em_application_name, t.em_instance, t.ticket_id) <= (k.em_application_name, k.em_instance, ",
            $up_to,
            ")",
            $filter,
            "
            ORDER BY t.em_application_name, t.em_instance, t.ticket_id"
        )
    };
}

/// Returns the last ticket of each page that reaches the maximum of scanned tickets; no entry for other pages.
async fn ends(
    connection: &mut PgConnection,
    pages: &[EmTicketsQuery<'_>],
) -> Result<HashMap<EmInstance, Uuid>, StoreError> {
    let passing = || pages.iter().filter(|page| page.epoch_max.is_some());
    if passing().next().is_none() {
        return Ok(HashMap::new());
    }
    let (application_names, instances) = em_columns(passing().map(|page| page.em));
    let rows = sqlx::query(concat!(
        "-- user_resource::ends
        SELECT k.em_application_name, k.em_instance, t.ticket_id
        FROM unnest($1::text[], $2::text[], $3::uuid[]) AS k (em_application_name, em_instance, after)
        CROSS JOIN LATERAL (
            SELECT ticket_id FROM ",
        of_em!("'ffffffff-ffff-ffff-ffff-ffffffffffff'", ""),
        " OFFSET $4 LIMIT 1) t",
    ))
    .bind(application_names)
    .bind(instances)
    .bind(passing().map(|page| page.after).collect::<Vec<_>>())
    .bind(PASSED_MAX - 1)
    .fetch_all(connection)
    .await?;
    TABLE.parse(&rows, |row| Ok((row.em()?, row.get("ticket_id")?)))
}

/// Reads the next page of tickets of several EMs, at most one page per EM, each in the order of ticket ids.
pub async fn read_pages(
    connection: &mut PgConnection,
    pages: &[EmTicketsQuery<'_>],
) -> Result<(HashMap<EmInstance, TicketPage>, HashMap<Uuid, Ticket>), StoreError> {
    let ends = ends(&mut *connection, pages).await?;
    let end_of = |page: &EmTicketsQuery<'_>| ends.get(page.em).copied();
    let (application_names, instances) = em_columns(pages.iter().map(|page| page.em));
    let rows = sqlx::query(concat!(
        r#"-- user_resource::read_pages
        SELECT t.ticket_id, "user", creator, engine_type, t.em_application_name, t.em_instance, engine_application_name,
            engine_instance, resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            locked_time, used_time, expires_at, principal, em_epoch, idle_since
        FROM unnest($1::text[], $2::text[], $3::uuid[], $4::uuid[], $5::bigint[], $6::bigint[])
            AS k (em_application_name, em_instance, after, up_to, epoch_max, most)
        CROSS JOIN LATERAL (
            SELECT * FROM "#,
        of_em!("k.up_to", " AND t.em_epoch <= k.epoch_max"),
        " LIMIT k.most) t",
    ))
    .bind(application_names)
    .bind(instances)
    .bind(pages.iter().map(|page| page.after).collect::<Vec<_>>())
    .bind(pages.iter().map(|page| end_of(page).unwrap_or(Uuid::max())).collect::<Vec<_>>())
    .bind(pages.iter().map(|page| page.epoch_max.unwrap_or(i64::MAX)).collect::<Vec<_>>())
    .bind(pages.iter().map(|page| i64::try_from(page.limit).unwrap_or(i64::MAX)).collect::<Vec<_>>())
    .fetch_all(connection)
    .await?;
    let mut tickets = HashMap::with_capacity(rows.len());
    let mut seen: HashMap<EmInstance, (usize, Uuid)> = HashMap::new();
    for row in &rows {
        let ticket = ticket(TABLE.row(row))?;
        let (count, last) = seen.entry(ticket.em.clone()).or_default();
        (*count, *last) = (*count + 1, ticket.id.max(*last));
        tickets.insert(ticket.id, ticket);
    }
    let part = |page: &EmTicketsQuery<'_>| {
        let full = seen.get(page.em).filter(|(count, _)| *count == page.limit);
        let last = full.map(|(_, last)| *last).or_else(|| end_of(page));
        (page.em.clone(), TicketPage { after: page.after, last })
    };
    Ok((pages.iter().map(part).collect(), tickets))
}

/// Returns all tickets on EMs.
pub async fn read_on<'a>(
    executor: impl PgExecutor<'_>,
    ems: impl IntoIterator<Item = &'a EmInstance>,
) -> Result<HashMap<Uuid, Ticket>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows = sqlx::query(
        r#"-- user_resource::read_on
        SELECT ticket_id, "user", creator, engine_type, t.em_application_name, t.em_instance, engine_application_name,
            engine_instance, resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            locked_time, used_time, expires_at, principal, em_epoch, idle_since
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        -- The offset keeps it a look-up by EM.
        CROSS JOIN LATERAL (
            SELECT * FROM linkis_user_resource_meta_data t
            WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance OFFSET 0) t"#,
    )
    .bind(application_names)
    .bind(instances)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| ticket(row).map(|ticket| (ticket.id, ticket)))
}

/// Returns whether more than `most` tickets are live. Reads at most `most` + 1 rows.
pub async fn are_more_than(executor: impl PgExecutor<'_>, most: i64) -> Result<bool, StoreError> {
    Ok(sqlx::query_scalar(
        "-- user_resource::are_more_than
        SELECT EXISTS (SELECT FROM linkis_user_resource_meta_data OFFSET $1 LIMIT 1)",
    )
    .bind(most)
    .fetch_one(executor)
    .await?)
}

/// Returns the number of tickets of each EM, counted up to `most`.
pub async fn count_on(
    executor: impl PgExecutor<'_>,
    ems: &[EmInstance],
    most: usize,
) -> Result<Vec<(EmInstance, usize)>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows = sqlx::query(
        "-- user_resource::count_on
        SELECT k.em_application_name, k.em_instance, (SELECT count(*) FROM (
            SELECT FROM linkis_user_resource_meta_data t
            WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance LIMIT $3) t) AS count
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)",
    )
    .bind(application_names)
    .bind(instances)
    .bind(i64::try_from(most).unwrap_or(i64::MAX))
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| Ok((row.em()?, usize::try_from(row.get::<i64>("count")?).unwrap_or(most))))
}

/// Returns the live tickets of EMs as their reports need them: per EM the first `limit` after the given ticket, ordered
/// by id. The result has one list per EM, in the order of `ems`.
pub async fn living(
    connection: &mut PgConnection,
    ems: &[(&EmInstance, Uuid)],
    limit: i64,
) -> Result<Vec<Vec<LiveTicket>>, StoreError> {
    let (application_names, instances) = em_columns(ems.iter().map(|(em, _)| *em));
    let rows: Vec<(i64, Uuid, Option<OffsetDateTime>, i16)> = sqlx::query_as(concat!(
        "-- user_resource::living
        SELECT k.number, t.ticket_id, t.used_time, t.missed_reports
        FROM unnest($1::text[], $2::text[], $3::uuid[]) WITH ORDINALITY
            AS k (em_application_name, em_instance, after, number)
        CROSS JOIN LATERAL (SELECT ticket_id, used_time, missed_reports FROM ",
        of_em!("'ffffffff-ffff-ffff-ffff-ffffffffffff'", ""),
        " LIMIT $4) AS t",
    ))
    .bind(application_names)
    .bind(instances)
    .bind(ems.iter().map(|(_, after)| *after).collect::<Vec<_>>())
    .bind(limit)
    .fetch_all(connection)
    .await?;
    let mut living = vec![Vec::new(); ems.len()];
    for (number, id, used_time, missed_reports) in rows {
        let place = usize::try_from(number).ok().and_then(|number| living.get_mut(number.checked_sub(1)?));
        if let Some(tickets) = place {
            tickets.push(LiveTicket { id, used_time, missed_reports });
        }
    }
    Ok(living)
}

/// Returns the EMs among `ems` that have live tickets.
pub async fn inhabited<'a>(
    executor: impl PgExecutor<'_>,
    ems: impl IntoIterator<Item = &'a EmInstance>,
) -> Result<HashSet<EmInstance>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows = sqlx::query(
        "-- user_resource::inhabited
        SELECT k.em_application_name, k.em_instance
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        WHERE EXISTS (SELECT FROM linkis_user_resource_meta_data t
            WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance)",
    )
    .bind(application_names)
    .bind(instances)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| row.em())
}
