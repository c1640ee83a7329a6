//! Enumerations that the model and the messages have with the same variants, and their conversions.
//!
//! `from` converts to the message. `read` converts to the model, and returns `None` for the unspecified value. Callers: the
//! other conversions.

use crate::v1 as proto;
use rm_model::{
    em_order::EmOrder, external::QueueCheckBasis, limit_mode::LimitMode, name::FieldError, overview::EmState,
    policy::Check, queue::QueueState, reclaim::ReclaimMode, report::Health, selector::Placement, usage_sum::UsageBy,
};

macro_rules! enumeration {
    ($name:ident: $($variant:ident),+) => {
        impl From<$name> for proto::$name {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => Self::$variant,)+
                }
            }
        }

        impl proto::$name {
            /// Converts to the model; `None` for the unspecified value.
            pub fn read(self) -> Option<$name> {
                match self {
                    Self::Unspecified => None,
                    $(Self::$variant => Some($name::$variant),)+
                }
            }
        }
    };
}

enumeration!(Check: Creator, User, Labels);
enumeration!(EmOrder: Fullest, Urgent);
enumeration!(EmState: Healthy, Unreported, Warn, Unhealthy, Draining, Silent, Unregistering);
enumeration!(Health: Healthy, Warn, Unhealthy);
enumeration!(LimitMode: Enforced, Advisory, Off);
enumeration!(Placement: Spread, Pack);
enumeration!(QueueCheckBasis: Snapshot, LastKnown, Unchecked);
enumeration!(QueueState: Running, Draining, Stopped);
enumeration!(ReclaimMode: Off, Observe, Advise, Stop);
enumeration!(UsageBy: User, Creator, EngineType, Em);

/// Returns the value of an enumeration that a message contains as a number.
///
/// # Errors
/// A number without a meaning in this release.
pub fn known<E: TryFrom<i32>>(field: &str, number: i32) -> Result<E, FieldError> {
    E::try_from(number).map_err(|_| FieldError::new(field, format!("is {number}, which has no meaning")))
}
