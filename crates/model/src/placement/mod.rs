//! Placement: proposes an EM for a request that names none, from the EMs as last observed.
//!
//! The view has groups of EMs that are equivalent for many requests: of one application, resource type and list of reserved
//! labels. Each label set of an earlier search has further groups, of the EMs with all of its labels. A group is sorted by
//! the free share of each dimension that was dominant in a request. A search therefore finds the best EM without visiting
//! the others. Sizes that fit nowhere are remembered until a member gains capacity.
//!
//! Spread placement ranks an EM by the larger of the share in use and the load that its reports state, if they are recent. Its
//! selections of an EM with a new registration are bounded.
//! Never: decides. A proposal may be stale, and the ledger decides it. Caller: the admission's state cache.
//!
//! - `candidate`, `candidates`: candidates; `group`: groups and their sort orders; `pool`: the groups of one kind of EM;
//! - `new_ems`: the bounds of new EMs in a group; `aging`: what ends with time;
//! - `label_sets`: label sets of searches and their members; `query`: groups that a request may use.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    hash::{BuildHasher as _, DefaultHasher, Hash as _, Hasher as _, RandomState},
};

use time::Duration;

use super::{
    em::{Em, EmInstance},
    name::Name,
    operation::RequestSpec,
    policy::Policy,
    report::EmCondition,
    resource::{Resource, ResourceType},
    selector::Placement,
};

mod aging;
mod candidate;
mod candidates;
mod group;
mod label_sets;
mod new_ems;
mod pool;
mod query;

#[cfg(test)]
mod tests;

use aging::Deadlines;
use candidate::{Candidate, Rank};
use candidates::CandidateTable;
use group::{CandidateId, CandidateQuery};
use label_sets::{LabelSets, SETS_OF_EM_MAX};
use pool::CandidatePools;
use query::{DemandByType, PlacementQuery, for_each_group, preferences};

/// Counter start above the random values of EMs that were never selected.
const FIRST_TOUCH: u64 = 1 << 40;

/// Key and value of a label.
type Label = (String, String);

/// Cluster view: all EMs as last observed, indexed for searches.
#[derive(Debug)]
pub struct ClusterView {
    candidates: CandidateTable,
    pools: CandidatePools,
    labelled: HashMap<Label, HashSet<CandidateId>>,
    label_sets: LabelSets,
    /// Contended EMs, including those that the view does not contain.
    contended: HashSet<EmInstance>,
    /// Number of selections and observations of EMs.
    touches: u64,
    /// Seed of the order of the EMs that were never selected; differs between views.
    seed: u64,
    /// Number of the latest survey.
    survey: u64,
    /// EMs that may have assumed grants; some of them more than once.
    assumed: Vec<CandidateId>,
    /// Number of selections.
    selections: u64,
    /// Loads and registrations that end with time.
    deadlines: Deadlines,
}

/// An EM as a survey found it.
#[derive(Debug, Clone, PartialEq)]
pub struct SurveyedEm {
    /// Identity of the EM.
    pub instance: EmInstance,
    /// Epoch and row version; any change of the EM changes them.
    pub version: (i64, i64),
    /// Condition by its reports.
    pub condition: EmCondition,
    /// Age of the latest report; without effect if it never reported.
    pub report_age: Duration,
    /// Age of the registration.
    pub registration_age: Duration,
}

/// Reason why placement does not select an EM, with any capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClosedEm {
    /// The EM is drained: it grants nothing.
    Drained,
    /// The EM is unhealthy or silent: it grants only requests that name it.
    Unavailable,
}

/// Policies by application name of the EMs.
pub type Policies = BTreeMap<Name, Policy>;

impl Default for ClusterView {
    fn default() -> Self {
        Self::seeded(RandomState::new().hash_one(0))
    }
}

impl ClusterView {
    /// Creates an empty view. Views with equal seeds order EMs that were never selected alike.
    pub fn seeded(seed: u64) -> Self {
        Self {
            candidates: CandidateTable::default(),
            pools: CandidatePools::default(),
            labelled: HashMap::new(),
            label_sets: LabelSets::default(),
            contended: HashSet::new(),
            touches: 0,
            seed,
            survey: 0,
            assumed: Vec::new(),
            selections: 0,
            deadlines: Deadlines::default(),
        }
    }

    /// Returns the number of EMs.
    pub fn len(&self) -> usize {
        self.candidates.len()
    }

