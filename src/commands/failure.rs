//! Why a command has no answer, what to type next, and how the process ends then.

use std::{io, io::Write as _, process::ExitCode};

use tonic::Code;

use crate::{client::ClientError, domain::name::FieldError, telemetry};

use super::output::{json::SchemaError, text::clean_lines};

/// What was asked for is so.
const EXIT_YES: u8 = 0;

/// The answer is "no": something differs, is not there, or was not done.
pub const EXIT_NO: u8 = 1;

/// There is no answer.
pub const EXIT_NO_ANSWER: u8 = 2;

/// As sysexits.h has it: the command was used wrongly.
pub const EXIT_USAGE: u8 = 64;

/// How a command was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It is so, or was done.
    Yes,
    /// It is not so.
    No,
}

impl Answer {
    /// Yes, if that holds.
    pub fn yes_if(holds: bool) -> Self {
        if holds { Self::Yes } else { Self::No }
    }
}

impl From<Answer> for ExitCode {
    fn from(answer: Answer) -> Self {
        Self::from(match answer {
            Answer::Yes => EXIT_YES,
            Answer::No => EXIT_NO,
        })
    }
}

/// Why a command has no answer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The service did not answer, or said no.
    #[error("{}{}", said(.error), advice(.error, .address))]
    Service {
        /// What it said.
        error: ClientError,
        /// Where it was asked.
        address: String,
    },
    /// The command was used wrongly.
    #[error("{0}")]
    Usage(String),
    /// The command is not possible in the current state.
    #[error("{0}")]
    Refused(String),
    /// Somebody was asked, and did not want it.
    #[error("nothing was done")]
    Declined,
    /// Somebody was asked, and it is not any more what he was asked about.
    #[error(
        "somebody else has changed the limits meanwhile, so nothing was done.\nType the same again to see what it would change now."
    )]
    Changed,
    /// It was looked for far enough.
    #[error(
        "{pages} pages after another had nothing of it, and there is more to look through.\nSay more of it: since and until when (--since, --until), or which ticket."
    )]
    NotFound {
        /// How many.
        pages: u64,
    },
    /// What was answered cannot be printed.
    #[error("the answer cannot be written")]
    Output(#[from] io::Error),
    /// What was answered cannot be shown as JSON.
    #[error(transparent)]
    Schema(#[from] SchemaError),
}

impl From<FieldError> for Failure {
    fn from(error: FieldError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl Failure {
    /// How the process ends.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Declined | Self::Changed | Self::Refused(_) => EXIT_NO,
            Self::Usage(_) => EXIT_USAGE,
            Self::Output(_) | Self::Schema(_) | Self::NotFound { .. } => EXIT_NO_ANSWER,
            Self::Service { error, .. } => match error.code() {
                Some(Code::NotFound | Code::AlreadyExists | Code::FailedPrecondition) => EXIT_NO,
                Some(Code::Aborted) if error.reason().as_deref() == Some("LIMIT_CHANGED") => EXIT_NO,
                Some(Code::InvalidArgument) => EXIT_USAGE,
                None if !matches!(error, ClientError::Answer(_)) => EXIT_USAGE,
                _ => EXIT_NO_ANSWER,
            },
        })
    }

    /// Whether it may be over when the same is asked again.
    pub fn passes(&self) -> bool {
        let Self::Service { error, .. } = self else { return false };
        matches!(
            error.code(),
            Some(Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded | Code::Aborted)
        )
    }

    /// Tells it on standard error.
    pub fn tell(&self) {
        let causes = std::iter::successors(std::error::Error::source(self), |error| error.source());
        let text = causes.fold(self.to_string(), |text, cause| format!("{text}: {cause}"));
        // Where nobody reads that, there is nobody to tell it to.
        let _ = writeln!(io::stderr(), "linkis-rm: {}", clean_lines(&telemetry::without_passwords(&text)));
    }
}

/// What the service said, without the name of the code.
fn said(error: &ClientError) -> String {
    match error {
        ClientError::Status(status) if !status.message().is_empty() => status.message().to_owned(),
        error => error.to_string(),
    }
}

/// What the client says of a connection that was made, and then broke or was closed; of one that was not made, it says that it cannot connect.
const BROKE: &str = "the connection";

/// The addresses with encryption, if there are some without that could have it.
fn encrypted(addresses: &str) -> Option<String> {
    let encrypted = |address: &str| match address.strip_prefix("http://") {
        Some(rest) => format!("https://{rest}"),
        None if address.starts_with("https://") || address.starts_with("unix:") => address.to_owned(),
        None => format!("https://{address}"),
    };
    let all = addresses.split(',').map(|address| encrypted(address.trim())).collect::<Vec<_>>().join(",");
    (all != addresses).then_some(all)
}

/// What to type next.
fn advice(error: &ClientError, address: &str) -> String {
    match error.code() {
        Some(Code::Unavailable) if error.reason().is_none() => match encrypted(address) {
            Some(encrypted) if said(error).contains(BROKE) => {
                format!("\nSomething is there, and breaks off. If it encrypts: --address {encrypted}")
            }
            _ => {
                format!("\nNo service answers at {address}. Start one with linkis-rm, or name another with --address.")
            }
        },
        Some(Code::Unauthenticated) => {
            "\nSay who asks with --token-file, or with --client-cert and --client-key.".into()
        }
        Some(Code::Unimplemented) => format!("\nThe service at {address} is an older one. Update it."),
        Some(Code::Internal | Code::Unknown | Code::DataLoss) => {
            format!("\nThe service at {address} failed. Its log says why; then type the same again.")
        }
        Some(_) => String::new(),
        None if matches!(error, ClientError::Address(_) | ClientError::TooManyAddresses { .. }) => {
            "\nName the service with --address, e.g. --address 127.0.0.1:50051.".to_owned()
        }
        None => String::new(),
    }
}
