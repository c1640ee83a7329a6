//! YARN, by the REST API of its ResourceManagers.
//!
//! - `json`: reads answers of any release, within bounds;
//! - `scheduler`: the queues, of the fair and of the capacity scheduler;
//! - `cluster`: who is active, how large the cluster is, which applications it has;
//! - `config`: what Linkis writes of a cluster, and what is told of it;
//! - `fetch`: asks the ResourceManager that is active.

use secrecy::SecretString;

use crate::domain::{
    external::CheckRules,
    queue::{Application, Queues},
};

use super::{
    Address, ExternalResource, Fetching,
    http::{Failure, Http},
};

mod cluster;
mod config;
mod fetch;
mod json;
mod scheduler;

use config::Config;
pub use config::read;

/// YARN counts memory in these.
const MIB: i64 = 1 << 20;

/// How much of the cluster a queue of the capacity scheduler has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Capacity {
    /// As much as others leave it, up to its maximum.
    Maximum,
    /// What it gets in any case, as Linkis counts: a queue that could grow is full early.
    Guaranteed,
}

/// Why an answer cannot be used. It does not repeat what the answer holds: whoever may name an address must not read by it what is there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum ParseError {
    /// It is no JSON, or nested too deep.
    #[error("is no JSON, or none of at most 128 levels: it {} at line {line}, column {column}", if *is_cut { "ends in the middle" } else { "breaks off" })]
    NotJson {
        /// Where, from 1 on.
        line: usize,
        /// Likewise.
        column: usize,
        /// Whether it ends there.
        is_cut: bool,
    },
    /// There is more than is kept.
    #[error("has more than {most} of what is asked for")]
    TooMany {
        /// How much is kept.
        most: usize,
    },
    /// Something is not there.
    #[error("lacks {what}")]
    Missing {
        /// What.
        what: &'static str,
    },
    /// Neither the fair nor the capacity scheduler.
    #[error("is of the scheduler {kind:?}; the fair and the capacity scheduler have queues")]
    UnknownScheduler {
        /// As it calls itself.
        kind: String,
    },
    /// A queue does not say how much it may have.
    #[error("is not to be understood: the queue {path} says neither how much nor which share it may have")]
    NoSize {
        /// Which queue.
        path: String,
    },
    /// A queue's use or maximum is there and is not read.
    #[error("is not to be understood: the {what} of the queue {path} is no amount of memory and cores")]
    NoAmounts {
        /// Use or maximum.
        what: &'static str,
        /// Path of the queue.
        path: String,
    },
    /// A queue without queues in it states no use.
    #[error("is not to be understood: the queue {path} does not state its use")]
    NoUse {
        /// Path of the queue.
        path: String,
    },
    /// An amount of an application is there and is not read.
    #[error("is not to be understood: {what} of the application {id} is no amount")]
    NoAllocation {
        /// Key of the amount.
        what: &'static str,
        /// Id of the application.
        id: String,
    },
    /// Two queues are the same.
    #[error("is not to be understood: it has the queue {path} twice")]
    SamePath {
        /// Which.
        path: String,
    },
    /// A path is too long.
    #[error("has a queue whose path has more than {most} bytes")]
    LongPath {
        /// How long it may be.
        most: usize,
    },
}

impl From<ParseError> for Failure {
    fn from(error: ParseError) -> Self {
        Self::Unreadable(error.to_string())
    }
}

/// A YARN cluster.
#[derive(Debug)]
pub struct Yarn {
    config: Config,
    active: fetch::LastActive,
}

impl ExternalResource for Yarn {
    fn addresses(&self) -> &[Address] {
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

    fn queues<'a>(&'a self, http: &'a Http) -> Fetching<'a, Queues> {
        Box::pin(fetch::queues(self, http))
    }

    fn applications<'a>(&'a self, http: &'a Http) -> Fetching<'a, Vec<Application>> {
        Box::pin(fetch::applications(self, http))
    }
}
