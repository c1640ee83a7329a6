//! Refusal sums: by user, scope and dimension over all instances, without a cost for the refused request.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rm_client::ResourceRequest;
use rm_model::{
    adoption::AdoptTicket,
    em::Em,
    limit::{LabelPattern, Rule},
    refusal::Refusal,
    report::EmReport,
    resource::Dimension,
};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::{Code, transport::Channel};
use uuid::Uuid;

use crate::{
    command_line::{program, text},
    harness::*,
};

type RefusalSums = BTreeMap<(String, String, String), i64>;

/// Returns all pages of `call`.
async fn pages(usage: &mut UsageServiceClient<Channel>, call: proto::ListRefusalsRequest) -> Vec<proto::RefusalSum> {
    let (mut got, mut call) = (vec![], call);
    loop {
        let page = usage.list_refusals(call.clone()).await.unwrap().into_inner();
        got.extend(page.refusals);
        if page.next_page_token.is_empty() {
            return got;
        }
        call.page_token = page.next_page_token;
    }
}

/// Refusals by user, scope and dimension over all periods, because the current one can end at any moment.
fn summed(sums: &[proto::RefusalSum]) -> RefusalSums {
    let mut got = RefusalSums::new();
    for sum in sums {
        *got.entry((sum.user.clone(), sum.scope.clone(), sum.dimension.clone())).or_default() += sum.refusals;
    }
    got
}

async fn listed(usage: &UsageServiceClient<Channel>) -> RefusalSums {
    summed(&pages(&mut usage.clone(), proto::ListRefusalsRequest::default()).await)
}

async fn total(usage: &UsageServiceClient<Channel>) -> i64 {
    listed(usage).await.into_values().sum()
}

async fn connect(rm: &Instance) -> UsageServiceClient<Channel> {
    UsageServiceClient::connect(rm.address.clone()).await.unwrap()
}

