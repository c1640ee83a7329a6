//! Cluster metrics: equal on every instance, right, and bounded in number.

use std::collections::BTreeMap;

use rm_client::ResourceRequest;
use rm_model::{hold::NewHold, operation::LockKey};

use crate::{
    harness::*,
    metrics::{promtool, scrape},
};

/// The series of the cluster, without wait times, which grow.
async fn of_cluster(rm: &Instance) -> BTreeMap<String, f64> {
    let ours = ["linkis_rm_cluster_", "linkis_rm_scope_", "linkis_rm_audit_", "linkis_rm_usage_"];
    let seen = scrape(rm.http).await;
    seen.into_iter().filter(|(series, _)| ours.iter().any(|family| series.starts_with(family))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_metrics_are_equal_on_every_instance() {
    let (_database, first, second) = two().await;
    let (em1, drained) = (em("host1"), em("host2"));
    first.client.register(registration(em1.clone(), load(64, 16, 20))).await.unwrap();
    first.client.register(registration(drained.clone(), load(8, 4, 2))).await.unwrap();
    first.client.set_limit(&each_user(4)).await.unwrap();
    second.client.drain(&drained, "a test").await.unwrap();
    for _ in 0..2 {
        first.client.request_resource(&request(&em1, "alice", load(1, 2, 1))).await.granted();
    }
    let used = second.client.request_resource(&request(&em1, r#"b"o\b"#, load(3, 3, 1))).await.granted();
    second.client.resource_inited(&inited(&used, r#"b"o\b"#, None)).await.unwrap();
    let patient = ResourceRequest { wait_timeout: 10 * LONG, ..request(&em1, "carol", load(1, 16, 1)) };
    let waits = {
        let client = second.client.clone();
        tokio::spawn(async move { client.request_resource(&patient).await })
    };
    let hold = NewHold { key: LockKey::User(name("dave")), duration: 10 * LONG, reason: name("a test") };
    first.client.hold(&hold).await.unwrap();

    let expected = [
        (r#"linkis_rm_cluster_cores{kind="total"}"#, 20.0),
        (r#"linkis_rm_cluster_cores{kind="locked"}"#, 4.0),
        (r#"linkis_rm_cluster_cores{kind="used"}"#, 3.0),
        (r#"linkis_rm_cluster_cores{kind="protected"}"#, 0.0),
        (r#"linkis_rm_cluster_memory_bytes{kind="total"}"#, 72.0 * GB as f64),
        (r#"linkis_rm_cluster_instances{kind="locked"}"#, 2.0),
        (r#"linkis_rm_cluster_ems{state="unreported"}"#, 1.0),
        (r#"linkis_rm_cluster_ems{state="draining"}"#, 1.0),
        (r#"linkis_rm_cluster_ems{state="silent"}"#, 0.0),
        (r#"linkis_rm_cluster_tickets{state="used"}"#, 1.0),
        (r#"linkis_rm_cluster_tickets{state="locked"}"#, 2.0),
        ("linkis_rm_cluster_waiting_requests", 1.0),
        ("linkis_rm_cluster_holds", 1.0),
        (r#"linkis_rm_scope_fullness{scope="user=alice",dimension="instances"}"#, 0.5),
        (r#"linkis_rm_scope_fullness{scope="user=b\"o\\b",dimension="instances"}"#, 0.25),
    ];
    let is_published = async |rm: &Instance| {
        let seen = of_cluster(rm).await;
        expected.iter().all(|(series, value)| seen.get(*series) == Some(value))
    };
    for rm in [&first, &second] {
        eventually(&format!("{expected:?}"), 3 * LONG, async || is_published(rm).await).await;
    }
    // Both instances publish equal figures after both have read them.
    eventually("both instances export the same", LONG, async || of_cluster(&first).await == of_cluster(&second).await)
        .await;
    let seen = of_cluster(&first).await;
    assert!(seen["linkis_rm_cluster_waiting_oldest_seconds"] < 600.0, "{seen:?}");
    let is_rolled_up = async || of_cluster(&first).await["linkis_rm_usage_rolled_up_timestamp_seconds"] > 0.0;
    eventually("use is rolled up", LONG, is_rolled_up).await;
    promtool(first.http).await;
    waits.abort();
    first.stop().await;
    second.stop().await;
}

/// Only the fullest scopes have series.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_metrics_list_only_fullest_scopes() {
    let em1 = em("host1");
    let (_database, rm) = start_with_em(em1.clone(), load(640, 160, 200)).await;
    rm.client.set_limit(&each_user(4)).await.unwrap();
    for n in 0..70 {
        rm.client.request_resource(&request(&em1, &format!("user{n}"), load(1, 1, 1))).await.granted();
    }
    rm.client.request_resource(&request(&em1, "user69", load(1, 1, 1))).await.granted();
    let got = async || {
        let seen = of_cluster(&rm).await;
        let scopes: Vec<_> =
            seen.into_iter().filter(|(series, _)| series.starts_with("linkis_rm_scope_fullness")).collect();
        scopes
    };
    let fullest = r#"linkis_rm_scope_fullness{scope="user=user69",dimension="instances"}"#;
    eventually("the fullest scopes are exported", LONG, async || {
        let got = got().await;
        got.len() == 50 && got.iter().any(|(series, share)| series == fullest && *share == 0.5)
    })
    .await;
    rm.stop().await;
}

/// One audit for all instances, an hour after the last one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_metrics_show_audit_and_repair() {
    let (database, rm) = start_with_host1().await;
    rm.client.request_resource(&request(&em("host1"), "alice", load(1, 1, 1))).await.granted();
    assert!(rm.client.audit().await.unwrap().differences.is_empty());
    let figure = "SELECT count(*) FROM linkis_rm_cluster_figure WHERE name = 'audit' AND work_time > now() - interval '1 minute'";
    assert_eq!(database.count(figure).await, 1, "the audit of an operator is exported");
    rm.stop().await;
    // A counter is changed by SQL, and an hour passes.
    let by_hand = r#"UPDATE linkis_em_resource_meta_data SET version = version + 1,
            locked_resource = jsonb_set(locked_resource, '{cores}', '2');
        UPDATE linkis_rm_cluster_figure SET work_time = work_time - interval '1 hour' WHERE name = 'audit'"#;
    database.execute(by_hand).await;
    // The first audit of an instance comes sooner than the next one.
    let both = [Instance::start(&database).await, Instance::start(&database).await];
    let differences = async |rm: &Instance| of_cluster(rm).await.get("linkis_rm_audit_differences").copied();
    for rm in &both {
        eventually("it is found", LONG, async || differences(rm).await.is_some_and(|count| count > 0.0)).await;
    }
    both[0].client.repair().await.unwrap();
    for rm in &both {
        eventually("nothing differs any more", LONG, async || differences(rm).await == Some(0.0)).await;
    }
    for rm in both {
        rm.stop().await;
    }
}
