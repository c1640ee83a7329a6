//! Tests of deciding rules and scope counting; `linkis` compares them with the limits of Apache Linkis.

mod linkis;

use super::*;
use crate::{em::EmInstance, limit_mode::LimitMode, name::Labels, resource::ResourceType};

fn rule(labels: &[(&str, Option<&str>)], instances: i64) -> Rule {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect();
    let max = BTreeMap::from([(Dimension::Instances, instances)]);
    Rule { pattern: LabelPattern::new(labels), mode: LimitMode::Enforced, max, guarantee: Default::default() }
}

fn decided(limits: &Limits, user: &str, creator: &str) -> Vec<(String, Option<i64>)> {
    let labels = Labels::default();
    let em = EmInstance::parse("em", "ecm", "host").unwrap();
    let nothing = Resource::zero(ResourceType::Cpu);
    let scopes = limits.scopes(&TicketLabels::new(user, creator, "", &labels, &em, &nothing));
    let instances = |s: &LimitedScope| s.maxima().find(|(d, ..)| **d == Dimension::Instances).map(|(_, max, _)| max);
    scopes.into_iter().map(|s| (s.scope().to_string(), instances(&s))).collect()
}

/// Returns limits whose label sets are all counted, or all being counted.
fn limits(is_counted: bool, rules: impl IntoIterator<Item = Rule>) -> Limits {
    let rules: Vec<Rule> = rules.into_iter().collect();
    let wanted = CountingRule::wanted(rules.iter().map(Rule::label_set).collect(), &BTreeMap::new());
    let sets = (1..).zip(wanted).map(|(id, counting)| LabelSet { id, counting, is_counted }).collect();
    Limits::new(Uuid::nil(), sets, rules)
}

#[test]
fn label_set_being_counted_decides_nothing() {
    for is_counted in [true, false] {
        let limits = limits(is_counted, [rule(&[("user", None)], 2)]);
        assert_eq!(decided(&limits, "hadoop", "IDE"), [("user=hadoop".into(), is_counted.then_some(2))]);
        assert!(limits.rules().all(|(_, decides)| decides == is_counted));
        assert!(limits.locks_users());
    }
    assert!(!limits(true, [rule(&[("creator", None)], 2)]).locks_users());
}

#[test]
fn em_kind_without_check_does_not_count_label_set() {
    let kind = Name::parse("em", "ecm").unwrap();
    let policies = BTreeMap::from([(kind.clone(), Policy::new([]))]);
    let rules = [rule(&[("user", None)], 2)];
    let [counting] = CountingRule::wanted(rules.iter().map(Rule::label_set).collect(), &policies)
        .into_iter()
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    assert_eq!(counting.exempt, BTreeSet::from([kind]));
    let limits = Limits::new(Uuid::nil(), vec![LabelSet { id: 1, counting, is_counted: true }], rules);
    assert_eq!(decided(&limits, "hadoop", "IDE"), []);
    let scope = Scope::new([("user".to_owned(), "hadoop".to_owned())].into());
    let (labels, nothing) = (Labels::default(), Resource::zero(ResourceType::Cpu));
    for (kind, is_counted) in [("ecm", false), ("other", true)] {
        let em = EmInstance::parse("em", kind, "host").unwrap();
        assert_eq!(
            limits.counts_in(&scope, &TicketLabels::new("hadoop", "IDE", "", &labels, &em, &nothing)),
            is_counted
        );
        assert!(!limits.counts_in(&scope, &TicketLabels::new("alice", "IDE", "", &labels, &em, &nothing)));
    }
}

#[test]
fn limit_most_specific_rule_decides() {
    let both = |user, creator, max| rule(&[("user", user), ("creator", creator)], max);
    let limits = limits(
        true,
        [
            both(None, None, 4),
            both(None, Some("IDE"), 3),
            both(Some("hadoop"), None, 2),
            both(Some("hadoop"), Some("IDE"), 1),
        ],
    );
    for (user, creator, max) in [("hadoop", "IDE", 1), ("hadoop", "x", 2), ("x", "IDE", 3), ("x", "y", 4)] {
        assert_eq!(decided(&limits, user, creator), [(format!("creator={creator},user={user}"), Some(max))]);
    }
}

#[test]
fn limit_unnamed_dimension_falls_to_next_rule() {
    let both = |user: Option<&str>, max: &[(Dimension, i64)]| Rule {
        max: max.iter().cloned().collect(),
        ..rule(&[("user", user), ("creator", Some("IDE"))], 0)
    };
    let limits = limits(
        true,
        [
            both(None, &[(Dimension::Instances, 9), (Dimension::Cores, 8)]),
            both(Some("hadoop"), &[(Dimension::Instances, 2)]),
        ],
    );
    let (labels, em) = (Labels::default(), EmInstance::parse("em", "ecm", "host").unwrap());
    let nothing = Resource::zero(ResourceType::Cpu);
    let of = |user| {
        let scopes = limits.scopes(&TicketLabels::new(user, "IDE", "", &labels, &em, &nothing));
        let maxima: BTreeMap<_, _> = scopes[0].maxima().map(|(dimension, max, _)| (dimension.key(), max)).collect();
        maxima
    };
    assert_eq!(of("hadoop"), BTreeMap::from([("instances".to_owned(), 2), ("cores".to_owned(), 8)]));
    assert_eq!(of("other"), BTreeMap::from([("instances".to_owned(), 9), ("cores".to_owned(), 8)]));
}

