//! What the service does per second, how long that takes and what it costs, as ratios to what plain PostgreSQL does for the same
//! work on the same server in the same run.
//!
//! Measured, interleaved and repeated (rates are medians over the rounds, ratios are medians of the rounds' ratios,
//! percentiles are over all calls of all rounds):
//!
//! - the floors: pgbench makes one grant after another, prepared, with no service and no network in between, in three ways
//!   (`floors`); a floor is its best over 1, 4, 16 and 64 clients;
//! - the service: the real server in processes of its own, called over gRPC from this process, in a closed loop with N calls
//!   in flight: a call is made as soon as another is answered. Grants, with none and with three limited scopes, and in a queue of an
//!   external cluster, two levels below its root; whole lives, which are three operations; refusals, of EMs that are full; grants by two and three instances on one database;
//! - half load: grants in an open loop, half as many per second as the service can make, due at random; a late answer
//!   counts from when its call was due;
//! - the ceiling: a server whose handler answers at once, under the same load;
//! - with `--preload`, the main figures with a million live tickets on 10,000 EMs, counted in 100,000 scopes, beside the same
//!   without them; both have three limited scopes;
//! - with `--churn`, whole lives for minutes on end;
//! - with `--secured`, instead of all this: grants with TLS and a token, and the same without;
//! - with `--watched`, instead of all this: half load while pages and `top`s are open, and the same without them; with `--preload` also among a
//!   million live tickets;
//! - with `--committers`, instead of all this: grants by an instance with one, two and four committers.
//!
//! With `--crowds`, instead of all this: very many of one thing at once ([`crowds`]).
//!
//! One hot EM takes all grants, or 100 EMs share them at random; there are 1000 users. Commits are durable. Load, servers and
//! database share the machine. Every answer is looked at; afterwards the stored tickets are counted, and compared with what was
//! granted and with the counters. The exit code tells whether everything agreed, not whether it was as fast as wanted.
//!
//! Not measured: a database on another machine.
//!
//! `cargo bench --bench grants -- --seconds 5 --rounds 5 --preload --churn 10 --json grants.json --svg grants.svg`
#![expect(clippy::print_stdout, reason = "the report is what this program is for")]

mod callers;
mod calls;
mod check;
mod churn;
mod committers;
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
mod simulation;
mod watchers;
mod yarn;

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, ValueEnum};
use linkis_rm::store::embedded::{Embedded, Settings};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    crowds::Crowd,
    machine::Machine,
    process::TemporaryDir,
    report::{Begun, Report},
};

/// Why there is no result.
type Failure = Box<dyn Error + Send + Sync>;

/// Measures the service against what plain PostgreSQL does for the same work.
#[derive(Debug, Parser)]
struct Arguments {
    /// How long each measurement takes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,

    /// How often everything is measured; with 0 there is only the churn.
    #[arg(long, default_value_t = 3)]
    rounds: u64,

    /// Measure also with a million live tickets.
    #[arg(long)]
    preload: bool,

    /// Measure only what TLS and a token cost: grants of one hot EM over kept connections with them, and without.
    #[arg(long, conflicts_with_all = ["preload", "only"])]
    secured: bool,

    /// Measure only what it costs that people look: grants beside few and many pages and `top`s, and beside none.
    #[arg(long, conflicts_with = "secured")]
    watched: bool,

    /// Measure only what several committers of an instance make of it: grants by one, two and four, that share nothing, users with limits,
    /// or a creator with one.
    #[arg(long, conflicts_with_all = ["preload", "secured", "watched", "only"])]
    committers: bool,

    /// Then let tickets come and go for so long, and look whether that stays as fast: on one hot EM, and on 100 EMs.
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..))]
    churn: Option<u64>,

    /// Write everything that was measured into this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Draw the ratios into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Only one of the two.
    #[arg(long)]
    only: Option<Workload>,

    /// Only let crowds pass, of all kinds if none is named, and tell how the service and others cope.
    #[arg(long, value_enum, value_name = "NAME", num_args = 0..)]
    crowds: Option<Vec<Crowd>>,

    /// The size of the crowds, as a part of the full one.
    #[arg(long, default_value_t = 1.0, value_name = "PART", value_parser = part)]
    crowds_scale: f64,

    /// How often a calm and a crowd take turns.
    #[arg(long, default_value_t = 5, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    crowd_rounds: u64,

    /// How long to wait, at most, until the service has forgotten users who came once: what is new stays for a minute, and of the full size
    /// it looks through all in some more. 0 is for not at all.
    #[arg(long, default_value_t = 5, value_name = "MINUTES")]
    crowds_forget: u64,

    /// Only let everything happen at once for so many minutes, after the crowds that were asked for.
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..))]
    crowds_soak: Option<u64>,

    /// Measure nothing: tell what many committers would make on other machines, by simulation.
    #[arg(long)]
    simulate: bool,

    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,

    /// Serve as the ceiling: this is how the benchmark runs itself.
    #[arg(long, hide = true)]
    empty_server: bool,
}

impl Arguments {
    fn workloads(&self) -> Vec<Workload> {
        if self.secured {
            return vec![Workload::Hot];
        }
        if self.committers {
            // One EM is one committer's.
            return vec![Workload::Spread];
        }
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
    } else if arguments.simulate {
        println!("{}", simulation::text());
        Ok(())
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

/// Runs with a PostgreSQL of its own, and takes it down whatever happens.
async fn with_database<T>(work: impl AsyncFnOnce(&Embedded, &Path) -> Result<T, Failure>) -> Result<T, Failure> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let dir = TemporaryDir::create()?;
    eprintln!("starting PostgreSQL");
    // For pgbench's 64 clients and all instances at once.
    let server_options = vec![("max_connections".to_owned(), "300".to_owned())];
    let settings = Settings { data_dir: dir.path().join("postgresql"), server_options };
    let database = Embedded::start(settings).await?;
    let outcome = tokio::select! {
        outcome = work(&database, dir.path()) => outcome,
        status = database.died() => Err(format!("PostgreSQL ended by itself ({status})").into()),
        _ = terminate.recv() => Err("told to stop".into()),
        _ = interrupt.recv() => Err("told to stop".into()),
    };
    database.stop().await;
    outcome
}

async fn run(arguments: &Arguments, database: &Embedded, dir: &Path) -> Result<(), Failure> {
    let begun = Begun::now();
    let machine = Machine::look(database, dir).await?;
    let results = rounds::run(arguments, database, dir).await?;
    let ratios = ratios::all(&results);
    let report = Report { arguments, machine, date: begun.date()?, duration: begun.elapsed(), results, ratios };
    println!("\n{}", report.text());
    report.write_files()?;
    if report.results.correct() { Ok(()) } else { Err("not everything was answered or stored as it should be".into()) }
}
