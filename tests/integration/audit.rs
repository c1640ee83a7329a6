//! Audit and repair: the audit finds every counter that was changed by SQL and nothing else; the repair writes the sums of the tickets.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rm_client::{ResultResource, RmClient};
use rm_model::{audit::Difference, operation::Grant, resource::Dimension};
use rm_proto::v1 as proto;
use tokio::task::JoinSet;

use crate::{command_line::program, harness::*};

/// Runs a statement that must change rows.
async fn changed(database: &Database, sql: &str) {
    assert!(database.execute(sql).await > 0, "{sql}");
}

/// A server with two EMs, a limit and three tickets of one core each. The user hadoop has a used one with 2 GB and a locked one
/// with 3 GB on host1, alice a locked one with 1 GB on host2.
async fn inhabited() -> (Database, Instance, Vec<Grant>) {
    let (database, rm) = start().await;
    register_all(&rm.client, ["host1", "host2"], load(10, 8, 10)).await;
    rm.client.set_limit(&each_user(9)).await.unwrap();
    let mut grants = Vec::new();
    for (host, user, gb) in [("host1", "hadoop", 2), ("host1", "hadoop", 3), ("host2", "alice", 1)] {
        grants.push(rm.client.request_resource(&request(&em(host), user, load(gb, 1, 1))).await.granted());
    }
    rm.client.resource_inited(&inited(&grants[0], "hadoop", None)).await.unwrap();
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
    (database, rm, grants)
}

/// Subject, counter, stored value and right value of a difference.
type Line = (String, String, String, String);

/// A difference, as a table of a test writes it.
type Expected = (&'static str, &'static str, String, String);

fn line(difference: &Difference) -> Line {
    let amounts = |amounts: &BTreeMap<Dimension, i64>| {
        let pairs: Vec<String> = amounts.iter().map(|(dimension, amount)| format!("{dimension}={amount}")).collect();
        pairs.join(" ")
    };
    let Difference { what, counter, stored, from_tickets, .. } = difference;
    let what = what.replace("linkis-cg-engineconnmanager/", "").replace(":9102", "");
    (what, counter.clone(), amounts(stored), amounts(from_tickets))
}

