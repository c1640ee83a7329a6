//! Holds: an operator blocks all changes to an EM or a user until a deadline.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    hold::{NewHold, ResourceHold},
    operation::LockKey,
};
use rm_store::waiting::CHANNEL;
use sqlx::postgres::PgListener;
use tokio::task::JoinSet;
use tonic::Code;

use crate::{contention::start_patient, harness::*};

fn new(key: LockKey, duration: Duration) -> NewHold {
    NewHold { key, duration, reason: name("an audit") }
}

fn of_em(named: &str) -> LockKey {
    LockKey::Em(em(named))
}

fn of_user(user: &str) -> LockKey {
    LockKey::User(name(user))
}

async fn stored(database: &Database) -> i64 {
    database.count("SELECT count(*) FROM linkis_resource_hold").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_blocks_em_until_release_or_deadline() {
    let (database, first, second) = two().await;
    register_all(&first.client, ["held", "free"], load(1000, 1000, 1000)).await;
    let wanted = || request(&em("held"), "hadoop", load(1, 1, 1));
    let grant = first.client.request_resource(&wanted()).await.granted();
    let hold = first.client.hold(&new(of_em("held"), Duration::from_secs(600))).await.unwrap();
    let taken = hold.taken.clone().unwrap();
    assert_eq!((taken.reason.as_str(), taken.by.as_str()), ("an audit", "anonymous"));
    assert_eq!(taken.until - taken.since, time::Duration::seconds(600));
    for instance in [&first, &second] {
        assert_contended(instance, instance.client.request_resource(&wanted())).await;
        assert_contended(instance, instance.client.resource_released(&release(&grant, "hadoop"))).await;
        instance.client.request_resource(&request(&em("free"), "hadoop", load(1, 1, 1))).await.granted();
        assert_eq!(instance.client.holds().await.unwrap(), std::slice::from_ref(&hold));
        // Reads and refusals continue.
        instance.client.em(&em("held")).await.unwrap();
        instance.client.request_resource(&request(&em("held"), "hadoop", load(5000, 1, 1))).await.refused();
    }
    let notes = first.client.audit().await.unwrap().notes;
    let note = notes.iter().find(|note| note.contains("host1") || note.contains("held")).expect("a note");
    assert!(note.contains("has a hold of anonymous until") && note.contains("an audit"), "{notes:?}");

    // A release of the hold grants the waiting request.
    let waits = request_in_task(&second.client, request(&em("held"), "patient", load(1, 1, 1)));
    let is_contended = async || second.metric("linkis_rm_contended_operations") == 1.0;
    eventually("the request is contended", LONG, is_contended).await;
    assert!(second.client.release_hold(&of_em("held")).await.unwrap());
    grant_of(waits).await;
    assert!(!second.client.release_hold(&of_em("held")).await.unwrap(), "there is none");
    assert_eq!(first.client.holds().await.unwrap(), []);

    // A hold ends at its deadline.
    let before = first.client.hold(&new(of_em("held"), Duration::from_secs(600))).await.unwrap();
    assert_contended(&first, first.client.request_resource(&wanted())).await;
    let again = second.client.hold(&new(of_em("held"), Duration::from_millis(1500))).await.unwrap();
    assert!(
        again.taken.as_ref().unwrap().until < before.taken.unwrap().until,
        "the owner of a hold can change its deadline"
    );
    let (next, until) =
        (first.client.request_resource(&wanted()).await.granted().ticket_id, again.taken.unwrap().until);
    let early = format!(
        "SELECT count(*) FROM linkis_resource_action_record WHERE ticket_id = '{next}' AND action_time < '{until}'"
    );
    assert_eq!(database.count(early).await, 0, "no grant before the deadline");
    eventually("the hold is deleted", LONG, async || stored(&database).await == 0).await;
    assert_invariants(&database, &first.client).await;
    let got: Vec<String> = database
        .column(
            "SELECT concat_ws(' ', action, actor, reason) FROM linkis_resource_action_record
        WHERE action LIKE '%h%ld%' AND em_instance = 'held:9102' ORDER BY id",
        )
        .await;
    let held = "held anonymous an audit";
    assert_eq!(got, [held, "hold_ended anonymous", held, held, "hold_ended linkis-rm"]);
}

/// The deadline is in the table, so that a hold ends without the instance that wrote it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_after_instance_kill_ends_at_deadline() {
    let database = Database::fresh().await;
    let process = Process::start(&["--database-url", &database.url()]);
    process.client.register(registration(em("held"), load(10, 10, 10))).await.unwrap();
    process.client.hold(&new(of_em("held"), Duration::from_secs(600))).await.unwrap();
    process.kill();
    let rm = Instance::start(&database).await;
    let wanted = request(&em("held"), "hadoop", load(1, 1, 1));
    assert_contended(&rm, rm.client.request_resource(&wanted)).await;
    database.execute("UPDATE linkis_resource_hold SET hold_until = clock_timestamp() + interval '1 s'").await;
    rm.client.request_resource(&wanted).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// A hold is deleted after its deadline, also without a call that waits for its key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_without_waiting_calls_is_deleted() {
    let (database, rm) = start().await;
    rm.client.hold(&new(of_em("nowhere"), Duration::from_millis(100))).await.unwrap();
    rm.client.hold(&new(of_user("unknown"), Duration::from_millis(100))).await.unwrap();
    assert_eq!(database.recorded("held").await, 2);
    eventually("both holds are deleted", LONG, async || stored(&database).await == 0).await;
    assert_eq!(rm.client.holds().await.unwrap(), []);
}

