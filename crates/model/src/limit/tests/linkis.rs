//! Conformance with the fallback of configured limits in Apache Linkis.
//!
//! `tests/fixtures/linkis/limits.json` contains the results of Linkis's configuration service and manager, produced by
//! their classes (`clients/java`, `LimitsTest`). The tests compare them with the decisions of equivalent rules.

use serde::Deserialize;

use super::*;
use crate::{
    resource::parse_size,
    scope::{CREATOR, ENGINE_TYPE, QUEUE},
};

/// The difference that affects every case: dimensions that no level names.
const DEFAULT: &str = "default";

/// Configuration for all users, creators and engines.
const EVERYBODY: &str = "*-*,*-*";

/// Amounts by dimension in the format of Linkis's tables; an empty text is no amount.
type Amounts = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Table {
    /// Amounts that Linkis's manager uses without a configuration.
    defaults: Amounts,
    /// Descriptions of the differences, by name.
    differences: BTreeMap<String, String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    what: String,
    /// Labels of the requested engine, as `user-creator,engine-version`.
    asked: String,
    /// Amounts by labels; `*` means each.
    configured: BTreeMap<String, Amounts>,
    /// Amounts that Linkis limits, without the defaults.
    linkis: Amounts,
    /// Name of the difference, if this case has one; `here` then has the amounts of this project.
    differs: Option<String>,
    here: Option<Amounts>,
}

impl Table {
    fn read() -> Self {
        serde_json::from_str(include_str!("../../../../../tests/fixtures/linkis/limits.json")).unwrap()
    }
}

impl Case {
    /// Returns the expected amounts: those of Linkis, unless the case is a difference.
    fn here(&self) -> &Amounts {
        assert_eq!(self.differs.is_some(), self.here.is_some(), "{}", self.what);
        assert_ne!(self.here.as_ref(), Some(&self.linkis), "{} does not differ", self.what);
        self.here.as_ref().unwrap_or(&self.linkis)
    }

    /// Returns the configuration, with the manager's defaults for missing amounts.
    fn with_defaults(&self, defaults: &Amounts) -> BTreeMap<String, Amounts> {
        let mut configured = self.configured.clone();
        let everybody = configured.entry(EVERYBODY.to_owned()).or_default();
        everybody.retain(|_, amount| !amount.is_empty());
        *everybody = over(defaults, everybody);
        configured
    }
}

/// Returns `defaults`, replaced by `said` where both have a value.
fn over(defaults: &Amounts, said: &Amounts) -> Amounts {
    defaults.clone().into_iter().chain(said.clone()).collect()
}

/// Returns the values of user, creator and engine type; `None` means each.
fn labels(configured: &str) -> [(&'static str, Option<&str>); 3] {
    let (user_creator, engine) = configured.split_once(',').unwrap();
    let (user, creator) = user_creator.split_once('-').unwrap();
    let value = |of, each| (of != each).then_some(of);
    [(USER, value(user, "*")), (CREATOR, value(creator, "*")), (ENGINE_TYPE, value(engine, "*-*"))]
}

/// Returns the rules of one configured level. Amounts in external queues get a limit per queue.
fn rules((configured, amounts): (&String, &Amounts)) -> impl Iterator<Item = Rule> {
    let of = |is_queue: bool| {
        let queue = is_queue.then_some((QUEUE, None));
        let labels = labels(configured).into_iter().chain(queue);
        let named = amounts.iter().filter(|(key, amount)| is_queue == key.starts_with("queue_") && !amount.is_empty());
        Rule {
            pattern: LabelPattern::new(labels.map(|(key, value)| (key.to_owned(), value.map(str::to_owned))).collect()),
            mode: LimitMode::Enforced,
            max: named.map(|(key, text)| (Dimension::parse_key(key).unwrap(), parse_size(text).unwrap())).collect(),
            guarantee: Default::default(),
        }
    };
    [of(false), of(true)].into_iter().filter(|rule| !rule.max.is_empty())
}

/// Returns the limited amounts of a request under a configuration.
fn limited(configured: &BTreeMap<String, Amounts>, asked: &str) -> BTreeMap<String, i64> {
    let limits = limits(true, configured.iter().flat_map(rules));
    let [user, creator, engine_type] = labels(asked).map(|(_, value)| value.unwrap());
    let (carried, em) = (Labels::default(), EmInstance::parse("em", "ecm", "host").unwrap());
    let in_a_queue = Resource::zero(ResourceType::DriverAndYarn);
    let mut limited = BTreeMap::new();
    for scope in limits.scopes(&TicketLabels::new(user, creator, engine_type, &carried, &em, &in_a_queue)) {
        // Every deciding rule applies to the request's own counter.
        for (key, value) in labels(asked) {
            assert_eq!(scope.scope().labels().get(key).map(String::as_str), value);
        }
        for (dimension, max, _) in scope.maxima() {
            assert_eq!(limited.insert(dimension.key(), max), None, "{dimension} is limited once");
        }
    }
    limited
}

fn amounts(texts: &Amounts) -> BTreeMap<String, i64> {
    texts.iter().map(|(key, text)| (key.clone(), parse_size(text).unwrap())).collect()
}

#[test]
fn limits_fall_back_like_linkis_configuration() {
    for case in Table::read().cases {
        assert_eq!(limited(&case.configured, &case.asked), amounts(case.here()), "{}", case.what);
    }
}

#[test]
fn linkis_default_limits_give_equal_limits() {
    let table = Table::read();
    for case in &table.cases {
        let configured = case.with_defaults(&table.defaults);
        let expected = over(&table.defaults, case.here());
        assert_eq!(limited(&configured, &case.asked), amounts(&expected), "{}", case.what);
    }
}

#[test]
fn linkis_limit_differences_are_named_and_shown() {
    let table = Table::read();
    let seen: BTreeSet<&str> = table.cases.iter().filter_map(|case| case.differs.as_deref()).chain([DEFAULT]).collect();
    assert_eq!(seen, table.differences.keys().map(String::as_str).collect());
}
