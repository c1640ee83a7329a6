//! Steps of jobs: one that fails is tried again where it stands, so that it costs its job a moment and nobody else anything.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    domain::operation::{Operation, Outcome},
    error::Error,
    service::committer::Committer,
};

use super::jitter;

/// How long a step is tried, its waits for locks included; then it is its job's affair when it is tried again.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// The first pause between two tries, and the longest: each is twice as long as the one before.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(640);

/// Carries out one step of a job, which may be done twice: again if another moment may be better, until [`STEP_TIMEOUT`].
///
/// # Errors
/// Those of the last try.
pub async fn carry_out(committer: &Committer, step: &Operation) -> Result<Outcome, Error> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    let mut pause = PAUSE_FIRST;
    loop {
        let error = match committer.submit_in_background(step.clone(), deadline).await {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        // Some of several that failed together come back a little later than others.
        let pause_now = pause / 2 + jitter(pause);
        let may_pass = error.may_pass() || matches!(error, Error::CommitUnknown);
        if !may_pass || Instant::now() + pause_now >= deadline {
            return Err(error);
        }
        tracing::debug!(step = step.kind(), error = &error as &dyn std::error::Error, "a step is tried again");
        tokio::time::sleep(pause_now).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}
