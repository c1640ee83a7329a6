//! History of the run, read from the database and replayed commit by commit.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use rm_model::resource::{Dimension, Resource};
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    journal::Journal,
    workload::{Hosts, TENANT, protected},
};
use crate::harness::em;

/// Time within which the tickets of an unregistered EM end, without outages. An instance can need 15 seconds to notice each
/// outage.
const GOING_MAX: Duration = Duration::from_secs(60);

/// Amounts of memory, cores and instances.
pub type Amounts = [i64; 3];

const DIMENSIONS: [Dimension; 3] = [Dimension::Memory, Dimension::Cores, Dimension::Instances];

from_row! {
    /// A history line.
    #[derive(Clone, Debug)]
    pub struct Line {
        /// Ids follow the order of commits within an EM and a scope, and against changes of limits, whose fence excludes other
        /// writes.
        pub id: i64,
        /// Transaction that wrote the line.
        pub transaction: i64,
        pub action: String,
        pub ticket_id: Option<Uuid>,
        pub user: Option<String>,
        pub creator: Option<String>,
        pub engine_type: Option<String>,
        labels: Option<String>,
        queue: Option<String>,
        pub kind: Option<String>,
        /// EM of the line; empty for a limit or a policy.
        pub em: String,
        pub scope: Option<String>,
        memory: i64,
        cores: i64,
        instances: i64,
        /// The maximum of a limit, in the same order.
        pub max: Vec<Option<i64>>,
        /// Mode of a limit.
        pub limit_mode: Option<String>,
        pub at: OffsetDateTime,
    }
}

impl Line {
    pub fn amounts(&self) -> Amounts {
        [self.memory, self.cores, self.instances]
    }

    /// Returns the value of a label that limits count by; `None` if the ticket has no queue.
    pub fn label(&self, key: &str) -> Option<String> {
        match key {
            "user" => self.user.clone(),
            "creator" => self.creator.clone(),
            "engine_type" => self.engine_type.clone(),
            "engine_family" => {
                Some(self.engine_type.as_deref().unwrap_or_default().split('-').next().unwrap_or_default().to_owned())
            }
            "em_application" => self.kind.clone(),
            "em" => Some(self.em.clone()),
            "queue" => self.queue.clone(),
            _ => {
                let labels: BTreeMap<String, String> = serde_json::from_str(self.labels.as_deref()?).unwrap();
                Some(labels.get(key).cloned().unwrap_or_default())
            }
        }
    }

    pub fn is_end(&self) -> bool {
        ["released", "expired", "unregistered", "lost"].contains(&self.action.as_str())
    }
}

pub fn amounts(resource: &Resource) -> Amounts {
    DIMENSIONS.map(|dimension| resource.get(&dimension))
}

/// Reads the whole history in order.
pub async fn read(connection: &mut PgConnection) -> Vec<Line> {
    sqlx::query_as(
        r#"SELECT id, xmin::text::bigint AS transaction, action, ticket_id, "user", creator, engine_type, labels::text AS labels,
            resource -> 'yarnResource' ->> 'queueName' AS queue, em_application_name AS kind,
            coalesce(em_instance, '') AS em, scope::text AS scope, 
            coalesce((resource ->> 'memory')::bigint, (resource -> 'loadInstanceResource' ->> 'memory')::bigint, 0) AS memory,
            coalesce((resource ->> 'cores')::bigint, (resource -> 'loadInstanceResource' ->> 'cores')::bigint, 0) AS cores,
            coalesce((resource ->> 'instances')::bigint, (resource -> 'loadInstanceResource' ->> 'instances')::bigint, 0) AS instances,
            ARRAY[(resource -> 'resources' ->> 'memory')::bigint, (resource -> 'resources' ->> 'cores')::bigint,
                (resource -> 'resources' ->> 'instances')::bigint] AS max, limit_mode, action_time AS at
        FROM linkis_resource_action_record ORDER BY id"#,
    )
    .fetch_all(connection)
    .await
    .unwrap()
}

/// Returns the lines of each ticket.
pub fn lives(history: &[Line]) -> HashMap<Uuid, Vec<&Line>> {
    let mut lives: HashMap<Uuid, Vec<&Line>> = HashMap::new();
    for line in history {
        if let Some(id) = line.ticket_id {
            lives.entry(id).or_default().push(line);
        }
    }
    lives
}

/// Tickets of unregistered EMs.
#[derive(Debug, Default)]
pub struct Goings {
    pub count: usize,
    /// Maximum number of tickets of an EM at its unregistration.
    pub largest: usize,
    /// Longest time until the last of them ended, and the part of it without faults.
    pub longest: (Duration, Duration),
}

