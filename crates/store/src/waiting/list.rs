//! Pages of waiting requests for operators and users, ordered by position. Calls of dead instances are omitted; absent callers are not.
//!
//! Caller: `rm_service::usage`.

use std::collections::{BTreeMap, BTreeSet};

use sqlx::PgExecutor;
use uuid::Uuid;

use crate::{StoreError, rows::TableRow};
use rm_model::{
    name::Name,
    selector::EmSelector,
    wait_queue::{QueuePosition, WaitKey, WaitingRequest},
};

use super::{
    ENTRIES_MAX, LAST_POSITION, TABLE,
    json::{parse_caps, parse_em_conditions, parse_position, parse_wait_key, wait_key_hash},
    order::class,
};

fn waiting(row: TableRow<'_>) -> Result<(QueuePosition, WaitingRequest), StoreError> {
    let (wait_keys, ahead): (Vec<String>, Vec<i64>) = (row.get("wait_keys")?, row.get("ahead")?);
    let ahead = wait_keys.iter().zip(ahead).map(|(wait_key, ahead)| Ok((parse_wait_key(wait_key)?.to_string(), ahead)));
    let waiting = WaitingRequest { ahead: ahead.collect::<Result<_, StoreError>>()?, ..request(row)? };
    Ok((parse_position(row.get("position")?)?, waiting))
}

/// Returns the request of a row, without its entries.
pub(super) fn request(row: TableRow<'_>) -> Result<WaitingRequest, StoreError> {
    Ok(WaitingRequest {
        ticket_id: row.get("ticket_id")?,
        waiting_since: row.get("waiting_since")?,
        user: row.name("user")?,
        creator: row.name("creator")?,
        em: row.em()?,
        any_em: row.get("any_em")?,
        resource: row.resource("resource", row.resource_type()?)?,
        labels: row.labels("labels")?,
        caps: parse_caps(row.get("caps")?)?,
        engine_type: row.get("engine_type")?,
        wait_until: row.get("wait_until")?,
        claim: row.get("claim")?,
        kept_until: row.get("kept_until")?,
        class: class(row)?,
        priority: row.get("priority")?,
        ahead: BTreeMap::new(),
    })
}

/// Filter of a list of waiting requests. Empty fields match every request.
#[derive(Debug, Default)]
pub struct WaitingFilter {
    /// Users to match.
    pub users: Option<BTreeSet<Name>>,
    /// Wait keys at which a request must be short, all of them.
    pub wait_keys: Vec<WaitKey>,
}

/// SQL of a page of the requests that `$first` selects; only for these the entries are read. Parameters: $1 last
/// position of the previous page, $2 maximum of requests, $3 maximum of entries per wait key. Filters: $4 users, $5
/// hashes of wait keys, $6 a position after all others.
macro_rules! page {
    ($name:literal, $first:literal) => {
        concat!(
            "-- waiting::list, ",
            $name,
            r#"
        WITH page AS MATERIALIZED ("#,
            $first,
            r#"),
        short AS MATERIALIZED (
            SELECT s.* FROM page w CROSS JOIN LATERAL (
                SELECT s.ticket_id, s.wait_key::text AS wait_key, s.wait_key_hash, s.position FROM linkis_resource_waiting_entry s
                WHERE s.ticket_id = w.ticket_id AND s.is_short OFFSET 0) s),
        -- The first entries of each wait key, once per key.
        first AS MATERIALIZED (
            SELECT k.wait_key_hash, array_agg(o.position ORDER BY o.position) AS positions
            FROM (SELECT DISTINCT wait_key_hash FROM short) k CROSS JOIN LATERAL (
                SELECT o.position FROM linkis_rm_instance j CROSS JOIN LATERAL (
                    SELECT o.position FROM linkis_resource_waiting_entry o
                    WHERE o.wait_key_hash = k.wait_key_hash AND o.instance_id = j.instance_id AND o.is_short
                    ORDER BY o.wait_key_hash, o.instance_id, o.position LIMIT $3) o
                WHERE j.alive_until > clock_timestamp()
                ORDER BY o.position LIMIT $3) o
            GROUP BY k.wait_key_hash)
        SELECT w.ticket_id, w."user", w.creator, w.engine_type, w.em_application_name, w.em_instance, w.any_em,
            w.resource_type, w.resource::text, w.labels::text, w.caps::text, w.waiting_since, w.wait_until,
            w.claim, w.kept_until, w.class, w.priority, w.position, s.wait_keys, s.ahead
        FROM page w CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(s.wait_key), '{}') AS wait_keys,
                -- The entries up to this one, without itself where it is among them.
                coalesce(array_agg(greatest(0, coalesce(width_bucket(s.position, f.positions)
                    - (s.position <= f.positions[cardinality(f.positions)])::int, 0))::bigint), '{}') AS ahead
            FROM short s LEFT JOIN first f ON f.wait_key_hash = s.wait_key_hash
            WHERE s.ticket_id = w.ticket_id) s
        ORDER BY w.position"#
        )
    };
}

