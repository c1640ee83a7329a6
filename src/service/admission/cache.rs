//! What this instance has last seen, by what is committed through it and by what it reads: it decides only which way a request takes.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    domain::{
        em::{Em, EmInstance},
        ledger::PostCommitState,
        line::Line,
        operation::Request,
        placement::{Policies, View},
        report::{Condition, Report},
    },
    metrics::Metrics,
};

use super::{State, Verdict};

/// How many EMs and scopes are remembered.
const EMS_MAX: usize = 100_000;
const SCOPES_MAX: usize = 100_000;

/// How things stood when they were last seen, by this instance.
#[derive(Clone, Debug)]
pub struct StateCache {
    state: Arc<Mutex<State>>,
    choice: Arc<Choice>,
    commits: Arc<AtomicU64>,
    metrics: Metrics,
}

/// What EMs are chosen by. Whoever chooses, and there may be many at a time, keeps no commit waiting: what was committed is put down
/// here, and the next one who chooses takes it over.
#[derive(Debug, Default)]
struct Choice {
    view: Mutex<View>,
    changes: Mutex<Changes>,
}

/// What has changed since somebody chose.
#[derive(Debug, Default)]
struct Changes {
    /// Nothing as long as nobody has chosen, or when nobody has for long.
    seen: Option<Seen>,
    /// The EMs that are held by now, and those that are no more: no more of them than are held now or were then.
    held: HashMap<EmInstance, bool>,
}

#[derive(Debug, Default)]
struct Seen {
    /// EMs as they stand, `None` for one that went.
    ems: HashMap<EmInstance, Option<Em>>,
    /// What EMs have said.
    conditions: HashMap<EmInstance, Condition>,
}

impl Choice {
    fn note(&self, note: impl FnOnce(&mut Seen)) {
        let mut changes = self.changes();
        if let Some(seen) = &mut changes.seen {
            note(seen);
            // Nobody has chosen for long: whoever does next surveys all EMs first.
            if seen.ems.len().max(seen.conditions.len()) > EMS_MAX {
                changes.seen = None;
            }
        }
    }

    fn note_ems(&self, ems: &[Em], gone: &[EmInstance]) {
        self.note(|seen| {
            seen.ems.extend(gone.iter().map(|em| (em.clone(), None)));
            seen.ems.extend(ems.iter().map(|em| (em.instance.clone(), Some(em.clone()))));
        });
    }

    fn note_held(&self, em: &EmInstance, is_held: bool) {
        let held = &mut self.changes().held;
        // Each change is told: one that nobody has taken over is undone by the next.
        if held.remove(em).is_none() {
            held.insert(em.clone(), is_held);
        }
    }

