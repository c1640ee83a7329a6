//! Why a call failed: one type inside, which `transport::status` turns into precise gRPC statuses.

use std::sync::Arc;

use crate::{
    domain::{name::FieldError, operation::Rejection},
    store::StoreError,
};

/// Why a call failed. Unless said otherwise, nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A field is missing, too long, negative or malformed.
    #[error(transparent)]
    InvalidField(#[from] FieldError),
    /// The ledger rejected it.
    #[error(transparent)]
    Rejected(Box<Rejection>),
    /// Somebody else held a resource lock until the caller's deadline.
    #[error("somebody else held what the call needs, an EM, a user or the limits, until its deadline; try again")]
    LockTimeout,
    /// Too many calls wait in this server.
    #[error("too many calls are waiting in this server; try again, or ask another instance")]
    Overloaded,
    /// The database is away.
    #[error("the database does not answer; try again")]
    Unavailable(#[source] Arc<StoreError>),
    /// The database went away while it committed: it is not known whether something was changed.
    #[error("the database went away while it committed, and has not said how that ended; repeat the call to learn it")]
    CommitUnknown,
    /// The server is going down.
    #[error("the server is shutting down; ask another instance")]
    ShuttingDown,
    /// A defect of the service, or of what is stored.
    #[error("a defect of the service; its log says which")]
    Internal(#[source] Arc<StoreError>),
}

impl Error {
    /// Whether it is about the moment, and not about the call, and leaves nothing in doubt.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::LockTimeout | Self::Overloaded | Self::Unavailable(_))
    }
}

impl From<Rejection> for Error {
    fn from(rejection: Rejection) -> Self {
        Self::Rejected(Box::new(rejection))
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        if error.is_lock_timeout() {
            return Self::LockTimeout;
        }
        if matches!(error, StoreError::OperatorsBusy) {
            return Self::Overloaded;
        }
        let unavailable = error.is_unavailable();
        let error = Arc::new(error);
        if unavailable { Self::Unavailable(error) } else { Self::Internal(error) }
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        StoreError::from(error).into()
    }
}
