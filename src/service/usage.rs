//! Who holds what: plain reads, without locks. What EMs and managers ask, and what operators list, have connections of their own.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use uuid::Uuid;

use crate::{
    domain::{
        action::ActionRecord,
        em::{Em, EmInstance},
        line::{QueuePosition, WaitingRequest},
        name::Name,
        observation::Observed,
        operation::Rejection,
        report::EmStatus,
        ticket::{EngineInstance, Ticket},
    },
    error::Error,
    store::{
        Store, action_record, em_observed, em_report, em_resource,
        session::answered,
        user_resource::{self, Filter, Page},
        waiting,
    },
};

use super::history::History;

/// How many lines of the history are read at once for those of some users, and how often for one page.
const LOOKED_AT_ONCE: usize = 1000;
const LOOKS_MAX: usize = 10;

/// Lines of the history.
#[derive(Debug)]
pub struct Lines {
    /// Oldest first.
    pub shown: Vec<ActionRecord>,
    /// The number of the last that was looked at.
    pub last: i64,
    /// Whether there may be more behind it now.
    pub more: bool,
}

/// Answers operators' questions.
#[derive(Clone, Debug)]
pub struct Usage {
    store: Store,
    silent_after: Duration,
    history: History,
}

impl Usage {
    /// On top of the store. EMs that report are silent after `silent_after`.
    pub fn new(store: Store, silent_after: Duration) -> Self {
        Self { store, silent_after, history: History::default() }
    }

    /// One EM, and what is known of it by its reports.
    pub async fn em(&self, instance: &EmInstance) -> Result<(Em, Option<EmStatus>), Error> {
        let mut found = answered(em_resource::read(self.store.pool(), [instance])).await?;
        let em = found.remove(instance).ok_or_else(|| Rejection::EmNotRegistered(instance.clone()))?;
        let statuses = em_report::read(self.store.pool(), [instance], self.silent_after);
        Ok((em, answered(statuses).await?.remove(instance)))
    }

