//! Invalid input: the status names the field, and nothing changes.

use std::collections::BTreeMap;

use prost::Message as _;
use rm_proto::page::PageRequest;
use rm_proto::v1::{
    self as proto, resource::Kind, resource_manager_service_client::ResourceManagerServiceClient,
    usage_service_client::UsageServiceClient,
};
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::harness::*;

type Manager = ResourceManagerServiceClient<Channel>;

fn em_of(application_name: &str, instance: &str) -> Option<proto::EmInstance> {
    Some(proto::EmInstance { application_name: application_name.into(), instance: instance.into() })
}

fn host() -> Option<proto::EmInstance> {
    em_of("linkis-cg-engineconnmanager", "host1:9102")
}

fn of(kind: Kind) -> Option<proto::Resource> {
    Some(proto::Resource { kind: Some(kind) })
}

fn load_of(memory: i64, cores: i64, instances: i64) -> Option<proto::Resource> {
    of(Kind::LoadInstance(proto::LoadInstanceResource { memory, cores, instances }))
}

fn json(resource_type: &str, document: &str) -> Option<proto::Resource> {
    of(Kind::Json(proto::LinkisJson { resource_type: resource_type.into(), document: document.into() }))
}

fn special(name: &str, amount: i64) -> Option<proto::Resource> {
    of(Kind::Special(proto::SpecialResource { resources: BTreeMap::from([(name.into(), amount)]) }))
}

fn good_request() -> proto::RequestResourceRequest {
    proto::RequestResourceRequest {
        em: host(),
        user: "hadoop".into(),
        creator: "IDE".into(),
        resource: load_of(1, 1, 1),
        ..Default::default()
    }
}

fn good_registration() -> proto::RegisterRequest {
    proto::RegisterRequest {
        em: host(),
        total: load_of(100, 10, 10),
        protected_resource: load_of(10, 1, 0),
        ..Default::default()
    }
}

/// The code, the reason, and the field (empty for none) of an error.
fn details<T: std::fmt::Debug>(answer: Result<T, Status>) -> (Code, String, String) {
    let status = answer.unwrap_err();
    assert!(!status.message().is_empty());
    let reason = status.get_details_error_info().map(|info| info.reason).unwrap_or_default();
    let field = status.get_details_bad_request().and_then(|bad| bad.field_violations.into_iter().next());
    (status.code(), reason, field.map(|violation| violation.field).unwrap_or_default())
}

fn bad_field(field: &str) -> (Code, String, String) {
    (Code::InvalidArgument, "INVALID_FIELD".into(), field.into())
}

fn not_provided(field: &str) -> (Code, String, String) {
    (Code::InvalidArgument, "RESOURCE_NOT_PROVIDED".into(), field.into())
}

/// Runs `calls` against a server with one EM and one ticket, and checks that nothing has changed afterwards.
async fn unchanged_by<F: Future<Output = ()>>(calls: impl FnOnce(Manager, String) -> F) {
    let (database, rm) = start().await;
    let mut manager = Manager::connect(rm.address.clone()).await.unwrap();
    manager.register(good_registration()).await.unwrap();
    let grant = manager.request_resource(good_request()).await.unwrap().into_inner();
    let Some(proto::request_resource_response::Result::Available(grant)) = grant.result else { panic!("{grant:?}") };
    let before = (rm.client.ems().await.unwrap(), rm.client.tickets(None).await.unwrap());
    calls(manager, grant.ticket_id).await;
    let after = (rm.client.ems().await.unwrap(), rm.client.tickets(None).await.unwrap());
    assert_eq!(before, after);
    assert_invariants(&database, &rm.client).await;
    let history = database.count("SELECT count(*) FROM linkis_resource_action_record").await;
    assert_eq!(history, 2, "registered and granted, and nothing since");
}

