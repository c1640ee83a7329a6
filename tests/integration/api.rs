//! What every gRPC client expects of a service: reflection, health, pages; and that hot statements use their indexes.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use linkis_rm::{
    domain::report::{EmReport, Health},
    server::ServerExit,
    store::{Store, em_report, user_resource},
    transport::{
        observe,
        proto::{self, usage_service_client::UsageServiceClient},
    },
};
use tonic::transport::Channel;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::harness::*;

macro_rules! services_by_reflection {
    ($version:ident, $address:expr) => {{
        use tonic_reflection::pb::$version::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let message_request = Some(MessageRequest::ListServices(String::new()));
        let question = ServerReflectionRequest { host: String::new(), message_request };
        let mut client = ServerReflectionClient::new(channel_to($address).await);
        let mut answers = client.server_reflection_info(tokio_stream::once(question)).await.unwrap().into_inner();
        match answers.message().await.unwrap().unwrap().message_response {
            Some(MessageResponse::ListServicesResponse(list)) => {
                list.service.into_iter().map(|service| service.name).collect::<BTreeSet<_>>()
            }
            other => panic!("{other:?}"),
        }
    }};
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_lists_the_services_in_both_versions() {
    let (_database, rm) = start().await;
    let mut v1 = services_by_reflection!(v1, &rm.address);
    let mut v1alpha = services_by_reflection!(v1alpha, &rm.address);
    assert!(v1.remove("grpc.reflection.v1.ServerReflection"));
    assert!(v1alpha.remove("grpc.reflection.v1alpha.ServerReflection"));
    assert_eq!(v1, v1alpha);
    for service in [
        "linkis.rm.v1.ResourceManagerService",
        "linkis.rm.v1.UsageService",
        "linkis.rm.v1.AdminService",
        "grpc.health.v1.Health",
    ] {
        assert!(v1.contains(service), "{service} in {v1:?}");
    }
}

#[test]
fn api_page_lists_every_call() {
    let docs = include_str!("../../docs/API.md");
    let calls = docs.split("\n## All calls\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let methods = observe::methods(&[proto::DESCRIPTORS]).unwrap();
    let missing: Vec<_> = methods
        .iter()
        .map(|method| &method.grpc_method)
        .filter(|method| !calls.contains(&format!("`{method}`")))
        .collect();
    assert!(missing.is_empty() && methods.len() >= 44, "not in docs/API.md: {missing:?}");
}

async fn health(client: &mut HealthClient<Channel>, service: &str) -> Option<ServingStatus> {
    let answer = client.check(HealthCheckRequest { service: service.into() }).await.ok()?;
    ServingStatus::try_from(answer.into_inner().status).ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_told_while_serving_and_a_stop_drains() {
    let (_database, rm) = start().await;
    let client = HealthClient::new(channel_to(&rm.address).await);
    for service in ["", "linkis.rm.v1.ResourceManagerService", "linkis.rm.v1.UsageService", "linkis.rm.v1.AdminService"]
    {
        eventually("serving", Duration::from_secs(5), || async {
            health(&mut client.clone(), service).await == Some(ServingStatus::Serving)
        })
        .await;
    }
    assert_eq!(rm.stop().await, ServerExit::Drained);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_return_all_rows_in_pages() {
    let (_database, rm) = start().await;
    for n in 0..7 {
        let host = em(&format!("host-{n},{n}"));
        rm.client.register(registration(host.clone(), load(10, 8, 10))).await.unwrap();
        for user in ["hadoop", "alice"] {
            let grant = rm.client.request_resource(&request(&host, user, load(1, 1, 1))).await.granted();
            if user == "alice" {
                rm.client.resource_inited(&inited(&grant, user, None)).await.unwrap();
            }
        }
    }
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let (mut pages, mut seen, mut page_token) = (0, Vec::new(), String::new());
    while pages == 0 || !page_token.is_empty() {
        let page = usage
            .list_ems(proto::ListEmsRequest { page_size: 3, page_token, ..Default::default() })
            .await
            .unwrap()
            .into_inner();
        seen.extend(page.ems.into_iter().map(|em| em.em.unwrap().instance));
        page_token = page.next_page_token;
        pages += 1;
    }
    assert_eq!(pages, 3);
    assert_eq!(seen, (0..7).map(|n| format!("host-{n},{n}:9102")).collect::<Vec<_>>());

    let all = proto::ListTicketsRequest { page_size: 5, ..Default::default() };
    let (mut pages, mut seen, mut page_token) = (0, BTreeSet::new(), String::new());
    while pages == 0 || !page_token.is_empty() {
        let call = proto::ListTicketsRequest { page_token, ..all.clone() };
        let page = usage.list_tickets(call).await.unwrap().into_inner();
        seen.extend(page.tickets.into_iter().map(|ticket| ticket.ticket_id));
        page_token = page.next_page_token;
        pages += 1;
    }
    assert_eq!((pages, seen.len()), (3, 14));

    let count = async |filter: proto::ListTicketsRequest| {
        usage.clone().list_tickets(filter).await.unwrap().into_inner().tickets.len()
    };
    let one = Some(proto::EmInstance {
        application_name: "linkis-cg-engineconnmanager".into(),
        instance: "host-3,3:9102".into(),
    });
    let filter = proto::ListTicketsRequest::default;
    assert_eq!(count(proto::ListTicketsRequest { em: one.clone(), ..filter() }).await, 2);
    assert_eq!(count(proto::ListTicketsRequest { user: "alice".into(), ..filter() }).await, 7);
    assert_eq!(count(proto::ListTicketsRequest { state: "locked".into(), ..filter() }).await, 7);
    let both = proto::ListTicketsRequest { em: one, user: "alice".into(), state: "used".into(), ..filter() };
    assert_eq!(count(both.clone()).await, 1);
    assert_eq!(count(proto::ListTicketsRequest { state: "locked".into(), ..both }).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_records_every_change() {
    let (_database, rm) = start().await;
    let (host, short) = (em("host1"), Duration::from_millis(50));
    rm.client.register(registration(host.clone(), load(10, 8, 10))).await.unwrap();
    let lived = rm.client.request_resource(&request(&host, "hadoop", load(4, 2, 1))).await.granted();
    rm.client.request_resource(&request(&host, "hadoop", load(99, 2, 1))).await.refused();
    rm.client.resource_inited(&inited(&lived, "hadoop", Some(load(3, 1, 1)))).await.unwrap();
    for _ in 0..2 {
        rm.client.resource_released(&release(&lived, "hadoop")).await.unwrap();
    }
    let asked = linkis_rm::client::ResourceRequest { lock_ttl: Some(short), ..request(&host, "alice", load(1, 1, 1)) };
    let expired = rm.client.request_resource(&asked).await.granted();
    eventually("it expires", Duration::from_secs(5), || async { !lives(&rm.client, expired.ticket_id).await }).await;
    for _ in 0..2 {
        rm.client.register(registration(host.clone(), load(20, 8, 10))).await.unwrap();
    }
    let mut protected = registration(host.clone(), load(20, 8, 10));
    protected.protected = load(1, 0, 0);
    rm.client.register(protected).await.unwrap();
    let gone = rm.client.request_resource(&request(&host, "alice", load(1, 1, 1))).await.granted();
    rm.client.unregister(&host).await.unwrap();

    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut told = Vec::new();
    let mut page_token = String::new();
    while told.is_empty() || !page_token.is_empty() {
        let call = proto::ListActionsRequest { page_size: 4, page_token, ..Default::default() };
        let page = usage.list_actions(call).await.unwrap().into_inner();
        told.extend(page.actions.into_iter().map(|action| (action.action, action.ticket_id, action.user)));
        page_token = page.next_page_token;
    }
    let line = |action: &str, grant: &linkis_rm::domain::operation::Grant, user: &str| {
        (action.to_owned(), grant.ticket_id.to_string(), user.to_owned())
    };
    let of_em = |action: &str| (action.to_owned(), String::new(), String::new());
    assert_eq!(
        told,
        [
            of_em("registered"),
            line("granted", &lived, "hadoop"),
            line("inited", &lived, "hadoop"),
            line("released", &lived, "hadoop"),
            line("granted", &expired, "alice"),
            line("expired", &expired, "alice"),
            of_em("resized"),
            of_em("registered"),
            of_em("resized"),
            line("granted", &gone, "alice"),
            line("unregistered", &gone, "alice"),
            of_em("unregistered"),
        ]
    );
    let call = proto::ListActionsRequest { ticket_id: lived.ticket_id.to_string(), ..Default::default() };
    let life = usage.list_actions(call).await.unwrap().into_inner().actions;
    assert_eq!(life.len(), 3);
    let call = proto::ListActionsRequest { ticket_id: "42".into(), ..Default::default() };
    assert_eq!(usage.list_actions(call).await.unwrap_err().code(), tonic::Code::InvalidArgument);
}

/// With sequential scans discouraged, one that happens all the same means that an index is missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_use_indexes() {
    let begun = Instant::now();
    let (database, rm) = start().await;
    let host = em("host1");
    let epoch = rm.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap().epoch;
    let store = Store::open(database.target(), options().history).await.unwrap();
    for sequence in 1..=10 {
        let mut asked = request(&host, "hadoop", load(1, 1, 1));
        asked.request_id = Some(uuid::Uuid::new_v4().to_string());
        let grant = rm.client.request_resource(&asked).await.granted();
        rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        rm.client.tickets(Some(&host)).await.unwrap();
        rm.client.tickets(None).await.unwrap();
        rm.client.ticket(grant.ticket_id).await.unwrap();
        rm.client.ems().await.unwrap();
        let (health, tickets) = (Health::Healthy, vec![grant.ticket_id, uuid::Uuid::new_v4()]);
        let report = EmReport { em: host.clone(), epoch, sequence, health, load: None, tickets, observed: None };
        assert_eq!(rm.client.heartbeat(&report).await.unwrap().unknown_tickets.len(), 1);
        user_resource::update_missed(&store.pool().await.unwrap(), &report, &[(grant.ticket_id, 1)]).await.unwrap();
        assert_eq!(em_report::silent(&store.pool().await.unwrap(), Duration::ZERO, None, 9).await.unwrap().len(), 1);
        assert_eq!(em_report::survey(&store.pool().await.unwrap(), None, 9, Duration::ZERO).await.unwrap().len(), 1);
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    rm.client.unregister(&host).await.unwrap();
    store.close().await;
    rm.stop().await;
    eventually("statistics are written", Duration::from_secs(10), || async {
        let used =
            "SELECT coalesce(sum(idx_scan), 0)::bigint FROM pg_stat_user_tables WHERE relname LIKE 'linkis_user%'";
        database.count(used).await > 40
    })
    .await;
    let scanned: Vec<(String, i64)> = sqlx::query_as(
        "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname LIKE 'linkis%' AND seq_scan > 0 AND seq_tup_read > 0
            AND relname NOT LIKE 'linkis_rm_migration%'",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    // What is told of the cluster as a whole is summed over all EMs, with what they report, every few seconds; and while these tables
    // were empty, some looked whether they are.
    let summed = ["linkis_em_resource_meta_data", "linkis_em_report", "linkis_em_drain"];
    let sums = i64::try_from(begun.elapsed().as_secs() / 5).unwrap() + 5;
    let is_summed = |(table, scans): &(String, i64)| summed.contains(&table.as_str()) && *scans <= sums;
    let scanned: Vec<_> = scanned.into_iter().filter(|table| !is_summed(table)).collect();
    assert_eq!(scanned, []);
}
