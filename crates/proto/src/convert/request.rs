//! Requests: parses the messages of callers into operations of the model, and checks every field.
//!
//! A parser fails with a [`FieldError`] that names the field, the value and the bound. A field that the message leaves
//! unset gets its documented default. Callers: the gRPC services of `rm-edge`; the RM client uses the shared
//! parsers for responses.

use std::{collections::HashSet, time::Duration};

use uuid::Uuid;

use crate::v1 as proto;
use rm_model::{
    adoption::AdoptTicket,
    em::EmInstance,
    name::{FieldError, Labels, Name, check_at_most, check_new, check_new_label, check_text},
    observation::Observations,
    operation::{ConfirmTicket, RegisterEm, TicketRef, UnregisterEm, UpdateTicket},
    priority::PRIORITY_MAX,
    report::{EmReport, Health, Load},
    resource::{KubernetesAmounts, Resource, ResourceParts, YarnAmounts},
    scope::RESERVED,
    selector::{EmSelector, PREFERENCES_MAX, Preference, WEIGHT_MAX},
    ticket::EngineInstance,
};

use super::{enumeration::known, resource};

/// Maximum number of reserved labels of an EM.
pub const RESERVED_MAX: usize = 8;

/// Maximum number of tickets in one heartbeat.
pub const TICKETS_MAX: usize = 100_000;

/// Size of one ticket in a heartbeat, in bytes.
pub const TICKET_BYTES: usize = size_of::<Uuid>();

/// Maximum number of queues in one request.
const QUEUE_NAMES_MAX: usize = 8;

fn missing(field: &str) -> FieldError {
    FieldError::new(field, "is required")
}

/// Parses the required EM in `field`.
pub fn em_instance(field: &str, em: Option<proto::EmInstance>) -> Result<EmInstance, FieldError> {
    let em = em.ok_or_else(|| missing(field))?;
    EmInstance::parse(field, &em.application_name, &em.instance)
}

/// Parses the required engine in `field`.
pub fn engine_instance(field: &str, engine: Option<proto::EngineInstance>) -> Result<EngineInstance, FieldError> {
    let engine = engine.ok_or_else(|| missing(field))?;
    EngineInstance::parse(field, &engine.application_name, &engine.instance)
}

/// Parses the ticket id in `field`.
pub fn ticket_id(field: &str, text: &str) -> Result<Uuid, FieldError> {
    Uuid::parse_str(text)
        .map_err(|_| FieldError::new(field, "is not a UUID; give the ticket_id that RequestResource answered"))
}

/// Parses the duration in `field`, which must not be negative.
pub fn duration(field: &str, duration: prost_types::Duration) -> Result<Duration, FieldError> {
    // The conversion of `prost_types` overflows at the ends of its range.
    match (u64::try_from(duration.seconds), u32::try_from(duration.nanos)) {
        (Ok(seconds), Ok(nanos)) => Ok(Duration::new(seconds, nanos)),
        _ => Err(FieldError::new(field, "must not be negative")),
    }
}

/// Parses a registration. The protected amounts default to zero and must not exceed the total.
pub fn register(request: proto::RegisterRequest) -> Result<RegisterEm, FieldError> {
    let em = em_instance("em", request.em)?;
    em.check_new("em")?;
    let total = resource::required("total", request.total)?;
    resource::check_new("total", &total)?;
    let protected = match resource::optional("protected_resource", request.protected_resource)? {
        None => total.zero_like(),
        Some(protected) => protected.project(total.resource_type()).map_err(|_| {
            let (got, wanted) = (protected.resource_type(), total.resource_type());
            FieldError::new(
                "protected_resource",
                format!("is {got}, while total is {wanted}; give both as the same type"),
            )
        })?,
    };
    for (dimension, amount) in protected.amounts() {
        let most = total.get(&dimension);
        if amount > most {
            return Err(FieldError::new(
                "protected_resource",
                format!("has {amount} of {dimension}, but total has only {most}"),
            ));
        }
    }
    if let Err(error) = protected.not_more_than(&total) {
        return Err(FieldError::new("protected_resource", error.to_string()));
    }
    let labels = Labels::parse("labels", request.labels)?;
    labels.check_new("labels")?;
    let reserved = Labels::parse("reserved_labels", request.reserved_labels)?;
    reserved.check_new("reserved_labels")?;
    check_at_most("reserved_labels", reserved.as_map().len(), "labels", RESERVED_MAX)?;
    if let Some(key) = reserved.as_map().keys().find(|key| labels.as_map().contains_key(*key)) {
        return Err(FieldError::new("reserved_labels", format!("has {key:?}, which is among labels; give it once")));
    }
    Ok(RegisterEm { em, total, protected, labels, reserved })
}

