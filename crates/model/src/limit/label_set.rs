//! Label sets: the label names that limits count by, and the scope of a ticket in each.
//!
//! A change of the way of counting creates another label set with a new id, which is counted separately before it decides.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    name::Name,
    policy::Policy,
    scope::{Scope, TicketLabels},
};

/// A way of counting: the labels of the scopes and the exempt tickets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CountingRule {
    /// Label names.
    pub keys: BTreeSet<String>,
    /// Application names of EMs whose policies exclude this label set.
    pub exempt: BTreeSet<Name>,
}

impl CountingRule {
    /// Returns the ways of counting that rules of these label sets need under these policies.
    pub fn wanted(sets: BTreeSet<BTreeSet<String>>, policies: &BTreeMap<Name, Policy>) -> BTreeSet<Self> {
        let exempt = |keys: &BTreeSet<String>| {
            let leaving_out = policies.iter().filter(|(_, policy)| !policy.applies(keys));
            leaving_out.map(|(kind, _)| kind.clone()).collect()
        };
        let counting = |keys| Self { exempt: exempt(&keys), keys };
        sets.into_iter().map(counting).collect()
    }

    /// Returns the scope of a ticket with these labels; `None` if the ticket does not count.
    pub(super) fn scope(&self, labels: &TicketLabels<'_>) -> Option<Scope> {
        match self.exempt.contains(labels.em_kind()) {
            true => None,
            false => Scope::of(labels, self.keys.iter().map(String::as_str)),
        }
    }
}

/// A label set with its counting state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelSet {
    /// Id of the label set. Later ones have higher ids; ids are never reused.
    pub id: i64,
    /// How the label set counts.
    pub counting: CountingRule,
    /// Whether the counters include all tickets, so that rules decide by them; false while tickets are being counted.
    pub is_counted: bool,
}
