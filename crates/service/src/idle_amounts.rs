//! Idle amounts: the part of the use at an EM or a scope that idle engines hold, for the replies to refused requests.
//!
//! A refusal gets the amounts from a cache. One task reads missing amounts, for several refusals at once, and rests after each
//! read. A refusal waits for it for at most 200 ms. Its amounts are unset if it is too late, or if too many others wait.
//!
//! Never: decides; fails a request; names a ticket.
//! Caller: `request_resource`, for final refusals alone.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout_at},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{admission::StateCache, lock::lock, tasks::InstanceTasks};
use rm_model::{
    limit::Limits,
    name::Name,
    refusal::Refusal,
    scope::{Scope, Tally, USER},
    ticket::{Ticket, TicketState},
    wait_queue::WaitKey,
};
use rm_store::{
    Store, StoreError,
    session::{Session, within_short_timeout},
    user_resource::{self, ReclaimOrder, ReclaimPlace},
    user_sum,
};
use rm_telemetry::metrics::Metrics;

/// Maximum age of amounts.
const AGE_MAX: Duration = Duration::from_secs(2);

/// Maximum time that a refusal waits for its amounts.
const WAIT_MAX: Duration = Duration::from_millis(200);

/// Maximum number of keys in the cache, some 300 bytes each.
const KEYS_MAX: usize = 10_000;

/// Maximum number of refusals that wait for a read.
const QUEUE_MAX: usize = 64;

/// Maximum number of refusals that share a read. Each has one EM and one user.
const BATCH_MAX: usize = 8;

/// Maximum number of tickets that a read returns for each of these EMs and users.
const OF_EACH_MAX: usize = 256;

/// Rest after a read: a multiple of the read's duration, within bounds. The task makes at most 100 reads a second, and takes at most a
/// tenth of one connection's time. A read of 400 tickets takes PostgreSQL some 2 ms, the largest one 17 ms.
const REST_TIMES: u32 = 9;
const REST_MIN: Duration = Duration::from_millis(10);
const REST_MAX: Duration = AGE_MAX;

/// Amounts that idle engines hold. Clones share them.
#[derive(Clone, Debug)]
pub struct IdleAmounts {
    queue: mpsc::Sender<UncountedKeys>,
    cache: Arc<Mutex<IdleCache>>,
    metrics: Metrics,
}

/// Keys of a refusal whose amounts are missing. `counted` is dropped if the read fails.
#[derive(Debug)]
struct UncountedKeys {
    keys: BTreeSet<WaitKey>,
    counted: oneshot::Sender<()>,
}

impl IdleAmounts {
    /// Starts the task that reads; it ends when all clones of the handle are dropped.
    pub fn start(
        store: &Store,
        seen: StateCache,
        metrics: Metrics,
        tasks: &InstanceTasks,
        stopping: CancellationToken,
    ) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        let cache = Arc::<Mutex<IdleCache>>::default();
        let reader = IdleReader { store: store.clone(), cache: cache.clone(), seen, metrics: metrics.clone() };
        tasks.spawn(run(inbox, reader, stopping));
        Self { queue, cache, metrics }
    }

    /// Sets the amounts of a refusal, until `deadline` and for at most 200 ms. The amounts of a request that never fits stay unset.
    pub async fn count(&self, refusal: &mut Refusal, deadline: Instant) {
        if refusal.never_fits {
            return;
        }
        let missing = lock(&self.cache).fill(refusal, Instant::now());
        if !missing.is_empty() && !Box::pin(self.wait(refusal, missing, deadline)).await {
            self.metrics.idle_amounts.unset.inc();
        }
    }

    /// Waits until `keys` are read, and sets their amounts. Returns whether none is missing.
    async fn wait(&self, refusal: &mut Refusal, keys: BTreeSet<WaitKey>, deadline: Instant) -> bool {
        let (counted, is_counted) = oneshot::channel();
        let deadline = deadline.min(Instant::now() + WAIT_MAX);
        self.queue.try_send(UncountedKeys { keys, counted }).is_ok()
            && matches!(timeout_at(deadline, is_counted).await, Ok(Ok(())))
            && lock(&self.cache).fill(refusal, Instant::now()).is_empty()
    }
}

/// Amounts by wait key, as last read.
#[derive(Debug, Default)]
struct IdleCache {
    /// Time of the last read that found no idle engine in the cell.
    none_at: Option<Instant>,
    sums: HashMap<WaitKey, (Tally, Instant)>,
}

fn is_fresh(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) <= AGE_MAX
}

