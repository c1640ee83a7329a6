//! Steps in the ledger: operations on all tickets of an EM, such as an unregistration or the counting of a new label set.
//!
//! Each step processes one page of tickets in order of their ids. The EM's row records the progress, so that any instance
//! resumes. Never: processes more than the page that the batch read. Caller: [`Ledger::apply`].

use std::collections::HashMap;

use uuid::Uuid;

use super::{
    super::{
        em::{Em, EmInstance, UnregisterProgress},
        operation::{CountTickets, MarkEmLost, Outcome, Rejection, UnregisterEm},
        report::LastSignOfLife,
        ticket::Ticket,
        ticket_end::TicketEnd,
        wait_queue::{MUCH, WaitKey},
    },
    EmSlot, HistoryLine, LabelSetProgress, Ledger, TicketPage, check_epoch, registered_em,
};

impl Ledger {
    pub(super) fn unregister(&mut self, op: &UnregisterEm) -> Result<Outcome, Rejection> {
        check_epoch(registered_em(&mut self.ems, &op.em)?.current, op.epoch)?;
        let (removed_tickets, in_progress) = self.start_unregister(&op.em, TicketEnd::Unregistered)?;
        Ok(Outcome::Unregistered { removed_tickets, in_progress })
    }

    /// Marks an EM as lost if it has sent neither a report nor a registration since `op.last`.
    pub(super) fn reap(&mut self, op: &MarkEmLost) -> Result<Outcome, Rejection> {
        let current = self.ems.get(&op.em).and_then(|slot| slot.current.as_ref()).filter(|em| em.is_registered());
        let last = current.zip(self.reports.get(&op.em));
        let last = last.map(|(em, reported)| LastSignOfLife { registered: em.epoch, reported: *reported });
        if last != Some(op.last) {
            return Ok(Outcome::Reaped(None));
        }
        self.start_unregister(&op.em, TicketEnd::Lost).map(|(removed, _)| Outcome::Reaped(Some(removed)))
    }

    /// Starts an unregistration; the EM grants nothing from now on. Returns the number of ended tickets and whether more
    /// may remain.
    fn start_unregister(&mut self, instance: &EmInstance, end: TicketEnd) -> Result<(usize, bool), Rejection> {
        let em = registered_em(&mut self.ems, instance)?.current;
        em.going = Some(UnregisterProgress { epoch: em.epoch, end, after: Uuid::nil() });
        let line = HistoryLine::Gone(Box::new(em.clone()), end, self.by.principal.clone());
        self.deltas.freed.add(WaitKey::Em(instance.clone()), MUCH);
        self.reports.remove(instance);
        if let Some(slot) = self.ems.get_mut(instance) {
            slot.went = true;
            slot.stepped = true;
            slot.registered = false;
            slot.resized = false;
        }
        // Later steps retry tickets that cannot be ended now.
        let ended = self.end_page(instance).unwrap_or((0, true));
        self.deltas.lines.push(line);
        Ok(ended)
    }

    /// Ends the next tickets of an EM that is being unregistered.
    pub(super) fn end_tickets(&mut self, instance: &EmInstance) -> Result<Outcome, Rejection> {
        let (tickets, more) = self.end_page(instance)?;
        Ok(Outcome::Stepped { tickets, more })
    }

    /// Ends the next page of tickets of an EM that is being unregistered. The last page deletes the row, unless the EM
    /// registered again. Returns the number of ended tickets and whether more may remain.
    fn end_page(&mut self, instance: &EmInstance) -> Result<(usize, bool), Rejection> {
        let Some(going) = self.stored(instance).and_then(|em| em.going) else { return Ok((0, false)) };
        let Some(page) = self.take_page(instance, going.after) else { return Ok((0, true)) };
        let mut tickets: Vec<Uuid> = (self.page_tickets(instance, page))
            .filter(|ticket| ticket.em_epoch <= going.epoch)
            .map(|ticket| ticket.id)
            .collect();
        tickets.sort_unstable();
        let (mut ended, mut last) = (0_usize, page.last);
        for ticket_id in &tickets {
            match self.end(*ticket_id, going.end) {
                Ok(()) => ended += 1,
                // The counters contradict the ticket, which needs a repair. Earlier tickets of the page still end.
                Err(rejection) if ended == 0 => return Err(rejection),
                Err(_) => {
                    last = ended.checked_sub(1).and_then(|before| tickets.get(before)).copied();
                    break;
                }
            }
        }
        if let Some(slot) = self.ems.get_mut(instance) {
            slot.finish_unregister(last);
        }
        Ok((ended, last.is_some()))
    }

