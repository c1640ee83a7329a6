//! Guarantees: requests that keep a scope within its guarantee go before all others.

use super::{
    positions::{Forwarder, named, users},
    turns::served,
    *,
};

/// Limits a user to ten cores, and guarantees some of them.
fn guaranteed(user: &str, cores: i64) -> Rule {
    let guarantee = [(Dimension::Cores, cores)].into();
    Rule { guarantee, ..limit(&[("user", Some(user))], &[(Dimension::Cores, 10)]) }
}

/// Users of the waiting requests that are entitled, in the order of the queue.
async fn entitled(client: &RmClient) -> Vec<String> {
    let waiting = client.waiting().await.unwrap().into_iter();
    waiting.filter(|waiting| waiting.class == Class::Entitled).map(|waiting| waiting.user.to_string()).collect()
}

/// Within its guarantee, a later request goes first, regardless of the instance; beyond, in turn. The amounts of entitled requests count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entitled_request_precedes_earlier_ones() {
    let (database, first, second) = two().await;
    first.client.set_limit(&guaranteed("alice", 2)).await.unwrap();
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let _others = [
        enqueue(&first.client, patient(&em1, "bob", cpu(10))).await,
        enqueue(&first.client, patient(&em1, "carol", cpu(10))).await,
    ];
    let alice = enqueue(&second.client, patient(&em1, "alice", cpu(2))).await;
    assert_eq!(users(&first.client).await, ["alice", "bob", "carol"]);
    assert_eq!(entitled(&second.client).await, ["alice"]);
    // The guarantee is promised to the first request.
    let _other = enqueue(&second.client, patient(&em1, "alice", cpu(1))).await;
    assert_eq!(users(&first.client).await, ["alice", "bob", "carol", "alice"]);
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(alice).await;
    assert_eq!(users(&first.client).await, ["bob", "carol", "alice"]);
    assert_invariants(&database, &first.client).await;
}

/// A request becomes entitled when its scope holds less, also at an EM where nothing becomes free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_of_shrinking_scope_becomes_entitled() {
    let (_database, first, second) = two().await;
    first.client.set_limit(&guaranteed("alice", 2)).await.unwrap();
    let (em1, _grant) = full_em(&first.client, "host1", 10).await;
    let other = em("host2");
    first.client.register(registration(other.clone(), cpu(10))).await.unwrap();
    let own = first.client.request_resource(&request(&other, "alice", cpu(1))).await.granted();
    let _bob = enqueue(&first.client, patient(&em1, "bob", cpu(10))).await;
    let _alice = enqueue(&second.client, patient(&em1, "alice", cpu(2))).await;
    assert_eq!(users(&first.client).await, ["bob", "alice"]);
    first.client.resource_released(&release(&own, "alice")).await.unwrap();
    eventually("alice is entitled", LONG, async || users(&first.client).await == ["alice", "bob"]).await;
}

/// The commit that would use an entitlement checks it again: a request that passed elsewhere has used the guarantee.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn used_guarantee_ends_entitlement() {
    let (_database, rm) = start().await;
    rm.client.set_limit(&guaranteed("alice", 2)).await.unwrap();
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let other = em("host2");
    rm.client.register(registration(other.clone(), cpu(10))).await.unwrap();
    let bob = enqueue(&rm.client, patient(&em1, "bob", cpu(10))).await;
    let alice = enqueue(&rm.client, patient(&em1, "alice", cpu(2))).await;
    assert_eq!(users(&rm.client).await, ["alice", "bob"]);
    rm.client.request_resource(&request(&other, "alice", cpu(1))).await.granted();
    let calls = vec![("alice".to_owned(), alice), ("bob".to_owned(), bob)];
    assert_eq!(served(&rm.client, (grant, "first".to_owned()), calls).await, ["bob", "alice"]);
}

/// The guarantee of an absent caller is promised to another request meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn absent_request_is_promised_nothing() {
    let (_database, first, second) = two().await;
    first.client.set_limit(&guaranteed("alice", 2)).await.unwrap();
    let (em1, _grant) = full_em(&first.client, "host1", 10).await;
    let _bob = enqueue(&first.client, patient(&em1, "bob", cpu(10))).await;
    let (through, connection) = Forwarder::start(&first.address).await;
    let repeated = named("r1", patient(&em1, "alice", cpu(2)));
    let _lost = enqueue(&through, repeated.clone()).await;
    let _next = enqueue(&second.client, patient(&em1, "alice", cpu(1))).await;
    assert_eq!(users(&first.client).await, ["alice", "bob", "alice"]);
    connection.abort();
    let cores = async || {
        let waiting = first.client.waiting().await.unwrap().into_iter();
        let entitled = waiting.filter(|waiting| waiting.class == Class::Entitled && waiting.kept_until.is_none());
        entitled.map(|waiting| waiting.resource.get(&Dimension::Cores)).collect::<Vec<_>>()
    };
    eventually("the next one is entitled", LONG, async || cores().await == [1]).await;
    let _back = request_in_task(&second.client, repeated);
    // The returned request is earlier in own order: the next one is behind it, and is promised nothing any more.
    eventually("the returned one is entitled", LONG, async || cores().await == [2]).await;
}

