//! Demand in an external queue: the amounts that a request needs there, and the refusal if they do not fit.
//!
//! A decision considers the snapshot, its age, the state of the queue and the reservations of earlier queue entries.
//! Never: changes counts; `cluster` does.
//! Callers: `cluster`, and the ledger through it.

use std::fmt;

use time::OffsetDateTime;

use crate::{
    assessment::BlockedRequest,
    provider::Provider,
    queue::{QueueAmounts, ROOT},
    refusal::{Refusal, Shortfall},
    resource::Dimension,
    scope_kind::ScopeKind,
    wait_queue::{AssessedPosition, WaitKey, WaitKeys, WaitQueues},
};

use super::{
    QueueShortage, ShortQueue,
    cluster::{JudgedQueue, LockedCluster, QueueCheckBasis},
};

/// Amounts that a request needs of an external queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueDemand<'a> {
    pub(super) cluster: &'a LockedCluster,
    pub(super) name: &'a str,
    pub(super) amounts: QueueAmounts,
}

/// Returns the full path for a queue name that no snapshot contains.
pub(super) fn full_path(name: &str) -> String {
    match name == ROOT || name.starts_with("root.") {
        true => name.to_owned(),
        false => format!("{ROOT}.{name}"),
    }
}

impl QueueDemand<'_> {
    /// Returns the wait keys of the queue and its ancestors; those of the root if the queue is unknown.
    pub fn wait_keys(&self) -> Vec<WaitKey> {
        match self.cluster.rooms.path(self.name) {
            Ok(path) => self.cluster.wait_keys(path),
            Err(_) => self.cluster.wait_keys(ROOT),
        }
    }

    /// Checks that the queue has capacity for the request. Returns `None` if the request needs nothing of the queue.
    ///
    /// # Errors
    /// The refusal and the wait keys of the request.
    pub fn judge(
        &self,
        line: &WaitQueues,
        position: &AssessedPosition,
        now: OffsetDateTime,
    ) -> Result<Option<JudgedQueue>, Box<BlockedRequest>> {
        if self.amounts == QueueAmounts::default() {
            return Ok(None);
        }
        self.judge_need(QueueAmounts::default(), self.amounts, line, position, now).map(Some)
    }

    /// Checks that the queue has capacity for `need` in addition to the amounts `held` that the ticket already has.
    ///
    /// # Errors
    /// The refusal and the wait keys of the request.
    pub(super) fn judge_need(
        &self,
        held: QueueAmounts,
        need: QueueAmounts,
        line: &WaitQueues,
        position: &AssessedPosition,
        now: OffsetDateTime,
    ) -> Result<JudgedQueue, Box<BlockedRequest>> {
        let (cluster, rooms) = (self.cluster, &self.cluster.rooms);
        let Some(basis) = cluster.basis(now) else { return Err(self.away(now)) };
        let judged = |path: String| JudgedQueue {
            provider: cluster.provider.name.to_string(),
            path,
            basis,
            age: cluster.age(now),
        };
        if basis == QueueCheckBasis::Unchecked {
            return Ok(judged(rooms.path(self.name).map_or_else(|_| full_path(self.name), str::to_owned)));
        }
        let path = match rooms.path(self.name) {
            Ok(path) => path,
            Err(no_room) => return Err(self.refused(no_room, held, now)),
        };
        let ahead = |path: &str| {
            let wait_key = || WaitKey::Queue { provider: cluster.provider.name.clone(), path: path.to_owned() };
            let (ahead, [cores, memory]) = (line.ahead_at(wait_key, position), cluster.dimensions());
            QueueAmounts { memory: ahead.get(&memory), cores: ahead.get(&cores) }
        };
        match rooms.judge(path, need, ahead) {
            Ok(()) => Ok(judged(path.to_owned())),
            Err(no_room) => Err(self.refused(no_room, held, now)),
        }
    }

    /// Describes the provider and the age of its snapshot, for display.
    fn rule(&self, now: OffsetDateTime) -> String {
        let Provider { resource_type, name, .. } = &self.cluster.provider;
        match self.cluster.age(now) {
            Some(age) => format!("provider {name} ({resource_type}), snapshot of {} s ago", age.whole_seconds()),
            None => format!("provider {name} ({resource_type}), without a snapshot yet"),
        }
    }

    /// Returns the refusal while no snapshot is recent enough.
    fn away(&self, now: OffsetDateTime) -> Box<BlockedRequest> {
        let provider = &self.cluster.provider.name;
        let reason = match self.cluster.age(now) {
            Some(age) => format!("provider {provider} has not answered for {} s", age.whole_seconds()),
            None => format!("provider {provider} has not answered yet"),
        };
        self.closed(ROOT, reason, false, now)
    }

    fn refused(&self, no_room: QueueShortage, held: QueueAmounts, now: OffsetDateTime) -> Box<BlockedRequest> {
        match no_room {
            QueueShortage::Queue(error) => {
                let provider = &self.cluster.provider.name;
                self.closed(self.name, format!("provider {provider}: {error}"), true, now)
            }
            QueueShortage::State { path, state } => self.closed(
                &path,
                format!("the queue {path} is {}, and accepts no applications", state.as_str()),
                false,
                now,
            ),
            QueueShortage::Short(short) => self.short(&short, held, now),
        }
    }

    /// Returns a refusal with zero available amounts.
    fn closed(&self, path: &str, reason: String, never_fits: bool, now: OffsetDateTime) -> Box<BlockedRequest> {
        let asked = self.cluster.dimensions().into_iter().zip([self.amounts.cores, self.amounts.memory]);
        let asked = asked.filter(|(_, amount)| *amount > 0);
        let shortfalls = asked.map(|(dimension, requested)| Shortfall {
            scope: QueueRef(&self.cluster.provider, path).to_string(),
            kind: ScopeKind::Queue,
            dimension,
            requested,
            available: 0,
            ahead: 0,
            max: 0,
            rule: self.rule(now),
            idle_key: None,
            idle_amount: None,
        });
        // Linkis uses this code for missing YARN information.
        let refusal = Refusal { shortfalls: shortfalls.collect(), code: 11_006, reason, never_fits };
        Box::new(BlockedRequest { refusal, wait_keys: self.stands(&[path.to_owned()]) })
    }

    fn short(&self, short: &[ShortQueue], held: QueueAmounts, now: OffsetDateTime) -> Box<BlockedRequest> {
        let of = |short: &ShortQueue, dimension: &Dimension| {
            let get = |amounts: QueueAmounts| match dimension {
                Dimension::QueueCores | Dimension::KubernetesMillicores => amounts.cores,
                _ => amounts.memory,
            };
            let (requested, available) = (get(self.amounts), get(short.available().plus(held)));
            (requested > available && requested > get(held)).then(|| Shortfall {
                scope: QueueRef(&self.cluster.provider, &short.path).to_string(),
                kind: ScopeKind::Queue,
                dimension: dimension.clone(),
                requested,
                available,
                ahead: get(short.ahead),
                max: get(short.max),
                rule: self.rule(now),
                idle_key: None,
                idle_amount: None,
            })
        };
        let dimensions = self.cluster.dimensions();
        let shortfalls: Vec<_> = short
            .iter()
            .flat_map(|short| dimensions.iter().filter_map(move |dimension| of(short, dimension)))
            .collect();
        let paths: Vec<String> = short.iter().map(|short| short.path.clone()).collect();
        Box::new(BlockedRequest { refusal: Refusal::of_queues(shortfalls), wait_keys: self.stands(&paths) })
    }

    /// Returns the wait keys of a request that is short at these paths.
    fn stands(&self, short: &[String]) -> WaitKeys {
        let is_short = |wait_key: &WaitKey| matches!(wait_key, WaitKey::Queue { path, .. } if short.contains(path));
        let mut wait_keys: WaitKeys =
            self.wait_keys().into_iter().map(|wait_key| (wait_key.clone(), is_short(&wait_key))).collect();
        if !wait_keys.values().any(|is_short| *is_short) {
            // No key is short: the request waits for a queue that does not exist yet.
            wait_keys.values_mut().for_each(|is_short| *is_short = true);
        }
        wait_keys
    }
}

/// An external queue, for display.
struct QueueRef<'a>(&'a Provider, &'a str);

impl fmt::Display for QueueRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "provider={},queue={}", self.0.name, self.1)
    }
}
