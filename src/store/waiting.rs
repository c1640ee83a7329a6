//! `linkis_resource_waiting` and `linkis_resource_waiting_spot`: the waiting line; `linkis_rm_instance`: who of those who wait
//! there still has somebody to be answered; and the notifications that wake them.
//!
//! - `freed`: the notifications; `json`: how positions, spots and caps are stored; `list`: who waits, for people.

use std::{collections::HashMap, time::Duration};

use sqlx::{Connection as _, FromRow, PgConnection, PgExecutor};
use uuid::Uuid;

use crate::domain::{
    ledger::{MovedDelta, WaitingDelta},
    line::{Extent, FreedSpots, Line, POSITION_BYTES, QueuePosition, Spot, Spots, ViewedSpots, WaitEntry},
    name::Name,
    resource::Resource,
};

use super::{
    StoreError, expect_rows,
    rows::{Table, em_columns, labels_json},
};

mod freed;
mod json;
mod list;

use json::{caps_json, parse_position, parse_spot, spot_hash, spot_json};

pub use freed::{CHANNEL, Freed, SpotKey, notify};
pub use list::{Filter, list};

const TABLE: Table = Table("linkis_resource_waiting");

/// How long an instance is taken to live without renewing its row.
const ALIVE: Duration = Duration::from_secs(5);

/// How often an instance that has waiters says that it lives, at least.
pub const RENEWAL: Duration = Duration::from_secs(2);

/// How long an instance that is dead is remembered.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// How long after its time a request is still taken to wait: its instance removes it at once.
const OVERDUE: Duration = Duration::from_secs(5);

/// How many of those who stand at a spot are looked at: whoever comes behind so many has no business before them.
const STANDS_MAX: i64 = 500;

/// Behind everybody.
const LAST_POSITION: [u8; POSITION_BYTES + 1] = [u8::MAX; POSITION_BYTES + 1];

#[derive(FromRow)]
struct WaitEntryRow {
    /// Which of the spots that were asked for, counted from 1.
    number: Option<i64>,
    /// If it is another.
    spot: Option<String>,
    is_short: bool,
    position: Vec<u8>,
    resource_type: String,
    resource: String,
}

impl WaitEntryRow {
    fn spot(&self, asked: &[&Spot]) -> Result<Spot, StoreError> {
        let number = self.number.and_then(|number| usize::try_from(number - 1).ok());
        match (number.and_then(|number| asked.get(number)), &self.spot) {
            (Some(spot), _) => Ok(Spot::clone(spot)),
            (None, Some(spot)) => parse_spot(spot),
            (None, None) => Err(StoreError::inconsistent(TABLE.0, "somebody stands nowhere")),
        }
    }

    fn resource(&self) -> Result<Resource, StoreError> {
        TABLE.resource("resource", TABLE.resource_type(&self.resource_type)?, &self.resource)
    }

    fn waits_for_same(&self, other: &Self) -> bool {
        self.resource_type == other.resource_type && self.resource == other.resource
    }
}

/// Who stands first at `spots`, as much of each as is wanted, and where those of `ticket_ids` stand, wherever that is.
pub async fn line(executor: impl PgExecutor<'_>, spots: &ViewedSpots, ticket_ids: &[Uuid]) -> Result<Line, StoreError> {
    let last = |extent: &Extent| match extent {
        Extent::All => LAST_POSITION.to_vec(),
        Extent::UpTo(position) => position.as_bytes().to_vec(),
    };
    let rows: Vec<WaitEntryRow> = sqlx::query_as(
        "-- waiting::line
        SELECT k.number, NULL::text AS spot, s.is_short, s.position, s.resource_type, s.resource::text
        FROM unnest($1::bytea[], $5::bytea[]) WITH ORDINALITY AS k (spot_hash, last, number)
        CROSS JOIN LATERAL (
            SELECT f.* FROM linkis_rm_instance i
            CROSS JOIN LATERAL (
                SELECT s.is_short, s.position, s.resource_type, s.resource FROM linkis_resource_waiting_spot s
                WHERE s.spot_hash = k.spot_hash AND s.instance_id = i.instance_id AND s.position <= k.last
                    AND s.wait_until > clock_timestamp() - make_interval(secs => $4)
                ORDER BY s.spot_hash, s.instance_id, s.position LIMIT $3) f
            WHERE i.alive_until > clock_timestamp()
            ORDER BY f.position LIMIT $3) s
        UNION ALL
        SELECT NULL, s.spot::text, s.is_short, s.position, s.resource_type, s.resource::text
        FROM linkis_resource_waiting_spot s
        WHERE s.ticket_id = ANY ($2)",
    )
    .bind(spots.keys().map(|spot| spot_hash(spot).to_vec()).collect::<Vec<_>>())
    .bind(ticket_ids)
    .bind(STANDS_MAX)
    .bind(OVERDUE.as_secs_f64())
    .bind(spots.values().map(last).collect::<Vec<_>>())
    .fetch_all(executor)
    .await?;
    let asked: Vec<&Spot> = spots.keys().collect();
    let (mut line, mut before) = (Line::default(), None::<(&WaitEntryRow, Resource)>);
    for row in &rows {
        // Those who wait for the same often stand one behind the other.
        let resource = match before.take() {
            Some((other, resource)) if other.waits_for_same(row) => resource,
            _ => row.resource()?,
        };
        before = Some((row, resource.clone()));
        line.insert(row.spot(&asked)?, parse_position(&row.position)?, WaitEntry { resource, is_short: row.is_short });
    }
    Ok(line)
}

