//! Refusal recorder: sums refusals in memory, for a background task that writes them (`background::refusals`).
//!
//! Each instance writes its own sums. The number of kinds per period is bounded; refusals of further kinds are summed as
//! others.
//!
//! Never: accesses the database; delays a request.
//! Callers: `request_resource` and `background::refusals`.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, Mutex},
    time::Duration,
};

use time::OffsetDateTime;
use tokio::time::Instant;

use crate::lock::lock;
use rm_model::{
    name::Name,
    refusal::Refusal,
    refusal_sum::{RefusalCount, RefusalKey},
    resource::Dimension,
};
use rm_store::refusal::RefusalRow;
use rm_telemetry::metrics::Metrics;

/// Duration of a period of sums.
pub const PERIOD: Duration = Duration::from_secs(PERIOD_SECONDS.unsigned_abs());
const PERIOD_SECONDS: i64 = 300;

/// Maximum number of kinds per instance and period. Each kind uses memory and one row.
const KINDS_MAX: usize = 1000;

/// Refusals since the last [`RefusalRecorder::take`]. Clones share them.
#[derive(Clone, Debug)]
pub struct RefusalRecorder {
    sums: Arc<Mutex<RefusalSums<Instant>>>,
    hasher: RandomState,
    metrics: Metrics,
}

impl RefusalRecorder {
    /// Creates an empty recorder.
    pub fn new(metrics: Metrics) -> Self {
        Self { sums: Arc::default(), hasher: RandomState::new(), metrics }
    }

    /// Records the refusal of a request of `user`; `any_em` if the request named no EM.
    pub fn record(&self, user: &Name, refusal: &Refusal, any_em: bool) {
        let Some(first) = refusal.shortfalls.first() else { return };
        let key = RefusalKey::of(user.as_str(), first, any_em);
        let (last_requested, last_available, last) = (first.requested, first.available, Instant::now());
        let count = RefusalCount { refusals: 1, last_requested, last_available, last };
        let hash = self.hasher.hash_one(key);
        if !lock(&self.sums).add(hash, key, count) {
            let others = RefusalKey::others(first.kind, first.dimension.class());
            lock(&self.sums).add_others(others, count);
            self.metrics.requests.refusals_other.inc();
        }
    }

    /// Whether there were no refusals since the last [`RefusalRecorder::take`].
    pub fn is_empty(&self) -> bool {
        lock(&self.sums).is_empty()
    }

    /// Returns and clears the recorded refusals.
    pub fn take(&self) -> RefusalSums<Instant> {
        std::mem::take(&mut lock(&self.sums))
    }
}

/// Sums by kind, and of all other kinds.
#[derive(Debug)]
pub struct RefusalSums<At> {
    /// Sums by hash of the kind, so that a known kind is found without copying its texts. A kind with the hash of another
    /// counts as others.
    kinds: HashMap<u64, (RefusalKey<String>, RefusalCount<At>)>,
    others: BTreeMap<RefusalKey<String>, RefusalCount<At>>,
}

impl<At> Default for RefusalSums<At> {
    fn default() -> Self {
        Self { kinds: HashMap::new(), others: BTreeMap::new() }
    }
}

impl<At: Ord + Copy> RefusalSums<At> {
    /// Adds to a kind. Returns false if there is no capacity for another kind.
    fn add(&mut self, hash: u64, key: RefusalKey<&str>, count: RefusalCount<At>) -> bool {
        let has_room = self.kinds.len() < KINDS_MAX;
        match self.kinds.get_mut(&hash) {
            Some((known, sum)) if known.as_ref() == key => sum.add(count),
            Some(_) => return false,
            None if has_room => drop(self.kinds.insert(hash, (key.to_owned(), count))),
            None => return false,
        }
        true
    }

    fn add_others(&mut self, key: RefusalKey<&str>, count: RefusalCount<At>) {
        self.others.entry(key.to_owned()).and_modify(|sum| sum.add(count)).or_insert(count);
    }

    fn is_empty(&self) -> bool {
        self.kinds.is_empty() && self.others.is_empty()
    }
}

/// Sums of the current period, and those that are not written yet. Rows contain sums, not increments, so that writing twice is
/// harmless.
#[derive(Debug, Default)]
pub struct PeriodSums {
    period_start: Option<OffsetDateTime>,
    sums: RefusalSums<OffsetDateTime>,
    unwritten: BTreeMap<RefusalKey<String>, RefusalCount<OffsetDateTime>>,
}

impl PeriodSums {
    /// Returns the unwritten sums and the start of their period; `None` if there are none.
    pub fn unwritten(&self) -> Option<(OffsetDateTime, Vec<RefusalRow<'_>>)> {
        let rows: Vec<_> = self.unwritten.iter().map(|(key, count)| RefusalRow { key, count }).collect();
        self.period_start.filter(|_| !rows.is_empty()).map(|period_start| (period_start, rows))
    }

    /// Records that the unwritten sums have been written.
    pub fn written(&mut self) {
        self.unwritten.clear();
    }

    /// Adds the refusals taken at `now` to the period of `now`. Sums of an earlier period must have been written.
    ///
    /// Returns the number of refusals that count as others because of `KINDS_MAX`.
    pub fn count(&mut self, taken: RefusalSums<Instant>, now: OffsetDateTime) -> u64 {
        // A clock that goes back does not return to an earlier period: its sums are dropped and would be overwritten.
        let period_start = self.period_start.map_or(start_of(now), |current| current.max(start_of(now)));
        if self.period_start != Some(period_start) {
            *self = Self { period_start: Some(period_start), ..Self::default() };
        }
        let at = |count: RefusalCount<Instant>| {
            let ago = time::Duration::try_from(count.last.elapsed()).unwrap_or_default();
            count.at(now.saturating_sub(ago))
        };
        let mut no_room = 0;
        for (hash, (key, count)) in taken.kinds {
            let count = at(count);
            if self.sums.add(hash, key.as_ref(), count) {
                let sum = self.sums.kinds.get(&hash).map_or(count, |(_, sum)| *sum);
                self.unwritten.insert(key, sum);
            } else {
                no_room += count.refusals;
                let dimension = Dimension::from(key.dimension.as_str()).class();
                self.count_others(RefusalKey::others(key.kind, dimension).to_owned(), count);
            }
        }
        for (key, count) in taken.others {
            self.count_others(key, at(count));
        }
        no_room
    }

