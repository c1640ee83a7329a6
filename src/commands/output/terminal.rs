//! Terminal of standard output: size and control sequences.

use std::io::{self, IsTerminal as _};

/// Moves the cursor to the top left and clears the screen.
pub const CLEAR: &str = "\x1b[H\x1b[2J";

/// Size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    /// Characters per line.
    pub columns: usize,
    /// Number of lines.
    pub rows: usize,
}

/// Default size if the terminal reports none.
const USUAL: TerminalSize = TerminalSize { columns: 80, rows: 24 };

/// Returns the size of the terminal; `None` if standard output is not one.
pub fn size() -> Option<TerminalSize> {
    let output = io::stdout();
    if !output.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(&output).ok();
    let size = size.map(|size| TerminalSize { columns: size.ws_col.into(), rows: size.ws_row.into() });
    Some(size.filter(|size| size.columns > 0 && size.rows > 0).unwrap_or(USUAL))
}
