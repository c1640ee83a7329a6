//! Heartbeats: what EMs report, and what follows for their tickets.
//!
//! A report is no operation of the committer: it takes no resource lock, and so never stands in a grant's way. It is one statement,
//! then a plain read of the EM's tickets, and only if something changed a second one. What a report only proposes, to give up a
//! ticket, is an operation like any other, judged again under the locks.

use std::{sync::Arc, time::Duration};

use sqlx::PgConnection;
use tokio::{sync::Semaphore, task::JoinSet, time::Instant};
use uuid::Uuid;

use crate::{
    domain::{
        name::FieldError,
        operation::{Operation, Outcome, Rejection, Released, ended_at},
        report::{Arrival, Report, ReportNumber, reconcile},
        ticket::Ticket,
    },
    error::Error,
    store::{HEARTBEAT_CONNECTIONS_MAX, Store, StoreError, action_record, em_report, session::answered, user_resource},
};

use super::committer::Committer;

/// How often a report is tried again whose EM somebody changed meanwhile.
const TRIES_MAX: u32 = 5;

/// How many unknown tickets an answer names; the next answers name the rest.
const UNKNOWN_MAX: usize = 1000;

/// How many tickets of a report are given up at once, so that grants find room in the same batches.
const LOST_AT_ONCE: usize = 256;

/// How long giving up the tickets of one report may take; the next report does the rest.
const LOST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long signs of life may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// An EM of which nothing was heard for so long is not chosen.
    pub silent_after: Duration,
    /// An EM of which nothing was heard for so long is given up: at least twice `silent_after`.
    pub lost_after: Duration,
    /// A used ticket that is missing from so many reports in a row is given up.
    pub lost_after_reports: i16,
}

impl Patience {
    /// What holds if nothing else is set.
    pub const DEFAULT: Self =
        Self { silent_after: Duration::from_secs(30), lost_after: Duration::from_secs(300), lost_after_reports: 3 };
}

/// A ticket that an EM reported although it does not live there: its engine has to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownTicket {
    /// Which.
    pub id: Uuid,
    /// How it ended, if that is known; for people.
    pub reason: String,
}

/// Takes reports.
#[derive(Clone, Debug)]
pub struct HeartbeatService {
    store: Store,
    committer: Committer,
    patience: Patience,
    at_once: Arc<Semaphore>,
}

impl HeartbeatService {
    /// On top of the store and the committer of this instance.
    pub fn new(store: Store, committer: Committer, patience: Patience) -> Self {
        Self { store, committer, patience, at_once: Arc::new(Semaphore::new(HEARTBEAT_CONNECTIONS_MAX)) }
    }

    /// How often an EM should report: so that one report may get lost before it falls silent.
    pub fn interval(&self) -> Duration {
        self.patience.silent_after / 3
    }

    /// Takes a report, gives up the tickets that are lost by it, and names those that are unknown.
    ///
    /// # Errors
    /// [`Rejection::EmNotRegistered`]; [`Rejection::StaleReport`] for an older epoch or sequence, which changes nothing;
    /// [`Error::InvalidField`] for an epoch that is yet to come; [`Error::LockTimeout`] if it was not its turn until `deadline`.
    pub async fn report(&self, report: &Report, deadline: Instant) -> Result<Vec<UnknownTicket>, Error> {
        let turn = tokio::time::timeout_at(deadline, self.at_once.acquire()).await.map_err(|_| Error::LockTimeout)?;
        let turn = turn.map_err(|_| Error::ShuttingDown)?;
        let mut connection = self.store.heartbeats().acquire().await?;
        let (unknown, lost) = self.reconcile(&mut connection, report).await?;
        drop((connection, turn));
        self.give_up(lost, deadline.min(Instant::now() + LOST_TIMEOUT)).await;
        Ok(unknown)
    }

