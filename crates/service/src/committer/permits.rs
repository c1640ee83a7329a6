//! Permits of queued and contended operations.
//!
//! The permits bound how many operations wait. Requests may take only half of them, so that operations that free resources can
//! still enter.
//!
//! Caller: the committer, before it queues an operation.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use rm_model::operation::Operation;

/// Maximum number of queued and contended operations. More are rejected, because they would wait past the deadlines of their
/// callers.
pub(super) const WAITING_MAX: usize = 16_384;

/// Maximum number of queued operations with which a request can still enter.
const REQUESTS_MAX: usize = WAITING_MAX / 2;

/// Permits of queued and contended operations. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct OperationPermits(Arc<AtomicUsize>);

/// Permit of one operation, from submission to reply.
#[derive(Debug)]
pub(super) struct OperationPermit(Arc<AtomicUsize>);

impl OperationPermits {
    /// Acquires a permit; `None` if none is available. Requests leave half of the permits to operations that free resources.
    pub fn take(&self, operation: &Operation) -> Option<OperationPermit> {
        let most = if operation.request().is_some() { REQUESTS_MAX } else { WAITING_MAX };
        let place = OperationPermit(self.0.clone());
        // Increments before comparing, so that two concurrent calls cannot both take the last permit. Dropping the permit
        // decrements.
        (place.0.fetch_add(1, Ordering::Relaxed) < most).then_some(place)
    }
}

impl Drop for OperationPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
