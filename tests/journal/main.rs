//! The golden journal: calls to the service, recorded with all that came of them, and replayed against another build of the program.
//!
//!     cargo test --test journal                      # replays the first segment of each chapter
//!     cargo test --test journal -- replay            # replays everything
//!     cargo test --test journal -- record            # records anew, into tests/journal/journal.gz
//!
//! `--program FILE` takes another program than cargo's, `--journal FILE` another journal, `--chapter NAME` one chapter. `--dump FOLDER` writes each
//! answer and each table as text, so that `diff` can compare two runs.
//!
//! The journal judges a change that must not change behaviour. It depends on nothing of this package but the built program: messages are
//! decoded by the descriptors of the recording and compared by field numbers, tables are read by SQL. `allowed.txt` lists what may differ.
//!
//! - `generate`: the calls, by a seeded generator; only recording uses it;
//! - `file`: the journal's format; `wire`: messages as trees of field numbers; `ids`: identifiers and times are replaced;
//! - `tables`: all that knows of tables; `service`: the processes and the calls; `allowed`: the allowed differences.

mod allowed;
mod file;
mod generate;
mod ids;
mod service;
mod tables;
mod wire;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use prost::bytes::Bytes;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, MethodDescriptor};
use sha2::{Digest as _, Sha256};
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tonic::Status;
use tonic_types::StatusExt as _;

use allowed::Allowed;
use file::{Answer, Arrived, Call, Change, Chapter, Journal, Kind, Segment, Step};
use generate::{Action, Generator};
use ids::Ids;
use service::{Postgres, Service};

/// How many calls a segment has.
const SEGMENT: usize = 500;

/// How many segments a chapter has.
const SEGMENTS: usize = 4;

/// At how many differences the replay of a chapter ends.
const DIFFERENCES_MAX: usize = 20;

/// How long a replayed read is repeated, and an answer that the recording has is waited for.
const PATIENCE: Duration = Duration::from_secs(12);

const LIST_WAITING: &str = "/linkis.rm.v1.UsageService/ListWaiting";

struct Settings {
    record: bool,
    whole: bool,
    program: PathBuf,
    journal: PathBuf,
    chapter: Option<String>,
    dump: Option<PathBuf>,
}

fn settings() -> Option<Settings> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("journal");
    let program =
        std::env::var_os("LINKIS_RM_JOURNAL_PROGRAM").map_or_else(|| (*rm_tests::PROGRAM).into(), PathBuf::from);
    let journal = folder.join("journal.gz");
    let mut settings = Settings { record: false, whole: false, program, journal, chapter: None, dump: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} needs a value"));
        match argument.as_str() {
            "record" => settings.record = true,
            "replay" => settings.whole = true,
            "--program" => settings.program = value().into(),
            "--journal" => settings.journal = value().into(),
            "--chapter" => settings.chapter = Some(value()),
            "--dump" => settings.dump = Some(value().into()),
            "--test-threads" | "--skip" => drop(value()),
            "--list" => return None,
            // Options of the test harness that other targets have.
            _ if argument.starts_with('-') => {}
            // A filter for tests.
            _ if "journal".contains(argument.as_str()) => {}
            _ => return None,
        }
    }
    Some(settings)
}

fn main() -> std::process::ExitCode {
    let Some(settings) = settings() else { return std::process::ExitCode::SUCCESS };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let start = Instant::now();
    let failures = runtime.block_on(async {
        let postgres = Postgres::start();
        if settings.record { record(&settings, &postgres).await } else { replay(&settings, &postgres).await }
    });
    println!("journal: {:.0?}", start.elapsed());
    for failure in &failures {
        println!("{failure}");
    }
    if failures.is_empty() { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}

/// One chapter under way.
struct Run<'a> {
    service: Service,
    pool: PgPool,
    methods: &'a BTreeMap<String, MethodDescriptor>,
    allowed: &'a Allowed,
    ids: Ids,
    /// The calls that wait, by their numbers.
    open: BTreeMap<u32, (MethodDescriptor, JoinHandle<Result<Bytes, Status>>)>,
    dump: String,
    /// Polls in a row that have to list the same waiting requests.
    stable: u32,
}

