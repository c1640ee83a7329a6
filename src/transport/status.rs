//! From errors to gRPC statuses: the one place where a failure gets its code, its reason and its details.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::{
    domain::{operation::Rejection, refusal::Shortfall},
    error::Error,
};

/// The domain of all reasons.
const DOMAIN: &str = "linkis.rm";

/// When to try again after a lock was not to be had, or the server was too busy.
const RETRY_SOON: Duration = Duration::from_millis(200);

/// When to try again while the database is away.
const RETRY_LATER: Duration = Duration::from_secs(2);

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let (code, reason, hint) = classify(&error);
        let mut details = ErrorDetails::new();
        details.set_error_info(reason, DOMAIN, []);
        match hint {
            Hint::None => {}
            Hint::Field(field, problem) => {
                details.add_bad_request_violation(field, problem);
            }
            Hint::Retry(after) => {
                details.set_retry_info(Some(after));
            }
            Hint::Shortfalls(shortfalls) => {
                for short in shortfalls {
                    let Shortfall { dimension, requested, available, max, .. } = &short;
                    let told = format!("{dimension}: requested {requested}, available {available}, max {max}");
                    details.add_quota_failure_violation(short.scope, told);
                }
            }
        }
        Status::with_error_details(code, error.to_string(), details)
    }
}

enum Hint {
    None,
    Field(String, String),
    Retry(Duration),
    Shortfalls(Vec<Shortfall>),
}

fn classify(error: &Error) -> (Code, &'static str, Hint) {
    match error {
        Error::InvalidField(field) => {
            (Code::InvalidArgument, "INVALID_FIELD", Hint::Field(field.field.clone(), field.problem.clone()))
        }
        Error::Rejected(rejection) => classify_rejection(rejection),
        Error::LockTimeout => (Code::Aborted, "LOCK_TIMEOUT", Hint::Retry(RETRY_SOON)),
        Error::Overloaded => (Code::ResourceExhausted, "OVERLOADED", Hint::Retry(RETRY_SOON)),
        Error::TooManyBytes => (Code::ResourceExhausted, "OVERLOADED", Hint::Retry(RETRY_SOON)),
        Error::BodyTimeout(_) => (Code::DeadlineExceeded, "BODY_TIMEOUT", Hint::None),
        Error::Unavailable(_) => (Code::Unavailable, "DATABASE_UNAVAILABLE", Hint::Retry(RETRY_LATER)),
        Error::CommitUnknown => (Code::Unavailable, "COMMIT_UNKNOWN", Hint::Retry(RETRY_LATER)),
        Error::ShuttingDown => (Code::Unavailable, "SHUTTING_DOWN", Hint::Retry(RETRY_SOON)),
        Error::Internal(_) => (Code::Internal, "INTERNAL", Hint::None),
    }
}

fn classify_rejection(rejection: &Rejection) -> (Code, &'static str, Hint) {
    match rejection {
        Rejection::EmNotRegistered(_) => (Code::NotFound, "EM_NOT_REGISTERED", Hint::None),
        Rejection::NoEmMatches(_) => (Code::NotFound, "NO_EM_MATCHES", Hint::None),
        Rejection::NoEmAvailable { .. } => (Code::NotFound, "NO_EM_AVAILABLE", Hint::None),
        Rejection::StaleReport { .. } => (Code::FailedPrecondition, "STALE_REPORT", Hint::None),
        Rejection::EmHasTickets { .. } => (Code::FailedPrecondition, "EM_HAS_TICKETS", Hint::None),
        Rejection::Unanswerable { field, source, .. } => {
            (Code::InvalidArgument, "UNANSWERABLE_RESOURCE", Hint::Field((*field).into(), source.to_string()))
        }
        Rejection::OtherUse { source } => {
            (Code::InvalidArgument, "UNANSWERABLE_RESOURCE", Hint::Field("used".into(), source.to_string()))
        }
        Rejection::RequestIdReused(_) => (Code::AlreadyExists, "REQUEST_ID_REUSED", Hint::None),
        Rejection::PlaceLost => (Code::Aborted, "PLACE_LOST", Hint::Retry(RETRY_SOON)),
        Rejection::TicketNotFound { .. } => (Code::NotFound, "TICKET_NOT_FOUND", Hint::None),
        Rejection::TicketNotOwned { .. } => (Code::PermissionDenied, "TICKET_NOT_OWNED", Hint::None),
        Rejection::AlreadyInited { .. } => (Code::FailedPrecondition, "TICKET_ALREADY_INITED", Hint::None),
        Rejection::NotEnough(refusal) => {
            (Code::FailedPrecondition, "NOT_ENOUGH_RESOURCE", Hint::Shortfalls(refusal.shortfalls.clone()))
        }
        Rejection::NoSuchLimit(_) => (Code::NotFound, "NO_SUCH_LIMIT", Hint::None),
        Rejection::Overflow { field, source } => {
            (Code::InvalidArgument, "INVALID_FIELD", Hint::Field((*field).into(), source.to_string()))
        }
        Rejection::Inconsistent { .. } => (Code::Internal, "INTERNAL", Hint::None),
    }
}
