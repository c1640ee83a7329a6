//! `FollowActions`: stream of new history lines.
//!
//! The stream starts at a position or at the present and ends with the caller's credentials. Caller: `UsageService`.

use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Status};

use crate::status::to_status;
use crate::{authenticator, convert};
use rm_proto::v1 as proto;
use rm_service::{
    error::Error,
    follow::{FollowFilter, FollowService},
};

/// Response stream of `FollowActions`.
pub type FollowStream =
    std::pin::Pin<Box<dyn tokio_stream::Stream<Item = Result<proto::FollowActionsResponse, Status>> + Send>>;

/// Starts the stream after the position of the call, or at the present without one.
///
/// # Errors
/// Errors of [`FollowService::follow`]: an unknown or too old position, or too many followers.
pub async fn follow(
    follow: &FollowService,
    call: &Request<proto::FollowActionsRequest>,
) -> Result<FollowStream, Error> {
    let is_of_operator = authenticator::is_of_operator(call);
    let view = FollowFilter { users: authenticator::reach(call)?.users().cloned(), objects: is_of_operator };
    let page = follow.follow(&call.get_ref().position, &authenticator::of_call(call), view).await?;
    let page = ReceiverStream::new(page).map(move |page| {
        let page = page.map_err(to_status)?;
        let actions = page.lines().map(|line| convert::answer::action(line, is_of_operator)).collect();
        Ok(proto::FollowActionsResponse { actions, position: page.position })
    });
    Ok(Box::pin(page))
}
