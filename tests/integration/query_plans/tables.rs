//! Contents of the tables before the calls: few or many rows.

use std::env;

use rm_store::history_partition;

use crate::harness::*;

/// Number of tickets, history lines and scopes with few rows; the number of EMs is a hundredth of it.
pub(super) const FEW: i64 = 2000;

/// Default number with many rows.
pub(super) const MANY: i64 = 20_000;

/// One of this number of tickets is overdue.
const DUE_PER: i64 = 25;

/// Minimum number of overdue tickets, so that batches are equally full with few rows.
const DUE_MIN: i64 = 400;

/// Number of additional tickets of one user on one EM.
const CROWD: i64 = 5000;

/// Id of the last of these tickets, the only used one.
pub(super) const LAST_OF_CROWD: &str = "3fffffff-ffff-4fff-bfff-ffffffffffff";

/// Number of tickets on an EM that is unregistered, and on a lost one.
pub(super) const LEAVING: i64 = 1000;

/// Returns the number of history lines of each ticket with many rows; 1 by default.
fn lines_each() -> i64 {
    env::var("LINKIS_RM_PLANS_LINES").map_or(1, |text| text.parse().unwrap())
}

pub(super) fn due(rows: i64) -> i64 {
    (rows / DUE_PER).max(DUE_MIN)
}

/// Fills the tables with rows that do not concern the calls.
pub(super) async fn fill(database: &Database, rows: i64) {
    let lines = if rows == FEW { 1 } else { lines_each() };
    // The lines are a day old, in a past partition.
    let fill = format!(
        r#"SELECT linkis_rm_make_history_part(hour - 86400, hour - 82800)
            FROM (SELECT extract(epoch FROM date_trunc('hour', now()))::bigint AS hour) h;
        UPDATE linkis_resource_action_record SET action_time = date_trunc('hour', now()) - interval '1 day';
        INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time, version,
            counted_to)
        SELECT 'other', 'host' || n, resource_type, total_resource, protected_resource, used_resource, locked_resource,
            left_resource, over_committed, labels, epoch, register_time, 1, counted_to
        FROM linkis_em_resource_meta_data, generate_series(1, {rows} / 100) n WHERE em_instance LIKE 'template%';
        -- The tickets in thirds, in their order: locked, used, locked.
        INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_locked_resource, labels, locked_time, expires_at)
        SELECT overlay(gen_random_uuid()::text PLACING CASE n % 3 WHEN 0 THEN '0' ELSE 'e' END FROM 1 FOR 1)::uuid,
            'user' || n % 100, 'IDE', '', 'other', 'host' || n % ({rows} / 100), 'LoadInstance',
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}', '{{}}', now(), now() + interval '1 day'
        FROM generate_series(1, {rows}) n WHERE n % 3 <> 1;
        INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_used_resource, labels, locked_time, used_time, engine_application_name, engine_instance)
        SELECT overlay(gen_random_uuid()::text PLACING '7' FROM 1 FOR 1)::uuid,
            'user' || n % 100, 'IDE', '', 'other', 'host' || n % ({rows} / 100), 'LoadInstance',
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}', '{{}}', now(), now(), 'engine', 'e' || n
        FROM generate_series(1, {rows}) n WHERE n % 3 = 1;
        -- The last of so many of one user's is the only one of them that is used.
        INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_locked_resource, labels, locked_time, expires_at)
        SELECT overlay(gen_random_uuid()::text PLACING '3' FROM 1 FOR 1)::uuid, 'crowd', 'IDE', '', 'other', 'crowded',
            'LoadInstance', '{{"memory":1,"cores":1,"instances":1,"instance":1}}', '{{}}', now(), now() + interval '1 day'
        FROM generate_series(1, {CROWD}) n;
        INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_used_resource, labels, locked_time, used_time, engine_application_name, engine_instance)
        VALUES ('{LAST_OF_CROWD}', 'crowd', 'IDE', '', 'other', 'crowded', 'LoadInstance',
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}', '{{}}', now(), now(), 'engine', 'last');
        INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels, em_application_name,
            em_instance, resource_type, resource, actor, action_time)
        SELECT 'granted', ticket_id, "user", creator, engine_type, labels, em_application_name, em_instance, resource_type,
            coalesce(user_locked_resource, user_used_resource), principal, date_trunc('hour', now()) - interval '1 day'
        FROM linkis_user_resource_meta_data, generate_series(1, {lines});
        INSERT INTO linkis_user_request_id ("user", request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at,
            create_time)
        SELECT 'user' || n % 100, n::text, sha256('x'), gen_random_uuid(), 'other', 'host1', now(), now() FROM generate_series(1, {rows}) n;
        INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
        SELECT (SELECT max(label_set_id) FROM linkis_label_set), jsonb_build_object('user', 'other' || n), '{{"cores":1}}', '{{}}',
            sha256(('other' || n)::bytea)
        FROM generate_series(1, {rows}) n;
        INSERT INTO linkis_resource_refusal (period_start, key_hash, instance_id, "user", scope_kind, scope, dimension, rule,
            refusals, last_requested, last_available, last_time)
        SELECT date_trunc('minute', now()) - n % 50 * interval '1 minute', sha256(n::text::bytea), gen_random_uuid(),
            'user' || n % 100, 'em', 'em=any', 'cores', '', 1, 1, 0, now()
        FROM generate_series(1, {rows}) n;
        INSERT INTO linkis_resource_usage_hour (used_by, is_rest, name, em_instance, hour, tickets, core_seconds, byte_seconds,
            queue_core_seconds, queue_byte_seconds)
        SELECT used_by, false, 'user' || n / 20, '', date_trunc('hour', now()) - n % 20 * interval '1 hour', 1, 1, 1, 0, 0
        FROM generate_series(1, {rows} / 4) n, unnest(ARRAY['user', 'creator', 'engine_type', 'em']) used_by;"#
    );
    database.execute(fill).await;
    while history_partition::index_oldest(&mut database.connect().await).await.unwrap() {}
    database.execute("VACUUM ANALYZE").await;
}

