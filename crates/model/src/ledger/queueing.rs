//! Wait queue entries in the ledger: a request enters a queue, moves between keys, and is removed.
//!
//! A position of a request id outlives its call. Each removed key is recorded as freed, so that later entries are woken.

use time::Duration;
use uuid::Uuid;

use super::{
    super::{
        assessment::BlockedRequest,
        operation::{KeptPosition, Outcome, PlacedRequest, QueuedOutcome, Rejection, RemoveWaiting},
        order::{Class, DecidedRank, RankedRequest},
        principal::Principal,
        refusal::Refusal,
        ticket::{Ticket, TicketState},
        wait_queue::{OwnedPosition, QueuePosition, WaitKey, WaitKeys, WaitingRequest},
    },
    EnqueuedDelta, HistoryLine, Ledger, RequeuedDelta,
};

/// The stored position of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredEntry {
    pub position: QueuePosition,
    /// Call that owns the position; `None` while its caller is absent.
    pub claim: Option<Uuid>,
    /// Whether the call of the operation has entered the queue itself; false if it takes the position over.
    pub is_own: bool,
}

impl Ledger {
    /// Returns the position of a request in the wait queues, if it has one: its own, or that of an earlier call with the same request
    /// id.
    ///
    /// # Errors
    /// As of [`PlacedRequest::stored_position`].
    pub(super) fn entry(&self, op: &PlacedRequest) -> Result<Option<StoredEntry>, Rejection> {
        let kept = op.ask.request_key().and_then(|key| self.kept.get(&key));
        if let Some(position) = op.stored_position(&self.line.line, kept, &self.removed)? {
            return Ok(Some(StoredEntry { position, claim: op.claim(), is_own: true }));
        }
        Ok(kept.map(|kept| StoredEntry { position: kept.position, claim: kept.claim, is_own: false }))
    }

    /// Removes a waiting request for an operator. Later entries are woken, and the call of the request ends.
    pub(super) fn remove_waiting(&mut self, op: &RemoveWaiting) -> Result<Outcome, Rejection> {
        let ticket_id = op.ticket_id;
        let has_left = self.deltas.left_line.iter().any(|left| left.ticket_id == ticket_id);
        let new = self.deltas.waiting.iter().find(|new| new.rank.ticket_id == ticket_id);
        let new_claim = new.map(|new| new.request.claim());
        // An earlier operation of this batch may have granted or refused the request, or taken its position over.
        let Some(request) = self.waiting.remove(&ticket_id).filter(|_| !has_left || new_claim.is_some()) else {
            return match self.removed.contains_key(&ticket_id) {
                true => Ok(Outcome::RemovedFromQueue),
                false => Err(Rejection::NotWaiting(ticket_id)),
            };
        };
        let wait_keys = self.line.line.keys_of(ticket_id);
        self.line.line.remove(ticket_id);
        self.end_promise(ticket_id, &WaitKeys::new());
        self.leave_turn(ticket_id);
        wait_keys.into_keys().for_each(|wait_key| self.deltas.freed.add_reservation(wait_key));
        let owned = OwnedPosition { ticket_id, claim: new_claim.unwrap_or(request.claim) };
        self.remove_row(owned);
        self.kept.retain(|_, kept| kept.position.ticket_id() != ticket_id);
        self.deltas.ended_waits.push(owned);
        let (ticket, by) = (Box::new(ticket_of(request, &self.by.principal)), self.by.clone());
        self.deltas.lines.push(HistoryLine::RemovedFromQueue(ticket, op.reason.clone(), by));
        self.removed.insert(ticket_id, op.reason.clone());
        Ok(Outcome::RemovedFromQueue)
    }

