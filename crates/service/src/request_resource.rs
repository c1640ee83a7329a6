//! `RequestResource`: carries out the actions of a request, from its parsed form to its reply.
//!
//! `rm_engine::request` decides what a request does next. This module does it: surveys and checks (`admission`), attempts
//! (`committer`), and waits (`waiting`), each with its deadline.
//!
//! Never: grants or writes; the committer alone does. Decides about the next action.
//! Caller: the RPC service `rm_edge::resource_manager`.

use std::{collections::BTreeSet, pin::Pin, sync::Arc};

use async_recursion::async_recursion as boxed;
use tokio::time::Instant;

use crate::error::Error;
use rm_engine::{
    request::{Action, Event, Failure, InQueue, Patience, Request, RequestResult, SharedState, SurveyAge, WaitResult},
    wake_reason::WakeReason,
};
use rm_model::{
    assessment::{DryRunResult, Verdict},
    cap::Cap,
    em::EmInstance,
    operation::{Grant, Operation, Outcome, PlacedRequest, QueuedOutcome, Rejection, RequestSpec},
    placement::ClosedEm,
    principal::Actor,
    wait_queue::{WaitKey, WaitKeys},
};
use rm_telemetry::{
    metrics::{
        Metrics,
        requests::{RequestEnd, RequestTimer},
    },
    operation_log, traces,
};

use super::{
    admission::Admission,
    committer::{Committer, LockWait},
    idle_amounts::IdleAmounts,
    limits::LimitService,
    refusals::RefusalRecorder,
    waiting::{CallerConnection, LocalWaitQueue, WaitHandle},
};

/// Permit of a call that counts as active. It is released when the request enters the wait queue.
pub type ActivePermit = Option<Arc<dyn Send + Sync>>;

/// Decides requests: returns a grant, or a refusal with its reason.
#[derive(Clone, Debug)]
pub struct RequestResourceService {
    admission: Admission,
    committer: Committer,
    line: LocalWaitQueue,
    limits: LimitService,
    refusals: RefusalRecorder,
    idle_amounts: IdleAmounts,
    metrics: Metrics,
}

/// Deadlines of one request.
#[derive(Debug, Clone, Copy)]
pub struct RequestDeadlines {
    /// Deadline for resource locks.
    pub locks: Instant,
    /// Deadline in the wait queue; `None` to be refused immediately.
    pub line: Option<Instant>,
}

impl RequestResourceService {
    /// Creates the service from the admission, committer and wait queue of this instance. `refusals` records each refusal, and
    /// `idle_amounts` completes its reply.
    pub fn new(
        admission: Admission,
        committer: Committer,
        line: LocalWaitQueue,
        limits: LimitService,
        refusals: RefusalRecorder,
        idle_amounts: IdleAmounts,
        metrics: Metrics,
    ) -> Self {
        Self { admission, committer, line, limits, refusals, idle_amounts, metrics }
    }

