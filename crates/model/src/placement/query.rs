//! Search: the groups that a request may be placed in, by its labels, reservations and the policies.
//!
//! A search visits either the groups of a label set, or a few EMs in temporary groups. It never selects an EM; the callback
//! does.
//! Caller: the cluster view.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use crate::{
    em::EmInstance,
    name::Name,
    operation::RequestSpec,
    resource::{Resource, ResourceType},
    selector::PREFERENCES_MAX,
};

use super::{
    ClusterView, Label, Policies,
    candidate::Candidate,
    candidates::CandidateTable,
    group::{CandidateGroup, CandidateId},
    label_sets::Candidates,
    pool::{CandidatePool, CandidatePools},
};

/// Conditions of a request on EMs, besides capacity.
pub(super) struct PlacementQuery<'a> {
    ask: &'a RequestSpec,
    policies: &'a Policies,
    /// Labels that the EM must have.
    labels: BTreeSet<Label>,
    except: &'a [EmInstance],
}

impl<'a> PlacementQuery<'a> {
    pub fn new(ask: &'a RequestSpec, policies: &'a Policies, preferred: Vec<Label>, except: &'a [EmInstance]) -> Self {
        let required = ask.selector.required.as_map().iter().map(|(key, value)| (key.clone(), value.clone()));
        Self { ask, policies, labels: required.chain(preferred).collect(), except }
    }

    /// Returns whether EMs of an application are candidates at all.
    fn serves(&self, application_name: &Name) -> bool {
        let wanted = self.ask.selector.application_name.as_ref();
        wanted.is_none_or(|wanted| wanted == application_name)
            && self
                .policies
                .get(application_name)
                .is_none_or(|policy| policy.lacking(|key| self.ask.carries(key)).is_none())
    }
}

/// Calls `each` for all groups that a request may use, with a condition if some members may not fulfil it.
pub(super) fn for_each_group(
    view: &mut ClusterView,
    search: &PlacementQuery<'_>,
    mut each: impl FnMut(&(Name, ResourceType), &mut CandidateGroup, &CandidateTable, Option<&dyn Fn(&Candidate) -> bool>),
) {
    let holds = |candidate: &Candidate| {
        search.labels.iter().all(|label| candidate.has(label)) && !search.except.contains(&candidate.em.instance)
    };
    let (set, has_labels) = match view.candidates(&search.labels) {
        Candidates::Few(ids) => return for_each_of_few(view, search, ids, holds, each),
        Candidates::Members(set) => (Some(set), true),
        Candidates::Among(set) => (set, search.labels.is_empty()),
    };
    let only: Option<&dyn Fn(&Candidate) -> bool> =
        if has_labels && search.except.is_empty() { None } else { Some(&holds) };
    let ClusterView { candidates, pools, .. } = view;
    for reserved in reservations(pools, search.ask) {
        for id in pools.of_reserved(&reserved) {
            let Some(pool) = pools.get_mut(id).filter(|pool| search.serves(&pool.kind.0)) else { continue };
            let group = match set {
                None => Some(&mut pool.all),
                Some(set) => pool.by_set.get_mut(&set),
            };
            if let Some(group) = group {
                each(&pool.kind, group, candidates, only);
            }
        }
    }
}

/// Calls `each` for temporary groups of a few EMs.
fn for_each_of_few(
    view: &ClusterView,
    search: &PlacementQuery<'_>,
    few: Vec<CandidateId>,
    holds: impl Fn(&Candidate) -> bool,
    mut each: impl FnMut(&(Name, ResourceType), &mut CandidateGroup, &CandidateTable, Option<&dyn Fn(&Candidate) -> bool>),
) {
    let mut groups: BTreeMap<_, Vec<CandidateId>> = BTreeMap::new();
    for (id, candidate) in few.into_iter().filter_map(|id| Some((id, view.candidates.get(id)?))) {
        if candidate.em.admits(search.ask.labels.as_map())
            && search.serves(&candidate.em.instance.application_name)
            && holds(candidate)
        {
            groups.entry(candidate.pool).or_default().push(id);
        }
    }
    for (pool, ids) in groups {
        let Some(CandidatePool { kind, .. }) = view.pools.get(pool) else { continue };
        each(kind, &mut CandidateGroup::new(&ids, &view.candidates), &view.candidates, None);
    }
}

/// Returns the lists of reserved labels that the request carries completely; the empty list first.
fn reservations(pools: &CandidatePools, ask: &RequestSpec) -> Vec<Vec<Label>> {
    let mut let_in = vec![Vec::new()];
    for (key, value) in ask.labels.as_map() {
        let first = (key.clone(), value.clone());
        let from_first = pools.reserved_from(vec![first.clone()]);
        let with_it = from_first.take_while(|reserved| reserved.first() == Some(&first));
        let_in.extend(with_it.filter(|reserved| reserved.iter().all(|(key, value)| ask.has(key, value))).cloned());
    }
    let_in
}

/// Returns all combinations of preferred labels, by descending weight; the last one is empty.
pub(super) fn preferences(ask: &RequestSpec) -> Vec<Vec<Label>> {
    if ask.selector.preferred.is_empty() {
        return vec![Vec::new()];
    }
    let preferred = ask.selector.preferred.get(..PREFERENCES_MAX).unwrap_or(&ask.selector.preferred);
    let way = |bits: u32| {
        let chosen = preferred.iter().enumerate().filter(|(number, _)| bits >> number & 1 == 1);
        let weight: u32 = chosen.clone().map(|(_, preference)| preference.weight).sum();
        let labels = chosen.map(|(_, preference)| (preference.key.clone(), preference.value.clone()));
        (weight, labels.collect::<Vec<_>>())
    };
    let mut ways: Vec<_> = (0..1 << preferred.len()).map(way).collect();
    ways.sort_by_key(|(weight, _)| Reverse(*weight));
    ways.into_iter().map(|(_, labels)| labels).collect()
}

/// Shares that EMs of each resource type would count of a request.
pub(super) struct DemandByType<'a> {
    ask: &'a RequestSpec,
    by_type: Vec<(ResourceType, Option<Resource>)>,
}

impl<'a> DemandByType<'a> {
    pub fn of(ask: &'a RequestSpec) -> Self {
        Self { ask, by_type: Vec::new() }
    }

    /// Returns the share; `None` if EMs of the type cannot provide the request.
    pub fn on(&mut self, kind: ResourceType) -> Option<&Resource> {
        let known = self.by_type.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
            self.by_type.push((kind, self.ask.resource.project(kind).ok()));
            self.by_type.len() - 1
        });
        self.by_type.get(known)?.1.as_ref()
    }
}
