//! Kubernetes as an external cluster: requests in namespaces of a test server that replies as a real API server.

use std::{
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, Request, State},
    routing::get,
};
use rm_client::{ResourceRequest, ResultResource};
use rm_model::{
    external::QueueCheckBasis,
    resource::{Dimension, KubernetesAmounts, LoadInstanceAmounts, Resource, ResourceParts},
};
use rm_proto::v1::{self as proto, external_resource_service_client::ExternalResourceServiceClient as Client};
use serde_json::{Value, json};
use tonic::{Code, transport::Channel};
use tonic_types::StatusExt as _;

use crate::{
    external::{put, serve},
    harness::*,
};

const SOON: Duration = Duration::from_secs(20);

/// A quota: namespace, scopes, maximum and use, in millicores and GB.
type QuotaOf = (&'static str, &'static [&'static str], [i64; 2], [i64; 2]);

/// State of the fake cluster, with pages of two items.
#[derive(Clone, Default)]
struct Shown {
    namespaces: Vec<&'static str>,
    quotas: Vec<QuotaOf>,
    /// Name and allocatable amounts.
    nodes: Vec<(&'static str, [i64; 2])>,
    /// Node and requested amounts.
    pods: Vec<(&'static str, [i64; 2])>,
}

/// An API server.
struct Cluster {
    address: String,
    shown: Arc<Mutex<Shown>>,
    asked: Arc<AtomicUsize>,
}

type Shared = (Arc<Mutex<Shown>>, Arc<AtomicUsize>);

fn amounts([cpu, gb]: [i64; 2], prefix: &str) -> Value {
    let (cpu_name, memory_name, gpu_name) =
        (format!("{prefix}cpu"), format!("{prefix}memory"), format!("{prefix}nvidia.com/gpu"));
    json!({cpu_name: format!("{cpu}m"), memory_name: format!("{gb}Gi"), gpu_name: (gb / 4).to_string(), "pods": "10"})
}

impl Shown {
    fn list(&self, what: &str) -> (&'static str, Vec<Value>) {
        match what {
            "namespaces" => {
                let namespace = |name: &&str| json!({"metadata": {"name": name}, "status": {"phase": "Active"}});
                ("NamespaceList", self.namespaces.iter().map(namespace).collect())
            }
            "resourcequotas" => {
                let quota = |(namespace, scopes, hard, used): &QuotaOf| {
                    let (hard, used) = (amounts(*hard, "requests."), amounts(*used, "requests."));
                    json!({"metadata": {"name": "quota", "namespace": namespace}, "spec": {"hard": hard, "scopes": scopes},
                        "status": {"hard": hard, "used": used}})
                };
                ("ResourceQuotaList", self.quotas.iter().map(quota).collect())
            }
            "nodes" => {
                let node = |(name, amount): &(&str, [i64; 2])| json!({"metadata": {"name": name}, "spec": {}, "status": {"allocatable": amounts(*amount, "")}});
                ("NodeList", self.nodes.iter().map(node).collect())
            }
            _ => {
                let pod = |(node, amount): &(&str, [i64; 2])| {
                    let container = json!({"name": "c", "resources": {"requests": amounts(*amount, "")}});
                    json!({"metadata": {"name": "p"}, "spec": {"nodeName": node, "containers": [container]}})
                };
                ("PodList", self.pods.iter().map(pod).collect())
            }
        }
    }
}

async fn answer(State((shown, asked)): State<Shared>, Path(what): Path<String>, request: Request) -> String {
    asked.fetch_add(1, Ordering::SeqCst);
    let (kind, all) = shown.lock().unwrap().list(&what);
    let next = request.uri().query().and_then(|query| query.split('&').find_map(|part| part.strip_prefix("continue=")));
    let from: usize = next.map_or(0, |next| next.parse().unwrap());
    let next = if all.len() > from + 2 { (from + 2).to_string() } else { String::new() };
    let items: Vec<_> = all.into_iter().skip(from).take(2).collect();
    json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "7", "continue": next}, "items": items})
        .to_string()
}

impl Cluster {
    async fn start(shown: Shown) -> Self {
        let (shown, asked) = (Arc::new(Mutex::new(shown)), Arc::<AtomicUsize>::default());
        let router = Router::new().route("/api/v1/{what}", get(answer)).with_state((shown.clone(), asked.clone()));
        let (address, _) = serve(router).await;
        Self { address, shown, asked }
    }

    fn show(&self, change: impl FnOnce(&mut Shown)) {
        change(&mut self.shown.lock().unwrap());
    }
}

fn provider(config: String) -> proto::Provider {
    proto::Provider { resource_type: "Kubernetes".into(), name: "k8s".into(), config, ..Default::default() }
}

fn config(address: &str) -> String {
    json!({"k8sMasterUrl": address, "refreshInterval": "200ms", "maxAge": "20s"}).to_string()
}

/// Returns a resource with amounts of a namespace and a small driver.
fn of_namespace(namespace: &str, millicores: i64, gb: i64) -> Resource {
    let driver = LoadInstanceAmounts { memory: 1, cores: 1, instances: 1 };
    let part = KubernetesAmounts { memory: gb * GB, millicores, namespace: namespace.to_owned() };
    Resource::from_parts(ResourceParts::DriverAndKubernetes(driver, part)).unwrap()
}

fn in_namespace(namespace: &str, millicores: i64, gb: i64) -> ResourceRequest {
    request(&em("host1"), "hadoop", of_namespace(namespace, millicores, gb))
}

const GENERATION: &str = "SELECT coalesce(max(generation), 0) FROM linkis_external_cluster";

async fn judged(shown: Shown) -> (Database, Cluster, Instance, Instance, Client<Channel>) {
    let (database, one, two) = two().await;
    let cluster = Cluster::start(shown).await;
    one.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let client = Client::connect(one.address.clone()).await.unwrap();
    put(&client, provider(config(&cluster.address))).await.unwrap();
    eventually("a snapshot", SOON, async || database.count(GENERATION).await > 0).await;
    (database, cluster, one, two, client)
}

fn shown() -> Shown {
    Shown {
        namespaces: vec!["etl", "free", "default"],
        quotas: vec![
            ("etl", &["NotTerminating"], [10_000, 100], [500, 4]),
            ("etl", &[], [8_000, 1000], [1_000, 4]),
            ("etl", &["BestEffort"], [1, 1], [1, 1]),
            ("etl", &["Terminating"], [1, 1], [1, 1]),
        ],
        nodes: vec![("n1", [4_000, 16]), ("n2", [4_000, 16]), ("n3", [4_000, 16])],
        pods: vec![("n1", [1_000, 2]), ("n2", [1_000, 2]), ("gone", [4_000, 16])],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_burst_is_granted_within_quotas_and_nodes() {
    let (database, cluster, one, two, _client) = judged(shown()).await;
    let burst = async |ask: &ResourceRequest, requests: usize| {
        let mut calls = tokio::task::JoinSet::new();
        for number in 0..requests {
            let (client, ask) = (client(&[&one, &two][number % 2].address), ask.clone());
            calls.spawn(async move { client.request_resource(&ask).await.unwrap() });
        }
        let answers = calls.join_all().await;
        answers.into_iter().filter(|answer| matches!(answer, ResultResource::Available(_))).count()
    };
    // One quota leaves 7,000 millicores and one leaves 96 GB. Quotas for other pods are ignored.
    assert_eq!(burst(&in_namespace("etl", 1_500, 1), 12).await, 4);
    let refusal = one.client.request_resource(&in_namespace("etl", 1_500, 1)).await.refused();
    let short = &refusal.shortfalls[0];
    assert_eq!((refusal.code, short.scope.as_str()), (12_111, "provider=k8s,queue=root.etl"));
    assert_eq!(
        (short.dimension.clone(), short.requested, short.available, short.max),
        (Dimension::KubernetesMillicores, 1500, 1000, 8000)
    );
    assert!(short.rule.contains("provider k8s (Kubernetes)"), "{short:?}");
    // Two namespaces without a quota share the nodes, where grants in namespaces with a quota count, too.
    let ask = in_namespace("free", 1_000, 12);
    assert_eq!(burst(&ask, 4).await + burst(&in_namespace("default", 1_000, 12), 4).await, 3, "44 GB less 4");
    let refusal = two.client.request_resource(&ask).await.refused();
    assert_eq!((refusal.code, refusal.shortfalls[0].scope.as_str()), (12_110, "provider=k8s,queue=root"));
    assert!(!refusal.never_fits);
    assert!(one.client.request_resource(&in_namespace("free", 13_000, 1)).await.refused().never_fits);
    assert_eq!(one.client.request_resource(&in_namespace("nowhere", 1, 1)).await.refused().code, 11_006);
    assert_eq!(assert_invariants(&database, &one.client).await, 7);
    // A raised quota wakes the waiting request.
    let waits = ResourceRequest { wait_timeout: SOON, ..in_namespace("etl", 1_500, 1) };
    let (client, waits) = (client(&two.address), waits);
    let waiting = tokio::spawn(async move { client.request_resource(&waits).await });
    let sql = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("it waits", SOON, async || database.count(sql).await == 1).await;
    cluster.show(|shown| shown.quotas[1].2[0] = 20_000);
    let grant = waiting.await.unwrap().granted();
    let queue = grant.queue.unwrap();
    assert_eq!((queue.path.as_str(), queue.basis), ("root.etl", QueueCheckBasis::Snapshot));
    // The first of several namespaces with capacity.
    let names = vec!["etl".to_owned(), "default".to_owned(), "free".to_owned()];
    let any = ResourceRequest { queue_names: names, ..in_namespace("etl", 4_000, 1) };
    assert_eq!(one.client.request_resource(&any).await.refused().code, 12_111, "no namespace has the capacity");
    let any = ResourceRequest { resource: of_namespace("etl", 1_500, 1), ..any };
    assert_eq!(one.client.request_resource(&any).await.granted().queue.unwrap().path, "root.etl");
    assert_eq!(assert_invariants(&database, &one.client).await, 9);
    assert!(cluster.asked.load(Ordering::SeqCst) > 8, "in pages");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_namespaces_return_capacity_of_quotas_or_nodes() {
    let (_database, _cluster, one, _two, client) = judged(shown()).await;
    let selector = || Some(proto::ProviderSelector { resource_type: "Kubernetes".into(), ..Default::default() });
    let get = async |name: &str| {
        let call = proto::GetQueueRequest { provider: selector(), queue_name: name.into() };
        client.clone().get_queue(call).await.map(|got| got.into_inner().queue.unwrap())
    };
    let amounts = |gb: i64, millicores: i64| Some(proto::QueueAmounts { memory: gb << 30, millicores, cores: 0 });
    let etl = get("etl").await.unwrap();
    assert_eq!((etl.path.as_str(), etl.state()), ("root.etl", proto::QueueState::Running));
    assert_eq!((etl.max, etl.used, etl.left), (amounts(100, 8_000), amounts(4, 1_000), amounts(96, 7_000)));
    // GPUs: the quota that leaves least decides; otherwise the nodes do.
    let gpus = |queue: &proto::Queue| queue.custom.get("nvidia.com/gpu").map(|gpus| (gpus.max, gpus.used, gpus.left));
    assert_eq!((gpus(&etl), etl.custom.len()), (Some((25, 1, 24)), 1));
    for name in ["free", "root.default", "root"] {
        let free = get(name).await.unwrap();
        assert_eq!(
            (free.max, free.used, free.left),
            (amounts(48, 12_000), amounts(4, 2_000), amounts(44, 10_000)),
            "{name}"
        );
        assert_eq!(gpus(&free), Some((12, 0, 12)), "{name}");
    }
    let call = proto::ListQueuesRequest { provider: selector(), ..Default::default() };
    let paths = client.clone().list_queues(call).await.unwrap().into_inner().queues;
    assert_eq!(
        paths.iter().map(|queue| queue.path.as_str()).collect::<Vec<_>>(),
        ["root", "root.default", "root.etl", "root.free"]
    );
    let call = proto::ListApplicationsRequest { provider: selector(), ..Default::default() };
    assert!(client.clone().list_applications(call).await.unwrap().into_inner().applications.is_empty());
    assert_eq!(get("nowhere").await.unwrap_err().get_details_error_info().unwrap().reason, "NO_SUCH_QUEUE");
    // Requests for YARN are not affected.
    let error = client.clone().get_queue(proto::GetQueueRequest { provider: None, queue_name: "etl".into() }).await;
    assert_eq!(error.unwrap_err().get_details_error_info().unwrap().reason, "NO_SUCH_PROVIDER");
    one.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_provider_with_mistake_returns_field() {
    let (_database, rm) = start().await;
    let client = Client::connect(rm.address.clone()).await.unwrap();
    for (config, at) in [
        (json!({"k8sMasterUrl": "https://elsewhere.example.com"}), "provider.config"),
        (json!({"k8sMasterUrl": "ftp://k8s"}), "provider.config.k8sMasterUrl"),
        (json!({"k8sConfig": "relative"}), "provider.config.k8sConfig"),
        (json!({"rmWebAddress": "http://127.0.0.1"}), "provider.config.rmWebAddress"),
    ] {
        let error = put(&client, provider(config.to_string())).await.unwrap_err();
        let field = error.get_details_bad_request().unwrap().field_violations[0].field.clone();
        assert_eq!((error.code(), field.as_str()), (Code::InvalidArgument, at), "{error}");
    }
    // The files of an instance are read at each fetch.
    put(&client, provider(json!({"k8sConfig": "/etc/shadow"}).to_string())).await.unwrap();
    let selector = Some(proto::ProviderSelector { resource_type: "Kubernetes".into(), ..Default::default() });
    let call = proto::GetQueueRequest { provider: selector, queue_name: "etl".into() };
    let error = client.clone().get_queue(call).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(
        error.message().contains("the cluster of /etc/shadow cannot be reached: its kubeconfig has no such context"),
        "{error}"
    );
    // Until then, the policy of the provider decides.
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    assert_eq!(rm.client.request_resource(&in_namespace("etl", 1, 1)).await.refused().code, 11_006);
}

/// One request uses a namespace with a client certificate, another a queue with a password. The trace log contains neither secret,
/// nor the replies of a cluster that refuses them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_log_of_queue_requests_shows_no_secret() {
    const SECRET: &str = "gr8-s3cret";
    let (database, cluster, yarn) = (
        Database::fresh().await,
        Cluster::start(shown()).await,
        crate::external::Yarn::start(crate::external::FAIR).await,
    );
    let lines = Arc::<Mutex<Vec<String>>>::default();
    let log = lines.clone();
    let mut command = Command::new("env");
    command.args(["RUST_LOG=trace", *PROGRAM, "--database-url", &database.url(), "--external-hosts", "127.0.0.1"]);
    let rm = Process::start_command(command.args(["--http-listen", ""]), move |line| log.lock().unwrap().push(line));
    let client = Client::connect(rm.address.clone()).await.unwrap();
    let folder = scratch("kubernetes-secrets");
    remove_at_end(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let kubeconfig = folder.join("config");
    let server = cluster.address.replace("http:", "https:");
    let own = rcgen::generate_simple_self_signed(["linkis".to_owned()]).unwrap();
    let (certificate, key) = (own.cert.pem(), own.signing_key.serialize_pem());
    std::fs::write(
        &kubeconfig,
        format!(
            "current-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: '{server}'}}}}]\nusers: [{{name: u, user: {{token: {SECRET}}}}}]\n"
        ),
    )
    .unwrap();
    let named = |name: &str, config: Value| proto::Provider {
        name: name.into(),
        labels: [("cluster".to_owned(), name.to_owned())].into(),
        ..provider(config.to_string())
    };
    put(&client, provider(config(&cluster.address))).await.unwrap();
    put(&client, named("token", json!({"k8sConfig": kubeconfig}))).await.unwrap();
    let with_key = json!({"k8sMasterUrl": server, "k8sClientCertData": certificate, "k8sClientKeyData": key});
    put(&client, named("certificate", with_key.clone())).await.unwrap();
    let mut wrong = with_key;
    wrong["x"] = 1.into();
    put(&client, named("wrong", wrong)).await.unwrap_err();
    let login = json!({"rmWebAddress": yarn.address, "authorEnable": true, "user": "hadoop", "pwd": SECRET});
    put(&client, crate::external::provider("default", &login.to_string())).await.unwrap();
    rm.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let all = "SELECT count(*) FROM linkis_external_cluster WHERE generation IS NOT NULL";
    eventually("both are known", SOON, async || database.count(all).await == 2).await;
    let failed = "SELECT count(*) FROM linkis_external_refresh WHERE failures > 0";
    eventually("both others were asked", SOON, async || database.count(failed).await == 2).await;
    // One ticket in each, from request to release.
    let driver = LoadInstanceAmounts { memory: 1, cores: 1, instances: 1 };
    let part = rm_model::resource::YarnAmounts {
        queue_memory: GB,
        queue_cores: 1,
        queue_name: "eng.etl".into(),
        ..Default::default()
    };
    let in_queue =
        request(&em("host1"), "hadoop", Resource::from_parts(ResourceParts::DriverAndYarn(driver, part)).unwrap());
    for ask in [in_queue, in_namespace("etl", 1000, 1)] {
        rm.client.dry_run(&ask).await.granted();
        let grant = rm.client.request_resource(&ask).await.granted();
        assert!(grant.queue.is_some());
        rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        let too_much = ResourceRequest { wait_timeout: Duration::from_millis(200), ..ask };
        let resource = too_much.resource.multiply_by(30.0).unwrap();
        rm.client.request_resource(&ResourceRequest { resource, ..too_much }).await.refused();
    }
    let got = format!("{:?}", client.clone().list_providers(proto::ListProvidersRequest {}).await.unwrap());
    assert_eq!(rm.terminate(), Some(0));
    let lines = lines.lock().unwrap().clone();
    assert!(lines.iter().any(|line| line.contains("TRACE")) && lines.len() > 100);
    let key_line = key.lines().nth(1).unwrap();
    let secrets = [SECRET, "aGFkb29wOmdyOC1zM2NyZXQ=", key_line];
    let of_bytes = format!("{:?}", SECRET.as_bytes());
    let mentions = |text: &str| {
        secrets.iter().any(|secret| text.contains(secret)) || text.contains(&of_bytes[1..of_bytes.len() - 1])
    };
    let shown_in: Vec<_> = lines.iter().filter(|line| mentions(line)).collect();
    assert!(shown_in.is_empty() && !mentions(&got), "{shown_in:?} {got}");
    let history = "SELECT count(*) FROM linkis_resource_action_record r WHERE r::text LIKE '%gr8-s3cret%'";
    assert_eq!(database.count(history).await, 0);
}
