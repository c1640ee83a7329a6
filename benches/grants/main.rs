//! Benchmark of the service: operations per second, durations and cost, as ratios to plain PostgreSQL with the same
//! work in the same run.
//!
//! Measurements are interleaved and repeated. Rates are medians over the rounds, ratios are medians of the rounds'
//! ratios, and percentiles are over all calls of all rounds.
//!
//! - Floors (`floors`): pgbench makes prepared grants in three ways, without the service and the network. A floor is
//!   its best over 1, 4, 16 and 64 clients.
//! - Service: the real server in processes of its own, called over gRPC in a closed loop with N calls in flight.
//!   Measured are grants without limits, with three limited scopes, and in an external queue two levels below its root.
//!   Whole lives are three operations each; refusals are of full EMs. Two and three instances also share one database.
//! - Half load: grants in an open loop at half the maximum rate, due at random. The duration of a call starts when it
//!   is due.
//! - Ceiling: a server whose handler replies immediately, under the same load.
//! - `--preload`: the main figures with a million live tickets on 10,000 EMs and 100,000 scopes, beside the same
//!   without them; both have three limited scopes.
//! - `--churn`: whole lives for minutes.
//! - `--secured`, instead of all these: grants with TLS and a token, and without.
//! - `--watched`, instead of all these: half load with open pages and `top`s, and without; with `--preload` also among
//!   a million live tickets.
//! - `--crowds`, instead of all these: very many objects of one kind ([`crowds`]).
//!
//! One hot EM takes all grants, or 100 EMs share them at random; there are 1,000 users. Commits are durable. Load,
//! servers and database share the machine; a database on another machine is not measured. Every reply is checked.
//! Afterwards the stored tickets are compared with the grants and with the counters. The exit code states whether
//! everything agreed, not whether every bound was met.
//!
//! `cargo bench --bench grants -- --seconds 5 --rounds 5 --preload --churn 10 --json grants.json --svg grants.svg`
#![expect(clippy::print_stdout, reason = "the report is what this program is for")]

mod callers;
mod calls;
mod check;
mod churn;
mod crowds;
mod empty;
mod floors;
mod load;
mod machine;
mod meter;
mod open_loop;
mod plan;
mod preload;
mod process;
mod random;
mod ratios;
mod report;
mod results;
mod rounds;
mod sample;
mod secured;
mod service;
mod watchers;
mod yarn;

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, ValueEnum};
use rm_devpg::{EmbeddedPostgres, EmbeddedSettings};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    crowds::Crowd,
    machine::Machine,
    process::TemporaryDir,
    report::{Report, StartTime},
};

/// Why a run has no result.
type Failure = Box<dyn Error + Send + Sync>;

/// Measures the service against plain PostgreSQL with the same work
#[derive(Debug, Parser)]
struct Arguments {
    /// Duration of each measurement in seconds
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,

    /// Number of rounds; 0 measures only the churn
    #[arg(long, default_value_t = 3)]
    rounds: u64,

    /// Measure also with a million live tickets
    #[arg(long)]
    preload: bool,

    /// Measure only the cost of TLS and a token: grants of one hot EM over persistent connections with and without them
    #[arg(long, conflicts_with_all = ["preload", "only"])]
    secured: bool,

    /// Measure only the cost of viewers: grants beside few and many pages and `top`s, and beside none
    #[arg(long, conflicts_with = "secured")]
    watched: bool,

    /// Then run whole ticket lives for this time, on one hot EM and on 100 EMs, and report whether the rate stays level
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..))]
    churn: Option<u64>,

    /// Write all results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Draw the ratios to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Measure only one of the two workloads
    #[arg(long)]
    only: Option<Workload>,

    /// Run only crowds, of all kinds if none is named, and report their cost and their effect on others
    #[arg(long, value_enum, value_name = "NAME", num_args = 0..)]
    crowds: Option<Vec<Crowd>>,

    /// Size of the crowds, as a fraction of the full one
    #[arg(long, default_value_t = 1.0, value_name = "PART", value_parser = part)]
    crowds_scale: f64,

    /// Number of rounds of calm phase and crowd
    #[arg(long, default_value_t = 5, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    crowd_rounds: u64,

    /// Run only a mix of everything for this time, after the requested crowds
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..))]
    crowds_soak: Option<u64>,

    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,

    /// Serve as the ceiling: the benchmark starts itself with this option.
    #[arg(long, hide = true)]
    empty_server: bool,
}

impl Arguments {
    fn workloads(&self) -> Vec<Workload> {
        if self.secured {
            return vec![Workload::Hot];
        }
        self.only.map_or_else(|| vec![Workload::Hot, Workload::Spread], |only| vec![only])
    }

    fn window(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

/// Distribution of the grants over EMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Workload {
    /// All to one EM
    Hot,
    /// To 100 EMs at random
    Spread,
}

impl Workload {
    /// Returns the number of EMs.
    fn ems(self) -> u64 {
        match self {
            Self::Hot => 1,
            Self::Spread => 100,
        }
    }
}

fn part(text: &str) -> Result<f64, String> {
    let part = text.parse().ok().filter(|part| *part > 0.0 && *part <= 1.0);
    part.ok_or_else(|| "must be above 0 and at most 1".to_owned())
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.empty_server {
        empty::serve().await
    } else if arguments.crowds.is_some() || arguments.crowds_soak.is_some() {
        crowds::run(&arguments).await
    } else {
        with_database(async |database, dir| run(&arguments, database, dir).await).await
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let causes = std::iter::successors(error.source(), |cause: &&dyn Error| (*cause).source());
            eprintln!("grants: {}", causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")));
            ExitCode::FAILURE
        }
    }
}

/// Runs `work` with a private PostgreSQL and stops it in every case.
async fn with_database<T>(
    work: impl AsyncFnOnce(&EmbeddedPostgres, &Path) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let dir = TemporaryDir::create()?;
    eprintln!("starting PostgreSQL");
    // Enough for pgbench's 64 clients and all instances together.
    let server_options = vec![("max_connections".to_owned(), "300".to_owned())];
    let settings = EmbeddedSettings { data_dir: dir.path().join("postgresql"), server_options };
    let database = EmbeddedPostgres::start(settings).await?;
    let outcome = tokio::select! {
        outcome = work(&database, dir.path()) => outcome,
        status = database.died() => Err(format!("PostgreSQL ended by itself ({status})").into()),
        _ = terminate.recv() => Err("stopped by a signal".into()),
        _ = interrupt.recv() => Err("stopped by a signal".into()),
    };
    database.stop().await;
    outcome
}

async fn run(arguments: &Arguments, database: &EmbeddedPostgres, dir: &Path) -> Result<(), Failure> {
    let begun = StartTime::now();
    let machine = Machine::look(database, dir).await?;
    let results = rounds::run(arguments, database, dir).await?;
    let ratios = ratios::all(&results);
    let report = Report { arguments, machine, date: begun.date()?, duration: begun.elapsed(), results, ratios };
    println!("\n{}", report.text());
    report.write_files()?;
    if report.results.correct() { Ok(()) } else { Err("not everything was answered or stored as it should be".into()) }
}
