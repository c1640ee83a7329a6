//! `em register`, `em unregister`, `ticket adopt`: calls that an EM makes as a rule, by hand.

use clap::Args;
use uuid::Uuid;

use rm_client::calls;
use rm_proto::v1::{
    AdoptTicketRequest, EngineInstance, GetEmRequest, ListTicketsRequest, RegisterRequest, UnregisterRequest,
};

use super::{
    amounts::{self, Amounts},
    consent::Confirmation,
    error::{CommandFailure, CommandReply},
    named::EmName,
    output::text,
    service::TIMEOUT,
    service_arguments::ServiceArguments,
    values,
};

/// Arguments of `em register`.
#[derive(Debug, Clone, Args)]
pub struct RegisterCommand {
    /// The EM: APPLICATION/INSTANCE, or the instance alone of a linkis-cg-engineconnmanager.
    #[arg(value_parser = EmName::parse)]
    em: EmName,

    /// Its capacity, as in memory=64g,cores=16,instances=20.
    #[arg(long, value_name = "AMOUNTS", value_parser = amounts::parse)]
    total: Amounts,

    /// The part of the capacity that is never granted.
    #[arg(long, value_name = "AMOUNTS", value_parser = amounts::parse)]
    protected: Option<Amounts>,

    /// Label of the EM, KEY=VALUE. Repeatable.
    #[arg(long = "label", value_parser = values::label)]
    labels: Vec<(String, String)>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `em unregister`.
#[derive(Debug, Clone, Args)]
pub struct UnregisterCommand {
    /// The EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(value_parser = EmName::parse)]
    em: EmName,

    #[command(flatten)]
    confirmation: Confirmation,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `ticket adopt`.
#[derive(Debug, Clone, Args)]
pub struct AdoptCommand {
    /// Id of the ticket, which the EM will report.
    #[arg(value_name = "TICKET")]
    ticket_id: Uuid,

    /// What the engine uses, as in memory=4g,cores=1,instances=1.
    #[arg(long, value_name = "AMOUNTS", value_parser = amounts::parse)]
    used: Amounts,

    /// The EM of the engine: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(long, value_parser = EmName::parse)]
    em: EmName,

    /// The engine: APPLICATION/INSTANCE, or the instance alone of a linkis-cg-engineconn.
    #[arg(long, value_parser = values::engine)]
    engine: EngineInstance,

    /// User of the engine.
    #[arg(long, value_parser = values::name)]
    user: String,

    /// Application of the user.
    #[arg(long, value_parser = values::name)]
    creator: String,

    /// Type of the engine, as in spark-3.2.1.
    #[arg(long, value_name = "TYPE", default_value = "", hide_default_value = true)]
    engine_type: String,

    /// Queue or namespace of the amounts with queue_ or kubernetes_.
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,

    /// Label of the ticket, KEY=VALUE. Repeatable.
    #[arg(long = "label", value_parser = values::label)]
    labels: Vec<(String, String)>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

impl RegisterCommand {
    /// Registers the EM.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let protected_resource = self.protected.map(|protected| protected.resource(None)).transpose()?;
        let question = RegisterRequest {
            em: Some(self.em.whole()),
            total: Some(self.total.resource(None)?),
            protected_resource,
            labels: self.labels.into_iter().collect(),
            ..Default::default()
        };
        let reply = self.arguments.service(TIMEOUT)?.make(&calls::REGISTER, &question).await?;
        let registered = || {
            let em = reply.em.clone().unwrap_or_default();
            format!("{} is registered, epoch {}\n", text::em(em.em.as_ref()), em.epoch)
        };
        self.arguments.printer().answer(&calls::REGISTER, &reply, registered)?;
        Ok(CommandReply::Yes)
    }
}

impl UnregisterCommand {
    /// Unregisters the EM, with its tickets.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let em = self.em.find(&service).await?;
        let known = service.make(&calls::GET_EM, &GetEmRequest { em: Some(em.clone()) }).await?.em.unwrap_or_default();
        let name = text::em(Some(&em));
        let first = ListTicketsRequest { em: Some(em.clone()), page_size: 1, ..Default::default() };
        let has_tickets = !service.make(&calls::LIST_TICKETS, &first).await?.tickets.is_empty();
        let tickets = match has_tickets {
            true => {
                let sums = [(&known.used, "used"), (&known.locked, "locked")];
                let sums = sums.map(|(sum, state)| (text::resource(sum.as_ref()), state));
                let sums: Vec<String> = sums
                    .iter()
                    .filter(|(sum, _)| sum != text::NOTHING)
                    .map(|(sum, state)| format!("{state} {sum}"))
                    .collect();
                format!("Its tickets end: {}", sums.join(", "))
            }
            false => "It has no tickets".to_owned(),
        };
        self.confirmation.confirm(&format!("{tickets}. Unregister {name}?"))?;
        // The epoch protects a registration since the question.
        let question = UnregisterRequest { em: Some(em), epoch: known.epoch };
        let reply = service.make_slowly("unregistering", &calls::UNREGISTER, &question).await?;
        let more = if reply.in_progress { " so far; the others end in steps" } else { "" };
        let done = || format!("{name} is unregistered; {} tickets ended{more}\n", reply.removed_tickets);
        self.arguments.printer().answer(&calls::UNREGISTER, &reply, done)?;
        Ok(CommandReply::Yes)
    }
}

impl AdoptCommand {
    /// Adopts the engine.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let used = Some(self.used.resource(self.queue.as_deref())?);
        let service = self.arguments.service(TIMEOUT)?;
        let question = AdoptTicketRequest {
            ticket_id: self.ticket_id.to_string(),
            em: Some(self.em.find(&service).await?),
            user: self.user,
            creator: self.creator,
            engine_type: self.engine_type,
            labels: self.labels.into_iter().collect(),
            engine: Some(self.engine),
            used,
            return_counters: false,
        };
        let reply = service.make(&calls::ADOPT_TICKET, &question).await?;
        let adopted = || {
            let ticket = reply.ticket.clone().unwrap_or_default();
            let (user, em) = (text::name(&ticket.user), text::em(ticket.em.as_ref()));
            format!("ticket {} of {user} is {} on {em}\n", ticket.ticket_id, ticket.state)
        };
        self.arguments.printer().answer(&calls::ADOPT_TICKET, &reply, adopted)?;
        Ok(CommandReply::Yes)
    }
}
