//! Cluster overview: totals of EMs, tickets, wait queues and scopes at one moment, and the changes of EM states between two
//! moments.
//!
//! The store reads the sums; this module combines them. Never: a basis of a decision.
//! Callers: the overview service, the page and the cluster metrics.

use std::{cmp::Ordering, collections::BTreeMap};

use time::OffsetDateTime;

use super::{
    em::EmInstance,
    limit::ScopeUsage,
    report::Health,
    resource::{Dimension, Resource, ResourceType},
    ticket::Ticket,
    user_sum::IdleTotals,
};

text_enum! {
    /// State of an EM, in ascending order of severity. Metrics contain the texts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum EmState {
        /// The EM reports no problem.
        Healthy = "healthy",
        /// The EM has not reported since its latest registration.
        Unreported = "unreported",
        /// The EM reports a problem, but engines can start.
        Warn = "warn",
        /// The EM reports that it must not be selected.
        Unhealthy = "unhealthy",
        /// The EM is drained.
        Draining = "draining",
        /// Neither a report nor a registration arrived for too long.
        Silent = "silent",
        /// The EM is being unregistered; its tickets end in steps.
        Unregistering = "unregistering",
    }
}

/// Facts that determine the state of an EM.
#[derive(Debug, Clone, Copy)]
pub struct EmSignals {
    /// Whether it is being unregistered.
    pub is_going: bool,
    /// Whether it is silent.
    pub is_silent: bool,
    /// Whether it is drained.
    pub is_drained: bool,
    /// Health of its latest report; `None` if it has not reported since its latest registration.
    pub health: Option<Health>,
}

impl EmState {
    /// Returns the most severe state that applies.
    pub fn of(signs: EmSignals) -> Self {
        match signs {
            EmSignals { is_going: true, .. } => Self::Unregistering,
            EmSignals { is_silent: true, .. } => Self::Silent,
            EmSignals { is_drained: true, .. } => Self::Draining,
            EmSignals { health: Some(Health::Unhealthy), .. } => Self::Unhealthy,
            EmSignals { health: Some(Health::Warn), .. } => Self::Warn,
            EmSignals { health: Some(Health::Healthy), .. } => Self::Healthy,
            EmSignals { health: None, .. } => Self::Unreported,
        }
    }

    /// Returns the urgency for an operator: an unplanned state is more urgent than a state after a call.
    pub const fn urgency(self) -> u8 {
        match self {
            Self::Silent => 6,
            Self::Unhealthy => 5,
            Self::Warn => 4,
            Self::Unreported => 3,
            Self::Draining => 2,
            Self::Unregistering => 1,
            Self::Healthy => 0,
        }
    }
}

/// Sums of one dimension; they saturate at the largest number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DimensionTotals {
    /// Total capacity.
    pub total: i64,
    /// Part that is never granted.
    pub protected: i64,
    /// Amount used by engines.
    pub used: i64,
    /// Amount granted and not yet confirmed.
    pub locked: i64,
}

impl DimensionTotals {
    /// Returns total − protected − used − locked. Negative where a capacity was lowered below the use.
    pub fn left(&self) -> i64 {
        self.total.saturating_sub(self.protected).saturating_sub(self.used).saturating_sub(self.locked)
    }

    /// Adds the sums of `other`.
    pub fn add(&mut self, other: &Self) {
        self.total = self.total.saturating_add(other.total);
        self.protected = self.protected.saturating_add(other.protected);
        self.used = self.used.saturating_add(other.used);
        self.locked = self.locked.saturating_add(other.locked);
    }
}

/// Totals of the EMs of one application and state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmTotals {
    /// Number of EMs.
    pub ems: i64,
    /// Sums by dimension.
    pub dimensions: BTreeMap<Dimension, DimensionTotals>,
}

/// Amounts of one EM.
#[derive(Debug)]
pub struct EmAmounts {
    /// Total capacity.
    pub total: Resource,
    /// Part of `total` that is never granted.
    pub protected: Resource,
    /// Amount used by its engines.
    pub used: Resource,
    /// Amount granted and not yet confirmed.
    pub locked: Resource,
}

impl EmAmounts {
    /// Returns used + locked in percent of the unprotected capacity, in the fullest dimension, rounded down, at most 255.
    /// An unprotected capacity of zero counts as one unit.
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
    /// Adds sums of one dimension.
    pub fn add(&mut self, dimension: Dimension, sums: &DimensionTotals) {
        self.dimensions.entry(dimension).or_default().add(sums);
    }

