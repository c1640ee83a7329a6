//! `linkis_user_resource_meta_data`: the live tickets.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::{FromRow, PgConnection, PgExecutor, Row as _};
use time::OffsetDateTime;
use tokio_stream::StreamExt as _;
use uuid::Uuid;

use crate::domain::{
    em::EmInstance,
    ledger::TicketPage,
    name::Name,
    operation::Released,
    principal::Principal,
    report::{LiveTicket, Report},
    resource::Resource,
    ticket::{EngineInstance, Ticket, TicketState},
    ticket_digest::TicketDigest,
};

use super::{
    StoreError,
    rows::{Table, em_columns},
};

const TABLE: Table = Table("linkis_user_resource_meta_data");

#[derive(FromRow)]
struct TicketRow {
    ticket_id: Uuid,
    user: String,
    creator: String,
    engine_type: String,
    em_application_name: String,
    em_instance: String,
    engine_application_name: Option<String>,
    engine_instance: Option<String>,
    resource_type: String,
    user_locked_resource: Option<String>,
    user_used_resource: Option<String>,
    labels: String,
    locked_time: OffsetDateTime,
    used_time: Option<OffsetDateTime>,
    expires_at: Option<OffsetDateTime>,
    principal: String,
    em_epoch: i64,
}

impl TryFrom<TicketRow> for Ticket {
    type Error = StoreError;

    fn try_from(row: TicketRow) -> Result<Self, StoreError> {
        let resource_type = TABLE.resource_type(&row.resource_type)?;
        let state = match &row {
            TicketRow { user_locked_resource: Some(json), expires_at: Some(expires_at), .. } => TicketState::Locked {
                resource: TABLE.resource("user_locked_resource", resource_type, json)?,
                expires_at: *expires_at,
            },
            TicketRow {
                user_used_resource: Some(json),
                used_time: Some(used_time),
                engine_application_name: Some(application_name),
                engine_instance: Some(instance),
                ..
            } => TicketState::Used {
                resource: TABLE.resource("user_used_resource", resource_type, json)?,
                engine: EngineInstance::parse("engine", application_name, instance)
                    .map_err(|error| StoreError::inconsistent(TABLE.0, error))?,
                used_time: *used_time,
            },
            _ => return Err(StoreError::inconsistent(TABLE.0, format!("ticket {}: its state", row.ticket_id))),
        };
        Ok(Self {
            id: row.ticket_id,
            user: TABLE.name("user", &row.user)?,
            creator: TABLE.name("creator", &row.creator)?,
            em: TABLE.em(&row.em_application_name, &row.em_instance)?,
            labels: TABLE.labels(&row.labels)?,
            engine_type: row.engine_type,
            locked_time: row.locked_time,
            state,
            principal: Principal::parse("principal", &row.principal)
                .map_err(|error| StoreError::inconsistent(TABLE.0, error))?,
            em_epoch: row.em_epoch,
        })
    }
}

/// The tickets among `ticket_ids` that live.
pub async fn read(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<HashMap<Uuid, Ticket>, StoreError> {
    let rows: Vec<TicketRow> = sqlx::query_as(
        r#"-- user_resource::read
        SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance, engine_application_name,
            engine_instance, resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            locked_time, used_time, expires_at, principal, em_epoch
        FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|row| Ticket::try_from(row).map(|ticket| (ticket.id, ticket))).collect()
}

/// The first tickets of an EM behind one of them.
#[derive(Debug, Clone, Copy)]
pub struct PageOf<'a> {
    /// Which EM.
    pub em: &'a EmInstance,
    /// Behind which ticket; nil for the first.
    pub after: Uuid,
    /// How many at most.
    pub limit: usize,
    /// Only those of registrations up to this one: of an EM that has registered since, very many others may lie between them.
    pub epoch_max: Option<i64>,
}

/// How many tickets one part passes over at most, those that it holds included.
const PASSED_MAX: i64 = 1024;

