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
use tracing_subscriber::{EnvFilter, fmt::format::Format};

mod bounded;
pub mod decisions;
mod json;
pub mod settings;
pub mod traces;

pub use settings::LogSettings;

use bounded::Bounded;
use json::Json;
use settings::LogFormat;

/// Starts logging, once for the process.
pub fn start(settings: &LogSettings) {
    // It was checked when it was read.
    let filter = EnvFilter::try_new(&settings.filter).unwrap_or_default();
    let is_terminal = std::io::stderr().is_terminal();
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(is_terminal);
    match settings.format {
        LogFormat::Json => logs.event_format(Bounded::new(Json, json::left_out)).init(),
        LogFormat::Auto if !is_terminal => logs.event_format(Bounded::new(Json, json::left_out)).init(),
        LogFormat::Auto | LogFormat::Text => {
            let text = Format::default().with_ansi(is_terminal);
            logs.event_format(Bounded::new(text, bounded::left_out)).init();
        }
    }
}

/// An error and what caused it, each once: some libraries repeat the cause in the error.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let (mut told, mut last) = (text(error), error);
    while let Some(cause) = last.source() {
        // The source of this one is the message of PostgreSQL again.
        if let Some(sqlx::Error::Database(_)) = last.downcast_ref() {
            break;
        }
        let text = text(cause);
        if !told.ends_with(&text) {
            told = format!("{told}: {text}");
        }
        last = cause;
    }
    told
}

/// The text of one error. sqlx adds the line of PostgreSQL's own source to a message of PostgreSQL, and this leaves it out.
fn text(error: &(dyn Error + 'static)) -> String {
    let of_database = |error: &sqlx::Error| match error {
        sqlx::Error::Database(error) => format!("error returned from database: {}", error.message()),
        error => error.to_string(),
    };
    if let Some(error) = error.downcast_ref::<sqlx::Error>() {
        return of_database(error);
    }
    match error.downcast_ref::<MigrateError>() {
        Some(MigrateError::Execute(error)) => format!("while executing migrations: {}", of_database(error)),
        Some(MigrateError::ExecuteMigration(error, version)) => {
            format!("while executing migration {version}: {}", of_database(error))
        }
        _ => error.to_string(),
    }
}
