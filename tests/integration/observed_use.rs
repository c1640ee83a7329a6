//! Observed use in reports: returned as reported, and never counted.

use rm_client::RmClient;
use rm_model::{
    em::EmInstance,
    observation::Observations,
    operation::Grant,
    report::{EmReport, Health},
    resource::{LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::Code;
use uuid::Uuid;

use crate::harness::*;

/// An EM, and the registration under which it reports.
#[derive(Clone)]
struct Ecm {
    client: RmClient,
    em: EmInstance,
    epoch: i64,
}

impl Ecm {
    async fn register(client: &RmClient, host: &str) -> Self {
        let em = em(host);
        let epoch = client.register(registration(em.clone(), load(1000, 1000, 1000))).await.unwrap().epoch;
        Self { client: client.clone(), em, epoch }
    }

    fn report(&self, sequence: i64, observed: &[(Uuid, Resource)]) -> EmReport {
        EmReport {
            em: self.em.clone(),
            epoch: self.epoch,
            sequence,
            health: Health::Healthy,
            load: None,
            tickets: observed.iter().map(|(id, _)| *id).collect(),
            observed: Observations::new(observed.iter().map(|(id, resource)| (*id, resource))),
            idle: vec![],
        }
    }

    async fn used(&self, resource: Resource) -> Grant {
        let grant = self.client.request_resource(&request(&self.em, "hadoop", resource)).await.granted();
        self.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        grant
    }
}

/// A ticket as operators see it, by either call.
async fn shown(rm: &Instance, ticket_id: Uuid) -> proto::Ticket {
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let request = proto::GetTicketRequest { ticket_id: ticket_id.to_string(), engine: None };
    let got = usage.get_ticket(request).await.unwrap().into_inner().ticket.unwrap();
    let on_em = proto::ListTicketsRequest { em: got.em.clone(), ..Default::default() };
    let listed = usage.list_tickets(on_em).await.unwrap().into_inner().tickets;
    assert_eq!(listed.iter().find(|ticket| ticket.ticket_id == got.ticket_id), Some(&got));
    let batch = proto::BatchGetTicketsRequest { ticket_ids: vec![ticket_id.to_string()] };
    let batch = usage.batch_get_tickets(batch).await.unwrap().into_inner().tickets;
    assert_eq!(batch.first(), Some(&got));
    got
}

fn seconds(ticket: &proto::Ticket) -> (i64, i32) {
    let at = ticket.observed_time.unwrap();
    (at.seconds, at.nanos)
}

fn memory(ticket: &proto::Ticket) -> Option<i64> {
    match ticket.observed.as_ref()?.kind.as_ref()? {
        proto::resource::Kind::LoadInstance(amounts) => Some(amounts.memory),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observed_use_is_shown_and_not_counted() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1").await;
    let (a, b) = (ecm.used(load(4, 2, 1)).await.ticket_id, ecm.used(load(4, 2, 1)).await.ticket_id);
    assert_eq!((shown(&rm, a).await.observed, shown(&rm, a).await.observed_time), (None, None));

    // Below and above the granted amounts.
    ecm.client.heartbeat(&ecm.report(1, &[(a, load(1, 1, 1)), (b, load(900, 9, 1))])).await.unwrap();
    assert_eq!((memory(&shown(&rm, a).await), memory(&shown(&rm, b).await)), (Some(GB), Some(900 * GB)));
    assert_eq!(rm.client.em(&ecm.em).await.unwrap().used, load(8, 4, 2));
    let first = seconds(&shown(&rm, a).await);
    // The next replaces it: other amounts of the same tickets, and other tickets.
    ecm.client.heartbeat(&ecm.report(2, &[(a, load(2, 1, 1)), (b, load(2, 1, 1))])).await.unwrap();
    assert_eq!((memory(&shown(&rm, a).await), memory(&shown(&rm, b).await)), (Some(2 * GB), Some(2 * GB)));
    let second = seconds(&shown(&rm, a).await);
    assert!(first < second);
    ecm.client.heartbeat(&ecm.report(3, &[(b, load(3, 1, 1))])).await.unwrap();
    assert_eq!((memory(&shown(&rm, a).await), memory(&shown(&rm, b).await)), (None, Some(3 * GB)));
    // A report without use, a repeated one and a late one do not change the last use.
    let third = seconds(&shown(&rm, b).await);
    let silent = EmReport { tickets: vec![a, b], ..ecm.report(5, &[]) };
    ecm.client.heartbeat(&silent).await.unwrap();
    ecm.client.heartbeat(&ecm.report(5, &[(b, load(3, 1, 1))])).await.unwrap();
    let repeated = seconds(&shown(&rm, b).await);
    assert!(third < repeated, "the first report of a use is stored");
    ecm.client.heartbeat(&ecm.report(5, &[(b, load(7, 1, 1))])).await.unwrap();
    ecm.client.heartbeat(&ecm.report(4, &[(b, load(7, 1, 1))])).await.unwrap_err();
    let after = shown(&rm, b).await;
    assert_eq!((memory(&after), seconds(&after)), (Some(3 * GB), repeated));

    // A stale epoch changes nothing; a new epoch starts anew.
    let again = Ecm::register(&rm.client, "host1").await;
    ecm.client.heartbeat(&ecm.report(9, &[(b, load(8, 1, 1))])).await.unwrap_err();
    assert_eq!(memory(&shown(&rm, b).await), Some(3 * GB));
    again.client.heartbeat(&again.report(1, &[(a, load(5, 1, 1)), (b, load(6, 1, 1))])).await.unwrap();
    assert_eq!((memory(&shown(&rm, a).await), memory(&shown(&rm, b).await)), (Some(5 * GB), Some(6 * GB)));
    assert_eq!(rm.client.em(&ecm.em).await.unwrap().used, load(8, 4, 2));
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);

    // The observation is deleted with the EM.
    let rows = "SELECT count(*) FROM linkis_em_observed";
    assert_eq!(database.count(rows).await, 1);
    rm.client.unregister(&ecm.em).await.unwrap();
    assert_eq!(database.count(rows).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observed_use_of_other_shape_is_refused() {
    let (_database, rm) = start().await;
    let (ecm, other) = (Ecm::register(&rm.client, "host1").await, Ecm::register(&rm.client, "host2").await);
    let in_queue = |queue: &str, queue_cores| {
        let queue = YarnAmounts { queue_name: queue.into(), queue_cores, ..YarnAmounts::default() };
        let driver = LoadInstanceAmounts { memory: GB, cores: 1, instances: 1 };
        Resource::from_parts(ResourceParts::DriverAndYarn(driver, queue)).unwrap()
    };
    let mine = ecm.used(load(4, 2, 1)).await.ticket_id;
    let queued = ecm.used(in_queue("a", 8)).await.ticket_id;
    let theirs = other.used(load(4, 2, 1)).await.ticket_id;
    let unknown = Uuid::from_u128(7);
    let told = [(unknown, Resource::cpu(1).unwrap()), (theirs, load(1, 1, 1)), (mine, load(1, 1, 1))];
    for sequence in [1, 2] {
        ecm.client.heartbeat(&ecm.report(sequence, &told)).await.unwrap();
        assert_eq!(memory(&shown(&rm, mine).await), Some(GB));
        assert_eq!(shown(&rm, theirs).await.observed, None);
    }
    let mut sequence = 2;
    for wrong in [Resource::load(1, 1).unwrap(), in_queue("b", 1), in_queue("", 1)] {
        // The report counts as a sign of life, and the earlier use stays.
        sequence += 1;
        let report = ecm.report(sequence, &[(mine, load(2, 1, 1)), (queued, wrong)]);
        for _ in 0..2 {
            let error = ecm.client.heartbeat(&report).await.unwrap_err();
            assert_eq!(
                (error.code(), error.field().as_deref()),
                (Some(Code::InvalidArgument), Some("observed[1].resource"))
            );
        }
        assert_eq!(memory(&shown(&rm, mine).await), Some(GB));
    }
    // Nothing in some queue, and then something in its own; then something in another one.
    for (right, used) in [(in_queue("", 0), Some(0)), (in_queue("a", 5), Some(5)), (in_queue("", 5), None)] {
        sequence += 1;
        let answer = ecm.client.heartbeat(&ecm.report(sequence, &[(queued, right)])).await;
        assert_eq!(answer.is_ok(), used.is_some());
        let Some(proto::resource::Kind::DriverAndYarn(seen)) = shown(&rm, queued).await.observed.unwrap().kind else {
            panic!("another type");
        };
        let seen = seen.yarn.unwrap();
        assert_eq!((seen.queue_name.as_str(), seen.queue_cores), ("a", used.unwrap_or(5)));
    }
    let twice = ecm.report(99, &[(mine, load(1, 1, 1)), (mine, load(1, 1, 1))]);
    let error = ecm.client.heartbeat(&twice).await.unwrap_err();
    assert_eq!(error.field().as_deref(), Some("observed[1].ticket_id"), "{error}");
    // A report does not list an ended ticket again.
    rm.client.ticket_released(mine).await.unwrap();
    assert!(!lives(&rm.client, mine).await);
}

/// Very many EMs with the engines of a large one report concurrently.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observed_use_of_200_ems_is_stored_compactly() {
    const HOSTS: usize = 200;
    const ENGINES: u128 = 100;
    let (database, rm) = start().await;
    let mut registered = JoinSet::new();
    for n in 0..HOSTS {
        let client = rm.client.clone();
        registered.spawn(async move {
            let ecm = Ecm::register(&client, &format!("host{n}")).await;
            let ticket_id = ecm.used(load(4, 2, 1)).await.ticket_id;
            (ecm, ticket_id, n)
        });
    }
    let ems = registered.join_all().await;
    for round in 1..=3 {
        let mut calls = JoinSet::new();
        for (ecm, ticket_id, n) in ems.clone() {
            calls.spawn(async move {
                // One lives; the others are as large a message.
                let others = (1..ENGINES).map(|other| Uuid::from_u128((other << 64) + u128::try_from(n).unwrap()));
                let ids: Vec<Uuid> = [ticket_id].into_iter().chain(others).collect();
                let observed: Vec<_> = ids.into_iter().map(|id| (id, load(round, 1, 1))).collect();
                let report = EmReport { tickets: vec![ticket_id], ..ecm.report(round, &observed) };
                ecm.client.heartbeat(&report).await.unwrap();
            });
        }
        calls.join_all().await;
        for (_, ticket_id, _) in ems.iter().step_by(50) {
            assert_eq!(memory(&shown(&rm, *ticket_id).await), Some(round * GB));
        }
    }
    let bytes = database.count("SELECT max(octet_length(observed))::bigint FROM linkis_em_observed").await;
    assert!(bytes <= 2600, "some 25 bytes for each: {bytes}");
    assert_eq!(assert_invariants(&database, &rm.client).await, HOSTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_ticket_fails_only_its_em_report() {
    let (database, rm) = start().await;
    let mut ems = Vec::new();
    for n in 0..20 {
        let ecm = Ecm::register(&rm.client, &format!("host{n}")).await;
        let ticket_id = ecm.used(load(4, 2, 1)).await.ticket_id;
        ems.push((ecm, ticket_id));
    }
    let spoil = "UPDATE linkis_user_resource_meta_data SET user_used_resource = '{}' WHERE em_instance LIKE 'host7:%'";
    database.execute(spoil).await;
    let mut calls = JoinSet::new();
    for (ecm, ticket_id) in ems.clone() {
        calls.spawn(async move {
            let told = ecm.client.heartbeat(&ecm.report(1, &[(ticket_id, load(1, 1, 1))])).await;
            assert_eq!(told.is_err(), ecm.em == em("host7"), "{:?}", told.err());
        });
    }
    calls.join_all().await;
    for (_, ticket_id) in ems.iter().filter(|(ecm, _)| ecm.em != em("host7")) {
        assert_eq!(memory(&shown(&rm, *ticket_id).await), Some(GB));
    }
}
