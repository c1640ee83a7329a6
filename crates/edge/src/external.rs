//! `ExternalResourceService`: providers of external clusters, and their queues and applications.
//!
//! Each method parses its message, calls the service and converts the result. Lists come from the latest cluster
//! snapshot, and each response states its age. The edge has authenticated the caller already. Never: returns the secrets of
//! a provider. Caller: the gRPC routes.

use std::time::Duration;

use tonic::Request;

use crate::rpc::{Reply, rpc};
use rm_model::{
    name::{FieldError, Name, check_text},
    queue::{Application, ExternalQueue, QueueTree, is_in},
};
use rm_service::{
    error::{Error, ExternalError},
    external::{ExternalResourceService, ProviderReply},
};

use super::{authenticator, convert, deadline, server_info::duration};
use rm_proto::page::PageRequest;
use rm_proto::v1::{self as proto, external_resource_service_server};

/// Implementation of `ExternalResourceService`.
#[derive(Debug)]
pub struct ExternalResourceRpc {
    service: ExternalResourceService,
    /// Timeout of a change whose call states no deadline.
    timeout: Duration,
}

impl ExternalResourceRpc {
    /// Creates the implementation on the given service.
    pub fn new(service: ExternalResourceService, timeout: Duration) -> Self {
        Self { service, timeout }
    }
}

/// Returns the external queue with this name or path in a cluster snapshot.
fn find<'a>(seen: &'a ProviderReply<QueueTree>, name: &str) -> Result<&'a ExternalQueue, Error> {
    let not_found = |error| ExternalError::Queue { provider: seen.provider.to_string(), error };
    Ok(seen.value.find(name).map_err(not_found)?)
}

impl ExternalResourceRpc {
    async fn put_provider(&self, call: Request<proto::PutProviderRequest>) -> Reply<proto::PutProviderResponse> {
        let (by, deadline) = (authenticator::actor(&call), deadline::of_call(call.metadata(), self.timeout));
        let proto::PutProviderRequest { provider, expected_etag } = call.into_inner();
        let put = convert::external::put(provider)?;
        let expected = convert::external::expected(expected_etag.as_deref());
        let shown = self.service.put_provider(&by, put, expected, deadline).await?;
        Ok(proto::PutProviderResponse { provider: Some(convert::external::provider(&shown)) })
    }

    async fn delete_provider(
        &self,
        call: Request<proto::DeleteProviderRequest>,
    ) -> Reply<proto::DeleteProviderResponse> {
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        let proto::DeleteProviderRequest { resource_type, name, expected_etag } = call.get_ref();
        let resource_type = Name::parse("resource_type", resource_type)?;
        let name = Name::parse("name", name)?;
        let expected = convert::external::expected(expected_etag.as_deref());
        self.service.delete(&authenticator::actor(&call), &resource_type, &name, expected, deadline).await?;
        Ok(proto::DeleteProviderResponse {})
    }

    async fn list_providers(&self, _: Request<proto::ListProvidersRequest>) -> Reply<proto::ListProvidersResponse> {
        let providers = self.service.providers().await?;
        let providers = providers.iter().map(convert::external::provider).collect();
        Ok(proto::ListProvidersResponse { providers })
    }

    async fn check_provider(&self, call: Request<proto::CheckProviderRequest>) -> Reply<proto::CheckProviderResponse> {
        let by = authenticator::of_call(&call);
        let checked = convert::external::checked(call.into_inner())?;
        let check = self.service.check_provider(&by, checked).await?;
        Ok(proto::CheckProviderResponse { result: Some(convert::external::check_result(&check)) })
    }

    async fn get_queue(&self, call: Request<proto::GetQueueRequest>) -> Reply<proto::GetQueueResponse> {
        let proto::GetQueueRequest { provider, queue_name } = call.get_ref();
        let selector = convert::external::selector(provider.as_ref())?;
        check_queue_name(queue_name)?;
        if queue_name.is_empty() {
            return Err(FieldError::new("queue_name", "must not be empty").into());
        }
        let seen = self.service.queues(&selector).await?;
        let found = find(&seen, queue_name)?;
        let mut along = seen.value.along(found).map(|queue| convert::external::queue(&seen.value, queue));
        Ok(proto::GetQueueResponse {
            queue: along.next(),
            ancestors: along.collect(),
            provider_name: seen.provider.to_string(),
            age: duration(seen.age),
        })
    }