/// Requests in the order of their positions.
const ALL: &str = page!(
    "all",
    "SELECT w.* FROM linkis_resource_waiting w
        LEFT JOIN linkis_rm_instance i ON i.instance_id = w.instance_id AND i.alive_until > clock_timestamp()
        WHERE (i.instance_id IS NOT NULL OR w.kept_until > clock_timestamp()) AND w.position > $1 AND w.position <= $6 AND $4::text[] IS NULL AND $5::bytea[] IS NOT NULL
        ORDER BY w.position LIMIT $2"
);

/// Merges the first requests of each user and returns the first of these.
const BY_USERS: &str = page!(
    "by users",
    r#"SELECT w.* FROM unnest($4::text[]) AS u (name) CROSS JOIN LATERAL (
            SELECT w.* FROM linkis_resource_waiting w
            LEFT JOIN linkis_rm_instance i ON i.instance_id = w.instance_id AND i.alive_until > clock_timestamp()
            -- Only the index by user has this order: one user may have nearly all.
            WHERE (i.instance_id IS NOT NULL OR w.kept_until > clock_timestamp()) AND (w."user", w.position) > (u.name, $1) AND (w."user", w.position) <= (u.name, $6) AND NOT EXISTS (
                SELECT FROM unnest($5::bytea[]) AS k (wait_key_hash) WHERE NOT EXISTS (
                    SELECT FROM linkis_resource_waiting_entry s
                    WHERE s.ticket_id = w.ticket_id AND s.wait_key_hash = k.wait_key_hash AND s.is_short))
            ORDER BY w."user", w.position LIMIT $2) w
        ORDER BY w.position LIMIT $2"#
);

/// Requests with an entry at the first of the wait keys.
const BY_WAIT_KEYS: &str = page!(
    "by wait keys",
    r#"SELECT w.* FROM (
            SELECT f.ticket_id FROM linkis_rm_instance i CROSS JOIN LATERAL (
                SELECT f.ticket_id, f.position FROM linkis_resource_waiting_entry f
                WHERE f.wait_key_hash = ($5::bytea[])[1] AND f.instance_id = i.instance_id AND f.is_short AND f.position > $1
                    AND f.position <= $6 AND NOT EXISTS (
                        SELECT FROM unnest($5::bytea[]) AS k (wait_key_hash) WHERE NOT EXISTS (
                            SELECT FROM linkis_resource_waiting_entry s
                            WHERE s.ticket_id = f.ticket_id AND s.wait_key_hash = k.wait_key_hash AND s.is_short))
                ORDER BY f.wait_key_hash, f.instance_id, f.position LIMIT $2) f
            WHERE i.alive_until > clock_timestamp() AND $4::text[] IS NULL
            ORDER BY f.position LIMIT $2) f
        -- The offset keeps it a look-up by key.
        CROSS JOIN LATERAL (SELECT * FROM linkis_resource_waiting w WHERE w.ticket_id = f.ticket_id OFFSET 0) w"#
);

