//! A world of instances, requests and faults. A seed decides what happens next.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use rm_engine::{
    commit_queue::{CommitQueues, OperationClass},
    request::{Action, Event, Failure, Patience, Request, RequestResult, WaitResult},
    waiter_index::FreedCapacity,
    wake_reason::WakeReason,
};
use rm_model::{
    assessment::{BlockedRequest, Verdict},
    em::EmInstance,
    name::Name,
    operation::{DrainEm, Operation, Outcome, ReleaseTicket, RequestSpec, ResumeEm},
    principal::Principal,
    resource::Resource,
    wait_queue::{FreedKeys, QueuePosition, WaitKey, WaitKeyHash, WaitKeys},
};
use uuid::Uuid;

use crate::{
    instance::{Call, Handle, Instance, QueuedOperation, Shared, prepare},
    store::{SimError, SimResult, Store, register},
};

/// A generator of random numbers; equal seeds give equal numbers.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }

    fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    fn of<T: Clone>(&mut self, items: &[T]) -> Option<T> {
        if items.is_empty() { None } else { items.get(self.below(items.len())).cloned() }
    }
}

/// Size of a world, and its faults.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub instances: usize,
    pub ems: usize,
    pub requests: u64,
    pub faults: bool,
}

/// All instances, their store, and what has happened.
pub struct World {
    shape: Shape,
    random: Random,
    store: Store,
    instances: Vec<Instance>,
    ems: Vec<EmInstance>,
    submitted: u64,
    replies: BTreeMap<u64, usize>,
    start: Instant,
    /// Number of steps so far.
    pub steps: u64,
    /// Number of grants so far.
    pub grants: u64,
    /// Stages with a result, and the stages that followed.
    pub transitions: Transitions,
}

/// The next stages of each stage and result.
pub type Transitions = BTreeMap<(String, String), BTreeSet<String>>;

impl World {
    pub fn new(seed: u64, shape: Shape) -> Self {
        let mut world = Self {
            shape,
            random: Random::new(seed),
            store: Store::default(),
            instances: Vec::new(),
            ems: (0..shape.ems).map(|number| em(&format!("host{number}"))).collect(),
            submitted: 0,
            replies: BTreeMap::new(),
            start: Instant::now(),
            steps: 0,
            grants: 0,
            transitions: Transitions::new(),
        };
        for em in &world.ems {
            let cores = 1 + i64::try_from(world.random.below(4)).unwrap();
            world.store.commit(Uuid::nil(), &[register(em, cores)]);
        }
        (0..shape.instances).for_each(|_| world.add_instance());
        world
    }

    fn add_instance(&mut self) {
        let id = Uuid::from_u128((1 << 100) + u128::from(self.steps) * 64 + self.instances.len() as u128);
        self.instances.push(Instance {
            id,
            view: RefCell::default(),
            contended: RefCell::default(),
            waiters: RefCell::default(),
            queues: CommitQueues::default(),
            calls: BTreeMap::new(),
            notifications: Vec::new(),
            limits: Arc::default(),
        });
    }

    /// Runs all requests, with faults; then without faults until nothing happens any more; then asserts that no waiter was
    /// forgotten.
    pub fn run(&mut self) {
        while self.submitted < self.shape.requests {
            self.advance(true);
        }
        for _ in 0..200 {
            self.advance(true);
        }
        self.store.contended.clear();
        for em in self.ems.clone() {
            self.submit_operation(0, Operation::Resume(ResumeEm { em, reason: None }));
        }
        self.settle();
        for _ in 0..self.shape.ems + 2 {
            // Lost notifications and ended contention are found by the poll.
            for number in 0..self.instances.len() {
                self.learn_contention(number);
                self.instances[number].waiters.borrow_mut().poll();
                self.notify(number);
            }
            self.settle();
        }
        for call in self.instances.iter().flat_map(|instance| instance.calls.values()) {
            assert!(matches!(call.action, Some(Action::Wait)), "an operation of a request was lost");
        }
        let forgotten = self.store.grantable();
        assert_eq!(forgotten, None, "a waiter that fits was forgotten");
        let calls = self.instances.iter().map(|instance| instance.calls.len() as u64).sum::<u64>();
        let crashed = self.submitted - calls - self.replies.len() as u64;
        assert!(self.shape.faults || crashed == 0, "{crashed} requests have no reply");
    }

