//! Faults that users of other projects reported, each made a small case with an input and the right result.
//!
//! Each file is one subject, and its tables name the source, the kind of fault, the input and the right result. An input is made
//! up here and stands for its kind. A new report is a new row.

use std::fmt::Debug;

mod amounts;
mod calls;
mod counters;
mod databases;
mod kubernetes;
mod names;
mod providers;
mod wait_queues;
mod yarn;

/// One reported fault.
pub struct Case<I, R> {
    /// Project and number, or the document that shows the input.
    pub source: &'static str,
    /// Kind of the fault.
    pub fault: &'static str,
    pub input: I,
    pub right: R,
}

/// Builds a row: source, fault, input, right result.
pub const fn case<I, R>(source: &'static str, fault: &'static str, input: I, right: R) -> Case<I, R> {
    Case { source, fault, input, right }
}

/// Results of cases that are not right.
#[derive(Default)]
pub struct Wrong(Vec<String>);

impl Wrong {
    /// Compares the result of a case with the right one.
    pub fn compare<I: Debug, R: Debug, S: Debug + PartialEq<R>>(&mut self, case: &Case<I, R>, result: S) {
        if result != case.right {
            let Case { source, fault, input, right } = case;
            self.0.push(format!("{source}: {fault}\n  input {input:?}\n  right {right:?}\n  found {result:?}"));
        }
    }

    /// Fails with all cases that are not right.
    #[track_caller]
    pub fn none(self) {
        assert!(self.0.is_empty(), "{}", self.0.join("\n"));
    }
}
