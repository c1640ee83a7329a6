//! Messages as trees of field numbers, so that a comparison does not depend on the name of a field.
//!
//! A descriptor of the recording decodes the tree. A field that the descriptor does not have is decoded by its wire type. The order is
//! canonical: fields by number, list elements as sent, map entries by their bytes. A scalar without presence that is zero is omitted.

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};

/// The fields of a message, in canonical order.
pub type Fields = Vec<(u32, Value)>;

/// One value of a field.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Int(u64),
    Fixed64(u64),
    Fixed32(u32),
    Text(String),
    Bytes(Vec<u8>),
    Message(Fields),
}

/// Decodes a message. `None` if the bytes are no message of this kind.
pub fn decode(descriptor: &MessageDescriptor, bytes: &[u8]) -> Option<Fields> {
    let mut fields = Fields::new();
    let mut input = Input(bytes);
    while !input.0.is_empty() {
        let key = input.varint()?;
        let number = u32::try_from(key >> 3).ok()?;
        let field = descriptor.get_field(number);
        match key & 7 {
            0 => fields.push((number, Value::Int(input.varint()?))),
            1 => fields.push((number, Value::Fixed64(u64::from_le_bytes(input.take(8)?.try_into().ok()?)))),
            5 => fields.push((number, Value::Fixed32(u32::from_le_bytes(input.take(4)?.try_into().ok()?)))),
            2 => {
                let length = usize::try_from(input.varint()?).ok()?;
                let bytes = input.take(length)?;
                delimited(field.as_ref(), number, bytes, &mut fields)?;
            }
            _ => return None,
        }
    }
    fields.retain(|(number, value)| !is_left_out(descriptor.get_field(*number).as_ref(), value));
    // A stable sort keeps the order of list elements.
    fields.sort_by(|(left, a), (right, b)| {
        let is_map = descriptor.get_field(*left).is_some_and(|field| field.is_map());
        left.cmp(right)
            .then_with(|| if left == right && is_map { bytes_of(a).cmp(&bytes_of(b)) } else { left.cmp(right) })
    });
    Some(fields)
}

fn delimited(field: Option<&FieldDescriptor>, number: u32, bytes: &[u8], fields: &mut Fields) -> Option<()> {
    let value = match field.map(FieldDescriptor::kind) {
        Some(Kind::Message(message)) => Value::Message(decode(&message, bytes)?),
        Some(Kind::String) => Value::Text(String::from_utf8(bytes.to_vec()).ok()?),
        Some(Kind::Int32 | Kind::Int64 | Kind::Uint32 | Kind::Uint64 | Kind::Bool | Kind::Enum(_)) => {
            let mut packed = Input(bytes);
            while !packed.0.is_empty() {
                fields.push((number, Value::Int(packed.varint()?)));
            }
            return Some(());
        }
        _ => Value::Bytes(bytes.to_vec()),
    };
    fields.push((number, value));
    Some(())
}

fn is_left_out(field: Option<&FieldDescriptor>, value: &Value) -> bool {
    field.is_some_and(|field| !field.supports_presence() && !field.is_list() && !field.is_map())
        && match value {
            Value::Int(value) | Value::Fixed64(value) => *value == 0,
            Value::Fixed32(value) => *value == 0,
            Value::Text(text) => text.is_empty(),
            Value::Bytes(bytes) => bytes.is_empty(),
            Value::Message(_) => false,
        }
}

fn bytes_of(value: &Value) -> Vec<u8> {
    encode(&vec![(1, value.clone())])
}

