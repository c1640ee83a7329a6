//! `ResourceManagerService`: the calls of EMs, of those who ask for them, and of engines.

use std::{sync::Arc, time::Duration};

use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio::{sync::Notify, time::Instant};
use tonic::{Request, Response, Status, metadata::MetadataMap};
use uuid::Uuid;

use crate::{
    domain::{
        access::Reach,
        em::EmInstance,
        judgement::{HeadRoom, Room},
        name::{FieldError, Name, check_new, check_text},
        operation::{Grant, NamedTicket, Operation, Outcome, Rejection, RequestId, RequestSpec},
        principal::{Actor, Principal},
        report::Report,
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

    /// Has what a message says carried out, and tells the counters after it, if they are wanted. Its caller keeps neither the call nor the message: a future has room for whatever it
    /// ever had.
    fn submit<'a, M, F>(
        &'a self,
        call: Request<M>,
        read: F,
    ) -> Result<impl Future<Output = Result<Told, Error>> + Send + use<'a, M, F>, Error>
    where
        F: FnOnce(M) -> Result<(Operation, bool), FieldError>,
    {
        let (headers, call, message) = parted(call);
        let (operation, return_counters) = read(message)?;
        identity::check(&call, |reach| match operation.user() {
            Some(user) => reach.check(Some(operation.em()), user),
            None => reach.check_em(operation.em()),
        })?;
        let deadline = deadline::of_call(&headers, self.times.request_timeout);
        let counters = return_counters.then(|| identity::reach(&call).cloned()).transpose()?;
        Ok(submit(&self.committer, identity::of_call(&call).into(), operation, (deadline, counters)))
    }

    /// Reads a request, of somebody who may make it.
    fn read_request(
        &self,
        call: Request<proto::RequestResourceRequest>,
    ) -> Result<(Request<()>, Asked, Deadlines), Error> {
        let (headers, call, message) = parted(call);
        let wait_timeout = message.wait_timeout;
        let asked = self.parse_request(identity::of_call(&call), message)?;
        let user = &asked.first()?.user;
        identity::check(&call, |reach| reach.check(asked.em.as_ref(), user))?;
        let deadlines = self.deadlines(&headers, wait_timeout)?;
        Ok((call, asked, deadlines))
    }

    fn read_named(&self, call: Request<proto::ResourceReleasedRequest>) -> Result<Named, Error> {
        let (headers, call, message) = parted(call);
        let deadline = deadline::of_call(&headers, self.times.request_timeout);
        let return_counters = message.return_counters;
        Ok((call, convert::request::released(message)?, (deadline, return_counters)))
    }

    fn read_report(&self, call: Request<proto::HeartbeatRequest>) -> Result<(Report, Instant), Error> {
        let (headers, call, message) = parted(call);
        let deadline = deadline::of_call(&headers, self.times.request_timeout);
        let report = convert::request::report(message)?;
        identity::check(&call, |reach| reach.check_em(&report.em))?;
        Ok((report, deadline))
    }

    fn parse_request(&self, by: Principal, mut message: proto::RequestResourceRequest) -> Result<Asked, Error> {
        convert::request::check_planned(&message)?;
        let request_id = match message.request_id.as_str() {
            "" => None,
            id => Some(RequestId { id: Name::parse("request_id", id)?, body_hash: body_hash(&message) }),
        };
        let (selector, labels) = convert::request::selector(&message)?;
        let em = message.em.take().map(|em| convert::request::em_instance("em", Some(em))).transpose()?;
        check_text("engine_type", &message.engine_type)?;
        check_new("engine_type", &message.engine_type)?;
        let resource = convert::resource::required("resource", message.resource.take())?;
        convert::resource::check_new("resource", &resource)?;
        if resource.is_zero() {
            return Err(FieldError::new("resource", "asks for nothing at all; set an amount above zero").into());
        }
        let (is_dry_run, is_repeatable) = (message.dry_run, request_id.is_some());
        let ask = RequestSpec {
            principal: by,
            ticket_id: Uuid::now_v7(),
            user: Name::parse_new("user", &message.user)?,
            creator: Name::parse_new("creator", &message.creator)?,
            engine_type: message.engine_type,
            resource,
            labels,
            selector,
            caps: convert::cap::caps("caps", &message.caps)?,
            lock_ttl: self.lock_ttl(message.lock_ttl)?,
            request_id,
            return_counters: message.return_counters,
        };
        let queue_names = message.queue_names;
        let asks = match queue_names.is_empty() {
            true => vec![ask.into()],
            false => {
                let resources = convert::request::in_queues(&queue_names, &ask.resource)?;
                resources.into_iter().map(|resource| RequestSpec { resource, ..ask.clone() }.into()).collect()
            }
        };
        Ok(Asked { em, asks, queue_names, is_dry_run, is_repeatable })
    }

    /// Until when the caller of a request waits.
    fn deadlines(
        &self,
        headers: &MetadataMap,
        wait_timeout: Option<prost_types::Duration>,
    ) -> Result<Deadlines, FieldError> {
        let wait = wait_timeout.map(|wait| convert::request::duration("wait_timeout", wait)).transpose()?;
        if wait.is_some_and(|wait| wait > self.times.max_wait) {
            let most = humantime::format_duration(self.times.max_wait);
            return Err(FieldError::new(
                "wait_timeout",
                format!("must be at most {most}, which is all that this server allows"),
            ));
        }
        let until = |longest| deadline::of_call(headers, longest);
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

/// A request as it was read, and what its answer needs of it.
struct Asked {
    em: Option<EmInstance>,
    /// What is asked for: in each of the queues, or once.
    asks: Vec<Arc<RequestSpec>>,
    queue_names: Vec<String>,
    is_dry_run: bool,
    is_repeatable: bool,
}

impl Asked {
    fn first(&self) -> Result<&RequestSpec, Error> {
        self.asks.first().map(Arc::as_ref).ok_or_else(|| Error::defect("a request without a request"))
    }
}

/// What a request id stands for: everything that was asked, but neither how long to wait for it, nor whether to grant it, nor what to tell.
fn body_hash(message: &proto::RequestResourceRequest) -> [u8; 32] {
    let body =
        proto::RequestResourceRequest { wait_timeout: None, dry_run: false, return_counters: false, ..message.clone() };
    // Maps are ordered in the generated code, so equal bodies have equal bytes.
    Sha256::digest(body.encode_to_vec()).into()
}

/// A call that names a ticket, until when it waits, and whether it wants the counters after it.
type Named = (Request<()>, NamedTicket, (Instant, bool));

/// How an operation ended, and the counters after it, if they were wanted.
pub(super) type Told = (Outcome, Option<proto::Counters>);

/// Has an operation carried out, and returns the counters after it within what the caller may see, if they are wanted.
pub(super) fn submit(
    committer: &Committer,
    by: Actor,
    operation: Operation,
    (deadline, reach): (Instant, Option<Reach>),
) -> impl Future<Output = Result<Told, Error>> + Send {
    let done = committer.submit_counted(by, operation, deadline.into(), reach.is_some());
    async move {
        let (outcome, counters) = done.await?;
        let within = |reach: &Reach| Some(convert::answer::counters(counters.as_deref()?, reach));
        Ok((outcome, reach.as_ref().and_then(within).transpose()?))
    }
}

/// Returns the counters of a grant within what the caller may see.
fn shown_counters(call: &Request<()>, grant: &Grant) -> Result<Option<Box<proto::Counters>>, Error> {
    let Some(counters) = grant.counters.as_deref() else { return Ok(None) };
    Ok(Some(Box::new(convert::answer::counters(counters, identity::reach(call)?)?)))
}

/// The headers of a call, what is known of its caller, and its message. Whatever is read is not kept besides: of calls that wait, there
/// are many.
fn parted<M>(call: Request<M>) -> (MetadataMap, Request<()>, M) {
    let (headers, extensions, message) = call.into_parts();
    (headers, Request::from_parts(MetadataMap::new(), extensions, ()), message)
}

/// What a request would be answered, and in which of the queues. A caller that is bound is told the head-room of its own scopes alone.
fn dry_run(
    (em, verdict, room, chosen): (EmInstance, Verdict, Room, usize),
    queue_names: &[String],
    reach: &Reach,
) -> Answer {
    let is_shown = |room: &HeadRoom| room.of.as_ref().is_none_or(|scope| reach.has_scope(scope));
    match verdict {
        Verdict::Fits => Answer::Available(proto::AvailableResource {
            queue_name: queue_names.get(chosen).cloned().unwrap_or_default(),
            em: Some(convert::answer::em_message(&em)),
            head_room: room.head_room.into_iter().filter(is_shown).map(convert::answer::head_room).collect(),
            over_watched: room.over_watched.iter().map(convert::answer::shortfall).collect(),
            ..Default::default()
        }),
        Verdict::Refused(short) => Answer::NotEnough(convert::answer::not_enough(&short.refusal)),
    }
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
        let read = |message| Ok((Operation::Register(convert::request::register(message)?), true));
        match self.submit(call, read)?.await? {
            (Outcome::Registered(em), counters) => {
                // It may have gone again in the same commit.
                let em = match counters.and_then(|counters| counters.em) {
                    Some(em) => em,
                    None => convert::answer::em_resource(&em, None)?,
                };
                Ok(Response::new(proto::RegisterResponse { em: Some(em) }))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn unregister(
        &self,
        call: Request<proto::UnregisterRequest>,
    ) -> Result<Response<proto::UnregisterResponse>, Status> {
        let read = |message| Ok((Operation::Unregister(convert::request::unregister(message)?), false));
        match self.submit(call, read)?.await? {
            (Outcome::Unregistered { removed_tickets, in_progress }, _) => {
                if in_progress {
                    self.em_goes.notify_one();
                }
                let removed_tickets = i64::try_from(removed_tickets).unwrap_or(i64::MAX);
                Ok(Response::new(proto::UnregisterResponse { removed_tickets, in_progress }))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn request_resource(
        &self,
        call: Request<proto::RequestResourceRequest>,
    ) -> Result<Response<proto::RequestResourceResponse>, Status> {
        let (mut call, asked, deadlines) = self.read_request(call)?;
        let active: Option<ActiveCall> = call.extensions_mut().remove();
        if deadlines.line.is_some() {
            calls::may_wait();
        }
        let ticket_id = asked.first()?.ticket_id;
        let caps = asked.first()?.caps.clone();
        if !caps.is_empty() && identity::reach(&call)?.is_all() {
            self.request_resource.count_caps(identity::actor(&call), caps, deadlines.locks).await?;
        }
        let Asked { em, asks, queue_names, is_dry_run, is_repeatable } = asked;
        if is_dry_run {
            let judged = Box::pin(self.request_resource.dry_run(em, asks, deadlines.locks)).await?;
            let result = Some(dry_run(judged, &queue_names, identity::reach(&call)?));
            return Ok(Response::new(proto::RequestResourceResponse { result }));
        }
        let answer = self.request_resource.request_any(em, asks, deadlines, active);
        let answer = match deadlines.line {
            Some(_) => identity::while_admitted(&call, Box::pin(answer)).await,
            None => answer.await,
        };
        let answer = answer.map_err(|error| match error {
            Error::CommitUnknown if !is_repeatable => Error::GrantUnknown { ticket_id },
            error => error,
        });
        let (outcome, chosen) = answer?;
        let answer = match outcome {
            Outcome::Granted(grant) => {
                let mut available = convert::answer::available(&grant);
                available.counters = shown_counters(&call, &grant)?;
                if let Some(name) = queue_names.get(chosen) {
                    // Of one that was granted before, its ticket knows.
                    available.queue_name = match grant.ticket_id == ticket_id {
                        true => name.clone(),
                        false => Box::pin(self.tickets.queue_of(grant.ticket_id)).await?.unwrap_or_default(),
                    };
                }
                Answer::Available(available)
            }
            Outcome::Refused(refusal) => Answer::NotEnough(convert::answer::not_enough(&refusal)),
            other => return Err(unexpected(&other)),
        };
        Ok(Response::new(proto::RequestResourceResponse { result: Some(answer) }))
    }

    async fn resource_inited(
        &self,
        call: Request<proto::ResourceInitedRequest>,
    ) -> Result<Response<proto::ResourceInitedResponse>, Status> {
        let read = |message: proto::ResourceInitedRequest| {
            let return_counters = message.return_counters;
            Ok((Operation::Inited(convert::request::inited(message)?), return_counters))
        };
        match self.submit(call, read)?.await? {
            (Outcome::Inited(ticket), counters) => {
                let ticket = Some(convert::answer::ticket(&ticket));
                Ok(Response::new(proto::ResourceInitedResponse { ticket, counters }))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn resource_reported(
        &self,
        call: Request<proto::ResourceReportedRequest>,
    ) -> Result<Response<proto::ResourceReportedResponse>, Status> {
        let read = |message: proto::ResourceReportedRequest| {
            let return_counters = message.return_counters;
            Ok((Operation::Reported(convert::request::reported(message)?), return_counters))
        };
        match self.submit(call, read)?.await? {
            (Outcome::Reported(ticket), counters) => {
                let ticket = Some(convert::answer::ticket(&ticket));
                Ok(Response::new(proto::ResourceReportedResponse { ticket, counters }))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn resource_released(
        &self,
        call: Request<proto::ResourceReleasedRequest>,
    ) -> Result<Response<proto::ResourceReleasedResponse>, Status> {
        let (call, named, (deadline, return_counters)) = self.read_named(call)?;
        let reach = identity::reach(&call)?.clone();
        if let NamedTicket { user: Some(user), em: Some(em), .. } = &named {
            identity::check(&call, |reach| reach.check(Some(em), user))?;
        }
        let ticket_id = named.ticket_id;
        let released = self.tickets.complete(named, deadline).await?;
        if reach.check(Some(&released.em), &released.user).is_err() {
            return Err(Error::from(Rejection::TicketNotFound { ticket_id, ended: None }).into());
        }
        let (by, operation) = (identity::of_call(&call).into(), Operation::Released(released));
        match submit(&self.committer, by, operation, (deadline, return_counters.then_some(reach))).await? {
            (Outcome::Released, counters) => Ok(Response::new(proto::ResourceReleasedResponse { counters })),
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn heartbeat(
        &self,
        call: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatResponse>, Status> {
        let (report, deadline) = self.read_report(call)?;
        let unknown = self.heartbeat.report(report, deadline).await?;
        Ok(Response::new(proto::HeartbeatResponse {
            unknown_tickets: unknown.into_iter().map(convert::answer::unknown_ticket).collect(),
            report_interval: prost_types::Duration::try_from(self.heartbeat.interval()).ok(),
        }))
    }
}
