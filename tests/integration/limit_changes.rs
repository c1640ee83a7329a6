//! How limits are changed: by whom, on what they expect, one by one and all at once.

use std::{collections::BTreeMap, time::Duration};

use linkis_rm::{
    client::ResultResource,
    domain::{
        limit::{Pattern, Rule},
        resource::Dimension,
    },
    transport::{
        page::Page,
        proto::{self, limit_service_client::LimitServiceClient, usage_service_client::UsageServiceClient},
    },
};
use tokio::task::JoinSet;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;

use crate::harness::*;

type Limits = LimitServiceClient<Channel>;

/// At most so many instances for a user, or for each.
fn limit(user: Option<&str>, instances: i64) -> proto::Limit {
    proto::Limit {
        labels: user.map(|user| ("user".to_owned(), user.to_owned())).into_iter().collect(),
        each: if user.is_none() { vec!["user".to_owned()] } else { vec![] },
        max: BTreeMap::from([("instances".to_owned(), instances)]),
        ..Default::default()
    }
}

/// What an administrator says of a limit, without what the service tells.
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
    let call = proto::SetLimitRequest { limit: Some(limit), expected_etag: expected_etag.map(str::to_owned) };
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
async fn limits_come_in_pages_and_tell_who_set_them_and_when() {
    let (database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let users = ["a", "b", "c", "d", "e"];
    for user in users {
        set(&limits, limit(Some(user), 1), None).await.unwrap();
    }
    set(&limits, limit(None, 2), None).await.unwrap();
    let of_creator = proto::Limit { each: vec!["creator".to_owned()], ..limit(None, 3) };
    set(&limits, of_creator.clone(), None).await.unwrap();
    let told = all(&limits, 1000).await;
    let mut expected = vec![of_creator];
    expected.extend(users.map(|user| limit(Some(user), 1)));
    expected.push(limit(None, 2));
    assert_eq!(as_set(&told), expected, "in the order in which they are checked");
    for size in 1..8 {
        assert_eq!(all(&limits, size).await, told, "in pages of {size}");
    }
    for limit in &told {
        assert_eq!(limit.updated_by, "anonymous");
        assert_eq!(limit.state(), proto::LimitState::InForce);
        let seconds = limit.update_time.unwrap().seconds;
        let now = database.count("SELECT extract(epoch FROM clock_timestamp())::bigint").await;
        assert!((now - 60..=now).contains(&seconds), "{seconds} at {now}");
    }
    // Another instance that has read them before tells of a change at once.
    let second = Instance::start(&database).await;
    let elsewhere = Limits::connect(second.address.clone()).await.unwrap();
    assert_eq!(all(&elsewhere, 3).await, told);
    set(&limits, limit(Some("c"), 9), None).await.unwrap();
    let token = |key| Page::new("ListLimits", 1, &()).unwrap().token(key);
    let page_token = token(r#"{"user":"b"}"#);
    let call = proto::ListLimitsRequest { page_size: 1, page_token };
    let page = elsewhere.clone().list_limits(call).await.unwrap().into_inner();
    assert_eq!(as_set(&page.limits), [limit(Some("c"), 9)]);
    assert_ne!(page.limits[0].etag, told[3].etag);
    for (page_size, page_token, field) in
        [(-1, String::new(), "page_size"), (1, "x".to_owned(), "page_token"), (1, token("x"), "page_token")]
    {
        let call = proto::ListLimitsRequest { page_size, page_token };
        let status = limits.clone().list_limits(call).await.unwrap_err();
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_is_only_changed_from_what_its_caller_knows() {
    let (_database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let etag = async || all(&limits, 10).await[0].etag.clone();
    let changed = |answer: Result<(), Status>| {
        let status = answer.unwrap_err();
        assert_eq!(code_and_reason(&status), (Code::Aborted, "LIMIT_CHANGED".to_owned()), "{status:?}");
        status.message().to_owned()
    };
    // Empty stands for none, which only the first of many who try finds.
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
    // The same again is a change, too.
    let second = etag().await;
    set(&limits, limit(Some("hadoop"), 20), None).await.unwrap();
    changed(delete(&limits, limit(Some("hadoop"), 0), Some(&second)).await);
    assert_eq!(as_set(&all(&limits, 10).await), [limit(Some("hadoop"), 20)]);
    let third = etag().await;
    delete(&limits, limit(Some("hadoop"), 0), Some(&third)).await.unwrap();
    let status = delete(&limits, limit(Some("hadoop"), 0), Some(&third)).await.unwrap_err();
    assert_eq!(code_and_reason(&status), (Code::NotFound, "NO_SUCH_LIMIT".to_owned()));
    let message = changed(set(&limits, limit(Some("hadoop"), 1), Some(&third)).await);
    assert!(message.contains("gone"), "{message}");
    assert_eq!(all(&limits, 10).await, []);
}

/// As clients do whose answer was lost: the first try has been carried out, and the second finds what that has changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_that_is_set_again_because_its_answer_was_lost_is_no_change() {
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
    // Not what others have set, be it the same.
    let by_another = "UPDATE linkis_resource_limit SET updated_by = 'somebody else'";
    sqlx::raw_sql(by_another).execute(&database.pool).await.unwrap();
    let status = set(&limits, hadoop(20), Some(&expected)).await.unwrap_err();
    assert_eq!(code_and_reason(&status), (Code::Aborted, "LIMIT_CHANGED".to_owned()));
}

async fn replace(limits: &Limits, all: &[proto::Limit], dry_run: bool) -> proto::ReplaceLimitsResponse {
    let call = proto::ReplaceLimitsRequest { limits: all.to_vec(), dry_run, ..Default::default() };
    limits.clone().replace_limits(call).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_limits_are_replaced_at_once_and_a_dry_run_tells_the_same() {
    let (database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    for user in ["alice", "bob", "bob", "carol", "carol", "carol"] {
        rm.client.request_resource(&request(&host, user, load(1, 1, 1))).await.granted();
    }
    let before = [limit(Some("alice"), 5), limit(Some("bob"), 5), limit(None, 5)];
    for limit in before.clone() {
        set(&limits, limit, None).await.unwrap();
    }
    let told = all(&limits, 10).await;
    let of_creator = proto::Limit { each: vec!["creator".to_owned()], ..limit(None, 4) };
    let wanted = [limit(Some("bob"), 5), limit(None, 2), limit(Some("dave"), 1), of_creator.clone()];
    let over = |answer: &proto::ReplaceLimitsResponse| {
        let mut over: Vec<_> = answer.over_limit.iter().map(|scope| scope.labels.clone()).collect();
        over.sort();
        over
    };
    let labels = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);

    let dry = replace(&limits, &wanted, true).await;
    assert_eq!(all(&limits, 10).await, told, "nothing was changed");
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
    // What has not changed was not set again.
    let of_bob =
        |limits: &[proto::Limit]| limits.iter().find(|l| l.labels == labels("user", "bob")).unwrap().etag.clone();
    assert_eq!(of_bob(&all(&limits, 10).await), of_bob(&told));
    let same = replace(&limits, &wanted, true).await;
    assert_eq!((same.added.len(), same.changed.len(), same.removed.len()), (0, 0, 0));
    assert_eq!((over(&same), same.state()), (over(&done), proto::LimitState::InForce));

    // It is in the history, and decides.
    rm.client.request_resource(&request(&host, "erin", load(1, 1, 1))).await.refused();
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let history = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions;
    let count = |action: &str| history.iter().filter(|line| line.action == action).count();
    assert_eq!((count("limit_set"), count("limit_deleted")), (3 + 3, 1));
    let emptied = replace(&limits, &[], false).await;
    assert_eq!((emptied.removed_count, emptied.over_limit_count), (4, 0));
    assert_eq!(all(&limits, 10).await, []);
    rm.client.request_resource(&request(&host, "erin", load(1, 1, 1))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_limits_are_replaced_in_one_call_and_no_more() {
    let (_database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let many = |count: usize, instances| -> Vec<_> {
        (0..count).map(|n| limit(Some(&format!("user{n:05}")), instances)).collect()
    };
    let start = std::time::Instant::now();
    let done = replace(&limits, &many(10_000, 1), false).await;
    assert_eq!((done.added_count, done.added.len()), (10_000, 1000));
    let done = replace(&limits, &many(9_000, 2), false).await;
    assert_eq!((done.changed_count, done.removed_count, done.changed.len()), (9_000, 1_000, 1000));
    assert_eq!(all(&limits, 1000).await.len(), 9_000);
    println!("{:?}", start.elapsed());
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

/// Others follow what has changed; and read all where somebody changed rules without telling, as an earlier release does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_one_among_many_rules_decides_at_once_through_every_instance() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    first.client.register(registration(em("host"), load(1000, 1000, 1000))).await.unwrap();
    let of = |user: &str, most| Rule {
        pattern: Pattern::new(BTreeMap::from([("user".to_owned(), Some(user.to_owned()))])),
        mode: Default::default(),
        max: BTreeMap::from([(Dimension::Instances, most)]),
    };
    for n in 0..30 {
        first.client.set_limit(&of(&format!("user{n}"), 0)).await.unwrap();
    }
    let may = async |user: &str| {
        let mut answers = Vec::new();
        for rm in [&second, &first] {
            let answer = rm.client.request_resource(&request(&em("host"), user, load(1, 1, 1))).await.unwrap();
            answers.push(matches!(answer, ResultResource::Available(_)));
        }
        answers
    };
    assert_eq!(may("user7").await, [false, false]);
    first.client.set_limit(&of("user7", 1)).await.unwrap();
    assert_eq!(may("user7").await, [true, false]);
    second.client.delete_limit(&of("user8", 0).pattern).await.unwrap();
    assert_eq!((may("user8").await, may("user9").await), (vec![true, true], vec![false, false]));
    sqlx::raw_sql(
        r#"UPDATE linkis_resource_limit SET max_resource = '{"instances": 2}' WHERE pattern @> '{"user": "user9"}';
        UPDATE linkis_resource_limit_version SET version = gen_random_uuid()"#,
    )
    .execute(&database.pool)
    .await
    .unwrap();
    first.client.set_limit(&of("user10", 1)).await.unwrap();
    assert_eq!((may("user9").await, may("user10").await), (vec![true, true], vec![true, false]));
    assert_eq!(assert_invariants(&database, &first.client).await, 6);
}

/// How many rows of rules, and of what has changed of them, were read. What a connection has read is told for certain once it is closed.
async fn rules_read(database: &Database) -> i64 {
    eventually("all connections are closed", Duration::from_secs(20), || async {
        let open = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'linkis-rm'";
        database.count(open).await == 0
    })
    .await;
    let read = "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables
        WHERE relname IN ('linkis_resource_limit', 'linkis_resource_limit_change')";
    database.count(read).await
}

/// Through the one that changes it and through another that follows: they read what has changed, and not the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_one_of_ten_thousand_rules_has_no_instance_read_the_others() {
    const RULES: i64 = 10_000;
    const CHANGES: i64 = 20;
    let (database, rm) = start().await;
    rm.client.register(registration(em("host"), load(1000, 1000, 1000))).await.unwrap();
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let all: Vec<_> = (0..RULES).map(|n| limit(Some(&format!("user{n}")), 0)).collect();
    replace(&limits, &all, false).await;
    rm.stop().await;
    // Without changes and with them: as they start, instances read all rules, and now and then for those who look.
    let mut read = Vec::new();
    for changes in [0, CHANGES] {
        sqlx::raw_sql("ANALYZE linkis_resource_limit, linkis_resource_limit_change")
            .execute(&database.pool)
            .await
            .unwrap();
        let before = rules_read(&database).await;
        let (first, second) = (Instance::start(&database).await, Instance::start(&database).await);
        for rm in [&first, &second] {
            rm.client.request_resource(&request(&em("host"), "user1", load(1, 1, 1))).await.refused();
        }
        let limits = Limits::connect(first.address.clone()).await.unwrap();
        for n in 0..changes {
            let user = format!("user{}", n * 100);
            set(&limits, limit(Some(&user), 1), None).await.unwrap();
            second.client.request_resource(&request(&em("host"), &user, load(1, 1, 1))).await.granted();
            first.client.request_resource(&request(&em("host"), &user, load(1, 1, 1))).await.refused();
        }
        first.stop().await;
        second.stop().await;
        read.push(rules_read(&database).await - before);
    }
    let of_changes = read[1] - read[0];
    assert!(of_changes < CHANGES * RULES / 4, "{of_changes} rows for {CHANGES} changes; {} without any", read[0]);
}

/// Somebody deletes what is still being counted: whoever waits for it is told, and meanwhile keeps nobody else from being told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_a_limit_that_is_deleted_again_waits_no_more() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("host"), load(1000, 1000, 1000))).await.unwrap();
    rm.client.request_resource(&request(&em("host"), "hadoop", load(1, 1, 1))).await.granted();
    // Nothing is counted as long as somebody holds the EM.
    let hold = "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance)
        VALUES ('em', 'linkis-cg-engineconnmanager', 'host:9102')";
    sqlx::raw_sql(hold).execute(&database.pool).await.unwrap();
    let of = |n: usize| Rule {
        pattern: Pattern::new(BTreeMap::from([(format!("label{n}"), None)])),
        mode: Default::default(),
        max: BTreeMap::from([(Dimension::Instances, 9)]),
    };
    let mut setters = JoinSet::new();
    for n in 0..8 {
        let (client, rule) = (rm.client.clone(), of(n));
        setters.spawn(async move { client.set_limit(&rule).await });
    }
    eventually("all are set", std::time::Duration::from_secs(10), async || {
        rm.client.limits().await.unwrap().len() == 8
    })
    .await;
    let begun = std::time::Instant::now();
    for n in 0..8 {
        rm.client.delete_limit(&of(n).pattern).await.unwrap();
    }
    while let Some(set) = setters.join_next().await {
        set.unwrap().unwrap();
    }
    assert!(begun.elapsed() < std::time::Duration::from_secs(5), "told after {:?}", begun.elapsed());
    sqlx::raw_sql("DELETE FROM linkis_resource_lock").execute(&database.pool).await.unwrap();
}

/// An instance is killed again and again while rules change through it: what it had not committed is nowhere, and the others follow
/// what it had, also if it died before it could tell them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_that_change_through_an_instance_that_is_killed_are_the_same_everywhere() {
    let (database, rm) = start().await;
    rm.client.register(registration(em("host"), load(1_000_000, 1_000_000, 1_000_000))).await.unwrap();
    let of = |user: usize, most: i64| Rule {
        pattern: Pattern::new(BTreeMap::from([("user".to_owned(), Some(format!("user{user}")))])),
        mode: Default::default(),
        max: BTreeMap::from([(Dimension::Instances, most)]),
    };
    rm.client.set_limit(&of(0, 0)).await.unwrap();
    let url = database.url();
    let mut last = 0;
    for round in 1..=4_i64 {
        let process = Process::start(&["--database-url", &url]);
        let mut changes = JoinSet::new();
        for user in 0..40 {
            let (client, rule) = (process.client.clone(), of(user, round));
            changes.spawn(async move { client.set_limit(&rule).await.is_ok() });
        }
        // In the middle: some are told, some are not.
        while last < 5 * round && changes.join_next().await.is_some_and(|changed| changed.unwrap()) {
            last += 1;
        }
        process.kill();
        changes.shutdown().await;
    }
    let stored: Vec<(String, i64)> = sqlx::query_as(
        "SELECT pattern ->> 'user', (max_resource ->> 'instances')::bigint FROM linkis_resource_limit ORDER BY 1",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    assert!(stored.len() > 1 && stored.iter().any(|(_, most)| *most > 1), "{stored:?}");
    let reader = Instance::start(&database).await;
    for rm in [&rm, &reader] {
        for (user, most) in &stored {
            let refusal = rm.client.dry_run(&request(&em("host"), user, load(1, 1, most + 1))).await.refused();
            assert_eq!(refusal.shortfalls[0].max, *most, "{user}");
        }
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// Notes how many lines of the history each statement writes, and whether nobody grants or gives back meanwhile.
async fn note_lines(database: &Database) {
    let notes = "CREATE TABLE noted (is_fenced boolean NOT NULL, lines bigint NOT NULL);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO noted SELECT EXISTS (
                SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'AccessExclusiveLock' AND granted
                    AND relation = 'linkis_resource_limit_version'::regclass), (SELECT count(*) FROM written);
            RETURN NULL;
        END $$;
        CREATE TRIGGER note AFTER INSERT ON linkis_resource_action_record REFERENCING NEW TABLE AS written
            FOR EACH STATEMENT EXECUTE FUNCTION note()";
    sqlx::raw_sql(notes).execute(&database.pool).await.unwrap();
}

/// Of how many limits a call changes, what is written while nobody grants or gives back does not depend; and the history tells all the same
/// who was judged by them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_rules_close_the_fence_no_longer_than_one() {
    // One more is for each user.
    const RULES: i64 = 9_999;
    let (database, rm) = start().await;
    let host = em("host");
    rm.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    set(&limits, limit(None, 9), None).await.unwrap();
    rm.client.request_resource(&request(&host, "user1", load(1, 1, 1))).await.granted();
    note_lines(&database).await;
    let noted = async || {
        let inside_and_before: (i64, i64) = sqlx::query_as(
            "SELECT coalesce(sum(lines) FILTER (WHERE is_fenced), 0)::bigint,
                coalesce(sum(lines) FILTER (WHERE NOT is_fenced), 0)::bigint FROM noted",
        )
        .fetch_one(&database.pool)
        .await
        .unwrap();
        sqlx::raw_sql("TRUNCATE noted").execute(&database.pool).await.unwrap();
        inside_and_before
    };
    set(&limits, limit(None, 8), None).await.unwrap();
    assert_eq!(noted().await, (1, 0));

    // Somebody counts by the limits for a while; who comes meanwhile is judged by those that there were.
    let mut counting = database.connect().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE linkis_resource_limit_version IN ACCESS SHARE MODE")
        .execute(&mut counting)
        .await
        .unwrap();
    let all: Vec<_> = (0..RULES).map(|n| limit(Some(&format!("user{n}")), 0)).chain([limit(None, 7)]).collect();
    let replacing = tokio::spawn({
        let limits = limits.clone();
        async move { replace(&limits, &all, false).await.changed_count }
    });
    eventually("the fence is waited for", Duration::from_secs(20), || is_waiting(&database)).await;
    rm.client.request_resource(&request(&host, "user1", load(1, 1, 1))).await.granted();
    sqlx::raw_sql("ROLLBACK").execute(&mut counting).await.unwrap();
    assert_eq!(replacing.await.unwrap(), 1);
    rm.client.request_resource(&request(&host, "user1", load(1, 1, 1))).await.refused();
    rm.client.request_resource(&request(&host, "other", load(1, 1, 1))).await.granted();
    assert_eq!(noted().await, (1, RULES + 1 + 2), "with two grants");
    let told: Vec<(String, String)> = sqlx::query_as(
        r#"SELECT action, coalesce("user", scope::text) FROM linkis_resource_action_record
        WHERE action IN ('granted', 'limits_in_force') ORDER BY id"#,
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    let told: Vec<_> = told.iter().map(|(action, of)| (action.as_str(), of.as_str())).collect();
    let (in_force, granted) = (("limits_in_force", r#"{"user": null}"#), ("granted", "user1"));
    assert_eq!(told, [in_force, granted, granted, in_force, ("granted", "other")]);
    let first = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'limit_set'
        AND id < (SELECT max(id) FROM linkis_resource_action_record WHERE action = 'limits_in_force')";
    assert_eq!(database.count(first).await, RULES + 3, "all of them are told before they hold");

    // The same for those that go; of a set of labels that is new, nothing decides before all is counted.
    let of_creator: Vec<_> = (0..RULES / 10)
        .map(|n| proto::Limit {
            labels: BTreeMap::from([("creator".to_owned(), format!("c{n}"))]),
            ..limit(Some(""), 9)
        })
        .collect();
    replace(&limits, &of_creator, false).await;
    eventually("they decide", Duration::from_secs(20), async || {
        let counting = "SELECT count(*) FROM linkis_label_set WHERE state = 'counting'";
        database.count(counting).await == 0
    })
    .await;
    assert_eq!(noted().await, (2, RULES + 1 + RULES / 10), "those of users end, and those of creators decide");
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}
