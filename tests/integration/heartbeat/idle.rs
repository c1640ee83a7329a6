//! Idle engines, by the reports of their EMs.

use rm_model::ticket::{Ticket, TicketState};
use time::OffsetDateTime;

use super::*;

async fn ticket(client: &RmClient, grant: &Grant) -> Ticket {
    client.ticket(grant.ticket_id).await.unwrap()
}

fn idle_since(ticket: &Ticket) -> Option<OffsetDateTime> {
    match ticket.state {
        TicketState::Used { idle_since, .. } => idle_since,
        TicketState::Locked { .. } => None,
    }
}

impl Ecm {
    /// Reports tickets, those of `idle` with idle engines.
    async fn rest(&self, tickets: &[&Grant], idle: &[&Grant]) {
        let idle = idle.iter().map(|grant| grant.ticket_id).collect();
        self.client.heartbeat(&EmReport { idle, ..self.report(tickets) }).await.unwrap();
    }
}

/// Returns the tickets whose engines have been idle for `idle_for`.
async fn listed(client: &RmClient, idle_for: Duration) -> Vec<String> {
    let idle_for = prost_types::Duration::try_from(idle_for).ok();
    let question = proto::ListTicketsRequest { idle_for, ..Default::default() };
    let answer = client.make(&rm_client::calls::LIST_TICKETS, &question).await.unwrap();
    answer.tickets.into_iter().map(|ticket| ticket.ticket_id).collect()
}

/// The time of the first report stays, also when the EM registers anew, until a report without the mark.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_time_begins_with_first_report() {
    let (database, rm) = start().await;
    let mut ecm = Ecm::register(&rm.client, "host1", 10).await;
    let (a, b) = (ecm.used().await, ecm.used().await);
    ecm.rest(&[&a, &b], &[&b]).await;
    let since = idle_since(&ticket(&rm.client, &b).await).expect("no task");
    assert_eq!(idle_since(&ticket(&rm.client, &a).await), None);
    ecm.rest(&[&a, &b], &[&b, &a]).await;
    assert!(idle_since(&ticket(&rm.client, &a).await) > Some(since));
    ecm = Ecm::register(&rm.client, "host1", 10).await;
    ecm.rest(&[&b, &a], &[&b]).await;
    assert_eq!(idle_since(&ticket(&rm.client, &b).await), Some(since));
    assert_eq!(idle_since(&ticket(&rm.client, &a).await), None);
    // A changed use keeps the time.
    let smaller = load(1, 0, 1);
    rm.client.resource_reported(&b.reported(name("hadoop"), smaller)).await.unwrap();
    assert_eq!(idle_since(&ticket(&rm.client, &b).await), Some(since));
    ecm.beat(&[&a, &b]).await;
    assert_eq!(idle_since(&ticket(&rm.client, &b).await), None);
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tickets_are_listed_by_idle_time() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let (a, b, busy) = (ecm.used().await, ecm.used().await, ecm.used().await);
    ecm.rest(&[&a, &b, &busy], &[&a, &b]).await;
    sqlx::query(
        "UPDATE linkis_user_resource_meta_data SET idle_since = idle_since - interval '1 hour' WHERE ticket_id = $1",
    )
    .bind(a.ticket_id)
    .execute(&database.pool)
    .await
    .unwrap();
    let [a, b] = [a, b].map(|grant| grant.ticket_id.to_string());
    assert_eq!(listed(&rm.client, Duration::ZERO).await, [a.clone(), b]);
    assert_eq!(listed(&rm.client, Duration::from_secs(1800)).await, [a]);
    for idle_for in [Duration::from_secs(7200), Duration::from_secs(i64::MAX.unsigned_abs())] {
        assert_eq!(listed(&rm.client, idle_for).await, Vec::<String>::new());
    }
}

/// A mark before the confirmation of the engine counts from the next report after it; then equal reports write nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_mark_of_locked_ticket_waits_for_its_engine() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let grant = ecm.locked().await;
    let recorded = || database.count("SELECT idle_tickets FROM linkis_em_report");
    ecm.rest(&[&grant], &[&grant]).await;
    // The digest of no report.
    assert_eq!((idle_since(&ticket(&rm.client, &grant).await), recorded().await), (None, -1));
    rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    ecm.rest(&[&grant], &[&grant]).await;
    assert!(idle_since(&ticket(&rm.client, &grant).await).is_some());
    assert_eq!(recorded().await, 1);
}

