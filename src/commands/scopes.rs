//! `scope`: use of limited scopes.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_model::resource::Dimension;
use rm_proto::v1::{GetScopeRequest, Limit, LimitMode, ListScopesRequest, ListScopesResponse, ScopeUsage};

use super::{
    ems::percent,
    error::{CommandFailure, CommandReply},
    help::end,
    limits,
    list::{ListArguments, listed},
    output::{
        Printer,
        table::{Column, TableRow, cells},
        text,
    },
    service::{ServiceClient, TIMEOUT},
    service_arguments::PollArguments,
    values,
};

/// Verbs of `scope`.
#[derive(Debug, Clone, Subcommand)]
pub enum ScopeCommand {
    /// List the use of users, creators and other labels, against their limits.
    #[command(after_help = end("scope list --fullest --limit 10", &calls::LIST_SCOPES))]
    List(ListScopesCommand),
    /// Show the use of one scope, by its labels. Exit code 1 if no limit counts by these labels.
    #[command(after_help = end("scope get user=hadoop", &calls::GET_SCOPE))]
    Get(GetScopeCommand),
}

impl ScopeCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
            Self::Get(command) => command.run().await,
        }
    }
}

/// Arguments of `scope list`.
#[derive(Debug, Clone, Args)]
pub struct ListScopesCommand {
    /// Only scopes with this label, KEY=VALUE. Repeatable.
    #[arg(long = "label", value_parser = values::label)]
    labels: Vec<(String, String)>,

    /// Only scopes above their limits.
    #[arg(long)]
    over: bool,

    /// Fullest first, without unused scopes and scopes without a maximum.
    #[arg(long)]
    fullest: bool,

    #[command(flatten)]
    list: ListArguments,
}

/// Arguments of `scope get`.
#[derive(Debug, Clone, Args)]
pub struct GetScopeCommand {
    /// Labels of the scope: KEY=VALUE, several with commas.
    #[arg(required = true, value_name = "LABELS", value_delimiter = ',', value_parser = values::label)]
    labels: Vec<(String, String)>,

    #[command(flatten)]
    watching: PollArguments,
}

impl GetScopeCommand {
    /// Shows the scope.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let question = GetScopeRequest { labels: self.labels.into_iter().collect() };
        let show = async |service: &ServiceClient, printer: &mut Printer| {
            let reply = service.make(&calls::GET_SCOPE, &question).await?;
            if printer.is_json() {
                return printer.answer(&calls::GET_SCOPE, &reply, String::new);
            }
            printer.rows(COLUMNS, &reply.scope.iter().flat_map(rows).collect::<Vec<_>>())
        };
        self.watching.rounds(TIMEOUT, show).await?;
        Ok(CommandReply::Yes)
    }
}

/// One row per limited dimension; for a scope without limits, one per used dimension.
pub const COLUMNS: &[Column] = &[
    Column::name("SCOPE").key(),
    Column::text("DIMENSION").key(),
    Column::number("FULL").key(),
    Column::number("USED").key(),
    Column::number("LOCKED").key(),
    Column::number("MAX").key(),
    Column::name("LIMIT"),
    Column::text("MODE").wide(),
    Column::text("OVER").wide(),
];

listed!(LIST_SCOPES: ListScopesRequest => ListScopesResponse, scopes: ScopeUsage, COLUMNS, rows);

impl ListScopesCommand {
    /// Lists the scopes.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let question = ListScopesRequest {
            labels: self.labels.into_iter().collect(),
            over_limit_only: self.over,
            fullest_first: self.fullest,
            ..Default::default()
        };
        self.list.list(question).await
    }
}

/// Returns the mode of a limit as a word.
pub fn mode(limit: &Limit) -> &'static str {
    match limit.mode() {
        LimitMode::Unspecified | LimitMode::Enforced => "enforced",
        LimitMode::Advisory => "advisory",
        LimitMode::Off => "off",
    }
}

/// Returns the maximum of each dimension of tickets with its deciding limit: the first that names the dimension.
pub fn maxima(scope: &ScopeUsage) -> BTreeMap<&str, (i64, &Limit)> {
    let mut maxima = BTreeMap::new();
    for limit in scope.limits.iter().rev().filter(|limit| limit.mode() != LimitMode::Off) {
        maxima.extend(limit.max.iter().map(|(dimension, max)| (dimension.as_str(), (*max, limit))));
    }
    maxima.remove(Dimension::Waiting.name());
    maxima
}

/// Returns the rows of a scope.
pub fn rows(scope: &ScopeUsage) -> Vec<TableRow> {
    let maxima = maxima(scope);
    let held = scope.used.keys().chain(scope.locked.keys()).map(String::as_str);
    let mut dimensions: Vec<&str> = if maxima.is_empty() { held.collect() } else { maxima.keys().copied().collect() };
    dimensions.sort_unstable();
    dimensions.dedup();
    let of = |amounts: &BTreeMap<String, i64>, dimension: &str| amounts.get(dimension).copied().unwrap_or(0);
    let row = |dimension: &str| {
        let (used, locked) = (of(&scope.used, dimension), of(&scope.locked, dimension));
        let decided = maxima.get(dimension);
        let full = decided.and_then(|(max, _)| percent(used.saturating_add(locked), *max));
        let nothing = || text::NOTHING.to_owned();
        cells![
            text::labels(&scope.labels),
            dimension.to_owned(),
            full.map_or_else(nothing, |full| format!("{full}%")),
            text::amount_by_key(dimension, used),
            text::amount_by_key(dimension, locked),
            decided.map_or_else(nothing, |(max, _)| text::amount_by_key(dimension, *max)),
            decided.map_or_else(nothing, |(_, limit)| limits::name(limit)),
            decided.map_or_else(nothing, |(_, limit)| mode(limit).to_owned()),
            if scope.over_limit { "over".to_owned() } else { nothing() },
        ]
    };
    dimensions.into_iter().map(row).collect()
}
