//! `ResourceManagerService`: calls of EMs, of requesters, and of engines.
//!
//! Each method parses its message, checks the call scope, submits an operation or calls a service, and converts the
//! result. The edge has authenticated the caller and acquired its permit already. The module never decides and never
//! writes. Caller: the gRPC routes.

use std::{sync::Arc, time::Duration};

use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio::{sync::Notify, time::Instant};
use tonic::{Request, metadata::MetadataMap};
use uuid::Uuid;

use crate::rpc::{Reply, rpc};
use rm_model::{
    access::CallScope,
    assessment::{DryRunResult, HeadRoom, Verdict},
    em::EmInstance,
    name::{FieldError, Name, check_new, check_text},
    operation::{Grant, Operation, Outcome, Rejection, RequestId, RequestSpec, TicketRef},
    principal::{Actor, Principal},
    report::EmReport,
};
use rm_service::{
    committer::Committer,
    error::Error,
    heartbeat::{HeartbeatService, ReportReply},
    request_resource::{RequestDeadlines, RequestResourceService},
    ticket_lookup::TicketLookup,
};
use rm_telemetry::metrics::calls;

use super::{
    authenticator, convert, deadline,
    edge::{ActiveCallPermit, Peer},
};
use rm_proto::v1::{
    self as proto, request_resource_response::Result as Answer, resource_manager_service_server::ResourceManagerService,
};

/// Maximum time for which a grant stays locked without a confirmation.
pub const LOCK_TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Timeouts that apply to calls.
#[derive(Debug, Clone, Copy)]
pub struct RequestTimeouts {
    /// Time for which a grant stays locked if the request states none.
    pub lock_ttl: Duration,
    /// Maximum time for which a call waits for resource locks.
    pub request_timeout: Duration,
    /// Maximum time for which a request waits in a wait queue.
    pub max_wait: Duration,
}

/// Implementation of `ResourceManagerService`.
#[derive(Debug)]
pub struct ResourceManagerRpc {
    committer: Committer,
    request_resource: RequestResourceService,
    heartbeat: HeartbeatService,
    tickets: TicketLookup,
    /// Wakes the task that ends the tickets of unregistering EMs.
    em_goes: Arc<Notify>,
    times: RequestTimeouts,
}

impl ResourceManagerRpc {
    /// Creates the implementation on the given services.
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

