//! Callers of the crowds: their EMs and users, and many concurrent calls of one kind. Callers: the crowd modules.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_client::{ClientSettings, ResourceRequest, ResultResource, RmClient};
use rm_model::{
    em::{Em, EmInstance},
    name::{Labels, Name},
    operation::{Grant, RegisterEm, ReleaseTicket},
    resource::Resource,
    ticket::EngineInstance,
};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{Failure, report::thousands};

/// Application name of the crowds' EMs; no other EM has it.
pub(crate) const KIND: &str = "crowd";

/// Number of concurrent calls that prepare a crowd: enough for the maximum rate of the service.
const AT_ONCE: u64 = 512;
const CONNECTIONS: u64 = 8;

/// Number of users that share the tickets.
pub(crate) const USERS: u64 = 1000;

/// Capacity above every demand.
pub(crate) const PLENTY: i64 = 1 << 52;
/// Memory demand of every engine, in bytes.
const MEMORY: i64 = 1 << 30;

/// Deadline of a call, above all timeouts of the service.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Connections to one instance.
#[derive(Debug, Clone)]
pub(crate) struct Callers(Arc<[RmClient]>);

impl Callers {
    pub fn connect(url: &str) -> Result<Self, Failure> {
        // A retry would change the measured load, so each call is made once.
        let client = |_| RmClient::with(url, &ClientSettings::once(CALL_TIMEOUT));
        let clients: Result<Vec<_>, _> = (0..CONNECTIONS).map(client).collect();
        Ok(Self(clients?.into()))
    }

    /// Returns a connection by number.
    pub fn client(&self, number: u64) -> RmClient {
        self.0[(number % CONNECTIONS) as usize].clone()
    }

    /// Makes `count` concurrent calls, numbered from 0. Returns their results in this order, or the first error.
    pub async fn each<T: Send + 'static, F>(
        &self,
        what: &str,
        count: u64,
        call: impl Fn(RmClient, u64) -> F + Clone + Send + 'static,
    ) -> Result<Vec<T>, Failure>
    where
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let (begun, next) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let mut tasks: JoinSet<Result<Vec<(u64, T)>, Failure>> = JoinSet::new();
        for caller in 0..AT_ONCE.min(count) {
            let (client, next, call) = (self.client(caller), next.clone(), call.clone());
            tasks.spawn(async move {
                let mut done = Vec::new();
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= count {
                        return Ok(done);
                    }
                    done.push((number, call(client.clone(), number).await?));
                }
            });
        }
        let mut all = Vec::new();
        while let Some(done) = tasks.join_next().await {
            all.extend(done??);
        }
        all.sort_unstable_by_key(|(number, _)| *number);
        let elapsed = begun.elapsed().as_secs_f64();
        let rate = thousands(count as f64 / elapsed);
        eprintln!("  {} {what}: {elapsed:.1} s, {rate}/s", thousands(count as f64));
        Ok(all.into_iter().map(|(_, done)| done).collect())
    }

    /// Registers `count` EMs with ample capacity, numbered from 0.
    pub async fn register(&self, count: u64) -> Result<Vec<Em>, Failure> {
        let register = |client: RmClient, number: u64| async move {
            Ok(client.register(registration(em(number)?, PLENTY)?).await?)
        };
        self.each("EMs register", count, register).await
    }

    /// Requests `count` tickets that stay locked, `per_em` on each EM, starting with the EM `first`.
    pub async fn grant(&self, first: u64, count: u64, per_em: u64) -> Result<Vec<Uuid>, Failure> {
        let grant = move |client: RmClient, number: u64| async move {
            Ok(granted(client.request_resource(&ask(em(first + number / per_em)?, number)?).await?)?.ticket_id)
        };
        self.each("tickets are granted", count, grant).await
    }

    /// Starts `count` engines, `per_em` on each EM.
    pub async fn start_engines(&self, count: u64, per_em: u64) -> Result<Vec<Uuid>, Failure> {
        let start = move |client: RmClient, number: u64| async move {
            let request = ask(em(number / per_em)?, number)?;
            let grant = granted(client.request_resource(&request).await?)?;
            client.resource_inited(&grant.inited(request.user, engine(grant.ticket_id)?)).await?;
            Ok(grant.ticket_id)
        };
        self.each("engines are started", count, start).await
    }
}

/// Returns the crowds' EM with this number.
pub(crate) fn em(number: u64) -> Result<EmInstance, Failure> {
    Ok(EmInstance::parse("em", KIND, &format!("host{number}:9102"))?)
}

/// Returns the registration of an EM with capacity for `engines`.
pub(crate) fn registration(em: EmInstance, engines: i64) -> Result<RegisterEm, Failure> {
    let total = Resource::load_instance(engines.saturating_mul(MEMORY).min(PLENTY), engines, engines)?;
    Ok(RegisterEm { em, protected: total.zero_like(), total, labels: Labels::default(), reserved: Labels::default() })
}

/// Returns a user of the crowds; every number is valid.
pub(crate) fn user(number: u64) -> Result<Name, Failure> {
    Ok(Name::parse("user", &format!("crowd-user{}", number % USERS))?)
}

/// Returns the request of one engine on an EM, for a user by number.
pub(crate) fn ask(em: EmInstance, number: u64) -> Result<ResourceRequest, Failure> {
    ask_for(em, user(number)?)
}

pub(crate) fn ask_for(em: EmInstance, user: Name) -> Result<ResourceRequest, Failure> {
    let resource = Resource::load_instance(MEMORY, 1, 1)?;
    Ok(ResourceRequest::new(Some(em), user, Name::parse("creator", "IDE")?, resource))
}

pub(crate) fn engine(ticket_id: Uuid) -> Result<EngineInstance, Failure> {
    Ok(EngineInstance::parse("engine", "engine", &ticket_id.to_string())?)
}

/// Returns the grant of a reply; a refusal is an error.
pub(crate) fn granted(answer: ResultResource) -> Result<Grant, Failure> {
    match answer {
        ResultResource::Available(grant) => Ok(grant),
        ResultResource::NotEnough(refusal) => Err(format!("refused: {refusal:?}").into()),
    }
}

/// Returns the release of a ticket of a user by number.
pub(crate) fn release(ticket_id: Uuid, em: EmInstance, number: u64) -> Result<ReleaseTicket, Failure> {
    Ok(ReleaseTicket { ticket_id, user: user(number)?, em })
}
