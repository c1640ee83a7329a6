//! Expiry: what no engine reported in for is rolled back when its deadline passes.
//!
//! The deadline in the ticket's row is the truth. One instance looks ahead for deadlines that come near, whoever granted the ticket, a
//! page at a time in the order in which they fall due, and hands them to its timers; the others see to what is overdue all the same, so
//! that the tickets of an instance that died expire, too. The timers watch so many tickets at once and no more: of a mass of
//! deadlines, the next are taken when the first are done. The roll-back itself is an operation like any other, judged again under
//! the locks.

use std::{collections::HashSet, time::Duration};

use tokio::{sync::mpsc, task::JoinSet, time::Instant};
use tokio_stream::StreamExt as _;
use tokio_util::{sync::CancellationToken, time::DelayQueue};
use uuid::Uuid;

use crate::{
    domain::operation::{Operation, Released},
    service::committer::Committer,
    store::{
        StoreError,
        session::{Session, answered},
        user_resource::{self, Due, DueKey},
    },
};

use super::{Step, Task, lease::Holder};

/// How far each sweep looks ahead.
pub const HORIZON: Duration = Duration::from_secs(2);

/// By how much a ticket is overdue before an instance takes it that does not hold the lease.
const OVERDUE: time::Duration = time::Duration::seconds(1);

/// How many tickets one sweep reads.
const PAGE: i64 = 1000;

/// How many tickets have a timer, or are being rolled back.
const WATCHED_MAX: usize = 8192;

/// How many tickets are being rolled back: some batches of them, so that there is always one that waits.
const UNDER_WAY_MAX: usize = 2048;

/// How many tickets may wait for a timer.
const WAITING_MAX: usize = 1024;

/// So that a timer does not fire just before the database's clock gets there.
const SLACK: Duration = Duration::from_millis(2);

/// How long one roll-back may wait for its locks; the next sweep tries again.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(5);

/// Where to tell of tickets that fall due soon, and where they are heard of.
pub fn channel() -> (mpsc::Sender<Due>, mpsc::Receiver<Due>) {
    mpsc::channel(WAITING_MAX)
}

/// Looks for what falls due.
#[derive(Debug)]
pub struct Sweep {
    timers: mpsc::Sender<Due>,
    holder: Holder,
    /// Where the next page begins.
    after: Option<DueKey>,
}

impl Sweep {
    /// Hands what it finds to `timers`.
    pub fn new(timers: mpsc::Sender<Due>, holder: Holder) -> Self {
        Self { timers, holder, after: None }
    }
}

impl Task for Sweep {
    const NAME: &'static str = "expiry";
    const PERIOD: Duration = Duration::from_millis(500);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let ahead = if self.holder.holds() { time::Duration::seconds(2) } else { -OVERDUE };
        let page = answered(user_resource::due(session.get().await?, ahead, self.after, PAGE)).await;
        let page = page.inspect_err(|_| self.after = None)?;
        self.after =
            page.last().and_then(|due| due.key).filter(|_| i64::try_from(page.len()).is_ok_and(|len| len == PAGE));
        for due in page {
            // Waits while the timers have their hands full.
            if self.timers.send(due).await.is_err() {
                break;
            }
        }
        Ok(if self.after.is_some() { Step::More } else { Step::Done })
    }
}

/// Rolls tickets back when they fall due, until `stop`.
pub async fn run_timers(committer: Committer, mut falling_due: mpsc::Receiver<Due>, stop: CancellationToken) {
    let mut timers =
        Timers { committer, queue: DelayQueue::new(), watched: HashSet::new(), rolling_back: JoinSet::new() };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(due) = falling_due.recv(), if timers.watched.len() < WATCHED_MAX => timers.set(due),
            Some(due) = timers.queue.next(), if timers.rolling_back.len() < UNDER_WAY_MAX => timers.roll_back(due.into_inner()),
            Some(done) = timers.rolling_back.join_next() => timers.forget(done),
        }
    }
}

struct Timers {
    committer: Committer,
    queue: DelayQueue<Released>,
    /// Tickets with a timer, or whose roll-back is under way.
    watched: HashSet<Uuid>,
    rolling_back: JoinSet<Uuid>,
}

impl Timers {
    fn set(&mut self, due: Due) {
        if self.watched.insert(due.ticket.ticket_id) {
            self.queue.insert(due.ticket, due.within + SLACK);
        }
    }

    fn roll_back(&mut self, ticket: Released) {
        let committer = self.committer.clone();
        self.rolling_back.spawn(async move {
            let ticket_id = ticket.ticket_id;
            let deadline = Instant::now() + ROLLBACK_TIMEOUT;
            if let Err(error) = committer.submit_in_background(Operation::Expire(ticket), deadline).await {
                // The next sweep tries again, and the lag of this task tells how late it is.
                tracing::debug!(%ticket_id, error = &error as &dyn std::error::Error, "a ticket could not expire yet");
            }
            ticket_id
        });
    }

    fn forget(&mut self, done: Result<Uuid, tokio::task::JoinError>) {
        match done {
            Ok(ticket_id) => {
                self.watched.remove(&ticket_id);
            }
            // Which one is not known: without marks, the next sweep finds what is still there.
            Err(_) => self.watched.clear(),
        }
    }
}
