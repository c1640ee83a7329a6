//! Telemetry of an instance: metrics, logs and traces.
//!
//! Logs go to standard error, as text or JSON, with a rate limit for warnings and errors. Error texts contain all
//! causes and no passwords. Never: delays a call for a collector or a scrape.
//! Callers: every crate of the service logs by `tracing`; `main` and the commands of the program start the logging.
//!
//! - [`metrics`]: metrics in Prometheus text format; [`traces`]: spans of calls and batches;
//! - [`operation_log`]: decision log, one line per operation;
//! - [`settings`]: filter and format of logs; `rate_limit`: rate limit; `json`: JSON lines.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

use std::{error::Error, io::IsTerminal as _};

use tracing_subscriber::{fmt::format::Format, layer::SubscriberExt as _, util::SubscriberInitExt as _};

mod json;
pub mod metrics;
pub mod operation_log;
mod rate_limit;
pub mod settings;
pub mod traces;

pub use settings::LogSettings;

use json::JsonFormat;
use rate_limit::RateLimitedFormat;
use settings::LogFormat;

/// Log target of the final error of a process. Every filter includes it.
pub const EXIT: &str = "linkis_rm::exit";

/// Starts the logging of the process. Must be called once.
pub fn start(settings: &LogSettings) {
    let filter = settings.targets().with_target(EXIT, tracing::Level::ERROR);
    let is_terminal = std::io::stderr().is_terminal();
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(is_terminal);
    let registry = tracing_subscriber::registry().with(filter);
    match settings.format {
        LogFormat::Json => registry.with(logs.event_format(RateLimitedFormat::new(JsonFormat, json::left_out))).init(),
        LogFormat::Auto if !is_terminal => {
            registry.with(logs.event_format(RateLimitedFormat::new(JsonFormat, json::left_out))).init()
        }
        LogFormat::Auto | LogFormat::Text => {
            let text = Format::default().with_ansi(is_terminal);
            registry.with(logs.event_format(RateLimitedFormat::new(text, rate_limit::left_out))).init();
        }
    }
}

/// Returns an error as a field of a log line, which contains it with its causes.
pub fn cause(error: &(impl Error + 'static)) -> &(dyn Error + 'static) {
    error
}

/// Returns the text of an error with its causes, each once: some libraries repeat the cause in the error.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.ends_with(&words) {
            text = format!("{text}: {words}");
        }
        cause = error.source();
    }
    without_passwords(&text)
}

/// Replaces the text between the scheme of a URL and the last @ of its line, which may be a password. Errors repeat
/// mistyped arguments.
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
