//! Silent EMs: placement avoids them, they become lost, and an outage of the service or the database loses none.

use std::cell::Cell;

use super::*;

/// Makes all EMs silent for an hour by the clock of the database.
const HOUR_LATER: &str = "UPDATE linkis_em_report SET report_time = report_time - interval '1 hour';
    UPDATE linkis_em_resource_meta_data SET register_time = register_time - interval '1 hour'";

/// As if the EM `alive` reported for an hour.
const ALIVE_FOR_AN_HOUR: &str = "UPDATE linkis_em_report SET report_time = clock_timestamp() + interval '1 hour'
    WHERE em_instance LIKE 'alive%'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_em_is_not_placed_until_next_report() {
    let (database, rm) = start_with(patience(Duration::from_secs(20), NEVER, 3)).await;
    let ecm = Ecm::register(&rm.client, "host1", 1000).await;
    ecm.beat(&[]).await;
    database.execute(HOUR_LATER).await;
    assert!(ecm.is_silent().await);
    let error = rm.client.request_resource(&anywhere()).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(tonic::Code::NotFound), Some("NO_EM_AVAILABLE")));
    assert!(error.to_string().contains("1 match, but all are silent, unhealthy or drained"), "{error}");
    let error = rm.client.dry_run(&anywhere()).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("NO_EM_AVAILABLE"));
    assert_eq!(ecm.locked().await.em, ecm.em, "a named EM grants");

    let by_hand = Ecm::register(&rm.client, "host2", 10).await;
    for _ in 0..9 {
        assert_eq!(rm.client.request_resource(&anywhere()).await.granted().em, by_hand.em);
    }
    eventually("it is chosen again", LONG, || async {
        ecm.beat(&[]).await;
        matches!(rm.client.dry_run(&anywhere()).await, Ok(ResultResource::Available(grant)) if grant.em == ecm.em)
    })
    .await;
    database.execute(HOUR_LATER).await;
    assert!(ecm.is_silent().await);
    Ecm::register(&rm.client, "host1", 1000).await;
    assert!(!rm.client.em_status(&ecm.em).await.unwrap().unwrap().silent, "a registration is a sign of life");
}

/// A request without an EM waits while the only EM is unhealthy or silent. The next healthy report wakes it on any instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn healthy_report_wakes_request_at_unhealthy_em() {
    let (database, first) = start_with(patience(Duration::from_secs(1), NEVER, 3)).await;
    let second = Instance::start_with(&database, patience(Duration::from_secs(1), NEVER, 3)).await;
    let ecm = Ecm::register(&first.client, "host1", 10).await;
    ecm.beat(&[]).await;
    for (instance, is_sick) in [(&first, true), (&second, true), (&first, false), (&second, false)] {
        if is_sick {
            first.client.heartbeat(&EmReport { health: Health::Unhealthy, ..ecm.report(&[]) }).await.unwrap();
        }
        let is_closed = async || instance.client.dry_run(&anywhere()).await.is_err();
        eventually("the EM is unhealthy or silent", LONG, is_closed).await;
        let waits = |wait_timeout| ResourceRequest { wait_timeout, ..anywhere() };
        let refusal = instance.client.request_resource(&waits(Duration::from_secs(3))).await.refused();
        assert!(refusal.reason.contains("host1:9102 is unhealthy or silent") && !refusal.never_fits, "{refusal:?}");
        assert_wait_queues_empty(&instance.client).await;
        let call = enqueue(&instance.client, waits(LONG)).await;
        let mut beating = None;
        let grant = woken(instance, call, async { beating = Some(ecm.beating(vec![])) }).await;
        assert_eq!(grant.em, ecm.em);
    }
    assert_eq!(assert_invariants(&database, &first.client).await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_skips_unhealthy_and_prefers_idle_em() {
    let (_database, rm) = start_with(patience(NEVER, NEVER, 3)).await;
    let hosts = ["sick", "busy", "idle"];
    let mut ecms = vec![];
    for host in hosts {
        ecms.push(Ecm::register(&rm.client, host, 10).await);
    }
    let got = |used, permille| Load::parse("load", used, 100, permille).ok();
    let reports = [
        EmReport { health: Health::Unhealthy, ..ecms[0].report(&[]) },
        EmReport { load: got(95, 0), health: Health::Warn, ..ecms[1].report(&[]) },
        EmReport { load: got(5, 300), ..ecms[2].report(&[]) },
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
    assert_eq!(full.shortfalls[0].available, 0, "by a selectable EM: {full:?}");
    assert_eq!(ecms[0].locked().await.em, em("sick"), "a named EM grants");

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

/// Both of two instances detect lost EMs and unregister them. EMs that report, or that never reported, stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_em_ends_with_its_tickets() {
    let short = patience(Duration::from_secs(1), Duration::from_secs(2), 3);
    let (database, rm) = start_with(short.clone()).await;
    let second = Instance::start_with(&database, short).await;
    let silent = Ecm::register(&rm.client, "silent", 10).await;
    let by_hand = Ecm::register(&rm.client, "by-hand", 10).await;
    let alive = Ecm::register(&second.client, "alive", 10).await;
    let lost = [silent.used().await, silent.used().await, silent.locked().await];
    let (kept, held) = (alive.used().await, by_hand.used().await);
    alive.beat(&[&kept]).await;
    database.execute(ALIVE_FOR_AN_HOUR).await;
    silent.beat(&[&lost[0], &lost[1]]).await;
    eventually("it is given up", LONG, || async { !silent.is_registered().await }).await;

    for grant in &lost {
        assert!(!lives(&rm.client, grant.ticket_id).await);
        assert_eq!(recorded(&database, Some(grant.ticket_id), "lost").await, 1);
    }
    assert_eq!(recorded(&database, None, "lost").await, 1);
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_report").await, 1, "the report of the live EM stays");
    assert!(lives(&rm.client, kept.ticket_id).await && lives(&rm.client, held.ticket_id).await);
    assert!(by_hand.is_registered().await, "an EM without reports is never lost");
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);

    let error = rm.client.heartbeat(&silent.report(&[])).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("EM_NOT_REGISTERED"));
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_report").await, 1, "it is not revived");
    let back = Ecm::register(&rm.client, "silent", 10).await;
    assert_eq!(back.beat(&[&lost[0]]).await.unknown_tickets.len(), 1);
}

