//! Limits, replayed from the history: no commit and no line grants more in a scope than the limit in force allows.
//!
//! Rules, policies and label sets change inside a fence that excludes grants and releases. The numbers of the history lines therefore
//! identify the rules that decided a grant. A label set's counters are locked until commit, so the lines of a scope are in the order of its
//! commits. This module uses no code of the service: it derives the deciding rules again.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use uuid::Uuid;

use super::{
    history::{Amounts, Line, amount},
    journal::Journal,
};

/// Labels, each with a value or for each value.
type Labels = BTreeMap<String, Option<String>>;
type Keys = BTreeSet<String>;
/// Index of the label set of a scope, and the values of its labels.
type ScopeKey = (usize, Vec<String>);

/// Totals of the replay.
#[derive(Debug, Default)]
pub struct Judged {
    /// Commits that granted something in a scope with a limit.
    pub commits: usize,
    /// Lines that granted something in a scope with a limit.
    pub lines: usize,
    /// Commits that left it full.
    pub full: usize,
    /// Number of times that limits of a label set came into force.
    pub in_force: usize,
    /// Number of limits that were below the use when they began to decide.
    pub lowered: usize,
}

/// A label set.
#[derive(Debug, PartialEq)]
struct Set {
    keys: Keys,
    exempt: BTreeSet<String>,
    decides: bool,
}

/// The rules at one moment.
#[derive(Debug, Default)]
struct Rules {
    /// Maxima by labels, and whether the limit is enforced.
    maxima: BTreeMap<Labels, (Vec<Option<i64>>, bool)>,
    /// By kind of EM.
    policies: BTreeMap<String, BTreeSet<String>>,
    sets: Vec<Set>,
}

impl Rules {
    /// Applies the changes of one transaction.
    fn change(&mut self, journal: &Journal, lines: &[&Line]) {
        for line in lines {
            let scope = line.scope.as_deref().unwrap_or("{}");
            match line.action.as_str() {
                "limit_set" => {
                    let is_enforced = line.limit_mode.as_deref() == Some("enforced");
                    self.maxima.insert(serde_json::from_str(scope).unwrap(), (line.max.clone(), is_enforced));
                }
                "limit_deleted" => drop(self.maxima.remove(&serde_json::from_str::<Labels>(scope).unwrap())),
                "policy_set" => {
                    let checks = serde_json::from_str(scope).unwrap();
                    self.policies.insert(line.kind.clone().unwrap(), checks);
                }
                _ => {}
            }
        }
        self.reconcile();
        for line in lines.iter().filter(|line| line.action == "limits_in_force") {
            let labels: Labels = serde_json::from_str(line.scope.as_deref().unwrap()).unwrap();
            self.begin(journal, &labels.into_keys().collect(), line);
        }
    }

    /// Starts the counting of label sets that limits and policies need. The earlier ones decide until the new ones do.
    fn reconcile(&mut self) {
        let keys: BTreeSet<Keys> = self.maxima.keys().map(|labels| labels.keys().cloned().collect()).collect();
        let wanted: Vec<Set> = keys
            .into_iter()
            .map(|keys| {
                let leaves_out = |checks: &BTreeSet<String>| !checks.contains(check_of(&keys));
                let exempt = self.policies.iter().filter(|(_, checks)| leaves_out(checks));
                Set { exempt: exempt.map(|(kind, _)| kind.clone()).collect(), keys, decides: false }
            })
            .collect();
        let is_same = |a: &Set, b: &Set| a.keys == b.keys && a.exempt == b.exempt;
        self.sets.retain(|set| wanted.iter().any(|want| want.keys == set.keys && (set.decides || is_same(want, set))));
        for want in wanted {
            if !self.sets.iter().any(|set| is_same(set, &want)) {
                self.sets.push(want);
            }
        }
    }

    /// Activates a counted label set in place of the earlier one with its labels.
    fn begin(&mut self, journal: &Journal, keys: &Keys, line: &Line) {
        let is_counting = |set: &Set| set.keys == *keys && !set.decides;
        if !self.sets.iter().any(is_counting) {
            return journal.violation(format!("limits came into force that were not counted: {line:?} {self:?}"));
        }
        self.sets.retain(|set| set.keys != *keys || !set.decides);
        self.sets.iter_mut().filter(|set| set.keys == *keys).for_each(|set| set.decides = true);
    }