/// When ResourceHold returns, no earlier operation on the EM or the user is in progress, although no limit counts by user.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_on_two_instances_stops_all_commits() {
    let (database, first, second) = two().await;
    register_all(&first.client, ["a", "b"], load(100_000, 100_000, 100_000)).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for n in 0..16 {
        let (client, stop) = ([&first, &second][n % 2].client.clone(), stop.clone());
        let (em1, user) = (em(["a", "b"][n / 2 % 2]), ["hadoop", "alice"][n / 4 % 2]);
        callers.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let grant = client.request_resource(&request(&em1, user, load(1, 1, 1))).await.granted();
                client.resource_released(&release(&grant, user)).await.unwrap();
            }
        });
    }
    for round in 0..6 {
        let (client, key) = match round % 2 {
            0 => (&first.client, of_user("hadoop")),
            _ => (&second.client, of_em("a")),
        };
        client.hold(&new(key.clone(), Duration::from_secs(600))).await.unwrap();
        // By the ids of history lines: a later commit has a later id, but its time may be earlier.
        let of = match &key {
            LockKey::User(_) => r#""user" = 'hadoop'"#,
            LockKey::Em(_) => "em_instance = 'a:9102' AND ticket_id IS NOT NULL",
        };
        let sql = format!("SELECT count(*) FROM linkis_resource_action_record WHERE {of}");
        let count = async || -> i64 { database.scalar(sql.clone()).await };
        let others = async || database.count("SELECT count(*) FROM linkis_resource_action_record").await;
        let (held, all) = (count().await, others().await);
        eventually("other grants", LONG, async || others().await > all + 50).await;
        assert_eq!(count().await, held, "{key} is held");
        assert!(first.client.release_hold(&key).await.unwrap());
        eventually("grants continue", LONG, async || count().await > held + 20).await;
    }
    stop.store(true, Ordering::Relaxed);
    callers.join_all().await;
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
}

