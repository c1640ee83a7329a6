//! Model of takeovers: the calls of one request id at two instances. The test visits every state, with every delay, loss and
//! repetition of statements.
//!
//! A call that enters takes the position over with a new claim. All its later statements name that claim.

use std::collections::{BTreeSet, HashSet};

const CALLS: usize = 3;
const INSTANCES: usize = 2;

/// A planted mistake, which the model must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// A call that ends removes the position by its ticket id alone.
    LeaveByTicket,
    /// A sweep marks the positions absent that it read before.
    SweepReadBefore,
    /// A call commits a grant for the position of a newer call.
    CommitIgnoresClaim,
    /// An instance does not find a waiting request of another instance.
    WaitingIdNotUnique,
}

/// The row of a request id: a waiting request, or a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Row {
    ticket: u8,
    claim: u8,
    instance: usize,
    is_absent: bool,
    is_granted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Call {
    New,
    Waiting(Waiter),
    /// The check without locks has found capacity.
    Fits(Waiter),
    Granted(u8),
    TakenOver,
    /// The caller is gone.
    Lost,
}

/// The claim of a call, and its instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Waiter {
    ticket: u8,
    claim: u8,
    instance: usize,
    /// Whether the instance was late since the claim, so that the position can be absent until the next statement.
    was_late: bool,
}

/// A statement that comes later, again, or never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Statement {
    Leave { ticket: u8, claim: u8 },
    MarkAbsent { ticket: u8, claim: u8 },
    Sweep { ticket: u8, claim: u8, instance: usize },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    rows: BTreeSet<Row>,
    calls: [Call; CALLS],
    /// Whether the liveness row of the first instance has expired: it is dead, or continues later.
    is_late: bool,
    /// Claims and tickets so far.
    claims: u8,
    sent: BTreeSet<Statement>,
}

impl World {
    fn new() -> Self {
        Self { rows: BTreeSet::new(), calls: [Call::New; CALLS], is_late: false, claims: 0, sent: BTreeSet::new() }
    }

    /// Invariant 11: one row, one ticket at most, and a position as long as its newest call waits.
    fn is_well(&self) -> bool {
        let granted = || self.rows.iter().filter(|row| row.is_granted);
        let has_position = |waiter: &Waiter| {
            let mut waiting = self.rows.iter().filter(|row| row.claim == waiter.claim && !row.is_granted);
            waiter.was_late || waiting.any(|row| row.ticket == waiter.ticket && !row.is_absent)
        };
        self.rows.len() <= 1
            && self.calls.iter().all(|call| match call {
                Call::Granted(ticket) => granted().any(|row| row.ticket == *ticket),
                Call::Waiting(waiter) | Call::Fits(waiter) if waiter.claim == self.claims => has_position(waiter),
                _ => true,
            })
    }

    fn change(&mut self, row: Row, change: impl FnOnce(&mut Row)) -> Row {
        let mut changed = self.rows.take(&row).unwrap();
        change(&mut changed);
        self.rows.insert(changed);
        changed
    }

    /// A call begins: it gets the grant of its request id, or takes the position over, or gets one. Returns its state.
    fn enter(&mut self, instance: usize, fits: bool, mistake: Option<Mistake>) -> Call {
        let is_found =
            |row: &&Row| row.is_granted || row.instance == instance || mistake != Some(Mistake::WaitingIdNotUnique);
        let found = self.rows.iter().find(is_found).copied();
        if let Some(row) = found.filter(|row| row.is_granted) {
            return Call::Granted(row.ticket);
        }
        self.claims += 1;
        let claim = self.claims;
        let ticket = found.map_or(claim, |row| row.ticket);
        found.map(|row| self.rows.remove(&row));
        self.rows.insert(Row { ticket, claim, instance, is_absent: false, is_granted: fits });
        if fits { Call::Granted(ticket) } else { Call::Waiting(Waiter { ticket, claim, instance, was_late: false }) }
    }

    /// Returns the row of a waiter, unless another call has taken it over.
    fn row_of(&self, waiter: Waiter, names_claim: bool) -> Option<Row> {
        let is_its = |row: &&Row| row.ticket == waiter.ticket && (row.claim == waiter.claim || !names_claim);
        self.rows.iter().find(is_its).copied().filter(|row| !row.is_granted)
    }

