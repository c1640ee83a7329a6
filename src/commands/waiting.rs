//! `waiting`: waiting requests with the resources that they are short of.

use clap::Args;

use rm_proto::v1::{EmInstance, ListWaitingRequest, ListWaitingResponse, WaitingRequest};

use super::{
    error::{CommandFailure, CommandReply},
    list::{ListArguments, listed},
    output::{
        table::{Column, TableRow},
        text,
    },
    tickets::amount_cells,
    values,
};

/// Arguments of `waiting`.
#[derive(Debug, Clone, Args)]
pub struct ListWaitingCommand {
    /// Only requests of this user.
    #[arg(long)]
    user: Option<String>,

    /// Only requests that are short on this EM: APPLICATION/INSTANCE, or the instance alone of a linkis-cg-engineconnmanager.
    #[arg(long, value_parser = values::em)]
    em: Option<EmInstance>,

    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::number("PLACE"),
    Column::text("USER"),
    Column::text("SHORT OF"),
    Column::number("MEMORY"),
    Column::number("CORES"),
    Column::number("INSTANCES"),
    Column::text("OTHER"),
    Column::text("SINCE"),
    Column::text("UNTIL"),
    Column::text("EM"),
    Column::text("CREATOR"),
    Column::text("ENGINE TYPE"),
    Column::id("TICKET").wide(),
    Column::text("LABELS").wide(),
];

listed!(LIST_WAITING: ListWaitingRequest => ListWaitingResponse, waiting: WaitingRequest, COLUMNS, |one| vec![row(one)]);

impl ListWaitingCommand {
    /// Lists the waiting requests.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let user = self.user.unwrap_or_default();
        self.list.list(ListWaitingRequest { user, em: self.em, ..Default::default() }).await
    }
}

/// The displayed position is the last one among the queues where the request is short.
fn row(waiting: &WaitingRequest) -> TableRow {
    let keys: Vec<String> = waiting.entries.iter().map(|entry| entry.scope.clone()).collect();
    let ahead = waiting.entries.iter().map(|entry| entry.ahead).max().unwrap_or(0);
    let [memory, cores, instances, others] = amount_cells(waiting.resource.as_ref());
    vec![
        ahead.saturating_add(1).to_string(),
        waiting.user.clone(),
        text::or_nothing(&keys.join(" ")),
        memory,
        cores,
        instances,
        others,
        text::time(waiting.waiting_since.as_ref()),
        text::time(waiting.wait_until.as_ref()),
        if waiting.any_em { "any".to_owned() } else { text::em(waiting.em.as_ref()) },
        waiting.creator.clone(),
        text::or_nothing(&waiting.engine_type),
        waiting.ticket_id.clone(),
        text::labels(&waiting.labels),
    ]
}
