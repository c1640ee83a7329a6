//! Report of a run: a table for display, a JSON file and a chart.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{Arguments, Failure, machine::Machine, ratios::Ratio, results::Results};

mod chart;
mod json;
mod table;

/// All data of a run.
pub(crate) struct Report<'a> {
    pub arguments: &'a Arguments,
    pub machine: Machine,
    /// Start of the run.
    pub date: String,
    pub duration: Duration,
    pub results: Results,
    pub ratios: Vec<Ratio>,
}

impl Report<'_> {
    /// Returns the table.
    pub fn text(&self) -> String {
        table::render(self)
    }

    /// Writes the requested files.
    pub fn write_files(&self) -> Result<(), Failure> {
        let write = |path: &Option<PathBuf>, render: fn(&Self) -> String| match path {
            Some(path) => fs::write(path, render(self)).map_err(|error| format!("{}: {error}", path.display())),
            None => Ok(()),
        };
        write(&self.arguments.json, json::render)?;
        write(&self.arguments.svg, chart::render)?;
        Ok(())
    }
}

/// Start of a run.
pub(crate) struct StartTime(SystemTime, Instant);

impl StartTime {
    pub fn now() -> Self {
        Self(SystemTime::now(), Instant::now())
    }

    /// Returns the time of the start, to the second, in UTC.
    pub fn date(&self) -> Result<String, Failure> {
        Ok(OffsetDateTime::from(self.0).replace_nanosecond(0)?.format(&Rfc3339)?)
    }

    pub fn elapsed(&self) -> Duration {
        self.1.elapsed()
    }
}

/// Formats a whole number with a comma after every three digits.
pub(crate) fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a ratio with its significant digits.
fn ratio(value: f64) -> String {
    if value.abs() < 10.0 { format!("{value:.2}") } else { format!("{value:.1}") }
}
