//! Trace: nodes and tasks of the two data files.

use std::{
    fmt,
    ops::{Add, Sub},
};

use rm_model::resource::{Dimension, Resource, ResourceError};

const NODES: &str = include_str!("data/openb_node_list_all_node.csv");
const TASKS: &str = include_str!("data/openb_pod_list_default.csv");

/// Why the trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("{file} has the line {line:?}, which cannot be read")]
    Line { file: &'static str, line: String },
    #[error("the times of {0} are out of order: it must be created, then scheduled, then deleted")]
    Times(String),
    #[error("{0} accepts only GPU models that no node has")]
    Model(String),
    #[error("{0} accepts only some GPU models: a request that names no EM cannot say so")]
    ModelUnsaid(String),
}

/// Thousandths of a core, MiB of memory, thousandths of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amounts {
    pub cpu_milli: i64,
    pub memory_mib: i64,
    pub gpu_milli: i64,
}

/// A node, which registers as an EM.
#[derive(Debug)]
pub struct Node {
    pub name: String,
    cpu_milli: i64,
    memory_mib: i64,
    gpu: i64,
    pub model: String,
}

/// A task, which requests a ticket. Times are in seconds since the start of the trace.
#[derive(Debug, Clone)]
pub struct Task {
    pub name: String,
    cpu_milli: i64,
    memory_mib: i64,
    num_gpu: i64,
    /// Thousandths of each GPU.
    gpu_milli: i64,
    /// Accepted GPU models, separated by `|`; empty for any model.
    gpu_spec: String,
    pub qos: String,
    pub created: i64,
    /// `None` for a task that waited without success until its deletion.
    pub scheduled: Option<i64>,
    pub deleted: i64,
}

/// Nodes and tasks in the order of the files: tasks by creation.
#[derive(Debug)]
pub struct Trace {
    pub nodes: Vec<Node>,
    pub tasks: Vec<Task>,
}

impl Trace {
    /// Reads both files. With `hold`, no task ends before the last one has started.
    ///
    /// # Errors
    /// An unreadable line, or a task whose times are not in order.
    pub fn read(hold: bool) -> Result<Self, TraceError> {
        let nodes = read_lines("the list of nodes", NODES, Node::read)?;
        let mut tasks = read_lines("the list of tasks", TASKS, Task::read)?;
        for task in &tasks {
            let started = task.scheduled.unwrap_or(task.created);
            if started < task.created || task.deleted < started {
                return Err(TraceError::Times(task.name.clone()));
            }
        }
        if hold {
            let started = tasks.iter().map(|task| task.scheduled.unwrap_or(task.created)).max().unwrap_or_default();
            tasks.iter_mut().for_each(|task| task.deleted = task.deleted.max(started + 1));
        }
        Ok(Self { nodes, tasks })
    }

    /// Checks that the service can select nodes for all tasks: any node with the task's dimensions is suitable.
    ///
    /// # Errors
    /// [`TraceError::ModelUnsaid`] for a task that accepts only some GPU models.
    pub fn check_choosable(&self) -> Result<(), TraceError> {
        let choosy = self.tasks.iter().find(|task| task.num_gpu > 0 && !task.gpu_spec.is_empty());
        choosy.map_or(Ok(()), |task| Err(TraceError::ModelUnsaid(task.name.clone())))
    }

    /// Returns the capacity of all nodes together.
    pub fn cluster(&self) -> Amounts {
        self.nodes.iter().fold(Amounts::default(), |sum, node| sum + node.total())
    }
}

/// Reads the lines after the heading. No field of the files has a comma or quotes.
fn read_lines<T>(file: &'static str, text: &str, read: impl Fn(&[&str]) -> Option<T>) -> Result<Vec<T>, TraceError> {
    let read = |line: &str| {
        let fields: Vec<_> = line.split(',').collect();
        read(&fields).ok_or_else(|| TraceError::Line { file, line: line.to_owned() })
    };
    text.lines().skip(1).map(read).collect()
}

impl Node {
    fn read(fields: &[&str]) -> Option<Self> {
        let &[name, cpu_milli, memory_mib, gpu, model] = fields else { return None };
        Some(Self {
            name: name.to_owned(),
            cpu_milli: cpu_milli.parse().ok()?,
            memory_mib: memory_mib.parse().ok()?,
            gpu: gpu.parse().ok()?,
            model: model.to_owned(),
        })
    }

    pub fn total(&self) -> Amounts {
        Amounts { cpu_milli: self.cpu_milli, memory_mib: self.memory_mib, gpu_milli: self.gpu * 1000 }
    }
}

