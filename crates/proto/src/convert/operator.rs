//! Calls of operators: parses drains, resumes, repairs, forced releases and holds, and converts their results.
//!
//! Parsers and `read_…` functions fail with a [`FieldError`] that names the field. Callers: `rm_edge::admin`
//! and the RM client.

use uuid::Uuid;

use crate::v1 as proto;
use rm_model::{
    audit::RepairTarget,
    em_drain::EmDrain,
    hold::{ExistingHold, HOLD_MAX, NewHold, ResourceHold},
    name::{FieldError, Name},
    operation::{DrainEm, LockKey, ResumeEm, TicketRef},
    principal::Principal,
};

use super::{answer, limit, request};

/// Parses a drain.
pub fn drain(message: proto::DrainRequest) -> Result<DrainEm, FieldError> {
    Ok(DrainEm { em: request::em_instance("em", message.em)?, reason: Name::parse("reason", &message.reason)? })
}

/// Parses a resume of a drained EM.
pub fn resume(message: proto::ResumeRequest) -> Result<ResumeEm, FieldError> {
    Ok(ResumeEm { em: request::em_instance("em", message.em)?, reason: reason(&message.reason)? })
}

/// Parses an optional reason; `None` if it is empty.
pub fn reason(text: &str) -> Result<Option<Name>, FieldError> {
    Name::parse_optional("reason", text)
}

/// Parses the target of a repair; `None` repairs everything.
pub fn repair(message: &proto::RepairRequest) -> Result<Option<RepairTarget>, FieldError> {
    match (&message.em, message.scope.is_empty()) {
        (None, true) => Ok(None),
        (Some(em), true) => Ok(Some(RepairTarget::Em(request::em_instance("em", Some(em.clone()))?))),
        (None, false) => Ok(Some(RepairTarget::Scope(limit::scope("scope", &message.scope)?))),
        (Some(_), false) => Err(FieldError::new("scope", "must not be set besides em")),
    }
}

/// Parses a forced release: the ticket and the required reason.
pub fn force(message: &proto::ForceReleaseRequest) -> Result<(TicketRef, Name), FieldError> {
    let ticket_id = request::ticket_id("ticket_id", &message.ticket_id)?;
    Ok((TicketRef { ticket_id, user: None, em: None }, Name::parse("reason", &message.reason)?))
}

/// Parses the removal of a waiting request: its ticket id and the required reason.
pub fn remove_waiting(message: &proto::RemoveWaitingRequest) -> Result<(Uuid, Name), FieldError> {
    Ok((request::ticket_id("ticket_id", &message.ticket_id)?, Name::parse("reason", &message.reason)?))
}

/// Parses the withdrawal of a chosen ticket: its id and the required reason.
pub fn withdraw_reclaim(message: &proto::WithdrawReclaimRequest) -> Result<(Uuid, Name), FieldError> {
    Ok((request::ticket_id("ticket_id", &message.ticket_id)?, Name::parse("reason", &message.reason)?))
}

/// Parses the target of a hold: exactly one of an EM and a user.
pub fn key(em: Option<proto::EmInstance>, user: &str) -> Result<LockKey, FieldError> {
    match (em, user) {
        (Some(em), "") => Ok(LockKey::Em(request::em_instance("em", Some(em))?)),
        (None, "") => Err(FieldError::new("em", "is required, or a user")),
        (None, user) => Ok(LockKey::User(Name::parse("user", user)?)),
        (Some(_), _) => Err(FieldError::new("user", "must not be set besides em")),
    }
}

/// Parses a hold. Its duration is above zero and at most [`HOLD_MAX`].
pub fn hold(message: proto::HoldRequest) -> Result<NewHold, FieldError> {
    let duration = message.duration.ok_or_else(|| FieldError::new("duration", "is required"))?;
    let duration = request::duration("duration", duration)?;
    if duration.is_zero() || duration > HOLD_MAX {
        let most = HOLD_MAX.as_secs() / 60;
        return Err(FieldError::new("duration", format!("must be above zero and at most {most}m")));
    }
    let reason = Name::parse("reason", &message.reason)?;
    Ok(NewHold { key: key(message.em, &message.user)?, duration, reason })
}

/// Converts a hold to a message. A hold without `taken` has only its target.
pub fn hold_message(hold: &ResourceHold) -> proto::ResourceHold {
    let (em, user) = match &hold.key {
        LockKey::Em(em) => (Some(answer::em_message(em)), String::new()),
        LockKey::User(user) => (None, user.to_string()),
    };
    let message = proto::ResourceHold { em, user, ..Default::default() };
    match &hold.taken {
        None => message,
        Some(taken) => proto::ResourceHold {
            reason: taken.reason.to_string(),
            held_by: taken.by.to_string(),
            hold_time: Some(answer::timestamp(taken.since)),
            hold_until: Some(answer::timestamp(taken.until)),
            ..message
        },
    }
}

/// Converts a message of the service to a hold.
pub fn read_hold(message: proto::ResourceHold) -> Result<ResourceHold, FieldError> {
    let key = key(message.em, &message.user)?;
    if message.held_by.is_empty() {
        return Ok(ResourceHold { key, taken: None });
    }
    let taken = ExistingHold {
        reason: Name::parse("reason", &message.reason)?,
        by: Principal::parse("held_by", &message.held_by)?,
        since: answer::read_time("hold_time", message.hold_time)?,
        until: answer::read_time("hold_until", message.hold_until)?,
    };
    Ok(ResourceHold { key, taken: Some(taken) })
}

/// Converts the drain of an EM to a message.
pub fn drain_message(drain: &EmDrain) -> proto::EmDrain {
    proto::EmDrain {
        reason: drain.reason.to_string(),
        drained_by: drain.by.to_string(),
        drain_time: Some(answer::timestamp(drain.since)),
    }
}

/// Converts a message of the service to a drain.
pub fn read_drain(message: proto::EmDrain) -> Result<EmDrain, FieldError> {
    Ok(EmDrain {
        reason: Name::parse("reason", &message.reason)?,
        by: Principal::parse("drained_by", &message.drained_by)?,
        since: answer::read_time("drain_time", message.drain_time)?,
    })
}