    /// Returns whether the view has no EMs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replaces an EM, unless the view contains a newer version. The condition remains.
    pub fn update(&mut self, em: Em) {
        let id = self.candidates.id(&em.instance);
        let known = id.and_then(|id| self.candidates.get(id));
        if known.is_some_and(|known| version_of(&known.em) > version_of(&em)) {
            return;
        }
        if let Some(id) = id.filter(|_| known.is_some_and(|known| known.is_like(&em))) {
            let (touched, survey) = (self.touch(), self.survey);
            self.change(id, |candidate| candidate.refresh(em, touched, survey));
            return;
        }
        // A condition from before the latest registration no longer applies.
        let of_registration = known.filter(|known| known.em.epoch == em.epoch);
        let is_known = known.is_some();
        let kept = of_registration
            .map(|known| (known.condition, known.reported, known.load_until, known.registered, known.is_new));
        self.remove(&em.instance);
        if em.is_registered() {
            let touched = if is_known { self.touch() } else { self.first_touch(&em.instance) };
            // An EM with contradictory amounts is never proposed. Requests that name it get the error.
            let (condition, reported, load_until, registered, is_new) =
                kept.unwrap_or((EmCondition::default(), 0, Duration::ZERO, self.deadlines.now, true));
            if let Ok(mut candidate) = Candidate::new(em, condition, touched, self.survey) {
                (candidate.reported, candidate.load_until) = (reported, load_until);
                (candidate.registered, candidate.is_new, candidate.selected) = (registered, is_new, self.selections);
                self.insert(candidate);
            }
        }
    }

    /// Records the condition of a report that arrived at the time `at`.
    pub fn report(&mut self, em: &EmInstance, condition: EmCondition, at: Duration) {
        let Some(id) = self.candidates.id(em) else { return };
        if let Some(candidate) = self.candidates.get_mut(id) {
            candidate.reported = self.survey;
            self.set_condition(id, condition, at);
        }
    }

    /// Sets whether an EM is contended. [`ClusterView::choose`] ignores contended EMs and those that operators hold.
    pub fn note_contended(&mut self, em: &EmInstance, is_contended: bool) {
        match is_contended {
            true => self.contended.insert(em.clone()),
            false => self.contended.remove(em),
        };
        if let Some(id) = self.candidates.id(em) {
            self.change(id, |candidate| candidate.is_blocked = is_contended || candidate.em.is_held);
        }
    }

    /// Returns whether an EM is contended.
    pub fn is_contended(&self, em: &EmInstance) -> bool {
        self.contended.contains(em)
    }

