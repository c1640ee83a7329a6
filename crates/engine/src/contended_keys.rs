//! Contended keys: the operations that wait for lock keys which other transactions, or rows of other programs, own.
//!
//! Each contended key has a queue of its own, so that batches meet the key only once. Its task in the shell waits for the key in
//! turns, and commits the queued operations when the key is free. An operation that can be tried on another EM leaves the queue
//! while the key is contended. A queue without operations stays open, watched, until the key is free, so that placement avoids
//! the EM.
//!
//! Invariant: an operation is in exactly one of: commit queue, batch, queue of a contended key.
//! Never: waits; replies. [`KeyEffects`] has the operations to reply to, and what changed for placement.
//! Caller: `rm_service::committer`.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    time::Instant,
};

use rm_model::{em::EmInstance, operation::LockKey};

use crate::commit_queue::BATCH_COST_MAX;

/// Maximum number of operations in one queue while requests can enter. The bound keeps one contended key from using all
/// permits.
pub const KEY_REQUESTS_MAX: usize = 1024;

/// An operation that waits for a contended key.
#[derive(Debug)]
pub struct KeyWaiter<T> {
    /// The operation.
    pub operation: T,
    /// Cost of the operation in a batch.
    pub cost: usize,
    /// Whether it is a request. Other operations enter a full queue too.
    pub is_request: bool,
    /// Deadline of the operation.
    pub until: Instant,
    /// Time from which the operation leaves a contended EM, because other EMs can be tried; `None` if they cannot.
    pub leaves_at: Option<Instant>,
}

/// Effects of a change on the operations and on placement.
#[derive(Debug)]
pub struct KeyEffects<T, H> {
    /// EMs that became contended (true) or free.
    pub ems: Vec<(EmInstance, bool)>,
    /// Operations to try on other EMs.
    pub elsewhere: Vec<T>,
    /// Operations for which there is no space.
    pub rejected: Vec<T>,
    /// Operations whose deadline has passed.
    pub overdue: Vec<T>,
    /// Handles of the tasks to notify: an empty queue has an operation, or stays empty.
    pub notified: Vec<H>,
}

impl<T, H> Default for KeyEffects<T, H> {
    fn default() -> Self {
        let (elsewhere, rejected, overdue) = (Vec::new(), Vec::new(), Vec::new());
        Self { ems: Vec::new(), elsewhere, rejected, overdue, notified: Vec::new() }
    }
}

/// Next action of the task of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyTask {
    /// Wait one turn for the key: operations wait.
    Turn,
    /// Poll the key: operations left because it is contended.
    Watch,
    /// End: the queue is closed.
    End,
}

/// The operations that wait for one contended key.
#[derive(Debug)]
struct KeyQueue<T, H> {
    waiting: VecDeque<KeyWaiter<T>>,
    /// Whether the key was contended at the end of the last turn.
    is_contended: bool,
    /// Whether only a hold was found there at the end of the last turn.
    is_held: bool,
    /// Whether an operation left for another EM.
    is_watched: bool,
    task: H,
}

impl<T, H> KeyQueue<T, H> {
    /// Whether the queue is empty, but stays open because its contended key made operations leave.
    fn is_only_watched(&self) -> bool {
        self.is_contended && self.is_watched && self.waiting.is_empty()
    }

    /// Removes and returns the operations that `leaves` selects.
    fn remove(&mut self, leaves: impl FnMut(&KeyWaiter<T>) -> bool) -> Vec<T> {
        let (left, stay): (Vec<_>, Vec<_>) = mem::take(&mut self.waiting).into_iter().partition(leaves);
        self.waiting = stay.into();
        left.into_iter().map(|waiter| waiter.operation).collect()
    }

    /// Records whether the key is contended. Returns the change for placement.
    fn set_contended(&mut self, key: &LockKey, is_contended: bool) -> Option<(EmInstance, bool)> {
        let is_new = mem::replace(&mut self.is_contended, is_contended) != is_contended;
        match key {
            LockKey::Em(em) if is_new => Some((em.clone(), is_contended)),
            _ => None,
        }
    }
}

/// All contended keys of one instance. `H` is the handle of the task of a queue.
#[derive(Debug)]
pub struct ContendedKeys<T, H>(BTreeMap<LockKey, KeyQueue<T, H>>);

impl<T, H> Default for ContendedKeys<T, H> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T, H: Clone> ContendedKeys<T, H> {
    /// Whether no key is contended.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the key has a queue.
    pub fn contains(&self, key: &LockKey) -> bool {
        self.0.contains_key(key)
    }

    /// Whether an operation must wait for the key in its queue. While the key is only held, an operation that `may_queue` enters a
    /// wait queue instead.
    pub fn takes(&self, key: &LockKey, may_queue: bool) -> bool {
        self.0.get(key).is_some_and(|queue| !(queue.is_held && may_queue))
    }

    /// Records whether only a hold was found at a key.
    pub fn note_held(&mut self, key: &LockKey, is_held: bool) {
        if let Some(queue) = self.0.get_mut(key) {
            queue.is_held = is_held;
        }
    }

