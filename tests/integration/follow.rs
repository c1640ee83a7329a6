//! FollowActions: followers receive every line, and a replica by the feed equals the service.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use rm_client::ResourceRequest;
use rm_model::name::Labels;
use rm_proto::v1::{
    self as proto, FollowActionsRequest, FollowActionsResponse, usage_service_client::UsageServiceClient,
};
use rm_store::history_partition;
use tokio::task::JoinSet;
use tonic::{Code, Status, Streaming, transport::Channel};
use tonic_types::StatusExt as _;

use crate::{
    harness::*,
    identity::{ask, em_message, granted, reason, register, rm_of, token, with},
};

mod replica;

/// Longest time until a line arrives, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

async fn usage(address: &str) -> UsageServiceClient<Channel> {
    UsageServiceClient::connect(address.to_owned()).await.unwrap()
}

async fn follow(
    usage: &UsageServiceClient<Channel>,
    position: &str,
) -> Result<Streaming<FollowActionsResponse>, Status> {
    let from = FollowActionsRequest { position: position.into() };
    Ok(usage.clone().follow_actions(from).await?.into_inner())
}

async fn next(stream: &mut Streaming<FollowActionsResponse>) -> FollowActionsResponse {
    tokio::time::timeout(SOON, stream.message()).await.expect("a message in time").unwrap().expect("a message")
}

/// Returns the next `many` lines, and the position after them.
async fn lines(stream: &mut Streaming<FollowActionsResponse>, many: usize) -> (Vec<proto::Action>, String) {
    let mut lines = Vec::new();
    loop {
        let FollowActionsResponse { actions, position } = next(stream).await;
        lines.extend(actions);
        if lines.len() >= many {
            return (lines, position);
        }
    }
}

