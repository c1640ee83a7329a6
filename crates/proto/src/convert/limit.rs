//! Limits, policies, the order and the priorities of waiting requests, reclaim policies, and scopes: parses and checks them, and converts them to messages.
//!
//! A parser fails with a [`FieldError`] that names the field, the value and the bound. The functions named `new_…` also
//! check the names that a call creates; the others accept every stored name. No function here reads or changes a limit.
//! Callers: `rm_edge::limit`, `rm_edge::usage` and the RM client.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use crate::v1 as proto;
use rm_model::{
    limit::{
        DIMENSIONS_MAX, GuaranteeExcess, LABELS_MAX, LabelPattern, LimitChanges, LimitReplacement, PatternChange, Rule,
        RulePrecondition, RuleRecord, RuleReplacement, ScopeUsage,
    },
    limit_mode::LimitMode,
    name::{FieldError, Name, check_at_most, check_new, check_new_label, check_text},
    order::{
        FAIR_BY_BYTES_MAX, FAIR_BY_MAX, FairBy, POSITION_KEPT, POSITION_KEPT_MAX, POSITION_KEPT_MIN, QueueOrder,
        QueueRuleReplacement,
    },
    policy::{EM_NEW_AFTER, EM_NEW_AFTER_MAX, EM_NEW_AFTER_MIN, Policy, REQUIRED_MAX},
    priority::{PRIORITY_RULES_MAX, Priorities, PriorityRule},
    reclaim::{
        GRACE, IDLE_AFTER, MIN_LIFE, PER_MINUTE, PER_MINUTE_MAX, RECLAIM_POLICIES_MAX, RECLAIM_TIME_MAX,
        RECLAIM_TIME_MIN, ReclaimPolicies, ReclaimPolicy,
    },
    resource::{Dimension, parse_size},
    scope::{EM, EM_APPLICATION, NAMESPACE, QUEUE, Scope, ScopeHoldings, Tally},
};

use super::{
    answer::timestamp,
    enumeration::known,
    request::{duration, priority as seconds},
};

/// Maximum number of limits in one call.
pub const LIMITS_MAX: usize = 10_000;

/// Maximum number of limits of one kind of change that a response names.
const NAMED_MAX: usize = 1000;

/// Parses the labels of the limit in `field`.
pub fn pattern(field: &str, limit: &proto::Limit) -> Result<LabelPattern, FieldError> {
    label_pattern(field, &limit.labels, &limit.each)
}

/// Parses the labels of the rule in `field`, those with values and `each`.
pub fn label_pattern(
    field: &str,
    valued: &BTreeMap<String, String>,
    each: &[String],
) -> Result<LabelPattern, FieldError> {
    let count = valued.len() + each.len();
    if count == 0 || count > LABELS_MAX {
        let problem = format!("names {count} labels (with each); must name 1 to {LABELS_MAX}");
        return Err(FieldError::new(format!("{field}.labels"), problem));
    }
    let mut labels = BTreeMap::new();
    for (key, value) in valued {
        Name::parse(&format!("{field}.labels (a key)"), key)?;
        Name::parse(&format!("{field}.labels[{key:?}]"), value)?;
        labels.insert(key.clone(), Some(value.clone()));
    }
    for key in each {
        Name::parse(&format!("{field}.each"), key)?;
        if labels.insert(key.clone(), None).is_some() {
            return Err(FieldError::new(format!("{field}.each"), format!("names {key:?} a second time")));
        }
    }
    Ok(LabelPattern::new(labels))
}

/// Parses the limit in `field`. Its maxima are numbers, texts with a unit, or both.
pub fn rule(field: &str, limit: Option<&proto::Limit>) -> Result<Rule, FieldError> {
    let limit = limit.ok_or_else(|| FieldError::new(field, "is required"))?;
    let pattern = pattern(field, limit)?;
    let mode: proto::LimitMode = known(&format!("{field}.mode"), limit.mode)?;
    let mode = mode.read().unwrap_or_default();
    let written = written_maxima(&format!("{field}.max_text"), &limit.max_text)?;
    let mut max = maxima(&format!("{field}.max"), &limit.max, written.is_empty() && mode != LimitMode::Off)?;
    for (dimension, amount) in written {
        if max.contains_key(&dimension) {
            let problem = format!("names {:?}, which max names, too; give it once", dimension.key());
            return Err(FieldError::new(format!("{field}.max_text"), problem));
        }
        max.insert(dimension, amount);
    }
    if max.len() > DIMENSIONS_MAX {
        let problem = format!("names {} dimensions with max; at most {DIMENSIONS_MAX} are allowed", max.len());
        return Err(FieldError::new(format!("{field}.max_text"), problem));
    }
    let mut guarantee = maxima(&format!("{field}.guarantee"), &limit.guarantee, false)?;
    guarantee.retain(|_, amount| *amount > 0);
    let rule = Rule { pattern, mode, max, guarantee };
    rule.check_guarantee().map_err(|wrong| FieldError::new(format!("{field}.guarantee"), wrong.to_string()))?;
    Ok(rule)
}

