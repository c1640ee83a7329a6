//! Sets and deletes limits and policies, alone, so that it knows what may be in force.

use std::collections::{BTreeMap, HashSet};

use linkis_rm::{
    client::RmClient,
    domain::{
        limit::{Pattern, Rule},
        policy::{Check, Policy},
        resource::Dimension,
    },
};

use super::{journal::Answer, random::Random, workload::Shared};
use crate::harness::*;

/// What may be the limit of a pattern: `None` for no limit.
#[derive(Debug)]
struct Known {
    pattern: Pattern,
    /// What was set last, as far as that is known, and everything of which nobody knows whether it was, or will be.
    possible: HashSet<Option<i64>>,
    doubtful: HashSet<Option<i64>>,
}

impl Known {
    fn new(labels: &[(&str, Option<&str>)]) -> Self {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
        Self { pattern: Pattern::new(labels.collect()), possible: [None].into(), doubtful: HashSet::new() }
    }

    /// Notes what a change to `max` was answered.
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

pub async fn run(shared: Shared, mut random: Random) {
    let mut all = [
        Known::new(&[("creator", None)]),
        Known::new(&[("creator", Some("batch"))]),
        Known::new(&[("user", None), ("creator", None)]),
        Known::new(&[("user", Some("shared0"))]),
    ];
    // No maximum is ever used twice, so that each tells which change it came from.
    let mut next_max = 8;
    while shared.goes_on(random.millis(300, 1500)).await {
        let known = &mut all[random.index(4)];
        let rm = shared.client(&mut random);
        match random.between(0, 9) {
            0..6 => {
                next_max += 1;
                let rule = Rule { pattern: known.pattern.clone(), max: [(Dimension::Cores, next_max)].into() };
                let set = async { rm.set_limit(&rule).await.map(drop) };
                known.changed(&shared.journal.call("set limit", set).await, Some(next_max));
            }
            6..8 => known.changed(&shared.journal.call("delete limit", rm.delete_limit(&known.pattern)).await, None),
            _ => {
                let checks = [Check::Creator, Check::User, Check::Labels].into_iter().filter(|_| random.percent(70));
                let (kind, policy) = (name("linkis-cg-engineconnmanager"), Policy::new(checks));
                shared.journal.call("set policy", rm.set_policy(&kind, &policy)).await;
            }
        }
        compare(&shared, &mut random, &all).await;
    }
}

/// Checks that only such limits are in force as may be.
async fn compare(shared: &Shared, random: &mut Random, all: &[Known]) {
    let rm: RmClient = shared.client(random);
    let Answer::Done(rules) = shared.journal.call("usage", rm.limits()).await else { return };
    let in_force: BTreeMap<String, i64> =
        rules.iter().map(|rule| (rule.pattern.to_string(), rule.max[&Dimension::Cores])).collect();
    for known in all {
        let max = in_force.get(&known.pattern.to_string()).copied();
        let told = || format!("the limit of {} is {max:?}, and can only be one of {:?}", known.pattern, known.possible);
        shared.journal.check(known.possible.contains(&max), told);
    }
}
