//! Allowed differences (`allowed.txt`): new names, and names that are not compared. Callers: `replay`, `run` and `tables`.
//!
//! A line that no comparison of a whole replay uses is an error, so that the file cannot hide a later difference.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

#[derive(Default)]
pub struct Allowed {
    /// New name by kind and old name; `None` if the name is not compared.
    lines: BTreeMap<(String, String), Option<String>>,
    used: Mutex<BTreeSet<(String, String)>>,
}

impl Allowed {
    pub fn read(text: &str) -> Self {
        let mut lines = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
            let (difference, _) = line.split_once(" : ").unwrap_or_else(|| panic!("a line without a reason: {line}"));
            let (kind, names) = difference.split_once(' ').unwrap_or_else(|| panic!("a line without a kind: {line}"));
            let kinds = ["table", "column", "method", "reason", "metadata", "named", "field", "word"];
            assert!(kinds.contains(&kind), "an unknown kind: {line}");
            let (old, new) =
                names.split_once(" -> ").map_or((names, None), |(old, new)| (old, Some(new.trim().to_owned())));
            let before = lines.insert((kind.to_owned(), old.trim().to_owned()), new);
            assert!(before.is_none(), "two lines for the same: {line}");
        }
        Self { lines, used: Mutex::default() }
    }

    fn get(&self, kind: &str, old: &str) -> Option<&Option<String>> {
        let key = (kind.to_owned(), old.to_owned());
        let found = self.lines.get(&key);
        if found.is_some() {
            self.used.lock().unwrap().insert(key);
        }
        found
    }

    /// Returns the new name; the old one without a line.
    pub fn name<'a>(&'a self, kind: &str, old: &'a str) -> &'a str {
        self.get(kind, old).and_then(Option::as_deref).unwrap_or(old)
    }

    /// Returns whether the name is not compared.
    pub fn is_left_out(&self, kind: &str, old: &str) -> bool {
        self.get(kind, old) == Some(&None)
    }

    /// Returns the lines that no comparison used.
    pub fn unused(&self) -> Vec<String> {
        let used = self.used.lock().unwrap();
        self.lines.keys().filter(|key| !used.contains(*key)).map(|(kind, old)| format!("{kind} {old}")).collect()
    }
}