fn words(lines: &[proto::Action]) -> Vec<&str> {
    lines.iter().map(|line| line.action.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_receive_complete_lines_from_any_position() {
    let (_database, rm, other) = two().await;
    rm.client.register(registration(em("before"), load(1, 1, 1))).await.unwrap();
    let usage_here = usage(&rm.address).await;
    let mut stream = follow(&usage_here, "").await.unwrap();
    let first = next(&mut stream).await;
    assert!(first.actions.is_empty() && !first.position.is_empty(), "a new follower begins now: {first:?}");

    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let labels = Labels::parse("labels", [("tenant".to_owned(), "a".to_owned())].into());
    let asked = ResourceRequest { labels: labels.unwrap(), ..request(&em1, "alice", load(2, 2, 1)) };
    // On another instance than that of the follower.
    let grant = other.client.request_resource(&asked).await.granted();
    other.client.resource_inited(&inited(&grant, "alice", Some(load(1, 1, 1)))).await.unwrap();
    rm.client.resource_reported(&grant.reported(name("alice"), load(1, 2, 1))).await.unwrap();
    rm.client.force_release(grant.ticket_id, "it hangs").await.unwrap();
    let short = ResourceRequest { lock_ttl: Some(Duration::from_millis(50)), ..request(&em1, "bob", load(1, 1, 1)) };
    other.client.request_resource(&short).await.granted();
    let (got, behind) = lines(&mut stream, 7).await;
    let expected = ["registered", "granted", "inited", "reported", "forced", "granted", "expired"];
    assert_eq!(words(&got), expected);
    let of_alice = &got[1..5];
    for (line, held) in of_alice.iter().zip([load(2, 2, 1), load(1, 1, 1), load(1, 2, 1), load(1, 2, 1)]) {
        let (user, creator, kind) = (line.user.as_str(), line.creator.as_str(), line.engine_type.as_str());
        assert_eq!((user, creator, kind), ("alice", "IDE", "spark-3.2.1"), "{line:?}");
        assert_eq!((&line.ticket_id, &line.em), (&grant.ticket_id.to_string(), &em_message("host1")));
        assert_eq!(line.labels, BTreeMap::from([("tenant".to_owned(), "a".to_owned())]));
        let kind = line.resource.clone().unwrap().kind.unwrap();
        let proto::resource::Kind::LoadInstance(amounts) = kind else { panic!("{kind:?}") };
        let held: BTreeMap<_, _> = held.amounts().map(|(dimension, amount)| (dimension.key(), amount)).collect();
        assert_eq!((amounts.memory, amounts.cores), (held["memory"], held["cores"]), "{line:?}");
    }
    assert!(of_alice[0].engine.is_none(), "it was only granted");
    assert!(of_alice[1..].iter().all(|line| line.engine.as_ref().unwrap().instance == "host1:34567"), "{of_alice:?}");
    assert!(got[6].engine.is_none(), "an expired ticket was not used");

    // From any position, on any instance, exactly the later lines are sent again.
    let usage_there = usage(&other.address).await;
    let mut again = follow(&usage_there, &first.position).await.unwrap();
    let (repeated, position) = lines(&mut again, 7).await;
    assert_eq!(repeated, got);
    assert_eq!(position, behind);
    let mut rest = follow(&usage_there, &behind).await.unwrap();
    assert!(next(&mut rest).await.actions.is_empty());
    rm.client.unregister(&em1).await.unwrap();
    assert_eq!(words(&lines(&mut rest, 1).await.0), ["unregistered"]);
    // The history has equal lines.
    let page = rm.client.actions(&proto::ListActionsRequest { page_size: 1000, ..Default::default() }).await.unwrap();
    assert_eq!(page.actions[1..8], got);
}

/// The position advances also without lines, so that a later continuation reads no lines of other users.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_with_user_scope_receive_own_lines() {
    let database = Database::fresh().await;
    let admin = token(&database, "the boss", &["--role", "admin"]);
    let viewer = token(&database, "a viewer", &["--role", "viewer", "--user", "alice"]);
    let rm = Instance::start(&database).await;
    let channel = Channel::from_shared(rm.address.clone()).unwrap().connect().await.unwrap();
    let mut bound = UsageServiceClient::new(with(&channel, &viewer));
    let mut boss = UsageServiceClient::new(with(&channel, &admin));
    let now = || FollowActionsRequest::default();
    let mut of_alice = bound.follow_actions(now()).await.unwrap().into_inner();
    let mut all = boss.follow_actions(now()).await.unwrap().into_inner();
    let begun = next(&mut of_alice).await.position;
    let mut manager = rm_of(&channel, &admin);
    manager.register(register("host1")).await.unwrap();
    manager.request_resource(ask("host1", "bob", 1)).await.unwrap();
    token(&database, "another", &["--role", "viewer"]);
    let mine = granted(manager.request_resource(ask("host1", "alice", 1)).await.unwrap().into_inner());
    let (got, before) = lines(&mut of_alice, 1).await;
    assert_eq!((got.len(), &got[0].ticket_id, got[0].user.as_str()), (1, &mine, "alice"), "{got:?}");
    assert!(got[0].address.is_empty());
    let (got, _) = lines(&mut all, 4).await;
    assert_eq!(words(&got), ["registered", "granted", "token_created", "granted"]);
    // Lines of other users advance the position.
    manager.request_resource(ask("host1", "bob", 1)).await.unwrap();
    let moved = tokio::time::timeout(SOON, async {
        loop {
            let got = next(&mut of_alice).await;
            assert!(got.actions.is_empty(), "{got:?}");
            if got.position != before {
                return got.position;
            }
        }
    });
    assert_ne!(moved.await.expect("it moves on"), begun);
    // A line about a scope is sent to its user.
    let scope = |user: &str| proto::GetScopeRequest { labels: [("user".to_owned(), user.to_owned())].into() };
    for (labels, code) in [(scope("alice"), Code::NotFound), (scope("bob"), Code::PermissionDenied)] {
        assert_eq!(bound.get_scope(labels).await.unwrap_err().code(), code);
    }
    let of_all = proto::GetScopeRequest { labels: [("creator".to_owned(), "IDE".to_owned())].into() };
    assert_eq!(reason(&bound.get_scope(of_all).await.unwrap_err()), "ROLE_DENIED");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follow_position_unknown_or_old_is_refused() {
    let (database, rm) = start().await;
    let usage = usage(&rm.address).await;
    let begun = next(&mut follow(&usage, "").await.unwrap()).await.position;
    register_hosts(&rm.client, 0..3, load(1, 1, 1)).await;
    let (_, behind) = lines(&mut follow(&usage, &begun).await.unwrap(), 3).await;
    for (position, code) in
        [("7", "INVALID_FIELD"), ("00000000-1", "POSITION_UNKNOWN"), (&format!("{behind}0"), "POSITION_UNKNOWN")]
    {
        let refused = follow(&usage, position).await.unwrap_err();
        assert_eq!(reason(&refused), code, "{position}: {refused:?}");
    }
    // All lines become old and are deleted with their partition.
    let old =
        "CREATE TABLE linkis_resource_action_record_2020010100_2020010101 PARTITION OF linkis_resource_action_record
            FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-01 01:00+00');
        UPDATE linkis_resource_action_record SET action_time = '2020-01-01 00:30+00'";
    database.execute(old).await;
    let mut connection = database.connect().await;
    let hour = Duration::from_secs(3600);
    while history_partition::drop_oldest(&mut connection, hour).await.unwrap() {}
    let forgotten = "SELECT forgotten FROM linkis_resource_action_horizon";
    assert!(database.count(forgotten).await > 0);
    // The instance may still have the lines in memory; another instance reads the table.
    let other = Instance::start(&database).await;
    let usage = self::usage(&other.address).await;
    let refused = follow(&usage, &begun).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::OutOfRange, "POSITION_TOO_OLD"), "{refused:?}");
    let oldest = refused.get_details_error_info().unwrap().metadata["oldest_position"].clone();
    assert_eq!(oldest, behind, "the last line that was forgotten");
    let mut stream = follow(&usage, &oldest).await.unwrap();
    rm.client.register(registration(em("host9"), load(1, 1, 1))).await.unwrap();
    assert_eq!(words(&lines(&mut stream, 1).await.0), ["registered"]);
}