/// Parses the maxima in `field` that are written as text. A size may have a unit.
fn written_maxima(field: &str, maxima: &BTreeMap<String, String>) -> Result<BTreeMap<Dimension, i64>, FieldError> {
    if maxima.len() > DIMENSIONS_MAX {
        let problem = format!("names {} dimensions; at most {DIMENSIONS_MAX} are allowed", maxima.len());
        return Err(FieldError::new(field, problem));
    }
    let maximum = |(key, text): (&String, &String)| {
        let dimension = dimension(field, key)?;
        let amount = if dimension.is_size() {
            parse_size(text).map_err(|error| error.to_string())
        } else {
            let digits = Some(text.trim()).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
            let number = digits.and_then(|digits| digits.parse().ok());
            number.ok_or_else(|| format!("must be a whole number of at most {}; sizes are for memory", i64::MAX))
        };
        let in_key = format!("{field}[{key:?}]");
        amount.map(|amount| (dimension, amount)).map_err(|problem| FieldError::new(in_key, problem))
    };
    maxima.iter().map(maximum).collect()
}

/// Parses the maxima in `field`. At least one is required if `needed`.
pub fn maxima(
    field: &str,
    maxima: &BTreeMap<String, i64>,
    needed: bool,
) -> Result<BTreeMap<Dimension, i64>, FieldError> {
    if (maxima.is_empty() && needed) || maxima.len() > DIMENSIONS_MAX {
        let problem = format!("names {} dimensions; must name 1 to {DIMENSIONS_MAX}", maxima.len());
        return Err(FieldError::new(field, problem));
    }
    maxima.iter().map(|(key, max)| Ok((dimension(field, key)?, amount(field, key, *max)?))).collect()
}

/// Checks the names in the labels of the rule in `field` that a call sets.
fn check_new_pattern(field: &str, pattern: &LabelPattern) -> Result<(), FieldError> {
    let in_labels = format!("{field}.labels");
    if let Some(Some(em)) = pattern.labels().get(EM)
        && em.contains('/')
    {
        let problem = format!("names the EM {em:?}; the label em is the instance alone, behind the slash");
        return Err(FieldError::new(in_labels, problem));
    }
    let mut labels = pattern.labels().iter();
    labels.try_for_each(|(key, value)| check_new_label(&in_labels, key, value.as_deref().unwrap_or_default()))
}

/// Parses the limit in `field` that a call sets, and checks its names.
pub fn new_rule(field: &str, limit: Option<&proto::Limit>) -> Result<Rule, FieldError> {
    let rule = rule(field, limit)?;
    check_new_pattern(field, &rule.pattern)?;
    rule.max.keys().try_for_each(|dimension| check_new(&format!("{field}.max"), dimension.name()))?;
    rule.check_labels().map_err(|uncounted| FieldError::new(format!("{field}.max"), uncounted.to_string()))?;
    Ok(rule)
}

