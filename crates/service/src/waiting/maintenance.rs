//! Maintenance of the wait queues: three background tasks of each instance.
//!
//! [`run`] deletes queue entries of ended requests and of dead instances, and polls the local waiters. [`renew`] renews the
//! instance's row. [`listen`] receives notifications of other instances and wakes local waiters.
//!
//! An instance is dead if its row has expired, or if it missed a renewal and its connections have ended. Never: deletes
//! entries of an instance that lives before their deadlines. All instances first have time to renew after an outage.
//! Caller: the server, which spawns the tasks.

use std::{sync::atomic::Ordering, time::Duration};

use sqlx::{PgConnection, postgres::PgListener};
use tokio::{sync::mpsc, time::Instant};

use crate::admission::Admission;
use rm_engine::waiter_index::FreedCapacity;
use rm_model::wait_queue::{RESERVATIONS_COUNTED_MAX, RerankedRequest};
use rm_store::{
    StoreError,
    session::{Session, within_timeout},
    waiting::{self, Departure, FreedNotification, LeftTurn, RENEWAL, RemovedRequests},
};
use rm_telemetry::cause;

use super::{LocalWaitQueue, POLL_INTERVAL, Waiters};

/// Number of polls after which entries of ended calls are searched, and entries without a live instance even if no instance is known
/// to be dead.
const SWEEP_POLLS: u32 = 30;

/// Maximum number of requests that one sweep ends.
const SWEEP_MAX: i64 = 500;

/// Maximum number of sweeps per poll; the next poll continues.
const SWEEPS_MAX: usize = 10;

/// Time without a database error before an instance may be considered dead.
const GRACE: Duration = Duration::from_secs(5);

/// Time without notifications after which the listening connection is probed.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Interval between checks whether other instances have died.
const DEATHS_CHECKED: Duration = Duration::from_millis(200);

/// Maximum number of requests that one statement removes. The task pauses after a full statement for its duration, so that a
/// mass cancellation uses at most half of one connection.
const LEAVE_MAX: usize = 500;

/// Maximum number of locked requests that removals wait for until the next poll.
const LOCKED_MAX: usize = 8;

/// Interval between checks at shutdown whether all requests have ended.
const LEAVE_POLL: Duration = Duration::from_millis(20);

/// Maximum number of attempts to hand a turn on, and the pause between them.
const HANDS_MAX: usize = 10;
const HAND_PAUSE: Duration = Duration::from_millis(10);

/// Pause before reconnecting after an error of the listening connection.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// Removes ended requests, deletes entries of dead instances, and polls the local waiters. Returns at shutdown, after all
/// requests have ended.
pub async fn run(line: LocalWaitQueue, leaving: mpsc::UnboundedReceiver<Departure>) {
    // A session of its own: a shortage of connections must not delay the removal of entries that reserve capacity.
    let mut keeper = WaitQueueMaintenance {
        session: line.store.session(),
        leaving,
        left: Vec::new(),
        locked: Vec::new(),
        turns: Vec::new(),
        polls: 0,
        is_behind: false,
        answers_since: Instant::now(),
    };
    let mut checks = tokio::time::interval(DEATHS_CHECKED);
    checks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut polls = tokio::time::interval(POLL_INTERVAL);
    polls.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let kept = tokio::select! {
            _ = keeper.leaving.recv_many(&mut keeper.left, LEAVE_MAX) => keeper.remove_entries().await,
            () = line.stopping.cancelled() => break,
            _ = polls.tick() => {
                line.change(Waiters::poll);
                keeper.poll(&line).await
            }
            _ = checks.tick(), if keeper.may_check() && line.index().callers > 0 => keeper.check_deaths(&line).await,
        };
        keeper.wake_and_notify(kept);
    }
    // All callers get their replies now. The loop ends after the last one has been removed.
    keeper.left.append(&mut keeper.locked);
    while !keeper.left.is_empty() || line.index().callers > 0 || !keeper.leaving.is_empty() {
        // The timeout ends a wait for calls that do not end yet.
        let _ = tokio::time::timeout(LEAVE_POLL, keeper.leaving.recv_many(&mut keeper.left, LEAVE_MAX)).await;
        if keeper.remove_entries().await.is_err() {
            return;
        }
    }
}

/// Renews the instance's row while requests wait here, until shutdown.
pub async fn renew(line: LocalWaitQueue) {
    line.connect().await;
    let mut renewals = tokio::time::interval(POLL_INTERVAL);
    renewals.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = line.stopping.cancelled() => return,
            _ = renewals.tick() => {}
        }
        if line.index().callers == 0 {
            line.is_idle.store(true, Ordering::Relaxed);
        } else if let Err(error) = line.keep_alive(Instant::now() + RENEWAL).await
            && !error.is_logged()
        {
            tracing::warn!(error = cause(&error), "cannot maintain the waiting requests");
        }
    }
}

