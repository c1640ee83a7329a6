//! History lines of a batch, in the order of the decisions, without those of granted tickets.
//!
//! Never: executes SQL. Caller: `batch_write`, which writes the lines.

use time::OffsetDateTime;

use rm_model::{
    action::Action,
    em::{Em, EmInstance},
    ledger::{Deltas, DrainDelta, EndedDelta, HistoryLine},
    name::Name,
    principal::{Actor, Principal},
    recorded_state::RecordedState,
    resource::Resource,
    ticket::{EngineInstance, Ticket, TicketState},
    ticket_end::TicketEnd,
};

/// Content of one history line.
pub(crate) struct BatchRecord<'a> {
    /// Number of the line within the batch.
    pub line: i32,
    pub action: Action,
    pub ticket: Option<&'a Ticket>,
    pub em: &'a EmInstance,
    pub resource: &'a Resource,
    pub actor: &'a str,
    pub reason: Option<&'a Name>,
    /// Grant time of an ended ticket; `None` for other lines.
    pub held_since: Option<OffsetDateTime>,
    pub address: Option<&'a str>,
    pub before: Option<RecordedState>,
    pub after: Option<RecordedState>,
}

impl<'a> BatchRecord<'a> {
    fn new(action: Action, em: &'a EmInstance, resource: &'a Resource, actor: &'a str) -> Self {
        let (ticket, reason, held_since, address, before, after) = (None, None, None, None, None, None);
        Self { line: 0, action, ticket, em, resource, actor, reason, held_since, address, before, after }
    }

    fn of_em(action: Action, em: &'a Em, by: &'a Principal) -> Self {
        Self::new(action, &em.instance, &em.total, by.as_str())
    }

    fn of_ticket(action: Action, ticket: &'a Ticket, by: &'a Principal) -> Self {
        Self { ticket: Some(ticket), ..Self::new(action, &ticket.em, ticket.resource(), by.as_str()) }
    }

    fn of_end(ended: &'a EndedDelta) -> Self {
        let of_ticket = Self::of_ticket(Action::Ended(ended.end), &ended.ticket, &ended.by.principal);
        let before = (ended.end == TicketEnd::Forced).then(|| RecordedState::of_ticket(&ended.ticket));
        Self {
            reason: ended.reason.as_ref(),
            held_since: Some(ended.ticket.locked_time),
            address: ended.by.address(),
            before,
            ..of_ticket
        }
    }

    fn of_adopted(ticket: &'a Ticket, by: &'a Actor) -> Self {
        let after = Some(RecordedState::of_ticket(ticket));
        Self { address: by.address(), after, ..Self::of_ticket(Action::Adopted, ticket, &by.principal) }
    }

    fn of_drain(line: &'a DrainDelta) -> Self {
        let action = if line.after.is_some() { Action::Drained } else { Action::Resumed };
        let state = |drain: &Option<_>| drain.as_deref().map(RecordedState::of_drain);
        Self {
            reason: line.reason.as_ref(),
            address: line.by.address(),
            before: state(&line.before),
            after: state(&line.after),
            ..Self::new(action, &line.em, &line.total, line.by.as_str())
        }
    }
}

impl<'a> BatchRecord<'a> {
    /// Returns the history lines of a batch in the order of the decisions, without the granted tickets: their ticket rows
    /// have the same columns. Returns the line numbers of those separately.
    pub fn of(deltas: &'a Deltas) -> (Vec<Self>, Vec<i32>) {
        let (mut records, mut granted) = (Vec::new(), Vec::with_capacity(deltas.granted.len()));
        let mut ended = deltas.ended.iter();
        for (number, line) in (0..).zip(&deltas.lines) {
            let record = match line {
                HistoryLine::Granted => {
                    granted.push(number);
                    continue;
                }
                HistoryLine::Ended => match ended.next() {
                    Some(ended) => Self::of_end(ended),
                    None => continue,
                },
                HistoryLine::Registered(em, false, by) => Self::of_em(Action::Registered, em, by),
                HistoryLine::Registered(em, true, by) => Self::of_em(Action::Resized, em, by),
                HistoryLine::Gone(em, end, by) => Self::of_em(Action::Ended(*end), em, by),
                HistoryLine::GrantedBefore(ticket) => Self::of_ticket(Action::Granted, ticket, &ticket.principal),
                HistoryLine::Adopted(ticket, by) => Self::of_adopted(ticket, by),
                HistoryLine::Inited(ticket, by) => Self::of_ticket(Action::Inited, ticket, by),
                HistoryLine::Reported(ticket, by) => Self::of_ticket(Action::Reported, ticket, by),
                HistoryLine::Drain(line) => Self::of_drain(line),
                HistoryLine::RemovedFromQueue(ticket, reason, by) => Self {
                    reason: Some(reason),
                    address: by.address(),
                    ..Self::of_ticket(Action::RemovedFromQueue, ticket, &by.principal)
                },
            };
            records.push(Self { line: number, ..record });
        }
        (records, granted)
    }

    /// Returns the engine of a used ticket.
    pub fn engine(&self) -> Option<&'a EngineInstance> {
        match &self.ticket?.state {
            TicketState::Used { engine, .. } => Some(engine),
            TicketState::Locked { .. } => None,
        }
    }

    /// Returns whether the line is of an operator's change, with an address or states.
    pub fn is_act(&self) -> bool {
        self.address.is_some() || self.before.is_some() || self.after.is_some()
    }
}
