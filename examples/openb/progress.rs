//! Shows how far the replay is: a bar on a terminal, a line now and then elsewhere.

use std::{
    io::{IsTerminal as _, stderr},
    sync::atomic::{AtomicU64, Ordering},
};

use indicatif::{ProgressBar, ProgressStyle};

const LINES: u64 = 10;

/// Where to show it.
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

    /// So many steps have been started.
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

    /// Something worth a line of its own.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
