//! Reports of EMs: tickets that are missing from them, tickets that are unknown, and EMs that fall silent.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use rm_client::{HeartbeatReply, ResourceRequest, ResultResource, RmClient};
use rm_model::{
    em::EmInstance,
    operation::Grant,
    report::{EmReport, Health, Load},
};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use crate::harness::*;

mod bulk;
mod idle;
mod lost_ems;

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3600);

fn patience(silent_after: Duration, lost_after: Duration, lost_after_reports: i16) -> Settings {
    let lost_after = lost_after.max(silent_after * 2);
    let times = settings().with_time("--em-silent-after", silent_after).with_time("--em-lost-after", lost_after);
    times.with("--lost-after-reports", lost_after_reports)
}

async fn start_with(settings: Settings) -> (Database, Instance) {
    let database = Database::fresh().await;
    let instance = Instance::start_with(&database, settings).await;
    (database, instance)
}

fn anywhere() -> ResourceRequest {
    ResourceRequest { em: None, ..request(&em("any"), "hadoop", load(1, 1, 1)) }
}

/// An EM that registers and reports.
#[derive(Clone)]
struct Ecm {
    client: RmClient,
    em: EmInstance,
    epoch: i64,
    sequence: Arc<AtomicI64>,
}

impl Ecm {
    async fn register(client: &RmClient, host: &str, size: i64) -> Self {
        let em = em(host);
        let registered = client.register(registration(em.clone(), load(size, size, size))).await.unwrap();
        Self { client: client.clone(), em, epoch: registered.epoch, sequence: Arc::default() }
    }

    /// Returns the next report.
    fn report(&self, tickets: &[&Grant]) -> EmReport {
        EmReport {
            em: self.em.clone(),
            epoch: self.epoch,
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1,
            health: Health::Healthy,
            load: None,
            tickets: tickets.iter().map(|grant| grant.ticket_id).collect(),
            observed: None,
            idle: vec![],
        }
    }

    async fn beat(&self, tickets: &[&Grant]) -> HeartbeatReply {
        self.client.heartbeat(&self.report(tickets)).await.unwrap()
    }

    /// Reports until the handle is dropped.
    fn beating(&self, tickets: Vec<Grant>) -> AbortOnDropHandle<()> {
        let ecm = self.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                ecm.beat(&tickets.iter().collect::<Vec<_>>()).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }))
    }

    async fn locked(&self) -> Grant {
        self.client.request_resource(&request(&self.em, "hadoop", load(1, 1, 1))).await.granted()
    }

    async fn used(&self) -> Grant {
        let grant = self.locked().await;
        self.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        grant
    }

    async fn is_registered(&self) -> bool {
        self.client.em(&self.em).await.is_ok()
    }

    async fn is_silent(&self) -> bool {
        self.client.em_status(&self.em).await.unwrap().is_some_and(|status| status.silent)
    }
}

