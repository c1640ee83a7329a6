//! Amounts: sizes as text, documents of Linkis's tables, negative numbers.

use std::collections::BTreeMap;

use linkis_rm::{
    domain::resource::Dimension,
    transport::proto::{
        self, limit_service_client::LimitServiceClient, resource::Kind,
        resource_manager_service_client::ResourceManagerServiceClient,
    },
};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::{Case, Wrong, case};
use crate::harness::*;

/// Name of the field that an INVALID_ARGUMENT names; other errors panic.
fn field(status: &Status) -> String {
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    status.get_details_bad_request().unwrap().field_violations[0].field.clone()
}

const SIZE_FIELD: &str = r#"limit.max_text["memory"]"#;
const UNIT: &str = "G is 10^9 in one place and 2^30 in another";

/// `max_text` of memory, and the bytes of the limit.
const SIZES: [Case<&str, Result<i64, &str>>; 8] = [
    case("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", UNIT, "20g", Ok(20 << 30)),
    case("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", UNIT, "20GB", Ok(20 << 30)),
    case("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", UNIT, "6144m", Ok(6 << 30)),
    case("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", UNIT, "1.5g", Ok(3 << 29)),
    case("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", UNIT, "20Gi", Err(SIZE_FIELD)),
    case("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", "a size overflows", "9999999999g", Err(SIZE_FIELD)),
    case("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", "a size is negative", "-1g", Err(SIZE_FIELD)),
    case("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", "a size is empty", "", Err(SIZE_FIELD)),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_with_written_sizes_use_binary_units() {
    let (_database, rm) = start().await;
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut wrong = Wrong::default();
    for case in &SIZES {
        let limit = proto::Limit {
            labels: BTreeMap::from([("user".into(), "alice".into())]),
            max_text: BTreeMap::from([("memory".into(), case.input.into())]),
            ..Default::default()
        };
        let call = proto::SetLimitRequest { limit: Some(limit), expected_etag: None };
        let set = limits.set_limit(call).await;
        let stored = rm.client.limits().await.unwrap();
        let result = set.map(|_| stored[0].max[&Dimension::Memory]).map_err(|status| field(&status));
        wrong.compare(case, result.as_ref().map(|bytes| *bytes).map_err(String::as_str));
    }
    wrong.none();
}

const DUMP: &str = "apache/linkis table dump of 2022";

/// Type and document, and the memory that is granted or the field that is wrong.
const DOCUMENTS: [Case<[&str; 2], Result<i64, &str>>; 7] = [
    case(
        DUMP,
        "instances is called instance",
        ["LoadInstance", r#"{"instance": 1, "memory": 1073741824, "cores": 1}"#],
        Ok(1 << 30),
    ),
    case(
        DUMP,
        "a document stands under its class name",
        [
            "DriverAndYarn",
            r#"{"DriverAndYarnResource": {"loadInstanceResource": {"memory": 2147483648, "cores": 1, "instances": 1},
                "yarnResource": {"queueName": "default", "queueMemory": 0, "queueCores": 0, "queueInstances": 0, "applicationId": ""}}}"#,
        ],
        Ok(2 << 30),
    ),
    case(
        DUMP,
        "memory is text",
        ["LoadInstance", r#"{"memory": "1073741824", "cores": 1, "instances": 1}"#],
        Err("memory"),
    ),
    case(
        DUMP,
        "memory is a real number",
        ["LoadInstance", r#"{"memory": 1.07E9, "cores": 1, "instances": 1}"#],
        Err("memory"),
    ),
    case(
        DUMP,
        "memory overflows",
        ["LoadInstance", r#"{"memory": 9223372036854775808, "cores": 1, "instances": 1}"#],
        Err("memory"),
    ),
    case(
        DUMP,
        "memory stands twice",
        ["LoadInstance", r#"{"memory": 1073741824, "memory": 1, "cores": 1, "instances": 1}"#],
        Err("memory"),
    ),
    case(
        DUMP,
        "memory has a unit",
        ["LoadInstance", r#"{"memory": "1024m", "cores": 1, "instances": 1}"#],
        Err("memory"),
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn linkis_documents_with_old_spellings_are_read() {
    let (database, rm) = start_with_host1().await;
    let mut manager = ResourceManagerServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut wrong = Wrong::default();
    let mut before = 0;
    for case in &DOCUMENTS {
        let reply = manager.request_resource(document(case.input)).await;
        let locked = rm.client.em(&em("host1")).await.unwrap().locked.get(&Dimension::Memory);
        let result = match reply {
            Ok(_) => Ok(locked - before),
            Err(status) => {
                assert_eq!((field(&status).as_str(), locked), ("resource.json.document", before), "{status}");
                Err(if status.message().contains("memory") { "memory" } else { "another field" })
            }
        };
        before = locked;
        wrong.compare(case, result);
    }
    assert_invariants(&database, &rm.client).await;
    wrong.none();
}

fn document([resource_type, document]: [&str; 2]) -> proto::RequestResourceRequest {
    let json = proto::LinkisJson { resource_type: resource_type.into(), document: document.into() };
    request_of(Kind::Json(json))
}

fn host1() -> Option<proto::EmInstance> {
    let host = em("host1");
    Some(proto::EmInstance { application_name: host.application_name.to_string(), instance: host.instance.to_string() })
}

fn request_of(kind: Kind) -> proto::RequestResourceRequest {
    proto::RequestResourceRequest {
        em: host1(),
        user: "alice".into(),
        creator: "IDE".into(),
        resource: Some(proto::Resource { kind: Some(kind) }),
        ..Default::default()
    }
}

/// A call with a negative amount.
#[derive(Debug)]
enum Negative {
    RequestMemory,
    RequestCores,
    RequestSpecial,
    RequestDocument,
    SetLimit,
    Inited,
}

const CREDIT: &str = "a negative amount makes credit";

/// Calls with a negative amount, and the field that is wrong.
const NEGATIVES: [Case<Negative, &str>; 6] = [
    case("kubernetes-sigs/kueue#12838", CREDIT, Negative::RequestMemory, "resource"),
    case("kubernetes-sigs/kueue#12838", CREDIT, Negative::RequestCores, "resource"),
    case("Project-HAMi/HAMi PR 1966", CREDIT, Negative::RequestSpecial, "resource"),
    case("Project-HAMi/HAMi PR 1966", CREDIT, Negative::RequestDocument, "resource.json.document"),
    case("kubernetes-sigs/kueue PR 13391", CREDIT, Negative::SetLimit, "limit.max"),
    case("kubernetes-sigs/kueue PR 13391", CREDIT, Negative::Inited, "used"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn negative_amounts_in_calls_change_nothing() {
    let (database, rm) = start_with_host1().await;
    let mut manager = ResourceManagerServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let grant = rm.client.request_resource(&request(&em("host1"), "alice", load(1, 1, 1))).await.granted();
    let before = (rm.client.ems().await.unwrap(), rm.client.tickets(None).await.unwrap());
    let mut wrong = Wrong::default();
    for case in &NEGATIVES {
        let load = |memory, cores| Kind::LoadInstance(proto::LoadInstanceResource { memory, cores, instances: 1 });
        let mut request = async |call| manager.request_resource(call).await.map(drop);
        let reply = match case.input {
            Negative::RequestMemory => request(request_of(load(-GB, 1))).await,
            Negative::RequestCores => request(request_of(load(GB, -1))).await,
            Negative::RequestSpecial => {
                let resources = BTreeMap::from([("gpu".to_owned(), -1)]);
                request(request_of(Kind::Special(proto::SpecialResource { resources }))).await
            }
            Negative::RequestDocument => {
                request(document(["LoadInstance", r#"{"memory": -1073741824, "cores": 1, "instances": 1}"#])).await
            }
            Negative::SetLimit => {
                let limit = proto::Limit {
                    labels: BTreeMap::from([("user".into(), "alice".into())]),
                    max: BTreeMap::from([("cores".into(), -5)]),
                    ..Default::default()
                };
                let call = proto::SetLimitRequest { limit: Some(limit), expected_etag: None };
                limits.set_limit(call).await.map(drop)
            }
            Negative::Inited => {
                let call = proto::ResourceInitedRequest {
                    ticket_id: grant.ticket_id.to_string(),
                    user: "alice".into(),
                    em: host1(),
                    used: Some(proto::Resource { kind: Some(load(GB, -5)) }),
                    engine: Some(proto::EngineInstance {
                        application_name: "engine".into(),
                        instance: "host1:1".into(),
                    }),
                    ..Default::default()
                };
                manager.resource_inited(call).await.map(drop)
            }
        };
        wrong.compare(case, field(&reply.unwrap_err()).as_str());
    }
    assert_eq!(before, (rm.client.ems().await.unwrap(), rm.client.tickets(None).await.unwrap()));
    assert_eq!(rm.client.limits().await.unwrap(), []);
    assert_invariants(&database, &rm.client).await;
    wrong.none();
}
