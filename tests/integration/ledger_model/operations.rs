//! The operations that steps stand for.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use linkis_rm::domain::{
    adopt::Adopt,
    cap::Cap,
    drain::{DrainEm, ResumeEm},
    line::QueuePosition,
    operation::{
        Forced, Inited, Operation, Reap, Released, Reported, Request, RequestId, RequestSpec, Unregister, Wait,
    },
    principal::Principal,
    report::{LastSign, ReportNumber},
    resource::Dimension,
};
use uuid::Uuid;

use crate::harness::{engine, name, registration};

use super::{named::*, state::*, steps::*};

impl Model {
    /// The ticket that a step adopts.
    pub(super) fn adopted(&self, em: usize, user: usize, used: i64, again: Option<usize>, new_id: Uuid) -> ModelTicket {
        let known = again.and_then(|ago| self.ticket(ago)).map(|number| &self.tickets[number]);
        let id = known.map_or(new_id, |known| known.id);
        // Now and then the same once more.
        let (em, user, used) = match known.filter(|_| used < 4) {
            Some(known) => (known.em, known.user, known.adopted.unwrap_or(known.held)),
            None => (em, user, used),
        };
        let (queue, deadline, alive, adopted, counted, since) = (None, 0, true, Some(used), false, 0);
        ModelTicket { id, em, user, queue, held: used, used: true, deadline, alive, adopted, counted, since }
    }

    /// What a caller says of its epoch.
    pub(super) fn epoch(&self, em: usize, said: Said) -> Option<i64> {
        let current = self.epochs.get(&em).copied().unwrap_or(2);
        match said {
            Said::Nothing => None,
            Said::Current => Some(current),
            Said::Older => Some(current - 1),
            Said::Newer => Some(current + 1),
        }
    }

    /// The number of the ticket that an engine reports for.
    pub(super) fn reporting(&self, ago: usize, in_use: bool) -> Option<usize> {
        let is_in_use = |number: &usize| self.tickets[*number].alive && self.tickets[*number].used;
        match in_use {
            true => (0..self.tickets.len()).rev().filter(is_in_use).nth(ago % 3),
            false => self.ticket(ago),
        }
    }

    /// The operation that a step stands for; none for a commit.
    pub(super) fn operation(&self, step: &Step, new_id: Uuid) -> Option<Operation> {
        let named = |ago| self.ticket(ago).map_or((Uuid::nil(), 0), |n| (self.tickets[n].id, self.tickets[n].em));
        Some(match *step {
            Step::Register { em, total, protected } => {
                let mut register = registration(instance(em), amount(total));
                register.protected = amount(protected);
                Operation::Register(register)
            }
            Step::Unregister { em, epoch } => {
                Operation::Unregister(Unregister { em: instance(em), epoch: self.epoch(em, epoch) })
            }
            Step::Request { em, user, queue, amount, ttl, request_id, wait, cap } => {
                let ask = asked(new_id, em, user, amount, ttl, request_id);
                operation(&ModelWaiting { queue, cap, ..ask }, wait.then_some(None))
            }
            Step::Retry { ago, em } => {
                let nobody = asked(Uuid::nil(), 0, 0, 1, 1, None);
                let before = self.waiter(ago).map_or(nobody, |number| self.waiting[number].clone());
                let position = QueuePosition::new(0, time_of(before.since), before.id);
                operation(&ModelWaiting { em: em.unwrap_or(before.em), ..before }, Some(Some(position)))
            }
            Step::Adopt { em, user: number, used, again } => {
                let ticket = self.adopted(em, number, used, again, new_id);
                Operation::Adopt(Adopt {
                    ticket_id: ticket.id,
                    user: user(ticket.user),
                    creator: name("IDE"),
                    engine_type: String::new(),
                    em: instance(ticket.em),
                    labels: Default::default(),
                    engine: engine("e"),
                    used: amount(ticket.held),
                })
            }
            Step::Inited { ago, used, user: number, epoch } => {
                let (ticket_id, em) = named(ago);
                let queue = self.ticket(ago).and_then(|number| self.tickets[number].queue);
                let (used, epoch) = (used.map(|used| asked_of(queue, used)), self.epoch(em, epoch));
                let (user, em, engine) = (user(number), instance(em), engine("e"));
                Operation::Inited(Inited { ticket_id, user, em, used, engine, epoch })
            }
            Step::Reported { ago, in_use, used, stolen, epoch } => {
                let of = |number: usize| {
                    let ticket = &self.tickets[number];
                    (ticket.id, ticket.user, ticket.em, ticket.queue)
                };
                let (ticket_id, owner, em, queue) = self.reporting(ago, in_use).map_or((Uuid::nil(), 0, 0, None), of);
                let user = user((owner + usize::from(stolen)) % USERS);
                let (used, epoch) = (asked_of(queue, used), self.epoch(em, epoch));
                Operation::Reported(Reported { ticket_id, user, em: instance(em), used, epoch })
            }
            Step::Released { ago, user: number } => {
                let (ticket_id, em) = named(ago);
                Operation::Released(Released { ticket_id, user: user(number), em: instance(em) })
            }
            Step::Force { ago } => {
                let (ticket_id, em) = named(ago);
                let owner = self.ticket(ago).map_or(0, |number| self.tickets[number].user);
                let ticket = Released { ticket_id, user: user(owner), em: instance(em) };
                Operation::Force(Forced { ticket, reason: name("it hangs") })
            }
            Step::Drain { em, reason } => {
                let reason = name(if reason { "a disk" } else { "a fan" });
                Operation::Drain(DrainEm { em: instance(em), reason })
            }
            Step::Resume { em } => Operation::Resume(ResumeEm { em: instance(em), reason: None }),
            Step::Expire { ago } => {
                let (ticket_id, em) = named(ago);
                Operation::Expire(Released { ticket_id, user: user(0), em: instance(em) })
            }
            Step::Lost { ago } => {
                let (ticket_id, em) = named(ago);
                Operation::Lost(Released { ticket_id, user: user(0), em: instance(em) })
            }
            Step::Reap { em, known } => {
                let nothing = ReportNumber { epoch: 0, sequence: 0 };
                let mut last = self.signs.get(&em).copied().unwrap_or(LastSign { registered: 0, reported: nothing });
                last.reported.sequence -= i64::from(!known);
                Operation::Reap(Reap { em: instance(em), last })
            }
            Step::Commit { .. }
            | Step::Limit { .. }
            | Step::QueueLimit { .. }
            | Step::Cluster { .. }
            | Step::Leave { .. }
            | Step::Report { .. } => return None,
        })
    }
}

