//! Clusters whose queues somebody else keeps: which there are, and what they say of their queues and applications.
//!
//! Which provider a call is about is read from the database each time, so that a change holds at once everywhere. What a cluster
//! says is kept for a moment: however many ask an instance, it asks the cluster once, and for one that is dead once in that moment.
//!
//! - `refresh`: snapshots, by which requests are judged in queues; `kept`: what was counted for the last one.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::Future,
    sync::{Arc, Mutex as StdMutex, MutexGuard as StdMutexGuard, PoisonError},
    time::Duration,
};

use secrecy::{ExposeSecret as _, SecretString};
use sqlx::{Connection as _, Postgres, Transaction};
use tokio::{
    sync::{Mutex, MutexGuard, Notify},
    time::{Instant, timeout_at},
};
use uuid::Uuid;

use crate::{
    domain::{
        action::Action,
        external::CheckRules,
        name::{FieldError, Name},
        principal::Actor,
        provider::{PROVIDERS_MAX, Provider, choose},
        queue::{Application, Queues},
        state::State,
    },
    error::{Error, ExternalError},
    external::{self, ExternalResource, FetchError, http::Http},
    metrics::Metrics,
    store::{
        Store, StoreError,
        action_record::{self, OtherLine},
        external_refresh,
        external_resource_provider::{self as table, ProviderRecord},
        external_ticket, limit,
        session::{Session, answered},
    },
};

mod kept;
mod refresh;

pub use refresh::run as refresh;

/// For how long nothing is asked again.
const REFRESH: Duration = Duration::from_secs(2);

/// A provider to be put.
#[derive(Debug)]
pub struct Put {
    /// Which.
    pub provider: Provider,
    /// How it is asked: a JSON object, as its type has it.
    pub config: SecretString,
}

/// What a caller knows of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedProvider {
    /// Nothing.
    Anything,
    /// That there is none.
    Nothing,
    /// That it is this one.
    Etag(Uuid),
    /// That it is what no provider ever is.
    Unknown,
}

/// Which provider is asked.
#[derive(Debug, Clone)]
pub struct Selector {
    /// Of which type.
    pub resource_type: Name,
    /// By its name, or as the one for requests with these labels.
    pub by: SelectBy,
}

/// How a provider is told from others.
#[derive(Debug, Clone)]
pub enum SelectBy {
    /// By its name.
    Name(Name),
    /// By the labels of a request.
    Labels(BTreeMap<String, String>),
}

/// A provider as it may be told: without secrets.
#[derive(Debug, Clone)]
pub struct Shown {
    /// All but its configuration, which must not be told.
    pub record: ProviderRecord,
    /// Its configuration, without secrets.
    pub config: String,
}

/// What a provider said.
#[derive(Debug, Clone)]
pub struct Seen<T> {
    /// Its name.
    pub provider: Name,
    /// What it said.
    pub value: Arc<T>,
    /// How long ago.
    pub age: Duration,
}

/// Keeps providers, and asks them.
#[derive(Clone, Debug)]
pub struct ExternalResourceService {
    store: Store,
    http: Http,
    metrics: Metrics,
    /// One change at a time.
    changing: Arc<Mutex<()>>,
    /// A cluster is to be asked at once.
    changed: Arc<Notify>,
    /// As they were when they were last asked: at most as many as there may be.
    sources: Arc<StdMutex<Sources>>,
}

/// Providers by type and name.
type Sources = HashMap<(Name, Name), Arc<Source>>;

/// A provider that is asked.
#[derive(Debug)]
struct Source {
    name: Name,
    etag: Uuid,
    cluster: Box<dyn ExternalResource>,
    queues: Kept<Queues>,
    applications: Kept<Vec<Application>>,
}

/// What came of a fetch.
type Fetched<T> = Result<Arc<T>, Arc<FetchError>>;

/// When something was fetched, and what came of it.
type Last<T> = Option<(Instant, Fetched<T>)>;

/// What was last said.
#[derive(Debug)]
struct Kept<T>(Arc<Mutex<Last<T>>>);

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Send + Sync + 'static> Kept<T> {
    /// What was said no longer than [`REFRESH`] ago, or what is said now. Whoever comes while it is being fetched waits for that, and it
    /// is fetched to the end, also if nobody waits any more.
    async fn get(
        &self,
        metrics: &Metrics,
        fetch: impl Future<Output = Result<T, FetchError>> + Send + 'static,
    ) -> Result<(Fetched<T>, Duration), Error> {
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
            // An answer is as old as the question; a failure counts from its end, so that there is a rest before it is tried again.
            let at = if fetched.is_ok() { begun } else { Instant::now() };
            *kept = Some((at, fetched.clone()));
            (fetched, at.elapsed())
        });
        fetching.await.map_err(Error::defect)
    }
}

