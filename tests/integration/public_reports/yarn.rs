//! Queues of YARN: spellings of amounts, absent queues, partitions, bursts between two snapshots.

use std::{collections::BTreeMap, time::Duration};

use axum::{Router, extract::Path, http::StatusCode, response::IntoResponse, routing::get};
use linkis_rm::{
    client::{ResourceRequest, ResultResource, RmClient},
    domain::{
        name::Labels,
        resource::{LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
    },
    transport::proto,
};
use tokio::task::JoinSet;
use tonic::Code;

use super::{Case, Wrong, case};
use crate::{
    external::{client_of, provider, put, serve},
    harness::*,
};

const SOON: Duration = Duration::from_secs(20);

/// Replies of one cluster to requests for a queue.
#[derive(Debug, PartialEq)]
struct Right {
    /// GiB and cores that GetQueue shows as left, or its code.
    left: Result<[i64; 2], Code>,
    /// Number of grants of four concurrent requests.
    granted: usize,
}

const fn left(gib: i64, cores: i64, granted: usize) -> Right {
    Right { left: Ok([gib, cores]), granted }
}

const fn error(code: Code) -> Right {
    Right { left: Err(code), granted: 0 }
}

/// The queue, GiB and cores of each of four requests, and the reply of the scheduler.
type Input = (&'static str, i64, Scheduler);

#[derive(Debug, Clone, Copy)]
enum Scheduler {
    /// Capacity scheduler with 100 GiB and 100 cores: further keys of `default`, which may have 60 %.
    Capacity(&'static str),
    /// Capacity scheduler: the partitions of `default`.
    Partitions(&'static str),
    /// Fair scheduler with 100 GiB and 100 cores: the keys of `root.a`.
    Fair(&'static str),
}

impl Scheduler {
    fn json(self) -> String {
        let (kind, inside) = match self {
            Self::Capacity(keys) => {
                ("capacityScheduler", format!(r#""absoluteCapacity": 60.0, "absoluteMaxCapacity": 60.0{keys}"#))
            }
            Self::Partitions(partitions) => (
                "capacityScheduler",
                format!(
                    r#""absoluteCapacity": 60.0, "absoluteMaxCapacity": 60.0, "resourcesUsed": {{"memory": 0, "vCores": 0}},
                        "capacities": {{"queueCapacitiesByPartition": [{partitions}]}}"#
                ),
            ),
            Self::Fair(keys) => {
                let queue = format!(r#"{{"queueName": "root.a", {keys}}}"#);
                let root = format!(
                    r#"{{"queueName": "root", "maxResources": {{"memory": 102400, "vCores": 100}},
                        "usedResources": {{"memory": 0, "vCores": 0}}, "childQueues": {{"queue": [{queue}]}}}}"#
                );
                return format!(
                    r#"{{"scheduler": {{"schedulerInfo": {{"type": "fairScheduler", "rootQueue": {root}}}}}}}"#
                );
            }
        };
        format!(
            r#"{{"scheduler": {{"schedulerInfo": {{"type": "{kind}", "queueName": "root", "queues": {{"queue": [
                {{"queueName": "default", "state": "RUNNING", {inside}}}]}}}}}}}}"#
        )
    }
}

const SPELLINGS: &str = "capacity-scheduler and fair-scheduler replies of several releases";

