//! Retry decisions: whether and when a failed call is repeated. Pure functions without I/O.
//!
//! A call without a safe repetition is repeated only if it certainly had no effect. Callers: `call` and `follow`.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// Pause after the first failure; doubles with each further one.
const PAUSE_FIRST: Duration = Duration::from_millis(100);

/// Maximum pause, unless the service requests a longer one; and maximum of the requested pause.
const PAUSE_MAX: Duration = Duration::from_secs(2);
const PAUSE_ASKED_MAX: Duration = Duration::from_secs(30);

/// The only reason of a reply that leaves the result unknown.
const COMMIT_UNKNOWN: &str = "COMMIT_UNKNOWN";

/// Whether a call may be repeated when its result is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Idempotency {
    /// A repetition has no further effect and gets an equal reply.
    Safe,
    /// Repeat only if the call had no effect: a repetition would do more, or get another reply.
    OnlyIfNotDone,
}

/// Failure of one attempt.
#[derive(Debug)]
pub(super) enum AttemptFailure {
    /// Not sent: no connection could be opened.
    NotSent(Status),
    /// Not sent or not begun, because the connection was closing, for example for its age. Another connection takes the
    /// call.
    NotBegun(Status),
    /// The connection broke before the reply was complete.
    Lost(Status),
    /// The service replied with an error.
    Answered(Status),
}

impl AttemptFailure {
    pub fn into_status(self) -> Status {
        match self {
            Self::NotSent(status) | Self::NotBegun(status) | Self::Lost(status) | Self::Answered(status) => status,
        }
    }

    /// Returns whether the connection is the cause, so that another address may succeed immediately.
    pub fn is_of_the_way(&self) -> bool {
        matches!(self, Self::NotSent(_) | Self::NotBegun(_) | Self::Lost(_))
    }

    /// Returns whether the call is worth another attempt and may be repeated.
    pub fn may_be_repeated(&self, repeat: Idempotency) -> bool {
        match self {
            Self::NotSent(_) | Self::NotBegun(_) => true,
            Self::Lost(_) => repeat == Idempotency::Safe,
            Self::Answered(status) => match (repeat, asked_pause(status)) {
                (Idempotency::Safe, asked) => asked.is_some() || status.code() == Code::Unavailable,
                // A reply with a retry delay changed nothing, except for this reason.
                (Idempotency::OnlyIfNotDone, asked) => {
                    asked.is_some() && status.get_details_error_info().is_some_and(|info| info.reason != COMMIT_UNKNOWN)
                }
            },
        }
    }

    /// Returns the pause after `failed` attempts; `random` is from 0 to 1.
    pub fn pause(&self, failed: u32, random: f64) -> Duration {
        let doubled = PAUSE_FIRST.saturating_mul(1 << failed.saturating_sub(1).min(16)).min(PAUSE_MAX);
        let own = doubled.mul_f64(0.5 + random / 2.0);
        match self {
            Self::Answered(status) => {
                let asked = asked_pause(status).unwrap_or_default().min(PAUSE_ASKED_MAX);
                // At least the requested pause, spread so that callers do not repeat simultaneously.
                own.max(asked.mul_f64(1.0 + random / 4.0))
            }
            Self::NotSent(_) | Self::NotBegun(_) | Self::Lost(_) => own,
        }
    }
}

/// Returns the retry delay that the service requests.
fn asked_pause(status: &Status) -> Option<Duration> {
    status.get_details_retry_info()?.retry_delay
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    fn answered(code: Code, reason: &str, retry: Option<Duration>) -> AttemptFailure {
        let mut details = ErrorDetails::new();
        details.set_error_info(reason, "linkis.rm", [("a", "b")].map(|(k, v)| (k.to_owned(), v.to_owned())));
        if retry.is_some() {
            details.set_retry_info(retry);
        }
        AttemptFailure::Answered(Status::with_error_details(code, "text", details))
    }

    #[test]
    fn retry_table_matches_failures() {
        let soon = Some(Duration::from_millis(200));
        let broken = || Status::unavailable("broken");
        for (failure, safe, other) in [
            (AttemptFailure::NotSent(broken()), true, true),
            (AttemptFailure::NotBegun(broken()), true, true),
            (AttemptFailure::Lost(broken()), true, false),
            (answered(Code::Unavailable, "DATABASE_UNAVAILABLE", soon), true, true),
            (answered(Code::ResourceExhausted, "OVERLOADED", soon), true, true),
            (answered(Code::ResourceExhausted, "TOO_MANY_WAITING", None), false, false),
            (answered(Code::Aborted, "LOCK_TIMEOUT", soon), true, true),
            (answered(Code::Unavailable, "NOT_BEGUN", soon), true, true),
            (answered(Code::Unavailable, "COMMIT_UNKNOWN", soon), true, false),
            (answered(Code::Unknown, "COMMIT_UNKNOWN", None), false, false),
            (answered(Code::Aborted, "LIMIT_CHANGED", None), false, false),
            (answered(Code::Aborted, "REMOVED_FROM_QUEUE", None), false, false),
            (answered(Code::Aborted, "POSITION_TAKEN_OVER", None), false, false),
            (answered(Code::NotFound, "TICKET_NOT_FOUND", None), false, false),
            // Reply of a gateway.
            (AttemptFailure::Answered(Status::unavailable("no upstream")), true, false),
            (AttemptFailure::Answered(Status::deadline_exceeded("late")), false, false),
        ] {
            let decided =
                (failure.may_be_repeated(Idempotency::Safe), failure.may_be_repeated(Idempotency::OnlyIfNotDone));
            assert_eq!(decided, (safe, other), "{failure:?}");
        }
    }

    #[test]
    fn retry_pauses_grow_with_jitter_above_server_minimum() {
        let lost = AttemptFailure::Lost(Status::unavailable("broken"));
        let pauses = |random| [1, 2, 5, 6, 100].map(|failed| lost.pause(failed, random).as_millis());
        assert_eq!(pauses(0.0), [50, 100, 800, 1000, 1000]);
        assert_eq!(pauses(1.0), [100, 200, 1600, 2000, 2000]);
        let asked = |seconds| answered(Code::Unavailable, "X", Some(Duration::from_secs(seconds)));
        assert_eq!([0.0, 1.0].map(|random| asked(4).pause(1, random).as_millis()), [4000, 5000]);
        assert_eq!(asked(1 << 40).pause(1, 0.0), PAUSE_ASKED_MAX);
        assert_eq!(asked(0).pause(6, 1.0), PAUSE_MAX);
    }
}
