//! Expiry: ends locked tickets whose deadline passes without a confirmation.
//!
//! The deadline in the ticket's row is authoritative. The lease owner reads deadlines up to [`HORIZON`] ahead, in order, and
//! arms timers for them, regardless of the granting instance. All other instances read only overdue tickets, so that tickets
//! expire even if the lease owner fails. The number of timers is bounded; more deadlines are read when timers are done.
//!
//! Never: ends a ticket outside the committer, which checks the deadline again under the locks.
//! Callers: the server starts the sweep and [`run_timers`]; the committer reports new grants.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::{JoinError, JoinSet},
    time::Instant,
};
use tokio_stream::StreamExt as _;
use tokio_util::{sync::CancellationToken, time::DelayQueue};

use crate::committer::Committer;
use rm_engine::expiry_budgets::EmBudgets;
use rm_model::operation::{Operation, ReleaseTicket};
use rm_store::{
    StoreError, Work,
    session::{Session, within_short_timeout},
    user_resource::{self, DueKey, DueTicket},
};
use rm_telemetry::cause;
use rm_telemetry::metrics::Metrics;

use super::{Step, Task, lease::LeaseFlag};

/// How far ahead of a deadline a sweep reads it.
pub const HORIZON: Duration = Duration::from_secs(2);
const AHEAD: time::Duration = time::Duration::seconds(2);

/// Delay after a deadline at which an instance without the lease reads the ticket.
const OVERDUE: time::Duration = time::Duration::milliseconds(400);

/// How far back most sweeps read. Earlier tickets leave dead entries at the front of the index, which PostgreSQL may retain for
/// long.
const RECENT: Duration = Duration::from_secs(5);

/// Interval between sweeps of all overdue tickets, for tickets that could not expire in time or were committed late. While
/// there is any such ticket, each sweep reads all.
const WHOLE_PERIOD: Duration = Duration::from_secs(10);

/// Maximum number of tickets per page of a sweep.
const PAGE: i64 = 2000;

/// Capacity of the channel to the timers, in tickets.
const WAITING_MAX: usize = 1024;

/// Added to each timer, so that it does not fire just before the database's clock reaches the deadline.
const SLACK: Duration = Duration::from_millis(2);

/// Timeout of one expiration, lock waits included; the next sweep retries.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum pause after a sweep with rejected timers, as a multiple of its reading time.
const PAUSE_FACTOR: u32 = 4;

/// Creates the channel of tickets that fall due soon.
pub fn channel() -> (mpsc::Sender<DueTicket>, mpsc::Receiver<DueTicket>) {
    mpsc::channel(WAITING_MAX)
}

/// Whether timers were rejected since the last query, because an EM has used its budget. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct RejectedTimers(Arc<AtomicBool>);

impl RejectedTimers {
    fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Background task that reads tickets that fall due.
#[derive(Debug)]
pub struct ExpirySweep {
    timers: mpsc::Sender<DueTicket>,
    turned_down: RejectedTimers,
    holder: LeaseFlag,
    metrics: Metrics,
    /// Start of the next page.
    after: Option<DueKey>,
    /// Start of the current sweep.
    begun: Instant,
    /// Time in the database during the sweep. The rest was a wait for the timers.
    reading: Duration,
    /// Whether this sweep reads all overdue tickets, and when the next one must.
    is_whole: bool,
    next_whole: Instant,
}

impl ExpirySweep {
    /// Creates the task. Tickets go to `timers`; `metrics` gets the delay of the first one.
    pub fn new(
        timers: mpsc::Sender<DueTicket>,
        turned_down: RejectedTimers,
        holder: LeaseFlag,
        metrics: Metrics,
    ) -> Self {
        let begun = Instant::now();
        let (after, reading, is_whole, next_whole) = (None, Duration::ZERO, true, begun);
        Self { timers, turned_down, holder, metrics, after, begun, reading, is_whole, next_whole }
    }
}

impl Task for ExpirySweep {
    const NAME: &'static str = "expiry";
    const WORK: Work = Work::Vital;
    const PERIOD: Duration = Duration::from_millis(400);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let is_first = self.after.is_none();
        if is_first {
            (self.begun, self.reading) = (Instant::now(), Duration::ZERO);
            self.is_whole = self.begun >= self.next_whole;
            if self.is_whole {
                self.next_whole = self.begun + WHOLE_PERIOD;
            }
        }
        let since = if self.is_whole { None } else { Some(RECENT) };
        let ahead = if self.holder.holds() { AHEAD } else { -OVERDUE };
        let asked = Instant::now();
        let page = within_short_timeout(user_resource::due(session.get().await?, ahead, since, self.after, PAGE)).await;
        self.reading += asked.elapsed();
        session.give_back().await;
        let mut page = page.inspect_err(|_| (self.after, self.next_whole) = (None, self.begun))?;
        let late = page.first().map_or(Duration::ZERO, |due| due.late);
        if late > RECENT {
            self.next_whole = self.begun;
        }
        if is_first {
            // While a ticket is older than most sweeps read, each sweep reads all, so the delay is complete.
            self.metrics.requests.expiry_lag.set(late.as_secs_f64());
        }
        let is_full = i64::try_from(page.len()).is_ok_and(|len| len == PAGE);
        self.after = page.last().and_then(|due| due.key).filter(|_| is_full);
        // Sorted by EM, so that a batch concerns few EMs: writing an EM costs more than writing a ticket.
        page.sort_by(|one, other| one.ticket.em.cmp(&other.ticket.em));
        for due in page {
            // Blocks while all timers are in use.
            if self.timers.send(due).await.is_err() {
                break;
            }
        }
        if self.after.is_some() {
            return Ok(Step::More);
        }
        let any_turned_down = self.turned_down.take();
        Ok(if any_turned_down { Step::Later(pause(self.reading, self.begun.elapsed())) } else { Step::Done })
    }
}