/// Parses a replacement of all limits.
///
/// # Errors
/// Too many limits, rules or policies, an invalid one, or two with equal labels.
pub fn replacement(message: &proto::ReplaceLimitsRequest) -> Result<LimitReplacement, FieldError> {
    let proto::ReplaceLimitsRequest { limits, order, priorities, reclaim_policies, keep_limits, .. } = message;
    let (in_priorities, in_policies) = ("priorities.priorities", "reclaim_policies.policies");
    check_at_most("limits", limits.len(), "limits", LIMITS_MAX)?;
    if *keep_limits && !limits.is_empty() {
        return Err(FieldError::new("keep_limits", "must not be set besides limits"));
    }
    let rules = all("limits", limits, new_rule, |rule| &rule.pattern)?;
    let order = order.as_ref().map(|order| new_order("order", Some(order))).transpose()?;
    let priorities = priorities.as_ref().map(|list| {
        check_at_most(in_priorities, list.priorities.len(), "rules", PRIORITY_RULES_MAX)?;
        all(in_priorities, &list.priorities, new_priority, |rule| &rule.pattern).map(Priorities::new)
    });
    let reclaim = reclaim_policies.as_ref().map(|list| {
        check_at_most(in_policies, list.policies.len(), "policies", RECLAIM_POLICIES_MAX)?;
        all(in_policies, &list.policies, new_reclaim_policy, |policy| &policy.pattern).map(ReclaimPolicies::new)
    });
    let queue = QueueRuleReplacement { order, priorities: priorities.transpose()?, reclaim: reclaim.transpose()? };
    Ok(LimitReplacement { rules: (!keep_limits).then_some(rules), queue })
}

/// Parses the elements of the list in `field`, whose patterns must be distinct.
fn all<M, R>(
    field: &str,
    messages: &[M],
    parse: impl Fn(&str, Option<&M>) -> Result<R, FieldError>,
    pattern: impl Fn(&R) -> &LabelPattern,
) -> Result<Vec<R>, FieldError> {
    let (mut parsed, mut numbers) = (Vec::with_capacity(messages.len()), BTreeMap::new());
    for (number, message) in messages.iter().enumerate() {
        let rule = parse(&format!("{field}[{number}]"), Some(message))?;
        if let Some(first) = numbers.insert(pattern(&rule).clone(), number) {
            let problem = format!("has the same labels as {field}[{first}] ({})", pattern(&rule));
            return Err(FieldError::new(format!("{field}[{number}]"), problem));
        }
        parsed.push(rule);
    }
    Ok(parsed)
}

/// Converts a replacement of all limits to a message.
pub fn replacement_message(new: &LimitReplacement) -> proto::ReplaceLimitsRequest {
    let LimitReplacement { rules, queue: QueueRuleReplacement { order, priorities, reclaim } } = new;
    let priorities = priorities
        .as_ref()
        .map(|rules| proto::PriorityList { priorities: rules.rules().iter().map(priority_message).collect() });
    let reclaim_policies = reclaim
        .as_ref()
        .map(|rules| proto::ReclaimPolicyList { policies: rules.rules().iter().map(reclaim_policy_message).collect() });
    let (limits, order) = (rules.iter().flatten().map(limit).collect(), order.as_ref().map(order_message));
    let keep_limits = rules.is_none();
    proto::ReplaceLimitsRequest { limits, order, priorities, reclaim_policies, keep_limits, ..Default::default() }
}

/// Converts the result of a replacement, or of its dry run, to a message. Each list has at most 1,000 limits; the
/// counts are complete.
pub fn replaced(replaced: &RuleReplacement) -> proto::ReplaceLimitsResponse {
    let RuleReplacement { changes: LimitChanges { rules: changes, queue }, over, guarantees, decides } = replaced;
    let first = |rules: &[Rule]| rules.iter().take(NAMED_MAX).map(limit).collect();
    let changed = changes.changed.iter().take(NAMED_MAX);
    let changed =
        changed.map(|(before, after)| proto::LimitChange { before: Some(limit(before)), after: Some(limit(after)) });
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    proto::ReplaceLimitsResponse {
        added: first(&changes.added),
        added_count: count(changes.added.len()),
        changed: changed.collect(),
        changed_count: count(changes.changed.len()),
        removed: first(&changes.removed),
        removed_count: count(changes.removed.len()),
        over_limit: over.first.iter().map(scope_usage).collect(),
        over_limit_count: count(over.count),
        over_limit_partial: over.is_partial,
        state: state(*decides).into(),
        guarantee_excess: guarantees.iter().map(guarantee_excess).collect(),
        order: queue.order.as_ref().map(|(before, after)| proto::OrderChange {
            before: Some(order_message(before)),
            after: Some(order_message(after)),
        }),
        priorities: queue
            .priorities
            .iter()
            .map(|PatternChange { before, after, .. }| proto::PriorityChange {
                before: before.as_ref().map(priority_message),
                after: after.as_ref().map(priority_message),
            })
            .collect(),
        reclaim_policies: queue
            .reclaim
            .iter()
            .map(|PatternChange { before, after, .. }| proto::ReclaimPolicyChange {
                before: before.as_ref().map(reclaim_policy_message),
                after: after.as_ref().map(reclaim_policy_message),
            })
            .collect(),
    }
}

