//! Raw HTTP/2 caller without a gRPC client. It observes the server's reply and its time where a client would cancel the
//! call.

use std::time::Duration;

use h2::client::{ResponseFuture, SendRequest};
use tokio::{net::TcpStream, task::JoinHandle};
use tonic::{
    Status,
    codegen::{Bytes, http::Request},
};
use tonic_types::StatusExt as _;

use crate::Failure;

const SERVICE: &str = "linkis.rm.v1.ResourceManagerService";

/// Initial number of streams, until the server states its bound.
const STREAMS_AT_FIRST: usize = 4096;

/// A connection; dropping it breaks it.
pub(crate) struct Connection {
    url: String,
    sender: SendRequest<Bytes>,
    driver: JoinHandle<()>,
}

impl Connection {
    pub async fn open(url: &str) -> Result<Self, Failure> {
        let address = url.strip_prefix("http://").ok_or("not the URL of a server")?;
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut builder = h2::client::Builder::new();
        builder.initial_max_send_streams(STREAMS_AT_FIRST);
        let (sender, connection) = builder.handshake(stream).await?;
        // The calls of a connection get its error.
        let driver = tokio::spawn(async move { drop(connection.await) });
        Ok(Self { url: url.to_owned(), sender, driver })
    }

    /// Makes a call. Returns the server's status, regardless of the deadline.
    pub async fn call(&self, call: &str, message: &[u8], timeout: Option<Duration>) -> Result<Status, Failure> {
        let mut request = Request::post(format!("{}/{SERVICE}/{call}", self.url))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(timeout) = timeout {
            request = request.header("grpc-timeout", format!("{}m", timeout.as_millis()));
        }
        let mut sender = self.sender.clone().ready().await?;
        let (response, mut body) = sender.send_request(request.body(())?, false)?;
        // The prefix of an uncompressed message.
        let mut framed = vec![0];
        framed.extend(u32::try_from(message.len())?.to_be_bytes());
        framed.extend_from_slice(message);
        body.send_data(framed.into(), true)?;
        status(response).await
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Returns the status: in the headers of a response without a message, else in the trailers.
async fn status(response: ResponseFuture) -> Result<Status, Failure> {
    let response = response.await?;
    if let Some(status) = Status::from_header_map(response.headers()) {
        return Ok(status);
    }
    let mut body = response.into_body();
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data?.len())?;
    }
    let trailers = body.trailers().await?.ok_or("an answer without a status")?;
    Status::from_header_map(&trailers).ok_or_else(|| "an answer without a status".into())
}

/// Returns the code, and the reason if there is one.
pub(crate) fn describe(status: &Status) -> String {
    match status.get_details_error_info() {
        Some(info) => format!("{:?}/{}", status.code(), info.reason),
        None => format!("{:?}", status.code()),
    }
}
