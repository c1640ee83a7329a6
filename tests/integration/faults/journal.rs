//! Journal of the replies to callers.
//!
//! A reply has one of four results: done; not done, and the call may be repeated; rejected; or unknown. The database may contain the
//! change or not only if the result is unknown.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    env,
    error::Error as _,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use rm_client::{ClientError, ResourceRequest};
use rm_model::{adoption::AdoptTicket, operation::Grant, resource::Resource};
use time::OffsetDateTime;
use tonic::Code;
use uuid::Uuid;

use super::injector::REVOCATION;

/// Between two faults.
const NOTHING: &str = "nothing";

/// Longest time after the start of a fault until a caller gets the error of an unavailable database. It includes the timeout of
/// the database, a new connection, and a freeze of the instance.
pub const AWAY_MAX: Duration = Duration::from_secs(20);

/// Time after the start of a revocation in which an earlier call may still use the old token.
const REVOKED_FOR: Duration = Duration::from_secs(60);

/// Number of violations with full text; further ones are repetitions.
const VIOLATIONS_MAX: usize = 50;

/// How a call was answered.
#[derive(Debug)]
pub enum Answer<T> {
    Done(T),
    /// Nothing was changed, by the reply.
    Nothing,
    /// For a reason that the API documents.
    Rejected,
    /// It was done, or not, or will be.
    Unclear,
}

/// Life of a ticket, by the replies to its caller.
#[derive(Debug)]
pub struct Life {
    pub user: String,
    pub em: String,
    pub asked: Resource,
    pub expires_at: OffsetDateTime,
    /// Whether the confirmation had a reply.
    pub inited: bool,
    /// Whether a release was requested.
    pub init_asked: bool,
    /// Use in the last reply.
    pub reported: Option<Resource>,
    /// Whether a reply said that the ticket ended.
    pub over: bool,
    pub release_asked: bool,
    /// Whether its EM ceased to report it.
    pub engine_gone: bool,
    pub notes: Vec<String>,
}

/// Replies to all requests of a user.
#[derive(Debug, Default)]
pub struct Asker {
    /// Number of requests with an unknown result.
    pub unclear: usize,
    /// Whether all of them were one, repeated.
    pub is_one: bool,
}

/// Everything that is written down.
#[derive(Debug, Default)]
pub struct Book {
    pub calls: BTreeMap<&'static str, BTreeMap<String, u64>>,
    pub lives: HashMap<Uuid, Life>,
    pub askers: HashMap<String, Asker>,
    pub request_ids: HashMap<String, HashSet<Uuid>>,
    /// The ids under which engines may have been adopted.
    pub adopting: HashSet<Uuid>,
    /// The slowest reply that the database is unavailable, by the fault of that time.
    pub slowest: BTreeMap<&'static str, Duration>,
    pub violations: Vec<String>,
}

