//! Crowds: very many objects of one kind at the same time, each against a new service process with a new PostgreSQL.
//!
//! A run shows the cost of a crowd, its effect on other callers at half load, and whether the stored counters agree
//! afterwards. Each crowd is a module: it prepares its objects by ordinary calls and adds to its [`findings`]. The
//! [`stage`] has the common parts; [`open`] makes the calls of others, which become due whether or not the service
//! replies.
//!
//! Each crowd has a timeout. An unfinished one is reported with its progress, and the next one starts. The exit code
//! states whether all finished and all counters agree, not whether every figure is within its bound.

use std::time::Duration;

use clap::ValueEnum;
use rm_devpg::EmbeddedPostgres;

use crate::{Arguments, Failure, machine, machine::Machine, report::StartTime, with_database};

use self::{findings::Findings, report::ScenarioReport, stage::Stage};

mod callers;
mod choosing;
mod closed;
mod deadlines;
mod em_goes;
mod findings;
mod fleet;
mod frozen;
mod heartbeats;
mod limit;
mod line;
mod many_queues;
mod memory;
mod open;
mod operators;
mod queues;
mod raw;
mod report;
mod resets;
mod rules;
mod small_em;
mod soak;
mod spent;
mod stage;
mod tables;
mod turns;
mod two_labels;

/// Timeout of one crowd: preparation, all rounds, and the check.
const CROWD_LIMIT: Duration = Duration::from_secs(45 * 60);

/// Kind of a crowd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Crowd {
    /// Tickets with simultaneous deadlines
    Deadlines,
    /// An EM that unregisters with very many tickets
    EmGoes,
    /// A limit that is set over many live tickets
    Limit,
    /// EMs that report
    Heartbeats,
    /// Operators that list tickets
    Operators,
    /// Callers while the database is stopped
    Frozen,
    /// Requests in a wait queue
    Line,
    /// Requests that name no EM
    Choosing,
    /// Very many limits
    Rules,
    /// Queues of an external cluster that is sometimes unavailable
    Queues,
    /// Requests that each wait for another EM or limit
    ManyQueues,
    /// EMs with few tickets beside one with very many
    SmallEm,
    /// Requests for two labels that no EM has together
    TwoLabels,
    /// Users that take turns
    Turns,
    /// Calls that are begun and reset
    Resets,
}

/// Options of all crowds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Fraction of the full size.
    pub scale: f64,
    /// Number of rounds of calm phase and event.
    pub rounds: u64,
}

/// Event of a run: a crowd, or a mix of everything for some minutes.
#[derive(Debug, Clone, Copy)]
enum ScenarioEvent {
    Crowd(Crowd),
    Soak(u64),
}

