//! Use over time: amounts of ended tickets, summed by hour, each ticket once.

use std::time::Duration;

use rm_client::ResourceRequest;
use rm_proto::v1::{self as proto, UsageBy, usage_service_client::UsageServiceClient};
use sqlx::Connection as _;
use tonic::transport::Channel;

use crate::harness::*;

const HOUR: f64 = 3600.0;

async fn connect(rm: &Instance) -> UsageServiceClient<Channel> {
    UsageServiceClient::connect(rm.address.clone()).await.unwrap()
}

/// Returns all pages of `call`.
async fn pages(usage: &UsageServiceClient<Channel>, mut call: proto::GetUsageRequest) -> Vec<proto::UsageSum> {
    let mut sums = vec![];
    loop {
        let page = usage.clone().get_usage(call.clone()).await.unwrap().into_inner();
        sums.extend(page.sums);
        if page.next_page_token.is_empty() {
            return sums;
        }
        call.page_token = page.next_page_token;
    }
}

/// All of a day and the next hour, if it begins meanwhile.
async fn used(usage: &UsageServiceClient<Channel>, by: UsageBy, page_size: i32) -> Vec<proto::UsageSum> {
    pages(usage, proto::GetUsageRequest { by: by.into(), page_size, ..Default::default() }).await
}

fn tickets(sums: &[proto::UsageSum]) -> i64 {
    sums.iter().map(|sum| sum.tickets).sum()
}

async fn eventually_used(usage: &UsageServiceClient<Channel>, count: i64) -> Vec<proto::UsageSum> {
    let got = async || tickets(&used(usage, UsageBy::User, 0).await);
    eventually(&format!("{count} tickets are summed"), LONG, async || got().await == count).await;
    used(usage, UsageBy::User, 0).await
}

#[track_caller]
fn about(what: f64, expected: f64) {
    // The calls took some time, too.
    assert!((expected..=expected * 1.05 + 60.0).contains(&what), "{what} instead of {expected}");
}

