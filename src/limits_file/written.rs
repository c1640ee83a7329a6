//! Text of a limits file.
//!
//! Caller: `limit export`.

use std::{collections::BTreeMap, time::Duration};

use crate::commands::is_harmful;
use rm_model::{
    limit::{LabelPattern, LimitReplacement, Rule},
    limit_mode::LimitMode,
    order::{QueueOrder, QueueRuleReplacement},
    priority::{Priorities, PriorityRule},
    reclaim::{ReclaimPolicies, ReclaimPolicy},
    resource::Dimension,
};

use super::{Section, reclaim_mode_name};

/// Returns limits and rules as a file that [`super::parse`] reads as the same ones.
pub fn text(new: &LimitReplacement) -> String {
    let LimitReplacement { rules, queue: QueueRuleReplacement { order, priorities, reclaim } } = new;
    let mut text = String::new();
    // A list without elements precedes the tables.
    let is_empty = |section: Section, is_empty: bool| {
        if is_empty { format!("{} = []\n", section.name()) } else { String::new() }
    };
    text += &is_empty(Section::Limit, rules.as_ref().is_some_and(Vec::is_empty));
    text += &is_empty(Section::Priority, priorities.as_ref().is_some_and(|rules| rules.rules().is_empty()));
    text += &is_empty(Section::Reclaim, reclaim.as_ref().is_some_and(|rules| rules.rules().is_empty()));
    if let Some(QueueOrder { fair_by, position_kept }) = order {
        let labels = fair_by.labels().map(quoted).collect::<Vec<_>>().join(", ");
        text += &format!("[order]\nfair_by = [{labels}]\nposition_kept = {}\n", written(*position_kept));
    }
    for Rule { pattern, max, mode, guarantee } in rules.iter().flatten() {
        text += &header(Section::Limit, pattern);
        text += &amounts("max", max);
        text += &amounts("guarantee", guarantee);
        text += &line(format!("mode = \"{}\"", mode.as_str()), *mode != LimitMode::Enforced);
    }
    for PriorityRule { pattern, default, max } in priorities.iter().flat_map(Priorities::rules) {
        text += &header(Section::Priority, pattern);
        text += &format!("default_priority = {default}\nmax_priority = {max}\n");
    }
    for policy in reclaim.iter().flat_map(ReclaimPolicies::rules) {
        let ReclaimPolicy { pattern, mode, idle_after, grace, per_minute, busy, min_life } = policy;
        text += &header(Section::Reclaim, pattern);
        text += &format!("mode = \"{}\"\nidle_after = {}\n", reclaim_mode_name(*mode), written(*idle_after));
        text += &format!("grace = {}\nper_minute = {per_minute}\n", written(*grace));
        text += &format!("busy = {busy}\nmin_life = {}\n", written(*min_life));
    }
    text
}

/// Returns a line with amounts; nothing if there are none.
fn amounts(key: &str, amounts: &BTreeMap<Dimension, i64>) -> String {
    let written = amounts
        .iter()
        .map(|(dimension, amount)| format!("{} = {}", quoted(&dimension.key()), exact(dimension, *amount)));
    let written = written.collect::<Vec<_>>().join(", ");
    line(format!("{key} = {{ {written} }}"), !written.is_empty())
}

fn line(line: String, is_needed: bool) -> String {
    if is_needed { line + "\n" } else { String::new() }
}

/// Returns the beginning of a table with labels.
fn header(section: Section, pattern: &LabelPattern) -> String {
    let labels = pattern.labels().iter();
    let fixed = labels.filter_map(|(key, value)| Some(format!("{} = {}", quoted(key), quoted(value.as_ref()?))));
    let fixed = fixed.collect::<Vec<_>>().join(", ");
    let each = pattern.labels().iter().filter(|(_, value)| value.is_none()).map(|(key, _)| quoted(key));
    let each = each.collect::<Vec<_>>().join(", ");
    let fixed = line(format!("labels = {{ {fixed} }}"), !fixed.is_empty());
    format!("[[{}]]\n{fixed}{}", section.name(), line(format!("each = [{each}]"), !each.is_empty()))
}

fn written(time: Duration) -> String {
    format!("\"{}\"", humantime::format_duration(time))
}

/// Returns a key or a text in quotes.
fn quoted(text: &str) -> String {
    let escaped: String = text
        .chars()
        .map(|c| match c {
            '"' | '\\' => format!("\\{c}"),
            c if is_harmful(c) => format!("\\U{:08X}", u32::from(c)),
            c => c.to_string(),
        })
        .collect();
    format!("\"{escaped}\"")
}

/// Returns an amount without rounding; a size of whole units with its unit.
fn exact(dimension: &Dimension, amount: i64) -> String {
    let units = [(40, "t"), (30, "g"), (20, "m"), (10, "k")];
    let unit = units.into_iter().find(|(bits, _)| amount > 0 && amount % (1 << bits) == 0);
    match unit.filter(|_| dimension.is_size()) {
        Some((bits, unit)) => format!("\"{}{unit}\"", amount >> bits),
        None => amount.to_string(),
    }
}
