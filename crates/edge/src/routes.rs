//! Routes: dispatch of calls to services, by the service name in the path.
//!
//! A gRPC path is a service and a method. A router of patterns would copy itself and its services for each call, and
//! box each body twice. Callers: `edge::service`, and the server of the root package, which fills the routes.

use std::{convert::Infallible, fmt};

use tonic::{
    Status,
    body::Body,
    codegen::{BoxFuture, Service, http},
    server::NamedService,
};

/// Future of a response.
pub type ReplyFuture = BoxFuture<http::Response<Body>, Infallible>;

/// Handler of calls with bodies of type `B`.
type RouteHandler<B> = Box<dyn Fn(http::Request<B>) -> ReplyFuture + Send + Sync>;

/// Services of an instance; empty by default.
pub struct Routes<B>(Vec<(&'static str, RouteHandler<B>)>);

impl<B: 'static> Routes<B> {
    /// Adds a service, which must always be ready. Lookup is linear, so the most called services come first.
    pub fn and<S>(mut self, service: S) -> Self
    where
        S: Service<http::Request<B>, Response = http::Response<Body>, Error = Infallible, Future = ReplyFuture>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
    {
        self.0.push((S::NAME, Box::new(move |call| service.clone().call(call))));
        self
    }

    /// Dispatches a call to its service. Returns `UNIMPLEMENTED` if no service has its name.
    pub fn call(&self, call: http::Request<B>) -> ReplyFuture {
        let path = call.uri().path();
        let name = path.strip_prefix('/').and_then(|path| path.rsplit_once('/')).map(|(name, _)| name);
        match self.0.iter().find(|(known, _)| Some(*known) == name) {
            Some((_, serve)) => serve(call),
            None => Box::pin(async { Ok(Status::unimplemented("").into_http()) }),
        }
    }
}

impl<B> Default for Routes<B> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<B> fmt::Debug for Routes<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll};

    use super::*;

    #[derive(Clone)]
    struct Known;

    impl NamedService for Known {
        const NAME: &'static str = "some.Service";
    }

    impl Service<http::Request<()>> for Known {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = ReplyFuture;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<()>) -> ReplyFuture {
            Box::pin(async { Ok(Status::aborted("here").into_http()) })
        }
    }

    #[tokio::test]
    async fn route_path_has_service_and_method() {
        let routes = Routes::default().and(Known);
        for (path, code) in [
            ("/some.Service/Do", "10"),
            ("/some.Service/Other", "10"),
            ("/some.Service", "12"),
            ("/some.Services/Do", "12"),
            ("/other/some.Service/Do", "12"),
            ("/", "12"),
        ] {
            let Ok(answer) = routes.call(http::Request::builder().uri(path).body(()).unwrap()).await;
            assert_eq!(answer.headers().get(Status::GRPC_STATUS).unwrap(), code, "{path}");
        }
    }
}
