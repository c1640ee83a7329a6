//! The RM client: the service's calls with the types of the domain, for ECMs, LinkisManager and engines written in Rust.

use std::{collections::BTreeMap, time::Duration};

use tonic::{
    Code, Request, Status,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::{
    domain::{
        adopt::Adopt,
        audit::AuditReport,
        cap::Cap,
        drain::Drain,
        em::{Em, EmInstance},
        hold::Hold,
        limit::{Pattern, Rule},
        limit_mode::LimitMode,
        line::WaitingRequest,
        name::{FieldError, Labels, Name},
        operation::{Grant, Inited, LockKey, Register, Released, Reported},
        policy::Policy,
        refusal::Refusal,
        report::{EmStatus, Report},
        resource::Resource,
        selector::{Preference, Selector},
        ticket::Ticket,
    },
    service::{audit::Repaired, heartbeat::UnknownTicket, holds::NewHold, limits::ScopeUsage},
    transport::{
        convert::{answer, audit, cap, limit, operator, request, resource},
        proto::{
            self, admin_service_client::AdminServiceClient, limit_service_client::LimitServiceClient,
            request_resource_response::Result as Answer, resource_manager_service_client::ResourceManagerServiceClient,
            usage_service_client::UsageServiceClient,
        },
    },
};

/// The largest report of an audit: it may name a thousand scopes with long names.
const AUDIT_BYTES_MAX: usize = 64 << 20;

/// A connection to the service; clones share it.
#[derive(Clone, Debug)]
pub struct RmClient {
    manager: ResourceManagerServiceClient<Channel>,
    limits: LimitServiceClient<Channel>,
    admin: AdminServiceClient<Channel>,
    usage: UsageServiceClient<Channel>,
    timeout: Duration,
}

/// What an engine to be started will need.
#[derive(Clone, Debug)]
pub struct ResourceRequest {
    /// Where to start it; `None` leaves the choice to the service.
    pub em: Option<EmInstance>,
    /// For whom.
    pub user: Name,
    /// By which application of the user.
    pub creator: Name,
    /// The engine's type; may be empty.
    pub engine_type: String,
    /// How much.
    pub resource: Resource,
    /// Kept with the ticket; those of the selector count the same, and need not stand here.
    pub labels: Labels,
    /// Which EMs will do, and which it would rather have.
    pub selector: Selector,
    /// What it allows itself, each for other labels that some limit has counted: at most 4.
    pub caps: Vec<Cap>,
    /// How long to wait in line if there is not enough now; zero is not at all.
    pub wait_timeout: Duration,
    /// How long the grant stays locked; `None` for the server's default.
    pub lock_ttl: Option<Duration>,
    /// Makes the request repeatable: set one whenever a lost answer is to be asked for again.
    pub request_id: Option<String>,
}

impl ResourceRequest {
    /// A request with what every request needs.
    pub fn new(em: Option<EmInstance>, user: Name, creator: Name, resource: Resource) -> Self {
        Self {
            em,
            user,
            creator,
            engine_type: String::new(),
            resource,
            labels: Labels::default(),
            selector: Selector::default(),
            caps: Vec::new(),
            wait_timeout: Duration::ZERO,
            lock_ttl: None,
            request_id: None,
        }
    }
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum ResultResource {
    /// Granted.
    Available(Grant),
    /// Not granted, and why.
    NotEnough(Refusal),
}

/// The answer to a report.
#[derive(Clone, Debug, PartialEq)]
pub struct Heartbeat {
    /// Tickets that were reported, but do not live on the EM: their engines have to stop.
    pub unknown_tickets: Vec<UnknownTicket>,
    /// How often the service wants a report.
    pub interval: Duration,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The service answered with an error, or could not be reached.
    #[error("{}: {}", .0.code(), .0.message())]
    Status(Box<Status>),
    /// The service answered with something that this client does not understand: their versions differ.
    #[error("the service's answer cannot be understood")]
    Answer(#[from] FieldError),
    /// The address cannot be used.
    #[error("{0:?} is not the address of a service; give one like http://127.0.0.1:50051")]
    Address(String),
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl ClientError {
    /// The gRPC code, if the service gave one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Status(status) => Some(status.code()),
            _ => None,
        }
    }

    /// The reason in capitals, as the API documents it, e.g. `TICKET_NOT_FOUND`.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Status(status) => Some(status.get_details_error_info()?.reason),
            _ => None,
        }
    }

    /// What the service says in fields besides the reason, as the API documents it: "ended" with `TICKET_NOT_FOUND`, for one.
    pub fn fact(&self, field: &str) -> Option<String> {
        match self {
            Self::Status(status) => status.get_details_error_info()?.metadata.remove(field),
            _ => None,
        }
    }

    /// How long to wait before the call is worth repeating; `None` if repeating it does not help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status(status) => match status.get_details_retry_info() {
                Some(retry) => retry.retry_delay,
                // From the way there, not from the service: a connection that could not be made, or broke.
                None => (status.code() == Code::Unavailable).then_some(Duration::from_secs(1)),
            },
            _ => None,
        }
    }

    /// The first field that the service complained about.
    pub fn field(&self) -> Option<String> {
        match self {
            Self::Status(status) => Some(status.get_details_bad_request()?.field_violations.into_iter().next()?.field),
            _ => None,
        }
    }
}

