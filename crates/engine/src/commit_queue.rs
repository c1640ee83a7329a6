//! Commit queues, the permits that bound them, and the selection of the operations of the next batch.
//!
//! Operations with a caller that touch one ticket come first. Large operations, background steps and other background
//! operations share the rest of a batch in rotating order, so that none of them starves. Operations of one class leave in
//! the order in which they came.
//!
//! Never: waits.
//! Caller: `rm_service::committer`.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rm_model::operation::{Operation, STEP_TICKETS_MAX};

/// Maximum cost of one batch. Larger batches cost hardly less per operation and increase the latency of all callers.
pub const BATCH_COST_MAX: usize = 512;

/// Maximum cost of large and background operations in a batch while callers are active. The bound lets such operations
/// progress, under full load, at three tenths of the rate of an idle service.
const BACKGROUND_COST_MAX: usize = 64;

/// Time after a caller's operation during which the next one is expected.
const CALLED_RECENTLY: Duration = Duration::from_millis(100);

// No operation may cost more than a batch.
const _: () = assert!(STEP_TICKETS_MAX <= BATCH_COST_MAX && BACKGROUND_COST_MAX >= STEP_TICKETS_MAX);

/// Class of an operation, which selects its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationClass {
    /// Has a caller and touches one ticket.
    Called,
    /// Has a caller and may touch many tickets. Callers with one ticket do not wait for it.
    Large,
    /// A background operation that touches many tickets. A queue of their own keeps such operations from waiting behind
    /// thousands of operations on one ticket.
    Step,
    /// A background operation that touches one ticket.
    Background,
}

impl OperationClass {
    /// Returns the class of an operation with a caller.
    pub fn called(operation: &Operation) -> Self {
        if operation.cost() == 1 { Self::Called } else { Self::Large }
    }

    /// Returns the class of an operation without a caller.
    pub fn uncalled(operation: &Operation) -> Self {
        if operation.cost() == 1 { Self::Background } else { Self::Step }
    }
}

/// The queues of all classes. `T` is a queued operation.
#[derive(Debug)]
pub struct CommitQueues<T> {
    called: CommitQueue<T>,
    /// Queues that share [`BACKGROUND_COST_MAX`]: large, steps, background.
    in_turn: [CommitQueue<T>; 3],
    /// Index of the queue that comes first in the next batch.
    turn: usize,
    /// Time of the last batch with an operation of a caller.
    last_call: Option<Instant>,
}

/// The operations of one class, each with its cost.
#[derive(Debug)]
struct CommitQueue<T>(VecDeque<(usize, T)>);

impl<T> Default for CommitQueues<T> {
    fn default() -> Self {
        let empty = || CommitQueue(VecDeque::new());
        Self { called: empty(), in_turn: [empty(), empty(), empty()], turn: 0, last_call: None }
    }
}

impl<T> CommitQueues<T> {
    /// Adds an operation of this class and cost. A cost above [`BATCH_COST_MAX`] would block the queue for ever.
    pub fn push(&mut self, class: OperationClass, cost: usize, operation: T) {
        debug_assert!(cost <= BATCH_COST_MAX, "{cost}");
        let [large, steps, background] = &mut self.in_turn;
        let queue = match class {
            OperationClass::Called => &mut self.called,
            OperationClass::Large => large,
            OperationClass::Step => steps,
            OperationClass::Background => background,
        };
        queue.0.push_back((cost, operation));
    }

    /// Whether no operation is queued.
    pub fn is_empty(&self) -> bool {
        self.called.0.is_empty() && self.in_turn.iter().all(|queue| queue.0.is_empty())
    }

    /// Removes and returns the operations of the next batch.
    pub fn next(&mut self, now: Instant) -> Vec<T> {
        if !self.called.0.is_empty() {
            self.last_call = Some(now);
        }
        let is_called = self.last_call.is_some_and(|last| now.saturating_duration_since(last) < CALLED_RECENTLY);
        let mut batch = Vec::with_capacity(self.called.0.len().min(BATCH_COST_MAX));
        self.called.take(BATCH_COST_MAX, &mut batch);
        let mut left = if is_called { BACKGROUND_COST_MAX } else { BATCH_COST_MAX };
        // The first queue that contributes to this batch comes last in the next one.
        let (begin, count) = (self.turn, self.in_turn.len());
        for number in (0..count).map(|after| (begin + after) % count) {
            let taken = self.in_turn[number].take(left, &mut batch);
            if taken > 0 && self.turn == begin {
                self.turn = (number + 1) % count;
            }
            left -= taken;
        }
        batch
    }
}

