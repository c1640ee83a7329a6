//! Engines that are taken back for waiting requests.

use rm_model::{
    limit::LabelPattern,
    reclaim::{ReclaimMode, ReclaimPolicy},
};

use crate::harness::*;

mod busy;
mod choice;
mod exempt;
mod kills;
mod page;
mod policies;
mod size;

fn policy(labels: &[(&str, Option<&str>)], mode: ReclaimMode) -> ReclaimPolicy {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
    ReclaimPolicy::new(LabelPattern::new(labels.collect()), mode)
}