/// A batch of a user, in progress when the hold is requested, ends before ResourceHold returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_of_user_waits_for_batch_in_progress() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    let mut row = database.transaction("SELECT FROM linkis_em_resource_meta_data FOR UPDATE").await;
    let call = request_in_task(&rm.client, request(&em("host1"), "hadoop", load(1, 1, 1)));
    eventually("the batch waits for the row", LONG, || is_waiting(&database)).await;
    rm.client.hold(&new(of_user("hadoop"), Duration::from_secs(600))).await.unwrap();
    execute(&mut row, "ROLLBACK").await;
    // Its batch follows on the same EM.
    rm.client.request_resource(&request(&em("host1"), "alice", load(1, 1, 1))).await.granted();
    let tickets = rm.client.tickets(None).await.unwrap();
    assert!(tickets.iter().all(|ticket| ticket.user.as_str() == "alice"), "{tickets:?}");
    assert!(rm.client.release_hold(&of_user("hadoop")).await.unwrap());
    grant_of(call).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_refusal_returns_its_reason() {
    let (database, rm) = start().await;
    let field = async |new: &NewHold| rm.client.hold(new).await.unwrap_err().field().unwrap();
    assert_eq!(field(&new(of_em("a"), Duration::from_secs(601))).await, "duration");
    assert_eq!(field(&new(of_em("a"), Duration::ZERO)).await, "duration");

    // A hold by a row without an owner, and a hold of another caller.
    database.hold_by_hand(&em("a")).await;
    database.execute("INSERT INTO linkis_resource_hold (scope, em_application_name, em_instance, reason, held_by, hold_time, hold_until)
            VALUES ('em', 'linkis-cg-engineconnmanager', 'b:9102', 'mine', 'other', now(), now() + interval '1 minute')").await;
    for (host, held_by) in [("a", None), ("b", Some("other"))] {
        let error = rm.client.hold(&new(of_em(host), Duration::from_secs(1))).await.unwrap_err();
        let got = (error.code(), error.reason());
        assert_eq!(got, (Some(Code::FailedPrecondition), Some("ALREADY_HELD".to_owned())), "{error}");
        assert_eq!(error.fact("held_by").as_deref(), held_by);
        assert_eq!(error.fact("hold_until").is_some(), held_by.is_some());
    }
    let holds = rm.client.holds().await.unwrap();
    assert_eq!(holds.len(), 2);
    assert_eq!(holds[0], ResourceHold { key: of_em("a"), taken: None });
    // Any operator can end either.
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
    assert_eq!((taken, refused, stored(&database).await), (100, 2, 100));
}

fn anywhere(user: &str) -> ResourceRequest {
    ResourceRequest { em: None, ..patient(&em("held"), user, load(1, 1, 1)) }
}

/// A request that may wait enters the queue at a held EM, and requests behind it keep their order across the hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_on_held_em_waits_in_queue() {
    let (database, first, second) = two().await;
    register_all(&first.client, ["held", "free"], load(10, 10, 10)).await;
    first.client.hold(&new(of_em("held"), Duration::from_secs(600))).await.unwrap();
    // An operation that cannot wait in a queue is contended, and requests enter the queue beside it.
    let blocked = request_in_task(&first.client, request(&em("held"), "hadoop", load(1, 1, 1)));
    let is_contended = async || first.metric("linkis_rm_contended_operations") == 1.0;
    eventually("the request is contended", LONG, is_contended).await;
    let large = enqueue(&first.client, patient(&em("held"), "large", load(9, 9, 9))).await;
    let small = enqueue(&second.client, patient(&em("held"), "small", load(9, 9, 9))).await;
    let listed = second.client.waiting().await.unwrap();
    let ahead: Vec<_> = listed.iter().map(|waiting| (waiting.user.as_str(), waiting.ahead.clone())).collect();
    let of = |number| [("em=linkis-cg-engineconnmanager/held:9102".to_owned(), number)].into();
    assert_eq!(ahead, [("large", of(0)), ("small", of(1))]);
    // A request for any EM is granted elsewhere.
    assert_eq!(grant_of(request_in_task(&second.client, anywhere("hadoop"))).await.em, em("free"));

    assert!(second.client.release_hold(&of_em("held")).await.unwrap());
    let granted = grant_of(large).await;
    // The second one reserves what is left.
    blocked.await.unwrap().refused();
    assert_eq!(first.client.waiting().await.unwrap().len(), 1, "no capacity for the second one");
    first.client.resource_released(&release(&granted, "large")).await.unwrap();
    grant_of(small).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 2);
}

