//! Instances that die: the capacity of their waiting requests, and instances that only seem dead.

use super::*;

/// Waits until two instances have waited after their start, and look for dead ones.
async fn both_look_for_dead_instances(database: &Database) {
    let checks = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND query LIKE '-- waiting::end_dead_instances%'";
    eventually("both instances look for dead ones", LONG, async || database.count(checks).await == 2).await;
}

/// An instance is killed: other instances end its row before it expires, and a later request gets the capacity.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_capacity_of_killed_instance_is_granted_before_its_row_expires() {
    let (database, rm) = start().await;
    let killed = Process::start(&["--database-url", &database.url()]);
    let (em1, grant) = full_em(&rm.client, "host1", 10).await;
    let _lost = enqueue(&killed.client, patient(&em1, "lost", cpu(10))).await;
    let behind = enqueue(&rm.client, patient(&em1, "hadoop", cpu(10))).await;
    let known = "SELECT count(*) FROM linkis_rm_instance WHERE server_start IS NOT NULL";
    eventually("both instances have stored their processes", LONG, async || database.count(known).await == 2).await;
    both_look_for_dead_instances(&database).await;
    let id: String =
        database.scalar(r#"SELECT instance_id::text FROM linkis_resource_waiting WHERE "user" = 'lost'"#).await;
    let store_ends = "CREATE TABLE ended (instance_id uuid NOT NULL);
        CREATE FUNCTION store_end() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO ended VALUES (NEW.instance_id);
            RETURN NULL;
        END $$;
        CREATE TRIGGER store_end AFTER UPDATE ON linkis_rm_instance FOR EACH ROW
            WHEN (NEW.alive_until < OLD.alive_until) EXECUTE FUNCTION store_end()";
    database.execute(store_ends).await;
    killed.kill();
    rm.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(behind).await;
    let ended: Vec<String> = database.column("SELECT instance_id::text FROM ended").await;
    assert!(ended.contains(&id), "the row was ended, and did not expire");
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// PostgreSQL ends the listening connection of a living instance, or all its connections: its request stays first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_position_outlives_listener_of_its_instance() {
    let (database, first, second) = crate::harness::two().await;
    let (em1, grant) = full_em(&first.client, "host1", 10).await;
    let one = enqueue(&first.client, patient(&em1, "one", cpu(10))).await;
    let of_first = "SELECT coalesce(max(listener_pid), 0)::bigint FROM linkis_rm_instance";
    eventually("the process is stored", LONG, async || database.count(of_first).await > 0).await;
    let _two = enqueue(&second.client, patient(&em1, "two", cpu(10))).await;
    let queue = first.client.waiting().await.unwrap();
    both_look_for_dead_instances(&database).await;
    for round in 0..4 {
        let before = database.count(of_first).await;
        let ended = match round {
            0 | 1 => "listener_pid",
            _ => "unnest(ARRAY[listener_pid, renewer_pid])",
        };
        database
            .execute(&format!(
                "SELECT pg_terminate_backend(p) FROM (SELECT {ended} AS p FROM linkis_rm_instance WHERE listener_pid = {before}) i"
            ))
            .await;
        eventually("the instances listen again", LONG, async || database.count(of_first).await != before).await;
        assert_eq!(second.client.waiting().await.unwrap(), queue);
    }
    first.client.resource_released(&release(&grant, "first")).await.unwrap();
    grant_of(one).await;
}
