//! `reclaim list`: tickets that are to end because requests wait.

use std::time::{Duration, SystemTime};

use clap::Args;

use crate::commands::{
    error::{CommandFailure, CommandReply},
    list::{ListArguments, listed},
    output::{
        table::{Column, TableRow, cells},
        text,
    },
};
use rm_proto::v1::{ListReclaimsRequest, ListReclaimsResponse, Reclaim};

/// Arguments of `reclaim list`.
#[derive(Debug, Clone, Args)]
pub struct ListReclaimsCommand {
    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::ticket("TICKET").key(),
    Column::name("USER").key(),
    Column::em("EM").key(),
    Column::number("IDLE SINCE").key(),
    Column::text("STATE").key(),
    Column::text("MODE"),
    Column::text("BUSY"),
    Column::number("DUE"),
    Column::name("FOR"),
    Column::ticket("FOR TICKET").wide(),
];

listed!(LIST_RECLAIMS: ListReclaimsRequest => ListReclaimsResponse, reclaims: Reclaim, COLUMNS, |reclaim| vec![row(reclaim)]);

impl ListReclaimsCommand {
    /// Lists the chosen tickets.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        self.list.list(ListReclaimsRequest::default()).await
    }
}

/// Returns whether replies to heartbeats do not name the ticket any more: two minutes after the recall.
fn is_unanswered(recall: &prost_types::Timestamp) -> bool {
    SystemTime::try_from(*recall).is_ok_and(|recall| recall.elapsed().is_ok_and(|age| age > Duration::from_secs(120)))
}

fn row(reclaim: &Reclaim) -> TableRow {
    let state = match (&reclaim.idle_since, &reclaim.recall_time) {
        _ if reclaim.withdrawn_time.is_some() => "withdrawn",
        (None, _) if !reclaim.busy => "busy",
        (_, Some(recall)) if is_unanswered(recall) => "unanswered",
        (_, Some(_)) => "recalled",
        (_, None) => "chosen",
    };
    let mode = reclaim.mode().as_str_name().trim_start_matches("RECLAIM_MODE_").to_lowercase();
    // The grace period of a chosen ticket alone ends in the future.
    let due = reclaim.due_time.as_ref().filter(|_| state == "chosen");
    cells![
        reclaim.ticket_id.clone(),
        text::name(&reclaim.user),
        text::em(reclaim.em.as_ref()),
        reclaim.idle_since.as_ref(),
        state.to_owned(),
        mode,
        if reclaim.busy { "yes" } else { text::NOTHING }.to_owned(),
        due,
        text::name_or_nothing(&reclaim.for_user),
        reclaim.for_ticket_id.clone(),
    ]
}
