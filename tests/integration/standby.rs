//! Reads from a standby: stale reads, their bound, and their failures.

use std::{collections::HashSet, time::Duration};

use linkis_rm::server::Options;
use rm_client::RmClient;
use rm_edge::resource_manager::RequestTimeouts;
use rm_proto::v1::{GetUsageRequest, ListActionsRequest, ListActionsResponse, UsageBy};
use rm_store::connect_target::{ConnectTarget, DatabaseRole};
use sqlx::Executor as _;
use tonic::Code;

use crate::{harness::*, replication_pair::Pair};

/// An instance that writes to the first of two nodes, or to the primary, and reads from the other.
async fn instance(pair: &Pair, written: &str) -> Instance {
    let url = pair.url().replace("read-write", "standby");
    let standby = Some(ConnectTarget::parse_for(DatabaseRole::OldReads, &url).unwrap());
    Instance::start_on(ConnectTarget::parse(written).unwrap(), Options { standby, ..options() }, ANY_PORT.into()).await
}

async fn history(client: &RmClient, newest_first: bool) -> ListActionsResponse {
    let question = ListActionsRequest { newest_first, page_size: 1000, ..Default::default() };
    client.actions(&question).await.unwrap()
}

async fn is_of_standby(client: &RmClient) -> bool {
    history(client, false).await.as_of_time.is_some()
}

fn contains_ticket(answer: &ListActionsResponse, ticket: &uuid::Uuid) -> bool {
    answer.actions.iter().any(|line| line.ticket_id == ticket.to_string())
}

