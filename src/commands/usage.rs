//! `usage`: use over time, by user, creator, engine type or EM.

use clap::{Args, ValueEnum};

use crate::transport::proto::{GetUsageRequest, GetUsageResponse, UsageBy, UsageSum};

use super::{
    asking::Period,
    failure::{Answer, Failure},
    list::{ListArguments, listed},
    output::{
        table::{Column, Row},
        text,
    },
};

/// Grouping of the sums.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum By {
    User,
    Creator,
    EngineType,
    Em,
}

/// Arguments of `usage`.
#[derive(Debug, Clone, Args)]
pub struct Usage {
    /// By what it is summed.
    #[arg(long, value_enum, default_value = "user")]
    by: By,

    #[command(flatten)]
    period: Period,

    /// Tell each hour apart.
    #[arg(long)]
    hourly: bool,

    /// Only of this user; by user alone.
    #[arg(long)]
    user: Option<String>,

    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::text("NAME"),
    Column::text("HOUR"),
    Column::number("TICKETS"),
    Column::number("CORE HOURS"),
    Column::number("GB HOURS"),
    Column::number("QUEUE CORE HOURS"),
    Column::number("QUEUE GB HOURS"),
];

listed!(GET_USAGE: GetUsageRequest => GetUsageResponse, sums: UsageSum, COLUMNS, |sum| vec![row(sum)]);

impl Usage {
    /// Lists the use.
    pub async fn run(self) -> Result<Answer, Failure> {
        let by = match self.by {
            By::User => UsageBy::User,
            By::Creator => UsageBy::Creator,
            By::EngineType => UsageBy::EngineType,
            By::Em => UsageBy::Em,
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

fn row(sum: &UsageSum) -> Row {
    const HOUR: f64 = 3600.0;
    const GB: f64 = (1_u64 << 30) as f64;
    let name = match &sum.em {
        _ if sum.others => "(others)".to_owned(),
        Some(em) => text::em(Some(em)),
        None => text::or_nothing(&sum.name),
    };
    vec![
        name,
        text::time(sum.hour.as_ref()),
        sum.tickets.to_string(),
        format!("{:.1}", sum.core_seconds / HOUR),
        format!("{:.1}", sum.byte_seconds / GB / HOUR),
        format!("{:.1}", sum.queue_core_seconds / HOUR),
        format!("{:.1}", sum.queue_byte_seconds / GB / HOUR),
    ]
}
