//! Plans: with full tables, no call reads one from end to end, and none reads much more than what it is about.
//!
//! All calls are made twice, with few rows and with many, and what each statement of the service touches per call is compared: pages
//! that the database had to look at may grow with the depth of an index, and with nothing else.
//!
//! - `LINKIS_RM_PLANS`: how many rows are many, e.g. `1000000`.

use std::{
    collections::BTreeMap,
    env,
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ResourceRequest, RmClient},
    domain::{
        adopt::Adopt,
        em::EmInstance,
        hold::NewHold,
        limit::{Pattern, Rule},
        operation::LockKey,
        report::{Health, Report},
        resource::Dimension,
    },
    server::Options,
    service::heartbeat::LivenessTimeouts,
    store::{
        embedded::{Embedded, Settings},
        history_part,
        overview::COUNTED_MAX,
    },
    transport::{
        page::Page,
        proto::{self, usage_service_client::UsageServiceClient},
    },
};

use sqlx::ConnectOptions as _;
use tonic::transport::Channel;
use uuid::Uuid;

use crate::harness::*;

mod bounded;
mod filters;

/// So many tickets, history lines and scopes, and a hundredth of EMs, are there before, where there are few.
const FEW: i64 = 2000;

/// Where there are many, unless something else is asked for.
const MANY: i64 = 20_000;

/// One in so many tickets has a deadline that passed while nobody looked.
const DUE_PER: i64 = 25;

/// How many of those there are at least, so that batches are as full with few rows as with many.
const DUE_MIN: i64 = 400;

/// So many more tickets are one user's, on one EM.
const CROWD: i64 = 5000;

/// So many more are on an EM that goes, and as many on one that is given up.
const LEAVING: i64 = 1000;

/// How many pages more a statement may touch on average with many rows than with few, and how many times as many: indexes are a level
/// or two deeper, and a batch looks up many rows.
const MORE_PAGES: f64 = 25.0;

/// The same for each ticket that ends, in batches of however many.
const MORE_PAGES_PER_END: f64 = 4.0;

const PAGES_RATIO: f64 = 2.0;

/// The last of them, which alone is used.
const LAST_OF_CROWD: &str = "3fffffff-ffff-4fff-bfff-ffffffffffff";

/// How long nothing is forgotten.
const HISTORY: Duration = Duration::from_secs(10 * 24 * 3600);

/// How many times each call is made: after a few, connections keep their plans.
const ROUNDS: usize = 6;

/// How many pages of the database one page of the history may touch, whatever is looked for in it: half as many as the lines that are looked
/// through, of which neighbours mostly share one.
const HISTORY_PAGES_TOUCHED_MAX: i64 = 1500;

/// How many rows may be read for all that is called in one round: some pages, what the calls are about, and the thousand tickets that
/// a page looks through which no index answers.
const ROWS_PER_ROUND: i64 = 2500;

/// How many times as many of the history: its pages look through some lines before they ask an index, and what has ended is summed beside.
const HISTORY_PAGES: i64 = 6;

/// What one instance asks for all every few seconds, and counts only up to a bound that even many rows do not reach.
const BOUNDED: &str = "overview::totals";

/// What it asks for of all EMs.
const SUMS: &str = "overview::ems";

/// The statements that are made beside the calls: they go through all EMs, through a page of all scopes, or through what has ended since,
/// and touch as much.
const BESIDE: [&str; 7] =
    [SUMS, BOUNDED, SURVEY, "label_resource::walk", "ended_use::list", "usage_hour::known", "usage_hour::add"];

/// What tells which EMs have changed, once a second at most and for all together who name none; those that have are read.
const SURVEY: &str = "em_report::survey";

/// How many lines of the history one sum of what has ended looks through, as the background task does.
const LINES_SUMMED_AT_ONCE: i64 = 10_000;

