//! JSON reader for schedulers of any release. Keeps only given keys, accepts repeated keys, and bounds depth and memory.
//!
//! An error contains no data of the response. Callers: `scheduler` and `cluster`.

use std::{cell::Cell, fmt};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::YarnParseError;

/// Maximum number of values kept of one response: those of tens of thousands of queues.
const VALUES_MAX: usize = 1_000_000;

/// A parsed value, reduced to the given keys.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum JsonValue {
    /// Null, true or false.
    Nothing,
    /// A whole number.
    Int(i64),
    /// A number with a fraction, or above the range of `i64`.
    Real(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<JsonValue>),
    /// Entries of an object whose keys were given; a key may occur more than once.
    Object(Vec<(&'static str, JsonValue)>),
}

/// Parses `json` and keeps the entries under `keys`.
pub(super) fn read(json: &[u8], keys: &'static [&'static str]) -> Result<JsonValue, YarnParseError> {
    let left = Cell::new(VALUES_MAX);
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let value = JsonReader { keys, left: &left }.deserialize(&mut deserializer);
    // The values produce no error texts, so an error contains no data of the response.
    let value = value.and_then(|value| deserializer.end().map(|()| value)).map_err(|error| match left.get() {
        0 => YarnParseError::TooMany { most: VALUES_MAX },
        _ => YarnParseError::NotJson { line: error.line(), column: error.column(), is_cut: error.is_eof() },
    })?;
    Ok(value)
}

impl JsonValue {
    /// Returns all values directly under `key`; lists are flattened.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a JsonValue> {
        let entries = match self {
            Self::Object(entries) => entries.as_slice(),
            _ => &[],
        };
        let under = entries.iter().filter(move |(name, _)| *name == key).map(|(_, value)| value);
        under.flat_map(|value| match value {
            Self::List(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        })
    }

    /// Returns the objects under `key`.
    pub fn objects<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a JsonValue> {
        self.all(key).filter(|value| matches!(value, Self::Object(_)))
    }

    /// Returns the text under `key`.
    pub fn text<'a>(&'a self, key: &'a str) -> Option<&'a str> {
        self.all(key).find_map(|value| match value {
            Self::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// Returns the number under `key`, without its fraction. Old releases write some numbers as text.
    pub fn int(&self, key: &str) -> Option<i64> {
        self.all(key).find_map(|value| value.whole(Rounds::Down))
    }

    /// Returns the value as a whole number, saturating; `None` if it is no number.
    pub fn whole(&self, rounds: Rounds) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            Self::Real(number) => Some(rounds.whole(*number)),
            Self::Text(text) => whole(text, rounds),
            _ => None,
        }
    }

    /// Returns whether the value states nothing: null, an empty text, or an object without any of the given keys.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Text(text) => text.trim().is_empty(),
            Self::Object(entries) => entries.is_empty(),
            _ => false,
        }
    }

    /// Returns the number under `key`, if it is finite.
    pub fn real(&self, key: &str) -> Option<f64> {
        let real = self.all(key).find_map(|value| match value {
            Self::Int(number) => Some(*number as f64),
            Self::Real(number) => Some(*number),
            Self::Text(text) => text.trim().parse().ok(),
            _ => None,
        });
        real.filter(|real| real.is_finite())
    }
}

/// Direction of rounding a number with a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounds {
    /// Down, for a maximum: a part of a unit cannot be granted.
    Down,
    /// Up, for a use: a part of a unit cannot be granted again.
    Up,
}

impl Rounds {
    /// Returns `number` as a whole number, saturating.
    pub fn whole(self, number: f64) -> i64 {
        match self {
            Self::Down => number.floor() as i64,
            Self::Up => number.ceil() as i64,
        }
    }
}

/// Parses `text` as a whole number, saturating; `None` if it is no number.
pub(super) fn whole(text: &str, rounds: Rounds) -> Option<i64> {
    let text = text.trim();
    text.parse().ok().or_else(|| Some(rounds.whole(text.parse().ok().filter(|number: &f64| number.is_finite())?)))
}

/// Reader of one value. serde_json bounds the depth at 128.
#[derive(Clone, Copy)]
struct JsonReader<'a> {
    keys: &'static [&'static str],
    /// Number of further values that may be kept.
    left: &'a Cell<usize>,
}