impl Task {
    fn read(fields: &[&str]) -> Option<Self> {
        let &[name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec, qos, _, created, deleted, scheduled] = fields
        else {
            return None;
        };
        Some(Self {
            name: name.to_owned(),
            cpu_milli: cpu_milli.parse().ok()?,
            memory_mib: memory_mib.parse().ok()?,
            num_gpu: num_gpu.parse().ok()?,
            gpu_milli: gpu_milli.parse().ok()?,
            gpu_spec: gpu_spec.to_owned(),
            qos: qos.to_owned(),
            created: created.parse().ok()?,
            scheduled: if scheduled.is_empty() { None } else { Some(scheduled.parse().ok()?) },
            deleted: deleted.parse().ok()?,
        })
    }

    /// Returns the demand of the task. GPUs count as one sum per node, regardless of how their fractions fit on single
    /// cards.
    pub fn need(&self) -> Amounts {
        Amounts { cpu_milli: self.cpu_milli, memory_mib: self.memory_mib, gpu_milli: self.num_gpu * self.gpu_milli }
    }

    /// Returns true if the task may run on the node, regardless of the node's free capacity.
    pub fn accepts(&self, node: &Node) -> bool {
        let any = self.num_gpu == 0 || self.gpu_spec.is_empty();
        let counted = self.num_gpu == 0 || node.gpu > 0;
        counted && (any || self.gpu_spec.split('|').any(|model| model == node.model))
    }

    /// Returns the user of the task. The trace has no users, so they are built from the class and the last two digits
    /// of the name, such as `ls-07`. Each class has a hundred users, equal in every replay.
    pub fn user(&self) -> String {
        let digits = self.name.get(self.name.len().saturating_sub(2)..).unwrap_or(&self.name);
        format!("{}-{digits}", self.qos.to_lowercase())
    }
}

impl Amounts {
    /// Names of the dimensions at the service.
    pub const NAMES: [&str; 3] = ["cpu_milli", "memory_mib", "gpu_milli"];

    pub fn values(self) -> [i64; 3] {
        [self.cpu_milli, self.memory_mib, self.gpu_milli]
    }

    /// Returns the larger amount in each dimension.
    pub fn max(self, other: Self) -> Self {
        let [cpu_milli, memory_mib, gpu_milli] = [0, 1, 2].map(|index| self.values()[index].max(other.values()[index]));
        Self { cpu_milli, memory_mib, gpu_milli }
    }

    /// Applies `change` to each amount.
    pub fn map(self, change: impl Fn(i64) -> i64) -> Self {
        let [cpu_milli, memory_mib, gpu_milli] = self.values().map(change);
        Self { cpu_milli, memory_mib, gpu_milli }
    }

    pub fn fits_in(self, room: Self) -> bool {
        self.values().iter().zip(room.values()).all(|(need, room)| *need <= room)
    }

    /// Converts the amounts to a resource of the service. Zero GPUs are omitted, for a node and for a task. A node
    /// without GPUs then does not provide the dimension, so a request for one is an error and no temporary shortage.
    pub fn to_resource(self) -> Result<Resource, ResourceError> {
        let named = Self::NAMES.into_iter().zip(self.values());
        let counted = named.filter(|(name, amount)| *name != "gpu_milli" || *amount > 0);
        Resource::special(counted.map(|(name, amount)| (name.to_owned(), amount)).collect())
    }

    /// The reverse of [`Amounts::to_resource`].
    pub fn of_resource(resource: &Resource) -> Self {
        Self::by_dimension(|dimension| resource.get(dimension))
    }

    /// Returns the amounts by a function of the dimension.
    pub fn by_dimension(counted: impl Fn(&Dimension) -> i64) -> Self {
        let [cpu_milli, memory_mib, gpu_milli] = Self::NAMES.map(|name| counted(&Dimension::from(name)));
        Self { cpu_milli, memory_mib, gpu_milli }
    }
}

impl fmt::Display for Amounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cpu_milli, {} memory_mib, {} gpu_milli", self.cpu_milli, self.memory_mib, self.gpu_milli)
    }
}

impl Add for Amounts {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli + more.cpu_milli,
            memory_mib: self.memory_mib + more.memory_mib,
            gpu_milli: self.gpu_milli + more.gpu_milli,
        }
    }
}

impl Sub for Amounts {
    type Output = Self;

    fn sub(self, less: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli - less.cpu_milli,
            memory_mib: self.memory_mib - less.memory_mib,
            gpu_milli: self.gpu_milli - less.gpu_milli,
        }
    }
}
