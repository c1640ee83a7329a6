//! A request: from its submission to its reply, as a value.
//!
//! [`Request::step`] takes the result of the last action and returns the next one. Exactly one action is under way at a time;
//! the stage names it, with what follows from its result. The shell of the request carries out the action and measures the time:
//! a deadline arrives as a result.
//!
//! - `search`: outside the queue. A request that names no EM searches one by the cluster view (`Surveying`). A check without
//!   locks refuses what cannot fit (`Checking`). The committer decides (`Committing`).
//! - `queued`: a refused request that may wait enters the wait queue at its EM (`CommittingQueued`). It sleeps until capacity may
//!   be free (`Waiting`), then checks again. After a failure of the database it pauses first (`Pausing`).
//!
//! A request may name several specs, of which one is granted. It waits with the first spec that can fit later, as its entry
//! states, and is granted as the first that fits.
//!
//! Never: grants. The ledger decides under the locks; a belief of the request only selects its next attempt.
//! Callers: `rm_service::request_resource`, the simulator.

use std::{collections::BTreeSet, sync::Arc};

use rm_model::{
    assessment::Verdict,
    em::EmInstance,
    operation::{Outcome, PlacedRequest, QueuedOutcome, Rejection, RequestSpec},
    placement::ClosedEm,
    wait_queue::{WaitKey, WaitKeys},
};

use crate::wake_reason::WakeReason;

mod queued;
mod search;

