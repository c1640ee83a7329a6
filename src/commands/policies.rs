//! `policy`: the limits that apply to each kind of EM.

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_proto::v1::{Check, ListPoliciesRequest, ListPoliciesResponse, Placement, Policy};

use super::{
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    output::{
        table::{Column, TableRow, cells},
        text,
    },
};

/// Verbs of `policy`.
#[derive(Debug, Clone, Subcommand)]
pub enum PolicyCommand {
    /// List the limits of each kind of EM.
    #[command(after_help = end("policy list", &calls::LIST_POLICIES))]
    List(ListPoliciesCommand),
}

impl PolicyCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
        }
    }
}

/// Arguments of `policy list`.
#[derive(Debug, Clone, Args)]
pub struct ListPoliciesCommand {
    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::name("KIND OF EM").key(),
    Column::text("CHECKS"),
    Column::text("PLACEMENT"),
    Column::text("REQUIRED LABELS"),
];

listed!(whole LIST_POLICIES: ListPoliciesRequest => ListPoliciesResponse, policies: Policy, COLUMNS, |policy| vec![row(policy)]);

impl ListPoliciesCommand {
    /// Lists the policies.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        self.list.list(ListPoliciesRequest {}).await
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
        text::list(&policy.required_labels),
    ]
}
