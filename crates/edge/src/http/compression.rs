//! Compression of responses over HTTP by gzip, for callers that accept it.
//!
//! Only complete bodies are compressed: an event stream has no length and passes unchanged. Caller: the HTTP listener.

use std::io::Write as _;

use axum::{
    body::{Body, HttpBody as _, to_bytes},
    extract::Request,
    http::{
        HeaderMap, HeaderValue,
        header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, VARY},
    },
    middleware::Next,
    response::Response,
};
use flate2::{Compression, write::GzEncoder};

/// Minimum length of a compressed body, in bytes. A shorter one fits into one packet anyway.
const LENGTH_MIN: usize = 1024;

/// Compresses the response to a request whose caller accepts gzip.
pub async fn compress(request: Request, next: Next) -> Response {
    let is_accepted = accepts_gzip(request.headers());
    let mut response = next.run(request).await;
    let length = response.body().size_hint().exact().and_then(|length| usize::try_from(length).ok());
    let Some(length) = length.filter(|length| *length >= LENGTH_MIN) else { return response };
    response.headers_mut().insert(VARY, HeaderValue::from_static("accept-encoding"));
    if !is_accepted {
        return response;
    }
    let (mut head, body) = response.into_parts();
    // A complete body is in memory already, so neither reading nor writing it fails.
    let body = to_bytes(body, length).await.unwrap_or_default();
    let mut writer = GzEncoder::new(Vec::new(), Compression::fast());
    let Ok(packed) = writer.write_all(&body).and_then(|()| writer.finish()) else {
        return Response::from_parts(head, Body::from(body));
    };
    head.headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    head.headers.remove(CONTENT_LENGTH);
    Response::from_parts(head, Body::from(packed))
}

/// Returns true if a caller names gzip, or any encoding, with a weight above zero.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|part| {
        let (name, weight) = part.split_once(';').unwrap_or((part, "q=1"));
        let weight = weight.trim().strip_prefix("q=").and_then(|weight| weight.parse::<f32>().ok());
        ["gzip", "*"].contains(&name.trim()) && weight.is_some_and(|weight| weight > 0.0)
    })
}