/// Has all tickets that live been granted so much earlier.
async fn age(database: &Database, hours: i32) {
    let aged = "UPDATE linkis_user_resource_meta_data SET locked_time = locked_time - make_interval(hours => $1)";
    sqlx::query(aged).bind(hours).execute(&database.pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_is_summed_by_user_em_and_type() {
    let (database, rm) = start().await;
    let (first, second) = (em("host1"), em("host2"));
    for host in [&first, &second] {
        rm.client.register(registration(host.clone(), load(64, 16, 20))).await.unwrap();
    }
    let ask = async |ask: ResourceRequest| rm.client.request_resource(&ask).await.granted();
    let in_use = ask(request(&first, "alice", load(4, 4, 1))).await;
    let never_used = ask(request(&second, "bob", load(1, 1, 1))).await;
    ask(request(&second, "alice", load(1, 1, 1))).await;
    age(&database, 3).await;
    // The use at the end counts, since the grant.
    rm.client.resource_inited(&inited(&in_use, "alice", Some(load(2, 3, 1)))).await.unwrap();
    rm.client.resource_released(&release(&in_use, "alice")).await.unwrap();
    rm.client.resource_released(&release(&never_used, "bob")).await.unwrap();
    rm.client.unregister(&second).await.unwrap();

    let usage = connect(&rm).await;
    let by_user = eventually_used(&usage, 3).await;
    let names: Vec<_> = by_user.iter().map(|sum| (sum.name.as_str(), sum.tickets, sum.others)).collect();
    assert_eq!(names, [("alice", 2, false), ("bob", 1, false)]);
    about(by_user[0].core_seconds, (3.0 + 1.0) * 3.0 * HOUR);
    about(by_user[1].core_seconds, 3.0 * HOUR);
    about(by_user[0].byte_seconds / GB as f64, (2.0 + 1.0) * 3.0 * HOUR);
    assert_eq!((by_user[0].queue_core_seconds, by_user[0].queue_byte_seconds), (0.0, 0.0));
    let by_em = used(&usage, UsageBy::Em, 1).await;
    let ems: Vec<_> = by_em.iter().map(|sum| (sum.em.clone().unwrap().instance, sum.tickets)).collect();
    assert_eq!(ems, [("host1:9102".to_owned(), 1), ("host2:9102".to_owned(), 2)]);
    for (by, name) in [(UsageBy::Creator, "IDE"), (UsageBy::EngineType, "spark-3.2.1")] {
        let sums = used(&usage, by, 0).await;
        assert_eq!((sums.len(), sums[0].name.as_str(), sums[0].tickets), (1, name, 3));
        assert!((sums[0].core_seconds - by_user[0].core_seconds - by_user[1].core_seconds).abs() < 0.001);
    }
    // Hour by hour, all of it in the hour of the end; of one user alone.
    let (by, user) = (UsageBy::User.into(), "alice".into());
    let hourly = proto::GetUsageRequest { by, user, hourly: true, page_size: 1, ..Default::default() };
    let hours = pages(&usage, hourly).await;
    assert!((1..=2).contains(&hours.len()), "{hours:?}");
    assert_eq!(tickets(&hours), 2);
    assert!(hours.iter().all(|sum| sum.hour.unwrap().seconds % 3600 == 0 && sum.name == "alice"));
    rm.stop().await;
}

/// An ended ticket counts in its hour only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_range_sums_tickets_that_ended_in_it() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(64, 16, 20)).await;
    for user in ["now", "before", "first"] {
        let grant = rm.client.request_resource(&request(&em1, user, load(1, 2, 1))).await.granted();
        rm.client.resource_released(&release(&grant, user)).await.unwrap();
    }
    eventually_used(&connect(&rm).await, 3).await;
    rm.stop().await;
    // One ended five hours ago, one three, and each had lived for half an hour.
    let again = r#"UPDATE linkis_resource_action_record SET action_time = date_trunc('hour', now())
            - make_interval(hours => CASE "user" WHEN 'first' THEN 5 WHEN 'before' THEN 3 ELSE 0 END)
        WHERE action = 'released';
        UPDATE linkis_resource_action_record SET held_since = action_time - interval '30 minutes' WHERE action = 'released';
        UPDATE linkis_resource_usage_progress SET last_number = 0; DELETE FROM linkis_resource_usage_hour"#;
    database.execute(again).await;
    let hour = database
        .count(
            "SELECT extract(epoch FROM max(date_trunc('hour', action_time)))::bigint
        FROM linkis_resource_action_record WHERE action = 'released'",
        )
        .await;
    let options = settings().with_time("--history", Duration::from_secs(24 * 3600));
    // Two instances sum each ticket once.
    let other = Instance::start_with(&database, options.clone()).await;
    let rm = Instance::start_with(&database, options).await;
    let usage = connect(&rm).await;
    eventually_used(&usage, 3).await;
    let at = |hours: f64| Some(prost_types::Timestamp { seconds: hour + (hours * HOUR) as i64, nanos: 0 });
    for by in [UsageBy::User, UsageBy::Creator, UsageBy::EngineType, UsageBy::Em] {
        for (from, to, count) in [
            (-5.0, -4.0, 1),
            (-4.0, -3.0, 0),
            (-3.0, -2.0, 1),
            (-5.0, -3.0, 1),
            (-5.0, -2.0, 2),
            // Rounded to full hours.
            (-3.5, -2.9, 1),
            (-4.5, -3.5, 1),
            (0.0, 1.0, 1),
            (-5.0, 1.0, 3),
        ] {
            let call =
                proto::GetUsageRequest { by: by.into(), from_time: at(from), to_time: at(to), ..Default::default() };
            let page = usage.clone().get_usage(call).await.unwrap().into_inner();
            assert_eq!(tickets(&page.sums), count, "{by:?} from {from} to {to}: {page:?}");
            assert_eq!((page.from_time, page.to_time), (at(from.floor()), at(to.ceil())));
            let cores: f64 = page.sums.iter().map(|sum| sum.core_seconds).sum();
            assert!((cores - count as f64 * HOUR).abs() < 0.001, "two cores for half an hour: {page:?}");
        }
    }
    let call = proto::GetUsageRequest {
        by: UsageBy::User.into(),
        from_time: at(-3.0),
        to_time: at(-2.0),
        ..Default::default()
    };
    let page = usage.clone().get_usage(call).await.unwrap().into_inner();
    assert_eq!(page.sums[0].name, "before");
    other.stop().await;
    rm.stop().await;
}

/// A late commit with an earlier id is not skipped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_includes_late_commits() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(64, 16, 20)).await;
    let usage = connect(&rm).await;
    let end = async |user: &str| {
        let grant = rm.client.request_resource(&request(&em1, user, load(1, 1, 1))).await.granted();
        rm.client.resource_released(&release(&grant, user)).await.unwrap();
    };
    end("first").await;
    eventually_used(&usage, 1).await;
    let mut late = database.connect().await;
    let mut late = late.begin().await.unwrap();
    let line = r#"INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels,
            em_application_name, em_instance, resource_type, resource, actor, action_time, held_since)
        SELECT action, gen_random_uuid(), 'late', creator, engine_type, labels, em_application_name, em_instance, resource_type,
            resource, actor, action_time, held_since
        FROM linkis_resource_action_record WHERE action = 'released' RETURNING id"#;
    let number: i64 = sqlx::query_scalar(line).fetch_one(&mut *late).await.unwrap();
    end("second").await;
    let steps = || -> u64 {
        let text = rm.metrics.text();
        let series = r#"linkis_rm_task_steps_total{task="usage"} "#;
        text.lines().find_map(|line| line.strip_prefix(series)).map_or(0, |steps| steps.parse().unwrap())
    };
    let before = steps();
    eventually("it was looked at again, and again", LONG, async || steps() >= before + 2).await;
    let reached = database.count("SELECT last_number FROM linkis_resource_usage_progress").await;
    assert!(reached < number, "line {number} may still come, and it stands at {reached}");
    assert_eq!(tickets(&used(&usage, UsageBy::User, 0).await), 1);
    late.commit().await.unwrap();
    let sums = eventually_used(&usage, 3).await;
    let names: Vec<_> = sums.iter().map(|sum| sum.name.as_str()).collect();
    assert_eq!(names, ["first", "late", "second"]);
    rm.stop().await;
}

