//! RequestResourceService: from a request to its answer.
//!
//! A request is judged on its EM, or on one that is chosen for it: first by a look without locks, then again under them, where it
//! is granted.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    domain::{
        em::EmInstance,
        operation::{Ask, Operation, Outcome, Rejection, Request},
    },
    error::Error,
};

use super::{
    committer::Committer,
    judge::{Judge, Verdict},
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
}

impl RequestResourceService {
    /// On top of the judge and the committer of this instance.
    pub fn new(judge: Judge, committer: Committer) -> Self {
        Self { judge, committer }
    }

    /// Answers [`Outcome::Granted`] or [`Outcome::Refused`]. Without an EM, one is chosen.
    pub async fn request(&self, em: Option<EmInstance>, ask: Ask, deadline: Instant) -> Result<Outcome, Error> {
        match em {
            Some(em) => self.request_on(Request { em, ask }, deadline).await,
            None => self.choose(ask, deadline).await,
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
        let verdict = self.judge.look(Request { em: em.clone(), ask }).await?;
        Ok((em, verdict))
    }

    async fn request_on(&self, request: Request, deadline: Instant) -> Result<Outcome, Error> {
        if self.judge.is_doubtful(&request)
            && let Verdict::Refused(refusal) = self.judge.look(request.clone()).await?
        {
            return Ok(Outcome::Refused(refusal));
        }
        self.committer.submit(Operation::Request(request), deadline).await
    }

    /// Tries the EMs on which the request fits, the best first: by what was seen lately, then by what is there now. If it fits on
    /// none, the one that comes closest says why.
    async fn choose(&self, ask: Ask, deadline: Instant) -> Result<Outcome, Error> {
        for age in [VIEW_AGE, Duration::ZERO] {
            self.judge.see_all(age).await?;
            for em in self.judge.candidates(&ask, CANDIDATES_MAX) {
                match self.request_on(Request { em, ask: ask.clone() }, deadline).await {
                    // Somebody was faster; another EM may still have room.
                    Ok(Outcome::Refused(refusal)) if refusal.is_of_em_alone() => {}
                    Err(Error::Rejected(rejection)) if matches!(*rejection, Rejection::EmNotRegistered(_)) => {}
                    answer => return answer,
                }
            }
        }
        let em = self.judge.closest(&ask).ok_or_else(|| self.judge.none_for(&ask))?;
        self.request_on(Request { em, ask }, deadline).await
    }
}
