//! Lookups: a ticket without its user and EM, tickets by their engine, and many objects by their keys.

use std::time::Duration;

use rm_client::ResourceRequest;
use rm_model::{operation::Grant, resource::Resource, ticket::EngineInstance};
use rm_proto::v1::{
    self as proto, resource_manager_service_client::ResourceManagerServiceClient,
    usage_service_client::UsageServiceClient,
};
use tokio::task::JoinSet;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::{harness::*, proxy::FaultPlan, scale::crowd};

type Manager = ResourceManagerServiceClient<Channel>;

/// Releases a ticket by its id alone.
async fn release_alone(manager: &Manager, ticket_id: Uuid) -> Result<(), Status> {
    let call = proto::ResourceReleasedRequest { ticket_id: ticket_id.to_string(), ..Default::default() };
    manager.clone().resource_released(call).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_by_ticket_id_ends_ticket() {
    let (database, rm) = start().await;
    let (em1, going) = (em("host1"), em("host2"));
    for em1 in [&em1, &going] {
        rm.client.register(registration(em1.clone(), load(64, 16, 10))).await.unwrap();
    }
    let manager = Manager::connect(rm.address.clone()).await.unwrap();
    let ask = async |ask: ResourceRequest| rm.client.request_resource(&ask).await.granted();
    let locked = ask(request(&em1, "hadoop", load(2, 2, 1))).await;
    let used = ask(request(&em1, "alice", load(2, 2, 1))).await;
    rm.client.resource_inited(&inited(&used, "alice", None)).await.unwrap();
    // A repetition succeeds, as for a release with all fields.
    for grant in [&locked, &used, &used] {
        release_alone(&manager, grant.ticket_id).await.unwrap();
        assert!(!lives(&rm.client, grant.ticket_id).await);
    }
    assert!(rm.client.em(&em1).await.unwrap().is_idle());
    // For each kind of end.
    let short = ResourceRequest { lock_ttl: Some(Duration::from_millis(20)), ..request(&em1, "hadoop", load(1, 1, 1)) };
    let expired = ask(short).await;
    eventually("it expires", Duration::from_secs(10), async || !lives(&rm.client, expired.ticket_id).await).await;
    let gone = ask(request(&going, "hadoop", load(1, 1, 1))).await;
    rm.client.unregister(&going).await.unwrap();
    for grant in [&expired, &gone] {
        release_alone(&manager, grant.ticket_id).await.unwrap();
    }
    let nothing = release_alone(&manager, Uuid::now_v7()).await.unwrap_err();
    assert_eq!(code_and_reason(&nothing), (Code::NotFound, "TICKET_NOT_FOUND".to_owned()));
    // A field that is set must be right, also for an ended ticket.
    let living = ask(request(&em1, "hadoop", load(1, 1, 1))).await;
    let other = Some(proto::EmInstance { application_name: "ecm".into(), instance: "elsewhere".into() });
    for grant in [&living, &used] {
        let named = proto::ResourceReleasedRequest { ticket_id: grant.ticket_id.to_string(), ..Default::default() };
        let of_eve = proto::ResourceReleasedRequest { user: "eve".into(), ..named.clone() };
        for call in [of_eve, proto::ResourceReleasedRequest { em: other.clone(), ..named }] {
            let refused = manager.clone().resource_released(call).await.unwrap_err();
            assert_eq!(code_and_reason(&refused), (Code::NotFound, "TICKET_NOT_FOUND".to_owned()));
        }
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// Concurrent releases by ticket id alone share reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_by_ticket_id_share_reads() {
    const CONNECTIONS: usize = 10;
    const EACH: usize = 300;
    let database = Database::fresh().await;
    let (proxy, proxied) = database.behind_proxy("lookups");
    let rm = Instance::start(&proxied).await;
    let em1 = em("crowded");
    let many = CONNECTIONS * EACH;
    crowd(&database, &rm.client, &em1, i64::try_from(many).unwrap() + 1, "1 hour").await;
    let mut ids: Vec<Uuid> = database.column("SELECT ticket_id FROM linkis_user_resource_meta_data").await;
    let mut managers = Vec::new();
    for _ in 0..CONNECTIONS {
        managers.push(Manager::connect(rm.address.clone()).await.unwrap());
    }
    // A first read has opened the connection. Then the database does not reply until all calls have arrived.
    release_alone(&managers[0], ids.pop().unwrap()).await.unwrap();
    proxy.set_fault_plan(FaultPlan::Hole);
    let mut calls = JoinSet::new();
    for (number, ticket_id) in ids.into_iter().enumerate() {
        let manager = managers[number % CONNECTIONS].clone();
        calls.spawn(async move { release_alone(&manager, ticket_id).await.unwrap() });
    }
    let arrived = format!("grpc_method=\"ResourceReleased\"}} {}\n", many + 1);
    eventually("all have come", Duration::from_secs(12), async || {
        rm.metrics
            .text()
            .lines()
            .any(|line| line.starts_with("grpc_server_started_total") && format!("{line}\n").ends_with(&arrived))
    })
    .await;
    proxy.set_fault_plan(FaultPlan::Fair);
    calls.join_all().await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
    rm.stop().await;
    database.pool.close().await;
    // A read outside a transaction counts as one transaction. The statistics of a connection are complete once it is closed.
    let mut connection = database.connect().await;
    let transactions: i64 =
        sqlx::query_scalar("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
            .fetch_one(&mut connection)
            .await
            .unwrap();
    assert!(transactions < 1000, "{transactions} transactions");
}

fn engine_message(engine: &EngineInstance) -> Option<proto::EngineInstance> {
    let (application_name, instance) = (engine.application_name.to_string(), engine.instance.to_string());
    Some(proto::EngineInstance { application_name, instance })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_lookup_by_engine_returns_single_match() {
    let (_database, rm) = start().await;
    let ems = [em("host1"), em("host2")];
    for host in &ems {
        rm.client.register(registration(host.clone(), load(64, 16, 20))).await.unwrap();
    }
    let take = async |host: usize, user: &str, who: Option<EngineInstance>| -> Grant {
        let grant = rm.client.request_resource(&request(&ems[host], user, load(1, 1, 1))).await.granted();
        if let Some(engine) = who {
            let report = rm_model::operation::ConfirmTicket { engine, ..inited(&grant, user, None) };
            rm.client.resource_inited(&report).await.unwrap();
        }
        grant
    };
    take(0, "alice", None).await;
    let one = take(0, "alice", Some(engine("one"))).await;
    let mut of_many = Vec::new();
    for n in 0..7 {
        let user = if n < 3 { "alice" } else { "bob" };
        of_many.push(take(n % 2, user, Some(engine("many"))).await.ticket_id.to_string());
    }
    of_many.sort_unstable();

    let usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let get = async |ticket_id: String, engine: Option<proto::EngineInstance>| {
        let answer = usage.clone().get_ticket(proto::GetTicketRequest { ticket_id, engine }).await;
        answer.map(|answer| answer.into_inner().ticket.unwrap().ticket_id)
    };
    assert_eq!(get(String::new(), engine_message(&engine("one"))).await.unwrap(), one.ticket_id.to_string());
    assert_eq!(get(one.ticket_id.to_string(), None).await.unwrap(), one.ticket_id.to_string());
    let by_id = proto::GetTicketRequest { ticket_id: one.ticket_id.to_string(), engine: None };
    let ticket = usage.clone().get_ticket(by_id).await.unwrap().into_inner().ticket.unwrap();
    assert_eq!(ticket.principal, "anonymous");
    let many = get(String::new(), engine_message(&engine("many"))).await.unwrap_err();
    assert_eq!(code_and_reason(&many), (Code::FailedPrecondition, "MANY_TICKETS".to_owned()));
    let none = get(String::new(), engine_message(&engine("none"))).await.unwrap_err();
    assert_eq!(code_and_reason(&none), (Code::NotFound, "TICKET_NOT_FOUND".to_owned()));
    let nameless = Some(proto::EngineInstance { application_name: "e".into(), instance: String::new() });
    for (ticket_id, engine, field) in [
        (String::new(), None, "ticket_id"),
        (one.ticket_id.to_string(), engine_message(&engine("one")), "engine"),
        (String::new(), nameless.clone(), "engine.instance"),
    ] {
        let status = get(ticket_id, engine).await.unwrap_err();
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
    }

    // In pages, and together with every other filter.
    let list = async |call: proto::ListTicketsRequest| {
        let (mut found, mut page_token) = (Vec::new(), String::new());
        loop {
            let call = proto::ListTicketsRequest { page_token, ..call.clone() };
            let page = usage.clone().list_tickets(call).await.unwrap().into_inner();
            assert!(page.tickets.len() <= 3);
            found.extend(page.tickets.into_iter().map(|ticket| ticket.ticket_id));
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return found;
            }
        }
    };
    let of_engine =
        proto::ListTicketsRequest { engine: engine_message(&engine("many")), page_size: 3, ..Default::default() };
    assert_eq!(list(of_engine.clone()).await, of_many, "oldest first");
    let em = Some(proto::EmInstance {
        application_name: ems[1].application_name.to_string(),
        instance: ems[1].instance.to_string(),
    });
    let of = |user: &str, state: &str| proto::ListTicketsRequest {
        user: user.into(),
        state: state.into(),
        ..of_engine.clone()
    };
    assert_eq!(list(of("alice", "")).await.len(), 3);
    assert_eq!(list(of("bob", "used")).await.len(), 4);
    assert_eq!(list(of("", "locked")).await.len(), 0);
    assert_eq!(list(proto::ListTicketsRequest { em: em.clone(), ..of("", "") }).await.len(), 3);
    assert_eq!(list(proto::ListTicketsRequest { em, ..of("alice", "used") }).await.len(), 1);
    let bad = proto::ListTicketsRequest { engine: nameless, ..Default::default() };
    assert_eq!(usage.clone().list_tickets(bad).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_get_returns_items_in_key_order() {
    let (_database, rm) = start().await;
    let hosts = ["c", "a", "b"].map(em);
    let mut granted = Vec::new();
    for host in &hosts {
        rm.client.register(registration(host.clone(), load(64, 16, 20))).await.unwrap();
        let grant = rm.client.request_resource(&request(host, "hadoop", load(1, 1, 1))).await.granted();
        granted.push(grant.ticket_id.to_string());
    }
    let ended = rm.client.request_resource(&request(&hosts[0], "hadoop", load(1, 1, 1))).await.granted();
    rm.client.resource_released(&release(&ended, "hadoop")).await.unwrap();
    let [ended, never] = [ended.ticket_id, Uuid::now_v7()].map(|id| id.to_string());
    let [c, a, b] = hosts.map(|host| proto::EmInstance {
        application_name: host.application_name.to_string(),
        instance: host.instance.to_string(),
    });
    let nowhere = |n: usize| proto::EmInstance { application_name: "nowhere".into(), instance: n.to_string() };
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();

    let ems = vec![b.clone(), nowhere(2), c.clone(), nowhere(1), a.clone(), c.clone()];
    let answer = usage.batch_get_ems(proto::BatchGetEmsRequest { ems }).await.unwrap().into_inner();
    let found: Vec<_> = answer.ems.iter().filter_map(|em| em.em.clone()).collect();
    assert_eq!((found, answer.missing), (vec![b, c.clone(), a, c.clone()], vec![nowhere(2), nowhere(1)]));
    let alone = usage.get_em(proto::GetEmRequest { em: Some(c) }).await.unwrap().into_inner();
    assert_eq!(answer.ems.get(1), alone.em.as_ref(), "as a call for the item alone returns it");

    let ticket_ids = vec![granted[2].clone(), ended.clone(), granted[0].clone(), never.clone(), granted[2].clone()];
    let answer = usage.batch_get_tickets(proto::BatchGetTicketsRequest { ticket_ids }).await.unwrap().into_inner();
    let found: Vec<_> = answer.tickets.iter().map(|ticket| ticket.ticket_id.clone()).collect();
    let expected = vec![granted[2].clone(), granted[0].clone(), granted[2].clone()];
    assert_eq!((found, answer.missing), (expected, vec![ended, never]));
    let alone = proto::GetTicketRequest { ticket_id: granted[2].clone(), engine: None };
    assert_eq!(answer.tickets.first(), usage.get_ticket(alone).await.unwrap().into_inner().ticket.as_ref());

    // No key, the maximum, and one key more.
    for (count, is_allowed) in [(0, true), (1000, true), (1001, false)] {
        let ems = usage.batch_get_ems(proto::BatchGetEmsRequest { ems: (0..count).map(nowhere).collect() }).await;
        let ticket_ids = vec![granted[0].clone(); count];
        let tickets = usage.batch_get_tickets(proto::BatchGetTicketsRequest { ticket_ids }).await;
        match is_allowed {
            true => {
                assert_eq!(ems.unwrap().into_inner().missing.len(), count);
                assert_eq!(tickets.unwrap().into_inner().tickets.len(), count);
            }
            false => {
                let fields = [(ems.unwrap_err(), "ems"), (tickets.unwrap_err(), "ticket_ids")];
                for (status, field) in fields {
                    assert_eq!(code_and_reason(&status), (Code::InvalidArgument, "INVALID_FIELD".to_owned()));
                    assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
                }
            }
        }
    }
    let ticket_ids = vec![granted[0].clone(), "42".to_owned()];
    let status = usage.batch_get_tickets(proto::BatchGetTicketsRequest { ticket_ids }).await.unwrap_err();
    assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "ticket_ids[1]");
    let status = usage.batch_get_ems(proto::BatchGetEmsRequest { ems: vec![proto::EmInstance::default()] }).await;
    let violations = status.unwrap_err().get_details_bad_request().unwrap().field_violations;
    assert_eq!(violations[0].field, "ems[0].application_name");
}

/// Hundreds of calls for a thousand objects each, from few connections: each call is served or rejected, and other calls are served
/// meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_get_crowd_delays_no_other_call() {
    const CALLS: usize = 300;
    let (database, rm) = start().await;
    let em1 = em("crowded");
    crowd(&database, &rm.client, &em1, 1000, "1 hour").await;
    let ids: Vec<Uuid> = database.column("SELECT ticket_id FROM linkis_user_resource_meta_data").await;
    let ticket_ids: Vec<String> = ids.iter().map(Uuid::to_string).collect();
    let mut calls = JoinSet::new();
    for _ in 0..4 {
        let usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
        for _ in 0..CALLS / 4 {
            let (mut usage, ticket_ids) = (usage.clone(), ticket_ids.clone());
            calls.spawn(async move {
                let answer = usage.batch_get_tickets(proto::BatchGetTicketsRequest { ticket_ids }).await;
                answer.map(|answer| answer.into_inner().tickets.len()).map_err(|status| code_and_reason(&status))
            });
        }
    }
    let mut served = 0;
    while !calls.is_empty() {
        let grant = rm.client.request_resource(&request(&em1, "hadoop", Resource::cpu(1).unwrap())).await.granted();
        assert_eq!(rm.client.ticket(grant.ticket_id).await.unwrap().id, grant.ticket_id);
        served += 1;
        while let Some(answer) = calls.try_join_next() {
            match answer.unwrap() {
                Ok(tickets) => assert_eq!(tickets, 1000),
                Err(refused) => assert_eq!(refused, (Code::ResourceExhausted, "OVERLOADED".to_owned())),
            }
        }
    }
    assert!(served > 3, "{served} others were served meanwhile");
    assert_eq!(assert_invariants(&database, &rm.client).await, 1000 + served);
}