/// In no queue.
pub(super) fn asked(id: Uuid, em: usize, user: usize, amount: i64, ttl: u64, request_id: Option<u8>) -> ModelWaiting {
    let (at_em, at_user, at_queue) = (None, None, None);
    let (since, queue, cap, in_line, at_cluster) = (0, None, None, false, [None; 2]);
    ModelWaiting {
        id,
        since,
        em,
        user,
        queue,
        amount,
        ttl,
        request_id,
        cap,
        in_line,
        at_em,
        at_user,
        at_queue,
        at_cluster,
    }
}

/// A request; `position` is its position in line if it waits, and has one.
fn operation(ask: &ModelWaiting, position: Option<Option<QueuePosition>>) -> Operation {
    let remaining = Duration::from_secs(60);
    Operation::Request(Request {
        em: instance(ask.em),
        ask: Arc::new(RequestSpec {
            principal: Principal::Anonymous,
            ticket_id: ask.id,
            user: user(ask.user),
            creator: name("IDE"),
            engine_type: String::new(),
            resource: asked_of(ask.queue, ask.amount),
            labels: Default::default(),
            selector: Default::default(),
            caps: ask.cap.map(|most| Arc::new(cap_of_user(most))).into_iter().collect(),
            lock_ttl: Duration::from_secs(ask.ttl),
            request_id: ask
                .request_id
                .map(|id| RequestId { id: name(&id.to_string()), body_hash: body_hash(ask.body()) }),
            return_counters: false,
        }),
        wait: position.map(|position| Wait {
            instance_id: Uuid::nil(),
            remaining,
            any_em: true,
            is_elsewhere: false,
            position,
        }),
        scopes: Default::default(),
    })
}

fn cap_of_user(cores: i64) -> Cap {
    Cap { keys: BTreeSet::from(["user".to_owned()]), max: BTreeMap::from([(Dimension::Cores, cores)]) }
}

fn body_hash((em, user, queue, cores, ttl, cap): ModelBody) -> [u8; 32] {
    let mut hash = [0; 32];
    hash[0] = u8::try_from(em).unwrap();
    hash[1] = u8::try_from(user).unwrap();
    hash[2..10].copy_from_slice(&cores.to_be_bytes());
    hash[10..18].copy_from_slice(&ttl.to_be_bytes());
    hash[18..26].copy_from_slice(&cap.unwrap_or(-1).to_be_bytes());
    hash[26] = queue.map_or(0, |queue| u8::try_from(queue + 1).unwrap());
    hash
}