fn expected(lines: &[(&str, &str, &str, i64)]) -> RefusalSums {
    let line = |(user, scope, dimension, count): &(&str, &str, &str, i64)| {
        (((*user).to_owned(), (*scope).to_owned(), (*dimension).to_owned()), *count)
    };
    lines.iter().map(line).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_of_all_instances_are_summed() {
    let (_database, first, second) = two().await;
    let em1 = em("host1");
    first.client.register(registration(em1.clone(), load(64, 16, 20))).await.unwrap();
    first.client.set_limit(&each_user(2)).await.unwrap();
    let too_many_cores = |user: &str, cores| request(&em1, user, load(1, cores, 1));
    for (rm, cores) in [(&first, 17), (&first, 18), (&second, 19)] {
        rm.client.request_resource(&too_many_cores("alice", cores)).await.refused();
    }
    second.client.request_resource(&request(&em1, "bob", load(1, 1, 3))).await.refused();
    // The EM of a refusal for any EM is only the closest one, so it is no scope of the sum.
    second.client.request_resource(&ResourceRequest { em: None, ..too_many_cores("bob", 17) }).await.refused();
    // Neither a grant nor a dry run nor an error is a refusal.
    first.client.request_resource(&too_many_cores("alice", 1)).await.granted();
    first.client.dry_run(&too_many_cores("alice", 17)).await.refused();
    first.client.request_resource(&request(&em("nowhere"), "alice", load(1, 1, 1))).await.unwrap_err();
    // A request whose wait timeout has passed is refused, too.
    let patient = ResourceRequest { wait_timeout: Duration::from_millis(50), ..too_many_cores("alice", 16) };
    first.client.request_resource(&patient).await.refused();

    let on_host = format!("em={em1}");
    let all = expected(&[
        ("alice", &on_host, "cores", 4),
        ("bob", "user=bob", "instances", 1),
        ("bob", "em=any", "cores", 1),
    ]);
    let mut usage = connect(&first).await;
    eventually("all are listed", LONG, async || listed(&usage).await == all).await;
    // Page by page, and filtered.
    let of = async |usage: &mut UsageServiceClient<Channel>, call: proto::ListRefusalsRequest| {
        summed(&pages(usage, call).await)
    };
    let call = proto::ListRefusalsRequest { page_size: 1, ..Default::default() };
    assert_eq!(of(&mut usage, call.clone()).await, all);
    let of_bob = expected(&[("bob", "user=bob", "instances", 1), ("bob", "em=any", "cores", 1)]);
    assert_eq!(of(&mut usage, proto::ListRefusalsRequest { user: "bob".into(), ..call.clone() }).await, of_bob);
    let by_user = proto::ListRefusalsRequest { scope_kind: "user".into(), ..call.clone() };
    let sums = pages(&mut usage, by_user.clone()).await;
    assert_eq!(summed(&sums), expected(&[("bob", "user=bob", "instances", 1)]));
    assert_eq!((sums[0].rule.as_str(), sums[0].last_requested), ("each user: at most 2 instances", 3), "{sums:?}");
    assert!(of(&mut usage, proto::ListRefusalsRequest { user: "alice".into(), ..by_user }).await.is_empty());
    let by_host = proto::ListRefusalsRequest { scope: on_host.clone(), ..call.clone() };
    assert_eq!(of(&mut usage, by_host).await, expected(&[("alice", &on_host, "cores", 4)]));
    let in_instances = proto::ListRefusalsRequest { dimension: "instances".into(), ..call.clone() };
    assert_eq!(of(&mut usage, in_instances).await.len(), 1);
    // By time.
    let start = sums[0].period_start;
    let later = start.map(|start| prost_types::Timestamp { seconds: start.seconds + 3600, nanos: 0 });
    let since = proto::ListRefusalsRequest { from_time: later, ..call.clone() };
    assert!(of(&mut usage, since).await.is_empty());
    let before = proto::ListRefusalsRequest { to_time: start, ..call };
    assert!(
        pages(&mut usage, before).await.iter().all(|sum| sum.period_start.unwrap().seconds < start.unwrap().seconds)
    );
    // A stopping instance writes its refusals first.
    second.client.request_resource(&too_many_cores("carol", 17)).await.refused();
    second.stop().await;
    assert_eq!(listed(&usage).await[&("carol".to_owned(), on_host, "cores".to_owned())], 1);
    first.stop().await;
}

/// A refusal does not wait for its row in the table of refusals. A sum that could not be written is written later, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_during_locked_table_are_written_later() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(64, 16, 20)).await;
    let refuse = async |count: usize| {
        for _ in 0..count {
            rm.client.request_resource(&request(&em1, "alice", load(1, 17, 1))).await.refused();
        }
    };
    let mut usage = connect(&rm).await;
    refuse(3).await;
    eventually("the first are listed", LONG, async || total(&usage).await == 3).await;
    let mut held = database.pool.begin().await.unwrap();
    execute(&mut *held, "LOCK TABLE linkis_resource_refusal IN EXCLUSIVE MODE").await;
    refuse(20).await;
    let is_failed = || rm.metric(r#"linkis_rm_task_errors_total{task="refusals"}"#) > 0.0;
    eventually("writing has failed", LONG, async || is_failed()).await;
    let errors = |class: &str| rm.metric(&format!(r#"linkis_rm_database_errors_total{{class="{class}"}}"#));
    assert!(errors("lock_timeout") > 0.0 && errors("inconsistent") == 0.0);
    refuse(2).await;
    assert_eq!(total(&usage).await, 3);
    held.rollback().await.unwrap();
    eventually("all are listed", LONG, async || total(&usage).await == 25).await;
    let sum = pages(&mut usage, Default::default()).await.pop().unwrap();
    assert_eq!((sum.last_requested, sum.last_available, sum.others), (17, 16, false));
    rm.stop().await;
}

/// Refusals of too many kinds are summed as others, and none is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_above_bound_are_summed_as_others() {
    // Wherever a period ends, one of them has more kinds than an instance separates.
    const USERS: usize = 2150;
    let em1 = em("host1");
    let (_database, rm) = start_with_em(em1.clone(), load(64, 16, 20)).await;
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..16 {
        let (client, em1) = (rm.client.clone(), em1.clone());
        callers.spawn(async move {
            for user in (caller..USERS).step_by(16) {
                client.request_resource(&request(&em1, &format!("user{user}"), load(1, 17, 1))).await.refused();
            }
        });
    }
    callers.join_all().await;
    let mut usage = connect(&rm).await;
    let all = proto::ListRefusalsRequest { page_size: 1000, ..Default::default() };
    let got = async || pages(&mut usage.clone(), all.clone()).await;
    let count = |sums: &[proto::RefusalSum]| -> i64 { sums.iter().map(|sum| sum.refusals).sum() };
    eventually("all are listed", LONG, async || count(&got().await) == USERS as i64).await;
    let (others, apart): (Vec<_>, Vec<_>) = got().await.into_iter().partition(|sum| sum.others);
    assert!(count(&others) >= 150 && apart.len() >= 1000, "{others:?}");
    for sum in &others {
        let of = (sum.user.as_str(), sum.scope_kind.as_str(), sum.scope.as_str(), sum.dimension.as_str());
        assert_eq!(of, ("", "em", "", "cores"), "{sum:?}");
    }
    let one = proto::ListRefusalsRequest { user: apart[0].user.clone(), ..all };
    assert_eq!(count(&pages(&mut usage, one).await), 1);
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_after_instance_kill_lose_last_seconds() {
    let database = Database::fresh().await;
    let url = database.url();
    let process = Process::start(&["--database-url", &url]);
    let em1 = em("host1");
    process.client.register(registration(em1.clone(), load(64, 16, 20))).await.unwrap();
    let refused = request(&em1, "alice", load(1, 17, 1));
    for _ in 0..40 {
        process.client.request_resource(&refused).await.refused();
    }
    let usage = UsageServiceClient::connect(process.address.clone()).await.unwrap();
    eventually("the refusals are listed", LONG, async || total(&usage).await == 40).await;
    // More refusals, which may be written or not.
    for _ in 0..5 {
        process.client.request_resource(&refused).await.refused();
    }
    process.kill();
    let rm = Instance::start(&database).await;
    let usage = connect(&rm).await;
    let left = total(&usage).await;
    assert!((40..=45).contains(&left), "{left}");
    // The next instance adds its sums to those of the dead one.
    rm.client.request_resource(&refused).await.refused();
    eventually("one more is listed", LONG, async || total(&usage).await == left + 1).await;
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_older_than_history_are_deleted() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(64, 16, 20)).await;
    rm.client.request_resource(&request(&em1, "alice", load(1, 17, 1))).await.refused();
    rm.stop().await;
    let kept = "INSERT INTO linkis_resource_refusal SELECT (jsonb_populate_record(r, jsonb_build_object(
            'period_start', r.period_start - interval '2 hours'))).* FROM linkis_resource_refusal r";
    database.execute(kept).await;
    assert_eq!(database.count("SELECT count(*) FROM linkis_resource_refusal").await, 2);
    // A history of an hour.
    let rm = Instance::start(&database).await;
    eventually("it is gone", LONG, async || database.count("SELECT count(*) FROM linkis_resource_refusal").await == 1)
        .await;
    assert_eq!(total(&connect(&rm).await).await, 1);
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_refusal_and_usage_calls_return_field() {
    let (_database, rm) = start().await;
    let mut usage = connect(&rm).await;
    let time = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
    let refused = |status: tonic::Status, field: &str| {
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().starts_with(field), "{field}: {}", status.message());
    };
    let none = proto::ListRefusalsRequest::default();
    for (call, field) in [
        (proto::ListRefusalsRequest { page_size: -1, ..none.clone() }, "page_size"),
        (proto::ListRefusalsRequest { page_token: "x.1-ff".into(), ..none.clone() }, "page_token"),
        (proto::ListRefusalsRequest { scope_kind: "host".into(), ..none.clone() }, "scope_kind"),
        (proto::ListRefusalsRequest { scope: "x".repeat(5000), ..none.clone() }, "scope"),
        (proto::ListRefusalsRequest { dimension: "a\n".into(), ..none.clone() }, "dimension"),
        (proto::ListRefusalsRequest { user: "x".repeat(256), ..none.clone() }, "user"),
        (proto::ListRefusalsRequest { from_time: time(-1), ..none.clone() }, "from_time"),
        (proto::ListRefusalsRequest { to_time: time(i64::MAX), ..none.clone() }, "to_time"),
    ] {
        refused(usage.list_refusals(call).await.unwrap_err(), field);
    }
    let by_user = proto::GetUsageRequest { by: proto::UsageBy::User.into(), ..Default::default() };
    for (call, field) in [
        (proto::GetUsageRequest::default(), "by"),
        (proto::GetUsageRequest { by: 99, ..Default::default() }, "by"),
        (proto::GetUsageRequest { by: proto::UsageBy::Em.into(), user: "alice".into(), ..Default::default() }, "by"),
        (proto::GetUsageRequest { page_size: -1, ..by_user.clone() }, "page_size"),
        (proto::GetUsageRequest { page_token: "x.[1,null,null]".into(), ..by_user.clone() }, "page_token"),
        (proto::GetUsageRequest { from_time: time(7200), to_time: time(3600), ..by_user.clone() }, "from_time"),
        (proto::GetUsageRequest { from_time: time(0), ..by_user.clone() }, "from_time"),
        (proto::GetUsageRequest { to_time: time(i64::MIN), ..by_user.clone() }, "to_time"),
    ] {
        refused(usage.get_usage(call).await.unwrap_err(), field);
    }
    // Without limits nothing is listed.
    let rule = Rule {
        pattern: LabelPattern::new([("user".to_owned(), None)].into()),
        mode: Default::default(),
        max: [(Dimension::Instances, 1)].into(),
        guarantee: Default::default(),
    };
    rm.client.set_limit(&rule).await.unwrap();
    assert!(usage.list_refusals(none).await.unwrap().into_inner().refusals.is_empty());
    rm.stop().await;
}

