//! Arguments that all commands for a service share.

use std::time::Duration;

use clap::Args;
use prost_types::Timestamp;

use super::{
    failure::Failure,
    named,
    output::{OutputArguments, Printer, WatchArguments},
    service::{Asked, Service},
};

/// Arguments of commands for a service: connection and output.
#[derive(Debug, Clone, Args)]
pub struct Asking {
    #[command(flatten)]
    service: Service,

    #[command(flatten)]
    output: OutputArguments,
}

impl Asking {
    /// Returns a client with a call timeout.
    ///
    /// # Errors
    /// As [`Service::ask`].
    pub fn service(&self, timeout: Duration) -> Result<Asked, Failure> {
        self.service.ask(timeout)
    }

    /// Returns the printer of the replies.
    pub fn printer(&self) -> Printer {
        self.output.printer()
    }
}

/// As [`Asking`], with `--watch`.
#[derive(Debug, Clone, Args)]
pub struct Watching {
    #[command(flatten)]
    asking: Asking,

    #[command(flatten)]
    watch: WatchArguments,
}

impl Watching {
    /// Returns the arguments without those of `--watch`.
    pub fn asking(&self) -> &Asking {
        &self.asking
    }

    /// Calls `round` once, or repeatedly with `--watch`, with a client of this call timeout.
    ///
    /// # Errors
    /// As [`Service::ask`] and [`Printer::repeat`].
    pub async fn rounds(
        &self,
        timeout: Duration,
        mut round: impl AsyncFnMut(&Asked, &mut Printer) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let service = self.asking.service(timeout)?;
        let round = async |printer: &mut Printer| round(&service, printer).await;
        self.asking.printer().repeat(&self.watch, round).await
    }
}

/// Time range: `--since` and `--until`.
#[derive(Debug, Clone, Args)]
pub struct Period {
    /// From then on: a time, or how long ago.
    #[arg(long, value_name = "TIME", value_parser = named::time)]
    pub since: Option<Timestamp>,

    /// Before then: a time, or how long ago.
    #[arg(long, value_name = "TIME", value_parser = named::time)]
    pub until: Option<Timestamp>,
}
