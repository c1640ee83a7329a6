//! What operators ask: `UsageService`.

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

use super::{PAGE_SIZE, Result, RmClient, calls};

impl RmClient {
    /// What all scopes hold that limits are for.
    pub async fn scopes(&self) -> Result<Vec<ScopeUsage>> {
        let ask = |page_token| proto::ListScopesRequest { page_size: PAGE_SIZE, page_token, ..Default::default() };
        self.list(&calls::LIST_SCOPES, ask, |page| (page.scopes, page.next_page_token), limit::read_scope_usage).await
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
