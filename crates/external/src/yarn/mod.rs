//! YARN clusters, by the REST API of their ResourceManagers. Supports the fair and the capacity scheduler of any release.
//!
//! Never: decides about a request; the model does, by the fetched snapshot. Caller: the parent module.
//!
//! Submodules: `json`: bounded reader; `scheduler`: queues; `cluster`: active state, size and applications; `config`:
//! configuration; `fetch`: requests to the active ResourceManager.

use secrecy::SecretString;

use rm_model::{
    external::CheckRules,
    queue::{Application, QueueTree},
};

use super::{
    ExternalCluster, FetchFuture, ServerAddress,
    http::{ClusterHttp, HttpFailure},
};

mod cluster;
mod config;
mod fetch;
mod json;
mod scheduler;

use config::YarnConfig;
pub use config::read;

/// Unit of YARN's memory amounts, in bytes.
const MIB: i64 = 1 << 20;

/// Which capacity of a queue of the capacity scheduler counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CapacityMode {
    /// The maximum, which is available if other queues leave it.
    Maximum,
    /// The guarantee, as Linkis counts. A queue that could grow is then full early.
    Guaranteed,
}

/// Reason why a response is rejected. The text never contains data of the response, because a caller that may set an
/// address could otherwise read other services with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum YarnParseError {
    /// The response is no JSON, or nested too deep.
    #[error("is not JSON of at most 128 levels: it is {} at line {line}, column {column}", if *is_cut { "truncated" } else { "invalid" })]
    NotJson {
        /// Line of the error, from 1.
        line: usize,
        /// Column of the error, from 1.
        column: usize,
        /// Whether the text ends there.
        is_cut: bool,
    },
    /// The response exceeds a maximum number of values.
    #[error("has more than {most} values")]
    TooMany {
        /// Maximum number.
        most: usize,
    },
    /// A value is missing.
    #[error("lacks {what}")]
    Missing {
        /// Key or kind of the value.
        what: &'static str,
    },
    /// The scheduler is neither the fair nor the capacity scheduler.
    #[error("has the scheduler {kind:?}; only the fair and the capacity scheduler are supported")]
    UnknownScheduler {
        /// Type that the scheduler states.
        kind: String,
    },
    /// A queue states no capacity.
    #[error("cannot be parsed: the queue {path} states neither a maximum nor a share")]
    NoSize {
        /// Path of the queue.
        path: String,
    },
    /// Use or maximum of a queue is present and cannot be parsed.
    #[error("cannot be parsed: the {what} of the queue {path} is not an amount of memory and cores")]
    NoAmounts {
        /// Use or maximum.
        what: &'static str,
        /// Path of the queue.
        path: String,
    },
    /// A queue without child queues states no use.
    #[error("cannot be parsed: the queue {path} does not state its use")]
    NoUse {
        /// Path of the queue.
        path: String,
    },
    /// An amount of an application is present and cannot be parsed.
    #[error("cannot be parsed: {what} of the application {id} is not an amount")]
    NoAllocation {
        /// Key of the amount.
        what: &'static str,
        /// Id of the application.
        id: String,
    },
    /// Two queues have the same path.
    #[error("cannot be parsed: the queue {path} is listed twice")]
    SamePath {
        /// Path of the queues.
        path: String,
    },
    /// The path of a queue is too long.
    #[error("has a queue whose path has more than {most} bytes")]
    LongPath {
        /// Maximum length of a path, in bytes.
        most: usize,
    },
}

impl From<YarnParseError> for HttpFailure {
    fn from(error: YarnParseError) -> Self {
        Self::Unreadable(error.to_string())
    }
}

/// A YARN cluster.
#[derive(Debug)]
pub struct Yarn {
    config: YarnConfig,
    active: fetch::ActiveAddress,
}

impl ExternalCluster for Yarn {
    fn addresses(&self) -> &[ServerAddress] {
        &self.config.addresses
    }

    fn stored(&self) -> SecretString {
        self.config.stored()
    }

    fn shown(&self) -> String {
        self.config.shown()
    }

    fn rules(&self) -> CheckRules {
        self.config.rules
    }

    fn queues<'a>(&'a self, http: &'a ClusterHttp) -> FetchFuture<'a, QueueTree> {
        Box::pin(fetch::queues(self, http))
    }

    fn applications<'a>(&'a self, http: &'a ClusterHttp) -> FetchFuture<'a, Vec<Application>> {
        Box::pin(fetch::applications(self, http))
    }
}