/// A request that may not wait passes the firsts of others within its guarantee.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entitled_request_without_wait_passes_others() {
    let (_database, rm) = start().await;
    rm.client.set_limit(&guaranteed("alice", 2)).await.unwrap();
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    rm.client.request_resource(&request(&em1, "first", cpu(5))).await.granted();
    let _bob = enqueue(&rm.client, patient(&em1, "bob", cpu(10))).await;
    rm.client.request_resource(&request(&em1, "carol", cpu(1))).await.refused();
    rm.client.request_resource(&request(&em1, "alice", cpu(2))).await.granted();
    // Above the guarantee.
    rm.client.request_resource(&request(&em1, "alice", cpu(1))).await.refused();
}

/// A guarantee needs a maximum that is not lower. A wrong one changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guarantee_above_maximum_is_rejected() {
    let (_database, rm) = start().await;
    let waiting = Rule {
        max: [(Dimension::Waiting, 5)].into(),
        guarantee: [(Dimension::Waiting, 1)].into(),
        ..guaranteed("alice", 1)
    };
    let memory = Rule { guarantee: [(Dimension::Memory, 1)].into(), ..guaranteed("alice", 1) };
    for (rule, problem) in [(guaranteed("alice", 11), "at most"), (memory, "needs a maximum"), (waiting, "tickets")] {
        let error = rm.client.set_limit(&rule).await.unwrap_err().to_string();
        assert!(error.contains("limit.guarantee") && error.contains(problem), "{error}");
    }
    assert!(rm.client.limits().await.unwrap().is_empty());
}

/// A guarantee is part of the limit: in lists, in the history, after a restart and on other instances.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guarantee_is_listed_and_recorded() {
    let (database, first, second) = two().await;
    let rule = guaranteed("alice", 3);
    first.client.set_limit(&rule).await.unwrap();
    let listed = second.client.limits().await.unwrap();
    assert_eq!(listed, [rule]);
    let recorded =
        "SELECT count(*) FROM linkis_resource_action_record WHERE after::jsonb #>> '{guarantee,cores}' = '3'";
    assert_eq!(database.count(recorded).await, 1);
}

/// Each new waiting request waits for an advisory lock, before its commit.
const GATE: &str = "CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$;
    CREATE TRIGGER gate AFTER INSERT ON linkis_resource_waiting FOR EACH ROW EXECUTE FUNCTION wait_at_gate()";

/// An instance that is killed within the commit of an entitled request promises nothing. The repeated call is entitled once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_decision_promises_nothing() {
    let database = Database::fresh().await;
    let [first, second] = [0, 1].map(|_| Process::start(&["--database-url", &database.url()]));
    second.client.set_limit(&guaranteed("alice", 2)).await.unwrap();
    let (em1, _grant) = full_em(&second.client, "host1", 10).await;
    let _bob = enqueue(&second.client, patient(&em1, "bob", cpu(10))).await;
    database.execute(GATE).await;
    let mut gate = database.transaction("SELECT pg_advisory_xact_lock(7)").await;
    let repeated = named("r1", patient(&em1, "alice", cpu(2)));
    let _lost = request_in_task(&client(&first.address), repeated.clone());
    let entering = "-- waiting::insert";
    eventually("it waits at the gate", LONG, async || locked_out(&database, entering).await > 0).await;
    first.kill();
    eventually("its statement ends", LONG, async || locked_out(&database, entering).await == 0).await;
    execute(&mut gate, "COMMIT").await;
    assert_eq!(users(&second.client).await, ["bob"]);
    let _repeated = enqueue(&second.client, repeated).await;
    let _next = enqueue(&second.client, patient(&em1, "alice", cpu(1))).await;
    assert_eq!((users(&second.client).await.len(), entitled(&second.client).await), (3, vec!["alice".to_owned()]));
}
