//! Locked tickets near their deadline.

use std::time::Duration;

use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{StoreError, rows::TableRow};
use rm_model::operation::ReleaseTicket;

use super::TABLE;

/// Order of tickets by deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DueKey {
    /// Deadline of the ticket.
    pub expires_at: OffsetDateTime,
    /// Ticket id.
    pub ticket_id: Uuid,
}

/// A locked ticket near its deadline, by the clock of the database.
#[derive(Debug)]
pub struct DueTicket {
    /// Key in the order of deadlines; `None` for a ticket that was just granted.
    pub key: Option<DueKey>,
    /// Time until the deadline; zero after it.
    pub within: Duration,
    /// Time since the deadline; zero before it.
    pub late: Duration,
    /// Ticket, user and EM.
    pub ticket: ReleaseTicket,
}

/// Returns up to `limit` locked tickets after `after`, in the order of their deadlines. The deadline is within
/// `horizon`, or passed at most `since` ago (`None`: at any time).
pub async fn due(
    executor: impl PgExecutor<'_>,
    horizon: time::Duration,
    since: Option<Duration>,
    after: Option<DueKey>,
    limit: i64,
) -> Result<Vec<DueTicket>, StoreError> {
    let rows = sqlx::query(
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
    let due = |row: TableRow<'_>| {
        let seconds = row.get("seconds")?;
        let within = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let late = Duration::try_from_secs_f64(-seconds).unwrap_or_default();
        let key = DueKey { expires_at: row.get("expires_at")?, ticket_id: row.get("ticket_id")? };
        let ticket = ReleaseTicket { ticket_id: key.ticket_id, user: row.name("user")?, em: row.em()? };
        Ok(DueTicket { key: Some(key), within, late, ticket })
    };
    // An unreadable row must not block the expiry of the others.
    let log = |error: StoreError| tracing::error!(error = &error as &dyn std::error::Error, "a ticket cannot expire");
    Ok(rows.iter().filter_map(|row| due(TABLE.row(row)).map_err(log).ok()).collect())
}
