//! Who holds what: plain reads, without locks. What EMs and managers ask, and what operators list, have connections of their own.
//!
//! - [`accounting`]: what is told in sums: refusals, and use over time;
//! - `search`: what is found in the history.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use sqlx::PgConnection;
use time::OffsetDateTime;
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
        Store,
        action_record::{self, Numbers},
        em_observed, em_report, em_resource,
        session::answered,
        user_resource::{self, Filter, Page},
        waiting,
    },
};

use super::{
    history::History,
    standby::{Mark, Reading, Standby},
};

pub mod accounting;
mod search;

use search::{Found, find, span};

/// How many EMs are read at once for those that are full, and how often for one page.
const LOOKED_AT_ONCE: usize = 1000;
const LOOKS_MAX: usize = 5;

/// A page of EMs.
#[derive(Debug)]
pub struct Ems {
    /// In the order of their keys, each with what is known of it by its reports.
    pub shown: Vec<(Em, Option<EmStatus>)>,
    /// The one behind which the next page begins; `None` if nothing follows.
    pub next: Option<EmInstance>,
}

/// How much a page of the history tells of how things stood before and after; a line more may be beyond it.
const STATES_BYTES_MAX: usize = 1 << 20;

/// Lines of the history.
#[derive(Debug)]
pub struct Lines {
    /// In order.
    pub shown: Vec<ActionRecord>,
    /// The number of the last that was looked at.
    pub last: i64,
    /// Whether there may be more behind it now.
    pub more: bool,
}

/// What was read, and how old that may be.
#[derive(Debug)]
pub struct Dated<T> {
    /// What was read.
    pub told: T,
    /// Everything that was committed before is in it; `None` if just everything is.
    pub as_of: Option<OffsetDateTime>,
}

/// Cuts what was read to a page; true if there is more.
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

/// Answers operators' questions.
#[derive(Clone, Debug)]
pub struct Usage {
    store: Store,
    standby: Standby,
    silent_after: Duration,
    history: History,
}

impl Usage {
    /// On top of the store, and of its standby for what may be a little old. EMs that report are silent after `silent_after`.
    pub fn new(store: Store, standby: Standby, silent_after: Duration) -> Self {
        Self { store, standby, silent_after, history: History::default() }
    }

    /// One EM, and what is known of it by its reports.
    pub async fn em(&self, instance: &EmInstance) -> Result<(Em, Option<EmStatus>), Error> {
        let mut found = answered(em_resource::read(&self.store.pool().await?, [instance])).await?;
        let em = found.remove(instance).ok_or_else(|| Rejection::EmNotRegistered(instance.clone()))?;
        let pool = self.store.pool().await?;
        let statuses = em_report::read(&pool, [instance], self.silent_after);
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

    /// A page of up to `limit` EMs that match and of which at least `min_fullness` hundredths are held, in the order of their keys, from
    /// behind `after`; and what is known of each by its reports. It looks through so many, and may find few.
    pub async fn ems(
        &self,
        filter: &em_resource::Filter,
        min_fullness: u8,
        after: Option<&EmInstance>,
        limit: usize,
    ) -> Result<Ems, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let (mut ems, mut next) = (Vec::new(), after.cloned());
        // One more than are shown tells whether there is more: without filters, that is all.
        let mut at_once = limit.saturating_add(1).min(LOOKED_AT_ONCE);
        'page: for _ in 0..LOOKS_MAX {
            let read = i64::try_from(at_once).unwrap_or(i64::MAX);
            let list = em_resource::list(&mut *connection, filter, self.silent_after, next.as_ref(), read);
            let found = answered(list).await?;
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
        let mut statuses = answered(em_report::read(&mut *connection, instances, self.silent_after)).await?;
        let with_status = |em: Em| {
            let status = statuses.remove(&em.instance);
            (em, status)
        };
        Ok(Ems { shown: ems.into_iter().map(with_status).collect(), next })
    }

    /// What is observed of a live ticket, if anything.
    pub async fn observed(&self, ticket: &Ticket) -> Result<Option<Observed>, Error> {
        let read = async {
            let mut connection = self.store.pool().await?.acquire().await?;
            em_observed::read(&mut connection, [ticket]).await
        };
        Ok(answered(read).await?.remove(&ticket.id))
    }

    /// One live ticket.
    pub async fn ticket(&self, ticket_id: Uuid) -> Result<Ticket, Error> {
        let pool = self.store.pool().await?;
        if let Some(ticket) = answered(user_resource::read(&pool, &[ticket_id])).await?.remove(&ticket_id) {
            return Ok(ticket);
        }
        let ended = answered(action_record::read(&pool, &[ticket_id])).await?.remove(&ticket_id).map(Box::new);
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
        let mut page = answered(user_resource::list(&self.store.pool().await?, &filter, Uuid::nil(), 1)).await?;
        match (page.tickets.pop(), page.next) {
            (Some(ticket), None) => Ok(ticket),
            (Some(_), Some(_)) => Err(Rejection::ManyTicketsOfEngine(engine).into()),
            (None, _) => Err(Rejection::NoTicketOfEngine(engine).into()),
        }
    }

