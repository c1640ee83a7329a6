//! The whole cluster in a few numbers, and what has changed between two looks.

use std::{cmp::Ordering, collections::BTreeMap};

use time::OffsetDateTime;

use super::{
    em::EmInstance,
    limit::ScopeUsage,
    report::Health,
    resource::{Dimension, Resource, ResourceType},
    ticket::Ticket,
};

/// How an EM stands, the graver the greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EmState {
    /// It reports that nothing is wrong.
    Healthy,
    /// It has not reported since it registered last.
    Unreported,
    /// It reports that something is wrong, but engines can start.
    Warn,
    /// It reports that it is not to be chosen.
    Unhealthy,
    /// It is drained.
    Draining,
    /// Neither a report nor a registration has come for too long.
    Silent,
    /// It goes, and its tickets are still being ended.
    Unregistering,
}

/// What the state of an EM follows from.
#[derive(Debug, Clone, Copy)]
pub struct Signs {
    /// Whether it goes.
    pub is_going: bool,
    /// Whether nothing was heard of it for too long.
    pub is_silent: bool,
    /// Whether nothing new is granted on it.
    pub is_drained: bool,
    /// How it says it is, if it has since it registered last.
    pub health: Option<Health>,
}

impl EmState {
    /// All of them, the gravest last.
    pub const ALL: [Self; 7] = [
        Self::Healthy,
        Self::Unreported,
        Self::Warn,
        Self::Unhealthy,
        Self::Draining,
        Self::Silent,
        Self::Unregistering,
    ];

    /// As metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unreported => "unreported",
            Self::Warn => "warn",
            Self::Unhealthy => "unhealthy",
            Self::Draining => "draining",
            Self::Silent => "silent",
            Self::Unregistering => "unregistering",
        }
    }

    /// The gravest that is so.
    pub fn of(signs: Signs) -> Self {
        match signs {
            Signs { is_going: true, .. } => Self::Unregistering,
            Signs { is_silent: true, .. } => Self::Silent,
            Signs { is_drained: true, .. } => Self::Draining,
            Signs { health: Some(Health::Unhealthy), .. } => Self::Unhealthy,
            Signs { health: Some(Health::Warn), .. } => Self::Warn,
            Signs { health: Some(Health::Healthy), .. } => Self::Healthy,
            Signs { health: None, .. } => Self::Unreported,
        }
    }
}

/// The sums of one dimension; what is more than a number holds is the largest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DimensionTotals {
    /// Everything.
    pub total: i64,
    /// What is never granted.
    pub protected: i64,
    /// What engines use.
    pub used: i64,
    /// What is granted and not yet in use.
    pub locked: i64,
}

impl DimensionTotals {
    /// What can still be granted; negative where capacity was lowered under live tickets.
    pub fn left(&self) -> i64 {
        self.total.saturating_sub(self.protected).saturating_sub(self.used).saturating_sub(self.locked)
    }

    /// Counts others in.
    pub fn add(&mut self, other: &Self) {
        self.total = self.total.saturating_add(other.total);
        self.protected = self.protected.saturating_add(other.protected);
        self.used = self.used.saturating_add(other.used);
        self.locked = self.locked.saturating_add(other.locked);
    }
}

/// The EMs of an application that are in one state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmTotals {
    /// How many they are.
    pub ems: i64,
    /// What they have together.
    pub dimensions: BTreeMap<Dimension, DimensionTotals>,
}

/// The amounts of an EM.
#[derive(Debug)]
pub struct EmAmounts {
    /// Everything that it provides.
    pub total: Resource,
    /// The part of it that is never granted.
    pub protected: Resource,
    /// What its engines use.
    pub used: Resource,
    /// What is granted on it and not yet in use.
    pub locked: Resource,
}

impl EmAmounts {
    /// How many hundredths are held of what is not protected, in the fullest dimension; rounded down, up to 255. Of nothing, what is held
    /// counts as so many times.
    pub fn held_percent(&self) -> u8 {
        let percent = |(dimension, total): (Dimension, i64)| {
            let room = total.saturating_sub(self.protected.get(&dimension)).max(1);
            let held = i128::from(self.used.get(&dimension)) + i128::from(self.locked.get(&dimension));
            u8::try_from(held * 100 / i128::from(room)).unwrap_or(u8::MAX)
        };
        self.total.amounts().map(percent).max().unwrap_or_default()
    }
}

impl EmTotals {
    /// Counts sums in.
    pub fn add(&mut self, dimension: Dimension, sums: &DimensionTotals) {
        self.dimensions.entry(dimension).or_default().add(sums);
    }

    /// Counts the amounts of one EM in, which is counted already.
    pub fn add_amounts(&mut self, amounts: &EmAmounts) {
        let EmAmounts { total, protected, used, locked } = amounts;
        for (dimension, total) in total.amounts() {
            let [protected, used, locked] = [protected, used, locked].map(|resource| resource.get(&dimension));
            self.add(dimension, &DimensionTotals { total, protected, used, locked });
        }
    }
}

/// The dimensions of which an EM of this type has sums that a database can make: those of its own, and nothing but these. `None` if
/// its amounts have to be read one by one.
pub fn summed_dimensions(resource_type: ResourceType) -> Option<&'static [Dimension]> {
    let dimensions = resource_type.shape();
    let is_of_hosts =
        |dimension: &Dimension| matches!(dimension, Dimension::Memory | Dimension::Cores | Dimension::Instances);
    (!dimensions.is_empty() && dimensions.iter().all(is_of_hosts)).then_some(dimensions)
}

