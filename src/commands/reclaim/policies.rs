//! `reclaim policy`: rules by which engines are taken back.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::{
    commands::{
        consent::Consent,
        error::{CommandFailure, CommandReply},
        help::end,
        limits::{labelled, labels_name},
        list::{ListArguments, listed},
        output::{
            table::{Column, TableRow, cells, details},
            text,
        },
        service::{ServiceClient, TIMEOUT, TIMEOUT_LONG},
        service_arguments::ServiceArguments,
    },
    config::parse_duration,
};
use rm_client::calls;
use rm_edge::convert::limit;
use rm_model::reclaim::MIN_LIFE;
use rm_proto::v1::{
    DeleteReclaimPolicyRequest, ListReclaimPoliciesRequest, ListReclaimPoliciesResponse, ReclaimMode, ReclaimPolicy,
    SetReclaimPolicyRequest,
};

/// Verbs of `reclaim policy`.
#[derive(Debug, Clone, Subcommand)]
pub enum ReclaimPolicyCommand {
    /// List the reclaim policies, in the order in which they are compared.
    #[command(after_help = end("reclaim policy list", &calls::LIST_RECLAIM_POLICIES))]
    List(ListReclaimPoliciesCommand),
    /// Set when the engines of the tickets with some labels are taken back. Shows what it replaces, for a confirmation.
    #[command(after_help = end("reclaim policy set creator=IDE --mode advise --idle-after 5m", &calls::SET_RECLAIM_POLICY))]
    Set(SetReclaimPolicyCommand),
    /// Delete a reclaim policy. Exit code 1 if there is none.
    #[command(after_help = end("reclaim policy delete creator=IDE", &calls::DELETE_RECLAIM_POLICY))]
    Delete(DeleteReclaimPolicyCommand),
}

impl ReclaimPolicyCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(ListReclaimPoliciesCommand { list }) => list.list(ListReclaimPoliciesRequest {}).await,
            Self::Set(command) => command.run().await,
            Self::Delete(command) => command.run().await,
        }
    }
}

/// Arguments of `reclaim policy list`.
#[derive(Debug, Clone, Args)]
pub struct ListReclaimPoliciesCommand {
    #[command(flatten)]
    list: ListArguments,
}

/// Effect of a policy.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ReclaimModeName {
    /// No ticket is chosen
    Off,
    /// The chosen tickets are only listed
    Observe,
    /// After the grace period, a history line requests the end of the engine
    Advise,
    /// Also the reply to the heartbeat of the EM names the ticket
    Stop,
}

impl From<ReclaimModeName> for ReclaimMode {
    fn from(mode: ReclaimModeName) -> Self {
        match mode {
            ReclaimModeName::Off => Self::Off,
            ReclaimModeName::Observe => Self::Observe,
            ReclaimModeName::Advise => Self::Advise,
            ReclaimModeName::Stop => Self::Stop,
        }
    }
}

/// Arguments of `reclaim policy set`.
#[derive(Debug, Clone, Args)]
#[group(id = "change", required = true, multiple = true, args = ["mode", "idle_after", "grace", "per_minute", "busy", "min_life"])]
pub struct SetReclaimPolicyCommand {
    /// Labels of the tickets: creator=IDE, or user=hadoop,creator=IDE for both together; "each user" for all users.
    #[arg(required = true, value_name = "LABELS")]
    labels: Vec<String>,

    /// Effect [default: as now; required in a new policy].
    #[arg(long, value_enum)]
    mode: Option<ReclaimModeName>,

    /// Time without a task after which a ticket can be chosen: 1s to 1d [default: as now, 5m in a new policy].
    #[arg(long, value_name = "DURATION", value_parser = |text: &str| parse_duration("--idle-after", text, "1s", "1d"))]
    idle_after: Option<Duration>,

    /// Time from the choice of a ticket to the end of its engine: 1s to 1d [default: as now, 30s in a new policy].
    #[arg(long, value_name = "DURATION", value_parser = |text: &str| parse_duration("--grace", text, "1s", "1d"))]
    grace: Option<Duration>,

    /// Maximum number of tickets that are recalled within a minute: 1 to 100000 [default: as now, 60 in a new policy].
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i32).range(1..=100_000))]
    per_minute: Option<i32>,

    /// Take back engines that run tasks, too, for entitled requests [default: as now, false in a new policy].
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    busy: Option<bool>,

    /// Time from the grant of a ticket after which its busy engine can be chosen: 1s to 1d [default: as now, 10m in a new policy].
    #[arg(long, value_name = "DURATION", value_parser = |text: &str| parse_duration("--min-life", text, "1s", "1d"))]
    min_life: Option<Duration>,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `reclaim policy delete`.
