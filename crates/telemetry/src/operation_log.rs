//! Decision log: one line per decision at level debug, and the same fields in the trace of the call.
//!
//! A request is logged once, independent of its number of attempts; any other operation is logged when it is applied.
//! Callers: the request service and the committer.

use std::error::Error;

use opentelemetry::KeyValue;
use tracing::{Level, field::display};
use uuid::Uuid;

use rm_model::{
    em::EmInstance,
    name::Name,
    operation::{Operation, Outcome, RequestSpec},
    principal::Principal,
    refusal::Shortfall,
};

use super::{traces, with_causes};

/// Log target of the decisions: `RUST_LOG=info,linkis_rm::decisions=debug` enables these lines.
pub const TARGET: &str = "linkis_rm::decisions";

fn is_enabled() -> bool {
    tracing::enabled!(target: TARGET, Level::DEBUG)
}

/// Returns the name of the outcome, and the first shortfall of a refusal.
fn outcome<E>(answer: &Result<Outcome, E>) -> (&'static str, Option<&Shortfall>) {
    match answer {
        Err(_) => ("failed", None),
        Ok(Outcome::Granted(_)) => ("granted", None),
        Ok(Outcome::Refused(refusal)) if refusal.never_fits => ("never_fits", refusal.shortfalls.first()),
        Ok(Outcome::Refused(refusal)) => ("refused", refusal.shortfalls.first()),
        Ok(Outcome::Expired(false) | Outcome::Lost(false) | Outcome::Resumed(false) | Outcome::Reaped(None)) => {
            ("nothing_to_do", None)
        }
        Ok(Outcome::Contended) => ("contended", None),
        Ok(_) => ("done", None),
    }
}

/// Logs the decision of a request. `may_wait`: whether the caller allowed the request to wait.
pub fn request(ask: &RequestSpec, may_wait: bool, answer: &Result<Outcome, impl Error + 'static>) {
    let (outcome, short) = match outcome(answer) {
        // A waiting request that is refused has reached its deadline.
        ("refused", short) if may_wait => ("timed_out", short),
        decided => decided,
    };
    let grant = match answer {
        Ok(Outcome::Granted(grant)) => Some(grant),
        _ => None,
    };
    traces::add(|| {
        let mut attributes = vec![
            KeyValue::new("linkis_rm.user", ask.user.to_string()),
            KeyValue::new("linkis_rm.creator", ask.creator.to_string()),
            KeyValue::new("linkis_rm.outcome", outcome),
        ];
        if let Some(grant) = grant {
            attributes.push(KeyValue::new("linkis_rm.ticket_id", grant.ticket_id.to_string()));
            attributes.push(KeyValue::new("linkis_rm.em", grant.em.to_string()));
        }
        if let Some(short) = short {
            attributes.push(KeyValue::new("linkis_rm.scope", short.scope.clone()));
            attributes.push(KeyValue::new("linkis_rm.dimension", short.dimension.key().to_string()));
        }
        attributes
    });
    if !is_enabled() {
        return;
    }
    let (ticket_id, em) = (grant.map(|grant| display(grant.ticket_id)), grant.map(|grant| display(&grant.em)));
    let (scope, dimension) = (short.map(|short| &*short.scope), short.map(|short| display(short.dimension.key())));
    let (error, trace_id) = (error(answer), traces::trace_id().map(display));
    let RequestSpec { principal, user, creator, .. } = ask;
    tracing::debug!(
        target: TARGET, operation = "request", outcome, ticket_id, %user, %creator, em, scope, dimension, by = %principal, error,
        trace_id, "decided"
    );
}

fn error(answer: &Result<Outcome, impl Error + 'static>) -> Option<String> {
    answer.as_ref().err().map(|error| with_causes(error))
}

/// An operation before it is applied; empty unless the decision log is enabled.
#[derive(Debug)]
pub struct OperationLog(Option<Box<OperationFields>>);

#[derive(Debug)]
struct OperationFields {
    operation: &'static str,
    by: Principal,
    ticket_id: Option<Uuid>,
    user: Option<Name>,
    em: EmInstance,
}

impl OperationLog {
    /// Captures the fields of `operation`. Empty for requests, which [`request`] logs.
    pub fn of(by: &Principal, operation: &Operation) -> Self {
        if operation.request().is_some() || !is_enabled() {
            return Self(None);
        }
        Self(Some(Box::new(OperationFields {
            operation: operation.kind(),
            by: by.clone(),
            ticket_id: operation.ticket_id(),
            user: operation.user().cloned(),
            em: operation.em().clone(),
        })))
    }

    /// Logs the outcome of the operation.
    pub fn tell(self, answer: &Result<Outcome, impl Error + 'static>) {
        let Some(words) = self.0 else { return };
        let OperationFields { operation, by, ticket_id, user, em } = *words;
        let (ticket_id, user) = (ticket_id.map(display), user.map(display));
        let (error, trace_id) = (error(answer), traces::trace_id().map(display));
        let (outcome, _) = outcome(answer);
        tracing::debug!(target: TARGET, operation, outcome, ticket_id, user, %em, %by, error, trace_id, "decided");
    }
}