    /// Creates the counters that the caps of a request need, if no label set counts their labels yet.
    ///
    /// # Errors
    /// As of [`LimitService::count_on_demand`].
    pub fn count_caps(
        &self,
        by: Actor,
        caps: Vec<Arc<Cap>>,
        deadline: Instant,
    ) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send + '_>> {
        match self.admission.lacks_counters(&caps) {
            true => Box::pin(self.limits.count_on_demand(by, caps, deadline)),
            false => Box::pin(std::future::ready(Ok(()))),
        }
    }

    /// Decides one request that may be granted as any of `asks`, which are specs of one ticket and differ only in their
    /// resource.
    ///
    /// Returns [`Outcome::Granted`] or [`Outcome::Refused`], with the index of the spec. If no spec fits now, the request waits
    /// for the first spec that can ever fit, and is granted as the spec that fits first. Placement selects an EM if `em` is
    /// `None`. The request releases `active` before it enters the wait queue. All specs count as one request in the metrics.
    ///
    /// # Errors
    /// [`Error::Rejected`] if no EM can be used, and the errors of [`Committer::submit`].
    #[boxed]
    pub async fn request_any(
        &self,
        em: Option<EmInstance>,
        asks: Vec<Arc<RequestSpec>>,
        deadlines: RequestDeadlines,
        (connection, active): (CallerConnection, ActivePermit),
    ) -> Result<(Outcome, usize), Error> {
        let asked = asks.first().cloned().ok_or_else(|| Error::defect("a request without a spec"))?;
        let (under_way, begun) = (RequestTimer::begin(&self.metrics.requests), Instant::now());
        let (any_em, may_wait) = (em.is_none(), asked.may_wait);
        let mut call = RequestCall { service: self, deadlines, connection, active, queued: None };
        let answered = call.run(em, asks).await;
        let (answer, number) = match answered {
            Ok((answer, number)) => (Ok(answer), number),
            Err(error) => (Err(error), 0),
        };
        operation_log::request(&asked, may_wait, &answer);
        under_way.end(match &answer {
            Ok(Outcome::Refused(refusal)) => {
                self.refusals.record(&asked.user, refusal, any_em);
                // A refusal of a request that waited and could fit later is a timeout.
                RequestEnd::Refused { refusal, timed_out: may_wait && !refusal.never_fits }
            }
            Ok(_) => RequestEnd::Granted,
            Err(_) => RequestEnd::Failed,
        });
        let mut outcome = answer?;
        if let Outcome::Refused(refusal) = &mut outcome {
            // The request leaves its queues before.
            call.queued = None;
            // A tenth of the caller's timeout, up to 500 ms, is left for the reply. The count takes at most half of it.
            let deadline = deadlines.locks.max(Instant::now() + begun.elapsed() / 20);
            self.idle_amounts.count(refusal, deadline).await;
        }
        Ok((outcome, number))
    }

    /// Decides the request without granting it. Returns the EM, the verdict, the head-room and the index of the spec.
    ///
    /// The spec is the first that fits, or the first of all.
    ///
    /// # Errors
    /// [`Error::Rejected`] if no EM can be used, and the errors of the check.
    #[boxed]
    pub async fn dry_run(
        &self,
        em: Option<EmInstance>,
        asks: Vec<Arc<RequestSpec>>,
        deadline: Instant,
    ) -> Result<(EmInstance, Verdict, DryRunResult, usize), Error> {
        let mut first: Option<(_, Verdict, _, _)> = None;
        for (number, ask) in asks.into_iter().enumerate() {
            let (em, verdict, room) = self.dry_run_of(em.clone(), ask, deadline).await?;
            if matches!(verdict, Verdict::Fits) {
                return Ok((em, verdict, room, number));
            }
            first.get_or_insert((em, verdict, room, number));
        }
        let mut first = first.ok_or_else(|| Error::defect("a request without a spec"))?;
        if let Verdict::Refused(blocked) | Verdict::Reranked(blocked) = &mut first.1 {
            self.idle_amounts.count(&mut blocked.refusal, deadline).await;
        }
        Ok(first)
    }

    async fn dry_run_of(
        &self,
        em: Option<EmInstance>,
        ask: Arc<RequestSpec>,
        deadline: Instant,
    ) -> Result<(EmInstance, Verdict, DryRunResult), Error> {
        let (any_em, mut is_em_unavailable) = (em.is_none(), false);
        let em = match em {
            Some(em) => em,
            None => {
                self.admission.survey(deadline).await?;
                let em = self
                    .admission
                    .best_candidate(&ask, &[])
                    .or_else(|| self.admission.best_contended(&ask, &[]))
                    .or_else(|| self.admission.nearest_fit(&ask))
                    .ok_or_else(|| self.admission.no_candidate_error(&ask))?;
                is_em_unavailable = self.admission.closed(&em) == Some(ClosedEm::Unavailable);
                em
            }
        };
        let placed = PlacedRequest { is_em_unavailable, ..PlacedRequest::new(em.clone(), &ask, any_em) };
        let (verdict, room) = self.admission.check_with_headroom(placed, deadline).await?;
        Ok((em, verdict, room))
    }

    /// Submits the request to the committer. A grant includes the counters if the request has requested them.
    async fn commit(&self, request: PlacedRequest, patience: LockWait) -> Result<Outcome, Error> {
        let by = request.ask.principal.clone();
        if !request.ask.return_counters {
            return self.committer.submit(by.into(), Operation::Request(request), patience).await;
        }
        match self.committer.submit_with_counters(by.into(), Operation::Request(request), patience, true).await? {
            (Outcome::Granted(grant), counters) => Ok(Outcome::Granted(Grant { counters, ..grant })),
            (outcome, _) => Ok(outcome),
        }
    }
}

/// One call: the deadlines and permits of a request, and its handle in the wait queue.
struct RequestCall<'a> {
    service: &'a RequestResourceService,
    deadlines: RequestDeadlines,
    connection: CallerConnection,
    active: ActivePermit,
    /// Handle in the wait queue, once the request has a permit to wait.
    queued: Option<WaitHandle>,
}