    fn execute(&mut self, statement: Statement, mistake: Option<Mistake>) {
        let (Statement::Leave { ticket, claim }
        | Statement::MarkAbsent { ticket, claim }
        | Statement::Sweep { ticket, claim, .. }) = statement;
        let names_claim = match statement {
            Statement::Leave { .. } => mistake != Some(Mistake::LeaveByTicket),
            Statement::MarkAbsent { .. } => true,
            Statement::Sweep { .. } => mistake != Some(Mistake::SweepReadBefore),
        };
        let Some(row) = self.row_of(Waiter { ticket, claim, instance: 0, was_late: false }, names_claim) else {
            return;
        };
        match statement {
            Statement::Leave { .. } => drop(self.rows.remove(&row)),
            Statement::MarkAbsent { .. } => drop(self.change(row, |row| row.is_absent = true)),
            Statement::Sweep { instance, .. } if !self.is_late(instance) => {}
            Statement::Sweep { .. } => drop(self.change(row, |row| row.is_absent = true)),
        }
    }

    fn next(&self, mistake: Option<Mistake>) -> Vec<Self> {
        let mut next = vec![];
        let mut add = |change: &dyn Fn(&mut Self)| {
            let mut world = self.clone();
            change(&mut world);
            next.push(world);
        };
        for (call, state) in self.calls.iter().enumerate() {
            match *state {
                // The first call is at the first instance: they are alike.
                Call::New if call == 0 || self.calls[call - 1] != Call::New => {
                    for instance in (0..INSTANCES.min(call + 1)).filter(|at| !self.is_late(*at)) {
                        for fits in [false, true] {
                            add(&|world| world.calls[call] = world.enter(instance, fits, mistake));
                        }
                    }
                }
                Call::Waiting(waiter) | Call::Fits(waiter) => {
                    let (ticket, claim) = (waiter.ticket, waiter.claim);
                    for statement in [Statement::Leave { ticket, claim }, Statement::MarkAbsent { ticket, claim }] {
                        add(&|world| {
                            world.calls[call] = Call::Lost;
                            world.sent.insert(statement);
                        });
                    }
                    if !self.is_late(waiter.instance) {
                        let is_checked = matches!(state, Call::Fits(_));
                        add(&|world| world.calls[call] = world.checked(waiter, is_checked, mistake));
                    }
                }
                _ => {}
            }
        }
        for statement in &self.sent {
            add(&|world| world.execute(*statement, mistake));
        }
        for row in self.rows.iter().filter(|row| !row.is_granted) {
            let Row { ticket, claim, instance, .. } = *row;
            if self.is_late(instance) {
                add(&|world| world.sent.extend([Statement::Sweep { ticket, claim, instance }]));
            }
            if row.is_absent {
                // The time for which positions are kept has passed.
                add(&|world| world.rows.retain(|other| other != row));
            }
        }
        add(&|world| world.set_late(!self.is_late));
        next
    }

    /// A check of a waiting call, or the commit after it. Either makes an absent position present again.
    fn checked(&mut self, waiter: Waiter, commits: bool, mistake: Option<Mistake>) -> Call {
        let names_claim = !commits || mistake != Some(Mistake::CommitIgnoresClaim);
        let Some(row) = self.row_of(waiter, names_claim) else { return Call::TakenOver };
        self.change(row, |row| {
            row.is_absent = false;
            row.is_granted = commits;
        });
        match commits {
            true => Call::Granted(waiter.ticket),
            false => Call::Fits(Waiter { was_late: false, ..waiter }),
        }
    }

    fn is_late(&self, instance: usize) -> bool {
        self.is_late && instance == 0
    }

    fn set_late(&mut self, is_late: bool) {
        self.is_late = is_late;
        for call in &mut self.calls {
            if let Call::Waiting(waiter) | Call::Fits(waiter) = call {
                waiter.was_late |= waiter.instance == 0 && is_late;
            }
        }
    }
}

/// Returns all reachable states, or the first forbidden one.
fn reached(mistake: Option<Mistake>) -> Result<HashSet<World>, Box<World>> {
    let mut seen = HashSet::from([World::new()]);
    let mut open = vec![World::new()];
    while let Some(world) = open.pop() {
        for next in world.next(mistake) {
            if !next.is_well() {
                return Err(next.into());
            }
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    Ok(seen)
}

#[test]
fn takeover_keeps_position_of_newest_call() {
    let seen = reached(None).unwrap();
    eprintln!("{} states", seen.len());
    let is_taken_over_twice = |world: &World| world.calls == [Call::TakenOver, Call::TakenOver, Call::Granted(1)];
    assert!(seen.iter().any(is_taken_over_twice));
}

#[test]
fn takeover_without_any_rule_loses_position() {
    for mistake in
        [Mistake::LeaveByTicket, Mistake::SweepReadBefore, Mistake::CommitIgnoresClaim, Mistake::WaitingIdNotUnique]
    {
        assert!(reached(Some(mistake)).is_err(), "{mistake:?}");
    }
}