fn guarantee_excess(excess: &GuaranteeExcess) -> proto::GuaranteeExcess {
    let GuaranteeExcess { labels, dimension, guaranteed, capacity } = excess;
    proto::GuaranteeExcess {
        labels: labels.iter().cloned().collect(),
        dimension: dimension.key(),
        guaranteed: *guaranteed,
        capacity: *capacity,
    }
}

/// Parses the name of a dimension in `field`.
pub fn dimension(field: &str, key: &str) -> Result<Dimension, FieldError> {
    let unknown = || {
        let problem = format!(
            "has the unknown dimension {key:?}; known are memory, cores, instances, queue_memory, queue_cores, \
             queue_instances, kubernetes_memory, kubernetes_millicores, waiting, and custom ones as special.NAME"
        );
        FieldError::new(field, problem)
    };
    let dimension = Dimension::parse_key(key).ok_or_else(unknown)?;
    Name::parse(field, dimension.name())?;
    Ok(dimension)
}

fn amount(field: &str, key: &str, max: i64) -> Result<i64, FieldError> {
    if max < 0 {
        return Err(FieldError::new(field, format!("has {max} for {key:?}; must not be negative")));
    }
    Ok(max)
}

/// Converts a limit, its last change and its state to a message. `decides` is false while the limit is still being
/// counted.
pub fn limit_record(record: &RuleRecord, decides: bool) -> proto::Limit {
    proto::Limit {
        state: state(decides).into(),
        updated_by: record.updated_by.clone(),
        update_time: Some(timestamp(record.update_time)),
        etag: record.etag.clone(),
        ..limit(&record.rule)
    }
}

/// Returns the state of a limit that a change expects: any without an etag, absent with an empty one.
pub fn expected(etag: Option<&str>) -> RulePrecondition {
    match etag {
        None => RulePrecondition::Anything,
        Some("") => RulePrecondition::Nothing,
        Some(etag) => RulePrecondition::Etag(etag.to_owned()),
    }
}

/// Converts the state of a limit to a message: in force if it `decides`, else counting.
pub fn state(decides: bool) -> proto::LimitState {
    if decides { proto::LimitState::InForce } else { proto::LimitState::Counting }
}

/// Converts a limit to a message, without its last change.
pub fn limit(rule: &Rule) -> proto::Limit {
    let (mode, name) = (proto::LimitMode::from(rule.mode).into(), rule.pattern.to_string());
    let (labels, each) = label_parts(&rule.pattern);
    let by_key = |amounts: &BTreeMap<Dimension, i64>| {
        amounts.iter().map(|(dimension, amount)| (dimension.key(), *amount)).collect()
    };
    let (max, guarantee) = (by_key(&rule.max), by_key(&rule.guarantee));
    proto::Limit { labels, each, mode, name, max, guarantee, ..Default::default() }
}

/// Returns the labels of a pattern with values, and those for each value.
fn label_parts(pattern: &LabelPattern) -> (BTreeMap<String, String>, Vec<String>) {
    let valued = pattern.labels().iter().filter_map(|(key, value)| Some((key.clone(), value.clone()?)));
    let each = pattern.labels().iter().filter(|(_, value)| value.is_none());
    (valued.collect(), each.map(|(key, _)| key.clone()).collect())
}

/// Parses the policy in `field` and the kind of EM that it applies to.
pub fn policy(field: &str, policy: Option<&proto::Policy>) -> Result<(Name, Policy), FieldError> {
    let policy = policy.ok_or_else(|| FieldError::new(field, "is required"))?;
    let em_kind = Name::parse(&format!("{field}.em_application_name"), &policy.em_application_name)?;
    let check = |number: &i32| {
        let unknown =
            || format!("has the unknown check {number}; known are CHECK_CREATOR, CHECK_USER and CHECK_LABELS");
        let check = proto::Check::try_from(*number).ok().and_then(proto::Check::read);
        check.ok_or_else(|| FieldError::new(format!("{field}.checks"), unknown()))
    };
    let checks = policy.checks.iter().map(check).collect::<Result<Vec<_>, _>>()?;
    let in_labels = format!("{field}.required_labels");
    check_at_most(&in_labels, policy.required_labels.len(), "labels", REQUIRED_MAX)?;
    for key in &policy.required_labels {
        Name::parse(&in_labels, key)?;
    }
    let placement =
        known::<proto::Placement>(&format!("{field}.placement"), policy.placement)?.read().unwrap_or_default();
    let required = policy.required_labels.iter().cloned().collect();
    let em_new_after = em_new_after(&format!("{field}.em_new_after"), policy.em_new_after)?;
    Ok((em_kind, Policy::new(checks).with(required, placement).with_em_new_after(em_new_after)))
}