/// Returns up to `limit` matching requests after the position `after`, ordered by position, each with its position.
pub async fn list(
    executor: impl PgExecutor<'_>,
    filter: &WaitingFilter,
    after: Option<QueuePosition>,
    limit: i64,
) -> Result<Vec<(QueuePosition, WaitingRequest)>, StoreError> {
    // A separate SQL text per index.
    let sql = match (&filter.users, filter.wait_keys.is_empty()) {
        (Some(_), _) => BY_USERS,
        (None, false) => BY_WAIT_KEYS,
        (None, true) => ALL,
    };
    let rows = sqlx::query(sql)
        .bind(after.as_ref().map_or(&[][..], QueuePosition::as_bytes))
        .bind(limit)
        .bind(ENTRIES_MAX)
        .bind(filter.users.as_ref().map(|users| users.iter().map(Name::as_str).collect::<Vec<_>>()))
        .bind(filter.wait_keys.iter().map(|wait_key| wait_key_hash(wait_key).to_vec()).collect::<Vec<_>>())
        .bind(&LAST_POSITION[..])
        .fetch_all(executor)
        .await?;
    TABLE.parse(&rows, waiting)
}

/// A waiting request with a caller.
#[derive(Debug)]
pub struct PresentRequest {
    /// The position.
    pub position: QueuePosition,
    /// The request.
    pub request: WaitingRequest,
    /// Conditions on the EM, without preferences; `None` if the request names its EM, or an earlier release has stored it.
    pub selector: Option<EmSelector>,
}

/// Requests with callers, in the order of their positions.
#[derive(Debug)]
pub struct PresentPage {
    /// The requests. A row that cannot be read is logged and left out: it must not block the others.
    pub requests: Vec<PresentRequest>,
    /// Position of the last row; `None` at the end of the queues.
    pub last: Option<QueuePosition>,
}

/// Returns the requests with callers: up to `limit` after the position `after`, and those of `ticket_ids`.
pub async fn present(
    executor: impl PgExecutor<'_>,
    after: Option<QueuePosition>,
    limit: i64,
    ticket_ids: &[Uuid],
) -> Result<PresentPage, StoreError> {
    let rows = sqlx::query(
        r#"-- waiting::present
        SELECT w.ticket_id, w."user", w.creator, w.engine_type, w.em_application_name, w.em_instance, w.any_em, w.resource_type,
            w.resource::text, w.labels::text, w.caps::text, w.waiting_since, w.wait_until, w.claim, w.kept_until, w.class, w.priority,
            w.position, w.em_selector::text
        FROM (
            (SELECT w.* FROM linkis_resource_waiting w JOIN linkis_rm_instance i ON i.instance_id = w.instance_id
                WHERE i.alive_until > clock_timestamp() AND w.claim IS NOT NULL AND w.position > $1 ORDER BY w.position LIMIT $2)
            UNION ALL
            (SELECT w.* FROM linkis_resource_waiting w JOIN linkis_rm_instance i ON i.instance_id = w.instance_id
                WHERE i.alive_until > clock_timestamp() AND w.claim IS NOT NULL AND w.ticket_id = ANY ($3))
        ) w ORDER BY w.position"#,
    )
    .bind(after.as_ref().map_or(&[][..], QueuePosition::as_bytes))
    .bind(limit)
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    let readable = rows.iter().filter_map(|row| {
        let request = present_request(TABLE.row(row));
        request.inspect_err(|error| tracing::error!(error = %error, "a waiting request cannot be read")).ok()
    });
    let is_full = i64::try_from(rows.len()).is_ok_and(|count| count >= limit);
    let last =
        rows.last().filter(|_| is_full).map(|row| parse_position(TABLE.row(row).get("position")?)).transpose()?;
    Ok(PresentPage { requests: readable.collect(), last })
}

fn present_request(row: TableRow<'_>) -> Result<PresentRequest, StoreError> {
    let selector: Option<&str> = row.get("em_selector")?;
    Ok(PresentRequest {
        position: parse_position(row.get("position")?)?,
        request: request(row)?,
        selector: selector.map(parse_em_conditions).transpose()?,
    })
}
