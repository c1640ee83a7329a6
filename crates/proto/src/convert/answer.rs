//! Responses: converts values of the model to messages, and back again for the RM client.
//!
//! The gRPC services of `rm-edge` call the functions that return messages. The RM client calls the functions
//! named `read_…`. A `read_…` function fails with a [`FieldError`] that names the field if a message has no valid value
//! there. No function here decides or reads state.

use std::{collections::BTreeMap, sync::Arc};

use prost_types::Timestamp;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::v1 as proto;
use rm_model::{
    action::ActionRecord,
    assessment::HeadRoom,
    audit::Subject,
    em::{Em, EmInstance, LabelSetProgress, UnregisterProgress},
    external::JudgedQueue,
    name::{FieldError, Labels, Name},
    observation::{Observations, ObservedUse},
    operation::Grant,
    order::Class,
    principal::Principal,
    refusal::{Refusal, Shortfall},
    report::{EmStatus, Load, UnknownTicket},
    resource::Resource,
    scope_kind::ScopeKind,
    ticket::{EngineInstance, Ticket, TicketState},
    ticket_digest::TicketDigest,
    ticket_end::TicketEnd,
    wait_queue::WaitingRequest,
};

use rm_model::{access::CallScope, counters::Counters, limit::ScopeUsage, resource::ResourceError};

use super::{cap, limit, operator, request, resource};

/// Converts an EM instance to a message.
pub fn em_message(em: &EmInstance) -> proto::EmInstance {
    proto::EmInstance { application_name: em.application_name.to_string(), instance: em.instance.to_string() }
}

/// Converts an engine instance to a message.
pub fn engine_message(engine: &EngineInstance) -> proto::EngineInstance {
    proto::EngineInstance {
        application_name: engine.application_name.to_string(),
        instance: engine.instance.to_string(),
    }
}

/// Converts a time to a protobuf timestamp.
pub fn timestamp(time: OffsetDateTime) -> Timestamp {
    // The nanoseconds within one second always fit an `i32`.
    Timestamp { seconds: time.unix_timestamp(), nanos: i32::try_from(time.nanosecond()).unwrap_or_default() }
}

/// Converts a protobuf timestamp to a time; `None` if it is out of range.
pub fn time(timestamp: Timestamp) -> Option<OffsetDateTime> {
    let nanos = i128::from(timestamp.seconds) * 1_000_000_000 + i128::from(timestamp.nanos);
    OffsetDateTime::from_unix_timestamp_nanos(nanos).ok()
}

/// Converts the load of a machine to a message: memory in bytes, CPU in thousandths.
pub fn load(load: Load) -> proto::Load {
    proto::Load {
        memory_used: load.memory_used(),
        memory_max: load.memory_max(),
        cpu_permille: load.cpu_permille().into(),
    }
}

/// Converts the observed use of tickets to messages.
pub fn observations(observed: &Observations) -> Vec<proto::ObservedUse> {
    let message = |(ticket_id, observed): (Uuid, Resource)| proto::ObservedUse {
        ticket_id: ticket_id.as_bytes().to_vec(),
        resource: Some(resource::message(observed.parts())),
    };
    observed.iter().map(message).collect()
}

/// Converts a reported ticket that is not live on its EM to a message.
pub fn unknown_ticket(unknown: UnknownTicket) -> proto::UnknownTicket {
    proto::UnknownTicket { ticket_id: unknown.id.to_string(), reason: unknown.reason }
}

