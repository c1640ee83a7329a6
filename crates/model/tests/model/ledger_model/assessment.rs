//! The reference: assessment of a step, and its expected reply.

use rm_model::operation::{Outcome, Rejection};
use uuid::Uuid;

use super::{model::*, operations::*, steps::*};

/// The expected reply, with the fields that are compared.
#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    Done,
    /// Amount that an advisory limit would have permitted, if that is less.
    Granted(Uuid, Option<i64>),
    Refused {
        available: i64,
    },
    Waiting {
        available: i64,
    },
    Removed,
    Rolled(bool),
    No(&'static str),
}

pub(super) fn answer(outcome: Result<Outcome, Rejection>) -> Answer {
    match outcome {
        Ok(
            Outcome::Registered(_)
            | Outcome::Adopted(_)
            | Outcome::Inited(_)
            | Outcome::Reported(_)
            | Outcome::Released
            | Outcome::Forced(_)
            | Outcome::RemovedFromQueue
            | Outcome::Drained(_),
        ) => Answer::Done,
        Ok(Outcome::Resumed(was_drained)) => Answer::Rolled(was_drained),
        Ok(Outcome::Granted(grant)) => {
            Answer::Granted(grant.ticket_id, grant.advisory_violations.first().map(|over| over.available))
        }
        Ok(Outcome::Refused(refusal)) => Answer::Refused { available: refusal.shortfalls[0].available },
        Ok(Outcome::Waiting(waiting)) => Answer::Waiting { available: waiting.refusal.shortfalls[0].available },
        Ok(Outcome::Unregistered { .. }) => Answer::Removed,
        Ok(Outcome::Reaped(Some(_))) => Answer::Removed,
        Ok(Outcome::Reaped(None)) => Answer::Rolled(false),
        Ok(Outcome::Expired(rolled) | Outcome::Lost(rolled)) => Answer::Rolled(rolled),
        Err(Rejection::EmNotRegistered(_)) => Answer::No("em"),
        Err(Rejection::EmDraining { .. }) => Answer::No("draining"),
        Err(Rejection::LabelMissing { .. }) => Answer::No("label missing"),
        Err(Rejection::LabelRequired { .. }) => Answer::No("label required"),
        Err(Rejection::EmReserved { .. }) => Answer::No("reserved"),
        Err(Rejection::CapNotCounted { .. }) => Answer::No("cap"),
        Err(Rejection::PositionTakenOver) => Answer::No("taken over"),
        Err(Rejection::PlaceLost) => Answer::No("place"),
        Err(Rejection::RemovedFromQueue { .. }) => Answer::No("removed"),
        Err(Rejection::NotWaiting(_)) => Answer::No("not waiting"),
        Err(Rejection::TicketNotFound { .. }) => Answer::No("ticket"),
        Err(Rejection::RequestIdReused(_)) => Answer::No("request id"),
        Err(Rejection::TicketEnded { .. } | Rejection::AdoptedTooLate(_)) => Answer::No("ended"),
        Err(Rejection::TicketExists { .. }) => Answer::No("exists"),
        Err(Rejection::InitedOtherwise { .. }) => Answer::No("other use"),
        Err(Rejection::StaleEpoch { .. }) => Answer::No("older epoch"),
        Err(Rejection::EpochAhead { .. }) => Answer::No("newer epoch"),
        Err(Rejection::NotInited { .. }) => Answer::No("not in use"),
        Err(Rejection::NotEnough(refusal) | Rejection::NoMore(refusal)) => {
            Answer::Refused { available: refusal.shortfalls[0].available }
        }
        other => panic!("{other:?}"),
    }
}

