//! `linkis_external_ticket`: external amounts of tickets, also of recently ended ones with their last amounts.
//!
//! The batch write changes the rows; each change gets the next change number of its cluster. Callers: the committer,
//! and the refresh and repair of clusters.

use std::collections::{BTreeMap, HashMap};

use sqlx::{PgConnection, PgExecutor};
use tokio_stream::{Stream, StreamExt as _};
use uuid::Uuid;

use rm_model::{
    external::{ClusterTicket, ClusterTicketDelta, QueueHolding, TicketPhase},
    queue::QueueAmounts,
};

use super::{
    StoreError,
    rows::{TableName, TableRow},
};

const TABLE: TableName = TableName("linkis_external_ticket");

fn delta(row: TableRow<'_>) -> Result<ClusterTicketDelta, StoreError> {
    let phase = match row.get("used_since")? {
        Some(since) => TicketPhase::Used { since, application_id: row.get("application_id")? },
        None => TicketPhase::Locked,
    };
    let held = QueueHolding { amounts: QueueAmounts { memory: row.get("memory")?, cores: row.get("cores")? }, phase };
    let ticket = ClusterTicket { cluster_id: row.get("cluster_id")?, path: row.get("path")?, held };
    Ok(ClusterTicketDelta {
        ticket_id: row.get("ticket_id")?,
        ticket,
        change: row.get("change")?,
        ended: row.get("ended")?,
    })
}

/// Returns the external amounts of live tickets. The amounts cannot change while the caller owns the locks of their
/// EMs.
pub async fn read(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, ClusterTicket>, StoreError> {
    let rows = sqlx::query(
        "-- external_ticket::read
        SELECT ticket_id, cluster_id, path, memory, cores, used_since, application_id, change, ended
        FROM linkis_external_ticket WHERE ticket_id = ANY ($1) AND NOT ended",
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| delta(row).map(|delta| (delta.ticket_id, delta.ticket)))
}

/// Returns up to `limit` tickets of a cluster that changed after `change`, ordered by change number.
pub async fn changed(
    executor: impl PgExecutor<'_>,
    cluster_id: i64,
    change: i64,
    limit: usize,
) -> Result<Vec<ClusterTicketDelta>, StoreError> {
    let rows = sqlx::query(
        "-- external_ticket::changed
        SELECT ticket_id, cluster_id, path, memory, cores, used_since, application_id, change, ended
        FROM linkis_external_ticket WHERE cluster_id = $1 AND change > $2 ORDER BY cluster_id, change LIMIT $3",
    )
    .bind(cluster_id)
    .bind(change)
    .bind(i64::try_from(limit).unwrap_or(i64::MAX))
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, delta)
}

/// Streams all live tickets of a cluster, in no order.
pub fn live(
    connection: &mut PgConnection,
    cluster_id: i64,
) -> impl Stream<Item = Result<ClusterTicketDelta, StoreError>> + Unpin {
    let rows = sqlx::query(
        "-- external_ticket::live
        SELECT ticket_id, cluster_id, path, memory, cores, used_since, application_id, change, ended
        FROM linkis_external_ticket WHERE cluster_id = $1 AND NOT ended",
    )
    .bind(cluster_id)
    .fetch(connection);
    rows.map(|row| delta(TABLE.row(&row?)))
}

/// Returns the first tickets that count in queues of a cluster and have no live ticket row, with their queue paths.
pub async fn strays(executor: impl PgExecutor<'_>, cluster_id: i64) -> Result<BTreeMap<Uuid, String>, StoreError> {
    const LIMIT: i64 = 1000;
    let rows: Vec<(Uuid, String)> = sqlx::query_as(
        "-- external_ticket::strays
        SELECT t.ticket_id, t.path FROM linkis_external_ticket t
        WHERE t.cluster_id = $1 AND NOT t.ended
            AND NOT EXISTS (SELECT FROM linkis_user_resource_meta_data u WHERE u.ticket_id = t.ticket_id)
        LIMIT $2",
    )
    .bind(cluster_id)
    .bind(LIMIT)
    .fetch_all(executor)
    .await?;
    Ok(rows.into_iter().collect())
}

/// Deletes external tickets. The caller owns the lock of their cluster.
pub async fn delete(executor: impl PgExecutor<'_>, ticket_ids: &[Uuid]) -> Result<(), StoreError> {
    sqlx::query(
        "-- external_ticket::delete
        DELETE FROM linkis_external_ticket WHERE ticket_id = ANY ($1)",
    )
    .bind(ticket_ids)
    .execute(executor)
    .await?;
    Ok(())
}

/// Returns the live tickets of YARN applications, as far as the engines have reported their application id.
pub async fn of_applications(
    executor: impl PgExecutor<'_>,
    cluster_name: &str,
    application_ids: &[&str],
) -> Result<HashMap<String, Uuid>, StoreError> {
    let rows: Vec<(String, Uuid)> = sqlx::query_as(
        "-- external_ticket::of_applications
        SELECT t.application_id, t.ticket_id
        FROM unnest($2::text[]) AS k (application_id)
        JOIN linkis_external_ticket t ON t.application_id = k.application_id AND NOT t.ended
        JOIN linkis_external_cluster c ON c.cluster_id = t.cluster_id AND c.name = $1",
    )
    .bind(cluster_name)
    .bind(application_ids)
    .fetch_all(executor)
    .await?;
    Ok(rows.into_iter().collect())
}
