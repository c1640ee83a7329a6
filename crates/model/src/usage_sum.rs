//! Use over time: amounts of ended tickets multiplied by their duration, summed by the hour of their end.
//!
//! The sums are exact integers; their number per hour is bounded. Never: a basis of a decision, because they are for
//! accounting only. Callers: the roll-up task, and the call that lists the sums.

use std::collections::{BTreeMap, BTreeSet};

use time::OffsetDateTime;

use super::{
    em::EmInstance,
    resource::{Dimension, Resource},
};

/// Maximum number of individual names per hour and grouping; further names are summed as others.
pub const NAMES_MAX: usize = 10_000;

text_enum! {
    /// Grouping of the sums. The texts are the values of `linkis_resource_usage_hour.used_by`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum UsageBy {
        /// By user.
        User = "user",
        /// By application of the user.
        Creator = "creator",
        /// By engine type, which may be empty.
        EngineType = "engine_type",
        /// By EM.
        Em = "em",
    }
}

/// Name that a sum belongs to; the others sort last.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UsageName {
    /// Name of a user, creator, engine type or EM application; and the instance of an EM, otherwise empty.
    Name(String, String),
    /// All further names together.
    Others,
}

/// A ticket that ended.
#[derive(Debug, Clone, PartialEq)]
pub struct EndedTicketUse {
    /// User of the ticket.
    pub user: String,
    /// Application of the user.
    pub creator: String,
    /// Engine type; may be empty.
    pub engine_type: String,
    /// EM of the ticket.
    pub em: EmInstance,
    /// Amounts at its end.
    pub resource: Resource,
    /// Time of the grant; `None` if unknown.
    pub since: Option<OffsetDateTime>,
    /// Time of the end.
    pub until: OffsetDateTime,
}

impl EndedTicketUse {
    fn used_by(&self, by: UsageBy) -> UsageName {
        let name = |name: &str| UsageName::Name(name.to_owned(), String::new());
        match by {
            UsageBy::User => name(&self.user),
            UsageBy::Creator => name(&self.creator),
            UsageBy::EngineType => name(&self.engine_type),
            UsageBy::Em => UsageName::Name(self.em.application_name.to_string(), self.em.instance.to_string()),
        }
    }
}

/// Exact use of tickets. One ticket of the largest amounts can live for thousands of years before a sum saturates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageAmount {
    /// Number of tickets.
    pub tickets: i64,
    /// Thousandths of cores on EMs, times microseconds.
    pub cores: i128,
    /// Bytes on EMs, times microseconds.
    pub bytes: i128,
    /// Thousandths of cores in queues and namespaces, times microseconds.
    pub queue_cores: i128,
    /// Bytes in queues and namespaces, times microseconds.
    pub queue_bytes: i128,
}

impl UsageAmount {
    /// Returns the use of one ticket.
    pub fn of(ended: &EndedTicketUse) -> Self {
        let micros = ended.since.map_or(0, |since| (ended.until - since).whole_microseconds().max(0));
        let times = |dimension: &Dimension| i128::from(ended.resource.get(dimension)).saturating_mul(micros);
        let millis = |dimension: &Dimension| times(dimension).saturating_mul(1000);
        Self {
            tickets: 1,
            cores: millis(&Dimension::Cores),
            bytes: times(&Dimension::Memory),
            queue_cores: millis(&Dimension::QueueCores).saturating_add(times(&Dimension::KubernetesMillicores)),
            queue_bytes: times(&Dimension::QueueMemory).saturating_add(times(&Dimension::KubernetesMemory)),
        }
    }

    fn add(&mut self, more: &Self) {
        self.tickets = self.tickets.saturating_add(more.tickets);
        self.cores = self.cores.saturating_add(more.cores);
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.queue_cores = self.queue_cores.saturating_add(more.queue_cores);
        self.queue_bytes = self.queue_bytes.saturating_add(more.queue_bytes);
    }
}

/// Key of the sums: hour and grouping.
pub type HourKey = (OffsetDateTime, UsageBy);

/// Sums by hour, grouping and name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageSums(pub BTreeMap<(HourKey, UsageName), UsageAmount>);

impl UsageSums {
    /// Returns the sums of some tickets. Each ticket counts in the hour of its end.
    pub fn of<'a>(ended: impl IntoIterator<Item = &'a EndedTicketUse>) -> Self {
        let mut sums = Self::default();
        for ended in ended {
            let (used, hour) = (UsageAmount::of(ended), hour_of(ended.until));
            for by in UsageBy::ALL {
                sums.count((hour, by), ended.used_by(by), &used);
            }
        }
        sums
    }

    fn count(&mut self, hour_by: HourKey, used_by: UsageName, used: &UsageAmount) {
        self.0.entry((hour_by, used_by)).or_default().add(used);
    }

    /// Moves new names to the others where the hour has no more capacity for names. `known` contains the names with
    /// individual sums, and `names` their number per hour and grouping.
    pub fn within_bounds(
        self,
        known: &BTreeSet<(HourKey, UsageName)>,
        mut names: BTreeMap<HourKey, usize>,
        names_max: usize,
    ) -> Self {
        let mut within = Self::default();
        for ((hour_by, used_by), used) in self.0 {
            let key = (hour_by, used_by);
            let names = names.entry(hour_by).or_default();
            if known.contains(&key) {
                within.count(hour_by, key.1, &used);
            } else if *names < names_max {
                *names += 1;
                within.count(hour_by, key.1, &used);
            } else {
                within.count(hour_by, UsageName::Others, &used);
            }
        }
        within
    }
}

