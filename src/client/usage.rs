//! What operators ask: `UsageService`.

use std::collections::BTreeMap;

use uuid::Uuid;

use crate::{
    domain::{
        em::{Em, EmInstance},
        limit::ScopeUsage,
        line::WaitingRequest,
        report::EmStatus,
        ticket::Ticket,
    },
    transport::{
        convert::{answer, limit},
        proto,
    },
};

use super::{Follower, PAGE_SIZE, Result, RmClient, calls};

impl RmClient {
    /// What all scopes hold that limits are for.
    pub async fn scopes(&self) -> Result<Vec<ScopeUsage>> {
        let ask = |page_token| proto::ListScopesRequest { page_size: PAGE_SIZE, page_token, ..Default::default() };
        self.list(&calls::LIST_SCOPES, ask, |page| (page.scopes, page.next_page_token), limit::read_scope_usage).await
    }

    /// One scope, by its labels: those of a limit that is in force.
    pub async fn scope(&self, labels: &BTreeMap<String, String>) -> Result<ScopeUsage> {
        let message = proto::GetScopeRequest { labels: labels.clone() };
        let answer = self.make(&calls::GET_SCOPE, &message).await?;
        Ok(limit::read_scope_usage(answer.scope.unwrap_or_default())?)
    }

    /// Who was refused by what, how often, the latest first: the first page, with the filters of the question.
    pub async fn refusals(&self, question: &proto::ListRefusalsRequest) -> Result<proto::ListRefusalsResponse> {
        self.make(&calls::LIST_REFUSALS, question).await
    }

    /// What was used over time.
    pub async fn use_over_time(&self, question: &proto::GetUsageRequest) -> Result<proto::GetUsageResponse> {
        self.make(&calls::GET_USAGE, question).await
    }

    /// A page of the history.
    pub async fn actions(&self, question: &proto::ListActionsRequest) -> Result<proto::ListActionsResponse> {
        self.make(&calls::LIST_ACTIONS, question).await
    }

    /// The history as it goes on, from behind a position; from now on, if that is empty. Nothing is asked before the first
    /// [`Follower::next`].
    pub fn follow_actions(&self, position: &str) -> Follower {
        Follower::new(self.clone(), position.to_owned())
    }

    /// Those of some EMs that are registered; those that are not are left out. At most 1000.
    pub async fn ems_by_name(&self, ems: &[EmInstance]) -> Result<Vec<Em>> {
        let message = proto::BatchGetEmsRequest { ems: ems.iter().map(answer::em_message).collect() };
        let found = self.make(&calls::BATCH_GET_EMS, &message).await?.ems;
        Ok(found.into_iter().map(answer::read_em).collect::<std::result::Result<_, _>>()?)
    }

    /// Those of some tickets that live. At most 1000.
    pub async fn tickets_by_id(&self, ticket_ids: &[Uuid]) -> Result<Vec<Ticket>> {
        let ticket_ids = ticket_ids.iter().map(ToString::to_string).collect();
        let found = self.make(&calls::BATCH_GET_TICKETS, &proto::BatchGetTicketsRequest { ticket_ids }).await?.tickets;
        Ok(found.into_iter().map(answer::read_ticket).collect::<std::result::Result<_, _>>()?)
    }

    /// All requests that wait in line, the first in line first.
    pub async fn waiting(&self) -> Result<Vec<WaitingRequest>> {
        let ask = |page_token| proto::ListWaitingRequest { page_size: PAGE_SIZE, page_token, ..Default::default() };
        self.list(&calls::LIST_WAITING, ask, |page| (page.waiting, page.next_page_token), answer::read_waiting).await
    }

    /// What the instance that answers is, and what it lets its callers do.
    pub async fn server_info(&self) -> Result<proto::GetServerInfoResponse> {
        self.make(&calls::GET_SERVER_INFO, &proto::GetServerInfoRequest {}).await
    }

    /// The whole cluster in a few numbers, at most a second old.
    pub async fn overview(&self) -> Result<proto::Overview> {
        let answer = self.make(&calls::GET_OVERVIEW, &proto::GetOverviewRequest {}).await?;
        Ok(answer.overview.unwrap_or_default())
    }

    /// The instances of the service that live, the oldest first.
    pub async fn instances(&self) -> Result<Vec<proto::ServerInstance>> {
        Ok(self.make(&calls::LIST_INSTANCES, &proto::ListInstancesRequest {}).await?.instances)
    }

    /// What is done in the background, and what is left of it.
    pub async fn tasks(&self) -> Result<proto::ListTasksResponse> {
        self.make(&calls::LIST_TASKS, &proto::ListTasksRequest {}).await
    }

    /// One EM.
    pub async fn em(&self, em: &EmInstance) -> Result<Em> {
        let message = proto::GetEmRequest { em: Some(answer::em_message(em)) };
        let answer = self.make(&calls::GET_EM, &message).await?;
        Ok(answer::read_em(answer.em.unwrap_or_default())?)
    }

    /// What is known of an EM by its reports; `None` if it never sent one.
    pub async fn em_status(&self, em: &EmInstance) -> Result<Option<EmStatus>> {
        let message = proto::GetEmRequest { em: Some(answer::em_message(em)) };
        let answer = self.make(&calls::GET_EM, &message).await?;
        Ok(answer::read_em_status(&answer.em.unwrap_or_default())?)
    }

    /// All EMs.
    pub async fn ems(&self) -> Result<Vec<Em>> {
        let ask = |page_token| proto::ListEmsRequest { page_size: PAGE_SIZE, page_token, ..Default::default() };
        self.list(&calls::LIST_EMS, ask, |page| (page.ems, page.next_page_token), answer::read_em).await
    }

    /// One live ticket.
    pub async fn ticket(&self, ticket_id: Uuid) -> Result<Ticket> {
        let message = proto::GetTicketRequest { ticket_id: ticket_id.to_string(), engine: None };
        let answer = self.make(&calls::GET_TICKET, &message).await?;
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// All live tickets: of one EM, or of all.
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
