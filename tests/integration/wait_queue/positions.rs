//! Positions in the wait queue that belong to request ids: takeovers, and callers that are gone for a while.

use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::*;

pub fn named(id: &str, request: ResourceRequest) -> ResourceRequest {
    ResourceRequest { request_id: Some(id.into()), ..request }
}

/// Returns the users of the waiting requests, in the order of their positions.
pub async fn users(client: &RmClient) -> Vec<String> {
    client.waiting().await.unwrap().into_iter().map(|waiting| waiting.user.to_string()).collect()
}

async fn code_of(call: Call) -> (Code, String) {
    let answer = tokio::time::timeout(LONG, call).await.expect("a reply").unwrap();
    let error = answer.expect_err("the call fails");
    (error.code().unwrap(), error.reason().unwrap_or_default())
}

/// Forwards connections to an instance.
pub struct Forwarder {
    task: tokio::task::JoinHandle<()>,
    silenced: CancellationToken,
}

impl Forwarder {
    /// Starts a forwarder, and returns a client that uses it.
    pub async fn start(address: &str) -> (RmClient, Self) {
        let (listener, target) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), address.replace("http://", ""));
        let own = format!("http://{}", listener.local_addr().unwrap());
        let silenced = CancellationToken::new();
        let until = silenced.clone();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut from, _)) = listener.accept().await {
                let (mut to, until) = (TcpStream::connect(&target).await.unwrap(), until.clone());
                connections.spawn(async move {
                    let copied = tokio::io::copy_bidirectional(&mut from, &mut to);
                    if until.run_until_cancelled(copied).await.is_none() {
                        std::future::pending::<()>().await;
                    }
                });
            }
        });
        (hurried(&own, LONG * 9), Self { task, silenced })
    }

    /// Breaks the connections without a word of HTTP/2.
    pub fn abort(&self) {
        self.task.abort();
    }

    /// Passes no more bytes, and closes no connection.
    fn silence(&self) {
        self.silenced.cancel();
    }
}

/// A repeated request continues at the position of its earlier call, on any instance, and that call ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_is_taken_over_by_repeated_request() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let repeated = named("r1", patient(&em1, "hadoop", cpu(10)));
    let mut call = enqueue(&first.client, repeated.clone()).await;
    let ticket_id = first.client.waiting().await.unwrap()[0].ticket_id;
    let behind = enqueue(&second.client, patient(&em1, "other", cpu(10))).await;
    for rm in [&second, &first, &first, &second] {
        let again = request_in_task(&rm.client, repeated.clone());
        assert_eq!(code_of(call).await, (Code::Aborted, "POSITION_TAKEN_OVER".into()));
        call = again;
        assert_eq!(users(&rm.client).await, ["hadoop", "other"]);
    }
    assert_eq!(database.count("SELECT count(*) FROM linkis_resource_waiting WHERE claim IS NOT NULL").await, 2);
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    let granted = grant_of(call).await;
    assert_eq!(granted.ticket_id, ticket_id);
    assert_eq!(first.client.request_resource(&repeated).await.granted().ticket_id, ticket_id, "the id has one ticket");
    first.client.resource_released(&release(&granted, "hadoop")).await.unwrap();
    grant_of(behind).await;
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// One of two calls with the same request id, sent at once to one instance, is the waiter, and freed capacity wakes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_of_calls_sent_at_once_is_woken() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 40).await;
    let mut calls = JoinSet::new();
    for number in 0..40 {
        let repeated = named(&format!("r{number}"), patient(&em1, "hadoop", cpu(1)));
        let both = [(); 2].map(|()| request_in_task(&rm.client, repeated.clone()));
        for call in both {
            calls.spawn(call);
        }
    }
    for _ in 0..40 {
        let ended = tokio::time::timeout(LONG, calls.join_next()).await.expect("one of two calls ends");
        let error = ended.unwrap().unwrap().unwrap().unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("POSITION_TAKEN_OVER"));
    }
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    for _ in 0..40 {
        let granted = tokio::time::timeout(LONG, calls.join_next()).await.expect("the other call is granted");
        granted.unwrap().unwrap().unwrap().granted();
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 40);
}