    /// Counts the next tickets of an EM in new label sets.
    pub(super) fn count_tickets(&mut self, op: &CountTickets) -> Result<Outcome, Rejection> {
        let done = Ok(Outcome::Stepped { tickets: 0, more: false });
        let Some(em) = self.stored(&op.em) else { return done };
        let before = em.counted;
        if before.to >= op.to {
            return done;
        }
        let (to, after) = before.under_way.unwrap_or((op.to, Uuid::nil()));
        let Some(page) = self.take_page(&op.em, after) else { return Ok(Outcome::Stepped { tickets: 0, more: true }) };
        let tickets: Vec<Ticket> = self.page_tickets(&op.em, page).cloned().collect();
        let mut counted = HashMap::new();
        for ticket in &tickets {
            let labels = ticket.ticket_labels();
            let mut new = self.limits.scopes(&labels);
            new.retain(|limited| (before.to + 1..=to).contains(&limited.counter.label_set_id));
            self.count(&mut counted, &new, |at, usage| {
                let held = if ticket.is_locked() { &mut usage.locked } else { &mut usage.used };
                held.add(at.share(ticket.resource()), 1)
            })?;
        }
        self.apply_usage(counted);
        if let Some(EmSlot { current: Some(em), stepped, .. }) = self.ems.get_mut(&op.em) {
            *stepped = true;
            match page.last {
                Some(last) => em.counted.under_way = Some((to, last)),
                None => em.counted = LabelSetProgress { to, under_way: None },
            }
        }
        Ok(Outcome::Stepped { tickets: tickets.len(), more: page.last.is_some() || to < op.to })
    }

    fn stored(&self, instance: &EmInstance) -> Option<&Em> {
        self.ems.get(instance)?.current.as_ref()
    }

    /// Returns the page of tickets after `after`, if the batch read it. A page can be used once, because the next one
    /// starts at its end; the last page can be used again.
    fn take_page(&mut self, instance: &EmInstance, after: Uuid) -> Option<TicketPage> {
        if self.ems.get(instance).is_some_and(|slot| slot.stored_version.is_none()) {
            // The EM registered in this batch, so all its tickets are in memory.
            return Some(TicketPage { after, last: None });
        }
        let page = self.pages.get(instance).copied().filter(|page| page.after == after)?;
        if page.last.is_some() {
            self.pages.remove(instance);
        }
        Some(page)
    }

    /// Returns the live tickets of a page, including those granted in this batch.
    fn page_tickets<'a>(&'a self, instance: &'a EmInstance, page: TicketPage) -> impl Iterator<Item = &'a Ticket> {
        let is_in = move |ticket: &Ticket| {
            ticket.id > page.after && page.last.is_none_or(|last| ticket.id <= last) && ticket.em == *instance
        };
        self.tickets.values().map(|slot| &slot.ticket).filter(move |ticket| is_in(ticket))
    }
}

impl EmSlot {
    /// Records that all tickets up to `last` are processed, or all tickets if it is `None`.
    fn finish_unregister(&mut self, last: Option<Uuid>) {
        let Some(em) = &mut self.current else { return };
        self.stepped = true;
        if let Some(last) = last {
            em.going = em.going.map(|going| UnregisterProgress { after: last, ..going });
        } else if em.is_registered() {
            em.going = None;
        } else {
            self.before = self.current.take();
        }
    }
}
