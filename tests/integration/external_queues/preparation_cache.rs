//! The preparation cache of snapshots: an instance reads only changed tickets, and all live tickets if the cache may be wrong.

use super::*;

/// Returns the value of a counter of an instance.
fn counter(rm: &Instance, series: &str) -> i64 {
    let text = rm.metrics.text();
    let value = text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse::<f64>().ok());
    value.map_or(0, |value| value as i64)
}

fn prepared(rm: &Instance, by: &str) -> i64 {
    counter(rm, &format!(r#"linkis_rm_external_preparations_total{{by="{by}"}}"#))
}

fn tickets_read(rm: &Instance, read: &str) -> i64 {
    counter(rm, &format!(r#"linkis_rm_external_tickets_read_total{{read="{read}"}}"#))
}

/// Starts a cluster and one instance that has cached the counts of `tickets` tickets.
async fn with_tickets(tickets: usize) -> (Database, Cluster, Instance, Vec<Grant>) {
    let (database, one) = start().await;
    let cluster = Cluster::start(&[("root", 1000, 0, "RUNNING"), ("root.a", 900, 0, "RUNNING")]).await;
    one.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    put(&one, cluster.config("")).await;
    eventually("a snapshot", SOON, async || database.count(GENERATION).await > 0).await;
    let granted = burst([&one, &one], tickets, &in_queue("a", 1)).await;
    assert_eq!(granted.len(), tickets);
    refreshed(&database).await;
    (database, cluster, one, granted)
}

/// Asserts the counted GB of a queue after a snapshot that begins now.
async fn counted_soon(database: &Database, path: &str, gb: i64) {
    refreshed(database).await;
    assert_eq!(counted(database, path).await, gb);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_preparation_reads_only_changed_tickets() {
    let (database, cluster, one, granted) = with_tickets(60).await;
    let before = (tickets_read(&one, "all"), tickets_read(&one, "changed"), prepared(&one, "kept"));
    assert!(before.2 > 0, "{before:?}");
    refreshed(&database).await;
    let (all, changed) = (tickets_read(&one, "all") - before.0, tickets_read(&one, "changed") - before.1);
    assert_eq!((all, changed), (0, 0), "nothing has changed");
    // One ticket ends and one is confirmed. An application that the cluster shows costs no read.
    one.client.resource_released(&release(&granted[0], "hadoop")).await.unwrap();
    let used = of_queue("a", 1, "application_9_1");
    one.client.resource_inited(&inited(&granted[1], "hadoop", Some(used))).await.unwrap();
    counted_soon(&database, "root.a", 59).await;
    cluster.show(|shown| shown.applications.push(("application_9_1".into(), "root.a", 1)));
    counted_soon(&database, "root.a", 59).await;
    cluster.show(|shown| shown.applications[0].2 = 3);
    counted_soon(&database, "root.a", 61).await;
    cluster.show(|shown| shown.applications.clear());
    counted_soon(&database, "root.a", 59).await;
    let (all, changed) = (tickets_read(&one, "all") - before.0, tickets_read(&one, "changed") - before.1);
    assert_eq!((all, changed), (0, 2), "the two that changed, once each");
    let ended = "SELECT count(*) FROM linkis_external_ticket WHERE ended";
    eventually("ended tickets are deleted", SOON, async || database.count(ended).await == 0).await;
    assert_eq!(assert_invariants(&database, &one.client).await, 59);
}

/// Tickets that settle by time settle in the cache, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settled_engines_are_shown_without_reads() {
    let (database, cluster, one, granted) = with_tickets(3).await;
    for grant in &granted {
        one.client.resource_inited(&inited(grant, "hadoop", None)).await.unwrap();
    }
    // Two tickets appear to be in use for nearly a minute.
    let later = "WITH changed AS (UPDATE linkis_external_cluster SET changes = changes + 1 RETURNING changes)
        UPDATE linkis_external_ticket SET used_since = clock_timestamp() - interval '48 s', change = changes FROM changed
        WHERE ticket_id <> (SELECT ticket_id FROM linkis_external_ticket LIMIT 1)";
    assert_eq!(sqlx::raw_sql(later).execute(&database.pool).await.unwrap().rows_affected(), 2);
    cluster.show(|shown| shown.queues[1].2 = 2);
    let counts = async |gb: i64| counted(&database, "root.a").await == gb;
    eventually("they count", SOON, async || counts(5).await).await;
    refreshed(&database).await;
    let read = (tickets_read(&one, "all"), tickets_read(&one, "changed"));
    eventually("they have settled", SOON, async || counts(3).await).await;
    assert_eq!((tickets_read(&one, "all"), tickets_read(&one, "changed")), read, "nothing was read for it");
    assert_eq!(assert_invariants(&database, &one.client).await, 3);
}

/// Returns how often all tickets were read.
fn anew(rm: &Instance) -> i64 {
    ["new", "superseded", "outdated", "renumbered"].into_iter().map(|by| prepared(rm, by)).sum()
}

/// Waits until an instance has read all tickets anew, and sees that all of them count.
async fn read_anew(database: &Database, rm: &Instance, before: i64, gb: i64) {
    eventually("all is read anew", SOON, async || anew(rm) > before).await;
    counted_soon(database, "root.a", gb).await;
    assert_eq!(assert_invariants(database, &rm.client).await, 12);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preparation_cache_is_rebuilt_after_provider_change() {
    let (database, cluster, one, _granted) = with_tickets(12).await;
    let before = anew(&one);
    put(&one, cluster.config(r#", "whenDown": "allow""#)).await;
    read_anew(&database, &one, before, 12).await;
    // A change by SQL has no number. The repair therefore invalidates the cached counts.
    let by_hand = "UPDATE linkis_external_ticket SET memory = memory + 1073741824
        WHERE ticket_id = (SELECT ticket_id FROM linkis_external_ticket LIMIT 1)";
    database.execute(by_hand).await;
    counted_soon(&database, "root.a", 12).await;
    assert!(one.client.audit().await.unwrap().differences.count > 0, "the cache has not changed");
    let before = anew(&one);
    assert_eq!(one.client.repair().await.unwrap().remaining.count, 0);
    read_anew(&database, &one, before, 13).await;
}

/// Changes the numbers of changes until an instance detects it between two snapshots.
async fn renumbered_until(database: &Database, rm: &Instance, sql: &'static str, by: &str) {
    let noticed = async || {
        database.execute(sql).await;
        prepared(rm, by) > 0
    };
    eventually(by, SOON, noticed).await;
    assert!(tickets_read(rm, "all") >= 12);
    counted_soon(database, "root.a", 12).await;
    assert_eq!(assert_invariants(database, &rm.client).await, 12);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preparation_cache_is_rebuilt_after_renumbered_changes() {
    let (database, _cluster, one, _granted) = with_tickets(12).await;
    // As in a database that lost its last changes.
    let fewer = "WITH changed AS (UPDATE linkis_external_cluster SET changes = changes - 1 RETURNING changes)
        UPDATE linkis_external_ticket SET change = least(change, changes) FROM changed";
    renumbered_until(&database, &one, fewer, "renumbered").await;
    let many = "UPDATE linkis_external_cluster SET changes = changes + 20001";
    renumbered_until(&database, &one, many, "outdated").await;
}

/// The instance with cached counts fetches while it lives. After a fetch by another instance, it reads all tickets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preparation_cache_keeps_lease_with_its_instance() {
    let (database, _cluster, one, granted) = with_tickets(12).await;
    let two = Instance::start(&database).await;
    let of_both = |count: fn(&Instance) -> i64| count(&one) + count(&two);
    let kept = |rm: &Instance| prepared(rm, "kept");
    let before = (of_both(kept), of_both(anew));
    for _ in 0..5 {
        refreshed(&database).await;
    }
    let (kept, all) = (of_both(kept) - before.0, of_both(anew) - before.1);
    assert!(kept >= 8 && all <= 2, "the instance with a cache prepares it: {kept}, {all}");
    let before = of_both(anew);
    let other = "UPDATE linkis_external_refresh SET lease = gen_random_uuid(), leased_until = '-infinity'";
    database.execute(other).await;
    eventually("one of them reads all", SOON, async || of_both(anew) > before).await;
    one.client.resource_released(&release(&granted[0], "hadoop")).await.unwrap();
    counted_soon(&database, "root.a", 11).await;
    one.stop().await;
    two.client.resource_released(&release(&granted[1], "hadoop")).await.unwrap();
    counted_soon(&database, "root.a", 10).await;
    eventually("it keeps something in its turn", SOON, async || prepared(&two, "kept") > 0).await;
    assert_eq!(assert_invariants(&database, &two.client).await, 10);
}

/// During an outage of a cluster, cached counts are updated, and ended tickets are removed from them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preparation_cache_survives_cluster_outage() {
    let (database, cluster, one, granted) = with_tickets(12).await;
    cluster.show(|shown| shown.is_away = true);
    let failures = "SELECT failures::bigint FROM linkis_external_refresh";
    eventually("it is away", SOON, async || database.count(failures).await > 1).await;
    one.client.resource_released(&release(&granted[0], "hadoop")).await.unwrap();
    let ended = "SELECT count(*) FROM linkis_external_ticket WHERE ended";
    eventually("ended tickets are deleted", SOON, async || database.count(ended).await == 0).await;
    cluster.show(|shown| shown.is_away = false);
    counted_soon(&database, "root.a", 11).await;
    assert_eq!((prepared(&one, "new"), tickets_read(&one, "changed")), (1, 13), "nothing was read twice");
    assert_eq!(assert_invariants(&database, &one.client).await, 11);
}
