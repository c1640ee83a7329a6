//! Progress of the replay: a line at each tenth.

use std::sync::atomic::{AtomicU64, Ordering};

const LINES: u64 = 10;

/// Progress display.
#[derive(Debug)]
pub struct Progress {
    steps: u64,
    lines_shown: AtomicU64,
}

impl Progress {
    pub fn new(steps: usize) -> Self {
        Self { steps: steps as u64, lines_shown: AtomicU64::new(0) }
    }

    /// Sets the number of started steps.
    pub fn set(&self, step: usize) {
        let lines = step as u64 * LINES / self.steps.max(1);
        if lines > self.lines_shown.swap(lines, Ordering::Relaxed) {
            eprintln!("{:>3} %", lines * 100 / LINES);
        }
    }

    /// Prints a line beside the progress.
    pub fn line(&self, text: &str) {
        eprintln!("{text}");
    }
}