    /// The EMs among `instances` that there are, and what is known of each by its reports. As much work as a page of all EMs, it takes
    /// its turn with those.
    pub async fn ems_by_name(
        &self,
        instances: &[EmInstance],
    ) -> Result<HashMap<EmInstance, (Em, Option<EmStatus>)>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let found = answered(em_resource::read(&mut *connection, instances)).await?;
        let mut statuses = answered(em_report::read(&mut *connection, found.keys(), self.silent_after)).await?;
        let with_status = |(instance, em): (EmInstance, Em)| {
            let status = statuses.remove(&instance);
            (instance, (em, status))
        };
        Ok(found.into_iter().map(with_status).collect())
    }

    /// Those among `ticket_ids` that live, and what is observed of them. As much work as a page of all tickets, it takes its turn with
    /// those.
    pub async fn tickets_by_id(
        &self,
        ticket_ids: &[Uuid],
    ) -> Result<(HashMap<Uuid, Ticket>, HashMap<Uuid, Observed>), Error> {
        let mut connection = self.store.operators().acquire().await?;
        let tickets = answered(user_resource::read(&mut *connection, ticket_ids)).await?;
        let observed = answered(em_observed::read(&mut connection, tickets.values())).await?;
        Ok((tickets, observed))
    }

    /// Up to `limit` EMs, in the order of their keys, from behind `after`, and what is known of each by its reports.
    pub async fn ems(&self, after: Option<&EmInstance>, limit: i64) -> Result<Vec<(Em, Option<EmStatus>)>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let ems = answered(em_resource::list(&mut *connection, after, limit)).await?;
        let instances = ems.iter().map(|em| &em.instance);
        let mut statuses = answered(em_report::read(&mut *connection, instances, self.silent_after)).await?;
        let with_status = |em: Em| {
            let status = statuses.remove(&em.instance);
            (em, status)
        };
        Ok(ems.into_iter().map(with_status).collect())
    }

    /// What is observed of a live ticket, if anything.
    pub async fn observed(&self, ticket: &Ticket) -> Result<Option<Observed>, Error> {
        let read = async {
            let mut connection = self.store.pool().acquire().await?;
            em_observed::read(&mut connection, [ticket]).await
        };
        Ok(answered(read).await?.remove(&ticket.id))
    }

    /// One live ticket.
    pub async fn ticket(&self, ticket_id: Uuid) -> Result<Ticket, Error> {
        if let Some(ticket) = answered(user_resource::read(self.store.pool(), &[ticket_id])).await?.remove(&ticket_id) {
            return Ok(ticket);
        }
        let ended =
            answered(action_record::read(self.store.pool(), &[ticket_id])).await?.remove(&ticket_id).map(Box::new);
        Err(Rejection::TicketNotFound { ticket_id, ended }.into())
    }

    /// The one live ticket that an engine uses; of `users`, if there are any.
    ///
    /// # Errors
    /// [`Rejection::NoTicketOfEngine`]; [`Rejection::ManyTicketsOfEngine`].
    pub async fn ticket_of_engine(
        &self,
        engine: EngineInstance,
        users: Option<&BTreeSet<Name>>,
    ) -> Result<Ticket, Error> {
        let (is_bound, users) = (users.is_some(), users.cloned());
        let filter = Filter { engine: Some(engine.clone()), users, is_bound, ..Filter::default() };
        let mut page = answered(user_resource::list(self.store.pool(), &filter, Uuid::nil(), 1)).await?;
        match (page.tickets.pop(), page.next) {
            (Some(ticket), None) => Ok(ticket),
            (Some(_), Some(_)) => Err(Rejection::ManyTicketsOfEngine(engine).into()),
            (None, _) => Err(Rejection::NoTicketOfEngine(engine).into()),
        }
    }

    /// Up to `limit` requests that wait, the first in line first, from behind the position `after`; each with its own. Only those of
    /// `users`, if there are any.
    pub async fn waiting(
        &self,
        users: Option<&BTreeSet<Name>>,
        after: Option<QueuePosition>,
        limit: i64,
    ) -> Result<Vec<(QueuePosition, WaitingRequest)>, Error> {
        Ok(answered(waiting::list(&mut *self.store.operators().acquire().await?, users, after, limit)).await?)
    }

    /// Up to `limit` lines of the history, oldest first, from behind number `after`; of one ticket, or of all. Nothing comes between
    /// them later. Only what was done to tickets of `users`, if there are any: then it looks through so many lines, and may find few.
    pub async fn actions(
        &self,
        users: Option<&BTreeSet<Name>>,
        ticket_id: Option<Uuid>,
        after: i64,
        limit: usize,
    ) -> Result<Lines, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let is_shown = |line: &ActionRecord| {
            users.is_none_or(|users| line.ticket.as_ref().is_some_and(|(_, user)| users.contains(user)))
        };
        // One more than are shown tells whether there is more.
        let at_once = if users.is_some() { LOOKED_AT_ONCE } else { limit.saturating_add(1) };
        let mut lines = Lines { shown: vec![], last: after, more: true };
        for _ in 0..if users.is_some() { LOOKS_MAX } else { 1 } {
            let read = i64::try_from(at_once).unwrap_or(i64::MAX);
            let found = self.history.read(&mut connection, ticket_id, lines.last, read).await?;
            let is_end = found.len() < at_once;
            for line in found {
                if lines.shown.len() == limit {
                    return Ok(lines);
                }
                lines.last = line.number;
                lines.shown.extend(Some(line).filter(is_shown));
            }
            if is_end {
                lines.more = false;
                break;
            }
        }
        Ok(lines)
    }

    /// A page of up to `limit` live tickets, oldest first, from behind the ticket `after` (nil for the first), and what is observed of
    /// them.
    pub async fn tickets(
        &self,
        filter: &Filter,
        after: Uuid,
        limit: i64,
    ) -> Result<(Page, HashMap<Uuid, Observed>), Error> {
        let mut connection = self.store.operators().acquire().await?;
        let page = answered(user_resource::list(&mut *connection, filter, after, limit)).await?;
        let observed = answered(em_observed::read(&mut connection, &page.tickets)).await?;
        Ok((page, observed))
    }
}