impl IdleCache {
    /// Sets the known amounts of a refusal, and returns the keys of the others. While no engine of the cell is idle, there are none.
    fn fill(&self, refusal: &mut Refusal, now: Instant) -> BTreeSet<WaitKey> {
        if self.none_at.is_some_and(|at| is_fresh(at, now)) {
            return BTreeSet::new();
        }
        let mut missing = BTreeSet::new();
        for short in &mut refusal.shortfalls {
            let Some(key) = &short.idle_key else { continue };
            match self.sums.get(key).filter(|(_, at)| is_fresh(*at, now)) {
                Some((sum, _)) => short.idle_amount = Some(sum.get(&short.dimension)),
                None => drop(missing.insert(key.clone())),
            }
        }
        missing
    }

    /// Stores the amounts that a read at `at` has found. A full cache stores none.
    fn add(&mut self, sums: Vec<(WaitKey, Tally)>, at: Instant) {
        self.sums.retain(|_, (_, read_at)| is_fresh(*read_at, at));
        let left = KEYS_MAX.saturating_sub(self.sums.len());
        self.sums.extend(sums.into_iter().take(left).map(|(key, sum)| (key, (sum, at))));
    }

    fn has(&self, key: &WaitKey, now: Instant) -> bool {
        self.sums.get(key).is_some_and(|(_, at)| is_fresh(*at, now))
    }
}

/// The reads of the task.
struct IdleReader {
    store: Store,
    cache: Arc<Mutex<IdleCache>>,
    seen: StateCache,
    metrics: Metrics,
}

async fn run(mut inbox: mpsc::Receiver<UncountedKeys>, reader: IdleReader, stopping: CancellationToken) {
    let mut refusals: Vec<UncountedKeys> = Vec::with_capacity(BATCH_MAX);
    while inbox.recv_many(&mut refusals, BATCH_MAX).await > 0 {
        let begun = Instant::now();
        refusals.retain(|refusal| !refusal.counted.is_closed());
        let keys = refusals.iter().flat_map(|refusal| refusal.keys.iter().cloned()).collect();
        if reader.count(keys).await.is_ok() {
            for refusal in refusals.drain(..) {
                // A caller that is gone needs no reply.
                let _ = refusal.counted.send(());
            }
        }
        refusals.clear();
        let rest = (begun.elapsed() * REST_TIMES).clamp(REST_MIN, REST_MAX);
        // A stopping instance waits for the end of the task.
        stopping.run_until_cancelled(sleep(rest)).await;
    }
}

impl IdleReader {
    /// Reads the amounts of those of `keys` that an earlier read has not found, and stores them.
    async fn count(&self, mut keys: BTreeSet<WaitKey>) -> Result<(), StoreError> {
        let at = Instant::now();
        keys.retain(|key| !lock(&self.cache).has(key, at));
        if keys.is_empty() {
            return Ok(());
        }
        self.metrics.idle_amounts.reads.inc();
        let mut session = self.store.lent_session();
        let tickets = within_short_timeout(read(&mut session, &keys)).await;
        if tickets.is_err() {
            session.reset();
        }
        drop(session);
        let (tickets, limits) = (tickets?, self.seen.limits());
        let is_none = tickets.is_none();
        let tickets = tickets.unwrap_or_default();
        let sum = |key: WaitKey| (key.clone(), sum(&key, tickets.values(), &limits));
        let sums: Vec<_> = keys.into_iter().map(sum).collect();
        let mut cache = lock(&self.cache);
        cache.none_at = is_none.then_some(at);
        cache.add(sums, at);
        self.metrics.caches.idle_amounts(cache.sums.len());
        Ok(())
    }
}

/// Returns the tickets of the longest idle engines at `keys`; `None` if no engine of the cell is idle.
async fn read(session: &mut Session, keys: &BTreeSet<WaitKey>) -> Result<Option<HashMap<Uuid, Ticket>>, StoreError> {
    let connection = session.get().await?;
    let places = places(keys);
    let places: Vec<_> = places.iter().map(|place| (place, None)).collect();
    let pages = user_resource::reclaimable(&mut *connection, ReclaimOrder::LongestIdle, &places, OF_EACH_MAX).await?;
    let ticket_ids: Vec<Uuid> = pages.into_iter().flat_map(|page| page.tickets).collect();
    if !ticket_ids.is_empty() {
        return user_resource::read(connection, &ticket_ids).await.map(Some);
    }
    let any = user_sum::idle(connection, Uuid::nil(), 1).await?;
    Ok((!any.is_empty()).then(HashMap::new))
}

