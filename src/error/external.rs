//! Why a call about clusters failed whose queues somebody else keeps.

use std::sync::Arc;

use crate::{
    domain::{provider::PROVIDERS_MAX, queue::QueueError},
    external::FetchError,
};

/// Why a call about clusters failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExternalError {
    /// No provider has that name.
    #[error("there is no provider {name:?} of the type {resource_type:?}; ListProviders tells which there are")]
    NoSuchProvider {
        /// Of which type.
        resource_type: String,
        /// Which.
        name: String,
    },
    /// No provider is for these labels.
    #[error("no provider of the type {resource_type:?} is for these labels, and none for all: put one without labels")]
    NoProviderFor {
        /// Of which type.
        resource_type: String,
    },
    /// It is not what its caller expected.
    #[error("the provider {name:?} is not what expected_etag says; nothing was changed: read it again")]
    Changed {
        /// Which.
        name: String,
    },
    /// Another one has the same labels.
    #[error("the provider {name:?} is for the same labels; give others, or change that one")]
    LabelsTaken {
        /// Which.
        name: String,
    },
    /// There are enough.
    #[error("there are {PROVIDERS_MAX} providers already, which is the most; delete one first")]
    TooMany,
    /// A name means no queue, or several.
    #[error("the provider {provider:?} does not say which queue that is: {error}")]
    Queue {
        /// Which provider.
        provider: String,
        /// Why not.
        error: QueueError,
    },
    /// The cluster said nothing that can be used.
    #[error("the provider {provider:?} does not tell: {error}")]
    Fetch {
        /// Which provider.
        provider: String,
        /// Why not.
        error: Arc<FetchError>,
    },
}
