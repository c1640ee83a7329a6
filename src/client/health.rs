//! What an instance says of its health (`grpc.health.v1`): for as long as it is connected, or once.

use std::future::pending;

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
    address::Address,
    connection::{self, CONNECT_TIMEOUT, Sender},
};

/// What it is asked: how one of its services is, or without a name, how it is as a whole.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// What it answers, whenever that changes.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// The one status with which calls may be sent.
const SERVING: i32 = 1;

const WATCH: &str = "/grpc.health.v1.Health/Watch";
const CHECK: &str = "/grpc.health.v1.Health/Check";

/// Asks each instance at `addresses` once whether it serves `service` (without a name: whether calls may be sent to it), and tells what
/// each said, by its address.
///
/// # Errors
/// As of [`super::RmClient::with`]. Of each instance, what it answered instead; [`tonic::Code::Unavailable`] if nobody answered within the
/// time of a call.
pub async fn check_health(
    addresses: &str,
    settings: &ClientSettings,
    service: &str,
) -> Result<Vec<(String, Result<bool, ClientError>)>, ClientError> {
    let addresses = Address::parse_all(addresses)?;
    let tls = settings.encryption(&addresses)?;
    let authorization = settings.authorization()?;
    let mut told = Vec::with_capacity(addresses.len());
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
        let late = |_| Err(Status::unavailable(format!("it has not answered within {:?}", settings.timeout)));
        let answer = timeout(settings.timeout, asked).await.unwrap_or_else(late);
        told.push((address.text, answer.map_err(ClientError::from)));
    }
    Ok(told)
}

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
