//! Confirmation and reason of destructive commands.
//!
//! Without a terminal, both must be arguments. A command never assumes consent.

use std::io::{self, BufRead as _, Write as _};

use clap::Args;

use super::{error::CommandFailure, output};

/// Arguments of destructive commands: `--reason` and `--yes`.
#[derive(Debug, Clone, Args)]
pub struct Consent {
    /// Why; the history keeps it.
    #[arg(long)]
    reason: Option<String>,

    /// Do it without asking. Needed where nobody sits at a terminal.
    #[arg(long)]
    yes: bool,
}

impl Consent {
    /// Asks for the confirmation and the reason unless they are given as arguments; returns the reason.
    ///
    /// # Errors
    /// [`CommandFailure::Declined`]; [`CommandFailure::Usage`] without a terminal, or without a reason.
    pub fn ask(&self, question: &str) -> Result<String, CommandFailure> {
        if !self.yes {
            self.confirm(question)?;
        }
        reason(self.reason.as_deref())
    }

    /// Returns whether the user is asked, so that the state can change in the meantime.
    pub fn asks(&self) -> bool {
        !self.yes
    }

    fn confirm(&self, question: &str) -> Result<(), CommandFailure> {
        if !output::is_attended() {
            let more = if self.reason.is_none() { ", and --reason," } else { "" };
            let advice = format!("Add --yes{more} if that is wanted: nobody can be asked here.");
            return Err(CommandFailure::Usage(format!("{question} {advice}")));
        }
        match prompt(&format!("{question} [y/N] "))?.to_ascii_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => Err(CommandFailure::Declined),
        }
    }
}

/// Returns the reason that the history records; asks for it on a terminal.
///
/// # Errors
/// [`CommandFailure::Usage`] without a reason.
pub fn reason(told: Option<&str>) -> Result<String, CommandFailure> {
    let reason = match told {
        Some(reason) => reason.to_owned(),
        None if output::is_attended() => prompt("Why? ")?,
        None => String::new(),
    };
    match reason.trim() {
        "" => Err(CommandFailure::Usage("--reason: say why; it is kept in the history".to_owned())),
        reason => Ok(reason.to_owned()),
    }
}

/// Reads one line from the terminal.
fn prompt(question: &str) -> Result<String, CommandFailure> {
    let mut to = io::stderr();
    to.write_all(output::text::clean_lines(question).as_bytes())?;
    to.flush()?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim().to_owned())
}
