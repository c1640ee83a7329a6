//! Empty server: a server of the same API whose handler replies immediately. Its rate is the ceiling for the service.

use std::time::SystemTime;

use rm_proto::v1::{
    self as proto,
    request_resource_response::Result as Answer,
    resource_manager_service_server::{ResourceManagerService, ResourceManagerServiceServer},
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

use crate::Failure;

/// Maximum number of concurrent calls on a connection, above the load of the benchmark.
const STREAMS_PER_CONNECTION_MAX: u32 = 4096;

/// Serves until a signal. Logs its address as the real server does.
pub(crate) async fn serve() -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate())?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    eprintln!("serving address={}", listener.local_addr()?);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let server = tonic::transport::Server::builder().max_concurrent_streams(STREAMS_PER_CONNECTION_MAX);
    tokio::select! {
        served = { server }.add_service(ResourceManagerServiceServer::new(Empty)).serve_with_incoming(incoming) => Ok(served?),
        _ = terminate.recv() => Ok(()),
    }
}

struct Empty;

#[tonic::async_trait]
impl ResourceManagerService for Empty {
    async fn request_resource(
        &self,
        call: Request<proto::RequestResourceRequest>,
    ) -> Result<Response<proto::RequestResourceResponse>, Status> {
        let available = proto::AvailableResource {
            counters: None,
            ticket_id: "01890a5d-ac96-774b-bcce-b302099a8057".to_owned(),
            em: call.into_inner().em,
            expire_time: Some(SystemTime::now().into()),
            head_room: vec![],
            advisory_violations: vec![],
            queue_name: String::new(),
            queue_check: None,
        };
        Ok(Response::new(proto::RequestResourceResponse { result: Some(Answer::Available(available)) }))
    }

    async fn register(&self, _: Request<proto::RegisterRequest>) -> Result<Response<proto::RegisterResponse>, Status> {
        Err(Status::unimplemented("only RequestResource is answered"))
    }

    async fn unregister(
        &self,
        _: Request<proto::UnregisterRequest>,
    ) -> Result<Response<proto::UnregisterResponse>, Status> {
        Err(Status::unimplemented("only RequestResource is answered"))
    }

    async fn resource_inited(
        &self,
        _: Request<proto::ResourceInitedRequest>,
    ) -> Result<Response<proto::ResourceInitedResponse>, Status> {
        Err(Status::unimplemented("only RequestResource is answered"))
    }

    async fn resource_reported(
        &self,
        _: Request<proto::ResourceReportedRequest>,
    ) -> Result<Response<proto::ResourceReportedResponse>, Status> {
        Err(Status::unimplemented("only RequestResource is answered"))
    }

    async fn resource_released(
        &self,
        _: Request<proto::ResourceReleasedRequest>,
    ) -> Result<Response<proto::ResourceReleasedResponse>, Status> {
        Err(Status::unimplemented("only RequestResource is answered"))
    }

    async fn heartbeat(
        &self,
        _: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatResponse>, Status> {
        Err(Status::unimplemented("only RequestResource is answered"))
    }
}
