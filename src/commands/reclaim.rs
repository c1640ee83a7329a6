//! `reclaim`: idle engines that are taken back for waiting requests.

use clap::Subcommand;

use rm_client::calls;

use super::{
    error::{CommandFailure, CommandReply},
    help::end,
};

mod list;
mod policies;

/// Verbs of `reclaim`.
#[derive(Debug, Clone, Subcommand)]
pub enum ReclaimCommand {
    /// List the tickets of idle engines that are to end because requests wait.
    #[command(after_help = end("reclaim list", &calls::LIST_RECLAIMS))]
    List(list::ListReclaimsCommand),
    /// Rules by which idle engines are taken back
    #[command(subcommand)]
    Policy(policies::ReclaimPolicyCommand),
}

impl ReclaimCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
            Self::Policy(command) => command.run().await,
        }
    }
}
