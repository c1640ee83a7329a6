//! The cluster as a whole: worked out every few seconds by one instance for all, and read by each for its metrics, so that all tell the same.
//! In a large cluster it is worked out less often: it never takes more than a small part of the database's time.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    domain::{
        limit::{Limits, ScopeUsage, maxima},
        limit_mode::LimitMode,
        resource::{Dimension, Resource},
    },
    metrics::cluster::{Amounts, AuditFigures, Cluster, ClusterFigures, ClusterMetrics, Fullness, json, seconds},
    store::{
        Store, StoreError,
        cluster::{self, EmFigures},
        cluster_figure::{self, AUDIT, CLUSTER, Figure},
        label_resource, limit,
        session::{Session, answered, answered_soon},
        usage_hour,
    },
};

use super::{Step, Task, lease::Holder};

/// How many of the fullest scopes are told: each is a series.
const FULLEST_MAX: usize = 50;

/// How long the text of a scope may be, in bytes.
const SCOPE_BYTES_MAX: usize = 256;

/// How many scopes are looked at each time, until all have been: an index by fullness would be written by every grant.
const SCOPES: i64 = 1000;

/// How often holds are counted: between them lie the dead rows of all locks.
const HOLDS_EVERY: Duration = Duration::from_secs(30);

/// How many times as long as it took, it rests.
const PAUSE_TIMES: u32 = 19;

/// Works out what is told of the cluster, and tells it.
#[derive(Debug)]
pub struct ClusterAsAWhole {
    store: Store,
    holder: Holder,
    silent_after: Duration,
    metrics: ClusterMetrics,
    limits: Arc<Limits>,
    scopes: Look,
    holds: Option<(Instant, i64)>,
}

/// A look through all scopes.
#[derive(Debug, Default)]
struct Look {
    /// The hash of the last that was looked at.
    after: Vec<u8>,
    seen: Vec<Fullness>,
    /// The fullest of the look before.
    fullest: Vec<Fullness>,
}

impl Look {
    fn see(&mut self, hash: Vec<u8>, scope: &ScopeUsage) {
        self.after = hash;
        self.seen.extend(fullness(scope));
        if self.seen.len() >= 4 * FULLEST_MAX {
            self.seen = fullest(std::mem::take(&mut self.seen));
        }
    }

    fn end(&mut self) {
        *self = Self { fullest: fullest(std::mem::take(&mut self.seen)), ..Self::default() };
    }
}

impl ClusterAsAWhole {
    /// Of EMs that are silent after `silent_after`; told by `metrics`.
    pub fn new(store: Store, holder: Holder, silent_after: Duration, metrics: ClusterMetrics) -> Self {
        let (limits, scopes) = (Arc::default(), Look::default());
        Self { store, holder, silent_after, metrics, limits, scopes, holds: None }
    }

    async fn work_out(&mut self, session: &mut Session) -> Result<Figure, StoreError> {
        let others = answered(cluster::others(session.get().await?)).await?;
        let rolled_up = answered(usage_hour::progress(session.get().await?)).await?.complete_until;
        self.look_at_scopes(session).await?;
        let mut figures = ClusterFigures {
            locked_tickets: number(others.locked_tickets),
            waiting_requests: number(others.waiting),
            waiting_oldest_seconds: others.waiting_seconds,
            holds: number(self.holds(session).await?),
            fullest: self.scopes.fullest.clone(),
            usage_rolled_up: seconds(rolled_up),
            ..ClusterFigures::default()
        };
        answered(cluster::tell_ems(session.get().await?, self.silent_after, |em| add(&mut figures, em))).await?;
        Ok(Figure { json: json(&figures), at: others.at })
    }

    async fn look_at_scopes(&mut self, session: &mut Session) -> Result<(), StoreError> {
        self.limits = answered(limit::current(session.get().await?, &self.limits)).await?;
        let rows = answered(label_resource::list(session.get().await?, &self.scopes.after, SCOPES)).await?;
        let is_end = i64::try_from(rows.len()).is_ok_and(|rows| rows < SCOPES);
        for (hash, counter, usage) in rows {
            self.scopes.see(hash, &ScopeUsage::new(self.limits.of_counter(counter), usage));
        }
        if is_end {
            self.scopes.end();
        }
        Ok(())
    }

    async fn holds(&mut self, session: &mut Session) -> Result<i64, StoreError> {
        match self.holds {
            Some((counted, holds)) if counted.elapsed() < HOLDS_EVERY => Ok(holds),
            _ => {
                let holds = answered(cluster::holds(session.get().await?)).await?;
                self.holds = Some((Instant::now(), holds));
                Ok(holds)
            }
        }
    }

    /// By short reads: whoever does not work it out needs no connection of its own for that.
    async fn tell(&self) -> Result<(), StoreError> {
        let figures = answered_soon(cluster_figure::read(self.store.pool(), CLUSTER)).await?;
        let audit = answered_soon(cluster_figure::read(self.store.pool(), AUDIT)).await?;
        self.metrics.publish(Cluster {
            // What another release writes otherwise is not told.
            figures: figures.and_then(|figure| Some((serde_json::from_str(&figure.json).ok()?, seconds(figure.at)))),
            audit: audit.and_then(|figure| serde_json::from_str::<AuditFigures>(&figure.json).ok()),
        });
        Ok(())
    }
}