    fn look<T>(&self, look: impl FnOnce(&mut View) -> T) -> T {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        // With the view in hand, so that nobody looks at it in between; those who commit wait for neither.
        let Changes { seen, held } =
            std::mem::replace(&mut *self.changes(), Changes { seen: Some(Seen::default()), ..Changes::default() });
        let Seen { ems, conditions } = seen.unwrap_or_default();
        for (instance, em) in ems {
            match em {
                Some(em) => view.update(em),
                None => view.remove(&instance),
            }
        }
        for (instance, condition) in conditions {
            view.report(&instance, condition);
        }
        for (instance, is_held) in held {
            view.note_held(&instance, is_held);
        }
        look(&mut view)
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StateCache {
    /// Nothing has been seen yet.
    pub fn new(metrics: Metrics) -> Self {
        Self { state: Arc::default(), choice: Arc::default(), commits: Arc::default(), metrics }
    }

    /// Remembers how things stand after a commit.
    pub fn update(&self, standing: PostCommitState) {
        self.commits.fetch_add(1, Ordering::Relaxed);
        self.choice.note_ems(&standing.ems, &standing.gone);
        self.remember(&mut self.state(), standing);
    }

    /// How many commits are remembered.
    pub(super) fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// Remembers how things stood when somebody looked, but nothing older than what was committed since there were `commits`.
    pub(super) fn update_by_look(&self, mut standing: PostCommitState, commits: u64) {
        let mut seen = self.state();
        if self.commits() != commits {
            if standing.limits.version() != seen.limits.version() {
                return;
            }
            standing.ems.retain(|em| !seen.ems.contains_key(&em.instance));
            standing.scopes.retain(|(scope, _)| !seen.scopes.contains_key(scope));
            let spots = standing.line.spots.take().unwrap_or_default();
            standing.line.spots = Some(spots.into_iter().filter(|(spot, _)| !seen.line.line.contains(spot)).collect());
        }
        self.choice.note_ems(&standing.ems, &standing.gone);
        self.remember(&mut seen, standing);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, seen: &mut State, standing: PostCommitState) {
        if standing.limits.version() != seen.limits.version() {
            // Counters of other label sets would only fill the memory.
            seen.scopes.clear();
            seen.limits = standing.limits;
        }
        for gone in &standing.gone {
            seen.ems.remove(gone);
        }
        // What is forgotten costs a look, and no more.
        if seen.ems.len() > EMS_MAX {
            seen.ems.clear();
        }
        if seen.scopes.len() > SCOPES_MAX {
            seen.scopes.clear();
        }
        seen.ems.extend(standing.ems.into_iter().map(|em| (em.instance.clone(), em)));
        seen.scopes.extend(standing.scopes);
        match standing.line.spots {
            Some(spots) => seen.line.line.replace(spots, &standing.line.line),
            None => seen.line.line = Line::default(),
        }
        self.metrics.caches.seen(seen.ems.len(), seen.scopes.len(), seen.line.line.spots());
    }

    /// Whether the request fitted when what it needs was last seen.
    pub(super) fn fitted(&self, request: &Request) -> bool {
        let seen = self.state();
        seen.fits(request)
    }

    /// How a request that stands in line would be judged; `None` if that was not seen.
    pub(super) fn verdict(&self, request: &Request) -> Option<Verdict> {
        let seen = self.state();
        seen.verdict(request).ok()
    }

    /// Remembers how some EMs stand.
    pub(super) fn take_over(&self, ems: HashMap<EmInstance, Em>) {
        let ems: Vec<Em> = ems.into_values().collect();
        self.choice.note_ems(&ems, &[]);
    }

    /// Remembers how well an EM says it is.
    pub fn report(&self, report: &Report) {
        self.choice.note(|seen| {
            seen.conditions.insert(report.em.clone(), Condition::reported(report));
        });
    }

    /// Somebody holds an EM, so that whoever wants to change anything about it waits; or nobody does any more. To be told of each change once.
    pub fn note_held(&self, em: &EmInstance, is_held: bool) {
        self.choice.note_held(em, is_held);
    }

    pub(super) fn forget(&self, em: &EmInstance) {
        self.choice.note_ems(&[], std::slice::from_ref(em));
        self.state().ems.remove(em);
    }

    /// Chooses among the EMs, by the policies that were last seen.
    pub(super) fn choose<T>(&self, choose: impl FnOnce(&mut View, &Policies) -> T) -> T {
        let limits = self.state().limits.clone();
        self.choice.look(|view| choose(view, limits.policies()))
    }

    /// A survey is over.
    pub(super) fn end_survey(&self, survey: u64) {
        let ems = self.choose(|view, _| {
            view.end_survey(survey);
            view.len()
        });
        self.chosen_from(ems);
    }

    /// Publishes how many EMs there are to choose among.
    pub(super) fn chosen_from(&self, ems: usize) {
        self.metrics.caches.chosen_from(ems);
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, ops::Range};

    use time::OffsetDateTime;

    use super::*;
    use crate::{
        domain::{
            name::Labels,
            report::Health,
            resource::Resource,
            scope::{Counter, Scope, Usage},
        },
        transport::edge::{Bounds, Edge},
    };

    /// How much one commit is about.
    const COMMIT: usize = 1000;

    fn cache() -> StateCache {
        StateCache::new(Metrics::new([], Edge::new(Bounds::DEFAULT, None).gauges()))
    }

    fn commits(most: usize) -> impl Iterator<Item = Range<usize>> {
        (0..most + 3 * COMMIT).step_by(COMMIT).map(|begin| begin..begin + COMMIT)
    }

    fn instance(number: usize) -> EmInstance {
        EmInstance::parse("em", "ecm", &format!("host{number}")).unwrap()
    }

    fn em(number: usize) -> Em {
        let none = Resource::memory(0).unwrap();
        Em {
            instance: instance(number),
            total: none.clone(),
            protected: none.clone(),
            used: none.clone(),
            locked: none,
            used_tickets: Default::default(),
            labels: Labels::default(),
            reserved: Labels::default(),
            epoch: 1,
            register_time: OffsetDateTime::UNIX_EPOCH,
            version: 1,
            going: None,
            counted: Default::default(),
            drain: None,
        }
    }

    fn counter(number: usize) -> Counter {
        let scope = Scope::new(BTreeMap::from([("user".to_owned(), format!("user{number}"))]));
        Counter { label_set_id: 1, scope }
    }

    fn nothing() -> PostCommitState {
        PostCommitState { ems: vec![], gone: vec![], scopes: vec![], limits: Arc::default(), line: Default::default() }
    }

    #[test]
    fn what_was_seen_has_a_bound_and_what_came_last_is_known() {
        let (cache, mut forgot) = (cache(), (false, false));
        for numbers in commits(EMS_MAX.max(SCOPES_MAX)) {
            let (first, before) = (numbers.start, cache.state().ems.len());
            let scopes = numbers.clone().map(|number| (counter(number), Usage::default())).collect();
            cache.update(PostCommitState { ems: numbers.map(em).collect(), scopes, ..nothing() });
            let seen = cache.state();
            assert!(seen.ems.contains_key(&instance(first)) && seen.scopes.contains_key(&counter(first)));
            assert!(seen.ems.len() <= EMS_MAX + COMMIT, "{}", seen.ems.len());
            assert!(seen.scopes.len() <= SCOPES_MAX + COMMIT, "{}", seen.scopes.len());
            forgot = (forgot.0 || seen.ems.len() < before, forgot.1 || !seen.scopes.contains_key(&counter(0)));
        }
        assert_eq!(forgot, (true, true));
    }

    #[test]
    fn what_nobody_chooses_by_any_more_is_not_kept() {
        let cache = cache();
        let noted = || {
            let changes = cache.choice.changes();
            changes.seen.as_ref().map(|seen| (seen.ems.len(), seen.conditions.len()))
        };
        assert_eq!(noted(), None, "nobody has chosen yet");
        for of_reports in [false, true] {
            cache.choose(|_, _| ());
            let mut most = 0;
            for numbers in commits(EMS_MAX) {
                // Hosts that come and go, each under a name of its own; or that only report.
                match of_reports {
                    false => cache.update(PostCommitState { gone: numbers.map(instance).collect(), ..nothing() }),
                    true => numbers.for_each(|number| cache.report(&report(number))),
                }
                most = noted().map_or(most, |(ems, conditions)| most.max(ems).max(conditions));
            }
            assert!((EMS_MAX - COMMIT..=EMS_MAX).contains(&most) && noted().is_none(), "{most}, {:?}", noted());
        }
        cache.choose(|view, _| assert!(view.is_empty()));
        assert_eq!(noted(), Some((0, 0)), "whoever chooses hears of what changes from then on");
    }

    #[test]
    fn whoever_chooses_knows_all_that_are_held_also_after_nobody_has_chosen_for_long() {
        let cache = cache();
        let known = || cache.choose(|view, _| (0..1000).filter(|number| view.is_held(&instance(*number))).count());
        (0..1000).for_each(|number| cache.note_held(&instance(number), true));
        (0..500).for_each(|number| cache.note_held(&instance(number), false));
        assert_eq!(cache.choice.changes().held.len(), 500, "what has come and gone is not kept");
        assert_eq!(known(), 500);
        (500..1000).for_each(|number| cache.note_held(&instance(number), false));
        assert_eq!(known(), 0);
        assert_eq!(cache.choice.changes().held.len(), 0);
    }

    fn report(number: usize) -> Report {
        let (health, tickets) = (Health::Healthy, Default::default());
        Report { em: instance(number), epoch: 1, sequence: 1, health, load: None, tickets, observed: None }
    }
}
