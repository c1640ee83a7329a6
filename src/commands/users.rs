//! `user`: what each user uses at present.

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_model::resource::Dimension;
use rm_proto::v1::{ListUsersRequest, ListUsersResponse, UserUse};

use super::{
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    output::{
        table::{Column, TableRow, cells},
        text,
    },
};

/// Verbs of `user`.
#[derive(Debug, Clone, Subcommand)]
pub enum UserCommand {
    /// List users with live tickets, those with the most use first.
    #[command(after_help = end("user list --sort memory", &calls::LIST_USERS))]
    List(ListUsersCommand),
}

/// Arguments of `user list`.
#[derive(Debug, Clone, Args)]
pub struct ListUsersCommand {
    /// Dimension that orders the list: memory, cores, instances, queue_cores, special.NAME, ... Users without it are left out.
    #[arg(long, value_name = "DIMENSION", default_value = "instances")]
    sort: String,

    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::name("USER").key(),
    Column::number("TICKETS").key(),
    Column::number("LOCKED").key(),
    Column::number("IDLE"),
    Column::number("CORES").key(),
    Column::number("MEMORY").key(),
    Column::text("OTHER"),
];

listed!(LIST_USERS: ListUsersRequest => ListUsersResponse, users: UserUse, COLUMNS, |user| vec![row(user)]);

impl UserCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let Self::List(ListUsersCommand { sort, list }) = self;
        list.list(ListUsersRequest { dimension: sort, ..Default::default() }).await
    }
}

fn row(user: &UserUse) -> TableRow {
    let sums = user.dimensions.iter().map(|(key, sum)| (key.as_str(), sum.used.saturating_add(sum.locked)));
    let of = |dimension: Dimension| {
        let key = dimension.key();
        let sum = user.dimensions.get(&key).map_or(0, |sum| sum.used.saturating_add(sum.locked));
        text::amount(&dimension, sum)
    };
    let own = [Dimension::Cores, Dimension::Memory, Dimension::Instances].map(|dimension| dimension.key());
    let others = sums.filter(|(key, _)| !own.iter().any(|own| own == key));
    let others: Vec<String> = others.map(|(key, sum)| format!("{key}={}", text::amount_by_key(key, sum))).collect();
    cells![
        text::name(&user.user),
        user.used_tickets.saturating_add(user.locked_tickets).to_string(),
        user.locked_tickets.to_string(),
        user.idle_tickets.to_string(),
        of(Dimension::Cores),
        of(Dimension::Memory),
        text::or_nothing(&others.join(" ")),
    ]
}
