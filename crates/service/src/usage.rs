//! Queries of operators, managers and EMs: plain reads of EMs, tickets, wait queues and the history, without locks.
//!
//! Lookups by key use the pool. Lists use the connections for operators, so that they do not delay other work.
//!
//! Never: writes; locks.
//! Caller: the RPC service `rm_edge::usage`.
//!
//! - [`accounting`]: sums of refusals and of usage; `ordered`: EMs in other orders; `search`: search in the history.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use async_recursion::async_recursion as boxed;
use uuid::Uuid;

use crate::error::Error;
use rm_model::{
    action::ActionRecord,
    em::{Em, EmInstance},
    name::Name,
    observation::ObservedUse,
    operation::Rejection,
    report::EmStatus,
    ticket::{EngineInstance, Ticket},
    wait_queue::{QueuePosition, WaitingRequest},
};
use rm_store::{
    Store,
    action_record::{self, NumberRange},
    em_observed, em_report, em_resource, reclaim,
    session::within_timeout,
    user_resource::{self, TicketListPage},
    waiting,
};

use super::history::HistoryReader;

pub use rm_store::{
    action_record::ActionFilter, em_resource::EmFilter, reclaim::ListedReclaim, user_resource::TicketFilter,
    waiting::WaitingFilter,
};

pub mod accounting;
mod ordered;
mod search;

pub use ordered::OrderedEmPage;

use search::{SearchPage, find, span};

/// Number of EMs per read if a filter without an index applies, and maximum number of reads per page.
const LOOKED_AT_ONCE: usize = 1000;
const LOOKS_MAX: usize = 5;

/// Page of EMs.
#[derive(Debug)]
pub struct EmPage {
    /// EMs in the order of their keys, each with the status by its reports.
    pub shown: Vec<(Em, Option<EmStatus>)>,
    /// EM after which the next page begins; `None` at the end.
    pub next: Option<EmInstance>,
}

/// Approximate maximum size of the states before and after in a page of the history, in bytes; the last line may exceed it.
const STATES_BYTES_MAX: usize = 1 << 20;

/// Page of history lines.
#[derive(Debug)]
pub struct ActionPage {
    /// Lines in the requested order.
    pub shown: Vec<ActionRecord>,
    /// Number of the last line that was examined.
    pub last: i64,
    /// Whether more lines may follow.
    pub more: bool,
}

/// Truncates lines to a page. Returns whether more lines exist.
fn cut(mut found: Vec<ActionRecord>, limit: usize) -> (Vec<ActionRecord>, bool) {
    let mut states = 0;
    let mut fits = |line: &ActionRecord| {
        let has_room = states < STATES_BYTES_MAX;
        states += [&line.before, &line.after].into_iter().flatten().map(String::len).sum::<usize>();
        has_room
    };
    let most = found.iter().take(limit).take_while(|line| fits(line)).count();
    let is_cut = found.len() > most;
    found.truncate(most);
    (found, is_cut)
}

/// Service for queries. Clones share it.
#[derive(Clone, Debug)]
pub struct UsageQueries {
    store: Store,
    silent_after: Duration,
    history: HistoryReader,
}

impl UsageQueries {
    /// Creates the service. EMs without a report for `silent_after` are silent.
    pub fn new(store: Store, silent_after: Duration) -> Self {
        Self { store, silent_after, history: HistoryReader::default() }
    }

    /// Returns an EM with the status by its reports.
    ///
    /// # Errors
    /// [`Rejection::EmNotRegistered`]; database errors.
    #[boxed]
    pub async fn em(&self, instance: &EmInstance) -> Result<(Em, Option<EmStatus>), Error> {
        let mut found = within_timeout(em_resource::read(&self.store.pool().await?, [instance])).await?;
        let em = found.remove(instance).ok_or_else(|| Rejection::EmNotRegistered(instance.clone()))?;
        let pool = self.store.pool().await?;
        let statuses = em_report::read(&pool, [instance], self.silent_after);
        Ok((em, within_timeout(statuses).await?.remove(instance)))
    }

