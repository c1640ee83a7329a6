//! Kills in the middle of the choice, the recall and the withdrawal of a ticket, and of the deletion of its row.

use rm_client::{ResultResource, RmClient};

use super::{
    choice::{Ecm, Reaction, quick, wait},
    *,
};

/// Each write of a chosen ticket waits for an advisory lock of its kind, after its effect and before its commit.
const GATES: &str = "CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared(ascii(TG_OP)); RETURN NULL; END $$;
    CREATE TRIGGER gate AFTER INSERT OR UPDATE OR DELETE ON linkis_reclaim FOR EACH ROW EXECUTE FUNCTION wait_at_gate()";

/// The instance that chooses is killed within each statement that writes. The next one continues: one ticket is recalled once, and has a
/// row until its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_within_statements_recall_one_ticket_once() {
    let database = Database::fresh().await;
    let mut instances = Vec::new();
    for _ in 0..4 {
        instances.push(Process::start(&["--database-url", &database.url()]));
    }
    let addresses: Vec<&str> = instances.iter().map(|process| process.address.as_str()).collect();
    let client = RmClient::new(&addresses.join(","), LONG).unwrap();
    let mut ids = Vec::new();
    for process in &instances {
        ids.push(process.client.server_info().await.unwrap().instance_id);
    }
    database.execute(GATES).await;
    let mut gates = Vec::new();
    for operation in ["INSERT", "UPDATE", "DELETE"] {
        gates.push(database.transaction(&format!("SELECT pg_advisory_xact_lock(ascii('{operation}'))")).await);
    }
    let ecm = Ecm::register(&client, "host1", 2, Reaction::Stops).await;
    client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    let first = ecm.idle_engine("bob", "spark").await;
    ecm.idle_engine("bob", "spark").await;
    let call = wait(&client, ecm.request("ann", "sql"));
    let statements = ["-- reclaim::choose", "-- reclaim::recall", "-- reclaim::delete"];
    // Numbers of rows and of recalled ones, while the statement has no effect yet.
    let before = [(0, 0), (1, 0), (1, 1)];
    for ((statement, before), mut gate) in statements.into_iter().zip(before).zip(gates) {
        eventually(statement, LONG, async || locked_out(&database, statement).await > 0).await;
        let leader: Vec<String> =
            database.column("SELECT instance_id::text FROM linkis_rm_lease WHERE held_until > now()").await;
        let place = ids.iter().position(|id| leader == [id.to_string()]).unwrap();
        ids.remove(place);
        instances.remove(place).kill();
        eventually("its statement ends", LONG, async || locked_out(&database, statement).await == 0).await;
        let rows: (i64, i64) = database.row("SELECT count(*), count(recall_time) FROM linkis_reclaim").await;
        assert_eq!(rows, before, "{statement}");
        execute(&mut gate, "COMMIT").await;
    }
    assert!(matches!(call.await.unwrap(), ResultResource::Available(_)));
    assert_eq!((database.recorded("recalled").await, ecm.to_stop()), (1, [first].into()));
    let rows = "SELECT count(*) FROM linkis_reclaim";
    eventually("the row is deleted", LONG, async || database.count(rows).await == 0).await;
    assert_invariants(&database, &instances[0].client).await;
}

/// A withdrawal whose instance is killed before its commit has no effect. Its repetition on another instance withdraws the ticket once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_withdrawal_has_no_effect() {
    let database = Database::fresh().await;
    let first = Process::start(&["--database-url", &database.url()]);
    let second = Process::start(&["--database-url", &database.url()]);
    let ecm = Ecm::register(&second.client, "host1", 1, Reaction::Ignores).await;
    let grace = std::time::Duration::from_secs(60);
    second.client.set_reclaim_policy(&ReclaimPolicy { grace, ..quick(ReclaimMode::Stop) }, "").await.unwrap();
    let engine = ecm.idle_engine("bob", "spark").await;
    let _call = wait(&second.client, ecm.request("ann", "sql"));
    eventually("it is chosen", LONG, async || second.client.reclaims().await.unwrap().len() == 1).await;
    database.execute(GATES).await;
    let mut gate = database.transaction("SELECT pg_advisory_xact_lock(ascii('UPDATE'))").await;
    let withdrawing = first.client.clone();
    let call = tokio::spawn(async move { withdrawing.withdraw_reclaim(engine, "a slow start").await });
    let statement = "-- reclaim::withdraw";
    eventually("it waits at the gate", LONG, async || locked_out(&database, statement).await > 0).await;
    first.kill();
    eventually("its statement ends", LONG, async || locked_out(&database, statement).await == 0).await;
    execute(&mut gate, "COMMIT").await;
    assert!(call.await.unwrap().is_err());
    let withdrawn = "SELECT count(*) FROM linkis_reclaim WHERE withdrawn_time IS NOT NULL";
    assert_eq!((database.count(withdrawn).await, database.recorded("reclaim_withdrawn").await), (0, 0));
    second.client.withdraw_reclaim(engine, "a slow start").await.unwrap();
    assert_eq!((database.count(withdrawn).await, database.recorded("reclaim_withdrawn").await), (1, 1));
}