use queued::QueuedRequest;
use search::{EmSearch, SearchStep};

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
    /// Returns the best EM among the contended and held ones, except those in `except`.
    fn best_contended(&self, spec: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance>;
    /// Whether the key of an EM is contended.
    fn is_contended(&self, em: &EmInstance) -> bool;
    /// Returns the EM that best explains a refusal, and at which the request can wait. It is closed only if no open EM can serve the
    /// request later, and the request may wait.
    fn nearest_fit(&self, spec: &RequestSpec) -> Option<EmInstance>;
    /// Returns why an EM is closed by the cluster view; `None` if it is open.
    fn closed(&self, em: &EmInstance) -> Option<ClosedEm>;
    /// Whether an EM is unhealthy or silent by the cluster view: a request that does not name it is not granted there.
    fn is_unavailable(&self, em: &EmInstance) -> bool {
        self.closed(em) == Some(ClosedEm::Unavailable)
    }
    /// Returns the rejection of a request for which no EM can be selected.
    fn no_candidate(&self, spec: &RequestSpec) -> Rejection;

    /// Takes a permit to wait. Returns false if too many requests wait.
    fn enter_queue(&mut self, any_em: bool, spec: &RequestSpec) -> bool;
    /// Whether the request has a queue entry.
    fn has_entry(&self) -> bool;
    /// Whether the request has a queue entry at exactly these keys.
    fn has_entry_at(&self, wait_keys: &WaitKeys) -> bool;
    /// Records the queue entry that the ledger has stored. `any_em` states whether capacity at any EM may serve the request.
    fn update_entry(&mut self, entry: &QueuedOutcome, any_em: bool);
    /// Whether the call is known to have lost its position: it checks, and ends.
    fn has_ended(&self) -> bool;
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
    /// The action had no effect and may succeed later. A request with a queue entry survives it.
    Transient(E),
    /// The action failed, or its result is unknown. The request ends, or tries another EM.
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
    /// Granted or refused.
    Decided {
        /// The decision.
        outcome: Outcome,
        /// Number of the spec that it concerns.
        spec: usize,
    },
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
    /// The result does not belong to the action: a defect of the shell.
    Broken {
        /// Name of the stage.
        stage: &'static str,
        /// Name of the result.
        event: &'static str,
    },
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
            Self::Checked(Ok(Verdict::Refused(_) | Verdict::Reranked(_))) => "does not fit",
            Self::Committed(Ok(Outcome::Granted(_))) => "granted",
            Self::Committed(Ok(Outcome::Waiting(_))) => "queued",
            Self::Committed(Ok(Outcome::Contended)) => "contended",
            Self::Committed(Ok(_)) => "refused",
            Self::Surveyed(Err(failure)) | Self::Checked(Err(failure)) | Self::Committed(Err(failure)) => match failure
            {
                Failure::Rejected(rejection) if **rejection == Rejection::PlaceLost => "position lost",
                Failure::Rejected(rejection) if rejection.is_end_of_waiting() => "removed",
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

/// A spec of a request, with its number in the request.
#[derive(Debug, Clone)]
struct NumberedSpec {
    number: usize,
    ask: Arc<RequestSpec>,
}

/// A request that begins to wait: where, and as which spec.
#[derive(Debug)]
struct QueueStart {
    em: EmInstance,
    spec: NumberedSpec,
    /// The specs that may be granted instead.
    others: Vec<NumberedSpec>,
    is_named: bool,
}

/// One request.
#[derive(Debug)]
pub struct Request<E>(Phase<E>);

#[derive(Debug)]
enum Phase<E> {
    Outside(Box<EmSearch>),
    Queued(Box<QueuedRequest<E>>),
    /// The request was created without a spec.
    Broken,
}

impl<E> Request<E> {
    /// Begins a request for one of `asks`, which differ only in their resource, on the EM `named` or on any EM.
    pub fn start(
        named: Option<EmInstance>,
        asks: Vec<Arc<RequestSpec>>,
        shared: &mut impl SharedState,
    ) -> (Self, Action<E>) {
        let mut specs = asks.into_iter().enumerate().map(|(number, ask)| NumberedSpec { number, ask });
        let Some(first) = specs.next() else {
            return (Self(Phase::Broken), Action::Reply(RequestResult::Broken { stage: "New", event: "no spec" }));
        };
        let others: Vec<NumberedSpec> = specs.collect();
        let may_wait = first.ask.may_wait;
        if let (Some(em), [], true) = (&named, &others[..], may_wait) {
            let em = em.clone();
            // The request is ready to wait, so the check is skipped: the ledger would find the same result. A full wait queue
            // is no reason for a refusal, because the request may fit.
            if shared.needs_check(&PlacedRequest::new(em.clone(), &first.ask, false))
                && shared.enter_queue(false, &first.ask)
            {
                return Self::queue(QueueStart { em, spec: first, others, is_named: true }, shared);
            }
        }
        let mut search = Box::new(EmSearch::new(named, first, others));
        match search.start(shared) {
            SearchStep::Act(action) => (Self(Phase::Outside(search)), action),
            SearchStep::Queue(start) => Self::queue(start, shared),
        }
    }

    fn queue(start: QueueStart, shared: &mut impl SharedState) -> (Self, Action<E>) {
        let mut queued = Box::new(QueuedRequest::new(start));
        let action = queued.enter(shared);
        (Self(Phase::Queued(queued)), action)
    }

    /// Returns the name of the stage.
    pub fn stage(&self) -> &'static str {
        match &self.0 {
            Phase::Outside(search) => search.stage(),
            Phase::Queued(queued) => queued.stage(),
            Phase::Broken => "New",
        }
    }

    /// Continues the request after the result of the last action.
    pub fn step(&mut self, event: Event<E>, shared: &mut impl SharedState) -> Action<E> {
        let (stage, name) = (self.stage(), event.name());
        let action = match &mut self.0 {
            Phase::Outside(search) => match search.step(event, shared) {
                Some(SearchStep::Act(action)) => Some(action),
                Some(SearchStep::Queue(start)) => {
                    let action;
                    (*self, action) = Self::queue(start, shared);
                    Some(action)
                }
                None => None,
            },
            Phase::Queued(queued) => queued.step(event, shared),
            Phase::Broken => None,
        };
        action.unwrap_or(Action::Reply(RequestResult::Broken { stage, event: name }))
    }
}

fn no_candidate<E>(ask: &RequestSpec, shared: &impl SharedState) -> Action<E> {
    Action::Reply(RequestResult::Rejected(Box::new(shared.no_candidate(ask))))
}

fn fail<E>(failure: Failure<E>) -> Action<E> {
    Action::Reply(match failure {
        Failure::Rejected(rejection) => RequestResult::Rejected(rejection),
        Failure::Transient(error) | Failure::Final(error) => RequestResult::Failed(error),
    })
}
