//! Plans: with full tables, no call reads one from end to end, and none reads much more than what it is about.

use std::{collections::BTreeMap, time::Duration};

use linkis_rm::{
    client::ResourceRequest,
    domain::{
        limit::{Pattern, Rule},
        resource::Dimension,
    },
    transport::proto::{self, usage_service_client::UsageServiceClient},
};

use tonic::transport::Channel;

use crate::harness::*;

/// So many tickets, history lines and scopes, and a hundredth of EMs, are there before.
const ROWS: i64 = 50_000;

/// So many more tickets are one user's, on one EM.
const CROWD: i64 = 5000;

/// The last of them, which alone is used.
const LAST_OF_CROWD: &str = "3fffffff-ffff-4fff-bfff-ffffffffffff";

/// How many times each call is made: after a few, connections keep their plans.
const ROUNDS: usize = 12;

/// How many rows may be read for all that is called in one round: some pages, what the calls are about, and the thousand tickets that
/// a page looks through which no index answers.
const ROWS_PER_ROUND: i64 = 2500;

/// Tables that grow with the cluster.
const LARGE: [&str; 8] = [
    "linkis_em_resource_meta_data",
    "linkis_user_resource_meta_data",
    "linkis_label_resource",
    "linkis_request_id",
    "linkis_resource_action_record",
    "linkis_resource_lock",
    "linkis_resource_waiting",
    "linkis_resource_waiting_spot",
];

async fn fill(database: &Database) {
    let fill = format!(
        r#"INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time, version,
            counted_to)
        SELECT 'other', 'host' || n, resource_type, total_resource, protected_resource, used_resource, locked_resource,
            left_resource, over_committed, labels, epoch, register_time, 1, counted_to
        FROM linkis_em_resource_meta_data, generate_series(1, {ROWS} / 100) n;
        -- In the order of the tickets: a third that is locked, a third that is used, and again one that is locked.
        INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_locked_resource, labels, locked_time, expires_at)
        SELECT overlay(gen_random_uuid()::text PLACING CASE n % 3 WHEN 0 THEN '0' ELSE 'e' END FROM 1 FOR 1)::uuid,
            'user' || n % 1000, 'IDE', '', 'other', 'host' || n % ({ROWS} / 100), 'LoadInstance',
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}', '{{}}', now(), now() + interval '1 day'
        FROM generate_series(1, {ROWS}) n WHERE n % 3 <> 1;
        INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_used_resource, labels, locked_time, used_time, engine_application_name, engine_instance)
        SELECT overlay(gen_random_uuid()::text PLACING '7' FROM 1 FOR 1)::uuid,
            'user' || n % 1000, 'IDE', '', 'other', 'host' || n % ({ROWS} / 100), 'LoadInstance',
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}', '{{}}', now(), now(), 'engine', 'e' || n
        FROM generate_series(1, {ROWS}) n WHERE n % 3 = 1;
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
            coalesce(user_locked_resource, user_used_resource), principal, locked_time
        FROM linkis_user_resource_meta_data;
        INSERT INTO linkis_request_id (request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time)
        SELECT n::text, sha256('x'), gen_random_uuid(), 'other', 'host1', now(), now() FROM generate_series(1, {ROWS}) n;
        INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
        SELECT (SELECT max(label_set_id) FROM linkis_label_set), jsonb_build_object('user', 'other' || n), '{{"cores":1}}', '{{}}',
            sha256(('other' || n)::bytea)
        FROM generate_series(1, {ROWS}) n;"#
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(fill)).execute(&database.pool).await.unwrap();
    sqlx::raw_sql("VACUUM ANALYZE").execute(&database.pool).await.unwrap();
    // From here on, what the calls read is counted.
    sqlx::raw_sql("SELECT pg_stat_reset()").execute(&database.pool).await.unwrap();
}