/// Metrics of the host that answered stale reads.
async fn answered_by(instance: &Instance, who: &str) -> f64 {
    let metric = format!("linkis_rm_standby_reads_total{{answered_by=\"{who}\"}}");
    let text = instance.metrics.text().unwrap();
    let line = text.lines().find(|line| line.starts_with(&metric)).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standby_reads_return_their_age() {
    let pair = Pair::start("old-reads", false).await;
    let instance = instance(&pair, &pair.primary.url()).await;
    let (client, host) = (&instance.client, em("host1"));
    client.register(registration(host.clone(), load(64, 64, 64))).await.unwrap();
    let first = client.request_resource(&request(&host, "bob", load(1, 1, 1))).await.granted();
    eventually("the standby answers", LONG, || async { is_of_standby(client).await }).await;
    eventually("it knows of the grant", LONG, || async {
        let answers = [history(client, false).await, history(client, true).await];
        answers.iter().all(|answer| answer.as_of_time.is_some() && contains_ticket(answer, &first.ticket_id))
    })
    .await;
    assert!(answered_by(&instance, "standby").await >= 2.0);
    let by = UsageBy::User.into();
    let used = client.use_over_time(&GetUsageRequest { by, ..Default::default() }).await.unwrap();
    assert!(used.as_of_time.is_some());

    // It stands still: what it does not know yet was done after the moment that it names, and soon it is not asked any more.
    pair.standby.run("SELECT pg_wal_replay_pause()").await;
    let paused =
        || async { pair.standby.count("SELECT (pg_get_wal_replay_pause_state() = 'paused')::int::bigint").await };
    eventually("it stands still", LONG, || async { paused().await == Some(1) }).await;
    let second = client.request_resource(&request(&host, "bob", load(1, 1, 1))).await.granted();
    for newest_first in [false, true] {
        let old = history(client, newest_first).await;
        assert!(old.as_of_time.is_some() && !contains_ticket(&old, &second.ticket_id), "{old:?}");
        let granted_after = second.expires_at - options().times.lock_ttl;
        assert!(old.as_of_time.unwrap().seconds <= granted_after.unix_timestamp(), "{old:?} {second:?}");
    }
    eventually("the primary is asked", LONG, || async { !is_of_standby(client).await }).await;
    assert!(contains_ticket(&history(client, false).await, &second.ticket_id));
    assert!(answered_by(&instance, "primary").await >= 1.0);
    pair.standby.run("SELECT pg_wal_replay_resume()").await;
    eventually("the standby answers", LONG, || async { is_of_standby(client).await }).await;
    assert!(contains_ticket(&history(client, false).await, &second.ticket_id));
    instance.stop().await;
}

/// A continued page includes all earlier lines, from any host and with late commits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standby_pages_include_late_commits() {
    let pair = Pair::start("reads-on", false).await;
    let instance = instance(&pair, &pair.primary.url()).await;
    let (client, host) = (&instance.client, em("host1"));
    client.register(registration(host.clone(), load(64, 64, 64))).await.unwrap();
    eventually("the standby answers", LONG, || async { is_of_standby(client).await }).await;
    // A transaction has an id, and is not committed.
    let mut late = pair.primary.connect().await;
    let begin = "BEGIN; LOCK TABLE linkis_resource_action_record IN ROW EXCLUSIVE MODE;
        SELECT nextval('linkis_resource_action_record_id_seq')";
    late.execute(sqlx::raw_sql(begin)).await.unwrap();
    let grant = client.request_resource(&request(&host, "bob", load(1, 1, 1))).await.granted();
    let lines = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'granted'";
    eventually("the standby has its line", LONG, || async { pair.standby.count(lines).await == Some(1) }).await;
    let got = history(client, false).await;
    assert!(got.as_of_time.is_some() && !contains_ticket(&got, &grant.ticket_id), "{got:?}");
    late.execute(sqlx::raw_sql("ROLLBACK")).await.unwrap();
    let after = got.follow_token;
    eventually("the late line is returned", LONG, || async {
        let question = ListActionsRequest { page_size: 1000, page_token: after.clone(), ..Default::default() };
        let next = client.actions(&question).await.unwrap();
        next.as_of_time.is_some() && contains_ticket(&next, &grant.ticket_id)
    })
    .await;
    // Lines from the primary are not repeated by a late standby.
    pair.standby.run("SELECT pg_wal_replay_pause()").await;
    let question = ListActionsRequest { page_size: 1000, ..Default::default() };
    let mut read: HashSet<String> = HashSet::new();
    let mut token = String::new();
    let mut granted = HashSet::new();
    for round in 0..40 {
        if round == 20 {
            pair.standby.run("SELECT pg_wal_replay_resume()").await;
        }
        let grant = client.request_resource(&request(&host, "bob", load(1, 1, 1))).await.granted();
        granted.insert(grant.ticket_id.to_string());
        let page = client.actions(&ListActionsRequest { page_token: token, ..question.clone() }).await.unwrap();
        for line in page.actions.iter().filter(|line| line.action == "granted") {
            assert!(read.insert(line.ticket_id.clone()), "got twice: {line:?}");
        }
        token = page.follow_token;
    }
    let end = token;
    let rest = || async {
        let page = client.actions(&ListActionsRequest { page_token: end.clone(), ..question.clone() }).await.unwrap();
        page.actions.into_iter().map(|line| line.ticket_id).collect::<HashSet<_>>()
    };
    eventually("all lines are returned", LONG, || async {
        let rest = rest().await;
        granted.iter().all(|ticket| read.contains(ticket) || rest.contains(ticket))
    })
    .await;
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standby_outage_or_promotion_does_not_delay_reads() {
    let pair = Pair::start("reads-away", false).await;
    let instance = instance(&pair, &pair.url()).await;
    let (client, host) = (&instance.client, em("host1"));
    client.register(registration(host.clone(), load(64, 64, 64))).await.unwrap();
    eventually("the standby answers", LONG, || async { is_of_standby(client).await }).await;
    pair.standby.freeze(true);
    // In less time than a read has at the standby.
    let hasty = hurried(&instance.address, Duration::from_secs(8));
    assert!(history(&hasty, false).await.as_of_time.is_none());
    pair.standby.freeze(false);
    eventually("the standby answers", LONG, || async { is_of_standby(client).await }).await;

    let grant = client.request_resource(&request(&host, "bob", load(1, 1, 1))).await.granted();
    let lines = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'granted'";
    eventually("the standby has its line", LONG, || async { pair.standby.count(lines).await == Some(1) }).await;
    pair.primary.kill().await;
    pair.standby.promote().await;
    let question = ListActionsRequest { newest_first: true, ..Default::default() };
    eventually("the new primary answers", LONG, || async {
        client
            .actions(&question)
            .await
            .is_ok_and(|got| got.as_of_time.is_none() && contains_ticket(&got, &grant.ticket_id))
    })
    .await;
    instance.stop().await;
}

/// The periodic audit reads from the standby.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hourly_audit_reads_from_standby() {
    let pair = Pair::start("audits", false).await;
    let instance = instance(&pair, &pair.primary.url()).await;
    instance.client.register(registration(em("host1"), load(64, 64, 64))).await.unwrap();
    eventually("the standby answers", LONG, || async { is_of_standby(&instance.client).await }).await;
    instance.client.audit().await.unwrap();
    let before = answered_by(&instance, "standby").await;
    let old = "UPDATE linkis_rm_cluster_figure SET work_time = work_time - interval '2 hours' WHERE name = 'audit'";
    pair.primary.run(old).await;
    let renewed =
        "SELECT count(*) FROM linkis_rm_cluster_figure WHERE name = 'audit' AND work_time > now() - interval '1 hour'";
    eventually("it is audited", LONG, || async { pair.primary.count(renewed).await == Some(1) }).await;
    assert!(answered_by(&instance, "standby").await > before);
    instance.stop().await;
}

/// A commit waits for the standby for as long as it takes; its caller does not, and has nothing then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_on_silent_sync_standby_ends_by_deadline() {
    let pair = Pair::start("waits-for", true).await;
    let times = RequestTimeouts { request_timeout: Duration::from_secs(2), ..options().times };
    let target = ConnectTarget::parse(&pair.primary.url()).unwrap();
    let instance = Instance::start_on(target, Options { times, ..options() }, ANY_PORT.into()).await;
    let host = em("host1");
    instance.client.register(registration(host.clone(), load(64, 64, 64))).await.unwrap();
    pair.separate().await;
    // In less time than the database has to answer.
    let hasty = hurried(&instance.address, Duration::from_secs(10));
    let error = hasty.request_resource(&request(&host, "bob", load(1, 1, 1))).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::Unknown), Some("COMMIT_UNKNOWN")), "{error}");
    pair.primary.run("ALTER SYSTEM RESET synchronous_standby_names").await;
    pair.primary.run("SELECT pg_reload_conf()").await;
    let granted = || async { instance.client.request_resource(&request(&host, "bob", load(1, 1, 1))).await.is_ok() };
    eventually("it grants again", LONG, granted).await;
    let tickets = "SELECT count(*) FROM linkis_user_resource_meta_data";
    eventually("tickets without a received reply are released", LONG, || async {
        pair.primary.count(tickets).await == Some(1)
    })
    .await;
    assert_invariants(&pair.database(&pair.primary), &instance.client).await;
    instance.stop().await;
}
