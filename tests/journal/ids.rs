//! Identifiers and times of one run: replaced before two runs are compared, because they differ between runs.
//!
//! An identifier is a UUID, an epoch, or a text of a field that [`TOKENS`] lists. It becomes a number in the order of appearance; a time
//! becomes a mark. Requests of the journal have placeholders, which [`Ids::fill`] replaces by the identifiers of the running service.
//! Callers: `run`, `record` and `replay`.

use std::collections::{BTreeMap, HashMap};

use prost_reflect::MessageDescriptor;

use crate::{
    cluster::ADDRESS,
    wire::{self, Fields, Value},
};

/// Fields whose whole text is an identifier of the service.
const TOKENS: &[&str] = &["page_token", "next_page_token", "follow_token", "position", "etag", "expected_etag"];

/// Fields that are not compared: message, field, and the reason. Names are those of the recording.
const LEFT_OUT: &[(&str, &str, &str)] = &[
    ("EmResource", "version", "counts the writes of a row, which batches decide"),
    ("ScopeUsage", "version", "begins with a time"),
    ("Overview", "throughput", "depends on time"),
    ("Overview", "scopes", "a periodic task writes it"),
    ("LineTotals", "longest_wait", "depends on time"),
    ("ServerInstance", "grants_per_second", "depends on time"),
    ("ServerInstance", "refusals_per_second", "depends on time"),
    ("ServerInstance", "address", "has a free port"),
    ("ServerInstance", "version", "is the release"),
    ("GetServerInfoResponse", "version", "is the release"),
    ("TaskStatus", "lag", "depends on time"),
    ("TaskStatus", "steps", "depends on time"),
    ("TaskStatus", "errors", "depends on time"),
    ("TaskStatus", "last_error", "prose"),
    ("TaskStatus", "last_run_time", "depends on time"),
    ("TaskStatus", "last_success_time", "depends on time"),
    ("UsageSum", "core_seconds", "depends on time"),
    ("UsageSum", "byte_seconds", "depends on time"),
    ("UsageSum", "queue_core_seconds", "depends on time"),
    ("UsageSum", "queue_byte_seconds", "depends on time"),
    ("UnknownTicket", "reason", "prose"),
    ("Difference", "problem", "prose"),
    ("AuditResponse", "notes", "prose"),
    ("AuditResponse", "scopes", "a periodic task removes counters of nothing"),
    ("WatchResponse", "em_changes", "depends on time"),
    ("GetQueueResponse", "age", "depends on time"),
    ("ListQueuesResponse", "age", "depends on time"),
    ("ListApplicationsResponse", "age", "depends on time"),
    ("QueueCheck", "age", "depends on time"),
];

/// Maximum number of placeholders for epochs. An epoch in a request of the journal is the negative number of its identifier; an epoch that is
/// [`LATER`] than an identifier follows below all of these.
const EPOCH_PLACEHOLDERS: u64 = 1 << 20;

/// Distance of an epoch of the future from the present one, so that it stays in the future however old the journal is.
pub const LATER: i64 = 1 << 40;

/// Mark of a placeholder in a text.
const MARK: char = '\u{1}';

/// Mark of a placeholder among 16 bytes.
const BYTES_MARK: &[u8; 12] = b"\x01journal-id:";

/// The identifiers of one run.
#[derive(Debug, Default)]
pub struct Ids {
    numbers: HashMap<String, u32>,
    values: Vec<String>,
    /// Address of the external cluster, if the run has one.
    cluster: Option<String>,
}

impl Ids {
    pub fn new(cluster: Option<String>) -> Self {
        Self { cluster, ..Self::default() }
    }

    /// Returns a text with the address of the external cluster of this run.
    pub fn with_address(&self, text: &str) -> String {
        self.cluster.as_ref().map_or(text.to_owned(), |cluster| text.replace(ADDRESS, cluster))
    }

