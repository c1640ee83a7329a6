//! Queues that live elsewhere: what a cluster's scheduler says of them, and which one a name means. A namespace of Kubernetes is one, too, in
//! the cluster's nodes.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

/// The name of the queue that all others are in.
pub const ROOT: &str = "root";

/// How many queues an ambiguous name is said to mean.
const AMBIGUOUS_TOLD_MAX: usize = 8;

/// The maximum of a namespace whose quotas say nothing of a dimension: the nodes decide.
pub const NO_MAXIMUM: i64 = i64::MAX;

/// So much of a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueAmounts {
    /// In bytes.
    pub memory: i64,
    /// Virtual cores; in Kubernetes, thousandths of a core.
    pub cores: i64,
}

impl QueueAmounts {
    /// The smaller of both, in each dimension.
    pub fn least(self, other: Self) -> Self {
        Self { memory: self.memory.min(other.memory), cores: self.cores.min(other.cores) }
    }

    /// The larger of both, in each dimension.
    pub fn most(self, other: Self) -> Self {
        Self { memory: self.memory.max(other.memory), cores: self.cores.max(other.cores) }
    }

    /// Whether it is no less, in each dimension.
    pub fn covers(self, other: Self) -> bool {
        self.memory >= other.memory && self.cores >= other.cores
    }

    /// Both together, as far as numbers go.
    pub fn plus(self, other: Self) -> Self {
        Self { memory: self.memory.saturating_add(other.memory), cores: self.cores.saturating_add(other.cores) }
    }

    /// What is left of it; below zero where `other` is more.
    pub fn minus(self, other: Self) -> Self {
        Self { memory: self.memory.saturating_sub(other.memory), cores: self.cores.saturating_sub(other.cores) }
    }

    /// What is granted less what is shown of it: nothing where more is shown.
    pub fn unseen(self, shown: Self) -> Self {
        self.minus(shown).most(Self::default())
    }

    /// In each dimension this where `decides` says so, and otherwise `other`.
    fn where_decided(self, decides: Decides, other: Self) -> Self {
        Self {
            memory: if decides.memory { self.memory } else { other.memory },
            cores: if decides.cores { self.cores } else { other.cores },
        }
    }
}

const MOST: QueueAmounts = QueueAmounts { memory: i64::MAX, cores: i64::MAX };

/// In which dimensions a queue decides what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decides {
    memory: bool,
    cores: bool,
}

impl Decides {
    const ALL: Self = Self { memory: true, cores: true };

    /// Where there is a maximum.
    fn where_limited(max: QueueAmounts) -> Self {
        Self { memory: max.memory != NO_MAXIMUM, cores: max.cores != NO_MAXIMUM }
    }

    fn elsewhere(self) -> Self {
        Self { memory: !self.memory, cores: !self.cores }
    }

    /// What is left where it is decided, and elsewhere more than anybody needs.
    pub fn left(self, left: QueueAmounts) -> QueueAmounts {
        left.where_decided(self, MOST)
    }
}

/// Whether a queue takes applications. In this order, so that the greatest along a path holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum QueueState {
    /// It does.
    Running,
    /// Not any more: those that it has are finished first.
    Draining,
    /// It does not.
    Stopped,
}

impl QueueState {
    /// As YARN calls it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Draining => "DRAINING",
            Self::Stopped => "STOPPED",
        }
    }

    /// The reverse of [`QueueState::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Running, Self::Draining, Self::Stopped].into_iter().find(|state| state.as_str() == text)
    }
}

/// How much there may be of something else than memory and cores, and how much of that is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CustomAmounts {
    /// How much there may be.
    pub max: i64,
    /// How much is used.
    pub used: i64,
}

/// The same of all that there is, by the names of custom dimensions.
pub type Custom = BTreeMap<Arc<str>, CustomAmounts>;

/// A queue, as its scheduler says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    /// Its names from the root on, joined by dots.
    pub path: String,
    /// How much its applications may have together.
    pub max: QueueAmounts,
    /// How much they have.
    pub used: QueueAmounts,
    /// Whether it takes more of them, whatever those above it do.
    pub state: QueueState,
    /// How many of them run; `None` if the scheduler does not say.
    pub running_applications: Option<i64>,
    /// How many wait to run; likewise.
    pub pending_applications: Option<i64>,
    /// What else there is: it is told, and nothing is judged by it.
    pub custom: Custom,
}

/// Which names a scheduler knows its queues by, beside their paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Naming {
    /// The path without the root.
    #[default]
    Fair,
    /// That, and the last name alone.
    Capacity,
    /// Namespaces of Kubernetes, by their names alone: what quotas say nothing of, all have of the root, the cluster's nodes.
    Namespaces,
}

/// All queues of a cluster, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Queues {
    naming: Naming,
    by_path: BTreeMap<String, Queue>,
}

/// Why a name means no queue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// There is none.
    #[error("there is no queue {name:?}; ListQueues tells which there are")]
    NotFound {
        /// As it was asked for.
        name: String,
    },
    /// There are several.
    #[error("the queue {name:?} may be {}; give one of these paths", paths.join(" or "))]
    Ambiguous {
        /// As it was asked for.
        name: String,
        /// The first of those that it may be.
        paths: Vec<String>,
    },
}

