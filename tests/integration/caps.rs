//! Caps of requests: the lower of a cap and the limit decides.

use rm_client::{ClientError, ResourceRequest};
use rm_model::{
    cap::Cap,
    limit::{LabelPattern, Rule},
    limit_mode::LimitMode,
    policy::Policy,
    resource::Dimension,
};
use tonic::Code;

use crate::harness::*;

fn cap(labels: &[&str], max: &[(Dimension, i64)]) -> Cap {
    Cap { keys: labels.iter().map(|label| (*label).to_owned()).collect(), max: max.iter().cloned().collect() }
}

/// Returns a cap on the instances of the user.
fn of_user(instances: i64) -> Cap {
    cap(&["user"], &[(Dimension::Instances, instances)])
}

fn capped(user: &str, caps: &[Cap]) -> ResourceRequest {
    ResourceRequest { caps: caps.to_vec(), ..request(&em("host1"), user, load(1, 1, 1)) }
}

fn in_mode(labels: &[&str], mode: LimitMode) -> Rule {
    let labels = labels.iter().map(|label| ((*label).to_owned(), None)).collect();
    Rule { pattern: LabelPattern::new(labels), mode, max: Default::default(), guarantee: Default::default() }
}

fn details(error: &ClientError) -> (Code, String) {
    (error.code().unwrap(), error.reason().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cap_below_limit_decides() {
    let (database, rm) = start_with_host1().await;
    rm.client.set_limit(&each_user(3)).await.unwrap();
    rm.client.request_resource(&capped("hadoop", &[of_user(1)])).await.granted();
    let answers = [
        rm.client.request_resource(&capped("hadoop", &[of_user(1)])).await,
        rm.client.dry_run(&capped("hadoop", &[of_user(1)])).await,
    ];
    for refusal in answers.map(Expect::refused) {
        let [short] = refusal.shortfalls.as_slice() else { panic!("{refusal:?}") };
        assert_eq!((short.scope.as_str(), short.requested, short.available, short.max), ("user=hadoop", 1, 0, 1));
        assert_eq!(short.rule, "the request's own cap for user: at most 1 instances");
    }
    // A cap applies to its own request only, and not to its ticket or another user.
    rm.client.request_resource(&capped("alice", &[of_user(1)])).await.granted();
    rm.client.request_resource(&capped("hadoop", &[])).await.granted();
    rm.client.request_resource(&capped("hadoop", &[of_user(9)])).await.granted();
    let refusal = rm.client.request_resource(&capped("hadoop", &[of_user(9)])).await.refused();
    assert_eq!((refusal.shortfalls[0].max, refusal.shortfalls[0].rule.as_str()), (3, "each user: at most 3 instances"));
    // In dimensions that no limit names, too.
    let cores = cap(&["user"], &[(Dimension::Cores, 1)]);
    let refusal = rm.client.request_resource(&capped("alice", &[cores])).await.refused();
    assert_eq!((&refusal.shortfalls[0].dimension, refusal.shortfalls[0].max), (&Dimension::Cores, 1));
    // A request above its cap never waits.
    let never = ResourceRequest { wait_timeout: LONG * 3, ..capped("bob", &[of_user(0)]) };
    assert!(rm.client.request_resource(&never).await.refused().never_fits);
    // Another cap is another request.
    let named = |most| ResourceRequest { request_id: Some("one".to_owned()), ..capped("carol", &[of_user(most)]) };
    let grant = rm.client.request_resource(&named(1)).await.granted();
    assert_eq!(rm.client.request_resource(&named(1)).await.granted(), grant);
    let error = rm.client.request_resource(&named(2)).await.unwrap_err();
    assert_eq!(details(&error), (Code::AlreadyExists, "REQUEST_ID_REUSED".to_owned()));
    assert_eq!(assert_invariants(&database, &rm.client).await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cap_under_advisory_limit_is_enforced() {
    let (database, first) = start_with_host1().await;
    let second = Instance::start(&database).await;
    let advisory = Rule { max: [(Dimension::Instances, 0)].into(), ..in_mode(&["user"], LimitMode::Advisory) };
    for rule in [in_mode(&["user"], LimitMode::Off), advisory] {
        first.client.set_limit(&rule).await.unwrap();
        let held = first.client.request_resource(&capped("hadoop", &[of_user(1)])).await.granted();
        first.client.request_resource(&capped("hadoop", &[of_user(1)])).await.refused();
        let patient = ResourceRequest { wait_timeout: LONG * 3, ..capped("hadoop", &[of_user(1)]) };
        let call = request_in_task(&second.client, patient);
        eventually("it stands in line", LONG, || async { first.client.waiting().await.unwrap().len() == 1 }).await;
        let waiting = first.client.waiting().await.unwrap().remove(0);
        assert_eq!((waiting.caps, waiting.ahead), (vec![of_user(1)], [("user=hadoop".to_owned(), 0)].into()));
        // The capacity that the request waits for is not reserved against others.
        let other = first.client.request_resource(&capped("hadoop", &[])).await.granted();
        first.client.resource_released(&release(&other, "hadoop")).await.unwrap();
        first.client.resource_released(&release(&held, "hadoop")).await.unwrap();
        let granted = tokio::time::timeout(LONG, call).await.expect("there is room now").unwrap().granted();
        first.client.resource_released(&release(&granted, "hadoop")).await.unwrap();
    }
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
}

/// Tickets that the tables hold, and no EM.
async fn insert_tickets(database: &Database, tickets: i64) {
    sqlx::query(
        r#"INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_locked_resource, labels, locked_time, expires_at)
        SELECT gen_random_uuid(), 'hadoop', 'IDE', 'spark-3.2.1', 'ecm', 'gone:1', 'LoadInstance',
            '{"memory": 1, "cores": 1, "instances": 1}', '{}', now(), now() + interval '1 day'
        FROM generate_series(1, $1)"#,
    )
    .bind(tickets)
    .execute(&database.pool)
    .await
    .unwrap();
}

fn assert_not_counted(error: &ClientError, labels: &str) {
    assert_eq!(details(error), (Code::FailedPrecondition, "CAP_NOT_COUNTED".to_owned()));
    assert_eq!(error.field().as_deref(), Some("caps"));
    let text = error.to_string();
    assert!(text.contains(&format!("counted by {labels};")) && text.contains("SetLimit"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caps_of_uncounted_labels_are_counted_on_demand() {
    let (database, rm) = start_with_host1().await;
    let creator = cap(&["user", "creator"], &[(Dimension::Cores, 3)]);
    for _ in 0..2 {
        rm.client.request_resource(&capped("hadoop", &[])).await.granted();
    }
    let asks = capped("hadoop", &[of_user(9), creator.clone()]);
    let anywhere = ResourceRequest { em: None, ..asks.clone() };
    let patient = ResourceRequest { wait_timeout: LONG * 3, ..asks.clone() };
    assert!(rm.client.dry_run(&asks).await.is_ok());
    // Concurrent first requests count each label set once.
    let calls = [&asks, &anywhere, &patient]
        .map(|asks| request_in_task(&rm.client, ResourceRequest { user: name("alice"), ..asks.clone() }));
    for call in calls {
        call.await.unwrap().granted();
    }
    for asks in [&asks, &anywhere] {
        rm.client.request_resource(asks).await.granted();
        let refusal = rm.client.request_resource(asks).await.refused();
        let short = &refusal.shortfalls[0];
        assert_eq!((short.scope.as_str(), short.available, short.max), ("creator=IDE,user=hadoop", 0, 3));
        let mut tickets = rm.client.tickets(None).await.unwrap();
        tickets.retain(|ticket| ticket.user == name("hadoop"));
        rm.client.ticket_released(tickets[0].id).await.unwrap();
    }
    let limits = rm.client.limits().await.unwrap();
    let modes: Vec<_> = limits.iter().map(|rule| (rule.pattern.to_string(), rule.mode)).collect();
    assert_eq!(modes.len(), 2, "{modes:?}");
    assert!(modes.iter().all(|(_, mode)| *mode == LimitMode::Off), "{modes:?}");
    assert_eq!(database.count("SELECT count(*) FROM linkis_label_set").await, 2);
    assert_eq!(assert_invariants(&database, &rm.client).await, 5);
    assert_eq!(rm.client.audit().await.unwrap().differences.count, 0);
    // On EMs whose policy excludes these labels, no ticket counts by them.
    let (kind, policy) = (em("host1").application_name, Policy::new([]));
    rm.client.set_policy(&kind, &policy).await.unwrap();
    assert_not_counted(&rm.client.request_resource(&asks).await.unwrap_err(), "user");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caps_over_many_tickets_need_set_limit() {
    let (database, rm) = start_with_host1().await;
    insert_tickets(&database, 10_001).await;
    let asks = capped("hadoop", &[of_user(9)]);
    for error in [rm.client.request_resource(&asks).await.unwrap_err(), rm.client.dry_run(&asks).await.unwrap_err()] {
        assert_not_counted(&error, "user");
    }
    assert_eq!(database.count("SELECT count(*) FROM linkis_label_set").await, 0);
    database.execute("DELETE FROM linkis_user_resource_meta_data").await;
    rm.client.set_limit(&in_mode(&["user"], LimitMode::Off)).await.unwrap();
    rm.client.request_resource(&asks).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caps_on_demand_leave_label_sets_to_administrators() {
    let (database, rm) = start_with_host1().await;
    for label in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        rm.client.request_resource(&capped("hadoop", &[cap(&[label], &[(Dimension::Cores, 90)])])).await.granted();
    }
    assert_not_counted(&rm.client.request_resource(&capped("hadoop", &[of_user(90)])).await.unwrap_err(), "user");
    rm.client.set_limit(&in_mode(&["user"], LimitMode::Off)).await.unwrap();
    rm.client.request_resource(&capped("hadoop", &[of_user(90)])).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 9);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caps_with_invalid_labels_return_field() {
    let (_database, rm) = start_with_host1().await;
    let some = |labels: &[&str]| cap(labels, &[(Dimension::Cores, 1)]);
    let five: Vec<Cap> = ["a", "b", "c", "d", "e"].iter().map(|label| some(&[label])).collect();
    let cases = [
        (five, "caps"),
        (vec![some(&["user"]), of_user(1)], "caps[1].labels"),
        (vec![some(&[])], "caps[0].labels"),
        (vec![some(&[""])], "caps[0].labels"),
        (vec![cap(&["user"], &[])], "caps[0].max"),
        (vec![of_user(-1)], "caps[0].max"),
    ];
    for (caps, field) in cases {
        let error = rm.client.request_resource(&capped("hadoop", &caps)).await.unwrap_err();
        assert_eq!(
            (details(&error), error.field().as_deref()),
            ((Code::InvalidArgument, "INVALID_FIELD".into()), Some(field))
        );
    }
}
