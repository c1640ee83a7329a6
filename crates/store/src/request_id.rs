//! `linkis_user_request_id`: the request ids that each user has used, and the grant of each.
//!
//! Earlier releases wrote `linkis_request_id`, where an id is one name for all users. The rows are read until they
//! expire, and no row is added. A row there belongs to the user of its ticket, and so to a request with the same body,
//! which names the user.
//!
//! Invariant: one user and one id have one ticket, in either of the two tables. Callers: the check and the batch, by
//! `rm_service::read_state`; the retention.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::{PgConnection, PgExecutor};
use uuid::Uuid;

use rm_model::{
    name::Name,
    operation::{Grant, RequestId, RequestKey, RequestRecord},
};

use super::{
    StoreError, action_record, expect_rows,
    rows::{TableName, TableRow, em_columns},
    user_resource,
};

const TABLE: TableName = TableName("linkis_user_request_id");

fn record(row: TableRow<'_>, user: Name) -> Result<RequestRecord, StoreError> {
    let id = row.name("request_id")?;
    let body_hash = row.get::<&[u8]>("body_hash")?.try_into().map_err(|_| row.wrong("body_hash"))?;
    Ok(RequestRecord {
        user,
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

/// Returns the records of those `asked` pairs of user and request id that have been used.
///
/// # Errors
/// Database errors.
pub async fn read(
    connection: &mut PgConnection,
    asked: &HashSet<(&Name, &RequestId)>,
) -> Result<HashMap<RequestKey, RequestRecord>, StoreError> {
    let (users, ids): (Vec<&str>, Vec<&str>) = asked.iter().map(|(user, id)| (user.as_str(), id.id.as_str())).unzip();
    let rows = sqlx::query(
        r#"-- request_id::read
        SELECT r."user", r.request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time
        FROM unnest($1::text[], $2::text[]) AS k ("user", request_id)
        JOIN linkis_user_request_id r ON r."user" = k."user" AND r.request_id = k.request_id
        UNION ALL
        SELECT NULL, request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time
        FROM linkis_request_id WHERE request_id = ANY ($2)"#,
    )
    .bind(users)
    .bind(ids)
    .fetch_all(&mut *connection)
    .await?;
    let (mut records, mut earlier) = (HashMap::with_capacity(rows.len()), Vec::new());
    for row in rows.iter().map(|row| TABLE.row(row)) {
        // `None` in rows of earlier releases.
        match row.get("user")? {
            Some(user) => {
                let record = record(row, TABLE.name("user", user)?)?;
                records.insert(record.key(), record);
            }
            None => earlier.push(row),
        }
    }
    if !earlier.is_empty() {
        add_earlier(connection, asked, earlier, &mut records).await?;
    }
    Ok(records)
}

/// Adds the rows of earlier releases that belong to a user in `asked`.
async fn add_earlier(
    connection: &mut PgConnection,
    asked: &HashSet<(&Name, &RequestId)>,
    earlier: Vec<TableRow<'_>>,
    records: &mut HashMap<RequestKey, RequestRecord>,
) -> Result<(), StoreError> {
    let (mut of_user, mut of_others) = (Vec::new(), Vec::new());
    for row in earlier {
        let (id, body_hash): (&str, &[u8]) = (row.get("request_id")?, row.get("body_hash")?);
        match asked.iter().find(|(_, asked)| asked.id.as_str() == id && asked.body_hash.as_slice() == body_hash) {
            Some((user, _)) => of_user.push(((*user).clone(), row)),
            None => of_others.push((row.get("ticket_id")?, row)),
        }
    }
    if !of_others.is_empty() {
        // A row with another body belongs to the user of its ticket. The id is used for that user and free for others.
        let ticket_ids: Vec<Uuid> = of_others.iter().map(|(ticket_id, _)| *ticket_id).collect();
        let live = user_resource::read(&mut *connection, &ticket_ids).await?;
        let ended = action_record::read(connection, &ticket_ids).await?;
        for (ticket_id, row) in of_others {
            let live = live.get(&ticket_id).map(|ticket| &ticket.user);
            let user = live.or(ended.get(&ticket_id).map(|ended| &ended.user));
            of_user.extend(user.map(|user| (user.clone(), row)));
        }
    }
    for (user, row) in of_user {
        let record = record(row, user)?;
        records.entry(record.key()).or_insert(record);
    }
    Ok(())
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

/// Deletes up to `limit` records of earlier releases older than `history`. Returns whether more may exist.
pub async fn delete_earlier(executor: impl PgExecutor<'_>, history: Duration, limit: i64) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "-- request_id::delete_earlier
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
