//! Replay: makes the recorded calls again, and compares each reply and each table hash with the journal.
//!
//! A reply of a waiting call may come one step early. A read is repeated until it matches, for [`PATIENCE`](crate::run::PATIENCE).
//! Never: changes the journal. Caller: `main`.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    time::{Duration, Instant},
};

use prost_reflect::{MessageDescriptor, MethodDescriptor};

use crate::{
    Settings,
    allowed::Allowed,
    file::{self, Answer, Arrived, Chapter, Journal, Kind},
    ids,
    run::{PATIENCE, REQUEST_RESOURCE, Run, methods_of, shortened},
    service::Postgres,
    wire,
};

/// Number of differences after which the replay of a chapter ends.
const DIFFERENCES_MAX: usize = 20;

pub async fn replay(settings: &Settings, postgres: &Postgres) -> Vec<String> {
    let journal = file::read(&settings.journal);
    let (_, methods) = methods_of(&journal.descriptors);
    let allowed = Allowed::read(include_str!("allowed.txt"));
    let chapters: Vec<&Chapter> = journal.chapters.iter().filter(|chapter| settings.has(&chapter.name)).collect();
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
    if settings.whole && settings.chapters.is_empty() && failures.is_empty() {
        failures.extend(allowed.unused().into_iter().map(|line| format!("allowed.txt: nothing needs: {line}")));
    }
    failures
}

/// Compares a reply with the recorded one, in which allowed new names replace the old ones. Returns the differences.
fn differences(allowed: &Allowed, descriptor: &MessageDescriptor, expected: &Answer, got: &Answer) -> Vec<String> {
    let mut got = got.clone();
    if !expected.hash.is_empty() {
        let mut fields = wire::decode(descriptor, &got.message).unwrap_or_default();
        rename(&mut fields, &|text| allowed.old_text(text));
        got.message = wire::encode(&fields);
        got = shortened(got);
    }
    let mut expected = expected.clone();
    let named = |kind: &str, text: &str| allowed.name(kind, text).to_owned();
    expected.reason = named("reason", &expected.reason);
    for answer in [&mut expected, &mut got] {
        answer.metadata.retain(|key, _| !allowed.is_left_out("metadata", key));
    }
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
        let decoded = |bytes: &[u8]| {
            let fields = wire::decode(descriptor, bytes).unwrap_or_default();
            ids::without(descriptor, fields, &mut |name, number| {
                allowed.is_left_out("field", &format!("{name}.{number}"))
            })
        };
        let (mut fields, got) = (decoded(&expected.message), decoded(&got.message));
        rename(&mut fields, &|text| allowed.text(text));
        wire::compare(Some(descriptor), "", &fields, &got, &mut found);
    }
    found
}

fn rename(fields: &mut wire::Fields, new: &dyn Fn(&str) -> String) {
    for (_, value) in fields {
        match value {
            wire::Value::Text(text) => *text = new(text),
            wire::Value::Message(fields) => rename(fields, new),
            _ => {}
        }
    }
}

/// Returns a reply as text.
pub fn text_of(descriptor: &MessageDescriptor, answer: &Answer) -> String {
    let mut lines = Vec::new();
    let fields = wire::decode(descriptor, &answer.message).unwrap_or_default();
    wire::compare(Some(descriptor), "", &Vec::new(), &fields, &mut lines);
    let failure = if answer.code == 0 { "" } else { &format!("{answer:?}") };
    format!("{}{failure}", lines.join("; ").replace("expected nothing, got ", ""))
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
    let names = (&chapter.name[..], &chapter.arguments[..], &chapter.tokens[..]);
    let mut run = Run::start(&settings.program, postgres, names, methods, allowed, 2).await;
    let (mut failures, mut number, mut segment) = (Vec::new(), 0u32, 0);
    // Replies that came one step earlier than in the recording.
    let mut early: Vec<Arrived> = Vec::new();
    for (index, step) in chapter.steps.iter().enumerate() {
        let expected: Vec<u32> = step.arrived.iter().map(|arrived| arrived.call).collect();
        let mut found = Vec::new();
        let mut what = format!("{} call {number}", chapter.name);
        let (mut settles, mut may_have_waited) = (true, false);
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
                let sent = wire::decode(&input, &call.request).unwrap_or_default();
                let is_left_out = |number: &u32| allowed.is_left_out("sent", &format!("{}.{number}", input.name()));
                let is_compared = !sent.iter().any(|(number, _)| is_left_out(number));
                settles = !call.reads;
                may_have_waited = Run::may_have_waited(path, &call.request);
                let begun = Instant::now();
                // The recorded service did not begin this call, so it changed nothing and is not repeated.
                let was_begun = call.answer.as_ref().is_none_or(|answer| answer.reason != "NOT_BEGUN");
                loop {
                    if !was_begun {
                        break;
                    }
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
                    let mut got = got;
                    run.leave_out(method, call, &mut got);
                    if is_compared {
                        found = differences(allowed, &method.output(), expected, &got);
                    }
                    if found.is_empty() || !call.reads || begun.elapsed() > PATIENCE {
                        run.note(&format!("{number} {path}"));
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
                run.change(&change.name, &arguments).await;
            }
            // `settle` below waits for the expected replies.
            Kind::Await(call) => write!(what, ": the end of call {call}").unwrap(),
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
        if settles && (may_have_waited || !run.open.is_empty() || !due.is_empty()) {
            arrived.extend(run.settle(&due).await);
        }
        // A wake-up may have been slower in the recording than now.
        let next = chapter.steps.get(index + 1).map(|next| &next.arrived[..]).unwrap_or_default();
        let is_early = |got: &Arrived| !expected.contains(&got.call) && next.iter().any(|next| next.call == got.call);
        (early, arrived) = arrived.into_iter().partition(is_early);
        arrived.sort_by_key(|arrived| arrived.call);
        let output = run.methods[REQUEST_RESOURCE].output();
        let calls: Vec<u32> = arrived.iter().map(|arrived| arrived.call).collect();
        if calls != expected {
            found.push(format!("these calls that waited should have been answered then: {expected:?}, not {calls:?}"));
        }
        for (expected, got) in step.arrived.iter().zip(&arrived) {
            if let (Some(expected), Some(got)) = (&expected.answer, &got.answer) {
                found.extend(
                    differences(allowed, &output, expected, got)
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
