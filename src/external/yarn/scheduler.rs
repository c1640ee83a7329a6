//! `/ws/v1/cluster/scheduler`: all queues, of the fair and of the capacity scheduler.

use crate::domain::queue::{Custom, Naming, Queue, QueueAmounts, QueueState, Queues, ROOT};

use super::{
    Capacity, MIB, ParseError,
    json::{self, Value},
};

/// What is kept of an answer.
const KEYS: &[&str] = &[
    "scheduler",
    "schedulerInfo",
    "type",
    "rootQueue",
    "childQueues",
    "queues",
    "queue",
    "queueName",
    "queuePath",
    "state",
    "maxResources",
    "usedResources",
    "resourcesUsed",
    "memory",
    "vCores",
    "capacities",
    "queueCapacitiesByPartition",
    "partitionName",
    "effectiveMinResource",
    "effectiveMaxResource",
    "absoluteCapacity",
    "absoluteMaxCapacity",
    "numActiveApps",
    "numPendingApps",
    "numActiveApplications",
    "numPendingApplications",
];

/// How many queues there may be, and how long the path of each, in bytes.
const QUEUES_MAX: usize = 20_000;
const PATH_BYTES_MAX: usize = 1024;

/// By how much a share of a cluster may be off: it was written with seven digits.
const SHARE_ERROR: f64 = 1e-6;

/// An answer whose amounts have yet to be told.
#[derive(Debug)]
pub(super) struct Scheduler {
    naming: Naming,
    queues: Vec<Found>,
}

/// A queue as it was found.
#[derive(Debug)]
struct Found {
    path: String,
    /// If the scheduler says.
    used: Option<QueueAmounts>,
    state: QueueState,
    running_applications: Option<i64>,
    pending_applications: Option<i64>,
    size: Size,
}

/// How much a queue may have.
#[derive(Debug, Clone, Copy)]
enum Size {
    /// So much in any case, and so much if others leave it.
    Amounts { guaranteed: QueueAmounts, maximum: QueueAmounts },
    /// So much of the cluster, in hundredths; likewise.
    Shares { guaranteed: f64, maximum: f64 },
}

impl Scheduler {
    /// Reads an answer.
    pub fn read(json: &[u8]) -> Result<Self, ParseError> {
        let answer = json::read(json, KEYS)?;
        let info = answer.objects("scheduler").flat_map(|value| value.objects("schedulerInfo")).next();
        let info = info.ok_or(ParseError::Missing { what: "scheduler.schedulerInfo" })?;
        let kind = info.text("type").ok_or(ParseError::Missing { what: "scheduler.schedulerInfo.type" })?;
        let mut scheduler = Self { naming: Naming::Fair, queues: Vec::new() };
        match kind {
            "fairScheduler" => {
                let root = info.objects("rootQueue").next();
                scheduler.add(root.ok_or(ParseError::Missing { what: "rootQueue" })?, None)?;
            }
            "capacityScheduler" => {
                scheduler.naming = Naming::Capacity;
                scheduler.add(info, None)?;
            }
            other => return Err(ParseError::UnknownScheduler { kind: other.chars().take(64).collect() }),
        }
        Ok(scheduler)
    }

    /// Adds a queue and all that are in it.
    fn add(&mut self, queue: &Value, parent: Option<&str>) -> Result<(), ParseError> {
        let path = path(queue, parent)?;
        if self.queues.len() >= QUEUES_MAX {
            return Err(ParseError::TooMany { most: QUEUES_MAX });
        }
        let size = match self.naming {
            Naming::Capacity => capacity_size(queue),
            _ => fair_size(queue),
        };
        let state = match queue.text("state") {
            // The fair scheduler has no states.
            None => QueueState::Running,
            Some(text) => QueueState::parse(text).ok_or(ParseError::Missing { what: "a state that is known" })?,
        };
        let used = queue.objects("usedResources").chain(queue.objects("resourcesUsed")).next();
        let applications = |fair, capacity| queue.int(fair).or_else(|| queue.int(capacity));
        self.queues.push(Found {
            used: used.map(amounts),
            state,
            running_applications: applications("numActiveApps", "numActiveApplications"),
            pending_applications: applications("numPendingApps", "numPendingApplications"),
            size: size.ok_or_else(|| ParseError::NoSize { path: path.clone() })?,
            path: path.clone(),
        });
        queue.objects("childQueues").chain(queue.objects("queues")).try_for_each(|inner| self.add_inner(inner, &path))
    }

    /// Adds queues, which stand there as such or under `queue`.
    fn add_inner(&mut self, inner: &Value, parent: &str) -> Result<(), ParseError> {
        match inner.text("queueName") {
            Some(_) => self.add(inner, Some(parent)),
            None => inner.objects("queue").try_for_each(|queue| self.add(queue, Some(parent))),
        }
    }