struct WaitQueueMaintenance {
    session: Session,
    /// Calls that end.
    leaving: mpsc::UnboundedReceiver<Departure>,
    /// Calls that have ended, until this is committed.
    left: Vec<Departure>,
    /// Calls that have ended, and whose requests another program has locked.
    locked: Vec<Departure>,
    /// Turns of requests that have left, until they are handed on.
    turns: Vec<LeftTurn>,
    polls: u32,
    /// Whether the last poll swept as many requests as it may.
    is_behind: bool,
    /// Time since which the database has replied without an error.
    answers_since: Instant,
}

impl WaitQueueMaintenance {
    /// Deletes the entries in `left`, and notifies all instances of the freed reservations. If another program has locked one of them,
    /// they leave one by one, and the locked ones at the next poll.
    async fn remove_entries(&mut self) -> Result<(), StoreError> {
        let mut singles = 0;
        while !self.left.is_empty() {
            let start = Instant::now();
            let most = if singles > 0 { 1 } else { LEAVE_MAX };
            let part: Vec<_> = self.left.iter().take(most).copied().collect();
            let gone = match within_timeout(waiting::leave(self.session.get().await?, &part)).await {
                Err(error) if error.is_lock_timeout() && part.len() > 1 => {
                    singles = part.len();
                    continue;
                }
                Err(error) if error.is_lock_timeout() && self.locked.len() < LOCKED_MAX => {
                    self.locked.extend(&part);
                    RemovedRequests::default()
                }
                gone => gone?,
            };
            singles = singles.saturating_sub(1);
            drop(self.left.drain(..part.len()));
            self.notify(gone).await?;
            if part.len() == LEAVE_MAX {
                tokio::time::sleep(start.elapsed()).await;
            }
        }
        Ok(())
    }

    /// Removes the requests of ended calls that were not found before: a commit can take effect long after its call.
    async fn remove_late(&mut self, line: &LocalWaitQueue) -> Result<(), StoreError> {
        let claims = within_timeout(waiting::claims_of(self.session.get().await?, line.instance_id)).await?;
        // A call that began later is not among the claims, so the calls are read after them.
        let mut ended = line.ended(claims);
        ended.retain(|call| self.locked.iter().all(|locked| locked.claim != call.claim));
        // The departures of these calls are here already, unless one is on its way: it states whether the call was cancelled.
        if self.leaving.is_empty() {
            self.left.extend(ended);
            self.remove_entries().await?;
        }
        Ok(())
    }

    /// Retries failed removals and deletes the entries of dead instances. Instances first have [`GRACE`] to renew after an
    /// outage.
    async fn poll(&mut self, line: &LocalWaitQueue) -> Result<(), StoreError> {
        self.left.append(&mut self.locked);
        self.remove_entries().await?;
        if !self.turns.is_empty() {
            self.notify(RemovedRequests::default()).await?;
        }
        self.polls = self.polls.wrapping_add(1);
        let is_round = self.polls.is_multiple_of(SWEEP_POLLS);
        if is_round {
            self.remove_late(line).await?;
        }
        let was_idle = line.is_idle.load(Ordering::Relaxed);
        let session = self.session().await?;
        let dead = within_timeout(waiting::is_any_dead(session, line.instance_id, was_idle)).await?;
        if !self.may_check() || !(dead || is_round || self.is_behind) {
            return Ok(());
        }
        self.sweep().await
    }

    /// Whether all instances have had time to renew their rows after an outage.
    fn may_check(&self) -> bool {
        self.answers_since.elapsed() >= GRACE
    }

    /// Ends the waiting calls of instances that have died since the last check.
    async fn check_deaths(&mut self, line: &LocalWaitQueue) -> Result<(), StoreError> {
        let was_idle = line.is_idle.load(Ordering::Relaxed);
        let session = self.session().await?;
        if within_timeout(waiting::end_dead_instances(session, line.instance_id)).await? == 0 {
            return Ok(());
        }
        let session = self.session().await?;
        let dead = within_timeout(waiting::is_any_dead(session, line.instance_id, was_idle)).await?;
        if dead && self.may_check() { self.sweep().await } else { Ok(()) }
    }

    /// Returns the connection. A new one follows an outage, perhaps unnoticed here.
    async fn session(&mut self) -> Result<&mut PgConnection, StoreError> {
        if !self.session.is_current() {
            self.answers_since = Instant::now();
        }
        self.session.get().await
    }

    /// Deletes the entries of dead instances, and of requests after their deadlines.
    async fn sweep(&mut self) -> Result<(), StoreError> {
        self.is_behind = true;
        for _ in 0..SWEEPS_MAX {
            let gone = within_timeout(waiting::sweep(self.session.get().await?, SWEEP_MAX)).await?;
            let swept = gone.requests;
            if swept > 0 {
                tracing::warn!(requests = swept, "ended waiting requests whose instance or caller is gone");
            }
            self.notify(gone).await?;
            // Ended requests wait no longer than one sweep.
            self.remove_entries().await?;
            if swept < SWEEP_MAX.unsigned_abs() {
                self.is_behind = false;
                break;
            }
        }
        Ok(())
    }

