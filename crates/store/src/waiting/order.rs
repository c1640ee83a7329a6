//! Ranks of waiting requests: what a decision reads of own requests, and what it changes in their rows.
//!
//! Entries where a request is short contain a hash of its turn and of the key at which the turn is taken, and the time of the own
//! order. So the first own requests at a key are found by an index, regardless of how many wait.
//! A decision owns the locks of its own request only. It changes the rank of another request if the row is as it was read and no other
//! transaction has it; otherwise the next check of that request computes its rank.
//! Never: decides a rank. Callers: the committer and the admission check.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    sync::Arc,
};

use sqlx::{PgConnection, PgExecutor, Row as _};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    ledger::RerankedDelta,
    order::{AnyEm, Class, QueueRanks, RankedRequest, TurnKey},
    wait_queue::QueuePosition,
};

use crate::{StoreError, rows::TableRow};

use super::{GoneRequest, OVERDUE, RemovedEntry, TABLE, json::turn_key_hash, parse_position, parse_wait_key};

/// Input of [`ranks`].
#[derive(Debug)]
pub struct RanksQuery<'a> {
    /// Keys at which the requests take turns, with the turns.
    pub turn_keys: &'a BTreeSet<(Arc<str>, TurnKey)>,
    /// Waiting requests that are decided, by ticket id.
    pub ticket_ids: &'a [Uuid],
    /// Number of present own requests to read at each key.
    pub depth: usize,
}

/// The first `$limit` present requests in own order, with entries that match `$condition`. `$overdue` is the parameter of the grace
/// period, in seconds.
macro_rules! present {
    ($condition:literal, $overdue:literal, $limit:literal) => {
        concat!(
            "SELECT e.ticket_id, e.position FROM linkis_resource_waiting_entry e
            WHERE ",
            $condition,
            " AND e.wait_until > clock_timestamp() - make_interval(secs => ",
            $overdue,
            ") AND EXISTS (SELECT FROM linkis_rm_instance i
                WHERE i.instance_id = e.instance_id AND i.alive_until > clock_timestamp())
            ORDER BY e.turn_key, e.own_time, e.ticket_id LIMIT ",
            $limit
        )
    };
}

