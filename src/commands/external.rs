//! `queue`, `application`: content of external clusters.

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_proto::v1::{
    Application, GetQueueRequest, ListApplicationsRequest, ListApplicationsResponse, ListQueuesRequest,
    ListQueuesResponse, ProviderSelector, Queue, QueueAmounts, QueueState,
};

use super::{
    ems::percent,
    error::{CommandFailure, CommandReply},
    help::end,
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
use rm_model::external::YARN;

/// Verbs of `queue`.
#[derive(Debug, Clone, Subcommand)]
pub enum QueueCommand {
    /// List the queues of an external cluster.
    #[command(after_help = end("queue list --type Kubernetes", &calls::LIST_QUEUES))]
    List(ListQueuesCommand),
    /// Show a queue, and the queues above it, which can limit it. Exit code 1 if there is none.
    #[command(after_help = end("queue get root.etl", &calls::GET_QUEUE))]
    Get(GetQueueCommand),
}

impl QueueCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
            Self::Get(command) => command.run().await,
        }
    }
}

/// Verbs of `application`.
#[derive(Debug, Clone, Subcommand)]
pub enum ApplicationCommand {
    /// List the running and pending applications of an external cluster.
    #[command(after_help = end("application list --user alice", &calls::LIST_APPLICATIONS))]
    List(ListApplicationsCommand),
}

impl ApplicationCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
        }
    }
}

/// Arguments of `queue list`.
#[derive(Debug, Clone, Args)]
pub struct ListQueuesCommand {
    /// Name of the cluster [default: the cluster without labels].
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,

    /// Type of the cluster: Yarn or Kubernetes.
    #[arg(long = "type", value_name = "TYPE", default_value = YARN)]
    resource_type: String,

    #[command(flatten)]
    list: ListArguments,
}

/// Arguments of `queue get`.
#[derive(Debug, Clone, Args)]
pub struct GetQueueCommand {
    /// Path of the queue, or the namespace.
    #[arg(value_parser = values::name)]
    queue: String,

    /// Name of the cluster [default: the cluster without labels].
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,

    /// Type of the cluster: Yarn or Kubernetes.
    #[arg(long = "type", value_name = "TYPE", default_value = YARN)]
    resource_type: String,

    #[command(flatten)]
    watching: PollArguments,
}

/// Arguments of `application list`.
#[derive(Debug, Clone, Args)]
pub struct ListApplicationsCommand {
    /// Name of the cluster [default: the cluster without labels].
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,

    /// Only applications in this queue or below it.
    #[arg(long)]
    queue: Option<String>,

    /// Only applications of this user.
    #[arg(long)]
    user: Option<String>,

    /// Only applications in this state of the cluster.
    #[arg(long)]
    state: Option<String>,

    #[command(flatten)]
    list: ListArguments,
}

const QUEUE_COLUMNS: &[Column] = &[
    Column::name("QUEUE").key(),
    Column::text("STATE").key(),
    Column::number("FULL").key(),
    Column::number("MEMORY"),
    Column::number("CORES"),
    Column::number("MEMORY LEFT"),
    Column::number("CORES LEFT"),
    Column::number("RUNNING"),
    Column::number("PENDING"),
    Column::text("OTHERS").wide(),
];

const APPLICATION_COLUMNS: &[Column] = &[
    Column::text("APPLICATION").key(),
    Column::name("USER").key(),
    Column::name("QUEUE").key(),
    Column::text("STATE").key(),
    Column::number("MEMORY"),
    Column::number("CORES"),
    Column::number("STARTED"),
    Column::text("NAME"),
];

listed!(LIST_QUEUES: ListQueuesRequest => ListQueuesResponse, queues: Queue, QUEUE_COLUMNS, |queue| vec![queue_row(queue)]);
listed!(LIST_APPLICATIONS: ListApplicationsRequest => ListApplicationsResponse, applications: Application,
    APPLICATION_COLUMNS, |application| vec![application_row(application)]);

fn selector(resource_type: &str, name: Option<String>) -> ProviderSelector {
    let (resource_type, name) = (resource_type.to_owned(), name.unwrap_or_default());
    ProviderSelector { resource_type, name, ..Default::default() }
}

impl ListQueuesCommand {
    /// Lists the queues.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let provider = Some(selector(&self.resource_type, self.provider));
        self.list.list(ListQueuesRequest { provider, ..Default::default() }).await
    }
}

impl GetQueueCommand {
    /// Shows the queue, then the queues above it.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let provider = Some(selector(&self.resource_type, self.provider));
        let question = GetQueueRequest { provider, queue_name: self.queue };
        let show = async |service: &ServiceClient, printer: &mut Printer| {
            let reply = service.make(&calls::GET_QUEUE, &question).await?;
            if printer.is_json() {
                return printer.answer(&calls::GET_QUEUE, &reply, String::new);
            }
            let rows: Vec<TableRow> = reply.queue.iter().chain(&reply.ancestors).map(queue_row).collect();
            printer.rows(QUEUE_COLUMNS, &rows)
        };
        self.watching.rounds(TIMEOUT, show).await?;
        Ok(CommandReply::Yes)
    }
}

impl ListApplicationsCommand {
    /// Lists the applications.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let question = ListApplicationsRequest {
            provider: Some(selector(YARN, self.provider)),
            queue_name: self.queue.unwrap_or_default(),
            user: self.user.unwrap_or_default(),
            state: self.state.unwrap_or_default(),
            ..Default::default()
        };
        self.list.list(question).await
    }
}

fn queue_row(queue: &Queue) -> TableRow {
    let state = match queue.state() {
        QueueState::Unspecified => text::NOTHING,
        QueueState::Running => "running",
        QueueState::Draining => "draining",
        QueueState::Stopped => "stopped",
    };
    let or_zero = |amounts: &Option<QueueAmounts>| amounts.unwrap_or_default();
    let (max, used, left) = (or_zero(&queue.max), or_zero(&queue.used), or_zero(&queue.left));
    // One of the two is zero.
    let of_cores = |amounts: QueueAmounts| amounts.cores.saturating_add(amounts.millicores);
    let is_kubernetes = [max, used, left].iter().any(|amounts| amounts.millicores != 0);
    let unit = if is_kubernetes { "m" } else { "" };
    let full = [percent(used.memory, max.memory), percent(of_cores(used), of_cores(max))].into_iter().flatten().max();
    let nothing = || text::NOTHING.to_owned();
    let others: Vec<String> =
        queue.custom.iter().map(|(name, amounts)| format!("{name}={}/{}", amounts.used, amounts.max)).collect();
    cells![
        text::name(&queue.path),
        state.to_owned(),
        full.map_or_else(nothing, |full| format!("{full}%")),
        text::amount_of(&text::size(used.memory), &text::size(max.memory)),
        format!("{}/{}{unit}", of_cores(used), of_cores(max)),
        text::size(left.memory),
        format!("{}{unit}", of_cores(left)),
        queue.running_applications.map_or_else(nothing, |count| count.to_string()),
        queue.pending_applications.map_or_else(nothing, |count| count.to_string()),
        text::or_nothing(&others.join(",")),
    ]
}

fn application_row(application: &Application) -> TableRow {
    let allocated = application.allocated.unwrap_or_default();
    cells![
        application.application_id.clone(),
        text::name(&application.user),
        text::name(&application.queue),
        application.state.clone(),
        text::size(allocated.memory),
        allocated.cores.to_string(),
        application.start_time.as_ref(),
        application.name.clone(),
    ]
}
