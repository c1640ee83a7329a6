//! What was counted for the snapshots in force, kept for the next ones: so these cost what has changed, and not all live tickets.
//!
//! It proposes, as all that an instance keeps: what is kept is good as long as the lease by which it was counted is the last one of its cluster,
//! because nobody else has removed tickets that ended since, and whoever changes something without a number takes the lease back.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use uuid::Uuid;

use crate::store::{external_refresh::RefreshRow, external_snapshot::Prepared};

/// Of how many live tickets something is kept, of all clusters together: some 250 bytes of each. What is beyond them is read for each snapshot.
pub(super) const KEPT_TICKETS_MAX: usize = 1_000_000;

/// What was counted, by cluster, each with the lease by which that was.
#[derive(Debug, Clone, Default)]
pub(super) struct Kept(Arc<Mutex<HashMap<i64, (Uuid, Prepared)>>>);

impl Kept {
    /// What is kept of a cluster: it is its refresh's until that ends.
    pub fn take(&self, cluster_id: i64) -> Option<(Uuid, Prepared)> {
        self.lock().remove(&cluster_id)
    }

    /// Whether so many tickets more can be kept.
    pub fn has_room(&self, tickets: usize) -> bool {
        let kept: usize = self.lock().values().map(|(_, prepared)| prepared.preparation.tickets()).sum();
        kept.saturating_add(tickets) <= KEPT_TICKETS_MAX
    }

    /// Keeps what was counted of a cluster.
    pub fn put(&self, cluster_id: i64, lease: Uuid, prepared: Prepared) {
        self.lock().insert(cluster_id, (lease, prepared));
    }

    /// The leases by which something was counted, by cluster.
    pub fn leases(&self) -> Vec<(i64, Uuid)> {
        self.lock().iter().map(|(cluster_id, (lease, _))| (*cluster_id, *lease)).collect()
    }

    /// Forgets what was kept by `leases`, where another has asked since, or the cluster is gone.
    pub fn retain(&self, leases: &[(i64, Uuid)], rows: &[RefreshRow]) {
        let mut kept = self.lock();
        for (cluster_id, lease) in leases {
            let is_last = rows.iter().any(|row| row.cluster_id == *cluster_id && row.lease == Some(*lease));
            if !is_last && kept.get(cluster_id).is_some_and(|(kept, _)| kept == lease) {
                kept.remove(cluster_id);
            }
        }
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn lock(&self) -> MutexGuard<'_, HashMap<i64, (Uuid, Prepared)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
