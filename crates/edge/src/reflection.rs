//! Server reflection, v1 and v1alpha: descriptors of the services, by file name and by symbol.
//!
//! A failed query gets an error in the stream, and the stream continues, because tools send all their queries on one
//! stream. The next query is read when the caller has taken the previous response. Caller: the server of the root package.

use std::{pin::Pin, sync::Arc};

use prost_reflect::{DescriptorError, DescriptorPool, FileDescriptor};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_reflection::pb::{v1, v1alpha};

use crate::status::to_status;
use rm_model::name::FieldError;
use rm_service::error::Error;

use super::message_size::QUESTION_BYTES_MAX;
use rm_proto::v1 as proto;

/// Reflection service with the descriptors of one version.
#[derive(Debug, Clone)]
pub struct Reflection(Arc<Files>);

/// Descriptors of the services.
#[derive(Debug)]
struct Files {
    pool: DescriptorPool,
    services: Vec<String>,
}

/// Query of either version.
enum Question {
    File(String),
    Symbol(String),
    Extension { of: String, number: i32 },
    Extensions(String),
    Services,
}

/// Result of a query.
enum ReflectionReply {
    /// A file descriptor, as protobuf.
    File(Vec<u8>),
    /// Numbers of the extensions of a type.
    Extensions(String, Vec<i32>),
    /// Names of services.
    Services(Vec<String>),
}

impl Reflection {
    /// Creates the service of v1.
    ///
    /// # Errors
    /// Unreadable descriptors: a defect of the build.
    pub fn v1() -> Result<Self, DescriptorError> {
        Self::with(v1::FILE_DESCRIPTOR_SET)
    }

    /// Creates the service of v1alpha.
    ///
    /// # Errors
    /// Unreadable descriptors: a defect of the build.
    pub fn v1alpha() -> Result<Self, DescriptorError> {
        Self::with(v1alpha::FILE_DESCRIPTOR_SET)
    }

    fn with(reflection: &[u8]) -> Result<Self, DescriptorError> {
        let mut pool = DescriptorPool::new();
        // The last set has the details of errors, which tools display.
        for set in [
            proto::DESCRIPTORS,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            reflection,
            tonic_types::pb::FILE_DESCRIPTOR_SET,
        ] {
            pool.decode_file_descriptor_set(set)?;
        }
        let services = pool.services().map(|service| service.full_name().to_owned()).collect();
        Ok(Self(Arc::new(Files { pool, services })))
    }
}

impl Files {
    /// # Errors
    /// [`Code::NotFound`] if no descriptor has this name.
    fn find(&self, question: &Question) -> Result<ReflectionReply, Status> {
        let file = |file: Option<FileDescriptor>| file.map(|file| ReflectionReply::File(file.encode_to_vec()));
        let (found, what) = match question {
            Question::Services => return Ok(ReflectionReply::Services(self.services.clone())),
            Question::File(name) => (file(self.pool.get_file_by_name(name)), format!("file {name:?}")),
            Question::Symbol(name) => (file(self.file_of(name)), format!("symbol {name:?}")),
            Question::Extension { of, number } => {
                let message = self.pool.get_message_by_name(of);
                let extension = message.and_then(|of| of.get_extension(u32::try_from(*number).ok()?));
                (file(extension.map(|extension| extension.parent_file())), format!("extension {number} of {of:?}"))
            }
            Question::Extensions(of) => {
                let message = self.pool.get_message_by_name(of);
                let numbers =
                    message.map(|of| of.extensions().filter_map(|of| i32::try_from(of.number()).ok()).collect());
                (numbers.map(|numbers| ReflectionReply::Extensions(of.clone(), numbers)), format!("type {of:?}"))
            }
        };
        found.ok_or_else(|| Status::not_found(format!("no {what} exists here; ListServices lists the services")))
    }

