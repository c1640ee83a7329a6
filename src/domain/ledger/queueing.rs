//! How requests enter the waiting line, move in it, and leave it.

use super::{
    super::{
        judgement::Short,
        line::{Place, Spots, Stand},
        operation::{Outcome, Rejection, Request, Waiting},
    },
    Ledger, MovedDelta, WaitingDelta,
};

impl Ledger {
    /// The place in line that a request has, if any.
    pub(super) fn place(&self, op: &Request) -> Result<Option<Place>, Rejection> {
        let place = op.wait.as_ref().and_then(|wait| wait.place);
        match place {
            Some(place) if self.line.line.spots_of(place).is_empty() => Err(Rejection::PlaceLost),
            place => Ok(place),
        }
    }

    /// Puts a request that does not fit into line, or back to where it stands; or refuses it.
    pub(super) fn wait_or_refuse(&mut self, op: &Request, place: Option<Place>, short: Short) -> Outcome {
        let Short { refusal, spots } = short;
        let line = &mut self.line.line;
        let before = place.map(|place| line.spots_of(place)).unwrap_or_default();
        match (&op.wait, place) {
            (Some(wait), Some(place)) if wait.is_elsewhere => {
                return Outcome::Waiting(Box::new(Waiting { place, spots: before, refusal }));
            }
            (Some(_), _) if !refusal.never_fits => {}
            _ => {
                self.leave_line(op, Spots::new());
                return Outcome::Refused(Box::new(refusal));
            }
        }
        let place = place.unwrap_or(Place { since: self.now, ticket_id: op.ask.ticket_id });
        let spots = line.stand(place, &spots);
        if before.is_empty() {
            self.deltas.waiting.push(WaitingDelta { place, request: op.clone(), spots: spots.clone() });
        } else if before != spots {
            self.deltas.moved.push(MovedDelta { place, em: op.em.clone(), spots: spots.clone() });
            let left = before.into_keys().filter(|spot| !spots.contains_key(spot));
            left.for_each(|spot| self.deltas.freed.note(spot, 1));
        }
        line.remove(place);
        for (spot, is_short) in &spots {
            let stand = Stand { resource: op.ask.resource.clone(), is_short: *is_short };
            line.insert(spot.clone(), place, stand);
        }
        Outcome::Waiting(Box::new(Waiting { place, spots, refusal }))
    }

    /// Takes a request out of the line, if it stands there; it makes room wherever it does not stay as a ticket.
    pub(super) fn leave_line(&mut self, op: &Request, stays_at: Spots) {
        let Some(place) = op.wait.as_ref().and_then(|wait| wait.place) else { return };
        let spots = self.line.line.spots_of(place);
        if spots.is_empty() {
            return;
        }
        self.line.line.remove(place);
        self.deltas.left_line.push(place.ticket_id);
        let left = spots.into_keys().filter(|spot| !stays_at.contains_key(spot));
        left.for_each(|spot| self.deltas.freed.note(spot, 1));
    }
}
