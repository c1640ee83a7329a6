//! Calls of one task, repeated where the API permits it.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use rm_client::{ClientError, ResourceRequest, ResultResource, RmClient};
use rm_model::{
    em::EmInstance,
    name::{FieldError, Name},
    operation::Grant,
    refusal::Refusal,
    resource::ResourceError,
    selector::EmSelector,
    ticket::EngineInstance,
};
use uuid::Uuid;

use super::{
    replay::Terms,
    trace::{Node, Task},
};

/// Application name of all nodes.
pub const APPLICATION: &str = "openb";

/// Lock time of a grant: the maximum of the service, because the replay may be much slower than the trace.
const LOCK_TTL: Duration = Duration::from_secs(24 * 3600);

/// Maximum number of attempts of a call before the replay fails.
const ATTEMPTS_MAX: u32 = 5;

/// Why the replay fails.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("{what} failed")]
    Call { what: String, source: ClientError },
    #[error("a name of the trace cannot be used")]
    Name(#[from] FieldError),
    #[error("an amount of the trace cannot be used")]
    Amount(#[from] ResourceError),
    #[error("a call ended without an answer")]
    Lost(#[from] tokio::task::JoinError),
}

/// Result of a step.
#[derive(Debug)]
pub enum Outcome {
    Granted(EmInstance),
    Refused(Refusal),
    Inited,
    Released,
    /// The task was refused, so it has nothing to confirm or release.
    Nothing,
}

/// Result of a finished call.
#[derive(Debug)]
pub struct FinishedCall {
    pub outcome: Outcome,
    pub latency: Duration,
    pub repeats: u32,
}

/// A task as an engine of the service.
#[derive(Debug)]
pub struct Engine {
    request: ResourceRequest,
    instance: EngineInstance,
    /// The grant, once the task has it.
    grant: OnceLock<Grant>,
}

/// Returns the EM instance of a node.
pub fn em_instance(node: &Node) -> Result<EmInstance, FieldError> {
    EmInstance::parse("em", APPLICATION, &node.name)
}

impl Engine {
    /// Creates the engine of a task. Its request names `em`, or any node, and waits as `terms` state. `replay` makes
    /// the request ids of this replay unique, because the service stores earlier ids for days.
    pub fn new(replay: Uuid, task: &Task, em: Option<EmInstance>, terms: Terms) -> Result<Self, CallError> {
        let application_name = em.is_none().then(|| Name::parse("em", APPLICATION)).transpose()?;
        let (user, creator) = (Name::parse("user", &task.user())?, Name::parse("creator", APPLICATION)?);
        let request = ResourceRequest {
            engine_type: task.qos.clone(),
            lock_ttl: Some(LOCK_TTL),
            wait_timeout: terms.wait,
            selector: EmSelector { application_name, placement: terms.placement, ..EmSelector::default() },
            request_id: Some(format!("{replay}/{}", task.name)),
            ..ResourceRequest::new(em, user, creator, task.need().to_resource()?)
        };
        let instance = EngineInstance::parse("engine", APPLICATION, &task.name)?;
        Ok(Self { request, instance, grant: OnceLock::new() })
    }

    pub async fn ask(&self, client: &RmClient) -> Result<FinishedCall, CallError> {
        let what = || format!("asking for {}", self.instance.instance);
        let (answer, latency, repeats) = repeated(what, || client.request_resource(&self.request)).await?;
        let outcome = match answer {
            ResultResource::Available(grant) => {
                let em = grant.em.clone();
                self.grant.get_or_init(|| grant);
                Outcome::Granted(em)
            }
            ResultResource::NotEnough(refusal) => Outcome::Refused(refusal),
        };
        Ok(FinishedCall { outcome, latency, repeats })
    }

    pub async fn init(&self, client: &RmClient) -> Result<FinishedCall, CallError> {
        let Some(grant) = self.grant.get() else { return Ok(FinishedCall::nothing()) };
        let report = grant.inited(self.request.user.clone(), self.instance.clone());
        let what = || format!("reporting {} as inited", self.instance.instance);
        let (_, latency, repeats) = repeated(what, || client.resource_inited(&report)).await?;
        Ok(FinishedCall { outcome: Outcome::Inited, latency, repeats })
    }

    pub async fn release(&self, client: &RmClient) -> Result<FinishedCall, CallError> {
        let Some(grant) = self.grant.get() else { return Ok(FinishedCall::nothing()) };
        let ticket = grant.released(self.request.user.clone());
        let what = || format!("releasing {}", self.instance.instance);
        let ((), latency, repeats) = repeated(what, || client.resource_released(&ticket)).await?;
        Ok(FinishedCall { outcome: Outcome::Released, latency, repeats })
    }
}

impl FinishedCall {
    fn nothing() -> Self {
        Self { outcome: Outcome::Nothing, latency: Duration::ZERO, repeats: 0 }
    }
}

/// Makes an idempotent call. Returns the reply, the time until it, and the number of repetitions.
///
/// # Errors
/// [`CallError::Call`] if the error is permanent, or after five attempts.
pub async fn repeated<T, F: Future<Output = Result<T, ClientError>>>(
    what: impl Fn() -> String,
    call: impl Fn() -> F,
) -> Result<(T, Duration, u32), CallError> {
    let started = Instant::now();
    let mut repeats = 0;
    loop {
        match call().await {
            Ok(answer) => return Ok((answer, started.elapsed(), repeats)),
            Err(source) => match source.retry_after() {
                Some(wait) if repeats + 1 < ATTEMPTS_MAX => {
                    repeats += 1;
                    tokio::time::sleep(wait).await;
                }
                _ => return Err(CallError::Call { what: what(), source }),
            },
        }
    }
}
