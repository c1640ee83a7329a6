//! EMs that somebody holds, as far as this instance has met it: they are chosen where nothing else is left.

use std::{
    borrow::Cow,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::domain::em::EmInstance;

/// How many are remembered: each is compared with every EM that is looked at. Of more, whoever chooses one finds out again.
const HELD_MAX: usize = 128;

#[derive(Debug, Default)]
pub(super) struct HeldEms {
    ems: Mutex<Vec<EmInstance>>,
    /// Whether there are any. Mostly there are none, and nobody has to ask which.
    any: AtomicBool,
}

impl HeldEms {
    /// Somebody holds an EM, or does no more.
    pub fn note(&self, em: &EmInstance, is_held: bool) {
        let mut ems = self.ems();
        ems.retain(|known| known != em);
        if is_held && ems.len() < HELD_MAX {
            ems.push(em.clone());
        }
        self.any.store(!ems.is_empty(), Ordering::Release);
    }

    pub fn is_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    pub fn contains(&self, em: &EmInstance) -> bool {
        self.is_any() && self.ems().contains(em)
    }

    /// Those, and `others`.
    pub fn and<'a>(&self, others: &'a [EmInstance]) -> Cow<'a, [EmInstance]> {
        match self.is_any() {
            false => Cow::Borrowed(others),
            true => Cow::Owned(others.iter().chain(self.ems().iter()).cloned().collect()),
        }
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn ems(&self) -> MutexGuard<'_, Vec<EmInstance>> {
        self.ems.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_passed_over_as_long_as_it_is_held() {
        let em = |number: usize| EmInstance::parse("em", "ecm", &format!("host{number}")).unwrap();
        let (held, tried) = (HeldEms::default(), [em(0)]);
        assert!(matches!(held.and(&tried), Cow::Borrowed(_)), "nothing is copied where none is held");
        held.note(&em(1), true);
        held.note(&em(1), true);
        assert_eq!((held.and(&tried).as_ref(), held.contains(&em(1))), ([em(0), em(1)].as_slice(), true));
        held.note(&em(1), false);
        assert_eq!((held.and(&tried).as_ref(), held.contains(&em(1)), held.is_any()), (tried.as_slice(), false, false));
        (0..HELD_MAX + 10).for_each(|number| held.note(&em(number), true));
        assert_eq!(held.and(&[]).len(), HELD_MAX);
    }
}
