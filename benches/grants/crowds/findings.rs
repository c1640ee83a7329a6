//! What a crowd has shown. It is filled as the crowd goes, so that one which does not finish tells how far it got.

use std::time::Duration;

use crate::{ratios::Wanted, sample::median};

use super::open::{Seen, Times};

/// How much more than in the calm the slowest of a hundred others may wait while a crowd passes, in milliseconds.
const MORE_FOR_OTHERS_MAX: f64 = 25.0;

/// Everything about one crowd.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub figures: Vec<Figure>,
    pub passes: Vec<Passes>,
    /// What is worth knowing, in words.
    pub notes: Vec<String>,
    /// What did not come to its end, and how far it got.
    pub unfinished: Vec<String>,
    /// What is not as it should be.
    pub wrong: Vec<String>,
}

/// A figure of merit, once for each round.
#[derive(Debug)]
pub(crate) struct Figure {
    pub name: String,
    pub unit: &'static str,
    pub values: Vec<f64>,
    pub wanted: Option<Wanted>,
}

/// Others in the calm and while the same passes, once for each round.
#[derive(Debug)]
pub(crate) struct Passes {
    pub name: String,
    pub pairs: Vec<Pair>,
}

/// One calm, and one pass after it.
#[derive(Debug)]
pub(crate) struct Pair {
    pub calm: Times,
    pub during: Times,
    /// The longest time in which no other was served while it passed.
    pub gap: Duration,
    /// How many of others' calls failed, in both.
    pub failed: u64,
    /// The server's memory before, in megabytes, and how far above that it went; `None` if the server ended.
    pub idle: f64,
    pub peak: Option<f64>,
}

impl Findings {
    pub fn figure(&mut self, name: impl Into<String>, unit: &'static str, value: f64, wanted: Option<Wanted>) {
        let name = name.into();
        match self.figures.iter_mut().find(|figure| figure.name == name) {
            Some(figure) => figure.values.push(value),
            None => self.figures.push(Figure { name, unit, values: vec![value], wanted }),
        }
    }

    pub fn at_most(&mut self, name: impl Into<String>, unit: &'static str, value: f64, bound: f64) {
        self.figure(name, unit, value, Some(Wanted::AtMost(bound)));
    }

    pub fn at_least(&mut self, name: impl Into<String>, unit: &'static str, value: f64, bound: f64) {
        self.figure(name, unit, value, Some(Wanted::AtLeast(bound)));
    }

    /// A figure of which nothing is wanted.
    pub fn told(&mut self, name: impl Into<String>, unit: &'static str, value: f64) {
        self.figure(name, unit, value, None);
    }

    pub fn pass(&mut self, name: &str, pair: Pair) {
        match self.passes.iter_mut().find(|passes| passes.name == name) {
            Some(passes) => passes.pairs.push(pair),
            None => self.passes.push(Passes { name: name.to_owned(), pairs: vec![pair] }),
        }
    }

    /// Tells what failed of others' calls.
    pub fn note_failed(&mut self, when: &str, seen: &Seen) {
        if let Some(error) = &seen.error {
            self.notes.push(format!("{} calls of others failed {when}; the first: {error}", seen.failed));
        }
    }

    /// Whether it came to its end, and the books agree.
    pub fn sound(&self) -> bool {
        self.unfinished.is_empty() && self.wrong.is_empty()
    }
}

impl Figure {
    pub fn median(&self) -> f64 {
        median(self.values.iter().copied())
    }

    pub fn met(&self) -> Option<bool> {
        self.wanted.map(|wanted| met(wanted, self.median()))
    }
}

impl Passes {
    /// A median over the rounds.
    pub fn median(&self, of: impl Fn(&Pair) -> f64) -> f64 {
        median(self.pairs.iter().map(of))
    }

    /// How many milliseconds more the slowest of a hundred others waited: the median of the pairs' differences.
    pub fn more(&self) -> f64 {
        self.median(|pair| millis(pair.during.p99) - millis(pair.calm.p99))
    }

    pub fn wanted() -> Wanted {
        Wanted::AtMost(MORE_FOR_OTHERS_MAX)
    }

    pub fn met(&self) -> bool {
        met(Self::wanted(), self.more())
    }

    pub fn failed(&self) -> u64 {
        self.pairs.iter().map(|pair| pair.failed).sum()
    }
}

fn met(wanted: Wanted, value: f64) -> bool {
    match wanted {
        Wanted::AtLeast(bound) => value >= bound,
        Wanted::AtMost(bound) => value <= bound,
    }
}

pub(crate) fn millis(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}