/// Tables that grow with the cluster.
const LARGE: [&str; 10] = [
    "linkis_em_resource_meta_data",
    "linkis_user_resource_meta_data",
    "linkis_label_resource",
    "linkis_request_id",
    "linkis_resource_action_record",
    "linkis_resource_lock",
    "linkis_resource_refusal",
    "linkis_resource_usage_hour",
    "linkis_resource_waiting",
    "linkis_resource_waiting_spot",
];

/// How many lines the history has of each ticket where there are many: 1, unless something else is asked for.
fn lines_each() -> i64 {
    env::var("LINKIS_RM_PLANS_LINES").map_or(1, |text| text.parse().unwrap())
}

fn due(rows: i64) -> i64 {
    (rows / DUE_PER).max(DUE_MIN)
}

/// Fills tables with what has nothing to do with the calls.
async fn fill(database: &Database, rows: i64) {
    let lines = if rows == FEW { 1 } else { lines_each() };
    // What happened is a day old: in a part of the history that is over.
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
        -- In the order of the tickets: a third that is locked, a third that is used, and again one that is locked.
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
        INSERT INTO linkis_request_id (request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time)
        SELECT n::text, sha256('x'), gen_random_uuid(), 'other', 'host1', now(), now() FROM generate_series(1, {rows}) n;
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
    sqlx::raw_sql(sqlx::AssertSqlSafe(fill)).execute(&database.pool).await.unwrap();
    while history_part::index_oldest(&mut database.connect().await).await.unwrap() {}
    sqlx::raw_sql("VACUUM ANALYZE").execute(&database.pool).await.unwrap();
}

/// Adds what has: tickets with counters to match, which are due, or on an EM that goes, or on one that is given up.
async fn fill_ending(database: &Database, rows: i64) {
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
        -- Of those that report, one is not heard of any more.
        INSERT INTO linkis_em_report (em_application_name, em_instance, epoch, sequence, health, report_time)
        SELECT em_application_name, em_instance, epoch, 1, 'healthy', now() - interval '1 hour'
        FROM linkis_em_resource_meta_data WHERE em_instance = 'lost';"#
    );
    let mut connection = database.connect().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(fill)).execute(&mut connection).await.unwrap();
}

