//! Fencing: a call for an earlier registration of an EM is refused if it names its epoch.

use rm_client::ClientError;
use rm_model::{operation::ConfirmTicket, ticket::TicketState};
use tonic::Code;

use crate::harness::*;

fn stale(error: &ClientError) {
    let got = (error.code(), error.reason());
    assert_eq!(got, (Some(Code::FailedPrecondition), Some("STALE_EPOCH".to_owned())), "{error}");
    assert!(error.to_string().contains("stop the earlier process, or register again"), "{error}");
}

fn ahead(error: &ClientError) {
    let got = (error.code(), error.field());
    assert_eq!(got, (Some(Code::InvalidArgument), Some("epoch".to_owned())), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_epoch_unregister_is_refused() {
    let (database, rm, second) = two().await;
    let em1 = em("host1");
    let old = rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    rm.client.unregister_fenced(&em1, old.epoch).await.unwrap();
    let new = rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let locked = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let used = rm.client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
    rm.client.resource_inited(&inited(&used, "alice", None)).await.unwrap();

    for instance in [&rm, &second] {
        stale(&instance.client.unregister_fenced(&em1, old.epoch).await.unwrap_err());
        ahead(&instance.client.unregister_fenced(&em1, new.epoch + 1).await.unwrap_err());
    }
    assert!(lives(&rm.client, locked.ticket_id).await && lives(&rm.client, used.ticket_id).await);
    assert_eq!(rm.client.em(&em1).await.unwrap().epoch, new.epoch);
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);

    assert_eq!(second.client.unregister_fenced(&em1, new.epoch).await.unwrap(), 2);
    let again = rm.client.unregister_fenced(&em1, new.epoch).await.unwrap_err();
    assert_eq!(again.reason().as_deref(), Some("EM_NOT_REGISTERED"));
    // A call without an epoch is accepted for any registration.
    rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    rm.client.unregister(&em1).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_epoch_confirmation_is_refused() {
    let (database, rm) = start().await;
    let em1 = em("host1");
    let old = rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let grant = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let other = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let new = rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();

    let report = |epoch| ConfirmTicket { epoch: Some(epoch), ..inited(&grant, "hadoop", None) };
    stale(&rm.client.resource_inited(&report(old.epoch)).await.unwrap_err());
    ahead(&rm.client.resource_inited(&report(new.epoch + 1)).await.unwrap_err());
    let ticket = rm.client.ticket(grant.ticket_id).await.unwrap();
    assert!(matches!(ticket.state, TicketState::Locked { .. }), "nothing was changed");

    // The ticket is older than the registration and stays live: only the epoch of the call is compared.
    rm.client.resource_inited(&report(new.epoch)).await.unwrap();
    rm.client.resource_inited(&inited(&other, "hadoop", None)).await.unwrap();
    stale(&rm.client.resource_inited(&report(old.epoch)).await.unwrap_err());
    rm.client.resource_inited(&report(new.epoch)).await.unwrap();
    // A release is accepted for any epoch.
    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}
