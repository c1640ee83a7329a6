//! A request in the wait queue: its entry, and its attempts after each wake-up.
//!
//! A request that names no EM looks for one at each wake-up; its entry stays where it is, unless its EM goes or is refused for
//! good. An entry at a closed EM (drained, unhealthy or silent) moves to an open EM, if the request can fit there later.
//! A request with several specs waits with one and may be granted as another (`OtherSpecs`).
//! Caller: `request`.

use std::{collections::BTreeSet, mem, sync::Arc};

use rm_model::{
    assessment::{BlockedRequest, Verdict},
    em::EmInstance,
    operation::{Outcome, PlacedRequest, QueuedOutcome, Rejection},
    refusal::Refusal,
    wait_queue::{WaitKey, is_short_at_every_em},
};
use uuid::Uuid;

use super::{
    Action, CANDIDATES_MAX, Event, Failure, InQueue, NumberedSpec, Patience, QueueStart, RequestResult, SharedState,
    SurveyAge, WaitResult, fail,
};
use crate::wake_reason::WakeReason;

/// Maximum number of EMs that the polls of a request skip, before they begin anew.
const SKIPPED_MAX: usize = 64;

/// The action under way, and what follows from its result.
#[derive(Debug)]
enum QueueStage<E> {
    /// The request is done.
    Done,
    /// The committer has the request.
    Committing(QueueAttempt),
    /// Sleeps.
    Waiting,
    /// Surveys after a wake-up, to look for an EM.
    SurveyingToLook(WakeReason),
    /// Checks after a wake-up whether an EM has capacity. So many others were checked before.
    CheckingCandidate { wake: WakeReason, em: EmInstance, checked: usize },
    /// Checks after a wake-up whether the EM of the entry has capacity now.
    CheckingHome(WakeReason),
    /// Checks whether the request can be granted as another spec at an EM.
    CheckingOther { em: EmInstance, search: OtherSpecs },
    /// Surveys, to move the entry to another EM.
    SurveyingToMove(LeaveReason),
    /// Pauses after a failure, then looks for capacity again.
    Pausing,
    /// Pauses after a failure, then is submitted again. At the deadline, the reply is the last refusal, or else the error.
    PausingToCommit(E),
}

/// An attempt in the queue, with the wake-up that caused it.
#[derive(Debug)]
enum QueueAttempt {
    /// At the EM of the entry, before others are checked: to enter the queue, to move, or because capacity is about to be freed
    /// there.
    Unchecked(Option<WakeReason>),
    /// At the EM of the entry, after other EMs were checked.
    Home(WakeReason),
    /// At an EM of the cluster view. So many others were checked before.
    Candidate { wake: WakeReason, em: EmInstance, checked: usize },
    /// As another spec.
    Other { em: EmInstance, search: OtherSpecs },
}

impl QueueAttempt {
    fn wake(&self) -> Option<WakeReason> {
        match self {
            Self::Unchecked(wake) => *wake,
            Self::Home(wake) | Self::Candidate { wake, .. } => Some(*wake),
            Self::Other { search, .. } => match search.then {
                AfterOthers::Wait(again) => again,
                AfterOthers::Forward(wake) => Some(wake),
            },
        }
    }
}

/// Why an entry leaves its EM.
#[derive(Debug)]
enum LeaveReason {
    /// The ledger has decided, and no entry is left.
    Decided(Outcome),
    /// The EM cannot be used. The attempt had this wake-up.
    Rejected(Box<Rejection>, Option<WakeReason>),
    /// The EM is contended, and the request has no entry yet.
    Contended,
}

