//! Reports (heartbeats) of EMs: stores them, and detects used tickets that they no longer contain.
//!
//! A task stores all queued reports in one statement. The statement returns the digests of each EM's used tickets, and of those of
//! idle engines; a report with equal digests is complete, and no ticket is read. A second task compares the tickets of all other reports.
//! Never: takes a resource lock, so a report never delays a grant; ends a ticket, which an operation of the committer does.
//! Caller: the RPC service `rm_edge::resource_manager`.
//!
//! - `upsert`: the first task; `compare`: the second task; `idle`: idle engines; `observations`: the observed use of engines in the reports.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_recursion::async_recursion as boxed;
use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    task::JoinSet,
    time::Instant,
};

use crate::error::Error;
use rm_model::{
    operation::{Operation, Outcome, ReleaseTicket},
    report::{EmReport, UnknownTicket},
    ticket_digest::TicketDigest,
};
use rm_store::{Store, reclaim::EngineStop};
use rm_telemetry::cause;

use super::{admission::StateCache, background::reclaim::EngineStops, committer::Committer, tasks::InstanceTasks};

mod compare;
mod idle;
mod observations;
mod upsert;

/// Maximum number of queued reports.
const QUEUE_MAX: usize = 16_384;

/// Maximum number of tickets in all queued reports, in units of 16 bytes. Observations count by their bytes.
const TICKETS_WAITING_MAX: usize = 2 << 20;
const TICKET_BYTES: usize = 16;

/// Number of lost tickets of a report that are submitted at once, so that grants fit into the same batches.
const LOST_AT_ONCE: usize = 256;

/// Timeout for ending the lost tickets of one report; the next report continues.
const LOST_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of report intervals until an EM without reports is silent.
const REPORTS_BEFORE_SILENT: u32 = 3;

/// Timeouts after missing reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LivenessTimeouts {
    /// Time without a report after which placement does not select the EM.
    pub silent_after: Duration,
    /// Time without a report after which the EM is lost: at least twice `silent_after`.
    pub lost_after: Duration,
    /// Number of consecutive reports without a used ticket after which the ticket is lost.
    pub lost_after_reports: i16,
}

impl LivenessTimeouts {
    /// Timeouts without configuration.
    pub const DEFAULT: Self =
        Self { silent_after: Duration::from_secs(30), lost_after: Duration::from_secs(300), lost_after_reports: 3 };

    /// Interval at which an EM should report. A single lost report does not make the EM silent.
    pub fn report_interval(&self) -> Duration {
        self.silent_after / REPORTS_BEFORE_SILENT
    }
}

/// Report with its reply channel.
#[derive(Debug)]
struct QueuedReport {
    /// The report; its ticket ids are sorted and unique.
    report: EmReport,
    /// Digest of its tickets.
    tickets: TicketDigest,
    /// Digest of its tickets of idle engines.
    idle: TicketDigest,
    deadline: Instant,
    reply: oneshot::Sender<Result<ReportResult, Error>>,
    /// Whether another transaction locks the rows that the report writes.
    is_contended: Arc<AtomicBool>,
    /// Permits for its size.
    _room: OwnedSemaphorePermit,
}

impl QueuedReport {
    /// Whether the caller still waits.
    fn is_wanted(&self) -> bool {
        !self.reply.is_closed() && self.deadline > Instant::now()
    }

    fn answer(self, answer: Result<ReportResult, Error>) {
        // A caller that is gone needs no reply.
        let _ = self.reply.send(answer);
    }
}

/// Report that is stored, or repeats a stored one, and whose tickets differ from the used tickets of its EM.
#[derive(Debug)]
struct ReportMismatch {
    pending: QueuedReport,
    /// Time of the previous report; `None` if no ticket can be missing in this one.
    previous: Option<OffsetDateTime>,
    /// Whether a ticket of the EM may have been missing in the previous report.
    any_missed: bool,
    /// Whether its tickets must be compared.
    are_tickets_new: bool,
    /// Whether its tickets of idle engines are to be written.
    is_idle_new: bool,
}

/// Consequences of a report.
#[derive(Debug, Default)]
struct ReportResult {
    unknown: Vec<UnknownTicket>,
    lost: Vec<ReleaseTicket>,
}

/// Service for reports. Clones share the queue.
#[derive(Clone, Debug)]
pub struct HeartbeatService {
    queue: mpsc::Sender<QueuedReport>,
    room: Arc<Semaphore>,
    committer: Committer,
    liveness: LivenessTimeouts,
    stops: EngineStops,
}

/// Reply to a report.
#[derive(Debug)]
pub struct ReportReply {
    /// Tickets of the report that do not live on the EM.
    pub unknown: Vec<UnknownTicket>,
    /// Tickets of the report that are to end because requests wait.
    pub to_stop: Vec<EngineStop>,
}

