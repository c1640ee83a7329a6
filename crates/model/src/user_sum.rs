//! Sums of the live tickets by user, from which the users with the most use are listed.
//!
//! [`UserTickets`] has the amounts of each live ticket. A change states a ticket's amounts after it, and not a difference:
//! a change that is applied again, in order, has no further effect. Never: decides a grant. Caller: the task that sums by
//! user.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::Bound,
    sync::Arc,
};

use uuid::Uuid;

use super::{name::Name, resource::Dimension};

/// Maximum number of dimensions of a user's sum: all that are not custom, and the first custom ones by name.
pub const DIMENSIONS_MAX: usize = 32;

/// Amounts of a live ticket.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TicketUse {
    /// Whether the engine has not confirmed.
    pub is_locked: bool,
    /// Amounts by dimension.
    pub amounts: Vec<(Dimension, i64)>,
}

/// A ticket after a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketChange {
    /// Ticket id.
    pub ticket_id: Uuid,
    /// User of the ticket.
    pub user: Name,
    /// Amounts of the ticket; `None` if it has ended.
    pub ticket_use: Option<TicketUse>,
    /// Whether the engine is idle; `None` if the change does not state it.
    pub is_idle: Option<bool>,
}

/// Sums of one quantity. A sum above the largest number is the largest number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UseSum {
    /// Sum of the used tickets.
    pub used: i64,
    /// Sum of the locked tickets.
    pub locked: i64,
    /// Part of `used` by idle engines.
    pub idle: i64,
}

impl UseSum {
    /// Returns the sum of all tickets.
    pub const fn total(self) -> i64 {
        self.used.saturating_add(self.locked)
    }
}

/// Sums of the live tickets of a user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserSum {
    /// Number of tickets.
    pub tickets: UseSum,
    /// Sums by dimension, without zeros; at most [`DIMENSIONS_MAX`].
    pub dimensions: BTreeMap<Dimension, UseSum>,
}

/// Sums of the used tickets of all users whose engines are idle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleTotals {
    /// Number of tickets.
    pub tickets: i64,
    /// Sums by dimension, without zeros; at most [`DIMENSIONS_MAX`].
    pub amounts: BTreeMap<Dimension, i64>,
}

/// Exact sums of one quantity: as wide as a million of the largest amounts needs.
#[derive(Debug, Clone, Copy, Default)]
struct ExactSum {
    used: i128,
    locked: i128,
    idle: i128,
}

impl ExactSum {
    fn add(&mut self, is_locked: bool, is_idle: bool, amount: i128) {
        let sum = if is_locked { &mut self.locked } else { &mut self.used };
        *sum += amount;
        if is_idle && !is_locked {
            self.idle += amount;
        }
    }

    fn is_zero(self) -> bool {
        self.used == 0 && self.locked == 0
    }

    fn sum(self) -> UseSum {
        let bounded = |sum: i128| i64::try_from(sum).unwrap_or(i64::MAX);
        UseSum { used: bounded(self.used), locked: bounded(self.locked), idle: bounded(self.idle) }
    }
}

#[derive(Debug, Default)]
struct ExactUserSum {
    tickets: ExactSum,
    dimensions: HashMap<Dimension, ExactSum>,
}

impl ExactUserSum {
    /// Adds the amounts of a ticket `sign` times.
    fn add(&mut self, ticket_use: &TicketUse, is_idle: bool, sign: i128) {
        self.tickets.add(ticket_use.is_locked, is_idle, sign);
        for (dimension, amount) in ticket_use.amounts.iter().filter(|(_, amount)| *amount != 0) {
            let sum = self.dimensions.entry(dimension.clone()).or_default();
            sum.add(ticket_use.is_locked, is_idle, sign * i128::from(*amount));
            if sum.is_zero() {
                self.dimensions.remove(dimension);
            }
        }
    }
}

/// The live tickets and their sums by user.
#[derive(Debug, Default)]
pub struct UserTickets {
    tickets: HashMap<Uuid, (Name, Arc<TicketUse>)>,
    /// Equal amounts of several tickets, which share one value.
    uses: HashSet<Arc<TicketUse>>,
    /// Live tickets with the mark of an idle engine. Only a used one counts.
    idle: BTreeSet<Uuid>,
    users: HashMap<Name, ExactUserSum>,
    all: ExactUserSum,
}

