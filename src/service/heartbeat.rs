//! Heartbeats: what EMs report, and what follows for their tickets.
//!
//! A report is no operation of the committer: it takes no resource lock, and so never stands in a grant's way. Reports wait in a
//! queue; a task keeps all that wait with one statement. The same statement answers with the digest of each EM's used tickets:
//! a report that has the same one is complete, and no ticket is read for it. Only for the others a second task reads tickets, many
//! EMs at a time. What a report only proposes, to give up a ticket, is an operation like any other, judged again under the locks.
//!
//! - `keep`: the first task, and `observe` for what reports tell of the engines;
//! - `compare`: the second.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    task::JoinSet,
    time::Instant,
};

use crate::{
    domain::{
        operation::{Operation, Outcome, Released},
        report::{Report, UnknownTicket},
        ticket_digest::TicketDigest,
    },
    error::Error,
    store::Store,
};

use super::{admission::StateCache, committer::Committer, tasks::Tasks};

mod compare;
mod keep;
mod observe;

/// How many reports may wait.
const QUEUE_MAX: usize = 16_384;

/// How many tickets the reports that wait may name together: 16 bytes each. What they observe counts by its bytes.
const TICKETS_WAITING_MAX: usize = 2 << 20;
const TICKET_BYTES: usize = 16;

/// How many tickets of a report are given up at once, so that grants find room in the same batches.
const LOST_AT_ONCE: usize = 256;

/// How long giving up the tickets of one report may take; the next report does the rest.
const LOST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long signs of life may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LivenessTimeouts {
    /// An EM of which nothing was heard for so long is not chosen.
    pub silent_after: Duration,
    /// An EM of which nothing was heard for so long is given up: at least twice `silent_after`.
    pub lost_after: Duration,
    /// A used ticket that is missing from so many reports in a row is given up.
    pub lost_after_reports: i16,
}

impl LivenessTimeouts {
    /// What holds if nothing else is set.
    pub const DEFAULT: Self =
        Self { silent_after: Duration::from_secs(30), lost_after: Duration::from_secs(300), lost_after_reports: 3 };

    /// How often an EM should report: so that one report may get lost before it falls silent.
    pub fn report_interval(&self) -> Duration {
        self.silent_after / 3
    }
}

/// A report that waits, and who waits for its answer.
#[derive(Debug)]
struct Pending {
    /// Its tickets are in order, and each is named once.
    report: Report,
    /// Of its tickets.
    tickets: TicketDigest,
    deadline: Instant,
    reply: oneshot::Sender<Result<Found, Error>>,
    /// Whether another transaction locked what it writes.
    is_contended: Arc<AtomicBool>,
    /// The room that its tickets take.
    _room: OwnedSemaphorePermit,
}

impl Pending {
    /// Whether somebody still waits for it.
    fn is_wanted(&self) -> bool {
        !self.reply.is_closed() && self.deadline > Instant::now()
    }

    fn answer(self, answer: Result<Found, Error>) {
        // A caller that is gone needs no answer.
        let _ = self.reply.send(answer);
    }
}

/// A report that was kept, or repeats one that was, and that does not name just the used tickets of its EM.
#[derive(Debug)]
struct Differing {
    pending: Pending,
    /// When the report before came; `None` if nothing can be missing by this one.
    previous: Option<OffsetDateTime>,
    /// Whether some ticket of the EM may have been missing from the report before.
    any_missed: bool,
}

/// What follows from a report.
#[derive(Debug, Default)]
struct Found {
    unknown: Vec<UnknownTicket>,
    lost: Vec<Released>,
}

/// Takes reports.
#[derive(Clone, Debug)]
pub struct HeartbeatService {
    queue: mpsc::Sender<Pending>,
    room: Arc<Semaphore>,
    committer: Committer,
    liveness: LivenessTimeouts,
}

impl HeartbeatService {
    /// Starts the tasks that take reports; they end when all clones of the service are gone. What EMs say of themselves is `seen`.
    pub fn start(
        store: &Store,
        seen: StateCache,
        committer: Committer,
        liveness: LivenessTimeouts,
        tasks: &Tasks,
    ) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        let (differing, compared) = mpsc::channel(QUEUE_MAX);
        tasks.spawn(keep::run(inbox, differing, store.session(), seen));
        tasks.spawn(compare::run(compared, store.session(), liveness.lost_after_reports));
        Self { queue, room: Arc::new(Semaphore::new(TICKETS_WAITING_MAX)), committer, liveness }
    }

    /// How often an EM should report.
    pub fn interval(&self) -> Duration {
        self.liveness.report_interval()
    }

    /// Takes a report, gives up the tickets that are lost by it, and names those that are unknown.
    ///
    /// # Errors
    /// [`Rejection::EmNotRegistered`]; [`Rejection::StaleReport`] for an older epoch or sequence, which changes nothing;
    /// [`Error::InvalidField`] for an epoch that is yet to come, and for what is observed in another type or queue than the ticket's,
    /// although the report is a sign of life then; [`Error::NotBegun`] if it was not its turn until `deadline`;
    /// [`Error::LockTimeout`] if another transaction locked what it writes; [`Error::Overloaded`] if too many reports wait, or too many of its EM.
    ///
    /// [`Rejection::EmNotRegistered`]: crate::domain::operation::Rejection::EmNotRegistered
    /// [`Rejection::StaleReport`]: crate::domain::operation::Rejection::StaleReport
    pub async fn report(&self, mut report: Report, deadline: Instant) -> Result<Vec<UnknownTicket>, Error> {
        report.tickets.sort_unstable();
        report.tickets.dedup();
        let tickets = TicketDigest::of(&report.tickets);
        let observed = report.observed.as_ref().map_or(0, |observed| observed.packed().len() / TICKET_BYTES);
        let size = u32::try_from(report.tickets.len() + observed).map_err(|_| Error::Overloaded)?;
        let room = self.room.clone().try_acquire_many_owned(size).map_err(|_| Error::Overloaded)?;
        let (reply, answer) = oneshot::channel();
        let is_contended = Arc::new(AtomicBool::new(false));
        let timeout = || if is_contended.load(Ordering::Relaxed) { Error::LockTimeout } else { Error::NotBegun };
        let pending = Pending { report, tickets, deadline, reply, is_contended: is_contended.clone(), _room: room };
        self.queue.try_send(pending).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Error::ShuttingDown,
        })?;
        let answered = tokio::time::timeout_at(deadline, answer).await.map_err(|_| timeout())?;
        // A report is dropped unanswered when its time is over, maybe just before its caller finds that.
        let dropped = || if deadline <= Instant::now() { timeout() } else { Error::ShuttingDown };
        let Found { unknown, lost } = answered.unwrap_or_else(|_| Err(dropped()))?;
        self.give_up(&lost, deadline.min(Instant::now() + LOST_TIMEOUT)).await;
        Ok(unknown)
    }

    /// Has lost tickets given up. What fails is done by the next report, which misses them again.
    async fn give_up(&self, lost: &[Released], deadline: Instant) {
        for part in lost.chunks(LOST_AT_ONCE) {
            let mut under_way: JoinSet<()> = part
                .iter()
                .map(|ticket| {
                    let (committer, ticket) = (self.committer.clone(), ticket.clone());
                    async move { give_up_one(&committer, ticket, deadline).await }
                })
                .collect();
            // Dropped with a call that is cancelled: operations that did not begin leave the queue.
            while under_way.join_next().await.is_some() {}
        }
    }
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
