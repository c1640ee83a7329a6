//! Quotas of Kubernetes: quantities, scopes, negative use, extended resources.

use std::collections::BTreeMap;

use axum::{Router, extract::Path, routing::get};
use linkis_rm::transport::proto;
use serde_json::{Value, json};

use super::{Case, Wrong, case};
use crate::{
    external::{client_of, put, serve},
    harness::*,
};

/// A ResourceQuota: its scope, `hard` and `used` of each resource.
type Quota = (&'static str, &'static [[&'static str; 3]]);

/// A resource, and how much of it is left.
type Left = (&'static str, Option<i64>);

const QUANTITY: &str = "a quantity is read in another unit";

/// Quotas of one namespace, and what GetQueue shows as left of the named resource.
const CASES: &[Case<&[Quota], Left>] = &[
    case("kubernetes/kubernetes#21654", QUANTITY, &[("", &[["memory", "129e6", "0"]])], ("memory", Some(129_000_000))),
    case(
        "kubernetes/kubernetes#21654",
        QUANTITY,
        &[("", &[["memory", "128974848000m", "0"]])],
        ("memory", Some(128_974_848)),
    ),
    case("kubernetes/kubernetes#21654", QUANTITY, &[("", &[["memory", "123Mi", "0"]])], ("memory", Some(128_974_848))),
    case(
        "DataDog/integrations-core PR 17280",
        QUANTITY,
        &[("", &[["memory", "4.1Gi", "0"]])],
        ("memory", Some(4_402_341_478)),
    ),
    case("kubernetes/apimachinery#72", QUANTITY, &[("", &[["memory", "1E3", "0"]])], ("memory", Some(1000))),
    case("kubernetes/apimachinery#72", QUANTITY, &[("", &[["cpu", "940k", "0"]])], ("millicores", Some(940_000_000))),
    case(
        "aptakube/aptakube#465",
        "a quota of an extended resource is not read",
        &[("", &[["requests.example.com/gpu-memory", "430Gi", "0"], ["requests.nvidia.com/gpu", "660k", "0"]])],
        ("example.com/gpu-memory", Some(461_708_984_320)),
    ),
    case(
        "aptakube/aptakube#465",
        "a quota of an extended resource is not read",
        &[("", &[["requests.example.com/gpu-memory", "430Gi", "0"], ["requests.nvidia.com/gpu", "660k", "0"]])],
        ("nvidia.com/gpu", Some(660_000)),
    ),
    case(
        "kubernetes/kubernetes PR 30396",
        "negative use makes credit",
        &[("", &[["requests.memory", "4Gi", "-4Gi"]])],
        ("memory", Some(4 << 30)),
    ),
    case(
        "kubernetes/kubernetes PR 30396",
        "negative use makes credit",
        &[("", &[["requests.cpu", "4", "-1"]])],
        ("millicores", Some(4000)),
    ),
    case(
        "kubernetes/kubernetes#117663",
        "a count of objects is an extended resource",
        &[("", &[["requests.memory", "4Gi", "0"], ["requests.cpu", "4", "0"], ["count/pods", "8", "8"]])],
        ("count/pods", None),
    ),
    case(
        "kubernetes/kubernetes#138148",
        "a quota of other pods decides",
        &[("Terminating", &[["memory", "1Gi", "0"]]), ("NotBestEffort", &[["memory", "8Gi", "0"]])],
        ("memory", Some(8 << 30)),
    ),
];

/// The quotas of all cases, each in a namespace of its own.
fn quotas() -> Vec<Value> {
    let of_case = |(number, case): (usize, &Case<&[Quota], _>)| {
        let quota = move |(scope, resources): &Quota| {
            let of = |column: usize| -> BTreeMap<&str, &str> {
                resources.iter().map(|resource| (resource[0], resource[column])).collect()
            };
            let scopes: Vec<_> = Some(*scope).filter(|scope| !scope.is_empty()).into_iter().collect();
            json!({"metadata": {"name": "quota", "namespace": format!("case{number}")},
                "spec": {"hard": of(1), "scopes": scopes}, "status": {"hard": of(1), "used": of(2)}})
        };
        case.input.iter().map(quota).collect::<Vec<_>>()
    };
    CASES.iter().enumerate().flat_map(of_case).collect()
}

async fn list(Path(what): Path<String>) -> String {
    let (kind, items) = match what.as_str() {
        "namespaces" => {
            let namespace =
                |number| json!({"metadata": {"name": format!("case{number}")}, "status": {"phase": "Active"}});
            ("NamespaceList", (0..CASES.len()).map(namespace).collect())
        }
        "resourcequotas" => ("ResourceQuotaList", quotas()),
        "nodes" => {
            let amounts = json!({"cpu": "2000k", "memory": "8Ti"});
            ("NodeList", vec![json!({"metadata": {"name": "n1"}, "spec": {}, "status": {"allocatable": amounts}})])
        }
        _ => ("PodList", vec![]),
    };
    json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "7", "continue": ""}, "items": items})
        .to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_quotas_with_odd_quantities_are_read() {
    let (_database, rm) = start().await;
    let client = client_of(&rm).await;
    let (address, _) = serve(Router::new().route("/api/v1/{what}", get(list))).await;
    let config = json!({"k8sMasterUrl": address, "refreshInterval": "5m", "maxAge": "10m"}).to_string();
    let provider =
        proto::Provider { resource_type: "Kubernetes".into(), name: "k8s".into(), config, ..Default::default() };
    put(&client, provider).await.unwrap();
    let mut wrong = Wrong::default();
    for (number, case) in CASES.iter().enumerate() {
        let selector = Some(proto::ProviderSelector { resource_type: "Kubernetes".into(), ..Default::default() });
        let call = proto::GetQueueRequest { provider: selector, queue_name: format!("case{number}") };
        let queue = client.clone().get_queue(call).await.unwrap().into_inner().queue.unwrap();
        let resource = case.right.0;
        let left = match resource {
            "memory" => queue.left.map(|left| left.memory),
            "millicores" => queue.left.map(|left| left.millicores),
            custom => queue.custom.get(custom).map(|amounts| amounts.left),
        };
        wrong.compare(case, (resource, left));
    }
    wrong.none();
}