/// A call enters the queue again if its position was taken over by a call that has left since, and it got no notification. A late
/// notification does not end it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_is_left_by_later_call_before_earlier_one_knows() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&second.client, "host1", 10).await;
    let repeated = named("r1", patient(&em1, "hadoop", cpu(10)));
    let earlier = enqueue(&first.client, repeated.clone()).await;
    let position = "SELECT concat_ws(' ', ticket_id, claim, instance_id) FROM linkis_resource_waiting";
    let position: String = database.scalar(position).await;
    let [ticket_id, claim, instance] = position.split(' ').collect::<Vec<_>>()[..] else { panic!("{position}") };
    let listener = format!(
        "SELECT coalesce(max(listener_pid), 0)::bigint FROM linkis_rm_instance WHERE instance_id = '{instance}'"
    );
    eventually("the listener is known", LONG, async || database.scalar::<i64>(&listener).await > 0).await;
    let listener: i64 = database.scalar(&listener).await;
    first.freeze(true);
    database.execute(&format!("SELECT pg_terminate_backend({listener}, 60000)")).await;
    let of_first = format!("SELECT count(*) FROM linkis_resource_waiting WHERE instance_id = '{instance}'");
    let later = request_in_task(&second.client, repeated);
    eventually("the position is taken over", LONG, async || database.count(&of_first).await == 0).await;
    later.abort();
    let rows = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("the later call has left", LONG, async || database.count(rows).await == 0).await;
    first.freeze(false);
    eventually("the earlier call waits again", LONG, async || database.count(&of_first).await == 1).await;
    let ended = format!(
        "SELECT pg_notify('linkis_rm_freed', json_build_object('anywhere', false, 'wait_keys', '{{}}'::json, 'ems', '[]'::json,
            'calls', json_build_array(json_build_array('{ticket_id}', '{claim}')))::text)"
    );
    database.execute(&ended).await;
    let checks = || first.counter("linkis_rm_waiting_checks_total");
    let before = checks();
    for _ in 0..100 {
        first.client.waiting().await.unwrap();
    }
    assert!(checks() - before < 20, "{} checks", checks() - before);
    second.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(earlier).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// A call whose position was taken over returns the grant of the later call, if it learns of both at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_is_granted_to_later_call_before_earlier_one_knows() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&second.client, "host1", 10).await;
    let repeated = named("r1", patient(&em1, "hadoop", cpu(10)));
    let earlier = enqueue(&first.client, repeated.clone()).await;
    first.freeze(true);
    second.client.resource_released(&release(&grant, "first")).await.unwrap();
    let granted = second.client.request_resource(&repeated).await.granted();
    first.freeze(false);
    assert_eq!(grant_of(earlier).await.ticket_id, granted.ticket_id);
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// The deadline of a call that takes a position over is its own: it begins when that call does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_has_deadline_of_its_call() {
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let repeated = named("r1", patient(&em1, "hadoop", cpu(10)));
    let earlier = enqueue(&rm.client, repeated.clone()).await;
    let old = "SELECT count(*) FROM linkis_resource_waiting WHERE waiting_since < clock_timestamp() - interval '2 s'";
    eventually("the request has waited", LONG, async || database.count(old).await == 1).await;
    let _later = request_in_task(&rm.client, repeated);
    assert_eq!(code_of(earlier).await.1, "POSITION_TAKEN_OVER");
    let seconds: f64 = database
        .scalar("SELECT extract(epoch FROM wait_until - waiting_since)::float8 FROM linkis_resource_waiting")
        .await;
    assert!(seconds > LONG.as_secs_f64() + 1.9, "{seconds} s");
}

/// A dry run with the request id of a waiting request is decided at the position of that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_decides_dry_run_of_its_request_id() {
    let (_database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let repeated = named("r1", patient(&em1, "hadoop", cpu(10)));
    let _call = enqueue(&rm.client, repeated.clone()).await;
    rm.client.dry_run(&repeated).await.refused();
    let other = named("r1", patient(&em1, "hadoop", cpu(5)));
    let error = rm.client.dry_run(&other).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("REQUEST_ID_REUSED"));
}