    fn settle(&mut self) {
        for _ in 0..1_000_000 {
            if !self.advance(false) {
                return;
            }
        }
        panic!("the instances do not come to rest");
    }

    /// Does one thing; returns false if nothing is left to do.
    fn advance(&mut self, goes_on: bool) -> bool {
        self.steps += 1;
        let number = self.random.below(self.instances.len());
        let things = if goes_on { 12 } else { 4 };
        match self.random.below(things) {
            0 | 1 => self.act(number, goes_on),
            2 => self.commit(number, goes_on),
            3 => self.hear(number, goes_on),
            4 | 5 if self.submitted < self.shape.requests => self.submit(number),
            6 | 7 => self.release(number),
            8 if self.shape.faults => self.disturb(number),
            _ => {}
        }
        goes_on || self.instances.iter().any(|instance| instance.is_busy())
    }

    fn submit(&mut self, number: usize) {
        self.submitted += 1;
        let (call, any_em) = (self.submitted, self.random.one_in(2));
        let named = if any_em { None } else { self.random.of(&self.ems) };
        let specs = 1 + self.random.below(2);
        let ticket_id = Uuid::from_u128(call.into());
        let asks = (0..specs).map(|_| spec(ticket_id, 1 + i64::try_from(self.random.below(4)).unwrap())).collect();
        let handle = Handle {
            number: call,
            any_em,
            ticket_id,
            is_queued: false,
            entry: None,
            subscribed: BTreeSet::new(),
            news_count: 0,
            is_asleep: false,
            is_notified: false,
            believes_fit: Cell::new(self.random.one_in(2)),
        };
        let request = Request::new(named, asks, !self.random.one_in(4));
        self.instances[number].calls.insert(call, Call { request, action: None, handle });
        self.step(number, call, None);
    }

    /// Gives a request the result of its action, or starts it, and begins the next action.
    fn step(&mut self, number: usize, call: u64, event: Option<Event<SimError>>) {
        let believes_fit = self.random.one_in(2);
        let instance = &mut self.instances[number];
        let Some(Call { mut request, mut handle, .. }) = instance.calls.remove(&call) else { return };
        handle.believes_fit.set(believes_fit);
        let mut shared = Shared { instance, store: &mut self.store, handle: &mut handle };
        let transition = (request.stage().to_owned(), event.as_ref().map_or("submitted", Event::name).to_owned());
        let mut action = match event {
            None => request.start(&mut shared),
            Some(event) => request.step(event, &mut shared),
        };
        let next = if matches!(action, Action::Reply(_)) { "reply" } else { request.stage() };
        self.transitions.entry(transition).or_default().insert(next.to_owned());
        match &mut action {
            Action::Reply(reply) => {
                assert!(!matches!(reply, RequestResult::Broken), "a result belongs to an action");
                self.grants += u64::from(matches!(reply, RequestResult::Decided(Outcome::Granted(_), _)));
                *self.replies.entry(call).or_default() += 1;
                assert_eq!(self.replies[&call], 1, "a request has one reply");
                self.end(number, handle);
                self.notify(number);
                return;
            }
            Action::Wait => {
                handle.is_notified = false;
                let position = handle.entry.as_ref().map(|(position, _)| *position);
                let woken = position.map(|position| instance.waiters.borrow_mut().rest(position));
                match woken {
                    Some(None) => handle.is_asleep = true,
                    woken => {
                        let wake = woken.flatten().unwrap_or(WakeReason::NEWS);
                        instance.calls.insert(call, Call { request, action: None, handle });
                        self.notify(number);
                        return self.step(number, call, Some(Event::Woken(WaitResult::Look(wake))));
                    }
                }
            }
            Action::Commit(placed, patience, in_queue) => {
                prepare(instance, &mut handle, placed, *in_queue);
                if let Some((position, _)) = handle.entry {
                    instance.waiters.borrow_mut().tries(position);
                }
                let (operation, patience) = (Operation::Request(placed.clone()), *patience);
                let queued = QueuedOperation { operation, patience, call: Some(call) };
                instance.queues.push(OperationClass::Called, 1, queued);
                instance.calls.insert(call, Call { request, action: None, handle });
                return self.notify(number);
            }
            Action::Check(placed, in_queue) => prepare(instance, &mut handle, placed, *in_queue),
            Action::Survey(_) | Action::Pause => {}
        }
        instance.calls.insert(call, Call { request, action: Some(action), handle });
        self.notify(number);
    }

