//! Tables of the database: the rows that are compared after each segment, and the changes that a chapter makes by SQL.
//!
//! No other module of the journal has SQL of the service's tables. Callers: `run` and `replay`.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};
use sqlx::{AssertSqlSafe, PgPool, Row as _};

use crate::{
    allowed::Allowed,
    file::Table,
    ids::{Ids, replaced},
};

/// Compared tables: the order of their rows, and the columns that are not compared, in addition to time columns.
///
/// Identity columns are not compared, because sequences have gaps. If the primary key is an identifier, other columns order the rows.
const TABLES: &[(&str, &str, &[&str])] = &[
    ("linkis_em_meta_data", "em_name", &["id"]),
    // The digest is an exclusive or of UUIDs; versions count batches; the last columns are progress of background tasks.
    (
        "linkis_em_resource_meta_data",
        "em_application_name, em_instance",
        &[
            "id",
            "used_tickets_xor",
            "version",
            "epoch",
            "going_epoch",
            "going_after",
            "going_end",
            "counted_to",
            "counting_to",
            "counted_after",
        ],
    ),
    ("linkis_user_resource_meta_data", "ticket_id", &["id", "em_epoch"]),
    ("linkis_user_request_id", "create_time, request_id", &[]),
    // `before` and `after` are JSON for display, with times and versions.
    ("linkis_resource_action_record", "id", &["id", "address", "before", "after"]),
    ("linkis_resource_lock", "scope, \"user\", em_application_name, em_instance", &[]),
    // The scope orders the counters, because the id of a label set is not compared.
    ("linkis_label_resource", "scope_hash", &["label_set_id", "version"]),
    ("linkis_label_set", "label_set_id", &["label_set_id"]),
    // The EM of the last decision of a request for any EM changes with each poll; the position is a time.
    (
        "linkis_resource_waiting",
        "position",
        &["instance_id", "position", "em_application_name", "em_instance", "claim", "waiting_scopes"],
    ),
    ("linkis_resource_waiting_entry", "position, wait_key", &["instance_id", "position"]),
    ("linkis_resource_hold", "scope, \"user\", em_application_name, em_instance", &[]),
    (
        "linkis_em_report",
        "em_application_name, em_instance",
        &["epoch", "any_missed", "idle_tickets", "idle_tickets_xor"],
    ),
    ("linkis_em_drain", "em_application_name, em_instance", &[]),
    ("linkis_resource_limit", "pattern_hash", &["etag"]),
    ("linkis_external_resource_provider", "resource_type, name", &["etag"]),
];
// These tables are not compared.
// - Only identifiers: linkis_resource_limit_version, linkis_resource_limit_change, linkis_resource_action_horizon.
// - Packed identifiers: linkis_em_observed.
// - Written by periodic tasks: linkis_reclaim, linkis_reclaim_writer, linkis_resource_refusal, linkis_resource_usage_hour, linkis_resource_usage_progress, linkis_user_sum,
//   linkis_user_sum_progress, linkis_rm_cluster_figure, and those of external clusters.
// - Rows of instances: linkis_rm_lease, linkis_rm_instance, linkis_rm_server.
// - Set by no call of the journal: linkis_queue_order, linkis_queue_priority, linkis_reclaim_policy.
// - Tokens, which no call writes: linkis_rm_token. Each instance decides when it writes the time of the last use.

/// Returns the compared tables with their hashes, without identifiers and times. Passes their rows to `dump`.
pub async fn tables(pool: &PgPool, ids: &Ids, allowed: &Allowed, dump: &mut dyn FnMut(&str, &[String])) -> Vec<Table> {
    let mut tables = Vec::new();
    for (name, order, left_out) in TABLES {
        if allowed.is_left_out("table", name) {
            continue;
        }
        let now = allowed.name("table", name);
        let columns = sqlx::query(
            "SELECT column_name::text, data_type::text FROM information_schema.columns WHERE table_schema = 'public' AND table_name = $1
                ORDER BY column_name",
        );
        let columns = columns.bind(now).fetch_all(pool).await.unwrap();
        // By the recorded names, whose order the rows have.
        let absent = allowed.absent(name).into_iter().map(|(column, value)| (column, format!("'{value}'")));
        let mut kept: BTreeMap<String, String> = absent.collect();
        for column in columns {
            let (column, kind): (String, String) = (column.get(0), column.get(1));
            let old = allowed.old_column(name, &column);
            if !kind.starts_with("timestamp")
                && !left_out.contains(&&*old)
                && !allowed.is_left_out("column", &format!("{name}.{old}"))
            {
                kept.insert(old, format!("coalesce(\"{column}\"::text, '-')"));
            }
        }
        let selected: Vec<&str> = kept.values().map(String::as_str).collect();
        let order: Vec<&str> = order.split(", ").map(|old| allowed.column(name, old)).collect();
        let sql = format!(
            "SELECT ARRAY[{}]::text[] FROM \"{now}\" {} ORDER BY {}",
            selected.join(", "),
            renamed(rows_of(name), allowed),
            order.join(", ")
        );
        let rows = sqlx::query_scalar::<_, Vec<String>>(AssertSqlSafe(sql)).fetch_all(pool).await;
        let row = |values: &Vec<String>| {
            let values: Vec<&str> = values.iter().map(|value| allowed.old_name("word", value)).collect();
            replaced(&values.join(" | "), |uuid| ids.known(uuid))
        };
        let rows: Vec<String> = match rows {
            Ok(rows) => rows.iter().map(row).collect(),
            Err(error) => vec![format!("cannot be read: {error}")],
        };
        dump(name, &rows);
        let hash = Sha256::digest(rows.join("\n"));
        let hash = u64::from_be_bytes(hash[..8].try_into().unwrap());
        let columns = kept.into_keys().collect();
        tables.push(Table { name: (*name).to_owned(), columns, rows: rows.len() as u64, hash });
    }
    tables
}

