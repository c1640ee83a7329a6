//! Why a call of the client failed.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::domain::name::FieldError;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The service answered with an error, or could not be reached.
    #[error("{}: {}", .0.code(), .0.message())]
    Status(Box<Status>),
    /// The service answered with something that this client does not understand: their versions differ.
    #[error("the service's answer cannot be understood")]
    Answer(#[from] FieldError),
    /// The address cannot be used.
    #[error(
        "{0:?} is not the address of a service; give one like http://127.0.0.1:50051, https://rm.example.com or unix:/run/rm.sock, or \
         several with commas between them"
    )]
    Address(String),
    /// There are more addresses than a client takes.
    #[error("there are more than {most} addresses; name some of the instances, or a load balancer")]
    TooManyAddresses {
        /// How many it takes.
        most: usize,
    },
    /// A certificate, a key or a token cannot be used.
    #[error("{0}")]
    Secret(String),
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl ClientError {
    /// The gRPC code, if the service gave one; UNAVAILABLE if it could not be reached or the connection broke.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Status(status) => Some(status.code()),
            _ => None,
        }
    }

    /// The reason in capitals, as the API documents it, e.g. `TICKET_NOT_FOUND`.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Status(status) => Some(status.get_details_error_info()?.reason),
            _ => None,
        }
    }

    /// What the service says in fields besides the reason, as the API documents it: "ended" with `TICKET_NOT_FOUND`, for one.
    pub fn fact(&self, field: &str) -> Option<String> {
        match self {
            Self::Status(status) => status.get_details_error_info()?.metadata.remove(field),
            _ => None,
        }
    }

    /// How long to wait before the call is worth repeating; `None` if repeating it does not help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status(status) => match status.get_details_retry_info() {
                Some(retry) => retry.retry_delay,
                // From the way there, not from the service: a connection that could not be made, or broke.
                None => (status.code() == Code::Unavailable).then_some(Duration::from_secs(1)),
            },
            _ => None,
        }
    }

    /// The first field that the service complained about.
    pub fn field(&self) -> Option<String> {
        match self {
            Self::Status(status) => Some(status.get_details_bad_request()?.field_violations.into_iter().next()?.field),
            _ => None,
        }
    }
}
