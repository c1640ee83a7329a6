//! What operators want of EMs and tickets, and what they are told.

use crate::{
    domain::{
        audit::RepairTarget,
        drain::Drain,
        hold::{HOLD_MAX, Hold, NewHold, TakenHold},
        name::{FieldError, Name},
        operation::{DrainEm, LockKey, NamedTicket, ResumeEm},
        principal::Principal,
    },
    transport::proto,
};

use super::{answer, limit, request};

/// An EM that is to be drained.
pub fn drain(message: proto::DrainRequest) -> Result<DrainEm, FieldError> {
    Ok(DrainEm { em: request::em_instance("em", message.em)?, reason: Name::parse("reason", &message.reason)? })
}

/// An EM that is to grant again.
pub fn resume(message: proto::ResumeRequest) -> Result<ResumeEm, FieldError> {
    Ok(ResumeEm { em: request::em_instance("em", message.em)?, reason: reason(&message.reason)? })
}

/// Why something is done, if that is said.
pub fn reason(text: &str) -> Result<Option<Name>, FieldError> {
    match text {
        "" => Ok(None),
        text => Name::parse("reason", text).map(Some),
    }
}

/// What alone is to be repaired; `None` for everything.
pub fn repair(message: &proto::RepairRequest) -> Result<Option<RepairTarget>, FieldError> {
    match (&message.em, message.scope.is_empty()) {
        (None, true) => Ok(None),
        (Some(em), true) => Ok(Some(RepairTarget::Em(request::em_instance("em", Some(em.clone()))?))),
        (None, false) => Ok(Some(RepairTarget::Scope(limit::scope("scope", &message.scope)?))),
        (Some(_), false) => Err(FieldError::new("scope", "must not be set besides em")),
    }
}

/// A ticket that is to end, and why.
pub fn force(message: &proto::ForceReleaseRequest) -> Result<(NamedTicket, Name), FieldError> {
    let ticket_id = request::ticket_id("ticket_id", &message.ticket_id)?;
    Ok((NamedTicket { ticket_id, user: None, em: None }, Name::parse("reason", &message.reason)?))
}

/// What is held or is to be: exactly one of an EM and a user.
pub fn key(em: Option<proto::EmInstance>, user: &str) -> Result<LockKey, FieldError> {
    match (em, user) {
        (Some(em), "") => Ok(LockKey::Em(request::em_instance("em", Some(em))?)),
        (None, "") => Err(FieldError::new("em", "is required, or a user")),
        (None, user) => Ok(LockKey::User(Name::parse("user", user)?)),
        (Some(_), _) => Err(FieldError::new("user", "must not be set besides em")),
    }
}

/// A hold that is to be taken.
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

/// What is held.
pub fn hold_message(hold: &Hold) -> proto::ResourceHold {
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

/// The same as the service told it.
pub fn read_hold(message: proto::ResourceHold) -> Result<Hold, FieldError> {
    let key = key(message.em, &message.user)?;
    if message.held_by.is_empty() {
        return Ok(Hold { key, taken: None });
    }
    let taken = TakenHold {
        reason: Name::parse("reason", &message.reason)?,
        by: Principal::parse("held_by", &message.held_by)?,
        since: answer::read_time("hold_time", message.hold_time)?,
        until: answer::read_time("hold_until", message.hold_until)?,
    };
    Ok(Hold { key, taken: Some(taken) })
}

/// That an EM is drained.
pub fn drain_message(drain: &Drain) -> proto::EmDrain {
    proto::EmDrain {
        reason: drain.reason.to_string(),
        drained_by: drain.by.to_string(),
        drain_time: Some(answer::timestamp(drain.since)),
    }
}

/// The same as the service told it.
pub fn read_drain(message: proto::EmDrain) -> Result<Drain, FieldError> {
    Ok(Drain {
        reason: Name::parse("reason", &message.reason)?,
        by: Principal::parse("drained_by", &message.drained_by)?,
        since: answer::read_time("drain_time", message.drain_time)?,
    })
}
