//! A request outside the wait queue: the search for an EM, spec by spec.
//!
//! A request that names an EM is tried there. Another one tries the best EMs of the cluster view: after [`CANDIDATES_MAX`] full
//! ones it surveys, tries as many others, and then a last resort, which explains the refusal. If no spec is granted, the request
//! waits with the first spec that can fit later, at a closed EM if no open one can serve it.
//! Caller: `request`.

use std::{mem, vec};

use rm_model::{
    assessment::Verdict,
    em::EmInstance,
    operation::{Outcome, PlacedRequest},
    refusal::Refusal,
};

use super::{
    Action, CANDIDATES_MAX, Event, Failure, NumberedSpec, Patience, QueueStart, RequestResult, SharedState, SurveyAge,
    fail, no_candidate,
};

/// The action under way, and what follows from its result.
#[derive(Debug)]
enum SearchStage {
    /// The request was not started, or is done.
    Done,
    /// Surveys, to try the candidates for the current spec.
    Surveying,
    /// Checks a request before an attempt.
    Checking(PlacedRequest, Attempt),
    /// The committer has the request.
    Committing(Attempt),
}

/// An attempt outside the queue.
#[derive(Debug)]
enum Attempt {
    /// On the EM that the request names.
    Named,
    /// On the best EM of the cluster view.
    Candidate(EmInstance),
    /// On an EM that has no capacity by the cluster view: a contended EM, or the EM that explains the refusal. A closed one grants
    /// nothing.
    LastResort { contended: Option<EmInstance> },
}

/// Continuation after a result.
#[derive(Debug)]
pub(super) enum SearchStep<E> {
    /// The next action.
    Act(Action<E>),
    /// The request waits; it has a permit.
    Queue(QueueStart),
}

/// The EMs that were tried for one spec.
#[derive(Debug, Default)]
struct TriedEms {
    /// EMs that did not grant it. The view may show capacity there that is reserved for earlier requests.
    ems: Vec<EmInstance>,
    /// Number of full ones since the last survey.
    full: usize,
    /// Whether the cluster view is fresh.
    is_surveyed: bool,
    /// Number of drained EMs that the cluster view showed as free.
    drained: usize,
    /// Contended EMs that refused as a last resort.
    contended: Vec<EmInstance>,
}

/// A refusal of a spec.
#[derive(Debug)]
struct RefusedSpec {
    number: usize,
    refusal: Box<Refusal>,
}

/// The search of one request.
#[derive(Debug)]
pub(super) struct EmSearch {
    stage: SearchStage,
    named: Option<EmInstance>,
    may_wait: bool,
    spec: NumberedSpec,
    remaining: vec::IntoIter<NumberedSpec>,
    tried: TriedEms,
    /// The specs that can fit later.
    may_fit: Vec<NumberedSpec>,
    /// The first refusal.
    refused: Option<RefusedSpec>,
}

impl EmSearch {
    pub fn new(named: Option<EmInstance>, spec: NumberedSpec, others: Vec<NumberedSpec>) -> Self {
        Self {
            stage: SearchStage::Done,
            named,
            may_wait: spec.ask.may_wait,
            spec,
            remaining: others.into_iter(),
            tried: TriedEms::default(),
            may_fit: Vec::new(),
            refused: None,
        }
    }

