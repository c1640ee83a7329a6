//! Crowds: very many of one thing at once, each at the service in a process of its own, with a PostgreSQL of its own. How it copes,
//! what that does to others who are served at half load meanwhile, and whether the books agree afterwards.
//!
//! A crowd is a file here: it prepares itself by calls, like anybody, and adds what it sees to its [`findings`]. What they have in
//! common is the [`stage`]; others, whose calls become due whether or not anybody is served, are in [`open`].
//!
//! Each crowd has its time; one that does not finish is told with how far it got, and the next one comes. The exit code tells whether
//! all finished and all books agree, not whether everything was as wanted.

use std::time::Duration;

use clap::ValueEnum;
use linkis_rm::store::embedded::Embedded;

use crate::{Arguments, Failure, machine, machine::Machine, report::Begun, with_database};

use self::{findings::Findings, report::Report, stage::Stage};

mod callers;
mod choosing;
mod closed;
mod deadlines;
mod em_goes;
mod findings;
mod fleet;
mod frozen;
mod half_sent;
mod heartbeats;
mod held_em;
mod limit;
mod line;
mod many_queues;
mod memory;
mod once;
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
mod two_labels;

/// For a crowd to prepare itself, pass as often as told, and be looked at.
const CROWD_LIMIT: Duration = Duration::from_secs(45 * 60);

/// Of many, one crowd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Crowd {
    /// Tickets whose deadlines come together.
    Deadlines,
    /// An EM that goes with its tickets.
    EmGoes,
    /// A limit that is set over many live tickets.
    Limit,
    /// Messages that are begun and never finished.
    HalfSent,
    /// EMs that report.
    Heartbeats,
    /// Calls on an EM that an operator holds.
    HeldEm,
    /// Users who come once.
    Once,
    /// Operators who list tickets.
    Operators,
    /// Callers while the database stands still.
    Frozen,
    /// Requests in line.
    Line,
    /// Requests that name no EM.
    Choosing,
    /// Limits.
    Rules,
    /// Queues of an external cluster, which is away at times.
    Queues,
    /// Requests that each wait at another EM or limit.
    ManyQueues,
    /// EMs with few tickets beside one with very many.
    SmallEm,
    /// Requests for two labels that no EM has together.
    TwoLabels,
    /// Calls that are begun and reset.
    Resets,
}

/// How the crowds come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Their size, as a part of the full one.
    pub scale: f64,
    /// How often calm and crowd take turns.
    pub rounds: u64,
    /// How long the service is given to forget what is over.
    pub forget: Duration,
}

/// What passes: a crowd, or all that happens in so many minutes.
#[derive(Debug, Clone, Copy)]
enum Event {
    Crowd(Crowd),
    Soak(u64),
}

impl Event {
    fn name(self) -> &'static str {
        match self {
            Self::Crowd(Crowd::Deadlines) => "deadlines",
            Self::Crowd(Crowd::EmGoes) => "em-goes",
            Self::Crowd(Crowd::Limit) => "limit",
            Self::Crowd(Crowd::HalfSent) => "half-sent",
            Self::Crowd(Crowd::Heartbeats) => "heartbeats",
            Self::Crowd(Crowd::HeldEm) => "held-em",
            Self::Crowd(Crowd::Once) => "once",
            Self::Crowd(Crowd::Operators) => "operators",
            Self::Crowd(Crowd::Frozen) => "frozen",
            Self::Crowd(Crowd::Line) => "line",
            Self::Crowd(Crowd::Choosing) => "choosing",
            Self::Crowd(Crowd::Rules) => "rules",
            Self::Crowd(Crowd::Queues) => "queues",
            Self::Crowd(Crowd::ManyQueues) => "many-queues",
            Self::Crowd(Crowd::SmallEm) => "small-em",
            Self::Crowd(Crowd::TwoLabels) => "two-labels",
            Self::Crowd(Crowd::Resets) => "resets",
            Self::Soak(_) => "soak",
        }
    }

    /// What the service is told at its start.
    fn server_arguments(self) -> &'static [&'static str] {
        match self {
            Self::Crowd(Crowd::HeldEm) => &held_em::SERVER,
            Self::Crowd(Crowd::Frozen) => &frozen::SERVER,
            Self::Crowd(Crowd::Queues) => &queues::SERVER,
            _ => &[],
        }
    }

    /// Lets it pass; answers how many tickets it has in the end, if that is known.
    async fn pass(self, stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
        match self {
            Self::Crowd(Crowd::Deadlines) => deadlines::pass(stage, findings).await,
            Self::Crowd(Crowd::EmGoes) => em_goes::pass(stage, findings).await,
            Self::Crowd(Crowd::Limit) => limit::pass(stage, findings).await,
            Self::Crowd(Crowd::HalfSent) => half_sent::pass(stage, findings).await,
            Self::Crowd(Crowd::Heartbeats) => heartbeats::pass(stage, findings).await,
            Self::Crowd(Crowd::HeldEm) => held_em::pass(stage, findings).await,
            Self::Crowd(Crowd::Once) => once::pass(stage, findings).await,
            Self::Crowd(Crowd::Operators) => operators::pass(stage, findings).await,
            Self::Crowd(Crowd::Frozen) => frozen::pass(stage, findings).await,
            Self::Crowd(Crowd::Line) => line::pass(stage, findings).await,
            Self::Crowd(Crowd::Choosing) => choosing::pass(stage, findings).await,
            Self::Crowd(Crowd::Rules) => rules::pass(stage, findings).await,
            Self::Crowd(Crowd::Queues) => queues::pass(stage, findings).await,
            Self::Crowd(Crowd::ManyQueues) => many_queues::pass(stage, findings).await,
            Self::Crowd(Crowd::SmallEm) => small_em::pass(stage, findings).await,
            Self::Crowd(Crowd::TwoLabels) => two_labels::pass(stage, findings).await,
            Self::Crowd(Crowd::Resets) => resets::pass(stage, findings).await,
            Self::Soak(minutes) => soak::pass(stage, findings, minutes).await,
        }
    }
}

/// Lets all crowds pass that were asked for, and tells of them.
pub(crate) async fn run(arguments: &Arguments) -> Result<(), Failure> {
    let begun = Begun::now();
    let options = Options {
        scale: arguments.crowds_scale,
        rounds: arguments.crowd_rounds,
        forget: Duration::from_secs(60 * arguments.crowds_forget),
    };
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
    let report = Report { options, date: begun.date()?, duration: begun.elapsed(), machine, passed };
    report.print();
    report.write(arguments.json.as_deref())?;
    match broken {
        Some(error) => Err(error),
        None if report.sound() => Ok(()),
        None => Err("not every crowd finished, or not all books agree".into()),
    }
}

fn events(arguments: &Arguments) -> Vec<Event> {
    let crowds = match arguments.crowds.as_deref() {
        None => &[],
        Some([]) => Crowd::value_variants(),
        Some(some) => some,
    };
    let soak = arguments.crowds_soak.map(Event::Soak);
    crowds.iter().copied().map(Event::Crowd).chain(soak).collect()
}

async fn one(event: Event, options: Options, database: &Embedded, findings: &mut Findings) -> Result<(), Failure> {
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