impl Run<'_> {
    /// An answer as it is compared.
    fn normal(&mut self, method: &MethodDescriptor, result: &Result<Bytes, Status>) -> Answer {
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
        let listed = self.service.call(method, generate::ADMIN, 0, page_size).await.unwrap_or_default();
        (wire::delimited_fields(&listed).iter().filter(|(number, _)| *number == 1).count(), listed)
    }

    /// Waits until all calls that were answered have arrived, and what waits stays as it is.
    async fn settle(&mut self, expected: &[u32]) -> Vec<Arrived> {
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
            let answer = self.normal(&method, &answer.await.unwrap());
            arrived.push(Arrived { call, answer: Some(answer) });
        }
        arrived
    }

    /// Begins a call. `None` if it waits, and is open from now on.
    async fn send(
        &mut self,
        number: u32,
        method: &MethodDescriptor,
        call: &Call,
        bytes: Bytes,
        waits: bool,
    ) -> Option<Result<Bytes, Status>> {
        let path = path_of(method);
        let answer = self.service.call(self.allowed.name("method", &path), call.token, call.timeout, bytes);
        if !waits {
            return Some(answer.await);
        }
        let answer = tokio::spawn(answer);
        let start = Instant::now();
        while !answer.is_finished() && self.waiting().await.0 <= self.open.len() && start.elapsed() < PATIENCE {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        // A request that is granted at once is answered a moment after its entry is deleted.
        if answer.is_finished() {
            return Some(answer.await.unwrap());
        }
        self.open.insert(number, (method.clone(), answer));
        None
    }

    async fn tables(&mut self) -> Vec<file::Table> {
        let Self { pool, ids, allowed, dump, .. } = self;
        tables::tables(pool, ids, allowed, &mut |name, rows| {
            writeln!(dump, "TABLE {name}\n{}", rows.join("\n")).unwrap()
        })
        .await
    }

    fn note(&mut self, text: &str) {
        self.dump.push_str(text);
        self.dump.push('\n');
    }
}

fn path_of(method: &MethodDescriptor) -> String {
    format!("/{}/{}", method.parent_service().full_name(), method.name())
}

fn methods_of(descriptors: &[u8]) -> (DescriptorPool, BTreeMap<String, MethodDescriptor>) {
    let pool = DescriptorPool::decode(descriptors).unwrap();
    let methods = pool.services().flat_map(|service| service.methods().collect::<Vec<_>>());
    let methods = methods
        .filter(|method| method.full_name().starts_with("linkis.rm.v1."))
        .map(|method| (path_of(&method), method));
    let methods = methods.collect();
    (pool, methods)
}

fn is_read(path: &str) -> bool {
    path.contains("UsageService") || path.ends_with("Audit") || path.contains("/List")
}

async fn record(settings: &Settings, postgres: &Postgres) -> Vec<String> {
    let first = postgres.create("descriptors").await;
    let service = Service::start(&settings.program, postgres, "descriptors", &[]).await;
    let descriptors = service.descriptors().await;
    drop((first, service));
    let (_, methods) = methods_of(&descriptors);
    let names: Vec<String> = methods.keys().cloned().collect();
    let mut journal = Journal { descriptors, methods: names, chapters: Vec::new() };
    let wanted =
        generate::CHAPTERS.iter().filter(|name| settings.chapter.as_ref().is_none_or(|wanted| wanted == *name));
    let wanted: Vec<&'static str> = wanted.copied().collect();
    for pair in wanted.chunks(2) {
        let one = |name: &'static str| record_chapter(settings, postgres, &methods, &journal.methods, name);
        let chapters = match pair {
            [a, b] => {
                let (a, b) = tokio::join!(one(a), one(b));
                vec![a, b]
            }
            [a] => vec![one(a).await],
            _ => vec![],
        };
        journal.chapters.extend(chapters);
    }
    let mut met: BTreeMap<String, usize> = BTreeMap::new();
    for step in journal.chapters.iter().flat_map(|chapter| &chapter.steps) {
        let mut answers: Vec<&Answer> = step.arrived.iter().filter_map(|arrived| arrived.answer.as_ref()).collect();
        if let Some(Kind::Call(call)) = &step.kind {
            *met.entry(format!("call {}", journal.methods[call.method as usize])).or_default() += 1;
            answers.extend(&call.answer);
        }
        for answer in answers.iter().filter(|answer| answer.code != 0) {
            *met.entry(format!("reason {} {}", answer.code, answer.reason)).or_default() += 1;
        }
        *met.entry("arrived later".into()).or_default() += step.arrived.len();
    }
    for (what, count) in met {
        println!("{count:6} {what}");
    }
    // One chapter that is recorded anew takes the place of the one before.
    if settings.chapter.is_some() && settings.journal.exists() {
        let mut whole = file::read(&settings.journal);
        assert_eq!(whole.methods, journal.methods, "the calls have changed: record all chapters");
        for chapter in journal.chapters {
            whole.chapters.retain(|before| before.name != chapter.name);
            whole.chapters.push(chapter);
        }
        journal = whole;
    }
    file::write(&settings.journal, &journal);
    Vec::new()
}