impl Model {
    /// `position` is the position among the waiting requests, if the request waits.
    pub(super) fn request(&mut self, ask: &ModelWaiting, number: Option<usize>, may_wait: bool) -> Answer {
        if let Some((body, id)) = ask.request_id.and_then(|id| self.request_ids.get(&(ask.who.user, id))).copied() {
            if body != ask.body() {
                return Answer::No("request id");
            }
            if !self.tickets.iter().any(|t| t.id == id && t.alive) {
                return Answer::No("ended");
            }
            self.leave(number);
            return Answer::Granted(id, None);
        }
        let kept = self.kept(ask);
        if kept.is_some_and(|kept| self.waiting[kept].body() != ask.body()) {
            return Answer::No("request id");
        }
        if number.is_some() && kept.is_some_and(|kept| self.waiting[kept].claim != ask.claim) {
            return Answer::No("taken over");
        }
        if number.is_some_and(|number| !self.waiting[number].is_queued) {
            return Answer::No(if self.removed.contains(&ask.id) { "removed" } else { "place" });
        }
        let taken_over = kept.filter(|_| number.is_none()).map(|kept| &self.waiting[kept]);
        let renamed = taken_over.map(|w| ModelWaiting { id: w.id, since: w.since, ..ask.clone() });
        let (ask, number) = (renamed.as_ref().unwrap_or(ask), number.or(kept));
        let ahead = number.unwrap_or(self.waiting.len());
        let Some(rooms) = self.rooms(ask, ahead) else { return Answer::No("em") };
        if let Some(reason) = self.rejection(ask, may_wait) {
            return Answer::No(reason);
        }
        let is_drained = self.drained.contains_key(&ask.em);
        let short = rooms.iter().find_map(Room::short);
        if short.is_none() && !is_drained {
            self.leave(number);
            let advisory = self.advisory_violations(ask);
            self.grant(ask);
            return Answer::Granted(ask.id, advisory);
        }
        let available = short.unwrap_or(0);
        if !may_wait || rooms.iter().any(Room::never_fits) {
            // A repeat that may not wait leaves the earlier call in the queue.
            self.leave(number.filter(|_| may_wait));
            return Answer::Refused { available };
        }
        let others = || self.waiting[..ahead].iter().filter(|w| w.is_queued);
        let is_first = |place: &Place| !others().any(|w| w.at.get(place) == Some(&true));
        let mut at: Vec<(Place, bool)> = rooms.iter().map(|room| (room.place, room.short().is_some())).collect();
        if short.is_none() {
            // The request waits only for the end of the drain.
            at = vec![(Place::Em(ask.em), true)];
        } else if is_drained {
            at.iter_mut().filter(|(place, _)| *place == Place::Em(ask.em)).for_each(|(_, is_short)| *is_short = true);
        }
        let short = || at.iter().filter(|(_, is_short)| *is_short).map(|(place, _)| *place);
        let keeps_all = short().any(|place| is_first(&place)) && !short().all(Place::is_private);
        let at = at.iter().filter(|(_, is_short)| *is_short || keeps_all).copied().collect();
        let queued = ModelWaiting { is_queued: true, at, ..ask.clone() };
        match number {
            Some(number) => self.waiting[number] = queued,
            None => {
                self.entered.insert(ask.id);
                self.waiting.push(ModelWaiting { since: self.now, ..queued });
            }
        }
        Answer::Waiting { available: if is_drained { 0 } else { available } }
    }

    /// Waiting requests that need no check, because their entries would not change.
    pub(super) fn settled(&self) -> Vec<usize> {
        let is_settled = |number: &usize| {
            let w = &self.waiting[*number];
            let mut later = self.clone();
            w.is_queued
                && matches!(later.request(w, Some(*number), true), Answer::Waiting { .. })
                && later.waiting[*number].wait_keys() == w.wait_keys()
        };
        (0..self.waiting.len()).filter(is_settled).collect()
    }

    pub(super) fn is_servable(&self, number: usize) -> bool {
        let w = &self.waiting[number];
        let fits = || self.rooms(w, number).is_some_and(|rooms| rooms.iter().all(|room| room.short().is_none()));
        w.is_queued && self.rejection(w, false).is_none() && fits()
    }

    pub(super) fn leave(&mut self, number: Option<usize>) {
        if let Some(number) = number {
            self.waiting[number].is_queued = false;
        }
    }