    /// Removes what an ended call leaves behind.
    fn end(&mut self, number: usize, handle: Handle) {
        let instance = &mut self.instances[number];
        if handle.is_queued {
            instance.waiters.borrow_mut().callers -= 1;
        }
        if let Some((position, _)) = handle.entry {
            instance.waiters.borrow_mut().remove(position);
        }
        if handle.is_queued {
            let freed = self.store.leave(handle.ticket_id);
            self.publish(None, &freed);
        }
    }

    /// Finishes the action of one call of an instance.
    fn act(&mut self, number: usize, goes_on: bool) {
        let fails = goes_on && self.shape.faults && self.random.one_in(10);
        let gives_up = goes_on && self.random.one_in(30);
        let ready = |call: &Call| match &call.action {
            Some(Action::Wait) => call.handle.is_notified || gives_up,
            action => action.is_some(),
        };
        let calls = &self.instances[number].calls;
        let calls: Vec<u64> = calls.iter().filter(|(_, call)| ready(call)).map(|(number, _)| *number).collect();
        let Some(call) = self.random.of(&calls) else { return };
        let instance = &mut self.instances[number];
        let Some(action) = instance.calls.get_mut(&call).and_then(|call| call.action.take()) else { return };
        let is_final = self.random.one_in(4);
        let failure = || match is_final {
            true => Failure::Final(SimError::Defect),
            false => Failure::Transient(SimError::Unavailable),
        };
        let event = match action {
            Action::Survey(_) if fails => Event::Surveyed(Err(failure())),
            Action::Survey(_) => {
                let mut view = instance.view.borrow_mut();
                self.store.ems().for_each(|em| view.update(em.clone()));
                Event::Surveyed(Ok(()))
            }
            Action::Check(..) if fails => Event::Checked(Err(failure())),
            Action::Check(request, _) => Event::Checked(verdict(self.store.check(&request))),
            Action::Pause if goes_on && self.random.one_in(4) => Event::Woken(WaitResult::DeadlinePassed),
            Action::Pause => Event::Woken(WaitResult::Look(WakeReason::NEWS)),
            Action::Wait => {
                let Some(Call { handle, .. }) = instance.calls.get_mut(&call) else { return };
                handle.is_asleep = false;
                let position = handle.entry.as_ref().map(|(position, _)| *position);
                match (handle.is_notified, position) {
                    (true, Some(position)) => {
                        let wake = instance.waiters.borrow_mut().woken_by(position);
                        Event::Woken(WaitResult::Look(wake))
                    }
                    (true, None) => Event::Woken(WaitResult::Look(WakeReason::NEWS)),
                    (false, _) => Event::Woken(WaitResult::DeadlinePassed),
                }
            }
            Action::Commit(..) | Action::Reply(_) => return,
        };
        self.step(number, call, Some(event));
    }

