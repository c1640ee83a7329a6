//! `hold`: operator locks on EMs and users.

use std::time::Duration;

use clap::{Args, Subcommand};

use crate::config::parse_duration;
use rm_client::calls;
use rm_proto::v1::{EmInstance, HoldRequest, ListHoldsRequest, ListHoldsResponse, ReleaseHoldRequest, ResourceHold};

use super::{
    consent,
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    named::{EmName, find_em},
    output::{
        table::{Column, TableRow, cells},
        text,
    },
    service::TIMEOUT,
    service_arguments::ServiceArguments,
    values,
};

/// Verbs of `hold`.
#[derive(Debug, Clone, Subcommand)]
pub enum HoldCommand {
    /// List holds.
    #[command(after_help = end("hold list", &calls::LIST_HOLDS))]
    List(ListHoldsCommand),
    /// Block changes of an EM or user for up to ten minutes. Exit code 1 if another caller holds it.
    #[command(after_help = end("hold add --user alice --for 5m --reason \"a check of the limits\"", &calls::HOLD))]
    Add(AddHoldCommand),
    /// End a hold before its deadline. Exit code 1 if there is none.
    #[command(after_help = end("hold release --user alice", &calls::RELEASE_HOLD))]
    Release(ReleaseHoldCommand),
}

impl HoldCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
            Self::Add(command) => command.run().await,
            Self::Release(command) => command.run().await,
        }
    }
}

/// The EM or user of a hold.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub struct HoldTarget {
    /// The EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(long, value_parser = EmName::parse)]
    em: Option<EmName>,

    /// The user, on all EMs.
    #[arg(long, value_parser = values::name)]
    user: Option<String>,
}

/// Returns the EM or the user of a hold, for display.
fn target(em: Option<&EmInstance>, user: &str) -> String {
    if em.is_some() { text::em(em) } else { format!("user {}", text::name(user)) }
}

/// Arguments of `hold add`.
#[derive(Debug, Clone, Args)]
pub struct AddHoldCommand {
    #[command(flatten)]
    which: HoldTarget,

    /// Duration, at most 10m.
    #[arg(long = "for", value_name = "DURATION", value_parser = length)]
    duration: Duration,

    /// Reason, shown to the callers that wait.
    #[arg(long)]
    reason: Option<String>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `hold release`.
#[derive(Debug, Clone, Args)]
pub struct ReleaseHoldCommand {
    #[command(flatten)]
    which: HoldTarget,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `hold list`.
#[derive(Debug, Clone, Args)]
pub struct ListHoldsCommand {
    #[command(flatten)]
    list: ListArguments,
}

fn length(text: &str) -> Result<Duration, String> {
    parse_duration("--for", text, "1ms", "10m")
}

const COLUMNS: &[Column] = &[
    Column::name("WHAT").key(),
    Column::number("UNTIL").key(),
    Column::name("BY"),
    Column::text("REASON"),
    Column::number("SINCE"),
];

listed!(whole LIST_HOLDS: ListHoldsRequest => ListHoldsResponse, holds: ResourceHold, COLUMNS, |hold| vec![row(hold)]);

impl ListHoldsCommand {
    /// Lists the holds.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        self.list.list(ListHoldsRequest {}).await
    }
}

impl AddHoldCommand {
    /// Starts the hold.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let reason = consent::reason(self.reason.as_deref())?;
        let duration = prost_types::Duration::try_from(self.duration).ok();
        let (em, user) = (find_em(self.which.em.as_ref(), &service).await?, self.which.user.unwrap_or_default());
        let question = HoldRequest { em: em.clone(), user: user.clone(), duration, reason };
        let answer = service.make_slowly("waiting for transactions in progress", &calls::HOLD, &question).await?;
        let held = || {
            let hold = answer.hold.clone().unwrap_or_default();
            format!("{} is held until {}\n", target(em.as_ref(), &user), text::time(hold.hold_until.as_ref()))
        };
        self.arguments.printer().answer(&calls::HOLD, &answer, held)?;
        Ok(CommandReply::Yes)
    }
}

impl ReleaseHoldCommand {
    /// Ends the hold.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let (em, user) = (find_em(self.which.em.as_ref(), &service).await?, self.which.user.unwrap_or_default());
        let question = ReleaseHoldRequest { em: em.clone(), user: user.clone() };
        let answer = service.make(&calls::RELEASE_HOLD, &question).await?;
        let done = if answer.was_held { "is not held any more" } else { "was not held" };
        let text = || format!("{} {done}\n", target(em.as_ref(), &user));
        self.arguments.printer().answer(&calls::RELEASE_HOLD, &answer, text)?;
        Ok(CommandReply::yes_if(answer.was_held))
    }
}

fn row(hold: &ResourceHold) -> TableRow {
    let by = if hold.held_by.is_empty() { "hand, in linkis_resource_lock" } else { &hold.held_by };
    cells![
        target(hold.em.as_ref(), &hold.user),
        hold.hold_until.as_ref(),
        by,
        text::or_nothing(&hold.reason),
        hold.hold_time.as_ref(),
    ]
}
