//! `linkis_request_id`: which request ids were used, and what was granted under them.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::{FromRow, PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{
    name::Name,
    operation::{Grant, RequestId, RequestRecord},
};

use super::{
    StoreError, expect_rows,
    rows::{Table, em_columns},
};

const TABLE: Table = Table("linkis_request_id");

#[derive(FromRow)]
struct RequestRow {
    request_id: String,
    body_hash: Vec<u8>,
    ticket_id: Uuid,
    em_application_name: String,
    em_instance: String,
    expires_at: OffsetDateTime,
    create_time: OffsetDateTime,
}

impl TryFrom<RequestRow> for RequestRecord {
    type Error = StoreError;

    fn try_from(row: RequestRow) -> Result<Self, StoreError> {
        let id = TABLE.name("request_id", &row.request_id)?;
        let body_hash = row.body_hash.try_into().map_err(|_| StoreError::inconsistent(TABLE.0, "body_hash"))?;
        let em = TABLE.em(&row.em_application_name, &row.em_instance)?;
        Ok(Self {
            request_id: RequestId { id, body_hash },
            grant: Grant {
                ticket_id: row.ticket_id,
                em,
                expires_at: row.expires_at,
                over_watched: Vec::new(),
                queue: None,
                counters: None,
            },
            create_time: row.create_time,
        })
    }
}

/// The records of those among `ids` that were used.
pub async fn read(
    executor: impl PgExecutor<'_>,
    ids: &HashSet<&Name>,
) -> Result<HashMap<Name, RequestRecord>, StoreError> {
    let rows: Vec<RequestRow> = sqlx::query_as(
        "-- request_id::read
        SELECT request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time
        FROM linkis_request_id WHERE request_id = ANY ($1)",
    )
    .bind(ids.iter().map(|id| id.as_str()).collect::<Vec<_>>())
    .fetch_all(executor)
    .await?;
    rows.into_iter()
        .map(|row| RequestRecord::try_from(row).map(|record| (record.request_id.id.clone(), record)))
        .collect()
}

/// Writes records of new grants.
pub async fn insert(connection: &mut PgConnection, records: &[RequestRecord]) -> Result<(), StoreError> {
    // In one order: two instances that write the same ids must not wait for each other.
    let mut records: Vec<&RequestRecord> = records.iter().collect();
    records.sort_by(|a, b| a.request_id.id.cmp(&b.request_id.id));
    let (application_names, instances) = em_columns(records.iter().map(|record| &record.grant.em));
    let done = sqlx::query(
        "-- request_id::insert
        INSERT INTO linkis_request_id (request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at,
            create_time)
        SELECT * FROM unnest($1::text[], $2::bytea[], $3::uuid[], $4::text[], $5::text[], $6::timestamptz[],
            $7::timestamptz[])",
    )
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

/// Removes up to `limit` records older than `history`; true if there may be more.
pub async fn delete_expired(executor: impl PgExecutor<'_>, history: Duration, limit: i64) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- request_id::delete_expired
        DELETE FROM linkis_request_id WHERE request_id = ANY (ARRAY (
            SELECT request_id FROM linkis_request_id WHERE create_time < now() - make_interval(secs => $1)
            ORDER BY create_time LIMIT $2))",
    )
    .bind(history.as_secs_f64())
    .bind(limit)
    .execute(executor)
    .await?;
    Ok(i64::try_from(done.rows_affected()).is_ok_and(|rows| rows == limit))
}
