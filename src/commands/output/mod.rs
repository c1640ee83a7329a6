//! What commands print: tables for people, the API's own messages for programs, and nothing that does something to a terminal.

use std::{
    io::{self, IsTerminal as _, Write},
    time::Duration,
};

use clap::{Args, ValueEnum};
use prost::Message;

use crate::{client::Call, config::parse_duration};

use super::failure::Failure;

pub mod json;
pub mod progress;
pub mod table;
pub mod terminal;
pub mod text;

use table::{Column, Row, Table};

/// How answers are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people; on a terminal no wider than it.
    Table,
    /// The same with more columns, and nothing cut.
    Wide,
    /// The API's own message, as JSON.
    Json,
    /// The same on one line; of lists, each element on one.
    Jsonl,
}

/// How to print.
#[derive(Debug, Clone, Args)]
pub struct OutputArguments {
    /// How to print what is answered.
    #[arg(short, long, value_enum, default_value = "table", value_name = "FORMAT")]
    output: Format,

    /// Print tables without their first line.
    #[arg(long)]
    no_headers: bool,
}

/// Whether to ask again and again.
#[derive(Debug, Clone, Args)]
pub struct WatchArguments {
    /// Ask again and again, until the command is interrupted.
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
    /// To print so.
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

/// Prints what commands are answered. When nobody reads any more, it stays silent.
pub struct Printer {
    to: Box<dyn Write>,
    format: Format,
    has_headers: bool,
    /// Of the terminal, if that is where it goes.
    size: Option<terminal::Size>,
    is_closed: bool,
    /// What is to be on the screen, while it is gathered.
    screen: Option<String>,
}

impl Printer {
    /// As it was asked for.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Whether programs read it.
    pub fn is_json(&self) -> bool {
        matches!(self.format, Format::Json | Format::Jsonl)
    }

    /// Whether nobody reads it any more.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// How many rows can be seen, if not all of them.
    pub fn rows_max(&self) -> Option<usize> {
        let size = self.size.filter(|_| self.screen.is_some() && !self.is_json());
        size.map(|size| size.rows.saturating_sub(2).max(1))
    }

    /// A table to be printed.
    pub fn table(&self, columns: &'static [Column]) -> Table {
        let is_wide = self.format == Format::Wide;
        let fit = self.size.filter(|_| !is_wide).map(|size| size.columns);
        Table::new(columns, is_wide, self.has_headers, fit)
    }

    /// A table of few rows.
    pub fn rows(&mut self, columns: &'static [Column], rows: &[Row]) -> Result<(), Failure> {
        let text = self.table(columns).rows(rows);
        self.print(&text)
    }

    /// Text as it is: nothing harmful may stand in it.
    pub fn print(&mut self, text: &str) -> Result<(), Failure> {
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

    /// An answer that is no list: the message for programs, and a text for people, of which what is harmful is taken out.
    pub fn answer<Q, A: Message>(
        &mut self,
        call: &Call<Q, A>,
        answer: &A,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        let text = match self.format {
            Format::Table | Format::Wide => text::clean_lines(&text()),
            Format::Json => json::pretty(&json::answer_of(call)?, answer, 0)? + "\n",
            Format::Jsonl => json::line(&json::answer_of(call)?, answer)? + "\n",
        };
        self.print(&text)
    }

    /// Prints round after round, as often as it is watched; on a terminal each in the place of the one before. What passes is waited
    /// for, once there was a first round.
    pub async fn repeat<T>(
        &mut self,
        watch: &WatchArguments,
        mut round: impl AsyncFnMut(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
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
                Err(failure) => failure.tell(),
            }
            if let Some(screen) = gathered.filter(|screen| !screen.is_empty()) {
                self.show(&screen)?;
            }
            is_first = false;
            tokio::time::sleep(interval).await;
            // Resized meanwhile, perhaps.
            self.size = self.size.and_then(|_| terminal::size());
        }
    }

    /// Shows as much on the terminal as there is room for.
    fn show(&mut self, text: &str) -> Result<(), Failure> {
        let rows = self.size.map_or(usize::MAX, |size| size.rows.saturating_sub(1).max(1));
        let seen: String = text.split_inclusive('\n').take(if self.is_json() { usize::MAX } else { rows }).collect();
        self.print(&format!("{}{seen}", terminal::CLEAR))
    }
}

/// Whether somebody sits at a terminal, and can be asked.
pub fn is_attended() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}
