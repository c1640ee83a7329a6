//! Health of an instance (`grpc.health.v1`): watched over a connection, or checked once.
//!
//! Callers: `pool`, which watches each connection, and the `health` command. A service without health checks counts as
//! serving.

use std::future::pending;

use async_recursion::async_recursion as boxed;
use http::{Uri, uri::PathAndQuery};
use tokio::time::timeout;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    metadata::{Ascii, MetadataValue},
};
use tonic_prost::ProstCodec;

use super::{
    ClientError, ClientSettings,
    address::InstanceAddress,
    connection::{self, CONNECT_TIMEOUT, Sender},
};

/// Request: the health of one service, or of the whole instance for an empty name.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// Reply to a check, and each message of a watch.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// The only status with which calls may be sent.
const SERVING: i32 = 1;

const WATCH: &str = "/grpc.health.v1.Health/Watch";
const CHECK: &str = "/grpc.health.v1.Health/Check";

/// Checks each instance at `addresses` once, and returns by address whether it serves `service`. With an empty name, the
/// result states whether calls may be sent to the instance.
///
/// # Errors
/// As [`super::RmClient::with`]. The entry of an instance contains its error; [`tonic::Code::Unavailable`] without a reply
/// within the call timeout.
#[boxed]
pub async fn check_health(
    addresses: &str,
    settings: &ClientSettings,
    service: &str,
) -> Result<Vec<(String, Result<bool, ClientError>)>, ClientError> {
    let addresses = InstanceAddress::parse_all(addresses)?;
    let tls = settings.encryption(&addresses)?;
    let authorization = settings.authorization()?;
    let mut replies = Vec::with_capacity(addresses.len());
    for address in addresses {
        let asked = async {
            let open = connection::open(&address, tls.as_ref()).await;
            let open = open.map_err(|error| Status::unavailable(error.to_string()))?;
            let mut question = Request::new(HealthCheckRequest { service: service.to_owned() });
            if let Some(authorization) = &authorization {
                question.metadata_mut().insert("authorization", authorization.clone());
            }
            let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::new();
            let mut grpc = Grpc::with_origin(open.sender, address.origin.clone());
            let answer = grpc.unary(question, PathAndQuery::from_static(CHECK), codec).await?;
            Ok::<_, Status>(answer.into_inner().status == SERVING)
        };
        let late = |_| Err(Status::unavailable(format!("no reply within {:?}", settings.timeout)));
        let answer = timeout(settings.timeout, asked).await.unwrap_or_else(late);
        replies.push((address.text, answer.map_err(ClientError::from)));
    }
    Ok(replies)
}

/// Health that an instance reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InstanceStatus {
    /// Calls may be sent.
    Serves,
    /// The instance is stopping, or its database is unavailable.
    DoesNotServe,
}

/// Calls `heard` with each health report of an instance; returns the reason when the reports end.
pub(super) async fn listen(
    sender: Sender,
    origin: Uri,
    authorization: Option<&MetadataValue<Ascii>>,
    heard: impl Fn(InstanceStatus),
) -> String {
    let mut question = Request::new(HealthCheckRequest::default());
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
            heard(InstanceStatus::Serves);
            return pending().await;
        }
        Ok(Err(status)) => return format!("does not report its health: {}", status.message()),
        Err(_) => return format!("does not report its health within {CONNECT_TIMEOUT:?}"),
    };
    loop {
        let Some(HealthCheckResponse { status }) = word else { return "stopped reporting its health".to_owned() };
        heard(if status == SERVING { InstanceStatus::Serves } else { InstanceStatus::DoesNotServe });
        word = match words.message().await {
            Ok(word) => word,
            Err(status) => return format!("stopped reporting its health: {}", status.message()),
        };
    }
}

/// Returns whether the peer has no health service, or denies it to this client. The next call shows whether it serves.
fn knows_nothing_of_health(status: &Status) -> bool {
    use Code::{NotFound, PermissionDenied, Unauthenticated, Unimplemented};
    let is_of_the_service = std::error::Error::source(status).is_none();
    is_of_the_service && matches!(status.code(), Unimplemented | NotFound | PermissionDenied | Unauthenticated)
}
