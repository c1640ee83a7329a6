//! What is asked for in a queue, and why it is not there.

use std::fmt;

use time::OffsetDateTime;

use crate::{
    judgement::Short,
    line::{Line, QueuePosition, Spot, Spots},
    provider::Provider,
    queue::{QueueAmounts, ROOT},
    refusal::{Refusal, Shortfall},
    resource::Dimension,
    scope_kind::ScopeKind,
};

use super::{
    NoRoom, ShortQueue,
    cluster::{Basis, Cluster, JudgedQueue},
};

/// What a request asks of a queue.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) name: &'a str,
    pub(super) amounts: QueueAmounts,
}

/// What a queue is taken to be called that no snapshot knows.
pub(super) fn full_path(name: &str) -> String {
    match name == ROOT || name.starts_with("root.") {
        true => name.to_owned(),
        false => format!("{ROOT}.{name}"),
    }
}

impl Asked<'_> {
    /// Everywhere where it is judged.
    pub fn spots(&self) -> Vec<Spot> {
        match self.cluster.rooms.path(self.name) {
            Ok(path) => self.cluster.spots(path),
            Err(_) => self.cluster.spots(ROOT),
        }
    }

    /// Whether the queue has room for a request.
    ///
    /// # Errors
    /// Why it has not.
    pub fn judge(
        &self,
        line: &Line,
        position: Option<QueuePosition>,
        now: OffsetDateTime,
    ) -> Result<Option<JudgedQueue>, Box<Short>> {
        if self.amounts == QueueAmounts::default() {
            return Ok(None);
        }
        self.judge_need(QueueAmounts::default(), self.amounts, line, position, now).map(Some)
    }

    /// Whether there is room for `need` more where `held` is held already.
    pub(super) fn judge_need(
        &self,
        held: QueueAmounts,
        need: QueueAmounts,
        line: &Line,
        position: Option<QueuePosition>,
        now: OffsetDateTime,
    ) -> Result<JudgedQueue, Box<Short>> {
        let (cluster, rooms) = (self.cluster, &self.cluster.rooms);
        let Some(basis) = cluster.basis(now) else { return Err(self.away(now)) };
        let judged = |path: String| JudgedQueue {
            provider: cluster.provider.name.to_string(),
            path,
            basis,
            age: cluster.age(now),
        };
        if basis == Basis::Unchecked {
            return Ok(judged(rooms.path(self.name).map_or_else(|_| full_path(self.name), str::to_owned)));
        }
        let path = match rooms.path(self.name) {
            Ok(path) => path,
            Err(no_room) => return Err(self.refused(no_room, held, now)),
        };
        let ahead = |path: &str| {
            let spot = || Spot::Queue { provider: cluster.provider.name.clone(), path: path.to_owned() };
            let (ahead, [cores, memory]) = (line.ahead_at(spot, position), cluster.dimensions());
            QueueAmounts { memory: ahead.get(&memory), cores: ahead.get(&cores) }
        };
        match rooms.judge(path, need, ahead) {
            Ok(()) => Ok(judged(path.to_owned())),
            Err(no_room) => Err(self.refused(no_room, held, now)),
        }
    }

    /// By which snapshot, for people.
    fn rule(&self, now: OffsetDateTime) -> String {
        let Provider { resource_type, name, .. } = &self.cluster.provider;
        match self.cluster.age(now) {
            Some(age) => format!("provider {name} ({resource_type}), as it was {} s ago", age.whole_seconds()),
            None => format!("provider {name} ({resource_type}), which has not answered yet"),
        }
    }

    /// Nothing is known, or nothing that is young enough.
    fn away(&self, now: OffsetDateTime) -> Box<Short> {
        let provider = &self.cluster.provider.name;
        let reason = match self.cluster.age(now) {
            Some(age) => format!("provider {provider} has not answered for {} s", age.whole_seconds()),
            None => format!("provider {provider} has not answered yet"),
        };
        self.closed(ROOT, reason, false, now)
    }

    fn refused(&self, no_room: NoRoom, held: QueueAmounts, now: OffsetDateTime) -> Box<Short> {
        match no_room {
            NoRoom::Queue(error) => {
                let provider = &self.cluster.provider.name;
                self.closed(self.name, format!("provider {provider}: {error}"), true, now)
            }
            NoRoom::State { path, state } => {
                self.closed(&path, format!("the queue {path} is {}, and takes nothing", state.as_str()), false, now)
            }
            NoRoom::Short(short) => self.short(&short, held, now),
        }
    }

    /// Whatever is asked for, there is nothing.
    fn closed(&self, path: &str, reason: String, never_fits: bool, now: OffsetDateTime) -> Box<Short> {
        let asked = self.cluster.dimensions().into_iter().zip([self.amounts.cores, self.amounts.memory]);
        let asked = asked.filter(|(_, amount)| *amount > 0);
        let shortfalls = asked.map(|(dimension, requested)| Shortfall {
            scope: Place(&self.cluster.provider, path).to_string(),
            kind: ScopeKind::Queue,
            dimension,
            requested,
            available: 0,
            ahead: 0,
            max: 0,
            rule: self.rule(now),
        });
        // As Linkis says it of whatever YARN does not tell.
        let refusal = Refusal { shortfalls: shortfalls.collect(), code: 11_006, reason, never_fits };
        Box::new(Short { refusal, spots: self.stands(&[path.to_owned()]) })
    }

    fn short(&self, short: &[ShortQueue], held: QueueAmounts, now: OffsetDateTime) -> Box<Short> {
        let of = |short: &ShortQueue, dimension: &Dimension| {
            let get = |amounts: QueueAmounts| match dimension {
                Dimension::QueueCores | Dimension::KubernetesMillicores => amounts.cores,
                _ => amounts.memory,
            };
            let (requested, available) = (get(self.amounts), get(short.available().plus(held)));
            (requested > available && requested > get(held)).then(|| Shortfall {
                scope: Place(&self.cluster.provider, &short.path).to_string(),
                kind: ScopeKind::Queue,
                dimension: dimension.clone(),
                requested,
                available,
                ahead: get(short.ahead),
                max: get(short.max),
                rule: self.rule(now),
            })
        };
        let dimensions = self.cluster.dimensions();
        let shortfalls: Vec<_> = short
            .iter()
            .flat_map(|short| dimensions.iter().filter_map(move |dimension| of(short, dimension)))
            .collect();
        let paths: Vec<String> = short.iter().map(|short| short.path.clone()).collect();
        Box::new(Short { refusal: Refusal::of_queues(shortfalls), spots: self.stands(&paths) })
    }

    /// Where it stands in line that is short at these paths.
    fn stands(&self, short: &[String]) -> Spots {
        let is_short = |spot: &Spot| matches!(spot, Spot::Queue { path, .. } if short.contains(path));
        let mut spots: Spots = self.spots().into_iter().map(|spot| (spot.clone(), is_short(&spot))).collect();
        if !spots.values().any(|is_short| *is_short) {
            // It waits for something that is not there yet.
            spots.values_mut().for_each(|is_short| *is_short = true);
        }
        spots
    }
}

/// A queue of a cluster, for people.
struct Place<'a>(&'a Provider, &'a str);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "provider={},queue={}", self.0.name, self.1)
    }
}