/// Two queues have the same path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SamePath(pub String);

impl Queues {
    /// All of them.
    ///
    /// # Errors
    /// If two have the same path.
    pub fn new(naming: Naming, queues: impl IntoIterator<Item = Queue>) -> Result<Self, SamePath> {
        let mut by_path = BTreeMap::new();
        for queue in queues {
            match by_path.entry(queue.path.clone()) {
                Entry::Vacant(entry) => drop(entry.insert(queue)),
                Entry::Occupied(entry) => return Err(SamePath(entry.key().clone())),
            }
        }
        Ok(Self { naming, by_path })
    }

    /// Which names they are known by.
    pub fn naming(&self) -> Naming {
        self.naming
    }

    /// The queue that `name` means.
    ///
    /// # Errors
    /// If there is none, or more than one.
    pub fn find(&self, name: &str) -> Result<&Queue, QueueError> {
        if let Some(queue) = self.by_path.get(name) {
            return Ok(queue);
        }
        let mut meant = match self.naming {
            Naming::Fair | Naming::Namespaces => Vec::new(),
            Naming::Capacity => self.by_path.values().filter(|queue| last_name(&queue.path) == name).collect(),
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

    /// The queue and all that it is in, up to the root.
    pub fn along<'a>(&'a self, queue: &'a Queue) -> impl Iterator<Item = &'a Queue> {
        let ends = queue.path.match_indices('.').map(|(end, _)| end).rev();
        let above = ends.filter_map(|end| self.by_path.get(queue.path.get(..end)?));
        std::iter::once(queue).chain(above)
    }

    /// The same, each with where it decides how much there is of `queue`: all of them, everywhere. Of a namespace, its quotas, and the nodes
    /// where these say nothing.
    pub fn deciding<'a>(&'a self, queue: &'a Queue) -> impl Iterator<Item = (&'a Queue, Decides)> {
        let own = match self.naming {
            Naming::Fair | Naming::Capacity => None,
            Naming::Namespaces => Some(Decides::where_limited(queue.max)),
        };
        self.along(queue).map(move |along| match own {
            None => (along, Decides::ALL),
            Some(own) if along.path == queue.path => (along, own),
            Some(own) => (along, own.elsewhere()),
        })
    }

    /// How much of the queue is left, by its own maximum and that of each that it is in.
    pub fn left(&self, queue: &Queue) -> QueueAmounts {
        self.least(queue, |queue| queue.max.minus(queue.used))
    }

    /// The least of what all that decide have `left`.
    pub fn least(&self, queue: &Queue, left: impl Fn(&Queue) -> QueueAmounts) -> QueueAmounts {
        self.deciding(queue).fold(MOST, |least, (queue, decides)| least.least(decides.left(left(queue))))
    }

    /// How much there may be of a queue alone, and how much of that is used: of a namespace where quotas say nothing, by the nodes. `None` if
    /// nobody knows.
    pub fn told(&self, queue: &Queue) -> (Option<QueueAmounts>, QueueAmounts) {
        if self.naming != Naming::Namespaces {
            return (Some(queue.max), queue.used);
        }
        let unknown = (MOST, QueueAmounts::default());
        let (max, used) = self.deciding(queue).fold(unknown, |(max, used), (queue, decides)| {
            (queue.max.where_decided(decides, max), queue.used.where_decided(decides, used))
        });
        let is_known = Decides::where_limited(max) == Decides::ALL;
        (is_known.then_some(max), used)
    }

    /// What there is of other resources: of a namespace by its quotas, and by the nodes where these do not name it.
    pub fn custom<'a>(&'a self, queue: &'a Queue) -> BTreeMap<&'a str, CustomAmounts> {
        let nodes = self.by_path.get(ROOT).filter(|_| self.naming == Naming::Namespaces);
        let all = nodes.into_iter().chain([queue]).flat_map(|queue| &queue.custom);
        all.map(|(name, amounts)| (&**name, *amounts)).collect()
    }

    /// Whether applications get into the queue: all that it is in have to take them, too.
    pub fn state(&self, queue: &Queue) -> QueueState {
        self.along(queue).map(|queue| queue.state).max().unwrap_or(queue.state)
    }

    /// Those behind `after` in the order of their paths.
    pub fn behind(&self, after: Option<&str>) -> impl Iterator<Item = &Queue> {
        use std::ops::Bound;
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.by_path.range::<str, _>((from, Bound::Unbounded)).map(|(_, queue)| queue)
    }
}

/// Whether a path is that of a queue, or of one that is in it.
pub fn is_in(path: &str, queue: &str) -> bool {
    path.strip_prefix(queue).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn last_name(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// An application that runs in a queue, or waits to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Application {
    /// Its id, e.g. `application_1795304054064_0001`.
    pub id: String,
    /// What its user calls it.
    pub name: String,
    /// Whose it is.
    pub user: String,
    /// Its queue, as the scheduler calls it: by path or by its last name.
    pub queue: String,
    /// How far it is, as YARN says.
    pub state: String,
    /// What it has been given.
    pub allocated: QueueAmounts,
    /// When it was started, in milliseconds since 1970.
    pub start_millis: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(path: &str, max: i64, used: i64) -> Queue {
        let amounts = |n| QueueAmounts { memory: n, cores: n };
        Queue {
            path: path.into(),
            max: amounts(max),
            used: amounts(used),
            state: QueueState::Running,
            running_applications: None,
            pending_applications: None,
            custom: Default::default(),
        }
    }

    fn queues(naming: Naming) -> Queues {
        let all = ["root", "root.a", "root.a.x", "root.b", "root.b.x", "root.b.y", "root.a.a", "root.c.d"];
        Queues::new(naming, all.map(|path| queue(path, 10, 0))).unwrap()
    }

    fn found(naming: Naming, name: &str) -> Result<String, QueueError> {
        queues(naming).find(name).map(|queue| queue.path.clone())
    }

    #[test]
    fn names_come_with_and_without_the_root() {
        for naming in [Naming::Fair, Naming::Capacity] {
            for (name, path) in [("root", "root"), ("root.b.y", "root.b.y"), ("b.y", "root.b.y"), ("b", "root.b")] {
                assert_eq!(found(naming, name).as_deref(), Ok(path), "{naming:?}");
            }
            for name in ["", "z", "root.z", "oot", ".b", "root."] {
                assert_eq!(found(naming, name), Err(QueueError::NotFound { name: name.into() }), "{naming:?}");
            }
        }
        assert_eq!(found(Naming::Capacity, "y").as_deref(), Ok("root.b.y"));
        assert!(found(Naming::Fair, "y").is_err(), "the fair scheduler would not find it either");
        assert_eq!(found(Naming::Fair, "a").as_deref(), Ok("root.a"));
    }

    #[test]
    fn a_leaf_that_two_queues_share_is_told_with_both() {
        let error = found(Naming::Capacity, "x").unwrap_err();
        assert_eq!(error.to_string(), r#"the queue "x" may be root.a.x or root.b.x; give one of these paths"#);
        assert!(matches!(found(Naming::Capacity, "a"), Err(QueueError::Ambiguous { .. })), "root.a and root.a.a");
        assert!(found(Naming::Fair, "x").is_err());
    }

    #[test]
    fn what_is_left_is_the_least_along_the_path() {
        let mut all = vec![queue("root", 100, 60), queue("root.a", 80, 60), queue("root.a.x", 40, 5)];
        let left = |all: &[Queue], path| {
            let queues = Queues::new(Naming::Fair, all.to_vec()).unwrap();
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
    fn quotas_decide_of_a_namespace_and_nodes_where_these_say_nothing() {
        let mut all =
            vec![queue("root", 100, 90), queue("root.a", 50, 10), queue("root.b", 50, 10), queue("root.c", 5, 0)];
        all[1].max = QueueAmounts { memory: 50, cores: NO_MAXIMUM };
        all[2].max = QueueAmounts { memory: NO_MAXIMUM, cores: NO_MAXIMUM };
        let queues = Queues::new(Naming::Namespaces, all).unwrap();
        let left = |name| {
            let left = queues.left(queues.find(name).unwrap());
            (left.memory, left.cores)
        };
        assert_eq!([left("a"), left("b"), left("c"), left("root")], [(40, 10), (10, 10), (5, 5), (10, 10)]);
        let told = |name| queues.told(queues.find(name).unwrap());
        let amounts = |memory, cores| QueueAmounts { memory, cores };
        assert_eq!(told("a"), (Some(amounts(50, 100)), amounts(10, 90)));
        assert_eq!(told("b"), (Some(amounts(100, 100)), amounts(90, 90)));
        // Nobody has to ask for nodes where quotas say everything.
        let none = Queue { max: amounts(NO_MAXIMUM, NO_MAXIMUM), used: amounts(0, 0), ..queue("root", 0, 0) };
        let queues = Queues::new(Naming::Namespaces, [none, queue("root.c", 5, 1)]).unwrap();
        assert_eq!(queues.left(queues.find("c").unwrap()), amounts(4, 4));
        assert_eq!(queues.told(queues.find("root").unwrap()).0, None);
    }

    #[test]
    fn two_queues_of_one_path_are_none() {
        let twice = [queue("root", 1, 0), queue("root", 2, 0)];
        assert_eq!(Queues::new(Naming::Fair, twice), Err(SamePath("root".into())));
    }

    #[test]
    fn queues_are_told_from_anywhere() {
        let queues = queues(Naming::Fair);
        let behind = |after| queues.behind(after).map(|queue| queue.path.as_str()).collect::<Vec<_>>();
        assert_eq!(behind(None).len(), 8);
        assert_eq!(behind(Some("root.b.w")), ["root.b.x", "root.b.y", "root.c.d"]);
        assert!(behind(Some("s")).is_empty());
    }
}
