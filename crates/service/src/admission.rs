//! Admission: the checks in front of the committer, and the placement of requests without an EM.
//!
//! A check decides a request on a plain read without locks; many requests share one read. A request that cannot be granted is
//! refused here and never waits for a lock. The cached state only selects the path: a request that fitted by the cache goes
//! straight to the committer, any other is checked first.
//!
//! Never: grants; refuses by cached state (invariant 7 of ARCHITECTURE.md).
//! Callers: `request_resource`, `waiting`; `committer` and `heartbeat` update the cache.
//!
//! - `cache`: EMs and scopes as last observed; `survey`: updates of the cluster view; `check`: the checks, batched.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{error::Error, heartbeat::LivenessTimeouts, single_flight::SingleFlight, tasks::InstanceTasks};
use rm_model::{
    assessment::{DryRunResult, Verdict},
    cap::Cap,
    em::EmInstance,
    operation::{PlacedRequest, Rejection, RequestSpec},
    placement::ClosedEm,
};
use rm_store::{
    Store, em_resource,
    session::{answered_within, within_timeout},
};
use rm_telemetry::traces;

mod cache;
mod check;
mod survey;

pub use cache::StateCache;
use check::CheckTask;
pub use check::read as read_check_state;
pub use survey::Surveys;
use survey::survey;

/// Maximum number of checks that wait.
const QUEUE_MAX: usize = 16_384;

/// Maximum age of a survey that shows that a request fits on no EM.
const SURVEY_AGE: Duration = Duration::from_secs(1);

/// Handle of the admission of one instance. Clones share it.
#[derive(Clone, Debug)]
pub struct Admission {
    queue: mpsc::Sender<CheckTask>,
    seen: StateCache,
    store: Store,
    liveness: LivenessTimeouts,
    surveyed: SingleFlight,
    surveys: Surveys,
    /// Whether a limit change is in progress, for which all checks wait.
    fenced: Arc<AtomicBool>,
}

impl Admission {
    /// Surveys the changed EMs, so that the cluster view is at most one second old. Concurrent callers share one survey and its
    /// failure.
    ///
    /// # Errors
    /// Database errors; [`Error::Unavailable`] if the database has not replied by `deadline`.
    pub async fn survey(&self, deadline: Instant) -> Result<(), Error> {
        self.surveyed.run_recent(SURVEY_AGE, deadline, || self.surveying()).await
    }

    /// Starts a survey if the last one is older than a second, and waits for it only if the last one is older than two seconds.
    ///
    /// # Errors
    /// As of [`Admission::survey`].
    pub async fn survey_in_background(&self, deadline: Instant) -> Result<(), Error> {
        self.surveyed.start(SURVEY_AGE, || self.surveying());
        self.surveyed.run_recent(SURVEY_AGE * 2, deadline, || self.surveying()).await
    }

    fn surveying(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        survey(self.store.clone(), self.seen.clone(), self.liveness, self.surveys.clone())
    }

    /// Returns the state of the surveys, in which the detection of lost EMs records the silent EMs.
    pub fn surveys(&self) -> Surveys {
        self.surveys.clone()
    }

    /// Reads `ems` and updates them in the cluster view.
    ///
    /// # Errors
    /// Database errors.
    pub async fn refresh(&self, ems: &[EmInstance]) -> Result<(), Error> {
        let found = within_timeout(em_resource::read(&self.store.pool().await?, ems)).await?;
        self.seen.take_over(found);
        Ok(())
    }

    /// Surveys `ems` alone, with the conditions that they have reported.
    ///
    /// # Errors
    /// Database errors.
    pub async fn survey_of(&self, ems: Vec<EmInstance>) -> Result<(), Error> {
        survey::survey_of(self.store.clone(), self.seen.clone(), self.liveness, self.surveys.clone(), ems).await
    }

