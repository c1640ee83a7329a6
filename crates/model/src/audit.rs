//! Audit and repair: comparing the stored counters of EMs, scopes and external queues with the sums of the tickets.
//!
//! The module computes sums, differences and the required changes. Rows may contain anything: an unreadable value becomes a
//! difference, and never an error of the audit.
//! Never: reads or writes rows. Callers: `rm_service::audit`, which does both under the locks, and the converters of messages.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
};

use time::OffsetDateTime;

use super::{
    em::EmInstance,
    limit::{LabelPattern, Limits},
    name::Name,
    queue::QueueAmounts,
    resource::{Dimension, LeftResource, Resource, ResourceError},
    scope::{Scope, ScopeCounter, ScopeHoldings, Tally},
    ticket_digest::TicketDigest,
};

/// Object of an audit or a history line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// The counters of an EM.
    Em(EmInstance),
    /// The counters of a scope.
    Scope(Scope),
    /// A limit.
    Rule(LabelPattern),
    /// The policy for a kind of EMs.
    Policy(Name),
    /// Another object, for display: a token or a provider.
    Other(String),
}

/// For display; not parsed.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Em(em) => write!(f, "em={em}"),
            Self::Scope(scope) => write!(f, "scope {scope}"),
            Self::Rule(pattern) => write!(f, "limit {pattern}"),
            Self::Policy(kind) => write!(f, "policy of {kind}"),
            Self::Other(object) => f.write_str(object),
        }
    }
}

/// One difference between stored counters and the sums of the tickets.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Difference {
    /// Object with the difference, for display.
    pub what: String,
    /// Counter: `used`, `locked`, `left`, `used_tickets`, `over_committed`, `row` or `tickets`; for an external queue,
    /// `unseen` or `ticket`.
    pub counter: String,
    /// Stored amounts, in the dimensions that differ.
    pub stored: BTreeMap<Dimension, i64>,
    /// Sums of the tickets, in the same dimensions.
    pub from_tickets: BTreeMap<Dimension, i64>,
    /// Description of the difference; may be empty.
    pub problem: String,
}

impl Difference {
    /// Returns a difference without amounts, described by text only.
    pub fn in_words(what: impl fmt::Display, counter: &str, problem: impl fmt::Display) -> Self {
        let (what, problem) = (what.to_string(), problem.to_string());
        Self { what, counter: counter.to_owned(), problem, ..Self::default() }
    }

    /// Returns the difference for a row that a repair cannot read, with advice for the operator.
    pub fn unreadable(what: impl fmt::Display, counter: &str, problem: impl fmt::Display) -> Self {
        let advice = "correct or delete that row in the database, and repair again";
        Self::in_words(what, counter, format!("{problem}; {advice}"))
    }

    /// Compares two sums; `None` if all dimensions are equal.
    fn between(
        what: &Subject,
        counter: &str,
        stored: DimensionAmounts,
        from_tickets: DimensionAmounts,
    ) -> Option<Self> {
        let keys: BTreeSet<Dimension> = stored.keys().chain(from_tickets.keys()).cloned().collect();
        let get = |amounts: &DimensionAmounts, key: &Dimension| amounts.get(key).copied().unwrap_or(0);
        let differ: Vec<_> = keys.into_iter().filter(|key| get(&stored, key) != get(&from_tickets, key)).collect();
        let only = |amounts: &DimensionAmounts| differ.iter().map(|key| (key.clone(), get(amounts, key))).collect();
        (!differ.is_empty()).then(|| Self {
            what: what.to_string(),
            counter: counter.to_owned(),
            stored: only(&stored),
            from_tickets: only(&from_tickets),
            problem: String::new(),
        })
    }
}

type DimensionAmounts = BTreeMap<Dimension, i64>;

/// Result of an audit.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditReport {
    /// Time of the snapshot, by the database clock.
    pub at: OffsetDateTime,
    /// Number of audited EMs.
    pub ems: usize,
    /// Number of scopes with counters.
    pub scopes: usize,
    /// Number of live tickets.
    pub tickets: u64,
    /// Differences found.
    pub differences: Differences,
    /// Observations that are not differences; at most [`AuditReport::NOTES_MAX`].
    pub notes: Vec<String>,
}

