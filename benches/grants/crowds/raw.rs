//! Raw HTTP/2 caller without a gRPC client. It can leave messages incomplete, and it observes the server's reply and
//! its time where a client would cancel the call.

use std::{future::poll_fn, time::Duration};

use h2::{
    SendStream,
    client::{ResponseFuture, SendRequest},
};
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

/// Maximum amount sent in one piece.
const CHUNK: [u8; 16 * 1024] = [0; 16 * 1024];

/// A connection; dropping it breaks it.
pub(crate) struct Connection {
    url: String,
    sender: SendRequest<Bytes>,
    driver: JoinHandle<()>,
}

/// A call with an incomplete message; dropping it cancels the call.
pub(crate) struct HalfSent {
    response: ResponseFuture,
    _body: SendStream<Bytes>,
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

    async fn begin(
        &self,
        call: &str,
        timeout: Option<Duration>,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), Failure> {
        let mut request = Request::post(format!("{}/{SERVICE}/{call}", self.url))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(timeout) = timeout {
            request = request.header("grpc-timeout", format!("{}m", timeout.as_millis()));
        }
        let mut sender = self.sender.clone().ready().await?;
        Ok(sender.send_request(request.body(())?, false)?)
    }

    /// Makes a call. Returns the server's status, regardless of the deadline.
    pub async fn call(&self, call: &str, message: &[u8], timeout: Option<Duration>) -> Result<Status, Failure> {
        let (response, mut body) = self.begin(call, timeout).await?;
        let mut framed = prefix(message.len())?.to_vec();
        framed.extend_from_slice(message);
        body.send_data(framed.into(), true)?;
        status(response).await
    }

    /// Starts a call whose message should have `claimed` bytes, and sends all but the last as fast as the server takes
    /// them. Passes the size of each piece to `sent`. Returns when all is sent, or fails when the server rejects the
    /// call.
    pub async fn half_send(&self, call: &str, claimed: usize, sent: impl Fn(usize)) -> Result<HalfSent, Failure> {
        let (response, mut body) = self.begin(call, None).await?;
        body.send_data(Bytes::copy_from_slice(&prefix(claimed)?), false)?;
        let chunk = Bytes::from_static(&CHUNK);
        let mut left = claimed.saturating_sub(1);
        while left > 0 {
            body.reserve_capacity(left.min(chunk.len()));
            let capacity = poll_fn(|context| body.poll_capacity(context)).await;
            let capacity = capacity.ok_or("the server wants no more of it")??.min(left).min(chunk.len());
            body.send_data(chunk.slice(..capacity), false)?;
            left -= capacity;
            sent(capacity);
        }
        Ok(HalfSent { response, _body: body })
    }
}

impl HalfSent {
    /// Waits until the server ends the call.
    pub async fn ended(self) {
        // A response and a reset are both an end.
        drop(self.response.await);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Returns the prefix of an uncompressed message of this length.
fn prefix(length: usize) -> Result<[u8; 5], Failure> {
    let [a, b, c, d] = u32::try_from(length)?.to_be_bytes();
    Ok([0, a, b, c, d])
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
