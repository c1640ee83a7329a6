//! A world of instances, requests and faults. The choices decide what happens next.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use rm_engine::{
    commit_queue::OperationClass,
    contended_keys::{KeyEffects, KeyTask},
    request::{Action, Event, Failure, Patience, Request, RequestResult, WaitResult},
    waiter_index::FreedCapacity,
    wake_reason::WakeReason,
};
use rm_model::{
    em::EmInstance,
    name::Name,
    operation::{
        LockKey, Operation, Outcome, Rejection, ReleaseTicket, RemoveWaiting, RequestId, RequestSpec, ResumeEm,
    },
    order::FairBy,
    placement::ClosedEm,
    principal::Principal,
    resource::Resource,
    scope::{CREATOR, USER},
    wait_queue::{FreedKeys, MUCH, OwnedPosition, WaitKey, WaitKeyHash},
};
use uuid::Uuid;

use crate::{
    choices::Choices,
    instance::{Belief, Call, Caller, Handle, Instance, QueuedOperation, Shared, enter},
    store::{Notice, SimError, SimResult, Store, register, verdict},
};

/// Faults of the instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    None,
    /// Callers that leave, contended keys, drains, unhealthy EMs, and instances that die. All notifications arrive, and no action
    /// fails, so that no waiter depends on a poll.
    Orderly,
    /// As [`Faults::Orderly`], and actions fail for now.
    Failing,
    /// Also failures, unknown commits, lost notifications, lost entries and unregistered EMs.
    All,
    /// Changes of the order of waiting requests alone.
    Orders,
}

impl Faults {
    /// Whether actions may fail.
    fn fail_actions(self) -> bool {
        matches!(self, Self::Failing | Self::All)
    }
}

/// Size of a world, and its faults.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub instances: usize,
    pub ems: usize,
    pub requests: u64,
    pub faults: Faults,
    /// Number of users. Several users have a limit each.
    pub users: usize,
    /// Whether a waiter may depend on a poll at the end. Lost notifications need it.
    pub polls: bool,
    /// Amount of cores and of memory that the first users are guaranteed; 0 for none.
    pub guarantee: i64,
}

/// All instances, their store, and what has happened.
pub struct World {
    pub shape: Shape,
    pub choices: Choices,
    pub store: Store,
    pub instances: Vec<Instance>,
    pub ems: Vec<EmInstance>,
    /// Capacity of each EM.
    totals: Vec<Resource>,
    submitted: u64,
    replies: BTreeMap<u64, usize>,
    start: Instant,
    /// Number of steps so far: of requests, batches, notifications and faults.
    pub steps: u64,
    /// Number of grants so far.
    pub grants: u64,
    /// Stages with a result, and the stages that followed.
    pub transitions: Transitions,
    /// Whether each step is printed.
    pub is_printed: bool,
}

/// Number of releases at the end of a run without polls, each when nothing else happens.
const RELEASES_AT_REST: usize = 6;

/// The next stages of each stage and result.
pub type Transitions = BTreeMap<(&'static str, &'static str), BTreeSet<&'static str>>;

impl World {
    pub fn new(choices: Choices, shape: Shape) -> Self {
        let mut world = Self {
            shape,
            choices,
            store: Store::default(),
            instances: Vec::new(),
            ems: (0..shape.ems).map(|number| em(&format!("host{number}"))).collect(),
            totals: Vec::new(),
            submitted: 0,
            replies: BTreeMap::new(),
            start: Instant::now(),
            steps: 0,
            grants: 0,
            transitions: Transitions::new(),
            is_printed: false,
        };
        world.choices.begin_step();
        if shape.users > 1 {
            world.store.limit_users(shape.guarantee);
        }
        for em in &world.ems {
            let [memory, cores] = [(); 2].map(|()| 1 + amount(&mut world.choices));
            let total = Resource::load(memory, cores).unwrap();
            world.store.commit(Uuid::nil(), &[register(em, total.clone())]);
            world.totals.push(total);
        }
        (0..shape.instances).for_each(|_| world.add_instance());
        world
    }

