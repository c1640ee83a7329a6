//! Replays a trace of a production cluster: 1,523 nodes register as EMs, and 8,152 tasks ask for a ticket when they were created,
//! are inited when they were scheduled, and are released when they were deleted.
//!
//! ```text
//! cargo run --release --example openb                                      with a service of its own, as fast as it goes
//! cargo run --release --example openb -- --address http://127.0.0.1:50051  with a running one
//! cargo run --release --example openb -- --hold                            until the cluster is full
//! cargo run --release --example openb -- --choose --user-limits            the service chooses, within limits
//! ```
//!
//! In the trace hardly more than fifty tasks live at the same time, so nothing is ever short. With `--hold` no task ends before the
//! last one has started; together they want nearly all GPUs there are, and the service has to refuse what does not fit.
//!
//! By default the replay says which node a task is to run on, by first fit (see `plan.rs`). With `--choose` it does not, and the
//! service chooses. With `--user-limits` no user may hold more than three quarters of what the hungriest one would. In either case
//! one request is made after the other, unless `--overtake` is given, and every answer has to be true by a model of the cluster that
//! the replay keeps (see `explain.rs`). Next to what was granted stands what first fit grants under the same limit.
//!
//! At the peaks, in the middle and at the end it compares, over the API, the counters of every EM and every user with all live
//! tickets. The exit code tells whether they agreed, all answers were true, no fewer were granted than by first fit, and, with `--pack`, no
//! less of any dimension was placed.
//!
//! The data are from the public trace set alibaba/clusterdata, cluster-trace-gpu-v2023, published with "Beware of Fragmentation:
//! Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent" (USENIX ATC 2023); see `data/README.md`.

#![expect(clippy::print_stdout, reason = "an example speaks to whoever runs it")]

mod calls;
mod check;
mod explain;
mod local;
mod model;
mod nodes;
mod plan;
mod progress;
mod replay;
mod report;
mod trace;
mod user_limit;

use std::{
    error::Error,
    iter::successors,
    num::NonZeroUsize,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use indicatif::HumanCount;
use linkis_rm::{
    client::{ClientSettings, RmClient},
    domain::selector::Placement,
};

use plan::Plan;
use progress::Progress;
use replay::{Pace, Terms};
use report::Tally;
use trace::{Trace, TraceError};

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
    /// With --choose or --user-limits: let requests overtake each other too, instead of comparing every answer with what is held.
    #[arg(long)]
    overtake: bool,
    /// Name no node, and let the service choose.
    #[arg(long)]
    choose: bool,
    /// With --choose: fill one node after the other, instead of all evenly.
    #[arg(long, requires = "choose")]
    pack: bool,
    /// Let no user hold more than three quarters of what the hungriest one would.
    #[arg(long)]
    user_limits: bool,
    /// Let no task end before the last one has started, so that the cluster fills up.
    #[arg(long)]
    hold: bool,
    /// With --overtake: how many seconds a request waits in line before it is refused.
    #[arg(long, default_value = "0", value_name = "SECONDS", requires = "overtake")]
    wait: u32,
    /// First remove the nodes and the limit that an interrupted replay left behind.
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
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let causes = successors(error.source(), |cause: &&dyn Error| (*cause).source());
            eprintln!("openb: {}", causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")));
            ExitCode::FAILURE
        }
    }
}

/// Answers whether all was as it should be.
async fn run(arguments: &Arguments) -> Result<bool, Box<dyn Error>> {
    let trace = Trace::read(arguments.hold)?;
    let terms = terms(&trace, arguments)?;
    let plan = Plan::make(&trace, terms.limit)?;
    describe(&trace, &plan, terms);
    let local = match arguments.address {
        None => Some(local::Local::start().await?),
        Some(_) => None,
    };
    let address =
        arguments.address.as_ref().or(local.as_ref().map(|local| &local.address)).cloned().unwrap_or_default();
    println!("service at {address}{}", if local.is_some() { ", started for this replay" } else { "" });
    let client = RmClient::with(&address, &ClientSettings::once(CALL_TIMEOUT))?;
    if local.is_none() {
        make_room(&client, &address, &trace, arguments).await?;
    }
    let replayed = tokio::select! {
        replayed = replay(&client, &trace, &plan, terms, arguments) => replayed,
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    };
    match local {
        Some(local) => {
            let stopped = local.stop().await;
            return replayed.and_then(|tally| stopped.map(|()| tally.is_good(&plan.first_fit, terms)));
        }
        None if replayed.is_err() => eprintln!("Nodes may be left at {address}: --replace unregisters them next time."),
        None => {}
    }
    replayed.map(|tally| tally.is_good(&plan.first_fit, terms))
}

fn terms(trace: &Trace, arguments: &Arguments) -> Result<Terms, TraceError> {
    if arguments.choose {
        trace.check_choosable()?;
    }
    let limit = arguments.user_limits.then(|| user_limit::amounts(trace));
    let in_order = (arguments.choose || arguments.user_limits) && !arguments.overtake;
    let placement = arguments.pack.then_some(Placement::Pack);
    let wait = Duration::from_secs(arguments.wait.into());
    Ok(Terms { choose: arguments.choose, placement, limit, in_order, wait })
}

fn describe(trace: &Trace, plan: &Plan, terms: Terms) {
    let [nodes, tasks, steps, most] =
        [trace.nodes.len(), trace.tasks.len(), plan.steps.len(), plan.most_tasks].map(|n| HumanCount(n as u64));
    let unscheduled = trace.tasks.iter().filter(|task| task.scheduled.is_none()).count();
    println!(
        "{nodes} nodes; {tasks} tasks, {unscheduled} of them never scheduled, at most {most} at once; {steps} events"
    );
    if let Some(limit) = terms.limit {
        println!("each user may hold {limit}");
    }
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
    if arguments.replace {
        user_limit::remove(client).await?;
    }
    Ok(())
}

async fn replay(
    client: &RmClient,
    trace: &Trace,
    plan: &Plan,
    terms: Terms,
    arguments: &Arguments,
) -> Result<Tally, Box<dyn Error>> {
    let in_flight = arguments.in_flight.get();
    let started = Instant::now();
    nodes::register(client, &trace.nodes, in_flight).await?;
    if let Some(limit) = terms.limit {
        user_limit::set(client, limit).await?;
    }
    println!("registered in {:.1} s", started.elapsed().as_secs_f64());
    let progress = Progress::new(plan.steps.len());
    let pace = Pace { speed: arguments.speed.0, in_flight };
    let tally = replay::run(client, trace, plan, terms, pace, &progress).await;
    progress.finish();
    let mut tally = tally?;
    let all: Vec<_> = trace.nodes.iter().collect();
    let removed = nodes::unregister(client, &all, in_flight).await?;
    if removed != 0 {
        tally.violations.push(format!("{removed} tickets were left when the nodes were unregistered"));
    }
    if terms.limit.is_some() {
        user_limit::remove(client).await?;
    }
    println!("{}", tally.report(trace, plan, terms));
    Ok(tally)
}
