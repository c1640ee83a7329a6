//! The plan: every call of the replay in the order of the trace, and for each request the node to ask, by first fit in a mirror of
//! the cluster. It depends on nothing but the trace, so that every replay has the same answers, however many calls are in flight.

use std::cmp::Reverse;

use super::trace::{Amounts, Node, Task, Trace, TraceError};

/// What a replay does, and when it stops to check.
#[derive(Debug)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Where each task goes, in the order of the tasks.
    pub places: Vec<Place>,
    /// After which steps to check, in order.
    pub checkpoints: Vec<Checkpoint>,
    /// How many tasks were there at most, at the same time.
    pub most_tasks: usize,
}

/// A call for one task.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Trace time in seconds.
    pub at: i64,
    pub task: usize,
    pub action: Action,
}

/// The calls of a task, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Ask,
    Init,
    Release,
}

/// Where a task asks.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub node: usize,
    /// Whether it fits; if not, it asks where there is most room, and the service is to say no.
    pub fits: bool,
}

/// A moment at which all counters are compared with all tickets.
#[derive(Debug)]
pub struct Checkpoint {
    /// How many steps have been done.
    pub steps_done: usize,
    pub at: i64,
    /// Which peaks these are; empty for the middle of the replay.
    pub peaks: Vec<&'static str>,
}

impl Plan {
    pub fn make(trace: &Trace) -> Result<Self, TraceError> {
        let steps = ordered_steps(&trace.tasks);
        let mut mirror = Mirror::new(&trace.nodes);
        let mut places = vec![None; trace.tasks.len()];
        let (mut peaks, mut tasks, mut most_tasks) = ([(0, 0); 3], 0, 0);
        for (done, step) in (1..).zip(&steps) {
            let (task, place) = (&trace.tasks[step.task], &mut places[step.task]);
            match (step.action, *place) {
                (Action::Ask, _) => {
                    *place = Some(mirror.place(task).ok_or_else(|| TraceError::Model(task.name.clone()))?);
                    tasks += 1;
                }
                (Action::Release, Some(place)) => {
                    mirror.free(place, task);
                    tasks -= 1;
                }
                _ => {}
            }
            most_tasks = most_tasks.max(tasks);
            for (peak, held) in peaks.iter_mut().zip(mirror.held.values()) {
                if held > peak.0 {
                    *peak = (held, done);
                }
            }
        }
        let checkpoints = checkpoints(&steps, peaks.map(|(_, done)| done));
        Ok(Self { places: places.into_iter().flatten().collect(), steps, checkpoints, most_tasks })
    }
}

/// By time; within a second whoever goes makes room for whoever comes, except for tasks that come and go within it.
fn ordered_steps(tasks: &[Task]) -> Vec<Step> {
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

/// The capacity that is left, as seen by the one who asks.
struct Mirror<'a> {
    nodes: &'a [Node],
    room: Vec<Amounts>,
    held: Amounts,
}

impl<'a> Mirror<'a> {
    fn new(nodes: &'a [Node]) -> Self {
        Self { nodes, room: nodes.iter().map(Node::total).collect(), held: Amounts::default() }
    }

    /// The first node with enough room, or else the one with most of it; none if no node will ever do.
    fn place(&mut self, task: &Task) -> Option<Place> {
        let need = task.need();
        let candidates = || (0..self.nodes.len()).filter(|node| task.accepts(&self.nodes[*node]));
        let Some(node) = candidates().find(|node| need.fits_in(self.room[*node])) else {
            let most_room = |node: &usize| {
                let room = self.room[*node];
                // What is rarest counts first; of equals the first one.
                let gpu_milli = if need.gpu_milli > 0 { room.gpu_milli } else { 0 };
                (Reverse(gpu_milli), Reverse(room.cpu_milli), Reverse(room.memory_mib))
            };
            return candidates().min_by_key(most_room).map(|node| Place { node, fits: false });
        };
        self.room[node] = self.room[node] - need;
        self.held = self.held + need;
        Some(Place { node, fits: true })
    }

    fn free(&mut self, place: Place, task: &Task) {
        if place.fits {
            self.room[place.node] = self.room[place.node] + task.need();
            self.held = self.held - task.need();
        }
    }
}