/// Converts an EM, its counters and its last report to a message.
///
/// # Errors
/// [`ResourceError`] if the counters of the EM have no valid difference.
pub fn em_resource(em: &Em, status: Option<&EmStatus>) -> Result<proto::EmResource, ResourceError> {
    let left = em.left()?;
    Ok(proto::EmResource {
        em: Some(em_message(&em.instance)),
        total: Some(resource::message(em.total.parts())),
        protected_resource: Some(resource::message(em.protected.parts())),
        used: Some(resource::message(em.used.parts())),
        locked: Some(resource::message(em.locked.parts())),
        left: Some(resource::message(left.parts())),
        labels: em.labels.as_map().clone(),
        epoch: em.epoch,
        register_time: Some(timestamp(em.register_time)),
        health: status.and_then(|status| status.health).map_or(proto::Health::Unspecified, proto::Health::from).into(),
        load: status.and_then(|status| status.load).map(load),
        last_report_time: status.map(|status| timestamp(status.last_report_time)),
        silent: status.is_some_and(|status| status.silent),
        unregistering: !em.is_registered(),
        reserved_labels: em.reserved.as_map().clone(),
        drain: em.drain.as_deref().map(operator::drain_message),
        version: em.version,
    })
}

/// Converts a live ticket to a message.
pub fn ticket(ticket: &Ticket) -> proto::Ticket {
    let mut message = proto::Ticket {
        ticket_id: ticket.id.to_string(),
        user: ticket.user.to_string(),
        creator: ticket.creator.to_string(),
        engine_type: ticket.engine_type.clone(),
        em: Some(em_message(&ticket.em)),
        locked_time: Some(timestamp(ticket.locked_time)),
        labels: ticket.labels.as_map().clone(),
        principal: ticket.principal.to_string(),
        ..Default::default()
    };
    match &ticket.state {
        TicketState::Locked { resource, expires_at } => {
            message.state = "locked".into();
            message.locked = Some(resource::message(resource.parts()));
            message.expire_time = Some(timestamp(*expires_at));
        }
        TicketState::Used { resource, engine, used_time, idle_since } => {
            message.state = "used".into();
            message.used = Some(resource::message(resource.parts()));
            message.used_time = Some(timestamp(*used_time));
            message.idle_since = idle_since.map(timestamp);
            message.engine = Some(engine_message(engine));
        }
    }
    message
}

/// Converts a live ticket and its last observed use to a message.
pub fn observed_ticket(of: &Ticket, observed: Option<&ObservedUse>) -> proto::Ticket {
    let amounts = observed.map(|observed| resource::message(observed.resource.parts()));
    proto::Ticket { observed: amounts, observed_time: observed.map(|observed| timestamp(observed.at)), ..ticket(of) }
}

/// Converts a waiting request and its queue entries to a message.
pub fn waiting(waiting: &WaitingRequest) -> proto::WaitingRequest {
    let entries =
        waiting.ahead.iter().map(|(scope, ahead)| proto::WaitQueueEntry { scope: scope.clone(), ahead: *ahead });
    proto::WaitingRequest {
        ticket_id: waiting.ticket_id.to_string(),
        user: waiting.user.to_string(),
        creator: waiting.creator.to_string(),
        engine_type: waiting.engine_type.clone(),
        em: Some(em_message(&waiting.em)),
        any_em: waiting.any_em,
        resource: Some(resource::message(waiting.resource.parts())),
        labels: waiting.labels.as_map().clone(),
        waiting_since: Some(timestamp(waiting.waiting_since)),
        wait_until: Some(timestamp(waiting.wait_until)),
        entries: entries.collect(),
        caps: waiting.caps.iter().map(cap::message).collect(),
        kept_until: waiting.kept_until.map(timestamp),
        has_turn: waiting.class != Class::Behind,
        priority: waiting.priority.into(),
        is_entitled: waiting.class == Class::Entitled,
    }
}

