//! Replay: makes the calls of the plan concurrently, and keeps dependent calls in order.
//!
//! - The calls of one task wait for each other.
//! - A request waits for the releases in progress on its node if it needs their capacity.
//! - A request to be refused waits for every earlier change of its node, and later releases wait for it. The service
//!   then decides by the amounts of the plan.
//!
//! All other calls may overtake each other: requests that fit in the plan fit together, in any order.
//!
//! If the service selects the nodes, or a limit is set, no plan can predict the replies. A request is then made alone,
//! after every earlier call and before every later one, so that its reply can be compared with a model of the cluster.
//! With `--overtake` requests overtake each other, and refusals are only checked for completeness.

use std::{collections::HashMap, sync::Arc, time::Duration};

use rm_client::RmClient;
use rm_model::{em::EmInstance, refusal::Refusal, selector::Placement};
use tokio::{sync::Semaphore, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    calls::{CallError, Engine, FinishedCall, Outcome, em_instance},
    check::{self, CheckResult},
    explain,
    model::Model,
    plan::{Action, Plan, Step},
    progress::Progress,
    report::Tally,
    trace::{Amounts, Trace},
};

/// Speed of the replay.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Trace seconds per second; `None` without pauses.
    pub speed: Option<f64>,
    /// Maximum number of calls in progress.
    pub in_flight: usize,
}

/// Settings that determine the replies.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Whether the service selects the nodes, instead of the plan.
    pub choose: bool,
    /// Placement of the requests; `None` for the policy of the service.
    pub placement: Option<Placement>,
    /// Limit of each user; `None` without a limit.
    pub limit: Option<Amounts>,
    /// Whether requests are made alone, in the order of the trace, so that every reply can be compared with the model.
    pub in_order: bool,
    /// Time for which a request waits before it is refused.
    pub wait: Duration,
}

impl Terms {
    /// Returns true if the plan determines every reply, in any order of the calls.
    pub fn are_planned(self) -> bool {
        !self.choose && self.limit.is_none()
    }
}

/// Result of a step.
type StepResult = Result<(Step, FinishedCall), CallError>;

struct Replay<'a> {
    client: &'a RmClient,
    trace: &'a Trace,
    plan: &'a Plan,
    terms: Terms,
    engines: Vec<Arc<Engine>>,
    window: Arc<Semaphore>,
    under_way: JoinSet<StepResult>,
    /// The latest call of each task.
    latest: Vec<CancellationToken>,
    /// Calls in progress on each node.
    changes: Vec<Changes>,
    /// Amounts of each node by the plan, after all calls in progress.
    held: Vec<Amounts>,
    /// Amounts by node and user, by the replies.
    model: Model<'a>,
    node_numbers: HashMap<EmInstance, usize>,
    tally: Tally,
}

/// Calls in progress on one node. The token of a call is cancelled when the call is done.
#[derive(Debug, Clone, Default)]
struct Changes {
    fitting: Vec<CancellationToken>,
    refused: Vec<CancellationToken>,
    /// Releases, with the amounts that they free.
    releases: Vec<(CancellationToken, Amounts)>,
}

/// Replays the plan on registered, empty nodes and leaves them empty.
pub async fn run(
    client: &RmClient,
    trace: &Trace,
    plan: &Plan,
    terms: Terms,
    pace: Pace,
    progress: &Progress,
) -> Result<Tally, CallError> {
    let replay_id = Uuid::new_v4();
    let ems: Vec<_> = trace.nodes.iter().map(em_instance).collect::<Result<_, _>>()?;
    let engines = trace.tasks.iter().zip(&plan.places).map(|(task, place)| {
        let em = (!terms.choose).then(|| ems[place.node].clone());
        Engine::new(replay_id, task, em, terms).map(Arc::new)
    });
    let replay = Replay {
        client,
        trace,
        plan,
        terms,
        engines: engines.collect::<Result<_, _>>()?,
        window: Arc::new(Semaphore::new(pace.in_flight)),
        under_way: JoinSet::new(),
        latest: vec![CancellationToken::new(); trace.tasks.len()],
        changes: vec![Changes::default(); trace.nodes.len()],
        held: vec![Amounts::default(); trace.nodes.len()],
        model: Model::new(trace, terms.limit),
        node_numbers: ems.into_iter().zip(0..).collect(),
        tally: Tally::default(),
    };
    replay.run(pace.speed, progress).await
}

