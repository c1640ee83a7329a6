//! Life of a ticket and of an EM: from registration and grant to release and removal.

use std::time::Duration;

use rm_model::{
    resource::{Dimension, LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
    ticket::TicketState,
};
use tonic::Code;
use uuid::Uuid;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_is_locked_used_and_released() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(64, 16, 10)).await;

    let grant = rm.client.request_resource(&request(&em1, "hadoop", load(2, 2, 1))).await.granted();
    let held = rm.client.em(&em1).await.unwrap();
    assert_eq!((held.locked, held.used), (load(2, 2, 1), load(0, 0, 0)));
    let ticket = rm.client.ticket(grant.ticket_id).await.unwrap();
    let TicketState::Locked { resource, expires_at } = ticket.state else { panic!("{ticket:?}") };
    assert_eq!((resource, expires_at), (load(2, 2, 1), grant.expires_at));
    assert_eq!(expires_at - ticket.locked_time, time::Duration::minutes(10));

    // The engine uses less than the locked amounts, so the difference is freed.
    let used = rm.client.resource_inited(&inited(&grant, "hadoop", Some(load(1, 2, 1)))).await.unwrap();
    let TicketState::Used { resource, engine: who, .. } = used.state else { panic!("{used:?}") };
    assert_eq!((resource, who), (load(1, 2, 1), engine("host1")));
    let held = rm.client.em(&em1).await.unwrap();
    assert_eq!((held.locked, held.used), (load(0, 0, 0), load(1, 2, 1)));

    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    let held = rm.client.em(&em1).await.unwrap();
    assert!(held.is_idle());
    let gone = rm.client.ticket(grant.ticket_id).await.unwrap_err();
    assert_eq!((gone.code(), gone.reason().as_deref()), (Some(Code::NotFound), Some("TICKET_NOT_FOUND")));
    assert!(gone.to_string().contains("was released"), "{gone}");
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn confirmation_repeated_with_other_content_is_refused() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(64, 16, 10)).await;
    let grant = rm.client.request_resource(&request(&em1, "hadoop", load(4, 2, 1))).await.granted();
    let report = |used| inited(&grant, "hadoop", used);
    let first = rm.client.resource_inited(&report(Some(load(3, 2, 1)))).await.unwrap();
    for other in [load(4, 2, 1), load(2, 2, 1), load(3, 3, 1), Resource::memory(3 * GB).unwrap()] {
        let error = rm.client.resource_inited(&report(Some(other))).await.unwrap_err();
        let got = (error.code(), error.reason());
        assert_eq!(got, (Some(Code::FailedPrecondition), Some("TICKET_ALREADY_INITED".to_owned())), "{error}");
        assert!(error.to_string().contains("call ResourceReported"), "{error}");
    }
    let error = rm
        .client
        .resource_inited(&rm_model::operation::ConfirmTicket { engine: engine("host2"), ..report(None) })
        .await
        .unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("TICKET_ALREADY_INITED"));
    // A repetition, with or without the use, changes nothing.
    assert_eq!(rm.client.resource_inited(&report(Some(load(3, 2, 1)))).await.unwrap(), first);
    assert_eq!(rm.client.resource_inited(&report(None)).await.unwrap(), first);
    assert_eq!(rm.client.em(&em1).await.unwrap().used, load(3, 2, 1));
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);

    for _ in 0..3 {
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    let late = rm.client.resource_inited(&report(None)).await.unwrap_err();
    assert_eq!(late.reason().as_deref(), Some("TICKET_NOT_FOUND"));
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
    assert!(rm.client.em(&em1).await.unwrap().is_idle());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn confirmation_above_grant_requires_free_capacity() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    let grant = rm.client.request_resource(&request(&em1, "hadoop", load(4, 4, 1))).await.granted();
    let other = rm.client.request_resource(&request(&em1, "hadoop", load(4, 4, 1))).await.granted();

    let error = rm.client.resource_inited(&inited(&grant, "hadoop", Some(load(7, 4, 1)))).await.unwrap_err();
    assert_eq!(
        (error.code(), error.reason().as_deref()),
        (Some(Code::FailedPrecondition), Some("NOT_ENOUGH_RESOURCE"))
    );
    assert!(error.to_string().contains("requestResource : 7GB > availableResource : 6GB"), "{error}");
    let ticket = rm.client.ticket(grant.ticket_id).await.unwrap();
    assert!(matches!(ticket.state, TicketState::Locked { .. }), "it stays locked");

    rm.client.resource_inited(&inited(&grant, "hadoop", Some(load(6, 4, 1)))).await.unwrap();
    assert_eq!(rm.client.em(&em1).await.unwrap().used, load(6, 4, 1));
    rm.client.resource_inited(&inited(&other, "hadoop", None)).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_lists_every_shortfall() {
    let (_database, rm) = start().await;
    let em1 = em("host-1");
    let mut capacity = registration(em1.clone(), load(10, 8, 2));
    capacity.protected = load(2, 1, 0);
    rm.client.register(capacity).await.unwrap();
    rm.client.request_resource(&request(&em1, "hadoop", load(2, 2, 1))).await.granted();

    let refusal = rm.client.request_resource(&request(&em1, "hadoop", load(7, 6, 1))).await.refused();
    assert_eq!(refusal.code, 11002);
    assert_eq!(
        refusal.reason,
        "ECM CPU resources are insufficient use CPU, requestResource : 6cores > availableResource : 5cores,  \
         maxResource : 8cores.ECM Instance:host-1:9102"
    );
    let short: Vec<_> =
        refusal.shortfalls.iter().map(|s| (s.dimension.clone(), s.requested, s.available, s.max)).collect();
    assert_eq!(
        short,
        [(Dimension::Cores, 6, 5, 8), (Dimension::Memory, 7 * GB, 6 * GB, 10 * GB)],
        "Linkis's order: cores, memory, instances"
    );
    assert!(!refusal.never_fits, "it would fit an empty EM");
    // Protected amounts are never granted.
    let refusal = rm.client.request_resource(&request(&em1, "hadoop", load(9, 1, 1))).await.refused();
    assert!(refusal.never_fits);
    assert_eq!(refusal.code, 11001);
    // Exactly what is left fits.
    rm.client.request_resource(&request(&em1, "hadoop", load(6, 5, 1))).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_returns_reply_of_request_without_grant() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 8, 2)).await;
    let fits = rm.client.dry_run(&request(&em1, "hadoop", load(10, 8, 2))).await.granted();
    assert_eq!((fits.ticket_id, fits.em), (Uuid::nil(), em1.clone()));
    let dry = rm.client.dry_run(&request(&em1, "hadoop", load(11, 8, 2))).await.refused();
    let real = rm.client.request_resource(&request(&em1, "hadoop", load(11, 8, 2))).await.refused();
    assert_eq!(dry, real);
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// In Linkis, a request with a zero in some dimension is locked, and can then be neither used nor released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_with_zero_dimension_is_released() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 8, 2)).await;
    for resource in [load(1, 0, 1), load(0, 1, 0), Resource::memory(GB).unwrap(), Resource::instance(1).unwrap()] {
        let grant = rm.client.request_resource(&request(&em1, "hadoop", resource)).await.granted();
        rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        let grant = rm.client.request_resource(&request(&em1, "hadoop", load(1, 0, 1))).await.granted();
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    assert!(rm.client.em(&em1).await.unwrap().is_idle());
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn em_provides_driver_part_of_yarn_request() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 8, 2)).await;
    let driver = LoadInstanceAmounts { memory: 2 * GB, cores: 1, instances: 1 };
    let queue = YarnAmounts {
        queue_name: "q1".into(),
        queue_memory: 1000 * GB,
        queue_cores: 1000,
        queue_instances: 0,
        application_id: String::new(),
    };
    let asked = Resource::from_parts(ResourceParts::DriverAndYarn(driver, queue.clone())).unwrap();
    let grant = rm.client.request_resource(&request(&em1, "hadoop", asked.clone())).await.granted();
    assert_eq!(rm.client.em(&em1).await.unwrap().locked, load(2, 1, 1));
    assert_eq!(*rm.client.ticket(grant.ticket_id).await.unwrap().resource(), asked, "the ticket keeps all of it");

    let running = YarnAmounts { application_id: "application_1".into(), ..queue.clone() };
    let used = Resource::from_parts(ResourceParts::DriverAndYarn(driver, running)).unwrap();
    let ticket = rm.client.resource_inited(&inited(&grant, "hadoop", Some(used))).await.unwrap();
    assert_eq!(ticket.resource().application_id(), Some("application_1"));
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();

    let elsewhere =
        Resource::from_parts(ResourceParts::DriverAndYarn(driver, YarnAmounts { queue_name: "q2".into(), ..queue }));
    let grant = rm.client.request_resource(&request(&em1, "hadoop", asked)).await.granted();
    let error = rm.client.resource_inited(&inited(&grant, "hadoop", Some(elsewhere.unwrap()))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("RESOURCE_NOT_PROVIDED"), "another queue than was granted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registration_repeated_keeps_tickets_and_resizes() {
    let (database, rm) = start().await;
    let em1 = em("host1");
    let first = rm.client.register(registration(em1.clone(), load(10, 8, 4))).await.unwrap();
    let grant = rm.client.request_resource(&request(&em1, "hadoop", load(6, 4, 1))).await.granted();
    let again = rm.client.register(registration(em1.clone(), load(10, 8, 4))).await.unwrap();
    assert!(again.epoch > first.epoch);
    assert_eq!(again.locked, load(6, 4, 1), "live tickets stay");

    // A capacity below the use is visible, and nothing is granted in a short dimension until the EM drains.
    let lowered = rm.client.register(registration(em1.clone(), load(4, 8, 4))).await.unwrap();
    assert_eq!(lowered.left().unwrap().get(&Dimension::Memory), -2 * GB);
    let refusal = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.refused();
    assert_eq!((refusal.shortfalls[0].available, refusal.shortfalls[0].max), (-2 * GB, 4 * GB));
    rm.client.request_resource(&request(&em1, "hadoop", load(0, 1, 1))).await.granted();
    // A use within the grant is never refused.
    rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    rm.client.request_resource(&request(&em1, "hadoop", load(4, 1, 1))).await.granted();

    let error = rm.client.register(registration(em1.clone(), Resource::memory(GB).unwrap())).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::FailedPrecondition), Some("EM_HAS_TICKETS")));
    assert_invariants(&database, &rm.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregister_ends_tickets_of_its_em() {
    let (database, rm) = start().await;
    let (em1, other) = (em("host1"), em("host2"));
    let first = rm.client.register(registration(em1.clone(), load(10, 8, 4))).await.unwrap();
    rm.client.register(registration(other.clone(), load(10, 8, 4))).await.unwrap();
    let locked = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let used = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    rm.client.resource_inited(&inited(&used, "hadoop", None)).await.unwrap();
    let kept = rm.client.request_resource(&request(&other, "hadoop", load(1, 1, 1))).await.granted();

    assert_eq!(rm.client.unregister(&em1).await.unwrap(), 2);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
    assert!(lives(&rm.client, kept.ticket_id).await);
    let late = rm.client.resource_inited(&inited(&locked, "hadoop", None)).await.unwrap_err();
    assert_eq!(late.reason().as_deref(), Some("TICKET_NOT_FOUND"));
    assert!(late.to_string().contains("EM was unregistered"), "{late}");
    // A later release by the engine has no effect.
    rm.client.resource_released(&release(&used, "hadoop")).await.unwrap();

    for error in [
        rm.client.unregister(&em1).await.unwrap_err(),
        rm.client.em(&em1).await.unwrap_err(),
        rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.unwrap_err(),
    ] {
        assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::NotFound), Some("EM_NOT_REGISTERED")));
    }
    let back = rm.client.register(registration(em1.clone(), load(10, 8, 4))).await.unwrap();
    assert!(back.epoch > first.epoch, "an epoch never comes back");
    assert!(back.is_idle());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_repeated_returns_same_ticket_until_end() {
    let (database, rm, second) = two().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(10, 8, 2))).await.unwrap();
    let mut asked = request(&em1, "hadoop", load(10, 8, 2));
    asked.request_id = Some("job-1".into());

    let grant = rm.client.request_resource(&asked).await.granted();
    assert_eq!(rm.client.request_resource(&asked).await.granted(), grant, "although the EM is full now");
    assert_eq!(second.client.request_resource(&asked).await.granted(), grant, "also through another instance");
    rm.client.dry_run(&asked).await.granted();
    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    for instance in [&rm, &second] {
        let over = [instance.client.request_resource(&asked).await, instance.client.dry_run(&asked).await];
        for error in over.map(Result::unwrap_err) {
            assert_eq!(
                (error.code(), error.reason().as_deref()),
                (Some(Code::FailedPrecondition), Some("TICKET_ENDED"))
            );
            let got = error.to_string();
            assert!(got.contains(&grant.ticket_id.to_string()) && got.contains("was released"), "{got}");
        }
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);

    asked.creator = name("other");
    for error in [rm.client.request_resource(&asked).await, rm.client.dry_run(&asked).await].map(Result::unwrap_err) {
        assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::AlreadyExists), Some("REQUEST_ID_REUSED")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_on_two_ems_grants_once() {
    let (database, rm, second) = two().await;
    register_all(&rm.client, ["a", "b"], load(1000, 1000, 1000)).await;
    for round in 0..20 {
        let ask = |host: &str| {
            let mut asked = request(&em(host), "hadoop", load(1, 1, 1));
            asked.request_id = Some(format!("round-{round}"));
            asked
        };
        let (ask_a, ask_b) = (ask("a"), ask("b"));
        let (a, b) = tokio::join!(rm.client.request_resource(&ask_a), second.client.request_resource(&ask_b));
        let (granted, rejected): (Vec<_>, Vec<_>) = [a, b].into_iter().partition(Result::is_ok);
        assert_eq!((granted.len(), rejected.len()), (1, 1), "one body wins");
        for error in rejected {
            assert_eq!(error.unwrap_err().reason().as_deref(), Some("REQUEST_ID_REUSED"));
        }
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 20);
}