    /// Commits the next batch of an instance.
    fn commit(&mut self, number: usize, goes_on: bool) {
        let now = self.start + Duration::from_millis(self.steps);
        let fails = goes_on && self.shape.faults && self.random.one_in(10);
        let is_unknown = goes_on && self.shape.faults && self.random.one_in(20);
        let instance = &mut self.instances[number];
        let batch = instance.queues.next(now);
        let contended = &self.store.contended;
        let (blocked, batch): (Vec<_>, Vec<_>) =
            batch.into_iter().partition(|queued| contended.contains(queued.operation.em()));
        let mut results: Vec<(u64, SimResult)> = Vec::new();
        for queued in blocked {
            instance.contended.borrow_mut().insert(queued.operation.em().clone());
            instance.view.borrow_mut().note_held(queued.operation.em(), true);
            match (queued.patience, queued.call) {
                (Patience::Deadline, Some(call)) if self.random.one_in(8) => {
                    results.push((call, Err(Failure::Transient(SimError::LockTimeout))));
                }
                (Patience::Deadline, _) | (_, None) => instance.queues.push(OperationClass::Called, 1, queued),
                (_, Some(call)) => results.push((call, Ok(Outcome::Contended))),
            }
        }
        if fails {
            let failed = batch.into_iter().filter_map(|queued| queued.call);
            let error = match self.random.one_in(4) {
                true => Failure::Final(SimError::Defect),
                false => Failure::Transient(SimError::Unavailable),
            };
            results.extend(failed.map(|call| (call, Err(error.clone()))));
        } else if !batch.is_empty() {
            let operations: Vec<Operation> = batch.iter().map(|queued| queued.operation.clone()).collect();
            let committed = self.store.commit(instance.id, &operations);
            let mut view = instance.view.borrow_mut();
            committed.ems.into_iter().for_each(|em| view.update(em));
            drop(view);
            let granted: Vec<(QueuePosition, WaitKeyHash)> = batch
                .iter()
                .zip(&committed.results)
                .filter(|(_, result)| matches!(result, Ok(Outcome::Granted(_))))
                .filter_map(|(queued, _)| Some((queued.operation.position()?, queued.operation.em().clone())))
                .map(|(position, em)| (position, self.store.key(&WaitKey::Em(em))))
                .collect();
            let freed = capacity(&mut self.store, &committed.freed);
            let others_wait = self.shape.instances > 1;
            self.instances[number].waiters.borrow_mut().committed(freed, granted, others_wait);
            self.publish(Some(number), &committed.freed);
            for (queued, result) in batch.into_iter().zip(committed.results) {
                let Some(call) = queued.call else { continue };
                let result = if is_unknown { Err(Failure::Final(SimError::CommitUnknown)) } else { result };
                results.push((call, result));
            }
        }
        self.notify(number);
        for (call, result) in results {
            match self.instances[number].calls.contains_key(&call) {
                true => self.step(number, call, Some(Event::Committed(result))),
                false => self.undo(number, result),
            }
        }
    }

    /// Reverts what a request whose caller is gone has got.
    fn undo(&mut self, number: usize, result: SimResult) {
        match result {
            Ok(Outcome::Waiting(entry)) => {
                let freed = self.store.leave(entry.position.ticket_id());
                self.publish(None, &freed);
            }
            Ok(Outcome::Granted(grant)) => {
                let user = Name::parse("name", "hadoop").unwrap();
                self.submit_release(number, ReleaseTicket { ticket_id: grant.ticket_id, user, em: grant.em });
            }
            _ => {}
        }
    }

    /// Delivers a notification, or loses it.
    fn hear(&mut self, number: usize, goes_on: bool) {
        let count = self.instances[number].notifications.len();
        if count == 0 {
            return;
        }
        let chosen = self.random.below(count);
        let freed = self.instances[number].notifications.swap_remove(chosen);
        if goes_on && self.shape.faults && self.random.one_in(4) {
            return;
        }
        let freed = capacity(&mut self.store, &freed);
        let instance = &self.instances[number];
        let mut view = instance.view.borrow_mut();
        self.store.ems().for_each(|em| view.update(em.clone()));
        drop(view);
        instance.waiters.borrow_mut().wake_at(&freed);
        self.notify(number);
    }

    /// Releases a ticket.
    fn release(&mut self, number: usize) {
        let tickets: Vec<ReleaseTicket> = self
            .store
            .tickets()
            .map(|ticket| ReleaseTicket { ticket_id: ticket.id, user: ticket.user.clone(), em: ticket.em.clone() })
            .collect();
        if let Some(released) = self.random.of(&tickets) {
            self.submit_release(number, released);
        }
    }

    fn submit_release(&mut self, number: usize, released: ReleaseTicket) {
        let key = self.store.key(&WaitKey::Em(released.em.clone()));
        self.submit_operation(number, Operation::Released(released));
        self.instances[number].waiters.borrow_mut().room_comes(key);
        self.notify(number);
    }

    fn submit_operation(&mut self, number: usize, operation: Operation) {
        let queued = QueuedOperation { operation, patience: Patience::Deadline, call: None };
        self.instances[number].queues.push(OperationClass::Called, 1, queued);
    }

