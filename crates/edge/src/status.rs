//! gRPC statuses: the code, the reason and the details of each error.
//!
//! A status travels in headers, of which clients accept 8 KB, so every part of it has a bound. No other module builds
//! the status of an [`Error`]. Callers: the edge and the services, through `From<Error>`.
//!
//! - `facts`: the fields of an error, for `ErrorInfo.metadata`.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use rm_model::{
    access::{JwtRejection, Unauthenticated},
    operation::Rejection,
    queue::QueueError,
    refusal::Shortfall,
};
use rm_service::error::{Error, ExternalError};

mod facts;

/// Domain of all reasons.
const DOMAIN: &str = "linkis.rm";

/// Retry delay after a lock timeout or an overload.
const RETRY_SOON: Duration = Duration::from_millis(200);

/// Retry delay while the database is unavailable.
const RETRY_LATER: Duration = Duration::from_secs(2);

/// Maximum length of the text of a status, in bytes. A header may need three times as many.
const TEXT_BYTES_MAX: usize = 1024;

/// Maximum length of the details of a status with its text, in bytes. Their header needs a third more.
const DETAILS_BYTES_MAX: usize = 3 * 1024;

/// Maximum length of one item of the details, in bytes: a field, a problem, a scope, a shortfall.
const DETAIL_BYTES_MAX: usize = 512;

/// Bytes of the details for the reason and for the encoding of reason and text.
const FRAME_BYTES: usize = 256;

/// Maximum number of fields of `ErrorInfo.metadata`, maximum length of each in bytes, and bytes of its encoding.
const FACTS_MAX: usize = 16;
const FACT_BYTES_MAX: usize = 256;
const FACT_FRAME_BYTES: usize = 16;

/// Bytes of the encoding of one shortfall.
const SHORTFALL_FRAME_BYTES: usize = 16;

/// Truncates a text at a character boundary.
fn cut(mut text: String, most: usize) -> String {
    const ELLIPSIS: &str = "…";
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most.saturating_sub(ELLIPSIS.len())));
        text.push_str(ELLIPSIS);
    }
    text
}

/// Converts an error to a status. A defect, and a fault of the caller with a server's code, is attached as source:
/// the edge logs the one and marks the other.
pub fn to_status(error: impl Into<Error>) -> Status {
    let error = error.into();
    let (code, reason, hint) = classify(&error);
    let text = cut(error.to_string(), TEXT_BYTES_MAX);
    let mut left = DETAILS_BYTES_MAX - FRAME_BYTES - text.len();
    let mut details = ErrorDetails::new();
    if let Hint::Field(field, problem) = &hint {
        let (field, problem) = (cut(field.clone(), DETAIL_BYTES_MAX), cut(problem.clone(), DETAIL_BYTES_MAX));
        left = left.saturating_sub(field.len() + problem.len());
        details.add_bad_request_violation(field, problem);
    }
    details.set_error_info(reason, DOMAIN, metadata(&error, &mut left));
    match hint {
        Hint::None | Hint::Field(..) => {}
        Hint::Retry(after) => {
            details.set_retry_info(Some(after));
        }
        Hint::Shortfalls(shortfalls) => {
            for (scope, description) in shortfalls.into_iter().map(violation) {
                // The first shortfalls that fit. A response has all of them.
                let Some(rest) = left.checked_sub(scope.len() + description.len() + SHORTFALL_FRAME_BYTES) else {
                    break;
                };
                details.add_quota_failure_violation(scope, description);
                left = rest;
            }
        }
    }
    let mut status = Status::with_error_details(code, text, details);
    if code == Code::Internal || error.is_fault_of_caller() {
        status.set_source(Arc::new(error));
    }
    status
}

/// Returns the fields of an error that fit into `left` bytes, and reduces `left`.
fn metadata(error: &Error, left: &mut usize) -> HashMap<String, String> {
    let mut metadata = HashMap::new();
    for (field, value) in facts::of(error).into_iter().take(FACTS_MAX) {
        let value = cut(value, FACT_BYTES_MAX);
        if let Some(rest) = left.checked_sub(field.len() + value.len() + FACT_FRAME_BYTES) {
            metadata.insert(field.to_owned(), value);
            *left = rest;
        }
    }
    metadata
}

