//! Keys that every provider configuration has: the check rules, beside the keys of Linkis.
//!
//! The cluster types parse their own keys with the helpers of this module. Errors name a key and never repeat a value.
//! Callers: the `config` modules of the cluster types, and the refresh of `rm_service::external`, for the default rules.

use humantime::{format_duration, parse_duration};
use serde_json::{Map, Value};
use time::Duration;

use rm_model::{
    external::{CheckRules, UnavailablePolicy},
    name::FieldError,
};

/// Default check rules.
pub const DEFAULT: CheckRules = CheckRules {
    max_age: Duration::seconds(30),
    when_away: UnavailablePolicy::Refuse,
    last_known_for: Duration::minutes(10),
    refresh_interval: Duration::seconds(5),
};

const WHEN_DOWN: &str = "whenDown";
const MAX_AGE: &str = "maxAge";
const LAST_KNOWN_FOR: &str = "lastKnownFor";
const REFRESH_INTERVAL: &str = "refreshInterval";

/// Removes the check rules from the keys of a configuration and parses them.
///
/// # Errors
/// Names the faulty key.
pub fn read(keys: &mut Map<String, Value>) -> Result<CheckRules, FieldError> {
    let when_away = match keys.remove(WHEN_DOWN) {
        None | Some(Value::Null) => DEFAULT.when_away,
        Some(value) => value.as_str().and_then(UnavailablePolicy::parse).ok_or_else(|| {
            let all = UnavailablePolicy::ALL.map(UnavailablePolicy::as_str).join(", ");
            wrong(WHEN_DOWN, format!("must be one of {all}"))
        })?,
    };
    let refresh_interval =
        duration(keys, REFRESH_INTERVAL, DEFAULT.refresh_interval, Duration::milliseconds(200), Duration::minutes(5))?;
    let max_age = duration(keys, MAX_AGE, DEFAULT.max_age, Duration::seconds(1), Duration::hours(1))?;
    let last_known_for =
        duration(keys, LAST_KNOWN_FOR, DEFAULT.last_known_for, Duration::seconds(1), Duration::days(1))?;
    if max_age <= refresh_interval {
        return Err(wrong(MAX_AGE, "must be longer than refreshInterval, because no snapshot would be recent enough"));
    }
    Ok(CheckRules { max_age, when_away, last_known_for, refresh_interval })
}

/// Inserts the rules in the form that [`read`] parses.
pub fn write(rules: &CheckRules, keys: &mut Map<String, Value>) {
    let text = |duration: Duration| {
        let duration = std::time::Duration::try_from(duration).unwrap_or_default();
        Value::from(format_duration(duration).to_string())
    };
    keys.insert(WHEN_DOWN.into(), rules.when_away.as_str().into());
    keys.insert(MAX_AGE.into(), text(rules.max_age));
    keys.insert(LAST_KNOWN_FOR.into(), text(rules.last_known_for));
    keys.insert(REFRESH_INTERVAL.into(), text(rules.refresh_interval));
}

/// Returns the error of a key.
pub(super) fn wrong(key: &str, problem: impl Into<String>) -> FieldError {
    FieldError::new(format!("config.{key}"), problem)
}

/// Parses a configuration into its keys.
pub(super) fn keys(json: &str) -> Result<Map<String, Value>, FieldError> {
    // Omits the parser's text, which may repeat a value.
    let not_json = |error: serde_json::Error| {
        let place = format!("is not a JSON object; see line {}, column {}", error.line(), error.column());
        FieldError::new("config", place)
    };
    serde_json::from_str(json).map_err(not_json)
}

/// Removes a text of at most `most` bytes; `None` if the key is missing or null.
pub(super) fn text(keys: &mut Map<String, Value>, key: &str, most: usize) -> Result<Option<String>, FieldError> {
    match keys.remove(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.len() > most => Err(wrong(key, "is too long")),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(wrong(key, "must be a string")),
    }
}

/// Checks that no further key is left. `known` lists the known keys for the error.
pub(super) fn nothing_else(keys: &Map<String, Value>, known: &str) -> Result<(), FieldError> {
    match keys.keys().next() {
        Some(key) => Err(wrong(&key.chars().take(64).collect::<String>(), format!("is not known; known are {known}"))),
        None => Ok(()),
    }
}

fn duration(
    keys: &mut Map<String, Value>,
    key: &str,
    default: Duration,
    least: Duration,
    most: Duration,
) -> Result<Duration, FieldError> {
    let text = match keys.remove(key) {
        None | Some(Value::Null) => return Ok(default),
        Some(value) => value,
    };
    let parsed = text.as_str().and_then(|text| parse_duration(text).ok());
    let parsed = parsed.and_then(|parsed| Duration::try_from(parsed).ok());
    parsed.filter(|parsed| (least..=most).contains(parsed)).ok_or_else(|| {
        let show = |duration: Duration| {
            format_duration(std::time::Duration::try_from(duration).unwrap_or_default()).to_string()
        };
        wrong(key, format!("must be a duration from {} to {}, e.g. \"30s\"", show(least), show(most)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(json: &str) -> Map<String, Value> {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn check_rules_round_trip_and_errors_name_key() {
        assert_eq!(read(&mut keys("{}")), Ok(DEFAULT));
        let said = r#"{"whenDown": "last_known", "maxAge": "20s", "lastKnownFor": "1h", "refreshInterval": "500ms"}"#;
        let rules = read(&mut keys(said)).unwrap();
        assert_eq!((rules.when_away, rules.max_age), (UnavailablePolicy::LastKnown, Duration::seconds(20)));
        let mut written = Map::new();
        write(&rules, &mut written);
        assert_eq!(read(&mut written), Ok(rules));
        assert!(written.is_empty(), "all keys are taken");
        for (json, key) in [
            (r#"{"whenDown": "panic"}"#, "config.whenDown"),
            (r#"{"whenDown": 1}"#, "config.whenDown"),
            (r#"{"maxAge": "2d"}"#, "config.maxAge"),
            (r#"{"maxAge": 30}"#, "config.maxAge"),
            (r#"{"maxAge": "5s"}"#, "config.maxAge"),
            (r#"{"lastKnownFor": "for ever"}"#, "config.lastKnownFor"),
            (r#"{"refreshInterval": "1ms"}"#, "config.refreshInterval"),
        ] {
            assert_eq!(read(&mut keys(json)).unwrap_err().field, key, "{json}");
        }
    }
}
