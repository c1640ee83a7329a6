//! Errors of calls about external clusters, with texts for callers. Callers: `external`, and
//! `rm_edge::status`, which maps them to statuses.

use std::sync::Arc;

use rm_external::FetchError;
use rm_model::{provider::PROVIDERS_MAX, queue::QueueError};

/// Reason why a call about an external cluster failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExternalError {
    /// No provider of the type has the name.
    #[error("there is no provider {name:?} of the type {resource_type:?}; ListProviders returns all providers")]
    NoSuchProvider {
        /// Provider type.
        resource_type: String,
        /// Name of the provider.
        name: String,
    },
    /// No provider matches the labels of the request.
    #[error(
        "no provider of the type {resource_type:?} matches the labels; put one with these labels, or without labels"
    )]
    NoProviderFor {
        /// Provider type.
        resource_type: String,
    },
    /// The provider differs from the expected etag.
    #[error("the provider {name:?} has another etag than expected_etag; nothing was changed: read it again")]
    Changed {
        /// Name of the provider.
        name: String,
    },
    /// Another provider has equal labels.
    #[error("the provider {name:?} has the same labels; give others, or change that provider")]
    LabelsTaken {
        /// Name of that provider.
        name: String,
    },
    /// The maximum number of providers is reached.
    #[error("{PROVIDERS_MAX} providers exist, which is the maximum; delete one first")]
    TooMany,
    /// A name refers to no queue, or to several.
    #[error("the provider {provider:?} cannot resolve the queue: {error}")]
    Queue {
        /// Name of the provider.
        provider: String,
        /// Reason of the lookup.
        error: QueueError,
    },
    /// The cluster sent no usable reply.
    #[error("the provider {provider:?} is unavailable: {error}")]
    Fetch {
        /// Name of the provider.
        provider: String,
        /// Reason of the failure.
        error: Arc<FetchError>,
    },
}
