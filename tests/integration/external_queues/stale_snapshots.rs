//! A cluster whose numbers are late: what is granted meanwhile is never more than there is, and what it comes to show is never missed, and
//! counted twice only where nobody can know better.

use super::*;

/// By how much its numbers are late.
fn lag() -> Duration {
    std::env::var("LINKIS_RM_YARN_LAG")
        .map_or(Duration::from_millis(500), |seconds| Duration::from_secs_f64(seconds.parse().unwrap()))
}

/// Of so many requests at once, half on each instance, each for 12 GB.
const REQUESTS: usize = 30;

/// How often a cluster is asked for one snapshot: for its applications, its queues, and its applications again.
const ASKED_FOR_ONE: usize = 3;

/// What is counted of each queue, as often as can be looked, until it is said that this is enough.
struct Watch {
    stop: Arc<AtomicBool>,
    /// At least so much, and no more than that, in GB.
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
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                samples
            }
        });
        Self { stop, bounds, looking }
    }

    /// No more than that from here on.
    fn at_most(&self, most: usize) {
        self.bounds.1.store(most, Ordering::SeqCst);
    }

    async fn end(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.looking.await.unwrap()
    }
}

/// A burst on a queue of 100 GB in a parent of so many, of which the cluster shows nothing until it is so late, then drivers, and at last
/// all. Engines report the ids of their applications, or none.
async fn burst_that_shows_late(parent: i64, fits: usize, has_ids: bool) {
    let what = format!("a parent with {parent} GB, ids: {has_ids}");
    let queues = [("root", 1000, 0, "RUNNING"), ("root.a", parent, 0, "RUNNING"), ("root.a.x", 100, 0, "RUNNING")];
    let (database, cluster, one, two) = two_instances(&queues, "").await;
    let database = Arc::new(database);
    let before = (cluster.asked.load(Ordering::SeqCst), database.count(GENERATION).await);
    let granted = burst([&one, &two], REQUESTS, &in_queue("a.x", 12)).await;
    assert_eq!(granted.len(), fits, "{what}");
    let all = 12 * fits;
    // Without an id what is shown may be another's: until it has settled, it counts beside what was granted.
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
    // All of it is shown before a minute is over: until then it counts, whatever is shown.
    for (gb, late) in [(1, lag()), (7, lag() / 4), (12, lag() / 4)] {
        tokio::time::sleep(late).await;
        assert!(none().await, "{what}: before {gb} GB of each are shown");
        cluster.show(|shown| shown.applications = (0..fits).map(|number| (id(number), "root.a.x", gb)).collect());
        refreshed(&database).await;
        assert!(none().await, "{what}: when {gb} GB of each are shown");
    }
    if !has_ids {
        // A minute later.
        let later = "WITH changed AS (UPDATE linkis_external_cluster SET changes = changes + 1 RETURNING changes)
            UPDATE linkis_external_ticket SET used_since = used_since - interval '61 s', change = changes FROM changed";
        sqlx::raw_sql(later).execute(&database.pool).await.unwrap();
        refreshed(&database).await;
        watch.at_most(all);
        refreshed(&database).await;
        assert!(none().await, "{what}: when they have settled");
    }
    assert!(watch.end().await > 10, "{what}");
    assert_eq!(counted(&database, "root.a").await, i64::try_from(all).unwrap(), "{what}");
    // However many instances there are, and however many ask, it was asked once for each snapshot.
    let asked = cluster.asked.load(Ordering::SeqCst) - before.0;
    let snapshots = usize::try_from(database.count(GENERATION).await - before.1).unwrap();
    assert!(asked <= ASKED_FOR_ONE * (snapshots + 2), "{what}: asked {asked} times for {snapshots} snapshots");
    assert_eq!(assert_invariants(&database, &one.client).await, fits, "{what}");
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
