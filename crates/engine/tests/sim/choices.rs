//! The choices of a run: random ones, which are recorded, or recorded ones, which are replayed.
//!
//! A run consists of steps, and each step of choices: numbers below a bound. A recorded run that loses some of its steps is still
//! a run, so that a failing one can be shortened.

use std::{collections::VecDeque, fmt, str::FromStr};

/// A generator of random numbers; equal seeds give equal numbers.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }
}

/// The choices of one step.
type Step = VecDeque<usize>;

/// The choices of all steps, as text: numbers, and `;` after each step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record(pub Vec<Step>);

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.0 {
            let numbers: Vec<String> = step.iter().map(usize::to_string).collect();
            write!(f, "{};", numbers.join(" "))?;
        }
        Ok(())
    }
}

impl FromStr for Record {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let step = |step: &str| step.split_whitespace().map(str::parse).collect();
        Ok(Self(text.split_terminator(';').map(step).collect::<Result<_, _>>()?))
    }
}

/// Source of the choices.
#[derive(Debug)]
enum Source {
    Random(Random),
    /// The remaining steps, and the remaining choices of the current one.
    Record(VecDeque<Step>, Step),
}

/// The choices of one run.
#[derive(Debug)]
pub struct Choices {
    source: Source,
    is_recording: bool,
    /// The recorded choices.
    pub record: Record,
}

impl Choices {
    pub fn random(seed: u64) -> Self {
        Self { source: Source::Random(Random::new(seed)), is_recording: true, record: Record::default() }
    }

    pub fn replayed(record: Record) -> Self {
        let source = Source::Record(record.0.into(), Step::new());
        Self { source, is_recording: true, record: Record::default() }
    }

    /// Begins a step. Returns false if a recorded run has no further step.
    pub fn begin_step(&mut self) -> bool {
        self.record.0.push(Step::new());
        match &mut self.source {
            Source::Random(_) => true,
            Source::Record(steps, step) => match steps.pop_front() {
                Some(next) => {
                    *step = next;
                    true
                }
                None => false,
            },
        }
    }

    /// Makes the choices random from now on, and ends the record.
    pub fn continue_at_random(&mut self, seed: u64) {
        (self.source, self.is_recording) = (Source::Random(Random::new(seed)), false);
    }

    /// Chooses a number. A step of a shortened run may lack it; it is 0 then.
    pub fn below(&mut self, bound: usize) -> usize {
        let chosen = match &mut self.source {
            Source::Random(random) => random.below(bound),
            Source::Record(_, step) => step.pop_front().unwrap_or(0) % bound,
        };
        if self.is_recording
            && let Some(step) = self.record.0.last_mut()
        {
            step.push_back(chosen);
        }
        chosen
    }

    pub fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) + 1 == chances
    }

    pub fn of<T: Clone>(&mut self, items: &[T]) -> Option<T> {
        if items.is_empty() { None } else { items.get(self.below(items.len())).cloned() }
    }
}
