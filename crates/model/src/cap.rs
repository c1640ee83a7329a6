//! Caps: maxima that a request sets for itself, for example by a budget that its sender knows.
//!
//! A cap is decided like a limit, on the request's own counter. It belongs to the request, not to its ticket.
//! Callers: the assessment, the limits, and the parser of requests.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use super::resource::Dimension;

/// Maximum number of caps in one request.
pub const CAPS_MAX: usize = 4;

/// A maximum for the request's own counter in a label set that a limit counts. A lower limit takes precedence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cap {
    /// Label names of the label set.
    pub keys: BTreeSet<String>,
    /// Maximum per dimension, including the request.
    pub max: BTreeMap<Dimension, i64>,
}

/// For display; not parsed.
impl fmt::Display for Cap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the request's own cap for {}: at most", self.key_list())?;
        write_maxima(f, &self.max)
    }
}

impl Cap {
    /// Returns the label names, separated by commas, for display.
    pub fn key_list(&self) -> String {
        self.keys.iter().map(String::as_str).collect::<Vec<_>>().join(",")
    }
}

/// Writes maxima for display, after the words "at most".
pub(super) fn write_maxima(f: &mut fmt::Formatter<'_>, maxima: &BTreeMap<Dimension, i64>) -> fmt::Result {
    for (number, (dimension, max)) in maxima.iter().enumerate() {
        write!(f, "{} {max} {dimension}", if number == 0 { "" } else { "," })?;
    }
    Ok(())
}
