//! Adoption of running engines: from the tables of Linkis, or after the loss of a database.

use rm_client::ClientError;
use rm_model::{
    adoption::AdoptTicket,
    em::EmInstance,
    operation::{ReleaseTicket, UpdateTicket},
    report::{EmReport, Health},
    resource::{Dimension, Resource},
    ticket::TicketState,
};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::Code;
use uuid::Uuid;

use crate::harness::*;

fn released(adopt: &AdoptTicket) -> ReleaseTicket {
    ReleaseTicket { ticket_id: adopt.ticket_id, user: adopt.user.clone(), em: adopt.em.clone() }
}

fn details(error: &ClientError) -> (Code, String) {
    (error.code().unwrap(), error.reason().unwrap())
}

async fn life(rm: &Instance, ticket_id: Uuid) -> Vec<String> {
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let call = proto::ListActionsRequest { ticket_id: ticket_id.to_string(), ..Default::default() };
    usage.list_actions(call).await.unwrap().into_inner().actions.into_iter().map(|line| line.action).collect()
}

fn report(em: EmInstance, epoch: i64, sequence: i64, tickets: Vec<Uuid>) -> EmReport {
    EmReport { em, epoch, sequence, health: Health::Healthy, load: None, tickets, observed: None, idle: vec![] }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adoption_of_running_engine_creates_one_ticket() {
    let (database, rm) = start().await;
    let host = rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let adopt = adoption("host1", "hadoop", load(2, 2, 1));
    let reported = |sequence| report(em("host1"), host.epoch, sequence, vec![adopt.ticket_id]);
    let unknown = rm.client.heartbeat(&reported(1)).await.unwrap().unknown_tickets;
    assert_eq!(unknown.len(), 1, "a report would name it as unknown");

    let ticket = rm.client.adopt_ticket(&adopt).await.unwrap();
    let TicketState::Used { resource, engine, .. } = &ticket.state else { panic!("{ticket:?}") };
    assert_eq!((ticket.id, resource, engine), (adopt.ticket_id, &adopt.used, &adopt.engine));
    assert_eq!(rm.client.adopt_ticket(&adopt).await.unwrap(), ticket, "a repetition returns the same");
    assert!(rm.client.heartbeat(&reported(2)).await.unwrap().unknown_tickets.is_empty());
    let error =
        rm.client.adopt_ticket(&AdoptTicket { user: name("alice"), used: load(1, 1, 1), ..adopt.clone() }).await;
    let error = error.unwrap_err();
    assert_eq!(details(&error), (Code::AlreadyExists, "TICKET_EXISTS".to_owned()));
    assert!(error.to_string().contains("differs in user, used;"), "{error}");
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);

    // A report of the engine since then is no difference.
    let AdoptTicket { ticket_id, user, em: at, .. } = adopt.clone();
    let report = UpdateTicket { ticket_id, user, em: at, used: load(3, 3, 1), epoch: None };
    let after = rm.client.resource_reported(&report).await.unwrap();
    assert_eq!(rm.client.adopt_ticket(&adopt).await.unwrap(), after);
    rm.client.resource_released(&released(&adopt)).await.unwrap();
    let error = rm.client.adopt_ticket(&adopt).await.unwrap_err();
    assert_eq!(details(&error), (Code::FailedPrecondition, "TICKET_ENDED".to_owned()));
    assert_eq!(life(&rm, adopt.ticket_id).await, ["adopted", "reported", "released"]);
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adoption_of_invalid_ticket_names_reason() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    let adopt = adoption("host1", "hadoop", load(1, 1, 1));
    let gpus = Resource::special([("gpu".to_owned(), 1)].into()).unwrap();
    let cases = [
        (AdoptTicket { em: em("nowhere"), ..adopt.clone() }, Code::NotFound, "EM_NOT_REGISTERED", None),
        (
            AdoptTicket { ticket_id: Uuid::nil(), ..adopt.clone() },
            Code::InvalidArgument,
            "INVALID_FIELD",
            Some("ticket_id"),
        ),
        (AdoptTicket { used: load(0, 0, 0), ..adopt.clone() }, Code::InvalidArgument, "INVALID_FIELD", Some("used")),
        (AdoptTicket { used: gpus, ..adopt.clone() }, Code::InvalidArgument, "RESOURCE_NOT_PROVIDED", Some("used")),
    ];
    for (adopt, code, reason, field) in cases {
        let error = rm.client.adopt_ticket(&adopt).await.unwrap_err();
        assert_eq!((details(&error), error.field().as_deref()), ((code, reason.to_owned()), field));
    }
    // A locked ticket has no engine until it is confirmed.
    let grant = rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    let granted = AdoptTicket { ticket_id: grant.ticket_id, engine: engine("host1"), ..adopt };
    assert_eq!(details(&rm.client.adopt_ticket(&granted).await.unwrap_err()).0, Code::AlreadyExists);
    rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    rm.client.adopt_ticket(&granted).await.unwrap();
    assert_eq!(life(&rm, grant.ticket_id).await, ["granted", "inited"]);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adoption_above_capacity_over_commits_until_release() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 3)).await;
    rm.client.set_limit(&each_user(2)).await.unwrap();
    let locked = rm.client.request_resource(&request(&em("host1"), "alice", load(1, 1, 1))).await.granted();
    let engines: Vec<AdoptTicket> = (0..4).map(|_| adoption("host1", "hadoop", load(1, 1, 1))).collect();
    for engine in &engines {
        rm.client.adopt_ticket(engine).await.unwrap();
    }
    let left = rm.client.em(&em("host1")).await.unwrap().left().unwrap();
    assert_eq!(left.get(&Dimension::Instances), -2);
    let (tickets, notes) = assert_books(&database, &rm.client).await;
    assert_eq!((tickets, notes.len()), (5, 2), "the EM's and the scope's: {notes:?}");
    assert!(notes.iter().all(|note| note.contains("no dimension that is short is granted there")), "{notes:?}");

    // Live tickets stay and can be confirmed. An EM that is short grants nothing until it has drained.
    rm.client.resource_inited(&inited(&locked, "alice", None)).await.unwrap();
    for (number, engine) in engines.iter().enumerate() {
        let refusal = rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.refused();
        let available: Vec<i64> = refusal.shortfalls.iter().map(|short| short.available).collect();
        let (on_em, of_user) = (i64::try_from(number).unwrap() - 2, i64::try_from(number).unwrap() - 2);
        assert_eq!(available, [on_em, of_user], "after {number} have ended");
        rm.client.resource_released(&released(engine)).await.unwrap();
        if number == 2 {
            break;
        }
    }
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.refused();
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}

