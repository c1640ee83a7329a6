//! `waiting`: waiting requests with the resources that they are short of.

use clap::Args;

use rm_proto::v1::{ListWaitingRequest, ListWaitingResponse, WaitingRequest};

use super::{
    error::{CommandFailure, CommandReply},
    list::{ListArguments, listed},
    named::{EmName, find_em},
    output::{
        table::{Column, TableRow, cells},
        text,
    },
    tickets::amount_cells,
    values,
};

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
    Column::name("WAITS FOR").key(),
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
    Column::ticket("TICKET").wide(),
    Column::text("LABELS").wide(),
];

listed!(LIST_WAITING: ListWaitingRequest => ListWaitingResponse, waiting: WaitingRequest, COLUMNS, |one| vec![row(one)]);

impl ListWaitingCommand {
    /// Lists the waiting requests.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let user = self.user.unwrap_or_default();
        let em = find_em(self.em.as_ref(), &self.list.service()?).await?;
        self.list.list(ListWaitingRequest { user, em, ..Default::default() }).await
    }
}

/// A request that is short in several queues has a position in each.
fn row(waiting: &WaitingRequest) -> TableRow {
    let joined = |texts: Vec<String>| text::or_nothing(&texts.join(", "));
    let [memory, cores, instances, others] = amount_cells(waiting.resource.as_ref());
    cells![
        text::name(&waiting.user),
        joined(waiting.entries.iter().map(|entry| text::scope(&entry.scope)).collect()),
        joined(waiting.entries.iter().map(|entry| entry.ahead.saturating_add(1).to_string()).collect()),
        waiting.waiting_since.as_ref(),
        memory,
        cores,
        waiting.wait_until.as_ref(),
        if waiting.any_em { "any".to_owned() } else { text::em(waiting.em.as_ref()) },
        text::name(&waiting.creator),
        text::name_or_nothing(&waiting.engine_type),
        instances,
        others,
        waiting.ticket_id.clone(),
        text::labels(&waiting.labels),
    ]
}
