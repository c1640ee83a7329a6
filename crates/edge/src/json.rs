//! JSON form of the API's reading calls, for callers without gRPC.
//!
//! The JSON follows the proto3 mapping, with the field names of the schema. A call is a reading call by its name:
//! `READS` lists the verbs. Changing and streaming calls are not reachable here. Callers: the monitoring page and its
//! JSON API in `http`.

use std::collections::HashMap;

use prost::{DecodeError, Message};
use prost_reflect::{
    DescriptorError, DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor,
    SerializeOptions,
};
use serde_json::{Map, Value};
use tonic::{
    Request, Status,
    body::Body,
    client::{Grpc, GrpcService},
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::{Body as HttpBody, Bytes, StdError, http::uri::PathAndQuery},
};

use crate::status::to_status;
use rm_model::name::FieldError;
use rm_service::error::Error;

use rm_proto::v1 as proto;

/// Package of the API.
const PACKAGE: &str = "linkis.rm.v1";

/// Name prefixes of the calls that read.
const READS: [&str; 3] = ["Get", "List", "BatchGet"];

/// Maximum size of a response, in bytes. A page of any list is far smaller.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Messages whose JSON form is a string instead of an object.
const TEXTS: [&str; 2] = ["google.protobuf.Timestamp", "google.protobuf.Duration"];

/// Reading calls by name, with the descriptors of their messages.
#[derive(Debug)]
pub struct ReadCalls {
    pool: DescriptorPool,
    reads: HashMap<String, MethodDescriptor>,
}

impl ReadCalls {
    /// Reads the descriptors of this release.
    ///
    /// # Errors
    /// Unreadable descriptors: a defect of the build.
    pub fn new() -> Result<Self, DescriptorError> {
        let pool = DescriptorPool::decode(proto::DESCRIPTORS)?;
        let is_read = |method: &MethodDescriptor| {
            let is_unary = !method.is_client_streaming() && !method.is_server_streaming();
            is_unary && READS.iter().any(|verb| method.name().starts_with(verb))
        };
        let services = pool.services().filter(|service| service.package_name() == PACKAGE);
        let methods: Vec<_> = services.flat_map(|service| service.methods().collect::<Vec<_>>()).collect();
        let reads = methods.into_iter().filter(is_read).map(|method| (method.name().to_owned(), method)).collect();
        Ok(Self { pool, reads })
    }

    /// Returns the reading call with this name.
    pub fn read(&self, name: &str) -> Option<&MethodDescriptor> {
        self.reads.get(name)
    }

    /// Converts a message to the fields of a JSON object. `name` is its message type.
    ///
    /// # Errors
    /// [`Error::Internal`] if the schema has no such message.
    pub fn fields(&self, name: &str, message: &impl Message) -> Result<Map<String, Value>, Error> {
        let descriptor = self.pool.get_message_by_name(&format!("{PACKAGE}.{name}"));
        let descriptor = descriptor.ok_or_else(|| Error::defect(format!("there is no message {name}")))?;
        let message = dynamic(&descriptor, message).map_err(|error| Error::defect(error.to_string()))?;
        match message.serialize_with_options(serde_json::value::Serializer, &options()) {
            Ok(Value::Object(fields)) => Ok(fields),
            Ok(_) => Err(Error::defect(format!("{name} is not an object"))),
            Err(error) => Err(Error::defect(error.to_string())),
        }
    }
}

/// Returns the options of the JSON form. Unset fields have their default, unless the default has another meaning.
pub fn options() -> SerializeOptions {
    SerializeOptions::new().use_proto_field_name(true).skip_default_fields(false)
}

/// Converts a message to a dynamic message of its descriptor.
///
/// # Errors
/// Bytes that do not match the descriptor.
pub fn dynamic(descriptor: &MessageDescriptor, message: &impl Message) -> Result<DynamicMessage, DecodeError> {
    DynamicMessage::decode(descriptor.clone(), message.encode_to_vec().as_slice())
}

/// Builds the request message of a call from query pairs.
///
/// A pair names a field by its path, such as `em.instance`, or a map entry by its key, such as `labels.rack`. A
/// repeated field has one pair per value; a message in it is a JSON object.
///
/// # Errors
/// The pair that names no field, or a value that its field cannot have.
pub fn question<K: AsRef<str>, V: AsRef<str>>(
    method: &MethodDescriptor,
    pairs: impl IntoIterator<Item = (K, V)>,
) -> Result<DynamicMessage, FieldError> {
    let (input, mut fields) = (method.input(), Map::new());
    for (path, text) in pairs {
        place(&mut fields, &input, path.as_ref(), text.as_ref())
            .ok_or_else(|| FieldError::new(path.as_ref(), format!("is no field of {}", input.name())))?;
    }
    let wrong = |error: serde_json::Error| FieldError::new("the query", format!("cannot be parsed: {error}"));
    DynamicMessage::deserialize(input, Value::Object(fields)).map_err(wrong)
}

