//! `usage`: use over time, by user, creator, engine type or EM.

use clap::{Args, ValueEnum};

use rm_proto::v1::{GetUsageRequest, GetUsageResponse, UsageBy, UsageSum};

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

/// Grouping of the sums.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum UsageGroupBy {
    User,
    Creator,
    EngineType,
    Em,
}

/// Arguments of `usage`.
#[derive(Debug, Clone, Args)]
pub struct UsageCommand {
    /// Grouping of the sums.
    #[arg(long, value_enum, default_value = "user")]
    by: UsageGroupBy,

    #[command(flatten)]
    period: TimeRange,

    /// Print a sum for each hour.
    #[arg(long)]
    hourly: bool,

    /// Only this user, with --by user.
    #[arg(long, value_parser = values::name)]
    user: Option<String>,

    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::name("NAME").key(),
    Column::text("HOUR").key(),
    Column::number("TICKETS").key(),
    Column::number("CORE HOURS"),
    Column::number("GB HOURS"),
    Column::number("QUEUE CORE HOURS"),
    Column::number("QUEUE GB HOURS"),
];

listed!(GET_USAGE: GetUsageRequest => GetUsageResponse, sums: UsageSum, COLUMNS, |sum| vec![row(sum)]);

impl UsageCommand {
    /// Lists the use.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let by = match self.by {
            UsageGroupBy::User => UsageBy::User,
            UsageGroupBy::Creator => UsageBy::Creator,
            UsageGroupBy::EngineType => UsageBy::EngineType,
            UsageGroupBy::Em => UsageBy::Em,
        };
        let question = GetUsageRequest {
            by: by.into(),
            from_time: self.period.since,
            to_time: self.period.until,
            hourly: self.hourly,
            user: self.user.unwrap_or_default(),
            ..Default::default()
        };
        self.list.list(question).await
    }
}

fn row(sum: &UsageSum) -> TableRow {
    const HOUR: f64 = 3600.0;
    const GB: f64 = (1_u64 << 30) as f64;
    let name = match &sum.em {
        _ if sum.others => "(others)".to_owned(),
        Some(em) => text::em(Some(em)),
        None => text::name_or_nothing(&sum.name),
    };
    cells![
        name,
        Cell::Period(sum.hour),
        sum.tickets.to_string(),
        format!("{:.1}", sum.core_seconds / HOUR),
        format!("{:.1}", sum.byte_seconds / GB / HOUR),
        format!("{:.1}", sum.queue_core_seconds / HOUR),
        format!("{:.1}", sum.queue_byte_seconds / GB / HOUR),
    ]
}
