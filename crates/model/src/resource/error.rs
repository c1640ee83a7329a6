//! What can be wrong with a resource.

use super::{Dimension, ResourceType};

/// Most characters of somebody else's text that a message repeats.
const SHOWN_MAX: usize = 64;

/// Why a resource can't be made, read, combined or compared. The message says what is wrong, where, and what to do
/// where that isn't obvious.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ResourceError {
    /// No resource type has this name.
    #[error("unknown resource type `{name}`: use one of {}", ResourceType::ALL.map(ResourceType::as_str).join(", "))]
    UnknownType {
        /// The name as given, shortened.
        name: String,
    },
    /// An amount was given below zero.
    #[error("{dimension} is {amount}: an amount can't be negative")]
    Negative {
        /// Where.
        dimension: Dimension,
        /// What was given.
        amount: i64,
    },
    /// Subtracting would leave less than nothing.
    #[error("can't take {taken} of {dimension} from {from}: it would go below zero")]
    BelowZero {
        /// Where.
        dimension: Dimension,
        /// What there was.
        from: i64,
        /// What was to be taken away.
        taken: i64,
    },
    /// The result does not fit in 63 bits.
    #[error("{dimension} overflows: the largest amount is {max}", max = i64::MAX)]
    Overflow {
        /// Where.
        dimension: Dimension,
    },
    /// A divisor has nothing in a dimension.
    #[error("can't divide {dimension} by zero")]
    DivideByZero {
        /// Where.
        dimension: Dimension,
    },
    /// A scaling rate that isn't a finite number of zero or more.
    #[error("can't scale a resource by {rate}: the rate must be a finite number, zero or more")]
    InvalidRate {
        /// What was given.
        rate: f32,
    },
    /// A whole divisor below one.
    #[error("can't divide a resource by {divisor}: the divisor must be 1 or more")]
    InvalidDivisor {
        /// What was given.
        divisor: i64,
    },
    /// Amounts of two queues or two namespaces can't be combined or compared.
    #[error("the resources are in different queues or namespaces: `{left}` and `{right}`")]
    DifferentQueue {
        /// The name on the left-hand side.
        left: String,
        /// The name on the right-hand side.
        right: String,
    },
    /// One type has no view as the other.
    #[error("a {from} resource can't stand for a {onto} resource: give one of type {onto}")]
    Unanswerable {
        /// The type given.
        from: ResourceType,
        /// The type needed.
        onto: ResourceType,
    },
    /// A custom dimension is asked of something that does not count it.
    #[error("{dimension} is not counted there: ask only for the dimensions that were registered")]
    UnknownDimension {
        /// Which.
        dimension: Dimension,
    },
    /// A queue name, namespace, application id or custom name that can't be one.
    #[error("the {what} {problem}")]
    InvalidName {
        /// What it names: `queue name`, `namespace`, ...
        what: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A Special with too many custom names, or too long ones in all.
    #[error(
        "a Special resource of {names} names in {bytes} bytes is too large: at most {names_max} names in {bytes_max} \
         bytes"
    )]
    TooManyNames {
        /// How many names.
        names: usize,
        /// The bytes of all names together.
        bytes: usize,
        /// How many names there may be.
        names_max: usize,
        /// How many bytes there may be.
        bytes_max: usize,
    },
    /// A JSON document beyond the limit.
    #[error("the JSON of a resource takes {bytes} bytes: at most {max}")]
    DocumentTooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// Text that isn't JSON.
    #[error("the resource is not valid JSON: {reason}")]
    Syntax {
        /// What the parser says, with line and column.
        reason: String,
    },
    /// A JSON field that must be there and isn't. Linkis reads it as unlimited.
    #[error("field `{field}` is missing: every amount must be given, none is unlimited")]
    MissingField {
        /// The path, e.g. `yarnResource.queueMemory`.
        field: String,
    },
    /// A JSON field that has no meaning in this type.
    #[error("field `{field}` is unknown here: known are {known}")]
    UnknownField {
        /// The path, shortened.
        field: String,
        /// The fields that mean something at that place.
        known: String,
    },
    /// A JSON field that is there twice.
    #[error("field `{field}` is given twice")]
    DuplicateField {
        /// The path, shortened.
        field: String,
    },
    /// A JSON field with a value of the wrong kind.
    #[error("field `{field}` is {found}: it must be {expected}")]
    InvalidField {
        /// The path, shortened.
        field: String,
        /// What was found.
        found: String,
        /// What is needed.
        expected: &'static str,
    },
    /// Two JSON fields that stand for one amount and differ.
    #[error("fields `{field}` ({value}) and `{other}` ({other_value}) are one amount and must agree")]
    Disagreement {
        /// One path.
        field: String,
        /// Its value.
        value: i64,
        /// The other path.
        other: String,
        /// The other value.
        other_value: i64,
    },
    /// A size string that isn't one.
    #[error("`{text}` is not a size: write a number and one of b, k, m, g, t, p, for example 50b, 100k, 1.5g")]
    InvalidSize {
        /// What was given, shortened.
        text: String,
    },
    /// A size string beyond what an amount can hold.
    #[error("`{text}` is too large: a size is at most {max} bytes", max = i64::MAX)]
    SizeOverflow {
        /// What was given, shortened.
        text: String,
    },
}

impl ResourceError {
    pub(super) fn unknown_type(name: &str) -> Self {
        Self::UnknownType { name: shown(name) }
    }
}

/// Somebody else's text as a message may repeat it: short and printable.
pub(super) fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN_MAX).is_some() {
        shown.push_str("...");
    }
    shown
}
