//! The cluster as the replay knows it: what every node and every user holds by the answers that it got. It shares nothing with
//! the service, and so can tell whether an answer is true.

use std::{cmp::Reverse, collections::HashMap};

use super::trace::{Amounts, Task, Trace};

/// Who holds what.
#[derive(Debug)]
pub struct Model<'a> {
    trace: &'a Trace,
    /// How much each user may hold; `None` for no limit.
    limit: Option<Amounts>,
    /// What each node holds.
    nodes: Vec<Amounts>,
    users: HashMap<String, Amounts>,
    /// On which node each task is, if it is on one.
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

    /// A task is granted on a node.
    pub fn hold(&mut self, task: usize, node: usize) {
        let (user, need) = (self.trace.tasks[task].user(), self.trace.tasks[task].need());
        let of_user = self.users.entry(user).or_default();
        (self.nodes[node], *of_user) = (self.nodes[node] + need, *of_user + need);
        self.on[task] = Some(node);
    }

    /// A task is released, if it was granted.
    pub fn free(&mut self, task: usize) {
        let Some(node) = self.on[task].take() else { return };
        let (user, need) = (self.trace.tasks[task].user(), self.trace.tasks[task].need());
        let of_user = self.users.entry(user).or_default();
        (self.nodes[node], *of_user) = (self.nodes[node] - need, *of_user - need);
    }

    /// What each node holds, in the order of the nodes.
    pub fn nodes(&self) -> &[Amounts] {
        &self.nodes
    }

    /// What each user holds who ever held anything.
    pub fn users(&self) -> &HashMap<String, Amounts> {
        &self.users
    }

    /// How much each user may hold.
    pub fn limit(&self) -> Option<Amounts> {
        self.limit
    }

    fn room(&self, node: usize) -> Amounts {
        self.trace.nodes[node].total() - self.nodes[node]
    }

    fn candidates(&self, task: &Task) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|node| task.accepts(&self.trace.nodes[*node]))
    }

    /// The first node that has room.
    pub fn first_fit(&self, task: &Task) -> Option<usize> {
        self.candidates(task).find(|node| task.need().fits_in(self.room(*node)))
    }

    /// The node with most room; none if no node will ever do.
    pub fn most_room(&self, task: &Task) -> Option<usize> {
        self.candidates(task).min_by_key(|node| {
            let room = self.room(*node);
            // What is rarest counts first; of equals the first one.
            let gpu_milli = if task.need().gpu_milli > 0 { room.gpu_milli } else { 0 };
            (Reverse(gpu_milli), Reverse(room.cpu_milli), Reverse(room.memory_mib))
        })
    }

    /// What a task lacks on a node.
    pub fn short_on(&self, node: usize, task: &Task) -> Vec<Short> {
        short(task.need(), self.room(node), self.trace.nodes[node].total())
    }

    /// What a task's user may not hold any more.
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
