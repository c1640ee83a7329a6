//! An instance: the structures that its requests share, its calls, and its commit queue.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use rm_engine::{
    commit_queue::CommitQueues,
    contended_keys::{ContendedKeys, KeyEffects, KeyWaiter},
    request::{Action, InQueue, Patience, Request, SharedState},
    waiter_index::{WaiterIndex, WaiterProfile},
    wake_reason::{Needs, WakeReason},
};
use rm_model::{
    assessment::Verdict,
    em::EmInstance,
    limit::Limits,
    operation::{LockKey, Operation, PlacedRequest, QueuedOutcome, Rejection, RequestSpec, WaitParameters},
    placement::{ClosedEm, ClusterView},
    wait_queue::{QueuePosition, WaitKey, WaitKeyHash, WaitKeys},
};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    choices::Choices,
    store::{Notice, SimError, Store, verdict},
};

/// An operation in a commit queue; with the call that waits for it.
pub struct QueuedOperation {
    pub operation: Operation,
    pub patience: Patience,
    pub call: Option<u64>,
}

/// The call that waits for an operation.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    pub call: u64,
    /// Claim of the call when it submitted the operation; nil if it could not enter the queue.
    pub claim: Uuid,
}

impl QueuedOperation {
    /// Returns the call that waits for the operation.
    pub fn caller(&self) -> Option<Caller> {
        let Operation::Request(request) = &self.operation else { return None };
        Some(Caller { call: self.call?, claim: request.claim().unwrap_or_default() })
    }

    /// Returns the lock key that can be contended.
    pub fn key(&self) -> LockKey {
        LockKey::Em(self.operation.em().clone())
    }
}

/// The structures that the requests of an instance share.
pub struct Instance {
    pub id: Uuid,
    pub view: RefCell<ClusterView>,
    pub keys: ContendedKeys<QueuedOperation, LockKey>,
    /// Keys with a task.
    pub tasks: BTreeSet<LockKey>,
    pub waiters: RefCell<WaiterIndex<u64>>,
    pub queues: CommitQueues<QueuedOperation>,
    pub calls: BTreeMap<u64, Call>,
    /// Notifications of other instances that have not arrived.
    /// Freed keys, each with the requests that an operator has removed there.
    pub notifications: Vec<Notice>,
    pub limits: Arc<Limits>,
}

/// What the cache of an instance has observed of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Belief {
    /// That the request fits, which may be wrong.
    Fits,
    /// The present state.
    Known,
    Nothing,
}

impl Belief {
    pub fn chosen(choices: &mut Choices) -> Self {
        match choices.below(4) {
            0 => Self::Nothing,
            2 => Self::Known,
            _ => Self::Fits,
        }
    }
}

/// A caller with its request.
pub struct Call {
    pub request: Request<SimError>,
    /// Action that is under way; `None` while the committer has the request.
    pub action: Option<Action<SimError>>,
    pub handle: Handle,
}

/// State of a request in the wait queue of an instance.
pub struct Handle {
    pub number: u64,
    pub any_em: bool,
    pub may_wait: bool,
    /// Whether capacity at any EM may serve the request.
    pub looks_anywhere: bool,
    pub ticket_id: Uuid,
    /// Identifies the call, until its position is lost.
    pub claim: Uuid,
    pub is_queued: bool,
    pub entry: Option<(QueuePosition, WaitKeys)>,
    /// Time of the decision that stored the entry.
    pub decided_at: OffsetDateTime,
    pub priority: Option<i16>,
    /// Dimensions that the request needs.
    pub needs: Needs,
    pub subscribed: BTreeSet<WaitKey>,
    /// Scopes with guarantees that may entitle the request.
    pub guaranteed: Vec<WaitKey>,
    pub news_count: u64,
    pub is_asleep: bool,
    pub is_notified: bool,
    /// Whether the call no longer owns its position, and checks once then.
    pub is_removed: bool,
    /// EM and specs of the caller's request.
    pub content: (Option<EmInstance>, Vec<Arc<RequestSpec>>),
    /// What the cache has observed.
    pub belief: Cell<Belief>,
}

impl Handle {
    /// Creates the handle of a call that has no permit to wait yet.
    pub fn new(number: u64, any_em: bool, belief: Belief) -> Self {
        Self {
            number,
            any_em,
            may_wait: false,
            looks_anywhere: any_em,
            ticket_id: Uuid::from_u128(number.into()),
            claim: Uuid::from_u128(number.into()),
            is_queued: false,
            entry: None,
            decided_at: OffsetDateTime::UNIX_EPOCH,
            priority: None,
            needs: Needs::default(),
            subscribed: BTreeSet::new(),
            guaranteed: Vec::new(),
            news_count: 0,
            is_asleep: false,
            is_notified: false,
            is_removed: false,
            content: (None, Vec::new()),
            belief: Cell::new(belief),
        }
    }
}

