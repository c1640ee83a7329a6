//! Confirmation and reason of destructive commands.
//!
//! Without a terminal, both must be arguments. A command never assumes consent.

use std::io::{self, BufRead as _, Write as _};

use clap::Args;

use super::{error::CommandFailure, output};

/// Argument of commands that need a confirmation: `--yes`.
#[derive(Debug, Clone, Args)]
pub struct Confirmation {
    /// Skip the confirmation. Required without a terminal.
    #[arg(short, long)]
    yes: bool,
}

/// Arguments of destructive commands: `--reason` and `--yes`.
#[derive(Debug, Clone, Args)]
pub struct Consent {
    /// Reason, for the history.
    #[arg(long)]
    reason: Option<String>,

    #[command(flatten)]
    confirmation: Confirmation,
}

impl Confirmation {
    /// Reads the confirmation from the terminal unless it is an argument.
    ///
    /// # Errors
    /// [`CommandFailure::Declined`]; [`CommandFailure::Usage`] without a terminal.
    pub fn confirm(&self, question: &str) -> Result<(), CommandFailure> {
        self.confirm_with(question, "")
    }

    fn confirm_with(&self, question: &str, also: &str) -> Result<(), CommandFailure> {
        if self.yes {
            return Ok(());
        }
        if !output::is_attended() {
            let advice = format!("There is no terminal for the confirmation; add --yes{also} to confirm.");
            return Err(CommandFailure::Usage(format!("{question} {advice}")));
        }
        match prompt(&format!("{question} [y/N] "))?.to_ascii_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => Err(CommandFailure::Declined),
        }
    }
}

impl Consent {
    /// As [`Consent::confirm`], of a change to `new` from `before`, if there is one. Both end with a line break.
    pub fn confirm_change(&self, before: Option<&str>, new: &str) -> Result<String, CommandFailure> {
        let question = match before {
            Some(before) => format!("now\n{before}new\n{new}Change it?"),
            None => format!("new\n{new}Set it?"),
        };
        self.confirm(&question)
    }

    /// Reads the confirmation and the reason from the terminal unless they are arguments; returns the reason.
    ///
    /// # Errors
    /// [`CommandFailure::Declined`]; [`CommandFailure::Usage`] without a terminal, or without a reason.
    pub fn confirm(&self, question: &str) -> Result<String, CommandFailure> {
        let also = if self.reason.is_none() { ", and --reason," } else { "" };
        self.confirmation.confirm_with(question, also)?;
        reason(self.reason.as_deref())
    }

    /// Returns whether the user confirms on the terminal, so that the state can change in the meantime.
    pub fn is_interactive(&self) -> bool {
        !self.confirmation.yes
    }
}

/// Returns the reason that the history records; reads it from a terminal.
///
/// # Errors
/// [`CommandFailure::Usage`] without a reason.
pub fn reason(given: Option<&str>) -> Result<String, CommandFailure> {
    let reason = match given {
        Some(reason) => reason.to_owned(),
        None if output::is_attended() => prompt("Why? ")?,
        None => String::new(),
    };
    match reason.trim() {
        "" => Err(CommandFailure::Usage("--reason: is required; the history records it".to_owned())),
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
