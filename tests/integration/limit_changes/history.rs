//! Changes of limits on every instance: after failures, and at a cost of the changed limits alone.

use std::{collections::BTreeMap, time::Duration};

use rm_client::ResultResource;
use rm_model::{
    limit::{LabelPattern, Rule},
    resource::Dimension,
};
use rm_proto::v1 as proto;
use tokio::task::JoinSet;

use super::{Limits, limit, replace, set};
use crate::harness::*;

/// Returns a limit on the instances of one of many users.
fn of_user(number: usize, instances: i64) -> Rule {
    Rule {
        pattern: LabelPattern::new([("user".to_owned(), Some(format!("user{number}")))].into()),
        mode: Default::default(),
        max: [(Dimension::Instances, instances)].into(),
        guarantee: Default::default(),
    }
}

/// Instances read only changed limits, and all limits after a change without a record of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_change_applies_on_every_instance() {
    let (database, first, second) = two().await;
    first.client.register(registration(em("host"), load(1000, 1000, 1000))).await.unwrap();
    for n in 0..30 {
        first.client.set_limit(&of_user(n, 0)).await.unwrap();
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
    first.client.set_limit(&of_user(7, 1)).await.unwrap();
    assert_eq!(may("user7").await, [true, false]);
    second.client.delete_limit(&of_user(8, 0).pattern).await.unwrap();
    assert_eq!((may("user8").await, may("user9").await), (vec![true, true], vec![false, false]));
    database
        .execute(
            r#"UPDATE linkis_resource_limit SET max_resource = '{"instances": 2}' WHERE pattern @> '{"user": "user9"}';
        UPDATE linkis_resource_limit_version SET version = gen_random_uuid()"#,
        )
        .await;
    first.client.set_limit(&of_user(10, 1)).await.unwrap();
    assert_eq!((may("user9").await, may("user10").await), (vec![true, true], vec![true, false]));
    assert_eq!(assert_invariants(&database, &first.client).await, 6);
}

/// The statistics of a connection are complete once it is closed.
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

/// On the changing instance and on another one: both read only the changed limits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_change_reads_only_changed_limits() {
    const RULES: i64 = 10_000;
    const CHANGES: i64 = 20;
    let (database, rm) = start_with_em(em("host"), load(1000, 1000, 1000)).await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let all: Vec<_> = (0..RULES).map(|n| limit(Some(&format!("user{n}")), 0)).collect();
    replace(&limits, &all, false).await;
    rm.stop().await;
    // The baseline without changes: instances read all limits at their start and for checks.
    let mut read = Vec::new();
    for changes in [0, CHANGES] {
        database.execute("ANALYZE linkis_resource_limit, linkis_resource_limit_change").await;
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
    // Tasks that begin during the changes read all limits once each.
    let of_changes = read[1] - read[0];
    assert!(of_changes < CHANGES * RULES / 2, "{of_changes} rows for {CHANGES} changes; {} without any", read[0]);
}

/// An instance is killed repeatedly during changes of limits. Its uncommitted changes have no effect. The others apply its committed
/// ones, even without a notification.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_changes_after_instance_kill_are_equal_everywhere() {
    let (database, rm) = start_with_em(em("host"), load(1_000_000, 1_000_000, 1_000_000)).await;
    rm.client.set_limit(&of_user(0, 0)).await.unwrap();
    let url = database.url();
    let mut last = 0;
    for round in 1..=4_i64 {
        let process = Process::start(&["--database-url", &url]);
        let mut changes = JoinSet::new();
        for user in 0..40 {
            let (client, rule) = (process.client.clone(), of_user(user, round));
            changes.spawn(async move { client.set_limit(&rule).await.is_ok() });
        }
        // Some changes are notified, some are not.
        while last < 5 * round && changes.join_next().await.is_some_and(|changed| changed.unwrap()) {
            last += 1;
        }
        process.kill();
        changes.shutdown().await;
    }
    let stored: Vec<(String, i64)> = database
        .rows("SELECT pattern ->> 'user', (max_resource ->> 'instances')::bigint FROM linkis_resource_limit ORDER BY 1")
        .await;
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

