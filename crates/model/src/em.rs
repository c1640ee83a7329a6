//! EMs: identity, capacity, use and the state of their registration.
//!
//! An [`Em`] is one row: its `used` and `locked` are the sums of its live tickets, and all its amounts have one resource
//! type. The type answers questions about one EM (what is left, which dimensions it provides). It never changes counters:
//! that is the ledger's work. Callers: the ledger, placement and the store.

use std::{collections::BTreeMap, fmt, sync::Arc};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    em_drain::EmDrain,
    name::{FieldError, Labels, Name, check_new, parse_instance},
    resource::{Dimension, LeftResource, Resource, ResourceError, ResourceType},
    ticket_digest::TicketDigest,
    ticket_end::TicketEnd,
};

/// Identity of an EM: application name and instance. The two parts are never joined into one string.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EmInstance {
    /// Application name, such as `linkis-cg-engineconnmanager`.
    pub application_name: Name,
    /// Instance, by convention `host:port`.
    pub instance: Name,
}

impl EmInstance {
    /// Parses both parts; `field` is the path of the instance in the request.
    ///
    /// # Errors
    /// The part that is not a valid name.
    pub fn parse(field: &str, application_name: &str, instance: &str) -> Result<Self, FieldError> {
        let (application_name, instance) = parse_instance(field, application_name, instance)?;
        Ok(Self { application_name, instance })
    }

    /// Checks both parts of an EM that a call creates, by the stricter rules of [`check_new`].
    ///
    /// # Errors
    /// The part that is not valid as a new name.
    pub fn check_new(&self, field: &str) -> Result<(), FieldError> {
        check_new(&format!("{field}.application_name"), self.application_name.as_str())?;
        check_new(&format!("{field}.instance"), self.instance.as_str())
    }
}

/// For display; not parsed.
impl fmt::Display for EmInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.application_name, self.instance)
    }
}

/// A registered EM. `used` and `locked` are the sums of its live tickets; all amounts have one resource type.
#[derive(Debug, Clone, PartialEq)]
pub struct Em {
    /// Identity of the EM.
    pub instance: EmInstance,
    /// Total capacity.
    pub total: Resource,
    /// Part of `total` that is never granted.
    pub protected: Resource,
    /// Sum used by its engines.
    pub used: Resource,
    /// Sum granted and not yet confirmed.
    pub locked: Resource,
    /// Digest of its used tickets; not sent to clients.
    pub used_tickets: TicketDigest,
    /// Labels of its registration.
    pub labels: Labels,
    /// Further labels that the EM is reserved for. Only requests with all of them are placed here.
    pub reserved: Labels,
    /// Registration number. Increases with each registration, with gaps.
    pub epoch: i64,
    /// Time of the latest registration, by the database clock.
    pub register_time: OffsetDateTime,
    /// Write counter of the row. An update states the version that it read.
    pub version: i64,
    /// Unregistration in progress, if any.
    pub going: Option<UnregisterProgress>,
    /// Label sets that count its tickets.
    pub counted: LabelSetProgress,
    /// Drain of the EM, if any.
    pub drain: Option<Arc<EmDrain>>,
    /// Whether an operator held the EM when its row was read. Placement avoids it.
    pub is_held: bool,
}

/// An unregistration in progress. The tickets of all registrations up to `epoch` end in steps. The row is deleted last,
/// unless the EM registers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnregisterProgress {
    /// Latest registration whose tickets end.
    pub epoch: i64,
    /// How the tickets end.
    pub end: TicketEnd,
    /// Last processed ticket, in order of ticket ids.
    pub after: Uuid,
}

/// Progress of counting an EM's tickets by label set.
///
/// Label sets have increasing ids. A new label set is counted EM by EM under the EM's lock. A change of a ticket therefore
/// knows from the EM's row whether the counters already include the ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LabelSetProgress {
    /// All tickets are counted in label sets up to this id.
    pub to: i64,
    /// Label set id and ticket id: tickets up to this ticket are also counted in label sets up to that id.
    pub under_way: Option<(i64, Uuid)>,
}

