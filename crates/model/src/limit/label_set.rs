//! Sets of labels, and how tickets count in their scopes.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    name::Name,
    policy::Policy,
    scope::{ENGINE_FAMILY, Lacking, Queues, Scope, TicketLabels},
};

/// One way to count: the labels that scopes have, and the tickets that do not count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Counting {
    /// The names of the labels.
    pub keys: BTreeSet<String>,
    /// Where tickets count that do not carry all of them.
    pub lacking: Lacking,
    /// How amounts in queues count.
    pub queues: Queues,
    /// The application names of EMs whose policies leave this label set out.
    pub exempt: BTreeSet<Name>,
}

impl Counting {
    /// What has to be counted for rules of these label sets under these policies.
    pub fn wanted(sets: BTreeSet<BTreeSet<String>>, policies: &BTreeMap<Name, Policy>) -> BTreeSet<Self> {
        let exempt = |keys: &BTreeSet<String>| {
            let leaving_out = policies.iter().filter(|(_, policy)| !policy.applies(keys));
            leaving_out.map(|(kind, _)| kind.clone()).collect()
        };
        let counting = |keys| Self { exempt: exempt(&keys), lacking: Lacking::Empty, queues: Queues::Apart, keys };
        sets.into_iter().map(counting).collect()
    }

    /// Whether it counts by engine families.
    pub fn has_families(&self) -> bool {
        self.keys.contains(ENGINE_FAMILY)
    }

    /// The scope that a ticket with these labels counts in, if it does in any.
    pub(super) fn scope(&self, labels: &TicketLabels<'_>) -> Option<Scope> {
        match self.exempt.contains(labels.em_kind()) {
            true => None,
            false => Scope::of(labels, self.keys.iter().map(String::as_str), self.lacking, self.queues),
        }
    }
}

/// A label set that is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelSet {
    /// Its number: later ones have higher ones, and none is used twice.
    pub id: i64,
    /// How it is counted.
    pub counting: Counting,
    /// Whether all tickets are in its counters, so that rules decide by them; otherwise they are being counted.
    pub is_counted: bool,
}
