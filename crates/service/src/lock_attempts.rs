//! Attempts to get a lock of the database, each with a longer wait.
//!
//! Operations wait behind an attempt. The pause after it is a multiple of its wait, so that most of the time is theirs.
//! Callers: `holds` and the fence of `limits`.

use std::time::Duration;

use tokio::time::Instant;

use rm_store::session;

/// Maximum wait for a lock per attempt.
const PATIENCE_MAX: Duration = Duration::from_secs(1);

/// Minimum pause after an attempt.
const PAUSE_MIN: Duration = Duration::from_millis(25);

/// Pause after an attempt, as a multiple of its wait.
const PAUSE_FACTOR: u32 = 3;

/// Attempts of one change.
#[derive(Debug)]
pub struct LockAttempts {
    /// Wait for each lock in the next attempt.
    pub patience: Duration,
    deadline: Instant,
}

impl LockAttempts {
    /// Begins with a short wait.
    pub fn until(deadline: Instant) -> Self {
        Self { patience: session::HURRY, deadline }
    }

    /// Whether there is time for another attempt.
    pub fn may_repeat(&self) -> bool {
        Instant::now() + PAUSE_MIN < self.deadline
    }

    /// Pauses after an attempt, and makes the next one wait longer.
    pub async fn pause(&mut self) {
        let pause = PAUSE_MIN.max(self.patience * PAUSE_FACTOR);
        tokio::time::sleep_until((Instant::now() + pause).min(self.deadline)).await;
        self.patience = (self.patience * 2).min(PATIENCE_MAX);
    }
}
