//! Arguments that all commands for a service share.

use std::time::Duration;

use clap::Args;
use prost_types::Timestamp;

use super::{
    error::CommandFailure,
    output::{OutputArguments, Printer, WatchArguments},
    service::{EndpointArguments, ServiceClient},
    values,
};

/// Arguments of commands for a service: connection and output.
#[derive(Debug, Clone, Args)]
pub struct ServiceArguments {
    #[command(flatten)]
    service: EndpointArguments,

    #[command(flatten)]
    output: OutputArguments,
}

impl ServiceArguments {
    /// Returns a client with a call timeout.
    ///
    /// # Errors
    /// As [`EndpointArguments::connect`].
    pub fn service(&self, timeout: Duration) -> Result<ServiceClient, CommandFailure> {
        self.service.connect(timeout)
    }

    /// Returns the printer of the replies.
    pub fn printer(&self) -> Printer {
        self.output.printer()
    }
}

/// As [`ServiceArguments`], with `--watch`.
#[derive(Debug, Clone, Args)]
pub struct PollArguments {
    #[command(flatten)]
    arguments: ServiceArguments,

    #[command(flatten)]
    watch: WatchArguments,
}

impl PollArguments {
    /// Returns the arguments without those of `--watch`.
    pub fn arguments(&self) -> &ServiceArguments {
        &self.arguments
    }

    /// Calls `round` once, or repeatedly with `--watch`, with a client of this call timeout.
    ///
    /// # Errors
    /// As [`EndpointArguments::connect`] and [`Printer::repeat`].
    pub async fn rounds(
        &self,
        timeout: Duration,
        mut round: impl AsyncFnMut(&ServiceClient, &mut Printer) -> Result<(), CommandFailure>,
    ) -> Result<(), CommandFailure> {
        let service = self.arguments.service(timeout)?;
        let round = async |printer: &mut Printer| round(&service, printer).await;
        self.arguments.printer().repeat(&self.watch, round).await
    }
}

/// Time range: `--since` and `--until`.
#[derive(Debug, Clone, Args)]
pub struct TimeRange {
    /// Start of the time range: a time, or a duration before now.
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    pub since: Option<Timestamp>,

    /// End of the time range, exclusive: a time, or a duration before now.
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    pub until: Option<Timestamp>,
}