    /// Whether amounts are only told as shares of the cluster.
    pub fn needs_cluster(&self) -> bool {
        self.queues.iter().any(|queue| matches!(queue.size, Size::Shares { .. }))
    }

    /// The queues, of a cluster of this size.
    pub fn queues(self, capacity: Capacity, cluster: QueueAmounts) -> Result<Queues, ParseError> {
        let sums = self.sums();
        let queues = self.queues.into_iter().zip(sums).map(|(found, used)| Queue {
            max: found.size.amounts(capacity, cluster),
            used,
            path: found.path,
            state: found.state,
            running_applications: found.running_applications,
            pending_applications: found.pending_applications,
            custom: Custom::new(),
        });
        Queues::new(self.naming, queues).map_err(|same| ParseError::SamePath { path: same.0 })
    }

    /// What each queue uses; where that is not told, the sum of what is in it. A queue stands before all that are in it.
    fn sums(&self) -> Vec<QueueAmounts> {
        let mut sums: Vec<_> = self.queues.iter().map(|queue| queue.used.unwrap_or_default()).collect();
        let places: std::collections::HashMap<&str, usize> =
            self.queues.iter().enumerate().map(|(place, queue)| (queue.path.as_str(), place)).collect();
        for (place, queue) in self.queues.iter().enumerate().rev() {
            let parent = queue.path.rsplit_once('.').and_then(|(parent, _)| places.get(parent)).copied();
            let unsaid = parent.filter(|parent| self.queues.get(*parent).is_some_and(|queue| queue.used.is_none()));
            let own = sums.get(place).copied().unwrap_or_default();
            if let Some(sum) = unsaid.and_then(|parent| sums.get_mut(parent)) {
                *sum = sum.plus(own);
            }
        }
        sums
    }
}

impl Size {
    fn amounts(self, capacity: Capacity, cluster: QueueAmounts) -> QueueAmounts {
        match (self, capacity) {
            (Self::Amounts { maximum, .. }, Capacity::Maximum) => maximum,
            (Self::Amounts { guaranteed, .. }, Capacity::Guaranteed) => guaranteed,
            (Self::Shares { maximum, .. }, Capacity::Maximum) => share(cluster, maximum),
            (Self::Shares { guaranteed, .. }, Capacity::Guaranteed) => share(cluster, guaranteed),
        }
    }
}

/// So many hundredths of the cluster, in whole MiB and cores.
fn share(cluster: QueueAmounts, hundredths: f64) -> QueueAmounts {
    let of = |amount: i64| (amount as f64 * hundredths / 100.0 * (1.0 + SHARE_ERROR)).floor() as i64;
    QueueAmounts { memory: of(cluster.memory / MIB).saturating_mul(MIB), cores: of(cluster.cores) }
}

/// The path of a queue: some schedulers write it, some the last name alone.
fn path(queue: &Value, parent: Option<&str>) -> Result<String, ParseError> {
    let name = queue.text("queueName").ok_or(ParseError::Missing { what: "queueName" })?;
    let written = queue.text("queuePath").unwrap_or(name);
    let is_path = written == ROOT || written.strip_prefix(ROOT).is_some_and(|rest| rest.starts_with('.'));
    let path = match parent {
        None => ROOT.to_owned(),
        Some(_) if is_path => written.to_owned(),
        Some(parent) => format!("{parent}.{name}"),
    };
    match path.len() > PATH_BYTES_MAX {
        true => Err(ParseError::LongPath { most: PATH_BYTES_MAX }),
        false => Ok(path),
    }
}

/// Amounts, of which none is below zero; what is too large is the largest.
fn amounts(value: &Value) -> QueueAmounts {
    let of = |key| value.int(key).unwrap_or_default().max(0);
    QueueAmounts { memory: of("memory").saturating_mul(MIB), cores: of("vCores") }
}

fn fair_size(queue: &Value) -> Option<Size> {
    let maximum = amounts(queue.objects("maxResources").next()?);
    // What it guarantees depends on who else asks.
    Some(Size::Amounts { guaranteed: maximum, maximum })
}

/// Of the nodes that have no label; partitions of others are not looked at.
fn capacity_size(queue: &Value) -> Option<Size> {
    let mut partitions = queue.objects("capacities").flat_map(|value| value.objects("queueCapacitiesByPartition"));
    let plain = partitions.find(|partition| partition.text("partitionName").unwrap_or_default().is_empty());
    let effective = |key| plain.and_then(|partition| partition.objects(key).next()).map(amounts);
    if let Some((guaranteed, maximum)) = effective("effectiveMinResource").zip(effective("effectiveMaxResource")) {
        return Some(Size::Amounts { guaranteed, maximum });
    }
    // The root of old releases has no share: it is everything.
    let is_root = queue.text("queueName") == Some(ROOT);
    let share = |key| queue.real(key).or(is_root.then_some(100.0));
    Some(Size::Shares { guaranteed: share("absoluteCapacity")?, maximum: share("absoluteMaxCapacity")? })
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
