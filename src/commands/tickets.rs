//! `ticket`: live tickets and their forced release.

use std::time::Duration;

use clap::{Args, Subcommand};
use prost_types::Timestamp;

use crate::config::parse_duration;
use rm_client::calls;
use rm_model::resource::Dimension;
use rm_proto::v1::{self as proto, ForceReleaseRequest, ListTicketsRequest, ListTicketsResponse, Ticket as Message};

use super::{
    consent::Consent,
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    named::{EmName, find_em, find_ticket},
    output::{
        Printer,
        table::{Column, TableRow, cells, details},
        text,
    },
    register::AdoptCommand,
    service::{ServiceClient, TIMEOUT},
    service_arguments::{PollArguments, ServiceArguments},
    values,
};

/// Verbs of `ticket`.
#[derive(Debug, Clone, Subcommand)]
pub enum TicketCommand {
    /// List live tickets, the oldest first.
    #[command(after_help = end("ticket list --user alice --state locked", &calls::LIST_TICKETS))]
    List(ListTicketsCommand),
    /// Show a live ticket. Exit code 1 if it has ended or never existed; the error states how it ended.
    #[command(after_help = end("ticket get 5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a01", &calls::GET_TICKET))]
    Get(GetTicketCommand),
    /// End a ticket, whether or not its engine still runs. Exit code 1 if the ticket never existed.
    #[command(after_help = end("ticket release 5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a01", &calls::FORCE_RELEASE))]
    Release(ReleaseCommand),
    /// Give a running engine a ticket, whether or not it fits.
    #[command(after_help = end("ticket adopt 5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a09 --em host1:9102 --engine host1:34567 \
        --user alice --creator IDE --used memory=4g,cores=1,instances=1", &calls::ADOPT_TICKET))]
    Adopt(AdoptCommand),
}

impl TicketCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
            Self::Get(command) => command.run().await,
            Self::Release(command) => command.run().await,
            Self::Adopt(command) => command.run().await,
        }
    }
}

/// Arguments of `ticket list`.
#[derive(Debug, Clone, Args)]
pub struct ListTicketsCommand {
    /// Only tickets on this EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(long, value_parser = EmName::parse)]
    em: Option<EmName>,

    /// Only tickets of this user.
    #[arg(long, value_parser = values::name)]
    user: Option<String>,

    /// Only tickets that are locked, or only tickets that are used.
    #[arg(long, value_parser = ["locked", "used"])]
    state: Option<String>,

    /// Only tickets that this engine uses: APPLICATION/INSTANCE, or the instance alone of a linkis-cg-engineconn.
    #[arg(long, value_parser = values::engine)]
    engine: Option<proto::EngineInstance>,

    /// Only tickets whose engines have been idle (run no task) for at least this time; 0s for all that are idle now.
    #[arg(long, value_name = "DURATION", value_parser = idle)]
    idle: Option<Duration>,

    #[command(flatten)]
    list: ListArguments,
}

/// Arguments of `ticket get`.
#[derive(Debug, Clone, Args)]
pub struct GetTicketCommand {
    /// Id of the ticket, or a unique end of it.
    #[arg(value_name = "TICKET")]
    ticket_id: String,

    #[command(flatten)]
    watching: PollArguments,
}

/// Arguments of `ticket release`.
#[derive(Debug, Clone, Args)]
pub struct ReleaseCommand {
    /// Id of the ticket, or a unique end of it.
    #[arg(value_name = "TICKET")]
    ticket_id: String,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

fn idle(text: &str) -> Result<Duration, String> {
    parse_duration("--idle", text, "0s", "30d")
}

const COLUMNS: &[Column] = &[
    Column::ticket("TICKET").key(),
    Column::name("USER").key(),
    Column::em("EM").key(),
    Column::text("STATE").key(),
    Column::number("SINCE").key(),
    Column::number("MEMORY").key(),
    Column::number("CORES").key(),
    Column::name("ENGINE TYPE"),
    Column::name("CREATOR"),
    Column::number("INSTANCES"),
    Column::text("OTHER"),
    Column::number("IDLE SINCE").wide(),
    Column::number("EXPIRES").wide(),
    Column::text("ENGINE").wide(),
    Column::text("LABELS").wide(),
    Column::text("OBSERVED").wide(),
    Column::text("REQUESTED BY").wide(),
];

listed!(LIST_TICKETS: ListTicketsRequest => ListTicketsResponse, tickets: Message, COLUMNS, |ticket| vec![row(ticket)]);

impl ListTicketsCommand {
    /// Lists the tickets.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let Self { em, user, state, engine, idle, list } = self;
        let idle_for = idle.and_then(|idle| prost_types::Duration::try_from(idle).ok());
        let (user, state) = (user.unwrap_or_default(), state.unwrap_or_default());
        let em = find_em(em.as_ref(), &list.service()?).await?;
        list.list(ListTicketsRequest { em, user, state, engine, idle_for, ..Default::default() }).await
    }
}

