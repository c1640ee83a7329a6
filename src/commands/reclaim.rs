//! `reclaim`: engines that are taken back for waiting requests.

use clap::Subcommand;

use rm_client::calls;

use super::{
    error::{CommandFailure, CommandReply},
    help::end,
};

mod list;
mod policies;
mod withdraw;

pub(super) use policies::written_policy;

/// Verbs of `reclaim`.
#[derive(Debug, Clone, Subcommand)]
pub enum ReclaimCommand {
    /// List the tickets that are to end because requests wait.
    #[command(after_help = end("reclaim list", &calls::LIST_RECLAIMS))]
    List(list::ListReclaimsCommand),
    /// Withdraw a chosen ticket: its engine stays, and is not chosen again for an hour. Exit code 1 if the ticket is not chosen.
    #[command(after_help = end("reclaim withdraw 5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a01 --reason \"a slow start\"", &calls::WITHDRAW_RECLAIM))]
    Withdraw(withdraw::WithdrawReclaimCommand),
    /// Rules by which engines are taken back
    #[command(subcommand)]
    Policy(policies::ReclaimPolicyCommand),
}

impl ReclaimCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
            Self::Withdraw(command) => command.run().await,
            Self::Policy(command) => command.run().await,
        }
    }
}
