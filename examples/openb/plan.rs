//! Plan of the replay: every call in the order of the trace, and the node of each request.
//!
//! Nodes are selected by first fit in a model of the cluster. The plan depends only on the trace and the limit, so
//! every replay of it is equal. If the service selects the nodes, its result is compared with the plan.

use super::{
    model::Model,
    trace::{Amounts, Task, Trace, TraceError},
};

/// Calls and checks of a replay.
#[derive(Debug)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Planned node of each task, in the order of the tasks.
    pub places: Vec<Place>,
    /// Checks, in the order of the steps that they follow.
    pub checkpoints: Vec<Checkpoint>,
    /// Maximum number of tasks at the same time.
    pub most_tasks: usize,
    /// Result of first fit.
    pub first_fit: Answers,
}

/// Numbers of granted and refused tasks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Answers {
    pub granted: u64,
    /// Amounts of all granted tasks together.
    pub amounts: Amounts,
    /// Refusals in which only an EM was short.
    pub refused_by_em: u64,
    /// Refusals in which a limit was short, and possibly an EM.
    pub refused_by_limit: u64,
}

impl Answers {
    pub fn grant(&mut self, need: Amounts) {
        self.granted += 1;
        self.amounts = self.amounts + need;
    }

    pub fn refuse(&mut self, by_limit: bool) {
        match by_limit {
            true => self.refused_by_limit += 1,
            false => self.refused_by_em += 1,
        }
    }
}

/// A call for one task.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Trace time in seconds.
    pub at: i64,
    pub task: usize,
    pub action: Action,
}

/// Calls of a task, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Ask,
    Init,
    Release,
}

/// Planned node of a task.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub node: usize,
    /// True if the task fits and its user's limit permits it; otherwise the service has to refuse it. A refused task
    /// names a node on which it would fit without the limit, or else the node with the most free capacity.
    pub fits: bool,
}

/// Point at which all counters are compared with all tickets.
#[derive(Debug)]
pub struct Checkpoint {
    /// Number of finished steps.
    pub steps_done: usize,
    pub at: i64,
    /// Dimensions that peak here; empty in the middle of the replay.
    pub peaks: Vec<&'static str>,
}

impl Plan {
    pub fn make(trace: &Trace, limit: Option<Amounts>) -> Result<Self, TraceError> {
        let steps = ordered_steps(&trace.tasks);
        let mut model = Model::new(trace, limit);
        let (mut places, mut first_fit) = (vec![None; trace.tasks.len()], Answers::default());
        let (mut peaks, mut held, mut tasks, mut most_tasks) = ([(0, 0); 3], Amounts::default(), 0, 0);
        for (done, step) in (1..).zip(&steps) {
            let task = &trace.tasks[step.task];
            let place = match (step.action, places[step.task]) {
                (Action::Ask, _) => *places[step.task].insert(place(&model, task)?),
                (_, Some(place)) => place,
                (_, None) => continue,
            };
            match step.action {
                Action::Ask if place.fits => {
                    model.hold(step.task, place.node);
                    first_fit.grant(task.need());
                    held = held + task.need();
                }
                Action::Ask => first_fit.refuse(!model.short_of_limit(task).is_empty()),
                Action::Release if place.fits => {
                    model.free(step.task);
                    held = held - task.need();
                }
                Action::Init | Action::Release => {}
            }
            match step.action {
                Action::Ask => tasks += 1,
                Action::Release => tasks -= 1,
                Action::Init => {}
            }
            most_tasks = most_tasks.max(tasks);
            for (peak, held) in peaks.iter_mut().zip(held.values()) {
                if held > peak.0 {
                    *peak = (held, done);
                }
            }
        }
        let checkpoints = checkpoints(&steps, peaks.map(|(_, done)| done));
        Ok(Self { places: places.into_iter().flatten().collect(), steps, checkpoints, most_tasks, first_fit })
    }
}

/// Returns the first node on which the task fits, or else the node with the most free capacity.
fn place(model: &Model<'_>, task: &Task) -> Result<Place, TraceError> {
    let found = model.first_fit(task);
    let node = found.or_else(|| model.most_room(task)).ok_or_else(|| TraceError::Model(task.name.clone()))?;
    Ok(Place { node, fits: found.is_some() && model.short_of_limit(task).is_empty() })
}

/// Returns the steps by time. Within a second releases precede requests, except those of tasks that were created in the
/// same second.
pub fn ordered_steps(tasks: &[Task]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::with_capacity(tasks.len() * 3);
    for (number, task) in tasks.iter().enumerate() {
        steps.push(Step { at: task.created, task: number, action: Action::Ask });
        steps.extend(task.scheduled.map(|at| Step { at, task: number, action: Action::Init }));
        steps.push(Step { at: task.deleted, task: number, action: Action::Release });
    }
    steps.sort_by_key(|step| {
        let within_second = match step.action {
            Action::Release if tasks[step.task].created < step.at => 0,
            Action::Ask => 1,
            Action::Init => 2,
            Action::Release => 3,
        };
        (step.at, within_second)
    });
    steps
}

fn checkpoints(steps: &[Step], peaks: [usize; 3]) -> Vec<Checkpoint> {
    let mut moments: Vec<usize> = peaks.into_iter().chain([steps.len() / 2]).filter(|done| *done > 0).collect();
    moments.sort_unstable();
    moments.dedup();
    let checkpoint = |steps_done: usize| {
        let named = Amounts::NAMES.into_iter().zip(peaks).filter(|(_, peak)| *peak == steps_done);
        Checkpoint { steps_done, at: steps[steps_done - 1].at, peaks: named.map(|(name, _)| name).collect() }
    };
    moments.into_iter().map(checkpoint).collect()
}
