//! `linkis_user_request_id`: the request ids that each user has used, and the grant of each.
//!
//! Invariant: one user and one id have one ticket. An id that waits is in `linkis_resource_waiting` alone. Callers: the check and the batch, by `rm_service::read_state`; the
//! retention.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::{PgConnection, PgExecutor};
use uuid::Uuid;

use rm_model::{
    name::Name,
    operation::{Grant, KeptPosition, PlacedRequest, RequestId, RequestKey, RequestRecord},
};

use super::{
    StoreError, expect_rows,
    rows::{TableName, TableRow, em_columns},
    waiting::parse_position,
};

const TABLE: TableName = TableName("linkis_user_request_id");

fn record(row: TableRow<'_>) -> Result<RequestRecord, StoreError> {
    let id = row.name("request_id")?;
    let body_hash = row.get::<&[u8]>("body_hash")?.try_into().map_err(|_| row.wrong("body_hash"))?;
    Ok(RequestRecord {
        user: row.name("user")?,
        request_id: RequestId { id, body_hash },
        grant: Grant {
            ticket_id: row.get("ticket_id")?,
            em: row.em()?,
            expires_at: row.get("expires_at")?,
            advisory_violations: Vec::new(),
            queue: None,
            counters: None,
        },
        create_time: row.get("create_time")?,
    })
}

/// Used request ids.
#[derive(Debug, Default)]
pub struct UsedIds {
    /// Grants.
    pub granted: HashMap<RequestKey, RequestRecord>,
    /// Positions in the wait queue.
    pub kept: HashMap<RequestKey, KeptPosition>,
}

impl UsedIds {
    /// Returns the ticket id of the position of a request's id.
    pub fn kept_ticket(&self, request: &PlacedRequest) -> Option<Uuid> {
        let key = request.ask.request_key()?;
        Some(self.kept.get(&key)?.position.ticket_id())
    }

    /// Returns the ticket ids of the positions.
    pub fn kept_tickets(&self) -> impl Iterator<Item = Uuid> {
        self.kept.values().map(|kept| kept.position.ticket_id())
    }
}

/// Returns those `asked` pairs of user and request id that have been used.
///
/// # Errors
/// Database errors.
pub async fn read(connection: &mut PgConnection, asked: &HashSet<(&Name, &RequestId)>) -> Result<UsedIds, StoreError> {
    let (users, ids): (Vec<&str>, Vec<&str>) = asked.iter().map(|(user, id)| (user.as_str(), id.id.as_str())).unzip();
    let rows = sqlx::query(
        r#"-- request_id::read
        SELECT r."user", r.request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time,
            NULL::bytea AS position, NULL::uuid AS claim
        FROM unnest($1::text[], $2::text[]) AS k ("user", request_id)
        JOIN linkis_user_request_id r ON r."user" = k."user" AND r.request_id = k.request_id
        UNION ALL
        SELECT w."user", w.request_id, w.body_hash, w.ticket_id, w.em_application_name, w.em_instance, w.wait_until,
            w.waiting_since, w.position, w.claim
        FROM unnest($1::text[], $2::text[]) AS k ("user", request_id)
        CROSS JOIN LATERAL (
            SELECT * FROM linkis_resource_waiting w WHERE w."user" = k."user" AND w.request_id = k.request_id OFFSET 0) w"#,
    )
    .bind(users)
    .bind(ids)
    .fetch_all(&mut *connection)
    .await?;
    let mut used = UsedIds::default();
    for row in rows.iter().map(|row| TABLE.row(row)) {
        let record = record(row)?;
        match row.get::<Option<&[u8]>>("position")? {
            Some(position) => {
                let (position, body_hash) = (parse_position(position)?, record.request_id.body_hash);
                used.kept.insert(record.key(), KeptPosition { body_hash, claim: row.get("claim")?, position });
            }
            None => drop(used.granted.insert(record.key(), record)),
        }
    }
    Ok(used)
}

/// Inserts the records of new grants.
///
/// # Errors
/// [`StoreError::is_race`] if the same id was used on another EM at the same moment; database errors.
pub async fn insert(connection: &mut PgConnection, records: &[RequestRecord]) -> Result<(), StoreError> {
    // Sorted, so that two instances that insert the same ids cannot deadlock.
    let mut records: Vec<&RequestRecord> = records.iter().collect();
    records.sort_by_cached_key(|record| record.key());
    let (application_names, instances) = em_columns(records.iter().map(|record| &record.grant.em));
    let done = sqlx::query(
        r#"-- request_id::insert
        INSERT INTO linkis_user_request_id ("user", request_id, body_hash, ticket_id, em_application_name, em_instance,
            expires_at, create_time)
        SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[], $4::uuid[], $5::text[], $6::text[], $7::timestamptz[],
            $8::timestamptz[])"#,
    )
    .bind(records.iter().map(|record| record.user.as_str()).collect::<Vec<_>>())
    .bind(records.iter().map(|record| record.request_id.id.as_str()).collect::<Vec<_>>())
    .bind(records.iter().map(|record| record.request_id.body_hash.as_slice()).collect::<Vec<_>>())
    .bind(records.iter().map(|record| record.grant.ticket_id).collect::<Vec<_>>())
    .bind(application_names)
    .bind(instances)
    .bind(records.iter().map(|record| record.grant.expires_at).collect::<Vec<_>>())
    .bind(records.iter().map(|record| record.create_time).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, records.len(), done.rows_affected())
}

/// Deletes up to `limit` records older than `history`. Returns whether more may exist.
pub async fn delete_expired(executor: impl PgExecutor<'_>, history: Duration, limit: i64) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- request_id::delete_expired
        DELETE FROM linkis_user_request_id WHERE ctid = ANY (ARRAY (
            SELECT ctid FROM linkis_user_request_id WHERE create_time < now() - make_interval(secs => $1)
            ORDER BY create_time LIMIT $2))",
    )
    .bind(history.as_secs_f64())
    .bind(limit)
    .execute(executor)
    .await?;
    Ok(i64::try_from(done.rows_affected()).is_ok_and(|rows| rows == limit))
}
