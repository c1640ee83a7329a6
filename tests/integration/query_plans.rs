//! Query plans: with full tables, no call reads a whole table, and each reads little more than the rows of its result.
//!
//! All calls are made twice, with few rows and with many. The pages that each statement reads per call may grow only with the depth of
//! an index.
//!
//! - `LINKIS_RM_PLANS`: number of many rows, e.g. `1000000`.
//! - `LINKIS_RM_PLANS_LINES`: number of history lines of each ticket [default: 1].

use std::{collections::BTreeMap, env, time::Duration};

use rm_model::{
    em::EmInstance,
    limit::{LabelPattern, Rule},
    resource::Dimension,
};

use self::{costs::*, tables::*};
use crate::harness::*;

mod calls;
mod costs;
mod filters;
mod rare;
mod reclaim;
mod survey;
mod tables;

/// Retention that deletes nothing during the test.
const HISTORY: Duration = Duration::from_secs(10 * 24 * 3600);

/// Number of repetitions of each call: after a few, connections keep their plans.
const ROUNDS: usize = 6;

/// Maximum number of rows of one round: some pages, the rows of the calls, and a thousand tickets of an unindexed page.
const ROWS_PER_ROUND: i64 = 2500;

/// Factor for the history: its pages scan some lines before they use an index, and the roll-up sums ended tickets meanwhile.
const HISTORY_PAGES: i64 = 6;

/// Maximum number of locked tickets that the cluster metrics count.
const COUNTED_MAX: i64 = 20_000;

/// Number of history lines that one step of the roll-up reads.
const LINES_SUMMED_AT_ONCE: i64 = 10_000;

/// Number of tickets, and of history lines, that one step of the sums by user reads.
const TICKETS_SUMMED_AT_ONCE: i64 = 1000;

/// Tables that grow with the cluster.
const LARGE: [&str; 11] = [
    "linkis_em_resource_meta_data",
    "linkis_user_resource_meta_data",
    "linkis_label_resource",
    "linkis_user_request_id",
    "linkis_resource_action_record",
    "linkis_resource_lock",
    "linkis_resource_refusal",
    "linkis_resource_usage_hour",
    "linkis_resource_waiting",
    "linkis_resource_waiting_entry",
    "linkis_user_sum",
];

/// Starts an instance with a long retention.
async fn with_history(database: &Database) -> Instance {
    Instance::start_with(database, settings().with_time("--history", HISTORY)).await
}

/// Time for overdue tickets, a new label set, and all calls.
struct Measured {
    ending: Costs,
    counting: Costs,
    calls: Costs,
}

/// Returns a very large limit for each value of a label.
fn for_each(label: &str, instances: i64) -> Rule {
    let pattern = LabelPattern::new([(label.to_owned(), None)].into());
    Rule {
        pattern,
        mode: Default::default(),
        max: [(Dimension::Instances, instances)].into(),
        guarantee: Default::default(),
    }
}

/// Sets a limit with a new label set, waits until all live tickets are counted, and deletes the limit.
async fn count_anew(database: &Database, rm: &Instance) {
    let rule = for_each("creator", 1_000_000_000);
    rm.client.set_limit(&rule).await.unwrap();
    let counting = "SELECT count(*) FROM linkis_label_set WHERE state = 'counting'";
    eventually("all is counted", Duration::from_secs(600), async || database.count(counting).await == 0).await;
    rm.client.delete_limit(&rule.pattern).await.unwrap();
    let retired = "SELECT count(*) FROM linkis_label_set WHERE state <> 'counted'";
    eventually("it counts no more", Duration::from_secs(60), async || database.count(retired).await == 0).await;
}