/// Returns the number of history lines of an action for a ticket; for EMs if `None`.
async fn recorded(database: &Database, ticket_id: Option<Uuid>, action: &str) -> i64 {
    sqlx::query_scalar(
        "SELECT count(*) FROM linkis_resource_action_record WHERE ticket_id IS NOT DISTINCT FROM $1 AND action = $2",
    )
    .bind(ticket_id)
    .bind(action)
    .fetch_one(&database.pool)
    .await
    .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_missing_in_three_reports_is_lost() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let (kept, gone, wavering, locked) = (ecm.used().await, ecm.used().await, ecm.used().await, ecm.locked().await);
    ecm.beat(&[&kept, &gone, &wavering]).await;
    for round in 1..=2 {
        ecm.beat(&[&kept]).await;
        assert!(lives(&rm.client, gone.ticket_id).await, "after {round}");
    }
    ecm.beat(&[&kept, &wavering]).await;
    assert!(!lives(&rm.client, gone.ticket_id).await);
    for _ in 1..=2 {
        ecm.beat(&[&kept]).await;
    }
    for (grant, what) in [(&kept, "reported"), (&wavering, "back before it was lost"), (&locked, "locked")] {
        assert!(lives(&rm.client, grant.ticket_id).await, "{what}");
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
    assert_eq!(recorded(&database, Some(gone.ticket_id), "lost").await, 1);
    assert_eq!(recorded(&database, Some(kept.ticket_id), "lost").await, 0);

    let error = rm.client.resource_inited(&inited(&gone, "hadoop", None)).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("TICKET_NOT_FOUND"));
    assert!(error.to_string().contains("ended as lost at"), "{error}");
    rm.client.resource_released(&release(&gone, "hadoop")).await.unwrap();
    assert_eq!(recorded(&database, Some(gone.ticket_id), "released").await, 0, "it ended once");
    let got = ecm.beat(&[&kept, &wavering, &gone]).await.unknown_tickets;
    assert_eq!(got.len(), 1);
    assert!(got[0].id == gone.ticket_id && got[0].reason.starts_with("ended as lost at "), "{got:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_confirmed_between_reports_is_not_lost() {
    let (database, rm) = start_with(patience(NEVER, NEVER, 1)).await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let before = ecm.used().await;
    ecm.beat(&[]).await;
    assert!(lives(&rm.client, before.ticket_id).await, "the first report may be older than the engine");
    let between = ecm.used().await;
    ecm.beat(&[]).await;
    assert!(!lives(&rm.client, before.ticket_id).await);
    assert!(lives(&rm.client, between.ticket_id).await);
    ecm.beat(&[]).await;
    assert!(!lives(&rm.client, between.ticket_id).await);
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_tickets_return_their_end() {
    let (_database, rm) = start().await;
    let (ecm, other) = (Ecm::register(&rm.client, "host1", 10).await, Ecm::register(&rm.client, "host2", 10).await);
    let (used, locked, released, elsewhere) =
        (ecm.used().await, ecm.locked().await, ecm.used().await, other.used().await);
    rm.client.resource_released(&release(&released, "hadoop")).await.unwrap();
    let nobody = Grant { ticket_id: Uuid::new_v4(), ..used.clone() };
    let answer = ecm.beat(&[&used, &locked, &released, &elsewhere, &nobody]).await;
    assert_eq!(answer.interval, Duration::from_secs(10));
    let reason = |grant: &Grant| {
        let got = answer.unknown_tickets.iter().find(|unknown| unknown.id == grant.ticket_id);
        got.map(|unknown| unknown.reason.clone()).unwrap_or_default()
    };
    assert!(reason(&released).starts_with("was released at "), "{answer:?}");
    assert_eq!(reason(&elsewhere), "is not a ticket of this EM, or its end is no longer in the history");
    assert_eq!(reason(&nobody), reason(&elsewhere));
    assert_eq!(answer.unknown_tickets.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_report_counts_once() {
    let (_database, rm) = start_with(patience(NEVER, NEVER, 2)).await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let (used, nobody) = (ecm.used().await, Grant { ticket_id: Uuid::new_v4(), ..ecm.locked().await });
    ecm.beat(&[&used]).await;
    let report = ecm.report(&[&nobody]);
    let first = rm.client.heartbeat(&report).await.unwrap();
    assert_eq!(first.unknown_tickets.len(), 1);
    let seen = rm.client.em_status(&ecm.em).await.unwrap();
    for _ in 0..5 {
        assert_eq!(rm.client.heartbeat(&report).await.unwrap(), first);
        assert!(lives(&rm.client, used.ticket_id).await);
    }
    assert_eq!(rm.client.em_status(&ecm.em).await.unwrap(), seen);
    ecm.beat(&[]).await;
    assert!(!lives(&rm.client, used.ticket_id).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_reports_are_refused_without_change() {
    let (database, rm) = start_with(patience(NEVER, NEVER, 2)).await;
    let old = Ecm::register(&rm.client, "host1", 10).await;
    let used = old.used().await;
    let late = old.report(&[]);
    old.beat(&[&used]).await;
    old.beat(&[]).await;
    let new = Ecm::register(&rm.client, "host1", 10).await;
    new.sequence.store(7, Ordering::Relaxed);
    let overtaken = EmReport { health: Health::Unhealthy, ..new.report(&[]) };

    let refused = async |report: &EmReport, code, reason: &str| {
        let error = rm.client.heartbeat(report).await.unwrap_err();
        assert_eq!((error.code(), error.reason().as_deref()), (Some(code), Some(reason)), "{error}");
        error
    };
    let known = async || {
        let missed = database.count("SELECT sum(missed_reports) FROM linkis_user_resource_meta_data").await;
        (missed, rm.client.em_status(&em("host1")).await.unwrap().unwrap())
    };
    let before = known().await;
    assert_eq!((before.0, before.1.health), (1, None), "not of this registration");
    refused(&old.report(&[]), tonic::Code::FailedPrecondition, "STALE_REPORT").await;
    assert_eq!(known().await, before);
    new.beat(&[&used]).await;
    let before = known().await;
    assert_eq!((before.0, before.1.health), (0, Some(Health::Healthy)));
    refused(&overtaken, tonic::Code::FailedPrecondition, "STALE_REPORT").await;
    for late in [late, old.report(&[])] {
        refused(&late, tonic::Code::FailedPrecondition, "STALE_REPORT").await;
    }
    let unborn = EmReport { epoch: new.epoch + 1, ..new.report(&[]) };
    let error = refused(&unborn, tonic::Code::InvalidArgument, "INVALID_FIELD").await;
    assert_eq!(error.field().as_deref(), Some("epoch"));
    let nowhere = EmReport { em: em("host2"), ..new.report(&[]) };
    refused(&nowhere, tonic::Code::NotFound, "EM_NOT_REGISTERED").await;
    assert_eq!(known().await, before);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}