    /// A fault: a crash of an instance, a caller that leaves, a key that another program owns for some time, a drain, or an
    /// instance that others take for dead.
    fn disturb(&mut self, number: usize) {
        match self.random.below(13) {
            8 | 9 => {
                let Some(em) = self.random.of(&self.ems) else { return };
                let reason = Name::parse("reason", "disk").unwrap();
                self.submit_operation(number, Operation::Drain(DrainEm { em, reason }));
            }
            10 => {
                let Some(em) = self.random.of(&self.ems) else { return };
                self.submit_operation(number, Operation::Resume(ResumeEm { em, reason: None }));
            }
            11 => {
                let freed = self.store.sweep(self.instances[number].id);
                self.publish(None, &freed);
            }
            12 => self.shut_down(number),
            0 => {
                let dead = self.instances.swap_remove(number);
                self.add_instance();
                let freed = self.store.sweep(dead.id);
                self.publish(None, &freed);
            }
            1..=3 => {
                let calls: Vec<u64> = self.instances[number].calls.keys().copied().collect();
                let Some(call) = self.random.of(&calls) else { return };
                if let Some(Call { handle, .. }) = self.instances[number].calls.remove(&call) {
                    self.end(number, handle);
                    self.notify(number);
                }
            }
            4 | 5 => {
                if let Some(em) = self.random.of(&self.ems) {
                    self.store.contended.insert(em);
                }
            }
            _ => {
                self.store.contended.pop_first();
                self.learn_contention(number);
            }
        }
    }

    /// Ends all sleeping and pausing requests of an instance.
    fn shut_down(&mut self, number: usize) {
        let rests = |call: &Call| matches!(call.action, Some(Action::Wait | Action::Pause));
        let calls = &self.instances[number].calls;
        let calls: Vec<u64> = calls.iter().filter(|(_, call)| rests(call)).map(|(number, _)| *number).collect();
        calls.into_iter().for_each(|call| self.step(number, call, Some(Event::Woken(WaitResult::Stopping))));
    }

    /// An instance finds out which keys are free again.
    fn learn_contention(&mut self, number: usize) {
        let instance = &self.instances[number];
        let free: Vec<EmInstance> =
            instance.contended.borrow().iter().filter(|em| !self.store.contended.contains(em)).cloned().collect();
        for em in &free {
            instance.contended.borrow_mut().remove(em);
            instance.view.borrow_mut().note_held(em, false);
        }
        if !free.is_empty() {
            instance.waiters.borrow_mut().wake_anywhere();
        }
        self.notify(number);
    }

    /// Sends freed capacity to all instances except `from`, which has woken its waiters already.
    fn publish(&mut self, from: Option<usize>, freed: &FreedKeys) {
        if freed.is_empty() {
            return;
        }
        for (number, instance) in self.instances.iter_mut().enumerate() {
            if Some(number) != from {
                instance.notifications.push(freed.clone());
            }
        }
    }

    fn notify(&mut self, number: usize) {
        let instance = &mut self.instances[number];
        for call in instance.waiters.get_mut().take_woken() {
            if let Some(call) = instance.calls.get_mut(&call) {
                call.handle.is_notified = true;
            }
        }
    }
}

fn verdict(result: SimResult) -> Result<Verdict, Failure<SimError>> {
    let blocked = |refusal, wait_keys| Verdict::Refused(Box::new(BlockedRequest { refusal, wait_keys }));
    match result? {
        Outcome::Refused(refusal) => Ok(blocked(*refusal, WaitKeys::new())),
        Outcome::Waiting(queued) => Ok(blocked(queued.refusal, queued.wait_keys)),
        _ => Ok(Verdict::Fits),
    }
}

fn capacity(store: &mut Store, freed: &FreedKeys) -> FreedCapacity {
    let mut capacity = FreedCapacity::default();
    for (wait_key, requests) in freed.iter() {
        let key = store.key(wait_key);
        capacity.wait_keys.insert(key, requests);
        if matches!(wait_key, WaitKey::Em(_)) {
            capacity.ems.insert(key);
        }
    }
    capacity
}

fn em(host: &str) -> EmInstance {
    EmInstance::parse("em", "ecm", host).unwrap()
}

fn spec(ticket_id: Uuid, cores: i64) -> Arc<RequestSpec> {
    let name = |text| Name::parse("name", text).unwrap();
    Arc::new(RequestSpec {
        principal: Principal::Anonymous,
        ticket_id,
        user: name("hadoop"),
        creator: name("IDE"),
        engine_type: String::new(),
        resource: Resource::cpu(cores).unwrap(),
        labels: Default::default(),
        selector: Default::default(),
        caps: Default::default(),
        lock_ttl: Duration::from_secs(3600),
        request_id: None,
        return_counters: false,
    })
}