/// Deletes the history, because its lines of created tokens name the account of this machine.
pub async fn remove_history(pool: &PgPool, allowed: &Allowed) {
    let sql = renamed("DELETE FROM linkis_resource_action_record", allowed);
    sqlx::query(AssertSqlSafe(sql)).execute(pool).await.unwrap();
}

/// Changes by SQL instead of a call: the name, the statement, and the condition that must hold before the next call.
const CHANGES: &[(&str, &str, &str)] = &[
    // The deadline of a ticket passes.
    (
        "expire_ticket",
        "UPDATE linkis_user_resource_meta_data SET expires_at = clock_timestamp() - interval '1 second' WHERE ticket_id = $1::uuid",
        "SELECT count(*) = 0 FROM linkis_user_resource_meta_data WHERE ticket_id = $1::uuid",
    ),
    // The deadline of a hold passes.
    (
        "expire_hold",
        "UPDATE linkis_resource_hold SET hold_until = clock_timestamp() - interval '1 second' WHERE em_instance = $1",
        "SELECT count(*) = 0 FROM linkis_resource_hold WHERE em_instance = $1",
    ),
    // An operator holds an EM by SQL.
    (
        "hold_by_hand",
        "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance) VALUES ('em', $1, $2) ON CONFLICT DO NOTHING",
        "SELECT $1 || $2 IS NOT NULL",
    ),
    // Sets wrong counters of an EM, for the repair.
    (
        "spoil_em",
        "UPDATE linkis_em_resource_meta_data SET used_resource = total_resource WHERE em_instance = $1",
        "SELECT $1 IS NOT NULL",
    ),
];

/// Makes a change, and waits for its condition.
pub async fn change(pool: &PgPool, name: &str, arguments: &[String], allowed: &Allowed) {
    let (_, sql, condition) =
        CHANGES.iter().find(|(found, _, _)| *found == name).unwrap_or_else(|| panic!("no change {name}"));
    let mut query = sqlx::query(AssertSqlSafe(renamed(sql, allowed)));
    for argument in arguments {
        query = query.bind(argument);
    }
    query.execute(pool).await.unwrap();
    let start = std::time::Instant::now();
    loop {
        let mut query = sqlx::query_scalar::<_, bool>(AssertSqlSafe(renamed(condition, allowed)));
        for argument in arguments {
            query = query.bind(argument);
        }
        if query.fetch_one(pool).await.unwrap() || start.elapsed().as_secs() > 30 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Waits until each external cluster has a snapshot that was begun after now.
pub async fn next_snapshot(pool: &PgPool) {
    let now: String = sqlx::query_scalar("SELECT clock_timestamp()::text").fetch_one(pool).await.unwrap();
    let begun =
        "SELECT coalesce(bool_and(coalesce(begun > $1::timestamptz, false)), false) FROM linkis_external_cluster";
    let start = std::time::Instant::now();
    while !sqlx::query_scalar::<_, bool>(begun).bind(&now).fetch_one(pool).await.unwrap() {
        assert!(start.elapsed().as_secs() < 30, "no snapshot of the external cluster");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Returns the condition for compared rows. Empty counters, and counters of label sets that are being counted or removed, depend on tasks.
fn rows_of(table: &str) -> &'static str {
    match table {
        "linkis_label_set" => "WHERE state = 'counted'",
        "linkis_label_resource" => {
            "WHERE used_resource::text || locked_resource::text ~ '[1-9]'
                AND label_set_id IN (SELECT label_set_id FROM linkis_label_set WHERE state = 'counted')"
        }
        _ => "",
    }
}

/// Returns a statement with the new table names. Replaces the longest names first, because some are prefixes of others.
fn renamed(sql: &str, allowed: &Allowed) -> String {
    let mut names: Vec<&str> = TABLES.iter().map(|(table, _, _)| *table).filter(|table| sql.contains(table)).collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    names.iter().fold(sql.to_owned(), |sql, table| sql.replace(table, allowed.name("table", table)))
}
