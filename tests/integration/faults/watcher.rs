//! Looks at the database all the while: what has to be true at every commit is true in every snapshot.

use std::time::Duration;

use sqlx::{FromRow, PgConnection};

use super::workload::Shared;

const INTERVAL: Duration = Duration::from_millis(250);

/// What one snapshot shows that must not be.
#[derive(Debug, FromRow)]
struct Wrong {
    /// EMs whose counters are not the sums over their tickets.
    miscounted: Vec<String>,
    /// EMs that are over-committed, and not marked as such by a resize.
    over: Vec<String>,
    /// Tickets on EMs that there are not.
    homeless: i64,
    locks: i64,
}

/// Looks until the workload stops.
pub async fn run(shared: Shared) {
    let mut connection = None;
    while shared.goes_on(INTERVAL).await {
        if connection.is_none() {
            connection = shared.cluster.connect().await.ok();
        }
        let Some(open) = &mut connection else { continue };
        match tokio::time::timeout(Duration::from_secs(10), look(open)).await {
            Ok(Ok(wrong)) => {
                let is_right =
                    wrong.miscounted.is_empty() && wrong.over.is_empty() && wrong.homeless + wrong.locks == 0;
                shared.journal.check(is_right, || format!("{wrong:?}"));
            }
            // The database is away, or its connections are exhausted.
            _ => connection = None,
        }
    }
}

async fn look(connection: &mut PgConnection) -> Result<Wrong, sqlx::Error> {
    sqlx::query_as(
        "WITH held AS (
            SELECT em_application_name, em_instance, key, sum((user_used_resource ->> key)::bigint) AS used,
                sum((user_locked_resource ->> key)::bigint) AS locked
            FROM linkis_user_resource_meta_data, unnest(ARRAY['memory', 'cores', 'instances']) AS key
            GROUP BY em_application_name, em_instance, key),
        counted AS (
            SELECT em_application_name, em_instance, key, (used_resource ->> key)::bigint AS used,
                (locked_resource ->> key)::bigint AS locked,
                (total_resource ->> key)::bigint - (protected_resource ->> key)::bigint AS room, over_committed
            FROM linkis_em_resource_meta_data, unnest(ARRAY['memory', 'cores', 'instances']) AS key)
        SELECT
            ARRAY (SELECT em_instance || ' ' || key FROM counted c LEFT JOIN held h USING (em_application_name, em_instance, key)
                WHERE c.used <> coalesce(h.used, 0) OR c.locked <> coalesce(h.locked, 0)) AS miscounted,
            ARRAY (SELECT em_instance || ' ' || key FROM counted
                WHERE used + locked > room AND NOT over_committed) AS over,
            (SELECT count(*) FROM held h LEFT JOIN counted c USING (em_application_name, em_instance, key)
                WHERE c.used IS NULL) AS homeless,
            (SELECT count(*) FROM linkis_resource_lock) AS locks",
    )
    .fetch_one(connection)
    .await
}
