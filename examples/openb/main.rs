//! Replays a trace of a production cluster: 1,523 nodes register as EMs, and 8,152 tasks ask for a ticket when they were created,
//! are inited when they were scheduled, and are released when they were deleted.
//!
//! ```text
//! cargo run --release --example openb                                      with a service of its own, as fast as it goes
//! cargo run --release --example openb -- --address http://127.0.0.1:50051  with a running one
//! cargo run --release --example openb -- --hold                            until the cluster is full
//! ```
//!
//! In the trace hardly more than fifty tasks live at the same time, so nothing is ever short. With `--hold` no task ends before the
//! last one has started; together they want nearly all GPUs there are, and the service has to refuse what does not fit.
//!
//! The service does not choose EMs: the replay does, by first fit (see `plan.rs`). At the peaks, in the middle and at the end it
//! compares, over the API, the counters of every EM with all live tickets; the exit code tells whether they agreed.
//!
//! The data are from the public trace set alibaba/clusterdata, cluster-trace-gpu-v2023, published with "Beware of Fragmentation:
//! Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent" (USENIX ATC 2023); see `data/README.md`.

#![expect(clippy::print_stdout, reason = "an example speaks to whoever runs it")]

mod calls;
mod check;
mod local;
mod nodes;
mod plan;
mod progress;
mod replay;
mod report;
mod trace;

use std::{
    error::Error,
    iter::successors,
    num::NonZeroUsize,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use indicatif::HumanCount;
use linkis_rm::client::RmClient;

use plan::Plan;
use progress::Progress;
use replay::Pace;
use report::Tally;
use trace::Trace;

const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Replays a trace of a production cluster against the resource manager.
#[derive(Debug, Parser)]
struct Arguments {
    /// The service to use, e.g. http://127.0.0.1:50051. Without it, one is started for the replay.
    #[arg(long)]
    address: Option<String>,
    /// How many trace seconds go by in a second; "none" makes no pauses.
    #[arg(long, default_value = "none", value_parser = parse_speed)]
    speed: Speed,
    /// How many calls may be under way at the same time.
    #[arg(long, default_value = "64")]
    in_flight: NonZeroUsize,
    /// Let no task end before the last one has started, so that the cluster fills up.
    #[arg(long)]
    hold: bool,
    /// First unregister the nodes that an interrupted replay left behind.
    #[arg(long)]
    replace: bool,
}

#[derive(Debug, Clone, Copy)]
struct Speed(Option<f64>);

fn parse_speed(text: &str) -> Result<Speed, String> {
    match text.parse() {
        _ if text == "none" => Ok(Speed(None)),
        Ok(speed) if f64::is_finite(speed) && speed > 0.0 => Ok(Speed(Some(speed))),
        _ => Err("is neither a number above zero nor \"none\"".into()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments).await {
        Ok(tally) if tally.violations.is_empty() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            let causes = successors(error.source(), |cause: &&dyn Error| (*cause).source());
            eprintln!("openb: {}", causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")));
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result<Tally, Box<dyn Error>> {
    let trace = Trace::read(arguments.hold)?;
    let plan = Plan::make(&trace)?;
    describe(&trace, &plan);
    let local = match arguments.address {
        None => Some(local::Local::start().await?),
        Some(_) => None,
    };
    let address =
        arguments.address.as_ref().or(local.as_ref().map(|local| &local.address)).cloned().unwrap_or_default();
    println!("service at {address}{}", if local.is_some() { ", started for this replay" } else { "" });
    let client = RmClient::new(&address, CALL_TIMEOUT)?;
    if local.is_none() {
        make_room(&client, &address, &trace, arguments).await?;
    }
    let replayed = tokio::select! {
        replayed = replay(&client, &trace, &plan, arguments) => replayed,
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    };
    match local {
        Some(local) => {
            let stopped = local.stop().await;
            return replayed.and_then(|tally| stopped.map(|()| tally));
        }
        None if replayed.is_err() => eprintln!("Nodes may be left at {address}: --replace unregisters them next time."),
        None => {}
    }
    replayed
}

fn describe(trace: &Trace, plan: &Plan) {
    let [nodes, tasks, steps, most] =
        [trace.nodes.len(), trace.tasks.len(), plan.steps.len(), plan.most_tasks].map(|n| HumanCount(n as u64));
    let unscheduled = trace.tasks.iter().filter(|task| task.scheduled.is_none()).count();
    println!(
        "{nodes} nodes; {tasks} tasks, {unscheduled} of them never scheduled, at most {most} at once; {steps} events"
    );
}

/// The nodes must be new to the service: what others hold on them would not be in the plan.
async fn make_room(
    client: &RmClient,
    address: &str,
    trace: &Trace,
    arguments: &Arguments,
) -> Result<(), Box<dyn Error>> {
    let left_behind = nodes::registered(client, address, trace).await?;
    if !left_behind.is_empty() && !arguments.replace {
        let count = HumanCount(left_behind.len() as u64);
        return Err(format!(
            "{count} nodes of the trace are registered at {address} already: if no other replay is running there, \
             --replace unregisters them first"
        )
        .into());
    }
    nodes::unregister(client, &left_behind, arguments.in_flight.get()).await?;
    Ok(())
}

async fn replay(client: &RmClient, trace: &Trace, plan: &Plan, arguments: &Arguments) -> Result<Tally, Box<dyn Error>> {
    let in_flight = arguments.in_flight.get();
    let started = Instant::now();
    nodes::register(client, &trace.nodes, in_flight).await?;
    println!("registered in {:.1} s", started.elapsed().as_secs_f64());
    let progress = Progress::new(plan.steps.len());
    let pace = Pace { speed: arguments.speed.0, in_flight };
    let tally = replay::run(client, trace, plan, pace, &progress).await;
    progress.finish();
    let mut tally = tally?;
    let all: Vec<_> = trace.nodes.iter().collect();
    let removed = nodes::unregister(client, &all, in_flight).await?;
    if removed != 0 {
        tally.violations.push(format!("{removed} tickets were left when the nodes were unregistered"));
    }
    println!("{}", tally.report(trace.cluster()));
    Ok(tally)
}
