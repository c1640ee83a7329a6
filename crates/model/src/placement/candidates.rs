//! Candidates of a view, each with an index. An index is reused after its EM was removed. Caller: the cluster view.

use std::collections::HashMap;

use slab::Slab;

use crate::em::EmInstance;

use super::{candidate::Candidate, group::CandidateId};

/// EMs by index and by name.
#[derive(Debug, Default)]
pub(super) struct CandidateTable {
    slots: Slab<Candidate>,
    ids: HashMap<EmInstance, CandidateId>,
    /// Number of visited EMs.
    #[cfg(test)]
    pub visits: std::cell::Cell<u64>,
}

impl CandidateTable {
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn id(&self, em: &EmInstance) -> Option<CandidateId> {
        self.ids.get(em).copied()
    }

    pub fn get(&self, id: CandidateId) -> Option<&Candidate> {
        #[cfg(test)]
        self.visits.set(self.visits.get() + 1);
        self.slots.get(id.0 as usize)
    }

    pub fn get_mut(&mut self, id: CandidateId) -> Option<&mut Candidate> {
        self.slots.get_mut(id.0 as usize)
    }

    pub fn iter(&self) -> impl Iterator<Item = (CandidateId, &Candidate)> {
        self.ids.values().filter_map(|id| Some((*id, self.get(*id)?)))
    }

    /// Inserts a candidate; `None` if the index space is exhausted.
    pub fn insert(&mut self, candidate: Candidate) -> Option<CandidateId> {
        let entry = self.slots.vacant_entry();
        let id = CandidateId(u32::try_from(entry.key()).ok()?);
        self.ids.insert(candidate.em.instance.clone(), id);
        entry.insert(candidate);
        Some(id)
    }

    pub fn remove(&mut self, em: &EmInstance) -> Option<Candidate> {
        let id = self.ids.remove(em)?;
        self.slots.try_remove(id.0 as usize)
    }
}