/// The shortest and the longest duration that can be sent.
const EXTREMES: [prost_types::Duration; 2] = [
    prost_types::Duration { seconds: i64::MIN, nanos: i32::MIN },
    prost_types::Duration { seconds: i64::MAX, nanos: i32::MAX },
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_request_returns_field() {
    let change = |change: fn(&mut proto::RequestResourceRequest)| {
        let mut request = good_request();
        change(&mut request);
        request
    };
    let cases = [
        (change(|r| r.em = em_of("", "h")), bad_field("em.application_name")),
        (change(|r| r.em = em_of("a", "h\n")), bad_field("em.instance")),
        (change(|r| r.em = em_of("a", &"h".repeat(256))), bad_field("em.instance")),
        (change(|r| r.user = String::new()), bad_field("user")),
        (change(|r| r.user = "u".repeat(256)), bad_field("user")),
        (change(|r| r.creator = String::new()), bad_field("creator")),
        (change(|r| r.creator = "a\0b".into()), bad_field("creator")),
        (change(|r| r.engine_type = "e".repeat(256)), bad_field("engine_type")),
        (change(|r| r.request_id = "i".repeat(256)), bad_field("request_id")),
        (change(|r| r.resource = None), bad_field("resource")),
        (change(|r| r.resource = Some(proto::Resource { kind: None })), bad_field("resource")),
        (change(|r| r.resource = load_of(0, 0, 0)), bad_field("resource")),
        (change(|r| r.resource = load_of(-1, 1, 1)), bad_field("resource")),
        (change(|r| r.resource = load_of(1, -1, 1)), bad_field("resource")),
        (change(|r| r.resource = special("gpu", -1)), bad_field("resource")),
        (change(|r| r.resource = special("gpu", 1)), not_provided("resource")),
        (
            change(|r| r.resource = of(Kind::Yarn(proto::YarnResource { queue_cores: 1, ..Default::default() }))),
            not_provided("resource"),
        ),
        (
            change(|r| r.resource = json("LoadInstance", r#"{"memory":1,"cores":1}"#)),
            bad_field("resource.json.document"),
        ),
        (
            change(|r| r.resource = json("LoadInstance", r#"{"memory":1,"cores":1,"instances":1,"gpu":1}"#)),
            bad_field("resource.json.document"),
        ),
        (
            change(|r| r.resource = json("LoadInstance", r#"{"memory":99999999999999999999,"cores":1,"instances":1}"#)),
            bad_field("resource.json.document"),
        ),
        (
            change(|r| r.resource = json("LoadInstance", r#"{"memory":-1,"cores":1,"instances":1}"#)),
            bad_field("resource.json.document"),
        ),
        (change(|r| r.resource = json("LoadInstance", "{")), bad_field("resource.json.document")),
        (change(|r| r.resource = json("Presto", "{}")), bad_field("resource.json.resource_type")),
        (change(|r| r.labels = BTreeMap::from([("user".into(), "eve".into())])), bad_field("labels")),
        (change(|r| r.labels = (0..33).map(|n| (n.to_string(), "v".into())).collect()), bad_field("labels")),
        (change(|r| r.lock_ttl = Some(prost_types::Duration { seconds: -1, nanos: 0 })), bad_field("lock_ttl")),
        (change(|r| r.lock_ttl = Some(prost_types::Duration { seconds: 0, nanos: 0 })), bad_field("lock_ttl")),
        (change(|r| r.lock_ttl = Some(prost_types::Duration { seconds: 86_401, nanos: 0 })), bad_field("lock_ttl")),
        (change(|r| r.wait_timeout = Some(prost_types::Duration { seconds: -1, nanos: 0 })), bad_field("wait_timeout")),
        (
            change(|r| r.wait_timeout = Some(prost_types::Duration { seconds: 600, nanos: 1 })),
            bad_field("wait_timeout"),
        ),
        (change(|r| r.priority = -601), bad_field("priority")),
        (change(|r| r.priority = i32::MAX), bad_field("priority")),
        (change(|r| r.lock_ttl = Some(EXTREMES[0])), bad_field("lock_ttl")),
        (change(|r| r.lock_ttl = Some(EXTREMES[1])), bad_field("lock_ttl")),
        (change(|r| r.wait_timeout = Some(EXTREMES[0])), bad_field("wait_timeout")),
        (change(|r| r.wait_timeout = Some(EXTREMES[1])), bad_field("wait_timeout")),
        (
            change(|r| r.em = em_of("linkis-cg-engineconnmanager", "host2:9102")),
            (Code::NotFound, "EM_NOT_REGISTERED".into(), String::new()),
        ),
    ];
    unchanged_by(async |mut manager: Manager, _| {
        for (request, expected) in cases {
            let shown = format!("{request:?}");
            let mut dry = request.clone();
            dry.dry_run = true;
            assert_eq!(details(manager.request_resource(request).await), expected, "{shown}");
            assert_eq!(details(manager.request_resource(dry).await), expected, "dry run of {shown}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_registration_returns_field() {
    let change = |change: fn(&mut proto::RegisterRequest)| {
        let mut request = good_registration();
        change(&mut request);
        request
    };
    let cases = [
        (change(|r| r.em = None), bad_field("em")),
        (change(|r| r.total = None), bad_field("total")),
        (change(|r| r.total = load_of(1, -1, 1)), bad_field("total")),
        (change(|r| r.protected_resource = load_of(101, 0, 0)), bad_field("protected_resource")),
        (change(|r| r.protected_resource = special("gpu", 1)), bad_field("protected_resource")),
        (change(|r| r.protected_resource = load_of(1, -5, 1)), bad_field("protected_resource")),
        (
            change(|r| (r.total, r.protected_resource) = (special("gpu", 1), special("fpga", 1))),
            bad_field("protected_resource"),
        ),
        (change(|r| r.labels = BTreeMap::from([("k".into(), "v".repeat(256))])), bad_field("labels[\"k\"]")),
        (change(|r| r.total = json("Memory", r#"{"memory":"20g"}"#)), bad_field("total.json.document")),
    ];
    unchanged_by(async |mut manager: Manager, _| {
        for (request, expected) in cases {
            let shown = format!("{request:?}");
            assert_eq!(details(manager.register(request).await), expected, "{shown}");
        }
        let unregister = |em, epoch| proto::UnregisterRequest { em, epoch };
        assert_eq!(details(manager.unregister(unregister(None, 0)).await), bad_field("em"));
        for epoch in [-1, i64::MIN, i64::MAX] {
            assert_eq!(details(manager.unregister(unregister(host(), epoch)).await), bad_field("epoch"));
        }
        let stale = (Code::FailedPrecondition, "STALE_EPOCH".to_owned(), String::new());
        assert_eq!(details(manager.unregister(unregister(host(), 1)).await), stale);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_ticket_call_returns_field() {
    unchanged_by(async |mut manager: Manager, ticket_id: String| {
        let engine = || Some(proto::EngineInstance { application_name: "e".into(), instance: "h:1".into() });
        let good = proto::ResourceInitedRequest {
            ticket_id: ticket_id.clone(),
            user: "hadoop".into(),
            em: host(),
            used: None,
            engine: engine(),
            epoch: 0,
            ..Default::default()
        };
        let unknown = (Code::NotFound, "TICKET_NOT_FOUND".to_owned(), String::new());
        let other_em = em_of("linkis-cg-engineconnmanager", "host2:9102");
        let cases = [
            (proto::ResourceInitedRequest { ticket_id: "42".into(), ..good.clone() }, bad_field("ticket_id")),
            (proto::ResourceInitedRequest { ticket_id: String::new(), ..good.clone() }, bad_field("ticket_id")),
            (proto::ResourceInitedRequest { ticket_id: Uuid::nil().to_string(), ..good.clone() }, unknown.clone()),
            (proto::ResourceInitedRequest { user: "eve".into(), ..good.clone() }, unknown.clone()),
            (proto::ResourceInitedRequest { em: other_em.clone(), ..good.clone() }, unknown.clone()),
            (proto::ResourceInitedRequest { engine: None, ..good.clone() }, bad_field("engine")),
            (proto::ResourceInitedRequest { used: special("gpu", 1), ..good.clone() }, not_provided("used")),
            (proto::ResourceInitedRequest { used: load_of(-1, 0, 0), ..good.clone() }, bad_field("used")),
            (proto::ResourceInitedRequest { epoch: -1, ..good.clone() }, bad_field("epoch")),
            (proto::ResourceInitedRequest { epoch: i64::MAX, ..good.clone() }, bad_field("epoch")),
            (
                proto::ResourceInitedRequest { epoch: 1, ..good.clone() },
                (Code::FailedPrecondition, "STALE_EPOCH".into(), String::new()),
            ),
        ];
        for (request, expected) in cases {
            let shown = format!("{request:?}");
            assert_eq!(details(manager.resource_inited(request).await), expected, "{shown}");
        }
        let good = proto::ResourceReportedRequest {
            ticket_id: ticket_id.clone(),
            user: "hadoop".into(),
            em: host(),
            used: load_of(1, 1, 1),
            epoch: 0,
            ..Default::default()
        };
        let not_now = |reason: &str| (Code::FailedPrecondition, reason.to_owned(), String::new());
        let cases = [
            (proto::ResourceReportedRequest { ticket_id: "42".into(), ..good.clone() }, bad_field("ticket_id")),
            (proto::ResourceReportedRequest { ticket_id: Uuid::nil().to_string(), ..good.clone() }, unknown.clone()),
            (proto::ResourceReportedRequest { user: String::new(), ..good.clone() }, bad_field("user")),
            (proto::ResourceReportedRequest { user: "eve".into(), ..good.clone() }, unknown.clone()),
            (proto::ResourceReportedRequest { em: None, ..good.clone() }, bad_field("em")),
            (proto::ResourceReportedRequest { em: other_em.clone(), ..good.clone() }, unknown.clone()),
            (proto::ResourceReportedRequest { used: None, ..good.clone() }, bad_field("used")),
            (proto::ResourceReportedRequest { used: load_of(-1, 0, 0), ..good.clone() }, bad_field("used")),
            (proto::ResourceReportedRequest { epoch: -1, ..good.clone() }, bad_field("epoch")),
            (proto::ResourceReportedRequest { epoch: i64::MAX, ..good.clone() }, bad_field("epoch")),
            (proto::ResourceReportedRequest { epoch: 1, ..good.clone() }, not_now("STALE_EPOCH")),
            (good, not_now("TICKET_NOT_INITED")),
        ];
        for (request, expected) in cases {
            let shown = format!("{request:?}");
            assert_eq!(details(manager.resource_reported(request).await), expected, "{shown}");
        }
        let good =
            proto::ResourceReleasedRequest { ticket_id, user: "hadoop".into(), em: host(), ..Default::default() };
        let nobody = Uuid::new_v4().to_string();
        let cases = [
            (proto::ResourceReleasedRequest { ticket_id: "x".repeat(36), ..good.clone() }, bad_field("ticket_id")),
            (proto::ResourceReleasedRequest { ticket_id: nobody.clone(), ..good.clone() }, unknown.clone()),
            (proto::ResourceReleasedRequest { ticket_id: nobody, ..Default::default() }, unknown.clone()),
            (proto::ResourceReleasedRequest { user: "eve".into(), ..good.clone() }, unknown.clone()),
            (proto::ResourceReleasedRequest { user: "eve".into(), em: None, ..good.clone() }, unknown.clone()),
            (proto::ResourceReleasedRequest { em: other_em.clone(), ..good.clone() }, unknown.clone()),
            (proto::ResourceReleasedRequest { em: other_em, user: String::new(), ..good.clone() }, unknown.clone()),
            (proto::ResourceReleasedRequest { em: em_of("", "h"), ..good.clone() }, bad_field("em.application_name")),
            (proto::ResourceReleasedRequest { user: "u".repeat(256), ..good.clone() }, bad_field("user")),
        ];
        for (request, expected) in cases {
            let shown = format!("{request:?}");
            assert_eq!(details(manager.resource_released(request).await), expected, "{shown}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_heartbeat_returns_field() {
    let good = || proto::HeartbeatRequest { em: host(), epoch: 1, sequence: 1, ..Default::default() };
    let change = |change: fn(&mut proto::HeartbeatRequest)| {
        let mut request = good();
        change(&mut request);
        request
    };
    let load = |memory_used, memory_max, cpu_permille| {
        let load = Some(proto::Load { memory_used, memory_max, cpu_permille });
        proto::HeartbeatRequest { load, ..good() }
    };
    let cases = [
        (change(|r| r.em = None), bad_field("em")),
        (change(|r| r.em = em_of("a", "")), bad_field("em.instance")),
        (change(|r| r.epoch = 0), bad_field("epoch")),
        (change(|r| r.epoch = -1), bad_field("epoch")),
        (change(|r| r.epoch = i64::MAX), bad_field("epoch")),
        (change(|r| r.sequence = 0), bad_field("sequence")),
        (change(|r| r.sequence = -1), bad_field("sequence")),
        (change(|r| r.health = 4), bad_field("health")),
        (change(|r| r.health = -1), bad_field("health")),
        (load(-1, 1, 0), bad_field("load.memory_used")),
        (load(2, 1, 0), bad_field("load.memory_used")),
        (load(0, -1, 0), bad_field("load.memory_max")),
        (load(0, 1, -1), bad_field("load.cpu_permille")),
        (load(0, 1, 1001), bad_field("load.cpu_permille")),
        (change(|r| r.ticket_ids = vec![0; 16 + 15]), bad_field("ticket_ids")),
        (change(|r| r.ticket_ids = vec![1]), bad_field("ticket_ids")),
        (change(|r| r.ticket_ids = vec![0; 16 * 100_001]), bad_field("ticket_ids")),
        (change(|_| {}), (Code::FailedPrecondition, "STALE_REPORT".into(), String::new())),
        (
            change(|r| r.em = em_of("linkis-cg-engineconnmanager", "host2:9102")),
            (Code::NotFound, "EM_NOT_REGISTERED".into(), String::new()),
        ),
    ];
    unchanged_by(async |mut manager: Manager, _| {
        for (request, expected) in cases {
            let shown = format!("{:?}", proto::HeartbeatRequest { ticket_ids: vec![], ..request.clone() });
            assert_eq!(details(manager.heartbeat(request).await), expected, "{shown}");
        }
        let status = manager.heartbeat(change(|r| r.ticket_ids = vec![0; 5_000_000])).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        let cut = manager.heartbeat(change(|r| r.ticket_ids = vec![0; 16 + 15])).await.unwrap_err();
        assert!(cut.message().contains("15 of the 16 bytes of ticket 2"), "{cut:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeat_with_100000_tickets_returns_first_unknown() {
    let (_database, rm) = start().await;
    let mut manager = Manager::connect(rm.address.clone()).await.unwrap();
    let epoch = manager.register(good_registration()).await.unwrap().into_inner().em.unwrap().epoch;
    let ticket_ids = (0..100_000).flat_map(|n| Uuid::from_u128(n).into_bytes()).collect();
    let heartbeat = proto::HeartbeatRequest { em: host(), epoch, sequence: 1, ticket_ids, ..Default::default() };
    assert!(heartbeat.encoded_len() < 1_700_000, "{}", heartbeat.encoded_len());
    let unknown = manager.heartbeat(heartbeat).await.unwrap().into_inner().unknown_tickets;
    assert_eq!(unknown.len(), 1000);
    assert_eq!(unknown[999].ticket_id, Uuid::from_u128(999).to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_list_call_returns_field() {
    let (_database, rm) = start().await;
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    for page_size in [-1, i32::MIN] {
        let call = proto::ListEmsRequest { page_size, ..Default::default() };
        assert_eq!(details(usage.list_ems(call).await), bad_field("page_size"));
    }
    let token = |method: &str, key: &str| PageRequest::new(method, 1, &()).unwrap().token(key);
    for key in ["x", "[1]", r#"["a"]"#, r#"["",""]"#] {
        for page_token in [key.to_owned(), token("ListEms", key)] {
            let call = proto::ListEmsRequest { page_token, ..Default::default() };
            assert_eq!(details(usage.list_ems(call).await), bad_field("page_token"));
        }
        for page_token in [key.to_owned(), token("ListTickets", key)] {
            let call = proto::ListTicketsRequest { page_token, ..Default::default() };
            assert_eq!(details(usage.list_tickets(call).await), bad_field("page_token"));
        }
    }
    for key in ["x", "00", "zz", "ü", &"0".repeat(51), &"0".repeat(1000), &"é".repeat(26)] {
        for page_token in [key.to_owned(), token("ListWaiting", key)] {
            let call = proto::ListWaitingRequest { page_token, ..Default::default() };
            assert_eq!(details(usage.list_waiting(call).await), bad_field("page_token"), "{key}");
        }
    }
    for key in [i64::MIN, i64::MAX] {
        let page_token = token("ListActions", &key.to_string());
        usage.list_actions(proto::ListActionsRequest { page_token, ..Default::default() }).await.unwrap();
        let call = proto::ListActionsRequest { page_token: key.to_string(), ..Default::default() };
        assert_eq!(details(usage.list_actions(call).await), bad_field("page_token"));
    }
    for (seconds, nanos) in [(-1, 0), (0, -1), (i64::MIN, 0)] {
        let idle_for = Some(prost_types::Duration { seconds, nanos });
        let call = proto::ListTicketsRequest { idle_for, ..Default::default() };
        assert_eq!(details(usage.list_tickets(call).await), bad_field("idle_for"));
    }
    let call = proto::ListTicketsRequest { state: "LOCKED".into(), ..Default::default() };
    assert_eq!(details(usage.list_tickets(call).await), bad_field("state"));
    let call = proto::GetTicketRequest { ticket_id: "42".into(), engine: None };
    assert_eq!(details(usage.get_ticket(call).await), bad_field("ticket_id"));
}

/// Times that fit into a message, and not into the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_outside_database_range_returns_field() {
    /// The years −9999 and −5000, the second before the first that PostgreSQL knows, and the last before 1970.
    const TOO_EARLY: [i64; 4] = [-377_705_116_800, -219_951_936_000, -210_866_803_201, -1];
    let (_database, rm) = start().await;
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let by = proto::UsageBy::User.into();
    for seconds in [i64::MIN, i64::MAX].into_iter().chain(TOO_EARLY) {
        let time = Some(prost_types::Timestamp { seconds, nanos: 0 });
        for (field, from_time, to_time) in [("from_time", time, None), ("to_time", None, time)] {
            for newest_first in [false, true] {
                let call = proto::ListActionsRequest { newest_first, from_time, to_time, ..Default::default() };
                assert_eq!(details(usage.list_actions(call).await), bad_field(field), "{seconds}");
            }
            let call = proto::ListRefusalsRequest { from_time, to_time, ..Default::default() };
            assert_eq!(details(usage.list_refusals(call).await), bad_field(field), "{seconds}");
            let call = proto::GetUsageRequest { by, from_time, to_time, ..Default::default() };
            assert_eq!(details(usage.get_usage(call).await), bad_field(field), "{seconds}");
        }
        // A page token that a caller made can contain any time.
        let call = proto::ListRefusalsRequest::default();
        let key = format!("{seconds}-{}", "00".repeat(32));
        let page_token = PageRequest::new("ListRefusals", 1, &call).unwrap().token(&key);
        let call = proto::ListRefusalsRequest { page_token, ..call };
        assert_eq!(details(usage.list_refusals(call).await), bad_field("page_token"), "{seconds}");
        let call = proto::GetUsageRequest { by, ..Default::default() };
        for key in [format!("[{seconds},null,null]"), format!("[3600,null,{seconds}]")] {
            let page_token = PageRequest::new("GetUsage", 1, &call).unwrap().token(&key);
            let call = proto::GetUsageRequest { page_token, ..call.clone() };
            assert_eq!(details(usage.get_usage(call).await), bad_field("page_token"), "{seconds}");
        }
    }
    for seconds in [0, 253_402_300_799] {
        let from_time = Some(prost_types::Timestamp { seconds, nanos: 999_999_999 });
        usage.list_actions(proto::ListActionsRequest { from_time, ..Default::default() }).await.unwrap();
        usage.list_actions(proto::ListActionsRequest { to_time: from_time, ..Default::default() }).await.unwrap();
        usage.list_refusals(proto::ListRefusalsRequest { from_time, ..Default::default() }).await.unwrap();
        usage.list_refusals(proto::ListRefusalsRequest { to_time: from_time, ..Default::default() }).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn amount_above_exact_range_is_refused() {
    let (database, rm) = start().await;
    let em1 = em("host1");
    let most = rm_model::resource::Resource::memory((1 << 53) - 1).unwrap();
    let more = rm_model::resource::Resource::memory(1 << 53).unwrap();
    let error = rm.client.register(registration(em1.clone(), more)).await.unwrap_err();
    assert_eq!(error.field().as_deref(), Some("total"));
    rm.client.register(registration(em1.clone(), most.clone())).await.unwrap();
    rm.client.request_resource(&request(&em1, "hadoop", most.clone())).await.granted();
    let refusal = rm.client.request_resource(&request(&em1, "hadoop", most)).await.refused();
    assert_eq!(refusal.shortfalls[0].available, 0);
    assert_invariants(&database, &rm.client).await;
}

/// Errors travel in headers, so long names in them are shortened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_with_long_names_fits_headers() {
    let (_database, rm) = start().await;
    let mut manager = Manager::connect(rm.address.clone()).await.unwrap();
    let labels = |value: &str| (0..3).map(|n| (format!("{n:用>255}"), value.repeat(255))).collect();
    manager.register(proto::RegisterRequest { labels: labels("a"), ..good_registration() }).await.unwrap();
    let nowhere = proto::RequestResourceRequest { em: None, required_labels: labels("户"), ..good_request() };
    assert_eq!(
        details(manager.request_resource(nowhere).await),
        (Code::NotFound, "NO_EM_MATCHES".into(), String::new())
    );
    let unknown = proto::RequestResourceRequest { em: em_of(&"用".repeat(255), &"户".repeat(255)), ..good_request() };
    let answer = manager.request_resource(unknown).await;
    assert_eq!(details(answer), (Code::NotFound, "EM_NOT_REGISTERED".into(), String::new()));
}

/// Legal names with separators: names are compared, and never joined or split.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_with_separators_stay_distinct() {
    let (database, rm) = start().await;
    let mut manager = Manager::connect(rm.address.clone()).await.unwrap();
    let names = [
        ("a", "b/c"),
        ("a/b", "c"),
        ("a-b", "c,d"),
        ("a", "b-c,d"),
        ("用户", "主机:1"),
        ("' or 1=1 --", "\"{}\\"),
        ("Ａ", "a\u{a0}b"),
        ("[fe80::1%eth0]:9102", "é"),
        ("A", "e\u{301}"),
        ("a", "host 1:1"),
        ("a", "host\u{a0}1:1"),
        ("a", "H:1"),
        ("a", "h:1"),
        ("a", &"\u{1f600}".repeat(255)),
    ];
    for (application_name, instance) in names {
        let em = em_of(application_name, instance);
        manager.register(proto::RegisterRequest { em: em.clone(), ..good_registration() }).await.unwrap();
        for user in [application_name, instance] {
            let request = proto::RequestResourceRequest { em: em.clone(), user: user.into(), ..good_request() };
            manager.request_resource(request).await.unwrap();
        }
    }
    let ems = rm.client.ems().await.unwrap();
    assert_eq!(ems.len(), names.len());
    for em in ems {
        assert_eq!(em.locked.get(&rm_model::resource::Dimension::Instances), 2, "{em:?}");
        assert_eq!(rm.client.tickets(Some(&em.instance)).await.unwrap().len(), 2);
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 2 * names.len());
}