async fn round(rm: &Instance, number: usize) {
    let client = &rm.client;
    let host = em(&format!("round{number}"));
    client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let epoch = client.register(registration(host.clone(), load(9, 9, 9))).await.unwrap().epoch;
    let named = ResourceRequest { request_id: Some(format!("r{number}")), ..request(&host, "hadoop", load(1, 1, 1)) };
    let grant = client.request_resource(&named).await.granted();
    assert_eq!(client.request_resource(&named).await.granted(), grant);
    client.dry_run(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    client.request_resource(&request(&host, "hadoop", load(99, 1, 1))).await.refused();
    client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    client.resource_reported(&grant.reported(name("hadoop"), load(2, 1, 1))).await.unwrap();
    client.ticket(grant.ticket_id).await.unwrap();
    client.em(&host).await.unwrap();
    report(client, &host, epoch, grant.ticket_id).await;
    let anywhere = ResourceRequest { em: None, ..request(&host, "hadoop", load(1, 1, 1)) };
    client.dry_run(&anywhere).await.granted();
    let chosen = client.request_resource(&anywhere).await.granted();
    client.ticket_released(chosen.ticket_id).await.unwrap();
    let short = ResourceRequest { lock_ttl: Some(Duration::from_millis(1)), ..request(&host, "hadoop", load(1, 1, 1)) };
    let short = client.request_resource(&short).await.granted();
    eventually("it expires", Duration::from_secs(20), async || !lives(client, short.ticket_id).await).await;
    let wait_timeout = Duration::from_millis(500);
    let patient = ResourceRequest { wait_timeout, ..request(&host, "hadoop", load(9, 1, 1)) };
    client.request_resource(&patient).await.refused();
    client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    pages(rm, &grant.ticket_id.to_string()).await;
    let adopt = Adopt {
        ticket_id: Uuid::new_v4(),
        user: name("hadoop"),
        creator: name("IDE"),
        engine_type: String::new(),
        em: host.clone(),
        labels: Default::default(),
        engine: engine("adopted"),
        used: load(1, 1, 1),
    };
    client.adopt_ticket(&adopt).await.unwrap();
    client.adopt_ticket(&adopt).await.unwrap();
    operate(client, &host).await;
    client.unregister(&host).await.unwrap();
}

/// Reports of an EM: of all it has, of something else instead, and of all again.
async fn report(client: &RmClient, host: &EmInstance, epoch: i64, ticket_id: Uuid) {
    for (sequence, tickets, unknown) in
        [(1, ticket_id, 0), (2, Uuid::new_v4(), 1), (3, ticket_id, 0), (4, ticket_id, 0)]
    {
        let (em, health, tickets) = (host.clone(), Health::Healthy, [tickets].into());
        let report = Report { em, epoch, sequence, health, load: None, tickets, observed: None };
        assert_eq!(client.heartbeat(&report).await.unwrap().unknown_tickets.len(), unknown);
    }
}

/// What operators do.
async fn operate(client: &RmClient, host: &EmInstance) {
    client.drain(host, "a disk").await.unwrap();
    client.resume(host, "").await.unwrap();
    let grant = client.request_resource(&request(host, "hadoop", load(1, 1, 1))).await.granted();
    client.force_release(grant.ticket_id, "it hangs").await.unwrap();
    for key in [LockKey::Em(host.clone()), LockKey::User(name("hadoop"))] {
        let hold = NewHold { key: key.clone(), duration: Duration::from_secs(60), reason: name("a look") };
        client.hold(&hold).await.unwrap();
        assert_eq!(client.holds().await.unwrap().len(), 1);
        assert!(client.release_hold(&key).await.unwrap());
    }
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
    for (state, from) in [("used", None), ("locked", Some("6fffffff-ffff-ffff-ffff-ffffffffffff"))] {
        let all = proto::ListTicketsRequest { state: state.into(), ..Default::default() };
        let token = |key| Page::new("ListTickets", page_size, &all).unwrap().token(key);
        let page_token = from.map(token).unwrap_or_default();
        let call = proto::ListTicketsRequest { page_token, page_size, ..all };
        assert_eq!(usage.list_tickets(call).await.unwrap().into_inner().tickets.len(), 10);
    }
    for user in ["", "user7"] {
        let call = proto::ListRefusalsRequest { user: user.into(), page_size, ..Default::default() };
        assert_eq!(usage.list_refusals(call).await.unwrap().into_inner().refusals.len(), 10);
        for (hourly, sums) in [(true, 10), (false, if user.is_empty() { 10 } else { 1 })] {
            let by = proto::UsageBy::User.into();
            let call = proto::GetUsageRequest { by, user: user.into(), hourly, page_size, ..Default::default() };
            assert_eq!(usage.get_usage(call).await.unwrap().into_inner().sums.len(), sums);
        }
    }
    let engine = Some(proto::EngineInstance { application_name: "engine".into(), instance: "e7".into() });
    let call = proto::ListTicketsRequest { engine: engine.clone(), page_size, ..Default::default() };
    assert_eq!(usage.list_tickets(call).await.unwrap().into_inner().tickets.len(), 1);
    let ticket = usage.get_ticket(proto::GetTicketRequest { engine, ..Default::default() }).await.unwrap();
    let (ticket, em) = (ticket.into_inner().ticket.unwrap().ticket_id, on_em("host7").unwrap());
    let ticket_ids = vec![ticket, ticket_id.to_owned()];
    let found = usage.batch_get_tickets(proto::BatchGetTicketsRequest { ticket_ids }).await.unwrap().into_inner();
    assert_eq!((found.tickets.len(), found.missing.len()), (1, 1));
    let found = usage.batch_get_ems(proto::BatchGetEmsRequest { ems: vec![em] }).await.unwrap().into_inner();
    assert_eq!((found.ems.len(), found.missing.len()), (1, 0));
    let page = used_of_crowd(&mut usage, None, String::new()).await;
    assert!(page.tickets.is_empty() && !page.next_page_token.is_empty(), "{page:?}");
    filtered(&mut usage, ticket_id).await;
    follow(rm, &mut usage).await;
}

/// One scope by its key, and what is new, with the counters that are told besides.
async fn follow(rm: &Instance, usage: &mut UsageServiceClient<Channel>) {
    let labels = [("user".to_owned(), "other7".to_owned())].into();
    usage.get_scope(proto::GetScopeRequest { labels }).await.unwrap();
    let mut stream = usage.follow_actions(proto::FollowActionsRequest::default()).await.unwrap().into_inner();
    let position = stream.message().await.unwrap().unwrap().position;
    let registration = registration(em("followed"), load(1, 1, 1));
    rm.client.register(registration).await.unwrap();
    let mut again = usage.follow_actions(proto::FollowActionsRequest { position }).await.unwrap().into_inner();
    for stream in [&mut stream, &mut again] {
        while stream.message().await.unwrap().unwrap().actions.is_empty() {}
    }
}

/// The first page of what is filtered.
async fn filtered(usage: &mut UsageServiceClient<Channel>, ticket_id: &str) {
    let page_size = 10;
    let other = Some(proto::EmInstance { application_name: "other".into(), instance: "host7".into() });
    let of_other = proto::ListEmsRequest { em_application_name: "other".into(), page_size, ..Default::default() };
    assert_eq!(usage.list_ems(of_other).await.unwrap().into_inner().ems.len(), 10);
    let scopes = |key: &str, value: &str| proto::ListScopesRequest {
        labels: [(key.to_owned(), value.to_owned())].into(),
        page_size,
        ..Default::default()
    };
    assert_eq!(usage.list_scopes(scopes("user", "other7")).await.unwrap().into_inner().scopes.len(), 1);
    for (key, value) in [("creator", "nobody"), ("engine_type", "nobody")] {
        assert!(usage.list_scopes(scopes(key, value)).await.unwrap().into_inner().scopes.is_empty());
    }
    let fullest = proto::ListScopesRequest { fullest_first: true, ..scopes("user", "other7") };
    assert_eq!(usage.list_scopes(fullest).await.unwrap().into_inner().scopes.len(), 0, "no rule is for cores");
    let waiting = proto::ListWaitingRequest { page_size, ..Default::default() };
    for filter in [
        proto::ListWaitingRequest { user: "nobody".into(), ..waiting.clone() },
        proto::ListWaitingRequest { em: other.clone(), ..waiting.clone() },
        proto::ListWaitingRequest { scope: [("user".to_owned(), "nobody".to_owned())].into(), ..waiting },
    ] {
        assert!(usage.list_waiting(filter).await.unwrap().into_inner().waiting.is_empty());
    }
    let now = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap();
    let soon = Some(prost_types::Timestamp { seconds: now + 3600, nanos: 0 });
    let actions = proto::ListActionsRequest { newest_first: true, page_size, ..Default::default() };
    assert_eq!(usage.list_actions(actions.clone()).await.unwrap().into_inner().actions.len(), 10);
    let of_ticket = proto::ListActionsRequest { ticket_id: ticket_id.into(), ..actions.clone() };
    assert!(!usage.list_actions(of_ticket).await.unwrap().into_inner().actions.is_empty());
    let later = proto::ListActionsRequest { from_time: soon, ..actions.clone() };
    assert!(usage.list_actions(later).await.unwrap().into_inner().actions.is_empty());
    // Of what is over an index finds it; the present is looked through.
    let to_time = Some(prost_types::Timestamp { seconds: now - 3600, nanos: 0 });
    for newest_first in [false, true] {
        let actions = proto::ListActionsRequest { newest_first, to_time, ..actions.clone() };
        for (filter, found) in [
            (proto::ListActionsRequest { user: "user7".into(), ..actions.clone() }, 10),
            (proto::ListActionsRequest { em: other.clone(), ..actions.clone() }, 10),
            (proto::ListActionsRequest { actor: "nobody".into(), ..actions.clone() }, 0),
        ] {
            assert_eq!(usage.list_actions(filter).await.unwrap().into_inner().actions.len(), found);
        }
    }
    filters::first_pages(usage).await;
    usage.list_instances(proto::ListInstancesRequest {}).await.unwrap();
    assert!(usage.list_tasks(proto::ListTasksRequest {}).await.unwrap().into_inner().jobs.is_empty());
}

/// A page of the tickets of the crowd that are used.
async fn used_of_crowd(
    usage: &mut UsageServiceClient<Channel>,
    em: Option<proto::EmInstance>,
    page_token: String,
) -> proto::ListTicketsResponse {
    let (user, state) = ("crowd".into(), "used".into());
    let call = proto::ListTicketsRequest { em, user, state, page_size: 10, page_token, engine: None };
    usage.list_tickets(call).await.unwrap().into_inner()
}

/// A PostgreSQL that counts what each statement touches, where that can be had; otherwise that of the other tests.
struct Counting(Option<Embedded>);

impl Counting {
    async fn start(elsewhere: &Database) -> Self {
        let available = "SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_stat_statements'";
        if elsewhere.count(available).await == 0 {
            println!("pg_stat_statements is not installed here: pages are not compared");
            return Self(None);
        }
        let data_dir = scratch("plans");
        remove_at_end(&data_dir);
        let options = [("shared_preload_libraries", "pg_stat_statements"), ("pg_stat_statements.track", "all")];
        let server_options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Self(Some(Embedded::start(Settings { data_dir, server_options }).await.unwrap()))
    }

    async fn database(&self, name: &str) -> Database {
        let Some(postgres) = &self.0 else { return Database::fresh().await };
        let mut admin = postgres.connect_options().connect().await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut admin).await.unwrap();
        let options = postgres.connect_options().database(name);
        let database = Database::from(options);
        sqlx::raw_sql("CREATE EXTENSION pg_stat_statements").execute(&database.pool).await.unwrap();
        database
    }

    /// What each statement of the service touched since it was asked last.
    async fn costs(&self, database: &Database) -> Costs {
        if self.0.is_none() {
            return Costs::new();
        }
        let mut connection = database.connect().await;
        let rows: Vec<(String, i64, i64, i64)> = sqlx::query_as(
            "SELECT substring(query FROM '^-- ([^\n]*)'), sum(calls)::bigint, sum(shared_blks_hit + shared_blks_read)::bigint,
                sum(rows)::bigint
            FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
            WHERE datname = current_database() AND query LIKE '-- %' GROUP BY 1",
        )
        .fetch_all(&mut connection)
        .await
        .unwrap();
        sqlx::raw_sql("SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()")
            .execute(&mut connection)
            .await
            .unwrap();
        rows.into_iter().map(|(statement, calls, pages, rows)| (statement, Cost { calls, pages, rows })).collect()
    }
}

