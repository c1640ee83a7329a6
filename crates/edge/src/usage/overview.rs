//! `GetOverview`, `Watch` and `ListTasks`: cluster totals, instances and background tasks.
//!
//! A caller that is bound to users gets only the totals of the EMs. Caller: `UsageService`.

use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Status};

use crate::status::to_status;
use crate::{authenticator, convert};
use rm_proto::v1 as proto;
use rm_service::{error::Error, overview::OverviewService};

/// Response stream of `Watch`: one message each second.
pub type OverviewStream =
    std::pin::Pin<Box<dyn tokio_stream::Stream<Item = Result<proto::WatchResponse, Status>> + Send>>;

/// Starts a watch: an overview immediately, and then one each second.
///
/// # Errors
/// Errors of [`OverviewService::watch`]: too many watchers.
pub fn watch(overviews: &OverviewService, call: &Request<proto::WatchRequest>) -> Result<OverviewStream, Error> {
    let is_bound = !authenticator::reach(call)?.is_all();
    let seen = ReceiverStream::new(overviews.watch(&authenticator::of_call(call))?);
    let updates = seen.map(move |seen| match seen {
        Ok(seen) => Ok(convert::overview::watched(&seen, is_bound)),
        Err(error) => Err(to_status(error)),
    });
    Ok(Box::pin(updates))
}

/// Returns the reports of all background tasks of all instances, and the progress of background jobs.
///
/// # Errors
/// Errors of the database.
pub async fn tasks(overviews: &OverviewService) -> Result<proto::ListTasksResponse, Error> {
    let (instances, jobs) = (overviews.instances().await?, overviews.jobs().await?);
    let mut tasks: Vec<_> = (instances.iter())
        .flat_map(|(instance, _)| instance.tasks.iter().map(|report| convert::overview::task_status(instance, report)))
        .collect();
    // The sort is stable, so the instances of a task keep their order.
    tasks.sort_by(|one, other| one.task.cmp(&other.task));
    Ok(proto::ListTasksResponse { tasks, jobs: jobs.iter().map(convert::overview::job).collect() })
}
