//! Expiry: what no engine reported in for is rolled back when its deadline passes.
//!
//! The deadline in the ticket's row is the truth. One instance looks ahead for deadlines that come near, whoever granted the ticket, a
//! page at a time in the order in which they fall due, and hands them to its timers; the others see to what is overdue all the same, so
//! that the tickets of an instance that died expire, too. The timers watch so many tickets at once and no more: of a mass of
//! deadlines, the next are taken when the first are done. The roll-back itself is an operation like any other, judged again under
//! the locks.

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

use crate::{
    domain::operation::{Operation, Released},
    metrics::Metrics,
    service::committer::Committer,
    store::{
        StoreError, Work,
        session::{Session, answered_soon},
        user_resource::{self, Due, DueKey},
    },
};

use super::{Step, Task, lease::Holder};

mod shares;

use shares::Shares;

/// How far each sweep looks ahead.
pub const HORIZON: Duration = Duration::from_secs(2);
const AHEAD: time::Duration = time::Duration::seconds(2);

/// By how much a ticket is overdue before an instance takes it that does not hold the lease.
const OVERDUE: time::Duration = time::Duration::milliseconds(400);

/// Most rounds look back no further than this: what went before leaves dead entries at the front of the index, which the database may
/// keep for very long.
const RECENT: Duration = Duration::from_secs(5);

/// How often a round looks at all that is overdue nevertheless: for what could not go in time, or was committed late. While there is any
/// such, each round does.
const WHOLE_PERIOD: Duration = Duration::from_secs(10);

/// How many tickets one sweep reads.
const PAGE: i64 = 2000;

/// How many tickets may wait for a timer.
const WAITING_MAX: usize = 1024;

/// So that a timer does not fire just before the database's clock gets there.
const SLACK: Duration = Duration::from_millis(2);

/// How long one roll-back may wait for its locks; the next sweep tries again.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(5);

/// After a round in which tickets were turned down, the next begins after at most so many times as long as reading took.
const PAUSE_FACTOR: u32 = 4;

/// Where to tell of tickets that fall due soon, and where they are heard of.
pub fn channel() -> (mpsc::Sender<Due>, mpsc::Receiver<Due>) {
    mpsc::channel(WAITING_MAX)
}

/// Whether timers have turned tickets down since somebody last asked: those of an EM that has its share.
#[derive(Clone, Debug, Default)]
pub struct TurnedDown(Arc<AtomicBool>);

