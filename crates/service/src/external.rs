//! External clusters: stores their providers, and reads queues and applications from them.
//!
//! The provider of a call is read from the database each time, so a change is effective immediately on all instances. Replies
//! of a cluster are cached for `REFRESH`, so concurrent callers cost one fetch, also if the cluster does not reply.
//!
//! Never: returns secrets of a provider's configuration.
//! Callers: `rm_edge::external`, and the server, which spawns `refresh`.
//!
//! - `check`: one read of a provider, for operators.
//! - `refresh`: snapshots by which requests for external queues are decided; `preparation_cache`: cache of their preparations.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::Future,
    sync::{Arc, Mutex as StdMutex},
    time::Duration,
};

use async_recursion::async_recursion as boxed;
use secrecy::{ExposeSecret as _, SecretString};
use sqlx::{Connection as _, Postgres, Transaction};
use tokio::{
    sync::{Mutex, MutexGuard, Notify},
    time::{Instant, timeout_at},
};
use uuid::Uuid;

use crate::{
    commit::commit,
    error::{Error, ExternalError},
    fair_semaphore::FairSemaphore,
    lock::lock,
};
use rm_external::{self, ExternalCluster, FetchError, http::ClusterHttp};
use rm_model::{
    action::Action,
    name::{FieldError, Name},
    principal::Actor,
    provider::{PROVIDERS_MAX, Provider, choose},
    queue::{Application, QueueTree},
    recorded_state::RecordedState,
};
use rm_store::{
    Store, StoreError,
    action_record::{self, OtherAct},
    external_refresh,
    external_resource_provider::{self as table, ProviderRecord},
    external_ticket,
    session::{Session, within_timeout},
};
use rm_telemetry::metrics::Metrics;

mod check;
mod preparation_cache;
mod refresh;

pub use check::{CheckedProvider, ProviderCheck, ProviderContent};
pub use refresh::run as refresh;

/// Time for which a reply of a cluster is reused.
const REFRESH: Duration = Duration::from_secs(2);

/// Provider to store.
#[derive(Debug)]
pub struct PutProvider {
    /// The provider.
    pub provider: Provider,
    /// Configuration: a JSON object of the provider's type.
    pub config: SecretString,
}

/// Precondition of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedProvider {
    /// No precondition.
    Anything,
    /// No provider of this name exists.
    Nothing,
    /// The provider has this etag.
    Etag(Uuid),
    /// Never satisfied: the caller's etag cannot be one.
    Unknown,
}

/// Selects the provider to read from.
#[derive(Debug, Clone)]
pub struct ProviderSelector {
    /// Type of the provider.
    pub resource_type: Name,
    /// Name, or labels of a request.
    pub by: ProviderKey,
}

/// Key of a provider.
#[derive(Debug, Clone)]
pub enum ProviderKey {
    /// Name of the provider.
    Name(Name),
    /// The labels of a request; the best match is selected.
    Labels(BTreeMap<String, String>),
}

/// Provider without secrets.
#[derive(Debug, Clone)]
pub struct ProviderView {
    /// The record; its configuration contains secrets and must not be returned.
    pub record: ProviderRecord,
    /// Configuration without secrets.
    pub config: String,
}

/// Reply of a provider.
#[derive(Debug, Clone)]
pub struct ProviderReply<T> {
    /// Name of the provider.
    pub provider: Name,
    /// The reply.
    pub value: Arc<T>,
    /// Age of the reply.
    pub age: Duration,
}

/// Service for external clusters. Clones share it.
#[derive(Clone, Debug)]
pub struct ExternalResourceService {
    store: Store,
    http: ClusterHttp,
    metrics: Metrics,
    /// Serializes changes of providers.
    changing: Arc<Mutex<()>>,
    /// Wakes the task that refreshes snapshots.
    changed: Arc<Notify>,
    /// Permits of checks.
    checks: Arc<FairSemaphore>,
    /// Providers as last read, at most [`PROVIDERS_MAX`].
    sources: Arc<StdMutex<ProviderSources>>,
}

/// Providers by type and name.
type ProviderSources = HashMap<(Name, Name), Arc<ProviderSource>>;

/// Provider with its cached replies.
#[derive(Debug)]
struct ProviderSource {
    name: Name,
    etag: Uuid,
    cluster: Box<dyn ExternalCluster>,
    queues: CachedReading<QueueTree>,
    applications: CachedReading<Vec<Application>>,
}

