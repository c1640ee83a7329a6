//! Changes of limits: authors, expectations, single changes and replacements.

use std::collections::BTreeMap;

use rm_model::resource::Dimension;
use rm_proto::page::PageRequest;
use rm_proto::v1::{self as proto, limit_service_client::LimitServiceClient, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;

use crate::harness::*;

mod history;

type Limits = LimitServiceClient<Channel>;

/// Returns a limit on the instances of a user, or of each user.
fn limit(user: Option<&str>, instances: i64) -> proto::Limit {
    proto::Limit {
        labels: user.map(|user| ("user".to_owned(), user.to_owned())).into_iter().collect(),
        each: if user.is_none() { vec!["user".to_owned()] } else { vec![] },
        max: BTreeMap::from([("instances".to_owned(), instances)]),
        ..Default::default()
    }
}

/// The fields of a limit that an administrator sets.
fn as_set(limits: &[proto::Limit]) -> Vec<proto::Limit> {
    let as_set = |limit: &proto::Limit| proto::Limit {
        labels: limit.labels.clone(),
        each: limit.each.clone(),
        max: limit.max.clone(),
        ..Default::default()
    };
    limits.iter().map(as_set).collect()
}

async fn all(limits: &Limits, page_size: i32) -> Vec<proto::Limit> {
    let (mut all, mut page_token) = (Vec::new(), String::new());
    loop {
        let call = proto::ListLimitsRequest { page_size, page_token };
        let page = limits.clone().list_limits(call).await.unwrap().into_inner();
        all.extend(page.limits);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return all;
        }
    }
}

async fn set(limits: &Limits, limit: proto::Limit, expected_etag: Option<&str>) -> Result<(), Status> {
    let expected_etag = expected_etag.map(str::to_owned);
    let call = proto::SetLimitRequest { limit: Some(limit), expected_etag, ..Default::default() };
    limits.clone().set_limit(call).await.map(drop)
}

