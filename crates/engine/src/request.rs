//! A request: from its submission to its reply, as a value.
//!
//! [`Request::step`] takes the result of the last action and returns the next one. Exactly one action is under way at a time;
//! `Stage` names it, with what follows from its result. The shell of the request carries out the action and measures the time: a
//! deadline arrives as a result.
//!
//! 1. A request that names no EM searches one by the cluster view; a request that names one uses it (`Surveying`).
//! 2. A check without locks refuses what cannot fit (`Checking`). The committer decides (`Committing`).
//! 3. A refused request that may wait enters the wait queue at its EM. It sleeps until capacity may be free
//!    (`Waiting`), and repeats 2. After a failure of the database it pauses first (`Pausing`).
//!
//! A request may name several specs, of which one is granted. It waits with the first spec that can fit later, as its entry
//! states, and is granted as the first that fits.
//!
//! Never: grants. The ledger decides under the locks; a belief of the request only selects its next attempt.
//! Callers: `rm_service::request_resource`, the simulator.

use std::{collections::BTreeSet, mem, sync::Arc};

use rm_model::{
    assessment::{BlockedRequest, Verdict},
    em::EmInstance,
    operation::{Outcome, PlacedRequest, QueuedOutcome, Rejection, RequestScopes, RequestSpec},
    refusal::Refusal,
    wait_queue::{WaitKey, WaitKeys},
};

use crate::wake_reason::WakeReason;

/// Maximum number of EMs to try before a new survey: so many full EMs show that the cluster view is stale.
pub const CANDIDATES_MAX: usize = 4;

/// State that the requests of one instance share: the cluster view, the state that was last observed, and the wait queue.
///
/// All functions return at once, from memory.
pub trait SharedState {
    /// Whether the request must be checked before it goes to the committer: it did not fit when its EM was last observed.
    fn needs_check(&self, request: &PlacedRequest) -> bool;
    /// Returns the verdict on a queued request by the observed state; `None` if that state is not known.
    fn observed_verdict(&self, request: &PlacedRequest) -> Option<Verdict>;
    /// Returns the best EM of the cluster view, except those in `except` and contended ones. The resource of the request counts
    /// as used there.
    fn choose(&self, spec: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance>;
    /// Ends the counting of [`SharedState::choose`] on an EM that did not grant the request.
    fn release_assumption(&self, em: &EmInstance);
    /// Returns the EM of [`SharedState::choose`] without counting the resource as used.
    fn best_candidate(&self, spec: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance>;
    /// Returns the best EM among the contended ones, except those in `except`.
    fn best_contended(&self, spec: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance>;
    /// Whether the key of an EM is contended.
    fn is_contended(&self, em: &EmInstance) -> bool;
    /// Returns the EM that best explains a refusal, and at which the request can wait.
    fn nearest_fit(&self, spec: &RequestSpec) -> Option<EmInstance>;
    /// Returns the rejection of a request for which no EM can be selected.
    fn no_candidate(&self, spec: &RequestSpec) -> Rejection;

    /// Takes a permit to wait. Returns false if too many requests wait.
    fn enter_queue(&mut self, any_em: bool, spec: &RequestSpec) -> bool;
    /// Whether the request has a queue entry.
    fn has_entry(&self) -> bool;
    /// Whether the request has a queue entry at exactly these keys.
    fn has_entry_at(&self, wait_keys: &WaitKeys) -> bool;
    /// Records the queue entry that the ledger has stored.
    fn update_entry(&mut self, entry: &QueuedOutcome);
    /// Records that the queue entry does not exist any more.
    fn mark_removed(&mut self);
    /// Records that the request was granted, and that its entry has left the queue.
    fn granted(&mut self);
    /// Returns the number of the last event that freed capacity.
    fn freed_count(&self) -> u64;
    /// Also wakes the request for capacity at these keys that was freed since the event `since`.
    fn subscribe(&mut self, wait_keys: BTreeSet<WaitKey>, since: u64);
    /// Forwards a wake-up without a grant to later waiters.
    fn forward_wake(&self, wake: WakeReason);
    /// Counts a check, or an attempt without a grant, by its reason.
    fn count_check(&self, wake: WakeReason);
}

/// Failure of an action. `E` is the error of the shell.
#[derive(Debug, Clone)]
pub enum Failure<E> {
    /// The ledger rejected the operation.
    Rejected(Box<Rejection>),
    /// The action had no effect and may succeed later. A waiting request survives it.
    Transient(E),
    /// The action failed, or its result is unknown. The request ends and is not repeated here.
    Final(E),
}

/// The next task of the shell for the request. `E` is an error of the shell.
#[derive(Debug)]
pub enum Action<E> {
    /// Survey the changed EMs, so that the cluster view is recent.
    Survey(SurveyAge),
    /// Check the request without locks. A check for the queue first renews the instance.
    Check(PlacedRequest, Option<InQueue>),
    /// Submit the request to the committer.
    Commit(PlacedRequest, Patience, Option<InQueue>),
    /// Wait until capacity may be free.
    Wait,
    /// Pause before the request is tried again.
    Pause,
    /// Reply to the caller. The request is done.
    Reply(RequestResult<E>),
}

/// Maximum age of the cluster view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SurveyAge {
    /// One second, so that it shows whether a request fits anywhere.
    Fresh,
    /// Two seconds; an older survey runs beside.
    Recent,
}

/// How long a submitted operation waits for a contended EM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Until the deadline of the action: for locks, or in the queue for waiting.
    Deadline,
    /// Not at all: other EMs can be tried.
    OtherEms,
    /// For a moment, because no other EM was available.
    OtherEmsAfterPause,
}

/// Place of an attempt that belongs to the wait queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InQueue {
    /// Whether the attempt is on another EM, or as another spec, than the queue entry.
    pub is_elsewhere: bool,
}