type FetchResult<T> = Result<Arc<T>, Arc<FetchError>>;

/// Last fetch: its time and result.
type LastFetch<T> = Option<(Instant, FetchResult<T>)>;

/// Cached reply.
#[derive(Debug)]
struct CachedReading<T>(Arc<Mutex<LastFetch<T>>>);

impl<T> Default for CachedReading<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Send + Sync + 'static> CachedReading<T> {
    /// Returns the cached reply if it is at most [`REFRESH`] old, else a new one. Concurrent callers share the fetch, which
    /// continues even if all of them are gone.
    async fn get(
        &self,
        metrics: &Metrics,
        fetch: impl Future<Output = Result<T, FetchError>> + Send + 'static,
    ) -> Result<(FetchResult<T>, Duration), Error> {
        let mut kept = self.0.clone().lock_owned().await;
        if let Some((at, fetched)) = &*kept
            && at.elapsed() < REFRESH
        {
            return Ok((fetched.clone(), at.elapsed()));
        }
        let metrics = metrics.clone();
        let fetching = tokio::spawn(async move {
            let begun = Instant::now();
            let fetched = fetch.await.map(Arc::new).map_err(Arc::new);
            metrics.external.fetched(fetched.as_ref().err().map(|error| error.class()), begun.elapsed());
            // A reply is as old as its request. A failure counts from its end, so that the cluster has a pause.
            let at = if fetched.is_ok() { begun } else { Instant::now() };
            *kept = Some((at, fetched.clone()));
            (fetched, at.elapsed())
        });
        fetching.await.map_err(Error::defect)
    }
}

impl ExternalResourceService {
    /// Creates the service.
    pub fn new(store: Store, http: ClusterHttp, metrics: Metrics) -> Self {
        let (changing, changed, sources) = (Arc::default(), Arc::default(), Arc::default());
        Self { store, http, metrics, changing, changed, checks: check::permits(), sources }
    }

    /// Adds or changes a provider.
    ///
    /// # Errors
    /// - [`Error::InvalidField`] for the configuration or an address that is not allowed.
    /// - [`ExternalError::Changed`] if `expected` does not match; [`ExternalError::LabelsTaken`]; [`ExternalError::TooMany`].
    /// - [`Error::LockTimeout`] at `deadline`; [`Error::CommitUnknown`].
    #[boxed]
    pub async fn put_provider(
        &self,
        by: &Actor,
        put: PutProvider,
        expected: ExpectedProvider,
        deadline: Instant,
    ) -> Result<ProviderView, Error> {
        let _turn = self.turn(deadline).await?;
        let mut session = self.store.operator_session();
        let (mut transaction, records) = begin(&mut session).await?;
        let cluster = self.check(&put, &records, expected)?;
        let (PutProvider { provider, .. }, etag, config) = (put, Uuid::new_v4(), cluster.stored());
        let before = records.iter().find(|record| is(record, &provider.resource_type, &provider.name)).map(state);
        let after = Some(RecordedState::of_provider(provider.labels.as_map(), &cluster.shown()));
        let line = OtherAct { action: Action::ProviderPut, object: object(&provider), before, after };
        let written = within_timeout(async {
            let update_time = table::upsert(&mut transaction, &provider, &config, etag, &by.principal).await?;
            external_refresh::put(&mut transaction, &provider, etag, &cluster.rules()).await?;
            action_record::insert_others(&mut transaction, &[line], by).await?;
            Ok::<_, StoreError>(update_time)
        });
        let update_time = written.await?;
        commit(transaction).await?;
        self.changed.notify_one();
        let record = ProviderRecord { provider, config, etag, updated_by: by.principal.clone(), update_time };
        Ok(ProviderView { record, config: cluster.shown() })
    }

    /// Checks that a provider can be stored besides, or in place of, the existing ones.
    fn check(
        &self,
        put: &PutProvider,
        records: &[ProviderRecord],
        expected: ExpectedProvider,
    ) -> Result<Box<dyn ExternalCluster>, Error> {
        let provider = &put.provider;
        let before = records.iter().find(|record| is(record, &provider.resource_type, &provider.name));
        expected.check(&provider.name, before)?;
        let cluster = self.parse(put, before)?;
        let same_labels = |record: &&ProviderRecord| {
            record.provider.resource_type == provider.resource_type
                && record.provider.name != provider.name
                && record.provider.labels == provider.labels
        };
        match records.iter().find(same_labels) {
            Some(other) => Err(ExternalError::LabelsTaken { name: other.provider.name.to_string() }.into()),
            None if before.is_none() && records.len() >= PROVIDERS_MAX => Err(ExternalError::TooMany.into()),
            None => Ok(cluster),
        }
    }