fn lines(differences: &[Difference]) -> Vec<Line> {
    differences.iter().map(line).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_under_load_finds_no_difference() {
    let (database, first, second) = two().await;
    register_hosts(&first.client, 0..4, load(40, 40, 40)).await;
    first.client.set_limit(&each_user(30)).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for number in 0..24 {
        callers.spawn(caller([&first, &second][number % 2].client.clone(), number, stop.clone()));
    }
    let mut seen = std::collections::BTreeSet::new();
    for turn in 0..40 {
        let report = [&first, &second][turn % 2].client.audit().await.unwrap();
        assert_eq!(lines(&report.differences.first), [], "{report:?}");
        assert_eq!(report.notes, [] as [String; 0]);
        assert_eq!(report.ems, 4);
        seen.insert(report.tickets);
        match turn {
            // New and retired counters have no difference either.
            10 => drop(
                second
                    .client
                    .set_limit(&limit(&[("user", None), ("creator", None)], &[(Dimension::Instances, 20)]))
                    .await
                    .unwrap(),
            ),
            25 => first.client.delete_limit(&each_user(30).pattern).await.unwrap(),
            _ => {}
        }
    }
    // Repairs under load: each manual change only adds, so that no release finds too little meanwhile.
    for turn in 0..8 {
        let spoil = [
            "UPDATE linkis_em_resource_meta_data SET version = version + 1,
                used_resource = jsonb_set(used_resource, '{memory}', to_jsonb((used_resource->>'memory')::bigint + 7)),
                left_resource = jsonb_set(left_resource, '{cores}', '1')",
            "UPDATE linkis_label_resource SET used_resource =
                jsonb_set(used_resource, '{memory}', to_jsonb(coalesce((used_resource->>'memory')::bigint, 0) + 7))",
        ];
        // The statement can conflict with the service's own writes.
        let is_spoilt = async || sqlx::raw_sql(spoil[turn % 2]).execute(&database.pool).await.is_ok();
        eventually("the counters are changed", LONG, is_spoilt).await;
        let done = [&first, &second][turn / 2 % 2].client.repair().await.unwrap();
        assert!(done.remaining.is_empty() && done.repaired.count > 0, "turn {turn}: {done:?}");
        let report = first.client.audit().await.unwrap();
        assert!(report.differences.is_empty(), "turn {turn}: {report:?}");
    }
    stop.store(true, Ordering::Relaxed);
    let granted: usize = callers.join_all().await.into_iter().sum();
    assert!(granted > 100 && seen.len() > 5, "{granted} grants, and audits saw {seen:?} tickets");
    assert_invariants(&database, &first.client).await;
}

/// An audit has one EM in memory at a time. One instance runs one each hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_memory_is_independent_of_em_count() {
    const MB: usize = 1 << 20;
    let database = Database::fresh().await;
    let rm = Process::start(&["--database-url", &database.url()]);
    rm.client.register(registration(em("host"), load(10, 8, 10))).await.unwrap();
    rm.client.request_resource(&request(&em("host"), "hadoop", load(1, 1, 1))).await.granted();
    rm.client.audit().await.unwrap();
    changed(
        &database,
        "INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time,
            version, counted_to)
        SELECT em_application_name, em_instance || n, resource_type, total_resource, protected_resource, used_resource,
            locked_resource, left_resource, over_committed, labels, epoch, register_time, version, counted_to
        FROM linkis_em_resource_meta_data, generate_series(1, 20000) n",
    )
    .await;
    changed(
        &database,
        r#"INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
            resource_type, user_locked_resource, labels, locked_time, expires_at, principal, em_epoch)
        SELECT gen_random_uuid(), "user", creator, engine_type, em_application_name, em_instance || n, resource_type,
            user_locked_resource, labels, locked_time, expires_at, principal, em_epoch
        FROM linkis_user_resource_meta_data, generate_series(1, 20000) n"#,
    )
    .await;
    let before = rm.memory();
    let report = rm.client.audit().await.unwrap();
    let more = rm.memory().saturating_sub(before);
    assert_eq!((report.ems, report.tickets, report.differences.count), (20_001, 20_001, 0), "{report:?}");
    assert!(more < 12 * MB, "{} MB more", more / MB);
}