/// A grant whose caller is gone is undone immediately, and does not wait for its expiry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_with_cancelled_call_is_undone() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(1000, 1000, 1000)).await;
    for _ in 0..5 {
        // Its transaction has begun, and waits for the row of the EM.
        let mut holder = database.connect().await;
        execute(&mut holder, "BEGIN; SELECT * FROM linkis_em_resource_meta_data FOR UPDATE").await;
        let (client, asked) = (rm.client.clone(), request(&em1, "hadoop", load(1, 1, 1)));
        let call = tokio::spawn(async move { client.request_resource(&asked).await });
        eventually("it waits", Duration::from_secs(5), || is_waiting(&database)).await;
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        // A later call on the same connection: after its reply, the server has processed the cancellation.
        rm.client.em(&em1).await.unwrap();
        execute(&mut holder, "ROLLBACK").await;
        // Behind it in the queue: when this one is answered, the other one's fate is sealed.
        let next = rm.client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
        rm.client.resource_released(&release(&next, "alice")).await.unwrap();
        eventually("nothing is held", Duration::from_secs(5), || async { rm.client.em(&em1).await.unwrap().is_idle() })
            .await;
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// A ticket with zero amounts on its EM could have other amounts in another resource type of the EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn em_with_tickets_keeps_its_resource_type() {
    let (database, rm) = start().await;
    let em1 = em("host1");
    let queue =
        |name: &str, cores| YarnAmounts { queue_name: name.into(), queue_cores: cores, ..YarnAmounts::default() };
    let on_queue = |name: &str, cores| Resource::from_parts(ResourceParts::Yarn(queue(name, cores))).unwrap();
    rm.client.register(registration(em1.clone(), load(10, 8, 2))).await.unwrap();
    let nothing_here =
        Resource::from_parts(ResourceParts::DriverAndYarn(LoadInstanceAmounts::default(), queue("q", 5))).unwrap();
    let grant = rm.client.request_resource(&request(&em1, "hadoop", nothing_here)).await.granted();
    assert!(rm.client.em(&em1).await.unwrap().is_idle());
    let error = rm.client.register(registration(em1.clone(), on_queue("q", 10))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("EM_HAS_TICKETS"));
    rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();

    rm.client.register(registration(em1.clone(), on_queue("q", 10))).await.unwrap();
    rm.client.request_resource(&request(&em1, "hadoop", on_queue("q", 4))).await.granted();
    let error = rm.client.register(registration(em1.clone(), on_queue("other", 10))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("EM_HAS_TICKETS"), "another queue is another kind");
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}