/// Parses the priority in `field`, in seconds.
pub fn priority(field: &str, priority: i32) -> Result<i16, FieldError> {
    let known = i16::try_from(priority).ok().filter(|known| (-PRIORITY_MAX..=PRIORITY_MAX).contains(known));
    known.ok_or_else(|| {
        FieldError::new(field, format!("is {priority}; must be from -{PRIORITY_MAX} to {PRIORITY_MAX} seconds"))
    })
}

/// Returns `resource` once for each queue or namespace in `names`, in the caller's order of preference.
///
/// # Errors
/// Too many names, an empty or illegal name, or a resource without a queue or namespace.
pub fn in_queues(names: &[String], resource: &Resource) -> Result<Vec<Resource>, FieldError> {
    check_at_most("queue_names", names.len(), "queues", QUEUE_NAMES_MAX)?;
    let in_queue = |(number, name): (usize, &String)| {
        let field = format!("queue_names[{number}]");
        let wrong = |problem: String| FieldError::new(&field, problem);
        if name.is_empty() {
            return Err(wrong("must not be empty".to_owned()));
        }
        let parts = match resource.parts() {
            ResourceParts::Yarn(yarn) => ResourceParts::Yarn(YarnAmounts { queue_name: name.clone(), ..yarn }),
            ResourceParts::DriverAndYarn(driver, yarn) => {
                ResourceParts::DriverAndYarn(driver, YarnAmounts { queue_name: name.clone(), ..yarn })
            }
            ResourceParts::Kubernetes(part) => {
                ResourceParts::Kubernetes(KubernetesAmounts { namespace: name.clone(), ..part })
            }
            ResourceParts::DriverAndKubernetes(driver, part) => {
                ResourceParts::DriverAndKubernetes(driver, KubernetesAmounts { namespace: name.clone(), ..part })
            }
            _ => {
                let problem = "is for a resource with a queue or a namespace: set yarn, driver_and_yarn, kubernetes or \
                               driver_and_kubernetes";
                return Err(FieldError::new("queue_names", problem));
            }
        };
        check_new(&field, name)?;
        Resource::from_parts(parts).map_err(|error| wrong(error.to_string()))
    };
    names.iter().enumerate().map(in_queue).collect()
}

/// Parses the EM selection of a request. Returns also all labels of the request, with the required and preferred ones.
pub fn selector(request: &proto::RequestResourceRequest) -> Result<(EmSelector, Labels), FieldError> {
    let application_name = match request.em_application_name.as_str() {
        "" => None,
        _ if request.em.is_some() => {
            return Err(FieldError::new("em_application_name", "is for requests without em; leave one of them out"));
        }
        name => Some(Name::parse("em_application_name", name)?),
    };
    let required = Labels::parse("required_labels", request.required_labels.clone())?;
    required.check_new("required_labels")?;
    let preferred = preferences("preferred_labels", &request.preferred_labels)?;
    let placement = known::<proto::Placement>("placement", request.placement)?.read();
    request.labels.iter().try_for_each(|(key, value)| check_new_label("labels", key, value))?;
    let mut carried = request.labels.clone();
    let for_selection = preferred.iter().map(|preference| ("preferred_labels", &preference.key, &preference.value));
    let required_pairs = required.as_map().iter().map(|(key, value)| ("required_labels", key, value));
    for (field, key, value) in required_pairs.chain(for_selection) {
        let before = carried.insert(key.clone(), value.clone());
        if let Some(before) = before.filter(|before| before != value) {
            return Err(FieldError::new(
                field,
                format!("has {key:?} as {value:?}, and as {before:?} elsewhere; give one value"),
            ));
        }
    }
    if let Some(key) = RESERVED.into_iter().find(|key| carried.contains_key(*key)) {
        let problem = format!("has {key:?}, which a request has by fields of its own, or derived from them: set those");
        return Err(FieldError::new("labels", problem));
    }
    let carried = Labels::parse("labels", carried)?;
    Ok((EmSelector { application_name, required, preferred, placement }, carried))
}