    /// Keeps the report, and tells which tickets are unknown by it, and which are lost.
    async fn reconcile(
        &self,
        connection: &mut PgConnection,
        report: &Report,
    ) -> Result<(Vec<UnknownTicket>, Vec<Ticket>), Error> {
        let previous = keep(connection, report).await?;
        let living = answered(user_resource::living(&mut *connection, &report.em)).await?;
        let mut found = reconcile(&report.tickets, &living, previous, self.patience.lost_after_reports);
        if !found.missed.is_empty() {
            answered(user_resource::update_missed(&mut *connection, report, &found.missed)).await?;
        }
        found.unknown.truncate(UNKNOWN_MAX);
        let unknown = answered(explain(connection, found.unknown)).await?;
        let lost = match found.lost.is_empty() {
            true => vec![],
            false => answered(user_resource::read(&mut *connection, &found.lost)).await?.into_values().collect(),
        };
        Ok((unknown, lost))
    }

    /// Has lost tickets given up. What fails is done by the next report, which misses them again.
    async fn give_up(&self, lost: Vec<Ticket>, deadline: Instant) {
        for part in lost.chunks(LOST_AT_ONCE) {
            let mut under_way: JoinSet<()> = part
                .iter()
                .map(|ticket| {
                    let (committer, ticket) = (self.committer.clone(), released(ticket));
                    async move { give_up_one(&committer, ticket, deadline).await }
                })
                .collect();
            // Dropped with a call that is cancelled: operations that did not begin leave the queue.
            while under_way.join_next().await.is_some() {}
        }
    }
}

fn released(ticket: &Ticket) -> Released {
    Released { ticket_id: ticket.id, user: ticket.user.clone(), em: ticket.em.clone() }
}

async fn give_up_one(committer: &Committer, ticket: Released, deadline: Instant) {
    let Released { ticket_id, user, em } = ticket.clone();
    match committer.submit_in_background(Operation::Lost(ticket), deadline).await {
        Ok(Outcome::Lost(true)) => {
            tracing::warn!(%ticket_id, %user, %em, "a ticket is lost: its EM reports without it");
        }
        Ok(_) => {}
        Err(error) => {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(%ticket_id, %em, error, "a lost ticket could not be given up yet");
        }
    }
}

/// Keeps a report; answers when the one before came, or `None` if there was none or this one is a repeat.
async fn keep(connection: &mut PgConnection, report: &Report) -> Result<Option<time::OffsetDateTime>, Error> {
    for _ in 0..TRIES_MAX {
        let met = answered(em_report::upsert(&mut *connection, report)).await?;
        let met = met.ok_or_else(|| Rejection::EmNotRegistered(report.em.clone()))?;
        if met.kept {
            return Ok(met.last.map(|(_, at)| at));
        }
        let (number, last) = (ReportNumber::of(report), met.last.map(|(last, _)| last));
        match Arrival::of(number, met.registered, last) {
            Arrival::New => {}
            Arrival::Repeat => return Ok(None),
            Arrival::Stale => {
                let em = report.em.clone();
                return Err(Rejection::StaleReport { em, registered: met.registered, last }.into());
            }
            Arrival::Unborn => {
                let problem = format!("is higher than that of the registration, {}; give that one", met.registered);
                return Err(FieldError::new("epoch", problem).into());
            }
        }
    }
    Err(Error::LockTimeout)
}

/// Tells of tickets that do not live on the EM that reported them what became of them.
async fn explain(connection: &mut PgConnection, ids: Vec<Uuid>) -> Result<Vec<UnknownTicket>, StoreError> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let ended = action_record::read(&mut *connection, &ids).await?;
    let elsewhere = user_resource::read(connection, &ids).await?;
    let reason = |id: &Uuid| match (ended.get(id), elsewhere.get(id)) {
        (Some(ended), _) => ended_at(ended),
        (None, Some(ticket)) => format!("lives on another EM, {}", ticket.em),
        (None, None) => "is not remembered: there never was such a ticket, or it has left the history".to_owned(),
    };
    Ok(ids.iter().map(|id| UnknownTicket { id: *id, reason: reason(id) }).collect())
}