    /// Up to `limit` requests that wait and match, the first in line first, from behind the position `after`; each with its own.
    pub async fn waiting(
        &self,
        filter: &waiting::Filter,
        after: Option<QueuePosition>,
        limit: i64,
    ) -> Result<Vec<(QueuePosition, WaitingRequest)>, Error> {
        Ok(answered(waiting::list(&mut *self.store.operators().acquire().await?, filter, after, limit)).await?)
    }

    /// Up to `limit` lines of the history that match, oldest first, from behind number `after`. Nothing comes between them later. But for
    /// those of a ticket, it looks through so many lines, and may find few. A standby may answer: then they end where nothing is missing there.
    pub async fn actions(
        &self,
        filter: &action_record::Filter,
        after: i64,
        limit: usize,
    ) -> Result<Dated<Lines>, Error> {
        if let Some(Reading { mut connection, guard }) = self.standby.acquire().await? {
            let read = Box::pin(self.actions_on(&mut connection, Some(guard.mark), filter, (after, limit)));
            if let Some(lines) = guard.answered(read).await? {
                return Ok(Dated { told: lines, as_of: Some(guard.mark.at) });
            }
        }
        let mut connection = self.store.operators().acquire().await?;
        let lines = Box::pin(self.actions_on(&mut connection, None, filter, (after, limit))).await?;
        Ok(Dated { told: lines, as_of: None })
    }

    async fn actions_on(
        &self,
        connection: &mut PgConnection,
        mark: Option<Mark>,
        filter: &action_record::Filter,
        (after, limit): (i64, usize),
    ) -> Result<Lines, Error> {
        // One more than are shown tells whether there is more.
        let read = i64::try_from(limit.saturating_add(1)).unwrap_or(i64::MAX);
        // Which numbers may still come, a standby cannot tell by itself; among those of one ticket none does.
        if filter.is_of_ticket_alone() && (mark.is_none() || filter.ticket_id.is_some()) {
            let mut shown = self.history.read(connection, filter.ticket_id, after, read).await?;
            let more = shown.len() > limit;
            shown.truncate(limit);
            return Ok(Lines { last: shown.last().map_or(after, |line| line.number), shown, more });
        }
        let end = match mark {
            Some(mark) => mark.settled,
            None => self.history.settled(connection).await?,
        };
        let span = span(connection, filter, Numbers { after, last: end }).await?;
        let Found { lines, looked } = find(connection, filter, span, false, read).await?;
        let (shown, is_cut) = cut(lines, limit);
        let last = match shown.last().filter(|_| is_cut) {
            Some(line) => line.number,
            // Who follows goes on behind all that was looked through, also behind what is not of the time that was asked for.
            None if looked.last == span.last => end.max(after),
            None => looked.last,
        };
        Ok(Lines { more: is_cut || looked.last < span.last, shown, last })
    }

    /// The same newest first, as it is now, of the numbers below `before`; what is just being committed may be missing.
    pub async fn newest_actions(
        &self,
        filter: &action_record::Filter,
        before: Option<i64>,
        limit: usize,
    ) -> Result<Dated<Lines>, Error> {
        if let Some(Reading { mut connection, guard }) = self.standby.acquire().await? {
            let read = Box::pin(newest_actions_on(&mut connection, filter, before, limit));
            if let Some(lines) = guard.answered(read).await? {
                return Ok(Dated { told: lines, as_of: Some(guard.mark.at) });
            }
        }
        let mut connection = self.store.operators().acquire().await?;
        let lines = Box::pin(newest_actions_on(&mut connection, filter, before, limit)).await?;
        Ok(Dated { told: lines, as_of: None })
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

async fn newest_actions_on(
    connection: &mut PgConnection,
    filter: &action_record::Filter,
    before: Option<i64>,
    limit: usize,
) -> Result<Lines, Error> {
    let read = i64::try_from(limit.saturating_add(1)).unwrap_or(i64::MAX);
    let last = before.map_or(i64::MAX, |before| before.saturating_sub(1));
    let span = span(connection, filter, Numbers { after: 0, last }).await?;
    let Found { lines, looked } = find(connection, filter, span, true, read).await?;
    let (shown, is_cut) = cut(lines, limit);
    let last = match shown.last().filter(|_| is_cut) {
        Some(line) => line.number,
        None => looked.after.saturating_add(1),
    };
    Ok(Lines { more: is_cut || looked.after > span.after, shown, last })
}