    /// Parses the configuration of a provider and checks its addresses. Omitted secrets come from `before`, the stored provider.
    fn parse(&self, put: &PutProvider, before: Option<&ProviderRecord>) -> Result<Box<dyn ExternalCluster>, Error> {
        let PutProvider { provider, config } = put;
        let known = before.map(|before| before.config.expose_secret());
        let cluster = rm_external::read(provider.resource_type.as_str(), config.expose_secret(), known)
            .map_err(|FieldError { field, problem }| FieldError::new(format!("provider.{field}"), problem))?;
        for address in cluster.addresses() {
            let problem = |failure| format!("{} {failure}", address.as_str());
            let not_allowed = |failure| FieldError::new("provider.config", problem(failure));
            self.http.check(address).map_err(not_allowed)?;
        }
        Ok(cluster)
    }

    /// Deletes a provider.
    ///
    /// # Errors
    /// - [`ExternalError::NoSuchProvider`]; [`ExternalError::Changed`] if `expected` does not match.
    /// - [`Error::LockTimeout`] at `deadline`; [`Error::CommitUnknown`].
    #[boxed]
    pub async fn delete(
        &self,
        by: &Actor,
        resource_type: &Name,
        name: &Name,
        expected: ExpectedProvider,
        deadline: Instant,
    ) -> Result<(), Error> {
        let _turn = self.turn(deadline).await?;
        let mut session = self.store.operator_session();
        let (mut transaction, records) = begin(&mut session).await?;
        let before = records.iter().find(|record| is(record, resource_type, name));
        let before = before.ok_or_else(|| no_such_provider(resource_type, name))?;
        expected.check(name, Some(before))?;
        let (object, before) = (object(&before.provider), Some(state(before)));
        let line = OtherAct { action: Action::ProviderDeleted, object, before, after: None };
        let deleted = within_timeout(async {
            table::delete(&mut transaction, resource_type, name).await?;
            external_refresh::delete(&mut transaction, resource_type.as_str(), name.as_str()).await?;
            action_record::insert_others(&mut transaction, &[line], by).await
        });
        deleted.await?;
        commit(transaction).await?;
        self.changed.notify_one();
        Ok(())
    }

    /// Returns all providers, by type and name.
    ///
    /// # Errors
    /// Database errors, and stored configurations that cannot be read.
    #[boxed]
    pub async fn providers(&self) -> Result<Vec<ProviderView>, Error> {
        let records = within_timeout(table::read(&self.store.pool().await?)).await?;
        records.into_iter().map(shown).collect()
    }

    /// Returns the queues of a provider.
    ///
    /// # Errors
    /// [`ExternalError::NoSuchProvider`], [`ExternalError::NoProviderFor`], [`ExternalError::Fetch`].
    #[boxed]
    pub async fn queues(&self, selector: &ProviderSelector) -> Result<ProviderReply<QueueTree>, Error> {
        let source = self.source(selector).await?;
        let (asked, http) = (source.clone(), self.http.clone());
        let fetch = async move { asked.cluster.queues(&http).await };
        source.seen(source.queues.get(&self.metrics, fetch).await?)
    }

    /// Returns the running applications of a provider, by id.
    ///
    /// # Errors
    /// As of [`ExternalResourceService::queues`].
    #[boxed]
    pub async fn applications(&self, selector: &ProviderSelector) -> Result<ProviderReply<Vec<Application>>, Error> {
        let source = self.source(selector).await?;
        let (asked, http) = (source.clone(), self.http.clone());
        let fetch = async move { asked.cluster.applications(&http).await };
        source.seen(source.applications.get(&self.metrics, fetch).await?)
    }

