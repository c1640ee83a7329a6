//! Commit queues, and the selection of the operations of the next batch.
//!
//! Operations with a caller that touch one ticket come first. Large operations, background steps and other background
//! operations share the rest of a batch in rotating order, so that none of them starves.
//!
//! The queues are bounded by permits. Requests may take only half of them, so that operations that free resources can still
//! enter.
//!
//! Caller: the committer (`submit` and its run loop).

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    sync::mpsc,
    time::{Duration, Instant},
};

use rm_model::operation::{Operation, STEP_TICKETS_MAX};

use super::QueuedOperation;

/// Maximum number of queued and contended operations. More are rejected, because they would wait past the deadlines of their
/// callers.
pub(super) const WAITING_MAX: usize = 16_384;

/// Maximum number of queued operations with which a request can still enter.
const REQUESTS_MAX: usize = WAITING_MAX / 2;

/// Maximum cost of one batch. Larger batches cost hardly less per operation and increase the latency of all callers.
pub(super) const BATCH_COST_MAX: usize = 512;

/// Maximum cost of large and background operations in a batch while callers are active. The bound lets such operations
/// progress, under full load, at three tenths of the rate of an idle service.
const BACKGROUND_COST_MAX: usize = 64;

/// Time after a caller's operation during which the next one is expected.
const CALLED_RECENTLY: Duration = Duration::from_millis(100);

// No operation may cost more than a batch.
const _: () = assert!(STEP_TICKETS_MAX <= BATCH_COST_MAX && BACKGROUND_COST_MAX >= STEP_TICKETS_MAX);

/// Permits of queued and contended operations.
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

/// The four commit queues.
pub(super) struct CommitQueues {
    callers: CommitQueue,
    /// Queues that share [`BACKGROUND_COST_MAX`]: large, steps, background.
    in_turn: [CommitQueue; 3],
    /// Index of the queue that comes first in the next batch.
    turn: usize,
    /// Time of the last operation with a caller.
    last_call: Option<Instant>,
}

/// Channel of one queue, with a look-ahead buffer of operations that are not yet in a batch.
struct CommitQueue {
    waiting: mpsc::Receiver<QueuedOperation>,
    next: VecDeque<QueuedOperation>,
}

/// Senders of the commit queues.
#[derive(Clone, Debug)]
pub(super) struct QueueSenders {
    /// Operations with a caller that touch one ticket.
    pub callers: mpsc::Sender<QueuedOperation>,
    /// Operations with a caller that may touch many tickets. Callers with one ticket do not wait for them.
    pub large: mpsc::Sender<QueuedOperation>,
    /// Background operations that touch many tickets, one after another. A queue of their own keeps them from waiting behind
    /// thousands of operations on one ticket.
    pub steps: mpsc::Sender<QueuedOperation>,
    /// Background operations that touch one ticket.
    pub background: mpsc::Sender<QueuedOperation>,
}

impl QueueSenders {
    /// Returns the sender for an operation with a caller.
    pub fn called(&self, operation: &Operation) -> &mpsc::Sender<QueuedOperation> {
        if operation.cost() == 1 { &self.callers } else { &self.large }
    }

    /// Returns the sender for an operation without a caller.
    pub fn uncalled(&self, operation: &Operation) -> &mpsc::Sender<QueuedOperation> {
        if operation.cost() == 1 { &self.background } else { &self.steps }
    }
}

impl CommitQueues {
    /// Creates the queues and their senders.
    pub fn new() -> (QueueSenders, Self) {
        let (callers, waited_for) = CommitQueue::new();
        let (large, waiting) = CommitQueue::new();
        let (steps, following) = CommitQueue::new();
        let (background, rest) = CommitQueue::new();
        let queues = Self { callers: waited_for, in_turn: [waiting, following, rest], turn: 0, last_call: None };
        (QueueSenders { callers, large, steps, background }, queues)
    }

    /// Waits until an operation is queued. Returns false if all senders are dropped.
    pub async fn wait(&mut self) -> bool {
        let [large, steps, background] = &mut self.in_turn;
        if [&self.callers, large, steps, background].iter().any(|queue| !queue.next.is_empty()) {
            return true;
        }
        tokio::select! {
            biased;
            called = self.callers.waiting.recv() => match called {
                Some(pending) => self.callers.next.push_back(pending),
                None => return false,
            },
            Some(pending) = large.waiting.recv() => large.next.push_back(pending),
            Some(pending) = steps.waiting.recv() => steps.next.push_back(pending),
            Some(pending) = background.waiting.recv() => background.next.push_back(pending),
        }
        true
    }

