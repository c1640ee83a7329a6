//! Health service: the library's, except that a watch of an unknown service does not fail.
//!
//! Such a watch begins with SERVICE_UNKNOWN and continues, as the protocol demands. When the service becomes known, its
//! status follows. Caller: the server of the root package.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio_stream::Stream;
use tonic::{Request, Response, Status};
use tonic_health::{
    pb::{
        HealthCheckRequest, HealthCheckResponse,
        health_check_response::ServingStatus,
        health_server::{Health, HealthServer},
    },
    server::{HealthReporter, HealthService, WatchStream},
};

/// Interval between two checks whether a watched service is known.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum length of the name of an unknown service, in bytes. The watch stores the name.
const SERVICE_BYTES_MAX: usize = 255;

/// Implementation of the health service.
#[derive(Debug)]
pub struct HealthChecks {
    service: Arc<HealthService>,
    interval: Duration,
}

/// Creates the handle that sets the statuses of services, and the service that publishes them.
pub fn reporter() -> (HealthReporter, HealthServer<HealthChecks>) {
    let reporter = HealthReporter::new();
    let service = Arc::new(HealthService::from_health_reporter(reporter.clone()));
    (reporter, HealthServer::new(HealthChecks { service, interval: CHECK_INTERVAL }))
}

/// Statuses of a watched service.
pub enum Watch {
    /// The service is known.
    Known(WatchStream),
    /// The service is not known yet.
    Unknown {
        /// Resolves when the service is known.
        known: Pin<Box<dyn Future<Output = WatchStream> + Send>>,
        /// Whether SERVICE_UNKNOWN was sent.
        is_sent: bool,
    },
}

impl Stream for Watch {
    type Item = Result<HealthCheckResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match &mut *self {
                Self::Known(statuses) => return Pin::new(statuses).poll_next(cx),
                Self::Unknown { is_sent: is_sent @ false, .. } => {
                    *is_sent = true;
                    let status = ServingStatus::ServiceUnknown.into();
                    return Poll::Ready(Some(Ok(HealthCheckResponse { status })));
                }
                Self::Unknown { known, .. } => {
                    let statuses = ready!(known.as_mut().poll(cx));
                    *self = Self::Known(statuses);
                }
            }
        }
    }
}

/// Waits until `service` is known.
async fn until_known(health: Arc<HealthService>, service: String, interval: Duration) -> WatchStream {
    loop {
        tokio::time::sleep(interval).await;
        let request = HealthCheckRequest { service: service.clone() };
        if let Ok(statuses) = health.watch(Request::new(request)).await {
            return statuses.into_inner();
        }
    }
}

#[tonic::async_trait]
impl Health for HealthChecks {
    type WatchStream = Watch;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        self.service.check(request).await
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Watch>, Status> {
        let service = request.get_ref().service.clone();
        match self.service.watch(request).await {
            Ok(statuses) => Ok(statuses.map(Watch::Known)),
            Err(_) if service.len() <= SERVICE_BYTES_MAX => {
                let known = Box::pin(until_known(self.service.clone(), service, self.interval));
                Ok(Response::new(Watch::Unknown { known, is_sent: false }))
            }
            Err(status) => Err(status),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;
    use tonic_health::ServingStatus as Set;

    use super::*;

    #[tokio::test]
    async fn health_watch_of_unknown_service_follows_registration() {
        let reporter = HealthReporter::new();
        let service = Arc::new(HealthService::from_health_reporter(reporter.clone()));
        let health = HealthChecks { service, interval: Duration::from_millis(5) };
        let watch = async |service: &str| {
            let request = HealthCheckRequest { service: service.to_owned() };
            health.watch(Request::new(request)).await.map(Response::into_inner)
        };
        let mut statuses = watch("later").await.unwrap();
        assert_eq!(statuses.next().await.unwrap().unwrap().status(), ServingStatus::ServiceUnknown);
        reporter.set_service_status("later", Set::NotServing).await;
        assert_eq!(statuses.next().await.unwrap().unwrap().status(), ServingStatus::NotServing);
        reporter.set_service_status("later", Set::Serving).await;
        assert_eq!(statuses.next().await.unwrap().unwrap().status(), ServingStatus::Serving);
        assert!(watch(&"x".repeat(SERVICE_BYTES_MAX + 1)).await.is_err());
    }
}