/// `$1`: hashes of turn keys; `$2`: ticket ids; `$3`: number of requests at each key; `$4`: seconds; `$5`: turns.
const RANKS: &str = concat!(
    "-- waiting::ranks
    WITH requested AS (
        SELECT unnest($1::bytea[]) AS turn_key
        UNION
        SELECT e.turn_key FROM linkis_resource_waiting_entry e WHERE e.ticket_id = ANY ($2) AND e.turn_key IS NOT NULL),
    known AS (
        SELECT f.ticket_id FROM requested a CROSS JOIN LATERAL (
            ",
    present!("e.turn_key = a.turn_key", "$4", "$3"),
    ") f
        UNION
        SELECT f.ticket_id FROM linkis_resource_waiting_entry o CROSS JOIN LATERAL (
            ",
    present!("e.turn_key = o.turn_key AND (e.own_time, e.ticket_id) > (o.own_time, o.ticket_id)", "$4", "1"),
    ") f
        WHERE o.ticket_id = ANY ($2) AND o.turn_key IS NOT NULL
        UNION
        SELECT unnest($2)),
    all_known AS (
        SELECT ticket_id FROM known
        UNION
        SELECT f.ticket_id FROM (
            SELECT DISTINCT e.turn_key FROM known CROSS JOIN LATERAL (
                SELECT e.turn_key FROM linkis_resource_waiting_entry e
                WHERE e.ticket_id = known.ticket_id AND e.turn_key IS NOT NULL OFFSET 0) e) k
        CROSS JOIN LATERAL (
            ",
    present!("e.turn_key = k.turn_key", "$4", "1"),
    ") f)
    SELECT m.latest, m.absent, w.ticket_id, w.turn, w.class, w.entered, w.rank_time, w.was_shared, w.priority, w.em_conditions,
        w.is_absent, e.wait_key
    FROM (SELECT (SELECT max(rank_time) FROM linkis_resource_waiting) AS latest,
        (SELECT array_agg(DISTINCT a.turn) FROM linkis_resource_waiting a
            WHERE a.turn = ANY ($5) AND a.class < 2 AND (a.kept_until IS NOT NULL OR NOT EXISTS (
                SELECT FROM linkis_rm_instance i
                WHERE i.instance_id = a.instance_id AND i.alive_until > clock_timestamp()))) AS absent) m
    LEFT JOIN (all_known k
        CROSS JOIN LATERAL (
            SELECT w.ticket_id, w.turn, w.class, coalesce(w.entered, w.waiting_since) AS entered,
                coalesce(w.rank_time, w.waiting_since) AS rank_time, w.was_shared, w.priority, w.em_conditions,
                w.kept_until IS NOT NULL AS is_absent
            FROM linkis_resource_waiting w WHERE w.ticket_id = k.ticket_id OFFSET 0) w) ON true
    LEFT JOIN LATERAL (
        SELECT e.wait_key::text FROM linkis_resource_waiting_entry e
        WHERE e.ticket_id = w.ticket_id AND e.is_short OFFSET 0) e ON true",
);

/// Returns the waiting requests that are decided, and the own requests that their decisions can affect. These are the first ones and
/// the next later one at each key, and the first one at each other key of these.
pub async fn ranks(executor: impl PgExecutor<'_>, query: RanksQuery<'_>) -> Result<QueueRanks, StoreError> {
    let RanksQuery { turn_keys, ticket_ids, depth } = query;
    let turns: BTreeSet<&str> = turn_keys.iter().map(|(turn, _)| &**turn).collect();
    let rows = sqlx::query(RANKS)
        .bind(turn_keys.iter().map(|(turn, key)| turn_key_hash(turn, key).to_vec()).collect::<Vec<_>>())
        .bind(ticket_ids)
        .bind(i64::try_from(depth).unwrap_or(i64::MAX))
        .bind(OVERDUE.as_secs_f64())
        .bind(turns.into_iter().collect::<Vec<_>>())
        .fetch_all(executor)
        .await?;
    let mut ranks = QueueRanks::default();
    if let Some(row) = rows.first() {
        ranks.latest = row.try_get("latest")?;
        let absent: Option<Vec<String>> = row.try_get("absent")?;
        ranks.absent_turns = absent.into_iter().flatten().map(Arc::from).collect();
    }
    let mut requests: HashMap<Uuid, RankedRequest> = HashMap::new();
    for row in rows.iter().map(|row| TABLE.row(row)) {
        let Some(ticket_id) = row.get::<Option<Uuid>>("ticket_id")? else { continue };
        let wait_key: Option<&str> = row.get("wait_key")?;
        let request = match requests.entry(ticket_id) {
            Entry::Occupied(request) => request.into_mut(),
            Entry::Vacant(request) => request.insert(ranked(row, ticket_id)?),
        };
        if let Some(wait_key) = wait_key {
            request.short_at.insert(parse_wait_key(wait_key)?);
        }
    }
    requests.into_values().for_each(|request| ranks.own.insert(request));
    Ok(ranks)
}

/// Parses the class of a request.
pub(super) fn class(row: TableRow<'_>) -> Result<Class, StoreError> {
    let class: i16 = row.get("class")?;
    Class::of_number(class).ok_or_else(|| row.wrong(format!("the class {class}")))
}

/// Parses a request without its keys.
fn ranked(row: TableRow<'_>, ticket_id: Uuid) -> Result<RankedRequest, StoreError> {
    let wrong = |what: &str| StoreError::inconsistent(TABLE.0, format!("{what} of the waiting request {ticket_id}"));
    let turn: Option<&str> = row.get("turn")?;
    let conditions: Option<&[u8]> = row.get("em_conditions")?;
    let any_em = conditions.map(|hash| hash.try_into().map(AnyEm).map_err(|_| wrong("the conditions"))).transpose()?;
    Ok(RankedRequest {
        class: class(row)?,
        rank_time: row.get("rank_time")?,
        is_absent: row.get("is_absent")?,
        was_shared: row.get("was_shared")?,
        any_em,
        ..RankedRequest::new(ticket_id, turn.map(Arc::from), row.get("entered")?, row.get("priority")?)
    })
}

/// Changes the ranks of waiting requests that another decision has promoted or moved behind. Requests that changed since they were
/// read, and requests in other transactions, keep their ranks.
pub async fn rerank(connection: &mut PgConnection, reranked: &[RerankedDelta]) -> Result<(), StoreError> {
    let ranks = || reranked.iter().map(|delta| &delta.rank);
    let positions: Vec<_> = ranks().map(|rank| rank.position().as_bytes().to_vec()).collect();
    let changed: Vec<Uuid> = sqlx::query_scalar(
        "-- waiting::rerank
        WITH d AS (
            SELECT * FROM unnest($1::uuid[], $2::bytea[], $3::bytea[], $4::int2[], $5::timestamptz[])
                AS d (ticket_id, before, position, class, rank_time)),
        free AS (
            SELECT w.ticket_id FROM d CROSS JOIN LATERAL (
                SELECT w.ticket_id FROM linkis_resource_waiting w
                WHERE w.ticket_id = d.ticket_id AND w.position = d.before FOR UPDATE SKIP LOCKED) w)
        UPDATE linkis_resource_waiting w SET position = d.position, class = d.class, rank_time = greatest(w.rank_time, d.rank_time)
        FROM d JOIN free USING (ticket_id) WHERE w.ticket_id = d.ticket_id
        RETURNING w.ticket_id",
    )
    .bind(ranks().map(|rank| rank.ticket_id).collect::<Vec<_>>())
    .bind(reranked.iter().map(|delta| delta.before.as_bytes().to_vec()).collect::<Vec<_>>())
    .bind(&positions)
    .bind(ranks().map(|rank| rank.class.number()).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.rank_time).collect::<Vec<_>>())
    .fetch_all(&mut *connection)
    .await?;
    if changed.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "-- waiting::rerank, the entries
        UPDATE linkis_resource_waiting_entry e SET position = w.position
        FROM unnest($1::uuid[]) AS d (ticket_id)
        CROSS JOIN LATERAL (SELECT w.position FROM linkis_resource_waiting w WHERE w.ticket_id = d.ticket_id OFFSET 0) w
        WHERE e.ticket_id = d.ticket_id",
    )
    .bind(&changed)
    .execute(connection)
    .await?;
    Ok(())
}

/// Marks absent firsts of turns that were used meanwhile, at any key, also those of dead instances: they begin new turns when they
/// return.
pub async fn use_turns(
    executor: impl PgExecutor<'_>,
    turns: &BTreeMap<Arc<str>, OffsetDateTime>,
) -> Result<(), StoreError> {
    sqlx::query(
        "-- waiting::use_turns
        UPDATE linkis_resource_waiting w SET class = 2, rank_time = greatest(w.rank_time, d.rank_time)
        FROM unnest($1::text[], $2::timestamptz[]) AS d (turn, rank_time)
        CROSS JOIN LATERAL (
            SELECT a.ticket_id FROM linkis_resource_waiting a
            WHERE a.turn = d.turn AND a.class < 2 AND (a.kept_until IS NOT NULL OR NOT EXISTS (
                SELECT FROM linkis_rm_instance i WHERE i.instance_id = a.instance_id AND i.alive_until > clock_timestamp()))
            FOR UPDATE SKIP LOCKED) a
        WHERE w.ticket_id = a.ticket_id",
    )
    .bind(turns.keys().map(|turn| &**turn).collect::<Vec<_>>())
    .bind(turns.values().copied().collect::<Vec<_>>())
    .execute(executor)
    .await?;
    Ok(())
}

/// The turn of a removed entry, to be handed on.
#[derive(Debug, Clone)]
pub struct LeftTurn {
    turn_key: Vec<u8>,
    own_time: OffsetDateTime,
    ticket_id: Uuid,
    rank_time: OffsetDateTime,
}

/// Returns the turns of removed entries.
pub(super) fn left_turns(gone: &[GoneRequest], removed: Vec<RemovedEntry>) -> Vec<LeftTurn> {
    let rank_times: HashMap<Uuid, Option<OffsetDateTime>> = gone.iter().copied().collect();
    let turn = |(_, ticket_id, turn_key, own_time): RemovedEntry| {
        let rank_time = rank_times.get(&ticket_id).copied().flatten()?;
        Some(LeftTurn { turn_key: turn_key?, own_time: own_time?, ticket_id, rank_time })
    };
    removed.into_iter().filter_map(turn).collect()
}

/// Hands turns to the next present own request at each key, which goes at the later of both rank times. Returns the positions of these,
/// and the turns whose heirs another transaction has: it may remove them.
pub async fn hand(
    executor: impl PgExecutor<'_>,
    turns: &[LeftTurn],
) -> Result<(BTreeSet<QueuePosition>, Vec<LeftTurn>), StoreError> {
    let heirs: Vec<(i64, Vec<u8>, bool)> = sqlx::query_as(
        concat!(
            "-- waiting::hand
        WITH heirs AS MATERIALIZED (
            SELECT g.number, h.ticket_id, h.position, g.rank_time
            FROM unnest($1::bytea[], $2::timestamptz[], $3::uuid[], $4::timestamptz[]) WITH ORDINALITY
                AS g (turn_key, own_time, ticket_id, rank_time, number)
            CROSS JOIN LATERAL (
                ",
            present!("e.turn_key = g.turn_key AND (e.own_time, e.ticket_id) > (g.own_time, g.ticket_id)", "$5", "1"),
            ") h),
        free AS MATERIALIZED (
            SELECT w.ticket_id, h.rank_time FROM (SELECT ticket_id, max(rank_time) AS rank_time FROM heirs GROUP BY ticket_id) h
            CROSS JOIN LATERAL (
                SELECT w.ticket_id FROM linkis_resource_waiting w WHERE w.ticket_id = h.ticket_id FOR UPDATE SKIP LOCKED) w),
        raised AS (
            UPDATE linkis_resource_waiting w SET rank_time = greatest(w.rank_time, free.rank_time)
            FROM free WHERE w.ticket_id = free.ticket_id)
        SELECT number, position, EXISTS (SELECT FROM free WHERE free.ticket_id = heirs.ticket_id) FROM heirs"
        ),
    )
    .bind(turns.iter().map(|turn| &turn.turn_key[..]).collect::<Vec<_>>())
    .bind(turns.iter().map(|turn| turn.own_time).collect::<Vec<_>>())
    .bind(turns.iter().map(|turn| turn.ticket_id).collect::<Vec<_>>())
    .bind(turns.iter().map(|turn| turn.rank_time).collect::<Vec<_>>())
    .bind(OVERDUE.as_secs_f64())
    .fetch_all(executor)
    .await?;
    let locked = heirs.iter().filter(|(.., is_raised)| !is_raised);
    let locked = locked.filter_map(|(number, ..)| turns.get(usize::try_from(number - 1).ok()?).cloned()).collect();
    let raised = heirs.iter().filter(|(.., is_raised)| *is_raised);
    let positions: Result<BTreeSet<QueuePosition>, StoreError> =
        raised.map(|(_, position, _)| parse_position(position)).collect();
    Ok((positions?, locked))
}
