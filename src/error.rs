//! Why a call failed: one type inside, which `transport::status` turns into precise gRPC statuses.
//!
//! - `external`: the same of calls about clusters whose queues somebody else keeps.

use std::{sync::Arc, time::Duration};

use uuid::Uuid;

use crate::{
    domain::{
        access::{Denied, Unauthenticated},
        name::FieldError,
        operation::Rejection,
    },
    store::StoreError,
};

mod external;

pub use external::ExternalError;

/// Why a call failed. Unless said otherwise, nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A field is missing, too long, negative or malformed.
    #[error(transparent)]
    InvalidField(#[from] FieldError),
    /// The ledger rejected it.
    #[error(transparent)]
    Rejected(Box<Rejection>),
    /// It is not known who calls.
    #[error(transparent)]
    Unauthenticated(#[from] Unauthenticated),
    /// Whoever calls may not do that.
    #[error(transparent)]
    Denied(Box<Denied>),
    /// There is no such call.
    #[error("this service has no such call; a later release may have it")]
    NoSuchMethod,
    /// Somebody else held a resource lock until the caller's deadline.
    #[error("somebody else held what the call needs, an EM, a user or the limits, until its deadline; try again")]
    LockTimeout,
    /// The transaction of the call had not begun at its deadline, and no lock kept it from beginning.
    #[error(
        "the transaction of the call had not begun at its deadline: this server or its database is busy; try again"
    )]
    NotBegun,
    /// Too many calls wait in this server.
    #[error("too many calls are waiting in this server; try again, or ask another instance")]
    Overloaded,
    /// There is no room for the body of the call beside those of others.
    #[error(
        "the calls under way have all the memory that this server gives to their bodies; try again, or ask another instance"
    )]
    TooManyBytes,
    /// The message is larger than the call accepts, as it comes or when it is unpacked.
    #[error("the message has more than {limit} bytes, the limit of this call; send less at a time")]
    MessageTooLarge {
        /// Maximum size of the message, in bytes.
        limit: usize,
    },
    /// The compressed-flag of the message is not valid in this call.
    #[error("the compressed-flag of the message is {0}")]
    CompressedFlag(&'static str),
    /// The call ended before a message began.
    #[error("the call has no message; send one, which may be empty")]
    NoMessage,
    /// The deadline of the call expired before its answer.
    #[error("the deadline of the call expired; look up what it did, or repeat it, with more time")]
    DeadlineExpired,
    /// The body of the call took too long to arrive.
    #[error("the call's message did not arrive within {}; send it faster", humantime::format_duration(*.0))]
    BodyTimeout(Duration),
    /// The database is away.
    #[error("{}; try again", .0.missing())]
    Unavailable(#[source] Arc<StoreError>),
    /// The database went away while it committed, or takes long for it: it is not known whether something was changed.
    #[error("the database has not said in time whether it committed; repeat the call to learn it")]
    CommitUnknown,
    /// The same, of a request that nobody can repeat without being granted twice.
    #[error(
        "the database has not said in time whether the ticket {ticket_id} was granted: GetTicket tells; a request with a request_id may \
         be repeated"
    )]
    GrantUnknown {
        /// The ticket that it was granted, if it was.
        ticket_id: Uuid,
    },
    /// A later release has changed how is counted: this one only reads.
    #[error("{0}")]
    Outdated(Arc<StoreError>),
    /// A cluster whose queues somebody else keeps, or what is known of it.
    #[error(transparent)]
    External(Box<ExternalError>),
    /// Lines of the history that were to be followed are forgotten.
    #[error(
        "what came behind this position is forgotten; begin anew, without a position, and take what there is from the lists"
    )]
    PositionTooOld {
        /// The first position that can still be followed from.
        oldest: String,
    },
    /// A position in another history, or beyond the end of this one.
    #[error(
        "the position is of another database, or of a later state of this one, which was put back; begin anew, without a position"
    )]
    PositionUnknown,
    /// Somebody who follows the history takes nothing of it.
    #[error("no message was taken for too long; go on from the position of the last one")]
    FollowerTooSlow,
    /// The server is going down.
    #[error("the server is shutting down; ask another instance")]
    ShuttingDown,
    /// A defect of the service, or of what is stored.
    #[error("a defect of the service; its log says which")]
    Internal(#[source] Arc<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// The connection to the database broke again and again while it committed; nothing was.
    pub fn lost_connection() -> Self {
        let lost = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "the connection broke again and again");
        Self::Unavailable(Arc::new(StoreError::Database(sqlx::Error::Io(lost))))
    }

    /// A defect of the service: the caller is told no more than that there is one, the log what it is.
    pub fn defect(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Internal(Arc::from(what.into()))
    }

    /// Whether it is a defect: whoever answers the call logs it, with the call.
    pub fn is_defect(&self) -> bool {
        matches!(self, Self::Internal(_))
    }

    /// Whether the protocol gives it a code of a server's failures although the caller is at fault: metrics count it as the caller's.
    pub fn is_fault_of_caller(&self) -> bool {
        matches!(self, Self::MessageTooLarge { .. } | Self::CompressedFlag(_))
    }

    /// Whether the log tells it already, once for all.
    pub fn is_told(&self) -> bool {
        matches!(self, Self::Unavailable(error) if error.is_told())
    }

    /// Whether it is about the moment, and not about the call, and leaves nothing in doubt.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::LockTimeout | Self::NotBegun | Self::Overloaded | Self::Unavailable(_))
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
