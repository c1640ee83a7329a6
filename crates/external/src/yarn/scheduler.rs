//! Parsing of `/ws/v1/cluster/scheduler`: all queues of the fair and the capacity scheduler, with maximum and use.
//!
//! Releases write amounts as objects, texts or shares of the cluster; a queue without a maximum or a use is an
//! error. Maxima are rounded down and uses up, so that no amount is granted twice. Caller: `fetch`.

use rm_model::queue::{CustomAmountsByName, ExternalQueue, QueueAmounts, QueueNaming, QueueState, QueueTree, ROOT};

use super::{
    CapacityMode, MIB, YarnParseError,
    json::{self, JsonValue, Rounds},
};

/// Keys that are kept of a response.
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
    "memorySize",
    "vCores",
    "virtualCores",
    "capacities",
    "queueCapacitiesByPartition",
    "partitionName",
    "effectiveMinResource",
    "effectiveMaxResource",
    "absoluteCapacity",
    "absoluteMaxCapacity",
    "absoluteUsedCapacity",
    "numActiveApps",
    "numPendingApps",
    "numActiveApplications",
    "numPendingApplications",
];

/// Maximum number of queues, and maximum length of a queue path in bytes.
const QUEUES_MAX: usize = 20_000;
const PATH_BYTES_MAX: usize = 1024;

/// Relative error of a share of the cluster, which is written with seven digits.
const SHARE_ERROR: f64 = 1e-6;

/// Queues of a response before shares are converted into amounts.
#[derive(Debug)]
pub(super) struct SchedulerReply {
    naming: QueueNaming,
    queues: Vec<QueueNode>,
}

/// A queue of a response.
#[derive(Debug)]
struct QueueNode {
    path: String,
    used: Use,
    state: QueueState,
    running_applications: Option<i64>,
    pending_applications: Option<i64>,
    size: QueueSize,
}

/// Use of a queue, as the scheduler states it.
#[derive(Debug, Clone, Copy)]
enum Use {
    /// Memory and cores.
    Amounts(QueueAmounts),
    /// Percent of the cluster: the larger of the shares of its memory and of its cores.
    Share(f64),
    /// Not stated. The use is then the sum over the child queues.
    Unstated,
}

/// Capacity of a queue.
#[derive(Debug, Clone, Copy)]
enum QueueSize {
    /// Guaranteed and maximum amounts.
    Amounts { guaranteed: QueueAmounts, maximum: QueueAmounts },
    /// Guaranteed and maximum share of the cluster, in percent.
    Shares { guaranteed: f64, maximum: f64 },
}

impl SchedulerReply {
    /// Parses a response.
    pub fn read(json: &[u8]) -> Result<Self, YarnParseError> {
        let answer = json::read(json, KEYS)?;
        let info = answer.objects("scheduler").flat_map(|value| value.objects("schedulerInfo")).next();
        let info = info.ok_or(YarnParseError::Missing { what: "scheduler.schedulerInfo" })?;
        let kind = info.text("type").ok_or(YarnParseError::Missing { what: "scheduler.schedulerInfo.type" })?;
        let mut scheduler = Self { naming: QueueNaming::Fair, queues: Vec::new() };
        match kind {
            "fairScheduler" => {
                let root = info.objects("rootQueue").next();
                scheduler.add(root.ok_or(YarnParseError::Missing { what: "rootQueue" })?, None)?;
            }
            "capacityScheduler" => {
                scheduler.naming = QueueNaming::Capacity;
                scheduler.add(info, None)?;
            }
            other => return Err(YarnParseError::UnknownScheduler { kind: other.chars().take(64).collect() }),
        }
        Ok(scheduler)
    }

    /// Adds a queue and all queues below it.
    fn add(&mut self, queue: &JsonValue, parent: Option<&str>) -> Result<(), YarnParseError> {
        let path = path(queue, parent)?;
        if self.queues.len() >= QUEUES_MAX {
            return Err(YarnParseError::TooMany { most: QUEUES_MAX });
        }
        let size = match self.naming {
            QueueNaming::Capacity => capacity_size(queue),
            _ => fair_size(queue),
        };
        let size = size.map_err(|NotAmounts| YarnParseError::NoAmounts { what: "maximum", path: path.clone() })?;
        let used = used(queue).map_err(|NotAmounts| YarnParseError::NoAmounts { what: "use", path: path.clone() })?;
        let state = match queue.text("state") {
            // The fair scheduler has no states.
            None => QueueState::Running,
            Some(text) => QueueState::parse(text).ok_or(YarnParseError::Missing { what: "a known state" })?,
        };
        let applications = |fair, capacity| queue.int(fair).or_else(|| queue.int(capacity));
        self.queues.push(QueueNode {
            used,
            state,
            running_applications: applications("numActiveApps", "numActiveApplications"),
            pending_applications: applications("numPendingApps", "numPendingApplications"),
            size: size.ok_or_else(|| YarnParseError::NoSize { path: path.clone() })?,
            path: path.clone(),
        });
        queue.objects("childQueues").chain(queue.objects("queues")).try_for_each(|inner| self.add_inner(inner, &path))
    }

