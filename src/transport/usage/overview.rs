//! The whole cluster: what it has, what serves it, and what is done in the background.

use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Status};

use crate::{
    error::Error,
    service::overview::Overviews,
    transport::{convert, identity, proto},
};

/// What is told each second.
pub type Watching = std::pin::Pin<Box<dyn tokio_stream::Stream<Item = Result<proto::WatchResponse, Status>> + Send>>;

/// An overview, and then one each second.
pub fn watch(overviews: &Overviews, call: &Request<proto::WatchRequest>) -> Result<Watching, Error> {
    let is_bound = !identity::reach(call)?.is_all();
    let seen = ReceiverStream::new(overviews.watch(&identity::of_call(call))?);
    let told = seen.map(move |seen| match seen {
        Ok(seen) => Ok(convert::overview::watched(&seen, is_bound)),
        Err(error) => Err(error.into()),
    });
    Ok(Box::pin(told))
}

/// How all background tasks fare on all instances, and what is left of large work.
pub async fn tasks(overviews: &Overviews) -> Result<proto::ListTasksResponse, Error> {
    let (instances, jobs) = (overviews.instances().await?, overviews.jobs().await?);
    let mut tasks: Vec<_> = (instances.iter())
        .flat_map(|(instance, _)| instance.tasks.iter().map(|report| convert::overview::task_status(instance, report)))
        .collect();
    // The instances stay in their order.
    tasks.sort_by(|one, other| one.task.cmp(&other.task));
    Ok(proto::ListTasksResponse { tasks, jobs: jobs.iter().map(convert::overview::job).collect() })
}