/// Number of reads for followers, and for late followers.
fn read(rm: &Instance) -> [usize; 2] {
    let text = rm.metrics.text();
    ["linkis_rm_followed_lines_total", "linkis_rm_followed_lines_late_total"].map(|name| {
        let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    })
}

/// Many followers on one connection; one of them never reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_share_reads_beside_stalled_follower() {
    const FOLLOWERS: usize = 200;
    let changes = crowd_of(400);
    let em1 = em("host1");
    let (_database, rm) = start_with_em(em1.clone(), load(1_000_000, 1_000_000, 1_000_000)).await;
    let usage_of_many = usage(&rm.address).await;
    let idle = usage(&rm.address).await;
    let never_read = follow(&idle, "").await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..FOLLOWERS {
        let mut stream = follow(&usage_of_many, "").await.unwrap();
        next(&mut stream).await;
        streams.push(stream);
    }
    let mut callers = JoinSet::new();
    for number in 0..64 {
        let (client, em1) = (rm.client.clone(), em1.clone());
        callers.spawn(async move {
            for _ in (number..changes).step_by(64) {
                client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
            }
        });
    }
    callers.join_all().await;
    let mut followers = JoinSet::new();
    for mut stream in streams {
        followers.spawn(async move {
            let (got, position) = lines(&mut stream, changes).await;
            let tickets: BTreeSet<String> = got.into_iter().map(|line| line.ticket_id).collect();
            (tickets, position)
        });
    }
    let got = followers.join_all().await;
    let live: BTreeSet<String> =
        rm.client.tickets(None).await.unwrap().iter().map(|ticket| ticket.id.to_string()).collect();
    assert!(got.iter().all(|(tickets, _)| *tickets == live), "each follower receives all {changes} lines");
    let [once, late] = read(&rm);
    // Each follower begins separately, and finds new lines in memory or in a page that another one has read.
    assert!(
        (changes..changes * 4).contains(&(once + late)),
        "{changes} lines, read {once} times, and {late} for late followers"
    );
    drop(never_read);
    let nobody = || async { rm.metrics.text().contains("linkis_rm_followers 0\n") };
    eventually("nobody follows", SOON, nobody).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_are_bounded_and_end_at_shutdown() {
    let (_database, rm) = start().await;
    let usages = [usage(&rm.address).await, usage(&rm.address).await];
    let mut streams = Vec::new();
    let refused = loop {
        match follow(&usages[streams.len() % 2], "").await {
            Ok(stream) => streams.push(stream),
            Err(status) => break status,
        }
        assert!(streams.len() <= 256);
    };
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::ResourceExhausted, "OVERLOADED"));
    assert_eq!(streams.len(), 240, "a part of the bound is left to other callers");
    streams.pop();
    let freed = || async { follow(&usages[0], "").await.is_ok() };
    eventually("an ended stream frees its permit", SOON, freed).await;
    let stopping = tokio::spawn(rm.stop());
    let mut last = streams.pop().unwrap();
    let status = loop {
        match tokio::time::timeout(SOON, last.message()).await.expect("it ends in time") {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ends without a word"),
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "SHUTTING_DOWN"));
    drop(streams);
    assert_eq!(stopping.await.unwrap(), ServerExit::Drained);
}

