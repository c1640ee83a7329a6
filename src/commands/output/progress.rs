//! Says on a terminal that something is under way.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use tokio::time::{Instant, interval_at};

/// How long something takes before that is said, and how often then.
const INTERVAL: Duration = Duration::from_secs(1);

/// Back to the start of the line, which becomes empty.
const ERASE: &str = "\r\x1b[K";

/// Whether there is a terminal where it is said.
pub fn is_told() -> bool {
    io::stderr().is_terminal()
}

/// Waits for something, and says on a terminal how long it has taken.
pub async fn shown<T>(what: &str, task: impl Future<Output = T>) -> T {
    told(|| Some(what.to_owned()), task).await
}

/// The same, and how far it has come, if that is to be said.
pub async fn told<T>(so_far: impl Fn() -> Option<String>, task: impl Future<Output = T>) -> T {
    if !is_told() {
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

/// Where nobody reads that, it does not matter.
fn say(text: &str) {
    let mut to = io::stderr();
    let _ = to.write_all(text.as_bytes()).and_then(|()| to.flush());
}
