//! How many grants per second the service makes, and how long one takes, as ratios to what plain PostgreSQL does for the same
//! work on the same server in the same run.
//!
//! Measured, interleaved and repeated (medians are reported):
//!
//! - the floor: pgbench runs `floors/for_update.sql`, one grant per transaction, prepared, with no service and no network
//!   in between; its best over 1, 4, 16 and 64 clients;
//! - the service: the real server in a process of its own, called over gRPC from this process, in a closed loop with N calls
//!   in flight: a call is made as soon as another is answered;
//! - the ceiling: a server whose handler answers at once, under the same load.
//!
//! One hot EM takes all grants, or 100 EMs share them at random; there are 1000 users. Commits are durable. Load, server and
//! database share the machine. Every answer has to be a grant; afterwards the stored tickets are counted, and compared with what
//! was granted and with the counters.
//!
//! Not measured: refusals, reports and releases; several instances; a database on another machine; latency under an open loop.
//!
//! `cargo bench --bench grants -- --seconds 10 --rounds 5`; with `--steady 10` it looks instead whether the service stays as fast
//! for ten minutes on each.
#![expect(clippy::print_stdout, reason = "the report is what this program is for")]

mod empty;
mod floors;
mod load;
mod machine;
mod process;
mod rounds;
mod service;
mod steady;
mod table;

use std::{error::Error, path::Path, process::ExitCode, time::Duration};

use clap::{Parser, ValueEnum};
use linkis_rm::store::embedded::{Embedded, Settings};
use tokio::signal::unix::{SignalKind, signal};

use crate::process::TemporaryDir;

/// Why there is no result.
type Failure = Box<dyn Error + Send + Sync>;

/// Measures grants per second against what plain PostgreSQL does for the same work.
#[derive(Debug, Parser)]
struct Arguments {
    /// How long each measurement takes.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,

    /// How often everything is measured.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,

    /// Only run the service, for so long on one hot EM and then on 100 EMs, and look whether it stays as fast.
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..))]
    steady: Option<u64>,

    /// Only one of the two.
    #[arg(long)]
    only: Option<Workload>,

    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,

    /// Serve as the ceiling: this is how the benchmark runs itself.
    #[arg(long, hide = true)]
    empty_server: bool,
}

impl Arguments {
    fn workloads(&self) -> Vec<Workload> {
        self.only.map_or_else(|| vec![Workload::Hot, Workload::Spread], |only| vec![only])
    }

    fn window(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

/// Where the grants go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Workload {
    /// All to one EM.
    Hot,
    /// To 100 EMs at random.
    Spread,
}

impl Workload {
    /// How many EMs there are.
    fn ems(self) -> u64 {
        match self {
            Self::Hot => 1,
            Self::Spread => 100,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Hot => "hot EM",
            Self::Spread => "100 EMs",
        }
    }
}

/// What one measurement found.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// Grants per second.
    rate: f64,
    /// The median time that one took, and the time that one in a hundred exceeded; if they were taken.
    latency: Option<Latency>,
}

#[derive(Debug, Clone, Copy)]
struct Latency {
    p50: Duration,
    p99: Duration,
}

impl Latency {
    /// Of measured times, in any order; `None` if there are none.
    fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).copied();
        Some(Self { p50: at(50)?, p99: at(99)? })
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.empty_server { empty::serve().await } else { with_database(&arguments).await };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let causes = std::iter::successors(error.source(), |cause: &&dyn Error| (*cause).source());
            eprintln!("grants: {}", causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")));
            ExitCode::FAILURE
        }
    }
}

/// Runs with a PostgreSQL of its own, and takes it down whatever happens.
async fn with_database(arguments: &Arguments) -> Result<(), Failure> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let dir = TemporaryDir::create()?;
    eprintln!("starting PostgreSQL");
    let settings = Settings { data_dir: dir.path().join("postgresql"), server_options: vec![] };
    let database = Embedded::start(settings).await?;
    let outcome = tokio::select! {
        outcome = run(arguments, &database, dir.path()) => outcome,
        status = database.died() => Err(format!("PostgreSQL ended by itself ({status})").into()),
        _ = terminate.recv() => Err("told to stop".into()),
        _ = interrupt.recv() => Err("told to stop".into()),
    };
    database.stop().await;
    outcome
}

async fn run(arguments: &Arguments, database: &Embedded, dir: &Path) -> Result<(), Failure> {
    let machine = machine::describe(database, dir).await?;
    match arguments.steady {
        Some(minutes) => steady::run(arguments, minutes, database, &machine).await,
        None => {
            let results = rounds::run(arguments, database, dir).await?;
            println!("\n{}\n\n{machine}", table::render(&results));
            Ok(())
        }
    }
}
