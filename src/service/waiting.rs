//! The waiting line of this instance: whose callers wait here, where they stand, and who wakes them.
//!
//! The line itself is in the database, and decides who may be granted what. Here is only who looks again, and when: whoever
//! commits more room, or leaves the line, notifies all instances of the spots, and each wakes the first of its waiters there. One
//! who is granted wakes the next, so that as many look as can be served, and hardly more. A slow poll is the net below.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::postgres::PgListener;
use tokio::{
    sync::{Notify, mpsc},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    domain::{
        line::{Place, Spots},
        operation::{Wait, Waiting},
    },
    error::Error,
    metrics::{Held, Metrics},
    store::{
        Store, StoreError,
        session::{Session, answered},
        waiting::{self, Freed, Gone, SpotKey},
    },
};

use super::judge::Judge;

/// How many callers may wait here at once.
const WAITERS_MAX: usize = 4000;

/// How many waiters at a spot look at once when there is more room; each that is granted wakes another.
const WAKE_MAX: usize = 16;

/// How many others look at each poll, in turn.
const TURN_MAX: usize = 64;

/// How often an instance with waiters says that it lives, looks for dead ones, and lets the first in line look again.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How often, in polls, what stands in line for nobody is removed in any case.
const SWEEP_POLLS: u32 = 30;

/// How many requests one sweep removes; the next one removes the rest.
const SWEEP_MAX: i64 = 1000;

/// How long the database has to have answered before anybody is taken for dead.
const GRACE: Duration = Duration::from_secs(5);

/// How long a waiter pauses after a failure that may pass.
const FAILURE_PAUSE: Duration = Duration::from_millis(500);

/// After how much silence the connection on which room is told is tried.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// How many leave the line in one statement.
const LEAVE_MAX: usize = 1000;

/// How often a server that stops looks whether everybody has left.
const LEAVE_POLL: Duration = Duration::from_millis(20);

/// How long to wait before listening again after the connection broke.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// The waiters of this instance; clones share them.
#[derive(Clone, Debug)]
pub struct WaitingLine {
    store: Store,
    instance_id: Uuid,
    index: Arc<Mutex<Index>>,
    leaving: mpsc::UnboundedSender<Uuid>,
    stopping: CancellationToken,
    metrics: Metrics,
    kept_alive: Arc<tokio::sync::Mutex<Option<Instant>>>,
}

/// Who waits where.
#[derive(Debug, Default)]
struct Index {
    /// Who waits, those that have no place yet included.
    callers: usize,
    waiters: BTreeMap<Place, Waiter>,
    at: HashMap<SpotKey, BTreeSet<Place>>,
    /// Those for whom any EM will do.
    anywhere: BTreeSet<Place>,
    /// The last of those whose turn it was to look again although nothing is known to have changed for them.
    turn: Option<Place>,
}

#[derive(Debug)]
struct Waiter {
    wake: Arc<Notify>,
    keys: Vec<SpotKey>,
    awake: bool,
}

impl Index {
    fn insert(&mut self, place: Place, wake: Arc<Notify>, spots: &Spots, any_em: bool) {
        self.remove(place);
        let short = spots.iter().filter(|(_, is_short)| **is_short);
        let keys: Vec<SpotKey> = short.map(|(spot, _)| SpotKey::of(spot)).collect();
        for key in &keys {
            self.at.entry(*key).or_default().insert(place);
        }
        if any_em {
            self.anywhere.insert(place);
        }
        self.waiters.insert(place, Waiter { wake, keys, awake: true });
    }

    fn remove(&mut self, place: Place) {
        let Some(waiter) = self.waiters.remove(&place) else { return };
        for key in waiter.keys {
            if let Some(places) = self.at.get_mut(&key) {
                places.remove(&place);
                if places.is_empty() {
                    self.at.remove(&key);
                }
            }
        }
        self.anywhere.remove(&place);
    }

    fn wake(&mut self, places: &[Place]) {
        for place in places {
            if let Some(waiter) = self.waiters.get_mut(place) {
                waiter.awake = true;
                waiter.wake.notify_one();
            }
        }
    }

