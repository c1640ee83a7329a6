//! Errors of creating, parsing, combining and comparing resources.
//!
//! Messages repeat input only shortened and escaped, because it can come from any caller.

use super::{Dimension, ResourceType};

/// Maximum length of input text in a message, in characters.
const SHOWN_MAX: usize = 64;

/// Reason why a resource cannot be created, parsed, combined or compared. The message names the problem, its place and,
/// where it is not obvious, the remedy.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ResourceError {
    /// The name is not a resource type.
    #[error("unknown resource type `{name}`: use one of {}", ResourceType::ALL.map(ResourceType::as_str).join(", "))]
    UnknownType {
        /// The given name, shortened.
        name: String,
    },
    /// A given amount is negative.
    #[error("{dimension} is {amount}: an amount can't be negative")]
    Negative {
        /// The dimension.
        dimension: Dimension,
        /// The given amount.
        amount: i64,
    },
    /// A subtraction would have a negative result.
    #[error("can't take {taken} of {dimension} from {from}: it would go below zero")]
    BelowZero {
        /// The dimension.
        dimension: Dimension,
        /// The amount before.
        from: i64,
        /// The amount to subtract.
        taken: i64,
    },
    /// The result does not fit in 63 bits.
    #[error("{dimension} overflows: the largest amount is {max}", max = i64::MAX)]
    Overflow {
        /// The dimension.
        dimension: Dimension,
    },
    /// A divisor is zero in a dimension.
    #[error("can't divide {dimension} by zero")]
    DivideByZero {
        /// The dimension.
        dimension: Dimension,
    },
    /// The rate is not a finite number of zero or more.
    #[error("can't scale a resource by {rate}: the rate must be a finite number, zero or more")]
    InvalidRate {
        /// The given rate.
        rate: f32,
    },
    /// The integer divisor is below one.
    #[error("can't divide a resource by {divisor}: the divisor must be 1 or more")]
    InvalidDivisor {
        /// The given divisor.
        divisor: i64,
    },
    /// Amounts of different queues or namespaces cannot be combined or compared.
    #[error("the resources are in different queues or namespaces: `{left}` and `{right}`")]
    DifferentQueue {
        /// Name on the left side.
        left: String,
        /// Name on the right side.
        right: String,
    },
    /// One type cannot be projected onto the other.
    #[error("a {from} resource can't stand for a {onto} resource: give one of type {onto}")]
    Unanswerable {
        /// The given type.
        from: ResourceType,
        /// The required type.
        onto: ResourceType,
    },
    /// A requested dimension is not provided.
    #[error("{dimension} is not provided there: request only the registered dimensions")]
    UnknownDimension {
        /// The dimension.
        dimension: Dimension,
    },
    /// An invalid queue name, namespace, application id or custom name.
    #[error("the {what} {problem}")]
    InvalidName {
        /// Kind of the name: `queue name`, `namespace`, ...
        what: &'static str,
        /// The problem.
        problem: &'static str,
    },
    /// A Special with too many or too long custom names.
    #[error(
        "a Special resource of {names} names in {bytes} bytes is too large: at most {names_max} names in {bytes_max} \
         bytes"
    )]
    TooManyNames {
        /// Number of names.
        names: usize,
        /// Length of all names, in bytes.
        bytes: usize,
        /// Maximum number of names.
        names_max: usize,
        /// Maximum length of all names, in bytes.
        bytes_max: usize,
    },
    /// A JSON document above the maximum length.
    #[error("the JSON of a resource takes {bytes} bytes: at most {max}")]
    DocumentTooLong {
        /// Length in bytes.
        bytes: usize,
        /// Maximum length in bytes.
        max: usize,
    },
    /// The text is not JSON.
    #[error("the resource is not valid JSON: {reason}")]
    Syntax {
        /// Message of the parser, with line and column.
        reason: String,
    },
    /// A required JSON field is missing. Linkis reads a missing field as unlimited.
    #[error("field `{field}` is missing: every amount must be given, none is unlimited")]
    MissingField {
        /// Path, such as `yarnResource.queueMemory`.
        field: String,
    },
    /// A JSON field that the type does not have.
    #[error("field `{field}` is unknown here: known are {known}")]
    UnknownField {
        /// Path, shortened.
        field: String,
        /// Known fields at this place.
        known: String,
    },
    /// A JSON field occurs twice.
    #[error("field `{field}` is given twice")]
    DuplicateField {
        /// Path, shortened.
        field: String,
    },
    /// A JSON field has a value of the wrong kind.
    #[error("field `{field}` is {found}: it must be {expected}")]
    InvalidField {
        /// Path, shortened.
        field: String,
        /// Kind of the given value.
        found: String,
        /// Required kind.
        expected: &'static str,
    },
    /// Two JSON fields that mean one amount differ.
    #[error("fields `{field}` ({value}) and `{other}` ({other_value}) are one amount and must agree")]
    Disagreement {
        /// Path of the first field.
        field: String,
        /// Value of the first field.
        value: i64,
        /// Path of the second field.
        other: String,
        /// Value of the second field.
        other_value: i64,
    },
    /// A text that is not a size.
    #[error("`{text}` is not a size: write a number and one of b, k, m, g, t, p, for example 50b, 100k, 1.5g")]
    InvalidSize {
        /// The given text, shortened.
        text: String,
    },
    /// A size above the largest amount.
    #[error("`{text}` is too large: a size is at most {max} bytes", max = i64::MAX)]
    SizeOverflow {
        /// The given text, shortened.
        text: String,
    },
}

impl ResourceError {
    pub(super) fn unknown_type(name: &str) -> Self {
        Self::UnknownType { name: shown(name) }
    }
}

/// Returns input text in a form for messages: short and printable.
pub(super) fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN_MAX).is_some() {
        shown.push_str("...");
    }
    shown
}
