//! Kubernetes, by the API of its server: its namespaces are queues, and its nodes the root that they are in.
//!
//! - `quantity`: amounts as Kubernetes writes them;
//! - `answer`: pages of lists, and of what is listed no more than is looked at;
//! - `bounded`: lists and amounts that are bounded while they are read;
//! - `room`: what quotas, nodes and pods leave each namespace;
//! - `config`: what Linkis writes of a cluster, and what is told of it;
//! - `access`: where the server is, and who asks, from files that are read again each time;
//! - `fetch`: asks.

use secrecy::SecretString;

use crate::domain::{
    external::CheckRules,
    queue::{Application, Queues},
};

use super::{
    Address, ExternalResource, Fetching,
    http::{Failure, Http},
};

mod access;
mod answer;
mod bounded;
mod config;
mod fetch;
mod kubeconfig;
mod quantity;
mod room;

use config::Config;
pub use config::read;

/// Why an answer cannot be used. It does not repeat what the answer holds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum ParseError {
    /// It is no such list.
    #[error("is no {kind} in JSON: it {} at line {line}, column {column}", if *is_cut { "ends in the middle" } else { "breaks off" })]
    NotJson {
        /// Which list it should be.
        kind: &'static str,
        /// Where, from 1 on.
        line: usize,
        /// Likewise.
        column: usize,
        /// Whether it ends there.
        is_cut: bool,
    },
    /// It is something else.
    #[error("is no {kind}")]
    Other {
        /// Which list it should be.
        kind: &'static str,
    },
    /// There is more than is kept.
    #[error("has more than {most} {what}")]
    TooMany {
        /// How much is kept.
        most: usize,
        /// Of what.
        what: &'static str,
    },
    /// Something in it is none of what Kubernetes writes.
    #[error("is not to be understood: there is {what} that is none")]
    Malformed {
        /// What it should be.
        what: &'static str,
    },
}

impl From<ParseError> for Failure {
    fn from(error: ParseError) -> Self {
        Self::Unreadable(error.to_string())
    }
}

/// A Kubernetes cluster.
#[derive(Debug)]
pub struct Kubernetes {
    config: Config,
}

impl ExternalResource for Kubernetes {
    fn addresses(&self) -> &[Address] {
        self.config.source.address().map_or(&[], std::slice::from_ref)
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
        Box::pin(fetch::queues(&self.config.source, http))
    }

    /// It has none: pods belong to whoever made them, and a request says nothing of that.
    fn applications<'a>(&'a self, _: &'a Http) -> Fetching<'a, Vec<Application>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
}
