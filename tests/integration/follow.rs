//! The history as it goes on: who follows it misses nothing, whatever breaks, and a copy that is kept with it is what the service has.
//!
//! - `LINKIS_RM_CROWD`: how many changes are followed by many; otherwise there are fewer.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ClientSettings, Follower, ResourceRequest, ResultResource, RmClient},
    domain::{
        adopt::Adopt,
        em::EmInstance,
        report::{Health, Report},
        ticket::Ticket,
    },
    server::Ending,
    service::heartbeat::LivenessTimeouts,
    store::history_part,
    transport::proto::{self, FollowActionsRequest, FollowActionsResponse, usage_service_client::UsageServiceClient},
};
use tokio::task::JoinSet;
use tonic::{Code, Status, Streaming, transport::Channel};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::harness::*;
use crate::identity::{ask, em_message, granted, reason, register, rm_of, token, with};

/// How long anything may take to be told, on a machine that has much else to do.
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

/// Lines until there are so many, and the position behind them.
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
async fn what_happens_is_told_with_all_that_a_copy_needs_and_again_from_a_position() {
    let (database, rm) = start().await;
    let other = Instance::start(&database).await;
    rm.client.register(registration(em("before"), load(1, 1, 1))).await.unwrap();
    let usage_here = usage(&rm.address).await;
    let mut stream = follow(&usage_here, "").await.unwrap();
    let first = next(&mut stream).await;
    assert!(first.actions.is_empty() && !first.position.is_empty(), "who begins now hears of now: {first:?}");

    let host = em("host1");
    rm.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let labels = linkis_rm::domain::name::Labels::parse("labels", [("tenant".to_owned(), "a".to_owned())].into());
    let asked = ResourceRequest { labels: labels.unwrap(), ..request(&host, "alice", load(2, 2, 1)) };
    // On another instance than the one that is followed.
    let grant = other.client.request_resource(&asked).await.granted();
    other.client.resource_inited(&inited(&grant, "alice", Some(load(1, 1, 1)))).await.unwrap();
    rm.client.resource_reported(&grant.reported(name("alice"), load(1, 2, 1))).await.unwrap();
    rm.client.force_release(grant.ticket_id, "it hangs").await.unwrap();
    let short = ResourceRequest { lock_ttl: Some(Duration::from_millis(50)), ..request(&host, "bob", load(1, 1, 1)) };
    other.client.request_resource(&short).await.granted();
    let (told, behind) = lines(&mut stream, 7).await;
    let expected = ["registered", "granted", "inited", "reported", "forced", "granted", "expired"];
    assert_eq!(words(&told), expected);
    let of_alice = &told[1..5];
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
    assert!(told[6].engine.is_none(), "what expires was used by nobody");

    // From any position, on any instance, the rest comes again, and nothing else.
    let usage_there = usage(&other.address).await;
    let mut again = follow(&usage_there, &first.position).await.unwrap();
    let (repeated, position) = lines(&mut again, 7).await;
    assert_eq!(repeated, told);
    assert_eq!(position, behind);
    let mut rest = follow(&usage_there, &behind).await.unwrap();
    assert!(next(&mut rest).await.actions.is_empty());
    rm.client.unregister(&host).await.unwrap();
    assert_eq!(words(&lines(&mut rest, 1).await.0), ["unregistered"]);
    // The history says the same.
    let page = rm.client.actions(&proto::ListActionsRequest { page_size: 1000, ..Default::default() }).await.unwrap();
    assert_eq!(page.actions[1..8], told);
}

