//! Table of rejections: code, reason, hint and fields of each. The text of a rejection is its own (`Display`).
//!
//! Invariant: code and reason of a rejection never change, because programs depend on both. Caller: `status`.

use time::OffsetDateTime;
use tonic::Code::{Aborted, AlreadyExists, Internal, PermissionDenied, ResourceExhausted};

use rm_model::{
    em::EmInstance,
    operation::Rejection,
    refusal::Refusal,
    report::ReportNumber,
    ticket::{EndedTicket, EngineInstance},
    timestamp::rfc3339,
};

use super::{Classification, Fact, Hint, RETRY_SOON, ticket};

#[expect(clippy::too_many_lines, reason = "a row for each rejection")]
pub(super) fn classify(rejection: &Rejection) -> Classification {
    use Classification as C;
    match rejection {
        Rejection::EmNotRegistered(em) => C::missing("EM_NOT_REGISTERED", of_em(em, [])),
        Rejection::NoEmMatches(wanted) => C::missing("NO_EM_MATCHES", [("wanted", wanted.clone())]),
        Rejection::NoEmAvailable { matching } => C::missing("NO_EM_AVAILABLE", [("matching", matching.to_string())]),
        Rejection::StaleReport { em, registered, last } => {
            C::state("STALE_REPORT", of_em(em, stale_report(*registered, *last)))
        }
        Rejection::StaleEpoch { em, epoch, registered } => {
            let epochs = [("epoch", epoch.to_string()), ("current_epoch", registered.to_string())];
            C::state("STALE_EPOCH", of_em(em, epochs))
        }
        Rejection::EpochAhead { registered } => {
            let problem = format!("is higher than that of the registration, {registered}; give that one");
            C::invalid("INVALID_FIELD", "epoch", problem, [("current_epoch", registered.to_string())])
        }
        Rejection::EmHasTickets { em, current, wanted } => {
            let types = [("current_type", current.to_string()), ("wanted_type", wanted.to_string())];
            C::state("EM_HAS_TICKETS", of_em(em, types))
        }
        Rejection::NotProvided { field, em, source } => {
            C::invalid("RESOURCE_NOT_PROVIDED", field, source.to_string(), of_em(em, []))
        }
        Rejection::OtherQueue { em, provided, asked } => {
            let problem = format!("is of the queue or namespace {asked:?}; the EM provides {provided:?}");
            let queues = [("provided", provided.clone()), ("asked", asked.clone())];
            C::invalid("RESOURCE_NOT_PROVIDED", "resource", problem, of_em(em, queues))
        }
        Rejection::OtherUse { source } => C::invalid("RESOURCE_NOT_PROVIDED", "used", source.to_string(), []),
        Rejection::LabelRequired { em, key, value } => C::state("LABEL_REQUIRED", of_em(em, label(key, value))),
        Rejection::EmReserved { em, key, value } => C::state("EM_RESERVED", of_em(em, label(key, value))),
        Rejection::EmDraining { em, drain } => {
            let (by, since) = (drain.by.to_string(), rfc3339(drain.since));
            let drain = [("drain_time", since), ("drained_by", by), ("reason", drain.reason.to_string())];
            C::state("EM_DRAINING", of_em(em, drain))
        }
        Rejection::PriorityAboveMax { requested, max, rule } => {
            let numbers = [("priority", requested.to_string()), ("max", max.to_string())];
            let rule = rule.iter().map(|rule| ("rule", rule.clone()));
            let hint = Hint::Field("priority".to_owned(), rejection.to_string());
            C::new(PermissionDenied, "PRIORITY_ABOVE_MAX", numbers.into_iter().chain(rule).collect::<Vec<_>>())
                .with(hint)
        }
        Rejection::TooManyPriorities { most } => C::state("TOO_MANY_PRIORITIES", [("max", most.to_string())]),
        Rejection::NoSuchPriority(rule) => C::missing("NO_SUCH_PRIORITY", [("rule", rule.clone())]),
        Rejection::TooManyReclaimPolicies { most } => {
            C::state("TOO_MANY_RECLAIM_POLICIES", [("max", most.to_string())])
        }
        Rejection::NoSuchReclaimPolicy(policy) => C::missing("NO_SUCH_RECLAIM_POLICY", [("policy", policy.clone())]),
        Rejection::LabelMissing { em, key } => {
            C::invalid("LABEL_MISSING", key, rejection.to_string(), of_em(em, [("label", key.clone())]))
        }
        Rejection::CapNotCounted { em, keys } => {
            let hint = Hint::Field("caps".to_owned(), rejection.to_string());
            C::state("CAP_NOT_COUNTED", of_em(em, [("labels", keys.clone())])).with(hint)
        }
        Rejection::RequestIdReused(request_id) => {
            C::new(AlreadyExists, "REQUEST_ID_REUSED", [("request_id", request_id.clone())])
        }
        Rejection::TicketEnded { request_id, ended } => {
            let mut facts = how_it_ended(ended);
            facts.push(("request_id", request_id.clone()));
            C::state("TICKET_ENDED", facts)
        }
        Rejection::AdoptedTooLate(ended) => C::state("TICKET_ENDED", how_it_ended(ended)),
        Rejection::TicketExists { ticket_id, differs } => {
            C::new(AlreadyExists, "TICKET_EXISTS", [ticket(*ticket_id), ("differs", differs.clone())])
        }
        // No caller gets this rejection: the request enters the wait queue again, at its end.
        Rejection::PlaceLost => C::new(Aborted, "PLACE_LOST", []).with(Hint::Retry(RETRY_SOON)),
        // Without a time to retry: two calls that repeat would take the position from each other for ever.
        Rejection::PositionTakenOver => C::new(Aborted, "POSITION_TAKEN_OVER", []),
        // Without a time to retry: the operator has decided, and clients would enter the queue again.
        Rejection::RemovedFromQueue { ticket_id, reason } => {
            C::new(Aborted, "REMOVED_FROM_QUEUE", [ticket(*ticket_id), ("reason", reason.to_string())])
        }
        Rejection::TooManyWaiting { scope, limit, waiting, max } => {
            let numbers = [("waiting", waiting.to_string()), ("max", max.to_string())];
            let names = [("scope", scope.to_string()), ("limit", limit.clone())];
            C::new(ResourceExhausted, "TOO_MANY_WAITING", names.into_iter().chain(numbers).collect::<Vec<_>>())
        }
        Rejection::NotWaiting(ticket_id) => C::missing("NOT_WAITING", [ticket(*ticket_id)]),
        Rejection::NotChosen(ticket_id) => C::missing("NOT_CHOSEN", [ticket(*ticket_id)]),
        Rejection::TicketNotFound { ended: Some(ended), .. } => C::missing("TICKET_NOT_FOUND", how_it_ended(ended)),
        Rejection::TicketNotFound { ticket_id, ended: None } => C::missing("TICKET_NOT_FOUND", [ticket(*ticket_id)]),
        Rejection::NoTicketOfEngine(engine) => C::missing("TICKET_NOT_FOUND", engine_names(engine)),
        Rejection::ManyTicketsOfEngine(engine) => C::state("MANY_TICKETS", engine_names(engine)),
        Rejection::AlreadyInited { ticket_id, engine } => {
            let facts = [ticket(*ticket_id)].into_iter().chain(engine_names(engine));
            C::state("TICKET_ALREADY_INITED", facts.collect::<Vec<_>>())
        }
        Rejection::InitedOtherwise { ticket_id } => C::state("TICKET_ALREADY_INITED", [ticket(*ticket_id)]),
        Rejection::NotInited { ticket_id } => C::state("TICKET_NOT_INITED", [ticket(*ticket_id)]),
        Rejection::NotEnough(refusal) | Rejection::NoMore(refusal) => {
            let hint = Hint::Shortfalls(refusal.shortfalls.clone());
            C::state("NOT_ENOUGH_RESOURCE", shortfall(refusal)).with(hint)
        }
        Rejection::TooManyLabelSets { most } => C::state("TOO_MANY_LABEL_SETS", [("max", most.to_string())]),
        Rejection::AlreadyHeld { taken, .. } => {
            let hold = taken.iter().flat_map(|taken| {
                let (by, until) = (taken.by.to_string(), rfc3339(taken.until));
                [("held_by", by), ("hold_until", until), ("reason", taken.reason.to_string())]
            });
            C::state("ALREADY_HELD", hold.collect::<Vec<_>>())
        }
        Rejection::TooManyHolds { most } => C::state("TOO_MANY_HOLDS", [("max", most.to_string())]),
        Rejection::ScopeNotCounted { keys } => C::missing("SCOPE_NOT_COUNTED", [("labels", keys.clone())]),
        Rejection::NoSuchLimit(limit) => C::missing("NO_SUCH_LIMIT", [("limit", limit.clone())]),
        // Retrying the unchanged call does not help.
        Rejection::LimitChanged { limit, last } => {
            C::new(Aborted, "LIMIT_CHANGED", limit_changed(limit, last.as_ref()))
        }
        Rejection::Overflow { field, source } => C::invalid("INVALID_FIELD", field, source.to_string(), []),
        Rejection::Inconsistent { .. } => C::new(Internal, "INTERNAL", []),
    }
}

fn label(key: &str, value: &str) -> [Fact; 2] {
    [("label", key.to_owned()), ("value", value.to_owned())]
}

/// Returns `more` and the names of the EM.
fn of_em(em: &EmInstance, more: impl IntoIterator<Item = Fact>) -> Vec<Fact> {
    let names = [("em_application_name", em.application_name.to_string()), ("em_instance", em.instance.to_string())];
    more.into_iter().chain(names).collect()
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
