//! Use of running engines in the ledger: confirmations and reported amounts, and their effect on EMs and scopes.
//!
//! Growth is checked like a new grant, except that no reservations apply. A dimension that does not grow is never short.

use std::collections::HashMap;

use super::{
    super::{
        assessment::{AmountChange, advisory_violations, assess_dimensions},
        operation::{ConfirmTicket, Outcome, Rejection, UpdateTicket},
        refusal::Refusal,
        resource::Resource,
        scope::ScopeCounter,
        ticket::{Ticket, TicketState},
        wait_queue::{AssessedPosition, WaitQueues},
    },
    HistoryLine, Ledger, check_epoch, counters, give_back, owned, registered_em, stored_em,
};

impl Ledger {
    pub(super) fn inited(&mut self, op: &ConfirmTicket) -> Result<Outcome, Rejection> {
        let ticket = owned(&mut self.tickets, &self.ended, op.ticket_id, &op.user, &op.em)?.ticket.clone();
        if op.epoch.is_some() {
            check_epoch(stored_em(&mut self.ems, &op.em)?.current, op.epoch)?;
        }
        let used = match &ticket.state {
            TicketState::Locked { resource, .. } => op.used.as_ref().unwrap_or(resource).as_use_of(resource),
            TicketState::Used { engine, .. } if *engine != op.engine => {
                return Err(Rejection::AlreadyInited { ticket_id: op.ticket_id, engine: engine.clone() });
            }
            // The granted amount is no longer stored, so a repeated confirmation is compared with the recorded use.
            TicketState::Used { resource, .. } if op.used.as_ref().is_none_or(|used| is_known(used, resource)) => {
                return Ok(Outcome::Inited(Box::new(ticket)));
            }
            TicketState::Used { .. } => return Err(Rejection::InitedOtherwise { ticket_id: op.ticket_id }),
        };
        let used = used.map_err(|source| Rejection::OtherUse { source })?;
        self.set_usage(&ticket, &used)?;
        let state =
            TicketState::Used { resource: used, engine: op.engine.clone(), used_time: self.now, idle_since: None };
        let ticket = Ticket { state, ..ticket };
        self.store_usage(ticket.clone());
        self.deltas.lines.push(HistoryLine::Inited(Box::new(ticket.clone()), self.by.principal.clone()));
        Ok(Outcome::Inited(Box::new(ticket)))
    }

    pub(super) fn reported(&mut self, op: &UpdateTicket) -> Result<Outcome, Rejection> {
        let ticket = owned(&mut self.tickets, &self.ended, op.ticket_id, &op.user, &op.em)?.ticket.clone();
        if op.epoch.is_some() {
            check_epoch(stored_em(&mut self.ems, &op.em)?.current, op.epoch)?;
        }
        let TicketState::Used { resource, engine, used_time, idle_since } = &ticket.state else {
            return Err(Rejection::NotInited { ticket_id: op.ticket_id });
        };
        if is_known(&op.used, resource) {
            return Ok(Outcome::Reported(Box::new(ticket)));
        }
        let used = op.used.as_use_of(resource).map_err(|source| Rejection::OtherUse { source })?;
        self.set_usage(&ticket, &used)?;
        let state = TicketState::Used {
            resource: used,
            engine: engine.clone(),
            used_time: *used_time,
            idle_since: *idle_since,
        };
        let ticket = Ticket { state, ..ticket };
        self.store_usage(ticket.clone());
        self.deltas.lines.push(HistoryLine::Reported(Box::new(ticket.clone()), self.by.principal.clone()));
        Ok(Outcome::Reported(Box::new(ticket)))
    }