    /// Returns the tickets of applications of a provider, for those that engines have reported.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn tickets_of(&self, provider: &Name, ids: &[&str]) -> Result<HashMap<String, Uuid>, Error> {
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        Ok(within_timeout(external_ticket::of_applications(&self.store.pool().await?, provider.as_str(), ids)).await?)
    }

    /// Returns the provider as stored, with its cached replies unless it has changed.
    async fn source(&self, selector: &ProviderSelector) -> Result<Arc<ProviderSource>, Error> {
        let records = within_timeout(table::read(&self.store.pool().await?)).await?;
        let providers = records.iter().map(|record| &record.provider);
        let resource_type = &selector.resource_type;
        let name = match &selector.by {
            ProviderKey::Name(name) => name.clone(),
            ProviderKey::Labels(labels) => {
                let none = || ExternalError::NoProviderFor { resource_type: resource_type.to_string() };
                choose(providers, resource_type.as_str(), labels).ok_or_else(none)?.name.clone()
            }
        };
        let mut sources = lock(&self.sources);
        sources.retain(|(resource_type, name), _| records.iter().any(|record| is(record, resource_type, name)));
        let record = records.into_iter().find(|record| is(record, resource_type, &name));
        let record = record.ok_or_else(|| no_such_provider(resource_type, &name))?;
        let key = (resource_type.clone(), name.clone());
        if let Some(source) = sources.get(&key).filter(|source| source.etag == record.etag) {
            return Ok(source.clone());
        }
        let source = Arc::new(ProviderSource {
            name,
            etag: record.etag,
            cluster: cluster(&record)?,
            queues: CachedReading::default(),
            applications: CachedReading::default(),
        });
        sources.insert(key, source.clone());
        Ok(source)
    }

    /// Waits for the permit to change providers.
    async fn turn(&self, deadline: Instant) -> Result<MutexGuard<'_, ()>, Error> {
        timeout_at(deadline, self.changing.lock()).await.map_err(|_| Error::LockTimeout)
    }
}

impl ProviderSource {
    fn seen<T>(&self, (fetched, age): (FetchResult<T>, Duration)) -> Result<ProviderReply<T>, Error> {
        match fetched {
            Ok(value) => Ok(ProviderReply { provider: self.name.clone(), value, age }),
            Err(error) => Err(ExternalError::Fetch { provider: self.name.to_string(), error }.into()),
        }
    }
}

impl ExpectedProvider {
    fn check(self, name: &Name, found: Option<&ProviderRecord>) -> Result<(), ExternalError> {
        let holds = match self {
            Self::Anything => true,
            Self::Nothing => found.is_none(),
            Self::Etag(etag) => found.is_some_and(|found| found.etag == etag),
            Self::Unknown => false,
        };
        holds.then_some(()).ok_or_else(|| ExternalError::Changed { name: name.to_string() })
    }
}

/// Begins a change under the table lock. Returns all providers.
async fn begin(session: &mut Session) -> Result<(Transaction<'_, Postgres>, Vec<ProviderRecord>), Error> {
    let connection = session.get().await?;
    let begun = within_timeout(async {
        let mut transaction = connection.begin().await?;
        table::lock(&mut transaction).await?;
        let records = table::read(&mut *transaction).await?;
        Ok::<_, StoreError>((transaction, records))
    });
    Ok(begun.await?)
}

fn is(record: &ProviderRecord, resource_type: &Name, name: &Name) -> bool {
    record.provider.resource_type == *resource_type && record.provider.name == *name
}

fn no_such_provider(resource_type: &Name, name: &Name) -> ExternalError {
    ExternalError::NoSuchProvider { resource_type: resource_type.to_string(), name: name.to_string() }
}

/// Returns the object name in the history.
fn object(provider: &Provider) -> String {
    format!("provider {}/{}", provider.resource_type, provider.name)
}

/// Returns the state for the history, without secrets; only the labels if the configuration cannot be read.
fn state(record: &ProviderRecord) -> RecordedState {
    let config = cluster(record).map(|cluster| cluster.shown()).unwrap_or_default();
    RecordedState::of_provider(record.provider.labels.as_map(), &config)
}

/// Parses a stored configuration. Only a later release or a manual change can have stored an invalid one. The error does not
/// quote it.
fn cluster(record: &ProviderRecord) -> Result<Box<dyn ExternalCluster>, Error> {
    let Provider { resource_type, name, .. } = &record.provider;
    let read = rm_external::read(resource_type.as_str(), record.config.expose_secret(), None);
    let inconsistent = |error: &dyn fmt::Display| {
        StoreError::inconsistent("linkis_external_resource_provider", format!("{name}: {error}"))
    };
    Ok(read.map_err(|error| inconsistent(&error))?)
}

fn shown(record: ProviderRecord) -> Result<ProviderView, Error> {
    let config = cluster(&record)?.shown();
    Ok(ProviderView { record, config })
}
