//! Wait queues: `linkis_resource_waiting` has one row per waiting request, `linkis_resource_waiting_entry` one row per
//! queue entry, and `linkis_rm_instance` one liveness row per instance with waiters.
//!
//! Entries of instances that are not alive do not count, and are deleted later. The committer inserts entries and moves them to
//! other keys under the resource locks; `order` changes the positions of other requests without them. A cancelled request is
//! removed without them, and so is a request that an operator removes: its row is locked first. Never: decides a position; the
//! ledger does.
//! Callers: `rm_service::waiting` and the committer.
//!
//! Submodules: `freed`: notifications that wake waiters; `json`: stored form of positions, wait keys and caps; `list`:
//! pages for operators; `liveness`: rows of instances with waiters; `order`: ranks of waiting requests; `promises`: amounts of entitled
//! requests.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use sqlx::{Connection as _, PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    em::EmInstance,
    ledger::{EnqueuedDelta, RequeuedDelta},
    name::Name,
    order::{AnyEm, RankedRequest},
    resource::Resource,
    scope::Scope,
    wait_queue::{
        FreedKeys, OwnedPosition, POSITION_BYTES, QueueEntry, QueuePosition, ViewExtent, ViewedKeys, WaitKey, WaitKeys,
        WaitQueues, WaitingRequest,
    },
};

use super::{
    StoreError, expect_rows,
    rows::{TableName, TableRow, em_columns, labels_json},
};

mod freed;
mod json;
mod list;
mod liveness;
mod order;
mod promises;

use json::{caps_json, em_conditions_json, parse_wait_key, turn_key_hash, wait_key_hash, wait_key_json};

pub(super) use json::parse_position;

pub use freed::{CHANNEL, FreedNotification, key_hash, notify};
pub use list::{PresentPage, PresentRequest, WaitingFilter, list, present};
pub use liveness::{ListenerProcess, end_dead_instances, is_any_dead, keep_alive, listener_process};
pub use order::{LeftTurn, RanksQuery, hand, ranks, rerank, use_turns};
pub use promises::promises;

const TABLE: TableName = TableName("linkis_resource_waiting");

/// Maximum number of positions that are kept for absent callers of one user, because each turn of the user reads them. Requests of further
/// absent callers leave.
const KEPT_OF_USER_MAX: i64 = 1000;

/// Time for which a liveness row counts after its renewal.
const ALIVE: Duration = Duration::from_secs(5);

/// Maximum interval between renewals of the liveness row of an instance with waiters.
pub const RENEWAL: Duration = Duration::from_secs(2);

/// Time after which the row of a dead instance is deleted.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// Grace period of a request after its deadline. The request still counts and is not swept; a live instance removes it
/// at the deadline. A sweep uses the same period for dead instances.
const OVERDUE: Duration = Duration::from_secs(5);

/// SQL of the time for which a position is kept for an absent caller, in milliseconds.
macro_rules! kept_ms {
    () => {
        "(SELECT position_kept_ms FROM linkis_queue_order WHERE only_row)"
    };
}

/// Maximum number of entries that are read per wait key. A later request cannot be granted before so many entries.
const ENTRIES_MAX: i64 = 500;

/// Sorts after every position.
const LAST_POSITION: [u8; POSITION_BYTES + 1] = [u8::MAX; POSITION_BYTES + 1];

/// Returns the wait key of an entry: by number among the `viewed` ones, counted from 1, or as stored.
fn wait_key(row: TableRow<'_>, viewed: &[&WaitKey]) -> Result<WaitKey, StoreError> {
    let number: Option<i64> = row.get("number")?;
    match number.and_then(|number| viewed.get(usize::try_from(number - 1).ok()?)) {
        Some(wait_key) => Ok(WaitKey::clone(wait_key)),
        None => parse_wait_key(row.get("wait_key")?),
    }
}