    /// Submits the operation that `read` parses, and returns its outcome with the counters after it, if the caller
    /// requests them.
    ///
    /// The returned future owns neither the call nor the message: a future has the size of everything that it ever
    /// owns.
    fn submit<'a, M, F>(
        &'a self,
        call: Request<M>,
        returns_counters: bool,
        read: F,
    ) -> Result<impl Future<Output = Result<OperationReply, Error>> + Send + use<'a, M, F>, Error>
    where
        F: FnOnce(M) -> Result<Operation, FieldError>,
    {
        let (headers, call, message) = split(call);
        let operation = read(message)?;
        authenticator::check(&call, |reach| match operation.user() {
            Some(user) => reach.check(Some(operation.em()), user),
            None => reach.check_em(operation.em()),
        })?;
        let deadline = deadline::of_call(&headers, self.times.request_timeout);
        let counters = returns_counters.then(|| authenticator::reach(&call).cloned()).transpose()?;
        Ok(submit(&self.committer, authenticator::of_call(&call).into(), operation, (deadline, counters)))
    }

    /// Parses a request and checks that its caller may make it.
    fn read_request(
        &self,
        call: Request<proto::RequestResourceRequest>,
    ) -> Result<(Request<()>, ParsedRequest, RequestDeadlines), Error> {
        let (headers, call, message) = split(call);
        let wait_timeout = message.wait_timeout;
        let parsed = self.parse_request(authenticator::of_call(&call), message)?;
        let user = &parsed.first()?.user;
        authenticator::check(&call, |reach| reach.check(parsed.em.as_ref(), user))?;
        let deadlines = self.deadlines(&headers, wait_timeout)?;
        Ok((call, parsed, deadlines))
    }

    fn read_named(&self, call: Request<proto::ResourceReleasedRequest>) -> Result<TicketCall, Error> {
        let (headers, call, message) = split(call);
        let deadline = deadline::of_call(&headers, self.times.request_timeout);
        let return_counters = message.return_counters;
        Ok((call, convert::request::released(message)?, (deadline, return_counters)))
    }

    fn read_report(&self, call: Request<proto::HeartbeatRequest>) -> Result<(EmReport, Instant), Error> {
        let (headers, call, message) = split(call);
        let deadline = deadline::of_call(&headers, self.times.request_timeout);
        let report = convert::request::report(message)?;
        authenticator::check(&call, |reach| reach.check_em(&report.em))?;
        Ok((report, deadline))
    }

    fn parse_request(&self, by: Principal, mut message: proto::RequestResourceRequest) -> Result<ParsedRequest, Error> {
        let priority = convert::request::priority("priority", message.priority)?;
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
            return Err(FieldError::new("resource", "requests no resources; set an amount above zero").into());
        }
        let (is_dry_run, is_repeatable) = (message.dry_run, request_id.is_some());
        let spec = RequestSpec {
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
            priority,
            may_wait: message.wait_timeout.is_some_and(|wait| wait != prost_types::Duration::default()),
        };
        let queue_names = message.queue_names;
        let specs = match queue_names.is_empty() {
            true => vec![spec.into()],
            false => {
                let resources = convert::request::in_queues(&queue_names, &spec.resource)?;
                resources.into_iter().map(|resource| RequestSpec { resource, ..spec.clone() }.into()).collect()
            }
        };
        Ok(ParsedRequest { em, specs, queue_names, is_dry_run, is_repeatable })
    }

    /// Returns the deadlines for locks and for the wait queue.
    fn deadlines(
        &self,
        headers: &MetadataMap,
        wait_timeout: Option<prost_types::Duration>,
    ) -> Result<RequestDeadlines, FieldError> {
        let wait = wait_timeout.map(|wait| convert::request::duration("wait_timeout", wait)).transpose()?;
        if wait.is_some_and(|wait| wait > self.times.max_wait) {
            let most = humantime::format_duration(self.times.max_wait);
            return Err(FieldError::new("wait_timeout", format!("must be at most {most}, the maximum of this server")));
        }
        let until = |longest| deadline::of_call(headers, longest);
        Ok(RequestDeadlines {
            locks: until(self.times.request_timeout),
            line: wait.filter(|wait| !wait.is_zero()).map(until),
        })
    }

    fn lock_ttl(&self, requested: Option<prost_types::Duration>) -> Result<Duration, FieldError> {
        let Some(requested) = requested else { return Ok(self.times.lock_ttl) };
        let ttl = convert::request::duration("lock_ttl", requested)?;
        if ttl.is_zero() || ttl > LOCK_TTL_MAX {
            return Err(FieldError::new("lock_ttl", "must be above zero and at most 24h"));
        }
        Ok(ttl)
    }
}

/// A validated request, and the parts of it that the response needs.
struct ParsedRequest {
    em: Option<EmInstance>,
    /// Content of the request: one spec per queue, or a single one.
    specs: Vec<Arc<RequestSpec>>,
    queue_names: Vec<String>,
    is_dry_run: bool,
    is_repeatable: bool,
}

impl ParsedRequest {
    fn first(&self) -> Result<&RequestSpec, Error> {
        self.specs.first().map(Arc::as_ref).ok_or_else(|| Error::defect("a request without a request"))
    }
}

/// Returns the hash of a request's content. The wait timeout, the dry run flag and the request for counters do not
/// belong to it.
fn body_hash(message: &proto::RequestResourceRequest) -> [u8; 32] {
    let body =
        proto::RequestResourceRequest { wait_timeout: None, dry_run: false, return_counters: false, ..message.clone() };
    // Maps are ordered in the generated code, so equal bodies have equal bytes.
    Sha256::digest(body.encode_to_vec()).into()
}

/// A call on a ticket, with its deadline and whether it requests the counters.
type TicketCall = (Request<()>, TicketRef, (Instant, bool));

/// Outcome of an operation, and the counters after it, if requested.
pub(super) type OperationReply = (Outcome, Option<proto::Counters>);

