//! Preloaded data: a million live tickets on 10,000 EMs, counted in 100,000 scopes, written in bulk.

use std::time::Instant;

use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};

use crate::Failure;

const TICKETS: i64 = 1_000_000;

/// Statements in order, with the data that they write. Counters are computed from the tickets.
const STATEMENTS: [(&str, &str); 5] = [
    ("1,000,000 tickets", include_str!("preload/tickets.sql")),
    ("their history", include_str!("preload/history.sql")),
    ("10,000 EMs", include_str!("preload/ems.sql")),
    ("100,001 scopes", include_str!("preload/scopes.sql")),
    ("statistics", "VACUUM ANALYZE"),
];

/// Data before the first call.
#[derive(Debug, Default)]
pub(crate) struct InitialState {
    pub tickets: i64,
}

/// Fills a database that has its schema, and limits for users, creators and pairs of them.
pub(crate) async fn run(database: &PgConnectOptions) -> Result<InitialState, Failure> {
    let mut connection = database.connect().await?;
    for (what, statement) in STATEMENTS {
        let begun = Instant::now();
        eprint!("loading {what}");
        sqlx::raw_sql(statement).execute(&mut connection).await?;
        eprintln!(": {:.0} s", begun.elapsed().as_secs_f64());
    }
    Ok(InitialState { tickets: TICKETS })
}
