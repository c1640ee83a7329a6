//! Objects in the forms of the Kubernetes documentation.

use serde_json::{Value, json};

use super::*;

fn kept<T: ListItem>(items: Value) -> Result<Vec<T::Kept>, KubernetesParseError> {
    let list = json!({"kind": T::KIND, "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items});
    page::<T>(list.to_string().as_bytes()).map(|page| page.items)
}

fn amounts(memory: i64, cores: i64) -> QueueAmounts {
    QueueAmounts { memory, cores }
}

fn quota(spec: Value, status: Value) -> Option<Quota> {
    let quota =
        json!({"metadata": {"name": "q", "namespace": "etl", "managedFields": [{}]}, "spec": spec, "status": status});
    kept::<ResourceQuota>(json!([quota])).unwrap().pop()
}

#[test]
fn list_page_returns_token_of_next_page() {
    let list = |metadata: Value| json!({"kind": "PodList", "metadata": metadata, "items": null}).to_string();
    let next = |metadata| page::<Pod>(list(metadata).as_bytes()).unwrap().next;
    assert_eq!(next(json!({"continue": "abc", "remainingItemCount": 7})).as_deref(), Some("abc"));
    assert_eq!([next(json!({"continue": ""})), next(json!({})), next(json!(null))], [None, None, None]);
    let long = list(json!({"continue": "x".repeat(10_000)}));
    assert!(matches!(page::<Pod>(long.as_bytes()), Err(KubernetesParseError::Malformed { .. })));
}

#[test]
fn list_of_other_kind_is_refused_with_cause() {
    for (json, expected) in [
        ("<html>", "is not a PodList in JSON: it is invalid at line 1, column 1"),
        (r#"{"kind": "PodList", "items": ["#, "is not a PodList in JSON: it is truncated at line 1, column 30"),
        ("{}", "is not a PodList"),
        (r#"{"kind": "Status", "status": "Failure", "message": "gr8-s3cret"}"#, "is not a PodList"),
        (r#"{"kind": "NodeList", "items": []}"#, "is not a PodList"),
        (
            r#"{"kind": "PodList", "items": [{"spec": {"containers": [{"resources": {"requests": {"cpu": "gr8-s3cret"}}}]}}]}"#,
            "cannot be parsed: an amount is malformed",
        ),
    ] {
        assert_eq!(page::<Pod>(json.as_bytes()).unwrap_err().to_string(), expected, "{json}");
    }
}

#[test]
fn namespace_names_are_checked_and_terminating_is_flagged() {
    let all = json!([
        {"metadata": {"name": "etl"}, "status": {"phase": "Active"}},
        {"metadata": {"name": "old", "deletionTimestamp": "2026-11-22T20:00:00Z"}, "status": {"phase": "Terminating"}},
    ]);
    assert_eq!(kept::<Namespace>(all).unwrap(), [("etl".into(), false), ("old".into(), true)]);
    for name in [json!(""), json!(null), json!("a.b"), json!("x".repeat(64)), json!("a\u{7}")] {
        assert!(kept::<Namespace>(json!([{"metadata": {"name": name}}])).is_err(), "{name}");
    }
}

#[test]
fn quota_requests_precede_bare_names() {
    let hard = json!({"cpu": "9", "requests.cpu": "4", "memory": "9Gi", "limits.memory": "1Gi", "pods": "5", "requests.nvidia.com/gpu": "2"});
    let used = json!({"cpu": "8", "requests.cpu": "1500m", "memory": "1073741825"});
    let read = quota(json!({"hard": hard}), json!({"hard": hard, "used": used})).unwrap();
    assert_eq!(read.cores, Some(QuotaLimit { max: 4000, used: 1500 }));
    assert_eq!(read.memory, Some(QuotaLimit { max: 9 << 30, used: (1 << 30) + 1 }));
    // The hard limits of the status take precedence.
    let read =
        quota(json!({"hard": {"memory": "2Gi"}}), json!({"hard": {"memory": "1Gi"}, "used": {"memory": "0"}})).unwrap();
    assert_eq!((read.memory, read.cores), (Some(QuotaLimit { max: 1 << 30, used: 0 }), None));
    let new = quota(json!({"hard": {"cpu": "1"}}), json!({})).unwrap();
    assert_eq!(new.cores, Some(QuotaLimit { max: 1000, used: 1000 }), "a quota without a status is used up");
    assert_eq!(quota(json!({"hard": {"pods": "1", "limits.cpu": "1"}}), json!({})), None);
}

#[test]
fn quota_with_scopes_of_other_pods_is_ignored() {
    let with = |more: Value| {
        let mut spec = json!({"hard": {"cpu": "1"}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        quota(spec, json!({})).is_some()
    };
    for (scopes, applies) in [
        (json!([]), true),
        (json!(["NotTerminating"]), true),
        (json!(["NotBestEffort"]), true),
        (json!(["NotBestEffort", "NotTerminating"]), true),
        (json!(["Terminating"]), false),
        (json!(["BestEffort"]), false),
        (json!(["NotTerminating", "BestEffort"]), false),
        (json!(["PriorityClass"]), false),
        (json!(["CrossNamespacePodAffinity"]), false),
        (json!(["OfALaterRelease"]), false),
    ] {
        assert_eq!(with(json!({"scopes": scopes})), applies, "{scopes}");
    }
    for (scope, operator, applies) in [
        ("PriorityClass", "In", false),
        ("PriorityClass", "Exists", false),
        ("PriorityClass", "NotIn", true),
        ("PriorityClass", "DoesNotExist", true),
        ("NotTerminating", "Exists", true),
        ("Terminating", "Exists", false),
        ("NotBestEffort", "OfALaterRelease", false),
    ] {
        let expression = json!({"scopeName": scope, "operator": operator, "values": ["high"]});
        assert_eq!(with(json!({"scopeSelector": {"matchExpressions": [expression]}})), applies, "{scope} {operator}");
    }
    assert!(with(json!({"scopeSelector": {}, "scopes": null})));
}

#[test]
fn nodes_that_accept_no_pods_are_ignored() {
    let node = |name: &str, spec: Value| {
        json!({"metadata": {"name": name}, "spec": spec,
            "status": {"capacity": {"cpu": "8", "memory": "64Gi"}, "allocatable": {"cpu": "7910m", "memory": "62Gi", "pods": "110"}}})
    };
    let all = json!([
        node("n1", json!({})),
        node("cordoned", json!({"unschedulable": true})),
        node("master", json!({"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]})),
        node("away", json!({"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]})),
        node("n2", json!({"taints": [{"key": "x", "effect": "PreferNoSchedule"}], "unschedulable": false})),
    ]);
    let each = amounts(62 << 30, 7910);
    let each = PodRequests { amounts: each, ..PodRequests::default() };
    assert_eq!(kept::<Node>(all).unwrap(), [("n1".into(), each.clone()), ("n2".into(), each)]);
    let new = kept::<Node>(json!([{"metadata": {"name": "new"}}])).unwrap();
    assert_eq!(new, [("new".into(), PodRequests::default())]);
}

#[test]
fn pod_requests_are_summed_like_scheduler_does() {
    let of = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": "64"}});
    let pod = |spec: Value| {
        let mut all = json!({"nodeName": "n1"});
        all.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        kept::<Pod>(json!([{"metadata": {"name": "p"}, "spec": all, "status": {"phase": "Running"}}])).unwrap().pop()
    };
    let asks = |spec: Value| pod(spec).unwrap().1.amounts;
    let two = json!([{"resources": of("1", "1Ki")}, {"resources": of("500m", "1Ki")}, {}]);
    assert_eq!(asks(json!({"containers": two})), amounts(2048, 1500));
    let begins = json!([{"resources": of("4", "1Ki")}, {"resources": of("1", "100")}]);
    assert_eq!(asks(json!({"containers": two, "initContainers": begins})), amounts(2048, 4000), "one after another");
    let sidecar = json!([{"resources": of("1", "1Ki"), "restartPolicy": "Always"}, {"resources": of("1", "4Ki")}]);
    assert_eq!(asks(json!({"containers": two, "initContainers": sidecar})), amounts(5120, 2500), "a sidecar stays");
    let whole = json!({"containers": two, "resources": {"requests": {"memory": "8Ki"}}, "overhead": {"cpu": "250m", "memory": "1Ki"}});
    assert_eq!(asks(whole), amounts(9216, 1750));
    assert_eq!(asks(json!({"containers": [{}]})), amounts(0, 0));
    let waits = kept::<Pod>(json!([{"spec": {"containers": two}}, {}])).unwrap();
    assert!(waits.is_empty(), "an unscheduled pod uses no node");
}

/// Names in a domain other than Kubernetes's own are extended resources.
#[test]
fn extended_resources_of_quotas_nodes_and_pods_are_parsed() {
    let of = |amounts: &ExtendedResources| {
        amounts.iter().map(|(name, amount)| format!("{name}={amount}")).collect::<Vec<_>>()
    };
    let hard = json!({"requests.nvidia.com/gpu": "4", "nvidia.com/gpu": "9", "example.com/fpga": "2", "limits.cpu": "1",
        "requests.storage": "1Gi", "gold.storageclass.storage.k8s.io/requests.storage": "1Gi", "count/pods": "3", "hugepages-2Mi": "1Gi"});
    let read = quota(json!({"hard": hard}), json!({"hard": hard, "used": {"requests.nvidia.com/gpu": "1"}})).unwrap();
    let expected = |name: &str| read.extended.get(name).map(|limit| (limit.max, limit.used));
    assert_eq!((expected("nvidia.com/gpu"), expected("example.com/fpga")), (Some((4, 1)), Some((2, 2))), "{read:?}");
    assert_eq!((read.memory, read.cores), (None, None));
    let allocatable =
        json!({"cpu": "8", "nvidia.com/gpu": "8", "kubernetes.io/batch-cpu": "1", "hugepages-1Gi": "0", "pods": "110"});
    let node = json!([{"metadata": {"name": "n1"}, "status": {"allocatable": allocatable}}]);
    assert_eq!(of(&kept::<Node>(node).unwrap()[0].1.extended), ["nvidia.com/gpu=8"]);
    let gpus = |count: &str| json!({"resources": {"requests": {"nvidia.com/gpu": count}, "limits": {"nvidia.com/gpu": count}}});
    let pod = |begins: &str| {
        let spec =
            json!({"nodeName": "n1", "containers": [gpus("1"), gpus("2"), {}], "initContainers": [gpus(begins)]});
        kept::<Pod>(json!([{"spec": spec}]))
    };
    assert_eq!(of(&pod("1").unwrap()[0].1.extended), ["nvidia.com/gpu=3"]);
    assert_eq!(of(&pod("5").unwrap()[0].1.extended), ["nvidia.com/gpu=5"]);
    for wrong in ["some", "", "1Q"] {
        assert_eq!(
            pod(wrong).unwrap_err(),
            KubernetesParseError::Malformed { what: "an amount" },
            "a malformed amount is an error"
        );
    }
    // The first 64 by name are kept; names too long for a custom dimension are dropped.
    let many = |from: usize| {
        (from..from + 80).map(|n| (format!("example.com/{n}"), json!("1"))).collect::<serde_json::Map<_, _>>()
    };
    let mut hard = many(10);
    hard.insert(format!("example.com/{}", "0".repeat(255)), json!("1"));
    let names: Vec<_> = quota(json!({"hard": hard}), json!({})).unwrap().extended.into_keys().collect();
    assert_eq!((names.len(), &*names[0], &*names[63]), (64, "example.com/10", "example.com/73"));
    let node = json!([{"metadata": {"name": "n1"}, "status": {"allocatable": many(10)}}]);
    assert_eq!(kept::<Node>(node).unwrap()[0].1.extended.len(), 64);
}

#[test]
fn list_page_above_maximum_is_refused() {
    let namespace = r#"{"metadata": {"name": "etl"}}"#;
    let list = |count| {
        let namespaces = vec![namespace; count].join(",");
        page::<Namespace>(format!(r#"{{"kind": "NamespaceList", "items": [{namespaces}]}}"#).as_bytes())
    };
    assert_eq!(list(Namespace::MOST).unwrap().items.len(), Namespace::MOST);
    assert_eq!(list(Namespace::MOST + 1).unwrap_err().to_string(), "has more than 20000 namespaces");
}

#[test]
fn nested_value_in_place_of_amount_fails() {
    for none in [json!([[0], 1]), json!({"a": {}}), json!(null), json!(true)] {
        let node = json!({"metadata": {"name": "n1"}, "status": {"allocatable": {"special.io/gpu": none}}});
        assert_eq!(kept::<Node>(json!([node])), Err(KubernetesParseError::Malformed { what: "an amount" }));
    }
}

#[test]
fn quota_object_counts_are_left_out() {
    let hard = json!({"requests.memory": "4Gi", "requests.cpu": "4", "count/pods": "8", "count/deployments.apps": "2",
        "gold.storageclass.storage.k8s.io/requests.storage": "1Gi",
        "gold.storageclass.storage.k8s.io/persistentvolumeclaims": "2", "gpu.deviceclass.resource.k8s.io/devices": "3",
        "limits.nvidia.com/gpu": "1", "example.com/count": "7"});
    let read = quota(json!({"hard": hard}), json!({"hard": hard, "used": hard})).unwrap();
    assert_eq!(read.extended.keys().map(|name| &**name).collect::<Vec<_>>(), ["example.com/count"]);
    assert_eq!(
        quota(json!({"hard": {"count/pods": "8"}}), json!({})),
        None,
        "object counts are not amounts of engines"
    );
}

#[test]
fn node_without_ready_condition_true_has_no_capacity() {
    let node = |conditions: Value| {
        let node = json!({"metadata": {"name": "n1"}, "spec": {},
            "status": {"allocatable": {"cpu": "8", "memory": "1Gi"}, "conditions": conditions}});
        kept::<Node>(json!([node])).unwrap().len()
    };
    let ready =
        |status: Value| json!([{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": status}]);
    assert_eq!([node(ready(json!("True"))), node(json!([])), node(json!(null))], [1, 1, 1]);
    assert_eq!([node(ready(json!("False"))), node(ready(json!("Unknown"))), node(ready(json!(null)))], [0, 0, 0]);
}

#[test]
fn kubernetes_amount_null_fails() {
    for key in ["cpu", "memory"] {
        let node = json!([{"metadata": {"name": "n1"}, "status": {"allocatable": {key: null}}}]);
        assert_eq!(kept::<Node>(node), Err(KubernetesParseError::Malformed { what: "an amount" }), "{key}");
        let requests = json!({"requests": {key: null}});
        let pod = json!([{"spec": {"nodeName": "n1", "containers": [{"resources": requests}]}}]);
        assert_eq!(kept::<Pod>(pod), Err(KubernetesParseError::Malformed { what: "an amount" }), "{key}");
    }
}
