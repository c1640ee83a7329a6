//! The macro that connects the methods of a service with gRPC.
//!
//! A method takes the request and returns a [`Reply`]. The macro implements the generated trait with a method of the same
//! name for each row. It is the only place where a service converts an error to a status, except inside a stream.
//! Callers: the modules of the services.

use rm_service::error::Error;

/// Response message of a call, or its error.
pub(crate) type Reply<M> = Result<M, Error>;

/// Implements the gRPC service for the server type, with one row `method: Request => Response` for each call. A call that
/// returns a stream has a row `method: Request => Stream = type of the stream` in `streams`.
macro_rules! rpc {
    (
        $service:path = $server:ty {
            $($call:ident: $request:ident => $response:ident,)+
        }
        $(streams {
            $($stream_call:ident: $stream_request:ident => $stream:ident = $stream_type:ty,)+
        })?
    ) => {
        #[tonic::async_trait]
        impl $service for $server {
            $(
                async fn $call(
                    &self,
                    call: tonic::Request<rm_proto::v1::$request>,
                ) -> Result<tonic::Response<rm_proto::v1::$response>, tonic::Status> {
                    <$server>::$call(self, call).await.map(tonic::Response::new).map_err($crate::status::to_status)
                }
            )+
            $($(
                type $stream = $stream_type;

                async fn $stream_call(
                    &self,
                    call: tonic::Request<rm_proto::v1::$stream_request>,
                ) -> Result<tonic::Response<$stream_type>, tonic::Status> {
                    <$server>::$stream_call(self, call).await.map(tonic::Response::new).map_err($crate::status::to_status)
                }
            )+)?
        }
    };
}

pub(crate) use rpc;
