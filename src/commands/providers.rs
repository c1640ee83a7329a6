//! `provider`: external clusters whose queues requests can name.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_model::external::YARN;
use rm_proto::v1::{
    CheckProviderRequest, DeleteProviderRequest, ListProvidersRequest, ListProvidersResponse, Provider,
    PutProviderRequest, check_provider_response::Result as Outcome,
};

use super::{
    consent::Confirmation,
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    output::{
        table::{Column, TableRow, cells},
        text,
    },
    service::{ServiceClient, TIMEOUT},
    service_arguments::ServiceArguments,
    values,
};

/// Verbs of `provider`.
#[derive(Debug, Clone, Subcommand)]
pub enum ProviderCommand {
    /// List the external clusters whose queues requests can name.
    #[command(after_help = end("provider list", &calls::LIST_PROVIDERS))]
    List(ListProvidersCommand),
    /// Add an external cluster, or replace its settings.
    #[command(after_help = end("provider put second --label cluster=second --config second.json", &calls::PUT_PROVIDER))]
    Put(PutProviderCommand),
    /// Delete an external cluster. Exit code 1 if there is none.
    #[command(after_help = end("provider delete second", &calls::DELETE_PROVIDER))]
    Delete(DeleteProviderCommand),
    /// Read an external cluster once, stored or from a file, without storing it. Exit code 1 if it cannot be read.
    #[command(after_help = end("provider check second --config second.json", &calls::CHECK_PROVIDER))]
    Check(CheckProviderCommand),
}

/// Arguments of `provider list`.
#[derive(Debug, Clone, Args)]
pub struct ListProvidersCommand {
    #[command(flatten)]
    list: ListArguments,
}

/// Arguments of `provider put`.
#[derive(Debug, Clone, Args)]
pub struct PutProviderCommand {
    /// Name of the cluster.
    #[arg(value_parser = values::name)]
    name: String,

    /// Type of the cluster: Yarn or Kubernetes.
    #[arg(long = "type", value_name = "TYPE", default_value = YARN)]
    resource_type: String,

    /// Label of the requests for this cluster, KEY=VALUE. Repeatable.
    #[arg(long = "label", value_parser = values::label)]
    labels: Vec<(String, String)>,

    /// JSON file with the settings of the cluster (docs/EXTERNAL.md).
    #[arg(long, value_name = "FILE")]
    config: PathBuf,

    #[command(flatten)]
    confirmation: Confirmation,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `provider delete`.
#[derive(Debug, Clone, Args)]
pub struct DeleteProviderCommand {
    /// Name of the cluster.
    #[arg(value_parser = values::name)]
    name: String,

    /// Type of the cluster: Yarn or Kubernetes.
    #[arg(long = "type", value_name = "TYPE", default_value = YARN)]
    resource_type: String,

    #[command(flatten)]
    confirmation: Confirmation,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `provider check`.
#[derive(Debug, Clone, Args)]
pub struct CheckProviderCommand {
    /// Name of the cluster.
    #[arg(value_parser = values::name)]
    name: String,

    /// Type of the cluster: Yarn or Kubernetes.
    #[arg(long = "type", value_name = "TYPE", default_value = YARN)]
    resource_type: String,

    /// JSON file with the settings to check [default: the stored settings].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

const COLUMNS: &[Column] = &[
    Column::name("NAME").key(),
    Column::text("TYPE").key(),
    Column::text("LABELS"),
    Column::text("UPDATED BY"),
    Column::number("UPDATED"),
    Column::text("CONFIG").wide(),
];

listed!(whole LIST_PROVIDERS: ListProvidersRequest => ListProvidersResponse, providers: Provider, COLUMNS,
    |provider| vec![row(provider)]);

impl ProviderCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(ListProvidersCommand { list }) => list.list(ListProvidersRequest {}).await,
            Self::Put(command) => command.run().await,
            Self::Delete(command) => command.run().await,
            Self::Check(command) => command.run().await,
        }
    }
}