/// The queues of a provider at which anybody stands, up to `limit`.
pub async fn queues(executor: impl PgExecutor<'_>, provider: &Name, limit: i64) -> Result<Vec<Spot>, StoreError> {
    let spots: Vec<String> = sqlx::query_scalar(
        "-- waiting::queues
        SELECT DISTINCT spot::text FROM linkis_resource_waiting_spot
        WHERE spot ? 'queue' AND spot -> 'queue' ->> 0 = $1 LIMIT $2",
    )
    .bind(provider.as_str())
    .bind(limit)
    .fetch_all(executor)
    .await?;
    spots.iter().map(|spot| parse_spot(spot)).collect()
}

/// Where those among requests stand that are in line.
pub async fn spots_of(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<HashMap<Uuid, Spots>, StoreError> {
    let rows: Vec<(Uuid, String, bool)> = sqlx::query_as(
        "-- waiting::spots_of
        SELECT ticket_id, spot::text, is_short FROM linkis_resource_waiting_spot WHERE ticket_id = ANY ($1)",
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    let mut stands: HashMap<Uuid, Spots> = HashMap::new();
    for (ticket_id, spot, is_short) in rows {
        stands.entry(ticket_id).or_default().insert(parse_spot(&spot)?, is_short);
    }
    Ok(stands)
}

/// Writes requests that are new in line.
pub async fn insert(connection: &mut PgConnection, waiting: &[WaitingDelta]) -> Result<(), StoreError> {
    let asks = || waiting.iter().map(|delta| &delta.request.ask);
    let waits = || waiting.iter().map(|delta| delta.request.wait.as_ref());
    let (application_names, instances) = em_columns(waiting.iter().map(|delta| &delta.request.em));
    let until = |delta: &WaitingDelta| {
        let remaining = delta.request.wait.as_ref().map(|wait| wait.remaining).unwrap_or_default();
        delta.since.saturating_add(time::Duration::try_from(remaining).unwrap_or(time::Duration::MAX))
    };
    let done = sqlx::query(
        r#"-- waiting::insert
        INSERT INTO linkis_resource_waiting (ticket_id, instance_id, principal, "user", creator, engine_type,
            em_application_name, em_instance, any_em, resource_type, resource, labels, waiting_since, wait_until, position,
            caps)
        SELECT ticket_id, instance_id, principal, "user", creator, engine_type, em_application_name, em_instance, any_em,
            resource_type, resource::jsonb, labels::jsonb, waiting_since, wait_until, position, caps::jsonb
        FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bool[],
            $9::text[], $10::text[], $11::text[], $12::timestamptz[], $13::timestamptz[], $14::text[],
            $15::bytea[], $16::text[])
            AS d (ticket_id, instance_id, "user", creator, engine_type, em_application_name, em_instance, any_em,
                resource_type, resource, labels, waiting_since, wait_until, principal, position, caps)"#,
    )
    .bind(waiting.iter().map(|delta| delta.position.ticket_id()).collect::<Vec<_>>())
    .bind(waits().map(|wait| wait.map(|wait| wait.instance_id)).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.user.as_str()).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.creator.as_str()).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.engine_type.as_str()).collect::<Vec<_>>())
    .bind(application_names)
    .bind(instances)
    .bind(waits().map(|wait| wait.is_some_and(|wait| wait.any_em)).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.resource.resource_type().as_str()).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.resource.to_json()).collect::<Vec<_>>())
    .bind(asks().map(|ask| labels_json(&ask.labels)).collect::<Vec<_>>())
    .bind(waiting.iter().map(|delta| delta.since).collect::<Vec<_>>())
    .bind(waiting.iter().map(until).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.principal.as_str()).collect::<Vec<_>>())
    .bind(waiting.iter().map(|delta| delta.position.as_bytes()).collect::<Vec<_>>())
    .bind(asks().map(|ask| caps_json(&ask.caps)).collect::<Vec<_>>())
    .execute(&mut *connection)
    .await?;
    expect_rows(TABLE.0, waiting.len(), done.rows_affected())?;
    insert_spots(connection, waiting.iter().map(|delta| (delta.position, &delta.spots)).collect()).await
}

