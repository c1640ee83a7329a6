//! Names and labels of callers: validated once at the edge, then shared without copying.
//!
//! Existing names are parsed by the wide rules of [`Name::parse`]. Names that a call creates must also pass [`check_new`].
//! Never: accepts control characters. Callers: all services and the store.

use std::{collections::BTreeMap, fmt, sync::Arc};

/// Maximum length of a name, label key or label value, in characters.
pub const NAME_CHARS_MAX: usize = 255;

/// Maximum number of labels of one EM or request.
pub const LABELS_MAX: usize = 32;

/// Maximum length of all label keys and values together, in bytes. Every row and page about the EM or ticket contains them.
pub const LABELS_BYTES_MAX: usize = 6 * 1024;

/// An invalid field of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct FieldError {
    /// Path of the field in the request, such as `em.instance`.
    pub field: String,
    /// The problem and the valid form.
    pub problem: String,
}

impl FieldError {
    /// Creates an error for `field`.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// A non-empty name of at most [`NAME_CHARS_MAX`] characters without control characters. All other characters are valid,
/// because names are never joined into strings and split again. [`Name::parse_new`] restricts new names further.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(Arc<str>);

impl Name {
    /// Parses the name in `field`.
    ///
    /// # Errors
    /// An empty text, a control character, or more than [`NAME_CHARS_MAX`] characters.
    pub fn parse(field: &str, text: &str) -> Result<Self, FieldError> {
        if text.is_empty() {
            return Err(FieldError::new(field, "must not be empty"));
        }
        check_text(field, text)?;
        Ok(Self(text.into()))
    }

    /// As [`Name::parse`]; an empty text is no name.
    ///
    /// # Errors
    /// The errors of [`Name::parse`].
    pub fn parse_optional(field: &str, text: &str) -> Result<Option<Self>, FieldError> {
        if text.is_empty() { Ok(None) } else { Self::parse(field, text).map(Some) }
    }

    /// Parses a name that a call creates, by the stricter rules of [`check_new`].
    ///
    /// # Errors
    /// The text is not a name, or not valid as a new name.
    pub fn parse_new(field: &str, text: &str) -> Result<Self, FieldError> {
        let name = Self::parse(field, text)?;
        check_new(field, text).map(|()| name)
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Parses the application name and the instance below the path `field`.
pub(super) fn parse_instance(field: &str, application_name: &str, instance: &str) -> Result<(Name, Name), FieldError> {
    let application_name = Name::parse(&format!("{field}.application_name"), application_name)?;
    Ok((application_name, Name::parse(&format!("{field}.instance"), instance)?))
}

/// Checks that `field` has at most `most` elements, which `what` names.
///
/// # Errors
/// More elements.
pub fn check_at_most(field: &str, count: usize, what: &str, most: usize) -> Result<(), FieldError> {
    match count <= most {
        true => Ok(()),
        false => Err(FieldError::new(field, format!("has {count} {what}; at most {most} are allowed"))),
    }
}

/// Checks the length of a possibly empty text, and that it has no control characters.
pub fn check_text(field: &str, text: &str) -> Result<(), FieldError> {
    check_at_most(field, text.chars().count(), "characters", NAME_CHARS_MAX)?;
    match text.chars().position(char::is_control) {
        Some(at) => Err(FieldError::new(field, format!("has a control character at position {at}"))),
        None => Ok(()),
    }
}

/// Checks a name that a call creates, or a part of one; an empty text is valid.
///
/// Existing names are not checked by this function, so that lists, releases, unregistrations and deletions of them continue
/// to work.
///
/// # Errors
/// White space at an end, a line separator, or a format character. U+200C and U+200D are valid between two visible
/// characters, where several scripts and composed emoji need them.
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

/// Returns whether the character is in Unicode category Cf: invisible, or changing the display of others.
const fn is_format(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}' | '\u{891}' | '\u{8e2}'
    ) || matches!(c, '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}')
        || matches!(c, '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e007f}')
}

/// Labels of an EM or request: at most [`LABELS_MAX`] keys with values, at most [`LABELS_BYTES_MAX`] bytes in total.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels(Arc<BTreeMap<String, String>>);

impl Labels {
    /// Parses the labels in `field`.
    ///
    /// # Errors
    /// Too many labels or bytes, or an invalid key or value.
    pub fn parse(field: &str, labels: BTreeMap<String, String>) -> Result<Self, FieldError> {
        check_at_most(field, labels.len(), "labels", LABELS_MAX)?;
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

    /// Checks labels that a call creates, by the rules of [`check_new`].
    ///
    /// # Errors
    /// The first key or value that is not valid as a new name.
    pub fn check_new(&self, field: &str) -> Result<(), FieldError> {
        self.0.iter().try_for_each(|(key, value)| check_new_label(field, key, value))
    }

    /// Returns the labels by key.
    pub fn as_map(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

/// Checks a label that a call creates, by the rules of [`check_new`].
///
/// # Errors
/// The key or the value is not valid as a new name.
pub fn check_new_label(field: &str, key: &str, value: &str) -> Result<(), FieldError> {
    check_new(&format!("{field} (a key)"), key)?;
    check_new(&format!("{field}[{key:?}]"), value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_linkis_separators_are_accepted() {
        for text in ["host-1:9102", "a,b", "用户", " ", "a=b/c"] {
            assert_eq!(Name::parse("user", text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn invalid_name_is_refused_with_field() {
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
            assert_eq!(exists.is_ok(), !text.contains('\u{85}'), "{text:?} may exist already, and can be ended");
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
