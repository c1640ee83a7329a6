//! Policies: the limits, required labels and placement for one kind of EM, which its application name identifies.
//!
//! The capacity of the EM itself is always checked. Limits that a policy excludes neither count nor decide the tickets of
//! the kind.
//! Callers: the limits, the assessment, placement and the store.

use std::{collections::BTreeSet, fmt, time::Duration};

use super::{
    scope::{CREATOR, USER},
    selector::Placement,
};

text_enum! {
    /// Class of limits, in check order. Stored policies contain the texts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Check {
        /// Limits for creators alone.
        Creator = "creator",
        /// Limits for users alone.
        User = "user",
        /// Limits for any other label, or for several labels together.
        Labels = "labels",
    }
}

impl Check {
    fn of(label_set: &BTreeSet<String>) -> Self {
        let mut keys = label_set.iter().map(String::as_str);
        match (keys.next(), keys.next()) {
            (Some(CREATOR), None) => Self::Creator,
            (Some(USER), None) => Self::User,
            _ => Self::Labels,
        }
    }
}

/// Maximum number of labels that a policy requires.
pub const REQUIRED_MAX: usize = 8;

/// Age until which EMs are new, without configuration. Zero is also valid: no EM is new.
pub const EM_NEW_AFTER: Duration = Duration::from_secs(60);
/// Minimum of an age above zero.
pub const EM_NEW_AFTER_MIN: Duration = Duration::from_secs(1);
/// Maximum of the age.
pub const EM_NEW_AFTER_MAX: Duration = Duration::from_secs(86_400);

/// Rules for requests to one kind of EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Classes of limits that count and decide tickets on these EMs.
    checks: BTreeSet<Check>,
    /// Labels that requests must carry; at most [`REQUIRED_MAX`].
    required_labels: BTreeSet<String>,
    placement: Placement,
    /// Age of a registration until which placement bounds the grants on its EM; zero for no bound.
    em_new_after: Duration,
}

impl Default for Policy {
    /// All limits, no required labels, spread.
    fn default() -> Self {
        Self::new(Check::ALL)
    }
}

impl Policy {
    /// Creates a policy with these checks, without required labels, and with spread placement. No checks exempt the EMs
    /// from all limits.
    pub fn new(checks: impl IntoIterator<Item = Check>) -> Self {
        let checks = checks.into_iter().collect();
        let (required_labels, placement) = Default::default();
        Self { checks, required_labels, placement, em_new_after: EM_NEW_AFTER }
    }

    /// Replaces the required labels and the placement.
    pub fn with(self, required_labels: BTreeSet<String>, placement: Placement) -> Self {
        Self { required_labels, placement, ..self }
    }

    /// Replaces the age until which EMs are new.
    pub fn with_em_new_after(self, em_new_after: Duration) -> Self {
        Self { em_new_after, ..self }
    }

    /// Returns the checks, in order.
    pub fn checks(&self) -> impl Iterator<Item = Check> {
        self.checks.iter().copied()
    }

    /// Returns the labels that requests must carry.
    pub fn required_labels(&self) -> &BTreeSet<String> {
        &self.required_labels
    }

    /// Returns the placement of requests that do not choose one.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Returns the age until which EMs are new; zero if they never are.
    pub fn em_new_after(&self) -> Duration {
        self.em_new_after
    }

    /// Returns a required label that a request does not carry.
    pub fn lacking(&self, carries: impl Fn(&str) -> bool) -> Option<&str> {
        self.required_labels.iter().map(String::as_str).find(|key| !carries(key))
    }

    /// Returns whether limits of this label set apply.
    pub fn applies(&self, label_set: &BTreeSet<String>) -> bool {
        self.checks.contains(&Check::of(label_set))
    }

    /// Parses the displayed checks. A text that does not begin with `em` was written by a release without policies: all
    /// limits apply.
    pub fn parse(text: &str) -> Self {
        let mut names = text.split(',');
        if names.next() != Some("em") {
            return Self::default();
        }
        Self::new(names.filter_map(Check::parse))
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "em")?;
        self.checks().try_for_each(|check| write!(f, ",{}", check.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_text_round_trips() {
        for policy in [Policy::default(), Policy::new([]), Policy::new([Check::User]), Policy::new([Check::Labels])] {
            assert_eq!(Policy::parse(&policy.to_string()), policy);
        }
        assert_eq!(Policy::default().to_string(), "em,creator,user,labels");
        assert_eq!(Policy::parse("LoadInstance"), Policy::default());
    }

    #[test]
    fn policy_checks_apply_to_matching_label_sets() {
        let set = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<BTreeSet<_>>();
        let user = Policy::new([Check::User]);
        assert!(user.applies(&set(&["user"])));
        assert!(!user.applies(&set(&["creator"])));
        assert!(!user.applies(&set(&["creator", "user"])));
        let labels = Policy::new([Check::Labels]);
        assert!(labels.applies(&set(&["creator", "user"])));
        assert!(labels.applies(&set(&["tenant"])));
        assert!(!labels.applies(&set(&["user"])));
    }
}