/// Adopts engines on an EM, each with 2 GB and a core, by user and creator, and reports the first `idle` ones as idle.
async fn run_engines(rm: &Instance, em: &Em, engines: &[(&str, &str)], idle: usize) {
    let mut tickets = Vec::new();
    for (number, (user, creator)) in engines.iter().enumerate() {
        let ticket_id = Uuid::now_v7();
        let adopt = AdoptTicket {
            ticket_id,
            creator: name(creator),
            em: em.instance.clone(),
            engine: engine(&format!("engine{number}-{}", em.epoch)),
            ..adoption("any", user, load(2, 1, 1))
        };
        rm.client.adopt_ticket(&adopt).await.unwrap();
        tickets.push(ticket_id);
    }
    let idle = tickets[..idle].to_vec();
    rm.client.heartbeat(&EmReport { tickets, idle, ..report(em, 1) }).await.unwrap();
}

/// Returns what idle engines hold, by scope and dimension.
fn idle_amounts(refusal: &Refusal) -> BTreeMap<(&str, String), Option<i64>> {
    let shortfalls = refusal.shortfalls.iter();
    shortfalls.map(|short| ((short.scope.as_str(), short.dimension.to_string()), short.idle_amount)).collect()
}

/// Only the engines that count at the scope are summed. Scopes without a user are left out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_states_what_idle_engines_hold() {
    let (_database, rm) = start().await;
    let host1 = rm.client.register(registration(em("host1"), load(64, 16, 20))).await.unwrap();
    let host2 = rm.client.register(registration(em("host2"), load(6, 16, 3))).await.unwrap();
    let ide_of_ann = limit(&[("creator", Some("IDE")), ("user", Some("ann"))], &[(Dimension::Instances, 2)]);
    for rule in [each_user(3), ide_of_ann] {
        rm.client.set_limit(&rule).await.unwrap();
    }
    let on = |on_em: &str, user: &str| request(&em(on_em), user, load(2, 1, 1));
    let states = async |request: &ResourceRequest, expected: &[(&str, &str, Option<i64>)]| {
        let expected =
            expected.iter().map(|(scope, dimension, idle)| ((*scope, (*dimension).to_owned()), *idle)).collect();
        // The amounts may be two seconds old.
        let is_stated = async || idle_amounts(&rm.client.request_resource(request).await.refused()) == expected;
        eventually("the refusal states the amounts", LONG, is_stated).await;
    };
    let busy = [("carl", "IDE"), ("carl", "IDE"), ("carl", "IDE")];
    run_engines(&rm, &host1, &busy, 0).await;
    states(&on("host1", "carl"), &[("user=carl", "instances", None)]).await;
    assert_eq!(rm.metric("linkis_rm_refusal_idle_unset_total"), 0.0, "no engine of the cell is idle");

    run_engines(&rm, &host2, &[("bob", "IDE"), ("ann", "batch"), ("ann", "IDE")], 2).await;
    let host3 = rm.client.register(registration(em("host3"), load(64, 16, 20))).await.unwrap();
    run_engines(&rm, &host3, &[("ann", "IDE")], 1).await;
    let both = [("creator=IDE,user=ann", "instances", Some(1)), ("user=ann", "instances", Some(2))];
    states(&on("host1", "ann"), &both).await;
    states(&on("host1", "carl"), &[("user=carl", "instances", Some(0))]).await;
    let on_host2 = format!("em={}", em("host2"));
    let full = [(on_host2.as_str(), "memory", Some(4 * GB)), (&on_host2, "instances", Some(2))];
    states(&on("host2", "dave"), &full).await;
    // Also at the end of a wait, and in a dry run; not if the request would not fit without them either.
    states(&ResourceRequest { wait_timeout: Duration::from_millis(100), ..on("host1", "ann") }, &both).await;
    let never = ResourceRequest { resource: load(7, 1, 1), ..on("host2", "dave") };
    states(&never, &[(&on_host2, "memory", None), (&on_host2, "instances", None)]).await;
    let words = [
        "request",
        "memory=2g,cores=1,instances=1",
        "--user",
        "ann",
        "--creator",
        "IDE",
        "--em",
        "host1:9102",
        "--dry-run",
    ];
    let shown = "short: user=ann  instances wants 1, free 0 of 3, idle engines hold 2\n";
    let is_shown = async || text(&program(&rm.address, &words).output().unwrap().stdout).contains(shown);
    eventually("the command shows the amount", LONG, is_shown).await;
    let of_all = limit(&[("creator", Some("IDE"))], &[(Dimension::Instances, 6)]);
    rm.client.set_limit(&of_all).await.unwrap();
    states(&on("host1", "eve"), &[("creator=IDE", "instances", None)]).await;
    assert!(rm.metric("linkis_rm_refusal_idle_reads_total") > 0.0);
}