    /// Returns the best EM for the request by the cluster view, except those in `except` and contended ones.
    ///
    /// The request's resource counts as used there until the EM is read again or [`Admission::release_assumption`] is called.
    pub fn choose(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.choose(ask, policies, except))
    }

    /// Returns the EM of [`Admission::choose`] without counting the resource as used.
    pub fn best_candidate(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.best(ask, policies, except))
    }

    /// Returns the best EM for the request among the contended and held ones, except those in `except`.
    pub fn best_contended(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.best_blocked(ask, policies, except))
    }

    /// Whether the key of an EM is contended.
    pub fn is_contended(&self, em: &EmInstance) -> bool {
        self.seen.choose(|view, _| view.is_contended(em))
    }

    /// Ends the counting of [`Admission::choose`] on `em`: it did not grant the request.
    pub fn release_assumption(&self, em: &EmInstance) {
        self.seen.choose(|view, _| view.settle(em));
    }

    /// Returns the EM that best explains a refusal and at which the request can wait. Contended EMs come last, and closed ones only
    /// serve a request that may wait.
    pub fn nearest_fit(&self, ask: &RequestSpec) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.closest(ask, policies))
    }

    /// Returns why an EM is closed by the cluster view; `None` if it is open.
    pub fn closed(&self, em: &EmInstance) -> Option<ClosedEm> {
        self.seen.choose(|view, _| view.closed(em))
    }

    /// Returns the rejection of a request for which no EM can be selected.
    pub fn no_candidate_error(&self, ask: &RequestSpec) -> Rejection {
        match self.seen.choose(|view, policies| view.matching(ask, policies)) {
            0 => Rejection::NoEmMatches(ask.selector.to_string()),
            matching => Rejection::NoEmAvailable { matching },
        }
    }

    /// Starts the task that runs the checks. The task ends when all clones of the handle are dropped. `liveness` states when an EM
    /// without reports is silent.
    pub fn start(store: &Store, seen: StateCache, liveness: LivenessTimeouts, tasks: &InstanceTasks) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        let fenced = Arc::new(AtomicBool::new(false));
        tasks.spawn(check::run(inbox, seen.clone(), store.session(), fenced.clone()));
        let (surveyed, surveys) = (SingleFlight::new(tasks), Surveys::default());
        Self { queue, seen, store: store.clone(), liveness, surveyed, surveys, fenced }
    }

    /// Whether the request must be checked before it goes to the committer.
    pub fn needs_check(&self, request: &PlacedRequest) -> bool {
        !self.seen.fits(request)
    }

    /// Whether no label set counts the labels of one of `caps`, by the last known limits.
    pub fn lacks_counters(&self, caps: &[Arc<Cap>]) -> bool {
        self.seen.lacks_counters(caps)
    }

    /// Returns the verdict on a queued request by the cached state; `None` if the state it needs is not cached.
    pub fn cached_verdict(&self, request: &PlacedRequest) -> Option<Verdict> {
        self.seen.verdict(request)
    }

    /// Checks a request on current data. A request whose request id has a live ticket fits: its reply repeats the grant.
    ///
    /// # Errors
    /// - The rejection that the ledger would return, and database errors.
    /// - [`Error::LockTimeout`] at `deadline` if a limit change is in progress.
    /// - [`Error::Unavailable`] at `deadline` if the database has not replied.
    pub fn check<'a>(
        &'a self,
        request: PlacedRequest,
        deadline: Instant,
    ) -> impl Future<Output = Result<Verdict, Error>> + Send + use<'a> {
        self.enqueue_check(request, None, deadline)
    }

    /// Checks a request as [`Admission::check`] does. Also returns the head-room on its EM, whether the request fits or not.
    ///
    /// # Errors
    /// As of [`Admission::check`].
    pub async fn check_with_headroom(
        &self,
        request: PlacedRequest,
        deadline: Instant,
    ) -> Result<(Verdict, DryRunResult), Error> {
        let (room, mut told) = oneshot::channel();
        let verdict = self.enqueue_check(request, Some(room), deadline).await?;
        Ok((verdict, told.try_recv().unwrap_or_default()))
    }

    /// Queues a check before it returns, so that the future, which exists once per active call, does not contain the request.
    fn enqueue_check<'a>(
        &'a self,
        request: PlacedRequest,
        room: Option<oneshot::Sender<DryRunResult>>,
        deadline: Instant,
    ) -> impl Future<Output = Result<Verdict, Error>> + Send + use<'a> {
        let traced = traces::step("look");
        let (reply, answer) = oneshot::channel();
        let queued = self.queue.try_send(CheckTask { request, room, reply }).map_err(Error::from);
        async move {
            let _traced = traced;
            queued?;
            let answer = async { answer.await.unwrap_or(Err(Error::ShuttingDown)) };
            match answered_within(deadline.saturating_duration_since(Instant::now()), answer).await {
                Err(Error::Unavailable(_)) if self.fenced.load(Ordering::Relaxed) => Err(Error::LockTimeout),
                answer => answer,
            }
        }
    }
}