impl Task for ClusterAsAWhole {
    const NAME: &'static str = "cluster";
    const PERIOD: Duration = Duration::from_secs(5);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let begun = Instant::now();
        if self.holder.holds() {
            let figure = self.work_out(session).await?;
            answered_soon(cluster_figure::write(session.get().await?, CLUSTER, &figure)).await?;
        }
        let pause = begun.elapsed() * PAUSE_TIMES;
        self.tell().await?;
        Ok(Step::Later(pause))
    }
}

/// For people: a sum of more than 2^53 need not be told to the last digit.
fn number(amount: i64) -> f64 {
    amount as f64
}

/// Counts an EM in.
fn add(figures: &mut ClusterFigures, em: &EmFigures) {
    figures.used_tickets += number(em.used_tickets);
    *figures.ems.entry(em.state.clone()).or_default() += 1.0;
    let amounts = [
        (&mut figures.memory, Dimension::Memory),
        (&mut figures.cores, Dimension::Cores),
        (&mut figures.instances, Dimension::Instances),
    ];
    for (sums, dimension) in amounts {
        let of = |resource: &Resource| number(resource.get(&dimension));
        let Amounts { total, protected, used, locked } = sums;
        *total += of(&em.total);
        *protected += of(&em.protected);
        *used += of(&em.used);
        *locked += of(&em.locked);
    }
}

/// What a scope holds of the maximum of which it holds the most; `None` if it has none.
fn fullness(scope: &ScopeUsage) -> Option<Fullness> {
    let held = |dimension| scope.usage.used.get(dimension).saturating_add(scope.usage.locked.get(dimension));
    let shares = maxima(&scope.rules).filter(|(.., rule)| rule.mode != LimitMode::Off);
    // Of a maximum of nothing, what is held counts as so many times.
    let shares = shares.map(|(dimension, max, _)| (dimension, number(held(dimension)) / number(max.max(1))));
    let (dimension, share) = shares.max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    let mut text = scope.scope.to_string();
    text.truncate(text.floor_char_boundary(SCOPE_BYTES_MAX));
    Some(Fullness { scope: text, dimension: dimension.class().to_owned(), share })
}

/// The first of these, the fullest first; of two whose texts are the same when they are cut, the fuller, because one series cannot have two
/// values.
fn fullest(mut scopes: Vec<Fullness>) -> Vec<Fullness> {
    scopes.sort_by(|one, other| other.share.total_cmp(&one.share).then_with(|| one.scope.cmp(&other.scope)));
    let mut told = BTreeSet::new();
    scopes.retain(|full| told.insert((full.scope.clone(), full.dimension.clone())));
    scopes.truncate(FULLEST_MAX);
    scopes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::domain::{
        limit::{Pattern, Rule},
        scope::{Scope, Tally, Usage},
    };

    fn scope(user: &str, cores: i64) -> ScopeUsage {
        let max = [(Dimension::Cores, 10), (Dimension::Instances, 100), (Dimension::Custom("gpu".into()), 0)];
        let pattern = Pattern::new([("user".to_owned(), None)].into());
        let rule = Rule { pattern, mode: LimitMode::Enforced, max: BTreeMap::from(max) };
        let used = Tally::new([(Dimension::Cores, cores), (Dimension::Instances, 1)]);
        let scope = Scope::new([("user".to_owned(), user.to_owned())].into());
        ScopeUsage { scope, rules: vec![Arc::new(rule)], usage: Usage { used, locked: Tally::default() } }
    }

    fn look(scopes: &[ScopeUsage]) -> Vec<(String, String, f64)> {
        let mut look = Look::default();
        scopes.iter().for_each(|scope| look.see(vec![1], scope));
        look.end();
        assert!(look.after.is_empty(), "the next look begins at the first");
        look.fullest.into_iter().map(|full| (full.scope, full.dimension, full.share)).collect()
    }

    #[test]
    fn each_of_the_fullest_is_told_once_by_its_fullest_dimension() {
        let told = |user: &str, dimension: &str, share| (format!("user={user}"), dimension.to_owned(), share);
        let scopes = [scope("bob", 0), scope("alice", 5), scope("carol", 15)];
        let all = [told("carol", "cores", 1.5), told("alice", "cores", 0.5), told("bob", "instances", 0.01)];
        assert_eq!(look(&scopes), all);
        // Those that are the same when they are cut would be one series twice.
        let long = "用".repeat(255);
        let cut = look(&[scope(&format!("{long}a"), 4), scope(&format!("{long}b"), 5)]);
        assert!(cut.len() == 1 && cut[0].0.len() <= SCOPE_BYTES_MAX && cut[0].2 == 0.5, "{cut:?}");
    }

    #[test]
    fn of_a_crowd_the_fullest_are_told_wherever_they_stand() {
        let crowd: Vec<_> = (0..1000).map(|n| scope(&format!("user{n}"), n * 7 % 1000)).collect();
        let told = look(&crowd);
        assert_eq!(told.len(), FULLEST_MAX);
        let shares: Vec<_> = told.iter().map(|(.., share)| *share).collect();
        let expected: Vec<_> = (0..50).map(|n| number(999 - n) / 10.0).collect();
        assert_eq!(shares, expected);
    }
}
