//! `em drain`, `em resume`: start and end of the maintenance of an EM.

use clap::Args;

use rm_client::calls;
use rm_proto::v1::{DrainRequest, ResumeRequest};

use super::{
    consent,
    error::{CommandFailure, CommandReply},
    named::EmName,
    output::text,
    service::TIMEOUT,
    service_arguments::ServiceArguments,
};

/// Arguments of `em drain`.
#[derive(Debug, Clone, Args)]
pub struct DrainCommand {
    /// The EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(value_parser = EmName::parse)]
    em: EmName,

    /// Reason, shown with the EM and recorded in the history.
    #[arg(long)]
    reason: Option<String>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `em resume`.
#[derive(Debug, Clone, Args)]
pub struct ResumeCommand {
    /// The EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(value_parser = EmName::parse)]
    em: EmName,

    /// Reason, for the history.
    #[arg(long)]
    reason: Option<String>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

impl DrainCommand {
    /// Drains the EM.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let em = self.em.find(&service).await?;
        let reason = consent::reason(self.reason.as_deref())?;
        let answer = service.make(&calls::DRAIN, &DrainRequest { em: Some(em.clone()), reason }).await?;
        let drained = || {
            let drain = answer.drain.clone().unwrap_or_default();
            let (em, since) = (text::em(Some(&em)), text::time(drain.drain_time.as_ref()));
            format!("{em} is drained since {since} by {}: {}\n", drain.drained_by, drain.reason)
        };
        self.arguments.printer().answer(&calls::DRAIN, &answer, drained)?;
        Ok(CommandReply::Yes)
    }
}

impl ResumeCommand {
    /// Ends the drain.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let em = self.em.find(&service).await?;
        let question = ResumeRequest { em: Some(em.clone()), reason: self.reason.unwrap_or_default() };
        let answer = service.make(&calls::RESUME, &question).await?;
        let em = text::em(Some(&em));
        let resumed = if answer.was_drained { "grants again" } else { "was not drained" };
        self.arguments.printer().answer(&calls::RESUME, &answer, || format!("{em} {resumed}\n"))?;
        Ok(CommandReply::yes_if(answer.was_drained))
    }
}