/// A line that was written first and committed last delays later lines, and is sent in the order of its number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_commit_is_followed_in_its_place() {
    let (database, rm) = start().await;
    let usage = usage(&rm.address).await;
    let mut stream = follow(&usage, "").await.unwrap();
    next(&mut stream).await;
    let mut late = database.connect().await;
    execute(&mut late, "BEGIN; INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor, action_time)
        SELECT 'registered', 'ecm', 'late', 'CPU', '{\"cores\":1}', 'anonymous', clock_timestamp()").await;
    rm.client.register(registration(em("soon"), load(1, 1, 1))).await.unwrap();
    // Longer than the service waits for open transactions (500 ms).
    let passed = tokio::time::timeout(Duration::from_millis(600), lines(&mut stream, 1)).await;
    assert!(passed.is_err(), "no line passes an open transaction: {passed:?}");
    execute(&mut late, "COMMIT").await;
    let (got, _) = lines(&mut stream, 2).await;
    let ems: Vec<_> = got.iter().map(|line| line.em.as_ref().unwrap().instance.as_str()).collect();
    assert_eq!(ems, ["late", "soon:9102"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_command_follows_lines() {
    let (_database, rm) = start_with_em(em("host1"), load(1000, 1000, 1000)).await;
    let address = rm.address.clone();
    let follow = ["history", "--follow", "--user", "alice", "--limit", "1", "-o", "jsonl", "--address", &address];
    let mut command = Command::new(*PROGRAM);
    let child = command.args(follow).stdout(Stdio::piped()).spawn().unwrap();
    let child = Arc::new(Mutex::new(child));
    // The follower has started once it gets a line, so the test makes requests until one arrives.
    let is_over = || async {
        for user in ["bob", "alice"] {
            rm.client.request_resource(&request(&em("host1"), user, load(1, 1, 1))).await.granted();
        }
        child.lock().unwrap().try_wait().unwrap().is_some()
    };
    eventually("it shows one", SOON, is_over).await;
    let mut text = String::new();
    let mut stdout = child.lock().unwrap().stdout.take().unwrap();
    stdout.read_to_string(&mut text).unwrap();
    assert!(child.lock().unwrap().wait().unwrap().success());
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert_eq!((&lines[0]["user"], &lines[0]["action"]), (&"alice".into(), &"granted".into()));
}
