//! Use over time: what tickets held that ended, summed by the hour of their ends.

use std::collections::{BTreeMap, BTreeSet};

use time::OffsetDateTime;

use super::{
    em::EmInstance,
    resource::{Dimension, Resource},
};

/// How many names are told apart in an hour, for each way to sum: the rest are others.
pub const NAMES_MAX: usize = 10_000;

/// By what use is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UsageBy {
    /// By user.
    User,
    /// By the applications of users.
    Creator,
    /// By the type of engine, which may be empty.
    EngineType,
    /// By EM.
    Em,
}

impl UsageBy {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::User, Self::Creator, Self::EngineType, Self::Em];

    /// As it stands in `linkis_resource_usage_hour.used_by`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Creator => "creator",
            Self::EngineType => "engine_type",
            Self::Em => "em",
        }
    }

    /// The reverse of [`UsageBy::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|by| by.as_str() == text)
    }
}

/// Whose use; the others, who are not told apart any further, come last.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UsedBy {
    /// By name: that of a user, creator or type of engine, or the application's of an EM; and the instance of the EM, otherwise empty.
    Name(String, String),
    /// All others.
    Others,
}

/// A ticket that ended.
#[derive(Debug, Clone, PartialEq)]
pub struct EndedUse {
    /// For whom it was.
    pub user: String,
    /// By which application of the user.
    pub creator: String,
    /// The engine's type; may be empty.
    pub engine_type: String,
    /// Where.
    pub em: EmInstance,
    /// What it held at its end.
    pub resource: Resource,
    /// When it was granted; `None` if nobody remembers.
    pub since: Option<OffsetDateTime>,
    /// When it ended.
    pub until: OffsetDateTime,
}

impl EndedUse {
    fn used_by(&self, by: UsageBy) -> UsedBy {
        let name = |name: &str| UsedBy::Name(name.to_owned(), String::new());
        match by {
            UsageBy::User => name(&self.user),
            UsageBy::Creator => name(&self.creator),
            UsageBy::EngineType => name(&self.engine_type),
            UsageBy::Em => UsedBy::Name(self.em.application_name.to_string(), self.em.instance.to_string()),
        }
    }
}

/// What tickets used, exactly. One ticket of the largest amounts there are could live for thousands of years; what goes beyond that
/// stays there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    /// How many.
    pub tickets: i64,
    /// Thousandths of cores of hosts, times microseconds.
    pub cores: i128,
    /// Bytes of hosts, times microseconds.
    pub bytes: i128,
    /// Thousandths of cores in queues and namespaces, times microseconds.
    pub queue_cores: i128,
    /// Bytes in queues and namespaces, times microseconds.
    pub queue_bytes: i128,
}

impl Used {
    /// By one ticket.
    pub fn of(ended: &EndedUse) -> Self {
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

/// Where sums are kept: an hour, and a way to sum.
pub type HourBy = (OffsetDateTime, UsageBy);

/// Sums, by hour and name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageSums(pub BTreeMap<(HourBy, UsedBy), Used>);

impl UsageSums {
    /// Those of some tickets, each of which counts in the hour of its end.
    pub fn of<'a>(ended: impl IntoIterator<Item = &'a EndedUse>) -> Self {
        let mut sums = Self::default();
        for ended in ended {
            let (used, hour) = (Used::of(ended), hour_of(ended.until));
            for by in UsageBy::ALL {
                sums.count((hour, by), ended.used_by(by), &used);
            }
        }
        sums
    }

    fn count(&mut self, hour_by: HourBy, used_by: UsedBy, used: &Used) {
        self.0.entry((hour_by, used_by)).or_default().add(used);
    }

    /// The same with names that are new as long as there is room for them: `known` are told apart already, and of so many there are
    /// `names` in each hour.
    pub fn within_bounds(
        self,
        known: &BTreeSet<(HourBy, UsedBy)>,
        mut names: BTreeMap<HourBy, usize>,
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
                within.count(hour_by, UsedBy::Others, &used);
            }
        }
        within
    }
}

/// The hour that a moment is in.
pub fn hour_of(at: OffsetDateTime) -> OffsetDateTime {
    let start = at.unix_timestamp() - at.unix_timestamp().rem_euclid(3600);
    OffsetDateTime::from_unix_timestamp(start).unwrap_or(at)
}

/// A sum as it is told.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageSum {
    /// Whose.
    pub used_by: UsedBy,
    /// Which hour; `None` for all that were asked for.
    pub hour: Option<OffsetDateTime>,
    /// How many tickets.
    pub tickets: i64,
    /// Cores of hosts, times seconds.
    pub core_seconds: f64,
    /// Bytes of hosts, times seconds.
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

    fn ended(user: &str, resource: Resource, since: OffsetDateTime, until: OffsetDateTime) -> EndedUse {
        EndedUse {
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
    fn all_of_a_ticket_counts_in_the_hour_of_its_end() {
        let before = NOON - Duration::minutes(30);
        let tickets = [
            ended("alice", cores(2), before, NOON - Duration::microseconds(1)),
            ended("alice", cores(2), before, NOON),
            ended("bob", cores(1), NOON, NOON + Duration::milliseconds(1)),
        ];
        let sums = UsageSums::of(&tickets);
        let of = |hour, by, name: &str, instance: &str| {
            sums.0.get(&((hour, by), UsedBy::Name(name.to_owned(), instance.to_owned()))).copied()
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
    fn the_largest_amounts_for_the_longest_time_neither_wrap_nor_panic() {
        let long = NOON - Duration::days(3_650_000);
        let tickets: Vec<_> = (0..100).map(|_| ended("alice", cores(i64::MAX), long, NOON)).collect();
        let used = UsageSums::of(&tickets).0.into_values().next().unwrap();
        assert_eq!(used.tickets, 100);
        assert!(used.cores > 0 && used.bytes > 0);
        // And a clock that went back makes nobody a debtor.
        assert_eq!(Used::of(&ended("alice", cores(1), NOON, long)).cores, 0);
        assert_eq!(Used::of(&EndedUse { since: None, ..ended("alice", cores(1), NOON, NOON) }).cores, 0);
    }

    #[test]
    fn of_too_many_names_the_rest_are_others_and_none_is_lost() {
        let tickets: Vec<_> = (0..10).map(|n| ended(&format!("user{n}"), cores(1), NOON, NOON)).collect();
        let sums = UsageSums::of(&tickets);
        let known = BTreeSet::from([((NOON, UsageBy::User), UsedBy::Name("user9".to_owned(), String::new()))]);
        let within = sums.within_bounds(&known, BTreeMap::from([((NOON, UsageBy::User), 2)]), 5);
        let users: Vec<_> = within.0.iter().filter(|(((_, by), _), _)| *by == UsageBy::User).collect();
        // Three that are new have room beside the two that were there, of which one has more.
        assert_eq!(users.len(), 3 + 1 + 1, "{users:?}");
        assert_eq!(users.last().unwrap().0.1, UsedBy::Others);
        assert_eq!(users.iter().map(|(_, used)| used.tickets).sum::<i64>(), 10);
        assert_eq!(users.last().unwrap().1.tickets, 6);
    }
}
