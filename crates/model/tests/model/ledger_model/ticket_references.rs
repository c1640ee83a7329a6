//! The EMs, users and queues of the model, with their names.

use rm_model::{
    em::EmInstance,
    name::Name,
    provider::Provider,
    resource::{LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
    scope::Scope,
};
use time::OffsetDateTime;

use crate::harness::{em, name};

pub(super) const EMS: usize = 3;
pub(super) const USERS: usize = 2;
pub(super) const QUEUES: usize = 2;
pub(super) const TENANTS: usize = 2;

/// Types of engines, and the number of the family of each.
pub(super) const ENGINE_TYPES: [(&str, usize); 3] = [("spark-3.2.1", 0), ("spark-2.4.3", 0), ("hive-2.3.3", 1)];

/// Applications that engines report.
pub(super) const APPLICATIONS: usize = 3;

/// The queues of the cluster, the root among them.
pub(super) const PLACES: usize = QUEUES + 1;

/// Counted label sets in check order, each with its labels by descending rank.
pub(super) const SETS: [&[&str]; 4] = [&["user"], &["queue"], &["em", "engine_family"], &["user", "tenant"]];

pub(super) const USER_SET: usize = 0;
pub(super) const QUEUE_SET: usize = 1;
pub(super) const FAMILY_SET: usize = 2;
pub(super) const TENANT_SET: usize = 3;

/// Returns the values of the labels of a set, in their order; `None` for a missing label.
pub(super) type Values = [Option<usize>; 2];

pub(super) const CLUSTER_ID: i64 = 7;

pub(super) fn instance(number: usize) -> EmInstance {
    em(&format!("host{number}"))
}

pub(super) fn user(number: usize) -> Name {
    name(&format!("user{number}"))
}

/// Total or protected amounts of an EM, with enough instances.
pub(super) fn provided(cores: i64, instances: i64) -> Resource {
    Resource::load_instance(0, cores, instances).unwrap()
}

/// Returns the resource of one engine with cores of an EM and of its queue, if any; there it can have an application.
pub(super) fn asked_of(queue: Option<usize>, cores: i64, application: Option<usize>) -> Resource {
    let Some(queue) = queue else { return provided(cores, 1) };
    let driver = LoadInstanceAmounts { cores, instances: 1, ..LoadInstanceAmounts::default() };
    let application_id = application.map(application_id).unwrap_or_default();
    let queue_name = queue_name(queue);
    let yarn = YarnAmounts { queue_name, queue_cores: cores, application_id, ..YarnAmounts::default() };
    Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn)).unwrap()
}

pub(super) fn application_id(number: usize) -> String {
    format!("application_1_{number}")
}

pub(super) fn queue_name(number: usize) -> String {
    format!("queue{number}")
}

/// Returns the path of the root or of a queue.
pub(super) fn path_of(place: usize) -> String {
    if place == 0 { "root".to_owned() } else { format!("root.{}", queue_name(place - 1)) }
}

pub(super) fn provider() -> Provider {
    Provider { resource_type: name("Yarn"), name: name("yarn"), labels: Default::default() }
}

/// Returns the id of a label set.
pub(super) fn label_set_id(set: usize) -> i64 {
    i64::try_from(set).unwrap() + 1
}

pub(super) fn tenant(number: usize) -> String {
    format!("tenant{number}")
}

/// Returns a value of a label.
pub(super) fn value_of(key: &str, number: usize) -> String {
    match key {
        "user" => user(number).to_string(),
        "queue" => queue_name(number),
        "em" => instance(number).instance.to_string(),
        "engine_family" => ["spark", "hive"][number].to_owned(),
        "tenant" => tenant(number),
        other => unreachable!("{other}"),
    }
}

/// Returns a scope of a label set; a missing label has the value "".
pub(super) fn scope_of(set: usize, values: Values) -> Scope {
    let value = |key: &str, number: Option<usize>| number.map(|number| value_of(key, number)).unwrap_or_default();
    let labels = SETS[set].iter().zip(values).map(|(key, number)| ((*key).to_owned(), value(key, number)));
    Scope::new(labels.collect())
}

pub(super) fn time_of(seconds: u64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(1_800_000_000 + i64::try_from(seconds).unwrap()).unwrap()
}