impl ExternalResourceService {
    /// On top of the store; asks by `http`.
    pub fn new(store: Store, http: Http, metrics: Metrics) -> Self {
        Self { store, http, metrics, changing: Arc::default(), changed: Arc::default(), sources: Arc::default() }
    }

    /// Adds a provider, or changes it.
    ///
    /// # Errors
    /// A field that is wrong; [`ExternalError::Changed`], [`ExternalError::LabelsTaken`], [`ExternalError::TooMany`];
    /// [`Error::LockTimeout`]; [`Error::CommitUnknown`].
    pub async fn put(
        &self,
        by: &Actor,
        put: Put,
        expected: ExpectedProvider,
        deadline: Instant,
    ) -> Result<Shown, Error> {
        let _turn = self.turn(deadline).await?;
        let mut session = self.store.operator_session();
        let (mut transaction, records) = begin(&mut session).await?;
        let cluster = self.check(&put, &records, expected)?;
        let (Put { provider, .. }, etag, config) = (put, Uuid::new_v4(), cluster.stored());
        let before = records.iter().find(|record| is(record, &provider.resource_type, &provider.name)).map(state);
        let after = Some(State::of_provider(provider.labels.as_map(), &cluster.shown()));
        let line = OtherLine { action: Action::ProviderPut, object: object(&provider), before, after };
        let written = answered(async {
            let update_time = table::upsert(&mut transaction, &provider, &config, etag, &by.principal).await?;
            put_cluster(&mut transaction, &provider, etag, &cluster.rules()).await?;
            action_record::insert_others(&mut transaction, &[line], by).await?;
            Ok::<_, StoreError>(update_time)
        });
        let update_time = written.await?;
        commit(transaction).await?;
        self.changed.notify_one();
        let record = ProviderRecord { provider, config, etag, updated_by: by.principal.clone(), update_time };
        Ok(Shown { record, config: cluster.shown() })
    }

    /// Whether a provider can be put beside, or instead of, those that there are.
    fn check(
        &self,
        put: &Put,
        records: &[ProviderRecord],
        expected: ExpectedProvider,
    ) -> Result<Box<dyn ExternalResource>, Error> {
        let Put { provider, config } = put;
        let before = records.iter().find(|record| is(record, &provider.resource_type, &provider.name));
        expected.check(&provider.name, before)?;
        let known = before.map(|before| before.config.expose_secret());
        let cluster = external::read(provider.resource_type.as_str(), config.expose_secret(), known)
            .map_err(|FieldError { field, problem }| FieldError::new(format!("provider.{field}"), problem))?;
        for address in cluster.addresses() {
            let problem = |failure| format!("{} {failure}", address.as_str());
            let not_allowed = |failure| FieldError::new("provider.config", problem(failure));
            self.http.check(address).map_err(not_allowed)?;
        }
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

    /// Removes a provider.
    ///
    /// # Errors
    /// [`ExternalError::NoSuchProvider`], [`ExternalError::Changed`]; [`Error::LockTimeout`]; [`Error::CommitUnknown`].
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
        let line = OtherLine { action: Action::ProviderDeleted, object, before, after: None };
        let deleted = answered(async {
            table::delete(&mut transaction, resource_type, name).await?;
            external_refresh::delete(&mut transaction, resource_type.as_str(), name.as_str()).await?;
            action_record::insert_others(&mut transaction, &[line], by).await
        });
        deleted.await?;
        commit(transaction).await?;
        self.changed.notify_one();
        Ok(())
    }

    /// All providers, by type and name.
    pub async fn providers(&self) -> Result<Vec<Shown>, Error> {
        let records = answered(table::read(&self.store.pool().await?)).await?;
        records.into_iter().map(shown).collect()
    }

    /// The queues of a provider.
    ///
    /// # Errors
    /// [`ExternalError::NoSuchProvider`], [`ExternalError::NoProviderFor`], [`ExternalError::Fetch`].
    pub async fn queues(&self, selector: &Selector) -> Result<Seen<Queues>, Error> {
        let source = self.source(selector).await?;
        let (asked, http) = (source.clone(), self.http.clone());
        let fetch = async move { asked.cluster.queues(&http).await };
        source.seen(source.queues.get(&self.metrics, fetch).await?)
    }

    /// The applications of a provider that are not over, by their ids.
    ///
    /// # Errors
    /// As of [`ExternalResourceService::queues`].
    pub async fn applications(&self, selector: &Selector) -> Result<Seen<Vec<Application>>, Error> {
        let source = self.source(selector).await?;
        let (asked, http) = (source.clone(), self.http.clone());
        let fetch = async move { asked.cluster.applications(&http).await };
        source.seen(source.applications.get(&self.metrics, fetch).await?)
    }

