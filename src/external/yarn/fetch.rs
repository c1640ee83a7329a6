//! Asks the ResourceManager that is active, whichever of the addresses it has.

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

/// Those that are not over, without what is large in them and not looked at; older releases do not know how to leave it out.
const APPLICATIONS: &str = "/ws/v1/cluster/apps?states=NEW,NEW_SAVING,SUBMITTED,ACCEPTED,RUNNING\
                            &deSelects=resourceRequests,timeouts,appNodeLabelExpression,amNodeLabelExpression,resourceInfo";

/// How the standby of old releases begins to say so, with a good status.
const STANDBY: &[u8] = b"This is standby RM";

/// Which address was the active one's.
#[derive(Debug, Default)]
pub(super) struct LastActive(AtomicUsize);

/// A ResourceManager that is asked.
#[derive(Clone, Copy)]
struct Asked<'a> {
    yarn: &'a Yarn,
    http: &'a Http,
    address: &'a Address,
}

/// Something that is asked of the active one.
type Ask<T> = for<'a> fn(Asked<'a>) -> Pin<Box<dyn Future<Output = Result<T, Failure>> + Send + 'a>>;

/// All queues.
pub(super) async fn queues(yarn: &Yarn, http: &Http) -> Result<Queues, FetchError> {
    from_active(yarn, http, |asked| Box::pin(asked.queues())).await
}

/// All applications that are not over.
pub(super) async fn applications(yarn: &Yarn, http: &Http) -> Result<Vec<Application>, FetchError> {
    from_active(yarn, http, |asked| Box::pin(asked.applications())).await
}

/// Fetches from whichever is active, beginning with the one that was.
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
    /// Asks, if this is the active one. A single one need not be asked whether it is: it says so.
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
            // A standby names the active one as that calls itself, or says when to come again.
            Err(Failure::Redirect(307)) => Err(Failure::NotActive),
            Ok(body) if body.starts_with(STANDBY) => Err(Failure::NotActive),
            answer => answer,
        }
    }
}

/// Reads megabytes.
async fn read<T: Send + 'static>(body: Answer, parse: fn(&[u8]) -> Result<T, ParseError>) -> Result<T, Failure> {
    Ok(patiently(move || parse(&body)).await??)
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