impl RequestCall<'_> {
    /// Carries out the actions of a request until its reply.
    async fn run(&mut self, em: Option<EmInstance>, asks: Vec<Arc<RequestSpec>>) -> Result<(Outcome, usize), Error> {
        let (mut request, mut action) = Request::start(em, asks, self);
        while self.queued.is_none() {
            match self.carry_out(action).await {
                Ok(event) => action = request.step(event, self),
                Err(result) => return self.end(result),
            }
        }
        // Boxed: most calls do not wait and need no space for this future.
        let answer = traces::within("line", Box::pin(self.run_in_queue(request, action))).await;
        if let Some(queued) = &mut self.queued {
            let (result, may_return) = match &answer {
                Ok((Outcome::Refused(_), _)) => ("timed_out", false),
                Ok(_) => ("granted", false),
                Err(Error::Rejected(rejection)) if rejection.is_end_of_waiting() => ("removed", false),
                Err(Error::Rejected(_)) => ("failed", false),
                // The caller repeats a call that failed, unless it is a defect.
                Err(error) => ("failed", !error.is_defect()),
            };
            queued.record_result(result, may_return);
        }
        answer
    }

    async fn run_in_queue(
        &mut self,
        mut request: Request<Error>,
        mut action: Action<Error>,
    ) -> Result<(Outcome, usize), Error> {
        loop {
            match self.carry_out(action).await {
                Ok(event) => action = request.step(event, self),
                Err(result) => return self.end(result),
            }
        }
    }

    /// Carries out an action and returns its result; the result of the request if the action is the reply.
    async fn carry_out(&mut self, action: Action<Error>) -> Result<Event<Error>, RequestResult<Error>> {
        Ok(match action {
            Action::Survey(age) => Event::Surveyed(self.survey(age).await.map_err(failure)),
            Action::Check(request, in_queue) => Event::Checked(self.check(request, in_queue).await.map_err(failure)),
            Action::Commit(request, patience, in_queue) => {
                Event::Committed(self.commit(request, patience, in_queue).await.map_err(failure))
            }
            Action::Wait => Event::Woken(match &self.queued {
                Some(queued) => queued.wait_for_wake().await,
                None => WaitResult::DeadlinePassed,
            }),
            Action::Pause => Event::Woken(match &self.queued {
                Some(queued) => queued.back_off().await,
                None => WaitResult::DeadlinePassed,
            }),
            Action::Reply(result) => return Err(result),
        })
    }

    async fn survey(&self, age: SurveyAge) -> Result<(), Error> {
        match age {
            SurveyAge::Fresh => self.service.admission.survey(self.until()).await,
            SurveyAge::Recent => self.service.admission.survey_in_background(self.until()).await,
        }
    }

    async fn check(&mut self, mut request: PlacedRequest, in_queue: Option<InQueue>) -> Result<Verdict, Error> {
        self.renew(&mut request, in_queue).await?;
        self.service.admission.check(request, self.until()).await
    }

    async fn commit(
        &mut self,
        mut request: PlacedRequest,
        patience: Patience,
        in_queue: Option<InQueue>,
    ) -> Result<Outcome, Error> {
        self.renew(&mut request, in_queue).await?;
        if let Some(queued) = &self.queued {
            queued.mark_submitted();
        }
        let until = self.until();
        let lock_wait = match patience {
            Patience::Deadline => until.into(),
            Patience::OtherEms => LockWait::try_other_ems(until),
            Patience::OtherEmsAfterPause => LockWait::try_other_ems_after_pause(until),
        };
        let Some(queued) = &self.queued else { return self.service.commit(request, lock_wait).await };
        tokio::select! {
            biased;
            outcome = self.service.commit(request.clone(), lock_wait) => outcome,
            // The operation may wait for a contended EM. A check needs no lock, and fails unless the later call was granted.
            () = queued.ended() => {
                self.service.admission.check(request.clone(), until).await?;
                self.service.commit(request, until.into()).await
            }
        }
    }

    /// Renews the instance and adds the wait parameters to a request in the queue.
    async fn renew(&mut self, request: &mut PlacedRequest, in_queue: Option<InQueue>) -> Result<(), Error> {
        if let (Some(queued), Some(InQueue { is_elsewhere })) = (&mut self.queued, in_queue) {
            request.wait = Some(queued.wait(is_elsewhere).await?);
        }
        Ok(())
    }

    /// Returns the deadline of the next action.
    fn until(&self) -> Instant {
        self.queued.as_ref().map_or(self.deadlines.locks, WaitHandle::until)
    }

    fn end(&self, result: RequestResult<Error>) -> Result<(Outcome, usize), Error> {
        match result {
            RequestResult::Decided { outcome, spec } => Ok((outcome, spec)),
            RequestResult::Rejected(rejection) => {
                if matches!(*rejection, Rejection::TooManyWaiting { .. }) {
                    self.service.metrics.line.rejected.inc();
                }
                Err(Error::Rejected(rejection))
            }
            RequestResult::QueueFull => {
                self.service.metrics.line.rejected.inc();
                Err(Error::Overloaded)
            }
            RequestResult::DeadlinePassed => Err(Error::LockTimeout),
            RequestResult::Stopping => Err(Error::ShuttingDown),
            RequestResult::Failed(error) => Err(error),
            RequestResult::Broken { stage, event } => Err(Error::defect(format!(
                "a request in stage {stage} received \"{event}\", which belongs to no action"
            ))),
        }
    }
}

