//! Fields of errors, for `ErrorInfo.metadata`: the values that the error text states in words.
//!
//! Programs read these fields and need not parse texts. The caller bounds their number and length. Caller: `status`.

use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    em::EmInstance,
    operation::Rejection,
    queue::QueueError,
    refusal::Refusal,
    report::ReportNumber,
    ticket::{EndedTicket, EngineInstance},
    timestamp::rfc3339,
};
use rm_service::error::{Error, ExternalError};

/// Name and value of a field.
pub type Fact = (&'static str, String);

/// Returns the fields of `error`, the most important first. Neither their number nor their length is bounded.
pub fn of(error: &Error) -> Vec<Fact> {
    match error {
        Error::Rejected(rejection) => of_rejection(rejection),
        Error::GrantUnknown { ticket_id } => vec![ticket(*ticket_id)],
        Error::External(external) => of_external(external),
        Error::PositionTooOld { oldest } => vec![("oldest_position", oldest.clone())],
        Error::MessageTooLarge { limit } => vec![("max_bytes", limit.to_string())],
        Error::BodyTimeout(longest) => vec![("timeout", humantime::format_duration(*longest).to_string())],
        Error::Denied(denied) => vec![("role", denied.roles.clone()), ("needs", denied.needs.clone())],
        // `BadRequest` names the field of an invalid one. The other errors have only their reason.
        Error::InvalidField(_)
        | Error::Unauthenticated(_)
        | Error::NoSuchMethod
        | Error::LockTimeout
        | Error::NotBegun
        | Error::Overloaded
        | Error::TooManyBytes
        | Error::CompressedFlag(_)
        | Error::NoMessage
        | Error::DeadlineExpired
        | Error::Unavailable(_)
        | Error::CommitUnknown
        | Error::Outdated(_)
        | Error::PositionUnknown
        | Error::FollowerTooSlow
        | Error::ShuttingDown
        | Error::Internal(_) => vec![],
    }
}

/// Returns the fields of an error of an external cluster, with the code of Linkis if it has one.
fn of_external(error: &ExternalError) -> Vec<Fact> {
    let provider = |name: &str| ("provider", name.to_owned());
    let code = |code: &str| ("code", code.to_owned());
    match error {
        ExternalError::NoSuchProvider { resource_type, name } => {
            vec![code("110013"), ("resource_type", resource_type.clone()), provider(name)]
        }
        ExternalError::NoProviderFor { resource_type } => {
            vec![code("110013"), ("resource_type", resource_type.clone())]
        }
        ExternalError::Changed { name } | ExternalError::LabelsTaken { name } => vec![provider(name)],
        ExternalError::TooMany => vec![],
        ExternalError::Queue { provider: name, error } => {
            let (QueueError::NotFound { name: queue } | QueueError::Ambiguous { name: queue, .. }) = error;
            vec![code("11006"), provider(name), ("queue", queue.clone())]
        }
        ExternalError::Fetch { provider: name, error } => {
            let class = error.class();
            vec![
                code(if class == "not_active" { "11007" } else { "11006" }),
                provider(name),
                ("failure", class.to_owned()),
            ]
        }
    }
}

fn of_rejection(rejection: &Rejection) -> Vec<Fact> {
    match rejection {
        Rejection::EmNotRegistered(em) | Rejection::Unanswerable { em, .. } => em_names(em).into(),
        Rejection::NoEmMatches(wanted) => vec![("wanted", wanted.clone())],
        Rejection::NoEmAvailable { matching } => vec![("matching", matching.to_string())],
        Rejection::StaleReport { em, registered, last } => of_em(em, stale_report(*registered, *last)),
        Rejection::StaleEpoch { em, told, registered } => {
            of_em(em, [("epoch", told.to_string()), ("current_epoch", registered.to_string())])
        }
        Rejection::EpochAhead { registered } => vec![("current_epoch", registered.to_string())],
        Rejection::EmHasTickets { em, current, wanted } => {
            of_em(em, [("current_type", current.to_string()), ("wanted_type", wanted.to_string())])
        }
        Rejection::LabelRequired { em, key, value } | Rejection::EmReserved { em, key, value } => {
            of_em(em, [("label", key.clone()), ("value", value.clone())])
        }
        Rejection::EmDraining { em, drain } => {
            let (by, since) = (drain.by.to_string(), rfc3339(drain.since));
            of_em(em, [("drain_time", since), ("drained_by", by), ("reason", drain.reason.to_string())])
        }
        Rejection::LabelMissing { em, key } => of_em(em, [("label", key.clone())]),
        Rejection::CapNotCounted { em, keys } => of_em(em, [("labels", keys.clone())]),
        Rejection::OtherQueue { em, provided, asked } => {
            of_em(em, [("provided", provided.clone()), ("asked", asked.clone())])
        }
        Rejection::RequestIdReused(request_id) => vec![("request_id", request_id.clone())],
        Rejection::TicketEnded { request_id, ended } => {
            let mut facts = how_it_ended(ended);
            facts.push(("request_id", request_id.clone()));
            facts
        }
        Rejection::AdoptedTooLate(ended) | Rejection::TicketNotFound { ended: Some(ended), .. } => how_it_ended(ended),
        Rejection::TicketExists { ticket_id, differs } => vec![ticket(*ticket_id), ("differs", differs.clone())],
        Rejection::NoTicketOfEngine(engine) | Rejection::ManyTicketsOfEngine(engine) => engine_names(engine).into(),
        Rejection::AlreadyInited { ticket_id, engine } => {
            [ticket(*ticket_id)].into_iter().chain(engine_names(engine)).collect()
        }
        Rejection::TicketNotFound { ticket_id, ended: None }
        | Rejection::InitedOtherwise { ticket_id }
        | Rejection::NotInited { ticket_id } => vec![ticket(*ticket_id)],
        Rejection::NotEnough(refusal) | Rejection::NoMore(refusal) => shortfall(refusal),
        Rejection::ScopeNotCounted { keys } => vec![("labels", keys.clone())],
        Rejection::NoSuchLimit(limit) => vec![("limit", limit.clone())],
        Rejection::TooManyLabelSets { most } | Rejection::TooManyHolds { most } => vec![("max", most.to_string())],
        Rejection::AlreadyHeld { taken, .. } => taken.as_ref().map_or_else(Vec::new, |taken| {
            vec![
                ("held_by", taken.by.to_string()),
                ("hold_until", rfc3339(taken.until)),
                ("reason", taken.reason.to_string()),
            ]
        }),
        Rejection::LimitChanged { limit, last } => limit_changed(limit, last.as_ref()),
        Rejection::OtherUse { .. }
        | Rejection::PlaceLost
        | Rejection::Overflow { .. }
        | Rejection::Inconsistent { .. } => vec![],
    }
}

fn ticket(ticket_id: Uuid) -> Fact {
    ("ticket_id", ticket_id.to_string())
}

fn em_names(em: &EmInstance) -> [Fact; 2] {
    [("em_application_name", em.application_name.to_string()), ("em_instance", em.instance.to_string())]
}

/// Returns `more` and the names of the EM.
fn of_em(em: &EmInstance, more: impl IntoIterator<Item = Fact>) -> Vec<Fact> {
    more.into_iter().chain(em_names(em)).collect()
}

fn engine_names(engine: &EngineInstance) -> [Fact; 2] {
    [("engine_application_name", engine.application_name.to_string()), ("engine_instance", engine.instance.to_string())]
}

fn how_it_ended(ended: &EndedTicket) -> Vec<Fact> {
    vec![ticket(ended.id), ("ended", ended.end.as_str().to_owned()), ("end_time", rfc3339(ended.at))]
}

fn stale_report(registered: i64, last: Option<ReportNumber>) -> Vec<Fact> {
    let last = last.filter(|last| last.epoch == registered);
    let sequence = last.map(|last| ("last_sequence", last.sequence.to_string()));
    [("current_epoch", registered.to_string())].into_iter().chain(sequence).collect()
}

/// Returns the first shortfall, as `NotEnoughResource` does. `QuotaFailure` has all of them.
fn shortfall(refusal: &Refusal) -> Vec<Fact> {
    let Some(short) = refusal.shortfalls.first() else { return vec![] };
    vec![
        ("dimension", short.dimension.to_string()),
        ("requested", short.requested.to_string()),
        ("available", short.available.to_string()),
        ("max", short.max.to_string()),
        ("never_fits", refusal.never_fits.to_string()),
        ("scope", short.scope.clone()),
    ]
}

fn limit_changed(limit: &str, last: Option<&(String, OffsetDateTime)>) -> Vec<Fact> {
    let mut facts = vec![("limit", limit.to_owned())];
    if let Some((by, at)) = last {
        facts.extend([("updated_by", by.clone()), ("update_time", rfc3339(*at))]);
    }
    facts
}