const CASES: &[Case<Input, Right>] = &[
    case(
        "apache/linkis#704, #175",
        "a queue is absent",
        ("ide1", 1, Scheduler::Capacity(r#", "resourcesUsed": {"memory": 0, "vCores": 0}"#)),
        error(Code::NotFound),
    ),
    case(
        "apache/hadoop FairScheduler samples (2147483647)",
        "an unlimited maximum overflows",
        (
            "root.a",
            20,
            Scheduler::Fair(
                r#""maxResources": {"memory": 2147483647, "vCores": 2147483647}, "usedResources": {"memory": 0, "vCores": 0}"#,
            ),
        ),
        left(100, 100, 4),
    ),
    case(
        "apache/hadoop FairScheduler samples (2147483647)",
        "an unlimited maximum overflows",
        (
            "root.a",
            20,
            Scheduler::Fair(
                r#""maxResources": {"memory": 9223372036854775807, "vCores": 2147483647}, "usedResources": {"memory": 0, "vCores": 0}"#,
            ),
        ),
        left(100, 100, 4),
    ),
    case(
        "YARN-11414, YARN-11965",
        "amounts of a labelled partition count for all",
        (
            "default",
            20,
            Scheduler::Partitions(
                r#"{"partitionName": "", "effectiveMinResource": {"memory": 0, "vCores": 0}, "effectiveMaxResource": {"memory": 0, "vCores": 0}},
                    {"partitionName": "GPU", "effectiveMinResource": {"memory": 102400, "vCores": 100},
                        "effectiveMaxResource": {"memory": 102400, "vCores": 100}}"#,
            ),
        ),
        left(0, 0, 0),
    ),
    case(
        "apache/linkis#1192",
        "a burst between two snapshots is granted more than is left",
        ("default", 20, Scheduler::Capacity(r#", "resourcesUsed": {"memory": 10240, "vCores": 10}"#)),
        left(50, 50, 2),
    ),
    case(
        SPELLINGS,
        "use as an object",
        ("default", 20, Scheduler::Capacity(r#", "resourcesUsed": {"memory": 61440, "vCores": 60}"#)),
        left(0, 0, 0),
    ),
    case(
        SPELLINGS,
        "use as text with a point is no use",
        ("default", 20, Scheduler::Capacity(r#", "resourcesUsed": {"memory": "61440.0", "vCores": "60.0"}"#)),
        left(0, 0, 0),
    ),
    case(
        SPELLINGS,
        "use under other keys is no use",
        ("default", 20, Scheduler::Capacity(r#", "resourcesUsed": {"memorySize": 61440, "virtualCores": 60}"#)),
        left(0, 0, 0),
    ),
    case(
        SPELLINGS,
        "null is no use",
        ("default", 20, Scheduler::Capacity(r#", "resourcesUsed": null"#)),
        error(Code::FailedPrecondition),
    ),
    case(
        SPELLINGS,
        "an empty object is no use",
        ("default", 20, Scheduler::Capacity(r#", "resourcesUsed": {}"#)),
        error(Code::FailedPrecondition),
    ),
    case(
        SPELLINGS,
        "use as a share of the cluster is no use",
        ("default", 20, Scheduler::Capacity(r#", "resourcesUsed": null, "absoluteUsedCapacity": 60.0"#)),
        left(0, 0, 0),
    ),
    case(
        SPELLINGS,
        "use as text is no use",
        ("default", 20, Scheduler::Capacity(r#", "usedResources": "<memory:61440, vCores:60>""#)),
        left(0, 0, 0),
    ),
    case(
        SPELLINGS,
        "use as text is no use",
        (
            "root.a",
            20,
            Scheduler::Fair(
                r#""maxResources": {"memory": 61440, "vCores": 60}, "usedResources": "<memory:61440, vCores:60>""#,
            ),
        ),
        left(0, 0, 0),
    ),
];

/// So much of a queue in GiB and cores, of the cluster with this label.
fn in_queue(queue: &str, amount: i64, cluster: usize) -> ResourceRequest {
    let driver = LoadInstanceAmounts { memory: 1, cores: 1, instances: 1 };
    let part = YarnAmounts {
        queue_memory: amount * GB,
        queue_cores: amount,
        queue_instances: 1,
        queue_name: queue.to_owned(),
        application_id: String::new(),
    };
    let resource = Resource::from_parts(ResourceParts::DriverAndYarn(driver, part)).unwrap();
    let labels = Labels::parse("labels", BTreeMap::from([("yarnCluster".into(), cluster.to_string())])).unwrap();
    ResourceRequest { labels, ..request(&em("host1"), "hadoop", resource) }
}

/// Makes four requests at once, and counts the grants; a refusal must name the queue.
async fn granted(client: &RmClient, (queue, amount, _): Input, cluster: usize) -> usize {
    let mut calls = JoinSet::new();
    for _ in 0..4 {
        let (client, call) = (client.clone(), in_queue(queue, amount, cluster));
        calls.spawn(async move { client.request_resource(&call).await.unwrap() });
    }
    let replies = calls.join_all().await;
    replies.iter().filter(|reply| matches!(reply, ResultResource::Available(_))).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn yarn_queues_with_odd_replies_are_never_over_granted() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let client = client_of(&rm).await;
    for (number, case) in CASES.iter().enumerate() {
        let json = case.input.2.json();
        let answer = async move |Path(what): Path<String>| match what.as_str() {
            "scheduler" => json.into_response(),
            "apps" => r#"{"apps": null}"#.into_response(),
            "metrics" => r#"{"clusterMetrics": {"totalMB": 102400, "totalVirtualCores": 100}}"#.into_response(),
            _ => StatusCode::NOT_FOUND.into_response(),
        };
        let (address, _) = serve(Router::new().route("/ws/v1/cluster/{what}", get(answer))).await;
        let config = serde_json::json!({"rmWebAddress": address, "refreshInterval": "5m", "maxAge": "10m"}).to_string();
        let labels = BTreeMap::from([("yarnCluster".into(), number.to_string())]);
        put(&client, proto::Provider { labels, ..provider(&format!("p{number}"), &config) }).await.unwrap();
    }
    let fetched = "SELECT (SELECT count(*) FROM linkis_external_cluster WHERE generation IS NOT NULL)
        + (SELECT count(*) FROM linkis_external_refresh WHERE failures > 0)";
    let all = i64::try_from(CASES.len()).unwrap();
    eventually("every cluster was asked", SOON, async || database.count(fetched).await == all).await;
    let mut wrong = Wrong::default();
    for (number, case) in CASES.iter().enumerate() {
        let selector = Some(proto::ProviderSelector { name: format!("p{number}"), ..Default::default() });
        let call = proto::GetQueueRequest { provider: selector, queue_name: case.input.0.into() };
        let queue = client.clone().get_queue(call).await;
        if let Err(status) = &queue {
            assert!(status.message().contains(case.input.0), "{}: {status}", case.source);
        }
        let left = |queue: proto::GetQueueResponse| {
            let left = queue.queue.unwrap().left.unwrap();
            [left.memory >> 30, left.cores]
        };
        let left = queue.map(|queue| left(queue.into_inner())).map_err(|status| status.code());
        let granted = granted(&rm.client, case.input, number).await;
        wrong.compare(case, Right { left, granted });
    }
    assert_invariants(&database, &rm.client).await;
    wrong.none();
}