/// A request that waits for a contended EM enters the queue when the EM is held from then on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_of_contended_em_queues_its_requests() {
    let (database, rm) = start_with_em(em("held"), load(10, 10, 10)).await;
    register_all(&rm.client, ["other"], load(10, 10, 10)).await;
    rm.client.hold(&new(of_em("other"), Duration::from_secs(600))).await.unwrap();
    database.hold_by_hand(&em("held")).await;
    let call = request_in_task(&rm.client, patient(&em("held"), "hadoop", load(1, 1, 1)));
    eventually("it is contended", LONG, async || rm.metric("linkis_rm_contended_operations") == 1.0).await;
    let held = r#"WITH contended AS (DELETE FROM linkis_resource_lock)
        INSERT INTO linkis_resource_hold
        SELECT scope, "user", em_application_name, 'held:9102', reason, held_by, hold_time, hold_until FROM linkis_resource_hold"#;
    database.execute(held).await;
    eventually("it waits", LONG, async || rm.client.waiting().await.unwrap().len() == 1).await;
    assert!(rm.client.release_hold(&of_em("held")).await.unwrap());
    grant_of(call).await;
}

/// The end of a hold at its deadline grants the waiting requests; a request whose deadline is earlier states the hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_at_deadline_grants_waiting_requests() {
    let (database, rm) = start_with_em(em("held"), load(10, 10, 10)).await;
    rm.client.hold(&new(of_em("held"), Duration::from_secs(600))).await.unwrap();
    let short = ResourceRequest { wait_timeout: Duration::from_secs(3), ..patient(&em("held"), "a", load(1, 1, 1)) };
    let refusal = rm.client.request_resource(&short).await.refused();
    assert!(
        refusal.reason.contains("is held by anonymous until") && refusal.reason.contains("an audit"),
        "{refusal:?}"
    );
    assert!(!refusal.never_fits);
    // A request that never fits is refused at once, whether its EM is held or not.
    let too_large = patient(&em("held"), "a", load(11, 1, 1));
    assert!(rm.client.request_resource(&too_large).await.refused().never_fits);
    assert_wait_queues_empty(&rm.client).await;
    let mut listener = PgListener::connect_with(&database.pool).await.unwrap();
    listener.listen(CHANNEL).await.unwrap();
    // All EMs are held.
    let call = enqueue(&rm.client, anywhere("hadoop")).await;
    let again = rm.client.hold(&new(of_em("held"), Duration::from_millis(500))).await.unwrap();
    let (grant, until) = (grant_of(call).await.ticket_id, again.taken.unwrap().until);
    let early = format!(
        "SELECT count(*) FROM linkis_resource_action_record WHERE ticket_id = '{grant}' AND action_time < '{until}'"
    );
    assert_eq!(database.count(early).await, 0, "no grant before the deadline");
    tokio::time::timeout(LONG, listener.recv()).await.expect("the end of the hold notifies instances").unwrap();
    assert_invariants(&database, &rm.client).await;
}

/// A hold of a user delays a forced release, but not the end of all tickets of an EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_of_user_does_not_keep_tickets_of_ended_ems() {
    let (database, rm) = start_with_em(em("called"), load(8, 4, 4)).await;
    for named in ["missing", "alive"] {
        rm.client.register(registration(em(named), load(8, 4, 4))).await.unwrap();
    }
    for named in ["called", "missing", "alive"] {
        rm.client.request_resource(&request(&em(named), "hadoop", load(1, 1, 1))).await.granted();
    }
    for key in [of_user("hadoop"), of_em("missing")] {
        rm.client.hold(&new(key, Duration::from_secs(600))).await.unwrap();
    }
    let left = async || rm.client.tickets(None).await.unwrap().into_iter().map(|ticket| ticket.em).collect::<Vec<_>>();
    let alive = rm.client.tickets(None).await.unwrap().into_iter().find(|ticket| ticket.em == em("alive")).unwrap();
    assert_contended(&rm, rm.client.force_release(alive.id, "an engine hangs")).await;
    assert_contended(&rm, rm.client.unregister(&em("missing"))).await;
    assert_eq!(rm.client.unregister(&em("called")).await.unwrap(), 1);
    assert_eq!(left().await.len(), 2);
    database.execute("DELETE FROM linkis_em_resource_meta_data WHERE em_instance LIKE 'missing%'").await;
    rm.client.repair().await.unwrap();
    assert_eq!(left().await, [em("alive")]);
}

