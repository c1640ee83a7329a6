//! What is logged, and how it is written.

use tracing_subscriber::filter::Targets;

/// How lines are written, and which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// How.
    pub format: LogFormat,
    /// Which, in the language of `RUST_LOG`.
    pub filter: String,
}

/// How lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// As text for a person at a terminal, and else as JSON for whoever collects them.
    Auto,
    /// As text.
    Text,
    /// As JSON, an object to a line.
    Json,
}

impl LogFormat {
    /// As it is typed; the mistake otherwise.
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("{name}: {text:?} is none of auto, text and json")),
        }
    }
}

/// The filter that a level stands for; the mistake otherwise. What the libraries below tell in detail is of use to few, so that
/// `debug` and `trace` are of this program alone: `RUST_LOG` takes more than a level.
pub fn filter(name: &str, level: &str) -> Result<String, String> {
    match level {
        "error" | "warn" => Ok(level.to_owned()),
        "info" => Ok("info,sqlx=warn".to_owned()),
        "debug" | "trace" => Ok(format!("info,sqlx=warn,linkis_rm={level}")),
        _ => Err(format!("{name}: {level:?} is none of error, warn, info, debug and trace")),
    }
}

/// What `RUST_LOG` asks for, if it can be understood; the mistake otherwise.
pub fn directives(text: &str) -> Result<String, String> {
    match text.parse::<Targets>() {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("RUST_LOG: {text:?} is no filter: {error}; for example info,linkis_rm=debug")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_is_a_filter() {
        for level in ["error", "warn", "info", "debug", "trace"] {
            let filter = filter("--log-level", level).unwrap();
            assert_eq!(directives(&filter), Ok(filter.clone()));
        }
        assert!(filter("--log-level", "loud").unwrap_err().contains("none of error"));
        assert!(directives("info,linkis_rm=loud").unwrap_err().contains("RUST_LOG"));
        assert!(LogFormat::parse("--log-format", "xml").unwrap_err().contains("none of auto"));
    }
}