/// Compares the stored unseen use of a provider's queues with the sums of the tickets, by queue path.
pub fn queue_differences(
    provider: &Name,
    stored: &BTreeMap<String, QueueAmounts>,
    from_tickets: &BTreeMap<String, QueueAmounts>,
) -> Vec<Difference> {
    let amounts = |queues: &BTreeMap<String, QueueAmounts>, path: &String| {
        let QueueAmounts { memory, cores } = queues.get(path).copied().unwrap_or_default();
        DimensionAmounts::from([(Dimension::QueueMemory, memory), (Dimension::QueueCores, cores)])
    };
    let paths: BTreeSet<&String> = stored.keys().chain(from_tickets.keys()).collect();
    let compare = |path: &String| {
        let subject = queue_subject(provider, path);
        Difference::between(&subject, "unseen", amounts(stored, path), amounts(from_tickets, path))
    };
    paths.into_iter().filter_map(compare).collect()
}

/// Returns the audit subject of a provider's queue.
pub fn queue_subject(provider: &Name, path: &str) -> Subject {
    let labels = [("provider".to_owned(), provider.to_string()), ("queue".to_owned(), path.to_owned())];
    Subject::Scope(Scope::new(labels.into()))
}

/// Result of a repair.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// Differences that were repaired.
    pub repaired: Differences,
    /// Differences that could not be repaired, with the reason.
    pub remaining: Differences,
}

impl AuditReport {
    /// Maximum number of notes in a report.
    pub const NOTES_MAX: usize = 100;

    /// Returns an empty report.
    pub fn new(at: OffsetDateTime) -> Self {
        Self { at, ems: 0, scopes: 0, tickets: 0, differences: Differences::default(), notes: Vec::new() }
    }

    /// Adds a note unless [`AuditReport::NOTES_MAX`] is reached.
    pub fn note(&mut self, note: impl FnOnce() -> String) {
        if self.notes.len() < Self::NOTES_MAX {
            self.notes.push(note());
        }
    }
}

/// Differences with a bounded list: the first ones, and the total number.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Differences {
    /// The first differences, at most [`Differences::TOLD_MAX`].
    pub first: Vec<Difference>,
    /// Total number of differences.
    pub count: usize,
}

impl Differences {
    /// Maximum number of listed differences.
    pub const TOLD_MAX: usize = 1000;

    /// Returns whether there are no differences.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl Extend<Difference> for Differences {
    fn extend<I: IntoIterator<Item = Difference>>(&mut self, differences: I) {
        for difference in differences {
            self.count += 1;
            if self.first.len() < Self::TOLD_MAX {
                self.first.push(difference);
            }
        }
    }
}

/// Stored counters of an EM. An unreadable counter is an error text.
#[derive(Debug, Clone)]
pub struct StoredEmCounters {
    /// The EM.
    pub instance: EmInstance,
    /// Capacity of the EM.
    pub total: Resource,
    /// Part of `total` that is never granted.
    pub protected: Resource,
    /// Stored sum used by engines.
    pub used: Result<Resource, String>,
    /// Stored sum granted and not yet confirmed.
    pub locked: Result<Resource, String>,
    /// Stored amounts that are left.
    pub left: Result<BTreeMap<Dimension, i64>, String>,
    /// Stored digest of the used tickets.
    pub used_tickets: TicketDigest,
    /// Stored mark for over-commitment.
    pub over_committed: bool,
    /// Version of the row.
    pub version: i64,
}

/// Sums of the live tickets of an EM.
#[derive(Debug, Clone)]
pub struct EmTicketSums {
    /// Sum used by engines.
    pub used: Resource,
    /// Sum granted and not yet confirmed.
    pub locked: Resource,
    /// Digest of the used tickets.
    pub used_tickets: TicketDigest,
    /// Reason why a ticket cannot be counted; the sums are then meaningless.
    pub problem: Option<String>,
}

/// The counters of an EM according to its tickets.
#[derive(Debug)]
pub struct TrueCounters {
    /// Sum used by engines.
    pub used: Resource,
    /// Sum granted and not yet confirmed.
    pub locked: Resource,
    /// Digest of the used tickets.
    pub used_tickets: TicketDigest,
    /// Total − protected − used − locked.
    pub left: LeftResource,
}