/// Placement uses an EM again as soon as its hold has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_after_hold_uses_em_at_once() {
    let (_database, rm) = start().await;
    register_all(&rm.client, ["held", "small"], load(10, 10, 10)).await;
    rm.client.request_resource(&request(&em("small"), "hadoop", load(5, 5, 5))).await.granted();
    for end_at_deadline in [false, true] {
        let duration = if end_at_deadline { Duration::from_millis(50) } else { Duration::from_secs(600) };
        rm.client.hold(&new(of_em("held"), duration)).await.unwrap();
        if !end_at_deadline {
            let elsewhere = rm.client.request_resource(&anywhere("hadoop")).await.granted();
            assert_eq!(elsewhere.em, em("small"));
            assert!(rm.client.release_hold(&of_em("held")).await.unwrap());
            assert_eq!(rm.client.request_resource(&anywhere("hadoop")).await.granted().em, em("held"));
        } else {
            let is_used = async || rm.client.request_resource(&anywhere("hadoop")).await.granted().em == em("held");
            eventually("the EM is used", LONG, is_used).await;
        }
    }
}

/// The end of a hold grants a crowd that waits over one connection; the instance of another crowd dies, and leaves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_end_grants_crowd_on_one_connection() {
    const CROWD: usize = 500;
    let database = Database::fresh().await;
    let dies = Process::start(&["--database-url", &database.url()]);
    let rm = Instance::start(&database).await;
    rm.client.register(registration(em("held"), load(2000, 2000, 2000))).await.unwrap();
    rm.client.hold(&new(of_em("held"), Duration::from_secs(600))).await.unwrap();
    let crowd = |client: &RmClient| -> Vec<Call> {
        (0..CROWD)
            .map(|n| request_in_task(client, patient(&em("held"), &format!("user{}", n % 20), load(1, 1, 1))))
            .collect()
    };
    let (killed, calls) = (crowd(&dies.client), crowd(&rm.client));
    database.waiting(2 * CROWD as i64).await;
    killed.iter().for_each(Call::abort);
    dies.kill();
    assert!(rm.client.release_hold(&of_em("held")).await.unwrap());
    for call in calls {
        grant_of(call).await;
    }
    assert_wait_queues_empty(&rm.client).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, CROWD);
}

/// A request of a held user waits at its user alone, and keeps no capacity from others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_of_held_user_blocks_no_other_user() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    rm.client.hold(&new(of_user("hadoop"), Duration::from_secs(600))).await.unwrap();
    let named = enqueue(&rm.client, patient(&em("host1"), "hadoop", load(6, 6, 6))).await;
    let any = enqueue(&rm.client, anywhere("hadoop")).await;
    for waiting in rm.client.waiting().await.unwrap() {
        assert_eq!(waiting.ahead.keys().collect::<Vec<_>>(), ["user=hadoop"]);
    }
    let other = rm.client.request_resource(&request(&em("host1"), "alice", load(5, 5, 5))).await.granted();
    assert!(rm.client.release_hold(&of_user("hadoop")).await.unwrap());
    eventually("the first waits for the EM", LONG, async || {
        let waiting = rm.client.waiting().await.unwrap();
        waiting.iter().any(|waiting| waiting.ahead.keys().any(|key| key.starts_with("em=")))
    })
    .await;
    rm.client.resource_released(&release(&other, "alice")).await.unwrap();
    grant_of(named).await;
    grant_of(any).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

