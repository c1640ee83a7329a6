//! Calls of EMs, LinkisManager and engines: `ResourceManagerService`.
//!
//! Each method makes one call and converts its reply. A request that may be attempted again and has no request id
//! gets a random one, so that all attempts create one ticket. Callers: programs that use the client.

use std::time::Duration;

use uuid::Uuid;

use rm_model::{
    cap::Cap,
    em::{Em, EmInstance},
    name::{FieldError, Labels, Name},
    operation::{ConfirmTicket, Grant, RegisterEm, ReleaseTicket, UpdateTicket},
    refusal::Refusal,
    report::{EmReport, UnknownTicket},
    resource::Resource,
    selector::{EmSelector, Preference},
    ticket::Ticket,
};
use rm_proto::{
    convert::{answer, cap, request, resource},
    v1 as proto,
    v1::request_resource_response::Result as Answer,
};

use super::{Result, RmClient, call::RetryBudget, calls};

/// A request for the resources of an engine.
#[derive(Clone, Debug)]
pub struct ResourceRequest {
    /// EM of the engine; `None` for placement by the service.
    pub em: Option<EmInstance>,
    /// User of the engine.
    pub user: Name,
    /// Application of the user.
    pub creator: Name,
    /// Engine type; may be empty.
    pub engine_type: String,
    /// Requested amounts.
    pub resource: Resource,
    /// Alternatives to the queue or namespace of the resource, the best first; at most 8.
    pub queue_names: Vec<String>,
    /// Labels of the ticket. The labels of the selector count as well and need not be repeated.
    pub labels: Labels,
    /// Required and preferred EMs.
    pub selector: EmSelector,
    /// Caps of the request, each for another label set that a limit counts; at most 4.
    pub caps: Vec<Cap>,
    /// Maximum time to wait in the queue; zero to be refused immediately.
    pub wait_timeout: Duration,
    /// Time until the grant expires without a confirmation; `None` for the server's default.
    pub lock_ttl: Option<Duration>,
    /// Request id, which makes the request repeatable after a lost reply.
    pub request_id: Option<String>,
    /// Head start in the wait queues, in seconds; 0 for the default of the labels.
    pub priority: i16,
}

impl ResourceRequest {
    /// Creates a request from the required fields.
    pub fn new(em: Option<EmInstance>, user: Name, creator: Name, resource: Resource) -> Self {
        Self {
            em,
            user,
            creator,
            engine_type: String::new(),
            resource,
            queue_names: Vec::new(),
            labels: Labels::default(),
            selector: EmSelector::default(),
            caps: Vec::new(),
            wait_timeout: Duration::ZERO,
            lock_ttl: None,
            request_id: None,
            priority: 0,
        }
    }
}

/// Reply to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum ResultResource {
    /// Granted.
    Available(Grant),
    /// Refused, with the reason.
    NotEnough(Refusal),
}

/// Reply to a report.
#[derive(Clone, Debug, PartialEq)]
pub struct HeartbeatReply {
    /// Reported tickets that are not live on the EM; their engines must stop.
    pub unknown_tickets: Vec<UnknownTicket>,
    /// Reported tickets of idle engines that are to end because requests wait, if they still run no task.
    pub stop_idle_tickets: Vec<Uuid>,
    /// Reported tickets that are to end because entitled requests wait, also if their engines run tasks.
    pub stop_tickets: Vec<Uuid>,
    /// Interval at which the service expects reports.
    pub interval: Duration,
}

impl RmClient {
    /// Registers the capacity of an EM; a repetition with other amounts resizes it.
    pub async fn register(&self, registration: RegisterEm) -> Result<Em> {
        let message = proto::RegisterRequest {
            em: Some(answer::em_message(&registration.em)),
            total: Some(resource::message(registration.total.parts())),
            protected_resource: Some(resource::message(registration.protected.parts())),
            labels: registration.labels.as_map().clone(),
            reserved_labels: registration.reserved.as_map().clone(),
        };
        let answer = self.make(&calls::REGISTER, &message).await?;
        Ok(answer::read_em(answer.em.unwrap_or_default())?)
    }

    /// Unregisters an EM; returns the number of tickets that ended.
    pub async fn unregister(&self, em: &EmInstance) -> Result<i64> {
        self.unregister_any(em, None).await
    }

    /// As [`RmClient::unregister`], only for the registration with `epoch`. A later registration is not removed.
    pub async fn unregister_fenced(&self, em: &EmInstance, epoch: i64) -> Result<i64> {
        self.unregister_any(em, Some(epoch)).await
    }

    async fn unregister_any(&self, em: &EmInstance, epoch: Option<i64>) -> Result<i64> {
        let message = proto::UnregisterRequest { em: Some(answer::em_message(em)), epoch: epoch.unwrap_or_default() };
        Ok(self.make(&calls::UNREGISTER, &message).await?.removed_tickets)
    }

    /// Requests resources. If attempts can be repeated, a request without an id gets one, so that it is granted once. A
    /// grant whose reply is lost stays locked until it expires.
    pub async fn request_resource(&self, request: &ResourceRequest) -> Result<ResultResource> {
        self.ask(request, false).await
    }

    /// Returns the result that [`RmClient::request_resource`] would have. A grant has the nil ticket id.
    pub async fn dry_run(&self, request: &ResourceRequest) -> Result<ResultResource> {
        self.ask(request, true).await
    }

