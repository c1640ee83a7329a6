//! Pages with few matching rows: each reads a bounded number of rows, and the next one continues.

use std::collections::BTreeSet;

use rm_model::{
    name::Name,
    usage_sum::{UsageBy, UsageName},
};
use rm_store::{
    label_resource::{self, IndexFilter},
    usage_hour::{self, UsageAt, UsageRange, UsageSumPage},
    waiting,
};
use rm_tests::execute;
use sqlx::Connection as _;

use super::*;

/// Number of rows of a large table.
const MANY: i64 = 20_000;

/// Returns the number of rows of a table that this connection has read so far.
async fn read_of(connection: &mut PgConnection, table: &str) -> i64 {
    let read = "SELECT (coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables
        WHERE relname = $1";
    sqlx::query_scalar(read).bind(table).fetch_one(connection).await.unwrap()
}

/// A label set that is being counted, or no longer counted, can have any number of scopes between the listed ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scopes_page_reads_bounded_rows() {
    const SHOWN: usize = 20;
    const PAGE: i64 = 1000;
    let (pool, store) = fresh().await;
    let fill = format!(
        r#"INSERT INTO linkis_label_set (label_set, exempt, state)
        SELECT '["creator", "engine_type", "tenant", "user"]', '[]', state
        FROM unnest(ARRAY['counting', 'counted']) state;
        INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
        SELECT label_set_id, scope, '{{"cores":1}}', '{{}}', sha256(convert_to(label_set_id || ':' || scope, 'UTF8'))
        FROM linkis_label_set, generate_series(1, {MANY}) n, jsonb_build_object('user', 'hadoop', 'creator', 'IDE', 'engine_type',
            'spark', 'tenant', n::text) scope
        WHERE state = 'counting' OR n <= {SHOWN};
        ANALYZE linkis_label_set, linkis_label_resource"#
    );
    execute(&pool, fill).await;
    let (mut session, users) = (store.session(), BTreeSet::from([Name::parse("user", "hadoop").unwrap()]));
    let connection = session.get().await.unwrap();
    for what in ["all", "all, again and again", "of a user", "of a creator", "of an engine type"] {
        let (mut found, mut pages, mut after) = (BTreeSet::new(), 0, Some(Vec::new()));
        while let Some(behind) = after {
            let mut transaction = connection.begin().await.unwrap();
            let before = read_of(&mut transaction, "linkis_label_resource").await;
            let page = match what {
                "all" => label_resource::list(&mut *transaction, &behind, PAGE).await,
                "of a user" => label_resource::list_of(&mut *transaction, &users, &behind, PAGE).await,
                "of a creator" => {
                    label_resource::list_with(&mut *transaction, (IndexFilter::Creator, "IDE"), &behind, PAGE).await
                }
                "of an engine type" => {
                    label_resource::list_with(&mut *transaction, (IndexFilter::EngineType, "spark"), &behind, PAGE)
                        .await
                }
                _ => label_resource::walk(&mut *transaction, &behind, PAGE).await,
            };
            let read = read_of(&mut transaction, "linkis_label_resource").await - before;
            transaction.commit().await.unwrap();
            assert!(read <= PAGE, "{what}: {read} rows for page {pages}");
            let page = page.unwrap();
            found.extend(page.scopes.into_iter().map(|(hash, ..)| hash));
            (pages, after) = (pages + 1, page.last);
        }
        assert_eq!((found.len(), pages), (SHOWN, MANY / PAGE + 1), "{what}");
    }
    store.close().await;
}

/// A page of the wait queue reads the first entries of an EM once, and not once for each request of the page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_page_reads_first_entries_once() {
    const WAITING: i64 = 2000;
    const PAGE: i64 = 100;
    const AHEAD_MAX: i64 = 500;
    let (pool, store) = fresh().await;
    let fill = format!(
        r#"INSERT INTO linkis_rm_instance (instance_id, alive_until) VALUES (gen_random_uuid(), now() + interval '1 day');
        INSERT INTO linkis_resource_waiting (ticket_id, instance_id, principal, "user", creator, engine_type, em_application_name,
            em_instance, any_em, resource_type, resource, labels, waiting_since, wait_until, position, caps)
        SELECT id, instance_id, 'm', 'hadoop', 'IDE', '', 'ecm', 'full', false, 'CPU', '{{"cores":1}}', '{{}}', now(),
            now() + interval '1 day', '\x0000'::bytea || int8send(n) || uuid_send(id), '[]'
        FROM linkis_rm_instance, (SELECT n, gen_random_uuid() AS id FROM generate_series(1, {WAITING}) n) n;
        INSERT INTO linkis_resource_waiting_entry (wait_key, ticket_id, instance_id, position, resource_type, resource, wait_until,
            is_short, wait_key_hash)
        SELECT '{{"em":["ecm","full"]}}', ticket_id, instance_id, position, resource_type, resource, wait_until, true, sha256('full')
        FROM linkis_resource_waiting;
        ANALYZE linkis_resource_waiting, linkis_resource_waiting_entry"#
    );
    execute(&pool, fill).await;
    let mut session = store.session();
    let connection = session.get().await.unwrap();
    let (mut after, mut found) = (None, 0);
    loop {
        let mut transaction = connection.begin().await.unwrap();
        let before = read_of(&mut transaction, "linkis_resource_waiting_entry").await;
        let page = waiting::list(&mut *transaction, &waiting::WaitingFilter::default(), after, PAGE).await.unwrap();
        let read = read_of(&mut transaction, "linkis_resource_waiting_entry").await - before;
        transaction.commit().await.unwrap();
        assert!(read <= PAGE + AHEAD_MAX, "{read} entries for a page from {found} on");
        for (number, (_, request)) in (found..).zip(&page) {
            let ahead: Vec<i64> = request.ahead.values().copied().collect();
            assert_eq!(ahead, [number.min(AHEAD_MAX)]);
        }
        found += i64::try_from(page.len()).unwrap();
        let Some((last, _)) = page.last() else { break };
        after = Some(*last);
    }
    assert_eq!(found, WAITING);
    store.close().await;
}