    /// Wakes the first waiters where there is more room.
    fn wake_at(&mut self, freed: &Freed) {
        let at = freed.spots.iter().filter_map(|key| self.at.get(key));
        let any_em = (!freed.ems.is_empty()).then_some(&self.anywhere);
        let first: Vec<Place> = at.chain(any_em).flat_map(|places| places.iter().take(WAKE_MAX)).copied().collect();
        self.wake(&first);
    }

    /// Wakes the first waiters everywhere, and some of the others, all of them in turn.
    fn wake_some(&mut self) {
        let lines = self.at.values().chain([&self.anywhere]);
        let mut some: BTreeSet<Place> = lines.flat_map(|places| places.iter().take(WAKE_MAX)).copied().collect();
        let others = |from: Bound<Place>| self.waiters.range((from, Bound::Unbounded)).map(|(place, _)| *place);
        let turn: Vec<Place> = others(self.turn.map_or(Bound::Unbounded, Bound::Excluded)).take(TURN_MAX).collect();
        self.turn = turn.last().copied().filter(|_| turn.len() == TURN_MAX);
        some.extend(turn);
        self.wake(&some.into_iter().collect::<Vec<_>>());
    }

    /// Wakes the next one who sleeps behind `place`, wherever it stands.
    fn wake_next(&mut self, place: Place) {
        let Some(waiter) = self.waiters.get(&place) else { return };
        let behind = |places: &BTreeSet<Place>| {
            let mut behind = places.range((Bound::Excluded(place), Bound::Unbounded));
            behind.find(|place| self.waiters.get(place).is_some_and(|waiter| !waiter.awake)).copied()
        };
        let anywhere = self.anywhere.contains(&place).then_some(&self.anywhere);
        let lines = waiter.keys.iter().filter_map(|key| self.at.get(key)).chain(anywhere);
        let next: Vec<Place> = lines.filter_map(behind).collect();
        self.wake(&next);
    }
}

impl WaitingLine {
    /// An empty line, and where it hears of those who leave it.
    pub fn new(store: Store, metrics: Metrics, stopping: CancellationToken) -> (Self, mpsc::UnboundedReceiver<Uuid>) {
        let (leaving, left) = mpsc::unbounded_channel();
        let (index, kept_alive) = (Arc::default(), Arc::default());
        (Self { store, instance_id: Uuid::new_v4(), index, leaving, stopping, metrics, kept_alive }, left)
    }

    /// Where to tell of requests that stand in line although their callers are gone.
    pub fn leaving(&self) -> mpsc::UnboundedSender<Uuid> {
        self.leaving.clone()
    }

    /// A caller that is going to wait until `until`.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if too many wait here.
    pub fn enter(&self, any_em: bool, until: Instant) -> Result<Caller, Error> {
        let mut index = self.index();
        if index.callers >= WAITERS_MAX {
            return Err(Error::Overloaded);
        }
        index.callers += 1;
        Ok(Caller {
            line: self.clone(),
            any_em,
            until,
            wake: Arc::default(),
            in_doubt: None,
            stands: None,
            _counted: self.metrics.line.caller(),
        })
    }

