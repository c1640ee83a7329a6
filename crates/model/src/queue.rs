//! External queues as their scheduler reports them: amounts, states, and the lookup of a queue by name.
//!
//! A Kubernetes namespace is a queue below the cluster's nodes. Never: counts grants; [`super::external`] does.
//! Callers: the readers of `rm-external`, which create the queues, and [`super::external`].

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

/// Name of the root queue.
pub const ROOT: &str = "root";

/// Maximum number of paths that an error about an ambiguous name lists.
const AMBIGUOUS_TOLD_MAX: usize = 8;

/// Maximum of a namespace without a quota in a dimension; the nodes limit it then.
pub const NO_MAXIMUM: i64 = i64::MAX;

/// Amounts in an external queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueAmounts {
    /// Memory, in bytes.
    pub memory: i64,
    /// Virtual cores; for Kubernetes, thousandths of a core.
    pub cores: i64,
}

impl QueueAmounts {
    /// Returns the minimum per dimension.
    pub fn least(self, other: Self) -> Self {
        Self { memory: self.memory.min(other.memory), cores: self.cores.min(other.cores) }
    }

    /// Returns the maximum per dimension.
    pub fn most(self, other: Self) -> Self {
        Self { memory: self.memory.max(other.memory), cores: self.cores.max(other.cores) }
    }

    /// Returns whether each dimension is at least that of `other`.
    pub fn covers(self, other: Self) -> bool {
        self.memory >= other.memory && self.cores >= other.cores
    }

    /// Returns the saturating sum.
    pub fn plus(self, other: Self) -> Self {
        Self { memory: self.memory.saturating_add(other.memory), cores: self.cores.saturating_add(other.cores) }
    }

    /// Returns the saturating difference; negative where `other` is larger.
    pub fn minus(self, other: Self) -> Self {
        Self { memory: self.memory.saturating_sub(other.memory), cores: self.cores.saturating_sub(other.cores) }
    }

    /// Returns the granted amount minus the shown amount, at least 0.
    pub fn unseen(self, shown: Self) -> Self {
        self.minus(shown).most(Self::default())
    }

    /// Returns this amount in the dimensions of `decides`, and `other` elsewhere.
    fn where_decided(self, decides: DecidingDimensions, other: Self) -> Self {
        Self {
            memory: if decides.memory { self.memory } else { other.memory },
            cores: if decides.cores { self.cores } else { other.cores },
        }
    }
}

const MOST: QueueAmounts = QueueAmounts { memory: i64::MAX, cores: i64::MAX };

/// Dimensions in which a queue limits its capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecidingDimensions {
    memory: bool,
    cores: bool,
}

impl DecidingDimensions {
    const ALL: Self = Self { memory: true, cores: true };

    /// Returns the dimensions with a maximum.
    fn where_limited(max: QueueAmounts) -> Self {
        Self { memory: max.memory != NO_MAXIMUM, cores: max.cores != NO_MAXIMUM }
    }

    fn elsewhere(self) -> Self {
        Self { memory: !self.memory, cores: !self.cores }
    }

    /// Returns `left` in these dimensions, and an unlimited amount elsewhere.
    pub fn left(self, left: QueueAmounts) -> QueueAmounts {
        left.where_decided(self, MOST)
    }
}

text_enum! {
    /// Whether a queue accepts applications. The order makes the most restrictive state of a path the maximum. The texts
    /// are those of YARN.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub enum QueueState {
        /// The queue accepts applications.
        Running = "RUNNING",
        /// The queue accepts none, and its running applications finish.
        Draining = "DRAINING",
        /// The queue accepts none.
        Stopped = "STOPPED",
    }
}

/// Maximum and use of a dimension other than memory and cores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CustomAmounts {
    /// Maximum amount.
    pub max: i64,
    /// Used amount.
    pub used: i64,
}

/// Amounts by the names of custom dimensions.
pub type CustomAmountsByName = BTreeMap<Arc<str>, CustomAmounts>;

