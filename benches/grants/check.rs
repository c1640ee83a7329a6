//! Check of the database after a run: the tables agree with the replies and with each other.

use sqlx::PgConnection;

use crate::{Failure, report::thousands};

/// Result of the check.
#[derive(Debug)]
pub(crate) struct CheckResult {
    pub text: String,
    pub passed: bool,
}

/// EMs whose counters differ from the sums of their tickets.
const WRONG_EMS: &str = "
    SELECT count(*) FROM linkis_em_resource_meta_data e
    LEFT JOIN (
        SELECT em_application_name, em_instance,
            sum((locked ->> 'memory')::numeric) AS memory_locked, sum((used ->> 'memory')::numeric) AS memory_used,
            sum((locked ->> 'cores')::numeric) AS cores_locked, sum((used ->> 'cores')::numeric) AS cores_used,
            sum((locked ->> 'instances')::numeric) AS instances_locked, sum((used ->> 'instances')::numeric) AS instances_used
        FROM linkis_user_resource_meta_data
        -- The EM part of a resource of a driver and a queue.
        CROSS JOIN LATERAL (SELECT
            coalesce(user_locked_resource -> 'loadInstanceResource', user_locked_resource) AS locked,
            coalesce(user_used_resource -> 'loadInstanceResource', user_used_resource) AS used) r
        GROUP BY em_application_name, em_instance
    ) t USING (em_application_name, em_instance)
    CROSS JOIN LATERAL (VALUES
        ('memory', coalesce(t.memory_locked, 0), coalesce(t.memory_used, 0)),
        ('cores', coalesce(t.cores_locked, 0), coalesce(t.cores_used, 0)),
        ('instances', coalesce(t.instances_locked, 0), coalesce(t.instances_used, 0))) AS d (dimension, locked, used)
    WHERE (e.locked_resource ->> dimension)::numeric IS DISTINCT FROM locked
        OR (e.used_resource ->> dimension)::numeric IS DISTINCT FROM used
        OR (e.left_resource ->> dimension)::numeric
            IS DISTINCT FROM (e.total_resource ->> dimension)::numeric - locked - used";

/// Scopes whose counters differ from the sums of their tickets, and limited users, creators or pairs of them without a
/// counter.
const WRONG_SCOPES: &str = r#"
    WITH sums AS (
        SELECT jsonb_strip_nulls(jsonb_build_object('user', "user", 'creator', creator)) AS scope,
            coalesce(sum((user_locked_resource ->> 'cores')::numeric), 0) AS locked,
            coalesce(sum((user_used_resource ->> 'cores')::numeric), 0) AS used
        FROM linkis_user_resource_meta_data
        GROUP BY GROUPING SETS (("user"), (creator), ("user", creator))),
    limited AS (
        SELECT * FROM sums WHERE (SELECT jsonb_agg(key ORDER BY key COLLATE "C") FROM jsonb_object_keys(scope) AS key)
            IN (SELECT label_set FROM linkis_resource_limit))
    SELECT count(*) FROM linkis_label_resource s FULL JOIN limited t USING (scope)
    WHERE s.scope_hash IS NULL
        OR coalesce((s.locked_resource ->> 'cores')::numeric, 0) IS DISTINCT FROM coalesce(t.locked, 0)
        OR coalesce((s.used_resource ->> 'cores')::numeric, 0) IS DISTINCT FROM coalesce(t.used, 0)"#;

/// External queues whose counters differ from the sums of their tickets. No ticket has an application, so all use is
/// unseen.
const WRONG_QUEUES: &str = "
    SELECT count(*) FROM linkis_external_queue q
    WHERE unseen_memory <> (SELECT coalesce(sum(memory), 0) FROM linkis_external_ticket t
        WHERE t.cluster_id = q.cluster_id AND NOT t.ended AND (t.path = q.path OR starts_with(t.path, q.path || '.')))";

/// Compares the tables with the expected number of tickets.
pub(crate) async fn run(connection: &mut PgConnection, database: &str, tickets: i64) -> Result<CheckResult, Failure> {
    let mut wrong = Vec::new();
    let stored = count(connection, "SELECT count(*) FROM linkis_user_resource_meta_data").await?;
    if stored != tickets {
        wrong.push(format!("{tickets} tickets were granted and not released, but {stored} are stored"));
    }
    for (query, what) in [
        (WRONG_EMS, "EMs have counters that are not the sums over their tickets"),
        (WRONG_SCOPES, "scopes have counters that are not the sums over their tickets"),
        (WRONG_QUEUES, "queues have counters that are not the sums over their tickets"),
        ("SELECT count(*) FROM linkis_resource_lock", "resource locks were left behind"),
    ] {
        let count = count(connection, query).await?;
        if count > 0 {
            wrong.push(format!("{count} {what}"));
        }
    }
    let text = if wrong.is_empty() {
        let tickets = thousands(tickets as f64);
        format!(
            "{tickets} tickets granted and not released = tickets stored; counters = sums over tickets on all EMs and scopes; no resource lock is left"
        )
    } else {
        format!("WRONG: {}", wrong.join("; "))
    };
    Ok(CheckResult { text: format!("checked {database}: {text}"), passed: wrong.is_empty() })
}

async fn count(connection: &mut PgConnection, query: &'static str) -> Result<i64, Failure> {
    Ok(sqlx::query_scalar(query).fetch_one(connection).await?)
}