/// Returns the stored provider of this type and name.
async fn find(service: &ServiceClient, resource_type: &str, name: &str) -> Result<Option<Provider>, CommandFailure> {
    let providers = service.make(&calls::LIST_PROVIDERS, &ListProvidersRequest {}).await?.providers;
    Ok(providers.into_iter().find(|known| known.resource_type == resource_type && known.name == name))
}

/// Returns a provider for a question: its name, its labels and its last change.
fn described(provider: &Provider) -> String {
    let (name, labels) = (text::name(&provider.name), text::labels(&provider.labels));
    let (at, by) = (text::time(provider.update_time.as_ref()), text::name(&provider.updated_by));
    format!("the {} cluster {name} (labels {labels}, set {at} by {by})", provider.resource_type)
}

/// Reads the settings of a cluster.
fn read(file: &Path) -> Result<String, CommandFailure> {
    let wrong = |error| CommandFailure::Usage(format!("--config: {} cannot be read: {error}", file.display()));
    fs::read_to_string(file).map_err(wrong)
}

impl CheckProviderCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let config = self.config.as_deref().map(read).transpose()?;
        let service = self.arguments.service(TIMEOUT)?;
        let Self { name, resource_type, .. } = self;
        let question = match config {
            None => CheckProviderRequest { resource_type, name, provider: None },
            Some(config) => {
                let provider = Provider { resource_type, name, config, ..Default::default() };
                CheckProviderRequest { provider: Some(provider), ..Default::default() }
            }
        };
        let reply = service.make_slowly("reading the cluster", &calls::CHECK_PROVIDER, &question).await?;
        let text = || match &reply.result {
            Some(Outcome::Content(content)) => {
                format!("it was read: {} queues, {} applications\n", content.queues, content.applications)
            }
            Some(Outcome::Failure(failure)) => format!("it cannot be read: {}\n", failure.message),
            None => "the service replied without a result\n".to_owned(),
        };
        self.arguments.printer().answer(&calls::CHECK_PROVIDER, &reply, text)?;
        Ok(CommandReply::yes_if(matches!(reply.result, Some(Outcome::Content(_)))))
    }
}

impl PutProviderCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let config = read(&self.config)?;
        let service = self.arguments.service(TIMEOUT)?;
        let before = find(&service, &self.resource_type, &self.name).await?;
        if let Some(before) = &before {
            self.confirmation.confirm(&format!("This replaces {}. Replace it?", described(before)))?;
        }
        let expected_etag = Some(before.map(|before| before.etag).unwrap_or_default());
        let labels = self.labels.into_iter().collect();
        let (resource_type, name) = (self.resource_type, self.name);
        let provider = Provider { resource_type, name, labels, config, ..Default::default() };
        let question = PutProviderRequest { provider: Some(provider), expected_etag };
        let reply = service.make(&calls::PUT_PROVIDER, &question).await?;
        let put = || format!("set {}\n", described(&reply.provider.clone().unwrap_or_default()));
        self.arguments.printer().answer(&calls::PUT_PROVIDER, &reply, put)?;
        Ok(CommandReply::Yes)
    }
}

impl DeleteProviderCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let Self { name, resource_type, .. } = self;
        let Some(before) = find(&service, &resource_type, &name).await? else {
            return Err(CommandFailure::Refused(format!("there is no {resource_type} cluster {}", text::name(&name))));
        };
        self.confirmation.confirm(&format!("Delete {}?", described(&before)))?;
        let deleted = || format!("deleted {}\n", described(&before));
        let question = DeleteProviderRequest { resource_type, name, expected_etag: Some(before.etag.clone()) };
        let reply = service.make(&calls::DELETE_PROVIDER, &question).await?;
        self.arguments.printer().answer(&calls::DELETE_PROVIDER, &reply, deleted)?;
        Ok(CommandReply::Yes)
    }
}

fn row(provider: &Provider) -> TableRow {
    cells![
        text::name(&provider.name),
        provider.resource_type.clone(),
        text::labels(&provider.labels),
        provider.updated_by.clone(),
        provider.update_time.as_ref(),
        provider.config.clone(),
    ]
}