    /// Says that this instance lives, unless it was said just now: who waits on one that does not is not in line.
    async fn keep_alive(&self) -> Result<(), Error> {
        let mut kept_alive = self.kept_alive.lock().await;
        if kept_alive.is_none_or(|last| last.elapsed() >= POLL_INTERVAL) {
            let now = Instant::now();
            answered(waiting::keep_alive(self.store.pool(), self.instance_id)).await?;
            *kept_alive = Some(now);
        }
        Ok(())
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody who waits. Dropped, he leaves the line.
#[derive(Debug)]
pub struct Caller {
    line: WaitingLine,
    any_em: bool,
    until: Instant,
    wake: Arc<Notify>,
    /// The ticket under which it may stand in the database, whatever was heard of it.
    in_doubt: Option<Uuid>,
    stands: Option<(Place, Spots)>,
    /// Counts as waiting here as long as it does.
    _counted: Held,
}

/// Why a caller need not wait any longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Woken {
    /// There may be room.
    Look,
    /// The time is up.
    TimeIsUp,
    /// The server is going down.
    Stopping,
}

impl Caller {
    /// How the request for a ticket waits, for the ledger; `is_elsewhere` if it is tried on another EM than where it stands.
    ///
    /// # Errors
    /// Those of the database: an instance that cannot say that it lives has nobody in line.
    pub async fn wait(&mut self, ticket_id: Uuid, is_elsewhere: bool) -> Result<Wait, Error> {
        let alive = tokio::time::timeout_at(self.until, self.line.keep_alive()).await;
        alive.unwrap_or(Err(Error::LockTimeout))?;
        self.in_doubt = Some(ticket_id);
        let remaining = self.until.saturating_duration_since(Instant::now());
        let place = self.place();
        Ok(Wait { instance_id: self.line.instance_id, remaining, any_em: self.any_em, is_elsewhere, place })
    }

    /// It looks whether there is room.
    pub fn looks(&self) {
        self.line.metrics.line.looks.inc();
    }

    /// Until when.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Whether any EM will do.
    pub fn any_em(&self) -> bool {
        self.any_em
    }

    /// Where it stands; empty if it is not in line yet.
    pub fn spots(&self) -> Spots {
        self.stands.as_ref().map(|(_, spots)| spots.clone()).unwrap_or_default()
    }

    fn place(&self) -> Option<Place> {
        self.stands.as_ref().map(|(place, _)| *place)
    }

    /// It stands in line there now.
    pub fn stand(&mut self, waiting: &Waiting) {
        if self.spots() != waiting.spots {
            // What was freed there between the commit and now woke nobody: look once.
            self.wake.notify_one();
            self.line.index().insert(waiting.place, self.wake.clone(), &waiting.spots, self.any_em);
            self.stands = Some((waiting.place, waiting.spots.clone()));
        }
    }

    /// Waits until something has changed that concerns it.
    pub async fn woken(&self) -> Woken {
        if let Some(place) = self.place()
            && let Some(waiter) = self.line.index().waiters.get_mut(&place)
        {
            waiter.awake = false;
        }
        tokio::select! {
            () = self.line.stopping.cancelled() => Woken::Stopping,
            () = tokio::time::sleep_until(self.until) => Woken::TimeIsUp,
            () = self.wake.notified() => Woken::Look,
        }
    }

    /// Pauses after a failure that may pass, and then looks again.
    pub async fn pause(&self) -> Woken {
        let again = (Instant::now() + FAILURE_PAUSE).min(self.until);
        tokio::select! {
            () = self.line.stopping.cancelled() => Woken::Stopping,
            () = tokio::time::sleep_until(again), if again < self.until => Woken::Look,
            () = tokio::time::sleep_until(self.until) => Woken::TimeIsUp,
        }
    }

    /// It was granted, and left the line with that.
    pub fn granted(mut self) {
        self.in_doubt = None;
        if let Some((place, _)) = self.stands.take() {
            self.line.metrics.line.served.inc();
            let mut index = self.line.index();
            index.wake_next(place);
            index.remove(place);
        }
    }

    /// The ledger has taken it out of the line, or found that it is not there.
    pub fn is_out(&mut self) {
        self.in_doubt = None;
        if let Some((place, _)) = self.stands.take() {
            self.line.index().remove(place);
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let mut index = self.line.index();
        index.callers -= 1;
        if let Some((place, _)) = self.stands.take() {
            index.remove(place);
        }
        if let Some(ticket_id) = self.in_doubt {
            // Without a listener the server has shut down; other instances sweep what it left.
            let _ = self.line.leaving.send(ticket_id);
        }
    }
}

/// Takes those out of the line who leave it, removes what dead instances left there, and lets those who wait here look from time to
/// time, until the server stops and everybody has left.
pub async fn keep(line: WaitingLine, mut leaving: mpsc::UnboundedReceiver<Uuid>) {
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
                line.index().wake_some();
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
    let mut renewals = tokio::time::interval(POLL_INTERVAL);
    renewals.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = line.stopping.cancelled() => return,
            _ = renewals.tick() => {}
        }
        if line.index().callers > 0
            && let Err(error) = line.keep_alive().await
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
        if self.left.is_empty() {
            return Ok(());
        }
        let gone = answered(waiting::leave(self.session.get().await?, &self.left)).await?;
        self.left.clear();
        self.tell(gone).await
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
        let gone = answered(waiting::sweep(self.session.get().await?, SWEEP_MAX)).await?;
        if gone.requests > 0 {
            tracing::warn!(requests = gone.requests, "removed what waited on an instance that is gone");
        }
        self.tell(gone).await
    }