/// By statement: how often it was made, how many pages it touched in all, and how many rows it answered with.
type Costs = BTreeMap<String, Cost>;

#[derive(Clone, Copy)]
struct Cost {
    calls: i64,
    pages: i64,
    rows: i64,
}

impl Cost {
    fn pages_per_call(self) -> f64 {
        self.pages as f64 / self.calls as f64
    }

    fn pages_per_row(self) -> f64 {
        self.pages as f64 / self.rows.max(1) as f64
    }

    /// Whether it is more by the call, and not just because it answers with more rows.
    fn is_dear_beside(self, few: Self, more: f64) -> bool {
        self.pages_per_call() > few.pages_per_call() * PAGES_RATIO + more
            && self.pages_per_row() > few.pages_per_row() * PAGES_RATIO
    }
}

/// What ending one of the tickets cost: how many share a batch depends on how many there are.
fn per_end(costs: Costs, rows: i64) -> Costs {
    let ended = due(rows) + 2 * LEAVING;
    costs.into_iter().map(|(statement, cost)| (statement, Cost { calls: ended, rows: ended, ..cost })).collect()
}

/// Compares what statements cost with few rows and with many; answers which cost too much.
fn compare(what: &str, few: &Costs, many: &Costs, more: f64) -> Vec<String> {
    println!("{what:<44}{:>8}{:>10}{:>8}{:>10}", "few:", "pages", "many:", "pages");
    let mut dear = Vec::new();
    for (statement, many) in many {
        let few = few.get(statement).copied();
        let (calls, pages) = few.map(|few| (few.calls, few.pages_per_call())).unwrap_or_default();
        println!("{statement:<44}{calls:>8}{pages:>10.1}{:>8}{:>10.1}", many.calls, many.pages_per_call());
        let is_left_out = BESIDE.iter().any(|beside| statement.starts_with(beside));
        if !is_left_out && few.is_some_and(|few| many.is_dear_beside(few, more)) {
            dear.push(format!(
                "{what}: {statement} touches {:.1} pages per call, {pages:.1} with few rows",
                many.pages_per_call()
            ));
        }
    }
    dear
}

