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
pub fn with_causes(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |cause: &&dyn Error| (*cause).source());
    causes.fold(error.to_string(), |text, cause| match cause.to_string() {
        cause if text.ends_with(&cause) => text,
        cause => format!("{text}: {cause}"),
    })
}
