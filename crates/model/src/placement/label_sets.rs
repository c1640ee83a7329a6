//! Label sets of searches: each has its own groups, so that a search visits only EMs with all required labels.
//!
//! A label set lists its members: all EMs with all of its labels. A search creates it; a later one evicts it. A label set
//! with few members has no groups and is scanned instead.
//!
//! Invariant: `members` of a set and `label_sets` of its members agree. Callers: `query` and the cluster view.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::em::Em;

use super::{ClusterView, Label, candidates::CandidateTable, group::CandidateId};

/// Maximum number of label sets.
pub(super) const SETS_MAX: usize = 1024;

/// Maximum number of label sets of one EM. Each change of the EM updates every set.
pub(super) const SETS_OF_EM_MAX: usize = 32;

/// A label set used within this number of searches is not evicted, because rebuilding it would cost a group per search.
pub(super) const RECENT_SEARCHES: u64 = 1024;

/// Maximum number of EMs that a search scans one by one.
pub(super) const SCANNED_MAX: usize = 32;

/// Id of a label set within a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SetId(u64);

/// All label sets of a view.
#[derive(Debug, Default)]
pub(super) struct LabelSets {
    ids: HashMap<BTreeSet<Label>, SetId>,
    sets: HashMap<SetId, IndexedLabelSet>,
    /// Sets by one label of each: the rarest label at the creation of the set.
    by_label: HashMap<Label, HashSet<SetId>>,
    next: u64,
    searches: u64,
}

#[derive(Debug)]
struct IndexedLabelSet {
    labels: BTreeSet<Label>,
    rarest: Label,
    members: HashSet<CandidateId>,
    /// Whether the pools have groups of its members.
    is_grouped: bool,
    /// Number of the last search that used it.
    searched: u64,
}

/// EMs that a search visits.
#[derive(Debug)]
pub(super) enum Candidates {
    /// A few EMs with all labels.
    Few(Vec<CandidateId>),
    /// Groups of a label set, whose members have all labels.
    Members(SetId),
    /// Groups of a label set, or of all EMs, whose members may lack some labels.
    Among(Option<SetId>),
}

impl LabelSets {
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    #[cfg(test)]
    pub fn contains(&self, labels: &BTreeSet<Label>) -> bool {
        self.ids.contains_key(labels)
    }

    /// Returns the sets that an EM belongs to.
    fn of(&self, em: &Em) -> Vec<SetId> {
        let filed = em.all_labels().filter_map(|(key, value)| self.by_label.get(&(key.clone(), value.clone())));
        let has_all = |set: &IndexedLabelSet| set.labels.iter().all(|(key, value)| em.label(key) == Some(value));
        filed.flatten().copied().filter(|id| self.sets.get(id).is_some_and(has_all)).collect()
    }

    fn members(&self, id: SetId) -> impl Iterator<Item = CandidateId> {
        self.sets.get(&id).into_iter().flat_map(|set| set.members.iter().copied())
    }

    pub fn is_grouped(&self, id: SetId) -> bool {
        self.sets.get(&id).is_some_and(|set| set.is_grouped)
    }

    /// Returns the set of these labels, if it exists, and marks it as used by the current search.
    fn find(&mut self, labels: &BTreeSet<Label>) -> Option<SetId> {
        let id = *self.ids.get(labels)?;
        self.sets.get_mut(&id)?.searched = self.searches;
        Some(id)
    }

    fn insert(&mut self, labels: &BTreeSet<Label>, rarest: &Label, members: HashSet<CandidateId>) -> SetId {
        self.next += 1;
        let id = SetId(self.next);
        self.ids.insert(labels.clone(), id);
        self.by_label.entry(rarest.clone()).or_default().insert(id);
        let (labels, rarest, searched) = (labels.clone(), rarest.clone(), self.searches);
        self.sets.insert(id, IndexedLabelSet { labels, rarest, members, is_grouped: false, searched });
        id
    }

    fn remove(&mut self, id: SetId) -> Option<IndexedLabelSet> {
        let set = self.sets.remove(&id)?;
        self.ids.remove(&set.labels);
        if let Some(filed) = self.by_label.get_mut(&set.rarest) {
            filed.remove(&id);
            if filed.is_empty() {
                self.by_label.remove(&set.rarest);
            }
        }
        Some(set)
    }

    /// Adds an EM to all sets that it belongs to, and returns them.
    pub fn join(&mut self, candidate: CandidateId, em: &Em) -> Vec<SetId> {
        let joined = self.of(em);
        for id in &joined {
            if let Some(set) = self.sets.get_mut(id) {
                set.members.insert(candidate);
            }
        }
        joined
    }

    /// Removes an EM from the sets in `joined`.
    pub fn leave(&mut self, candidate: CandidateId, joined: &[SetId]) {
        for id in joined {
            if let Some(set) = self.sets.get_mut(id) {
                set.members.remove(&candidate);
            }
        }
    }

    /// Returns the least recently used of some sets.
    pub fn oldest(&self, among: impl Iterator<Item = SetId>) -> Option<SetId> {
        among.min_by_key(|id| (self.sets.get(id).map(|set| set.searched), *id))
    }