/// Converts a message of the service to a waiting request.
pub fn read_waiting(message: proto::WaitingRequest) -> Result<WaitingRequest, FieldError> {
    Ok(WaitingRequest {
        ticket_id: request::ticket_id("ticket_id", &message.ticket_id)?,
        waiting_since: read_time("waiting_since", message.waiting_since)?,
        user: Name::parse("user", &message.user)?,
        creator: Name::parse("creator", &message.creator)?,
        engine_type: message.engine_type,
        em: request::em_instance("em", message.em)?,
        any_em: message.any_em,
        resource: resource::required("resource", message.resource)?,
        labels: Labels::parse("labels", message.labels)?,
        caps: cap::caps("caps", &message.caps)?.into_iter().map(Arc::unwrap_or_clone).collect(),
        wait_until: read_time("wait_until", message.wait_until)?,
        claim: None,
        kept_until: message.kept_until.map(|time| read_time("kept_until", Some(time))).transpose()?,
        class: match (message.is_entitled, message.has_turn) {
            (true, _) => Class::Entitled,
            (false, true) => Class::First,
            (false, false) => Class::Behind,
        },
        priority: i16::try_from(message.priority).unwrap_or_default(),
        ahead: message.entries.into_iter().map(|entry| (entry.scope, entry.ahead)).collect(),
    })
}

/// Converts a history line to a message. The caller's address is included only if `is_for_operator`.
pub fn action(record: &ActionRecord, is_for_operator: bool) -> proto::Action {
    let (ticket_id, user) =
        record.ticket.as_ref().map(|(id, user)| (id.to_string(), user.to_string())).unwrap_or_default();
    let (mut each, mut object) = (Vec::new(), String::new());
    let (em, scope) = match &record.subject {
        Subject::Em(em) => (Some(em_message(em)), BTreeMap::new()),
        Subject::Scope(scope) => (None, scope.labels().clone()),
        Subject::Rule(pattern) => {
            let valued = |(key, value): (&String, &Option<String>)| Some((key.clone(), value.clone()?));
            each.extend(pattern.labels().iter().filter(|(_, value)| value.is_none()).map(|(key, _)| key.clone()));
            (None, pattern.labels().iter().filter_map(valued).collect())
        }
        Subject::Policy(kind) => {
            (Some(proto::EmInstance { application_name: kind.to_string(), instance: String::new() }), BTreeMap::new())
        }
        Subject::Other(other) => {
            object.clone_from(other);
            (None, BTreeMap::new())
        }
    };
    let detail = record.detail.as_deref();
    proto::Action {
        creator: detail.map(|detail| detail.creator.clone()).unwrap_or_default(),
        engine_type: detail.map(|detail| detail.engine_type.clone()).unwrap_or_default(),
        engine: detail.and_then(|detail| detail.engine.as_ref()).map(engine_message),
        labels: detail.map(|detail| detail.labels.as_map().clone()).unwrap_or_default(),
        action: record.action.as_str().into(),
        ticket_id,
        user,
        em,
        resource: Some(resource::message(record.resource.parts())),
        action_time: Some(timestamp(record.at)),
        scope,
        each,
        actor: record.actor.clone(),
        limit_mode: record.limit_mode.map_or(proto::LimitMode::Unspecified, proto::LimitMode::from).into(),
        reason: record.reason.clone().unwrap_or_default(),
        address: record.address.clone().filter(|_| is_for_operator).unwrap_or_default(),
        before: record.before.clone().unwrap_or_default(),
        after: record.after.clone().unwrap_or_default(),
        object,
    }
}

/// Converts the counters after a commit to a message, limited to the scopes that `reach` allows.
///
/// # Errors
/// [`ResourceError`] if the counters of the EM have no valid difference.
pub fn counters(counters: &Counters, reach: &CallScope) -> Result<proto::Counters, ResourceError> {
    let is_shown = |scope: &&ScopeUsage| reach.has_scope(&scope.scope);
    Ok(proto::Counters {
        em: counters.em.as_ref().map(|em| em_resource(em, None)).transpose()?,
        scopes: counters.scopes.iter().filter(is_shown).map(limit::scope_usage).collect(),
    })
}