/// Returns the pause after a sweep with rejected timers; `reading` is its time in the database and `round` its whole duration.
///
/// Many tickets may be blocked and are not read again and again. The next sweep begins before the horizon of this one ends, so
/// that all other tickets are found in time.
fn pause(reading: Duration, round: Duration) -> Duration {
    HORIZON.saturating_sub(round).clamp(reading.min(HORIZON), reading * PAUSE_FACTOR)
}

/// Expires tickets when they fall due, until `stop` is cancelled.
pub async fn run_timers(
    committer: Committer,
    mut falling_due: mpsc::Receiver<DueTicket>,
    turned_down: RejectedTimers,
    stop: CancellationToken,
) {
    let (queue, rolling_back) = (DelayQueue::new(), JoinSet::new());
    let mut timers = ExpiryTimers { committer, queue, shares: EmBudgets::default(), rolling_back };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(due) = falling_due.recv(), if timers.shares.may_watch() => timers.arm(due),
            Some(due) = timers.queue.next(), if timers.shares.may_begin() => {
                timers.shares.begin(due.into_inner()).into_iter().for_each(|ticket| timers.roll_back(ticket));
            }
            Some(done) = timers.rolling_back.join_next() => timers.unmark(done),
        }
        if timers.shares.take_rejected() {
            turned_down.note();
        }
    }
}

struct ExpiryTimers {
    committer: Committer,
    queue: DelayQueue<ReleaseTicket>,
    shares: EmBudgets,
    rolling_back: JoinSet<(ReleaseTicket, bool)>,
}

impl ExpiryTimers {
    fn arm(&mut self, due: DueTicket) {
        if self.shares.watch(&due.ticket) {
            self.queue.insert(due.ticket, due.within + SLACK);
        }
    }

    fn roll_back(&mut self, ticket: ReleaseTicket) {
        let committer = self.committer.clone();
        self.rolling_back.spawn(async move {
            let deadline = Instant::now() + ROLLBACK_TIMEOUT;
            let done = committer.submit_in_background(Operation::Expire(ticket.clone()), deadline).await;
            if let Err(error) = &done {
                // The next sweep retries; the lag metric shows the delay.
                let (ticket_id, is_defect) = (ticket.ticket_id, error.is_defect());
                let error = cause(error);
                match is_defect {
                    true => tracing::error!(%ticket_id, error, "a ticket cannot expire"),
                    false => tracing::debug!(%ticket_id, error, "a ticket could not expire yet"),
                }
            }
            (ticket, done.is_ok())
        });
    }

    fn unmark(&mut self, done: Result<(ReleaseTicket, bool), JoinError>) {
        match done {
            Ok((ticket, went)) => {
                let next = self.shares.end(&ticket, went);
                next.into_iter().for_each(|ticket| self.roll_back(ticket));
            }
            Err(_) => self.shares.lose(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiry_pause_after_rejected_timers_stays_below_horizon() {
        let millis = Duration::from_millis;
        // The wait for timers is not part of the pause.
        assert!(pause(millis(50), millis(5050)) <= millis(200));
        for reading in [1, 50, 400, 500, 900, 1000].map(millis) {
            let pause = pause(reading, reading);
            assert!(reading + pause <= HORIZON && pause >= reading, "{reading:?}: {pause:?}");
        }
        // The pause is at least the reading time, and at most the horizon.
        assert_eq!(pause(millis(1500), millis(1500)), millis(1500));
        assert_eq!(pause(millis(60_000), millis(70_000)), HORIZON);
        assert_eq!(pause(millis(10), millis(10)), millis(40));
    }
}
