//! A replica of all tickets and EMs from the feed alone, under random calls.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rm_client::{ClientSettings, Follower, ResourceRequest, ResultResource, RmClient};
use rm_model::{
    adoption::AdoptTicket,
    em::{Em, EmInstance},
    operation::Grant,
    report::{EmReport, Health},
    resource::Resource,
    ticket::Ticket,
};
use rm_proto::convert::answer;
use rm_proto::v1::{self as proto, FollowActionsResponse};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{faults::random::Random, harness::*};

/// State of a reader of the feed, with the EMs that the feed names.
#[derive(Default)]
struct Mirror {
    tickets: BTreeMap<Uuid, Held>,
    ems: BTreeMap<String, (EmInstance, Counters)>,
    lines: usize,
    seen: BTreeMap<String, usize>,
}

/// A ticket, by the fields of history lines.
#[derive(Debug, PartialEq)]
struct Held {
    whose: [String; 3],
    em: Option<proto::EmInstance>,
    engine: Option<String>,
    labels: BTreeMap<String, String>,
    resource: Option<proto::Resource>,
}

/// Epoch and version of an EM; its total, used and locked amounts.
type Counters = ((i64, i64), [Resource; 3]);

impl Mirror {
    /// Applies a message.
    async fn take(&mut self, client: &RmClient, got: FollowActionsResponse) {
        let mut touched = BTreeMap::new();
        for line in got.actions {
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
            let found = client.ems_by_name(chunk).await.unwrap();
            for em in chunk {
                let key = em.instance.to_string();
                match found.iter().find(|found| found.instance == *em && found.is_registered()) {
                    Some(found) => self.see(key, found),
                    None => drop(self.ems.remove(&key)),
                }
            }
        }
    }

    fn see(&mut self, key: String, em: &Em) {
        let known = self.ems.get(&key).map(|(_, (version, _))| *version);
        if known.is_none_or(|known| known <= (em.epoch, em.version)) {
            let amounts = [em.total.clone(), em.used.clone(), em.locked.clone()];
            self.ems.insert(key, (em.instance.clone(), ((em.epoch, em.version), amounts)));
        }
    }

    /// Begins with the lists: everything that is listed after a position is at least as new.
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
        let message = answer::ticket(ticket);
        Self {
            whose: [message.user, message.creator, message.engine_type],
            em: message.em,
            engine: message.engine.map(|engine| engine.instance),
            labels: message.labels,
            resource: message.used.or(message.locked),
        }
    }
}

/// A caller that makes random calls on random EMs, a number of times.
async fn user(client: RmClient, number: u64, left: Arc<AtomicUsize>, is_over: Arc<AtomicBool>) {
    let mut random = Random::new(number);
    let mut held: Vec<(Grant, String)> = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
            return;
        }
        let em1 = em(&format!("host{}", random.index(6)));
        let mine = (!held.is_empty()).then(|| random.index(held.len()));
        let done = match (random.between(0, 99), mine) {
            (0, _) => client.unregister(&em1).await.map(drop),
            (1..4, _) => {
                let total = load(400, 400 + random.between(0, 2), 400);
                client.register(registration(em1, total)).await.map(drop)
            }
            (4, _) => client.drain(&em1, "a disk").await.map(drop),
            (5..7, _) => client.resume(&em1, "").await.map(drop),
            (7..10, _) => {
                let adopt = AdoptTicket { em: em1, ..adoption("adopted", "adopted", load(1, 1, 1)) };
                client.adopt_ticket(&adopt).await.map(drop)
            }
            (10..40, Some(mine)) => {
                let (grant, user) = &held[mine];
                client.resource_inited(&inited(grant, user, Some(load(1, 1, 1)))).await.map(drop)
            }
            (40..48, Some(mine)) => {
                let (grant, user) = &held[mine];
                client.resource_reported(&grant.reported(name(user), load(1, 2, 1))).await.map(drop)
            }
            (48..50, Some(mine)) => {
                client.force_release(held.swap_remove(mine).0.ticket_id, "it hangs").await.map(drop)
            }
            (50..70, Some(mine)) => {
                let (grant, user) = held.swap_remove(mine);
                client.resource_released(&release(&grant, &user)).await.map(drop)
            }
            _ => {
                let user = format!("user{}", random.index(9));
                let ttl = Duration::from_millis(if random.percent(20) { 300 } else { 600_000 });
                let asked = ResourceRequest { lock_ttl: Some(ttl), ..request(&em1, &user, load(2, 2, 1)) };
                client.request_resource(&asked).await.map(|answer| {
                    if let ResultResource::Available(grant) = answer {
                        held.push((grant, user));
                    }
                })
            }
        };
        if let Err(error) = done {
            // The service is unavailable, or the EM is not registered.
            pause_as_advised(&error).await;
        }
    }
}