async fn record_chapter(
    settings: &Settings,
    postgres: &Postgres,
    methods: &BTreeMap<String, MethodDescriptor>,
    names: &[String],
    name: &'static str,
) -> Chapter {
    let arguments: Vec<String> = generate::arguments(name);
    let (pool, allowed) = (postgres.create(name).await, Allowed::read(""));
    let service = Service::start(&settings.program, postgres, name, &arguments).await;
    let mut run = Run {
        service,
        pool,
        methods,
        allowed: &allowed,
        ids: Ids::default(),
        open: BTreeMap::new(),
        dump: String::new(),
        stable: 12,
    };
    let mut generator = Generator::new(name);
    let mut steps = Vec::new();
    let mut number = 0u32;
    while (number as usize) < SEGMENT * SEGMENTS {
        let action = generator.next();
        let mut step = Step::default();
        match action {
            Action::Cancel(call) => {
                if let Some((_, answer)) = run.open.remove(&call) {
                    answer.abort();
                    step.kind = Some(Kind::Cancel(call));
                }
                step.arrived = run.settle(&[]).await;
            }
            Action::Change(name, arguments) => {
                let arguments: Vec<String> = arguments;
                tables::change(&run.pool, name, &arguments, &allowed).await;
                let numbered = arguments
                    .iter()
                    .map(|text| run.ids.number_of(text).map_or(text.clone(), |number| format!("#{number}")));
                step.kind = Some(Kind::Change(Change { name: name.into(), arguments: numbered.collect() }));
                step.arrived = run.settle(&[]).await;
            }
            Action::Call(wanted) => {
                let method = &methods.get(&wanted.path()).unwrap_or_else(|| panic!("no {}", wanted.path()));
                let input = method.input();
                let bytes = wanted.bytes(&input);
                let tree = wanted.raw.is_none().then(|| wire::decode(&input, &bytes)).flatten();
                let request =
                    tree.as_ref().map_or(bytes.clone(), |tree| wire::encode(&run.ids.request(&input, tree.clone())));
                let sent = tree.as_ref().map_or(bytes, wire::encode);
                let index = names.iter().position(|name| *name == wanted.path()).unwrap();
                let mut call = Call {
                    method: index as u32,
                    request,
                    is_raw: tree.is_none(),
                    token: wanted.token,
                    timeout: wanted.timeout,
                    answer: None,
                    reads: is_read(&wanted.path()) || wanted.is_dry(),
                };
                let mut result = run.send(number, method, &call, sent.clone().into(), wanted.waits).await;
                // A late answer is recorded when it has stayed the same for so long.
                if let Some(late) = wanted.late {
                    let mut since = Instant::now();
                    let known = run.ids.len();
                    while since.elapsed() < late {
                        let before = run.normal(method, result.as_ref().unwrap());
                        run.ids.truncate(known);
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        result = run.send(number, method, &call, sent.clone().into(), false).await;
                        if run.normal(method, result.as_ref().unwrap()) != before {
                            since = Instant::now();
                        }
                        run.ids.truncate(known);
                    }
                }
                if let Some(result) = &result {
                    let answer = run.normal(method, result);
                    run.note(&format!(
                        "{number} {} {}: {} {} {:?}",
                        wanted.path(),
                        wanted.body,
                        answer.code,
                        answer.reason,
                        answer.metadata
                    ));
                    run.note(&format!("    {}", text_of(&method.output(), &answer)));
                    call.answer = Some(shortened(answer));
                    let output = result.as_ref().ok().map(|bytes| json_of(&method.output(), bytes));
                    generator.answered(number, &wanted, output.as_ref(), result.as_ref().err());
                } else {
                    generator.waits(number, &wanted);
                }
                let reads = call.reads;
                step.kind = Some(Kind::Call(call));
                if !run.open.is_empty() && !reads {
                    step.arrived = run.settle(&[]).await;
                }
                number += 1;
            }
        }
        for arrived in &mut step.arrived {
            let answer = arrived.answer.take().unwrap();
            let method = &methods["/linkis.rm.v1.ResourceManagerService/RequestResource"];
            run.note(&format!("    arrived {} {}", arrived.call, text_of(&method.output(), &answer)));
            generator.arrived(
                arrived.call,
                answer.code == 0 && granted_id(&answer).is_some(),
                granted_id(&answer).and_then(|id| run.ids.value(id)),
            );
            arrived.answer = Some(shortened(answer));
        }
        if step.kind.is_some() {
            steps.push(step);
        }
        if (number as usize).is_multiple_of(SEGMENT)
            && !matches!(steps.last(), Some(Step { kind: Some(Kind::Segment(_)), .. }))
            && number > 0
        {
            let tables = run.tables().await;
            steps.push(Step { kind: Some(Kind::Segment(Segment { tables })), arrived: Vec::new() });
        }
    }
    for (_, answer) in run.open.values() {
        answer.abort();
    }
    println!("recorded {name}: {number} calls");
    if let Some(folder) = &settings.dump {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(format!("{name}.txt")), &run.dump).unwrap();
    }
    Chapter { name: name.into(), arguments, steps }
}

