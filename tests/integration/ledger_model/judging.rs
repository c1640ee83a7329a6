//! What the reference makes of a step, and answers.

use linkis_rm::domain::{
    limit_mode::LimitMode,
    operation::{Outcome, Rejection},
};
use uuid::Uuid;

use super::{operations::*, state::*, steps::*};

/// What a step should be answered: just enough to compare.
#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    Done,
    /// And how much a limit that only watches would have let through, if that was less.
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
            | Outcome::Drained(_),
        ) => Answer::Done,
        Ok(Outcome::Resumed(was_drained)) => Answer::Rolled(was_drained),
        Ok(Outcome::Granted(grant)) => {
            Answer::Granted(grant.ticket_id, grant.over_watched.first().map(|over| over.available))
        }
        Ok(Outcome::Refused(refusal)) => Answer::Refused { available: refusal.shortfalls[0].available },
        Ok(Outcome::Waiting(waiting)) => Answer::Waiting { available: waiting.refusal.shortfalls[0].available },
        Ok(Outcome::Unregistered { .. }) => Answer::Removed,
        Ok(Outcome::Reaped(Some(_))) => Answer::Removed,
        Ok(Outcome::Reaped(None)) => Answer::Rolled(false),
        Ok(Outcome::Expired(rolled) | Outcome::Lost(rolled)) => Answer::Rolled(rolled),
        Err(Rejection::EmNotRegistered(_)) => Answer::No("em"),
        Err(Rejection::EmDraining { .. }) => Answer::No("draining"),
        Err(Rejection::CapNotCounted { .. }) => Answer::No("cap"),
        Err(Rejection::PlaceLost) => Answer::No("place"),
        Err(Rejection::TicketNotFound { .. }) => Answer::No("ticket"),
        Err(Rejection::TicketNotOwned { .. }) => Answer::No("owner"),
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
    /// Judges a request; `number` is its position among those who wait, if it has one.
    pub(super) fn request(&mut self, ask: &ModelWaiting, number: Option<usize>, may_wait: bool) -> Answer {
        if let Some((body, id)) = ask.request_id.and_then(|id| self.request_ids.get(&id)).copied() {
            if body != ask.body() {
                return Answer::No("request id");
            }
            if !self.tickets.iter().any(|t| t.id == id && t.alive) {
                return Answer::No("ended");
            }
            self.leave(number);
            return Answer::Granted(id, None);
        }
        if number.is_some_and(|number| !self.waiting[number].in_line) {
            return Answer::No("place");
        }
        let ahead = number.unwrap_or(self.waiting.len());
        let Some(available) = self.available(ask.em, ask.user, ask.queue, ask.cap, ahead) else {
            return Answer::No("em");
        };
        if self.drained.contains_key(&ask.em) {
            return Answer::No("draining");
        }
        if ask.cap.is_some() && self.is_unlimited() {
            return Answer::No("cap");
        }
        let Some(short) = available.short(ask.amount) else {
            self.leave(number);
            let watched = self.left_in(ask.user, LimitMode::Watched).filter(|left| ask.amount > *left);
            self.grant(ask);
            return Answer::Granted(ask.id, watched);
        };
        if !may_wait || available.never_fits(ask.amount) {
            self.leave(number);
            return Answer::Refused { available: short };
        }
        let em_short = ask.amount > available.em.0;
        let user_short = available.user.is_some_and(|(left, _)| ask.amount > left);
        let others = || self.waiting[..ahead].iter().filter(|w| w.in_line);
        let first_at_em = em_short && !others().any(|w| w.at_em == Some((ask.em, true)));
        let first_at_user = user_short && !others().any(|w| w.user == ask.user && w.at_user == Some(true));
        let queue_short = available.queue.is_some_and(|(left, _)| ask.amount > left);
        let first_at_queue = queue_short && !others().any(|w| w.queue == ask.queue && w.at_queue == Some(true));
        let cluster_short = available.cluster.map_or([false; 2], |places| places.map(|(left, _)| ask.amount > left));
        let first_at_leaf =
            cluster_short[0] && !others().any(|w| w.queue == ask.queue && w.at_cluster[0] == Some(true));
        let first_at_root = cluster_short[1] && !others().any(|w| w.at_cluster[1] == Some(true));
        let keeps_all = first_at_em || first_at_user || first_at_queue || first_at_leaf || first_at_root;
        let at_cluster =
            cluster_short.map(|short| (short || keeps_all && available.cluster.is_some()).then_some(short));
        let at_em = (em_short || keeps_all).then_some((ask.em, em_short));
        let at_user = (user_short || keeps_all && available.user.is_some()).then_some(user_short);
        let at_queue = (queue_short || keeps_all && available.queue.is_some()).then_some(queue_short);
        let standing = ModelWaiting { in_line: true, at_em, at_user, at_queue, at_cluster, ..ask.clone() };
        match number {
            Some(number) => self.waiting[number] = standing,
            None => self.waiting.push(ModelWaiting { since: self.now, ..standing }),
        }
        Answer::Waiting { available: short }
    }

    /// Those in line who need not try again: they would only stand where they do.
    pub(super) fn settled(&self) -> Vec<usize> {
        let is_settled = |number: &usize| {
            let w = &self.waiting[*number];
            let mut later = self.clone();
            w.in_line
                && matches!(later.request(w, Some(*number), true), Answer::Waiting { .. })
                && later.waiting[*number].stands() == w.stands()
        };
        (0..self.waiting.len()).filter(is_settled).collect()
    }

    pub(super) fn is_servable(&self, number: usize) -> bool {
        let w = &self.waiting[number];
        let available = self.available(w.em, w.user, w.queue, w.cap, number);
        w.in_line
            && !self.drained.contains_key(&w.em)
            && (w.cap.is_none() || !self.is_unlimited())
            && available.is_some_and(|available| available.short(w.amount).is_none())
    }

    pub(super) fn leave(&mut self, number: Option<usize>) {
        if let Some(number) = number {
            self.waiting[number].in_line = false;
        }
    }

    pub(super) fn grant(&mut self, ask: &ModelWaiting) {
        let deadline = self.now + ask.ttl;
        let (id, em, user, queue, held) = (ask.id, ask.em, ask.user, ask.queue, ask.amount);
        let counted = queue.is_some() && self.cluster.is_some();
        let (used, alive, adopted, since) = (false, true, None, 0);
        self.tickets.push(ModelTicket { id, em, user, queue, held, used, deadline, alive, adopted, counted, since });
        if let Some(request_id) = ask.request_id {
            self.request_ids.insert(request_id, (ask.body(), id));
        }
    }

    /// An engine uses so much, instead of what its ticket holds until now.
    pub(super) fn use_instead(&mut self, number: usize, wanted: i64) -> Answer {
        let (em, user, held) = (self.tickets[number].em, self.tickets[number].user, self.tickets[number].held);
        if wanted > held && self.drained.contains_key(&em) {
            return Answer::No("draining");
        }
        let on_em = Some(self.left(em).unwrap() + held);
        let of_user = self.left_of_user(user).map(|left| left + held);
        let of_queue = self.left_of_queue(self.tickets[number].queue).map(|left| left + held);
        let ticket = &self.tickets[number];
        let of_cluster = self.left_of_cluster(ticket.queue).filter(|_| ticket.counted);
        let of_cluster = of_cluster.into_iter().flatten().map(|(left, _)| left + held);
        for available in on_em.into_iter().chain(of_user).chain(of_queue).chain(of_cluster) {
            if wanted > held && wanted > available {
                return Answer::Refused { available };
            }
        }
        let now = self.now;
        let ticket = &mut self.tickets[number];
        ticket.since = if ticket.used { ticket.since } else { now };
        (ticket.held, ticket.used) = (wanted, true);
        Answer::Done
    }

    /// An engine is put into the books, whether or not there is room for it.
    pub(super) fn adopt(&mut self, adopted: ModelTicket) -> Answer {
        if let Some(known) = self.tickets.iter().find(|t| t.id == adopted.id) {
            let is_same = known.used
                && (known.em, known.user, known.queue) == (adopted.em, adopted.user, adopted.queue)
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
        self.tickets.push(adopted);
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
            Step::Register { em, total, protected } => {
                self.ems.insert(em, (total, protected));
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
            Step::Request { em, user, queue, amount, ttl, request_id, wait, cap } => {
                let ask = asked(new_id, em, user, amount, ttl, request_id);
                self.request(&ModelWaiting { queue, cap, ..ask }, None, wait)
            }
            Step::Retry { ago, em } => {
                let Some(number) = self.waiter(ago) else { return Answer::No("place") };
                let before = self.waiting[number].clone();
                self.request(&ModelWaiting { em: em.unwrap_or(before.em), ..before }, Some(number), true)
            }
            Step::Leave { ago } => {
                self.leave(self.waiter(ago));
                Answer::Done
            }
            Step::Adopt { em, user, used, again } => self.adopt(self.adopted(em, user, used, again, new_id)),
            Step::Inited { ago, used, user, epoch } => {
                let Some(number) = self.ticket(ago) else { return Answer::No("ticket") };
                let ticket = &self.tickets[number];
                if !ticket.alive {
                    return Answer::No("ticket");
                }
                if ticket.user != user {
                    return Answer::No("owner");
                }
                if let Some(no) = fenced(epoch) {
                    return no;
                }
                if ticket.used {
                    let is_known = used.is_none_or(|used| used == ticket.held);
                    return if is_known { Answer::Done } else { Answer::No("other use") };
                }
                self.use_instead(number, used.unwrap_or(ticket.held))
            }
            Step::Reported { ago, in_use, used, stolen, epoch } => {
                let Some(number) = self.reporting(ago, in_use) else { return Answer::No("ticket") };
                let ticket = &self.tickets[number];
                if !ticket.alive {
                    return Answer::No("ticket");
                }
                if stolen {
                    return Answer::No("owner");
                }
                match fenced(epoch) {
                    Some(no) => no,
                    None if ticket.used => self.use_instead(number, used),
                    None => Answer::No("not in use"),
                }
            }
            Step::Released { ago, user } => {
                let Some(number) = self.ticket(ago) else { return Answer::No("ticket") };
                let ticket = &mut self.tickets[number];
                if ticket.user != user {
                    return Answer::No("owner");
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
            Step::Commit { seconds } => {
                self.now += seconds;
                Answer::Done
            }
            Step::Limit { user, max } => {
                match max {
                    Some(max) => drop(self.limits.insert(user, max)),
                    None => drop(self.limits.remove(&user)),
                }
                Answer::Done
            }
            Step::QueueLimit { queue, max } => {
                match max {
                    Some(max) => drop(self.queue_limits.insert(queue, max)),
                    None => drop(self.queue_limits.remove(&queue)),
                }
                Answer::Done
            }
            Step::Cluster { max, used } => {
                self.cluster = Some(ModelCluster { begun: self.now, max, used });
                Answer::Done
            }
        }
    }
}

/// How the word of another registration than the EM's is answered.
fn fenced(said: Said) -> Option<Answer> {
    match said {
        Said::Nothing | Said::Current => None,
        Said::Older => Some(Answer::No("older epoch")),
        Said::Newer => Some(Answer::No("newer epoch")),
    }
}
