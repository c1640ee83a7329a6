//! What a batch does, as lines of the history: their columns, written by the settlement.

use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{
    action::Action,
    em::{Em, EmInstance},
    end::End,
    ledger::{Deltas, DrainDelta, EndedDelta},
    name::Name,
    principal::{Actor, Principal},
    resource::Resource,
    state::State,
    ticket::{Ticket, TicketState},
};

use crate::store::rows::labels_json;

/// What a record says.
struct Record<'a> {
    action: Action,
    ticket: Option<&'a Ticket>,
    em: &'a EmInstance,
    resource: &'a Resource,
    actor: &'a str,
    reason: Option<&'a Name>,
    /// Of an end, when the ticket was granted.
    held_since: Option<OffsetDateTime>,
    address: Option<&'a str>,
    before: Option<State>,
    after: Option<State>,
}

impl<'a> Record<'a> {
    fn new(action: Action, em: &'a EmInstance, resource: &'a Resource, actor: &'a str) -> Self {
        let (ticket, reason, held_since, address, before, after) = (None, None, None, None, None, None);
        Self { action, ticket, em, resource, actor, reason, held_since, address, before, after }
    }

    fn of_em(action: Action, em: &'a Em, by: Option<&'a Principal>) -> Self {
        let by = by.unwrap_or(&Principal::Service);
        Self::new(action, &em.instance, &em.total, by.as_str())
    }

    fn of_ticket(action: Action, ticket: &'a Ticket, by: &'a Principal) -> Self {
        Self { ticket: Some(ticket), ..Self::new(action, &ticket.em, ticket.resource(), by.as_str()) }
    }

    fn of_end(ended: &'a EndedDelta) -> Self {
        let of_ticket = Self::of_ticket(Action::Ended(ended.end), &ended.ticket, &ended.by.principal);
        let before = (ended.end == End::Forced).then(|| State::of_ticket(&ended.ticket));
        Self {
            reason: ended.reason.as_ref(),
            held_since: Some(ended.ticket.locked_time),
            address: ended.by.address(),
            before,
            ..of_ticket
        }
    }

    fn of_adopted((ticket, by): &'a (Ticket, Actor)) -> Self {
        let after = Some(State::of_ticket(ticket));
        Self { address: by.address(), after, ..Self::of_ticket(Action::Adopted, ticket, &by.principal) }
    }

    fn of_drain(line: &'a DrainDelta) -> Self {
        let action = if line.after.is_some() { Action::Drained } else { Action::Resumed };
        let state = |drain: &Option<_>| drain.as_deref().map(State::of_drain);
        Self {
            reason: line.reason.as_ref(),
            address: line.by.address(),
            before: state(&line.before),
            after: state(&line.after),
            ..Self::new(action, &line.em, &line.total, line.by.as_str())
        }
    }
}

/// The columns of what a batch does, but for the tickets that were granted and live, which say it themselves: what stands before
/// them, and what behind.
#[derive(Default)]
pub(in crate::store) struct Columns<'a> {
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
    /// Of what operators and administrators do; empty if the batch has nothing of it, so that others pay nothing for it.
    pub acts: ActColumns<'a>,
}

/// From where something was done, and how what it was done to stood before and after it.
#[derive(Default)]
pub(in crate::store) struct ActColumns<'a> {
    pub address: Vec<Option<&'a str>>,
    pub before: Vec<Option<String>>,
    pub after: Vec<Option<String>>,
}

impl<'a> ActColumns<'a> {
    /// Of the record at `nth`; those before it that are not there are of nothing.
    fn push(&mut self, nth: usize, address: Option<&'a str>, before: Option<State>, after: Option<State>) {
        self.address.resize(nth, None);
        self.before.resize(nth, None);
        self.after.resize(nth, None);
        self.address.push(address);
        self.before.push(before.map(State::into_string));
        self.after.push(after.map(State::into_string));
    }
}

impl<'a> Columns<'a> {
    /// What is told before the grants of the batch, for which it gave back; and behind them, the EMs that went: who was granted
    /// something there was before.
    pub fn of(deltas: &'a Deltas) -> (Self, Self) {
        let registered_by = |em: &Em| deltas.registered_by.get(&em.instance);
        let registered = deltas.ems_updated.iter().chain(&deltas.ems_inserted);
        // A ticket that ended in the batch in which it was granted was granted all the same. One that was in use was adopted.
        let granted_and_ended = deltas.ended.iter().filter(|ended| !ended.stored && ended.ticket.is_locked());
        let granted_and_ended = granted_and_ended.map(|ended| &ended.ticket);
        let told = |action| move |(ticket, by): &'a (Ticket, Principal)| Record::of_ticket(action, ticket, by);
        // One that registers again in the same batch went before that.
        let registers_again = |gone: &Em| {
            let mut registered = registered.clone().chain(&deltas.ems_resized);
            registered.any(|em| em.instance == gone.instance && em.epoch > gone.epoch)
        };
        let gone = |(em, end, by): &'a (Em, End, Principal)| Record::of_em(Action::Ended(*end), em, Some(by));
        let (before, behind): (Vec<_>, Vec<_>) = deltas.ems_gone.iter().partition(|(em, ..)| registers_again(em));
        // On an EM that was drained and not resumed again, what was granted was granted before.
        let is_resumed = |(number, line): (usize, &DrainDelta)| {
            let mut later = deltas.drain_lines.iter().skip(number);
            later.any(|later| later.em == line.em && later.after.is_none())
        };
        let (drains_before, drains_behind): (Vec<_>, Vec<_>) =
            deltas.drain_lines.iter().enumerate().partition(|line| is_resumed(*line));
        let records = before
            .into_iter()
            .map(gone)
            .chain(registered.map(|em| Record::of_em(Action::Registered, em, registered_by(em))))
            .chain(deltas.ems_resized.iter().map(|em| Record::of_em(Action::Resized, em, registered_by(em))))
            .chain(granted_and_ended.map(|ticket| Record::of_ticket(Action::Granted, ticket, &ticket.principal)))
            .chain(deltas.adopted.iter().map(Record::of_adopted))
            .chain(deltas.inited.iter().map(told(Action::Inited)))
            .chain(deltas.reported.iter().map(told(Action::Reported)))
            .chain(deltas.ended.iter().map(Record::of_end))
            .chain(drains_before.into_iter().map(|(_, line)| Record::of_drain(line)));
        let behind =
            behind.into_iter().map(gone).chain(drains_behind.into_iter().map(|(_, line)| Record::of_drain(line)));
        (Self::from_records(records), Self::from_records(behind))
    }

    fn from_records(records: impl Iterator<Item = Record<'a>>) -> Self {
        let mut columns = Self::default();
        for (nth, record) in records.enumerate() {
            columns.push(&record);
            let Record { address, before, after, .. } = record;
            if !columns.acts.address.is_empty() || address.is_some() || before.is_some() || after.is_some() {
                columns.acts.push(nth, address, before, after);
            }
        }
        columns
    }

    fn push(&mut self, record: &Record<'a>) {
        let engine = record.ticket.and_then(|ticket| match &ticket.state {
            TicketState::Used { engine, .. } => Some(engine),
            TicketState::Locked { .. } => None,
        });
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
