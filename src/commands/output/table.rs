//! Tables: columns of names, texts and numbers, written one page at a time.
//!
//! A terminal shows the columns that fit: the rightmost ones are left out first, and never those that identify a row. If these
//! alone do not fit, the longest names lose their middle, as long as they still differ. The first column stays whole: its names are
//! arguments of other commands. A pipe and the wide format have whole values. Callers: `output` and the commands that define columns.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::SystemTime,
};

use prost_types::Timestamp;

use super::text::{self, clean, cut, width};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnContent {
    /// Words, never shortened.
    Text,
    /// A number, an amount or a time: right-aligned and never shortened.
    Number,
    /// A name, whose middle is omitted if it is too long and not in the first column.
    Name,
    /// An EM: a name whose end is omitted if all rows share it. The column can also have scopes, and "any" for any EM.
    Em,
    /// A ticket id: a terminal shows its last characters.
    Ticket,
}

/// A column of a table. The columns are in order of importance.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    title: &'static str,
    content: ColumnContent,
    /// Whether it identifies a row, and is never left out.
    is_key: bool,
    /// Whether a pipe has the column only in the wide format.
    is_wide: bool,
}

impl Column {
    const fn new(title: &'static str, content: ColumnContent) -> Self {
        Self { title, content, is_key: false, is_wide: false }
    }

    /// Creates a column of words.
    pub const fn text(title: &'static str) -> Self {
        Self::new(title, ColumnContent::Text)
    }

    /// Creates a column of numbers, amounts or times.
    pub const fn number(title: &'static str) -> Self {
        Self::new(title, ColumnContent::Number)
    }

    /// Creates a column of names.
    pub const fn name(title: &'static str) -> Self {
        Self::new(title, ColumnContent::Name)
    }

    /// Creates a column of EMs.
    pub const fn em(title: &'static str) -> Self {
        Self::new(title, ColumnContent::Em)
    }

    /// Creates a column of ticket ids.
    pub const fn ticket(title: &'static str) -> Self {
        Self::new(title, ColumnContent::Ticket)
    }

    /// Marks a column that identifies a row, or has the reply of the command.
    pub const fn key(self) -> Self {
        Self { is_key: true, ..self }
    }

    /// Restricts the column to terminals and the wide format.
    pub const fn wide(self) -> Self {
        Self { is_wide: true, ..self }
    }
}

/// A cell of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    /// A text; names are quoted already.
    Text(String),
    /// A time; `None` if it is not known.
    Time(Option<Timestamp>),
    /// Start of a period: a time whose ages would be alike.
    Period(Option<Timestamp>),
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<Option<&Timestamp>> for Cell {
    fn from(time: Option<&Timestamp>) -> Self {
        Self::Time(time.copied())
    }
}

impl Cell {
    /// Returns the whole value.
    fn whole(&self) -> String {
        match self {
            Self::Text(text) => clean(text).into_owned(),
            Self::Time(time) | Self::Period(time) => text::time(time.as_ref()),
        }
    }

    /// Returns the value for a terminal: a time as an age, and a period as its minute.
    fn short(&self) -> String {
        match self {
            Self::Text(_) | Self::Time(None) | Self::Period(None) => self.whole(),
            Self::Time(Some(time)) => text::age(time, SystemTime::now()),
            Self::Period(Some(time)) => text::minute(time, SystemTime::now()),
        }
    }
}

/// Cells of all columns, wide ones included.
pub type TableRow = Vec<Cell>;

/// Creates the cells of a row.
macro_rules! cells {
    ($($cell:expr),* $(,)?) => { vec![$($crate::commands::output::table::Cell::from($cell)),*] };
}
pub(crate) use cells;

/// Output that a table is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A pipe or a file: standard columns with whole values.
    Plain,
    /// All columns with whole values.
    Wide,
    /// A terminal of this width: the columns that fit.
    Terminal(usize),
}

/// Separator of columns.
const GAP: &str = "  ";

/// Least number of shown characters of a name or a ticket id.
const SHORTEST: usize = 8;

/// A table in progress. The first page decides which columns are shown, and how.
#[derive(Debug)]
pub struct TextTable {
    columns: &'static [Column],
    layout: Layout,
    /// Indexes of the shown columns, with their widths; the widths only increase.
    shown: BTreeMap<usize, usize>,
    /// Omitted end of all EMs.
    suffix: String,
    /// Number of shown characters of ticket ids.
    ticket_tail: usize,
    has_headers: bool,
    is_begun: bool,
}