/// Submits an operation. Returns the counters after it, limited to the call scope, if a call scope is given.
pub(super) fn submit(
    committer: &Committer,
    by: Actor,
    operation: Operation,
    (deadline, reach): (Instant, Option<CallScope>),
) -> impl Future<Output = Result<OperationReply, Error>> + Send {
    let done = committer.submit_with_counters(by, operation, deadline.into(), reach.is_some());
    async move {
        let (outcome, counters) = done.await?;
        let within =
            |reach: &CallScope| Some(convert::answer::counters(counters.as_deref()?, reach).map_err(Error::defect));
        Ok((outcome, reach.as_ref().and_then(within).transpose()?))
    }
}

/// Returns the counters of a grant, limited to the call scope.
fn shown_counters(call: &Request<()>, grant: &Grant) -> Result<Option<Box<proto::Counters>>, Error> {
    let Some(counters) = grant.counters.as_deref() else { return Ok(None) };
    Ok(Some(Box::new(convert::answer::counters(counters, authenticator::reach(call)?).map_err(Error::defect)?)))
}

/// Splits a call into its headers, its extensions and its message. The headers are dropped after parsing, because many
/// calls wait.
fn split<M>(call: Request<M>) -> (MetadataMap, Request<()>, M) {
    let (headers, extensions, message) = call.into_parts();
    (headers, Request::from_parts(MetadataMap::new(), extensions, ()), message)
}

/// Converts the result of a dry run to a response. A caller that is bound to users gets only the head-room of its own
/// scopes.
fn dry_run(
    (em, verdict, room, chosen): (EmInstance, Verdict, DryRunResult, usize),
    queue_names: &[String],
    reach: &CallScope,
) -> Answer {
    let is_shown = |room: &HeadRoom| room.of.as_ref().is_none_or(|scope| reach.has_scope(scope));
    match verdict {
        Verdict::Fits => Answer::Available(proto::AvailableResource {
            queue_name: queue_names.get(chosen).cloned().unwrap_or_default(),
            em: Some(convert::answer::em_message(&em)),
            head_room: room.head_room.into_iter().filter(is_shown).map(convert::answer::head_room).collect(),
            advisory_violations: room.advisory_violations.iter().map(convert::answer::shortfall).collect(),
            ..Default::default()
        }),
        Verdict::Refused(short) | Verdict::Reranked(short) => {
            Answer::NotEnough(convert::answer::not_enough(&short.refusal))
        }
    }
}

/// Returns the error of an outcome that does not belong to its operation: a defect.
pub(super) fn unexpected(outcome: &Outcome) -> Error {
    Error::defect(format!("an outcome that does not belong to its operation: {outcome:?}"))
}

