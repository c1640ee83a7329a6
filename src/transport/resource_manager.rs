//! `ResourceManagerService`: the calls of EMs, of those who ask for them, and of engines.

use std::{sync::Arc, time::Duration};

use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    domain::{
        access::Denied,
        em::EmInstance,
        name::{FieldError, Name, check_text},
        operation::{Operation, Outcome, RequestId, RequestSpec},
    },
    error::Error,
    metrics::calls,
    service::{
        admission::Verdict,
        committer::Committer,
        heartbeat::HeartbeatService,
        request_resource::{Deadlines, RequestResourceService},
        ticket_lookup::TicketLookup,
    },
};

use super::{
    convert, deadline,
    edge::ActiveCall,
    identity,
    proto::{
        self, request_resource_response::Result as Answer, resource_manager_service_server::ResourceManagerService,
    },
};

/// The longest that a grant may stay locked.
pub const LOCK_TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// What a server lets its callers wait for.
#[derive(Debug, Clone, Copy)]
pub struct RequestTimeouts {
    /// How long a grant stays locked if the request does not say.
    pub lock_ttl: Duration,
    /// How long a call waits for resource locks at most.
    pub request_timeout: Duration,
    /// How long a request may wait in line for resources.
    pub max_wait: Duration,
}

/// All calls of the service.
#[derive(Debug)]
pub struct ResourceManager {
    committer: Committer,
    request_resource: RequestResourceService,
    heartbeat: HeartbeatService,
    tickets: TicketLookup,
    /// Wakes whoever ends the tickets of EMs that go.
    em_goes: Arc<Notify>,
    times: RequestTimeouts,
}

impl ResourceManager {
    /// On top of the services of this instance.
    pub fn new(
        committer: Committer,
        request_resource: RequestResourceService,
        heartbeat: HeartbeatService,
        tickets: TicketLookup,
        em_goes: Arc<Notify>,
        times: RequestTimeouts,
    ) -> Self {
        Self { committer, request_resource, heartbeat, tickets, em_goes, times }
    }

    async fn submit<M>(&self, call: &Request<M>, operation: Operation) -> Result<Outcome, Error> {
        identity::check(call, |reach| match operation.user() {
            Some(user) => reach.check(Some(operation.em()), user),
            None => reach.check_em(operation.em()),
        })?;
        let deadline = deadline::of_call(call.metadata(), self.times.request_timeout);
        self.committer.submit(&identity::of_call(call), operation, deadline).await
    }

    fn parse_request(
        &self,
        call: &Request<proto::RequestResourceRequest>,
    ) -> Result<(Option<EmInstance>, Vec<Arc<RequestSpec>>), Error> {
        let message = call.get_ref();
        convert::request::check_planned(message)?;
        let em = message.em.clone().map(|em| convert::request::em_instance("em", Some(em))).transpose()?;
        check_text("engine_type", &message.engine_type)?;
        let resource = convert::resource::required("resource", message.resource.clone())?;
        if resource.is_zero() {
            return Err(FieldError::new("resource", "asks for nothing at all; set an amount above zero").into());
        }
        let request_id = match message.request_id.as_str() {
            "" => None,
            id => Some(RequestId { id: Name::parse("request_id", id)?, body_hash: body_hash(message) }),
        };
        let (selector, labels) = convert::request::selector(message)?;
        let ask = RequestSpec {
            principal: identity::of_call(call),
            ticket_id: Uuid::now_v7(),
            user: Name::parse("user", &message.user)?,
            creator: Name::parse("creator", &message.creator)?,
            engine_type: message.engine_type.clone(),
            resource,
            labels,
            selector,
            caps: convert::cap::caps("caps", &message.caps)?,
            lock_ttl: self.lock_ttl(message.lock_ttl)?,
            request_id,
        };
        if message.queue_names.is_empty() {
            return Ok((em, vec![ask.into()]));
        }
        let resources = convert::request::in_queues(&message.queue_names, &ask.resource)?;
        Ok((em, resources.into_iter().map(|resource| RequestSpec { resource, ..ask.clone() }.into()).collect()))
    }