/// A queue as its scheduler reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalQueue {
    /// Names from the root to the queue, joined by dots.
    pub path: String,
    /// Maximum of all its applications together.
    pub max: QueueAmounts,
    /// Use of all its applications together.
    pub used: QueueAmounts,
    /// State of this queue alone, without its ancestors.
    pub state: QueueState,
    /// Number of running applications; `None` if the scheduler does not report it.
    pub running_applications: Option<i64>,
    /// Number of pending applications; `None` if the scheduler does not report it.
    pub pending_applications: Option<i64>,
    /// Amounts in custom dimensions, for display only: no decision uses them.
    pub custom: CustomAmountsByName,
}

/// Names of queues besides their full paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum QueueNaming {
    /// The path without the root.
    #[default]
    Fair,
    /// The path without the root, and the last name alone.
    Capacity,
    /// Kubernetes namespaces by their names. The nodes, as the root, limit every dimension that no quota limits.
    Namespaces,
}

/// All queues of an external cluster at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueTree {
    naming: QueueNaming,
    by_path: BTreeMap<String, ExternalQueue>,
}

/// Reason why a name refers to no queue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// No queue has the name.
    #[error("there is no queue {name:?}; ListQueues returns all queues")]
    NotFound {
        /// Requested name.
        name: String,
    },
    /// Several queues have the name.
    #[error("the queue name {name:?} is ambiguous; give one of the paths {}", paths.join(" or "))]
    Ambiguous {
        /// Requested name.
        name: String,
        /// Paths of the first matching queues.
        paths: Vec<String>,
    },
}

/// Error: two queues have this path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DuplicatePath(pub String);

impl QueueTree {
    /// Creates the set of all queues.
    ///
    /// # Errors
    /// [`DuplicatePath`] if two queues have the same path.
    pub fn new(naming: QueueNaming, queues: impl IntoIterator<Item = ExternalQueue>) -> Result<Self, DuplicatePath> {
        let mut by_path = BTreeMap::new();
        for queue in queues {
            match by_path.entry(queue.path.clone()) {
                Entry::Vacant(entry) => drop(entry.insert(queue)),
                Entry::Occupied(entry) => return Err(DuplicatePath(entry.key().clone())),
            }
        }
        Ok(Self { naming, by_path })
    }

    /// Returns the naming of the queues.
    pub fn naming(&self) -> QueueNaming {
        self.naming
    }

    /// Returns the queue that `name` refers to.
    ///
    /// # Errors
    /// [`QueueError`] if no queue or several queues match.
    pub fn find(&self, name: &str) -> Result<&ExternalQueue, QueueError> {
        if let Some(queue) = self.by_path.get(name) {
            return Ok(queue);
        }
        let mut meant = match self.naming {
            QueueNaming::Fair | QueueNaming::Namespaces => Vec::new(),
            QueueNaming::Capacity => self.by_path.values().filter(|queue| last_name(&queue.path) == name).collect(),
        };
        if meant.is_empty() {
            meant.extend(self.by_path.get(&format!("{ROOT}.{name}")));
        }
        match meant[..] {
            [queue] => Ok(queue),
            [] => Err(QueueError::NotFound { name: name.to_owned() }),
            _ => {
                let paths = meant.into_iter().map(|queue| queue.path.clone()).take(AMBIGUOUS_TOLD_MAX).collect();
                Err(QueueError::Ambiguous { name: name.to_owned(), paths })
            }
        }
    }

    /// Returns the queue and its ancestors, up to the root.
    pub fn along<'a>(&'a self, queue: &'a ExternalQueue) -> impl Iterator<Item = &'a ExternalQueue> {
        let ends = queue.path.match_indices('.').map(|(end, _)| end).rev();
        let above = ends.filter_map(|end| self.by_path.get(queue.path.get(..end)?));
        std::iter::once(queue).chain(above)
    }