    /// Replaces the amounts of a ticket, locked or used, by `used` in all counters.
    fn set_usage(&mut self, ticket: &Ticket, used: &Resource) -> Result<(), Rejection> {
        let held = ticket.resource();
        let is_covered = held.covers(used).map_err(|source| Rejection::OtherUse { source })?;
        let em = registered_em(&mut self.ems, &ticket.em)?;
        if em.current.going.is_some_and(|going| ticket.em_epoch <= going.epoch) {
            // The ticket belongs to an ended registration and is about to end.
            return Err(Rejection::EmNotRegistered(ticket.em.clone()));
        }
        if let Some(drain) = em.current.drain.as_ref().filter(|_| !is_covered) {
            // Growth counts as a new grant, which a drained EM refuses.
            return Err(Rejection::EmDraining { em: ticket.em.clone(), drain: drain.clone() });
        }
        let scopes = counters(&self.limits, em.current.counted, ticket.id, &ticket.ticket_labels());
        let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", ticket.em), source };
        let held_share = em.current.share(held).map_err(inconsistent)?;
        // A use that does not grow is accepted even in dimensions that the EM no longer provides.
        let is_no_more = is_covered && !ticket.is_locked();
        let used_share = if is_no_more { em.current.share(used) } else { em.current.project(used) };
        let used_share =
            used_share.map_err(|source| Rejection::NotProvided { field: "used", em: ticket.em.clone(), source })?;
        let mut after = em.current.clone();
        let sum = if ticket.is_locked() { &mut after.locked } else { &mut after.used };
        *sum = sum.minus(&held_share).map_err(inconsistent)?;
        // A running engine does not wait, so no reservations apply.
        let nobody_ahead = WaitQueues::default();
        let usage = |counter: &ScopeCounter| self.scopes.get(counter).map(|slot| &slot.usage);
        let share = AmountChange { granted: &held_share, requested: &used_share };
        let amounts = AmountChange { granted: held, requested: used };
        let short = Refusal::of(&assess_dimensions(
            &after,
            &scopes,
            usage,
            &nobody_ahead,
            &AssessedPosition::default(),
            share,
            amounts,
        )?);
        after.used = after.used.add(&used_share).map_err(|source| Rejection::Overflow { field: "used", source })?;
        if ticket.is_locked() {
            after.used_tickets.insert(ticket.id);
        }
        let in_queue = self.clusters.judge_growth(ticket.id, used, self.now);
        let refusal = short.into_iter().chain(in_queue).reduce(|mut first, more| {
            first.append(more);
            first
        });
        if let Some(refusal) = refusal {
            let short = if ticket.is_locked() { Rejection::NotEnough } else { Rejection::NoMore };
            return Err(short(Box::new(refusal)));
        }
        // Compares the growth with the advisory limits while the counters still include the earlier amounts.
        let is_beyond = !advisory_violations(&scopes, usage, held, used).is_empty();
        let mut counted = HashMap::new();
        self.count(&mut counted, &scopes, |at, usage| {
            give_back(at, usage, ticket)?;
            usage.used.add(at.share(used), 1)
        })?;
        self.apply_usage(counted);
        let em = registered_em(&mut self.ems, &ticket.em)?;
        *em.current = after;
        *em.counted = true;
        self.deltas.advisory_violations += u64::from(is_beyond);
        let is_less = held.amounts().any(|(dimension, amount)| amount > used.get(&dimension));
        if is_less {
            self.free(&ticket.em, &scopes, 1);
        }
        // The cluster may have shown the application before its ticket named it: then the queue no longer keeps amounts for the ticket.
        if is_less || used.application_id() != held.application_id() {
            self.free_queue(ticket.id);
        }
        Ok(())
    }

    /// Stores a ticket with changed use.
    fn store_usage(&mut self, ticket: Ticket) {
        self.clusters.recount(&ticket);
        self.keep_granted(ticket.id);
        if let Some(slot) = self.tickets.get_mut(&ticket.id) {
            slot.ticket = ticket;
            slot.in_use = true;
        }
    }
}

/// Returns whether a reported use equals the recorded one: equal amounts and no other application.
fn is_known(said: &Resource, known: &Resource) -> bool {
    let application = said.application_id().filter(|id| !id.is_empty());
    said == known && application.is_none_or(|id| known.application_id() == Some(id))
}