/// A request and the shared structures of its instance.
pub struct Shared<'a> {
    pub instance: &'a Instance,
    pub store: &'a mut Store,
    pub handle: &'a mut Handle,
}

impl Shared<'_> {
    pub fn insert(&mut self, since: u64) {
        let Some((position, wait_keys)) = &self.handle.entry else { return };
        if self.handle.is_removed {
            return;
        }
        let short = wait_keys.iter().filter(|(_, is_short)| **is_short).map(|(wait_key, _)| wait_key);
        let keys: BTreeSet<WaitKeyHash> = short
            .chain(&self.handle.guaranteed)
            .chain(&self.handle.subscribed)
            .map(|wait_key| self.store.key(wait_key))
            .collect();
        let Handle { number, looks_anywhere, needs, decided_at, .. } = *self.handle;
        let profile = WaiterProfile { wake: number, any_em: looks_anywhere, needs };
        self.instance.waiters.borrow_mut().insert(*position, profile, keys, since, decided_at);
    }
}

impl SharedState for Shared<'_> {
    fn needs_check(&self, _: &PlacedRequest) -> bool {
        self.handle.belief.get() != Belief::Fits
    }

    fn observed_verdict(&self, request: &PlacedRequest) -> Option<Verdict> {
        match self.handle.belief.get() {
            Belief::Fits => Some(Verdict::Fits),
            Belief::Known => {
                let mut request = request.clone();
                prepare(self.instance, self.handle, &mut request, false);
                verdict(&request, self.store.check(&request)).ok()
            }
            Belief::Nothing => None,
        }
    }

    fn choose(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.instance.view.borrow_mut().choose(ask, self.instance.limits.policies(), except)
    }

    fn release_assumption(&self, em: &EmInstance) {
        self.instance.view.borrow_mut().settle(em);
    }

    fn best_candidate(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.instance.view.borrow_mut().best(ask, self.instance.limits.policies(), except)
    }

    fn best_contended(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.instance.view.borrow_mut().best_blocked(ask, self.instance.limits.policies(), except)
    }

    fn is_contended(&self, em: &EmInstance) -> bool {
        self.instance.view.borrow().is_contended(em)
    }

    fn nearest_fit(&self, ask: &RequestSpec) -> Option<EmInstance> {
        self.instance.view.borrow_mut().closest(ask, self.instance.limits.policies())
    }

    fn closed(&self, em: &EmInstance) -> Option<ClosedEm> {
        self.instance.view.borrow().closed(em)
    }

    fn no_candidate(&self, ask: &RequestSpec) -> Rejection {
        Rejection::NoEmMatches(ask.selector.to_string())
    }

    fn enter_queue(&mut self, _: bool, ask: &RequestSpec) -> bool {
        let RequestSpec { resource, labels, selector, .. } = ask;
        (self.handle.is_queued, self.handle.needs) = (true, Needs::of(resource, labels, selector));
        self.instance.waiters.borrow_mut().callers += 1;
        true
    }

    fn has_entry(&self) -> bool {
        self.handle.entry.is_some()
    }

    fn has_entry_at(&self, wait_keys: &WaitKeys) -> bool {
        self.handle.entry.as_ref().is_some_and(|(_, at)| at == wait_keys)
    }

    fn update_entry(&mut self, entry: &QueuedOutcome, any_em: bool) {
        self.handle.looks_anywhere = any_em;
        self.handle.decided_at = entry.decided_at;
        self.handle.priority = Some(entry.priority);
        let guaranteed = entry.guaranteed_scopes.as_ref();
        let guaranteed = guaranteed.map(|scopes| scopes.iter().cloned().map(WaitKey::Scope).collect::<Vec<_>>());
        let has_other = guaranteed.as_ref().is_some_and(|guaranteed| self.handle.guaranteed != *guaranteed);
        self.handle.guaranteed = guaranteed.unwrap_or_else(|| std::mem::take(&mut self.handle.guaranteed));
        if self.instance.position(self.handle) == Some(entry.position)
            && self.has_entry_at(&entry.wait_keys)
            && !has_other
        {
            if self.instance.is_waiter(self.handle) {
                self.instance.waiters.borrow_mut().place(entry.position, entry.decided_at);
            }
        } else {
            self.handle.ticket_id = entry.position.ticket_id();
            self.handle.entry = Some((entry.position, entry.wait_keys.clone()));
            self.insert(self.handle.news_count);
        }
    }

    fn has_ended(&self) -> bool {
        self.handle.is_removed
    }

    fn mark_removed(&mut self) {
        self.instance.leave_index(self.handle);
        self.handle.entry = None;
        self.handle.is_removed = false;
        self.handle.claim = Uuid::from_u128(self.handle.claim.as_u128() + (1 << 64));
    }

    fn granted(&mut self) {
        self.handle.entry = None;
    }

    fn freed_count(&self) -> u64 {
        self.instance.waiters.borrow().news_count()
    }

    fn subscribe(&mut self, wait_keys: BTreeSet<WaitKey>, since: u64) {
        if self.handle.subscribed != wait_keys {
            self.handle.subscribed = wait_keys;
            self.insert(since);
        }
    }

    fn forward_wake(&self, wake: WakeReason) {
        if self.instance.is_waiter(self.handle) {
            self.instance.waiters.borrow_mut().pass_on(self.handle.ticket_id, wake);
        }
    }

    fn count_check(&self, _: WakeReason) {}
}