    async fn tell(&mut self, gone: Gone) -> Result<(), StoreError> {
        if gone.spots.is_empty() {
            return Ok(());
        }
        answered(waiting::notify(self.session.get().await?, &Freed::at(&gone.spots))).await
    }

    fn note(&mut self, kept: Result<(), StoreError>) {
        if let Err(error) = kept {
            self.session.reset();
            self.answers_since = Instant::now();
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot keep the waiting line");
        }
    }
}

/// Wakes waiters where any instance has made more room, until the server stops.
pub async fn listen(line: WaitingLine, judge: Judge) {
    loop {
        tokio::select! {
            () = line.stopping.cancelled() => return,
            Err(error) = hear(&line, &judge) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "cannot hear of more room; looking from time to time");
            }
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

async fn hear(line: &WaitingLine, judge: &Judge) -> Result<(), StoreError> {
    let mut listener = PgListener::connect_with(&line.store.listening()).await?;
    listener.listen(waiting::CHANNEL).await?;
    // What was told while nobody listened.
    line.index().wake_some();
    loop {
        let Ok(heard) = tokio::time::timeout(SILENCE_MAX, listener.try_recv()).await else {
            // A connection that is cut somewhere on its way is as silent as one on which nothing is told.
            answered(async { sqlx::query("SELECT 1").execute(&mut listener).await.map_err(StoreError::from) }).await?;
            continue;
        };
        match heard? {
            None => line.index().wake_some(),
            Some(notification) => wake(line, judge, &Freed::parse(notification.payload())).await,
        }
    }
}

async fn wake(line: &WaitingLine, judge: &Judge, freed: &Freed) {
    if freed.anywhere {
        line.index().wake_some();
        return;
    }
    if !line.index().anywhere.is_empty()
        && let Err(error) = judge.see(&freed.em_instances()).await
    {
        tracing::warn!(error = &error as &dyn std::error::Error, "cannot see where there is more room");
    }
    line.index().wake_at(freed);
}

#[cfg(test)]
mod tests {
    use time::OffsetDateTime;

    use super::*;
    use crate::domain::{em::EmInstance, line::Spot};

    fn place(number: u128) -> Place {
        Place { since: OffsetDateTime::UNIX_EPOCH, ticket_id: Uuid::from_u128(number) }
    }

    fn awake(index: &Index) -> Vec<u128> {
        index.waiters.iter().filter(|(_, w)| w.awake).map(|(place, _)| place.ticket_id.as_u128()).collect()
    }

    #[test]
    fn more_room_wakes_the_first_in_line_and_each_grant_one_more() {
        let spot = Spot::Em(EmInstance::parse("em", "ecm", "a").unwrap());
        let elsewhere = Spot::Em(EmInstance::parse("em", "ecm", "b").unwrap());
        let mut index = Index::default();
        for number in 0..100 {
            let spots = Spots::from([(if number == 0 { &elsewhere } else { &spot }.clone(), true)]);
            index.insert(place(number), Arc::default(), &spots, false);
        }
        index.waiters.values_mut().for_each(|waiter| waiter.awake = false);
        index.wake_at(&Freed::at(&BTreeSet::from([spot]))[0]);
        assert_eq!(awake(&index), (1..=16).collect::<Vec<_>>());
        index.wake_next(place(1));
        index.remove(place(1));
        assert_eq!(awake(&index), (2..=17).collect::<Vec<_>>());
    }
}