    /// Returns the number of an identifier; a new identifier gets the next number.
    fn number(&mut self, value: &str) -> u32 {
        if let Some(number) = self.numbers.get(value) {
            return *number;
        }
        let number = self.values.len() as u32;
        self.numbers.insert(value.to_owned(), number);
        self.values.push(value.to_owned());
        number
    }

    /// Returns the text that replaces an identifier.
    pub fn known(&self, uuid: &str) -> String {
        self.numbers.get(uuid).map_or_else(|| "#?".to_owned(), |number| format!("#{number}"))
    }

    /// Returns a text of a reply without identifiers and times.
    pub fn text(&mut self, text: &str) -> String {
        replaced(text, |uuid| format!("#{}", self.number(uuid)))
    }

    /// Returns a value of `ErrorInfo.metadata` without identifiers and times.
    pub fn metadata(&mut self, key: &str, value: &str) -> String {
        match key {
            "epoch" | "current_epoch" | "oldest_position" => format!("#{}", self.number(value)),
            _ if key.ends_with("_time") || key.ends_with("_until") => "T".to_owned(),
            _ => self.text(value),
        }
    }

    /// Returns a reply without identifiers and times.
    pub fn answer(
        &mut self,
        descriptor: &MessageDescriptor,
        fields: Fields,
        left_out: &mut dyn FnMut(&str, u32) -> bool,
    ) -> Fields {
        let mut kept = Fields::new();
        for (number, value) in fields {
            let Some(field) = descriptor.get_field(number) else {
                kept.push((number, value));
                continue;
            };
            let is_left_out =
                LEFT_OUT.iter().any(|(message, name, _)| *message == descriptor.name() && *name == field.name());
            if is_left_out || left_out(descriptor.name(), number) {
                continue;
            }
            let message = field.kind().as_message().cloned();
            let value = match value {
                Value::Message(_) if message.as_ref().is_some_and(|message| message.name() == "Timestamp") => {
                    Value::Message(Fields::new())
                }
                Value::Message(fields) => match message {
                    Some(message) => Value::Message(self.answer(&message, fields, left_out)),
                    None => Value::Message(fields),
                },
                Value::Text(text) if TOKENS.contains(&field.name()) => Value::Text(format!("#{}", self.number(&text))),
                Value::Text(text) => Value::Text(self.text(&text)),
                Value::Int(epoch) if field.name() == "epoch" => Value::Int(u64::from(self.number(&epoch.to_string()))),
                value => value,
            };
            kept.push((number, value));
        }
        if descriptor.name() == "ListRefusalsResponse" { without_periods(kept) } else { kept }
    }

    /// Returns a request with placeholders for all known identifiers.
    pub fn request(&self, descriptor: &MessageDescriptor, fields: Fields) -> Fields {
        let placeholder = |number: &u32| format!("{MARK}{number}{MARK}");
        self.map(descriptor, fields, &|ids, name, value| match value {
            Value::Text(text) if TOKENS.contains(&name) => {
                Value::Text(ids.numbers.get(&text).map_or(text, placeholder))
            }
            Value::Text(text) => Value::Text(replaced_uuids(&text, |uuid| {
                ids.numbers.get(&uuid.to_lowercase()).map_or_else(|| uuid.to_owned(), placeholder)
            })),
            Value::Bytes(bytes) if bytes.len() % 16 == 0 => {
                let chunk = |chunk: &[u8]| {
                    let uuid = uuid::Uuid::from_slice(chunk).unwrap_or_default().to_string();
                    ids.numbers
                        .get(&uuid)
                        .map_or(chunk.to_vec(), |number| [&BYTES_MARK[..], &number.to_be_bytes()].concat())
                };
                Value::Bytes(bytes.chunks(16).flat_map(chunk).collect())
            }
            Value::Int(epoch) if name == "epoch" => {
                let number = |epoch: u64| ids.number_of(&epoch.to_string()).map(u64::from);
                let later = || number(epoch.wrapping_sub(LATER as u64)).map(|number| number + EPOCH_PLACEHOLDERS);
                Value::Int(number(epoch).or_else(later).map_or(epoch, |number| (number + 1).wrapping_neg()))
            }
            value => value,
        })
    }

