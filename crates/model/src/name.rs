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
/// names are never joined into strings to be split later. A new name is narrower: [`Name::parse_new`].
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

    /// Checks a name that a call brings into being, as [`check_new`] does.
    ///
    /// # Errors
    /// It is no name, or not legal in a new one.
    pub fn parse_new(field: &str, text: &str) -> Result<Self, FieldError> {
        let name = Self::parse(field, text)?;
        check_new(field, text).map(|()| name)
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

/// Checks a name, or a part of one, that a call brings into being; empty is legal here.
///
/// Names that exist are parsed and not checked by this, so that they are listed, released, unregistered and deleted as before.
///
/// # Errors
/// White space at an end, a line separator, or a format character. U+200C and U+200D are legal between two visible characters, where words of
/// several scripts and composed emoji need them.
pub fn check_new(field: &str, name: &str) -> Result<(), FieldError> {
    let wrong = |problem: String| Err(FieldError::new(field, problem));
    if !name.is_empty() && name.chars().all(char::is_whitespace) {
        return wrong("is white space alone; give it a visible name".to_owned());
    }
    if name.starts_with(char::is_whitespace) || name.ends_with(char::is_whitespace) {
        return wrong("has white space at an end; leave it out".to_owned());
    }
    let is_visible = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace() && !c.is_control() && !is_format(c));
    let mut chars = name.chars().enumerate().peekable();
    let mut before = None;
    while let Some((at, c)) = chars.next() {
        let is_joiner = matches!(c, NON_JOINER | JOINER);
        let joins = is_joiner && is_visible(before) && is_visible(chars.peek().map(|(_, next)| *next));
        match c {
            LINE_SEPARATOR | PARAGRAPH_SEPARATOR => return wrong(format!("has a line separator at position {at}")),
            c if c.is_control() => return wrong(format!("has a control character at position {at}")),
            c if is_format(c) && !joins => {
                let code = u32::from(c);
                return wrong(format!("has the invisible character U+{code:04X} at position {at}; leave it out"));
            }
            _ => before = Some(c),
        }
    }
    Ok(())
}

const NON_JOINER: char = '\u{200c}';
const JOINER: char = '\u{200d}';
const LINE_SEPARATOR: char = '\u{2028}';
const PARAGRAPH_SEPARATOR: char = '\u{2029}';

/// Whether Unicode has the character in its category Cf: it has no shape, or changes that of others.
const fn is_format(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}' | '\u{891}' | '\u{8e2}'
    ) || matches!(c, '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}')
        || matches!(c, '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e007f}')
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

    /// Checks labels that a call brings into being, as [`check_new`] does.
    ///
    /// # Errors
    /// The first key or value that is not legal in a new name.
    pub fn check_new(&self, field: &str) -> Result<(), FieldError> {
        self.0.iter().try_for_each(|(key, value)| check_new_label(field, key, value))
    }

    /// Key by key.
    pub fn as_map(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

/// Checks a label that a call brings into being, as [`check_new`] does.
///
/// # Errors
/// The key or the value is not legal in a new name.
pub fn check_new_label(field: &str, key: &str, value: &str) -> Result<(), FieldError> {
    check_new(&format!("{field} (a key)"), key)?;
    check_new(&format!("{field}[{key:?}]"), value)
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
    fn new_name_with_invisible_character_is_refused() {
        let check = |text: &str| check_new("user", text).map_err(|error| error.problem);
        for (text, problem) in [
            (" ", "is white space alone"),
            ("\u{3000}\u{a0}", "is white space alone"),
            (" a", "has white space at an end"),
            ("a\u{a0}", "has white space at an end"),
            ("a\u{2028}", "has white space at an end"),
            ("a\u{2028}b", "has a line separator at position 1"),
            ("a\u{2029}b", "has a line separator at position 1"),
            ("a\u{85}b", "has a control character at position 1"),
            ("a\u{200b}b", "has the invisible character U+200B at position 1"),
            ("adm\u{ad}in", "has the invisible character U+00AD at position 3"),
            ("\u{202e}nimda", "has the invisible character U+202E at position 0"),
            ("\u{feff}a", "has the invisible character U+FEFF at position 0"),
            ("a\u{e0041}", "has the invisible character U+E0041 at position 1"),
            ("\u{200d}a", "has the invisible character U+200D at position 0"),
            ("a\u{200c}", "has the invisible character U+200C at position 1"),
            ("a\u{200d}\u{200d}b", "has the invisible character U+200D at position 1"),
            ("a \u{200c}b", "has the invisible character U+200C at position 2"),
        ] {
            assert!(check(text).unwrap_err().starts_with(problem), "{:?} for {text:?}", check(text));
            let exists = Name::parse("user", text);
            assert_eq!(exists.is_ok(), !text.contains('\u{85}'), "{text:?} exists, and can be ended");
        }
        for text in [
            "",
            "host-1:9102",
            "[fe80::1%eth0]:9102",
            "用户 一",
            "a\u{a0}b",
            "می\u{200c}خواهم",
            "👩\u{200d}👧",
            "❤\u{fe0f}\u{200d}🔥",
            "e\u{301}",
        ] {
            assert_eq!(check(text), Ok(()), "{text:?}");
        }
        let labels =
            |key: &str, value: &str| Labels::parse("labels", BTreeMap::from([(key.into(), value.into())])).unwrap();
        assert_eq!(labels("k ", "v").check_new("labels").unwrap_err().field, "labels (a key)");
        assert_eq!(labels("k", "v ").check_new("labels").unwrap_err().field, r#"labels["k"]"#);
        assert_eq!(labels("k", "v").check_new("labels"), Ok(()));
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
