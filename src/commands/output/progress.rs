//! Progress of slow calls, shown on standard error if that is a terminal. Never: writes to standard output.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use tokio::time::{Instant, interval_at};

/// Delay of the first progress line, and interval of its updates.
const INTERVAL: Duration = Duration::from_secs(1);

/// Returns to the start of the line and erases it.
const ERASE: &str = "\r\x1b[K";

/// Returns whether progress is shown: standard error is a terminal.
pub fn is_visible() -> bool {
    io::stderr().is_terminal()
}

/// Awaits a task and shows its duration on a terminal.
pub async fn shown<T>(what: &str, task: impl Future<Output = T>) -> T {
    shown_with(|| Some(what.to_owned()), task).await
}

/// As [`shown`], with a progress text; `None` hides it.
pub async fn shown_with<T>(so_far: impl Fn() -> Option<String>, task: impl Future<Output = T>) -> T {
    if !is_visible() {
        return task.await;
    }
    let start = Instant::now();
    let mut ticks = interval_at(start + INTERVAL, INTERVAL);
    tokio::pin!(task);
    let mut is_shown = false;
    loop {
        tokio::select! {
            done = &mut task => {
                if is_shown {
                    say(ERASE);
                }
                return done;
            }
            _ = ticks.tick() => {
                let Some(what) = so_far() else { continue };
                is_shown = true;
                say(&format!("{ERASE}{what} … {} s", start.elapsed().as_secs()));
            }
        }
    }
}

/// A closed standard error is ignored.
fn say(text: &str) {
    let mut to = io::stderr();
    let _ = to.write_all(text.as_bytes()).and_then(|()| to.flush());
}