async fn delete(limits: &Limits, limit: proto::Limit, expected_etag: Option<&str>) -> Result<(), Status> {
    let call = proto::DeleteLimitRequest {
        limit: Some(limit),
        expected_etag: expected_etag.map(str::to_owned),
        ..Default::default()
    };
    limits.clone().delete_limit(call).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_are_listed_with_author_and_time() {
    let (database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let users = ["a", "b", "c", "d", "e"];
    for user in users {
        set(&limits, limit(Some(user), 1), None).await.unwrap();
    }
    set(&limits, limit(None, 2), None).await.unwrap();
    let of_creator = proto::Limit { each: vec!["creator".to_owned()], ..limit(None, 3) };
    set(&limits, of_creator.clone(), None).await.unwrap();
    let got = all(&limits, 1000).await;
    let mut expected = vec![of_creator];
    expected.extend(users.map(|user| limit(Some(user), 1)));
    expected.push(limit(None, 2));
    assert_eq!(as_set(&got), expected, "in the order in which they are checked");
    assert_eq!(got.last().unwrap().name, "each user");
    for size in 1..8 {
        assert_eq!(all(&limits, size).await, got, "in pages of {size}");
    }
    for limit in &got {
        assert_eq!(limit.updated_by, "anonymous");
        assert_eq!(limit.state(), proto::LimitState::InForce);
        let seconds = limit.update_time.unwrap().seconds;
        let now = database.count("SELECT extract(epoch FROM clock_timestamp())::bigint").await;
        assert!((now - 60..=now).contains(&seconds), "{seconds} at {now}");
    }
    // Another instance that has read the limits before returns a change immediately.
    let second = Instance::start(&database).await;
    let elsewhere = Limits::connect(second.address.clone()).await.unwrap();
    assert_eq!(all(&elsewhere, 3).await, got);
    set(&limits, limit(Some("c"), 9), None).await.unwrap();
    let token = |key| PageRequest::new("ListLimits", 1, &()).unwrap().token(key);
    let page_token = token(r#"{"user":"b"}"#);
    let call = proto::ListLimitsRequest { page_size: 1, page_token };
    let page = elsewhere.clone().list_limits(call).await.unwrap().into_inner();
    assert_eq!(as_set(&page.limits), [limit(Some("c"), 9)]);
    assert_ne!(page.limits[0].etag, got[3].etag);
    for (page_size, page_token, field) in
        [(-1, String::new(), "page_size"), (1, "x".to_owned(), "page_token"), (1, token("x"), "page_token")]
    {
        let call = proto::ListLimitsRequest { page_size, page_token };
        let status = limits.clone().list_limits(call).await.unwrap_err();
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_change_requires_current_etag() {
    let (_database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let etag = async || all(&limits, 10).await[0].etag.clone();
    let changed = |answer: Result<(), Status>| {
        let status = answer.unwrap_err();
        assert_eq!(code_and_reason(&status), (Code::Aborted, "LIMIT_CHANGED".to_owned()), "{status:?}");
        status.message().to_owned()
    };
    // An empty etag means no limit, which only the first of many concurrent calls finds.
    let mut calls = JoinSet::new();
    for n in 0..10 {
        let limits = limits.clone();
        calls.spawn(async move { set(&limits, limit(Some("hadoop"), n), Some("")).await.is_ok() });
    }
    assert_eq!(calls.join_all().await.into_iter().filter(|is_set| *is_set).count(), 1);
    let first = etag().await;
    changed(set(&limits, limit(Some("hadoop"), 20), Some("")).await);
    changed(set(&limits, limit(Some("hadoop"), 20), Some("nonsense")).await);
    set(&limits, limit(Some("hadoop"), 20), Some(&first)).await.unwrap();
    let message = changed(set(&limits, limit(Some("hadoop"), 30), Some(&first)).await);
    assert!(message.contains("user=hadoop") && message.contains("anonymous"), "{message}");
    // A repetition is a change, too.
    let second = etag().await;
    set(&limits, limit(Some("hadoop"), 20), None).await.unwrap();
    changed(delete(&limits, limit(Some("hadoop"), 0), Some(&second)).await);
    assert_eq!(as_set(&all(&limits, 10).await), [limit(Some("hadoop"), 20)]);
    let third = etag().await;
    delete(&limits, limit(Some("hadoop"), 0), Some(&third)).await.unwrap();
    let status = delete(&limits, limit(Some("hadoop"), 0), Some(&third)).await.unwrap_err();
    assert_eq!(code_and_reason(&status), (Code::NotFound, "NO_SUCH_LIMIT".to_owned()));
    let message = changed(set(&limits, limit(Some("hadoop"), 1), Some(&third)).await);
    assert!(message.contains("was deleted"), "{message}");
    assert_eq!(all(&limits, 10).await, []);
}

/// As a client after a lost reply: the first attempt took effect, and the second one finds its change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_change_repeated_after_lost_reply_is_unchanged() {
    let (database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let hadoop = |instances| limit(Some("hadoop"), instances);
    let lines = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'limit_set'";
    let mut expected = String::new();
    for (instances, times) in [(10, 1), (20, 2)] {
        set(&limits, hadoop(instances), Some(&expected)).await.unwrap();
        let set_once = all(&limits, 10).await;
        set(&limits, hadoop(instances), Some(&expected)).await.unwrap();
        assert_eq!(all(&limits, 10).await, set_once, "neither its etag nor its time");
        assert_eq!(database.count(lines).await, times);
        expected.clone_from(&set_once[0].etag);
    }
    // An equal limit of another author is not the caller's own change.
    let by_another = "UPDATE linkis_resource_limit SET updated_by = 'somebody else'";
    database.execute(by_another).await;
    let status = set(&limits, hadoop(20), Some(&expected)).await.unwrap_err();
    assert_eq!(code_and_reason(&status), (Code::Aborted, "LIMIT_CHANGED".to_owned()));
}

async fn replace(limits: &Limits, all: &[proto::Limit], dry_run: bool) -> proto::ReplaceLimitsResponse {
    let call = proto::ReplaceLimitsRequest { limits: all.to_vec(), dry_run, ..Default::default() };
    limits.clone().replace_limits(call).await.unwrap().into_inner()
}

/// Guarantees beyond the capacity are set, and named by the dry run and by the change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guarantees_above_capacity_are_named() {
    let (_database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    rm.client.register(registration(em("host1"), load(1, 10, 1))).await.unwrap();
    let guaranteed = |user: &str, cores| {
        let [max, guarantee] = [10, cores].map(|cores| BTreeMap::from([("cores".to_owned(), cores)]));
        proto::Limit { max, guarantee, ..limit(Some(user), 0) }
    };
    let excess = async |cores, dry_run| {
        let all = [guaranteed("alice", 6), guaranteed("bob", cores)];
        replace(&limits, &all, dry_run).await.guarantee_excess
    };
    let labels = vec!["user".to_owned()];
    let expected = proto::GuaranteeExcess { labels, dimension: "cores".to_owned(), guaranteed: 11, capacity: 10 };
    for dry_run in [true, false] {
        assert_eq!(excess(5, dry_run).await, std::slice::from_ref(&expected));
    }
    assert_eq!(excess(4, true).await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_replacement_equals_its_dry_run() {
    let (database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(1000, 1000, 1000))).await.unwrap();
    for user in ["alice", "bob", "bob", "carol", "carol", "carol"] {
        rm.client.request_resource(&request(&em1, user, load(1, 1, 1))).await.granted();
    }
    let before = [limit(Some("alice"), 5), limit(Some("bob"), 5), limit(None, 5)];
    for limit in before.clone() {
        set(&limits, limit, None).await.unwrap();
    }
    let got = all(&limits, 10).await;
    let of_creator = proto::Limit { each: vec!["creator".to_owned()], ..limit(None, 4) };
    let wanted = [limit(Some("bob"), 5), limit(None, 2), limit(Some("dave"), 1), of_creator.clone()];
    let over = |answer: &proto::ReplaceLimitsResponse| {
        let mut over: Vec<_> = answer.over_limit.iter().map(|scope| scope.labels.clone()).collect();
        over.sort();
        over
    };
    let labels = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);

    let dry = replace(&limits, &wanted, true).await;
    assert_eq!(all(&limits, 10).await, got, "nothing was changed");
    assert_eq!(over(&dry), [labels("user", "carol")], "as far as it is counted");
    assert!(dry.over_limit_partial && dry.state() == proto::LimitState::Counting, "{dry:?}");
    let done = replace(&limits, &wanted, false).await;
    for answer in [&dry, &done] {
        assert_eq!(as_set(&answer.added), [limit(Some("dave"), 1), of_creator.clone()]);
        assert_eq!(as_set(&answer.removed), [limit(Some("alice"), 5)]);
        let [change] = &answer.changed[..] else { panic!("{answer:?}") };
        let [from, to] = [&change.before, &change.after].map(|limit| limit.clone().unwrap());
        assert_eq!(as_set(&[from, to]), [limit(None, 5), limit(None, 2)]);
        assert_eq!((answer.added_count, answer.changed_count, answer.removed_count), (2, 1, 1));
    }
    assert_eq!(over(&done), [labels("creator", "IDE"), labels("user", "carol")], "when all is counted");
    assert_eq!((done.over_limit_count, done.over_limit_partial), (2, false));
    assert_eq!(done.state(), proto::LimitState::InForce);
    let mut now = wanted.to_vec();
    now.sort_by_key(|limit| format!("{limit:?}"));
    let mut listed = as_set(&all(&limits, 10).await);
    listed.sort_by_key(|limit| format!("{limit:?}"));
    assert_eq!(listed, now);
    // An unchanged limit is not set again.
    let of_bob =
        |limits: &[proto::Limit]| limits.iter().find(|l| l.labels == labels("user", "bob")).unwrap().etag.clone();
    assert_eq!(of_bob(&all(&limits, 10).await), of_bob(&got));
    let same = replace(&limits, &wanted, true).await;
    assert_eq!((same.added.len(), same.changed.len(), same.removed.len()), (0, 0, 0));
    assert_eq!((over(&same), same.state()), (over(&done), proto::LimitState::InForce));

    // The change is in the history and in force.
    rm.client.request_resource(&request(&em1, "erin", load(1, 1, 1))).await.refused();
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let history = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions;
    let count = |action: &str| history.iter().filter(|line| line.action == action).count();
    assert_eq!((count("limit_set"), count("limit_deleted")), (3 + 3, 1));
    let emptied = replace(&limits, &[], false).await;
    assert_eq!((emptied.removed_count, emptied.over_limit_count), (4, 0));
    assert_eq!(all(&limits, 10).await, []);
    rm.client.request_resource(&request(&em1, "erin", load(1, 1, 1))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_replacement_accepts_at_most_10000_limits() {
    let (_database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let many = |count: usize, instances| -> Vec<_> {
        (0..count).map(|n| limit(Some(&format!("user{n:05}")), instances)).collect()
    };
    let done = replace(&limits, &many(10_000, 1), false).await;
    assert_eq!((done.added_count, done.added.len()), (10_000, 1000));
    let done = replace(&limits, &many(9_000, 2), false).await;
    assert_eq!((done.changed_count, done.removed_count, done.changed.len()), (9_000, 1_000, 1000));
    assert_eq!(all(&limits, 1000).await.len(), 9_000);
    let twice = vec![limit(Some("a"), 1), limit(None, 1), limit(Some("a"), 2)];
    for (all, field) in [
        (many(10_001, 1), "limits"),
        (twice, "limits[2]"),
        (vec![limit(None, 1), proto::Limit::default()], "limits[1].labels"),
        (vec![limit(None, -1)], "limits[0].max"),
    ] {
        for dry_run in [false, true] {
            let call = proto::ReplaceLimitsRequest { limits: all.clone(), dry_run, ..Default::default() };
            let status = limits.clone().replace_limits(call).await.unwrap_err();
            assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
        }
    }
    assert_eq!(all(&limits, 1000).await.len(), 9_000);
}

/// A replacement sets the rules of the wait queues that it has, and leaves the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_replacement_sets_rules_of_wait_queues() {
    let (_database, rm) = start().await;
    let mut limits = Limits::connect(rm.address.clone()).await.unwrap();
    let each_user = || vec!["user".to_owned()];
    let order = proto::Order { fair_by: vec!["creator".to_owned()], position_kept: None };
    let priority = |default_priority| proto::Priority {
        each: each_user(),
        default_priority,
        max_priority: 60,
        ..Default::default()
    };
    let policy =
        || proto::ReclaimPolicy { each: each_user(), mode: proto::ReclaimMode::Observe.into(), ..Default::default() };
    let list = |priorities: &[proto::Priority]| Some(proto::PriorityList { priorities: priorities.to_vec() });
    let policies = |policies: &[proto::ReclaimPolicy]| Some(proto::ReclaimPolicyList { policies: policies.to_vec() });
    let first = proto::ReplaceLimitsRequest {
        order: Some(order.clone()),
        priorities: list(&[priority(30)]),
        reclaim_policies: policies(&[policy()]),
        ..Default::default()
    };
    for dry_run in [true, false] {
        let done =
            limits.replace_limits(proto::ReplaceLimitsRequest { dry_run, ..first.clone() }).await.unwrap().into_inner();
        let changed = done.order.unwrap();
        assert_eq!(
            [changed.before, changed.after].map(|order| order.unwrap().fair_by),
            [each_user(), vec!["creator".to_owned()]]
        );
        let [priority] = &done.priorities[..] else { panic!("{:?}", done.priorities) };
        assert_eq!((priority.before.is_none(), priority.after.as_ref().unwrap().default_priority), (true, 30));
        let [policy] = &done.reclaim_policies[..] else { panic!("{:?}", done.reclaim_policies) };
        assert_eq!((policy.before.is_none(), policy.after.as_ref().unwrap().per_minute), (true, 60));
        assert_eq!(rm.client.reclaim_policies().await.unwrap().len(), usize::from(!dry_run));
    }
    // What a replacement does not name stays.
    set(&limits, limit(None, 5), None).await.unwrap();
    let kept = || proto::ReplaceLimitsRequest { keep_limits: true, ..Default::default() };
    let second = proto::ReplaceLimitsRequest { priorities: list(&[priority(20)]), ..kept() };
    let done = limits.replace_limits(second).await.unwrap().into_inner();
    assert_eq!((done.order, done.priorities.len(), done.reclaim_policies.len()), (None, 1, 0));
    assert_eq!((done.removed_count, all(&limits, 10).await.len()), (0, 1));
    assert_eq!(rm.client.reclaim_policies().await.unwrap().len(), 1);
    let third = proto::ReplaceLimitsRequest { reclaim_policies: policies(&[]), ..kept() };
    let done = limits.replace_limits(third).await.unwrap().into_inner();
    assert_eq!((done.priorities.len(), done.reclaim_policies.len()), (0, 1));
    let same = limits
        .replace_limits(proto::ReplaceLimitsRequest { dry_run: true, order: Some(order), ..Default::default() })
        .await;
    assert_eq!(same.unwrap().into_inner().order, None);
    assert_eq!(rm.client.reclaim_policies().await.unwrap(), []);

    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let history = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions;
    let actions = history.iter().map(|line| line.action.as_str()).filter(|action| !action.starts_with("limit"));
    let actions: Vec<_> = actions.collect();
    assert_eq!(actions, ["order_set", "priority_set", "reclaim_policy_set", "priority_set", "reclaim_policy_deleted"]);

    let many = |number: usize| proto::Priority {
        labels: [("user".to_owned(), format!("u{number}"))].into(),
        ..Default::default()
    };
    let wrong = proto::ReplaceLimitsRequest::default;
    for (call, field) in [
        (proto::ReplaceLimitsRequest { keep_limits: true, limits: vec![limit(None, 1)], ..wrong() }, "keep_limits"),
        (
            proto::ReplaceLimitsRequest {
                order: Some(proto::Order { fair_by: vec!["em".into()], ..Default::default() }),
                ..wrong()
            },
            "order.fair_by",
        ),
        (
            proto::ReplaceLimitsRequest { priorities: list(&[priority(1), priority(2)]), ..wrong() },
            "priorities.priorities[1]",
        ),
        (
            proto::ReplaceLimitsRequest { priorities: list(&[priority(61)]), ..wrong() },
            "priorities.priorities[0].default_priority",
        ),
        (
            proto::ReplaceLimitsRequest { priorities: list(&(0..101).map(many).collect::<Vec<_>>()), ..wrong() },
            "priorities.priorities",
        ),
        (
            proto::ReplaceLimitsRequest {
                reclaim_policies: policies(&[proto::ReclaimPolicy { mode: 0, ..policy() }]),
                ..wrong()
            },
            "reclaim_policies.policies[0].mode",
        ),
    ] {
        let status = limits.replace_limits(call).await.unwrap_err();
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
    }
}

/// The deletion of a limit that is still being counted ends the call that set it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_deleted_while_counting_ends_its_call() {
    let (database, rm) = start_with_em(em("host"), load(1000, 1000, 1000)).await;
    rm.client.request_resource(&request(&em("host"), "hadoop", load(1, 1, 1))).await.granted();
    // A hold on the EM delays the counting.
    database.hold_by_hand(&em("host")).await;
    let of = |n: usize| crate::harness::limit(&[(&format!("label{n}"), None)], &[(Dimension::Instances, 9)]);
    let mut setters = JoinSet::new();
    for n in 0..3 {
        let (client, rule) = (rm.client.clone(), of(n));
        setters.spawn(async move { client.set_limit(&rule).await });
    }
    eventually("all are set", LONG, async || rm.client.limits().await.unwrap().len() == 3).await;
    for n in 0..3 {
        rm.client.delete_limit(&of(n).pattern).await.unwrap();
    }
    for set in tokio::time::timeout(LONG, setters.join_all()).await.expect("the calls end") {
        set.unwrap();
    }
    database.release_holds().await;
}