/// The specs other than that of the entry, which are checked one after another.
#[derive(Debug)]
struct OtherSpecs {
    then: AfterOthers,
    /// Last event that freed capacity before the first check.
    since: u64,
    /// Number of the spec that is checked, among the others.
    number: usize,
    /// EMs at which the spec was checked.
    checked: Vec<EmInstance>,
    /// The EM where the spec fit by its check, and was not granted. It is checked once more, for the keys at which it is short.
    refused_at: Option<EmInstance>,
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

/// A request in the wait queue.
#[derive(Debug)]
pub(super) struct QueuedRequest<E> {
    stage: QueueStage<E>,
    /// Whether the caller has named the EM.
    is_named: bool,
    /// The request at the EM of its entry.
    home: PlacedRequest,
    /// Number of the spec of the entry.
    spec: usize,
    /// The specs that may be granted instead.
    others: Vec<NumberedSpec>,
    /// The last refusal.
    refusal: Option<Box<Refusal>>,
    /// Number of attempts in a row that met a contended EM.
    contended: usize,
    /// Whether the request waits for a key that it has at every EM, such as a limit of its user.
    is_blocked: bool,
    /// EMs that had no capacity since the last event, although the cluster view shows some: it is reserved for earlier requests.
    /// Polls check others.
    skipped: Vec<EmInstance>,
}

impl<E> QueuedRequest<E> {
    /// Creates a request that has a permit to wait, and no entry yet.
    pub fn new(QueueStart { em, spec, others, is_named }: QueueStart) -> Self {
        Self {
            stage: QueueStage::Done,
            is_named,
            home: PlacedRequest::new(em, &spec.ask, !is_named),
            spec: spec.number,
            others,
            refusal: None,
            contended: 0,
            is_blocked: false,
            skipped: Vec::new(),
        }
    }

    pub fn stage(&self) -> &'static str {
        match self.stage {
            QueueStage::Done => "Done",
            QueueStage::Committing(_) => "CommittingQueued",
            QueueStage::Waiting => "Waiting",
            QueueStage::SurveyingToLook(_) => "SurveyingToLook",
            QueueStage::CheckingCandidate { .. } => "CheckingCandidate",
            QueueStage::CheckingHome(_) => "CheckingHome",
            QueueStage::CheckingOther { .. } => "CheckingOther",
            QueueStage::SurveyingToMove(_) => "SurveyingToMove",
            QueueStage::Pausing => "Pausing",
            QueueStage::PausingToCommit(_) => "PausingToCommit",
        }
    }

    /// Continues after a result; `None` if it does not belong to the stage.
    pub fn step(&mut self, event: Event<E>, shared: &mut impl SharedState) -> Option<Action<E>> {
        use QueueStage as Stage;
        Some(match (mem::replace(&mut self.stage, Stage::Done), event) {
            (Stage::Committing(attempt), Event::Committed(result)) => self.committed(attempt, result, shared),
            (Stage::Waiting | Stage::Pausing, Event::Woken(WaitResult::Look(wake))) => self.look(wake, shared),
            // The failed attempt may have had a wake-up that is to be forwarded.
            (Stage::PausingToCommit(_), Event::Woken(WaitResult::Look(wake))) => {
                self.submit(QueueAttempt::Unchecked(Some(wake)), shared)
            }
            (Stage::Waiting | Stage::Pausing, Event::Woken(WaitResult::DeadlinePassed)) => self.deadline_passed(None),
            (Stage::PausingToCommit(error), Event::Woken(WaitResult::DeadlinePassed)) => {
                self.deadline_passed(Some(error))
            }
            (Stage::Waiting | Stage::Pausing | Stage::PausingToCommit(_), Event::Woken(WaitResult::Stopping)) => {
                Action::Reply(RequestResult::Stopping)
            }
            (Stage::SurveyingToLook(wake), Event::Surveyed(Ok(()))) => self.check_candidate(wake, 0, shared),
            (Stage::SurveyingToLook(_), Event::Surveyed(Err(Failure::Transient(_)))) => self.pause(),
            (Stage::SurveyingToMove(reason), Event::Surveyed(Ok(()))) => self.move_entry(reason, shared),
            (Stage::SurveyingToMove(_), Event::Surveyed(Err(Failure::Transient(error)))) if shared.has_entry() => {
                self.pause_to_commit(error)
            }
            (Stage::SurveyingToLook(_) | Stage::SurveyingToMove(_), Event::Surveyed(Err(failure))) => fail(failure),
            (Stage::CheckingHome(wake), Event::Checked(result)) => self.checked_home(wake, result, shared),
            (Stage::CheckingCandidate { wake, em, checked }, Event::Checked(result)) => match result {
                Ok(Verdict::Fits) => self.submit(QueueAttempt::Candidate { wake, em, checked }, shared),
                Err(Failure::Rejected(rejection)) if rejection.is_end_of_waiting() => {
                    self.release_assumption(&em, shared);
                    removed(rejection, shared)
                }
                Err(Failure::Transient(_)) => {
                    self.release_assumption(&em, shared);
                    self.pause()
                }
                _ => {
                    self.release_assumption(&em, shared);
                    self.skipped.push(em);
                    self.check_candidate(wake, checked + 1, shared)
                }
            },
            (Stage::CheckingOther { em, search }, Event::Checked(result)) => {
                self.checked_other(em, search, result, shared)
            }
            _ => return None,
        })
    }

