//! Removals of waiting requests by operators: the end of the call, the history line, and races with grants, holds and crashes.

use rm_client::ClientError;
use tonic::Code;

use super::*;

const ROWS: &str =
    "SELECT (SELECT count(*) FROM linkis_resource_waiting) + (SELECT count(*) FROM linkis_resource_waiting_entry)";

/// Returns the ticket id of the waiting request of a user.
async fn waiting_of(client: &RmClient, user: &str) -> Uuid {
    let waiting = client.waiting().await.unwrap();
    waiting.iter().find(|waiting| waiting.user.as_str() == user).expect("the request waits").ticket_id
}

/// The error of a call that must end within [`LONG`].
async fn error_of(call: Call) -> ClientError {
    tokio::time::timeout(LONG, call).await.expect("a reply").unwrap().expect_err("the request was removed")
}

fn assert_removed(error: &ClientError, reason: &str) {
    let got = (error.code(), error.reason(), error.fact("reason"), error.retry_after());
    assert_eq!(got, (Some(Code::Aborted), Some("REMOVED_FROM_QUEUE".into()), Some(reason.into()), None), "{error}");
}

fn assert_not_waiting(error: &ClientError) {
    assert_eq!((error.code(), error.reason()), (Some(Code::NotFound), Some("NOT_WAITING".into())), "{error}");
}

/// The call ends by the removal on another instance or its own, and not by a poll. The request behind is granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_ends_call_on_any_instance_and_wakes_next() {
    let (database, first, second) = two().await;
    let em1 = em("host1");
    first.client.register(registration(em1.clone(), cpu(10))).await.unwrap();
    first.client.request_resource(&request(&em1, "first", cpu(5))).await.granted();
    for (at, user) in [(&first, "big"), (&second, "large")] {
        // A request for any EM ends like a request with a named EM.
        let asked = ResourceRequest { em: Some(em1.clone()).filter(|_| user == "big"), ..patient(&em1, user, cpu(10)) };
        let big = enqueue(&at.client, asked).await;
        let small = enqueue(&second.client, patient(&em1, "small", cpu(5))).await;
        let ticket_id = waiting_of(&first.client, user).await;
        let mut error = None;
        let grant = woken(&second, small, async {
            first.client.remove_waiting(ticket_id, "a mistake").await.unwrap();
            error = Some(error_of(big).await);
        })
        .await;
        assert_removed(&error.unwrap(), "a mistake");
        second.client.resource_released(&release(&grant, "small")).await.unwrap();
        // A repetition succeeds, on any instance.
        second.client.remove_waiting(ticket_id, "again").await.unwrap();
        assert!(!lives(&first.client, ticket_id).await);
    }
    assert_eq!(database.count(ROWS).await, 0);
    let lines: Vec<String> = database
        .column(
            r#"SELECT concat_ws(' ', "user", reason, actor, address IS NOT NULL, em_instance, resource::text)
            FROM linkis_resource_action_record WHERE action = 'removed_from_queue' ORDER BY id"#,
        )
        .await;
    let line = |user: &str| format!("{user} a mistake anonymous t host1:9102 {}", cpu(10).to_json());
    let bare = |line: &String| line.replace(' ', "");
    assert_eq!(lines.iter().map(bare).collect::<Vec<_>>(), [bare(&line("big")), bare(&line("large"))]);
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_without_waiting_request_is_rejected() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let cancelled = enqueue(&rm.client, patient(&em1, "cancelled", cpu(10))).await;
    let cancelled_id = waiting_of(&rm.client, "cancelled").await;
    cancelled.abort();
    assert_wait_queues_empty(&rm.client).await;
    for ticket_id in [Uuid::now_v7(), grant.ticket_id, cancelled_id] {
        assert_not_waiting(&rm.client.remove_waiting(ticket_id, "a mistake").await.unwrap_err());
    }
    for reason in ["", &"x".repeat(256)] {
        let error = rm.client.remove_waiting(grant.ticket_id, reason).await.unwrap_err();
        assert_eq!(error.field().as_deref(), Some("reason"));
    }
    assert_eq!(database.recorded("removed_from_queue").await, 0);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// A request with the same request id enters the queue anew after the removal, at its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_after_removal_enters_anew() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let named = ResourceRequest { request_id: Some("r1".into()), ..patient(&em1, "hadoop", cpu(10)) };
    let call = enqueue(&rm.client, named.clone()).await;
    let removed = waiting_of(&rm.client, "hadoop").await;
    rm.client.remove_waiting(removed, "too large").await.unwrap();
    assert_removed(&error_of(call).await, "too large");
    let again = enqueue(&rm.client, named).await;
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    assert_ne!(grant_of(again).await.ticket_id, removed);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// The request is granted or removed, and its caller and the operator get the same result.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_beside_grant_has_one_result() {
    let (database, first, second) = two().await;
    let (em1, mut held) = full_em(&first.client, "host1", 10).await;
    let (mut user, mut removals) = ("first", 0);
    for n in 0..40 {
        let call = enqueue(&[&first, &second][n % 2].client, patient(&em1, "hadoop", cpu(10))).await;
        let ticket_id = waiting_of(&first.client, "hadoop").await;
        let releases = async { first.client.resource_released(&release(&held, user)).await.unwrap() };
        let removes = async {
            // Earlier and later than the grant.
            for _ in 0..n % 8 {
                second.client.waiting().await.unwrap();
            }
            second.client.remove_waiting(ticket_id, "a mistake").await
        };
        let ((), removed) = tokio::join!(releases, removes);
        match removed {
            Ok(()) => {
                removals += 1;
                assert_removed(&error_of(call).await, "a mistake");
                held = first.client.request_resource(&request(&em1, "first", cpu(10))).await.granted();
                user = "first";
            }
            Err(error) => {
                assert_not_waiting(&error);
                (held, user) = (grant_of(call).await, "hadoop");
                assert_eq!(held.ticket_id, ticket_id);
            }
        }
        assert_eq!(database.count(ROWS).await, 0);
    }
    assert_eq!(database.recorded("removed_from_queue").await, removals);
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// Neither a hold nor a lock of another program delays a removal or the end of the call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_at_held_or_contended_em_is_immediate() {
    let (database, first, second) = two().await;
    let (held, contended) = (em("held"), em("contended"));
    register_all(&first.client, ["held", "contended"], load(10, 10, 10)).await;
    // In force before the hold, which delays the count of tickets.
    first.client.set_limit(&user_limit("b", 1)).await.unwrap();
    let hold = NewHold { key: LockKey::Em(held.clone()), duration: Duration::from_secs(600), reason: name("an audit") };
    first.client.hold(&hold).await.unwrap();
    let call = enqueue(&first.client, patient(&held, "a", load(1, 1, 1))).await;
    second.client.remove_waiting(waiting_of(&second.client, "a").await, "it is held").await.unwrap();
    assert_removed(&error_of(call).await, "it is held");

    first.client.request_resource(&request(&contended, "b", load(1, 1, 1))).await.granted();
    let call = enqueue(&first.client, patient(&contended, "b", load(1, 1, 1))).await;
    database.hold_by_hand(&contended).await;
    first.client.set_limit(&user_limit("b", 2)).await.unwrap();
    let is_contended = async || first.metric("linkis_rm_contended_operations") == 1.0;
    eventually("the request waits for the lock", LONG, is_contended).await;
    second.client.remove_waiting(waiting_of(&second.client, "b").await, "it is locked").await.unwrap();
    assert_removed(&error_of(call).await, "it is locked");
    database.release_holds().await;
    assert!(first.client.release_hold(&hold.key).await.unwrap());
    assert_wait_queues_empty(&first.client).await;
    assert_eq!(assert_invariants(&database, &first.client).await, 1);
}