    pub(super) fn grant(&mut self, ask: &ModelWaiting) {
        let deadline = self.now + ask.ttl;
        let counted = ask.who.queue.is_some() && self.cluster.is_some();
        let new = ModelTicket { id: ask.id, em: ask.em, who: ask.who, held: ask.amount, deadline, counted, ..NEW };
        self.tickets.push(new);
        if let Some(request_id) = ask.request_id {
            self.request_ids.insert((ask.who.user, request_id), (ask.body(), ask.id));
        }
    }

    /// Changes the use of an engine to these amounts, perhaps with an application.
    pub(super) fn use_instead(&mut self, number: usize, wanted: i64, application: Option<usize>) -> Answer {
        let ticket = &self.tickets[number];
        if wanted > ticket.held {
            if self.drained.contains_key(&ticket.em) {
                return Answer::No("draining");
            }
            if let Some(available) = self.left_for_growth(ticket).into_iter().find(|available| wanted > *available) {
                return Answer::Refused { available };
            }
        }
        let now = self.now;
        let ticket = &mut self.tickets[number];
        ticket.since = if ticket.used { ticket.since } else { now };
        (ticket.held, ticket.used, ticket.application) = (wanted, true, application.or(ticket.application));
        Answer::Done
    }

    /// Adopts an engine, whether or not it fits.
    pub(super) fn adopt(&mut self, adopted: ModelTicket) -> Answer {
        if let Some(known) = self.tickets.iter().find(|t| t.id == adopted.id) {
            let is_same = known.used
                && (known.em, known.who) == (adopted.em, adopted.who)
                && known.adopted.unwrap_or(known.held) == adopted.held;
            return match known.alive {
                false => Answer::No("ended"),
                true if is_same => Answer::Done,
                true => Answer::No("exists"),
            };
        }
        if !self.ems.contains_key(&adopted.em) {
            return Answer::No("em");
        }
        let counted = adopted.who.queue.is_some() && self.cluster.is_some();
        self.tickets.push(ModelTicket { counted, ..adopted });
        Answer::Done
    }

    pub(super) fn remove(&mut self, em: usize) -> Answer {
        self.ems.remove(&em);
        self.reported.remove(&em);
        self.tickets.iter_mut().filter(|t| t.em == em).for_each(|t| t.alive = false);
        Answer::Removed
    }