/// Returns the first entries at `wait_keys`, to the extent given for each, and all entries of `ticket_ids` at any wait key.
pub async fn line(
    executor: impl PgExecutor<'_>,
    wait_keys: &ViewedKeys,
    ticket_ids: &[Uuid],
) -> Result<WaitQueues, StoreError> {
    let last = |extent: &ViewExtent| match extent {
        ViewExtent::All => LAST_POSITION.to_vec(),
        ViewExtent::UpTo(position) => position.as_bytes().to_vec(),
    };
    let rows = sqlx::query(
        "-- waiting::line
        SELECT k.number, NULL::text AS wait_key, s.is_short, s.position, s.resource_type, s.resource::text
        FROM unnest($1::bytea[], $5::bytea[]) WITH ORDINALITY AS k (wait_key_hash, last, number)
        CROSS JOIN LATERAL (
            SELECT f.* FROM linkis_rm_instance i
            CROSS JOIN LATERAL (
                SELECT s.is_short, s.position, s.resource_type, s.resource FROM linkis_resource_waiting_entry s
                WHERE s.wait_key_hash = k.wait_key_hash AND s.instance_id = i.instance_id AND s.position <= k.last
                    AND s.wait_until > clock_timestamp() - make_interval(secs => $4)
                ORDER BY s.wait_key_hash, s.instance_id, s.position LIMIT $3) f
            WHERE i.alive_until > clock_timestamp()
            ORDER BY f.position LIMIT $3) s
        UNION ALL
        SELECT NULL, s.wait_key::text, s.is_short, s.position, s.resource_type, s.resource::text
        FROM linkis_resource_waiting_entry s
        WHERE s.ticket_id = ANY ($2)",
    )
    .bind(wait_keys.keys().map(|wait_key| wait_key_hash(wait_key).to_vec()).collect::<Vec<_>>())
    .bind(ticket_ids)
    .bind(ENTRIES_MAX)
    .bind(OVERDUE.as_secs_f64())
    .bind(wait_keys.values().map(last).collect::<Vec<_>>())
    .fetch_all(executor)
    .await?;
    let viewed: Vec<&WaitKey> = wait_keys.keys().collect();
    let (mut line, mut before) = (WaitQueues::default(), None::<((&str, &str), Resource)>);
    for row in rows.iter().map(|row| TABLE.row(row)) {
        let text = (row.get("resource_type")?, row.get("resource")?);
        // Consecutive entries often wait for equal amounts, so the parsed amounts are reused.
        let resource = match before.take() {
            Some((other, resource)) if other == text => resource,
            _ => row.resource("resource", row.resource_type()?)?,
        };
        before = Some((text, resource.clone()));
        let entry = QueueEntry { resource, is_short: row.get("is_short")? };
        line.insert(wait_key(row, &viewed)?, parse_position(row.get("position")?)?, entry);
    }
    Ok(line)
}

/// Returns up to `limit` external queues of `provider` with a wait queue.
pub async fn queues(executor: impl PgExecutor<'_>, provider: &Name, limit: i64) -> Result<Vec<WaitKey>, StoreError> {
    let wait_keys: Vec<String> = sqlx::query_scalar(
        "-- waiting::queues
        SELECT DISTINCT wait_key::text FROM linkis_resource_waiting_entry
        WHERE wait_key ? 'queue' AND wait_key -> 'queue' ->> 0 = $1 LIMIT $2",
    )
    .bind(provider.as_str())
    .bind(limit)
    .fetch_all(executor)
    .await?;
    wait_keys.iter().map(|wait_key| parse_wait_key(wait_key)).collect()
}

/// Place of a waiting request: its position, and its wait keys, each with whether the request is short there.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredPlace {
    /// The position.
    pub position: QueuePosition,
    /// The wait keys.
    pub wait_keys: WaitKeys,
}

/// Returns the places of those of `positions` that their calls still own, by ticket id.
pub async fn places_of(
    executor: impl PgExecutor<'_>,
    positions: &[OwnedPosition],
) -> Result<HashMap<Uuid, StoredPlace>, StoreError> {
    let rows: Vec<(Vec<u8>, Option<String>, Option<bool>)> = sqlx::query_as(
        "-- waiting::places_of
        SELECT w.position, s.wait_key::text, s.is_short FROM unnest($1::uuid[], $2::uuid[]) AS d (ticket_id, claim)
        JOIN linkis_resource_waiting w ON w.ticket_id = d.ticket_id AND w.claim IS NOT DISTINCT FROM d.claim
        LEFT JOIN linkis_resource_waiting_entry s ON s.ticket_id = w.ticket_id",
    )
    .bind(positions.iter().map(|position| position.ticket_id).collect::<Vec<_>>())
    .bind(positions.iter().map(|position| position.claim).collect::<Vec<_>>())
    .fetch_all(executor)
    .await?;
    let mut places = HashMap::new();
    for (position, wait_key, is_short) in rows {
        let position = parse_position(&position)?;
        let place =
            places.entry(position.ticket_id()).or_insert_with(|| StoredPlace { position, wait_keys: WaitKeys::new() });
        if let (Some(wait_key), Some(is_short)) = (wait_key, is_short) {
            place.wait_keys.insert(parse_wait_key(&wait_key)?, is_short);
        }
    }
    Ok(places)
}