    /// Adds child queues, which are listed directly or under `queue`.
    fn add_inner(&mut self, inner: &JsonValue, parent: &str) -> Result<(), YarnParseError> {
        match inner.text("queueName") {
            Some(_) => self.add(inner, Some(parent)),
            None => inner.objects("queue").try_for_each(|queue| self.add(queue, Some(parent))),
        }
    }

    /// Returns whether a queue states only shares, so that the size of the cluster is needed.
    pub fn needs_cluster(&self) -> bool {
        let is_share =
            |queue: &QueueNode| matches!((queue.size, queue.used), (QueueSize::Shares { .. }, _) | (_, Use::Share(_)));
        self.queues.iter().any(is_share)
    }

    /// Returns the queues of a cluster of size `cluster`.
    pub fn queues(self, capacity: CapacityMode, cluster: QueueAmounts) -> Result<QueueTree, YarnParseError> {
        let sums = self.sums(cluster)?;
        let queues = self.queues.into_iter().zip(sums).map(|(found, used)| ExternalQueue {
            max: found.size.amounts(capacity, cluster),
            used,
            path: found.path,
            state: found.state,
            running_applications: found.running_applications,
            pending_applications: found.pending_applications,
            custom: CustomAmountsByName::new(),
        });
        QueueTree::new(self.naming, queues).map_err(|same| YarnParseError::SamePath { path: same.0 })
    }

    /// Returns the use of each queue: the stated amounts, or else the sum over its child queues, or else its share of
    /// the cluster. A queue precedes its children in the list.
    fn sums(&self, cluster: QueueAmounts) -> Result<Vec<QueueAmounts>, YarnParseError> {
        // `None` for a queue without children.
        let mut sums: Vec<Option<QueueAmounts>> = vec![None; self.queues.len()];
        let places: std::collections::HashMap<&str, usize> =
            self.queues.iter().enumerate().map(|(place, queue)| (queue.path.as_str(), place)).collect();
        for (place, queue) in self.queues.iter().enumerate().rev() {
            let Some(sum) = sums.get_mut(place) else { continue };
            let used = match (queue.used, *sum) {
                (Use::Amounts(amounts), _) | (_, Some(amounts)) => amounts,
                (Use::Share(hundredths), None) => share(cluster, hundredths, Rounds::Up),
                (Use::Unstated, None) => return Err(YarnParseError::NoUse { path: queue.path.clone() }),
            };
            *sum = Some(used);
            let parent = queue.path.rsplit_once('.').and_then(|(parent, _)| places.get(parent));
            if let Some(sum) = parent.and_then(|parent| sums.get_mut(*parent)) {
                *sum = Some(sum.unwrap_or_default().plus(used));
            }
        }
        Ok(sums.into_iter().map(Option::unwrap_or_default).collect())
    }
}

impl QueueSize {
    fn amounts(self, capacity: CapacityMode, cluster: QueueAmounts) -> QueueAmounts {
        match (self, capacity) {
            (Self::Amounts { maximum, .. }, CapacityMode::Maximum) => maximum,
            (Self::Amounts { guaranteed, .. }, CapacityMode::Guaranteed) => guaranteed,
            (Self::Shares { maximum, .. }, CapacityMode::Maximum) => share(cluster, maximum, Rounds::Down),
            (Self::Shares { guaranteed, .. }, CapacityMode::Guaranteed) => share(cluster, guaranteed, Rounds::Down),
        }
    }
}

/// Returns a share of the cluster in whole MiB and cores.
fn share(cluster: QueueAmounts, hundredths: f64, rounds: Rounds) -> QueueAmounts {
    let exact = match rounds {
        Rounds::Down => 1.0 + SHARE_ERROR,
        Rounds::Up => 1.0 - SHARE_ERROR,
    };
    let of = |amount: i64| rounds.whole(amount as f64 * hundredths / 100.0 * exact).max(0);
    QueueAmounts { memory: of(cluster.memory / MIB).saturating_mul(MIB), cores: of(cluster.cores) }
}

