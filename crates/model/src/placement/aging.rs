//! What ends with time: the load of a report that no later one follows, and the newness of a registration.
//!
//! Times are those of the instance's clock, since its start: the ages of reports and registrations come from the database, so
//! that clocks of instances are not compared. Caller: the cluster view.

use std::collections::{BTreeMap, BTreeSet};

use time::Duration;

use crate::{
    name::Name,
    policy::{EM_NEW_AFTER, Policy},
    report::EmCondition,
};

use super::{ClusterView, Policies, candidate::Candidate, group::CandidateId};

/// EMs by the times at which their conditions change.
#[derive(Debug)]
pub(super) struct Deadlines {
    /// Present time.
    pub now: Duration,
    /// Age until which the load of a report counts.
    load_lifetime: Duration,
    /// Busy EMs, by the ends of their loads.
    loads: BTreeSet<(Duration, CandidateId)>,
    /// New EMs of each kind, by their registrations.
    new_ems: BTreeMap<Name, BTreeSet<(Duration, CandidateId)>>,
}

impl Default for Deadlines {
    /// Loads count until the next report.
    fn default() -> Self {
        Self { now: Duration::ZERO, load_lifetime: Duration::MAX, loads: BTreeSet::new(), new_ems: BTreeMap::new() }
    }
}

impl Deadlines {
    pub fn insert(&mut self, id: CandidateId, candidate: &Candidate) {
        if candidate.condition.busy > 0 {
            self.loads.insert((candidate.load_until, id));
        }
        if candidate.is_new {
            let kind = candidate.em.instance.application_name.clone();
            self.new_ems.entry(kind).or_default().insert((candidate.registered, id));
        }
    }

    pub fn remove(&mut self, id: CandidateId, candidate: &Candidate) {
        self.loads.remove(&(candidate.load_until, id));
        let kind = &candidate.em.instance.application_name;
        if let Some(ems) = self.new_ems.get_mut(kind) {
            ems.remove(&(candidate.registered, id));
            if ems.is_empty() {
                self.new_ems.remove(kind);
            }
        }
    }

    /// Takes an EM that has become old.
    fn take_old(&mut self, policies: &Policies) -> Option<CandidateId> {
        let now = self.now;
        let is_old = |(kind, ems): (&Name, &BTreeSet<(Duration, CandidateId)>)| {
            let new_after = policies.get(kind).map_or(EM_NEW_AFTER, Policy::em_new_after);
            ems.first().copied().filter(|(registered, _)| now.saturating_sub(*registered) >= new_after)
        };
        self.new_ems.iter().find_map(is_old).map(|(_, id)| id)
    }
}

impl ClusterView {
    /// Returns the view with another age until which the load of a report counts.
    pub fn with_load_lifetime(mut self, load_lifetime: Duration) -> Self {
        self.deadlines.load_lifetime = load_lifetime;
        self
    }

    /// Sets the time. It never steps back.
    pub fn set_time(&mut self, now: Duration) {
        self.deadlines.now = now;
    }

    /// Ends what has ended by now: loads whose reports are too old, and the bounds of EMs that are new no longer.
    pub fn expire(&mut self, policies: &Policies) {
        let now = self.deadlines.now;
        while let Some((_, id)) = self.deadlines.loads.first().copied().filter(|(until, _)| *until <= now) {
            self.deadlines.loads.pop_first();
            self.change(id, |candidate| candidate.condition.busy = 0);
        }
        while let Some(id) = self.deadlines.take_old(policies) {
            let Some(candidate) = self.candidates.get_mut(id) else { return };
            self.deadlines.remove(id, candidate);
            candidate.is_new = false;
            self.deadlines.insert(id, candidate);
            if let Some(pool) = self.pools.get_mut(candidate.pool) {
                pool.for_each_of(&candidate.label_sets, |group| group.free(id, candidate));
            }
        }
    }

    /// Replaces the condition of an EM by that of a report of the time `at`.
    pub(super) fn set_condition(&mut self, id: CandidateId, condition: EmCondition, at: Duration) {
        let Some(candidate) = self.candidates.get_mut(id) else { return };
        let until = at.saturating_add(self.deadlines.load_lifetime);
        self.deadlines.loads.remove(&(candidate.load_until, id));
        candidate.load_until = until;
        if condition.busy > 0 {
            self.deadlines.loads.insert((until, id));
        }
        if candidate.condition != condition {
            self.change(id, |candidate| candidate.condition = condition);
        }
    }

    /// Replaces the time of a registration.
    pub(super) fn set_registered(&mut self, id: CandidateId, registered: Duration) {
        let Some(candidate) = self.candidates.get_mut(id).filter(|candidate| candidate.is_new) else { return };
        self.deadlines.remove(id, candidate);
        candidate.registered = registered;
        self.deadlines.insert(id, candidate);
    }
}
