//! Caps: what a request allows itself at most, by whatever it learnt that from.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use super::resource::Dimension;

/// How many caps a request may carry.
pub const CAPS_MAX: usize = 4;

/// A maximum of a request's own, for its own counter of a label set that some rule has counted. Where a rule allows less, that decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cap {
    /// The names of the labels.
    pub keys: BTreeSet<String>,
    /// The maximum, dimension by dimension, of what is held there with the request.
    pub max: BTreeMap<Dimension, i64>,
}

/// For people: not to be taken apart again.
impl fmt::Display for Cap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the request's own cap for {}: at most", self.key_list())?;
        write_maxima(f, &self.max)
    }
}

impl Cap {
    /// The names of its labels, for people.
    pub fn key_list(&self) -> String {
        self.keys.iter().map(String::as_str).collect::<Vec<_>>().join(",")
    }
}

/// Maxima for people, behind "at most".
pub(super) fn write_maxima(f: &mut fmt::Formatter<'_>, maxima: &BTreeMap<Dimension, i64>) -> fmt::Result {
    for (number, (dimension, max)) in maxima.iter().enumerate() {
        write!(f, "{} {max} {dimension}", if number == 0 { "" } else { "," })?;
    }
    Ok(())
}
