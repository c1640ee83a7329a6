use std::{cell::RefCell, time::Duration};

use rm_model::{
    name::Name,
    operation::RequestSpec,
    placement::ClosedEm,
    principal::Principal,
    resource::Resource,
    wait_queue::{QueuePosition, WaitKeys},
};
use time::OffsetDateTime;

use super::*;

/// The shared state of one queued request.
#[derive(Default)]
struct State {
    has_ended: bool,
    /// The EMs that placement selects, in this order.
    candidates: Vec<EmInstance>,
    subscribed: BTreeSet<WaitKey>,
    forwarded: RefCell<Vec<WakeReason>>,
}

impl SharedState for State {
    fn needs_check(&self, _: &PlacedRequest) -> bool {
        true
    }
    fn observed_verdict(&self, _: &PlacedRequest) -> Option<Verdict> {
        None
    }
    fn choose(&self, spec: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.best_candidate(spec, except)
    }
    fn release_assumption(&self, _: &EmInstance) {}
    fn best_candidate(&self, _: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.candidates.iter().find(|em| !except.contains(em)).cloned()
    }
    fn best_contended(&self, _: &RequestSpec, _: &[EmInstance]) -> Option<EmInstance> {
        None
    }
    fn is_contended(&self, _: &EmInstance) -> bool {
        false
    }
    fn nearest_fit(&self, _: &RequestSpec) -> Option<EmInstance> {
        self.candidates.first().cloned()
    }
    fn closed(&self, _: &EmInstance) -> Option<ClosedEm> {
        None
    }
    fn no_candidate(&self, _: &RequestSpec) -> Rejection {
        Rejection::PlaceLost
    }
    fn enter_queue(&mut self, _: bool, _: &RequestSpec) -> bool {
        true
    }
    fn has_entry(&self) -> bool {
        true
    }
    fn has_entry_at(&self, _: &WaitKeys) -> bool {
        true
    }
    fn update_entry(&mut self, _: &QueuedOutcome, _: bool) {}
    fn has_ended(&self) -> bool {
        self.has_ended
    }
    fn mark_removed(&mut self) {}
    fn granted(&mut self) {}
    fn freed_count(&self) -> u64 {
        0
    }
    fn subscribe(&mut self, wait_keys: BTreeSet<WaitKey>, _: u64) {
        self.subscribed = wait_keys;
    }
    fn forward_wake(&self, wake: WakeReason) {
        self.forwarded.borrow_mut().push(wake);
    }
    fn count_check(&self, _: WakeReason) {}
}

fn em(instance: &str) -> EmInstance {
    EmInstance::parse("em", "ecm", instance).unwrap()
}

fn spec(number: usize) -> NumberedSpec {
    let name = |text: &str| Name::parse("name", text).unwrap();
    let spec = RequestSpec {
        principal: Principal::Anonymous,
        ticket_id: Uuid::from_u128(1),
        user: name("hadoop"),
        creator: name("IDE"),
        engine_type: String::new(),
        resource: Resource::cpu(1).unwrap(),
        labels: Default::default(),
        selector: Default::default(),
        caps: Default::default(),
        lock_ttl: Duration::from_secs(60),
        request_id: None,
        return_counters: false,
        priority: 0,
        may_wait: true,
    };
    NumberedSpec { number, ask: Arc::new(spec) }
}

fn short_at(em: EmInstance) -> (Refusal, WaitKeys) {
    let refusal = Refusal { shortfalls: Vec::new(), code: 0, reason: String::new(), never_fits: false };
    (refusal, WaitKeys::from_iter([(WaitKey::Em(em), true)]))
}

/// The result of a commit that leaves the request queued at an EM.
fn queued(instance: &str) -> Event<&'static str> {
    let ((refusal, wait_keys), decided_at) = (short_at(em(instance)), OffsetDateTime::UNIX_EPOCH);
    let position = QueuePosition::new(0, decided_at, Uuid::from_u128(1));
    Event::Committed(Ok(Outcome::Waiting(Box::new(QueuedOutcome {
        position,
        decided_at,
        priority: 0,
        wait_keys,
        guaranteed_scopes: None,
        refusal,
    }))))
}

/// A request that has entered the queue at host1 as its first of so many specs, and sleeps.
fn waiting(is_named: bool, specs: usize, state: &mut State) -> QueuedRequest<&'static str> {
    let start = QueueStart { em: em("host1"), spec: spec(0), others: (1..specs).map(spec).collect(), is_named };
    let mut request = QueuedRequest::new(start);
    let candidates = mem::take(&mut state.candidates);
    request.enter(state);
    let mut action = request.step(queued("host1"), state).unwrap();
    while matches!(action, Action::Check(..)) {
        action = request.step(refused("host1"), state).unwrap();
    }
    assert!(matches!(action, Action::Wait), "{action:?}");
    state.candidates = candidates;
    request
}

