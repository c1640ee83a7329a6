//! Adoption in the ledger: counts a running engine even if it does not fit, because it already uses the resources.
//!
//! Only this operation, besides a lowered capacity, can over-commit an EM. A repeated adoption returns the existing ticket.

use std::collections::HashMap;

use super::{
    super::{
        adoption::AdoptTicket,
        operation::{Outcome, Rejection},
    },
    HistoryLine, Ledger, TicketSlot, counters, registered_em,
};

impl Ledger {
    pub(super) fn adopt(&mut self, op: &AdoptTicket) -> Result<Outcome, Rejection> {
        if let Some(ended) = self.ended.get(&op.ticket_id) {
            return Err(Rejection::AdoptedTooLate(Box::new(ended.clone())));
        }
        if let Some(slot) = self.tickets.get(&op.ticket_id) {
            let differs = op.differences(&slot.ticket, self.adopted.get(&op.ticket_id));
            return match differs.is_empty() {
                true => Ok(Outcome::Adopted(Box::new(slot.ticket.clone()))),
                false => Err(Rejection::TicketExists { ticket_id: op.ticket_id, differs: differs.join(", ") }),
            };
        }
        let em = registered_em(&mut self.ems, &op.em)?;
        let not_provided = |source| Rejection::NotProvided { field: "used", em: op.em.clone(), source };
        let share = em.current.project(&op.used).map_err(not_provided)?;
        // Only checks that the amounts are comparable: same queue and same namespace.
        em.current.total.covers(&share).map_err(not_provided)?;
        let mut after = em.current.clone();
        let overflow = |source| Rejection::Overflow { field: "used", source };
        after.used = after.used.add(&share).map_err(overflow)?;
        after.used_tickets.insert(op.ticket_id);
        let is_over = after.left().map_err(overflow)?.is_negative_anywhere();
        let scopes = counters(&self.limits, after.counted, op.ticket_id, &op.ticket_labels());
        let mut counted = HashMap::new();
        self.count(&mut counted, &scopes, |at, usage| usage.used.add(at.share(&op.used), 1))?;
        self.apply_usage(counted);
        let ticket = op.ticket(&self.by.principal, after.epoch, self.now);
        if let Some(slot) = self.ems.get_mut(&op.em) {
            slot.current = Some(after);
            slot.counted = true;
            slot.exceeded |= is_over;
        }
        self.clusters.count(&ticket);
        self.adopted.insert(op.ticket_id, op.used.clone());
        self.deltas.lines.push(HistoryLine::Adopted(Box::new(ticket.clone()), self.by.clone()));
        let slot = TicketSlot { ticket: ticket.clone(), stored: false, granted_line: None, in_use: false };
        self.tickets.insert(op.ticket_id, slot);
        Ok(Outcome::Adopted(Box::new(ticket)))
    }
}