/// Requests, confirms and releases until `stop`, and leaves some tickets. Returns the number of grants.
async fn caller(client: RmClient, number: usize, stop: Arc<AtomicBool>) -> usize {
    let mut granted = 0;
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let user = format!("user{}", (number + turn) % 5);
        let em1 = em(&format!("host{}", (number * 3 + turn) % 4));
        let asked = request(&em1, &user, load(1 + (turn % 3) as i64, 1, 1));
        let ResultResource::Available(grant) = client.request_resource(&asked).await.unwrap() else { continue };
        granted += 1;
        if turn % 2 == 0 {
            client.resource_inited(&inited(&grant, &user, None)).await.unwrap();
        }
        if turn % 16 != 0 {
            client.resource_released(&release(&grant, &user)).await.unwrap();
        }
    }
    granted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_finds_and_repairs_manual_changes() {
    const HOST1: &str = "em=host1";
    const HADOOP: &str = "scope user=hadoop";
    let gb = |gb: i64| (gb * GB).to_string();
    let memory = |n: i64| format!("memory={}", gb(n));
    let ticket = |n: i64| format!("memory={} cores=1 instances=1", gb(n));
    let two = |n: i64| format!("memory={} cores=2 instances=2", gb(n));
    let nothing = || "memory=0 cores=0 instances=0".to_owned();
    let left = |n: i64, cores: i64, instances: i64| format!("memory={} cores={cores} instances={instances}", gb(n));
    let plants: Vec<(&str, Vec<Expected>)> = vec![
        // The counters of an EM.
        (
            "UPDATE linkis_em_resource_meta_data SET used_resource = jsonb_set(used_resource, '{memory}', '1073741824')
             WHERE em_instance = 'host1:9102'",
            vec![(HOST1, "used", memory(1), memory(2))],
        ),
        (
            "UPDATE linkis_em_resource_meta_data SET locked_resource = jsonb_set(locked_resource, '{cores}', '4')
             WHERE em_instance = 'host1:9102'",
            vec![(HOST1, "locked", "cores=4".into(), "cores=1".into())],
        ),
        (
            "UPDATE linkis_em_resource_meta_data SET left_resource = jsonb_set(left_resource, '{memory}', '1073741824')
             WHERE em_instance = 'host1:9102'",
            vec![(HOST1, "left", memory(1), memory(5))],
        ),
        (
            "UPDATE linkis_em_resource_meta_data SET over_committed = true WHERE em_instance = 'host1:9102'",
            vec![(HOST1, "over_committed", String::new(), String::new())],
        ),
        (
            "UPDATE linkis_em_resource_meta_data SET used_resource = '{\"memory\": 1.5}' WHERE em_instance = 'host1:9102'",
            vec![(HOST1, "used", String::new(), String::new())],
        ),
        (
            "UPDATE linkis_em_resource_meta_data SET used_tickets = used_tickets + 1 WHERE em_instance = 'host1:9102'",
            vec![(HOST1, "used_tickets", String::new(), String::new())],
        ),
        (
            "UPDATE linkis_em_resource_meta_data SET used_tickets_xor = gen_random_uuid() WHERE em_instance = 'host2:9102'",
            vec![("em=host2", "used_tickets", String::new(), String::new())],
        ),
        // Tickets.
        (
            "DELETE FROM linkis_user_resource_meta_data WHERE user_used_resource IS NOT NULL",
            vec![
                (HOST1, "used", ticket(2), nothing()),
                (HOST1, "left", left(5, 6, 8), left(7, 7, 9)),
                (HOST1, "used_tickets", String::new(), String::new()),
                (HADOOP, "used", ticket(2), nothing()),
            ],
        ),
        (
            "INSERT INTO linkis_user_resource_meta_data (ticket_id, \"user\", creator, engine_type, em_application_name,
                em_instance, resource_type, user_locked_resource, labels, locked_time, expires_at)
             SELECT gen_random_uuid(), \"user\", creator, engine_type, em_application_name, em_instance, resource_type,
                user_locked_resource, labels, locked_time, expires_at
             FROM linkis_user_resource_meta_data WHERE user_locked_resource IS NOT NULL AND em_instance = 'host1:9102'",
            vec![
                (HOST1, "locked", ticket(3), two(6)),
                (HOST1, "left", left(5, 6, 8), left(2, 5, 7)),
                (HADOOP, "locked", ticket(3), two(6)),
            ],
        ),
        // Scopes.
        (
            "UPDATE linkis_label_resource SET used_resource = '{\"memory\": 1073741824, \"cores\": 1, \"instances\": 1}'
             WHERE scope = '{\"user\": \"hadoop\"}'",
            vec![(HADOOP, "used", memory(1), memory(2))],
        ),
        (
            "DELETE FROM linkis_label_resource WHERE scope = '{\"user\": \"hadoop\"}'",
            vec![(HADOOP, "used", nothing(), ticket(2)), (HADOOP, "locked", nothing(), ticket(3))],
        ),
        // A counter above zero, because the service deletes empty counters.
        (
            "INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
             VALUES (99, '{\"tenant\": \"x\"}', '{\"cores\": 1}', '{}', sha256('99:{\"tenant\":\"x\"}'))",
            vec![("scope tenant=x", "row", String::new(), String::new())],
        ),
        (
            "UPDATE linkis_label_resource SET scope_hash = sha256('elsewhere') WHERE scope = '{\"user\": \"hadoop\"}'",
            vec![
                (HADOOP, "row", String::new(), String::new()),
                (HADOOP, "used", nothing(), ticket(2)),
                (HADOOP, "locked", nothing(), ticket(3)),
            ],
        ),
    ];
    for (sql, expected) in plants {
        let (database, rm, _) = inhabited().await;
        changed(&database, sql).await;
        let expected: Vec<Line> =
            expected.into_iter().map(|(what, counter, a, b)| (what.into(), counter.into(), a, b)).collect();
        let report = rm.client.audit().await.unwrap();
        assert_eq!(
            (lines(&report.differences.first), report.differences.count),
            (expected.clone(), expected.len()),
            "{sql}"
        );
        let done = rm.client.repair().await.unwrap();
        assert_eq!((lines(&done.repaired.first), done.remaining.count), (expected, 0), "{sql}");
        assert_invariants(&database, &rm.client).await;
        let traces = "SELECT (SELECT count(*) FROM linkis_resource_action_record)
            + (SELECT sum(version) FROM linkis_em_resource_meta_data)::bigint
            + (SELECT hashtext(version::text) FROM linkis_resource_limit_version)";
        let before = database.count(traces).await;
        let again = rm.client.repair().await.unwrap();
        assert!(again.repaired.is_empty() && again.remaining.is_empty());
        assert_eq!(database.count(traces).await, before, "a repair without differences writes nothing");
        assert!(database.recorded("repaired").await > 0, "{sql}");
        rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repair_ends_tickets_of_missing_em() {
    let (database, rm, grants) = inhabited().await;
    changed(&database, "DELETE FROM linkis_em_resource_meta_data WHERE em_instance = 'host1:9102'").await;
    let report = rm.client.audit().await.unwrap();
    let got = lines(&report.differences.first);
    assert_eq!(
        got.iter().map(|line| (line.0.as_str(), line.1.as_str())).collect::<Vec<_>>(),
        [("em=host1", "used"), ("em=host1", "locked")]
    );
    assert_eq!(got[0].3, format!("memory={} cores=1 instances=1", 2 * GB));
    assert_eq!(report.differences.first[0].problem, "2 tickets are on this EM, which does not exist");

    let done = rm.client.repair().await.unwrap();
    assert!(done.remaining.is_empty());
    // The tickets, and the counters of the user.
    assert_eq!(lines(&done.repaired.first)[..2], got);
    assert_eq!(done.repaired.count, 4);
    assert_eq!(assert_invariants(&database, &rm.client).await, 1, "alice's ticket has an EM");
    // The history has the tickets, so a late release succeeds.
    rm.client.resource_released(&release(&grants[0], "hadoop")).await.unwrap();
    rm.client.register(registration(em("host1"), load(10, 8, 10))).await.unwrap();
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(10, 8, 9))).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repair_marks_over_commitment_until_release() {
    let (database, rm, grants) = inhabited().await;
    let more =
        "UPDATE linkis_user_resource_meta_data SET user_used_resource = jsonb_set(user_used_resource, '{cores}', '9')
        WHERE user_used_resource IS NOT NULL";
    changed(&database, more).await;
    assert_eq!(
        rm.client.audit().await.unwrap().differences.count,
        4,
        "used, left and the mark of the EM; used of the user"
    );
    assert_eq!(rm.client.repair().await.unwrap().remaining.count, 0);
    let report = rm.client.audit().await.unwrap();
    assert!(report.differences.is_empty(), "{report:?}");
    assert_eq!(report.notes.len(), 1, "{report:?}");
    assert!(report.notes[0].contains("host1:9102 has more in use than it provides"), "{report:?}");
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.refused();
    rm.client.resource_released(&release(&grants[0], "hadoop")).await.unwrap();
    assert_invariants(&database, &rm.client).await;
    // A limit below the use is no difference either.
    rm.client.set_limit(&each_user(0)).await.unwrap();
    let report = rm.client.audit().await.unwrap();
    assert!(report.differences.is_empty() && report.notes.len() == 2, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repair_leaves_unreadable_rows_unchanged() {
    let (database, rm, _) = inhabited().await;
    let spoil = "UPDATE linkis_user_resource_meta_data SET user_used_resource = '{\"memory\": 1}'
        WHERE user_used_resource IS NOT NULL";
    changed(&database, spoil).await;
    changed(
        &database,
        "UPDATE linkis_em_resource_meta_data SET used_resource = '{\"memory\":0,\"cores\":0,\"instances\":1}'",
    )
    .await;
    let got = |differences: &[Difference]| -> Vec<(String, String)> {
        lines(differences).into_iter().map(|(what, counter, ..)| (what, counter)).collect()
    };
    let report = rm.client.audit().await.unwrap();
    let expected = [("em=host1", "tickets"), ("em=host2", "used"), ("scopes", "row")];
    let expected = expected.map(|(what, counter)| (what.to_owned(), counter.to_owned()));
    assert_eq!(got(&report.differences.first), expected, "{report:?}");
    let done = rm.client.repair().await.unwrap();
    assert_eq!(got(&done.repaired.first), expected[1..2]);
    assert_eq!(got(&done.remaining.first).len(), 2, "{done:?}");
    for Difference { what, problem, .. } in &done.remaining.first {
        assert!(what == "em=linkis-cg-engineconnmanager/host1:9102" || what == "scopes", "{what}");
        assert!(problem.contains("ticket") && problem.contains("correct or delete"), "{problem}");
        assert!(problem.contains("repair again"), "{problem}");
    }
    let untouched = "SELECT count(*) FROM linkis_em_resource_meta_data WHERE used_resource @> '{\"instances\":1}'";
    assert_eq!(database.count(untouched).await, 1, "host1 is not set to what only some of its tickets say");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repair_leaves_held_em_unchanged() {
    let (database, rm, _) = inhabited().await;
    database.hold_by_hand(&em("host1")).await;
    let report = rm.client.audit().await.unwrap();
    assert!(report.differences.is_empty());
    let note = "em=linkis-cg-engineconnmanager/host1:9102 is locked by a row in linkis_resource_lock; calls on it wait";
    assert_eq!(report.notes, [note]);

    changed(&database, "UPDATE linkis_em_resource_meta_data SET over_committed = true").await;
    let done = rm.client.repair().await.unwrap();
    assert_eq!((done.repaired.count, done.remaining.count), (1, 1), "{done:?}");
    assert!(done.remaining.first[0].problem.contains("release that hold"), "{done:?}");
    database.release_holds().await;
    assert_eq!(rm.client.repair().await.unwrap().repaired.count, 1);
    assert_invariants(&database, &rm.client).await;
}

/// Repair of one EM or one user, as the reset in Linkis's console.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repair_of_one_em_or_scope_leaves_others() {
    let (database, rm, _) = inhabited().await;
    changed(&database, "UPDATE linkis_em_resource_meta_data SET over_committed = true").await;
    changed(&database, "UPDATE linkis_label_resource SET locked_resource = '{}'").await;
    let labels = |user: &str| BTreeMap::from([("user".to_owned(), user.to_owned())]);
    let found =
        |differences: &[Difference]| -> Vec<String> { lines(differences).into_iter().map(|line| line.0).collect() };
    assert_eq!(found(&rm.client.audit().await.unwrap().differences.first).len(), 4);
    let version = rm.client.scope(&labels("alice")).await.unwrap().version;
    let done = rm.client.repair_em(&em("host1")).await.unwrap();
    assert_eq!((found(&done.repaired.first), done.remaining.count), (vec!["em=host1".to_owned()], 0));
    let done = rm.client.repair_scope(&labels("alice")).await.unwrap();
    assert_eq!((found(&done.repaired.first), done.remaining.count), (vec!["scope user=alice".to_owned()], 0));
    assert!(rm.client.scope(&labels("alice")).await.unwrap().version > version, "a repair raises the version");
    let left = found(&rm.client.audit().await.unwrap().differences.first);
    assert_eq!(left, ["em=host2", "scope user=hadoop"], "the others are unchanged");
    let history = rm.client.actions(&proto::ListActionsRequest::default()).await.unwrap().actions;
    let repairs: Vec<_> = history.into_iter().filter(|action| action.action == "repaired").collect();
    let [of_em, of_scope] = &repairs[..] else { panic!("{repairs:?}") };
    assert_eq!((of_em.em.as_ref().unwrap().instance.as_str(), of_em.scope.len()), ("host1:9102", 0));
    let held = proto::LoadInstanceResource { memory: 5 * GB, cores: 2, instances: 2 };
    assert_eq!(of_em.resource.as_ref().unwrap().kind, Some(proto::resource::Kind::LoadInstance(held)));
    assert_eq!((&of_scope.em, of_scope.scope["user"].as_str()), (&None, "alice"));
    let held = [("memory", GB), ("cores", 1), ("instances", 1)].map(|(name, amount)| (name.to_owned(), amount));
    let kind = proto::resource::Kind::Special(proto::SpecialResource { resources: held.into() });
    assert_eq!(of_scope.resource.as_ref().unwrap().kind, Some(kind));
    assert!(rm.client.repair_em(&em("host1")).await.unwrap().repaired.is_empty(), "again it changes nothing");
    assert!(rm.client.repair_scope(&labels("alice")).await.unwrap().repaired.is_empty());
    // A scope without tickets has no difference, with or without a row.
    assert!(rm.client.repair_scope(&labels("unknown")).await.unwrap().repaired.is_empty());
    let reason = |done: Result<_, rm_client::ClientError>| done.map(drop).unwrap_err().reason().unwrap();
    assert_eq!(reason(rm.client.repair_em(&em("host9")).await), "EM_NOT_REGISTERED");
    let uncounted = BTreeMap::from([("creator".to_owned(), "IDE".to_owned())]);
    assert_eq!(reason(rm.client.repair_scope(&uncounted).await), "SCOPE_NOT_COUNTED");
    let both =
        proto::RepairRequest { em: crate::identity::em_message("host1"), scope: labels("alice"), ..Default::default() };
    let refused = rm.client.make(&rm_client::calls::REPAIR, &both).await;
    assert_eq!(reason(refused.map(|_| Default::default())), "INVALID_FIELD");
    assert_eq!(rm.client.repair().await.unwrap().repaired.count, 2);
    assert_invariants(&database, &rm.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_and_repair_commands_print_and_exit() {
    let database = Database::fresh().await;
    let process = Process::start(&["--database-url", &database.url()]);
    let em1 = em("host1");
    process.client.register(registration(em1.clone(), load(10, 8, 10))).await.unwrap();
    process.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let address = process.address.clone();
    let ask = |what: &str| match what {
        "repair" => ran(&mut program(&address, &["repair", "--yes", "--reason", "a test"])),
        what => ran(&mut program("", &[what, "--address", &address])),
    };

    let audit = ask("audit");
    assert_eq!((audit.code, audit.out.as_str()), (Some(0), "consistent: 1 EMs, 0 scopes, 1 tickets\n"));

    let spoil = "UPDATE linkis_em_resource_meta_data SET locked_resource = jsonb_set(locked_resource, '{cores}', '3')";
    changed(&database, spoil).await;
    let audit = ask("audit");
    let row = "em=linkis-cg-engineconnmanager/host1:9102  locked   cores=3  cores=1\n";
    let header = "WHAT                                       COUNTER  STORED   TRUE     PROBLEM\n";
    let end = "1 differences in 1 EMs, 0 scopes, 1 tickets. To repair them: linkis-rm repair\n";
    assert_eq!((audit.code, audit.out), (Some(1), format!("{header}{row}{end}")));

    let repair = ask("repair");
    assert_eq!((repair.code, repair.out), (Some(0), format!("{header}{row}1 differences were repaired\n")));
    assert_eq!(ask("repair").out, "nothing was repaired\n");

    database.hold_by_hand(&em("host1")).await;
    changed(&database, spoil).await;
    let Ran { code, out, .. } = ask("repair");
    assert!(code == Some(1) && out.contains("host1:9102") && out.contains("release that hold"), "{out}");
    assert!(
        out.ends_with("1 could not be repaired; PROBLEM states why, and what to do before the next repair\n"),
        "{out}"
    );

    assert_eq!(process.terminate(), Some(0));
    for what in ["audit", "repair"] {
        let Ran { code, err, .. } = ask(what);
        assert_eq!(code, Some(2));
        assert!(err.contains(&format!("No service replies at {address}. Start one with linkis-rm")), "{err}");
    }
    let Ran { code, err, .. } = ran(&mut program("", &["audit", "--address", "here"]));
    assert!(code == Some(64) && err.contains("--address 127.0.0.1:50051"), "{err}");
}