    /// Returns the maxima of a scope, and the kinds of EMs whose tickets do not count there.
    fn of_scope(&self, keys: &Keys, values: &[String]) -> Option<(Vec<Option<i64>>, &BTreeSet<String>)> {
        let set = self.sets.iter().find(|set| set.decides && set.keys == *keys)?;
        let scope: BTreeMap<&String, &String> = keys.iter().zip(values).collect();
        let of_keys = self.maxima.iter().filter(|(labels, _)| labels.keys().eq(keys.iter()));
        let matching = of_keys.filter(|(labels, _)| {
            labels.iter().all(|(key, value)| value.as_ref().is_none_or(|value| value == scope[key]))
        });
        // The order of limits: engine type, user, creator, other labels by name. A dimension that a limit does not name falls to
        // the next limit.
        let mut weighty: Vec<&String> = keys.iter().collect();
        let first = ["engine_type", "user", "creator"];
        weighty.sort_by_key(|key| first.iter().position(|first| first == key).unwrap_or(first.len()));
        let shape = |labels: &Labels| Vec::from_iter(weighty.iter().map(|key| labels[*key].is_some()));
        let mut matching: Vec<_> = matching.collect();
        matching.sort_by_key(|(labels, _)| Reverse(shape(labels)));
        let dimensions = matching.first()?.1.0.len();
        // If an advisory limit decides, nothing is refused.
        let max = |dimension: usize| {
            let decides = matching.iter().find_map(|(_, (max, is_enforced))| Some((max[dimension]?, *is_enforced)));
            decides.filter(|(_, is_enforced)| *is_enforced).map(|(max, _)| max)
        };
        Some(((0..dimensions).map(max).collect(), &set.exempt))
    }
}

/// Which check of a policy a label set belongs to.
fn check_of(keys: &Keys) -> &'static str {
    match Vec::from_iter(keys.iter().map(String::as_str)).as_slice() {
        ["creator"] => "creator",
        ["user"] => "user",
        _ => "labels",
    }
}

/// Changes of one transaction in a scope.
struct Commit {
    transaction: i64,
    /// Amounts of its tickets before, by kind of EM.
    before: HashMap<Uuid, (String, Option<Amounts>)>,
    last: i64,
    /// Whether the commit adopted: the order of its grants and adoptions is unknown.
    adopted: bool,
}

/// Replay of the history, in order.
struct Replay<'a> {
    journal: &'a Journal,
    rules: Rules,
    /// All label sets that ever have a rule.
    keys: Vec<Keys>,
    held: HashMap<Uuid, Amounts>,
    /// Amounts in a scope, by kind of EM.
    sums: HashMap<ScopeKey, BTreeMap<String, Amounts>>,
    /// Commits that may have further lines.
    open: HashMap<ScopeKey, Commit>,
    judged: Judged,
}

