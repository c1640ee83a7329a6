//! Fetches queues and applications from the active ResourceManager among several addresses.
//!
//! Each fetch starts with the address that was active last, and is bounded by one deadline and [`ROUNDS_MAX`] attempts.
//! Caller: the parent module.

use std::{
    pin::Pin,
    sync::atomic::{AtomicUsize, Ordering},
};

use tokio::time::Instant;

use crate::{
    FetchError, ServerAddress,
    background_parse::patiently,
    http::{ClusterHttp, HttpFailure, HttpReply, ROUNDS_MAX, rest},
};
use rm_model::queue::{Application, QueueAmounts, QueueTree};

use super::{Yarn, YarnParseError, cluster, scheduler::SchedulerReply};

const INFO: &str = "/ws/v1/cluster/info";
const METRICS: &str = "/ws/v1/cluster/metrics";
const SCHEDULER: &str = "/ws/v1/cluster/scheduler";

/// Applications that have not ended, without large unused fields. Older releases ignore `deSelects`.
const APPLICATIONS: &str = "/ws/v1/cluster/apps?states=NEW,NEW_SAVING,SUBMITTED,ACCEPTED,RUNNING\
                            &deSelects=resourceRequests,timeouts,appNodeLabelExpression,amNodeLabelExpression,resourceInfo";

/// First words of an old release's standby, which replies with status 200.
const STANDBY: &[u8] = b"This is standby RM";

/// Index of the address that was active last.
#[derive(Debug, Default)]
pub(super) struct ActiveAddress(AtomicUsize);

/// A ResourceManager that is queried.
#[derive(Clone, Copy)]
struct YarnServer<'a> {
    yarn: &'a Yarn,
    http: &'a ClusterHttp,
    address: &'a ServerAddress,
}

/// Request to the active ResourceManager.
type ActiveRequest<T> = for<'a> fn(YarnServer<'a>) -> Pin<Box<dyn Future<Output = Result<T, HttpFailure>> + Send + 'a>>;

/// Fetches all queues.
pub(super) async fn queues(yarn: &Yarn, http: &ClusterHttp) -> Result<QueueTree, FetchError> {
    from_active(yarn, http, |asked| Box::pin(asked.queues())).await
}

/// Fetches all applications that have not ended.
pub(super) async fn applications(yarn: &Yarn, http: &ClusterHttp) -> Result<Vec<Application>, FetchError> {
    from_active(yarn, http, |asked| Box::pin(asked.applications())).await
}

/// Fetches from the active ResourceManager. Tries the addresses in turn, starting with the last active one.
async fn from_active<T>(yarn: &Yarn, http: &ClusterHttp, ask: ActiveRequest<T>) -> Result<T, FetchError> {
    let addresses = &yarn.config.addresses;
    let deadline = Instant::now() + http.fetch_timeout();
    let mut error = FetchError { failures: Vec::new() };
    for round in 0..ROUNDS_MAX {
        if round > 0 {
            tokio::time::sleep(rest(round)).await;
        }
        let mut failures = Vec::new();
        let first = yarn.active.0.load(Ordering::Relaxed);
        for place in (0..addresses.len()).map(|place| (first + place) % addresses.len()) {
            let Some(address) = addresses.get(place) else { continue };
            let asked = YarnServer { yarn, http, address };
            let fetched = tokio::time::timeout_at(deadline, asked.if_active(ask)).await;
            match fetched.unwrap_or(Err(HttpFailure::Timeout)) {
                Ok(fetched) => {
                    yarn.active.0.store(place, Ordering::Relaxed);
                    return Ok(fetched);
                }
                Err(failure) => failures.push((address.as_str().to_owned(), failure)),
            }
        }
        error.failures = failures;
        if Instant::now() >= deadline || !error.may_pass() {
            break;
        }
    }
    Err(error)
}

impl YarnServer<'_> {
    /// Sends the request if this ResourceManager is active. A single one is not queried for its state, because its
    /// reply shows the state.
    async fn if_active<T>(self, ask: ActiveRequest<T>) -> Result<T, HttpFailure> {
        if self.yarn.config.addresses.len() > 1 && !cluster::is_active(&self.get(INFO).await?)? {
            return Err(HttpFailure::NotActive);
        }
        ask(self).await
    }

    async fn queues(self) -> Result<QueueTree, HttpFailure> {
        let scheduler = read(self.get(SCHEDULER).await?, SchedulerReply::read).await?;
        let cluster = match scheduler.needs_cluster() {
            true => cluster::size(&self.get(METRICS).await?)?,
            false => QueueAmounts::default(),
        };
        Ok(scheduler.queues(self.yarn.config.capacity, cluster)?)
    }

    async fn applications(self) -> Result<Vec<Application>, HttpFailure> {
        read(self.get(APPLICATIONS).await?, cluster::applications).await
    }

    async fn get(self, path: &str) -> Result<HttpReply, HttpFailure> {
        let login = self.yarn.config.login.as_ref().map(|login| (login.user.as_str(), &login.password));
        match self.http.get(self.address, path, login).await {
            // A standby redirects to the active one by its own name, or states when to retry.
            Err(HttpFailure::Redirect(307)) => Err(HttpFailure::NotActive),
            Ok(body) if body.starts_with(STANDBY) => Err(HttpFailure::NotActive),
            answer => answer,
        }
    }
}

/// Parses a body of megabytes on a background thread.
async fn read<T: Send + 'static>(
    body: HttpReply,
    parse: fn(&[u8]) -> Result<T, YarnParseError>,
) -> Result<T, HttpFailure> {
    Ok(patiently(move || parse(&body)).await??)
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