    /// Returns the file of a type, a service, or a member of one.
    fn file_of(&self, symbol: &str) -> Option<FileDescriptor> {
        let pool = &self.pool;
        let whole = |name: &str| {
            let message = pool.get_message_by_name(name).map(|of| of.parent_file());
            let or_enum = message.or_else(|| pool.get_enum_by_name(name).map(|of| of.parent_file()));
            or_enum.or_else(|| pool.get_service_by_name(name).map(|of| of.parent_file()))
        };
        whole(symbol).or_else(|| pool.get_extension_by_name(symbol).map(|of| of.parent_file())).or_else(|| {
            let (outer, part) = symbol.rsplit_once('.')?;
            let has_part = pool.get_service_by_name(outer).is_some_and(|of| of.methods().any(|of| of.name() == part))
                || pool
                    .get_message_by_name(outer)
                    .is_some_and(|of| of.get_field_by_name(part).is_some() || of.oneofs().any(|of| of.name() == part))
                || pool.get_enum_by_name(outer).is_some_and(|of| of.get_value_by_name(part).is_some());
            if has_part { whole(outer) } else { None }
        })
    }
}

/// Returns the status of a stream of queries that cannot be read further.
fn unreadable(status: Status) -> Status {
    match status.code() {
        Code::Internal => {
            let problem = format!("cannot be read: {}", status.message());
            to_status(FieldError::new("the question", problem))
        }
        Code::OutOfRange => to_status(Error::MessageTooLarge { limit: QUESTION_BYTES_MAX }),
        _ => status,
    }
}

/// Implements one version. A macro, because the messages of the two versions have equal fields and different types.
macro_rules! serve {
    ($version:ident) => {
        #[tonic::async_trait]
        impl $version::server_reflection_server::ServerReflection for Reflection {
            type ServerReflectionInfoStream =
                Pin<Box<dyn Stream<Item = Result<$version::ServerReflectionResponse, Status>> + Send>>;

            async fn server_reflection_info(
                &self,
                questions: Request<Streaming<$version::ServerReflectionRequest>>,
            ) -> Result<Response<Self::ServerReflectionInfoStream>, Status> {
                use $version::{
                    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
                };
                let files = self.0.clone();
                let answer = move |request: $version::ServerReflectionRequest| {
                    let question = request.message_request.clone().map(|question| match question {
                        MessageRequest::FileByFilename(name) => Question::File(name),
                        MessageRequest::FileContainingSymbol(name) => Question::Symbol(name),
                        MessageRequest::FileContainingExtension(extension) => {
                            Question::Extension { of: extension.containing_type, number: extension.extension_number }
                        }
                        MessageRequest::AllExtensionNumbersOfType(name) => Question::Extensions(name),
                        MessageRequest::ListServices(_) => Question::Services,
                    });
                    let question = question.ok_or_else(|| Status::invalid_argument("message_request is required"));
                    let answer = match question.and_then(|question| files.find(&question)) {
                        Ok(ReflectionReply::File(file)) => {
                            MessageResponse::FileDescriptorResponse($version::FileDescriptorResponse {
                                file_descriptor_proto: vec![file],
                            })
                        }
                        Ok(ReflectionReply::Extensions(base_type_name, extension_number)) => {
                            MessageResponse::AllExtensionNumbersResponse($version::ExtensionNumberResponse {
                                base_type_name,
                                extension_number,
                            })
                        }
                        Ok(ReflectionReply::Services(names)) => {
                            MessageResponse::ListServicesResponse($version::ListServiceResponse {
                                service: names.into_iter().map(|name| $version::ServiceResponse { name }).collect(),
                            })
                        }
                        Err(status) => MessageResponse::ErrorResponse($version::ErrorResponse {
                            error_code: status.code().into(),
                            error_message: status.message().to_owned(),
                        }),
                    };
                    $version::ServerReflectionResponse {
                        valid_host: request.host.clone(),
                        original_request: Some(request),
                        message_response: Some(answer),
                    }
                };
                let answers = questions.into_inner().map(move |request| request.map(&answer).map_err(unreadable));
                Ok(Response::new(Box::pin(answers)))
            }
        }
    };
}

serve!(v1);
serve!(v1alpha);
