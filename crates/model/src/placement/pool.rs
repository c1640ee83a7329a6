//! Pools: EMs of one application, resource type and list of reserved labels, in groups. Callers: the cluster view, `query` and
//! `label_sets`.

use std::collections::{BTreeMap, HashMap};

use slab::Slab;

use crate::{em::Em, name::Name, resource::ResourceType};

use super::{
    Label,
    candidate::Candidate,
    group::{CandidateGroup, CandidateId},
    label_sets::SetId,
};

/// Index of a pool within a view.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PoolId(usize);

/// EMs of one application, resource type and list of reserved labels.
#[derive(Debug)]
pub(super) struct CandidatePool {
    /// Application name and resource type.
    pub kind: (Name, ResourceType),
    pub all: CandidateGroup,
    /// Groups of the label sets with members in this pool.
    pub by_set: HashMap<SetId, CandidateGroup>,
}

impl CandidatePool {
    /// Calls `each` for the pool's groups of an EM with these label sets.
    pub fn for_each_of(&mut self, label_sets: &[SetId], mut each: impl FnMut(&mut CandidateGroup)) {
        each(&mut self.all);
        for set in label_sets {
            if let Some(group) = self.by_set.get_mut(set) {
                each(group);
            }
        }
    }
}

/// Pools by reserved labels; EMs without reserved labels are under the empty list.
#[derive(Debug, Default)]
pub(super) struct CandidatePools {
    pools: Slab<CandidatePool>,
    ids: BTreeMap<Vec<Label>, BTreeMap<(Name, ResourceType), PoolId>>,
}

impl CandidatePools {
    /// Returns the pool of an EM. Creates it if it does not exist.
    pub fn of(&mut self, em: &Em) -> PoolId {
        let (reserved, kind) = (reserved_of(em), (em.instance.application_name.clone(), em.resource_type()));
        let ids = self.ids.entry(reserved).or_default();
        *ids.entry(kind.clone()).or_insert_with(|| {
            PoolId(self.pools.insert(CandidatePool { kind, all: CandidateGroup::default(), by_set: HashMap::new() }))
        })
    }

    pub fn get(&self, id: PoolId) -> Option<&CandidatePool> {
        self.pools.get(id.0)
    }

    pub fn get_mut(&mut self, id: PoolId) -> Option<&mut CandidatePool> {
        self.pools.get_mut(id.0)
    }

    #[cfg(test)]
    pub fn all(&self) -> impl Iterator<Item = &CandidatePool> {
        self.pools.iter().map(|(_, pool)| pool)
    }

    /// Returns the pools of a list of reserved labels.
    pub fn of_reserved(&self, reserved: &[Label]) -> impl Iterator<Item = PoolId> + use<> {
        let ids: Vec<PoolId> = self.ids.get(reserved).into_iter().flat_map(BTreeMap::values).copied().collect();
        ids.into_iter()
    }

    /// Returns the lists of reserved labels from `first` on, in their order.
    pub fn reserved_from(&self, first: Vec<Label>) -> impl Iterator<Item = &Vec<Label>> {
        self.ids.range(first..).map(|(reserved, _)| reserved)
    }

    /// Removes an EM from its pool. An empty pool goes.
    pub fn remove(&mut self, id: CandidateId, candidate: &Candidate) {
        let Some(pool) = self.pools.get_mut(candidate.pool.0) else { return };
        pool.for_each_of(&candidate.label_sets, |group| group.remove(id, candidate));
        for set in &candidate.label_sets {
            if pool.by_set.get(set).is_some_and(CandidateGroup::is_empty) {
                pool.by_set.remove(set);
            }
        }
        if pool.all.is_empty() {
            let reserved = reserved_of(&candidate.em);
            if let Some(ids) = self.ids.get_mut(&reserved) {
                ids.remove(&pool.kind);
                if ids.is_empty() {
                    self.ids.remove(&reserved);
                }
            }
            self.pools.remove(candidate.pool.0);
        }
    }
}

fn reserved_of(em: &Em) -> Vec<Label> {
    em.reserved.as_map().iter().map(|(key, value)| (key.clone(), value.clone())).collect()
}
