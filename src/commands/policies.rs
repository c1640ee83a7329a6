//! `policy`: the limits that apply to each kind of EM.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::config::parse_duration;
use rm_client::calls;
use rm_proto::v1::{Check, ListPoliciesRequest, ListPoliciesResponse, Placement, Policy, SetPolicyRequest};

use super::{
    consent::Confirmation,
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    output::{
        table::{Column, TableRow, cells, details},
        text,
    },
    service::TIMEOUT_LONG,
    service_arguments::ServiceArguments,
    values,
};

/// Verbs of `policy`.
#[derive(Debug, Clone, Subcommand)]
pub enum PolicyCommand {
    /// List the limits of each kind of EM.
    #[command(after_help = end("policy list", &calls::LIST_POLICIES))]
    List(ListPoliciesCommand),
    /// Set the limits, the labels and the placement of a kind of EM. Shows what it replaces, for a confirmation.
    #[command(after_help = end("policy set session-manager --checks labels", &calls::SET_POLICY))]
    Set(SetPolicyCommand),
}

impl PolicyCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
            Self::Set(command) => command.run().await,
        }
    }
}

/// Arguments of `policy list`.
#[derive(Debug, Clone, Args)]
pub struct ListPoliciesCommand {
    #[command(flatten)]
    list: ListArguments,
}

/// Limits that a policy applies.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum CheckName {
    Creator,
    User,
    Labels,
}

/// Selection among EMs.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum PlacementName {
    Spread,
    Pack,
}

/// Arguments of `policy set`.
#[derive(Debug, Clone, Args)]
pub struct SetPolicyCommand {
    /// Application of the EMs.
    #[arg(value_name = "KIND", value_parser = values::name)]
    em_application: String,

    /// Limits that apply, with commas: those of creators alone, of users alone, and of other labels [default: none].
    #[arg(long, value_enum, value_delimiter = ',')]
    checks: Vec<CheckName>,

    /// Label that requests to these EMs must carry. Repeatable.
    #[arg(long = "required-label", value_name = "KEY")]
    required_labels: Vec<String>,

    /// Selection among these EMs.
    #[arg(long, value_enum, default_value = "spread")]
    placement: PlacementName,

    /// Age until which an EM is new, and spread grants on it at most twice the mean of the others: 1s to 1d, or 0s for never.
    #[arg(long, value_name = "DURATION", value_parser = new_after, default_value = "60s")]
    em_new_after: Duration,

    #[command(flatten)]
    confirmation: Confirmation,

    #[command(flatten)]
    arguments: ServiceArguments,
}

fn new_after(text: &str) -> Result<Duration, String> {
    parse_duration("--em-new-after", text, "0s", "1d")
}

const COLUMNS: &[Column] = &[
    Column::name("KIND OF EM").key(),
    Column::text("CHECKS"),
    Column::text("PLACEMENT"),
    Column::text("NEW FOR"),
    Column::text("REQUIRED LABELS"),
];

listed!(whole LIST_POLICIES: ListPoliciesRequest => ListPoliciesResponse, policies: Policy, COLUMNS, |policy| vec![row(policy)]);

impl ListPoliciesCommand {
    /// Lists the policies.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        self.list.list(ListPoliciesRequest {}).await
    }
}

impl SetPolicyCommand {
    /// Shows what the policy replaces, and sets it.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let check = |name: &CheckName| match name {
            CheckName::Creator => Check::Creator,
            CheckName::User => Check::User,
            CheckName::Labels => Check::Labels,
        };
        let placement = match self.placement {
            PlacementName::Spread => Placement::Spread,
            PlacementName::Pack => Placement::Pack,
        };
        let policy = Policy {
            em_application_name: self.em_application,
            checks: self.checks.iter().map(|name| check(name).into()).collect(),
            required_labels: self.required_labels,
            placement: placement.into(),
            em_new_after: prost_types::Duration::try_from(self.em_new_after).ok(),
        };
        let known = service.make(&calls::LIST_POLICIES, &ListPoliciesRequest {}).await?.policies;
        if let Some(before) = known.iter().find(|known| known.em_application_name == policy.em_application_name) {
            let (now, new) = (details(COLUMNS, &row(before)), details(COLUMNS, &row(&policy)));
            self.confirmation.confirm(&format!("now\n{now}new\n{new}Change it?"))?;
        }
        let question = SetPolicyRequest { policy: Some(policy.clone()) };
        let reply = service.make_slowly("setting the policy", &calls::SET_POLICY, &question).await?;
        self.arguments.printer().answer(&calls::SET_POLICY, &reply, || details(COLUMNS, &row(&policy)))?;
        Ok(CommandReply::Yes)
    }
}

fn row(policy: &Policy) -> TableRow {
    let check = |check| match check {
        Check::Creator => Some("creator"),
        Check::User => Some("user"),
        Check::Labels => Some("labels"),
        Check::Unspecified => None,
    };
    let checks: Vec<&str> = policy.checks().filter_map(check).collect();
    let placement = match policy.placement() {
        Placement::Pack => "pack",
        Placement::Spread | Placement::Unspecified => "spread",
    };
    cells![
        text::name(&policy.em_application_name),
        text::or_nothing(&checks.join(",")),
        placement.to_owned(),
        policy.em_new_after.map_or_else(|| text::NOTHING.to_owned(), |age| text::seconds(age.seconds)),
        text::list(&policy.required_labels),
    ]
}