/// Where the parts end that pass over as many tickets as they may; missing where there are fewer.
async fn ends(connection: &mut PgConnection, pages: &[PageOf<'_>]) -> Result<HashMap<EmInstance, Uuid>, StoreError> {
    let passing = || pages.iter().filter(|page| page.epoch_max.is_some());
    if passing().next().is_none() {
        return Ok(HashMap::new());
    }
    let (application_names, instances) = em_columns(passing().map(|page| page.em));
    let rows: Vec<(String, String, Uuid)> = sqlx::query_as(
        "-- user_resource::ends
        SELECT k.em_application_name, k.em_instance, t.ticket_id
        FROM unnest($1::text[], $2::text[], $3::uuid[]) AS k (em_application_name, em_instance, after)
        CROSS JOIN LATERAL (
            SELECT ticket_id FROM linkis_user_resource_meta_data t
            WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance AND t.ticket_id > k.after
            ORDER BY t.ticket_id OFFSET $4 LIMIT 1) t",
    )
    .bind(application_names)
    .bind(instances)
    .bind(passing().map(|page| page.after).collect::<Vec<_>>())
    .bind(PASSED_MAX - 1)
    .fetch_all(connection)
    .await?;
    rows.into_iter().map(|(name, instance, last)| Ok((TABLE.em(&name, &instance)?, last))).collect()
}

/// Parts of the tickets of EMs, each in the order of their ids; at most one for each EM.
pub async fn read_pages(
    connection: &mut PgConnection,
    pages: &[PageOf<'_>],
) -> Result<(HashMap<EmInstance, TicketPage>, HashMap<Uuid, Ticket>), StoreError> {
    let ends = ends(&mut *connection, pages).await?;
    let end_of = |page: &PageOf<'_>| ends.get(page.em).copied();
    let (application_names, instances) = em_columns(pages.iter().map(|page| page.em));
    let rows: Vec<TicketRow> = sqlx::query_as(
        r#"-- user_resource::read_pages
        SELECT t.ticket_id, "user", creator, engine_type, t.em_application_name, t.em_instance, engine_application_name,
            engine_instance, resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            locked_time, used_time, expires_at, principal, em_epoch
        FROM unnest($1::text[], $2::text[], $3::uuid[], $4::uuid[], $5::bigint[], $6::bigint[])
            AS k (em_application_name, em_instance, after, up_to, epoch_max, most)
        CROSS JOIN LATERAL (
            SELECT * FROM linkis_user_resource_meta_data t
            WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance
                AND t.ticket_id > k.after AND t.ticket_id <= k.up_to AND t.em_epoch <= k.epoch_max
            ORDER BY t.ticket_id LIMIT k.most) t"#,
    )
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
    for row in rows {
        let ticket = Ticket::try_from(row)?;
        let (count, last) = seen.entry(ticket.em.clone()).or_default();
        (*count, *last) = (*count + 1, ticket.id.max(*last));
        tickets.insert(ticket.id, ticket);
    }
    let part = |page: &PageOf<'_>| {
        let full = seen.get(page.em).filter(|(count, _)| *count == page.limit);
        let last = full.map(|(_, last)| *last).or_else(|| end_of(page));
        (page.em.clone(), TicketPage { after: page.after, last })
    };
    Ok((pages.iter().map(part).collect(), tickets))
}

/// All tickets on EMs.
pub async fn read_on<'a>(
    executor: impl PgExecutor<'_>,
    ems: impl IntoIterator<Item = &'a EmInstance>,
) -> Result<HashMap<Uuid, Ticket>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows: Vec<TicketRow> = sqlx::query_as(
        r#"-- user_resource::read_on
        SELECT ticket_id, "user", creator, engine_type, t.em_application_name, t.em_instance, engine_application_name,
            engine_instance, resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            locked_time, used_time, expires_at, principal, em_epoch
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_user_resource_meta_data t
            ON t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance"#,
    )
    .bind(application_names)
    .bind(instances)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|row| Ticket::try_from(row).map(|ticket| (ticket.id, ticket))).collect()
}

/// How many tickets EMs have, counted up to `most`.
pub async fn count_on(
    executor: impl PgExecutor<'_>,
    ems: &[EmInstance],
    most: usize,
) -> Result<Vec<(EmInstance, usize)>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows: Vec<(String, String, i64)> = sqlx::query_as(
        "-- user_resource::count_on
        SELECT k.em_application_name, k.em_instance, (SELECT count(*) FROM (
            SELECT FROM linkis_user_resource_meta_data t
            WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance LIMIT $3) t)
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)",
    )
    .bind(application_names)
    .bind(instances)
    .bind(i64::try_from(most).unwrap_or(i64::MAX))
    .fetch_all(executor)
    .await?;
    let of = |(application_name, instance, count): (String, String, i64)| {
        Ok((TABLE.em(&application_name, &instance)?, usize::try_from(count).unwrap_or(most)))
    };
    rows.into_iter().map(of).collect()
}