fn preferences(field: &str, messages: &[proto::PreferredLabel]) -> Result<Vec<Preference>, FieldError> {
    check_at_most(field, messages.len(), "labels", PREFERENCES_MAX)?;
    let preference = |(number, message): (usize, &proto::PreferredLabel)| {
        let field = format!("{field}[{number}]");
        Name::parse(&format!("{field}.key"), &message.key)?;
        Name::parse(&format!("{field}.value"), &message.value)?;
        check_new(&format!("{field}.key"), &message.key)?;
        check_new(&format!("{field}.value"), &message.value)?;
        let weight = match u32::try_from(message.weight) {
            Ok(0) => 1,
            Ok(weight @ 1..=WEIGHT_MAX) => weight,
            _ => return Err(FieldError::new(format!("{field}.weight"), format!("must be 1 to {WEIGHT_MAX}"))),
        };
        Ok(Preference { key: message.key.clone(), value: message.value.clone(), weight })
    };
    messages.iter().enumerate().map(preference).collect()
}

/// Parses the epoch of the registration that a caller acts for; 0 means none.
fn epoch(number: i64) -> Result<Option<i64>, FieldError> {
    match number {
        ..0 => Err(FieldError::new("epoch", "must not be negative")),
        0 => Ok(None),
        _ => Ok(Some(number)),
    }
}

/// Parses an unregistration.
pub fn unregister(request: proto::UnregisterRequest) -> Result<UnregisterEm, FieldError> {
    Ok(UnregisterEm { em: em_instance("em", request.em)?, epoch: epoch(request.epoch)? })
}

/// Parses a confirmation: the engine of a ticket runs.
pub fn inited(request: proto::ResourceInitedRequest) -> Result<ConfirmTicket, FieldError> {
    let engine = engine_instance("engine", request.engine)?;
    engine.check_new("engine")?;
    Ok(ConfirmTicket {
        ticket_id: ticket_id("ticket_id", &request.ticket_id)?,
        user: Name::parse("user", &request.user)?,
        em: em_instance("em", request.em)?,
        used: resource::optional("used", request.used)?,
        engine,
        epoch: epoch(request.epoch)?,
    })
}

/// Parses the adoption of a running engine.
pub fn adopt(request: proto::AdoptTicketRequest) -> Result<AdoptTicket, FieldError> {
    let ticket_id = ticket_id("ticket_id", &request.ticket_id)?;
    if ticket_id.is_nil() {
        return Err(FieldError::new("ticket_id", "must not be nil; give each engine a UUID of its own"));
    }
    check_text("engine_type", &request.engine_type)?;
    check_new("engine_type", &request.engine_type)?;
    let used = resource::required("used", request.used)?;
    resource::check_new("used", &used)?;
    if used.is_zero() {
        return Err(FieldError::new("used", "is nothing at all; set an amount above zero"));
    }
    if let Some(key) = RESERVED.into_iter().find(|key| request.labels.contains_key(*key)) {
        let problem = format!("has {key:?}, which a ticket has by fields of its own, or derived from them: set those");
        return Err(FieldError::new("labels", problem));
    }
    let labels = Labels::parse("labels", request.labels)?;
    labels.check_new("labels")?;
    let engine = engine_instance("engine", request.engine)?;
    engine.check_new("engine")?;
    Ok(AdoptTicket {
        ticket_id,
        user: Name::parse_new("user", &request.user)?,
        creator: Name::parse_new("creator", &request.creator)?,
        engine_type: request.engine_type,
        em: em_instance("em", request.em)?,
        labels,
        engine,
        used,
    })
}

/// Parses a report of the use of an engine.
pub fn reported(request: proto::ResourceReportedRequest) -> Result<UpdateTicket, FieldError> {
    Ok(UpdateTicket {
        ticket_id: ticket_id("ticket_id", &request.ticket_id)?,
        user: Name::parse("user", &request.user)?,
        em: em_instance("em", request.em)?,
        used: resource::required("used", request.used)?,
        epoch: epoch(request.epoch)?,
    })
}

/// Parses a release. The user and the EM of the ticket are optional.
pub fn released(request: proto::ResourceReleasedRequest) -> Result<TicketRef, FieldError> {
    Ok(TicketRef {
        ticket_id: ticket_id("ticket_id", &request.ticket_id)?,
        user: Name::parse_optional("user", &request.user)?,
        em: request.em.map(|em| em_instance("em", Some(em))).transpose()?,
    })
}

/// Parses the load in `field`.
pub fn load(field: &str, load: proto::Load) -> Result<Load, FieldError> {
    Load::parse(field, load.memory_used, load.memory_max, load.cpu_permille)
}

