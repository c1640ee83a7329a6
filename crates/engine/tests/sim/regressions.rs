//! Runs that once failed, shortened. Each is replayed, and prints its steps.

use crate::{
    replay,
    world::{Faults, Shape},
};

/// A request at one EM entered the queue while a waiter for any EM was woken for the capacity there, and did not fit.
#[test]
fn request_at_freed_em_is_not_covered_by_waiter_for_any_em() {
    replay(
        Shape { instances: 1, ems: 2, requests: 12, faults: Faults::None, users: 1, polls: false },
        "2 3 2 0;0 5 1 0 2 2 1 3;0 6 0 1 1 2 0 2 3 1 1;0 5 1 1 2 2 1 1 0 1;0 1 24 1 2 0;0 2 1;0 0 23 0 1 1; \
         0 7 0;0 1 19 0 2 0;0 5 1 1 2 1 0 0 1 2;0 2 1 0;0 1 16 0 0 0;0 5 1 0 3 3 1 1;0 5 0 1 1 3 2 0 1 1 1; \
         0 1 28 2 0 1;0 1 17 0 3 1;0 0 16 0 0 1;0 6 1 1 0 1 1 1 1 2;0 6 1 1 3 1 2 2 0 3;0 1 14 1 2 1; \
         0 2 1 1 1 1 1;0 2 1 1 0;0 7 1;",
    );
}

/// A request was granted as a smaller spec than the one of its entry, and the next one waited on another instance.
#[test]
fn grant_of_smaller_spec_wakes_next_on_other_instance() {
    replay(
        Shape { instances: 3, ems: 4, requests: 15, faults: Faults::None, users: 1, polls: false },
        "3 1 2 0 2 1 2 2;1 6 0 2 1 3 2 2 1 1 1;0 5 1 1 0 3 1 2 0 2;0 1 0 0 3 0;2 6 0 2 0 1 0 1 1; \
         0 0 18 0 1 0;0 5 0 2 1 3 1 3 3 0 1;0 0 29 1 1 1;0 2 1;1 7 0;1 6 0 3 0 2 2 1 1;1 6;1 2 1 1 0 1;0 8 2; \
         0 2 1;2 7 0;1 2 0;1 2;",
    );
}

/// Capacity was freed at an EM at which no request waited, and one for any EM waited elsewhere.
#[test]
fn waiter_for_any_em_is_woken_by_freed_em() {
    replay(
        Shape { instances: 1, ems: 3, requests: 40, faults: Faults::None, users: 1, polls: false },
        "0 3 2 2 1 2;0 5 0 2 0 0 2 1 3;0 6 1 0 0 0 1 1;0 5 1 0 0 0 1 1;0 5 1 0 1 3 0 1;0 1 17 1 1 1;0 2 1 1; \
         0 6 0 1 1 3 0 1 0 0 2;0 8 0;0 1 24 0 0 0;0 0 28 0 2 0;0 2 0;0 8 0;0 2;0 7 0;0 5 0 0 1 1 3 2 0 1 1; \
         0 6 0 1 1 0 2 2 0 0 0;0 2 0;0 6 1 0 3 0 0 1;0 6 0 0 0 0 3 0 0;0 8 0;0 6 1 0 1 2 1 2; \
         0 5 1 1 1 0 0 1 0 2;0 1 6 2 1 1;0 5 1 1 1 1 2 0 0 1;0 1 11 2 2 1;0 2 0 1 1 1;0 5 1 0 2 3 1 3;0 8 0; \
         0 2 1;0 8 1;0 5 0 0 1 1 3 1 2 1 2;0 6 1 0 3 0 1 0;0 5 0 0 0 3 3 0 2;0 2 1 0;0 5 1 1 1 3 2 0 1 2; \
         0 0 0 4 1 0;0 1 9 3 0 0;0 7 0;0 2;0 0 4 7 2 0;0 0 28 7 2 0;0 6 0 2 1 1 1 2 2 1 2;0 2;0 1 2 1 1 0; \
         0 6 1 1 2 2 0 0 1 2;0 0 14 0 0 1;0 5 1 1 1 0 2 3 1 0;0 8 1;0 8 2;0 6 0 0 0 2 2 1 1;0 2 0; \
         0 0 27 1 1 0;0 5 0 0 0 1 2 1 0;0 0 27 6 2 1;0 0 8 1 0 0;0 2 0 1 1;0 5 1 0 2 2 1 1; \
         0 6 1 1 3 0 2 1 0 1;0 5 1 1 2 0 2 0 0 3;0 5 0 1 0 1 3 1 2;0 8 0;0 5 0 2 0 1 1 1 3;0 2 0 0; \
         0 0 19 9 1 1;0 5 0 2 0 0 3 0 1;0 8 0;0 7 2;0 5 0 0 1 2 2 2 1 1 2;0 5 1 1 3 3 3 1 0 0; \
         0 6 0 2 0 3 3 0 0;0 5 0 0 0 1 2 1 2;0 1 24 10 3 1;0 5 0 0 1 3 3 2 1 0 2;0 5 1 0 0 1 1 1;0 7 1; \
         0 2 0 1 1 1 1 0 1;0 6 0 0 1 0 2 1 2 0 1;0 5 0 2 1 1 2 1 1 1 0;0 5 1 1 1 3 1 2 1 0; \
         0 6 1 1 3 1 2 2 0 0;0 6 1 0 0 3 1 0;0 2 0 0 1 1;0 1 27 16 2 1;0 5 0 0 1 1 0 0 2 0 2;0 8 1;0 7 0; \
         0 0 17 11 3 1;0 2 1 0 0 0 1;0 7 0;0 1 24 7 1 0;0 1 25 9 3 1;0 2;0 0 5 12 1 1;0 8 2;0 1 14 3 0 0; \
         0 8 1;0 0 15 8 3 1;0 0 22 11 2 1;0 2 0 0 1;0 0 5 0 1 1;0 7 0;0 1 24 8 0 1;0 2 1;0 8 1;0 2 1; \
         0 0 15 3 2 0;0 8;0 1 24 3 3 0;0 2 1 0 1;0 8 0;0 0 19 5 2 1;0 2;0 7 0;0 1 17 2 0 0;0 1 15 6 0 0; \
         0 1 13 1 2 1;0 0 19 0 3 1;0 0 8 1 1 1;0 0 28 0 3 1;0 2 1;0 7 3;0 1 5 2 2 0;",
    );
}

