//! Batches that the database cancels: retries, their number, and the errors of the calls.

use std::time::Duration;

use rm_client::ResultResource;
use tokio::task::JoinSet;

use crate::{
    harness::*,
    proxy::{Cut, FaultPlan},
};

/// Number of concurrent requests, which share a batch because they waited for one EM.
const TOGETHER: usize = 64;

const TICKETS: &str = "SELECT count(*) FROM linkis_user_resource_meta_data";

/// Makes the database cancel each statement that writes more tickets than that. The number of cancellations is the number of
/// attempts.
async fn gives_up(database: &Database, tickets_max: usize) {
    let sql = format!(
        "CREATE SEQUENCE given_up;
        CREATE FUNCTION give_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF (SELECT count(*) FROM fresh) > {tickets_max} THEN
                PERFORM nextval('given_up');
                RAISE EXCEPTION USING ERRCODE = '57014', MESSAGE = 'canceling statement due to statement timeout';
            END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER give_up AFTER INSERT ON linkis_user_resource_meta_data REFERENCING NEW TABLE AS fresh
            FOR EACH STATEMENT EXECUTE FUNCTION give_up()"
    );
    database.execute(sql).await;
}

/// How often it did.
async fn given_up(database: &Database) -> i64 {
    database.count("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM given_up").await
}

/// Makes [`TOGETHER`] concurrent requests that share one batch. Returns each result.
async fn together(database: &Database, rm: &Instance) -> Vec<Result<(), String>> {
    let em1 = em("host1");
    let mut holder = database.transaction_that_holds(&em1).await;
    let mut calls = JoinSet::new();
    for _ in 0..TOGETHER {
        let (client, ask) = (rm.client.clone(), request(&em1, "hadoop", load(1, 1, 1)));
        calls.spawn(async move {
            match client.request_resource(&ask).await {
                Ok(ResultResource::Available(_)) => Ok(()),
                Ok(refused) => Err(format!("{refused:?}")),
                Err(error) => Err(error.reason().unwrap_or_else(|| error.to_string())),
            }
        });
    }
    let all = format!("linkis_rm_contended_operations {TOGETHER}");
    let contended = async || rm.metrics.text().lines().any(|line| line == all);
    eventually("all wait", Duration::from_secs(20), contended).await;
    execute(&mut holder, "ROLLBACK").await;
    calls.join_all().await
}

async fn with_em() -> (Database, Instance) {
    let (database, rm) = start_with_em(em("host1"), load(1000, 1000, 1000)).await;
    (database, rm)
}

/// Two halves that fail equally show that the database is too slow, so single operations are not tried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_cancelled_by_database_is_halved_once() {
    let (database, rm) = with_em().await;
    gives_up(&database, 0).await;
    for got in together(&database, &rm).await {
        assert_eq!(got.unwrap_err(), "DATABASE_UNAVAILABLE");
    }
    let tries = given_up(&database).await;
    assert!((3..=9).contains(&tries), "{tries} tries for {TOGETHER} requests");
    assert_eq!(database.count(TICKETS).await, 0);
    let text = rm.metrics.text();
    let cancelled = format!("linkis_rm_database_errors_total{{class=\"cancelled\"}} {tries}");
    assert!(text.lines().any(|line| line == cancelled), "{text}");
    database.execute("DROP TRIGGER give_up ON linkis_user_resource_meta_data").await;
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_above_statement_limit_is_granted_in_halves() {
    let (database, rm) = with_em().await;
    gives_up(&database, TOGETHER / 2).await;
    for got in together(&database, &rm).await {
        got.unwrap();
    }
    assert_eq!(given_up(&database).await, 1);
    assert_eq!(assert_invariants(&database, &rm.client).await, TOGETHER);
}

/// A transaction that was certainly not committed never returns COMMIT_UNKNOWN.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_never_arrived_returns_database_unavailable() {
    let (database, direct) = with_em().await;
    let (proxy, proxied) = database.behind_proxy("never");
    let rm = Instance::start(&proxied).await;
    let ask = request(&em("host1"), "hadoop", load(1, 1, 1));
    proxy.cut_commits(Cut::BeforeCommit, 1_000_000);
    let error = rm.client.request_resource(&ask).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("DATABASE_UNAVAILABLE"), "{error}");
    assert_eq!(database.count(TICKETS).await, 0);
    proxy.cut_commits(Cut::BeforeCommit, 0);
    proxy.set_fault_plan(FaultPlan::Fair);
    let granted = async || matches!(rm.client.request_resource(&ask).await, Ok(ResultResource::Available(_)));
    eventually("it is granted", Duration::from_secs(20), granted).await;
    assert_eq!(assert_invariants(&database, &direct.client).await, 1);
}