impl UserTickets {
    /// Applies a change of a ticket. The mark of an idle engine stays, unless the change states it.
    pub fn apply(&mut self, change: TicketChange) {
        let was_idle = self.idle.contains(&change.ticket_id);
        self.remove(change.ticket_id);
        let Some(ticket_use) = change.ticket_use else { return };
        let is_idle = change.is_idle.unwrap_or(was_idle);
        if is_idle {
            self.idle.insert(change.ticket_id);
        }
        self.all.add(&ticket_use, is_idle, 1);
        self.users.entry(change.user.clone()).or_default().add(&ticket_use, is_idle, 1);
        let ticket_use = Arc::new(ticket_use);
        let shared = self.uses.get(&ticket_use).cloned().unwrap_or_else(|| {
            self.uses.insert(ticket_use.clone());
            ticket_use
        });
        self.tickets.insert(change.ticket_id, (change.user, shared));
    }

    fn remove(&mut self, ticket_id: Uuid) {
        let Some((user, ticket_use)) = self.tickets.remove(&ticket_id) else { return };
        let is_idle = self.idle.remove(&ticket_id);
        self.all.add(&ticket_use, is_idle, -1);
        if let Some(sum) = self.users.get_mut(&user) {
            sum.add(&ticket_use, is_idle, -1);
            if sum.tickets.is_zero() {
                self.users.remove(&user);
            }
        }
        // Only the set and this function still own it.
        if Arc::strong_count(&ticket_use) == 2 {
            self.uses.remove(&ticket_use);
        }
    }

    /// Sets which tickets after `after` have idle engines: those of `idle` alone, up to `until` (`None` for all tickets after `after`).
    /// Returns the users whose tickets change.
    pub fn set_idle(&mut self, after: Uuid, until: Option<Uuid>, idle: &[Uuid]) -> BTreeSet<Name> {
        let until = until.map_or(Bound::Unbounded, Bound::Included);
        let before: BTreeSet<_> = self.idle.range((Bound::Excluded(after), until)).copied().collect();
        let idle: BTreeSet<_> = idle.iter().copied().collect();
        let mut changed = BTreeSet::new();
        for ticket_id in before.symmetric_difference(&idle).copied() {
            let Some((user, ticket_use)) = self.tickets.get(&ticket_id) else { continue };
            let (user, ticket_use) = (user.clone(), Some(TicketUse::clone(ticket_use)));
            changed.insert(user.clone());
            self.apply(TicketChange { ticket_id, user, ticket_use, is_idle: Some(idle.contains(&ticket_id)) });
        }
        changed
    }

    /// Returns the number of live tickets.
    pub fn len(&self) -> usize {
        self.tickets.len()
    }

    /// Returns whether no ticket is live.
    pub fn is_empty(&self) -> bool {
        self.tickets.is_empty()
    }

    /// Returns the users with live tickets.
    pub fn users(&self) -> impl Iterator<Item = &Name> {
        self.users.keys()
    }

    /// Returns the sums of a user; `None` for a user without live tickets.
    pub fn sum(&self, user: &Name) -> Option<UserSum> {
        let exact = self.users.get(user)?;
        let dimensions: BTreeMap<_, _> = exact.dimensions.iter().collect();
        let sums = dimensions.into_iter().take(DIMENSIONS_MAX);
        Some(UserSum {
            tickets: exact.tickets.sum(),
            dimensions: sums.map(|(dimension, sum)| (dimension.clone(), sum.sum())).collect(),
        })
    }