/// An instance that does not forget what it finds.
async fn with_history(database: &Database) -> Instance {
    Instance::start_with(database, Options { history: HISTORY, ..options() }).await
}

/// What statements cost: to catch up with all deadlines, to count a new label set, and to make all calls.
struct Measured {
    ending: Costs,
    counting: Costs,
    calls: Costs,
}

/// A limit of very much for each value of a label.
fn for_each(label: &str, instances: i64) -> Rule {
    let pattern = Pattern::new([(label.to_owned(), None)].into());
    Rule { pattern, mode: Default::default(), max: [(Dimension::Instances, instances)].into() }
}

/// A limit with labels that no other has: all live tickets are counted for it, step by step.
async fn count_anew(database: &Database, rm: &Instance) {
    let rule = for_each("creator", 1_000_000_000);
    rm.client.set_limit(&rule).await.unwrap();
    let counting = "SELECT count(*) FROM linkis_label_set WHERE state = 'counting'";
    eventually("all is counted", Duration::from_secs(600), async || database.count(counting).await == 0).await;
    rm.client.delete_limit(&rule.pattern).await.unwrap();
    let retired = "SELECT count(*) FROM linkis_label_set WHERE state <> 'counted'";
    eventually("it counts no more", Duration::from_secs(60), async || database.count(retired).await == 0).await;
}

