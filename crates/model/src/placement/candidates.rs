//! Candidates of a view, each with an index. An index is reused after its EM was removed. Caller: the cluster view.

use std::collections::HashMap;

use crate::em::EmInstance;

use super::{candidate::Candidate, group::CandidateId};

/// EMs by index and by name.
#[derive(Debug, Default)]
pub(super) struct CandidateTable {
    slots: Vec<Option<Candidate>>,
    free: Vec<CandidateId>,
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
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub fn get_mut(&mut self, id: CandidateId) -> Option<&mut Candidate> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    pub fn iter(&self) -> impl Iterator<Item = (CandidateId, &Candidate)> {
        self.ids.values().filter_map(|id| Some((*id, self.get(*id)?)))
    }

    /// Inserts a candidate; `None` if the index space is exhausted.
    pub fn insert(&mut self, host: Candidate) -> Option<CandidateId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let id = CandidateId(u32::try_from(self.slots.len()).ok()?);
                self.slots.push(None);
                id
            }
        };
        self.ids.insert(host.em.instance.clone(), id);
        *self.slots.get_mut(id.0 as usize)? = Some(host);
        Some(id)
    }

    pub fn remove(&mut self, em: &EmInstance) -> Option<Candidate> {
        let id = self.ids.remove(em)?;
        let host = self.slots.get_mut(id.0 as usize)?.take();
        self.free.push(id);
        host
    }
}
