//! What each EM with tickets that fall due takes of what there is for all: of the timers, and of the roll-backs under way. Whether
//! somebody holds an EM is known only when the first of its tickets have been tried in vain; whatever it was given until then, others
//! have room beside it.

use std::collections::{HashMap, HashSet, VecDeque};

use uuid::Uuid;

use crate::domain::{em::EmInstance, operation::Released};

use super::TurnedDown;

/// How many tickets have a timer, or are being rolled back; and how many of one EM.
const WATCHED_MAX: usize = 8192;
const WATCHED_OF_EM_MAX: usize = 4096;

/// How many tickets are being rolled back: some batches of them, so that there is always one that waits; and how many of one EM.
const UNDER_WAY_MAX: usize = 2048;
const UNDER_WAY_OF_EM_MAX: usize = 1024;

/// How many of an EM of which none has gone yet, and so that half of the room stays free that it found: of however many EMs that turn out
/// to be held.
const UNDER_WAY_OF_EM_FIRST: usize = 256;

/// Of how many EMs it is remembered how they fared. Those that have nothing to do any more are forgotten then: most are gone.
const EMS_MAX: usize = 2 * WATCHED_MAX;

/// The shares of all EMs.
#[derive(Debug)]
pub(super) struct Shares {
    /// Tickets with a timer, or whose roll-back is under way.
    watched: HashSet<Uuid>,
    /// Of EMs with such tickets, and of those whose last one could not go.
    of_ems: HashMap<EmInstance, Share>,
    /// How many roll-backs there are.
    under_way: usize,
    turned_down: TurnedDown,
}

/// What one EM takes of what there is for all.
#[derive(Debug)]
struct Share {
    watched: usize,
    under_way: usize,
    /// How many may be under way: one, for an EM that somebody holds; of one that goes on, soon as many as ever.
    under_way_max: usize,
    /// Overdue, and next when one that is under way is done.
    next: VecDeque<Released>,
}

impl Default for Share {
    fn default() -> Self {
        Self { watched: 0, under_way: 0, under_way_max: UNDER_WAY_OF_EM_FIRST, next: VecDeque::new() }
    }
}

impl Share {
    fn watched_max(&self) -> usize {
        WATCHED_OF_EM_MAX.min(self.under_way_max * 4)
    }

    /// `most`, or what is left to an EM of which none has gone yet where there is so much room.
    fn of_room(&self, most: usize, room: usize) -> usize {
        if self.under_way_max > UNDER_WAY_OF_EM_FIRST { most } else { most.min((room / 2).max(1)) }
    }

    fn note(&mut self, went: bool) {
        self.under_way_max = if went { (self.under_way_max * 2).min(UNDER_WAY_OF_EM_MAX) } else { 1 };
    }

    /// What waits beyond what may be watched, the last first to go: it is watched no longer.
    fn give_back(&mut self) -> VecDeque<Released> {
        let excess = self.watched.saturating_sub(self.watched_max()).min(self.next.len());
        self.watched -= excess;
        self.next.split_off(self.next.len() - excess)
    }
}

impl Shares {
    /// Tells in `turned_down` that tickets were left to the next sweep.
    pub fn new(turned_down: TurnedDown) -> Self {
        Self { watched: HashSet::new(), of_ems: HashMap::new(), under_way: 0, turned_down }
    }

    /// Whether more may be watched, of whichever EM.
    pub fn may_watch(&self) -> bool {
        self.watched.len() < WATCHED_MAX
    }

    /// Whether one more roll-back may begin, of whichever EM.
    pub fn may_begin(&self) -> bool {
        self.under_way < UNDER_WAY_MAX
    }

    /// Whether a ticket is to have a timer: not if it has one, nor if its EM has its share.
    pub fn watch(&mut self, ticket: &Released) -> bool {
        if self.watched.contains(&ticket.ticket_id) {
            return false;
        }
        let room = WATCHED_MAX.saturating_sub(self.watched.len());
        let share = self.share(&ticket.em);
        if share.watched >= share.of_room(share.watched_max(), room) {
            self.turned_down.note();
            return false;
        }
        share.watched += 1;
        self.watched.insert(ticket.ticket_id);
        true
    }

