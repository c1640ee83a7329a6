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
    file::{self, Answer, Arrived, Call},
    ids::Ids,
    service::{self, Postgres, Service},
    tables, wire,
};

/// Maximum time to repeat a read of a replay, and to wait for an expected reply.
pub const PATIENCE: Duration = Duration::from_secs(12);

const LIST_WAITING: &str = "/linkis.rm.v1.UsageService/ListWaiting";

pub const REQUEST_RESOURCE: &str = "/linkis.rm.v1.ResourceManagerService/RequestResource";

/// One chapter in progress.
pub struct Run<'a> {
    pub service: Service,
    pub pool: PgPool,
    pub methods: &'a BTreeMap<String, MethodDescriptor>,
    pub allowed: &'a Allowed,
    pub ids: Ids,
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
        let service = Service::start(program, postgres, name, arguments, secrets).await;
        let (ids, open, dump) = (Ids::default(), BTreeMap::new(), String::new());
        Self { service, pool, methods, allowed, ids, open, dump, stable }
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
        let start = Instant::now();
        let (mut before, mut same) = (Bytes::new(), 0);
        while start.elapsed() < PATIENCE {
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
                self.note(&format!("    call {call}: {status}"));
            }
            let answer = self.normal(&method, &result);
            arrived.push(Arrived { call, answer: Some(answer) });
        }
        arrived
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
        let answer = self.service.call(path, call.token, call.timeout, bytes);
        let answer = tokio::spawn(answer);
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

    pub async fn tables(&mut self) -> Vec<file::Table> {
        let Self { pool, ids, allowed, dump, .. } = self;
        tables::tables(pool, ids, allowed, &mut |name, rows| {
            writeln!(dump, "TABLE {name}\n{}", rows.join("\n")).unwrap()
        })
        .await
    }

    pub fn note(&mut self, text: &str) {
        self.dump.push_str(text);
        self.dump.push('\n');
    }
}

fn is_not_begun(status: &Status) -> bool {
    status.get_error_details().error_info().is_some_and(|info| info.reason == "NOT_BEGUN")
}

/// Replaces the error of a call with a deadline: the speed of the machine decides whether the service or the caller ends the call.
pub fn leave_out_end(call: &Call, answer: &mut Answer) {
    if call.timeout > 0 && answer.code != 0 {
        *answer = Answer { code: Code::DeadlineExceeded as i32, ..Answer::default() };
    }
}

/// Removes the EM from the rejection of a request for any EM: several EMs may reject it, and the reply names one of them.
pub fn leave_out_any_em(path: &str, request: &[u8], answer: &mut Answer) {
    if path.ends_with("RequestResource") && wire::delimited_fields(request).iter().all(|(field, _)| *field != 1) {
        answer.metadata.retain(|key, _| !key.starts_with("em_"));
    }
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
