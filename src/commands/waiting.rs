//! `waiting`: waiting requests with the resources that they are short of, and their removal.

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_proto::v1::{ListWaitingRequest, ListWaitingResponse, RemoveWaitingRequest, WaitQueueEntry, WaitingRequest};

use super::{
    consent, end,
    error::{CommandFailure, CommandReply},
    list::{ListArguments, listed},
    named::{EmName, find_em, find_waiting},
    output::{
        table::{Column, TableRow, cells},
        text,
    },
    service::TIMEOUT,
    service_arguments::ServiceArguments,
    tickets::amount_cells,
    values,
};

/// `waiting` without a verb, which lists, or with one.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct WaitingCommand {
    #[command(subcommand)]
    verb: Option<WaitingVerb>,

    #[command(flatten)]
    list: ListWaitingCommand,
}

/// Verbs of `waiting`.
#[derive(Debug, Clone, Subcommand)]
enum WaitingVerb {
    /// Remove a waiting request from its queues. Its call ends with this reason. Exit code 1 if it does not wait.
    #[command(after_help = end("waiting remove 5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a01 --reason \"a mistake\"", &calls::REMOVE_WAITING))]
    Remove(RemoveWaitingCommand),
}

impl WaitingCommand {
    /// Lists, or runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self.verb {
            Some(WaitingVerb::Remove(command)) => command.run().await,
            None => self.list.run().await,
        }
    }
}

/// Arguments of `waiting remove`.
#[derive(Debug, Clone, Args)]
pub struct RemoveWaitingCommand {
    /// Ticket id of the request, or a unique end of it.
    #[arg(value_name = "TICKET")]
    ticket_id: String,

    /// Reason, for the history and the caller of the request.
    #[arg(long)]
    reason: Option<String>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

impl RemoveWaitingCommand {
    /// Removes the request.
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let reason = consent::reason(self.reason.as_deref())?;
        let ticket_id = find_waiting(&self.ticket_id, &service).await?;
        let question = RemoveWaitingRequest { ticket_id: ticket_id.clone(), reason };
        let reply = service.make(&calls::REMOVE_WAITING, &question).await?;
        let removed = || format!("request {ticket_id} does not wait any more\n");
        self.arguments.printer().answer(&calls::REMOVE_WAITING, &reply, removed)?;
        Ok(CommandReply::Yes)
    }
}

/// Arguments of `waiting`.
#[derive(Debug, Clone, Args)]
pub struct ListWaitingCommand {
    /// Only requests of this user.
    #[arg(long, value_parser = values::name)]
    user: Option<String>,

    /// Only requests that are short on this EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(long, value_parser = EmName::parse)]
    em: Option<EmName>,

    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::name("USER").key(),
    Column::em("WAITS FOR").key(),
    Column::text("POSITION").key(),
    Column::number("SINCE").key(),
    Column::number("MEMORY").key(),
    Column::number("CORES").key(),
    Column::number("UNTIL"),
    Column::em("EM"),
    Column::name("CREATOR"),
    Column::name("ENGINE TYPE"),
    Column::number("INSTANCES"),
    Column::text("OTHER"),
    Column::text("TURN").wide(),
    Column::number("PRIORITY").wide(),
    Column::ticket("TICKET").wide(),
    Column::text("LABELS").wide(),
];

listed!(LIST_WAITING: ListWaitingRequest => ListWaitingResponse, waiting: WaitingRequest, COLUMNS, rows);

impl ListWaitingCommand {
    /// Lists the waiting requests.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let user = self.user.unwrap_or_default();
        let em = find_em(self.em.as_ref(), &self.list.service()?).await?;
        self.list.list(ListWaitingRequest { user, em, ..Default::default() }).await
    }
}

/// Returns a row for each queue of a request, with its position there.
fn rows(waiting: &WaitingRequest) -> Vec<TableRow> {
    let of = |entry: &WaitQueueEntry| (text::scope(&entry.scope), entry.ahead.saturating_add(1).to_string());
    let entries: Vec<_> = waiting.entries.iter().map(of).collect();
    match entries.is_empty() {
        true => {
            let queue = if waiting.kept_until.is_some() { "caller absent" } else { text::NOTHING };
            vec![row(waiting, (queue.to_owned(), text::NOTHING.to_owned()))]
        }
        false => entries.into_iter().map(|entry| row(waiting, entry)).collect(),
    }
}

/// Returns the class of a request: entitled by a guarantee, first, or behind an own request.
fn turn(waiting: &WaitingRequest) -> &'static str {
    match (waiting.is_entitled, waiting.has_turn) {
        (true, _) => "entitled",
        (false, true) => "first",
        (false, false) => "behind",
    }
}

fn row(waiting: &WaitingRequest, (queue, position): (String, String)) -> TableRow {
    let [memory, cores, instances, others] = amount_cells(waiting.resource.as_ref());
    cells![
        text::name(&waiting.user),
        queue,
        position,
        waiting.waiting_since.as_ref(),
        memory,
        cores,
        waiting.wait_until.as_ref(),
        if waiting.any_em { "any".to_owned() } else { text::em(waiting.em.as_ref()) },
        text::name(&waiting.creator),
        text::name_or_nothing(&waiting.engine_type),
        instances,
        others,
        turn(waiting).to_owned(),
        format!("{}s", waiting.priority),
        waiting.ticket_id.clone(),
        text::labels(&waiting.labels),
    ]
}
