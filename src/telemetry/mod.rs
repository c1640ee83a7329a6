//! Logs: to standard error, readable alone, with fields, and never more than somebody can read.

use std::io::IsTerminal as _;

use tracing_subscriber::{EnvFilter, fmt::format::Format};

mod bounded;

use bounded::Bounded;

/// Starts logging. `RUST_LOG` chooses what is told (default: `info`, and of the database driver only warnings). What goes wrong ten
/// thousand times in a second is told a few times, and then how often it was not.
pub fn start() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,sqlx=warn"));
    let is_terminal = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(is_terminal)
        .event_format(Bounded::new(Format::default().with_ansi(is_terminal)))
        .init();
}
