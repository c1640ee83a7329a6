//! Times as text.

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// Returns the time in RFC 3339 form; years outside its range use another form.
pub fn rfc3339(at: OffsetDateTime) -> String {
    at.format(&Rfc3339).unwrap_or_else(|_| at.to_string())
}