/// Refusals at once, at many EMs with idle engines: few reads serve them, and amounts that are not read in time are unset.
///
/// - `LINKIS_RM_REFUSALS`: number of refusals [default: 600].
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_refusals_share_few_reads_of_idle_amounts() {
    let refusals = std::env::var("LINKIS_RM_REFUSALS").map_or(600, |number| number.parse().unwrap());
    let (_database, rm) = start().await;
    let mut ems = Vec::new();
    for number in 0..refusals / 10 {
        let em = rm.client.register(registration(em(&format!("host{number}")), load(2, 1, 1))).await.unwrap();
        run_engines(&rm, &em, &[("bob", "IDE")], 1).await;
        ems.push(em.instance);
    }
    let reads = || rm.metric("linkis_rm_refusal_idle_reads_total");
    let (before, begun) = (reads(), Instant::now());
    let mut calls = JoinSet::new();
    for number in 0..refusals {
        let (client, em) = (rm.client.clone(), ems[number % ems.len()].clone());
        let request = request(&em, &format!("user{number}"), load(1, 1, 1));
        calls.spawn(async move { client.request_resource(&request).await.refused() });
    }
    let memory = |refusal: &Refusal| {
        refusal.shortfalls.iter().find(|short| short.dimension == Dimension::Memory).unwrap().idle_amount
    };
    let amounts: Vec<Option<i64>> = calls.join_all().await.iter().map(memory).collect();
    let reads_max = 2.0 + 100.0 * begun.elapsed().as_secs_f64();
    assert!(reads() - before <= reads_max, "{} reads, {reads_max} are allowed", reads() - before);
    let stated = amounts.iter().flatten().count();
    println!("{stated} of {refusals} state amounts, after {} reads", reads() - before);
    assert!(amounts.iter().flatten().all(|amount| *amount == 2 * GB));
    let later = async || {
        memory(&rm.client.request_resource(&request(&ems[0], "user0", load(1, 1, 1))).await.refused()) == Some(2 * GB)
    };
    eventually("a later refusal states the amount", LONG, later).await;
}
