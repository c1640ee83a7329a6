//! Expiry: what no engine reported in for is rolled back when its deadline passes.
//!
//! The deadline in the ticket's row is the truth. One instance looks ahead for deadlines that come near, whoever granted the ticket, a
//! page at a time in the order in which they fall due, and hands them to its timers; the others see to what is overdue all the same, so
//! that the tickets of an instance that died expire, too. The timers watch so many tickets at once and no more: of a mass of
//! deadlines, the next are taken when the first are done. The roll-back itself is an operation like any other, judged again under
//! the locks.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{sync::mpsc, task::JoinSet, time::Instant};
use tokio_stream::StreamExt as _;
use tokio_util::{sync::CancellationToken, time::DelayQueue};
use uuid::Uuid;

use crate::{
    domain::{
        em::EmInstance,
        operation::{Operation, Released},
    },
    metrics::Metrics,
    service::committer::Committer,
    store::{
        StoreError,
        session::{Session, answered_soon},
        user_resource::{self, Due, DueKey},
    },
};

use super::{Step, Task, lease::Holder};

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

/// How many tickets have a timer, or are being rolled back; and how many of one EM.
const WATCHED_MAX: usize = 8192;
const WATCHED_OF_EM_MAX: usize = 4096;

/// How many tickets are being rolled back: some batches of them, so that there is always one that waits; and how many of one EM.
const UNDER_WAY_MAX: usize = 2048;
const UNDER_WAY_OF_EM_MAX: usize = 1024;

/// How many of an EM of which none has gone yet: whether somebody holds it is known only when the first have been tried in vain, and
/// until then several that are held must not have all there is.
const UNDER_WAY_OF_EM_FIRST: usize = 256;

/// How many tickets may wait for a timer.
const WAITING_MAX: usize = 1024;

/// So that a timer does not fire just before the database's clock gets there.
const SLACK: Duration = Duration::from_millis(2);

/// How long one roll-back may wait for its locks; the next sweep tries again.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(5);

/// After a round in which tickets were turned down, the next begins after so many times as long as it took; at most so late.
const PAUSE_FACTOR: u32 = 4;
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Where to tell of tickets that fall due soon, and where they are heard of.
pub fn channel() -> (mpsc::Sender<Due>, mpsc::Receiver<Due>) {
    mpsc::channel(WAITING_MAX)
}

/// Whether timers have turned tickets down since somebody last asked: those of an EM that has its share.
#[derive(Clone, Debug, Default)]
pub struct TurnedDown(Arc<AtomicBool>);

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
    /// Whether it looks at all that is overdue, and when the next one has to.
    is_whole: bool,
    next_whole: Instant,
}

impl Sweep {
    /// Hands what it finds to `timers`, and tells `metrics` how late the first of it is.
    pub fn new(timers: mpsc::Sender<Due>, turned_down: TurnedDown, holder: Holder, metrics: Metrics) -> Self {
        let begun = Instant::now();
        Self { timers, turned_down, holder, metrics, after: None, begun, is_whole: true, next_whole: begun }
    }
}

impl Task for Sweep {
    const NAME: &'static str = "expiry";
    const PERIOD: Duration = Duration::from_millis(400);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let is_first = self.after.is_none();
        if is_first {
            self.begun = Instant::now();
            self.is_whole = self.begun >= self.next_whole;
            if self.is_whole {
                self.next_whole = self.begun + WHOLE_PERIOD;
            }
        }
        let since = if self.is_whole { None } else { Some(RECENT) };
        let ahead = if self.holder.holds() { AHEAD } else { -OVERDUE };
        let page = answered_soon(user_resource::due(session.get().await?, ahead, since, self.after, PAGE)).await;
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
        // Of what cannot go now there may be very much: it is not read again and again.
        let any_turned_down = self.turned_down.0.swap(false, Ordering::Relaxed);
        let pause = (self.begun.elapsed() * PAUSE_FACTOR).min(PAUSE_MAX);
        Ok(if any_turned_down { Step::Later(pause) } else { Step::Done })
    }
}

/// Rolls tickets back when they fall due, until `stop`.
pub async fn run_timers(
    committer: Committer,
    mut falling_due: mpsc::Receiver<Due>,
    turned_down: TurnedDown,
    stop: CancellationToken,
) {
    let mut timers = Timers {
        committer,
        queue: DelayQueue::new(),
        watched: HashSet::new(),
        shares: HashMap::new(),
        rolling_back: JoinSet::new(),
        turned_down,
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(due) = falling_due.recv(), if timers.watched.len() < WATCHED_MAX => timers.set(due),
            Some(due) = timers.queue.next(), if timers.rolling_back.len() < UNDER_WAY_MAX => timers.roll_back(due.into_inner()),
            Some(done) = timers.rolling_back.join_next() => timers.unmark(done),
        }
    }
}

struct Timers {
    committer: Committer,
    queue: DelayQueue<Released>,
    /// Tickets with a timer, or whose roll-back is under way.
    watched: HashSet<Uuid>,
    /// What each EM with such tickets has of all that.
    shares: HashMap<EmInstance, Share>,
    rolling_back: JoinSet<(Released, bool)>,
    turned_down: TurnedDown,
}

