//! One chapter in progress: its database, its process, and its waiting calls. Callers: `record` and `replay`.
//!
//! Calls are made one at a time. A call that waits continues on its own stream, and the next call is made when `ListWaiting` shows it.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use prost::bytes::Bytes;
use prost_reflect::{DescriptorPool, MethodDescriptor};
use sha2::{Digest as _, Sha256};
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::{
    allowed::Allowed,
    cluster::{ADDRESS, Cluster},
    file::{self, Answer, Arrived, Call},
    ids::{Ids, replaced},
    service::{self, Postgres, Service},
    tables, wire,
};

/// Maximum time to repeat a read of a replay, and to wait for an expected reply.
pub const PATIENCE: Duration = Duration::from_secs(12);

/// Maximum time until the entry of an ended call leaves the wait queue.
const LEAVING: Duration = Duration::from_millis(300);

/// Number of calls after a change that the service answers before the next step, so that its tasks note the change meanwhile.
const POLLS_AFTER_CHANGE: usize = 30;

const LIST_WAITING: &str = "/linkis.rm.v1.UsageService/ListWaiting";

pub const REQUEST_RESOURCE: &str = "/linkis.rm.v1.ResourceManagerService/RequestResource";

/// Number of the field `wait_timeout` in its request.
const WAIT_TIMEOUT: u32 = 7;

/// One chapter in progress.
pub struct Run<'a> {
    pub service: Service,
    pub pool: PgPool,
    pub methods: &'a BTreeMap<String, MethodDescriptor>,
    pub allowed: &'a Allowed,
    pub ids: Ids,
    /// External cluster of a chapter whose arguments name one.
    cluster: Option<Cluster>,
    /// Waiting calls by number.
    pub open: BTreeMap<u32, (MethodDescriptor, JoinHandle<Result<Bytes, Status>>)>,
    pub dump: String,
    /// Number of consecutive equal polls after which the wait queue is stable.
    pub stable: u32,
}

impl<'a> Run<'a> {
    /// Starts the program on a new database.
    pub async fn start(
        program: &Path,
        postgres: &Postgres,
        chapter: (&str, &[String], &[String]),
        methods: &'a BTreeMap<String, MethodDescriptor>,
        allowed: &'a Allowed,
        stable: u32,
    ) -> Self {
        let (name, arguments, tokens) = chapter;
        let pool = postgres.create(name).await;
        let secrets = service::create_tokens(program, postgres, name, tokens);
        if !tokens.is_empty() {
            tables::remove_history(&pool, allowed).await;
        }
        let cluster = if arguments.iter().any(|text| text == ADDRESS) { Some(Cluster::start().await) } else { None };
        let ids = Ids::new(cluster.as_ref().map(|cluster| cluster.address.clone()));
        let arguments: Vec<String> = arguments.iter().map(|text| ids.with_address(text)).collect();
        let service = Service::start(program, postgres, name, &arguments, secrets).await;
        let (open, dump) = (BTreeMap::new(), String::new());
        Self { service, pool, methods, allowed, ids, cluster, open, dump, stable }
    }

    /// Returns the compared parts of a reply.
    pub fn normal(&mut self, method: &MethodDescriptor, result: &Result<Bytes, Status>) -> Answer {
        match result {
            Ok(bytes) => {
                let output = method.output();
                let Some(fields) = wire::decode(&output, bytes) else {
                    return Answer { reason: "the answer is no message of this kind".into(), ..Answer::default() };
                };
                let allowed = self.allowed;
                let fields = self.ids.answer(&output, fields, &mut |name, number| {
                    allowed.is_left_out("field", &format!("{name}.{number}"))
                });
                Answer { message: wire::encode(&fields), ..Answer::default() }
            }
            Err(status) => {
                let details = status.get_error_details();
                let mut answer =
                    Answer { code: status.code() as i32, retry: details.retry_info().is_some(), ..Answer::default() };
                if let Some(info) = details.error_info() {
                    answer.reason.clone_from(&info.reason);
                    let sorted: BTreeMap<_, _> = info.metadata.iter().collect();
                    answer.metadata =
                        sorted.into_iter().map(|(key, value)| (key.clone(), self.ids.metadata(key, value))).collect();
                }
                if let Some(request) = details.bad_request() {
                    answer.fields = request.field_violations.iter().map(|violation| violation.field.clone()).collect();
                }
                if let Some(failure) = details.quota_failure() {
                    answer.subjects =
                        failure.violations.iter().map(|violation| self.ids.text(&violation.subject)).collect();
                }
                answer
            }
        }
    }

    /// Returns the number of waiting requests, and the reply that lists them.
    async fn waiting(&self) -> (usize, Bytes) {
        let page_size = Bytes::from_static(&[1 << 3, 0xe8, 0x07]);
        let method = self.allowed.name("method", LIST_WAITING);
        let listed = self.service.call(method, self.service.admin(), 0, page_size).await.unwrap_or_default();
        (wire::delimited_fields(&listed).iter().filter(|(number, _)| *number == 1).count(), listed)
    }

