//! Texts for display: sizes, times, names, and escaped input of other programs.
//!
//! Never: passes on a character that controls a terminal or changes the reading order.

use std::{borrow::Cow, collections::BTreeMap, fmt::Write as _, time::SystemTime};

use prost_types::Timestamp;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use unicode_width::UnicodeWidthStr as _;

use rm_edge::convert;
use rm_model::resource::{Dimension, format_size};
use rm_proto::v1 as proto;

/// Application name of EMs in Linkis, which is omitted in output.
pub const EM_APPLICATION: &str = "linkis-cg-engineconnmanager";

/// Placeholder for an empty value.
pub const NOTHING: &str = "-";

/// Returns whether a character can affect a terminal or the reading order of a text. These are control characters (some
/// begin escape sequences), direction marks and invisible characters.
pub fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Escapes such characters as `\u{1b}`, including line ends.
pub fn clean(text: &str) -> Cow<'_, str> {
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_harmful(c) { clean.extend(c.escape_unicode()) } else { clean.push(c) }
    }
    Cow::Owned(clean)
}

/// As [`clean`], but keeps line ends.
pub fn clean_lines(text: &str) -> String {
    text.split('\n').map(clean).collect::<Vec<_>>().join("\n")
}

/// Returns the width in terminal columns.
pub fn width(text: &str) -> usize {
    text.width()
}

/// Mark of an omitted middle.
const OMITTED: &str = "..";

/// Shortens a text to a width in columns; omits the middle.
pub fn cut(text: &str, columns: usize) -> Cow<'_, str> {
    if width(text) <= columns {
        return Cow::Borrowed(text);
    }
    let Some(rest) = columns.checked_sub(OMITTED.len()) else {
        return Cow::Owned(OMITTED.chars().take(columns).collect());
    };
    let (mut head, mut tail, mut taken) = (String::new(), Vec::new(), 0);
    let (tail_width, mut from_end) = (rest / 2, text.chars().rev());
    let of = |c: char| width(c.encode_utf8(&mut [0; 4]));
    while let Some(c) = from_end.next().filter(|c| taken + of(*c) <= tail_width) {
        taken += of(c);
        tail.push(c);
    }
    for c in text.chars() {
        if taken + of(c) > rest {
            break;
        }
        taken += of(c);
        head.push(c);
    }
    Cow::Owned(head + OMITTED + &tail.into_iter().rev().collect::<String>())
}

/// Returns a name in the form that arguments accept, also in a shell: in quotes if it has other characters than letters, digits
/// and some signs. Characters that a terminal or a shell could act on are escaped, as [`parse_name`] reads them.
pub fn name(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "=:/.,@%+-_".contains(c);
    if text.chars().all(is_plain) && !text.is_empty() && !text.starts_with('-') {
        return text.to_owned();
    }
    let mut quoted = String::with_capacity(text.len() + 2);
    for c in text.chars() {
        if is_harmful(c) || "\"\\$`!".contains(c) { quoted.extend(c.escape_unicode()) } else { quoted.push(c) }
    }
    format!("\"{quoted}\"")
}

/// Returns the name that [`name`] printed, after a shell has removed the quotes.
pub fn parse_name(text: &str) -> String {
    let mut parts = text.split("\\u{");
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let escaped = part.split_once('}');
        let c = escaped.and_then(|(code, rest)| Some((char::from_u32(u32::from_str_radix(code, 16).ok()?)?, rest)));
        match c {
            Some((c, rest)) => name.extend([c.to_string().as_str(), rest]),
            None => name.extend(["\\u{", part]),
        }
    }
    name
}

/// Returns an EM in the form that arguments accept.
pub fn em(em: Option<&proto::EmInstance>) -> String {
    match em {
        None => NOTHING.to_owned(),
        Some(em) if em.application_name == EM_APPLICATION && !em.instance.is_empty() => name(&em.instance),
        Some(em) if em.instance.is_empty() => name(&em.application_name),
        Some(em) => name(&format!("{}/{}", em.application_name, em.instance)),
    }
}

/// Returns a scope of a refusal or a wait queue; an EM in the form of [`em`].
pub fn scope(scope: &str) -> String {
    match scope.strip_prefix("em=") {
        Some("any") => "any EM".to_owned(),
        Some(em) => name(em.strip_prefix(&format!("{EM_APPLICATION}/")).unwrap_or(em)),
        None => name(scope),
    }
}