#[test]
fn limit_specificity_weighs_engine_type_before_user() {
    let three =
        |engine, user, creator, max| rule(&[("engine_type", engine), ("user", user), ("creator", creator)], max);
    let limits = limits(
        true,
        [
            three(None, Some("hadoop"), Some("IDE"), 3),
            three(Some("spark"), None, None, 1),
            three(Some("spark"), None, Some("IDE"), 2),
        ],
    );
    let (labels, em) = (Labels::default(), EmInstance::parse("em", "ecm", "host").unwrap());
    let nothing = Resource::zero(ResourceType::Cpu);
    let scopes = limits.scopes(&TicketLabels::new("hadoop", "IDE", "spark", &labels, &em, &nothing));
    let maxima: Vec<i64> = scopes[0].rules.iter().map(|rule| rule.max[&Dimension::Instances]).collect();
    assert_eq!(maxima, [2, 1, 3]);
}

#[test]
fn limit_difference_lists_changed_rules() {
    let of = |user, max| rule(&[("user", Some(user))], max);
    let changes = RuleChanges::between([of("a", 1), of("b", 1), of("c", 1)], &[of("d", 1), of("b", 2), of("a", 1)]);
    let expected =
        RuleChanges { added: vec![of("d", 1)], changed: vec![(of("b", 1), of("b", 2))], removed: vec![of("c", 1)] };
    assert_eq!(changes, expected);
    assert_eq!(RuleChanges::between([of("a", 1)], &[of("a", 1)]), RuleChanges::default());
}

#[test]
fn limit_pages_of_any_size_have_one_order() {
    let values = [None, Some("a"), Some("b")];
    let mut rules = Vec::new();
    for user in values {
        rules.extend([rule(&[("user", user)], 1), rule(&[("creator", user)], 1)]);
        rules.extend(values.map(|creator| rule(&[("user", user), ("creator", creator)], 1)));
    }
    let all = limits(true, rules.clone());
    let order: Vec<_> = all.rules().collect();
    assert_eq!(order.len(), 15);
    for (number, (after, _)) in order.iter().enumerate() {
        // A deleted rule is still a valid page boundary.
        let without = limits(true, rules.iter().filter(|rule| rule != after).cloned());
        for size in 0..order.len() {
            let expected: Vec<_> = order.iter().skip(number + 1).take(size).copied().collect();
            assert_eq!(all.rules_behind(&after.pattern, size), expected);
            assert_eq!(without.rules_behind(&after.pattern, size), expected);
        }
    }
}

#[test]
fn limit_changes_equal_full_read() {
    let of = |user: usize, max| rule(&[("user", Some(&format!("user{user}")))], max);
    let before = limits(true, (0..100).map(|user| of(user, 1)).chain([rule(&[("creator", None)], 5)]));
    let sets: Vec<LabelSet> = before.label_sets().cloned().collect();
    let changes = [
        (of(7, 0).pattern, Some(of(7, 2))),
        (of(100, 0).pattern, Some(of(100, 3))),
        (of(8, 0).pattern, None),
        (rule(&[("creator", None)], 0).pattern, None),
    ];
    let after = before.changed(Uuid::from_u128(1), sets.clone(), changes);
    let max = |user| {
        if user == 7 {
            2
        } else if user == 100 {
            3
        } else {
            1
        }
    };
    let anew = (0..101).filter(|user| *user != 8).map(|user| of(user, max(user)));
    let anew = Limits::new(Uuid::from_u128(1), sets, anew);
    assert_eq!(after.rules().collect::<Vec<_>>(), anew.rules().collect::<Vec<_>>());
    for user in ["user7", "user8", "user100", "user1"] {
        assert_eq!(decided(&after, user, "IDE"), decided(&anew, user, "IDE"));
    }
    assert_eq!(before.rules().count(), 101, "a kind that counts by them continues");
}

#[test]
fn label_sets_are_checked_creator_first_then_user_then_larger_ones() {
    let limits = limits(
        true,
        [
            rule(&[("user", None), ("creator", None)], 3),
            rule(&[("user", None)], 2),
            rule(&[("creator", Some("IDE"))], 1),
            rule(&[("tenant", None)], 9),
        ],
    );
    assert_eq!(
        decided(&limits, "hadoop", "IDE"),
        [
            ("creator=IDE".into(), Some(1)),
            ("user=hadoop".into(), Some(2)),
            ("tenant=".into(), Some(9)),
            ("creator=IDE,user=hadoop".into(), Some(3)),
        ]
    );
    assert_eq!(decided(&limits, "hadoop", "x")[0], ("creator=x".into(), None), "counted, but not limited");
}