    pub fn add_instance(&mut self) {
        let id = (1 << 100) + u128::from(self.steps) * 64 + self.instances.len() as u128;
        self.instances.push(Instance::new(Uuid::from_u128(id)));
    }

    /// Runs all requests, with faults; then without faults, until nothing happens any more.
    pub fn run(&mut self) {
        let mut after = 0;
        while after < 200 && self.choices.begin_step() {
            self.advance(true);
            after += u64::from(self.submitted >= self.shape.requests);
        }
        self.choices.continue_at_random(0);
        self.store.contended.clear();
        while let freed = self.store.end_hold()
            && !freed.is_empty()
        {
            self.publish(None, freed.into());
        }
        for em in self.ems.clone() {
            self.report(0, &em, true);
            self.submit_operation(0, Operation::Resume(ResumeEm { em, reason: None }));
        }
        self.come_to_rest();
        // Most requests wait now: each release serves those that can use it. With limits of users, a wake-up passes more waiters than
        // it reaches.
        let releases = if self.shape.polls || self.shape.users > 1 { 0 } else { RELEASES_AT_REST };
        for _ in 0..releases {
            let number = self.choices.below(self.instances.len());
            self.release(number);
            self.come_to_rest();
        }
        let calls = self.instances.iter().map(|instance| instance.calls.len() as u64).sum::<u64>();
        let crashed = self.submitted - calls - self.replies.len() as u64;
        assert!(self.shape.faults != Faults::None || crashed == 0, "{crashed} requests have no reply");
    }

    /// Continues until nothing happens any more, and asserts that no waiter was forgotten.
    fn come_to_rest(&mut self) {
        self.settle();
        if self.shape.polls {
            for _ in 0..self.shape.ems + 2 {
                for number in 0..self.instances.len() {
                    self.instances[number].waiters.borrow_mut().poll();
                    self.notify(number);
                }
                self.settle();
            }
        }
        for call in self.instances.iter().flat_map(|instance| instance.calls.values()) {
            assert!(matches!(call.action, Some(Action::Wait)), "an operation of a request was lost");
        }
        assert_eq!(self.store.grantable(), None, "a waiter that fits was forgotten");
        if !self.shape.polls {
            assert_eq!(self.store.entitled_at_check(), None, "a waiter within its guarantee was forgotten");
        }
    }

    fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.advance(false) {
                return;
            }
        }
        panic!("the instances do not come to rest");
    }

    /// Does one thing; returns false if nothing is left to do.
    fn advance(&mut self, goes_on: bool) -> bool {
        let number = self.choices.below(self.instances.len());
        let things = if goes_on { 13 } else { 5 };
        match self.choices.below(things) {
            0 | 1 => self.act(number, goes_on),
            2 => self.commit_next(number, goes_on),
            3 => self.hear(number, goes_on),
            4 => self.take_turn(number, goes_on),
            5 | 6 if self.submitted < self.shape.requests => self.submit(number),
            7 | 8 => self.release(number),
            9 if self.shape.faults == Faults::Orders => self.change_order(),
            9 if self.shape.faults != Faults::None => self.disturb(number),
            _ => {}
        }
        goes_on || self.instances.iter().any(Instance::is_busy)
    }

    /// Lets an administrator change by what waiting requests take turns, and their head starts.
    fn change_order(&mut self) {
        let turns: [&[&str]; 4] = [&[USER], &[], &[CREATOR], &[CREATOR, USER]];
        let labels = turns[self.choices.below(turns.len())];
        let priority = [0, -60, 30][self.choices.below(3)];
        self.store.set_queue_rules(FairBy::new(labels.iter().map(|label| (*label).to_owned())), priority);
    }

    /// Chooses a user.
    pub fn user(&mut self) -> Name {
        let number = if self.shape.users > 1 { self.choices.below(self.shape.users) } else { 0 };
        Name::parse("name", &format!("user{number}")).unwrap()
    }

    /// Registers an EM anew, with its former capacity.
    pub fn register(&mut self, number: usize) {
        let em = self.choices.below(self.ems.len());
        let operation = register(&self.ems[em], self.totals[em].clone());
        self.submit_operation(number, operation);
    }

    /// Lets an EM report to an instance. All instances are notified of an EM that is healthy again.
    pub fn report(&mut self, number: usize, em: &EmInstance, is_healthy: bool) {
        let unhealthy = &mut self.store.unhealthy;
        let is_changed = if is_healthy { unhealthy.remove(em) } else { unhealthy.insert(em.clone()) };
        let mut view = self.instances[number].view.borrow_mut();
        view.report(em, self.store.condition(em), time::Duration::ZERO);
        drop(view);
        let mut freed = FreedKeys::default();
        if is_changed && is_healthy {
            freed.add(WaitKey::Em(em.clone()), MUCH);
        }
        self.publish(None, freed.into());
    }

    fn submit(&mut self, number: usize) {
        self.submitted += 1;
        let (call, any_em) = (self.submitted, self.choices.one_in(2));
        let named = if any_em { None } else { self.choices.of(&self.ems) };
        let specs = 1 + self.choices.below(2);
        let ticket_id = Uuid::from_u128(call.into());
        let resources: Vec<Resource> = (0..specs).map(|_| requested(&mut self.choices)).collect();
        let mut handle = Handle::new(call, any_em, Belief::chosen(&mut self.choices));
        handle.may_wait = !self.choices.one_in(4);
        let (user, may_wait) = (self.user(), handle.may_wait);
        let asks = resources.into_iter().map(|resource| spec(ticket_id, &user, resource, may_wait)).collect();
        self.start(number, handle, named, asks);
    }

    fn start(&mut self, number: usize, mut handle: Handle, named: Option<EmInstance>, specs: Vec<Arc<RequestSpec>>) {
        handle.content = (named.clone(), specs.clone());
        let instance = &self.instances[number];
        let mut shared = Shared { instance, store: &mut self.store, handle: &mut handle };
        let (request, action) = Request::start(named, specs, &mut shared);
        self.begin(number, (request, handle), ("New", "submitted"), action);
    }

    /// A caller with a request id calls once more, at any instance. Its earlier call stays open, or its connection is lost.
    pub fn come_again(&mut self, number: usize) {
        let has_id = |call: &Call| call.handle.content.1.iter().all(|spec| spec.request_id.is_some());
        let calls = &self.instances[number].calls;
        let calls: Vec<u64> = calls.iter().filter(|(_, call)| has_id(call)).map(|(number, _)| *number).collect();
        let Some(call) = self.choices.of(&calls) else { return };
        let Some((named, specs)) = self.instances[number].calls.get(&call).map(|call| call.handle.content.clone())
        else {
            return;
        };
        if self.choices.one_in(2)
            && let Some(Call { handle, .. }) = self.instances[number].calls.remove(&call)
        {
            self.end(number, handle, true);
            self.notify(number);
        }
        self.submitted += 1;
        let ticket_id = Uuid::from_u128(self.submitted.into());
        let again = specs.iter().map(|spec| Arc::new(RequestSpec { ticket_id, ..RequestSpec::clone(spec) })).collect();
        let mut handle = Handle::new(self.submitted, named.is_none(), Belief::chosen(&mut self.choices));
        handle.may_wait = specs.iter().any(|spec| spec.may_wait);
        let elsewhere = self.choices.below(self.instances.len());
        self.start(elsewhere, handle, named, again);
    }

    /// Gives a request the result of its action, and begins the next action.
    pub fn step(&mut self, number: usize, call: u64, event: Event<SimError>) {
        let belief = Belief::chosen(&mut self.choices);
        let instance = &mut self.instances[number];
        let Some(Call { mut request, mut handle, .. }) = instance.calls.remove(&call) else { return };
        handle.belief.set(belief);
        let mut shared = Shared { instance, store: &mut self.store, handle: &mut handle };
        let transition = (request.stage(), event.name());
        let action = request.step(event, &mut shared);
        self.begin(number, (request, handle), transition, action);
    }

    /// Begins an action of a request.
    fn begin(
        &mut self,
        number: usize,
        (request, mut handle): (Request<SimError>, Handle),
        transition: (&'static str, &'static str),
        mut action: Action<SimError>,
    ) {
        self.steps += 1;
        let (call, instance) = (handle.number, &mut self.instances[number]);
        let next = if matches!(action, Action::Reply(_)) { "reply" } else { request.stage() };
        self.transitions.entry(transition).or_default().insert(next);
        if self.is_printed {
            let entry = handle.entry.as_ref().map(|(_, wait_keys)| wait_keys);
            let (stage, result) = transition;
            println!("{number}: request {call}: {stage}, {result} → {next}; {}; queued at {entry:?}", named(&action));
        }
        match &mut action {
            Action::Reply(reply) => {
                assert!(!matches!(reply, RequestResult::Broken { .. }), "a result belongs to an action: {reply:?}");
                // A request that may wait is rejected only if its EMs are unregistered. Without its entries, it enters anew.
                if handle.may_wait
                    && let RequestResult::Rejected(rejection) = &reply
                {
                    let has_ems =
                        matches!(**rejection, Rejection::NoEmMatches(_)) && !instance.view.borrow().is_empty();
                    let is_lost = matches!(**rejection, Rejection::PlaceLost);
                    assert!(!has_ems && !is_lost && !rejection.is_draining(), "request {call} ended: {rejection}");
                }
                let is_granted = matches!(reply, RequestResult::Decided { outcome: Outcome::Granted(_), .. });
                self.grants += u64::from(is_granted);
                *self.replies.entry(call).or_default() += 1;
                assert_eq!(self.replies[&call], 1, "a request has one reply");
                let is_stopping = matches!(reply, RequestResult::Stopping);
                self.end(number, handle, is_stopping);
                self.notify(number);
                return;
            }
            Action::Wait => {
                handle.is_notified = false;
                let is_waiter = instance.is_waiter(&handle);
                match is_waiter.then(|| instance.waiters.borrow_mut().rest(handle.ticket_id)) {
                    Some(None) => handle.is_asleep = true,
                    woken => {
                        let wake = woken.flatten().unwrap_or(WakeReason::NEWS);
                        if !is_waiter {
                            let since = instance.waiters.borrow().news_count();
                            Shared { instance, store: &mut self.store, handle: &mut handle }.insert(since);
                        }
                        instance.calls.insert(call, Call { request, action: None, handle });
                        self.notify(number);
                        return self.step(number, call, Event::Woken(WaitResult::Look(wake)));
                    }
                }
            }
            Action::Commit(placed, patience, in_queue) => {
                let is_unavailable = instance.view.borrow().closed(&placed.em) == Some(ClosedEm::Unavailable);
                assert!(
                    !(is_unavailable && handle.any_em && in_queue.is_some()) || placed.is_em_unavailable,
                    "{} is unhealthy",
                    placed.em
                );
                enter(instance, &mut handle, placed, *in_queue);
                if instance.is_waiter(&handle) {
                    instance.waiters.borrow_mut().tries(handle.ticket_id);
                }
                let (operation, patience) = (Operation::Request(placed.clone()), *patience);
                let queued = QueuedOperation { operation, patience, call: Some(call) };
                instance.queues.push(OperationClass::Called, 1, queued);
                instance.calls.insert(call, Call { request, action: None, handle });
                return self.notify(number);
            }
            Action::Check(placed, in_queue) => enter(instance, &mut handle, placed, *in_queue),
            Action::Survey(_) | Action::Pause => {}
        }
        instance.calls.insert(call, Call { request, action: Some(action), handle });
        self.notify(number);
    }

    /// Removes what an ended call leaves behind.
    pub fn end(&mut self, number: usize, handle: Handle, is_absent: bool) {
        let instance = &mut self.instances[number];
        if handle.is_queued {
            instance.waiters.borrow_mut().callers -= 1;
        }
        instance.leave_index(&handle);
        if handle.is_queued {
            let notice = self.store.leave(handle.claim, is_absent);
            self.publish(None, notice);
        }
    }

    /// Finishes the action of one call of an instance.
    fn act(&mut self, number: usize, goes_on: bool) {
        let fails = goes_on && self.shape.faults.fail_actions() && self.choices.one_in(10);
        let gives_up = goes_on && self.choices.one_in(30);
        let ready = |call: &Call| match &call.action {
            Some(Action::Wait) => call.handle.is_notified || gives_up,
            action => action.is_some(),
        };
        let calls = &self.instances[number].calls;
        let calls: Vec<u64> = calls.iter().filter(|(_, call)| ready(call)).map(|(number, _)| *number).collect();
        let Some(call) = self.choices.of(&calls) else { return };
        let instance = &mut self.instances[number];
        let Some(action) = instance.calls.get_mut(&call).and_then(|call| call.action.take()) else { return };
        let is_final = self.choices.one_in(2) && self.shape.faults == Faults::All;
        let failure = || match is_final {
            true => Failure::Final(SimError::Defect),
            false => Failure::Transient(SimError::Unavailable),
        };
        let event = match action {
            Action::Survey(_) if fails => Event::Surveyed(Err(failure())),
            Action::Survey(_) => {
                let mut view = instance.view.borrow_mut();
                self.store.survey(&mut view);
                Event::Surveyed(Ok(()))
            }
            Action::Check(..) if fails => Event::Checked(Err(failure())),
            Action::Check(request, _) => Event::Checked(verdict(&request, self.store.check(&request))),
            Action::Pause if goes_on && self.choices.one_in(4) => Event::Woken(WaitResult::DeadlinePassed),
            Action::Pause => Event::Woken(WaitResult::Look(WakeReason::NEWS)),
            Action::Wait => {
                let Some(Call { handle, .. }) = instance.calls.get_mut(&call) else { return };
                handle.is_asleep = false;
                let is_waiter = handle.entry.is_some() && instance.waiters.borrow().has(handle.ticket_id, &call);
                match (handle.is_notified, is_waiter) {
                    (true, true) => {
                        let wake = instance.waiters.borrow_mut().woken_by(handle.ticket_id);
                        Event::Woken(WaitResult::Look(wake))
                    }
                    (true, false) => Event::Woken(WaitResult::Look(WakeReason::NEWS)),
                    (false, _) => Event::Woken(WaitResult::DeadlinePassed),
                }
            }
            Action::Commit(..) | Action::Reply(_) => return,
        };
        self.step(number, call, event);
    }

    /// Commits the next batch of an instance.
    fn commit_next(&mut self, number: usize, goes_on: bool) {
        let (now, mut effects) = (self.now(), KeyEffects::default());
        let instance = &mut self.instances[number];
        let mut batch = Vec::new();
        for queued in instance.queues.next(now) {
            let key = queued.key();
            if queued.operation.removes().is_some() {
                batch.push(queued);
                continue;
            }
            let may_queue = queued.operation.may_queue();
            let is_contended =
                instance.keys.takes(&key, may_queue) || self.store.contended.contains(queued.operation.em());
            if !is_contended {
                batch.push(queued);
                continue;
            }
            instance.wait_for_key(key, queued, now, &mut effects);
        }
        self.commit(number, batch, goes_on);
        self.apply(number, effects);
    }

    /// Lets the task of a contended key of an instance do one turn.
    fn take_turn(&mut self, number: usize, goes_on: bool) {
        let (now, mut effects) = (self.now(), KeyEffects::default());
        let instance = &mut self.instances[number];
        let tasks: Vec<LockKey> = instance.tasks.iter().cloned().collect();
        let Some(key) = self.choices.of(&tasks) else { return };
        let calls = &instance.calls;
        let is_wanted = |queued: &QueuedOperation| queued.call.is_none_or(|call| calls.contains_key(&call));
        let task = instance.keys.next_task(&key, (now, false), is_wanted, &mut effects);
        let is_locked = matches!(&key, LockKey::Em(em) if self.store.contended.contains(em));
        let is_held = self.store.is_held(&key);
        let mut batch = Vec::new();
        instance.keys.note_held(&key, is_held && !is_locked);
        match task {
            KeyTask::Turn => {
                instance.keys.found(&key, is_locked || is_held, now, &mut effects);
                if !is_locked {
                    batch = match is_held {
                        true => instance.keys.take(&key, |queued| queued.operation.may_queue()),
                        false => instance.keys.take(&key, |_| true),
                    };
                }
            }
            KeyTask::Watch => instance.keys.found(&key, is_locked || is_held, now, &mut effects),
            KeyTask::End => drop(instance.tasks.remove(&key)),
        }
        self.steps += 1;
        self.commit(number, batch, goes_on);
        self.apply(number, effects);
    }

    /// Carries out what follows from a change of the contended keys.
    fn apply(&mut self, number: usize, effects: KeyEffects<QueuedOperation, LockKey>) {
        self.instances[number].note_contended(&effects);
        self.notify(number);
        let timeout = || Err(Failure::Transient(SimError::LockTimeout));
        let ended = effects.elsewhere.into_iter().map(|queued| (queued, Ok(Outcome::Contended)));
        let ended = ended.chain(effects.rejected.into_iter().map(|queued| (queued, timeout())));
        let ended = ended.chain(effects.overdue.into_iter().map(|queued| (queued, timeout())));
        for (queued, result) in ended {
            if let Some(call) = queued.call {
                self.step(number, call, Event::Committed(result));
            }
        }
    }

    /// Commits a batch of an instance.
    fn commit(&mut self, number: usize, batch: Vec<QueuedOperation>, goes_on: bool) {
        if batch.is_empty() {
            return;
        }
        self.steps += 1;
        if self.is_printed {
            let name = |queued: &QueuedOperation| {
                let Operation::Request(request) = &queued.operation else {
                    return format!("{} at {}", queued.operation.kind(), queued.operation.em());
                };
                format!("request {} at {}", request.ask.ticket_id.as_u128(), request.em)
            };
            let operations: Vec<String> = batch.iter().map(name).collect();
            println!("{number}: batch of {}", operations.join(", "));
        }
        let fails = goes_on && self.shape.faults.fail_actions() && self.choices.one_in(10);
        let (now, mut effects) = (self.now(), KeyEffects::default());
        let is_unknown = goes_on && self.shape.faults == Faults::All && self.choices.one_in(20);
        let mut results: Vec<(Caller, SimResult)> = Vec::new();
        if fails {
            let failed = batch.into_iter().filter_map(|queued| queued.caller());
            let error = match self.choices.one_in(4) && self.shape.faults == Faults::All {
                true => Failure::Final(SimError::Defect),
                false => Failure::Transient(SimError::Unavailable),
            };
            results.extend(failed.map(|call| (call, Err(error.clone()))));
        } else {
            let instance = &mut self.instances[number];
            let operations: Vec<Operation> = batch.iter().map(|queued| queued.operation.clone()).collect();
            let committed = self.store.commit(instance.id, &operations);
            let mut view = instance.view.borrow_mut();
            committed.ems.into_iter().for_each(|em| view.update(em));
            committed.gone.iter().for_each(|em| view.remove(em));
            drop(view);
            let granted: Vec<(Uuid, WaitKeyHash)> = batch
                .iter()
                .zip(&committed.results)
                .filter(|(_, result)| matches!(result, Ok(Outcome::Granted(_))))
                .filter_map(|(queued, _)| Some((queued.operation.queued_ticket()?, queued.operation.em().clone())))
                .map(|(ticket_id, em)| (ticket_id, self.store.key(&WaitKey::Em(em))))
                .collect();
            let freed = capacity(&mut self.store, &committed.notice.freed);
            let others_wait = self.shape.instances > 1;
            self.end_calls(number, &committed.notice.ended);
            let mut waiters = self.instances[number].waiters.borrow_mut();
            waiters.rerank(committed.notice.reranked.clone());
            waiters.committed(freed, granted, others_wait);
            drop(waiters);
            self.publish(Some(number), committed.notice);
            for (queued, result) in batch.into_iter().zip(committed.results) {
                if let (false, Ok(Outcome::Held(key))) = (is_unknown, &result) {
                    self.instances[number].wait_for_key(key.clone(), queued, now, &mut effects);
                    continue;
                }
                let Some(caller) = queued.caller() else { continue };
                if is_unknown && !self.instances[number].calls.contains_key(&caller.call) {
                    // The entry leaves, if there is one. A grant without a caller expires.
                    let notice = self.store.leave(caller.claim, true);
                    self.publish(None, notice);
                }
                let result = if is_unknown { Err(Failure::Final(SimError::CommitUnknown)) } else { result };
                results.push((caller, result));
            }
        }
        self.apply(number, effects);
        for (caller, result) in results {
            match self.instances[number].calls.contains_key(&caller.call) {
                true => self.step(number, caller.call, Event::Committed(result)),
                false => self.undo(number, caller.claim, result),
            }
        }
    }

    /// Reverts what a request whose caller is gone has got.
    fn undo(&mut self, number: usize, claim: Uuid, result: SimResult) {
        match result {
            Ok(Outcome::Waiting(_)) => {
                let notice = self.store.leave(claim, true);
                self.publish(None, notice);
            }
            // The caller can repeat the request.
            Ok(Outcome::Granted(grant)) if self.store.has_id(grant.ticket_id) => {}
            Ok(Outcome::Granted(grant)) => {
                let ticket = self.store.tickets().find(|ticket| ticket.id == grant.ticket_id);
                let Some(user) = ticket.map(|ticket| ticket.user.clone()) else { return };
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
        self.steps += 1;
        let chosen = self.choices.below(count);
        let Notice { freed, ended, reranked } = self.instances[number].notifications.swap_remove(chosen);
        if goes_on && self.shape.faults == Faults::All && self.choices.one_in(4) {
            return;
        }
        if self.is_printed {
            println!("{number}: hears of {:?}, {ended:?} and {reranked:?}", freed.iter().collect::<Vec<_>>());
        }
        self.end_calls(number, &ended);
        let freed = capacity(&mut self.store, &freed);
        let instance = &self.instances[number];
        let mut view = instance.view.borrow_mut();
        self.store.survey(&mut view);
        drop(view);
        let mut waiters = instance.waiters.borrow_mut();
        waiters.rerank(reranked);
        waiters.wake_at(&freed);
        drop(waiters);
        self.notify(number);
    }

    /// Releases a ticket.
    fn release(&mut self, number: usize) {
        let tickets: Vec<Uuid> = self.store.tickets().map(|ticket| ticket.id).collect();
        let chosen = self.choices.of(&tickets);
        let Some(ticket) = self.store.tickets().find(|ticket| Some(ticket.id) == chosen) else { return };
        let released = ReleaseTicket { ticket_id: ticket.id, user: ticket.user.clone(), em: ticket.em.clone() };
        self.submit_release(number, released);
    }

    fn submit_release(&mut self, number: usize, released: ReleaseTicket) {
        let key = self.store.key(&WaitKey::Em(released.em.clone()));
        self.submit_operation(number, Operation::Released(released));
        self.instances[number].waiters.borrow_mut().room_comes(key);
        self.notify(number);
    }

    pub fn submit_operation(&mut self, number: usize, operation: Operation) {
        let queued = QueuedOperation { operation, patience: Patience::Deadline, call: None };
        self.instances[number].queues.push(OperationClass::Called, 1, queued);
    }

    /// Removes a waiting request as an operator.
    pub fn remove_waiting(&mut self, number: usize) {
        let Some((ticket_id, em)) = self.choices.of(&self.store.waiting()) else { return };
        let reason = Name::parse("reason", "a mistake").unwrap();
        self.submit_operation(number, Operation::Remove(RemoveWaiting { ticket_id, em, reason }));
    }

    /// Lets the calls among `ended` that wait on an instance check once.
    fn end_calls(&mut self, number: usize, ended: &[OwnedPosition]) {
        let instance = &mut self.instances[number];
        let waiters = instance.waiters.get_mut();
        let is_other = |owned: &OwnedPosition| {
            let waiter = waiters.handle(owned.ticket_id).and_then(|call| instance.calls.get(call));
            waiter.is_some_and(|call| Some(call.handle.claim) != owned.claim)
        };
        let ended: Vec<Uuid> = ended.iter().filter(|owned| !is_other(owned)).map(|owned| owned.ticket_id).collect();
        for call in waiters.removed(ended) {
            if let Some(call) = instance.calls.get_mut(&call) {
                (call.handle.is_notified, call.handle.is_removed) = (true, true);
            }
        }
        self.notify(number);
    }

    /// Sends a notification to all instances except `from`, which has woken its waiters already.
    pub fn publish(&mut self, from: Option<usize>, notice: Notice) {
        if notice.freed.is_empty() && notice.ended.is_empty() && notice.reranked.is_empty() {
            return;
        }
        for (number, instance) in self.instances.iter_mut().enumerate() {
            if Some(number) != from {
                instance.notifications.push(notice.clone());
            }
        }
    }

    pub fn notify(&mut self, number: usize) {
        let instance = &mut self.instances[number];
        for call in instance.waiters.get_mut().take_woken() {
            if let Some(call) = instance.calls.get_mut(&call) {
                call.handle.is_notified = true;
            }
        }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_millis(self.steps)
    }
}

/// Returns an action as text.
fn named(action: &Action<SimError>) -> String {
    match action {
        Action::Check(request, _) => format!("check at {}", request.em),
        Action::Commit(request, patience, _) => {
            format!("commit at {}, {patience:?}, {:?}", request.em, request.resource())
        }
        action => format!("{action:?}"),
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

fn amount(choices: &mut Choices) -> i64 {
    i64::try_from(choices.below(4)).unwrap()
}

/// Chooses what a request needs: cores, memory, or both.
fn requested(choices: &mut Choices) -> Resource {
    let (memory, cores) = (amount(choices), amount(choices));
    Resource::load(memory, if memory == 0 { cores.max(1) } else { cores }).unwrap()
}

fn spec(ticket_id: Uuid, user: &Name, resource: Resource, may_wait: bool) -> Arc<RequestSpec> {
    let name = |text: &str| Name::parse("name", text).unwrap();
    let has_id = ticket_id.as_u128().is_multiple_of(2);
    Arc::new(RequestSpec {
        principal: Principal::Anonymous,
        ticket_id,
        user: user.clone(),
        creator: name("IDE"),
        engine_type: String::new(),
        resource,
        labels: Default::default(),
        selector: Default::default(),
        caps: Default::default(),
        lock_ttl: Duration::from_secs(3600),
        request_id: has_id.then(|| RequestId { id: name(&ticket_id.to_string()), body_hash: [0; 32] }),
        return_counters: false,
        priority: 0,
        may_wait,
    })
}