/// Wakes the request. Returns the next action.
fn wake(request: &mut QueuedRequest<&'static str>, state: &mut State) -> Action<&'static str> {
    request.step(Event::Woken(WaitResult::Look(WakeReason::NEWS)), state).unwrap()
}

fn fails<T>() -> Result<T, Failure<&'static str>> {
    Err(Failure::Transient("no database"))
}

fn rejected<T>(rejection: Rejection) -> Result<T, Failure<&'static str>> {
    Err(Failure::Rejected(Box::new(rejection)))
}

/// The result of a check that finds too little at an EM.
fn refused(instance: &str) -> Event<&'static str> {
    let (refusal, wait_keys) = short_at(em(instance));
    Event::Checked(Ok(Verdict::Refused(Box::new(BlockedRequest { refusal, wait_keys }))))
}

/// Gives the request results, one after another. Returns the last action.
fn steps(
    request: &mut QueuedRequest<&'static str>,
    state: &mut State,
    events: impl IntoIterator<Item = Event<&'static str>>,
) -> Action<&'static str> {
    events.into_iter().map(|event| request.step(event, state).unwrap()).last().unwrap()
}

/// A spec that fits by its check and is not granted is checked once more, so that the request also waits where that spec is short.
#[test]
fn refused_other_spec_keeps_its_subscription() {
    let mut state = State::default();
    let mut request = waiting(true, 2, &mut state);
    wake(&mut request, &mut state);
    state.subscribed.clear();
    let fits = || Event::Checked(Ok(Verdict::Fits));
    let action = steps(&mut request, &mut state, [refused("host1"), fits(), queued("host1"), refused("host2")]);
    assert!(matches!(action, Action::Wait), "{action:?}");
    assert_eq!(state.subscribed, [WaitKey::Em(em("host2"))].into());
    wake(&mut request, &mut state);
    let action = steps(&mut request, &mut state, [refused("host1"), fits(), queued("host1"), fits(), queued("host1")]);
    assert!(matches!(action, Action::Wait), "two attempts at most: {action:?}");
}

#[test]
fn failed_attempt_forwards_its_wake_up_later() {
    let mut state = State::default();
    let mut request = waiting(true, 1, &mut state);
    wake(&mut request, &mut state);
    let action = steps(&mut request, &mut state, [Event::Checked(Ok(Verdict::Fits)), Event::Committed(fails())]);
    assert!(matches!(action, Action::Pause), "{action:?}");
    wake(&mut request, &mut state);
    assert!(matches!(request.step(queued("host1"), &mut state), Some(Action::Wait)));
    assert_eq!(state.forwarded.borrow().len(), 1);
}

#[test]
fn request_that_leaves_its_em_forwards_its_wake_up() {
    let mut state = State::default();
    let mut request = waiting(false, 1, &mut state);
    wake(&mut request, &mut state);
    let gone = || Rejection::EmNotRegistered(em("host1"));
    let events = [Event::Surveyed(Ok(())), Event::Checked(rejected(gone())), Event::Committed(rejected(gone()))];
    let action = steps(&mut request, &mut state, events);
    assert!(matches!(action, Action::Survey(_)), "{action:?}");
    state.candidates = vec![em("host2")];
    request.step(Event::Surveyed(Ok(())), &mut state);
    state.candidates.clear();
    assert!(matches!(request.step(queued("host2"), &mut state), Some(Action::Wait)));
    assert_eq!(state.forwarded.borrow().len(), 1);
}

/// A check that failed for now says nothing about the capacity.
#[test]
fn failed_check_is_repeated_after_pause() {
    let mut state = State { candidates: vec![em("host2")], ..State::default() };
    let mut request = waiting(false, 1, &mut state);
    wake(&mut request, &mut state);
    let action = steps(&mut request, &mut state, [Event::Surveyed(Ok(())), Event::Checked(fails())]);
    assert!(matches!(action, Action::Pause), "{action:?}");
    let mut request = waiting(true, 2, &mut state);
    wake(&mut request, &mut state);
    let action = steps(&mut request, &mut state, [refused("host1"), Event::Checked(fails())]);
    assert!(matches!(action, Action::Pause), "{action:?}");
}

/// A call whose position was taken over does not enter the queue anew after the later call has left it.
#[test]
fn ended_call_does_not_enter_anew() {
    for has_ended in [true, false] {
        let mut state = State::default();
        let mut request = waiting(true, 1, &mut state);
        state.has_ended = has_ended;
        wake(&mut request, &mut state);
        let lost = || Rejection::PlaceLost;
        let events = [Event::Checked(rejected(lost())), Event::Committed(rejected(lost()))];
        let action = steps(&mut request, &mut state, events);
        match has_ended {
            true => assert!(
                matches!(&action, Action::Reply(RequestResult::Rejected(end)) if **end == Rejection::PositionTakenOver),
                "{action:?}"
            ),
            false => assert!(matches!(action, Action::Commit(..)), "{action:?}"),
        }
    }
}