/// Creates a database with a number of rows, and measures the costs of the statements.
async fn measure(postgres: &Counting, name: &str, rows: i64) -> (Database, Measured) {
    let database = postgres.database(name).await;
    let rm = with_history(&database).await;
    rm.client.register(registration(em("template"), load(10, 10_000, 10_000))).await.unwrap();
    rm.client.set_limit(&for_each("user", 100)).await.unwrap();
    rm.stop().await;
    fill(&database, rows).await;
    fill_ending(&database, rows).await;
    database.execute("VACUUM ANALYZE").await;
    drop(postgres.costs(&database).await);
    let (silent_after, lost_after) = (Duration::from_secs(1), Duration::from_secs(2));
    let short = settings().with_time("--em-silent-after", silent_after).with_time("--em-lost-after", lost_after);
    let rm = Instance::start_with(&database, short.with_time("--history", HISTORY)).await;
    let leaving = EmInstance::parse("em", em("any").application_name.as_str(), "leaving").unwrap();
    rm.client.unregister(&leaving).await.unwrap();
    let ending = "SELECT count(*) FROM linkis_user_resource_meta_data
        WHERE em_instance LIKE 'due%' OR em_instance IN ('leaving', 'lost')";
    eventually("they all end", Duration::from_secs(300), async || database.count(ending).await == 0).await;
    let ending = postgres.costs(&database).await;
    // The last batches also contain expirations, which are no cost of a call.
    let steps = || rm.metric(r#"linkis_rm_task_steps_total{task="expiry"}"#);
    let before = steps();
    eventually("nothing more is ended", LONG, async || steps() >= before + 2.0).await;
    drop(postgres.costs(&database).await);
    count_anew(&database, &rm).await;
    let counting = postgres.costs(&database).await;
    rm.stop().await;
    // Current EMs get more time.
    let rm = with_history(&database).await;
    for then in ["VACUUM ANALYZE", "SELECT pg_stat_reset()"] {
        database.execute(then).await;
    }
    for number in 0..ROUNDS {
        calls::round(&rm, number).await;
    }
    rm.stop().await;
    let calls = postgres.costs(&database).await;
    println!("{rows} rows; {} due, {LEAVING} leaving and as many lost", due(rows));
    (database, Measured { ending, counting, calls })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_read_no_large_table_completely() {
    let many = env::var("LINKIS_RM_PLANS").map_or(MANY, |text| text.parse().unwrap());
    let postgres = Counting::start(&Database::fresh().await, "plans").await;
    let ((_, of_few), (database, of_many)) =
        tokio::join!(measure(&postgres, "few", FEW), measure(&postgres, "many", many));
    let ending = "for each deadline that passed and each ticket of an EM that goes or is lost";
    let (few_ending, many_ending) = (per_end(of_few.ending, FEW), per_end(of_many.ending, many));
    let dear = [
        compare(ending, &few_ending, &many_ending, MORE_PAGES_PER_END),
        compare("steps of a limit with new labels", &of_few.counting, &of_many.counting, MORE_PAGES),
        compare("calls", &of_few.calls, &of_many.calls, MORE_PAGES),
    ];
    let dear = dear.concat();
    assert!(dear.is_empty(), "{dear:#?}");
    rows_read(&database, &of_many.calls).await;
    filters::a_page_looks_through_no_more_than_it_has_to(&database).await;
    filters::a_page_of_the_present_touches_few_pages(&postgres, &database, many).await;
    filters::a_page_that_finds_nothing_touches_no_more_than_it_may(&postgres, &database).await;
    postgres.stop().await;
}

/// Asserts that no table was read completely, and that the reads are close to the rows of the calls.
async fn rows_read(database: &Database, calls: &Costs) {
    // The statistics of a connection are complete once it is closed.
    database.pool.close().await;
    let mut connection = database.connect().await;
    let rows: Vec<(String, i64, i64)> = sqlx::query_as(
        // All partitions of the history together.
        r"SELECT regexp_replace(relname, '(_action_record)_(\d.*|rest)$', '\1'), coalesce(sum(seq_scan), 0)::bigint,
            sum(coalesce(seq_tup_read, 0) + coalesce((
                SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes i WHERE i.relid = t.relid), 0))::bigint
        FROM pg_stat_user_tables t GROUP BY 1",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();
    let read: BTreeMap<_, _> = rows.into_iter().map(|(table, scans, rows)| (table, (scans, rows))).collect();
    println!("{read:#?}");
    // Background statements before and after the calls are included.
    let made = |statement: &str| calls.get(statement).map_or(0, |cost| cost.calls) + 5;
    let ems: i64 = sqlx::query_scalar("SELECT count(*) FROM linkis_em_resource_meta_data")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    for table in LARGE {
        let (scans, rows) = read[table];
        let whole = match table {
            // A page of the wait queue shows positions among all entries; once a minute a sweep reads entries that are left.
            "linkis_resource_waiting" => i64::try_from(ROUNDS).unwrap() + made("waiting::sweep"),
            "linkis_em_resource_meta_data" => made(SUMS),
            _ => 0,
        };
        assert!(scans <= whole, "{table} was read from end to end {scans} times");
        // Statements that count up to a bound run repeatedly.
        let beside = match table {
            "linkis_user_resource_meta_data" => {
                made(BOUNDED) * COUNTED_MAX + (made(USER_SUMS[0]) + made(USER_SUMS[4])) * TICKETS_SUMMED_AT_ONCE
            }
            "linkis_em_resource_meta_data" => (made(SUMS) + made(SURVEY)) * ems,
            // Ended tickets are summed a few thousand lines at a time, independent of earlier lines.
            "linkis_resource_action_record" => {
                made("ended_use::list") * LINES_SUMMED_AT_ONCE + made(USER_SUMS[1]) * TICKETS_SUMMED_AT_ONCE
            }
            // The search for the fullest scopes scans all scopes repeatedly; the costs of calls are compared above.
            "linkis_label_resource" => continue,
            _ => 0,
        };
        let pages = if table == "linkis_resource_action_record" { HISTORY_PAGES } else { 1 };
        let most = pages * ROWS_PER_ROUND * i64::try_from(ROUNDS).unwrap() + beside;
        assert!(rows < most, "{table}: {rows} rows were read, at most {most} have to be");
    }
}