/// The number of the ticket that an answer of RequestResource grants.
fn granted_id(answer: &Answer) -> Option<usize> {
    let inner = |bytes, wanted| {
        wire::delimited_fields(bytes).into_iter().find(|(number, _)| *number == wanted).map(|(_, bytes)| bytes)
    };
    let id = inner(inner(&answer.message, 1)?, 1)?;
    std::str::from_utf8(id).ok()?.strip_prefix('#')?.parse().ok()
}

fn json_of(descriptor: &MessageDescriptor, bytes: &[u8]) -> serde_json::Value {
    let message = DynamicMessage::decode(descriptor.clone(), bytes).unwrap();
    let options = prost_reflect::SerializeOptions::new().use_proto_field_name(true).stringify_64_bit_integers(false);
    message.serialize_with_options(serde_json::value::Serializer, &options).unwrap()
}

fn text_of(descriptor: &MessageDescriptor, answer: &Answer) -> String {
    let mut lines = Vec::new();
    let fields = wire::decode(descriptor, &answer.message).unwrap_or_default();
    wire::compare(Some(descriptor), "", &Vec::new(), &fields, &mut lines);
    format!("{} {:?}", lines.join("; "), answer.fields)
}

fn shortened(mut answer: Answer) -> Answer {
    if answer.message.len() > file::MESSAGE_MAX {
        answer.hash = Sha256::digest(&answer.message)[..12].to_vec();
        answer.message.clear();
    }
    answer
}

async fn replay(settings: &Settings, postgres: &Postgres) -> Vec<String> {
    let journal = file::read(&settings.journal);
    let (_, methods) = methods_of(&journal.descriptors);
    let allowed = Allowed::read(include_str!("allowed.txt"));
    let chapters: Vec<&Chapter> = journal
        .chapters
        .iter()
        .filter(|chapter| settings.chapter.as_ref().is_none_or(|name| *name == chapter.name))
        .collect();
    let mut failures = Vec::new();
    for pair in chapters.chunks(2) {
        let one = |chapter| replay_chapter(settings, postgres, &methods, &journal, &allowed, chapter);
        match pair {
            [a, b] => {
                let (a, b) = tokio::join!(one(a), one(b));
                failures.extend(a);
                failures.extend(b);
            }
            [a] => failures.extend(one(a).await),
            _ => {}
        }
    }
    if settings.whole && settings.chapter.is_none() && failures.is_empty() {
        failures.extend(allowed.unused().into_iter().map(|line| format!("allowed.txt: nothing needs: {line}")));
    }
    failures
}