    /// A ticket has fallen due: answers it if its roll-back begins now; otherwise it waits for another of its EM.
    pub fn begin(&mut self, ticket: Released) -> Option<Released> {
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

    /// A roll-back has ended; answers those that begin now.
    pub fn end(&mut self, ticket: &Released, went: bool) -> Vec<Released> {
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
        // At least one follows where none is left: there is room for the one that has ended.
        let more = share.of_room(share.under_way_max, room).saturating_sub(share.under_way);
        let next: Vec<Released> = share.next.drain(..more.min(room).min(share.next.len())).collect();
        share.under_way += next.len();
        self.under_way += next.len();
        let given_back = share.give_back();
        self.unwatch(given_back);
        next
    }

    /// A roll-back has ended, of which it is not known whose it was: without marks, the next sweep finds what is still there.
    pub fn lose(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
        self.watched.clear();
        self.of_ems.clear();
    }

    fn share(&mut self, em: &EmInstance) -> &mut Share {
        if self.of_ems.len() >= EMS_MAX {
            self.of_ems.retain(|_, share| share.watched > 0);
        }
        self.of_ems.entry(em.clone()).or_default()
    }

    /// Leaves these to the next sweep, which finds them again.
    fn unwatch(&mut self, tickets: VecDeque<Released>) {
        if !tickets.is_empty() {
            self.turned_down.note();
        }
        for ticket in tickets {
            self.watched.remove(&ticket.ticket_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::name::Name;

    fn ticket(host: usize, n: usize) -> Released {
        let (user, em) = (Name::parse("user", "hadoop"), EmInstance::parse("em", "ecm", &format!("host{host}")));
        let ticket_id = Uuid::from_u128(((host as u128) << 64) | n as u128);
        Released { ticket_id, user: user.unwrap(), em: em.unwrap() }
    }

    /// Has so many overdue tickets of each of these EMs watched and begun, as far as that goes; answers those under way.
    fn crowd(shares: &mut Shares, hosts: std::ops::Range<usize>, count: usize) -> VecDeque<Released> {
        let tickets = (0..count).flat_map(|n| hosts.clone().map(move |host| ticket(host, n)));
        let watched: Vec<Released> = tickets.filter(|ticket| shares.may_watch() && shares.watch(ticket)).collect();
        watched.into_iter().filter_map(|ticket| if shares.may_begin() { shares.begin(ticket) } else { None }).collect()
    }

    #[test]
    fn no_more_are_under_way_than_may_be_however_many_wait_on_ems_that_go_on() {
        let mut shares = Shares::new(TurnedDown::default());
        let mut under_way = crowd(&mut shares, 0..8, 1024);
        let (mut most, mut done) = (under_way.len(), 0);
        while let Some(ticket) = under_way.pop_front() {
            under_way.extend(shares.end(&ticket, true));
            (most, done) = (most.max(under_way.len()), done + 1);
            assert_eq!(shares.under_way, under_way.len());
        }
        assert!(most <= UNDER_WAY_MAX && done >= UNDER_WAY_MAX, "{most} of {done}");
        assert!(shares.watched.is_empty() && shares.of_ems.is_empty(), "all that waited had their turn: {shares:?}");
    }

    #[test]
    fn others_have_room_beside_many_ems_that_may_be_held() {
        for held in [1, 3, 8, 40] {
            let mut shares = Shares::new(TurnedDown::default());
            crowd(&mut shares, 0..held, 2048);
            for n in 0..8 {
                let other = ticket(1000, n);
                assert!(shares.may_watch() && shares.watch(&other), "beside {held}");
                assert!(shares.may_begin() && shares.begin(other.clone()) == Some(other), "beside {held}");
            }
        }
    }

    #[test]
    fn ems_that_have_nothing_to_do_any_more_are_forgotten_at_last() {
        let mut shares = Shares::new(TurnedDown::default());
        let busy = ticket(usize::MAX, 0);
        assert!(shares.watch(&busy) && shares.begin(busy.clone()).is_some());
        for host in 0..2 * EMS_MAX {
            let last = ticket(host, 0);
            assert!(shares.watch(&last) && shares.begin(last.clone()).is_some());
            assert!(shares.end(&last, false).is_empty());
            assert!(shares.of_ems.contains_key(&last.em), "that it may be held is known for a while");
            assert!(shares.of_ems.len() <= EMS_MAX);
        }
        assert!(shares.of_ems.contains_key(&busy.em));
    }

    #[test]
    fn a_held_em_keeps_little_of_what_there_is_for_all() {
        let mut share = Share::default();
        share.note(false);
        assert_eq!((share.under_way_max, share.watched_max()), (1, 4));
        for _ in 0..20 {
            share.note(true);
        }
        assert_eq!((share.under_way_max, share.watched_max()), (UNDER_WAY_OF_EM_MAX, WATCHED_OF_EM_MAX));
        assert!(
            share.watched_max() < WATCHED_MAX && share.under_way_max < UNDER_WAY_MAX,
            "there is always room for others"
        );
    }

    #[test]
    fn what_waits_on_an_em_that_turns_out_to_be_held_is_watched_no_longer() {
        let (watched, under_way) = (WATCHED_OF_EM_MAX, UNDER_WAY_OF_EM_MAX);
        let next = (0..watched - under_way).map(|n| ticket(0, n)).collect();
        let mut share = Share { watched, under_way, under_way_max: under_way, next };
        assert!(share.give_back().is_empty(), "all may be watched while it goes on");
        // All that are under way are tried in vain, one after another; and some with timers fall due yet.
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
        assert_eq!(given_back, (3..10).map(|n| ticket(0, n)).collect::<Vec<_>>(), "those that fell due last");
    }
}