/// Encodes a message, without packed lists of numbers.
pub fn encode(fields: &Fields) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, value) in fields {
        let mut key = |wire: u64| put_varint(&mut out, u64::from(*number) << 3 | wire);
        match value {
            Value::Int(value) => {
                key(0);
                put_varint(&mut out, *value);
            }
            Value::Fixed64(value) => {
                key(1);
                out.extend(value.to_le_bytes());
            }
            Value::Fixed32(value) => {
                key(5);
                out.extend(value.to_le_bytes());
            }
            Value::Text(_) | Value::Bytes(_) | Value::Message(_) => {
                key(2);
                let bytes = match value {
                    Value::Text(text) => text.as_bytes().to_vec(),
                    Value::Bytes(bytes) => bytes.clone(),
                    Value::Message(fields) => encode(fields),
                    _ => Vec::new(),
                };
                put_varint(&mut out, bytes.len() as u64);
                out.extend(bytes);
            }
        }
    }
    out
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value as u8) | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = *self.take(1)?.first()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

/// Appends the paths at which two messages differ, each with both values: `4.1 resource.memory: 5, not 6`.
pub fn compare(
    descriptor: Option<&MessageDescriptor>,
    path: &str,
    expected: &Fields,
    got: &Fields,
    found: &mut Vec<String>,
) {
    let numbers: std::collections::BTreeSet<u32> = expected.iter().chain(got).map(|(number, _)| *number).collect();
    for number in numbers {
        let of = |fields: &Fields| -> Vec<Value> {
            fields.iter().filter(|(found, _)| *found == number).map(|(_, value)| value.clone()).collect()
        };
        let (expected, got) = (of(expected), of(got));
        if expected == got {
            continue;
        }
        let field = descriptor.and_then(|descriptor| descriptor.get_field(number));
        let name = field.as_ref().map_or("unknown", |field| field.name()).to_owned();
        let message = field.as_ref().and_then(|field| field.kind().as_message().cloned());
        for index in 0..expected.len().max(got.len()) {
            let here = if expected.len().max(got.len()) > 1 { format!("[{index}]") } else { String::new() };
            let path = format!("{path}/{number} {name}{here}");
            match (expected.get(index), got.get(index)) {
                (Some(expected), Some(got)) if expected == got => {}
                (Some(Value::Message(expected)), Some(Value::Message(got))) => {
                    compare(message.as_ref(), &path, expected, got, found);
                }
                (expected, got) => {
                    let show = |value: Option<&Value>| {
                        value.map_or("nothing".to_owned(), |value| show(message.as_ref(), value))
                    };
                    found.push(format!("{path}: expected {}, got {}", show(expected), show(got)));
                }
            }
        }
    }
}

/// Returns a value for display, at most 400 characters of it.
fn show(message: Option<&MessageDescriptor>, value: &Value) -> String {
    let mut text = whole(message, value);
    if let Some((cut, _)) = text.char_indices().nth(400) {
        text.truncate(cut);
        text.push('…');
    }
    text
}

fn whole(message: Option<&MessageDescriptor>, value: &Value) -> String {
    match value {
        Value::Int(value) => value.cast_signed().to_string(),
        Value::Fixed64(value) => f64::from_bits(*value).to_string(),
        Value::Fixed32(value) => value.to_string(),
        Value::Text(text) => format!("{text:?}"),
        Value::Bytes(bytes) => format!("{} bytes {bytes:?}", bytes.len()),
        Value::Message(fields) => {
            let field = |(number, value): &(u32, Value)| {
                let field = message.and_then(|message| message.get_field(*number));
                let name = field.as_ref().map_or("unknown", |field| field.name()).to_owned();
                format!(
                    "{number} {name}: {}",
                    whole(field.and_then(|field| field.kind().as_message().cloned()).as_ref(), value)
                )
            };
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Returns the fields of a message that are bytes, texts or messages.
pub fn delimited_fields(bytes: &[u8]) -> Vec<(u32, &[u8])> {
    let (mut input, mut fields) = (Input(bytes), Vec::new());
    while let Some(key) = input.varint() {
        let field = match key & 7 {
            0 => input.varint().map(|_| None),
            1 => input.take(8).map(|_| None),
            5 => input.take(4).map(|_| None),
            2 => input.varint().and_then(|length| input.take(length as usize)).map(Some),
            _ => None,
        };
        match field {
            Some(Some(bytes)) => fields.push(((key >> 3) as u32, bytes)),
            Some(None) => {}
            None => break,
        }
    }
    fields
}
