//! What callers send.

use std::time::Duration;

use uuid::Uuid;

use crate::{
    domain::{
        em::EmInstance,
        name::{FieldError, Labels, Name},
        operation::{Inited, Register, Released, Reported, Unregister},
        report::{Health, Load, Report},
        ticket::EngineInstance,
    },
    transport::{
        proto,
        resource_manager::{TICKET_BYTES, TICKETS_MAX},
    },
};

use super::resource;

fn missing(field: &str) -> FieldError {
    FieldError::new(field, "is required")
}

/// An EM that stands in `field`.
pub fn em_instance(field: &str, em: Option<proto::EmInstance>) -> Result<EmInstance, FieldError> {
    let em = em.ok_or_else(|| missing(field))?;
    EmInstance::parse(field, &em.application_name, &em.instance)
}

/// An engine that stands in `field`.
pub fn engine_instance(field: &str, engine: Option<proto::EngineInstance>) -> Result<EngineInstance, FieldError> {
    let engine = engine.ok_or_else(|| missing(field))?;
    EngineInstance::parse(field, &engine.application_name, &engine.instance)
}

/// A ticket id that stands in `field`.
pub fn ticket_id(field: &str, text: &str) -> Result<Uuid, FieldError> {
    Uuid::parse_str(text)
        .map_err(|_| FieldError::new(field, "is not a UUID; give the ticket_id that RequestResource answered"))
}

/// A duration that stands in `field`.
pub fn duration(field: &str, duration: prost_types::Duration) -> Result<Duration, FieldError> {
    // Not by the conversion of prost-types, which overflows at its ends.
    match (u64::try_from(duration.seconds), u32::try_from(duration.nanos)) {
        (Ok(seconds), Ok(nanos)) => Ok(Duration::new(seconds, nanos)),
        _ => Err(FieldError::new(field, "must not be negative")),
    }
}

/// A registration.
pub fn register(request: proto::RegisterRequest) -> Result<Register, FieldError> {
    let em = em_instance("em", request.em)?;
    let total = resource::required("total", request.total)?;
    let protected = match resource::optional("protected", request.protected)? {
        None => total.zero_like(),
        Some(protected) => protected.project(total.resource_type()).map_err(|_| {
            let (got, wanted) = (protected.resource_type(), total.resource_type());
            FieldError::new("protected", format!("is {got}, while total is {wanted}; give both as the same type"))
        })?,
    };
    for (dimension, amount) in protected.amounts() {
        let most = total.get(&dimension);
        if amount > most {
            return Err(FieldError::new(
                "protected",
                format!("has {amount} of {dimension}, but total has only {most}"),
            ));
        }
    }
    if let Err(error) = protected.not_more_than(&total) {
        return Err(FieldError::new("protected", error.to_string()));
    }
    let labels = Labels::parse("labels", request.labels)?;
    Ok(Register { em, total, protected, labels })
}

/// The registration that a caller acts for, in `epoch`; 0 is none.
fn epoch(number: i64) -> Result<Option<i64>, FieldError> {
    match number {
        ..0 => Err(FieldError::new("epoch", "must not be negative")),
        0 => Ok(None),
        _ => Ok(Some(number)),
    }
}

/// An EM that goes.
pub fn unregister(request: proto::UnregisterRequest) -> Result<Unregister, FieldError> {
    Ok(Unregister { em: em_instance("em", request.em)?, epoch: epoch(request.epoch)? })
}

/// A report that an engine runs.
pub fn inited(request: proto::ResourceInitedRequest) -> Result<Inited, FieldError> {
    Ok(Inited {
        ticket_id: ticket_id("ticket_id", &request.ticket_id)?,
        user: Name::parse("user", &request.user)?,
        em: em_instance("em", request.em)?,
        used: resource::optional("used", request.used)?,
        engine: engine_instance("engine", request.engine)?,
        epoch: epoch(request.epoch)?,
    })
}

/// A report of what an engine uses.
pub fn reported(request: proto::ResourceReportedRequest) -> Result<Reported, FieldError> {
    Ok(Reported {
        ticket_id: ticket_id("ticket_id", &request.ticket_id)?,
        user: Name::parse("user", &request.user)?,
        em: em_instance("em", request.em)?,
        used: resource::required("used", request.used)?,
        epoch: epoch(request.epoch)?,
    })
}

/// A ticket that is given back.
pub fn released(request: proto::ResourceReleasedRequest) -> Result<Released, FieldError> {
    Ok(Released {
        ticket_id: ticket_id("ticket_id", &request.ticket_id)?,
        user: Name::parse("user", &request.user)?,
        em: em_instance("em", request.em)?,
    })
}

/// How an EM says it is; unset is healthy.
fn health(field: &str, number: i32) -> Result<Health, FieldError> {
    match proto::Health::try_from(number) {
        Ok(proto::Health::Unspecified | proto::Health::Healthy) => Ok(Health::Healthy),
        Ok(proto::Health::Warn) => Ok(Health::Warn),
        Ok(proto::Health::Unhealthy) => Ok(Health::Unhealthy),
        Err(_) => Err(FieldError::new(field, format!("is {number}, which stands for nothing"))),
    }
}

/// A load that stands in `field`.
pub fn load(field: &str, load: proto::Load) -> Result<Load, FieldError> {
    Load::parse(field, load.memory_used, load.memory_max, load.cpu_permille)
}

/// The tickets that an EM has, each as [`TICKET_BYTES`] bytes.
fn reported_tickets(field: &str, bytes: &[u8]) -> Result<Vec<Uuid>, FieldError> {
    let (ids, rest) = bytes.as_chunks::<TICKET_BYTES>();
    let named = ids.len();
    if !rest.is_empty() {
        let cut = format!("ends after {} of the {TICKET_BYTES} bytes of ticket {}", rest.len(), named + 1);
        return Err(FieldError::new(field, format!("{cut}; give the {TICKET_BYTES} bytes of each UUID")));
    }
    if named > TICKETS_MAX {
        return Err(FieldError::new(field, format!("has {named} tickets; at most {TICKETS_MAX} are allowed")));
    }
    Ok(ids.iter().copied().map(Uuid::from_bytes).collect())
}

/// The same, written down.
pub fn ticket_bytes<'a>(tickets: impl IntoIterator<Item = &'a Uuid>) -> Vec<u8> {
    tickets.into_iter().flat_map(Uuid::as_bytes).copied().collect()
}

/// A report of an EM.
pub fn report(request: proto::HeartbeatRequest) -> Result<Report, FieldError> {
    let em = em_instance("em", request.em)?;
    for (field, number) in [("epoch", request.epoch), ("sequence", request.sequence)] {
        if number <= 0 {
            return Err(FieldError::new(field, "must be above zero"));
        }
    }
    let load = request.load.map(|message| load("load", message)).transpose()?;
    let tickets = reported_tickets("ticket_ids", &request.ticket_ids)?;
    let health = health("health", request.health)?;
    Ok(Report { em, epoch: request.epoch, sequence: request.sequence, health, load, tickets })
}
