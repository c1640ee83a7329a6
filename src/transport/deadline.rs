//! How long a call may wait: until its own gRPC deadline, and never longer than the server allows.

use std::time::Duration;

use tokio::time::Instant;
use tonic::{codegen::http::HeaderMap, metadata::MetadataMap};

use crate::domain::name::FieldError;

/// Header with the time that the caller gives the call.
const TIMEOUT: &str = "grpc-timeout";

/// How much of a caller's time is left for the answer to reach it: one part of so many, between these. Many callers may have the same
/// deadline, and all of them are to be answered before it.
const MARGIN_PART: u32 = 10;
const MARGIN_MIN: Duration = Duration::from_millis(20);
const MARGIN_MAX: Duration = Duration::from_millis(500);

/// When the wait of a call that arrives now has to end.
pub fn of_call(metadata: &MetadataMap, longest: Duration) -> Instant {
    let asked = metadata.get(TIMEOUT).and_then(|value| value.to_str().ok()).and_then(parse_timeout);
    let margin = |asked: Duration| (asked / MARGIN_PART).clamp(MARGIN_MIN, MARGIN_MAX).min(asked / 4);
    let wait = asked.map_or(longest, |asked| longest.min(asked.saturating_sub(margin(asked))));
    Instant::now() + wait
}

/// Returns the time that the caller gives a call with these headers; `None` if it does not say.
///
/// # Errors
/// If the header is malformed.
pub fn of_headers(headers: &HeaderMap) -> Result<Option<Duration>, FieldError> {
    let Some(value) = headers.get(TIMEOUT) else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(parse_timeout);
    let problem = "is no timeout; send 1 to 8 digits and a unit of H, M, S, m, u or n, such as 500m";
    timeout.map(Some).ok_or_else(|| FieldError::new(TIMEOUT, problem))
}

/// A `grpc-timeout` header: up to eight digits and a unit.
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
    fn timeouts_are_read_as_grpc_writes_them() {
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