/// The record of all callers.
#[derive(Debug)]
pub struct Journal {
    start: Instant,
    book: Mutex<Book>,
    /// Current faults, and the time of the last one.
    broken: Mutex<(&'static str, Instant)>,
    /// End of the last fault.
    mended: Mutex<Instant>,
    /// Start and end of each past fault, by the clock of this machine, which the database uses too.
    outages: Mutex<Vec<(OffsetDateTime, OffsetDateTime)>>,
    /// Time of the last revocation of a token.
    revoked: Mutex<Option<Instant>>,
}

impl Journal {
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
            book: Mutex::default(),
            broken: Mutex::new((NOTHING, Instant::now())),
            mended: Mutex::new(Instant::now()),
            outages: Mutex::default(),
            revoked: Mutex::default(),
        }
    }

    pub fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap()
    }

    /// Returns a time on the journal's clock.
    pub fn clock(&self) -> String {
        format!("{:.3} s", self.start.elapsed().as_secs_f64())
    }

    /// Begins a fault.
    pub fn break_now(&self, what: &'static str) {
        if what == REVOCATION {
            *self.revoked.lock().unwrap() = Some(Instant::now());
        }
        *self.broken.lock().unwrap() = (what, Instant::now());
    }

    /// Records the end of a fault.
    #[expect(clippy::disallowed_methods, reason = "the database's clock is this machine's, and does not jump")]
    pub fn mended(&self) {
        let now = OffsetDateTime::now_utc();
        let (_, since) = std::mem::replace(&mut *self.broken.lock().unwrap(), (NOTHING, Instant::now()));
        self.outages.lock().unwrap().push((now - since.elapsed(), now));
        *self.mended.lock().unwrap() = Instant::now();
    }

    /// Returns the total time without a fault between two moments.
    pub fn calm_between(&self, from: OffsetDateTime, to: OffsetDateTime) -> Duration {
        let outages = self.outages.lock().unwrap();
        let within = outages.iter().map(|(begin, end)| (*end).min(to) - (*begin).max(from));
        let broken: time::Duration = within.filter(|time| time.is_positive()).sum();
        (to - from - broken).max(time::Duration::ZERO).unsigned_abs()
    }

    /// Returns the time since the last fault.
    pub fn calm(&self) -> Duration {
        match self.broken.lock().unwrap().0 {
            NOTHING => self.mended.lock().unwrap().elapsed(),
            _ => Duration::ZERO,
        }
    }

    /// Records a violation.
    pub fn violation(&self, what: String) {
        let what = format!("at {}, {} broken: {what}", self.clock(), self.broken.lock().unwrap().0);
        eprintln!("VIOLATION {what}");
        let violations = &mut self.book().violations;
        if violations.len() < VIOLATIONS_MAX {
            violations.push(what);
        }
    }

    pub fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.violation(what());
        }
    }

    /// Makes a call, and records its result.
    pub async fn call<T>(&self, kind: &'static str, call: impl Future<Output = Result<T, ClientError>>) -> Answer<T> {
        let start = Instant::now();
        match call.await {
            Ok(done) => {
                self.count(kind, "OK");
                Answer::Done(done)
            }
            Err(error) => self.failed(kind, &error, start.elapsed()),
        }
    }

    /// Records that a caller cancelled a call before its reply.
    pub fn cancelled(&self, kind: &'static str) {
        self.count(kind, "(gone away)");
    }

    fn count(&self, kind: &'static str, answer: &str) {
        *self.book().calls.entry(kind).or_default().entry(answer.to_owned()).or_default() += 1;
    }

    fn failed<T>(&self, kind: &'static str, error: &ClientError, took: Duration) -> Answer<T> {
        let Some(reason) = error.reason() else { return self.broke_on_the_way(kind, error) };
        self.count(kind, &reason);
        match reason.as_str() {
            "DATABASE_UNAVAILABLE" | "COMMIT_UNKNOWN" => {
                let (broken, since) = *self.broken.lock().unwrap();
                // A call may have survived an earlier fault: its instance froze, continued, and then lost its connections.
                let took = took.min(since.elapsed());
                let mut book = self.book();
                let slowest = book.slowest.entry(broken).or_default();
                *slowest = took.max(*slowest);
                drop(book);
                self.check(took < AWAY_MAX, || format!("{kind} was answered with {reason} after {took:?}"));
                if reason == "COMMIT_UNKNOWN" { Answer::Unclear } else { Answer::Nothing }
            }
            // The service ends a call at its deadline. If the client is faster, the error has no reason.
            "DEADLINE_EXPIRED" => Answer::Unclear,
            "LOCK_TIMEOUT" | "NOT_BEGUN" | "OVERLOADED" | "PLACE_LOST" => Answer::Nothing,
            // A request that waited with the old token: its grant of that moment expires.
            "TOKEN_REVOKED" => {
                let is_fair = self.revoked.lock().unwrap().is_some_and(|when| when.elapsed() < REVOKED_FOR);
                self.check(is_fair, || format!("{kind} was answered with {reason}, and nobody had revoked it"));
                Answer::Unclear
            }
            _ if expected(kind).contains(&reason.as_str()) => Answer::Rejected,
            _ => {
                self.violation(format!("{kind} was answered with {reason}: {error}"));
                Answer::Rejected
            }
        }
    }

    /// Returns the result of an error that is not from the service: a broken connection, or the timeout of the caller.
    fn broke_on_the_way<T>(&self, kind: &'static str, error: &ClientError) -> Answer<T> {
        let code = error.code().unwrap_or(Code::Internal);
        self.count(kind, &format!("({code:?})"));
        let from_transport = matches!(error, ClientError::Status(status) if status.source().is_some());
        // An earlier release may lack a call.
        let is_unknown = code == Code::Unimplemented && env::var("LINKIS_RM_FAULTS_OTHER").is_ok();
        let is_fair = matches!(code, Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded) || is_unknown;
        self.check(is_fair || from_transport, || format!("{kind} was answered with {error:?}"));
        Answer::Unclear
    }

    pub fn granted(&self, request: &ResourceRequest, grant: &Grant) {
        let note = format!("granted at {}", self.clock());
        let mut book = self.book();
        if let Some(id) = &request.request_id {
            book.request_ids.entry(id.clone()).or_default().insert(grant.ticket_id);
        }
        let life = book.lives.entry(grant.ticket_id).or_insert_with(|| Life {
            user: request.user.to_string(),
            em: grant.em.instance.to_string(),
            asked: request.resource.clone(),
            expires_at: grant.expires_at,
            inited: false,
            init_asked: false,
            reported: None,
            over: false,
            release_asked: false,
            engine_gone: false,
            notes: vec![],
        });
        life.notes.push(note);
    }

    /// Records that an adoption begins.
    pub fn adopting(&self, ticket_id: Uuid) {
        self.book().adopting.insert(ticket_id);
    }

    /// Records an adoption.
    pub fn adopted(&self, adopt: &AdoptTicket) {
        let note = format!("adopted at {}", self.clock());
        let life = Life {
            user: adopt.user.to_string(),
            em: adopt.em.instance.to_string(),
            asked: adopt.used.clone(),
            // An adopted ticket has no deadline.
            expires_at: OffsetDateTime::UNIX_EPOCH,
            inited: true,
            init_asked: true,
            reported: None,
            over: false,
            release_asked: false,
            engine_gone: false,
            notes: vec![note],
        };
        self.book().lives.insert(adopt.ticket_id, life);
    }

    /// Records a change of a granted ticket.
    pub fn note(&self, ticket_id: Uuid, note: &str, change: impl FnOnce(&mut Life)) {
        let note = format!("{note} at {}", self.clock());
        if let Some(life) = self.book().lives.get_mut(&ticket_id) {
            life.notes.push(note);
            change(life);
        }
    }

    /// Records the result of a request whose grant had no reply.
    pub fn asked(&self, request: &ResourceRequest, unclear: bool) {
        let mut book = self.book();
        let asker = book.askers.entry(request.user.to_string()).or_default();
        asker.unclear += usize::from(unclear);
    }

    /// Records that all requests of a user are repetitions of one.
    pub fn asks_one(&self, user: &str) {
        self.book().askers.entry(user.to_owned()).or_default().is_one = true;
    }
}

