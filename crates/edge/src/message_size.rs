//! Maximum sizes of request messages, uncompressed.
//!
//! A heartbeat names all tickets of an EM, and a call may replace thousands of limits. Every other call has some dozen
//! short fields. The edge uses [`limit_of`] before it reads a message; the generated services use the same bounds.
//! Callers: `edge`, `server_info` and the server of the root package.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};

use tonic::{
    body::Body,
    codegen::{Body as HttpBody, Service, StdError, http},
    server::NamedService,
};

use super::{
    convert::request::{TICKET_BYTES, TICKETS_MAX},
    routes::ReplyFuture,
};
use rm_proto::v1::resource_manager_service_server::{ResourceManagerService, ResourceManagerServiceServer};

/// Maximum size of a message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 256 * 1024;

/// Maximum size of a message of reflection or health, in bytes. Such a message has the name of a service or a symbol.
pub const QUESTION_BYTES_MAX: usize = 4 * 1024;

/// Maximum size of a heartbeat, in bytes: all its tickets, and the rest of any message.
pub const HEARTBEAT_BYTES_MAX: usize = TICKETS_MAX * TICKET_BYTES + MESSAGE_BYTES_MAX;

/// Maximum size of a message about limits, in bytes. A call may have all limits, so the bound equals the largest of
/// all.
pub const LIMITS_BYTES_MAX: usize = HEARTBEAT_BYTES_MAX;

/// Returns the maximum size of the message of a call at `path`, in bytes.
pub fn limit_of(path: &str) -> usize {
    match path {
        "/linkis.rm.v1.ResourceManagerService/Heartbeat" => HEARTBEAT_BYTES_MAX,
        _ if path.starts_with("/linkis.rm.v1.LimitService/") => LIMITS_BYTES_MAX,
        _ if path.starts_with("/linkis.rm.v1.") => MESSAGE_BYTES_MAX,
        _ => QUESTION_BYTES_MAX,
    }
}

/// Makes a generated service accept and send gzip. A macro, because the generated types share no trait.
#[macro_export]
macro_rules! compressible {
    ($service:expr) => {
        $service
            .accept_compressed(tonic::codec::CompressionEncoding::Gzip)
            .send_compressed(tonic::codec::CompressionEncoding::Gzip)
    };
}

/// `ResourceManagerService` with a size bound per call.
///
/// The generated service has one bound for all calls. One copy serves heartbeats, another all other calls, so the bound
/// holds before a message is read.
#[derive(Debug)]
pub struct MessageSizeLimit<T> {
    heartbeats: ResourceManagerServiceServer<T>,
    others: ResourceManagerServiceServer<T>,
}

impl<T: ResourceManagerService> MessageSizeLimit<T> {
    /// Creates the service in front of `manager`.
    pub fn new(manager: T) -> Self {
        let manager = Arc::new(manager);
        let with = |bytes| {
            compressible!(ResourceManagerServiceServer::from_arc(manager.clone())).max_decoding_message_size(bytes)
        };
        Self { heartbeats: with(HEARTBEAT_BYTES_MAX), others: with(MESSAGE_BYTES_MAX) }
    }
}

impl<T> Clone for MessageSizeLimit<T> {
    fn clone(&self) -> Self {
        Self { heartbeats: self.heartbeats.clone(), others: self.others.clone() }
    }
}

impl<T, B> Service<http::Request<B>> for MessageSizeLimit<T>
where
    T: ResourceManagerService,
    B: HttpBody + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = ReplyFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, call: http::Request<B>) -> ReplyFuture {
        match call.uri().path().ends_with("/Heartbeat") {
            true => self.heartbeats.call(call),
            false => self.others.call(call),
        }
    }
}

impl<T> NamedService for MessageSizeLimit<T> {
    const NAME: &'static str = ResourceManagerServiceServer::<T>::NAME;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compose_gateway_accepts_largest_report() {
        let compose = include_str!("../../../docker-compose.yml");
        let size = compose.lines().find_map(|line| line.trim().strip_prefix("client_max_body_size ")).unwrap();
        let bytes = rm_model::resource::parse_size(size.trim_end_matches(';')).unwrap();
        let largest = i64::try_from(HEARTBEAT_BYTES_MAX).unwrap();
        assert!((largest + 5..2 * largest).contains(&bytes), "{size} for {largest} bytes");
    }
}