/// End of a request.
#[derive(Debug)]
pub enum RequestResult<E> {
    /// Granted or refused, as the spec with this number.
    Decided(Outcome, usize),
    /// Rejected by the ledger, or because no EM can be selected.
    Rejected(Box<Rejection>),
    /// Too many requests wait.
    QueueFull,
    /// The wait deadline passed before the request had an entry in the queue.
    DeadlinePassed,
    /// The instance shuts down.
    Stopping,
    /// An action failed.
    Failed(E),
    /// The result does not belong to the action: a defect.
    Broken,
}

/// Result of an action.
#[derive(Debug)]
pub enum Event<E> {
    /// The result of [`Action::Survey`].
    Surveyed(Result<(), Failure<E>>),
    /// The result of [`Action::Check`].
    Checked(Result<Verdict, Failure<E>>),
    /// The result of [`Action::Commit`].
    Committed(Result<Outcome, Failure<E>>),
    /// The end of [`Action::Wait`] or [`Action::Pause`].
    Woken(WaitResult),
}

impl<E> Event<E> {
    /// Returns the name of the result.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Surveyed(Ok(())) => "surveyed",
            Self::Checked(Ok(Verdict::Fits)) => "fits",
            Self::Checked(Ok(Verdict::Refused(_))) => "does not fit",
            Self::Committed(Ok(Outcome::Granted(_))) => "granted",
            Self::Committed(Ok(Outcome::Waiting(_))) => "queued",
            Self::Committed(Ok(Outcome::Contended)) => "contended",
            Self::Committed(Ok(_)) => "refused",
            Self::Surveyed(Err(failure)) | Self::Checked(Err(failure)) | Self::Committed(Err(failure)) => match failure
            {
                Failure::Rejected(rejection) if **rejection == Rejection::PlaceLost => "position lost",
                Failure::Rejected(_) => "rejected",
                Failure::Transient(_) => "failed for now",
                Failure::Final(_) => "failed",
            },
            Self::Woken(WaitResult::Look(_)) => "woken",
            Self::Woken(WaitResult::DeadlinePassed) => "deadline",
            Self::Woken(WaitResult::Stopping) => "shutdown",
        }
    }
}

/// End of a wait or of a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitResult {
    /// Capacity may be free, or the pause is over.
    Look(WakeReason),
    /// The wait deadline has passed.
    DeadlinePassed,
    /// The instance shuts down.
    Stopping,
}

/// The action under way, and what follows from its result.
#[derive(Debug)]
enum Stage<E> {
    /// The request was not started, or is done.
    Idle,
    /// Surveys, to try the candidates for the current spec.
    Surveying,
    /// Surveys, to move the queue entry to another EM.
    SurveyingToMove(LeaveReason),
    /// Surveys after a wake-up, to look for an EM.
    SurveyingToLook(WakeReason),
    /// Checks a request before an attempt.
    Checking(PlacedRequest, Attempt),
    /// Checks after a wake-up whether the EM of the queue entry has capacity now.
    CheckingHome(WakeReason),
    /// Checks after a wake-up whether an EM has capacity. The others were checked before.
    CheckingCandidate { wake: WakeReason, em: EmInstance, checked: Vec<EmInstance> },
    /// Checks whether the request can be granted as another spec at an EM.
    CheckingOther { em: EmInstance, search: OtherSpecs },
    /// The committer has the request, which is not in the queue.
    Committing(Attempt),
    /// The committer has the request, which is in the queue; as another spec if it has a number.
    CommittingQueued { other: Option<usize> },
    /// Sleeps in the wait queue.
    Waiting,
    /// Pauses after a failure, then looks for capacity again.
    Pausing,
    /// Pauses after a failure, then is submitted again. The error is the reply at the deadline.
    PausingToCommit(E),
}