/// Parses the age in `field` until which EMs are new.
fn em_new_after(field: &str, age: Option<prost_types::Duration>) -> Result<Duration, FieldError> {
    let Some(age) = age else { return Ok(EM_NEW_AFTER) };
    let age = duration(field, age)?;
    if age.is_zero() || (EM_NEW_AFTER_MIN..=EM_NEW_AFTER_MAX).contains(&age) {
        return Ok(age);
    }
    Err(FieldError::new(field, format!("is {age:?}; must be 0, or from 1 second to 1 day")))
}

/// Parses the policy in `field` that a call sets, and checks its names. Returns also its kind of EM.
pub fn new_policy(field: &str, message: Option<&proto::Policy>) -> Result<(Name, Policy), FieldError> {
    let (em_kind, policy) = policy(field, message)?;
    check_new(&format!("{field}.em_application_name"), em_kind.as_str())?;
    policy.required_labels().iter().try_for_each(|key| check_new(&format!("{field}.required_labels"), key))?;
    Ok((em_kind, policy))
}

/// Parses the order of waiting requests in `field`.
pub fn order(field: &str, message: Option<&proto::Order>) -> Result<QueueOrder, FieldError> {
    let message = message.ok_or_else(|| FieldError::new(field, "is required"))?;
    let in_labels = format!("{field}.fair_by");
    check_at_most(&in_labels, message.fair_by.len(), "labels", FAIR_BY_MAX)?;
    let mut labels = BTreeSet::new();
    for key in &message.fair_by {
        Name::parse(&in_labels, key)?;
        check_fixed(&in_labels, key)?;
        if !labels.insert(key.clone()) {
            return Err(FieldError::new(in_labels, format!("names {key:?} a second time")));
        }
    }
    let bytes: usize = labels.iter().map(String::len).sum();
    if bytes > FAIR_BY_BYTES_MAX {
        let problem = format!("has names of {bytes} bytes together; at most {FAIR_BY_BYTES_MAX} are allowed");
        return Err(FieldError::new(in_labels, problem));
    }
    let position_kept = position_kept(&format!("{field}.position_kept"), message.position_kept)?;
    Ok(QueueOrder { fair_by: FairBy::new(labels), position_kept })
}

/// Checks that a request has the same value of a label wherever it is granted.
fn check_fixed(field: &str, key: &str) -> Result<(), FieldError> {
    if [EM, EM_APPLICATION, QUEUE, NAMESPACE].contains(&key) {
        let problem = format!(
            "names {key:?}, which is open until the grant; name labels of the request, such as \"user\" or \"creator\""
        );
        return Err(FieldError::new(field, problem));
    }
    Ok(())
}

/// Parses the labels of the priority rule in `field`.
pub fn priority_pattern(field: &str, message: Option<&proto::Priority>) -> Result<LabelPattern, FieldError> {
    let message = message.ok_or_else(|| FieldError::new(field, "is required"))?;
    label_pattern(field, &message.labels, &message.each)
}

/// Parses the priority rule in `field`.
pub fn priority(field: &str, message: Option<&proto::Priority>) -> Result<PriorityRule, FieldError> {
    let pattern = priority_pattern(field, message)?;
    let (default, max) = message.map(|message| (message.default_priority, message.max_priority)).unwrap_or_default();
    let in_default = format!("{field}.default_priority");
    let (default, max) = (seconds(&in_default, default)?, seconds(&format!("{field}.max_priority"), max)?);
    if default > max {
        return Err(FieldError::new(in_default, format!("is {default}; must be at most max_priority, which is {max}")));
    }
    Ok(PriorityRule { pattern, default, max })
}