/// Returns a time in UTC, to the second.
pub fn time(time: Option<&Timestamp>) -> String {
    let at = time.and_then(|time| OffsetDateTime::from_unix_timestamp(time.seconds).ok());
    at.and_then(|at| at.format(&Rfc3339).ok()).unwrap_or_else(|| NOTHING.to_owned())
}

/// Returns the distance of a time from now in its largest unit: `4m` ago, or `in 4m`.
pub fn age(time: &Timestamp, now: SystemTime) -> String {
    let now = Timestamp::from(now).seconds;
    let distance = now.saturating_sub(time.seconds);
    let seconds = distance.unsigned_abs();
    let text = match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    };
    if distance < 0 { format!("in {text}") } else { text }
}

/// Returns the minute of a time in UTC: `12:05`, or `11-25 12:05` from a day ago on.
pub fn minute(at: &Timestamp, now: SystemTime) -> String {
    let whole = time(Some(at));
    let is_today = Timestamp::from(now).seconds.saturating_sub(at.seconds) < 86_400;
    whole.get(if is_today { 11..16 } else { 5..16 }).unwrap_or(&whole).replace('T', " ")
}

/// Returns a duration in its two largest units.
pub fn seconds(seconds: i64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{minutes}m"),
        (days, hours, _) => format!("{days}d{hours}h"),
    }
}

/// Returns a duration as [`seconds`] does, or with its milliseconds.
pub fn duration(duration: Option<&prost_types::Duration>) -> String {
    match duration {
        None => NOTHING.to_owned(),
        Some(whole) if whole.nanos == 0 => seconds(whole.seconds),
        Some(duration) => format!("{}.{:03}s", duration.seconds, duration.nanos / 1_000_000),
    }
}

/// As [`name`], or [`NOTHING`] if it is empty.
pub fn name_or_nothing(text: &str) -> String {
    if text.is_empty() { NOTHING.to_owned() } else { name(text) }
}

/// Returns the text, or [`NOTHING`] if it is empty.
pub fn or_nothing(text: &str) -> String {
    if text.is_empty() { NOTHING.to_owned() } else { text.to_owned() }
}

/// Returns the texts, separated by commas.
pub fn list(texts: &[String]) -> String {
    or_nothing(&texts.join(","))
}

/// Returns labels in the form of limits and scopes.
pub fn labels(labels: &BTreeMap<String, String>) -> String {
    let pairs: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    name_or_nothing(&pairs.join(","))
}

/// Returns an amount of a dimension; memory as a size.
pub fn amount(dimension: &Dimension, amount: i64) -> String {
    if dimension.is_size() { size(amount) } else { amount.to_string() }
}

/// Returns a size in its largest unit, with a decimal place if it has one.
pub fn size(bytes: i64) -> String {
    format_size(bytes).replace(".0 ", " ")
}

/// Returns an amount of a maximum, with a unit that both share once: `1.5/64 GB`.
pub fn amount_of(amount: &str, max: &str) -> String {
    match (amount.split_once(' '), max.split_once(' ')) {
        (Some((number, unit)), Some((_, unit_of_max))) if unit == unit_of_max => format!("{number}/{max}"),
        _ => format!("{amount}/{max}"),
    }
}

/// As [`amount`], by the key of the dimension, as in `Limit.max`.
pub fn amount_by_key(key: &str, value: i64) -> String {
    Dimension::parse_key(key).map_or_else(|| value.to_string(), |dimension| amount(&dimension, value))
}

/// Returns amounts by keys of dimensions.
pub fn amounts_by_key(amounts: &BTreeMap<String, i64>) -> String {
    let pairs: Vec<String> =
        amounts.iter().map(|(key, amount)| format!("{key}={}", amount_by_key(key, *amount))).collect();
    or_nothing(&pairs.join(" "))
}

/// Returns the amounts of a resource of any type in the order of its shape, and its queue or namespace.
pub fn amounts(resource: Option<&proto::Resource>) -> (Vec<(Dimension, i64)>, Option<String>) {
    let kind = resource.and_then(|resource| resource.kind.clone());
    let Some(Ok(parts)) = kind.map(convert::resource::parts) else { return (vec![], None) };
    let (amounts, queue) = parts.amounts();
    (amounts, queue.map(str::to_owned))
}