/// An attempt outside the queue.
#[derive(Debug)]
enum Attempt {
    /// On the EM that the request names.
    Named,
    /// On the best EM of the cluster view.
    Candidate(EmInstance),
    /// On an EM that has no capacity by the cluster view: a contended EM, or the EM that explains the refusal.
    LastResort { contended: Option<EmInstance> },
}

/// Why a queue entry leaves its EM.
#[derive(Debug)]
enum LeaveReason {
    /// The ledger has decided, and no entry is left.
    Decided(Outcome),
    /// The EM cannot be used.
    Rejected(Box<Rejection>),
    /// The EM is contended, and the request has no entry yet.
    Contended,
}

/// The specs other than that of the queue entry, which are checked one after another.
#[derive(Debug)]
struct OtherSpecs {
    then: AfterOthers,
    /// Last event that freed capacity before the first check.
    since: u64,
    /// Number of the spec that is checked, among the others.
    number: usize,
    /// EMs at which the spec was checked.
    checked: Vec<EmInstance>,
    /// Keys at which the specs are short.
    short: BTreeSet<WaitKey>,
}

/// Continuation if no other spec fits.
#[derive(Debug)]
enum AfterOthers {
    /// The request sleeps, or looks at once if it has a reason.
    Wait(Option<WakeReason>),
    /// The wake-up is forwarded, and the request sleeps.
    Forward(WakeReason),
}

/// The search for an EM for one spec, outside the queue.
#[derive(Debug, Default)]
struct Search {
    /// Number of the spec.
    spec: usize,
    /// EMs tried since the last survey.
    tried: Vec<EmInstance>,
    /// Number of these that were full.
    full: usize,
    /// Whether the cluster view is fresh.
    is_surveyed: bool,
    /// Number of drained EMs that the cluster view showed as free.
    drained: usize,
    /// Contended EMs that were tried as a last resort.
    tried_contended: Vec<EmInstance>,
}

/// A request in the wait queue.
#[derive(Debug)]
struct QueuedRequest {
    /// The request at the EM of its queue entry.
    request: PlacedRequest,
    /// Number of its spec.
    spec: usize,
    /// Numbers of the specs that may be granted instead.
    others: Vec<usize>,
    /// The last refusal.
    refusal: Option<Box<Refusal>>,
    /// Number of attempts in a row that met a contended EM.
    contended: usize,
    /// Reason of the attempt under way.
    woken_by: Option<WakeReason>,
}

/// One request.
#[derive(Debug)]
pub struct Request<E> {
    named: Option<EmInstance>,
    asks: Vec<Arc<RequestSpec>>,
    may_wait: bool,
    stage: Stage<E>,
    search: Search,
    /// Numbers of the specs that can fit later.
    may_fit: Vec<usize>,
    /// The first refusal, with the number of its spec.
    refused: Option<(Outcome, usize)>,
    /// Boxed: most requests do not wait.
    queued: Option<Box<QueuedRequest>>,
}

impl<E> Request<E> {
    /// Creates a request for one of `asks`, which differ only in their resource, on the EM `named` or on any EM.
    pub fn new(named: Option<EmInstance>, asks: Vec<Arc<RequestSpec>>, may_wait: bool) -> Self {
        let (stage, search, may_fit) = (Stage::Idle, Search::default(), Vec::new());
        Self { named, asks, may_wait, stage, search, may_fit, refused: None, queued: None }
    }

