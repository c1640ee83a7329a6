//! What keeps the line while callers wait here: those who leave it, what dead instances left in it, and the news of more room.

use std::time::Duration;

use sqlx::postgres::PgListener;
use tokio::{sync::mpsc, time::Instant};
use uuid::Uuid;

use crate::{
    service::admission::Admission,
    store::{
        StoreError,
        session::{Session, answered},
        waiting::{self, Freed, Gone, RENEWAL},
    },
};

use super::{POLL_INTERVAL, WaitingLine};

/// How often, in polls, what stands in line for nobody is removed in any case.
const SWEEP_POLLS: u32 = 30;

/// How many requests one sweep removes.
const SWEEP_MAX: i64 = 500;

/// How many sweeps there are at most in one poll; the next one removes the rest.
const SWEEPS_MAX: usize = 10;

/// How long the database has to have answered before anybody is taken for dead.
const GRACE: Duration = Duration::from_secs(5);

/// After how much silence the connection on which room is told is tried.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Maximum number of requests that leave in one statement. After a full one, the keeper pauses for as long as it took, so that a crowd that
/// leaves takes at most half of the time of one connection.
const LEAVE_MAX: usize = 500;

/// How many requests that leave at a wait key wake another request each. They free reservations, and no capacity: however many leave at
/// once, a few requests check, and each that is granted wakes the next.
const LEFT_COUNTED_MAX: u32 = 4;

/// How often a server that stops looks whether everybody has left.
const LEAVE_POLL: Duration = Duration::from_millis(20);

/// How long to wait before listening again after the connection broke.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// Takes those out of the line who leave it, removes what dead instances left there, and lets those who wait here look from time to
/// time, until the server stops and everybody has left.
pub async fn run(line: WaitingLine, mut leaving: mpsc::UnboundedReceiver<Uuid>) {
    // Of its own: whatever else waits for connections, who leaves stands in nobody's way.
    let mut keeper =
        Keeper { session: line.store.session(), left: Vec::new(), polls: 0, answers_since: Instant::now() };
    let mut polls = tokio::time::interval(POLL_INTERVAL);
    polls.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let kept = tokio::select! {
            _ = leaving.recv_many(&mut keeper.left, LEAVE_MAX) => keeper.leave().await,
            () = line.stopping.cancelled() => break,
            _ = polls.tick() => {
                line.index().poll();
                keeper.poll(&line).await
            }
        };
        keeper.note(kept);
    }
    // All callers are being told; the last of them to go is the last to leave.
    while line.index().callers > 0 || !leaving.is_empty() {
        if tokio::time::timeout(LEAVE_POLL, leaving.recv_many(&mut keeper.left, LEAVE_MAX)).await.is_ok()
            && keeper.leave().await.is_err()
        {
            return;
        }
    }
}

/// Says that this instance lives, while somebody waits here, until the server stops.
pub async fn live(line: WaitingLine) {
    line.connect().await;
    let mut renewals = tokio::time::interval(POLL_INTERVAL);
    renewals.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = line.stopping.cancelled() => return,
            _ = renewals.tick() => {}
        }
        if line.index().callers > 0
            && let Err(error) = line.keep_alive(Instant::now() + RENEWAL).await
            && !error.is_told()
        {
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot keep those who wait in line");
        }
    }
}

struct Keeper {
    session: Session,
    /// Those who leave, until it is done.
    left: Vec<Uuid>,
    polls: u32,
    /// Since when the database has answered every time.
    answers_since: Instant,
}

impl Keeper {
    /// Takes requests out of the line, and tells everybody what they kept for themselves.
    async fn leave(&mut self) -> Result<(), StoreError> {
        while !self.left.is_empty() {
            let start = Instant::now();
            let part: Vec<_> = self.left.iter().take(LEAVE_MAX).copied().collect();
            let gone = answered(waiting::leave(self.session.get().await?, &part)).await?;
            drop(self.left.drain(..part.len()));
            self.notify(gone).await?;
            if part.len() == LEAVE_MAX {
                tokio::time::sleep(start.elapsed()).await;
            }
        }
        Ok(())
    }

