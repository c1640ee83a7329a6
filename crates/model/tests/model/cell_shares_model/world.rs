//! State of the model: home, cells and all messages ever sent between them; and every commit that can come next.

use std::{
    collections::{BTreeSet, HashSet},
    hash::Hash,
};

use super::protocol::{Given, Home, Message, Mistake, Share};

/// Bounds of the visited states.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// The limit, which can be lowered to one, and raised again.
    pub maximum: u8,
    /// Number of changes of each cell.
    pub changes: u8,
    /// Maximum amount of one change.
    pub step: u8,
}

/// A state of all rows. Sent messages stay, so that each can be handled at any later time, again, or never.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World<const CELLS: usize> {
    pub home: Home<CELLS>,
    pub shares: [Share; CELLS],
    sent: BTreeSet<(usize, Message)>,
    /// The bound of the granted amount: the maximum, or, after it was lowered, the share at each commit since.
    bound: u8,
}

impl<const CELLS: usize> World<CELLS> {
    pub fn new(bounds: Bounds) -> Self {
        let home = Home { maximum: bounds.maximum, given: [Given::default(); CELLS] };
        Self { home, shares: [Share::default(); CELLS], sent: BTreeSet::new(), bound: bounds.maximum }
    }

    /// Whether the granted amount exceeds the bound.
    pub fn is_beyond(&self) -> bool {
        self.shares.iter().map(|share| share.held).sum::<u8>() > self.bound
    }

    /// Whether the invariants of every commit hold.
    pub fn is_well(&self) -> bool {
        let is_well = |(given, share): (&Given, &Share)| {
            let is_equal = (share.amount, share.number) == (given.amount, given.number);
            share.held <= share.amount && share.amount <= given.amount && (given.under_way.is_some() || is_equal)
        };
        !self.is_beyond() && self.home.total() <= self.bound && self.home.given.iter().zip(&self.shares).all(is_well)
    }

    /// Returns the states after each possible commit.
    fn next(&self, bounds: Bounds, mistake: Option<Mistake>) -> Vec<Self> {
        let mut next = vec![];
        let mut add = |change: &dyn Fn(&mut Self)| {
            let mut world = self.clone();
            change(&mut world);
            next.push(world);
        };
        for cell in 0..CELLS {
            let share = &self.shares[cell];
            if share.held < share.amount {
                add(&|world| world.shares[cell].held += 1);
            }
            if share.held > 0 {
                add(&|world| world.shares[cell].held -= 1);
            }
            if self.home.given[cell].number < bounds.changes {
                for by in 1..=bounds.step {
                    add(&|world| world.begin(cell, |home| home.grow(cell, by, mistake)));
                    add(&|world| world.begin(cell, |home| home.shrink(cell, by, mistake)));
                }
            }
        }
        for (cell, message) in &self.sent {
            add(&|world| world.handle(*cell, *message, mistake));
        }
        for maximum in [1, bounds.maximum] {
            add(&|world| world.set_maximum(maximum));
        }
        next
    }

    fn begin(&mut self, cell: usize, begin: impl Fn(&mut Home<CELLS>) -> bool) {
        if begin(&mut self.home) {
            self.sent.extend(self.home.given[cell].order().map(|order| (cell, order)));
        }
    }

    fn handle(&mut self, cell: usize, message: Message, mistake: Option<Mistake>) {
        match message {
            Message::Make(number, change) => {
                let made = self.shares[cell].make(number, change, mistake);
                self.sent.extend(made.map(|made| (cell, made)));
            }
            Message::Made(number, amount) => {
                self.home.given[cell].end(number, amount, mistake);
                self.lower_bound();
            }
        }
    }

    fn set_maximum(&mut self, maximum: u8) {
        self.home.maximum = maximum;
        self.bound = self.bound.max(maximum);
        self.lower_bound();
    }

    /// Lowers the bound: a reclaimed part of a lowered limit is not given again.
    fn lower_bound(&mut self) {
        self.bound = self.bound.min(self.home.total().max(self.home.maximum));
    }
}

/// Visits all reachable states, until `ends` returns true for one, which is the second result.
pub fn explore<const CELLS: usize>(
    bounds: Bounds,
    mistake: Option<Mistake>,
    ends: impl Fn(&World<CELLS>) -> bool,
) -> (HashSet<World<CELLS>>, Option<World<CELLS>>) {
    let first = World::new(bounds);
    let (mut seen, mut open) = (HashSet::from([first.clone()]), vec![first]);
    while !open.is_empty() {
        let mut found = vec![];
        for world in open.iter().flat_map(|world| world.next(bounds, mistake)) {
            if seen.contains(&world) {
                continue;
            }
            if ends(&world) {
                return (seen, Some(world));
            }
            seen.insert(world.clone());
            found.push(world);
        }
        open = found;
    }
    (seen, None)
}
