//! Budgets of each EM for expiry timers and for concurrent expirations.
//!
//! Whether an EM is contended is known only after its first tickets failed. The initial budget is small enough for other EMs to
//! progress. Each success doubles the budget, and a failure reduces it to one.
//!
//! Invariant: the sums never exceed `WATCHED_MAX` and `UNDER_WAY_MAX`.
//! Caller: `rm_service::background::expiry`.

use std::collections::{HashMap, HashSet, VecDeque};

use uuid::Uuid;

use rm_model::{em::EmInstance, operation::ReleaseTicket};

/// Maximum number of tickets with a timer or an expiration in progress, in total and per EM.
const WATCHED_MAX: usize = 8192;
const WATCHED_OF_EM_MAX: usize = 4096;

/// Maximum number of expirations in progress, in total and per EM: several batches, so that one is always queued.
const UNDER_WAY_MAX: usize = 2048;
const UNDER_WAY_OF_EM_MAX: usize = 1024;

/// Budget of an EM without a success so far. Half of the free budget also stays free, for any number of contended EMs.
const UNDER_WAY_OF_EM_FIRST: usize = 256;

/// Maximum number of EMs with a record. Records of EMs without tickets are dropped above it; most of these EMs are
/// unregistered.
const EMS_MAX: usize = 2 * WATCHED_MAX;

/// Budgets of all EMs.
#[derive(Debug, Default)]
pub struct EmBudgets {
    /// Tickets with a timer or an expiration in progress.
    watched: HashSet<Uuid>,
    /// EMs with such tickets, and EMs whose last expiration failed.
    of_ems: HashMap<EmInstance, EmBudget>,
    /// Number of expirations in progress.
    under_way: usize,
    /// Whether a ticket was left to the next sweep since the last query.
    has_rejected: bool,
}

/// Use and budget of one EM.
#[derive(Debug)]
struct EmBudget {
    watched: usize,
    under_way: usize,
    /// Maximum number of expirations in progress: one for a contended EM; doubled by each success.
    under_way_max: usize,
    /// Overdue tickets that wait for an expiration in progress to end.
    next: VecDeque<ReleaseTicket>,
}

impl Default for EmBudget {
    fn default() -> Self {
        Self { watched: 0, under_way: 0, under_way_max: UNDER_WAY_OF_EM_FIRST, next: VecDeque::new() }
    }
}

impl EmBudget {
    fn watched_max(&self) -> usize {
        WATCHED_OF_EM_MAX.min(self.under_way_max * 4)
    }

    /// Returns `most`, or half of `room` if that is less and the EM has no success so far.
    fn of_room(&self, most: usize, room: usize) -> usize {
        if self.under_way_max > UNDER_WAY_OF_EM_FIRST { most } else { most.min((room / 2).max(1)) }
    }

    fn note(&mut self, went: bool) {
        self.under_way_max = if went { (self.under_way_max * 2).min(UNDER_WAY_OF_EM_MAX) } else { 1 };
    }

    /// Removes and returns the last waiting tickets above the budget for timers.
    fn give_back(&mut self) -> VecDeque<ReleaseTicket> {
        let excess = self.watched.saturating_sub(self.watched_max()).min(self.next.len());
        self.watched -= excess;
        self.next.split_off(self.next.len() - excess)
    }
}

impl EmBudgets {
    /// Returns whether tickets were left to the next sweep since the last call.
    pub fn take_rejected(&mut self) -> bool {
        std::mem::take(&mut self.has_rejected)
    }

    /// Whether another ticket may have a timer.
    pub fn may_watch(&self) -> bool {
        self.watched.len() < WATCHED_MAX
    }

    /// Whether another expiration may begin.
    pub fn may_begin(&self) -> bool {
        self.under_way < UNDER_WAY_MAX
    }

    /// Whether a ticket gets a timer: not if it has one already, or if its EM has used its budget.
    pub fn watch(&mut self, ticket: &ReleaseTicket) -> bool {
        if self.watched.contains(&ticket.ticket_id) {
            return false;
        }
        let room = WATCHED_MAX.saturating_sub(self.watched.len());
        let share = self.share(&ticket.em);
        if share.watched >= share.of_room(share.watched_max(), room) {
            self.has_rejected = true;
            return false;
        }
        share.watched += 1;
        self.watched.insert(ticket.ticket_id);
        true
    }

    /// Begins the expiration of a ticket that fell due. Returns the ticket, or `None` if it must wait for another ticket of its
    /// EM.
    pub fn begin(&mut self, ticket: ReleaseTicket) -> Option<ReleaseTicket> {
        let room = UNDER_WAY_MAX.saturating_sub(self.under_way);
        let share = self.share(&ticket.em);
        if share.under_way < share.of_room(share.under_way_max, room) {
            share.under_way += 1;
            self.under_way += 1;
            return Some(ticket);
        }
        share.next.push_back(ticket);
        let given_back = share.give_back();
        self.unwatch(given_back);
        None
    }

    /// Ends an expiration; `went` states whether it succeeded. Returns the tickets whose expiration begins now.
    pub fn end(&mut self, ticket: &ReleaseTicket, went: bool) -> Vec<ReleaseTicket> {
        self.under_way = self.under_way.saturating_sub(1);
        self.watched.remove(&ticket.ticket_id);
        let room = UNDER_WAY_MAX.saturating_sub(self.under_way);
        let Some(share) = self.of_ems.get_mut(&ticket.em) else { return Vec::new() };
        share.watched = share.watched.saturating_sub(1);
        share.under_way = share.under_way.saturating_sub(1);
        share.note(went);
        if share.watched == 0 && went {
            self.of_ems.remove(&ticket.em);
            return Vec::new();
        }
        // The ended expiration has freed its unit, so at least one ticket follows even without free budget.
        let more = share.of_room(share.under_way_max, room).saturating_sub(share.under_way);
        let next: Vec<ReleaseTicket> = share.next.drain(..more.min(room).min(share.next.len())).collect();
        share.under_way += next.len();
        self.under_way += next.len();
        let given_back = share.give_back();
        self.unwatch(given_back);
        next
    }