#[derive(Debug, Clone, Args)]
pub struct DeleteReclaimPolicyCommand {
    /// Labels of the policy, as reclaim policy list prints them: creator=IDE, or "each user".
    #[arg(required = true, value_name = "LABELS")]
    labels: Vec<String>,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

const COLUMNS: &[Column] = &[
    Column::name("TICKETS").key(),
    Column::text("MODE").key(),
    Column::text("IDLE AFTER").key(),
    Column::text("GRACE").key(),
    Column::number("PER MINUTE").key(),
    Column::text("BUSY AFTER").key(),
];

listed!(whole LIST_RECLAIM_POLICIES: ListReclaimPoliciesRequest => ListReclaimPoliciesResponse, policies: ReclaimPolicy, COLUMNS, |policy| vec![row(policy)]);

impl SetReclaimPolicyCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let named = policy(&self.labels)?;
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let before = find(&service, &named).await?;
        if before.is_none() && self.mode.is_none() {
            let shown = policy_name(&named);
            return Err(CommandFailure::Usage(format!(
                "--mode: is required, because no reclaim policy has the labels {shown} yet"
            )));
        }
        let stored = before.clone().unwrap_or_default();
        let time = |time: Option<Duration>| prost_types::Duration::try_from(time?).ok();
        let policy = ReclaimPolicy {
            mode: self.mode.map_or(stored.mode, |mode| ReclaimMode::from(mode).into()),
            idle_after: time(self.idle_after).or(stored.idle_after),
            grace: time(self.grace).or(stored.grace),
            per_minute: self.per_minute.unwrap_or(stored.per_minute),
            busy: self.busy.unwrap_or(stored.busy),
            min_life: time(self.min_life).or(stored.min_life),
            ..named
        };
        // With the values of a new policy.
        let policy = limit::reclaim_policy_message(&limit::new_reclaim_policy("policy", Some(&policy))?);
        let new = details(COLUMNS, &row(&policy));
        let before = before.map(|before| details(COLUMNS, &row(&before)));
        let reason = self.consent.confirm_change(before.as_deref(), &new)?;
        let question = SetReclaimPolicyRequest { policy: Some(policy), reason };
        let reply = service.make_slowly("setting the reclaim policy", &calls::SET_RECLAIM_POLICY, &question).await?;
        self.arguments.printer().answer(&calls::SET_RECLAIM_POLICY, &reply, || new)?;
        Ok(CommandReply::Yes)
    }
}

impl DeleteReclaimPolicyCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let policy = policy(&self.labels)?;
        let shown = policy_name(&policy);
        let service = self.arguments.service(TIMEOUT)?;
        let reason = self.consent.confirm(&format!("Delete the reclaim policy {shown}?"))?;
        let question = DeleteReclaimPolicyRequest { policy: Some(policy), reason };
        let reply = service.make(&calls::DELETE_RECLAIM_POLICY, &question).await?;
        let done = || format!("deleted the reclaim policy {shown}\n");
        self.arguments.printer().answer(&calls::DELETE_RECLAIM_POLICY, &reply, done)?;
        Ok(CommandReply::Yes)
    }
}

/// Returns a policy with these labels, as in limits.
fn policy(labels: &[String]) -> Result<ReclaimPolicy, CommandFailure> {
    let limit = labelled(labels)?;
    Ok(ReclaimPolicy { labels: limit.labels, each: limit.each, ..Default::default() })
}

/// Returns the stored policy with the labels of `policy`.
async fn find(service: &ServiceClient, policy: &ReclaimPolicy) -> Result<Option<ReclaimPolicy>, CommandFailure> {
    let stored = service.make(&calls::LIST_RECLAIM_POLICIES, &ListReclaimPoliciesRequest {}).await?.policies;
    let pattern = |policy: &ReclaimPolicy| limit::reclaim_pattern("policy", Some(policy)).ok();
    Ok(stored.into_iter().find(|known| pattern(known) == pattern(policy)))
}

fn policy_name(policy: &ReclaimPolicy) -> String {
    labels_name(&policy.labels, &policy.each, &policy.name)
}

/// Returns the name and the values of a policy in one line.
pub fn written_policy(policy: &ReclaimPolicy) -> (String, String) {
    let [idle_after, grace] = [&policy.idle_after, &policy.grace].map(|time| text::duration(time.as_ref()));
    let times = format!("idle after {idle_after}, grace {grace}, {} per minute", policy.per_minute);
    let busy = busy_after(policy);
    let busy = if busy == text::NOTHING { String::new() } else { format!(", busy after {busy}") };
    (policy_name(policy), format!("{}, {times}{busy}", mode(policy)))
}

fn mode(policy: &ReclaimPolicy) -> &'static str {
    match policy.mode() {
        ReclaimMode::Unspecified => text::NOTHING,
        ReclaimMode::Off => "off",
        ReclaimMode::Observe => "observe",
        ReclaimMode::Advise => "advise",
        ReclaimMode::Stop => "stop",
    }
}

fn row(policy: &ReclaimPolicy) -> TableRow {
    let [idle_after, grace] = [&policy.idle_after, &policy.grace].map(|time| text::duration(time.as_ref()));
    let per_minute = policy.per_minute.to_string();
    cells![policy_name(policy), mode(policy).to_owned(), idle_after, grace, per_minute, busy_after(policy)]
}

/// Returns the time after which busy engines end; nothing if they do not, and the time is that of a new policy.
fn busy_after(policy: &ReclaimPolicy) -> String {
    let is_default = |time: &prost_types::Duration| Duration::try_from(*time).is_ok_and(|time| time == MIN_LIFE);
    match policy.min_life.as_ref() {
        min_life if policy.busy => text::duration(min_life),
        Some(min_life) if !is_default(min_life) => format!("never ({})", text::duration(Some(min_life))),
        _ => text::NOTHING.to_owned(),
    }
}
