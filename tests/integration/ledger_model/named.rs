//! The few EMs, users and queues that there are, and what they are called.

use std::collections::BTreeMap;

use linkis_rm::domain::{
    em::EmInstance,
    name::Name,
    provider::Provider,
    resource::{LoadInstanceAmounts, Parts, Resource, YarnAmounts},
    scope::Scope,
};
use time::OffsetDateTime;

use crate::harness::{em, name};

pub(super) const EMS: usize = 3;
pub(super) const USERS: usize = 2;
pub(super) const QUEUES: usize = 2;

/// The queues of the cluster, the root among them.
pub(super) const PLACES: usize = QUEUES + 1;

/// The numbers of the two label sets that are counted.
pub(super) const USER_SET: i64 = 1;

pub(super) const QUEUE_SET: i64 = 2;

pub(super) const CLUSTER_ID: i64 = 7;

pub(super) fn instance(number: usize) -> EmInstance {
    em(&format!("host{number}"))
}

pub(super) fn user(number: usize) -> Name {
    name(&format!("user{number}"))
}

pub(super) fn amount(cores: i64) -> Resource {
    Resource::load_instance(0, cores, 0).unwrap()
}

/// So many cores of an EM, and of a queue if there is one.
pub(super) fn asked_of(queue: Option<usize>, cores: i64) -> Resource {
    let Some(queue) = queue else { return amount(cores) };
    let driver = LoadInstanceAmounts { cores, ..LoadInstanceAmounts::default() };
    let yarn = YarnAmounts { queue_name: queue_name(queue), queue_cores: cores, ..YarnAmounts::default() };
    Resource::from_parts(Parts::DriverAndYarn(driver, yarn)).unwrap()
}

pub(super) fn queue_name(number: usize) -> String {
    format!("queue{number}")
}

pub(super) fn path_of(queue: usize) -> String {
    format!("root.{}", queue_name(queue))
}

pub(super) fn provider() -> Provider {
    Provider { resource_type: name("Yarn"), name: name("yarn"), labels: Default::default() }
}

pub(super) fn scope_of_queue(number: usize) -> Scope {
    Scope::new(BTreeMap::from([("queue".into(), queue_name(number))]))
}

pub(super) fn scope_of(number: usize) -> Scope {
    Scope::new(BTreeMap::from([("user".into(), user(number).to_string())]))
}

pub(super) fn time_of(seconds: u64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(1_800_000_000 + i64::try_from(seconds).unwrap()).unwrap()
}
