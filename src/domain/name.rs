//! Names and labels as callers write them: validated once, at the edge, and cheap to clone afterwards.

use std::{collections::BTreeMap, fmt, sync::Arc};

/// The longest name, key or value, in characters.
pub const NAME_CHARS_MAX: usize = 255;

/// How many labels one EM or request may carry.
pub const LABELS_MAX: usize = 32;

/// How many bytes their keys and values may have together: they stand in every row, and on every page, that tells of the EM or the
/// ticket.
pub const LABELS_BYTES_MAX: usize = 6 * 1024;

/// A field of a request that cannot be accepted, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct FieldError {
    /// The path of the field in the request, e.g. `em.instance`.
    pub field: String,
    /// What is wrong with it, and what would be right.
    pub problem: String,
}

impl FieldError {
    /// An error for `field`.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// A non-empty name of at most [`NAME_CHARS_MAX`] characters, none of them a control character. Any other character is legal:
/// names are never joined into strings to be split later.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(Arc<str>);

impl Name {
    /// Checks a name that stands in `field`.
    pub fn parse(field: &str, text: &str) -> Result<Self, FieldError> {
        if text.is_empty() {
            return Err(FieldError::new(field, "must not be empty"));
        }
        check_text(field, text)?;
        Ok(Self(text.into()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Checks the names of an application and of one of its instances; `field` is the path of both in the request.
pub(super) fn parse_instance(field: &str, application_name: &str, instance: &str) -> Result<(Name, Name), FieldError> {
    let application_name = Name::parse(&format!("{field}.application_name"), application_name)?;
    Ok((application_name, Name::parse(&format!("{field}.instance"), instance)?))
}

/// Checks a text that may be empty: its length, and that it has no control characters.
pub fn check_text(field: &str, text: &str) -> Result<(), FieldError> {
    let chars = text.chars().count();
    if chars > NAME_CHARS_MAX {
        return Err(FieldError::new(field, format!("has {chars} characters; at most {NAME_CHARS_MAX} are allowed")));
    }
    match text.chars().position(char::is_control) {
        Some(at) => Err(FieldError::new(field, format!("has a control character at position {at}"))),
        None => Ok(()),
    }
}

/// What an EM or a request says of itself: at most [`LABELS_MAX`] keys with their values, of at most [`LABELS_BYTES_MAX`] bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels(Arc<BTreeMap<String, String>>);

impl Labels {
    /// Checks labels that stand in `field`.
    pub fn parse(field: &str, labels: BTreeMap<String, String>) -> Result<Self, FieldError> {
        if labels.len() > LABELS_MAX {
            return Err(FieldError::new(
                field,
                format!("has {} labels; at most {LABELS_MAX} are allowed", labels.len()),
            ));
        }
        for (key, value) in &labels {
            Name::parse(&format!("{field} (a key)"), key)?;
            Name::parse(&format!("{field}[{key:?}]"), value)?;
        }
        let bytes: usize = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes > LABELS_BYTES_MAX {
            let problem = format!("has labels of {bytes} bytes together; at most {LABELS_BYTES_MAX} are allowed");
            return Err(FieldError::new(field, problem));
        }
        Ok(Self(Arc::new(labels)))
    }

    /// Key by key.
    pub fn as_map(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_hold_what_linkis_splits_at() {
        for text in ["host-1:9102", "a,b", "用户", " ", "a=b/c"] {
            assert_eq!(Name::parse("user", text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn bad_names_are_refused_by_field() {
        for (text, problem) in [
            (String::new(), "must not be empty"),
            ("x".repeat(256), "has 256 characters; at most 255 are allowed"),
            ("a\u{0}b".into(), "has a control character at position 1"),
            ("line\n".into(), "has a control character at position 4"),
        ] {
            assert_eq!(Name::parse("em.instance", &text), Err(FieldError::new("em.instance", problem)));
        }
        assert!(Name::parse("user", &"ü".repeat(255)).is_ok(), "characters are counted, not bytes");
    }

    #[test]
    fn labels_are_bounded() {
        let labels = |n: usize| (0..n).map(|i| (i.to_string(), "v".into())).collect();
        assert!(Labels::parse("labels", labels(32)).is_ok());
        assert_eq!(Labels::parse("labels", labels(33)).unwrap_err().field, "labels");
        assert!(Labels::parse("labels", BTreeMap::from([("k".into(), String::new())])).is_err());
        let long = |n: usize| (0..n).map(|i| (format!("{i:0>255}"), "用".repeat(255))).collect();
        assert!(Labels::parse("labels", long(6)).is_ok());
        assert!(Labels::parse("labels", long(7)).unwrap_err().problem.contains("at most 6144"));
    }
}