/// Two managers make random calls on two instances. Grants expire; EMs are unregistered, silent and registered again; engines are
/// lost. One instance is killed, and both followers reconnect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_by_feed_equals_service() {
    let operations = crowd_of(1500);
    let database = Database::fresh().await;
    let url = database.url();
    let silence = ["--em-silent-after", "1s", "--em-lost-after", "3s", "--lost-after-reports", "2"];
    let arguments = [&["--database-url", &url][..], &silence].concat();
    let first = Process::start(&arguments);
    let (silent_after, lost_after) = (Duration::from_secs(1), Duration::from_secs(3));
    let short = settings().with_time("--em-silent-after", silent_after).with_time("--em-lost-after", lost_after);
    let second = Instance::start_with(&database, short.with("--lost-after-reports", 2)).await;
    register_hosts(&second.client, 0..6, load(400, 400, 400)).await;
    // An EM that reports once without its engines, and becomes silent.
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
    // The followers begin during the calls.
    let begun = || async { left.load(Ordering::Relaxed) < operations * 4 / 5 };
    eventually("it is busy", Duration::from_secs(60), begun).await;
    let mut copies = JoinSet::new();
    let end = Arc::new(Mutex::new(None::<String>));
    for _ in 0..2 {
        let (client, end) = (of_both.clone(), end.clone());
        copies.spawn(async move {
            let (mut copy, mut follower) = Mirror::begin(&client).await;
            loop {
                let got = follower.next().await.unwrap();
                let is_last = got
                    .actions
                    .iter()
                    .any(|line| line.em.as_ref().is_some_and(|em| end.lock().unwrap().as_ref() == Some(&em.instance)));
                copy.take(&client, got).await;
                if is_last {
                    return copy;
                }
            }
        });
    }
    for sequence in 1..=3 {
        let report = EmReport {
            em: fickle.clone(),
            epoch,
            sequence,
            health: Health::Healthy,
            load: None,
            tickets: vec![],
            observed: None,
            idle: vec![],
        };
        drop(second.client.heartbeat(&report).await);
    }
    let half = || async { left.load(Ordering::Relaxed) < operations / 2 };
    eventually("half is done", Duration::from_secs(120), half).await;
    let address = first.address.trim_start_matches("http://").to_owned();
    first.kill();
    eventually("both followers reconnect", LONG, async || second.metric("linkis_rm_followers") == 2.0).await;
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
    eventually("tickets have expired", Duration::from_secs(60), due).await;
    let going = || async {
        database.count("SELECT count(*) FROM linkis_em_resource_meta_data WHERE going_epoch IS NOT NULL").await == 0
    };
    eventually("EMs are unregistered", Duration::from_secs(60), going).await;
    *end.lock().unwrap() = Some("the-end:9102".into());
    second.client.register(registration(em("the-end"), load(1, 1, 1))).await.unwrap();
    let copies = tokio::time::timeout(Duration::from_secs(120), copies.join_all()).await.expect("they hear of the end");

    let tickets: BTreeMap<Uuid, Held> =
        second.client.tickets(None).await.unwrap().iter().map(|ticket| (ticket.id, Held::of_ticket(ticket))).collect();
    let ems = second.client.ems().await.unwrap();
    for copy in copies {
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
            assert!(copy.seen.contains_key(action), "{action} was never sent: {:?}", copy.seen);
        }
    }
    assert_books(&database, &second.client).await;
    assert_eq!(first.terminate(), Some(0));
}
