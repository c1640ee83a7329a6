//! Failures of commands: messages, advice on the next command, and exit codes.
//!
//! Exit codes are 0 (yes or done), 1 (no), 2 (no reply) and 64 (usage). Scripts depend on them.
//! Never: prints a password or a control character. Callers: all commands.

use std::{io, io::Write as _, process::ExitCode};

use tonic::Code;

use rm_client::ClientError;
use rm_model::name::FieldError;

use super::output::{json::SchemaError, text::clean_lines};

/// The reply is positive.
const EXIT_YES: u8 = 0;

/// The reply is negative: a difference, a missing object, or no action.
pub const EXIT_NO: u8 = 1;

/// There is no reply.
pub const EXIT_NO_ANSWER: u8 = 2;

/// Usage error, as in sysexits.h.
pub const EXIT_USAGE: u8 = 64;

/// Reply of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandReply {
    /// The condition holds, or the action was done.
    Yes,
    /// The condition does not hold.
    No,
}

impl CommandReply {
    /// Returns `Yes` if the condition holds.
    pub fn yes_if(holds: bool) -> Self {
        if holds { Self::Yes } else { Self::No }
    }
}

impl From<CommandReply> for ExitCode {
    fn from(answer: CommandReply) -> Self {
        Self::from(match answer {
            CommandReply::Yes => EXIT_YES,
            CommandReply::No => EXIT_NO,
        })
    }
}

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandFailure {
    /// The service is unreachable or replied with an error.
    #[error("{}{}", said(.error), advice(.error, .address))]
    Service {
        /// The error.
        error: ClientError,
        /// Address of the service.
        address: String,
    },
    /// The arguments are not valid.
    #[error("{0}")]
    Usage(String),
    /// The command is not possible in the current state.
    #[error("{0}")]
    Refused(String),
    /// The user declined the confirmation.
    #[error("nothing was done")]
    Declined,
    /// The object of the confirmation changed before the user replied.
    #[error(
        "another caller has changed the limits meanwhile, so nothing was done.\nRepeat the command to see what it would change now."
    )]
    Changed,
    /// The search ended at its page limit.
    #[error(
        "{pages} consecutive pages had no match, and more pages remain.\nNarrow the search: by time (--since, --until), or by ticket."
    )]
    NotFound {
        /// Number of pages without a match.
        pages: u64,
    },
    /// The reply cannot be written.
    #[error("the output cannot be written")]
    Output(#[from] io::Error),
    /// The reply cannot be converted to JSON.
    #[error(transparent)]
    Schema(#[from] SchemaError),
}

impl From<FieldError> for CommandFailure {
    fn from(error: FieldError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl CommandFailure {
    /// Returns the exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Declined | Self::Changed | Self::Refused(_) => EXIT_NO,
            Self::Usage(_) => EXIT_USAGE,
            Self::Output(_) | Self::Schema(_) | Self::NotFound { .. } => EXIT_NO_ANSWER,
            Self::Service { error, .. } => match error.code() {
                Some(Code::NotFound | Code::AlreadyExists | Code::FailedPrecondition) => EXIT_NO,
                Some(Code::Aborted | Code::ResourceExhausted | Code::PermissionDenied) if is_no(error) => EXIT_NO,
                Some(Code::InvalidArgument) => EXIT_USAGE,
                None if !matches!(error, ClientError::Answer(_)) => EXIT_USAGE,
                _ => EXIT_NO_ANSWER,
            },
        })
    }

    /// Returns whether a repetition may succeed.
    pub fn passes(&self) -> bool {
        let Self::Service { error, .. } = self else { return false };
        matches!(
            error.code(),
            Some(Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded | Code::Aborted)
        )
    }

    /// Prints the failure to standard error.
    pub fn print(&self) {
        let causes = std::iter::successors(std::error::Error::source(self), |error| error.source());
        let text = causes.fold(self.to_string(), |text, cause| format!("{text}: {cause}"));
        // Without a reader of standard error, the message is dropped.
        let _ = writeln!(io::stderr(), "linkis-rm: {}", clean_lines(&rm_telemetry::without_passwords(&text)));
    }
}

/// Returns whether the service has answered no, as rules of the cluster demand.
fn is_no(error: &ClientError) -> bool {
    matches!(
        error.reason().as_deref(),
        Some("LIMIT_CHANGED" | "TOO_MANY_WAITING" | "PRIORITY_ABOVE_MAX" | "REMOVED_FROM_QUEUE")
    )
}

/// Returns the message of the service, without the name of the code.
fn said(error: &ClientError) -> String {
    match error {
        ClientError::Status(status) if !status.message().is_empty() => status.message().to_owned(),
        error => error.to_string(),
    }
}

/// Beginning of the client's message for a connection that was opened and then closed. Other messages mean that none could
/// be opened.
const BROKE: &str = "the connection";

/// Returns the addresses with `https`, if any of them can be changed to it.
fn encrypted(addresses: &str) -> Option<String> {
    let encrypted = |address: &str| match address.strip_prefix("http://") {
        Some(rest) => format!("https://{rest}"),
        None if address.starts_with("https://") || address.starts_with("unix:") => address.to_owned(),
        None => format!("https://{address}"),
    };
    let all = addresses.split(',').map(|address| encrypted(address.trim())).collect::<Vec<_>>().join(",");
    (all != addresses).then_some(all)
}

/// Returns advice on the next command.
fn advice(error: &ClientError, address: &str) -> String {
    match error.code() {
        Some(Code::Unavailable) if error.reason().is_none() => match encrypted(address) {
            Some(encrypted) if said(error).contains(BROKE) => {
                format!(
                    "\nThe peer closes the connection. If it uses TLS: --address {encrypted}. If this is the address of the page: \
                    calls go to the address of --listen, by default port 50051."
                )
            }
            _ => {
                format!("\nNo service replies at {address}. Start one with linkis-rm, or name another with --address.")
            }
        },
        Some(Code::Unauthenticated) => {
            "\nIdentify the caller with --token-file, or with --client-cert and --client-key.".into()
        }
        Some(Code::Unimplemented) => format!("\nThe service at {address} has an older release. Update it."),
        Some(Code::Internal | Code::Unknown | Code::DataLoss) => {
            format!("\nThe service at {address} failed. Its log has the cause; then repeat the command.")
        }
        Some(_) => String::new(),
        None if matches!(error, ClientError::Address(_) | ClientError::TooManyAddresses { .. }) => {
            "\nName the service with --address, e.g. --address 127.0.0.1:50051.".to_owned()
        }
        None => String::new(),
    }
}
