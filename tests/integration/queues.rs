//! Limits of YARN queues and Kubernetes namespaces: separate counters, released at any end of a ticket.

use std::{collections::BTreeMap, time::Duration};

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    limit::Rule,
    operation::Grant,
    resource::{Dimension, KubernetesAmounts, LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
    scope::ScopeHoldings,
};
use tonic::Code;

use crate::harness::*;

const DRIVER: LoadInstanceAmounts = LoadInstanceAmounts { memory: GB, cores: 1, instances: 1 };

/// Returns a resource with a driver and `queue_cores` cores of a queue.
fn in_queue(queue: &str, queue_cores: i64) -> Resource {
    let queue = YarnAmounts { queue_name: queue.into(), queue_cores, ..YarnAmounts::default() };
    Resource::from_parts(ResourceParts::DriverAndYarn(DRIVER, queue)).unwrap()
}

fn in_namespace(namespace: &str, millicores: i64) -> Resource {
    let namespace = KubernetesAmounts { memory: 0, millicores, namespace: namespace.into() };
    Resource::from_parts(ResourceParts::DriverAndKubernetes(DRIVER, namespace)).unwrap()
}

async fn with_limits(rules: &[Rule]) -> (Database, Instance) {
    let (database, rm) = start().await;
    register_all(&rm.client, ["host1", "host2"], load(100, 100, 100)).await;
    for rule in rules {
        rm.client.set_limit(rule).await.unwrap();
    }
    (database, rm)
}

async fn grant(client: &RmClient, user: &str, resource: Resource) -> Grant {
    client.request_resource(&request(&em("host1"), user, resource)).await.granted()
}

/// Returns the scope, the dimension and the available amount of the first shortfall.
async fn short(client: &RmClient, user: &str, resource: Resource) -> (String, Dimension, i64) {
    let refusal = client.request_resource(&request(&em("host1"), user, resource)).await.refused();
    let first = refusal.shortfalls.into_iter().next().unwrap();
    (first.scope, first.dimension, first.available)
}

