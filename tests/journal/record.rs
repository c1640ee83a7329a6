//! Recording: makes the calls of the generator, and writes their replies and the table hashes of each segment to the journal.
//!
//! A reply is recorded only when the wait queue is stable, so that a replay can wait for the same state. Caller: `main`.

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use prost_reflect::{DynamicMessage, MessageDescriptor, MethodDescriptor};

use crate::{
    Settings,
    allowed::Allowed,
    file::{self, Answer, Call, Change, Chapter, Journal, Kind, Segment, Step},
    generate::{self, Action, Generator},
    replay::text_of,
    run::{REQUEST_RESOURCE, Run, is_read, methods_of, shortened},
    service::{Postgres, Service},
    wire,
};

/// Number of calls of a segment.
const SEGMENT: usize = 500;

/// Number of segments of a chapter.
const SEGMENTS: usize = 4;

/// Number of equal polls of the waiting requests after a call, and after a call of an administrator or a change of the cluster, which the
/// service may notice only at its next slow poll, within a second.
const STABLE: u32 = 7;
const STABLE_LATE: u32 = 150;

pub async fn record(settings: &Settings, postgres: &Postgres) -> Vec<String> {
    let first = postgres.create("descriptors").await;
    let service = Service::start(&settings.program, postgres, "descriptors", &[], Vec::new()).await;
    let descriptors = service.descriptors().await;
    drop((first, service));
    let (_, methods) = methods_of(&descriptors);
    let names: Vec<String> = methods.keys().cloned().collect();
    let mut journal = Journal { descriptors, methods: names, chapters: Vec::new() };
    let wanted: Vec<&'static str> = generate::CHAPTERS.iter().copied().filter(|name| settings.has(name)).collect();
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
    // Selected chapters replace the recorded ones; the other chapters stay.
    if !settings.chapters.is_empty() && settings.journal.exists() {
        let mut whole = file::read(&settings.journal);
        assert_eq!(whole.methods, journal.methods, "the calls have changed: record all chapters");
        whole.chapters.retain(|before| generate::CHAPTERS.contains(&&*before.name) && !settings.has(&before.name));
        whole.chapters.extend(journal.chapters);
        let order = |chapter: &Chapter| generate::CHAPTERS.iter().position(|name| *name == chapter.name);
        whole.chapters.sort_by_key(order);
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
    let (arguments, tokens, allowed) = (generate::arguments(name), generate::tokens(name), Allowed::read(""));
    let chapter = (name, &arguments[..], &tokens[..]);
    let mut run = Run::start(&settings.program, postgres, chapter, methods, &allowed, STABLE).await;
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
            Action::Await => {
                let call = number.saturating_sub(1);
                if run.open.contains_key(&call) {
                    step.kind = Some(Kind::Await(call));
                    step.arrived = run.settle(&[call]).await;
                }
            }
            Action::Change(name, arguments) => {
                let arguments: Vec<String> = arguments;
                run.change(name, &arguments).await;
                let numbered = arguments
                    .iter()
                    .map(|text| run.ids.number_of(text).map_or(text.clone(), |number| format!("#{number}")));
                step.kind = Some(Kind::Change(Change { name: name.into(), arguments: numbered.collect() }));
                run.stable = if name == "cluster_shows" { STABLE_LATE } else { STABLE };
                step.arrived = run.settle(&[]).await;
                run.stable = STABLE;
            }
            Action::Call(wanted) => {
                let method = &methods.get(&wanted.path()).unwrap_or_else(|| panic!("no {}", wanted.path()));
                let input = method.input();
                let bytes = wanted.bytes(&input);
                let tree = wanted.raw.is_none().then(|| wire::decode(&input, &bytes)).flatten();
                let is_raw = tree.is_none();
                let (request, sent) = match tree {
                    None => (bytes.clone(), bytes),
                    Some(tree) => {
                        let request = run.ids.request(&input, tree);
                        (wire::encode(&request), wire::encode(&run.ids.fill(&input, request)))
                    }
                };
                let index = names.iter().position(|name| *name == wanted.path()).unwrap();
                let mut call = Call {
                    method: index as u32,
                    request,
                    is_raw,
                    token: wanted.token,
                    timeout: wanted.timeout,
                    answer: None,
                    reads: is_read(&wanted.path()) || wanted.is_dry(),
                };
                let mut result = run.send(number, method, &call, sent.clone().into(), wanted.waits).await;
                // The result of a periodic task: recorded when it has not changed for `late`.
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
                run.note(&format!("{number} {} token {}", wanted.path(), wanted.token));
                if let Some(result) = &result {
                    let mut answer = run.normal(method, result);
                    run.leave_out(method, &call, &mut answer);
                    run.note(&format!("    {}", text_of(&method.output(), &answer)));
                    call.answer = Some(shortened(answer));
                    let output = result.as_ref().ok().map(|bytes| json_of(&method.output(), bytes));
                    generator.answered(number, &wanted, output.as_ref(), result.as_ref().err());
                } else {
                    generator.waits(number, &wanted);
                }
                let reads = call.reads;
                step.kind = Some(Kind::Call(call));
                if !reads && (!run.open.is_empty() || Run::may_have_waited(&wanted.path(), &sent)) {
                    let administers = ["AdminService", "LimitService"].iter().any(|name| wanted.path().contains(name));
                    run.stable = if administers { STABLE_LATE } else { STABLE };
                    step.arrived = run.settle(&[]).await;
                    run.stable = STABLE;
                }
                number += 1;
            }
        }
        for arrived in &mut step.arrived {
            let answer = arrived.answer.take().unwrap();
            let output = methods[REQUEST_RESOURCE].output();
            run.note(&format!("    arrived {}: {}", arrived.call, text_of(&output, &answer)));
            let available = &json_of(&output, &answer.message)["available"];
            let id = available["ticket_id"].as_str().and_then(|id| id.strip_prefix('#')?.parse().ok());
            generator.arrived(arrived.call, id.and_then(|id| run.ids.value(id)), available);
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
    Chapter { name: name.into(), arguments, steps, tokens }
}

fn json_of(descriptor: &MessageDescriptor, bytes: &[u8]) -> serde_json::Value {
    let message = DynamicMessage::decode(descriptor.clone(), bytes).unwrap();
    let options = prost_reflect::SerializeOptions::new().use_proto_field_name(true).stringify_64_bit_integers(false);
    message.serialize_with_options(serde_json::value::Serializer, &options).unwrap()
}