/// What one EM takes of what there is for all.
#[derive(Debug)]
struct Share {
    watched: usize,
    under_way: usize,
    /// How many may be under way: one, for an EM that somebody holds; of one that goes on, soon as many as ever.
    under_way_max: usize,
    /// Overdue, and next when one that is under way is done.
    next: VecDeque<Released>,
}

impl Default for Share {
    fn default() -> Self {
        Self { watched: 0, under_way: 0, under_way_max: UNDER_WAY_OF_EM_FIRST, next: VecDeque::new() }
    }
}

impl Share {
    fn watched_max(&self) -> usize {
        WATCHED_OF_EM_MAX.min(self.under_way_max * 4)
    }

    fn note(&mut self, went: bool) {
        self.under_way_max = if went { (self.under_way_max * 2).min(UNDER_WAY_OF_EM_MAX) } else { 1 };
    }

    /// What waits beyond what may be watched, the last first to go: it is watched no longer.
    fn give_back(&mut self) -> VecDeque<Released> {
        let excess = self.watched.saturating_sub(self.watched_max()).min(self.next.len());
        self.watched -= excess;
        self.next.split_off(self.next.len() - excess)
    }
}

impl Timers {
    fn set(&mut self, due: Due) {
        if self.watched.contains(&due.ticket.ticket_id) {
            return;
        }
        let share = self.shares.entry(due.ticket.em.clone()).or_default();
        if share.watched >= share.watched_max() {
            self.turned_down.0.store(true, Ordering::Relaxed);
            return;
        }
        share.watched += 1;
        self.watched.insert(due.ticket.ticket_id);
        self.queue.insert(due.ticket, due.within + SLACK);
    }

    fn roll_back(&mut self, ticket: Released) {
        let share = self.shares.entry(ticket.em.clone()).or_default();
        if share.under_way >= share.under_way_max {
            share.next.push_back(ticket);
            let given_back = share.give_back();
            self.unwatch(given_back);
            return;
        }
        share.under_way += 1;
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

    fn unmark(&mut self, done: Result<(Released, bool), tokio::task::JoinError>) {
        let Ok((ticket, went)) = done else {
            // Which one is not known: without marks, the next sweep finds what is still there.
            self.watched.clear();
            self.shares.clear();
            return;
        };
        self.watched.remove(&ticket.ticket_id);
        if let Some(share) = self.shares.get_mut(&ticket.em) {
            share.watched = share.watched.saturating_sub(1);
            share.under_way = share.under_way.saturating_sub(1);
            share.note(went);
            if share.watched == 0 && went {
                self.shares.remove(&ticket.em);
                return;
            }
            let room = share.under_way_max.saturating_sub(share.under_way).min(share.next.len());
            let next: Vec<Released> = share.next.drain(..room).collect();
            let given_back = share.give_back();
            self.unwatch(given_back);
            next.into_iter().for_each(|ticket| self.roll_back(ticket));
        }
    }

    /// Leaves these to the next sweep, which finds them again.
    fn unwatch(&mut self, tickets: VecDeque<Released>) {
        if !tickets.is_empty() {
            self.turned_down.0.store(true, Ordering::Relaxed);
        }
        for ticket in tickets {
            self.watched.remove(&ticket.ticket_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::name::Name;

    #[test]
    fn a_held_em_keeps_little_of_what_there_is_for_all() {
        let mut share = Share::default();
        assert!(
            share.watched_max() * 4 < WATCHED_MAX && share.under_way_max * 4 < UNDER_WAY_MAX,
            "there is room for others beside several that may be held"
        );
        share.note(false);
        assert_eq!((share.under_way_max, share.watched_max()), (1, 4));
        for _ in 0..20 {
            share.note(true);
        }
        assert_eq!((share.under_way_max, share.watched_max()), (UNDER_WAY_OF_EM_MAX, WATCHED_OF_EM_MAX));
        assert!(
            share.watched_max() < WATCHED_MAX && share.under_way_max < UNDER_WAY_MAX,
            "there is always room for others"
        );
    }

    #[test]
    fn what_waits_on_an_em_that_turns_out_to_be_held_is_watched_no_longer() {
        let (user, em) = (Name::parse("user", "hadoop").unwrap(), EmInstance::parse("em", "ecm", "held").unwrap());
        let ticket = |n| Released { ticket_id: Uuid::from_u128(n), user: user.clone(), em: em.clone() };
        let (watched, under_way) = (WATCHED_OF_EM_MAX, UNDER_WAY_OF_EM_MAX);
        let next = (0..watched - under_way).map(|n| ticket(n as u128)).collect();
        let mut share = Share { watched, under_way, under_way_max: under_way, next };
        assert!(share.give_back().is_empty(), "all may be watched while it goes on");
        // All that are under way are tried in vain, one after another; and some with timers fall due yet.
        for left in (0..under_way).rev() {
            (share.watched, share.under_way) = (share.watched - 1, left);
            share.note(false);
            share.give_back();
            assert!(share.watched <= share.watched_max().max(left), "{share:?}");
        }
        (share.watched, share.under_way) = (11, 1);
        share.next = (0..10).map(ticket).collect();
        let given_back = share.give_back();
        assert_eq!((share.watched, share.next.len()), (share.watched_max(), 3));
        assert_eq!(given_back, (3..10).map(ticket).collect::<Vec<_>>(), "those that fell due last");
    }
}
