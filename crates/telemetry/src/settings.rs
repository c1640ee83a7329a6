//! Settings of the log: filter and format. Callers: `config` and `commands` of the program.

use tracing_subscriber::filter::Targets;

/// Prefix of the targets of the program's crates: `rm_store`, `rm_edge` and so on.
const CRATES: &str = "rm_";

/// Filter and format of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// Format of the lines.
    pub format: LogFormat,
    /// Filter in the syntax of `RUST_LOG`.
    pub filter: String,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, else JSON.
    Auto,
    /// Text.
    Text,
    /// JSON, one object per line.
    Json,
}

impl LogFormat {
    /// Parses a format.
    ///
    /// # Errors
    /// A text with the setting `name` and the valid formats.
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("{name}: {text:?} is unknown; set auto, text or json")),
        }
    }
}

impl LogSettings {
    /// Returns the levels by target. A level of `linkis_rm` applies to all crates of the program; a level of one crate wins.
    pub fn targets(&self) -> Targets {
        // The filter was validated when it was parsed.
        let targets: Targets = self.filter.parse().unwrap_or_default();
        match targets.iter().find(|(target, _)| *target == "linkis_rm") {
            Some((_, level)) if targets.iter().all(|(target, _)| target != CRATES) => {
                targets.with_target(CRATES, level)
            }
            _ => targets,
        }
    }
}

/// Returns the filter of a log level. `debug` and `trace` apply to this program only, because few readers need the
/// detail of its libraries; `RUST_LOG` allows any filter.
///
/// # Errors
/// A text with the setting `name` and the valid levels.
pub fn filter(name: &str, level: &str) -> Result<String, String> {
    match level {
        "error" | "warn" => Ok(level.to_owned()),
        "info" => Ok("info,sqlx=warn".to_owned()),
        "debug" | "trace" => Ok(format!("info,sqlx=warn,linkis_rm={level}")),
        _ => Err(format!("{name}: {level:?} is unknown; set error, warn, info, debug or trace")),
    }
}

/// Checks the value of `RUST_LOG`.
///
/// # Errors
/// A text with the fault and an example.
pub fn directives(text: &str) -> Result<String, String> {
    match text.parse::<Targets>() {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("RUST_LOG: {text:?} is not a filter: {error}; for example info,linkis_rm=debug")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_of_program_applies_to_its_crates() {
        let is_shown = |filter: &str, target: &str| {
            let settings = LogSettings { format: LogFormat::Json, filter: filter.to_owned() };
            settings.targets().would_enable(target, &tracing::Level::DEBUG)
        };
        for filter in ["info,sqlx=warn,linkis_rm=debug", "linkis_rm=trace"] {
            assert!(is_shown(filter, "linkis_rm::service") && is_shown(filter, "rm_store::primary"), "{filter}");
            assert!(!is_shown(filter, "sqlx::query") && !is_shown(filter, "hyper"), "{filter}");
        }
        let one = "info,linkis_rm=debug,rm_store=warn";
        assert!(is_shown(one, "rm_external::http") && !is_shown(one, "rm_store::primary"));
        assert!(!is_shown("info,linkis_rm::decisions=debug", "rm_store::primary"));
    }

    #[test]
    fn log_level_of_each_name_is_a_filter() {
        for level in ["error", "warn", "info", "debug", "trace"] {
            let filter = filter("--log-level", level).unwrap();
            assert_eq!(directives(&filter), Ok(filter.clone()));
        }
        assert!(filter("--log-level", "loud").unwrap_err().contains("set error"));
        assert!(directives("info,linkis_rm=loud").unwrap_err().contains("RUST_LOG"));
        assert!(LogFormat::parse("--log-format", "xml").unwrap_err().contains("set auto"));
    }
}
