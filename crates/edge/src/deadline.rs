//! Deadlines of calls: until the caller's own gRPC deadline, and at most the server's timeout.
//!
//! The edge reads [`of_headers`] and ends a call at its deadline. The services use [`of_call`], which ends a wait
//! earlier, so that the response still reaches the caller.

use std::time::Duration;

use tokio::time::Instant;
use tonic::{codegen::http::HeaderMap, metadata::MetadataMap};

use rm_model::name::FieldError;

/// Header with the timeout that the caller gives the call.
const TIMEOUT: &str = "grpc-timeout";

/// Time that is kept for the response to reach the caller: this fraction of the caller's timeout, between the two
/// bounds. Many callers may share one deadline, and all of them get a response before it.
const MARGIN_PART: u32 = 10;
const MARGIN_MIN: Duration = Duration::from_millis(20);
const MARGIN_MAX: Duration = Duration::from_millis(500);

/// Returns the end of the wait of a call that arrives now. The wait takes at most `longest`, and leaves time for the
/// response. A malformed timeout counts as none.
pub fn of_call(metadata: &MetadataMap, longest: Duration) -> Instant {
    let timeout = metadata.get(TIMEOUT).and_then(|value| value.to_str().ok()).and_then(parse_timeout);
    let margin = |timeout: Duration| (timeout / MARGIN_PART).clamp(MARGIN_MIN, MARGIN_MAX).min(timeout / 4);
    let wait = timeout.map_or(longest, |timeout| longest.min(timeout.saturating_sub(margin(timeout))));
    Instant::now() + wait
}

/// Returns the timeout in the headers of a call; `None` if the caller states none.
///
/// # Errors
/// A malformed header.
pub fn of_headers(headers: &HeaderMap) -> Result<Option<Duration>, FieldError> {
    let Some(value) = headers.get(TIMEOUT) else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(parse_timeout);
    let problem = "is not a timeout; send 1 to 8 digits and a unit of H, M, S, m, u or n, such as 500m";
    timeout.map(Some).ok_or_else(|| FieldError::new(TIMEOUT, problem))
}

/// Parses a `grpc-timeout` header: up to eight digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let amount = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeout_header_is_parsed() {
        for (text, parsed) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("99999999H", Some(Duration::from_secs(359_999_996_400))),
            ("250m", Some(Duration::from_millis(250))),
            ("7n", Some(Duration::from_nanos(7))),
            ("", None),
            ("S", None),
            ("-1S", None),
            ("1x", None),
            ("100000000S", None),
            ("1ü", None),
        ] {
            assert_eq!(parse_timeout(text), parsed, "{text}");
        }
    }
}
