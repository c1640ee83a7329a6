//! Parsers of single settings. Each mistake names its setting and the valid form.
//!
//! Callers: `config`, and the commands for arguments of the same kinds.

use std::{fmt::Display, path::Path, str::FromStr, time::Duration};

use crate::limits_file;
use rm_model::{limit::LimitReplacement, resource::parse_size};

/// Returns whether a path is set; an empty one counts as unset.
pub(super) fn is_set(path: &Path) -> bool {
    !path.as_os_str().is_empty()
}

/// Parses an integer between `least` and `most`.
pub(super) fn parse_number<N: FromStr + PartialOrd + Display>(
    name: &str,
    text: &str,
    least: N,
    most: N,
) -> Result<N, String> {
    let number = text.parse().ok().filter(|number| (&least..=&most).contains(&number));
    number.ok_or_else(|| format!("{name}: {text:?} is not a number from {least} to {most}"))
}

/// Parses a size of at least `least` bytes.
pub(super) fn parse_bytes(name: &str, text: &str, least: usize) -> Result<usize, String> {
    let bytes = parse_size(text).ok().and_then(|bytes| usize::try_from(bytes).ok());
    bytes.filter(|bytes| *bytes >= least).ok_or_else(|| {
        let least = least.div_ceil(1 << 20);
        format!("{name}: {text:?} is not a size of at least {least}m; for example 64m or 1g")
    })
}

/// Returns the parsed value, or records its mistake.
pub(super) fn ok_or_record<T>(mistakes: &mut Vec<String>, parsed: Result<T, String>) -> Option<T> {
    parsed.map_err(|mistake| mistakes.push(mistake)).ok()
}

/// Maximum size of a limits file in bytes: a hundred thousand limits, doubled.
const LIMITS_BYTES_MAX: u64 = 16 << 20;

/// Reads the limits in the file of a setting. Returns all mistakes as one text.
pub fn read_limits(setting: &str, path: &Path) -> Result<LimitReplacement, String> {
    let name = format!("{setting}: {}", path.display());
    let size = std::fs::metadata(path).map_err(|error| format!("{name}: {error}"))?.len();
    if size > LIMITS_BYTES_MAX {
        return Err(format!("{name}: has {size} bytes; at most {LIMITS_BYTES_MAX} are read"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
    limits_file::parse(&text).map_err(|error| format!("{name}:\n    {}", error.to_string().replace('\n', "\n    ")))
}

/// Parses a duration between the durations `least` and `most`. Returns the mistake as text.
pub fn parse_duration(name: &str, text: &str, least: &str, most: &str) -> Result<Duration, String> {
    let wrong = |_| format!("{name}: {text:?} is not a duration; for example 500ms, 30s, 10m or 7d");
    let duration = humantime::parse_duration(text).map_err(wrong)?;
    if humantime::parse_duration(least).is_ok_and(|least| duration < least)
        || humantime::parse_duration(most).is_ok_and(|most| duration > most)
    {
        return Err(format!("{name}: {text:?} must be between {least} and {most}"));
    }
    Ok(duration)
}