/// Returns the permitted rejections of a call.
fn expected(kind: &str) -> &'static [&'static str] {
    match kind {
        // A deleted limit also ends the label set that a cap needs.
        "request" | "dry run" => {
            &["EM_NOT_REGISTERED", "EM_DRAINING", "NO_EM_AVAILABLE", "TICKET_ENDED", "CAP_NOT_COUNTED"]
        }
        // The second call takes the position of the first over.
        "request sent twice" => &[
            "EM_NOT_REGISTERED",
            "EM_DRAINING",
            "NO_EM_AVAILABLE",
            "TICKET_ENDED",
            "CAP_NOT_COUNTED",
            "POSITION_TAKEN_OVER",
        ],
        "request to be turned away" => &["EM_NOT_REGISTERED", "EM_DRAINING", "EM_RESERVED", "LABEL_REQUIRED"],
        // Only for the caller's own registration.
        "fenced unregister" => &["EM_NOT_REGISTERED", "STALE_EPOCH"],
        "an older registration" => &["EM_NOT_REGISTERED", "STALE_EPOCH", "TICKET_NOT_FOUND"],
        "drain" | "resume" => &["EM_NOT_REGISTERED"],
        "adopt" => &["EM_NOT_REGISTERED", "TICKET_ENDED"],
        "adopt another" => &["EM_NOT_REGISTERED", "TICKET_ENDED", "TICKET_EXISTS"],
        "inited" => &["TICKET_NOT_FOUND", "NOT_ENOUGH_RESOURCE", "EM_NOT_REGISTERED", "EM_DRAINING"],
        "reported" => {
            &["TICKET_NOT_FOUND", "TICKET_NOT_INITED", "NOT_ENOUGH_RESOURCE", "EM_NOT_REGISTERED", "EM_DRAINING"]
        }
        "release of another's" | "release of nothing" => &["TICKET_NOT_FOUND"],
        "unregister" => &["EM_NOT_REGISTERED"],
        "heartbeat" => &["EM_NOT_REGISTERED", "STALE_REPORT"],
        "delete limit" => &["NO_SUCH_LIMIT"],
        "usage" => &["EM_NOT_REGISTERED", "TICKET_NOT_FOUND"],
        _ => &[],
    }
}
