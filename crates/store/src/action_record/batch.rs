//! History lines of a batch as columns, in the order of the decisions, without those of granted tickets.
//!
//! Never: executes SQL. Caller: `batch_write`, which writes the columns.

use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    action::Action,
    em::{Em, EmInstance},
    ledger::{Deltas, DrainDelta, EndedDelta, HistoryLine},
    name::Name,
    principal::{Actor, Principal},
    recorded_state::RecordedState,
    resource::Resource,
    ticket::{Ticket, TicketState},
    ticket_end::TicketEnd,
};

use crate::rows::labels_json;

/// Content of one history line.
struct BatchRecord<'a> {
    action: Action,
    ticket: Option<&'a Ticket>,
    em: &'a EmInstance,
    resource: &'a Resource,
    actor: &'a str,
    reason: Option<&'a Name>,
    /// Grant time of an ended ticket; `None` for other lines.
    held_since: Option<OffsetDateTime>,
    address: Option<&'a str>,
    before: Option<RecordedState>,
    after: Option<RecordedState>,
}

impl<'a> BatchRecord<'a> {
    fn new(action: Action, em: &'a EmInstance, resource: &'a Resource, actor: &'a str) -> Self {
        let (ticket, reason, held_since, address, before, after) = (None, None, None, None, None, None);
        Self { action, ticket, em, resource, actor, reason, held_since, address, before, after }
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

/// Columns of the history lines of a batch, without those of granted tickets: their ticket rows have the same columns.
#[derive(Default)]
pub(crate) struct ActionColumns<'a> {
    /// Number of the line within the batch.
    pub line: Vec<i32>,
    pub action: Vec<&'static str>,
    pub ticket_id: Vec<Option<Uuid>>,
    pub user: Vec<Option<&'a str>>,
    pub creator: Vec<Option<&'a str>>,
    pub engine_type: Vec<Option<&'a str>>,
    pub labels: Vec<Option<String>>,
    pub engine_application_name: Vec<Option<&'a str>>,
    pub engine_instance: Vec<Option<&'a str>>,
    pub em_application_name: Vec<&'a str>,
    pub em_instance: Vec<&'a str>,
    pub resource_type: Vec<&'static str>,
    pub resource: Vec<String>,
    pub actor: Vec<&'a str>,
    pub reason: Vec<Option<&'a str>>,
    pub held_since: Vec<Option<OffsetDateTime>>,
    /// Columns of operators' changes; empty if the batch has none, so that other batches send nothing for them.
    pub acts: ActColumns<'a>,
}

/// Address of the caller, and the states before and after the change.
#[derive(Default)]
pub(crate) struct ActColumns<'a> {
    pub address: Vec<Option<&'a str>>,
    pub before: Vec<Option<String>>,
    pub after: Vec<Option<String>>,
}

impl<'a> ActColumns<'a> {
    /// Sets the columns of line `nth`. Earlier lines without values become `None`.
    fn push(
        &mut self,
        nth: usize,
        address: Option<&'a str>,
        before: Option<RecordedState>,
        after: Option<RecordedState>,
    ) {
        self.address.resize(nth, None);
        self.before.resize(nth, None);
        self.after.resize(nth, None);
        self.address.push(address);
        self.before.push(before.map(RecordedState::into_string));
        self.after.push(after.map(RecordedState::into_string));
    }
}

impl<'a> ActionColumns<'a> {
    /// Returns the history lines of a batch in the order of the decisions, without the granted tickets. Returns the
    /// line numbers of those separately.
    pub fn of(deltas: &'a Deltas) -> (Self, Vec<i32>) {
        let (mut columns, mut granted) = (Self::default(), Vec::with_capacity(deltas.granted.len()));
        let mut ended = deltas.ended.iter();
        for (number, line) in (0..).zip(&deltas.lines) {
            let record = match line {
                HistoryLine::Granted => {
                    granted.push(number);
                    continue;
                }
                HistoryLine::Ended => match ended.next() {
                    Some(ended) => BatchRecord::of_end(ended),
                    None => continue,
                },
                HistoryLine::Registered(em, false, by) => BatchRecord::of_em(Action::Registered, em, by),
                HistoryLine::Registered(em, true, by) => BatchRecord::of_em(Action::Resized, em, by),
                HistoryLine::Gone(em, end, by) => BatchRecord::of_em(Action::Ended(*end), em, by),
                HistoryLine::GrantedBefore(ticket) => {
                    BatchRecord::of_ticket(Action::Granted, ticket, &ticket.principal)
                }
                HistoryLine::Adopted(ticket, by) => BatchRecord::of_adopted(ticket, by),
                HistoryLine::Inited(ticket, by) => BatchRecord::of_ticket(Action::Inited, ticket, by),
                HistoryLine::Reported(ticket, by) => BatchRecord::of_ticket(Action::Reported, ticket, by),
                HistoryLine::Drain(line) => BatchRecord::of_drain(line),
            };
            columns.push(number, record);
        }
        (columns, granted)
    }

    fn push(&mut self, number: i32, record: BatchRecord<'a>) {
        self.push_line(number, &record);
        let BatchRecord { address, before, after, .. } = record;
        if !self.acts.address.is_empty() || address.is_some() || before.is_some() || after.is_some() {
            self.acts.push(self.line.len() - 1, address, before, after);
        }
    }

    fn push_line(&mut self, number: i32, record: &BatchRecord<'a>) {
        let engine = record.ticket.and_then(|ticket| match &ticket.state {
            TicketState::Used { engine, .. } => Some(engine),
            TicketState::Locked { .. } => None,
        });
        self.line.push(number);
        self.action.push(record.action.as_str());
        self.ticket_id.push(record.ticket.map(|ticket| ticket.id));
        self.user.push(record.ticket.map(|ticket| ticket.user.as_str()));
        self.creator.push(record.ticket.map(|ticket| ticket.creator.as_str()));
        self.engine_type.push(record.ticket.map(|ticket| ticket.engine_type.as_str()));
        self.labels.push(record.ticket.map(|ticket| labels_json(&ticket.labels)));
        self.engine_application_name.push(engine.map(|engine| engine.application_name.as_str()));
        self.engine_instance.push(engine.map(|engine| engine.instance.as_str()));
        self.em_application_name.push(record.em.application_name.as_str());
        self.em_instance.push(record.em.instance.as_str());
        self.resource_type.push(record.resource.resource_type().as_str());
        self.resource.push(record.resource.to_json());
        self.actor.push(record.actor);
        self.reason.push(record.reason.map(Name::as_str));
        self.held_since.push(record.held_since);
    }
}