/// Compares an answer with the recorded one; the words that are called otherwise are replaced in the recorded one.
fn differences(
    allowed: &Allowed,
    descriptor: &MessageDescriptor,
    expected: &Answer,
    got: &Answer,
    alone: bool,
) -> Vec<String> {
    let got = if expected.hash.is_empty() { got.clone() } else { shortened(got.clone()) };
    let mut expected = expected.clone();
    let named = |kind: &str, text: &str| allowed.name(kind, text).to_owned();
    expected.reason = named("reason", &expected.reason);
    expected.metadata =
        expected.metadata.iter().map(|(key, value)| (named("metadata", key), named("word", value))).collect();
    expected.fields = expected.fields.iter().map(|field| named("named", field)).collect();
    let mut found = Vec::new();
    let mut differ = |what: &str, expected: String, got: String| {
        if expected != got {
            found.push(format!("{what}: expected {expected}, got {got}"));
        }
    };
    differ("code", format!("{:?}", tonic::Code::from(expected.code)), format!("{:?}", tonic::Code::from(got.code)));
    differ("reason", expected.reason, got.reason);
    differ("metadata", format!("{:?}", expected.metadata), format!("{:?}", got.metadata));
    differ("BadRequest", format!("{:?}", expected.fields), format!("{:?}", got.fields));
    differ("QuotaFailure", format!("{:?}", expected.subjects), format!("{:?}", got.subjects));
    differ("RetryInfo", expected.retry.to_string(), got.retry.to_string());
    differ("hash of the message", format!("{:02x?}", expected.hash), format!("{:02x?}", got.hash));
    if expected.hash.is_empty() && expected.message != got.message {
        // Counters hold all that was committed together: while requests wait, a batch may grant one of them, too.
        let counters =
            descriptor.fields().find(|field| !alone && field.name() == "counters").map(|field| field.number());
        let decoded = |bytes: &[u8]| {
            let fields = wire::decode(descriptor, bytes).unwrap_or_default();
            ids::without(descriptor, fields, &mut |name, number| {
                (name == descriptor.name() && Some(number) == counters)
                    || allowed.is_left_out("field", &format!("{name}.{number}"))
            })
        };
        let (mut fields, got) = (decoded(&expected.message), decoded(&got.message));
        rename(allowed, &mut fields);
        wire::compare(Some(descriptor), "", &fields, &got, &mut found);
    }
    found
}

fn rename(allowed: &Allowed, fields: &mut wire::Fields) {
    for (_, value) in fields {
        match value {
            wire::Value::Text(text) => *text = allowed.name("word", text).to_owned(),
            wire::Value::Message(fields) => rename(allowed, fields),
            _ => {}
        }
    }
}