    /// Returns the sets to evict for a new one with these members; `None` if one of them was used recently.
    fn to_evict(&self, members: &HashSet<CandidateId>, candidates: &CandidateTable) -> Option<BTreeSet<SetId>> {
        let mut evicted = BTreeSet::new();
        let mut evict = |set: Option<SetId>| {
            let is_recent = |set: &IndexedLabelSet| set.searched + RECENT_SEARCHES > self.searches;
            let set = set.filter(|id| !self.sets.get(id).is_some_and(is_recent))?;
            evicted.insert(set);
            Some(())
        };
        if self.sets.len() >= SETS_MAX {
            evict(self.oldest(self.sets.keys().copied()))?;
        }
        for candidate in members.iter().filter_map(|id| candidates.get(*id)) {
            if candidate.label_sets.len() >= SETS_OF_EM_MAX {
                evict(self.oldest(candidate.label_sets.iter().copied()))?;
            }
        }
        Some(evicted)
    }
}

impl ClusterView {
    /// Returns the EMs for a search with required labels.
    pub(super) fn candidates(&mut self, labels: &BTreeSet<Label>) -> Candidates {
        let having = |label: &Label| self.labelled.get(label).map_or(0, HashSet::len);
        let Some((len, rarest)) = labels.iter().map(|label| (having(label), label)).min() else {
            return Candidates::Among(None);
        };
        if len <= SCANNED_MAX {
            return Candidates::Few(self.having_all(rarest, labels).collect());
        }
        self.label_sets.searches += 1;
        let id = match self.label_sets.find(labels) {
            Some(id) => id,
            None => {
                let members: HashSet<CandidateId> = self.having_all(rarest, labels).collect();
                let Some(evicted) = self.label_sets.to_evict(&members, &self.candidates) else {
                    return match members.len() {
                        ..=SCANNED_MAX => Candidates::Few(members.into_iter().collect()),
                        _ => Candidates::Among(self.grouped_set_of(rarest)),
                    };
                };
                evicted.into_iter().for_each(|id| self.evict_label_set(id));
                self.make_label_set(labels, rarest, members)
            }
        };
        let Some(set) = self.label_sets.sets.get(&id) else { return Candidates::Among(None) };
        match (set.is_grouped, set.members.len()) {
            (_, ..=SCANNED_MAX) => return Candidates::Few(set.members.iter().copied().collect()),
            (true, _) => {}
            (false, _) => self.group_label_set(id),
        }
        Candidates::Members(id)
    }

    /// Returns the EMs with all labels, one of which is `rarest`.
    fn having_all<'a>(
        &'a self,
        rarest: &'a Label,
        labels: &'a BTreeSet<Label>,
    ) -> impl Iterator<Item = CandidateId> + use<'a> {
        let others: Vec<_> = labels.iter().filter(|label| *label != rarest).collect();
        let others: Vec<_> = others.into_iter().map(|label| self.labelled.get(label)).collect();
        let has_others =
            move |id: &CandidateId| others.iter().all(|having| having.is_some_and(|having| having.contains(id)));
        self.labelled.get(rarest).into_iter().flatten().copied().filter(has_others)
    }

    fn grouped_set_of(&self, label: &Label) -> Option<SetId> {
        let id = *self.label_sets.ids.get(&BTreeSet::from([label.clone()]))?;
        self.label_sets.is_grouped(id).then_some(id)
    }

    fn make_label_set(&mut self, labels: &BTreeSet<Label>, rarest: &Label, members: HashSet<CandidateId>) -> SetId {
        let id = self.label_sets.insert(labels, rarest, members);
        for member in self.label_sets.members(id) {
            if let Some(candidate) = self.candidates.get_mut(member) {
                candidate.label_sets.push(id);
            }
        }
        id
    }

    fn group_label_set(&mut self, id: SetId) {
        let Self { candidates, pools, label_sets, .. } = self;
        let Some(set) = label_sets.sets.get_mut(&id) else { return };
        set.is_grouped = true;
        let is_new = |id: &CandidateId| candidates.get(*id).is_some_and(|candidate| candidate.is_new);
        // The bound of a new EM counts the members before it.
        let (new, others): (Vec<_>, Vec<_>) = set.members.iter().copied().partition(is_new);
        for member in others.iter().chain(&new) {
            let Some(candidate) = candidates.get(*member) else { continue };
            if let Some(pool) = pools.get_mut(candidate.pool) {
                pool.by_set.entry(id).or_default().insert(*member, candidate);
            }
        }
    }

    pub(super) fn evict_label_set(&mut self, id: SetId) {
        let Some(set) = self.label_sets.remove(id) else { return };
        for member in set.members {
            let Some(candidate) = self.candidates.get_mut(member) else { continue };
            candidate.label_sets.retain(|of_host| *of_host != id);
            if let Some(pool) = self.pools.get_mut(candidate.pool) {
                pool.by_set.remove(&id);
            }
        }
    }
}
