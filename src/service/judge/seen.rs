//! What this instance has last seen, by what is committed through it and by what it reads: it decides only which way a request takes.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use crate::domain::{
    em::{Em, EmInstance},
    ledger::Standing,
    line::Line,
    operation::Request,
    placement::View,
    report::Statuses,
};

use super::State;

/// How things stood when they were last seen, by this instance.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    state: Arc<Mutex<State>>,
    choice: Arc<Choice>,
}

/// What EMs are chosen by. Whoever chooses, and there may be many at a time, keeps no commit waiting: what was committed is put down
/// here, and the next one who chooses takes it over.
#[derive(Debug, Default)]
struct Choice {
    view: RwLock<View>,
    /// EMs as they stand since the view was made, `None` for one that went; nothing as long as nobody has chosen.
    changes: Mutex<Option<HashMap<EmInstance, Option<Em>>>>,
}

impl Choice {
    fn note(&self, ems: &[Em], gone: &[EmInstance]) {
        let mut changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(changes) = &mut *changes {
            changes.extend(gone.iter().map(|em| (em.clone(), None)));
            changes.extend(ems.iter().map(|em| (em.instance.clone(), Some(em.clone()))));
        }
    }

    fn replace(&self, view: View) {
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = view;
        *self.changes.lock().unwrap_or_else(PoisonError::into_inner) = Some(HashMap::new());
    }

    fn look<T>(&self, look: impl FnOnce(&View) -> T) -> T {
        let changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(std::mem::take);
        let changes = changes.unwrap_or_default();
        if !changes.is_empty() {
            let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
            for (instance, em) in changes {
                match em {
                    Some(em) => view.update(em),
                    None => drop(view.remove(&instance)),
                }
            }
        }
        look(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Seen {
    /// Remembers how things stand.
    pub fn update(&self, standing: Standing) {
        self.choice.note(&standing.ems, &standing.gone);
        let mut seen = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if standing.limits.version() != seen.limits.version() {
            // Counters of other label sets would only fill the memory.
            seen.scopes.clear();
            seen.limits = standing.limits;
        }
        for gone in &standing.gone {
            seen.ems.remove(gone);
        }
        seen.ems.extend(standing.ems.into_iter().map(|em| (em.instance.clone(), em)));
        seen.scopes.extend(standing.scopes);
        match standing.line.spots {
            Some(spots) => seen.line.line.replace(spots, &standing.line.line),
            None => seen.line.line = Line::default(),
        }
    }

    /// Whether the request fitted when what it needs was last seen.
    pub(super) fn fitted(&self, request: &Request) -> bool {
        let seen = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        seen.fits(request)
    }

    /// Makes `ems` all the EMs there are to choose among, and `statuses` what is known of them by their reports.
    pub(super) fn replace_ems(&self, ems: Vec<Em>, statuses: &Statuses) {
        self.choice.replace(View::new(ems, statuses));
    }

    /// Remembers how some EMs stand.
    pub(super) fn take_over(&self, ems: HashMap<EmInstance, Em>) {
        let ems: Vec<Em> = ems.into_values().collect();
        self.choice.note(&ems, &[]);
    }

    pub(super) fn forget(&self, em: &EmInstance) {
        self.choice.note(&[], std::slice::from_ref(em));
        self.state.lock().unwrap_or_else(PoisonError::into_inner).ems.remove(em);
    }

    /// Chooses among the EMs.
    pub(super) fn choose<T>(&self, choose: impl FnOnce(&View) -> T) -> T {
        self.choice.look(choose)
    }
}