    pub fn stage(&self) -> &'static str {
        match self.stage {
            SearchStage::Done => "Done",
            SearchStage::Surveying => "Surveying",
            SearchStage::Checking(..) => "Checking",
            SearchStage::Committing(_) => "Committing",
        }
    }

    /// Tries the current spec.
    pub fn start<E>(&mut self, shared: &mut impl SharedState) -> SearchStep<E> {
        self.tried = TriedEms::default();
        match self.named.clone() {
            Some(em) => self.attempt(PlacedRequest::new(em, &self.spec.ask, false), Attempt::Named, shared),
            None => self.survey(SurveyAge::Recent),
        }
    }

    /// Continues after a result; `None` if it does not belong to the stage.
    pub fn step<E>(&mut self, event: Event<E>, shared: &mut impl SharedState) -> Option<SearchStep<E>> {
        Some(match (mem::replace(&mut self.stage, SearchStage::Done), event) {
            (SearchStage::Surveying, Event::Surveyed(Ok(()))) => {
                self.tried.full = 0;
                self.next_candidate(shared)
            }
            (SearchStage::Surveying, Event::Surveyed(Err(failure))) => SearchStep::Act(fail(failure)),
            (SearchStage::Checking(request, attempt), Event::Checked(result)) => match result {
                Ok(Verdict::Fits) => self.commit(request, attempt),
                Ok(Verdict::Refused(short) | Verdict::Reranked(short)) => {
                    self.committed(attempt, Ok(Outcome::Refused(Box::new(short.refusal))), shared)
                }
                Err(failure) => self.committed(attempt, Err(failure), shared),
            },
            (SearchStage::Committing(attempt), Event::Committed(result)) => self.committed(attempt, result, shared),
            _ => return None,
        })
    }

    fn survey<E>(&mut self, age: SurveyAge) -> SearchStep<E> {
        self.stage = SearchStage::Surveying;
        SearchStep::Act(Action::Survey(age))
    }

    fn attempt<E>(&mut self, request: PlacedRequest, attempt: Attempt, shared: &mut impl SharedState) -> SearchStep<E> {
        if shared.needs_check(&request) {
            self.stage = SearchStage::Checking(request.clone(), attempt);
            return SearchStep::Act(Action::Check(request, None));
        }
        self.commit(request, attempt)
    }

    fn commit<E>(&mut self, request: PlacedRequest, attempt: Attempt) -> SearchStep<E> {
        let patience = match attempt {
            Attempt::Named => Patience::Deadline,
            Attempt::LastResort { .. } if !self.may_wait => Patience::OtherEmsAfterPause,
            _ => Patience::OtherEms,
        };
        self.stage = SearchStage::Committing(attempt);
        SearchStep::Act(Action::Commit(request, patience, None))
    }

    /// Continues after an attempt, or after the check before it.
    fn committed<E>(
        &mut self,
        attempt: Attempt,
        result: Result<Outcome, Failure<E>>,
        shared: &mut impl SharedState,
    ) -> SearchStep<E> {
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
                self.tried.full += usize::from(!matches!(result, Ok(Outcome::Contended)));
                self.tried.ems.push(em);
                self.next_candidate(shared)
            }
            Attempt::LastResort { contended } => match (result, contended) {
                // The EM was drained after the cluster view was read; placement no longer selects it as the closest.
                (Err(Failure::Rejected(rejection)), None) if rejection.is_draining() => {
                    self.tried.drained += 1;
                    match self.tried.drained {
                        CANDIDATES_MAX => SearchStep::Act(no_candidate(&self.spec.ask, shared)),
                        _ => self.survey(SurveyAge::Fresh),
                    }
                }
                // Another EM may have capacity now.
                (Ok(Outcome::Contended), _) if !self.may_wait => self.survey(SurveyAge::Fresh),
                (result, Some(em)) if may_fit_elsewhere(&result) => {
                    self.tried.contended.push(em);
                    self.survey(SurveyAge::Fresh)
                }
                (result, _) => self.decided(result, shared),
            },
        }
    }

    /// Tries the next EM by the cluster view. After [`CANDIDATES_MAX`] full ones, surveys first, and then tries a last resort.
    fn next_candidate<E>(&mut self, shared: &mut impl SharedState) -> SearchStep<E> {
        let ask = self.spec.ask.clone();
        if self.tried.full < CANDIDATES_MAX
            && let Some(em) = shared.choose(&ask, &self.tried.ems)
        {
            return self.attempt(PlacedRequest::new(em.clone(), &ask, true), Attempt::Candidate(em), shared);
        }
        if !self.tried.is_surveyed {
            self.tried.is_surveyed = true;
            return self.survey(SurveyAge::Fresh);
        }
        let may_wait_for_key = !self.may_wait && self.tried.contended.len() < CANDIDATES_MAX;
        let contended = match may_wait_for_key {
            true => shared.best_contended(&ask, &self.tried.contended),
            false => None,
        };
        match contended.clone().or_else(|| shared.nearest_fit(&ask)) {
            Some(em) => {
                let is_em_unavailable = shared.is_unavailable(&em);
                let request = PlacedRequest { is_em_unavailable, ..PlacedRequest::new(em, &ask, true) };
                self.attempt(request, Attempt::LastResort { contended }, shared)
            }
            None => SearchStep::Act(no_candidate(&ask, shared)),
        }
    }

    /// Continues after the decision on the current spec: with the next one, in the queue, or with the reply.
    fn decided<E>(&mut self, result: Result<Outcome, Failure<E>>, shared: &mut impl SharedState) -> SearchStep<E> {
        let number = self.spec.number;
        match result {
            Ok(Outcome::Refused(refusal)) => {
                if !refusal.never_fits {
                    self.may_fit.push(self.spec.clone());
                }
                self.refused.get_or_insert(RefusedSpec { number, refusal });
            }
            // All EMs with capacity for the spec are contended.
            Ok(Outcome::Contended) if self.may_wait => self.may_fit.push(self.spec.clone()),
            Ok(outcome) => return SearchStep::Act(Action::Reply(RequestResult::Decided { outcome, spec: number })),
            Err(failure) => return SearchStep::Act(fail(failure)),
        }
        if let Some(next) = self.remaining.next() {
            self.spec = next;
            return self.start(shared);
        }
        let refused = self.refused.take();
        let outcome = refused
            .map(|refused| RequestResult::Decided { outcome: Outcome::Refused(refused.refusal), spec: refused.number });
        match outcome {
            Some(outcome) if !self.may_wait || self.may_fit.is_empty() => SearchStep::Act(Action::Reply(outcome)),
            _ => self.enter_queue(shared),
        }
    }

    /// Waits with the first spec that can fit later; the others stay alternatives.
    fn enter_queue<E>(&mut self, shared: &mut impl SharedState) -> SearchStep<E> {
        let mut may_fit = mem::take(&mut self.may_fit).into_iter();
        let spec = may_fit.next().unwrap_or_else(|| self.spec.clone());
        let Some(em) = self.named.clone().or_else(|| shared.nearest_fit(&spec.ask)) else {
            return SearchStep::Act(no_candidate(&spec.ask, shared));
        };
        let is_named = self.named.is_some();
        match shared.enter_queue(!is_named, &spec.ask) {
            true => SearchStep::Queue(QueueStart { em, spec, others: may_fit.collect(), is_named }),
            false => SearchStep::Act(Action::Reply(RequestResult::QueueFull)),
        }
    }
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
