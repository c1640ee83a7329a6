//! Bounds of new EMs in a group: between two selections of a new EM are selections of half of the others.
//!
//! A new EM has more free capacity than the others, and would otherwise get all requests until it is as full as they are. With
//! this bound, it gets at most twice the mean of the other available members, and one selection more. Each instance counts its
//! own selections: a sum of bounds holds for the sum of the selections. A bounded member ranks below the others, and is selected
//! if none of them fits.
//! Caller: `group`.

use std::collections::{BTreeSet, HashMap};

use super::{candidate::Candidate, group::CandidateId};

/// Selections in a group, and its bounded members.
#[derive(Debug, Default)]
pub(super) struct NewEmBounds {
    /// Number of selections of members.
    selections: u64,
    /// Number of selections from which each bounded member is free.
    due: HashMap<CandidateId, u64>,
    by_due: BTreeSet<(u64, CandidateId)>,
}

/// Returns the number of selections of others before a member is free.
fn half(others: usize) -> u64 {
    u64::try_from(others.div_ceil(2)).unwrap_or(u64::MAX).max(1)
}

impl NewEmBounds {
    /// Returns the bounds for one search among a few members, by their latest selections in all groups.
    pub fn of_few(members: &[(CandidateId, &Candidate)]) -> Self {
        let mut bounds = Self::default();
        let available = || members.iter().map(|(_, candidate)| candidate).filter(|candidate| candidate.is_available());
        for (id, candidate) in members.iter().filter(|(_, candidate)| candidate.is_new) {
            let others = available().count().saturating_sub(usize::from(candidate.is_available()));
            let selected = available().filter(|other| other.selected > candidate.selected).count();
            if u64::try_from(selected).is_ok_and(|selected| selected < half(others)) {
                bounds.bound(*id, others);
            }
        }
        bounds
    }

    pub fn is_bounded(&self, id: CandidateId) -> bool {
        self.due.contains_key(&id)
    }

    /// Counts the selection of a member.
    pub fn note_selection(&mut self) {
        self.selections += 1;
    }

    /// Bounds a member beside `others`. A selection of a bounded member is added to its bound.
    pub fn bound(&mut self, id: CandidateId, others: usize) {
        let from = self.due.get(&id).map_or(self.selections, |due| due + 1);
        self.free(id);
        let due = from.saturating_add(half(others));
        self.due.insert(id, due);
        self.by_due.insert((due, id));
    }

    /// Ends the bound of a member.
    pub fn free(&mut self, id: CandidateId) {
        if let Some(due) = self.due.remove(&id) {
            self.by_due.remove(&(due, id));
        }
    }

    /// Returns a member that is still bounded, and need not be.
    pub fn due(&self) -> Option<CandidateId> {
        self.by_due.first().filter(|(due, _)| *due <= self.selections).map(|(_, id)| *id)
    }
}