/// A database with so many rows, and what statements cost there.
async fn measure(postgres: &Counting, name: &str, rows: i64) -> (Database, Measured) {
    let start = Instant::now();
    let database = postgres.database(name).await;
    let rm = with_history(&database).await;
    rm.client.register(registration(em("template"), load(10, 10_000, 10_000))).await.unwrap();
    rm.client.set_limit(&for_each("user", 100)).await.unwrap();
    rm.stop().await;
    fill(&database, rows).await;
    fill_ending(&database, rows).await;
    sqlx::raw_sql("VACUUM ANALYZE").execute(&database.pool).await.unwrap();
    let filled = start.elapsed();
    drop(postgres.costs(&database).await);
    let (silent_after, lost_after) = (Duration::from_secs(1), Duration::from_secs(2));
    let liveness = LivenessTimeouts { silent_after, lost_after, ..LivenessTimeouts::DEFAULT };
    let rm = Instance::start_with(&database, Options { history: HISTORY, liveness, ..options() }).await;
    let leaving = EmInstance::parse("em", em("any").application_name.as_str(), "leaving").unwrap();
    rm.client.unregister(&leaving).await.unwrap();
    let ending = "SELECT count(*) FROM linkis_user_resource_meta_data
        WHERE em_instance LIKE 'due%' OR em_instance IN ('leaving', 'lost')";
    eventually("they all end", Duration::from_secs(300), async || {
        tokio::time::sleep(Duration::from_millis(50)).await;
        database.count(ending).await == 0
    })
    .await;
    let ended = start.elapsed() - filled;
    let ending = postgres.costs(&database).await;
    // The last batches were about tickets, too, that had ended meanwhile: none of that is what a call costs.
    eventually("nothing more is ended", Duration::from_secs(30), async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        !postgres.costs(&database).await.contains_key("user_resource::read")
    })
    .await;
    count_anew(&database, &rm).await;
    let counting = postgres.costs(&database).await;
    rm.stop().await;
    // What reports now is given more time.
    let rm = with_history(&database).await;
    for then in ["VACUUM ANALYZE", "SELECT pg_stat_reset()"] {
        sqlx::raw_sql(then).execute(&database.pool).await.unwrap();
    }
    for number in 0..ROUNDS {
        round(&rm, number).await;
    }
    rm.stop().await;
    let calls = postgres.costs(&database).await;
    let took = start.elapsed();
    println!(
        "{rows} rows: filled in {filled:?}; {} due, {LEAVING} leaving and as many lost ended in {ended:?}; {took:?} in all",
        due(rows)
    );
    (database, Measured { ending, counting, calls })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_reads_a_large_table_from_end_to_end() {
    let many = env::var("LINKIS_RM_PLANS").map_or(MANY, |text| text.parse().unwrap());
    let postgres = Counting::start(&Database::fresh().await).await;
    let ((_, of_few), (database, of_many)) =
        tokio::join!(measure(&postgres, "few", FEW), measure(&postgres, "many", many));
    let ending = "for each deadline that passed and each ticket of an EM that goes or is lost";
    let (few_ending, many_ending) = (per_end(of_few.ending, FEW), per_end(of_many.ending, many));
    let dear = [
        compare(ending, &few_ending, &many_ending, MORE_PAGES_PER_END),
        compare("steps of a limit with new labels", &of_few.counting, &of_many.counting, MORE_PAGES),
        compare("calls", &of_few.calls, &of_many.calls, MORE_PAGES),
    ];
    let dear = dear.concat();
    assert!(dear.is_empty(), "{dear:#?}");
    rows_read(&database, &of_many.calls).await;
    a_page_looks_through_no_more_than_it_has_to(&database).await;
    a_page_of_the_present_touches_few_pages(&postgres, &database, many).await;
    filters::a_page_that_finds_nothing_touches_no_more_than_it_may(&postgres, &database).await;
    if let Some(postgres) = postgres.0 {
        postgres.stop().await;
    }
}