/// Inserts newly waiting requests with their entries.
///
/// # Errors
/// [`StoreError::is_race`] if a request with the same id entered at the same moment; database errors.
pub async fn insert(connection: &mut PgConnection, waiting: &[EnqueuedDelta]) -> Result<(), StoreError> {
    let asks = || waiting.iter().map(|delta| &delta.request.ask);
    let waits = || waiting.iter().map(|delta| delta.request.wait.as_ref());
    let ranks = || waiting.iter().map(|delta| &delta.rank);
    let (application_names, instances) = em_columns(waiting.iter().map(|delta| &delta.request.em));
    let done = sqlx::query(
        r#"-- waiting::insert
        INSERT INTO linkis_resource_waiting (ticket_id, instance_id, principal, "user", creator, engine_type,
            em_application_name, em_instance, any_em, resource_type, resource, labels, waiting_since, entered, wait_until,
            position, caps, claim, request_id, body_hash, waiting_scopes, turn, class, rank_time, was_shared, priority,
            em_conditions, em_selector, guaranteed_scopes)
        SELECT ticket_id, instance_id, principal, "user", creator, engine_type, em_application_name, em_instance, any_em,
            resource_type, resource::jsonb, labels::jsonb, waiting_since, entered, wait_until,
            position, caps::jsonb, claim, request_id, body_hash, waiting_scopes::bigint[], turn, class, rank_time, was_shared,
            priority, em_conditions, em_selector::jsonb, guaranteed_scopes::bigint[]
        FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bool[],
            $9::text[], $10::text[], $11::text[], $12::timestamptz[], $13::timestamptz[], $14::text[],
            $15::bytea[], $16::text[], $17::uuid[], $18::text[], $19::bytea[], $20::text[], $21::text[], $22::int2[],
            $23::timestamptz[], $24::bool[], $25::int2[], $26::bytea[], $27::timestamptz[], $28::text[], $29::text[])
            AS d (ticket_id, instance_id, "user", creator, engine_type, em_application_name, em_instance, any_em,
                resource_type, resource, labels, entered, wait_until, principal, position, caps, claim, request_id, body_hash,
                waiting_scopes, turn, class, rank_time, was_shared, priority, em_conditions, waiting_since, em_selector,
                guaranteed_scopes)"#,
    )
    .bind(ranks().map(|rank| rank.ticket_id).collect::<Vec<_>>())
    .bind(waits().map(|wait| wait.map(|wait| wait.instance_id)).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.user.as_str()).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.creator.as_str()).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.engine_type.as_str()).collect::<Vec<_>>())
    .bind(application_names)
    .bind(instances)
    .bind(waiting.iter().map(|delta| delta.request.any_em).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.resource.resource_type().as_str()).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.resource.to_json()).collect::<Vec<_>>())
    .bind(asks().map(|ask| labels_json(&ask.labels)).collect::<Vec<_>>())
    .bind(waiting.iter().map(|delta| delta.rank.entered).collect::<Vec<_>>())
    .bind(waiting.iter().map(|delta| delta.until).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.principal.as_str()).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.position().as_bytes().to_vec()).collect::<Vec<_>>())
    .bind(asks().map(|ask| caps_json(&ask.caps)).collect::<Vec<_>>())
    .bind(waits().map(|wait| wait.map(|wait| wait.claim)).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.request_id.as_ref().map(|id| id.id.as_str())).collect::<Vec<_>>())
    .bind(asks().map(|ask| ask.request_id.as_ref().map(|id| &id.body_hash[..])).collect::<Vec<_>>())
    .bind(waiting.iter().map(|delta| scope_numbers(&delta.waiting_scopes)).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.turn.as_deref()).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.class.number()).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.rank_time).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.was_shared).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.priority).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.any_em.as_ref().map(|AnyEm(hash)| &hash[..])).collect::<Vec<_>>())
    .bind(waiting.iter().map(|delta| delta.since).collect::<Vec<_>>())
    .bind(waiting.iter().map(em_selector).collect::<Vec<_>>())
    .bind(waiting.iter().map(|delta| scope_numbers(&delta.guaranteed_scopes)).collect::<Vec<_>>())
    .execute(&mut *connection)
    .await?;
    expect_rows(TABLE.0, waiting.len(), done.rows_affected())?;
    insert_entries(connection, waiting.iter().map(|delta| (&delta.rank, &delta.wait_keys)).collect()).await
}

