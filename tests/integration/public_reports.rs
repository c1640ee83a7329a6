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

/// A case that a test of another module runs: source, fault, text of the module, name of the test.
const ELSEWHERE: [Case<&str, &str>; 5] = [
    case(
        "grpc/grpc compression.md, PROTOCOL-HTTP2",
        "an unknown encoding, a flag without an encoding, gzip that is none",
        include_str!("edge/protocol.rs"),
        "compression_rules_hold",
    ),
    case(
        "grpc/grpc reflection.proto",
        "an unknown symbol ends the stream",
        include_str!("edge/protocol.rs"),
        "reflection_rules_hold",
    ),
    case(
        "PostgreSQL database in LATIN1",
        "a name that the database cannot store is an internal error",
        include_str!("database_wanting.rs"),
        "database_of_other_encoding_is_refused_by_name",
    ),
    case(
        "transact-rs/sqlx pool exhaustion, managed PostgreSQL with 25 connections",
        "an instance without a connection for its committer serves",
        include_str!("database_wanting.rs"),
        "database_with_few_connections_keeps_instance_unready",
    ),
    case(
        "pgbouncer/pgbouncer pool_mode",
        "a pooler drops session settings",
        include_str!("pooler.rs"),
        "pooler_with_other_pooling_is_refused_at_start",
    ),
];

#[test]
fn public_reports_of_other_modules_name_existing_tests() {
    for Case { source, fault, input, right } in ELSEWHERE {
        assert!(input.contains(&format!("fn {right}(")), "{source}: {fault}: there is no test {right}");
    }
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
