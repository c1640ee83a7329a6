//! Budget: a bounded amount of bytes or permits that many calls share.
//!
//! A charge never waits: it fits or it fails. Callers: the modules of the edge.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Amount taken, and the maximum.
#[derive(Debug)]
pub struct ByteBudget {
    taken: AtomicUsize,
    most: usize,
}

impl ByteBudget {
    /// Creates an unused budget of `most`.
    pub fn of(most: usize) -> Self {
        Self { taken: AtomicUsize::new(0), most }
    }

    /// Takes `amount`. Returns false, and takes nothing, if it does not fit.
    pub fn take(&self, amount: usize) -> bool {
        let fits = |taken: usize| taken.checked_add(amount).filter(|taken| *taken <= self.most);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// Returns `amount` to the budget. It must have been taken before.
    pub fn give_back(&self, amount: usize) {
        self.taken.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Returns the amount taken.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_budget_is_never_exceeded() {
        let share = ByteBudget::of(10);
        assert!(share.take(7) && !share.take(4) && share.take(3) && !share.take(1));
        assert!(!share.take(usize::MAX));
        share.give_back(7);
        assert!(share.take(0) && share.take(7));
        assert_eq!(share.taken(), 10);
    }
}