    fn count_others(&mut self, key: RefusalKey<String>, count: RefusalCount<OffsetDateTime>) {
        self.sums.add_others(key.as_ref(), count);
        let sum = self.sums.others.get(&key).copied().unwrap_or(count);
        self.unwritten.insert(key, sum);
    }
}

/// Returns the start of the period of `now`. Periods are aligned equally on all instances.
fn start_of(now: OffsetDateTime) -> OffsetDateTime {
    let start = now.unix_timestamp() - now.unix_timestamp().rem_euclid(PERIOD_SECONDS);
    OffsetDateTime::from_unix_timestamp(start).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_model::{refusal::Shortfall, scope_kind::ScopeKind};

    fn refusals() -> RefusalRecorder {
        RefusalRecorder::new(Metrics::new([], []))
    }

    fn refusal(dimension: Dimension, requested: i64) -> Refusal {
        let (scope, rule) = ("user=x".to_owned(), "each user".to_owned());
        let (kind, available, ahead, max, idle_key, idle_amount) = (ScopeKind::User, 1, 0, 1, None, None);
        let first = Shortfall { scope, kind, dimension, requested, available, ahead, max, rule, idle_key, idle_amount };
        Refusal { shortfalls: vec![first], code: 0, reason: String::new(), never_fits: false }
    }

    fn user(number: usize) -> Name {
        Name::parse("user", &format!("user{number}")).unwrap()
    }

    fn rows(kept: &PeriodSums) -> Vec<(RefusalKey<String>, RefusalCount<OffsetDateTime>)> {
        let (_, rows) = kept.unwritten().unwrap();
        rows.into_iter().map(|row| (row.key.clone(), *row.count)).collect()
    }

    const NOON: OffsetDateTime = time::macros::datetime!(2026-01-01 12:00 UTC);

    #[test]
    fn refusal_sums_are_written_once() {
        let (refusals, mut kept) = (refusals(), PeriodSums::default());
        refusals.record(&user(1), &refusal(Dimension::Cores, 3), false);
        refusals.record(&user(1), &refusal(Dimension::Cores, 5), false);
        refusals.record(&user(2), &refusal(Dimension::Cores, 3), false);
        assert_eq!(kept.count(refusals.take(), NOON + PERIOD / 2), 0);
        assert!(refusals.is_empty());
        let (period_start, _) = kept.unwritten().unwrap();
        assert_eq!(period_start, NOON);
        let told: Vec<_> = rows(&kept).into_iter().map(|(key, count)| (key.user, count.refusals)).collect();
        assert_eq!(told, [("user1".to_owned(), 2), ("user2".to_owned(), 1)]);
        assert_eq!(rows(&kept)[0].1.last_requested, 5);
        kept.written();
        assert!(kept.unwritten().is_none());
        // Only changed kinds are unwritten, each with its full sum.
        refusals.record(&user(2), &refusal(Dimension::Cores, 4), false);
        kept.count(refusals.take(), NOON + PERIOD / 2);
        let told: Vec<_> = rows(&kept).into_iter().map(|(key, count)| (key.user, count.refusals)).collect();
        assert_eq!(told, [("user2".to_owned(), 2)]);
        kept.written();
        // The next period begins at zero.
        refusals.record(&user(2), &refusal(Dimension::Cores, 4), false);
        kept.count(refusals.take(), NOON + PERIOD);
        assert_eq!(kept.unwritten().unwrap().0, NOON + PERIOD);
        assert_eq!(rows(&kept)[0].1.refusals, 1);
        // A clock that goes back does not change the period: sums of the first period would be overwritten.
        refusals.record(&user(2), &refusal(Dimension::Cores, 4), false);
        kept.count(refusals.take(), NOON);
        assert_eq!((kept.unwritten().unwrap().0, rows(&kept)[0].1.refusals), (NOON + PERIOD, 2));
    }

    #[test]
    fn refusal_kinds_above_bound_count_as_others() {
        let (refusals, mut kept) = (refusals(), PeriodSums::default());
        for number in 0..KINDS_MAX + 10 {
            refusals.record(&user(number), &refusal(Dimension::Custom("gpu".into()), 2), false);
        }
        assert_eq!(kept.count(refusals.take(), NOON), 0);
        assert_eq!(refusals.metrics.requests.refusals_other.get(), 10);
        // Kinds that exceed the maximum only when they are added to the period are counted as others too.
        for number in (0..5).chain(KINDS_MAX..KINDS_MAX + 7) {
            refusals.record(&user(number), &refusal(Dimension::Custom("disk".into()), 2), false);
        }
        assert_eq!(kept.count(refusals.take(), NOON), 12, "for each kind there is a dimension");
        let told = rows(&kept);
        assert_eq!(told.len(), KINDS_MAX + 1);
        let others: Vec<_> = told.iter().filter(|(key, _)| key.is_others()).collect();
        assert_eq!((others.len(), others[0].1.refusals, others[0].0.dimension.as_str()), (1, 22, "special"));
        assert_eq!(told.iter().map(|(_, count)| count.refusals).sum::<u64>(), 1000 + 10 + 12);
    }
}
