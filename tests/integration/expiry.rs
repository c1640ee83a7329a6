//! Expiry: a locked ticket ends at its deadline, independent of the instance that granted it.

use std::time::Duration;

use rm_client::{ResourceRequest, RmClient};
use tokio::task::JoinSet;

use crate::{harness::*, scale::crowd};

/// How late half of the roll-backs may be.
const LATE_MAX: Duration = Duration::from_secs(1);

fn short(ttl: Duration) -> ResourceRequest {
    ResourceRequest { lock_ttl: Some(ttl), ..request(&em("host1"), "hadoop", load(1, 1, 1)) }
}

async fn register(client: &RmClient) {
    client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
}

/// Waits until no ticket is locked. Asserts by the database's clock that expired tickets ended after their deadlines and not
/// late. Returns the number of expired tickets.
async fn all_expire_on_time(database: &Database, client: &RmClient, ttl: Duration) -> i64 {
    eventually("nothing is locked", ttl + Duration::from_secs(10), || async {
        client.em(&em("host1")).await.unwrap().locked.is_zero()
    })
    .await;
    let (count, early, late): (i64, f64, f64) = database
        .row(
            "SELECT count(*), coalesce(min(lateness), 0)::float8, coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY lateness), 0)
            FROM (SELECT extract(epoch FROM action_time - expires_at) AS lateness
            FROM linkis_resource_action_record a JOIN got USING (ticket_id) WHERE action = 'expired') AS l",
        )
        .await;
    assert!(early >= 0.0, "{early} s early");
    assert!(late < LATE_MAX.as_secs_f64(), "half of them {late} s late");
    assert_invariants(database, client).await;
    count
}

/// A fresh database that stores the deadlines of all tickets, because their rows are deleted, and an instance that owns the lease.
async fn start_with_deadlines() -> (Database, Instance) {
    let (database, rm) = start().await;
    let store = "CREATE TABLE got (ticket_id uuid NOT NULL, expires_at timestamptz NOT NULL);
        CREATE FUNCTION store() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO got VALUES (NEW.ticket_id, NEW.expires_at);
            RETURN NULL;
        END $$;
        CREATE TRIGGER store AFTER INSERT ON linkis_user_resource_meta_data FOR EACH ROW EXECUTE FUNCTION store()";
    database.execute(store).await;
    database.lease_is_owned().await;
    (database, rm)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_ends_locked_tickets_at_their_deadline() {
    let (database, rm) = start_with_deadlines().await;
    register(&rm.client).await;
    let used = rm.client.request_resource(&short(Duration::from_millis(3500))).await.granted();
    rm.client.resource_inited(&inited(&used, "hadoop", None)).await.unwrap();
    // Near enough for a timer immediately, and far enough for a later sweep.
    for ttl in [1500, 1700, 1900, 3500] {
        for _ in 0..10 {
            rm.client.request_resource(&short(Duration::from_millis(ttl))).await.granted();
        }
    }
    assert_eq!(all_expire_on_time(&database, &rm.client, Duration::from_secs(4)).await, 40);
    assert!(lives(&rm.client, used.ticket_id).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_after_instance_kill_is_punctual() {
    let (database, rm) = start_with_deadlines().await;
    let other = Process::start(&["--database-url", &database.url()]);
    register(&other.client).await;
    for _ in 0..10 {
        other.client.request_resource(&short(Duration::from_millis(1500))).await.granted();
    }
    other.kill();
    assert_eq!(all_expire_on_time(&database, &rm.client, Duration::from_secs(2)).await, 10);
}

/// Expiry and confirmation: the first commit wins, and the other returns an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_against_confirmation_has_one_winner() {
    let (database, rm, second) = two().await;
    register(&rm.client).await;
    let ttl = Duration::from_millis(300);
    let mut engines = JoinSet::new();
    for n in 0..200u64 {
        let (asks, reports) = (rm.client.clone(), second.client.clone());
        engines.spawn(async move {
            let grant = asks.request_resource(&short(ttl)).await.granted();
            // Before, at and after the deadline.
            tokio::time::sleep(ttl - Duration::from_millis(40) + Duration::from_micros(n * 400)).await;
            match reports.resource_inited(&inited(&grant, "hadoop", None)).await {
                Ok(_) => (grant.ticket_id, true),
                Err(error) => {
                    assert_eq!(error.reason().as_deref(), Some("TICKET_NOT_FOUND"), "{error}");
                    assert!(error.to_string().contains("expired"), "{error}");
                    (grant.ticket_id, false)
                }
            }
        });
    }
    let ends = engines.join_all().await;
    for (ticket_id, won) in &ends {
        assert_eq!(lives(&rm.client, *ticket_id).await, *won);
    }
    let winners = ends.iter().filter(|(_, won)| *won).count();
    assert_eq!(assert_invariants(&database, &rm.client).await, winners);
    let expired = database.count("SELECT count(*) FROM linkis_resource_action_record WHERE action = 'expired'").await;
    assert_eq!(usize::try_from(expired).unwrap(), ends.len() - winners);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_includes_tickets_overdue_at_commit() {
    let (database, rm) = start().await;
    register(&rm.client).await;
    let ticket = rm.client.request_resource(&short(Duration::from_secs(600))).await.granted().ticket_id;
    // Long enough for rounds that look back no further than some seconds.
    eventually("several rounds pass", Duration::from_secs(20), || async {
        database
            .count("SELECT count(*) FROM linkis_user_resource_meta_data WHERE now() > locked_time + interval '2 s'")
            .await
            == 1
    })
    .await;
    database.execute("UPDATE linkis_user_resource_meta_data SET expires_at = now() - interval '1 hour'").await;
    eventually("it expires", Duration::from_secs(20), || async { !lives(&rm.client, ticket).await }).await;
    assert_invariants(&database, &rm.client).await;
}

/// Deadlines of very many tickets, one after another: each expires soon after its own, none before, and others are served meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_of_6000_deadlines_is_punctual() {
    const TICKETS: i64 = 6000;
    let (database, rm) = start().await;
    let (crowded, other) = (em("crowded"), em("other"));
    rm.client.register(registration(other.clone(), load(1_000_000, 1_000_000, 1_000_000))).await.unwrap();
    crowd(&database, &rm.client, &crowded, TICKETS, "1 hour").await;
    // Deadlines within ten seconds, in random order. The next sweep of the service finds them well before the first one.
    database.execute("UPDATE linkis_user_resource_meta_data SET expires_at = now() + interval '4 seconds' + id * 7919 % 10000 * interval '1 ms';
        CREATE TABLE due AS SELECT ticket_id, expires_at FROM linkis_user_resource_meta_data").await;
    eventually("all are back", Duration::from_secs(90), || async {
        rm.client.request_resource(&request(&other, "alice", load(1, 1, 1))).await.granted();
        database.count("SELECT count(*) FROM linkis_user_resource_meta_data WHERE em_instance = 'crowded:9102'").await
            == 0
    })
    .await;
    let (expired, first, median, last): (i64, f64, f64, f64) = database.row("SELECT count(*), min(late)::float8, percentile_cont(0.5) WITHIN GROUP (ORDER BY late), max(late)::float8 FROM (
            SELECT extract(epoch FROM action_time - expires_at)::float8 AS late
            FROM linkis_resource_action_record JOIN due USING (ticket_id) WHERE action = 'expired') l").await;
    assert!(expired == TICKETS && first >= 0.0, "{expired} from {first} s");
    // All at the end would be five seconds late, half of them.
    assert!(median < 2.0 && last < 10.0, "half of them {median} s late, the last {last} s");
    assert_invariants(&database, &rm.client).await;
}