/// The live tickets of EMs, as far as their reports concern them: of each EM the first `limit` behind the ticket given with it, in
/// their order. One answer per EM, in theirs.
pub async fn living(
    connection: &mut PgConnection,
    ems: &[(&EmInstance, Uuid)],
    limit: i64,
) -> Result<Vec<Vec<LiveTicket>>, StoreError> {
    let (application_names, instances) = em_columns(ems.iter().map(|(em, _)| *em));
    let rows: Vec<(i64, Uuid, Option<OffsetDateTime>, i16)> = sqlx::query_as(
        "-- user_resource::living
        SELECT k.number, t.ticket_id, t.used_time, t.missed_reports
        FROM unnest($1::text[], $2::text[], $3::uuid[]) WITH ORDINALITY
            AS k (em_application_name, em_instance, after, number)
        CROSS JOIN LATERAL (SELECT ticket_id, used_time, missed_reports FROM linkis_user_resource_meta_data
            WHERE em_application_name = k.em_application_name AND em_instance = k.em_instance AND ticket_id > k.after
            ORDER BY ticket_id LIMIT $4) AS t",
    )
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

/// Whose those among `ticket_ids` are that live.
pub async fn users(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<Vec<(Uuid, Name)>, StoreError> {
    let rows: Vec<(Uuid, String)> = sqlx::query_as(
        r#"-- user_resource::users
        SELECT ticket_id, "user" FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|(id, user)| TABLE.name("user", &user).map(|user| (id, user))).collect()
}

/// Whose those among `ticket_ids` are that live, and where.
pub async fn owners(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<HashMap<Uuid, Released>, StoreError> {
    let rows: Vec<(Uuid, String, String, String)> = sqlx::query_as(
        r#"-- user_resource::owners
        SELECT ticket_id, "user", em_application_name, em_instance
        FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($1)"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    let owner = |(ticket_id, user, application_name, instance): (Uuid, String, String, String)| {
        let (user, em) = (TABLE.name("user", &user)?, TABLE.em(&application_name, &instance)?);
        Ok((ticket_id, Released { ticket_id, user, em }))
    };
    rows.into_iter().map(owner).collect()
}

/// Writes in how many reports in a row used tickets were missing, and notes with their EM's report that some may have been, if
/// `report` is still the last one of its EM: none that comes is kept before this is done. Tickets that are just being changed are
/// left out: it waits for nobody, and so nobody for ever for it.
pub async fn update_missed(
    executor: impl PgExecutor<'_>,
    report: &Report,
    missed: &[(Uuid, i16)],
) -> Result<(), StoreError> {
    let (ids, counts): (Vec<Uuid>, Vec<i16>) = missed.iter().copied().unzip();
    sqlx::query(
        "-- user_resource::update_missed
        WITH last AS MATERIALIZED (
            SELECT any_missed, set_config('synchronous_commit', 'off', true) FROM linkis_em_report
            WHERE em_application_name = $3 AND em_instance = $4 AND epoch = $5 AND sequence = $6
            FOR NO KEY UPDATE SKIP LOCKED
        ), noted AS (
            UPDATE linkis_em_report SET any_missed = true
            WHERE em_application_name = $3 AND em_instance = $4 AND EXISTS (SELECT FROM last WHERE NOT any_missed)
        )
        UPDATE linkis_user_resource_meta_data t SET missed_reports = d.missed
        FROM (SELECT u.ticket_id, k.missed
            FROM unnest($1::uuid[], $2::smallint[]) AS k (ticket_id, missed)
            JOIN linkis_user_resource_meta_data u ON u.ticket_id = k.ticket_id
            WHERE u.used_time IS NOT NULL AND EXISTS (SELECT FROM last)
            FOR NO KEY UPDATE OF u SKIP LOCKED) AS d
        WHERE t.ticket_id = d.ticket_id",
    )
    .bind(ids)
    .bind(counts)
    .bind(report.em.application_name.as_str())
    .bind(report.em.instance.as_str())
    .bind(report.epoch)
    .bind(report.sequence)
    .execute(executor)
    .await?;
    Ok(())
}

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

/// The order in which tickets fall due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DueKey {
    /// Its deadline.
    pub expires_at: OffsetDateTime,
    /// Which ticket.
    pub ticket_id: Uuid,
}

/// A locked ticket whose deadline is near, by the database's clock, and how to expire it.
#[derive(Debug)]
pub struct Due {
    /// Where it stands among all that fall due; unknown of one that was only just granted.
    pub key: Option<DueKey>,
    /// How far off it is; zero if it has passed.
    pub within: Duration,
    /// How long ago it passed; zero if it has not.
    pub late: Duration,
    /// The ticket, its user and its EM.
    pub ticket: Released,
}

/// Up to `limit` locked tickets whose deadline passes within `horizon`, or passed no longer ago than `since` (`None`: however long ago),
/// nearest first, from behind `after`.
pub async fn due(
    executor: impl PgExecutor<'_>,
    horizon: time::Duration,
    since: Option<Duration>,
    after: Option<DueKey>,
    limit: i64,
) -> Result<Vec<Due>, StoreError> {
    #[derive(FromRow)]
    struct DueRow {
        seconds: f64,
        expires_at: OffsetDateTime,
        ticket_id: Uuid,
        user: String,
        em_application_name: String,
        em_instance: String,
    }
    let rows: Vec<DueRow> = sqlx::query_as(
        r#"-- user_resource::due
        SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 AS seconds, expires_at, ticket_id, "user",
            em_application_name, em_instance
        FROM linkis_user_resource_meta_data
        WHERE expires_at IS NOT NULL AND expires_at <= now() + make_interval(secs => $1)
            AND (expires_at, ticket_id) > (coalesce($2, now() - make_interval(secs => $5), '-infinity'::timestamptz), $3)
        ORDER BY expires_at, ticket_id LIMIT $4"#,
    )
    .bind(horizon.as_seconds_f64())
    .bind(after.map(|key| key.expires_at))
    .bind(after.map_or(Uuid::nil(), |key| key.ticket_id))
    .bind(limit)
    .bind(since.map(|since| since.as_secs_f64()))
    .fetch_all(executor)
    .await?;
    let due = |row: DueRow| {
        let user = TABLE.name("user", &row.user)?;
        let em = TABLE.em(&row.em_application_name, &row.em_instance)?;
        let within = Duration::try_from_secs_f64(row.seconds).unwrap_or_default();
        let late = Duration::try_from_secs_f64(-row.seconds).unwrap_or_default();
        let key = DueKey { expires_at: row.expires_at, ticket_id: row.ticket_id };
        Ok(Due { key: Some(key), within, late, ticket: Released { ticket_id: row.ticket_id, user, em } })
    };
    // One row that somebody spoilt must not keep all the others from expiring.
    let told = |error: StoreError| tracing::error!(error = &error as &dyn std::error::Error, "a ticket cannot expire");
    Ok(rows.into_iter().filter_map(|row| due(row).map_err(told).ok()).collect())
}

/// Those among `ems` that have live tickets.
pub async fn inhabited<'a>(
    executor: impl PgExecutor<'_>,
    ems: impl IntoIterator<Item = &'a EmInstance>,
) -> Result<HashSet<EmInstance>, StoreError> {
    let (application_names, instances) = em_columns(ems);
    let rows: Vec<(String, String)> = sqlx::query_as(
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
    rows.into_iter().map(|(application_name, instance)| TABLE.em(&application_name, &instance)).collect()
}

/// Tickets that are alike: so many with the same labels, of the same state, that hold the same.
#[derive(Debug)]
pub struct Group {
    /// One of them, for its labels, its state and what it holds.
    pub ticket: Ticket,
    /// How many there are.
    pub count: i64,
}

/// Tells all live tickets, by what scopes count of them: however many there are, only one group at a time is kept.
pub async fn tell_groups(
    connection: &mut PgConnection,
    mut tell: impl FnMut(Result<Group, StoreError>),
) -> Result<(), StoreError> {
    #[derive(FromRow)]
    struct GroupRow {
        #[sqlx(flatten)]
        ticket: TicketRow,
        count: i64,
    }
    let mut rows = sqlx::query_as::<_, GroupRow>(
        r#"-- user_resource::tell_groups
        SELECT min(ticket_id::text)::uuid AS ticket_id, "user", creator, engine_type,
            em_application_name, em_instance,
            min(engine_application_name) AS engine_application_name, min(engine_instance) AS engine_instance,
            resource_type, user_locked_resource::text, user_used_resource::text, labels::text,
            min(locked_time) AS locked_time, min(used_time) AS used_time, min(expires_at) AS expires_at,
            min(principal) AS principal, min(em_epoch) AS em_epoch, count(*) AS count
        FROM linkis_user_resource_meta_data
        GROUP BY "user", creator, engine_type, em_application_name, em_instance, resource_type, user_locked_resource,
            user_used_resource, labels"#,
    )
    .fetch(connection);
    while let Some(row) = rows.next().await {
        let GroupRow { ticket, count } = row?;
        tell(ticket.try_into().map(|ticket| Group { ticket, count }));
    }
    Ok(())
}

/// Tickets on one EM that are alike: so many of the same state, that hold the same.
#[derive(Debug)]
pub struct EmGroup {
    /// Where.
    pub em: EmInstance,
    /// What each of them holds, or why that cannot be read.
    pub held: Result<Resource, String>,
    /// Whether their engines have not yet reported in.
    pub is_locked: bool,
    /// How many there are.
    pub count: u32,
    /// Which they are, if they are used; of locked ones nothing.
    pub used_tickets: TicketDigest,
}

#[derive(FromRow)]
struct EmGroupRow {
    em_application_name: String,
    em_instance: String,
    resource_type: String,
    user_locked_resource: Option<String>,
    user_used_resource: Option<String>,
    count: i64,
    /// 128 binary digits.
    xor: String,
    one: String,
}

impl TryFrom<EmGroupRow> for EmGroup {
    type Error = StoreError;

    fn try_from(row: EmGroupRow) -> Result<Self, StoreError> {
        let is_locked = row.user_locked_resource.is_some();
        let xor = u128::from_str_radix(&row.xor, 2).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
        let used_tickets = match is_locked {
            true => TicketDigest::default(),
            false => TicketDigest { count: row.count, xor: Uuid::from_u128(xor) },
        };
        let json = row.user_locked_resource.or(row.user_used_resource).unwrap_or_default();
        let held = TABLE.resource_type(&row.resource_type).and_then(|kind| TABLE.resource("ticket", kind, &json));
        Ok(Self {
            em: TABLE.em(&row.em_application_name, &row.em_instance)?,
            held: held.map_err(|error| format!("{error}, e.g. of ticket {}", row.one)),
            is_locked,
            count: u32::try_from(row.count).map_err(|error| StoreError::inconsistent(TABLE.0, error))?,
            used_tickets,
        })
    }
}

/// Tells the live tickets of one EM, or of all, by what EMs count of them.
pub async fn tell_em_groups(
    connection: &mut PgConnection,
    only: Option<&EmInstance>,
    mut tell: impl FnMut(Result<EmGroup, StoreError>),
) -> Result<(), StoreError> {
    // One text each, so that each is planned for its own index.
    let sql = if only.is_some() {
        "-- user_resource::tell_em_groups, of one
        SELECT em_application_name, em_instance, resource_type, user_locked_resource::text, user_used_resource::text,
            count(*) AS count, bit_xor(('x' || replace(ticket_id::text, '-', ''))::bit(128))::text AS xor,
            min(ticket_id::text) AS one
        FROM linkis_user_resource_meta_data WHERE em_application_name = $1 AND em_instance = $2
        GROUP BY em_application_name, em_instance, resource_type, user_locked_resource, user_used_resource"
    } else {
        "-- user_resource::tell_em_groups
        SELECT em_application_name, em_instance, resource_type, user_locked_resource::text, user_used_resource::text,
            count(*) AS count, bit_xor(('x' || replace(ticket_id::text, '-', ''))::bit(128))::text AS xor,
            min(ticket_id::text) AS one
        FROM linkis_user_resource_meta_data WHERE $1::text IS NULL AND $2::text IS NULL
        GROUP BY em_application_name, em_instance, resource_type, user_locked_resource, user_used_resource"
    };
    let mut rows = sqlx::query_as::<_, EmGroupRow>(sql)
        .bind(only.map(|em| em.application_name.as_str()))
        .bind(only.map(|em| em.instance.as_str()))
        .fetch(connection);
    while let Some(row) = rows.next().await {
        tell(row?.try_into());
    }
    Ok(())
}
