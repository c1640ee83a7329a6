//! Errors of calls: one internal type, which `rm_edge::status` maps to gRPC statuses.
//!
//! Services return it; the edge logs defects. A text is for callers: it names the event and the next action, never an
//! internal detail.
//!
//! - `external`: errors about external clusters.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc::error::TrySendError;
use uuid::Uuid;

use rm_model::{
    access::{Denied, Unauthenticated},
    name::FieldError,
    operation::Rejection,
};
use rm_store::StoreError;
use rm_telemetry::metrics::components::OperationFailure;

mod external;

pub use external::ExternalError;

/// Reason why a call failed. Unless a variant states otherwise, nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A field is missing, too long, negative or malformed.
    #[error(transparent)]
    InvalidField(#[from] FieldError),
    /// The operation was rejected.
    #[error(transparent)]
    Rejected(Box<Rejection>),
    /// Authentication failed.
    #[error(transparent)]
    Unauthenticated(#[from] Unauthenticated),
    /// The caller's rights do not permit the call.
    #[error(transparent)]
    Denied(Box<Denied>),
    /// The method does not exist.
    #[error("this service does not have the call; check its name, or upgrade the service")]
    NoSuchMethod,
    /// Another transaction or a hold owned a lock key until the caller's deadline.
    #[error(
        "lock timeout: another transaction or a hold kept the EM, the user or the limits locked until the call's \
        deadline; retry the call"
    )]
    LockTimeout,
    /// No transaction with the operation was under way at the deadline, and no lock delayed it.
    #[error(
        "the transaction of the call had not begun at its deadline: this server or its database is busy; retry the call"
    )]
    NotBegun,
    /// Too many calls wait in this instance.
    #[error("too many calls are waiting in this server; retry, or call another instance")]
    Overloaded,
    /// The byte budget for messages is exhausted by other calls.
    #[error("the byte budget for messages is used up by other calls; retry, or call another instance")]
    TooManyBytes,
    /// The message exceeds the size limit of the call, compressed or decompressed.
    #[error("the message has more than {limit} bytes, the limit of this call; send less at a time")]
    MessageTooLarge {
        /// Maximum size of the message, in bytes.
        limit: usize,
    },
    /// The compressed-flag of the message is not valid for this call.
    #[error("the compressed-flag of the message is {0}")]
    CompressedFlag(&'static str),
    /// The call ended before its message began.
    #[error("the call has no message; send one, which may be empty")]
    NoMessage,
    /// The deadline expired before the reply.
    #[error("the deadline of the call expired; look up its effect, or repeat it with a longer deadline")]
    DeadlineExpired,
    /// The message did not arrive within its timeout.
    #[error("the message of the call did not arrive within {}; send it faster", humantime::format_duration(*.0))]
    BodyTimeout(Duration),
    /// The database is unavailable.
    #[error("{}; retry", .0.missing())]
    Unavailable(#[source] Arc<StoreError>),
    /// The connection failed or timed out during the commit: the result is unknown.
    #[error("the commit of the call is unknown: the database did not respond in time; repeat the call")]
    CommitUnknown,
    /// As [`Error::CommitUnknown`], for a request without a request id, whose repetition could be granted twice.
    #[error(
        "the grant of the ticket {ticket_id} is unknown: the database did not respond in time; call GetTicket, or \
            repeat a request with a request_id"
    )]
    GrantUnknown {
        /// Id of the ticket, if the grant took effect.
        ticket_id: Uuid,
    },
    /// A later release has changed the counting, so this instance only reads.
    #[error("{0}")]
    Outdated(Arc<StoreError>),
    /// An error about an external cluster.
    #[error(transparent)]
    External(Box<ExternalError>),
    /// The history lines after the position are deleted.
    #[error("the history after this position was deleted; read the lists, then follow without a position")]
    PositionTooOld {
        /// First position that can still be followed.
        oldest: String,
    },
    /// The position belongs to another history, or is beyond the end of this one.
    #[error(
        "the position is of another database, or of a later state than this restored one; read the lists, then \
            follow without a position"
    )]
    PositionUnknown,
    /// A follower of the history does not read its messages.
    #[error("the follower did not read its messages in time; continue from the position of the last one")]
    FollowerTooSlow,
    /// The server is shutting down.
    #[error("the server is shutting down; call another instance")]
    ShuttingDown,
    /// A defect of the service or of the stored data.
    #[error("a defect of the service; see its log")]
    Internal(#[source] Arc<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Returns the kind of the failure, for the metrics of the committer.
    pub fn failure(&self) -> OperationFailure {
        match self {
            Self::InvalidField(_)
            | Self::Rejected(_)
            | Self::Unauthenticated(_)
            | Self::Denied(_)
            | Self::NoSuchMethod
            | Self::PositionTooOld { .. }
            | Self::PositionUnknown
            | Self::FollowerTooSlow
            | Self::MessageTooLarge { .. }
            | Self::CompressedFlag(_)
            | Self::NoMessage
            | Self::DeadlineExpired
            | Self::External(_) => OperationFailure::Rejected,
            Self::LockTimeout => OperationFailure::LockTimeout,
            Self::NotBegun | Self::Overloaded | Self::TooManyBytes | Self::BodyTimeout(_) => {
                OperationFailure::Overloaded
            }
            Self::Unavailable(_) => OperationFailure::Unavailable,
            Self::CommitUnknown | Self::GrantUnknown { .. } => OperationFailure::CommitUnknown,
            Self::Outdated(_) => OperationFailure::Outdated,
            Self::ShuttingDown => OperationFailure::ShuttingDown,
            Self::Internal(_) => OperationFailure::Internal,
        }
    }

    /// Returns the error for a connection that broke repeatedly during commits, none of which took effect.
    pub fn lost_connection() -> Self {
        let lost = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "the connection broke again and again");
        Self::Unavailable(Arc::new(StoreError::Database(sqlx::Error::Io(lost))))
    }

    /// Returns the error for a defect. The caller gets a general text; the log gets `what`.
    pub fn defect(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Internal(Arc::from(what.into()))
    }

    /// Returns whether it is a defect, which the edge logs together with the call.
    pub fn is_defect(&self) -> bool {
        matches!(self, Self::Internal(_))
    }

    /// Returns whether the caller is at fault although the code is one for server errors. Metrics count it as the caller's.
    pub fn is_fault_of_caller(&self) -> bool {
        matches!(self, Self::MessageTooLarge { .. } | Self::CompressedFlag(_))
    }

    /// Returns whether the cause was logged already, once for all calls.
    pub fn is_logged(&self) -> bool {
        matches!(self, Self::Unavailable(error) if error.is_logged())
    }

    /// Returns whether the error is temporary, independent of the call's content, and without an unknown result.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::LockTimeout | Self::NotBegun | Self::Overloaded | Self::Unavailable(_))
    }
}

impl<T> From<TrySendError<T>> for Error {
    fn from(error: TrySendError<T>) -> Self {
        match error {
            TrySendError::Full(_) => Self::Overloaded,
            TrySendError::Closed(_) => Self::ShuttingDown,
        }
    }
}

impl From<Rejection> for Error {
    fn from(rejection: Rejection) -> Self {
        Self::Rejected(Box::new(rejection))
    }
}

impl From<Denied> for Error {
    fn from(denied: Denied) -> Self {
        Self::Denied(Box::new(denied))
    }
}

impl From<ExternalError> for Error {
    fn from(error: ExternalError) -> Self {
        Self::External(Box::new(error))
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        if error.is_lock_timeout() {
            return Self::LockTimeout;
        }
        match error {
            StoreError::TooOld { .. } => Self::Outdated(Arc::new(error)),
            StoreError::OperatorsBusy => Self::Overloaded,
            StoreError::TooManyLabelSets { most } => Rejection::TooManyLabelSets { most }.into(),
            error if error.is_unavailable() => Self::Unavailable(Arc::new(error)),
            error => Self::defect(error),
        }
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        StoreError::from(error).into()
    }
}
