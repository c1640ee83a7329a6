//! Costs of the service's statements, as PostgreSQL counts them, with few and with many rows.

use std::collections::BTreeMap;

use rm_devpg::EmbeddedPostgres;
use sqlx::ConnectOptions as _;

use super::tables::{LEAVING, due};
use crate::harness::*;

/// Maximum number of additional database pages of a statement with many rows, on average: indexes are a level or two deeper, and a batch
/// looks up many rows.
pub(super) const MORE_PAGES: f64 = 25.0;

/// Maximum of additional pages for each ended ticket, in batches of any size.
pub(super) const MORE_PAGES_PER_END: f64 = 4.0;

/// Maximum factor, in addition.
const PAGES_RATIO: f64 = 2.0;

/// Statements of one instance for all, every few seconds, with a bound on the counted rows.
pub(super) const BOUNDED: &str = "overview::totals";

/// Statements about all EMs.
pub(super) const SUMS: &str = "overview::ems";

/// The statement that finds changed EMs, at most once a second for all requests without an EM.
pub(super) const SURVEY: &str = "em_report::survey";

/// Pages of the live tickets, of their changes, of those with idle engines and of their stored sums, for the sums by user.
pub(super) const USER_SUMS: [&str; 5] =
    ["user_sum::tickets", "user_sum::changes", "user_sum::stored", "user_sum::write", "user_sum::idle"];

/// Background statements, and counts of calls up to a bound: they scan all EMs, a page of all scopes or tickets, all tickets of some EMs, or the changes since, and
/// read as many pages.
const BESIDE: [&str; 13] = [
    SUMS,
    BOUNDED,
    SURVEY,
    "label_resource::walk",
    "user_resource::count_on",
    "ended_use::list",
    "usage_hour::known",
    "usage_hour::add",
    USER_SUMS[0],
    USER_SUMS[1],
    USER_SUMS[2],
    USER_SUMS[3],
    USER_SUMS[4],
];

/// PostgreSQL with counts of each statement, if the extension is installed; otherwise the PostgreSQL of the other tests.
pub(super) struct Counting(Option<EmbeddedPostgres>);

impl Counting {
    pub(super) async fn start(elsewhere: &Database, name: &str) -> Self {
        let available = "SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_stat_statements'";
        if elsewhere.count(available).await == 0 {
            println!("pg_stat_statements is not installed here: pages are not compared");
            return Self(None);
        }
        let data_dir = scratch(name);
        remove_at_end(&data_dir);
        let options = [("shared_preload_libraries", "pg_stat_statements"), ("pg_stat_statements.track", "all")];
        Self(Some(start_postgres(&data_dir, &options).await.unwrap()))
    }

    pub(super) fn is_counting(&self) -> bool {
        self.0.is_some()
    }

    pub(super) async fn database(&self, name: &str) -> Database {
        let Some(postgres) = &self.0 else { return Database::fresh().await };
        let mut admin = postgres.connect_options().connect().await.unwrap();
        execute(&mut admin, format!("CREATE DATABASE {name}")).await;
        let options = postgres.connect_options().database(name);
        let database = Database::from(options);
        database.execute("CREATE EXTENSION pg_stat_statements").await;
        database
    }

    pub(super) async fn stop(self) {
        if let Some(postgres) = self.0 {
            postgres.stop().await;
        }
    }

    /// Returns the pages of each statement since the last call.
    pub(super) async fn costs(&self, database: &Database) -> Costs {
        if self.0.is_none() {
            return Costs::new();
        }
        let mut connection = database.connect().await;
        let rows: Vec<(String, i64, i64, i64)> = sqlx::query_as(
            "SELECT substring(query FROM '^-- ([^\n]*)'), sum(calls)::bigint, sum(shared_blks_hit + shared_blks_read)::bigint,
                sum(rows)::bigint
            FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
            WHERE datname = current_database() AND query LIKE '-- %' GROUP BY 1",
        )
        .fetch_all(&mut connection)
        .await
        .unwrap();
        execute(
            &mut connection,
            "SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()",
        )
        .await;
        rows.into_iter().map(|(statement, calls, pages, rows)| (statement, Cost { calls, pages, rows })).collect()
    }
}

/// Costs by statement: number of runs, database pages, and returned rows.
pub(super) type Costs = BTreeMap<String, Cost>;

#[derive(Clone, Copy, Default)]
pub(super) struct Cost {
    pub(super) calls: i64,
    pub(super) pages: i64,
    rows: i64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.pages += other.pages;
        self.rows += other.rows;
    }
}

impl Cost {
    pub(super) fn pages_per_call(self) -> f64 {
        self.pages as f64 / self.calls as f64
    }

    fn pages_per_row(self) -> f64 {
        self.pages as f64 / self.rows.max(1) as f64
    }

    /// Returns whether the cost per run is higher for another reason than more returned rows.
    fn is_dear_beside(self, few: Self, more: f64) -> bool {
        self.pages_per_call() > few.pages_per_call() * PAGES_RATIO + more
            && self.pages_per_row() > few.pages_per_row() * PAGES_RATIO
    }
}

/// Cost of one ended ticket, because the size of a batch varies.
pub(super) fn per_end(costs: Costs, rows: i64) -> Costs {
    let ended = due(rows) + 2 * LEAVING;
    costs.into_iter().map(|(statement, cost)| (statement, Cost { calls: ended, rows: ended, ..cost })).collect()
}

/// Compares the costs of statements with few and with many rows. Returns the statements that cost too much.
pub(super) fn compare(what: &str, few: &Costs, many: &Costs, more: f64) -> Vec<String> {
    println!("{what:<44}{:>8}{:>10}{:>8}{:>10}", "few:", "pages", "many:", "pages");
    let mut dear = Vec::new();
    for (statement, many) in many {
        let few = few.get(statement).copied();
        let (calls, pages) = few.map(|few| (few.calls, few.pages_per_call())).unwrap_or_default();
        println!("{statement:<44}{calls:>8}{pages:>10.1}{:>8}{:>10.1}", many.calls, many.pages_per_call());
        let is_left_out = BESIDE.iter().any(|beside| statement.starts_with(beside));
        if !is_left_out && few.is_some_and(|few| many.is_dear_beside(few, more)) {
            dear.push(format!(
                "{what}: {statement} touches {:.1} pages per call, {pages:.1} with few rows",
                many.pages_per_call()
            ));
        }
    }
    dear
}
