//! Reports of EMs: tickets that are missing from them, tickets that are unknown, and EMs that fall silent.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{Heartbeat, ResourceRequest, ResultResource, RmClient},
    domain::{
        em::EmInstance,
        operation::Grant,
        report::{Health, Load, Report},
    },
    server::Options,
    service::heartbeat::LivenessTimeouts,
    transport::proto::{self, usage_service_client::UsageServiceClient},
};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use crate::harness::*;

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3600);

/// How long to wait for what has to come.
const LONGEST: Duration = Duration::from_secs(30);

fn patience(silent_after: Duration, lost_after: Duration, lost_after_reports: i16) -> Options {
    Options { patience: LivenessTimeouts { silent_after, lost_after, lost_after_reports }, ..options() }
}

async fn start_with(options: Options) -> (Database, Instance) {
    let database = Database::fresh().await;
    let instance = Instance::start_with(&database, options).await;
    (database, instance)
}

fn anywhere() -> ResourceRequest {
    ResourceRequest { em: None, ..request(&em("any"), "hadoop", load(1, 1, 1)) }
}

/// The process on a host that registers and reports.
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

    /// The next report.
    fn report(&self, tickets: &[&Grant]) -> Report {
        Report {
            em: self.em.clone(),
            epoch: self.epoch,
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1,
            health: Health::Healthy,
            load: None,
            tickets: tickets.iter().map(|grant| grant.ticket_id).collect(),
            observed: None,
        }
    }

    async fn beat(&self, tickets: &[&Grant]) -> Heartbeat {
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

/// How often each action stands in the history of a ticket, or of EMs for `None`.
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
async fn a_used_ticket_is_lost_after_three_reports_without_it_and_not_before() {
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
    assert!(error.to_string().contains("was given up as lost at"), "{error}");
    rm.client.resource_released(&release(&gone, "hadoop")).await.unwrap();
    assert_eq!(recorded(&database, Some(gone.ticket_id), "released").await, 0, "it ended once");
    let told = ecm.beat(&[&kept, &wavering, &gone]).await.unknown_tickets;
    assert_eq!(told.len(), 1);
    assert!(told[0].id == gone.ticket_id && told[0].reason.starts_with("was given up as lost at "), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_reports_in_between_two_reports_is_not_lost() {
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
async fn unknown_tickets_are_named_with_what_became_of_them() {
    let (_database, rm) = start().await;
    let (ecm, other) = (Ecm::register(&rm.client, "host1", 10).await, Ecm::register(&rm.client, "host2", 10).await);
    let (used, locked, released, elsewhere) =
        (ecm.used().await, ecm.locked().await, ecm.used().await, other.used().await);
    rm.client.resource_released(&release(&released, "hadoop")).await.unwrap();
    let nobody = Grant { ticket_id: Uuid::new_v4(), ..used.clone() };
    let answer = ecm.beat(&[&used, &locked, &released, &elsewhere, &nobody]).await;
    assert_eq!(answer.interval, Duration::from_secs(10));
    let reason = |grant: &Grant| {
        let told = answer.unknown_tickets.iter().find(|unknown| unknown.id == grant.ticket_id);
        told.map(|unknown| unknown.reason.clone()).unwrap_or_default()
    };
    assert!(reason(&released).starts_with("was released at "), "{answer:?}");
    assert_eq!(reason(&elsewhere), "lives on another EM, linkis-cg-engineconnmanager/host2:9102");
    assert!(reason(&nobody).starts_with("is not remembered"), "{answer:?}");
    assert_eq!(answer.unknown_tickets.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_report_counts_once_and_is_answered_alike() {
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
async fn old_reports_are_refused_and_change_nothing() {
    let (database, rm) = start_with(patience(NEVER, NEVER, 2)).await;
    let old = Ecm::register(&rm.client, "host1", 10).await;
    let used = old.used().await;
    let late = old.report(&[]);
    old.beat(&[&used]).await;
    old.beat(&[]).await;
    let new = Ecm::register(&rm.client, "host1", 10).await;
    new.sequence.store(7, Ordering::Relaxed);
    let overtaken = Report { health: Health::Unhealthy, ..new.report(&[]) };

    let refused = async |report: &Report, code, reason: &str| {
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
    let unborn = Report { epoch: new.epoch + 1, ..new.report(&[]) };
    let error = refused(&unborn, tonic::Code::InvalidArgument, "INVALID_FIELD").await;
    assert_eq!(error.field().as_deref(), Some("epoch"));
    let nowhere = Report { em: em("host2"), ..new.report(&[]) };
    refused(&nowhere, tonic::Code::NotFound, "EM_NOT_REGISTERED").await;
    assert_eq!(known().await, before);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_em_is_not_chosen_until_it_reports_again() {
    let (_database, rm) = start_with(patience(Duration::from_millis(300), NEVER, 3)).await;
    let ecm = Ecm::register(&rm.client, "host1", 1000).await;
    ecm.beat(&[]).await;
    eventually("it is silent", LONGEST, || ecm.is_silent()).await;
    let error = rm.client.request_resource(&anywhere()).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(tonic::Code::NotFound), Some("NO_EM_AVAILABLE")));
    assert!(
        error.to_string().contains("1 match the request, but all of them are silent, unhealthy or drained"),
        "{error}"
    );
    let error = rm.client.dry_run(&anywhere()).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("NO_EM_AVAILABLE"));
    assert_eq!(ecm.locked().await.em, ecm.em, "one that is named is served");

    let by_hand = Ecm::register(&rm.client, "host2", 10).await;
    for _ in 0..9 {
        assert_eq!(rm.client.request_resource(&anywhere()).await.granted().em, by_hand.em);
    }
    eventually("it is chosen again", LONGEST, || async {
        ecm.beat(&[]).await;
        matches!(rm.client.dry_run(&anywhere()).await, Ok(ResultResource::Available(grant)) if grant.em == ecm.em)
    })
    .await;
    eventually("it is silent again", LONGEST, || ecm.is_silent()).await;
    Ecm::register(&rm.client, "host1", 1000).await;
    assert!(!rm.client.em_status(&ecm.em).await.unwrap().unwrap().silent, "a registration is a sign of life");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unhealthy_em_is_not_chosen_and_the_least_busy_of_equals_is() {
    let (_database, rm) = start().await;
    let hosts = ["sick", "busy", "idle"];
    let mut ecms = vec![];
    for host in hosts {
        ecms.push(Ecm::register(&rm.client, host, 10).await);
    }
    let told = |used, permille| Load::parse("load", used, 100, permille).ok();
    let reports = [
        Report { health: Health::Unhealthy, ..ecms[0].report(&[]) },
        Report { load: told(95, 0), health: Health::Warn, ..ecms[1].report(&[]) },
        Report { load: told(5, 300), ..ecms[2].report(&[]) },
    ];
    for report in &reports {
        rm.client.heartbeat(report).await.unwrap();
    }
    assert_eq!(rm.client.request_resource(&anywhere()).await.granted().em, em("idle"));
    assert_eq!(rm.client.request_resource(&anywhere()).await.granted().em, em("busy"), "it has more room now");
    for _ in 0..18 {
        assert_ne!(rm.client.request_resource(&anywhere()).await.granted().em, em("sick"));
    }
    let full = rm.client.request_resource(&anywhere()).await.refused();
    assert_eq!(full.shortfalls[0].available, 0, "by one that could be chosen: {full:?}");
    assert_eq!(ecms[0].locked().await.em, em("sick"), "one that is named is served");

    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let ems = usage.list_ems(proto::ListEmsRequest::default()).await.unwrap().into_inner().ems;
    let shown: Vec<_> = ems.iter().map(|em| (em.health(), em.load.map(|load| load.memory_used), em.silent)).collect();
    let expected = [
        (proto::Health::Warn, Some(95), false),
        (proto::Health::Healthy, Some(5), false),
        (proto::Health::Unhealthy, None, false),
    ];
    assert_eq!(shown, expected, "by name");
    assert!(ems.iter().all(|em| em.last_report_time.unwrap().seconds >= em.register_time.unwrap().seconds));
    let idle = usage.get_em(proto::GetEmRequest { em: ems[1].em.clone() }).await.unwrap().into_inner();
    assert_eq!(idle.em.as_ref(), Some(&ems[1]));
    assert_eq!(ems[1].load.unwrap(), proto::Load { memory_used: 5, memory_max: 100, cpu_permille: 300 });
    Ecm::register(&rm.client, "by-hand", 1).await;
    assert_eq!(rm.client.em_status(&em("by-hand")).await.unwrap(), None);
}

/// Two instances look, and both give up what they see; those that report or never did stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_em_is_unregistered_with_its_tickets() {
    let short = patience(Duration::from_secs(1), Duration::from_secs(2), 3);
    let (database, rm) = start_with(short.clone()).await;
    let second = Instance::start_with(&database, short).await;
    let silent = Ecm::register(&rm.client, "silent", 10).await;
    let by_hand = Ecm::register(&rm.client, "by-hand", 10).await;
    let alive = Ecm::register(&second.client, "alive", 10).await;
    let lost = [silent.used().await, silent.used().await, silent.locked().await];
    let (kept, held) = (alive.used().await, by_hand.used().await);
    let _beating = alive.beating(vec![kept.clone()]);
    silent.beat(&[&lost[0], &lost[1]]).await;
    eventually("it is given up", LONGEST, || async { !silent.is_registered().await }).await;

    for grant in &lost {
        assert!(!lives(&rm.client, grant.ticket_id).await);
        assert_eq!(recorded(&database, Some(grant.ticket_id), "lost").await, 1);
    }
    assert_eq!(recorded(&database, None, "lost").await, 1);
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_report").await, 1, "of the one that is alive");
    assert!(lives(&rm.client, kept.ticket_id).await && lives(&rm.client, held.ticket_id).await);
    assert!(by_hand.is_registered().await, "one that never reported is never judged by it");
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);

    let error = rm.client.heartbeat(&silent.report(&[])).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("EM_NOT_REGISTERED"));
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_report").await, 1, "it is not revived");
    let back = Ecm::register(&rm.client, "silent", 10).await;
    assert_eq!(back.beat(&[&lost[0]]).await.unknown_tickets.len(), 1);
}

/// By the database's clock everyone is silent for an hour: because the service was away, or because the clock jumped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_lost_because_the_service_was_away() {
    let (silent_after, lost_after) = (Duration::from_secs(1), Duration::from_secs(3));
    let (database, rm) = start_with(patience(silent_after, lost_after, 3)).await;
    let (alive, dead) = (Ecm::register(&rm.client, "alive", 10).await, Ecm::register(&rm.client, "dead", 10).await);
    let grant = alive.used().await;
    alive.beat(&[&grant]).await;
    dead.beat(&[]).await;
    rm.stop().await;
    sqlx::raw_sql(
        "UPDATE linkis_em_report SET report_time = report_time - interval '1 hour';
         UPDATE linkis_em_resource_meta_data SET register_time = register_time - interval '1 hour'",
    )
    .execute(&database.pool)
    .await
    .unwrap();
    let started = Instant::now();
    let rm = Instance::start_with(&database, patience(silent_after, lost_after, 3)).await;
    let alive = Ecm { client: rm.client.clone(), ..alive };
    let dead = Ecm { client: rm.client.clone(), ..dead };
    assert!(alive.is_silent().await && dead.is_silent().await);
    let _beating = alive.beating(vec![grant.clone()]);
    eventually("the other is given up", LONGEST, || async { !dead.is_registered().await }).await;
    assert!(started.elapsed() >= lost_after - silent_after, "it had the time to report");
    assert!(alive.is_registered().await && lives(&rm.client, grant.ticket_id).await);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_lost_while_the_database_comes_and_goes() {
    let (silent_after, lost_after) = (Duration::from_millis(300), Duration::from_millis(1500));
    let (database, rm) = start_with(patience(silent_after, lost_after, 3)).await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    ecm.beat(&[]).await;
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'linkis-rm'";
    for _ in 0..25 {
        database.count(cut).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(database.count("SELECT count(*) FROM linkis_em_resource_meta_data").await, 1);
    }
    eventually("it is given up when the database stays", LONGEST, || async {
        database.count("SELECT count(*) FROM linkis_em_resource_meta_data").await == 0
    })
    .await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// Reports race with unregistrations and registrations: none is left of an EM that is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_report_outlives_its_em() {
    let (database, rm) = start_with(patience(NEVER, NEVER, 1)).await;
    for _ in 0..40 {
        let ecm = Ecm::register(&rm.client, "host1", 10).await;
        let mut calls = JoinSet::new();
        for _ in 0..8 {
            let (client, report) = (rm.client.clone(), ecm.report(&[]));
            calls.spawn(async move { drop(client.heartbeat(&report).await) });
        }
        rm.client.unregister(&ecm.em).await.unwrap();
        calls.join_all().await;
        assert_eq!(database.count("SELECT count(*) FROM linkis_em_report").await, 0);
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// Grants and releases go on at the same time: counts are written past the tickets that are just being changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_of_many_missing_tickets_go_well_with_grants() {
    let (database, rm) = start_with(patience(NEVER, NEVER, 3)).await;
    let ecm = Ecm::register(&rm.client, "host1", 10_000).await;
    let mut engines = JoinSet::new();
    for _ in 0..20 {
        let ecm = ecm.clone();
        engines.spawn(async move {
            for _ in 0..20 {
                let grant = ecm.used().await;
                // It may be lost by now; to release it is success all the same.
                ecm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
                ecm.used().await;
            }
        });
    }
    while !engines.is_empty() {
        ecm.beat(&[]).await;
        while let Some(done) = engines.try_join_next() {
            done.unwrap();
        }
    }
    for _ in 0..4 {
        ecm.beat(&[]).await;
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 0, "all that were left are lost");
    let lost = database.count("SELECT count(*) FROM linkis_resource_action_record WHERE action = 'lost'").await;
    let ended = database.count("SELECT count(*) FROM linkis_resource_action_record WHERE action = 'released'").await;
    assert_eq!(lost + ended, 800);
    assert!(lost >= 400, "{lost}");
}

/// How many rows of tickets were read since the statistics were reset. Those of a connection are there for certain once it is closed.
async fn tickets_read(database: &Database) -> i64 {
    eventually("all connections are closed", LONGEST, || async {
        let open = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'linkis-rm'";
        database.count(open).await == 0
    })
    .await;
    // By the index of deadlines the locked ones are counted, whoever reports.
    let read = "SELECT seq_tup_read + coalesce((SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes i
            WHERE i.relid = t.relid AND indexrelname <> 'linkis_user_resource_expiry'), 0)
        FROM pg_stat_user_tables t WHERE relname = 'linkis_user_resource_meta_data'";
    let read = database.count(read).await;
    sqlx::raw_sql("SELECT pg_stat_reset()").execute(&database.pool).await.unwrap();
    read
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complete_reports_read_no_tickets() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 100).await;
    let mut used = vec![];
    for _ in 0..20 {
        used.push(ecm.used().await);
    }
    // One that ends is no longer part of what a report has to name; nor is a locked one.
    let ended = used.pop().unwrap();
    rm.client.resource_released(&release(&ended, "hadoop")).await.unwrap();
    let locked = ecm.locked().await;
    let used: Vec<&Grant> = used.iter().collect();
    ecm.beat(&used).await;
    rm.stop().await;
    tickets_read(&database).await;

    let rm = Instance::start(&database).await;
    let ecm = Ecm { client: rm.client.clone(), ..ecm };
    for _ in 0..20 {
        assert_eq!(ecm.beat(&used).await.unknown_tickets, []);
        assert_eq!(ecm.beat(&[&used[..], &used[..7]].concat()).await.unknown_tickets, [], "some are named twice");
    }
    rm.stop().await;
    assert_eq!(tickets_read(&database).await, 0);

    let rm = Instance::start(&database).await;
    let ecm = Ecm { client: rm.client.clone(), ..ecm };
    assert_eq!(ecm.beat(&[&used[..], &[&locked]].concat()).await.unknown_tickets, []);
    assert_eq!(ecm.beat(&[&used[..], &[&ended]].concat()).await.unknown_tickets.len(), 1);
    assert_eq!(assert_invariants(&database, &rm.client).await, 20);
    rm.stop().await;
    assert!(tickets_read(&database).await >= 40, "those that differ are compared");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_complete_report_forgets_what_was_missing_before_it() {
    let (database, rm) = start().await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let (kept, wavering) = (ecm.used().await, ecm.used().await);
    let missed = "SELECT sum(missed_reports) FROM linkis_user_resource_meta_data";
    let any_missed = "SELECT count(*) FROM linkis_em_report WHERE any_missed";
    ecm.beat(&[&kept, &wavering]).await;
    for complete in [1, 2, 5] {
        for missing in 1..=2 {
            ecm.beat(&[&kept]).await;
            assert_eq!((database.count(missed).await, database.count(any_missed).await), (missing, 1));
        }
        for _ in 0..complete {
            ecm.beat(&[&wavering, &kept]).await;
            assert_eq!(database.count(missed).await, 0);
        }
        // Only then may tickets be left unread.
        assert_eq!(database.count(any_missed).await, i64::from(complete == 1));
    }
    for _ in 1..=3 {
        assert!(lives(&rm.client, wavering.ticket_id).await);
        ecm.beat(&[&kept]).await;
    }
    assert!(!lives(&rm.client, wavering.ticket_id).await);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// Keeps all reports waiting until it is dropped, so that they are taken together.
async fn hold_reports(database: &Database) -> sqlx::Transaction<'static, sqlx::Postgres> {
    let mut hold = database.pool.begin().await.unwrap();
    sqlx::raw_sql("LOCK TABLE linkis_em_report IN ACCESS EXCLUSIVE MODE").execute(&mut *hold).await.unwrap();
    hold
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_report_that_is_refused_does_not_fail_its_neighbours() {
    let (database, rm) = start().await;
    let mut reports = vec![];
    for number in 0..20 {
        let ecm = Ecm::register(&rm.client, &format!("host{number}"), 10).await;
        ecm.beat(&[]).await;
        ecm.beat(&[]).await;
        let reason = match number {
            3 => Some("STALE_REPORT"),
            7 => Some("EM_NOT_REGISTERED"),
            11 => Some("INVALID_FIELD"),
            _ => None,
        };
        let report = match number {
            3 => Report { sequence: 1, ..ecm.report(&[]) },
            7 => Report { em: em("nowhere"), ..ecm.report(&[]) },
            11 => Report { epoch: ecm.epoch + 1, ..ecm.report(&[]) },
            _ => ecm.report(&[]),
        };
        reports.push((report, reason));
    }
    // So is the first one of its EM, which comes another way.
    reports.push((Ecm::register(&rm.client, "new", 10).await.report(&[]), None));
    let hold = hold_reports(&database).await;
    let mut calls = JoinSet::new();
    for (report, reason) in reports {
        let client = rm.client.clone();
        calls.spawn(async move {
            let refused = client.heartbeat(&report).await.err().and_then(|error| error.reason());
            assert_eq!(refused.as_deref(), reason, "{report:?}");
        });
    }
    eventually("one waits", LONGEST, || is_waiting(&database)).await;
    drop(hold);
    calls.join_all().await;
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_report WHERE sequence = 3").await, 17);
}

/// Through whichever instance they come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_of_one_em_are_taken_in_turn() {
    let (database, rm) = start().await;
    let second = Instance::start(&database).await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let used = ecm.used().await;
    ecm.beat(&[&used]).await;
    let hold = hold_reports(&database).await;
    let mut calls = JoinSet::new();
    for number in 0..50 {
        let (client, report) = ([&rm, &second][number % 2].client.clone(), ecm.report(&[&used]));
        calls.spawn(async move { client.heartbeat(&report).await.map(|_| report.sequence) });
    }
    eventually("one waits", LONGEST, || is_waiting(&database)).await;
    drop(hold);
    let mut taken = vec![];
    for answer in calls.join_all().await {
        match answer {
            Ok(sequence) => taken.push(sequence),
            Err(error) => assert_eq!(error.reason().as_deref(), Some("STALE_REPORT"), "{error}"),
        }
    }
    assert!(taken.contains(&51), "the last one is taken, whatever came before: {taken:?}");
    assert_eq!(database.count("SELECT sequence FROM linkis_em_report").await, 51);
    assert_eq!(database.count("SELECT sum(missed_reports) FROM linkis_user_resource_meta_data").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_em_whose_row_is_held_keeps_no_other_waiting() {
    let (database, rm) = start().await;
    let (held, other) = (Ecm::register(&rm.client, "held", 10).await, Ecm::register(&rm.client, "other", 10).await);
    held.beat(&[]).await;
    other.beat(&[]).await;
    let hold = async || {
        let mut hold = database.pool.begin().await.unwrap();
        let row = "SELECT FROM linkis_em_report WHERE em_instance = 'held:9102' FOR UPDATE";
        sqlx::raw_sql(row).execute(&mut *hold).await.unwrap();
        hold
    };
    let row = hold().await;
    let (client, report) = (rm.client.clone(), held.report(&[]));
    let waiting = tokio::spawn(async move { client.heartbeat(&report).await });
    for _ in 0..10 {
        other.beat(&[]).await;
    }
    assert!(!waiting.is_finished());
    drop(row);
    waiting.await.unwrap().unwrap();

    let row = hold().await;
    let error = rm.client.heartbeat(&held.report(&[])).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(tonic::Code::Aborted), Some("LOCK_TIMEOUT")));
    drop(row);
    held.beat(&[]).await;
}

/// More than one statement reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_em_with_very_many_tickets_is_compared_page_by_page() {
    const TICKETS: usize = 40_000;
    let (database, rm) = start_with(patience(NEVER, NEVER, 2)).await;
    let ecm = Ecm::register(&rm.client, "host1", 1_000_000).await;
    let template = ecm.used().await;
    let copy = format!(
        r#"INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            engine_application_name, engine_instance, resource_type, user_used_resource, labels, locked_time, used_time)
        SELECT gen_random_uuid(), "user", creator, engine_type, em_application_name, em_instance, engine_application_name,
            engine_instance, resource_type, user_used_resource, labels, locked_time, used_time
        FROM linkis_user_resource_meta_data, generate_series(2, {TICKETS})"#
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(copy)).execute(&database.pool).await.unwrap();
    assert!(rm.client.repair().await.unwrap().remaining.is_empty());
    let ids: Vec<Uuid> = sqlx::query_scalar("SELECT ticket_id FROM linkis_user_resource_meta_data ORDER BY ticket_id")
        .fetch_all(&database.pool)
        .await
        .unwrap();
    assert_eq!(ids.len(), TICKETS);
    let is_missing = |number: usize| number % 1000 == 7;
    let present = ids.iter().enumerate().filter(|(number, _)| !is_missing(*number)).map(|(_, id)| *id);
    let foreign = [Uuid::nil(), Uuid::from_u128(u128::MAX / 2), Uuid::max()];
    let (all, some): (Vec<Uuid>, Vec<Uuid>) = (ids.clone(), present.chain(foreign).collect());
    let beat = async |tickets: &Vec<Uuid>| {
        let report = Report { tickets: tickets.clone(), ..ecm.report(&[]) };
        rm.client.heartbeat(&report).await.unwrap().unknown_tickets
    };
    let missed = "SELECT sum(missed_reports) FROM linkis_user_resource_meta_data";
    assert_eq!(beat(&all).await, []);
    assert_eq!(beat(&some).await.iter().map(|unknown| unknown.id).collect::<Vec<_>>(), foreign);
    assert_eq!(database.count(missed).await, 40);
    assert_eq!(beat(&all).await, []);
    assert_eq!(database.count(missed).await, 0);
    for _ in 0..2 {
        assert_eq!(beat(&some).await.len(), 3);
    }
    let lost = "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'lost'";
    assert_eq!(database.count(lost).await, 40);
    assert!(lives(&rm.client, template.ticket_id).await || is_missing(ids.binary_search(&template.ticket_id).unwrap()));
    assert!(rm.client.audit().await.unwrap().differences.is_empty());
}

/// All over one connection; after it, nobody is told anything but what holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_ems_that_report_at_once_are_all_answered() {
    const EMS: usize = 1000;
    let (database, rm) = start().await;
    let mut registering = JoinSet::new();
    for number in 0..EMS {
        let client = rm.client.clone();
        registering.spawn(async move {
            let ecm = Ecm::register(&client, &format!("host{number}"), 10).await;
            let used = ecm.used().await;
            (ecm, used)
        });
    }
    let ecms = registering.join_all().await;
    for round in 1..=4 {
        let mut calls = JoinSet::new();
        for (number, (ecm, used)) in ecms.clone().into_iter().enumerate() {
            calls.spawn(async move {
                // Each tenth has another engine; each ninth has none, in the last rounds.
                let foreign = Grant { ticket_id: Uuid::from_u128(number as u128 + 1), ..used.clone() };
                let (named, unknown) = match number {
                    _ if number % 10 == 0 => (vec![&used, &foreign], 1),
                    _ if number % 9 == 0 && round > 1 => (vec![], 0),
                    _ => (vec![&used], 0),
                };
                assert_eq!(ecm.beat(&named).await.unknown_tickets.len(), unknown, "{number} in round {round}");
            });
        }
        calls.join_all().await;
    }
    let lost = (0..EMS).filter(|number| number % 9 == 0 && number % 10 != 0).count();
    assert_eq!(assert_invariants(&database, &rm.client).await, EMS - lost);
}