    /// Returns the sums of the tickets with idle engines.
    pub fn idle(&self) -> IdleTotals {
        let idle = self.all.dimensions.iter().filter(|(_, sum)| sum.idle != 0);
        let amounts: BTreeMap<_, _> = idle.map(|(dimension, sum)| (dimension.clone(), sum.sum().idle)).collect();
        IdleTotals { tickets: self.all.tickets.sum().idle, amounts: amounts.into_iter().take(DIMENSIONS_MAX).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(ticket: u128, user: &str, is_locked: bool, cores: i64) -> TicketChange {
        let amounts = vec![(Dimension::Cores, cores), (Dimension::Instances, 1)];
        let user = Name::parse("user", user).unwrap();
        let ticket_use = Some(TicketUse { is_locked, amounts });
        TicketChange { ticket_id: Uuid::from_u128(ticket), user, ticket_use, is_idle: None }
    }

    fn end(ticket: u128, user: &str) -> TicketChange {
        TicketChange { ticket_use: None, ..change(ticket, user, false, 0) }
    }

    fn cores(tickets: &UserTickets, user: &str) -> Option<(i64, i64)> {
        let sum = tickets.sum(&Name::parse("user", user).unwrap())?;
        let cores = sum.dimensions.get(&Dimension::Cores).copied().unwrap_or_default();
        Some((cores.used, cores.locked))
    }

    #[test]
    fn user_sum_after_repeated_changes_is_that_of_live_tickets() {
        let changes = [
            change(1, "alice", true, 4),
            change(2, "alice", true, 4),
            change(3, "bob", true, i64::MAX),
            change(4, "bob", true, i64::MAX),
            change(1, "alice", false, 3),
            end(2, "alice"),
            end(3, "bob"),
        ];
        let mut tickets = UserTickets::default();
        for round in 0..2 {
            changes.iter().cloned().for_each(|change| tickets.apply(change));
            assert_eq!(cores(&tickets, "alice"), Some((3, 0)), "{round}");
            assert_eq!(cores(&tickets, "bob"), Some((0, i64::MAX)), "{round}: not saturated for good");
            assert_eq!((tickets.len(), tickets.uses.len()), (2, 2));
        }
        [end(1, "alice"), end(4, "bob"), end(5, "carol")].into_iter().for_each(|change| tickets.apply(change));
        assert_eq!((tickets.is_empty(), tickets.users.len(), tickets.uses.len()), (true, 0, 0));
    }

    fn idle_cores(tickets: &UserTickets, user: &str) -> i64 {
        let sum = tickets.sum(&Name::parse("user", user).unwrap()).unwrap();
        let cores = sum.dimensions[&Dimension::Cores];
        assert!(sum.tickets.idle <= sum.tickets.used && cores.idle <= cores.used, "{sum:?}");
        cores.idle
    }

    #[test]
    fn idle_sum_follows_pages_and_changes() {
        let mut tickets = UserTickets::default();
        let id = Uuid::from_u128;
        (1..=4).for_each(|ticket| tickets.apply(change(ticket, "alice", false, 3)));
        tickets.apply(TicketChange { is_idle: Some(true), ..change(5, "bob", false, 7) });
        tickets.apply(change(6, "bob", true, 9));
        let names = |users: BTreeSet<Name>| users.iter().map(Name::to_string).collect::<Vec<_>>().join(" ");
        // The ticket 8 has not been read.
        assert_eq!(names(tickets.set_idle(id(0), Some(id(2)), &[id(1), id(2)])), "alice");
        assert_eq!(names(tickets.set_idle(id(2), None, &[id(4), id(5), id(6), id(8)])), "alice bob");
        assert_eq!((idle_cores(&tickets, "alice"), idle_cores(&tickets, "bob")), (9, 7), "a locked ticket is not idle");
        assert_eq!(names(tickets.set_idle(id(2), None, &[id(4), id(5), id(6)])), "");
        // A page states its tickets alone, and a change of a ticket keeps its mark.
        assert_eq!(names(tickets.set_idle(id(1), Some(id(3)), &[id(3)])), "alice");
        tickets.apply(change(1, "alice", false, 1));
        tickets.apply(change(6, "bob", false, 2));
        assert_eq!((idle_cores(&tickets, "alice"), idle_cores(&tickets, "bob")), (7, 9));
        let amounts = [(Dimension::Cores, 16), (Dimension::Instances, 5)];
        assert_eq!(tickets.idle(), IdleTotals { tickets: 5, amounts: amounts.into() });
        (1..=6).for_each(|ticket| tickets.apply(end(ticket, "alice")));
        assert_eq!((tickets.idle(), tickets.idle.len()), (IdleTotals::default(), 0));
    }

    #[test]
    fn user_sum_has_bounded_dimensions_with_fixed_ones_first() {
        let mut tickets = UserTickets::default();
        let custom = |n| (Dimension::Custom(format!("gpu{n:02}").into()), 1);
        let amounts = (0..40).map(custom).chain([(Dimension::Memory, 1)]).collect();
        let ticket_use = Some(TicketUse { is_locked: false, amounts });
        tickets.apply(TicketChange { ticket_use, ..end(1, "alice") });
        let sum = tickets.sum(&Name::parse("user", "alice").unwrap()).unwrap();
        assert_eq!(sum.dimensions.len(), DIMENSIONS_MAX);
        let kept: Vec<_> = sum.dimensions.keys().map(Dimension::name).collect();
        assert_eq!((kept[0], kept[1], kept[31]), ("memory", "gpu00", "gpu30"));
    }
}
