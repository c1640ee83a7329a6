//! Fair semaphore: a fixed number of permits with a bounded share per principal, so that some are left for the next principal.
//!
//! A principal gets another permit only if the free permits times `PER_FREE` are at least its resulting number of permits. A
//! single principal thus gets all but one in sixteen, and two get nearly half each. Permits that become free go to principals
//! with few permits, regardless of the order of arrival. The number of principals need not be configured.
//!
//! Never: blocks; a caller without a permit is rejected.
//! Callers: `waiting`, `overview`, `follow`, and the edge.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use crate::lock::lock;
use rm_model::principal::Principal;

/// Permits that a principal may have per free permit.
const PER_FREE: usize = 15;

/// The semaphore.
#[derive(Debug)]
pub struct FairSemaphore {
    taken: Mutex<PermitCounts>,
    most: usize,
}

#[derive(Debug, Default)]
struct PermitCounts {
    all: usize,
    /// Permits per principal; only principals with permits.
    by: HashMap<Principal, usize>,
}

/// One permit; dropping it returns it.
#[derive(Debug)]
pub struct FairPermit {
    share: Arc<FairSemaphore>,
    by: Principal,
}

impl FairSemaphore {
    /// Creates a semaphore with `most` permits.
    pub fn of(most: usize) -> Arc<Self> {
        Arc::new(Self { taken: Mutex::default(), most })
    }

    /// Acquires a permit for `by`; `None` if the share of `by` is exhausted.
    pub fn acquire(self: &Arc<Self>, by: &Principal) -> Option<FairPermit> {
        self.acquire_if(by, |his, free| his <= free.saturating_mul(PER_FREE))
    }

    /// Acquires any free permit for `by`, beyond its share; `None` if none is free.
    pub fn take_any(self: &Arc<Self>, by: &Principal) -> Option<FairPermit> {
        self.acquire_if(by, |_, free| free > 0)
    }

    fn acquire_if(self: &Arc<Self>, by: &Principal, may: impl Fn(usize, usize) -> bool) -> Option<FairPermit> {
        let taken = &mut *lock(&self.taken);
        let free = self.most.saturating_sub(taken.all);
        match taken.by.get_mut(by) {
            Some(his) if may(*his + 1, free) => *his += 1,
            None if may(1, free) => drop(taken.by.insert(by.clone(), 1)),
            _ => return None,
        }
        taken.all += 1;
        Some(FairPermit { share: self.clone(), by: by.clone() })
    }

    /// Returns the number of permits in use.
    pub fn count(&self) -> usize {
        lock(&self.taken).all
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        let mut taken = lock(&self.share.taken);
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
    use rm_model::name::Name;

    fn principal(name: &str) -> Principal {
        Principal::Named(Name::parse("name", name).unwrap())
    }

    fn all_for(share: &Arc<FairSemaphore>, by: &Principal) -> Vec<FairPermit> {
        std::iter::from_fn(|| share.acquire(by)).collect()
    }

    #[test]
    fn fair_semaphore_single_caller_leaves_some_permits() {
        let share = FairSemaphore::of(500);
        let greedy = all_for(&share, &Principal::Anonymous);
        assert_eq!(greedy.len(), 469);
        assert!(share.take_any(&Principal::Anonymous).is_some(), "for the permits above a share");
        let others: Vec<_> = (0..30).map(|n| share.acquire(&principal(&format!("other{n}"))).unwrap()).collect();
        assert_eq!(share.count(), 499);
        drop((greedy, others));
        assert_eq!((share.count(), lock(&share.taken).by.len()), (0, 0), "a caller without permits is removed");
    }

    #[test]
    fn fair_semaphore_freed_permit_goes_to_smaller_share() {
        let share = FairSemaphore::of(500);
        let mut greedy = all_for(&share, &principal("greedy"));
        let mut modest = all_for(&share, &principal("modest"));
        // Calls come and go: when a call of the greedy principal ends, both want its permit.
        for _ in 0..2000 {
            greedy.pop();
            modest.extend(share.acquire(&principal("modest")));
            greedy.extend(share.acquire(&principal("greedy")));
            greedy.extend(share.acquire(&principal("greedy")));
        }
        assert!(
            (230..=250).contains(&greedy.len()) && (230..=250).contains(&modest.len()),
            "{} {}",
            greedy.len(),
            modest.len()
        );
        assert!(share.acquire(&principal("third")).is_some());
    }

    #[test]
    fn fair_semaphore_with_few_permits_grants_all() {
        for most in 1..=15 {
            assert_eq!(all_for(&FairSemaphore::of(most), &Principal::Anonymous).len(), most);
        }
        assert!(FairSemaphore::of(0).acquire(&Principal::Anonymous).is_none());
    }
}