    /// Until when the caller of a request waits.
    fn deadlines(&self, call: &Request<proto::RequestResourceRequest>) -> Result<Deadlines, FieldError> {
        let asked = call.get_ref().wait_timeout;
        let wait = asked.map(|wait| convert::request::duration("wait_timeout", wait)).transpose()?;
        if wait.is_some_and(|wait| wait > self.times.max_wait) {
            let most = humantime::format_duration(self.times.max_wait);
            return Err(FieldError::new(
                "wait_timeout",
                format!("must be at most {most}, which is all that this server allows"),
            ));
        }
        let until = |longest| deadline::of_call(call.metadata(), longest);
        Ok(Deadlines { locks: until(self.times.request_timeout), line: wait.filter(|wait| !wait.is_zero()).map(until) })
    }

    fn lock_ttl(&self, asked: Option<prost_types::Duration>) -> Result<Duration, FieldError> {
        let Some(asked) = asked else { return Ok(self.times.lock_ttl) };
        let ttl = convert::request::duration("lock_ttl", asked)?;
        if ttl.is_zero() || ttl > LOCK_TTL_MAX {
            return Err(FieldError::new("lock_ttl", "must be above zero and at most 24h"));
        }
        Ok(ttl)
    }
}

/// What a request id stands for: everything that was asked, but neither how long to wait for it nor whether to grant it.
fn body_hash(message: &proto::RequestResourceRequest) -> [u8; 32] {
    let body = proto::RequestResourceRequest { wait_timeout: None, dry_run: false, ..message.clone() };
    // Maps are ordered in the generated code, so equal bodies have equal bytes.
    Sha256::digest(body.encode_to_vec()).into()
}

/// An outcome that does not belong to the operation: a defect.
pub(super) fn unexpected(outcome: &Outcome) -> Status {
    Error::defect(format!("an outcome that does not belong to its operation: {outcome:?}")).into()
}