    pub(super) fn step(&mut self, step: &Step, new_id: Uuid) -> Answer {
        match *step {
            Step::Register { em, total, protected, reserved, zone } => {
                self.ems.insert(em, ModelEm { total, protected, reserved, zone });
                self.registered.insert(em);
                Answer::Done
            }
            Step::Unregister { em, epoch } => {
                if !self.ems.contains_key(&em) {
                    return Answer::No("em");
                }
                fenced(epoch).unwrap_or_else(|| self.remove(em))
            }
            Step::Reap { em, known } => {
                let silent = known && self.reported.contains(&em) && !self.registered.contains(&em);
                if silent { self.remove(em) } else { Answer::Rolled(false) }
            }
            Step::Report { em } => {
                if self.ems.contains_key(&em) {
                    self.reported.insert(em);
                }
                Answer::Done
            }
            Step::Request { wait, .. } => self.request(&asked(step, new_id), None, wait),
            Step::Retry { ago, em } => {
                let Some(number) = self.waiter(ago) else { return Answer::No("place") };
                let before = self.waiting[number].clone();
                self.request(&ModelWaiting { em: em.unwrap_or(before.em), ..before }, Some(number), true)
            }
            Step::Repeat { ago, wait } => self.request(&self.repeated(ago, new_id), None, wait),
            Step::Remove { ago } => {
                let Some(number) = self.waiter(ago) else { return Answer::No("not waiting") };
                let id = self.waiting[number].id;
                if self.waiting[number].is_queued && !self.entered.contains(&id) {
                    self.leave(Some(number));
                    self.removed.insert(id);
                }
                if self.removed.contains(&id) { Answer::Done } else { Answer::No("not waiting") }
            }
            Step::Leave { ago } => {
                self.leave(self.waiter(ago));
                Answer::Done
            }
            Step::Adopt { .. } => self.adopt(self.adopted(step, new_id)),
            Step::Inited { ago, used, application, user, epoch } => {
                let Some(number) = self.ticket(ago) else { return Answer::No("ticket") };
                let ticket = &self.tickets[number];
                if !ticket.alive {
                    return Answer::No("ticket");
                }
                if ticket.who.user != user {
                    return Answer::No("ticket");
                }
                // Only an engine in a queue has an application.
                let application = application.filter(|_| used.is_some() && ticket.who.queue.is_some());
                if let Some(no) = fenced(epoch) {
                    return no;
                }
                if ticket.used {
                    let is_known = used.is_none_or(|used| used == ticket.held);
                    let is_known = is_known && (application.is_none() || application == ticket.application);
                    return if is_known { Answer::Done } else { Answer::No("other use") };
                }
                self.use_instead(number, used.unwrap_or(ticket.held), application)
            }
            Step::Reported { ago, in_use, used, application, stolen, epoch } => {
                let Some(number) = self.reporting(ago, in_use) else { return Answer::No("ticket") };
                let ticket = &self.tickets[number];
                if !ticket.alive {
                    return Answer::No("ticket");
                }
                if stolen {
                    return Answer::No("ticket");
                }
                let application = application.filter(|_| ticket.who.queue.is_some());
                match fenced(epoch) {
                    Some(no) => no,
                    None if ticket.used => self.use_instead(number, used, application),
                    None => Answer::No("not in use"),
                }
            }
            Step::Released { ago, user } => {
                let Some(number) = self.ticket(ago) else { return Answer::No("ticket") };
                let ticket = &mut self.tickets[number];
                if ticket.who.user != user {
                    return Answer::No("ticket");
                }
                ticket.alive = false;
                Answer::Done
            }
            Step::Force { ago } => {
                let Some(number) = self.ticket(ago) else { return Answer::No("ticket") };
                self.tickets[number].alive = false;
                Answer::Done
            }
            Step::Drain { em, reason } => {
                if !self.ems.contains_key(&em) && !self.drained.contains_key(&em) {
                    return Answer::No("em");
                }
                self.drained.insert(em, reason);
                Answer::Done
            }
            Step::Resume { em } => match self.drained.remove(&em) {
                None if !self.ems.contains_key(&em) => Answer::No("em"),
                before => Answer::Rolled(before.is_some()),
            },
            Step::Expire { ago } => {
                let Some(number) = self.ticket(ago) else { return Answer::Rolled(false) };
                let now = self.now;
                let ticket = &mut self.tickets[number];
                let due = ticket.alive && !ticket.used && ticket.deadline <= now;
                ticket.alive &= !due;
                Answer::Rolled(due)
            }
            Step::Lost { ago } => {
                let Some(number) = self.ticket(ago) else { return Answer::Rolled(false) };
                let ticket = &mut self.tickets[number];
                let lost = ticket.alive && ticket.used;
                ticket.alive &= !lost;
                Answer::Rolled(lost)
            }
            Step::Undo { ago } => {
                if let Some(number) = self.ticket(ago) {
                    let ticket = &mut self.tickets[number];
                    ticket.alive &= ticket.used;
                }
                Answer::Done
            }
            Step::Commit { seconds } => {
                self.now += seconds;
                Answer::Done
            }
            Step::Limit { set, values, rule } => {
                match rule {
                    Some(rule) => drop(self.limits.insert((set, values), rule)),
                    None => drop(self.limits.remove(&(set, values))),
                }
                Answer::Done
            }
            Step::Policy { engine_type } => {
                self.needs_engine_type = engine_type;
                Answer::Done
            }
            Step::Cluster { max, used, shown } => {
                self.cluster = Some(ModelCluster { begun: self.now, max, used, shown });
                Answer::Done
            }
        }
    }
}

/// Returns the reply to a call for another registration of the EM.
fn fenced(said: Said) -> Option<Answer> {
    match said {
        Said::Nothing | Said::Current => None,
        Said::Older => Some(Answer::No("older epoch")),
        Said::Newer => Some(Answer::No("newer epoch")),
    }
}
