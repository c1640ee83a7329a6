//! `linkis-rm health`: health check of instances, for container runtimes.

use std::{io::Write as _, process::ExitCode, time::Duration};

use clap::Args;
use tonic::Code;

use crate::config::parse_duration;
use rm_client::{ClientError, check_health};

use super::{output::text::clean_lines, service::EndpointArguments};

/// Arguments of `health`.
#[derive(Debug, Clone, Args)]
pub struct HealthCommand {
    #[command(flatten)]
    instance: EndpointArguments,

    /// Service to check: liveness ignores the state of the database [default: all]
    #[arg(long, default_value = "", value_name = "NAME", hide_default_value = true)]
    service: String,

    /// Timeout of the check.
    #[arg(long, default_value = "3s", value_name = "DURATION", value_parser = timeout)]
    timeout: Duration,
}

fn timeout(text: &str) -> Result<Duration, String> {
    parse_duration("--timeout", text, "1ms", "1h")
}

impl HealthCommand {
    /// Prints the health of each instance, and returns the exit code.
    pub async fn run(self) -> ExitCode {
        let address = &self.instance.address;
        let checked = match self.instance.settings(self.timeout) {
            Ok(settings) => check_health(address, &settings, &self.service).await,
            Err(error) => Err(error),
        };
        let replies = match checked {
            Ok(replies) => replies,
            Err(error) => {
                eprintln!("linkis-rm: {}", rm_telemetry::without_passwords(&error.to_string()));
                return ExitCode::FAILURE;
            }
        };
        let mut all_serve = true;
        for (address, answer) in replies {
            match self.problem(&answer) {
                // A closed output still gets the exit code.
                None => drop(writeln!(std::io::stdout(), "{address} serves")),
                Some(problem) => {
                    all_serve = false;
                    // The text may contain output of another program.
                    eprintln!(
                        "linkis-rm: {}",
                        clean_lines(&rm_telemetry::without_passwords(&format!("{address} {problem}")))
                    );
                }
            }
        }
        if all_serve { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// Returns the problem, if any.
    fn problem(&self, answer: &Result<bool, ClientError>) -> Option<String> {
        let error = match answer {
            Ok(true) => return None,
            Ok(false) => {
                return Some(
                    "does not serve: it stops, or its database does not reply; its log states which".to_owned(),
                );
            }
            Err(error) => error,
        };
        Some(match (error, error.code()) {
            (ClientError::Status(status), Some(Code::Unavailable)) => format!("does not reply: {}", status.message()),
            (_, Some(Code::NotFound)) => {
                format!("has no service {:?}; use liveness, or omit --service", self.service)
            }
            (_, Some(Code::Unimplemented)) => "has no health service: another program uses the address".to_owned(),
            _ => format!("fails the health check: {error}"),
        })
    }
}
