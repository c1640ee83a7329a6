//! gRPC statuses: the code, the reason and the details of each error.
//!
//! A status travels in headers, of which clients accept 8 KB, so every part of it has a bound. No other module builds
//! the status of an [`Error`]. Callers: the edge and the services, through [`to_status`].
//!
//! - `rejection`: the table of rejections.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use uuid::Uuid;

use rm_model::{
    access::{JwtRejection, Unauthenticated},
    queue::QueueError,
    refusal::Shortfall,
};
use rm_service::error::{Error, ExternalError};

mod rejection;

/// Name and value of a field of `ErrorInfo.metadata`. Programs read these fields and need not parse texts.
type Fact = (&'static str, String);

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
    let Classification { code, reason, hint, facts } = classify(&error);
    let text = cut(error.to_string(), TEXT_BYTES_MAX);
    let mut left = DETAILS_BYTES_MAX - FRAME_BYTES - text.len();
    let mut details = ErrorDetails::new();
    if let Hint::Field(field, problem) = &hint {
        let (field, problem) = (cut(field.clone(), DETAIL_BYTES_MAX), cut(problem.clone(), DETAIL_BYTES_MAX));
        left = left.saturating_sub(field.len() + problem.len());
        details.add_bad_request_violation(field, problem);
    }
    details.set_error_info(reason, DOMAIN, metadata(facts, &mut left));
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

/// Returns the fields that fit into `left` bytes, and reduces `left`.
fn metadata(facts: Vec<Fact>, left: &mut usize) -> HashMap<String, String> {
    let mut metadata = HashMap::new();
    for (field, value) in facts.into_iter().take(FACTS_MAX) {
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

/// Code, reason, hint and fields of an error.
struct Classification {
    code: Code,
    reason: &'static str,
    hint: Hint,
    facts: Vec<Fact>,
}

impl Classification {
    fn new(code: Code, reason: &'static str, facts: impl Into<Vec<Fact>>) -> Self {
        Self { code, reason, hint: Hint::None, facts: facts.into() }
    }

    fn missing(reason: &'static str, facts: impl Into<Vec<Fact>>) -> Self {
        Self::new(Code::NotFound, reason, facts)
    }

    fn state(reason: &'static str, facts: impl Into<Vec<Fact>>) -> Self {
        Self::new(Code::FailedPrecondition, reason, facts)
    }

    fn invalid(reason: &'static str, field: &str, problem: String, facts: impl Into<Vec<Fact>>) -> Self {
        Self::new(Code::InvalidArgument, reason, facts).with(Hint::Field(field.to_owned(), problem))
    }

    fn with(self, hint: Hint) -> Self {
        Self { hint, ..self }
    }
}

fn classify(error: &Error) -> Classification {
    use Classification as C;
    match error {
        Error::Rejected(rejection) => rejection::classify(rejection),
        Error::InvalidField(field) => C::invalid("INVALID_FIELD", &field.field, field.problem.clone(), []),
        Error::Unauthenticated(error) => C::new(Code::Unauthenticated, unauthenticated(*error), []),
        Error::Denied(denied) => {
            let facts = [("role", denied.roles.clone()), ("needs", denied.needs.clone())];
            C::new(Code::PermissionDenied, "ROLE_DENIED", facts)
        }
        Error::NoSuchMethod => C::new(Code::Unimplemented, "NO_SUCH_METHOD", []),
        Error::LockTimeout => C::new(Code::Aborted, "LOCK_TIMEOUT", []).with(Hint::Retry(RETRY_SOON)),
        Error::NotBegun => C::new(Code::Unavailable, "NOT_BEGUN", []).with(Hint::Retry(RETRY_SOON)),
        Error::Overloaded => C::new(Code::ResourceExhausted, "OVERLOADED", []).with(Hint::Retry(RETRY_SOON)),
        Error::TooManyBytes => C::new(Code::ResourceExhausted, "OVERLOADED", []).with(Hint::Retry(RETRY_SOON)),
        Error::MessageTooLarge { limit } => {
            C::new(Code::ResourceExhausted, "MESSAGE_TOO_LARGE", [("max_bytes", limit.to_string())])
        }
        Error::CompressedFlag(_) => C::new(Code::Internal, "COMPRESSED_FLAG", []),
        Error::NoMessage => C::new(Code::Unimplemented, "NO_MESSAGE", []),
        Error::DeadlineExpired => C::new(Code::DeadlineExceeded, "DEADLINE_EXPIRED", []),
        Error::BodyTimeout(longest) => {
            let timeout = humantime::format_duration(*longest).to_string();
            C::new(Code::DeadlineExceeded, "BODY_TIMEOUT", [("timeout", timeout)])
        }
        Error::Unavailable(_) => C::new(Code::Unavailable, "DATABASE_UNAVAILABLE", []).with(Hint::Retry(RETRY_LATER)),
        Error::CommitUnknown => C::new(Code::Unavailable, "COMMIT_UNKNOWN", []).with(Hint::Retry(RETRY_LATER)),
        // No client retries this code automatically: a retry would be a second grant.
        Error::GrantUnknown { ticket_id } => C::new(Code::Unknown, "COMMIT_UNKNOWN", [ticket(*ticket_id)]),
        Error::External(external) => classify_external(external),
        // Another instance may run a later release.
        Error::Outdated(_) => C::new(Code::Unavailable, "OUTDATED_RELEASE", []).with(Hint::Retry(RETRY_LATER)),
        Error::PositionTooOld { oldest } => {
            C::new(Code::OutOfRange, "POSITION_TOO_OLD", [("oldest_position", oldest.clone())])
        }
        Error::PositionUnknown => C::new(Code::OutOfRange, "POSITION_UNKNOWN", []),
        Error::FollowerTooSlow => {
            C::new(Code::ResourceExhausted, "FOLLOWER_TOO_SLOW", []).with(Hint::Retry(RETRY_SOON))
        }
        Error::ShuttingDown => C::new(Code::Unavailable, "SHUTTING_DOWN", []).with(Hint::Retry(RETRY_SOON)),
        Error::Internal(_) => C::new(Code::Internal, "INTERNAL", []),
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

/// Classifies an error of an external cluster. The field `code` is the code of Linkis.
fn classify_external(error: &ExternalError) -> Classification {
    use Classification as C;
    let provider = |name: &str| ("provider", name.to_owned());
    let code = |code: &str| ("code", code.to_owned());
    match error {
        ExternalError::NoSuchProvider { resource_type, name } => {
            let facts = [code("110013"), ("resource_type", resource_type.clone()), provider(name)];
            C::missing("NO_SUCH_PROVIDER", facts)
        }
        ExternalError::NoProviderFor { resource_type } => {
            C::missing("NO_SUCH_PROVIDER", [code("110013"), ("resource_type", resource_type.clone())])
        }
        // Retrying the unchanged call does not help.
        ExternalError::Changed { name } => C::new(Code::Aborted, "PROVIDER_CHANGED", [provider(name)]),
        ExternalError::LabelsTaken { name } => C::new(Code::AlreadyExists, "PROVIDER_LABELS_TAKEN", [provider(name)]),
        ExternalError::TooMany => C::state("TOO_MANY_PROVIDERS", []),
        ExternalError::Queue { provider: name, error } => {
            let facts = |queue: &str| [code("11006"), provider(name), ("queue", queue.to_owned())];
            match error {
                QueueError::NotFound { name: queue } => C::missing("NO_SUCH_QUEUE", facts(queue)),
                QueueError::Ambiguous { name: queue, .. } => {
                    C::invalid("AMBIGUOUS_QUEUE", "queue_name", error.to_string(), facts(queue))
                }
            }
        }
        ExternalError::Fetch { provider: name, error } => {
            let class = error.class();
            let linkis = if class == "not_active" { "11007" } else { "11006" };
            let facts = [code(linkis), provider(name), ("failure", class.to_owned())];
            match error.may_pass() {
                true => C::new(Code::Unavailable, "EXTERNAL_UNAVAILABLE", facts).with(Hint::Retry(RETRY_LATER)),
                false => C::state("EXTERNAL_UNAVAILABLE", facts),
            }
        }
    }
}

/// Returns the field of a ticket.
fn ticket(ticket_id: Uuid) -> Fact {
    ("ticket_id", ticket_id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_model::{em::EmInstance, name::FieldError, operation::Rejection, refusal::Refusal, resource::Dimension};

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
            idle_key: None,
            idle_amount: None,
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