/// A call takes over a position whose entry another transaction moves at the same moment, and leaves no other entry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_is_taken_over_while_its_entry_moves() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let repeated = named("r1", patient(&em1, "hadoop", cpu(10)));
    let _earlier = enqueue(&rm.client, repeated.clone()).await;
    let mut mover = database.transaction("UPDATE linkis_resource_waiting SET em_instance = 'host2'").await;
    let later = request_in_task(&rm.client, repeated);
    eventually("the later call waits for the row", LONG, async || is_waiting(&database).await).await;
    let moved = "WITH moved AS (DELETE FROM linkis_resource_waiting_entry RETURNING *)
        INSERT INTO linkis_resource_waiting_entry
        SELECT wait_key, ticket_id, instance_id, position, resource_type, resource, wait_until, is_short, sha256('moved')
        FROM moved";
    execute(&mut mover, moved).await;
    execute(&mut mover, "COMMIT").await;
    let entries = "SELECT count(*) FROM linkis_resource_waiting_entry";
    let is_taken =
        async || database.count("SELECT count(*) FROM linkis_resource_waiting WHERE em_instance <> 'host2'").await == 1;
    eventually("the position is taken over", LONG, is_taken).await;
    assert_eq!(database.count(entries).await, 1);
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(later).await;
    assert_eq!(database.count(entries).await, 0);
}

/// The position of a caller whose connection is silent is kept, as after a connection that closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_of_silent_caller_is_kept() {
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let (through, connection) = Forwarder::start(&rm.address).await;
    let waits = ResourceRequest { wait_timeout: LONG * 9, ..patient(&em1, "silent", cpu(10)) };
    let _lost = enqueue(&through, named("r1", waits)).await;
    // The client's keep-alive ping is read meanwhile, which the HTTP/2 library does not count.
    tokio::time::sleep(Duration::from_secs(12)).await;
    connection.silence();
    let kept = "SELECT count(*) FROM linkis_resource_waiting WHERE kept_until IS NOT NULL AND claim IS NULL";
    eventually("the position is kept", 2 * LONG, async || database.count(kept).await == 1).await;
}

/// A repetition that does not wait is decided at the position, and takes nothing over. Another body is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_is_kept_beside_call_that_does_not_wait() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let repeated = named("r1", patient(&em1, "hadoop", cpu(10)));
    let call = enqueue(&first.client, repeated.clone()).await;
    let _behind = enqueue(&second.client, patient(&em1, "other", cpu(10))).await;
    let hurried = ResourceRequest { wait_timeout: Duration::ZERO, ..repeated.clone() };
    second.client.request_resource(&hurried).await.refused();
    let other = named("r1", patient(&em1, "hadoop", cpu(5)));
    let error = second.client.request_resource(&other).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::AlreadyExists), Some("REQUEST_ID_REUSED")));
    assert_eq!(users(&first.client).await, ["hadoop", "other"]);
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    let granted = grant_of(call).await;
    assert_eq!(second.client.request_resource(&hurried).await.granted().ticket_id, granted.ticket_id);
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// A caller whose connection broke keeps its position for a while, and no capacity: others pass. A cancelled call leaves at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_of_absent_caller_is_kept_without_capacity() {
    let (database, first, second) = two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let (through, connection) = Forwarder::start(&first.address).await;
    let repeated = named("r1", patient(&em1, "absent", cpu(10)));
    let _lost = enqueue(&through, repeated.clone()).await;
    let cancelled = enqueue(&first.client, named("r2", patient(&em1, "cancelled", cpu(10)))).await;
    let passing = enqueue(&second.client, patient(&em1, "passing", cpu(10))).await;
    let behind = enqueue(&second.client, patient(&em1, "behind", cpu(10))).await;
    // The entries of an instance without waiters count for a few seconds only.
    let (other, _held) = full_em(&first.client, "host2", 10).await;
    let _stays = enqueue(&first.client, patient(&other, "stays", cpu(10))).await;
    cancelled.abort();
    connection.abort();
    let is_absent = async || {
        let waiting = first.client.waiting().await.unwrap();
        waiting.len() == 4 && waiting[0].kept_until.is_some_and(|until| until <= waiting[0].wait_until)
    };
    eventually("the caller is absent, and the cancelled request is gone", LONG, is_absent).await;
    assert_eq!(users(&second.client).await, ["absent", "passing", "behind", "stays"]);
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    let grant = grant_of(passing).await;
    let back = request_in_task(&second.client, repeated);
    let is_back = async || first.client.waiting().await.unwrap()[0].kept_until.is_none();
    eventually("the caller is back", LONG, is_back).await;
    assert_eq!(users(&first.client).await, ["absent", "behind", "stays"]);
    second.client.resource_released(&release(&grant, "passing")).await.unwrap();
    let grant = grant_of(back).await;
    second.client.resource_released(&release(&grant, "absent")).await.unwrap();
    grant_of(behind).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 2);
}