impl LabelSetProgress {
    /// Returns whether a live ticket is included in the counters of a label set.
    pub fn counts(&self, label_set_id: i64, ticket_id: Uuid) -> bool {
        label_set_id <= self.to || self.under_way.is_some_and(|(to, after)| label_set_id <= to && ticket_id <= after)
    }
}

impl Em {
    /// Returns whether the EM is registered: not unregistering, or registered again since.
    pub fn is_registered(&self) -> bool {
        self.going.is_none_or(|going| going.epoch < self.epoch)
    }

    /// Returns the labels and the reserved labels.
    pub fn all_labels(&self) -> impl Iterator<Item = (&String, &String)> {
        self.labels.as_map().iter().chain(self.reserved.as_map())
    }

    /// Returns the value of a label or reserved label.
    pub fn label(&self, key: &str) -> Option<&String> {
        self.labels.as_map().get(key).or_else(|| self.reserved.as_map().get(key))
    }

    /// Returns whether the labels of a request include all reserved labels.
    pub fn admits(&self, carried: &BTreeMap<String, String>) -> bool {
        self.reserved.as_map().iter().all(|(key, value)| carried.get(key) == Some(value))
    }

    /// Returns the resource type of its amounts.
    pub fn resource_type(&self) -> ResourceType {
        self.total.resource_type()
    }

    /// Returns total − protected − used − locked. Negative where a capacity was lowered below the use.
    ///
    /// # Errors
    /// [`ResourceError`] if the amounts overflow or differ in type.
    pub fn left(&self) -> Result<LeftResource, ResourceError> {
        Resource::left(&self.total, &self.protected, &self.used, &self.locked)
    }

    /// Returns the part of a ticket's amounts that this EM counts, such as the driver part of a DriverAndYarn. Dimensions
    /// that the EM no longer provides are included.
    ///
    /// # Errors
    /// [`ResourceError`] if the type cannot be projected.
    pub fn share(&self, held: &Resource) -> Result<Resource, ResourceError> {
        held.project(self.resource_type())
    }

    /// Returns the part of a request that this EM must provide.
    ///
    /// # Errors
    /// [`ResourceError::Unanswerable`] or [`ResourceError::UnknownDimension`] if the EM does not provide a requested
    /// dimension.
    pub fn project(&self, asked: &Resource) -> Result<Resource, ResourceError> {
        let share = self.share(asked)?;
        self.provides(&share).map(|()| share)
    }

    /// Checks that the EM provides every dimension of a share.
    ///
    /// # Errors
    /// [`ResourceError::UnknownDimension`] for the first dimension that it does not provide.
    pub fn provides(&self, share: &Resource) -> Result<(), ResourceError> {
        let unknown = share.amounts().find(|(dimension, _)| !self.total.has(dimension));
        unknown.map_or(Ok(()), |(dimension, _)| Err(ResourceError::UnknownDimension { dimension }))
    }

    /// Returns whether its amounts are comparable with `other`: same type and same queue.
    pub fn is_counted_like(&self, other: &Resource) -> bool {
        self.resource_type() == other.resource_type() && self.total.covers(other).is_ok()
    }

    /// Returns used + locked in percent of the unprotected capacity, in the fullest dimension, rounded down. An unprotected
    /// capacity of zero counts as one unit.
    pub fn fullness_percent(&self) -> i128 {
        let percent = |(dimension, total): (Dimension, i64)| {
            let room = total.saturating_sub(self.protected.get(&dimension)).max(1);
            let held = i128::from(self.used.get(&dimension)) + i128::from(self.locked.get(&dimension));
            held * 100 / i128::from(room)
        };
        self.total.amounts().map(percent).max().unwrap_or_default()
    }

    /// Returns whether no resources are used or locked.
    pub fn is_idle(&self) -> bool {
        self.used.is_zero() && self.locked.is_zero()
    }
}
