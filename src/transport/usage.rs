//! `UsageService`: who holds what.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    domain::{
        em::{Em, EmInstance},
        line::QueuePosition,
        name::{FieldError, Name},
        report::EmStatus,
        ticket::Ticket,
    },
    error::Error,
    service::{limits::LimitService, usage},
    store::user_resource::Filter,
};

use super::{
    convert,
    proto::{self, usage_service_server::UsageService},
};

/// How many entries a page has if the caller does not say.
const PAGE_SIZE: i32 = 100;

/// How many entries a page may have.
const PAGE_SIZE_MAX: i32 = 1000;

/// How many one call may get by their keys: as many as a page may have.
const GET_MAX: usize = 1000;

/// Answers operators' questions.
#[derive(Debug)]
pub struct Usage {
    usage: usage::Usage,
    limits: LimitService,
}

impl Usage {
    /// On top of the services.
    pub fn new(usage: usage::Usage, limits: LimitService) -> Self {
        Self { usage, limits }
    }
}

pub(super) fn page_size(asked: i32) -> Result<i64, FieldError> {
    match asked {
        0 => Ok(PAGE_SIZE.into()),
        1..=PAGE_SIZE_MAX => Ok(asked.into()),
        _ => Err(FieldError::new("page_size", format!("must be between 1 and {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE}"))),
    }
}

/// Checks that no more are named in `field` than one call may get.
fn check_count(field: &str, named: usize) -> Result<(), FieldError> {
    match named > GET_MAX {
        true => Err(FieldError::new(
            field,
            format!("names {named}; at most {GET_MAX} are allowed: name the rest in another call"),
        )),
        false => Ok(()),
    }
}

pub(super) fn bad_token() -> FieldError {
    FieldError::new("page_token", "is none that this service gave; leave it empty for the first page")
}

/// Tokens of EM pages: the last key, as JSON, because names may hold any separator.
fn em_token(em: &EmInstance) -> String {
    serde_json::json!([em.application_name.as_str(), em.instance.as_str()]).to_string()
}

fn parse_em_token(token: &str) -> Result<Option<EmInstance>, FieldError> {
    if token.is_empty() {
        return Ok(None);
    }
    let (application_name, instance): (String, String) = serde_json::from_str(token).map_err(|_| bad_token())?;
    EmInstance::parse("page_token", &application_name, &instance).map(Some).map_err(|_| bad_token())
}

