//! Clusters that are large, and clusters that die under load: who asks for resources does not notice.

use super::*;

/// How long some requests take, one after another.
async fn times(client: &RmClient, asks: &[ResourceRequest]) -> Vec<Duration> {
    let mut times = Vec::new();
    for ask in asks.iter().cycle().take(20) {
        let begun = Instant::now();
        let grant = client.request_resource(ask).await.granted();
        times.push(begun.elapsed());
        client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    times
}

fn percentile(times: &[Duration], hundredths: usize) -> Duration {
    times[(times.len() - 1) * hundredths / 100]
}

/// Nine megabytes an answer: who asks for resources does not notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_of_a_thousand_queues_holds_up_nobody() {
    let names: Vec<&'static str> = (0..999).map(|n| &*format!("root.q{n}").leak()).collect();
    let mut queues: Vec<QueueOf> = vec![("root", 1_000_000, 0, "RUNNING")];
    queues.extend(names.iter().map(|path| (*path, 100_000, 0, "RUNNING")));
    let (database, cluster, one, _two) = two_instances(&queues[..2], r#", "refreshInterval": "500ms""#).await;
    let asks = [in_queue("q0", 1), request(&em("host1"), "hadoop", load(1, 1, 1))];
    let until = async |more: i64| {
        let before = database.count(GENERATION).await;
        let mut all = Vec::new();
        while database.count(GENERATION).await < before + more {
            all.extend(times(&one.client, &asks).await);
        }
        all.sort();
        all
    };
    let calm = until(3).await;
    cluster.show(|shown| (shown.queues, shown.padding) = (queues.clone(), 9000));
    let all =
        "SELECT count(*) FROM linkis_external_snapshot s JOIN linkis_external_cluster c USING (cluster_id, generation)";
    eventually("all queues", SOON, async || database.count(all).await == 1000).await;
    let large = until(4).await;
    for (what, times) in [("two queues", &calm), ("a thousand", &large)] {
        let [half, most, last] = [50, 99, 100].map(|hundredths| percentile(times, hundredths));
        println!("{what}: {} grants, p50 {half:?}, p99 {most:?}, longest {last:?}", times.len());
    }
    // The machine is shared with what reads the answers; a lock that was held all the while would cost far more.
    assert!(percentile(&large, 50) < percentile(&calm, 50) * 10 + Duration::from_millis(200));
    assert_eq!(assert_invariants(&database, &one.client).await, 0);
}

/// Nobody waits for a cluster that does not answer: neither those who need none of its queues, nor those who do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_outage_under_load_delays_no_request() {
    let queues = [("root", 100_000, 0, "RUNNING"), ("root.a", 90_000, 0, "RUNNING")];
    let (database, cluster, one, two) = two_instances(&queues, r#", "whenDown": "allow", "maxAge": "3s""#).await;
    let (plain, queued) = (request(&em("host1"), "hadoop", load(1, 1, 1)), in_queue("a", 1));
    let stop = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for (number, ask) in [plain, queued].into_iter().cycle().take(8).enumerate() {
        let client = client(if number % 4 < 2 { &one.address } else { &two.address });
        let stop = stop.clone();
        callers.spawn(async move {
            let (asks, mut all) = ([ask], Vec::new());
            while !stop.load(Ordering::SeqCst) {
                all.extend(times(&client, &asks).await);
            }
            (number % 2 == 1, all)
        });
    }
    let granted_by = async |basis: QueueCheckBasis| {
        let queue = one.client.dry_run(&in_queue("a", 1)).await;
        assert!(matches!(queue, Ok(ResultResource::Available(_))), "{queue:?}");
        let grant = one.client.request_resource(&in_queue("a", 1)).await.granted();
        one.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        grant.queue.unwrap().basis == basis
    };
    eventually("it answers", SOON, async || granted_by(QueueCheckBasis::Snapshot).await).await;
    cluster.show(|shown| shown.is_away = true);
    eventually("it is away", SOON, async || granted_by(QueueCheckBasis::Unchecked).await).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    cluster.show(|shown| shown.is_away = false);
    let back = eventually("it is back", SOON, async || granted_by(QueueCheckBasis::Snapshot).await).await;
    stop.store(true, Ordering::SeqCst);
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for (in_queue, times) in callers.join_all().await {
        if in_queue { with.extend(times) } else { without.extend(times) }
    }
    for (what, times) in [("without a queue", &mut without), ("in a queue", &mut with)] {
        times.sort();
        println!("{what}: {} grants, p50 {:?}, p99 {:?}", times.len(), percentile(times, 50), percentile(times, 99));
        assert!(percentile(times, 99) < Duration::from_secs(8), "{what}: the cluster's own bound is longer");
    }
    println!("back after {back:?}");
    assert_eq!(assert_invariants(&database, &one.client).await, 0);
}
