//! Contents of replies and errors.

use rm_client::ClientError;
use rm_model::{
    limit::{LabelPattern, Rule},
    resource::{Dimension, Resource, ResourceParts, YarnAmounts},
};
use rm_proto::v1::{
    self as proto, request_resource_response::Result as Answer, resource::Kind,
    resource_manager_service_client::ResourceManagerServiceClient,
};
use tonic::Code;
use uuid::Uuid;

use crate::harness::*;

/// Scope, dimension, available, max.
type Room = (String, String, i64, i64);

async fn dry_run(rm: &Instance, em: Option<&str>, cores: i64) -> (String, Vec<Room>) {
    let mut manager = ResourceManagerServiceClient::connect(rm.address.clone()).await.unwrap();
    let load = proto::LoadInstanceResource { memory: GB, cores, instances: 1 };
    let call = proto::RequestResourceRequest {
        em: em.map(|host| proto::EmInstance {
            application_name: "linkis-cg-engineconnmanager".into(),
            instance: format!("{host}:9102"),
        }),
        user: "hadoop".into(),
        creator: "IDE".into(),
        resource: Some(proto::Resource { kind: Some(Kind::LoadInstance(load)) }),
        dry_run: true,
        ..Default::default()
    };
    let Some(Answer::Available(available)) = manager.request_resource(call).await.unwrap().into_inner().result else {
        panic!("it fits");
    };
    assert!(available.ticket_id.is_empty() && available.expire_time.is_none());
    let room = |room: proto::HeadRoom| (room.scope, room.dimension, room.available, room.max);
    (available.em.unwrap().instance, available.head_room.into_iter().map(room).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_returns_head_room() {
    let (database, rm) = start().await;
    let em1 = em("host1");
    let mut registration = registration(em1.clone(), load(64, 16, 20));
    registration.protected = load(4, 2, 0);
    rm.client.register(registration).await.unwrap();
    let keys = |keys: &[&str]| LabelPattern::new(keys.iter().map(|key| ((*key).to_owned(), None)).collect());
    for (labels, max) in [
        (&["user"][..], vec![(Dimension::Instances, 5), (Dimension::Cores, 100)]),
        (&["creator", "user"][..], vec![(Dimension::Memory, 10 * GB)]),
        (&["tenant"][..], vec![(Dimension::Cores, 50)]),
    ] {
        rm.client
            .set_limit(&Rule {
                pattern: keys(labels),
                mode: Default::default(),
                max: max.into_iter().collect(),
                guarantee: Default::default(),
            })
            .await
            .unwrap();
    }
    rm.client.request_resource(&request(&em1, "hadoop", load(3, 2, 1))).await.granted();
    let used = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    rm.client.resource_inited(&inited(&used, "hadoop", None)).await.unwrap();
    rm.client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
    let scope = "em=linkis-cg-engineconnmanager/host1:9102";
    let room = |scope: &str, dimension: &str, available, max| (scope.to_owned(), dimension.to_owned(), available, max);
    let expected = [
        room(scope, "memory", (64 - 4 - 5) * GB, 64 * GB),
        room(scope, "cores", 16 - 2 - 4, 16),
        room(scope, "instances", 20 - 3, 20),
        room("tenant=", "cores", 50 - 4, 50),
        room("user=hadoop", "cores", 100 - 3, 100),
        room("user=hadoop", "instances", 5 - 2, 5),
        room("creator=IDE,user=hadoop", "memory", (10 - 4) * GB, 10 * GB),
    ];
    // On a named EM or any EM: the head-room before the request, independent of the requested amounts.
    for (em, cores) in [(Some("host1"), 1), (Some("host1"), 10), (None, 1)] {
        let (on, mut got) = dry_run(&rm, em, cores).await;
        assert_eq!(on, "host1:9102");
        let mut expected = expected.to_vec();
        got.sort();
        expected.sort();
        assert_eq!(got, expected);
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 3, "nothing was granted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_for_other_queue_names_both_queues() {
    let (_database, rm) = start().await;
    let em1 = em("host1");
    let on_queue = |queue: &str, cores| {
        let queue_name = queue.to_owned();
        Resource::from_parts(ResourceParts::Yarn(YarnAmounts {
            queue_name,
            queue_cores: cores,
            ..YarnAmounts::default()
        }))
        .unwrap()
    };
    rm.client.register(registration(em1.clone(), on_queue("root.etl", 10))).await.unwrap();
    let wrong = request(&em1, "hadoop", on_queue("root.adhoc", 1));
    let anywhere = rm_client::ResourceRequest { em: None, ..wrong.clone() };
    let patient = rm_client::ResourceRequest { wait_timeout: std::time::Duration::from_secs(60), ..wrong.clone() };
    let answers = [
        rm.client.request_resource(&wrong).await,
        rm.client.dry_run(&wrong).await,
        rm.client.request_resource(&anywhere).await,
        rm.client.request_resource(&patient).await,
    ];
    for error in answers.map(Result::unwrap_err) {
        let reason = error.reason();
        assert_eq!((error.code(), reason.as_deref()), (Some(Code::InvalidArgument), Some("RESOURCE_NOT_PROVIDED")));
        assert_eq!(error.field().as_deref(), Some("resource"));
        let got = error.to_string();
        assert!(got.contains("root.etl") && got.contains("root.adhoc"), "{got}");
    }
    // A request in the queue of the EM is granted, and refused when the EM is full.
    let full = request(&em1, "hadoop", on_queue("root.etl", 10));
    rm.client.request_resource(&full).await.granted();
    assert_eq!(rm.client.request_resource(&full).await.refused().shortfalls[0].available, 0);
}

/// Errors have fields, so that no program parses texts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_fields_repeat_error_text() {
    let (_database, rm) = start().await;
    let em1 = em("host1");
    let check = |error: &ClientError, reason: &str, facts: &[(&str, &str)]| {
        assert_eq!(error.reason().as_deref(), Some(reason), "{error}");
        for (field, value) in facts {
            assert_eq!(error.fact(field).as_deref(), Some(*value), "{field} of {error}");
            assert!(error.to_string().contains(value), "{value} in {error}");
        }
    };
    let of_em = [("em_application_name", "linkis-cg-engineconnmanager"), ("em_instance", "host1:9102")];
    check(&rm.client.unregister(&em1).await.unwrap_err(), "EM_NOT_REGISTERED", &of_em);
    let old = rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let new = rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let (old, new) = (old.epoch.to_string(), new.epoch.to_string());
    let error = rm.client.unregister_fenced(&em1, old.parse().unwrap()).await.unwrap_err();
    check(&error, "STALE_EPOCH", &[("epoch", &old), ("current_epoch", &new)]);
    check(&error, "STALE_EPOCH", &of_em);

    let grant = rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let id = grant.ticket_id.to_string();
    let error = rm.client.resource_inited(&inited(&grant, "hadoop", Some(load(1, 20, 1)))).await.unwrap_err();
    check(&error, "NOT_ENOUGH_RESOURCE", &[("requested", "20"), ("available", "10"), ("max", "10")]);
    let got = (error.fact("scope"), error.fact("dimension"), error.fact("never_fits"));
    let scope = "em=linkis-cg-engineconnmanager/host1:9102".to_owned();
    assert_eq!(got, (Some(scope), Some("cores".to_owned()), Some("true".to_owned())));
    let error = rm.client.resource_inited(&inited(&grant, "alice", None)).await.unwrap_err();
    check(&error, "TICKET_NOT_FOUND", &[("ticket_id", &id)]);
    rm.client.ticket_released(grant.ticket_id).await.unwrap();
    let error = rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap_err();
    check(&error, "TICKET_NOT_FOUND", &[("ticket_id", &id), ("ended", "released")]);
    assert!(error.to_string().contains(&error.fact("end_time").unwrap()), "{error}");
    let never = Uuid::from_u128(7);
    let error = rm.client.ticket_released(never).await.unwrap_err();
    check(&error, "TICKET_NOT_FOUND", &[("ticket_id", &never.to_string())]);
    assert_eq!(error.fact("ended"), None);
}
