//! Sweeps: read the tickets that may be chosen at many places, of which many may be exempt by their policies, within a bound.
//!
//! A step reads the first page of each place and, where more tickets follow, a later page that moves on with each step. The tickets of
//! later pages that a policy lets end are read again until the sweep of the place begins anew, so that sets from several pages are found.
//!
//! Never: decides about a ticket. Caller: `reclaim`, with one object for each order.

use std::collections::{BTreeSet, HashMap};

use sqlx::PgConnection;
use uuid::Uuid;

use rm_engine::reclaim_plan::policy_of;
use rm_model::{limit::Limits, ticket::Ticket};
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
pub struct Sweeps(HashMap<ReclaimPlace, Sweep>);

/// Sweep of a place whose first page does not contain all tickets.
#[derive(Debug)]
struct Sweep {
    /// End of the last later page.
    after: ReclaimPosition,
    /// Tickets of later pages that a policy lets end.
    found: Vec<Uuid>,
}

impl Sweeps {
    /// Reads the tickets of a step.
    pub async fn read(
        &mut self,
        connection: &mut PgConnection,
        order: ReclaimOrder,
        places: &BTreeSet<ReclaimPlace>,
        limits: &Limits,
    ) -> Result<HashMap<Uuid, Ticket>, StoreError> {
        let of_each = (IN_TOTAL / places.len().max(1)).clamp(OF_EACH_MIN, OF_EACH_MAX);
        let begin: Vec<_> = places.iter().map(|place| (place, None)).collect();
        let first = user_resource::reclaimable(&mut *connection, order, &begin, of_each).await?;
        let mut swept = Vec::new();
        for (place, page) in places.iter().zip(&first) {
            match page.next {
                Some(next) => swept.push((place, Some(self.0.get(place).map_or(next, |sweep| sweep.after)))),
                None => drop(self.0.remove(place)),
            }
        }
        let later = user_resource::reclaimable(&mut *connection, order, &swept, of_each).await?;
        let found = swept.iter().filter_map(|(place, _)| self.0.get(place)).flat_map(|sweep| sweep.found.clone());
        let ticket_ids: BTreeSet<Uuid> =
            first.into_iter().chain(later.iter().cloned()).flat_map(|page| page.tickets).chain(found).collect();
        let ticket_ids: Vec<Uuid> = ticket_ids.into_iter().collect();
        let tickets = user_resource::read(connection, &ticket_ids).await?;
        for ((place, _), page) in swept.into_iter().zip(later) {
            let Some(after) = page.next else {
                self.0.remove(place);
                continue;
            };
            if self.0.len() >= SWEEPS_MAX {
                self.0.clear();
            }
            let sweep = self.0.entry(place.clone()).or_insert(Sweep { after, found: Vec::new() });
            sweep.after = after;
            sweep.found.retain(|ticket_id| tickets.contains_key(ticket_id));
            let may_end =
                |ticket_id: &Uuid| tickets.get(ticket_id).is_some_and(|ticket| policy_of(limits, ticket).is_some());
            let left = of_each.saturating_sub(sweep.found.len());
            sweep.found.extend(page.tickets.into_iter().filter(may_end).take(left));
        }
        Ok(tickets)
    }
}
