//! Holds: an operator keeps everybody from changing anything about an EM or a user, for a time that ends by itself.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ClientError, RmClient},
    domain::{
        hold::{NewHold, ResourceHold},
        operation::LockKey,
    },
};
use tokio::task::JoinSet;
use tonic::Code;

use crate::harness::*;

/// Longer than any test waits for anything.
const LONG: Duration = Duration::from_secs(60);

fn new(key: LockKey, duration: Duration) -> NewHold {
    NewHold { key, duration, reason: name("books are checked") }
}

fn of_em(host: &str) -> LockKey {
    LockKey::Em(em(host))
}

fn of_user(user: &str) -> LockKey {
    LockKey::User(name(user))
}

/// One who waits for 400 ms, and no longer.
fn hurried(rm: &Instance) -> RmClient {
    crate::harness::hurried(&rm.address, Duration::from_millis(400))
}

#[track_caller]
fn is_locked_out<T: std::fmt::Debug>(answer: Result<T, ClientError>) {
    let error = answer.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::Aborted), Some("LOCK_TIMEOUT")), "{error}");
}

async fn locks(database: &Database) -> i64 {
    database.count("SELECT count(*) FROM linkis_resource_lock").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_blocks_em_until_release_or_deadline() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    for host in ["held", "free"] {
        first.client.register(registration(em(host), load(1000, 1000, 1000))).await.unwrap();
    }
    let ask = || request(&em("held"), "hadoop", load(1, 1, 1));
    let grant = first.client.request_resource(&ask()).await.granted();
    let hold = first.client.hold(&new(of_em("held"), Duration::from_secs(600))).await.unwrap();
    let taken = hold.taken.clone().unwrap();
    assert_eq!((taken.reason.as_str(), taken.by.as_str()), ("books are checked", "anonymous"));
    assert_eq!(taken.until - taken.since, time::Duration::seconds(600));
    for instance in [&first, &second] {
        is_locked_out(hurried(instance).request_resource(&ask()).await);
        is_locked_out(hurried(instance).resource_released(&release(&grant, "hadoop")).await);
        instance.client.request_resource(&request(&em("free"), "hadoop", load(1, 1, 1))).await.granted();
        assert_eq!(instance.client.holds().await.unwrap(), std::slice::from_ref(&hold));
        // Who reads, or would be refused anyway, is not held up.
        instance.client.em(&em("held")).await.unwrap();
        instance.client.request_resource(&request(&em("held"), "hadoop", load(5000, 1, 1))).await.refused();
    }
    let notes = first.client.audit().await.unwrap().notes;
    let note = notes.iter().find(|note| note.contains("host1") || note.contains("held")).expect("a note");
    assert!(note.contains("is held by anonymous until") && note.contains("books are checked"), "{notes:?}");

    // Let go early, those who wait are served at once.
    let client = second.client.clone();
    let waits = tokio::spawn(async move {
        client.request_resource(&request(&em("held"), "patient", load(1, 1, 1))).await.granted();
        Instant::now()
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let start = Instant::now();
    assert!(second.client.release_hold(&of_em("held")).await.unwrap());
    let served = waits.await.unwrap();
    assert!(served > start && served - start < Duration::from_secs(1), "{:?}", served - start);
    assert!(!second.client.release_hold(&of_em("held")).await.unwrap(), "there is none");
    assert_eq!(first.client.holds().await.unwrap(), []);

    // And it ends by itself.
    let before = first.client.hold(&new(of_em("held"), Duration::from_secs(600))).await.unwrap();
    let again = second.client.hold(&new(of_em("held"), Duration::from_millis(1500))).await.unwrap();
    assert!(again.taken.as_ref().unwrap().until < before.taken.unwrap().until, "who holds may say for how long");
    let start = Instant::now();
    is_locked_out(hurried(&first).request_resource(&ask()).await);
    first.client.request_resource(&ask()).await.granted();
    let took = start.elapsed();
    assert!((Duration::from_millis(1300)..Duration::from_millis(3500)).contains(&took), "{took:?}");
    eventually("nothing is left of it", LONG, async || locks(&database).await == 0).await;
    assert_invariants(&database, &first.client).await;
    let told: Vec<String> = sqlx::query_scalar(
        "SELECT concat_ws(' ', action, actor, reason) FROM linkis_resource_action_record
        WHERE action LIKE '%h%ld%' AND em_instance = 'held:9102' ORDER BY id",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    let held = "held anonymous books are checked";
    assert_eq!(told, [held, "hold_ended anonymous", held, held, "hold_ended linkis-rm"]);
}

/// The deadline is kept where all can read it: no instance has to live for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_after_instance_kill_ends_at_deadline() {
    let database = Database::fresh().await;
    let process = Process::start(&["--database-url", &database.url()]);
    process.client.register(registration(em("held"), load(10, 10, 10))).await.unwrap();
    process.client.hold(&new(of_em("held"), Duration::from_secs(5))).await.unwrap();
    process.kill();
    let rm = Instance::start(&database).await;
    // Who is in a hurry finds its connections made.
    rm.client.register(registration(em("free"), load(1, 1, 1))).await.unwrap();
    is_locked_out(hurried(&rm).request_resource(&request(&em("held"), "hadoop", load(1, 1, 1))).await);
    rm.client.request_resource(&request(&em("held"), "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// Nobody needs the key afterwards: still nothing of the hold stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_without_waiting_calls_is_deleted() {
    let (database, rm) = start().await;
    rm.client.hold(&new(of_em("nowhere"), Duration::from_millis(100))).await.unwrap();
    rm.client.hold(&new(of_user("nobody"), Duration::from_millis(100))).await.unwrap();
    assert_eq!(locks(&database).await, 2);
    let users_held = "SELECT count(*) FROM linkis_resource_limit_version WHERE users_held";
    eventually("it is gone, and users are let go", LONG, async || {
        locks(&database).await == 0 && database.count(users_held).await == 0
    })
    .await;
    assert_eq!(rm.client.holds().await.unwrap(), []);
}

/// When a hold is answered, nothing that began before it is under way: neither on an EM, nor for a user, although no rule has users
/// locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_on_two_instances_stops_all_commits() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    for host in ["a", "b"] {
        first.client.register(registration(em(host), load(100_000, 100_000, 100_000))).await.unwrap();
    }
    let stop = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for n in 0..16 {
        let (client, stop) = ([&first, &second][n % 2].client.clone(), stop.clone());
        let (host, user) = (em(["a", "b"][n / 2 % 2]), ["hadoop", "alice"][n / 4 % 2]);
        callers.spawn(async move {
            let mut granted = 0;
            while !stop.load(Ordering::Relaxed) {
                let grant = client.request_resource(&request(&host, user, load(1, 1, 1))).await.granted();
                client.resource_released(&release(&grant, user)).await.unwrap();
                granted += 1;
            }
            granted
        });
    }
    for round in 0..6 {
        let (client, key) = match round % 2 {
            0 => (&first.client, of_user("hadoop")),
            _ => (&second.client, of_em("a")),
        };
        client.hold(&new(key.clone(), Duration::from_secs(600))).await.unwrap();
        // By the history: what is committed later has a later number, but may be told of an earlier time.
        let of = match &key {
            LockKey::User(_) => r#""user" = 'hadoop'"#,
            LockKey::Em(_) => "em_instance = 'a:9102' AND ticket_id IS NOT NULL",
        };
        let sql = format!("SELECT count(*) FROM linkis_resource_action_record WHERE {of}");
        let count = async || -> i64 {
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql.clone())).fetch_one(&database.pool).await.unwrap()
        };
        let others = async || database.count("SELECT count(*) FROM linkis_resource_action_record").await;
        let (held, all) = (count().await, others().await);
        tokio::time::sleep(Duration::from_millis(300)).await;
        eventually("the others go on", LONG, async || others().await > all + 20).await;
        assert_eq!(count().await, held, "{key} is held");
        assert!(first.client.release_hold(&key).await.unwrap());
        eventually("it goes on", LONG, async || count().await > held + 20).await;
    }
    stop.store(true, Ordering::Relaxed);
    let granted: i32 = callers.join_all().await.into_iter().sum();
    println!("{granted} grants meanwhile");
    let users_held = "SELECT count(*) FROM linkis_resource_limit_version WHERE users_held";
    eventually("users are let go", LONG, async || database.count(users_held).await == 0).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_refusal_returns_its_reason() {
    let (database, rm) = start().await;
    let field = async |new: &NewHold| rm.client.hold(new).await.unwrap_err().field().unwrap();
    assert_eq!(field(&new(of_em("a"), Duration::from_secs(601))).await, "duration");
    assert_eq!(field(&new(of_em("a"), Duration::ZERO)).await, "duration");

    // By somebody's hand, and by somebody else.
    database.hold_by_hand(&em("a")).await;
    sqlx::raw_sql(
        "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance, reason, held_by, hold_time, hold_until)
            VALUES ('em', 'linkis-cg-engineconnmanager', 'b:9102', 'mine', 'other', now(), now() + interval '1 minute')",
    )
    .execute(&database.pool)
    .await
    .unwrap();
    for (host, held_by) in [("a", None), ("b", Some("other"))] {
        let error = rm.client.hold(&new(of_em(host), Duration::from_secs(1))).await.unwrap_err();
        let told = (error.code(), error.reason());
        assert_eq!(told, (Some(Code::FailedPrecondition), Some("ALREADY_HELD".to_owned())), "{error}");
        assert_eq!(error.fact("held_by").as_deref(), held_by);
        assert_eq!(error.fact("hold_until").is_some(), held_by.is_some());
    }
    let holds = rm.client.holds().await.unwrap();
    assert_eq!(holds.len(), 2);
    assert_eq!(holds[0], ResourceHold { key: of_em("a"), taken: None });
    // Whoever says so lets go of either.
    assert!(rm.client.release_hold(&of_em("a")).await.unwrap() && rm.client.release_hold(&of_em("b")).await.unwrap());

    let (mut taken, mut refused) = (0, 0);
    for n in 0..102 {
        match rm.client.hold(&new(of_em(&format!("host{n}")), Duration::from_secs(60))).await {
            Ok(_) => taken += 1,
            Err(error) => {
                assert_eq!(error.reason().as_deref(), Some("TOO_MANY_HOLDS"), "{error}");
                assert_eq!(error.fact("max").as_deref(), Some("100"));
                refused += 1;
            }
        }
    }
    assert_eq!((taken, refused, locks(&database).await), (100, 2, 100));
}

/// Whose key is free again does not wait for connections that all readers share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_key_after_release_needs_no_read_connection() {
    let (database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(64, 64, 64))).await.unwrap();
    database.hold_by_hand(&host).await;
    let (asking, asked) = (rm.client.clone(), request(&host, "bob", load(1, 1, 1)));
    let waiting = tokio::spawn(async move { asking.request_resource(&asked).await });
    let is_set_aside = || async { rm.metrics.text().unwrap().contains("linkis_rm_set_aside_operations 1\n") };
    eventually("it waits for the key", Duration::from_secs(10), is_set_aside).await;
    // Each of them has a connection for as long as one waits for a lock, and there are far more of them than connections.
    let mut locks = database.connect().await;
    let lock = "BEGIN; LOCK TABLE linkis_em_report IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(lock).execute(&mut locks).await.unwrap();
    let (turned_away, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
    let reading = client(&rm.address);
    let readers: Vec<_> = (0..600)
        .map(|_| {
            let (client, host) = (reading.clone(), host.clone());
            let (turned_away, stop) = (turned_away.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let read = client.em(&host).await;
                    let is_away = read.is_err_and(|error| error.code() == Some(Code::Unavailable));
                    turned_away.fetch_add(usize::from(is_away), Ordering::Relaxed);
                }
            })
        })
        .collect();
    let has_no_room = || async { turned_away.load(Ordering::Relaxed) > 0 };
    eventually("there are no connections for all readers", Duration::from_secs(30), has_no_room).await;
    database.release_holds().await;
    let granted = tokio::time::timeout(Duration::from_secs(10), waiting).await;
    stop.store(true, Ordering::Relaxed);
    sqlx::raw_sql("ROLLBACK").execute(&mut locks).await.unwrap();
    for reader in readers {
        // The last of its calls may be answered now.
        let _ = reader.await;
    }
    granted.expect("it is granted although others read").unwrap().granted();
    rm.stop().await;
}
