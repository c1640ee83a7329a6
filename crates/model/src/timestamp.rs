//! Moments as people and programs read them.

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// As RFC 3339 has it; years that it has no digits for, in a form of their own.
pub fn rfc3339(at: OffsetDateTime) -> String {
    at.format(&Rfc3339).unwrap_or_else(|_| at.to_string())
}