    /// Queues a request that does not fit, or updates its entry. Refuses it if it may not wait or can never fit.
    ///
    /// # Errors
    /// [`Rejection::TooManyWaiting`] if the request would enter the queue, and a limit allows no other one to wait.
    pub(super) fn wait_or_refuse(
        &mut self,
        op: &PlacedRequest,
        entry: Option<StoredEntry>,
        decided: Option<DecidedRank>,
        short: BlockedRequest,
    ) -> Result<Outcome, Rejection> {
        let BlockedRequest { refusal, wait_keys } = short;
        if let Some(outcome) = self.unchanged_or_refused(op, entry, decided.as_ref(), &refusal) {
            return Ok(outcome);
        }
        let ticket_id = op.ask.ticket_id;
        let before = entry.map(|_| self.line.line.keys_of(ticket_id)).unwrap_or_default();
        if entry.is_none() {
            self.count_waiting(op)?;
        }
        let stored = self.line.ranks.own.get(ticket_id).cloned();
        let rank = decided.map_or_else(|| self.newcomer(op), |decided| decided.rank);
        let rank = self.requeue(rank, &wait_keys);
        let rank = self.confirm_entitlement(op, rank);
        let has_other_promise = self.promise(op, rank.class);
        let guaranteed_scopes = op.guaranteed_scopes(&self.limits);
        let is_entitled = rank.class == Class::Entitled;
        let entitling_scopes = if is_entitled { Vec::new() } else { guaranteed_scopes.clone() };
        let (position, priority) = (rank.position(), rank.priority);
        let line = &mut self.line.line;
        line.set_position(position);
        let wait_keys = line.keys_for(position, &wait_keys, Some(&rank));
        if entry.is_some_and(|entry| entry.position != position) {
            self.deltas.woken.insert(ticket_id, position);
        }
        if entry.is_some_and(|entry| entry.position < position) {
            before.keys().for_each(|wait_key| self.deltas.freed.add_reservation(wait_key.clone()));
        }
        if entry.is_none_or(|entry| !entry.is_own) {
            if let Some(entry) = entry {
                self.delete_row(op, entry);
            }
            let waiting_scopes = op.waiting_scopes(&self.limits);
            let remaining = op.wait.as_ref().map(|wait| wait.remaining).unwrap_or_default();
            let until = self.now.saturating_add(Duration::try_from(remaining).unwrap_or(Duration::MAX));
            // The start of waiting stays when a later call takes the position over.
            let earlier = self.waiting.get(&ticket_id).map(|earlier| earlier.waiting_since);
            let since = earlier.unwrap_or(rank.entered);
            let (request, wait_keys) = (op.clone(), wait_keys.clone());
            self.deltas.waiting.push(EnqueuedDelta {
                rank,
                since,
                until,
                request,
                wait_keys,
                waiting_scopes,
                guaranteed_scopes: guaranteed_scopes.clone(),
            });
            // A later operation of this batch may take the position over.
            if let (Some(key), Some(request_id)) = (op.ask.request_key(), &op.ask.request_id) {
                let body_hash = request_id.body_hash;
                self.kept.insert(key, KeptPosition { body_hash, claim: op.claim(), position });
            }
        } else if before != wait_keys
            || has_other_promise
            || stored.is_none_or(|stored| stored != rank)
            || entry.is_some_and(|entry| entry.position != position)
        {
            let (claim, em) = (op.claim(), op.em.clone());
            let wait_keys = wait_keys.clone();
            let guaranteed_scopes = guaranteed_scopes.clone();
            self.deltas.moved.push(RequeuedDelta { rank, claim, em, wait_keys, guaranteed_scopes });
        }
        let line = &mut self.line.line;
        // A request that is no longer the first of a key checks again: only as a first it keeps amounts where it is not short.
        let short = wait_keys.iter().filter(|(_, is_short)| **is_short);
        let passed = short.filter_map(|(wait_key, _)| line.first_short(wait_key)).filter(|first| position < *first);
        for first in passed.filter(|first| first.ticket_id() != ticket_id) {
            self.deltas.woken.entry(first.ticket_id()).or_insert(first);
        }
        let left = before.into_keys().filter(|wait_key| !wait_keys.contains_key(wait_key));
        left.for_each(|wait_key| self.deltas.freed.add(wait_key, 1));
        line.put(position, &wait_keys, op.resource());
        let decided_at = self.now;
        Ok(Outcome::Waiting(Box::new(QueuedOutcome {
            position,
            decided_at,
            priority,
            wait_keys,
            guaranteed_scopes: Some(entitling_scopes),
            refusal,
        })))
    }

