//! Sweeps: read the tickets that may be chosen at many places, of which many may be exempt by their policies, within a bound.
//!
//! A step reads the first page of each place and, where more tickets follow, a later page that moves on with each step. The tickets of
//! later pages that a policy lets end are read again until the sweep of the place begins anew, so that sets from several pages are found.
//! If there are more of these than a page has, those that a request of the step needs stay before the others.
//!
//! Never: decides about a ticket. Caller: `reclaim`, with one object for each order.

use std::{
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash},
};

use sqlx::PgConnection;
use uuid::Uuid;

use rm_engine::reclaim_plan::policy_of;
use rm_model::{
    limit::Limits,
    ticket::{Ticket, TicketState},
};
use rm_store::{
    StoreError,
    user_resource::{self, ReclaimOrder, ReclaimPlace, ReclaimPosition},
};

/// Maximum number of tickets of a page, and the number of which all places together have pages. Each of many places has the minimum.
const OF_EACH_MAX: usize = 128;
const OF_EACH_MIN: usize = 8;
const IN_TOTAL: usize = 2048;

/// Maximum number of places with a sweep; above it, all begin anew.
const SWEEPS_MAX: usize = 10_000;

/// Sweeps by place.
#[derive(Debug, Default)]
pub struct Sweeps {
    by_place: HashMap<ReclaimPlace, Sweep>,
    step: u64,
    /// Places that were read in this step.
    read: BTreeSet<ReclaimPlace>,
}

/// Sweep of a place whose first page does not contain all tickets.
#[derive(Debug)]
struct Sweep {
    /// End of the last later page.
    after: ReclaimPosition,
    /// Tickets of later pages that a policy lets end.
    found: Vec<Uuid>,
    /// Maximum number of them that the next step reads again.
    found_max: usize,
}

impl Sweeps {
    /// Begins a step, in which each place is read once.
    pub fn begin(&mut self, step: u64) {
        self.step = step;
        self.read.clear();
    }

    /// Reads the tickets of the places that were not read in this step.
    pub async fn read(
        &mut self,
        connection: &mut PgConnection,
        order: ReclaimOrder,
        mut places: BTreeSet<ReclaimPlace>,
        limits: &Limits,
    ) -> Result<HashMap<Uuid, Ticket>, StoreError> {
        places.retain(|place| self.read.insert(place.clone()));
        let of_each = (IN_TOTAL / places.len().max(1)).clamp(OF_EACH_MIN, OF_EACH_MAX);
        let begin: Vec<_> = places.iter().map(|place| (place, None)).collect();
        let first = user_resource::reclaimable(&mut *connection, order, &begin, of_each).await?;
        let mut swept = Vec::new();
        for (place, page) in places.iter().zip(&first) {
            match page.next {
                Some(next) => swept.push((place, Some(self.by_place.get(place).map_or(next, |sweep| sweep.after)))),
                None => drop(self.by_place.remove(place)),
            }
        }
        let later = user_resource::reclaimable(&mut *connection, order, &swept, of_each).await?;
        let found = swept.iter().filter_map(|(place, _)| self.by_place.get(place)).flat_map(|sweep| &sweep.found);
        let of_pages = first.iter().chain(&later).flat_map(|page| &page.tickets);
        let ticket_ids: BTreeSet<Uuid> = of_pages.chain(found).copied().collect();
        let tickets = user_resource::read(connection, &ticket_ids.into_iter().collect::<Vec<_>>()).await?;
        let may_end = |ticket_id: &Uuid| tickets.get(ticket_id).is_some_and(|ticket| may_end(ticket, order, limits));
        for ((place, _), page) in swept.into_iter().zip(later) {
            let Some(after) = page.next else {
                self.end(place);
                continue;
            };
            if self.by_place.len() >= SWEEPS_MAX {
                self.by_place.clear();
            }
            let sweep = self.by_place.entry(place.clone()).or_insert(Sweep { after, found: Vec::new(), found_max: 0 });
            sweep.after = after;
            sweep.found_max = place.page_size(of_each);
            // After a step that failed before `keep`.
            sweep.found.truncate(sweep.found_max);
            sweep.found.retain(may_end);
            sweep.found.extend(page.tickets.into_iter().filter(may_end));
        }
        Ok(tickets)
    }

    /// Ends a step: bounds the tickets that the next one reads again. Needed ones stay before the others.
    pub fn keep(&mut self, is_needed: impl Fn(&Uuid) -> bool) {
        for place in &self.read {
            if let Some(sweep) = self.by_place.get_mut(place) {
                sample(&mut sweep.found, sweep.found_max, self.step, &is_needed);
            }
        }
    }

    /// Ends the sweep of a place, in about every second step: the last page may be read again. Otherwise, a request that is looked at in
    /// each fourth step could meet the same pages in each sweep.
    fn end(&mut self, place: &ReclaimPlace) {
        if hash(self.step, place).is_multiple_of(2) {
            self.by_place.remove(place);
        }
    }
}

/// Leaves at most `size` of the tickets, those that are needed before the others. Which of equal ones stay changes with each step: no
/// ticket hides another one for ever.
fn sample(found: &mut Vec<Uuid>, size: usize, step: u64, is_needed: impl Fn(&Uuid) -> bool) {
    if found.len() > size {
        found.sort_by_cached_key(|ticket_id| (!is_needed(ticket_id), hash(step, ticket_id)));
        found.truncate(size);
    }
}

/// Returns a number that is another one in each step.
pub fn hash(step: u64, of: impl Hash) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one((step, of))
}

/// Returns whether a policy lets the engine of a ticket end, as an idle or as a busy one.
fn may_end(ticket: &Ticket, order: ReclaimOrder, limits: &Limits) -> bool {
    let TicketState::Used { idle_since, .. } = ticket.state else { return false };
    policy_of(limits, ticket).is_some_and(|policy| match order {
        ReclaimOrder::LongestIdle => idle_since.is_some(),
        ReclaimOrder::NewestUsed { .. } => policy.busy,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 80;

    /// Returns the number of steps of a sweep over some pages until both tickets are read in one step; `None` if it takes 1,000.
    fn steps_until_set(pages: usize, set: [u128; 2], is_needed: impl Fn(&Uuid) -> bool) -> Option<usize> {
        let mut found = Vec::new();
        (0..1000).position(|step: usize| {
            let page = step % pages;
            if page == 0 {
                found.clear();
            }
            found.extend((page * SIZE..(page + 1) * SIZE).map(|id| Uuid::from_u128(id as u128)));
            let is_read = set.iter().all(|id| found.contains(&Uuid::from_u128(*id)));
            sample(&mut found, SIZE, step as u64, &is_needed);
            assert_eq!(found.len(), SIZE);
            is_read
        })
    }

    #[test]
    fn useless_tickets_hide_no_set_of_several_pages() {
        // Tickets of the third and the seventh of eight pages.
        assert!(steps_until_set(8, [200, 500], |_| false).is_some());
    }

    #[test]
    fn needed_tickets_stay_until_sweep_of_their_place_ends() {
        // Tickets of the second and the last of 90 pages.
        let set = [100, 7199];
        assert_eq!(steps_until_set(90, set, |id| set.contains(&id.as_u128())), Some(89));
    }
}