fn failure(error: Error) -> Failure<Error> {
    match error {
        Error::Rejected(rejection) => Failure::Rejected(rejection),
        error if error.is_transient() => Failure::Transient(error),
        error => Failure::Final(error),
    }
}

impl SharedState for RequestCall<'_> {
    fn needs_check(&self, request: &PlacedRequest) -> bool {
        self.service.admission.needs_check(request)
    }

    fn observed_verdict(&self, request: &PlacedRequest) -> Option<Verdict> {
        let wait = self.queued.as_ref()?.parameters(false);
        self.service.admission.cached_verdict(&PlacedRequest { wait: Some(wait), ..request.clone() })
    }

    fn choose(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.service.admission.choose(ask, except)
    }

    fn release_assumption(&self, em: &EmInstance) {
        self.service.admission.release_assumption(em);
    }

    fn best_candidate(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.service.admission.best_candidate(ask, except)
    }

    fn best_contended(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.service.admission.best_contended(ask, except)
    }

    fn is_contended(&self, em: &EmInstance) -> bool {
        self.service.admission.is_contended(em)
    }

    fn nearest_fit(&self, ask: &RequestSpec) -> Option<EmInstance> {
        self.service.admission.nearest_fit(ask)
    }

    fn closed(&self, em: &EmInstance) -> Option<ClosedEm> {
        self.service.admission.closed(em)
    }

    fn no_candidate(&self, ask: &RequestSpec) -> Rejection {
        self.service.admission.no_candidate_error(ask)
    }

    fn enter_queue(&mut self, any_em: bool, ask: &RequestSpec) -> bool {
        let Some(until) = self.deadlines.line else { return false };
        self.queued = self.service.line.enter_if_room(any_em, ask, until, self.connection.clone());
        if self.queued.is_some() {
            self.active = None;
        }
        self.queued.is_some()
    }

    fn has_entry(&self) -> bool {
        self.queued.as_ref().is_some_and(|queued| queued.wait_keys().is_some())
    }

    fn has_entry_at(&self, wait_keys: &WaitKeys) -> bool {
        self.queued.as_ref().is_some_and(|queued| queued.wait_keys() == Some(wait_keys))
    }

    fn update_entry(&mut self, entry: &QueuedOutcome, any_em: bool) {
        if let Some(queued) = &mut self.queued {
            queued.update_entry(entry, any_em);
        }
    }

    fn has_ended(&self) -> bool {
        self.queued.as_ref().is_some_and(WaitHandle::has_ended)
    }

    fn mark_removed(&mut self) {
        if let Some(queued) = &mut self.queued {
            queued.mark_removed();
        }
    }

    fn granted(&mut self) {
        if let Some(queued) = &mut self.queued {
            queued.granted();
        }
    }

    fn freed_count(&self) -> u64 {
        self.service.line.freed_count()
    }

    fn subscribe(&mut self, wait_keys: BTreeSet<WaitKey>, since: u64) {
        if let Some(queued) = &mut self.queued {
            queued.subscribe(wait_keys, since);
        }
    }

    fn forward_wake(&self, wake: WakeReason) {
        if let Some(queued) = &self.queued {
            queued.forward_wake(wake);
        }
    }

    fn count_check(&self, wake: WakeReason) {
        if let Some(queued) = &self.queued {
            queued.count_check(wake);
        }
    }
}