    /// Returns the name of the stage.
    pub fn stage(&self) -> &'static str {
        match self.stage {
            Stage::Idle => "Idle",
            Stage::Surveying => "Surveying",
            Stage::SurveyingToMove(_) => "SurveyingToMove",
            Stage::SurveyingToLook(_) => "SurveyingToLook",
            Stage::Checking(..) => "Checking",
            Stage::CheckingHome(_) => "CheckingHome",
            Stage::CheckingCandidate { .. } => "CheckingCandidate",
            Stage::CheckingOther { .. } => "CheckingOther",
            Stage::Committing(_) => "Committing",
            Stage::CommittingQueued { .. } => "CommittingQueued",
            Stage::Waiting => "Waiting",
            Stage::Pausing => "Pausing",
            Stage::PausingToCommit(_) => "PausingToCommit",
        }
    }

    /// Begins the request.
    pub fn start(&mut self, shared: &mut impl SharedState) -> Action<E> {
        if let (Some(em), [ask], true) = (&self.named, &self.asks[..], self.may_wait) {
            let request = placed(em.clone(), ask);
            // The request is ready to wait, so the check is skipped: the ledger would find the same result. A full wait queue
            // is no reason for a refusal, because the request may fit.
            if shared.needs_check(&request) && shared.enter_queue(false, ask) {
                return self.wait_at(request, 0, Vec::new(), shared);
            }
        }
        self.try_spec(0, shared)
    }

    /// Continues the request after the result of the last action.
    pub fn step(&mut self, event: Event<E>, shared: &mut impl SharedState) -> Action<E> {
        match (mem::replace(&mut self.stage, Stage::Idle), event) {
            (Stage::Surveying, Event::Surveyed(Ok(()))) => {
                self.search.tried.clear();
                self.search.full = 0;
                self.next_candidate(shared)
            }
            (Stage::SurveyingToMove(reason), Event::Surveyed(Ok(()))) => self.move_entry(reason, shared),
            (Stage::SurveyingToLook(wake), Event::Surveyed(Ok(()))) => self.check_candidate(wake, Vec::new(), shared),
            (Stage::SurveyingToLook(_), Event::Surveyed(Err(Failure::Transient(_)))) => self.pause(),
            (
                Stage::Surveying | Stage::SurveyingToMove(_) | Stage::SurveyingToLook(_),
                Event::Surveyed(Err(failure)),
            ) => fail(failure),
            (Stage::Checking(request, attempt), Event::Checked(result)) => match result {
                Ok(Verdict::Fits) => self.commit(request, attempt),
                Ok(Verdict::Refused(short)) => {
                    self.committed(attempt, Ok(Outcome::Refused(Box::new(short.refusal))), shared)
                }
                Err(failure) => self.committed(attempt, Err(failure), shared),
            },
            (Stage::CheckingHome(wake), Event::Checked(result)) => self.checked_home(wake, result, shared),
            (Stage::CheckingCandidate { wake, em, checked }, Event::Checked(result)) => {
                self.checked_candidate(wake, (em, checked), result, shared)
            }
            (Stage::CheckingOther { em, search }, Event::Checked(result)) => {
                self.checked_other(em, search, result, shared)
            }
            (Stage::Committing(attempt), Event::Committed(result)) => self.committed(attempt, result, shared),
            (Stage::CommittingQueued { other }, Event::Committed(result)) => {
                self.committed_queued(other, result, shared)
            }
            (Stage::Waiting | Stage::Pausing, Event::Woken(WaitResult::Look(wake))) => self.look(wake, shared),
            (Stage::PausingToCommit(_), Event::Woken(WaitResult::Look(_))) => self.submit(None, None, shared),
            (Stage::Waiting | Stage::Pausing, Event::Woken(WaitResult::DeadlinePassed)) => self.deadline_passed(None),
            (Stage::PausingToCommit(error), Event::Woken(WaitResult::DeadlinePassed)) => {
                self.deadline_passed(Some(error))
            }
            (Stage::Waiting | Stage::Pausing | Stage::PausingToCommit(_), Event::Woken(WaitResult::Stopping)) => {
                Action::Reply(RequestResult::Stopping)
            }
            _ => broken(),
        }
    }

    fn checked_home(
        &mut self,
        wake: WakeReason,
        result: Result<Verdict, Failure<E>>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        match result {
            Ok(Verdict::Refused(short)) if is_unchanged(shared, &short) => self.try_others_or_sleep(wake, shared),
            // The ledger decides, and reports an EM that was unregistered.
            Ok(_) | Err(Failure::Rejected(_)) => self.submit_for(wake, None, shared),
            Err(Failure::Transient(_)) => self.pause(),
            Err(failure) => fail(failure),
        }
    }

    fn checked_candidate(
        &mut self,
        wake: WakeReason,
        (em, mut checked): (EmInstance, Vec<EmInstance>),
        result: Result<Verdict, Failure<E>>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        if matches!(result, Ok(Verdict::Fits)) {
            return self.submit_for(wake, Some(em), shared);
        }
        shared.release_assumption(&em);
        checked.push(em);
        self.check_candidate(wake, checked, shared)
    }

    fn checked_other(
        &mut self,
        em: EmInstance,
        mut search: OtherSpecs,
        result: Result<Verdict, Failure<E>>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        match result {
            Ok(Verdict::Fits) => {
                if let (AfterOthers::Forward(wake), Some(queued)) = (&search.then, &mut self.queued) {
                    queued.woken_by = Some(*wake);
                }
                return self.submit(Some(em), Some(search.number), shared);
            }
            Ok(Verdict::Refused(short)) => {
                let short = short.wait_keys.into_iter().filter(|(_, is_short)| *is_short);
                search.short.extend(short.map(|(wait_key, _)| wait_key));
            }
            // The next freed event or poll repeats the check.
            Err(_) => {}
        }
        search.checked.push(em);
        self.check_other(search, shared)
    }

    /// Tries a spec without waiting.
    fn try_spec(&mut self, spec: usize, shared: &mut impl SharedState) -> Action<E> {
        self.search = Search { spec, ..Search::default() };
        let (Some(ask), named) = (self.asks.get(spec), self.named.clone()) else {
            return broken();
        };
        match named {
            Some(em) => self.attempt(placed(em, ask), Attempt::Named, shared),
            None => self.survey(SurveyAge::Recent, Stage::Surveying),
        }
    }

    fn attempt(&mut self, request: PlacedRequest, attempt: Attempt, shared: &mut impl SharedState) -> Action<E> {
        if shared.needs_check(&request) {
            self.stage = Stage::Checking(request.clone(), attempt);
            return Action::Check(request, None);
        }
        self.commit(request, attempt)
    }

    fn commit(&mut self, request: PlacedRequest, attempt: Attempt) -> Action<E> {
        let patience = match attempt {
            Attempt::Named => Patience::Deadline,
            Attempt::LastResort { .. } if !self.may_wait => Patience::OtherEmsAfterPause,
            _ => Patience::OtherEms,
        };
        self.stage = Stage::Committing(attempt);
        Action::Commit(request, patience, None)
    }

    /// Continues after an attempt outside the queue, or after the check before it.
    fn committed(
        &mut self,
        attempt: Attempt,
        result: Result<Outcome, Failure<E>>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        match attempt {
            Attempt::Named => self.decided(result, shared),
            Attempt::Candidate(em) => {
                if !matches!(result, Ok(Outcome::Granted(_))) {
                    shared.release_assumption(&em);
                }
                if !may_fit_elsewhere(&result) {
                    return self.decided(result, shared);
                }
                // Contended EMs do not count, because there may be many, and placement avoids them from now on.
                self.search.full += usize::from(!matches!(result, Ok(Outcome::Contended)));
                self.search.tried.push(em);
                self.next_candidate(shared)
            }
            Attempt::LastResort { contended } => match (result, contended) {
                // The EM was drained after the cluster view was read; placement no longer selects it as the closest.
                (Err(Failure::Rejected(rejection)), None) if rejection.is_draining() => {
                    self.search.drained += 1;
                    match self.search.drained {
                        CANDIDATES_MAX => self.no_candidate(shared),
                        _ => self.survey(SurveyAge::Fresh, Stage::Surveying),
                    }
                }
                // Another EM may have capacity now.
                (Ok(Outcome::Contended), _) if !self.may_wait => self.survey(SurveyAge::Fresh, Stage::Surveying),
                (result, Some(em)) if may_fit_elsewhere(&result) => {
                    self.search.tried_contended.push(em);
                    self.survey(SurveyAge::Fresh, Stage::Surveying)
                }
                (result, _) => self.decided(result, shared),
            },
        }
    }

    /// Tries the next EM by the cluster view. After [`CANDIDATES_MAX`] full ones, surveys first, and then tries a last resort.
    fn next_candidate(&mut self, shared: &mut impl SharedState) -> Action<E> {
        let Some(ask) = self.asks.get(self.search.spec).cloned() else { return broken() };
        if self.search.full < CANDIDATES_MAX
            && let Some(em) = shared.choose(&ask, &self.search.tried)
        {
            return self.attempt(placed(em.clone(), &ask), Attempt::Candidate(em), shared);
        }
        if !self.search.is_surveyed {
            self.search.is_surveyed = true;
            return self.survey(SurveyAge::Fresh, Stage::Surveying);
        }
        let may_wait_for_key = !self.may_wait && self.search.tried_contended.len() < CANDIDATES_MAX;
        let contended = match may_wait_for_key {
            true => shared.best_contended(&ask, &self.search.tried_contended),
            false => None,
        };
        match contended.clone().or_else(|| shared.nearest_fit(&ask)) {
            Some(em) => self.attempt(placed(em, &ask), Attempt::LastResort { contended }, shared),
            None => self.no_candidate(shared),
        }
    }

    /// Continues after the decision on a spec without waiting.
    fn decided(&mut self, result: Result<Outcome, Failure<E>>, shared: &mut impl SharedState) -> Action<E> {
        let spec = self.search.spec;
        match result {
            Ok(Outcome::Refused(refusal)) => {
                if !refusal.never_fits {
                    self.may_fit.push(spec);
                }
                self.refused.get_or_insert((Outcome::Refused(refusal), spec));
            }
            // All EMs with capacity for the spec are contended.
            Ok(Outcome::Contended) if self.may_wait => self.may_fit.push(spec),
            Ok(outcome) => return Action::Reply(RequestResult::Decided(outcome, spec)),
            Err(failure) => return fail(failure),
        }
        if spec + 1 < self.asks.len() {
            return self.try_spec(spec + 1, shared);
        }
        match (self.may_fit.first(), self.refused.take()) {
            (Some(first), _) if self.may_wait => self.enter_queue(*first, shared),
            (_, Some((refused, spec))) => Action::Reply(RequestResult::Decided(refused, spec)),
            _ => broken(),
        }
    }

    /// Waits with a spec; the later specs that can fit stay alternatives.
    fn enter_queue(&mut self, spec: usize, shared: &mut impl SharedState) -> Action<E> {
        self.search.spec = spec;
        let Some(ask) = self.asks.get(spec).cloned() else { return broken() };
        let Some(em) = self.named.clone().or_else(|| shared.nearest_fit(&ask)) else {
            return self.no_candidate(shared);
        };
        if !shared.enter_queue(self.named.is_none(), &ask) {
            return Action::Reply(RequestResult::QueueFull);
        }
        let others = self.may_fit.iter().copied().filter(|other| *other != spec).collect();
        self.wait_at(placed(em, &ask), spec, others, shared)
    }

    fn wait_at(
        &mut self,
        request: PlacedRequest,
        spec: usize,
        others: Vec<usize>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        let queued = QueuedRequest { request, spec, others, refusal: None, contended: 0, woken_by: None };
        self.queued = Some(Box::new(queued));
        self.submit(None, None, shared)
    }

    /// Submits the queued request on the EM of its entry because of a wake-up, or on another EM.
    fn submit_for(&mut self, wake: WakeReason, em: Option<EmInstance>, shared: &mut impl SharedState) -> Action<E> {
        if let Some(queued) = &mut self.queued {
            queued.woken_by = Some(wake);
        }
        self.submit(em, None, shared)
    }

    /// Submits the queued request. The queue entry stays unchanged if an attempt on another EM or as another spec fails.
    fn submit(&mut self, em: Option<EmInstance>, other: Option<usize>, shared: &mut impl SharedState) -> Action<E> {
        let Some(queued) = &self.queued else { return broken() };
        let home = &queued.request;
        let em = em.filter(|em| *em != home.em);
        // A request without a named EM does not wait for contended EMs, unless it has no queue entry and all its EMs are
        // contended.
        let is_stuck = || queued.contended > 0 && !shared.has_entry() && shared.is_contended(&home.em);
        let patience = match self.named {
            Some(_) => Patience::Deadline,
            None if is_stuck() => Patience::OtherEmsAfterPause,
            None => Patience::OtherEms,
        };
        let is_elsewhere = other.is_some() || em.is_some();
        let other_ask = other.and_then(|other| self.asks.get(*queued.others.get(other)?));
        let scopes = if other_ask.is_some() { RequestScopes::default() } else { home.scopes.clone() };
        let ask = other_ask.unwrap_or(&home.ask).clone();
        let request = PlacedRequest { em: em.unwrap_or_else(|| home.em.clone()), ask, wait: None, scopes };
        self.stage = Stage::CommittingQueued { other };
        Action::Commit(request, patience, Some(InQueue { is_elsewhere }))
    }

    /// Continues after an attempt in the queue.
    fn committed_queued(
        &mut self,
        other: Option<usize>,
        result: Result<Outcome, Failure<E>>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        let Some(queued) = &mut self.queued else { return broken() };
        let has_entry = shared.has_entry();
        match result {
            Ok(Outcome::Waiting(entry)) => {
                queued.contended = 0;
                if let Some(wake) = queued.woken_by.take() {
                    shared.count_check(wake);
                    shared.forward_wake(wake);
                }
                shared.update_entry(&entry);
                queued.refusal = Some(Box::new(entry.refusal));
                // An alternative that just failed is not checked again before the next wake-up.
                self.rest(other.is_none(), None, shared)
            }
            Ok(granted @ Outcome::Granted(_)) => {
                let number = other.and_then(|other| queued.others.get(other).copied());
                shared.granted();
                Action::Reply(RequestResult::Decided(granted, number.unwrap_or(queued.spec)))
            }
            Ok(Outcome::Contended) if has_entry => {
                let wake = queued.woken_by.take().unwrap_or(WakeReason::NEWS);
                queued.contended += 1;
                let again = match queued.contended < CANDIDATES_MAX {
                    // Another EM may have capacity.
                    true => Some(wake.handed_on()),
                    false => {
                        queued.contended = 0;
                        shared.forward_wake(wake);
                        None
                    }
                };
                self.rest(other.is_none(), again, shared)
            }
            Ok(Outcome::Contended) => {
                queued.contended += 1;
                self.leave(LeaveReason::Contended, shared)
            }
            Ok(outcome) => {
                shared.mark_removed();
                self.leave(LeaveReason::Decided(outcome), shared)
            }
            // The instance missed its renewals and lost its queue entries. The request enters at the end of the queue.
            Err(Failure::Rejected(rejection)) if *rejection == Rejection::PlaceLost => {
                shared.mark_removed();
                self.submit(None, None, shared)
            }
            Err(Failure::Rejected(rejection)) if rejection.is_of_em() => {
                self.leave(LeaveReason::Rejected(rejection), shared)
            }
            // A queued request survives a short outage.
            Err(Failure::Transient(error)) if has_entry => {
                self.stage = Stage::PausingToCommit(error);
                Action::Pause
            }
            Err(failure) => fail(failure),
        }
    }

    /// Moves the queue entry to another EM if the request names none.
    fn leave(&mut self, reason: LeaveReason, shared: &mut impl SharedState) -> Action<E> {
        match self.named {
            Some(_) => self.stay(reason, shared),
            None => self.survey(SurveyAge::Fresh, Stage::SurveyingToMove(reason)),
        }
    }

    fn move_entry(&mut self, reason: LeaveReason, shared: &mut impl SharedState) -> Action<E> {
        let Some(queued) = &mut self.queued else { return broken() };
        let home = &mut queued.request;
        let nearest = shared.nearest_fit(&home.ask).filter(|em| *em != home.em);
        let em = match reason {
            LeaveReason::Contended => shared.best_candidate(&home.ask, &[]).or(nearest),
            LeaveReason::Decided(_) | LeaveReason::Rejected(_) => nearest,
        };
        match em {
            Some(em) => {
                home.em = em;
                self.submit(None, None, shared)
            }
            None => self.stay(reason, shared),
        }
    }

    /// Ends a request that finds no other EM. A request that only met a contended EM tries it again.
    fn stay(&mut self, reason: LeaveReason, shared: &mut impl SharedState) -> Action<E> {
        let spec = self.queued.as_ref().map_or(0, |queued| queued.spec);
        match reason {
            LeaveReason::Contended => self.submit(None, None, shared),
            LeaveReason::Decided(outcome) => Action::Reply(RequestResult::Decided(outcome, spec)),
            LeaveReason::Rejected(rejection) if rejection.is_draining() && self.named.is_none() => {
                self.no_candidate(shared)
            }
            LeaveReason::Rejected(rejection) => Action::Reply(RequestResult::Rejected(rejection)),
        }
    }

    /// Sleeps, or looks at once if there is a reason. If `checks_others`, first checks the other specs.
    fn rest(&mut self, checks_others: bool, again: Option<WakeReason>, shared: &mut impl SharedState) -> Action<E> {
        match checks_others && self.has_others() {
            true => self.check_others(AfterOthers::Wait(again), shared),
            false => self.sleep(again, shared),
        }
    }

    fn sleep(&mut self, again: Option<WakeReason>, shared: &mut impl SharedState) -> Action<E> {
        match again {
            Some(wake) => self.look(wake, shared),
            None => {
                self.stage = Stage::Waiting;
                Action::Wait
            }
        }
    }

    /// Checks whether the request can be granted now.
    fn look(&mut self, wake: WakeReason, shared: &mut impl SharedState) -> Action<E> {
        let Some(queued) = &self.queued else { return broken() };
        if wake.is_coming {
            return self.submit_for(wake, None, shared);
        }
        if self.named.is_some() {
            match shared.observed_verdict(&queued.request) {
                // The ledger would find the same result as a check.
                Some(Verdict::Fits) => return self.submit_for(wake, None, shared),
                // The observed state is as new as the wake-up.
                Some(Verdict::Refused(short)) if !wake.is_news && is_unchanged(shared, &short) => {
                    return self.try_others_or_sleep(wake, shared);
                }
                _ => {}
            }
        }
        shared.count_check(wake);
        match self.named {
            Some(_) => self.check_home(wake),
            None => self.survey(SurveyAge::Recent, Stage::SurveyingToLook(wake)),
        }
    }

    /// Checks the next EM by the cluster view, which counts the request there, so that concurrent waiters select different EMs.
    fn check_candidate(
        &mut self,
        wake: WakeReason,
        checked: Vec<EmInstance>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        let Some(queued) = &self.queued else { return broken() };
        if checked.len() < CANDIDATES_MAX
            && let Some(em) = shared.choose(&queued.request.ask, &checked)
        {
            let request = PlacedRequest { em: em.clone(), ..queued.request.clone() };
            self.stage = Stage::CheckingCandidate { wake, em, checked };
            return Action::Check(request, Some(InQueue { is_elsewhere: false }));
        }
        match shared.is_contended(&queued.request.em) {
            true => self.try_others_or_sleep(wake, shared),
            false => self.check_home(wake),
        }
    }

    fn check_home(&mut self, wake: WakeReason) -> Action<E> {
        let Some(queued) = &self.queued else { return broken() };
        self.stage = Stage::CheckingHome(wake);
        Action::Check(queued.request.clone(), Some(InQueue { is_elsewhere: false }))
    }

    /// Continues after a check without success: checks the other specs, then forwards the wake-up.
    fn try_others_or_sleep(&mut self, wake: WakeReason, shared: &mut impl SharedState) -> Action<E> {
        match self.has_others() {
            true => self.check_others(AfterOthers::Forward(wake), shared),
            false => {
                shared.forward_wake(wake);
                self.sleep(None, shared)
            }
        }
    }

    fn has_others(&self) -> bool {
        self.queued.as_ref().is_some_and(|queued| !queued.others.is_empty())
    }

    fn check_others(&mut self, then: AfterOthers, shared: &mut impl SharedState) -> Action<E> {
        let since = shared.freed_count();
        self.check_other(OtherSpecs { then, since, number: 0, checked: Vec::new(), short: BTreeSet::new() }, shared)
    }

    /// Checks the next other spec, on up to [`CANDIDATES_MAX`] EMs. If none is left, subscribes to the keys where they are
    /// short.
    fn check_other(&mut self, mut search: OtherSpecs, shared: &mut impl SharedState) -> Action<E> {
        let Some(queued) = &self.queued else { return broken() };
        while let Some(ask) = queued.others.get(search.number).and_then(|spec| self.asks.get(*spec)) {
            let home = || Some(queued.request.em.clone()).filter(|_| search.checked.is_empty());
            let em = match self.named.is_none() && search.checked.len() < CANDIDATES_MAX {
                true => shared.best_candidate(ask, &search.checked).or_else(home),
                false => home(),
            };
            if let Some(em) = em {
                let request = placed(em.clone(), ask);
                self.stage = Stage::CheckingOther { em, search };
                return Action::Check(request, Some(InQueue { is_elsewhere: true }));
            }
            search.number += 1;
            search.checked.clear();
        }
        shared.subscribe(search.short, search.since);
        match search.then {
            AfterOthers::Wait(again) => self.sleep(again, shared),
            AfterOthers::Forward(wake) => {
                shared.forward_wake(wake);
                self.sleep(None, shared)
            }
        }
    }

    fn survey(&mut self, age: SurveyAge, stage: Stage<E>) -> Action<E> {
        self.stage = stage;
        Action::Survey(age)
    }

    fn pause(&mut self) -> Action<E> {
        self.stage = Stage::Pausing;
        Action::Pause
    }

    fn no_candidate(&self, shared: &impl SharedState) -> Action<E> {
        let spec = self.queued.as_ref().map_or(self.search.spec, |queued| queued.spec);
        match self.asks.get(spec) {
            Some(ask) => Action::Reply(RequestResult::Rejected(Box::new(shared.no_candidate(ask)))),
            None => broken(),
        }
    }

    /// Replies at the wait deadline: with the last refusal, or with the error of the last attempt.
    fn deadline_passed(&mut self, error: Option<E>) -> Action<E> {
        let refusal = self.queued.as_mut().and_then(|queued| Some((queued.refusal.take()?, queued.spec)));
        Action::Reply(match (refusal, error) {
            (Some((refusal, spec)), _) => RequestResult::Decided(Outcome::Refused(refusal), spec),
            (None, Some(error)) => RequestResult::Failed(error),
            (None, None) => RequestResult::DeadlinePassed,
        })
    }
}

