//! `completions`: completion scripts for shells.

use clap::Args;
use clap_complete::{Shell, generate};

use crate::config;

use super::{
    failure::{Answer, Failure},
    output::OutputArguments,
};

/// Arguments of `completions`.
#[derive(Debug, Clone, Args)]
pub struct Completions {
    /// Which shell.
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    /// Prints the script.
    pub fn run(self) -> Result<Answer, Failure> {
        let mut script = Vec::new();
        let mut command = config::command_line();
        let name = command.get_name().to_owned();
        generate(self.shell, &mut command, name, &mut script);
        OutputArguments::default().printer().print(&String::from_utf8_lossy(&script))?;
        Ok(Answer::Yes)
    }
}
