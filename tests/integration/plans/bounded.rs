//! Pages whose rows are few among many: each reads so many, and the next one goes on.

use std::collections::BTreeSet;

use linkis_rm::store::{
    Store,
    label_resource::{self, Indexed},
};
use sqlx::{Connection as _, PgConnection};

use super::MANY;
use crate::harness::*;

/// How many rows of a table this connection has read, now and not long ago.
async fn read_of(connection: &mut PgConnection, table: &str) -> i64 {
    let read = "SELECT (coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables
        WHERE relname = $1";
    sqlx::query_scalar(read).bind(table).fetch_one(connection).await.unwrap()
}

/// Of a set of labels that is being counted, or counts no more, there may be any number of scopes between those that are shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_scopes_reads_no_more_than_it_may() {
    const SHOWN: usize = 20;
    const PAGE: i64 = 1000;
    let database = Database::fresh().await;
    let store = Store::open(database.target(), options().history).await.unwrap();
    let fill = format!(
        r#"INSERT INTO linkis_label_set (label_set, exempt, lacking, queues, state)
        SELECT '["creator", "engine_type", "tenant", "user"]', '[]', 'empty', 'apart', state
        FROM unnest(ARRAY['counting', 'counted']) state;
        INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
        SELECT label_set_id, scope, '{{"cores":1}}', '{{}}', sha256(convert_to(label_set_id || ':' || scope, 'UTF8'))
        FROM linkis_label_set, generate_series(1, {MANY}) n, jsonb_build_object('user', 'hadoop', 'creator', 'IDE', 'engine_type',
            'spark', 'tenant', n::text) scope
        WHERE state = 'counting' OR n <= {SHOWN};
        ANALYZE linkis_label_set, linkis_label_resource"#
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(fill)).execute(&database.pool).await.unwrap();
    let (mut session, users) = (store.session(), BTreeSet::from([name("hadoop")]));
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
                    label_resource::list_with(&mut *transaction, (Indexed::Creator, "IDE"), &behind, PAGE).await
                }
                "of an engine type" => {
                    label_resource::list_with(&mut *transaction, (Indexed::EngineType, "spark"), &behind, PAGE).await
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
