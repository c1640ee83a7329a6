//! Model of the claims that assign an EM to a cell (docs/CELLS.md). The test visits every state, with every loss, delay and
//! repetition of messages.

use std::collections::{BTreeSet, HashSet};

const CELLS: usize = 2;

/// Number of claims that home makes.
const CLAIMS: u8 = 5;

/// A claim: its number, and the cell that the EM may be in.
type Claim = (usize, u8);

/// A message of one step for the next, which can be late, repeated or lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    /// To the cell: the EM may register by the claim.
    Register(Claim),
    /// To home: the claim has ended.
    Over(Claim),
}

/// A planted mistake, which the model must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// Home deletes the EM before the cell does.
    UnregistersAtHomeFirst,
    /// A cell registers an EM by an ended claim.
    TakesWhatIsOver,
    /// Home deletes the EM with any ended claim.
    ForgetsAnyClaim,
}

/// The rows of an EM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct World {
    home: Option<Claim>,
    /// Claim by which each cell has the EM.
    cells: [Option<u8>; CELLS],
    /// Ended claims, by cell.
    over: BTreeSet<Claim>,
    /// Number of claims so far.
    made: u8,
    sent: BTreeSet<Message>,
}

impl World {
    /// Whether the EM is in one cell at most, and in the cell of home's claim.
    fn is_well(&self) -> bool {
        (0..CELLS).all(|cell| self.cells[cell].is_none_or(|claim| self.home == Some((cell, claim))))
    }

    /// At home: returns the current claim, or a new one.
    fn claim(&mut self, cell: usize) -> Claim {
        let claim = *self.home.get_or_insert_with(|| {
            self.made += 1;
            (cell, self.made)
        });
        self.sent.insert(Message::Register(claim));
        claim
    }

    /// In the cell: registers the EM.
    fn register(&mut self, (cell, claim): Claim, mistake: Option<Mistake>) {
        if self.over.contains(&(cell, claim)) && mistake != Some(Mistake::TakesWhatIsOver) {
            self.sent.insert(Message::Over((cell, claim)));
        } else {
            self.cells[cell] = Some(claim);
        }
    }

    /// In the cell: ends the claim, whether or not the EM has registered by it.
    fn end(&mut self, (cell, claim): Claim) {
        if self.cells[cell].is_none_or(|there| there == claim) {
            self.cells[cell] = None;
            self.over.insert((cell, claim));
            self.sent.insert(Message::Over((cell, claim)));
        }
    }

    /// At home: deletes the EM.
    fn forget(&mut self, claim: Claim, mistake: Option<Mistake>) {
        if self.home == Some(claim) || mistake == Some(Mistake::ForgetsAnyClaim) {
            self.home = None;
        }
    }

    fn next(&self, mistake: Option<Mistake>) -> Vec<Self> {
        let after = |step: &dyn Fn(&mut Self)| {
            let mut world = self.clone();
            step(&mut world);
            world
        };
        let mut next = vec![];
        if self.home.is_some() || self.made < CLAIMS {
            let claimed = |world: &mut Self, cell| {
                world.claim(cell);
            };
            next.extend((0..CELLS).map(|cell| after(&|world| claimed(world, cell))));
        }
        next.extend(self.sent.iter().map(|message| match *message {
            Message::Register(claim) => after(&|world| world.register(claim, mistake)),
            Message::Over(claim) => after(&|world| world.forget(claim, mistake)),
        }));
        // An unregistration, and a claim that was never used, refer to a claim that home has made.
        for claim in self.sent.iter().filter_map(|message| match message {
            Message::Register(claim) => Some(*claim),
            Message::Over(_) => None,
        }) {
            next.push(after(&|world| world.end(claim)));
            if mistake == Some(Mistake::UnregistersAtHomeFirst) {
                next.push(after(&|world| world.forget(claim, mistake)));
            }
        }
        next
    }
}

/// Returns all reachable states, or the first forbidden one.
fn reached(mistake: Option<Mistake>) -> Result<HashSet<World>, World> {
    let mut seen = HashSet::from([World::default()]);
    let mut open = vec![World::default()];
    while let Some(world) = open.pop() {
        for next in world.next(mistake) {
            if !next.is_well() {
                return Err(next);
            }
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    Ok(seen)
}

#[test]
fn claims_keep_em_in_one_cell() {
    let seen = reached(None).unwrap();
    eprintln!("{} states", seen.len());
    assert!((0..CELLS).all(|cell| seen.iter().any(|world| world.cells[cell] == Some(CLAIMS))));
}

#[test]
fn claims_without_any_rule_lose_em() {
    for mistake in [Mistake::UnregistersAtHomeFirst, Mistake::TakesWhatIsOver, Mistake::ForgetsAnyClaim] {
        assert!(reached(Some(mistake)).is_err(), "{mistake:?}");
    }
}

/// Completes the work from the rows alone, with all messages lost.
#[test]
fn claims_after_any_crash_allow_registration() {
    for mut world in reached(None).unwrap() {
        let found = world.claim(0);
        world.register(found, None);
        if world.cells[found.0].is_none() {
            // The claim had ended: the second call makes a new one.
            world.forget(found, None);
            let claim = world.claim(0);
            world.register(claim, None);
        }
        assert!(world.is_well() && world.cells.iter().flatten().count() == 1, "{world:?}");

        let there = world.claim(0);
        world.end(there);
        world.forget(there, None);
        assert!(world.home.is_none() && world.cells == [None; CELLS], "{world:?}");
    }
}
