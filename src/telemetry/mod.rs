//! What an instance tells of itself, beside its [`crate::metrics`]: logs and traces.
//!
//! Logs go to standard error: readable alone, with fields, and never more than somebody can read.
//!
//! - [`settings`]: what is logged, and how it is written;
//! - `bounded`: what goes wrong ten thousand times in a second is told a few times, and then how often it was not;
//! - `json`: one object for each line;
//! - [`decisions`]: what was decided, a line for each;
//! - [`traces`]: where the time of a call went.

use std::{error::Error, io::IsTerminal as _};

use sqlx::migrate::MigrateError;
use tracing_subscriber::{
    filter::Targets, fmt::format::Format, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

mod bounded;
pub mod decisions;
mod json;
pub mod settings;
pub mod traces;

pub use settings::LogSettings;

use bounded::Bounded;
use json::Json;
use settings::LogFormat;

/// Target of the line with which a failed process ends. Every filter keeps it.
pub const EXIT: &str = "linkis_rm::exit";

/// Starts logging, once for the process.
pub fn start(settings: &LogSettings) {
    // It was checked when it was read.
    let filter: Targets = settings.filter.parse().unwrap_or_default();
    let filter = filter.with_target(EXIT, tracing::Level::ERROR);
    let is_terminal = std::io::stderr().is_terminal();
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(is_terminal);
    let registry = tracing_subscriber::registry().with(filter);
    match settings.format {
        LogFormat::Json => registry.with(logs.event_format(Bounded::new(Json, json::left_out))).init(),
        LogFormat::Auto if !is_terminal => registry.with(logs.event_format(Bounded::new(Json, json::left_out))).init(),
        LogFormat::Auto | LogFormat::Text => {
            let text = Format::default().with_ansi(is_terminal);
            registry.with(logs.event_format(Bounded::new(text, bounded::left_out))).init();
        }
    }
}

/// The text of an error alone, and whether it includes its causes. PostgreSQL's text adds the line of its own source, which means nothing to
/// others.
fn said(error: &(dyn Error + 'static)) -> (String, bool) {
    match (error.downcast_ref::<sqlx::Error>(), error.downcast_ref()) {
        (Some(error), _) => (terse(error), error.as_database_error().is_some()),
        (None, Some(MigrateError::ExecuteMigration(error, version))) => {
            (format!("migration {version}: {}", terse(error)), true)
        }
        (None, Some(MigrateError::Execute(error))) => (terse(error), true),
        (None, _) => (error.to_string(), false),
    }
}

/// The message of the database, without the line of its own source.
pub fn terse(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}

/// An error and what caused it, each once: some libraries repeat the cause in the error.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let (mut text, mut is_whole) = said(error);
    let mut cause = error.source();
    while let Some(error) = cause.filter(|_| !is_whole) {
        let (words, is_last) = said(error);
        if !text.ends_with(&words) {
            text = format!("{text}: {words}");
        }
        (cause, is_whole) = (error.source(), is_last);
    }
    without_passwords(&text)
}

/// A text without what stands between the scheme of a URL and its last @ on that line, which may hold a password: in an error, a
/// mistyped argument is repeated.
pub fn without_passwords(text: &str) -> String {
    let without = |line: &str| match (line.find("://"), line.rfind('@')) {
        (Some(scheme), Some(at)) if scheme < at => {
            let (before, after) = (line.get(..scheme + 3), line.get(at..));
            format!("{}…{}", before.unwrap_or_default(), after.unwrap_or_default())
        }
        _ => line.to_owned(),
    };
    text.split_inclusive('\n').map(without).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_with_url_shows_no_password() {
        for (text, shown) in [
            ("unexpected argument 'postgres://u:a@b/c?d@h/db' found", "unexpected argument 'postgres://…@h/db' found"),
            ("\"https://u:x@h\"\nsee https://h/y", "\"https://…@h\"\nsee https://h/y"),
            ("me@h: http://h/x", "me@h: http://h/x"),
            ("", ""),
        ] {
            assert_eq!(without_passwords(text), shown);
        }
    }
}