    /// Does what could not be done before, and removes what dead instances left. After an outage everybody first has time to say that
    /// he lives.
    async fn poll(&mut self, line: &WaitingLine) -> Result<(), StoreError> {
        self.leave().await?;
        self.polls = self.polls.wrapping_add(1);
        let dead = answered(waiting::is_any_dead(self.session.get().await?, line.instance_id)).await?;
        let is_round = self.polls.is_multiple_of(SWEEP_POLLS);
        if self.answers_since.elapsed() < GRACE || !(dead || is_round) {
            return Ok(());
        }
        for _ in 0..SWEEPS_MAX {
            let gone = answered(waiting::sweep(self.session.get().await?, SWEEP_MAX)).await?;
            let swept = gone.requests;
            if swept > 0 {
                tracing::warn!(requests = swept, "removed what waited on an instance that is gone");
            }
            self.notify(gone).await?;
            // Those who leave meanwhile wait no longer than one step takes.
            self.leave().await?;
            if swept < SWEEP_MAX.unsigned_abs() {
                break;
            }
        }
        Ok(())
    }

    async fn notify(&mut self, gone: Gone) -> Result<(), StoreError> {
        if gone.spots.is_empty() {
            return Ok(());
        }
        let freed = gone.spots.counted_up_to(LEFT_COUNTED_MAX);
        answered(waiting::notify(self.session.get().await?, &Freed::at(&freed))).await
    }

    fn note(&mut self, kept: Result<(), StoreError>) {
        if let Err(error) = kept {
            self.session.reset_after(&error);
            self.answers_since = Instant::now();
            if !error.is_told() {
                tracing::warn!(error = &error as &dyn std::error::Error, "cannot keep the waiting line");
            }
        }
    }
}

/// Wakes waiters where others have made more room, until the server stops.
pub async fn listen(line: WaitingLine, admission: Admission) {
    loop {
        tokio::select! {
            () = line.stopping.cancelled() => return,
            heard = hear(&line, &admission) => match heard {
                // The connection is lost: a new one, at once.
                Ok(()) => continue,
                Err(error) if error.is_told() => {}
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "cannot hear of more room; looking from time to time");
                }
            }
        }
        tokio::select! {
            () = line.stopping.cancelled() => return,
            () = tokio::time::sleep(RECONNECT_PAUSE) => {}
        }
    }
}

async fn hear(line: &WaitingLine, admission: &Admission) -> Result<(), StoreError> {
    let primary = line.store.primary();
    primary.awaited().await;
    let moved = primary.moved();
    tokio::pin!(moved);
    let (pool, _taken) = primary.listening().await?;
    let mut listener = PgListener::connect_with(&pool).await?;
    // Here, where its host may be another by then.
    listener.eager_reconnect(false);
    listener.listen(waiting::CHANNEL).await?;
    // What was told while nobody listened.
    line.index().wake_first();
    loop {
        let heard = tokio::select! {
            () = &mut moved => return Ok(()),
            heard = tokio::time::timeout(SILENCE_MAX, listener.try_recv()) => heard,
        };
        let Ok(heard) = heard else {
            // A connection that is cut somewhere on its way is as silent as one on which nothing is told.
            answered(async { sqlx::query("SELECT 1").execute(&mut listener).await.map_err(StoreError::from) }).await?;
            continue;
        };
        match heard? {
            None => return Ok(()),
            Some(notification) => {
                let freed = Freed::parse(notification.payload());
                // What was committed here was told here, too, and sooner.
                if !freed.is_from(line.instance_id) {
                    wake(line, admission, &freed).await;
                }
            }
        }
    }
}

async fn wake(line: &WaitingLine, admission: &Admission, freed: &Freed) {
    if freed.anywhere {
        line.index().wake_first();
        return;
    }
    if !line.index().is_anywhere_empty()
        && let Err(error) = admission.see(&freed.em_instances()).await
    {
        tracing::warn!(error = &error as &dyn std::error::Error, "cannot see where there is more room");
    }
    line.index().wake_at(freed);
}