    /// Submits the request at the EM of its entry, to enter the queue or to stay in it.
    pub fn enter(&mut self, shared: &impl SharedState) -> Action<E> {
        self.submit(QueueAttempt::Unchecked(None), shared)
    }

    /// Submits the request. The entry stays unchanged if an attempt on another EM or as another spec fails.
    fn submit(&mut self, attempt: QueueAttempt, shared: &impl SharedState) -> Action<E> {
        let home = &self.home;
        // A request without a named EM does not wait for contended EMs, unless it has no entry and all its EMs are contended.
        let is_stuck = || self.contended > 0 && !shared.has_entry() && shared.is_contended(&home.em);
        let patience = match self.is_named {
            true => Patience::Deadline,
            false if is_stuck() => Patience::OtherEmsAfterPause,
            false => Patience::OtherEms,
        };
        let mut request = PlacedRequest { wait: None, ..home.clone() };
        let mut is_elsewhere = false;
        match &attempt {
            QueueAttempt::Unchecked(_) | QueueAttempt::Home(_) => {}
            QueueAttempt::Candidate { em, .. } => {
                is_elsewhere = *em != home.em;
                request.em = em.clone();
            }
            QueueAttempt::Other { em, search } => {
                is_elsewhere = true;
                request = self.other_request(em, search);
            }
        }
        request.is_em_unavailable = self.is_unavailable(&request.em, shared);
        self.stage = QueueStage::Committing(attempt);
        Action::Commit(request, patience, Some(InQueue { is_elsewhere }))
    }

    /// Whether the request waits at an EM, and is not granted there.
    fn is_unavailable(&self, em: &EmInstance, shared: &impl SharedState) -> bool {
        !self.is_named && shared.is_unavailable(em)
    }