/// Returns the conditions on the EM of a request that names none.
fn em_selector(delta: &EnqueuedDelta) -> Option<String> {
    delta.request.any_em.then(|| em_conditions_json(&delta.request.ask.selector))
}

/// Returns the numbers of scopes as an array literal of PostgreSQL; `None` if there are none.
fn scope_numbers(scopes: &[Scope]) -> Option<String> {
    let numbers: Vec<String> = scopes.iter().map(|scope| scope_number(scope).to_string()).collect();
    (!numbers.is_empty()).then(|| format!("{{{}}}", numbers.join(",")))
}

/// Returns the number of a scope in `waiting_scopes` and `guaranteed_scopes`.
fn scope_number(scope: &Scope) -> i64 {
    key_hash(&WaitKey::Scope(scope.clone())).0.cast_signed()
}

/// Returns the number of waiting requests in each of `scopes` that entered the queue while a limit counted them there. A position
/// counts until it is swept, because until then a repeated request takes it over. The caller has locked the counters of the scopes,
/// so that no other request enters there meanwhile.
pub async fn counts(executor: impl PgExecutor<'_>, scopes: BTreeSet<Scope>) -> Result<HashMap<Scope, i64>, StoreError> {
    let counts: Vec<i64> = sqlx::query_scalar(
        "-- waiting::counts
        SELECT (SELECT count(*) FROM linkis_resource_waiting w WHERE w.waiting_scopes @> ARRAY[d.scope])
        FROM unnest($1::bigint[]) WITH ORDINALITY AS d (scope, number) ORDER BY d.number",
    )
    .bind(scopes.iter().map(scope_number).collect::<Vec<_>>())
    .fetch_all(executor)
    .await?;
    Ok(scopes.into_iter().zip(counts).collect())
}

/// Replaces the EM, the rank and the entries of waiting requests. A rank time that another transaction has raised stays.
///
/// # Errors
/// [`StoreError::RowCount`] if a call no longer owns its position; database errors.
pub async fn update(connection: &mut PgConnection, moved: &[RequeuedDelta]) -> Result<(), StoreError> {
    let ticket_ids: Vec<Uuid> = moved.iter().map(|delta| delta.rank.ticket_id).collect();
    let ranks = || moved.iter().map(|delta| &delta.rank);
    let (application_names, instances) = em_columns(moved.iter().map(|delta| &delta.em));
    let done = sqlx::query(
        "-- waiting::update
        UPDATE linkis_resource_waiting w SET em_application_name = d.em_application_name, em_instance = d.em_instance,
            position = d.position, class = d.class, entered = d.entered, was_shared = d.was_shared,
            rank_time = greatest(w.rank_time, d.rank_time), guaranteed_scopes = d.guaranteed_scopes::bigint[]
        FROM unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::bytea[], $6::int2[], $7::timestamptz[], $8::timestamptz[],
            $9::bool[], $10::text[]) AS d (ticket_id, em_application_name, em_instance, claim, position, class, entered, rank_time,
            was_shared, guaranteed_scopes)
        WHERE w.ticket_id = d.ticket_id AND w.claim = d.claim",
    )
    .bind(&ticket_ids)
    .bind(application_names)
    .bind(instances)
    .bind(moved.iter().map(|delta| delta.claim).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.position().as_bytes().to_vec()).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.class.number()).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.entered).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.rank_time).collect::<Vec<_>>())
    .bind(ranks().map(|rank| rank.was_shared).collect::<Vec<_>>())
    .bind(moved.iter().map(|delta| scope_numbers(&delta.guaranteed_scopes)).collect::<Vec<_>>())
    .execute(&mut *connection)
    .await?;
    expect_rows(TABLE.0, moved.len(), done.rows_affected())?;
    sqlx::query(
        "-- waiting::update, the wait_keys
        DELETE FROM linkis_resource_waiting_entry WHERE ticket_id = ANY ($1)",
    )
    .bind(&ticket_ids)
    .execute(&mut *connection)
    .await?;
    insert_entries(connection, moved.iter().map(|delta| (&delta.rank, &delta.wait_keys)).collect()).await
}