impl Replay<'_> {
    fn ticket(&mut self, id: Uuid, line: &Line) {
        let kind = line.kind.clone().unwrap_or_default();
        let before = match line.is_end() {
            true => self.held.remove(&id),
            false => self.held.insert(id, line.amounts()),
        };
        let now = self.held.get(&id).copied();
        for place in 0..self.keys.len() {
            let Some(scope) = self.scope(place, line) else { continue };
            if self.open.get(&scope).is_some_and(|open| open.transaction != line.transaction) {
                self.close(&scope);
            }
            let commit =
                Commit { transaction: line.transaction, before: HashMap::new(), last: line.id, adopted: false };
            let open = self.open.entry(scope.clone()).or_insert(commit);
            open.before.entry(id).or_insert((kind.clone(), before));
            open.last = line.id;
            open.adopted |= line.action == "adopted";
            let sum = self.sums.entry(scope.clone()).or_default().entry(kind.clone()).or_default();
            let change = [0, 1, 2].map(|dimension| amount(now, dimension) - amount(before, dimension));
            for (dimension, sum) in sum.iter_mut().enumerate() {
                *sum += change[dimension];
            }
            if line.action != "adopted" && change.iter().any(|change| *change > 0) {
                self.check_line(&scope, &kind, change, line);
            }
        }
    }

    /// No line grants more in a scope than its limit leaves, also within one commit.
    fn check_line(&mut self, scope: &ScopeKey, kind: &str, change: Amounts, line: &Line) {
        let exempts = |(_, exempt): (_, &BTreeSet<String>)| exempt.contains(kind);
        if self.rules.of_scope(&self.keys[scope.0], &scope.1).is_none_or(exempts) {
            return;
        }
        let Some((max, held)) = self.standing(scope) else { return };
        let grew = (0..3).filter(|dimension| change[*dimension] > 0 && max[*dimension].is_some());
        let mut is_limited = false;
        for dimension in grew {
            is_limited = true;
            self.journal.check(max[dimension].is_none_or(|max| held[dimension] <= max), || {
                let (keys, values) = (&self.keys[scope.0], &scope.1);
                format!("{keys:?} {values:?} of {max:?} held {held:?} at the line {line:?}")
            });
        }
        self.judged.lines += usize::from(is_limited);
    }

    fn scope(&self, place: usize, line: &Line) -> Option<ScopeKey> {
        let values: Option<Vec<String>> = self.keys[place].iter().map(|key| line.label(key)).collect();
        Some((place, values?))
    }

    fn change(&mut self, lines: &[&Line]) {
        for scope in Vec::from_iter(self.open.keys().cloned()) {
            self.close(&scope);
        }
        self.rules.change(self.journal, lines);
        self.judged.in_force += lines.iter().filter(|line| line.action == "limits_in_force").count();
        let is_over = |(scope, _): &(&ScopeKey, _)| {
            self.standing(scope).is_some_and(|(max, held)| {
                (0..3).any(|dimension| max[dimension].is_some_and(|max| held[dimension] > max))
            })
        };
        self.judged.lowered += usize::from(self.sums.iter().any(|sum| is_over(&sum)));
    }

    /// Returns the limit of a scope, and the amounts that count there.
    fn standing(&self, scope: &ScopeKey) -> Option<(Vec<Option<i64>>, Amounts)> {
        let (max, exempt) = self.rules.of_scope(&self.keys[scope.0], &scope.1)?;
        let mut held = Amounts::default();
        for (_, sum) in self.sums[scope].iter().filter(|(kind, _)| !exempt.contains(*kind)) {
            (0..3).for_each(|dimension| held[dimension] += sum[dimension]);
        }
        Some((max, held))
    }

    /// Asserts for a complete commit that it granted nothing in a scope that it left short.
    fn close(&mut self, scope: &ScopeKey) {
        let Some(commit) = self.open.remove(scope) else { return };
        if let Some((max, held)) = self.standing(scope).filter(|_| !commit.adopted) {
            let exempt = self.rules.of_scope(&self.keys[scope.0], &scope.1).map(|(_, exempt)| exempt.clone());
            for dimension in 0..3 {
                let Some(max) = max[dimension] else { continue };
                let grew = commit.before.iter().any(|(id, (kind, before))| {
                    !exempt.as_ref().is_some_and(|exempt| exempt.contains(kind))
                        && amount(self.held.get(id).copied(), dimension) > amount(*before, dimension)
                });
                let got = || {
                    let (keys, values, last) = (&self.keys[scope.0], &scope.1, commit.last);
                    format!("{keys:?} {values:?} of {max} held {held:?} after line {last}, which granted some of it")
                };
                self.journal.check(!grew || held[dimension] <= max, got);
                self.judged.commits += usize::from(grew);
                self.judged.full += usize::from(grew && held[dimension] == max);
            }
        }
        if self.sums[scope].values().all(|sum| *sum == Amounts::default()) {
            self.sums.remove(scope);
        }
    }
}

/// Replays the limits.
pub fn replay(journal: &Journal, history: &[Line]) -> Judged {
    let of_rules = |line: &&Line| line.em.is_empty() && line.action != "repaired";
    let limits = history.iter().filter(of_rules).filter(|line| line.action == "limit_set");
    let keys: BTreeSet<Keys> = limits
        .map(|line| serde_json::from_str::<Labels>(line.scope.as_deref().unwrap()).unwrap().into_keys().collect())
        .collect();
    let mut replay = Replay {
        journal,
        rules: Rules::default(),
        keys: keys.into_iter().collect(),
        held: HashMap::new(),
        sums: HashMap::new(),
        open: HashMap::new(),
        judged: Judged::default(),
    };
    let mut lines = history.iter().peekable();
    while let Some(line) = lines.next() {
        if let Some(id) = line.ticket_id {
            replay.ticket(id, line);
        } else if of_rules(&line) {
            let mut changed = vec![line];
            while let Some(next) = lines.next_if(|next| next.transaction == line.transaction) {
                changed.push(next);
            }
            replay.change(&changed);
        }
    }
    for scope in Vec::from_iter(replay.open.keys().cloned()) {
        replay.close(&scope);
    }
    replay.judged
}