    /// Continues after an attempt.
    fn committed(
        &mut self,
        attempt: QueueAttempt,
        result: Result<Outcome, Failure<E>>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        let has_entry = shared.has_entry();
        if let QueueAttempt::Candidate { em, .. } = &attempt
            && !matches!(result, Ok(Outcome::Granted(_)))
        {
            self.release_assumption(em, shared);
        }
        match result {
            Ok(Outcome::Waiting(entry)) => {
                self.contended = 0;
                if let Some(wake) = attempt.wake() {
                    shared.count_check(wake);
                }
                let attempt = self.update_entry(attempt, &entry, shared);
                self.refusal = Some(Box::new(entry.refusal));
                self.stayed_queued(attempt, shared)
            }
            Ok(outcome @ Outcome::Granted(_)) => {
                let spec = match attempt {
                    QueueAttempt::Other { search, .. } => self.others.get(search.number).map(|other| other.number),
                    _ => None,
                };
                shared.granted();
                Action::Reply(RequestResult::Decided { outcome, spec: spec.unwrap_or(self.spec) })
            }
            Ok(Outcome::Contended) if has_entry => {
                let wake = attempt.wake().unwrap_or(WakeReason::NEWS);
                self.contended += 1;
                let again = match self.contended < CANDIDATES_MAX {
                    // Another EM may have capacity.
                    true => Some(wake.handed_on()),
                    false => {
                        self.contended = 0;
                        shared.forward_wake(wake);
                        None
                    }
                };
                match attempt {
                    QueueAttempt::Other { .. } => self.sleep(again, shared),
                    _ => self.check_others(AfterOthers::Wait(again), shared),
                }
            }
            Ok(Outcome::Contended) => {
                self.contended += 1;
                self.leave(LeaveReason::Contended, shared)
            }
            Ok(outcome) => {
                shared.mark_removed();
                self.leave(LeaveReason::Decided(outcome), shared)
            }
            // A later call has taken the position over, and has left the queue since.
            Err(Failure::Rejected(rejection)) if *rejection == Rejection::PlaceLost && shared.has_ended() => {
                removed(Box::new(Rejection::PositionTakenOver), shared)
            }
            // The instance missed its renewals and lost its entries. The request enters anew.
            Err(Failure::Rejected(rejection)) if *rejection == Rejection::PlaceLost => {
                shared.mark_removed();
                self.enter(shared)
            }
            Err(Failure::Rejected(rejection)) if rejection.is_end_of_waiting() => removed(rejection, shared),
            Err(Failure::Rejected(rejection)) if rejection.is_of_em() => match &attempt {
                // An EM other than that of the entry cannot be used any more.
                QueueAttempt::Candidate { em, .. } | QueueAttempt::Other { em, .. } if *em != self.home.em => {
                    self.stayed_queued(attempt, shared)
                }
                _ => self.leave(LeaveReason::Rejected(rejection, attempt.wake()), shared),
            },
            // A queued request survives a short outage.
            Err(Failure::Transient(error)) if has_entry => self.pause_to_commit(error),
            Err(failure) => fail(failure),
        }
    }

    /// Lets all specs create the ticket of the position, which the request may have taken over from an earlier call.
    fn take_ticket(&mut self, ticket_id: Uuid) {
        let specs = self.others.iter_mut().map(|other| &mut other.ask).chain([&mut self.home.ask]);
        for spec in specs.filter(|spec| spec.ticket_id != ticket_id) {
            Arc::make_mut(spec).ticket_id = ticket_id;
        }
    }

    /// Records the stored entry. An attempt counts as one before all others if the request is no longer blocked: other EMs can
    /// serve it from now on.
    fn update_entry(
        &mut self,
        attempt: QueueAttempt,
        entry: &QueuedOutcome,
        shared: &mut impl SharedState,
    ) -> QueueAttempt {
        self.take_ticket(entry.position.ticket_id());
        let is_blocked = is_short_at_every_em(&entry.wait_keys);
        let was_blocked = mem::replace(&mut self.is_blocked, is_blocked);
        // Another spec may fit where that of the entry does not.
        shared.update_entry(entry, !self.is_named && (!is_blocked || !self.others.is_empty()));
        match attempt {
            QueueAttempt::Home(wake) | QueueAttempt::Candidate { wake, .. } if was_blocked && !is_blocked => {
                QueueAttempt::Unchecked(Some(wake))
            }
            attempt => attempt,
        }
    }

