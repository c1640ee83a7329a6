//! Whether a call that failed is tried again, and when: pure decisions.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// The pause after the first failure; it doubles with each.
const PAUSE_FIRST: Duration = Duration::from_millis(100);

/// The longest pause, unless the service asks for a longer one, and the longest that it may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(2);
const PAUSE_ASKED_MAX: Duration = Duration::from_secs(30);

/// The one reason that leaves in doubt whether something was done although the service answered.
const COMMIT_UNKNOWN: &str = "COMMIT_UNKNOWN";

/// Whether a call may be made again when nobody knows whether it was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// Twice is once, and is answered alike.
    Safe,
    /// Not unless it surely was not carried out: a repetition would do more, or its answer would tell something else.
    OnlyIfNotDone,
}

/// How a try failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// It never left: there was no connection.
    NotSent(Status),
    /// It never left, or was not begun: its connection was being closed, as one is that has become old. Another takes it.
    NotBegun(Status),
    /// The connection broke before the answer was there.
    Lost(Status),
    /// The service answered so.
    Answered(Status),
}

impl Failure {
    pub fn into_status(self) -> Status {
        match self {
            Self::NotSent(status) | Self::NotBegun(status) | Self::Lost(status) | Self::Answered(status) => status,
        }
    }

    /// Whether the address is to blame, and another one may do better at once.
    pub fn is_of_the_way(&self) -> bool {
        matches!(self, Self::NotSent(_) | Self::NotBegun(_) | Self::Lost(_))
    }

    /// Whether the call is worth another try, and may have one.
    pub fn may_be_repeated(&self, repeat: Repeat) -> bool {
        match self {
            Self::NotSent(_) | Self::NotBegun(_) => true,
            Self::Lost(_) => repeat == Repeat::Safe,
            Self::Answered(status) => match (repeat, asked_pause(status)) {
                (Repeat::Safe, asked) => asked.is_some() || status.code() == Code::Unavailable,
                // Where trying again helps, nothing was changed, but for the one reason.
                (Repeat::OnlyIfNotDone, asked) => {
                    asked.is_some() && status.get_details_error_info().is_some_and(|info| info.reason != COMMIT_UNKNOWN)
                }
            },
        }
    }

    /// How long to wait before the next try after so many failed ones; `random` is from 0 to 1, another for each caller.
    pub fn pause(&self, failed: u32, random: f64) -> Duration {
        let doubled = PAUSE_FIRST.saturating_mul(1 << failed.saturating_sub(1).min(16)).min(PAUSE_MAX);
        let own = doubled.mul_f64(0.5 + random / 2.0);
        match self {
            Self::Answered(status) => {
                let asked = asked_pause(status).unwrap_or_default().min(PAUSE_ASKED_MAX);
                // Never sooner than asked for, and not all at once.
                own.max(asked.mul_f64(1.0 + random / 4.0))
            }
            Self::NotSent(_) | Self::NotBegun(_) | Self::Lost(_) => own,
        }
    }
}

/// What the service says when trying again helps.
fn asked_pause(status: &Status) -> Option<Duration> {
    status.get_details_retry_info()?.retry_delay
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    fn answered(code: Code, reason: &str, retry: Option<Duration>) -> Failure {
        let mut details = ErrorDetails::new();
        details.set_error_info(reason, "linkis.rm", [("a", "b")].map(|(k, v)| (k.to_owned(), v.to_owned())));
        if retry.is_some() {
            details.set_retry_info(retry);
        }
        Failure::Answered(Status::with_error_details(code, "text", details))
    }

    #[test]
    fn what_is_repeated() {
        let soon = Some(Duration::from_millis(200));
        let broken = || Status::unavailable("broken");
        for (failure, safe, other) in [
            (Failure::NotSent(broken()), true, true),
            (Failure::NotBegun(broken()), true, true),
            (Failure::Lost(broken()), true, false),
            (answered(Code::Unavailable, "DATABASE_UNAVAILABLE", soon), true, true),
            (answered(Code::ResourceExhausted, "OVERLOADED", soon), true, true),
            (answered(Code::Aborted, "LOCK_TIMEOUT", soon), true, true),
            (answered(Code::Unavailable, "NOT_BEGUN", soon), true, true),
            (answered(Code::Unavailable, "COMMIT_UNKNOWN", soon), true, false),
            (answered(Code::Unknown, "COMMIT_UNKNOWN", None), false, false),
            (answered(Code::Aborted, "LIMIT_CHANGED", None), false, false),
            (answered(Code::NotFound, "TICKET_NOT_FOUND", None), false, false),
            // A gateway's.
            (Failure::Answered(Status::unavailable("no upstream")), true, false),
            (Failure::Answered(Status::deadline_exceeded("late")), false, false),
        ] {
            let told = (failure.may_be_repeated(Repeat::Safe), failure.may_be_repeated(Repeat::OnlyIfNotDone));
            assert_eq!(told, (safe, other), "{failure:?}");
        }
    }

    #[test]
    fn pauses_grow_are_spread_and_no_shorter_than_asked_for() {
        let lost = Failure::Lost(Status::unavailable("broken"));
        let pauses = |random| [1, 2, 5, 6, 100].map(|failed| lost.pause(failed, random).as_millis());
        assert_eq!(pauses(0.0), [50, 100, 800, 1000, 1000]);
        assert_eq!(pauses(1.0), [100, 200, 1600, 2000, 2000]);
        let asked = |seconds| answered(Code::Unavailable, "X", Some(Duration::from_secs(seconds)));
        assert_eq!([0.0, 1.0].map(|random| asked(4).pause(1, random).as_millis()), [4000, 5000]);
        assert_eq!(asked(1 << 40).pause(1, 0.0), PAUSE_ASKED_MAX);
        assert_eq!(asked(0).pause(6, 1.0), PAUSE_MAX);
    }
}
