//! `overview`: cluster totals.

use std::{collections::BTreeMap, fmt::Write as _};

use clap::Args;

use rm_client::calls;
use rm_proto::v1::{DimensionTotals, EmState, GetOverviewRequest, LineTotals, Overview as Message, TicketTotals};

use super::{
    ems::percent,
    error::{CommandFailure, CommandReply},
    output::{
        Printer,
        table::{Column, TableRow, TextTable, cells},
        text,
    },
    scopes,
    service::{ServiceClient, TIMEOUT},
    service_arguments::PollArguments,
};

/// Arguments of `overview`.
#[derive(Debug, Clone, Args)]
pub struct OverviewCommand {
    #[command(flatten)]
    watching: PollArguments,
}

const DIMENSIONS: &[Column] = &[
    Column::text("DIMENSION").key(),
    Column::number("FULL").key(),
    Column::number("USED").key(),
    Column::number("IDLE"),
    Column::number("LOCKED").key(),
    Column::number("LEFT").key(),
    Column::number("PROTECTED"),
    Column::number("TOTAL"),
];

impl OverviewCommand {
    /// Shows the overview.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let show = async |service: &ServiceClient, printer: &mut Printer| {
            let answer = service.make(&calls::GET_OVERVIEW, &GetOverviewRequest {}).await?;
            if printer.is_json() {
                return printer.answer(&calls::GET_OVERVIEW, &answer, String::new);
            }
            let overview = answer.overview.unwrap_or_default();
            let (totals, fullest) = (printer.table(DIMENSIONS), printer.table(scopes::COLUMNS));
            printer.print(&overview_text(&overview, totals, fullest))
        };
        self.watching.rounds(TIMEOUT, show).await?;
        Ok(CommandReply::Yes)
    }
}

/// Returns the totals of all EMs by dimension.
pub fn totals(overview: &Message) -> BTreeMap<&str, DimensionTotals> {
    let mut totals: BTreeMap<&str, DimensionTotals> = BTreeMap::new();
    for (dimension, some) in overview.ems.iter().flat_map(|ems| &ems.dimensions) {
        let all = totals.entry(dimension).or_default();
        all.total = all.total.saturating_add(some.total);
        all.protected_amount = all.protected_amount.saturating_add(some.protected_amount);
        all.used = all.used.saturating_add(some.used);
        all.locked = all.locked.saturating_add(some.locked);
        all.left = all.left.saturating_add(some.left);
    }
    totals
}

/// Returns used + locked in percent of the grantable amount.
pub fn fullness(totals: &DimensionTotals) -> Option<i64> {
    percent(totals.used.saturating_add(totals.locked), totals.total.saturating_sub(totals.protected_amount))
}

/// Returns the number of EMs, in total and by state.
pub fn ems_text(overview: &Message) -> String {
    let mut states: BTreeMap<i32, i64> = BTreeMap::new();
    for ems in &overview.ems {
        *states.entry(ems.state).or_default() += ems.ems;
    }
    let word = |state: i32| match EmState::try_from(state) {
        Ok(EmState::Healthy) => "healthy",
        Ok(EmState::Unreported) => "unreported",
        Ok(EmState::Warn) => "warn",
        Ok(EmState::Unhealthy) => "unhealthy",
        Ok(EmState::Draining) => "drained",
        Ok(EmState::Silent) => "silent",
        Ok(EmState::Unregistering) => "unregistering",
        Ok(EmState::Unspecified) | Err(_) => "otherwise",
    };
    let count: i64 = states.values().sum();
    let states: Vec<String> = states.iter().map(|(state, count)| format!("{count} {}", word(*state))).collect();
    if states.is_empty() { "none registered".to_owned() } else { format!("{count}: {}", states.join(", ")) }
}

/// Returns the number of live tickets.
pub fn tickets_text(tickets: &TicketTotals) -> String {
    let more = if tickets.locked_partial { " or more" } else { "" };
    format!("{} used, {}{more} locked", tickets.used, tickets.locked)
}

/// Returns the number of waiting requests and the longest wait.
pub fn line_text(line: &LineTotals) -> String {
    let longest = line.longest_wait.map(|longest| format!(", longest {}", text::seconds(longest.seconds)));
    format!("{}{}", line.waiting, longest.unwrap_or_default())
}

fn overview_text(overview: &Message, mut dimensions: TextTable, mut fullest: TextTable) -> String {
    let tickets = overview.tickets.clone().unwrap_or_default();
    let line = overview.line.unwrap_or_default();
    let throughput = overview.throughput.unwrap_or_default();
    let of_scopes = overview.scopes.clone().unwrap_or_default();
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "At          {}", text::time(overview.snapshot_time.as_ref()));
    let _ = writeln!(text, "EMs         {}", ems_text(overview));
    let _ = write!(text, "Tickets     {}", tickets_text(&tickets));
    let oldest = tickets.oldest_locked.as_ref().map(|oldest| text::time(oldest.locked_time.as_ref()));
    let _ = writeln!(text, "{}", oldest.map_or_else(String::new, |oldest| format!(", the first since {oldest}")));
    let _ = writeln!(text, "Waiting     {}", line_text(&line));
    let _ = writeln!(text, "Grants/s    {:.1}", throughput.grants_per_second);
    let _ = writeln!(text, "Refusals/s  {:.1}", throughput.refusals_per_second);
    let _ = writeln!(text, "Scopes      {}, {} over their limits", of_scopes.scopes, of_scopes.over_limit);
    let idle = |dimension: &str| tickets.idle_amounts.get(dimension).copied().unwrap_or_default();
    let rows: Vec<TableRow> =
        totals(overview).into_iter().map(|(dimension, totals)| row(dimension, &totals, idle(dimension))).collect();
    if !rows.is_empty() {
        let _ = write!(text, "\n{}", dimensions.rows(&rows));
    }
    let rows: Vec<TableRow> = of_scopes.fullest.iter().flat_map(scopes::rows).collect();
    if !rows.is_empty() {
        let _ = write!(text, "\n{}", fullest.rows(&rows));
    }
    text
}

fn row(dimension: &str, totals: &DimensionTotals, idle: i64) -> TableRow {
    let shown = |amount| text::amount_by_key(dimension, amount);
    cells![
        dimension,
        fullness(totals).map_or_else(|| text::NOTHING.to_owned(), |full| format!("{full}%")),
        shown(totals.used),
        shown(idle),
        shown(totals.locked),
        shown(totals.left),
        shown(totals.protected_amount),
        shown(totals.total),
    ]
}