/// The sums of a scope.
async fn usage(client: &RmClient, scope: &str) -> ScopeHoldings {
    let scopes = client.scopes().await.unwrap();
    scopes.into_iter().find(|known| known.scope.to_string() == scope).map(|known| known.usage).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_limit_counts_each_queue_and_user() {
    let (database, rm) = with_limits(&[
        limit(&[("queue", None)], &[(Dimension::QueueCores, 10)]),
        limit(&[("queue", Some("small"))], &[(Dimension::QueueCores, 3)]),
        limit(&[("queue", None), ("user", None)], &[(Dimension::QueueCores, 6), (Dimension::Instances, 3)]),
    ])
    .await;
    grant(&rm.client, "hadoop", in_queue("a", 6)).await;
    grant(&rm.client, "hadoop", in_queue("b", 6)).await;
    let short_of = async |user, resource| short(&rm.client, user, resource).await;
    let of = |scope: &str, available| (scope.to_owned(), Dimension::QueueCores, available);
    assert_eq!(short_of("hadoop", in_queue("a", 1)).await, of("queue=a,user=hadoop", 0));
    assert_eq!(short_of("alice", in_queue("a", 5)).await, of("queue=a", 4));
    assert_eq!(short_of("alice", in_queue("small", 4)).await, of("queue=small", 3));
    grant(&rm.client, "alice", in_queue("a", 4)).await;
    // As in Linkis, an empty queue name means the queue `default`.
    grant(&rm.client, "alice", in_queue("", 6)).await;
    assert_eq!(short_of("bob", in_queue("default", 5)).await, of("queue=default", 4));
    // Queue limits do not apply to a request without a queue, also with another resource type.
    for _ in 0..5 {
        grant(&rm.client, "hadoop", load(1, 1, 1)).await;
    }
    grant(&rm.client, "hadoop", in_queue("c", 1)).await;
    let scopes: Vec<_> = rm.client.scopes().await.unwrap().into_iter().map(|scope| scope.scope.to_string()).collect();
    assert_eq!(scopes.iter().filter(|scope| scope.starts_with("queue=,")).count(), 0, "{scopes:?}");
    assert_eq!(assert_invariants(&database, &rm.client).await, 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespace_limit_counts_each_namespace() {
    let (database, rm) = with_limits(&[
        limit(&[("namespace", None)], &[(Dimension::KubernetesMillicores, 4000)]),
        limit(&[("namespace", Some("big"))], &[(Dimension::KubernetesMillicores, 8000)]),
    ])
    .await;
    grant(&rm.client, "hadoop", in_namespace("a", 4000)).await;
    grant(&rm.client, "hadoop", in_namespace("b", 4000)).await;
    grant(&rm.client, "hadoop", in_namespace("big", 5000)).await;
    grant(&rm.client, "hadoop", in_queue("a", 4000)).await;
    let got = short(&rm.client, "hadoop", in_namespace("a", 1)).await;
    assert_eq!(got, ("namespace=a".to_owned(), Dimension::KubernetesMillicores, 0));
    assert_eq!(assert_invariants(&database, &rm.client).await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_dimension_limit_requires_queue_label() {
    let (_database, rm) = with_limits(&[]).await;
    for (dimension, label) in [
        (Dimension::QueueMemory, "queue"),
        (Dimension::QueueCores, "queue"),
        (Dimension::QueueInstances, "queue"),
        (Dimension::KubernetesMemory, "namespace"),
        (Dimension::KubernetesMillicores, "namespace"),
    ] {
        let other = if label == "queue" { "namespace" } else { "queue" };
        let max = [(Dimension::Cores, 1), (dimension.clone(), 1)];
        for lacking in [limit(&[("user", None)], &max), limit(&[(other, None)], &max)] {
            let error = rm.client.set_limit(&lacking).await.unwrap_err();
            assert_eq!((error.code(), error.field().as_deref()), (Some(Code::InvalidArgument), Some("limit.max")));
            assert!(error.to_string().contains(&format!("add the label {label:?}")), "{error}");
        }
        rm.client.set_limit(&limit(&[("user", None), (label, None)], &max)).await.unwrap();
    }
}

/// Label sets without the queue leave out the amounts of queues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_counter_excludes_queue_amounts() {
    let (database, rm) = with_limits(&[limit(&[("user", None)], &[(Dimension::Cores, 50)])]).await;
    grant(&rm.client, "hadoop", in_queue("a", 6)).await;
    grant(&rm.client, "hadoop", in_queue("b", 6)).await;
    grant(&rm.client, "hadoop", in_namespace("a", 6)).await;
    let held: BTreeMap<_, _> =
        usage(&rm.client, "user=hadoop").await.locked.amounts().map(|(d, n)| (d.key(), n)).collect();
    assert_eq!(held, BTreeMap::from([("memory".into(), 3 * GB), ("cores".into(), 3), ("instances".into(), 3)]));
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}

/// The queue's counter returns to its value at any end of a ticket, and after any report.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_counter_returns_to_zero_after_any_end() {
    let (database, rm) = with_limits(&[
        limit(&[("queue", None)], &[(Dimension::QueueCores, 1000)]),
        limit(&[("queue", None), ("em", None)], &[(Dimension::QueueCores, 1000), (Dimension::Instances, 1000)]),
    ])
    .await;
    let client = &rm.client;
    let held = async || {
        let usage = usage(client, "queue=a").await;
        (usage.used.get(&Dimension::QueueCores), usage.locked.get(&Dimension::QueueCores))
    };
    // Ends by release: while locked, while used, and after lower and higher reports.
    let locked = grant(client, "hadoop", in_queue("a", 8)).await;
    let in_use = grant(client, "hadoop", in_queue("a", 8)).await;
    assert_eq!(held().await, (0, 16));
    client.resource_inited(&inited(&in_use, "hadoop", Some(in_queue("a", 5)))).await.unwrap();
    assert_eq!(held().await, (5, 8));
    client.resource_reported(&in_use.reported(name("hadoop"), in_queue("a", 9))).await.unwrap();
    assert_eq!(held().await, (9, 8));
    // A use in another queue or of another type is rejected. A use of zero in another queue is zero in the own queue.
    for other in [in_queue("b", 1), load(1, 1, 1), in_namespace("a", 1)] {
        let error = client.resource_reported(&in_use.reported(name("hadoop"), other.clone())).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("RESOURCE_NOT_PROVIDED"), "{error}");
        let error = client.resource_inited(&inited(&locked, "hadoop", Some(other))).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("RESOURCE_NOT_PROVIDED"), "{error}");
    }
    let driver_only = Resource::from_parts(ResourceParts::DriverAndYarn(DRIVER, YarnAmounts::default())).unwrap();
    client.resource_reported(&in_use.reported(name("hadoop"), driver_only.clone())).await.unwrap();
    assert_eq!(held().await, (0, 8));
    client.resource_reported(&in_use.reported(name("hadoop"), in_queue("a", 2))).await.unwrap();
    client.resource_inited(&inited(&locked, "hadoop", Some(driver_only))).await.unwrap();
    assert_eq!(held().await, (2, 0));
    assert_eq!(usage(client, "queue=default").await, ScopeHoldings::default());
    assert_invariants(&database, client).await;
    client.resource_released(&release(&in_use, "hadoop")).await.unwrap();
    client.resource_released(&release(&locked, "hadoop")).await.unwrap();
    assert_eq!(held().await, (0, 0));

    // Ends by expiry, and with the EM, locked and used.
    let brief =
        ResourceRequest { lock_ttl: Some(Duration::from_secs(1)), ..request(&em("host1"), "hadoop", in_queue("a", 8)) };
    client.request_resource(&brief).await.granted();
    assert_eq!(held().await, (0, 8));
    eventually("it expires", Duration::from_secs(20), async || held().await == (0, 0)).await;
    grant(client, "hadoop", in_queue("a", 8)).await;
    let in_use = grant(client, "hadoop", in_queue("a", 8)).await;
    client.resource_inited(&inited(&in_use, "hadoop", None)).await.unwrap();
    assert_eq!(held().await, (8, 8));
    client.unregister(&em("host1")).await.unwrap();
    assert_eq!(held().await, (0, 0));
    assert_eq!(usage(client, "em=host1:9102,queue=a").await, ScopeHoldings::default());
    assert_eq!(assert_invariants(&database, client).await, 0);
}

/// In one label set each dimension falls to the next rule that names it, always on the request's own counter, queue by queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_limit_without_dimension_falls_to_next_match() {
    let of = |user, queue, max: &[(Dimension, i64)]| limit(&[("user", user), ("queue", queue)], max);
    let (database, rm) = with_limits(&[
        of(None, None, &[(Dimension::QueueCores, 9), (Dimension::Instances, 4)]),
        of(None, Some("a"), &[(Dimension::QueueCores, 6)]),
        of(Some("hadoop"), None, &[(Dimension::QueueCores, 4)]),
        of(Some("hadoop"), Some("a"), &[(Dimension::Instances, 2)]),
    ])
    .await;
    let queue_cores = |scope: &str, max| (scope.to_owned(), Dimension::QueueCores, max);
    for (user, queue, max) in [("alice", "b", 9), ("alice", "a", 6), ("hadoop", "b", 4), ("hadoop", "a", 4)] {
        let got = short(&rm.client, user, in_queue(queue, 10)).await;
        assert_eq!(got, queue_cores(&format!("queue={queue},user={user}"), max));
    }
    for _ in 0..2 {
        grant(&rm.client, "hadoop", in_queue("a", 1)).await;
    }
    let got = short(&rm.client, "hadoop", in_queue("a", 1)).await;
    assert_eq!(got, ("queue=a,user=hadoop".to_owned(), Dimension::Instances, 0));
    grant(&rm.client, "hadoop", in_queue("b", 4)).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}

/// A release in a queue, on any EM, grants a request that waits for the queue; a release in another queue does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_release_grants_waiting_request() {
    let (database, rm) = with_limits(&[limit(&[("queue", None)], &[(Dimension::QueueCores, 10)])]).await;
    let in_a = grant(&rm.client, "hadoop", in_queue("a", 8)).await;
    let in_b = grant(&rm.client, "hadoop", in_queue("b", 8)).await;
    let call = enqueue(&rm.client, patient(&em("host2"), "alice", in_queue("a", 5))).await;
    rm.client.resource_released(&release(&in_b, "hadoop")).await.unwrap();
    assert_eq!(short(&rm.client, "bob", in_queue("a", 3)).await.0, "queue=a");
    assert_eq!(rm.client.waiting().await.unwrap().len(), 1);
    let free = async { rm.client.resource_released(&release(&in_a, "hadoop")).await.unwrap() };
    let granted = woken(&rm, call, free).await;
    assert_eq!(granted.em, em("host2"));
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}
