//! Pruning: the counters of scopes in which no ticket counts any more.

use std::time::Duration;

use crate::store::{
    StoreError, Work, label_resource,
    session::{Session, answered},
};

use super::{Step, Task, lease::Holder};

/// How many counters one step looks at: more than a million in the half hour that they may be of nothing.
const PAGE: i64 = 500;

/// How many one statement locks, for whose rows batches would wait.
const BITE: usize = 32;

/// Goes through all counters, round and round, and removes those of nothing.
#[derive(Debug)]
pub struct Pruning {
    holder: Holder,
    /// The last that was looked at; empty for none.
    after: Vec<u8>,
}

impl Pruning {
    /// From the first.
    pub fn new(holder: Holder) -> Self {
        Self { holder, after: Vec::new() }
    }
}

impl Task for Pruning {
    const NAME: &'static str = "pruning";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_millis(700);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if self.holder.holds() {
            let (idle, last) = answered(label_resource::idle(session.get().await?, &self.after, PAGE)).await?;
            for some in idle.chunks(BITE) {
                answered(label_resource::remove_idle(session.get().await?, some)).await?;
            }
            self.after = last.unwrap_or_default();
        }
        Ok(Step::Done)
    }
}