impl GetTicketCommand {
    /// Shows the ticket.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let show = async |service: &ServiceClient, printer: &mut Printer| {
            let ticket_id = find_ticket(&self.ticket_id, service).await?;
            let question = proto::GetTicketRequest { ticket_id, engine: None };
            let answer = service.make(&calls::GET_TICKET, &question).await?;
            let text = || details(COLUMNS, &row(&answer.ticket.clone().unwrap_or_default()));
            printer.answer(&calls::GET_TICKET, &answer, text)
        };
        self.watching.rounds(TIMEOUT, show).await?;
        Ok(CommandReply::Yes)
    }
}

impl ReleaseCommand {
    /// Releases the ticket.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let Self { ticket_id, consent, arguments } = self;
        let service = arguments.service(TIMEOUT)?;
        let ticket_id = find_ticket(&ticket_id, &service).await?;
        let question = match consent.is_interactive() {
            true => release_question(&service, &ticket_id).await?,
            false => String::new(),
        };
        let reason = consent.confirm(&question)?;
        let question = ForceReleaseRequest { ticket_id: ticket_id.clone(), reason, ..Default::default() };
        let answer = service.make(&calls::FORCE_RELEASE, &question).await?;
        let ended = || format!("ticket {ticket_id} {} at {}\n", answer.ended, text::time(answer.end_time.as_ref()));
        arguments.printer().answer(&calls::FORCE_RELEASE, &answer, ended)?;
        Ok(CommandReply::Yes)
    }
}

/// Returns the question before the release of a ticket: what ends, and what does not.
async fn release_question(service: &ServiceClient, ticket_id: &str) -> Result<String, CommandFailure> {
    let question = proto::GetTicketRequest { ticket_id: ticket_id.to_owned(), engine: None };
    let ticket = service.make(&calls::GET_TICKET, &question).await?.ticket.unwrap_or_default();
    let (user, em) = (text::name(&ticket.user), text::em(ticket.em.as_ref()));
    let engine_type = match ticket.engine_type.as_str() {
        "" => String::new(),
        engine_type => format!(", {}", text::name(engine_type)),
    };
    let amounts = text::resource(ticket.used.as_ref().or(ticket.locked.as_ref()));
    let (state, since) = (&ticket.state, text::time(since(&ticket)));
    Ok(format!(
        "Release ticket {ticket_id} of {user}{engine_type} on {em} ({amounts}, {state} since {since})? Its engine is not ended by this."
    ))
}

/// Returns the time since which a ticket has its state.
fn since(ticket: &Message) -> Option<&Timestamp> {
    ticket.used_time.as_ref().or(ticket.locked_time.as_ref())
}

/// Returns the amounts with columns of their own, and all others in one text.
pub fn amount_cells(resource: Option<&proto::Resource>) -> [String; 4] {
    use Dimension::{Cores, Instances, Memory};
    let (amounts, queue) = text::amounts(resource);
    let of = |wanted: &Dimension| {
        let found = amounts.iter().find(|(dimension, _)| dimension == wanted);
        found.map_or_else(|| text::NOTHING.to_owned(), |(dimension, amount)| text::amount(dimension, *amount))
    };
    let others = amounts.iter().filter(|(dimension, _)| ![Memory, Cores, Instances].contains(dimension));
    let mut others: Vec<String> =
        others.map(|(dimension, amount)| format!("{}={}", dimension.key(), text::amount(dimension, *amount))).collect();
    others.extend(queue.filter(|queue| !queue.is_empty()).map(|queue| format!("on {queue}")));
    [of(&Memory), of(&Cores), of(&Instances), text::or_nothing(&others.join(" "))]
}

fn row(ticket: &Message) -> TableRow {
    let engine = ticket.engine.as_ref().map(|engine| format!("{}/{}", engine.application_name, engine.instance));
    let [memory, cores, instances, others] = amount_cells(ticket.used.as_ref().or(ticket.locked.as_ref()));
    cells![
        ticket.ticket_id.clone(),
        text::name(&ticket.user),
        text::em(ticket.em.as_ref()),
        ticket.state.clone(),
        since(ticket),
        memory,
        cores,
        text::name_or_nothing(&ticket.engine_type),
        text::name(&ticket.creator),
        instances,
        others,
        ticket.idle_since.as_ref(),
        ticket.expire_time.as_ref(),
        text::name_or_nothing(&engine.unwrap_or_default()),
        text::labels(&ticket.labels),
        text::resource(ticket.observed.as_ref()),
        text::name_or_nothing(&ticket.principal),
    ]
}