/// Parses the priority rule in `field` that a call sets, and checks its names.
pub fn new_priority(field: &str, message: Option<&proto::Priority>) -> Result<PriorityRule, FieldError> {
    let rule = priority(field, message)?;
    let in_labels = format!("{field}.labels");
    rule.pattern.keys().try_for_each(|key| check_fixed(&in_labels, key))?;
    check_new_pattern(field, &rule.pattern)?;
    Ok(rule)
}

/// Converts a priority rule to a message.
pub fn priority_message(rule: &PriorityRule) -> proto::Priority {
    let (labels, each) = label_parts(&rule.pattern);
    let (default_priority, max_priority) = (rule.default.into(), rule.max.into());
    proto::Priority { labels, each, default_priority, max_priority, name: rule.pattern.to_string() }
}

/// Parses the labels of the reclaim policy in `field`.
pub fn reclaim_pattern(field: &str, message: Option<&proto::ReclaimPolicy>) -> Result<LabelPattern, FieldError> {
    let message = message.ok_or_else(|| FieldError::new(field, "is required"))?;
    label_pattern(field, &message.labels, &message.each)
}

/// Parses the reclaim policy in `field`.
pub fn reclaim_policy(field: &str, message: Option<&proto::ReclaimPolicy>) -> Result<ReclaimPolicy, FieldError> {
    let message = message.ok_or_else(|| FieldError::new(field, "is required"))?;
    let in_mode = format!("{field}.mode");
    let mode = known::<proto::ReclaimMode>(&in_mode, message.mode)?.read();
    Ok(ReclaimPolicy {
        pattern: reclaim_pattern(field, Some(message))?,
        mode: mode.ok_or_else(|| FieldError::new(in_mode, "is required: off, observe, advise or stop"))?,
        idle_after: reclaim_time(&format!("{field}.idle_after"), message.idle_after, IDLE_AFTER)?,
        grace: reclaim_time(&format!("{field}.grace"), message.grace, GRACE)?,
        per_minute: per_minute(&format!("{field}.per_minute"), message.per_minute)?,
        busy: message.busy,
        min_life: reclaim_time(&format!("{field}.min_life"), message.min_life, MIN_LIFE)?,
    })
}

/// Parses the reclaim policy in `field` that a call sets, and checks its names.
pub fn new_reclaim_policy(field: &str, message: Option<&proto::ReclaimPolicy>) -> Result<ReclaimPolicy, FieldError> {
    let policy = reclaim_policy(field, message)?;
    check_new_pattern(field, &policy.pattern)?;
    Ok(policy)
}

/// Parses the time in `field` of a reclaim policy. Without one, or if it is 0, returns `default`.
fn reclaim_time(field: &str, time: Option<prost_types::Duration>, default: Duration) -> Result<Duration, FieldError> {
    let time = duration(field, time.unwrap_or_default())?;
    match time.is_zero() {
        true => Ok(default),
        false if (RECLAIM_TIME_MIN..=RECLAIM_TIME_MAX).contains(&time) => Ok(as_stored(time)),
        false => Err(FieldError::new(field, format!("is {time:?}; must be from 1 second to 1 day"))),
    }
}

/// Parses the number of tickets in `field` that a reclaim policy recalls within a minute.
fn per_minute(field: &str, number: i32) -> Result<u32, FieldError> {
    match u32::try_from(number) {
        Ok(0) => Ok(PER_MINUTE),
        Ok(number @ 1..=PER_MINUTE_MAX) => Ok(number),
        _ => Err(FieldError::new(field, format!("is {number}; must be from 1 to {PER_MINUTE_MAX}"))),
    }
}

/// Converts a reclaim policy to a message.
pub fn reclaim_policy_message(policy: &ReclaimPolicy) -> proto::ReclaimPolicy {
    let (labels, each) = label_parts(&policy.pattern);
    proto::ReclaimPolicy {
        labels,
        each,
        mode: proto::ReclaimMode::from(policy.mode).into(),
        idle_after: prost_types::Duration::try_from(policy.idle_after).ok(),
        grace: prost_types::Duration::try_from(policy.grace).ok(),
        per_minute: i32::try_from(policy.per_minute).unwrap_or(i32::MAX),
        name: policy.pattern.to_string(),
        busy: policy.busy,
        min_life: prost_types::Duration::try_from(policy.min_life).ok(),
    }
}

