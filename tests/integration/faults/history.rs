//! The history, read as the database keeps it, and replayed commit by commit.

use std::collections::{BTreeMap, HashMap};

use linkis_rm::domain::resource::{Dimension, Resource};
use sqlx::{FromRow, PgConnection};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{journal::Journal, workload::protected};

/// Memory, cores, instances.
type Amounts = [i64; 3];

const DIMENSIONS: [Dimension; 3] = [Dimension::Memory, Dimension::Cores, Dimension::Instances];

/// One line.
#[derive(Clone, Debug, FromRow)]
pub struct Line {
    /// Which transaction wrote it: the lines of one are in no order that means anything.
    transaction: i64,
    pub action: String,
    pub ticket_id: Option<Uuid>,
    pub user: Option<String>,
    pub em: String,
    memory: i64,
    cores: i64,
    instances: i64,
    pub at: OffsetDateTime,
}

impl Line {
    pub fn amounts(&self) -> Amounts {
        [self.memory, self.cores, self.instances]
    }

    pub fn is_end(&self) -> bool {
        ["released", "expired", "unregistered", "lost"].contains(&self.action.as_str())
    }
}

pub fn amounts(resource: &Resource) -> Amounts {
    DIMENSIONS.map(|dimension| resource.get(&dimension))
}

/// All of it, in order.
pub async fn read(connection: &mut PgConnection) -> Vec<Line> {
    sqlx::query_as(
        r#"SELECT xmin::text::bigint AS transaction, action, ticket_id, "user", em_instance AS em, (resource ->> 'memory')::bigint AS memory,
            (resource ->> 'cores')::bigint AS cores, (resource ->> 'instances')::bigint AS instances, action_time AS at
        FROM linkis_resource_action_record WHERE em_instance IS NOT NULL ORDER BY id"#,
    )
    .fetch_all(connection)
    .await
    .unwrap()
}

/// The lives of all tickets.
pub fn lives(history: &[Line]) -> HashMap<Uuid, Vec<&Line>> {
    let mut lives: HashMap<Uuid, Vec<&Line>> = HashMap::new();
    for line in history {
        if let Some(id) = line.ticket_id {
            lives.entry(id).or_default().push(line);
        }
    }
    lives
}

/// Each EM, as the history says that it was after each commit.
#[derive(Default)]
struct EmThen {
    total: Option<Amounts>,
    held: HashMap<Uuid, Amounts>,
}

impl EmThen {
    fn apply(&mut self, line: &Line) {
        match (line.ticket_id, line.action.as_str()) {
            (Some(id), "granted" | "inited") => drop(self.held.insert(id, line.amounts())),
            (Some(id), _) => drop(self.held.remove(&id)),
            (None, "registered" | "resized") => self.total = Some(line.amounts()),
            (None, _) => self.total = None,
        }
    }

    fn in_use(&self) -> Amounts {
        let sum = |dimension: usize| self.held.values().map(|held| held[dimension]).sum();
        [sum(0), sum(1), sum(2)]
    }
}

/// Replays the history of every EM: at no commit is more granted than there is, whatever an EM lost by a resize.
pub fn replay(journal: &Journal, history: &[Line]) {
    let mut commits: BTreeMap<&str, Vec<Vec<&Line>>> = BTreeMap::new();
    for line in history {
        let of_em = commits.entry(&line.em).or_default();
        match of_em.last_mut() {
            Some(last) if last[0].transaction == line.transaction => last.push(line),
            _ => of_em.push(vec![line]),
        }
    }
    for (em, commits) in commits {
        let mut then = EmThen::default();
        for commit in commits {
            let before = then.held.clone();
            commit.iter().for_each(|line| then.apply(line));
            check_commit(journal, em, &then, &before, &commit);
        }
    }
}

fn check_commit(journal: &Journal, em: &str, then: &EmThen, before: &HashMap<Uuid, Amounts>, commit: &[&Line]) {
    let Some(total) = then.total else {
        // The tickets of an EM that goes end in steps: fewer and fewer.
        journal.check(then.held.keys().all(|id| before.contains_key(id)), || {
            format!("{em} is not registered, and more live there: {commit:?}")
        });
        return;
    };
    if commit.iter().any(|line| line.ticket_id.is_none()) {
        // What was granted before a resize in the same transaction, and what after it, cannot be told.
        return;
    }
    let (protected, in_use) = (amounts(&protected()), then.in_use());
    for dimension in 0..3 {
        let is_short = in_use[dimension] > total[dimension] - protected[dimension];
        let grew = |(id, held): (&Uuid, &Amounts)| held[dimension] > before.get(id).map_or(0, |held| held[dimension]);
        let told = || format!("{em} of {total:?} was over-committed: {in_use:?} in use after {commit:?}");
        journal.check(!is_short || !then.held.iter().any(grew), told);
    }
}