impl ScenarioEvent {
    fn name(self) -> &'static str {
        match self {
            Self::Crowd(Crowd::Deadlines) => "deadlines",
            Self::Crowd(Crowd::EmGoes) => "em-goes",
            Self::Crowd(Crowd::Limit) => "limit",
            Self::Crowd(Crowd::Heartbeats) => "heartbeats",
            Self::Crowd(Crowd::Operators) => "operators",
            Self::Crowd(Crowd::Frozen) => "frozen",
            Self::Crowd(Crowd::Line) => "line",
            Self::Crowd(Crowd::Choosing) => "choosing",
            Self::Crowd(Crowd::Rules) => "rules",
            Self::Crowd(Crowd::Queues) => "queues",
            Self::Crowd(Crowd::ManyQueues) => "many-queues",
            Self::Crowd(Crowd::SmallEm) => "small-em",
            Self::Crowd(Crowd::TwoLabels) => "two-labels",
            Self::Crowd(Crowd::Turns) => "turns",
            Self::Crowd(Crowd::Resets) => "resets",
            Self::Soak(_) => "soak",
        }
    }

    /// Returns the server options of the event.
    fn server_arguments(self) -> &'static [&'static str] {
        match self {
            Self::Crowd(Crowd::Frozen) => &frozen::SERVER,
            Self::Crowd(Crowd::Queues) => &queues::SERVER,
            Self::Crowd(Crowd::Turns) => &turns::SERVER,
            _ => &[],
        }
    }

    /// Runs the event. Returns the number of tickets that it leaves, if it is known.
    async fn pass(self, stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
        match self {
            Self::Crowd(Crowd::Deadlines) => deadlines::pass(stage, findings).await,
            Self::Crowd(Crowd::EmGoes) => em_goes::pass(stage, findings).await,
            Self::Crowd(Crowd::Limit) => limit::pass(stage, findings).await,
            Self::Crowd(Crowd::Heartbeats) => heartbeats::pass(stage, findings).await,
            Self::Crowd(Crowd::Operators) => operators::pass(stage, findings).await,
            Self::Crowd(Crowd::Frozen) => frozen::pass(stage, findings).await,
            Self::Crowd(Crowd::Line) => line::pass(stage, findings).await,
            Self::Crowd(Crowd::Choosing) => choosing::pass(stage, findings).await,
            Self::Crowd(Crowd::Rules) => rules::pass(stage, findings).await,
            Self::Crowd(Crowd::Queues) => queues::pass(stage, findings).await,
            Self::Crowd(Crowd::ManyQueues) => many_queues::pass(stage, findings).await,
            Self::Crowd(Crowd::SmallEm) => small_em::pass(stage, findings).await,
            Self::Crowd(Crowd::TwoLabels) => two_labels::pass(stage, findings).await,
            Self::Crowd(Crowd::Turns) => turns::pass(stage, findings).await,
            Self::Crowd(Crowd::Resets) => resets::pass(stage, findings).await,
            Self::Soak(minutes) => soak::pass(stage, findings, minutes).await,
        }
    }
}

/// Runs the requested crowds and reports their findings.
pub(crate) async fn run(arguments: &Arguments) -> Result<(), Failure> {
    let begun = StartTime::now();
    let options = Options { scale: arguments.crowds_scale, rounds: arguments.crowd_rounds };
    let (mut machine, mut passed, mut broken) = (None, Vec::new(), None);
    for event in events(arguments) {
        let mut findings = Findings::default();
        let done = with_database(async |database, dir| {
            machine = Some(Machine::look(database, dir).await?);
            if let Err(error) = one(event, options, database, &mut findings).await {
                findings.wrong.push(format!("it could not begin: {error}"));
            }
            Ok(())
        })
        .await;
        if let Err(error) = done {
            findings.unfinished.push(error.to_string());
            broken = Some(error);
        }
        findings.unfinished.iter().chain(&findings.wrong).for_each(|problem| eprintln!("  {problem}"));
        passed.push((event.name(), findings));
        if broken.is_some() {
            break;
        }
    }
    let report = ScenarioReport { options, date: begun.date()?, duration: begun.elapsed(), machine, passed };
    report.print();
    report.write(arguments.json.as_deref())?;
    match broken {
        Some(error) => Err(error),
        None if report.sound() => Ok(()),
        None => Err("not every crowd finished, or not all books agree".into()),
    }
}

fn events(arguments: &Arguments) -> Vec<ScenarioEvent> {
    let crowds = match arguments.crowds.as_deref() {
        None => &[],
        Some([]) => Crowd::value_variants(),
        Some(some) => some,
    };
    let soak = arguments.crowds_soak.map(ScenarioEvent::Soak);
    crowds.iter().copied().map(ScenarioEvent::Crowd).chain(soak).collect()
}

async fn one(
    event: ScenarioEvent,
    options: Options,
    database: &EmbeddedPostgres,
    findings: &mut Findings,
) -> Result<(), Failure> {
    eprintln!("{}", event.name());
    let database = machine::create_database(database, "crowd").await?;
    let mut stage = Stage::start(options, database, event.server_arguments()).await?;
    let own = match tokio::time::timeout(CROWD_LIMIT, event.pass(&mut stage, findings)).await {
        Ok(Ok(own)) => own,
        Ok(Err(error)) => {
            findings.wrong.push(format!("it could not pass: {error}"));
            None
        }
        Err(_) => {
            findings.unfinished.push(format!("not all of it within {} minutes", CROWD_LIMIT.as_secs() / 60));
            None
        }
    };
    stage.check(findings, own).await;
    stage.stop().await;
    Ok(())
}
