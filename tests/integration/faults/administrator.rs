//! The only caller that sets and deletes limits and policies, so that it knows which of them can be in force.
//!
//! Limits are small, so that they decide. Each also has a unique maximum of memory, which no scope reaches. It identifies the change that
//! set the limit.

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use rm_client::{RmClient, calls};
use rm_model::{
    limit::{LabelPattern, Rule},
    limit_mode::LimitMode,
    order::{FairBy, QueueOrder},
    policy::{Check, Policy},
    priority::PriorityRule,
    resource::Dimension,
};
use rm_proto::convert::limit;
use rm_proto::v1::ReplaceLimitsRequest;

use super::{
    crowd,
    journal::Answer,
    random::Random,
    workload::{Shared, TENANT, is_alone},
};
use crate::harness::*;

/// Possible limits of a pattern.
#[derive(Debug)]
struct Known {
    pattern: LabelPattern,
    /// The scarce dimension and its range.
    scarce: (Dimension, i64, i64),
    /// Marks that can be in force: that of the last known change, and of every change with an unknown result.
    possible: HashSet<Option<i64>>,
    doubtful: HashSet<Option<i64>>,
}

impl Known {
    fn new(labels: &[(&str, Option<&str>)], scarce: (Dimension, i64, i64)) -> Self {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
        Self { pattern: LabelPattern::new(labels.collect()), scarce, possible: [None].into(), doubtful: HashSet::new() }
    }

    /// Records the reply to a change of the limit to this mark.
    fn changed(&mut self, answer: &Answer<()>, max: Option<i64>) {
        match answer {
            Answer::Done(()) => self.possible = self.doubtful.iter().copied().chain([max]).collect(),
            Answer::Rejected => self.possible = self.doubtful.iter().copied().chain([None]).collect(),
            Answer::Nothing => {}
            Answer::Unclear => {
                self.possible.insert(max);
                self.doubtful.insert(max);
            }
        }
    }
}

/// A caller that changes limits throughout.
pub struct Administrator {
    shared: Shared,
    random: Random,
    all: Vec<Known>,
    next_mark: i64,
}

impl Administrator {
    /// Sets every limit once, before the first fault.
    pub async fn begin(shared: Shared, random: Random) -> Self {
        let crowd = i64::try_from(shared.crowd).unwrap();
        let (cores, crowded) = ((Dimension::Cores, 4, 50), (Dimension::Instances, crowd / 4, crowd * 3));
        let all = vec![
            Known::new(&[("creator", None)], cores.clone()),
            Known::new(&[("creator", Some("batch"))], cores.clone()),
            Known::new(&[("user", None), ("creator", None)], cores.clone()),
            Known::new(&[("user", Some("shared0"))], cores.clone()),
            Known::new(&[("creator", Some(crowd::CROWD))], crowded.clone()),
            Known::new(&[("user", Some(crowd::CROWD)), ("creator", None)], crowded),
        ];
        let mut all = all;
        if is_alone() {
            // The limits name different dimensions, so each decides in its own.
            all.push(Known::new(&[("user", None), ("tenant", None)], cores));
            all.push(Known::new(&[("user", None), ("tenant", Some(TENANT))], (Dimension::Instances, 2, 20)));
            all.push(Known::new(&[("engine_family", None)], (Dimension::Cores, 30, 120)));
            all.push(Known::new(&[("queue", None)], (Dimension::Instances, 3, 30)));
        }
        let mut begun = Self { shared, random, all, next_mark: 1 << 50 };
        for number in 0..begun.all.len() {
            begun.set(number).await;
        }
        begun
    }

    pub async fn run(mut self) {
        while self.shared.goes_on(self.random.millis(100, 1000)).await {
            let number = self.random.index(self.all.len());
            match self.random.between(0, 9) {
                0..5 => self.set(number).await,
                5 if is_alone() => self.replace().await,
                5..8 => self.delete(number).await,
                8 => self.set_order().await,
                _ => self.set_policy().await,
            }
            compare(&self.shared, &mut self.random, &self.all).await;
        }
    }

