//! The terminal that standard output is, if it is one.

use std::io::{self, IsTerminal as _};

/// Cursor to the upper left, and everything behind it gone.
pub const CLEAR: &str = "\x1b[H\x1b[2J";

/// How much fits on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Characters of a line.
    pub columns: usize,
    /// Lines.
    pub rows: usize,
}

/// What fits where the terminal does not say.
const USUAL: Size = Size { columns: 80, rows: 24 };

/// Its size; `None` if it is no terminal.
pub fn size() -> Option<Size> {
    let output = io::stdout();
    if !output.is_terminal() {
        return None;
    }
    let told = rustix::termios::tcgetwinsize(&output).ok();
    let told = told.map(|told| Size { columns: told.ws_col.into(), rows: told.ws_row.into() });
    Some(told.filter(|size| size.columns > 0 && size.rows > 0).unwrap_or(USUAL))
}
