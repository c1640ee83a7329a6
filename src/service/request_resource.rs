//! RequestResourceService: from a request to its answer.
//!
//! A request is judged on its EM, or on one that is chosen for it: first by a look without locks, then again under them, where it
//! is granted. One that may wait then stands in line, and goes the same way again whenever there may be room for it.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    domain::{
        em::EmInstance,
        judgement::Short,
        operation::{Ask, Operation, Outcome, Rejection, Request},
    },
    error::Error,
};

use super::{
    committer::Committer,
    judge::{Judge, Verdict},
    waiting::{Caller, WaitingLine, Woken},
};

/// How old the view of all EMs may be by which one is chosen first.
const VIEW_AGE: Duration = Duration::from_secs(1);

/// How many EMs are tried before the view is made anew: if so many have filled up since, it is too old.
const CANDIDATES_MAX: usize = 4;

/// Grants requests, or explains why not.
#[derive(Clone, Debug)]
pub struct RequestResourceService {
    judge: Judge,
    committer: Committer,
    line: WaitingLine,
}

/// How long a caller has deadlines.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// Until when it waits for resource locks.
    pub locks: Instant,
    /// Until when it waits in line for resources; `None` to be refused at once.
    pub line: Option<Instant>,
}

impl RequestResourceService {
    /// On top of the judge, the committer and the waiting line of this instance.
    pub fn new(judge: Judge, committer: Committer, line: WaitingLine) -> Self {
        Self { judge, committer, line }
    }

    /// Answers [`Outcome::Granted`] or [`Outcome::Refused`]. Without an EM, one is chosen.
    pub async fn request(&self, em: Option<EmInstance>, ask: Ask, deadlines: Deadlines) -> Result<Outcome, Error> {
        let any_em = em.is_none();
        let answer = match &em {
            Some(em) => self.request_on(request(em.clone(), &ask), deadlines.locks).await?,
            None => self.choose(&ask, deadlines.locks).await?,
        };
        match (answer, deadlines.line) {
            (Outcome::Refused(refusal), Some(until)) if !refusal.never_fits => {
                let em = em.or_else(|| self.judge.closest(&ask)).ok_or_else(|| self.judge.none_for(&ask))?;
                self.wait(request(em, &ask), self.line.enter(any_em, until)?).await
            }
            (answer, _) => Ok(answer),
        }
    }

    /// What the request would be answered now, and on which EM; nothing is granted.
    pub async fn dry_run(&self, em: Option<EmInstance>, ask: Ask) -> Result<(EmInstance, Verdict), Error> {
        let em = match em {
            Some(em) => em,
            None => {
                self.judge.see_all(Duration::ZERO).await?;
                let candidate = self.judge.candidates(&ask, 1).pop();
                candidate.or_else(|| self.judge.closest(&ask)).ok_or_else(|| self.judge.none_for(&ask))?
            }
        };
        let verdict = self.judge.look(request(em.clone(), &ask)).await?;
        Ok((em, verdict))
    }

    async fn request_on(&self, request: Request, deadline: Instant) -> Result<Outcome, Error> {
        if self.judge.is_doubtful(&request)
            && let Verdict::Refused(short) = self.judge.look(request.clone()).await?
        {
            return Ok(Outcome::Refused(Box::new(short.refusal)));
        }
        self.committer.submit(Operation::Request(request), deadline).await
    }

    /// Tries the EMs on which the request fits, the best first: by what was seen lately, then by what is there now. If it fits on
    /// none, the one that comes closest says why.
    async fn choose(&self, ask: &Ask, deadline: Instant) -> Result<Outcome, Error> {
        for age in [VIEW_AGE, Duration::ZERO] {
            self.judge.see_all(age).await?;
            for em in self.judge.candidates(ask, CANDIDATES_MAX) {
                match self.request_on(request(em, ask), deadline).await {
                    // Somebody was faster; another EM may still have room.
                    Ok(Outcome::Refused(refusal)) if refusal.is_of_em_alone() => {}
                    Err(Error::Rejected(rejection)) if matches!(*rejection, Rejection::EmNotRegistered(_)) => {}
                    answer => return answer,
                }
            }
        }
        let em = self.judge.closest(ask).ok_or_else(|| self.judge.none_for(ask))?;
        self.request_on(request(em, ask), deadline).await
    }

    /// Stands in line, and tries again whenever there may be room, until the caller's time is up.
    async fn wait(&self, mut request: Request, mut caller: Caller) -> Result<Outcome, Error> {
        loop {
            request.wait = Some(caller.wait().await?);
            let answer = self.committer.submit(Operation::Request(request.clone()), caller.until()).await;
            let refusal = match answer {
                Ok(Outcome::Waiting(waiting)) => {
                    caller.stand(&waiting);
                    waiting.refusal
                }
                Ok(granted @ Outcome::Granted(_)) => {
                    caller.granted();
                    return Ok(granted);
                }
                Ok(answer) => {
                    caller.is_out();
                    return Ok(answer);
                }
                Err(Error::Rejected(rejection)) if *rejection == Rejection::PlaceLost => {
                    // This instance was away for so long that it was thought dead: to the end of the line.
                    caller.is_out();
                    continue;
                }
                Err(error) => return Err(error),
            };
            request.wait = Some(caller.wait().await?);
            match self.until_worth_trying(&request, &caller).await? {
                Some(em) => request.em = em,
                None => return Ok(Outcome::Refused(Box::new(refusal))),
            }
        }
    }

    /// Waits until a look shows that the request fits, or that it has to stand elsewhere in line: answers the EM to try, or `None`
    /// when the caller's time is up.
    async fn until_worth_trying(&self, request: &Request, caller: &Caller) -> Result<Option<EmInstance>, Error> {
        loop {
            match caller.woken().await {
                Woken::TimeIsUp => return Ok(None),
                Woken::Stopping => return Err(Error::ShuttingDown),
                Woken::Look => {}
            }
            if let Some(em) = self.look_again(request, caller).await? {
                return Ok(Some(em));
            }
        }
    }

    async fn look_again(&self, request: &Request, caller: &Caller) -> Result<Option<EmInstance>, Error> {
        let any_em = request.wait.as_ref().is_some_and(|wait| wait.any_em);
        if any_em {
            self.judge.see_all(VIEW_AGE).await?;
            for em in self.judge.candidates(&request.ask, CANDIDATES_MAX) {
                let there = Request { em: em.clone(), ..request.clone() };
                if matches!(self.judge.look(there).await, Ok(Verdict::Fits)) {
                    return Ok(Some(em));
                }
            }
        }
        let stands_well = |short: &Short| !short.refusal.never_fits && short.spots == caller.spots();
        match self.judge.look(request.clone()).await {
            Ok(Verdict::Refused(short)) if stands_well(&short) => Ok(None),
            Ok(_) => Ok(Some(request.em.clone())),
            Err(Error::Rejected(rejection)) if any_em && matches!(*rejection, Rejection::EmNotRegistered(_)) => {
                Ok(Some(self.judge.closest(&request.ask).ok_or_else(|| self.judge.none_for(&request.ask))?))
            }
            Err(error) => Err(error),
        }
    }
}

fn request(em: EmInstance, ask: &Ask) -> Request {
    Request { em, ask: ask.clone(), wait: None }
}