    /// Adds the amounts of one EM. The caller counts the EM itself.
    pub fn add_amounts(&mut self, amounts: &EmAmounts) {
        let EmAmounts { total, protected, used, locked } = amounts;
        for (dimension, total) in total.amounts() {
            let [protected, used, locked] = [protected, used, locked].map(|resource| resource.get(&dimension));
            self.add(dimension, &DimensionTotals { total, protected, used, locked });
        }
    }
}

/// Returns the dimensions of a resource type if the database can sum its amounts; `None` if the amounts must be read EM by
/// EM.
pub fn summed_dimensions(resource_type: ResourceType) -> Option<&'static [Dimension]> {
    let dimensions = resource_type.shape();
    let is_of_em =
        |dimension: &Dimension| matches!(dimension, Dimension::Memory | Dimension::Cores | Dimension::Instances);
    (!dimensions.is_empty() && dimensions.iter().all(is_of_em)).then_some(dimensions)
}

/// Totals of the live tickets.
#[derive(Debug, Clone, Default)]
pub struct TicketTotals {
    /// Number of used tickets.
    pub used: i64,
    /// Number of locked tickets, up to a bound.
    pub locked: i64,
    /// Whether the bound was reached.
    pub is_locked_partial: bool,
    /// The oldest locked ticket.
    pub oldest_locked: Option<Ticket>,
    /// Used tickets with idle engines, as last summed.
    pub idle: IdleTotals,
}

/// Totals of the wait queues.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LineTotals {
    /// Number of waiting requests.
    pub waiting: i64,
    /// Longest waiting time, in seconds.
    pub longest_seconds: Option<f64>,
}

/// Rates of replies to requests, per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Throughput {
    /// Grants per second.
    pub grants: f64,
    /// Refusals per second.
    pub refusals: f64,
}

/// Totals of the limited scopes.
#[derive(Debug, Clone, Default)]
pub struct ScopeTotals {
    /// Number of scopes.
    pub scopes: i64,
    /// Number of scopes above their limits.
    pub over_limit: i64,
    /// The fullest scopes, in descending order.
    pub fullest: Vec<ScopeUsage>,
    /// Time of the count.
    pub at: Option<OffsetDateTime>,
}

/// Cluster overview at one moment.
#[derive(Debug, Clone)]
pub struct Overview {
    /// Time of the overview, by the database clock.
    pub at: OffsetDateTime,
    /// EM totals by application and state.
    pub ems: BTreeMap<(String, EmState), EmTotals>,
    /// State of each EM, sorted by application and instance.
    pub states: Vec<(EmInstance, EmState)>,
    /// Used + locked of each EM in percent of its unprotected capacity, in its fullest dimension, rounded down, at most
    /// 255.
    pub held_percent: Vec<u8>,
    /// Ticket totals.
    pub tickets: TicketTotals,
    /// Wait queue totals.
    pub line: LineTotals,
    /// Rates of grants and refusals.
    pub throughput: Throughput,
    /// Scope totals.
    pub scopes: ScopeTotals,
}

/// A change of an EM's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmChange {
    /// The EM.
    pub em: EmInstance,
    /// Earlier state; `None` if the EM was not registered.
    pub before: Option<EmState>,
    /// Later state; `None` if the EM is no longer registered.
    pub after: Option<EmState>,
}

/// Returns the changes between two lists of EM states, both sorted by EM.
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
    fn em_changes_list_arrivals_departures_and_states() {
        for (before, after, expected) in [
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
            assert_eq!(lines.join(" "), expected, "{before} / {after}");
        }
    }

    #[test]
    fn em_state_is_gravest_of_signals() {
        let healthy = EmSignals { is_going: false, is_silent: false, is_drained: false, health: Some(Health::Healthy) };
        let drained = EmSignals { is_drained: true, ..healthy };
        let silent = EmSignals { is_silent: true, ..drained };
        let going = EmSignals { is_going: true, ..silent };
        let unhealthy = EmSignals { health: Some(Health::Unhealthy), ..healthy };
        let states =
            [healthy, EmSignals { health: None, ..healthy }, unhealthy, drained, silent, going].map(EmState::of);
        use EmState::{Draining, Healthy, Silent, Unhealthy, Unregistering, Unreported};
        assert_eq!(states, [Healthy, Unreported, Unhealthy, Draining, Silent, Unregistering]);
        assert!(states.is_sorted() && EmState::ALL.is_sorted());
    }

    #[test]
    fn overview_sums_saturate() {
        let most = DimensionTotals { total: i64::MAX, used: 5, ..Default::default() };
        let mut totals = EmTotals::default();
        totals.add(Dimension::Cores, &most);
        totals.add(Dimension::Cores, &most);
        let sums = totals.dimensions[&Dimension::Cores];
        assert_eq!((sums.total, sums.used, sums.left()), (i64::MAX, 10, i64::MAX - 10));
    }
}
