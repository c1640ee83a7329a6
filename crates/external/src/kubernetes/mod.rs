//! Kubernetes clusters, by the API of their server. Namespaces are queues; the nodes together are the root queue.
//!
//! The fetch lists namespaces and quotas, and also nodes and pods if a namespace has no complete quota. Kubernetes has
//! no applications. Caller: the parent module.
//!
//! Submodules: `quantity`: Kubernetes amounts; `objects`: list pages; `capacity`: free capacity; `config`: configuration;
//! `yaml`, `kubeconfig`: kubeconfig files; `access`: address and credentials; `fetch`: requests.

use secrecy::SecretString;

use rm_model::{
    external::CheckRules,
    queue::{Application, QueueTree},
};

use super::{
    ExternalCluster, FetchFuture, ServerAddress,
    http::{ClusterHttp, HttpFailure},
};

mod access;
mod capacity;
mod config;
mod fetch;
mod kubeconfig;
mod objects;
mod quantity;
mod yaml;

use config::KubernetesConfig;
pub use config::read;

/// Reason why a response is rejected. The text never contains data of the response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum KubernetesParseError {
    /// The response is no JSON of the expected list.
    #[error("is not a {kind} in JSON: it is {} at line {line}, column {column}", if *is_cut { "truncated" } else { "invalid" })]
    NotJson {
        /// Expected kind of list.
        kind: &'static str,
        /// Line of the error, from 1.
        line: usize,
        /// Column of the error, from 1.
        column: usize,
        /// Whether the text ends there.
        is_cut: bool,
    },
    /// The response is another object.
    #[error("is not a {kind}")]
    Other {
        /// Expected kind of list.
        kind: &'static str,
    },
    /// The list exceeds its maximum length.
    #[error("has more than {most} {what}")]
    TooMany {
        /// Maximum number of objects.
        most: usize,
        /// Kind of the objects.
        what: &'static str,
    },
    /// A value has no valid form.
    #[error("cannot be parsed: {what} is malformed")]
    Malformed {
        /// Expected value.
        what: &'static str,
    },
}

impl From<KubernetesParseError> for HttpFailure {
    fn from(error: KubernetesParseError) -> Self {
        Self::Unreadable(error.to_string())
    }
}

/// A Kubernetes cluster.
#[derive(Debug)]
pub struct Kubernetes {
    config: KubernetesConfig,
}

impl ExternalCluster for Kubernetes {
    fn addresses(&self) -> &[ServerAddress] {
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

    fn queues<'a>(&'a self, http: &'a ClusterHttp) -> FetchFuture<'a, QueueTree> {
        Box::pin(fetch::queues(&self.config.source, http))
    }

    /// Returns none: a pod belongs to the application that created it, which a request does not name.
    fn applications<'a>(&'a self, _: &'a ClusterHttp) -> FetchFuture<'a, Vec<Application>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
}
