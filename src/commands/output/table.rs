//! Tables: columns of texts and numbers, written one page at a time, at most as wide as the terminal.
//!
//! On a narrow terminal, texts are shortened first; then the rightmost columns are omitted. Never: shortens an identifier or
//! a number, because users copy them. Callers: `output` and the commands that define columns.

use super::text::{clean, cut, width};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnContent {
    /// A text, whose middle is omitted if it is too long.
    Text,
    /// A number: right-aligned and never shortened.
    Number,
    /// An identifier for use in other commands: never shortened.
    Id,
}

/// A column of a table. The columns are in order of importance.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    title: &'static str,
    content: ColumnContent,
    /// Whether only the wide format has the column.
    is_wide: bool,
}

impl Column {
    /// Creates a text column.
    pub const fn text(title: &'static str) -> Self {
        Self { title, content: ColumnContent::Text, is_wide: false }
    }

    /// Creates a number column.
    pub const fn number(title: &'static str) -> Self {
        Self { title, content: ColumnContent::Number, is_wide: false }
    }

    /// Creates a column that is never shortened.
    pub const fn id(title: &'static str) -> Self {
        Self { title, content: ColumnContent::Id, is_wide: false }
    }

    /// Restricts the column to the wide format.
    pub const fn wide(self) -> Self {
        Self { is_wide: true, ..self }
    }
}

/// Cells of all columns, wide ones included.
pub type TableRow = Vec<String>;

/// Separator of columns.
const GAP: &str = "  ";

/// Minimum width of shortened texts, before columns are omitted.
const TEXT_LEAST: usize = 8;

/// A table in progress.
#[derive(Debug)]
pub struct TextTable {
    columns: &'static [Column],
    /// Indexes of the visible columns.
    shown: Vec<usize>,
    /// Widths of the visible columns; they only increase.
    widths: Vec<usize>,
    has_headers: bool,
    /// Maximum total width.
    fit: Option<usize>,
    is_begun: bool,
}

impl TextTable {
    /// Creates a table of these columns, at most `fit` wide if set.
    pub fn new(columns: &'static [Column], is_wide: bool, has_headers: bool, fit: Option<usize>) -> Self {
        let shown = columns.iter().enumerate().filter(|(_, column)| is_wide || !column.is_wide);
        let shown: Vec<usize> = shown.map(|(at, _)| at).collect();
        Self { columns, widths: vec![0; shown.len()], shown, has_headers, fit, is_begun: false }
    }

    /// Returns the next rows, with the headers before the first.
    pub fn rows(&mut self, rows: &[TableRow]) -> String {
        let mut lines: Vec<Vec<String>> = Vec::with_capacity(rows.len() + 1);
        if !self.is_begun && self.has_headers {
            lines.push(self.shown.iter().filter_map(|at| Some(self.columns.get(*at)?.title.to_owned())).collect());
        }
        let cell = |row: &TableRow, at: usize| row.get(at).map(|cell| clean(cell).into_owned()).unwrap_or_default();
        lines.extend(rows.iter().map(|row| self.shown.iter().map(|at| cell(row, *at)).collect()));
        self.measure(&lines);
        self.is_begun = true;
        lines.iter().map(|line| self.line(line)).collect()
    }

    /// Widens columns to their cells within the maximum width. An omitted column stays omitted.
    fn measure(&mut self, lines: &[Vec<String>]) {
        for line in lines {
            for (widest, cell) in self.widths.iter_mut().zip(line) {
                *widest = (*widest).max(width(cell));
            }
        }
        let Some(fit) = self.fit else { return };
        while self.least() > fit && self.shown.len() > 1 {
            self.shown.pop();
            self.widths.pop();
        }
        while self.total() > fit {
            let texts = self.shown.iter().zip(&mut self.widths).filter(|(at, width)| {
                self.columns.get(**at).is_some_and(|column| column.content == ColumnContent::Text)
                    && **width > TEXT_LEAST
            });
            let Some((_, widest)) = texts.max_by_key(|(_, width)| **width) else { break };
            *widest -= 1;
        }
    }

    fn total(&self) -> usize {
        self.widths.iter().sum::<usize>() + GAP.len() * self.widths.len().saturating_sub(1)
    }

