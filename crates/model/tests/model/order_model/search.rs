//! Depth-first search through all orders of events of a setting, up to a number of events and a deadline.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::Instant,
};

use super::{
    invariants::check_state,
    is_long,
    setting::Setting,
    world::{Event, Mistake, Model, World},
};

/// A broken invariant, with the events that lead there.
#[derive(Debug)]
pub struct Broken {
    pub invariant: String,
    pub events: Vec<Event>,
}

#[derive(Debug, Default)]
pub struct Found {
    pub states: usize,
    /// Whether the search visited all states within the number of events.
    pub is_complete: bool,
    pub broken: Option<Broken>,
}

struct Search<'a> {
    model: Model<'a>,
    deadline: Instant,
    /// Number of events that were left at the latest visit, by the hash of the state.
    seen: HashMap<u64, usize>,
    path: Vec<Event>,
    found: Found,
}

/// Visits the states of a setting.
pub fn explore(setting: &Setting, mistake: Option<Mistake>, events: usize, deadline: Instant) -> Found {
    let model = Model { setting, mistake, checks_part: is_long() };
    let found = Found { is_complete: true, ..Found::default() };
    let mut search = Search { model, deadline, seen: HashMap::new(), path: vec![], found };
    search.visit(&World::new(setting), events);
    Found { states: search.seen.len(), ..search.found }
}

impl Search<'_> {
    fn visit(&mut self, world: &World, left: usize) {
        if left == 0 {
            return;
        }
        for event in self.model.events(world) {
            if Instant::now() > self.deadline {
                self.found.is_complete = false;
            }
            if !self.found.is_complete || self.found.broken.is_some() {
                return;
            }
            self.path.push(event);
            match self.model.step(world, event) {
                Ok(next) => self.enter(&next, left - 1),
                Err(invariant) => self.broken(invariant),
            }
            self.path.pop();
        }
    }

    fn enter(&mut self, world: &World, left: usize) {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        let before = self.seen.insert(hasher.finish(), left);
        match before {
            // A visit with more events left has covered this one.
            Some(before) if before >= left => drop(self.seen.insert(hasher.finish(), before)),
            Some(_) => self.visit(world, left),
            None => match check_state(&self.model, world) {
                Ok(()) => self.visit(world, left),
                Err(invariant) => self.broken(invariant),
            },
        }
    }

    fn broken(&mut self, invariant: String) {
        self.found.broken.get_or_insert(Broken { invariant, events: self.path.clone() });
    }
}