/// The position moves on although nothing is told: so that whoever comes back much later need not read what was never his.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_bound_to_users_follows_theirs_alone() {
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
    let (told, before) = lines(&mut of_alice, 1).await;
    assert_eq!((told.len(), &told[0].ticket_id, told[0].user.as_str()), (1, &mine, "alice"), "{told:?}");
    assert!(told[0].address.is_empty());
    let (told, _) = lines(&mut all, 4).await;
    assert_eq!(words(&told), ["registered", "granted", "token_created", "granted"]);
    // What is others' moves the position.
    manager.request_resource(ask("host1", "bob", 1)).await.unwrap();
    let moved = tokio::time::timeout(SOON, async {
        loop {
            let told = next(&mut of_alice).await;
            assert!(told.actions.is_empty(), "{told:?}");
            if told.position != before {
                return told.position;
            }
        }
    });
    assert_ne!(moved.await.expect("it moves on"), begun);
    // A scope is told to whose it is.
    let scope = |user: &str| proto::GetScopeRequest { labels: [("user".to_owned(), user.to_owned())].into() };
    for (labels, code) in [(scope("alice"), Code::NotFound), (scope("bob"), Code::PermissionDenied)] {
        assert_eq!(bound.get_scope(labels).await.unwrap_err().code(), code);
    }
    let of_all = proto::GetScopeRequest { labels: [("creator".to_owned(), "IDE".to_owned())].into() };
    assert_eq!(reason(&bound.get_scope(of_all).await.unwrap_err()), "ROLE_DENIED");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_position_that_is_no_good_says_so() {
    let (database, rm) = start().await;
    let usage = usage(&rm.address).await;
    let begun = next(&mut follow(&usage, "").await.unwrap()).await.position;
    for n in 0..3 {
        rm.client.register(registration(em(&format!("host{n}")), load(1, 1, 1))).await.unwrap();
    }
    let (_, behind) = lines(&mut follow(&usage, &begun).await.unwrap(), 3).await;
    for (position, code) in
        [("7", "INVALID_FIELD"), ("00000000-1", "POSITION_UNKNOWN"), (&format!("{behind}0"), "POSITION_UNKNOWN")]
    {
        let refused = follow(&usage, position).await.unwrap_err();
        assert_eq!(reason(&refused), code, "{position}: {refused:?}");
    }
    // All of it becomes old, and goes with its part.
    let old =
        "CREATE TABLE linkis_resource_action_record_2020010100_2020010101 PARTITION OF linkis_resource_action_record
            FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-01 01:00+00');
        UPDATE linkis_resource_action_record SET action_time = '2020-01-01 00:30+00'";
    sqlx::raw_sql(old).execute(&database.pool).await.unwrap();
    let mut connection = database.connect().await;
    let hour = Duration::from_secs(3600);
    while history_part::drop_oldest(&mut connection, hour).await.unwrap() {}
    let forgotten = "SELECT forgotten FROM linkis_resource_action_horizon";
    assert!(database.count(forgotten).await > 0);
    // An instance that has them in memory may tell them yet; another knows of them only from there.
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

/// How often lines were read for followers, and how often for those who were late.
fn read(rm: &Instance) -> [usize; 2] {
    let text = rm.metrics.text().unwrap();
    ["linkis_rm_followed_lines_total", "linkis_rm_followed_lines_late_total"].map(|name| {
        let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    })
}

/// Many on one connection, and one among them that never reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_follow_at_the_cost_of_one_and_who_does_not_read_keeps_nobody() {
    const FOLLOWERS: usize = 200;
    let changes = crowd_of(400);
    let (_database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(1_000_000, 1_000_000, 1_000_000))).await.unwrap();
    let usage_of_many = usage(&rm.address).await;
    let idle = usage(&rm.address).await;
    let never_read = follow(&idle, "").await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..FOLLOWERS {
        let mut stream = follow(&usage_of_many, "").await.unwrap();
        next(&mut stream).await;
        streams.push(stream);
    }
    let start = Instant::now();
    let mut callers = JoinSet::new();
    for number in 0..64 {
        let (client, host) = (rm.client.clone(), host.clone());
        callers.spawn(async move {
            for _ in (number..changes).step_by(64) {
                client.request_resource(&request(&host, "alice", load(1, 1, 1))).await.granted();
            }
        });
    }
    callers.join_all().await;
    let granted_in = start.elapsed();
    let mut followers = JoinSet::new();
    for mut stream in streams {
        followers.spawn(async move {
            let (told, position) = lines(&mut stream, changes).await;
            let tickets: BTreeSet<String> = told.into_iter().map(|line| line.ticket_id).collect();
            (tickets, position)
        });
    }
    let told = followers.join_all().await;
    let followed_in = start.elapsed();
    let live: BTreeSet<String> =
        rm.client.tickets(None).await.unwrap().iter().map(|ticket| ticket.id.to_string()).collect();
    assert!(told.iter().all(|(tickets, _)| *tickets == live), "each is told of all {changes}");
    let [once, late] = read(&rm);
    println!(
        "{changes} granted in {granted_in:?}, told {FOLLOWERS} times within {followed_in:?}: read {once}, again {late}"
    );
    // Each follower begins on its own, and finds what is new in memory, or a page further back that another has read.
    assert!(
        (changes..changes * 4).contains(&(once + late)),
        "{changes} lines, read {once} times, and {late} for who was late"
    );
    drop(never_read);
    let nobody = || async { rm.metrics.text().unwrap().contains("linkis_rm_followers 0\n") };
    eventually("nobody follows", SOON, nobody).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn so_many_follow_and_no_more_and_the_stop_ends_them() {
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
    assert_eq!(streams.len(), 240, "nobody has them all");
    streams.pop();
    let freed = || async { follow(&usages[0], "").await.is_ok() };
    eventually("who goes makes room", SOON, freed).await;
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
    assert_eq!(stopping.await.unwrap(), Ending::Drained);
}

