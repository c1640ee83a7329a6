//! Changes of EMs that no placement has seen yet.
//!
//! Commits, checks and reports append changes. The next placement takes them and applies them to its cluster view, so that no
//! commit waits for a placement.
//!
//! Caller: `rm-service`'s `admission`.

use std::{
    collections::{HashMap, HashSet},
    mem,
};

use time::Duration;

use rm_model::{
    em::{Em, EmInstance},
    placement::ClusterView,
    report::{EmCondition, EmReport},
};

use crate::observed_state::{EMS_MAX, RetiredEntries};

/// Changes since the last placement.
#[derive(Debug, Default)]
pub struct PlacementChanges {
    /// Changed EMs; `None` until the first placement, and after [`EMS_MAX`] changes without a placement.
    seen: Option<SeenEms>,
    retired: RetiredEntries,
    /// EMs whose keys are contended.
    contended: HashSet<EmInstance>,
    /// EMs that became contended or free since the last placement: at most as many as are contended now or were contended then.
    contended_changes: HashMap<EmInstance, bool>,
}

#[derive(Debug, Default)]
struct SeenEms {
    /// EMs after their last change; `None` for a removed EM.
    ems: HashMap<EmInstance, Option<Em>>,
    /// Conditions by the last reports, with the times of their arrival.
    conditions: HashMap<EmInstance, (EmCondition, Duration)>,
}

/// Changes that a placement has taken.
#[derive(Debug)]
pub struct TakenChanges {
    seen: SeenEms,
    contended: HashMap<EmInstance, bool>,
}

impl PlacementChanges {
    fn note(&mut self, note: impl FnOnce(&mut SeenEms)) {
        self.retired.drop_some(0);
        let Some(seen) = &mut self.seen else { return };
        note(seen);
        // No placement for a long time: the next one surveys all EMs first.
        if seen.ems.len().max(seen.conditions.len()) > EMS_MAX {
            let SeenEms { ems, conditions } = mem::take(seen);
            self.seen = None;
            self.retired.add(ems.into_iter().map(drop));
            self.retired.add(conditions.into_iter().map(drop));
        }
    }

    /// Records EMs after their last change, and removed EMs.
    pub fn note_ems(&mut self, ems: &[Em], gone: &[EmInstance]) {
        self.note(|seen| {
            seen.ems.extend(gone.iter().map(|em| (em.clone(), None)));
            seen.ems.extend(ems.iter().map(|em| (em.instance.clone(), Some(em.clone()))));
        });
    }

    /// Records the condition of an EM by its report, which arrived at the time `at`.
    pub fn note_report(&mut self, report: &EmReport, at: Duration) {
        self.note(|seen| {
            seen.conditions.insert(report.em.clone(), (EmCondition::reported(report), at));
        });
    }

    /// Records whether the key of an EM is contended, so that changes of the EM wait. Repeated calls change nothing.
    pub fn note_contended(&mut self, em: &EmInstance, is_contended: bool) {
        let Self { contended, contended_changes, .. } = self;
        let is_new = if is_contended { contended.insert(em.clone()) } else { contended.remove(em) };
        // Two opposite changes before the next placement cancel each other.
        if is_new && contended_changes.remove(em).is_none() {
            contended_changes.insert(em.clone(), is_contended);
        }
    }

    /// Returns the changes, and starts to record those after them.
    pub fn take(&mut self) -> TakenChanges {
        let seen = self.seen.replace(SeenEms::default()).unwrap_or_default();
        TakenChanges { seen, contended: mem::take(&mut self.contended_changes) }
    }
}

impl TakenChanges {
    /// Applies the changes to the view.
    pub fn apply(self, view: &mut ClusterView) {
        let Self { seen: SeenEms { ems, conditions }, contended } = self;
        ems.into_iter().for_each(|(instance, em)| match em {
            Some(em) => view.update(em),
            None => view.remove(&instance),
        });
        conditions.into_iter().for_each(|(instance, (condition, at))| view.report(&instance, condition, at));
        contended.into_iter().for_each(|(instance, is_contended)| view.note_contended(&instance, is_contended));
    }
}

#[cfg(test)]
mod tests {
    use rm_model::report::Health;

    use super::*;
    use crate::observed_state::tests::{COMMIT, commits, instance};

    #[test]
    fn placement_changes_without_placement_drops_changes() {
        let mut changes = PlacementChanges::default();
        let noted =
            |changes: &PlacementChanges| changes.seen.as_ref().map(|seen| (seen.ems.len(), seen.conditions.len()));
        assert_eq!(noted(&changes), None, "no placement has run yet");
        for of_reports in [false, true] {
            changes.take();
            let mut most = 0;
            for numbers in commits(EMS_MAX) {
                // EMs that register and unregister under ever new names, or that only report.
                match of_reports {
                    false => changes.note_ems(&[], &numbers.map(instance).collect::<Vec<_>>()),
                    true => numbers.for_each(|number| changes.note_report(&report(number), Duration::ZERO)),
                }
                most = noted(&changes).map_or(most, |(ems, conditions)| most.max(ems).max(conditions));
            }
            assert!(
                (EMS_MAX - COMMIT..=EMS_MAX).contains(&most) && noted(&changes).is_none(),
                "{most}, {:?}",
                noted(&changes)
            );
        }
        let mut view = ClusterView::default();
        changes.take().apply(&mut view);
        assert!(view.is_empty());
        assert_eq!(noted(&changes), Some((0, 0)), "a placement receives all later changes");
    }

    #[test]
    fn placement_after_long_pause_knows_contended_ems() {
        let mut changes = PlacementChanges::default();
        let mut view = ClusterView::default();
        let mut known = |changes: &mut PlacementChanges| {
            changes.take().apply(&mut view);
            (0..1000).filter(|number| view.is_contended(&instance(*number))).count()
        };
        (0..1000).for_each(|number| changes.note_contended(&instance(number), true));
        (0..500).for_each(|number| changes.note_contended(&instance(number), false));
        assert_eq!(changes.contended_changes.len(), 500, "ended contention is not kept");
        assert_eq!(known(&mut changes), 500);
        (500..1000).for_each(|number| changes.note_contended(&instance(number), false));
        assert_eq!(known(&mut changes), 0);
        assert_eq!(changes.contended_changes.len(), 0);
    }

    #[test]
    fn contended_em_reported_twice_stays_contended() {
        let mut changes = PlacementChanges::default();
        let mut view = ClusterView::default();
        let mut is_contended = |changes: &mut PlacementChanges| {
            changes.take().apply(&mut view);
            view.is_contended(&instance(1))
        };
        for expected in [true, false] {
            changes.note_contended(&instance(1), expected);
            changes.note_contended(&instance(1), expected);
            assert_eq!(is_contended(&mut changes), expected);
            changes.note_contended(&instance(1), expected);
            assert_eq!(is_contended(&mut changes), expected);
        }
    }

    fn report(number: usize) -> EmReport {
        let (health, tickets) = (Health::Healthy, Default::default());
        EmReport {
            em: instance(number),
            epoch: 1,
            sequence: 1,
            health,
            load: None,
            tickets,
            observed: None,
            idle: vec![],
        }
    }
}