    async fn ask(&self, request: &ResourceRequest, dry_run: bool) -> Result<ResultResource> {
        let lock_ttl = request.lock_ttl.map(|ttl| duration("lock_ttl", ttl)).transpose()?;
        let wait_timeout = duration("wait_timeout", request.wait_timeout)?;
        let selector = &request.selector;
        let preference = |preference: &Preference| proto::PreferredLabel {
            key: preference.key.clone(),
            value: preference.value.clone(),
            weight: i32::try_from(preference.weight).unwrap_or(i32::MAX),
        };
        // A request id costs the service a row, so single attempts and dry runs have none.
        let own_id = || (self.retry_budget.attempts > 1 && !dry_run).then(|| Uuid::new_v4().to_string());
        let message = proto::RequestResourceRequest {
            em: request.em.as_ref().map(answer::em_message),
            user: request.user.to_string(),
            creator: request.creator.to_string(),
            engine_type: request.engine_type.clone(),
            resource: Some(resource::message(request.resource.parts())),
            labels: request.labels.as_map().clone(),
            wait_timeout: Some(wait_timeout),
            priority: request.priority.into(),
            lock_ttl,
            request_id: request.request_id.clone().or_else(own_id).unwrap_or_default(),
            dry_run,
            em_application_name: selector.application_name.as_ref().map(ToString::to_string).unwrap_or_default(),
            required_labels: selector.required.as_map().clone(),
            preferred_labels: selector.preferred.iter().map(preference).collect(),
            placement: selector.placement.map_or(proto::Placement::Unspecified, proto::Placement::from).into(),
            caps: request.caps.iter().map(cap::message).collect(),
            queue_names: request.queue_names.clone(),
            ..Default::default()
        };
        let timeout = self.retry_budget.timeout.saturating_add(request.wait_timeout);
        let answer =
            calls::REQUEST_RESOURCE.make(&self.pool, &message, RetryBudget { timeout, ..self.retry_budget }).await?;
        match answer.result {
            Some(Answer::Available(available)) => Ok(ResultResource::Available(answer::read_available(available)?)),
            Some(Answer::NotEnough(refusal)) => Ok(ResultResource::NotEnough(answer::read_not_enough(refusal))),
            None => Err(FieldError::new("result", "is missing").into()),
        }
    }

    /// Confirms the engine of a ticket.
    pub async fn resource_inited(&self, report: &ConfirmTicket) -> Result<Ticket> {
        let message = proto::ResourceInitedRequest {
            ticket_id: report.ticket_id.to_string(),
            user: report.user.to_string(),
            em: Some(answer::em_message(&report.em)),
            used: report.used.as_ref().map(|used| resource::message(used.parts())),
            engine: Some(answer::engine_message(&report.engine)),
            epoch: report.epoch.unwrap_or_default(),
            return_counters: false,
        };
        let answer = self.make(&calls::RESOURCE_INITED, &message).await?;
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// Reports other amounts or the application id of a running engine.
    pub async fn resource_reported(&self, report: &UpdateTicket) -> Result<Ticket> {
        let message = proto::ResourceReportedRequest {
            ticket_id: report.ticket_id.to_string(),
            user: report.user.to_string(),
            em: Some(answer::em_message(&report.em)),
            used: Some(resource::message(report.used.parts())),
            epoch: report.epoch.unwrap_or_default(),
            return_counters: false,
        };
        let answer = self.make(&calls::RESOURCE_REPORTED, &message).await?;
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// Releases a ticket.
    pub async fn resource_released(&self, ticket: &ReleaseTicket) -> Result<()> {
        let message = proto::ResourceReleasedRequest {
            ticket_id: ticket.ticket_id.to_string(),
            user: ticket.user.to_string(),
            em: Some(answer::em_message(&ticket.em)),
            return_counters: false,
        };
        self.make(&calls::RESOURCE_RELEASED, &message).await?;
        Ok(())
    }

    /// Releases a ticket by its id alone.
    pub async fn ticket_released(&self, ticket_id: Uuid) -> Result<()> {
        let message = proto::ResourceReleasedRequest { ticket_id: ticket_id.to_string(), ..Default::default() };
        self.make(&calls::RESOURCE_RELEASED, &message).await?;
        Ok(())
    }

    /// Sends a heartbeat with the health of an EM and its running tickets.
    pub async fn heartbeat(&self, report: &EmReport) -> Result<HeartbeatReply> {
        let message = proto::HeartbeatRequest {
            em: Some(answer::em_message(&report.em)),
            epoch: report.epoch,
            sequence: report.sequence,
            health: proto::Health::from(report.health).into(),
            load: report.load.map(answer::load),
            ticket_ids: request::ticket_bytes(&report.tickets),
            observed: report.observed.as_ref().map(answer::observations).unwrap_or_default(),
            idle: request::marks(&report.tickets, &report.idle),
        };
        let answer = self.make(&calls::HEARTBEAT, &message).await?;
        let unknown_tickets = answer.unknown_tickets.into_iter().map(answer::read_unknown_ticket);
        let unknown_tickets = unknown_tickets.collect::<std::result::Result<_, _>>()?;
        let interval = request::duration("report_interval", answer.report_interval.unwrap_or_default())?;
        let ids = |field, ids: &[String]| ids.iter().map(|id| request::ticket_id(field, id)).collect();
        let stop_idle_tickets: std::result::Result<_, _> = ids("stop_idle_tickets", &answer.stop_idle_tickets);
        let stop_tickets: std::result::Result<_, _> = ids("stop_tickets", &answer.stop_tickets);
        Ok(HeartbeatReply {
            unknown_tickets,
            interval,
            stop_idle_tickets: stop_idle_tickets?,
            stop_tickets: stop_tickets?,
        })
    }
}

fn duration(field: &str, duration: Duration) -> Result<prost_types::Duration> {
    Ok(duration.try_into().map_err(|_| FieldError::new(field, "is too long"))?)
}