    /// Returns a request of the journal with the identifiers of this run.
    pub fn fill(&self, descriptor: &MessageDescriptor, fields: Fields) -> Fields {
        let value_of =
            |number: usize| self.values.get(number).cloned().unwrap_or_else(|| format!("no identifier {number}"));
        self.map(descriptor, fields, &|_, name, value| match value {
            Value::Text(text) if text.contains(MARK) => {
                let parts = text.split(MARK).enumerate();
                Value::Text(
                    parts
                        .map(|(index, part)| {
                            if index % 2 == 1 { value_of(part.parse().unwrap_or(usize::MAX)) } else { part.to_owned() }
                        })
                        .collect(),
                )
            }
            Value::Text(text) => Value::Text(self.with_address(&text)),
            Value::Bytes(bytes) if bytes.len() % 16 == 0 => {
                let chunk = |chunk: &[u8]| match chunk.strip_prefix(BYTES_MARK) {
                    Some(number) => {
                        let number = u32::from_be_bytes(number.try_into().unwrap_or_default());
                        uuid::Uuid::parse_str(&value_of(number as usize)).unwrap_or_default().as_bytes().to_vec()
                    }
                    None => chunk.to_vec(),
                };
                Value::Bytes(bytes.chunks(16).flat_map(chunk).collect())
            }
            // `!epoch` is `-epoch - 1`.
            Value::Int(epoch) if name == "epoch" && !epoch < 2 * EPOCH_PLACEHOLDERS => {
                let known: u64 = value_of((!epoch % EPOCH_PLACEHOLDERS) as usize).parse().unwrap_or_default();
                Value::Int(if !epoch < EPOCH_PLACEHOLDERS { known } else { known + LATER as u64 })
            }
            value => value,
        })
    }

    fn map(
        &self,
        descriptor: &MessageDescriptor,
        fields: Fields,
        change: &dyn Fn(&Self, &str, Value) -> Value,
    ) -> Fields {
        let one = |(number, value)| {
            let Some(field) = descriptor.get_field(number) else { return (number, value) };
            let value = match (value, field.kind().as_message()) {
                (Value::Message(fields), Some(message)) => Value::Message(self.map(message, fields, change)),
                (value, _) => change(self, field.name(), value),
            };
            (number, value)
        };
        fields.into_iter().map(one).collect()
    }

    /// Returns the identifier with this number.
    pub fn value(&self, number: usize) -> Option<&str> {
        self.values.get(number).map(String::as_str)
    }

    /// Returns the number of a known identifier.
    pub fn number_of(&self, value: &str) -> Option<u32> {
        self.numbers.get(value).copied()
    }
}

/// Adds the refusal sums of all periods of five minutes, because the end of a period depends on the start of the run.
fn without_periods(fields: Fields) -> Fields {
    const SUM: u32 = 1;
    const REFUSALS: u32 = 8;
    const OTHERS: u32 = 12;
    // By user, scope, dimension and limit. The latest period is the first and has the last amounts.
    let mut sums: BTreeMap<Vec<u8>, (u64, Fields)> = BTreeMap::new();
    let mut kept = Fields::new();
    for (number, value) in fields {
        let Value::Message(sum) = value else {
            kept.push((number, value));
            continue;
        };
        let is_key = |number: u32| (3..REFUSALS).contains(&number) || number == OTHERS;
        let key: Fields = sum.iter().filter(|(number, _)| is_key(*number)).cloned().collect();
        let count = |(number, value): &(u32, Value)| match value {
            Value::Int(count) if *number == REFUSALS => *count,
            _ => 0,
        };
        let count: u64 = sum.iter().map(count).sum();
        sums.entry(wire::encode(&key)).or_insert_with(|| (0, sum)).0 += count;
    }
    let added = sums.into_values().map(|(count, mut sum)| {
        for (number, value) in &mut sum {
            if *number == REFUSALS {
                *value = Value::Int(count);
            }
        }
        (SUM, Value::Message(sum))
    });
    added.chain(kept).collect()
}

