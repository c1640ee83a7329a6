//! `UsageService`: reads of EMs, tickets, scopes, wait queues, history and sums.
//!
//! Each method parses its filters, reads through one service and converts a page of results. A caller that is bound to
//! users gets only the tickets, scopes, waiting requests and history of these users. The module changes nothing.
//! Caller: the gRPC routes.
//!
//! - `ems`: lists of EMs; `filters`: filters of lists; `accounting`: refusals, usage and users in sums;
//! - `follow`: stream of the history; `overview`: cluster totals and tasks.

use tonic::Request;
use uuid::Uuid;

use crate::rpc::{Reply, rpc};
use rm_model::{
    access::CallScope, limit::ScopeUsage, name::FieldError, operation::Rejection, principal::Principal, ticket::Ticket,
    wait_queue::QueuePosition,
};
use rm_service::{
    background::fullest::FullestScopes,
    error::Error,
    follow::FollowService,
    limits::{LimitService, ScopeFilter},
    overview::OverviewService,
    usage,
};

use super::{authenticator, convert, server_info::ServerInfo};
use rm_proto::page::{PageRequest, bad_token, hex, parse_hex};
use rm_proto::v1::{self as proto, usage_service_server::UsageService};

mod accounting;
mod ems;
mod filters;
mod follow;
mod overview;
mod reclaims;

use ems::em_message;

/// Maximum number of keys in one batch call, equal to the maximum page size.
pub const GET_MAX: usize = 1000;

/// Implementation of `UsageService`.
#[derive(Debug)]
pub struct UsageRpc {
    usage: usage::UsageQueries,
    limits: LimitService,
    overviews: OverviewService,
    fullest: FullestScopes,
    follow: FollowService,
    info: proto::GetServerInfoResponse,
}

impl UsageRpc {
    /// Creates the implementation on the given services. `fullest` has the list of the fullest scopes.
    pub fn new(
        usage: usage::UsageQueries,
        limits: LimitService,
        overviews: OverviewService,
        fullest: FullestScopes,
        follow: FollowService,
        info: ServerInfo,
    ) -> Self {
        Self { usage, limits, overviews, fullest, follow, info: info.message() }
    }

    /// Returns the fullest scopes that match, or the scopes above their limits.
    async fn fullest(
        &self,
        message: &proto::ListScopesRequest,
        filter: &ScopeFilter,
        limit: usize,
    ) -> Result<proto::ListScopesResponse, Error> {
        let is_shown = |scope: &&ScopeUsage| !message.over_limit_only || scope.is_over();
        let mut answer = proto::ListScopesResponse::default();
        let scopes: Vec<_> = if filter.users.is_some() {
            let (scopes, is_partial) = self.limits.fullest_of_users(filter).await?;
            answer.partial = is_partial;
            scopes.iter().filter(is_shown).map(convert::limit::scope_usage).collect()
        } else if let Some(list) = self.fullest.list() {
            answer.partial = !list.is_whole;
            answer.renew_time = Some(convert::answer::timestamp(list.at));
            let matching = list.fullest.iter().filter(|usage| filter.matches(&usage.scope)).filter(is_shown);
            matching.map(convert::limit::scope_usage).collect()
        } else {
            answer.partial = true;
            vec![]
        };
        answer.partial |= scopes.len() > limit;
        answer.scopes = scopes.into_iter().take(limit).collect();
        Ok(answer)
    }
}

/// Checks that `field` names at most [`GET_MAX`] objects.
fn check_count(field: &str, named: usize) -> Result<(), FieldError> {
    match named > GET_MAX {
        true => Err(FieldError::new(
            field,
            format!("names {named}; at most {GET_MAX} are allowed; name the rest in another call"),
        )),
        false => Ok(()),
    }
}

/// Hides a ticket outside the call scope. A live or ended ticket of another user is reported as not found.
fn of_reach(found: Result<Ticket, Error>, ticket_id: Uuid, reach: &CallScope) -> Result<Ticket, Error> {
    let hidden = || Err(Rejection::TicketNotFound { ticket_id, ended: None }.into());
    match &found {
        Ok(ticket) if !reach.has_user(&ticket.user) => hidden(),
        Err(Error::Rejected(rejection)) => match &**rejection {
            Rejection::TicketNotFound { ended: Some(ended), .. } if !reach.has_user(&ended.user) => hidden(),
            _ => found,
        },
        _ => found,
    }
}