    /// Whether the key was contended when it was last tried.
    pub fn is_contended(&self, key: &LockKey) -> bool {
        self.0.get(key).is_some_and(|queue| queue.is_contended)
    }

    /// Opens the queue of a key. Returns the handle of its task, which must begin; `None` if the queue is open.
    pub fn open(&mut self, key: &LockKey, task: H) -> Option<H> {
        if self.contains(key) {
            return None;
        }
        let queue = KeyQueue {
            waiting: VecDeque::new(),
            is_contended: false,
            is_held: false,
            is_watched: false,
            task: task.clone(),
        };
        self.0.insert(key.clone(), queue);
        Some(task)
    }

    /// Adds an operation to the queue of a key, which must be open.
    pub fn join(&mut self, key: &LockKey, waiter: KeyWaiter<T>, now: Instant, effects: &mut KeyEffects<T, H>) {
        let Some(queue) = self.0.get_mut(key) else {
            debug_assert!(false, "the queue of {key:?} is closed");
            return effects.rejected.push(waiter.operation);
        };
        let is_full = waiter.is_request && queue.waiting.len() >= KEY_REQUESTS_MAX;
        if leaves(key, &waiter, now) && (queue.is_contended || is_full) {
            // A full queue counts as contended.
            effects.ems.extend(queue.set_contended(key, true));
            queue.is_watched = true;
            effects.elsewhere.push(waiter.operation);
        } else if is_full {
            effects.rejected.push(waiter.operation);
        } else {
            if queue.waiting.is_empty() {
                effects.notified.push(queue.task.clone());
            }
            queue.waiting.push_back(waiter);
        }
    }

    /// Records whether a key is contended, as a turn or a poll found it. Operations that can be tried on another EM leave a
    /// contended one.
    pub fn found(&mut self, key: &LockKey, is_contended: bool, now: Instant, effects: &mut KeyEffects<T, H>) {
        let Some(queue) = self.0.get_mut(key) else { return };
        effects.ems.extend(queue.set_contended(key, is_contended));
        if is_contended {
            let left = queue.remove(|waiter| leaves(key, waiter, now));
            queue.is_watched |= !left.is_empty();
            effects.elsewhere.extend(left);
        } else {
            queue.is_watched = false;
        }
        if queue.waiting.is_empty() {
            effects.notified.push(queue.task.clone());
        }
    }

    /// Returns the next action for a key. Removes overdue operations, and those that are not `wanted` any more. Closes a queue
    /// that has no further use. A watched queue without operations closes only if the committer ends (`is_closing`).
    pub fn next_task(
        &mut self,
        key: &LockKey,
        (now, is_closing): (Instant, bool),
        wanted: impl Fn(&T) -> bool,
        effects: &mut KeyEffects<T, H>,
    ) -> KeyTask {
        let Some(queue) = self.0.get_mut(key) else { return KeyTask::End };
        queue.waiting.retain(|waiter| wanted(&waiter.operation));
        effects.overdue.extend(queue.remove(|waiter| waiter.until <= now));
        if !queue.waiting.is_empty() {
            return KeyTask::Turn;
        }
        if queue.is_only_watched() && !is_closing {
            return KeyTask::Watch;
        }
        effects.ems.extend(queue.set_contended(key, false));
        self.0.remove(key);
        KeyTask::End
    }

    /// Removes the first operations of a queue that are `selected`, up to the cost of one batch. The queue stays open.
    pub fn take(&mut self, key: &LockKey, selected: impl Fn(&T) -> bool) -> Vec<T> {
        let Some(queue) = self.0.get_mut(key) else { return Vec::new() };
        let mut left = BATCH_COST_MAX;
        queue.remove(|waiter| {
            if !selected(&waiter.operation) {
                return false;
            }
            let rest = left.checked_sub(waiter.cost);
            // Later operations do not overtake one for which there is no space.
            left = rest.unwrap_or_default();
            rest.is_some()
        })
    }

    /// Returns the operations in the queue of a key.
    pub fn waiting(&self, key: &LockKey) -> impl Iterator<Item = &T> {
        self.0.get(key).into_iter().flat_map(|queue| &queue.waiting).map(|waiter| &waiter.operation)
    }

    /// Returns the number of queues that take turns.
    pub fn turns(&self) -> usize {
        self.0.values().filter(|queue| !queue.is_only_watched()).count()
    }

    /// Returns the keys of the empty queues that stay open.
    pub fn watched(&self) -> BTreeSet<LockKey> {
        self.0.iter().filter(|(_, queue)| queue.is_only_watched()).map(|(key, _)| key.clone()).collect()
    }

    /// Returns the handles of all tasks.
    pub fn tasks(&self) -> impl Iterator<Item = &H> {
        self.0.values().map(|queue| &queue.task)
    }
}

