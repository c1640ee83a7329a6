//! `completions`: completion scripts for shells.

use clap::Args;
use clap_complete::{Shell, generate};

use crate::config;

use super::{
    error::{CommandFailure, CommandReply},
    output::OutputArguments,
};

/// Arguments of `completions`.
#[derive(Debug, Clone, Args)]
pub struct CompletionsCommand {
    /// Shell of the script.
    #[arg(value_enum)]
    shell: Shell,
}

impl CompletionsCommand {
    /// Prints the script.
    pub fn run(self) -> Result<CommandReply, CommandFailure> {
        let mut script = Vec::new();
        let mut command = config::command_line();
        let name = command.get_name().to_owned();
        generate(self.shell, &mut command, name, &mut script);
        OutputArguments::default().printer().print(&String::from_utf8_lossy(&script))?;
        Ok(CommandReply::Yes)
    }
}