impl TextTable {
    /// Creates a table of these columns.
    pub fn new(columns: &'static [Column], layout: Layout, has_headers: bool) -> Self {
        let is_shown = |column: &Column| layout != Layout::Plain || !column.is_wide;
        let shown = columns.iter().enumerate().filter(|(_, column)| is_shown(column)).map(|(at, _)| (at, 0)).collect();
        Self { columns, layout, shown, suffix: String::new(), ticket_tail: SHORTEST, has_headers, is_begun: false }
    }

    /// Returns the next rows, with the headers before the first.
    pub fn rows(&mut self, rows: &[TableRow]) -> String {
        if matches!(self.layout, Layout::Terminal(_)) && !self.is_begun {
            self.shorten(rows);
        }
        let mut lines: Vec<Vec<String>> = Vec::with_capacity(rows.len() + 1);
        if !self.is_begun && self.has_headers {
            lines.push(self.columns.iter().map(|column| column.title.to_owned()).collect());
        }
        lines.extend(rows.iter().map(|row| self.line_cells(row)));
        self.is_begun = true;
        for line in &lines {
            for (at, widest) in &mut self.shown {
                *widest = (*widest).max(line.get(*at).map_or(0, |cell| width(cell)));
            }
        }
        if let Layout::Terminal(fit) = self.layout {
            self.leave_out(fit);
            self.cut_names(fit, &lines);
        }
        lines.iter().map(|line| self.line(line)).collect()
    }

    /// Returns what the shown rows do not say: the omitted end of names, and the omitted columns.
    pub fn notes(&self) -> String {
        let suffix = if self.suffix.is_empty() { String::new() } else { format!(" Names end in {}", self.suffix) };
        let is_complete = self.layout == Layout::Wide || self.shown.len() == self.columns.len();
        let more = if is_complete { "" } else { " More columns: -o wide" };
        match (suffix.is_empty(), more.is_empty()) {
            (false, false) => format!("{suffix}.{more}"),
            _ => format!("{suffix}{more}"),
        }
    }

    /// Returns the texts of a row, in all columns.
    fn line_cells(&self, row: &TableRow) -> Vec<String> {
        let Layout::Terminal(_) = self.layout else { return row.iter().map(Cell::whole).collect() };
        let cell = |(column, cell): (&Column, &Cell)| {
            let text = cell.short();
            match column.content {
                ColumnContent::Em if is_em(&text) => text.strip_suffix(&self.suffix).unwrap_or(&text).to_owned(),
                ColumnContent::Ticket => tail(&text, self.ticket_tail).to_owned(),
                _ => text,
            }
        };
        self.columns.iter().zip(row).map(cell).collect()
    }

    /// Selects the omitted end of EMs, and the shown end of ticket ids.
    fn shorten(&mut self, rows: &[TableRow]) {
        let of = |content: ColumnContent| {
            let columns: Vec<usize> =
                self.columns.iter().enumerate().filter(|(_, c)| c.content == content).map(|(at, _)| at).collect();
            let cells = rows.iter().flat_map(|row| columns.iter().filter_map(|at| row.get(*at)).collect::<Vec<_>>());
            cells.map(Cell::whole).filter(|text| text != text::NOTHING).collect::<BTreeSet<String>>()
        };
        let mut ems = of(ColumnContent::Em);
        ems.retain(|name| is_em(name));
        self.suffix = shared_end(&ems).to_owned();
        let tickets = of(ColumnContent::Ticket);
        let longest = tickets.iter().map(String::len).max().unwrap_or(0);
        let is_unique =
            |length: &usize| tickets.iter().map(|id| tail(id, *length)).collect::<BTreeSet<_>>().len() == tickets.len();
        self.ticket_tail = (SHORTEST..longest).find(is_unique).unwrap_or(longest);
    }

    /// Leaves out columns from the right, but none that identifies a row.
    fn leave_out(&mut self, fit: usize) {
        while self.total() > fit {
            let is_key = |at: usize| self.columns.get(at).is_none_or(|column| column.is_key);
            let Some(last) = self.shown.keys().rev().copied().find(|at| !is_key(*at)) else { return };
            self.shown.remove(&last);
        }
    }