impl<T> CommitQueue<T> {
    /// Moves the first operations to `batch` up to a total cost of `cost_max`. Returns their cost.
    fn take(&mut self, cost_max: usize, batch: &mut Vec<T>) -> usize {
        let mut taken = 0;
        while let Some((cost, operation)) = self.0.pop_front_if(|(cost, _)| taken + *cost <= cost_max) {
            taken += cost;
            batch.push(operation);
        }
        taken
    }
}

/// Maximum number of queued and contended operations. More are rejected, because they would wait past the deadlines of their
/// callers.
pub const WAITING_MAX: usize = 16_384;

/// Maximum number of queued operations with which a request can still enter.
const REQUESTS_MAX: usize = WAITING_MAX / 2;

/// Permits of queued and contended operations, which bound how many wait. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct OperationPermits(Arc<AtomicUsize>);

/// Permit of one operation, from submission to reply.
#[derive(Debug)]
pub struct OperationPermit(Arc<AtomicUsize>);

impl OperationPermits {
    /// Acquires a permit; `None` if none is available. Requests leave half of the permits to operations that free resources.
    pub fn take(&self, operation: &Operation) -> Option<OperationPermit> {
        let most = if operation.request().is_some() { REQUESTS_MAX } else { WAITING_MAX };
        let permit = OperationPermit(self.0.clone());
        // Increments before comparing, so that two concurrent calls cannot both take the last permit. Dropping the permit
        // decrements.
        (permit.0.fetch_add(1, Ordering::Relaxed) < most).then_some(permit)
    }
}

impl Drop for OperationPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cost of a step: as much as fits beside callers.
    const STEP: usize = BACKGROUND_COST_MAX;

    #[test]
    fn commit_queue_with_background_load_prefers_callers() {
        let (mut queues, now) = (CommitQueues::default(), Instant::now());
        for _ in 0..1000 {
            queues.push(OperationClass::Background, 1, "background");
        }
        queues.push(OperationClass::Large, STEP, "large");
        let mut before = Vec::new();
        while !before.contains(&"large") {
            // Each batch has a caller's operation, so background operations share the smaller cost.
            queues.push(OperationClass::Called, 1, "caller");
            let batch = queues.next(now);
            assert_eq!(batch[0], "caller");
            before.extend(batch.into_iter().filter(|operation| *operation != "caller"));
        }
        assert!(before.len() <= 1 + BACKGROUND_COST_MAX, "{before:?}");
        // The other queues progress too, regardless of the number of callers.
        for _ in 0..10 {
            queues.push(OperationClass::Large, STEP, "large");
        }
        queues.push(OperationClass::Called, 1, "caller");
        let next: Vec<&str> = (0..4).flat_map(|_| queues.next(now)).collect();
        assert!(next.contains(&"background") && next.contains(&"large"), "{next:?}");
    }

    #[test]
    fn commit_queue_steps_pass_single_ticket_operations() {
        let (mut queues, now) = (CommitQueues::default(), Instant::now());
        for _ in 0..2000 {
            queues.push(OperationClass::Background, 1, "expires");
        }
        for _ in 0..10 {
            queues.push(OperationClass::Called, 1, "caller");
            queues.push(OperationClass::Step, STEP, "goes");
            let next: Vec<&str> = (0..3).flat_map(|_| queues.next(now)).collect();
            assert!(next.contains(&"goes") && next.contains(&"expires"), "{next:?}");
        }
    }

    #[test]
    fn commit_queue_without_callers_fills_batch_with_background() {
        let (mut queues, start) = (CommitQueues::default(), Instant::now());
        queues.push(OperationClass::Called, 1, 0);
        (1..=600).for_each(|number| queues.push(OperationClass::Background, 1, number));
        assert_eq!(queues.next(start).len(), 1 + BACKGROUND_COST_MAX);
        let idle = start + CALLED_RECENTLY;
        assert_eq!(queues.next(idle).len(), BATCH_COST_MAX);
        assert_eq!(queues.next(idle).len(), 600 - BACKGROUND_COST_MAX - BATCH_COST_MAX);
        assert!(queues.is_empty());
    }
}