/// Returns the path of a queue. Schedulers write either the path or the last name only.
fn path(queue: &JsonValue, parent: Option<&str>) -> Result<String, YarnParseError> {
    let name = queue.text("queueName").ok_or(YarnParseError::Missing { what: "queueName" })?;
    let written = queue.text("queuePath").unwrap_or(name);
    let is_path = written == ROOT || written.strip_prefix(ROOT).is_some_and(|rest| rest.starts_with('.'));
    let path = match parent {
        None => ROOT.to_owned(),
        Some(_) if is_path => written.to_owned(),
        Some(parent) => format!("{parent}.{name}"),
    };
    match path.len() > PATH_BYTES_MAX {
        true => Err(YarnParseError::LongPath { most: PATH_BYTES_MAX }),
        false => Ok(path),
    }
}

/// Error: a value is present and is no amount of memory and cores.
struct NotAmounts;

/// Parses the first of `values` that has a valid form; `None` if none states anything.
fn amounts<'a>(
    values: impl Iterator<Item = &'a JsonValue>,
    rounds: Rounds,
) -> Result<Option<QueueAmounts>, NotAmounts> {
    let mut read = Ok(None);
    for value in values.filter(|value| !value.is_empty()) {
        match pair(value, rounds) {
            Some([mib, cores]) => {
                return Ok(Some(QueueAmounts { memory: mib.max(0).saturating_mul(MIB), cores: cores.max(0) }));
            }
            None => read = Err(NotAmounts),
        }
    }
    read
}

/// Returns MiB and cores of an object, or of a text such as `<memory:61440, vCores:60>`.
fn pair(value: &JsonValue, rounds: Rounds) -> Option<[i64; 2]> {
    const KEYS: [[&str; 2]; 2] = [["memory", "memorySize"], ["vCores", "virtualCores"]];
    let [memory, cores] = match value {
        JsonValue::Object(_) => KEYS.map(|keys| {
            let mut values = keys.into_iter().flat_map(|key| value.all(key));
            values.find_map(|value| value.whole(rounds))
        }),
        JsonValue::Text(text) => {
            let inner = text.trim().strip_prefix('<')?.strip_suffix('>')?;
            KEYS.map(|keys| {
                let mut entries = inner.split(',').filter_map(|entry| entry.split_once(':'));
                let (_, number) = entries.find(|(key, _)| keys.contains(&key.trim()))?;
                json::whole(number, rounds)
            })
        }
        _ => [None, None],
    };
    Some([memory?, cores?])
}

fn used(queue: &JsonValue) -> Result<Use, NotAmounts> {
    let values = queue.all("usedResources").chain(queue.all("resourcesUsed"));
    // Releases exist that write one as a text and one as an object; the object is exact.
    let (objects, others): (Vec<_>, Vec<_>) = values.partition(|value| matches!(value, JsonValue::Object(_)));
    let amounts = amounts(objects.into_iter().chain(others), Rounds::Up)?.map(Use::Amounts);
    Ok(amounts.or(queue.real("absoluteUsedCapacity").map(Use::Share)).unwrap_or(Use::Unstated))
}

fn fair_size(queue: &JsonValue) -> Result<Option<QueueSize>, NotAmounts> {
    let maximum = amounts(queue.all("maxResources"), Rounds::Down)?;
    // The guarantee depends on the demand of the other queues.
    Ok(maximum.map(|maximum| QueueSize::Amounts { guaranteed: maximum, maximum }))
}

/// Returns the capacity on nodes without a label. Partitions of labelled nodes are ignored.
fn capacity_size(queue: &JsonValue) -> Result<Option<QueueSize>, NotAmounts> {
    let mut partitions = queue.objects("capacities").flat_map(|value| value.objects("queueCapacitiesByPartition"));
    let plain = partitions.find(|partition| partition.text("partitionName").unwrap_or_default().is_empty());
    let effective = |key| amounts(plain.into_iter().flat_map(|partition| partition.all(key)), Rounds::Down);
    if let Some((guaranteed, maximum)) = effective("effectiveMinResource")?.zip(effective("effectiveMaxResource")?) {
        return Ok(Some(QueueSize::Amounts { guaranteed, maximum }));
    }
    // The root of old releases states no share: it is the whole cluster.
    let is_root = queue.text("queueName") == Some(ROOT);
    let share = |key| queue.real(key).or(is_root.then_some(100.0));
    let shares = share("absoluteCapacity").zip(share("absoluteMaxCapacity"));
    Ok(shares.map(|(guaranteed, maximum)| QueueSize::Shares { guaranteed, maximum }))
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