    /// As [`QueueTree::along`], each queue with the dimensions that it limits. For a namespace: its quotas, and the nodes in
    /// the other dimensions.
    pub fn deciding<'a>(
        &'a self,
        queue: &'a ExternalQueue,
    ) -> impl Iterator<Item = (&'a ExternalQueue, DecidingDimensions)> {
        let own = match self.naming {
            QueueNaming::Fair | QueueNaming::Capacity => None,
            QueueNaming::Namespaces => Some(DecidingDimensions::where_limited(queue.max)),
        };
        self.along(queue).map(move |along| match own {
            None => (along, DecidingDimensions::ALL),
            Some(own) if along.path == queue.path => (along, own),
            Some(own) => (along, own.elsewhere()),
        })
    }

    /// Returns the capacity left in the queue, limited by its ancestors.
    pub fn left(&self, queue: &ExternalQueue) -> QueueAmounts {
        self.least(queue, |queue| queue.max.minus(queue.used))
    }

    /// Returns the minimum of `left` over all limiting queues.
    pub fn least(&self, queue: &ExternalQueue, left: impl Fn(&ExternalQueue) -> QueueAmounts) -> QueueAmounts {
        self.deciding(queue).fold(MOST, |least, (queue, decides)| least.least(decides.left(left(queue))))
    }

    /// Returns the maximum and the use of one queue; for a namespace without a quota, those of the nodes. The maximum is
    /// `None` if it is unknown.
    pub fn max_and_used(&self, queue: &ExternalQueue) -> (Option<QueueAmounts>, QueueAmounts) {
        if self.naming != QueueNaming::Namespaces {
            return (Some(queue.max), queue.used);
        }
        let unknown = (MOST, QueueAmounts::default());
        let (max, used) = self.deciding(queue).fold(unknown, |(max, used), (queue, decides)| {
            (queue.max.where_decided(decides, max), queue.used.where_decided(decides, used))
        });
        let is_known = DecidingDimensions::where_limited(max) == DecidingDimensions::ALL;
        (is_known.then_some(max), used)
    }

    /// Returns the amounts in custom dimensions; for a namespace, its quotas and otherwise the nodes.
    pub fn custom<'a>(&'a self, queue: &'a ExternalQueue) -> BTreeMap<&'a str, CustomAmounts> {
        let nodes = self.by_path.get(ROOT).filter(|_| self.naming == QueueNaming::Namespaces);
        let all = nodes.into_iter().chain([queue]).flat_map(|queue| &queue.custom);
        all.map(|(name, amounts)| (&**name, *amounts)).collect()
    }

    /// Returns the most restrictive state of the queue and its ancestors.
    pub fn state(&self, queue: &ExternalQueue) -> QueueState {
        self.along(queue).map(|queue| queue.state).max().unwrap_or(queue.state)
    }

    /// Returns the queues after the path `after`, in path order.
    pub fn behind(&self, after: Option<&str>) -> impl Iterator<Item = &ExternalQueue> {
        use std::ops::Bound;
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.by_path.range::<str, _>((from, Bound::Unbounded)).map(|(_, queue)| queue)
    }
}