/// A user's kept positions are bounded: the requests of further absent callers leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kept_positions_of_user_are_bounded() {
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let (through, connection) = Forwarder::start(&rm.address).await;
    let mut lost = Vec::new();
    for (user, request_id) in [("absent", "r1"), ("absent", "r2"), ("absent", "r3"), ("other", "r1")] {
        lost.push(enqueue(&through, named(request_id, patient(&em1, user, cpu(10)))).await);
    }
    database
        .execute(
            r#"WITH ids AS MATERIALIZED (SELECT n, gen_random_uuid() AS id FROM generate_series(1, 998) n)
            INSERT INTO linkis_resource_waiting SELECT r.* FROM ids JOIN linkis_resource_waiting w ON w."user" = 'absent' AND w.request_id = 'r1'
            CROSS JOIN LATERAL jsonb_populate_record(w, jsonb_build_object('ticket_id', id, 'request_id', 'kept' || n, 'claim', NULL,
                'kept_until', clock_timestamp() + interval '1 min', 'position', substring(w.position FOR 10) || uuid_send(id))) r"#,
        )
        .await;
    connection.abort();
    let kept = |user: &str| {
        format!(r#"SELECT count(*) FROM linkis_resource_waiting WHERE "user" = '{user}' AND kept_until IS NOT NULL"#)
    };
    eventually("the others leave", LONG, async || {
        database.count("SELECT count(*) FROM linkis_resource_waiting WHERE claim IS NOT NULL").await == 0
    })
    .await;
    assert_eq!((database.count(&kept("absent")).await, database.count(&kept("other")).await), (1000, 1));
    assert_eq!(database.count("SELECT count(*) FROM linkis_resource_waiting").await, 1001);
}

/// A row that another program has locked delays no sweep of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sweep_passes_locked_request() {
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let (through, connection) = Forwarder::start(&rm.address).await;
    let mut lost = Vec::new();
    for user in ["free1", "free2", "locked"] {
        lost.push(enqueue(&through, named("r1", patient(&em1, user, cpu(10)))).await);
    }
    connection.abort();
    let absent = "SELECT count(*) FROM linkis_resource_waiting WHERE kept_until IS NOT NULL";
    eventually("the callers are absent", LONG, async || database.count(absent).await == 3).await;
    database.execute("UPDATE linkis_resource_waiting SET kept_until = clock_timestamp()").await;
    let mut holder =
        database.transaction(r#"SELECT 1 FROM linkis_resource_waiting WHERE "user" = 'locked' FOR UPDATE"#).await;
    let users = r#"SELECT "user" FROM linkis_resource_waiting ORDER BY 1"#;
    eventually("the others are swept", LONG, async || database.column::<String>(users).await == ["locked"]).await;
    execute(&mut holder, "ROLLBACK").await;
    assert_wait_queues_empty(&rm.client).await;
}

/// A position of an absent caller ends at its time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_of_absent_caller_ends() {
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let (through, connection) = Forwarder::start(&rm.address).await;
    let _lost = enqueue(&through, named("r1", patient(&em1, "absent", cpu(10)))).await;
    connection.abort();
    let absent = "SELECT count(*) FROM linkis_resource_waiting WHERE kept_until IS NOT NULL AND claim IS NULL";
    eventually("the caller is absent", LONG, async || database.count(absent).await == 1).await;
    database.execute("UPDATE linkis_resource_waiting SET kept_until = clock_timestamp()").await;
    assert_wait_queues_empty(&rm.client).await;
    let rows = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("the row is deleted", LONG, async || database.count(rows).await == 0).await;
}

