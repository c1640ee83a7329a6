//! `provider`, `queue`, `application`: lists of external clusters and their content.

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_proto::v1::{
    Application, ListApplicationsRequest, ListApplicationsResponse, ListProvidersRequest, ListProvidersResponse,
    ListQueuesRequest, ListQueuesResponse, Provider, ProviderSelector, Queue, QueueAmounts, QueueState,
};

use super::{
    ems::percent,
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    output::{
        table::{Column, TableRow, cells},
        text,
    },
};
use rm_model::external::YARN;

/// Verbs of `provider`.
#[derive(Debug, Clone, Subcommand)]
pub enum ProviderCommand {
    /// List the external clusters whose queues requests can name.
    #[command(after_help = end("provider list", &calls::LIST_PROVIDERS))]
    List(ListProvidersCommand),
}

impl ProviderCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
        }
    }
}

/// Verbs of `queue`.
#[derive(Debug, Clone, Subcommand)]
pub enum QueueCommand {
    /// List the queues of an external cluster.
    #[command(after_help = end("queue list --type Kubernetes", &calls::LIST_QUEUES))]
    List(ListQueuesCommand),
}

impl QueueCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
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

/// Arguments of `provider list`.
#[derive(Debug, Clone, Args)]
pub struct ListProvidersCommand {
    #[command(flatten)]
    list: ListArguments,
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

const PROVIDER_COLUMNS: &[Column] = &[
    Column::name("NAME").key(),
    Column::text("TYPE").key(),
    Column::text("LABELS"),
    Column::text("UPDATED BY"),
    Column::number("UPDATED"),
    Column::text("CONFIG").wide(),
];

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

listed!(whole LIST_PROVIDERS: ListProvidersRequest => ListProvidersResponse, providers: Provider, PROVIDER_COLUMNS,
    |provider| vec![provider_row(provider)]);
listed!(LIST_QUEUES: ListQueuesRequest => ListQueuesResponse, queues: Queue, QUEUE_COLUMNS, |queue| vec![queue_row(queue)]);
listed!(LIST_APPLICATIONS: ListApplicationsRequest => ListApplicationsResponse, applications: Application,
    APPLICATION_COLUMNS, |application| vec![application_row(application)]);

fn selector(resource_type: &str, name: Option<String>) -> ProviderSelector {
    let (resource_type, name) = (resource_type.to_owned(), name.unwrap_or_default());
    ProviderSelector { resource_type, name, ..Default::default() }
}

impl ListProvidersCommand {
    /// Lists the providers.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        self.list.list(ListProvidersRequest {}).await
    }
}

impl ListQueuesCommand {
    /// Lists the queues.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let provider = Some(selector(&self.resource_type, self.provider));
        self.list.list(ListQueuesRequest { provider, ..Default::default() }).await
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

fn provider_row(provider: &Provider) -> TableRow {
    cells![
        text::name(&provider.name),
        provider.resource_type.clone(),
        text::labels(&provider.labels),
        provider.updated_by.clone(),
        provider.update_time.as_ref(),
        provider.config.clone(),
    ]
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