fn places(keys: &BTreeSet<WaitKey>) -> BTreeSet<ReclaimPlace> {
    let place = |key: &WaitKey| match key {
        WaitKey::Em(em) => Some(ReclaimPlace::Em(em.clone())),
        WaitKey::Scope(scope) => Some(ReclaimPlace::User(Name::parse(USER, user_of(scope)?).ok()?)),
        WaitKey::Queue { .. } => None,
    };
    keys.iter().filter_map(place).collect()
}

/// Returns the sum of the tickets of idle engines that count at a key.
fn sum<'t>(key: &WaitKey, tickets: impl Iterator<Item = &'t Ticket>, limits: &Limits) -> Tally {
    let mut sum = Tally::default();
    let counted = tickets.filter(|ticket| is_idle(ticket) && counts_at(ticket, key, limits));
    counted.for_each(|ticket| sum.add_up(ticket.resource()));
    sum
}

fn is_idle(ticket: &Ticket) -> bool {
    matches!(ticket.state, TicketState::Used { idle_since: Some(_), .. })
}

fn counts_at(ticket: &Ticket, key: &WaitKey, limits: &Limits) -> bool {
    match key {
        WaitKey::Em(em) => ticket.em == *em,
        // Most tickets are of other users, and are found so without their labels.
        WaitKey::Scope(scope) => {
            user_of(scope) == Some(ticket.user.as_str()) && limits.counts_in(scope, &ticket.ticket_labels())
        }
        WaitKey::Queue { .. } => false,
    }
}

fn user_of(scope: &Scope) -> Option<&str> {
    scope.labels().get(USER).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_model::{refusal::Shortfall, resource::Dimension, scope_kind::ScopeKind};

    fn key(user: &str) -> WaitKey {
        WaitKey::Scope(Scope::new([(USER.to_owned(), user.to_owned())].into()))
    }

    /// A refusal that is short of instances at each of these keys.
    fn refusal(keys: &[Option<WaitKey>]) -> Refusal {
        let short = |idle_key: &Option<WaitKey>| Shortfall {
            scope: String::new(),
            kind: ScopeKind::User,
            dimension: Dimension::Instances,
            requested: 1,
            available: 0,
            ahead: 0,
            max: 4,
            rule: String::new(),
            idle_key: idle_key.clone(),
            idle_amount: None,
        };
        let shortfalls = keys.iter().map(short).collect();
        Refusal { shortfalls, code: 0, reason: String::new(), never_fits: false }
    }

    fn instances(count: i64) -> Tally {
        Tally::new([(Dimension::Instances, count)])
    }

    #[test]
    fn idle_amounts_are_used_for_two_seconds() {
        let (mut cache, at) = (IdleCache::default(), Instant::now());
        cache.add(vec![(key("ann"), instances(3)), (key("bob"), Tally::default())], at);
        let mut fresh = refusal(&[Some(key("ann")), Some(key("bob")), Some(key("eve")), None]);
        assert_eq!(cache.fill(&mut fresh, at + AGE_MAX), [key("eve")].into());
        let amounts: Vec<_> = fresh.shortfalls.iter().map(|short| short.idle_amount).collect();
        assert_eq!(amounts, [Some(3), Some(0), None, None]);
        let (mut late, now) = (refusal(&[Some(key("ann"))]), at + AGE_MAX + Duration::from_millis(1));
        assert_eq!(cache.fill(&mut late, now), [key("ann")].into());
        assert_eq!(late.shortfalls[0].idle_amount, None);
    }

    #[test]
    fn cell_without_idle_engines_needs_no_read() {
        let (mut cache, at) = (IdleCache::default(), Instant::now());
        cache.none_at = Some(at);
        let mut refusal = refusal(&[Some(key("ann"))]);
        assert!(cache.fill(&mut refusal, at + AGE_MAX).is_empty());
        assert_eq!(refusal.shortfalls[0].idle_amount, None);
        assert_eq!(cache.fill(&mut refusal, at + AGE_MAX * 2), [key("ann")].into());
    }

    #[test]
    fn idle_cache_keeps_no_more_than_its_maximum() {
        let (mut cache, at) = (IdleCache::default(), Instant::now());
        let sums =
            |from: usize| (from..from + KEYS_MAX).map(|number| (key(&number.to_string()), instances(1))).collect();
        cache.add(sums(1), at);
        cache.add(sums(KEYS_MAX), at);
        assert!(cache.sums.len() == KEYS_MAX && !cache.has(&key(&(KEYS_MAX + 1).to_string()), at));
        cache.add(sums(KEYS_MAX), at + AGE_MAX * 2);
        assert!(cache.sums.len() == KEYS_MAX && cache.has(&key(&(KEYS_MAX + 1).to_string()), at + AGE_MAX * 2));
    }
}
