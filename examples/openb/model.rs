//! Model of the cluster: the amounts of every node and user, by the replies that the replay received. It shares no code
//! with the service, so it can verify the service's replies.

use std::{cmp::Reverse, collections::HashMap};

use super::trace::{Amounts, Task, Trace};

/// Amounts by node and user.
#[derive(Debug)]
pub struct Model<'a> {
    trace: &'a Trace,
    /// Limit of each user; `None` without a limit.
    limit: Option<Amounts>,
    /// Granted amounts of each node.
    nodes: Vec<Amounts>,
    users: HashMap<String, Amounts>,
    /// Node of each task; `None` without a grant.
    on: Vec<Option<usize>>,
}

/// One dimension that is short.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Short {
    pub dimension: &'static str,
    pub requested: i64,
    pub available: i64,
    pub max: i64,
}

impl<'a> Model<'a> {
    pub fn new(trace: &'a Trace, limit: Option<Amounts>) -> Self {
        Self {
            trace,
            limit,
            nodes: vec![Amounts::default(); trace.nodes.len()],
            users: HashMap::new(),
            on: vec![None; trace.tasks.len()],
        }
    }

    /// Records the grant of a task on a node.
    pub fn hold(&mut self, task: usize, node: usize) {
        let (user, need) = (self.trace.tasks[task].user(), self.trace.tasks[task].need());
        let of_user = self.users.entry(user).or_default();
        (self.nodes[node], *of_user) = (self.nodes[node] + need, *of_user + need);
        self.on[task] = Some(node);
    }

    /// Records the release of a task, if it has a grant.
    pub fn free(&mut self, task: usize) {
        let Some(node) = self.on[task].take() else { return };
        let (user, need) = (self.trace.tasks[task].user(), self.trace.tasks[task].need());
        let of_user = self.users.entry(user).or_default();
        (self.nodes[node], *of_user) = (self.nodes[node] - need, *of_user - need);
    }

    /// Returns the granted amounts of each node, in the order of the nodes.
    pub fn nodes(&self) -> &[Amounts] {
        &self.nodes
    }

    /// Returns the granted amounts of each user that ever had a grant.
    pub fn users(&self) -> &HashMap<String, Amounts> {
        &self.users
    }

    /// Returns the limit of each user.
    pub fn limit(&self) -> Option<Amounts> {
        self.limit
    }

    fn room(&self, node: usize) -> Amounts {
        self.trace.nodes[node].total() - self.nodes[node]
    }

    fn candidates(&self, task: &Task) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|node| task.accepts(&self.trace.nodes[*node]))
    }

    /// Returns the first node on which the task fits.
    pub fn first_fit(&self, task: &Task) -> Option<usize> {
        self.candidates(task).find(|node| task.need().fits_in(self.room(*node)))
    }

    /// Returns the node with the most free capacity for the task; `None` if no node accepts it.
    pub fn most_room(&self, task: &Task) -> Option<usize> {
        self.candidates(task).min_by_key(|node| {
            let room = self.room(*node);
            // The rarest dimension counts first; of equal nodes the first one.
            let gpu_milli = if task.need().gpu_milli > 0 { room.gpu_milli } else { 0 };
            (Reverse(gpu_milli), Reverse(room.cpu_milli), Reverse(room.memory_mib))
        })
    }

    /// Returns the shortages of a task on a node.
    pub fn short_on(&self, node: usize, task: &Task) -> Vec<Short> {
        short(task.need(), self.room(node), self.trace.nodes[node].total())
    }

    /// Returns the shortages of a task in its user's limit.
    pub fn short_of_limit(&self, task: &Task) -> Vec<Short> {
        let held = self.users.get(&task.user()).copied().unwrap_or_default();
        self.limit.map_or(vec![], |limit| short(task.need(), limit - held, limit))
    }
}

fn short(need: Amounts, room: Amounts, max: Amounts) -> Vec<Short> {
    let amounts = need.values().into_iter().zip(room.values()).zip(max.values());
    let named = Amounts::NAMES.into_iter().zip(amounts);
    let named = named.map(|(dimension, ((requested, available), max))| Short { dimension, requested, available, max });
    named.filter(|short| short.requested > 0 && short.requested > short.available).collect()
}
