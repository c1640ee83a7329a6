//! `refusals`: refusal statistics by user, scope and limit.

use clap::Args;

use rm_proto::v1::{ListRefusalsRequest, ListRefusalsResponse, RefusalSum};

use super::{
    error::{CommandFailure, CommandReply},
    list::{ListArguments, listed},
    output::{
        table::{Cell, Column, TableRow, cells},
        text,
    },
    service_arguments::TimeRange,
    values,
};

/// Arguments of `refusals`.
#[derive(Debug, Clone, Args)]
pub struct ListRefusalsCommand {
    /// Only refusals of requests of this user.
    #[arg(long, value_parser = values::name)]
    user: Option<String>,

    /// Only refusals by this scope, as refusals and errors name it.
    #[arg(long)]
    scope: Option<String>,

    /// Only refusals in this dimension.
    #[arg(long)]
    dimension: Option<String>,

    #[command(flatten)]
    period: TimeRange,

    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::text("PERIOD").key(),
    Column::name("USER").key(),
    Column::em("REFUSED BY").key(),
    Column::text("SHORT OF").key(),
    Column::number("TIMES").key(),
    Column::number("WANTED"),
    Column::number("FREE"),
    Column::number("LAST"),
    Column::name("LIMIT"),
];

listed!(LIST_REFUSALS: ListRefusalsRequest => ListRefusalsResponse, refusals: RefusalSum, COLUMNS, |sum| vec![row(sum)]);

impl ListRefusalsCommand {
    /// Lists the refusals.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let question = ListRefusalsRequest {
            user: self.user.unwrap_or_default(),
            scope: self.scope.unwrap_or_default(),
            dimension: self.dimension.unwrap_or_default(),
            from_time: self.period.since,
            to_time: self.period.until,
            ..Default::default()
        };
        self.list.list(question).await
    }
}

fn row(sum: &RefusalSum) -> TableRow {
    let shown = |amount| text::amount_by_key(&sum.dimension, amount);
    let (user, scope) = match sum.others {
        true => ("(others)".to_owned(), "(others)".to_owned()),
        false => (text::name_or_nothing(&sum.user), text::scope(&sum.scope)),
    };
    cells![
        Cell::Period(sum.period_start),
        user,
        scope,
        sum.dimension.clone(),
        sum.refusals.to_string(),
        shown(sum.last_requested),
        shown(sum.last_available),
        sum.last_time.as_ref(),
        text::or_nothing(&sum.rule),
    ]
}
