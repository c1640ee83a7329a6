//! Pages of waiting requests for operators and users, ordered by position. Entries of dead instances are omitted.
//!
//! Caller: `rm_service::usage`.

use std::collections::BTreeSet;

use sqlx::PgExecutor;

use crate::{StoreError, rows::TableRow};
use rm_model::{
    name::Name,
    wait_queue::{QueuePosition, WaitKey, WaitingRequest},
};

use super::{
    LAST_POSITION, STANDS_MAX, TABLE,
    json::{parse_caps, parse_position, parse_spot, spot_hash},
};

fn waiting(row: TableRow<'_>) -> Result<(QueuePosition, WaitingRequest), StoreError> {
    let (spots, ahead): (Vec<String>, Vec<i64>) = (row.get("spots")?, row.get("ahead")?);
    let ahead = spots.iter().zip(ahead).map(|(spot, ahead)| Ok((parse_spot(spot)?.to_string(), ahead)));
    let waiting = WaitingRequest {
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
        ahead: ahead.collect::<Result<_, StoreError>>()?,
    };
    Ok((parse_position(row.get("position")?)?, waiting))
}

/// Filter of a list of waiting requests. Empty fields match every request.
#[derive(Debug, Default)]
pub struct WaitingFilter {
    /// Users to match.
    pub users: Option<BTreeSet<Name>>,
    /// Wait keys at which a request must be short, all of them.
    pub spots: Vec<WaitKey>,
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
                SELECT s.ticket_id, s.spot::text AS spot, s.spot_hash, s.position FROM linkis_resource_waiting_spot s
                WHERE s.ticket_id = w.ticket_id AND s.is_short OFFSET 0) s),
        -- The first entries of each wait key, once per key.
        first AS MATERIALIZED (
            SELECT k.spot_hash, array_agg(o.position ORDER BY o.position) AS positions
            FROM (SELECT DISTINCT spot_hash FROM short) k CROSS JOIN LATERAL (
                SELECT o.position FROM linkis_rm_instance j CROSS JOIN LATERAL (
                    SELECT o.position FROM linkis_resource_waiting_spot o
                    WHERE o.spot_hash = k.spot_hash AND o.instance_id = j.instance_id AND o.is_short
                    ORDER BY o.spot_hash, o.instance_id, o.position LIMIT $3) o
                WHERE j.alive_until > clock_timestamp()
                ORDER BY o.position LIMIT $3) o
            GROUP BY k.spot_hash)
        SELECT w.ticket_id, w."user", w.creator, w.engine_type, w.em_application_name, w.em_instance, w.any_em,
            w.resource_type, w.resource::text, w.labels::text, w.caps::text, w.waiting_since, w.wait_until,
            w.position, s.spots, s.ahead
        FROM page w CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(s.spot), '{}') AS spots,
                -- The entries up to this one, without itself where it is among them.
                coalesce(array_agg(greatest(0, coalesce(width_bucket(s.position, f.positions)
                    - (s.position <= f.positions[cardinality(f.positions)])::int, 0))::bigint), '{}') AS ahead
            FROM short s LEFT JOIN first f ON f.spot_hash = s.spot_hash
            WHERE s.ticket_id = w.ticket_id) s
        ORDER BY w.position"#
        )
    };
}

/// Requests in the order of their positions.
const ALL: &str = page!(
    "all",
    "SELECT w.* FROM linkis_resource_waiting w
        JOIN linkis_rm_instance i ON i.instance_id = w.instance_id AND i.alive_until > clock_timestamp()
        WHERE w.position > $1 AND w.position <= $6 AND $4::text[] IS NULL AND $5::bytea[] IS NOT NULL
        ORDER BY w.position LIMIT $2"
);

/// Merges the first requests of each user and returns the first of these.
const BY_USERS: &str = page!(
    "by users",
    r#"SELECT w.* FROM unnest($4::text[]) AS u (name) CROSS JOIN LATERAL (
            SELECT w.* FROM linkis_resource_waiting w
            JOIN linkis_rm_instance i ON i.instance_id = w.instance_id AND i.alive_until > clock_timestamp()
            -- Only the index by user has this order: one user may have nearly all.
            WHERE (w."user", w.position) > (u.name, $1) AND (w."user", w.position) <= (u.name, $6) AND NOT EXISTS (
                SELECT FROM unnest($5::bytea[]) AS k (spot_hash) WHERE NOT EXISTS (
                    SELECT FROM linkis_resource_waiting_spot s
                    WHERE s.ticket_id = w.ticket_id AND s.spot_hash = k.spot_hash AND s.is_short))
            ORDER BY w."user", w.position LIMIT $2) w
        ORDER BY w.position LIMIT $2"#
);

/// Requests with an entry at the first of the wait keys.
const BY_SPOTS: &str = page!(
    "by spots",
    r#"SELECT w.* FROM (
            SELECT f.ticket_id FROM linkis_rm_instance i CROSS JOIN LATERAL (
                SELECT f.ticket_id, f.position FROM linkis_resource_waiting_spot f
                WHERE f.spot_hash = ($5::bytea[])[1] AND f.instance_id = i.instance_id AND f.is_short AND f.position > $1
                    AND f.position <= $6 AND NOT EXISTS (
                        SELECT FROM unnest($5::bytea[]) AS k (spot_hash) WHERE NOT EXISTS (
                            SELECT FROM linkis_resource_waiting_spot s
                            WHERE s.ticket_id = f.ticket_id AND s.spot_hash = k.spot_hash AND s.is_short))
                ORDER BY f.spot_hash, f.instance_id, f.position LIMIT $2) f
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
    let sql = match (&filter.users, filter.spots.is_empty()) {
        (Some(_), _) => BY_USERS,
        (None, false) => BY_SPOTS,
        (None, true) => ALL,
    };
    let rows = sqlx::query(sql)
        .bind(after.as_ref().map_or(&[][..], QueuePosition::as_bytes))
        .bind(limit)
        .bind(STANDS_MAX)
        .bind(filter.users.as_ref().map(|users| users.iter().map(Name::as_str).collect::<Vec<_>>()))
        .bind(filter.spots.iter().map(|spot| spot_hash(spot).to_vec()).collect::<Vec<_>>())
        .bind(&LAST_POSITION[..])
        .fetch_all(executor)
        .await?;
    TABLE.parse(&rows, waiting)
}
