//! Calls about one EM or user beside another that has nearly all rows: their cost is independent of the other's rows.

use std::time::Duration;

use rm_client::ResourceRequest;
use rm_model::{
    em::EmInstance,
    limit::{LabelPattern, Rule},
    operation::Grant,
    report::{EmReport, Health},
    resource::Dimension,
};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use rm_store::history_partition;
use uuid::Uuid;

use super::{
    costs::{Costs, Counting},
    with_history,
};
use crate::harness::*;

/// Numbers of tickets, history lines, waiting requests, scopes, refusals and hours of use of the other EM or user.
const FEW: i64 = 6000;
const MANY: i64 = 18_000;

/// Number of EMs with few tickets; each makes all calls once and then unregisters.
const EMS: usize = 6;

/// Number of tickets of each of them.
const TICKETS: usize = 3;

/// Maximum ratio of average pages between the two sizes, unless an index is a level deeper.
const PAGES_RATIO: f64 = 1.3;
const PAGES_DEEPER: f64 = 4.0;

/// The statements that read tickets, waiting requests, history lines, scopes, refusals and hours of use of an EM or a user.
const OF_ONE: [&str; 8] = [
    "action_record::",
    "label_resource::list",
    "overview::going",
    "refusal::list",
    "usage_hour::list",
    "user_resource::",
    "waiting::list",
    "waiting::line",
];

fn rare(number: usize) -> EmInstance {
    em(&format!("rare{number}"))
}

/// An EM with few tickets.
struct Rare {
    em: EmInstance,
    epoch: i64,
    grants: Vec<Grant>,
}

async fn register(rm: &Instance, number: usize) -> Rare {
    let em = rare(number);
    let epoch = rm.client.register(registration(em.clone(), load(10, 10, 10))).await.unwrap().epoch;
    let mut grants = Vec::new();
    for ticket in 0..TICKETS {
        let request = ResourceRequest {
            creator: name("rare"),
            engine_type: "rare-1".into(),
            ..request(&em, "rare", load(1, 1, 1))
        };
        let grant = rm.client.request_resource(&request).await.granted();
        if ticket > 0 {
            rm.client.resource_inited(&grant.inited(name("rare"), engine("rare"))).await.unwrap();
        }
        grants.push(grant);
    }
    Rare { em, epoch, grants }
}

/// Adds rows for one user and one EM in the order of time, as the service writes them, and a few older rows for the rare user.
async fn fill(database: &Database, rows: i64) {
    let fill = format!(
        r#"SELECT linkis_rm_make_history_part(hour - 86400, hour - 82800)
            FROM (SELECT extract(epoch FROM date_trunc('hour', now()))::bigint AS hour) h;
        UPDATE linkis_resource_action_record SET action_time = date_trunc('hour', now()) - interval '1 day';
        INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time, version,
            counted_to)
        SELECT em_application_name, 'large', resource_type, total_resource, protected_resource, used_resource, locked_resource,
            left_resource, over_committed, labels, epoch, register_time, 1, counted_to
        FROM linkis_em_resource_meta_data WHERE em_instance LIKE 'rare0%';
        CREATE TEMPORARY TABLE ticket AS
        SELECT (lpad(to_hex(n), 8, '0') || '-0000-7000-8000-000000000000')::uuid AS ticket_id, 'crowd' AS "user",
            'linkis-cg-engineconnmanager' AS em_application_name, 'large' AS em_instance,
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}'::jsonb AS resource
        FROM generate_series(1, {rows}) n;
        INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_used_resource, labels, locked_time, used_time, engine_application_name, engine_instance)
        SELECT ticket_id, "user", 'IDE', '', em_application_name, em_instance, 'LoadInstance', resource, '{{}}', now(), now(),
            'linkis-cg-engineconn', 'large'
        FROM ticket ORDER BY ticket_id;
        -- In the order of time: in a part that is over, first of the rare user, and then in the part that is being written.
        INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels, em_application_name,
            em_instance, resource_type, resource, actor, action_time)
        SELECT 'granted', ticket_id, name, 'IDE', '', '{{}}', em_application_name, em, 'LoadInstance', resource, name,
            date_trunc('hour', now()) - days * interval '1 day'
        FROM (
            SELECT ticket_id, 'rare' AS name, em_application_name, 'rare0:9102' AS em, resource, 1 AS days, 1 AS nth
            FROM ticket WHERE ticket_id < '00000015-0000-7000-8000-000000000000'
            UNION ALL
            SELECT ticket_id, "user", em_application_name, em_instance, resource, days, 3 - days FROM ticket, generate_series(0, 1) days) t
        ORDER BY nth, ticket_id;
        INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
        SELECT label_set_id, scope, '{{"cores":1}}', '{{}}', sha256(convert_to(label_set_id || ':' || scope, 'UTF8'))
        FROM linkis_label_set, generate_series(1, {rows}) n, jsonb_build_object('creator', 'crowd', 'engine_type', 'crowd', 'tenant',
            n::text, 'user', 'crowd') scope;
        INSERT INTO linkis_resource_refusal (period_start, key_hash, instance_id, "user", scope_kind, scope, dimension, rule,
            refusals, last_requested, last_available, last_time)
        SELECT date_trunc('minute', now()) - n % 50 * interval '1 minute', sha256(n::text::bytea), gen_random_uuid(),
            CASE n % 1000 WHEN 0 THEN 'rare' ELSE 'crowd' END, 'em', 'em=any', 'cores', '', 1, 1, 0, now()
        FROM generate_series(0, {rows}) n WHERE n % 1000 > 0 OR n < 5000;
        INSERT INTO linkis_resource_usage_hour (used_by, is_rest, name, em_instance, hour, tickets, core_seconds, byte_seconds,
            queue_core_seconds, queue_byte_seconds)
        SELECT 'user', false, CASE n % 1000 WHEN 0 THEN 'rare' ELSE 'crowd' || n % 1000 END, '',
            date_trunc('hour', now()) - n / 1000 * interval '1 hour', 1, 1, 1, 0, 0
        FROM generate_series(0, {rows}) n WHERE n % 1000 > 0 OR n < 5000;
        INSERT INTO linkis_rm_instance (instance_id, alive_until)
        VALUES ('00000000-0000-0000-0000-000000000001', now() + interval '1 day');
        INSERT INTO linkis_resource_waiting (ticket_id, instance_id, principal, "user", creator, engine_type, em_application_name,
            em_instance, any_em, resource_type, resource, labels, waiting_since, wait_until, position, caps)
        SELECT ticket_id, '00000000-0000-0000-0000-000000000001', 'm', "user", 'IDE', '', em_application_name, em_instance, false,
            'LoadInstance', resource, '{{}}', now(), now() + interval '1 day', '\x0000'::bytea || int8send(0) || uuid_send(ticket_id), '[]'
        FROM ticket;
        INSERT INTO linkis_resource_waiting_entry (wait_key, ticket_id, instance_id, position, resource_type, resource, wait_until,
            is_short, wait_key_hash)
        SELECT jsonb_build_object('em', jsonb_build_array(em_application_name, em_instance)), ticket_id, instance_id, position,
            resource_type, resource, wait_until, true, sha256(em_instance::bytea)
        FROM linkis_resource_waiting;"#
    );
    let mut connection = database.connect().await;
    execute(&mut connection, fill).await;
    while history_partition::index_oldest(&mut database.connect().await).await.unwrap() {}
}