/// Returns a message without the fields of [`LEFT_OUT`] and those that `left_out` selects.
pub fn without(descriptor: &MessageDescriptor, fields: Fields, left_out: &mut dyn FnMut(&str, u32) -> bool) -> Fields {
    let mut kept = Fields::new();
    for (number, value) in fields {
        let field = descriptor.get_field(number);
        let is_left_out = field.as_ref().is_some_and(|field| {
            LEFT_OUT.iter().any(|(message, name, _)| *message == descriptor.name() && *name == field.name())
        });
        if is_left_out || left_out(descriptor.name(), number) {
            continue;
        }
        let value = match (value, field.and_then(|field| field.kind().as_message().cloned())) {
            (Value::Message(fields), Some(message)) => Value::Message(without(&message, fields, left_out)),
            (value, _) => value,
        };
        kept.push((number, value));
    }
    kept
}

/// Returns a text with replaced UUIDs, times and ports of this machine.
pub fn replaced(text: &str, uuid: impl FnMut(&str) -> String) -> String {
    let text = replaced_uuids(text, uuid);
    let text = replaced_words(&text, time_length, "T");
    let text = replaced_words(&text, port_length, "127.0.0.1:P");
    replaced_words(&text, age_length, "N s ago")
}

fn replaced_uuids(text: &str, mut change: impl FnMut(&str) -> String) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let is_uuid = |candidate: &&str| {
            candidate.bytes().enumerate().all(|(index, byte)| match index {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => byte.is_ascii_hexdigit(),
            })
        };
        if let Some(found) = rest.get(..36).filter(is_uuid) {
            out.push_str(&change(found));
            rest = &rest[36..];
        } else {
            out.push(next);
            rest = &rest[next.len_utf8()..];
        }
    }
    out
}

fn replaced_words(text: &str, length: impl Fn(&str) -> Option<usize>, by: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        if let Some(length) = length(rest) {
            out.push_str(by);
            rest = &rest[length..];
        } else {
            out.push(next);
            rest = &rest[next.len_utf8()..];
        }
    }
    out
}

/// Returns the length of the time at the start of a text: `2026-11-21T02:10:07.695009Z`, also with a blank and an offset.
fn time_length(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let begins = b"dddd-dd-ddTdd:dd:dd".iter().enumerate().all(|(index, form)| match (form, bytes.get(index)) {
        (b'd', Some(byte)) => byte.is_ascii_digit(),
        (b'T', Some(byte)) => matches!(byte, b'T' | b' '),
        (form, Some(byte)) => form == byte,
        (_, None) => false,
    });
    let rest = bytes.get(19..)?.iter();
    begins.then(|| {
        19 + rest.take_while(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'Z' | b'+' | b':')).count()
    })
}

/// Returns the length of the age at the start of a text: `12 s ago`.
fn age_length(text: &str) -> Option<usize> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    (digits > 0 && text[digits..].starts_with(" s ago")).then_some(digits + " s ago".len())
}

fn port_length(text: &str) -> Option<usize> {
    let port = text.strip_prefix("127.0.0.1:")?;
    Some("127.0.0.1:".len() + port.bytes().take_while(u8::is_ascii_digit).count())
}

impl Ids {
    /// Returns the number of known identifiers.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Removes all identifiers after the first `length`.
    pub fn truncate(&mut self, length: usize) {
        for value in self.values.drain(length..) {
            self.numbers.remove(&value);
        }
    }
}