impl ResourceManagerRpc {
    async fn register(&self, call: Request<proto::RegisterRequest>) -> Reply<proto::RegisterResponse> {
        let read = |message| convert::request::register(message).map(Operation::Register);
        match self.submit(call, true, read)?.await? {
            (Outcome::Registered(em), counters) => {
                // The EM may be unregistered in the same commit; then there are no counters.
                let em = match counters.and_then(|counters| counters.em) {
                    Some(em) => em,
                    None => convert::answer::em_resource(&em, None).map_err(Error::defect)?,
                };
                Ok(proto::RegisterResponse { em: Some(em) })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn unregister(&self, call: Request<proto::UnregisterRequest>) -> Reply<proto::UnregisterResponse> {
        let read = |message| convert::request::unregister(message).map(Operation::Unregister);
        match self.submit(call, false, read)?.await? {
            (Outcome::Unregistered { removed_tickets, in_progress }, _) => {
                if in_progress {
                    self.em_goes.notify_one();
                }
                let removed_tickets = i64::try_from(removed_tickets).unwrap_or(i64::MAX);
                Ok(proto::UnregisterResponse { removed_tickets, in_progress })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn request_resource(
        &self,
        call: Request<proto::RequestResourceRequest>,
    ) -> Reply<proto::RequestResourceResponse> {
        let (mut call, parsed, deadlines) = self.read_request(call)?;
        let active: Option<ActiveCallPermit> = call.extensions_mut().remove();
        if deadlines.line.is_some() {
            calls::may_wait();
        }
        let ticket_id = parsed.first()?.ticket_id;
        let caps = parsed.first()?.caps.clone();
        if !caps.is_empty() && authenticator::reach(&call)?.is_all() {
            self.request_resource.count_caps(authenticator::actor(&call), caps, deadlines.locks).await?;
        }
        let ParsedRequest { em, specs, queue_names, is_dry_run, is_repeatable } = parsed;
        if is_dry_run {
            let decision = Box::pin(self.request_resource.dry_run(em, specs, deadlines.locks)).await?;
            let result = Some(dry_run(decision, &queue_names, authenticator::reach(&call)?));
            return Ok(proto::RequestResourceResponse { result });
        }
        let active = active.map(|permit| permit as Arc<_>);
        let connection = call.extensions().get::<Arc<Peer>>().map(|peer| peer.connection.clone()).unwrap_or_default();
        let answer = self.request_resource.request_any(em, specs, deadlines, (connection, active));
        let answer = match deadlines.line {
            Some(_) => authenticator::while_admitted(&call, answer).await,
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
                    // The ticket of an earlier grant records its own queue.
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
        Ok(proto::RequestResourceResponse { result: Some(answer) })
    }

    async fn resource_inited(
        &self,
        call: Request<proto::ResourceInitedRequest>,
    ) -> Reply<proto::ResourceInitedResponse> {
        let returns_counters = call.get_ref().return_counters;
        let read = |message| convert::request::inited(message).map(Operation::Inited);
        match self.submit(call, returns_counters, read)?.await? {
            (Outcome::Inited(ticket), counters) => {
                Ok(proto::ResourceInitedResponse { ticket: Some(convert::answer::ticket(&ticket)), counters })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn resource_reported(
        &self,
        call: Request<proto::ResourceReportedRequest>,
    ) -> Reply<proto::ResourceReportedResponse> {
        let returns_counters = call.get_ref().return_counters;
        let read = |message| convert::request::reported(message).map(Operation::Reported);
        match self.submit(call, returns_counters, read)?.await? {
            (Outcome::Reported(ticket), counters) => {
                Ok(proto::ResourceReportedResponse { ticket: Some(convert::answer::ticket(&ticket)), counters })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn resource_released(
        &self,
        call: Request<proto::ResourceReleasedRequest>,
    ) -> Reply<proto::ResourceReleasedResponse> {
        let (call, named, (deadline, return_counters)) = self.read_named(call)?;
        let reach = authenticator::reach(&call)?.clone();
        if let TicketRef { user: Some(user), em: Some(em), .. } = &named {
            authenticator::check(&call, |reach| reach.check(Some(em), user))?;
        }
        let ticket_id = named.ticket_id;
        let released = self.tickets.complete(named, deadline).await?;
        if reach.check(Some(&released.em), &released.user).is_err() {
            return Err(Rejection::TicketNotFound { ticket_id, ended: None }.into());
        }
        let (by, operation) = (authenticator::of_call(&call).into(), Operation::Released(released));
        match submit(&self.committer, by, operation, (deadline, return_counters.then_some(reach))).await? {
            (Outcome::Released, counters) => Ok(proto::ResourceReleasedResponse { counters }),
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn heartbeat(&self, call: Request<proto::HeartbeatRequest>) -> Reply<proto::HeartbeatResponse> {
        let (report, deadline) = self.read_report(call)?;
        let ReportReply { unknown, to_stop } = self.heartbeat.report(report, deadline).await?;
        let (busy, idle): (Vec<_>, Vec<_>) = to_stop.into_iter().partition(|stop| stop.busy);
        let [stop_tickets, stop_idle_tickets] =
            [busy, idle].map(|stops| stops.iter().map(|stop| stop.ticket_id.to_string()).collect());
        Ok(proto::HeartbeatResponse {
            stop_tickets,
            stop_idle_tickets,
            unknown_tickets: unknown.into_iter().map(convert::answer::unknown_ticket).collect(),
            report_interval: prost_types::Duration::try_from(self.heartbeat.interval()).ok(),
        })
    }
}

rpc! {
    ResourceManagerService = ResourceManagerRpc {
        register: RegisterRequest => RegisterResponse,
        unregister: UnregisterRequest => UnregisterResponse,
        request_resource: RequestResourceRequest => RequestResourceResponse,
        resource_inited: ResourceInitedRequest => ResourceInitedResponse,
        resource_reported: ResourceReportedRequest => ResourceReportedResponse,
        resource_released: ResourceReleasedRequest => ResourceReleasedResponse,
        heartbeat: HeartbeatRequest => HeartbeatResponse,
    }
}