/// Inserts a text at the path of a field; `None` if no such field exists.
fn place(fields: &mut Map<String, Value>, message: &MessageDescriptor, path: &str, text: &str) -> Option<()> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let field = message.get_field_by_name(name)?;
    let is_text = |message: &MessageDescriptor| TEXTS.contains(&message.full_name());
    let below = |fields: &mut Map<String, Value>| fields.entry(name).or_insert_with(|| Map::new().into()).is_object();
    match (field.kind(), rest) {
        _ if field.is_list() => {
            let listed = fields.entry(name).or_insert_with(|| Vec::<Value>::new().into());
            let is_message = matches!(field.kind(), Kind::Message(_));
            listed.as_array_mut()?.push(if is_message {
                serde_json::from_str(text).ok()?
            } else {
                scalar(&field, text)
            });
        }
        (_, Some(key)) if field.is_map() => {
            below(fields);
            fields.get_mut(name)?.as_object_mut()?.insert(key.to_owned(), text.into());
        }
        (Kind::Message(inner), Some(rest)) if !is_text(&inner) => {
            below(fields);
            place(fields.get_mut(name)?.as_object_mut()?, &inner, rest, text)?;
        }
        (Kind::Message(inner), None) if !is_text(&inner) => return None,
        (_, None) => drop(fields.insert(name.to_owned(), scalar(&field, text))),
        (_, Some(_)) => return None,
    }
    Some(())
}

/// Converts a text to a JSON value. Numbers and names of enums are strings in proto3 JSON.
fn scalar(field: &FieldDescriptor, text: &str) -> Value {
    match (field.kind(), text) {
        (Kind::Bool, "true") => true.into(),
        (Kind::Bool, "false") => false.into(),
        _ => text.into(),
    }
}

/// Makes a call on `service` and returns the response as JSON.
///
/// # Errors
/// The status of the service; `INTERNAL` if the response cannot be read or written.
pub async fn call<S>(service: S, method: &MethodDescriptor, request: Request<DynamicMessage>) -> Result<String, Status>
where
    S: GrpcService<Body>,
    S::ResponseBody: HttpBody<Data = Bytes> + Send + 'static,
    <S::ResponseBody as HttpBody>::Error: Into<StdError>,
{
    let wrong = |error: String| to_status(Error::defect(error));
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let path = PathAndQuery::try_from(path).map_err(|error| wrong(error.to_string()))?;
    let mut grpc = Grpc::new(service).max_decoding_message_size(ANSWER_BYTES_MAX);
    grpc.ready().await.map_err(|error| {
        let error: StdError = error.into();
        wrong(error.to_string())
    })?;
    let answer = grpc.unary(request, path, ReflectedCodec(method.output())).await?.into_inner();
    let mut json = Vec::new();
    let mut serializer = serde_json::Serializer::new(&mut json);
    answer.serialize_with_options(&mut serializer, &options()).map_err(|error| wrong(error.to_string()))?;
    String::from_utf8(json).map_err(|error| wrong(error.to_string()))
}

/// Codec that decodes responses by their descriptor.
#[derive(Debug, Clone)]
struct ReflectedCodec(MessageDescriptor);

impl Codec for ReflectedCodec {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = ReflectedEncoder;
    type Decoder = Self;

    fn encoder(&mut self) -> ReflectedEncoder {
        ReflectedEncoder
    }

    fn decoder(&mut self) -> Self {
        self.clone()
    }
}

impl Decoder for ReflectedCodec {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let answer = DynamicMessage::decode(self.0.clone(), bytes);
        answer.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Encoder of dynamic request messages.
#[derive(Debug)]
struct ReflectedEncoder;

impl Encoder for ReflectedEncoder {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, message: DynamicMessage, bytes: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message.encode(bytes).map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(method: &str, pairs: &[(&str, &str)]) -> Result<Value, FieldError> {
        let schema = ReadCalls::new().unwrap();
        let message = question(schema.read(method).unwrap(), pairs.iter().copied())?;
        let options = SerializeOptions::new().use_proto_field_name(true);
        Ok(message.serialize_with_options(serde_json::value::Serializer, &options).unwrap())
    }

    #[test]
    fn query_is_parsed_as_message() {
        let em = [("em.application_name", "ecm"), ("em.instance", "host1:9102"), ("page_size", "7")];
        let expected = serde_json::json!({"em": {"application_name": "ecm", "instance": "host1:9102"}, "page_size": 7});
        assert_eq!(parse("ListTickets", &em).unwrap(), expected);
        assert_eq!(parse("GetServerInfo", &[]).unwrap(), serde_json::json!({}));
        for (path, text) in [
            ("nothing", "1"),
            ("em", "host1"),
            ("em.nothing", "1"),
            ("page_size.x", "1"),
            ("page_size", "many"),
            ("page_size", "99999999999"),
            ("", ""),
            (".", ""),
            ("em..instance", ""),
        ] {
            assert!(parse("ListTickets", &[(path, text)]).is_err(), "{path}={text}");
        }
    }

    #[test]
    fn writing_calls_are_not_served_as_json() {
        let schema = ReadCalls::new().unwrap();
        for name in [
            "Register",
            "RequestResource",
            "SetLimit",
            "Repair",
            "Audit",
            "Drain",
            "ForceRelease",
            "ServerReflectionInfo",
        ] {
            assert!(schema.read(name).is_none(), "{name}");
        }
        let services: Vec<_> =
            schema.pool.services().flat_map(|service| service.methods().collect::<Vec<_>>()).collect();
        let reads = services.iter().filter(|method| READS.iter().any(|verb| method.name().starts_with(verb)));
        assert_eq!(schema.reads.len(), reads.count(), "no two have the same name");
    }
}