type Result<T> = std::result::Result<T, ClientError>;

impl RmClient {
    /// Connects to the service, e.g. at `http://127.0.0.1:50051`, when the first call needs it. No call takes longer than `timeout`, and
    /// what its request is ready to wait in line.
    pub fn new(address: &str, timeout: Duration) -> Result<Self> {
        let endpoint = Endpoint::from_shared(address.to_owned()).ok();
        let endpoint = endpoint.filter(|endpoint| endpoint.uri().scheme_str() == Some("http"));
        let endpoint = endpoint.ok_or_else(|| ClientError::Address(address.to_owned()))?;
        let channel = endpoint.tcp_nodelay(true).connect_lazy();
        Ok(Self {
            manager: ResourceManagerServiceClient::new(channel.clone()),
            limits: LimitServiceClient::new(channel.clone()),
            admin: AdminServiceClient::new(channel.clone()).max_decoding_message_size(AUDIT_BYTES_MAX),
            usage: UsageServiceClient::new(channel),
            timeout,
        })
    }

    fn call<M>(&self, message: M) -> Request<M> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        request
    }

    /// Tells what an EM provides; again is a resize.
    pub async fn register(&self, registration: Register) -> Result<Em> {
        let message = proto::RegisterRequest {
            em: Some(answer::em_message(&registration.em)),
            total: Some(resource::message(registration.total.parts())),
            protected_resource: Some(resource::message(registration.protected.parts())),
            labels: registration.labels.as_map().clone(),
            reserved_labels: registration.reserved.as_map().clone(),
        };
        let answer = self.manager.clone().register(self.call(message)).await?.into_inner();
        Ok(answer::read_em(answer.em.unwrap_or_default())?)
    }

    /// Removes an EM; answers how many tickets went with it.
    pub async fn unregister(&self, em: &EmInstance) -> Result<i64> {
        self.unregister_any(em, None).await
    }

    /// The same on behalf of the registration that was answered with `epoch`: one that came after it is left alone.
    pub async fn unregister_fenced(&self, em: &EmInstance, epoch: i64) -> Result<i64> {
        self.unregister_any(em, Some(epoch)).await
    }

    async fn unregister_any(&self, em: &EmInstance, epoch: Option<i64>) -> Result<i64> {
        let message = proto::UnregisterRequest { em: Some(answer::em_message(em)), epoch: epoch.unwrap_or_default() };
        Ok(self.manager.clone().unregister(self.call(message)).await?.into_inner().removed_tickets)
    }

    /// Asks for resources.
    pub async fn request_resource(&self, request: &ResourceRequest) -> Result<ResultResource> {
        self.ask(request, false).await
    }

    /// Asks how [`RmClient::request_resource`] would be answered. A grant then has the nil ticket.
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
        let message = proto::RequestResourceRequest {
            em: request.em.as_ref().map(answer::em_message),
            user: request.user.to_string(),
            creator: request.creator.to_string(),
            engine_type: request.engine_type.clone(),
            resource: Some(resource::message(request.resource.parts())),
            labels: request.labels.as_map().clone(),
            wait_timeout: Some(wait_timeout),
            lock_ttl,
            request_id: request.request_id.clone().unwrap_or_default(),
            dry_run,
            em_application_name: selector.application_name.as_ref().map(ToString::to_string).unwrap_or_default(),
            required_labels: selector.required.as_map().clone(),
            preferred_labels: selector.preferred.iter().map(preference).collect(),
            placement: selector.placement.map_or(proto::Placement::Unspecified, request::placement_message).into(),
            caps: request.caps.iter().map(cap::message).collect(),
            ..Default::default()
        };
        let mut call = self.call(message);
        call.set_timeout(self.timeout.saturating_add(request.wait_timeout));
        let answer = self.manager.clone().request_resource(call).await?.into_inner();
        match answer.result {
            Some(Answer::Available(available)) => Ok(ResultResource::Available(answer::read_available(available)?)),
            Some(Answer::NotEnough(refusal)) => Ok(ResultResource::NotEnough(answer::read_not_enough(refusal))),
            None => Err(FieldError::new("result", "is missing").into()),
        }
    }

    /// Reports that the engine of a ticket runs.
    pub async fn resource_inited(&self, report: &Inited) -> Result<Ticket> {
        let message = proto::ResourceInitedRequest {
            ticket_id: report.ticket_id.to_string(),
            user: report.user.to_string(),
            em: Some(answer::em_message(&report.em)),
            used: report.used.as_ref().map(|used| resource::message(used.parts())),
            engine: Some(answer::engine_message(&report.engine)),
            epoch: report.epoch.unwrap_or_default(),
        };
        let answer = self.manager.clone().resource_inited(self.call(message)).await?.into_inner();
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// Reports that an engine uses other amounts than before, or which application it is.
    pub async fn resource_reported(&self, report: &Reported) -> Result<Ticket> {
        let message = proto::ResourceReportedRequest {
            ticket_id: report.ticket_id.to_string(),
            user: report.user.to_string(),
            em: Some(answer::em_message(&report.em)),
            used: Some(resource::message(report.used.parts())),
            epoch: report.epoch.unwrap_or_default(),
        };
        let answer = self.manager.clone().resource_reported(self.call(message)).await?.into_inner();
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// Gives back what a ticket holds.
    pub async fn resource_released(&self, ticket: &Released) -> Result<()> {
        let message = proto::ResourceReleasedRequest {
            ticket_id: ticket.ticket_id.to_string(),
            user: ticket.user.to_string(),
            em: Some(answer::em_message(&ticket.em)),
        };
        self.manager.clone().resource_released(self.call(message)).await?;
        Ok(())
    }

    /// Gives back what a ticket holds, by its id alone.
    pub async fn ticket_released(&self, ticket_id: Uuid) -> Result<()> {
        let message = proto::ResourceReleasedRequest { ticket_id: ticket_id.to_string(), ..Default::default() };
        self.manager.clone().resource_released(self.call(message)).await?;
        Ok(())
    }

    /// Puts an engine that runs into the books, also where there is no room. Needs an administrator.
    pub async fn adopt_ticket(&self, adopt: &Adopt) -> Result<Ticket> {
        let message = proto::AdoptTicketRequest {
            ticket_id: adopt.ticket_id.to_string(),
            em: Some(answer::em_message(&adopt.em)),
            user: adopt.user.to_string(),
            creator: adopt.creator.to_string(),
            engine_type: adopt.engine_type.clone(),
            labels: adopt.labels.as_map().clone(),
            engine: Some(answer::engine_message(&adopt.engine)),
            used: Some(resource::message(adopt.used.parts())),
        };
        let answer = self.admin.clone().adopt_ticket(self.call(message)).await?.into_inner();
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// Has nothing new granted on an EM, until [`RmClient::resume`]. Needs an operator.
    pub async fn drain(&self, em: &EmInstance, reason: &str) -> Result<Drain> {
        let message = proto::DrainRequest { em: Some(answer::em_message(em)), reason: reason.to_owned() };
        let answer = self.admin.clone().drain(self.call(message)).await?.into_inner();
        Ok(operator::read_drain(answer.drain.unwrap_or_default())?)
    }

    /// Has an EM grant again; answers whether it was drained. Needs an operator.
    pub async fn resume(&self, em: &EmInstance, reason: &str) -> Result<bool> {
        let message = proto::ResumeRequest { em: Some(answer::em_message(em)), reason: reason.to_owned() };
        Ok(self.admin.clone().resume(self.call(message)).await?.into_inner().was_drained)
    }

    /// Ends a ticket, whosever it is; answers how it ended, which may have been before. Needs an operator.
    pub async fn force_release(&self, ticket_id: Uuid, reason: &str) -> Result<String> {
        let message = proto::ForceReleaseRequest { ticket_id: ticket_id.to_string(), reason: reason.to_owned() };
        Ok(self.admin.clone().force_release(self.call(message)).await?.into_inner().ended)
    }

    /// Keeps everybody from changing anything about an EM or a user for a while. Needs an operator.
    pub async fn hold(&self, new: &NewHold) -> Result<Hold> {
        let (em, user) = named(&new.key);
        let (reason, duration) = (new.reason.to_string(), Some(duration("duration", new.duration)?));
        let message = proto::HoldRequest { em, user, duration, reason };
        let answer = self.admin.clone().hold(self.call(message)).await?.into_inner();
        Ok(operator::read_hold(answer.hold.unwrap_or_default())?)
    }

    /// Ends a hold before its time; answers whether there was one. Needs an operator.
    pub async fn release_hold(&self, key: &LockKey) -> Result<bool> {
        let (em, user) = named(key);
        let message = proto::ReleaseHoldRequest { em, user };
        Ok(self.admin.clone().release_hold(self.call(message)).await?.into_inner().was_held)
    }

    /// The holds that there are. Needs an operator.
    pub async fn holds(&self) -> Result<Vec<Hold>> {
        let answer = self.admin.clone().list_holds(self.call(proto::ListHoldsRequest {})).await?.into_inner();
        answer.holds.into_iter().map(|hold| Ok(operator::read_hold(hold)?)).collect()
    }

    /// Reports that an EM lives, how it is, and which tickets have engines there.
    pub async fn heartbeat(&self, report: &Report) -> Result<Heartbeat> {
        let message = proto::HeartbeatRequest {
            em: Some(answer::em_message(&report.em)),
            epoch: report.epoch,
            sequence: report.sequence,
            health: answer::health(report.health).into(),
            load: report.load.map(answer::load),
            ticket_ids: request::ticket_bytes(&report.tickets),
            observed: report.observed.as_ref().map(answer::observations).unwrap_or_default(),
        };
        let answer = self.manager.clone().heartbeat(self.call(message)).await?.into_inner();
        let unknown_tickets = answer.unknown_tickets.into_iter().map(answer::read_unknown_ticket);
        let unknown_tickets = unknown_tickets.collect::<std::result::Result<_, _>>()?;
        let interval = request::duration("report_interval", answer.report_interval.unwrap_or_default())?;
        Ok(Heartbeat { unknown_tickets, interval })
    }

    /// Adds a limit, or changes the one with the same pattern. Answers with scopes that hold more than they may.
    pub async fn set_limit(&self, rule: &Rule) -> Result<Vec<ScopeUsage>> {
        let message = proto::SetLimitRequest { limit: Some(limit::limit(rule)), expected_etag: None };
        let answer = self.limits.clone().set_limit(self.call(message)).await?.into_inner();
        answer.over_limit.into_iter().map(|scope| Ok(limit::read_scope_usage(scope)?)).collect()
    }

    /// Removes a limit.
    pub async fn delete_limit(&self, pattern: &Pattern) -> Result<()> {
        let rule = Rule { pattern: pattern.clone(), mode: LimitMode::Off, max: BTreeMap::new() };
        let message = proto::DeleteLimitRequest { limit: Some(limit::limit(&rule)), expected_etag: None };
        self.limits.clone().delete_limit(self.call(message)).await?;
        Ok(())
    }

    /// All limits, in the order in which they are checked.
    pub async fn limits(&self) -> Result<Vec<Rule>> {
        let mut rules = Vec::new();
        let mut page_token = String::new();
        loop {
            let message = proto::ListLimitsRequest { page_size: 1000, page_token };
            let page = self.limits.clone().list_limits(self.call(message)).await?.into_inner();
            for message in &page.limits {
                rules.push(limit::rule("limit", Some(message))?);
            }
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(rules);
            }
        }
    }

    /// Decides which limits are for the tickets on a kind of EM.
    pub async fn set_policy(&self, em_kind: &Name, policy: &Policy) -> Result<()> {
        let message = proto::SetPolicyRequest { policy: Some(limit::policy_message(em_kind, policy)) };
        self.limits.clone().set_policy(self.call(message)).await?;
        Ok(())
    }

    /// The policies of all kinds of EMs, by application name.
    pub async fn policies(&self) -> Result<BTreeMap<Name, Policy>> {
        let answer = self.limits.clone().list_policies(self.call(proto::ListPoliciesRequest {})).await?.into_inner();
        answer.policies.iter().map(|message| Ok(limit::policy("policy", Some(message))?)).collect()
    }

    /// What all scopes hold that limits are for.
    pub async fn scopes(&self) -> Result<Vec<ScopeUsage>> {
        let mut scopes = Vec::new();
        let mut page_token = String::new();
        loop {
            let message = proto::ListScopesRequest { page_size: 1000, page_token };
            let page = self.usage.clone().list_scopes(self.call(message)).await?.into_inner();
            for scope in page.scopes {
                scopes.push(limit::read_scope_usage(scope)?);
            }
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(scopes);
            }
        }
    }

    /// All requests that wait in line, the first in line first.
    pub async fn waiting(&self) -> Result<Vec<WaitingRequest>> {
        let mut waiting = Vec::new();
        let mut page_token = String::new();
        loop {
            let message = proto::ListWaitingRequest { page_size: 1000, page_token };
            let page = self.usage.clone().list_waiting(self.call(message)).await?.into_inner();
            for request in page.waiting {
                waiting.push(answer::read_waiting(request)?);
            }
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(waiting);
            }
        }
    }

    /// What the instance that answers is, and what it lets its callers do.
    pub async fn server_info(&self) -> Result<proto::GetServerInfoResponse> {
        let call = self.call(proto::GetServerInfoRequest {});
        Ok(self.usage.clone().get_server_info(call).await?.into_inner())
    }

    /// One EM.
    pub async fn em(&self, em: &EmInstance) -> Result<Em> {
        let message = proto::GetEmRequest { em: Some(answer::em_message(em)) };
        let answer = self.usage.clone().get_em(self.call(message)).await?.into_inner();
        Ok(answer::read_em(answer.em.unwrap_or_default())?)
    }

    /// What is known of an EM by its reports; `None` if it never sent one.
    pub async fn em_status(&self, em: &EmInstance) -> Result<Option<EmStatus>> {
        let message = proto::GetEmRequest { em: Some(answer::em_message(em)) };
        let answer = self.usage.clone().get_em(self.call(message)).await?.into_inner();
        Ok(answer::read_em_status(&answer.em.unwrap_or_default())?)
    }

    /// All EMs.
    pub async fn ems(&self) -> Result<Vec<Em>> {
        let mut ems = Vec::new();
        let mut page_token = String::new();
        loop {
            let message = proto::ListEmsRequest { page_size: 1000, page_token };
            let page = self.usage.clone().list_ems(self.call(message)).await?.into_inner();
            for em in page.ems {
                ems.push(answer::read_em(em)?);
            }
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(ems);
            }
        }
    }

    /// One live ticket.
    pub async fn ticket(&self, ticket_id: Uuid) -> Result<Ticket> {
        let message = proto::GetTicketRequest { ticket_id: ticket_id.to_string(), engine: None };
        let answer = self.usage.clone().get_ticket(self.call(message)).await?.into_inner();
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// All live tickets: of one EM, or of all.
    pub async fn tickets(&self, em: Option<&EmInstance>) -> Result<Vec<Ticket>> {
        let mut tickets = Vec::new();
        let mut page_token = String::new();
        loop {
            let em = em.map(answer::em_message);
            let message = proto::ListTicketsRequest { em, page_size: 1000, page_token, ..Default::default() };
            let page = self.usage.clone().list_tickets(self.call(message)).await?.into_inner();
            for ticket in page.tickets {
                tickets.push(answer::read_ticket(ticket)?);
            }
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(tickets);
            }
        }
    }

    /// Compares every counter with what the tickets say, at one moment.
    pub async fn audit(&self) -> Result<AuditReport> {
        let answer = self.admin.clone().audit(self.call(proto::AuditRequest {})).await?.into_inner();
        Ok(audit::read_report(answer)?)
    }

    /// Makes every counter what the tickets say.
    pub async fn repair(&self) -> Result<Repaired> {
        let answer = self.admin.clone().repair(self.call(proto::RepairRequest {})).await?.into_inner();
        Ok(audit::read_repaired(answer)?)
    }
}

/// What is held, as it is named.
fn named(key: &LockKey) -> (Option<proto::EmInstance>, String) {
    match key {
        LockKey::Em(em) => (Some(answer::em_message(em)), String::new()),
        LockKey::User(user) => (None, user.to_string()),
    }
}

fn duration(field: &str, duration: Duration) -> Result<prost_types::Duration> {
    Ok(duration.try_into().map_err(|_| FieldError::new(field, "is too long"))?)
}