    /// The tickets of applications of a provider, as far as their engines have told them.
    pub async fn tickets_of(&self, provider: &Name, ids: &[&str]) -> Result<HashMap<String, Uuid>, Error> {
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        Ok(answered(external_ticket::of_applications(&self.store.pool().await?, provider.as_str(), ids)).await?)
    }

    /// The provider as it is stored now, with what is kept of it unless it was changed since.
    async fn source(&self, selector: &Selector) -> Result<Arc<Source>, Error> {
        let records = answered(table::read(&self.store.pool().await?)).await?;
        let providers = records.iter().map(|record| &record.provider);
        let resource_type = &selector.resource_type;
        let name = match &selector.by {
            SelectBy::Name(name) => name.clone(),
            SelectBy::Labels(labels) => {
                let none = || ExternalError::NoProviderFor { resource_type: resource_type.to_string() };
                choose(providers, resource_type.as_str(), labels).ok_or_else(none)?.name.clone()
            }
        };
        let mut sources = self.sources();
        sources.retain(|(resource_type, name), _| records.iter().any(|record| is(record, resource_type, name)));
        let record = records.into_iter().find(|record| is(record, resource_type, &name));
        let record = record.ok_or_else(|| no_such_provider(resource_type, &name))?;
        let key = (resource_type.clone(), name.clone());
        if let Some(source) = sources.get(&key).filter(|source| source.etag == record.etag) {
            return Ok(source.clone());
        }
        let source = Arc::new(Source {
            name,
            etag: record.etag,
            cluster: cluster(&record)?,
            queues: Kept::default(),
            applications: Kept::default(),
        });
        sources.insert(key, source.clone());
        Ok(source)
    }

    /// The turn to change providers.
    async fn turn(&self, deadline: Instant) -> Result<MutexGuard<'_, ()>, Error> {
        timeout_at(deadline, self.changing.lock()).await.map_err(|_| Error::LockTimeout)
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn sources(&self) -> StdMutexGuard<'_, Sources> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Source {
    fn seen<T>(&self, (fetched, age): (Fetched<T>, Duration)) -> Result<Seen<T>, Error> {
        match fetched {
            Ok(value) => Ok(Seen { provider: self.name.clone(), value, age }),
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

/// Begins a change while nobody else makes one; with all providers.
async fn begin(session: &mut Session) -> Result<(Transaction<'_, Postgres>, Vec<ProviderRecord>), Error> {
    let connection = session.get().await?;
    let begun = answered(async {
        let mut transaction = connection.begin().await?;
        table::lock(&mut transaction).await?;
        let records = table::read(&mut *transaction).await?;
        Ok::<_, StoreError>((transaction, records))
    });
    Ok(begun.await?)
}

async fn commit(transaction: Transaction<'_, Postgres>) -> Result<(), Error> {
    let committed = answered(async { transaction.commit().await.map_err(StoreError::from) });
    committed.await.map_err(|error| {
        tracing::warn!(error = &error as &dyn std::error::Error, "the connection broke while committing");
        Error::CommitUnknown
    })
}

/// Has a cluster judge by its queues from now on. Whoever does not know how that is counted writes no more.
async fn put_cluster(
    transaction: &mut Transaction<'_, Postgres>,
    provider: &Provider,
    etag: Uuid,
    rules: &CheckRules,
) -> Result<(), StoreError> {
    external_refresh::put(transaction, provider, etag, rules).await?;
    limit::keep_older_out(transaction, limit::KNOWS_QUEUES).await
}

fn is(record: &ProviderRecord, resource_type: &Name, name: &Name) -> bool {
    record.provider.resource_type == *resource_type && record.provider.name == *name
}

fn no_such_provider(resource_type: &Name, name: &Name) -> ExternalError {
    ExternalError::NoSuchProvider { resource_type: resource_type.to_string(), name: name.to_string() }
}

/// As the history names it.
fn object(provider: &Provider) -> String {
    format!("provider {}/{}", provider.resource_type, provider.name)
}

/// How it stands, without secrets; of one that cannot be read, its labels.
fn state(record: &ProviderRecord) -> State {
    let config = cluster(record).map(|cluster| cluster.shown()).unwrap_or_default();
    State::of_provider(record.provider.labels.as_map(), &config)
}

/// What was stored was read before, unless by a later release, or by hand; what is wrong with it is told without its text.
fn cluster(record: &ProviderRecord) -> Result<Box<dyn ExternalResource>, Error> {
    let Provider { resource_type, name, .. } = &record.provider;
    let read = external::read(resource_type.as_str(), record.config.expose_secret(), None);
    let inconsistent = |error: &dyn fmt::Display| {
        StoreError::inconsistent("linkis_external_resource_provider", format!("{name}: {error}"))
    };
    Ok(read.map_err(|error| inconsistent(&error))?)
}

fn shown(record: ProviderRecord) -> Result<Shown, Error> {
    let config = cluster(&record)?.shown();
    Ok(Shown { record, config })
}
