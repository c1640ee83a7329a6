//! Wait queue entries in the ledger: a request enters a queue, moves between keys, and is removed.
//!
//! A request keeps its position until it leaves. Each removed key is recorded as freed, so that later entries are
//! woken.

use super::{
    super::{
        assessment::BlockedRequest,
        operation::{Outcome, PlacedRequest, QueuedOutcome, Rejection},
        wait_queue::{QueuePosition, WaitKeys},
    },
    EnqueuedDelta, Ledger, RequeuedDelta,
};

impl Ledger {
    /// Returns the queue position of a request, if it has one.
    ///
    /// # Errors
    /// [`Rejection::PlaceLost`] if the queue no longer contains the position.
    pub(super) fn position(&self, op: &PlacedRequest) -> Result<Option<QueuePosition>, Rejection> {
        let position = op.position();
        match position {
            Some(position) if !self.line.line.has(position) => Err(Rejection::PlaceLost),
            position => Ok(position),
        }
    }

    /// Queues a request that does not fit, or updates its entry. Refuses it if it may not wait or can never fit.
    pub(super) fn wait_or_refuse(
        &mut self,
        op: &PlacedRequest,
        position: Option<QueuePosition>,
        short: BlockedRequest,
    ) -> Outcome {
        let BlockedRequest { refusal, spots } = short;
        let line = &mut self.line.line;
        let before = position.map(|position| line.keys_of(position)).unwrap_or_default();
        match (&op.wait, position) {
            (Some(wait), Some(position)) if wait.is_elsewhere => {
                return Outcome::Waiting(Box::new(QueuedOutcome { position, spots: before, refusal }));
            }
            (Some(_), _) if !refusal.never_fits => {}
            _ => {
                self.dequeue(op, WaitKeys::new());
                return Outcome::Refused(Box::new(refusal));
            }
        }
        let position = position.unwrap_or_else(|| QueuePosition::new(0, self.now, op.ask.ticket_id));
        let spots = line.keys_for(position, &spots);
        if before.is_empty() {
            let (request, spots) = (op.clone(), spots.clone());
            self.deltas.waiting.push(EnqueuedDelta { position, since: self.now, request, spots });
        } else if before != spots {
            self.deltas.moved.push(RequeuedDelta { position, em: op.em.clone(), spots: spots.clone() });
            let left = before.into_keys().filter(|spot| !spots.contains_key(spot));
            left.for_each(|spot| self.deltas.freed.add(spot, 1));
        }
        line.put(position, &spots, &op.ask.resource);
        Outcome::Waiting(Box::new(QueuedOutcome { position, spots, refusal }))
    }

    /// Removes the queue entries of a request, if any. Frees its reservation at all keys except `stays_at`, where its
    /// ticket now counts.
    pub(super) fn dequeue(&mut self, op: &PlacedRequest, stays_at: WaitKeys) {
        let Some(position) = op.position() else { return };
        let spots = self.line.line.keys_of(position);
        if spots.is_empty() {
            return;
        }
        self.line.line.remove(position);
        self.deltas.left_line.push(position.ticket_id());
        let left = spots.into_keys().filter(|spot| !stays_at.contains_key(spot));
        left.for_each(|spot| self.deltas.freed.add(spot, 1));
    }
}
