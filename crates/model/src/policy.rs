//! Policies: which limits are for the tickets on a kind of EM. The EM itself is always checked.

use std::{collections::BTreeSet, fmt};

use super::{
    scope::{CREATOR, USER},
    selector::Placement,
};

/// A kind of limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// Those for creators alone.
    Creator,
    /// Those for users alone.
    User,
    /// Those for any other label, or for several together.
    Labels,
}

impl Check {
    /// All there are, in the order in which they are made.
    pub const ALL: [Self; 3] = [Self::Creator, Self::User, Self::Labels];

    fn of(label_set: &BTreeSet<String>) -> Self {
        let mut keys = label_set.iter().map(String::as_str);
        match (keys.next(), keys.next()) {
            (Some(CREATOR), None) => Self::Creator,
            (Some(USER), None) => Self::User,
            _ => Self::Labels,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Creator => "creator",
            Self::User => "user",
            Self::Labels => "labels",
        }
    }
}

/// How many labels a policy may require.
pub const REQUIRED_MAX: usize = 8;

/// What holds for requests to a kind of EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The kinds of limits that their tickets count in, and are judged by.
    checks: BTreeSet<Check>,
    /// The labels that they have to carry: at most [`REQUIRED_MAX`].
    required_labels: BTreeSet<String>,
    placement: Placement,
}

impl Default for Policy {
    /// All limits.
    fn default() -> Self {
        Self::new(Check::ALL)
    }
}

impl Policy {
    /// A policy with these checks, none for EMs that no limit is for; requests need no labels, and are spread.
    pub fn new(checks: impl IntoIterator<Item = Check>) -> Self {
        let checks = checks.into_iter().collect();
        Self { checks, required_labels: BTreeSet::new(), placement: Placement::default() }
    }

    /// The same with these labels required, and EMs chosen so.
    pub fn with(self, required_labels: BTreeSet<String>, placement: Placement) -> Self {
        Self { required_labels, placement, ..self }
    }

    /// Its checks, in order.
    pub fn checks(&self) -> impl Iterator<Item = Check> {
        self.checks.iter().copied()
    }

    /// The labels that requests have to carry.
    pub fn required_labels(&self) -> &BTreeSet<String> {
        &self.required_labels
    }

    /// Which EM is chosen, if the request does not say.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// A label that a request has to carry and does not.
    pub fn lacking(&self, carries: impl Fn(&str) -> bool) -> Option<&str> {
        self.required_labels.iter().map(String::as_str).find(|key| !carries(key))
    }

    /// Whether limits with these labels apply.
    pub fn applies(&self, label_set: &BTreeSet<String>) -> bool {
        self.checks.contains(&Check::of(label_set))
    }

    /// Reads the checks that [`Policy`] displays. What does not begin with the EM itself was written by somebody who knew no policies: all
    /// limits apply.
    pub fn parse(text: &str) -> Self {
        let mut names = text.split(',');
        if names.next() != Some("em") {
            return Self::default();
        }
        Self::new(names.filter_map(|name| Check::ALL.into_iter().find(|check| check.name() == name)))
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "em")?;
        self.checks().try_for_each(|check| write!(f, ",{}", check.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for policy in [Policy::default(), Policy::new([]), Policy::new([Check::User]), Policy::new([Check::Labels])] {
            assert_eq!(Policy::parse(&policy.to_string()), policy);
        }
        assert_eq!(Policy::default().to_string(), "em,creator,user,labels");
        assert_eq!(Policy::parse("LoadInstance"), Policy::default());
    }

    #[test]
    fn label_sets_are_of_one_kind() {
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
