//! Wait queue entries in the ledger: a request enters a queue, moves between keys, and is removed.
//!
//! A request keeps its position until it leaves. Each removed key is recorded as freed, so that later entries are
//! woken.

use super::{
    super::{
        assessment::BlockedRequest,
        operation::{Outcome, PlacedRequest, QueuedOutcome, Rejection, RemoveWaiting},
        principal::Principal,
        ticket::{Ticket, TicketState},
        wait_queue::{QueuePosition, WaitKey, WaitKeys, WaitingRequest},
    },
    EnqueuedDelta, HistoryLine, Ledger, RequeuedDelta,
};

impl Ledger {
    /// Returns the stored queue position of a request, if it has one.
    ///
    /// # Errors
    /// [`Rejection::RemovedFromQueue`] or [`Rejection::PlaceLost`] if the queue no longer contains the request.
    pub(super) fn position(&self, op: &PlacedRequest) -> Result<Option<QueuePosition>, Rejection> {
        op.stored_position(&self.line.line, &self.removed)
    }

    /// Removes a waiting request for an operator. Later entries are woken, and the call of the request ends.
    pub(super) fn remove_waiting(&mut self, op: &RemoveWaiting) -> Result<Outcome, Rejection> {
        let (ticket_id, line) = (op.ticket_id, &mut self.line.line);
        let wait_keys = line.keys_of(ticket_id);
        // An earlier operation of this batch may have granted or refused the request.
        let Some(request) = self.waiting.remove(&ticket_id).filter(|_| !wait_keys.is_empty()) else {
            return match self.removed.contains_key(&ticket_id) {
                true => Ok(Outcome::RemovedFromQueue),
                false => Err(Rejection::NotWaiting(ticket_id)),
            };
        };
        line.remove(ticket_id);
        wait_keys.into_keys().for_each(|wait_key| self.deltas.freed.add_reservation(wait_key));
        self.deltas.left_line.push(ticket_id);
        self.deltas.removed.push(ticket_id);
        let (ticket, by) = (Box::new(ticket_of(request, &self.by.principal)), self.by.clone());
        self.deltas.lines.push(HistoryLine::RemovedFromQueue(ticket, op.reason.clone(), by));
        self.removed.insert(ticket_id, op.reason.clone());
        Ok(Outcome::RemovedFromQueue)
    }

    /// Queues a request that does not fit, or updates its entry. Refuses it if it may not wait or can never fit.
    pub(super) fn wait_or_refuse(
        &mut self,
        op: &PlacedRequest,
        position: Option<QueuePosition>,
        short: BlockedRequest,
    ) -> Outcome {
        let BlockedRequest { refusal, wait_keys } = short;
        let line = &mut self.line.line;
        let before = position.map(|_| line.keys_of(op.ask.ticket_id)).unwrap_or_default();
        match (&op.wait, position) {
            (Some(wait), Some(position)) if wait.is_elsewhere => {
                return Outcome::Waiting(Box::new(QueuedOutcome { position, wait_keys: before, refusal }));
            }
            (Some(_), _) if !refusal.never_fits => {}
            _ => {
                self.dequeue(op, WaitKeys::new());
                return Outcome::Refused(Box::new(refusal));
            }
        }
        let position = position.unwrap_or_else(|| line.last_position(&wait_keys, self.now, op.ask.ticket_id));
        let wait_keys = line.keys_for(position, &wait_keys);
        if before.is_empty() {
            let (request, wait_keys) = (op.clone(), wait_keys.clone());
            self.deltas.waiting.push(EnqueuedDelta { position, since: position.since(), request, wait_keys });
        } else if before != wait_keys {
            self.deltas.moved.push(RequeuedDelta { position, em: op.em.clone(), wait_keys: wait_keys.clone() });
            let left = before.into_keys().filter(|wait_key| !wait_keys.contains_key(wait_key));
            left.for_each(|wait_key| self.deltas.freed.add(wait_key, 1));
        }
        line.put(position, &wait_keys, &op.ask.resource);
        Outcome::Waiting(Box::new(QueuedOutcome { position, wait_keys, refusal }))
    }

    /// Removes the queue entries of a request, if any. Frees its reservation at all keys except `stays_at`, where its ticket now
    /// counts, if the ticket uses all of it: a request can be granted as a smaller spec.
    pub(super) fn dequeue(&mut self, op: &PlacedRequest, stays_at: WaitKeys) {
        let Some(ticket_id) = op.queued_ticket() else { return };
        let line = &mut self.line.line;
        let wait_keys = line.keys_of(ticket_id);
        if wait_keys.is_empty() {
            return;
        }
        let is_used = |wait_key: &WaitKey| {
            let reserved = line.reserved_by(wait_key, ticket_id);
            stays_at.contains_key(wait_key)
                && reserved.is_none_or(|reserved| reserved.not_more_than(&op.ask.resource) == Ok(true))
        };
        let left: Vec<WaitKey> = wait_keys.into_keys().filter(|wait_key| !is_used(wait_key)).collect();
        line.remove(ticket_id);
        self.deltas.left_line.push(ticket_id);
        left.into_iter().for_each(|wait_key| self.deltas.freed.add(wait_key, 1));
    }
}

/// Returns the ticket that a grant would have created, as history lines show it.
fn ticket_of(request: WaitingRequest, by: &Principal) -> Ticket {
    Ticket {
        id: request.ticket_id,
        user: request.user,
        creator: request.creator,
        engine_type: request.engine_type,
        em: request.em,
        labels: request.labels,
        locked_time: request.waiting_since,
        state: TicketState::Locked { resource: request.resource, expires_at: request.wait_until },
        principal: by.clone(),
        em_epoch: 0,
    }
}
