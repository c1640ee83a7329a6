//! Output of commands: tables for display, API messages as JSON for programs. Callers: all commands.
//!
//! Never: lets a control character of a reply reach a terminal.
//!
//! - `table`, `text`: tables and texts; `json`: JSON; `progress`: progress of slow calls; `terminal`: terminal size.

use std::{
    io::{self, IsTerminal as _, Write},
    time::Duration,
};

use clap::{Args, ValueEnum};
use prost::Message;

use crate::config::parse_duration;
use rm_client::ApiCall;

use super::error::CommandFailure;

pub mod json;
pub mod progress;
pub mod table;
pub mod terminal;
pub mod text;

use table::{Column, Layout, TableRow, TextTable};

/// Output format of replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table for display, at most as wide as the terminal.
    Table,
    /// A table with more columns and complete values.
    Wide,
    /// The message of the API as JSON.
    Json,
    /// JSON on one line; a list has one line per element.
    Jsonl,
}

/// Output arguments: format and headers. They are global: valid before and after the command.
#[derive(Debug, Clone, Args)]
pub struct OutputArguments {
    /// table, wide (more columns, complete values), json (the message of the API), or jsonl (a line for each element).
    #[arg(
        short,
        long,
        global = true,
        value_enum,
        default_value = "table",
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    output: Format,

    /// Omit the header line of tables.
    #[arg(long, global = true)]
    no_headers: bool,
}

/// Argument `--watch`.
#[derive(Debug, Clone, Args)]
pub struct WatchArguments {
    /// Repeat the command until it is interrupted.
    #[arg(long, value_name = "INTERVAL", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
        value_parser = interval)]
    watch: Option<Duration>,
}

impl Default for OutputArguments {
    fn default() -> Self {
        Self { output: Format::Table, no_headers: false }
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    parse_duration("--watch", text, "100ms", "1h")
}

impl OutputArguments {
    /// Returns a printer with these settings.
    pub fn printer(&self) -> Printer {
        let size = terminal::size();
        Printer {
            to: Box::new(io::stdout()),
            format: self.output,
            has_headers: !self.no_headers,
            size,
            is_closed: false,
            screen: None,
        }
    }
}

/// Printer of replies. After its output is closed, it discards all text.
pub struct Printer {
    to: Box<dyn Write>,
    format: Format,
    has_headers: bool,
    /// Size of the terminal, if the output is one.
    size: Option<terminal::TerminalSize>,
    is_closed: bool,
    /// Collected text of the next screen.
    screen: Option<String>,
}

impl Printer {
    /// Returns the output format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns whether the output is JSON.
    pub fn is_json(&self) -> bool {
        matches!(self.format, Format::Json | Format::Jsonl)
    }

    /// Returns whether the output is closed.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Returns the number of visible rows, if limited.
    pub fn rows_max(&self) -> Option<usize> {
        let size = self.size.filter(|_| self.screen.is_some() && !self.is_json());
        size.map(|size| size.rows.saturating_sub(2).max(1))
    }

    /// Returns a table with these columns.
    pub fn table(&self, columns: &'static [Column]) -> TextTable {
        let layout = match self.size {
            _ if self.format == Format::Wide => Layout::Wide,
            Some(size) => Layout::Terminal(size.columns),
            None => Layout::Plain,
        };
        TextTable::new(columns, layout, self.has_headers)
    }

    /// Prints a table of a few rows.
    pub fn rows(&mut self, columns: &'static [Column], rows: &[TableRow]) -> Result<(), CommandFailure> {
        let text = self.table(columns).rows(rows);
        self.print(&text)
    }

    /// Prints a note about a table to standard error, if the output is a terminal that shows the table once.
    pub fn note(&self, note: &str) {
        if self.size.is_some() && self.screen.is_none() {
            // Without a reader of standard error, the note is dropped.
            let _ = writeln!(io::stderr(), "{}", text::clean(note));
        }
    }

    /// Prints text unchanged. The caller must have escaped control characters.
    pub fn print(&mut self, text: &str) -> Result<(), CommandFailure> {
        if let Some(screen) = &mut self.screen {
            screen.push_str(text);
            return Ok(());
        }
        if self.is_closed {
            return Ok(());
        }
        match self.to.write_all(text.as_bytes()).and_then(|()| self.to.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.is_closed = true;
                Ok(())
            }
            written => Ok(written?),
        }
    }

    /// Prints a reply that is not a list: the message as JSON, or a text with control characters escaped.
    pub fn answer<Q, A: Message>(
        &mut self,
        call: &ApiCall<Q, A>,
        answer: &A,
        text: impl FnOnce() -> String,
    ) -> Result<(), CommandFailure> {
        let text = match self.format {
            Format::Table | Format::Wide => text::clean_lines(&text()),
            Format::Json => json::pretty(&json::answer_of(call)?, answer, 0)? + "\n",
            Format::Jsonl => json::line(&json::answer_of(call)?, answer)? + "\n",
        };
        self.print(&text)
    }

    /// Calls `round` repeatedly at the interval of `--watch`, or once. On a terminal, each round replaces the last one.
    /// After a first success, temporary failures are printed and retried.
    pub async fn repeat<T>(
        &mut self,
        watch: &WatchArguments,
        mut round: impl AsyncFnMut(&mut Self) -> Result<T, CommandFailure>,
    ) -> Result<T, CommandFailure> {
        let Some(interval) = watch.watch else { return round(self).await };
        let is_screen = self.size.is_some();
        let mut is_first = true;
        loop {
            self.screen = is_screen.then(String::new);
            let answer = round(self).await;
            let gathered = self.screen.take();
            match answer {
                Ok(answer) if self.is_closed => return Ok(answer),
                Ok(_) => {}
                Err(failure) if is_first || !failure.passes() => return Err(failure),
                Err(failure) => failure.print(),
            }
            if let Some(screen) = gathered.filter(|screen| !screen.is_empty()) {
                self.show(&screen)?;
            }
            is_first = false;
            tokio::time::sleep(interval).await;
            // The terminal size can change between rounds.
            self.size = self.size.and_then(|_| terminal::size());
        }
    }

    /// Shows as many lines as the terminal has.
    fn show(&mut self, text: &str) -> Result<(), CommandFailure> {
        let rows = self.size.map_or(usize::MAX, |size| size.rows.saturating_sub(1).max(1));
        let seen: String = text.split_inclusive('\n').take(if self.is_json() { usize::MAX } else { rows }).collect();
        self.print(&format!("{}{seen}", terminal::CLEAR))
    }
}

/// Returns whether a user can confirm on a terminal.
pub fn is_attended() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}
