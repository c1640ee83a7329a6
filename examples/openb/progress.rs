//! Progress of the replay: a bar on a terminal, and else a line at each tenth.

use std::{
    io::{IsTerminal as _, stderr},
    sync::atomic::{AtomicU64, Ordering},
};

use indicatif::{ProgressBar, ProgressStyle};

const LINES: u64 = 10;

/// Progress display.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    lines_shown: AtomicU64,
}

impl Progress {
    pub fn new(steps: usize) -> Self {
        let steps = steps as u64;
        let bar = stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:40} {human_pos}/{human_len} events, {per_sec}, {eta} to go");
            ProgressBar::new(steps).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self { bar, steps, lines_shown: AtomicU64::new(0) }
    }

    /// Sets the number of started steps.
    pub fn set(&self, step: usize) {
        let step = step as u64;
        match &self.bar {
            Some(bar) => bar.set_position(step),
            None => {
                let lines = step * LINES / self.steps.max(1);
                if lines > self.lines_shown.swap(lines, Ordering::Relaxed) {
                    eprintln!("{:>3} %", lines * 100 / LINES);
                }
            }
        }
    }

    /// Prints a line beside the progress.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