impl JsonReader<'_> {
    fn keep<E: serde::de::Error>(self, value: JsonValue) -> Result<JsonValue, E> {
        let left = self.left.get().checked_sub(1).filter(|left| *left > 0);
        self.left.set(left.unwrap_or(0));
        left.map(|_| value).ok_or_else(|| E::custom("too many values"))
    }
}

impl<'de> DeserializeSeed<'de> for JsonReader<'_> {
    type Value = JsonValue;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonValue, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonReader<'_> {
    type Value = JsonValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<JsonValue, E> {
        self.keep(JsonValue::Nothing)
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<JsonValue, E> {
        self.keep(JsonValue::Nothing)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<JsonValue, E> {
        self.keep(JsonValue::Int(number))
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<JsonValue, E> {
        self.keep(i64::try_from(number).map_or(JsonValue::Real(number as f64), JsonValue::Int))
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<JsonValue, E> {
        self.keep(JsonValue::Real(number))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<JsonValue, E> {
        self.keep(JsonValue::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<JsonValue, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element_seed(self)? {
            values.push(value);
        }
        self.keep(JsonValue::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonValue, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key_seed(KeyFilter(self.keys))? {
            match key {
                Some(key) => entries.push((key, map.next_value_seed(self)?)),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        self.keep(JsonValue::Object(entries))
    }
}

/// Filter of the given keys.
struct KeyFilter(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for KeyFilter {
    type Value = Option<&'static str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyFilter {
    type Value = Option<&'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(self.0.iter().find(|key| **key == text).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: &[&str] = &["a", "b"];

    #[test]
    fn json_repeated_keys_and_missing_lists_are_accepted() {
        for json in [
            r#"{"a": [{"b": 1}, {"b": 2}]}"#,
            r#"{"a": {"b": 1}, "c": [[]], "a": {"b": 2}}"#,
            r#"{"a": [{"b": 1}], "a": [{"b": 2}, ""]}"#,
        ] {
            let value = read(json.as_bytes(), KEYS).unwrap();
            let numbers: Vec<_> = value.objects("a").map(|value| value.int("b")).collect();
            assert_eq!(numbers, [Some(1), Some(2)], "{json}");
        }
    }

    #[test]
    fn json_number_in_any_form_is_parsed() {
        let int = |json: &str| read(format!(r#"{{"a": {json}}}"#).as_bytes(), KEYS).unwrap().int("a");
        assert_eq!(int("7.9"), Some(7));
        assert_eq!(int("\"7\""), Some(7));
        assert_eq!(int("\" 61440.0 \""), Some(61_440));
        assert_eq!([int("\"NaN\""), int("\"inf\""), int("\"7 GB\""), int("\"\"")], [None; 4]);
        assert_eq!(int("18446744073709551615"), Some(i64::MAX));
        assert_eq!(int("1e300"), Some(i64::MAX));
        assert_eq!(int("null"), None);
        assert_eq!(int("{}"), None);
        assert_eq!(read(br#"{"a": "NaN"}"#, KEYS).unwrap().real("a"), None);
    }

    #[test]
    fn json_error_states_position_without_content() {
        for (json, is_cut) in [("<html>secret", false), (r#"{"a": "secret"#, true), ("{} secret", false), ("", true)] {
            match read(json.as_bytes(), KEYS).unwrap_err() {
                error @ YarnParseError::NotJson { is_cut: cut, .. } => {
                    assert_eq!(cut, is_cut, "{json}");
                    assert!(!error.to_string().contains("secret"), "{error}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn json_depth_and_size_are_bounded() {
        let deep = format!("{}1{}", r#"{"a":"#.repeat(100_000), "}".repeat(100_000));
        assert!(matches!(read(deep.as_bytes(), KEYS), Err(YarnParseError::NotJson { .. })));
        let ignored = format!("{{\"c\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(read(ignored.as_bytes(), KEYS), Ok(JsonValue::Object(vec![])), "skipped values use no stack");
        let many = format!("[{}{{}}]", "{},".repeat(VALUES_MAX));
        assert_eq!(read(many.as_bytes(), KEYS), Err(YarnParseError::TooMany { most: VALUES_MAX }));
    }
}