impl UsageRpc {
    async fn list_refusals(&self, call: Request<proto::ListRefusalsRequest>) -> Reply<proto::ListRefusalsResponse> {
        accounting::list_refusals(&self.usage, &call).await
    }

    async fn get_usage(&self, call: Request<proto::GetUsageRequest>) -> Reply<proto::GetUsageResponse> {
        accounting::get_usage(&self.usage, &call).await
    }

    async fn list_users(&self, call: Request<proto::ListUsersRequest>) -> Reply<proto::ListUsersResponse> {
        accounting::list_users(&self.usage, &call).await
    }

    async fn get_server_info(&self, call: Request<proto::GetServerInfoRequest>) -> Reply<proto::GetServerInfoResponse> {
        let authentication = authenticator::of_call(&call) != Principal::Anonymous;
        Ok(proto::GetServerInfoResponse { authentication, ..self.info.clone() })
    }

    async fn get_em(&self, call: Request<proto::GetEmRequest>) -> Reply<proto::GetEmResponse> {
        let em = convert::request::em_instance("em", call.get_ref().em.clone())?;
        authenticator::check(&call, |reach| reach.check_em(&em))?;
        let (em, status) = self.usage.em(&em).await?;
        Ok(proto::GetEmResponse { em: Some(em_message(&em, status.as_ref())?) })
    }

    async fn batch_get_ems(&self, call: Request<proto::BatchGetEmsRequest>) -> Reply<proto::BatchGetEmsResponse> {
        let named = &call.get_ref().ems;
        check_count("ems", named.len())?;
        let instance = |(n, em): (usize, &proto::EmInstance)| {
            convert::request::em_instance(&format!("ems[{n}]"), Some(em.clone()))
        };
        let named = named.iter().enumerate().map(instance).collect::<Result<Vec<_>, _>>()?;
        authenticator::check(&call, |reach| named.iter().try_for_each(|em| reach.check_em(em)))?;
        let found = self.usage.ems_by_name(&named).await?;
        let mut answer = proto::BatchGetEmsResponse::default();
        for instance in &named {
            match found.get(instance) {
                Some((em, status)) => answer.ems.push(em_message(em, status.as_ref())?),
                None => answer.missing.push(convert::answer::em_message(instance)),
            }
        }
        Ok(answer)
    }

    async fn list_ems(&self, call: Request<proto::ListEmsRequest>) -> Reply<proto::ListEmsResponse> {
        ems::list_ems(&self.usage, &self.overviews, &call).await
    }

    async fn get_ticket(&self, call: Request<proto::GetTicketRequest>) -> Reply<proto::GetTicketResponse> {
        let reach = authenticator::reach(&call)?;
        let proto::GetTicketRequest { ticket_id, engine } = call.get_ref().clone();
        let ticket = match (ticket_id.as_str(), engine) {
            ("", None) => return Err(FieldError::new("ticket_id", "is required, or an engine").into()),
            ("", engine) => {
                let engine = convert::request::engine_instance("engine", engine)?;
                self.usage.ticket_of_engine(engine, reach.users()).await?
            }
            (id, None) => {
                let ticket_id = convert::request::ticket_id("ticket_id", id)?;
                of_reach(self.usage.ticket(ticket_id).await, ticket_id, reach)?
            }
            (_, Some(_)) => return Err(FieldError::new("engine", "must not be set besides ticket_id").into()),
        };
        let observed = self.usage.observed(&ticket).await?;
        let ticket = convert::answer::observed_ticket(&ticket, observed.as_ref());
        Ok(proto::GetTicketResponse { ticket: Some(ticket) })
    }

    async fn batch_get_tickets(
        &self,
        call: Request<proto::BatchGetTicketsRequest>,
    ) -> Reply<proto::BatchGetTicketsResponse> {
        let (named, reach) = (&call.get_ref().ticket_ids, authenticator::reach(&call)?);
        check_count("ticket_ids", named.len())?;
        let ticket_id = |(n, id): (usize, &String)| convert::request::ticket_id(&format!("ticket_ids[{n}]"), id);
        let named = named.iter().enumerate().map(ticket_id).collect::<Result<Vec<_>, _>>()?;
        let (found, observed) = self.usage.tickets_by_id(&named).await?;
        let mut answer = proto::BatchGetTicketsResponse::default();
        for ticket_id in &named {
            match found.get(ticket_id).filter(|ticket| reach.has_user(&ticket.user)) {
                Some(ticket) => answer.tickets.push(convert::answer::observed_ticket(ticket, observed.get(ticket_id))),
                None => answer.missing.push(ticket_id.to_string()),
            }
        }
        Ok(answer)
    }

