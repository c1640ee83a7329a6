//! How large a message may be that is read, once it is unpacked: a heartbeat names all tickets of a host, and limits may be many; every other call has some
//! dozen short fields.

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
    proto::resource_manager_service_server::{ResourceManagerService, ResourceManagerServiceServer},
    routes::Answered,
};

/// The largest message that is read, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 256 * 1024;

/// The largest question about the service itself that is read, in bytes: the name of a service or a symbol.
pub const QUESTION_BYTES_MAX: usize = 4 * 1024;

/// The largest heartbeat that is read, in bytes: that of its tickets, and the rest is as in any message.
pub const HEARTBEAT_BYTES_MAX: usize = TICKETS_MAX * TICKET_BYTES + MESSAGE_BYTES_MAX;

/// The largest message about limits that is read, in bytes: with all of them it is as large as any may be.
pub const LIMITS_BYTES_MAX: usize = HEARTBEAT_BYTES_MAX;

/// Returns the largest message that a call at `path` accepts, in bytes.
pub fn limit_of(path: &str) -> usize {
    match path {
        "/linkis.rm.v1.ResourceManagerService/Heartbeat" => HEARTBEAT_BYTES_MAX,
        _ if path.starts_with("/linkis.rm.v1.LimitService/") => LIMITS_BYTES_MAX,
        _ if path.starts_with("/linkis.rm.v1.") => MESSAGE_BYTES_MAX,
        _ => QUESTION_BYTES_MAX,
    }
}

/// A service that takes what is compressed, and answers so. A macro, because what is generated shares no trait.
macro_rules! compressible {
    ($service:expr) => {
        $service
            .accept_compressed(tonic::codec::CompressionEncoding::Gzip)
            .send_compressed(tonic::codec::CompressionEncoding::Gzip)
    };
}

pub(crate) use compressible;

/// Serves `ResourceManagerService`, each call with the limit that is right for it: before it is read, and not only after.
#[derive(Debug)]
pub struct Limited<T> {
    heartbeats: ResourceManagerServiceServer<T>,
    others: ResourceManagerServiceServer<T>,
}

impl<T: ResourceManagerService> Limited<T> {
    /// In front of `manager`.
    pub fn new(manager: T) -> Self {
        let manager = Arc::new(manager);
        let with = |bytes| {
            compressible!(ResourceManagerServiceServer::from_arc(manager.clone())).max_decoding_message_size(bytes)
        };
        Self { heartbeats: with(HEARTBEAT_BYTES_MAX), others: with(MESSAGE_BYTES_MAX) }
    }
}

impl<T> Clone for Limited<T> {
    fn clone(&self) -> Self {
        Self { heartbeats: self.heartbeats.clone(), others: self.others.clone() }
    }
}

impl<T, B> Service<http::Request<B>> for Limited<T>
where
    T: ResourceManagerService,
    B: HttpBody + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answered;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, call: http::Request<B>) -> Answered {
        match call.uri().path().ends_with("/Heartbeat") {
            true => self.heartbeats.call(call),
            false => self.others.call(call),
        }
    }
}

impl<T> NamedService for Limited<T> {
    const NAME: &'static str = ResourceManagerServiceServer::<T>::NAME;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateway_of_the_compose_file_lets_the_largest_heartbeat_pass() {
        let compose = include_str!("../../docker-compose.yml");
        let size = compose.lines().find_map(|line| line.trim().strip_prefix("client_max_body_size ")).unwrap();
        let bytes = crate::domain::resource::parse_size(size.trim_end_matches(';')).unwrap();
        let largest = i64::try_from(HEARTBEAT_BYTES_MAX).unwrap();
        assert!((largest + 5..2 * largest).contains(&bytes), "{size} for {largest} bytes");
    }
}
