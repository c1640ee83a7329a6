//! `RequestResource`: from a parsed request to its reply.
//!
//! 1. Placement selects an EM, unless the request names one (`admission`).
//! 2. A check without locks refuses requests that cannot fit (`admission`).
//! 3. The committer decides under the locks and grants or refuses.
//! 4. A refused request with a wait deadline enters the wait queue (`waiting`). Each wake-up repeats steps 2 and 3.
//!
//! Never: grants or writes; the committer alone does.
//! Caller: the RPC service `rm_edge::resource_manager`.

use std::{collections::BTreeSet, pin::Pin, sync::Arc};

use async_recursion::async_recursion as boxed;
use tokio::time::Instant;

use crate::error::Error;
use rm_engine::wake_reason::WakeReason;
use rm_model::{
    assessment::{BlockedRequest, DryRunResult},
    cap::Cap,
    em::EmInstance,
    operation::{Grant, Operation, Outcome, PlacedRequest, Rejection, RequestScopes, RequestSpec},
    principal::Actor,
};
use rm_telemetry::{
    metrics::{
        Metrics,
        requests::{RequestEnd, RequestTimer},
    },
    operation_log, traces,
};

use super::{
    admission::{Admission, Verdict},
    committer::{Committer, LockWait},
    limits::LimitService,
    refusals::RefusalRecorder,
    waiting::{LocalWaitQueue, WaitHandle, WaitResult},
};

/// Permit of a call that counts as active. It is released when the request enters the wait queue.
pub type ActivePermit = Option<Arc<dyn Send + Sync>>;

/// Maximum number of EMs to try before a new survey: so many full EMs show that the cluster view is stale.
const CANDIDATES_MAX: usize = 4;