/// Inserts entries. Copies the other columns from the rows of the requests.
async fn insert_entries(
    connection: &mut PgConnection,
    entries: Vec<(&RankedRequest, &WaitKeys)>,
) -> Result<(), StoreError> {
    let rows: Vec<(&RankedRequest, &WaitKey, bool)> = (entries.iter())
        .flat_map(|(rank, wait_keys)| wait_keys.iter().map(|(wait_key, is_short)| (*rank, wait_key, *is_short)))
        .collect();
    let turn_key = |(rank, wait_key, is_short): &(&RankedRequest, &WaitKey, bool)| {
        let turn = rank.turn.as_ref().filter(|_| *is_short)?;
        Some(turn_key_hash(turn, &rank.turn_key(wait_key)).to_vec())
    };
    let done = sqlx::query(
        "-- waiting::insert_entries
        INSERT INTO linkis_resource_waiting_entry (wait_key, ticket_id, instance_id, position, resource_type, resource, wait_until,
            is_short, wait_key_hash, turn_key, own_time)
        SELECT d.wait_key::jsonb, w.ticket_id, w.instance_id, w.position, w.resource_type, w.resource, w.wait_until, d.is_short,
            d.wait_key_hash, d.turn_key, CASE WHEN d.turn_key IS NOT NULL THEN d.own_time END
        FROM unnest($1::text[], $2::uuid[], $3::bool[], $4::bytea[], $5::bytea[], $6::timestamptz[])
            AS d (wait_key, ticket_id, is_short, wait_key_hash, turn_key, own_time)
        -- OFFSET 0 forces a look-up by key.
        CROSS JOIN LATERAL (SELECT * FROM linkis_resource_waiting w WHERE w.ticket_id = d.ticket_id OFFSET 0) w",
    )
    .bind(rows.iter().map(|(_, wait_key, _)| wait_key_json(wait_key)).collect::<Vec<_>>())
    .bind(rows.iter().map(|(rank, ..)| rank.ticket_id).collect::<Vec<_>>())
    .bind(rows.iter().map(|(.., is_short)| *is_short).collect::<Vec<_>>())
    .bind(rows.iter().map(|(_, wait_key, _)| wait_key_hash(wait_key).to_vec()).collect::<Vec<_>>())
    .bind(rows.iter().map(turn_key).collect::<Vec<_>>())
    .bind(rows.iter().map(|(rank, ..)| rank.own_order().time).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    expect_rows("linkis_resource_waiting_entry", rows.len(), done.rows_affected())
}

/// Deletes requests with their entries. All must be queued, and the caller owns the locks, or has locked the rows, so no entry
/// can move meanwhile.
///
/// # Errors
/// [`StoreError::RowCount`] if a request has been cancelled or taken over meanwhile; database errors.
pub async fn delete(connection: &mut PgConnection, positions: &[OwnedPosition]) -> Result<(), StoreError> {
    let ticket_ids: Vec<Uuid> = positions.iter().map(|position| position.ticket_id).collect();
    let gone: i64 = sqlx::query_scalar(
        "-- waiting::delete
        WITH gone AS (
                DELETE FROM linkis_resource_waiting w USING unnest($1::uuid[], $2::uuid[]) AS d (ticket_id, claim)
                WHERE w.ticket_id = d.ticket_id AND w.claim IS NOT DISTINCT FROM d.claim RETURNING 1),
            wait_keys AS (DELETE FROM linkis_resource_waiting_entry WHERE ticket_id = ANY ($1) RETURNING 1)
        SELECT count(*) FROM gone",
    )
    .bind(&ticket_ids)
    .bind(positions.iter().map(|position| position.claim).collect::<Vec<_>>())
    .fetch_one(connection)
    .await?;
    expect_rows(TABLE.0, ticket_ids.len(), gone.unsigned_abs())
}

/// Returns the EM of a waiting request; `None` if no request waits under this ticket id.
pub async fn em_of(executor: impl PgExecutor<'_>, ticket_id: Uuid) -> Result<Option<EmInstance>, StoreError> {
    let row = sqlx::query(
        "-- waiting::em_of
        SELECT em_application_name, em_instance FROM linkis_resource_waiting WHERE ticket_id = $1",
    )
    .bind(ticket_id)
    .fetch_optional(executor)
    .await?;
    row.map(|row| TABLE.row(&row).em()).transpose()
}

/// Locks the rows of the waiting requests among `ticket_ids`, in their order, and returns the requests. The entries of a locked
/// request neither move nor leave until the transaction ends.
pub async fn lock(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, WaitingRequest>, StoreError> {
    let rows = sqlx::query(
        r#"-- waiting::lock
        SELECT ticket_id, waiting_since, "user", creator, engine_type, em_application_name, em_instance, any_em, resource_type,
            resource::text, labels::text, caps::text, wait_until, claim, kept_until, class, priority
        FROM linkis_resource_waiting WHERE ticket_id = ANY ($1) ORDER BY ticket_id FOR UPDATE"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| list::request(row).map(|request| (request.ticket_id, request)))
}

/// Requests without entries any more.
#[derive(Debug, Default)]
pub struct RemovedRequests {
    /// Number of requests, including those that keep their positions.
    pub requests: u64,
    /// Wait keys of their entries, with the number of requests at each.
    pub wait_keys: FreedKeys,
    /// Their turns, for [`hand`].
    pub turns: Vec<LeftTurn>,
}

/// End of a waiting call, before a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// The call.
    pub claim: Uuid,
    /// Whether the caller may come back: its connection or its instance ended. A request without an id leaves in both cases.
    pub is_absent: bool,
}

/// Returns the claims of an instance: of its calls that wait.
pub async fn claims_of(executor: impl PgExecutor<'_>, instance_id: Uuid) -> Result<Vec<Uuid>, StoreError> {
    let claims = sqlx::query_scalar(
        "-- waiting::claims_of
        SELECT claim FROM linkis_resource_waiting WHERE instance_id = $1 AND claim IS NOT NULL",
    );
    Ok(claims.bind(instance_id).fetch_all(executor).await?)
}

/// Ends waiting calls, in one transaction. Their requests leave the queue, or keep their positions without entries.
pub async fn leave(connection: &mut PgConnection, calls: &[Departure]) -> Result<RemovedRequests, StoreError> {
    let mut transaction = connection.begin().await?;
    let of = |is_absent: bool| calls.iter().filter(move |call| call.is_absent == is_absent).map(|call| call.claim);
    let mut gone: Vec<GoneRequest> = sqlx::query_as(concat!(
        "-- waiting::leave
            DELETE FROM linkis_resource_waiting
            WHERE claim = ANY ($1) OR claim = ANY ($2) AND (request_id IS NULL OR ",
        kept_ms!(),
        " = 0) RETURNING ticket_id, rank_time"
    ))
    .bind(of(false).collect::<Vec<_>>())
    .bind(of(true).collect::<Vec<_>>())
    .fetch_all(&mut *transaction)
    .await?;
    let absent: Vec<Uuid> = of(true).collect();
    if !absent.is_empty() {
        let kept: Vec<GoneRequest> = sqlx::query_as(concat!(
            "-- waiting::keep
                WITH absent AS MATERIALIZED (
                    SELECT ticket_id, \"user\", row_number() OVER (PARTITION BY \"user\" ORDER BY position) AS number
                    FROM linkis_resource_waiting WHERE claim = ANY ($1)),
                room AS MATERIALIZED (
                    SELECT a.\"user\", $2 - count(*) AS room
                    FROM (SELECT DISTINCT \"user\" FROM absent) a CROSS JOIN LATERAL (
                        SELECT FROM linkis_resource_waiting k WHERE k.\"user\" = a.\"user\" AND k.kept_until IS NOT NULL LIMIT $2) k
                    GROUP BY a.\"user\")
                UPDATE linkis_resource_waiting w SET claim = NULL,
                    kept_until = least(w.wait_until, clock_timestamp() + make_interval(secs => ",
            kept_ms!(),
            " / 1000.0)) FROM absent a LEFT JOIN room r ON r.\"user\" = a.\"user\"
                WHERE w.ticket_id = a.ticket_id AND a.number <= coalesce(r.room, $2) RETURNING w.ticket_id, w.rank_time"
        ))
        .bind(&absent)
        .bind(KEPT_OF_USER_MAX)
        .fetch_all(&mut *transaction)
        .await?;
        let over: Vec<GoneRequest> = sqlx::query_as(
            "-- waiting::keep, above the maximum
            DELETE FROM linkis_resource_waiting WHERE claim = ANY ($1) RETURNING ticket_id, rank_time",
        )
        .bind(&absent)
        .fetch_all(&mut *transaction)
        .await?;
        gone.extend(kept);
        gone.extend(over);
    }
    let gone = remove_entries(&mut transaction, gone).await?;
    transaction.commit().await?;
    Ok(gone)
}

/// Ends up to `limit` calls whose instance has been dead for `OVERDUE`, or whose deadline passed as long ago, and up to as many
/// positions that were kept long enough. Skips requests that another transaction has locked. Deletes the rows of instances dead for `FORGOTTEN`, too.
pub async fn sweep(connection: &mut PgConnection, limit: i64) -> Result<RemovedRequests, StoreError> {
    let mut transaction = connection.begin().await?;
    let mut gone: Vec<GoneRequest> = sqlx::query_as(concat!(
        "-- waiting::sweep
            DELETE FROM linkis_resource_waiting d USING (
                SELECT w.ticket_id, w.claim FROM linkis_resource_waiting w
                LEFT JOIN linkis_rm_instance i
                    ON i.instance_id = w.instance_id AND i.alive_until > clock_timestamp() - make_interval(secs => $2)
                WHERE w.kept_until < clock_timestamp() OR w.wait_until < clock_timestamp() - make_interval(secs => $2)
                    OR i.instance_id IS NULL AND (w.request_id IS NULL OR w.kept_until IS NULL AND ",
        kept_ms!(),
        " = 0) LIMIT $1 FOR UPDATE OF w SKIP LOCKED) w
            WHERE d.ticket_id = w.ticket_id AND d.claim IS NOT DISTINCT FROM w.claim
            RETURNING d.ticket_id, d.rank_time"
    ))
    .bind(limit)
    .bind(OVERDUE.as_secs_f64())
    .fetch_all(&mut *transaction)
    .await?;
    let kept: Vec<GoneRequest> = sqlx::query_as(concat!(
        "-- waiting::sweep, kept
            UPDATE linkis_resource_waiting d SET claim = NULL,
                kept_until = least(d.wait_until, clock_timestamp() + make_interval(secs => ",
        kept_ms!(),
        " / 1000.0)) FROM (
                SELECT w.claim FROM linkis_resource_waiting w
                LEFT JOIN linkis_rm_instance i
                    ON i.instance_id = w.instance_id AND i.alive_until > clock_timestamp() - make_interval(secs => $2)
                WHERE i.instance_id IS NULL AND w.request_id IS NOT NULL AND w.claim IS NOT NULL
                LIMIT $1 FOR UPDATE OF w SKIP LOCKED) w
            WHERE d.claim = w.claim
            RETURNING d.ticket_id, d.rank_time"
    ))
    .bind(limit)
    .bind(OVERDUE.as_secs_f64())
    .fetch_all(&mut *transaction)
    .await?;
    gone.extend(kept);
    sqlx::query(
        "-- waiting::sweep, the instances
        DELETE FROM linkis_rm_instance WHERE alive_until < clock_timestamp() - make_interval(secs => $1)",
    )
    .bind(FORGOTTEN.as_secs_f64())
    .execute(&mut *transaction)
    .await?;
    let gone = remove_entries(&mut transaction, gone).await?;
    transaction.commit().await?;
    Ok(gone)
}

/// A request that has left the queue or whose caller is absent: its ticket id and its rank time.
type GoneRequest = (Uuid, Option<OffsetDateTime>);

/// A removed entry: its wait key, its ticket id, and where it took turns.
type RemovedEntry = (String, Uuid, Option<Vec<u8>>, Option<OffsetDateTime>);

/// Deletes the entries in a separate statement: a statement that waited for the request's row would not see entries
/// that were moved meanwhile.
async fn remove_entries(connection: &mut PgConnection, gone: Vec<GoneRequest>) -> Result<RemovedRequests, StoreError> {
    let removed: Vec<RemovedEntry> = sqlx::query_as(
        "-- waiting::remove_entries
        DELETE FROM linkis_resource_waiting_entry WHERE ticket_id = ANY ($1)
        RETURNING wait_key::text, ticket_id, turn_key, own_time",
    )
    .bind(gone.iter().map(|(ticket_id, _)| *ticket_id).collect::<Vec<_>>())
    .fetch_all(&mut *connection)
    .await?;
    let mut freed = FreedKeys::default();
    for (wait_key, ..) in &removed {
        freed.add(parse_wait_key(wait_key)?, 1);
    }
    Ok(RemovedRequests { requests: gone.len() as u64, wait_keys: freed, turns: order::left_turns(&gone, removed) })
}
