//! JSON API of the page: the reading calls, such as `GET /api/v1/ListTickets?user=alice&page_size=10`.
//!
//! A request becomes a gRPC call within the process, so the same permissions and bounds apply. Concurrent requests for
//! one list share a response if the caller accepts an age. Never: makes a changing call. Callers: the page and HTTP tools.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::{Path, RawQuery, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use prost_reflect::MethodDescriptor;
use tonic::{Code, Request, Status, codegen::http::header::AUTHORIZATION};

use crate::status::to_status;
use crate::{http::connection_lifetime::ConnectionLifetime, json};
use rm_service::error::Error;

use super::{PageServices, PageSlot, reply_cache::QueryKey, session};

/// Timeout of a call, below that of its connection.
const CALL_TIMEOUT: Duration = Duration::from_secs(4);

/// Service whose lists are shared between callers.
const LISTS: &str = "UsageService";
/// Maximum length of a shared query, in bytes. The queries of the page are shorter.
const QUERY_SHARED_MAX: usize = 256;

/// Error response of the JSON API.
#[derive(Debug)]
pub struct ApiErrorReply {
    status: StatusCode,
    message: String,
}

impl ApiErrorReply {
    /// Creates an error response with a status and a message.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl From<Error> for ApiErrorReply {
    fn from(error: Error) -> Self {
        to_status(error).into()
    }
}

impl From<Status> for ApiErrorReply {
    fn from(status: Status) -> Self {
        let code = match status.code() {
            Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists | Code::Aborted | Code::FailedPrecondition => StatusCode::CONFLICT,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::DeadlineExceeded | Code::Cancelled => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(code, status.message())
    }
}

impl IntoResponse for ApiErrorReply {
    fn into_response(self) -> Response {
        (self.status, json_answer(serde_json::json!({ "message": self.message }).to_string())).into_response()
    }
}

/// Returns a JSON response that no proxy may store, because it is for one caller.
pub fn json_answer(json: String) -> Response {
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    (headers, json).into_response()
}

/// Makes the reading call named in the path with the fields of the query, and returns its response as JSON.
///
/// # Errors
/// 404 for an unknown or changing call, 504 after the timeout, and the status of the call as HTTP.
pub async fn read(
    State(slot): State<PageSlot>,
    Extension(visit): Extension<Arc<ConnectionLifetime>>,
    Path(method): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, ApiErrorReply> {
    let site = slot.site()?;
    let method = site.schema.read(&method);
    let method = method.ok_or_else(|| ApiErrorReply::new(StatusCode::NOT_FOUND, "no reading call has this name"))?;
    let (query, shown) = (query.unwrap_or_default(), session::shown(&headers, &visit));
    let pairs = form_urlencoded::parse(query.as_bytes());
    let mut request = Request::new(json::question(method, pairs).map_err(Error::from)?);
    if let Some(shown) = &shown {
        let shown = shown.to_str().ok().and_then(|shown| shown.parse().ok());
        // A value that is no text is no existing token.
        let shown = shown.unwrap_or_else(|| tonic::metadata::AsciiMetadataValue::from_static("bearer"));
        request.metadata_mut().insert(AUTHORIZATION.as_str(), shown);
    }
    request.set_timeout(CALL_TIMEOUT);
    request.extensions_mut().insert(site.edge.visitor(visit.peer));
    let shared = match takes_older(&headers) {
        true => shared(&site, method, &query, shown, &visit)?,
        false => None,
    };
    let call = json::call(site.calls.clone(), method, request);
    let answer = async {
        match shared {
            Some(question) => site.answers.get(question, call).await.map(|answer| answer.to_string()),
            None => call.await,
        }
    };
    let answer = tokio::time::timeout(CALL_TIMEOUT, answer).await;
    let late =
        |_| ApiErrorReply::new(StatusCode::GATEWAY_TIMEOUT, "the service did not reply in time; repeat the call");
    Ok(json_answer(answer.map_err(late)??))
}

/// Returns true if the caller accepts a response that is a second old, by `Cache-Control: max-age`. The page does.
fn takes_older(headers: &HeaderMap) -> bool {
    let says = headers.get(header::CACHE_CONTROL).and_then(|says| says.to_str().ok()).unwrap_or_default();
    let age = says.split(',').find_map(|part| part.trim().strip_prefix("max-age=")?.parse::<u32>().ok());
    age.is_some_and(|seconds| seconds > 0)
}

/// Returns the key of a shared list for a caller with access to all of it; `None` if the response is not shared.
///
/// # Errors
/// The caller may not make the call.
fn shared(
    site: &PageServices,
    method: &MethodDescriptor,
    query: &str,
    shown: Option<HeaderValue>,
    visit: &ConnectionLifetime,
) -> Result<Option<QueryKey>, Error> {
    let service = method.parent_service();
    if service.name() != LISTS || !method.name().starts_with("List") || query.len() > QUERY_SHARED_MAX {
        return Ok(None);
    }
    let admitted = session::admit_to(site, &format!("/{}/{}", service.full_name(), method.name()), shown, visit)?;
    let (method, query) = (method.name().to_owned(), query.to_owned());
    let is_of_operator = admitted.is_of_operator();
    Ok(admitted.reach().is_all().then_some(QueryKey { method, query, is_of_operator }))
}

/// Returns a header value.
///
/// # Errors
/// A text that no header can have.
pub fn header_value(text: &str) -> Result<HeaderValue, ApiErrorReply> {
    HeaderValue::from_str(text).map_err(|_| ApiErrorReply::new(StatusCode::UNAUTHORIZED, "the token is not valid"))
}