    /// Ends an expiration whose task panicked, so that its ticket is unknown. Clears all records; the next sweep finds the
    /// remaining tickets.
    pub fn lose(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
        self.watched.clear();
        self.of_ems.clear();
    }

    fn share(&mut self, em: &EmInstance) -> &mut EmBudget {
        if self.of_ems.len() >= EMS_MAX {
            self.of_ems.retain(|_, share| share.watched > 0);
        }
        self.of_ems.entry(em.clone()).or_default()
    }

    /// Leaves tickets to the next sweep, which finds them again.
    fn unwatch(&mut self, tickets: VecDeque<ReleaseTicket>) {
        if !tickets.is_empty() {
            self.has_rejected = true;
        }
        for ticket in tickets {
            self.watched.remove(&ticket.ticket_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_model::name::Name;

    fn ticket(host: usize, n: usize) -> ReleaseTicket {
        let (user, em) = (Name::parse("user", "hadoop"), EmInstance::parse("em", "ecm", &format!("host{host}")));
        let ticket_id = Uuid::from_u128(((host as u128) << 64) | n as u128);
        ReleaseTicket { ticket_id, user: user.unwrap(), em: em.unwrap() }
    }

    /// Watches and begins `count` overdue tickets of each EM in `hosts`, up to the budgets. Returns the tickets in progress.
    fn crowd(shares: &mut EmBudgets, hosts: std::ops::Range<usize>, count: usize) -> VecDeque<ReleaseTicket> {
        let tickets = (0..count).flat_map(|n| hosts.clone().map(move |host| ticket(host, n)));
        let watched: Vec<ReleaseTicket> = tickets.filter(|ticket| shares.may_watch() && shares.watch(ticket)).collect();
        watched.into_iter().filter_map(|ticket| if shares.may_begin() { shares.begin(ticket) } else { None }).collect()
    }

    #[test]
    fn expirations_in_progress_stay_within_budget() {
        let mut shares = EmBudgets::default();
        let mut under_way = crowd(&mut shares, 0..8, 1024);
        let (mut most, mut done) = (under_way.len(), 0);
        while let Some(ticket) = under_way.pop_front() {
            under_way.extend(shares.end(&ticket, true));
            (most, done) = (most.max(under_way.len()), done + 1);
            assert_eq!(shares.under_way, under_way.len());
        }
        assert!(most <= UNDER_WAY_MAX && done >= UNDER_WAY_MAX, "{most} of {done}");
        assert!(shares.watched.is_empty() && shares.of_ems.is_empty(), "every waiting EM had its turn: {shares:?}");
    }

    #[test]
    fn contended_ems_leave_budget_to_others() {
        for held in [1, 3, 8, 40] {
            let mut shares = EmBudgets::default();
            crowd(&mut shares, 0..held, 2048);
            for n in 0..8 {
                let other = ticket(1000, n);
                assert!(shares.may_watch() && shares.watch(&other), "beside {held}");
                assert!(shares.may_begin() && shares.begin(other.clone()) == Some(other), "beside {held}");
            }
        }
    }

    #[test]
    fn ems_without_deadlines_are_removed_at_bound() {
        let mut shares = EmBudgets::default();
        let busy = ticket(usize::MAX, 0);
        assert!(shares.watch(&busy) && shares.begin(busy.clone()).is_some());
        for host in 0..2 * EMS_MAX {
            let last = ticket(host, 0);
            assert!(shares.watch(&last) && shares.begin(last.clone()).is_some());
            assert!(shares.end(&last, false).is_empty());
            assert!(shares.of_ems.contains_key(&last.em), "a contended EM is remembered for some time");
            assert!(shares.of_ems.len() <= EMS_MAX);
        }
        assert!(shares.of_ems.contains_key(&busy.em));
    }

    #[test]
    fn contended_em_has_small_budget() {
        let mut share = EmBudget::default();
        share.note(false);
        assert_eq!((share.under_way_max, share.watched_max()), (1, 4));
        for _ in 0..20 {
            share.note(true);
        }
        assert_eq!((share.under_way_max, share.watched_max()), (UNDER_WAY_OF_EM_MAX, WATCHED_OF_EM_MAX));
        assert!(
            share.watched_max() < WATCHED_MAX && share.under_way_max < UNDER_WAY_MAX,
            "other EMs always have budget"
        );
    }

    #[test]
    fn contended_em_returns_its_timers() {
        let (watched, under_way) = (WATCHED_OF_EM_MAX, UNDER_WAY_OF_EM_MAX);
        let next = (0..watched - under_way).map(|n| ticket(0, n)).collect();
        let mut share = EmBudget { watched, under_way, under_way_max: under_way, next };
        assert!(share.give_back().is_empty(), "all deadlines are armed while EMs are not contended");
        // All expirations in progress fail one after another, while timers of further tickets fire.
        for left in (0..under_way).rev() {
            (share.watched, share.under_way) = (share.watched - 1, left);
            share.note(false);
            share.give_back();
            assert!(share.watched <= share.watched_max().max(left), "{share:?}");
        }
        (share.watched, share.under_way) = (11, 1);
        share.next = (0..10).map(|n| ticket(0, n)).collect();
        let given_back = share.give_back();
        assert_eq!((share.watched, share.next.len()), (share.watched_max(), 3));
        assert_eq!(given_back, (3..10).map(|n| ticket(0, n)).collect::<Vec<_>>(), "the latest deadlines");
    }
}
