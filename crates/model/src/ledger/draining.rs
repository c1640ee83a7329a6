//! EMs that are drained, and tickets that an operator ends.

use std::sync::Arc;

use super::{
    super::{
        drain::Drain,
        em::EmInstance,
        end::End,
        line::{MUCH, Spot},
        name::Name,
        operation::{DrainEm, Forced, Outcome, Rejection, ResumeEm},
        principal::Actor,
        resource::{Resource, ResourceType},
        ticket::EndedTicket,
    },
    HistoryLine, Ledger,
};

/// A line of the history: an EM was drained, or resumed.
#[derive(Debug, Clone, PartialEq)]
pub struct DrainDelta {
    /// Which EM.
    pub em: EmInstance,
    /// What it provides; nothing if it is not registered.
    pub total: Resource,
    /// How it was drained before, if it was.
    pub before: Option<Arc<Drain>>,
    /// How it is drained now; `None` if it was resumed.
    pub after: Option<Arc<Drain>>,
    /// Why, if that was told.
    pub reason: Option<Name>,
    /// Who wanted it.
    pub by: Actor,
}

impl Ledger {
    pub(super) fn drain(&mut self, op: &DrainEm) -> Result<Outcome, Rejection> {
        let before = self.drained_or_registered(&op.em)?;
        if let Some(before) = before.as_ref().filter(|before| before.reason == op.reason) {
            return Ok(Outcome::Drained(before.clone()));
        }
        let since = before.map_or(self.now, |before| before.since);
        let drain = Arc::new(Drain { reason: op.reason.clone(), by: self.by.principal.clone(), since });
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

    /// The drain of an EM, if there is one.
    ///
    /// # Errors
    /// [`Rejection::EmNotRegistered`] if it is neither drained nor registered.
    fn drained_or_registered(&self, em: &EmInstance) -> Result<Option<Arc<Drain>>, Rejection> {
        let drain = self.drains.get(em).cloned();
        let current = self.ems.get(em).and_then(|slot| slot.current.as_ref());
        match drain.is_some() || current.is_some_and(|em| em.is_registered()) {
            true => Ok(drain),
            false => Err(Rejection::EmNotRegistered(em.clone())),
        }
    }

    /// Whoever waits there looks again: after a drain to be told of it or to go elsewhere, after its end to be granted.
    fn set_drain(&mut self, instance: &EmInstance, drain: Option<Arc<Drain>>, reason: Option<Name>) {
        let mut total = Resource::zero(ResourceType::Special);
        if let Some(slot) = self.ems.get_mut(instance)
            && let Some(em) = &mut slot.current
        {
            total = em.total.clone();
            em.drain.clone_from(&drain);
            // Its row gets another version, by which other instances see that it is not what it was.
            slot.counted = true;
        }
        let before = match &drain {
            Some(drain) => self.drains.insert(instance.clone(), drain.clone()),
            None => self.drains.remove(instance),
        };
        let (em, by) = (instance.clone(), self.by.clone());
        let line = DrainDelta { em, total, before, after: drain, reason, by };
        self.deltas.lines.push(HistoryLine::Drain(Box::new(line)));
        self.deltas.freed.note(Spot::Em(instance.clone()), MUCH);
        self.drains_changed.insert(instance.clone());
    }

    /// Ends a ticket whosever it is; of one that is over, tells how it ended.
    pub(super) fn force(&mut self, op: &Forced) -> Result<Outcome, Rejection> {
        let ticket_id = op.ticket.ticket_id;
        if !self.ended.contains_key(&ticket_id) {
            self.end(ticket_id, End::Forced)?;
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
