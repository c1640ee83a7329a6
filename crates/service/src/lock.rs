//! Locking of a mutex whose state stays consistent if a task panics while it owns the lock.
//!
//! Callers: the services of this crate that share state in memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `state`, also after a panic of another owner: no change of the state ends halfway.
pub(crate) fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