    /// Continues after an attempt that was not granted: with the next EM or spec, or by sleeping.
    fn stayed_queued(&mut self, attempt: QueueAttempt, shared: &mut impl SharedState) -> Action<E> {
        match attempt {
            QueueAttempt::Candidate { wake, em, checked } => {
                self.skipped.push(em);
                self.check_candidate(wake, checked + 1, shared)
            }
            QueueAttempt::Other { em, mut search } if search.refused_at.as_ref() != Some(&em) => {
                search.refused_at = Some(em.clone());
                self.check_other_at(em, search, shared)
            }
            QueueAttempt::Other { em, mut search } => {
                search.checked.push(em);
                self.check_other(search, shared)
            }
            // Only the EM of the entry was tried. Capacity at another one may have been freed before the request had an entry, or
            // together with what it was submitted for.
            QueueAttempt::Unchecked(wake) if !self.is_named && shared.best_candidate(&self.home.ask, &[]).is_some() => {
                let again = wake.map_or(WakeReason::ENTRY, WakeReason::handed_on);
                self.check_others(AfterOthers::Wait(Some(again)), shared)
            }
            QueueAttempt::Unchecked(None) => self.check_others(AfterOthers::Wait(None), shared),
            QueueAttempt::Unchecked(Some(wake)) | QueueAttempt::Home(wake) => {
                self.check_others(AfterOthers::Forward(wake), shared)
            }
        }
    }

    /// Moves the entry to another EM if the request names none.
    fn leave(&mut self, reason: LeaveReason, shared: &mut impl SharedState) -> Action<E> {
        match self.is_named {
            true => self.stay(reason, shared),
            false => self.survey(SurveyAge::Fresh, QueueStage::SurveyingToMove(reason)),
        }
    }

    fn move_entry(&mut self, reason: LeaveReason, shared: &mut impl SharedState) -> Action<E> {
        let home = &mut self.home;
        let nearest = shared.nearest_fit(&home.ask).filter(|em| *em != home.em);
        let (em, wake) = match reason {
            LeaveReason::Contended => (shared.best_candidate(&home.ask, &[]).or(nearest), None),
            LeaveReason::Decided(_) => (nearest, None),
            LeaveReason::Rejected(_, wake) => (nearest, wake),
        };
        match em {
            Some(em) => {
                home.em = em;
                self.submit(QueueAttempt::Unchecked(wake), shared)
            }
            None => self.stay(reason, shared),
        }
    }

    /// Ends a request that finds no other EM. A request that only met a contended EM tries it again.
    fn stay(&mut self, reason: LeaveReason, shared: &mut impl SharedState) -> Action<E> {
        match reason {
            LeaveReason::Contended => self.enter(shared),
            LeaveReason::Decided(outcome) => Action::Reply(RequestResult::Decided { outcome, spec: self.spec }),
            LeaveReason::Rejected(rejection, _) => Action::Reply(RequestResult::Rejected(rejection)),
        }
    }

    /// Sleeps, or looks at once if there is a reason.
    fn sleep(&mut self, again: Option<WakeReason>, shared: &mut impl SharedState) -> Action<E> {
        match again {
            Some(wake) => self.look(wake, shared),
            None => {
                self.stage = QueueStage::Waiting;
                Action::Wait
            }
        }
    }

    /// Checks whether the request can be granted now.
    fn look(&mut self, wake: WakeReason, shared: &mut impl SharedState) -> Action<E> {
        if shared.has_ended() {
            shared.count_check(wake);
            return self.check_home(wake, shared);
        }
        if wake.is_coming {
            return self.submit(QueueAttempt::Unchecked(Some(wake)), shared);
        }
        if self.is_named {
            match shared.observed_verdict(&self.home) {
                // The ledger would find the same result as a check.
                Some(Verdict::Fits) => return self.submit(QueueAttempt::Home(wake), shared),
                // The observed state is as new as the wake-up.
                Some(Verdict::Refused(short)) if !wake.is_news && is_unchanged(shared, &short) => {
                    self.refusal = Some(Box::new(short.refusal));
                    return self.check_others(AfterOthers::Forward(wake), shared);
                }
                _ => {}
            }
        }
        shared.count_check(wake);
        match self.is_named || wake.is_poll && self.is_blocked {
            true => self.check_home(wake, shared),
            false => self.survey(SurveyAge::Recent, QueueStage::SurveyingToLook(wake)),
        }
    }

