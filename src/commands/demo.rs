//! `demo`: a small cluster that lives on a running service, so that a newcomer sees EMs, limits, wait queues and refusals.
//!
//! The demo uses the API like any other caller, and starts only on a service without other EMs. The names of its EMs, users and
//! creators begin with `demo-`, and each limit is for such a user. It removes its objects when it ends; `demo --clean` removes
//! those of a killed demo.
//! Bounds: [`cluster::EMS`], [`life::ENGINES_MAX`], [`pace::INTERVAL`], [`DURATION_MAX`].
//!
//! - `cluster`: objects and schedule, without I/O; `objects`: creation and removal of EMs and limits;
//! - `life`: engines, reports and drains, until the end; `pace`: the bound on calls.

use std::{sync::Arc, time::Duration};

use clap::Args;
use tonic::Code;

use crate::config::parse_duration;
use rm_client::ClientError;

use super::{
    error::{CommandFailure, CommandReply},
    output::{OutputArguments, Printer},
    service::EndpointArguments,
};

mod cluster;
mod life;
mod objects;
mod pace;

use pace::PacedClient;

/// Maximum duration of a demo.
const DURATION_MAX: &str = "10m";

/// Arguments of `demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoCommand {
    /// Run for this long, 1s to 10m, then remove everything
    #[arg(long, default_value = DURATION_MAX, value_name = "DURATION", value_parser = duration)]
    duration: Duration,

    /// Remove what a killed demo left, and end
    #[arg(long, conflicts_with = "duration")]
    clean: bool,

    #[command(flatten)]
    service: EndpointArguments,
}

fn duration(text: &str) -> Result<Duration, String> {
    parse_duration("--duration", text, "1s", DURATION_MAX)
}

impl DemoCommand {
    /// Runs the demo until its duration has passed or a signal arrives, then removes its objects.
    ///
    /// # Errors
    /// [`CommandFailure::Refused`] if another EM or another demo is registered, or the caller is not an administrator; [`CommandFailure::Service`].
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let client = Arc::new(PacedClient::new(self.service.connect_once(pace::TIMEOUT)?));
        let mut printer = OutputArguments::default().printer();
        let removed = if self.clean {
            objects::remove(&client).await.map_err(explain)?
        } else {
            objects::check_absent(&client).await.map_err(explain)?;
            let end = life::end(self.duration)?;
            let lived = self.live(&client, end, &mut printer).await;
            // A failed start leaves objects, too.
            let removed = objects::remove(&client).await;
            lived.map_err(explain)?;
            removed.map_err(explain).map_err(|failure| {
                CommandFailure::Refused(format!(
                    "{failure}\nObjects of the demo remain; remove them with: linkis-rm demo --clean"
                ))
            })?
        };
        printer.print(&format!("removed {} EMs and {} limits of the demo\n", removed.ems, removed.limits))?;
        Ok(CommandReply::Yes)
    }

    async fn live(
        &self,
        client: &Arc<PacedClient>,
        end: impl Future<Output = ()>,
        printer: &mut Printer,
    ) -> Result<(), CommandFailure> {
        let registered = objects::create(client).await?;
        printer.print(&format!(
            "a demo cluster of {} EMs runs at {} for {}; Ctrl-C ends it\n\
             commands to try: linkis-rm overview, linkis-rm top, linkis-rm waiting\n",
            registered.len(),
            client.address(),
            humantime::format_duration(self.duration),
        ))?;
        life::run(client, registered, end, printer).await;
        Ok(())
    }
}

/// Adds the required role to a failure of authentication or authorization.
fn explain(failure: CommandFailure) -> CommandFailure {
    let code = match &failure {
        CommandFailure::Service { error: error @ ClientError::Status(_), .. } => error.code(),
        _ => None,
    };
    match code {
        Some(Code::Unauthenticated | Code::PermissionDenied) => CommandFailure::Refused(format!(
            "{failure}\nThe demo sets limits and registers EMs: it needs an administrator's token (linkis-rm token create --role admin)"
        )),
        _ => failure,
    }
}
