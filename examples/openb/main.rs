//! Replay of a trace of a production cluster.
//!
//! 1,523 nodes register as EMs. 8,152 tasks request a ticket at their creation, confirm it at their start, and release
//! it at their deletion.
//!
//! ```text
//! cargo run --release                                             the service, in another terminal
//! cargo run --release --example openb                             at full speed
//! cargo run --release --example openb -- --hold                   until the cluster is full
//! cargo run --release --example openb -- --choose --user-limits   the service selects nodes, within limits
//! ```
//!
//! In the trace hardly more than fifty tasks live at the same time, so nothing is ever short. With `--hold` no task
//! ends before the last one has started. All tasks together need nearly all GPUs, and the service has to refuse some.
//!
//! By default the replay names the node of a task, by first fit (see `plan.rs`). With `--choose` the service selects
//! the nodes. With `--user-limits` no user may use more than three quarters of what the largest user would. In both
//! cases requests are made one after another, unless `--overtake` is given. Every reply then has to agree with the
//! replay's model of the cluster (see `explain.rs`). The report compares the grants with those of first fit under the
//! same limit.
//!
//! At the peaks, in the middle and at the end, the replay compares the counters of every EM and user with all live
//! tickets, over the API. The exit code is zero if they agree, all replies are right, and the service granted at least
//! as many tasks as first fit. With `--pack`, it must also have placed at least as much of each dimension.
//!
//! The data are from the public trace set alibaba/clusterdata, cluster-trace-gpu-v2023, published with "Beware of
//! Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent" (USENIX ATC 2023); see
//! `data/README.md`.

#![expect(clippy::print_stdout, reason = "an example prints its report")]

mod calls;
mod check;
mod explain;
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
use rm_client::{ClientSettings, RmClient};
use rm_model::selector::Placement;

use plan::Plan;
use progress::Progress;
use replay::{Pace, Terms};
use report::{Tally, Thousands};
use trace::{Trace, TraceError};

const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Replay a trace of a production cluster against the resource manager
#[derive(Debug, Parser)]
struct Arguments {
    /// Service to use; it has no EMs but those of the trace
    #[arg(long, default_value = "http://127.0.0.1:50051")]
    address: String,
    /// Trace seconds per second; "none" makes no pauses
    #[arg(long, default_value = "none", value_parser = parse_speed)]
    speed: Speed,
    /// Maximum number of calls in progress
    #[arg(long, default_value = "64")]
    in_flight: NonZeroUsize,
    /// With --choose or --user-limits: let requests overtake each other, and do not compare every reply with the model
    #[arg(long)]
    overtake: bool,
    /// Name no node, and let the service select it
    #[arg(long)]
    choose: bool,
    /// With --choose: fill one node after another instead of all evenly
    #[arg(long, requires = "choose")]
    pack: bool,
    /// Limit each user to three quarters of what the largest user would use
    #[arg(long)]
    user_limits: bool,
    /// Let no task end before the last one has started, so that the cluster fills up
    #[arg(long)]
    hold: bool,
    /// With --overtake: seconds for which a request waits before it is refused
    #[arg(long, default_value = "0", value_name = "SECONDS", requires = "overtake")]
    wait: u32,
    /// First remove the nodes and the limit that an interrupted replay left behind
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

/// Runs the replay. Returns true if every check passed.
async fn run(arguments: &Arguments) -> Result<bool, Box<dyn Error>> {
    let trace = Trace::read(arguments.hold)?;
    let terms = terms(&trace, arguments)?;
    let plan = Plan::make(&trace, terms.limit)?;
    describe(&trace, &plan, terms);
    let address = arguments.address.as_str();
    println!("service at {address}");
    let client = RmClient::with(address, &ClientSettings::once(CALL_TIMEOUT))?;
    make_room(&client, &trace, arguments).await?;
    let replayed = tokio::select! {
        replayed = replay(&client, &trace, &plan, terms, arguments) => replayed,
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    };
    if replayed.is_err() {
        eprintln!("Nodes may be left at {address}: --replace unregisters them next time.");
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
        [trace.nodes.len(), trace.tasks.len(), plan.steps.len(), plan.most_tasks].map(|n| Thousands(n as u64));
    let unscheduled = trace.tasks.iter().filter(|task| task.scheduled.is_none()).count();
    println!(
        "{nodes} nodes; {tasks} tasks, {unscheduled} of them never scheduled, at most {most} at once; {steps} events"
    );
    if let Some(limit) = terms.limit {
        println!("each user may hold {limit}");
    }
}

/// Removes earlier nodes of the trace, or fails without `--replace`. Their tickets would not be in the plan.
async fn make_room(client: &RmClient, trace: &Trace, arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let address = &arguments.address;
    let left_behind = nodes::registered(client, address, trace).await?;
    if !left_behind.is_empty() && !arguments.replace {
        let count = Thousands(left_behind.len() as u64);
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
