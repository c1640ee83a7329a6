//! The API as a whole: the documented calls, pages of lists, history lines, and indexes of hot statements.

use std::{collections::BTreeSet, time::Duration};

use rm_model::report::{EmReport, Health};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use rm_store::{Store, em_report, user_resource};

use tonic_types::StatusExt as _;

use crate::harness::*;

#[test]
fn api_page_lists_every_call() {
    let docs = include_str!("../../docs/API.md");
    let calls = docs.split("\n## All calls\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let methods = methods(proto::DESCRIPTORS);
    let missing: Vec<_> =
        methods.iter().map(|method| &method.name).filter(|method| !calls.contains(&format!("`{method}`"))).collect();
    assert!(missing.is_empty() && methods.len() >= 44, "not in docs/API.md: {missing:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_return_all_rows_in_pages() {
    let (_database, rm) = start().await;
    for n in 0..7 {
        let em1 = em(&format!("host-{n},{n}"));
        rm.client.register(registration(em1.clone(), load(10, 8, 10))).await.unwrap();
        for user in ["hadoop", "alice"] {
            let grant = rm.client.request_resource(&request(&em1, user, load(1, 1, 1))).await.granted();
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

    // A page token belongs to its call and its filters; the size of a page is free.
    let of_user = |user: &str, page_token: &str| proto::ListTicketsRequest {
        user: user.into(),
        page_token: page_token.into(),
        page_size: 1,
        ..Default::default()
    };
    let ems = proto::ListEmsRequest { page_size: 1, ..Default::default() };
    let of_ems = usage.list_ems(ems).await.unwrap().into_inner().next_page_token;
    let of_hadoop = usage.list_tickets(of_user("hadoop", "")).await.unwrap().into_inner().next_page_token;
    let next = proto::ListTicketsRequest { page_size: i32::MAX, ..of_user("hadoop", &of_hadoop) };
    assert_eq!(usage.list_tickets(next).await.unwrap().into_inner().tickets.len(), 6);
    for other in [of_user("alice", &of_hadoop), of_user("hadoop", &of_ems)] {
        let status = usage.list_tickets(other).await.unwrap_err();
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "page_token");
    }

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
    let (em1, short) = (em("host1"), Duration::from_millis(50));
    rm.client.register(registration(em1.clone(), load(10, 8, 10))).await.unwrap();
    let lived = rm.client.request_resource(&request(&em1, "hadoop", load(4, 2, 1))).await.granted();
    rm.client.request_resource(&request(&em1, "hadoop", load(99, 2, 1))).await.refused();
    rm.client.resource_inited(&inited(&lived, "hadoop", Some(load(3, 1, 1)))).await.unwrap();
    for _ in 0..2 {
        rm.client.resource_released(&release(&lived, "hadoop")).await.unwrap();
    }
    let asked = rm_client::ResourceRequest { lock_ttl: Some(short), ..request(&em1, "alice", load(1, 1, 1)) };
    let expired = rm.client.request_resource(&asked).await.granted();
    eventually("it expires", Duration::from_secs(5), || async { !lives(&rm.client, expired.ticket_id).await }).await;
    for _ in 0..2 {
        rm.client.register(registration(em1.clone(), load(20, 8, 10))).await.unwrap();
    }
    let mut protected = registration(em1.clone(), load(20, 8, 10));
    protected.protected = load(1, 0, 0);
    rm.client.register(protected).await.unwrap();
    let gone = rm.client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
    rm.client.unregister(&em1).await.unwrap();

    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut got = Vec::new();
    let mut page_token = String::new();
    while got.is_empty() || !page_token.is_empty() {
        let call = proto::ListActionsRequest { page_size: 4, page_token, ..Default::default() };
        let page = usage.list_actions(call).await.unwrap().into_inner();
        got.extend(page.actions.into_iter().map(|action| (action.action, action.ticket_id, action.user)));
        page_token = page.next_page_token;
    }
    let line = |action: &str, grant: &rm_model::operation::Grant, user: &str| {
        (action.to_owned(), grant.ticket_id.to_string(), user.to_owned())
    };
    let of_em = |action: &str| (action.to_owned(), String::new(), String::new());
    assert_eq!(
        got,
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

/// Sequential scans are discouraged, so that a sequential scan means a missing index.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_use_indexes() {
    let (database, rm) = start().await;
    let em1 = em("host1");
    let epoch = rm.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap().epoch;
    let store = Store::open(database.target(), HISTORY).await.unwrap();
    for sequence in 1..=10 {
        let mut asked = request(&em1, "hadoop", load(1, 1, 1));
        asked.request_id = Some(uuid::Uuid::new_v4().to_string());
        let grant = rm.client.request_resource(&asked).await.granted();
        rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        rm.client.tickets(Some(&em1)).await.unwrap();
        rm.client.tickets(None).await.unwrap();
        rm.client.ticket(grant.ticket_id).await.unwrap();
        rm.client.ems().await.unwrap();
        let (health, tickets) = (Health::Healthy, vec![grant.ticket_id, uuid::Uuid::new_v4()]);
        let report =
            EmReport { em: em1.clone(), epoch, sequence, health, load: None, tickets, observed: None, idle: vec![] };
        assert_eq!(rm.client.heartbeat(&report).await.unwrap().unknown_tickets.len(), 1);
        user_resource::update_missed(&store.pool().await.unwrap(), &report, &[(grant.ticket_id, 1)]).await.unwrap();
        assert_eq!(em_report::silent(&store.pool().await.unwrap(), Duration::ZERO, None, 9).await.unwrap().len(), 1);
        assert_eq!(em_report::survey(&store.pool().await.unwrap(), None, 9, Duration::ZERO).await.unwrap().len(), 1);
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    rm.client.unregister(&em1).await.unwrap();
    store.close().await;
    let sums = rm.counter(r#"linkis_rm_task_steps_total{task="cluster"}"#) as i64 + 5;
    rm.stop().await;
    eventually("statistics are written", Duration::from_secs(10), || async {
        let used =
            "SELECT coalesce(sum(idx_scan), 0)::bigint FROM pg_stat_user_tables WHERE relname LIKE 'linkis_user%'";
        database.count(used).await > 40
    })
    .await;
    let scanned: Vec<(String, i64)> = database.rows("SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname LIKE 'linkis%' AND seq_scan > 0 AND seq_tup_read > 0
            AND relname NOT LIKE 'linkis_rm_migration%'").await;
    // Each step of the task `cluster` sums over all EMs and their reports. Some statements read these tables while they were empty.
    let summed = ["linkis_em_resource_meta_data", "linkis_em_report", "linkis_em_drain"];
    let is_summed = |(table, scans): &(String, i64)| summed.contains(&table.as_str()) && *scans <= sums;
    let scanned: Vec<_> = scanned.into_iter().filter(|table| !is_summed(table)).collect();
    assert_eq!(scanned, []);
}