    /// Checks the next EM by the cluster view, which counts the request there, so that concurrent waiters select different EMs.
    /// A blocked request is not counted: others may use the capacity.
    fn check_candidate(&mut self, wake: WakeReason, checked: usize, shared: &mut impl SharedState) -> Action<E> {
        if checked == 0 && (!wake.is_poll || self.skipped.len() >= SKIPPED_MAX) {
            self.skipped.clear();
        }
        if checked < CANDIDATES_MAX
            && let Some(em) = self.next_candidate(checked == 0, shared)
        {
            let request = PlacedRequest { em: em.clone(), ..self.home.clone() };
            self.stage = QueueStage::CheckingCandidate { wake, em, checked };
            return Action::Check(request, Some(InQueue { is_elsewhere: false }));
        }
        if shared.closed(&self.home.em).is_some()
            && let Some(open) = shared.nearest_fit(&self.home.ask).filter(|em| shared.closed(em).is_none())
        {
            self.home.em = open;
            return self.submit(QueueAttempt::Home(wake), shared);
        }
        // The entry of a blocked request may be at keys that are free now, while other EMs do not wake it.
        match shared.is_contended(&self.home.em) && !self.is_blocked {
            true => self.check_others(AfterOthers::Forward(wake), shared),
            false => self.check_home(wake, shared),
        }
    }

    /// Returns the next EM to check. If all were skipped, the first check begins anew.
    fn next_candidate(&mut self, is_first: bool, shared: &impl SharedState) -> Option<EmInstance> {
        let next = |skipped: &[EmInstance]| match self.is_blocked {
            true => shared.best_candidate(&self.home.ask, skipped),
            false => shared.choose(&self.home.ask, skipped),
        };
        let em = next(&self.skipped);
        if em.is_some() || !is_first || self.skipped.is_empty() {
            return em;
        }
        let em = next(&[]);
        self.skipped.clear();
        em
    }

    fn release_assumption(&self, em: &EmInstance, shared: &impl SharedState) {
        if !self.is_blocked {
            shared.release_assumption(em);
        }
    }

    fn check_home(&mut self, wake: WakeReason, shared: &impl SharedState) -> Action<E> {
        self.stage = QueueStage::CheckingHome(wake);
        let is_em_unavailable = self.is_unavailable(&self.home.em, shared);
        let request = PlacedRequest { is_em_unavailable, ..self.home.clone() };
        Action::Check(request, Some(InQueue { is_elsewhere: false }))
    }

    fn checked_home(
        &mut self,
        wake: WakeReason,
        result: Result<Verdict, Failure<E>>,
        shared: &mut impl SharedState,
    ) -> Action<E> {
        match result {
            Ok(Verdict::Refused(short)) if is_unchanged(shared, &short) => {
                self.refusal = Some(Box::new(short.refusal));
                self.check_others(AfterOthers::Forward(wake), shared)
            }
            Err(Failure::Rejected(rejection)) if rejection.is_end_of_waiting() => removed(rejection, shared),
            // The ledger decides, changes the position, or reports an EM that was unregistered.
            Ok(_) | Err(Failure::Rejected(_)) => self.submit(QueueAttempt::Home(wake), shared),
            Err(Failure::Transient(_)) => self.pause(),
            Err(failure) => fail(failure),
        }
    }

    /// Checks the other specs, if any, after the spec of the entry was not granted.
    fn check_others(&mut self, then: AfterOthers, shared: &mut impl SharedState) -> Action<E> {
        let since = shared.freed_count();
        let (checked, short) = (Vec::new(), BTreeSet::new());
        self.check_other(OtherSpecs { then, since, number: 0, checked, refused_at: None, short }, shared)
    }

