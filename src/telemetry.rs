//! Logs: to standard error, readable alone, with fields.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// Starts logging. `RUST_LOG` chooses what is told (default: `info`, and of the database driver only warnings).
pub fn start() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,sqlx=warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}