/// Writes where requests stand now.
pub async fn update(connection: &mut PgConnection, moved: &[MovedDelta]) -> Result<(), StoreError> {
    let ticket_ids: Vec<Uuid> = moved.iter().map(|delta| delta.position.ticket_id()).collect();
    let (application_names, instances) = em_columns(moved.iter().map(|delta| &delta.em));
    let done = sqlx::query(
        "-- waiting::update
        UPDATE linkis_resource_waiting w SET em_application_name = d.em_application_name, em_instance = d.em_instance
        FROM unnest($1::uuid[], $2::text[], $3::text[]) AS d (ticket_id, em_application_name, em_instance)
        WHERE w.ticket_id = d.ticket_id",
    )
    .bind(&ticket_ids)
    .bind(application_names)
    .bind(instances)
    .execute(&mut *connection)
    .await?;
    expect_rows(TABLE.0, moved.len(), done.rows_affected())?;
    sqlx::query(
        "-- waiting::update, the spots
        DELETE FROM linkis_resource_waiting_spot WHERE ticket_id = ANY ($1)",
    )
    .bind(&ticket_ids)
    .execute(&mut *connection)
    .await?;
    insert_spots(connection, moved.iter().map(|delta| (delta.position, &delta.spots)).collect()).await
}

/// With what was written with each request.
async fn insert_spots(connection: &mut PgConnection, stands: Vec<(QueuePosition, &Spots)>) -> Result<(), StoreError> {
    let rows: Vec<(QueuePosition, &Spot, bool)> = (stands.iter())
        .flat_map(|(position, spots)| spots.iter().map(|(spot, is_short)| (*position, spot, *is_short)))
        .collect();
    let done = sqlx::query(
        "-- waiting::insert_spots
        INSERT INTO linkis_resource_waiting_spot (spot, ticket_id, instance_id, position, resource_type, resource, wait_until,
            is_short, spot_hash)
        SELECT d.spot::jsonb, w.ticket_id, w.instance_id, w.position, w.resource_type, w.resource, w.wait_until, d.is_short,
            d.spot_hash
        FROM unnest($1::text[], $2::uuid[], $3::bool[], $4::bytea[]) AS d (spot, ticket_id, is_short, spot_hash)
        -- The offset keeps it a look-up by key, whatever the planner thinks of the rest.
        CROSS JOIN LATERAL (SELECT * FROM linkis_resource_waiting w WHERE w.ticket_id = d.ticket_id OFFSET 0) w",
    )
    .bind(rows.iter().map(|(_, spot, _)| spot_json(spot)).collect::<Vec<_>>())
    .bind(rows.iter().map(|(position, ..)| position.ticket_id()).collect::<Vec<_>>())
    .bind(rows.iter().map(|(.., is_short)| *is_short).collect::<Vec<_>>())
    .bind(rows.iter().map(|(_, spot, _)| spot_hash(spot).to_vec()).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    expect_rows("linkis_resource_waiting_spot", rows.len(), done.rows_affected())
}

/// Removes requests from the line, all of which have to be there, under the locks. Whoever moves one holds them, too: so what is seen
/// of its spots is where it stands, unless it has left meanwhile.
pub async fn delete(connection: &mut PgConnection, ticket_ids: &[Uuid]) -> Result<(), StoreError> {
    let gone: i64 = sqlx::query_scalar(
        "-- waiting::delete
        WITH gone AS (DELETE FROM linkis_resource_waiting WHERE ticket_id = ANY ($1) RETURNING 1),
            spots AS (DELETE FROM linkis_resource_waiting_spot WHERE ticket_id = ANY ($1) RETURNING 1)
        SELECT count(*) FROM gone",
    )
    .bind(ticket_ids)
    .fetch_one(connection)
    .await?;
    expect_rows(TABLE.0, ticket_ids.len(), gone.unsigned_abs())
}

/// Requests that left the line.
#[derive(Debug)]
pub struct Gone {
    /// How many.
    pub requests: u64,
    /// Where they stood, and how many of them.
    pub spots: FreedSpots,
}

/// Removes those among requests from the line that are there, with all of their spots or not at all.
pub async fn leave(connection: &mut PgConnection, ticket_ids: &[Uuid]) -> Result<Gone, StoreError> {
    let mut transaction = connection.begin().await?;
    let gone = remove(&mut transaction, ticket_ids).await?;
    transaction.commit().await?;
    Ok(gone)
}

async fn remove(connection: &mut PgConnection, ticket_ids: &[Uuid]) -> Result<Gone, StoreError> {
    let gone: Vec<Uuid> = sqlx::query_scalar(
        "-- waiting::remove
        DELETE FROM linkis_resource_waiting WHERE ticket_id = ANY ($1) RETURNING ticket_id",
    )
    .bind(ticket_ids)
    .fetch_all(&mut *connection)
    .await?;
    remove_spots(connection, gone).await
}

/// Removes up to `limit` requests that wait on instances that have been dead for a while, or longer than they said.
pub async fn sweep(connection: &mut PgConnection, limit: i64) -> Result<Gone, StoreError> {
    let mut transaction = connection.begin().await?;
    let gone: Vec<Uuid> = sqlx::query_scalar(
        "-- waiting::sweep
        DELETE FROM linkis_resource_waiting WHERE ticket_id = ANY (ARRAY (
            SELECT w.ticket_id FROM linkis_resource_waiting w
            LEFT JOIN linkis_rm_instance i
                ON i.instance_id = w.instance_id AND i.alive_until > clock_timestamp() - make_interval(secs => $2)
            WHERE i.instance_id IS NULL OR w.wait_until < clock_timestamp() - make_interval(secs => $2)
            LIMIT $1))
        RETURNING ticket_id",
    )
    .bind(limit)
    .bind(OVERDUE.as_secs_f64())
    .fetch_all(&mut *transaction)
    .await?;
    sqlx::query(
        "-- waiting::sweep, the instances
        DELETE FROM linkis_rm_instance WHERE alive_until < clock_timestamp() - make_interval(secs => $1)",
    )
    .bind(FORGOTTEN.as_secs_f64())
    .execute(&mut *transaction)
    .await?;
    let gone = remove_spots(&mut transaction, gone).await?;
    transaction.commit().await?;
    Ok(gone)
}

/// The spots in a statement of their own: one that had to wait for the request's row would not see where it has moved to meanwhile.
async fn remove_spots(connection: &mut PgConnection, gone: Vec<Uuid>) -> Result<Gone, StoreError> {
    let spots: Vec<String> = sqlx::query_scalar(
        "-- waiting::remove_spots
        DELETE FROM linkis_resource_waiting_spot WHERE ticket_id = ANY ($1) RETURNING spot::text",
    )
    .bind(&gone)
    .fetch_all(connection)
    .await?;
    let mut freed = FreedSpots::default();
    for spot in &spots {
        freed.note(parse_spot(spot)?, 1);
    }
    Ok(Gone { requests: gone.len() as u64, spots: freed })
}

/// Whether some instance has been dead for a while, and may have left requests in line; never for one that is late itself.
pub async fn is_any_dead(executor: impl PgExecutor<'_>, instance_id: Uuid) -> Result<bool, StoreError> {
    Ok(sqlx::query_scalar(
        "-- waiting::is_any_dead
        SELECT EXISTS (SELECT FROM linkis_rm_instance WHERE alive_until < clock_timestamp() - make_interval(secs => $2))
            AND NOT EXISTS (SELECT FROM linkis_rm_instance WHERE instance_id = $1 AND alive_until < clock_timestamp())",
    )
    .bind(instance_id)
    .bind(OVERDUE.as_secs_f64())
    .fetch_one(executor)
    .await?)
}

/// Says that an instance lives. If it could not say so in time, the database was away: then all others that lived when it last did are
/// given the same time again, so that nobody loses his position to whoever comes back first.
pub async fn keep_alive(executor: impl PgExecutor<'_>, instance_id: Uuid) -> Result<(), StoreError> {
    sqlx::query(
        "-- waiting::keep_alive
        WITH late AS (
            SELECT alive_until FROM linkis_rm_instance WHERE instance_id = $1 AND alive_until < clock_timestamp()),
        others AS (
            UPDATE linkis_rm_instance i SET alive_until = clock_timestamp() + make_interval(secs => $2)
            FROM late WHERE i.instance_id <> $1 AND i.alive_until >= late.alive_until - make_interval(secs => $3))
        INSERT INTO linkis_rm_instance (instance_id, alive_until)
        VALUES ($1, clock_timestamp() + make_interval(secs => $2))
        ON CONFLICT (instance_id) DO UPDATE SET alive_until = excluded.alive_until",
    )
    .bind(instance_id)
    .bind(ALIVE.as_secs_f64())
    .bind(RENEWAL.as_secs_f64())
    .execute(executor)
    .await?;
    Ok(())
}