/// Converts a grant to a message. The head-room, the queue name and the counters are left unset.
pub fn available(grant: &Grant) -> proto::AvailableResource {
    proto::AvailableResource {
        ticket_id: grant.ticket_id.to_string(),
        em: Some(em_message(&grant.em)),
        expire_time: Some(timestamp(grant.expires_at)),
        head_room: vec![],
        advisory_violations: grant.advisory_violations.iter().map(shortfall).collect(),
        queue_name: String::new(),
        queue_check: grant.queue.as_ref().map(queue_check),
        counters: None,
    }
}

/// Converts the head-room of one dimension to a message.
pub fn head_room(room: HeadRoom) -> proto::HeadRoom {
    proto::HeadRoom {
        scope: room.scope,
        dimension: room.dimension.to_string(),
        available: room.available,
        max: room.max,
        rule: room.rule,
        waiting_ahead: room.ahead,
    }
}

/// Converts one dimension of one scope that is short to a message.
pub fn shortfall(short: &Shortfall) -> proto::Shortfall {
    proto::Shortfall {
        scope: short.scope.clone(),
        dimension: short.dimension.to_string(),
        requested: short.requested,
        available: short.available,
        waiting_ahead: short.ahead,
        max: short.max,
        rule: short.rule.clone(),
        scope_kind: short.kind.as_str().to_owned(),
        idle_amount: short.idle_amount,
    }
}

/// Converts a refusal to a message. The first shortfall is also written to the fields of a single shortfall.
pub fn not_enough(refusal: &Refusal) -> proto::NotEnoughResource {
    let shortfalls: Vec<_> = refusal.shortfalls.iter().map(shortfall).collect();
    let first = shortfalls.first().cloned().unwrap_or_default();
    proto::NotEnoughResource {
        scope: first.scope,
        dimension: first.dimension,
        requested: first.requested,
        available: first.available,
        max: first.max,
        waiting_ahead: first.waiting_ahead,
        rule: first.rule,
        code: refusal.code,
        reason: refusal.reason.clone(),
        never_fits: refusal.never_fits,
        shortfalls,
    }
}

pub(super) fn read_time(field: &str, timestamp: Option<Timestamp>) -> Result<OffsetDateTime, FieldError> {
    timestamp.and_then(time).ok_or_else(|| FieldError::new(field, "is missing or out of range"))
}

/// Converts a message of the service to an EM.
pub fn read_em(message: proto::EmResource) -> Result<Em, FieldError> {
    Ok(Em {
        instance: request::em_instance("em", message.em)?,
        total: resource::required("total", message.total)?,
        protected: resource::required("protected_resource", message.protected_resource)?,
        used: resource::required("used", message.used)?,
        locked: resource::required("locked", message.locked)?,
        used_tickets: TicketDigest::default(),
        labels: Labels::parse("labels", message.labels)?,
        reserved: Labels::parse("reserved_labels", message.reserved_labels)?,
        epoch: message.epoch,
        register_time: read_time("register_time", message.register_time)?,
        version: message.version,
        going: message.unregistering.then_some(UnregisterProgress {
            epoch: message.epoch,
            end: TicketEnd::Unregistered,
            after: Uuid::nil(),
        }),
        counted: LabelSetProgress::default(),
        drain: message.drain.map(operator::read_drain).transpose()?.map(Arc::new),
        is_held: false,
    })
}

/// Converts the report fields of an EM message; `None` if the EM never reported.
pub fn read_em_status(message: &proto::EmResource) -> Result<Option<EmStatus>, FieldError> {
    let Some(last_report_time) = message.last_report_time else { return Ok(None) };
    Ok(Some(EmStatus {
        health: message.health().read(),
        load: message.load.map(|load| request::load("load", load)).transpose()?,
        last_report_time: read_time("last_report_time", Some(last_report_time))?,
        silent: message.silent,
    }))
}