    async fn list_tickets(&self, call: Request<proto::ListTicketsRequest>) -> Reply<proto::ListTicketsResponse> {
        let message = call.get_ref();
        let filters = proto::ListTicketsRequest { page_size: 0, page_token: String::new(), ..message.clone() };
        let page = PageRequest::new("ListTickets", message.page_size, &filters)?;
        let after = page.after(&message.page_token, |key| Uuid::parse_str(key).ok())?;
        let filter = filters::tickets(message, authenticator::reach(&call)?)?;
        let (found, observed) = self.usage.tickets(&filter, after.unwrap_or_default(), page.size).await?;
        let next_page_token = found.next.map(|ticket_id| page.token(&ticket_id.to_string())).unwrap_or_default();
        let with_observed = |ticket: &Ticket| convert::answer::observed_ticket(ticket, observed.get(&ticket.id));
        let tickets = found.tickets.iter().map(with_observed).collect();
        Ok(proto::ListTicketsResponse { tickets, next_page_token })
    }

    async fn list_actions(&self, call: Request<proto::ListActionsRequest>) -> Reply<proto::ListActionsResponse> {
        let message = call.get_ref();
        let filters = proto::ListActionsRequest { page_size: 0, page_token: String::new(), ..message.clone() };
        let page = PageRequest::new("ListActions", message.page_size, &filters)?;
        let key = page.after(&message.page_token, |key| key.parse().ok())?;
        let is_of_operator = authenticator::is_of_operator(&call);
        let filter = filters::actions(message, authenticator::reach(&call)?, is_of_operator)?;
        let lines = match message.newest_first {
            false => self.usage.actions(&filter, key.unwrap_or(0), page.entries_max()).await?,
            true => self.usage.newest_actions(&filter, key, page.entries_max()).await?,
        };
        let token = page.token(&lines.last.to_string());
        let next_page_token = if lines.more { token.clone() } else { String::new() };
        let follow_token = if message.newest_first { String::new() } else { token };
        let actions = lines.shown.iter().map(|line| convert::answer::action(line, is_of_operator)).collect();
        Ok(proto::ListActionsResponse { actions, next_page_token, follow_token })
    }

    async fn list_waiting(&self, call: Request<proto::ListWaitingRequest>) -> Reply<proto::ListWaitingResponse> {
        let message = call.get_ref();
        let filters = proto::ListWaitingRequest { page_size: 0, page_token: String::new(), ..message.clone() };
        let page = PageRequest::new("ListWaiting", message.page_size, &filters)?;
        let after = page.after(&message.page_token, |key| QueuePosition::from_bytes(&parse_hex(key)?))?;
        let filter = filters::waiting(message, authenticator::reach(&call)?)?;
        let mut waiting = self.usage.waiting(&filter, after, page.size + 1).await?;
        let more = page.cut(&mut waiting);
        let last = waiting.last().filter(|_| more);
        let next_page_token = last.map(|(position, _)| page.token(&position.to_string())).unwrap_or_default();
        let waiting = waiting.iter().map(|(_, waiting)| convert::answer::waiting(waiting)).collect();
        Ok(proto::ListWaitingResponse { waiting, next_page_token })
    }

    async fn list_reclaims(&self, call: Request<proto::ListReclaimsRequest>) -> Reply<proto::ListReclaimsResponse> {
        let message = call.get_ref();
        let page = PageRequest::new("ListReclaims", message.page_size, &proto::ListReclaimsRequest::default())?;
        let after = page.after(&message.page_token, |key| key.parse().ok())?;
        let reach = authenticator::reach(&call)?;
        let mut reclaims = self.usage.reclaims(reach.users(), after.unwrap_or_default(), page.size + 1).await?;
        let more = page.cut(&mut reclaims);
        let last = reclaims.last().filter(|_| more);
        let next_page_token = last.map(|last| page.token(&last.ticket_id.to_string())).unwrap_or_default();
        for reclaim in &mut reclaims {
            reclaim.for_user.take_if(|user| !reach.has_user(user));
        }
        let reclaims = reclaims.into_iter().map(reclaims::message).collect();
        Ok(proto::ListReclaimsResponse { reclaims, next_page_token })
    }