/// A result that belongs to no action: a defect of the shell.
fn broken<E>() -> Action<E> {
    Action::Reply(RequestResult::Broken)
}

fn placed(em: EmInstance, ask: &Arc<RequestSpec>) -> PlacedRequest {
    PlacedRequest { em, ask: ask.clone(), wait: None, scopes: RequestScopes::default() }
}

fn fail<E>(failure: Failure<E>) -> Action<E> {
    Action::Reply(match failure {
        Failure::Rejected(rejection) => RequestResult::Rejected(rejection),
        Failure::Transient(error) | Failure::Final(error) => RequestResult::Failed(error),
    })
}

/// Whether a result concerns one EM alone, so that another EM may still fit: it is full, contended or unregistered.
fn may_fit_elsewhere<E>(result: &Result<Outcome, Failure<E>>) -> bool {
    match result {
        Ok(Outcome::Refused(refusal)) => refusal.is_of_em_alone(),
        Ok(Outcome::Contended) => true,
        Err(Failure::Rejected(rejection)) => rejection.is_of_em(),
        _ => false,
    }
}

/// Whether a refusal leaves the queue entry as it is, so that the request can sleep.
fn is_unchanged(shared: &impl SharedState, short: &BlockedRequest) -> bool {
    !short.refusal.never_fits && shared.has_entry_at(&short.wait_keys)
}
