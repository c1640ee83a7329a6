//! Many reports, and reports of many tickets: their cost, and their independence from each other.

use super::*;

/// Grants and releases continue meanwhile: counts are written beside tickets that change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_of_missing_tickets_run_beside_grants() {
    let (database, rm) = start_with(patience(NEVER, NEVER, 3)).await;
    let ecm = Ecm::register(&rm.client, "host1", 10_000).await;
    let mut engines = JoinSet::new();
    for _ in 0..20 {
        let ecm = ecm.clone();
        engines.spawn(async move {
            for _ in 0..20 {
                let grant = ecm.used().await;
                // The ticket may be lost already; its release succeeds.
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

/// The statistics of a connection are complete once it is closed.
async fn tickets_read(database: &Database) -> i64 {
    eventually("all connections are closed", LONG, || async {
        let open = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'linkis-rm'";
        database.count(open).await == 0
    })
    .await;
    // Locked tickets are counted by the index of deadlines, independent of reports.
    let read = "SELECT seq_tup_read + coalesce((SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes i
            WHERE i.relid = t.relid AND indexrelname <> 'linkis_user_resource_expiry'), 0)
        FROM pg_stat_user_tables t WHERE relname = 'linkis_user_resource_meta_data'";
    let read = database.count(read).await;
    database.execute("SELECT pg_stat_reset()").await;
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
    // An ended ticket and a locked one need not be reported.
    let ended = used.pop().unwrap();
    rm.client.resource_released(&release(&ended, "hadoop")).await.unwrap();
    let locked = ecm.locked().await;
    let used: Vec<&Grant> = used.iter().collect();
    ecm.beat(&used).await;
    // The next instance runs no shared background task: the sums by user begin with a read of all tickets.
    let lease = "UPDATE linkis_rm_lease SET instance_id = gen_random_uuid(), held_until = 'infinity'";
    eventually("the lease is taken", LONG, || async {
        sqlx::query(lease).execute(&database.pool).await.unwrap().rows_affected() == 1
    })
    .await;
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
    assert!(tickets_read(&database).await >= 40, "different tickets are compared");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complete_report_resets_missing_counts() {
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
        // The mark is cleared by the second complete report. Without it, the tickets of a complete report are not read.
        assert_eq!(database.count(any_missed).await, i64::from(complete == 1));
    }
    for _ in 1..=3 {
        assert!(lives(&rm.client, wavering.ticket_id).await);
        ecm.beat(&[&kept]).await;
    }
    assert!(!lives(&rm.client, wavering.ticket_id).await);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// Locks the report table until PostgreSQL ends this idle connection, so that all reports that wait meanwhile form one batch.
async fn lock_reports_briefly(database: &Database) -> sqlx::PgConnection {
    let brief = "SET LOCAL idle_in_transaction_session_timeout = '300ms'";
    database.transaction(&format!("{brief}; LOCK TABLE linkis_em_report IN ACCESS EXCLUSIVE MODE")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_report_fails_no_report_of_batch() {
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
            3 => EmReport { sequence: 1, ..ecm.report(&[]) },
            7 => EmReport { em: em("nowhere"), ..ecm.report(&[]) },
            11 => EmReport { epoch: ecm.epoch + 1, ..ecm.report(&[]) },
            _ => ecm.report(&[]),
        };
        reports.push((report, reason));
    }
    // The first report of an EM is inserted by another path, and is stored too.
    reports.push((Ecm::register(&rm.client, "new", 10).await.report(&[]), None));
    let _lock = lock_reports_briefly(&database).await;
    let mut calls = JoinSet::new();
    for (report, reason) in reports {
        let client = rm.client.clone();
        calls.spawn(async move {
            let refused = client.heartbeat(&report).await.err().and_then(|error| error.reason());
            assert_eq!(refused.as_deref(), reason, "{report:?}");
        });
    }
    calls.join_all().await;
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_report WHERE sequence = 3").await, 17);
}

/// Through either instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_of_one_em_are_applied_in_order() {
    let (database, rm, second) = two().await;
    let ecm = Ecm::register(&rm.client, "host1", 10).await;
    let used = ecm.used().await;
    ecm.beat(&[&used]).await;
    let _lock = lock_reports_briefly(&database).await;
    let mut calls = JoinSet::new();
    for number in 0..50 {
        let (client, report) = ([&rm, &second][number % 2].client.clone(), ecm.report(&[&used]));
        calls.spawn(async move { client.heartbeat(&report).await.map(|_| report.sequence) });
    }
    let mut taken = vec![];
    for answer in calls.join_all().await {
        match answer {
            Ok(sequence) => taken.push(sequence),
            Err(error) => assert_eq!(error.reason().as_deref(), Some("STALE_REPORT"), "{error}"),
        }
    }
    assert!(taken.contains(&51), "the last report is applied: {taken:?}");
    assert_eq!(database.count("SELECT sequence FROM linkis_em_report").await, 51);
    assert_eq!(database.count("SELECT sum(missed_reports) FROM linkis_user_resource_meta_data").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_report_row_delays_no_other_em() {
    let (database, rm) = start().await;
    let (held, other) = (Ecm::register(&rm.client, "held", 10).await, Ecm::register(&rm.client, "other", 10).await);
    held.beat(&[]).await;
    other.beat(&[]).await;
    let hold = async || {
        let mut hold = database.pool.begin().await.unwrap();
        let row = "SELECT FROM linkis_em_report WHERE em_instance = 'held:9102' FOR UPDATE";
        execute(&mut *hold, row).await;
        hold
    };
    let row = hold().await;
    let beat = || {
        let (client, report) = (rm.client.clone(), held.report(&[]));
        tokio::spawn(async move { client.heartbeat(&report).await })
    };
    // A report waits for its row for a second.
    eventually("reports pass a waiting report", LONG, async || {
        let waiting = beat();
        for _ in 0..5 {
            other.beat(&[]).await;
        }
        !waiting.is_finished()
    })
    .await;
    let waiting = beat();
    drop(row);
    waiting.await.unwrap().unwrap();

    let row = hold().await;
    let error = rm.client.heartbeat(&held.report(&[])).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(tonic::Code::Aborted), Some("LOCK_TIMEOUT")));
    drop(row);
    held.beat(&[]).await;
}

/// More tickets than one statement reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_of_40000_tickets_is_compared_by_page() {
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
    database.execute(copy).await;
    assert!(rm.client.repair().await.unwrap().remaining.is_empty());
    let ids: Vec<Uuid> =
        database.column("SELECT ticket_id FROM linkis_user_resource_meta_data ORDER BY ticket_id").await;
    assert_eq!(ids.len(), TICKETS);
    let is_missing = |number: usize| number % 1000 == 7;
    let present = ids.iter().enumerate().filter(|(number, _)| !is_missing(*number)).map(|(_, id)| *id);
    let foreign = [Uuid::nil(), Uuid::from_u128(u128::MAX / 2), Uuid::max()];
    let (all, some): (Vec<Uuid>, Vec<Uuid>) = (ids.clone(), present.chain(foreign).collect());
    let beat = async |tickets: &Vec<Uuid>| {
        let report = EmReport { tickets: tickets.clone(), ..ecm.report(&[]) };
        rm.client.heartbeat(&report).await.unwrap().unknown_tickets
    };
    let missed = "SELECT sum(missed_reports) FROM linkis_user_resource_meta_data";
    assert_eq!(beat(&all).await, []);
    for (idle, count) in [(all.clone(), 40_000), (vec![], 0)] {
        let report = EmReport { tickets: all.clone(), idle, ..ecm.report(&[]) };
        rm.client.heartbeat(&report).await.unwrap();
        assert_eq!(database.count("SELECT count(idle_since) FROM linkis_user_resource_meta_data").await, count);
    }
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

/// All over one connection. Afterwards every reply is right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_of_thousand_ems_are_answered() {
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
