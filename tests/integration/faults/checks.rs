//! Checks after the run: replies to callers, and the state of the database.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    env,
    time::{Duration, Instant},
};

use rm_client::RmClient;
use rm_model::{
    resource::Resource,
    scope::{Scope, ScopeHoldings},
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    crowd::{CROWD, em_of_crowd},
    history::{self, EmLines, Goings, Line, amounts},
    journal::{Asker, Book, Journal, Life},
    rules::{self, Judged},
    workload::Hosts,
};
use crate::harness::*;

/// Maximum delay of an expiry, without the time of faults. An instance may need a quarter of a minute to detect the end of a fault.
pub const LATE_MAX: Duration = Duration::from_secs(15);

/// Maximum delay of the expiry of one of thousands of tickets that are due together: many steps, with several outages between them. Without a fault, the
/// watcher waits less.
pub const CROWD_LATE_MAX: Duration = Duration::from_secs(30);

/// Totals of the history.
#[derive(Debug, Default)]
pub struct Findings {
    pub granted: usize,
    pub ended: BTreeMap<String, usize>,
    /// Grants without a reply.
    pub unacknowledged: usize,
    /// How late the latest was, and for how long of that nothing was broken.
    pub latest_expiry: (Duration, Duration),
    /// The most deadlines in one second.
    pub most_due: usize,
    pub em_lines: EmLines,
    pub goings: Goings,
    pub judged: Judged,
}

/// Rows that an ended workload leaves.
pub const LEFT: &str = "SELECT (SELECT count(*) FROM linkis_user_resource_meta_data),
    (SELECT count(*) FROM linkis_resource_lock) + (SELECT count(*) FROM linkis_resource_hold),
    (SELECT count(*) FROM linkis_resource_waiting JOIN linkis_rm_instance i USING (instance_id)
        WHERE i.alive_until > clock_timestamp()), 0::bigint";

/// Rows that remain, including queue entries of dead instances, which delay no call.
pub const LEFT_OVER: &str = "SELECT (SELECT count(*) FROM linkis_user_resource_meta_data),
    (SELECT count(*) FROM linkis_resource_lock) + (SELECT count(*) FROM linkis_resource_hold),
    (SELECT count(*) FROM linkis_resource_waiting),
    (SELECT count(*) FROM linkis_resource_waiting_entry)";