    async fn list_queues(&self, call: Request<proto::ListQueuesRequest>) -> Reply<proto::ListQueuesResponse> {
        let proto::ListQueuesRequest { provider, page_size, page_token } = call.into_inner();
        let selector = convert::external::selector(provider.as_ref())?;
        let filters = proto::ListQueuesRequest { provider, ..Default::default() };
        let page = PageRequest::new("ListQueues", page_size, &filters)?;
        let after = page.after(&page_token, Some)?;
        let seen = self.service.queues(&selector).await?;
        let mut found: Vec<&ExternalQueue> =
            seen.value.behind(after).take(page.entries_max().saturating_add(1)).collect();
        let next = if page.cut(&mut found) { found.last().map(|last| page.token(&last.path)) } else { None };
        Ok(proto::ListQueuesResponse {
            queues: found.into_iter().map(|queue| convert::external::queue(&seen.value, queue)).collect(),
            next_page_token: next.unwrap_or_default(),
            provider_name: seen.provider.to_string(),
            age: duration(seen.age),
        })
    }

    async fn list_applications(
        &self,
        call: Request<proto::ListApplicationsRequest>,
    ) -> Reply<proto::ListApplicationsResponse> {
        // A viewer that is bound to users sees the applications of these users only.
        let own = authenticator::reach(&call)?.users().cloned();
        let is_seen = |user: &str| own.as_ref().is_none_or(|own| own.iter().any(|name| name.as_str() == user));
        let message = call.into_inner();
        let selector = convert::external::selector(message.provider.as_ref())?;
        check_queue_name(&message.queue_name)?;
        for (field, text) in [("user", &message.user), ("state", &message.state)] {
            check_text(field, text)?;
        }
        let filters = proto::ListApplicationsRequest { page_size: 0, page_token: String::new(), ..message.clone() };
        let page = PageRequest::new("ListApplications", message.page_size, &filters)?;
        let after = page.after(&message.page_token, Some)?.unwrap_or_default();
        let queues = self.service.queues(&selector).await?;
        let within = match message.queue_name.as_str() {
            "" => None,
            name => Some(find(&queues, name)?.path.as_str()),
        };
        let seen = self.service.applications(&selector).await?;
        let behind = seen.value.partition_point(|application| application.id.as_str() <= after);
        let matching = seen.value.iter().skip(behind).filter_map(|application| {
            let path = queues.value.find(&application.queue).map_or(application.queue.as_str(), |queue| &queue.path);
            let matches = is_seen(&application.user)
                && (message.user.is_empty() || application.user == message.user)
                && (message.state.is_empty() || application.state == message.state)
                && within.is_none_or(|within| is_in(path, within));
            matches.then_some((application, path))
        });
        let mut found: Vec<_> = matching.take(page.entries_max().saturating_add(1)).collect();
        let next = if page.cut(&mut found) { found.last().map(|(last, _)| page.token(&last.id)) } else { None };
        let ids: Vec<&str> = found.iter().map(|(app, _)| app.id.as_str()).collect();
        let tickets = self.service.tickets_of(&seen.provider, &ids).await?;
        let message = |(app, path): (&Application, &str)| {
            convert::external::application(app, path, tickets.get(&app.id).copied())
        };
        let applications = found.into_iter().map(message).collect();
        Ok(proto::ListApplicationsResponse {
            applications,
            next_page_token: next.unwrap_or_default(),
            provider_name: seen.provider.to_string(),
            age: duration(seen.age.max(queues.age)),
        })
    }
}

rpc! {
    external_resource_service_server::ExternalResourceService = ExternalResourceRpc {
        put_provider: PutProviderRequest => PutProviderResponse,
        delete_provider: DeleteProviderRequest => DeleteProviderResponse,
        list_providers: ListProvidersRequest => ListProvidersResponse,
        check_provider: CheckProviderRequest => CheckProviderResponse,
        get_queue: GetQueueRequest => GetQueueResponse,
        list_queues: ListQueuesRequest => ListQueuesResponse,
        list_applications: ListApplicationsRequest => ListApplicationsResponse,
    }
}

/// Checks the name of an external queue. The path of a queue may be longer than a name.
fn check_queue_name(name: &str) -> Result<(), FieldError> {
    const BYTES_MAX: usize = 1024;
    match name.len() > BYTES_MAX || name.chars().any(char::is_control) {
        true => Err(FieldError::new(
            "queue_name",
            format!("must have at most {BYTES_MAX} bytes, and no control characters"),
        )),
        false => Ok(()),
    }
}