/// Returns a resource on one line.
pub fn resource(resource: Option<&proto::Resource>) -> String {
    let (amounts, queue) = amounts(resource);
    let mut text = String::new();
    for (dimension, value) in amounts.iter().filter(|(_, amount)| *amount != 0) {
        // Writing to a string cannot fail.
        let _ = write!(text, "{}{}={}", separator(&text), dimension.key(), amount(dimension, *value));
    }
    if let Some(queue) = queue.filter(|queue| !queue.is_empty()) {
        let _ = write!(text, "{}on {queue}", separator(&text));
    }
    or_nothing(&text)
}

fn separator(text: &str) -> &'static str {
    if text.is_empty() { "" } else { " " }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_proto::v1::resource::Kind;

    #[test]
    fn text_with_control_characters_is_escaped() {
        for (text, shown) in [
            ("hadoop", "hadoop"),
            ("李雷 é", "李雷 é"),
            ("\x1b[2J\x07", "\\u{1b}[2J\\u{7}"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("a\u{202e}b\u{200b}\u{2066}", "a\\u{202e}b\\u{200b}\\u{2066}"),
            ("two\nlines\r", "two\\u{a}lines\\u{d}"),
        ] {
            assert_eq!(clean(text), shown);
        }
        assert_eq!(clean_lines("two\nlines\r"), "two\nlines\\u{d}");
    }

    #[test]
    fn text_is_shortened_in_the_middle() {
        for (text, columns, shown) in [
            ("host1:9102", 10, "host1:9102"),
            ("host1:9102", 9, "host..102"),
            ("host1:9102", 4, "h..2"),
            ("host1:9102", 1, "."),
            ("host1:9102", 0, ""),
            ("李雷李雷", 6, "李..雷"),
            ("李雷", 2, ".."),
        ] {
            assert_eq!(cut(text, columns), shown, "{text} in {columns}");
            assert!(width(&cut(text, columns)) <= columns);
        }
    }

    #[test]
    fn name_is_found_as_printed() {
        for (text, shown) in [
            ("hadoop", "hadoop"),
            ("team=data science", "\"team=data science\""),
            ("a/b", "a/b"),
            ("", "\"\""),
            ("-x", "\"-x\""),
            ("it's", "\"it's\""),
            ("$(reboot)`\"", "\"\\u{24}(reboot)\\u{60}\\u{22}\""),
            ("a\\u{41}", "\"a\\u{5c}u{41}\""),
            ("\x1b[2J\u{202e}", "\"\\u{1b}[2J\\u{202e}\""),
        ] {
            assert_eq!(name(text), shown);
            assert_eq!(parse_name(shown.trim_matches('"')), text);
        }
        assert_eq!(parse_name("a\\u{zz}b\\u{41"), "a\\u{zz}b\\u{41", "an unknown escape stays");
    }

    #[test]
    fn age_has_the_largest_unit() {
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        for (seconds, shown) in
            [(1_000_000, "0s"), (999_941, "59s"), (999_000, "16m"), (900_000, "1d"), (1_000_480, "in 8m")]
        {
            assert_eq!(age(&Timestamp { seconds, nanos: 0 }, now), shown);
        }
    }

    #[test]
    fn minute_has_its_day_if_it_is_another() {
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        for (seconds, shown) in [(913_601, "13:46"), (913_600, "01-11 13:46"), (0, "01-01 00:00")] {
            assert_eq!(minute(&Timestamp { seconds, nanos: 0 }, now), shown);
        }
    }

    #[test]
    fn resource_is_printed_on_one_line() {
        let yarn = proto::YarnResource { queue_name: "etl".into(), queue_memory: 3 << 30, ..Default::default() };
        let driver = proto::LoadInstanceResource { memory: 2 << 30, cores: -1, instances: 0 };
        let both = proto::DriverAndYarnResource { load_instance: Some(driver), yarn: Some(yarn) };
        let both = proto::Resource { kind: Some(Kind::DriverAndYarn(both)) };
        assert_eq!(resource(Some(&both)), "memory=2 GB cores=-1 queue_memory=3 GB on etl");
        assert_eq!(resource(None), "-");
    }
}
