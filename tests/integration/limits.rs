//! Limits over all EMs and through all instances.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rm_client::{ResourceRequest, ResultResource};
use rm_model::{
    em::EmInstance,
    name::Labels,
    policy::{Check, Policy},
    resource::{Dimension, Resource},
};
use rm_proto::page::PageRequest;
use rm_proto::v1::{self as proto, limit_service_client::LimitServiceClient, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::harness::*;

async fn register(rm: &Instance, hosts: usize) {
    register_hosts(&rm.client, 0..hosts, load(1000, 1000, 1000)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_limit_on_two_instances_counts_exactly() {
    let (database, first, second) = two().await;
    register(&first, 5).await;
    first.client.set_limit(&limit(&[("user", Some("hadoop"))], &[(Dimension::Instances, 10)])).await.unwrap();
    let mut calls = JoinSet::new();
    for n in 0..200 {
        let client = [&first, &second][n % 2].client.clone();
        calls.spawn(async move {
            let em1 = em(&format!("host{}", n % 5));
            let answer = client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.unwrap();
            matches!(answer, ResultResource::Available(_))
        });
    }
    let granted = calls.join_all().await.into_iter().filter(|granted| *granted).count();
    assert_eq!(granted, 10);
    assert_eq!(assert_invariants(&database, &first.client).await, 10);
    first.client.request_resource(&request(&em("host0"), "alice", load(1, 1, 1))).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_refusal_returns_scope_rule_and_linkis_text() {
    let (database, rm) = start().await;
    register(&rm, 1).await;
    let rules = [
        limit(&[("user", None)], &[(Dimension::Instances, 1)]),
        limit(&[("user", None), ("creator", Some("IDE"))], &[(Dimension::Memory, 4 * GB), (Dimension::Cores, 2)]),
    ];
    for rule in &rules {
        assert!(rm.client.set_limit(rule).await.unwrap().is_empty());
    }
    assert_eq!(rm.client.limits().await.unwrap(), rules);
    rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.granted();

    let refusal = rm.client.request_resource(&request(&em("host0"), "hadoop", load(5, 1, 1))).await.refused();
    assert_eq!((refusal.code, refusal.never_fits), (12006, true));
    assert_eq!(
        refusal.reason,
        "Insufficient number of instances, idle engines can be killed use Instance, requestResource : 1 > \
         availableResource : 0,  maxResource : 1."
    );
    let got: Vec<_> = refusal
        .shortfalls
        .iter()
        .map(|s| (s.scope.as_str(), s.dimension.name(), s.requested, s.available, s.max, s.rule.as_str()))
        .collect();
    assert_eq!(
        got,
        [
            ("user=hadoop", "instances", 1, 0, 1, "each user: at most 1 instances"),
            (
                "creator=IDE,user=hadoop",
                "memory",
                5 * GB,
                3 * GB,
                4 * GB,
                "creator=IDE,each user: at most 4294967296 memory, 2 cores"
            )
        ]
    );
    let dry = rm.client.dry_run(&request(&em("host0"), "hadoop", load(5, 1, 1))).await.refused();
    assert_eq!(dry, refusal);
    // Others have their own.
    rm.client.request_resource(&request(&em("host0"), "alice", load(4, 2, 1))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_over_live_tickets_counts_their_sum() {
    let (database, rm) = start().await;
    register(&rm, 2).await;
    let mut grants = Vec::new();
    for n in 0..6 {
        let grant = rm.client.request_resource(&request(&em(&format!("host{}", n % 2)), "hadoop", load(1, 1, 1))).await;
        grants.push(grant.granted());
    }
    for grant in &grants[..3] {
        rm.client.resource_inited(&inited(grant, "hadoop", None)).await.unwrap();
    }
    // A limit below the use: the reply names the scope, and nothing is granted until the scope drains.
    let over = rm.client.set_limit(&limit(&[("user", None)], &[(Dimension::Instances, 4)])).await.unwrap();
    assert_eq!(over.len(), 1);
    assert_eq!(over[0].usage.used.get(&Dimension::Instances), 3);
    assert_eq!(over[0].usage.locked.get(&Dimension::Instances), 3);
    let tickets = rm.client.tickets(None).await.unwrap();
    for scope in rm.client.scopes().await.unwrap() {
        assert_scope_equals_tickets(&scope, &tickets);
    }
    for grant in &grants[..2] {
        let refusal = rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.refused();
        assert!(refusal.shortfalls[0].available <= 0, "{refusal:?}");
        rm.client.resource_released(&release(grant, "hadoop")).await.unwrap();
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 4);
    rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.refused();
    rm.client.resource_released(&release(&grants[5], "hadoop")).await.unwrap();
    rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.granted();

    // Without a limit nothing is counted; a new limit counts all tickets.
    rm.client.delete_limit(&limit(&[("user", None)], &[]).pattern).await.unwrap();
    assert_eq!(rm.client.scopes().await.unwrap().len(), 0);
    rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.granted();
    rm.client.unregister(&em("host1")).await.unwrap();
    rm.client.set_limit(&limit(&[("user", None)], &[(Dimension::Instances, 100)])).await.unwrap();
    assert_invariants(&database, &rm.client).await;
}

/// Changes of limits beside grants and releases, through two instances, leave every counter right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_changes_under_load_keep_counters() {
    let (database, first, second) = two().await;
    register(&first, 4).await;
    let (stop, grants) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut callers = JoinSet::new();
    for n in 0..40usize {
        let (client, stop, grants) = ([&first, &second][n % 2].client.clone(), stop.clone(), grants.clone());
        callers.spawn(async move {
            let user = format!("user{}", n % 5);
            let mut turn = n;
            while !stop.load(Ordering::Relaxed) {
                turn += 1;
                let asked = request(&em(&format!("host{}", turn % 4)), &user, load(1, 1, 1));
                let Ok(ResultResource::Available(grant)) = client.request_resource(&asked).await else { continue };
                let granted = grants.fetch_add(1, Ordering::Relaxed);
                if turn % 3 == 0 {
                    client.resource_inited(&inited(&grant, &user, None)).await.unwrap();
                }
                // Few tickets stay, so that they never reach a limit.
                if turn % 7 != 0 || granted > 500 {
                    client.resource_released(&release(&grant, &user)).await.unwrap();
                }
            }
        });
    }
    let more = async || {
        let before = grants.load(Ordering::Relaxed);
        eventually("more grants", LONG, async || grants.load(Ordering::Relaxed) >= before + 20).await;
    };
    for round in 0..6 {
        let max = [(Dimension::Instances, 200 + round)];
        first.client.set_limit(&limit(&[("user", None)], &max)).await.unwrap();
        second.client.set_limit(&limit(&[("creator", Some("IDE")), ("user", None)], &max)).await.unwrap();
        more().await;
        second.client.delete_limit(&limit(&[("user", None)], &[]).pattern).await.unwrap();
        first.client.set_limit(&limit(&[("user", Some("user1"))], &[(Dimension::Cores, 20)])).await.unwrap();
        more().await;
        first.client.delete_limit(&limit(&[("user", Some("user1"))], &[]).pattern).await.unwrap();
    }
    first.client.set_limit(&limit(&[("user", None)], &[(Dimension::Instances, 1_000_000)])).await.unwrap();
    more().await;
    stop.store(true, Ordering::Relaxed);
    callers.join_all().await;
    second
        .client
        .set_limit(&limit(&[("creator", Some("IDE")), ("user", None)], &[(Dimension::Cores, 1_000_000)]))
        .await
        .unwrap();
    assert_eq!(first.client.scopes().await.unwrap().len(), 10);
    assert!(assert_invariants(&database, &first.client).await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_by_any_label_counts_custom_dimension() {
    let (database, rm) = start().await;
    let em1 = em("gpu-host");
    let gpus = |milli: i64| Resource::special(BTreeMap::from([("gpu_milli".into(), milli)])).unwrap();
    rm.client.register(registration(em1.clone(), gpus(8000))).await.unwrap();
    let gpu = Dimension::parse_key("special.gpu_milli").unwrap();
    rm.client.set_limit(&limit(&[("tenant", Some("a,b-c"))], &[(gpu, 1500)])).await.unwrap();
    let ask = |tenant: &str, milli| {
        let labels = Labels::parse("labels", BTreeMap::from([("tenant".into(), tenant.into())])).unwrap();
        rm_client::ResourceRequest { labels, ..request(&em1, "hadoop", gpus(milli)) }
    };
    rm.client.request_resource(&ask("a,b-c", 1000)).await.granted();
    let refusal = rm.client.request_resource(&ask("a,b-c", 1000)).await.refused();
    assert_eq!((refusal.code, refusal.shortfalls[0].scope.as_str()), (110_022, "tenant=a,b-c"));
    rm.client.request_resource(&ask("a,b-c", 500)).await.granted();
    rm.client.request_resource(&ask("other", 4000)).await.granted();
    rm.client.request_resource(&request(&em1, "hadoop", gpus(1000))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 4);
}

/// Maxima as text with a unit, beside maxima as numbers or alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_with_size_text_stores_bytes() {
    let (_database, rm) = start().await;
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let text = |pairs: &[(&str, &str)]| pairs.iter().map(|(key, max)| ((*key).into(), (*max).into())).collect();
    let written = proto::Limit {
        labels: text(&[("user", "hadoop")]),
        max_text: text(&[("memory", "1.5 TB"), ("cores", " 40 "), ("special.gpu", "0")]),
        ..Default::default()
    };
    let counted = proto::Limit {
        each: vec!["user".into()],
        max: BTreeMap::from([("instances".into(), 10)]),
        max_text: text(&[("memory", "20g")]),
        ..Default::default()
    };
    for limit in [&written, &counted] {
        let call = proto::SetLimitRequest { limit: Some(limit.clone()), ..Default::default() };
        limits.set_limit(call).await.unwrap();
    }
    let got = limits.list_limits(proto::ListLimitsRequest::default()).await.unwrap().into_inner().limits;
    assert!(got.iter().all(|limit| limit.max_text.is_empty()), "{got:?}");
    let max = |n: usize| got[n].max.iter().map(|(key, max)| (key.as_str(), *max)).collect::<Vec<_>>();
    assert_eq!(max(0), [("cores", 40), ("memory", 1536 * GB), ("special.gpu", 0)]);
    assert_eq!(max(1), [("instances", 10), ("memory", 20 * GB)]);
    let replace = proto::ReplaceLimitsRequest { limits: vec![written, counted], dry_run: true, ..Default::default() };
    let replaced = limits.replace_limits(replace).await.unwrap().into_inner();
    assert_eq!((replaced.added_count, replaced.changed_count, replaced.removed_count), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_limit_returns_field() {
    let (_database, rm) = start().await;
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let good = proto::Limit {
        labels: BTreeMap::from([("user".into(), "hadoop".into())]),
        max: BTreeMap::from([("instances".into(), 10)]),
        ..Default::default()
    };
    let text = |text: &str| text.to_owned();
    let written = |max: &[(&str, &str)]| proto::Limit {
        max_text: max.iter().map(|(key, size)| (text(key), text(size))).collect(),
        ..good.clone()
    };
    let cases = [
        (None, "limit"),
        (Some(proto::Limit { labels: BTreeMap::new(), ..good.clone() }), "limit.labels"),
        (Some(proto::Limit { each: (0..8).map(|n| n.to_string()).collect(), ..good.clone() }), "limit.labels"),
        (Some(proto::Limit { each: vec![text("user")], ..good.clone() }), "limit.each"),
        (Some(proto::Limit { each: vec![text("")], ..good.clone() }), "limit.each"),
        (
            Some(proto::Limit { labels: BTreeMap::from([(text("user"), text(""))]), ..good.clone() }),
            "limit.labels[\"user\"]",
        ),
        (Some(proto::Limit { max: BTreeMap::new(), ..good.clone() }), "limit.max"),
        (Some(proto::Limit { max: BTreeMap::from([(text("memry"), 1)]), ..good.clone() }), "limit.max"),
        (Some(proto::Limit { max: BTreeMap::from([(text("special."), 1)]), ..good.clone() }), "limit.max"),
        (Some(proto::Limit { max: BTreeMap::from([(text("cores"), -1)]), ..good.clone() }), "limit.max"),
        (Some(written(&[("memry", "1g")])), "limit.max_text"),
        (Some(written(&[("instances", "5")])), "limit.max_text"),
        (Some(written(&[("memory", "20x")])), "limit.max_text[\"memory\"]"),
        (Some(written(&[("memory", "-1g")])), "limit.max_text[\"memory\"]"),
        (Some(written(&[("cores", "2g")])), "limit.max_text[\"cores\"]"),
        (Some(written(&[("cores", "")])), "limit.max_text[\"cores\"]"),
        (Some(written(&[("special.gpu", "9223372036854775808")])), "limit.max_text[\"special.gpu\"]"),
    ];
    for (limit, field) in cases {
        let shown = format!("{limit:?}");
        let status = limits.set_limit(proto::SetLimitRequest { limit, ..Default::default() }).await.unwrap_err();
        let violated = status.get_details_bad_request().unwrap().field_violations.remove(0).field;
        assert_eq!((status.code(), violated.as_str()), (Code::InvalidArgument, field), "{shown}");
    }
    assert_eq!(rm.client.limits().await.unwrap(), []);
    let status =
        limits.delete_limit(proto::DeleteLimitRequest { limit: Some(good), ..Default::default() }).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    for key in ["x", "abc", "é1"] {
        for page_token in [key.to_owned(), PageRequest::new("ListScopes", 1, &()).unwrap().token(key)] {
            let call = proto::ListScopesRequest { page_token, ..Default::default() };
            assert_eq!(usage.list_scopes(call).await.unwrap_err().code(), Code::InvalidArgument, "{key}");
        }
    }
}

/// The limits of the file replace all others. A file with mistakes changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_file_replaces_all_limits() {
    let (database, rm) = start().await;
    rm.client.set_limit(&limit(&[("tenant", None)], &[(Dimension::Cores, 1)])).await.unwrap();
    let folder = scratch("limits");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("limits.toml");
    let arguments = ["--database-url", &database.url(), "--limits", file.to_str().unwrap()];

    std::fs::write(&file, "[[limit]]\neach = [\"user\"]\nmax = { memry = 1 }\n\n[[limit]]\nmax = { cores = -1 }\n")
        .unwrap();
    let refused = std::process::Command::new(*PROGRAM).args(arguments).output().unwrap();
    assert_eq!(refused.status.code(), Some(64));
    let got = String::from_utf8_lossy(&refused.stderr).into_owned();
    for mistake in ["line 3: max", "memry", "line 5: labels", "line 6: max"] {
        assert!(got.contains(mistake), "{mistake} in {got}");
    }
    assert_eq!(rm.client.limits().await.unwrap().len(), 1);

    let wanted = [
        limit(&[("user", None)], &[(Dimension::Instances, 10)]),
        limit(&[("user", Some("hadoop")), ("creator", Some("IDE"))], &[(Dimension::Memory, 20 * GB)]),
    ];
    std::fs::write(
        &file,
        "[[limit]]\neach = [\"user\"]\nmax = { instances = 10 }\n\n[[limit]]\n\
         labels = { user = \"hadoop\", creator = \"IDE\" }\nmax = { memory = \"20g\" }\n",
    )
    .unwrap();
    let process = Process::start(&arguments);
    assert_eq!(rm.client.limits().await.unwrap(), wanted);
    assert_eq!(process.terminate(), Some(0));
    std::fs::remove_dir_all(folder).unwrap();
}

/// A change of limits delays calls of every kind, and fails none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_change_delays_calls_without_failure() {
    let (database, rm) = start().await;
    register(&rm, 2).await;
    let seen = rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.granted();
    let mut changing = database.transaction("LOCK TABLE linkis_resource_limit_version IN ACCESS EXCLUSIVE MODE").await;
    let mut calls = JoinSet::new();
    for n in 0..60 {
        let client = rm.client.clone();
        calls.spawn(async move {
            // On a known EM, and on an EM that must be read first.
            let em1 = em(&format!("host{}", n % 2));
            client.request_resource(&request(&em1, &format!("user{n}"), load(1, 1, 1))).await.granted();
        });
    }
    let (client, released) = (rm.client.clone(), release(&seen, "hadoop"));
    calls.spawn(async move { client.resource_released(&released).await.unwrap() });
    eventually("the calls wait", LONG, async || rm.metric("linkis_rm_calls") == 61.0 && is_waiting(&database).await)
        .await;
    assert!(calls.try_join_next().is_none());
    execute(&mut changing, "ROLLBACK").await;
    tokio::time::timeout(LONG, calls.join_all()).await.expect("all calls end");
    assert_eq!(rm.metric("linkis_rm_contentions_total"), 0.0, "no call was contended");
    assert_eq!(assert_invariants(&database, &rm.client).await, 60);
}

/// A limit that is lowered during a grant by the old one takes effect after the grant, and counts it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_change_follows_running_grant() {
    let (database, rm) = start().await;
    let granter = Process::start(&["--database-url", &database.url()]);
    register(&rm, 1).await;
    rm.client.set_limit(&each_user(2)).await.unwrap();
    let asked = request(&em("host0"), "hadoop", load(1, 1, 1));
    granter.client.request_resource(&asked).await.granted();
    // The next grant has read the limits and waits to write its ticket; then its instance freezes before the commit.
    let mut holding = database.transaction("LOCK TABLE linkis_user_resource_meta_data IN EXCLUSIVE MODE").await;
    let client = granter.client.clone();
    let granting = tokio::spawn(async move { client.request_resource(&asked).await.unwrap() });
    let writes = async || locked_out(&database, "-- settlement::write").await > 0;
    eventually("the grant writes its ticket", LONG, writes).await;
    granter.freeze(true);
    execute(&mut holding, "ROLLBACK").await;
    let client = rm.client.clone();
    let setting = tokio::spawn(async move { client.set_limit(&each_user(1)).await.unwrap() });
    eventually("the limit waits, or is set", LONG, || async {
        let waiting =
            "SELECT count(*) FROM pg_locks WHERE relation = 'linkis_resource_limit_version'::regclass AND NOT granted";
        setting.is_finished() || database.count(waiting).await > 0
    })
    .await;
    granter.freeze(false);
    let (granted, over) = (granting.await.unwrap(), setting.await.unwrap());
    // A grant that was not committed in time is decided by the new limit.
    let is_granted = matches!(granted, ResultResource::Available(_));
    assert_eq!(over.len(), usize::from(is_granted), "granted: {is_granted}, over the limit: {over:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policy_selects_limits_by_em_application() {
    let (_database, rm, second) = two().await;
    let session = EmInstance::parse("em", "session-manager", "host1:1").unwrap();
    register(&rm, 1).await;
    rm.client.register(registration(session.clone(), load(1000, 1000, 1000))).await.unwrap();
    let kinds = ["linkis-cg-engineconnmanager", "session-manager"].map(name);
    assert_eq!(rm.client.policies().await.unwrap(), kinds.clone().map(|kind| (kind, Policy::default())).into());
    rm.client.set_limit(&limit(&[("user", None)], &[(Dimension::Instances, 2)])).await.unwrap();
    rm.client.set_limit(&limit(&[("user", None), ("creator", None)], &[(Dimension::Instances, 3)])).await.unwrap();
    let on_session = request(&session, "hadoop", load(1, 1, 1));
    let grant = rm.client.request_resource(&on_session).await.granted();
    rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.granted();
    rm.client.request_resource(&on_session).await.refused();

    // Every instance applies the policy immediately, to live and to new tickets.
    rm.client.set_policy(&kinds[1], &Policy::new([Check::Labels])).await.unwrap();
    assert_eq!(second.client.policies().await.unwrap()[&kinds[1]], Policy::new([Check::Labels]));
    let held = async |scope: &str| {
        let scopes = second.client.scopes().await.unwrap();
        let found = scopes.iter().find(|usage| usage.scope.to_string() == scope);
        found.map_or(0, |usage| usage.usage.locked.get(&Dimension::Instances))
    };
    assert_eq!((held("user=hadoop").await, held("creator=IDE,user=hadoop").await), (1, 2));
    second.client.request_resource(&on_session).await.granted();
    let refusal = second.client.request_resource(&on_session).await.refused();
    assert_eq!(refusal.shortfalls[0].scope, "creator=IDE,user=hadoop");
    second.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.refused();
    second.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    second.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!((held("user=hadoop").await, held("creator=IDE,user=hadoop").await), (2, 3));

    // The capacity of the EM is checked by every policy.
    rm.client.set_policy(&kinds[1], &Policy::new([])).await.unwrap();
    assert_eq!((held("user=hadoop").await, held("creator=IDE,user=hadoop").await), (2, 2));
    rm.client.request_resource(&request(&session, "hadoop", load(1, 1, 998))).await.granted();
    assert!(rm.client.request_resource(&request(&session, "hadoop", load(1, 1, 2))).await.refused().is_of_em_alone());

    rm.client.set_policy(&kinds[1], &Policy::default()).await.unwrap();
    let over: Vec<_> = rm.client.scopes().await.unwrap().into_iter().filter(|scope| scope.is_over()).collect();
    assert_eq!(over.len(), 2, "live tickets keep what they hold");
    for scope in &over {
        assert_scope_equals_tickets(scope, &rm.client.tickets(None).await.unwrap());
    }

    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let policy = |em_application_name: &str, check| proto::Policy {
        em_application_name: em_application_name.into(),
        checks: vec![check],
        ..Default::default()
    };
    for (policy, field) in [
        (None, "policy"),
        (Some(policy("", 1)), "policy.em_application_name"),
        (Some(policy("ecm", 0)), "policy.checks"),
        (Some(policy("ecm", 4)), "policy.checks"),
    ] {
        let status = limits.set_policy(proto::SetPolicyRequest { policy }).await.unwrap_err();
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
    }
    // New EMs: 60 s if unset; 0, or 1 s to 1 day.
    let new_after = |seconds, nanos| proto::Policy {
        em_new_after: Some(prost_types::Duration { seconds, nanos }),
        ..policy("ecm", 1)
    };
    for (seconds, nanos) in [(-1, 0), (0, 1), (0, 999_999_999), (86_400, 1), (i64::MAX, 0)] {
        let policy = Some(new_after(seconds, nanos));
        let status = limits.set_policy(proto::SetPolicyRequest { policy }).await.unwrap_err();
        let field = &status.get_details_bad_request().unwrap().field_violations[0].field;
        assert_eq!((status.code(), field.as_str()), (Code::InvalidArgument, "policy.em_new_after"));
    }
    let stored = async || rm.client.policies().await.unwrap()[&kinds[1]].em_new_after();
    assert_eq!(stored().await, Duration::from_secs(60));
    for (seconds, nanos) in [(0, 0), (1, 0), (2, 500_000_000), (86_400, 0)] {
        let policy = Some(proto::Policy { em_application_name: kinds[1].to_string(), ..new_after(seconds, nanos) });
        limits.set_policy(proto::SetPolicyRequest { policy }).await.unwrap();
        assert_eq!(stored().await, Duration::new(seconds.unsigned_abs(), nanos.unsigned_abs()));
    }
    assert_eq!(rm.client.policies().await.unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_shows_limits_in_force() {
    let (_database, rm) = start().await;
    let each_user = limit(&[("user", None)], &[(Dimension::Instances, 3)]);
    // Without tickets the limit decides immediately; with tickets, after they are counted.
    rm.client.set_limit(&each_user).await.unwrap();
    rm.client.delete_limit(&each_user.pattern).await.unwrap();
    register(&rm, 1).await;
    rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.granted();
    rm.client.set_limit(&each_user).await.unwrap();
    rm.client.request_resource(&request(&em("host0"), "hadoop", load(1, 1, 1))).await.granted();
    // A further limit of a counted label set decides from its history line on.
    rm.client.set_limit(&limit(&[("user", Some("hadoop"))], &[(Dimension::Instances, 2)])).await.unwrap();
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let history = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions;
    let got: Vec<_> = history.iter().map(|line| line.action.as_str()).collect();
    let of_limit = ["limit_set", "limits_in_force", "limit_deleted", "registered", "granted"];
    assert_eq!(got, [&of_limit[..], &["limit_set", "limits_in_force", "granted", "limit_set"]].concat());
    for line in history.iter().filter(|line| line.action == "limits_in_force") {
        assert_eq!((line.each.as_slice(), line.scope.len(), &line.em), (&["user".to_owned()][..], 0, &None));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_counts_request_without_labels() {
    let (database, rm) = start().await;
    register(&rm, 1).await;
    let labels = [("user", None), ("creator", None), ("engine_type", None), ("engine_family", None), ("tenant", None)];
    rm.client.set_limit(&limit(&labels, &[(Dimension::Instances, 1)])).await.unwrap();
    rm.client.set_limit(&limit(&[("tenant", Some("a"))], &[(Dimension::Instances, 0)])).await.unwrap();
    let silent = ResourceRequest { engine_type: String::new(), ..request(&em("host0"), "hadoop", load(1, 1, 1)) };
    rm.client.request_resource(&silent).await.granted();
    let refusal = rm.client.request_resource(&silent).await.refused();
    assert_eq!(refusal.shortfalls[0].scope, "creator=IDE,engine_family=,engine_type=,tenant=,user=hadoop");
    // A request with more labels has another scope, and a value matches only requests that have it.
    let spark = ResourceRequest { engine_type: "spark".to_owned(), ..silent.clone() };
    rm.client.request_resource(&spark).await.granted();
    let tenant = Labels::parse("labels", BTreeMap::from([("tenant".to_owned(), "a".to_owned())])).unwrap();
    let refusal = rm.client.request_resource(&ResourceRequest { labels: tenant, ..silent }).await.refused();
    assert_eq!(refusal.shortfalls[0].scope, "tenant=a");
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_by_derived_labels_counts_em_and_family() {
    let (database, rm) = start().await;
    register(&rm, 3).await;
    rm.client.set_limit(&limit(&[("engine_family", None)], &[(Dimension::Instances, 2)])).await.unwrap();
    let em_of_kind =
        [("em_application", Some(em("any").application_name.to_string())), ("em", Some("host2:9102".to_owned()))];
    let em_of_kind = em_of_kind.each_ref().map(|(key, value)| (*key, value.as_deref()));
    rm.client.set_limit(&limit(&em_of_kind, &[(Dimension::Instances, 1)])).await.unwrap();
    let on = |host: &str, engine_type: &str| ResourceRequest {
        engine_type: engine_type.to_owned(),
        ..request(&em(host), "hadoop", load(1, 1, 1))
    };
    rm.client.request_resource(&on("host0", "spark-3.2.1")).await.granted();
    rm.client.request_resource(&on("host1", "spark-2.4.3")).await.granted();
    let refusal = rm.client.request_resource(&on("host0", "spark")).await.refused();
    assert_eq!(refusal.shortfalls[0].scope, "engine_family=spark");
    rm.client.request_resource(&on("host0", "hive-2.3.3")).await.granted();
    rm.client.request_resource(&on("host2", "flink-1.17")).await.granted();
    let refusal = rm.client.request_resource(&on("host2", "flink-1.17")).await.refused();
    assert!(refusal.shortfalls[0].scope.starts_with("em=host2:9102,em_application="), "{refusal:?}");
    // A request cannot set a label that is derived.
    for key in ["em", "queue", "namespace"] {
        let labels = Labels::parse("labels", BTreeMap::from([(key.to_owned(), "host0".to_owned())])).unwrap();
        let error = rm.client.request_resource(&ResourceRequest { labels, ..on("host2", "") }).await.unwrap_err();
        assert_eq!(error.field().as_deref(), Some("labels"));
        assert!(error.code() == Some(Code::InvalidArgument) && error.to_string().contains(key), "{error}");
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 4);
    assert_eq!(rm.client.audit().await.unwrap().differences.count, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn label_sets_above_32_are_refused() {
    let (_database, rm) = start().await;
    let of = |n: usize, value| limit(&[(format!("label{n}").as_str(), value)], &[(Dimension::Instances, 1)]);
    for n in 0..32 {
        rm.client.set_limit(&of(n, None)).await.unwrap();
    }
    let error = rm.client.set_limit(&of(32, None)).await.unwrap_err();
    assert_eq!(
        (error.code(), error.reason().as_deref()),
        (Some(Code::FailedPrecondition), Some("TOO_MANY_LABEL_SETS"))
    );
    assert_eq!(rm.client.limits().await.unwrap().len(), 32);
    // Another limit of an existing label set is accepted, and the end of one label set permits a new one.
    rm.client.set_limit(&of(0, Some("a"))).await.unwrap();
    rm.client.delete_limit(&of(1, None).pattern).await.unwrap();
    rm.client.set_limit(&of(32, None)).await.unwrap();
}

/// Label values that contain separators are not joined: each pair of user and creator has its own scope.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_on_joined_labels_counts_each_pair() {
    let (database, rm) = start_with_host1().await;
    for pairs in [[("a,creator=b", "c", 1), ("a", "b,creator=c", 3)], [("svc-etl", "IDE", 2), ("svc", "etl-IDE", 3)]] {
        for (user, creator, instances) in pairs {
            let labels = [("user", Some(user)), ("creator", Some(creator))];
            rm.client.set_limit(&limit(&labels, &[(Dimension::Instances, instances)])).await.unwrap();
        }
        for (user, creator, instances) in pairs {
            let mut granted = 0;
            for _ in 0..3 {
                let call = ResourceRequest { creator: name(creator), ..request(&em("host1"), user, load(1, 1, 1)) };
                let reply = rm.client.request_resource(&call).await.unwrap();
                granted += i64::from(matches!(reply, ResultResource::Available(_)));
            }
            assert_eq!(granted, instances, "{user} {creator}");
        }
    }
    assert_invariants(&database, &rm.client).await;
}