#[tonic::async_trait]
impl ResourceManagerService for ResourceManager {
    async fn register(
        &self,
        call: Request<proto::RegisterRequest>,
    ) -> Result<Response<proto::RegisterResponse>, Status> {
        let operation = Operation::Register(convert::request::register(call.get_ref().clone()).map_err(Error::from)?);
        match self.submit(&call, operation).await? {
            Outcome::Registered(em) => {
                let em = Some(convert::answer::em_resource(&em, None)?);
                Ok(Response::new(proto::RegisterResponse { em }))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn unregister(
        &self,
        call: Request<proto::UnregisterRequest>,
    ) -> Result<Response<proto::UnregisterResponse>, Status> {
        let operation =
            Operation::Unregister(convert::request::unregister(call.get_ref().clone()).map_err(Error::from)?);
        match self.submit(&call, operation).await? {
            Outcome::Unregistered { removed_tickets, in_progress } => {
                if in_progress {
                    self.em_goes.notify_one();
                }
                let removed_tickets = i64::try_from(removed_tickets).unwrap_or(i64::MAX);
                Ok(Response::new(proto::UnregisterResponse { removed_tickets, in_progress }))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn request_resource(
        &self,
        mut call: Request<proto::RequestResourceRequest>,
    ) -> Result<Response<proto::RequestResourceResponse>, Status> {
        let active: Option<ActiveCall> = call.extensions_mut().remove();
        let message = call.get_ref();
        let (em, asks) = self.parse_request(&call)?;
        let user =
            asks.first().map(|ask| ask.user.clone()).ok_or_else(|| Error::defect("a request without a request"))?;
        identity::check(&call, |reach| reach.check(em.as_ref(), &user))?;
        let deadlines = self.deadlines(&call).map_err(Error::from)?;
        if deadlines.line.is_some() {
            calls::may_wait();
        }
        let answer = if message.dry_run {
            match Box::pin(self.request_resource.dry_run(em, asks, deadlines.locks)).await? {
                (em, Verdict::Fits, room, chosen) => Answer::Available(proto::AvailableResource {
                    queue_name: message.queue_names.get(chosen).cloned().unwrap_or_default(),
                    em: Some(convert::answer::em_message(&em)),
                    head_room: room.head_room.into_iter().map(convert::answer::head_room).collect(),
                    over_watched: room.over_watched.iter().map(convert::answer::shortfall).collect(),
                    ..Default::default()
                }),
                (_, Verdict::Refused(short), ..) => Answer::NotEnough(convert::answer::not_enough(&short.refusal)),
            }
        } else {
            let ticket_id = asks.first().map(|ask| ask.ticket_id).unwrap_or_default();
            let is_repeatable = !message.request_id.is_empty();
            let answer = self.request_resource.request_any(em, asks, deadlines, active);
            let answer = identity::while_admitted(&call, deadlines.line.is_some(), answer).await;
            let answer = answer.map_err(|error| match error {
                Error::CommitUnknown if !is_repeatable => Error::GrantUnknown { ticket_id },
                error => error,
            });
            let (outcome, chosen) = answer?;
            match outcome {
                Outcome::Granted(grant) => {
                    let mut available = convert::answer::available(&grant);
                    if let Some(name) = message.queue_names.get(chosen) {
                        // Of one that was granted before, its ticket knows.
                        available.queue_name = match grant.ticket_id == ticket_id {
                            true => name.clone(),
                            false => self.tickets.queue_of(grant.ticket_id).await?.unwrap_or_default(),
                        };
                    }
                    Answer::Available(available)
                }
                Outcome::Refused(refusal) => Answer::NotEnough(convert::answer::not_enough(&refusal)),
                other => return Err(unexpected(&other)),
            }
        };
        Ok(Response::new(proto::RequestResourceResponse { result: Some(answer) }))
    }

    async fn resource_inited(
        &self,
        call: Request<proto::ResourceInitedRequest>,
    ) -> Result<Response<proto::ResourceInitedResponse>, Status> {
        let operation = Operation::Inited(convert::request::inited(call.get_ref().clone()).map_err(Error::from)?);
        match self.submit(&call, operation).await? {
            Outcome::Inited(ticket) => {
                Ok(Response::new(proto::ResourceInitedResponse { ticket: Some(convert::answer::ticket(&ticket)) }))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn resource_reported(
        &self,
        call: Request<proto::ResourceReportedRequest>,
    ) -> Result<Response<proto::ResourceReportedResponse>, Status> {
        let operation = Operation::Reported(convert::request::reported(call.get_ref().clone()).map_err(Error::from)?);
        match self.submit(&call, operation).await? {
            Outcome::Reported(ticket) => {
                Ok(Response::new(proto::ResourceReportedResponse { ticket: Some(convert::answer::ticket(&ticket)) }))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn resource_released(
        &self,
        call: Request<proto::ResourceReleasedRequest>,
    ) -> Result<Response<proto::ResourceReleasedResponse>, Status> {
        let named = convert::request::released(call.get_ref().clone()).map_err(Error::from)?;
        let deadline = deadline::of_call(call.metadata(), self.times.request_timeout);
        let released = self.tickets.complete(named, deadline).await?;
        // Whose it is and where, whoever may not give it back is not told.
        let generic = |denied: Denied| Denied { needs: "the ticket's EM or user among its own".to_owned(), ..denied };
        identity::check(&call, |reach| reach.check(Some(&released.em), &released.user).map_err(generic))?;
        match self.committer.submit(&identity::of_call(&call), Operation::Released(released), deadline).await? {
            Outcome::Released => Ok(Response::new(proto::ResourceReleasedResponse {})),
            other => Err(unexpected(&other)),
        }
    }

    async fn heartbeat(
        &self,
        call: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatResponse>, Status> {
        let deadline = deadline::of_call(call.metadata(), self.times.request_timeout);
        let (metadata, extensions, message) = call.into_parts();
        let report = convert::request::report(message).map_err(Error::from)?;
        let call = Request::from_parts(metadata, extensions, ());
        identity::check(&call, |reach| reach.check_em(&report.em))?;
        let unknown = self.heartbeat.report(report, deadline).await?;
        Ok(Response::new(proto::HeartbeatResponse {
            unknown_tickets: unknown.into_iter().map(convert::answer::unknown_ticket).collect(),
            report_interval: prost_types::Duration::try_from(self.heartbeat.interval()).ok(),
        }))
    }
}