/// What somebody knows who has only the feed, and asks for the EMs that it names.
#[derive(Default)]
struct Mirror {
    tickets: BTreeMap<Uuid, Held>,
    ems: BTreeMap<String, (EmInstance, Counters)>,
    lines: usize,
    seen: BTreeMap<String, usize>,
}

/// A ticket, as far as the history tells of it.
#[derive(Debug, PartialEq)]
struct Held {
    whose: [String; 3],
    em: Option<proto::EmInstance>,
    engine: Option<String>,
    labels: BTreeMap<String, String>,
    resource: Option<proto::Resource>,
}

/// The epoch and the version of an EM, and what it has: total, used, locked.
type Counters = ((i64, i64), [linkis_rm::domain::resource::Resource; 3]);

impl Mirror {
    /// Takes in what a message says.
    async fn take(&mut self, client: &RmClient, told: FollowActionsResponse) {
        let mut touched = BTreeMap::new();
        for line in told.actions {
            self.lines += 1;
            *self.seen.entry(line.action.clone()).or_default() += 1;
            if let Some(em) = line.em.as_ref().filter(|em| !em.instance.is_empty()) {
                touched.insert(em.instance.clone(), em.clone());
            }
            let Ok(ticket_id) = line.ticket_id.parse::<Uuid>() else { continue };
            match line.action.as_str() {
                "released" | "forced" | "expired" | "unregistered" | "lost" => drop(self.tickets.remove(&ticket_id)),
                _ => drop(self.tickets.insert(ticket_id, Held::of_line(line))),
            }
        }
        let names: Vec<_> =
            touched.values().map(|em| EmInstance::parse("em", &em.application_name, &em.instance).unwrap()).collect();
        for chunk in names.chunks(1000) {
            let found = retried(|| client.ems_by_name(chunk)).await;
            for em in chunk {
                let key = em.instance.to_string();
                match found.iter().find(|found| found.instance == *em && found.is_registered()) {
                    Some(found) => self.see(key, found),
                    None => drop(self.ems.remove(&key)),
                }
            }
        }
    }

    fn see(&mut self, key: String, em: &linkis_rm::domain::em::Em) {
        let known = self.ems.get(&key).map(|(_, (version, _))| *version);
        if known.is_none_or(|known| known <= (em.epoch, em.version)) {
            let amounts = [em.total.clone(), em.used.clone(), em.locked.clone()];
            self.ems.insert(key, (em.instance.clone(), ((em.epoch, em.version), amounts)));
        }
    }

