//! Errors of calls about external clusters.

use std::sync::Arc;

use rm_external::FetchError;
use rm_model::{provider::PROVIDERS_MAX, queue::QueueError};

/// Reason why a call about an external cluster failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExternalError {
    /// No provider of the type has the name.
    #[error("there is no provider {name:?} of the type {resource_type:?}; ListProviders tells which there are")]
    NoSuchProvider {
        /// Provider type.
        resource_type: String,
        /// Name of the provider.
        name: String,
    },
    /// No provider matches the labels of the request.
    #[error("no provider of the type {resource_type:?} is for these labels, and none for all: put one without labels")]
    NoProviderFor {
        /// Provider type.
        resource_type: String,
    },
    /// The provider differs from the expected etag.
    #[error("the provider {name:?} is not what expected_etag says; nothing was changed: read it again")]
    Changed {
        /// Name of the provider.
        name: String,
    },
    /// Another provider has equal labels.
    #[error("the provider {name:?} is for the same labels; give others, or change that one")]
    LabelsTaken {
        /// Name of that provider.
        name: String,
    },
    /// The maximum number of providers is reached.
    #[error("there are {PROVIDERS_MAX} providers already, which is the most; delete one first")]
    TooMany,
    /// A name refers to no queue, or to several.
    #[error("the provider {provider:?} does not say which queue that is: {error}")]
    Queue {
        /// Name of the provider.
        provider: String,
        /// Reason of the lookup.
        error: QueueError,
    },
    /// The cluster sent no usable reply.
    #[error("the provider {provider:?} does not tell: {error}")]
    Fetch {
        /// Name of the provider.
        provider: String,
        /// Reason of the failure.
        error: Arc<FetchError>,
    },
}