/// Tokens of scope pages: the last hash, in hexadecimal digits.
fn scope_token(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse_hex(token: &str) -> Option<Vec<u8>> {
    let is_hex = token.bytes().all(|byte| byte.is_ascii_hexdigit());
    let byte = |at| u8::from_str_radix(token.get(at..at + 2)?, 16).ok();
    if is_hex { (0..token.len()).step_by(2).map(byte).collect() } else { None }
}

fn parse_position_token(token: &str) -> Result<Option<QueuePosition>, FieldError> {
    if token.is_empty() {
        return Ok(None);
    }
    let position = parse_hex(token).and_then(|bytes| QueuePosition::from_bytes(&bytes));
    position.map(Some).ok_or_else(bad_token)
}

fn filter(message: &proto::ListTicketsRequest) -> Result<Filter, FieldError> {
    Ok(Filter {
        em: message.em.clone().map(|em| convert::request::em_instance("em", Some(em))).transpose()?,
        user: match message.user.as_str() {
            "" => None,
            user => Some(Name::parse("user", user)?),
        },
        locked: match message.state.as_str() {
            "" => None,
            "locked" => Some(true),
            "used" => Some(false),
            _ => return Err(FieldError::new("state", "must be \"locked\", \"used\" or empty")),
        },
        engine: message
            .engine
            .clone()
            .map(|engine| convert::request::engine_instance("engine", Some(engine)))
            .transpose()?,
    })
}

#[tonic::async_trait]
impl UsageService for Usage {
    async fn get_em(&self, call: Request<proto::GetEmRequest>) -> Result<Response<proto::GetEmResponse>, Status> {
        let em = convert::request::em_instance("em", call.into_inner().em).map_err(Error::from)?;
        let (em, status) = self.usage.em(&em).await?;
        let em = Some(convert::answer::em_resource(&em, status.as_ref())?);
        Ok(Response::new(proto::GetEmResponse { em }))
    }

    async fn batch_get_ems(
        &self,
        call: Request<proto::BatchGetEmsRequest>,
    ) -> Result<Response<proto::BatchGetEmsResponse>, Status> {
        let named = call.into_inner().ems;
        check_count("ems", named.len()).map_err(Error::from)?;
        let instance = |(n, em)| convert::request::em_instance(&format!("ems[{n}]"), Some(em));
        let named = named.into_iter().enumerate().map(instance).collect::<Result<Vec<_>, _>>().map_err(Error::from)?;
        let found = self.usage.ems_by_name(&named).await?;
        let mut answer = proto::BatchGetEmsResponse::default();
        for instance in &named {
            match found.get(instance) {
                Some((em, status)) => answer.ems.push(convert::answer::em_resource(em, status.as_ref())?),
                None => answer.missing.push(convert::answer::em_message(instance)),
            }
        }
        Ok(Response::new(answer))
    }

    async fn list_ems(&self, call: Request<proto::ListEmsRequest>) -> Result<Response<proto::ListEmsResponse>, Status> {
        let limit = page_size(call.get_ref().page_size).map_err(Error::from)?;
        let after = parse_em_token(&call.get_ref().page_token).map_err(Error::from)?;
        let mut ems = self.usage.ems(after.as_ref(), limit + 1).await?;
        let more = cut_page(&mut ems, limit);
        let next_page_token = ems.last().filter(|_| more).map(|(em, _)| em_token(&em.instance)).unwrap_or_default();
        let message = |(em, status): &(Em, Option<EmStatus>)| convert::answer::em_resource(em, status.as_ref());
        let ems = ems.iter().map(message).collect::<Result<_, _>>()?;
        Ok(Response::new(proto::ListEmsResponse { ems, next_page_token }))
    }

    async fn get_ticket(
        &self,
        call: Request<proto::GetTicketRequest>,
    ) -> Result<Response<proto::GetTicketResponse>, Status> {
        let proto::GetTicketRequest { ticket_id, engine } = call.into_inner();
        let ticket = match (ticket_id.as_str(), engine) {
            ("", None) => return Err(Error::from(FieldError::new("ticket_id", "is required, or an engine")).into()),
            ("", engine) => {
                let engine = convert::request::engine_instance("engine", engine).map_err(Error::from)?;
                self.usage.ticket_of_engine(engine).await?
            }
            (id, None) => {
                let ticket_id = convert::request::ticket_id("ticket_id", id).map_err(Error::from)?;
                self.usage.ticket(ticket_id).await?
            }
            (_, Some(_)) => {
                return Err(Error::from(FieldError::new("engine", "must not be set besides ticket_id")).into());
            }
        };
        let observed = self.usage.observed(&ticket).await?;
        let ticket = convert::answer::observed_ticket(&ticket, observed.as_ref());
        Ok(Response::new(proto::GetTicketResponse { ticket: Some(ticket) }))
    }

    async fn batch_get_tickets(
        &self,
        call: Request<proto::BatchGetTicketsRequest>,
    ) -> Result<Response<proto::BatchGetTicketsResponse>, Status> {
        let named = &call.get_ref().ticket_ids;
        check_count("ticket_ids", named.len()).map_err(Error::from)?;
        let ticket_id = |(n, id): (usize, &String)| convert::request::ticket_id(&format!("ticket_ids[{n}]"), id);
        let named = named.iter().enumerate().map(ticket_id).collect::<Result<Vec<_>, _>>().map_err(Error::from)?;
        let (found, observed) = self.usage.tickets_by_id(&named).await?;
        let mut answer = proto::BatchGetTicketsResponse::default();
        for ticket_id in &named {
            match found.get(ticket_id) {
                Some(ticket) => {
                    answer.tickets.push(convert::answer::observed_ticket(ticket, observed.get(ticket_id)));
                }
                None => answer.missing.push(ticket_id.to_string()),
            }
        }
        Ok(Response::new(answer))
    }

    async fn list_tickets(
        &self,
        call: Request<proto::ListTicketsRequest>,
    ) -> Result<Response<proto::ListTicketsResponse>, Status> {
        let message = call.get_ref();
        let limit = page_size(message.page_size).map_err(Error::from)?;
        let after = match message.page_token.as_str() {
            "" => Uuid::nil(),
            token => Uuid::parse_str(token).map_err(|_| Error::from(bad_token()))?,
        };
        let filter = filter(message).map_err(Error::from)?;
        let (page, observed) = self.usage.tickets(&filter, after, limit).await?;
        let next_page_token = page.next.map(|ticket_id| ticket_id.to_string()).unwrap_or_default();
        let with_observed = |ticket: &Ticket| convert::answer::observed_ticket(ticket, observed.get(&ticket.id));
        let tickets = page.tickets.iter().map(with_observed).collect();
        Ok(Response::new(proto::ListTicketsResponse { tickets, next_page_token }))
    }

    async fn list_actions(
        &self,
        call: Request<proto::ListActionsRequest>,
    ) -> Result<Response<proto::ListActionsResponse>, Status> {
        let message = call.get_ref();
        let limit = page_size(message.page_size).map_err(Error::from)?;
        let after = match message.page_token.as_str() {
            "" => 0,
            token => token.parse().map_err(|_| Error::from(bad_token()))?,
        };
        let ticket_id = match message.ticket_id.as_str() {
            "" => None,
            id => Some(convert::request::ticket_id("ticket_id", id).map_err(Error::from)?),
        };
        let mut actions = self.usage.actions(ticket_id, after, limit + 1).await?;
        let more = cut_page(&mut actions, limit);
        let next_page_token = actions.last().filter(|_| more).map(|last| last.number.to_string()).unwrap_or_default();
        let actions = actions.iter().map(convert::answer::action).collect();
        Ok(Response::new(proto::ListActionsResponse { actions, next_page_token }))
    }

    async fn list_waiting(
        &self,
        call: Request<proto::ListWaitingRequest>,
    ) -> Result<Response<proto::ListWaitingResponse>, Status> {
        let limit = page_size(call.get_ref().page_size).map_err(Error::from)?;
        let after = parse_position_token(&call.get_ref().page_token).map_err(Error::from)?;
        let mut waiting = self.usage.waiting(after, limit + 1).await?;
        let more = cut_page(&mut waiting, limit);
        let next_page_token =
            waiting.last().filter(|_| more).map(|(position, _)| position.to_string()).unwrap_or_default();
        let waiting = waiting.iter().map(|(_, waiting)| convert::answer::waiting(waiting)).collect();
        Ok(Response::new(proto::ListWaitingResponse { waiting, next_page_token }))
    }

    async fn list_scopes(
        &self,
        call: Request<proto::ListScopesRequest>,
    ) -> Result<Response<proto::ListScopesResponse>, Status> {
        let limit = page_size(call.get_ref().page_size).map_err(Error::from)?;
        let after = parse_hex(&call.get_ref().page_token).ok_or_else(|| Error::from(bad_token()))?;
        let mut scopes = self.limits.scopes(&after, limit + 1).await?;
        let more = cut_page(&mut scopes, limit);
        let next_page_token = scopes.last().filter(|_| more).map(|(hash, _)| scope_token(hash)).unwrap_or_default();
        let scopes = scopes.iter().map(|(_, scope)| convert::limit::scope_usage(scope)).collect();
        Ok(Response::new(proto::ListScopesResponse { scopes, next_page_token }))
    }
}

/// Cuts what was read to a page; true if there is more behind it.
fn cut_page<T>(entries: &mut Vec<T>, limit: i64) -> bool {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let more = entries.len() > limit;
    entries.truncate(limit);
    more
}
