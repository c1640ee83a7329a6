//! Limits file: all limits of a cluster in TOML, for version control, and, if it has them, the order, the priorities and the reclaim
//! policies.
//!
//! ```toml
//! # At most 2 engines and 20 GB for hadoop through each creator, on all EMs together.
//! [[limit]]
//! labels = { user = "hadoop" }
//! each = ["creator"]
//! max = { instances = 2, memory = "20g", "special.gpu" = 1 }
//! # "advisory" counts a violation above the maximum; "off" counts only the use and needs no max.
//! mode = "advisory"
//!
//! # By what waiting requests take turns.
//! [order]
//! fair_by = ["user"]
//! position_kept = "1m"
//!
//! [[priority]]
//! labels = { creator = "IDE" }
//! default_priority = 30
//! max_priority = 60
//!
//! [[reclaim]]
//! each = ["user"]
//! mode = "observe"
//! idle_after = "5m"
//! grace = "30s"
//! per_minute = 60
//! ```
//!
//! A section that the file does not have stays as it is: `limit = []` deletes all limits.
//!
//! A file is accepted or rejected as a whole, and all its mistakes are reported. In a limit with TOML errors, only the
//! first one is reported, because the rest is ambiguous. Callers: the server at its start, and the `limit` commands. Submodule: `written`, the text of a
//! file.

use std::{collections::BTreeMap, ops::RangeInclusive};

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::config::parse_duration;
use rm_edge::convert::limit::{
    new_order, new_priority, new_reclaim_policy, order_message, priority_message, reclaim_policy_message,
};
use rm_model::{
    limit::{DIMENSIONS_MAX, LABELS_MAX, LabelPattern, LimitReplacement, Rule},
    limit_mode::LimitMode,
    name::{FieldError, Name},
    order::{QueueOrder, QueueRuleReplacement},
    priority::{PRIORITY_MAX, PRIORITY_RULES_MAX, Priorities, PriorityRule},
    reclaim::{PER_MINUTE_MAX, RECLAIM_POLICIES_MAX, ReclaimMode, ReclaimPolicies, ReclaimPolicy},
    resource::{Dimension, parse_size},
};
use rm_proto::v1 as proto;

mod written;

pub use written::text;

/// All mistakes in a limits file: line number from 1, and text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(|(line, text)| format!("line {line}: {text}")).collect::<Vec<_>>().join("\n"))]
pub struct LimitsFileError(pub Vec<(usize, String)>);

/// Parses the limits of a file, in their order. A file without any section is valid.
///
/// # Errors
/// All mistakes: TOML errors, invalid limits, and duplicate label patterns.
pub fn parse(text: &str) -> Result<LimitReplacement, LimitsFileError> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
    let mut reader = LimitsReader { starts, unreadable: BTreeMap::new(), mistakes: Vec::new() };
    for error in errors {
        let line = reader.line(error.span().map_or(0, |span| span.start));
        reader.unreadable.entry(line).or_insert_with(|| format!("not TOML: {}", error.message()));
    }
    let new = reader.replacement(document.get_ref());
    reader.mistakes.sort_by_key(|(line, _)| *line);
    if reader.mistakes.is_empty() { Ok(new) } else { Err(LimitsFileError(reader.mistakes)) }
}

/// A TOML value with its position.
type SpannedValue<'t> = Spanned<DeValue<'t>>;

type AmountsByDimension = BTreeMap<Dimension, i64>;

/// Sections of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Section {
    Limit,
    Order,
    Priority,
    Reclaim,
}

impl Section {
    const ALL: [Self; 4] = [Self::Limit, Self::Order, Self::Priority, Self::Reclaim];

    /// Returns the key of the section.
    fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Order => "order",
            Self::Priority => "priority",
            Self::Reclaim => "reclaim",
        }
    }

    /// Returns the keys of its tables, for mistakes.
    fn keys(self) -> &'static str {
        match self {
            Self::Limit => "labels, each, mode, max and guarantee",
            Self::Order => "fair_by and position_kept",
            Self::Priority => "labels, each, default_priority and max_priority",
            Self::Reclaim => "labels, each, mode, idle_after, grace, per_minute, busy and min_life",
        }
    }
}

/// A table of a section.
struct SectionTable<'d, 't> {
    section: Section,
    value: &'d SpannedValue<'t>,
}

/// Parser that collects mistakes. Its methods return `None` after a mistake.
struct LimitsReader {
    /// Offset of each line.
    starts: Vec<usize>,
    /// Lines with TOML errors, and their texts.
    unreadable: BTreeMap<usize, String>,
    /// Line number and text.
    mistakes: Vec<(usize, String)>,
}