    /// Begins with what there is: all that is listed after a position was told is at least as new.
    async fn begin(client: &RmClient) -> (Self, Follower) {
        let mut follower = client.follow_actions("");
        let first = follower.next().await.unwrap();
        let mut copy = Self::default();
        for ticket in client.tickets(None).await.unwrap() {
            copy.tickets.insert(ticket.id, Held::of_ticket(&ticket));
        }
        for em in client.ems().await.unwrap().iter().filter(|em| em.is_registered()) {
            copy.see(em.instance.instance.to_string(), em);
        }
        copy.take(client, first).await;
        (copy, follower)
    }
}

impl Held {
    fn of_line(line: proto::Action) -> Self {
        Self {
            whose: [line.user, line.creator, line.engine_type],
            em: line.em,
            engine: line.engine.map(|engine| engine.instance),
            labels: line.labels,
            resource: line.resource,
        }
    }

    fn of_ticket(ticket: &Ticket) -> Self {
        let message = linkis_rm::transport::convert::answer::ticket(ticket);
        Self {
            whose: [message.user, message.creator, message.engine_type],
            em: message.em,
            engine: message.engine.map(|engine| engine.instance),
            labels: message.labels,
            resource: message.used.or(message.locked),
        }
    }
}

/// Asks again while nobody answers.
async fn retried<T, F: Future<Output = Result<T, linkis_rm::client::ClientError>>>(mut ask: impl FnMut() -> F) -> T {
    let start = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Numbers without an order, the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// One of those who use the service: whatever comes to mind, on whatever host, until so much was done.
async fn user(client: RmClient, number: u64, left: Arc<AtomicUsize>, is_over: Arc<AtomicBool>) {
    let mut dice = Dice(number);
    let mut held: Vec<(linkis_rm::domain::operation::Grant, String)> = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
            return;
        }
        let host = em(&format!("host{}", dice.below(6)));
        let mine = u64::try_from(held.len()).unwrap();
        let mine = (mine > 0).then(|| usize::try_from(dice.below(mine)).unwrap());
        let is_done = match (dice.below(100), mine) {
            (0, _) => client.unregister(&host).await.is_ok(),
            (1..4, _) => {
                let total = load(400, 400 + i64::try_from(dice.below(3)).unwrap(), 400);
                client.register(registration(host, total)).await.is_ok()
            }
            (4, _) => client.drain(&host, "a disk").await.is_ok(),
            (5..7, _) => client.resume(&host, "").await.is_ok(),
            (7..10, _) => client.adopt_ticket(&adopted(host)).await.is_ok(),
            (10..40, Some(mine)) => {
                let (grant, user) = &held[mine];
                client.resource_inited(&inited(grant, user, Some(load(1, 1, 1)))).await.is_ok()
            }
            (40..48, Some(mine)) => {
                let (grant, user) = &held[mine];
                client.resource_reported(&grant.reported(name(user), load(1, 2, 1))).await.is_ok()
            }
            (48..50, Some(mine)) => client.force_release(held.swap_remove(mine).0.ticket_id, "it hangs").await.is_ok(),
            (50..70, Some(mine)) => {
                let (grant, user) = held.swap_remove(mine);
                client.resource_released(&release(&grant, &user)).await.is_ok()
            }
            _ => {
                let user = format!("user{}", dice.below(9));
                let ttl = Duration::from_millis(if dice.below(5) == 0 { 300 } else { 600_000 });
                let asked = ResourceRequest { lock_ttl: Some(ttl), ..request(&host, &user, load(2, 2, 1)) };
                match client.request_resource(&asked).await {
                    Ok(ResultResource::Available(grant)) => {
                        held.push((grant, user));
                        true
                    }
                    Ok(ResultResource::NotEnough(_)) => true,
                    Err(_) => false,
                }
            }
        };
        if !is_done {
            // The service is away, or the host is.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn adopted(em: EmInstance) -> Adopt {
    Adopt {
        ticket_id: Uuid::new_v4(),
        em,
        user: name("adopted"),
        creator: name("IDE"),
        engine_type: String::new(),
        labels: Default::default(),
        engine: engine("adopted"),
        used: load(1, 1, 1),
    }
}

/// Two managers do whatever they like, on two instances; grants expire, EMs go, fall silent and come again, engines are lost; one instance is
/// killed in the middle, and both followers lose their connections with it. In the end, what they know is what there is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_kept_with_the_feed_is_what_the_service_has() {
    let operations = crowd_of(1500);
    let database = Database::fresh().await;
    let url = database.url();
    let silence = ["--em-silent-after", "1s", "--em-lost-after", "3s", "--lost-after-reports", "2"];
    let arguments = [&["--database-url", &url][..], &silence].concat();
    let first = Process::start(&arguments);
    let liveness = LivenessTimeouts {
        silent_after: Duration::from_secs(1),
        lost_after: Duration::from_secs(3),
        lost_after_reports: 2,
    };
    let second = Instance::start_with(&database, linkis_rm::server::Options { liveness, ..options() }).await;
    for n in 0..6 {
        second.client.register(registration(em(&format!("host{n}")), load(400, 400, 400))).await.unwrap();
    }
    // One that reports once, with engines that it then does not name, and falls silent.
    let fickle = em("fickle");
    let epoch = second.client.register(registration(fickle.clone(), load(40, 40, 40))).await.unwrap().epoch;
    let many_tries = ClientSettings { attempts: 60, ..ClientSettings::new(Duration::from_secs(60)) };
    let of_both = RmClient::with(&format!("{},{}", first.address, second.address), &many_tries).unwrap();
    let (left, is_over) = (Arc::new(AtomicUsize::new(operations)), Arc::new(AtomicBool::new(false)));
    let mut users = JoinSet::new();
    for number in 0..24 {
        let client = if number % 2 == 0 { first.client.clone() } else { second.client.clone() };
        users.spawn(user(client, number, left.clone(), is_over.clone()));
    }
    for n in 0..4 {
        let grant = second.client.request_resource(&request(&fickle, "alice", load(1, 1, 1))).await.granted();
        second.client.resource_inited(&grant.inited(name("alice"), engine(&format!("fickle{n}")))).await.unwrap();
    }
    // They begin in the middle of it.
    let begun = || async { left.load(Ordering::Relaxed) < operations * 4 / 5 };
    eventually("it is busy", Duration::from_secs(60), begun).await;
    let mut copies = JoinSet::new();
    let end = Arc::new(std::sync::Mutex::new(None::<String>));
    for _ in 0..2 {
        let (client, end) = (of_both.clone(), end.clone());
        copies.spawn(async move {
            let (mut copy, mut follower) = Mirror::begin(&client).await;
            loop {
                let told = follower.next().await.unwrap();
                let is_last = told
                    .actions
                    .iter()
                    .any(|line| line.em.as_ref().is_some_and(|em| end.lock().unwrap().as_ref() == Some(&em.instance)));
                copy.take(&client, told).await;
                if is_last {
                    return copy;
                }
            }
        });
    }
    for sequence in 1..=3 {
        let report = Report {
            em: fickle.clone(),
            epoch,
            sequence,
            health: Health::Healthy,
            load: None,
            tickets: vec![],
            observed: None,
        };
        drop(second.client.heartbeat(&report).await);
    }
    let half = || async { left.load(Ordering::Relaxed) < operations / 2 };
    eventually("half is done", Duration::from_secs(120), half).await;
    let address = first.address.trim_start_matches("http://").to_owned();
    first.kill();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let first = Process::start_at(&address, &arguments);
    users.join_all().await;
    is_over.store(true, Ordering::Relaxed);
    let gone = || async { second.client.em(&fickle).await.is_err() };
    eventually("the silent one is given up", Duration::from_secs(60), gone).await;
    let due = || async {
        database
            .count("SELECT count(*) FROM linkis_user_resource_meta_data WHERE expires_at < now() + interval '1 minute'")
            .await
            == 0
    };
    eventually("what was to expire has", Duration::from_secs(60), due).await;
    let going = || async {
        database.count("SELECT count(*) FROM linkis_em_resource_meta_data WHERE going_epoch IS NOT NULL").await == 0
    };
    eventually("what goes has gone", Duration::from_secs(60), going).await;
    *end.lock().unwrap() = Some("the-end:9102".into());
    second.client.register(registration(em("the-end"), load(1, 1, 1))).await.unwrap();
    let copies = tokio::time::timeout(Duration::from_secs(120), copies.join_all()).await.expect("they hear of the end");

    let tickets: BTreeMap<Uuid, Held> =
        second.client.tickets(None).await.unwrap().iter().map(|ticket| (ticket.id, Held::of_ticket(ticket))).collect();
    let ems = second.client.ems().await.unwrap();
    for copy in copies {
        println!("{} lines: {:?}; {} tickets, {} EMs", copy.lines, copy.seen, tickets.len(), ems.len());
        assert_eq!(copy.tickets.len(), tickets.len(), "as many tickets");
        for (id, held) in &tickets {
            assert_eq!(copy.tickets.get(id), Some(held), "{id}");
        }
        assert_eq!(copy.ems.len(), ems.len());
        for em in &ems {
            let (_, (version, amounts)) = &copy.ems[em.instance.instance.as_str()];
            assert_eq!(*version, (em.epoch, em.version), "{}", em.instance);
            assert_eq!(*amounts, [em.total.clone(), em.used.clone(), em.locked.clone()], "{}", em.instance);
        }
        for action in
            ["granted", "adopted", "inited", "reported", "released", "forced", "expired", "unregistered", "lost"]
        {
            assert!(copy.seen.contains_key(action), "{action} was never told: {:?}", copy.seen);
        }
    }
    assert_books(&database, &second.client).await;
    assert_eq!(first.terminate(), Some(0));
}

