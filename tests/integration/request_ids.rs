//! Request ids: each user has ids of its own.

use std::time::Duration;

use rm_client::{ClientError, ResourceRequest};
use rm_model::operation::Grant;
use tokio::task::JoinSet;
use tonic::Code;

use crate::harness::*;

/// A request under an id.
pub fn named(host: &str, user: &str, id: &str) -> ResourceRequest {
    ResourceRequest { request_id: Some(id.into()), ..request(&em(host), user, load(1, 1, 1)) }
}

#[track_caller]
pub fn assert_reused(error: ClientError) {
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::AlreadyExists), Some("REQUEST_ID_REUSED")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_is_separate_for_each_user() {
    let (database, rm) = start_with_host1().await;
    let client = &rm.client;
    let users = ["hadoop", "alice", "hado"];
    let mut grants: Vec<Grant> = Vec::new();
    for user in users {
        assert!(client.dry_run(&named("host1", user, "job-1")).await.is_ok(), "{user}: the id of another is not shown");
        grants.push(client.request_resource(&named("host1", user, "job-1")).await.granted());
    }
    for (user, grant) in users.into_iter().zip(&grants) {
        assert_eq!(client.ticket(grant.ticket_id).await.unwrap().user, name(user));
        assert_eq!(client.request_resource(&named("host1", user, "job-1")).await.granted(), *grant, "{user}");
        let other = ResourceRequest { creator: name("other"), ..named("host1", user, "job-1") };
        assert_reused(client.request_resource(&other).await.unwrap_err());
    }
    client.resource_released(&release(&grants[0], "hadoop")).await.unwrap();
    let ended = client.request_resource(&named("host1", "hadoop", "job-1")).await.unwrap_err();
    assert_eq!(ended.reason().as_deref(), Some("TICKET_ENDED"));
    assert_eq!(client.request_resource(&named("host1", "alice", "job-1")).await.granted(), grants[1]);
    assert_eq!(assert_invariants(&database, client).await, 2);
}

/// All at once, by two instances, each twice: of each user one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_of_concurrent_users_grants_one_each() {
    let (database, rm, second) = two().await;
    register_all(&rm.client, ["a", "b"], load(1000, 1000, 1000)).await;
    let mut calls = JoinSet::new();
    for number in 0..20 {
        for client in [&rm.client, &second.client] {
            let client = client.clone();
            calls.spawn(async move {
                let asked = ResourceRequest { em: None, ..named("a", &format!("user{number}"), "job-1") };
                (number, client.request_resource(&asked).await.granted().ticket_id)
            });
        }
    }
    let mut got: Vec<_> = calls.join_all().await;
    got.sort();
    got.dedup();
    assert_eq!(got.len(), 20, "{got:?}");
    assert_eq!(assert_invariants(&database, &rm.client).await, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_of_two_waiting_users_grants_both() {
    let (database, rm) = start_with_em(em("host1"), load(1, 1, 1)).await;
    let first = rm.client.request_resource(&named("host1", "first", "job-1")).await.granted();
    let wait = |user: &str| ResourceRequest { wait_timeout: Duration::from_secs(60), ..named("host1", user, "job-1") };
    let (hadoop, alice) = (request_in_task(&rm.client, wait("hadoop")), request_in_task(&rm.client, wait("alice")));
    let both_wait = || async { rm.client.waiting().await.unwrap().len() == 2 };
    eventually("both wait", Duration::from_secs(20), both_wait).await;
    rm.client.ticket_released(first.ticket_id).await.unwrap();
    let one_waits = || async { rm.client.waiting().await.unwrap().len() == 1 };
    eventually("one is granted", Duration::from_secs(20), one_waits).await;
    let granted = rm.client.tickets(None).await.unwrap().remove(0);
    rm.client.ticket_released(granted.id).await.unwrap();
    let (hadoop, alice) = (hadoop.await.unwrap().granted(), alice.await.unwrap().granted());
    assert_ne!(hadoop.ticket_id, alice.ticket_id);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}
