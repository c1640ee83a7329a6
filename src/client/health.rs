//! What an instance says of its health (`grpc.health.v1`), for as long as it is connected.

use std::future::pending;

use http::{Uri, uri::PathAndQuery};
use tokio::time::timeout;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    metadata::{Ascii, MetadataValue},
};
use tonic_prost::ProstCodec;

use super::connection::{CONNECT_TIMEOUT, Sender};

/// What it is asked: how it is as a whole.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct HealthCheckRequest {}

/// What it answers, whenever that changes.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// The one status with which calls may be sent.
const SERVING: i32 = 1;

const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// What an instance says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// Calls may be sent.
    Serves,
    /// It stops, or its database is away.
    DoesNotServe,
}

/// Tells whatever an instance says of itself; ends with the reason when it says nothing more.
pub(super) async fn listen(
    sender: Sender,
    origin: Uri,
    authorization: Option<&MetadataValue<Ascii>>,
    heard: impl Fn(Word),
) -> String {
    let mut question = Request::new(HealthCheckRequest {});
    if let Some(authorization) = authorization {
        question.metadata_mut().insert("authorization", authorization.clone());
    }
    let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::new();
    let mut grpc = Grpc::with_origin(sender, origin);
    let first = async {
        let mut words = grpc.server_streaming(question, PathAndQuery::from_static(WATCH), codec).await?.into_inner();
        Ok::<_, Status>((words.message().await?, words))
    };
    let (mut word, mut words) = match timeout(CONNECT_TIMEOUT, first).await {
        Ok(Ok(first)) => first,
        Ok(Err(status)) if knows_nothing_of_health(&status) => {
            heard(Word::Serves);
            return pending().await;
        }
        Ok(Err(status)) => return format!("does not tell its health: {}", status.message()),
        Err(_) => return format!("does not tell its health within {CONNECT_TIMEOUT:?}"),
    };
    loop {
        let Some(HealthCheckResponse { status }) = word else { return "tells its health no more".to_owned() };
        heard(if status == SERVING { Word::Serves } else { Word::DoesNotServe });
        word = match words.message().await {
            Ok(word) => word,
            Err(status) => return format!("tells its health no more: {}", status.message()),
        };
    }
}

/// What answers there is no service that can be asked, or does not let this client ask: a call will tell.
fn knows_nothing_of_health(status: &Status) -> bool {
    use Code::{NotFound, PermissionDenied, Unauthenticated, Unimplemented};
    let is_of_the_service = std::error::Error::source(status).is_none();
    is_of_the_service && matches!(status.code(), Unimplemented | NotFound | PermissionDenied | Unauthenticated)
}
