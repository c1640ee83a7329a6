//! The crowds' own callers: their EMs and users, and many calls of a kind at once.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ClientSettings, ResourceRequest, ResultResource, RmClient},
    domain::{
        em::{Em, EmInstance},
        name::{Labels, Name},
        operation::{Grant, Register, Released},
        resource::Resource,
        ticket::EngineInstance,
    },
};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{Failure, report::thousands};

/// The kind of the crowds' EMs; nobody else's EMs are of it.
pub(crate) const KIND: &str = "crowd";

/// How many calls prepare a crowd at once: enough for the service to be as fast as it gets.
const AT_ONCE: u64 = 512;
const CONNECTIONS: u64 = 8;

/// The users whose tickets are many.
pub(crate) const USERS: u64 = 1000;

/// More than is ever asked for, and what every engine needs.
pub(crate) const PLENTY: i64 = 1 << 52;
const MEMORY: i64 = 1 << 30;

/// No call is given up sooner by its caller; the service's own limits are shorter.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Connections to one instance.
#[derive(Debug, Clone)]
pub(crate) struct Callers(Arc<[RmClient]>);

impl Callers {
    pub fn connect(url: &str) -> Result<Self, Failure> {
        // What is measured is what is asked for: nothing is asked twice.
        let client = |_| RmClient::with(url, &ClientSettings::once(CALL_TIMEOUT));
        let clients: Result<Vec<_>, _> = (0..CONNECTIONS).map(client).collect();
        Ok(Self(clients?.into()))
    }

    /// The connection for one of many.
    pub fn client(&self, number: u64) -> RmClient {
        self.0[(number % CONNECTIONS) as usize].clone()
    }

    /// Makes `count` calls, many at once, each with its number from 0 on; answers with what they did, in that order. Ends with the
    /// first that fails.
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

    /// Registers `count` EMs that have plenty, numbered from 0.
    pub async fn register(&self, count: u64) -> Result<Vec<Em>, Failure> {
        let register = |client: RmClient, number: u64| async move {
            Ok(client.register(registration(em(number)?, PLENTY)?).await?)
        };
        self.each("EMs register", count, register).await
    }

    /// Lets `count` tickets be granted, `per_em` on each EM in turn, from the EM of that number on.
    pub async fn grant(&self, first: u64, count: u64, per_em: u64) -> Result<Vec<Uuid>, Failure> {
        let grant = move |client: RmClient, number: u64| async move {
            Ok(granted(client.request_resource(&ask(em(first + number / per_em)?, number)?).await?)?.ticket_id)
        };
        self.each("tickets are granted", count, grant).await
    }

    /// Starts `count` engines, `per_em` on each EM in turn.
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

/// The crowds' EM of that number.
pub(crate) fn em(number: u64) -> Result<EmInstance, Failure> {
    Ok(EmInstance::parse("em", KIND, &format!("host{number}:9102"))?)
}

/// An EM with room for so many engines.
pub(crate) fn registration(em: EmInstance, engines: i64) -> Result<Register, Failure> {
    let total = Resource::load_instance(engines.saturating_mul(MEMORY).min(PLENTY), engines, engines)?;
    Ok(Register { em, protected: total.zero_like(), total, labels: Labels::default(), reserved: Labels::default() })
}

/// The crowds' user of that number, which may be any.
pub(crate) fn user(number: u64) -> Result<Name, Failure> {
    Ok(Name::parse("user", &format!("crowd-user{}", number % USERS))?)
}

/// What one engine of one of the users needs on an EM.
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

/// The grant, which there has to be.
pub(crate) fn granted(answer: ResultResource) -> Result<Grant, Failure> {
    match answer {
        ResultResource::Available(grant) => Ok(grant),
        ResultResource::NotEnough(refusal) => Err(format!("refused: {refusal:?}").into()),
    }
}

/// The release of a ticket of one of the users.
pub(crate) fn release(ticket_id: Uuid, em: EmInstance, number: u64) -> Result<Released, Failure> {
    Ok(Released { ticket_id, user: user(number)?, em })
}