    /// Narrows the longest names, as long as different names remain different. Titles and the first column stay whole.
    fn cut_names(&mut self, fit: usize, lines: &[Vec<String>]) {
        let is_name = |column: &Column| matches!(column.content, ColumnContent::Name | ColumnContent::Em);
        let mut least: BTreeMap<usize, usize> = BTreeMap::new();
        while self.total() > fit {
            let mut widest = None;
            for (at, column_width) in &self.shown {
                let Some(column) = self.columns.get(*at).filter(|column| *at > 0 && is_name(column)) else { continue };
                let least = least.entry(*at).or_insert_with(|| {
                    shortest(lines.iter().filter_map(|line| line.get(*at))).max(width(column.title))
                });
                if *column_width > *least && widest.is_none_or(|(_, other)| *column_width > other) {
                    widest = Some((*at, *column_width));
                }
            }
            let Some((at, width)) = widest else { return };
            self.shown.insert(at, width - 1);
        }
    }

    fn total(&self) -> usize {
        self.shown.values().sum::<usize>() + GAP.len() * self.shown.len().saturating_sub(1)
    }

    fn line(&self, cells: &[String]) -> String {
        let mut line = String::new();
        for (at, width_max) in &self.shown {
            let (Some(column), Some(cell)) = (self.columns.get(*at), cells.get(*at)) else { continue };
            let is_name = matches!(column.content, ColumnContent::Name | ColumnContent::Em);
            let cell = if is_name { cut(cell, *width_max) } else { cell.as_str().into() };
            if *at > 0 && !line.is_empty() {
                line.push_str(GAP);
            }
            let room = " ".repeat(width_max.saturating_sub(width(&cell)));
            match column.content {
                ColumnContent::Number => line.extend([room.as_str(), &cell]),
                _ => line.extend([&*cell, room.as_str()]),
            }
        }
        line.truncate(line.trim_end().len());
        line.push('\n');
        line
    }
}

/// Returns whether a cell is the name of an EM: it has an end, and is no scope.
fn is_em(text: &str) -> bool {
    text.contains(['.', ':']) && !text.contains('=')
}

/// Returns the last characters of an ASCII text.
fn tail(text: &str, length: usize) -> &str {
    text.get(text.len().saturating_sub(length)..).unwrap_or(text)
}

/// Returns the end that all names share, from a dot or a colon on; empty for fewer than two names.
pub fn shared_end(names: &BTreeSet<String>) -> &str {
    let mut all = names.iter();
    let (Some(first), true) = (all.next(), names.len() > 1) else { return "" };
    let starts = first.match_indices(['.', ':']).map(|(at, _)| at).filter(|at| *at > 0);
    let ends = starts.filter_map(|at| first.get(at..));
    let is_shared = |end: &&str| names.iter().all(|name| name.len() > end.len() && name.ends_with(end));
    ends.into_iter().find(is_shared).unwrap_or("")
}

/// Returns the least width at which different names remain different.
fn shortest<'t>(names: impl Iterator<Item = &'t String>) -> usize {
    let names: BTreeSet<&String> = names.collect();
    let longest = names.iter().map(|name| width(name)).max().unwrap_or(0);
    let is_unique =
        |columns: &usize| names.iter().map(|name| cut(name, *columns)).collect::<BTreeSet<_>>().len() == names.len();
    (SHORTEST..longest).find(is_unique).unwrap_or(longest)
}