/// A mark for a ticket of another EM changes nothing there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_mark_of_foreign_ticket_has_no_effect() {
    let (_database, rm) = start().await;
    let [one, two] = [Ecm::register(&rm.client, "host1", 10).await, Ecm::register(&rm.client, "host2", 10).await];
    let (own, foreign) = (one.used().await, two.used().await);
    one.rest(&[&own, &foreign], &[&own, &foreign]).await;
    assert!(idle_since(&ticket(&rm.client, &own).await).is_some());
    assert_eq!(idle_since(&ticket(&rm.client, &foreign).await), None);
    two.rest(&[&foreign], &[&foreign]).await;
    one.rest(&[&own], &[]).await;
    assert_eq!(idle_since(&ticket(&rm.client, &own).await), None);
    assert!(idle_since(&ticket(&rm.client, &foreign).await).is_some());
}

/// A row that another transaction has locked is written by a later report.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_mark_of_locked_row_is_written_later() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let (a, b) = (ecm.used().await, ecm.used().await);
    let mut holder = database.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM linkis_user_resource_meta_data WHERE ticket_id = $1 FOR UPDATE")
        .bind(a.ticket_id)
        .execute(&mut *holder)
        .await
        .unwrap();
    ecm.rest(&[&a, &b], &[&a, &b]).await;
    assert_eq!(idle_since(&ticket(&rm.client, &a).await), None);
    assert!(idle_since(&ticket(&rm.client, &b).await).is_some());
    holder.rollback().await.unwrap();
    ecm.rest(&[&a, &b], &[&a, &b]).await;
    assert!(idle_since(&ticket(&rm.client, &a).await).is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_mark_beyond_tickets_is_rejected() {
    let (_database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let grant = ecm.used().await;
    let report = |idle: &[u8]| proto::HeartbeatRequest {
        em: Some(proto::EmInstance {
            application_name: ecm.em.application_name.to_string(),
            instance: ecm.em.instance.to_string(),
        }),
        epoch: ecm.epoch,
        sequence: 1,
        ticket_ids: grant.ticket_id.as_bytes().to_vec(),
        idle: idle.to_vec(),
        ..Default::default()
    };
    for idle in [&[2][..], &[0, 1], &[255]] {
        let error = rm.client.make(&rm_client::calls::HEARTBEAT, &report(idle)).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), Some("INVALID_FIELD"));
    }
    rm.client.make(&rm_client::calls::HEARTBEAT, &report(&[1, 0, 0])).await.unwrap();
    assert!(idle_since(&ticket(&rm.client, &grant).await).is_some());
}

/// Returns the tickets of idle engines and their cores: of each user, and of all by the overview.
async fn summed(client: &RmClient) -> String {
    let cores = "cores";
    let totals = client.overview().await.unwrap().tickets.unwrap();
    let all = format!("all {}/{}", totals.idle, totals.idle_amounts.get(cores).copied().unwrap_or_default());
    let users = client.users(&proto::ListUsersRequest::default()).await.unwrap().users;
    let user = |user: &proto::UserUse| format!("{} {}/{}", user.user, user.idle_tickets, user.dimensions[cores].idle);
    users.iter().map(user).chain([all]).collect::<Vec<_>>().join(", ")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_amounts_are_summed_by_user() {
    let (_database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 100).await;
    let used = async |user: &str, cores| {
        let grant = rm.client.request_resource(&request(&ecm.em, user, load(1, cores, 1))).await.granted();
        rm.client.resource_inited(&inited(&grant, user, None)).await.unwrap();
        grant
    };
    let (a, b, c) = (used("alice", 2).await, used("alice", 3).await, used("bob", 5).await);
    let locked = ecm.locked().await;
    let tickets = [&a, &b, &c, &locked];
    let shows = async |sums: &str| eventually(sums, LONG, async || summed(&rm.client).await == sums).await;
    shows("alice 0/0, bob 0/0, hadoop 0/0, all 0/0").await;
    ecm.rest(&tickets, &[&b, &c, &locked]).await;
    shows("alice 1/3, bob 1/5, hadoop 0/0, all 2/8").await;
    ecm.rest(&tickets, &[&a, &c]).await;
    shows("alice 1/2, bob 1/5, hadoop 0/0, all 2/7").await;
    rm.client.resource_reported(&c.reported(name("bob"), load(1, 4, 1))).await.unwrap();
    shows("alice 1/2, bob 1/4, hadoop 0/0, all 2/6").await;
    rm.client.resource_released(&release(&c, "bob")).await.unwrap();
    shows("alice 1/2, hadoop 0/0, all 1/2").await;
    eventually("the metric", LONG, async || rm.metric("linkis_rm_cluster_idle_tickets") == 1.0).await;
    rm.stop().await;
}