impl Replay<'_> {
    async fn run(mut self, speed: Option<f64>, progress: &Progress) -> Result<Tally, CallError> {
        let (plan, started) = (self.plan, Instant::now());
        let mut checkpoints = plan.checkpoints.iter().peekable();
        let mut checking = Duration::ZERO;
        for (number, step) in (1..).zip(&plan.steps) {
            if let Some(speed) = speed {
                let due = Duration::try_from_secs_f64((step.at - plan.steps[0].at) as f64 / speed).unwrap_or_default();
                let due = started + checking + due;
                tokio::time::sleep_until(due).await;
                self.tally.behind = self.tally.behind.max(due.elapsed());
            }
            let alone = self.terms.in_order && step.action == Action::Ask;
            if alone {
                self.drain().await?;
            }
            self.start(*step).await;
            if alone {
                self.drain().await?;
            }
            while let Some(done) = self.under_way.try_join_next() {
                self.count(done?)?;
            }
            progress.set(number);
            if let Some(checkpoint) = checkpoints.next_if(|checkpoint| checkpoint.steps_done == number) {
                self.drain().await?;
                let paused = Instant::now();
                let checked = self.check().await?;
                progress.line(&checked.summary(&format!("second {}", checkpoint.at), &checkpoint.peaks));
                self.tally.add_check(checkpoint, checked);
                checking += paused.elapsed();
            }
        }
        self.drain().await?;
        self.tally.elapsed = started.elapsed() - checking;
        let checked = self.check().await?;
        progress.line(&checked.summary("the end", &[]));
        self.tally.violations.extend(checked.violations);
        Ok(self.tally)
    }

    async fn check(&self) -> Result<CheckResult, CallError> {
        check::counters_against_tickets(self.client, &self.trace.nodes, &self.model).await
    }

    /// Waits for a permit and starts the call, which first waits for the calls that it depends on.
    async fn start(&mut self, step: Step) {
        // The semaphore is never closed. Without a permit the call is only not counted.
        let permit = self.window.clone().acquire_owned().await.ok();
        let done = CancellationToken::new();
        let mut earlier = self.depends_on(step, &done);
        let own = std::mem::replace(&mut self.latest[step.task], done.clone());
        if step.action != Action::Ask {
            earlier.push(own);
        }
        let (client, engine) = (self.client.clone(), self.engines[step.task].clone());
        self.under_way.spawn(async move {
            let (_permit, _done) = (permit, done.drop_guard());
            for call in earlier {
                call.cancelled().await;
            }
            let answered = match step.action {
                Action::Ask => engine.ask(&client).await,
                Action::Init => engine.init(&client).await,
                Action::Release => engine.release(&client).await,
            };
            Ok((step, answered?))
        });
    }

    /// Records the change of a call on its node. Returns the calls on the node that it depends on.
    fn depends_on(&mut self, step: Step, done: &CancellationToken) -> Vec<CancellationToken> {
        if !self.terms.are_planned() {
            return vec![];
        }
        let (place, need) = (self.plan.places[step.task], self.trace.tasks[step.task].need());
        let (changes, held) = (&mut self.changes[place.node], &mut self.held[place.node]);
        let Changes { fitting, refused, releases } = changes;
        fitting.retain(|call| !call.is_cancelled());
        refused.retain(|call| !call.is_cancelled());
        releases.retain(|(call, _)| !call.is_cancelled());
        match (step.action, place.fits) {
            (Action::Ask, true) => {
                *held = *held + need;
                fitting.push(done.clone());
                let not_yet_free = releases.iter().fold(*held, |sum, (_, freed)| sum + *freed);
                if not_yet_free.fits_in(self.trace.nodes[place.node].total()) {
                    vec![]
                } else {
                    calls(releases).collect()
                }
            }
            (Action::Ask, false) => {
                refused.push(done.clone());
                fitting.iter().cloned().chain(calls(releases)).collect()
            }
            (Action::Release, true) => {
                *held = *held - need;
                releases.push((done.clone(), need));
                refused.clone()
            }
            (Action::Release, false) | (Action::Init, _) => vec![],
        }
    }

    async fn drain(&mut self) -> Result<(), CallError> {
        while let Some(done) = self.under_way.join_next().await {
            self.count(done?)?;
        }
        Ok(())
    }

    fn count(&mut self, done: StepResult) -> Result<(), CallError> {
        let (step, answered) = done?;
        let task = &self.trace.tasks[step.task];
        match &answered.outcome {
            Outcome::Granted(em) => self.granted(step.task, em),
            Outcome::Refused(refusal) => self.refused(step.task, refusal)?,
            Outcome::Released => self.model.free(step.task),
            Outcome::Inited | Outcome::Nothing => {}
        }
        self.tally.add_call(answered, task);
        Ok(())
    }

    fn granted(&mut self, number: usize, em: &EmInstance) {
        let (task, place) = (&self.trace.tasks[number], self.plan.places[number]);
        let Some(&node) = self.node_numbers.get(em) else {
            self.tally.violations.push(format!("{} was granted on {em}, which is no node of the trace", task.name));
            return;
        };
        if self.terms.are_planned() && !place.fits {
            self.tally.violations.push(format!("{} was granted on a full node", task.name));
        }
        if self.terms.in_order {
            self.tally.violations.extend(explain::wrong_grant(&self.model, self.trace, task, node));
        }
        self.model.hold(number, node);
    }

    fn refused(&mut self, number: usize, refusal: &Refusal) -> Result<(), CallError> {
        let (task, place) = (&self.trace.tasks[number], self.plan.places[number]);
        if self.terms.are_planned() && place.fits {
            self.tally.violations.push(format!("{} was refused where it fits: {}", task.name, refusal.reason));
        }
        self.tally.violations.extend(explain::gaps(refusal, task));
        if self.terms.in_order {
            let asked = (!self.terms.choose).then_some(place.node);
            let wrong = explain::wrong_refusal(&self.model, self.trace, task, asked, refusal)?;
            self.tally.violations.extend(wrong);
        }
        Ok(())
    }
}

fn calls(releases: &[(CancellationToken, Amounts)]) -> impl Iterator<Item = CancellationToken> {
    releases.iter().map(|(call, _)| call.clone())
}