/// Records how many history lines each statement writes, and whether the fence is closed.
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
    database.execute(notes).await;
}

/// The number of lines inside the fence does not depend on the number of changed limits. The history still shows the limits of
/// each decision.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_replacement_writes_history_outside_the_fence() {
    // One more is for each user.
    const RULES: i64 = 9_999;
    let em1 = em("host");
    let (database, rm) = start_with_em(em1.clone(), load(1000, 1000, 1000)).await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    set(&limits, limit(None, 9), None).await.unwrap();
    rm.client.request_resource(&request(&em1, "user1", load(1, 1, 1))).await.granted();
    note_lines(&database).await;
    let noted = async || {
        let inside_and_before: (i64, i64) = database
            .row(
                "SELECT coalesce(sum(lines) FILTER (WHERE is_fenced), 0)::bigint,
                coalesce(sum(lines) FILTER (WHERE NOT is_fenced), 0)::bigint FROM noted",
            )
            .await;
        database.execute("TRUNCATE noted").await;
        inside_and_before
    };
    set(&limits, limit(None, 8), None).await.unwrap();
    assert_eq!(noted().await, (1, 0));

    // Limits are counted for a while; earlier limits decide meanwhile.
    let mut counting = database.connect().await;
    execute(&mut counting, "BEGIN; LOCK TABLE linkis_resource_limit_version IN ACCESS SHARE MODE").await;
    let all: Vec<_> = (0..RULES).map(|n| limit(Some(&format!("user{n}")), 0)).chain([limit(None, 7)]).collect();
    let replacing = tokio::spawn({
        let limits = limits.clone();
        async move { replace(&limits, &all, false).await.changed_count }
    });
    eventually("the fence is waited for", Duration::from_secs(20), || is_waiting(&database)).await;
    rm.client.request_resource(&request(&em1, "user1", load(1, 1, 1))).await.granted();
    execute(&mut counting, "ROLLBACK").await;
    assert_eq!(replacing.await.unwrap(), 1);
    rm.client.request_resource(&request(&em1, "user1", load(1, 1, 1))).await.refused();
    rm.client.request_resource(&request(&em1, "other", load(1, 1, 1))).await.granted();
    assert_eq!(noted().await, (1, RULES + 1 + 2), "with two grants");
    let got: Vec<(String, String)> = database
        .rows(
            r#"SELECT action, coalesce("user", scope::text) FROM linkis_resource_action_record
        WHERE action IN ('granted', 'limits_in_force') ORDER BY id"#,
        )
        .await;
    let got: Vec<_> = got.iter().map(|(action, of)| (action.as_str(), of.as_str())).collect();
    let (in_force, granted) = (("limits_in_force", r#"{"user": null}"#), ("granted", "user1"));
    assert_eq!(got, [in_force, granted, granted, in_force, ("granted", "other")]);
    let first = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'limit_set'
        AND id < (SELECT max(id) FROM linkis_resource_action_record WHERE action = 'limits_in_force')";
    assert_eq!(database.count(first).await, RULES + 3, "all new limits are recorded before they are in force");

    // Deleted limits are recorded alike. A new label set decides nothing before it is counted.
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
    assert_eq!(
        noted().await,
        (2, RULES + 1 + RULES / 10),
        "the limits of users end, and the limits of creators decide"
    );
    // The rules of the wait queues are recorded inside, because no later line states when they take effect.
    for (from, lines) in [(0, 60), (60, 120)] {
        let priority = |number: usize| proto::Priority {
            labels: BTreeMap::from([("user".to_owned(), format!("user{number}"))]),
            ..Default::default()
        };
        let priorities = Some(proto::PriorityList { priorities: (from..from + 60).map(priority).collect() });
        let call = proto::ReplaceLimitsRequest { keep_limits: true, priorities, ..Default::default() };
        limits.clone().replace_limits(call).await.unwrap();
        assert_eq!(noted().await, (lines, 0));
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}