async fn round(rm: &Instance, number: usize) {
    let client = &rm.client;
    let host = em(&format!("round{number}"));
    client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    client.register(registration(host.clone(), load(9, 9, 9))).await.unwrap();
    let named = ResourceRequest { request_id: Some(format!("r{number}")), ..request(&host, "hadoop", load(1, 1, 1)) };
    let grant = client.request_resource(&named).await.granted();
    assert_eq!(client.request_resource(&named).await.granted(), grant);
    client.dry_run(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    client.request_resource(&request(&host, "hadoop", load(99, 1, 1))).await.refused();
    client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    client.ticket(grant.ticket_id).await.unwrap();
    client.em(&host).await.unwrap();
    let short = ResourceRequest { lock_ttl: Some(Duration::from_millis(1)), ..request(&host, "hadoop", load(1, 1, 1)) };
    let short = client.request_resource(&short).await.granted();
    eventually("it expires", Duration::from_secs(20), async || !lives(client, short.ticket_id).await).await;
    let wait_timeout = Duration::from_millis(500);
    let patient = ResourceRequest { wait_timeout, ..request(&host, "hadoop", load(9, 1, 1)) };
    client.request_resource(&patient).await.refused();
    client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    pages(rm, &grant.ticket_id.to_string()).await;
    client.unregister(&host).await.unwrap();
}

/// The first page of everything.
async fn pages(rm: &Instance, ticket_id: &str) {
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let page_size = 10;
    usage.list_ems(proto::ListEmsRequest { page_size, ..Default::default() }).await.unwrap();
    usage.list_scopes(proto::ListScopesRequest { page_size, ..Default::default() }).await.unwrap();
    usage.list_waiting(proto::ListWaitingRequest { page_size, ..Default::default() }).await.unwrap();
    usage.list_actions(proto::ListActionsRequest { page_size, ..Default::default() }).await.unwrap();
    let of_ticket = proto::ListActionsRequest { ticket_id: ticket_id.into(), page_size, ..Default::default() };
    usage.list_actions(of_ticket).await.unwrap();
    let on_em =
        |instance: &str| Some(proto::EmInstance { application_name: "other".into(), instance: instance.into() });
    for (em, user) in [(None, ""), (None, "user7"), (on_em("host7"), "")] {
        let call = proto::ListTicketsRequest { em, user: user.into(), page_size, ..Default::default() };
        assert_eq!(usage.list_tickets(call).await.unwrap().into_inner().tickets.len(), 10);
    }
    // From behind the first that are locked, and all that are used.
    for (state, page_token) in [("used", ""), ("locked", "6fffffff-ffff-ffff-ffff-ffffffffffff")] {
        let (state, page_token) = (state.into(), page_token.into());
        let call = proto::ListTicketsRequest { state, page_token, page_size, ..Default::default() };
        assert_eq!(usage.list_tickets(call).await.unwrap().into_inner().tickets.len(), 10);
    }
    let page = used_of_crowd(&mut usage, None, String::new()).await;
    assert!(page.tickets.is_empty() && !page.next_page_token.is_empty(), "{page:?}");
}

/// A page of the tickets of the crowd that are used.
async fn used_of_crowd(
    usage: &mut UsageServiceClient<Channel>,
    em: Option<proto::EmInstance>,
    page_token: String,
) -> proto::ListTicketsResponse {
    let (user, state) = ("crowd".into(), "used".into());
    let call = proto::ListTicketsRequest { em, user, state, page_size: 10, page_token };
    usage.list_tickets(call).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_reads_a_large_table_from_end_to_end() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("template"), load(10, 10, 10))).await.unwrap();
    let each_user = Pattern::new([("user".to_owned(), None)].into());
    rm.client.set_limit(&Rule { pattern: each_user, max: [(Dimension::Instances, 100)].into() }).await.unwrap();
    rm.stop().await;
    fill(&database).await;
    let rm = Instance::start(&database).await;
    for number in 0..ROUNDS {
        round(&rm, number).await;
    }
    // The statistics of a connection are there for certain once it is closed.
    rm.stop().await;
    database.pool.close().await;
    let mut connection = database.connect().await;
    let rows: Vec<(String, i64, i64)> = sqlx::query_as(
        "SELECT relname::text, seq_scan, coalesce(seq_tup_read, 0) + coalesce((
            SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes i WHERE i.relid = t.relid), 0)
        FROM pg_stat_user_tables t",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();
    let read: BTreeMap<_, _> = rows.into_iter().map(|(table, scans, rows)| (table, (scans, rows))).collect();
    println!("{read:#?}");
    for table in LARGE {
        let (scans, rows) = read[table];
        // Who stands where in the whole line is what a page of it shows.
        let whole = if table == "linkis_resource_waiting" { ROUNDS } else { 0 };
        assert!(scans <= i64::try_from(whole).unwrap(), "{table} was read from end to end {scans} times");
        let most = ROWS_PER_ROUND * i64::try_from(ROUNDS).unwrap();
        assert!(rows < most, "{table}: {rows} rows were read, at most {most} have to be");
    }

    // What a page looks through in vain, the next one does not look through again.
    let rm = Instance::start(&database).await;
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let crowded = proto::EmInstance { application_name: "other".into(), instance: "crowded".into() };
    for em in [None, Some(crowded)] {
        let (mut found, mut pages, mut page_token) = (vec![], 0, String::new());
        loop {
            let page = used_of_crowd(&mut usage, em.clone(), page_token).await;
            (found, pages) = ([found, page.tickets].concat(), pages + 1);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        assert_eq!((found.len(), pages), (1, 6));
        assert_eq!(found[0].ticket_id, LAST_OF_CROWD);
    }
}