    /// Removes and returns the operations of the next batch.
    pub fn next(&mut self) -> Vec<QueuedOperation> {
        self.callers.fill();
        self.in_turn.iter_mut().for_each(CommitQueue::fill);
        if !self.callers.next.is_empty() {
            self.last_call = Some(Instant::now());
        }
        let is_called = self.last_call.is_some_and(|last| last.elapsed() < CALLED_RECENTLY);
        let mut batch = Vec::with_capacity(self.callers.next.len().min(BATCH_COST_MAX));
        self.callers.take(BATCH_COST_MAX, &mut batch);
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

impl CommitQueue {
    fn new() -> (mpsc::Sender<QueuedOperation>, Self) {
        let (door, waiting) = mpsc::channel(WAITING_MAX);
        (door, Self { waiting, next: VecDeque::new() })
    }

    /// Fills the look-ahead buffer up to the maximum number of operations of a batch.
    fn fill(&mut self) {
        while self.next.len() < BATCH_COST_MAX {
            let Ok(pending) = self.waiting.try_recv() else { return };
            self.next.push_back(pending);
        }
    }

    /// Moves the first operations to `batch` up to a total cost of `cost_max`. Returns their cost.
    fn take(&mut self, cost_max: usize, batch: &mut Vec<QueuedOperation>) -> usize {
        let mut cost = 0;
        while let Some(pending) = self.next.pop_front_if(|pending| cost + pending.operation.cost() <= cost_max) {
            cost += pending.operation.cost();
            batch.push(pending);
        }
        cost
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;
    use crate::committer::OperationState;
    use rm_model::{
        em::EmInstance,
        operation::{ReleaseTicket, UnregisterEm},
        principal::Principal,
    };

    fn pending(operation: Operation) -> QueuedOperation {
        let (reply, _) = oneshot::channel();
        let (by, patience) = (Principal::Anonymous.into(), Instant::now().into());
        let (progress, trace) = (OperationState::default(), Default::default());
        QueuedOperation { by, operation, patience, progress, reply, counters: None, waits: None, trace, _room: None }
    }

    fn em(host: &str) -> EmInstance {
        EmInstance::parse("em", "ecm", host).unwrap()
    }

    fn goes(host: &str) -> QueuedOperation {
        pending(Operation::Unregister(UnregisterEm { em: em(host), epoch: None }))
    }

    fn hosts(batch: &[QueuedOperation]) -> Vec<String> {
        batch.iter().map(|pending| pending.operation.em().instance.to_string()).collect()
    }

    #[tokio::test]
    async fn commit_queue_with_background_load_prefers_callers() {
        let (doors, mut queues) = CommitQueues::new();
        for _ in 0..1000 {
            doors.background.try_send(goes("background")).unwrap();
        }
        doors.large.try_send(goes("large")).unwrap();
        let mut before = Vec::new();
        while !before.contains(&"large".to_owned()) {
            // Each batch has a caller's operation, so background operations share the smaller cost.
            let user = rm_model::name::Name::parse("user", "hadoop").unwrap();
            let released = ReleaseTicket { ticket_id: uuid::Uuid::nil(), user, em: em("caller") };
            doors.callers.try_send(pending(Operation::Released(released))).unwrap();
            let batch = hosts(&queues.next());
            assert_eq!(batch[0], "caller");
            before.extend(batch.into_iter().filter(|host| host != "caller"));
        }
        assert!(before.len() <= 2, "{before:?}");
        // The other queues progress too, regardless of the number of callers.
        for _ in 0..10 {
            doors.large.try_send(goes("large")).unwrap();
        }
        doors.callers.try_send(goes("caller")).unwrap();
        let next: Vec<String> = (0..4).flat_map(|_| hosts(&queues.next())).collect();
        assert!(next.iter().any(|host| host == "background") && next.iter().any(|host| host == "large"), "{next:?}");
    }

    #[tokio::test]
    async fn commit_queue_steps_pass_single_ticket_operations() {
        let (doors, mut queues) = CommitQueues::new();
        let user = rm_model::name::Name::parse("user", "hadoop").unwrap();
        let of = |host: &str| ReleaseTicket { ticket_id: uuid::Uuid::nil(), user: user.clone(), em: em(host) };
        for _ in 0..2000 {
            doors.background.try_send(pending(Operation::Expire(of("expires")))).unwrap();
        }
        for _ in 0..10 {
            doors.callers.try_send(pending(Operation::Released(of("caller")))).unwrap();
            doors.steps.try_send(pending(Operation::EndTickets(em("goes")))).unwrap();
            let next: Vec<String> = (0..3).flat_map(|_| hosts(&queues.next())).collect();
            assert!(next.iter().any(|host| host == "goes") && next.iter().any(|host| host == "expires"), "{next:?}");
        }
    }
}