/// Returns the scope and the text of a shortfall.
fn violation(short: Shortfall) -> (String, String) {
    let Shortfall { scope, dimension, requested, available, max, .. } = short;
    let description = format!("{dimension}: requested {requested}, available {available}, max {max}");
    (cut(scope, DETAIL_BYTES_MAX), cut(description, DETAIL_BYTES_MAX))
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
        Error::Unauthenticated(error) => (Code::Unauthenticated, unauthenticated(*error), Hint::None),
        Error::Denied(_) => (Code::PermissionDenied, "ROLE_DENIED", Hint::None),
        Error::NoSuchMethod => (Code::Unimplemented, "NO_SUCH_METHOD", Hint::None),
        Error::LockTimeout => (Code::Aborted, "LOCK_TIMEOUT", Hint::Retry(RETRY_SOON)),
        Error::NotBegun => (Code::Unavailable, "NOT_BEGUN", Hint::Retry(RETRY_SOON)),
        Error::Overloaded => (Code::ResourceExhausted, "OVERLOADED", Hint::Retry(RETRY_SOON)),
        Error::TooManyBytes => (Code::ResourceExhausted, "OVERLOADED", Hint::Retry(RETRY_SOON)),
        Error::MessageTooLarge { .. } => (Code::ResourceExhausted, "MESSAGE_TOO_LARGE", Hint::None),
        Error::CompressedFlag(_) => (Code::Internal, "COMPRESSED_FLAG", Hint::None),
        Error::NoMessage => (Code::Unimplemented, "NO_MESSAGE", Hint::None),
        Error::DeadlineExpired => (Code::DeadlineExceeded, "DEADLINE_EXPIRED", Hint::None),
        Error::BodyTimeout(_) => (Code::DeadlineExceeded, "BODY_TIMEOUT", Hint::None),
        Error::Unavailable(_) => (Code::Unavailable, "DATABASE_UNAVAILABLE", Hint::Retry(RETRY_LATER)),
        Error::CommitUnknown => (Code::Unavailable, "COMMIT_UNKNOWN", Hint::Retry(RETRY_LATER)),
        // No client retries this code automatically: a retry would be a second grant.
        Error::GrantUnknown { .. } => (Code::Unknown, "COMMIT_UNKNOWN", Hint::None),
        Error::External(external) => classify_external(external),
        // Another instance may run a later release.
        Error::Outdated(_) => (Code::Unavailable, "OUTDATED_RELEASE", Hint::Retry(RETRY_LATER)),
        Error::PositionTooOld { .. } => (Code::OutOfRange, "POSITION_TOO_OLD", Hint::None),
        Error::PositionUnknown => (Code::OutOfRange, "POSITION_UNKNOWN", Hint::None),
        Error::FollowerTooSlow => (Code::ResourceExhausted, "FOLLOWER_TOO_SLOW", Hint::Retry(RETRY_SOON)),
        Error::ShuttingDown => (Code::Unavailable, "SHUTTING_DOWN", Hint::Retry(RETRY_SOON)),
        Error::Internal(_) => (Code::Internal, "INTERNAL", Hint::None),
    }
}

fn unauthenticated(error: Unauthenticated) -> &'static str {
    match error {
        Unauthenticated::Missing => "TOKEN_MISSING",
        Unauthenticated::Unknown => "TOKEN_UNKNOWN",
        Unauthenticated::Expired => "TOKEN_EXPIRED",
        Unauthenticated::Revoked => "TOKEN_REVOKED",
        Unauthenticated::CertificateExpired => "CERTIFICATE_EXPIRED",
        Unauthenticated::Jwt(jwt) => bad_jwt(jwt),
    }
}

fn bad_jwt(jwt: JwtRejection) -> &'static str {
    match jwt {
        JwtRejection::TooLarge => "JWT_TOO_LARGE",
        JwtRejection::Malformed => "JWT_MALFORMED",
        JwtRejection::Algorithm => "JWT_ALGORITHM",
        JwtRejection::Issuer => "JWT_ISSUER",
        JwtRejection::Audience => "JWT_AUDIENCE",
        JwtRejection::UnknownKey => "JWT_KEY_UNKNOWN",
        JwtRejection::Signature => "JWT_SIGNATURE",
        JwtRejection::NotYet => "JWT_NOT_YET_VALID",
        JwtRejection::Expired => "JWT_EXPIRED",
        JwtRejection::Withdrawn => "JWT_WITHDRAWN",
    }
}

fn classify_external(error: &ExternalError) -> (Code, &'static str, Hint) {
    match error {
        ExternalError::NoSuchProvider { .. } | ExternalError::NoProviderFor { .. } => {
            (Code::NotFound, "NO_SUCH_PROVIDER", Hint::None)
        }
        // Retrying the unchanged call does not help.
        ExternalError::Changed { .. } => (Code::Aborted, "PROVIDER_CHANGED", Hint::None),
        ExternalError::LabelsTaken { .. } => (Code::AlreadyExists, "PROVIDER_LABELS_TAKEN", Hint::None),
        ExternalError::TooMany => (Code::FailedPrecondition, "TOO_MANY_PROVIDERS", Hint::None),
        ExternalError::Queue { error: QueueError::NotFound { .. }, .. } => {
            (Code::NotFound, "NO_SUCH_QUEUE", Hint::None)
        }
        ExternalError::Queue { error, .. } => {
            (Code::InvalidArgument, "AMBIGUOUS_QUEUE", Hint::Field("queue_name".into(), error.to_string()))
        }
        ExternalError::Fetch { error, .. } if error.may_pass() => {
            (Code::Unavailable, "EXTERNAL_UNAVAILABLE", Hint::Retry(RETRY_LATER))
        }
        ExternalError::Fetch { .. } => (Code::FailedPrecondition, "EXTERNAL_UNAVAILABLE", Hint::None),
    }
}

