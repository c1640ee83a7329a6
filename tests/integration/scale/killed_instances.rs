//! Killed instances during large jobs: another instance continues, and repeats nothing.

use rm_model::{
    report::{EmReport, Health},
    resource::Dimension,
};

use super::*;

/// Maximum number of tickets of one step of an unregistration or a count.
const ENDED_PER_STEP: i64 = 56;
const COUNTED_PER_STEP: i64 = 28;

/// Maximum number of additional steps: the step of the kill, concurrent steps, and retries.
const OTHER_STEPS: i64 = 8;

/// The tickets of the EM `crowded`.
const LEFT: &str = "SELECT count(*) FROM linkis_user_resource_meta_data WHERE em_instance = 'crowded:9102'";

/// Number of steps of the first instance.
const FIRST_STEPS: i64 = 15;

async fn tries(database: &Database) -> i64 {
    database.count("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM tries").await
}

/// Kills the instance after [`FIRST_STEPS`] steps on the EM `crowded`, and permits all further steps. Returns the number of tickets
/// without a step, which `left` reads, and the number of attempts until now.
async fn kill_midway(database: &Database, first: Process, left: &str) -> (i64, i64) {
    eventually("it is under way", LONG, async || tries(database).await > FIRST_STEPS).await;
    first.kill();
    let (left, before) = (database.count(left).await, tries(database).await);
    fail_steps(database, "< 0").await;
    (left, before)
}

/// Registers two EMs, one with many tickets, on which the first instance can make [`FIRST_STEPS`] steps.
async fn prepare(database: &Database, client: &RmClient, count: i64, within: &'static str) -> (EmInstance, EmInstance) {
    let (crowded, other) = (em("crowded"), em("other"));
    client.register(registration(other.clone(), Resource::cpu(1_000_000).unwrap())).await.unwrap();
    crowd(database, client, &crowded, count, within).await;
    fail_steps(database, &format!("> {FIRST_STEPS}")).await;
    (crowded, other)
}

/// Asserts that `tickets` tickets ended as `how`, each once.
async fn assert_ended_once(database: &Database, how: &str, tickets: i64) {
    let (lines, different): (i64, i64) = sqlx::query_as(
        "SELECT count(*), count(DISTINCT ticket_id) FROM linkis_resource_action_record
        WHERE action = $1 AND ticket_id IS NOT NULL",
    )
    .bind(how)
    .fetch_one(&database.pool)
    .await
    .unwrap();
    assert_eq!((lines, different), (tickets, tickets), "{how}");
}

/// Kills the instance that unregisters an EM after a part of its tickets has ended; another instance ends the rest.
async fn goes_through_another(database: &Database, first: Process, how: &str) {
    let other = em("other");
    let (left, before) = kill_midway(database, first, LEFT).await;
    assert!((20 * ENDED_PER_STEP..CROWD).contains(&left), "{left} are left");
    let second = Instance::start(database).await;
    eventually("it is gone", Duration::from_secs(60), || async {
        second.client.request_resource(&one_core(&other, "bob")).await.granted();
        database.count("SELECT count(*) FROM linkis_em_resource_meta_data").await == 1
    })
    .await;
    let after = tries(database).await - before;
    assert!(after <= left / ENDED_PER_STEP + OTHER_STEPS, "{after} steps for {left} tickets");
    assert_ended_once(database, how, CROWD).await;
    let ems = "SELECT count(*) FROM linkis_resource_action_record WHERE ticket_id IS NULL AND action IN ('unregistered', 'lost')";
    assert_eq!(database.count(ems).await, 1, "it went once");
    assert_invariants(database, &second.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregister_continues_after_instance_kill() {
    let database = Database::fresh().await;
    let first = Process::start(&["--database-url", &database.url()]);
    let (crowded, _) = prepare(&database, &first.client, CROWD, "1 hour").await;
    first.client.unregister(&crowded).await.unwrap();
    goes_through_another(&database, first, "unregistered").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_em_removal_continues_after_instance_kill() {
    let database = Database::fresh().await;
    let patience = ["--em-silent-after", "1s", "--em-lost-after", "2s"];
    let first = Process::start(&[&["--database-url", &database.url()], &patience[..]].concat());
    let (crowded, _) = prepare(&database, &first.client, CROWD, "1 hour").await;
    let epoch = first.client.em(&crowded).await.unwrap().epoch;
    let (health, tickets) = (Health::Healthy, Default::default());
    // The EM sends a single report.
    let last = EmReport { em: crowded, epoch, sequence: 1, health, load: None, tickets, observed: None, idle: vec![] };
    first.client.heartbeat(&last).await.unwrap();
    goes_through_another(&database, first, "lost").await;
}

/// Counted EMs of a new label set are not counted again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_counting_continues_after_instance_kill() {
    let database = Database::fresh().await;
    let first = Process::start(&["--database-url", &database.url()]);
    let (_, other) = prepare(&database, &first.client, CROWD, "1 hour").await;
    let client = first.client.clone();
    // Its reply would follow the count.
    let setting =
        tokio::spawn(async move { client.set_limit(&limit(&[("user", None)], &[(Dimension::Cores, 440)])).await });
    let not_counted =
        "SELECT count(*) FROM linkis_user_resource_meta_data t JOIN linkis_em_resource_meta_data e USING (em_instance)
        WHERE e.em_instance = 'crowded:9102' AND t.ticket_id > e.counted_after";
    let (left, before) = kill_midway(&database, first, not_counted).await;
    assert!((20 * COUNTED_PER_STEP..CROWD).contains(&left), "{left} are left");
    setting.await.unwrap().unwrap_err();
    let second = Instance::start(&database).await;
    let counting = "SELECT count(*) FROM linkis_label_set WHERE state = 'counting'";
    eventually("it decides", Duration::from_secs(60), || async {
        second.client.request_resource(&one_core(&other, &Uuid::new_v4().to_string())).await.granted();
        database.count(counting).await == 0
    })
    .await;
    let after = tries(&database).await - before;
    assert!(after <= left / COUNTED_PER_STEP + OTHER_STEPS, "{after} steps for {left} tickets");
    // 3,000 of seven users are 428 or 429 of each.
    let of_users: Vec<i64> = database.column("SELECT (locked_resource ->> 'cores')::bigint FROM linkis_label_resource WHERE scope ->> 'user' ~ '^user[0-6]$' ORDER BY 1").await;
    assert_eq!(of_users, [428, 428, 428, 429, 429, 429, 429][..], "each ticket once");
    let twelve = request(&other, "user1", Resource::cpu(12).unwrap());
    assert_eq!(second.client.request_resource(&twelve).await.refused().shortfalls[0].max, 440);
    assert_invariants(&database, &second.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_continues_after_instance_kill() {
    const ALL: i64 = 6 * CROWD;
    let database = Database::fresh().await;
    let first = Process::start(&["--database-url", &database.url()]);
    let (crowded, other) = prepare(&database, &first.client, ALL, "3 seconds").await;
    let (left, _) = kill_midway(&database, first, LEFT).await;
    assert!((CROWD..ALL).contains(&left), "{left} are left");
    let second = Instance::start(&database).await;
    eventually("all are back", Duration::from_secs(60), || async {
        second.client.request_resource(&one_core(&other, "bob")).await.granted();
        tickets_of(&database, &crowded).await == 0
    })
    .await;
    assert_ended_once(&database, "expired", ALL).await;
    assert_invariants(&database, &second.client).await;
}