/// The callers of a killed instance and of a stopping instance keep their positions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_outlive_their_instances() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let mut others: Vec<Process> = (0..2).map(|_| Process::start(&["--database-url", &database.url()])).collect();
    let repeated = |number: usize| named(&format!("r{number}"), patient(&em1, &format!("user{number}"), cpu(10)));
    let mut calls = Vec::new();
    for number in 0..12 {
        calls.push(enqueue(&others[number % 2].client, repeated(number)).await);
    }
    let before = users(&rm.client).await;
    others.pop().unwrap().kill();
    let stopping = others.pop().unwrap();
    tokio::task::spawn_blocking(move || stopping.stop()).await.unwrap();
    let again: Vec<Call> = (0..12).rev().map(|number| request_in_task(&rm.client, repeated(number))).collect();
    let present = "SELECT count(*) FROM linkis_resource_waiting WHERE kept_until IS NULL";
    let of_rm = "SELECT count(DISTINCT instance_id) FROM linkis_resource_waiting";
    let is_whole = async || database.count(present).await == 12 && database.count(of_rm).await == 1;
    eventually("all callers are back", LONG, is_whole).await;
    assert_eq!(users(&rm.client).await, before);
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    let mut granted = Vec::new();
    for (number, call) in again.into_iter().rev().enumerate() {
        let grant = grant_of(call).await;
        rm.client.resource_released(&release(&grant, &format!("user{number}"))).await.unwrap();
        granted.push(format!("user{number}"));
    }
    assert_eq!(granted, before);
    assert_wait_queues_empty(&rm.client).await;
}

/// Callers that repeat their requests stand in the same order after all three instances were replaced, one after the other.
///
/// - `LINKIS_RM_RESTART`: number of requests, e.g. `1000` [default: 60].
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_outlive_rolling_restart() {
    let count: i64 = std::env::var("LINKIS_RM_RESTART").map_or(60, |text| text.parse().unwrap());
    let (database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let start = || Process::start(&["--database-url", &database.url()]);
    let mut processes: Vec<Process> = (0..3).map(|_| start()).collect();
    let clients: Vec<RmClient> = processes.iter().map(|process| client(&process.address)).collect();
    let clients = Arc::new(Mutex::new(clients));
    let mut calls = JoinSet::new();
    for number in 0..count {
        let (clients, place) = (clients.clone(), usize::try_from(number % 3).unwrap());
        let request = named(&format!("r{number}"), patient(&em1, &format!("user{number}"), cpu(10)));
        calls.spawn(async move {
            loop {
                let client = clients.lock().unwrap()[place].clone();
                let reply = client.request_resource(&request).await;
                assert!(reply.is_err(), "{reply:?}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
    }
    let present = "SELECT count(*) FROM linkis_resource_waiting WHERE kept_until IS NULL";
    let all_wait = async || database.count(present).await == count;
    eventually("all wait", LONG, all_wait).await;
    let order = async || {
        let by_position = r#"SELECT "user" FROM linkis_resource_waiting ORDER BY position"#;
        database.column::<String>(by_position).await
    };
    let before = order().await;
    for (place, process) in processes.iter_mut().enumerate() {
        let new = start();
        clients.lock().unwrap()[place] = client(&new.address);
        let old = std::mem::replace(process, new);
        tokio::task::spawn_blocking(move || old.stop()).await.unwrap();
        let old = "SELECT count(*) FROM linkis_resource_waiting w WHERE NOT EXISTS (
            SELECT FROM linkis_rm_instance i WHERE i.instance_id = w.instance_id AND i.alive_until > now())";
        eventually("the callers are back", LONG, async || all_wait().await && database.count(old).await == 0).await;
        assert_eq!(order().await, before);
    }
    drop(calls);
}