    async fn notify(&mut self, gone: RemovedRequests) -> Result<(), StoreError> {
        if gone.wait_keys.is_empty() && self.turns.is_empty() {
            return Ok(());
        }
        let freed = gone.wait_keys.counted_up_to(RESERVATIONS_COUNTED_MAX);
        self.turns.extend(gone.turns);
        // Freed capacity wakes the next request, which must not take the turn at its earlier rank time.
        let mut parts = self.hand().await?;
        parts.extend(FreedNotification::at(&freed));
        within_timeout(waiting::notify(self.session.get().await?, &parts)).await?;
        for _ in 0..HANDS_MAX {
            if self.turns.is_empty() {
                break;
            }
            tokio::time::sleep(HAND_PAUSE).await;
            let parts = self.hand().await?;
            within_timeout(waiting::notify(self.session.get().await?, &parts)).await?;
        }
        Ok(())
    }

    /// Hands turns to the next own requests, and returns the notifications for these. Keeps the turns whose heirs another transaction
    /// has.
    async fn hand(&mut self) -> Result<Vec<FreedNotification>, StoreError> {
        if self.turns.is_empty() {
            return Ok(Vec::new());
        }
        let (heirs, locked) = within_timeout(waiting::hand(self.session.get().await?, &self.turns)).await?;
        self.turns = locked;
        let heirs = heirs.into_iter().map(|position| RerankedRequest { position, decided_at: None });
        Ok(FreedNotification::reranked(heirs))
    }

    fn wake_and_notify(&mut self, kept: Result<(), StoreError>) {
        if let Err(error) = kept {
            self.session.reset_after(&error);
            // Another instance may have locked the rows.
            if !error.is_lock_timeout() {
                self.answers_since = Instant::now();
            }
            if !error.is_logged() {
                tracing::warn!(error = cause(&error), "cannot maintain the wait queues");
            }
        }
    }
}

/// Wakes local waiters when other instances free capacity, until shutdown.
pub async fn listen(line: LocalWaitQueue, admission: Admission) {
    loop {
        tokio::select! {
            () = line.stopping.cancelled() => return,
            heard = handle_notification(&line, &admission) => {
                line.set_listener(None);
                match heard {
                    // The connection is lost; reconnect immediately.
                    Ok(()) => continue,
                    Err(error) if error.is_logged() => {}
                    Err(error) => {
                        tracing::warn!(error = cause(&error), "cannot listen for freed capacity; polling instead");
                    }
                }
            }
        }
        tokio::select! {
            () = line.stopping.cancelled() => return,
            () = tokio::time::sleep(RECONNECT_PAUSE) => {}
        }
    }
}

async fn handle_notification(line: &LocalWaitQueue, admission: &Admission) -> Result<(), StoreError> {
    let primary = line.store.primary();
    primary.awaited().await;
    let moved = primary.moved();
    tokio::pin!(moved);
    let (pool, _taken) = primary.listening().await?;
    let mut listener = PgListener::connect_with(&pool).await?;
    // The loop reconnects itself, because the primary may be another host by then.
    listener.eager_reconnect(false);
    let process = waiting::listener_process(&mut listener).await?;
    listener.listen(waiting::CHANNEL).await?;
    line.set_listener(process);
    // Notifications before `LISTEN` are lost, so wake the heads of all queues.
    line.change(Waiters::wake_first);
    loop {
        let heard = tokio::select! {
            () = &mut moved => return Ok(()),
            heard = tokio::time::timeout(SILENCE_MAX, listener.try_recv()) => heard,
        };
        let Ok(heard) = heard else {
            // A cut connection is as silent as one without notifications.
            within_timeout(async { sqlx::query("SELECT 1").execute(&mut listener).await.map_err(StoreError::from) })
                .await?;
            continue;
        };
        match heard? {
            None => return Ok(()),
            Some(notification) => {
                let freed = FreedNotification::parse(notification.payload());
                // Commits of this instance have woken its waiters already.
                if !freed.is_from(line.instance_id) {
                    wake(line, admission, &freed).await;
                }
            }
        }
    }
}

async fn wake(line: &LocalWaitQueue, admission: &Admission, freed: &FreedNotification) {
    line.end_calls(&freed.ended_calls().collect::<Vec<_>>());
    line.rerank(freed.reranked_requests());
    if freed.wait_keys.is_empty() && !freed.anywhere {
        return;
    }
    if freed.anywhere {
        line.change(Waiters::wake_first);
        return;
    }
    if !line.index().is_anywhere_empty()
        && let Err(error) = match freed.is_of_conditions {
            true => admission.survey_of(freed.em_instances()).await,
            false => admission.refresh(&freed.em_instances()).await,
        }
    {
        tracing::warn!(error = cause(&error), "cannot read the freed capacity");
    }
    let freed = FreedCapacity { wait_keys: freed.wait_keys.clone(), ems: freed.em_keys().clone() };
    line.change(|index| index.wake_at(&freed));
}