impl LimitsReader {
    fn line(&self, at: usize) -> usize {
        self.starts.partition_point(|start| *start <= at)
    }

    fn wrong(&mut self, at: usize, field: &str, problem: impl Into<String>) {
        let line = self.line(at);
        if !self.unreadable.contains_key(&line) {
            self.mistakes.push((line, FieldError::new(field, problem).to_string()));
        }
    }

    fn replacement(&mut self, document: &DeTable<'_>) -> LimitReplacement {
        let tables = self.tables(document);
        let (mut rules, mut firsts) = (Vec::new(), BTreeMap::new());
        let (mut order, mut priorities, mut reclaim) = (None, Vec::new(), Vec::new());
        self.is_readable(0, tables.first());
        for (number, SectionTable { section, value }) in tables.iter().enumerate() {
            let (at, name) = (value.span().start, section.name());
            let readable = self.is_readable(at, tables.get(number + 1)).then_some(value);
            let table = readable.and_then(|value| self.typed(name, value, "a table", DeValue::as_table));
            let Some(table) = table else { continue };
            let pattern = match section {
                Section::Limit => {
                    let (pattern, rule) = self.limit(at, table);
                    rules.extend(rule);
                    pattern
                }
                Section::Order => {
                    order = Some(self.order(table));
                    None
                }
                Section::Priority => {
                    let (pattern, rule) = self.priority(at, table);
                    priorities.extend(rule);
                    pattern
                }
                Section::Reclaim => {
                    let (pattern, policy) = self.reclaim(at, table);
                    reclaim.extend(policy);
                    pattern
                }
            };
            let Some(pattern) = pattern else { continue };
            let first = *firsts.entry((*section, pattern.clone())).or_insert(at);
            if first != at {
                let problem = format!("has the same labels as the one in line {} ({pattern})", self.line(first));
                self.wrong(at, name, problem);
            }
        }
        let has = |section: Section| document.keys().any(|key| key.get_ref() == section.name());
        let queue = QueueRuleReplacement {
            order,
            priorities: has(Section::Priority).then(|| Priorities::new(priorities)),
            reclaim: has(Section::Reclaim).then(|| ReclaimPolicies::new(reclaim)),
        };
        LimitReplacement { rules: has(Section::Limit).then_some(rules), queue }
    }

    /// Returns whether the text from here to the next table is valid TOML; records a mistake otherwise.
    fn is_readable(&mut self, start: usize, next: Option<&SectionTable<'_, '_>>) -> bool {
        let end = next.map_or(usize::MAX, |next| self.line(next.value.span().start));
        let first = self.unreadable.range(self.line(start)..).next().filter(|(line, _)| **line < end);
        self.mistakes.extend(first.map(|(line, text)| (*line, text.clone())));
        first.is_none()
    }

    fn tables<'d, 't>(&mut self, document: &'d DeTable<'t>) -> Vec<SectionTable<'d, 't>> {
        let mut tables = Vec::new();
        for (key, value) in document {
            let Some(section) = Section::ALL.into_iter().find(|section| key.get_ref() == section.name()) else {
                let known = "known are [[limit]], [order], [[priority]] and [[reclaim]]";
                self.wrong(key.span().start, "file", format!("has the unknown key {:?}; {known}", key.get_ref()));
                continue;
            };
            if section == Section::Order {
                tables.push(SectionTable { section, value });
                continue;
            }
            let wanted = format!("written as [[{}]]", section.name());
            let array = self.typed(section.name(), value, &wanted, DeValue::as_array);
            let max = match section {
                Section::Priority => PRIORITY_RULES_MAX,
                Section::Reclaim => RECLAIM_POLICIES_MAX,
                Section::Limit | Section::Order => usize::MAX,
            };
            if let Some(count) = array.map(|array| array.len()).filter(|count| *count > max) {
                self.wrong(
                    key.span().start,
                    section.name(),
                    format!("occurs {count} times; at most {max} are allowed"),
                );
            }
            tables.extend(array.into_iter().flatten().map(|value| SectionTable { section, value }));
        }
        tables.sort_by_key(|table| table.value.span().start);
        tables
    }