/// Adds tickets with counters: overdue, or on an EM that is unregistered or lost.
pub(super) async fn fill_ending(database: &Database, rows: i64) {
    let due = due(rows);
    let fill = format!(
        r#"CREATE TEMPORARY TABLE ending AS
        SELECT CASE WHEN n > {due} + {LEAVING} THEN 'lost' WHEN n > {due} THEN 'leaving' ELSE 'due' || n % ({due} / 100) END AS em,
            CASE WHEN n > {due} THEN 'leaver' ELSE 'due' || n % 100 END AS "user",
            CASE WHEN n > {due} THEN '1 day'::interval ELSE '-1 second'::interval END AS left_to_live
        FROM generate_series(1, {due} + 2 * {LEAVING}) n;
        INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time, version,
            counted_to)
        SELECT em_application_name, em, resource_type, total_resource, protected_resource, used_resource,
            jsonb_build_object('memory', held, 'cores', held, 'instances', held, 'instance', held), left_resource, over_committed,
            labels, epoch, register_time, 1, counted_to
        FROM linkis_em_resource_meta_data, (SELECT em, count(*) AS held FROM ending GROUP BY em) h
        WHERE em_instance LIKE 'template%';
        INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_locked_resource, labels, locked_time, expires_at)
        SELECT gen_random_uuid(), "user", 'IDE', '', em_application_name, em, 'LoadInstance',
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}', '{{}}', now(), now() + left_to_live
        FROM ending, linkis_em_resource_meta_data WHERE em_instance LIKE 'template%';
        INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
        SELECT label_set_id, jsonb_build_object('user', "user"), '{{}}',
            jsonb_build_object('memory', held, 'cores', held, 'instances', held),
            sha256(convert_to(label_set_id || ':{{"user":"' || "user" || '"}}', 'UTF8'))
        FROM linkis_label_set, (SELECT "user", count(*) AS held FROM ending GROUP BY "user") h;
        -- One of the reporting EMs is lost.
        INSERT INTO linkis_em_report (em_application_name, em_instance, epoch, sequence, health, report_time)
        SELECT em_application_name, em_instance, epoch, 1, 'healthy', now() - interval '1 hour'
        FROM linkis_em_resource_meta_data WHERE em_instance = 'lost';"#
    );
    let mut connection = database.connect().await;
    execute(&mut connection, fill).await;
}