/// Parses the tickets of an EM from `field`, [`TICKET_BYTES`] bytes each.
fn reported_tickets(field: &str, bytes: &[u8]) -> Result<Vec<Uuid>, FieldError> {
    let (ids, rest) = bytes.as_chunks::<TICKET_BYTES>();
    let named = ids.len();
    if !rest.is_empty() {
        let cut = format!("ends after {} of the {TICKET_BYTES} bytes of ticket {}", rest.len(), named + 1);
        return Err(FieldError::new(field, format!("{cut}; give the {TICKET_BYTES} bytes of each UUID")));
    }
    check_at_most(field, named, "tickets", TICKETS_MAX)?;
    Ok(ids.iter().copied().map(Uuid::from_bytes).collect())
}

/// Converts tickets to the bytes of a heartbeat.
pub fn ticket_bytes<'a>(tickets: impl IntoIterator<Item = &'a Uuid>) -> Vec<u8> {
    tickets.into_iter().flat_map(Uuid::as_bytes).copied().collect()
}

/// Parses the heartbeat of an EM.
pub fn report(request: proto::HeartbeatRequest) -> Result<EmReport, FieldError> {
    let em = em_instance("em", request.em)?;
    for (field, number) in [("epoch", request.epoch), ("sequence", request.sequence)] {
        if number <= 0 {
            return Err(FieldError::new(field, "must be above zero"));
        }
    }
    let load = request.load.map(|message| load("load", message)).transpose()?;
    let tickets = reported_tickets("ticket_ids", &request.ticket_ids)?;
    let health = known::<proto::Health>("health", request.health)?.read().unwrap_or(Health::Healthy);
    let observed = observations("observed", request.observed)?;
    let idle = marked("idle", &request.idle, &tickets)?;
    Ok(EmReport { em, epoch: request.epoch, sequence: request.sequence, health, load, tickets, observed, idle })
}

/// Returns the tickets whose bits are set in `field`, from the lowest bit of the first byte.
fn marked(field: &str, bits: &[u8], tickets: &[Uuid]) -> Result<Vec<Uuid>, FieldError> {
    let of_byte = |(number, byte): (usize, &u8)| {
        let byte = *byte;
        (0_usize..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| number * 8 + bit)
    };
    let ticket = |number: usize| {
        let beyond =
            || format!("marks ticket {} of {}; give one bit for each ticket of ticket_ids", number + 1, tickets.len());
        tickets.get(number).copied().ok_or_else(|| FieldError::new(field, beyond()))
    };
    bits.iter().enumerate().flat_map(of_byte).map(ticket).collect()
}

/// Converts tickets to the bits of a heartbeat: those of `tickets` that `marked` has, up to the last one.
pub fn marks(tickets: &[Uuid], marked: &[Uuid]) -> Vec<u8> {
    let marked: HashSet<&Uuid> = marked.iter().collect();
    let of_part = |part: &[Uuid]| {
        let bits = part.iter().enumerate().filter(|(_, id)| marked.contains(id));
        bits.fold(0_u8, |byte, (bit, _)| byte | 1 << bit)
    };
    let mut bits: Vec<u8> = tickets.chunks(8).map(of_part).collect();
    bits.truncate(bits.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
    bits
}

/// Parses the observed use of tickets in `field`. A ticket may occur once.
fn observations(field: &str, stated: Vec<proto::ObservedUse>) -> Result<Option<Observations>, FieldError> {
    check_at_most(field, stated.len(), "tickets", TICKETS_MAX)?;
    let (mut observed, mut seen) = (Vec::with_capacity(stated.len()), HashSet::with_capacity(stated.len()));
    for (number, one) in stated.into_iter().enumerate() {
        let in_ticket = format!("{field}[{number}].ticket_id");
        let ticket_id = Uuid::from_slice(&one.ticket_id).map_err(|_| {
            FieldError::new(&in_ticket, format!("must be the {TICKET_BYTES} bytes of the ticket's UUID"))
        })?;
        if !seen.insert(ticket_id) {
            return Err(FieldError::new(in_ticket, format!("is {ticket_id} a second time")));
        }
        observed.push((ticket_id, resource::required(&format!("{field}[{number}].resource"), one.resource)?));
    }
    Ok(Observations::new(observed.iter().map(|(ticket_id, resource)| (*ticket_id, resource))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_and_marked_tickets_are_inverse() {
        for count in [0, 1, 7, 8, 9, 17] {
            let tickets: Vec<Uuid> = (0..count).map(Uuid::from_u128).collect();
            for step in 1..4 {
                let some: Vec<Uuid> = tickets.iter().step_by(step).copied().collect();
                assert_eq!(marked("idle", &marks(&tickets, &some), &tickets).unwrap(), some);
            }
            assert_eq!(marks(&tickets, &[]), [0_u8; 0]);
        }
    }
}
