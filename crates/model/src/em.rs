//! EMs: what a host provides, what lives on it, and whether it can answer for a request.

use std::{collections::BTreeMap, fmt, sync::Arc};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    drain::Drain,
    end::End,
    name::{FieldError, Labels, Name, check_new, parse_instance},
    resource::{Dimension, Left, Resource, ResourceError, ResourceType},
    ticket_digest::TicketDigest,
};

/// The name of a host that starts engines. The two parts are never joined into one string.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EmInstance {
    /// The name of the application, e.g. `linkis-cg-engineconnmanager`.
    pub application_name: Name,
    /// The instance, by convention host:port.
    pub instance: Name,
}

impl EmInstance {
    /// Checks both parts; `field` is the path of the instance in the request.
    pub fn parse(field: &str, application_name: &str, instance: &str) -> Result<Self, FieldError> {
        let (application_name, instance) = parse_instance(field, application_name, instance)?;
        Ok(Self { application_name, instance })
    }

    /// Checks both parts of an EM that a call brings into being, as [`check_new`] does.
    ///
    /// # Errors
    /// The part that is not legal in a new name.
    pub fn check_new(&self, field: &str) -> Result<(), FieldError> {
        check_new(&format!("{field}.application_name"), self.application_name.as_str())?;
        check_new(&format!("{field}.instance"), self.instance.as_str())
    }
}

/// For people: not to be taken apart again.
impl fmt::Display for EmInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.application_name, self.instance)
    }
}

/// A registered EM. `used` and `locked` are the sums over its live tickets; all amounts are of one type.
#[derive(Debug, Clone, PartialEq)]
pub struct Em {
    /// Which.
    pub instance: EmInstance,
    /// Everything that it provides.
    pub total: Resource,
    /// The part of `total` that is never granted.
    pub protected: Resource,
    /// The sum of what its engines use.
    pub used: Resource,
    /// The sum of what is granted on it and not yet in use.
    pub locked: Resource,
    /// Which of its tickets are used; not told to clients.
    pub used_tickets: TicketDigest,
    /// What it said of itself when it registered.
    pub labels: Labels,
    /// Labels, besides, that it is reserved for: only requests that carry all of them come in.
    pub reserved: Labels,
    /// Which registration: it grows with each, but does not count them.
    pub epoch: i64,
    /// When it registered last, by the database's clock.
    pub register_time: OffsetDateTime,
    /// Counts the writes of its row: a write states the version that it read.
    pub version: i64,
    /// That it goes, if it does.
    pub going: Option<Going>,
    /// Which counters of label sets count its tickets.
    pub counted: Counted,
    /// That nothing new is granted on it, if so.
    pub drain: Option<Arc<Drain>>,
}

/// An EM that goes: the tickets of its registrations up to an epoch end in steps; its row goes last, unless it registers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Going {
    /// The last registration whose tickets end.
    pub epoch: i64,
    /// How they end.
    pub end: End,
    /// The tickets up to this one have been seen, in the order of their ids.
    pub after: Uuid,
}

/// Up to which label set the tickets of an EM are counted.
///
/// Label sets have growing numbers. A new one is counted EM by EM, under the EM's lock: so whoever changes a ticket knows from the
/// EM's own row whether it is in the counters already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// All tickets are in the counters of the label sets up to this one.
    pub to: i64,
    /// Those up to this ticket are also in the counters up to that label set.
    pub under_way: Option<(i64, Uuid)>,
}

impl Counted {
    /// Whether a ticket, if it lives, is in the counters of a label set.
    pub fn counts(&self, label_set_id: i64, ticket_id: Uuid) -> bool {
        label_set_id <= self.to || self.under_way.is_some_and(|(to, after)| label_set_id <= to && ticket_id <= after)
    }
}

impl Em {
    /// Whether it can be used: it does not go, or has registered again since it went.
    pub fn is_registered(&self) -> bool {
        self.going.is_none_or(|going| going.epoch < self.epoch)
    }

    /// Its labels, with those that it is reserved for.
    pub fn all_labels(&self) -> impl Iterator<Item = (&String, &String)> {
        self.labels.as_map().iter().chain(self.reserved.as_map())
    }

    /// The value of one of them.
    pub fn label(&self, key: &str) -> Option<&String> {
        self.labels.as_map().get(key).or_else(|| self.reserved.as_map().get(key))
    }

    /// Whether it lets requests in that carry these labels.
    pub fn admits(&self, carried: &BTreeMap<String, String>) -> bool {
        self.reserved.as_map().iter().all(|(key, value)| carried.get(key) == Some(value))
    }

    /// The type in which its amounts are counted.
    pub fn resource_type(&self) -> ResourceType {
        self.total.resource_type()
    }

    /// What can still be granted: total − protected − used − locked. Negative where a capacity was lowered under live tickets.
    pub fn left(&self) -> Result<Left, ResourceError> {
        Resource::left(&self.total, &self.protected, &self.used, &self.locked)
    }

    /// The part of what a ticket holds that is counted here, e.g. the driver of a DriverAndYarn. Also of dimensions that the EM
    /// has ceased to provide.
    pub fn share(&self, held: &Resource) -> Result<Resource, ResourceError> {
        held.project(self.resource_type())
    }

    /// The part of `asked` that this EM answers for.
    ///
    /// # Errors
    /// [`ResourceError::Unanswerable`] or [`ResourceError::UnknownDimension`] if a dimension is asked that the EM does not provide.
    pub fn project(&self, asked: &Resource) -> Result<Resource, ResourceError> {
        let share = self.share(asked)?;
        self.provides(&share).map(|()| share)
    }

    /// Whether it provides every dimension of a share.
    ///
    /// # Errors
    /// [`ResourceError::UnknownDimension`].
    pub fn provides(&self, share: &Resource) -> Result<(), ResourceError> {
        let unknown = share.amounts().find(|(dimension, _)| !self.total.has(dimension));
        unknown.map_or(Ok(()), |(dimension, _)| Err(ResourceError::UnknownDimension { dimension }))
    }

    /// Whether its amounts can be compared with `other`'s: the same type, on the same queue.
    pub fn is_counted_like(&self, other: &Resource) -> bool {
        self.resource_type() == other.resource_type() && self.total.covers(other).is_ok()
    }

    /// How many hundredths are held of what is not protected, in the dimension of which it is the most; rounded down. Of nothing, what is
    /// held counts as so many times.
    pub fn fullness_percent(&self) -> i128 {
        let percent = |(dimension, total): (Dimension, i64)| {
            let room = total.saturating_sub(self.protected.get(&dimension)).max(1);
            let held = i128::from(self.used.get(&dimension)) + i128::from(self.locked.get(&dimension));
            held * 100 / i128::from(room)
        };
        self.total.amounts().map(percent).max().unwrap_or_default()
    }

    /// Whether it holds nothing.
    pub fn is_idle(&self) -> bool {
        self.used.is_zero() && self.locked.is_zero()
    }
}