impl Instance {
    /// The position of a call: that of the index, if another request has changed it.
    pub fn position(&self, handle: &Handle) -> Option<QueuePosition> {
        let stored = handle.entry.as_ref().map(|(position, _)| *position);
        let moved = self.is_waiter(handle).then(|| self.waiters.borrow().position_of(handle.ticket_id)).flatten();
        moved.or(stored)
    }

    /// Whether the index has a call as the waiter under its ticket id.
    pub fn is_waiter(&self, handle: &Handle) -> bool {
        handle.entry.is_some() && self.waiters.borrow().has(handle.ticket_id, &handle.number)
    }

    /// Removes a call from the index.
    pub fn leave_index(&self, handle: &Handle) {
        if self.is_waiter(handle) {
            self.waiters.borrow_mut().remove(handle.ticket_id);
        }
    }

    /// Moves an operation into the queue of a key that it waits for.
    pub fn wait_for_key(
        &mut self,
        key: LockKey,
        queued: QueuedOperation,
        now: Instant,
        effects: &mut KeyEffects<QueuedOperation, LockKey>,
    ) {
        self.tasks.extend(self.keys.open(&key, key.clone()));
        let (until, leaves_at) = match queued.patience {
            Patience::Deadline => (now + Duration::from_millis(300), None),
            Patience::OtherEms => (now + Duration::from_secs(60), Some(now)),
            Patience::OtherEmsAfterPause => (now + Duration::from_secs(60), Some(now + Duration::from_millis(100))),
        };
        let waiter = KeyWaiter { operation: queued, cost: 1, is_request: true, until, leaves_at };
        self.keys.join(&key, waiter, now, effects);
    }

    /// Creates an instance without calls.
    pub fn new(id: Uuid) -> Self {
        Self {
            id,
            view: RefCell::new(ClusterView::seeded(0)),
            keys: ContendedKeys::default(),
            tasks: BTreeSet::new(),
            waiters: RefCell::default(),
            queues: CommitQueues::default(),
            calls: BTreeMap::new(),
            notifications: Vec::new(),
            limits: Arc::default(),
        }
    }

    /// Records which EMs became contended or free.
    pub fn note_contended(&mut self, effects: &KeyEffects<QueuedOperation, LockKey>) {
        let mut is_any_free = false;
        for (em, is_contended) in &effects.ems {
            self.view.borrow_mut().note_contended(em, *is_contended);
            is_any_free |= !is_contended;
        }
        if is_any_free {
            self.waiters.borrow_mut().wake_anywhere();
        }
    }

    /// Whether anything is under way that is not a sleeping request.
    pub fn is_busy(&self) -> bool {
        let is_busy = |call: &Call| match &call.action {
            Some(Action::Wait) => call.handle.is_notified,
            action => action.is_some(),
        };
        !self.queues.is_empty()
            || !self.tasks.is_empty()
            || !self.notifications.is_empty()
            || self.calls.values().any(is_busy)
    }
}

/// Adds the wait parameters to an action in the queue.
pub fn enter(instance: &Instance, handle: &mut Handle, request: &mut PlacedRequest, in_queue: Option<InQueue>) {
    if let Some(InQueue { is_elsewhere }) = in_queue {
        handle.news_count = instance.waiters.borrow().news_count();
        prepare(instance, handle, request, is_elsewhere);
    }
}

fn prepare(instance: &Instance, handle: &Handle, request: &mut PlacedRequest, is_elsewhere: bool) {
    request.wait = Some(WaitParameters {
        claim: handle.claim,
        instance_id: instance.id,
        remaining: Duration::from_secs(60),
        is_elsewhere,
        priority: handle.priority,
        position: instance.position(handle),
    });
}
