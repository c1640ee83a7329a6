//! So many places, of which nobody has more than a fair share, however much he wants; and some are always left for who comes next.
//!
//! Nobody takes another place unless those that are free, times [`PER_FREE`], are at least as many as he then has. One alone so gets all but one
//! in sixteen; two get nearly half each, and so on, whoever came first: as places become free, who has few takes them. Nobody has to know how many
//! there are.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::domain::principal::Principal;

/// How many places one may have for each that is free.
const PER_FREE: usize = 15;

/// The places.
#[derive(Debug)]
pub struct FairShare {
    taken: Mutex<Taken>,
    most: usize,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// Of those who have any.
    by: HashMap<Principal, usize>,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct Place {
    share: Arc<FairShare>,
    by: Principal,
}

impl FairShare {
    /// So many, none of which is taken.
    pub fn of(most: usize) -> Arc<Self> {
        Arc::new(Self { taken: Mutex::default(), most })
    }

    /// Takes a place for `by`; `None` if there is none for him.
    pub fn take(self: &Arc<Self>, by: &Principal) -> Option<Place> {
        self.take_if(by, |his, free| his <= free.saturating_mul(PER_FREE))
    }

    /// Takes a place for what is more than a share: any that is free.
    pub fn take_any(self: &Arc<Self>, by: &Principal) -> Option<Place> {
        self.take_if(by, |_, free| free > 0)
    }

    fn take_if(self: &Arc<Self>, by: &Principal, may: impl Fn(usize, usize) -> bool) -> Option<Place> {
        let taken = &mut *self.taken();
        let free = self.most.saturating_sub(taken.all);
        match taken.by.get_mut(by) {
            Some(his) if may(*his + 1, free) => *his += 1,
            None if may(1, free) => drop(taken.by.insert(by.clone(), 1)),
            _ => return None,
        }
        taken.all += 1;
        Some(Place { share: self.clone(), by: by.clone() })
    }

    /// How many are taken.
    pub fn count(&self) -> usize {
        self.taken().all
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.share.taken();
        taken.all = taken.all.saturating_sub(1);
        if let Some(his) = taken.by.get_mut(&self.by) {
            *his = his.saturating_sub(1);
            if *his == 0 {
                taken.by.remove(&self.by);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::name::Name;

    fn principal(name: &str) -> Principal {
        Principal::Named(Name::parse("name", name).unwrap())
    }

    fn all_for(share: &Arc<FairShare>, by: &Principal) -> Vec<Place> {
        std::iter::from_fn(|| share.take(by)).collect()
    }

    #[test]
    fn one_alone_has_nearly_all_and_the_next_still_finds_some() {
        let share = FairShare::of(500);
        let greedy = all_for(&share, &Principal::Anonymous);
        assert_eq!(greedy.len(), 469);
        assert!(share.take_any(&Principal::Anonymous).is_some(), "for what is more than a share");
        let others: Vec<_> = (0..30).map(|n| share.take(&principal(&format!("other{n}"))).unwrap()).collect();
        assert_eq!(share.count(), 499);
        drop((greedy, others));
        assert_eq!((share.count(), share.taken().by.len()), (0, 0), "nobody is remembered who has none");
    }

    #[test]
    fn as_places_become_free_who_has_few_takes_them() {
        let share = FairShare::of(500);
        let mut greedy = all_for(&share, &principal("greedy"));
        let mut modest = all_for(&share, &principal("modest"));
        // Calls come and go: whenever one of the greedy one's ends, both want its place.
        for _ in 0..2000 {
            greedy.pop();
            modest.extend(share.take(&principal("modest")));
            greedy.extend(share.take(&principal("greedy")));
            greedy.extend(share.take(&principal("greedy")));
        }
        assert!(
            (230..=250).contains(&greedy.len()) && (230..=250).contains(&modest.len()),
            "{} {}",
            greedy.len(),
            modest.len()
        );
        assert!(share.take(&principal("third")).is_some());
    }

    #[test]
    fn few_places_are_all_given_out() {
        for most in 1..=15 {
            assert_eq!(all_for(&FairShare::of(most), &Principal::Anonymous).len(), most);
        }
        assert!(FairShare::of(0).take(&Principal::Anonymous).is_none());
    }
}
