//! Operator actions in the ledger: drains, resumptions and forced releases.
//!
//! A drain changes no counter. It writes the EM's row nevertheless, so that other instances observe the new version.

use std::sync::Arc;

use super::{
    super::{
        em::EmInstance,
        em_drain::EmDrain,
        name::Name,
        operation::{DrainEm, ForceRelease, Outcome, Rejection, ResumeEm},
        principal::Actor,
        resource::{Resource, ResourceType},
        ticket::EndedTicket,
        ticket_end::TicketEnd,
        wait_queue::{MUCH, WaitKey},
    },
    HistoryLine, Ledger,
};

/// History line of a drain or a resumption.
#[derive(Debug, Clone, PartialEq)]
pub struct DrainDelta {
    /// The EM.
    pub em: EmInstance,
    /// Capacity of the EM; empty if it is not registered.
    pub total: Resource,
    /// Drain before the action, if any.
    pub before: Option<Arc<EmDrain>>,
    /// Drain after the action; `None` after a resumption.
    pub after: Option<Arc<EmDrain>>,
    /// Reason, if the operator gave one.
    pub reason: Option<Name>,
    /// Actor of the action.
    pub by: Actor,
}

impl Ledger {
    pub(super) fn drain(&mut self, op: &DrainEm) -> Result<Outcome, Rejection> {
        let before = self.drained_or_registered(&op.em)?;
        if let Some(before) = before.as_ref().filter(|before| before.reason == op.reason) {
            return Ok(Outcome::Drained(before.clone()));
        }
        let since = before.map_or(self.now, |before| before.since);
        let drain = Arc::new(EmDrain { reason: op.reason.clone(), by: self.by.principal.clone(), since });
        self.set_drain(&op.em, Some(drain.clone()), Some(op.reason.clone()));
        Ok(Outcome::Drained(drain))
    }

    pub(super) fn resume(&mut self, op: &ResumeEm) -> Result<Outcome, Rejection> {
        let was_drained = self.drained_or_registered(&op.em)?.is_some();
        if was_drained {
            self.set_drain(&op.em, None, op.reason.clone());
        }
        Ok(Outcome::Resumed(was_drained))
    }

    /// Returns the drain of an EM, if any.
    ///
    /// # Errors
    /// [`Rejection::EmNotRegistered`] if the EM is neither drained nor registered.
    fn drained_or_registered(&self, em: &EmInstance) -> Result<Option<Arc<EmDrain>>, Rejection> {
        let drain = self.drains.get(em).cloned();
        let current = self.ems.get(em).and_then(|slot| slot.current.as_ref());
        match drain.is_some() || current.is_some_and(|em| em.is_registered()) {
            true => Ok(drain),
            false => Err(Rejection::EmNotRegistered(em.clone())),
        }
    }

    /// Sets or ends a drain, and wakes all waiters of the EM: a drain sends them to other EMs, its end lets them be
    /// granted.
    fn set_drain(&mut self, instance: &EmInstance, drain: Option<Arc<EmDrain>>, reason: Option<Name>) {
        let mut total = Resource::zero(ResourceType::Special);
        if let Some(slot) = self.ems.get_mut(instance)
            && let Some(em) = &mut slot.current
        {
            total = em.total.clone();
            em.drain.clone_from(&drain);
            // Writes the EM's row, so that its new version shows other instances the change.
            slot.counted = true;
        }
        let before = match &drain {
            Some(drain) => self.drains.insert(instance.clone(), drain.clone()),
            None => self.drains.remove(instance),
        };
        let (em, by) = (instance.clone(), self.by.clone());
        let line = DrainDelta { em, total, before, after: drain, reason, by };
        self.deltas.lines.push(HistoryLine::Drain(Box::new(line)));
        self.deltas.freed.add(WaitKey::Em(instance.clone()), MUCH);
        self.drains_changed.insert(instance.clone());
    }

    /// Ends a ticket regardless of its owner. Returns how it ended, also if it had ended before.
    pub(super) fn force(&mut self, op: &ForceRelease) -> Result<Outcome, Rejection> {
        let ticket_id = op.ticket.ticket_id;
        if !self.ended.contains_key(&ticket_id) {
            self.end(ticket_id, TicketEnd::Forced)?;
            if let Some(ended) = self.deltas.ended.last_mut() {
                ended.reason = Some(op.reason.clone());
            }
        }
        let ended = self.ended.get(&ticket_id).cloned();
        ended
            .map(|ended: EndedTicket| Outcome::Forced(Box::new(ended)))
            .ok_or(Rejection::TicketNotFound { ticket_id, ended: None })
    }
}
