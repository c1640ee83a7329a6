//! Calls that read: `UsageService`. Each method makes one call, or all calls of a list.

use std::collections::BTreeMap;

use uuid::Uuid;

use rm_model::{
    em::{Em, EmInstance},
    limit::ScopeUsage,
    report::EmStatus,
    ticket::Ticket,
    wait_queue::WaitingRequest,
};
use rm_proto::{
    convert::{answer, limit},
    v1 as proto,
};

use super::{Follower, PAGE_SIZE, Result, RmClient, calls};

impl RmClient {
    /// Returns the use of all limited scopes.
    pub async fn scopes(&self) -> Result<Vec<ScopeUsage>> {
        let ask = |page_token| proto::ListScopesRequest { page_size: PAGE_SIZE, page_token, ..Default::default() };
        self.list(&calls::LIST_SCOPES, ask, |page| (page.scopes, page.next_page_token), limit::read_scope_usage).await
    }

    /// Returns one scope by its labels, which must be those of a limit in force.
    pub async fn scope(&self, labels: &BTreeMap<String, String>) -> Result<ScopeUsage> {
        let message = proto::GetScopeRequest { labels: labels.clone() };
        let answer = self.make(&calls::GET_SCOPE, &message).await?;
        Ok(limit::read_scope_usage(answer.scope.unwrap_or_default())?)
    }

    /// Returns the first page of refusal statistics, the latest first, with the filters of the request.
    pub async fn refusals(&self, question: &proto::ListRefusalsRequest) -> Result<proto::ListRefusalsResponse> {
        self.make(&calls::LIST_REFUSALS, question).await
    }

    /// Returns the use over time.
    pub async fn use_over_time(&self, question: &proto::GetUsageRequest) -> Result<proto::GetUsageResponse> {
        self.make(&calls::GET_USAGE, question).await
    }

    /// Returns a page of the users with the most use of a dimension.
    pub async fn users(&self, question: &proto::ListUsersRequest) -> Result<proto::ListUsersResponse> {
        self.make(&calls::LIST_USERS, question).await
    }

    /// Returns a page of the history.
    pub async fn actions(&self, question: &proto::ListActionsRequest) -> Result<proto::ListActionsResponse> {
        self.make(&calls::LIST_ACTIONS, question).await
    }

    /// Follows the history after a position; from now on if it is empty. The first [`Follower::next`] opens the stream.
    pub fn follow_actions(&self, position: &str) -> Follower {
        Follower::new(self.clone(), position.to_owned())
    }

    /// Returns the registered EMs among `ems`; at most 1000.
    pub async fn ems_by_name(&self, ems: &[EmInstance]) -> Result<Vec<Em>> {
        let message = proto::BatchGetEmsRequest { ems: ems.iter().map(answer::em_message).collect() };
        let found = self.make(&calls::BATCH_GET_EMS, &message).await?.ems;
        Ok(found.into_iter().map(answer::read_em).collect::<std::result::Result<_, _>>()?)
    }

    /// Returns the live tickets among `ticket_ids`; at most 1000.
    pub async fn tickets_by_id(&self, ticket_ids: &[Uuid]) -> Result<Vec<Ticket>> {
        let ticket_ids = ticket_ids.iter().map(ToString::to_string).collect();
        let found = self.make(&calls::BATCH_GET_TICKETS, &proto::BatchGetTicketsRequest { ticket_ids }).await?.tickets;
        Ok(found.into_iter().map(answer::read_ticket).collect::<std::result::Result<_, _>>()?)
    }

    /// Returns all waiting requests, in queue order.
    pub async fn waiting(&self) -> Result<Vec<WaitingRequest>> {
        let ask = |page_token| proto::ListWaitingRequest { page_size: PAGE_SIZE, page_token, ..Default::default() };
        self.list(&calls::LIST_WAITING, ask, |page| (page.waiting, page.next_page_token), answer::read_waiting).await
    }

    /// Returns the tickets that are to end because requests wait.
    pub async fn reclaims(&self) -> Result<Vec<proto::Reclaim>> {
        let message = proto::ListReclaimsRequest { page_size: PAGE_SIZE, ..Default::default() };
        Ok(self.make(&calls::LIST_RECLAIMS, &message).await?.reclaims)
    }

    /// Returns the version, bounds, intervals and authentication of the replying instance.
    pub async fn server_info(&self) -> Result<proto::GetServerInfoResponse> {
        self.make(&calls::GET_SERVER_INFO, &proto::GetServerInfoRequest {}).await
    }

    /// Returns the cluster overview, at most one second old.
    pub async fn overview(&self) -> Result<proto::Overview> {
        let answer = self.make(&calls::GET_OVERVIEW, &proto::GetOverviewRequest {}).await?;
        Ok(answer.overview.unwrap_or_default())
    }

    /// Returns the live instances of the service, the oldest first.
    pub async fn instances(&self) -> Result<Vec<proto::ServerInstance>> {
        Ok(self.make(&calls::LIST_INSTANCES, &proto::ListInstancesRequest {}).await?.instances)
    }

    /// Returns the background tasks with their remaining work.
    pub async fn tasks(&self) -> Result<proto::ListTasksResponse> {
        self.make(&calls::LIST_TASKS, &proto::ListTasksRequest {}).await
    }

    /// Returns one EM.
    pub async fn em(&self, em: &EmInstance) -> Result<Em> {
        let message = proto::GetEmRequest { em: Some(answer::em_message(em)) };
        let answer = self.make(&calls::GET_EM, &message).await?;
        Ok(answer::read_em(answer.em.unwrap_or_default())?)
    }

    /// Returns the reported state of an EM; `None` if it never reported.
    pub async fn em_status(&self, em: &EmInstance) -> Result<Option<EmStatus>> {
        let message = proto::GetEmRequest { em: Some(answer::em_message(em)) };
        let answer = self.make(&calls::GET_EM, &message).await?;
        Ok(answer::read_em_status(&answer.em.unwrap_or_default())?)
    }

    /// Returns all EMs.
    pub async fn ems(&self) -> Result<Vec<Em>> {
        let ask = |page_token| proto::ListEmsRequest { page_size: PAGE_SIZE, page_token, ..Default::default() };
        self.list(&calls::LIST_EMS, ask, |page| (page.ems, page.next_page_token), answer::read_em).await
    }

    /// Returns a page of the EMs, in the order of the request.
    pub async fn ems_page(&self, question: &proto::ListEmsRequest) -> Result<proto::ListEmsResponse> {
        self.make(&calls::LIST_EMS, question).await
    }

    /// Returns one live ticket.
    pub async fn ticket(&self, ticket_id: Uuid) -> Result<Ticket> {
        let message = proto::GetTicketRequest { ticket_id: ticket_id.to_string(), engine: None };
        let answer = self.make(&calls::GET_TICKET, &message).await?;
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// Returns all live tickets, or those of one EM.
    pub async fn tickets(&self, em: Option<&EmInstance>) -> Result<Vec<Ticket>> {
        let em = em.map(answer::em_message);
        let ask = |page_token| proto::ListTicketsRequest {
            em: em.clone(),
            page_size: PAGE_SIZE,
            page_token,
            ..Default::default()
        };
        let elements = |page: proto::ListTicketsResponse| (page.tickets, page.next_page_token);
        self.list(&calls::LIST_TICKETS, ask, elements, answer::read_ticket).await
    }
}