/// Converts a message of the service to a reported ticket that is not live on its EM.
pub fn read_unknown_ticket(message: proto::UnknownTicket) -> Result<UnknownTicket, FieldError> {
    Ok(UnknownTicket { id: request::ticket_id("ticket_id", &message.ticket_id)?, reason: message.reason })
}

/// Converts a message of the service to a ticket.
pub fn read_ticket(message: proto::Ticket) -> Result<Ticket, FieldError> {
    let state = match message.engine {
        None => TicketState::Locked {
            resource: resource::required("locked", message.locked)?,
            expires_at: read_time("expire_time", message.expire_time)?,
        },
        Some(engine) => TicketState::Used {
            resource: resource::required("used", message.used)?,
            engine: request::engine_instance("engine", Some(engine))?,
            used_time: read_time("used_time", message.used_time)?,
            idle_since: message.idle_since.map(|time| read_time("idle_since", Some(time))).transpose()?,
        },
    };
    Ok(Ticket {
        id: request::ticket_id("ticket_id", &message.ticket_id)?,
        user: Name::parse("user", &message.user)?,
        creator: Name::parse("creator", &message.creator)?,
        engine_type: message.engine_type,
        em: request::em_instance("em", message.em)?,
        labels: Labels::parse("labels", message.labels)?,
        locked_time: read_time("locked_time", message.locked_time)?,
        state,
        principal: match message.principal.as_str() {
            "" => Principal::Anonymous,
            name => Principal::parse("principal", name)?,
        },
        em_epoch: 0,
    })
}

/// Converts a message of the service to a grant. The grant of a dry run has the nil ticket and no deadline.
pub fn read_available(message: proto::AvailableResource) -> Result<Grant, FieldError> {
    Ok(Grant {
        ticket_id: match message.ticket_id.as_str() {
            "" => Uuid::nil(),
            id => request::ticket_id("ticket_id", id)?,
        },
        em: request::em_instance("em", message.em)?,
        expires_at: message.expire_time.and_then(time).unwrap_or(OffsetDateTime::UNIX_EPOCH),
        advisory_violations: message.advisory_violations.into_iter().map(read_shortfall).collect(),
        queue: message.queue_check.and_then(read_queue_check),
        counters: None,
    })
}

/// Converts the basis of a queue decision; `None` if the message states none.
fn read_queue_check(message: proto::QueueCheck) -> Option<JudgedQueue> {
    let basis = message.basis().read()?;
    let age = message.age.map(|age| Duration::seconds(age.seconds) + Duration::nanoseconds(age.nanos.into()));
    Some(JudgedQueue { provider: message.provider_name, path: message.path, basis, age })
}

/// Converts a duration.
pub fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration { seconds: duration.whole_seconds(), nanos: duration.subsec_nanoseconds() }
}

/// Converts the basis of a queue decision to a message.
fn queue_check(queue: &JudgedQueue) -> proto::QueueCheck {
    proto::QueueCheck {
        provider_name: queue.provider.clone(),
        path: queue.path.clone(),
        basis: proto::QueueCheckBasis::from(queue.basis).into(),
        age: queue.age.map(duration),
    }
}

fn read_shortfall(short: proto::Shortfall) -> Shortfall {
    Shortfall {
        scope: short.scope,
        // A later release may add scope kinds.
        kind: ScopeKind::parse(&short.scope_kind).unwrap_or(ScopeKind::Labels),
        dimension: short.dimension.as_str().into(),
        requested: short.requested,
        available: short.available,
        ahead: short.waiting_ahead,
        max: short.max,
        rule: short.rule,
        idle_key: None,
        idle_amount: short.idle_amount,
    }
}

/// Converts a message of the service to a refusal.
pub fn read_not_enough(message: proto::NotEnoughResource) -> Refusal {
    Refusal {
        shortfalls: message.shortfalls.into_iter().map(read_shortfall).collect(),
        code: message.code,
        reason: message.reason,
        never_fits: message.never_fits,
    }
}