/// Returns one row as lines of title and value. Empty values are omitted.
pub fn details(columns: &[Column], row: &TableRow) -> String {
    let cells: Vec<(&str, String)> =
        columns.iter().map(|column| column.title).zip(row.iter().map(Cell::whole)).collect();
    let shown = || cells.iter().filter(|(_, cell)| !cell.is_empty() && cell != text::NOTHING);
    let widest = shown().map(|(title, _)| width(title)).max().unwrap_or(0);
    shown().map(|(title, cell)| format!("{title:widest$}{GAP}{cell}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[
        Column::em("EM").key(),
        Column::number("CORES").key(),
        Column::name("USER"),
        Column::number("TICKETS"),
        Column::text("LABELS").wide(),
    ];

    fn row(cells: [&str; 5]) -> TableRow {
        cells.map(Cell::from).to_vec()
    }

    #[test]
    fn table_aligns_numbers_and_keeps_column_widths() {
        let mut table = TextTable::new(COLUMNS, Layout::Plain, true);
        let first = table.rows(&[row(["host1", "7", "al\x1bice", "1", "a=b"])]);
        assert_eq!(first, "EM     CORES  USER         TICKETS\nhost1      7  al\\u{1b}ice        1\n");
        let second = table.rows(&[row(["a-long-host", "1234567", "", "12", ""]), row(["x", "1", "y", "2", ""])]);
        let lines = "a-long-host  1234567                    12\nx                  1  y                  2\n";
        assert_eq!(second, lines);
        let mut wide = TextTable::new(COLUMNS, Layout::Wide, false);
        assert_eq!(wide.rows(&[row(["h", "1", "u", "2", "a=b"])]), "h  1  u  2  a=b\n");
    }

    #[test]
    fn terminal_table_leaves_out_columns_from_the_right() {
        let rows =
            [row(["h1.example:9", "7", "alice", "1", "zone=a"]), row(["h2.example:9", "8", "bob", "2", "zone=b"])];
        for (fit, first, notes) in [
            (80, "EM  CORES  USER   TICKETS  LABELS", " Names end in .example:9"),
            (32, "EM  CORES  USER   TICKETS", " Names end in .example:9. More columns: -o wide"),
            (20, "EM  CORES  USER", " Names end in .example:9. More columns: -o wide"),
            (9, "EM  CORES", " Names end in .example:9. More columns: -o wide"),
            (3, "EM  CORES", " Names end in .example:9. More columns: -o wide"),
        ] {
            let mut table = TextTable::new(COLUMNS, Layout::Terminal(fit), true);
            let text = table.rows(&rows);
            assert_eq!(text.lines().next(), Some(first), "{fit}");
            assert!(text.lines().nth(1).unwrap_or_default().starts_with("h1      7"), "{fit}: {text}");
            assert_eq!(table.notes(), notes, "{fit}");
        }
    }

    #[test]
    fn terminal_table_cuts_names_only_while_they_differ() {
        const NAMES: &[Column] = &[Column::em("EM").key(), Column::name("USER").key()];
        let named = |user: &str| vec![Cell::from("host1"), Cell::from(user)];
        let long = |end: &str| named(&format!("{}{end}", "h".repeat(40)));
        let mut table = TextTable::new(NAMES, Layout::Terminal(20), true);
        let text = table.rows(&[long("1"), long("2"), named("host3")]);
        assert!(text.lines().all(|line| width(line) <= 20), "{text}");
        assert!(text.contains("hhhhhh..hhhh1") && text.contains("hhhhhh..hhhh2") && text.contains("host3"), "{text}");
        // The names differ in their middle alone.
        let middle = |at: &str| named(&format!("{}{at}{}", "h".repeat(20), "h".repeat(20)));
        let mut table = TextTable::new(NAMES, Layout::Terminal(20), true);
        let text = table.rows(&[middle("1"), middle("2")]);
        let lines: BTreeSet<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
    }

    #[test]
    fn terminal_table_keeps_first_column_whole() {
        let name = "h".repeat(40);
        for rows in
            [vec![row([&name, "1", "", "", ""])], vec![row([&name, "1", "", "", ""]), row(["h", "1", "", "", ""])]]
        {
            let mut table = TextTable::new(COLUMNS, Layout::Terminal(20), false);
            assert_eq!(table.rows(&rows).lines().next(), Some(format!("{name}  1").as_str()));
        }
    }

    #[test]
    fn terminal_table_shows_unique_ends_of_tickets() {
        const TICKETS: &[Column] = &[Column::ticket("TICKET").key()];
        let ids = ["01a2109f-58b2-76c3-a59b-961daf2017a1", "01a2109f-58b2-76c3-a59b-9615af2017a1"];
        let rows = ids.map(|id| vec![Cell::from(id)]);
        let mut table = TextTable::new(TICKETS, Layout::Terminal(80), false);
        assert_eq!(table.rows(&rows), "daf2017a1\n5af2017a1\n");
        let mut table = TextTable::new(TICKETS, Layout::Plain, false);
        assert_eq!(table.rows(&rows), ids.map(|id| format!("{id}\n")).concat());
    }

    #[test]
    fn details_omit_empty_values() {
        let text = details(COLUMNS, &row(["h", "1", "-", "", "a\nb"]));
        assert_eq!(text, "EM      h\nCORES   1\nLABELS  a\\u{a}b\n");
    }
}