async fn replay_chapter(
    settings: &Settings,
    postgres: &Postgres,
    methods: &BTreeMap<String, MethodDescriptor>,
    journal: &Journal,
    allowed: &Allowed,
    chapter: &Chapter,
) -> Vec<String> {
    let start = Instant::now();
    let pool = postgres.create(&chapter.name).await;
    let service = Service::start(&settings.program, postgres, &chapter.name, &chapter.arguments).await;
    let mut run = Run {
        service,
        pool,
        methods,
        allowed,
        ids: Ids::default(),
        open: BTreeMap::new(),
        dump: String::new(),
        stable: 2,
    };
    let (mut failures, mut number, mut segment) = (Vec::new(), 0u32, 0);
    // Answers that came a step before the recording has them.
    let mut early: Vec<Arrived> = Vec::new();
    for (index, step) in chapter.steps.iter().enumerate() {
        let expected: Vec<u32> = step.arrived.iter().map(|arrived| arrived.call).collect();
        let mut found = Vec::new();
        let mut what = format!("{} call {number}", chapter.name);
        let mut settles = true;
        match step.kind.as_ref().unwrap() {
            Kind::Call(call) => {
                let path = &journal.methods[call.method as usize];
                let method = &run.methods[path];
                write!(what, " {path}").unwrap();
                let input = method.input();
                let bytes = if call.is_raw {
                    call.request.clone()
                } else {
                    wire::encode(&run.ids.fill(&input, wire::decode(&input, &call.request).unwrap()))
                };
                settles = !call.reads;
                let begun = Instant::now();
                loop {
                    let known = run.ids.len();
                    // Only a call that waits in the recording may stay open.
                    let result = run.send(number, method, call, bytes.clone().into(), call.answer.is_none()).await;
                    let (expected, got) = match (&call.answer, result) {
                        (Some(expected), Some(result)) => (expected, run.normal(method, &result)),
                        (None, Some(result)) => {
                            let got = run.normal(method, &result);
                            found = vec![format!("was answered at once: {}", text_of(&method.output(), &got))];
                            break;
                        }
                        (_, None) => break,
                    };
                    let alone = run.open.is_empty();
                    let (mut expected, mut got) = (expected.clone(), got);
                    if path.ends_with("RequestResource")
                        && wire::delimited_fields(&call.request).iter().all(|(field, _)| *field != 1)
                    {
                        // A rejected request for any EM names one of many EMs.
                        for answer in [&mut expected, &mut got] {
                            answer.metadata.retain(|key, _| !key.starts_with("em_"));
                        }
                    }
                    found = differences(allowed, &method.output(), &expected, &got, alone);
                    if found.is_empty() || !call.reads || begun.elapsed() > PATIENCE {
                        run.note(&format!("{number} {path}: {} {} {:?}", got.code, got.reason, got.metadata));
                        run.note(&format!("    {}", text_of(&method.output(), &got)));
                        break;
                    }
                    run.ids.truncate(known);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                number += 1;
            }
            Kind::Change(change) => {
                write!(what, " after {}", change.name).unwrap();
                let value = |text: &String| {
                    let id = text.strip_prefix('#').and_then(|number| run.ids.value(number.parse().ok()?));
                    id.map_or(text.clone(), str::to_owned)
                };
                let arguments: Vec<String> = change.arguments.iter().map(value).collect();
                tables::change(&run.pool, &change.name, &arguments, allowed).await;
            }
            Kind::Cancel(call) => {
                if let Some((_, answer)) = run.open.remove(call) {
                    answer.abort();
                }
            }
            Kind::Segment(recorded) => {
                settles = false;
                let tables = run.tables().await;
                for expected in recorded.tables.iter().filter(|table| !allowed.is_left_out("table", &table.name)) {
                    let got = tables.iter().find(|table| table.name == expected.name);
                    let same = got.is_some_and(|got| got.hash == expected.hash);
                    if !same {
                        let rows = got.map_or(0, |got| got.rows);
                        let columns = got.map(|got| got.columns.clone()).unwrap_or_default();
                        let kept = if columns == expected.columns {
                            String::new()
                        } else {
                            format!(", columns {:?}, not {columns:?}", expected.columns)
                        };
                        found.push(format!(
                            "after segment {segment}: table {} differs: {} rows, now {rows}{kept}",
                            expected.name, expected.rows
                        ));
                    }
                }
                segment += 1;
            }
        }
        let mut arrived = std::mem::take(&mut early);
        let due: Vec<u32> =
            expected.iter().copied().filter(|call| arrived.iter().all(|early| early.call != *call)).collect();
        if settles && !(run.open.is_empty() && due.is_empty()) {
            arrived.extend(run.settle(&due).await);
        }
        // A wake-up may take longer than the recording waited for it.
        let next = chapter.steps.get(index + 1).map(|next| &next.arrived[..]).unwrap_or_default();
        let is_early = |got: &Arrived| !expected.contains(&got.call) && next.iter().any(|next| next.call == got.call);
        (early, arrived) = arrived.into_iter().partition(is_early);
        arrived.sort_by_key(|arrived| arrived.call);
        let output = run.methods["/linkis.rm.v1.ResourceManagerService/RequestResource"].output();
        let calls: Vec<u32> = arrived.iter().map(|arrived| arrived.call).collect();
        if calls != expected {
            found.push(format!("these calls that waited should have been answered then: {expected:?}, not {calls:?}"));
        }
        for (expected, got) in step.arrived.iter().zip(&arrived) {
            if let (Some(expected), Some(got)) = (&expected.answer, &got.answer) {
                found.extend(
                    differences(allowed, &output, expected, got, false)
                        .into_iter()
                        .map(|text| format!("(answered then: a call that waited) {text}")),
                );
            }
        }
        failures.extend(found.into_iter().map(|text| format!("{what}: {text}")));
        if failures.len() >= DIFFERENCES_MAX {
            failures.truncate(DIFFERENCES_MAX);
            failures.push(format!("{}: replayed no further than call {number}", chapter.name));
            break;
        }
        if !settings.whole && segment == 1 {
            break;
        }
    }
    for (_, answer) in run.open.values() {
        answer.abort();
    }
    println!("replayed {}: {number} calls in {:.0?}, {} differences", chapter.name, start.elapsed(), failures.len());
    if let Some(folder) = &settings.dump {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(format!("{}.txt", chapter.name)), &run.dump).unwrap();
    }
    failures
}