/// The removal of a request ends its call on the same instance at once. The next poll would come a second later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_ends_call_of_own_instance_without_poll() {
    let (_database, rm) = start().await;
    let (em1, _grant) = full_em(&rm.client, "host1", 10).await;
    let call = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    let ticket_id = waiting_of(&rm.client, "hadoop").await;
    let polls = || rm.metric("linkis_rm_waiting_polls_total");
    let before = polls();
    eventually("a poll", LONG, async || polls() > before).await;
    rm.client.remove_waiting(ticket_id, "a mistake").await.unwrap();
    let before = polls();
    assert_removed(&error_of(call).await, "a mistake");
    assert_eq!(polls(), before, "ended by the removal, not by a poll");
}

/// The removal of a request for any EM ends its call although its EM is held, and an operation that cannot queue waits for that EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_at_held_em_is_immediate_beside_waiting_release() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let hold = NewHold { key: LockKey::Em(em1.clone()), duration: Duration::from_secs(600), reason: name("an audit") };
    rm.client.hold(&hold).await.unwrap();
    let call = enqueue(&rm.client, ResourceRequest { em: None, ..patient(&em1, "a", cpu(1)) }).await;
    let client = rm.client.clone();
    let releasing = tokio::spawn(async move { client.resource_released(&release(&grant, "first")).await });
    let is_contended = async || rm.metric("linkis_rm_contended_operations") == 1.0;
    eventually("the release waits for the EM", LONG, is_contended).await;
    rm.client.remove_waiting(waiting_of(&rm.client, "a").await, "it is held").await.unwrap();
    assert_removed(&error_of(call).await, "it is held");
    assert!(rm.client.release_hold(&hold.key).await.unwrap());
    releasing.await.unwrap().unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// A removal leaves its line and no entry, or entries and no line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_of_killed_instance_is_whole_or_absent() {
    let (database, rm) = start().await;
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let call = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    let ticket_id = waiting_of(&rm.client, "hadoop").await;
    let killed = Process::start(&["--database-url", &database.url()]);
    let mut holder = database.transaction("SELECT 1 FROM linkis_resource_waiting_entry FOR UPDATE").await;
    let client = killed.client.clone();
    let removing = tokio::spawn(async move { client.remove_waiting(ticket_id, "a mistake").await });
    eventually("the removal waits for the lock", LONG, async || is_waiting(&database).await).await;
    killed.kill();
    removing.abort();
    execute(&mut holder, "ROLLBACK").await;
    assert_eq!((database.count(ROWS).await, database.recorded("removed_from_queue").await), (2, 0));
    rm.client.remove_waiting(ticket_id, "a mistake").await.unwrap();
    assert_eq!((database.count(ROWS).await, database.recorded("removed_from_queue").await), (0, 1));
    assert_removed(&error_of(call).await, "a mistake");
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}