    /// Removes an EM.
    pub fn remove(&mut self, em: &EmInstance) {
        let Some(id) = self.candidates.id(em) else { return };
        let Some(candidate) = self.candidates.remove(em) else { return };
        self.deadlines.remove(id, &candidate);
        self.label_sets.leave(id, &candidate.label_sets);
        for label in labels_of(&candidate.em) {
            if let Some(ids) = self.labelled.get_mut(&label) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.labelled.remove(&label);
                }
            }
        }
        self.pools.remove(id, &candidate);
    }

    /// Starts a survey and returns its number. Its results are as recent as reports from now on.
    pub fn begin_survey(&mut self) -> u64 {
        self.survey += 1;
        self.survey
    }

    /// Applies the results of a survey for some EMs. Returns the EMs that changed and must be read.
    pub fn surveyed(&mut self, survey: u64, found: Vec<SurveyedEm>) -> Vec<EmInstance> {
        let mut changed = Vec::new();
        for SurveyedEm { instance, version, condition, report_age, registration_age } in found {
            let id = self.candidates.id(&instance);
            let (Some(id), Some(candidate)) = (id, id.and_then(|id| self.candidates.get_mut(id))) else {
                changed.push(instance);
                continue;
            };
            candidate.surveyed = survey;
            let known = version_of(&candidate.em);
            // A report since the start of the survey is at least as recent.
            let (is_reported, is_assumed) = (candidate.reported >= survey, candidate.is_assumed_before(survey));
            if !is_reported {
                self.set_condition(id, condition, self.deadlines.now.saturating_sub(report_age));
            }
            if is_assumed {
                self.change(id, Candidate::clear_assumed);
            }
            if known.0 == version.0 {
                self.set_registered(id, self.deadlines.now.saturating_sub(registration_age));
            }
            if known != version {
                changed.push(instance);
            }
        }
        changed
    }

    /// Clears all assumed grants from before a survey, including those of EMs that the survey did not read.
    pub fn settle_before(&mut self, survey: u64) {
        for id in std::mem::take(&mut self.assumed) {
            match self
                .candidates
                .get(id)
                .map(|candidate| (candidate.is_assumed_before(survey), candidate.is_assumed_before(u64::MAX)))
            {
                Some((true, _)) => self.change(id, Candidate::clear_assumed),
                Some((false, true)) => self.assumed.push(id),
                Some((false, false)) | None => {}
            }
        }
    }

    /// Removes those of `ems` that were not found since the start of a survey.
    pub fn remove_unseen<'a>(&mut self, survey: u64, ems: impl IntoIterator<Item = &'a EmInstance>) {
        for em in ems {
            let candidate = self.candidates.id(em).and_then(|id| self.candidates.get(id));
            if candidate.is_some_and(|candidate| candidate.surveyed < survey) {
                self.remove(em);
            }
        }
    }

    /// Ends a survey of all EMs: removes the EMs that it did not find.
    pub fn end_survey(&mut self, survey: u64) {
        let gone = self.candidates.iter().filter(|(_, candidate)| candidate.surveyed < survey);
        let gone: Vec<EmInstance> = gone.map(|(_, candidate)| candidate.em.instance.clone()).collect();
        gone.iter().for_each(|em| self.remove(em));
        self.settle_before(survey);
    }

    /// Selects the best EM on which the request fits, without `except` and contended EMs. EMs with preferred labels take
    /// precedence. The share counts as granted until the EM is observed again or [`ClusterView::settle`] is called.
    pub fn choose(&mut self, ask: &RequestSpec, policies: &Policies, except: &[EmInstance]) -> Option<EmInstance> {
        let (id, share) = self.find(ask, policies, except, false)?;
        let (touched, survey) = (self.touch(), self.survey);
        self.selections += 1;
        let selected = self.selections;
        self.change(id, |candidate| {
            candidate.assume(&share, touched, survey);
            candidate.selected = selected;
        });
        self.assumed.push(id);
        if let Some(candidate) = self.candidates.get(id)
            && let Some(pool) = self.pools.get_mut(candidate.pool)
        {
            pool.for_each_of(&candidate.label_sets, |group| group.note_selection(id, &self.candidates));
        }
        self.instance(id)
    }

    fn instance(&self, id: CandidateId) -> Option<EmInstance> {
        self.candidates.get(id).map(|candidate| candidate.em.instance.clone())
    }

    /// As [`ClusterView::choose`], without counting the share as granted.
    pub fn best(&mut self, ask: &RequestSpec, policies: &Policies, except: &[EmInstance]) -> Option<EmInstance> {
        self.find(ask, policies, except, false).and_then(|(id, _)| self.instance(id))
    }

    /// As [`ClusterView::best`], among the contended and held EMs.
    pub fn best_blocked(
        &mut self,
        ask: &RequestSpec,
        policies: &Policies,
        except: &[EmInstance],
    ) -> Option<EmInstance> {
        self.find(ask, policies, except, true).and_then(|(id, _)| self.instance(id))
    }

    /// Clears the assumed grants of an EM after a proposal that was not granted.
    pub fn settle(&mut self, em: &EmInstance) {
        if let Some(id) = self.candidates.id(em) {
            self.change(id, Candidate::clear_assumed);
        }
    }

    /// Returns why an EM cannot be selected; `None` if it can, or if the view does not contain it.
    pub fn closed(&self, em: &EmInstance) -> Option<ClosedEm> {
        let candidate = self.candidates.get(self.candidates.id(em)?)?;
        match candidate.condition.is_available {
            true => candidate.em.drain.is_some().then_some(ClosedEm::Drained),
            false => Some(ClosedEm::Unavailable),
        }
    }

    /// Returns the matching EM that best explains a refusal. A full EM takes precedence over an EM that is too small even when
    /// empty, then an uncontended EM over a contended one, then the largest free share. `None` if no available EM matches.
    ///
    /// A request that may wait can also wait at a closed EM: a large enough one if no open EM is, or any if none is open.
    pub fn closest(&mut self, ask: &RequestSpec, policies: &Policies) -> Option<EmInstance> {
        let search = PlacementQuery::new(ask, policies, Vec::new(), &[]);
        let mut shares = DemandByType::of(ask);
        let mut best: Option<(bool, Rank)> = None;
        let mut any = None;
        for_each_group(self, &search, |kind, group, candidates, only| {
            let wanted = |share| CandidateQuery { share, placement: Placement::Spread, is_blocked: false, only };
            let found = shares.on(kind.1).and_then(|share| group.closest(&wanted(share), candidates));
            best = best.max(found);
            if found.is_none() && any.is_none() {
                any = group.any(candidates, &|candidate| only.is_none_or(|only| only(candidate)));
            }
        });
        let mut closed: Option<(bool, Reverse<CandidateId>)> = None;
        if ask.may_wait && !best.is_some_and(|(fits, _)| fits) {
            for_each_group(self, &search, |kind, group, candidates, only| {
                closed = closed.max(group.closed(shares.on(kind.1), candidates, only));
            });
        }
        let open = best.map(|(_, rank)| rank.candidate).or(any);
        let closed = closed.filter(|(fits, _)| *fits || open.is_none()).map(|(_, id)| id.0);
        self.instance(closed.or(open)?)
    }

    /// Returns the number of EMs that match the request, including silent and unhealthy ones.
    pub fn matching(&mut self, ask: &RequestSpec, policies: &Policies) -> usize {
        let search = PlacementQuery::new(ask, policies, Vec::new(), &[]);
        let mut matching = 0;
        for_each_group(self, &search, |_, group, candidates, only| {
            matching += match only {
                None => group.len(),
                Some(only) => group.members().filter(|id| candidates.get(*id).is_some_and(only)).count(),
            };
        });
        matching
    }

    /// Returns the position of an EM among those that were never selected.
    fn first_touch(&self, em: &EmInstance) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, em).hash(&mut hasher);
        hasher.finish() % FIRST_TOUCH
    }

    fn touch(&mut self) -> u64 {
        self.touches += 1;
        FIRST_TOUCH + self.touches
    }

    fn insert(&mut self, mut candidate: Candidate) {
        candidate.is_blocked = candidate.em.is_held || self.contended.contains(&candidate.em.instance);
        candidate.pool = self.pools.of(&candidate.em);
        let Some(id) = self.candidates.insert(candidate) else { return };
        let Some(candidate) = self.candidates.get_mut(id) else { return };
        self.deadlines.insert(id, candidate);
        for label in labels_of(&candidate.em) {
            self.labelled.entry(label).or_default().insert(id);
        }
        candidate.label_sets = self.label_sets.join(id, &candidate.em);
        if let Some(pool) = self.pools.get_mut(candidate.pool) {
            for set in candidate.label_sets.iter().filter(|set| self.label_sets.is_grouped(**set)) {
                pool.by_set.entry(*set).or_default();
            }
            pool.for_each_of(&candidate.label_sets, |group| group.insert(id, candidate));
        }
        let mut joined = candidate.label_sets.clone();
        while joined.len() > SETS_OF_EM_MAX
            && let Some(oldest) = self.label_sets.oldest(joined.iter().copied())
        {
            self.evict_label_set(oldest);
            joined.retain(|set| *set != oldest);
        }
    }

    /// Changes an EM. `change` must not change its labels or capacity.
    fn change(&mut self, id: CandidateId, change: impl FnOnce(&mut Candidate)) {
        let Some(candidate) = self.candidates.get_mut(id) else { return };
        let Some(pool) = self.pools.get_mut(candidate.pool) else { return };
        pool.for_each_of(&candidate.label_sets, |group| group.unrank(id, candidate));
        change(candidate);
        pool.for_each_of(&candidate.label_sets, |group| group.rank(id, candidate));
    }

    fn find(
        &mut self,
        ask: &RequestSpec,
        policies: &Policies,
        except: &[EmInstance],
        is_blocked: bool,
    ) -> Option<(CandidateId, Resource)> {
        let mut shares = DemandByType::of(ask);
        for preferred in preferences(ask) {
            let search = PlacementQuery::new(ask, policies, preferred, except);
            let mut best: Option<((Reverse<u8>, u64), Rank, ResourceType)> = None;
            let rank_of = |found: &((Reverse<u8>, u64), Rank, ResourceType)| (found.0, found.1);
            for_each_group(self, &search, |(application_name, resource_type), group, candidates, only| {
                let Some(share) = shares.on(*resource_type) else { return };
                let placement = ask.selector.placement.or_else(|| Some(policies.get(application_name)?.placement()));
                let placement = placement.unwrap_or_default();
                let found =
                    group.best(&CandidateQuery { share, placement, is_blocked, only }, candidates).map(|rank| {
                        let score = match placement {
                            Placement::Spread => rank.spread_score(),
                            Placement::Pack => (Reverse(rank.spare.into()), u64::MAX - rank.share),
                        };
                        (score, rank, *resource_type)
                    });
                best = best.into_iter().chain(found).max_by_key(rank_of);
            });
            if let Some((_, rank, resource_type)) = best {
                return Some((rank.candidate, shares.on(resource_type)?.clone()));
            }
        }
        None
    }
}

fn labels_of(em: &Em) -> impl Iterator<Item = Label> {
    em.all_labels().map(|(key, value)| (key.clone(), value.clone()))
}

fn version_of(em: &Em) -> (i64, i64) {
    (em.epoch, em.version)
}