/// An hour has a bounded number of rows, and no ticket is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_above_10000_names_sums_others() {
    const USERS: i64 = 10_050;
    let (database, rm) = start_with_em(em("host1"), load(64, 16, 20)).await;
    let lines = r#"INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels,
            em_application_name, em_instance, resource_type, resource, actor, action_time, held_since)
        SELECT 'released', gen_random_uuid(), 'user' || n, 'IDE', '', '{}', 'ecm', 'host1', 'LoadInstance',
            '{"memory":9223372036854775807,"cores":9223372036854775807,"instances":1,"instance":1}', 'x',
            date_trunc('hour', now()) + n * interval '1 microsecond', date_trunc('hour', now()) - interval '1 hour'
        FROM generate_series(1, $1) n"#;
    sqlx::query(lines).bind(USERS).execute(&database.pool).await.unwrap();
    let usage = connect(&rm).await;
    let all = async || used(&usage, UsageBy::Creator, 0).await;
    eventually("all are summed", LONG, async || tickets(&all().await) == USERS).await;
    let by_creator = all().await;
    // The sum exceeds the largest integer.
    about(by_creator[0].core_seconds / i64::MAX as f64 / USERS as f64, HOUR);
    let by_user = used(&usage, UsageBy::User, 1000).await;
    assert_eq!((by_user.len(), tickets(&by_user)), (10_001, USERS));
    let others = by_user.last().unwrap();
    assert_eq!((others.others, others.name.as_str(), others.tickets), (true, "", 50));
    rm.stop().await;
}