/// The live tickets.
#[derive(Debug, Clone, Default)]
pub struct TicketTotals {
    /// Those that engines use.
    pub used: i64,
    /// Those that are granted and not yet in use, up to a bound.
    pub locked: i64,
    /// Whether there are more than were counted.
    pub is_locked_partial: bool,
    /// The one that has been locked the longest.
    pub oldest_locked: Option<Ticket>,
}

/// The waiting line.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LineTotals {
    /// How many requests wait.
    pub waiting: i64,
    /// For how many seconds the one has that waits the longest.
    pub longest_seconds: Option<f64>,
}

/// What requests are answered, a second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Throughput {
    /// Those that are granted.
    pub grants: f64,
    /// Those that there is not enough for.
    pub refusals: f64,
}

/// The scopes that limits are for.
#[derive(Debug, Clone, Default)]
pub struct ScopeTotals {
    /// How many.
    pub scopes: i64,
    /// How many hold more than their limits allow.
    pub over_limit: i64,
    /// The fullest, the fullest first.
    pub fullest: Vec<ScopeUsage>,
    /// When they were looked at.
    pub at: Option<OffsetDateTime>,
}

/// The whole cluster at one moment.
#[derive(Debug, Clone)]
pub struct Overview {
    /// When, by the database's clock.
    pub at: OffsetDateTime,
    /// The EMs, by application and state.
    pub ems: BTreeMap<(String, EmState), EmTotals>,
    /// How each EM stands, by application and instance.
    pub states: Vec<(EmInstance, EmState)>,
    /// How many hundredths of each are held, in its fullest dimension and rounded down; up to 255.
    pub held_percent: Vec<u8>,
    /// The live tickets.
    pub tickets: TicketTotals,
    /// The waiting line.
    pub line: LineTotals,
    /// What requests are answered.
    pub throughput: Throughput,
    /// The scopes that limits are for.
    pub scopes: ScopeTotals,
}

/// An EM that came, went, or stands otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmChange {
    /// Which.
    pub em: EmInstance,
    /// How it stood; `None` if it was not registered.
    pub before: Option<EmState>,
    /// How it stands; `None` if it is registered no more.
    pub after: Option<EmState>,
}

/// What has changed between two looks at EMs, both of which are in the order of these.
pub fn changes(before: &[(EmInstance, EmState)], after: &[(EmInstance, EmState)]) -> Vec<EmChange> {
    let (mut before, mut after) = (before.iter().peekable(), after.iter().peekable());
    let mut changes = Vec::new();
    loop {
        let order = match (before.peek(), after.peek()) {
            (None, None) => return changes,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((was, _)), Some((is, _))) => was.cmp(is),
        };
        let was = if order.is_le() { before.next() } else { None };
        let is = if order.is_ge() { after.next() } else { None };
        let (was_state, is_state) = (was.map(|(_, state)| *state), is.map(|(_, state)| *state));
        if was_state != is_state
            && let Some((em, _)) = is.or(was)
        {
            changes.push(EmChange { em: em.clone(), before: was_state, after: is_state });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states(text: &str) -> Vec<(EmInstance, EmState)> {
        let state = |letter| match letter {
            'h' => EmState::Healthy,
            'w' => EmState::Warn,
            _ => EmState::Silent,
        };
        let one = |word: &str| {
            let (instance, letter) = word.split_once(':').unwrap();
            (EmInstance::parse("em", "ecm", instance).unwrap(), state(letter.chars().next().unwrap()))
        };
        text.split_whitespace().map(one).collect()
    }

    #[test]
    fn what_came_went_and_stands_otherwise_is_told() {
        for (before, after, told) in [
            ("", "", ""),
            ("a:h b:h", "a:h b:h", ""),
            ("", "a:h b:w", "a:None>Healthy b:None>Warn"),
            ("a:h b:w", "", "a:Healthy>None b:Warn>None"),
            (
                "a:h c:h e:s",
                "b:h c:s e:h f:w",
                "a:Healthy>None b:None>Healthy c:Healthy>Silent e:Silent>Healthy f:None>Warn",
            ),
        ] {
            let name = |state: Option<EmState>| state.map_or("None".to_owned(), |state| format!("{state:?}"));
            let line = |change: EmChange| {
                format!("{}:{}>{}", change.em.instance.as_str(), name(change.before), name(change.after))
            };
            let lines: Vec<_> = changes(&states(before), &states(after)).into_iter().map(line).collect();
            assert_eq!(lines.join(" "), told, "{before} / {after}");
        }
    }

    #[test]
    fn the_gravest_state_is_told() {
        let healthy = Signs { is_going: false, is_silent: false, is_drained: false, health: Some(Health::Healthy) };
        let drained = Signs { is_drained: true, ..healthy };
        let silent = Signs { is_silent: true, ..drained };
        let going = Signs { is_going: true, ..silent };
        let unhealthy = Signs { health: Some(Health::Unhealthy), ..healthy };
        let states = [healthy, Signs { health: None, ..healthy }, unhealthy, drained, silent, going].map(EmState::of);
        use EmState::{Draining, Healthy, Silent, Unhealthy, Unregistering, Unreported};
        assert_eq!(states, [Healthy, Unreported, Unhealthy, Draining, Silent, Unregistering]);
        assert!(states.is_sorted() && EmState::ALL.is_sorted());
    }

    #[test]
    fn sums_end_at_the_largest_number() {
        let most = DimensionTotals { total: i64::MAX, used: 5, ..Default::default() };
        let mut totals = EmTotals::default();
        totals.add(Dimension::Cores, &most);
        totals.add(Dimension::Cores, &most);
        let sums = totals.dimensions[&Dimension::Cores];
        assert_eq!((sums.total, sums.used, sums.left()), (i64::MAX, 10, i64::MAX - 10));
    }
}