/// Attempts on a held EM cause no gap in the observation of another EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_silent_em_delays_no_other_loss() {
    let (silent_after, watched) = (Duration::from_secs(1), Duration::from_secs(6));
    let (database, rm) = start_with(patience(silent_after, silent_after + watched, 3)).await;
    let (held, dies) = (Ecm::register(&rm.client, "held", 10).await, Ecm::register(&rm.client, "dies", 10).await);
    database.hold_by_hand(&held.em).await;
    let beating = dies.beating(vec![]);
    held.beat(&[]).await;
    eventually("it is silent", LONG, || held.is_silent()).await;
    // Each second is an observation. The held EM is lost, and cannot be removed, during the observation of the other.
    let observations = || rm.metric(r#"linkis_rm_task_steps_total{task="silence"}"#);
    let begun = observations();
    eventually("half of its observations", LONG, async || observations() >= begun + 3.0).await;
    drop(beating);
    eventually("the other is silent", LONG, || dies.is_silent()).await;
    let (begun, last) = (observations(), Cell::new(0.0));
    eventually("the other is given up", LONG, async || {
        let made = observations() - begun;
        let is_registered = dies.is_registered().await;
        last.set(if is_registered { made } else { last.get() });
        !is_registered
    })
    .await;
    assert!(last.get() < 9.0, "its watch began anew: {last:?} observations");
    assert!(held.is_registered().await, "the held EM cannot be unregistered");
    database.release_holds().await;
    eventually("it is given up, too", LONG, async || !held.is_registered().await).await;
    assert_invariants(&database, &rm.client).await;
}

/// By the clock of the database all EMs are silent for an hour: after an outage of the service, or a jump of the clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_outage_loses_no_em() {
    let (silent_after, lost_after) = (Duration::from_secs(1), Duration::from_secs(8));
    let (database, rm) = start_with(patience(silent_after, lost_after, 3)).await;
    let (alive, dead) = (Ecm::register(&rm.client, "alive", 10).await, Ecm::register(&rm.client, "dead", 10).await);
    let grant = alive.used().await;
    alive.beat(&[&grant]).await;
    dead.beat(&[]).await;
    rm.stop().await;
    database.execute(HOUR_LATER).await;
    let started = Instant::now();
    let rm = Instance::start_with(&database, patience(silent_after, lost_after, 3)).await;
    let alive = Ecm { client: rm.client.clone(), ..alive };
    let dead = Ecm { client: rm.client.clone(), ..dead };
    assert!(alive.is_silent().await && dead.is_silent().await);
    alive.beat(&[&grant]).await;
    database.execute(ALIVE_FOR_AN_HOUR).await;
    eventually("the other is given up", LONG, || async { !dead.is_registered().await }).await;
    assert!(started.elapsed() >= lost_after - silent_after, "it had the time to report");
    assert!(alive.is_registered().await && lives(&rm.client, grant.ticket_id).await);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_outages_lose_no_em() {
    let (silent_after, lost_after) = (Duration::from_secs(1), Duration::from_secs(2));
    let (database, rm) = start_with(patience(silent_after, lost_after, 3)).await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    ecm.beat(&[]).await;
    // Without outages, two observations a second apart lose the EM.
    let cuts = "DO $$ BEGIN WHILE EXISTS (SELECT FROM linkis_em_resource_meta_data) LOOP
            PERFORM pg_stat_clear_snapshot();
            PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = 'linkis-rm';
            PERFORM pg_sleep(0.4);
        END LOOP; END $$";
    let pool = database.pool.clone();
    let cutting = tokio::spawn(async move { sqlx::raw_sql(cuts).execute(&pool).await.map(drop) });
    let observations = || rm.metric(r#"linkis_rm_task_steps_total{task="silence"}"#);
    let begun = observations();
    eventually("observations between outages", LONG, async || observations() > begun + 4.0).await;
    assert!(!cutting.is_finished(), "the EM is lost");
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND query LIKE 'DO%'";
    database.execute(end).await;
    eventually("it is given up when the database stays", LONG, || async {
        database.count("SELECT count(*) FROM linkis_em_resource_meta_data").await == 0
    })
    .await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// Reports race with unregistrations and registrations. No report row of an unregistered EM remains.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_row_ends_with_its_em() {
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