    /// Waits for the `expected` replies and for a stable wait queue. Returns all replies to waiting calls that have arrived.
    pub async fn settle(&mut self, expected: &[u32]) -> Vec<Arrived> {
        // Without waiting calls, the entry of an ended one leaves. Positions of absent callers may stay for long.
        let patience = if expected.is_empty() && self.open.is_empty() { LEAVING } else { PATIENCE };
        let start = Instant::now();
        let (mut before, mut same) = (Bytes::new(), 0);
        while start.elapsed() < patience {
            let done = expected.iter().all(|call| self.open.get(call).is_none_or(|(_, answer)| answer.is_finished()));
            let (count, listed) = self.waiting().await;
            let open = self.open.values().filter(|(_, answer)| !answer.is_finished()).count();
            same = if done && count == open && listed == before { same + 1 } else { 0 };
            if same >= self.stable {
                break;
            }
            before = listed;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let finished: Vec<u32> =
            self.open.iter().filter(|(_, (_, answer))| answer.is_finished()).map(|(call, _)| *call).collect();
        let mut arrived = Vec::new();
        for call in finished {
            let (method, answer) = self.open.remove(&call).unwrap();
            let result = answer.await.unwrap();
            if let Err(status) = &result {
                let status = replaced(&status.to_string(), |uuid| self.ids.known(uuid));
                self.note(&format!("    call {call}: {status}"));
            }
            let answer = self.normal(&method, &result);
            arrived.push(Arrived { call, answer: Some(answer) });
        }
        arrived
    }

    /// Returns whether a call may have waited: its entry leaves the queue shortly after the reply.
    pub fn may_have_waited(path: &str, request: &[u8]) -> bool {
        path == REQUEST_RESOURCE && wire::delimited_fields(request).iter().any(|(number, _)| *number == WAIT_TIMEOUT)
    }

    /// Makes a call. Returns its result; `None` if the call waits and is now in `open`.
    pub async fn send(
        &mut self,
        number: u32,
        method: &MethodDescriptor,
        call: &Call,
        bytes: Bytes,
        waits: bool,
    ) -> Option<Result<Bytes, Status>> {
        let path = path_of(method);
        let path = self.allowed.name("method", &path);
        if !waits {
            // On a slow machine, a call may miss its deadline before it begins. Such a call changed nothing.
            for _ in 0..20 {
                let answer = self.service.call(path, call.token, call.timeout, bytes.clone()).await;
                if !answer.as_ref().is_err_and(is_not_begun) {
                    return Some(answer);
                }
            }
        }
        let answer = tokio::spawn(self.service.waiting_call(path, call.token, call.timeout, bytes));
        let start = Instant::now();
        // A request that is granted immediately may be listed for a moment, and its reply follows the deletion of its entry.
        let mut listed = 0;
        while !answer.is_finished() && listed < self.stable && start.elapsed() < PATIENCE {
            listed = if self.waiting().await.0 > self.open.len() { listed + 1 } else { 0 };
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if answer.is_finished() {
            return Some(answer.await.unwrap());
        }
        self.open.insert(number, (method.clone(), answer));
        None
    }

    /// Makes a change of the database or of the external cluster.
    pub async fn change(&self, name: &str, arguments: &[String]) {
        match &self.cluster {
            Some(cluster) if name == "cluster_shows" => {
                cluster.show(arguments[0].parse().unwrap());
                tables::next_snapshot(&self.pool).await;
            }
            _ => tables::change(&self.pool, name, arguments, self.allowed).await,
        }
        // A commit of the service is visible here before the service itself has noted it.
        for _ in 0..POLLS_AFTER_CHANGE {
            self.waiting().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn tables(&mut self) -> Vec<file::Table> {
        let Self { pool, ids, allowed, dump, .. } = self;
        tables::tables(pool, ids, allowed, &mut |name, rows| {
            writeln!(dump, "TABLE {name}\n{}", rows.join("\n")).unwrap()
        })
        .await
    }

    /// Removes from a reply what the speed of the machine or an equal choice decides.
    pub fn leave_out(&self, method: &MethodDescriptor, call: &Call, answer: &mut Answer) {
        // The service or the caller ends a call with a deadline.
        if call.timeout > 0 && answer.code != 0 {
            *answer = Answer { code: Code::DeadlineExceeded as i32, ..Answer::default() };
        }
        // Several EMs may reject a request for any EM, and the reply names one of them.
        let names_em = || wire::delimited_fields(&call.request).iter().any(|(field, _)| *field == 1);
        if path_of(method) == REQUEST_RESOURCE && !names_em() {
            answer.metadata.retain(|key, _| !key.starts_with("em_"));
        }
        // Counters are those after the batch, which may also grant waiting requests.
        let output = method.output();
        if !self.open.is_empty()
            && let Some(counters) = output.get_field_by_name("counters")
        {
            let mut fields = wire::decode(&output, &answer.message).unwrap_or_default();
            fields.retain(|(number, _)| *number != counters.number());
            answer.message = wire::encode(&fields);
        }
    }

    pub fn note(&mut self, text: &str) {
        self.dump.push_str(text);
        self.dump.push('\n');
    }
}

fn is_not_begun(status: &Status) -> bool {
    status.get_error_details().error_info().is_some_and(|info| info.reason == "NOT_BEGUN")
}

pub fn path_of(method: &MethodDescriptor) -> String {
    format!("/{}/{}", method.parent_service().full_name(), method.name())
}

pub fn methods_of(descriptors: &[u8]) -> (DescriptorPool, BTreeMap<String, MethodDescriptor>) {
    let pool = DescriptorPool::decode(descriptors).unwrap();
    let methods = pool.services().flat_map(|service| service.methods().collect::<Vec<_>>());
    let methods = methods
        .filter(|method| method.full_name().starts_with("linkis.rm.v1."))
        .map(|method| (path_of(&method), method));
    let methods = methods.collect();
    (pool, methods)
}

pub fn is_read(path: &str) -> bool {
    path.contains("UsageService") || path.ends_with("Audit") || path.contains("/List")
}

pub fn shortened(mut answer: Answer) -> Answer {
    if answer.message.len() > file::MESSAGE_MAX {
        answer.hash = Sha256::digest(&answer.message)[..12].to_vec();
        answer.message.clear();
    }
    answer
}