/// A user is held while the user's request waits for an EM: the request gives way to others, and keeps its position.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_user_gives_way_to_later_requests() {
    let (database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    let full = rm.client.request_resource(&request(&em("host1"), "first", load(10, 10, 10))).await.granted();
    let held = enqueue(&rm.client, patient(&em("host1"), "hadoop", load(10, 10, 10))).await;
    let later = enqueue(&rm.client, patient(&em("host1"), "alice", load(10, 10, 10))).await;
    rm.client.hold(&new(of_user("hadoop"), Duration::from_secs(600))).await.unwrap();
    rm.client.resource_released(&release(&full, "first")).await.unwrap();
    let granted = grant_of(later).await;
    rm.client.resource_released(&release(&granted, "alice")).await.unwrap();
    woken(&rm, held, async { assert!(rm.client.release_hold(&of_user("hadoop")).await.unwrap()) }).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// A call whose contended key becomes free needs no connection of the shared readers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_key_after_release_needs_no_read_connection() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(64, 64, 64)).await;
    database.hold_by_hand(&em1).await;
    let waiting = request_in_task(&rm.client, request(&em1, "bob", load(1, 1, 1)));
    eventually("the request is contended", LONG, async || rm.metric("linkis_rm_contended_operations") == 1.0).await;
    // Each reader uses a connection until the lock timeout, and there are far more readers than connections.
    let mut locks = database.transaction("LOCK TABLE linkis_em_report IN ACCESS EXCLUSIVE MODE").await;
    let (rejected, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
    let reading = client(&rm.address);
    let readers: Vec<_> = (0..600)
        .map(|_| {
            let (client, em1) = (reading.clone(), em1.clone());
            let (rejected, stop) = (rejected.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let read = client.em(&em1).await;
                    let is_away = read.is_err_and(|error| error.code() == Some(Code::Unavailable));
                    rejected.fetch_add(usize::from(is_away), Ordering::Relaxed);
                }
            })
        })
        .collect();
    let is_full = || async { rejected.load(Ordering::Relaxed) > 0 };
    eventually("readers are rejected", Duration::from_secs(30), is_full).await;
    database.release_holds().await;
    let granted = tokio::time::timeout(Duration::from_secs(10), waiting).await;
    stop.store(true, Ordering::Relaxed);
    execute(&mut locks, "ROLLBACK").await;
    for reader in readers {
        // The last call of a reader may succeed.
        let _ = reader.await;
    }
    granted.expect("granted beside the readers").unwrap().granted();
    rm.stop().await;
}

/// A hold that waits for its key delays no change of another hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_that_waits_delays_no_other_change() {
    let (database, rm) = start_with_em(em("free"), load(10, 10, 10)).await;
    rm.client.register(registration(em("locked"), load(10, 10, 10))).await.unwrap();
    rm.client.hold(&new(of_em("free"), Duration::from_secs(600))).await.unwrap();
    let mut holder = database.transaction_that_holds(&em("locked")).await;
    let client = rm.client.clone();
    let waits = tokio::spawn(async move { client.hold(&new(of_em("locked"), Duration::from_secs(600))).await });
    eventually("the hold waits for the lock", LONG, || is_waiting(&database)).await;
    let other = hurried(&rm.address, Duration::from_secs(20));
    assert!(other.release_hold(&of_em("free")).await.unwrap());
    assert!(!waits.is_finished());
    execute(&mut holder, "ROLLBACK").await;
    waits.await.unwrap().unwrap();
}

/// While a hold of a user waits for a reader of the limits, grants continue between its attempts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_of_user_beside_reader_of_limits_lets_grants_pass() {
    let (database, rm, client) = start_patient().await;
    rm.client.register(registration(em("a"), load(1000, 1000, 1000))).await.unwrap();
    let mut reader = database.connect().await;
    execute(&mut reader, "BEGIN").await;
    execute(&mut reader, "SELECT count(*) FROM linkis_resource_limit_version").await;
    let waits = tokio::spawn(async move { client.hold(&new(of_user("alice"), Duration::from_secs(600))).await });
    eventually("the hold waits for the fence", LONG, || is_waiting(&database)).await;
    let grants = async {
        for _ in 0..100 {
            let grant = rm.client.request_resource(&request(&em("a"), "hadoop", load(1, 1, 1))).await.granted();
            rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        }
    };
    grants.await;
    assert!(!waits.is_finished(), "grants pass while the hold waits");
    execute(&mut reader, "ROLLBACK").await;
    if waits.await.unwrap().is_ok() {
        rm.client.release_hold(&of_user("alice")).await.unwrap();
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}
