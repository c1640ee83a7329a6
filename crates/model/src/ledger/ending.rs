//! Ends of tickets in the ledger: release, expiry and loss, and the capacity that they free.
//!
//! Invariant: a ticket ends once. An end subtracts exactly the amounts of the ticket from its EM, its scopes and its
//! external queue.

use std::collections::HashMap;

use uuid::Uuid;

use super::{
    super::{
        em::EmInstance,
        limit::LimitedScope,
        operation::{Outcome, Rejection, ReleaseTicket},
        ticket::{EndedTicket, Ticket, TicketState},
        ticket_end::TicketEnd,
        wait_queue::WaitKey,
    },
    EndedDelta, HistoryLine, Ledger, counters, give_back, owned,
    slots::TicketSlot,
    stored_em,
};

impl Ledger {
    /// Records freed capacity on the EM and in the scopes, as much as about `requests` requests used.
    pub(super) fn free(&mut self, em: &EmInstance, scopes: &[LimitedScope], requests: u32) {
        self.deltas.freed.add(WaitKey::Em(em.clone()), requests);
        // Scopes without a limit are included, because a request can wait there for its own cap.
        scopes.iter().for_each(|limited| self.deltas.freed.add(WaitKey::Scope(limited.scope().clone()), requests));
    }

    /// Records freed capacity in the external queue of a ticket. Call before the ticket ends there.
    pub(super) fn free_queue(&mut self, ticket_id: Uuid) {
        self.clusters.wait_keys_of(ticket_id).into_iter().for_each(|wait_key| self.deltas.freed.add(wait_key, 1));
    }

    pub(super) fn released(&mut self, op: &ReleaseTicket) -> Result<Outcome, Rejection> {
        if self.ended.get(&op.ticket_id).is_some_and(|ended| ended.is_of(&op.user, &op.em)) {
            return Ok(Outcome::Released);
        }
        owned(&mut self.tickets, &self.ended, op.ticket_id, &op.user, &op.em)?;
        self.end(op.ticket_id, TicketEnd::Released)?;
        Ok(Outcome::Released)
    }

    /// Releases a locked ticket. A used ticket stays: its caller found it without the reply, and its engine runs.
    pub(super) fn undo(&mut self, op: &ReleaseTicket) -> Result<Outcome, Rejection> {
        let is_locked = |ticket: &Ticket| ticket.em == op.em && ticket.is_locked();
        if self.tickets.get(&op.ticket_id).is_some_and(|slot| is_locked(&slot.ticket)) {
            self.end(op.ticket_id, TicketEnd::Released)?;
        }
        Ok(Outcome::Released)
    }

    /// Expires a locked ticket whose deadline has passed. A confirmation or release before this operation takes precedence.
    pub(super) fn expire(&mut self, op: &ReleaseTicket) -> Result<Outcome, Rejection> {
        let due = self.tickets.get(&op.ticket_id).is_some_and(|slot| match &slot.ticket.state {
            TicketState::Locked { expires_at, .. } => slot.ticket.em == op.em && *expires_at <= self.now,
            TicketState::Used { .. } => false,
        });
        if due {
            self.end(op.ticket_id, TicketEnd::Expired)?;
        }
        Ok(Outcome::Expired(due))
    }

    /// Ends a used ticket that its EM no longer reports. A locked ticket expires instead.
    pub(super) fn lost(&mut self, op: &ReleaseTicket) -> Result<Outcome, Rejection> {
        let is_used = |ticket: &Ticket| ticket.em == op.em && !ticket.is_locked();
        let lost = self.tickets.get(&op.ticket_id).is_some_and(|slot| is_used(&slot.ticket));
        if lost {
            self.end(op.ticket_id, TicketEnd::Lost)?;
        }
        Ok(Outcome::Lost(lost))
    }

    /// Ends a live ticket and subtracts its amounts from all counters.
    pub(super) fn end(&mut self, ticket_id: Uuid, end: TicketEnd) -> Result<(), Rejection> {
        let not_found = || Rejection::TicketNotFound { ticket_id, ended: None };
        let ticket = self.tickets.get(&ticket_id).ok_or_else(not_found)?.ticket.clone();
        let mut em = stored_em(&mut self.ems, &ticket.em)?.current.clone();
        let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", ticket.em), source };
        let share = em.share(ticket.resource()).map_err(inconsistent)?;
        let held = if ticket.is_locked() { &mut em.locked } else { &mut em.used };
        *held = held.minus(&share).map_err(inconsistent)?;
        if !ticket.is_locked() {
            em.used_tickets.remove(ticket_id);
        }
        let mut counted = HashMap::new();
        let scopes = counters(&self.limits, em.counted, ticket_id, &ticket.ticket_labels());
        self.count(&mut counted, &scopes, |at, usage| give_back(at, usage, &ticket))?;
        self.apply_usage(counted);
        let slot = stored_em(&mut self.ems, &ticket.em)?;
        *slot.current = em;
        *slot.counted = true;
        self.free(&ticket.em, &scopes, 1);
        self.free_queue(ticket_id);
        self.clusters.end(ticket_id);
        self.end_ticket(ticket_id, end);
        Ok(())
    }

    /// Moves a ticket from the live ones to the ended ones.
    pub(super) fn end_ticket(&mut self, ticket_id: Uuid, end: TicketEnd) {
        self.keep_granted(ticket_id);
        if let Some(TicketSlot { ticket, stored, .. }) = self.tickets.remove(&ticket_id) {
            let (user, em) = (ticket.user.clone(), ticket.em.clone());
            self.ended.insert(ticket_id, EndedTicket { id: ticket_id, user, em, end, at: self.now });
            self.deltas.end(EndedDelta { ticket, end, stored, by: self.by.clone(), reason: None });
        }
    }

    /// Saves a ticket in its state at the grant for the history line, before this batch ends or confirms it.
    pub(super) fn keep_granted(&mut self, ticket_id: Uuid) {
        let Some(slot) = self.tickets.get_mut(&ticket_id) else { return };
        if let Some(line) = slot.granted_line.take().and_then(|line| self.deltas.lines.get_mut(line)) {
            *line = HistoryLine::GrantedBefore(Box::new(slot.ticket.clone()));
        }
    }
}