impl TrueCounters {
    /// Returns used + locked; zero if the sum overflows.
    pub fn held(&self) -> Resource {
        self.used.add(&self.locked).unwrap_or_else(|_| self.used.zero_like())
    }
}

impl EmTicketSums {
    /// Returns the sums of no tickets, in the resource type of `total`.
    pub fn new(total: &Resource) -> Self {
        Self {
            used: total.zero_like(),
            locked: total.zero_like(),
            used_tickets: TicketDigest::default(),
            problem: None,
        }
    }

    /// Adds used tickets to the digest. [`EmTicketSums::count`] adds their amounts.
    pub fn note_used(&mut self, tickets: &TicketDigest) {
        self.used_tickets.join(tickets);
    }

    /// Adds the amounts of `count` equal tickets.
    pub fn count(&mut self, held: Result<&Resource, &str>, is_locked: bool, count: u32) {
        if let Err(problem) = self.try_count(held, is_locked, count) {
            self.problem.get_or_insert(problem);
        }
    }

    fn try_count(&mut self, held: Result<&Resource, &str>, is_locked: bool, count: u32) -> Result<(), String> {
        let sum = if is_locked { &mut self.locked } else { &mut self.used };
        let add = |held: &Resource| sum.add(&held.project(sum.resource_type())?.times(count)?);
        *sum = add(held.map_err(str::to_owned)?).map_err(|error| error.to_string())?;
        Ok(())
    }
}

impl StoredEmCounters {
    fn subject(&self) -> Subject {
        Subject::Em(self.instance.clone())
    }

    /// Returns the counters that the EM should have.
    ///
    /// # Errors
    /// The reason why the tickets cannot be counted.
    pub fn true_counters(&self, sums: &EmTicketSums) -> Result<TrueCounters, String> {
        if let Some(problem) = &sums.problem {
            return Err(problem.clone());
        }
        let left = Resource::left(&self.total, &self.protected, &sums.used, &sums.locked);
        let left = left.map_err(|error: ResourceError| error.to_string())?;
        let (used, locked) = (sums.used.clone(), sums.locked.clone());
        Ok(TrueCounters { used, locked, used_tickets: sums.used_tickets, left })
    }

