//! Findings of one crowd: figures, passes, notes and failures. A crowd adds findings as it runs, so an unfinished one
//! still shows its progress.

use std::time::Duration;

use crate::{ratios::RatioTarget, sample::median};

use super::open::{OpenLoopResult, Times};

/// Maximum increase of the others' p99 while a crowd passes, in milliseconds.
const MORE_FOR_OTHERS_MAX: f64 = 25.0;

/// All findings of one crowd.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub figures: Vec<Figure>,
    pub passes: Vec<Passes>,
    /// Observations in words.
    pub notes: Vec<String>,
    /// Parts that did not finish, with their progress.
    pub unfinished: Vec<String>,
    /// Wrong results.
    pub wrong: Vec<String>,
}

/// Figure of merit, with one value per round.
#[derive(Debug)]
pub(crate) struct Figure {
    pub name: String,
    pub unit: &'static str,
    pub values: Vec<f64>,
    pub wanted: Option<RatioTarget>,
}

/// Durations of others' calls, in the calm phase and during one kind of event, with one pair per round.
#[derive(Debug)]
pub(crate) struct Passes {
    pub name: String,
    pub pairs: Vec<Pair>,
}

/// One calm phase and the event after it.
#[derive(Debug)]
pub(crate) struct Pair {
    pub calm: Times,
    pub during: Times,
    /// Longest time without service for others during the event.
    pub gap: Duration,
    /// Failed calls of others, in both phases.
    pub failed: u64,
    /// Memory of the server before the event, in megabytes.
    pub idle: f64,
    /// Maximum memory above `idle` during the event, in megabytes; `None` if the server ended.
    pub peak: Option<f64>,
}

impl Findings {
    pub fn figure(&mut self, name: impl Into<String>, unit: &'static str, value: f64, wanted: Option<RatioTarget>) {
        let name = name.into();
        match self.figures.iter_mut().find(|figure| figure.name == name) {
            Some(figure) => figure.values.push(value),
            None => self.figures.push(Figure { name, unit, values: vec![value], wanted }),
        }
    }

    pub fn at_most(&mut self, name: impl Into<String>, unit: &'static str, value: f64, bound: f64) {
        self.figure(name, unit, value, Some(RatioTarget::AtMost(bound)));
    }

    pub fn at_least(&mut self, name: impl Into<String>, unit: &'static str, value: f64, bound: f64) {
        self.figure(name, unit, value, Some(RatioTarget::AtLeast(bound)));
    }

    /// Adds a figure without a bound.
    pub fn measured(&mut self, name: impl Into<String>, unit: &'static str, value: f64) {
        self.figure(name, unit, value, None);
    }

    pub fn pass(&mut self, name: &str, pair: Pair) {
        match self.passes.iter_mut().find(|passes| passes.name == name) {
            Some(passes) => passes.pairs.push(pair),
            None => self.passes.push(Passes { name: name.to_owned(), pairs: vec![pair] }),
        }
    }

    /// Records the failed calls of others.
    pub fn note_failed(&mut self, when: &str, seen: &OpenLoopResult) {
        if let Some(error) = &seen.error {
            self.notes.push(format!("{} calls of others failed {when}; the first: {error}", seen.failed));
        }
    }

    /// Returns true if the crowd finished and the stored counters agree.
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
    /// Returns the median over the rounds.
    pub fn median(&self, of: impl Fn(&Pair) -> f64) -> f64 {
        median(self.pairs.iter().map(of))
    }

    /// Returns the increase of the others' p99 in milliseconds: the median of the differences of the pairs.
    pub fn more(&self) -> f64 {
        self.median(|pair| millis(pair.during.p99) - millis(pair.calm.p99))
    }

    pub fn wanted() -> RatioTarget {
        RatioTarget::AtMost(MORE_FOR_OTHERS_MAX)
    }

    pub fn met(&self) -> bool {
        met(Self::wanted(), self.more())
    }

    pub fn failed(&self) -> u64 {
        self.pairs.iter().map(|pair| pair.failed).sum()
    }
}

fn met(wanted: RatioTarget, value: f64) -> bool {
    match wanted {
        RatioTarget::AtLeast(bound) => value >= bound,
        RatioTarget::AtMost(bound) => value <= bound,
    }
}

pub(crate) fn millis(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}