    /// Reads the labels of a table. `other` reads the value of another key; it returns false if the key is unknown.
    fn labelled<'d, 't>(
        &mut self,
        (at, section): (usize, Section),
        table: &'d DeTable<'t>,
        mut other: impl FnMut(&mut Self, &str, &'d SpannedValue<'t>) -> bool,
    ) -> Option<LabelPattern> {
        let (mut labels, mut each) = (Some((at, None)), Some(None));
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "labels" => {
                    let read = self.typed("labels", value, "a table", DeValue::as_table);
                    labels = read.map(|table| (value.span().start, Some(table)));
                }
                "each" => each = self.typed("each", value, "an array such as [\"user\"]", DeValue::as_array).map(Some),
                name if other(self, name, value) => {}
                name => {
                    let is_section = Section::ALL.into_iter().any(|section| section.name() == name);
                    let advice = if is_section { "; a section without tables precedes the first table" } else { "" };
                    let problem = format!("has the unknown key {name:?}; known are {}{advice}", section.keys());
                    self.wrong(key.span().start, section.name(), problem);
                }
            }
        }
        labels.zip(each).and_then(|((at, labels), each)| self.pattern(at, labels, each))
    }

    /// Reads a limit. Returns its labels also if the rest is wrong.
    fn limit(&mut self, at: usize, limit: &DeTable<'_>) -> (Option<LabelPattern>, Option<Rule>) {
        let (mut mode, mut max, mut guarantee) = (Some(LimitMode::Enforced), Some((at, None)), Some((at, None)));
        let pattern = self.labelled((at, Section::Limit), limit, |reader, key, value| {
            match key {
                "mode" => mode = reader.mode(value),
                "max" => {
                    let read = reader.typed("max", value, "a table", DeValue::as_table);
                    max = read.map(|table| (value.span().start, Some(table)));
                }
                "guarantee" => {
                    let read = reader.typed("guarantee", value, "a table", DeValue::as_table);
                    guarantee = read.map(|table| (value.span().start, Some(table)));
                }
                _ => return false,
            }
            true
        });
        let needs_max = mode != Some(LimitMode::Off);
        let max = max.and_then(|(at, max)| self.amounts(at, "max", max, needs_max));
        let guarantee = guarantee.and_then(|(at, guarantee)| self.amounts(at, "guarantee", guarantee, false));
        let rule = pattern.clone().zip(mode).zip(max).zip(guarantee);
        let rule = rule.map(|(((pattern, mode), max), guarantee)| Rule { pattern, mode, max, guarantee });
        if let Some(Err(uncounted)) = rule.as_ref().map(Rule::check_labels) {
            self.wrong(at, "max", uncounted.to_string());
        }
        if let Some(Err(wrong)) = rule.as_ref().map(Rule::check_guarantee) {
            self.wrong(at, "guarantee", wrong.to_string());
        }
        (pattern, rule)
    }

    fn order(&mut self, order: &DeTable<'_>) -> QueueOrder {
        let mut read = QueueOrder::default();
        for (key, value) in order {
            let mut message = order_message(&read);
            match key.get_ref().as_ref() {
                "fair_by" => {
                    let array = self.typed("fair_by", value, "an array such as [\"user\"]", DeValue::as_array);
                    let labels = array.into_iter().flatten().map(|label| self.string("fair_by", label));
                    message.fair_by = labels.flatten().collect();
                }
                "position_kept" => {
                    let kept = self.time("position_kept", value, ["0s", "1h"]);
                    message.position_kept = kept.or(message.position_kept);
                }
                name => {
                    let problem = format!("has the unknown key {name:?}; known are {}", Section::Order.keys());
                    self.wrong(key.span().start, "order", problem);
                }
            }
            read = self.checked(value.span().start, new_order("order", Some(&message))).unwrap_or(read);
        }
        read
    }

    /// Reads a priority rule. Returns its labels also if the rest is wrong.
    fn priority(&mut self, at: usize, priority: &DeTable<'_>) -> (Option<LabelPattern>, Option<PriorityRule>) {
        let allowed = i64::from(-PRIORITY_MAX)..=i64::from(PRIORITY_MAX);
        let (mut default, mut max) = (Some(0), Some(0));
        let pattern = self.labelled((at, Section::Priority), priority, |reader, key, value| {
            match key {
                "default_priority" => default = reader.whole(key, value, allowed.clone()),
                "max_priority" => max = reader.whole(key, value, allowed.clone()),
                _ => return false,
            }
            true
        });
        let rule = pattern.clone().zip(default).zip(max).and_then(|((pattern, default_priority), max_priority)| {
            let message = priority_message(&PriorityRule { pattern, default: 0, max: 0 });
            let message = proto::Priority { default_priority, max_priority, ..message };
            self.checked(at, new_priority("priority", Some(&message)))
        });
        (pattern, rule)
    }

    /// Reads a reclaim policy. Returns its labels also if the rest is wrong.
    fn reclaim(&mut self, at: usize, policy: &DeTable<'_>) -> (Option<LabelPattern>, Option<ReclaimPolicy>) {
        let times = ["1s", "1d"];
        let (mut mode, mut idle_after, mut grace, mut per_minute) = (None, Some(None), Some(None), Some(0));
        let (mut busy, mut min_life) = (Some(false), Some(None));
        let pattern = self.labelled((at, Section::Reclaim), policy, |reader, key, value| {
            match key {
                "mode" => mode = Some(reader.reclaim_mode(value)),
                "idle_after" => idle_after = reader.time(key, value, times).map(Some),
                "grace" => grace = reader.time(key, value, times).map(Some),
                "per_minute" => per_minute = reader.whole(key, value, 1..=i64::from(PER_MINUTE_MAX)),
                "busy" => busy = reader.typed(key, value, "true or false", boolean).copied(),
                "min_life" => min_life = reader.time(key, value, times).map(Some),
                _ => return false,
            }
            true
        });
        if mode.is_none() {
            self.wrong(at, "mode", "is required: off, observe, advise or stop");
        }
        let parts =
            pattern.clone().zip(mode.flatten()).zip(idle_after.zip(grace)).zip(per_minute).zip(busy.zip(min_life));
        let policy = parts.and_then(|((((pattern, mode), (idle_after, grace)), per_minute), (busy, min_life))| {
            let message = reclaim_policy_message(&ReclaimPolicy::new(pattern, mode));
            let message = proto::ReclaimPolicy { idle_after, grace, per_minute, busy, min_life, ..message };
            self.checked(at, new_reclaim_policy("reclaim", Some(&message)))
        });
        (pattern, policy)
    }

    /// Returns a checked value, or records its mistake in the table at `at`.
    fn checked<T>(&mut self, at: usize, value: Result<T, FieldError>) -> Option<T> {
        value.map_err(|error| self.wrong(at, &error.field, error.problem)).ok()
    }

    fn whole(&mut self, field: &str, value: &SpannedValue<'_>, allowed: RangeInclusive<i64>) -> Option<i32> {
        let number = self.typed(field, value, "a whole number", DeValue::as_integer)?;
        let parsed = i64::from_str_radix(number.as_str(), number.radix()).ok();
        let parsed = parsed.filter(|number| allowed.contains(number)).and_then(|number| i32::try_from(number).ok());
        if parsed.is_none() {
            let problem = format!("is {number}; must be from {} to {}", allowed.start(), allowed.end());
            self.wrong(value.span().start, field, problem);
        }
        parsed
    }

    fn time(
        &mut self,
        field: &str,
        value: &SpannedValue<'_>,
        [least, most]: [&str; 2],
    ) -> Option<prost_types::Duration> {
        let text = self.typed(field, value, "a string such as \"30s\"", DeValue::as_str)?;
        match parse_duration(field, text, least, most) {
            Ok(time) => prost_types::Duration::try_from(time).ok(),
            Err(mistake) => {
                let problem = mistake.strip_prefix(&format!("{field}: ")).unwrap_or(&mistake).to_owned();
                self.wrong(value.span().start, field, problem);
                None
            }
        }
    }

    fn reclaim_mode(&mut self, value: &SpannedValue<'_>) -> Option<ReclaimMode> {
        let mode = self.typed("mode", value, "a string", DeValue::as_str)?;
        let known = ReclaimMode::ALL.into_iter().find(|known| reclaim_mode_name(*known) == mode);
        if known.is_none() {
            let problem = format!("is {mode:?}; must be \"off\", \"observe\", \"advise\" or \"stop\"");
            self.wrong(value.span().start, "mode", problem);
        }
        known
    }

    fn mode(&mut self, value: &SpannedValue<'_>) -> Option<LimitMode> {
        let mode = self.typed("mode", value, "a string", DeValue::as_str)?;
        let known = LimitMode::parse(mode);
        if known.is_none() {
            let problem = format!("is {mode:?}; must be \"enforced\", \"advisory\" or \"off\"");
            self.wrong(value.span().start, "mode", problem);
        }
        known
    }

    fn pattern(&mut self, at: usize, labels: Option<&DeTable<'_>>, each: Option<&DeArray<'_>>) -> Option<LabelPattern> {
        let count = labels.map_or(0, DeTable::len) + each.map_or(0, |each| each.len());
        if count == 0 || count > LABELS_MAX {
            self.wrong(at, "labels", format!("names {count} labels (with each); must name 1 to {LABELS_MAX}"));
            return None;
        }
        let mut pattern = BTreeMap::new();
        for (key, value) in labels.into_iter().flatten() {
            let name = self.name(key.span().start, "labels (a key)", key.get_ref());
            let value = self.string(&format!("labels[{:?}]", key.get_ref()), value);
            pattern.extend(name.zip(value.map(Some)));
        }
        for element in each.into_iter().flatten() {
            if let Some(key) = self.string("each", element) {
                if labels.is_some_and(|labels| labels.contains_key(key.as_str())) || pattern.contains_key(&key) {
                    self.wrong(element.span().start, "each", format!("names {key:?} a second time"));
                }
                pattern.entry(key).or_insert(None);
            }
        }
        (pattern.len() == count).then(|| LabelPattern::new(pattern))
    }

    fn amounts(
        &mut self,
        at: usize,
        field: &str,
        amounts: Option<&DeTable<'_>>,
        needed: bool,
    ) -> Option<AmountsByDimension> {
        let count = amounts.map_or(0, DeTable::len);
        if (count == 0 && needed) || count > DIMENSIONS_MAX {
            self.wrong(at, field, format!("names {count} dimensions; must name 1 to {DIMENSIONS_MAX}"));
            return None;
        }
        let mut read = AmountsByDimension::new();
        for (key, value) in amounts.into_iter().flatten() {
            read.extend(self.dimension(key.span().start, field, key.get_ref(), value));
        }
        (read.len() == count).then_some(read)
    }

    fn dimension(&mut self, at: usize, field: &str, key: &str, value: &SpannedValue<'_>) -> Option<(Dimension, i64)> {
        let Some(dimension) = Dimension::parse_key(key) else {
            let problem = format!(
                "has the unknown dimension {key:?}; known are memory, cores, instances, queue_memory, queue_cores, \
                 queue_instances, kubernetes_memory, kubernetes_millicores, waiting, and custom ones as \"special.NAME\", in quotes"
            );
            self.wrong(at, field, problem);
            return None;
        };
        let name = self.name(at, &format!("{field} (a key)"), dimension.name());
        let amount = amount(&dimension, value.get_ref());
        let amount = amount.map_err(|problem| self.wrong(value.span().start, &format!("{field}[{key:?}]"), problem));
        name.and(Some((dimension, amount.ok()?)))
    }

    fn string(&mut self, field: &str, value: &SpannedValue<'_>) -> Option<String> {
        let text = self.typed(field, value, "a string", DeValue::as_str)?;
        self.name(value.span().start, field, text)
    }

    fn name(&mut self, at: usize, field: &str, text: &str) -> Option<String> {
        let name = Name::parse_new(field, text).map_err(|error| self.wrong(at, field, error.problem));
        name.ok().map(|name| name.to_string())
    }

    fn typed<'d, 't, T: ?Sized>(
        &mut self,
        field: &str,
        value: &'d SpannedValue<'t>,
        wanted: &str,
        read: impl FnOnce(&'d DeValue<'t>) -> Option<&'d T>,
    ) -> Option<&'d T> {
        let typed = read(value.get_ref());
        if typed.is_none() {
            let problem = format!("must be {wanted}; is of the type {}", value.get_ref().type_str());
            self.wrong(value.span().start, field, problem);
        }
        typed
    }
}

fn amount(dimension: &Dimension, value: &DeValue<'_>) -> Result<i64, String> {
    let is_size = dimension.is_size();
    match value {
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(amount) if amount >= 0 => Ok(amount),
            _ if number.as_str().starts_with('-') => Err(format!("is {number}; must not be negative")),
            _ => Err(format!("is {number}; at most {} is possible", i64::MAX)),
        },
        DeValue::String(size) if is_size => parse_size(size).map_err(|error| error.to_string()),
        other => {
            let wanted = if is_size { "whole bytes or a size such as \"20g\"" } else { "a whole number" };
            Err(format!("must be {wanted}; is of the type {}", other.type_str()))
        }
    }
}

fn boolean<'a>(value: &'a DeValue<'_>) -> Option<&'a bool> {
    if let DeValue::Boolean(value) = value { Some(value) } else { None }
}

fn reclaim_mode_name(mode: ReclaimMode) -> String {
    mode.as_str().to_lowercase()
}

#[cfg(test)]
mod tests;
