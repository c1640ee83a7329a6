//! Observations: the actual use of engines as their EMs measure it. Observations are stored beside the ledger and change no
//! counter.
//!
//! A report can contain very many, so they are packed into bytes until a task writes them. Callers: the heartbeat service
//! and the observation task.

use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    resource::{Resource, ResourceError},
    scope::label_of,
    ticket::Ticket,
};

/// Version of the packed format. Bytes with another version are ignored.
const FORMAT: u8 = 1;

/// Length of a ticket id in bytes.
const ID_BYTES: usize = 16;

/// Observed use of some tickets, in the order of the report, in packed form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observations {
    packed: Vec<u8>,
}

impl Observations {
    /// Packs observations; `None` if there are none.
    pub fn new<'a>(observed: impl IntoIterator<Item = (Uuid, &'a Resource)>) -> Option<Self> {
        let mut packed = vec![FORMAT];
        for (ticket_id, resource) in observed {
            packed.extend_from_slice(ticket_id.as_bytes());
            resource.pack(&mut packed);
        }
        (packed.len() > 1).then_some(Self { packed })
    }

    /// Restores the bytes of [`Observations::packed`].
    pub fn from_packed(packed: Vec<u8>) -> Self {
        Self { packed }
    }

    /// Returns the packed bytes.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// Returns the tickets with their observed use.
    pub fn iter(&self) -> impl Iterator<Item = (Uuid, Resource)> {
        let mut rest = self.packed.strip_prefix(&[FORMAT]).unwrap_or_default();
        std::iter::from_fn(move || {
            let (id, resource) = rest.split_first_chunk::<ID_BYTES>()?;
            rest = resource;
            Some((Uuid::from_bytes(*id), Resource::unpack(&mut rest)?))
        })
    }

    /// Returns the SHA-256 hash of the tickets, resource types and queues, without the amounts. With an equal hash, the
    /// amounts need no new comparison with the tickets.
    pub fn subject_hash(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for (ticket_id, resource) in self.iter() {
            let is_external = |amount: &(_, i64)| label_of(&amount.0).is_some() && amount.1 != 0;
            let place = resource.queue_name().or(resource.namespace()).unwrap_or_default();
            hash.update(ticket_id.as_bytes());
            hash.update(resource.resource_type().as_str());
            hash.update([0, u8::from(resource.amounts().any(|amount| is_external(&amount)))]);
            hash.update(place);
            hash.update([0]);
        }
        hash.finalize().into()
    }
}

/// Observed use of a ticket, with its time.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedUse {
    /// Amounts that the engine actually uses.
    pub resource: Resource,
    /// Arrival of the report, by the database clock.
    pub at: OffsetDateTime,
}

/// Converts the use that an EM reports into a use of the ticket's resource.
///
/// # Errors
/// As [`Resource::as_use_of`]: another type, queue or namespace.
pub fn observed_of(ticket: &Ticket, said: &Resource) -> Result<Resource, ResourceError> {
    said.as_use_of(ticket.resource())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::{ResourceParts, YarnAmounts};

    fn yarn(queue: &str, queue_cores: i64) -> Resource {
        let queue = YarnAmounts { queue_name: queue.into(), queue_cores, ..YarnAmounts::default() };
        Resource::from_parts(ResourceParts::Yarn(queue)).unwrap()
    }

    fn of(observed: &[(u128, Resource)]) -> Observations {
        Observations::new(observed.iter().map(|(id, resource)| (Uuid::from_u128(*id), resource))).unwrap()
    }

    #[test]
    fn observations_round_trip_in_order() {
        let told = [(9, yarn("a", 1)), (3, Resource::load(1, 2).unwrap()), (7, yarn("", 0))];
        let kept = Observations::from_packed(of(&told).packed().to_vec());
        let read: Vec<_> = kept.iter().map(|(id, resource)| (id.as_u128(), resource)).collect();
        assert_eq!(read, told);
        assert_eq!(Observations::new([]), None);
        assert_eq!(Observations::from_packed(vec![FORMAT + 1, 0, 0]).iter().count(), 0);
    }

    #[test]
    fn observation_subject_ignores_amounts_only() {
        let before = of(&[(1, yarn("a", 1))]).subject_hash();
        assert_eq!(of(&[(1, yarn("a", 2))]).subject_hash(), before);
        let cpu = Resource::cpu(1).unwrap();
        for other in [(2, yarn("a", 1)), (1, yarn("b", 1)), (1, yarn("a", 0)), (1, cpu)] {
            assert_ne!(of(std::slice::from_ref(&other)).subject_hash(), before, "{other:?}");
        }
    }
}