fn classify_rejection(rejection: &Rejection) -> (Code, &'static str, Hint) {
    match rejection {
        Rejection::EmNotRegistered(_) => (Code::NotFound, "EM_NOT_REGISTERED", Hint::None),
        Rejection::NoEmMatches(_) => (Code::NotFound, "NO_EM_MATCHES", Hint::None),
        Rejection::NoEmAvailable { .. } => (Code::NotFound, "NO_EM_AVAILABLE", Hint::None),
        Rejection::StaleReport { .. } => (Code::FailedPrecondition, "STALE_REPORT", Hint::None),
        Rejection::StaleEpoch { .. } => (Code::FailedPrecondition, "STALE_EPOCH", Hint::None),
        Rejection::EpochAhead { registered } => {
            let problem = format!("is higher than that of the registration, {registered}; give that one");
            (Code::InvalidArgument, "INVALID_FIELD", Hint::Field("epoch".into(), problem))
        }
        Rejection::EmHasTickets { .. } => (Code::FailedPrecondition, "EM_HAS_TICKETS", Hint::None),
        Rejection::Unanswerable { field, source, .. } => {
            (Code::InvalidArgument, "UNANSWERABLE_RESOURCE", Hint::Field((*field).into(), source.to_string()))
        }
        Rejection::OtherQueue { provided, asked, .. } => {
            let problem = format!("is of the queue or namespace {asked:?}; the EM provides {provided:?}");
            (Code::InvalidArgument, "UNANSWERABLE_RESOURCE", Hint::Field("resource".into(), problem))
        }
        Rejection::OtherUse { source } => {
            (Code::InvalidArgument, "UNANSWERABLE_RESOURCE", Hint::Field("used".into(), source.to_string()))
        }
        Rejection::LabelRequired { .. } => (Code::FailedPrecondition, "LABEL_REQUIRED", Hint::None),
        Rejection::EmReserved { .. } => (Code::FailedPrecondition, "EM_RESERVED", Hint::None),
        Rejection::EmDraining { .. } => (Code::FailedPrecondition, "EM_DRAINING", Hint::None),
        Rejection::LabelMissing { key, .. } => {
            (Code::InvalidArgument, "LABEL_MISSING", Hint::Field(key.clone(), rejection.to_string()))
        }
        Rejection::CapNotCounted { .. } => {
            (Code::FailedPrecondition, "CAP_NOT_COUNTED", Hint::Field("caps".into(), rejection.to_string()))
        }
        Rejection::RequestIdReused(_) => (Code::AlreadyExists, "REQUEST_ID_REUSED", Hint::None),
        Rejection::TicketEnded { .. } | Rejection::AdoptedTooLate(_) => {
            (Code::FailedPrecondition, "TICKET_ENDED", Hint::None)
        }
        Rejection::TicketExists { .. } => (Code::AlreadyExists, "TICKET_EXISTS", Hint::None),
        // No caller gets this rejection: the request enters the wait queue again, at its end.
        Rejection::PlaceLost => (Code::Aborted, "PLACE_LOST", Hint::Retry(RETRY_SOON)),
        Rejection::TicketNotFound { .. } | Rejection::NoTicketOfEngine(_) => {
            (Code::NotFound, "TICKET_NOT_FOUND", Hint::None)
        }
        Rejection::ManyTicketsOfEngine(_) => (Code::FailedPrecondition, "MANY_TICKETS", Hint::None),
        Rejection::AlreadyInited { .. } => (Code::FailedPrecondition, "TICKET_ALREADY_INITED", Hint::None),
        Rejection::InitedOtherwise { .. } => (Code::FailedPrecondition, "TICKET_ALREADY_INITED", Hint::None),
        Rejection::NotInited { .. } => (Code::FailedPrecondition, "TICKET_NOT_INITED", Hint::None),
        Rejection::NotEnough(refusal) | Rejection::NoMore(refusal) => {
            (Code::FailedPrecondition, "NOT_ENOUGH_RESOURCE", Hint::Shortfalls(refusal.shortfalls.clone()))
        }
        Rejection::TooManyLabelSets { .. } => (Code::FailedPrecondition, "TOO_MANY_LABEL_SETS", Hint::None),
        Rejection::AlreadyHeld { .. } => (Code::FailedPrecondition, "ALREADY_HELD", Hint::None),
        Rejection::TooManyHolds { .. } => (Code::FailedPrecondition, "TOO_MANY_HOLDS", Hint::None),
        Rejection::ScopeNotCounted { .. } => (Code::NotFound, "SCOPE_NOT_COUNTED", Hint::None),
        Rejection::NoSuchLimit(_) => (Code::NotFound, "NO_SUCH_LIMIT", Hint::None),
        // Retrying the unchanged call does not help.
        Rejection::LimitChanged { .. } => (Code::Aborted, "LIMIT_CHANGED", Hint::None),
        Rejection::Overflow { field, source } => {
            (Code::InvalidArgument, "INVALID_FIELD", Hint::Field((*field).into(), source.to_string()))
        }
        Rejection::Inconsistent { .. } => (Code::Internal, "INTERNAL", Hint::None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_model::{em::EmInstance, name::FieldError, refusal::Refusal, resource::Dimension};

    #[test]
    fn texts_are_cut_at_character_boundaries() {
        assert_eq!(cut("用户".repeat(2), 12), "用户用户");
        for most in 3..12 {
            let text = cut("用户用户".to_owned(), most);
            assert!(text.len() <= most && text.ends_with('…'), "{most}: {text}");
        }
    }

    #[test]
    fn status_fits_into_headers() {
        let long = "用".repeat(5000);
        let shortfall = Shortfall {
            scope: long.clone(),
            kind: rm_model::scope_kind::ScopeKind::Labels,
            dimension: Dimension::Custom(long.as_str().into()),
            requested: i64::MAX,
            available: i64::MIN,
            ahead: i64::MAX,
            max: i64::MAX,
            rule: long.clone(),
        };
        let shortfalls = vec![shortfall; 300];
        let refusal = Refusal { shortfalls, code: 1, reason: long.clone(), never_fits: false };
        let errors = [
            Error::Rejected(Box::new(Rejection::NotEnough(Box::new(refusal)))),
            Error::Rejected(Box::new(Rejection::RequestIdReused(long.clone()))),
            FieldError::new(long.clone(), long).into(),
        ];
        for error in errors {
            let status = to_status(error);
            assert!(status.message().len() <= TEXT_BYTES_MAX && status.message().ends_with('…'), "{status:?}");
            assert!(
                (TEXT_BYTES_MAX..=DETAILS_BYTES_MAX).contains(&status.details().len()),
                "{}",
                status.details().len()
            );
            let names_what = status.get_details_quota_failure().is_some_and(|quota| !quota.violations.is_empty())
                || status.get_details_bad_request().is_some()
                || status.code() == Code::AlreadyExists;
            assert!(names_what && status.get_details_error_info().is_some(), "{status:?}");
        }
    }

    #[test]
    fn status_details_fit_into_headers() {
        let em = EmInstance::parse("em", &"用".repeat(255), &"h".repeat(255)).unwrap();
        let rejection = Rejection::LabelMissing { em, key: "用".repeat(255) };
        let status = to_status(Error::from(rejection));
        assert!(status.details().len() <= DETAILS_BYTES_MAX, "{}", status.details().len());
        let metadata = status.get_details_error_info().unwrap().metadata;
        assert!(metadata["label"].ends_with('…') && metadata.values().all(|value| value.len() <= FACT_BYTES_MAX));
        let em = EmInstance::parse("em", "ecm", &"h".repeat(255)).unwrap();
        let status = to_status(Error::from(Rejection::EmNotRegistered(em)));
        let metadata = status.get_details_error_info().unwrap().metadata;
        assert_eq!((metadata["em_application_name"].as_str(), metadata["em_instance"].len()), ("ecm", 255));
    }

    #[test]
    fn unknown_commit_is_not_retried_automatically() {
        let ticket_id = uuid::Uuid::from_u128(7);
        let status = to_status(Error::GrantUnknown { ticket_id });
        assert!(status.code() == Code::Unknown && status.get_details_retry_info().is_none(), "{status:?}");
        let info = status.get_details_error_info().unwrap();
        assert_eq!((info.reason.as_str(), &info.metadata["ticket_id"]), ("COMMIT_UNKNOWN", &ticket_id.to_string()));
        let status = to_status(Error::CommitUnknown);
        assert!(status.code() == Code::Unavailable && status.get_details_retry_info().is_some());
    }

    #[test]
    fn status_has_source_only_for_defects() {
        let source = |error: Error| std::error::Error::source(&to_status(error)).map(ToString::to_string);
        assert_eq!(source(Error::defect("broken")).as_deref(), Some("a defect of the service; see its log"));
        assert_eq!(source(FieldError::new("user", "is required").into()), None);
        assert_eq!(source(Error::Overloaded), None);
    }
}
