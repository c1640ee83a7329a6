//! Check of a provider: one read of its queues and applications, without the cache and without a write.
//!
//! Never: stores a provider, or returns content of a cluster beyond numbers.
//! Caller: `rm_edge::external`.

use std::{sync::Arc, time::Duration};

use async_recursion::async_recursion as boxed;
use tokio::time::{Instant, timeout};

use crate::{error::Error, fair_semaphore::FairSemaphore};
use rm_external::{ExternalCluster, FetchError, FetchFuture};
use rm_model::{name::Name, principal::Principal};
use rm_store::{external_resource_provider as table, session::within_timeout};
use rm_telemetry::metrics::GaugeGuard;

use super::{ExternalResourceService, PutProvider, cluster, is, no_such_provider};

/// Maximum number of concurrent checks of an instance: each may last [`CHECK_TIMEOUT`].
const CHECKS_MAX: usize = 4;

/// Timeout of a check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(20);

/// Creates the permits of checks.
pub(super) fn permits() -> Arc<FairSemaphore> {
    FairSemaphore::of(CHECKS_MAX)
}

/// Provider to check.
#[derive(Debug)]
pub enum CheckedProvider {
    /// The stored provider with this type and name.
    Stored(Name, Name),
    /// A provider that need not be stored.
    New(PutProvider),
}

/// Content of a provider.
#[derive(Debug, Clone, Copy)]
pub struct ProviderContent {
    /// Number of queues.
    pub queues: usize,
    /// Number of applications.
    pub applications: usize,
    /// Duration of reading the queues.
    pub queues_duration: Duration,
    /// Duration of reading the applications.
    pub applications_duration: Duration,
}

/// Result of a check.
#[derive(Debug)]
pub enum ProviderCheck {
    /// The provider was read.
    Content(ProviderContent),
    /// The provider cannot be read.
    Failure(FetchError),
    /// The provider did not reply in time.
    TimedOut(Duration),
}

impl ExternalResourceService {
    /// Reads a provider once.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if too many checks run; [`ExternalError::NoSuchProvider`](crate::error::ExternalError::NoSuchProvider); [`Error::InvalidField`] for the
    /// configuration or an address that is not allowed; database errors.
    #[boxed]
    pub async fn check_provider(&self, by: &Principal, checked: CheckedProvider) -> Result<ProviderCheck, Error> {
        let _permit = self.checks.acquire(by).ok_or(Error::Overloaded)?;
        let _running = GaugeGuard::in_gauge(&self.metrics.external.checks);
        let cluster = self.checked(&checked).await?;
        let begun = Instant::now();
        let check = timeout(CHECK_TIMEOUT, self.content(&*cluster)).await;
        let (check, failed) = match check {
            Ok(Ok(content)) => (ProviderCheck::Content(content), None),
            Ok(Err(error)) => {
                let class = error.class();
                (ProviderCheck::Failure(error), Some(class))
            }
            Err(_) => (ProviderCheck::TimedOut(CHECK_TIMEOUT), Some("timeout")),
        };
        self.metrics.external.fetched(failed, begun.elapsed());
        Ok(check)
    }

    /// Returns the cluster of the provider.
    async fn checked(&self, checked: &CheckedProvider) -> Result<Box<dyn ExternalCluster>, Error> {
        let records = within_timeout(table::read(&self.store.pool().await?)).await?;
        let stored = |resource_type: &Name, name: &Name| records.iter().find(|record| is(record, resource_type, name));
        match checked {
            CheckedProvider::Stored(resource_type, name) => {
                let none = || no_such_provider(resource_type, name);
                Ok(cluster(stored(resource_type, name).ok_or_else(none)?)?)
            }
            CheckedProvider::New(put) => self.parse(put, stored(&put.provider.resource_type, &put.provider.name)),
        }
    }

    async fn content(&self, cluster: &dyn ExternalCluster) -> Result<ProviderContent, FetchError> {
        let (queues, queues_duration) = timed(cluster.queues(&self.http)).await?;
        let (applications, applications_duration) = timed(cluster.applications(&self.http)).await?;
        let (queues, applications) = (queues.behind(None).count(), applications.len());
        Ok(ProviderContent { queues, applications, queues_duration, applications_duration })
    }
}

async fn timed<T>(fetch: FetchFuture<'_, T>) -> Result<(T, Duration), FetchError> {
    let begun = Instant::now();
    let value = fetch.await?;
    Ok((value, begun.elapsed()))
}
