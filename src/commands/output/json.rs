//! JSON output: messages of the API in the proto3 mapping, with the field names of the schema.
//!
//! The embedded descriptors define the mapping, so the output equals the API in every field.

use std::sync::OnceLock;

use prost::Message;
use prost_reflect::{DescriptorPool, Kind, MessageDescriptor};
use serde_json::Value;

use rm_client::ApiCall;
use rm_edge::json::{dynamic, options};
use rm_proto::v1 as proto;

use super::text::is_harmful;

/// Error: the embedded schema lacks an expected element, which is a defect of the build.
#[derive(Debug, thiserror::Error)]
#[error("the reply does not match the schema of the API: {0}")]
pub struct SchemaError(String);

fn wrong(what: impl ToString) -> SchemaError {
    SchemaError(what.to_string())
}

/// Returns the reply type of a call.
pub fn answer_of<Q, A>(call: &ApiCall<Q, A>) -> Result<MessageDescriptor, SchemaError> {
    static POOL: OnceLock<Option<DescriptorPool>> = OnceLock::new();
    let pool = POOL.get_or_init(|| DescriptorPool::decode(proto::DESCRIPTORS).ok());
    let found = pool.as_ref().and_then(|pool| {
        let (service, method) = call.path().strip_prefix('/')?.split_once('/')?;
        pool.get_service_by_name(service)?.methods().find(|known| known.name() == method)
    });
    Ok(found.ok_or_else(|| wrong(call.path()))?.output())
}

/// Returns the element type of a repeated field.
pub fn items_of(message: &MessageDescriptor, field: &str) -> Result<MessageDescriptor, SchemaError> {
    match message.get_field_by_name(field).map(|field| field.kind()) {
        Some(Kind::Message(item)) => Ok(item),
        _ => Err(wrong(field)),
    }
}

/// Returns a message as JSON on one line.
pub fn line(descriptor: &MessageDescriptor, message: &impl Message) -> Result<String, SchemaError> {
    let mut json = Vec::new();
    let mut serializer = serde_json::Serializer::new(&mut json);
    let message = dynamic(descriptor, message).map_err(wrong)?;
    message.serialize_with_options(&mut serializer, &options()).map_err(wrong)?;
    Ok(harmless(&String::from_utf8(json).map_err(wrong)?))
}

/// Returns a message as JSON on several lines, each but the first indented by `indent`.
pub fn pretty(descriptor: &MessageDescriptor, message: &impl Message, indent: usize) -> Result<String, SchemaError> {
    let mut json = Vec::new();
    let mut serializer = serde_json::Serializer::pretty(&mut json);
    let message = dynamic(descriptor, message).map_err(wrong)?;
    message.serialize_with_options(&mut serializer, &options()).map_err(wrong)?;
    // Line ends in texts are escaped, so these are between tokens.
    Ok(harmless(&String::from_utf8(json).map_err(wrong)?.replace('\n', &format!("\n{}", " ".repeat(indent)))))
}

/// Returns all fields of a message except one, each as JSON.
pub fn fields_beside(
    descriptor: &MessageDescriptor,
    message: &impl Message,
    field: &str,
) -> Result<Vec<(String, String)>, SchemaError> {
    let message = dynamic(descriptor, message).map_err(wrong)?;
    let value = message.serialize_with_options(serde_json::value::Serializer, &options()).map_err(wrong)?;
    let Value::Object(fields) = value else { return Err(wrong(field)) };
    Ok(fields
        .into_iter()
        .filter(|(name, _)| name != field)
        .map(|(name, value)| (name, harmless(&value.to_string())))
        .collect())
}

/// Escapes characters that could control a terminal. Such characters occur only in JSON strings, and JSON itself escapes
/// only some of them.
fn harmless(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c != '\n' && is_harmful(c) {
            let escape = |unit: &mut u16| format!("\\u{unit:04x}");
            text.extend(c.encode_utf16(&mut [0; 2]).iter_mut().map(escape));
        } else {
            text.push(c);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use prost_reflect::DynamicMessage;

    use super::*;
    use rm_client::calls;

    #[test]
    fn json_matches_schema_without_control_characters() {
        let ticket = proto::Ticket {
            user: "a\u{9b}31m\u{202e}\u{e0001}\n".into(),
            locked_time: Some(prost_types::Timestamp { seconds: 1, nanos: 0 }),
            ..Default::default()
        };
        let answer = proto::GetTicketResponse { ticket: Some(ticket.clone()) };
        let descriptor = answer_of(&calls::GET_TICKET).unwrap();
        for text in [line(&descriptor, &answer).unwrap(), pretty(&descriptor, &answer, 2).unwrap()] {
            assert!(text.contains(r#"a\u009b31m\u202e\udb40\udc01\n"#), "{text}");
            assert!(!text.contains(|c: char| c != '\n' && is_harmful(c)), "{text}");
            let mut reader = serde_json::Deserializer::from_str(&text);
            let read = DynamicMessage::deserialize(descriptor.clone(), &mut reader).unwrap();
            let read = proto::GetTicketResponse::decode(read.encode_to_vec().as_slice()).unwrap();
            assert_eq!(read.ticket.as_ref(), Some(&ticket));
        }
        let value: Value = serde_json::from_str(&line(&descriptor, &answer).unwrap()).unwrap();
        let ticket = &value["ticket"];
        assert_eq!(ticket["locked_time"], "1970-01-01T00:00:01Z");
        assert!(ticket["labels"].is_object() && ticket.get("engine").is_none(), "{ticket}");
    }
}