/// State of an EM after each commit, by the history.
#[derive(Default)]
struct EmThen {
    total: Option<Amounts>,
    held: HashMap<Uuid, Amounts>,
    in_use: Amounts,
    is_drained: bool,
    /// Tickets that end with the EM, and the time of its unregistration.
    leaving: HashMap<Uuid, OffsetDateTime>,
}

impl EmThen {
    /// Applies a line. Returns the earlier amounts of its ticket.
    fn apply(&mut self, line: &Line) -> Option<Amounts> {
        let before = match (line.ticket_id, line.action.as_str()) {
            (Some(id), "granted" | "adopted" | "inited" | "reported") => self.held.insert(id, line.amounts()),
            (Some(id), _) => self.held.remove(&id),
            (None, "registered" | "resized") => {
                self.total = Some(line.amounts());
                return None;
            }
            (None, "drained") => {
                self.is_drained = true;
                return None;
            }
            (None, "held" | "hold_ended") => return None,
            (None, "resumed") => {
                self.is_drained = false;
                return None;
            }
            (None, _) => {
                self.total = None;
                return None;
            }
        };
        let now = line.ticket_id.and_then(|id| self.held.get(&id)).copied();
        for dimension in 0..3 {
            self.in_use[dimension] += amount(now, dimension) - amount(before, dimension);
        }
        before
    }

    fn check_commit(&self, journal: &Journal, em: &str, before: &HashMap<Uuid, Option<Amounts>>, commit: &[&Line]) {
        let Some(total) = self.total else {
            if commit.iter().any(|line| line.ticket_id.is_none() && line.is_end()) {
                // A grant in the transaction of the unregistration was before it.
                return;
            }
            // The tickets of an unregistering EM end in steps, so their number only decreases.
            let is_new = |(id, before): (&Uuid, &Option<Amounts>)| before.is_none() && self.held.contains_key(id);
            return journal.check(!before.iter().any(is_new), || {
                format!("{em} is not registered, and more live there: {commit:?}")
            });
        };
        if commit.iter().any(|line| line.ticket_id.is_none() || line.action == "adopted") {
            // The order of a grant and a resize or an adoption in one transaction is unknown.
            return;
        }
        let protected = amounts(&protected());
        for dimension in 0..3 {
            let is_short = self.in_use[dimension] > total[dimension] - protected[dimension];
            let grew = |(id, before): (&Uuid, &Option<Amounts>)| {
                amount(self.held.get(id).copied(), dimension) > amount(*before, dimension)
            };
            let got = || format!("{em} of {total:?} was over-committed: {:?} in use after {commit:?}", self.in_use);
            journal.check(!is_short || !before.iter().any(grew), got);
        }
    }

    /// Follows the tickets of an unregistering EM until the last one has ended.
    fn follow_going(&mut self, journal: &Journal, em: &str, commit: &[&Line], goings: &mut Goings) {
        let ends = commit.iter().filter(|line| line.is_end());
        let took = |line: &&Line| {
            let since = line.ticket_id.and_then(|id| self.leaving.remove(&id))?;
            Some(((line.at - since).unsigned_abs(), journal.calm_between(since, line.at)))
        };
        if let Some((longest, calm)) = ends.filter_map(took).max() {
            goings.longest = goings.longest.max((longest, calm));
            journal.check(calm < GOING_MAX, || {
                format!("{em} went, and tickets ended only {longest:?} later, of which nothing was broken for {calm:?}")
            });
        }
        let Some(gone) = commit.iter().find(|line| line.ticket_id.is_none() && line.is_end()) else { return };
        goings.count += 1;
        goings.largest = goings.largest.max(self.held.len());
        // A grant of the same transaction can belong to the next registration.
        let begins = |line: &Line| ["granted", "adopted"].contains(&line.action.as_str());
        let is_new = |id: &Uuid| commit.iter().any(|line| line.ticket_id == Some(*id) && begins(line));
        for id in self.held.keys().filter(|id| !is_new(id)) {
            self.leaving.entry(*id).or_insert(gone.at);
        }
    }
}

pub fn amount(held: Option<Amounts>, dimension: usize) -> i64 {
    held.map_or(0, |held| held[dimension])
}

/// Lines that granted something on an EM.
#[derive(Debug, Default)]
pub struct EmLines {
    pub grew: usize,
    /// Lines that left no capacity in a dimension that they granted.
    pub full: usize,
}