    /// Returns the outcome of a request that does not fit, if its entry stays as it is, or if it may not wait; `None` if it waits.
    fn unchanged_or_refused(
        &mut self,
        op: &PlacedRequest,
        entry: Option<StoredEntry>,
        decided: Option<&DecidedRank>,
        refusal: &Refusal,
    ) -> Option<Outcome> {
        let refused = || Some(Outcome::Refused(Box::new(refusal.clone())));
        match (&op.wait, entry) {
            (Some(wait), Some(StoredEntry { position, is_own: true, .. })) if wait.is_elsewhere => {
                let entry = QueuedOutcome {
                    position,
                    decided_at: self.now,
                    priority: decided.map_or(0, |decided| decided.rank.priority),
                    wait_keys: self.line.line.keys_of(op.ask.ticket_id),
                    guaranteed_scopes: None,
                    refusal: refusal.clone(),
                };
                Some(Outcome::Waiting(Box::new(entry)))
            }
            (Some(_), _) if !refusal.never_fits => None,
            // The earlier call waits on.
            (None, _) => refused(),
            _ => {
                self.dequeue(op, entry, WaitKeys::new());
                self.leave_turn(op.ask.ticket_id);
                refused()
            }
        }
    }

    /// Counts a request that enters the queue in its scopes with a limit of waiting requests. Requests that leave the queue in the
    /// same batch still count.
    fn count_waiting(&mut self, op: &PlacedRequest) -> Result<(), Rejection> {
        let all = op.scopes(&self.limits);
        let limited = || all.iter().filter_map(|limited| Some((limited.scope(), limited.waiting_max()?)));
        for (scope, (max, rule)) in limited() {
            let waiting = self.waiting_counts.get(scope).copied().unwrap_or(0);
            if waiting >= max {
                let (scope, limit) = (scope.clone(), rule.pattern.to_string());
                return Err(Rejection::TooManyWaiting { scope, limit, waiting, max });
            }
        }
        for (scope, _) in limited() {
            *self.waiting_counts.entry(scope.clone()).or_default() += 1;
        }
        Ok(())
    }

    /// Removes the queue entries of a request, if any. Frees its reservation at all keys except `stays_at`, where its ticket now
    /// counts, if the ticket uses all of it: a request can be granted as a smaller spec.
    pub(super) fn dequeue(&mut self, op: &PlacedRequest, entry: Option<StoredEntry>, stays_at: WaitKeys) {
        let Some(entry) = entry else { return };
        let ticket_id = op.ask.ticket_id;
        let line = &mut self.line.line;
        let wait_keys = line.keys_of(ticket_id);
        if wait_keys.is_empty() && entry.is_own {
            return;
        }
        let is_used = |wait_key: &WaitKey| {
            let reserved = line.reserved_by(wait_key, ticket_id);
            stays_at.contains_key(wait_key)
                && reserved.is_none_or(|reserved| reserved.not_more_than(op.resource()) == Ok(true))
        };
        let left: Vec<WaitKey> = wait_keys.into_keys().filter(|wait_key| !is_used(wait_key)).collect();
        line.remove(ticket_id);
        self.end_promise(ticket_id, &stays_at);
        self.delete_row(op, entry);
        left.into_iter().for_each(|wait_key| self.deltas.freed.add(wait_key, 1));
    }

    /// Removes the row of a waiting request, stored or added by an earlier operation of this batch.
    fn remove_row(&mut self, owned: OwnedPosition) {
        let is_other = |rank: &RankedRequest| rank.ticket_id != owned.ticket_id;
        self.deltas.moved.retain(|moved| is_other(&moved.rank));
        let before = self.deltas.waiting.len();
        self.deltas.waiting.retain(|new| is_other(&new.rank));
        if self.deltas.waiting.len() == before {
            self.deltas.left_line.push(owned);
        }
    }

    /// Deletes the row of a request. Another call that owned it ends.
    fn delete_row(&mut self, op: &PlacedRequest, entry: StoredEntry) {
        let owned = OwnedPosition { ticket_id: op.ask.ticket_id, claim: entry.claim };
        self.remove_row(owned);
        if let Some(key) = op.ask.request_key() {
            self.kept.remove(&key);
        }
        if owned.claim.is_some() && owned.claim != op.claim() {
            self.deltas.ended_waits.push(owned);
        }
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