/// No table was read from end to end, nor much more of it than what the calls are about.
async fn rows_read(database: &Database, calls: &Costs) {
    // The statistics of a connection are there for certain once it is closed.
    database.pool.close().await;
    let mut connection = database.connect().await;
    let rows: Vec<(String, i64, i64)> = sqlx::query_as(
        // The parts of the history together.
        r"SELECT regexp_replace(relname, '(_action_record)_(\d.*|rest)$', '\1'), coalesce(sum(seq_scan), 0)::bigint,
            sum(coalesce(seq_tup_read, 0) + coalesce((
                SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes i WHERE i.relid = t.relid), 0))::bigint
        FROM pg_stat_user_tables t GROUP BY 1",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();
    let read: BTreeMap<_, _> = rows.into_iter().map(|(table, scans, rows)| (table, (scans, rows))).collect();
    println!("{read:#?}");
    // Some more of what is made beside the calls came before and after them.
    let made = |statement: &str| calls.get(statement).map_or(0, |cost| cost.calls) + 5;
    let ems: i64 = sqlx::query_scalar("SELECT count(*) FROM linkis_em_resource_meta_data")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    for table in LARGE {
        let (scans, rows) = read[table];
        let whole = match table {
            // Who stands where in the whole line is what a page of it shows; and once a minute somebody looks for who is left over.
            "linkis_resource_waiting" => i64::try_from(ROUNDS).unwrap() + made("waiting::sweep"),
            "linkis_em_resource_meta_data" => made(SUMS),
            _ => 0,
        };
        assert!(scans <= whole, "{table} was read from end to end {scans} times");
        // What is counted up to a bound is counted again and again.
        let beside = match table {
            "linkis_user_resource_meta_data" => made(BOUNDED) * COUNTED_MAX,
            "linkis_em_resource_meta_data" => (made(SUMS) + made(SURVEY)) * ems,
            // What has ended is summed a few thousand lines at a time, however many lines of before there are.
            "linkis_resource_action_record" => made("ended_use::list") * LINES_SUMMED_AT_ONCE,
            // The fullest scopes are looked for among all of them, again and again; what calls touch is compared above.
            "linkis_label_resource" => continue,
            _ => 0,
        };
        let pages = if table == "linkis_resource_action_record" { HISTORY_PAGES } else { 1 };
        let most = pages * ROWS_PER_ROUND * i64::try_from(ROUNDS).unwrap() + beside;
        assert!(rows < most, "{table}: {rows} rows were read, at most {most} have to be");
    }
}

/// What a page looks through in vain, the next one does not look through again.
async fn a_page_looks_through_no_more_than_it_has_to(database: &Database) {
    let rm = with_history(database).await;
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
    rm.stop().await;
}

/// However many lines of the part that is being written are of others, a page of what is rare among them touches few pages of the database, and
/// pages go on until there is nothing more to look through.
async fn a_page_of_the_present_touches_few_pages(postgres: &Counting, database: &Database, rows: i64) {
    // As busy instances write them: neighbours are of different batches.
    let present = format!(
        r#"INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels, em_application_name,
            em_instance, resource_type, resource, actor, action_time)
        SELECT 'granted', gen_random_uuid(), 'user' || n % 100, 'IDE', '', '{{}}', 'other', 'host' || n % 100, 'LoadInstance',
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}', 'manager', now()
        FROM generate_series(1, {rows}) n"#
    );
    let mut connection = database.connect().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(present)).execute(&mut connection).await.unwrap();
    let rm = with_history(database).await;
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let em = Some(proto::EmInstance { application_name: "other".into(), instance: "nowhere".into() });
    let all = proto::ListActionsRequest::default();
    for (what, filter) in [
        ("actor", proto::ListActionsRequest { actor: "nobody".into(), ..all.clone() }),
        ("user", proto::ListActionsRequest { user: "nobody".into(), ..all.clone() }),
        ("EM", proto::ListActionsRequest { em, ..all.clone() }),
        ("action", proto::ListActionsRequest { actions: vec!["repaired".into()], ..all.clone() }),
        (
            "actor and action",
            proto::ListActionsRequest { actor: "manager".into(), actions: vec!["repaired".into()], ..all.clone() },
        ),
    ] {
        for newest_first in [false, true] {
            let (mut most, mut pages, mut page_token) = (0, 0, String::new());
            while pages < 8 {
                drop(postgres.costs(database).await);
                let call = proto::ListActionsRequest { newest_first, page_token, ..filter.clone() };
                let page = usage.list_actions(call).await.unwrap().into_inner();
                assert!(page.actions.is_empty(), "{page:?}");
                let costs = postgres.costs(database).await;
                let of_call =
                    |statement: &str| ["action_record::", "history_part::"].iter().any(|of| statement.starts_with(of));
                let touched =
                    costs.iter().filter(|(statement, _)| of_call(statement)).map(|(_, cost)| cost.pages).sum();
                (most, pages, page_token) = (i64::max(most, touched), pages + 1, page.next_page_token);
                if page_token.is_empty() {
                    break;
                }
            }
            println!(
                "the history by {what}, newest first: {newest_first}: up to {most} pages touched by each of {pages}"
            );
            assert!(most <= HISTORY_PAGES_TOUCHED_MAX, "{what}: {most}");
        }
    }
    rm.stop().await;
}
