//! Snapshots that lag behind grants: no amount is granted twice, and shown use is counted once, or twice only without application
//! ids.

use super::*;

/// Number of concurrent requests, half on each instance, 12 GB each.
const REQUESTS: usize = 30;

/// Number of fetches for one snapshot: applications, queues, applications again.
const ASKED_FOR_ONE: usize = 3;

/// A task that compares the counted GB of each queue with bounds until `end`.
struct Watch {
    stop: Arc<AtomicBool>,
    /// Lower and upper bound in GB.
    bounds: Arc<(AtomicUsize, AtomicUsize)>,
    looking: tokio::task::JoinHandle<usize>,
}

impl Watch {
    fn begin(database: &Arc<Database>, least: usize, most: usize) -> Self {
        let (stop, bounds) =
            (Arc::<AtomicBool>::default(), Arc::new((AtomicUsize::new(least), AtomicUsize::new(most))));
        let looking = tokio::spawn({
            let (database, stop, bounds) = (database.clone(), stop.clone(), bounds.clone());
            async move {
                let mut samples = 0;
                while !stop.load(Ordering::SeqCst) {
                    for path in ["root.a.x", "root.a", "root"] {
                        let (least, most) = (bounds.0.load(Ordering::SeqCst), bounds.1.load(Ordering::SeqCst));
                        let counted = usize::try_from(counted(&database, path).await).unwrap();
                        assert!((least..=most).contains(&counted), "{path}: {counted} of {least} to {most}");
                    }
                    samples += 1;
                }
                samples
            }
        });
        Self { stop, bounds, looking }
    }

    /// Lowers the upper bound.
    fn at_most(&self, most: usize) {
        self.bounds.1.store(most, Ordering::SeqCst);
    }

    async fn end(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.looking.await.unwrap()
    }
}

/// A burst on a queue of 100 GB within a parent of `parent` GB. The cluster shows nothing at first, then drivers, then all.
/// Engines report application ids or none.
async fn burst_that_shows_late(parent: i64, fits: usize, has_ids: bool) {
    let what = format!("a parent with {parent} GB, ids: {has_ids}");
    let queues = [("root", 1000, 0, "RUNNING"), ("root.a", parent, 0, "RUNNING"), ("root.a.x", 100, 0, "RUNNING")];
    let (database, cluster, one, two) = two_instances(&queues, "").await;
    let database = Arc::new(database);
    let before = (cluster.asked.load(Ordering::SeqCst), database.count(GENERATION).await);
    let granted = burst([&one, &two], REQUESTS, &in_queue("a.x", 12)).await;
    assert_eq!(granted.len(), fits, "{what}");
    let all = 12 * fits;
    // Without ids, shown use may belong to others: until it has settled, it counts in addition to the grants.
    let watch = Watch::begin(&database, all, if has_ids { all } else { 2 * all });
    let id = |number: usize| format!("application_3_{number}");
    for (number, grant) in granted.iter().enumerate() {
        let client = if number % 2 == 0 { &one.client } else { &two.client };
        match has_ids {
            true => report(client, grant, "a.x", &id(number)).await,
            false => drop(client.resource_inited(&inited(grant, "hadoop", None)).await.unwrap()),
        }
    }
    let none = async || burst([&one, &two], 4, &in_queue("a.x", 12)).await.is_empty();
    // Everything is shown within a minute; until then granted amounts count.
    for gb in [1, 7, 12] {
        refreshed(&database).await;
        assert!(none().await, "{what}: before {gb} GB of each are shown");
        cluster.show(|shown| shown.applications = (0..fits).map(|number| (id(number), "root.a.x", gb)).collect());
        refreshed(&database).await;
        assert!(none().await, "{what}: when {gb} GB of each are shown");
    }
    if !has_ids {
        // A minute later.
        let later = "WITH changed AS (UPDATE linkis_external_cluster SET changes = changes + 1 RETURNING changes)
            UPDATE linkis_external_ticket SET used_since = used_since - interval '61 s', change = changes FROM changed";
        database.execute(later).await;
        refreshed(&database).await;
        watch.at_most(all);
        refreshed(&database).await;
        assert!(none().await, "{what}: when they have settled");
    }
    assert!(watch.end().await > 10, "{what}");
    assert_eq!(counted(&database, "root.a").await, i64::try_from(all).unwrap(), "{what}");
    // The cluster is fetched once for each snapshot, independent of instances and requests.
    let asked = cluster.asked.load(Ordering::SeqCst) - before.0;
    let snapshots = usize::try_from(database.count(GENERATION).await - before.1).unwrap();
    assert!(asked <= ASKED_FOR_ONE * (snapshots + 2), "{what}: asked {asked} times for {snapshots} snapshots");
    assert_eq!(assert_invariants(&database, &one.client).await, fits, "{what}");
    // A settled application that ends frees its share.
    cluster.show(|shown| drop(shown.applications.pop()));
    one.client.resource_released(&release(&granted[fits - 1], "hadoop")).await.unwrap();
    refreshed(&database).await;
    assert_eq!(burst([&one, &two], 4, &in_queue("a.x", 12)).await.len(), 1, "{what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_snapshots_with_ids_grant_within_queue() {
    burst_that_shows_late(1000, 8, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_snapshots_with_ids_grant_within_parent() {
    burst_that_shows_late(50, 4, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_snapshots_without_ids_grant_within_queue() {
    burst_that_shows_late(1000, 8, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_snapshots_without_ids_grant_within_parent() {
    burst_that_shows_late(50, 4, false).await;
}
