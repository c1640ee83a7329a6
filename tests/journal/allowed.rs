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
            let kinds =
                ["table", "column", "method", "reason", "metadata", "named", "field", "sent", "word", "part", "absent"];
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

    /// Returns the old name.
    pub fn old_name<'a>(&'a self, kind: &str, new: &'a str) -> &'a str {
        let is_new = |((of, _), to): &(&(String, String), &Option<String>)| of == kind && to.as_deref() == Some(new);
        self.lines.iter().find(is_new).map_or(new, |((_, old), _)| {
            self.get(kind, old);
            old
        })
    }

    /// Returns the new name of a column.
    pub fn column<'a>(&'a self, table: &str, old: &'a str) -> &'a str {
        self.get("column", &format!("{table}.{old}")).and_then(Option::as_deref).unwrap_or(old)
    }

    /// Returns the old name of a column.
    pub fn old_column(&self, table: &str, new: &str) -> String {
        let of_table = |((kind, old), to): (&(String, String), &Option<String>)| {
            let old = old.strip_prefix(table)?.strip_prefix('.')?;
            (kind == "column" && to.as_deref() == Some(new)).then(|| old.to_owned())
        };
        self.lines.iter().find_map(of_table).unwrap_or_else(|| new.to_owned())
    }

    /// Returns the columns of a table that no longer exist, with the value that each row had.
    pub fn absent(&self, table: &str) -> Vec<(String, String)> {
        let of_table = |((kind, old), value): (&(String, String), &Option<String>)| {
            let column = old.strip_prefix(table)?.strip_prefix('.').filter(|_| kind == "absent")?;
            self.get(kind, old);
            Some((column.to_owned(), value.clone()?))
        };
        self.lines.iter().filter_map(of_table).collect()
    }

    /// Returns a text of a reply with its new parts.
    pub fn text(&self, text: &str) -> String {
        let parts = self.lines.iter().filter(|((kind, old), _)| kind == "part" && text.contains(old.as_str()));
        let parts = parts.map(|((kind, old), _)| (old, self.name(kind, old)));
        parts.fold(self.name("word", text).to_owned(), |text, (old, new)| text.replace(old, new))
    }

    /// Returns a text of a reply with its old parts, for a comparison by hash.
    pub fn old_text(&self, text: &str) -> String {
        let parts =
            self.lines.iter().filter_map(|((kind, old), new)| Some((old, new.as_ref().filter(|_| kind == "part")?)));
        parts.fold(self.old_name("word", text).to_owned(), |text, (old, new)| text.replace(new, old))
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
