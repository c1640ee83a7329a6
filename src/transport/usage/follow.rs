//! The history as it goes on.

use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Status};

use crate::{
    error::Error,
    service::follow::{FollowService, View},
    transport::{convert, identity, proto},
};

/// What is told as it comes.
pub type Following =
    std::pin::Pin<Box<dyn tokio_stream::Stream<Item = Result<proto::FollowActionsResponse, Status>> + Send>>;

/// Every line from behind a position, or from now on.
pub async fn follow(follow: &FollowService, call: &Request<proto::FollowActionsRequest>) -> Result<Following, Error> {
    let is_of_operator = identity::is_of_operator(call);
    let view = View { users: identity::reach(call)?.users().cloned(), objects: is_of_operator };
    let told = follow.follow(&call.get_ref().position, &identity::of_call(call), view).await?;
    let told = ReceiverStream::new(told).map(move |told| {
        let told = told.map_err(Status::from)?;
        let actions = told.lines().map(|line| convert::answer::action(line, is_of_operator)).collect();
        Ok(proto::FollowActionsResponse { actions, position: told.position })
    });
    Ok(Box::pin(told))
}
