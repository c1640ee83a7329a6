//! Errors of client calls, with the code, reason, metadata and retry delay that the service attached.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use rm_model::name::FieldError;

/// Reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The service replied with an error, or no instance is reachable.
    #[error("{}: {}", .0.code(), .0.message())]
    Status(Box<Status>),
    /// The reply cannot be parsed: client and service have incompatible versions.
    #[error("the reply of the service cannot be parsed")]
    Answer(#[from] FieldError),
    /// The address is not valid.
    #[error(
        "{0:?} is not the address of a service; give one such as http://127.0.0.1:50051, https://rm.example.com or \
            unix:/run/rm.sock, or several separated by commas"
    )]
    Address(String),
    /// The maximum number of addresses is exceeded.
    #[error("more than {most} addresses; name some of the instances, or a load balancer")]
    TooManyAddresses {
        /// Maximum number of addresses.
        most: usize,
    },
    /// A certificate, key or token is not usable.
    #[error("{0}")]
    Secret(String),
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl ClientError {
    /// Returns the gRPC code, if any; UNAVAILABLE if no instance is reachable or the connection broke.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Status(status) => Some(status.code()),
            _ => None,
        }
    }

    /// Returns the documented reason in capitals, such as `TICKET_NOT_FOUND`.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Status(status) => Some(status.get_details_error_info()?.reason),
            _ => None,
        }
    }

    /// Returns a documented metadata field of the error, such as "ended" for `TICKET_NOT_FOUND`.
    pub fn fact(&self, field: &str) -> Option<String> {
        match self {
            Self::Status(status) => status.get_details_error_info()?.metadata.remove(field),
            _ => None,
        }
    }

    /// Returns the time to wait before a repetition; `None` if a repetition is useless.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status(status) => match status.get_details_retry_info() {
                Some(retry) => retry.retry_delay,
                // Without a delay from the service: the connection could not be opened, or broke.
                None => (status.code() == Code::Unavailable).then_some(Duration::from_secs(1)),
            },
            _ => None,
        }
    }

    /// Returns the first invalid field that the service reported.
    pub fn field(&self) -> Option<String> {
        match self {
            Self::Status(status) => Some(status.get_details_bad_request()?.field_violations.into_iter().next()?.field),
            _ => None,
        }
    }
}
