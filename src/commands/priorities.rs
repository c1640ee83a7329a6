//! `priority`: the priorities of waiting requests.

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_edge::convert;
use rm_proto::v1::{
    DeletePriorityRequest, ListPrioritiesRequest, ListPrioritiesResponse, Priority, SetPriorityRequest,
};

use super::{
    consent::Consent,
    error::{CommandFailure, CommandReply},
    help::end,
    limits::{labelled, labels_name},
    list::{ListArguments, listed},
    output::table::{Column, TableRow, cells, details},
    service::{ServiceClient, TIMEOUT, TIMEOUT_LONG},
    service_arguments::ServiceArguments,
};

/// Verbs of `priority`.
#[derive(Debug, Clone, Subcommand)]
pub enum PriorityCommand {
    /// List the priority rules, in the order in which they are compared.
    #[command(after_help = end("priority list", &calls::LIST_PRIORITIES))]
    List(ListPrioritiesCommand),
    /// Set the priorities of the requests with some labels. Requests that wait keep theirs. Shows what it replaces, for a confirmation.
    #[command(after_help = end("priority set creator=IDE --default 30 --max 60 --reason \"as agreed\"", &calls::SET_PRIORITY))]
    Set(SetPriorityCommand),
    /// Delete a priority rule. Exit code 1 if there is none.
    #[command(after_help = end("priority delete creator=IDE", &calls::DELETE_PRIORITY))]
    Delete(DeletePriorityCommand),
}

impl PriorityCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(ListPrioritiesCommand { list }) => list.list(ListPrioritiesRequest {}).await,
            Self::Set(command) => command.run().await,
            Self::Delete(command) => command.run().await,
        }
    }
}

/// Arguments of `priority list`.
#[derive(Debug, Clone, Args)]
pub struct ListPrioritiesCommand {
    #[command(flatten)]
    list: ListArguments,
}

/// Arguments of `priority set`.
#[derive(Debug, Clone, Args)]
#[group(id = "change", required = true, multiple = true, args = ["default", "max"])]
pub struct SetPriorityCommand {
    /// Labels of the rule: creator=IDE, or user=hadoop,creator=IDE for both together; "each user" for all users.
    #[arg(required = true, value_name = "LABELS")]
    labels: Vec<String>,

    /// Priority of requests that name none, in seconds: -600 to 600, at most --max [default: as now, 0 in a new rule].
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    default: Option<i32>,

    /// Maximum priority of a request, in seconds: -600 to 600 [default: as now, 0 in a new rule].
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    max: Option<i32>,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `priority delete`.
#[derive(Debug, Clone, Args)]
pub struct DeletePriorityCommand {
    /// Labels of the rule, as priority list prints them: creator=IDE, or "each user".
    #[arg(required = true, value_name = "LABELS")]
    labels: Vec<String>,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

const COLUMNS: &[Column] =
    &[Column::name("REQUESTS").key(), Column::number("DEFAULT").key(), Column::number("MAX").key()];

listed!(whole LIST_PRIORITIES: ListPrioritiesRequest => ListPrioritiesResponse, priorities: Priority, COLUMNS, |rule| vec![row(rule)]);

impl SetPriorityCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let named = rule(&self.labels)?;
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let before = find(&service, &named).await?;
        let stored = before.clone().unwrap_or_default();
        let rule = Priority {
            default_priority: self.default.unwrap_or(stored.default_priority),
            max_priority: self.max.unwrap_or(stored.max_priority),
            ..named
        };
        convert::limit::new_priority("priority", Some(&rule))?;
        let new = details(COLUMNS, &row(&rule));
        let before = before.map(|before| details(COLUMNS, &row(&before)));
        let reason = self.consent.confirm_change(before.as_deref(), &new)?;
        let question = SetPriorityRequest { priority: Some(rule.clone()), reason };
        let reply = service.make_slowly("setting the priority rule", &calls::SET_PRIORITY, &question).await?;
        self.arguments.printer().answer(&calls::SET_PRIORITY, &reply, || details(COLUMNS, &row(&rule)))?;
        Ok(CommandReply::Yes)
    }
}

impl DeletePriorityCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let rule = rule(&self.labels)?;
        let shown = rule_name(&rule);
        let service = self.arguments.service(TIMEOUT)?;
        let reason = self.consent.confirm(&format!("Delete the priority rule {shown}?"))?;
        let question = DeletePriorityRequest { priority: Some(rule), reason };
        let reply = service.make(&calls::DELETE_PRIORITY, &question).await?;
        let done = || format!("deleted the priority rule {shown}\n");
        self.arguments.printer().answer(&calls::DELETE_PRIORITY, &reply, done)?;
        Ok(CommandReply::Yes)
    }
}

/// Returns a rule with these labels, as in limits.
fn rule(labels: &[String]) -> Result<Priority, CommandFailure> {
    let limit = labelled(labels)?;
    Ok(Priority { labels: limit.labels, each: limit.each, ..Default::default() })
}

/// Returns the stored rule with the labels of `rule`.
async fn find(service: &ServiceClient, rule: &Priority) -> Result<Option<Priority>, CommandFailure> {
    let stored = service.make(&calls::LIST_PRIORITIES, &ListPrioritiesRequest {}).await?.priorities;
    let pattern = |rule: &Priority| convert::limit::priority_pattern("priority", Some(rule)).ok();
    Ok(stored.into_iter().find(|known| pattern(known) == pattern(rule)))
}

fn rule_name(rule: &Priority) -> String {
    labels_name(&rule.labels, &rule.each, &rule.name)
}

/// Returns the name and the values of a rule in one line.
pub(super) fn written(rule: &Priority) -> (String, String) {
    (rule_name(rule), format!("default {}s, max {}s", rule.default_priority, rule.max_priority))
}

fn row(rule: &Priority) -> TableRow {
    let [default, max] = [rule.default_priority, rule.max_priority].map(|seconds| format!("{seconds}s"));
    cells![rule_name(rule), default, max]
}

/// Reads seconds as tables print them: 60s, or 60.
fn seconds(text: &str) -> Result<i32, String> {
    let number = text.strip_suffix('s').unwrap_or(text);
    number.parse().map_err(|_| "is no number of seconds, such as 60 or -300".to_owned())
}
