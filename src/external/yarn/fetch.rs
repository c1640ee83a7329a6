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
    domain::queue::{Application, QueueAmounts, Queues},
    external::{
        Address, FetchError,
        http::{Answer, Failure, Http, ROUNDS_MAX, rest},
        patient::patiently,
    },
};

use super::{ParseError, Yarn, cluster, scheduler::Scheduler};

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
pub(super) struct LastActive(AtomicUsize);

/// A ResourceManager that is queried.
#[derive(Clone, Copy)]
struct Asked<'a> {
    yarn: &'a Yarn,
    http: &'a Http,
    address: &'a Address,
}

/// Request to the active ResourceManager.
type Ask<T> = for<'a> fn(Asked<'a>) -> Pin<Box<dyn Future<Output = Result<T, Failure>> + Send + 'a>>;

/// Fetches all queues.
pub(super) async fn queues(yarn: &Yarn, http: &Http) -> Result<Queues, FetchError> {
    from_active(yarn, http, |asked| Box::pin(asked.queues())).await
}

/// Fetches all applications that have not ended.
pub(super) async fn applications(yarn: &Yarn, http: &Http) -> Result<Vec<Application>, FetchError> {
    from_active(yarn, http, |asked| Box::pin(asked.applications())).await
}

/// Fetches from the active ResourceManager. Tries the addresses in turn, starting with the last active one.
async fn from_active<T>(yarn: &Yarn, http: &Http, ask: Ask<T>) -> Result<T, FetchError> {
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
            let asked = Asked { yarn, http, address };
            let fetched = tokio::time::timeout_at(deadline, asked.if_active(ask)).await;
            match fetched.unwrap_or(Err(Failure::Timeout)) {
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

impl Asked<'_> {
    /// Sends the request if this ResourceManager is active. A single one is not queried for its state, because its
    /// reply shows the state.
    async fn if_active<T>(self, ask: Ask<T>) -> Result<T, Failure> {
        if self.yarn.config.addresses.len() > 1 && !cluster::is_active(&self.get(INFO).await?)? {
            return Err(Failure::NotActive);
        }
        ask(self).await
    }

    async fn queues(self) -> Result<Queues, Failure> {
        let scheduler = read(self.get(SCHEDULER).await?, Scheduler::read).await?;
        let cluster = match scheduler.needs_cluster() {
            true => cluster::size(&self.get(METRICS).await?)?,
            false => QueueAmounts::default(),
        };
        Ok(scheduler.queues(self.yarn.config.capacity, cluster)?)
    }

    async fn applications(self) -> Result<Vec<Application>, Failure> {
        read(self.get(APPLICATIONS).await?, cluster::applications).await
    }

    async fn get(self, path: &str) -> Result<Answer, Failure> {
        let login = self.yarn.config.login.as_ref().map(|login| (login.user.as_str(), &login.password));
        match self.http.get(self.address, path, login).await {
            // A standby redirects to the active one by its own name, or states when to retry.
            Err(Failure::Redirect(307)) => Err(Failure::NotActive),
            Ok(body) if body.starts_with(STANDBY) => Err(Failure::NotActive),
            answer => answer,
        }
    }
}

/// Parses a body of megabytes on a background thread.
async fn read<T: Send + 'static>(body: Answer, parse: fn(&[u8]) -> Result<T, ParseError>) -> Result<T, Failure> {
    Ok(patiently(move || parse(&body)).await??)
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