impl TurnedDown {
    fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Looks for what falls due.
#[derive(Debug)]
pub struct Sweep {
    timers: mpsc::Sender<Due>,
    turned_down: TurnedDown,
    holder: Holder,
    metrics: Metrics,
    /// Where the next page begins.
    after: Option<DueKey>,
    /// When the round through all that falls due began.
    begun: Instant,
    /// What the database took of it: the rest was waiting for the timers.
    reading: Duration,
    /// Whether it looks at all that is overdue, and when the next one has to.
    is_whole: bool,
    next_whole: Instant,
}

impl Sweep {
    /// Hands what it finds to `timers`, and tells `metrics` how late the first of it is.
    pub fn new(timers: mpsc::Sender<Due>, turned_down: TurnedDown, holder: Holder, metrics: Metrics) -> Self {
        let begun = Instant::now();
        let (after, reading, is_whole, next_whole) = (None, Duration::ZERO, true, begun);
        Self { timers, turned_down, holder, metrics, after, begun, reading, is_whole, next_whole }
    }
}

impl Task for Sweep {
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
        let page = answered_soon(user_resource::due(session.get().await?, ahead, since, self.after, PAGE)).await;
        self.reading += asked.elapsed();
        session.give_back().await;
        let mut page = page.inspect_err(|_| (self.after, self.next_whole) = (None, self.begun))?;
        let late = page.first().map_or(Duration::ZERO, |due| due.late);
        if late > RECENT {
            self.next_whole = self.begun;
        }
        if is_first {
            // While anything is older than what most rounds look at, each round looks at all.
            self.metrics.requests.expiry_lag.set(late.as_secs_f64());
        }
        let is_full = i64::try_from(page.len()).is_ok_and(|len| len == PAGE);
        self.after = page.last().and_then(|due| due.key).filter(|_| is_full);
        // Of a mass of deadlines, a batch is to concern few EMs: what is written of each costs more than what is written of a ticket.
        page.sort_by(|one, other| one.ticket.em.cmp(&other.ticket.em));
        for due in page {
            // Waits while the timers have their hands full.
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

/// How long to wait after a round that took so long, `reading` of it in the database, and in which tickets were turned down. Of what cannot
/// go now there may be very much, and it is not read again and again; but whatever else falls due is found in time, where the next round
/// begins before that is over which this one has looked at.
fn pause(reading: Duration, round: Duration) -> Duration {
    HORIZON.saturating_sub(round).clamp(reading.min(HORIZON), reading * PAUSE_FACTOR)
}

/// Rolls tickets back when they fall due, until `stop`.
pub async fn run_timers(
    committer: Committer,
    mut falling_due: mpsc::Receiver<Due>,
    turned_down: TurnedDown,
    stop: CancellationToken,
) {
    let (queue, rolling_back) = (DelayQueue::new(), JoinSet::new());
    let mut timers = Timers { committer, queue, shares: Shares::new(turned_down), rolling_back };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(due) = falling_due.recv(), if timers.shares.may_watch() => timers.set(due),
            Some(due) = timers.queue.next(), if timers.shares.may_begin() => {
                timers.shares.begin(due.into_inner()).into_iter().for_each(|ticket| timers.roll_back(ticket));
            }
            Some(done) = timers.rolling_back.join_next() => timers.unmark(done),
        }
    }
}

struct Timers {
    committer: Committer,
    queue: DelayQueue<Released>,
    shares: Shares,
    rolling_back: JoinSet<(Released, bool)>,
}

impl Timers {
    fn set(&mut self, due: Due) {
        if self.shares.watch(&due.ticket) {
            self.queue.insert(due.ticket, due.within + SLACK);
        }
    }

    fn roll_back(&mut self, ticket: Released) {
        let committer = self.committer.clone();
        self.rolling_back.spawn(async move {
            let deadline = Instant::now() + ROLLBACK_TIMEOUT;
            let done = committer.submit_in_background(Operation::Expire(ticket.clone()), deadline).await;
            if let Err(error) = &done {
                // The next sweep tries again, and the lag of this task tells how late it is.
                let (ticket_id, is_defect) = (ticket.ticket_id, error.is_defect());
                let error: &dyn std::error::Error = error;
                match is_defect {
                    true => tracing::error!(%ticket_id, error, "a ticket cannot expire"),
                    false => tracing::debug!(%ticket_id, error, "a ticket could not expire yet"),
                }
            }
            (ticket, done.is_ok())
        });
    }

    fn unmark(&mut self, done: Result<(Released, bool), JoinError>) {
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
    fn after_tickets_were_turned_down_others_are_found_before_they_are_due() {
        let millis = Duration::from_millis;
        // What a round waits for the timers is no reason to rest.
        assert!(pause(millis(50), millis(5050)) <= millis(200));
        for reading in [1, 50, 400, 500, 900, 1000].map(millis) {
            let pause = pause(reading, reading);
            assert!(reading + pause <= HORIZON && pause >= reading, "{reading:?}: {pause:?}");
        }
        // However long it takes, as long again is left to others, and no longer than it looks ahead.
        assert_eq!(pause(millis(1500), millis(1500)), millis(1500));
        assert_eq!(pause(millis(60_000), millis(70_000)), HORIZON);
        assert_eq!(pause(millis(10), millis(10)), millis(40));
    }
}