/// Replays each EM line by line, in the order of `FollowActions`: no line grants more than the EM has left.
///
/// A lowered capacity and an adoption may over-commit the EM. A later line still grants only what fits.
pub fn replay_lines(journal: &Journal, history: &[Line]) -> EmLines {
    let mut ems: BTreeMap<&str, Vec<&Line>> = BTreeMap::new();
    for line in history.iter().filter(|line| !line.em.is_empty()) {
        ems.entry(&line.em).or_default().push(line);
    }
    let protected = amounts(&protected());
    let mut lines = EmLines::default();
    for (em, mut followed) in ems {
        followed.sort_by_key(|line| (line.at, line.id));
        let mut then = EmThen::default();
        for line in followed {
            let before = then.apply(line);
            let now = line.ticket_id.and_then(|id| then.held.get(&id)).copied();
            let grew = |dimension: &usize| amount(now, *dimension) > amount(before, *dimension);
            if line.action == "adopted" || !(0..3).any(|dimension| grew(&dimension)) {
                continue;
            }
            let capacity = then.total.map(|total| [0, 1, 2].map(|dimension| total[dimension] - protected[dimension]));
            let fits = |dimension| capacity.is_some_and(|capacity| then.in_use[dimension] <= capacity[dimension]);
            journal.check((0..3).filter(grew).all(fits), || {
                format!("{em} with the capacity {capacity:?} has {:?} in use at the line {line:?}", then.in_use)
            });
            let is_full = |dimension| capacity.is_some_and(|capacity| then.in_use[dimension] == capacity[dimension]);
            lines.grew += 1;
            lines.full += usize::from((0..3).filter(grew).any(is_full));
        }
    }
    lines
}

/// Replays the history of every EM. No commit grants more than the capacity, except after a resize, and tickets of an
/// unregistered EM end soon.
pub fn replay(journal: &Journal, history: &[Line]) -> Goings {
    let mut commits: BTreeMap<&str, Vec<Vec<&Line>>> = BTreeMap::new();
    for line in history.iter().filter(|line| !line.em.is_empty()) {
        let of_em = commits.entry(&line.em).or_default();
        match of_em.last_mut() {
            Some(last) if last[0].transaction == line.transaction => last.push(line),
            _ => of_em.push(vec![line]),
        }
    }
    let mut goings = Goings::default();
    for (em, commits) in commits {
        let mut then = EmThen::default();
        let is_reserved = em == self::em(Hosts::RESERVED).instance.as_str();
        for commit in commits {
            let mut before = HashMap::new();
            let stays_drained = then.is_drained && !commit.iter().any(|line| line.action == "resumed");
            let is_granted = commit.iter().any(|line| line.action == "granted");
            journal.check(!(stays_drained && is_granted), || format!("{em} is drained, and grants: {commit:?}"));
            for line in &commit {
                let comes_in = line.action != "granted" || line.label("tenant").as_deref() == Some(TENANT);
                journal.check(!is_reserved || comes_in, || format!("{em} is reserved, and lets in {line:?}"));
                let was = then.apply(line);
                if let Some(id) = line.ticket_id {
                    before.entry(id).or_insert(was);
                }
            }
            then.check_commit(journal, em, &before, &commit);
            then.follow_going(journal, em, &commit, &mut goings);
        }
        let left = then.leaving.len();
        journal.check(left == 0, || format!("{em} went, and {left} of its tickets never ended"));
    }
    goings
}

/// A line of one commit: of a ticket, or with 0 of the EM itself.
fn line(id: i64, action: &str, ticket: u128, cores: i64) -> Line {
    Line {
        id,
        transaction: 1,
        action: action.to_owned(),
        ticket_id: (ticket > 0).then(|| Uuid::from_u128(ticket)),
        user: None,
        creator: None,
        engine_type: None,
        labels: None,
        queue: None,
        kind: None,
        em: "host1:9102".to_owned(),
        scope: None,
        memory: 1 << 30,
        cores,
        instances: 1,
        max: vec![],
        limit_mode: None,
        at: OffsetDateTime::UNIX_EPOCH,
    }
}

#[test]
fn line_replay_finds_grants_before_releases() {
    // One core of the EM is protected.
    let begun = [line(1, "registered", 0, 33), line(2, "granted", 1, 32)];
    let replay = |commit: [Line; 2]| {
        let journal = Journal::new();
        let mut history = begun.to_vec();
        history[0].memory = 64 << 30;
        history[0].instances = 64;
        history.extend(commit);
        let lines = replay_lines(&journal, &history);
        let violations = journal.book().violations.len();
        (lines.grew, lines.full, violations)
    };
    assert_eq!(replay([line(3, "released", 1, 32), line(4, "granted", 2, 32)]), (2, 2, 0));
    assert_eq!(replay([line(3, "granted", 2, 1), line(4, "released", 1, 32)]), (2, 1, 1));
    assert_eq!(replay([line(3, "adopted", 2, 1), line(4, "released", 1, 32)]), (1, 1, 0));
}
