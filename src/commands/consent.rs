//! What destroys is asked about first.

use std::io::{self, BufRead as _, Write as _};

use clap::Args;

use super::{failure::Failure, output};

/// Whether it was thought about, and why it is done.
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
    /// Asks what was not said already; answers why it is done.
    ///
    /// # Errors
    /// [`Failure::Declined`]; [`Failure::Usage`] if there is nobody to ask, or no reason is told.
    pub fn ask(&self, question: &str) -> Result<String, Failure> {
        if !self.yes {
            self.confirm(question)?;
        }
        reason(self.reason.as_deref())
    }

    /// Whether somebody is asked, for whom things may change while he thinks.
    pub fn asks(&self) -> bool {
        !self.yes
    }

    fn confirm(&self, question: &str) -> Result<(), Failure> {
        if !output::is_attended() {
            let more = if self.reason.is_none() { ", and --reason," } else { "" };
            let advice = format!("Add --yes{more} if that is wanted: nobody can be asked here.");
            return Err(Failure::Usage(format!("{question} {advice}")));
        }
        match prompt(&format!("{question} [y/N] "))?.to_ascii_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => Err(Failure::Declined),
        }
    }
}

/// Why something is done, which is kept with it; asked for where somebody sits at a terminal.
///
/// # Errors
/// [`Failure::Usage`] if none is told.
pub fn reason(told: Option<&str>) -> Result<String, Failure> {
    let reason = match told {
        Some(reason) => reason.to_owned(),
        None if output::is_attended() => prompt("Why? ")?,
        None => String::new(),
    };
    match reason.trim() {
        "" => Err(Failure::Usage("--reason: say why; it is kept in the history".to_owned())),
        reason => Ok(reason.to_owned()),
    }
}

/// What somebody types.
fn prompt(question: &str) -> Result<String, Failure> {
    let mut to = io::stderr();
    to.write_all(output::text::clean_lines(question).as_bytes())?;
    to.flush()?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim().to_owned())
}