impl HeartbeatService {
    /// Starts the tasks. The tasks end when all clones of the service are dropped. `seen` gets the reported conditions of the
    /// EMs.
    pub fn start(
        store: &Store,
        seen: StateCache,
        committer: Committer,
        liveness: LivenessTimeouts,
        stops: EngineStops,
        tasks: &InstanceTasks,
    ) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        let (differing, compared) = mpsc::channel(QUEUE_MAX);
        tasks.spawn(upsert::run(inbox, differing, store.session(), seen, liveness.silent_after));
        tasks.spawn(compare::run(compared, store.session(), liveness.lost_after_reports));
        Self { queue, room: Arc::new(Semaphore::new(TICKETS_WAITING_MAX)), committer, liveness, stops }
    }

    /// Returns the interval at which an EM should report.
    pub fn interval(&self) -> Duration {
        self.liveness.report_interval()
    }

    /// Stores a report and ends the tickets that are lost by it.
    ///
    /// # Errors
    /// - [`Rejection::EmNotRegistered`]; [`Rejection::StaleReport`] for an older epoch or sequence, which changes nothing.
    /// - [`Error::InvalidField`] for a future epoch, and for observations in another type or queue than the ticket's. The
    ///   report with such observations still counts as a sign of life.
    /// - [`Error::NotBegun`] if the report was not stored by `deadline`; [`Error::LockTimeout`] if another transaction locked
    ///   its rows.
    /// - [`Error::Overloaded`] if too many reports wait, in total or of this EM.
    ///
    /// [`Rejection::EmNotRegistered`]: rm_model::operation::Rejection::EmNotRegistered
    ///
    /// [`Rejection::StaleReport`]: rm_model::operation::Rejection::StaleReport
    #[boxed]
    pub async fn report(&self, mut report: EmReport, deadline: Instant) -> Result<ReportReply, Error> {
        report.tickets.sort_unstable();
        report.tickets.dedup();
        report.idle.sort_unstable();
        report.idle.dedup();
        let (tickets, idle) = (TicketDigest::of(&report.tickets), TicketDigest::of(&report.idle));
        let observed = report.observed.as_ref().map_or(0, |observed| observed.packed().len() / TICKET_BYTES);
        let size = u32::try_from(report.tickets.len() + report.idle.len() + observed).map_err(|_| Error::Overloaded)?;
        let room = self.room.clone().try_acquire_many_owned(size).map_err(|_| Error::Overloaded)?;
        let mut to_stop = self.stops.on(&report.em);
        let is_reported = |stop: &EngineStop| match stop.busy {
            true => report.tickets.binary_search(&stop.ticket_id).is_ok(),
            false => report.idle.binary_search(&stop.ticket_id).is_ok(),
        };
        to_stop.retain(is_reported);
        let (reply, answer) = oneshot::channel();
        let is_contended = Arc::new(AtomicBool::new(false));
        let timeout = || if is_contended.load(Ordering::Relaxed) { Error::LockTimeout } else { Error::NotBegun };
        let pending =
            QueuedReport { report, tickets, idle, deadline, reply, is_contended: is_contended.clone(), _room: room };
        self.queue.try_send(pending)?;
        let answered = tokio::time::timeout_at(deadline, answer).await.map_err(|_| timeout())?;
        // A report is dropped without a reply at its deadline, maybe shortly before its caller's timer fires.
        let dropped = || if deadline <= Instant::now() { timeout() } else { Error::ShuttingDown };
        let ReportResult { unknown, lost } = answered.unwrap_or_else(|_| Err(dropped()))?;
        self.expire_missing(&lost, deadline.min(Instant::now() + LOST_TIMEOUT)).await;
        Ok(ReportReply { unknown, to_stop })
    }

    /// Ends lost tickets. The next report repeats those that fail.
    async fn expire_missing(&self, lost: &[ReleaseTicket], deadline: Instant) {
        for part in lost.chunks(LOST_AT_ONCE) {
            let mut under_way: JoinSet<()> = part
                .iter()
                .map(|ticket| {
                    let (committer, ticket) = (self.committer.clone(), ticket.clone());
                    async move { give_up_one(&committer, ticket, deadline).await }
                })
                .collect();
            // Dropped if the call is cancelled; operations that have not begun then leave the commit queue.
            while under_way.join_next().await.is_some() {}
        }
    }
}

async fn give_up_one(committer: &Committer, ticket: ReleaseTicket, deadline: Instant) {
    let ReleaseTicket { ticket_id, user, em } = ticket.clone();
    match committer.submit_in_background(Operation::Lost(ticket), deadline).await {
        Ok(Outcome::Lost(true)) => {
            tracing::warn!(%ticket_id, %user, %em, "a ticket is lost: its EM omits it from its reports");
        }
        Ok(_) => {}
        Err(error) => {
            let error = cause(&error);
            tracing::warn!(%ticket_id, %em, error, "a lost ticket could not be ended yet");
        }
    }
}