/// Returns the number of database pages of a table and its indexes that this connection has read so far.
async fn touched_of(connection: &mut PgConnection, table: &str) -> i64 {
    let touched = "SELECT sum(pg_stat_get_xact_blocks_fetched(oid))::bigint FROM pg_class
        WHERE oid = $1::regclass OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = $1::regclass)";
    sqlx::query_scalar(touched).bind(table).fetch_one(connection).await.unwrap()
}

/// Maximum number of names that a page of use scans.
const NAMES_LOOKED_AT: i64 = 5000;

/// Rows of each page and in total, with at most this number a page.
async fn used(
    connection: &mut PgConnection,
    range: &UsageRange,
    page_size: usize,
) -> (Vec<usize>, Vec<(UsageName, Option<OffsetDateTime>)>) {
    let (mut sizes, mut found, mut after) = (Vec::new(), Vec::new(), None);
    loop {
        let mut transaction = connection.begin().await.unwrap();
        let before = touched_of(&mut transaction, "linkis_resource_usage_hour").await;
        // One more row means that there are more.
        let limit = i64::try_from(page_size).unwrap() + 1;
        let UsageSumPage { mut sums, looked_to } =
            usage_hour::list(&mut *transaction, range, after.as_ref(), limit).await.unwrap();
        let touched = touched_of(&mut transaction, "linkis_resource_usage_hour").await - before;
        transaction.commit().await.unwrap();
        assert!(touched <= 5 * NAMES_LOOKED_AT, "{touched} pages of the database for page {}", sizes.len());
        let is_more = sums.len() > page_size;
        sums.truncate(page_size);
        sizes.push(sums.len());
        found.extend(sums.iter().map(|sum| (sum.used_by.clone(), sum.hour)));
        let last = sums.last().filter(|_| is_more);
        after = last.map(|last| UsageAt { used_by: last.used_by.clone(), hour: last.hour }).or(looked_to);
        if after.is_none() {
            return (sizes, found);
        }
    }
}

/// Stored hours can have any number of names without use in the requested hours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_page_reads_bounded_names_and_hours() {
    const DAY: i64 = 24;
    let (pool, store) = fresh().await;
    // Some names in every second hour, many in one, a few in the next two, and the others later.
    let fill =
        "INSERT INTO linkis_resource_usage_hour (used_by, is_rest, name, em_instance, hour, tickets, core_seconds,
            byte_seconds, queue_core_seconds, queue_byte_seconds)
        SELECT 'user', name = '', name, '', to_timestamp(0) + (1000 + hour) * interval '1 hour', 1, 1, 1, 0, 0 FROM (
            SELECT 'a' || n, h * 2 FROM generate_series(1, 60) n, generate_series(0, 1000) h
            UNION ALL SELECT 'b' || n, 1000 FROM generate_series(1, 6000) n
            UNION ALL SELECT 'c' || n, h FROM generate_series(1, 20) n, generate_series(1001, 1002) h
            UNION ALL SELECT '', 1001) n (name, hour);
        ANALYZE linkis_resource_usage_hour";
    execute(&pool, fill).await;
    let at = |hour: i64| OffsetDateTime::from_unix_timestamp((1000 + hour) * 3600).unwrap();
    let range = |from, to, hourly| UsageRange { by: UsageBy::User, users: None, from: at(from), to: at(to), hourly };
    let mut session = store.session();
    let connection = session.get().await.unwrap();
    for (from, to, hourly, page_size, sizes, all) in [
        // Two reads for each of the first names, and one for each of the many.
        (1001, 1002, false, 100, vec![0, 21], 21),
        (1001, 1002, true, 100, vec![0, 21], 21),
        (1001, 1002, true, 10, vec![0, 10, 10, 1], 21),
        (1001, 1003, true, 100, vec![60, 41], 60 + 20 * 2 + 1),
        (1001, 1003, false, 100, vec![60, 21], 60 + 21),
        // Earlier rows are not read again.
        (1000, 1001, false, 1000, vec![1000, 1000, 1000, 1000, 1000, 1000, 60], 6060),
        // A range without sums.
        (2001, 2003, false, 100, vec![0, 0], 0),
        // A page adds up a bounded number of hours of three months.
        (0, 92 * DAY, false, 1000, [vec![113; 53], vec![92]].concat(), 6081),
        (0, DAY, false, 1000, vec![60, 0], 60),
        (0, DAY, true, 1000, vec![720, 0], 60 * 12),
    ] {
        let (found_sizes, found) = used(&mut *connection, &range(from, to, hourly), page_size).await;
        let what = format!("from {from} to {to}, hourly: {hourly}, {page_size} a page");
        assert_eq!(found_sizes, sizes, "{what}");
        assert!(found.is_sorted() && found.len() == all, "{what}: {}", found.len());
        assert_eq!(BTreeSet::from_iter(&found).len(), all, "{what}: none twice");
    }
    store.close().await;
}