    /// Checks the next other spec, on up to [`CANDIDATES_MAX`] EMs. If none is left, subscribes to the keys where they are
    /// short.
    fn check_other(&mut self, mut search: OtherSpecs, shared: &mut impl SharedState) -> Action<E> {
        while let Some(other) = self.others.get(search.number) {
            let home = || Some(self.home.em.clone()).filter(|_| search.checked.is_empty());
            let em = match !self.is_named && search.checked.len() < CANDIDATES_MAX {
                true => shared.best_candidate(&other.ask, &search.checked).or_else(home),
                false => home(),
            };
            if let Some(em) = em {
                return self.check_other_at(em, search, shared);
            }
            search.number += 1;
            search.checked.clear();
            search.refused_at = None;
        }
        if !self.others.is_empty() {
            shared.subscribe(search.short, search.since);
        }
        match search.then {
            AfterOthers::Wait(again) => self.sleep(again, shared),
            AfterOthers::Forward(wake) => {
                shared.forward_wake(wake);
                self.sleep(None, shared)
            }
        }
    }

    /// Returns the request with the current other spec at an EM.
    fn other_request(&self, em: &EmInstance, search: &OtherSpecs) -> PlacedRequest {
        let spec = self.others.get(search.number).map_or(&self.home.ask, |other| &other.ask);
        PlacedRequest::new(em.clone(), spec, !self.is_named)
    }

    /// Checks the current other spec at an EM.
    fn check_other_at(&mut self, em: EmInstance, search: OtherSpecs, shared: &impl SharedState) -> Action<E> {
        let is_em_unavailable = self.is_unavailable(&em, shared);
        let request = PlacedRequest { is_em_unavailable, ..self.other_request(&em, &search) };
        self.stage = QueueStage::CheckingOther { em, search };
        Action::Check(request, Some(InQueue { is_elsewhere: true }))
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
                return self.submit(QueueAttempt::Other { em, search }, shared);
            }
            Ok(Verdict::Refused(short) | Verdict::Reranked(short)) => {
                let short = short.wait_keys.into_iter().filter(|(_, is_short)| *is_short);
                search.short.extend(short.map(|(wait_key, _)| wait_key));
            }
            Err(Failure::Rejected(rejection)) if rejection.is_end_of_waiting() => return removed(rejection, shared),
            Err(Failure::Transient(_)) => return self.pause(),
            // The next freed event or poll repeats the check.
            Err(_) => {}
        }
        search.checked.push(em);
        self.check_other(search, shared)
    }

    fn survey(&mut self, age: SurveyAge, stage: QueueStage<E>) -> Action<E> {
        self.stage = stage;
        Action::Survey(age)
    }

    fn pause(&mut self) -> Action<E> {
        self.stage = QueueStage::Pausing;
        Action::Pause
    }

    fn pause_to_commit(&mut self, error: E) -> Action<E> {
        self.stage = QueueStage::PausingToCommit(error);
        Action::Pause
    }

    /// Replies at the wait deadline: with the last refusal, or with the error of the last attempt.
    fn deadline_passed(&mut self, error: Option<E>) -> Action<E> {
        Action::Reply(match (self.refusal.take(), error) {
            (Some(refusal), _) => RequestResult::Decided { outcome: Outcome::Refused(refusal), spec: self.spec },
            (None, Some(error)) => RequestResult::Failed(error),
            (None, None) => RequestResult::DeadlinePassed,
        })
    }
}

/// Ends a call that no longer owns its position.
fn removed<E>(rejection: Box<Rejection>, shared: &mut impl SharedState) -> Action<E> {
    shared.mark_removed();
    Action::Reply(RequestResult::Rejected(rejection))
}

/// Whether a refusal leaves the queue entry as it is, so that the request can sleep.
fn is_unchanged(shared: &impl SharedState, short: &BlockedRequest) -> bool {
    !short.refusal.never_fits && shared.has_entry_at(&short.wait_keys)
}

#[cfg(test)]
#[path = "queued_tests.rs"]
mod tests;