/// Waits until nothing is left, by `Left`.
pub async fn settle(connection: &mut PgConnection, journal: &Journal, left: &'static str, longest: Duration) {
    let start = Instant::now();
    loop {
        let is_last = start.elapsed() > longest;
        let left: (i64, i64, i64, i64) = sqlx::query_as(left).fetch_one(&mut *connection).await.unwrap();
        if left == (0, 0, 0, 0) {
            return;
        }
        if is_last {
            let (tickets, locks, waiting, wait_keys) = left;
            return journal.violation(format!(
                "left over {longest:?} after the end: {tickets} tickets, {waiting} waiting at {wait_keys} wait_keys, {locks} locks"
            ));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Counters equal tickets: for EMs, and for the scopes that limits are for.
pub async fn counters(rm: &RmClient, journal: &Journal) {
    let tickets = rm.tickets(None).await.unwrap();
    let limits = counted(rm.limits().await.unwrap(), rm.policies().await.unwrap());
    let mut sums: HashMap<Scope, ScopeHoldings> = HashMap::new();
    for ticket in &tickets {
        for limited in limits.scopes(&ticket.ticket_labels()) {
            let sum = sums.entry(limited.scope().clone()).or_default();
            let held = if ticket.is_locked() { &mut sum.locked } else { &mut sum.used };
            held.add(limited.share(ticket.resource()), 1).unwrap();
        }
    }
    for scope in rm.scopes().await.unwrap() {
        let sum = sums.get(&scope.scope).cloned().unwrap_or_default();
        journal.check(scope.usage == sum, || {
            format!("{} holds {sum:?}, and is counted as {:?}", scope.scope, scope.usage)
        });
    }
    for em in rm.ems().await.unwrap() {
        let is_idle = tickets.iter().all(|ticket| ticket.em != em.instance);
        journal.check(em.is_idle() == is_idle, || format!("{em:?} with the tickets {tickets:?}"));
    }
}

/// An audit of the service finds no difference, at one moment of the run.
pub async fn audit(rm: &RmClient, journal: &Journal) {
    match rm.audit().await {
        Ok(report) => {
            // Notes name permitted states, such as an EM that became smaller under live tickets.
            journal.check(report.differences.is_empty(), || format!("an audit found {:?}", report.differences));
        }
        Err(error) => journal.violation(format!("there is no audit when nothing is broken: {error}")),
    }
}

/// Compares replies with the history.
pub async fn findings(connection: &mut PgConnection, journal: &Journal) -> Findings {
    let history = history::read(connection).await;
    let goings = history::replay(journal, &history);
    // An earlier release writes the lines of one commit in another order.
    let em_lines = match env::var("LINKIS_RM_FAULTS_OTHER") {
        Ok(_) => EmLines::default(),
        Err(_) => history::replay_lines(journal, &history),
    };
    // An earlier release does not record when limits come into force.
    let judged = match env::var("LINKIS_RM_FAULTS_OTHER") {
        Ok(_) => Judged::default(),
        Err(_) => rules::replay(journal, &history),
    };
    let lives = history::lives(&history);
    let book = std::mem::take(&mut *journal.book());
    let mut findings = Findings { granted: lives.len(), em_lines, goings, judged, ..Findings::default() };
    for (id, life) in &lives {
        once(journal, *id, life);
        ended(journal, &book, *id, life, &mut findings);
    }
    for (id, got) in &book.lives {
        ticket(journal, *id, got, lives.get(id).map_or(&[], |life| life.as_slice()));
    }
    unacknowledged(journal, &book, &lives, &mut findings);
    findings.most_due = most_due(&book, &lives);
    lost(journal, &book, &lives, &history);
    request_ids(connection, journal, &book).await;
    let violations = std::mem::take(&mut journal.book().violations);
    *journal.book() = Book { violations: [book.violations, violations].concat(), ..book };
    findings
}

/// Each ticket is granted once and then confirmed at most once, or adopted. Reports follow. It ends once, as its last line.
fn once(journal: &Journal, id: Uuid, life: &[&Line]) {
    let actions = Vec::from_iter(life.iter().map(|line| line.action.as_str()));
    let is_end = |line: &&&Line| line.is_end();
    let in_order = match actions.as_slice() {
        ["granted", _] => true,
        ["granted", "inited", reported @ .., _] | ["adopted", reported @ .., _] => {
            reported.iter().all(|action| *action == "reported")
        }
        _ => false,
    } && life.last().iter().all(is_end);
    journal.check(in_order, || format!("the life of {id} is {life:?}"));
}

fn ended(journal: &Journal, book: &Book, id: Uuid, life: &[&Line], findings: &mut Findings) {
    let Some(end) = life.last().filter(|line| line.is_end()) else { return };
    *findings.ended.entry(end.action.clone()).or_default() += 1;
    let Some(got) = book.lives.get(&id) else { return };
    if end.action == "released" {
        journal.check(got.release_asked, || format!("{id} was released, and nobody asked: {got:?} {life:?}"));
    }
    if end.action == "expired" {
        let late = end.at - got.expires_at;
        journal.check(!late.is_negative(), || format!("{id} expired early: {got:?} {life:?}"));
        let (late, calm) = (late.unsigned_abs(), journal.calm_between(got.expires_at, end.at));
        let late_max = if got.user == CROWD { CROWD_LATE_MAX } else { LATE_MAX };
        journal.check(calm < late_max, || {
            format!("{id} expired {late:?} late, of which nothing was broken for {calm:?}: {got:?} {life:?}")
        });
        findings.latest_expiry = findings.latest_expiry.max((late, calm));
        journal.check(!got.inited && life.len() == 2, || format!("{id} was in use, and expired: {got:?} {life:?}"));
    }
}

/// How many deadlines passed in the second in which most did.
fn most_due(book: &Book, lives: &HashMap<Uuid, Vec<&Line>>) -> usize {
    let mut seconds: HashMap<i64, usize> = HashMap::new();
    let expired = lives.iter().filter(|(_, life)| life.last().is_some_and(|line| line.action == "expired"));
    for got in expired.filter_map(|(id, _)| book.lives.get(id)) {
        *seconds.entry(got.expires_at.unix_timestamp()).or_default() += 1;
    }
    seconds.into_values().max().unwrap_or(0)
}

/// Replies about one ticket.
fn ticket(journal: &Journal, id: Uuid, got: &Life, life: &[&Line]) {
    let Some(granted) = life.first() else {
        return journal.violation(format!("{id} was granted, and is nowhere: {got:?}"));
    };
    let is_same =
        granted.em == got.em && granted.user.as_ref() == Some(&got.user) && granted.amounts() == amounts(&got.asked);
    journal.check(is_same, || format!("{id} was granted as {granted:?}, and got as {got:?}"));
    let was_inited = life.iter().any(|line| ["inited", "adopted"].contains(&line.action.as_str()));
    journal.check(was_inited || !got.inited, || format!("{id} was got to be in use: {got:?} {life:?}"));
    journal.check(got.init_asked || !was_inited, || format!("{id} came in use, and nobody asked: {got:?} {life:?}"));
    let was_reported = |used: &Resource| life.iter().any(|line| !line.is_end() && line.amounts() == amounts(used));
    let is_held = got.reported.as_ref().is_none_or(was_reported);
    journal.check(is_held, || format!("{id} was got to use something else: {got:?} {life:?}"));
    let is_over = life.iter().any(|line| line.is_end());
    journal.check(is_over || !got.over, || format!("{id} was got to be over: {got:?} {life:?}"));
}

/// A grant without a reply belongs to a call with an unknown result, and ended without use.
fn unacknowledged(journal: &Journal, book: &Book, lives: &HashMap<Uuid, Vec<&Line>>, findings: &mut Findings) {
    let mut by_user: HashMap<&str, Vec<&Vec<&Line>>> = HashMap::new();
    let mut granted: HashMap<&str, usize> = HashMap::new();
    for (id, life) in lives {
        if life[0].action == "adopted" {
            journal.check(book.adopting.contains(id), || format!("{id} was adopted, and nobody asked: {life:?}"));
            continue;
        }
        let user = life[0].user.as_deref().unwrap_or_default();
        *granted.entry(user).or_default() += 1;
        if !book.lives.contains_key(id) {
            by_user.entry(user).or_default().push(life);
        }
    }
    let never = Asker::default();
    for (user, unacknowledged) in by_user {
        findings.unacknowledged += unacknowledged.len();
        let asker = book.askers.get(user).unwrap_or(&never);
        let got = || format!("{user} has other replies ({asker:?}), and was granted {unacknowledged:?}");
        journal.check(unacknowledged.len() <= asker.unclear, got);
        let came_to_nothing = unacknowledged.iter().flat_map(|life| life.iter()).all(|line| line.action != "inited");
        journal
            .check(came_to_nothing, || format!("a ticket is in use without a reply to its caller: {unacknowledged:?}"));
    }
    for (user, count) in granted {
        let is_one = book.askers.get(user).is_some_and(|asker| asker.is_one);
        journal.check(!is_one || count == 1, || format!("{user} asked for one thing, and was granted {count}"));
    }
}

/// Asserts that a ticket is lost only after its EM stopped reporting it, or with its EM.
fn lost(journal: &Journal, book: &Book, lives: &HashMap<Uuid, Vec<&Line>>, history: &[Line]) {
    let of_ems = history.iter().filter(|line| line.ticket_id.is_none() && line.action == "lost");
    let gone: HashSet<_> = of_ems.map(|line| (&line.em, line.at)).collect();
    let mut reporting = HashSet::from(Hosts::REPORTING.map(|host| em(host).instance.to_string()));
    reporting.insert(em_of_crowd(Hosts::CROWDED).instance.to_string());
    for (em, at) in &gone {
        journal.check(reporting.contains(*em), || format!("{em} was lost at {at}, and never reported"));
    }
    for (id, life) in lives {
        let Some(end) = life.last().filter(|line| line.action == "lost") else { continue };
        let engine_gone = book.lives.get(id).is_some_and(|got| got.engine_gone);
        let got = || format!("{id} was lost although it was reported: {:?} {life:?}", book.lives.get(id));
        // The tickets of an unregistering EM end in steps.
        let went = gone.iter().any(|(em, at)| **em == end.em && life[0].at <= *at && *at <= end.at);
        journal.check(engine_gone || went, got);
    }
}

/// One ticket for each request id, which is that of the reply.
async fn request_ids(connection: &mut PgConnection, journal: &Journal, book: &Book) {
    let rows: Vec<(String, Uuid)> =
        sqlx::query_as("SELECT request_id, ticket_id FROM linkis_user_request_id").fetch_all(connection).await.unwrap();
    let kept: HashMap<String, Uuid> = rows.into_iter().collect();
    for (request_id, got) in &book.request_ids {
        let is_one = got.len() == 1 && got.iter().next() == kept.get(request_id);
        journal.check(is_one, || format!("{request_id} was answered with {got:?}, and is {:?}", kept.get(request_id)));
    }
}
