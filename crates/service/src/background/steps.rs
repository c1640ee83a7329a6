//! Steps of background jobs: retries a failed operation with exponential back-off, so that a transient error does not end the
//! turn.
//!
//! Never: retries an error that depends on the operation itself.
//! Callers: `count_label_sets` and `unregister`.

use std::time::Duration;

use tokio::time::Instant;

use crate::{committer::Committer, error::Error};
use rm_model::operation::{Operation, Outcome};
use rm_telemetry::cause;

use super::jitter;

/// Timeout of one step, lock waits included. The job decides when to retry a step that timed out.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// First and longest pause between two attempts; each pause doubles the previous one.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(640);

/// Applies one step and retries transient errors until [`STEP_TIMEOUT`]. The step may be applied twice.
///
/// # Errors
/// The error of the last attempt.
pub async fn carry_out(committer: &Committer, step: &Operation) -> Result<Outcome, Error> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    let mut pause = PAUSE_FIRST;
    loop {
        let error = match committer.submit_in_background(step.clone(), deadline).await {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        // Jitter, so that steps that failed together retry at different times.
        let pause_now = pause / 2 + jitter(pause);
        let may_pass = error.is_transient() || matches!(error, Error::CommitUnknown);
        if !may_pass || Instant::now() + pause_now >= deadline {
            return Err(error);
        }
        tracing::debug!(step = step.kind(), error = cause(&error), "a step is retried");
        tokio::time::sleep(pause_now).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}
