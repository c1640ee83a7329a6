//! Watcher: reads snapshots of the database during the run, and asserts the invariants of every commit in each.

use std::{collections::HashMap, time::Duration};

use sqlx::PgConnection;

use super::{journal::Journal, workload::Shared};

const INTERVAL: Duration = Duration::from_millis(400);

/// Maximum delay of an expiry without a fault for as long.
const OVERDUE_MAX: Duration = Duration::from_secs(8);

from_row! {
    /// Violations in one snapshot.
    #[derive(Debug)]
    struct Wrong {
        /// EMs whose counters are not the sums over their tickets.
        miscounted: Vec<String>,
        /// EMs that are over-committed, and not marked as such by a resize.
        over: Vec<String>,
        /// Queues of the cluster in which something else is counted than their tickets hold.
        miscounted_queues: Vec<String>,
        /// Queues with more in them than there is.
        over_queues: Vec<String>,
        /// Tickets on EMs that there are not.
        homeless: i64,
        locks: i64,
    }
}

from_row! {
    /// State that is compared between snapshots.
    #[derive(Debug)]
    struct Seen {
        /// For how long the deadline has passed that passed first, in seconds.
        overdue: f64,
        /// EMs that go, and the registrations whose tickets end with them.
        going: Vec<String>,
        going_epochs: Vec<i64>,
        /// EMs with tickets, and the oldest registration that these are of.
        held: Vec<String>,
        oldest_epochs: Vec<i64>,
    }
}

impl Seen {
    /// Asserts that no deadline has passed for long, and that no ticket outlives its registration.
    fn check(&self, journal: &Journal, ended: &mut HashMap<String, i64>) {
        let calm = journal.calm();
        let is_late = calm > OVERDUE_MAX && self.overdue > OVERDUE_MAX.as_secs_f64();
        journal.check(!is_late, || {
            format!("a deadline passed {} s ago, and nothing was broken for {calm:?}", self.overdue)
        });
        let going: HashMap<_, _> = self.going.iter().zip(&self.going_epochs).collect();
        for (em, oldest) in self.held.iter().zip(&self.oldest_epochs) {
            let outlived = ended.get(em).filter(|epoch| !going.contains_key(em) && *oldest <= **epoch);
            journal.check(outlived.is_none(), || {
                format!("tickets of {em} outlived their registration {oldest}, with {ended:?}")
            });
        }
        ended.extend(going.into_iter().map(|(em, epoch)| (em.clone(), *epoch)));
    }
}

/// Reads snapshots until the workload stops.
pub async fn run(shared: Shared) {
    let (mut connection, mut ended) = (None, HashMap::new());
    while shared.goes_on(INTERVAL).await {
        if connection.is_none() {
            connection = shared.cluster.connect().await.ok();
        }
        let Some(open) = &mut connection else { continue };
        match tokio::time::timeout(Duration::from_secs(10), look(open)).await {
            Ok(Ok((wrong, seen))) => {
                seen.check(&shared.journal, &mut ended);
                let none = [&wrong.miscounted, &wrong.over, &wrong.miscounted_queues, &wrong.over_queues];
                let is_right = none.iter().all(|none| none.is_empty()) && wrong.homeless + wrong.locks == 0;
                shared.journal.check(is_right, || format!("{wrong:?}"));
            }
            // The database is unavailable, or has no free connection.
            _ => connection = None,
        }
    }
}

async fn look(connection: &mut PgConnection) -> Result<(Wrong, Seen), sqlx::Error> {
    let wrong = sqlx::query_as(
        "WITH held AS (
            SELECT em_application_name, em_instance, key,
                sum(coalesce(user_used_resource ->> key, user_used_resource -> 'loadInstanceResource' ->> key)::bigint) AS used,
                sum(coalesce(user_locked_resource ->> key, user_locked_resource -> 'loadInstanceResource' ->> key)::bigint) AS locked
            FROM linkis_user_resource_meta_data, unnest(ARRAY['memory', 'cores', 'instances']) AS key
            GROUP BY em_application_name, em_instance, key),
        counted AS (
            SELECT em_application_name, em_instance, key, (used_resource ->> key)::bigint AS used,
                (locked_resource ->> key)::bigint AS locked,
                (total_resource ->> key)::bigint - (protected_resource ->> key)::bigint AS room, over_committed
            FROM linkis_em_resource_meta_data, unnest(ARRAY['memory', 'cores', 'instances']) AS key),
        -- Nothing of it is ever shown, but for what was in use a minute before the cluster was asked.
        in_queue AS (
            SELECT c.cluster_id, c.generation, q.path, q.unseen_memory AS memory, q.unseen_cores AS cores,
                coalesce(t.memory, 0) AS held_memory, coalesce(t.cores, 0) AS held_cores
            FROM linkis_external_queue q JOIN linkis_external_cluster c USING (cluster_id)
            CROSS JOIN LATERAL (SELECT sum(t.memory) AS memory, sum(t.cores) AS cores FROM linkis_external_ticket t
                WHERE t.cluster_id = q.cluster_id AND NOT t.ended
                    AND (t.used_since IS NULL OR t.application_id IS NOT NULL OR c.begun IS NULL OR t.used_since > c.begun - interval '60 s')
                    AND (t.path = q.path OR starts_with(t.path, q.path || '.'))) t)
        SELECT
            ARRAY (SELECT path FROM in_queue WHERE memory <> held_memory OR cores <> held_cores) AS miscounted_queues,
            ARRAY (SELECT path FROM in_queue i JOIN linkis_external_snapshot s USING (cluster_id, generation, path)
                WHERE i.memory + s.used_memory > s.max_memory OR i.cores + s.used_cores > s.max_cores) AS over_queues,
            ARRAY (SELECT em_instance || ' ' || key FROM counted c LEFT JOIN held h USING (em_application_name, em_instance, key)
                WHERE c.used <> coalesce(h.used, 0) OR c.locked <> coalesce(h.locked, 0)) AS miscounted,
            ARRAY (SELECT em_instance || ' ' || key FROM counted
                WHERE used + locked > room AND NOT over_committed) AS over,
            (SELECT count(*) FROM held h LEFT JOIN counted c USING (em_application_name, em_instance, key)
                WHERE c.used IS NULL) AS homeless,
            (SELECT count(*) FROM linkis_resource_lock) AS locks",
    )
    .fetch_one(&mut *connection)
    .await?;
    let seen = sqlx::query_as(
        "WITH held AS (
            SELECT em_instance AS em, min(em_epoch) AS epoch FROM linkis_user_resource_meta_data GROUP BY em_instance),
        going AS (SELECT em_instance AS em, going_epoch AS epoch FROM linkis_em_resource_meta_data WHERE going_epoch IS NOT NULL)
        SELECT coalesce((SELECT extract(epoch FROM clock_timestamp() - min(expires_at))
                FROM linkis_user_resource_meta_data), 0)::float8 AS overdue,
            ARRAY (SELECT em FROM going ORDER BY em) AS going, ARRAY (SELECT epoch FROM going ORDER BY em) AS going_epochs,
            ARRAY (SELECT em FROM held ORDER BY em) AS held, ARRAY (SELECT epoch FROM held ORDER BY em) AS oldest_epochs",
    )
    .fetch_one(connection)
    .await?;
    Ok((wrong, seen))
}