    /// Returns all differences between the stored counters and the tickets.
    pub fn differences(&self, sums: &EmTicketSums) -> Vec<Difference> {
        let subject = self.subject();
        let counters = match self.true_counters(sums) {
            Ok(counters) => counters,
            Err(problem) => return vec![Difference::in_words(subject, "tickets", problem)],
        };
        let compare = |counter: &str, stored: Result<DimensionAmounts, String>, from_tickets| match stored {
            Ok(stored) => Difference::between(&subject, counter, stored, from_tickets),
            Err(problem) => Some(Difference::in_words(&subject, counter, problem)),
        };
        let amounts = |resource: Resource| resource.amounts().collect::<DimensionAmounts>();
        let other_tickets = (self.used_tickets != counters.used_tickets).then(|| {
            let told = |digest: TicketDigest| format!("{} tickets, xored {}", digest.count, digest.xor);
            let (stored, found) = (told(self.used_tickets), told(counters.used_tickets));
            Difference::in_words(
                &subject,
                "used_tickets",
                format!("its digest states {stored}; the tickets give {found}"),
            )
        });
        let is_short = counters.left.is_negative_anywhere();
        let marked = (self.over_committed != is_short).then(|| {
            let problem = match is_short {
                true => "more is in use than the EM provides, and the EM is not marked as over-committed",
                false => "the EM is marked as over-committed, and is not",
            };
            Difference::in_words(&subject, "over_committed", problem)
        });
        [
            compare("used", self.used.clone().map(amounts), amounts(counters.used)),
            compare("locked", self.locked.clone().map(amounts), amounts(counters.locked)),
            compare("left", self.left.clone(), counters.left.amounts().collect()),
            other_tickets,
            marked,
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Sums of the tickets of an EM that does not exist.
#[derive(Debug, Clone, Default)]
pub struct OrphanTickets {
    /// Number of tickets.
    pub count: u64,
    usage: ScopeHoldings,
    problem: Option<String>,
}

impl OrphanTickets {
    /// Adds the amounts of `count` equal tickets.
    pub fn count(&mut self, held: Result<&Resource, &str>, is_locked: bool, count: u32) {
        self.count += u64::from(count);
        let sum = if is_locked { &mut self.usage.locked } else { &mut self.usage.used };
        let counted = match held {
            Ok(held) => sum.add(held.amounts(), count.into()).map_err(|error| error.to_string()),
            Err(problem) => Err(problem.to_owned()),
        };
        if let Err(problem) = counted {
            self.problem.get_or_insert(problem);
        }
    }

    /// Returns the differences on `em`, for which no counters are stored.
    pub fn differences(&self, em: &EmInstance) -> Vec<Difference> {
        let subject = Subject::Em(em.clone());
        let problem = match &self.problem {
            Some(problem) => format!("{} tickets are on this EM, which does not exist; {problem}", self.count),
            None => format!("{} tickets are on this EM, which does not exist", self.count),
        };
        let compare =
            |counter, sum: &Tally| Difference::between(&subject, counter, DimensionAmounts::new(), tally_amounts(sum));
        let mut found: Vec<Difference> =
            [compare("used", &self.usage.used), compare("locked", &self.usage.locked)].into_iter().flatten().collect();
        if found.is_empty() {
            return vec![Difference::in_words(subject, "tickets", problem)];
        }
        found.iter_mut().for_each(|difference| difference.problem.clone_from(&problem));
        found
    }
}

/// Stored counters of a scope. Unreadable counters are an error text.
#[derive(Debug)]
pub struct StoredScopeCounters {
    /// The scope, with the label set that counts it.
    pub counter: ScopeCounter,
    /// Stored amounts of its tickets.
    pub usage: Result<ScopeHoldings, String>,
    /// Key of the row.
    pub hash: Vec<u8>,
    /// Whether the row key matches the labels. A row with another key is never found by a lookup.
    pub is_in_place: bool,
}

/// Change that repairs the counters of a scope.
#[derive(Debug, PartialEq, Eq)]
pub enum ScopeRepair {
    /// Write the sums of the tickets into the row.
    Update(ScopeCounter, ScopeHoldings),
    /// Insert a missing row.
    Insert(ScopeCounter, ScopeHoldings),
    /// Delete the row with this key.
    Delete(ScopeCounter, Vec<u8>),
}

/// Object that a partial repair is restricted to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RepairTarget {
    /// The counters of an EM.
    Em(EmInstance),
    /// The counters of a scope.
    Scope(Scope),
}

impl ScopeRepair {
    /// Returns the scope to repair.
    pub fn scope(&self) -> &Scope {
        match self {
            Self::Update(counter, _) | Self::Insert(counter, _) | Self::Delete(counter, _) => &counter.scope,
        }
    }
}

/// Sums of the live tickets in every scope of the counted label sets, to be compared with the rows.
#[derive(Debug)]
pub struct ScopeTicketSums {
    /// Ids of the label sets that are completely counted.
    counted: BTreeSet<i64>,
    /// Ids of the label sets whose rows are being created or removed; their rows are not compared.
    passing: BTreeSet<i64>,
    sums: HashMap<ScopeCounter, ScopeHoldings>,
}

impl ScopeTicketSums {
    /// Returns the sums for the label sets of `limits`. `known` contains all label sets with rows, including deleted ones.
    pub fn new(limits: &Limits, known: BTreeSet<i64>, sums: HashMap<ScopeCounter, ScopeHoldings>) -> Self {
        let counted = limits.label_sets().filter(|set| set.is_counted).map(|set| set.id).collect();
        Self { passing: known.difference(&counted).copied().collect(), counted, sums }
    }

    /// Compares one row and returns its differences and the repair; `None` if it is correct. A scope has at most one row in
    /// place.
    pub fn compare(&mut self, row: &StoredScopeCounters) -> Option<(Vec<Difference>, ScopeRepair)> {
        if self.passing.contains(&row.counter.label_set_id) {
            return None;
        }
        let subject = Subject::Scope(row.counter.scope.clone());
        let told = |problem| vec![Difference::in_words(&subject, "row", problem)];
        let delete = || ScopeRepair::Delete(row.counter.clone(), row.hash.clone());
        if !row.is_in_place {
            return Some((told("its row has another key than the service reads"), delete()));
        }
        if !self.counted.contains(&row.counter.label_set_id) {
            return Some((told("a row exists, but no limit has these labels"), delete()));
        }
        let sums = self.sums.remove(&row.counter).unwrap_or_default();
        let differences = match &row.usage {
            Ok(stored) => usage_differences(&subject, stored, &sums),
            Err(problem) => vec![Difference::in_words(&subject, "row", problem)],
        };
        (!differences.is_empty()).then(|| (differences, ScopeRepair::Update(row.counter.clone(), sums)))
    }

    /// Returns the scopes with tickets but without a row. Call after [`ScopeTicketSums::compare`] of all rows.
    pub fn missing(self) -> impl Iterator<Item = (Vec<Difference>, ScopeRepair)> {
        let mut missing: Vec<_> = self.sums.into_iter().collect();
        missing.sort_by(|(a, _), (b, _)| a.cmp(b));
        missing.into_iter().filter_map(|(counter, usage)| {
            let subject = Subject::Scope(counter.scope.clone());
            let mut differences = usage_differences(&subject, &ScopeHoldings::default(), &usage);
            differences.iter_mut().for_each(|difference| "the row is missing".clone_into(&mut difference.problem));
            (!differences.is_empty()).then_some((differences, ScopeRepair::Insert(counter, usage)))
        })
    }
}

fn usage_differences(subject: &Subject, stored: &ScopeHoldings, from_tickets: &ScopeHoldings) -> Vec<Difference> {
    let compare = |counter, stored: &Tally, from_tickets: &Tally| {
        Difference::between(subject, counter, tally_amounts(stored), tally_amounts(from_tickets))
    };
    let used = compare("used", &stored.used, &from_tickets.used);
    used.into_iter().chain(compare("locked", &stored.locked, &from_tickets.locked)).collect()
}

fn tally_amounts(tally: &Tally) -> DimensionAmounts {
    tally.amounts().map(|(dimension, amount)| (dimension.clone(), amount)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::ResourceType;

    fn load(memory: i64, cores: i64) -> Resource {
        Resource::load(memory, cores).unwrap()
    }

    fn books(used: Resource, left: &[(Dimension, i64)], over_committed: bool) -> StoredEmCounters {
        StoredEmCounters {
            instance: EmInstance::parse("em", "ecm", "host:1").unwrap(),
            total: load(10, 10),
            protected: load(1, 0),
            used: Ok(used),
            locked: Ok(load(0, 0)),
            left: Ok(left.iter().cloned().collect()),
            used_tickets: TicketDigest::default(),
            over_committed,
            version: 1,
        }
    }

    #[test]
    fn audit_difference_lists_only_differing_dimensions() {
        let mut sums = EmTicketSums::new(&load(0, 0));
        sums.count(Ok(&load(2, 1)), false, 2);
        let left = [(Dimension::Memory, 5), (Dimension::Cores, 8)];
        assert_eq!(books(load(4, 2), &left, false).differences(&sums), []);
        let found = books(load(4, 3), &left, true).differences(&sums);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].what.as_str(), found[0].counter.as_str()), ("em=ecm/host:1", "used"));
        assert_eq!(found[0].stored, BTreeMap::from([(Dimension::Cores, 3)]));
        assert_eq!(found[0].from_tickets, BTreeMap::from([(Dimension::Cores, 2)]));
        assert_eq!(found[1].counter, "over_committed");
    }

    #[test]
    fn audit_sums_with_malformed_ticket_are_an_error() {
        let yarn = Resource::zero(ResourceType::Yarn);
        for held in [Ok(&yarn), Ok(&load(i64::MAX, 0)), Err("spoilt")] {
            let mut sums = EmTicketSums::new(&load(0, 0));
            sums.count(held, true, 2);
            let books = books(load(0, 0), &[], false);
            let found = books.differences(&sums);
            assert_eq!((found.len(), found[0].counter.as_str()), (1, "tickets"), "{found:?}");
            assert!(books.true_counters(&sums).is_err());
        }
    }

    #[test]
    fn audit_differences_above_list_bound_are_counted() {
        let mut differences = Differences::default();
        differences.extend((0..Differences::TOLD_MAX + 5).map(|n| Difference::in_words(n, "used", "")));
        assert_eq!((differences.first.len(), differences.count), (Differences::TOLD_MAX, Differences::TOLD_MAX + 5));
    }
}
