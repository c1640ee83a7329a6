//! Terminal while `top` runs: raw input and an alternate screen. Dropping [`Screen`] restores the earlier content.

use std::{
    fmt::Write as _,
    io::{self, Read as _, Write as _},
};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

use super::{
    draw::{ScreenFrame, Style},
    keys::keys,
    state::KeyPress,
};

/// Enters the alternate screen and hides the cursor; and the reverse.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// Maximum number of unprocessed keys.
const KEYS_MAX: usize = 64;

/// A terminal in raw mode.
pub struct Screen {
    before: Termios,
    has_colours: bool,
}

impl Screen {
    /// Enters raw mode and the alternate screen.
    pub fn enter() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        // As defined by https://no-color.org: any non-empty value disables colours.
        let has_colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let screen = Self { before, has_colours };
        write(ENTER)?;
        Ok(screen)
    }

    /// Replaces the content of the screen without flicker.
    pub fn show(&self, picture: &ScreenFrame) -> io::Result<()> {
        let mut text = String::from("\x1b[H");
        for (number, line) in picture.lines.iter().enumerate() {
            if number > 0 {
                text.push_str("\r\n");
            }
            for (style, piece) in line {
                match self.code(*style) {
                    "" => text.push_str(piece),
                    // Writing to a string cannot fail.
                    code => drop(write!(text, "\x1b[{code}m{piece}\x1b[0m")),
                }
            }
            text.push_str("\x1b[K");
        }
        write(&(text + "\x1b[J"))
    }

    fn code(&self, style: Style) -> &'static str {
        match style {
            Style::Title => "1",
            _ if !self.has_colours => "",
            Style::Plain => "",
            Style::Good => "32",
            Style::Warn => "33",
            Style::Bad => "31",
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A closed terminal is ignored.
        let _ = write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut to = io::stdout();
    to.write_all(text.as_bytes())?;
    to.flush()
}

/// Returns the keys typed from now on.
pub fn typed() -> mpsc::Receiver<KeyPress> {
    let (sender, receiver) = mpsc::channel(KEYS_MAX);
    // A terminal read cannot be cancelled. The thread ends with the process, or after the receiver is dropped.
    std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok(read) = io::stdin().read(&mut bytes) {
            let typed = keys(bytes.get(..read).unwrap_or_default());
            if read == 0 || !typed.into_iter().all(|key| sender.blocking_send(key).is_ok()) {
                return;
            }
        }
    });
    receiver
}
