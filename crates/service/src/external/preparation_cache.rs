//! Preparation cache: the counts behind the current snapshot of each cluster, so that the next one reads only changes.
//!
//! A preparation is valid while the lease under which it was made is the latest of its cluster. Only another lease owner may
//! have removed ended tickets, and unnumbered changes revoke the lease.
//!
//! Never: decides; an invalid preparation is dropped and all tickets are read.
//! Caller: `refresh`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use uuid::Uuid;

use crate::lock::lock;
use rm_store::{external_refresh::RefreshRow, external_snapshot::PreparedSnapshot};

/// Maximum number of live tickets in the cache, of all clusters together: some 250 bytes each. Each snapshot reads all tickets
/// of clusters beyond it.
pub(super) const KEPT_TICKETS_MAX: usize = 1_000_000;

/// Preparations by cluster, each with its lease.
#[derive(Debug, Clone, Default)]
pub(super) struct PreparationCache(Arc<Mutex<HashMap<i64, (Uuid, PreparedSnapshot)>>>);

impl PreparationCache {
    /// Removes and returns the preparation of a cluster; a refresh owns it until it ends.
    pub fn take(&self, cluster_id: i64) -> Option<(Uuid, PreparedSnapshot)> {
        lock(&self.0).remove(&cluster_id)
    }

    /// Whether `tickets` more can be cached.
    pub fn has_room(&self, tickets: usize) -> bool {
        let kept: usize = lock(&self.0).values().map(|(_, prepared)| prepared.preparation.tickets()).sum();
        kept.saturating_add(tickets) <= KEPT_TICKETS_MAX
    }

    /// Caches the preparation of a cluster.
    pub fn put(&self, cluster_id: i64, lease: Uuid, prepared: PreparedSnapshot) {
        lock(&self.0).insert(cluster_id, (lease, prepared));
    }

    /// Returns the leases of the cached preparations, by cluster.
    pub fn leases(&self) -> Vec<(i64, Uuid)> {
        lock(&self.0).iter().map(|(cluster_id, (lease, _))| (*cluster_id, *lease)).collect()
    }

    /// Evicts the preparations of `leases` whose cluster has a newer lease or was deleted.
    pub fn retain(&self, leases: &[(i64, Uuid)], rows: &[RefreshRow]) {
        let mut kept = lock(&self.0);
        for (cluster_id, lease) in leases {
            let is_last = rows.iter().any(|row| row.cluster_id == *cluster_id && row.lease == Some(*lease));
            if !is_last && kept.get(cluster_id).is_some_and(|(kept, _)| kept == lease) {
                kept.remove(cluster_id);
            }
        }
    }
}