/// Decides requests: returns a grant, or a refusal with its reason.
#[derive(Clone, Debug)]
pub struct RequestResourceService {
    admission: Admission,
    committer: Committer,
    line: LocalWaitQueue,
    limits: LimitService,
    refusals: RefusalRecorder,
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

impl RequestDeadlines {
    /// Whether a request with this result may enter the wait queue: it can fit later, or only contended EMs have capacity for
    /// it.
    fn leave_hope(self, any_em: bool, answer: &Result<Outcome, Error>) -> bool {
        match answer {
            Ok(Outcome::Refused(refusal)) => !refusal.never_fits,
            Ok(Outcome::Contended) => any_em && self.line.is_some(),
            _ => false,
        }
    }
}

impl RequestResourceService {
    /// Creates the service from the admission, committer and wait queue of this instance. `refusals` records each refusal.
    pub fn new(
        admission: Admission,
        committer: Committer,
        line: LocalWaitQueue,
        limits: LimitService,
        refusals: RefusalRecorder,
        metrics: Metrics,
    ) -> Self {
        Self { admission, committer, line, limits, refusals, metrics }
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
    /// Tries the specs in order and returns the first [`Outcome::Granted`], or the first [`Outcome::Refused`], with the index
    /// of the spec. If no spec fits now, the request waits for the first spec that can ever fit, and is granted as the spec
    /// that fits first. Placement selects an EM if `em` is `None`. The request releases `active` before it enters the wait queue.
    /// All specs count as one request in the metrics.
    ///
    /// # Errors
    /// [`Error::Rejected`] if no EM can be used, and the errors of [`Committer::submit`].
    #[boxed]
    pub async fn request_any(
        &self,
        em: Option<EmInstance>,
        asks: Vec<Arc<RequestSpec>>,
        deadlines: RequestDeadlines,
        active: ActivePermit,
    ) -> Result<(Outcome, usize), Error> {
        let asked = asks.first().cloned().ok_or_else(|| Error::defect("a request without a spec"))?;
        let under_way = RequestTimer::begin(&self.metrics.requests);
        let (any_em, may_wait) = (em.is_none(), deadlines.line.is_some());
        let answered = match asks.len() {
            1 => self.judge(em, asked.clone(), (&[], &mut None), deadlines, active).await.map(|answer| (answer, 0)),
            // Boxed: most requests have one spec and need no space for this future.
            _ => Box::pin(self.judge_in_turn(em, asks, deadlines, active)).await,
        };
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
        Ok((answer?, number))
    }

    /// Tries the specs one after another without waiting. If none is granted, waits for the first spec that can fit later; the
    /// others stay alternatives.
    async fn judge_in_turn(
        &self,
        em: Option<EmInstance>,
        asks: Vec<Arc<RequestSpec>>,
        deadlines: RequestDeadlines,
        active: ActivePermit,
    ) -> Result<(Outcome, usize), Error> {
        let (mut may_fit, mut first) = (Vec::new(), None);
        for (number, ask) in asks.into_iter().enumerate() {
            let answer = self.judge_at_once(em.as_ref(), &ask, deadlines).await;
            let fits_some_day = deadlines.leave_hope(em.is_none(), &answer);
            if fits_some_day {
                may_fit.push((number, ask));
            }
            match answer {
                Ok(refused @ Outcome::Refused(_)) => {
                    first.get_or_insert((refused, number));
                }
                // All EMs with capacity for the spec are contended.
                Ok(Outcome::Contended) if fits_some_day => {}
                answer => return Ok((answer?, number)),
            }
        }
        let mut may_fit = may_fit.into_iter();
        match (may_fit.next().filter(|_| deadlines.line.is_some()), first) {
            (Some((number, ask)), _) => {
                let (numbers, others): (Vec<usize>, Vec<Arc<RequestSpec>>) = may_fit.unzip();
                let mut other = None;
                let answer = self.judge(em, ask, (&others, &mut other), deadlines, active).await?;
                Ok((answer, other.and_then(|other| numbers.get(other).copied()).unwrap_or(number)))
            }
            (None, Some(refused)) => Ok(refused),
            (None, None) => Err(Error::defect("a request without a spec")),
        }
    }

    /// Decides one spec, with waiting. A waiting request may also be granted as one of `others`; the output parameter returns
    /// its index.
    async fn judge(
        &self,
        em: Option<EmInstance>,
        ask: Arc<RequestSpec>,
        others: (AlternativeSpecs<'_>, &mut Option<usize>),
        deadlines: RequestDeadlines,
        active: ActivePermit,
    ) -> Result<Outcome, Error> {
        let any_em = em.is_none();
        if let (Some(em), Some(until)) = (&em, deadlines.line) {
            let request = request(em.clone(), &ask);
            // The request is ready to wait, so the check is skipped: the ledger would find the same result. A full wait queue
            // is no reason for a refusal: the request may fit.
            if self.admission.needs_check(&request)
                && let Some(caller) = self.line.enter_if_room(any_em, &ask, until)
            {
                drop(active);
                // Boxed: most calls do not wait and need no space for this future.
                return traces::within("line", Box::pin(self.wait(request, others, caller))).await;
            }
        }
        let answer = self.judge_at_once(em.as_ref(), &ask, deadlines).await;
        let Some(until) = deadlines.line.filter(|_| deadlines.leave_hope(any_em, &answer)) else { return answer };
        let em =
            em.or_else(|| self.admission.nearest_fit(&ask)).ok_or_else(|| self.admission.no_candidate_error(&ask))?;
        let caller = self.line.enqueue(any_em, &ask, until)?;
        drop(active);
        traces::within("line", Box::pin(self.wait(request(em, &ask), others, caller))).await
    }

    /// Decides one spec without waiting.
    async fn judge_at_once(
        &self,
        em: Option<&EmInstance>,
        ask: &Arc<RequestSpec>,
        deadlines: RequestDeadlines,
    ) -> Result<Outcome, Error> {
        match em {
            Some(em) => self.request_on(request(em.clone(), ask), deadlines.locks.into()).await,
            None => self.choose(ask, deadlines).await,
        }
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
        let mut first = None;
        for (number, ask) in asks.into_iter().enumerate() {
            let (em, verdict, room) = self.dry_run_of(em.clone(), ask, deadline).await?;
            if matches!(verdict, Verdict::Fits) {
                return Ok((em, verdict, room, number));
            }
            first.get_or_insert((em, verdict, room, number));
        }
        first.ok_or_else(|| Error::defect("a request without a spec"))
    }

    async fn dry_run_of(
        &self,
        em: Option<EmInstance>,
        ask: Arc<RequestSpec>,
        deadline: Instant,
    ) -> Result<(EmInstance, Verdict, DryRunResult), Error> {
        let em = match em {
            Some(em) => em,
            None => {
                self.admission.survey(deadline).await?;
                self.admission
                    .best_candidate(&ask, &[])
                    .or_else(|| self.admission.best_contended(&ask, &[]))
                    .or_else(|| self.admission.nearest_fit(&ask))
                    .ok_or_else(|| self.admission.no_candidate_error(&ask))?
            }
        };
        let (verdict, room) = self.admission.check_with_headroom(request(em.clone(), &ask), deadline).await?;
        Ok((em, verdict, room))
    }

    async fn request_on(&self, request: PlacedRequest, patience: LockWait) -> Result<Outcome, Error> {
        if self.admission.needs_check(&request)
            && let Verdict::Refused(short) = self.admission.check(request.clone(), patience.until).await?
        {
            return Ok(Outcome::Refused(Box::new(short.refusal)));
        }
        self.commit(request, patience).await
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

    /// Tries the EMs that placement selects: first by the cluster view, then after a new survey.
    ///
    /// If only contended EMs have capacity, a request that may not wait in the queue retries until its deadline. If no EM has
    /// capacity, the closest EM gives the reason of the refusal.
    async fn choose(&self, ask: &Arc<RequestSpec>, deadlines: RequestDeadlines) -> Result<Outcome, Error> {
        let RequestDeadlines { locks: deadline, line } = deadlines;
        self.admission.survey_in_background(deadline).await?;
        if let Some(answer) = self.try_some(ask, deadline).await {
            return answer;
        }
        let (mut drained, mut in_vain) = (0, Vec::new());
        loop {
            self.admission.survey(deadline).await?;
            if let Some(answer) = self.try_some(ask, deadline).await {
                return answer;
            }
            let may_wait_for_holder = line.is_none() && in_vain.len() < CANDIDATES_MAX;
            let held = if may_wait_for_holder { self.admission.best_contended(ask, &in_vain) } else { None };
            let em = held.clone().or_else(|| self.admission.nearest_fit(ask));
            let em = em.ok_or_else(|| self.admission.no_candidate_error(ask))?;
            let patience = match line {
                None => LockWait::try_other_ems_after_pause(deadline),
                Some(_) => LockWait::try_other_ems(deadline),
            };
            match (self.request_on(request(em, ask), patience).await, held) {
                // The EM was drained after the cluster view was read; placement no longer selects it as the closest.
                (Err(Error::Rejected(rejection)), None) if rejection.is_draining() => {
                    drained += 1;
                    if drained == CANDIDATES_MAX {
                        return Err(self.admission.no_candidate_error(ask).into());
                    }
                }
                // Another EM may have capacity now.
                (Ok(Outcome::Contended), _) if line.is_none() => {}
                (answer, Some(held)) if may_do_elsewhere(&answer) => in_vain.push(held),
                (answer, _) => return answer,
            }
        }
    }

    /// Returns the first result that is not about one EM alone; `None` if no EM is left or [`CANDIDATES_MAX`] EMs are full.
    ///
    /// Contended EMs do not count, because there may be many, and placement avoids them from now on.
    async fn try_some(&self, ask: &Arc<RequestSpec>, deadline: Instant) -> Option<Result<Outcome, Error>> {
        let (mut tried, mut full) = (Vec::new(), 0);
        while full < CANDIDATES_MAX {
            let (em, patience) = (self.admission.choose(ask, &tried)?, LockWait::try_other_ems(deadline));
            let answer = self.request_on(request(em.clone(), ask), patience).await;
            if !matches!(answer, Ok(Outcome::Granted(_))) {
                self.admission.release_assumption(&em);
            }
            if !may_do_elsewhere(&answer) {
                return Some(answer);
            }
            full += usize::from(!matches!(answer, Ok(Outcome::Contended)));
            tried.push(em);
        }
        None
    }

    /// Waits in the queue until the request has a result. Records the result in the metrics.
    async fn wait(
        &self,
        request: PlacedRequest,
        (others, other): (AlternativeSpecs<'_>, &mut Option<usize>),
        mut caller: WaitHandle,
    ) -> Result<Outcome, Error> {
        let answer = self.stand_in_line(request, others, &mut caller).await.map(|(answer, granted)| {
            *other = granted;
            answer
        });
        caller.record_result(match &answer {
            Ok(Outcome::Refused(_)) => "timed_out",
            Ok(_) => "granted",
            Err(_) => "failed",
        });
        answer
    }

    /// Retries after each wake-up until the wait deadline.
    async fn stand_in_line(
        &self,
        mut request: PlacedRequest,
        others: AlternativeSpecs<'_>,
        caller: &mut WaitHandle,
    ) -> Result<(Outcome, Option<usize>), Error> {
        let (mut next, mut refusal, mut turned_away) = (QueuedAttempt::default(), None, 0);
        loop {
            let (other, mut again) = (next.other.take(), None);
            let ask = other.and_then(|other| others.get(other)).unwrap_or(&request.ask).clone();
            let (until, stands) = (caller.until(), !caller.wait_keys().is_empty());
            let patience = match caller.any_em() {
                false => until.into(),
                // A request without a named EM does not wait for contended EMs, unless it has no queue entry and all its EMs
                // are contended.
                true if !stands && turned_away > 0 && self.admission.is_contended(&request.em) => {
                    LockWait::try_other_ems_after_pause(until)
                }
                true => LockWait::try_other_ems(until),
            };
            match self.try_in_line(&request, ask, next.elsewhere.take(), (&mut *caller, patience)).await {
                Ok(Outcome::Waiting(waiting)) => {
                    if let Some(wake) = next.woken_by.take() {
                        caller.count_check(wake);
                        caller.forward_wake(wake);
                    }
                    caller.update_entry(&waiting);
                    refusal = Some(Box::new(waiting.refusal));
                }
                Ok(granted @ Outcome::Granted(_)) => {
                    caller.granted();
                    return Ok((granted, other));
                }
                Ok(Outcome::Contended) if stands => {
                    turned_away += 1;
                    again = looks_again(next.woken_by.take(), turned_away, caller);
                }
                Ok(Outcome::Contended) => {
                    turned_away += 1;
                    let other = self.other_home(&request, caller).await?;
                    if let Some(em) = self.admission.best_candidate(&request.ask, &[]).or(other) {
                        request.em = em;
                    }
                    continue;
                }
                Ok(answer) => {
                    caller.mark_removed();
                    match self.other_home(&request, caller).await? {
                        Some(em) => request.em = em,
                        None => return Ok((answer, None)),
                    }
                    continue;
                }
                Err(Error::Rejected(rejection)) if *rejection == Rejection::PlaceLost => {
                    // The instance missed its renewals and lost its queue entries. The request enters at the end of the queue.
                    caller.mark_removed();
                    continue;
                }
                Err(Error::Rejected(rejection)) if rejection.is_of_em() => {
                    match self.other_home(&request, caller).await? {
                        Some(em) => request.em = em,
                        // No other EM is available to a request that names none.
                        None if rejection.is_draining() && caller.any_em() => {
                            return Err(self.admission.no_candidate_error(&request.ask).into());
                        }
                        None => return Err(Error::Rejected(rejection)),
                    }
                    continue;
                }
                // A queued request survives a short outage.
                Err(error) if error.is_transient() && !caller.wait_keys().is_empty() => match caller.back_off().await {
                    WaitResult::Look(_) => continue,
                    WaitResult::TimeIsUp => {
                        return refusal.map_or(Err(error), |refusal| Ok((Outcome::Refused(refusal), None)));
                    }
                    WaitResult::Stopping => return Err(Error::ShuttingDown),
                },
                Err(error) => return Err(error),
            }
            if again.is_none() {
                turned_away = 0;
            }
            // An alternative that just failed is not checked again before the next wake-up.
            let others = (others, other.is_none());
            match (self.until_worth_trying(&mut request, others, (&mut *caller, again)).await?, refusal.take()) {
                (Some(worth_trying), still) => (next, refusal) = (worth_trying, still),
                (None, Some(refusal)) => return Ok((Outcome::Refused(refusal), None)),
                (None, None) => return Err(Error::LockTimeout),
            }
        }
    }

    /// Submits the request, on another EM or as another spec if given. The queue entry stays unchanged if the attempt fails.
    async fn try_in_line(
        &self,
        request: &PlacedRequest,
        ask: Arc<RequestSpec>,
        elsewhere: Option<EmInstance>,
        (caller, patience): (&mut WaitHandle, LockWait),
    ) -> Result<Outcome, Error> {
        let is_other = !Arc::ptr_eq(&ask, &request.ask);
        let wait = caller.wait(request.ask.ticket_id, is_other || elsewhere.is_some()).await?;
        let em = elsewhere.unwrap_or_else(|| request.em.clone());
        let scopes = if is_other { RequestScopes::default() } else { request.scopes.clone() };
        let tried = PlacedRequest { em, ask, wait: Some(wait), scopes };
        caller.mark_submitted();
        self.commit(tried, patience).await
    }

    /// Returns another EM at which a request without a named EM can wait; `None` if there is none.
    async fn other_home(&self, request: &PlacedRequest, caller: &WaitHandle) -> Result<Option<EmInstance>, Error> {
        if !caller.any_em() {
            return Ok(None);
        }
        self.admission.survey(caller.until()).await?;
        Ok(self.admission.nearest_fit(&request.ask).filter(|em| *em != request.em))
    }

    /// Parks until an attempt is worthwhile or the queue entry must move; `None` at the wait deadline.
    ///
    /// `again` is the wake reason of a request that must check immediately, without parking.
    async fn until_worth_trying(
        &self,
        request: &mut PlacedRequest,
        (others, at_once): (AlternativeSpecs<'_>, bool),
        (caller, again): (&mut WaitHandle, Option<WakeReason>),
    ) -> Result<Option<QueuedAttempt>, Error> {
        if at_once && let Some(fits) = self.fits_as_other(request, others, caller).await {
            return Ok(Some(fits));
        }
        let mut woken = match again {
            Some(wake) => WaitResult::Look(wake),
            None => caller.wait_for_wake().await,
        };
        loop {
            let wake = match woken {
                WaitResult::TimeIsUp => return Ok(None),
                WaitResult::Stopping => return Err(Error::ShuttingDown),
                WaitResult::Look(wake) => wake,
            };
            woken = match self.is_worth_trying(request, caller, wake).await {
                Ok(Some(elsewhere)) => return Ok(Some(QueuedAttempt { elsewhere, woken_by: Some(wake), other: None })),
                Ok(None) => {
                    if let Some(fits) = self.fits_as_other(request, others, caller).await {
                        return Ok(Some(QueuedAttempt { woken_by: Some(wake), ..fits }));
                    }
                    caller.forward_wake(wake);
                    caller.wait_for_wake().await
                }
                Err(error) if error.is_transient() => caller.back_off().await,
                Err(error) => return Err(error),
            };
        }
    }

    /// Checks whether to submit the request again. The inner value is the EM if it differs from the EM of the queue entry.
    async fn is_worth_trying(
        &self,
        request: &mut PlacedRequest,
        caller: &mut WaitHandle,
        wake: WakeReason,
    ) -> Result<Option<Option<EmInstance>>, Error> {
        if wake.is_coming {
            return Ok(Some(None));
        }
        request.wait = Some(caller.wait(request.ask.ticket_id, false).await?);
        if !caller.any_em() {
            match self.admission.cached_verdict(request) {
                // The ledger would find the same result as a check.
                Some(Verdict::Fits) => return Ok(Some(None)),
                // The cache is as new as the wake reason.
                Some(Verdict::Refused(short)) if !wake.is_news && stands_well(caller, &short) => return Ok(None),
                _ => {}
            }
        }
        caller.count_check(wake);
        self.look_again(request, caller).await
    }

    /// Returns the next attempt as one of `others` if one fits. If none fits, subscribes to the wait keys where they are short.
    async fn fits_as_other(
        &self,
        request: &PlacedRequest,
        others: AlternativeSpecs<'_>,
        caller: &mut WaitHandle,
    ) -> Option<QueuedAttempt> {
        if others.is_empty() {
            return None;
        }
        let since = caller.freed_count();
        // An error is ignored: the next freed event or poll repeats the check.
        let wait = caller.wait(request.ask.ticket_id, true).await.ok()?;
        let mut wait_keys = BTreeSet::new();
        for (number, ask) in others.iter().enumerate() {
            let mut tried = Vec::new();
            let mut em = match caller.any_em() {
                true => self.admission.best_candidate(ask, &tried).or_else(|| Some(request.em.clone())),
                false => Some(request.em.clone()),
            };
            while let Some(there) = em.take() {
                let (ask, wait, scopes) = (ask.clone(), Some(wait.clone()), RequestScopes::default());
                let look = PlacedRequest { em: there.clone(), ask: ask.clone(), wait, scopes };
                match self.admission.check(look, caller.until()).await {
                    Ok(Verdict::Fits) => {
                        let elsewhere = Some(there).filter(|em| *em != request.em);
                        return Some(QueuedAttempt { elsewhere, woken_by: None, other: Some(number) });
                    }
                    Ok(Verdict::Refused(short)) => {
                        let short = short.wait_keys.into_iter().filter(|(_, is_short)| *is_short);
                        wait_keys.extend(short.map(|(wait_key, _)| wait_key));
                    }
                    Err(_) => {}
                }
                tried.push(there);
                if caller.any_em() && tried.len() < CANDIDATES_MAX {
                    em = self.admission.best_candidate(&ask, &tried);
                }
            }
        }
        caller.subscribe(wait_keys, since);
        None
    }

    async fn look_again(
        &self,
        request: &PlacedRequest,
        caller: &WaitHandle,
    ) -> Result<Option<Option<EmInstance>>, Error> {
        if caller.any_em() {
            self.admission.survey_in_background(caller.until()).await?;
            let mut tried = Vec::new();
            // Placement counts the EM's capacity as used, so that concurrent waiters select different EMs.
            while tried.len() < CANDIDATES_MAX
                && let Some(em) = self.admission.choose(&request.ask, &tried)
            {
                let there = PlacedRequest { em: em.clone(), ..request.clone() };
                if matches!(self.admission.check(there, caller.until()).await, Ok(Verdict::Fits)) {
                    return Ok(Some(Some(em).filter(|em| *em != request.em)));
                }
                self.admission.release_assumption(&em);
                tried.push(em);
            }
            if self.admission.is_contended(&request.em) {
                return Ok(None);
            }
        }
        match self.admission.check(request.clone(), caller.until()).await {
            Ok(Verdict::Refused(short)) if stands_well(caller, &short) => Ok(None),
            // The ledger decides, and reports an EM that was unregistered.
            Ok(_) | Err(Error::Rejected(_)) => Ok(Some(None)),
            Err(error) => Err(error),
        }
    }
}

/// Whether a result concerns one EM alone, so that another EM may still fit: it is full, contended or unregistered.
fn may_do_elsewhere(answer: &Result<Outcome, Error>) -> bool {
    match answer {
        Ok(Outcome::Refused(refusal)) => refusal.is_of_em_alone(),
        Ok(Outcome::Contended) => true,
        Err(Error::Rejected(rejection)) => rejection.is_of_em(),
        _ => false,
    }
}

/// Returns the reason for an immediate check after a contended EM: another EM may have capacity. `None` after
/// [`CANDIDATES_MAX`] contended EMs in a row; the wake-up is then forwarded.
fn looks_again(woken_by: Option<WakeReason>, turned_away: usize, caller: &WaitHandle) -> Option<WakeReason> {
    let mut wake = woken_by.unwrap_or(WakeReason::NEWS);
    if turned_away >= CANDIDATES_MAX {
        caller.forward_wake(wake);
        return None;
    }
    wake.is_coming = false;
    Some(wake)
}

/// Whether the queue entry is unchanged by this refusal, so that the request can stay parked.
fn stands_well(caller: &WaitHandle, short: &BlockedRequest) -> bool {
    !short.refusal.never_fits && short.wait_keys == caller.wait_keys()
}

/// Next attempt of a waiting request.
#[derive(Debug, Default)]
struct QueuedAttempt {
    /// EM of the attempt, if it differs from the EM of the queue entry.
    elsewhere: Option<EmInstance>,
    /// Wake reason of the attempt.
    woken_by: Option<WakeReason>,
    /// Index of the alternative spec of the attempt; `None` for the spec of the queue entry.
    other: Option<usize>,
}

/// Specs that may be granted instead of the spec of the queue entry.
type AlternativeSpecs<'a> = &'a [Arc<RequestSpec>];

fn request(em: EmInstance, ask: &Arc<RequestSpec>) -> PlacedRequest {
    PlacedRequest { em, ask: ask.clone(), wait: None, scopes: RequestScopes::default() }
}