    async fn list_scopes(&self, call: Request<proto::ListScopesRequest>) -> Reply<proto::ListScopesResponse> {
        let message = call.get_ref();
        let filters = proto::ListScopesRequest { page_size: 0, page_token: String::new(), ..message.clone() };
        let page = PageRequest::new("ListScopes", message.page_size, &filters)?;
        let filter = filters::scopes(message, authenticator::reach(&call)?)?;
        // The page key is the hash of the last scope; an empty one starts at the first scope.
        let after = page.after(&message.page_token, parse_hex)?;
        if message.over_limit_only || message.fullest_first {
            return match after {
                Some(_) => Err(bad_token().into()),
                None => self.fullest(message, &filter, page.entries_max()).await,
            };
        }
        let scopes = self.limits.scopes(&filter, &after.unwrap_or_default(), page.entries_max()).await?;
        Ok(proto::ListScopesResponse {
            scopes: scopes.shown.iter().map(convert::limit::scope_usage).collect(),
            next_page_token: scopes.next.map(|place| page.token(&hex(&place))).unwrap_or_default(),
            ..Default::default()
        })
    }

    async fn get_overview(&self, call: Request<proto::GetOverviewRequest>) -> Reply<proto::GetOverviewResponse> {
        let is_bound = !authenticator::reach(&call)?.is_all();
        let snapshot = self.overviews.current().await?;
        let overview = Some(convert::overview::overview(&snapshot.overview, is_bound));
        Ok(proto::GetOverviewResponse { overview })
    }

    async fn get_scope(&self, call: Request<proto::GetScopeRequest>) -> Reply<proto::GetScopeResponse> {
        let scope = convert::limit::scope("labels", &call.get_ref().labels)?;
        authenticator::check(&call, |reach| filters::check_scope(&scope, reach))?;
        let scope = Some(convert::limit::scope_usage(&self.limits.scope(&scope).await?));
        Ok(proto::GetScopeResponse { scope })
    }

    async fn follow_actions(&self, call: Request<proto::FollowActionsRequest>) -> Reply<follow::FollowStream> {
        follow::follow(&self.follow, &call).await
    }

    async fn watch(&self, call: Request<proto::WatchRequest>) -> Reply<overview::OverviewStream> {
        overview::watch(&self.overviews, &call)
    }

    async fn list_instances(&self, _: Request<proto::ListInstancesRequest>) -> Reply<proto::ListInstancesResponse> {
        let instances = self.overviews.instances().await?;
        let instances = instances.iter().map(convert::overview::server_instance).collect();
        Ok(proto::ListInstancesResponse { instances })
    }

    async fn list_tasks(&self, _: Request<proto::ListTasksRequest>) -> Reply<proto::ListTasksResponse> {
        overview::tasks(&self.overviews).await
    }
}

rpc! {
    UsageService = UsageRpc {
        list_refusals: ListRefusalsRequest => ListRefusalsResponse,
        get_usage: GetUsageRequest => GetUsageResponse,
        list_users: ListUsersRequest => ListUsersResponse,
        get_server_info: GetServerInfoRequest => GetServerInfoResponse,
        get_em: GetEmRequest => GetEmResponse,
        batch_get_ems: BatchGetEmsRequest => BatchGetEmsResponse,
        list_ems: ListEmsRequest => ListEmsResponse,
        get_ticket: GetTicketRequest => GetTicketResponse,
        batch_get_tickets: BatchGetTicketsRequest => BatchGetTicketsResponse,
        list_tickets: ListTicketsRequest => ListTicketsResponse,
        list_actions: ListActionsRequest => ListActionsResponse,
        list_waiting: ListWaitingRequest => ListWaitingResponse,
        list_reclaims: ListReclaimsRequest => ListReclaimsResponse,
        list_scopes: ListScopesRequest => ListScopesResponse,
        get_overview: GetOverviewRequest => GetOverviewResponse,
        get_scope: GetScopeRequest => GetScopeResponse,
        list_instances: ListInstancesRequest => ListInstancesResponse,
        list_tasks: ListTasksRequest => ListTasksResponse,
    }
    streams {
        follow_actions: FollowActionsRequest => FollowActionsStream = follow::FollowStream,
        watch: WatchRequest => WatchStream = overview::OverviewStream,
    }
}
