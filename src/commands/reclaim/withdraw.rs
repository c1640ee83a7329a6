//! `reclaim withdraw`: keeps an engine that was chosen for a waiting request.

use clap::Args;

use rm_client::calls;
use rm_proto::v1::WithdrawReclaimRequest;

use crate::commands::{
    consent,
    error::{CommandFailure, CommandReply},
    named::find_ticket,
    service::TIMEOUT,
    service_arguments::ServiceArguments,
};

/// Arguments of `reclaim withdraw`.
#[derive(Debug, Clone, Args)]
pub struct WithdrawReclaimCommand {
    /// Id of the ticket, or a unique end of it.
    #[arg(value_name = "TICKET")]
    ticket_id: String,

    /// Reason, for the history.
    #[arg(long)]
    reason: Option<String>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

impl WithdrawReclaimCommand {
    /// Withdraws the ticket.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let reason = consent::reason(self.reason.as_deref())?;
        let ticket_id = find_ticket(&self.ticket_id, &service).await?;
        let question = WithdrawReclaimRequest { ticket_id: ticket_id.clone(), reason };
        let reply = service.make(&calls::WITHDRAW_RECLAIM, &question).await?;
        let withdrawn = || format!("the engine of ticket {ticket_id} stays\n");
        self.arguments.printer().answer(&calls::WITHDRAW_RECLAIM, &reply, withdrawn)?;
        Ok(CommandReply::Yes)
    }
}
