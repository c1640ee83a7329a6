//! RequestResourceService: from a request to its answer.
//!
//! A request is judged on its EM: first by a look without locks, then again under them, where it is granted. This is the place
//! where a request's labels are resolved to what it is judged by.

use tokio::time::Instant;

use crate::{
    domain::operation::{Operation, Outcome, Request},
    error::Error,
};

use super::{
    committer::Committer,
    judge::{Judge, Verdict},
};

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

    /// Answers [`Outcome::Granted`] or [`Outcome::Refused`].
    pub async fn request(&self, request: Request, deadline: Instant) -> Result<Outcome, Error> {
        if self.judge.is_doubtful(&request)
            && let Verdict::Refused(refusal) = self.judge.look(request.clone()).await?
        {
            return Ok(Outcome::Refused(refusal));
        }
        self.committer.submit(Operation::Request(request), deadline).await
    }

    /// What the request would be answered now; nothing is granted.
    pub async fn dry_run(&self, request: Request) -> Result<Verdict, Error> {
        self.judge.look(request).await
    }
}