/// Returns the start of the hour.
pub fn hour_of(at: OffsetDateTime) -> OffsetDateTime {
    let start = at.unix_timestamp() - at.unix_timestamp().rem_euclid(3600);
    OffsetDateTime::from_unix_timestamp(start).unwrap_or(at)
}

/// A sum for display.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageSum {
    /// Name that the sum belongs to.
    pub used_by: UsageName,
    /// Start of the hour; `None` for the whole requested range.
    pub hour: Option<OffsetDateTime>,
    /// Number of tickets.
    pub tickets: i64,
    /// Cores on EMs, times seconds.
    pub core_seconds: f64,
    /// Bytes on EMs, times seconds.
    pub byte_seconds: f64,
    /// Cores in queues and namespaces, times seconds.
    pub queue_core_seconds: f64,
    /// Bytes in queues and namespaces, times seconds.
    pub queue_byte_seconds: f64,
}

#[cfg(test)]
mod tests {
    use time::{Duration, macros::datetime};

    use super::*;

    const NOON: OffsetDateTime = datetime!(2026-01-01 12:00 UTC);

    fn ended(user: &str, resource: Resource, since: OffsetDateTime, until: OffsetDateTime) -> EndedTicketUse {
        EndedTicketUse {
            user: user.to_owned(),
            creator: "IDE".to_owned(),
            engine_type: String::new(),
            em: EmInstance::parse("em", "ecm", "host1").unwrap(),
            resource,
            since: Some(since),
            until,
        }
    }

    fn cores(cores: i64) -> Resource {
        Resource::load_instance(7, cores, 1).unwrap()
    }

    #[test]
    fn usage_of_ticket_counts_in_hour_of_its_end() {
        let before = NOON - Duration::minutes(30);
        let tickets = [
            ended("alice", cores(2), before, NOON - Duration::microseconds(1)),
            ended("alice", cores(2), before, NOON),
            ended("bob", cores(1), NOON, NOON + Duration::milliseconds(1)),
        ];
        let sums = UsageSums::of(&tickets);
        let of = |hour, by, name: &str, instance: &str| {
            sums.0.get(&((hour, by), UsageName::Name(name.to_owned(), instance.to_owned()))).copied()
        };
        let half_an_hour: i128 = 1_800_000_000;
        let eleven = of(NOON - Duration::hours(1), UsageBy::User, "alice", "").unwrap();
        assert_eq!(
            (eleven.tickets, eleven.cores, eleven.bytes),
            (1, 2000 * (half_an_hour - 1), 7 * (half_an_hour - 1))
        );
        let noon = of(NOON, UsageBy::User, "alice", "").unwrap();
        assert_eq!((noon.tickets, noon.cores), (1, 2000 * half_an_hour));
        let on_em = of(NOON, UsageBy::Em, "ecm", "host1").unwrap();
        assert_eq!((on_em.tickets, on_em.cores), (2, 2000 * half_an_hour + 1_000_000));
        assert_eq!(of(NOON, UsageBy::EngineType, "", "").unwrap(), on_em, "a type may be empty");
        assert_eq!(sums.0.len(), 4 + 5);
    }

    #[test]
    fn usage_of_largest_amounts_does_not_overflow() {
        let long = NOON - Duration::days(3_650_000);
        let tickets: Vec<_> = (0..100).map(|_| ended("alice", cores(i64::MAX), long, NOON)).collect();
        let used = UsageSums::of(&tickets).0.into_values().next().unwrap();
        assert_eq!(used.tickets, 100);
        assert!(used.cores > 0 && used.bytes > 0);
        // A clock that was set back does not make the use negative.
        assert_eq!(UsageAmount::of(&ended("alice", cores(1), NOON, long)).cores, 0);
        assert_eq!(UsageAmount::of(&EndedTicketUse { since: None, ..ended("alice", cores(1), NOON, NOON) }).cores, 0);
    }

    #[test]
    fn usage_names_above_bound_count_as_others() {
        let tickets: Vec<_> = (0..10).map(|n| ended(&format!("user{n}"), cores(1), NOON, NOON)).collect();
        let sums = UsageSums::of(&tickets);
        let known = BTreeSet::from([((NOON, UsageBy::User), UsageName::Name("user9".to_owned(), String::new()))]);
        let within = sums.within_bounds(&known, BTreeMap::from([((NOON, UsageBy::User), 2)]), 5);
        let users: Vec<_> = within.0.iter().filter(|(((_, by), _), _)| *by == UsageBy::User).collect();
        // Three new names fit beside the two known ones, one of which has more use.
        assert_eq!(users.len(), 3 + 1 + 1, "{users:?}");
        assert_eq!(users.last().unwrap().0.1, UsageName::Others);
        assert_eq!(users.iter().map(|(_, used)| used.tickets).sum::<i64>(), 10);
        assert_eq!(users.last().unwrap().1.tickets, 6);
    }
}