/// Returns whether a path is that of the queue or of a descendant.
pub fn is_in(path: &str, queue: &str) -> bool {
    path.strip_prefix(queue).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn last_name(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// An application that runs in an external queue or is pending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Application {
    /// Application id, such as `application_1795304054064_0001`.
    pub id: String,
    /// Name that the user gave.
    pub name: String,
    /// User of the application.
    pub user: String,
    /// Queue in the scheduler's notation: the path or the last name.
    pub queue: String,
    /// State, as YARN reports it.
    pub state: String,
    /// Allocated amounts.
    pub allocated: QueueAmounts,
    /// Start time, in milliseconds since 1970.
    pub start_millis: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(path: &str, max: i64, used: i64) -> ExternalQueue {
        let amounts = |n| QueueAmounts { memory: n, cores: n };
        ExternalQueue {
            path: path.into(),
            max: amounts(max),
            used: amounts(used),
            state: QueueState::Running,
            running_applications: None,
            pending_applications: None,
            custom: Default::default(),
        }
    }

    fn queues(naming: QueueNaming) -> QueueTree {
        let all = ["root", "root.a", "root.a.x", "root.b", "root.b.x", "root.b.y", "root.a.a", "root.c.d"];
        QueueTree::new(naming, all.map(|path| queue(path, 10, 0))).unwrap()
    }

    fn found(naming: QueueNaming, name: &str) -> Result<String, QueueError> {
        queues(naming).find(name).map(|queue| queue.path.clone())
    }

    #[test]
    fn queue_name_with_or_without_root_is_found() {
        for naming in [QueueNaming::Fair, QueueNaming::Capacity] {
            for (name, path) in [("root", "root"), ("root.b.y", "root.b.y"), ("b.y", "root.b.y"), ("b", "root.b")] {
                assert_eq!(found(naming, name).as_deref(), Ok(path), "{naming:?}");
            }
            for name in ["", "z", "root.z", "oot", ".b", "root."] {
                assert_eq!(found(naming, name), Err(QueueError::NotFound { name: name.into() }), "{naming:?}");
            }
        }
        assert_eq!(found(QueueNaming::Capacity, "y").as_deref(), Ok("root.b.y"));
        assert!(found(QueueNaming::Fair, "y").is_err(), "the fair scheduler would not find it either");
        assert_eq!(found(QueueNaming::Fair, "a").as_deref(), Ok("root.a"));
    }

    #[test]
    fn queue_leaf_name_of_two_queues_is_ambiguous() {
        let error = found(QueueNaming::Capacity, "x").unwrap_err();
        assert_eq!(error.to_string(), r#"the queue name "x" is ambiguous; give one of the paths root.a.x or root.b.x"#);
        assert!(matches!(found(QueueNaming::Capacity, "a"), Err(QueueError::Ambiguous { .. })), "root.a and root.a.a");
        assert!(found(QueueNaming::Fair, "x").is_err());
    }

    #[test]
    fn queue_head_room_is_minimum_along_path() {
        let mut all = vec![queue("root", 100, 60), queue("root.a", 80, 60), queue("root.a.x", 40, 5)];
        let left = |all: &[ExternalQueue], path| {
            let queues = QueueTree::new(QueueNaming::Fair, all.to_vec()).unwrap();
            let queue = queues.find(path).unwrap();
            (queues.left(queue).memory, queues.state(queue))
        };
        assert_eq!(left(&all, "root.a.x"), (20, QueueState::Running));
        assert_eq!(left(&all, "root"), (40, QueueState::Running));
        all[1].state = QueueState::Draining;
        all[0].used.memory = 130;
        assert_eq!(left(&all, "root.a.x"), (-30, QueueState::Draining), "more than there is");
        all[0].state = QueueState::Stopped;
        assert_eq!(left(&all, "root.a.x").1, QueueState::Stopped);
    }

    #[test]
    fn namespace_quota_precedes_nodes() {
        let mut all =
            vec![queue("root", 100, 90), queue("root.a", 50, 10), queue("root.b", 50, 10), queue("root.c", 5, 0)];
        all[1].max = QueueAmounts { memory: 50, cores: NO_MAXIMUM };
        all[2].max = QueueAmounts { memory: NO_MAXIMUM, cores: NO_MAXIMUM };
        let queues = QueueTree::new(QueueNaming::Namespaces, all).unwrap();
        let left = |name| {
            let left = queues.left(queues.find(name).unwrap());
            (left.memory, left.cores)
        };
        assert_eq!([left("a"), left("b"), left("c"), left("root")], [(40, 10), (10, 10), (5, 5), (10, 10)]);
        let amounts_of = |name| queues.max_and_used(queues.find(name).unwrap());
        let amounts = |memory, cores| QueueAmounts { memory, cores };
        assert_eq!(amounts_of("a"), (Some(amounts(50, 100)), amounts(10, 90)));
        assert_eq!(amounts_of("b"), (Some(amounts(100, 100)), amounts(90, 90)));
        // The nodes need not be readable if quotas limit everything.
        let none = ExternalQueue { max: amounts(NO_MAXIMUM, NO_MAXIMUM), used: amounts(0, 0), ..queue("root", 0, 0) };
        let queues = QueueTree::new(QueueNaming::Namespaces, [none, queue("root.c", 5, 1)]).unwrap();
        assert_eq!(queues.left(queues.find("c").unwrap()), amounts(4, 4));
        assert_eq!(queues.max_and_used(queues.find("root").unwrap()).0, None);
    }

    #[test]
    fn queues_with_equal_paths_are_refused() {
        let twice = [queue("root", 1, 0), queue("root", 2, 0)];
        assert_eq!(QueueTree::new(QueueNaming::Fair, twice), Err(DuplicatePath("root".into())));
    }

    #[test]
    fn queue_list_continues_after_any_path() {
        let queues = queues(QueueNaming::Fair);
        let behind = |after| queues.behind(after).map(|queue| queue.path.as_str()).collect::<Vec<_>>();
        assert_eq!(behind(None).len(), 8);
        assert_eq!(behind(Some("root.b.w")), ["root.b.x", "root.b.y", "root.c.d"]);
        assert!(behind(Some("s")).is_empty());
    }
}