/// Makes all calls about one of the EMs and the rare user. The EM then unregisters.
async fn round(rm: &Instance, rare: &Rare) {
    let (client, Rare { em, epoch, grants }) = (&rm.client, rare);
    for (sequence, tickets) in [(1, Uuid::new_v4()), (2, grants[1].ticket_id)] {
        let (health, tickets) = (Health::Healthy, [tickets].into());
        let report = EmReport {
            em: em.clone(),
            epoch: *epoch,
            sequence,
            health,
            load: None,
            tickets,
            observed: None,
            idle: vec![],
        };
        client.heartbeat(&report).await.unwrap();
    }
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let message = Some(proto::EmInstance {
        application_name: em.application_name.to_string(),
        instance: em.instance.to_string(),
    });
    let (user, page_size) = ("rare".to_owned(), 10);
    let tickets = proto::ListTicketsRequest { page_size, ..Default::default() };
    let running = engine("rare");
    let running = proto::EngineInstance {
        application_name: running.application_name.to_string(),
        instance: running.instance.to_string(),
    };
    for of_one in [
        proto::ListTicketsRequest { em: message.clone(), ..tickets.clone() },
        proto::ListTicketsRequest { em: message.clone(), state: "locked".into(), ..tickets.clone() },
        proto::ListTicketsRequest { user: user.clone(), ..tickets.clone() },
        proto::ListTicketsRequest { engine: Some(running), ..tickets.clone() },
    ] {
        assert!(!usage.list_tickets(of_one).await.unwrap().into_inner().tickets.is_empty());
    }
    let waiting = proto::ListWaitingRequest { page_size, ..Default::default() };
    let queued = Some(proto::EmInstance {
        application_name: em.application_name.to_string(),
        instance: rare_full().instance.to_string(),
    });
    for of_one in [
        proto::ListWaitingRequest { user: user.clone(), ..waiting.clone() },
        proto::ListWaitingRequest { em: queued, ..waiting },
    ] {
        assert_eq!(usage.list_waiting(of_one).await.unwrap().into_inner().waiting.len(), 1);
    }
    for key in ["user", "creator", "engine_type"] {
        let labels = [(key.to_owned(), if key == "engine_type" { "rare-1" } else { "rare" }.to_owned())].into();
        let call = proto::ListScopesRequest { labels, page_size, ..Default::default() };
        assert_eq!(usage.list_scopes(call).await.unwrap().into_inner().scopes.len(), 1, "{key}");
    }
    let refusals = proto::ListRefusalsRequest { user: user.clone(), page_size, ..Default::default() };
    assert_eq!(usage.list_refusals(refusals).await.unwrap().into_inner().refusals.len(), 5);
    for (hourly, sums) in [(true, 5), (false, 1)] {
        let by = proto::UsageBy::User.into();
        let call = proto::GetUsageRequest { by, user: user.clone(), hourly, page_size, ..Default::default() };
        let found = usage.get_usage(call).await.unwrap().into_inner().sums.len();
        // Another hour may have begun since.
        assert!((sums..=sums + usize::from(hourly)).contains(&found), "{found}");
    }
    history(&mut usage, &user, grants[0].ticket_id).await;
    rm.client.unregister(em).await.unwrap();
}

