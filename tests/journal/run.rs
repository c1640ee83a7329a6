//! One chapter under way: a database and a process of its own, calls to it, and the calls that wait.

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

/// How long a replayed read is repeated, and an answer that the recording has is waited for.
pub const PATIENCE: Duration = Duration::from_secs(12);

const LIST_WAITING: &str = "/linkis.rm.v1.UsageService/ListWaiting";

pub const REQUEST_RESOURCE: &str = "/linkis.rm.v1.ResourceManagerService/RequestResource";

/// One chapter under way.
pub struct Run<'a> {
    pub service: Service,
    pub pool: PgPool,
    pub methods: &'a BTreeMap<String, MethodDescriptor>,
    pub allowed: &'a Allowed,
    pub ids: Ids,
    /// The calls that wait, by their numbers.
    pub open: BTreeMap<u32, (MethodDescriptor, JoinHandle<Result<Bytes, Status>>)>,
    pub dump: String,
    /// Polls in a row that have to list the same waiting requests.
    pub stable: u32,
}

impl<'a> Run<'a> {
    /// Starts the program on a database of its own.
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

    /// An answer as it is compared.
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

    /// The requests that wait, and how many they are.
    async fn waiting(&self) -> (usize, Bytes) {
        let page_size = Bytes::from_static(&[1 << 3, 0xe8, 0x07]);
        let method = self.allowed.name("method", LIST_WAITING);
        let listed = self.service.call(method, self.service.admin(), 0, page_size).await.unwrap_or_default();
        (wire::delimited_fields(&listed).iter().filter(|(number, _)| *number == 1).count(), listed)
    }

    /// Waits until all calls that were answered have arrived, and what waits stays as it is.
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

    /// Begins a call. `None` if it waits, and is open from now on.
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
            // A slow machine may not begin a call in time: nothing was done.
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
        // A request that is granted at once may be listed for a moment, and is answered a moment after its entry is deleted.
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

/// Who ends a call at its deadline, the service or its caller, depends on the machine.
pub fn leave_out_end(call: &Call, answer: &mut Answer) {
    if call.timeout > 0 && answer.code != 0 {
        *answer = Answer { code: Code::DeadlineExceeded as i32, ..Answer::default() };
    }
}

/// Of many EMs that reject a request for any EM, one is named: it is left out.
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