/// As a migration tool that repeats each adoption.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adoption_of_thousands_shares_batches() {
    const CONNECTIONS: usize = 10;
    const ENGINES: usize = 100;
    let (database, rm) = start().await;
    for host in 0..5 {
        rm.client.register(registration(em(&format!("host{host}")), load(100, 100, 100))).await.unwrap();
    }
    rm.client.set_limit(&each_user(1)).await.unwrap();
    let mut connections = JoinSet::new();
    for number in 0..CONNECTIONS {
        let client = client(&rm.address);
        connections.spawn(async move {
            let mut calls = JoinSet::new();
            for engine in 0..ENGINES {
                let adopt = adoption(&format!("host{}", engine % 5), &format!("user{number}"), load(1, 1, 1));
                let client = client.clone();
                calls.spawn(async move {
                    let (first, second) = tokio::join!(client.adopt_ticket(&adopt), client.adopt_ticket(&adopt));
                    assert_eq!(first.unwrap(), second.unwrap());
                });
            }
            calls.join_all().await;
        });
    }
    connections.join_all().await;
    let (tickets, notes) = assert_books(&database, &rm.client).await;
    assert_eq!((tickets, notes.len()), (CONNECTIONS * ENGINES, 5 + CONNECTIONS));
    let batches = rm.metrics.text();
    let batches = batches.lines().find_map(|line| line.strip_prefix("linkis_rm_batch_operations_count ")).unwrap();
    assert!(batches.parse::<f64>().unwrap() < 1000.0, "they are committed together: {batches} batches");
    let lines = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'adopted'";
    assert_eq!(database.count(lines).await, i64::try_from(CONNECTIONS * ENGINES).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adoption_during_unregister_is_refused_or_ended() {
    let (database, rm) = start_with_em(em("host1"), load(1000, 1000, 1000)).await;
    let engines: Vec<AdoptTicket> = (0..400).map(|_| adoption("host1", "hadoop", load(1, 1, 1))).collect();
    let mut calls = JoinSet::new();
    for (number, engine) in engines.iter().cloned().enumerate() {
        let client = rm.client.clone();
        calls.spawn(async move {
            if number == 200 {
                client.unregister(&em("host1")).await.unwrap();
            }
            (engine.ticket_id, client.adopt_ticket(&engine).await.map_err(|error| details(&error).1))
        });
    }
    let answers = calls.join_all().await;
    eventually("nothing is left", LONG, || async {
        database.count("SELECT count(*) FROM linkis_em_resource_meta_data").await == 0
    })
    .await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
    rm.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let mut again = 0;
    for (ticket_id, answer) in answers {
        let engine = engines.iter().find(|engine| engine.ticket_id == ticket_id).unwrap();
        match answer {
            Ok(_) => {
                assert_eq!(life(&rm, ticket_id).await, ["adopted", "unregistered"]);
                assert_eq!(details(&rm.client.adopt_ticket(engine).await.unwrap_err()).1, "TICKET_ENDED");
            }
            Err(reason) => {
                assert_eq!(reason, "EM_NOT_REGISTERED");
                rm.client.adopt_ticket(engine).await.unwrap();
                again += 1;
            }
        }
    }
    assert!(again > 0, "some came after it went");
    assert_eq!(assert_invariants(&database, &rm.client).await, again);
}

/// One batch adopts, releases, and adopts again under the same id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adoption_of_ticket_ended_in_batch_fails() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    rm.client.set_limit(&each_user(5)).await.unwrap();
    database.hold_by_hand(&em("host1")).await;
    let adopt = adoption("host1", "hadoop", load(1, 1, 1));
    let mut calls = Vec::new();
    for number in 0..3 {
        let (client, adopt) = (rm.client.clone(), adopt.clone());
        calls.push(tokio::spawn(async move {
            match number {
                1 => client.resource_released(&released(&adopt)).await,
                _ => client.adopt_ticket(&adopt).await.map(drop),
            }
        }));
        eventually("it is set aside", LONG, || async {
            let text = rm.metrics.text();
            text.lines().any(|line| line == format!("linkis_rm_contended_operations {}", number + 1))
        })
        .await;
    }
    database.release_holds().await;
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await.unwrap().map_err(|error| details(&error).1));
    }
    assert_eq!(answers, [Ok(()), Ok(()), Err("TICKET_ENDED".to_owned())]);
    assert_eq!(life(&rm, adopt.ticket_id).await, ["adopted", "released"]);
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// An id belongs to one engine, on every EM and through every instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adoption_of_one_id_twice_creates_one_ticket() {
    let (database, first, second) = two().await;
    register_all(&first.client, ["host0", "host1"], load(1000, 1000, 1000)).await;
    let mut calls = JoinSet::new();
    for _ in 0..100 {
        let (one, other) = (first.client.clone(), second.client.clone());
        calls.spawn(async move {
            let adopt = adoption("host0", "hadoop", load(1, 1, 1));
            let elsewhere = AdoptTicket { em: em("host1"), ..adopt.clone() };
            let (one, other) = tokio::join!(one.adopt_ticket(&adopt), other.adopt_ticket(&elsewhere));
            let refused = one.as_ref().err().or(other.as_ref().err()).map(|error| details(error).1);
            (one.is_ok() != other.is_ok(), refused)
        });
    }
    for (is_one_s, refused) in calls.join_all().await {
        assert_eq!((is_one_s, refused.as_deref()), (true, Some("TICKET_EXISTS")));
    }
    assert_eq!(assert_invariants(&database, &first.client).await, 100);
}