/// Pages of the part of the history that has indexes: of the rare user, EM and actor, and of the user, EM and actor that have nearly all lines.
async fn history(usage: &mut UsageServiceClient<tonic::transport::Channel>, user: &str, ticket_id: Uuid) {
    let now = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap();
    let to_time = Some(prost_types::Timestamp { seconds: now - 7200, nanos: 0 });
    let on = |instance: &str| {
        let application_name = rare_full().application_name.to_string();
        Some(proto::EmInstance { application_name, instance: instance.into() })
    };
    let all = proto::ListActionsRequest { page_size: 10, ..Default::default() };
    for newest_first in [false, true] {
        let past = proto::ListActionsRequest { to_time, newest_first, ..all.clone() };
        for of_one in [
            proto::ListActionsRequest { user: user.into(), ..past.clone() },
            proto::ListActionsRequest { em: on("rare0:9102"), ..past.clone() },
            proto::ListActionsRequest { actor: user.into(), ..past.clone() },
            proto::ListActionsRequest { user: "crowd".into(), actions: vec!["granted".into()], ..past.clone() },
            proto::ListActionsRequest { em: on("large"), ..past.clone() },
            proto::ListActionsRequest { actor: "crowd".into(), ..past },
        ] {
            assert_eq!(usage.list_actions(of_one).await.unwrap().into_inner().actions.len(), 10);
        }
        let of_ticket = proto::ListActionsRequest { ticket_id: ticket_id.to_string(), newest_first, ..all.clone() };
        assert_eq!(usage.list_actions(of_ticket).await.unwrap().into_inner().actions.len(), 1);
    }
}

/// An EM without free capacity: a request of the rare user waits for it.
fn rare_full() -> EmInstance {
    em("full")
}

async fn measure(postgres: &Counting, name_of: &str, rows: i64) -> Costs {
    let database = postgres.database(name_of).await;
    let rm = with_history(&database).await;
    let labels = ["user", "creator", "engine_type"].map(|label| (label.to_owned(), None));
    let max = [(Dimension::Instances, 1_000_000)].into();
    rm.client
        .set_limit(&Rule {
            pattern: LabelPattern::new(labels.into()),
            mode: Default::default(),
            max,
            guarantee: Default::default(),
        })
        .await
        .unwrap();
    let mut ems = Vec::new();
    for number in 0..EMS {
        ems.push(register(&rm, number).await);
    }
    rm.client.register(registration(rare_full(), load(1, 1, 1))).await.unwrap();
    rm.stop().await;
    fill(&database, rows).await;
    execute(&mut database.connect().await, "VACUUM ANALYZE").await;
    // PostgreSQL plans by the analyzed statistics.
    let rm = with_history(&database).await;
    let wait_timeout = Duration::from_secs(600);
    let waits = ResourceRequest { wait_timeout, ..request(&rare_full(), "rare", load(1, 1, 1)) };
    rm.client.request_resource(&request(&rare_full(), "other", load(1, 1, 1))).await.granted();
    let call = request_in_task(&rm.client, waits);
    let in_line = r#"SELECT count(*) FROM linkis_resource_waiting WHERE "user" = 'rare'"#;
    eventually("it waits", Duration::from_secs(30), async || database.count(in_line).await == 1).await;
    drop(postgres.costs(&database).await);
    for rare in &ems {
        round(&rm, rare).await;
    }
    let costs = postgres.costs(&database).await;
    call.abort();
    rm.stop().await;
    costs
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_about_one_em_touch_no_other_rows() {
    let postgres = Counting::start(&Database::fresh().await, "plans-rare").await;
    let (few, many) =
        tokio::join!(measure(&postgres, "rare_beside_few", FEW), measure(&postgres, "rare_beside_many", MANY));
    let mut dear = Vec::new();
    for (statement, many) in many.iter().filter(|(statement, _)| OF_ONE.iter().any(|of| statement.starts_with(of))) {
        let Some(few) = few.get(statement) else { continue };
        println!("{statement:<50}{:>10.1}{:>10.1}", few.pages_per_call(), many.pages_per_call());
        let (few, many) = (few.pages_per_call(), many.pages_per_call());
        if many > (few * PAGES_RATIO).max(few + PAGES_DEEPER) {
            dear.push(format!("{statement}: {few:.1}, then {many:.1} pages"));
        }
    }
    postgres.stop().await;
    assert!(dear.is_empty(), "{dear:#?}");
}
