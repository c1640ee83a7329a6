//! All calls of managers, EMs and operators, and one page of each list.

use std::time::Duration;

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    adoption::AdoptTicket,
    em::EmInstance,
    hold::NewHold,
    operation::LockKey,
    report::{EmReport, Health},
};
use rm_proto::page::PageRequest;
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tonic::transport::Channel;
use uuid::Uuid;

use super::filters;
use crate::harness::*;

/// Makes all calls once, on an EM that is registered and unregistered in the round.
pub(super) async fn round(rm: &Instance, number: usize) {
    let client = &rm.client;
    let em1 = em(&format!("round{number}"));
    client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let epoch = client.register(registration(em1.clone(), load(9, 9, 9))).await.unwrap().epoch;
    let named = ResourceRequest { request_id: Some(format!("r{number}")), ..request(&em1, "hadoop", load(1, 1, 1)) };
    let grant = client.request_resource(&named).await.granted();
    assert_eq!(client.request_resource(&named).await.granted(), grant);
    client.dry_run(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    client.request_resource(&request(&em1, "hadoop", load(99, 1, 1))).await.refused();
    client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    client.resource_reported(&grant.reported(name("hadoop"), load(2, 1, 1))).await.unwrap();
    client.ticket(grant.ticket_id).await.unwrap();
    client.em(&em1).await.unwrap();
    report(client, &em1, epoch, grant.ticket_id).await;
    let anywhere = ResourceRequest { em: None, ..request(&em1, "hadoop", load(1, 1, 1)) };
    client.dry_run(&anywhere).await.granted();
    let chosen = client.request_resource(&anywhere).await.granted();
    client.ticket_released(chosen.ticket_id).await.unwrap();
    let short = ResourceRequest { lock_ttl: Some(Duration::from_millis(1)), ..request(&em1, "hadoop", load(1, 1, 1)) };
    let short = client.request_resource(&short).await.granted();
    eventually("it expires", Duration::from_secs(20), async || !lives(client, short.ticket_id).await).await;
    let wait_timeout = Duration::from_millis(500);
    let patient = ResourceRequest { wait_timeout, ..request(&em1, "hadoop", load(9, 1, 1)) };
    client.request_resource(&patient).await.refused();
    client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    pages(rm, &grant.ticket_id.to_string()).await;
    let adopt = AdoptTicket { em: em1.clone(), ..adoption("adopted", "hadoop", load(1, 1, 1)) };
    client.adopt_ticket(&adopt).await.unwrap();
    client.adopt_ticket(&adopt).await.unwrap();
    operate(client, &em1).await;
    client.unregister(&em1).await.unwrap();
}

/// Sends reports of an EM: with all tickets, with other ones, and with all again. Its engine runs no task in the last but one.
async fn report(client: &RmClient, em1: &EmInstance, epoch: i64, ticket_id: Uuid) {
    for (sequence, tickets, unknown) in
        [(1, ticket_id, 0), (2, Uuid::new_v4(), 1), (3, ticket_id, 0), (4, ticket_id, 0)]
    {
        let (em, health, tickets) = (em1.clone(), Health::Healthy, [tickets].into());
        let idle = if sequence == 3 { vec![ticket_id] } else { vec![] };
        let report = EmReport { em, epoch, sequence, health, load: None, tickets, observed: None, idle };
        assert_eq!(client.heartbeat(&report).await.unwrap().unknown_tickets.len(), unknown);
    }
}

/// Makes the calls of operators.
async fn operate(client: &RmClient, em1: &EmInstance) {
    client.drain(em1, "a disk").await.unwrap();
    client.resume(em1, "").await.unwrap();
    let grant = client.request_resource(&request(em1, "hadoop", load(1, 1, 1))).await.granted();
    client.force_release(grant.ticket_id, "it hangs").await.unwrap();
    for key in [LockKey::Em(em1.clone()), LockKey::User(name("hadoop"))] {
        let hold = NewHold { key: key.clone(), duration: Duration::from_secs(60), reason: name("a look") };
        client.hold(&hold).await.unwrap();
        assert_eq!(client.holds().await.unwrap().len(), 1);
        assert!(client.release_hold(&key).await.unwrap());
    }
}

/// Reads the first page of each list.
async fn pages(rm: &Instance, ticket_id: &str) {
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let page_size = 10;
    usage.list_ems(proto::ListEmsRequest { page_size, ..Default::default() }).await.unwrap();
    usage.list_scopes(proto::ListScopesRequest { page_size, ..Default::default() }).await.unwrap();
    usage.list_waiting(proto::ListWaitingRequest { page_size, ..Default::default() }).await.unwrap();
    usage.list_users(proto::ListUsersRequest { page_size, ..Default::default() }).await.unwrap();
    usage.list_actions(proto::ListActionsRequest { page_size, ..Default::default() }).await.unwrap();
    let of_ticket = proto::ListActionsRequest { ticket_id: ticket_id.into(), page_size, ..Default::default() };
    usage.list_actions(of_ticket).await.unwrap();
    let on_em =
        |instance: &str| Some(proto::EmInstance { application_name: "other".into(), instance: instance.into() });
    for (em, user) in [(None, ""), (None, "user7"), (on_em("host7"), "")] {
        let call = proto::ListTicketsRequest { em, user: user.into(), page_size, ..Default::default() };
        assert_eq!(usage.list_tickets(call).await.unwrap().into_inner().tickets.len(), 10);
    }
    // After the first locked tickets, and all used tickets.
    for (state, from) in [("used", None), ("locked", Some("6fffffff-ffff-ffff-ffff-ffffffffffff"))] {
        let all = proto::ListTicketsRequest { state: state.into(), ..Default::default() };
        let token = |key| PageRequest::new("ListTickets", page_size, &all).unwrap().token(key);
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
    let page = filters::used_of_crowd(&mut usage, None, String::new()).await;
    assert!(page.tickets.is_empty() && !page.next_page_token.is_empty(), "{page:?}");
    filtered(&mut usage, ticket_id).await;
    follow(rm, &mut usage).await;
}

/// One scope by its key, and new rows, with their counters.
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

/// Reads the first page of each list with a filter.
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
    // Past partitions are searched by an index; the current one is read.
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
