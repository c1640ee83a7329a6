//! Limits file: all limits of a cluster in TOML, for version control.
//!
//! ```toml
//! # At most 2 engines and 20 GB for hadoop through each creator, on all EMs together.
//! [[limit]]
//! labels = { user = "hadoop" }
//! each = ["creator"]
//! max = { instances = 2, memory = "20g", "special.gpu" = 1 }
//! # "advisory" counts a violation above the maximum; "off" counts only the use and needs no max.
//! mode = "advisory"
//! ```
//!
//! A file is accepted or rejected as a whole, and all its mistakes are reported. In a limit with TOML errors, only the
//! first one is reported, because the rest is ambiguous. Callers: the server at its start, and the `limits` commands.

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::commands::is_harmful;
use rm_model::{
    limit::{DIMENSIONS_MAX, LABELS_MAX, LabelPattern, Rule},
    limit_mode::LimitMode,
    name::{FieldError, Name},
    resource::{Dimension, parse_size},
};

/// All mistakes in a limits file: line number from 1, and text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(|(line, text)| format!("line {line}: {text}")).collect::<Vec<_>>().join("\n"))]
pub struct LimitsFileError(pub Vec<(usize, String)>);

/// Parses the limits of a file, in their order. A file without limits is valid.
///
/// # Errors
/// All mistakes: TOML errors, invalid limits, and duplicate label patterns.
pub fn parse(text: &str) -> Result<Vec<Rule>, LimitsFileError> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
    let mut reader = LimitsReader { starts, unreadable: BTreeMap::new(), mistakes: Vec::new() };
    for error in errors {
        let line = reader.line(error.span().map_or(0, |span| span.start));
        reader.unreadable.entry(line).or_insert_with(|| format!("not TOML: {}", error.message()));
    }
    let rules = reader.rules(document.get_ref());
    reader.mistakes.sort_by_key(|(line, _)| *line);
    if reader.mistakes.is_empty() { Ok(rules) } else { Err(LimitsFileError(reader.mistakes)) }
}

/// A TOML value with its position.
type SpannedValue<'t> = Spanned<DeValue<'t>>;