/// Returns the whole milliseconds of a time, which tables contain.
fn as_stored(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Parses the time in `field` for which positions of absent callers are kept.
fn position_kept(field: &str, time: Option<prost_types::Duration>) -> Result<Duration, FieldError> {
    let Some(time) = time else { return Ok(POSITION_KEPT) };
    let time = duration(field, time)?;
    if time.is_zero() || (POSITION_KEPT_MIN..=POSITION_KEPT_MAX).contains(&time) {
        return Ok(as_stored(time));
    }
    Err(FieldError::new(field, format!("is {time:?}; must be 0, or from 1 second to 1 hour")))
}

/// Parses the order in `field` that a call sets, and checks its names.
pub fn new_order(field: &str, message: Option<&proto::Order>) -> Result<QueueOrder, FieldError> {
    let order = order(field, message)?;
    order.fair_by.labels().try_for_each(|key| check_new(&format!("{field}.fair_by"), key))?;
    Ok(order)
}

/// Converts the order of waiting requests to a message.
pub fn order_message(order: &QueueOrder) -> proto::Order {
    proto::Order {
        fair_by: order.fair_by.labels().map(str::to_owned).collect(),
        position_kept: prost_types::Duration::try_from(order.position_kept).ok(),
    }
}

/// Returns all checks. They apply to kinds of EMs without a policy.
pub fn checks() -> Vec<i32> {
    Policy::default().checks().map(|kind| proto::Check::from(kind).into()).collect()
}

/// Converts a policy to a message.
pub fn policy_message(em_kind: &Name, policy: &Policy) -> proto::Policy {
    let checks = policy.checks().map(|kind| proto::Check::from(kind).into()).collect();
    proto::Policy {
        em_application_name: em_kind.to_string(),
        checks,
        required_labels: policy.required_labels().iter().cloned().collect(),
        placement: proto::Placement::from(policy.placement()).into(),
        em_new_after: prost_types::Duration::try_from(policy.em_new_after()).ok(),
    }
}

/// Converts a scope, its counters and its limits to a message.
pub fn scope_usage(scope: &ScopeUsage) -> proto::ScopeUsage {
    let amounts = |tally: &Tally| tally.amounts().map(|(dimension, amount)| (dimension.key(), amount)).collect();
    proto::ScopeUsage {
        labels: scope.scope.labels().clone(),
        used: amounts(&scope.usage.used),
        locked: amounts(&scope.usage.locked),
        limits: scope.rules.iter().map(|rule| limit(rule)).collect(),
        over_limit: scope.is_over(),
        fullness: scope.fullness(),
        version: scope.version,
    }
}

fn read_tally(field: &str, amounts: BTreeMap<String, i64>) -> Result<Tally, FieldError> {
    let entries = amounts.iter().map(|(key, held)| Ok((dimension(field, key)?, amount(field, key, *held)?)));
    Ok(Tally::new(entries.collect::<Result<Vec<_>, FieldError>>()?))
}

/// Checks the labels of scopes in `field`. A value may be empty.
pub fn scope_labels(field: &str, labels: &BTreeMap<String, String>) -> Result<(), FieldError> {
    check_at_most(field, labels.len(), "labels", LABELS_MAX)?;
    for (key, value) in labels {
        Name::parse(&format!("{field} (a key)"), key)?;
        check_text(&format!("{field}[{key:?}]"), value)?;
    }
    Ok(())
}

/// Parses the one scope that has exactly these labels.
pub fn scope(field: &str, labels: &BTreeMap<String, String>) -> Result<Scope, FieldError> {
    if labels.is_empty() {
        return Err(FieldError::new(field, "is required: all labels of the scope, with their values"));
    }
    scope_labels(field, labels)?;
    Ok(Scope::new(labels.clone()))
}

/// Converts a message of the service to a scope with its counters and limits.
pub fn read_scope_usage(message: proto::ScopeUsage) -> Result<ScopeUsage, FieldError> {
    let read = |(number, limit): (usize, &proto::Limit)| rule(&format!("limits[{number}]"), Some(limit)).map(Arc::new);
    let rules = message.limits.iter().enumerate().map(read).collect::<Result<_, _>>()?;
    Ok(ScopeUsage {
        scope: Scope::new(message.labels),
        rules,
        usage: ScopeHoldings { used: read_tally("used", message.used)?, locked: read_tally("locked", message.locked)? },
        version: message.version,
    })
}