    async fn set(&mut self, number: usize) {
        let (rm, rule) = (self.shared.client(&mut self.random), self.rule(number));
        let set = async { rm.set_limit(&rule).await.map(drop) };
        let answer = self.shared.journal.call("set limit", set).await;
        self.all[number].changed(&answer, Some(self.next_mark));
    }

    /// Returns a limit that was never set.
    fn rule(&mut self, number: usize) -> Rule {
        self.next_mark += 1;
        let known = &self.all[number];
        let (scarce, low, high) = known.scarce.clone();
        let max = [(scarce, self.random.between(low, high)), (Dimension::Memory, self.next_mark)].into();
        let mode = match self.random.between(0, 9) {
            0 => LimitMode::Off,
            1..3 => LimitMode::Advisory,
            _ => LimitMode::Enforced,
        };
        Rule { pattern: known.pattern.clone(), mode, max, guarantee: Default::default() }
    }

    /// Replaces all limits by most of them, each with another maximum.
    async fn replace(&mut self) {
        let (mut limits, mut marks) = (Vec::new(), Vec::new());
        for number in 0..self.all.len() {
            let mark = self.random.percent(85).then(|| {
                limits.push(limit::limit(&self.rule(number)));
                self.next_mark
            });
            marks.push(mark);
        }
        let (rm, call) = (self.shared.client(&mut self.random), ReplaceLimitsRequest { limits, ..Default::default() });
        let replace = async { rm.make(&calls::REPLACE_LIMITS, &call).await.map(drop) };
        let answer = self.shared.journal.call("replace limits", replace).await;
        for (known, mark) in self.all.iter_mut().zip(marks) {
            known.changed(&answer, mark);
        }
    }

    async fn delete(&mut self, number: usize) {
        let (rm, known) = (self.shared.client(&mut self.random), &mut self.all[number]);
        let delete = rm.delete_limit(&known.pattern);
        let answer = self.shared.journal.call("delete limit", delete).await;
        known.changed(&answer, None);
    }

    async fn set_order(&mut self) {
        let rm = self.shared.client(&mut self.random);
        let turns: [&[&str]; 4] = [&["user"], &[], &["creator"], &["creator", "user"]];
        let fair_by = FairBy::new(self.random.pick(turns).iter().map(|label| (*label).to_owned()));
        let position_kept = Duration::from_secs(self.random.pick([0, 2, 60]));
        let order = QueueOrder { fair_by, position_kept };
        self.shared.journal.call("set order", rm.set_order(&order, "a trial")).await;
        let pattern = LabelPattern::new([("user".to_owned(), None)].into());
        let rule = PriorityRule { pattern, default: self.random.pick([0, -60, 30]), max: 60 };
        self.shared.journal.call("set priority", rm.set_priority(&rule, "a trial")).await;
    }

    async fn set_policy(&mut self) {
        let rm = self.shared.client(&mut self.random);
        let kind = name(self.random.pick(["linkis-cg-engineconnmanager", crowd::KIND]));
        let mut checks = vec![Check::Creator, Check::User, Check::Labels];
        checks.retain(|_| self.random.percent(70));
        self.shared.journal.call("set policy", rm.set_policy(&kind, &Policy::new(checks))).await;
    }
}

/// Asserts that only possible limits are in force.
async fn compare(shared: &Shared, random: &mut Random, all: &[Known]) {
    let rm: RmClient = shared.client(random);
    let Answer::Done(rules) = shared.journal.call("usage", rm.limits()).await else { return };
    // Caps have label sets counted by limits without a maximum.
    let maximum = |rule: &Rule| Some((rule.pattern.to_string(), *rule.max.get(&Dimension::Memory)?));
    let in_force: BTreeMap<String, i64> = rules.iter().filter_map(maximum).collect();
    for known in all {
        let max = in_force.get(&known.pattern.to_string()).copied();
        let got = || format!("the limit of {} is {max:?}, and can only be one of {:?}", known.pattern, known.possible);
        shared.journal.check(known.possible.contains(&max), got);
    }
}