    /// Returns the registered EMs among `instances`, each with the status by its reports. Uses an operator connection, because
    /// it costs as much as a page of EMs.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn ems_by_name(
        &self,
        instances: &[EmInstance],
    ) -> Result<HashMap<EmInstance, (Em, Option<EmStatus>)>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let found = within_timeout(em_resource::read(&mut *connection, instances)).await?;
        let mut statuses = within_timeout(em_report::read(&mut *connection, found.keys(), self.silent_after)).await?;
        let with_status = |(instance, em): (EmInstance, Em)| {
            let status = statuses.remove(&instance);
            (instance, (em, status))
        };
        Ok(found.into_iter().map(with_status).collect())
    }

    /// Returns the live tickets among `ticket_ids`, with their observed use. Uses an operator connection, because it costs as
    /// much as a page of tickets.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn tickets_by_id(
        &self,
        ticket_ids: &[Uuid],
    ) -> Result<(HashMap<Uuid, Ticket>, HashMap<Uuid, ObservedUse>), Error> {
        let mut connection = self.store.operators().acquire().await?;
        let tickets = within_timeout(user_resource::read(&mut *connection, ticket_ids)).await?;
        let observed = within_timeout(em_observed::read(&mut connection, tickets.values())).await?;
        Ok((tickets, observed))
    }

    /// Returns up to `limit` matching EMs after `after` with at least `min_fullness` percent used or locked, in the order of their
    /// keys. Each has the status by its reports.
    ///
    /// The number of EMs examined is bounded, so a page may be short.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn ems(
        &self,
        filter: &em_resource::EmFilter,
        min_fullness: u8,
        after: Option<&EmInstance>,
        limit: usize,
    ) -> Result<EmPage, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let (mut ems, mut next) = (Vec::new(), after.cloned());
        // One EM more than the page shows whether another page follows; without filters, one read is enough.
        let mut at_once = limit.saturating_add(1).min(LOOKED_AT_ONCE);
        'page: for _ in 0..LOOKS_MAX {
            let read = i64::try_from(at_once).unwrap_or(i64::MAX);
            let list = em_resource::list(&mut *connection, filter, self.silent_after, next.as_ref(), read);
            let found = within_timeout(list).await?;
            for em in found.ems.into_iter().filter(|em| em.fullness_percent() >= min_fullness.into()) {
                if ems.len() == limit {
                    next = ems.last().map(|em: &Em| em.instance.clone());
                    break 'page;
                }
                ems.push(em);
            }
            next = found.last;
            if next.is_none() {
                break;
            }
            at_once = LOOKED_AT_ONCE;
        }
        let instances = ems.iter().map(|em| &em.instance);
        let mut statuses = within_timeout(em_report::read(&mut *connection, instances, self.silent_after)).await?;
        let with_status = |em: Em| {
            let status = statuses.remove(&em.instance);
            (em, status)
        };
        Ok(EmPage { shown: ems.into_iter().map(with_status).collect(), next })
    }

    /// Returns the observed use of a live ticket, if any.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn observed(&self, ticket: &Ticket) -> Result<Option<ObservedUse>, Error> {
        let read = async {
            let mut connection = self.store.pool().await?.acquire().await?;
            em_observed::read(&mut connection, [ticket]).await
        };
        Ok(within_timeout(read).await?.remove(&ticket.id))
    }

    /// Returns a live ticket.
    ///
    /// # Errors
    /// [`Rejection::TicketNotFound`]; database errors.
    #[boxed]
    pub async fn ticket(&self, ticket_id: Uuid) -> Result<Ticket, Error> {
        let pool = self.store.pool().await?;
        if let Some(ticket) = within_timeout(user_resource::read(&pool, &[ticket_id])).await?.remove(&ticket_id) {
            return Ok(ticket);
        }
        let ended = within_timeout(action_record::read(&pool, &[ticket_id])).await?.remove(&ticket_id).map(Box::new);
        Err(Rejection::TicketNotFound { ticket_id, ended }.into())
    }

    /// Returns the only live ticket of an engine, among those of `users` if given.
    ///
    /// # Errors
    /// [`Rejection::NoTicketOfEngine`]; [`Rejection::ManyTicketsOfEngine`]; database errors.
    #[boxed]
    pub async fn ticket_of_engine(
        &self,
        engine: EngineInstance,
        users: Option<&BTreeSet<Name>>,
    ) -> Result<Ticket, Error> {
        let (is_bound, users) = (users.is_some(), users.cloned());
        let filter = TicketFilter { engine: Some(engine.clone()), users, is_bound, ..TicketFilter::default() };
        let mut page = within_timeout(user_resource::list(&self.store.pool().await?, &filter, Uuid::nil(), 1)).await?;
        match (page.tickets.pop(), page.next) {
            (Some(ticket), None) => Ok(ticket),
            (Some(_), Some(_)) => Err(Rejection::ManyTicketsOfEngine(engine).into()),
            (None, _) => Err(Rejection::NoTicketOfEngine(engine).into()),
        }
    }

    /// Returns up to `limit` matching waiting requests after the position `after`, in queue order, each with its position.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn waiting(
        &self,
        filter: &waiting::WaitingFilter,
        after: Option<QueuePosition>,
        limit: i64,
    ) -> Result<Vec<(QueuePosition, WaitingRequest)>, Error> {
        Ok(within_timeout(waiting::list(&mut *self.store.operators().acquire().await?, filter, after, limit)).await?)
    }

    /// Returns up to `limit` chosen tickets of idle engines after the ticket `after`, in the order of their ids; of `users` if given.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn reclaims(
        &self,
        users: Option<&BTreeSet<Name>>,
        after: Uuid,
        limit: i64,
    ) -> Result<Vec<ListedReclaim>, Error> {
        Ok(within_timeout(reclaim::list(&mut *self.store.operators().acquire().await?, users, after, limit)).await?)
    }

    /// Returns up to `limit` matching history lines after number `after`, oldest first. No line can later appear between them.
    ///
    /// The number of lines examined is bounded, except for those of one ticket, so a page may be short.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn actions(
        &self,
        filter: &action_record::ActionFilter,
        after: i64,
        limit: usize,
    ) -> Result<ActionPage, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let connection = &mut *connection;
        // One line more than the page shows whether another page follows.
        let read = i64::try_from(limit.saturating_add(1)).unwrap_or(i64::MAX);
        if filter.is_of_ticket_alone() {
            let mut shown = self.history.read(connection, filter.ticket_id, after, read).await?;
            let more = shown.len() > limit;
            shown.truncate(limit);
            return Ok(ActionPage { last: shown.last().map_or(after, |line| line.number), shown, more });
        }
        let end = self.history.last_settled(connection).await?;
        let span = span(connection, filter, NumberRange { after, last: end }).await?;
        let SearchPage { lines, looked } = find(connection, filter, span, false, read).await?;
        let (shown, is_cut) = cut(lines, limit);
        let last = match shown.last().filter(|_| is_cut) {
            Some(line) => line.number,
            // A follower continues after all examined lines, also those outside the requested time.
            None if looked.last == span.last => end.max(after),
            None => looked.last,
        };
        Ok(ActionPage { more: is_cut || looked.last < span.last, shown, last })
    }

    /// Returns up to `limit` matching history lines below number `before`, newest first. Lines that are being committed may be
    /// missing.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn newest_actions(
        &self,
        filter: &action_record::ActionFilter,
        before: Option<i64>,
        limit: usize,
    ) -> Result<ActionPage, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let read = i64::try_from(limit.saturating_add(1)).unwrap_or(i64::MAX);
        let last = before.map_or(i64::MAX, |before| before.saturating_sub(1));
        let span = span(&mut connection, filter, NumberRange { after: 0, last }).await?;
        let SearchPage { lines, looked } = find(&mut connection, filter, span, true, read).await?;
        let (shown, is_cut) = cut(lines, limit);
        let last = match shown.last().filter(|_| is_cut) {
            Some(line) => line.number,
            None => looked.after.saturating_add(1),
        };
        Ok(ActionPage { more: is_cut || looked.after > span.after, shown, last })
    }

    /// Returns up to `limit` matching live tickets after the ticket `after` (nil for the first page), oldest first, with their
    /// observed use.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn tickets(
        &self,
        filter: &TicketFilter,
        after: Uuid,
        limit: i64,
    ) -> Result<(TicketListPage, HashMap<Uuid, ObservedUse>), Error> {
        let mut connection = self.store.operators().acquire().await?;
        let page = within_timeout(user_resource::list(&mut *connection, filter, after, limit)).await?;
        let observed = within_timeout(em_observed::read(&mut connection, &page.tickets)).await?;
        Ok((page, observed))
    }
}
