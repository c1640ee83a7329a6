//! Reclaim policies: rules by which engines are taken back for requests that wait: idle ones, and busy ones for entitled requests.
//!
//! A policy names labels of tickets, each with a value or "each". Among the policies that match a ticket, the most specific one decides.
//! Without a policy, no engine is taken back.
//! Submodule: `row`: chosen tickets.
//! Never: chooses a ticket. Callers: the choice of tickets, and the limit service.

use std::time::Duration;

mod row;

pub use row::{NewReclaim, Reclaim, ReclaimFor, ReclaimProgress, ReclaimResult};

use super::{
    limit::{LabelPattern, PatternRule, PatternRules},
    operation::Rejection,
};

/// Minimum of the times of a policy.
pub const RECLAIM_TIME_MIN: Duration = Duration::from_secs(1);
/// Maximum of the times of a policy.
pub const RECLAIM_TIME_MAX: Duration = Duration::from_secs(24 * 3600);
/// Maximum of [`ReclaimPolicy::per_minute`]. The minimum is 1.
pub const PER_MINUTE_MAX: u32 = 100_000;

/// [`ReclaimPolicy::idle_after`] of a policy that states none.
pub const IDLE_AFTER: Duration = Duration::from_secs(300);
/// [`ReclaimPolicy::grace`] of a policy that states none.
pub const GRACE: Duration = Duration::from_secs(30);
/// [`ReclaimPolicy::per_minute`] of a policy that states none.
pub const PER_MINUTE: u32 = 60;
/// [`ReclaimPolicy::min_life`] of a policy that states none.
pub const MIN_LIFE: Duration = Duration::from_secs(600);

/// Maximum number of policies. Each engine that may end is compared with all of them.
pub const RECLAIM_POLICIES_MAX: usize = 100;

text_enum! {
    /// Effect of a policy on the tickets that it decides. Tables contain the texts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum ReclaimMode {
        /// No ticket is chosen.
        Off = "OFF",
        /// The chosen tickets are only listed.
        Observe = "OBSERVE",
        /// After the grace period, a history line requests the end of the engine.
        Advise = "ADVISE",
        /// As `Advise`, and the reply to the heartbeat of the EM names the ticket.
        Stop = "STOP",
    }
}

/// Conditions on which the engines of a pattern are taken back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReclaimPolicy {
    /// Tickets that the policy applies to. The pattern identifies the policy.
    pub pattern: LabelPattern,
    /// Effect.
    pub mode: ReclaimMode,
    /// Time without a task after which a ticket can be chosen.
    pub idle_after: Duration,
    /// Time from the choice of a ticket to its recall.
    pub grace: Duration,
    /// Maximum number of tickets that are recalled within a minute.
    pub per_minute: u32,
    /// Whether tickets of busy engines can be chosen, too, for entitled requests.
    pub busy: bool,
    /// Time since the grant after which the ticket of a busy engine can be chosen.
    pub min_life: Duration,
}

/// All reclaim policies, the most specific one first.
pub type ReclaimPolicies = PatternRules<ReclaimPolicy>;

impl PatternRule for ReclaimPolicy {
    const RULES_MAX: usize = RECLAIM_POLICIES_MAX;

    fn pattern(&self) -> &LabelPattern {
        &self.pattern
    }

    fn too_many() -> Rejection {
        Rejection::TooManyReclaimPolicies { most: Self::RULES_MAX }
    }

    fn missing(pattern: &LabelPattern) -> Rejection {
        Rejection::NoSuchReclaimPolicy(pattern.to_string())
    }
}

impl ReclaimPolicy {
    /// Creates a policy for idle engines that states no times and no rate.
    pub fn new(pattern: LabelPattern, mode: ReclaimMode) -> Self {
        let (idle_after, grace, per_minute, min_life) = (IDLE_AFTER, GRACE, PER_MINUTE, MIN_LIFE);
        Self { pattern, mode, idle_after, grace, per_minute, busy: false, min_life }
    }
}

impl ReclaimPolicies {
    /// Returns whether a ticket can be chosen: some policy is not off.
    pub fn is_active(&self) -> bool {
        self.rules().iter().any(|policy| policy.mode != ReclaimMode::Off)
    }

    /// Returns the minimum of [`ReclaimPolicy::min_life`] among the policies by which busy engines end; `None` if there are none.
    pub fn min_life(&self) -> Option<Duration> {
        let busy = self.rules().iter().filter(|policy| policy.busy && policy.mode != ReclaimMode::Off);
        busy.map(|policy| policy.min_life).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        em::EmInstance,
        name::Labels,
        resource::{Resource, ResourceParts, YarnAmounts},
        scope::TicketLabels,
    };

    fn policy(labels: &[(&str, Option<&str>)], mode: ReclaimMode) -> ReclaimPolicy {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
        ReclaimPolicy::new(LabelPattern::new(labels.collect()), mode)
    }

    /// Each label of a ticket can decide, those of its EM and queue included.
    #[test]
    fn most_specific_reclaim_policy_decides() {
        use ReclaimMode::{Advise, Observe, Off, Stop};
        let [em1, em2] = ["host1:1", "host2:1"].map(|instance| EmInstance::parse("em", "linkis", instance).unwrap());
        let queue = YarnAmounts { queue_name: "root.a".to_owned(), ..YarnAmounts::default() };
        let (none, yarn) = (Labels::default(), Resource::from_parts(ResourceParts::Yarn(queue)).unwrap());
        let mode_of = |policies: &ReclaimPolicies, user, em| {
            let labels = TicketLabels::new(user, "IDE", "spark-3.2.1", &none, em, &yarn);
            policies.deciding(&labels).map(|policy| policy.mode)
        };
        let all = [
            policy(&[("user", None)], Observe),
            policy(&[("queue", Some("root.a"))], Advise),
            policy(&[("user", Some("ann")), ("em", Some("host1:1"))], Off),
            policy(&[("em_application", Some("linkis")), ("em", Some("host1:1")), ("user", None)], Stop),
        ];
        let policies = ReclaimPolicies::new(all.clone());
        assert_eq!(mode_of(&policies, "ann", &em1), Some(Stop));
        assert_eq!(mode_of(&policies, "ann", &em2), Some(Advise));
        let policies = ReclaimPolicies::new(all.into_iter().take(1));
        assert_eq!(mode_of(&policies, "bob", &em2), Some(Observe));
        assert_eq!(mode_of(&ReclaimPolicies::default(), "bob", &em2), None);
    }

    #[test]
    fn reclaim_policies_are_active_unless_all_are_off() {
        let off = policy(&[("user", None)], ReclaimMode::Off);
        let observe = policy(&[("creator", None)], ReclaimMode::Observe);
        assert!(!ReclaimPolicies::default().is_active());
        assert!(!ReclaimPolicies::new([off.clone()]).is_active());
        assert!(ReclaimPolicies::new([off, observe]).is_active());
    }
}
