//! ResourceReported: lower use is released, higher use is decided, and an application id can come late.

use rm_client::{ClientError, RmClient};
use rm_model::{
    limit::Rule,
    operation::{Grant, UpdateTicket},
    resource::{Dimension, LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
    ticket::{Ticket, TicketState},
};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::harness::*;

fn report(grant: &Grant, used: Resource) -> UpdateTicket {
    grant.reported(name("hadoop"), used)
}

fn details(error: &ClientError) -> (Option<Code>, Option<String>) {
    (error.code(), error.reason())
}

fn not_now(reason: &str) -> (Option<Code>, Option<String>) {
    (Some(Code::FailedPrecondition), Some(reason.to_owned()))
}

/// Returns the history lines of a ticket, with its amounts.
async fn life(rm: &Instance, grant: &Grant) -> Vec<(String, proto::Resource)> {
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let call = proto::ListActionsRequest { ticket_id: grant.ticket_id.to_string(), ..Default::default() };
    let lines = usage.list_actions(call).await.unwrap().into_inner().actions;
    lines.into_iter().map(|line| (line.action, line.resource.unwrap())).collect()
}

async fn actions(rm: &Instance, grant: &Grant) -> Vec<String> {
    life(rm, grant).await.into_iter().map(|(action, _)| action).collect()
}

/// A ticket in use.
async fn in_use(client: &RmClient, resource: Resource) -> (Grant, Ticket) {
    let grant = client.request_resource(&request(&em("host1"), "hadoop", resource)).await.granted();
    let ticket = client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    (grant, ticket)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_use_shrinks_or_grows_within_capacity() {
    let (database, rm, second) = two().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let (grant, before) = in_use(&rm.client, load(4, 4, 1)).await;
    let other = rm.client.request_resource(&request(&em1, "alice", load(4, 4, 1))).await.granted();

    // Less in some dimensions and more in others; repeated through another instance.
    for instance in [&rm, &second] {
        let after = instance.client.resource_reported(&report(&grant, load(2, 5, 1))).await.unwrap();
        assert_eq!(*after.resource(), load(2, 5, 1));
        let engine_of = |ticket: &Ticket| match &ticket.state {
            TicketState::Used { engine, used_time, .. } => (engine.clone(), *used_time),
            TicketState::Locked { .. } => panic!("{ticket:?}"),
        };
        assert_eq!(engine_of(&after), engine_of(&before), "the engine and the time of its confirmation stay");
    }
    assert_eq!(rm.client.em(&em1).await.unwrap().used, load(2, 5, 1));
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);

    let error = rm.client.resource_reported(&report(&grant, load(7, 5, 1))).await.unwrap_err();
    assert_eq!(details(&error), not_now("NOT_ENOUGH_RESOURCE"));
    assert!(error.to_string().contains("requestResource : 7GB > availableResource : 6GB"), "{error}");
    assert!(error.to_string().contains("keeps its previous amounts"), "{error}");
    let ClientError::Status(status) = &error else { panic!("{error}") };
    let short = status.get_details_quota_failure().unwrap().violations;
    assert_eq!(short.len(), 1, "only what grows is short: {short:?}");
    assert_eq!(*rm.client.ticket(grant.ticket_id).await.unwrap().resource(), load(2, 5, 1), "nothing was changed");

    second.client.resource_reported(&report(&grant, load(6, 5, 1))).await.unwrap();
    rm.client.resource_reported(&report(&grant, load(0, 0, 0))).await.unwrap();
    rm.client.request_resource(&request(&em1, "alice", load(6, 6, 9))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
    assert_eq!(actions(&rm, &grant).await, ["granted", "inited", "reported", "reported", "reported"]);

    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    let late = rm.client.resource_reported(&report(&grant, load(1, 1, 1))).await.unwrap_err();
    assert_eq!(late.reason().as_deref(), Some("TICKET_NOT_FOUND"));
    let early = rm.client.resource_reported(&other.reported(name("alice"), load(1, 1, 1))).await.unwrap_err();
    assert_eq!(details(&early), not_now("TICKET_NOT_INITED"));
    assert!(early.to_string().contains("call ResourceInited first"), "{early}");
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_use_is_checked_against_limits() {
    let (database, rm) = start_with_em(em("host1"), load(100, 100, 100)).await;
    let rule = Rule { max: [(Dimension::Cores, 6)].into(), ..each_user(0) };
    rm.client.set_limit(&rule).await.unwrap();
    let (grant, _) = in_use(&rm.client, load(1, 4, 1)).await;
    rm.client.resource_reported(&report(&grant, load(1, 6, 1))).await.unwrap();
    let error = rm.client.resource_reported(&report(&grant, load(1, 7, 1))).await.unwrap_err();
    assert_eq!(details(&error), not_now("NOT_ENOUGH_RESOURCE"));
    let ClientError::Status(status) = &error else { panic!("{error}") };
    let short = status.get_details_quota_failure().unwrap().violations;
    assert_eq!(short[0].subject, "user=hadoop");
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
    // Use above a lowered limit can shrink, and cannot grow in the short dimension.
    rm.client.set_limit(&Rule { max: [(Dimension::Cores, 2)].into(), ..rule }).await.unwrap();
    rm.client.resource_reported(&report(&grant, load(9, 5, 1))).await.unwrap();
    rm.client.resource_reported(&report(&grant, load(9, 6, 1))).await.unwrap_err();
    rm.client.resource_reported(&report(&grant, load(9, 1, 1))).await.unwrap();
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_use_with_stale_epoch_is_refused() {
    let (database, rm) = start().await;
    let old = rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let (grant, _) = in_use(&rm.client, load(4, 4, 1)).await;
    let new = rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let of = |epoch| UpdateTicket { epoch: Some(epoch), ..report(&grant, load(2, 2, 1)) };
    let error = rm.client.resource_reported(&of(old.epoch)).await.unwrap_err();
    assert_eq!(details(&error), not_now("STALE_EPOCH"));
    let error = rm.client.resource_reported(&of(new.epoch + 1)).await.unwrap_err();
    assert_eq!((error.code(), error.field().as_deref()), (Some(Code::InvalidArgument), Some("epoch")));
    assert_eq!(rm.client.em(&em("host1")).await.unwrap().used, load(4, 4, 1));
    rm.client.resource_reported(&of(new.epoch)).await.unwrap();
    assert_eq!(rm.client.em(&em("host1")).await.unwrap().used, load(2, 2, 1));
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn application_id_reported_late_is_kept() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    let with = |cores, id: &str| {
        let driver = LoadInstanceAmounts { memory: GB, cores, instances: 1 };
        let queue = YarnAmounts {
            queue_name: "q1".into(),
            queue_cores: 8,
            application_id: id.into(),
            ..YarnAmounts::default()
        };
        Resource::from_parts(ResourceParts::DriverAndYarn(driver, queue)).unwrap()
    };
    let (grant, _) = in_use(&rm.client, with(1, "")).await;
    let id_of = |ticket: &Ticket| ticket.resource().application_id().unwrap().to_owned();
    let answer = rm.client.resource_reported(&report(&grant, with(1, "application_1"))).await.unwrap();
    assert_eq!(id_of(&answer), "application_1");
    assert_eq!(id_of(&rm.client.ticket(grant.ticket_id).await.unwrap()), "application_1");
    assert_eq!(id_of(&rm.client.tickets(None).await.unwrap()[0]), "application_1");

    // A report without an application id changes the amounts alone; a repetition changes nothing.
    for used in [with(2, ""), with(2, ""), with(2, "application_1")] {
        assert_eq!(id_of(&rm.client.resource_reported(&report(&grant, used)).await.unwrap()), "application_1");
    }
    let lines = life(&rm, &grant).await;
    let actions: Vec<_> = lines.iter().map(|(action, _)| action.as_str()).collect();
    assert_eq!(actions, ["granted", "inited", "reported", "reported"]);
    let Some(proto::resource::Kind::DriverAndYarn(last)) = &lines[3].1.kind else { panic!("{lines:?}") };
    assert_eq!(last.yarn.as_ref().unwrap().application_id, "application_1");

    // A repeated confirmation returns the ticket unchanged.
    for used in [None, Some(with(2, "")), Some(with(2, "application_1"))] {
        rm.client.resource_inited(&inited(&grant, "hadoop", used)).await.unwrap();
    }
    for used in [with(1, ""), with(2, "application_2")] {
        let error = rm.client.resource_inited(&inited(&grant, "hadoop", Some(used))).await.unwrap_err();
        assert_eq!(details(&error), not_now("TICKET_ALREADY_INITED"));
    }
    // Another application in the ticket's queue is accepted; another queue is rejected.
    let answer = rm.client.resource_reported(&report(&grant, with(2, "application_2"))).await.unwrap();
    assert_eq!(id_of(&answer), "application_2");
    let elsewhere = |queue_cores| {
        let queue = YarnAmounts { queue_name: "q2".into(), queue_cores, ..YarnAmounts::default() };
        Resource::from_parts(ResourceParts::DriverAndYarn(LoadInstanceAmounts::default(), queue)).unwrap()
    };
    // A use of zero in another queue is zero in the own queue.
    let nothing = rm.client.resource_reported(&report(&grant, elsewhere(0))).await.unwrap();
    assert_eq!(nothing.resource().queue_name(), Some("q1"));
    for other in [elsewhere(1), load(1, 1, 1)] {
        let error = rm.client.resource_reported(&report(&grant, other)).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("RESOURCE_NOT_PROVIDED"), "{error}");
        assert_eq!(error.field().as_deref(), Some("used"));
    }
    let long = with(2, &"a".repeat(255));
    rm.client.resource_reported(&report(&grant, long)).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// Use of a dimension that the EM no longer provides can shrink and be released, but not grow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_use_of_removed_dimension_may_shrink() {
    let (_database, rm) = start().await;
    let of = |gpu, disk| Resource::special([("gpu".to_owned(), gpu), ("disk".to_owned(), disk)].into()).unwrap();
    rm.client.register(registration(em("host1"), of(8, 8))).await.unwrap();
    let (grant, _) = in_use(&rm.client, of(4, 4)).await;
    let locked = rm.client.request_resource(&request(&em("host1"), "hadoop", of(1, 1))).await.granted();
    let without = Resource::special([("gpu".to_owned(), 8)].into()).unwrap();
    rm.client.register(registration(em("host1"), without)).await.unwrap();
    let after = rm.client.resource_reported(&report(&grant, of(4, 1))).await.unwrap();
    assert_eq!(*after.resource(), of(4, 1));
    let error = rm.client.resource_reported(&report(&grant, of(4, 2))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("RESOURCE_NOT_PROVIDED"), "{error}");
    rm.client.resource_reported(&report(&grant, of(4, 0))).await.unwrap();
    rm.client.resource_inited(&inited(&locked, "hadoop", None)).await.unwrap_err();
    for grant in [grant, locked] {
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    assert!(rm.client.em(&em("host1")).await.unwrap().is_idle());
}
