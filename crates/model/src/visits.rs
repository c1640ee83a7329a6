//! Counts the entries that an operation visits, so that tests can bound its cost. Counts nothing in release builds.

#[cfg(debug_assertions)]
thread_local! {
    static VISITS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Counts one entry that an operation reads or passes over.
#[inline]
pub fn visit() {
    #[cfg(debug_assertions)]
    VISITS.with(|visits| visits.set(visits.get() + 1));
}

/// Returns the number of entries that `operation` visits on this thread.
#[cfg(debug_assertions)]
pub fn count(operation: impl FnOnce()) -> u64 {
    let before = VISITS.with(std::cell::Cell::get);
    operation();
    VISITS.with(std::cell::Cell::get) - before
}