/// A release and a grant in one batch left capacity for a waiter ahead of the granted one.
#[test]
fn waiter_ahead_of_granted_one_is_woken() {
    replay(
        Shape { instances: 3, ems: 2, requests: 25, faults: Faults::None, users: 1, polls: false },
        "3 2 3 1;1 6 0 1 1 0 2 3 3 1 0;1 5 0 0 0 0 2 0 0;1 6 0 0 0 2 3 0 1;1 2 0 0 1;2 8 0; \
         0 6 0 0 1 3 2 0 1 0 2;2 2;0 3 0;1 3;2 5 1 1 1 0 0 3 0 3;2 8 0;0 6 1 0 1 0 0 3;1 6 0 0 1 3 1 1 3 1 0; \
         0 6 0 0 0 0 0 1 2;2 2 1 0 0 0;1 3 0;0 2 1 1 0 1 1;2 6 1 1 3 2 0 0 0 2;1 6;0 2 0 0;1 5;1 1 8 0 0 1; \
         0 1 24;2 1 22 2 0 1 1;0 3 0;0 1 11 0 0 0;0 2 1 1 1;1 2;0 1 2 0 0 1;0 1 5 1 0 0;0 7 0;",
    );
}

/// A request for any EM waits at an EM; another EM that it tries is drained between the check and the commit.
#[test]
fn waiter_outlives_drain_of_another_em() {
    replay(
        Shape { instances: 2, ems: 3, requests: 60, faults: Faults::Orderly, users: 1, polls: true },
        "1 2 2 2 3 0;0 5 1 0 2 0 0 3;0 5 1 1 3 0 3 3 1 2;0 6 0 2 1 1 0 0 0 2 3;1 5 1 0 3 0 2 1;0 5 0 2 1 0 3 3 1 2 0;0 0 25 5 0 1;1 9 4 0;0 2 0 2;1 6 1 0 2 2 2 2;0 5 0 1 1 1 3 2 3 0 0;0 6 0 0 1 3 1 1 1 3 2;1 9 9 0;1 9 9 2;1 2 2;1 8 0;0 7 0;1 9 11 1 1;0 5 1 0 1 3 1 1;0 2 1 1;0 9 13;1 2 1;0 3 0;0 4 0;0 0 27 1 0 1;1 0 8 0 0 3;0 9 8 0;0 3;0 9 3 0;1 2 3;0 4 1 1 3 1 2 0;1 0 8;1 0 3;0 9 9 2;0 0 25 1 1 3;0 4 1;0 0 14 0 0 3;0 1 2 0 0 2;0 1 20 0 1 1;0 2;1 4 0;0 9 7;0 3;0 4 0;0 0 13 0 1 0;",
    );
}