type Maxima = BTreeMap<Dimension, i64>;

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

    fn rules(&mut self, document: &DeTable<'_>) -> Vec<Rule> {
        let limits = self.limits(document);
        let (mut rules, mut firsts) = (Vec::new(), BTreeMap::new());
        self.is_readable(0, limits.first());
        for (number, limit) in limits.iter().enumerate() {
            let at = limit.span().start;
            let readable = self.is_readable(at, limits.get(number + 1)).then_some(limit);
            let table = readable.and_then(|limit| self.typed("limit", limit, "a table", DeValue::as_table));
            let Some(table) = table else { continue };
            let (pattern, mode, max) = self.limit(at, table);
            if let Some(pattern) = &pattern {
                let first = *firsts.entry(pattern.clone()).or_insert(at);
                if first != at {
                    let problem = format!("has the same labels as the one in line {} ({pattern})", self.line(first));
                    self.wrong(at, "limit", problem);
                }
            }
            let rule = pattern.zip(mode).zip(max);
            let rule = rule.map(|((pattern, mode), max)| Rule { pattern, mode, max });
            if let Some(Err(uncounted)) = rule.as_ref().map(Rule::check_labels) {
                self.wrong(at, "max", uncounted.to_string());
            }
            rules.extend(rule);
        }
        rules
    }

    /// Returns whether the text from here to the next limit is valid TOML; records a mistake otherwise.
    fn is_readable(&mut self, start: usize, next: Option<&&SpannedValue<'_>>) -> bool {
        let end = next.map_or(usize::MAX, |next| self.line(next.span().start));
        let first = self.unreadable.range(self.line(start)..).next().filter(|(line, _)| **line < end);
        self.mistakes.extend(first.map(|(line, text)| (*line, text.clone())));
        first.is_none()
    }

    fn limits<'d, 't>(&mut self, document: &'d DeTable<'t>) -> Vec<&'d SpannedValue<'t>> {
        let mut limits = Vec::new();
        for (key, value) in document {
            if key.get_ref() == "limit" {
                let array = self.typed("limit", value, "written as [[limit]]", DeValue::as_array);
                limits.extend(array.into_iter().flatten());
            } else {
                let problem = format!("has the unknown key {:?}; known is [[limit]]", key.get_ref());
                self.wrong(key.span().start, "file", problem);
            }
        }
        limits.sort_by_key(|limit| limit.span().start);
        limits
    }

    fn limit(&mut self, at: usize, limit: &DeTable<'_>) -> (Option<LabelPattern>, Option<LimitMode>, Option<Maxima>) {
        let (mut labels, mut each, mut max) = (Some((at, None)), Some(None), Some((at, None)));
        let mut mode = Some(LimitMode::Enforced);
        for (key, value) in limit {
            let at = value.span().start;
            let mut table = |field| Some((at, Some(self.typed(field, value, "a table", DeValue::as_table)?)));
            match key.get_ref().as_ref() {
                "labels" => labels = table("labels"),
                "max" => max = table("max"),
                "each" => each = self.typed("each", value, "an array", DeValue::as_array).map(Some),
                "mode" => mode = self.mode(value),
                other => {
                    let problem = format!("has the unknown key {other:?}; known are labels, each, mode and max");
                    self.wrong(key.span().start, "limit", problem);
                }
            }
        }
        let pattern = labels.zip(each).and_then(|((at, labels), each)| self.pattern(at, labels, each));
        let needs_max = mode != Some(LimitMode::Off);
        (pattern, mode, max.and_then(|(at, max)| self.max(at, max, needs_max)))
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

    fn max(&mut self, at: usize, max: Option<&DeTable<'_>>, needed: bool) -> Option<Maxima> {
        let count = max.map_or(0, DeTable::len);
        if (count == 0 && needed) || count > DIMENSIONS_MAX {
            self.wrong(at, "max", format!("names {count} dimensions; must name 1 to {DIMENSIONS_MAX}"));
            return None;
        }
        let mut amounts = BTreeMap::new();
        for (key, value) in max.into_iter().flatten() {
            amounts.extend(self.dimension(key.span().start, key.get_ref(), value));
        }
        (amounts.len() == count).then_some(amounts)
    }

    fn dimension(&mut self, at: usize, key: &str, value: &SpannedValue<'_>) -> Option<(Dimension, i64)> {
        let Some(dimension) = Dimension::parse_key(key) else {
            let problem = format!(
                "has the unknown dimension {key:?}; known are memory, cores, instances, queue_memory, queue_cores, \
                 queue_instances, kubernetes_memory, kubernetes_millicores, waiting, and custom ones as \"special.NAME\", in quotes"
            );
            self.wrong(at, "max", problem);
            return None;
        };
        let name = self.name(at, "max (a key)", dimension.name());
        let amount = amount(&dimension, value.get_ref());
        let amount = amount.map_err(|problem| self.wrong(value.span().start, &format!("max[{key:?}]"), problem));
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

/// Returns limits as a file that [`parse`] reads as the same limits.
pub fn text(rules: &[Rule]) -> String {
    let mut text = String::new();
    for rule in rules {
        let labels = rule.pattern.labels();
        let fixed =
            labels.iter().filter_map(|(key, value)| Some(format!("{} = {}", quoted(key), quoted(value.as_ref()?))));
        let fixed = fixed.collect::<Vec<_>>().join(", ");
        let each = labels.iter().filter(|(_, value)| value.is_none()).map(|(key, _)| quoted(key));
        let each = each.collect::<Vec<_>>().join(", ");
        let max = rule
            .max
            .iter()
            .map(|(dimension, amount)| format!("{} = {}", quoted(&dimension.key()), exact(dimension, *amount)));
        let max = max.collect::<Vec<_>>().join(", ");
        let line = |line: String, is_needed: bool| if is_needed { line + "\n" } else { String::new() };
        text.extend([
            "[[limit]]\n".to_owned(),
            line(format!("labels = {{ {fixed} }}"), !fixed.is_empty()),
            line(format!("each = [{each}]"), !each.is_empty()),
            line(format!("max = {{ {max} }}"), !max.is_empty()),
            line(format!("mode = \"{}\"", rule.mode.as_str()), rule.mode != LimitMode::Enforced),
        ]);
    }
    text
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn limits_file_is_parsed() {
        let text = "# Each.\n[[limit]]\neach = ['user']\nmax = { instances = 10, \"special.gpu\" = 0 }\n[[limit]]\n\
            max.memory = '1k'\nmax.cores = 0x10\n[limit.labels]\nuser = 'hadoop'\ncreator = 'IDE'\n[[limit]]\neach = ['creator']\nmode = 'off'\n";
        let rules = parse(text).unwrap().into_iter();
        let shown: Vec<_> =
            rules.map(|rule| format!("{} {} {:?}", rule.pattern, rule.mode.as_str(), rule.max)).collect();
        assert_eq!(shown[0], "each user enforced {Instances: 10, Custom(\"gpu\"): 0}");
        assert_eq!(shown[1..], ["creator=IDE,user=hadoop enforced {Memory: 1024, Cores: 16}", "each creator off {}"]);
        assert_eq!(parse("# No limits.\n"), Ok(Vec::new()));
    }

    #[test]
    fn limits_are_read_as_written() {
        let lines = "[[limit]]\nlabels = { \"team\" = \"a \\\"b\\\" \\\\\" }\neach = [\"creator\", \"user\"]\n\
            max = { \"memory\" = \"20g\", \"cores\" = 4096, \"special.gpu\" = 0 }\nmode = \"advisory\"\n\
            [[limit]]\neach = [\"user\"]\nmax = { \"memory\" = 1025 }\n[[limit]]\neach = [\"creator\"]\nmode = \"off\"\n";
        let rules = parse(lines).unwrap();
        assert_eq!(text(&rules), lines);
        assert_eq!(parse(&text(&rules)).unwrap(), rules);
    }

    #[test]
    fn mistakes_are_reported_with_their_lines() {
        let long = format!("'{}' = 'x',", "x".repeat(256));
        let lines = [
            ("limits = 1", "file: has the unknown key \"limits\"; known is [[limit]]"),
            ("[[limit]]", "labels: names 0 labels (with each); must name 1 to 8"),
            ("maximum = 1", "limit: has the unknown key \"maximum\"; known are labels, each, mode and max"),
            ("max = {}", "max: names 0 dimensions; must name 1 to 64"),
            ("[[limit]]", ""),
            ("labels = { user = 'u', a = 1,", "labels[\"a\"]: must be a string; is of the type integer"),
            (&long, "labels (a key): has 256 characters; at most 255 are allowed"),
            ("b = '' }", "labels[\"b\"]: must not be empty"),
            ("each = ['user']", "each: names \"user\" a second time"),
            ("max = { cpus = 1,", "max: has the unknown dimension \"cpus\"; known are memory,"),
            ("instances = -1,", "max[\"instances\"]: is -1; must not be negative"),
            ("queue_cores = 9223372036854775808,", "max[\"queue_cores\"]: is 9223372036854775808; at most"),
            ("cores = '2g',", "max[\"cores\"]: must be a whole number; is of the type string"),
            ("queue_memory = 1.5,", "max[\"queue_memory\"]: must be whole bytes or a size"),
            ("memory = '20x' }", "max[\"memory\"]: `20x` is not a size"),
            ("[[limit]]", ""),
            ("max = { memory = 20g, cpus = 1 }", "not TOML: string values must be quoted"),
            ("[[limit]]", ""),
            ("max.cores = 1", ""),
            ("each = ['user']", ""),
            ("[[limit]]", "limit: has the same labels as the one in line 18 (each user)"),
            ("each = ['user']", ""),
            ("max = 7", "max: must be a table; is of the type integer"),
            ("[[limit]]", "max: names 0 dimensions; must name 1 to 64"),
            ("each = 'user'", "each: must be an array; is of the type string"),
            ("[[limit]]", "max: names \"queue_cores\", which each queue has of its own: add the label \"queue\","),
            ("labels = { namespace = 'n' }", ""),
            ("max = { cores = 1, queue_cores = 1 }", ""),
            ("[[limit]]", ""),
            ("labels = { queue = 'q' }", ""),
            ("max = { cores = 1, queue_cores = 1 }", ""),
            ("mode = 'of'", "mode: is \"of\"; must be \"enforced\", \"advisory\" or \"off\""),
            ("[[limit]]", ""),
            ("labels = { zone = 'a ' }", "labels[\"zone\"]: has white space at an end; leave it out"),
            ("max.cores = 1", ""),
        ];
        let text = parse(&lines.map(|(line, _)| line).join("\n")).unwrap_err().to_string();
        let expected = (1..).zip(lines).filter(|(_, (_, start))| !start.is_empty());
        assert_eq!(text.lines().count(), expected.clone().count(), "{text}");
        for (shown, (line, (_, start))) in text.lines().zip(expected) {
            assert!(shown.starts_with(&format!("line {line}: {start}")), "{shown}, not line {line}: {start}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(
            text in r#"(?s).*|(\[\[limit\]\]|\n|each|=|\[|\]|labels|max|\{|\}|'a'|,|1|cores|\.|"""|é|#| ){0,40}"#,
        ) {
            let lines = 1..=text.matches('\n').count() + 1;
            let fits = |all: Vec<(usize, String)>| !all.is_empty() && all.iter().all(|(line, _)| lines.contains(line));
            prop_assert!(parse(&text).err().is_none_or(|error| fits(error.0)));
        }
    }
}