/// Who wrote a line before others, and commits it after them, hides what is behind it until then: it is told in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_commits_late_is_told_in_its_place() {
    let (database, rm) = start().await;
    let usage = usage(&rm.address).await;
    let mut stream = follow(&usage, "").await.unwrap();
    next(&mut stream).await;
    let mut late = database.connect().await;
    sqlx::raw_sql(
        "BEGIN; INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor, action_time)
        SELECT 'registered', 'ecm', 'late', 'CPU', '{\"cores\":1}', 'anonymous', clock_timestamp()",
    )
    .execute(&mut late)
    .await
    .unwrap();
    rm.client.register(registration(em("soon"), load(1, 1, 1))).await.unwrap();
    // Longer than anybody waits for those who write.
    tokio::time::sleep(Duration::from_millis(600)).await;
    sqlx::raw_sql("COMMIT").execute(&mut late).await.unwrap();
    let (told, _) = lines(&mut stream, 2).await;
    let hosts: Vec<_> = told.iter().map(|line| line.em.as_ref().unwrap().instance.as_str()).collect();
    assert_eq!(hosts, ["late", "soon:9102"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_shows_what_happens() {
    let (_database, rm) = start().await;
    rm.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let address = rm.address.clone();
    let follow = ["history", "--follow", "--user", "alice", "--limit", "1", "-o", "jsonl", "--address", &address];
    let mut command = Command::new(PROGRAM);
    let child = command.args(follow).stdout(Stdio::piped()).spawn().unwrap();
    let child = Arc::new(std::sync::Mutex::new(child));
    // It has begun at some time: something is sure to come after it.
    let is_over = || async {
        for user in ["bob", "alice"] {
            rm.client.request_resource(&request(&em("host1"), user, load(1, 1, 1))).await.granted();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
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