/// Whether an operation leaves a contended key, because other EMs can be tried.
fn leaves<T>(key: &LockKey, waiter: &KeyWaiter<T>, now: Instant) -> bool {
    matches!(key, LockKey::Em(_)) && waiter.leaves_at.is_some_and(|leaves_at| leaves_at <= now)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key(host: &str) -> LockKey {
        LockKey::Em(EmInstance::parse("em", "ecm", host).unwrap())
    }

    fn waiter(operation: u32, now: Instant, leaves_at: Option<Instant>) -> KeyWaiter<u32> {
        let until = now + Duration::from_secs(10);
        KeyWaiter { operation, cost: 1, is_request: true, until, leaves_at }
    }

    /// A queue of one contended key with an operation that stays.
    fn contended(now: Instant) -> (ContendedKeys<u32, ()>, LockKey) {
        let (mut keys, key, mut effects) = (ContendedKeys::default(), key("host1"), KeyEffects::default());
        assert!(keys.open(&key, ()).is_some() && keys.open(&key, ()).is_none());
        keys.join(&key, waiter(1, now, None), now, &mut effects);
        keys.found(&key, true, now, &mut effects);
        assert_eq!((effects.ems.len(), effects.notified.len()), (1, 1), "{effects:?}");
        (keys, key)
    }

    #[test]
    fn contended_key_sends_requests_to_other_ems_and_stays_watched() {
        let now = Instant::now();
        let (mut keys, key) = contended(now);
        let mut effects = KeyEffects::default();
        keys.join(&key, waiter(2, now, Some(now)), now, &mut effects);
        keys.join(&key, waiter(3, now, Some(now + Duration::from_secs(1))), now, &mut effects);
        assert_eq!(effects.elsewhere, [2]);
        keys.found(&key, true, now + Duration::from_secs(1), &mut effects);
        assert_eq!(effects.elsewhere, [2, 3]);
        assert_eq!(keys.next_task(&key, (now, false), |_| true, &mut effects), KeyTask::Turn);
        // The caller of the operation that stays is gone.
        assert_eq!(keys.next_task(&key, (now, false), |_| false, &mut effects), KeyTask::Watch);
        assert_eq!((keys.turns(), keys.watched().len()), (0, 1));
        keys.found(&key, false, now, &mut effects);
        assert_eq!(effects.ems.last().map(|(_, is_contended)| *is_contended), Some(false));
        assert_eq!(keys.next_task(&key, (now, false), |_| true, &mut effects), KeyTask::End);
        assert!(keys.is_empty());
    }

    #[test]
    fn contended_key_fails_overdue_operations_and_keeps_others() {
        let now = Instant::now();
        let (mut keys, key) = contended(now);
        let (mut effects, later) = (KeyEffects::default(), now + Duration::from_secs(5));
        keys.join(&key, waiter(2, later, None), now, &mut effects);
        assert_eq!(keys.next_task(&key, (now + Duration::from_secs(10), false), |_| true, &mut effects), KeyTask::Turn);
        assert_eq!((effects.overdue, keys.take(&key, |_| true)), (vec![1], vec![2]));
    }

    #[test]
    fn contended_key_bounds_requests_and_batches() {
        let now = Instant::now();
        let (mut keys, key) = contended(now);
        let mut effects = KeyEffects::default();
        for number in 0..KEY_REQUESTS_MAX as u32 {
            keys.join(&key, waiter(2 + number, now, None), now, &mut effects);
        }
        assert_eq!(effects.rejected.len(), 1);
        // Other operations enter a full queue.
        keys.join(&key, KeyWaiter { is_request: false, ..waiter(0, now, None) }, now, &mut effects);
        assert_eq!((effects.rejected.len(), keys.waiting(&key).count()), (1, KEY_REQUESTS_MAX + 1));
        assert_eq!(keys.take(&key, |_| true).len(), BATCH_COST_MAX);
        assert_eq!(keys.take(&key, |operation| *operation == KEY_REQUESTS_MAX as u32), [KEY_REQUESTS_MAX as u32]);
        keys.join(&key, KeyWaiter { cost: BATCH_COST_MAX, ..waiter(0, now, None) }, now, &mut effects);
        assert_eq!(keys.take(&key, |_| true).len(), BATCH_COST_MAX);
    }

    #[test]
    fn held_key_takes_no_request_that_may_queue() {
        let (mut keys, key) = contended(Instant::now());
        assert!(keys.takes(&key, true) && keys.takes(&key, false) && !keys.takes(&self::key("host2"), false));
        keys.note_held(&key, true);
        assert!(!keys.takes(&key, true) && keys.takes(&key, false));
        keys.note_held(&key, false);
        assert!(keys.takes(&key, true));
    }

    #[test]
    fn user_key_never_sends_operations_elsewhere() {
        let (now, mut effects) = (Instant::now(), KeyEffects::default());
        let user = LockKey::User(rm_model::name::Name::parse("user", "hadoop").unwrap());
        let mut keys: ContendedKeys<u32, ()> = ContendedKeys::default();
        keys.open(&user, ());
        keys.found(&user, true, now, &mut effects);
        keys.join(&user, waiter(1, now, Some(now)), now, &mut effects);
        assert!(effects.elsewhere.is_empty() && effects.ems.is_empty(), "{effects:?}");
        assert_eq!(keys.take(&user, |_| true), [1]);
    }
}