    /// Returns the width with all texts shortened.
    fn least(&self) -> usize {
        let least = self.shown.iter().zip(&self.widths).map(|(at, width)| match self.columns.get(*at) {
            Some(column) if column.content == ColumnContent::Text => (*width).min(TEXT_LEAST),
            _ => *width,
        });
        least.sum::<usize>() + GAP.len() * self.widths.len().saturating_sub(1)
    }

    fn line(&self, cells: &[String]) -> String {
        let mut line = String::new();
        for ((at, width_max), cell) in self.shown.iter().zip(&self.widths).zip(cells) {
            let content = self.columns.get(*at).map_or(ColumnContent::Text, |column| column.content);
            let cell = if content == ColumnContent::Text { cut(cell, *width_max) } else { cell.as_str().into() };
            if !line.is_empty() {
                line.push_str(GAP);
            }
            let room = " ".repeat(width_max.saturating_sub(width(&cell)));
            match content {
                ColumnContent::Number => line.extend([room.as_str(), &cell]),
                ColumnContent::Text | ColumnContent::Id => line.extend([&*cell, room.as_str()]),
            }
        }
        line.truncate(line.trim_end().len());
        // A single column can be wider than the terminal.
        let mut line = self.fit.map_or_else(|| line.clone(), |fit| cut(&line, fit).into_owned());
        line.push('\n');
        line
    }
}

/// Returns one row as lines of title and value. Empty values are omitted.
pub fn details(columns: &'static [Column], row: &TableRow) -> String {
    let shown = || columns.iter().zip(row).filter(|(_, cell)| !cell.is_empty() && *cell != super::text::NOTHING);
    let widest = shown().map(|(column, _)| width(column.title)).max().unwrap_or(0);
    shown().map(|(column, cell)| format!("{:widest$}{GAP}{}\n", column.title, clean(cell))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[
        Column::text("EM"),
        Column::number("CORES"),
        Column::text("USER"),
        Column::number("TICKETS"),
        Column::text("LABELS").wide(),
    ];

    fn row(cells: [&str; 5]) -> TableRow {
        cells.map(str::to_owned).to_vec()
    }

    #[test]
    fn table_aligns_numbers_and_keeps_column_widths() {
        let mut table = TextTable::new(COLUMNS, false, true, None);
        let first = table.rows(&[row(["host1", "7", "al\x1bice", "1", "a=b"])]);
        assert_eq!(first, "EM     CORES  USER         TICKETS\nhost1      7  al\\u{1b}ice        1\n");
        let second = table.rows(&[row(["a-long-host", "1234567", "", "12", ""]), row(["x", "1", "y", "2", ""])]);
        let lines = "a-long-host  1234567                    12\nx                  1  y                  2\n";
        assert_eq!(second, lines);
        let mut wide = TextTable::new(COLUMNS, true, false, None);
        assert_eq!(wide.rows(&[row(["h", "1", "u", "2", "a=b"])]), "h  1  u  2  a=b\n");
    }

    #[test]
    fn table_fits_terminal_width() {
        let long = row([&"h".repeat(60), "1", &"ü".repeat(100), "2", ""]);
        for (fit, first) in
            [(60, "hhhhhhhhhh…hhhhhhhhhh  "), (30, "hhhhh…hhhhh  "), (12, "hhhhhh…hhhhh"), (3, "h…h"), (0, "")]
        {
            let mut table = TextTable::new(COLUMNS, false, true, Some(fit));
            let text = table.rows(&[long.clone(), row(["host2", "2", "bob", "3", ""])]);
            assert!(text.lines().all(|line| width(line) <= fit), "{fit}: {text}");
            assert!(text.lines().nth(1).unwrap_or_default().starts_with(first), "{fit}: {text}");
        }
        let mut narrow = TextTable::new(COLUMNS, false, true, Some(16));
        assert!(narrow.rows(&[long]).starts_with("EM         CORES\n"), "the right columns are omitted");
    }

    #[test]
    fn details_omit_empty_values() {
        let text = details(COLUMNS, &row(["h", "1", "-", "", "a\nb"]));
        assert_eq!(text, "EM      h\nCORES   1\nLABELS  a\\u{a}b\n");
    }
}
